//! X6, X7: a model's gradients, in buckets, with state per parameter.

use meristem_comm::{
    Communicator, Error, Exchange, ExchangeOptions, ExchangeState, FeedbackMode, Method,
    ParameterState, Reduction, SparseMethod, Timing, TimingTable,
};
use meristem_device::{Counts, ScopePolicy, Stream, Tensor};

use crate::common::{noise, ranks, upload};

/// Names and sizes of parameters.
pub(crate) const MODEL: [(&str, usize); 6] =
    [("a.weight", 300), ("a.bias", 7), ("b.weight", 900), ("b.bias", 1), ("c", 300), ("d", 40)];

pub(crate) fn gradients(
    stream: &Stream,
    rank: usize,
    step: usize,
    model: &[(&str, usize)],
) -> Vec<Tensor> {
    let each = model.iter().enumerate();
    each.map(|(i, (_, len))| upload(stream, &noise(*len, rank, step * 100 + i))).collect()
}

pub(crate) fn made(
    options: &ExchangeOptions,
    stream: &Stream,
    model: &[(&str, usize)],
) -> Result<Exchange, meristem_comm::Error> {
    let tensors = gradients(stream, 0, 0, model);
    let named: Vec<_> = model.iter().map(|(name, _)| *name).zip(&tensors).collect();
    Exchange::new(options, &named)
}

/// Makes one step and returns all gradients.
pub(crate) fn step(
    exchange: &mut Exchange,
    comm: &mut Communicator,
    stream: &Stream,
    step: usize,
) -> Vec<Vec<f32>> {
    let tensors = gradients(stream, comm.rank(), step, &MODEL);
    exchange.run(comm, &tensors.iter().collect::<Vec<_>>()).unwrap();
    tensors.iter().map(|tensor| tensor.to_vec().unwrap()).collect()
}

