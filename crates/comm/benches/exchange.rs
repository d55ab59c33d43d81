//! Times of the exchanges between threads, measured in turns, each with a check of its result:
//! `cargo bench -p meristem-comm -- [elements] [ranks] [density]`, with `--json` for one line of
//! medians. `bench/compare.py` runs it in turns with `bench/torch_gloo.py`.
//!
//! The selection is compared with a plain read of the same memory. Both times are from the device's
//! trace: time within the kernels, while all ranks run them. Run on an idle machine.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use meristem_comm::{
    CommOptions, Communicator, FeedbackMode, Reduction, SparseMethod, SparseSum, Sum, SumOrder,
    picks,
};
use meristem_device::simd::{Vectorized, vectorize};
use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Stream, Tensor, Trace};

type BenchResult<T> = Result<T, Box<dyn Error + Send + Sync>>;

const ROUNDS: usize = 15;

/// A case to time.
#[derive(Clone, Copy, PartialEq)]
enum Case {
    Read,
    Dense,
    DenseOutOfPlace,
    Sparse(SparseMethod, FeedbackMode),
}

/// Key in the JSON, name, and case.
const CASES: [(&str, &str, Case); 8] = [
    ("read", "plain read", Case::Read),
    ("dense", "dense, in place", Case::Dense),
    ("dense_out_of_place", "dense, out of place", Case::DenseOutOfPlace),
    ("topk", "top-k", Case::Sparse(SparseMethod::TopK, FeedbackMode::Nothing)),
    (
        "topk_kept",
        "top-k, error feedback",
        Case::Sparse(SparseMethod::TopK, FeedbackMode::Residual),
    ),
    (
        "topk_momentum",
        "top-k, momentum",
        Case::Sparse(SparseMethod::TopK, FeedbackMode::Momentum(0.9)),
    ),
    ("gtopk", "gtop-k, error feedback", Case::Sparse(SparseMethod::GTopK, FeedbackMode::Residual)),
    (
        "oktopk",
        "ok-topk, error feedback",
        Case::Sparse(SparseMethod::OkTopK { refresh: 32 }, FeedbackMode::Residual),
    ),
];

/// A line of the table: times of all rounds, in milliseconds.
struct Line {
    key: &'static str,
    name: &'static str,
    times: Vec<f64>,
    bytes: u64,
    /// Number of wrong elements; `None` for results that are not checked here.
    wrong: Option<usize>,
}

impl Line {
    /// The smallest, the median and the largest time.
    fn spread(&self) -> [f64; 3] {
        let mut times = self.times.clone();
        times.sort_by(f64::total_cmp);
        [times[0], times[times.len() / 2], times[times.len() - 1]]
    }
}

fn main() -> BenchResult<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let json = words.iter().any(|word| word == "--json");
    let mut words = words.iter().filter(|word| !word.starts_with('-'));
    let len: usize = words.next().map_or(Ok(16 << 20), |word| word.parse())?;
    let ranks: usize = words.next().map_or(Ok(2), |word| word.parse())?;
    let density: f64 = words.next().map_or(Ok(0.01), |word| word.parse())?;
    let k = picks(density, len);
    let path = std::env::temp_dir().join(format!("meristem-exchange-{}.json", std::process::id()));
    let trace = Trace::create(&path)?;
    let options = DeviceOptions { trace: Some(trace.clone()), ..DeviceOptions::default() };
    let device = Device::open(DeviceId::Cpu(0), &options)?;
    let results: Vec<BenchResult<Vec<Line>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = Communicator::threads(ranks, &CommOptions::default())?
            .into_iter()
            .map(|comm| {
                let stream = device.stream(&format!("rank {}", comm.rank()));
                scope.spawn(move || rank(comm, &stream, len, k))
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, BenchResult<Vec<Line>>>| {
            thread.join().unwrap_or_else(|_| Err("a rank panicked".into()))
        };
        BenchResult::Ok(threads.into_iter().map(join).collect())
    })?;
    let mut results = results.into_iter().collect::<BenchResult<Vec<_>>>()?;
    trace.finish()?;
    let mut lines = results.swap_remove(0);
    lines.extend(within_kernels(&path)?);
    std::fs::remove_file(&path)?;
    if json {
        let fields =
            lines.iter().map(|line| format!("\"{}_ms\": {:.3}", line.key, line.spread()[1]));
        println!("{{{}}}", fields.collect::<Vec<_>>().join(", "));
        return Ok(());
    }
    println!("{len} x f32, {ranks} ranks, k = {k}, {} workers; milliseconds", device.threads());
    println!("{:<26}{:>9}{:>9}{:>9}{:>12}{:>8}", "", "min", "median", "max", "bytes", "wrong");
    for line in &lines {
        let ([min, median, max], Line { name, bytes, .. }) = (line.spread(), line);
        let wrong = line.wrong.map_or("-".into(), |wrong| wrong.to_string());
        println!("{name:<26}{min:>9.2}{median:>9.2}{max:>9.2}{bytes:>12}{wrong:>8}");
    }
    Ok(())
}

