//! A training step in two halves, so that replicas of a network on several ranks can exchange their
//! gradients in between; and what else keeps replicas alike.

use std::sync::Arc;

use meristem_device::{DType, Stream, Tensor};

use super::groups::{self, Group};
use super::metrics;
use super::{Network, Run, argument};
use crate::error::Result;
use crate::graph::Graph;
use crate::ops::{Op, Spec, elementwise, state};
use crate::plan::{Mode, Phase, Plan, Space, Span, Step};

/// A gradient in the arena.
#[derive(Debug)]
pub(super) struct Gradient {
    /// What it is of.
    plan: Arc<Plan>,
    /// Whether it was clipped.
    clipped: bool,
}

impl Network {
    /// The first half of [`Network::train_step`]: forward, loss, backward, metrics of the batch.
    /// The gradient is that of the batch's mean loss times `weight`; it lies on the device until
    /// the next step of any kind. One launch; waits for nothing.
    ///
    /// # Errors
    /// As [`Network::train_step`].
    #[track_caller]
    pub fn differentiate(&mut self, inputs: &Tensor, targets: &Tensor, weight: f32) -> Result<()> {
        let batch = self.check_batch("differentiate", inputs, targets)?;
        let plan = self.plan(batch, Mode::Train)?;
        let scaled = match weight {
            1.0 => vec![],
            factor => each_gradient(&plan, |len| elementwise::Op::Multiply { len, factor }),
        };
        let run = Run::of(&plan, Phase::Forward..=Phase::Backward).then(scaled);
        self.launch("differentiate", run, &self.tensors(&[inputs], Some(targets), 0))?;
        self.gradient = Some(Gradient { plan, clipped: false });
        Ok(())
    }

    /// In place of [`Network::differentiate`] where a replica has no samples: its gradient is zero.
    /// One launch; waits for nothing.
    ///
    /// # Errors
    /// [`Error::OneValuePerChannel`](crate::Error::OneValuePerChannel), memory, a failed stream.
    pub fn differentiate_nothing(&mut self) -> Result<()> {
        let plan = self.plan(self.options.batch_max, Mode::Train)?;
        let zeros = each_gradient(&plan, |len| elementwise::Op::Fill { len, value: 0.0 });
        self.launch_steps("differentiate_nothing", zeros)?;
        self.gradient = Some(Gradient { plan, clipped: false });
        Ok(())
    }

    /// The gradient of every parameter that one reaches, with its name: f32, flat and packed as
    /// [`layout`](crate::layout) says, where it lies. It is not clipped yet, and may be overwritten
    /// by launches of this stream, with what other ranks found.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) without a gradient.
    pub fn gradients(&self) -> Result<Vec<(&str, Tensor)>> {
        let Gradient { plan, .. } = self.gradient.as_ref().ok_or_else(|| missing("gradients"))?;
        views(self.graph(), plan, &self.arena)
    }

    /// Measures and clips the gradient now, not in [`Network::apply`]: that of each group, at
    /// `factor` times the norm that the group's optimiser allows. For an exchange that keeps back a
    /// part of what it is given: a sum with what was kept of many steps, clipped when it is sent at
    /// last, would be lost for the most part. One launch; waits for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) without a gradient, or clipped twice; a failed
    /// stream.
    pub fn clip(&mut self, factor: f32) -> Result<()> {
        let Gradient { plan, clipped } = self.gradient.as_mut().ok_or_else(|| missing("clip"))?;
        if std::mem::replace(clipped, true) {
            let expected = "one that was not clipped".into();
            return Err(argument("clip", "gradient", expected, "clipped".into()));
        }
        let steps = plan.clipping(factor);
        self.launch_steps("clip", steps)
    }

    /// The second half of [`Network::train_step`]: metrics of the gradient and clipping, unless it
    /// was clipped, and the optimiser's step, with what is in [`Network::gradients`] now. One
    /// launch; waits for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) without a gradient; a failed stream.
    pub fn apply(&mut self) -> Result<()> {
        let Gradient { plan, clipped } = self.gradient.take().ok_or_else(|| missing("apply"))?;
        let first = if clipped { Phase::Update } else { Phase::Measure };
        let run = Run::of(&plan, first..=Phase::Update);
        self.launch("apply", run, &self.tensors(&[], None, 0))
    }

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
    /// [`Error::Argument`](crate::Error::Argument) for a network with other options; as
    /// [`Network::set_graph`].
    pub fn follow(&mut self, leader: &Network) -> Result<()> {
        if leader.options != self.options {
            let (expected, got) = (format!("{:?}", self.options), format!("{:?}", leader.options));
            return Err(argument("follow", "options", expected, got));
        }
        self.set_graph(Arc::clone(leader.graph()))?;
        self.alpha_values.clone_from(&leader.alpha_values);
        let from: Vec<Tensor> = std::iter::once(&leader.alphas)
            .chain(leader.groups.iter().flat_map(Group::tensors))
            .map(|tensor| tensor.on(&self.stream))
            .collect::<Result<_, _>>()?;
        let to = std::iter::once(&self.alphas).chain(self.groups.iter().flat_map(Group::tensors));
        groups::copy(&self.stream, "follow", from.iter().zip(to))?;
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
        let step = Step::new(op, &spans, &[metrics::fingerprint_span()]);
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

/// The gradient of every parameter that one reaches, with its name, where it lies in an arena.
pub(super) fn views<'g>(
    graph: &'g Graph,
    plan: &Plan,
    arena: &Tensor,
) -> Result<Vec<(&'g str, Tensor)>> {
    let mut all = vec![];
    for (param, place) in graph.params.iter().zip(plan.trained_params()) {
        let Some((group, place)) = place else { continue };
        let Some(whole) = plan.group_gradient(group) else { continue };
        let gradient = arena.view(whole.start + place.start, [place.len()])?;
        all.push((param.name.as_str(), gradient));
    }
    Ok(all)
}

/// A step on the gradient of each group of a training plan that has one.
fn each_gradient<T: Into<Op>>(plan: &Plan, op: impl Fn(usize) -> T) -> Vec<Step> {
    let groups = 0..plan.layout().groups.len();
    let step = |at: std::ops::Range<usize>| {
        let span = Span::new(Space::Arena, DType::F32, at.start, at.len());
        Step::new(op(at.len()), &[], &[span])
    };
    groups.filter_map(|group| plan.group_gradient(group)).map(step).collect()
}

fn missing(operation: &'static str) -> crate::Error {
    let expected = "a gradient, from `differentiate`, and no step after it".into();
    argument(operation, "gradient", expected, "none".into())
}
