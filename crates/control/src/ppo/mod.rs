//! The learning controller: proximal policy optimisation (Schulman et al., 2017) over whole
//! episodes.
//!
//! A step is one copy to the device (`step_inputs`), one launch that ends with the draw of the
//! actions, and one read-back for all envs. The rollout keeps transitions on the policy's device.
//! At the end of a round `targets` computes advantages and returns there, and `update` trains the
//! policy on the whole round or on its minibatches (`minibatch`). In the first rounds the heuristic
//! may act instead (`teacher`).
//!
//! A rollback by the governor is a termination. With [`PpoConfig::bootstrap`] the end of an episode
//! is a truncation: V of the next observation replaces the rewards to come. Without it the end is a
//! termination.

mod calls;
mod config;
mod domain;
mod file;
mod gpu;
mod group;
mod minibatch;
mod normalizers;
mod outputs;
mod ranks;
mod rollout;
mod state;
mod step_inputs;
mod targets;
mod teacher;
mod update;

use meristem_device::{Stream, Tensor, read_back_as};
use meristem_grow::Host;
use meristem_nn::kernels::sample::SampleStep;
use meristem_nn::safetensors::Metadata;
use meristem_nn::{Isa, StateDict, ValueType};

use self::calls::protocol;
pub use self::config::PpoConfig;
pub use self::domain::PolicyDomain;
pub use self::file::{
    policy_domain, policy_is_of_sets, policy_observes_layers, policy_seeds, policy_width,
};
pub use self::group::PpoGroup;
use self::normalizers::Normalizers;
pub use self::outputs::PolicyOutputs;
use self::outputs::four_tensors;
use self::ranks::Ranks;
use self::rollout::{Rollout, RolloutShape};
use self::step_inputs::{StepHeader, StepInputs};
use self::targets::{ScalarMoments, Targets};
use self::teacher::Teacher;
pub use self::teacher::TeacherRules;
use crate::action::{Action, ActionOp, Choices, OpCounts};
use crate::controller::Controller;
use crate::error::Result;
use crate::heads::Floors;
use crate::layer_observation;
use crate::observation::observation_len;
use crate::policy::{
    ActTensors, LayerSet, Policy, PolicyConfig, PolicyForm, PolicyInputs, PolicyShape,
};
use crate::report::RoundReport;
use crate::set_observation::SetObserver;
use crate::state::ControllerState;
use crate::view::EnvView;
use crate::widening;

const NAME: &str = "ppo";

/// Whether the policy learns, and how it chooses actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learning {
    /// Draws actions, stores them, and learns at the end of a round.
    On,
    /// Draws actions with fixed weights.
    Off,
    /// Takes the most probable actions with fixed weights.
    Greedy,
}

/// Use of a policy in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PpoOptions {
    /// Number of envs.
    pub envs: usize,
    /// Largest number of steps of an episode.
    pub steps: usize,
    /// Seed of the initial weights and of the draws.
    pub seed: u64,
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Whether the policy learns, and how it chooses actions.
    pub learning: Learning,
    /// Element type of the policy's values in the memory of a CUDA device.
    pub values: ValueType,
}

/// A policy that acts, and learns under [`Learning::On`].
#[derive(Debug)]
pub struct Ppo {
    config: PpoConfig,
    seed: u64,
    /// Seeds of the runs in which the policy learned; includes `seed` if it learns.
    seeds: Vec<u64>,
    domain: PolicyDomain,
    learning: Learning,
    policy: Policy,
    step_inputs: StepInputs,
    rollout: Rollout,
    /// LSTM state before the step, f32 `[envs, 2·hidden]`.
    state: Tensor,
    /// LSTM state after the step; swapped with `state`.
    next_state: Tensor,
    normalizers: Normalizers,
    scale: ScalarMoments,
    /// Number of decisions in this round; 0 without learning.
    step: usize,
    /// Whether the next call must bring the rewards of the last decision.
    rewards_missing: bool,
    /// Envs whose next step begins a trajectory.
    fresh: Vec<bool>,
    /// Number of decisions of each env in all rounds; part of the key of the random numbers.
    decisions: u64,
    /// Number of rounds learned from.
    rounds: u64,
    /// Actions of this round per op.
    ops: OpCounts,
    /// Consecutive skipped updates.
    skipped: usize,
    /// Index of the first env of this rank among the envs of all ranks.
    first_env: usize,
    /// Number of members; the baseline of an env is the mean over the other envs of its member on
    /// this rank. `None` for no baseline.
    baseline_members: Option<usize>,
    /// The controller that demonstrates in the first rounds.
    teacher: Option<Teacher>,
    /// The link to the other ranks that learn the same policy.
    ranks: Option<Ranks>,
    outputs: PolicyOutputs,
}

