//! Statistics of the activations that layers read.

use std::sync::Arc;

use meristem_device::Tensor;
use nalgebra::DMatrix;
use nalgebra::linalg::SymmetricEigen;

use super::{Network, NetworkOptions};
use crate::dims::Dims;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId, NodeOp};
use crate::loss::Loss;
use crate::state::StateDict;

/// Singular values above this count as directions, ε of NORTH.
const DIRECTION: f64 = 0.01;

/// Limit of the iterations of a decomposition, many times the usual number.
const ITERATIONS_MAX: usize = 100_000;

/// Measures the orthogonality of the activations that layers read, over batches.
///
/// Each pixel of an image is a sample. With M features, n samples and H of shape `[M, n]` the
/// orthogonality is the share of the singular values of `H/√n` above ε = 0.01: the effective
/// dimension over M, φ of Maile, Rachelson, Luga, Wilson, "When, where, and how to add new neurons
/// to ANNs", 2022 (arXiv 2202.08539). It is 1 if the features are independent, and falls as
/// features die or repeat others.
#[derive(Debug)]
pub struct ActivationProbe {
    layers: Vec<Activations>,
}

/// A network that ends with the activations that a layer reads.
#[derive(Debug)]
struct Activations {
    network: Network,
    /// Channels of these activations, before a flattening.
    features: usize,
    /// Sum of `h hᵀ` over samples.
    sum: DMatrix<f64>,
    samples: usize,
}

impl ActivationProbe {
    /// A probe of the inputs of layers, convolutions or linear ones, which are named by their
    /// weights. The network stays as it is. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Argument`] for a name that is no weight of such a layer; memory, a failed stream.
    pub fn new(network: &Network, readers: &[String]) -> Result<Self> {
        let state = network.state_dict()?;
        let of_layer = |reader: &String| Activations::new(network, &state, reader);
        Ok(Self { layers: readers.iter().map(of_layer).collect::<Result<_>>()? })
    }

    /// Adds a batch, as for [`Network::infer`]. Waits for the device.
    ///
    /// # Errors
    /// As [`Network::infer`].
    #[track_caller]
    pub fn add(&mut self, inputs: &Tensor) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| layer.add(inputs))
    }

    /// Floating-point operations of all passes for one sample.
    ///
    /// # Errors
    /// None: every network has a row of alphas.
    pub fn flops(&self) -> Result<u64> {
        self.layers.iter().map(|layer| Ok(layer.network.eval_flops(0..1)?.1)).sum()
    }

    /// The orthogonality φ of each layer's activations; NaN without samples, or if an activation is
    /// not finite.
    pub fn orthogonality(&self) -> Vec<f32> {
        self.layers.iter().map(|layer| layer.orthogonality().unwrap_or(f64::NAN) as f32).collect()
    }
}

impl Activations {
    fn new(network: &Network, state: &StateDict, reader: &str) -> Result<Self> {
        let graph = network.graph();
        let read = graph.nodes.iter().find_map(|node| match node.op {
            NodeOp::Conv2d { x, weight, .. } if graph.params[weight.index()].name == reader => {
                Some(x)
            }
            _ => None,
        });
        let Some(read) = read else {
            let expected = "weights of convolutions and linear layers";
            return Err(Error::argument("ActivationProbe", "readers", expected, reader));
        };
        // Features of an image that is flattened for the reader.
        let image = match graph.nodes[read.index()].op {
            NodeOp::Flatten(image) => image,
            _ => read,
        };
        let (features, network) =
            (graph.nodes[image.index()].dims.c, ending(network, state, vector(graph, read))?);
        Ok(Self { network, features, sum: DMatrix::zeros(features, features), samples: 0 })
    }

    fn add(&mut self, inputs: &Tensor) -> Result<()> {
        let values = self.network.infer(inputs, 0)?.to_vec::<f32>()?;
        let pixels = self.network.graph().classes() / self.features.max(1);
        for sample in values.chunks(self.features * pixels) {
            let matrix = DMatrix::from_fn(self.features, pixels, |feature, pixel| {
                f64::from(sample[feature * pixels + pixel])
            });
            self.sum.gemm(1.0, &matrix, &matrix.transpose(), 1.0);
            self.samples += pixels;
        }
        Ok(())
    }

    fn orthogonality(&self) -> Option<f64> {
        let mean = &self.sum / self.samples as f64;
        if !mean.iter().all(|x| x.is_finite()) {
            return None;
        }
        let found = SymmetricEigen::try_new(mean, f64::EPSILON, ITERATIONS_MAX)?;
        // Eigenvalues are the squares of the singular values.
        let directions = found.eigenvalues.iter().filter(|x| **x > DIRECTION * DIRECTION).count();
        Some(directions as f64 / self.features as f64)
    }
}

/// The graph that ends with a node, as a vector.
pub(super) fn vector(graph: &Graph, output: NodeId) -> Graph {
    let mut ending = Graph { output, ..graph.clone() };
    let dims = graph.nodes[output.index()].dims;
    if dims.h * dims.w > 1 {
        let dims = Dims { c: dims.numel(), h: 1, w: 1 };
        ending.nodes.push(Node { op: NodeOp::Flatten(output), dims });
        ending.output = NodeId(ending.nodes.len() - 1);
    }
    ending
}

/// A network of another graph of the same parameters, with the weights of `network` and row 0 of
/// its alphas.
pub(super) fn ending(network: &Network, state: &StateDict, graph: Graph) -> Result<Network> {
    // The loss may need outputs of another form.
    let options = NetworkOptions { loss: Loss::default(), ..network.options.clone() };
    let mut ending = Network::new(&network.stream, Arc::new(graph), options)?;
    ending.load_state_dict(state, true)?;
    let alphas = network.graph().alphas;
    if alphas > 0 {
        ending.set_alphas(&[network.alpha_values[..alphas].to_vec()])?;
    }
    Ok(ending)
}
