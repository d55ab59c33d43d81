//! State of learners in one file, from which they resume with the same bits.
//!
//! The file is safetensors, with the names of a checkpoint's tensors: `env.N.weights.NAME`,
//! `env.N.optimiser.NAME`, `env.N.snapshot.NAME`. The bytes `progress` are CBOR, which keeps every
//! bit of a float. The metadata has `format` (`meristem learners`), `version` and `crc32`.

use std::io::Read;
use std::path::Path;

use ciborium::Value;
use meristem_data::notes::say;
use meristem_device::named_file;
use meristem_nn::safetensors;
use meristem_nn::{HostData, HostTensor, ROUNDING, StateDict};
use serde::{Deserialize, Serialize};

use super::shape::{RESUME_SETTINGS, check_keys, with_controller};
use super::{LearnerShape, Learners};
use crate::checkpoint::{env_tensors, put_env};
use crate::config::{ConfigLayer, TrainConfig};
use crate::config_file;
use crate::env::{EnvState, EnvTensors, SavedEnv};
use crate::error::{Error, Result};
use crate::input_file::InputFile;
use crate::record::run_folder::write_whole;
use crate::setup::{OtherInputs, ResolvedNames, Setup};

const FORMAT: &str = "meristem learners";
const VERSION: &str = "1";
const PROGRESS: &str = "progress";

/// Everything in a file except tensors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LearnersProgress {
    shape: LearnerShape,
    /// Settings, as TOML.
    config: String,
    /// Instruction set of the kernels, because instruction sets round differently.
    instruction_set: String,
    /// Version of the kernels' rounding.
    rounding: u32,
    /// Files that the envs are made from.
    files: Vec<InputFile>,
    step: usize,
    decides: bool,
    /// Metrics of each network since the step began.
    metrics: Vec<Vec<f64>>,
    envs: Vec<EnvState>,
}

impl Learners {
    /// The state of all envs, as the contents of a file for [`Learners::resume`]. Waits for the
    /// device.
    ///
    /// # Errors
    /// [`Error::Session`] for a gradient that waits for its update; a failed device.
    pub fn to_bytes(&mut self) -> Result<Vec<u8>> {
        self.check_no_gradient("checkpoint")?;
        let saved = self.population.save(&self.setup)?;
        let networks = self.population.envs.iter().map(|env| &env.grown.network);
        let metrics =
            networks.map(|network| network.metrics().to_vec()).collect::<Result<_, _>>()?;
        let mut all = StateDict::default();
        let mut envs = vec![];
        for SavedEnv { index, state, tensors } in saved {
            put_env(&mut all, index, &tensors);
            envs.push(state);
        }
        let progress = LearnersProgress {
            shape: self.shape.clone(),
            config: self.setup.config.resolved_toml(),
            instruction_set: self.setup.isa.to_string(),
            rounding: ROUNDING,
            files: self.setup.files.clone(),
            step: self.step,
            decides: self.decides,
            metrics,
            envs,
        };
        let path = Path::new("learners");
        // Converted to a value first: CBOR then begins every map with its length, a flattened one
        // included.
        let value = Value::serialized(&progress).map_err(|error| unusable(path, error))?;
        let mut bytes = vec![];
        ciborium::into_writer(&value, &mut bytes).map_err(|error| unusable(path, error))?;
        all.insert(PROGRESS, HostTensor::bytes(bytes));
        let metadata = [("format", FORMAT), ("version", VERSION)];
        let metadata = metadata.map(|(key, text)| (key.to_string(), text.to_string())).into();
        Ok(safetensors::to_bytes(path, &all, &metadata)?)
    }

    /// Writes [`Learners::to_bytes`] to a file, which appears only once it is complete; a file that
    /// is there is replaced. Waits for the device.
    ///
    /// # Errors
    /// As [`Learners::to_bytes`]; a folder that is not writable, a full disk.
    pub fn checkpoint(&mut self, path: &Path) -> Result<()> {
        write_whole(path, &self.to_bytes()?)
    }

