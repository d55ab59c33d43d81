//! Sums over ranks, dense and sparse, against a sum made by one thread.

use std::thread;

use meristem::comm::{CommOptions, Communicator, Keep, Reduction, Sparse, SparseSum};
use meristem::device::random::{Purpose, Rng};
use meristem::device::{Device, DeviceId, DeviceOptions, Owner, Tensor};

use super::{Fault, REPORT, Verdict, ensure};

const RANKS: [usize; 4] = [1, 2, 3, 4];
const LEN: usize = 10_007;
/// Elements that each rank sends.
const KEPT: usize = 101;

/// The dense sum is the sum from left to right, bit for bit, on every rank (X1).
pub(super) fn dense() -> Verdict {
    compare(|comm, x| Ok(comm.all_reduce(x, Reduction::Sum)?), |_| true)?;
    Ok(format!("{LEN} f32 over 1 to 4 ranks (threads): the bits of the sum from left to right"))
}

/// The sparse sum is the same of the elements that each rank sends (X2).
pub(super) fn sparse() -> Verdict {
    let sum = |comm: &mut Communicator, x: &Tensor| -> Result<(), Fault> {
        let mut sum = SparseSum::new(x, Sparse::TopK, Keep::Nothing)?;
        Ok(sum.run(comm, (x, x), KEPT, Reduction::Sum)?)
    };
    compare(sum, |place| place < KEPT)?;
    Ok(format!("the {KEPT} largest of {LEN} over 1 to 4 ranks: the bits of the sum in rank order"))
}

/// Runs `sum` on every number of ranks, and compares with the sum of what `is_sent`, by its place in the order of
/// magnitudes, from left to right.
fn compare(
    sum: impl Fn(&mut Communicator, &Tensor) -> Result<(), Fault> + Sync,
    is_sent: impl Fn(usize) -> bool,
) -> Result<(), Fault> {
    let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
    for ranks in RANKS {
        let inputs: Vec<Vec<f32>> = (0..ranks).map(values).collect();
        let sent: Vec<Vec<f32>> = inputs.iter().map(|x| largest(x, &is_sent)).collect();
        let from_left = |i: usize| sent[1..].iter().fold(sent[0][i], |sum, x| sum + x[i]);
        let expected: Vec<f32> = (0..LEN).map(from_left).collect();
        let group = Communicator::threads(ranks, &CommOptions::default())?;
        let results: Vec<Result<Vec<f32>, Fault>> = thread::scope(|scope| {
            let members = group.into_iter().zip(&inputs).map(|(mut comm, input)| {
                let (device, sum) = (&device, &sum);
                scope.spawn(move || {
                    let stream = device.stream(&format!("rank {}", comm.rank()));
                    let x = Tensor::from_slice(&stream, input, [LEN], Owner::Collectives)?;
                    sum(&mut comm, &x)?;
                    Ok(x.to_vec::<f32>()?)
                })
            });
            let members: Vec<_> = members.collect();
            let panicked = || Err(Fault::new("a rank panicked", REPORT));
            members.into_iter().map(|rank| rank.join().unwrap_or_else(|_| panicked())).collect()
        });
        for (rank, result) in results.into_iter().enumerate() {
            let got = result?;
            let wrong = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
            ensure(wrong == 0, || {
                Fault::new(
                    format!("rank {rank} of {ranks}: {wrong} of {LEN} elements wrong"),
                    REPORT,
                )
            })?;
        }
    }
    Ok(())
}

/// Uneven numbers of many magnitudes, whose sum depends on the order.
fn values(rank: usize) -> Vec<f32> {
    let mut random = Rng::new(7, Purpose::Test, rank as u64, 0);
    (0..LEN).map(|_| (random.uniform() - 0.5) * 10.0f32.powi(random.below(9) as i32 - 4)).collect()
}

/// `x` with zeros but for what is sent: ties go to the lower index.
fn largest(x: &[f32], is_sent: &impl Fn(usize) -> bool) -> Vec<f32> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[b].abs().total_cmp(&x[a].abs()).then(a.cmp(&b)));
    let mut sent = vec![0.0; x.len()];
    for (place, &i) in order.iter().enumerate() {
        if is_sent(place) {
            sent[i] = x[i];
        }
    }
    sent
}
