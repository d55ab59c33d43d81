//! Checks of whole runs: same results for any number of threads, constant memory, no hidden waits.

use std::path::Path;
use std::sync::Arc;

use meristem::data::{GatherBatches, GatherConfig};
use meristem::device::{Device, DeviceId, DeviceOptions, ScopePolicy};
use meristem::grow::{self, Optimisers, host_graph};
use meristem::nn::{Network, NetworkOptions};
use meristem::train::config::{ConfigLayer, TrainConfig};
use meristem::train::settings::{BatchLimit, ControllerKind, HotScopePolicy, Preset};
use meristem::train::{self, Silent, Summary};

use super::{Fault, REPORT, Verdict, ensure};
use crate::plain::megabytes;
use crate::synthetic;

/// Runs two growing hosts with a few batches per step, which is fast enough to repeat.
fn grow_two_hosts(id: DeviceId, folder: &Path, threads: usize) -> Result<Summary, Fault> {
    let flags = ConfigLayer {
        preset: Some(Preset::Quick),
        run_dir: Some(Some(folder.to_path_buf())),
        devices: Some(vec![id.to_string()]),
        threads: Some(threads),
        controller: Some(ControllerKind::Heuristic),
        envs: Some(2),
        batch: Some(64),
        max_batches: Some(BatchLimit::Count(6)),
        steps: Some(14),
        // With `deny` a hidden operation ends the run with an error that names its call site.
        hot_scope: Some(HotScopePolicy(ScopePolicy::Deny)),
        ..ConfigLayer::default()
    };
    let config = TrainConfig::resolve(ConfigLayer::default(), flags)?;
    Ok(train::run(&config, &mut Silent)?)
}

/// Checks that runs with 1, 2 and 4 threads end with the same weights, bit for bit.
pub(super) fn determinism(id: DeviceId) -> Verdict {
    let folder = temporary_folder()?;
    let (mut expected, mut grown) = (None, 0);
    for threads in [1, 2, 4] {
        let run = folder.path().join(threads.to_string());
        let summary = grow_two_hosts(id, &run, threads)?;
        grown = summary.envs.iter().map(|env| env.history.germinated).sum();
        let read = |env: &train::summary::EnvSummary| std::fs::read(run.join(&env.weights));
        let weights = summary.envs.iter().map(read).collect::<Result<Vec<_>, _>>();
        let weights = weights.map_err(|error| {
            Fault::new(format!("cannot read the weights: {error}"), "check the disk")
        })?;
        ensure(*expected.get_or_insert_with(|| weights.clone()) == weights, || {
            Fault::new(format!("{threads} threads give other weights than 1 thread"), REPORT)
        })?;
    }
    ensure(grown > 0, || Fault::new("no module grew, so growth was not checked", REPORT))?;
    Ok(format!("two hosts and {grown} grown modules: the same bits with 1, 2 and 4 threads"))
}

/// Checks that training steps and evaluations of a run make only the permitted copies and waits.
pub(super) fn hot_scopes(id: DeviceId) -> Verdict {
    let folder = temporary_folder()?;
    let summary = grow_two_hosts(id, &folder.path().join("run"), 0)?;
    let hot = summary.hot_path;
    let hidden = hot.copies_to_host + hot.synchronizations + hot.allocations;
    // On a GPU a batch of both hosts copies the addresses of its samples.
    let tables = if matches!(id, DeviceId::Cpu(_)) { 0.0 } else { 0.5 };
    let copied = hot.copies_to_device <= tables;
    ensure(hidden == 0.0 && copied && hot.training_steps > 0, || {
        Fault::new(format!("a training step made hidden operations: {hot:?}"), REPORT)
    })?;
    let without = match hot.copies_to_device {
        0.0 => "copies, waits or allocations".to_owned(),
        copies => format!("waits or allocations, with {copies:.2} copies of addresses each"),
    };
    Ok(format!(
        "{} training steps without {without}; one read-back in each of {} steps",
        hot.training_steps, summary.steps
    ))
}

fn temporary_folder() -> Result<tempfile::TempDir, Fault> {
    tempfile::tempdir().map_err(|error| {
        let figure = format!("cannot create a temporary folder: {error}");
        Fault::new(figure, "set TMPDIR to a writable folder")
    })
}

const EPOCHS: u64 = 500;
const ENVS: usize = 2;
const BATCH: usize = 16;

/// Checks that memory does not increase from the second to the last of 500 epochs of training.
pub(super) fn leak(id: DeviceId) -> Verdict {
    let device = Device::open(id, &DeviceOptions::default())?;
    let streams: Vec<_> = (0..ENVS).map(|env| device.stream(&format!("env {env}"))).collect();
    let config =
        GatherConfig { max_batches: Some(3), ..GatherConfig::new(BATCH, vec![device.id(); ENVS]) };
    let data = synthetic::dataset(&device, 200)?;
    let mut gather = GatherBatches::new(&config, &[data], &streams)?;
    let mut networks = streams.iter().map(network).collect::<Result<Vec<_>, Fault>>()?;
    let mut epoch = |number: u64| -> Result<(), Fault> {
        gather.start_epoch(number)?;
        while let Some(batches) = gather.next()? {
            for batch in &batches {
                networks[batch.env].train_step(&batch.inputs, &batch.targets)?;
            }
        }
        Ok(device.synchronize()?)
    };
    epoch(0)?;
    epoch(1)?;
    let (memory, counts) = (device.memory(), device.counts());
    (2..EPOCHS).try_for_each(&mut epoch)?;
    let (after, spent) = (device.memory(), device.counts() - counts);
    let flat = after.current == memory.current && after.reserved == memory.reserved;
    ensure(flat && spent.allocations == 0, || {
        let (before, after) = (megabytes(memory.reserved), megabytes(after.reserved));
        let figure = format!("{before} grew to {after} with {} allocations", spent.allocations);
        Fault::new(figure, REPORT)
    })?;
    Ok(format!("{EPOCHS} epochs: constant at {}, no allocations", megabytes(after.reserved)))
}

fn network(stream: &meristem::device::Stream) -> Result<Network, Fault> {
    let spec: grow::HostSpec = "minimal".parse().map_err(grow::Error::from)?;
    let shape = synthetic::SHAPE;
    let image = grow::TaskShape {
        channels: shape.channels,
        height: shape.height,
        width: shape.width,
        classes: synthetic::CLASSES,
    };
    let graph = Arc::new(host_graph(&spec, &image, Optimisers::default().host)?);
    let isa = stream.device().isa();
    Ok(Network::new(stream, graph, NetworkOptions::new(0, stream.id(), isa, BATCH))?)
}
