//! The transitions of a round, on the policy's device. Every tensor has the layout `[step, env, …]`
//! and is allocated once per run.

use meristem_device::{Call, DType, Fill, Owner, Result, Stream, Tensor};

use super::gpu;
use super::targets::{ScalarMoments, Targets};
use crate::gae::Trajectories;
use crate::masks::HEAD_COUNT;
use crate::policy::PolicyShape;

/// Sizes of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RolloutShape {
    /// Largest number of steps of a round.
    pub(super) steps: usize,
    /// Number of envs.
    pub(super) envs: usize,
    /// Shape of the policy.
    pub(super) policy: PolicyShape,
}

/// Rows of the tensors that one policy step writes.
#[derive(Debug)]
pub(super) struct ActedRow {
    /// The inputs of the policy.
    pub(super) seen: Vec<Tensor>,
    pub(super) choices: Tensor,
    pub(super) legal: Tensor,
    pub(super) log_probs: Tensor,
    pub(super) entropies: Tensor,
    pub(super) values: Tensor,
}

impl ActedRow {
    /// Results of a step for the host, as u32 words: choices, log-probabilities, entropies, values.
    pub(super) fn outputs(&self) -> Result<[Tensor; 4]> {
        let words = |tensor: &Tensor| tensor.reinterpret(DType::U32);
        let (choices, values) = (self.choices.clone(), words(&self.values)?);
        Ok([choices, words(&self.log_probs)?, words(&self.entropies)?, values])
    }
}

/// The buffers of a round. Rows beyond the steps of this round are stale; readers limit themselves
/// to the steps written.
#[derive(Debug)]
pub(super) struct Rollout {
    shape: RolloutShape,
    /// [`PolicyShape::inputs`], `[steps + 1, envs, width]` each, or `[steps + 1, envs]` for a width
    /// of 1; observations are normalised. The last row is the observation after the last
    /// transition.
    pub(super) inputs: Vec<Tensor>,
    /// u32 `[steps + 1, envs, heads]`. Like all results of a policy step it has a row for the
    /// observation after the last transition; of that row only V is used.
    pub(super) choices: Tensor,
    /// u8 `[steps + 1, envs, logits]`: masks of the draw.
    pub(super) legal: Tensor,
    /// f32 `[steps + 1, envs, heads]`.
    pub(super) log_probs: Tensor,
    /// f32 `[steps + 1, envs, heads]`, normalised entropies.
    pub(super) entropies: Tensor,
    /// f32 `[steps + 1, envs]`, in units of reward.
    pub(super) values: Tensor,
    /// f32 `[steps, envs]`.
    pub(super) rewards: Tensor,
    /// f32 `[steps, envs]`, in units of reward.
    pub(super) bootstraps: Tensor,
    /// u8 `[steps, envs]`.
    pub(super) truncated: Tensor,
    /// u8 `[steps, envs]`.
    pub(super) terminated: Tensor,
    /// f32 `[steps, envs]`, normalised over the round unless each minibatch normalises its own.
    pub(super) advantages: Tensor,
    /// f32 `[steps, envs]`, divided by the running standard deviation of the returns.
    pub(super) returns: Tensor,
    /// f64 `[7]`: moments of the returns (3), moments of the advantages (3; 0 unless
    /// [`Rollout::finish_part`] computes them), mean over the envs of the sum of rewards (1).
    stats: Tensor,
}

impl Rollout {
    /// Allocates all buffers.
    pub(super) fn new(stream: &Stream, shape: RolloutShape) -> Result<Self> {
        let RolloutShape { steps, envs, policy } = shape;
        stream.device().load_kernels(&[&gpu::SOURCE])?;
        let zeros = |dims: &[usize], dtype| Tensor::zeros(stream, dims, dtype, Owner::Policy);
        let scalar = || zeros(&[steps, envs], DType::F32);
        let flag = || zeros(&[steps, envs], DType::U8);
        let inputs = policy.inputs().into_iter().map(|input| match input.width {
            1 => zeros(&[steps + 1, envs], input.dtype),
            width => zeros(&[steps + 1, envs, width], input.dtype),
        });
        Ok(Self {
            shape,
            inputs: inputs.collect::<Result<_>>()?,
            choices: zeros(&[steps + 1, envs, HEAD_COUNT], DType::U32)?,
            legal: zeros(&[steps + 1, envs, policy.logits()], DType::U8)?,
            log_probs: zeros(&[steps + 1, envs, HEAD_COUNT], DType::F32)?,
            entropies: zeros(&[steps + 1, envs, HEAD_COUNT], DType::F32)?,
            values: zeros(&[steps + 1, envs], DType::F32)?,
            rewards: scalar()?,
            bootstraps: scalar()?,
            truncated: flag()?,
            terminated: flag()?,
            advantages: scalar()?,
            returns: scalar()?,
            stats: zeros(&[7], DType::F64)?,
        })
    }

