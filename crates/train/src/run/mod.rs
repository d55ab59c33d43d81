//! A run: from a configuration to a folder with weights and a summary.
//!
//! - here: a new run;
//! - `resume`: an earlier run, resumed;
//! - `extend`: an earlier run, made longer;
//! - `replay`: one member of an earlier run, trained again;
//! - `files`, `begin`: output files, and start from a checkpoint or without;
//! - `notices`: settings without effect;
//! - `prepared`: all rounds and the summary;
//! - `results`: parts of events and summary;
//! - `episode`: one round;
//! - `member_changes`: members that end, copy others or begin between two steps;
//! - `memory`: trial of the memory that a round needs;
//! - `weights_files`: the weights of all envs.

mod begin;
mod episode;
mod extend;
mod files;
mod member_changes;
mod memory;
mod notices;
mod prepared;
mod replay;
mod results;
mod resume;
mod weights_files;

use std::time::Instant;

use meristem_data::cache;

use self::begin::Begin;
use self::files::RunFiles;
use self::prepared::PreparedRun;
pub use self::replay::replay;
pub(crate) use self::resume::resume_on;
pub use self::resume::{resume, resume_with};
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::external::Custom;
use crate::processes::World;
use crate::record::observer::{Notice, Observer};
use crate::record::summary::Summary;
use crate::resources::OpenDevices;
use crate::setup::{OtherInputs, ResolvedNames};

/// Trains a fleet with the settings of `config`. Blocks until it is done.
///
/// # Errors
/// Errors in the request are found before the run folder is filled, and leave no folder. A run that
/// fails later leaves a readable folder, with the error in `summary.json`.
pub fn run(config: &TrainConfig, observer: &mut dyn Observer) -> Result<Summary> {
    run_with(config, Custom::default(), observer)
}

/// Like [`run`], with code of the calling program: blueprints, controller, loss, searcher.
///
/// # Errors
/// As [`run`].
pub fn run_with(
    config: &TrainConfig,
    custom: impl Into<Custom>,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    if let Some(ended) = &config.end_members {
        return Err(Error::value("end-members", ended, "none for a new run, only with --resume"));
    }
    let custom = custom.into();
    let started = Instant::now();
    let mut world = World::join(config.comm, config.comm_options().deadline)?;
    observer.notice(&Notice::Joined(world.rank()));
    let result = (|| {
        let others = OtherInputs { blueprints: custom.blueprints.as_ref(), moved: None };
        let (config, names) = ResolvedNames::of_new(&world.resolve(config)?, others)?;
        let source = names.spec.source;
        let mut files = RunFiles::default();
        let prepared = files
            .create(&config, &world)
            .and_then(|()| PreparedRun::prepare(&config, names, custom, &files, &mut world));
        let prepared = prepared.and_then(|run| run.check_new().map(|()| run));
        let agreed = world.agree(prepared).and_then(|run| run.check_same(&mut world).map(|()| run));
        let result = match agreed {
            Ok(run) => run.finish(&mut world, Begin::New(started), observer, files),
            Err(error) => {
                files.discard();
                Err(error)
            }
        };
        // Otherwise the cache would keep the data, and with it the device, beyond this run.
        cache::clear(|key| key.source == source);
        result
    })();
    world.leave(result)
}

/// Like [`run`], on open devices with loaded data, which stay open and loaded. Ranks are threads,
/// if there are any.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_on(
    devices: &OpenDevices,
    config: &TrainConfig,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let started = Instant::now();
    let (devices, custom) = (devices.clone(), Custom::default());
    let (config, names) = ResolvedNames::of_new(config, OtherInputs::default())?;
    let (mut world, mut files) = (World::alone(), RunFiles::default());
    let prepared = files
        .create(&config, &world)
        .and_then(|()| PreparedRun::on(devices, &config, names, custom, &files, &mut world));
    match prepared.and_then(|run| run.check_new().map(|()| run)) {
        Ok(run) => run.finish(&mut world, Begin::New(started), observer, files),
        Err(error) => {
            files.discard();
            Err(error)
        }
    }
}

