//! Further features of a layer, found by measuring gradients on batches.
//!
//! A wider copy of the network is differentiated; its weights do not change. It has more further
//! features than are asked for: candidates with random incoming weights and outgoing weights 0
//! (`firefly`), or one for each outgoing weight of a feature, with this weight 1, the others and
//! the incoming weights 0 (`gradmax`, `tiny`). The gradient of the incoming weights of the latter
//! is `E[δ hᵀ]`, row by row, whatever lies between the layer and its reader: pools, activation
//! functions, a flattened image.

use std::collections::HashMap;
use std::sync::Arc;

use meristem_device::Tensor;
use nalgebra::DMatrix;

use super::layer::WideLayer;
use super::tiny::Pair;
use super::{FurtherFeatures, f32s, firefly, gradmax, tiny};
use crate::error::{Error, Result};
use crate::graph::{Graph, Widening, WidthInit};
use crate::init;
use crate::metrics::Metrics;
use crate::network::Network;
use crate::network::activations::ending;

/// Bias of a feature with incoming weights 0, so that the derivative of relu is 1.
const ACTIVE: f64 = 1e-6;

/// Measures gradients on batches, to find further features of a layer.
///
/// One or two passes over the same batches: [`WidthProbe::add`] for each of them, then
/// [`WidthProbe::end_pass`]. The network that is to become wider stays as it is.
#[derive(Debug)]
pub struct WidthProbe {
    init: WidthInit,
    /// A copy of the network.
    narrow: Network,
    /// The graph that it is to get.
    wide: Arc<Graph>,
    layer: WideLayer,
    measured: Measured,
    /// Inputs of the layer and of its reader, for `tiny`.
    activations: Option<LayerInputs>,
    /// Networks of the line search of `tiny`, with their further features.
    search: Vec<(Network, FurtherFeatures)>,
}

/// A network whose layer has further features to be measured.
#[derive(Debug)]
struct Measured {
    network: Network,
    layer: WideLayer,
    widening: Widening,
    /// Sums over samples of the gradients of their losses, by the names of parameters.
    gradients: HashMap<String, Vec<f64>>,
    samples: usize,
}

/// Networks that end with the inputs of a layer and of its reader, and sums of their outputs.
#[derive(Debug)]
struct LayerInputs {
    networks: [Network; 2],
    sums: tiny::Activations,
}

impl WidthProbe {
    /// Number of further features that a probe measures, for a network that is to get the graph
    /// `wide`. The graph with as many is for [`WidthProbe::new`].
    ///
    /// # Errors
    /// As [`Network::widen`]; [`Error::Argument`] for an initialisation that does not suit the
    /// layer.
    pub fn features(network: &Network, wide: &Graph, init: WidthInit) -> Result<usize> {
        let layer = WideLayer::new(wide, &network.widening(wide, WidthInit::Zero)?)?;
        layer.check(init)?;
        Ok(match init {
            WidthInit::Firefly => layer.features * firefly::CANDIDATES,
            _ => layer.outgoing.max(layer.features),
        })
    }

    /// A probe for a network that is to get the graph `wide`. `measured` is a graph with
    /// [`WidthProbe::features`] further features instead. Waits for the device.
    ///
    /// # Errors
    /// As [`WidthProbe::features`], and memory.
    pub fn new(
        network: &Network,
        wide: &Arc<Graph>,
        measured: Arc<Graph>,
        init: WidthInit,
    ) -> Result<Self> {
        let layer = WideLayer::new(wide, &network.widening(wide, WidthInit::Zero)?)?;
        layer.check(init)?;
        let narrow = copy(network)?;
        // Without dropout: gradients and activations are those of the network that is evaluated.
        let measured = Arc::new(Arc::unwrap_or_clone(measured).with_dropout(0.0)?);
        let measured = Measured::new(&narrow, measured, init)?;
        let pair = layer.pair().filter(|_| init == WidthInit::Tiny);
        let activations = pair.map(|pair| LayerInputs::new(&narrow, &layer, pair.clone()));
        let activations = activations.transpose()?;
        let wide = Arc::clone(wide);
        Ok(Self { init, narrow, wide, layer, measured, activations, search: vec![] })
    }

