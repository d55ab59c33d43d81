//! A training step in two halves, so that replicas of a network on several ranks can exchange their gradients in
//! between; and what else keeps replicas alike.

use std::sync::Arc;

use meristem_device::{Stream, Tensor};

use super::Network;
use super::argument;
use super::groups::{self, Group, TENSORS};
use super::metrics::{FINGERPRINT, MetricsView};
use crate::error::Result;
use crate::kernels::optim;
use crate::plan::{Memory, Mode, Plan, Span};

/// A gradient in the arena.
#[derive(Debug)]
pub(super) struct Gradient {
    /// What it is of.
    plan: Arc<Plan>,
    /// Whether it was clipped.
    clipped: bool,
}

impl Network {
    /// The first half of [`Network::train_step`]: forward, loss, backward, metrics of the batch. The gradient is
    /// that of the batch's mean loss times `weight`; it lies on the device until the next step of any kind. One
    /// launch; waits for nothing.
    ///
    /// # Errors
    /// As [`Network::train_step`].
    #[track_caller]
    pub fn differentiate(&mut self, inputs: &Tensor, targets: &Tensor, weight: f32) -> Result<()> {
        let batch = self.check_batch("differentiate", inputs, targets)?;
        let plan = self.plan(batch, Mode::Train)?;
        let launch = self.stream.launch("differentiate");
        let launch = launch.read(inputs).read(targets).read(&self.alphas);
        let launch = launch.write(&self.arena).write(&self.metrics);
        let launch = self.groups.iter().fold(launch, |l, group| group.write(l));
        let (isa, slots, layout) = (self.options.isa, self.graph.alphas, self.metrics_layout);
        let spans = gradients_of(&plan);
        let own = Arc::clone(&plan);
        launch.run(move |args| {
            let (input, targets) = (args.read::<f32>(0), args.read::<u32>(1));
            let alphas = &args.read::<f32>(2)[..slots];
            let arena = args.write::<f32>(3);
            let mut memory = Memory::new(arena, &[input], alphas);
            let mut metrics = MetricsView::new(args.write(4), layout);
            groups::push_all(args, 5, &mut memory);
            own.execute_gradient(isa, &mut memory, targets, &mut metrics);
            if weight != 1.0 {
                for span in spans {
                    let ([], [gradient]) = memory.split([], [span]);
                    gradient.iter_mut().for_each(|g| *g *= weight);
                }
            }
        })?;
        self.gradient = Some(Gradient { plan, clipped: false });
        Ok(())
    }

    /// In place of [`Network::differentiate`] where a replica has no samples: its gradient is zero. One launch;
    /// waits for nothing.
    ///
    /// # Errors
    /// [`Error::OneValuePerChannel`](crate::Error::OneValuePerChannel), memory, a failed stream.
    pub fn differentiate_nothing(&mut self) -> Result<()> {
        let plan = self.plan(self.options.batch_max, Mode::Train)?;
        let spans = gradients_of(&plan);
        let launch = self.stream.launch("differentiate_nothing").write(&self.arena);
        launch.run(move |args| {
            let arena = args.write::<f32>(0);
            spans.into_iter().for_each(|span| arena[span.range()].fill(0.0));
        })?;
        self.gradient = Some(Gradient { plan, clipped: false });
        Ok(())
    }

    /// The gradient of every parameter that one reaches, with its name: f32, flat and packed as
    /// [`layout`](crate::layout) says, where it lies. It is not clipped yet, and may be overwritten by launches of
    /// this stream, with what other ranks found.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) without a gradient.
    pub fn gradients(&self) -> Result<Vec<(&str, Tensor)>> {
        let Gradient { plan, .. } = self.gradient.as_ref().ok_or_else(|| missing("gradients"))?;
        let mut all = vec![];
        for (param, place) in self.graph.params.iter().zip(plan.trained_params()) {
            let Some((group, place)) = place else { continue };
            let Some(whole) = plan.group_gradient(group) else { continue };
            let gradient = self.arena.view(whole.start + place.start, [place.len()])?;
            all.push((param.name.as_str(), gradient));
        }
        Ok(all)
    }

    /// Measures and clips the gradient now, not in [`Network::apply`]: that of each group, at `factor` times the norm
    /// that the group's optimiser allows. For an exchange that keeps back a part of what it is given: a sum with what
    /// was kept of many steps, clipped when it is sent at last, would be lost for the most part. One launch; waits
    /// for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) without a gradient, or clipped twice; a failed stream.
    pub fn clip(&mut self, factor: f32) -> Result<()> {
        let Gradient { plan, clipped } = self.gradient.as_mut().ok_or_else(|| missing("clip"))?;
        if std::mem::replace(clipped, true) {
            let expected = "one that was not clipped".into();
            return Err(argument("clip", "gradient", expected, "clipped".into()));
        }
        let plan = Arc::clone(plan);
        let groups = self.graph.groups.iter();
        let norms: Vec<f32> = groups.map(|group| group.optimiser.clip_norm() * factor).collect();
        let launch = self.stream.launch("clip").write(&self.arena).write(&self.metrics);
        let (isa, layout) = (self.options.isa, self.metrics_layout);
        Ok(launch.run(move |args| {
            let arena = args.write::<f32>(0);
            let mut metrics = MetricsView::new(args.write(1), layout);
            for (group, most) in norms.into_iter().enumerate() {
                let Some(whole) = plan.group_gradient(group) else { continue };
                let gradient = &mut arena[whole];
                let tensors = plan.trained(group);
                let squares =
                    tensors.iter().map(|t| optim::grad_norm_sq(isa, &gradient[t.clone()]));
                let clip = optim::clip_coefficient(metrics.add_group(group, squares), most);
                for tensor in tensors {
                    gradient[tensor].iter_mut().for_each(|g| *g *= clip);
                }
            }
        })?)
    }