/// Like [`run_on`], without a folder and with code of the program. The data stay in the cache until
/// the caller clears it.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_without_folder(
    devices: &OpenDevices,
    config: &TrainConfig,
    custom: Custom,
    observer: &mut dyn Observer,
) -> Result<Summary> {
    let (devices, started) = (devices.clone(), Instant::now());
    let (config, names) = ResolvedNames::of_new(config, OtherInputs::default())?;
    let (mut world, files) = (World::alone(), RunFiles::default());
    let run = PreparedRun::on(devices, &config, names, custom, &files, &mut world)?;
    run.finish(&mut world, Begin::New(started), observer, files)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use meristem_device::{HotScope, ScopePolicy};

    use super::*;
    use crate::config::ConfigLayer;
    use crate::record::observer::Silent;
    use crate::settings::{BatchLimit, ByteSize, ControllerKind, Preset};

    /// A recorded copy, wait or allocation, the operation that it belongs to, and the source file
    /// that calls it.
    type Site = (String, String, String);

    fn permitted() -> BTreeSet<Site> {
        let table: toml::Table = include_str!("../../permitted.toml").parse().unwrap();
        let entry_of = |entry: &toml::Value| {
            let text = |key: &str| entry[key].as_str().unwrap().to_string();
            assert!(!text("reason").is_empty(), "{entry}");
            (text("act"), text("operation"), text("file"))
        };
        table["step"].as_array().unwrap().iter().map(entry_of).collect()
    }

    /// Copies, waits and allocations of two rounds with growth, blending and contributions,
    /// recorded by a scope that only counts.
    fn seen() -> BTreeSet<Site> {
        let folder = tempfile::tempdir().unwrap();
        let flags = ConfigLayer {
            preset: Some(Preset::Quick),
            run_dir: Some(Some(folder.path().join("run"))),
            envs: Some(2),
            // The last batch of an epoch is smaller.
            batch: Some(48),
            max_batches: Some(BatchLimit::Count(2)),
            control_split: Some(Some(0.02)),
            // The training images are streamed.
            data_budget: Some(Some(ByteSize(1 << 20))),
            parameters_per_image: Some(99.0),
            max_gap: Some(99.0),
            controller: Some(ControllerKind::Heuristic),
            steps: Some(12),
            rounds: Some(2),
            ..ConfigLayer::default()
        };
        let config = TrainConfig::resolve(ConfigLayer::default(), flags).unwrap();
        let (config, names) = ResolvedNames::of_new(&config, OtherInputs::default()).unwrap();
        let (mut world, mut files) = (World::alone(), RunFiles::default());
        files.create(&config, &world).unwrap();
        let custom = Custom::default();
        let run = PreparedRun::prepare(&config, names, custom, &files, &mut world).unwrap();
        let devices = run.devices().to_vec();
        let scopes: Vec<HotScope> =
            devices.iter().map(|device| device.hot_scope("run", ScopePolicy::Off)).collect();
        let begin = Begin::New(Instant::now());
        let summary = run.finish(&mut world, begin, &mut Silent, files).unwrap();
        assert!(summary.envs.iter().any(|env| env.history.germinated > 0));
        let sites = scopes.into_iter().flat_map(|scope| scope.finish().sites);
        let site_of = |site: meristem_device::ActSite| {
            (site.act.to_string(), site.operation.to_string(), site.site.file().replace('\\', "/"))
        };
        sites.map(site_of).collect()
    }

    #[test]
    fn a_run_does_what_the_table_permits_and_all_of_it() {
        let (permitted, seen) = (permitted(), seen());
        let new: Vec<_> = seen.difference(&permitted).collect();
        let gone: Vec<_> = permitted.difference(&seen).collect();
        assert!(new.is_empty(), "not in permitted.toml: {new:#?}");
        assert!(gone.is_empty(), "in permitted.toml, but no run does it: {gone:#?}");
    }
}
