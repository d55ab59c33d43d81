//! `meristem bench format`: convolutions of a host in NHWC and in NCHW, compared and timed.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use meristem::grow::{self, HostSpec, Optimisers, host_graph};
use meristem::nn::Isa;
use meristem::nn::formats::{Agreement, ConvFormats};
use meristem::nn::graph::{Graph, Op};
use meristem::nn::kernels::conv::ConvShape;
use serde::Serialize;

use super::{Outcome, check_seconds, print_json};
use crate::cli::BenchFormatArguments;
use crate::failure::Failure;
use crate::plain::{self, counted, spread};
use crate::synthetic::image_shape;

/// Approximate length of a block. The formats take turns, so that other load on the machine affects
/// both equally.
const BLOCK: Duration = Duration::from_millis(20);
/// Time to let the caches of a stage and the clock frequency settle.
const WARM_UP: Duration = Duration::from_millis(100);

#[derive(Serialize)]
struct Report {
    stages: Vec<StageReport>,
    /// Sum of all stages.
    all: Times,
    turns: usize,
    config: Config,
}

#[derive(Serialize)]
struct StageReport {
    name: String,
    /// Largest difference of the results in each pass.
    agreement: Vec<PassReport>,
    #[serde(flatten)]
    times: Times,
}

#[derive(Serialize)]
struct PassReport {
    pass: String,
    difference: f64,
    tolerance: f64,
}

/// Times of a batch on one thread: output, data gradient and weight gradient.
#[derive(Serialize)]
struct Times {
    nhwc_ms: Spread,
    nchw_ms: Spread,
    /// Ratio of the time in NHWC to the time in NCHW, in the same turn.
    ratio: Spread,
}

impl Times {
    /// Summarises the turns' milliseconds in NHWC and NCHW.
    fn of(turns: &[[f64; 2]]) -> Self {
        let over = |figure: fn(&[f64; 2]) -> f64| {
            Spread::of(&turns.iter().map(figure).collect::<Vec<_>>())
        };
        Self {
            nhwc_ms: over(|turn| turn[0]),
            nchw_ms: over(|turn| turn[1]),
            ratio: over(|turn| turn[0] / turn[1]),
        }
    }
}

/// Median and range over the turns.
#[derive(Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(values: &[f64]) -> Self {
        let (median, min, max) = spread(values);
        Self { median, min, max }
    }
}

#[derive(Serialize)]
struct Config {
    host: String,
    batch: usize,
    image: [usize; 3],
    threads: usize,
    instruction_set: String,
    seconds: f64,
}

pub(crate) fn run(arguments: &BenchFormatArguments) -> Outcome {
    check(arguments)?;
    let spec: HostSpec = arguments.host.parse().map_err(grow::Error::from)?;
    let image = image_shape();
    let graph = host_graph(&spec, &image, Optimisers::default().host)?;
    let isa = Isa::from_env().map_err(meristem::device::Error::from)?;
    let mut stages = convolutions(&graph, arguments.batch)
        .map(|shape| Stage::new(isa, shape))
        .collect::<Result<Vec<_>, _>>()?;
    let started = Instant::now();
    let mut turns = 0;
    while turns == 0 || started.elapsed().as_secs_f64() < arguments.seconds {
        stages.iter_mut().for_each(|stage| stage.measure(turns));
        turns += 1;
    }
    let sum = |turn: usize| {
        stages.iter().fold([0.0; 2], |[nhwc, nchw], stage| {
            [nhwc + stage.turns[turn][0], nchw + stage.turns[turn][1]]
        })
    };
    let report = Report {
        all: Times::of(&(0..turns).map(sum).collect::<Vec<_>>()),
        stages: stages.iter().map(Stage::report).collect(),
        turns,
        config: Config {
            host: spec.to_string(),
            batch: arguments.batch,
            image: [image.channels, image.height, image.width],
            threads: 1,
            instruction_set: isa.to_string(),
            seconds: arguments.seconds,
        },
    };
    match arguments.json {
        true => print_json(&report)?,
        false => print(&report),
    }
    Ok(ExitCode::SUCCESS)
}

fn print(report: &Report) {
    let Report { stages, all, turns, config } = report;
    plain::out(&format!(
        "{}: output, data gradient and weight gradient of each convolution; \
         batch {}, one thread, {}, {}",
        config.host,
        config.batch,
        config.instruction_set,
        counted(*turns, ["turn", "turns"])
    ));
    let columns = ["NHWC ms", "NCHW ms", "NHWC / NCHW"];
    let [nhwc, nchw, ratio] = columns;
    plain::out(&format!("{:<26}{nhwc:>9}{nchw:>9}{ratio:>13}  (min to max)", "stage"));
    let row = |name: &str, Times { nhwc_ms, nchw_ms, ratio }: &Times| {
        let Spread { median, min, max } = ratio;
        let times = format!("{:>9.3}{:>9.3}", nhwc_ms.median, nchw_ms.median);
        plain::out(&format!("{name:<26}{times}{median:>13.3}  ({min:.3} to {max:.3})"));
    };
    stages.iter().for_each(|stage| row(&stage.name, &stage.times));
    row("all", all);
    plain::out("the results of both formats agree within rounding, in every pass of every stage");
}

