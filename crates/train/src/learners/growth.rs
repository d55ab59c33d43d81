//! Growth of learners: the end of a step, the actions, and the opening of the next step.

use meristem_control::{Action, ActionContext, apply, legal};
use meristem_nn::NetworkFleet;

use super::{Learners, wrong};
use crate::env::{Env, GovernorState};
use crate::error::{Error, Result};
use crate::external::SeenEnv;
use crate::position::StepPosition;
use crate::step::visit::figures;

/// Results of one env in a step, as the program measured them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OwnScores {
    /// Score of the network: a share, such as the mean return as a share of the largest; `None` if
    /// it was not measured.
    pub score: Option<f64>,
    /// Slots whose module was left out ([`Learners::eval`]), by index, with the score without the
    /// module. The difference is the module's contribution, which the gate before FOSSILIZE needs.
    pub without: Vec<(usize, f64)>,
}

impl Learners {
    /// Ends a step: measures the gradients of all updates since the step began, records the scores
    /// that the program measured, and restores envs whose weights are not finite from their
    /// snapshots. `scores` has one item for each env, or is empty. Returns the envs before their
    /// actions. If actions of the step before are still due, WAIT is executed for all envs first.
    /// Waits for the device.
    ///
    /// # Errors
    /// [`Error::Session`] for a gradient that waits for its update, or scores that do not fit;
    /// nothing has happened then. [`Error::Diverged`] after too many failures; a failed device.
    pub fn step(&mut self, scores: &[OwnScores]) -> Result<Vec<SeenEnv>> {
        self.check_scores(scores)?;
        self.check_no_gradient("step")?;
        if self.decides {
            self.wait()?;
        }
        let envs = &mut self.population.envs;
        let networks = NetworkFleet::new(envs.iter_mut().map(|env| &mut env.grown.network));
        networks.count_non_finite()?;
        let tensors: Vec<_> = envs.iter().map(|env| env.grown.network.metrics()).collect();
        let metrics = self.devices.read_metrics(&tensors)?;
        let none = OwnScores::default();
        let scores = scores.iter().chain(std::iter::repeat(&none));
        for ((env, metrics), OwnScores { score, without }) in
            envs.iter_mut().zip(metrics).zip(scores)
        {
            env.grown.network.drop_gradient();
            env.note_own(metrics, *score, without);
        }
        self.govern()?;
        self.population.envs.iter_mut().for_each(Env::remember);
        self.decides = true;
        Ok(self.seen())
    }

    /// Executes an action for each env, in order, and opens the next step: alphas move, modules
    /// age, and networks with another topology get their plans. Returns the rewards. Waits for the
    /// device if a layer becomes wider, and on CUDA if the topology of a network changes.
    ///
    /// # Errors
    /// [`Error::Session`]: an action that is not legal, too many or too few actions, or no actions
    /// are due; nothing was executed. Out of memory, a failed device.
    pub fn act(&mut self, actions: Vec<Action>) -> Result<Vec<f32>> {
        if !self.decides {
            return Err(wrong("act: no actions are due; call step first".into()));
        }
        let envs = &self.population.envs;
        if actions.len() != envs.len() {
            let (expected, got) = (envs.len(), actions.len());
            let problem = format!("expected an action for each of {expected} envs, got {got}");
            return Err(wrong(format!("act: {problem}")));
        }
        for (action, env) in actions.iter().zip(envs) {
            if let Err(reason) = legal(action, &env.grown.host) {
                let (op, index) = (action.op(), env.index);
                return Err(wrong(format!("{op} is not legal in env {index}: {reason}")));
            }
        }
        let views = self.population.views(self.step, self.setup.config.steps);
        let both = actions.iter().zip(&views);
        let before: Vec<ActionContext> =
            both.map(|(action, view)| ActionContext::new(action, view)).collect();
        let config = self.setup.reward();
        for ((env, action), before) in self.population.envs.iter_mut().zip(&actions).zip(&before) {
            let score_pp = env.seen.scores_pp.last().copied();
            let outcome = apply(action, &mut env.grown.host, &env.seen.measured, score_pp);
            let outcome = outcome.map_err(meristem_grow::Error::from)?;
            env.acted(action.op(), before, &outcome, &config);
        }
        self.take_snapshots()?;
        self.decides = false;
        self.step += 1;
        self.open_step()?;
        Ok(self.population.envs.iter().map(|env| env.reward.total() as f32).collect())
    }

    /// Gives a layer of an env `by` further features at once, without an action. The network
    /// computes the same function ([`meristem_nn::Network::widen`]); the setting `width_init`
    /// determines the initial parameters. The measurement of the step's gradients begins anew for
    /// this env, and a forward pass whose backward pass is due is dropped. The wider network is the
    /// env's new snapshot. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Session`]: no such env, a layer that cannot become wider, a gradient that waits for
    /// its update, weights that are not finite, which [`Learners::step`] restores; nothing has
    /// changed then. Out of memory, a failed device.
    pub fn widen(&mut self, env: usize, layer: &str, by: usize) -> Result<()> {
        self.check_no_gradient("widen")?;
        let envs = self.population.envs.len();
        let Some(it) = self.population.envs.get_mut(env) else {
            return Err(wrong(format!("widen: env {env} is not one of {envs} envs")));
        };
        let weights = it.grown.network.state_dict()?;
        let mut values = weights.iter().filter_map(|(_, tensor)| tensor.as_f32()).flatten();
        if !values.all(|value| value.is_finite()) {
            return Err(wrong(format!(
                "widen: the weights of env {env} are not finite; call step, which restores them"
            )));
        }
        let host = &mut it.grown.host;
        let widened = host.find_layer(layer).and_then(|layer| host.widen(layer, by));
        widened.map_err(|reason| wrong(format!("widen: env {env}, {reason}")))?;
        it.grown.sync(&self.setup)?;
        let graph = self.setup.lasting_graph(it.index, &it.grown.host)?;
        Ok(it.snapshot.take(&it.grown.network, &graph)?)
    }

