//! `meristem bench counterfactual`: evaluation of a host in all configurations of its modules, in
//! one shared pass and in separate passes.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use meristem::device::random::{Purpose, Rng};
use meristem::device::{DType, Device, DeviceOptions, MemoryFormat, Owner, Tensor};
use meristem::grow::{self, Counterfactual, Host, Optimisers, Stage};
use meristem::nn::{Network, NetworkOptions};
use meristem::train::read_host;
use serde::Serialize;

use super::bench_modules::{self, Module};
use super::{Outcome, check_seconds, print_json};
use crate::cli::BenchCounterfactualArguments;
use crate::failure::Failure;
use crate::plain::{self, counted, spread};
use crate::synthetic::image_shape;

/// Approximate length of a block. The methods take turns, so other load on the machine affects all
/// of them equally.
const BLOCK: Duration = Duration::from_millis(200);
/// Time to compile plans, fill the pool and let the clock frequency settle.
const WARM_UP: Duration = Duration::from_millis(1000);

#[derive(Serialize)]
struct Report {
    /// Milliseconds per batch of the single pass.
    fused_ms: MedianRange,
    /// Milliseconds per batch of one full pass for each requested configuration.
    separate_ms: MedianRange,
    /// Milliseconds per batch of one full pass for each distinct configuration.
    distinct_ms: MedianRange,
    /// Time of the single pass divided by the time of the separate passes of the same turn.
    share: MedianRange,
    /// Time of the single pass divided by the time of the passes for distinct configurations of the
    /// same turn.
    share_of_distinct: MedianRange,
    /// Operations of the single pass divided by the operations of the separate passes.
    flops_share: f64,
    turns: usize,
    config: Config,
}

/// Median and range over the turns.
#[derive(Serialize)]
struct MedianRange {
    median: f64,
    min: f64,
    max: f64,
}

impl MedianRange {
    fn of(values: &[f64]) -> Self {
        let (median, min, max) = spread(values);
        Self { median, min, max }
    }
}

#[derive(Serialize)]
struct Config {
    host: String,
    slots: Vec<String>,
    blueprint: String,
    configurations: usize,
    distinct: usize,
    batch: usize,
    image: [usize; 3],
    device: String,
    precision: &'static str,
    instruction_set: String,
    seconds: f64,
}

pub(crate) fn run(arguments: &BenchCounterfactualArguments) -> Outcome {
    check(arguments)?;
    let (host, slots) = grown(arguments)?;
    let requested = Counterfactual::for_step(&host);
    let mut bench = Bench::new(&host, &requested, arguments)?;
    let batches = bench.warm_up()?;
    let mut times: [Vec<f64>; 3] = Default::default();
    let started = Instant::now();
    while times[0].is_empty() || started.elapsed().as_secs_f64() < arguments.seconds {
        for (method, times) in METHODS.into_iter().zip(&mut times) {
            times.push(bench.time(method, batches)?);
        }
    }
    let ratio = |separate: &[f64]| -> Vec<f64> {
        times[0].iter().zip(separate).map(|(fused, separate)| fused / separate).collect()
    };
    let (flops, one) = bench.network.eval_flops(0..requested.rows().len())?;
    let image = image_shape();
    let report = Report {
        fused_ms: MedianRange::of(&times[0]),
        separate_ms: MedianRange::of(&times[1]),
        distinct_ms: MedianRange::of(&times[2]),
        share: MedianRange::of(&ratio(&times[1])),
        share_of_distinct: MedianRange::of(&ratio(&times[2])),
        flops_share: flops as f64 / (one * requested.configurations().len() as u64) as f64,
        turns: times[0].len(),
        config: Config {
            host: host.spec().to_string(),
            slots,
            blueprint: arguments.blueprint.clone(),
            configurations: requested.configurations().len(),
            distinct: requested.rows().len(),
            batch: arguments.batch,
            image: [image.channels, image.height, image.width],
            device: bench.device.id().to_string(),
            precision: arguments.network.precision.name(),
            instruction_set: bench.network.options().isa.to_string(),
            seconds: arguments.seconds,
        },
    };
    if arguments.json {
        print_json(&report)?
    } else {
        print(&report)
    }
    Ok(ExitCode::SUCCESS)
}

fn print(report: &Report) {
    let Report { fused_ms, separate_ms, distinct_ms, share, share_of_distinct, config, .. } =
        report;
    let line = |name: &str, ms: &MedianRange, rest: String| {
        let MedianRange { median, min, max } = ms;
        plain::out(&format!("{name:<24}{median:>9.2} ms per batch ({min:.2} to {max:.2}){rest}"));
    };
    plain::out(&format!(
        "{} with {} in {}: {} configurations, {} of them distinct; batch {}, {}, {}, {}",
        config.host,
        config.blueprint,
        config.slots.join(", "),
        config.configurations,
        config.distinct,
        config.batch,
        match config.device.as_str() {
            "cpu" => &config.instruction_set,
            device => device,
        },
        config.precision,
        counted(report.turns, ["turn", "turns"])
    ));
    line("one pass", fused_ms, String::new());
    let relative = |share: &MedianRange| {
        let MedianRange { median, min, max } = share;
        format!("; one pass takes {median:.3} of this time ({min:.3} to {max:.3})")
    };
    line(&format!("{} separate passes", config.configurations), separate_ms, relative(share));
    line(&format!("{} separate passes", config.distinct), distinct_ms, relative(share_of_distinct));
    plain::out(&format!("ratio of floating-point operations: {:.3}", report.flops_share));
}

