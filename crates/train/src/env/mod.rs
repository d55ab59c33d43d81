//! Envs: hosts that grow, with their networks, measurements and bare twins.
//!
//! - here: one env;
//! - `trained_host`: a host with its network, the env's own or its twin;
//! - `population`: all envs of a process, and their twins;
//! - `measurements`, `governor_state`, `new_features`: state of an env in an episode;
//! - `state`: the state in a checkpoint.

mod governor_state;
mod measurements;
mod new_features;
mod population;
mod state;
mod trained_host;

use std::sync::Arc;

use meristem_control::{
    ActionContext, ActionOp, ActionOutcome, EnvFacts, EnvView, GovernorConfig, RewardConfig,
    RewardTerms, WidthScores,
};
use meristem_device::random::{Purpose, Rng};
use meristem_grow::{
    Contribution, Counterfactual, GradientHealth, Host, ModuleScope, StageChange, Topology,
};
use meristem_nn::{EvalMetrics, Graph, GroupMetrics, Metrics, Network, Snapshot, StateDict};

pub(crate) use self::governor_state::GovernorState;
use self::measurements::Measurements;
use self::new_features::NewFeatures;
pub(crate) use self::population::Population;
pub(crate) use self::state::{EnvState, EnvTensors, SavedEnv, TrainedTensors};
pub(crate) use self::trained_host::{HostOptions, TrainedHost};
use crate::error::Result;
use crate::position::StepPosition;
use crate::record::summary::ModuleCounts;
use crate::setup::Setup;

/// A growing host with its measurements.
pub(crate) struct Env {
    /// Index of the env in the run, as in events and files. [`Population::envs`] has
    /// only envs in training, so the position of the env there may be another.
    pub(crate) index: usize,
    /// Key of the env's random numbers, and number of the env for the controller: `index`, unless
    /// the setting `env_numbers` gives another (`TrainConfig::env_number`).
    pub(crate) number: usize,
    /// The host, which grows, and its network.
    pub(crate) grown: TrainedHost,
    /// Measurements since the start of the episode or the last rollback.
    pub(crate) seen: Measurements,
    /// Scores of the layers that can become wider in the current step, as far as rules need them.
    pub(crate) width_scores: WidthScores,
    /// Facts about the training in the current step.
    pub(crate) facts: EnvFacts,
    /// Configurations that the current step evaluates.
    pub(crate) counterfactual: Counterfactual,
    /// Contributions of the modules, as measured in the last step.
    pub(crate) contributions: Vec<Contribution>,
    /// Reward of the last action, by term.
    pub(crate) reward: RewardTerms,
    /// Number of modules germinated, pruned and fossilized.
    pub(crate) module_counts: ModuleCounts,
    /// State of the governor about this env.
    pub(crate) governor: GovernorState,
    /// Last good state of the host and its fossilized modules.
    pub(crate) snapshot: Snapshot,
}

impl Env {
    /// An env with a fresh host.
    ///
    /// # Errors
    /// Weights that do not fit, out of memory.
    fn new(setup: &Setup, options: HostOptions<'_>) -> Result<Self> {
        let mut env = Self::with_host(setup, setup.fresh_host(options.index)?, options)?;
        setup.initialise(options.index, &mut env.grown.network)?;
        let (network, snapshot, graph) = env.snapshot_parts(setup)?;
        snapshot.take(network, &graph)?;
        Ok(env)
    }

    /// An env restored from a checkpoint.
    ///
    /// # Errors
    /// A state that does not fit this run, out of memory.
    fn restore(setup: &Setup, options: HostOptions<'_>, saved: SavedEnv) -> Result<Self> {
        let SavedEnv { state, tensors, .. } = saved;
        let EnvState { topology, seen, metrics, control, module_counts, governor, .. } = state;
        let mut env = Self::with_host(setup, setup.rebuild(options.index, &topology)?, options)?;
        env.grown.load(&tensors.grown)?;
        env.snapshot.load_state_dict(&tensors.snapshot)?;
        (env.grown.metrics, env.grown.control) = (metrics, control);
        env.grown.training_flops = state.training_flops;
        env.grown.new_features = state.new_features;
        Ok(Self { seen, module_counts, governor, ..env })
    }

