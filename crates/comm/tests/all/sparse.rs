//! X2 to X5: sparse sums against slow obvious versions, and residuals, bit for bit.

use std::collections::BTreeMap;

use half::bf16;
use meristem_comm::{
    Communicator, Error, FeedbackMode, Reduction, SparseMethod, SparseSum, SumElement,
};
use meristem_device::{DType, Owner, Tensor};
use proptest::prelude::{ProptestConfig, prop_assert, proptest};

use crate::common::{RANKS, noise, on, only_exchange, open, options, ranks, upload};

const ALL: [SparseMethod; 4] = [
    SparseMethod::TopK,
    SparseMethod::GTopK,
    SparseMethod::OkTopK { refresh: 1 },
    SparseMethod::OkTopK { refresh: 3 },
];

/// Elements sent by a rank: index and value.
type List<T> = BTreeMap<usize, T>;

/// The k largest elements; among equals the lower index wins.
fn largest<T: SumElement>(from: &List<T>, k: usize) -> List<T> {
    let mut order: Vec<(usize, T)> = from.iter().map(|(i, x)| (*i, *x)).collect();
    order.sort_by_key(|(i, x)| (std::cmp::Reverse(x.magnitude()), *i));
    order.into_iter().take(k).collect()
}

fn list<T: SumElement>(values: &[T]) -> List<T> {
    values.iter().copied().enumerate().collect()
}

fn added<T: SumElement>(a: &List<T>, b: &List<T>) -> List<T> {
    let mut sum = a.clone();
    for (i, x) in b {
        sum.entry(*i).and_modify(|sum| *sum = sum.plus(*x)).or_insert(*x);
    }
    sum
}

/// The result of a tree of merges over the picks of these ranks.
fn tree<T: SumElement>(mut lists: Vec<List<T>>, k: usize) -> List<T> {
    let mut step = 1;
    while step < lists.len() {
        for rank in (0..lists.len() - step).step_by(2 * step) {
            lists[rank] = largest(&added(&lists[rank], &lists[rank + step]), k);
        }
        step *= 2;
    }
    lists.remove(0)
}

