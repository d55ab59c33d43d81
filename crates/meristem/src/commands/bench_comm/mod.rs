//! `meristem bench comm`: time and bandwidth of sums over ranks, with every result checked.

mod collective;
mod pattern;

use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use meristem::comm::{
    CommOptions, Communicator, PhaseMemory, Reduction, SparseMethod, Sum, SumOrder, TopKStorage,
    topk_all_gather, topk_all_gather_measured,
};
use meristem::device::{
    DType, Device, DeviceId, DeviceOptions, Error as DeviceError, Fill, Owner, Stream, Tensor,
};
use serde::Serialize;

use self::collective::{Collective, Work, summed};
use self::pattern::Pattern;
use super::{Outcome, print_json};
use crate::cli::{BenchCommArguments, Transport};
use crate::failure::Failure;
use crate::plain::{self, spread};

/// Bytes of one element: f32.
const ELEMENT: usize = size_of::<f32>();
/// Sums between refreshes of Ok-Topk's thresholds and regions.
const REFRESH: u64 = 32;
/// Maximum size of a tensor: indices have 32 bits, and every rank has four tensors of this size.
const BYTES_MAX: usize = 4 << 30;
/// Maximum number of ranks for which the test sums are exact.
const RANKS_MAX: usize = 64;

/// Measurements to make, the same on all ranks.
struct Plan {
    sizes: Vec<usize>,
    densities: Vec<f64>,
    rounds: Option<usize>,
    /// Whether rank 0 prints each row when it is measured.
    lines: bool,
    memory: bool,
}

#[derive(Serialize)]
struct Report {
    transport: &'static str,
    ranks: usize,
    threads: usize,
    dtype: &'static str,
    rows: Vec<Row>,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    bytes: usize,
    algorithm: &'static str,
    density: f64,
    /// Number of elements that each rank sends.
    k: usize,
    /// Time from a barrier to the result on the slowest rank: median over the rounds.
    ms: f64,
    ms_min: f64,
    ms_max: f64,
    /// Size of the tensor divided by the time.
    algorithm_gb_per_s: f64,
    /// `algorithm_gb_per_s` times 2 (n - 1) / n: the load of a link in a dense sum over n ranks.
    bus_gb_per_s: f64,
    /// Payload sent by all ranks for one sum.
    sent_bytes: u64,
    /// Number of elements that differ from the expected sum, over all ranks and rounds.
    wrong: u64,
    rounds: usize,
    /// Memory of the first round of a sparse sum or of a gather, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
}

/// Bytes in tensors on the device of rank 0 at the end of each phase of a sum. Ranks that are
/// threads share the device.
#[derive(Clone, Copy, Debug, Serialize)]
struct Memory {
    before: usize,
    after_allocation: usize,
    after_selection: usize,
    after_collective: usize,
    peak: usize,
}

impl Memory {
    fn line(&self) -> String {
        let Memory { before, after_allocation, after_selection, after_collective, peak } = self;
        let all = [before, after_selection, after_allocation, after_collective, peak];
        let [before, selection, allocation, collective, peak] =
            all.map(|bytes| plain::thousands(*bytes as u64));
        format!(
            "{:>10}bytes: {before} before, {allocation} after allocation, \
             {selection} after selection, {collective} after the collective, peak {peak}",
            ""
        )
    }
}

impl From<PhaseMemory> for Memory {
    fn from(phases: PhaseMemory) -> Memory {
        let PhaseMemory { before, allocation, selection, collective, peak } = phases;
        let (after_allocation, after_selection) = (allocation, selection);
        Memory { before, after_allocation, after_selection, after_collective: collective, peak }
    }
}

pub(crate) fn run(arguments: &BenchCommArguments) -> Outcome {
    let plan = plan(arguments)?;
    let id = arguments.device.id()?;
    if let (Transport::Nccl, DeviceId::Cpu(_)) = (arguments.comm, id) {
        let expected = "the GPU of this process, such as cuda:0, with --comm nccl";
        return Err(Failure::value("device", id, expected));
    }
    let device = Device::open(id, &DeviceOptions::default())?;
    let options = CommOptions::default();
    let (rank, rows) = match arguments.comm {
        Transport::Threads => (0, over_threads(&device, arguments.ranks.unwrap_or(2), &plan)?),
        Transport::Mpi => {
            over_processes(Communicator::mpi(&options)?, (&device, arguments), &plan)?
        }
        Transport::Nccl => {
            let comm = Communicator::nccl(Communicator::rendezvous(&options)?)?;
            over_processes(comm, (&device, arguments), &plan)?
        }
    };
    let (ranks, rows) = rows;
    let wrong: u64 = rows.iter().map(|row| row.wrong).sum();
    if rank == 0 && arguments.json {
        let transport = arguments.comm.name();
        print_json(&Report { transport, ranks, threads: device.threads(), dtype: "f32", rows })?;
    }
    verdict(wrong)
}

