//! Aggregation of events into curves, stages and diagnostics.

use std::collections::{BTreeMap, VecDeque};

use meristem_control::{HEAD_COUNT, RoundReport};
use meristem_nn::ScoreKind;

use crate::error::Result;
use crate::record::events::{
    Counterfactuals, Event, Extension, Recorded, RunStarted, StepCompleted,
};
use crate::record::reading::curve::Curve;
use crate::record::reading::env_history::{ENVS_MAX, EnvHistory, shorten};
use crate::record::reading::members_history::{MemberCopy, MembersHistory};
use crate::record::reading::tail::{EventLine, EventTail, Reached};
use crate::record::status::Status;

/// Incidents that are kept, the newest ones.
const INCIDENTS_MAX: usize = 256;
/// Bytes read between two checks for a file that was cut.
const PART_BYTES: u64 = 64 << 20;

/// Failure of an env: a rollback or an anomaly.
#[derive(Clone, Debug, PartialEq)]
pub struct Incident {
    /// Number of the env.
    pub env: usize,
    /// Number of the round.
    pub round: usize,
    /// Number of the step.
    pub step: usize,
    /// Description.
    pub what: String,
}

/// Development of a policy over the rounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyHistory {
    /// Sum of the rewards of an env, as the mean over the envs.
    pub mean_return: Curve,
    /// KL divergence from the acting policy, in the last minibatch.
    pub kl: Curve,
    /// Explained variance of the value function.
    pub explained_variance: Curve,
    /// Mean normalised entropy of each head.
    pub entropies: [Curve; HEAD_COUNT],
    /// Newest report.
    pub last: Option<RoundReport>,
}

/// Aggregated events of a run so far, in bounded memory for any events.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunHistory {
    /// Description of the run.
    pub started: Option<RunStarted>,
    /// Number of the newest round.
    pub round: usize,
    /// Steps so far, over all rounds.
    pub steps: usize,
    /// Time of the newest event, in seconds since the run started.
    pub seconds: f64,
    /// Envs by number, in the newest round.
    pub envs: BTreeMap<usize, EnvHistory>,
    /// Mean control score of the envs over all steps of all rounds.
    pub score: Curve,
    /// Mean control score of the bare twins, likewise.
    pub twin_score: Curve,
    /// Mean training loss of the envs over all steps of all rounds.
    pub train_loss: Curve,
    /// Mean number of trained parameters over all steps of all rounds.
    pub parameters: Curve,
    /// Images trained per second, for all envs together, over all steps.
    pub images_per_s: Curve,
    /// The policy, if one learns.
    pub policy: PolicyHistory,
    /// Members, if the run has any.
    pub members: MembersHistory,
    /// Rollbacks and anomalies, the newest 256.
    pub incidents: VecDeque<Incident>,
    /// Number of rollbacks.
    pub rollbacks: u64,
    /// Status and error at the end of the run.
    pub ended: Option<(Recorded<Status>, Option<String>)>,
    mean: StepMean,
}

/// Sums over the envs of the step that is being read.
#[derive(Clone, Debug, Default, PartialEq)]
struct StepMean {
    /// Round and step.
    place: Option<(usize, usize)>,
    // Sum and number of values.
    score: (f64, usize),
    twin: (f64, usize),
    train_loss: (f64, usize),
    parameters: (f64, usize),
    images_per_s: Option<f64>,
}

/// Adds a value, if it is known and finite, to a sum and its number of values.
fn add(to: &mut (f64, usize), value: Option<f64>) {
    if let Some(value) = value.filter(|value| value.is_finite()) {
        *to = (to.0 + value, to.1 + 1);
    }
}

impl RunHistory {
    /// Reads the events up to the end of the file.
    ///
    /// # Errors
    /// As [`EventTail::read`].
    pub fn read(tail: &mut EventTail) -> Result<Self> {
        let mut history = Self::default();
        while history.follow(tail, PART_BYTES)? != Reached::End {}
        history.end_step();
        Ok(history)
    }

