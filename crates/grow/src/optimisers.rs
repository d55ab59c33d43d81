//! Optimisers of hosts and modules.

use meristem_nn::graph::SgdConfig;

/// The host's optimiser and clip norm.
pub const HOST_SGD: SgdConfig =
    SgdConfig { lr: 0.01, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1.0 };

/// Each module's optimiser and clip norm: as the host's, without decay.
pub const MODULE_SGD: SgdConfig = SgdConfig { weight_decay: 0.0, ..HOST_SGD };
