//! Trial of the memory that the envs of a round need.

use crate::env::{HostOptions, Population};
use crate::error::{Error, Result};
use crate::resources::{Resources, first_envs};
use crate::setup::Setup;

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
        added.map_err(|error| match config.device_memory {
            Some(limit) if error.is_out_of_memory() && config.members_len() > 1 => {
                let repeats = config.envs / config.members_len();
                let fit = held.len() / repeats;
                let expected = format!(
                    "enough for all members, of which {fit} fit; with --places {fit} the others \
                     wait for their places"
                );
                Error::value("device-memory", limit, expected)
            }
            _ => error,
        })?;
    }
    Ok(())
}
