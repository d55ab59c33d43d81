//! Minibatches of an update: whole episodes of some of the envs.

use std::ops::Range;

use meristem_device::{Owner, Result, Tensor};

use super::ranks::Ranks;
use super::rollout::{self, Rollout};
use super::targets::{ScalarMoments, Targets};
use crate::error::Result as ControlResult;
use crate::policy::{Policy, PolicyBatch, PolicyInputs};

/// Tensors of an update with one optimiser step: rows are `[steps][envs]`.
#[derive(Debug)]
pub(super) struct Minibatch {
    steps: usize,
    inputs: Vec<Tensor>,
    /// LSTM state before the first step.
    initial: Tensor,
    choices: Tensor,
    legal: Tensor,
    advantages: Tensor,
    returns: Tensor,
    /// Log-probabilities of the policy that acted; `None` for the whole round, whose first pass
    /// records them.
    pub(super) log_probs: Option<Tensor>,
}

impl Minibatch {
    /// The minibatches of the first `steps` steps: `count` blocks of adjacent envs, as equal as
    /// possible, but at most one block per env. A single minibatch is the whole round, without a
    /// copy; blocks are copies. Does not wait.
    pub(super) fn all(
        rollout: &Rollout,
        policy: &Policy,
        steps: usize,
        count: usize,
    ) -> ControlResult<Vec<Self>> {
        let envs = rollout.shape().envs;
        let count = count.min(envs);
        if count <= 1 {
            return Ok(vec![Self::whole(rollout, policy, steps)?]);
        }
        let blocks = (0..count).map(|nth| nth * envs / count..(nth + 1) * envs / count);
        blocks.map(|block| Self::of_envs(rollout, policy, steps, block)).collect()
    }

    fn whole(rollout: &Rollout, policy: &Policy, steps: usize) -> ControlResult<Self> {
        let rows = |tensor| rollout.rows(tensor, steps);
        Ok(Self {
            steps,
            inputs: rollout.inputs.iter().map(rows).collect::<Result<_>>()?,
            initial: policy.initial_state(rollout.shape().envs)?,
            choices: rows(&rollout.choices)?,
            legal: rows(&rollout.legal)?,
            advantages: rows(&rollout.advantages)?,
            returns: rows(&rollout.returns)?,
            log_probs: None,
        })
    }

    fn of_envs(
        rollout: &Rollout,
        policy: &Policy,
        steps: usize,
        envs: Range<usize>,
    ) -> ControlResult<Self> {
        let copy = |tensor| columns(rollout, tensor, steps, &envs);
        Ok(Self {
            steps,
            inputs: rollout.inputs.iter().map(copy).collect::<Result<_>>()?,
            initial: policy.initial_state(envs.len())?,
            choices: copy(&rollout.choices)?,
            legal: copy(&rollout.legal)?,
            advantages: copy(&rollout.advantages)?,
            returns: copy(&rollout.returns)?,
            log_probs: Some(copy(&rollout.log_probs)?),
        })
    }

    /// Normalises the advantages over this minibatch of all ranks. One read-back; with several
    /// ranks a second one, and the waits of an all-gather.
    pub(super) fn normalise(
        &self,
        targets: Targets,
        ranks: Option<&mut Ranks>,
    ) -> ControlResult<()> {
        let mut moments = ScalarMoments::default();
        let advantages = self.advantages.to_vec::<f32>()?;
        advantages.into_iter().for_each(|advantage| moments.push(f64::from(advantage)));
        let moments = ranks.map_or(Ok(moments), |ranks| ranks.merge(moments))?;
        let pair = [&self.advantages, &self.returns];
        // The returns are in their final units already.
        Ok(rollout::normalise(pair, targets, 1.0, moments.mean_and_std())?)
    }

    /// The inputs of the loss.
    pub(super) fn batch(&self) -> PolicyBatch<'_> {
        PolicyBatch {
            steps: self.steps,
            inputs: PolicyInputs { rows: self.inputs.iter().collect(), state: &self.initial },
            choices: &self.choices,
            legal: &self.legal,
            advantages: &self.advantages,
            returns: &self.returns,
        }
    }
}

