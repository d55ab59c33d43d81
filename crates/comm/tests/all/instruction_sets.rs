//! Results do not depend on the instruction set of the kernels.

use meristem_comm::{Communicator, FeedbackMode, Reduction, SparseMethod, SparseSum, SumElement};
use meristem_device::{Device, DeviceId, DeviceOptions, Isa, Stream, Tensor, read_back};

use crate::common::{noise, on, only_exchange, options, upload};

/// Results of every rank after `run`, which must be equal for every instruction set of this
/// machine.
fn same_on_all<R>(
    group: impl Fn() -> Vec<Communicator>,
    run: impl Fn(&mut Communicator, &Stream) -> R + Sync,
) where
    R: Send + PartialEq,
{
    let results = Isa::available().into_iter().map(|isa| {
        let options = DeviceOptions { threads: 2, isa: Some(isa), ..DeviceOptions::default() };
        let device = Device::open(DeviceId::Cpu(0), &options).unwrap();
        (isa, on(&device, group(), |mut comm, stream| run(&mut comm, stream)))
    });
    let results: Vec<_> = results.collect();
    for (isa, result) in &results {
        assert!(*result == results[0].1, "{isa} and {} differ", results[0].0);
    }
}

fn threads(n: usize) -> Vec<Communicator> {
    Communicator::threads(n, &options()).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u8> {
    read_back(&[tensor]).unwrap().remove(0)
}

fn dense<T: SumElement>(group: impl Fn() -> Vec<Communicator>, len: usize) {
    same_on_all(group, |comm, stream| {
        let values = noise(len, comm.rank(), 0);
        let values: Vec<T> = values.iter().map(|x| T::from_f64(f64::from(*x))).collect();
        let x = upload(stream, &values);
        comm.all_reduce(&x, Reduction::Mean).unwrap();
        bits(&x)
    });
}

#[test]
fn dense_sums() {
    for len in [1, 1003, 20_000] {
        dense::<f32>(|| threads(3), len);
        dense::<half::bf16>(|| threads(3), len);
        dense::<f64>(|| only_exchange(3), len);
        dense::<f32>(|| only_exchange(4), len);
    }
}

/// The longest results exceed the size from which writes bypass the caches.
#[test]
fn sparse_sums() {
    let ok_topk = SparseMethod::OkTopK { refresh: 2 };
    for (sparse, n, len, k) in [
        (SparseMethod::TopK, 3, 5003, 50),
        (SparseMethod::GTopK, 4, 5003, 50),
        (ok_topk, 3, 5003, 50),
        (SparseMethod::TopK, 2, (4 << 20) + 5, 4000),
    ] {
        let keep = FeedbackMode::Momentum(0.9);
        same_on_all(
            || threads(n),
            |comm, stream| {
                let x = upload(stream, &noise(len, comm.rank(), 0));
                let mut sum = SparseSum::new(&x, sparse, keep).unwrap();
                let step = |step| {
                    let x = upload(stream, &noise(len, comm.rank(), step));
                    sum.run(comm, &x, &x, k, Reduction::Mean).unwrap();
                    (bits(&x), bits(sum.residual().unwrap()))
                };
                (0..3).map(step).collect::<Vec<_>>()
            },
        );
    }
}
