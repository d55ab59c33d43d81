//! The controller that learns: proximal policy optimisation (Schulman et al., 2017) over whole episodes.
//!
//! A step is one observation matrix, one forward pass and one read-back for all envs (H1). What happened lies
//! in the rollout on the policy's device (H6). At the end of a round rewards become advantages there
//! (`targets`), and the policy learns from the whole round (`update`). A governor's rollback ends a
//! trajectory (termination); the end of an episode cuts it off (truncation), and V of what came after it
//! stands for the rest.

mod config;
mod file;
mod group;
mod ranks;
mod rollout;
mod state;
mod targets;
mod update;

use meristem_device::random::{Purpose, Rng};
use meristem_device::{DType, Owner, Stream, Tensor};
use meristem_grow::Host;
use meristem_nn::Isa;

pub use self::config::PpoConfig;
pub use self::file::{policy_seeds, policy_width};
pub use self::group::PpoGroup;
use self::ranks::Ranks;
use self::rollout::{Decided, Rollout, RolloutShape};
use self::targets::ReturnScale;
use crate::action::Action;
use crate::controller::Controller;
use crate::error::{Error, Result};
use crate::masks::{HeadLayout, Legality};
use crate::normalizer::Normalizer;
use crate::observation::{observation_len, write_observation};
use crate::policy::{Policy, PolicyInputs, PolicyShape};
use crate::report::RoundReport;
use crate::sampling::{Pick, draw};
use crate::state::ControllerState;
use crate::view::EnvView;

const NAME: &str = "ppo";

/// What the policy is for: the names that a policy file is checked against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDomain {
    /// Enabled slots in index order.
    pub slots: Vec<String>,
    /// Blueprints in index order.
    pub blueprints: Vec<String>,
}

impl PolicyDomain {
    /// That of hosts like this one.
    pub fn of(host: &Host) -> Self {
        Self {
            slots: host.slots().iter().map(|slot| slot.name.to_string()).collect(),
            blueprints: host.blueprints().iter().map(|b| b.name.clone()).collect(),
        }
    }
}

/// Whether the policy learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learning {
    /// It draws its actions, remembers them, and learns at the end of a round.
    On,
    /// It draws its actions, and stays as it is.
    Off,
    /// It takes the most probable action, and stays as it is.
    Greedy,
}

/// Sizes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PpoSizes {
    /// Envs.
    pub envs: usize,
    /// Most steps of an episode.
    pub steps: usize,
}

/// A policy that acts, and learns when it is told to.
#[derive(Debug)]
pub struct Ppo {
    config: PpoConfig,
    seed: u64,
    /// Seeds of the runs that it learned in, this one among them if it learns.
    seeds: Vec<u64>,
    domain: PolicyDomain,
    learning: Learning,
    policy: Policy,
    layout: HeadLayout,
    rollout: Rollout,
    /// State of the LSTM before the step, f32 `[envs, 2·hidden]`.
    state: Tensor,
    /// After it: the two change places.
    next_state: Tensor,
    /// Logits and V, f32 `[envs, logits + 1]`.
    output: Tensor,
    normalizer: Normalizer,
    scale: ReturnScale,
    /// Step of the round; 1 more than the last transition.
    step: usize,
    /// Whether the last step's rewards are still to come.
    owed: bool,
    /// Envs whose next step begins a trajectory.
    fresh: Vec<bool>,
    /// Steps of all rounds: part of the key of random numbers.
    decisions: u64,
    /// Actions of this round, per op.
    ops: [u64; 6],
    /// Updates skipped in a row.
    skipped: usize,
    /// Index of its first env, among those of all ranks.
    first_env: usize,
    /// Those that it learns with, if it is not alone.
    ranks: Option<Ranks>,
    scratch: Scratch,
}

/// Host memory of a step, kept from one to the next.
#[derive(Debug, Default)]
struct Scratch {
    observations: Vec<f32>,
    blueprints: Vec<u32>,
    decided: Decided,
}