    /// Measures a batch, as for [`Network::train_step`]. Waits for the device.
    ///
    /// # Errors
    /// As [`Network::differentiate`].
    #[track_caller]
    pub fn add(&mut self, inputs: &Tensor, targets: &Tensor) -> Result<()> {
        if !self.search.is_empty() {
            let mut all = self.search.iter_mut();
            return all.try_for_each(|(network, _)| network.eval_step(inputs, targets, 0));
        }
        self.measured.add(inputs, targets)?;
        self.activations.iter_mut().try_for_each(|activations| activations.add(inputs))
    }

    /// Ends a pass over the batches. Returns the further features for [`Network::widen_with`], or
    /// `None` if another pass over the same batches is needed. If gradients or activations are not
    /// finite, the features of `gradmax` and `tiny` are those of [`WidthInit::Zero`]. Waits for the
    /// device.
    ///
    /// # Errors
    /// [`Error::Argument`] without a batch; memory, a failed stream.
    pub fn end_pass(&mut self) -> Result<Option<FurtherFeatures>> {
        if self.measured.samples == 0 {
            return Err(Error::argument("end_pass", "batches", "at least one", "none"));
        }
        match (&self.activations, self.search.is_empty()) {
            (Some(LayerInputs { sums, .. }), true) => {
                let (m, reader) = (self.measured.linear(), self.measured.reader());
                let best = tiny::features(sums, &m, &reader, self.layer.features);
                let Some(best) = best else { return Ok(Some(FurtherFeatures::default())) };
                self.begin_search(&best)?;
                Ok(None)
            }
            (Some(_), false) => self.best_amplitude().map(Some),
            (None, _) if self.init == WidthInit::Firefly => {
                self.measured.best_candidates(self.layer.features).map(Some)
            }
            (None, _) => {
                let (m, count) = (self.measured.incoming(), self.layer.features);
                let outgoing = gradmax::outgoing(&m, count, self.length()?);
                let Some(outgoing) = outgoing else { return Ok(Some(FurtherFeatures::default())) };
                let mut incoming = DMatrix::zeros(self.layer.incoming + 1, count);
                incoming.row_mut(self.layer.incoming).fill(ACTIVE);
                self.filled(&incoming, &outgoing).map(Some)
            }
        }
    }

    /// A score of the layer with `count` further features, after the first pass: larger if they are
    /// worth more. NaN without a batch, if gradients or activations are not finite, or if all
    /// gradients are 0; infinite if only the gradients of present features are 0. Waits for the
    /// device.
    ///
    /// - With [`WidthInit::Gradmax`] the gradient ratio of newborn features: the length of the
    ///   gradient of a further feature's incoming weights, divided by the length for a feature that
    ///   is there; both are root mean squares.
    /// - With [`WidthInit::Tiny`] the quotient Δη/η, by the formulas in `tiny.rs`: the fall of the
    ///   loss that further features add, as a part of the fall by changes of the reader's weights.
    ///
    /// # Errors
    /// [`Error::Argument`] for another initialisation; a failed stream.
    pub fn score(&self, count: usize) -> Result<f32> {
        if self.measured.samples == 0 {
            return Ok(f32::NAN);
        }
        let quotient = match (&self.activations, self.init) {
            (Some(LayerInputs { sums, .. }), _) => {
                let (m, reader) = (self.measured.linear(), self.measured.reader());
                tiny::expansion(sums, &m, &reader, count).map(|[now, further]| further / now)
            }
            (None, WidthInit::Gradmax) => {
                let m = self.measured.incoming();
                let further = gradmax::largest_gradient(&m, count, self.length()?);
                further.map(|further| further / self.measured.own_gradient())
            }
            (None, init) => {
                let expected = "`gradmax` or `tiny`, which measure the best features";
                return Err(Error::argument("score", "init", expected, init.name()));
            }
        };
        Ok(quotient.unwrap_or(f64::NAN) as f32)
    }

    /// Floating-point operations of this pass for one sample.
    ///
    /// # Errors
    /// None: every network has a row of alphas.
    pub fn flops(&self) -> Result<u64> {
        let forward = |network: &Network| Ok(network.eval_flops(0..1)?.1);
        if !self.search.is_empty() {
            return self.search.iter().map(|(network, _)| forward(network)).sum();
        }
        let prefixes = self.activations.iter().flat_map(|of| &of.networks);
        let inferred: u64 = prefixes.map(forward).sum::<Result<_>>()?;
        // A backward pass costs two forward passes.
        Ok(3 * forward(&self.measured.network)? + inferred)
    }