/// Asserts that an argument was rejected with these words.
pub(crate) fn refused(error: &Error, words: &str) {
    assert!(matches!(error, Error::BadArgument { .. }), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
}

pub(crate) fn options(method: Method) -> ExchangeOptions {
    ExchangeOptions { method, density: 0.1, small: 50, bucket: 1000, ..ExchangeOptions::default() }
}

#[test]
fn dense_results_do_not_depend_on_buckets() {
    for bucket in [0, 1, 350, 1000, 10_000] {
        let options = ExchangeOptions { bucket, ..options(Method::Dense) };
        let results = ranks(3, |mut comm, stream| {
            let mut exchange = made(&options, stream, &MODEL).unwrap();
            let got = step(&mut exchange, &mut comm, stream, 5);
            let single: Vec<Vec<f32>> = gradients(stream, comm.rank(), 5, &MODEL)
                .iter()
                .map(|tensor| {
                    comm.all_reduce(tensor, Reduction::Mean).unwrap();
                    tensor.to_vec().unwrap()
                })
                .collect();
            assert!(exchange.export().unwrap().kept.is_empty());
            (got, single)
        });
        assert!(results.iter().all(|(got, single)| got == single), "buckets of {bucket}");
    }
}

/// Exchanges the sparse gradients in order, each as one tensor in one piece, with `flat`.
fn flattened(
    flat: &mut Exchange,
    comm: &mut Communicator,
    gradients: &[Tensor],
) -> (Vec<f32>, ExchangeState) {
    let large = gradients.iter().filter(|tensor| tensor.numel() >= 50);
    let values: Vec<f32> = large.flat_map(|tensor| tensor.to_vec::<f32>().unwrap()).collect();
    let tensor = upload(gradients[0].stream(), &values);
    flat.run(comm, &[&tensor]).unwrap();
    (tensor.to_vec().unwrap(), flat.export().unwrap())
}

/// Gradients in one arena with gaps: the same bits as separate tensors and as one flat tensor. The
/// gaps are unchanged.
#[test]
fn gradients_are_exchanged_in_place() {
    let sparse = [SparseMethod::TopK, SparseMethod::GTopK, SparseMethod::OkTopK { refresh: 2 }]
        .map(Method::Sparse);
    for (method, keep) in
        sparse.into_iter().chain([Method::Dense, Method::Int8, Method::Auto]).flat_map(|method| {
            [FeedbackMode::Residual, FeedbackMode::Momentum(0.5)].map(|keep| (method, keep))
        })
    {
        for density in [0.1, 1.0] {
            let options = ExchangeOptions { keep, density, bucket: 10_000, ..options(method) };
            ranks(3, |mut comm, stream| {
                let mut apart = made(&options, stream, &MODEL).unwrap();
                let mut exchange = made(&options, stream, &MODEL).unwrap();
                let mut flat = made(&options, stream, &[("all", 1500)]).unwrap();
                for at in 0..3 {
                    let expected = step(&mut apart, &mut comm, stream, at);
                    // Tensors begin at multiples of 16.
                    let all = gradients(stream, comm.rank(), at, &MODEL);
                    let mut values: Vec<f32> = vec![7.0; 3000];
                    let mut places = vec![];
                    let mut start = 0;
                    for tensor in &all {
                        let len = tensor.numel();
                        values[start..start + len].copy_from_slice(&tensor.to_vec().unwrap());
                        places.push((start, len));
                        start = (start + len).next_multiple_of(16);
                    }
                    let arena = upload(stream, &values);
                    let view = |&(start, len): &(usize, usize)| arena.view(start, [len]).unwrap();
                    let views: Vec<Tensor> = places.iter().map(view).collect();
                    exchange.run(&mut comm, &views.iter().collect::<Vec<_>>()).unwrap();
                    for ((start, len), expected) in places.iter().zip(&expected) {
                        values[*start..start + len].copy_from_slice(expected);
                    }
                    assert_eq!(arena.to_vec::<f32>().unwrap(), values, "{method:?} {keep:?} {at}");
                    let (sums, kept) = flattened(&mut flat, &mut comm, &all);
                    let large = expected.iter().filter(|part| part.len() >= 50);
                    assert_eq!(large.flatten().copied().collect::<Vec<_>>(), sums, "{method:?}");
                    let state = exchange.export().unwrap();
                    let parts = ["a.weight", "b.weight", "c"].map(|name| state.kept.get(name));
                    let kept = kept.kept.get("all").cloned().unwrap_or_default();
                    let of = |part: fn(&ParameterState) -> &Vec<u8>| -> Vec<u8> {
                        parts.iter().flatten().flat_map(|kept| part(kept).clone()).collect()
                    };
                    assert_eq!(of(|kept| &kept.residual), kept.residual, "{method:?} {at}");
                    assert_eq!(of(|kept| &kept.velocity), kept.velocity, "{method:?} {at}");
                }
                assert_eq!(exchange.export().unwrap(), apart.export().unwrap());
            });
        }
    }
}

/// A dense exchange of a model is one launch per rank, and one sum per bucket.
#[test]
fn a_dense_exchange_is_one_launch_per_rank() {
    let n = 3;
    let device = crate::common::open();
    let group = Communicator::threads(n, &crate::common::options()).unwrap();
    crate::common::on(&device, group, |mut comm, stream| {
        let tensors = gradients(stream, comm.rank(), 0, &MODEL);
        let options = ExchangeOptions { bucket: 10_000, ..options(Method::Dense) };
        let mut exchange = made(&options, stream, &MODEL).unwrap();
        comm.barrier().unwrap();
        let before = device.counts();
        comm.barrier().unwrap();
        exchange.run(&mut comm, &tensors.iter().collect::<Vec<_>>()).unwrap();
        comm.barrier().unwrap();
        let spent = device.counts();
        assert_eq!(spent.launches - before.launches, n as u64);
        assert_eq!(spent.allocations, before.allocations);
        comm.barrier().unwrap();
    });
}

#[test]
fn small_tensors_are_dense_and_large_ones_sparse() {
    let results = ranks(2, |mut comm, stream| {
        let mut exchange =
            made(&options(Method::Sparse(SparseMethod::TopK)), stream, &MODEL).unwrap();
        let got = step(&mut exchange, &mut comm, stream, 0);
        let state = exchange.export().unwrap();
        let kept: Vec<&str> = state.kept.keys().map(String::as_str).collect();
        assert_eq!(kept, ["a.weight", "b.weight", "c"]);
        got.iter().map(|x| x.iter().filter(|x| **x != 0.0).count()).collect::<Vec<_>>()
    });
    for nonzero in results {
        assert_eq!([nonzero[1], nonzero[3], nonzero[5]], [7, 1, 40]);
        // Two buckets, a | b and c: each of two ranks sends a tenth of each.
        assert!(nonzero[0] <= 60 && nonzero[2] + nonzero[4] <= 240, "{nonzero:?}");
        assert!(nonzero[0] >= 30 && nonzero[2] + nonzero[4] >= 120, "{nonzero:?}");
    }
}

/// Preparation changes no result, and the exchange does not allocate again.
#[test]
fn a_prepared_exchange_only_launches() {
    let sparse = [SparseMethod::TopK, SparseMethod::GTopK, SparseMethod::OkTopK { refresh: 4 }]
        .map(Method::Sparse);
    for method in sparse.into_iter().chain([Method::Dense, Method::Int8, Method::Auto]) {
        let spent = ranks(3, |mut comm, stream| {
            let options = options(method);
            let mut usual = made(&options, stream, &MODEL).unwrap();
            let mut prepared = made(&options, stream, &MODEL).unwrap();
            prepared.prepare(&comm).unwrap();
            let mut counts = vec![];
            for at in 0..6 {
                let expected = step(&mut usual, &mut comm, stream, at);
                let gradients = gradients(stream, comm.rank(), at, &MODEL);
                let all: Vec<&Tensor> = gradients.iter().collect();
                let scope = stream.device().hot_scope("exchange", ScopePolicy::Off);
                prepared.run(&mut comm, &all).unwrap();
                counts.push(scope.finish().counts);
                let got: Vec<Vec<f32>> = all.iter().map(|t| t.to_vec().unwrap()).collect();
                assert_eq!(got, expected, "{method:?} {at}");
            }
            counts
        });
        // The last rank to arrive at a sum launches for all ranks.
        for step in 0..6 {
            assert!(spent.iter().any(|counts| counts[step].launches > 0), "{method:?} {step}");
        }
        for counts in spent.into_iter().flatten() {
            assert_eq!(Counts { launches: 0, ..counts }, Counts::default(), "{method:?}");
        }
    }
}

/// Momentum correction applies to all tensors: densely summed tensors get the sum of the ranks'
/// velocities.
#[test]
fn momentum_applies_to_all_tensors() {
    let (n, factor) = (3, 0.9f32);
    // Each case with the tensors that are sent whole.
    let cases: [(Method, f64, &[usize]); 4] = [
        (Method::Dense, 0.1, &[0, 1, 2, 3, 4, 5]),
        (Method::Sparse(SparseMethod::TopK), 0.1, &[1, 3, 5]),
        (Method::Sparse(SparseMethod::TopK), 1.0, &[0, 1, 2, 3, 4, 5]),
        (Method::Auto, 1.0, &[0, 1, 2, 3, 4, 5]),
    ];
    for (method, density, whole) in cases {
        let keep = FeedbackMode::Momentum(f64::from(factor));
        let options = ExchangeOptions { density, keep, ..options(method) };
        let results = ranks(n, |mut comm, stream| {
            let mut exchange = made(&options, stream, &MODEL).unwrap();
            (0..4).map(|at| step(&mut exchange, &mut comm, stream, at)).collect::<Vec<_>>()
        });
        for &i in whole {
            let mut velocities = vec![vec![-0.0f32; MODEL[i].1]; n];
            for at in 0..4 {
                for (rank, velocity) in velocities.iter_mut().enumerate() {
                    let gradient = noise(velocity.len(), rank, at * 100 + i);
                    velocity.iter_mut().zip(gradient).for_each(|(u, g)| *u = *u * factor + g);
                }
                let sum = |j: usize| velocities.iter().map(|u| u[j]).reduce(|a, b| a + b).unwrap();
                let mean: Vec<f32> = (0..MODEL[i].1).map(|j| sum(j) / n as f32).collect();
                for result in &results {
                    assert_eq!(result[at][i], mean, "{method:?} {density} {} {at}", MODEL[i].0);
                }
            }
        }
    }
}

#[test]
fn density_warms_up() {
    ranks(1, |mut comm, stream| {
        let (warm_up, warm_up_steps) = (vec![0.5, 0.25], 2);
        let options = ExchangeOptions {
            warm_up,
            warm_up_steps,
            ..options(Method::Sparse(SparseMethod::TopK))
        };
        let mut exchange = made(&options, stream, &MODEL).unwrap();
        let densities: Vec<f64> = (0..6)
            .map(|at| {
                let density = exchange.density();
                step(&mut exchange, &mut comm, stream, at);
                density
            })
            .collect();
        assert_eq!(densities, [0.5, 0.5, 0.25, 0.25, 0.1, 0.1]);
    });
}

#[test]
fn a_table_is_measured_and_the_same_on_all_ranks() {
    let tables = ranks(2, |mut comm, stream| {
        TimingTable::measure(&mut comm, stream, &[1000, 5000], &[0.01, 0.2]).unwrap()
    });
    let TimingTable(rows) = &tables[0];
    let sizes: Vec<_> = rows.iter().map(|row| (row.ranks, row.elements, row.density)).collect();
    assert_eq!(sizes, [(2, 1000, 0.01), (2, 1000, 0.2), (2, 5000, 0.01), (2, 5000, 0.2)]);
    let times = |row: &Timing| [row.dense_ms, row.gather_ms, row.split_ms];
    assert!(rows.iter().flat_map(times).all(|ms| ms > 0.0), "{rows:?}");
    assert_eq!(tables[0], tables[1]);
}

/// The fastest algorithm of the table is used: the results have its bits.
#[test]
fn auto_uses_the_fastest_method_of_the_table() {
    let row = |[dense_ms, gather_ms, split_ms]: [f64; 3]| Timing {
        ranks: 2,
        elements: 1000,
        density: 0.1,
        dense_ms,
        gather_ms,
        split_ms,
    };
    let ways = [
        ([1.0, 2.0, 2.0], Method::Dense),
        ([2.0, 1.0, 2.0], Method::Sparse(SparseMethod::TopK)),
        ([2.0, 2.0, 1.0], Method::Sparse(SparseMethod::OkTopK { refresh: 32 })),
    ];
    let steps = |options: ExchangeOptions| {
        let of_ranks = ranks(2, |mut comm, stream| {
            let mut exchange = made(&options, stream, &MODEL).unwrap();
            (0..3).map(|at| step(&mut exchange, &mut comm, stream, at)).collect::<Vec<_>>()
        });
        assert_eq!(of_ranks[0], of_ranks[1]);
        of_ranks
    };
    let expected = ways.map(|(_, method)| steps(options(method)));
    assert!(expected[0] != expected[1] && expected[1] != expected[2] && expected[0] != expected[2]);
    for ((times, method), expected) in ways.into_iter().zip(expected) {
        let table = TimingTable(vec![row(times)]);
        assert_eq!(
            steps(ExchangeOptions { table, ..options(Method::Auto) }),
            expected,
            "{method:?}"
        );
    }
}

#[test]
fn bad_options_and_gradients_are_named() {
    ranks(1, |mut comm, stream| {
        for density in [0.0, -1.0, 1.5, f64::NAN] {
            let options = ExchangeOptions { density, ..options(Method::Auto) };
            let error = made(&options, stream, &MODEL).err().unwrap();
            refused(&error, &format!("`density` must be above 0, at most 1, got {density}"));
        }
        for (method, factor) in
            [(Method::Dense, 1.0), (Method::Auto, -0.1), (Method::Auto, f64::NAN)]
        {
            let options =
                ExchangeOptions { keep: FeedbackMode::Momentum(factor), ..options(method) };
            let error = made(&options, stream, &MODEL).err().unwrap();
            refused(&error, "`momentum` must be at least 0, below 1");
        }
        let none = made(&options(Method::Auto), stream, &[]).err().unwrap();
        refused(&none, "`Exchange::new`: `gradients` must be at least one, got none");
        let twice = made(&options(Method::Auto), stream, &[("a", 7), ("b", 7), ("a", 7)]);
        refused(&twice.err().unwrap(), "two named `a`");
        let mut exchange = made(&options(Method::Auto), stream, &MODEL).unwrap();
        let tensors = gradients(stream, 0, 0, &MODEL);
        let mut wrong: Vec<&Tensor> = tensors.iter().collect();
        wrong.swap(0, 1);
        let error = exchange.run(&mut comm, &wrong).unwrap_err();
        refused(&error, "`a.weight` must be of 300 elements, got 7");
        let error = exchange.run(&mut comm, &wrong[..3]).unwrap_err();
        refused(&error, "`Exchange::run`: `gradients` must be 6 tensors, got 3");
        let empty = ExchangeState::default();
        exchange.import(&comm, &empty).unwrap();
    });
}
