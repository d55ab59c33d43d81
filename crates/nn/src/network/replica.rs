//! Keeping replicas of a network alike: copies, fingerprints.

use std::sync::Arc;

use meristem_device::{Stream, Tensor, read_back};

use super::groups::{self, GroupTensors};
use super::{Network, Plans};
use crate::error::{Error, Result};
use crate::metrics;
use crate::ops::{Spec, StateOp};
use crate::plan::{PlanStep, Space, SpaceSpan};

impl Network {
    /// Another network with the same graph and options on another stream, also of another device,
    /// to [`follow`](Network::follow) this one. Waits as [`Network::new`].
    ///
    /// # Errors
    /// [`Error::Precision`] on a device that does not compute in this network's precision; memory.
    pub fn replica(&self, stream: &Stream) -> Result<Network> {
        let is_near = stream.device() == self.stream.device();
        let plans = if is_near { self.plans.clone() } else { Plans::default() };
        Network::with_plans(stream, Arc::clone(self.graph()), self.options.clone(), &plans)
    }

    /// Takes over graph, parameters, running statistics, optimiser's state, and alphas of another
    /// network, and empties the metrics. In stream order: after all earlier commands of either
    /// stream. Does not wait on one device; from another device the tensors are read back first,
    /// which waits for it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a network with other options; as
    /// [`Network::set_graph`].
    pub fn follow(&mut self, leader: &Network) -> Result<()> {
        self.take_over(leader, GroupTensors::tensors)
    }

    /// As [`follow`](Network::follow), but the optimiser's state stays this network's own: it is
    /// carried over by name, as in [`Network::set_graph`]. Counts of optimiser steps are the
    /// leader's.
    ///
    /// # Errors
    /// As [`follow`](Network::follow).
    pub fn follow_weights(&mut self, leader: &Network) -> Result<()> {
        self.take_over(leader, GroupTensors::weights)
    }

    /// Takes over the graph, the alphas and the selected tensors of each group.
    fn take_over<const N: usize>(
        &mut self,
        leader: &Network,
        of: fn(&GroupTensors) -> [&Tensor; N],
    ) -> Result<()> {
        if leader.options != self.options {
            let (expected, got) = (format!("{:?}", self.options), format!("{:?}", leader.options));
            return Err(Error::argument("follow", "options", expected, got));
        }
        let from = std::iter::once(&leader.alphas).chain(leader.groups.iter().flat_map(of));
        let from: Vec<&Tensor> = from.collect();
        if self.stream.device() == leader.stream.device() {
            let from = from.into_iter().map(|tensor| Ok(tensor.on(&self.stream)?));
            let from: Vec<Tensor> = from.collect::<Result<_>>()?;
            self.set_graph(Arc::clone(leader.graph()))?;
            let to = std::iter::once(&self.alphas).chain(self.groups.iter().flat_map(of));
            groups::copy(&self.stream, "follow", from.iter().zip(to))?;
        } else {
            let from = read_back(&from)?;
            self.set_graph(Arc::clone(leader.graph()))?;
            let to = std::iter::once(&self.alphas).chain(self.groups.iter().flat_map(of));
            for (bytes, to) in from.into_iter().zip(to).filter(|(bytes, _)| !bytes.is_empty()) {
                to.copy_from_shared(Arc::new(bytes), 0)?;
            }
        }
        // The device's alphas are the leader's now; not after an error.
        self.alpha_values.clone_from(&leader.alpha_values);
        self.reset_metrics()
    }

    /// Hashes parameters, running statistics, optimiser's state and counters, bit for bit, into
    /// [`Metrics::fingerprint`](crate::Metrics::fingerprint). FNV-1a over words of 32 bits, which
    /// detects any single difference. One launch; does not wait.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn fingerprint(&self) -> Result<()> {
        self.fingerprint_of(&self.group_spans())
    }

    /// Hashes as [`fingerprint`](Network::fingerprint), without the optimiser's state: for replicas
    /// with optimisers of their own.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn fingerprint_weights(&self) -> Result<()> {
        let mut spans = self.group_spans();
        spans.retain(|span| !matches!(span.space, Space::OptimiserState(_)));
        self.fingerprint_of(&spans)
    }

    #[track_caller]
    fn fingerprint_of(&self, spans: &[SpaceSpan]) -> Result<()> {
        let tensors = spans.iter().map(|span| Spec::new(span.dtype, span.len)).collect();
        let op = StateOp::Fingerprint(tensors);
        let step = PlanStep::new(op, spans, &[metrics::FINGERPRINT]);
        self.launch_steps("fingerprint", vec![step])
    }

    /// All memories of each group: parameters, optimiser's state, running statistics, counters.
    pub(super) fn group_spans(&self) -> Vec<SpaceSpan> {
        let of_group = |(g, group): (usize, &GroupTensors)| {
            let id = crate::graph::GroupId(g);
            let spaces = [
                Space::Values(id),
                Space::OptimiserState(id),
                Space::RunningStats(id),
                Space::Counters(id),
            ];
            let all = spaces.into_iter().zip(group.tensors());
            all.map(|(space, of)| SpaceSpan::new(space, of.dtype(), 0, of.numel()))
                .collect::<Vec<_>>()
        };
        self.groups.iter().enumerate().flat_map(of_group).collect()
    }
}
