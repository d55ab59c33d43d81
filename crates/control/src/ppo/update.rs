//! The update at the end of a round.

use super::Ppo;
use super::rollout::RolloutShape;
use crate::error::{Error, Result};
use crate::masks::HEAD_COUNT;
use crate::policy::{Pass, PolicyBatch, PolicyInputs};
use crate::report::RoundReport;
use meristem_nn::kernels::ppo::PpoReport;

impl Ppo {
    /// Learns from the steps of this round, then forgets them. Waits for the device once per epoch.
    ///
    /// # Errors
    /// [`Error::Diverged`] when too many updates in a row were skipped; a failed device.
    pub(super) fn learn(&mut self) -> Result<RoundReport> {
        let steps = self.step;
        let targets = self.config.targets();
        let mean_return = self.rollout.finish(steps, targets, &mut self.scale)?;
        let mut report = RoundReport {
            transitions: steps * self.rollout.shape().envs,
            mean_return,
            ops: std::mem::take(&mut self.ops),
            return_scale: self.scale.std(),
            ..RoundReport::default()
        };
        self.update(steps, &mut report)?;
        self.normalizer.commit();
        self.step = 0;
        self.fresh.fill(true);
        self.rollout.begin()?;
        match report.skipped {
            0 => self.skipped = 0,
            skipped => self.skipped += skipped,
        }
        if self.skipped >= self.config.skips_max {
            return Err(Error::Diverged { skipped: self.skipped });
        }
        Ok(report)
    }

    /// Passes over the whole round until the KL limit, the last epoch, or a number that is not finite.
    fn update(&mut self, steps: usize, report: &mut RoundReport) -> Result<()> {
        let rollout = &self.rollout;
        let RolloutShape { envs, .. } = *rollout.shape();
        let rows = |of| rollout.rows(of, steps);
        let initial = self.policy.initial_state(envs)?;
        let inputs = PolicyInputs {
            observations: &rows(&rollout.observations)?,
            blueprints: &rows(&rollout.blueprints)?,
            keep: &rows(&rollout.keep)?,
            state: &initial,
        };
        let batch = PolicyBatch {
            steps,
            inputs,
            choices: &rows(&rollout.choices)?,
            legal: &rows(&rollout.legal)?,
            advantages: &rows(&rollout.advantages)?,
            returns: &rows(&rollout.returns)?,
        };
        for epoch in 0..self.config.epochs {
            let pass = if epoch == 0 { Pass::First } else { Pass::Later };
            self.policy.differentiate(&batch, pass)?;
            let (of_pass, gradient_norm) = self.policy.report()?;
            note(report, &of_pass, gradient_norm, epoch);
            if !of_pass.is_finite() || !gradient_norm.is_finite() {
                report.skipped = 1;
                break;
            }
            if of_pass.kl > self.config.kl_limit() {
                report.stopped_by_kl = true;
                break;
            }
            self.policy.apply()?;
            report.epochs += 1;
        }
        Ok(())
    }
}

/// What a pass says. Entropy and explained variance are of the policy that acted: the first pass.
fn note(report: &mut RoundReport, of: &PpoReport, gradient_norm: f64, epoch: usize) {
    if epoch == 0 {
        let mut entropies = [0.0; HEAD_COUNT];
        entropies.iter_mut().zip(&of.heads).for_each(|(to, head)| *to = head.entropy);
        report.entropies = entropies;
        let explained = of.explained_variance;
        report.explained_variance = if explained.is_finite() { explained } else { 0.0 };
    }
    let used: u64 = of.heads.iter().map(|head| head.count).sum();
    let clipped: f64 = of.heads.iter().map(|head| head.count as f64 * head.clipped).sum();
    report.clip_fraction = clipped / used.max(1) as f64;
    report.kl = of.kl;
    report.policy_objective = -of.policy_loss;
    report.value_loss = of.value_loss;
    report.gradient_norm = gradient_norm;
}
