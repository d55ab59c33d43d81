//! Exchanges on a GPU, or on the stand-in driver, have the same bits as on the CPU.

use half::bf16;
use meristem_comm::{
    Communicator, Exchange, ExchangeOptions, FeedbackMode, Method, Reduction, SparseMethod,
    SumElement, TopKStorage, topk, topk_all_gather,
};
use meristem_device::{Counts, DeviceId, Stream, Tensor};
use proptest::prelude::*;

use crate::common::{nan, noise, on, only_exchange, open_on, options, upload};

/// Kind of gradients. The number of equal magnitudes decides how a selection proceeds.
#[derive(Debug, Clone, Copy)]
enum Values {
    Noise,
    /// Few distinct magnitudes, including zeros of both signs.
    Ties,
    /// Includes infinities, and NaN with several payloads.
    Special,
    /// Mostly zero.
    Rare,
    /// All equal.
    Equal,
}

fn values_of<T: SumElement>(kind: Values, len: usize, (rank, step): (usize, usize)) -> Vec<T> {
    let number = |(i, x): (usize, f32)| {
        let x = f64::from(x);
        match kind {
            Values::Noise => x,
            Values::Ties => (x * 2.0).round() * if i % 2 == 0 { 1.0 } else { -1.0 },
            Values::Special if i % 29 == rank => [f64::INFINITY, -0.0][i % 2],
            Values::Special => x,
            Values::Rare => {
                if i % 101 == 7 {
                    x
                } else {
                    -0.0
                }
            }
            Values::Equal => -1.5,
        }
    };
    let noise = noise(len, rank, step).into_iter().enumerate().map(number).map(T::from_f64);
    let mut values: Vec<T> = noise.collect();
    if let Values::Special = kind {
        // A GPU gives other payloads than a processor, and none may matter.
        values.iter_mut().enumerate().skip(rank).step_by(87).for_each(|(i, x)| *x = nan(i));
    }
    values
}

/// Bits, with one pattern for all NaNs: the sum of two NaNs is unspecified.
fn bits<T: SumElement>(values: &[T]) -> Vec<Vec<u8>> {
    let bits = |value: &T| match value.partial_cmp(value) {
        Some(_) => bytemuck::bytes_of(value).to_vec(),
        None => vec![],
    };
    values.iter().map(bits).collect()
}

/// An exchange of several tensors in one buffer, with gaps between some of them.
#[derive(Debug, Clone)]
struct Case {
    ranks: usize,
    lens: Vec<usize>,
    options: ExchangeOptions,
    values: Values,
    /// Whether exchanges make the dense sums.
    only_exchange: bool,
}

const STEPS: usize = 3;

/// Results and state of one rank after each step.
fn steps<T: SumElement>(
    case: &Case,
    comm: &mut Communicator,
    stream: &Stream,
) -> Vec<Vec<Vec<u8>>> {
    let gap = |i: usize| i % 3;
    let all = case.lens.iter().enumerate().map(|(i, len)| len + gap(i)).sum();
    let buffer = upload(stream, &vec![T::ZERO; all]);
    let mut start = 0;
    let windows = case.lens.iter().enumerate().map(|(i, len)| {
        let window = buffer.view(start, [*len]).unwrap();
        start += len + gap(i);
        window
    });
    let windows: Vec<Tensor> = windows.collect();
    let names: Vec<String> = (0..windows.len()).map(|i| i.to_string()).collect();
    let named: Vec<_> = names.iter().map(String::as_str).zip(&windows).collect();
    let mut exchange = Exchange::new(&case.options, &named).unwrap();
    let refs: Vec<&Tensor> = windows.iter().collect();
    let mut seen = Vec::new();
    for step in 0..STEPS {
        buffer.copy_from_slice(&values_of::<T>(case.values, all, (comm.rank(), step))).unwrap();
        exchange.run(comm, &refs).unwrap();
        seen.push(bits(&buffer.to_vec::<T>().unwrap()));
        for kept in exchange.export().unwrap().kept.into_values() {
            for kept in [kept.residual, kept.velocity] {
                let kept = kept.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned);
                seen.push(bits(&kept.collect::<Vec<T>>()));
            }
            seen.push(vec![kept.split]);
        }
    }
    seen
}

