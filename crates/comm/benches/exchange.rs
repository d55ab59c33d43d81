//! Times of the exchanges between ranks that are threads, each checked for its result. Run on an
//! idle machine: `cargo bench -p meristem-comm -- [elements] [ranks]`.

use meristem_comm::{CommOptions, Communicator, Reduction};
use meristem_device::{Device, DeviceId, DeviceOptions, Owner, Stream, Tensor};
use std::error::Error;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const ROUNDS: usize = 15;

fn main() -> Outcome<()> {
    let mut numbers = std::env::args().skip(1).filter_map(|word| word.parse::<usize>().ok());
    let (len, ranks) = (numbers.next().unwrap_or(16 << 20), numbers.next().unwrap_or(2));
    let device = Device::open(DeviceId::Cpu, &DeviceOptions::default())?;
    println!("{len} x f32, {ranks} ranks, {} workers; milliseconds", device.threads());
    println!("{:<24}{:>9}{:>9}{:>9}{:>8}", "", "min", "median", "max", "wrong");
    let results: Vec<Outcome<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = Communicator::threads(ranks, &CommOptions::default())?
            .into_iter()
            .map(|comm| {
                let stream = device.stream(&format!("rank {}", comm.rank()));
                scope.spawn(move || rank(comm, &stream, len))
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Outcome<()>>| {
            thread.join().unwrap_or_else(|_| Err("a rank panicked".into()))
        };
        Outcome::Ok(threads.into_iter().map(join).collect())
    })?;
    results.into_iter().collect()
}

/// A small whole number for each element: sums are exact in any order.
fn input(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 3) % 31) as f32 - 15.0).collect()
}

fn rank(mut comm: Communicator, stream: &Stream, len: usize) -> Outcome<()> {
    let (me, n) = (comm.rank(), comm.size());
    let values = input(me, len);
    let x = Tensor::from_slice(stream, &values, [len], Owner::Other)?;
    let mut times = Vec::new();
    let mut wrong = 0;
    for _ in 0..ROUNDS {
        x.copy_from_slice(&values)?;
        stream.synchronize()?;
        comm.barrier()?;
        let start = Instant::now();
        comm.all_reduce(&x, Reduction::Sum)?;
        stream.synchronize()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let expected: Vec<Vec<f32>> = (0..n).map(|rank| input(rank, len)).collect();
    let got = x.to_vec::<f32>()?;
    for (i, got) in got.iter().enumerate() {
        wrong += usize::from(*got != expected.iter().map(|values| values[i]).sum::<f32>());
    }
    times.sort_by(f64::total_cmp);
    if me == 0 {
        let (min, median, max) = (times[0], times[times.len() / 2], times[times.len() - 1]);
        println!("{:<24}{min:>9.2}{median:>9.2}{max:>9.2}{wrong:>8}", "dense");
    }
    Ok(())
}