    /// State and measurements of each env.
    pub fn seen(&self) -> Vec<SeenEnv> {
        let views = self.population.views(self.step, self.setup.config.steps);
        let all = views.iter().zip(&self.population.envs);
        all.map(|(view, env)| {
            SeenEnv::from_view(view, 0, figures(&env.grown), env.reward.total() as f32)
        })
        .collect()
    }

    /// Number of times that each env was restored from its snapshot.
    pub fn rollbacks(&self) -> Vec<usize> {
        self.population.envs.iter().map(|env| env.governor.rollbacks).collect()
    }

    /// Whether actions are due.
    pub fn decides(&self) -> bool {
        self.decides
    }

    /// Executes WAIT for all envs.
    pub(super) fn wait(&mut self) -> Result<()> {
        self.act(vec![Action::Wait; self.envs()]).map(drop)
    }

    /// Opens a step: advances the hosts, and brings their networks up to date.
    pub(super) fn open_step(&mut self) -> Result<()> {
        let when = self.when();
        for env in &mut self.population.envs {
            env.open_step(&self.setup, when)?;
        }
        self.set_alphas()?;
        let mut envs = self.population.envs.iter();
        envs.try_for_each(|env| Ok(env.grown.network.reset_metrics()?))
    }

    /// Sets the alphas of each network: row 0 has all modules, row n + 1 lacks the module in slot
    /// n.
    pub(super) fn set_alphas(&mut self) -> Result<()> {
        for env in &mut self.population.envs {
            let alphas = env.grown.host.alphas();
            let without = |slot| {
                let mut row = alphas.clone();
                row[slot] = 0.0;
                row
            };
            let mut rows: Vec<Vec<f32>> = (0..alphas.len()).map(without).collect();
            rows.insert(0, alphas);
            env.grown.network.set_alphas(&rows)?;
        }
        Ok(())
    }

    /// Position of the current step.
    pub(super) fn when(&self) -> StepPosition {
        StepPosition { round: 0, step: self.step }
    }

    /// Restores the envs whose weights are not finite.
    fn govern(&mut self) -> Result<()> {
        let (config, guessing) = (self.setup.config.governor, self.setup.task.guessing);
        let StepPosition { round, step } = self.when();
        let mut restored = false;
        for env in &mut self.population.envs {
            let loss = env.governed_loss();
            let Some(failure) = env.governor.monitor.check(&config, loss, guessing) else {
                continue;
            };
            env.governor.failures += 1;
            let GovernorState { failures, .. } = env.governor;
            if failures >= config.failures_max {
                return Err(Error::Diverged { env: env.index, round, step, failure, failures });
            }
            env.restore_snapshot(&self.setup)?;
            env.governor.rolled_back();
            restored = true;
        }
        // The rows of a restored env are those of a leave-one-out measurement, not one for each
        // slot.
        if restored { self.set_alphas() } else { Ok(()) }
    }

    /// Takes the snapshots that are due after a step.
    fn take_snapshots(&mut self) -> Result<()> {
        let (config, step) = (self.setup.config.governor, self.step);
        for env in &mut self.population.envs {
            if env.is_snapshot_due(&config, step) {
                env.grown.sync(&self.setup)?;
                let (network, snapshot, graph) = env.snapshot_parts(&self.setup)?;
                snapshot.take(network, &graph)?;
                env.snapshot_taken(step);
            }
        }
        Ok(())
    }

    /// Checks that there are scores for each env or none, of slots with a module.
    fn check_scores(&self, scores: &[OwnScores]) -> Result<()> {
        let envs = &self.population.envs;
        if !scores.is_empty() && scores.len() != envs.len() {
            let (expected, got) = (envs.len(), scores.len());
            return Err(wrong(format!("step: expected scores of {expected} envs, got {got}")));
        }
        for (env, OwnScores { score, without }) in envs.iter().zip(scores) {
            let slots = env.grown.host.slots();
            let empty = |slot: usize| slots.get(slot).is_none_or(|slot| slot.module.is_none());
            let index = env.index;
            if let Some((slot, _)) = without.iter().find(|(slot, _)| empty(*slot)) {
                let problem =
                    format!("step: slot {slot} of env {index} has no module to leave out");
                return Err(wrong(problem));
            }
            let mut numbers = score.iter().chain(without.iter().map(|(_, score)| score));
            if numbers.any(|score| !score.is_finite()) || (score.is_none() && !without.is_empty()) {
                return Err(wrong(format!(
                    "step: expected a finite score of env {index}, and finite scores without \
                     modules beside it, got {score:?} and {without:?}"
                )));
            }
        }
        Ok(())
    }

    /// Checks that no gradient waits for its update.
    pub(super) fn check_no_gradient(&self, call: &str) -> Result<()> {
        let mut envs = self.population.envs.iter();
        match envs.find(|env| env.grown.network.has_gradient()) {
            None => Ok(()),
            Some(env) => Err(wrong(format!(
                "{call}: a gradient of env {} waits for its update; call update, or drop the \
                 gradients",
                env.index
            ))),
        }
    }
}