impl Ppo {
    /// A new policy on a stream, for envs like `host`. Allocates the memory of the rollout and of
    /// the steps; the first update allocates that of training. Does not wait for the device.
    ///
    /// # Errors
    /// A width, a number of slots or a number of envs of 0; memory.
    pub fn new(
        stream: &Stream,
        config: PpoConfig,
        host: &Host,
        options: PpoOptions,
    ) -> Result<Self> {
        let domain = PolicyDomain::from_host(host);
        let (slots, blueprints) = (domain.slots.len(), domain.blueprints.len());
        let (form, features, hidden) = (PolicyForm::Vector, observation_len(slots), config.hidden);
        let shape = PolicyShape { form, features, slots, blueprints, hidden };
        Self::of_shape(stream, config, shape, domain, options)
    }

    /// Like [`Ppo::new`], with a policy for hosts of any number of slots and any blueprints
    /// ([`PolicyForm::Set`]). In this run no host has more slots or more blueprints than `domain`.
    /// The weights do not depend on `domain`.
    ///
    /// # Errors
    /// As [`Ppo::new`].
    pub fn of_sets(
        stream: &Stream,
        config: PpoConfig,
        domain: PolicyDomain,
        options: PpoOptions,
    ) -> Result<Self> {
        let (slots, blueprints) = (domain.slots.len(), domain.blueprints.len());
        let shape = SetObserver::shape(slots, blueprints, None, config.hidden);
        Self::of_shape(stream, config, shape, domain, options)
    }

    /// Like [`Ppo::of_sets`], with a policy that also observes the layers that can become wider
    /// and chooses WIDEN, by [`EnvFacts::widen_by`](crate::EnvFacts::widen_by).
    ///
    /// # Errors
    /// As [`Ppo::new`].
    pub fn of_sets_and_layers(
        stream: &Stream,
        config: PpoConfig,
        domain: PolicyDomain,
        options: PpoOptions,
    ) -> Result<Self> {
        // A place is needed even if no host of this run has a slot, or a layer that can get wider.
        let [slots, places] = [&domain.slots, &domain.layers].map(|list| list.len().max(1));
        let blueprints = domain.blueprints.len();
        let layers = Some(LayerSet { places, features: layer_observation::LEN });
        let shape = SetObserver::shape(slots, blueprints, layers, config.hidden);
        Self::of_shape(stream, config, shape, domain, options)
    }

    fn of_shape(
        stream: &Stream,
        config: PpoConfig,
        shape: PolicyShape,
        domain: PolicyDomain,
        options: PpoOptions,
    ) -> Result<Self> {
        let PpoOptions { envs, steps, seed, isa, learning, values } = options;
        let greedy = learning == Learning::Greedy;
        let of = PolicyConfig { seed, adam: config.adam(), greedy, values };
        let policy = Policy::new(stream, shape, &of, &config.loss(), isa)?;
        // Without learning the rollout holds only the current step.
        let steps = if learning == Learning::On { steps } else { 1 };
        let rollout = Rollout::new(stream, RolloutShape { steps, envs, policy: shape })?;
        rollout.begin()?;
        let mut it = Self {
            config,
            seed,
            seeds: (learning == Learning::On).then_some(seed).into_iter().collect(),
            domain,
            learning,
            state: policy.initial_state(envs)?,
            next_state: policy.initial_state(envs)?,
            step_inputs: StepInputs::new(stream, &shape, envs, policy.legality_words())?,
            policy,
            rollout,
            normalizers: Normalizers::new(&shape),
            scale: ScalarMoments::default(),
            step: 0,
            rewards_missing: false,
            fresh: vec![true; envs],
            decisions: 0,
            rounds: 0,
            ops: OpCounts::default(),
            skipped: 0,
            first_env: 0,
            baseline_members: None,
            teacher: None,
            ranks: None,
            outputs: PolicyOutputs::default(),
        };
        it.set_floors()?;
        // Compiles the plan of a step now, so that no later step allocates. The results are
        // discarded.
        it.run_policy()?;
        Ok(it)
    }

    /// The settings.
    pub fn config(&self) -> &PpoConfig {
        &self.config
    }