    /// Reads about `bytes_max` further bytes. Starts over if the file was restarted.
    ///
    /// # Errors
    /// As [`EventTail::read`].
    pub fn follow(&mut self, tail: &mut EventTail, bytes_max: u64) -> Result<Reached> {
        let reached = tail.read(bytes_max, &mut |line| self.add(line))?;
        if reached == Reached::Restarted {
            *self = Self::default();
        }
        Ok(reached)
    }

    /// Kind of the scores; the accuracy before the run has started.
    pub fn score_kind(&self) -> ScoreKind {
        self.started.as_ref().map(|started| started.task.score()).unwrap_or_default()
    }

    /// Memory of the curves and stages of all envs in bytes, roughly.
    pub fn bytes(&self) -> usize {
        self.envs.values().map(EnvHistory::bytes).sum()
    }

    /// Adds an event.
    pub fn add(&mut self, line: EventLine) {
        self.seconds = line.seconds;
        match line.event {
            Event::RunStarted(started) => {
                self.members = MembersHistory::new(&started.members, started.places);
                self.started = Some(started);
            }
            Event::MembersEnded { members, step, reason, .. } => {
                self.members.end(&members, step, &reason);
            }
            Event::MemberBegun { member, step, settings, .. } => {
                self.members.begin(member, step, settings);
            }
            Event::MemberCopied { member, from, step, settings, .. } => {
                self.members.copy(MemberCopy { member, from, step }, settings);
            }
            Event::RunExtended(Extension { steps, rounds, .. }) => {
                if let Some(started) = &mut self.started {
                    (started.steps, started.rounds) = (steps, rounds);
                }
            }
            Event::RoundStarted { round } => {
                self.end_step();
                self.round = round;
                self.envs.clear();
            }
            Event::StepCompleted(step) => self.step(step),
            Event::ModuleGerminated { env, slot, parameters, .. } => {
                self.env(env, |env| env.module(slot, parameters));
            }
            Event::Counterfactuals(Counterfactuals { env, modules, .. }) => {
                self.env(env, |env| env.contributions(modules));
            }
            Event::PolicyUpdated { round, report } => self.policy.add(round, report),
            Event::GovernorRollback { env, round, step, failure, pruned, .. } => {
                self.rollbacks += 1;
                let mut what = format!("rolled back: {}", failure.describe());
                if !pruned.is_empty() {
                    what.push_str(&format!("; removed {}", pruned.join(", ")));
                }
                self.incident(Incident { env, round, step, what });
            }
            Event::Anomaly { env, round, step, what } => {
                self.incident(Incident { env, round, step, what });
            }
            Event::EpisodeEnded { env, control_score, test_score, .. } => {
                self.env(env, |env| env.result = Some([control_score, test_score]));
            }
            Event::RunEnded { status, error, .. } => {
                self.end_step();
                self.ended = Some((status, error));
            }
            _ => {}
        }
    }

    /// Changes the history of an env. A new env is added, unless there are too many.
    fn env(&mut self, number: usize, change: impl FnOnce(&mut EnvHistory)) {
        if !self.envs.contains_key(&number) {
            if self.envs.len() >= ENVS_MAX {
                return;
            }
            let (before, envs) = (self.envs.len(), self.envs.len() + 1);
            // Once the number of envs exceeds a power of two, the limits of each are halved.
            if before.next_power_of_two() < envs {
                self.envs.values_mut().for_each(|env| env.limit(envs));
            }
            self.envs.insert(number, EnvHistory::new(envs));
        }
        self.envs.get_mut(&number).map(change);
    }

    fn incident(&mut self, mut incident: Incident) {
        shorten(&mut incident.what);
        self.incidents.push_back(incident);
        if self.incidents.len() > INCIDENTS_MAX {
            self.incidents.pop_front();
        }
    }

    fn step(&mut self, step: StepCompleted) {
        let place = Some((step.round, step.step));
        if self.mean.place != place {
            self.end_step();
            self.mean.place = place;
        }
        let parameters = step.host_parameters as f64 + step.grown_parameters as f64;
        add(&mut self.mean.score, step.control_score);
        add(&mut self.mean.twin, step.twin.and_then(|twin| twin.control_score));
        add(&mut self.mean.train_loss, Some(step.train_loss));
        add(&mut self.mean.parameters, Some(parameters));
        self.mean.images_per_s = step.images_per_s.or(self.mean.images_per_s);
        self.members.step(step.env, step.step, step.control_score);
        self.env(step.env, |env| env.step(step, parameters));
    }

