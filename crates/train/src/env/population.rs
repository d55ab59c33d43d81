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
    pub(crate) envs: Vec<Env>,
    /// The twin of each env, or no twins: the host with which the env began the episode, with the
    /// same initial weights. Neither a controller nor the governor acts on it.
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
        let (mut envs, mut twins) = (vec![], vec![]);
        for (options, saved) in options.iter().zip(saved) {
            if let Some(TwinState { training_flops, diverged }) = saved.state.twin {
                let mut twin = new_twin(setup, *options)?;
                if !diverged {
                    twin.load(&saved.tensors.twin)?;
                }
                (twin.training_flops, twin.diverged) = (training_flops, diverged);
                twins.push(twin);
            }
            envs.push(Env::restore(setup, *options, saved)?);
        }
        Ok(Self { envs, twins })
    }

    /// The states of all envs for a checkpoint, after their networks are brought up to date. Waits
    /// for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub(crate) fn save(&mut self, setup: &Setup) -> Result<Vec<SavedEnv>> {
        let mut all: Vec<SavedEnv> =
            self.envs.iter_mut().map(|env| env.save(setup)).collect::<Result<_>>()?;
        for (saved, twin) in all.iter_mut().zip(&self.twins) {
            let &TrainedHost { training_flops, diverged, .. } = twin;
            saved.state.twin = Some(TwinState { training_flops, diverged });
            if !diverged {
                saved.tensors.twin = twin.tensors()?;
            }
        }
        Ok(all)
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

/// A twin with the initial weights of its env.
fn new_twin(setup: &Setup, options: HostOptions<'_>) -> Result<TrainedHost> {
    let options = HostOptions { batch_log: 1, ..options };
    let host = setup.fresh_host(options.index)?;
    let mut twin = TrainedHost::new(setup, host, options, TWIN_CONFIGURATIONS)?;
    twin.network.set_alphas(&[twin.host.alphas(), twin.host.alphas()])?;
    setup.initialise(&mut twin.network)?;
    Ok(twin)
}
