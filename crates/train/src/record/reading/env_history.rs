//! One env in the newest round, in bounded memory.

use std::collections::BTreeMap;

use meristem_grow::Stage;

use crate::record::events::{ModuleOff, Recorded, StepCompleted};
use crate::record::reading::curve::{Curve, POINTS_MAX};

/// Envs that are kept; further ones are only part of the means over all envs.
pub(super) const ENVS_MAX: usize = 1024;
/// Largest number of envs whose curves have full length; curves of more envs are shorter.
const ENVS_FULL: usize = 128;
/// Maximum number of spans, of all envs and of one env.
const SPANS_MAX: [usize; 2] = [1 << 18, 1 << 14];
/// Slots of an env that are kept. Hosts of the families `cnn` and `mlp` have fewer; of a described
/// host with more slots, the first are kept.
const SLOTS_MAX: usize = 64;
/// Longest text that is kept, in bytes.
const TEXT_MAX: usize = 256;

/// Steps in which a slot had the same module in the same stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Name of the slot.
    pub slot: String,
    /// Stage.
    pub stage: Recorded<Stage>,
    /// Name of the blueprint, while the slot has a module.
    pub blueprint: Option<String>,
    /// First step, from 0.
    pub from: usize,
    /// Step after the last one.
    pub to: usize,
}

/// One env in the newest round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EnvHistory {
    /// Mean training loss over the steps.
    pub train_loss: Curve,
    /// Control loss over the steps.
    pub control_loss: Curve,
    /// Control score over the steps.
    pub control_score: Curve,
    /// Control score of the bare twin over the steps.
    pub twin_score: Curve,
    /// Trained parameters of host and modules over the steps.
    pub parameters: Curve,
    /// Newest step.
    pub last: Option<StepCompleted>,
    /// Stages of the slots over the steps, in the order in which they began. When there are too
    /// many, the shortest ones that have ended are left out.
    pub spans: Vec<Span>,
    /// Newest contributions.
    pub modules: Vec<ModuleOff>,
    /// Trained parameters of the modules by slot.
    pub module_parameters: BTreeMap<String, usize>,
    /// Control and test score at the end of the episode.
    pub result: Option<[Option<f64>; 2]>,
    /// Maximum number of spans.
    spans_max: usize,
}

/// Shortens a text to [`TEXT_MAX`] bytes.
pub(super) fn shorten(text: &mut String) {
    if text.len() > TEXT_MAX {
        let end = (0..=TEXT_MAX).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        text.shrink_to_fit();
    }
}

impl EnvHistory {
    /// The empty history of one of `envs` envs.
    pub(super) fn new(envs: usize) -> Self {
        let mut env = Self::default();
        env.limit(envs);
        env
    }

    /// Lowers the limits of points and spans to the share of one of `envs` envs.
    pub(super) fn limit(&mut self, envs: usize) {
        let envs = envs.next_power_of_two();
        let points_max = POINTS_MAX * ENVS_FULL / envs.max(ENVS_FULL);
        let Self { train_loss, control_loss, control_score, twin_score, parameters, .. } = self;
        for curve in [train_loss, control_loss, control_score, twin_score, parameters] {
            curve.limit(points_max);
        }
        let [all, each] = SPANS_MAX;
        self.spans_max = each.min(all / envs);
        self.thin_spans();
    }

    /// Memory in bytes, roughly.
    pub(super) fn bytes(&self) -> usize {
        let Self { train_loss, control_loss, control_score, twin_score, parameters, .. } = self;
        let curves = [train_loss, control_loss, control_score, twin_score, parameters];
        let points: usize = curves.iter().map(|curve| curve.points_kept()).sum();
        points * size_of::<[f64; 2]>() + self.spans.len() * (size_of::<Span>() + 32)
    }

    /// Adds a step.
    pub(super) fn step(&mut self, mut step: StepCompleted, parameters: f64) {
        let x = step.step as f64;
        let known = |value: Option<f64>| value.unwrap_or(f64::NAN);
        self.train_loss.push(x, step.train_loss);
        self.control_loss.push(x, known(step.control_loss));
        self.control_score.push(x, known(step.control_score));
        self.twin_score.push(x, known(step.twin.and_then(|twin| twin.control_score)));
        self.parameters.push(x, parameters);
        step.slots.truncate(SLOTS_MAX);
        step.slots.shrink_to_fit();
        for state in &mut step.slots {
            shorten(&mut state.slot);
            if let Recorded::Later(text) = &mut state.stage {
                shorten(text);
            }
            state.blueprint.iter_mut().for_each(shorten);
        }
        shorten(&mut step.action);
        // No reader uses them.
        (step.gradients, step.fingerprint) = (None, None);
        self.extend_spans(&step);
        self.last = Some(step);
    }

