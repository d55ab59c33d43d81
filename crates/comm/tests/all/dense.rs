//! X1 and X8 over threads, with the transport's own sum and by exchanges.

use half::bf16;
use meristem_comm::{Communicator, Error, Reduction, Sum, SumElement, SumOrder};
use meristem_device::{DType, Owner, Stream, Tensor};

use crate::common::{RANKS, noise, on, only_exchange, open, options, ranks, upload};

/// The left-to-right sum or mean, in the arithmetic of the type.
fn left_to_right<T: SumElement>(inputs: &[Vec<T>], reduction: Reduction) -> Vec<T> {
    (0..inputs[0].len())
        .map(|i| {
            let sum = inputs[1..].iter().fold(inputs[0][i], |sum, input| sum.plus(input[i]));
            match reduction {
                Reduction::Sum => sum,
                Reduction::Mean => sum.divided_by(inputs.len()),
            }
        })
        .collect()
}

/// Bits, with one pattern for all NaNs: the sum of two different NaNs depends on the compiler.
fn bits<T: SumElement>(values: &[T]) -> Vec<u8> {
    let one_nan = |x: &T| if x.partial_cmp(x).is_none() { T::from_f64(f64::NAN) } else { *x };
    let values: Vec<T> = values.iter().map(one_nan).collect();
    bytemuck::cast_slice(&values).to_vec()
}

const SPECIAL: [f64; 8] =
    [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::MAX, 1e-320, -1e-42];

fn inputs<T: SumElement>(len: usize, n: usize) -> Vec<Vec<T>> {
    (0..n)
        .map(|rank| {
            let mut values: Vec<T> =
                noise(len, rank, 0).into_iter().map(|x| T::from_f64(f64::from(x))).collect();
            for (i, value) in values.iter_mut().enumerate().filter(|(i, _)| i % 5 == 4) {
                *value = T::from_f64(SPECIAL[(i / 5 + rank * 3) % SPECIAL.len()]);
            }
            values
        })
        .collect()
}

/// Both algorithms, in and out of place, against the left-to-right sum.
fn check<T: SumElement>(n: usize, len: usize) {
    let device = open();
    let inputs = inputs::<T>(len, n);
    for own_sum in [true, false] {
        for reduction in [Reduction::Sum, Reduction::Mean] {
            let expected = bits(&left_to_right(&inputs, reduction));
            let group = || {
                if own_sum {
                    Communicator::threads(n, &options()).unwrap()
                } else {
                    only_exchange(n)
                }
            };
            let all = on(&device, group(), |mut comm, stream| {
                let x = upload(stream, &inputs[comm.rank()]);
                let y = upload(stream, &vec![T::from_f64(7.0); len]);
                for _ in 0..2 {
                    comm.all_reduce_with(&Sum {
                        input: &x,
                        output: &y,
                        reduction,
                        order: SumOrder::Rank,
                    })
                    .unwrap();
                }
                assert_eq!(bits(&x.to_vec::<T>().unwrap()), bits(&inputs[comm.rank()]));
                comm.all_reduce(&x, reduction).unwrap();
                [x, y].map(|tensor| bits(&tensor.to_vec::<T>().unwrap()))
            });
            for results in all {
                assert!(results[0] == expected, "in place, {n} ranks, {len}, {own_sum}");
                assert!(results[1] == expected, "out of place, {n} ranks, {len}, {own_sum}");
            }
        }
    }
}

#[test]
fn sums_are_left_to_right_bit_for_bit() {
    for n in RANKS {
        for len in [0, 1, 3, n, 31, 33, 64 * n + 5, 3001] {
            check::<f32>(n, len);
        }
        check::<f64>(n, 1003);
        check::<bf16>(n, 1003);
    }
}

#[test]
fn against_an_f64_oracle() {
    let (n, len) = (5, 4099);
    let inputs: Vec<Vec<f32>> = (0..n).map(|rank| noise(len, rank, 1)).collect();
    let results = ranks(n, |mut comm, stream| {
        let x = upload(stream, &inputs[comm.rank()]);
        comm.all_reduce(&x, Reduction::Sum).unwrap();
        x.to_vec::<f32>().unwrap()
    });
    for result in &results {
        for (i, got) in result.iter().enumerate() {
            let exact: f64 = inputs.iter().map(|input| f64::from(input[i])).sum();
            // Each of the n - 1 additions has an error of at most half a unit of the partial sum,
            // which is at most 2 n: (n - 1) * 2 n * 2^-24.
            let bound = 4.0 * 10.0 * f64::from(f32::EPSILON) / 2.0;
            assert!((f64::from(*got) - exact).abs() <= bound, "{i}: {got} {exact}");
        }
    }
}

