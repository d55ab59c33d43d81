//! Times of the exchanges between ranks that are threads, in turns, each checked for its result:
//! `cargo bench -p meristem-comm -- [elements] [ranks] [density]`. `bench/torch_gloo.py` is the
//! peer. Also what selection costs beside a plain read of the same memory. On an idle machine.

use meristem_comm::{CommOptions, Communicator, Keep, Order, Reduction, Sparse, SparseSum, Sum};
use meristem_device::simd::{Vectorized, vectorize};
use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Stream, Tensor};
use std::error::Error;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const ROUNDS: usize = 9;

/// What is timed.
#[derive(Clone, Copy, PartialEq)]
enum Case {
    Read,
    Dense,
    DenseOutOfPlace,
    Sparse(Sparse, Keep),
}

const CASES: [(&str, Case); 8] = [
    ("plain read, one rank's", Case::Read),
    ("dense, in place", Case::Dense),
    ("dense, out of place", Case::DenseOutOfPlace),
    ("top-k", Case::Sparse(Sparse::TopK, Keep::Nothing)),
    ("top-k, error feedback", Case::Sparse(Sparse::TopK, Keep::Residual)),
    ("top-k, momentum", Case::Sparse(Sparse::TopK, Keep::Momentum(0.9))),
    ("gtop-k, error feedback", Case::Sparse(Sparse::GTopK, Keep::Residual)),
    ("ok-topk, error feedback", Case::Sparse(Sparse::OkTopK { refresh: 32 }, Keep::Residual)),
];

fn main() -> Outcome<()> {
    let mut words = std::env::args().skip(1).filter(|word| !word.starts_with('-'));
    let len: usize = words.next().map_or(Ok(16 << 20), |word| word.parse())?;
    let ranks: usize = words.next().map_or(Ok(2), |word| word.parse())?;
    let density: f64 = words.next().map_or(Ok(0.01), |word| word.parse())?;
    let k = (len as f64 * density) as usize;
    let device = Device::open(DeviceId::Cpu, &DeviceOptions::default())?;
    let workers = device.threads();
    println!("{len} x f32, {ranks} ranks, k = {k}, {workers} workers; milliseconds");
    println!("{:<26}{:>9}{:>9}{:>9}{:>12}{:>8}", "", "min", "median", "max", "bytes", "wrong");
    let results: Vec<Outcome<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = Communicator::threads(ranks, &CommOptions::default())?
            .into_iter()
            .map(|comm| {
                let stream = device.stream(&format!("rank {}", comm.rank()));
                scope.spawn(move || rank(comm, &stream, len, k))
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Outcome<()>>| {
            thread.join().unwrap_or_else(|_| Err("a rank panicked".into()))
        };
        Outcome::Ok(threads.into_iter().map(join).collect())
    })?;
    results.into_iter().collect()
}

/// Whole numbers, so that sums are exact in any order. All magnitudes near the largest k differ.
fn input(rank: usize, len: usize) -> Vec<f32> {
    let scramble = |i: usize| (i.wrapping_mul(2_654_435_761) + rank * 40_503) & 0x3f_ffff;
    (0..len).map(|i| scramble(i) as f32 - 2_097_152.0).collect()
}

/// One rank's life: every case in turns.
fn rank(mut comm: Communicator, stream: &Stream, len: usize, k: usize) -> Outcome<()> {
    let values = input(comm.rank(), len);
    let source = Tensor::from_slice(stream, &values, [len], Owner::Other)?;
    let x = Tensor::zeros(stream, [len], DType::F32, Owner::Other)?;
    let y = Tensor::zeros(stream, [len], DType::F32, Owner::Other)?;
    let mut sums = Vec::new();
    for (_, case) in CASES {
        sums.push(match case {
            Case::Sparse(sparse, keep) => Some(SparseSum::new(&x, sparse, keep)?),
            _ => None,
        });
    }
    let mut times = vec![Vec::new(); CASES.len()];
    let mut bytes = vec![0; CASES.len()];
    let mut wrong = vec![None; CASES.len()];
    for round in 0..=ROUNDS {
        for (i, (_, case)) in CASES.iter().enumerate() {
            stream.launch("reset").read(&source).write(&x).write(&y).run(|args| {
                args.write::<f32>(1).copy_from_slice(args.read(0));
                args.write::<f32>(2).fill(f32::NAN); // poison
            })?;
            stream.synchronize()?;
            comm.barrier()?;
            let before = comm.traffic().sent_bytes;
            let start = Instant::now();
            run(&mut comm, stream, (&x, &y), *case, (sums[i].as_mut(), k))?;
            stream.synchronize()?;
            if round > 0 {
                times[i].push(start.elapsed().as_secs_f64() * 1e3);
            }
            bytes[i] = comm.traffic().sent_bytes - before;
            if round == 0 {
                wrong[i] = check(&comm, (&x, &y), *case, k)?;
            }
        }
    }
    for (i, (name, _)) in CASES.iter().enumerate().filter(|_| comm.rank() == 0) {
        let times = &mut times[i];
        times.sort_by(f64::total_cmp);
        let (min, median, max) = (times[0], times[times.len() / 2], times[times.len() - 1]);
        let bytes = bytes[i];
        // A dash: not looked at here.
        let wrong = wrong[i].map_or("-".into(), |wrong: usize| wrong.to_string());
        println!("{name:<26}{min:>9.2}{median:>9.2}{max:>9.2}{bytes:>12}{wrong:>8}");
    }
    Ok(())
}

fn run(
    comm: &mut Communicator,
    stream: &Stream,
    (x, y): (&Tensor, &Tensor),
    case: Case,
    (sum, k): (Option<&mut SparseSum>, usize),
) -> Outcome<()> {
    let (reduction, order) = (Reduction::Sum, Order::Rank);
    match (case, sum) {
        (Case::Sparse(..), Some(sum)) => sum.run(comm, (x, y), k, reduction)?,
        (Case::DenseOutOfPlace, _) => {
            comm.all_reduce_with(&Sum { input: x, output: y, reduction, order })?;
        }
        (Case::Read, _) => stream.launch("read").read(x).run(|args| {
            std::hint::black_box(vectorize(Read(args.read(0))));
        })?,
        _ => comm.all_reduce(x, reduction)?,
    }
    Ok(())
}

/// The largest magnitude: every element is read.
struct Read<'a>(&'a [f32]);

impl Vectorized for Read<'_> {
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        self.0.iter().fold(0, |max, x| max.max(x.to_bits() & (u32::MAX >> 1)))
    }
}

/// Elements that differ from the same made slowly; `None` for gTop-k and Ok-Topk, which the tests hold.
fn check(
    comm: &Communicator,
    (x, y): (&Tensor, &Tensor),
    case: Case,
    k: usize,
) -> Outcome<Option<usize>> {
    let mut expected = vec![0.0f32; x.numel()];
    for rank in 0..comm.size() {
        let mut values = input(rank, x.numel());
        if let Case::Sparse(Sparse::TopK, _) = case {
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
        Case::DenseOutOfPlace | Case::Sparse(Sparse::TopK, _) => y.to_vec::<f32>()?,
        _ => return Ok(None),
    };
    Ok(Some(got.iter().zip(&expected).filter(|(got, expected)| got != expected).count()))
}