    /// Learners with the state in a file. Further training gives the same bits as without the
    /// interruption. `options` replaces [`RESUME_SETTINGS`]; on devices of another kind the results
    /// differ by rounding.
    ///
    /// # Errors
    /// [`Error::Resume`]: the file cannot be read, is damaged, or is something else;
    /// [`Error::OtherInput`]: this machine has another instruction set, or a file of blueprints has
    /// changed; [`Error::Value`] for another option. A device that does not exist, out of memory.
    pub fn resume(path: &Path, options: ConfigLayer) -> Result<Self> {
        check_keys(&options, &RESUME_SETTINGS, "the file has it")?;
        let mut bytes = vec![];
        let read = named_file::open(path).and_then(|mut file| file.read_to_end(&mut bytes));
        read.map_err(|error| unusable(path, format!("it cannot be read: {error}")))?;
        let (progress, tensors) = from_bytes(path, &bytes)?;
        let layer = config_file::parse(Path::new("config.toml"), &progress.config)?;
        let config = with_controller(TrainConfig::resolve(layer, options)?)?;
        progress.shape.check()?;
        let others = OtherInputs::default();
        let names = ResolvedNames::of_checkpoint(&config, others, path, &progress.files, false)?;
        let setup = Setup::new(&config, names.clone(), progress.shape.info(config.task))?;
        check_instruction_set(path, &progress.instruction_set, &setup.isa.to_string())?;
        let count = [progress.envs.len(), tensors.len(), progress.metrics.len()];
        if count != [config.envs; 3] {
            return Err(unusable(path, "its envs are not those of its settings"));
        }
        if progress.rounding != ROUNDING {
            let path = path.display();
            say(&format!(
                "{path}: the kernels round differently from those that it was saved with"
            ));
        }
        let both = progress.envs.into_iter().zip(tensors).enumerate();
        let saved = both.map(|(index, (state, tensors))| SavedEnv { index, state, tensors });
        let saved = saved.collect();
        let mut learners = Self::assemble(setup, names, progress.shape, Some(saved))?;
        (learners.step, learners.decides) = (progress.step, progress.decides);
        for (env, metrics) in learners.population.envs.iter_mut().zip(&progress.metrics) {
            env.grown.open_step(&learners.setup, learners.step)?;
            let to = env.grown.network.metrics();
            if to.numel() != metrics.len() {
                return Err(unusable(path, "its metrics have another size"));
            }
            to.copy_from_slice(metrics)?;
        }
        learners.set_alphas()?;
        Ok(learners)
    }
}

/// Parses the contents of the file at `path`: the progress, and the tensors of each env.
///
/// # Errors
/// [`Error::Resume`]: it is damaged, or something else.
pub(crate) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<(LearnersProgress, Vec<EnvTensors>)> {
    let (mut all, metadata) = safetensors::from_bytes(path, bytes)
        .map_err(|error| unusable(path, error.without_path()))?;
    let has = |key: &str, text: &str| metadata.get(key).is_some_and(|found| found == text);
    if !has("format", FORMAT) || !metadata.contains_key(safetensors::CHECKSUM) {
        return Err(unusable(path, "it is not a state of learners, as `checkpoint` writes it"));
    }
    if !has("version", VERSION) {
        return Err(unusable(path, format!("this program reads version {VERSION} of its format")));
    }
    let Some(HostData::U8(progress)) = all.0.remove(PROGRESS).map(|tensor| tensor.data) else {
        return Err(unusable(path, format!("it has no `{PROGRESS}`")));
    };
    let progress: LearnersProgress =
        ciborium::from_reader(&progress[..]).map_err(|error| unusable(path, error))?;
    let mut envs = vec![EnvTensors::default(); progress.envs.len()];
    for (name, tensor) in all.0 {
        let Some((state, name)) = env_tensors(&name, &mut envs) else {
            return Err(unusable(path, format!("unknown tensor `{name}`")));
        };
        state.insert(name, tensor);
    }
    Ok((progress, envs))
}

fn check_instruction_set(path: &Path, began: &str, now: &str) -> Result<()> {
    if began == now {
        return Ok(());
    }
    Err(Error::OtherInput {
        action: "resume",
        path: path.into(),
        input: "the instruction set of the kernels".into(),
        began: began.into(),
        now: now.into(),
        remedy: format!("set MERISTEM_ISA={began}, on a machine that has it").into(),
    })
}

fn unusable(path: &Path, problem: impl ToString) -> Error {
    Error::Resume { path: path.into(), problem: problem.to_string() }
}
