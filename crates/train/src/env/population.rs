//! The envs of a process, and their bare twins.

use meristem_control::EnvView;
use meristem_nn::NetworkFleet;

use super::state::TwinState;
use super::{Env, HostOptions, SavedEnv, TrainedHost};
use crate::error::Result;
use crate::setup::Setup;

/// Configurations that a twin evaluates: one on the control split, and the same on the test split.
const TWIN_CONFIGURATIONS: usize = 2;

/// The envs of a process that are in training, and their bare twins, which train on the same
/// batches.
#[derive(Default)]
pub(crate) struct Population {
    /// The envs, in ascending order of their indices.
    pub(crate) envs: Vec<Env>,
    /// The twin of each env, or no twins: the host with which the env began the
    /// episode, with the same initial weights. Neither a controller nor the governor acts on it.
    pub(crate) twins: Vec<TrainedHost>,
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
        Ok(Self { envs, twins })
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
        let all = options.iter().zip(saved);
        let all = all.map(|(options, saved)| restored(setup, *options, saved));
        Ok(all.collect::<Result<Vec<_>>>()?.into_iter().collect())
    }

    /// The states of all envs for a checkpoint, by index, after their networks are brought up to
    /// date. Waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub(crate) fn save(&mut self, setup: &Setup) -> Result<Vec<SavedEnv>> {
        let mut twins = self.twins.iter();
        self.envs.iter_mut().map(|env| saved(setup, env, twins.next())).collect()
    }

    /// Adds envs, which replace those with the same index.
    pub(crate) fn add(&mut self, others: Self) {
        let replaced = others.indices();
        drop(self.split(|env| replaced.contains(&env)));
        let mut all: Vec<_> =
            std::mem::take(self).into_pairs().chain(others.into_pairs()).collect();
        all.sort_by_key(|(env, _)| env.index);
        *self = all.into_iter().collect();
    }

    /// Splits off the envs that `is_selected` selects by index.
    pub(crate) fn split(&mut self, is_selected: impl Fn(usize) -> bool) -> Self {
        let (selected, left): (Vec<_>, Vec<_>) =
            std::mem::take(self).into_pairs().partition(|(env, _)| is_selected(env.index));
        *self = left.into_iter().collect();
        selected.into_iter().collect()
    }

    /// A copy of env `from` with the index in `options` and the state that `from` has now:
    /// topology, weights, optimiser, statistics, measurements, twin. The state is saved and
    /// restored as for a checkpoint. Waits for the device.
    ///
    /// # Errors
    /// Out of memory, a failed stream, or settings of the env that do not fit the host of `from`.
    pub(crate) fn copy(
        &mut self,
        setup: &Setup,
        from: usize,
        options: HostOptions<'_>,
    ) -> Result<Self> {
        let Some(place) = self.envs.iter().position(|env| env.index == from) else {
            return Ok(Self::default());
        };
        let state = saved(setup, &mut self.envs[place], self.twins.get(place))?;
        Ok(std::iter::once(restored(setup, options, state)?).collect())
    }

    /// The envs with their twins.
    fn into_pairs(self) -> impl Iterator<Item = (Env, Option<TrainedHost>)> {
        let mut twins = self.twins.into_iter();
        self.envs.into_iter().map(move |env| (env, twins.next()))
    }

    /// Indices of the envs in training, in ascending order.
    pub(crate) fn indices(&self) -> Vec<usize> {
        self.envs.iter().map(|env| env.index).collect()
    }

    /// All hosts in training: first the envs' hosts, then the twins.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = &TrainedHost> {
        self.envs.iter().map(|env| &env.grown).chain(&self.twins)
    }

    /// Whether a network has running statistics.
    pub(crate) fn has_statistics(&self) -> bool {
        self.hosts().any(|trained| trained.network.has_statistics())
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

    /// The hosts of [`Population::fleets`].
    pub(crate) fn host_fleets(&mut self) -> Vec<Vec<&mut TrainedHost>> {
        let grown: Vec<_> = self.envs.iter_mut().map(|env| &mut env.grown).collect();
        let bare: Vec<_> = self.twins.iter_mut().collect();
        [grown, bare].into_iter().filter(|fleet| !fleet.is_empty()).collect()
    }

    /// Number of configurations that each network evaluates on the control split: a list for the
    /// envs' networks, then one for the twins' networks, which is empty without twins. Each
    /// network has one more configuration after these, for the test split.
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
        self.hosts_mut().try_for_each(TrainedHost::reset_metrics)
    }

    /// The controller's views of all envs. `step` is the current step of the round, from 0; after
    /// the last step it is the number of steps of the round. `steps` is the number of steps of an
    /// episode; with the setting `places` a round may have more steps.
    pub(crate) fn views(&self, step: usize, steps: usize) -> Vec<EnvView<'_>> {
        let envs = self.envs.iter().enumerate();
        envs.map(|(nth, env)| {
            let twin_loss =
                self.twins.get(nth).and_then(|twin| twin.unless_diverged()?.control_loss());
            let view = env.view(step, steps);
            EnvView { twin_loss: twin_loss.map(|loss| loss as f32), ..view }
        })
        .collect()
    }
}

impl FromIterator<(Env, Option<TrainedHost>)> for Population {
    /// Collects envs, in ascending order of their indices, each with its twin.
    fn from_iter<I: IntoIterator<Item = (Env, Option<TrainedHost>)>>(pairs: I) -> Self {
        let mut population = Self::default();
        for (env, twin) in pairs {
            population.envs.push(env);
            population.twins.extend(twin);
        }
        population
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
    setup.initialise(options.index, &mut twin.network)?;
    Ok(twin)
}
