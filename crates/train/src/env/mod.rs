//! One env: a host, its network on a stream of its own, and its measurements.

mod guard;
mod networks;
mod state;
mod twin;

use std::sync::Arc;

use meristem_control::{
    Deed, EnvView, GovernorConfig, History, Op, Outcome, RewardConfig, RewardState, RewardTerms,
};
use meristem_device::Stream;
use meristem_device::random::{Purpose, Rng};
use meristem_grow::{
    Counterfactual, GateInputs, GradientHealth, Host, ParameterCounts, Scope, StageChange,
    Topology, TopologyKey,
};
use meristem_nn::{
    EvalMetrics, Graph, GroupMetrics, Metrics, Network, NetworkOptions, Snapshot, StateDict,
};

pub(crate) use self::guard::Guard;
pub(crate) use self::networks::{Networks, networks};
pub(crate) use self::state::{EnvState, EnvTensors, SavedEnv, TwinTensors};
pub(crate) use self::twin::{TEST as TWIN_TEST, Twin};
use crate::error::Result;
use crate::position::Position;
use crate::record::summary::ModuleCounts;
use crate::setup::Setup;

/// Number of an env, and options of its network.
#[derive(Clone, Copy)]
pub(crate) struct EnvOptions<'a> {
    pub(crate) index: usize,
    pub(crate) stream: &'a Stream,
    /// Seed of the host's weights.
    pub(crate) seed: u64,
    /// Number of batch losses that the network keeps.
    pub(crate) batch_log: usize,
}

/// A host with everything that belongs to it alone.
pub(crate) struct Env {
    /// Number of the env.
    pub(crate) index: usize,
    /// The host, which grows.
    pub(crate) host: Host,
    /// The network of the host.
    pub(crate) network: Network,
    /// Topology that `network` was compiled for.
    key: TopologyKey,
    /// Factor of the learning rates of `network`.
    rate: f64,
    /// Gradient health and contribution of each enabled slot, as last measured with a module there.
    pub(crate) measured: Vec<GateInputs>,
    /// For each enabled slot, the sum of its module's interactions with the others in the last
    /// step, in percentage points.
    interactions_pp: Vec<Option<f32>>,
    /// Control accuracy after each step, in percentage points.
    accuracies_pp: Vec<f32>,
    /// Control loss after each step.
    losses: Vec<f32>,
    /// Training loss of each step.
    train_losses: Vec<f32>,
    /// States of the slots in the last steps.
    slot_history: History,
    /// The last op, and whether it succeeded.
    last: Option<(Op, bool)>,
    /// State that the next reward is computed against.
    reward_state: RewardState,
    /// Reward of the last action, by term.
    pub(crate) reward: RewardTerms,
    /// Training metrics of the whole network in the last step.
    pub(crate) train: Metrics,
    /// Evaluation on the control split in the last step.
    pub(crate) control: Option<EvalMetrics>,
    /// Counts of modules by fate.
    pub(crate) history: ModuleCounts,
    /// Configurations that the current step evaluates.
    pub(crate) counterfactual: Counterfactual,
    /// The governor's state of this env.
    pub(crate) guard: Guard,
    /// Last good state of the host and its fossilized modules.
    pub(crate) snapshot: Snapshot,
    /// The same host without growth, if the run trains one.
    pub(crate) twin: Option<Twin>,
    /// Floating-point operations of training in this episode.
    pub(crate) training_flops: u64,
    parameters: ParameterCounts,
}

impl Env {
    /// An env with a fresh host.
    ///
    /// # Errors
    /// Weights that do not fit, out of memory.
    pub(crate) fn new(setup: &Setup, options: EnvOptions<'_>) -> Result<Self> {
        let mut env = Self::of(setup, setup.fresh_host(options.index)?, options)?;
        setup.initialise(&mut env.network)?;
        env.twin = setup.config.twin().then(|| Twin::new(setup, options)).transpose()?;
        let (network, snapshot, graph) = env.snapshot_due(setup)?;
        snapshot.take(network, &graph)?;
        Ok(env)
    }

    /// An env restored from a checkpoint.
    ///
    /// # Errors
    /// A state that does not fit this run, out of memory.
    pub(crate) fn restore(
        setup: &Setup,
        options: EnvOptions<'_>,
        SavedEnv { state, tensors }: SavedEnv,
    ) -> Result<Self> {
        let host = setup.rebuild(&state.topology)?;
        let mut env = Self::of(setup, host, options)?;
        env.network.load_state_dict(&tensors.weights, true)?;
        env.network.load_momentum_dict(&tensors.optimiser)?;
        env.snapshot.load_state_dict(&tensors.snapshot)?;
        let twin = |twin| Twin::restore(setup, options, twin, &tensors.twin);
        let twin = state.twin.map(twin).transpose()?;
        Ok(Self {
            twin,
            training_flops: state.training_flops,
            guard: state.guard,
            measured: state.measured,
            interactions_pp: state.interactions_pp,
            accuracies_pp: state.accuracies_pp,
            losses: state.losses,
            train_losses: state.train_losses,
            slot_history: state.slot_history,
            last: state.last,
            reward_state: state.reward_state,
            train: state.train,
            control: state.control,
            history: state.history,
            ..env
        })
    }