    /// Extends the span of each slot by a step, or begins a new span if the slot has changed.
    fn extend_spans(&mut self, step: &StepCompleted) {
        for state in &step.slots {
            let before = self.spans.iter().rposition(|span| span.slot == state.slot);
            let same = before.filter(|at| {
                let span = &self.spans[*at];
                let goes_on = (span.to, &span.stage) == (step.step, &state.stage);
                goes_on && span.blueprint == state.blueprint
            });
            let to = step.step.saturating_add(1);
            match same {
                Some(at) => self.spans[at].to = to,
                None => {
                    self.spans.push(Span {
                        slot: state.slot.clone(),
                        stage: state.stage.clone(),
                        blueprint: state.blueprint.clone(),
                        from: step.step,
                        to,
                    });
                    self.thin_spans();
                }
            }
        }
    }

    /// Drops the shorter half of the spans once there are too many to draw. Spans that reach the
    /// newest step may still grow, and count as the longest.
    fn thin_spans(&mut self) {
        while self.spans.len() > self.spans_max {
            let newest = self.spans.iter().map(|span| span.to).max();
            let length = |span: &Span| {
                if Some(span.to) == newest { usize::MAX } else { span.to.saturating_sub(span.from) }
            };
            let mut lengths: Vec<usize> = self.spans.iter().map(length).collect();
            let half = (lengths.len() / 2).max(1);
            let (_, &mut median, _) = lengths.select_nth_unstable(half - 1);
            let mut left = half;
            self.spans.retain(|span| {
                let leaves = left > 0 && length(span) <= median;
                left -= usize::from(leaves);
                !leaves
            });
        }
    }

    /// Adds the newest contributions.
    pub(super) fn contributions(&mut self, mut modules: Vec<ModuleOff>) {
        modules.truncate(SLOTS_MAX);
        modules.shrink_to_fit();
        modules.iter_mut().for_each(|module| shorten(&mut module.slot));
        self.modules = modules;
    }

    /// Adds a module.
    pub(super) fn module(&mut self, mut slot: String, parameters: usize) {
        shorten(&mut slot);
        let known = &mut self.module_parameters;
        if known.len() < SLOTS_MAX || known.contains_key(&slot) {
            known.insert(slot, parameters);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(from: usize, to: usize) -> Span {
        Span { slot: "r0c1".into(), stage: Stage::Training.into(), blueprint: None, from, to }
    }

    #[test]
    fn long_spans_and_those_that_go_on_stay() {
        let mut env = EnvHistory { spans_max: 8, ..EnvHistory::default() };
        env.spans = (0..8).map(|at| span(10 * at, 10 * at + 1 + at % 2 * 8)).collect();
        env.spans.insert(0, span(85, 86));
        env.thin_spans();
        let from: Vec<usize> = env.spans.iter().map(|span| span.from).collect();
        assert_eq!(from, [85, 10, 30, 50, 70]);
        env.spans = vec![span(0, 1); 100];
        env.thin_spans();
        assert!((1..=8).contains(&env.spans.len()), "{}", env.spans.len());
    }

    #[test]
    fn many_envs_share_what_is_kept() {
        let mut env = EnvHistory::new(1);
        (0..5000).for_each(|step| env.train_loss.push(f64::from(step), 1.0));
        (0..20_000).for_each(|step| env.spans.push(span(step, step + 1)));
        env.limit(1);
        assert!(env.train_loss.points().len() > 512 && env.spans.len() > 4096);
        env.limit(ENVS_MAX);
        assert!(env.train_loss.points().len() <= 128 && env.spans.len() <= 256);
        let mut long = "é".repeat(1000);
        shorten(&mut long);
        assert_eq!(long.len(), TEXT_MAX);
        env.contributions(vec![]);
        (0..1000).for_each(|slot| env.module(format!("{slot}"), 1));
        assert_eq!(env.module_parameters.len(), SLOTS_MAX);
    }
}
