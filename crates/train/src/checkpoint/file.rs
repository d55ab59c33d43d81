//! Format of a checkpoint file: safetensors, so that common tools can read it.
//!
//! Tensors are named `env.N.weights.NAME`, `env.N.optimiser.NAME`, `env.N.snapshot.NAME`,
//! `env.N.exchange.RANK.NAME`, `env.N.twin.weights.NAME`, `env.N.twin.optimiser.NAME` and
//! `controller.NAME`. N is the position of the env among the envs of the checkpoint, from 0; it
//! may differ from the index of the env in the run, because only envs in training are stored. Two
//! tensors of bytes, `progress` and `controller_memory`, hold CBOR, which keeps every bit of a
//! float. The metadata has `format` (`meristem checkpoint`), `version` and `crc32`, a checksum like
//! that of weights files: a truncated or changed file is refused as a whole. Earlier builds wrote
//! `checksum` instead, the CRC-32 of names, types, shapes and bytes.

use std::path::Path;

use ciborium::Value;
use meristem_control::ControllerState;
use meristem_nn::safetensors::{self, Metadata};
use meristem_nn::{HostData, HostTensor, StateDict};

use super::{Checkpoint, Progress};
use crate::env::EnvTensors;
use crate::error::{Error, Result};
use crate::input_file::checksum;
use crate::record::directory::Directory;

/// Version of the checkpoint format.
const CHECKPOINT_VERSION: u32 = 2;
const FORMAT: &str = "meristem checkpoint";
const PROGRESS: &str = "progress";
const MEMORY: &str = "controller_memory";

/// Serialises a checkpoint for the file at `path`.
///
/// # Errors
/// Never for the checkpoints that a run makes.
pub(super) fn to_bytes(path: &Path, checkpoint: &Checkpoint) -> Result<Vec<u8>> {
    let Checkpoint { progress, envs, controller } = checkpoint;
    let mut all = StateDict::default();
    envs.iter().enumerate().for_each(|(env, tensors)| put_env(&mut all, env, tensors));
    put(&mut all, "controller.", &controller.tensors);
    // Converted to a value first: CBOR then begins every map with its length, a flattened one
    // included.
    let progress = Value::serialized(progress).map_err(|error| unusable(path, error))?;
    let mut bytes = vec![];
    ciborium::into_writer(&progress, &mut bytes).map_err(|error| unusable(path, error))?;
    all.insert(PROGRESS, HostTensor::bytes(bytes));
    all.insert(MEMORY, HostTensor::bytes(controller.memory.clone()));
    let metadata = [("format", FORMAT.to_string()), ("version", CHECKPOINT_VERSION.to_string())];
    let metadata = metadata.map(|(key, text)| (key.to_string(), text)).into();
    Ok(safetensors::to_bytes(path, &all, &metadata)?)
}

/// Adds the tensors of an env, under names that begin with `env.{env}`.
pub(crate) fn put_env(all: &mut StateDict, env: usize, tensors: &EnvTensors) {
    let parts = [
        ("weights", &tensors.grown.weights),
        ("optimiser", &tensors.grown.optimiser),
        ("snapshot", &tensors.snapshot),
        ("exchange", &tensors.exchange),
        ("twin.weights", &tensors.twin.weights),
        ("twin.optimiser", &tensors.twin.optimiser),
    ];
    parts.into_iter().for_each(|(part, state)| put(all, &format!("env.{env}.{part}."), state));
}

/// Adds tensors with a prefix to their names.
fn put(all: &mut StateDict, prefix: &str, state: &StateDict) {
    state.iter().for_each(|(name, tensor)| all.insert(prefix.to_owned() + name, tensor.clone()));
}

/// Reads the bytes of the file `name` in `folder`.
///
/// # Errors
/// [`Error::Checkpoint`]: the file cannot be read.
pub(super) fn read(folder: &Directory, name: &str) -> Result<Vec<u8>> {
    let path = folder.path().join(name);
    let bytes = folder.read(name, u64::MAX).map_err(|error| unusable(&path, error))?;
    bytes.ok_or_else(|| unusable(&path, "it was removed"))
}

