//! Sums with elements of eight bits: against a slow sequential version, error bounds, special
//! values, bytes.

use meristem_comm::{
    Communicator, Exchange, ExchangeOptions, FeedbackMode, Method, Reduction, Traffic,
};
use meristem_device::{DType, Owner, Stream, Tensor};
use proptest::prelude::*;

use crate::common::{RANKS, noise, on, only_exchange, open, options, ranks, upload};
use crate::exchange::refused;

/// Elements that share a scale.
const BLOCK: usize = 256;

fn int8(reduction: Reduction) -> ExchangeOptions {
    ExchangeOptions { method: Method::Int8, small: 0, reduction, ..ExchangeOptions::default() }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
}

/// Result and residual of a rank after each of several sums of one tensor.
fn run(
    comm: &mut Communicator,
    stream: &Stream,
    reduction: Reduction,
    steps: &[Vec<f32>],
) -> Vec<[Vec<f32>; 2]> {
    let tensor = upload(stream, &steps[0]);
    let mut exchange = Exchange::new(&int8(reduction), &[("x", &tensor)]).unwrap();
    let step = |values: &Vec<f32>| {
        tensor.copy_from_slice(values).unwrap();
        exchange.run(comm, &[&tensor]).unwrap();
        let kept = exchange.export().unwrap().kept;
        [tensor.to_vec().unwrap(), floats(&kept["x"].residual)]
    };
    steps.iter().map(step).collect()
}

/// Rounds blocks to codes; returns their values, and subtracts them.
fn rounded(block: &mut [f32]) -> Vec<f32> {
    let most = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = most / 127.0;
    let round = |x: &mut f32| {
        let value = if scale > 0.0 { (*x / scale).round_ties_even() * scale } else { 0.0 };
        *x -= value;
        value
    };
    block.iter_mut().map(round).collect()
}

/// The ranks one after the other, element by element as the head of `int8.rs` describes. Blocks are
/// divided among the ranks in order, the first ranks have one more.
fn slow(residuals: &mut [Vec<f32>], gradients: &[Vec<f32>]) -> Vec<f32> {
    let (n, len) = (residuals.len(), residuals[0].len());
    for (residual, gradient) in residuals.iter_mut().zip(gradients) {
        residual.iter_mut().zip(gradient).for_each(|(residual, x)| *residual += x);
    }
    let blocks = len.div_ceil(BLOCK);
    let mut result = vec![];
    for block in 0..blocks {
        let elements = block * BLOCK..len.min((block + 1) * BLOCK);
        let owner = (0..n)
            .find(|rank| {
                let more = (blocks % n).min(rank + 1);
                block < blocks / n * (rank + 1) + more
            })
            .unwrap();
        let mut total: Option<Vec<f32>> = None;
        for (rank, residual) in residuals.iter_mut().enumerate() {
            let own = &mut residual[elements.clone()];
            let values = if rank == owner { own.to_vec() } else { rounded(own) };
            total = Some(match total {
                None => values,
                Some(total) => total.iter().zip(values).map(|(total, x)| total + x).collect(),
            });
        }
        let mut total = total.unwrap();
        result.extend(rounded(&mut total));
        residuals[owner][elements].copy_from_slice(&total);
    }
    result
}

fn check(n: usize, len: usize, only: bool) {
    let steps = |rank| (0..4).map(|step| noise(len, rank, step)).collect::<Vec<_>>();
    let group =
        || if only { only_exchange(n) } else { Communicator::threads(n, &options()).unwrap() };
    let of = |reduction| {
        on(&open(), group(), |mut comm, stream| {
            let steps = steps(comm.rank());
            run(&mut comm, stream, reduction, &steps)
        })
    };
    let (sums, means) = (of(Reduction::Sum), of(Reduction::Mean));
    let mut residuals = vec![vec![0.0; len]; n];
    for step in 0..4 {
        let gradients: Vec<Vec<f32>> = (0..n).map(|rank| noise(len, rank, step)).collect();
        let expected = slow(&mut residuals, &gradients);
        let mean: Vec<f32> = expected.iter().map(|x| x / n as f32).collect();
        for rank in 0..n {
            let what = format!("{n} ranks, {len} elements, step {step}, rank {rank}");
            assert_eq!(sums[rank][step][0], expected, "{what}");
            assert_eq!(means[rank][step][0], mean, "{what}");
            assert_eq!(sums[rank][step][1], residuals[rank], "{what}");
            assert_eq!(means[rank][step][1], residuals[rank], "{what}");
        }
    }
}

