//! `meristem bench host`: images per second of training on resident data.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use meristem::data::{GatherBatches, GatherConfig};
use meristem::device::{Device, DeviceId, DeviceOptions};
use meristem::grow::{self, HOST_SGD, HostSpec, host_graph};
use meristem::nn::{self, Isa, Network, NetworkOptions};
use serde::Serialize;

use super::{Outcome, print_json, synthetic};
use crate::cli::BenchHostArguments;
use crate::failure::Failure;
use crate::plain::{self, spread, thousands};

/// Time to compile plans, fill the pool and let the clock settle.
const WARM_UP: Duration = Duration::from_millis(1500);
/// Length of one measurement; the result is the median over as many as fit.
const BLOCK: Duration = Duration::from_millis(500);

#[derive(Serialize)]
struct Report {
    /// Median over the blocks.
    images_per_s: f64,
    images_per_s_min: f64,
    images_per_s_max: f64,
    blocks: usize,
    /// Floating-point operations of the convolutions and linear layers are not counted: only images are.
    config: Config,
}

#[derive(Serialize)]
struct Config {
    host: String,
    parameters: usize,
    envs: usize,
    batch: usize,
    image: [usize; 3],
    images: usize,
    threads: usize,
    instruction_set: String,
    seconds: f64,
}

pub(crate) fn run(arguments: &BenchHostArguments) -> Outcome {
    check(arguments)?;
    let spec: HostSpec = arguments.host.parse().map_err(grow::Error::from)?;
    let (image, _) = (image_shape(), spec.check().map_err(grow::Error::from)?);
    let options = DeviceOptions { threads: arguments.threads, memory_limit: None };
    let device = Device::open(DeviceId::Cpu, &options)?;
    let mut bench = Bench::new(arguments, &device, &spec)?;
    bench.train_for(WARM_UP)?;
    let mut rates = vec![];
    let started = Instant::now();
    while started.elapsed().as_secs_f64() < arguments.seconds {
        rates.push(bench.train_for(BLOCK)?);
    }
    let (images_per_s, images_per_s_min, images_per_s_max) = spread(&rates);
    let report = Report {
        images_per_s,
        images_per_s_min,
        images_per_s_max,
        blocks: rates.len(),
        config: Config {
            host: spec.to_string(),
            parameters: spec.parameters(&image),
            envs: arguments.envs,
            batch: arguments.batch,
            image: [image.channels, image.height, image.width],
            images: synthetic::IMAGES,
            threads: device.threads(),
            instruction_set: bench.isa.to_string(),
            seconds: arguments.seconds,
        },
    };
    match arguments.json {
        true => print_json(&report)?,
        false => plain::out(&format!(
            "{}: {} images/s ({} to {} over {} blocks), {} envs, batch {}, {} threads, {}",
            report.config.host,
            thousands(images_per_s as u64),
            thousands(images_per_s_min as u64),
            thousands(images_per_s_max as u64),
            report.blocks,
            report.config.envs,
            report.config.batch,
            report.config.threads,
            report.config.instruction_set,
        )),
    }
    Ok(ExitCode::SUCCESS)
}

fn check(arguments: &BenchHostArguments) -> Result<(), Failure> {
    let most = synthetic::IMAGES / arguments.envs.max(1);
    if arguments.envs == 0 || !(1..=most).contains(&arguments.batch) {
        let message = format!("--envs {} --batch {}", arguments.envs, arguments.batch);
        let remedy = format!("give at least 1 of each, and at most {} images", synthetic::IMAGES);
        return Err(Failure::usage(message, remedy));
    }
    if !(arguments.seconds > 0.0 && arguments.seconds <= 3600.0) {
        let message = format!("--seconds {}", arguments.seconds);
        return Err(Failure::usage(message, "give more than 0 and at most 3600"));
    }
    Ok(())
}

fn image_shape() -> grow::ImageShape {
    let meristem::data::ImageShape { channels, height, width } = synthetic::SHAPE;
    grow::ImageShape { channels, height, width, classes: synthetic::CLASSES }
}

/// Hosts that train on and on.
struct Bench {
    device: Device,
    gather: GatherBatches,
    networks: Vec<Network>,
    isa: Isa,
    epoch: u64,
}

impl Bench {
    fn new(
        arguments: &BenchHostArguments,
        device: &Device,
        spec: &HostSpec,
    ) -> Result<Self, Failure> {
        let isa = Isa::from_env().map_err(nn::Error::from)?;
        let graph = Arc::new(host_graph(spec, &image_shape(), HOST_SGD)?);
        let streams: Vec<_> =
            (0..arguments.envs).map(|env| device.stream(&format!("env {env}"))).collect();
        let network = |(env, stream): (usize, &meristem::device::Stream)| {
            let options = NetworkOptions::new(0, env as u64, isa, arguments.batch);
            Network::new(stream, Arc::clone(&graph), options)
        };
        let networks = streams.iter().enumerate().map(network).collect::<Result<_, _>>()?;
        let config = GatherConfig {
            drop_last: true,
            ..GatherConfig::new(arguments.batch, vec![device.id(); arguments.envs])
        };
        let gather = GatherBatches::new(&config, &[synthetic::dataset(device)?], &streams)?;
        Ok(Self { device: device.clone(), gather, networks, isa, epoch: 0 })
    }

    /// Trains for about this long, and returns images per second. One wait, at the end.
    fn train_for(&mut self, time: Duration) -> Result<f64, Failure> {
        let started = Instant::now();
        let mut images = 0;
        while started.elapsed() < time {
            images += self.some_batches()?;
            self.device.synchronize()?;
        }
        Ok(images as f64 / started.elapsed().as_secs_f64())
    }

    /// Enqueues a few batches of every env: enough that one wait more or less does not show.
    fn some_batches(&mut self) -> Result<usize, Failure> {
        let mut images = 0;
        for _ in 0..16 {
            let batches = match self.epoch {
                0 => None,
                _ => self.gather.next()?,
            };
            let Some(batches) = batches else {
                self.epoch += 1;
                self.gather.start_epoch(self.epoch)?;
                continue;
            };
            for batch in &batches {
                self.networks[batch.env].train_step(&batch.inputs, &batch.targets)?;
                images += batch.targets.numel();
            }
        }
        Ok(images)
    }
}