    /// The state for a checkpoint, without the twin, after the network is brought up to date. Waits
    /// for the device.
    ///
    /// # Errors
    /// A failed stream.
    fn save(&mut self, setup: &Setup) -> Result<SavedEnv> {
        let Self { index, grown, seen, module_counts, governor, snapshot, .. } = self;
        grown.sync(setup)?;
        let state = EnvState {
            topology: Topology::from_host(&grown.host),
            seen: seen.clone(),
            metrics: grown.metrics.clone(),
            control: grown.control,
            module_counts: *module_counts,
            governor: *governor,
            training_flops: grown.training_flops,
            new_features: grown.new_features.clone(),
            twin: None,
        };
        let (grown, snapshot) = (grown.tensors()?, snapshot.state_dict()?);
        let (exchange, twin) = (StateDict::default(), TrainedTensors::default());
        let tensors = EnvTensors { grown, snapshot, exchange, twin };
        Ok(SavedEnv { index: *index, state, tensors })
    }

    fn with_host(setup: &Setup, host: Host, options: HostOptions<'_>) -> Result<Self> {
        // One additional configuration is for the test split.
        let configurations = Counterfactual::rows_max(host.slots().len()) + 1;
        let grown = TrainedHost::new(setup, host, options, configurations)?;
        let lasting = setup.lasting_graph(options.index, &grown.host)?;
        let snapshot = Snapshot::new(&grown.network, &lasting)?;
        Ok(Self {
            index: options.index,
            number: setup.config.env_number(options.index),
            seen: Measurements::new(&grown.host, &grown.parameters),
            width_scores: WidthScores::default(),
            facts: EnvFacts::default(),
            counterfactual: Counterfactual::leave_one_out(&grown.host, ModuleScope::Live),
            grown,
            contributions: vec![],
            reward: RewardTerms::default(),
            module_counts: ModuleCounts::default(),
            governor: GovernorState::new(),
            snapshot,
        })
    }

