//! More features of a layer, with the function kept.

use std::collections::HashMap;
use std::sync::Arc;

use super::Network;
use crate::error::Result;
use crate::graph::{Graph, Widening, WidthInit};
use crate::init;
use crate::state::{HostTensor, StateDict};

/// Ending of the names of squared gradients.
const SQUARES: &str = ".exp_avg_sq";

impl Network {
    /// Growth in width: replaces the graph by one with the same layers, some of which have more
    /// features. The network computes the same function, but for rounding with
    /// [`WidthInit::Net2wider`]. Optimiser state and running statistics are carried over with the
    /// features; those of new features are as in a new network, and copies have those of their
    /// originals. Alphas stay, metrics are reset. Waits for the device: two read-backs.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) if the graph differs in more than features, or
    /// if an operation that mixes features, such as layer norm, gets further ones. As
    /// [`Network::set_graph`]; the network is then as it was.
    #[track_caller]
    pub fn widen(&mut self, graph: Arc<Graph>, init: WidthInit) -> Result<()> {
        let (seed, env) = (self.options.seed, self.options.env);
        let widening =
            Widening::new(self.graph(), &graph, init, &|name| init::random(name, seed, env))?;
        let (values, moments) = (self.state_dict()?, self.momentum_dict()?);
        self.set_graph(graph)?;
        let (mut weights, mut state) = (HashMap::new(), HashMap::new());
        for param in &self.graph.params {
            let Some(origin) = widening.origin(&param.name) else { continue };
            let new = init::values(param, seed, env);
            let len = new.len();
            weights.insert(param.name.clone(), origin.weights(f32s(&values, &param.name), new));
            let kind = self.graph.groups[param.group.index()].optimiser.kind();
            for suffix in kind.suffixes(param.kind) {
                let name = format!("{}{suffix}", param.name);
                let wide = origin.moments(f32s(&moments, &name), len, *suffix == SQUARES);
                state.insert(name, wide);
            }
        }
        for buffer in &self.graph.buffers {
            let Some(origin) = widening.origin(&buffer.name) else { continue };
            let (old, new) = (f32s(&values, &buffer.name), vec![buffer.init; buffer.len]);
            weights.insert(buffer.name.clone(), origin.weights(old, new));
        }
        self.weights().parameters()?.write(&weights)?;
        self.weights().moments()?.write(&state)
    }
}

/// The elements of a tensor that the network had before; there are none for a counter.
fn f32s<'a>(state: &'a StateDict, name: &str) -> &'a [f32] {
    state.get(name).and_then(HostTensor::as_f32).unwrap_or_default()
}
