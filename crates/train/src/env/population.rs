//! The envs of a process, and their bare twins.

use meristem_control::EnvView;
use meristem_nn::NetworkFleet;

use super::state::TwinState;
use super::{Env, HostOptions, SavedEnv, TrainedHost};
use crate::error::Result;
use crate::setup::Setup;

/// Configurations that a twin evaluates: one on the control split, and the same on the test split.
const TWIN_CONFIGURATIONS: usize = 2;

/// The envs of a process, and their bare twins, which train on the same batches.
pub(crate) struct Population {
    /// The envs in training, by number.
    pub(crate) envs: Vec<Env>,
    /// The twin of each env in training, or no twins: the host with which the env began the
    /// episode, with the same initial weights. Neither a controller nor the governor acts on it.
    pub(crate) twins: Vec<TrainedHost>,
    /// Envs that are not trained now, with their twins.
    resting: Vec<(Env, Option<TrainedHost>)>,
}

impl Population {
    /// Envs with fresh hosts, with twins if the run trains any.
    ///
    /// # Errors
    /// Weights that do not fit, out of memory.
    pub(crate) fn new(setup: &Setup, options: &[HostOptions<'_>]) -> Result<Self> {
        let envs =
            options.iter().map(|options| Env::new(setup, *options)).collect::<Result<_>>()?;
        let twins = options.iter().filter(|_| setup.config.twin());
        let twins = twins.map(|options| new_twin(setup, *options)).collect::<Result<_>>()?;
        Ok(Self { envs, twins, resting: vec![] })
    }

    /// Envs and twins restored from a checkpoint.
    ///
    /// # Errors
    /// A state that does not fit this run, out of memory.
    pub(crate) fn restore(
        setup: &Setup,
        options: &[HostOptions<'_>],
        saved: Vec<SavedEnv>,
    ) -> Result<Self> {
        let mut population = Self { envs: vec![], twins: vec![], resting: vec![] };
        for (options, saved) in options.iter().zip(saved) {
            let (env, twin) = restored(setup, *options, saved)?;
            population.envs.push(env);
            population.twins.extend(twin);
        }
        Ok(population)
    }

    /// The states of all envs for a checkpoint, by number, after their networks are brought up to
    /// date. Waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub(crate) fn save(&mut self, setup: &Setup) -> Result<Vec<SavedEnv>> {
        let mut all: Vec<(&mut Env, Option<&TrainedHost>)> = vec![];
        let mut twins = self.twins.iter();
        all.extend(self.envs.iter_mut().map(|env| (env, twins.next())));
        all.extend(self.resting.iter_mut().map(|(env, twin)| (env, twin.as_ref())));
        all.sort_by_key(|(env, _)| env.index);
        all.into_iter().map(|(env, twin)| saved(setup, env, twin)).collect()
    }

    /// Trains the envs that `is_trained` selects by number; the others rest and keep their state.
    pub(crate) fn select(&mut self, is_trained: impl Fn(usize) -> bool) {
        let mut twins = std::mem::take(&mut self.twins).into_iter();
        let envs = std::mem::take(&mut self.envs).into_iter().map(|env| (env, twins.next()));
        let mut all: Vec<_> = envs.chain(std::mem::take(&mut self.resting)).collect();
        all.sort_by_key(|(env, _)| env.index);
        for (env, twin) in all {
            if is_trained(env.index) {
                self.envs.push(env);
                self.twins.extend(twin);
            } else {
                self.resting.push((env, twin));
            }
        }
    }

    /// Replaces the env with the number in `options` by a copy of env `from`, with the state that
    /// `from` has now: topology, weights, optimiser, statistics, measurements, twin. The copy is
    /// made as a checkpoint is resumed. Waits for the device.
    ///
    /// # Errors
    /// Out of memory, a failed stream, or settings of the env that do not fit the host of `from`.
    pub(crate) fn copy(
        &mut self,
        setup: &Setup,
        from: usize,
        options: HostOptions<'_>,
    ) -> Result<()> {
        self.select(|_| true);
        let place = |number| self.envs.iter().position(|env| env.index == number);
        let (Some(from), Some(to)) = (place(from), place(options.index)) else { return Ok(()) };
        let state = saved(setup, &mut self.envs[from], self.twins.get(from))?;
        let (env, twin) = restored(setup, options, state)?;
        self.envs[to] = env;
        twin.into_iter().for_each(|twin| self.twins[to] = twin);
        Ok(())
    }

    /// Numbers of the envs in training.
    pub(crate) fn numbers(&self) -> Vec<usize> {
        self.envs.iter().map(|env| env.index).collect()
    }

    /// All hosts in training: first the envs' hosts, then the twins.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = &TrainedHost> {
        self.envs.iter().map(|env| &env.grown).chain(&self.twins)
    }