    /// Subtracts a baseline from each advantage: the mean advantage, at the same step, of the other
    /// envs of the same member on this rank. Env i of the rank, from 0, belongs to member i modulo
    /// `members`, and the envs of a member have the same settings. The baseline does not depend on
    /// the action, so gradients stay unbiased, and differences between members drop out of the
    /// advantages (Kool, van Hoof and Welling, "Buy 4 REINFORCE samples, get a baseline for free!",
    /// 2019).
    pub fn with_member_baseline(self, members: usize) -> Self {
        Self { baseline_members: Some(members), ..self }
    }

    /// Parameters of the computation of advantages and returns.
    fn targets(&self) -> Targets {
        let targets = self.config.targets();
        let by_minibatch = targets.by_minibatch || self.baseline_members.is_some();
        Targets { by_minibatch, ..targets }
    }

    /// Number of envs of this rank.
    fn envs(&self) -> usize {
        self.rollout.shape().envs
    }

    /// The policy with its network.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Results of the last step.
    pub fn outputs(&self) -> &PolicyOutputs {
        &self.outputs
    }

    /// Exports weights and metadata of a policy file: slots, blueprints, width, normaliser, scale
    /// of the returns, and seeds of the runs. One read-back.
    ///
    /// # Errors
    /// A failed device.
    pub fn export(&self) -> Result<(StateDict, Metadata)> {
        file::export(self)
    }

    /// Saves what was learned, between two rounds: weights, optimiser, normalisers, counters.
    /// [`Controller::restore`] accepts it also for other numbers of envs and steps and, for a
    /// policy of sets ([`PolicyForm::Set`]), for other slots and blueprints. Two read-backs,
    /// of the weights and of the optimiser; with several ranks also of the exchange's state.
    ///
    /// # Errors
    /// [`Error::Protocol`](crate::Error::Protocol) within a round; a failed device.
    pub fn save_learned(&self) -> Result<ControllerState> {
        match self.step {
            0 => state::save_learned(self),
            step => Err(protocol("the end of a round".into(), format!("step {step}"))),
        }
    }

    /// Imports a policy from a file, all or nothing. Adam's averages and step counts stay as they
    /// are; those of a new policy are 0. Does not wait.
    ///
    /// # Errors
    /// [`Error::Policy`](crate::Error::Policy) for metadata that are damaged or of another version,
    /// another form of the observations, another width, weights that do not fit, and, with
    /// [`PolicyForm::Vector`], another number of slots or other blueprints.
    pub fn import(&mut self, weights: &StateDict, metadata: &Metadata) -> Result<()> {
        file::import(self, weights, metadata)
    }