    /// The sizes.
    pub(super) fn shape(&self) -> &RolloutShape {
        &self.shape
    }

    /// Begins a round: clears the flags and the rewards.
    pub(super) fn begin(&self) -> Result<()> {
        let cells = self.shape.steps * self.shape.envs;
        self.truncated.copy_from_slice(&vec![0u8; cells])?;
        self.terminated.copy_from_slice(&vec![0u8; cells])?;
        self.rewards.copy_from_slice(&vec![0f32; cells])
    }

    /// Row of one step: `[envs, width]`, or `[envs]` for a tensor with two dimensions.
    pub(super) fn row(&self, tensor: &Tensor, step: usize) -> Result<Tensor> {
        let envs = self.shape.envs;
        match tensor.dims() {
            [_, _, width] => tensor.view(step * envs * width, [envs, *width]),
            _ => tensor.view(step * envs, [envs]),
        }
    }

    /// The first `steps` steps of a tensor, `[steps · envs, width]` or `[steps · envs]`.
    pub(super) fn rows(&self, tensor: &Tensor, steps: usize) -> Result<Tensor> {
        let rows = steps * self.shape.envs;
        match tensor.dims() {
            [_, _, width] => tensor.view(0, [rows, *width]),
            _ => tensor.view(0, [rows]),
        }
    }

    /// Rows of a step that the policy writes.
    pub(super) fn acted(&self, step: usize) -> Result<ActedRow> {
        let row = |tensor| self.row(tensor, step);
        Ok(ActedRow {
            seen: self.inputs.iter().map(row).collect::<Result<_>>()?,
            choices: row(&self.choices)?,
            legal: row(&self.legal)?,
            log_probs: row(&self.log_probs)?,
            entropies: row(&self.entropies)?,
            values: row(&self.values)?,
        })
    }

    /// Replaces the choices of a step, `[envs, heads]`, and the masks, `[envs, logits]`. Two
    /// copies; does not wait.
    pub(super) fn replace(&self, step: usize, choices: &[u32], legal: &[u8]) -> Result<()> {
        self.row(&self.choices, step)?.copy_from_slice(choices)?;
        self.row(&self.legal, step)?.copy_from_slice(legal)
    }

    /// Sets the advantages of the first `steps` steps to 1. One copy; does not wait.
    pub(super) fn set_unit_advantages(&self, steps: usize) -> Result<()> {
        let rows = self.rows(&self.advantages, steps)?;
        rows.copy_from_slice(&vec![1f32; rows.numel()])
    }

    /// [`Targets::compare_members`] in the first `steps` steps. One read-back and one copy.
    pub(super) fn compare_members(&self, steps: usize, members: usize) -> Result<()> {
        let rows = self.rows(&self.advantages, steps)?;
        let mut advantages = rows.to_vec::<f32>()?;
        Targets::compare_members(&mut advantages, self.shape.envs, members);
        rows.copy_from_slice(&advantages)
    }

    /// Adds `rewards` to the rewards of a step.
    pub(super) fn reward(&self, step: usize, rewards: &[f32]) -> Result<()> {
        let (row, rewards) = (self.row(&self.rewards, step)?, rewards.to_vec());
        let launch = self.rewards.stream().launch("reward").write(&row);
        launch.gpu(|| gpu::reward(&rewards)).run(move |args| {
            args.write::<f32>(0).iter_mut().zip(rewards).for_each(|(sum, reward)| *sum += reward);
        })
    }