    /// Advances the host's clocks (alpha, ages, embargo), brings the network up to date, and
    /// chooses the configurations to evaluate. [`Population::set_alphas`] sets their alphas. Waits
    /// for the device as [`TrainedHost::sync`], and if learning rates of new features depend on
    /// norms.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn open_step(
        &mut self,
        setup: &Setup,
        when: StepPosition,
    ) -> Result<Vec<StageChange>> {
        let config = &setup.config;
        let changes = self.grown.host.step();
        self.grown.open_step(setup, when.step)?;
        self.grown.sync(setup)?;
        self.grown.set_step_factors(setup, when.step)?;
        let host = &self.grown.host;
        self.counterfactual = if self.grown.own_step(when.step) + 1 == config.steps {
            let (purpose, env) = (Purpose::Counterfactuals, self.number as u64);
            let seed = setup.member(self.index).config.seed;
            let mut random = Rng::new(seed, purpose, env, when.round as u64);
            Counterfactual::for_last_step(host, &mut random)
        } else {
            Counterfactual::for_step(host)
        };
        Ok(changes)
    }

    /// Number of configurations that the current step evaluates.
    pub(crate) fn configurations(&self) -> usize {
        self.counterfactual.rows().len()
    }

    /// Records the measurements of a step.
    pub(crate) fn note(&mut self, metrics: Metrics, has_control: bool) {
        self.note_control(&metrics, has_control);
        self.grown.note(metrics, has_control);
        self.note_gradients();
        self.seen.train_losses.push(self.grown.train_loss() as f32);
    }

    /// Records the gradients of a step, and results that the program measured: its score, and for
    /// some slots the score without the module there.
    pub(crate) fn note_own(
        &mut self,
        metrics: Metrics,
        score: Option<f64>,
        without: &[(usize, f64)],
    ) {
        self.grown.note(metrics, false);
        self.note_gradients();
        let Some(score) = score else { return };
        let seen = &mut self.seen;
        seen.scores_pp.push((100.0 * score) as f32);
        seen.measured.iter_mut().for_each(|measured| measured.contribution_pp = None);
        for &(slot, score_without) in without {
            seen.measured[slot].contribution_pp = Some((100.0 * (score - score_without)) as f32);
        }
    }

    /// Records the health of the gradients of the last step.
    fn note_gradients(&mut self) {
        let (grown, seen) = (&self.grown, &mut self.seen);
        for (slot, measured) in grown.host.slots().iter().zip(&mut seen.measured) {
            let name = slot.name.to_string();
            let group = grown.network.graph().groups.iter().position(|group| group.name == name);
            let group = group.and_then(|index| grown.metrics.groups.get(index));
            measured.gradient_health = group.and_then(health);
        }
    }

    /// Records an evaluation on the control split.
    pub(crate) fn note_control(&mut self, metrics: &Metrics, has_control: bool) {
        self.grown.note_control(metrics, has_control);
        let (seen, Some(control)) = (&mut self.seen, self.grown.control) else { return };
        let grown = &self.grown;
        let control_pp = grown.score_pp(&control);
        seen.scores_pp.push(control_pp as f32);
        seen.losses.push(control.loss().unwrap_or(f64::NAN) as f32);
        let scores: Vec<f64> = metrics.eval.iter().map(|row| grown.score_pp(row)).collect();
        seen.interactions_pp = self.counterfactual.interaction_sums_pp(&scores);
        for measured in &mut seen.measured {
            (measured.contribution_pp, measured.contribution_loss) = (None, None);
        }
        self.contributions = self.counterfactual.contributions(&metrics.eval, grown.score);
        for &Contribution { slot, score_without, loss, .. } in &self.contributions {
            let measured = &mut seen.measured[slot];
            (measured.contribution_pp, measured.contribution_loss) =
                (Some(contribution_pp(control_pp, score_without)), loss);
        }
    }

    /// The parts from which a snapshot is taken: the network, the old snapshot, whose memory is
    /// reused, and the graph of the host with its fossilized modules. After a lasting change, the
    /// network must be up to date.
    ///
    /// # Errors
    /// A topology that cannot be compiled.
    pub(crate) fn snapshot_parts(
        &mut self,
        setup: &Setup,
    ) -> Result<(&mut Network, &mut Snapshot, Arc<Graph>)> {
        let graph = if self.has_lasting_change() {
            setup.lasting_graph(self.index, &self.grown.host)?
        } else {
            Arc::clone(self.snapshot.graph())
        };
        Ok((&mut self.grown.network, &mut self.snapshot, graph))
    }

    /// Goes back to the snapshot. Live modules are removed, the optimiser's state and all
    /// measurements are reset; only this step's training metrics stay. Waits for the device only on
    /// CUDA, and only if a removed module was part of the network ([`TrainedHost::sync`]).
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn restore_snapshot(&mut self, setup: &Setup) -> Result<Vec<StageChange>> {
        let grown = &mut self.grown;
        let changes = grown.host.prune_live();
        grown.sync(setup)?;
        grown.network.restore(&self.snapshot)?;
        // The graph of the snapshot has the learning rates of another step.
        grown.apply_rate(setup)?;
        (grown.control, grown.diverged) = (None, false);
        self.seen = Measurements::new(&grown.host, &grown.parameters);
        self.contributions.clear();
        self.counterfactual = Counterfactual::leave_one_out(&grown.host, ModuleScope::Live);
        grown.network.set_alphas(self.counterfactual.rows())?;
        grown.reset_metrics()?;
        Ok(changes)
    }

    /// Loss that the governor checks; NaN if any loss or weight of the step is not finite.
    pub(crate) fn governed_loss(&self) -> f64 {
        let known = self.grown.unless_diverged();
        known.map_or(f64::NAN, |grown| grown.control_loss().unwrap_or(grown.train_loss()))
    }

    /// Whether a snapshot is due after step `step` of the env ([`TrainedHost::own_step`]).
    pub(crate) fn is_snapshot_due(&self, config: &GovernorConfig, step: usize) -> bool {
        let calm = self.governor.monitor.is_calm();
        self.has_lasting_change() || (calm && config.snapshot_due(step as u32, false))
    }

    /// Records that a snapshot was taken after step `step` of the env, and resets the count of
    /// failures. The count stays if only a wider layer caused the snapshot; otherwise an env that
    /// fails in every step could reset the count by WIDEN, which is legal right after a rollback.
    pub(crate) fn snapshot_taken(&mut self, step: usize) {
        self.governor.snapshot_step = Some(step);
        let widened = self.seen.last == Some((ActionOp::Widen, true));
        if !widened || self.governor.monitor.is_calm() {
            self.governor.failures = 0;
        }
    }

    /// Whether the last op made a module permanent or a layer wider, which a rollback keeps.
    fn has_lasting_change(&self) -> bool {
        matches!(self.seen.last, Some((ActionOp::Fossilize | ActionOp::Widen, true)))
    }

    /// Whether the last op changed the network.
    pub(crate) fn has_changed(&self) -> bool {
        self.seen.last.is_some_and(|(op, succeeded)| op != ActionOp::Wait && succeeded)
    }

    /// Prepares the report: leave-one-out configurations of all modules for the control split, and
    /// after them one configuration of the whole network for the test split.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn open_report(&mut self, setup: &Setup) -> Result<()> {
        self.grown.sync(setup)?;
        self.counterfactual = Counterfactual::leave_one_out(&self.grown.host, ModuleScope::All);
        let mut rows = self.counterfactual.rows().to_vec();
        rows.push(self.grown.host.alphas());
        self.grown.network.set_alphas(&rows)?;
        self.grown.reset_metrics()
    }

    /// Metrics of each configuration on the control split; empty without a control split.
    pub(crate) fn control_rows(&self) -> &[EvalMetrics] {
        let rows = self.grown.control.map_or(0, |_| self.configurations());
        self.grown.metrics.eval.get(..rows).unwrap_or_default()
    }

    /// The controller's view of this env, without the twin. `step` is the current step of the
    /// round, from 0; after the last step it is the number of steps of the round.
    fn view(&self, step: usize, episode_steps: usize) -> EnvView<'_> {
        let Self { number, grown, seen, .. } = self;
        EnvView {
            env: *number,
            host: &grown.host,
            step: grown.own_step(step) as u32,
            episode_steps: episode_steps as u32,
            scores_pp: &seen.scores_pp,
            losses: &seen.losses,
            twin_loss: None,
            train_losses: &seen.train_losses,
            measured: &seen.measured,
            history: seen.slot_history.slots(),
            width_scores: &self.width_scores,
            facts: self.facts,
            last: seen.last,
        }
    }

    /// Closes the measurements of a step by updating the slots' history.
    pub(crate) fn remember(&mut self) {
        let Self { grown, seen, .. } = self;
        seen.slot_history.note(&grown.host, &seen.measured, &seen.interactions_pp);
    }

    /// Records the op of this step and computes its reward.
    pub(crate) fn acted(
        &mut self,
        op: ActionOp,
        before: &ActionContext,
        outcome: &ActionOutcome,
        config: &RewardConfig,
    ) {
        let Self { grown, seen, .. } = self;
        seen.last = Some((op, outcome.succeeded));
        let (host, parameters) = (&grown.host, &grown.parameters);
        self.reward = seen.reward_state.transition(config, before, host, parameters, outcome);
    }
}

