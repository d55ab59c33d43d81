//! Keeping replicas of a network alike: statistics, copies, fingerprints.

use std::sync::Arc;

use meristem_device::{Stream, Tensor};

use super::groups::{self, Group};
use super::{Network, Run};
use crate::error::{Error, Result};
use crate::metrics;
use crate::ops::{Spec, state};
use crate::plan::{Mode, Phase, Space, Span, Step};

impl Network {
    /// The forward pass of a training step and no more: each batch norm adds the batch's
    /// statistics, with the parameters as they are, to its running ones. Ends what
    /// [`Network::differentiate`] began. One launch; waits for nothing.
    ///
    /// # Errors
    /// As [`Network::train_step`].
    #[track_caller]
    pub fn observe(&mut self, inputs: &Tensor) -> Result<()> {
        let batch = self.check_inputs("observe", inputs)?;
        let plan = self.plan(batch, Mode::Train)?;
        let run = Run::of(&plan, Phase::Forward..=Phase::Forward);
        self.launch("observe", run, &self.tensors(&[inputs], None, 0))
    }

    /// Running statistics (f32) and counters (i64) of each group that has some, where they lie.
    /// Replicas that saw other samples have other statistics; training does not read them.
    pub fn statistics(&self) -> impl Iterator<Item = (&Tensor, &Tensor)> {
        let both = self.groups.iter().map(|group| (&group.state, &group.counters));
        both.filter(|(state, counters)| state.numel() + counters.numel() > 0)
    }

    /// Another network with the same graph and options on another stream of the device, to
    /// [`follow`](Network::follow) this one. Does not wait.
    ///
    /// # Errors
    /// Memory.
    pub fn replica(&self, stream: &Stream) -> Result<Network> {
        Network::with_plans(stream, Arc::clone(self.graph()), self.options, &self.plans)
    }

    /// Takes over graph, parameters, running statistics, what the optimiser remembers, and alphas
    /// of a network on the same device, and empties the metrics. In stream order: what either
    /// stream got before counts. Does not wait.
    ///
    /// # Errors
    /// [`Error::Argument`] for a network with other options; as
    /// [`Network::set_graph`].
    pub fn follow(&mut self, leader: &Network) -> Result<()> {
        if leader.options != self.options {
            let (expected, got) = (format!("{:?}", self.options), format!("{:?}", leader.options));
            return Err(Error::argument("follow", "options", expected, got));
        }
        let from: Vec<Tensor> = std::iter::once(&leader.alphas)
            .chain(leader.groups.iter().flat_map(Group::tensors))
            .map(|tensor| tensor.on(&self.stream))
            .collect::<Result<_, _>>()?;
        self.set_graph(Arc::clone(leader.graph()))?;
        let to = std::iter::once(&self.alphas).chain(self.groups.iter().flat_map(Group::tensors));
        groups::copy(&self.stream, "follow", from.iter().zip(to))?;
        // As the device's alphas are now those of the leader; not after an error.
        self.alpha_values.clone_from(&leader.alpha_values);
        self.reset_metrics()
    }

    /// Hashes parameters, running statistics, what the optimiser remembers and counters, bit for
    /// bit, into [`Metrics::fingerprint`](crate::Metrics::fingerprint). FNV-1a over words of 32
    /// bits: any one difference shows. One launch; does not wait.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn fingerprint(&self) -> Result<()> {
        let spans = self.group_spans();
        let tensors = spans.iter().map(|span| Spec::new(span.dtype, span.len)).collect();
        let op = state::Op::Fingerprint(tensors);
        let step = Step::new(op, &spans, &[metrics::FINGERPRINT]);
        self.launch_steps("fingerprint", vec![step])
    }

    /// All of each group: parameters, what the optimiser remembers, running statistics, counters.
    pub(super) fn group_spans(&self) -> Vec<Span> {
        let of_group = |(g, group): (usize, &Group)| {
            let id = crate::graph::GroupId(g);
            let spaces =
                [Space::Values(id), Space::Momentum(id), Space::State(id), Space::Counters(id)];
            let all = spaces.into_iter().zip(group.tensors());
            all.map(|(space, of)| Span::new(space, of.dtype(), 0, of.numel())).collect::<Vec<_>>()
        };
        self.groups.iter().enumerate().flat_map(of_group).collect()
    }
}
