//! A policy that is the controller of one run after another, and the observer of such a run.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use meristem_control::{
    Action, Controller, ControllerState, EnvView, Ppo, Result as ControlResult, RoundReport,
    TeacherRules,
};
use meristem_nn::safetensors::Metadata;
use meristem_nn::{Network, StateDict};

use super::TrainingObserver;
use super::report::TaskResult;
use crate::error::Result;
use crate::record::events::Event;
use crate::record::observer::Observer;

/// A policy that runs share, one after the other.
#[derive(Clone)]
pub(super) struct SharedPolicy(Arc<Mutex<Ppo>>);

impl SharedPolicy {
    pub(super) fn new(policy: Ppo) -> Self {
        Self(Arc::new(Mutex::new(policy)))
    }

    /// The policy as the controller of a run.
    pub(super) fn controller(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    /// [`Ppo::save_learned`].
    pub(super) fn save_learned(&self) -> Result<ControllerState> {
        Ok(self.get().save_learned()?)
    }

    /// Restores a state, also after a run that failed or was stopped.
    pub(super) fn restore(&self, state: &ControllerState) -> Result<()> {
        Ok(self.get().restore(state)?)
    }

    /// [`Ppo::set_teacher_rules`].
    pub(super) fn set_teacher_rules(&self, rules: Vec<TeacherRules>) {
        self.get().set_teacher_rules(rules);
    }

    /// [`Ppo::export`].
    pub(super) fn export(&self) -> Result<(StateDict, Metadata)> {
        Ok(self.get().export()?)
    }

    fn get(&self) -> MutexGuard<'_, Ppo> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Controller for SharedPolicy {
    fn name(&self) -> &str {
        "ppo"
    }

    fn begin_episode(&mut self, env: usize) {
        self.get().begin_episode(env);
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> ControlResult<Vec<Action>> {
        self.get().decide_all(views)
    }

    fn reward_all(&mut self, rewards: &[f32]) -> ControlResult<()> {
        self.get().reward_all(rewards)
    }

    fn roll_back(&mut self, env: usize, cause: Option<usize>, penalty: f32) -> ControlResult<()> {
        self.get().roll_back(env, cause, penalty)
    }

    fn end_round(&mut self, last: &[EnvView<'_>]) -> ControlResult<Option<RoundReport>> {
        self.get().end_round(last)
    }
}

/// Results of an env so far.
#[derive(Clone, Copy, Default)]
struct EnvResult {
    rewards: f64,
    gain: f64,
    growth: f64,
    /// Parameters with which the host began; 0 before the first step.
    host_parameters: usize,
}

/// Observer of the run of one episode.
pub(super) struct EpisodeObserver<'a> {
    outer: &'a mut dyn TrainingObserver,
    started: Instant,
    first_step: Option<Instant>,
    envs: Vec<EnvResult>,
    /// Report of the policy's update.
    pub(super) report: Option<RoundReport>,
}

impl<'a> EpisodeObserver<'a> {
    pub(super) fn new(outer: &'a mut dyn TrainingObserver, envs: usize) -> Self {
        let (started, first_step, report) = (Instant::now(), None, None);
        Self { outer, started, first_step, envs: vec![EnvResult::default(); envs], report }
    }

    /// Seconds until the end of the first step.
    pub(super) fn first_step_seconds(&self) -> f64 {
        self.first_step.map_or(0.0, |at| (at - self.started).as_secs_f64())
    }

    /// Means over the envs.
    pub(super) fn result(&self) -> TaskResult {
        let mean = |of: fn(&EnvResult) -> f64| {
            self.envs.iter().map(of).sum::<f64>() / self.envs.len() as f64
        };
        let mean_return = mean(|env| env.rewards);
        let squares = self.envs.iter().map(|env| (env.rewards - mean_return).powi(2));
        let degrees = self.envs.len().saturating_sub(1).max(1) as f64;
        TaskResult {
            mean_return,
            env_std: (squares.sum::<f64>() / degrees).sqrt(),
            gain: mean(|env| env.gain),
            growth: mean(|env| env.growth),
        }
    }
}

impl Observer for EpisodeObserver<'_> {
    fn event(&mut self, event: &Event) {
        match event {
            Event::StepCompleted(step) => {
                self.first_step.get_or_insert_with(Instant::now);
                let Some(env) = self.envs.get_mut(step.env) else { return };
                env.rewards += step.reward.total();
                let twin = step.twin.and_then(|twin| twin.control_loss);
                let gain = twin.zip(step.control_loss).map(|(twin, own)| twin - own);
                env.gain = gain.filter(|gain| gain.is_finite()).unwrap_or(env.gain);
                // The size during the step: layers get wider after it.
                if env.host_parameters == 0 {
                    env.host_parameters = step.host_parameters;
                }
                let all = step.host_parameters + step.grown_parameters;
                env.growth = all as f64 / env.host_parameters.max(1) as f64;
            }
            Event::GovernorRollback { env, penalty, .. } => {
                if let Some(env) = self.envs.get_mut(*env) {
                    env.rewards += penalty;
                }
            }
            Event::PolicyUpdated { report, .. } => self.report = Some(report.clone()),
            _ => {}
        }
    }

    fn batch_enqueued(&mut self, env: usize, network: &Network) -> Result<()> {
        self.outer.batch_enqueued(env, network)
    }

    fn stop_requested(&self) -> bool {
        self.outer.stop_requested()
    }
}
