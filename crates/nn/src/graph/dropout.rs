//! Dropout layers: rates, and keys of their draws.

use std::borrow::Cow;

use meristem_device::random::{Purpose, Rng};

use super::{Graph, GroupId, NodeId, NodeOp};
use crate::error::{Error, Result};
use crate::name_key::name_key;

/// Length of [`DropoutSpec::numbers`], the numbers of one dropout layer in device memory.
pub(crate) const DROPOUT_NUMBERS: usize = 5;

/// A dropout layer.
///
/// Its rate is no part of a plan but in device memory: networks with other rates share plans and
/// launches. Only a rate of 0 is another plan, that of the network without the layer: it has the
/// same steps, besides the count of batches, and so the same bits.
#[derive(Clone, Debug, PartialEq)]
pub struct DropoutSpec {
    /// Name, unique in the graph; the draws depend on it.
    pub name: String,
    /// Probability that an element is dropped, in `[0, 1)`.
    pub rate: f32,
    /// Group of parameters to which the layer belongs. The layers of a group share a count of
    /// batches, which begins at 0 when the group joins the network.
    pub group: GroupId,
}

/// Key of the draws of a network, and its share of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DrawSource {
    /// Seed of the network.
    pub(crate) seed: u64,
    /// Number of the env.
    pub(crate) env: u64,
    /// Number of the network's first sample in a batch that several networks share.
    pub(crate) first_sample: usize,
}

impl DropoutSpec {
    /// Checks the rate of the layer `name`.
    pub(crate) fn check(name: &str, rate: f32) -> Result<()> {
        if (0.0..1.0).contains(&rate) {
            return Ok(());
        }
        let (layer, expected) = (name.into(), "a rate from 0 to below 1");
        Err(Error::Unsupported { layer, expected, got: rate.to_string() })
    }

    /// The layer's numbers for a network: the threshold, below which a word of 32 bits drops its
    /// element; the factor of kept elements, `1/(1 − rate)`; the key of the draws, two words; the
    /// number of the first sample. All are exact.
    pub(crate) fn numbers(&self, of: DrawSource) -> [f64; DROPOUT_NUMBERS] {
        let rate = f64::from(self.rate);
        let threshold = (rate * 4_294_967_296.0).round().min(f64::from(u32::MAX));
        let mut key = Rng::new(of.seed, Purpose::Dropout, of.env, name_key(&self.name));
        let [first, second] = [key.next_u32(), key.next_u32()].map(f64::from);
        let scale = f64::from((1.0 / (1.0 - rate)) as f32);
        [threshold, scale, first, second, of.first_sample as f64]
    }
}

impl Graph {
    /// The graph without the dropout layers that only pass their input on: in evaluation (`trains`
    /// is false) all of them, in training those with a rate of 0. Nodes keep their numbers; the
    /// nodes of these layers stay in the list, but no node reads them.
    pub(crate) fn without_idle_dropout(&self, trains: bool) -> Cow<'_, Self> {
        let idle = |rate: f32| !trains || rate == 0.0;
        if !self.dropouts.iter().any(|layer| idle(layer.rate)) {
            return Cow::Borrowed(self);
        }
        let mut graph = self.clone();
        let mut same: Vec<NodeId> = (0..graph.nodes.len()).map(NodeId).collect();
        for (i, node) in graph.nodes.iter_mut().enumerate() {
            node.op.for_each_input(|input| *input = same[input.0]);
            if let NodeOp::Dropout { x, layer } = node.op
                && idle(self.dropouts[layer].rate)
            {
                same[i] = x;
            }
        }
        graph.output = same[graph.output.0];
        Cow::Owned(graph)
    }

    /// The same graph with this rate in all dropout layers.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a rate outside `[0, 1)`.
    pub fn with_dropout(self, rate: f32) -> Result<Self> {
        self.with_dropout_where(rate, |_| true)
    }

    /// The same graph with this rate in all dropout layers of a group.
    ///
    /// # Errors
    /// As [`Graph::with_dropout`].
    pub fn with_dropout_of(self, group: GroupId, rate: f32) -> Result<Self> {
        self.with_dropout_where(rate, |layer| layer.group == group)
    }

    fn with_dropout_where(
        mut self,
        rate: f32,
        is_meant: impl Fn(&DropoutSpec) -> bool,
    ) -> Result<Self> {
        for layer in self.dropouts.iter_mut().filter(|layer| is_meant(layer)) {
            DropoutSpec::check(&layer.name, rate)?;
            layer.rate = rate;
        }
        Ok(self)
    }

    /// Groups with dropout layers, in ascending order, each once.
    pub(crate) fn groups_with_dropout(&self) -> Vec<GroupId> {
        let mut groups: Vec<GroupId> = self.dropouts.iter().map(|layer| layer.group).collect();
        groups.sort_unstable_by_key(|group| group.index());
        groups.dedup();
        groups
    }
}
