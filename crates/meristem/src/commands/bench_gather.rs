//! `meristem bench gather`: microseconds per batch of a resident dataset.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use meristem::data::{GatherBatches, GatherConfig};
use meristem::device::{Device, DeviceOptions};
use serde::Serialize;

use super::{Outcome, check_seconds, on_device, print_json};
use crate::cli::BenchGatherArguments;
use crate::failure::Failure;
use crate::plain::{self, counted, spread};
use crate::synthetic;

/// Length of one measurement; the result is the median over all measurements.
const BLOCK: Duration = Duration::from_millis(250);
/// Number of envs with batches.
const ENVS: usize = 4;
/// Gathers on each stream between two waits, fewer than a stream's queue holds.
const BURST: usize = 100;

#[derive(Serialize)]
struct Report {
    /// Time per batch of one env until the batch is ready: median over the blocks.
    us_per_batch: f64,
    us_per_batch_min: f64,
    us_per_batch_max: f64,
    /// Time of the calling thread per batch.
    us_per_batch_host: f64,
    blocks: usize,
    config: Config,
}

#[derive(Serialize)]
struct Config {
    envs: usize,
    batch: usize,
    image: [usize; 3],
    images: usize,
    device: String,
    threads: usize,
    seconds: f64,
}

pub(crate) fn run(arguments: &BenchGatherArguments) -> Outcome {
    let most = synthetic::IMAGES / ENVS;
    if !(1..=most).contains(&arguments.batch) {
        return Err(Failure::value("batch", arguments.batch, format!("1 to {most}")));
    }
    check_seconds(arguments.seconds)?;
    // As in a fleet, each env has a stream, and the streams use all workers.
    let device = Device::open(arguments.device.id()?, &DeviceOptions::default())?;
    let streams: Vec<_> = (0..ENVS).map(|env| device.stream(&format!("env {env}"))).collect();
    let devices = vec![device.id(); ENVS];
    let config = GatherConfig { drop_last: true, ..GatherConfig::new(arguments.batch, devices) };
    let data = synthetic::dataset(&device, synthetic::IMAGES)?;
    let mut gather = GatherBatches::new(&config, &[data], &streams)?;
    let mut epoch = 0;
    measure(&mut gather, &device, &mut epoch)?;
    let (mut times, mut host_times) = (vec![], vec![]);
    let started = Instant::now();
    while times.is_empty() || started.elapsed().as_secs_f64() < arguments.seconds {
        let (time, host_time) = measure(&mut gather, &device, &mut epoch)?;
        times.push(time);
        host_times.push(host_time);
    }
    let (us_per_batch, us_per_batch_min, us_per_batch_max) = spread(&times);
    let (us_per_batch_host, _, _) = spread(&host_times);
    let image = synthetic::SHAPE;
    let report = Report {
        us_per_batch,
        us_per_batch_min,
        us_per_batch_max,
        us_per_batch_host,
        blocks: times.len(),
        config: Config {
            envs: ENVS,
            batch: arguments.batch,
            image: [image.channels, image.height, image.width],
            images: synthetic::IMAGES,
            device: device.id().to_string(),
            threads: device.threads(),
            seconds: arguments.seconds,
        },
    };
    if arguments.json {
        print_json(&report)?
    } else {
        plain::out(&format!(
            "{us_per_batch:.1} µs per batch of {} images ({us_per_batch_min:.1} to \
             {us_per_batch_max:.1} over {}), {us_per_batch_host:.1} µs of it on the host, {}",
            arguments.batch,
            counted(report.blocks, ["block", "blocks"]),
            on_device(&device),
        ))
    }
    Ok(ExitCode::SUCCESS)
}

/// Gathers batches for about the duration of a [`BLOCK`]. Returns two times per batch in
/// microseconds: until the batch is ready, and on the calling thread. Both include drawing the
/// order of each epoch.
fn measure(
    gather: &mut GatherBatches,
    device: &Device,
    epoch: &mut u64,
) -> Result<(f64, f64), Failure> {
    let started = Instant::now();
    let mut batches = 0u32;
    let mut enqueueing = Duration::ZERO;
    while started.elapsed() < BLOCK {
        let enqueue_started = Instant::now();
        for _ in 0..BURST {
            if *epoch == 0 || gather.next()?.is_none() {
                *epoch += 1;
                gather.start_epoch(*epoch)?;
                gather.next()?;
            }
            batches += ENVS as u32;
        }
        enqueueing += enqueue_started.elapsed();
        device.synchronize()?;
    }
    let per_batch = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(batches.max(1));
    Ok((per_batch(started.elapsed()), per_batch(enqueueing)))
}
