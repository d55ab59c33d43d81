//! Going on with a run that was stopped or killed.

use std::path::{Path, PathBuf};
use std::time::Instant;

use meristem_data::cache;
use meristem_grow::BlueprintSet;

use super::begin::Begin;
use super::files::RunFiles;
use super::prepared::Run;
use crate::checkpoint::{Checkpoint, Store};
use crate::config::{Layer, TrainConfig};
use crate::config_file;
use crate::error::{Error, Result};
use crate::processes::World;
use crate::record::observer::Observer;
use crate::record::output::check_folder;
use crate::record::run_folder::{RunFolder, check_config};
use crate::record::summary::{Status, Summary};
use crate::record::trace::RunTrace;
use crate::settings::{ByteSize, CommKind, HotScopePolicy};
use crate::setup::Names;

/// Settings that a run may go on with instead of its own: no result depends on them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResumeOptions {
    /// Worker threads of each device.
    pub threads: Option<usize>,
    /// The most bytes that each device takes from the system.
    pub device_memory: Option<ByteSize>,
    /// File for a trace of what is left.
    pub trace: Option<PathBuf>,
    /// Policy of the hot scopes.
    pub hot_scope: Option<HotScopePolicy>,
    /// Kind of the ranks. Ranks that share no disk need it: they learn the rest from the first.
    pub comm: Option<CommKind>,
    /// Seconds that ranks wait for each other.
    pub comm_deadline: Option<usize>,
}

/// Goes on with the run in `folder` from its newest checkpoint, or from its start if it has none:
/// weights, events (their times aside) and summary end as if it had never stopped. A run that is
/// complete is not touched: its summary is returned. Blocks until it is done.
///
/// # Errors
/// [`Error::Resume`]: no run's folder, or another process writes there. [`Error::Checkpoint`]: the
/// newest checkpoint is damaged, or of another run. [`Error::CheckpointVersion`]. As
/// [`run`](crate::run) otherwise. Nothing is overwritten before the checkpoint was found to fit.
pub fn resume(
    folder: &Path,
    options: &ResumeOptions,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    resume_with(folder, options, BlueprintSet::standard(), observer)
}

/// As [`resume`], growing from `blueprints`, which must be those of the run.
///
/// # Errors
/// As [`resume`].
pub fn resume_with(
    path: &Path,
    options: &ResumeOptions,
    blueprints: BlueprintSet,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let started = Instant::now();
    // What is wrong with the folder is found where it is opened.
    let seen = config_file::read(&path.join("config.toml")).unwrap_or_default();
    let seen = Layer { comm: seen.comm, comm_deadline: seen.comm_deadline, ..Layer::default() };
    let ResumeOptions { comm, comm_deadline, .. } = *options;
    let joined = TrainConfig::resolve(seen, Layer { comm, comm_deadline, ..Layer::default() })?;
    let mut world = World::join(joined.comm, joined.comm_options().deadline)?;
    observer.joined(world.rank());
    let result = resume_in(&mut world, path, options, blueprints, started, observer);
    world.leave(result)
}

fn resume_in(
    world: &mut World,
    path: &Path,
    options: &ResumeOptions,
    blueprints: BlueprintSet,
    started: Instant,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let mut files = RunFiles::default();
    let (complete, text) = world.broadcast(|| {
        let folder = files.folder.insert(RunFolder::open(path)?);
        let complete = folder.read_summary()?.filter(|s| s.status == Status::Completed);
        Ok((complete, folder.read_config()?))
    })?;
    if let Some(summary) = complete {
        return Ok(summary);
    }
    let settings = config_file::parse(&path.join("config.toml"), &text)?;
    check_config(path, &text, &TrainConfig::resolve(settings.clone(), Layer::default())?)?;
    let trace = options.trace.clone().map(Some);
    let ResumeOptions { threads, device_memory, hot_scope, comm, comm_deadline, .. } = *options;
    let (run_dir, device_memory) = (Some(Some(path.into())), device_memory.map(Some));
    let flags = Layer { run_dir, threads, device_memory, trace, hot_scope, ..Layer::default() };
    let flags = Layer { comm, comm_deadline, ..flags };
    let config = TrainConfig::resolve(settings, flags)?;
    let (processes, ranks) = (world.size(), config.ranks());
    if config.comm == CommKind::Mpi && processes != ranks {
        let problem = format!(
            "it has {ranks} ranks, and there are {processes} processes; go on with `mpirun -n {ranks}`, or in \
             one process with --comm threads"
        );
        return Err(Error::Resume { path: path.into(), problem });
    }
    let config = world.resolve(&config)?;
    let saved = newest(world, &files)?;
    let (config, names) = match &saved {
        // Its policy is in there.
        Some(_) => (config.clone(), Names::resolve(&config)?),
        None => Names::of_new(&config).map_err(|error| anew(path, &error))?,
    };
    if world.is_first() {
        // A file that is there already is its own: it was stopped.
        config.export.as_deref().map_or(Ok(()), |path| check_folder("export", path))?;
        files.trace = RunTrace::open(config.trace.as_deref())?;
    }
    let source = names.spec.source;
    let prepared = Run::prepare(&config, names, blueprints, &files, world).and_then(|mut run| {
        let begin = match saved {
            Some((file, checkpoint)) => Begin::Resumed(run.restore(&file, checkpoint)?),
            None => Begin::New(started),
        };
        Ok((run, begin))
    });
    let agreed = world.agree(prepared);
    let agreed = agreed.and_then(|(run, begin)| run.check_same(world).map(|()| (run, begin)));
    let result = match agreed {
        Ok((run, begin)) => run.finish(world, begin, observer, files),
        Err(error) => {
            files.discard_trace();
            Err(error)
        }
    };
    cache::clear(|key| key.source == source);
    result
}

/// The newest checkpoint and its file; the first rank reads it for all.
fn newest(world: &mut World, files: &RunFiles) -> Result<Option<(PathBuf, Checkpoint)>> {
    let mut read = vec![];
    let file = world.broadcast(|| {
        let Some(folder) = &files.folder else { return Ok(None) };
        let Some((file, bytes)) = Store::new(folder.checkpoints()).newest()? else {
            return folder.check_no_checkpoint_is_lost().map(|()| None);
        };
        read = bytes;
        Ok(Some(file))
    })?;
    let Some(file) = file else { return Ok(None) };
    let bytes = world.broadcast_bytes(|| Ok(read))?;
    let checkpoint = Checkpoint::from_bytes(&file, &bytes)?;
    Ok(Some((file, checkpoint)))
}

/// The error of a run that cannot even be begun again.
fn anew(path: &Path, error: &Error) -> Error {
    let problem = format!("it has no checkpoint yet and would start anew, but {error}");
    Error::Resume { path: path.into(), problem }
}
