//! Telemetry: details of a step that are recorded for readers only, and the steps that record them.
//!
//! Nothing is measured for telemetry. Gradient norms are computed for clipping, in the launch of
//! the training step, and come with the step's one read-back; gates and policies use the gradient
//! health that follows from them in every step and at every level. Losses, scores and
//! contributions are used for decisions as well, and Shapley values follow from configurations
//! whose interactions a policy sees. So a level only changes the contents of events and the use of
//! the clock. Times are taken where the host thread is anyway, without waiting for a device. The
//! time from the beginning of a step until its metrics are read back is always taken, for the
//! summary of the run.

use std::time::Instant;

use meristem_nn::GroupMetrics;

use crate::config::TrainConfig;
use crate::env::TrainedHost;
use crate::error::Result;
use crate::record::events::{GradientStatistics, PhaseSeconds, StepCompleted};
use crate::settings::Telemetry;

/// Details that the events of a step have. They follow from settings and step, so that a resumed
/// run records the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepDetails {
    gradients: bool,
    times: bool,
    full: bool,
}

impl StepDetails {
    /// The details of a step of a round.
    pub(crate) fn new(config: &TrainConfig, step: usize) -> Self {
        let due = |every: usize| config.telemetry != Telemetry::Off && step.is_multiple_of(every);
        Self {
            gradients: due(config.gradient_stats_every),
            times: due(config.time_every),
            full: config.telemetry == Telemetry::Full,
        }
    }

    /// Whether gradient statistics are recorded.
    pub(crate) fn gradients(self) -> bool {
        self.gradients
    }

    /// Mean gradient norm of the host without modules, if it is recorded.
    pub(crate) fn host_gradient_norm(self, grown: &TrainedHost) -> Option<f64> {
        grown.metrics.groups.first().filter(|_| self.gradients)?.mean_norm()
    }

    /// Gradient statistics of every group of the network, if they are recorded.
    pub(crate) fn gradient_statistics(
        self,
        grown: &TrainedHost,
    ) -> Option<Vec<GradientStatistics>> {
        let named = grown.network.graph().groups.iter().zip(&grown.metrics.groups);
        let all = named.map(|(group, metrics)| statistics(&group.name, metrics));
        (self.gradients && self.full).then(|| all.collect())
    }
}

fn statistics(group: &str, metrics: &GroupMetrics) -> GradientStatistics {
    let share = |count: u64| (metrics.tensors > 0).then(|| count as f64 / metrics.tensors as f64);
    GradientStatistics {
        group: group.into(),
        norm: metrics.mean_norm(),
        last_norm: Some(metrics.last_norm).filter(|norm| norm.is_finite()),
        vanishing: share(metrics.vanishing),
        exploding: share(metrics.exploding),
    }
}

/// Clock of the CPU thread over one step.
#[derive(Debug)]
pub(crate) struct StepClock {
    details: StepDetails,
    started: Instant,
    /// Seconds until all metrics were read back.
    seconds: f64,
    last: Instant,
    phases: PhaseSeconds,
}

impl StepClock {
    /// Starts the clock at the beginning of a step.
    pub(crate) fn start(details: StepDetails) -> Self {
        let now = Instant::now();
        Self { details, started: now, seconds: 0.0, last: now, phases: PhaseSeconds::default() }
    }

    /// Runs a phase, which began at the end of the one before, and measures its duration if phases
    /// are recorded.
    pub(crate) fn time<T>(
        &mut self,
        phase: impl FnOnce(&mut PhaseSeconds) -> &mut f64,
        act: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let done = act()?;
        if self.details.times && self.details.full {
            let now = Instant::now();
            *phase(&mut self.phases) = (now - self.last).as_secs_f64();
            self.last = now;
        }
        Ok(done)
    }

    /// The details to record.
    pub(crate) fn details(&self) -> StepDetails {
        self.details
    }

    /// Notes that all metrics were read back. Returns the seconds since the beginning of the step.
    pub(crate) fn measured(&mut self) -> f64 {
        self.seconds = self.started.elapsed().as_secs_f64();
        self.seconds
    }