fn dense<T: SumElement>(list: &List<T>, len: usize) -> Vec<T> {
    (0..len).map(|i| list.get(&i).copied().unwrap_or(T::ZERO)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Inputs, results and state of a rank in one exchange.
struct Seen {
    gradient: Vec<f32>,
    before: Vec<f32>,
    after: Vec<f32>,
    result: Vec<f32>,
}

/// Makes exchanges on n ranks and returns every rank's record: [step][rank].
fn run(sparse: SparseMethod, n: usize, gradients: &[Vec<Vec<f32>>], k: usize) -> Vec<Vec<Seen>> {
    let mut all: Vec<Vec<Seen>> = ranks(n, |mut comm, stream| {
        let zero = vec![0.0f32; gradients[0][0].len()];
        let mut sum =
            SparseSum::new(&upload(stream, &zero), sparse, FeedbackMode::Residual).unwrap();
        let step = |of_ranks: &Vec<Vec<f32>>| {
            let gradient = of_ranks[comm.rank()].clone();
            let x = upload(stream, &gradient);
            let before = sum.residual().unwrap().to_vec().unwrap();
            sum.run(&mut comm, &x, &x, k, Reduction::Sum).unwrap();
            let after = sum.residual().unwrap().to_vec().unwrap();
            Seen { gradient, before, after, result: x.to_vec().unwrap() }
        };
        gradients.iter().map(step).collect()
    });
    // Transposes [rank][step].
    (0..gradients.len())
        .map(|_| all.iter_mut().map(|of_rank| of_rank.remove(0)).collect())
        .collect()
}

/// Checks the invariant of X3, and that the result is the sum of the sent elements in rank order.
fn check(sparse: SparseMethod, n: usize, gradients: &[Vec<Vec<f32>>], k: usize) {
    let context = format!("{sparse:?}, {n} ranks, k = {k}");
    for seen in run(sparse, n, gradients, k) {
        let mut sent: Vec<List<f32>> = Vec::new();
        let mut picks: Vec<List<f32>> = Vec::new();
        for Seen { gradient, before, after, result } in &seen {
            assert_eq!(bits(result), bits(&seen[0].result), "{context}: equal on all ranks");
            let acc: Vec<f32> = before.iter().zip(gradient).map(|(r, g)| r + g).collect();
            let mut own = List::new();
            for i in 0..acc.len() {
                if after[i].to_bits() != acc[i].to_bits() {
                    assert_eq!(after[i].to_bits(), (-0.0f32).to_bits(), "{context}: cleared");
                    own.insert(i, acc[i]);
                }
                // Sent elements plus residual equal the whole, bit for bit.
                let sent = own.get(&i).copied().unwrap_or(-0.0);
                assert_eq!((sent + after[i]).to_bits(), acc[i].to_bits(), "{context}");
            }
            assert!(own.len() <= k, "{context}: {} sent", own.len());
            picks.push(largest(&list(&acc), k));
            sent.push(own);
        }
        let len = seen[0].result.len();
        let nonzero = seen[0].result.iter().filter(|x| **x != 0.0).count();
        match sparse {
            SparseMethod::TopK => assert_eq!(sent, picks, "{context}: exactly the k largest"),
            SparseMethod::GTopK => {
                let expected = dense(&tree(picks, k), len);
                assert_eq!(bits(&seen[0].result), bits(&expected), "{context}: the tree");
                assert!(nonzero <= k);
            }
            SparseMethod::OkTopK { .. } => {
                assert!(nonzero <= k && (nonzero > 0 || k == 0), "{context}")
            }
        }
        for i in 0..len {
            let of = sent.iter().filter_map(|list| list.get(&i));
            let got = seen[0].result[i];
            // Error bound against f64: at most n - 1 additions, each with an error of half a unit.
            // After s exchanges every number is at most 2 s.
            let exact: f64 = of.clone().map(|x| f64::from(*x)).sum();
            let bound = (n * n * gradients.len()) as f64 * 2.0 * f64::from(f32::EPSILON) / 2.0;
            assert!((f64::from(got) - exact).abs() <= bound, "{context}: {i}, {got} {exact}");
            if sparse != SparseMethod::GTopK {
                let in_order = of.copied().reduce(|a, b| a + b).unwrap_or(0.0);
                assert_eq!(got.to_bits(), in_order.to_bits(), "{context}: rank order");
            }
        }
    }
}

fn gradients(steps: usize, n: usize, len: usize) -> Vec<Vec<Vec<f32>>> {
    (0..steps).map(|step| (0..n).map(|rank| noise(len, rank, step)).collect()).collect()
}

#[test]
fn sent_elements_plus_residual_equal_the_whole() {
    for sparse in ALL {
        for n in RANKS {
            let len = 997;
            for k in [1, 2, n, 10, 200] {
                check(sparse, n, &gradients(5, n, len), k);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn sent_plus_residual_equal_the_whole_for_any_sizes(
        n in 1usize..6,
        len in 2usize..300,
        share in 0.0..1.0f64,
        coarse: bool,
    ) {
        let k = ((share * len as f64) as usize).clamp(1, len - 1);
        let mut all = gradients(4, n, len);
        if coarse {
            // Many equal magnitudes.
            let numbers = all.iter_mut().flatten().flatten();
            numbers.for_each(|x| *x = (*x * 4.0).round() / 4.0 + 0.125);
        }
        for sparse in ALL {
            check(sparse, n, &all, k);
        }
        prop_assert!(true);
    }
}

/// All elements are sent: the dense sum, bit for bit, with and without a residual.
#[test]
fn density_one_equals_dense() {
    let (n, len) = (5, 300);
    for sparse in ALL {
        for keep in [FeedbackMode::Nothing, FeedbackMode::Residual] {
            let results = ranks(n, |mut comm, stream| {
                let x = upload(stream, &noise(len, comm.rank(), 0));
                let y = upload(stream, &noise(len, comm.rank(), 0));
                let mut sum = SparseSum::new(&x, sparse, keep).unwrap();
                sum.run(&mut comm, &x, &x, len, Reduction::Mean).unwrap();
                comm.all_reduce(&y, Reduction::Mean).unwrap();
                (x.to_vec::<f32>().unwrap(), y.to_vec::<f32>().unwrap())
            });
            for (x, y) in results {
                assert_eq!(bits(&x), bits(&y), "{sparse:?}");
            }
        }
    }
    // A dense exchange sends the residual of a sparse one.
    let results = ranks(2, |mut comm, stream| {
        let x = upload(stream, &[3.0f32, 1.0, -2.0]);
        let mut sum = SparseSum::new(&x, SparseMethod::TopK, FeedbackMode::Residual).unwrap();
        sum.run(&mut comm, &x, &x, 1, Reduction::Sum).unwrap();
        let first = x.to_vec::<f32>().unwrap();
        let y = upload(stream, &[0.5f32; 3]);
        sum.run(&mut comm, &y, &x, 3, Reduction::Sum).unwrap();
        let kept = sum.residual().unwrap().to_vec::<f32>().unwrap();
        (first, x.to_vec::<f32>().unwrap(), kept)
    });
    for (first, second, kept) in results {
        assert_eq!((first, second), (vec![6.0, 0.0, 0.0], vec![1.0, 3.0, -3.0]));
        assert_eq!(bits(&kept), bits(&[-0.0; 3]));
    }
}

#[test]
fn empty_zero_and_equal_inputs() {
    for sparse in ALL {
        for n in RANKS {
            // No elements, k = 0, and fewer elements than ranks.
            let results = ranks(n, |mut comm, stream| {
                let none = Tensor::zeros(stream, [0], DType::F32, Owner::Other).unwrap();
                let mut sum = SparseSum::new(&none, sparse, FeedbackMode::Residual).unwrap();
                sum.run(&mut comm, &none, &none, 0, Reduction::Sum).unwrap();
                let x = upload(stream, &[1.0f32, 2.0, 3.0]);
                let mut sum = SparseSum::new(&x, sparse, FeedbackMode::Residual).unwrap();
                sum.run(&mut comm, &x, &x, 0, Reduction::Sum).unwrap();
                let zeros = x.to_vec::<f32>().unwrap();
                x.copy_from_slice(&[0.0f32; 3]).unwrap();
                sum.run(&mut comm, &x, &x, 1, Reduction::Mean).unwrap();
                (zeros, x.to_vec::<f32>().unwrap())
            });
            for (zeros, x) in results {
                assert_eq!(bits(&zeros), [0; 3]);
                // All ranks selected and sent 3; the result is the mean of n equal numbers.
                assert_eq!(x, [0.0, 0.0, (3.0 * n as f32) / n as f32], "{sparse:?} {n}");
            }
            // All zero, all equal, minus zero, one rank with only zeros.
            for (values, k) in
                [(vec![0.0f32; 40], 7), (vec![2.5; 40], 7), (vec![-0.0; 40], 39), (vec![1.0], 0)]
            {
                let results = ranks(n, |mut comm, stream| {
                    let silent = n > 1 && comm.rank() == n - 1;
                    let own = if silent { vec![0.0; values.len()] } else { values.clone() };
                    let x = upload(stream, &own);
                    let y = Tensor::zeros(stream, [own.len()], DType::F32, Owner::Other).unwrap();
                    let mut sum = SparseSum::new(&x, sparse, FeedbackMode::Residual).unwrap();
                    sum.run(&mut comm, &x, &y, k, Reduction::Sum).unwrap();
                    let kept = sum.residual().unwrap().to_vec::<f32>().unwrap();
                    (own, y.to_vec::<f32>().unwrap(), kept)
                });
                for (own, y, kept) in &results {
                    assert_eq!(bits(y), bits(&results[0].1), "{sparse:?} {n}");
                    // Among equal numbers the lowest indices are selected. The others are in the
                    // residual, with the sign of an untouched zero.
                    let [own_bits, y_bits, kept] = [own, y, kept].map(|values| bits(values));
                    let sent = (-0.0f32).to_bits();
                    for i in 0..own.len() {
                        assert!([own_bits[i], sent].contains(&kept[i]), "{sparse:?} {n} {i}");
                        if n == 1 {
                            let picked = if i < k { own_bits[i] } else { 0 };
                            assert_eq!(y_bits[i], picked, "{sparse:?} {i}");
                            let left = if i < k { sent } else { own_bits[i] };
                            assert_eq!(kept[i], left, "{sparse:?} {i}");
                        }
                    }
                    if let SparseMethod::TopK = sparse {
                        let first = y.iter().take_while(|x| **x != 0.0).count();
                        let expected = if own.iter().any(|x| *x != 0.0) { k } else { first };
                        assert_eq!(first, expected, "lowest indices first");
                    }
                }
            }
        }
    }
}

/// NaN and infinities have the largest magnitudes: they are sent first and arrive.
#[test]
fn nan_and_infinities_survive() {
    for sparse in ALL {
        for n in [1, 2, 3, 4, 7] {
            let results = ranks(n, |mut comm, stream| {
                let mut values = noise(100, comm.rank(), 3);
                if comm.rank() == n - 1 {
                    (values[17], values[60]) = (f32::NAN, f32::NEG_INFINITY);
                }
                let x = upload(stream, &values);
                let mut sum = SparseSum::new(&x, sparse, FeedbackMode::Residual).unwrap();
                // A region has room for both of them, with up to 7 owners.
                sum.run(&mut comm, &x, &x, 16, Reduction::Sum).unwrap();
                let kept = sum.residual().unwrap().to_vec::<f32>().unwrap();
                (x.to_vec::<f32>().unwrap(), kept)
            });
            for (x, kept) in results {
                assert!(x[17].is_nan() && x[60] == f32::NEG_INFINITY, "{sparse:?} {n}");
                assert!(kept.iter().all(|x| x.is_finite()), "residuals are finite");
            }
        }
    }
}

fn other_type<T: SumElement>(n: usize) {
    let values = |rank: usize| -> Vec<T> {
        noise(500, rank, 0).iter().map(|x| T::from_f64(f64::from(*x))).collect()
    };
    let picks: Vec<List<T>> = (0..n).map(|rank| largest(&list(&values(rank)), 20)).collect();
    let expected = dense(&picks.iter().skip(1).fold(picks[0].clone(), |a, b| added(&a, b)), 500);
    let results = ranks(n, |mut comm, stream| {
        // A window that starts within a cache line.
        let padded: Vec<T> = [vec![T::ZERO; 3], values(comm.rank()), vec![T::ZERO; 5]].concat();
        let whole = upload(stream, &padded);
        let x = whole.view(3, [500]).unwrap();
        let mut sum = SparseSum::new(&x, SparseMethod::TopK, FeedbackMode::Nothing).unwrap();
        sum.run(&mut comm, &x, &x, 20, Reduction::Sum).unwrap();
        whole.to_vec::<T>().unwrap()
    });
    for result in results {
        assert_eq!(result[3..503], expected);
        assert!(result[..3].iter().chain(&result[503..]).all(|x| *x == T::ZERO));
    }
}

#[test]
fn f64_bf16_and_unaligned_windows() {
    for n in [1, 3, 4] {
        other_type::<f32>(n);
        other_type::<f64>(n);
        other_type::<bf16>(n);
    }
}

/// Velocity u = m u + gradient, accumulated and cleared at the picks, against plain code. In some
/// exchanges all elements are sent, which keeps the velocity.
#[test]
fn momentum_correction() {
    let (n, len, factor) = (3, 200, 0.9);
    let all = gradients(6, n, len);
    let results = ranks(n, |mut comm, stream| {
        let x = upload(stream, &all[0][0]);
        let keep = FeedbackMode::Momentum(f64::from(factor));
        let mut sum = SparseSum::new(&x, SparseMethod::TopK, keep).unwrap();
        let (mut u, mut v) = (vec![-0.0f32; len], vec![-0.0f32; len]);
        for (step, of_ranks) in all.iter().enumerate() {
            let k = if step % 3 == 2 { len } else { 9 };
            let gradient = &of_ranks[comm.rank()];
            x.copy_from_slice(gradient).unwrap();
            sum.run(&mut comm, &x, &x, k, Reduction::Sum).unwrap();
            for i in 0..len {
                u[i] = u[i] * factor + gradient[i];
                v[i] += u[i];
            }
            for i in largest(&list(&v), k).into_keys() {
                v[i] = -0.0;
                if k < len {
                    u[i] = -0.0;
                }
            }
            let kept = [sum.velocity().unwrap(), sum.residual().unwrap()];
            let [velocity, residual] = kept.map(|tensor| tensor.to_vec::<f32>().unwrap());
            assert_eq!((bits(&velocity), bits(&residual)), (bits(&u), bits(&v)));
        }
        x.to_vec::<f32>().unwrap()
    });
    assert!(results.iter().all(|result| *result == results[0]));
}

#[test]
fn bytes_sent_match_the_formula_without_allocations() {
    for sparse in ALL {
        for n in RANKS {
            for k in [1, 3, 64, 100] {
                let device = open();
                let group = match k {
                    64 => only_exchange(n),
                    _ => Communicator::threads(n, &options()).unwrap(),
                };
                let allocations = || device.counts().allocations;
                let sent: Vec<u64> = on(&device, group, |mut comm, stream| {
                    let x = upload(stream, &noise(1000, comm.rank(), 0));
                    let mut sum = SparseSum::new(&x, sparse, FeedbackMode::Residual).unwrap();
                    sum.run(&mut comm, &x, &x, k, Reduction::Sum).unwrap();
                    let once = comm.traffic().sent_bytes;
                    comm.barrier().unwrap();
                    let before = allocations();
                    comm.barrier().unwrap();
                    for _ in 0..3 {
                        sum.run(&mut comm, &x, &x, k, Reduction::Sum).unwrap();
                    }
                    comm.barrier().unwrap();
                    assert_eq!(allocations(), before, "{sparse:?}, {n} ranks, k = {k}");
                    comm.barrier().unwrap();
                    once
                });
                let total = sent.iter().sum::<u64>();
                assert_eq!(total, 4 * sparse.words(n, k), "{sparse:?}, {n} ranks, k = {k}");
                if let SparseMethod::OkTopK { .. } = sparse {
                    assert!(total <= 4 * 6 * (k * (n - 1)) as u64);
                }
            }
        }
    }
}

#[test]
fn a_larger_k_gets_new_memory() {
    let results = ranks(2, |mut comm, stream| {
        let x = upload(stream, &noise(400, comm.rank(), 0));
        let mut sum = SparseSum::new(&x, SparseMethod::TopK, FeedbackMode::Nothing).unwrap();
        [5, 50, 7, 300].map(|k| {
            let y = Tensor::zeros(stream, [400], DType::F32, Owner::Other).unwrap();
            sum.run(&mut comm, &x, &y, k, Reduction::Sum).unwrap();
            y.to_vec::<f32>().unwrap()
        })
    });
    for (at, k) in [5, 50, 7, 300].into_iter().enumerate() {
        let [a, b] = [0, 1].map(|rank| largest(&list(&noise(400, rank, 0)), k));
        assert_eq!(results[0][at], dense(&added(&a, &b), 400));
    }
    let mut comm = Communicator::threads(1, &options()).unwrap().remove(0);
    let x = upload(&open().stream("s"), &[1.0f32; 4]);
    let mut sum = SparseSum::new(&x, SparseMethod::TopK, FeedbackMode::Nothing).unwrap();
    let error = sum.run(&mut comm, &x, &x, 5, Reduction::Sum).unwrap_err();
    assert!(matches!(error, Error::BadArgument { .. }), "{error:?}");
    assert!(error.to_string().contains("`k` must be at most 4"), "{error}");
}

/// Memory belongs to one rank in one group. In another group with the same k it is allocated again.
#[test]
fn a_sum_continues_in_another_group() {
    for sparse in [SparseMethod::TopK, SparseMethod::GTopK, SparseMethod::OkTopK { refresh: 2 }] {
        ranks(4, |mut comm, stream| {
            let me = comm.rank();
            let mut pair = comm.split(me as u64 % 2, me as u64).unwrap();
            let x = upload(stream, &noise(400, me, 0));
            let sums = |sum: &mut SparseSum, comm: &mut Communicator| {
                let y = Tensor::zeros(stream, [400], DType::F32, Owner::Other).unwrap();
                sum.run(comm, &x, &y, 20, Reduction::Sum).unwrap();
                bits(&y.to_vec::<f32>().unwrap())
            };
            let new = || SparseSum::new(&x, sparse, FeedbackMode::Nothing).unwrap();
            let expected = [sums(&mut new(), &mut comm), sums(&mut new(), &mut pair)];
            let mut sum = new();
            let first = sums(&mut sum, &mut comm);
            assert_eq!([first, sums(&mut sum, &mut pair)], expected, "{sparse:?}");
        });
    }
}
