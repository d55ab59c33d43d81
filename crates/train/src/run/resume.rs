//! Going on with a run that was stopped or killed.

use std::path::{Path, PathBuf};
use std::time::Instant;

use meristem_data::cache;
use meristem_grow::BlueprintSet;

use crate::checkpoint::{Checkpoint, EnvTensors, Store};
use crate::config::{Layer, TrainConfig};
use crate::config_file;
use crate::error::{Error, Result};
use crate::processes::world::World;
use crate::record::observer::Observer;
use crate::record::output::check_folder;
use crate::record::run_folder::{RunFolder, check_config};
use crate::record::summary::{Status, Summary};
use crate::record::trace::RunTrace;
use crate::run::Run;
use crate::run::files::{Begin, Middle, Place};
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
    /// What hot scopes do (V2).
    pub hot_scope: Option<HotScopePolicy>,
    /// What ranks are. Ranks that share no disk need it: they learn the rest from the first.
    pub comm: Option<CommKind>,
    /// Seconds that ranks wait for each other.
    pub comm_deadline: Option<usize>,
}

/// Goes on with the run in `folder` from its newest checkpoint, or from its start if it has none: weights,
/// events (their times aside) and summary end as if it had never stopped. A run that is complete is not touched: its summary is returned. Blocks until it is done.
///
/// # Errors
/// [`Error::Resume`]: no run's folder, or another process writes there. [`Error::Checkpoint`]: the newest
/// checkpoint is damaged, or of another run. [`Error::CheckpointVersion`]. As [`run`](crate::run) otherwise. Nothing
/// is overwritten before the checkpoint was found to fit.
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
    let result = resume_in(&mut world, (path, options), (blueprints, started), observer);
    world.leave(result)
}

fn resume_in(
    world: &mut World,
    (path, options): (&Path, &ResumeOptions),
    (blueprints, started): (BlueprintSet, Instant),
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let mut place = Place::default();
    let (complete, text) = world.tell(|| {
        let folder = place.folder.insert(RunFolder::open(path)?);
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
    let config = world.settle(&config)?;
    let saved = newest(world, &place)?;
    let (config, names) = match &saved {
        // Its policy is in there.
        Some(_) => (config.clone(), Names::resolve(&config)?),
        None => Names::of_new(&config).map_err(|error| anew(path, &error))?,
    };
    if world.is_first() {
        // A file that is there already is its own: it was stopped.
        config.export.as_deref().map_or(Ok(()), |path| check_folder("export", path))?;
        place.trace = RunTrace::open(config.trace.as_deref())?;
    }
    let source = names.spec.source;
    let prepared = Run::prepare(&config, names, blueprints, (&place, world)).and_then(|mut run| {
        let begin = match saved {
            Some((file, checkpoint)) => Begin::From(run.restore(&file, checkpoint)?),
            None => Begin::New(started),
        };
        Ok((run, begin))
    });
    let agreed = world.agree(prepared);
    let agreed = agreed.and_then(|(run, begin)| run.agree_on(world).map(|()| (run, begin)));
    let result = match agreed {
        Ok((run, begin)) => run.finish(world, begin, (observer, place)),
        Err(error) => {
            place.discard_trace();
            Err(error)
        }
    };
    cache::clear(|key| key.source == source);
    result
}

/// The newest checkpoint and its file; the first rank reads it for all.
fn newest(world: &mut World, place: &Place) -> Result<Option<(PathBuf, Checkpoint)>> {
    let mut read = vec![];
    let file = world.tell(|| {
        let Some(folder) = &place.folder else { return Ok(None) };
        let Some((file, bytes)) = Store::new(folder.checkpoints()).newest()? else {
            return folder.check_no_checkpoint_is_lost().map(|()| None);
        };
        read = bytes;
        Ok(Some(file))
    })?;
    let Some(file) = file else { return Ok(None) };
    let bytes = world.tell_bytes(|| Ok(read))?;
    let checkpoint = Checkpoint::from_bytes(&file, &bytes)?;
    Ok(Some((file, checkpoint)))
}

/// What is said of a run that cannot even be begun again.
fn anew(path: &Path, error: &Error) -> Error {
    let problem = format!("it has no checkpoint yet and would start anew, but {error}");
    Error::Resume { path: path.into(), problem }
}

impl Run {
    /// Takes over what a checkpoint holds for this process, if it is one of this run.
    fn restore(&mut self, file: &Path, checkpoint: Checkpoint) -> Result<Middle> {
        let Checkpoint { progress, envs, controller } = checkpoint;
        let unfit = |problem| Error::Checkpoint { path: file.into(), problem };
        self.keeper.identity.check(file, &progress.identity)?;
        let in_a_round = progress.next.step > 0;
        if in_a_round && envs.len() != self.setup.config.envs {
            return Err(unfit(format!("it has {} envs", envs.len())));
        }
        // What a rank had not sent is there, if it is only how often it was asked.
        let kept = |env: &EnvTensors, rank| env.exchange.get(&format!("{rank}.step")).is_some();
        let replicas = Some(self.setup.config.replicas()).filter(|replicas| *replicas > 1);
        let mut ranks = 0..replicas.unwrap_or(0);
        if let Some(rank) = ranks.find(|rank| envs.iter().any(|env| !kept(env, *rank))) {
            return Err(unfit(format!("it has nothing of rank {rank}")));
        }
        self.controller.get().restore(&controller).map_err(|error| unfit(error.to_string()))?;
        self.totals = progress.totals;
        (self.keeper.rounds, self.keeper.envs) = (progress.rounds, progress.last_envs);
        let own = self.fleet.machine.envs();
        let envs = progress.envs.into_iter().zip(envs).skip(own.start).take(own.len()).collect();
        Ok(Middle { next: progress.next, envs, events: progress.events })
    }
}
