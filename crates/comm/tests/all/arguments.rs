//! V1, X10: every public operation rejects a tensor of the wrong format, element type, shape,
//! device or stream before any work. The typed error has the operation, the argument, the expected
//! value and the actual value.

use meristem_comm::{
    CollectiveCall, Communicator, Error, Exchange, ExchangeOptions, FeedbackMode, Method, Parcel,
    Reduction, Result, Spans, SparseMethod, SparseSum, Sum, SumOrder, TimingTable, TopKStorage,
    topk, topk_all_gather,
};
use meristem_device::{DType, Device, Element, MemoryFormat, Owner, Stream, Tensor};

use crate::common::{open, options, upload};

/// Tensors that do not fit a tensor of 2 x 3 x 4 x 5 f32 on stream `a`.
struct World {
    device: Device,
    a: Stream,
    b: Stream,
    far: Stream,
    comm: Communicator,
}

const SHAPE: [usize; 4] = [2, 3, 4, 5];
const LEN: usize = 120;

impl World {
    fn new() -> World {
        let device = open();
        let (a, b, far) = (device.stream("a"), device.stream("b"), open().stream("a"));
        World { device, a, b, far, comm: Communicator::threads(1, &options()).unwrap().remove(0) }
    }

    fn make(&self, stream: &Stream, dtype: DType, format: MemoryFormat) -> Tensor {
        Tensor::zeros_with_format(stream, SHAPE, dtype, format, Owner::Other).unwrap()
    }

    fn good(&self) -> Tensor {
        self.make(&self.a, DType::F32, MemoryFormat::Contiguous)
    }

    /// Each tensor with words of the expected error.
    fn wrong(&self) -> Vec<(Tensor, &'static str)> {
        let contiguous = MemoryFormat::Contiguous;
        let short = Tensor::zeros(&self.a, [2, 3, 4, 4], DType::F32, Owner::Other).unwrap();
        vec![
            (
                self.make(&self.a, DType::F32, MemoryFormat::ChannelsLast),
                "must be contiguous, got channels last",
            ),
            (self.make(&self.a, DType::F64, contiguous), "must be f32, got f64"),
            (short, ", got "),
            (self.make(&self.b, DType::F32, contiguous), "of stream `a`, got one of stream `b`"),
            (self.make(&self.far, DType::F32, contiguous), ", got another opening of c"),
        ]
    }

    /// Makes a call that must be rejected before any launch or allocation.
    fn refused<T>(
        &mut self,
        (operation, argument): (&str, &str),
        words: &str,
        call: impl FnOnce(&mut Communicator) -> Result<T>,
    ) {
        let before = self.device.counts();
        let error = call(&mut self.comm).err().unwrap_or_else(|| panic!("{operation}: {words}"));
        assert_eq!(self.device.counts(), before, "{operation}: something has run");
        let text = error.to_string();
        let Error::BadArgument { operation: o, argument: a, expected, got } = error else {
            panic!("{text}")
        };
        assert_eq!((o, &*a), (operation, argument), "{text}");
        assert!(!expected.is_empty() && !got.is_empty() && text.contains(words), "{text}: {words}");
    }
}

fn sum<'a>(input: &'a Tensor, output: &'a Tensor) -> Sum<'a> {
    Sum { input, output, reduction: Reduction::Sum, order: SumOrder::Rank }
}

