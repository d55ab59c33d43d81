//! Number of members whose envs fit into memory.

use meristem_device::{Device, DeviceId};

use crate::config::TrainConfig;
use crate::env::{HostOptions, Population};
use crate::error::{Error, Result};
use crate::resources::{Resources, first_envs};
use crate::settings::Scheduler;
use crate::setup::Setup;

/// Least bytes of a trained parameter: weight, gradient and snapshot, each in f32.
const BYTES_OF_PARAMETER: usize = 3 * size_of::<f32>();

/// Creates the first envs of a round and drops them, so that too little memory is found before the
/// run begins.
///
/// # Errors
/// [`Error::Value`]: too little memory for the members, with the number of those that fit; device
/// errors.
pub(super) fn try_envs(setup: &Setup, resources: &Resources) -> Result<()> {
    let config = &setup.config;
    let (seed, batch_log, begun) = (config.seed, 1, 0);
    let first = first_envs(config);
    let streams = resources.devices.streams_by_env().enumerate();
    let mut held = vec![];
    for (nth, (index, stream)) in
        streams.filter(|(_, (index, _))| first.binary_search(index).is_ok())
    {
        let options = HostOptions { index, stream, seed, batch_log, begun };
        let added = Population::new(setup, &[options]).and_then(|mut env| {
            env.prepare_training(&resources.batch_sizes[nth..=nth])?;
            held.push(env);
            Ok(())
        });
        added.map_err(|error| match held.len() / envs_of_member(config) {
            fit @ 1.. if error.is_out_of_memory() && config.members_len() > 1 => {
                too_many(config, fit)
            }
            _ => error,
        })?;
    }
    Ok(())
}

/// In a run with members, on CPUs only and without a limit of memory: checks that the parameters of
/// the envs that train side by side fit into the available memory of the machine. The system may
/// end a process that takes more, without an error.
///
/// # Errors
/// [`Error::Value`]: too many members, with the number of those that may fit.
pub(super) fn check_parameters(setup: &Setup, resources: &Resources) -> Result<()> {
    let config = &setup.config;
    let unlimited = config.members_len() > 1 && config.device_memory.is_none();
    if !unlimited || !is_on_cpus(resources) {
        return Ok(());
    }
    let Some(available) = available_bytes() else { return Ok(()) };
    let mut bytes = 0;
    for (nth, env) in first_envs(config).into_iter().enumerate() {
        bytes += setup.member(env).host_parameters * BYTES_OF_PARAMETER;
        if bytes > available {
            return Err(too_many(config, (nth / envs_of_member(config)).max(1)));
        }
    }
    Ok(())
}

/// Converts the error of a run that ran out of memory to one with the number of members that fit;
/// returns any other error unchanged. Members are tried on GPUs only: where envs and program share
/// memory, a trial may end the process.
pub(super) fn out_of_memory(setup: &Setup, resources: &Resources, error: Error) -> Error {
    let members = setup.config.members_len();
    if members == 1 || !error.is_out_of_memory() || is_on_cpus(resources) {
        return error;
    }
    match try_envs(setup, resources) {
        Err(fitting @ Error::Value { .. }) => fitting,
        _ => error,
    }
}

/// Whether all devices of the envs are CPUs.
fn is_on_cpus(resources: &Resources) -> bool {
    let is_cpu = |device: &Device| matches!(device.id(), DeviceId::Cpu(_));
    resources.devices.distinct().iter().all(is_cpu)
}

/// Number of envs of each member.
fn envs_of_member(config: &TrainConfig) -> usize {
    config.envs / config.members_len()
}

/// The error for more members than the first `fit`, which fit into memory.
fn too_many(config: &TrainConfig, fit: usize) -> Error {
    let remedy = match config.scheduler {
        Scheduler::Pbt(_) => "give fewer members".into(),
        _ => format!("with --places {fit} the others wait for their places"),
    };
    match config.device_memory {
        Some(limit) => {
            let expected = format!("enough for all members, of which {fit} fit; {remedy}");
            Error::value("device-memory", limit, expected)
        }
        None => {
            let side_by_side = config.members_len().min(config.places());
            let got = format!("{side_by_side} in training at a time");
            let expected = format!("at most {fit}, for which there is memory; {remedy}");
            Error::value("members", got, expected)
        }
    }
}

/// Memory of the machine that a process may take without swapping; `None` where the system does not
/// tell it.
fn available_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}