impl Ppo {
    /// A new policy on a stream, for so many envs like `host`. Allocates all that it will need. Does not wait
    /// for the device.
    ///
    /// # Errors
    /// A width, slots or steps of 0, memory.
    pub fn new(
        stream: &Stream,
        config: PpoConfig,
        (host, sizes): (&Host, PpoSizes),
        (seed, isa): (u64, Isa),
        learning: Learning,
    ) -> Result<Self> {
        let domain = PolicyDomain::of(host);
        let (slots, blueprints) = (domain.slots.len(), domain.blueprints.len());
        let (features, hidden) = (observation_len(slots), config.hidden);
        let shape = PolicyShape { features, slots, blueprints, hidden };
        let policy = Policy::new(stream, shape, &config.policy(seed), &config.loss(), isa)?;
        let layout = HeadLayout::new(slots, blueprints);
        let PpoSizes { envs, steps } = sizes;
        let logits = layout.total();
        // Without learning a step is forgotten as soon as it is done.
        let steps = if learning == Learning::On { steps } else { 1 };
        let rollout = Rollout::new(stream, RolloutShape { steps, envs, features, slots, logits })?;
        rollout.begin()?;
        let output = Tensor::zeros(stream, [envs, logits + 1], DType::F32, Owner::Policy)?;
        let mut it = Self {
            config,
            seed,
            seeds: (learning == Learning::On).then_some(seed).into_iter().collect(),
            domain,
            learning,
            state: policy.initial_state(envs)?,
            next_state: policy.initial_state(envs)?,
            policy,
            layout,
            rollout,
            output,
            normalizer: Normalizer::new(features),
            scale: ReturnScale::default(),
            step: 0,
            owed: false,
            fresh: vec![true; envs],
            decisions: 0,
            ops: [0; 6],
            skipped: 0,
            first_env: 0,
            ranks: None,
            scratch: Scratch::default(),
        };
        // Compiles the plan of a step: no later step allocates. What it computes is not looked at.
        it.run_policy()?;
        Ok(it)
    }

    /// Its settings.
    pub fn config(&self) -> &PpoConfig {
        &self.config
    }

    /// Envs that it acts in.
    fn envs(&self) -> usize {
        self.rollout.shape().envs
    }