    /// The env's state for a checkpoint, after its network is brought up to date. Waits for the
    /// device.
    ///
    /// # Errors
    /// A failed stream.
    pub(crate) fn save(&mut self, setup: &Setup) -> Result<SavedEnv> {
        self.sync_network(setup)?;
        let state = EnvState {
            guard: self.guard,
            topology: Topology::of(&self.host),
            measured: self.measured.clone(),
            interactions_pp: self.interactions_pp.clone(),
            accuracies_pp: self.accuracies_pp.clone(),
            losses: self.losses.clone(),
            train_losses: self.train_losses.clone(),
            slot_history: self.slot_history.clone(),
            last: self.last,
            reward_state: self.reward_state,
            train: self.train.clone(),
            control: self.control,
            history: self.history,
            training_flops: self.training_flops,
            twin: self.twin.as_ref().map(Twin::state),
        };
        let (weights, optimiser) = (self.network.state_dict()?, self.network.momentum_dict()?);
        let snapshot = self.snapshot.state_dict()?;
        let exchange = StateDict::default();
        let twin = self.twin.as_ref().map_or(Ok(TwinTensors::default()), Twin::save)?;
        let tensors = EnvTensors { weights, optimiser, snapshot, exchange, twin };
        Ok(SavedEnv { state, tensors })
    }

    fn of(setup: &Setup, host: Host, options: EnvOptions<'_>) -> Result<Self> {
        let EnvOptions { index, stream, seed, batch_log } = options;
        let slots = host.slots().len();
        let options = NetworkOptions {
            // One additional configuration is for the test split.
            configs: Counterfactual::rows_max(slots) + 1,
            batch_log,
            precision: setup.config.precision,
            winograd: setup.config.winograd.0,
            ..NetworkOptions::new(seed, index as u64, setup.isa, setup.config.batch)
        };
        let parameters = host.parameters()?;
        let graph = setup.graph(&host, 1.0)?;
        let network = Network::with_plans(stream, graph, options, &setup.plans)?;
        let counterfactual = Counterfactual::leave_one_out(&host, Scope::Live);
        let snapshot = Snapshot::new(&network, &setup.lasting_graph(&host)?)?;
        Ok(Self {
            index,
            key: host.topology_key(),
            rate: 1.0,
            reward_state: RewardState::begin(&host, &parameters),
            parameters,
            guard: Guard::new(setup.image.classes),
            snapshot,
            host,
            network,
            measured: vec![GateInputs::default(); slots],
            interactions_pp: vec![None; slots],
            accuracies_pp: vec![],
            losses: vec![],
            train_losses: vec![],
            slot_history: History::default(),
            last: None,
            reward: RewardTerms::default(),
            train: Metrics::default(),
            control: None,
            history: ModuleCounts::default(),
            counterfactual,
            twin: None,
            training_flops: 0,
        })
    }

