//! Resuming a run that was stopped or killed.

use std::path::{Path, PathBuf};
use std::time::Instant;

use meristem_data::cache;
use meristem_nn::ROUNDING;

use super::begin::Begin;
use super::extend::{self, RunLength, has_looked_ahead};
use super::files::RunFiles;
use super::prepared::PreparedRun;
use crate::checkpoint::{Checkpoint, Store};
use crate::config::devices::check_moved;
use crate::config::{ConfigLayer, TrainConfig, all};
use crate::config_file;
use crate::error::{Error, Result};
use crate::external::Custom;
use crate::input_file::Moved;
use crate::position::StepPosition;
use crate::processes::World;
use crate::record::observer::{Notice, Observer};
use crate::record::output::check_folder;
use crate::record::run_folder::{RunFolder, check_config};
use crate::record::summary::{Status, Stretch, Summary};
use crate::record::trace::RunTrace;
use crate::resources::OpenDevices;
use crate::settings::Scheduler;
use crate::setup::{OtherInputs, ResolvedNames};

/// Resumes the run in `folder` from its newest checkpoint, or from the start if it has none.
/// Weights, events (except their times) and summary end up as if the run had never stopped. A
/// complete run is not touched; its summary is returned. Blocks until the run is done.
///
/// `options` replaces settings of the run that may change
/// ([`Setting::on_resume`](crate::config::declare::Setting)). More steps or rounds extend the run,
/// also a complete one: it continues from its newest checkpoint. On a rank that cannot read the
/// folder, `options` must have `comm`; the rank gets the rest from rank 0.
///
/// # Errors
/// [`Error::Resume`]: it is not the folder of a run, another process writes to it, or an option
/// cannot be changed. [`Error::Checkpoint`]: the newest checkpoint is damaged.
/// [`Error::CheckpointVersion`]. [`Error::OtherSettings`] or [`Error::OtherInput`]: the checkpoint
/// is of a run with other settings or inputs. Otherwise as [`run`](crate::run). Nothing is
/// overwritten before the checkpoint was checked.
pub fn resume(
    folder: &Path,
    options: &ConfigLayer,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    resume_with(folder, options, Custom::default(), observer)
}

/// Like [`resume`], with code of the calling program: blueprints, controller, loss, searcher. It
/// must be the same as when the run began.
///
/// # Errors
/// As [`resume`].
pub fn resume_with(
    path: &Path,
    options: &ConfigLayer,
    custom: impl Into<Custom>,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let custom = custom.into();
    let started = Instant::now();
    check_options(path, options)?;
    // Errors in the folder are reported below, where it is opened.
    let written = Some(path.join("config.toml")).filter(|file| file.is_file());
    let seen = written.and_then(|file| config_file::read(&file).ok()).unwrap_or_default();
    // Only the settings that joining the other processes needs.
    let [seen, given] = [&seen, options].map(|l| ConfigLayer {
        comm: l.comm,
        comm_deadline: l.comm_deadline,
        ..ConfigLayer::default()
    });
    let joined = TrainConfig::resolve(seen, given)?;
    let mut world = World::join(joined.comm, joined.comm_options().deadline)?;
    observer.notice(&Notice::Joined(world.rank()));
    let resuming = Resuming { path, options, devices: None, moved: None, started };
    let result = resuming.run(&mut world, custom, observer);
    world.leave(result)
}

/// Like [`resume`] with the run's own settings, on open devices with loaded data, which stay open
/// and loaded. Ranks are threads, if there are any. `moved` is the move of the run's study, if it
/// was moved since the run began.
///
/// # Errors
/// As [`resume`].
pub(crate) fn resume_on(
    devices: &OpenDevices,
    path: &Path,
    moved: Option<&Moved>,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let (options, started) = (&ConfigLayer::default(), Instant::now());
    let resuming = Resuming { path, options, devices: Some(devices), moved, started };
    resuming.run(&mut World::alone(), Custom::default(), observer)
}

/// A run that is about to be resumed.
struct Resuming<'a> {
    path: &'a Path,
    options: &'a ConfigLayer,
    /// Open devices with loaded data, if the run is one of many.
    devices: Option<&'a OpenDevices>,
    moved: Option<&'a Moved>,
    started: Instant,
}

/// Result of reading the folder of a run.
enum RunProgress {
    /// The run has steps to make.
    Unfinished(Box<ResumePlan>),
    /// The run is complete and is not touched.
    Complete(Box<Summary>),
}

/// Settings of the resumed run, and its newest checkpoint.
struct ResumePlan {
    /// Settings of this process.
    config: TrainConfig,
    /// Settings of the run with a new length, if it is extended.
    longer: Option<TrainConfig>,
    saved: Option<(PathBuf, Checkpoint)>,
}

