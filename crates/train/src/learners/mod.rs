//! Networks that a program trains with its own loop, without a dataset: reinforcement
//! learning, distillation, contrastive pairs.
//!
//! The program computes the loss. A training step consists of three calls, [`Learners::forward`],
//! [`Learners::backward`] and [`Learners::update`], for all envs at once or for some. A step of
//! growth consists of any number of training steps. [`Learners::step`] ends it and measures the
//! gradients; [`Learners::act`] executes an action for each env.
//!
//! ```
//! use meristem_control::Action;
//! use meristem_train::config::ConfigLayer;
//! use meristem_train::learners::{EnvBatch, LearnerShape, Learners};
//!
//! # fn main() -> meristem_train::Result<()> {
//! let settings = ConfigLayer {
//!     host: Some("mlp:8".into()),
//!     envs: Some(1),
//!     ..ConfigLayer::default()
//! };
//! let shape = LearnerShape { input: vec![2], outputs: 1 };
//! let mut learners = Learners::new(settings, shape)?;
//! let x = [0.0, 1.0, 1.0, 0.0];
//! for _ in 0..3 {
//!     // Two samples; the gradient of the mean of (y − 1)².
//!     let outputs = learners.forward(&[EnvBatch { env: 0, values: &x }])?;
//!     let gradient: Vec<f32> = outputs[0].iter().map(|y| y - 1.0).collect();
//!     learners.backward(&[EnvBatch { env: 0, values: &gradient }])?;
//!     learners.update(&[0])?;
//! }
//! learners.step(&[])?;
//! learners.act(vec![Action::Wait])?;
//! # Ok(())
//! # }
//! ```

mod growth;
mod shape;
mod state_file;
#[cfg(test)]
mod tests;

use std::path::Path;

use meristem_device::{DType, MemoryFormat, Owner, Tensor, read_back_as};
use meristem_grow::Topology;
use meristem_nn::NetworkFleet;

pub use self::growth::OwnScores;
pub use self::shape::{LearnerShape, RESUME_SETTINGS, settings};
use crate::config::{ConfigLayer, TrainConfig};
use crate::env::{HostOptions, Population, SavedEnv};
use crate::error::{Error, Result};
use crate::resources::OpenDevices;
use crate::setup::weights::{self, Weights};
use crate::setup::{OtherInputs, ResolvedNames, Setup};

#[cfg(fuzzing)]
pub(crate) use self::state_file::from_bytes as parse_state;

/// An array of one env.
#[derive(Clone, Copy, Debug)]
pub struct EnvBatch<'a> {
    /// Number of the env.
    pub env: usize,
    /// Inputs `[n, rows, columns, channels]`, which for vectors is `[n, features]`, or gradients
    /// `[n, outputs]`; row-major.
    pub values: &'a [f32],
}

/// Networks that grow, without a dataset. A call returns before the device has done the work,
/// unless its documentation says that it waits for the device.
pub struct Learners {
    setup: Setup,
    shape: LearnerShape,
    devices: OpenDevices,
    population: Population,
    /// Number of the current step, from 0.
    step: usize,
    /// Whether the actions of the step are due.
    decides: bool,
}

impl Learners {
    /// Networks with fresh weights. `settings` may have the keys that the function [`settings`]
    /// lists: `batch` is the largest number of samples of a call, `steps` the length of the
    /// schedule of the learning rates.
    ///
    /// # Errors
    /// [`Error::Value`] for a size or a setting; a host that does not fit, a device that does not
    /// exist, out of memory.
    pub fn new(settings: ConfigLayer, shape: LearnerShape) -> Result<Self> {
        shape.check()?;
        let (config, names) =
            ResolvedNames::of_new(&shape::resolve(settings)?, OtherInputs::default())?;
        let setup = Setup::new(&config, names.clone(), shape.info(config.task))?;
        let mut learners = Self::assemble(setup, names, shape, None)?;
        learners.open_step()?;
        Ok(learners)
    }

    /// Opens the devices, and makes the envs or restores them.
    fn assemble(
        setup: Setup,
        names: ResolvedNames,
        shape: LearnerShape,
        saved: Option<Vec<SavedEnv>>,
    ) -> Result<Self> {
        let config = &setup.config;
        let options = config.device_options(None);
        let devices = OpenDevices::open(&names.devices, 0..config.envs, &options)?;
        let hosts: Vec<HostOptions<'_>> = devices
            .streams_by_env()
            .map(|(index, stream)| {
                let (seed, batch_log, begun) = (config.seed, 1, 0);
                HostOptions { index, stream, seed, batch_log, begun }
            })
            .collect();
        let population = match saved {
            Some(saved) => Population::restore(&setup, &hosts, saved)?,
            None => Population::new(&setup, &hosts)?,
        };
        Ok(Self { setup, shape, devices, population, step: 0, decides: false })
    }