/// A copy of the columns of some envs in the first `steps` rows of a tensor `[step, env, …]`:
/// `[steps · envs, width]` or `[steps · envs]`. One launch.
fn columns(
    rollout: &Rollout,
    tensor: &Tensor,
    steps: usize,
    envs: &Range<usize>,
) -> Result<Tensor> {
    let (all, count) = (rollout.shape().envs, envs.len());
    let width = tensor.dims().get(2).copied();
    let shape = |rows: usize| -> Vec<usize> { [rows].into_iter().chain(width).collect() };
    let stream = tensor.stream();
    let copy = Tensor::empty(stream, &shape(steps * count), tensor.dtype(), Owner::Policy)?;
    let row = |of: &Tensor, first: usize| of.view(first * width.unwrap_or(1), &shape(count));
    let pieces = (0..steps)
        .map(|step| Ok((row(tensor, step * all + envs.start)?, row(&copy, step * count)?)));
    let pieces = pieces.collect::<Result<Vec<_>>>()?;
    let pieces: Vec<(&Tensor, &Tensor)> = pieces.iter().map(|(from, to)| (from, to)).collect();
    stream.copy("minibatch", &pieces)?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use meristem_device::{Device, DeviceId, DeviceOptions};
    use meristem_nn::Isa;

    use super::*;
    use crate::gae::Discounts;
    use crate::policy::{LossConfig, PolicyConfig, PolicyForm, PolicyShape};
    use crate::ppo::rollout::RolloutShape;

    const STEPS: usize = 3;
    const ENVS: usize = 5;

    /// A rollout whose choices and advantages are numbered, with room for one more step.
    fn numbered() -> (Rollout, Policy) {
        let id = DeviceId::Cpu(0);
        let stream = Device::open(id, &DeviceOptions::default()).unwrap().stream("policy");
        let form = PolicyForm::Vector;
        let policy = PolicyShape { form, features: 2, slots: 1, blueprints: 1, hidden: 2 };
        let (of, loss) = (PolicyConfig::new(1), LossConfig::default());
        let network = Policy::new(&stream, policy, &of, &loss, Isa::detect()).unwrap();
        let shape = RolloutShape { steps: STEPS + 1, envs: ENVS, policy };
        let rollout = Rollout::new(&stream, shape).unwrap();
        let advantages: Vec<f32> = (0..rollout.advantages.numel()).map(|n| n as f32).collect();
        rollout.advantages.copy_from_slice(&advantages).unwrap();
        let choices: Vec<u32> = (0..rollout.choices.numel() as u32).collect();
        rollout.choices.copy_from_slice(&choices).unwrap();
        (rollout, network)
    }

    #[test]
    fn minibatches_have_each_env_once_with_all_steps() {
        let (rollout, policy) = numbered();
        let all = Minibatch::all(&rollout, &policy, STEPS, 2).unwrap();
        let advantages = |of: &Minibatch| of.advantages.to_vec::<f32>().unwrap();
        assert_eq!(advantages(&all[0]), [0.0, 1.0, 5.0, 6.0, 10.0, 11.0]);
        assert_eq!(advantages(&all[1]), [2.0, 3.0, 4.0, 7.0, 8.0, 9.0, 12.0, 13.0, 14.0]);
        let heads = rollout.choices.dims()[2];
        assert_eq!(all[1].choices.dims(), [9, heads]);
        let choices = all[1].choices.to_vec::<u32>().unwrap();
        let first: Vec<u32> = choices.chunks(heads).map(|row| row[0] / heads as u32).collect();
        assert_eq!(first, [2, 3, 4, 7, 8, 9, 12, 13, 14]);
        assert_eq!(Minibatch::all(&rollout, &policy, STEPS, 99).unwrap().len(), ENVS);
        let whole = Minibatch::all(&rollout, &policy, STEPS, 1).unwrap();
        assert_eq!(advantages(&whole[0]), (0..15).map(|n| n as f32).collect::<Vec<_>>());
        assert!(whole[0].log_probs.is_none());
    }

    #[test]
    fn a_minibatch_normalises_its_own_advantages() {
        let (rollout, policy) = numbered();
        let discounts = Discounts { gamma: 1.0, lambda: 1.0 };
        let targets = Targets { discounts, advantage_std_floor: 0.1, by_minibatch: true };
        let minibatch = Minibatch::all(&rollout, &policy, STEPS, 2).unwrap().remove(0);
        minibatch.normalise(targets, None).unwrap();
        // 0, 1, 5, 6, 10, 11: mean 5.5, variance 101.5 / 6.
        let std = (101.5f64 / 6.0).sqrt();
        let got = minibatch.advantages.to_vec::<f32>().unwrap();
        for (got, raw) in got.into_iter().zip([0.0, 1.0, 5.0, 6.0, 10.0, 11.0]) {
            assert!((f64::from(got) - (raw - 5.5) / std).abs() < 1e-6);
        }
        let round = rollout.advantages.to_vec::<f32>().unwrap();
        assert_eq!(round[..3], [0.0, 1.0, 2.0], "those of the round stay");
    }
}