    /// All hosts in training, in the order of [`Population::hosts`].
    pub(crate) fn hosts_mut(&mut self) -> impl Iterator<Item = &mut TrainedHost> {
        self.envs.iter_mut().map(|env| &mut env.grown).chain(&mut self.twins)
    }

    /// Compiles the training plans of all networks for batches of these sizes, by env.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn prepare_training(&mut self, sizes: &[Vec<usize>]) -> Result<()> {
        // A twin has the batches of its env.
        let mut hosts = self.hosts_mut().zip(sizes.iter().cycle());
        hosts.try_for_each(|(trained, sizes)| trained.prepare_training(sizes))
    }

    /// Networks that are launched together: the envs' networks, then the twins' networks if there
    /// are any. All fleets get the same batches.
    pub(crate) fn fleets(&mut self) -> Vec<NetworkFleet<'_>> {
        let grown = NetworkFleet::new(self.envs.iter_mut().map(|env| &mut env.grown.network));
        let bare = NetworkFleet::new(self.twins.iter_mut().map(|twin| &mut twin.network));
        [grown, bare].into_iter().filter(|fleet| !fleet.is_empty()).collect()
    }

    /// Number of configurations that each network evaluates on the control split, for each fleet of
    /// [`Population::fleets`]. The configuration after them is for the test split.
    pub(crate) fn configurations(&self) -> Vec<Vec<usize>> {
        let grown = self.envs.iter().map(Env::configurations).collect();
        vec![grown, vec![1; self.twins.len()]]
    }

    /// Sets the alphas of every env's configurations, and resets the metrics of all networks.
    ///
    /// # Errors
    /// A failed stream.
    pub(crate) fn set_alphas(&mut self) -> Result<()> {
        for env in &mut self.envs {
            env.grown.network.set_alphas(env.counterfactual.rows())?;
        }
        Ok(self.hosts().try_for_each(|trained| trained.network.reset_metrics())?)
    }

    /// The controller's views of all envs, after `step` of `steps` steps.
    pub(crate) fn views(&self, step: usize, steps: usize) -> Vec<EnvView<'_>> {
        let envs = self.envs.iter().enumerate();
        envs.map(|(nth, env)| {
            let twin_loss = self.twins.get(nth).and_then(|twin| twin.known()?.control_loss());
            let view = env.view(step, steps);
            EnvView { twin_loss: twin_loss.map(|loss| loss as f32), ..view }
        })
        .collect()
    }
}

/// An env and its twin from a checkpoint.
fn restored(
    setup: &Setup,
    options: HostOptions<'_>,
    saved: SavedEnv,
) -> Result<(Env, Option<TrainedHost>)> {
    let twin = match saved.state.twin {
        None => None,
        Some(TwinState { training_flops, diverged }) => {
            let mut twin = new_twin(setup, options)?;
            if !diverged {
                twin.load(&saved.tensors.twin)?;
            }
            (twin.training_flops, twin.diverged) = (training_flops, diverged);
            Some(twin)
        }
    };
    Ok((Env::restore(setup, options, saved)?, twin))
}

/// The state of an env with its twin.
fn saved(setup: &Setup, env: &mut Env, twin: Option<&TrainedHost>) -> Result<SavedEnv> {
    let mut saved = env.save(setup)?;
    if let Some(twin) = twin {
        let &TrainedHost { training_flops, diverged, .. } = twin;
        saved.state.twin = Some(TwinState { training_flops, diverged });
        if !diverged {
            saved.tensors.twin = twin.tensors()?;
        }
    }
    Ok(saved)
}

/// A twin with the initial weights of its env.
fn new_twin(setup: &Setup, options: HostOptions<'_>) -> Result<TrainedHost> {
    let options = HostOptions { batch_log: 1, ..options };
    let host = setup.fresh_host(options.index)?;
    let mut twin = TrainedHost::new(setup, host, options, TWIN_CONFIGURATIONS)?;
    twin.network.set_alphas(&[twin.host.alphas(), twin.host.alphas()])?;
    setup.initialise(&mut twin.network)?;
    Ok(twin)
}