    /// Ends the step whose envs were read.
    fn end_step(&mut self) {
        let mean = std::mem::take(&mut self.mean);
        if mean.place.is_none() {
            return;
        }
        let x = self.steps as f64;
        self.steps += 1;
        let share = |(sum, count): (f64, usize)| sum / count as f64;
        self.score.push(x, share(mean.score));
        self.twin_score.push(x, share(mean.twin));
        self.train_loss.push(x, share(mean.train_loss));
        self.parameters.push(x, share(mean.parameters));
        self.images_per_s.push(x, mean.images_per_s.unwrap_or(f64::NAN));
    }
}

impl PolicyHistory {
    fn add(&mut self, round: usize, report: RoundReport) {
        let x = round as f64;
        self.mean_return.push(x, report.mean_return);
        self.kl.push(x, report.kl);
        self.explained_variance.push(x, report.explained_variance);
        for (curve, entropy) in self.entropies.iter_mut().zip(report.entropies) {
            curve.push(x, entropy);
        }
        self.last = Some(report);
    }
}

#[cfg(test)]
mod tests {
    use meristem_grow::Stage;
    use serde_json::{Value, json};

    use super::*;
    use crate::sweep::EndReason;

    fn line(event: Value) -> EventLine {
        EventLine { seq: 0, seconds: 1.0, event: serde_json::from_value(event).unwrap() }
    }

    fn step(env: usize, step: usize, accuracy: f64, stage: &str) -> EventLine {
        line(json!({"event": "step_completed", "env": env, "round": 0, "step": step,
            "train_loss": null, "train_accuracy": 0.5, "control_loss": 1.0,
            "control_accuracy": accuracy, "host_gradient_norm": null, "host_parameters": 10,
            "grown_parameters": 5, "action": "WAIT", "step_seconds": null, "images_per_s": null,
            "reward": {"gain": null, "rent": 0.0, "potential": 0.0, "fossilize": 0.0, "prune": 0.0,
                "op": 0.0, "result": 0.0},
            "slots": [{"slot": "r0c1", "stage": stage, "blueprint": "norm", "alpha": 0.5,
                "contribution": null, "gradient_health": null}]}))
    }

    #[test]
    fn steps_become_means_curves_and_spans() {
        let mut history = RunHistory::default();
        for (number, stage) in ["training", "training", "blending", "training"].iter().enumerate() {
            let share = number as f64 / 10.0;
            history.add(step(0, number, share, stage));
            history.add(step(7, number, share + 0.5, stage));
        }
        history.end_step();
        let close = |(a, b): (&[f64; 2], &[f64; 2])| a[0] == b[0] && (a[1] - b[1]).abs() < 1e-12;
        let expected = [[0.0, 0.25], [1.0, 0.35], [2.0, 0.45], [3.0, 0.55]];
        let points = history.score.points();
        assert!(points.len() == 4 && points.iter().zip(&expected).all(close), "{points:?}");
        assert_eq!((history.steps, history.parameters.last()), (4, Some(15.0)));
        assert!(history.train_loss.is_empty(), "a loss that is not finite has no point");
        let spans: Vec<_> =
            history.envs[&7].spans.iter().map(|s| (s.stage.known(), s.from, s.to)).collect();
        let [training, blending] = [Stage::Training, Stage::Blending].map(Some);
        assert_eq!(spans, [(training, 0, 2), (blending, 2, 3), (training, 3, 4)]);
        history.add(line(json!({"event": "round_started", "round": 1})));
        assert!(history.envs.is_empty() && history.round == 1);
    }