/// Deserialises a checkpoint from the bytes of the file at `path`.
///
/// # Errors
/// [`Error::Checkpoint`]: the file is not a checkpoint, or is damaged.
/// [`Error::CheckpointVersion`].
pub(super) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Checkpoint> {
    let (mut all, metadata) = safetensors::from_bytes(path, bytes)
        .map_err(|error| unusable(path, error.without_path()))?;
    check(path, &all, &metadata)?;
    let mut take_bytes = |name: &str| match all.0.remove(name).map(|tensor| tensor.data) {
        Some(HostData::U8(bytes)) => Ok(bytes),
        _ => Err(unusable(path, format!("it has no `{name}`"))),
    };
    let (progress, memory) = (take_bytes(PROGRESS)?, take_bytes(MEMORY)?);
    let progress: Progress = ciborium::from_reader(&progress[..]).map_err(|e| unusable(path, e))?;
    let mut envs = vec![EnvTensors::default(); progress.envs.len()];
    let mut controller = ControllerState { memory, ..ControllerState::default() };
    for (name, tensor) in all.0 {
        let home = home(&name, &mut envs, &mut controller);
        let Some((state, name)) = home else {
            return Err(unusable(path, format!("unknown tensor `{name}`")));
        };
        state.insert(name, tensor);
    }
    Ok(Checkpoint { progress, envs, controller })
}

/// The dictionary that a tensor belongs to, and its name there.
fn home<'a, 'n>(
    name: &'n str,
    envs: &'a mut [EnvTensors],
    controller: &'a mut ControllerState,
) -> Option<(&'a mut StateDict, &'n str)> {
    if let Some(name) = name.strip_prefix("controller.") {
        return Some((&mut controller.tensors, name));
    }
    env_tensors(name, envs)
}

/// The dictionary of an env that a tensor of [`put_env`] belongs to, and its name there.
pub(crate) fn env_tensors<'a, 'n>(
    name: &'n str,
    envs: &'a mut [EnvTensors],
) -> Option<(&'a mut StateDict, &'n str)> {
    let (number, name) = name.strip_prefix("env.")?.split_once('.')?;
    let env = envs.get_mut(number.parse::<usize>().ok()?)?;
    match name.split_once('.')? {
        ("weights", name) => Some((&mut env.grown.weights, name)),
        ("optimiser", name) => Some((&mut env.grown.optimiser, name)),
        ("snapshot", name) => Some((&mut env.snapshot, name)),
        ("exchange", name) => Some((&mut env.exchange, name)),
        ("twin", name) => match name.split_once('.')? {
            ("weights", name) => Some((&mut env.twin.weights, name)),
            ("optimiser", name) => Some((&mut env.twin.optimiser, name)),
            _ => None,
        },
        _ => None,
    }
}

fn check(path: &Path, all: &StateDict, metadata: &Metadata) -> Result<()> {
    if metadata.get("format").map(String::as_str) != Some(FORMAT) {
        return Err(unusable(path, "it is not a checkpoint of meristem"));
    }
    let version = metadata.get("version").map_or("none", String::as_str);
    if version != CHECKPOINT_VERSION.to_string() {
        let (path, version) = (path.to_owned(), version.to_string());
        return Err(Error::CheckpointVersion { path, version, own: CHECKPOINT_VERSION });
    }
    let is_whole = match metadata.get("checksum") {
        Some(of_earlier_build) => cfg!(fuzzing) || *of_earlier_build == checksum(all),
        // The safetensors reader has verified `crc32`.
        None => metadata.contains_key(safetensors::CHECKSUM),
    };
    if !is_whole {
        return Err(unusable(path, "its checksum is wrong, so the file is damaged"));
    }
    Ok(())
}

fn unusable(path: &Path, problem: impl ToString) -> Error {
    Error::Checkpoint { path: path.into(), problem: problem.to_string() }
}