    /// Advances the host's clocks (alpha, ages, embargo), brings the network up to date, and
    /// chooses the configurations to evaluate. Their alphas are set later.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn open_step(&mut self, setup: &Setup, when: Position) -> Result<Vec<StageChange>> {
        let changes = self.host.step();
        let config = &setup.config;
        let rate = config.rate(when.step);
        if rate != self.rate {
            self.rate = rate;
            self.set_rate(setup)?;
            self.twin.as_mut().map_or(Ok(()), |twin| twin.set_rate(setup, rate))?;
        }
        self.sync_network(setup)?;
        self.counterfactual = if when.step + 1 == config.steps {
            let round = when.round as u64;
            let (purpose, env) = (Purpose::Counterfactuals, self.index as u64);
            Counterfactual::of_last_step(
                &self.host,
                &mut Rng::new(config.seed, purpose, env, round),
            )
        } else {
            Counterfactual::of_step(&self.host)
        };
        Ok(changes)
    }

    /// Compiles the network for the host's current topology, if that changed.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn sync_network(&mut self, setup: &Setup) -> Result<()> {
        let key = self.host.topology_key();
        if key != self.key {
            self.network.set_graph(setup.graph(&self.host, self.rate)?)?;
            self.key = key;
            self.parameters = self.host.parameters()?;
            // Blocks of the smaller network are too small for the larger one; kept, they would add
            // up.
            self.network.stream().device().trim();
        }
        Ok(())
    }

    /// Compiles the network for the current learning rates, where its topology is up to date. Its
    /// memory stays as it is.
    fn set_rate(&mut self, setup: &Setup) -> Result<()> {
        if self.host.topology_key() == self.key {
            self.network.set_graph(setup.graph(&self.host, self.rate)?)?;
        }
        Ok(())
    }

    /// Compiles the training plans for batches of these sizes, also those of the twin.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn prepare_training(&mut self, sizes: &[usize]) -> Result<()> {
        let twin = self.twin.as_mut().map(|twin| &mut twin.network);
        for network in std::iter::once(&mut self.network).chain(twin) {
            sizes.iter().try_for_each(|&size| network.prepare_training(size))?;
        }
        Ok(())
    }

    /// Adds the operations of `passes` forward passes over `images` images to those of the episode,
    /// also to those of the twin. Returns their sum.
    ///
    /// # Errors
    /// None for the network of an env.
    pub(crate) fn count_flops(&mut self, passes: u64, images: u64) -> Result<u64> {
        let flops = passes * images * self.network.eval_flops(0..1)?.1;
        self.training_flops += flops;
        let of_twin = self.twin.as_mut().map_or(Ok(0), |twin| twin.count_flops(passes, images))?;
        Ok(flops + of_twin)
    }

    /// Alphas of each configuration that the current step evaluates.
    pub(crate) fn alphas(&self) -> &[Vec<f32>] {
        self.counterfactual.rows()
    }

    /// Number of configurations that the current step evaluates.
    pub(crate) fn configurations(&self) -> usize {
        self.alphas().len()
    }

    /// Records the measurements of a step.
    pub(crate) fn note(&mut self, metrics: Metrics, has_control: bool) {
        self.note_control(&metrics, has_control);
        for (slot, measured) in self.host.slots().iter().zip(&mut self.measured) {
            let name = slot.name.to_string();
            let group = self.network.graph().groups.iter().position(|group| group.name == name);
            let group = group.and_then(|index| metrics.groups.get(index));
            measured.gradient_health = group.and_then(health);
        }
        self.train_losses.push((metrics.loss_sum / metrics.samples.max(1) as f64) as f32);
        self.train = metrics;
    }

    /// Records an evaluation on the control split.
    pub(crate) fn note_control(&mut self, metrics: &Metrics, has_control: bool) {
        self.control = metrics.eval.first().copied().filter(|_| has_control);
        if let Some(control) = self.control {
            self.accuracies_pp.push(percent(&control) as f32);
            self.losses.push(control.loss().unwrap_or(f64::NAN) as f32);
            let accuracies: Vec<f64> = metrics.eval.iter().map(percent).collect();
            self.interactions_pp = self.counterfactual.interaction_sums_pp(&accuracies);
            let contributions = self.counterfactual.contributions_pp(&accuracies);
            let in_loss = self.counterfactual.contributions_loss(&metrics.eval);
            let contributions = contributions.into_iter().zip(in_loss);
            for (measured, (in_pp, in_loss)) in self.measured.iter_mut().zip(contributions) {
                (measured.contribution_pp, measured.contribution_loss) = (in_pp, in_loss);
            }
        }
    }

    /// The parts of a snapshot: the network, the snapshot whose memory is reused, and the graph of
    /// the host with its fossilized modules. After a module was fossilized the network must be up
    /// to date.
    ///
    /// # Errors
    /// A topology that cannot be compiled.
    pub(crate) fn snapshot_due(
        &mut self,
        setup: &Setup,
    ) -> Result<(&mut Network, &mut Snapshot, Arc<Graph>)> {
        let graph = match self.has_fossilized() {
            true => setup.lasting_graph(&self.host)?,
            false => Arc::clone(self.snapshot.graph()),
        };
        Ok((&mut self.network, &mut self.snapshot, graph))
    }

    /// Goes back to the snapshot. Live modules are removed, the optimiser's state and all
    /// measurements are reset; only this step's training metrics stay. Does not wait for the
    /// device.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn restore_snapshot(&mut self, setup: &Setup) -> Result<Vec<StageChange>> {
        let changes = self.host.prune_live();
        self.sync_network(setup)?;
        self.network.restore(&self.snapshot)?;
        // The graph of the snapshot has the learning rates of another step.
        self.set_rate(setup)?;
        let slots = self.host.slots().len();
        self.measured = vec![GateInputs::default(); slots];
        self.interactions_pp = vec![None; slots];
        self.accuracies_pp.clear();
        self.losses.clear();
        self.train_losses.clear();
        self.slot_history = History::default();
        self.last = None;
        self.reward_state = RewardState::begin(&self.host, &self.parameters);
        self.control = None;
        self.counterfactual = Counterfactual::leave_one_out(&self.host, Scope::Live);
        self.network.set_alphas(self.counterfactual.rows())?;
        self.network.reset_metrics()?;
        Ok(changes)
    }

    /// Loss that the governor judges; NaN if any number of the step is not finite.
    pub(crate) fn vital_loss(&self) -> f64 {
        let train = self.train.loss_sum / self.train.samples.max(1) as f64;
        match train.is_finite() && self.train.non_finite == 0 {
            true => self.control.and_then(|control| control.loss()).unwrap_or(train),
            false => f64::NAN,
        }
    }

    /// Whether a snapshot is due after `step`.
    pub(crate) fn is_snapshot_due(&self, rules: &GovernorConfig, step: usize) -> bool {
        let calm = self.guard.vitals.is_calm();
        self.has_fossilized() || (calm && rules.snapshot_due(step as u32, false))
    }

    /// Whether the last op fossilized a module.
    pub(crate) fn has_fossilized(&self) -> bool {
        self.last == Some((Op::Fossilize, true))
    }

    /// Whether the last op changed the network.
    pub(crate) fn has_changed(&self) -> bool {
        self.last.is_some_and(|(op, succeeded)| op != Op::Wait && succeeded)
    }

    /// Prepares the report: leave-one-out configurations of all modules for the control split, and
    /// one configuration of the whole network for the test split. Returns the latter's index.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn open_report(&mut self, setup: &Setup) -> Result<usize> {
        self.sync_network(setup)?;
        self.counterfactual = Counterfactual::leave_one_out(&self.host, Scope::All);
        let mut rows = self.counterfactual.rows().to_vec();
        rows.push(self.host.alphas());
        self.network.set_alphas(&rows)?;
        self.network.reset_metrics()?;
        self.twin.as_ref().map_or(Ok(()), |twin| twin.network.reset_metrics())?;
        Ok(rows.len() - 1)
    }

    /// Metrics of each configuration on the control split; empty without a control split.
    pub(crate) fn control_rows(&self) -> &[EvalMetrics] {
        let rows = self.control.map_or(0, |_| self.configurations());
        self.train.eval.get(..rows).unwrap_or_default()
    }

    /// Closes the measurements of a step by updating the slots' history.
    pub(crate) fn remember(&mut self) {
        self.slot_history.note(&self.host, &self.measured, &self.interactions_pp);
    }

    /// The controller's view of this env.
    pub(crate) fn view(&self, step: usize, episode_steps: usize) -> EnvView<'_> {
        let twin_loss = self.twin.as_ref().and_then(|twin| twin.control().loss());
        EnvView {
            env: self.index,
            host: &self.host,
            step: step as u32,
            episode_steps: episode_steps as u32,
            accuracies_pp: &self.accuracies_pp,
            losses: &self.losses,
            twin_loss: twin_loss.map(|loss| loss as f32),
            train_losses: &self.train_losses,
            measured: &self.measured,
            history: self.slot_history.slots(),
            last: self.last,
        }
    }

    /// Control accuracy after the last step, in percentage points.
    pub(crate) fn accuracy_pp(&self) -> Option<f32> {
        self.accuracies_pp.last().copied()
    }

    /// Records the op of this step and computes its reward.
    pub(crate) fn acted(&mut self, op: Op, deed: &Deed, outcome: &Outcome, rules: &RewardConfig) {
        self.last = Some((op, outcome.succeeded));
        let Self { reward_state, host, parameters, .. } = self;
        self.reward = reward_state.transition(rules, deed, host, parameters, outcome);
    }

    /// Trained parameters of the host and of the module in each slot.
    pub(crate) fn parameters(&self) -> &ParameterCounts {
        &self.parameters
    }
}

/// Sets the alphas of every env's configurations, and resets all metrics.
///
/// # Errors
/// A failed stream.
pub(crate) fn set_alphas(envs: &mut [Env]) -> Result<()> {
    let tables: Vec<Vec<Vec<f32>>> = envs.iter().map(|env| env.alphas().to_vec()).collect();
    let Networks { mut grown, twins } = networks(envs);
    grown.set_alphas(&tables)?;
    grown.reset_metrics()?;
    Ok(twins.reset_metrics()?)
}

/// Accuracy in percentage points; NaN without samples.
pub(crate) fn percent(metrics: &EvalMetrics) -> f64 {
    100.0 * metrics.accuracy().unwrap_or(f64::NAN)
}

/// Gradient health of a group: shares over all tensors and steps of the epoch, and the mean norm.
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
