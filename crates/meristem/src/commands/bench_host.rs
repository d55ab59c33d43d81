//! `meristem bench host`: images per second of training, or of validation, on resident data.

use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use meristem::data::{Batch, GatherBatches, GatherConfig};
use meristem::device::{Device, DeviceOptions, read_back};
use meristem::grow::{Host, Optimisers};
use meristem::nn::{Isa, LabelledBatch, Network, NetworkFleet, NetworkOptions, Plans};
use meristem::train::read_host;
use meristem::train::summary::MemorySummary;
use meristem::train::trace::{RunTrace, TraceSummary};
use serde::Serialize;

use super::bench_modules;
use super::{Outcome, check_seconds, insight, on_device, print_json, warn_dropped};
use crate::cli::BenchHostArguments;
use crate::failure::Failure;
use crate::plain::{self, counted, spread, thousands};
use crate::synthetic;

/// Time to compile plans, fill the pool and let the clock frequency settle.
const WARM_UP: Duration = Duration::from_millis(1500);
/// Approximate length of one measurement; the result is the median over all measurements.
const BLOCK: Duration = Duration::from_millis(700);

#[derive(Serialize)]
struct Report {
    /// Median over the blocks.
    images_per_s: f64,
    images_per_s_min: f64,
    images_per_s_max: f64,
    blocks: usize,
    config: Config,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<MemorySummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<TraceSummary>,
}

#[derive(Serialize)]
struct Config {
    host: String,
    /// The argument `--modules`.
    #[serde(skip_serializing_if = "Option::is_none")]
    modules: Option<String>,
    parameters: usize,
    work: &'static str,
    read_losses: bool,
    envs: usize,
    batch: usize,
    image: [usize; 3],
    images: usize,
    device: String,
    precision: &'static str,
    threads: usize,
    instruction_set: String,
    seconds: f64,
}

pub(crate) fn run(arguments: &BenchHostArguments) -> Outcome {
    check(arguments)?;
    let spec = read_host(&arguments.host)?;
    let modules = arguments.modules.as_deref().map(|list| bench_modules::parse(&spec, list));
    let host = bench_modules::grown(spec, &modules.transpose()?.unwrap_or_default(), "modules")?;
    let image = synthetic::image_shape();
    let trace = RunTrace::open(arguments.insight.trace.as_deref())?;
    let prepared = Bench::new(arguments, &host, trace.as_ref());
    let (mut bench, trace) = RunTrace::unless_refused(trace, prepared)?;
    let device = bench.device.clone();
    let batches = bench.warm_up()?;
    let mut rates = vec![];
    let started = Instant::now();
    while rates.is_empty() || started.elapsed().as_secs_f64() < arguments.seconds {
        rates.push(bench.run(batches)?);
    }
    let memory = arguments
        .insight
        .memory
        .then(|| MemorySummary::from_devices(std::slice::from_ref(&device)));
    let trace = trace.map(RunTrace::finish).transpose()?;
    let (images_per_s, images_per_s_min, images_per_s_max) = spread(&rates);
    let report = Report {
        images_per_s,
        images_per_s_min,
        images_per_s_max,
        blocks: rates.len(),
        memory,
        trace,
        config: Config {
            host: host.spec().to_string(),
            modules: arguments.modules.clone(),
            parameters: bench.networks[0].graph().parameters(None),
            work: if arguments.validate { "validation" } else { "training" },
            read_losses: arguments.read_losses,
            envs: arguments.envs,
            batch: arguments.batch,
            image: [image.channels, image.height, image.width],
            images: synthetic::IMAGES,
            device: device.id().to_string(),
            precision: arguments.network.precision.name(),
            threads: device.threads(),
            instruction_set: bench.isa.to_string(),
            seconds: arguments.seconds,
        },
    };
    if arguments.json {
        print_json(&report)?
    } else {
        plain::out(&format!(
            "{} of {}{}: {} images/s ({} to {} over {}), {}, batch {}, {}, {}",
            report.config.work,
            report.config.host,
            report.config.modules.as_ref().map_or(String::new(), |list| format!(" with {list}")),
            thousands(images_per_s as u64),
            thousands(images_per_s_min as u64),
            thousands(images_per_s_max as u64),
            counted(report.blocks, ["block", "blocks"]),
            counted(report.config.envs, ["env", "envs"]),
            report.config.batch,
            on_device(&device),
            report.config.precision,
        ))
    }
    if !arguments.json {
        insight(report.memory.as_ref(), report.trace.as_ref());
    }
    report.trace.as_ref().inspect(|trace| warn_dropped(trace));
    Ok(ExitCode::SUCCESS)
}