    /// The network.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Observes all envs and runs the policy: logits and V, `[env][logits + 1]`. One read-back (H1).
    fn forward(&mut self, views: &[EnvView<'_>], gather: bool) -> Result<Vec<f32>> {
        self.observe(views, gather)?;
        self.said()
    }

    /// What the policy said of all envs, in one read-back.
    fn said(&self) -> Result<Vec<f32>> {
        Ok(self.output.to_vec()?)
    }

    /// Observes all envs and enqueues the policy's step; [`Ppo::said`] is what it says. Waits for nothing.
    fn observe(&mut self, views: &[EnvView<'_>], gather: bool) -> Result<()> {
        let RolloutShape { envs, features, slots, .. } = *self.rollout.shape();
        self.check_views(views)?;
        let Scratch { observations, blueprints, .. } = &mut self.scratch;
        observations.resize(envs * features, 0.0);
        blueprints.resize(envs * slots, 0);
        let rows = observations.chunks_exact_mut(features).zip(blueprints.chunks_exact_mut(slots));
        for (view, (row, blueprints)) in views.iter().zip(rows) {
            write_observation(view, row, blueprints);
            match gather {
                true => self.normalizer.gather(row),
                false => self.normalizer.normalize(row),
            }
        }
        let keep: Vec<f32> =
            self.fresh.iter().map(|fresh| if *fresh { 0.0 } else { 1.0 }).collect();
        self.rollout.observe(self.step, observations, blueprints, &keep)?;
        self.run_policy()?;
        std::mem::swap(&mut self.state, &mut self.next_state);
        self.fresh.fill(false);
        Ok(())
    }

    /// The first half of a decision: what the policy says is on its way.
    fn begin_decision(&mut self, views: &[EnvView<'_>]) -> Result<()> {
        self.check_owed(false)?;
        let learns = self.learning == Learning::On;
        if learns && self.step >= self.rollout.shape().steps {
            let steps = self.rollout.shape().steps;
            return Err(protocol(format!("at most {steps} steps a round"), "one more".into()));
        }
        self.observe(views, learns)
    }

    /// The second half: draws the actions from what it said.
    fn end_decision(&mut self, views: &[EnvView<'_>], output: &mut [f32]) -> Result<Vec<Action>> {
        let actions = self.draw_all(views, output);
        self.decisions += 1;
        if self.learning == Learning::On {
            self.rollout.decide(self.step, &self.scratch.decided)?;
            self.step += 1;
            self.owed = true;
        }
        Ok(actions)
    }

    /// Enqueues the forward pass over what lies in the rollout at this step.
    fn run_policy(&mut self) -> Result<()> {
        let (rollout, step) = (&self.rollout, self.step);
        let inputs = PolicyInputs {
            observations: &rollout.row(&rollout.observations, step)?,
            blueprints: &rollout.row(&rollout.blueprints, step)?,
            keep: &rollout.row(&rollout.keep, step)?,
            state: &self.state,
        };
        Ok(self.policy.step(&inputs, &self.output, &self.next_state)?)
    }

    /// Draws an action per env from what the policy says, and writes down what the rollout needs.
    fn draw_all(&mut self, views: &[EnvView<'_>], output: &mut [f32]) -> Vec<Action> {
        let (total, scale) = (self.layout.total(), self.scale.std() as f32);
        let Decided { choices, legal, log_probs, values } = &mut self.scratch.decided;
        choices.clear();
        log_probs.clear();
        values.clear();
        legal.clear();
        legal.resize(views.len() * total, 0);
        let mut actions = Vec::with_capacity(views.len());
        let rows = output.chunks_exact_mut(total + 1).zip(legal.chunks_exact_mut(total));
        for (view, (row, mask)) in views.iter().zip(rows) {
            let mut rng = Rng::new(self.seed, Purpose::Actions, view.env as u64, self.decisions);
            let pick = match self.learning {
                Learning::On | Learning::Off => Pick::Sample(&mut rng),
                Learning::Greedy => Pick::Greedy,
            };
            let (logits, value) = row.split_at_mut(total);
            let drawn = draw(&self.layout, &Legality::of(view.host), logits, mask, pick);
            choices.extend(drawn.choices.map(|choice| choice as u32));
            log_probs.extend(drawn.log_probs);
            values.push(scale * value[0]);
            let action = drawn.action();
            self.ops[action.op().index()] += 1;
            actions.push(action);
        }
        actions
    }

    /// The views must be those of all envs, in order, of hosts that the policy is for.
    fn check_views(&self, views: &[EnvView<'_>]) -> Result<()> {
        let RolloutShape { envs, steps, slots, .. } = *self.rollout.shape();
        let blueprints = self.domain.blueprints.len();
        let fits = |(index, view): (usize, &EnvView<'_>)| {
            let (has_slots, has) = (view.host.slots().len(), view.host.blueprints().len());
            view.env == self.first_env + index && has_slots == slots && has == blueprints
        };
        if views.len() != envs || !views.iter().enumerate().all(fits) {
            let expected = format!("{envs} envs in order, {slots} slots, {blueprints} blueprints");
            let of = |view: &EnvView<'_>| {
                (view.env, view.host.slots().len(), view.host.blueprints().len())
            };
            let got: Vec<_> = views.iter().map(of).collect();
            return Err(protocol(expected, format!("(env, slots, blueprints) {got:?}")));
        }
        if self.learning == Learning::On && self.step > steps {
            return Err(protocol(format!("at most {steps} steps"), self.step.to_string()));
        }
        Ok(())
    }

    /// Whether rewards of the last step are to come must be as `owed` says.
    fn check_owed(&self, owed: bool) -> Result<()> {
        if self.learning != Learning::On || self.owed == owed {
            return Ok(());
        }
        let [expected, got] = match owed {
            true => ["a decision before rewards", "rewards"],
            false => ["the rewards of the last step", "another call"],
        };
        Err(protocol(expected.into(), got.into()))
    }
}

fn protocol(expected: String, got: String) -> Error {
    Error::Protocol { controller: NAME, expected, got }
}

impl Controller for Ppo {
    fn name(&self) -> &str {
        NAME
    }

    fn begin_episode(&mut self, env: usize) {
        let own = env.checked_sub(self.first_env);
        if let Some(fresh) = own.and_then(|env| self.fresh.get_mut(env)) {
            *fresh = true;
        }
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        self.begin_decision(views)?;
        let mut output = self.said()?;
        self.end_decision(views, &mut output)
    }

    fn reward_all(&mut self, rewards: &[f32]) -> Result<()> {
        self.check_owed(true)?;
        let envs = self.rollout.shape().envs;
        if rewards.len() != envs {
            return Err(protocol(format!("{envs} rewards"), rewards.len().to_string()));
        }
        if self.learning == Learning::On {
            self.rollout.reward(self.step - 1, rewards)?;
            self.owed = false;
        }
        Ok(())
    }

    fn roll_back(&mut self, env: usize, cause: Option<usize>, penalty: f32) -> Result<()> {
        self.check_owed(false)?;
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
        self.save_state()
    }

    fn restore(&mut self, state: &ControllerState) -> Result<()> {
        self.restore_state(state)
    }

    fn end_round(&mut self, last: &[EnvView<'_>]) -> Result<Option<RoundReport>> {
        self.check_owed(false)?;
        if self.learning != Learning::On || self.step == 0 {
            return Ok(None);
        }
        let output = self.forward(last, false)?;
        let (width, scale) = (self.layout.total() + 1, self.scale.std() as f32);
        let values: Vec<f32> =
            output.chunks_exact(width).map(|row| scale * row[width - 1]).collect();
        self.rollout.truncate(self.step - 1, &values)?;
        self.learn().map(Some)
    }
}
