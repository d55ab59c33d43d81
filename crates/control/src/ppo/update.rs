//! The update at the end of a round.

use meristem_nn::kernels::ppo::PpoReport;

use super::minibatch::Minibatch;
use super::{Ppo, teacher};
use crate::error::{Error, Result};
use crate::masks::HEAD_COUNT;
use crate::normalizer::Normalizer;
use crate::policy::PpoPass;
use crate::report::RoundReport;

/// Trains on the steps of this round, then begins a new one. Waits for the device: once for the
/// targets and once per optimiser step. Further waits come with several ranks, with compared
/// members, and with several minibatches, which normalise their own advantages.
///
/// # Errors
/// [`Error::Diverged`] after too many consecutive skipped updates; a failed device. With several
/// ranks [`Error::Ranks`], [`Error::RanksDiffer`], and [`Error::Protocol`] on a rank that has left.
pub(super) fn learn(ppo: &mut Ppo) -> Result<RoundReport> {
    let steps = ppo.step;
    let targets = ppo.targets();
    let (rollout, scale) = (&ppo.rollout, &mut ppo.scale);
    let mean_return = match &mut ppo.ranks {
        None => rollout.finish(steps, targets, scale)?,
        Some(ranks) => ranks.finish(rollout, steps, targets, scale)?,
    };
    if let Some(members) = ppo.baseline_members {
        ppo.rollout.compare_members(steps, members)?;
    }
    let mut report = RoundReport {
        transitions: steps * ppo.rollout.shape().envs,
        mean_return,
        ops: std::mem::take(&mut ppo.ops),
        return_scale: ppo.scale.std(),
        ..RoundReport::default()
    };
    update(ppo, steps, &mut report)?;
    match &mut ppo.ranks {
        None => ppo.normalizers.all_mut().for_each(Normalizer::commit),
        Some(ranks) => {
            ppo.normalizers.all_mut().try_for_each(|one| ranks.commit(one))?;
            ranks.total(&mut report)?;
            report.fingerprint = Some(ranks.agree(&ppo.policy)?);
        }
    }
    ppo.step = 0;
    ppo.rounds += 1;
    ppo.fresh.fill(true);
    ppo.rollout.begin()?;
    ppo.set_floors()?;
    match report.skipped {
        0 => ppo.skipped = 0,
        skipped => ppo.skipped += skipped,
    }
    if ppo.skipped >= ppo.config.skips_max {
        return Err(Error::Diverged { skipped: ppo.skipped });
    }
    Ok(report)
}

/// Makes passes over the minibatches of the round until the KL divergence of a minibatch exceeds
/// its limit, the last epoch is done, or a loss or gradient is not finite. A round of
/// demonstrations weighs all choices equally. The KL limit has no effect there: all probability
/// ratios are 1, so that the divergence is 0.
fn update(ppo: &mut Ppo, steps: usize, report: &mut RoundReport) -> Result<()> {
    let taught = ppo.is_demonstration();
    if taught {
        ppo.rollout.set_unit_advantages(steps)?;
    }
    let count = ppo.config.minibatches;
    let minibatches = Minibatch::all(&ppo.rollout, &ppo.policy, steps, count)?;
    let targets = ppo.targets();
    if targets.by_minibatch && !taught {
        minibatches.iter().try_for_each(|one| one.normalise(targets, ppo.ranks.as_mut()))?;
    }
    let passes = if taught { teacher::PASSES } else { ppo.config.epochs };
    for epoch in 0..passes {
        for nth in 0..minibatches.len() {
            // Each epoch begins with another minibatch.
            let minibatch = &minibatches[(nth + epoch) % minibatches.len()];
            let pass = if epoch == 0 { PpoPass::First } else { PpoPass::Later };
            if !optimise(ppo, minibatch, pass, (epoch, nth) == (0, 0), report)? {
                return Ok(());
            }
        }
        report.epochs += 1;
    }
    Ok(())
}

