//! Weights files of a run: one for every env, and the requested copy of the best.

use std::io;
use std::path::{Path, PathBuf};

use meristem_grow::Topology;

use crate::checkpoint::{Checkpoint, Store};
use crate::env::{Env, TrainedHost};
use crate::error::{Error, Result};
use crate::processes::World;
use crate::record::run_folder::{RunFolder, weights_name, write_whole};
use crate::record::summary::EnvSummary;
use crate::setup::Setup;
use crate::setup::weights::{self, Interface};

/// Writes the current weights of all envs. Waits for the devices.
///
/// # Errors
/// A write failed, a device failed, or a rank is gone.
pub(super) fn write_weights(
    interface: &Interface,
    folder: Option<&RunFolder>,
    world: &mut World,
    envs: &[Env],
) -> Result<()> {
    for Env { index, grown, .. } in envs {
        let TrainedHost { network, host, .. } = grown;
        let name = PathBuf::from(weights_name(*index));
        let own = || {
            weights::to_bytes(&name, &network.state_dict()?, &Topology::from_host(host), interface)
        };
        let all = world.gather_env_bytes(own)?;
        let Some(folder) = folder else { continue };
        for (rank, bytes) in all.iter().enumerate() {
            // If there are several processes, all have the same number of envs.
            folder.write_weights(rank * envs.len() + index, bytes)?;
        }
    }
    Ok(())
}

/// Writes the weights of a failed run's newest checkpoint, unless one of the `rounds` completed
/// rounds wrote later ones. A failure is only logged, because the run's own failure is reported.
pub(super) fn write_newest(setup: &Setup, folder: &RunFolder, rounds: usize) {
    if let Err(error) = try_write_newest(setup, folder, rounds) {
        let path = folder.path().display();
        tracing::warn!(%path, %error, "weights of a failed run not written");
    }
}

fn try_write_newest(setup: &Setup, folder: &RunFolder, rounds: usize) -> Result<()> {
    let Some((file, bytes)) = Store::new(folder.directory())?.newest()? else { return Ok(()) };
    let checkpoint = Checkpoint::from_bytes(&file, &bytes)?;
    let indices = checkpoint.env_indices(setup.config.envs);
    let Checkpoint { progress, envs, .. } = checkpoint;
    if progress.next.round < rounds {
        return Ok(());
    }
    // Between rounds a checkpoint has no envs, and the weights of the last round are written.
    for (index, (state, tensors)) in indices.into_iter().zip(progress.envs.iter().zip(&envs)) {
        let (name, weights) = (PathBuf::from(weights_name(index)), &tensors.grown.weights);
        let bytes = weights::to_bytes(&name, weights, &state.topology, &setup.interface)?;
        folder.write_weights(index, &bytes)?;
    }
    Ok(())
}

/// Copies the weights of the best env to `target`: the best by control score, or env 0 without a
/// control split, because the test split must not be used for selection.
///
/// # Errors
/// Reading or writing failed.
pub(super) fn export_best(target: &Path, envs: &[EnvSummary], folder: &RunFolder) -> Result<()> {
    let score = |env: &EnvSummary| env.control_score.unwrap_or(f64::NEG_INFINITY);
    let better =
        |a: &usize, b: &usize| score(&envs[*a]).total_cmp(&score(&envs[*b])).then(b.cmp(a));
    let best = (0..envs.len()).max_by(better).unwrap_or(0);
    let name = weights_name(envs.get(best).map_or(0, |env| env.env));
    let read = folder.weights().read(&name, u64::MAX);
    let read = read.and_then(|bytes| bytes.ok_or_else(|| io::ErrorKind::NotFound.into()));
    let path = folder.weights().path().join(name);
    let bytes = read.map_err(|source| Error::RunFolder { action: "read", path, source })?;
    write_whole(target, &bytes)
}