    /// Uploads the observations of all envs and enqueues a policy step. One copy to the device, one
    /// launch; does not wait.
    fn observe(&mut self, views: &[EnvView<'_>], gather: bool) -> Result<()> {
        self.check_views(views)?;
        let key = SampleStep {
            step: self.decisions,
            first_env: self.first_env as u32,
            value_scale: self.scale.std() as f32,
        };
        let header = StepHeader { fresh: &self.fresh, gather, key };
        self.step_inputs.send(views, &mut self.normalizers, header)?;
        self.run_policy()?;
        std::mem::swap(&mut self.state, &mut self.next_state);
        self.fresh.fill(false);
        Ok(())
    }

    /// Number of completed rounds.
    fn round(&self) -> u64 {
        self.rounds
    }

    /// Sets the probability floors of the current round. Without learning all floors are 0.
    fn set_floors(&mut self) -> Result<()> {
        let floors = match self.learning {
            Learning::On => self.config.floors(self.round()),
            Learning::Off | Learning::Greedy => Floors::default(),
        };
        Ok(self.policy.set_floors(&floors)?)
    }

    /// Enqueues the draw of a decision and returns the tensors to read back.
    fn begin_decision(&mut self, views: &[EnvView<'_>]) -> Result<[Tensor; 4]> {
        self.check_rewards_missing(false)?;
        let learns = self.learning == Learning::On;
        if learns && self.step >= self.rollout.shape().steps {
            let steps = self.rollout.shape().steps;
            return Err(protocol(format!("at most {steps} steps a round"), "one more".into()));
        }
        self.observe(views, learns)?;
        Ok(self.rollout.acted(self.step)?.outputs()?)
    }

    /// Turns the words read back into actions, or takes the teacher's actions.
    fn end_decision(
        &mut self,
        views: &[EnvView<'_>],
        words: &[Vec<u32>; 4],
    ) -> Result<Vec<Action>> {
        self.outputs = PolicyOutputs::from_words(words);
        self.replace_by_teacher(views)?;
        self.decisions += 1;
        if self.learning == Learning::On {
            self.step += 1;
            self.rewards_missing = true;
        }
        let both = self.outputs.choices.iter().zip(views);
        let actions: Vec<Action> = both.map(|(choices, view)| self.action(choices, view)).collect();
        actions.iter().for_each(|action| self.ops[action.op().index()] += 1);
        Ok(actions)
    }

    /// The action of an env's choices.
    fn action(&self, choices: &Choices, view: &EnvView<'_>) -> Action {
        let [op, place, ..] = *choices;
        if op == ActionOp::Widen.index() {
            let layer = place.saturating_sub(self.policy.shape().slots);
            return Action::Widen {
                layer,
                by: widening::amount(view.host, layer, view.facts.widen_by),
            };
        }
        // Every choice is below its head's size, so there always is an action.
        Action::from_choices(choices).unwrap_or(Action::Wait)
    }

    /// The choices of an action of the teacher.
    fn choices(&self, action: &Action) -> Choices {
        match *action {
            Action::Widen { layer, .. } => {
                let place = self.policy.shape().slots + layer;
                [ActionOp::Widen.index(), place, 0, 0, 0, 0, 0, 0]
            }
            action => action.choices(),
        }
    }

    /// Enqueues a policy step on the uploaded inputs. The rollout receives the results.
    fn run_policy(&mut self) -> Result<()> {
        let StepInputs { rows, legality, step, .. } = &self.step_inputs;
        let inputs = PolicyInputs { rows: rows.iter().collect(), state: &self.state };
        let to = self.rollout.acted(self.step)?;
        let acting = ActTensors {
            legality,
            step,
            choices: &to.choices,
            legal: &to.legal,
            log_probs: &to.log_probs,
            entropies: &to.entropies,
            values: &to.values,
            seen: to.seen.iter().collect(),
        };
        Ok(self.policy.act(&inputs, &acting, &self.next_state)?)
    }
}

impl Controller for Ppo {
    fn name(&self) -> &str {
        NAME
    }

    fn begin_episode(&mut self, env: usize) {
        let own = env.checked_sub(self.first_env);
        if let Some(fresh) = own.and_then(|env| self.fresh.get_mut(env)) {
            *fresh = true;
            self.step_inputs.forget_hosts();
        }
        if let Some(teacher) = &mut self.teacher {
            teacher.heuristic.begin_episode(env);
        }
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        let outputs = self.begin_decision(views)?;
        let words = read_back_as::<u32>(&outputs.each_ref())?;
        self.end_decision(views, &four_tensors(words))
    }

    fn reward_all(&mut self, rewards: &[f32]) -> Result<()> {
        self.check_rewards_missing(true)?;
        let envs = self.rollout.shape().envs;
        if rewards.len() != envs {
            return Err(protocol(format!("{envs} rewards"), rewards.len().to_string()));
        }
        if self.learning == Learning::On {
            self.rollout.reward(self.step - 1, rewards)?;
            self.rewards_missing = false;
        }
        Ok(())
    }

    fn roll_back(&mut self, env: usize, cause: Option<usize>, penalty: f32) -> Result<()> {
        self.check_rewards_missing(false)?;
        let (envs, first) = (self.rollout.shape().envs, self.first_env);
        if !(first..first + envs).contains(&env) {
            return Err(protocol(format!("one of {envs} envs"), format!("env {env}")));
        }
        let env = env - first;
        if self.learning == Learning::On {
            match cause {
                Some(cause) if cause < self.step => {
                    self.rollout.terminate(env, (cause, self.step - 1), penalty)?;
                }
                None if self.step == 0 => {}
                _ => {
                    let expected = format!("one of the {} steps of this round so far", self.step);
                    return Err(protocol(expected, format!("{cause:?}")));
                }
            }
        }
        self.fresh[env] = true;
        Ok(())
    }

    fn save(&self) -> Result<ControllerState> {
        state::save(self)
    }

    fn restore(&mut self, state: &ControllerState) -> Result<()> {
        state::restore(self, state)
    }

    fn end_round(&mut self, last: &[EnvView<'_>]) -> Result<Option<RoundReport>> {
        self.check_rewards_missing(false)?;
        if self.learning != Learning::On || self.step == 0 {
            return Ok(None);
        }
        self.observe(last, false)?;
        if self.config.bootstrap {
            self.rollout.truncate(self.step - 1)?;
        }
        update::learn(self).map(Some)
    }
}
