//! More features of a layer.
//!
//! - here: the wider network, with state carried over;
//! - `probe`: the further features that an initialisation finds by measuring gradients; `layer`:
//!   the tensors of the layer and of its reader; `patches`: what a convolution reads;
//! - `firefly`, `gradmax`, `tiny`, `variance_transfer`: the formulas of these initialisations.

mod firefly;
mod gradmax;
mod layer;
mod patches;
mod probe;
mod tiny;
mod variance_transfer;

use std::collections::HashMap;
use std::sync::Arc;

pub use self::probe::WidthProbe;
use super::Network;
use crate::error::{Error, Result};
use crate::graph::{Graph, TensorOrigin, Widening, WidthInit};
use crate::init;
use crate::state::{HostTensor, StateDict};

/// Ending of the names of squared gradients.
const SQUARES: &str = ".exp_avg_sq";

/// Elements of the further features of a layer, by the names of the tensors that have them; other
/// elements are those of [`WidthInit::Zero`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FurtherFeatures {
    /// Further rows of tensors, such as incoming weights: `[features][…]`.
    rows: HashMap<String, Vec<f32>>,
    /// Further columns of tensors, which are outgoing weights: `[features][pixels][rows][kernel]`,
    /// with several pixels if the layer's image is flattened.
    columns: HashMap<String, Vec<f32>>,
    /// Factors of the elements that parameters, biases and running statistics had before.
    factors: HashMap<String, f32>,
}

impl FurtherFeatures {
    /// Writes the elements of a tensor into its wider form.
    fn write(&self, name: &str, origin: &TensorOrigin, wide: &mut [f32]) {
        if let Some(rows) = self.rows.get(name) {
            origin.set_further_rows(wide, rows);
        }
        if let Some(columns) = self.columns.get(name) {
            origin.set_further_columns(wide, columns);
        }
    }
}

impl Network {
    /// Growth in width: replaces the graph by one with the same layers, some of which have more
    /// features. The network computes the same function, but for rounding with
    /// [`WidthInit::Net2wider`] and [`WidthInit::VarianceTransfer`], and with the latter but for
    /// the ε of a batch norm. Features that were there keep their optimiser state and running
    /// statistics; new ones begin as in a new network. With [`WidthInit::Net2wider`] a copy has the
    /// state of its original, with the averages scaled by its share of the outgoing weights. Alphas
    /// stay, metrics are reset. Waits for the device: two read-backs.
    ///
    /// # Errors
    /// [`Error::Argument`] if the graph differs in more than features, if an operation that mixes
    /// features, such as layer norm, gets further ones, if the initialisation needs a
    /// [`WidthProbe`], or if several layers get wider at once with
    /// [`WidthInit::VarianceTransfer`]. As [`Network::set_graph`]; the network is then as it was.
    #[track_caller]
    pub fn widen(&mut self, graph: Arc<Graph>, init: WidthInit) -> Result<()> {
        if init.measures() {
            let expected = "one that measures no batches; for the others see `WidthProbe`";
            return Err(Error::argument("widen", "init", expected, init.name()));
        }
        let further = if init == WidthInit::VarianceTransfer {
            variance_transfer::features(self, &graph)?
        } else {
            FurtherFeatures::default()
        };
        self.widen_from(graph, init, &further)
    }

    /// As [`Network::widen`], with the further features that a [`WidthProbe`] found for this
    /// network and graph. Features of [`WidthInit::Tiny`] change the function, and those of
    /// [`WidthInit::Gradmax`] by the bias 1e-6 that they begin with.
    ///
    /// # Errors
    /// As [`Network::widen`].
    #[track_caller]
    pub fn widen_with(&mut self, graph: Arc<Graph>, further: &FurtherFeatures) -> Result<()> {
        self.widen_from(graph, WidthInit::Zero, further)
    }

    fn widen_from(
        &mut self,
        graph: Arc<Graph>,
        init: WidthInit,
        further: &FurtherFeatures,
    ) -> Result<()> {
        let (seed, env) = (self.options.seed, self.options.env);
        let widening = self.widening(&graph, init)?;
        let (values, moments) = (self.state_dict()?, self.momentum_dict()?);
        self.set_graph(graph)?;
        let (mut weights, mut state) = (HashMap::new(), HashMap::new());
        for param in &self.graph.params {
            let (name, factor) = (&param.name, further.factors.get(&param.name));
            let origin = widening.origin(name);
            if origin.is_none() && factor.is_none() {
                continue;
            }
            let new = init::values(param, seed, env);
            let len = new.len();
            let old = f32s(&values, name);
            let wide = origin.map_or_else(|| old.to_vec(), |of| of.weights(old, new));
            let mut wide = scaled(wide, factor.copied());
            if let Some(origin) = origin {
                further.write(name, origin, &mut wide);
            }
            weights.insert(name.clone(), wide);
            let kind = self.graph.groups[param.group.index()].optimiser.kind();
            for suffix in kind.suffixes(param.kind) {
                let (name, squared) = (format!("{name}{suffix}"), *suffix == SQUARES);
                let old = f32s(&moments, &name);
                let wide = origin.map_or_else(|| old.to_vec(), |of| of.moments(old, len, squared));
                // With batch norm the loss does not depend on the scale c of these weights, so
                // squares of gradients grow by 1/c². The momentum is scaled by c as the weights
                // are, so that an update keeps its size relative to them.
                let factor = factor.map(|c| if squared { 1.0 / (c * c) } else { *c });
                state.insert(name, scaled(wide, factor));
            }
        }
        for buffer in &self.graph.buffers {
            let (origin, factor) =
                (widening.origin(&buffer.name), further.factors.get(&buffer.name));
            let old = f32s(&values, &buffer.name);
            let wide = match (origin, factor) {
                (None, None) => continue,
                (None, Some(factor)) => scaled(old.to_vec(), Some(*factor)),
                (Some(origin), _) => {
                    let mut wide = origin.weights(old, vec![buffer.init; buffer.len]);
                    further.write(&buffer.name, origin, &mut wide);
                    wide
                }
            };
            weights.insert(buffer.name.clone(), wide);
        }
        self.weights().parameters()?.write(&weights)?;
        self.weights().moments()?.write(&state)
    }

    /// Origins of the tensors of a wider graph.
    fn widening(&self, graph: &Graph, init: WidthInit) -> Result<Widening> {
        let (seed, env) = (self.options.seed, self.options.env);
        Widening::new(self.graph(), graph, init, &|name| init::random(name, seed, env))
    }
}

/// The elements of a tensor that the network had before; there are none for a counter.
fn f32s<'a>(state: &'a StateDict, name: &str) -> &'a [f32] {
    state.get(name).and_then(HostTensor::as_f32).unwrap_or_default()
}

/// The elements times a factor, or as they are.
fn scaled(mut elements: Vec<f32>, factor: Option<f32>) -> Vec<f32> {
    if let Some(factor) = factor {
        elements.iter_mut().for_each(|x| *x *= factor);
    }
    elements
}