    #[test]
    fn members_end_and_become_copies() {
        let mut history = RunHistory::default();
        let settings = vec!["lr=0.1".to_string(), "lr=0.2".into(), "lr=0.3".into()];
        history.members = MembersHistory::new(&settings, None);
        history.add(line(json!({"event": "members_ended", "members": [0, 2, 99], "round": 0,
            "step": 3, "reason": "rung", "left": 1})));
        history.add(line(json!({"event": "member_copied", "member": 2, "from": 1, "round": 0,
            "step": 4, "settings": "lr=0.25"})));
        history.add(line(json!({"event": "members_ended", "members": [1], "round": 0, "step": 5,
            "reason": "x".repeat(9999), "left": 1})));
        let members = &history.members;
        assert_eq!((members.all().len(), members.trained()), (3, 1));
        let [first, second, third] = [0, 1, 2].map(|env| members.of_env(3 + env).unwrap());
        assert_eq!(first.ended, Some((3, EndReason::Rung.into())));
        assert_eq!(second.ended.as_ref().unwrap().1.to_string().len(), 256);
        assert_eq!((third.copied, &*third.settings), (Some((1, 4)), "lr=0.25"));
        let copies: Vec<MemberCopy> = members.copies().copied().collect();
        assert_eq!(copies, [MemberCopy { member: 2, from: 1, step: 4 }]);
        assert_eq!(RunHistory::default().members.of_env(0), None);
    }

    /// A member is measured by all its envs in their newest step.
    #[test]
    fn members_have_the_mean_score_of_their_envs() {
        let members = MembersHistory::new(&["lr=0.1; host=a".into(), "lr=0.2".into()], None);
        let mut history = RunHistory { members, ..RunHistory::default() };
        for (env, number, score) in
            [(0, 0, 0.9), (2, 0, 0.9), (0, 1, 0.25), (1, 1, 0.5), (2, 1, 0.75)]
        {
            history.add(step(env, number, score, "training"));
        }
        let [first, second] = [0, 1].map(|env| history.members.of_env(env).unwrap());
        assert_eq!((first.score(), first.steps()), (Some(0.5), Some(2)));
        assert_eq!((second.score(), second.steps()), (Some(0.5), Some(2)));
        assert_eq!(first.values().collect::<Vec<_>>(), [("lr", "0.1"), ("host", "a")]);
        history.add(line(json!({"event": "member_copied", "member": 0, "from": 1, "round": 0,
            "step": 1, "settings": "lr=0.25"})));
        let copy = history.members.of_env(0).unwrap();
        assert_eq!((copy.score(), copy.steps()), (Some(0.5), Some(2)));
    }

    /// Events may name any number.
    #[test]
    fn memory_is_bounded() {
        let mut history = RunHistory::default();
        for env in 0..3 * ENVS_MAX {
            history.add(step(usize::MAX - env, usize::MAX, 0.5, "training"));
        }
        for number in 0..3 * INCIDENTS_MAX {
            history.add(line(json!({"event": "anomaly", "env": number, "round": 0, "step": 0,
                "what": "x"})));
        }
        for number in 0..1000 {
            history.add(step(usize::MAX, 2 * number, 0.5, "training"));
        }
        assert_eq!(history.envs.len(), ENVS_MAX);
        assert_eq!(history.incidents.len(), INCIDENTS_MAX);
        assert!(history.envs[&usize::MAX].spans.len() <= 256);
        let long = "x".repeat(100_000);
        let slot = json!({"slot": long, "stage": long, "blueprint": long, "alpha": 0.5,
            "contribution": null, "gradient_health": null});
        let mut huge = step(usize::MAX, 5000, 0.5, "training");
        let Event::StepCompleted(event) = &mut huge.event else { panic!() };
        let slots = serde_json::from_value(json!(vec![slot; 100])).unwrap();
        (event.slots, event.action) = (slots, long.clone());
        history.add(huge);
        let last = history.envs[&usize::MAX].last.as_ref().unwrap();
        assert_eq!((last.slots.len(), last.action.len(), last.slots[0].slot.len()), (64, 256, 256));
        assert_eq!(last.slots[0].stage.to_string().len(), 256);
        assert_eq!(last.slots[0].blueprint.as_ref().map(String::len), Some(256));
    }
}