    /// Forward passes in training mode: the outputs, f32 `[n, outputs]`, of each env in `inputs`,
    /// which is in ascending order of envs. The activations are kept for [`Learners::backward`]. If
    /// actions are due, all of them are WAIT. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Session`] for envs or sizes that do not fit, [`Error::Value`] for more samples than
    /// the setting `batch`; nothing was computed then. Out of memory, a failed device.
    pub fn forward(&mut self, inputs: &[EnvBatch<'_>]) -> Result<Vec<Vec<f32>>> {
        self.check_inputs("forward", inputs)?;
        if self.decides {
            self.wait()?;
        }
        let tensors = self.upload_inputs(inputs)?;
        let outputs = self.fleet(inputs).forward(&tensors.iter().collect::<Vec<_>>())?;
        self.read(&outputs)
    }

    /// Backward passes of the last [`Learners::forward`] of each env in `gradients`, which has the
    /// gradients of a loss with respect to the outputs, `[n, outputs]`. Gradients of several passes
    /// add up until [`Learners::update`].
    ///
    /// # Errors
    /// [`Error::Session`] for an env without a forward pass, or sizes that do not fit; nothing was
    /// computed then. Out of memory, a failed device.
    pub fn backward(&mut self, gradients: &[EnvBatch<'_>]) -> Result<()> {
        self.check_envs("backward", gradients.iter().map(|batch| batch.env))?;
        let mut tensors = vec![];
        for &EnvBatch { env, values } in gradients {
            let network = &self.population.envs[env].grown.network;
            let outputs = self.shape.outputs;
            let due = network.forward_batch().ok_or_else(|| {
                wrong(format!("backward: env {env} has no forward pass; call forward first"))
            })?;
            if values.len() != due * outputs {
                return Err(wrong(format!(
                    "backward: expected a gradient [{due}, {outputs}] for env {env}, as forward \
                     returned outputs, got {} numbers",
                    values.len()
                )));
            }
            let shape = [due, outputs];
            tensors.push(Tensor::from_slice(network.stream(), values, shape, Owner::Batches)?);
        }
        Ok(self.fleet(gradients).backward(&tensors.iter().collect::<Vec<_>>())?)
    }

    /// Updates of the parameters of these envs, in ascending order, with their gradients since the
    /// last update: clipping, then the optimiser's step.
    ///
    /// # Errors
    /// [`Error::Session`] for an env without a gradient; nothing was updated then. A failed device.
    pub fn update(&mut self, envs: &[usize]) -> Result<()> {
        self.check_envs("update", envs.iter().copied())?;
        let has_none = |env: &&usize| !self.population.envs[**env].grown.network.has_gradient();
        if let Some(env) = envs.iter().find(has_none) {
            return Err(wrong(format!("update: env {env} has no gradient; call backward first")));
        }
        Ok(self.fleet_of(envs).update()?)
    }

    /// Drops the gradients of these envs that wait for an update, and kept activations.
    ///
    /// # Errors
    /// [`Error::Session`] for an env that does not exist.
    pub fn drop_gradients(&mut self, envs: &[usize]) -> Result<()> {
        self.check_envs("drop_gradients", envs.iter().copied())?;
        for &env in envs {
            self.population.envs[env].grown.network.drop_gradient();
        }
        Ok(())
    }

    /// Outputs of networks in evaluation mode, in the form of [`Learners::forward`]: running
    /// statistics are used and stay as they are, and no activations are kept. Actions that are due
    /// stay due. `without` is the index of a slot whose module is left out. Waits for the device.
    ///
    /// # Errors
    /// As [`Learners::forward`], and [`Error::Session`] for a slot that does not exist.
    pub fn eval(
        &mut self,
        inputs: &[EnvBatch<'_>],
        without: Option<usize>,
    ) -> Result<Vec<Vec<f32>>> {
        self.check_inputs("eval", inputs)?;
        let slots = self.slots();
        if let Some(slot) = without.filter(|slot| *slot >= slots) {
            return Err(wrong(format!("eval: there is no slot {slot}; the hosts have {slots}")));
        }
        let tensors = self.upload_inputs(inputs)?;
        // Row 0 of the alphas is the whole network, row n + 1 the network without slot n.
        let row = without.map_or(0, |slot| slot + 1);
        let outputs = self.fleet(inputs).infer(&tensors.iter().collect::<Vec<_>>(), row)?;
        self.read(&outputs)
    }

    /// Weights of an env, as the contents of a weights file. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Session`] for an env that does not exist; a failed device.
    pub fn weights(&mut self, env: usize) -> Result<Vec<u8>> {
        self.check_envs("weights", [env].into_iter())?;
        let grown = &mut self.population.envs[env].grown;
        let (state, topology) = (grown.network.state_dict()?, Topology::from_host(&grown.host));
        weights::to_bytes(Path::new("weights"), &state, &topology, &self.setup.interface)
    }

    /// Sets the parameters and running statistics of an env to the contents of a weights file,
    /// which has the env's topology; the optimiser's state stays as it is. Errors refer to the file
    /// as `name`.
    ///
    /// # Errors
    /// [`Error::Session`] for an env that does not exist; contents that are not safetensors;
    /// [`Error::Weights`] lists every tensor that does not fit: nothing was set then.
    pub fn load(&mut self, env: usize, name: &Path, contents: &[u8]) -> Result<()> {
        self.check_envs("load", [env].into_iter())?;
        let weights = Weights::from_bytes(name, contents)?;
        weights.fill(&mut self.population.envs[env].grown.network)
    }

    /// Shape of inputs and outputs.
    pub fn shape(&self) -> &LearnerShape {
        &self.shape
    }

    /// Settings.
    pub fn config(&self) -> &TrainConfig {
        &self.setup.config
    }

    /// Number of envs.
    pub fn envs(&self) -> usize {
        self.population.envs.len()
    }

    /// Number of enabled slots.
    fn slots(&self) -> usize {
        self.population.envs.first().map_or(0, |env| env.grown.host.slots().len())
    }

    fn fleet(&mut self, batches: &[EnvBatch<'_>]) -> NetworkFleet<'_> {
        self.fleet_of(&batches.iter().map(|batch| batch.env).collect::<Vec<_>>())
    }

    /// The networks of some envs, in ascending order.
    fn fleet_of(&mut self, envs: &[usize]) -> NetworkFleet<'_> {
        let all = self.population.envs.iter_mut();
        NetworkFleet::new(
            all.filter(|env| envs.contains(&env.index)).map(|env| &mut env.grown.network),
        )
    }

    /// Copies inputs to the devices.
    fn upload_inputs(&self, inputs: &[EnvBatch<'_>]) -> Result<Vec<Tensor>> {
        let ([channels, rows, columns], len) = (self.shape.dims(), self.shape.sample_len());
        let upload = |&EnvBatch { env, values }: &EnvBatch<'_>| {
            let stream = self.population.envs[env].grown.network.stream();
            let (shape, format) =
                ([values.len() / len, channels, rows, columns], MemoryFormat::ChannelsLast);
            let tensor =
                Tensor::empty_with_format(stream, shape, DType::F32, format, Owner::Batches)?;
            tensor.copy_from_slice(values)?;
            Ok(tensor)
        };
        inputs.iter().map(upload).collect()
    }

    /// Reads outputs back, with one wait for each device.
    fn read(&self, outputs: &[Tensor]) -> Result<Vec<Vec<f32>>> {
        let mut all = vec![vec![]; outputs.len()];
        for device in self.devices.distinct() {
            let own: Vec<usize> =
                (0..outputs.len()).filter(|&at| outputs[at].device() == device).collect();
            let tensors: Vec<&Tensor> = own.iter().map(|&at| &outputs[at]).collect();
            for (at, values) in own.into_iter().zip(read_back_as::<f32>(&tensors)?) {
                all[at] = values;
            }
        }
        Ok(all)
    }

    fn check_inputs(&self, call: &str, inputs: &[EnvBatch<'_>]) -> Result<()> {
        self.check_envs(call, inputs.iter().map(|batch| batch.env))?;
        let (len, most) = (self.shape.sample_len(), self.setup.config.batch);
        let fits = |values: &[f32]| !values.is_empty() && values.len().is_multiple_of(len);
        if let Some(EnvBatch { env, values }) = inputs.iter().find(|batch| !fits(batch.values)) {
            let got = values.len();
            return Err(wrong(format!(
                "{call}: expected samples of {len} numbers for env {env}, got {got} numbers"
            )));
        }
        let samples = inputs.iter().map(|batch| batch.values.len() / len).max().unwrap_or(0);
        if samples > most {
            let expected = format!("at least {samples}, the samples of this call");
            return Err(Error::value("batch", most, expected));
        }
        Ok(())
    }

    /// Checks that envs exist and are in ascending order.
    fn check_envs(&self, call: &str, envs: impl Iterator<Item = usize>) -> Result<()> {
        let (envs, all) = (envs.collect::<Vec<_>>(), self.envs());
        if let Some(env) = envs.iter().find(|env| **env >= all) {
            return Err(wrong(format!("{call}: there is no env {env}; there are {all}")));
        }
        if envs.is_empty() || !envs.is_sorted_by(|a, b| a < b) {
            let problem = format!("{call}: expected envs in ascending order, got {envs:?}");
            return Err(wrong(problem));
        }
        Ok(())
    }
}

fn wrong(problem: String) -> Error {
    Error::Session { problem }
}