/// Times from the trace, of rank 0's plain read and of its top-k selection.
fn within_kernels(path: &Path) -> BenchResult<Vec<Line>> {
    let trace: serde_json::Value = serde_json::from_reader(std::fs::File::open(path)?)?;
    let events = trace["traceEvents"].as_array().ok_or("a trace without events")?;
    let lane = events.iter().find(|e| e["name"] == "thread_name" && e["args"]["name"] == "rank 0");
    let lane = &lane.ok_or("no lane of rank 0")?["tid"];
    let of = |operation: &str| {
        let mut runs: Vec<(f64, f64)> = events
            .iter()
            .filter(|e| e["ph"] == "X" && &e["tid"] == lane && e["name"] == operation)
            .filter_map(|e| Some((e["ts"].as_f64()?, e["dur"].as_f64()? / 1e3)))
            .collect();
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        runs
    };
    // A round selects once per sparse case, top-k first.
    let sparse = CASES.iter().filter(|(.., case)| matches!(case, Case::Sparse(..))).count();
    let line = |key, name, operation, step| {
        let times = of(operation).into_iter().step_by(step).skip(1).map(|(_, ms)| ms).collect();
        Line { key, name, times, bytes: 0, wrong: None }
    };
    Ok(vec![
        line("read_kernel", "the kernel of the read", "read", 1),
        line("select_kernel", "that of top-k's selection", "topk, select", sparse),
    ])
}

/// Whole numbers, so that sums are exact in any order. All magnitudes near the k-th largest differ.
fn input(rank: usize, len: usize) -> Vec<f32> {
    let scramble = |i: usize| (i.wrapping_mul(2_654_435_761) + rank * 40_503) & 0x3f_ffff;
    (0..len).map(|i| scramble(i) as f32 - 2_097_152.0).collect()
}

/// The body of one rank: all cases in turns.
fn rank(mut comm: Communicator, stream: &Stream, len: usize, k: usize) -> BenchResult<Vec<Line>> {
    let values = input(comm.rank(), len);
    let source = Tensor::from_slice(stream, &values, [len], Owner::Other)?;
    let x = Tensor::zeros(stream, [len], DType::F32, Owner::Other)?;
    let y = Tensor::zeros(stream, [len], DType::F32, Owner::Other)?;
    let mut sums = Vec::new();
    for (.., case) in CASES {
        sums.push(match case {
            Case::Sparse(sparse, keep) => Some(SparseSum::new(&x, sparse, keep)?),
            _ => None,
        });
    }
    let line = |(key, name, _)| Line { key, name, times: vec![], bytes: 0, wrong: None };
    let mut lines = CASES.map(line);
    for round in 0..=ROUNDS {
        for (i, (.., case)) in CASES.iter().enumerate() {
            stream.launch("reset").read(&source).write(&x).write(&y).run(|args| {
                args.write::<f32>(1).copy_from_slice(args.read(0));
                args.write::<f32>(2).fill(f32::NAN); // poison
            })?;
            stream.synchronize()?;
            comm.barrier()?;
            let before = comm.traffic().sent_bytes;
            let start = Instant::now();
            run(&mut comm, (&x, &y), *case, sums[i].as_mut(), k)?;
            stream.synchronize()?;
            match round {
                0 => lines[i].wrong = check(&comm, (&x, &y), *case, k)?,
                _ => lines[i].times.push(start.elapsed().as_secs_f64() * 1e3),
            }
            lines[i].bytes = comm.traffic().sent_bytes - before;
        }
    }
    Ok(lines.into())
}

fn run(
    comm: &mut Communicator,
    (x, y): (&Tensor, &Tensor),
    case: Case,
    sum: Option<&mut SparseSum>,
    k: usize,
) -> BenchResult<()> {
    let (reduction, order) = (Reduction::Sum, SumOrder::Rank);
    match (case, sum) {
        (Case::Sparse(..), Some(sum)) => sum.run(comm, x, y, k, reduction)?,
        (Case::DenseOutOfPlace, _) => {
            comm.all_reduce_with(&Sum { input: x, output: y, reduction, order })?;
        }
        (Case::Read, _) => x.stream().launch("read").read(x).run(|args| {
            std::hint::black_box(vectorize(args.isa(), Read(args.read(0))));
        })?,
        _ => comm.all_reduce(x, reduction)?,
    }
    Ok(())
}

/// The largest magnitude, for which every element is read.
struct Read<'a>(&'a [f32]);

impl Vectorized for Read<'_> {
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        self.0.iter().fold(0, |max, x| max.max(x.to_bits() & (u32::MAX >> 1)))
    }
}

/// Number of elements that differ from a slow computation; `None` for gTop-k and Ok-Topk, which are
/// checked in tests.
fn check(
    comm: &Communicator,
    (x, y): (&Tensor, &Tensor),
    case: Case,
    k: usize,
) -> BenchResult<Option<usize>> {
    let mut expected = vec![0.0f32; x.numel()];
    for rank in 0..comm.size() {
        let mut values = input(rank, x.numel());
        if let Case::Sparse(SparseMethod::TopK, _) = case {
            let mut order: Vec<u32> = (0..values.len() as u32).collect();
            if k < order.len() {
                let size = |i: u32| values[i as usize].to_bits() & (u32::MAX >> 1);
                order.select_nth_unstable_by_key(k, |&i| (std::cmp::Reverse(size(i)), i));
                order[k..].iter().for_each(|&i| values[i as usize] = 0.0);
            }
        }
        expected.iter_mut().zip(&values).for_each(|(sum, value)| *sum += value);
    }
    let got = match case {
        Case::Dense => x.to_vec::<f32>()?,
        Case::DenseOutOfPlace | Case::Sparse(SparseMethod::TopK, _) => y.to_vec::<f32>()?,
        _ => return Ok(None),
    };
    Ok(Some(got.iter().zip(&expected).filter(|(got, expected)| got != expected).count()))
}