impl Resuming<'_> {
    fn run(
        self,
        world: &mut World,
        custom: Custom,
        observer: &mut dyn Observer,
    ) -> Result<Summary> {
        let mut files = RunFiles::default();
        let ResumePlan { config, longer, saved } = match self.plan(world, &mut files, observer)? {
            RunProgress::Unfinished(plan) => *plan,
            RunProgress::Complete(summary) => return Ok(*summary),
        };
        let config = world.resolve(&config)?;
        let others = OtherInputs { blueprints: custom.blueprints.as_ref(), moved: self.moved };
        let (config, names) = match &saved {
            // The file of the policy is not read again: the checkpoint has the policy's weights.
            Some((file, checkpoint)) => {
                let next = checkpoint.progress.next;
                // Members without a place begin later.
                let later = config.places.is_some() || next.round + 1 < config.rounds;
                let fresh_hosts = next.step == 0 || later;
                let began = &checkpoint.progress.identity.files;
                let names =
                    ResolvedNames::of_checkpoint(&config, others, file, began, fresh_hosts)?;
                (config, names)
            }
            None => {
                ResolvedNames::of_new(&config, others).map_err(|error| anew(self.path, &error))?
            }
        };
        if world.is_first() {
            // An existing export is the run's own, from when it was stopped.
            config.export.as_deref().map_or(Ok(()), |path| check_folder("export", path))?;
            files.trace = RunTrace::open(config.trace.as_deref())?;
        }
        let source = names.spec.source;
        let prepared = match self.devices {
            Some(open) => PreparedRun::on(open.clone(), &config, names, custom, &files, world),
            None => PreparedRun::prepare(&config, names, custom, &files, world),
        };
        let prepared = prepared.and_then(|mut run| {
            let begin = match saved {
                Some((file, checkpoint)) => Begin::Resumed(run.restore(&file, checkpoint)?),
                None => Begin::New(self.started),
            };
            Ok((run, begin))
        });
        let agreed = world.agree(prepared);
        let agreed = agreed.and_then(|both| {
            both.0.check_same(world)?;
            let longer = files.folder.as_ref().zip(longer.as_ref());
            world
                .agree(longer.map_or(Ok(()), |(folder, longer)| extend::record(folder, longer)))?;
            Ok(both)
        });
        let result = match agreed {
            Ok((run, begin)) => run.finish(world, begin, observer, files),
            Err(error) => {
                files.discard_trace();
                Err(error)
            }
        };
        if self.devices.is_none() {
            cache::clear(|key| key.source == source);
        }
        result
    }

    /// Opens the folder and reads settings and checkpoint.
    fn plan(
        &self,
        world: &mut World,
        files: &mut RunFiles,
        observer: &mut dyn Observer,
    ) -> Result<RunProgress> {
        let &Self { path, options, .. } = self;
        let (complete, text) = world.broadcast(|| {
            let folder = files.folder.insert(RunFolder::open(path)?);
            let complete = folder.read_summary()?.filter(|s| s.status == Status::Completed);
            Ok((complete, folder.read_config()?))
        })?;
        let length =
            ConfigLayer { steps: options.steps, rounds: options.rounds, ..ConfigLayer::default() };
        let complete = match complete {
            Some(summary) if length == ConfigLayer::default() => {
                return Ok(RunProgress::Complete(Box::new(summary)));
            }
            complete => complete,
        };
        let mut settings = config_file::parse(&path.join("config.toml"), &text)?;
        let began = TrainConfig::resolve(settings.clone(), ConfigLayer::default())?;
        let longer = TrainConfig::resolve(settings.clone(), length)?;
        let extends = RunLength::from_config(&longer) != RunLength::from_config(&began);
        match complete {
            Some(summary) if !extends => {
                // A path that is not UTF-8 is in the summary only as inexact text.
                let run_dir = if summary.path_is_lossy { path.into() } else { summary.run_dir };
                return Ok(RunProgress::Complete(Box::new(Summary { run_dir, ..summary })));
            }
            _ => check_config(path, &text, &began)?,
        }
        check_population(path, &text, &began)?;
        let mut saved = newest(world, files)?;
        let next = saved.as_ref().map(|(_, checkpoint)| checkpoint.progress.next);
        extend::check(&began, &longer, next)?;
        let last = saved.as_mut().map(|(_, checkpoint)| checkpoint.last_stretch(&began));
        let last = last.unwrap_or_else(|| Stretch::new(StepPosition { round: 0, step: 0 }, &began));
        // A run that changed devices or precision on an earlier resume keeps the last ones.
        settings.devices = Some(last.devices.clone());
        settings.precision = Some(last.precision);
        let flags = ConfigLayer { run_dir: Some(Some(path.into())), ..options.clone() };
        let config = TrainConfig::resolve(settings, flags)?;
        check_moved(&last.devices, &config.devices, config.data_parallel)?;
        if world.is_first() {
            report_changes(observer, &last, &config);
            let looked_ahead = next.is_some() && has_looked_ahead(&began);
            if looked_ahead && longer.steps > began.steps {
                let (began, now) = (began.steps, longer.steps);
                observer.notice(&Notice::ControllerLookedAhead { began, now });
            }
        }
        let (processes, ranks) = (world.size(), config.ranks());
        if config.comm.is_processes() && processes != ranks {
            let problem = format!(
                "it has {ranks} ranks, but {processes} processes were started; \
                 start {ranks} (`mpirun -n {ranks}`), or one process with --comm threads"
            );
            return Err(Error::Resume { path: path.into(), problem });
        }
        let longer = extends.then_some(longer);
        Ok(RunProgress::Unfinished(Box::new(ResumePlan { config, longer, saved })))
    }
}