#[test]
fn sums_equal_a_slow_sequential_version() {
    for n in RANKS.into_iter().filter(|n| *n > 1) {
        for len in [1, 255, 256, 257, 1000, 5003] {
            check(n, len, false);
        }
    }
    check(3, 1500, true);
}

#[test]
fn one_rank_rounds_nothing() {
    let x = noise(700, 0, 0);
    let [sum, residual] = &ranks(1, |mut comm, stream| {
        run(&mut comm, stream, Reduction::Mean, std::slice::from_ref(&x)).remove(0)
    })[0];
    assert_eq!(*sum, x);
    assert!(residual.iter().all(|kept| *kept == 0.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Nothing is lost, and nothing is further off than half a code.
    #[test]
    fn errors_are_bounded_and_kept(
        (n, len) in (2usize..6, 1usize..1500),
        exponent in -20i32..20,
        spread in 0.0f32..30.0,
    ) {
        // Magnitudes that differ by up to 2^spread within a block.
        let values = |rank: usize, step: usize| -> Vec<f32> {
            let all = noise(len, rank, step).into_iter().enumerate();
            let scale = |i: usize| 2f32.powi(exponent) * (-spread * (i % 7) as f32 / 6.0).exp2();
            all.map(|(i, x)| x * scale(i)).collect()
        };
        let steps = 3;
        let seen = ranks(n, |mut comm, stream| {
            let all: Vec<_> = (0..steps).map(|step| values(comm.rank(), step)).collect();
            run(&mut comm, stream, Reduction::Sum, &all)
        });
        let mut before = vec![vec![0.0f32; len]; n];
        for step in 0..steps {
            let acc: Vec<Vec<f64>> = (0..n).map(|rank| {
                let both = before[rank].iter().zip(values(rank, step));
                both.map(|(kept, x)| f64::from(kept + x)).collect()
            }).collect();
            let most = |block: usize| -> f64 {
                let elements = block * BLOCK..len.min((block + 1) * BLOCK);
                acc.iter().map(|rank| {
                    rank[elements.clone()].iter().fold(0.0, |most: f64, x| most.max(x.abs()))
                }).sum()
            };
            for i in 0..len {
                let whole: f64 = acc.iter().map(|rank| rank[i]).sum();
                let magnitudes: f64 = acc.iter().map(|rank| rank[i].abs()).sum();
                let kept: f64 = seen.iter().map(|rank| f64::from(rank[step][1][i])).sum();
                let sum = f64::from(seen[0][step][0][i]);
                // The additions in rank order round n - 1 times, each by 2^-24 of a partial sum.
                // A partial sum is at most the magnitudes and half a code of every rank.
                let most = most(i / BLOCK);
                let partial = magnitudes + most / 254.0;
                let tolerance = (n - 1) as f64 * 2f64.powi(-24) * partial * 1.01;
                prop_assert!((sum + kept - whole).abs() <= tolerance, "{sum} {kept} {whole}");
                for rank in &seen {
                    // Half a code of the rank's values, or of the total, whose block has at most
                    // the sum of all ranks' largest magnitudes, each half a code larger. The
                    // quotient and the scale round by 2^-24, in units of up to 127 codes.
                    let bound = most / 254.0 * (1.0 + 1.0 / 254.0) * (1.0 + 254.0 * 2f64.powi(-22));
                    let residual = f64::from(rank[step][1][i]).abs();
                    prop_assert!(residual <= bound, "{residual} {bound}");
                    prop_assert!(rank[step][0][i].to_bits() == seen[0][step][0][i].to_bits());
                }
            }
            before = seen.iter().map(|rank| rank[step][1].clone()).collect();
        }
    }
}

/// NaN and infinities make their block NaN and leave nothing behind; other blocks are unaffected.
/// Blocks whose scale would be subnormal are kept whole.
#[test]
fn special_values() {
    let len = 4 * BLOCK;
    let values = |rank: usize, step: usize| {
        let mut values = noise(len, rank, step);
        if step == 0 && rank == 1 {
            (values[3], values[BLOCK + 7]) = (f32::NAN, f32::NEG_INFINITY);
        }
        values[3 * BLOCK..].iter_mut().for_each(|x| *x *= 1e-37);
        values
    };
    let seen = ranks(2, |mut comm, stream| {
        let all: Vec<_> = (0..2).map(|step| values(comm.rank(), step)).collect();
        run(&mut comm, stream, Reduction::Sum, &all)
    });
    for (rank, seen) in seen.iter().enumerate() {
        let [sum, residual] = &seen[0];
        assert!(sum[..2 * BLOCK].iter().all(|x| x.is_nan()));
        assert!(sum[2 * BLOCK..].iter().all(|x| x.is_finite()));
        assert!(residual.iter().all(|x| x.is_finite()));
        assert_eq!(sum[3 * BLOCK..], [0.0; BLOCK]);
        // Rank 1 owns the last block and received zeros for it.
        assert_eq!(residual[3 * BLOCK..], values(rank, 0)[3 * BLOCK..]);
        assert!(seen[1][0].iter().all(|x| x.is_finite()), "the next sum is finite");
    }
    let zeros = vec![vec![0.0; 300]; 2];
    for seen in ranks(2, |mut comm, stream| run(&mut comm, stream, Reduction::Sum, &zeros)) {
        assert!(seen.iter().flatten().flatten().all(|x| *x == 0.0));
    }
}

#[test]
fn a_quarter_of_the_dense_bytes_is_sent() {
    let len = 64 * BLOCK;
    for n in [2, 4] {
        let sent = |method| -> u64 {
            let traffic: Vec<Traffic> = ranks(n, |mut comm, stream| {
                let tensor = upload(stream, &noise(len, comm.rank(), 0));
                let options = ExchangeOptions { method, ..int8(Reduction::Mean) };
                let mut exchange = Exchange::new(&options, &[("x", &tensor)]).unwrap();
                exchange.run(&mut comm, &[&tensor]).unwrap();
                comm.traffic()
            });
            traffic.iter().map(|traffic| traffic.sent_bytes).sum()
        };
        let parts = 2 * (n as u64 - 1);
        assert_eq!(sent(Method::Dense), parts * len as u64 * 4);
        // A byte for each element, and four for each block.
        assert_eq!(sent(Method::Int8), parts * (len as u64 + 64 * 4));
    }
}

#[test]
fn other_types_and_sums_without_feedback_are_refused() {
    ranks(1, |_, stream| {
        let new = |options: &ExchangeOptions, dtype| {
            let x = Tensor::zeros(stream, [300], dtype, Owner::Other).unwrap();
            Exchange::new(options, &[("x", &x)]).err().unwrap()
        };
        let usual = int8(Reduction::Mean);
        refused(&new(&usual, DType::BF16), "`gradients` must be f32");
        refused(&new(&usual, DType::F64), "`gradients` must be f32");
        let nothing = ExchangeOptions { keep: FeedbackMode::Nothing, ..usual };
        refused(&new(&nothing, DType::F32), "`keep` must be `Residual` or `Momentum`");
    });
}