/// Contribution of a module in percentage points: a difference of percentages, as runs have always
/// measured it. `Contribution::score_pp` is the percentage of a difference, which may round to
/// another f32.
fn contribution_pp(control_pp: f64, score_without: f64) -> f32 {
    (control_pp - 100.0 * score_without.clamp(0.0, 1.0)) as f32
}

/// Gradient health of a group: shares over all tensors and batches of the epoch, and the mean norm.
fn health(group: &GroupMetrics) -> Option<GradientHealth> {
    let health = group.health()?;
    let share = |count: u64| count as f64 / group.tensors as f64;
    Some(GradientHealth {
        health,
        vanishing: share(group.vanishing),
        exploding: share(group.exploding),
        norm: group.mean_norm()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With these counts the percentage of the difference rounds to the next number.
    #[test]
    fn a_contribution_is_the_difference_of_two_percentages() {
        let metrics = |correct| EvalMetrics { correct, samples: 33_777, ..Default::default() };
        for (correct, without, bits) in
            [(10_585, 10_584, 0x3b42_0688), (17_978, 17_976, 0x3bc2_0688)]
        {
            let (control, without) = (metrics(correct), metrics(without).accuracy().unwrap());
            let accuracy = control.accuracy().unwrap();
            assert_eq!(contribution_pp(100.0 * accuracy, without).to_bits(), bits);
            assert_eq!(((100.0 * (accuracy - without)) as f32).to_bits(), bits + 1);
        }
    }
}