/// A single rank copies, also to another window of the same memory.
#[test]
fn out_of_place_sums_within_one_storage() {
    for n in [1, 2] {
        ranks(n, |mut comm, stream| {
            let whole = upload(stream, &[1.0f32, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
            let (input, output) = (whole.view(0, [4]).unwrap(), whole.view(4, [4]).unwrap());
            let (input, output, order) = (&input, &output, SumOrder::Rank);
            comm.all_reduce_with(&Sum { input, output, reduction: Reduction::Mean, order })
                .unwrap();
            assert_eq!(whole.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
        });
    }
}

/// Windows that start within a cache line and do not overlap.
#[test]
fn unaligned_views_and_bytes_on_the_wire() {
    for (own_sum, n, len) in [(true, 3, 1000), (false, 3, 1000), (false, 4, 100), (true, 2, 1)] {
        let group =
            if own_sum { Communicator::threads(n, &options()).unwrap() } else { only_exchange(n) };
        let sent = on(&open(), group, |mut comm, stream| {
            let all: Vec<f32> = (0..len + 20).map(|i| (i + comm.rank()) as f32).collect();
            let whole = upload(stream, &all);
            let x = whole.view(7 + comm.rank(), [len]).unwrap();
            comm.all_reduce(&x, Reduction::Sum).unwrap();
            let got = whole.to_vec::<f32>().unwrap();
            for (i, &got) in got.iter().enumerate() {
                let at = i as isize - 7 - comm.rank() as isize;
                let expected = if (0..len as isize).contains(&at) {
                    (0..n).map(|r| (at as usize + 7 + 2 * r) as f32).sum()
                } else {
                    all[i]
                };
                assert_eq!(got, expected, "{i}");
            }
            comm.traffic().sent_bytes
        });
        // 2 (n - 1) / n of the bytes, averaged over the ranks.
        assert_eq!(sent.iter().sum::<u64>(), (2 * (n - 1) * len * 4) as u64);
    }
}

fn zeros(stream: &Stream, len: usize, dtype: DType) -> Tensor {
    Tensor::zeros(stream, [len], dtype, Owner::Other).unwrap()
}

#[test]
fn broadcast_gather_and_split() {
    for n in RANKS {
        let all = ranks(n, |mut comm, stream| {
            let me = comm.rank() as u32;
            let x = upload(stream, &[me, me + 100, me + 200]);
            let y = zeros(stream, 3 * n, DType::U32);
            comm.all_gather(&x, &y).unwrap();
            // In place.
            let z = upload(stream, &vec![me; 3 * n]);
            comm.all_gather(&z.view(3 * comm.rank(), [3]).unwrap(), &z).unwrap();
            comm.broadcast(&x, n - 1).unwrap();
            comm.barrier().unwrap();
            // Odd and even ranks, in reverse order.
            let mut half = comm.split(u64::from(me % 2), u64::from(100 - me)).unwrap();
            let sum = upload(stream, &[me as f32]);
            half.all_reduce(&sum, Reduction::Sum).unwrap();
            let place = (half.rank(), half.size());
            (x.to_vec::<u32>(), y.to_vec::<u32>(), z.to_vec::<u32>(), sum.to_vec::<f32>(), place)
        });
        let last = n as u32 - 1;
        for (me, (x, y, z, sum, place)) in all.into_iter().enumerate() {
            assert_eq!(x.unwrap(), [last, last + 100, last + 200]);
            let gathered: Vec<u32> = (0..n as u32).flat_map(|r| [r, r + 100, r + 200]).collect();
            assert_eq!(y.unwrap(), gathered);
            let gathered: Vec<u32> = (0..n as u32).flat_map(|r| [r; 3]).collect();
            assert_eq!(z.unwrap(), gathered);
            let alike: Vec<usize> = (0..n).filter(|r| r % 2 == me % 2).collect();
            assert_eq!(sum.unwrap(), [alike.iter().sum::<usize>() as f32]);
            let larger = alike.iter().filter(|r| **r > me).count();
            assert_eq!(place, (larger, alike.len()));
        }
    }
}

#[test]
fn bad_arguments_are_named() {
    let mut comm = Communicator::threads(1, &options()).unwrap().remove(0);
    let (a, b) = (open().stream("a"), open().stream("b"));
    let refused = |result: Result<(), Error>, words: &[&str]| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::BadArgument { .. }), "{error:?}");
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    let (x, bytes) = (zeros(&a, 4, DType::F32), zeros(&a, 4, DType::U8));
    refused(comm.all_reduce(&bytes, Reduction::Sum), &["all_reduce", "f32, f64 or bf16", "u8"]);
    for other in [zeros(&a, 5, DType::F32), zeros(&a, 4, DType::F64), zeros(&b, 4, DType::F32)] {
        let (input, output, reduction, order) = (&x, &other, Reduction::Sum, SumOrder::Fast);
        let result = comm.all_reduce_with(&Sum { input, output, reduction, order });
        refused(result, &["`all_reduce`: `output` must be"]);
    }
    refused(comm.broadcast(&x, 1), &["root", "below 1", "got 1"]);
    refused(
        comm.all_gather(&x, &zeros(&a, 5, DType::F32)),
        &["`output` must be 1 x 4 elements, got 5"],
    );
    let nobody = Communicator::threads(0, &options()).map(drop);
    refused(nobody, &["`Communicator::threads`: `ranks` must be at least 1, got 0"]);
}