    /// Ends a trajectory with step `last`, and adds `penalty` to the reward of step `cause`.
    pub(super) fn terminate(
        &self,
        env: usize,
        (cause, last): (usize, usize),
        penalty: f32,
    ) -> Result<()> {
        let cell = |tensor: &Tensor, step: usize| tensor.view(step * self.shape.envs + env, [1]);
        cell(&self.terminated, last)?.copy_from_slice(&[1u8])?;
        let paid = cell(&self.rewards, cause)?;
        let launch = self.rewards.stream().launch("penalty").write(&paid);
        launch.gpu(|| gpu::reward(&[penalty])).run(move |args| {
            args.write::<f32>(0).iter_mut().for_each(|reward| *reward += penalty);
        })
    }

    /// Marks step `last` as truncated. V of row `last + 1`, the observation after that step,
    /// becomes the bootstrap. Does not wait.
    pub(super) fn truncate(&self, last: usize) -> Result<()> {
        let stream = self.truncated.stream();
        stream.fill("truncate", &[&self.row(&self.truncated, last)?], Fill::Word(0x0101_0101))?;
        let (from, to) = (self.row(&self.values, last + 1)?, self.row(&self.bootstraps, last)?);
        stream.copy("truncate", &[(&from, &to)])
    }

    /// Computes advantages and returns of the first `steps` steps on the device, and adds the
    /// returns to `scale`. Returns the mean over the envs of the sum of rewards. One read-back.
    /// Advantages stay unnormalised if each minibatch normalises its own.
    pub(super) fn finish(
        &self,
        steps: usize,
        targets: Targets,
        scale: &mut ScalarMoments,
    ) -> Result<f64> {
        if targets.by_minibatch {
            let ([returns, _], paid) = self.finish_part(steps, targets)?;
            scale.merge(&returns);
            self.normalise(steps, targets, scale.std(), None)?;
            return Ok(paid);
        }
        let before = *scale;
        let call = gpu::targets(&targets, before, self.shape.envs, false);
        let stats = self.targets(steps, call, move |trajectories, a, returns| {
            let [count, mean, m2] = targets.write(trajectories, before, a, returns).to_array();
            [count, mean, m2, 0.0, 0.0, 0.0]
        })?;
        *scale = ScalarMoments::from_array([stats[0], stats[1], stats[2]]);
        Ok(stats[6])
    }

    /// Computes one rank's part of [`Rollout::finish`]; advantages and returns stay unnormalised
    /// until [`Rollout::normalise`]. Returns the moments of the returns and of the advantages, and
    /// the mean sum of rewards.
    pub(super) fn finish_part(
        &self,
        steps: usize,
        targets: Targets,
    ) -> Result<([ScalarMoments; 2], f64)> {
        let call = gpu::targets(&targets, ScalarMoments::default(), self.shape.envs, true);
        let stats = self.targets(steps, call, move |trajectories, a, returns| {
            let [scale, advantages] =
                targets.write_part(trajectories, a, returns).map(ScalarMoments::to_array);
            [scale[0], scale[1], scale[2], advantages[0], advantages[1], advantages[2]]
        })?;
        let moments =
            |at: usize| ScalarMoments::from_array([stats[at], stats[at + 1], stats[at + 2]]);
        Ok(([moments(0), moments(3)], stats[6]))
    }

    /// Divides the returns by `returns_std`, and normalises the advantages with the mean and
    /// standard deviation over all ranks; `None` leaves them as they are. Does not wait.
    pub(super) fn normalise(
        &self,
        steps: usize,
        targets: Targets,
        returns_std: f64,
        advantages: Option<(f64, f64)>,
    ) -> Result<()> {
        let (a, returns) = (self.rows(&self.advantages, steps)?, self.rows(&self.returns, steps)?);
        let unchanged = Targets { advantage_std_floor: 1.0, ..targets };
        let (targets, advantages) = match advantages {
            Some(moments) => (targets, moments),
            None => (unchanged, (0.0, 1.0)),
        };
        normalise([&a, &returns], targets, returns_std, advantages)
    }