    /// The second half of [`Network::train_step`]: metrics of the gradient and clipping, unless it was clipped, and
    /// the optimiser's step, with what is in [`Network::gradients`] now. One launch; waits for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) without a gradient; a failed stream.
    pub fn apply(&mut self) -> Result<()> {
        let Gradient { plan, clipped } = self.gradient.take().ok_or_else(|| missing("apply"))?;
        let launch = self.stream.launch("apply").write(&self.arena).write(&self.metrics);
        let launch = self.groups.iter().fold(launch, |l, group| group.write(l));
        let (isa, layout) = (self.options.isa, self.metrics_layout);
        Ok(launch.run(move |args| {
            let mut memory = Memory::new(args.write(0), &[], &[]);
            let mut metrics = MetricsView::new(args.write(1), layout);
            groups::push_all(args, 2, &mut memory);
            plan.execute_updates((isa, clipped), &mut memory, &mut metrics);
        })?)
    }

    /// The forward pass of a training step and no more: each batch norm adds the batch's statistics, with the
    /// parameters as they are, to its running ones. Ends what [`Network::differentiate`] began. One launch; waits for
    /// nothing.
    ///
    /// # Errors
    /// As [`Network::train_step`].
    #[track_caller]
    pub fn observe(&mut self, inputs: &Tensor) -> Result<()> {
        let batch = self.check_inputs("observe", inputs)?;
        let plan = self.plan(batch, Mode::Train)?;
        let launch = self.stream.launch("observe").read(inputs).read(&self.alphas);
        let launch = launch.write(&self.arena);
        let launch = self.groups.iter().fold(launch, |l, group| group.write(l));
        let (isa, slots) = (self.options.isa, self.graph.alphas);
        Ok(launch.run(move |args| {
            let input = args.read::<f32>(0);
            let alphas = &args.read::<f32>(1)[..slots];
            let mut memory = Memory::new(args.write(2), &[input], alphas);
            groups::push_all(args, 3, &mut memory);
            plan.execute_forward(isa, &mut memory);
        })?)
    }

    /// Running statistics (f32) and counters (i64) of each group that has some, where they lie. Replicas that saw
    /// other samples have other statistics; training does not read them.
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
        Network::new(stream, Arc::clone(&self.graph), self.options)
    }

    /// Takes over graph, parameters, running statistics, what the optimiser remembers, and alphas of a network on the
    /// same device, and empties the metrics. In stream order: what either stream got before counts. Does not wait.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for a network with other options; as [`Network::set_graph`].
    pub fn follow(&mut self, leader: &Network) -> Result<()> {
        if leader.options != self.options {
            let (expected, got) = (format!("{:?}", self.options), format!("{:?}", leader.options));
            return Err(argument("follow", "options", expected, got));
        }
        self.set_graph(Arc::clone(&leader.graph))?;
        self.alpha_values.clone_from(&leader.alpha_values);
        let on = |tensor: &Tensor| tensor.on(&self.stream);
        let mut from = vec![on(&leader.alphas)?];
        for Group { values, momentum, state, counters } in &leader.groups {
            from.extend([on(values)?, on(momentum)?, on(state)?, on(counters)?]);
        }
        let launch = from.iter().fold(self.stream.launch("follow"), |l, tensor| l.read(tensor));
        let launch = launch.write(&self.alphas);
        let launch = self.groups.iter().fold(launch, |l, group| group.write(l));
        let tensors = from.len();
        launch.run(move |args| {
            for at in 0..tensors {
                match at > 0 && at % TENSORS == 0 {
                    true => args.write::<i64>(tensors + at).copy_from_slice(args.read(at)),
                    false => args.write::<f32>(tensors + at).copy_from_slice(args.read(at)),
                }
            }
        })?;
        self.reset_metrics()
    }

    /// Hashes parameters, running statistics, what the optimiser remembers and counters, bit for bit, into
    /// [`Metrics::fingerprint`](crate::Metrics::fingerprint). FNV-1a over words of 32 bits: any one difference
    /// shows. One launch; does not wait.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn fingerprint(&self) -> Result<()> {
        let launch = self.stream.launch("fingerprint").write(&self.metrics);
        let launch = self.groups.iter().fold(launch, |launch, group| group.read(launch));
        let tensors = TENSORS * self.groups.len();
        Ok(launch.run(move |args| {
            let mut hash = 0xcbf2_9ce4_8422_2325u64;
            let mut take = |word: u32| {
                hash = (hash ^ u64::from(word)).wrapping_mul(0x0000_0100_0000_01b3);
            };
            for at in 1..=tensors {
                match at % TENSORS {
                    0 => args.read::<i64>(at).iter().for_each(|count| {
                        take(*count as u32);
                        take((*count >> 32) as u32);
                    }),
                    _ => args.read::<f32>(at).iter().for_each(|x| take(x.to_bits())),
                }
            }
            // Halves, which f64 holds exactly.
            args.write::<f64>(0)[FINGERPRINT..FINGERPRINT + 2]
                .copy_from_slice(&[(hash >> 32) as f64, (hash & u64::from(u32::MAX)) as f64]);
        })?)
    }
}

/// Where a plan for training has gradients.
fn gradients_of(plan: &Plan) -> Vec<Span> {
    let groups = 0..plan.layout().groups.len();
    let span = |at: std::ops::Range<usize>| Span::arena(at.start, at.len());
    groups.filter_map(|group| plan.group_gradient(group)).map(span).collect()
}

fn missing(operation: &'static str) -> crate::Error {
    let expected = "a gradient, from `differentiate`, and no step after it".into();
    argument(operation, "gradient", expected, "none".into())
}