/// Fails if elements are wrong.
fn verdict(wrong: u64) -> Outcome {
    match wrong {
        0 => Ok(ExitCode::SUCCESS),
        _ => Err(Failure::failed(
            format!("{wrong} elements of sums over ranks are wrong"),
            "this is a bug in meristem; please report it with the output of `meristem check`",
        )),
    }
}

fn plan(arguments: &BenchCommArguments) -> Result<Plan, Failure> {
    let (min, max) = (arguments.min_size.0, arguments.max_size.0);
    if !(ELEMENT..=BYTES_MAX).contains(&max) {
        return Err(Failure::value("max-size", max, "4 bytes to 4GiB"));
    }
    if !(ELEMENT..=max).contains(&min) {
        return Err(Failure::value("min-size", min, format!("4 bytes to {max}, the --max-size")));
    }
    if let Some(density) = arguments.density.iter().find(|d| !(**d > 0.0 && **d <= 1.0)) {
        return Err(Failure::value("density", density, "shares above 0, at most 1"));
    }
    if arguments.rounds == Some(0) {
        return Err(Failure::value("rounds", 0, "at least 1"));
    }
    if let Some(ranks) = arguments.ranks.filter(|ranks| !(1..=RANKS_MAX).contains(ranks)) {
        return Err(Failure::value("ranks", ranks, format!("1 to {RANKS_MAX}")));
    }
    let double = |bytes: &usize| Some(2 * bytes);
    Ok(Plan {
        sizes: std::iter::successors(Some(min), double).take_while(|bytes| *bytes <= max).collect(),
        densities: arguments.density.clone(),
        rounds: arguments.rounds,
        lines: !arguments.json,
        memory: arguments.memory,
    })
}

/// Number of ranks, and the rows.
type Rows = (usize, Vec<Row>);

fn over_threads(device: &Device, ranks: usize, plan: &Plan) -> Result<Rows, Failure> {
    let group = Communicator::threads(ranks, &CommOptions::default())?;
    let all: Vec<Result<Vec<Row>, Failure>> = thread::scope(|scope| {
        let members = group.into_iter().map(|comm| {
            let stream = device.stream(&format!("rank {}", comm.rank()));
            scope.spawn(move || Rank::new(comm, stream).run(plan))
        });
        let members: Vec<_> = members.collect();
        let panicked = || {
            Err(Failure::failed("a rank panicked", "this is a bug in meristem; please report it"))
        };
        members.into_iter().map(|rank| rank.join().unwrap_or_else(|_| panicked())).collect()
    });
    let mut all = all.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok((ranks, all.swap_remove(0)))
}

/// Runs the rank of this process. Returns the rank's number, the number of ranks and the rows.
fn over_processes(
    comm: Communicator,
    (device, arguments): (&Device, &BenchCommArguments),
    plan: &Plan,
) -> Result<(usize, Rows), Failure> {
    let (rank, size) = (comm.rank(), comm.size());
    if let Some(ranks) = arguments.ranks.filter(|ranks| *ranks != size) {
        let message = format!("--ranks {ranks}, but {size} processes were started");
        let command = match arguments.comm {
            Transport::Nccl => format!("torchrun --no-python --nproc-per-node {ranks}"),
            _ => format!("mpirun -n {ranks}"),
        };
        let kind = arguments.comm.name();
        let remedy = format!("start `{command} meristem bench comm --comm {kind}`");
        return Err(Failure::usage(message, remedy));
    }
    if size > RANKS_MAX {
        let message = format!("{size} processes were started");
        return Err(Failure::usage(message, format!("start at most {RANKS_MAX}")));
    }
    let rows = Rank::new(comm, device.stream("rank")).run(plan)?;
    Ok((rank, (size, rows)))
}

/// One rank of a measurement.
struct Rank {
    comm: Communicator,
    stream: Stream,
}

/// Input, output and expected sum, each of shape [elements].
struct Tensors {
    input: Tensor,
    output: Tensor,
    expected: Tensor,
}

impl Rank {
    fn new(comm: Communicator, stream: Stream) -> Rank {
        Rank { comm, stream }
    }