    /// Adds the times to the event of a step that trained `images` images.
    pub(crate) fn add_times(&self, event: &mut StepCompleted, images: u64) {
        if self.details.times {
            event.step_seconds = Some(self.seconds);
            event.images_per_s = Some(images as f64 / self.seconds);
            event.phases = self.details.full.then_some(self.phases);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::checkpoint::{Checkpoint, Store};
    use crate::config::ConfigLayer;
    use crate::record::directory::Directory;
    use crate::record::event_writer::EventsPosition;
    use crate::record::events::Event;
    use crate::record::observer::Observer;
    use crate::settings::{BatchLimit, ControllerKind, Preset};

    const STEPS: usize = 6;

    /// Stops in the middle of the second round, so that a checkpoint with envs, policy and rollout
    /// remains.
    #[derive(Default)]
    struct Stops {
        done: usize,
    }

    impl Observer for Stops {
        fn event(&mut self, event: &Event) {
            self.done += usize::from(matches!(event, Event::StepCompleted(step) if step.env == 1));
        }

        fn stop_requested(&self) -> bool {
            self.done >= STEPS + STEPS / 2
        }
    }

    /// Results of a run.
    struct RunResults {
        events: Vec<Value>,
        /// File names and contents.
        weights: Vec<(String, Vec<u8>)>,
        /// The newest checkpoint, without times and without the position in the events.
        checkpoint: Checkpoint,
    }

    /// Runs a learning policy on two small hosts with growing modules.
    fn left(level: Telemetry, every: usize) -> RunResults {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let flags = ConfigLayer {
            preset: Some(Preset::Quick),
            host: Some("minimal".into()),
            controller: Some(ControllerKind::Ppo),
            policy_hidden: Some(Some(8)),
            envs: Some(2),
            steps: Some(STEPS),
            rounds: Some(2),
            batch: Some(16),
            max_batches: Some(BatchLimit::Count(3)),
            control_split: Some(Some(0.02)),
            min_training_steps: Some(1),
            run_dir: Some(Some(run.clone())),
            telemetry: Some(level),
            gradient_stats_every: Some(every),
            time_every: Some(every),
            ..ConfigLayer::default()
        };
        let config = TrainConfig::resolve(ConfigLayer::default(), flags).unwrap();
        crate::run(&config, &mut Stops::default()).unwrap();
        let (file, bytes) =
            Store::new(&Directory::open(&run).unwrap()).unwrap().newest().unwrap().unwrap();
        let mut checkpoint = Checkpoint::from_bytes(&file, &bytes).unwrap();
        checkpoint.progress.totals.step_seconds = 0.0;
        checkpoint.progress.events = EventsPosition::default();
        let mut weights = vec![];
        for path in std::fs::read_dir(run.join("weights")).unwrap().map(|file| file.unwrap().path())
        {
            weights.push((path.display().to_string(), std::fs::read(&path).unwrap()));
        }
        weights.sort_unstable();
        weights
            .iter_mut()
            .for_each(|(name, _)| *name = name.split('/').next_back().unwrap().into());
        let text = std::fs::read_to_string(run.join("events.jsonl")).unwrap();
        let events = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        RunResults { events, weights, checkpoint }
    }

    /// Events without telemetry and times.
    fn happened(events: &[Value]) -> Vec<Value> {
        let mut events = events.to_vec();
        for event in &mut events {
            let event = event.as_object_mut().unwrap();
            let telemetry =
                ["host_gradient_norm", "step_seconds", "images_per_s", "phases", "gradients"];
            for key in telemetry.into_iter().chain(["seconds", "wall_seconds", "crc32"]) {
                event.remove(key);
            }
            let slots = event.get_mut("slots").and_then(Value::as_array_mut);
            for slot in slots.into_iter().flatten() {
                slot.as_object_mut().unwrap().remove("gradient_health");
            }
        }
        events
    }

    fn steps(events: &[Value]) -> impl Iterator<Item = &Value> {
        events.iter().filter(|event| event["event"] == "step_completed")
    }

    /// No level changes a bit of weights, policy, checkpoint or decisions.
    #[test]
    fn no_result_depends_on_telemetry() {
        let levels =
            [Telemetry::Basic, Telemetry::Off, Telemetry::Full].map(|level| left(level, 1));
        let [basic, others @ ..] = &levels;
        let grown = basic.events.iter().any(|event| event["event"] == "module_germinated");
        assert!(grown, "something is decided");
        assert!(!basic.checkpoint.envs.is_empty() && basic.weights.len() == 2);
        for other in others {
            assert!(other.weights == basic.weights, "other weights");
            // As text, because NaN does not equal itself; the text has every bit of finite numbers.
            assert_eq!(format!("{:?}", other.checkpoint), format!("{:?}", basic.checkpoint));
            assert_eq!(happened(&other.events), happened(&basic.events));
        }
    }

    #[test]
    fn a_level_records_its_details_every_few_steps() {
        let has_value =
            |event: &Value, key: &str| event.get(key).is_some_and(|value| !value.is_null());
        for (level, every) in [(Telemetry::Off, 1), (Telemetry::Basic, 1), (Telemetry::Full, 2)] {
            let left = left(level, every);
            let mut health = 0;
            for event in steps(&left.events) {
                let due = event["step"].as_u64().unwrap().is_multiple_of(every as u64);
                let basic = level != Telemetry::Off && due;
                for key in ["host_gradient_norm", "step_seconds", "images_per_s"] {
                    assert_eq!(has_value(event, key), basic, "{level} {key} {event}");
                }
                for key in ["phases", "gradients"] {
                    assert_eq!(
                        has_value(event, key),
                        level == Telemetry::Full && due,
                        "{key} {event}"
                    );
                }
                let slots = event["slots"].as_array().unwrap();
                let healthy =
                    slots.iter().filter(|slot| has_value(slot, "gradient_health")).count();
                assert!(basic || healthy == 0, "{level} {event}");
                health += healthy;
                if has_value(event, "gradients") {
                    let host = &event["gradients"][0];
                    assert_eq!(
                        (&host["group"], &host["norm"]),
                        (&"host".into(), &event["host_gradient_norm"])
                    );
                    let phases = event["phases"].as_object().unwrap();
                    let sum: f64 = phases.values().map(|seconds| seconds.as_f64().unwrap()).sum();
                    assert!(sum >= event["step_seconds"].as_f64().unwrap() && phases.len() == 4);
                }
            }
            assert_eq!(health > 0, level != Telemetry::Off, "{level}");
        }
    }
}