/// Checks that a population is resumed by the rule by which it began: up to version 13 of the
/// settings, copies got other seeds if the space has `seed`.
fn check_population(path: &Path, text: &str, began: &TrainConfig) -> Result<()> {
    // Version 14 has introduced this setting, which every run since then has in its config.toml.
    let is_older = !text.lines().any(|line| line.starts_with("policy_form"));
    let has_seed = began.space.as_ref().is_some_and(|space| space.dimension("seed").is_some());
    if !(is_older && has_seed && matches!(began.scheduler, Scheduler::Pbt(_))) {
        return Ok(());
    }
    let problem = format!(
        "it is a population with `seed` in its space, and began with an earlier version, whose \
         copies got other seeds; now they keep the seed of their origin. Start a new run with \
         --config {} and another --run-dir",
        path.join("config.toml").display()
    );
    Err(Error::Resume { path: path.into(), problem })
}

/// Reports devices, precision and rounding that differ from the last stretch.
fn report_changes(observer: &mut dyn Observer, last: &Stretch, config: &TrainConfig) {
    let (began, now) = (&last.devices, &config.devices);
    let [kind_before, kind] = [began, now].map(|devices| one_kind(devices));
    if began != now && (kind.is_none() || kind != kind_before) {
        observer.notice(&Notice::DevicesChanged { began, now });
    }
    let (began, now) = (last.precision, config.precision);
    if began != now {
        observer.notice(&Notice::PrecisionChanged { began, now });
    }
    if last.rounding != ROUNDING {
        observer.notice(&Notice::RoundingChanged);
    }
}

/// Whether the devices are CUDA devices; `None` if only some are, or without devices.
fn one_kind(devices: &[String]) -> Option<bool> {
    let is_cuda = |name: &String| name.trim().starts_with("cuda");
    let first = devices.first().map(is_cuda)?;
    devices.iter().all(|name| is_cuda(name) == first).then_some(first)
}

/// Checks that all options may be changed on resume.
fn check_options(path: &Path, options: &ConfigLayer) -> Result<()> {
    let allowed = all().iter().filter(|setting| setting.on_resume);
    let allowed: Vec<String> = allowed.map(|setting| format!("--{}", setting.flag)).collect();
    let given = options.given().into_iter().map(|key| format!("--{}", key.replace('_', "-")));
    let Some(other) = given.into_iter().find(|flag| !allowed.contains(flag)) else { return Ok(()) };
    let problem = format!(
        "{other} cannot be changed on resume; the flags that can are {}; for a new run with \
         another value use --config {}",
        allowed.join(", "),
        path.join("config.toml").display()
    );
    Err(Error::Resume { path: path.into(), problem })
}

/// The newest checkpoint and its file; rank 0 reads it for all.
fn newest(world: &mut World, files: &RunFiles) -> Result<Option<(PathBuf, Checkpoint)>> {
    let mut read = vec![];
    let file = world.broadcast(|| {
        let Some(folder) = &files.folder else { return Ok(None) };
        let Some((file, bytes)) = Store::new(folder.directory())?.newest()? else {
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

/// The error of a run without checkpoints that cannot be started again.
fn anew(path: &Path, error: &Error) -> Error {
    let problem = format!("it has no checkpoint and cannot start again: {error}");
    Error::Resume { path: path.into(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An observer that keeps the warnings.
    struct KeptWarnings(Vec<String>);

    impl Observer for KeptWarnings {
        fn notice(&mut self, notice: &Notice<'_>) {
            self.0.extend(notice.warning());
        }
    }

    #[test]
    fn a_build_that_rounds_differently_says_so() {
        let config = TrainConfig::resolve(ConfigLayer::default(), ConfigLayer::default()).unwrap();
        let now = Stretch::new(StepPosition { round: 0, step: 0 }, &config);
        let warnings = |last: &Stretch| {
            let mut observer = KeptWarnings(vec![]);
            report_changes(&mut observer, last, &config);
            observer.0
        };
        assert_eq!(warnings(&now), Vec::<String>::new());
        let before = Stretch { rounding: now.rounding - 1, ..now };
        let [warning] = &warnings(&before)[..] else { panic!("one warning") };
        assert!(warning.contains("kernels round differently"), "{warning}");
        assert!(!before.goes_on(&config), "its steps are distinct from later ones");
    }
}