    fn run(mut self, plan: &Plan) -> Result<Vec<Row>, Failure> {
        let prints = plan.lines && self.comm.rank() == 0;
        if prints {
            let (ranks, transport) = (self.comm.size(), self.comm.transport_name());
            plain::out(&format!(
                "f32 over {ranks} ranks ({transport}); median times of the slowest rank"
            ));
            plain::out(&heading());
        }
        let methods =
            [SparseMethod::TopK, SparseMethod::GTopK, SparseMethod::OkTopK { refresh: REFRESH }];
        let methods = methods.map(Collective::SparseSum);
        let sparse = || {
            let methods = methods.into_iter().chain([Collective::Gather]);
            methods.flat_map(|method| plan.densities.iter().map(move |d| (method, *d)))
        };
        let mut rows = Vec::new();
        for bytes in &plan.sizes {
            let make = || Tensor::empty(&self.stream, [bytes / ELEMENT], DType::F32, Owner::Other);
            let tensors = Tensors { input: make()?, output: make()?, expected: make()? };
            let rounds = plan.rounds.unwrap_or(((32 << 20) / bytes).clamp(5, 50));
            let cases = std::iter::once((Collective::DenseSum, 1.0)).chain(sparse());
            for (collective, density) in cases {
                let row = self.row(&tensors, collective, density, (rounds, plan.memory))?;
                if prints {
                    plain::out(&row.line());
                    row.memory.iter().for_each(|memory| plain::out(&memory.line()));
                }
                rows.push(row);
            }
        }
        Ok(rows)
    }

    /// Measures one collective.
    fn row(
        &mut self,
        tensors: &Tensors,
        collective: Collective,
        density: f64,
        (rounds, measures_memory): (usize, bool),
    ) -> Result<Row, Failure> {
        let Tensors { input, output, expected } = tensors;
        let (rank, ranks, len) = (self.comm.rank(), self.comm.size(), input.numel());
        let pattern = Pattern::new(len, ranks, density);
        let (algorithm, which) = collective.name();
        let mut values = vec![0.0; input.numel()];
        pattern.input(rank, &mut values);
        input.copy_from_slice(&values)?;
        pattern.expected(which, &mut values);
        expected.copy_from_slice(&values)?;
        drop(values);
        let mut work = Work::new(collective, input)?;
        // Times of the rounds, then bytes sent and wrong elements.
        let mut figures = Vec::with_capacity(rounds + 2);
        let (mut sent, mut wrong, mut memory) = (0, 0, None);
        for round in 0..=rounds {
            self.reset(output, work.residual())?;
            self.wait_for_stream()?;
            self.comm.barrier()?;
            let before = self.comm.traffic().sent_bytes;
            let start = Instant::now();
            let (comm, k, mut gathered) = (&mut self.comm, pattern.k(), None);
            let measures = measures_memory && round == 0;
            match &mut work {
                Work::DenseSum => comm.all_reduce_with(&Sum {
                    input,
                    output,
                    reduction: Reduction::Sum,
                    order: SumOrder::Rank,
                })?,
                Work::SparseSum(sum) if measures => {
                    let phases = sum.run_measured(comm, input, output, k, Reduction::Sum)?;
                    memory = Some(Memory::from(phases));
                }
                Work::SparseSum(sum) => sum.run(comm, input, output, k, Reduction::Sum)?,
                Work::Gather(_) if measures => {
                    let (elements, phases) = topk_all_gather_measured(comm, input, k)?;
                    (gathered, memory) = (Some(elements), Some(Memory::from(phases)));
                }
                Work::Gather(storage) => {
                    let storage = match storage {
                        Some(storage) => storage,
                        none => none.insert(Box::new(TopKStorage::new(input, ranks, k)?)),
                    };
                    gathered = Some(topk_all_gather(comm, input, storage, None, k)?);
                }
            }
            self.wait_for_stream()?;
            // The first round allocates memory.
            if round > 0 {
                figures.push(start.elapsed().as_secs_f64() * 1e3);
            }
            sent = self.comm.traffic().sent_bytes - before;
            if let Some(elements) = gathered {
                output.copy_from_slice(&summed(&elements, len)?)?;
            }
            wrong += self.wrong(output, expected)?;
        }
        figures.extend([sent as f64, wrong as f64]);
        let all = self.gather_figures(&figures)?;
        let bytes = len * ELEMENT;
        Ok(Row { memory, ..Row::new(bytes, (algorithm, density, pattern.k()), &all, ranks) })
    }

    /// Fills the output with NaN, and the residual with -0.0, which changes no sum.
    fn reset(&self, output: &Tensor, residual: Option<&Tensor>) -> Result<(), Failure> {
        let fill = |name, tensor: &Tensor, value: f32| {
            self.stream.fill(name, &[tensor], Fill::Word(value.to_bits()))
        };
        fill("bench comm, poison", output, f32::NAN)?;
        if let Some(residual) = residual {
            fill("bench comm, clear", residual, -0.0)?;
        }
        Ok(())
    }

    fn wait_for_stream(&self) -> Result<(), DeviceError> {
        self.stream.synchronize()
    }

    /// Counts the elements that differ from `expected`.
    fn wrong(&self, output: &Tensor, expected: &Tensor) -> Result<i64, Failure> {
        Ok(count_wrong(&output.to_vec::<f32>()?, &expected.to_vec::<f32>()?) as i64)
    }