    /// Root mean square of the lengths of the outgoing weights of the layer's features.
    fn length(&self) -> Result<f64> {
        let state = self.narrow.state_dict()?;
        let weights = f32s(&state, &self.layer.reader);
        let features = (weights.len() / self.layer.outgoing.max(1)).max(1);
        let squares: f64 = weights.iter().map(|x| f64::from(*x).powi(2)).sum();
        Ok((squares / features as f64).sqrt())
    }

    /// The features with these weights. Features beyond the rank, without outgoing weights, are
    /// those of [`WidthInit::Zero`]: with zeros on both sides they would never learn.
    fn filled(&self, incoming: &DMatrix<f64>, outgoing: &DMatrix<f64>) -> Result<FurtherFeatures> {
        let mut features = self.layer.features(incoming, outgoing);
        let widening = self.narrow.widening(&self.wide, WidthInit::Zero)?;
        let rank = outgoing.column_iter().filter(|column| column.norm() > 0.0).count();
        let options = self.narrow.options();
        for param in &self.wide.params {
            let rows = features.rows.get_mut(&param.name);
            let (Some(rows), Some(origin)) = (rows, widening.origin(&param.name)) else { continue };
            let initial = origin.further_rows(&init::values(param, options.seed, options.env));
            let known = rows.len() / self.layer.features.max(1) * rank;
            rows[known..].copy_from_slice(&initial[known..]);
        }
        Ok(features)
    }

    /// Makes a network for each amplitude, and before them one with the features of
    /// [`WidthInit::Zero`], which stand for the amplitude 0.
    fn begin_search(&mut self, best: &tiny::Features) -> Result<()> {
        let scaled = |amplitude: &f64| {
            let factor = amplitude.sqrt();
            self.filled(&(&best.incoming * factor), &(&best.outgoing * factor))
        };
        let amplitudes = self.activations.iter().flat_map(|of| of.sums.amplitudes());
        let candidates = amplitudes.map(scaled);
        let candidates: Vec<FurtherFeatures> = std::iter::once(Ok(FurtherFeatures::default()))
            .chain(candidates)
            .collect::<Result<_>>()?;
        for features in candidates {
            let mut network = copy(&self.narrow)?;
            network.widen_with(Arc::clone(&self.wide), &features)?;
            self.search.push((network, features));
        }
        Ok(())
    }

    /// The further features with the smallest loss in the line search; of equal losses the smaller
    /// amplitude.
    fn best_amplitude(&mut self) -> Result<FurtherFeatures> {
        let mut best: Option<(f64, FurtherFeatures)> = None;
        for (network, features) in std::mem::take(&mut self.search) {
            let metrics = Metrics::parse(&network.metrics().to_vec()?);
            let loss = metrics.eval.first().and_then(|eval| eval.loss());
            let loss = loss.filter(|loss| loss.is_finite()).unwrap_or(f64::INFINITY);
            if best.as_ref().is_none_or(|(least, _)| loss < *least) {
                best = Some((loss, features));
            }
        }
        Ok(best.map(|(_, features)| features).unwrap_or_default())
    }
}

impl Measured {
    fn new(narrow: &Network, graph: Arc<Graph>, init: WidthInit) -> Result<Self> {
        let widening = narrow.widening(&graph, WidthInit::Zero)?;
        let layer = WideLayer::new(&graph, &widening)?;
        let features = match init {
            WidthInit::Firefly => candidates(&graph, &widening, narrow),
            _ => layer.unit_vectors(ACTIVE),
        };
        let mut network = copy(narrow)?;
        network.widen_with(graph, &features)?;
        Ok(Self { network, layer, widening, gradients: HashMap::new(), samples: 0 })
    }

    fn add(&mut self, inputs: &Tensor, targets: &Tensor) -> Result<()> {
        self.network.differentiate(inputs, targets, 1.0)?;
        // The gradient is that of the mean loss of the batch.
        let samples = inputs.dims()[0];
        for (name, gradient) in self.network.gradient_dict()?.iter() {
            let gradient = gradient.as_f32().unwrap_or_default();
            let sum =
                self.gradients.entry(name.into()).or_insert_with(|| vec![0.0; gradient.len()]);
            sum.iter_mut()
                .zip(gradient)
                .for_each(|(sum, x)| *sum += samples as f64 * f64::from(*x));
        }
        self.samples += samples;
        Ok(())
    }