fn check(arguments: &BenchHostArguments) -> Result<(), Failure> {
    let &BenchHostArguments { envs, batch, seconds, .. } = arguments;
    if !(1..=synthetic::IMAGES).contains(&envs) {
        return Err(Failure::value("envs", envs, format!("1 to {}", synthetic::IMAGES)));
    }
    let most = synthetic::IMAGES / envs;
    if !(1..=most).contains(&batch) {
        return Err(Failure::value("batch", batch, format!("1 to {most} for {envs} envs")));
    }
    check_seconds(seconds)
}

/// Hosts and their batches.
struct Bench {
    device: Device,
    gather: GatherBatches,
    networks: Vec<Network>,
    isa: Isa,
    epoch: u64,
    validate: bool,
    /// Whether the loss of each env is read after each batch.
    read_losses: bool,
    /// Rows of alphas that each env evaluates: only the first.
    rows: Vec<Range<usize>>,
}

impl Bench {
    fn new(
        arguments: &BenchHostArguments,
        host: &Host,
        trace: Option<&RunTrace>,
    ) -> Result<Self, Failure> {
        let trace = trace.map(RunTrace::trace);
        let options =
            DeviceOptions { threads: arguments.threads, trace, ..DeviceOptions::default() };
        let device = Device::open(arguments.network.device()?, &options)?;
        let isa = device.isa();
        let graph = Arc::new(host.graph(&Optimisers::default())?);
        let streams: Vec<_> =
            (0..arguments.envs).map(|env| device.stream(&format!("env {env}"))).collect();
        let plans = Plans::default();
        let network = |(env, stream): (usize, &meristem::device::Stream)| {
            let options = NetworkOptions {
                precision: arguments.network.precision,
                ..NetworkOptions::new(0, env as u64, isa, arguments.batch)
            };
            Network::with_plans(stream, Arc::clone(&graph), options, &plans)
        };
        let mut networks: Vec<Network> =
            streams.iter().enumerate().map(network).collect::<Result<_, _>>()?;
        networks.iter_mut().try_for_each(|network| network.set_alphas(&[host.alphas()]))?;
        let config = GatherConfig {
            drop_last: true,
            ..GatherConfig::new(arguments.batch, vec![device.id(); arguments.envs])
        };
        let gather = GatherBatches::new(
            &config,
            &[synthetic::dataset(&device, synthetic::IMAGES)?],
            &streams,
        )?;
        let rows = vec![0..1; arguments.envs];
        let &BenchHostArguments { validate, read_losses, .. } = arguments;
        Ok(Self { device, gather, networks, isa, epoch: 0, validate, read_losses, rows })
    }

    /// Trains or validates for [`WARM_UP`]. Returns the number of batches per env that take about a
    /// [`BLOCK`].
    fn warm_up(&mut self) -> Result<usize, Failure> {
        let started = Instant::now();
        let mut batches = 0;
        while started.elapsed() < WARM_UP {
            self.run(4)?;
            batches += 4;
        }
        let per_batch = started.elapsed() / batches;
        Ok((BLOCK.as_secs_f64() / per_batch.as_secs_f64()).ceil() as usize)
    }

    /// Trains or validates every env on `batches` batches. Returns images per second. Waits once,
    /// at the end, or with `read_losses` after each batch of each env.
    fn run(&mut self, batches: usize) -> Result<f64, Failure> {
        let _block = self.device.trace().map(|trace| trace.span("block"));
        let started = Instant::now();
        let mut images = 0;
        for _ in 0..batches {
            let batches = self.next()?;
            let labelled: Vec<LabelledBatch<'_>> =
                batches.iter().map(|batch| (&batch.inputs, &batch.targets)).collect();
            if self.validate {
                NetworkFleet::new(&mut self.networks).eval_rows(&labelled, &self.rows)?
            } else {
                NetworkFleet::new(&mut self.networks).train_step(&labelled)?
            }
            if self.read_losses {
                self.networks
                    .iter()
                    .try_for_each(|network| read_back(&[network.metrics()]).map(drop))?;
            }
            images += batches.iter().map(|batch| batch.targets.numel()).sum::<usize>();
        }
        self.device.synchronize()?;
        Ok(images as f64 / started.elapsed().as_secs_f64())
    }

    /// Returns the next batch of each env, and starts a new epoch at the end of one.
    fn next(&mut self) -> Result<Vec<Batch>, Failure> {
        if self.epoch > 0
            && let Some(batches) = self.gather.next()?
        {
            return Ok(batches);
        }
        self.epoch += 1;
        self.gather.start_epoch(self.epoch)?;
        Ok(self.gather.next()?.unwrap_or_default())
    }
}