fn check(arguments: &BenchCounterfactualArguments) -> Result<(), Failure> {
    if !(1..=4096).contains(&arguments.batch) {
        return Err(Failure::value("batch", arguments.batch, "1 to 4096"));
    }
    check_seconds(arguments.seconds)
}

/// Creates a host with a module in stage holding in each of the slots. Returns it with the names of
/// the slots.
fn grown(arguments: &BenchCounterfactualArguments) -> Result<(Host, Vec<String>), Failure> {
    let spec = read_host(&arguments.host)?;
    let slots = spec.select_slots(arguments.slots.split(',')).map_err(grow::Error::from)?;
    let names = slots.iter().map(ToString::to_string).collect();
    let module =
        |slot| Module { slot, blueprint: arguments.blueprint.clone(), stage: Stage::Holding };
    let modules: Vec<Module> = slots.into_iter().map(module).collect();
    Ok((bench_modules::grown(spec, &modules, "blueprint")?, names))
}

/// Method to evaluate configurations.
#[derive(Clone, Copy)]
enum EvaluationMethod {
    Fused,
    /// One pass for each requested configuration.
    Separate,
    /// One pass for each distinct configuration.
    Distinct,
}

const METHODS: [EvaluationMethod; 3] =
    [EvaluationMethod::Fused, EvaluationMethod::Separate, EvaluationMethod::Distinct];

/// A network and a batch for it.
struct Bench {
    device: Device,
    network: Network,
    inputs: Tensor,
    targets: Tensor,
    rows: usize,
    /// Row of each requested configuration.
    requested: Vec<usize>,
}

impl Bench {
    fn new(
        host: &Host,
        requested: &Counterfactual,
        arguments: &BenchCounterfactualArguments,
    ) -> Result<Self, Failure> {
        let device = Device::open(arguments.network.device()?, &DeviceOptions::default())?;
        let batch = arguments.batch;
        let stream = device.stream("env 0");
        let isa = device.isa();
        let rows = requested.rows().len();
        let precision = arguments.network.precision;
        let options =
            NetworkOptions { configs: rows, precision, ..NetworkOptions::new(0, 0, isa, batch) };
        let mut network =
            Network::new(&stream, Arc::new(host.graph(&Optimisers::default())?), options)?;
        network.set_alphas(requested.rows())?;
        let image = *host.image();
        let shape = [batch, image.channels, image.height, image.width];
        let mut random = Rng::new(0, Purpose::Test, 0, 0);
        let pixels: Vec<f32> =
            (0..shape.iter().product()).map(|_| 2.0 * random.uniform() - 1.0).collect();
        let labels: Vec<u32> = (0..batch).map(|_| random.below(image.classes as u32)).collect();
        let format = MemoryFormat::ChannelsLast;
        let inputs = Tensor::empty_with_format(&stream, shape, DType::F32, format, Owner::Batches)?;
        inputs.copy_from_slice(&pixels)?;
        let targets = Tensor::from_slice(&stream, &labels, [batch], Owner::Batches)?;
        let requested = requested.configurations().iter().map(|(_, row)| *row).collect();
        Ok(Self { device, network, inputs, targets, rows, requested })
    }

    /// Runs the network in one pass and in separate passes for [`WARM_UP`]. Returns the number of
    /// batches that take about a [`BLOCK`] in one pass.
    fn warm_up(&mut self) -> Result<usize, Failure> {
        let started = Instant::now();
        let mut fused_ms = f64::INFINITY;
        while started.elapsed() < WARM_UP {
            fused_ms = fused_ms.min(self.time(EvaluationMethod::Fused, 1)?);
            self.time(EvaluationMethod::Separate, 1)?;
        }
        Ok((1e3 * BLOCK.as_secs_f64() / fused_ms).ceil() as usize)
    }

    /// Measures milliseconds per batch over the given number of batches. Waits once, at the end.
    fn time(&mut self, method: EvaluationMethod, batches: usize) -> Result<f64, Failure> {
        let started = Instant::now();
        for _ in 0..batches {
            match method {
                EvaluationMethod::Fused => {
                    self.network.eval_rows(&self.inputs, &self.targets, 0..self.rows)?
                }
                EvaluationMethod::Separate => self.requested.iter().try_for_each(|&row| {
                    self.network.eval_step(&self.inputs, &self.targets, row)
                })?,
                EvaluationMethod::Distinct => (0..self.rows)
                    .try_for_each(|row| self.network.eval_step(&self.inputs, &self.targets, row))?,
            }
        }
        self.device.synchronize()?;
        Ok(1e3 * started.elapsed().as_secs_f64() / batches as f64)
    }
}