#[test]
fn sums_reject_wrong_arguments() {
    let mut w = World::new();
    let x = w.good();
    for (bad, words) in w.wrong() {
        w.refused(("all_reduce", "output"), words, |comm| comm.all_reduce_with(&sum(&x, &bad)));
        for (sparse, operation) in [
            (SparseMethod::TopK, "topk_all_reduce"),
            (SparseMethod::GTopK, "gtopk"),
            (SparseMethod::OkTopK { refresh: 1 }, "ok_topk"),
        ] {
            let mut made = SparseSum::new(&x, sparse, FeedbackMode::Residual).unwrap();
            w.refused((operation, "output"), words, |comm| {
                made.run(comm, &x, &bad, 3, Reduction::Sum)
            });
            // An input of another format is valid if the output has the same format.
            if bad.format() == MemoryFormat::Contiguous {
                w.refused((operation, "input"), words, |comm| {
                    made.run(comm, &bad, &bad, 3, Reduction::Sum)
                });
            }
            w.refused((operation, "k"), "at most 120", |comm| {
                made.run(comm, &x, &x, 121, Reduction::Sum)
            });
        }
    }
    let bytes = w.make(&w.a, DType::U8, MemoryFormat::Contiguous);
    let words = "f32, f64 or bf16, got u8";
    w.refused(("all_reduce", "input"), words, |comm| comm.all_reduce(&bytes, Reduction::Sum));
    w.refused(("gtopk", "like"), words, |_| {
        SparseSum::new(&bytes, SparseMethod::GTopK, FeedbackMode::Nothing)
    });
    let momentum = FeedbackMode::Momentum(1.0);
    w.refused(("gtopk", "momentum"), "below 1", |_| {
        SparseSum::new(&x, SparseMethod::GTopK, momentum)
    });
    // A part of the input's memory.
    let (input, output) = (x.view(0, [60]).unwrap(), x.view(30, [60]).unwrap());
    w.refused(("all_reduce", "output"), "separate memory", |comm| {
        comm.all_reduce_with(&sum(&input, &output))
    });
}

#[test]
fn other_collectives_reject_wrong_arguments() {
    let mut w = World::new();
    let x = w.good();
    for (bad, words) in w.wrong() {
        w.refused(("all_gather", "output"), words, |comm| comm.all_gather(&x, &bad));
    }
    let last = w.make(&w.a, DType::F32, MemoryFormat::ChannelsLast);
    w.refused(("all_gather", "output"), "must be channels last, got contiguous", |comm| {
        comm.all_gather(&last, &x)
    });
    w.refused(("broadcast", "root"), "below 1", |comm| comm.broadcast(&x, 1));
    w.refused(("Communicator::threads", "ranks"), "at least 1", |_| {
        Communicator::threads(0, &options())
    });
    let stream = w.a.clone();
    w.refused(("TimingTable::measure", "density"), "at most 1", |comm| {
        TimingTable::measure(comm, &stream, &[10], &[0.5, 1.5])
    });
    w.refused(("TimingTable::measure", "input"), "at most 4294967295", |comm| {
        TimingTable::measure(comm, &stream, &[1 << 33], &[0.5])
    });
    let far = w.make(&w.b, DType::F32, MemoryFormat::Contiguous);
    w.refused(("test", "tensors[1]"), "of stream `a`", |_| Spans::new("test", &[&x, &far]));
    w.refused(("test", "tensors"), "at least one", |_| Spans::new("test", &[]));
    let spans = Spans::try_from(&x).unwrap();
    w.refused(("Spans::window", "range"), "120 elements", |_| spans.window(100..121));
}

#[test]
fn transports_reject_parcels_to_wrong_ranks_and_streams() {
    let mut w = World::new();
    let (x, far) = (w.good(), w.make(&w.b, DType::F32, MemoryFormat::Contiguous));
    let stream = w.a.clone();
    for (peer, tensor, argument, words) in [
        (0, &x, "sends[0].peer", "another rank, below 2, got 0"),
        (2, &x, "sends[0].peer", "another rank, below 2, got 2"),
        (1, &far, "sends[0]", "of stream `a`"),
    ] {
        let mut pair = Communicator::threads(2, &options()).unwrap();
        let mut link = pair.remove(0).into_transport();
        let parcels = [Parcel::new(peer, tensor).unwrap()];
        w.refused(("test", argument), words, |_| {
            link.exchange(&CollectiveCall::new("test"), &stream, &parcels, &[])
        });
    }
}

