//! A network as data: nodes in execution order, and the parameters they name.
//!
//! A [`Graph`] is independent of batches, memory and kernels; `plan` compiles it. Values are
//! described per sample as [`Dims`] (channels, height, width); a feature vector of `C` values is `C
//! × 1 × 1`. Nodes can only refer to nodes that were added before them, so a graph is acyclic by
//! construction.

mod builder;
mod conv_geometry;
mod cost;
mod dropout;
mod group;
mod ids;
mod node;
mod optimiser;
mod params;
mod pool;
mod recurrent;
mod step_factors;
mod widening;
mod width_init;

use std::sync::Arc;

pub(crate) use builder::BATCH_NORM_MOMENTUM;
pub use builder::GraphBuilder;
pub use conv_geometry::ConvGeometry;
pub use dropout::DropoutSpec;
pub(crate) use dropout::{DROPOUT_NUMBERS, DrawSource};
pub use group::GroupSpec;
pub use ids::{BufferId, GroupId, NodeId, ParamId};
pub use node::{BlendOperands, LstmParams, Node, NodeOp};
pub(crate) use optimiser::{FromHyperparameters, HYPERPARAMETERS};
pub use optimiser::{Optimiser, OptimiserKind};
pub use params::{BufferSpec, Init, ParamKind, ParamSpec};
pub use recurrent::LstmNodes;
pub use step_factors::StepFactors;
pub(crate) use widening::{TensorOrigin, Widening};
pub use width_init::WidthInit;

pub use crate::dims::Dims;
pub use crate::kernels::blend::BlendMode;
pub use crate::kernels::elementwise::UnaryFunction;
pub use crate::kernels::optim::{AdamConfig, LionConfig, MuonConfig, SgdConfig};
pub use crate::kernels::pool::PoolGeometry;

/// A finished network: nodes in execution order, one of which is the output.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// Nodes in execution order.
    pub nodes: Vec<Node>,
    /// Parameters in the order they were declared.
    pub params: Vec<ParamSpec>,
    /// Buffers in the order they were declared.
    pub buffers: Vec<BufferSpec>,
    /// Parameter groups; the host is the first.
    pub groups: Vec<GroupSpec>,
    /// The node whose value is the output: the logits `[classes]`, or another value
    /// ([`GraphBuilder::finish_at`]).
    pub output: NodeId,
    /// Length of the alpha vector.
    pub alphas: usize,
    /// Dropout layers in the order of their nodes.
    pub dropouts: Vec<DropoutSpec>,
    /// Factors of the host's optimiser steps, if there are any ([`Graph::with_step_factors`]).
    pub step_factors: Option<Arc<StepFactors>>,
}

impl Graph {
    /// The shape of the input per sample.
    pub fn input_dims(&self) -> Dims {
        self.nodes[0].dims
    }

    /// The id of the parameter at a position of [`Graph::params`].
    pub fn param_id(&self, index: usize) -> ParamId {
        ParamId(index)
    }

    /// Number of inputs; the batch is the first.
    pub fn inputs(&self) -> usize {
        self.nodes.iter().filter(|n| n.op.input().is_some()).count()
    }

    /// Channels of the output: classes, labels or numbers.
    pub fn classes(&self) -> usize {
        self.nodes[self.output.0].dims.c
    }

    /// Whether the graphs are equal but for the numbers of their optimisers, the values of step
    /// factors, the names of dropout layers, and their rates above 0: networks of the two share
    /// plans.
    pub fn has_topology_of(&self, other: &Graph) -> bool {
        let Self { nodes, params, buffers, groups, output, alphas, dropouts, step_factors } = self;
        let like = |a: &GroupSpec, b: &GroupSpec| {
            let alike = a.optimiser.kind() == b.optimiser.kind();
            a.name == b.name && alike && a.variants.len() == b.variants.len()
        };
        let drops = |graph: &[DropoutSpec]| -> Vec<(bool, GroupId)> {
            graph.iter().map(|layer| (layer.rate > 0.0, layer.group)).collect()
        };
        (output, alphas) == (&other.output, &other.alphas)
            && drops(dropouts) == drops(&other.dropouts)
            && step_factors.is_some() == other.step_factors.is_some()
            && groups.len() == other.groups.len()
            && groups.iter().zip(&other.groups).all(|(a, b)| like(a, b))
            && (nodes, params, buffers) == (&other.nodes, &other.params, &other.buffers)
    }

    /// Gives some parameters other numbers of the optimiser than their group has. For a parameter
    /// and its group's optimiser, `of` returns the number of a rule and the optimiser under this
    /// rule, or `None` for the group's. Parameters of one group and rule share an optimiser, so the
    /// topology does not depend on numbers. The clip norm remains the group's.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for an optimiser of another kind than the
    /// group's.
    pub fn vary_optimisers(
        &mut self,
        of: impl Fn(&ParamSpec, &Optimiser) -> Option<(usize, Optimiser)>,
    ) -> crate::Result<()> {
        let mut rules: Vec<Vec<usize>> = vec![vec![]; self.groups.len()];
        self.groups.iter_mut().for_each(|group| group.variants.clear());
        for param in &mut self.params {
            let (group, rules) = (&mut self.groups[param.group.0], &mut rules[param.group.0]);
            param.variant = 0;
            let Some((rule, optimiser)) = of(param, &group.optimiser) else { continue };
            let [expected, got] = [&group.optimiser, &optimiser].map(Optimiser::kind);
            if expected != got {
                let (expected, got) = (format!("{expected:?}"), format!("{got:?}"));
                return Err(crate::Error::argument("vary_optimisers", "of", expected, got));
            }
            let known = rules.iter().position(|known| *known == rule);
            let at = known.unwrap_or_else(|| {
                rules.push(rule);
                group.variants.push(optimiser);
                rules.len() - 1
            });
            param.variant = at + 1;
        }
        Ok(())
    }

    /// Trained elements, in PyTorch's shapes (padding lanes not counted), of one group or of all.
    pub fn parameters(&self, group: Option<GroupId>) -> usize {
        let of_group = |p: &&ParamSpec| group.is_none_or(|g| p.group == g);
        self.params.iter().filter(of_group).map(|p| p.shape.iter().product::<usize>()).sum()
    }
}
