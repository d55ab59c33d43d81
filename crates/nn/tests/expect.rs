//! Every operation of a network refuses a tensor that is not what it takes, and nothing has run (V1).
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

mod common;

use common::host::{self, MINIMAL};
use meristem_device::{
    DType, Device, DeviceId, DeviceOptions, MemoryFormat, Owner, Stream, Tensor,
};
use meristem_nn::graph::Dims;
use meristem_nn::{Isa, Network, NetworkOptions, Result};

const DIMS: Dims = Dims { c: 3, h: 16, w: 16 };
const BATCH: usize = 4;

fn open() -> Device {
    let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
    Device::open(DeviceId::Cpu(0), &options).unwrap()
}

fn images(stream: &Stream, shape: [usize; 4], dtype: DType, format: MemoryFormat) -> Tensor {
    Tensor::empty_with_format(stream, shape, dtype, format, Owner::Batches).unwrap()
}

fn labels(stream: &Stream, len: usize, dtype: DType) -> Tensor {
    Tensor::zeros(stream, [len], dtype, Owner::Batches).unwrap()
}

type Operation = fn(&mut Network, &Tensor, &Tensor) -> Result<()>;

/// Every operation that takes a batch; whether it takes labels.
const OPERATIONS: [(&str, bool, Operation); 4] = [
    ("train_step", true, |network, x, y| network.train_step(x, y)),
    ("eval_step", true, |network, x, y| network.eval_step(x, y, 0)),
    ("eval_rows", true, |network, x, y| network.eval_rows(x, y, 0..1)),
    ("infer", false, |network, x, _| network.infer(x, 0).map(drop)),
];

#[test]
fn every_operation_refuses_and_nothing_has_run() {
    let (device, elsewhere) = (open(), open());
    let [own, other] = ["own", "other"].map(|name| device.stream(name));
    let foreign = elsewhere.stream("own");
    let graph = host::graph(MINIMAL, DIMS, |_, _, x| x);
    let options = NetworkOptions::new(1, 0, Isa::portable(), BATCH);
    let mut network = Network::new(&own, graph, options).unwrap();

    let (shape, last) = ([2, 3, 16, 16], MemoryFormat::ChannelsLast);
    let (x, y) = (images(&own, shape, DType::F32, last), labels(&own, 2, DType::U32));
    let bad_inputs = [
        (images(&foreign, shape, DType::F32, last), "on cpu, got another opening of cpu"),
        (images(&other, shape, DType::F32, last), "of stream `own`, got one of stream `other`"),
        (images(&own, shape, DType::U8, last), "f32, got u8"),
        (
            images(&own, [2, 1, 16, 16], DType::F32, last),
            "of shape [1..=4, 3, 16, 16], got [2, 1, 16, 16]",
        ),
        (
            images(&own, [5, 3, 16, 16], DType::F32, last),
            "of shape [1..=4, 3, 16, 16], got [5, 3, 16, 16]",
        ),
        (
            images(&own, [0, 3, 16, 16], DType::F32, last),
            "of shape [1..=4, 3, 16, 16], got [0, 3, 16, 16]",
        ),
        (
            images(&own, shape, DType::F32, MemoryFormat::Contiguous),
            "channels last, got contiguous",
        ),
    ];
    let bad_targets = [
        (labels(&foreign, 2, DType::U32), "on cpu, got another opening of cpu"),
        (labels(&other, 2, DType::U32), "of stream `own`, got one of stream `other`"),
        (labels(&own, 2, DType::I64), "u32, got i64"),
        (labels(&own, 3, DType::U32), "of shape [2], got [3]"),
    ];
    device.synchronize().unwrap();
    let mut refused = |operation: Operation, x: &Tensor, y: &Tensor, words: String| {
        let state = || (device.counts(), device.memory(), format!("{:?}", own.record()));
        let before = state();
        let error = operation(&mut network, x, y).unwrap_err().to_string();
        assert!(error.starts_with(&words), "expected {words}\ngot      {error}");
        assert_eq!(state(), before, "{words}");
    };
    for (name, takes_labels, operation) in OPERATIONS {
        for (bad, words) in &bad_inputs {
            refused(operation, bad, &y, format!("`{name}`: `inputs` must be {words}"));
        }
        for (bad, words) in bad_targets.iter().filter(|_| takes_labels) {
            refused(operation, &x, bad, format!("`{name}`: `targets` must be {words}"));
        }
    }
    // A stream whose kernel panicked takes nothing more.
    own.launch("bad").run(|_| panic!("spoilt")).unwrap();
    assert!(own.synchronize().is_err());
    for (_, _, operation) in OPERATIONS {
        refused(operation, &x, &y, "kernel `bad` on stream `own`".into());
    }
}