    /// Gathers the figures of all ranks, by rank.
    fn gather_figures(&mut self, own: &[f64]) -> Result<Vec<Vec<f64>>, Failure> {
        let sent = Tensor::from_slice(&self.stream, own, [own.len()], Owner::Other)?;
        let len = own.len() * self.comm.size();
        let all = Tensor::zeros(&self.stream, [len], DType::F64, Owner::Other)?;
        self.comm.all_gather(&sent, &all)?;
        Ok(all.to_vec::<f64>()?.chunks(own.len()).map(<[f64]>::to_vec).collect())
    }
}

/// Counts elements that differ, including NaN left from [`Rank::reset`].
fn count_wrong(got: &[f32], expected: &[f32]) -> usize {
    got.iter().zip(expected).filter(|(got, expected)| got != expected).count()
}

impl Row {
    /// Creates a row from the figures of each rank: times in milliseconds, bytes sent, wrong
    /// elements.
    fn new(
        bytes: usize,
        (algorithm, density, k): (&'static str, f64, usize),
        all: &[Vec<f64>],
        ranks: usize,
    ) -> Row {
        let rounds = all[0].len() - 2;
        let slowest = |round: usize| all.iter().map(|figures| figures[round]).fold(0.0, f64::max);
        let total = |at: usize| all.iter().map(|figures| figures[at]).sum::<f64>() as u64;
        let (ms, ms_min, ms_max) = spread(&(0..rounds).map(slowest).collect::<Vec<_>>());
        let algorithm_gb_per_s = bytes as f64 / ms.max(1e-9) / 1e6;
        let (sent_bytes, wrong) = (total(rounds), total(rounds + 1));
        Row {
            bytes,
            algorithm,
            density,
            k,
            ms,
            ms_min,
            ms_max,
            algorithm_gb_per_s,
            bus_gb_per_s: algorithm_gb_per_s * 2.0 * (ranks - 1) as f64 / ranks as f64,
            sent_bytes,
            wrong,
            rounds,
            memory: None,
        }
    }

    fn line(&self) -> String {
        let (algorithm, density, ms) = (self.algorithm, self.density, self.ms);
        format!(
            "{:>8}  {algorithm:<8}{density:>8}{:>12}{ms:>11.3}{:>25}{:>9.3}{:>9.3}{:>15}{:>7}",
            size(self.bytes),
            plain::thousands(self.k as u64),
            format!("({:.3} to {:.3})", self.ms_min, self.ms_max),
            self.algorithm_gb_per_s,
            self.bus_gb_per_s,
            plain::thousands(self.sent_bytes),
            self.wrong
        )
    }
}

fn heading() -> String {
    let [size, algorithm, density, k, ms] = ["size", "sum", "density", "k", "ms"];
    let [least, speed, bus, sent, wrong] =
        ["min to max", "GB/s", "bus GB/s", "bytes sent", "wrong"];
    format!(
        "{size:>8}  {algorithm:<8}{density:>8}{k:>12}{ms:>11}{least:>25}{speed:>9}{bus:>9}\
         {sent:>15}{wrong:>7}"
    )
}

/// Formats a size, such as `64 KiB`.
fn size(bytes: usize) -> String {
    match bytes {
        b if b.is_multiple_of(1 << 20) => format!("{} MiB", b >> 20),
        b if b.is_multiple_of(1 << 10) => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_elements_are_counted_and_fail_the_command() {
        assert_eq!(count_wrong(&[1.0, f32::NAN, 3.0, -0.0], &[1.0, 2.0, 3.5, 0.0]), 2);
        assert!(verdict(0).is_ok());
        let failure = verdict(2).unwrap_err();
        assert_eq!(failure.exit_code(), 1);
        assert!(failure.message().contains("2 elements"));
    }

    #[test]
    fn a_row_has_the_time_of_the_slowest_rank() {
        let all = [vec![1.0, 4.0, 2.0, 100.0, 0.0], vec![3.0, 2.0, 2.0, 50.0, 3.0]];
        let row = Row::new(8_000_000, ("dense", 1.0, 0), &all, 2);
        assert_eq!((row.ms, row.ms_min, row.ms_max), (3.0, 2.0, 4.0));
        assert_eq!((row.sent_bytes, row.wrong, row.rounds), (150, 3, 3));
        // 8 MB in 3 ms; with two ranks the bus bandwidth is equal.
        assert!((row.algorithm_gb_per_s - 8.0 / 3.0).abs() < 1e-9);
        assert!((row.bus_gb_per_s - row.algorithm_gb_per_s).abs() < 1e-9);
        assert_eq!([size(4), size(1536), size(256 << 20)], ["4 B", "1536 B", "256 MiB"]);
    }
}