    /// Mean gradient of a parameter over the samples.
    fn mean(&self, name: &str) -> Vec<f64> {
        let sums = self.gradients.get(name).map_or(&[][..], |sums| sums);
        sums.iter().map(|sum| sum / self.samples.max(1) as f64).collect()
    }

    /// `E[δ hᵀ]` times the slope of the features' functions at 0, see
    /// [`WideLayer::incoming_gradient`].
    fn incoming(&self) -> DMatrix<f64> {
        self.layer.incoming_gradient(|name| {
            let origin = self.widening.origin(name);
            origin.map(|origin| origin.further_rows(&self.mean(name))).unwrap_or_default()
        })
    }

    /// `E[δ hᵀ]` for features that are their sums of inputs.
    fn linear(&self) -> DMatrix<f64> {
        self.incoming() / self.layer.slope
    }

    /// See [`WideLayer::own_gradient`].
    fn own_gradient(&self) -> f64 {
        self.layer.own_gradient(|name| {
            let mut gradient = self.mean(name);
            let further = self.widening.origin(name).map(|origin| origin.further_rows(&gradient));
            // Further rows are the last ones.
            gradient.truncate(gradient.len() - further.map_or(0, |rows| rows.len()));
            gradient
        })
    }

    /// `E[δ bᵀ]`, see [`WideLayer::reader_gradient`].
    fn reader(&self) -> DMatrix<f64> {
        self.layer.reader_gradient(|name| self.mean(name))
    }

    /// The `count` best candidates, with their statistics of batch norm.
    fn best_candidates(&self, count: usize) -> Result<FurtherFeatures> {
        let mut found = FurtherFeatures::default();
        let Some(reader) = self.widening.origin(&self.layer.reader) else { return Ok(found) };
        let gradients = reader.further_columns(&self.mean(&self.layer.reader));
        let of_each: Vec<&[f64]> = gradients.chunks(self.layer.outgoing.max(1)).collect();
        let chosen = firefly::best(&of_each, count);
        let state = self.network.state_dict()?;
        for (name, origin) in self.widening.origins() {
            let rows = origin.further_rows(f32s(&state, name));
            let row = rows.len() / self.layer.features.max(1);
            if row > 0 {
                let of_chosen = chosen.iter().flat_map(|at| &rows[at * row..][..row]).copied();
                found.rows.insert(name.into(), of_chosen.collect());
            }
        }
        Ok(found)
    }
}

impl LayerInputs {
    fn new(narrow: &Network, layer: &WideLayer, pair: Pair) -> Result<Self> {
        let state = narrow.state_dict()?;
        let ending = |graph| ending(narrow, &state, graph);
        let [of_layer, of_reader] = layer.prefixes(narrow.graph()).map(ending);
        Ok(Self { networks: [of_layer?, of_reader?], sums: tiny::Activations::new(pair) })
    }

    fn add(&mut self, inputs: &Tensor) -> Result<()> {
        let [layer, reader] = &mut self.networks;
        let (of_layer, of_reader) = (layer.infer(inputs, 0)?, reader.infer(inputs, 0)?);
        self.sums.add(&of_layer.to_vec::<f32>()?, &of_reader.to_vec::<f32>()?);
        Ok(())
    }
}

/// Another network with the same weights and alphas.
fn copy(network: &Network) -> Result<Network> {
    let mut copy = network.replica(network.stream())?;
    copy.follow(network)?;
    Ok(copy)
}

/// Further features with random incoming weights, other ones each time that the layer becomes
/// wider.
fn candidates(graph: &Graph, widening: &Widening, network: &Network) -> FurtherFeatures {
    let mut features = FurtherFeatures::default();
    let options = network.options();
    for param in &graph.params {
        let Some(origin) = widening.origin(&param.name) else { continue };
        if origin.further().0 > 0 {
            let mut drawn = param.clone();
            let rows = param.shape.first().copied().unwrap_or(1);
            drawn.name = format!("{} with {rows} candidates", param.name);
            let values = init::values(&drawn, options.seed, options.env);
            features.rows.insert(param.name.clone(), origin.further_rows(&values));
        }
    }
    features
}