fn check(arguments: &BenchFormatArguments) -> Result<(), Failure> {
    if !(1..=1024).contains(&arguments.batch) {
        return Err(Failure::value("batch", arguments.batch, "1 to 1024"));
    }
    check_seconds(arguments.seconds)
}

/// Shapes of the convolutions of a network, without those of 1×1 images: they lie alike in both
/// formats.
fn convolutions(graph: &Graph, batch: usize) -> impl Iterator<Item = ConvShape> {
    graph.nodes.iter().filter_map(move |node| {
        let Op::Conv2d { x, geometry, .. } = &node.op else { return None };
        let input = graph.nodes[x.index()].dims;
        (input.h * input.w > 1).then_some(ConvShape {
            batch,
            in_c: input.c,
            in_h: input.h,
            in_w: input.w,
            out_c: node.dims.c,
            kernel: geometry.kernel,
            stride: geometry.stride,
            padding: geometry.padding,
            groups: geometry.groups,
        })
    })
}

/// Names a stage, such as `3x32x32 to 8, kernel 3x3`.
fn name(shape: &ConvShape) -> String {
    let ConvShape { in_c, in_h, in_w, out_c, kernel: [kh, kw], .. } = shape;
    format!("{in_c}x{in_h}x{in_w} to {out_c}, kernel {kh}x{kw}")
}

/// Fails if the formats do not agree.
fn agrees(isa: Isa, stage: &str, of: &Agreement) -> Result<(), Failure> {
    if of.holds() {
        return Ok(());
    }
    let Agreement { pass, nhwc, nchw, tolerance } = of;
    let message = format!(
        "{stage}: {pass} is {nhwc} in NHWC and {nchw} in NCHW, \
         which differ by more than {tolerance:.1e}"
    );
    let remedy = format!(
        "a kernel for {isa} is wrong on this machine; try MERISTEM_ISA=portable, and report a bug"
    );
    Err(Failure::failed(message, remedy))
}

/// A convolution and its measurements.
struct Stage {
    name: String,
    formats: ConvFormats,
    agreement: [Agreement; 3],
    /// Runs in a block.
    runs: usize,
    /// Milliseconds of a run in NHWC and NCHW, for each turn.
    turns: Vec<[f64; 2]>,
}

impl Stage {
    /// Draws random values, checks that the formats agree, and warms up.
    fn new(isa: Isa, shape: ConvShape) -> Result<Self, Failure> {
        let mut formats = ConvFormats::new(isa, shape, |rng| 2.0 * rng.uniform() - 1.0);
        let (name, agreement) = (name(&shape), formats.agreement());
        agreement.iter().try_for_each(|pass| agrees(isa, &name, pass))?;
        let mut stage = Self { name, formats, agreement, runs: 1, turns: vec![] };
        let (started, mut least) = (Instant::now(), f64::INFINITY);
        while started.elapsed() < WARM_UP {
            least = least.min(stage.time(ConvFormats::run_nhwc));
            stage.time(ConvFormats::run_nchw);
        }
        stage.runs = (1e3 * BLOCK.as_secs_f64() / least).ceil().max(1.0) as usize;
        Ok(stage)
    }

    /// Times a block in each format; the order alternates.
    fn measure(&mut self, turn: usize) {
        let times = match turn % 2 {
            0 => [self.time(ConvFormats::run_nhwc), self.time(ConvFormats::run_nchw)],
            _ => {
                let nchw = self.time(ConvFormats::run_nchw);
                [self.time(ConvFormats::run_nhwc), nchw]
            }
        };
        self.turns.push(times);
    }

    /// Milliseconds of one run.
    fn time(&mut self, run: fn(&mut ConvFormats)) -> f64 {
        let started = Instant::now();
        (0..self.runs).for_each(|_| run(&mut self.formats));
        1e3 * started.elapsed().as_secs_f64() / self.runs as f64
    }

    fn report(&self) -> StageReport {
        let of = |of: &Agreement| PassReport {
            pass: of.pass.to_string(),
            difference: of.difference(),
            tolerance: of.tolerance,
        };
        StageReport {
            name: self.name.clone(),
            agreement: self.agreement.iter().map(of).collect(),
            times: Times::of(&self.turns),
        }
    }
}

#[cfg(test)]
mod tests {
    use meristem::nn::formats::Pass;

    use super::*;

    #[test]
    fn a_difference_fails_with_both_figures() {
        let agreement =
            |nchw| Agreement { pass: Pass::DataGradient, nhwc: 1.5, nchw, tolerance: 0.001 };
        assert!(agrees(Isa::portable(), "3x32x32 to 8", &agreement(1.5005)).is_ok());
        let failure = agrees(Isa::portable(), "3x32x32 to 8", &agreement(1.75)).unwrap_err();
        assert_eq!(failure.exit_code(), 1);
        for text in ["3x32x32 to 8", "data gradient", "1.5 in NHWC", "1.75 in NCHW", "1.0e-3"] {
            assert!(failure.message().contains(text), "{}", failure.message());
        }
    }
}
