//! Optimisers of a host and of its modules.

use meristem_nn::graph::{Optimiser, SgdConfig};

/// Optimisers and clip norms of a network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimisers {
    /// Optimiser of the host's parameters.
    pub host: Optimiser,
    /// Optimiser of each module, with a separate clip norm per module.
    pub module: Optimiser,
}

impl Default for Optimisers {
    /// The optimisers of `docs/growth.md`: SGD for the host, and the same without weight decay for
    /// modules.
    fn default() -> Self {
        let host = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1.0 };
        let module = SgdConfig { weight_decay: 0.0, ..host };
        Self { host: host.into(), module: module.into() }
    }
}