#[test]
fn selections_reject_wrong_arguments() {
    let mut w = World::new();
    let x = w.good();
    let mut storage = TopKStorage::new(&x, 1, 10).unwrap();
    for (bad, words) in w.wrong() {
        w.refused(("topk", "tensor"), words, |_| topk(&bad, &mut storage, 3));
        let all = &mut storage;
        w.refused(("topk_all_gather", "tensor"), words, |comm| {
            topk_all_gather(comm, &bad, all, None, 3)
        });
    }
    w.refused(("topk", "k"), "at most 10", |_| topk(&x, &mut storage, 11));
    w.refused(("topk", "k"), "at most 120", |_| topk(&x, &mut storage, 121));
    fn made<T: Element>(stream: &Stream, len: usize) -> Tensor {
        upload(stream, &vec![T::zeroed(); len])
    }
    let (a, b, far) = (w.a.clone(), w.b.clone(), w.far.clone());
    for (indices, words) in [
        (made::<i64>(&a, 3), "must be u32, got i64"),
        (made::<u32>(&a, 4), "of shape [3], got [4]"),
        (made::<u32>(&b, 3), "of stream `a`"),
        (made::<u32>(&far, 3), ", got another opening of c"),
    ] {
        let all = &mut storage;
        w.refused(("topk_all_gather", "indices"), words, |comm| {
            topk_all_gather(comm, &x, all, Some(&indices), 3)
        });
    }
    let mut of_two = TopKStorage::new(&x, 2, 10).unwrap();
    w.refused(("topk_all_gather", "storage"), "made for 1 ranks, got 2", |comm| {
        topk_all_gather(comm, &x, &mut of_two, None, 3)
    });
    let bytes = w.make(&w.a, DType::U8, MemoryFormat::Contiguous);
    w.refused(("TopKStorage::new", "like"), "got u8", |_| TopKStorage::new(&bytes, 1, 1));
    w.refused(("TopKStorage::new", "ranks"), "at least 1", |_| TopKStorage::new(&x, 0, 1));
    w.refused(("TopKStorage::new", "k"), "at most 120", |_| TopKStorage::new(&x, 1, 121));
}

#[test]
fn exchanges_reject_wrong_arguments() {
    let mut w = World::new();
    let (x, small) = (w.good(), upload(&w.a, &[1.0f32; 3]));
    for method in [Method::Dense, Method::Sparse(SparseMethod::TopK), Method::Auto] {
        let options = ExchangeOptions { method, small: 10, ..ExchangeOptions::default() };
        let mut made = Exchange::new(&options, &[("x", &x), ("small", &small)]).unwrap();
        for (bad, words) in w.wrong() {
            w.refused(("Exchange::run", "x"), words, |comm| made.run(comm, &[&bad, &small]));
        }
        w.refused(("Exchange::run", "gradients"), "2 tensors, got 1", |comm| made.run(comm, &[&x]));
        let far = upload(&w.b, &[1.0f32; 3]);
        w.refused(("Exchange::new", "far"), "of stream `a`", |_| {
            Exchange::new(&options, &[("x", &x), ("far", &far)])
        });
        let bytes = upload(&w.a, &[1u8]);
        w.refused(("Exchange::new", "bytes"), "got u8", |_| {
            Exchange::new(&options, &[("bytes", &bytes)])
        });
        w.refused(("Exchange::new", "gradients"), "at least one", |_| Exchange::new(&options, &[]));
        let mut state = made.export().unwrap();
        state.kept.entry("x".into()).or_default().residual = vec![0; 7];
        if method != Method::Dense {
            let words = format!("must be {} bytes", 4 * LEN);
            w.refused(("Exchange::import", "x"), &words, |comm| made.import(comm, &state));
        }
    }
    let density = ExchangeOptions { density: 2.0, ..ExchangeOptions::default() };
    w.refused(("Exchange::new", "density"), "at most 1", |_| Exchange::new(&density, &[("x", &x)]));
}