fn check<T: SumElement>(case: &Case) {
    let of = |id| {
        let group = if case.only_exchange {
            only_exchange(case.ranks)
        } else {
            Communicator::threads(case.ranks, &options()).unwrap()
        };
        on(&open_on(id), group, |mut comm, stream| steps::<T>(case, &mut comm, stream))
    };
    let (gpu, cpu) = (of(DeviceId::Cuda(0)), of(DeviceId::Cpu(0)));
    for (rank, (gpu, cpu)) in gpu.iter().zip(&cpu).enumerate() {
        for (i, (gpu, cpu)) in gpu.iter().zip(cpu).enumerate() {
            let differ = gpu.iter().zip(cpu).position(|(gpu, cpu)| gpu != cpu);
            assert_eq!(differ, None, "rank {rank}, part {i}: {case:?}");
        }
    }
    assert!(gpu == cpu, "{case:?}");
}

fn any_method() -> impl Strategy<Value = Method> {
    prop_oneof![
        1 => Just(Method::Dense),
        2 => Just(Method::Sparse(SparseMethod::TopK)),
        2 => Just(Method::Sparse(SparseMethod::GTopK)),
        3 => (1u64..4).prop_map(|refresh| Method::Sparse(SparseMethod::OkTopK { refresh })),
        2 => Just(Method::Int8),
    ]
}

fn any_values() -> impl Strategy<Value = Values> {
    let kinds = [Values::Noise, Values::Ties, Values::Special, Values::Rare, Values::Equal];
    prop::sample::select(kinds.to_vec())
}

prop_compose! {
    fn any_case()(
        ranks in 1usize..6,
        lens in prop::collection::vec(prop_oneof![0usize..40, 1000usize..3000], 1..6),
        (method, values) in (any_method(), any_values()),
        keep in prop::sample::select(vec![
            FeedbackMode::Nothing,
            FeedbackMode::Residual,
            FeedbackMode::Momentum(0.875),
        ]),
        density in prop::sample::select(vec![0.001, 0.03, 0.4, 1.0]),
        (mean, only_exchange) in any::<(bool, bool)>(),
    ) -> Case {
        let reduction = if mean { Reduction::Mean } else { Reduction::Sum };
        let keep = match (method, keep) {
            (Method::Int8, FeedbackMode::Nothing) => FeedbackMode::Residual,
            _ => keep,
        };
        let options = ExchangeOptions {
            method, density, keep, reduction, small: 20, bucket: 4000, ..ExchangeOptions::default()
        };
        Case { ranks, lens, options, values, only_exchange }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    #[ignore = "needs a GPU or its stand-in"]
    fn exchanges_have_the_same_bits_on_gpu_and_cpu(case in any_case(), dtype in 0..3) {
        match dtype {
            _ if case.options.method == Method::Int8 => check::<f32>(&case),
            0 => check::<f32>(&case),
            1 => check::<f64>(&case),
            _ => check::<bf16>(&case),
        }
    }
}

/// More ranks than sources of a call, in and out of place, in rank order and by exchanges.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn sums_of_many_ranks_have_the_same_bits() {
    for (ranks, only_exchange) in [(8, false), (9, false), (17, false), (10, true)] {
        let options = ExchangeOptions { reduction: Reduction::Mean, ..ExchangeOptions::default() };
        let lens = vec![1500, 1, 333];
        let case = Case { ranks, lens, options, values: Values::Noise, only_exchange };
        check::<f32>(&case);
        check::<bf16>(&case);
    }
}

/// Selections with too little, just enough and widely spread candidates.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn selections_of_large_tensors_have_the_same_bits() {
    for (values, len, k) in [
        (Values::Noise, 70_001, 700),
        (Values::Ties, 70_001, 700),
        (Values::Equal, 70_001, 69_000),
        (Values::Rare, 150_000, 3000),
        (Values::Noise, 150_000, 1),
    ] {
        let selected = |id| {
            let stream = open_on(id).stream("s");
            let x = upload(&stream, &values_of::<f32>(values, len, (0, 0)));
            let mut storage = TopKStorage::new(&x, 1, k).unwrap();
            let picked = topk(&x, &mut storage, k).unwrap();
            (picked.indices.to_vec::<u32>().unwrap(), bits(&picked.values.to_vec::<f32>().unwrap()))
        };
        let (gpu, cpu) = (selected(DeviceId::Cuda(0)), selected(DeviceId::Cpu(0)));
        assert!(gpu == cpu, "{k} of {len} {values:?}");
    }
}

/// After its storage is allocated, a selection does not wait, copy or allocate.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_selection_only_launches() {
    let device = open_on(DeviceId::Cuda(0));
    let stream = device.stream("s");
    let x = upload(&stream, &noise(5000, 0, 0));
    let mut comm = Communicator::threads(1, &options()).unwrap().remove(0);
    let mut storage = TopKStorage::new(&x, 1, 50).unwrap();
    let before = device.counts();
    topk_all_gather(&mut comm, &x, &mut storage, None, 50).unwrap();
    assert_eq!(device.counts(), Counts { launches: before.launches + 1, ..before });
}