/// One optimiser step with a minibatch. Returns whether the update goes on. `is_first`: no earlier
/// step has changed the policy that acted.
fn optimise(
    ppo: &mut Ppo,
    minibatch: &Minibatch,
    pass: PpoPass,
    is_first: bool,
    report: &mut RoundReport,
) -> Result<bool> {
    let batch = minibatch.batch();
    match &minibatch.log_probs {
        _ if ppo.is_demonstration() => ppo.policy.imitate(&batch)?,
        Some(log_probs) => ppo.policy.differentiate_from(&batch, log_probs)?,
        None => ppo.policy.differentiate(&batch, pass)?,
    }
    let (of_pass, gradient_norm) = ppo.policy.report()?;
    let mut seen = PassStatistics::from_report(&of_pass, gradient_norm);
    // The mean over the ranks makes all ranks stop at the same pass.
    if let Some(ranks) = &mut ppo.ranks {
        seen = PassStatistics::from_slice(&ranks.mean(&seen.to_vec())?);
    }
    seen.write_to(report, is_first);
    if !seen.is_finite() {
        report.skipped = 1;
        return Ok(false);
    }
    if seen.kl > ppo.config.kl_limit() {
        report.stopped_by_kl = true;
        return Ok(false);
    }
    if let Some(ranks) = &mut ppo.ranks {
        ranks.exchange(&mut ppo.policy)?;
        let (_, gradient_norm) = ppo.policy.report()?;
        report.gradient_norm = gradient_norm;
        if !gradient_norm.is_finite() {
            report.skipped = 1;
            return Ok(false);
        }
    }
    ppo.policy.apply()?;
    Ok(true)
}

/// Statistics of one PPO pass over a minibatch that are reported or control early stopping.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PassStatistics {
    /// Loss; NaN if any part of it is not finite.
    loss: f64,
    kl: f64,
    clip_fraction: f64,
    policy_objective: f64,
    value_loss: f64,
    gradient_norm: f64,
    explained_variance: f64,
    entropies: [f64; HEAD_COUNT],
}

impl PassStatistics {
    fn from_report(pass: &PpoReport, gradient_norm: f64) -> Self {
        let mut entropies = [0.0; HEAD_COUNT];
        entropies.iter_mut().zip(&pass.heads).for_each(|(to, head)| *to = head.entropy);
        let used: u64 = pass.heads.iter().map(|head| head.count).sum();
        let clipped: f64 = pass.heads.iter().map(|head| head.count as f64 * head.clipped).sum();
        let explained = pass.explained_variance;
        Self {
            loss: if pass.is_finite() { pass.loss } else { f64::NAN },
            kl: pass.kl,
            clip_fraction: clipped / used.max(1) as f64,
            policy_objective: -pass.policy_loss,
            value_loss: pass.value_loss,
            gradient_norm,
            explained_variance: if explained.is_finite() { explained } else { 0.0 },
            entropies,
        }
    }

    fn to_vec(self) -> Vec<f64> {
        let Self { loss, kl, clip_fraction, policy_objective, value_loss, .. } = self;
        let front = [loss, kl, clip_fraction, policy_objective, value_loss];
        let rest = [self.gradient_norm, self.explained_variance];
        [&front[..], &rest, &self.entropies].concat()
    }

    /// Decodes the numbers of [`PassStatistics::to_vec`].
    fn from_slice(numbers: &[f64]) -> Self {
        let mut entropies = [0.0; HEAD_COUNT];
        entropies.copy_from_slice(&numbers[7..]);
        Self {
            loss: numbers[0],
            kl: numbers[1],
            clip_fraction: numbers[2],
            policy_objective: numbers[3],
            value_loss: numbers[4],
            gradient_norm: numbers[5],
            explained_variance: numbers[6],
            entropies,
        }
    }

    fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.gradient_norm.is_finite()
    }

    /// Writes the statistics into the round's report. Entropies and explained variance come from
    /// the first minibatch, before the parameters of the acting policy change.
    fn write_to(&self, report: &mut RoundReport, is_first: bool) {
        if is_first {
            report.entropies = self.entropies;
            report.explained_variance = self.explained_variance;
        }
        report.clip_fraction = self.clip_fraction;
        report.kl = self.kl;
        report.policy_objective = self.policy_objective;
        report.value_loss = self.value_loss;
        report.gradient_norm = self.gradient_norm;
    }
}