    /// Computes advantages and returns with `write`, or on a GPU with `call`. Returns the result of
    /// `write` and the mean over the envs of the sum of rewards. One read-back.
    fn targets(
        &self,
        steps: usize,
        call: Call,
        write: impl Fn(&Trajectories<'_>, &mut [f32], &mut [f32]) -> [f64; 6] + Send + 'static,
    ) -> Result<Vec<f64>> {
        let rows = |tensor| self.rows(tensor, steps);
        let reads = [
            rows(&self.rewards)?,
            rows(&self.values)?,
            rows(&self.bootstraps)?,
            rows(&self.truncated)?,
            rows(&self.terminated)?,
        ];
        let writes = [rows(&self.advantages)?, rows(&self.returns)?];
        let launch = self.rewards.stream().launch("advantages");
        let launch = reads.iter().fold(launch, |launch, tensor| launch.read(tensor));
        let launch = writes.iter().fold(launch, |launch, tensor| launch.write(tensor));
        let envs = self.shape.envs;
        launch.write(&self.stats).gpu(|| call).run(move |args| {
            let trajectories = Trajectories {
                envs,
                rewards: args.read(0),
                values: args.read(1),
                bootstraps: args.read(2),
                truncated: args.read(3),
                terminated: args.read(4),
            };
            let (a, returns, stats) = (args.write(5), args.write(6), args.write(7));
            stats[..6].copy_from_slice(&write(&trajectories, a, returns));
            let paid: f64 = trajectories.rewards.iter().copied().map(f64::from).sum();
            stats[6] = paid / envs as f64;
        })?;
        self.stats.to_vec::<f64>()
    }
}

/// Divides returns by `returns_std`, and normalises advantages with a mean and a standard
/// deviation. Does not wait.
pub(super) fn normalise(
    [a, returns]: [&Tensor; 2],
    targets: Targets,
    returns_std: f64,
    advantages: (f64, f64),
) -> Result<()> {
    let launch = a.stream().launch("normalise advantages").write(a).write(returns);
    let launch = launch.gpu(|| gpu::normalise(&targets, returns_std, advantages));
    launch.run(move |args| {
        let (a, returns) = (args.write(0), args.write(1));
        targets.normalise(returns_std, advantages, a, returns);
    })
}

#[cfg(test)]
#[cfg(feature = "cuda")]
mod tests {
    use super::*;
    use crate::gae::Discounts;
    use crate::policy::PolicyForm;
    use meristem_device::random::{Purpose, Rng};
    use meristem_device::{Device, DeviceId, DeviceOptions};

    /// Advantages, returns and statistics of a round of random transitions, as bits.
    fn finished(id: DeviceId, envs: usize) -> (Vec<u32>, Vec<u32>, [u64; 7]) {
        let stream = Device::open(id, &DeviceOptions::default()).unwrap().stream("policy");
        let form = PolicyForm::Vector;
        let policy = PolicyShape { form, features: 1, slots: 1, blueprints: 1, hidden: 1 };
        let shape = RolloutShape { steps: 9, envs, policy };
        let rollout = Rollout::new(&stream, shape).unwrap();
        let mut random = Rng::new(3, Purpose::Test, 0, 0);
        for step in 0..9 {
            let mut row = || (0..envs).map(|_| random.uniform() - 0.5).collect::<Vec<f32>>();
            for tensor in [&rollout.values, &rollout.bootstraps] {
                rollout.row(tensor, step).unwrap().copy_from_slice(&row()).unwrap();
            }
            rollout.reward(step, &row()).unwrap();
        }
        rollout.terminate(2, (3, 4), -10.0).unwrap();
        rollout.truncate(7).unwrap();
        let targets = Targets {
            discounts: Discounts { gamma: 0.995, lambda: 0.98 },
            advantage_std_floor: 0.1,
            by_minibatch: false,
        };
        let mut scale = ScalarMoments { count: 7.0, mean: 0.25, m2: 3.0 };
        let paid = rollout.finish(8, targets, &mut scale).unwrap();
        let (parts, _) = rollout.finish_part(8, targets).unwrap();
        rollout.normalise(8, targets, parts[0].std(), Some((0.1, 0.3))).unwrap();
        let bits = |tensor: &Tensor| -> Vec<u32> {
            tensor.to_vec::<f32>().unwrap().iter().map(|value| value.to_bits()).collect()
        };
        let [a, b, c] = scale.to_array();
        let [d, e, f] = parts[1].to_array();
        let numbers = [a, b, c, d, e, f, paid].map(f64::to_bits);
        (bits(&rollout.advantages), bits(&rollout.returns), numbers)
    }

    #[test]
    #[ignore = "needs a GPU or its stand-in"]
    fn targets_have_the_same_bits_on_gpu_and_cpu() {
        // More envs than threads in a block; fewer than a warp.
        for envs in [300, 9] {
            assert!(finished(DeviceId::Cuda(0), envs) == finished(DeviceId::Cpu(0), envs));
        }
    }
}
