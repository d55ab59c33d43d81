//! Every operation of a network refuses a tensor that does not meet its requirements, before
//! anything runs (V1).

use std::sync::Arc;

use crate::common::host::{self, MINIMAL};
use meristem_device::{
    DType, Device, DeviceId, DeviceOptions, Error as DeviceError, MemoryFormat, Owner, Stream,
    Tensor,
};
use meristem_nn::graph::{Dims, GraphBuilder};
use meristem_nn::kernels::ppo::{PpoHead, PpoLoss, report_len};
use meristem_nn::kernels::sample::Sampler;
use meristem_nn::ops::ppo::PpoPass;
use meristem_nn::plan::{GroupMemory, PlanMemory};
use meristem_nn::{
    Error, Isa, Network, NetworkOptions, Plan, PlanMode, PlanOptions, Result, SequenceNetwork,
    SequenceOptions, SequenceRun, ValueType,
};

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

/// Every operation with a batch: name, whether it takes labels, call.
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
        let Err(Error::Device(error)) = operation(&mut network, x, y) else { panic!("{words}") };
        let text = error.to_string();
        assert!(text.starts_with(&words), "expected {words}\ngot      {text}");
        assert_eq!(state(), before, "{words}");
        error
    };
    for (name, takes_labels, operation) in OPERATIONS {
        for (bad, words) in &bad_inputs {
            let error = refused(operation, bad, &y, format!("`{name}`: `inputs` must be {words}"));
            assert!(matches!(error, DeviceError::Mismatch { .. }), "{error:?}");
        }
        for (bad, words) in bad_targets.iter().filter(|_| takes_labels) {
            let error = refused(operation, &x, bad, format!("`{name}`: `targets` must be {words}"));
            assert!(matches!(error, DeviceError::Mismatch { .. }), "{error:?}");
        }
    }
    // After a panic, the stream refuses all work.
    own.launch("bad").run(|_| panic!("spoilt")).unwrap();
    assert!(matches!(own.synchronize(), Err(DeviceError::KernelPanicked { .. })));
    for (_, _, operation) in OPERATIONS {
        let error = refused(operation, &x, &y, "kernel `bad` on stream `own`".into());
        assert!(matches!(error, DeviceError::KernelPanicked { .. }), "{error:?}");
    }
}

#[test]
fn a_batch_that_no_memory_can_hold_is_refused() {
    let graph = host::bare(MINIMAL, DIMS);
    for batch in [usize::MAX, 1 << 62, 1 << 50] {
        for mode in [PlanMode::Infer, PlanMode::Train, PlanMode::Evaluate] {
            let refused = Plan::compile(&graph, PlanOptions::new(batch, mode)).unwrap_err();
            assert!(matches!(refused, Error::BatchTooLarge { .. }), "{refused:?}");
            let words =
                format!("a batch of {batch} samples needs more memory than can be addressed");
            assert!(refused.to_string().starts_with(&words), "{refused}");
        }
    }
}

#[test]
fn memory_of_another_form_is_refused_and_nothing_has_run() {
    let mut b = GraphBuilder::new(Dims { c: 2, h: 1, w: 1 }, host::SGD);
    let y = b.linear(b.input(), "fc", 3, true, None).unwrap();
    let plan = Plan::compile(&b.finish(y).unwrap(), PlanOptions::new(4, PlanMode::Infer)).unwrap();
    let size = plan.layout().groups[0];
    let run = |inputs: usize, values: usize| {
        let (mut arena, x) = (vec![7.0; plan.arena_len()], vec![0.0; inputs]);
        let (mut values, mut momentum) = (vec![0.0; values], vec![0.0; size.moments]);
        let (mut state, mut counters) = (vec![0.0; size.running_stats], vec![0; size.counters]);
        let mut memory = PlanMemory::new(&mut arena, &[&x], &[]);
        memory.push_group(GroupMemory {
            values: &mut values,
            optimiser_state: &mut momentum,
            running_stats: &mut state,
            counters: &mut counters,
        });
        let result = plan.run(Isa::portable(), &mut memory);
        (result, arena)
    };
    assert!(run(8, size.values).0.is_ok());
    for (inputs, values) in [(7, size.values), (16, size.values), (8, size.values + 1), (8, 0)] {
        let (result, arena) = run(inputs, values);
        assert!(matches!(result, Err(Error::PlanMemory { .. })), "{inputs}, {values}");
        assert!(arena.iter().all(|value| *value == 7.0));
    }
}

/// `Plan::run` leaves its results in the arena, which plans that end in a loss, a score or a draw
/// do not.
#[test]
fn a_plan_is_run_only_in_a_mode_whose_results_stay_in_the_arena() {
    let mut b = GraphBuilder::new(Dims { c: 2, h: 1, w: 1 }, host::SGD);
    let y = b.linear(b.input(), "fc", 5, true, None).unwrap();
    let graph = b.finish(y).unwrap();
    let head = PpoHead {
        choices: 2,
        used_by: 3,
        floor: 0.0,
        entropy_coefficient: 0.0,
        entropy_floor: 0.0,
    };
    let sampler = Sampler { heads: vec![head.clone(), head], seed: 1, greedy: false };
    let draw = PlanMode::Draw(Arc::new(sampler));
    for mode in [draw, PlanMode::Evaluate, PlanMode::Train, PlanMode::TrainByGradient] {
        let words =
            format!("plan: mode: expected Infer or Gradient, got a plan compiled for {mode:?}");
        let plan = Plan::compile(&graph, PlanOptions::new(4, mode)).unwrap();
        let refused = plan.run(Isa::portable(), &mut PlanMemory::default()).unwrap_err();
        assert!(matches!(refused, Error::PlanMemory { what: "mode", .. }), "{refused:?}");
        assert_eq!(refused.to_string(), words);
    }
}

/// Data of an objective with a wrong type, length or number of tensors is named in an error before
/// anything runs.
#[test]
fn data_that_an_objective_does_not_take_is_refused() {
    let device = open();
    let stream = device.stream("policy");
    let mut b = GraphBuilder::new(Dims { c: 2, h: 1, w: 1 }, host::SGD);
    let y = b.linear(b.input(), "fc", 4, true, None).unwrap();
    let graph = Arc::new(b.finish(y).unwrap());
    let options = SequenceOptions {
        seed: 1,
        isa: Isa::detect(),
        owner: Owner::Policy,
        values: ValueType::F32,
    };
    let mut network = SequenceNetwork::new(&stream, graph, options).unwrap();
    let head = PpoHead {
        choices: 3,
        used_by: 7,
        floor: 0.0,
        entropy_coefficient: 0.0,
        entropy_floor: 0.0,
    };
    let loss = PpoLoss {
        heads: vec![head],
        clip: 0.2,
        value_coefficient: 0.5,
        entropy_floor_coefficient: 0.0,
    };
    let loss = Arc::new(loss);
    let zeros = |len: usize, dtype| Tensor::zeros(&stream, [len], dtype, Owner::Policy).unwrap();
    let x = Tensor::zeros(&stream, [5, 2], DType::F32, Owner::Policy).unwrap();
    let (choices, legal) = (zeros(5, DType::U32), zeros(15, DType::U8));
    let (row, other) = (zeros(5, DType::F32), zeros(5, DType::F32));
    let results = [zeros(5, DType::F32), zeros(report_len(1), DType::F64)];
    let results: Vec<&Tensor> = results.iter().collect();
    let (long, floats) = (zeros(18, DType::U8), zeros(5, DType::F32));
    let mut differentiate = |data: &[&Tensor]| {
        let run = SequenceRun { steps: 1, inputs: &[&x] };
        network.differentiate(&run, &loss, PpoPass::First, data, &results)
    };
    differentiate(&[&choices, &legal, &row, &other]).unwrap();
    device.synchronize().unwrap();
    let launches = device.counts().launches;
    for data in [
        vec![&floats, &legal, &row, &other],
        vec![&choices, &long, &row, &other],
        vec![&choices, &legal, &row],
        vec![&choices, &legal, &choices, &other],
    ] {
        let refused = differentiate(&data).unwrap_err();
        assert!(matches!(refused, Error::PlanMemory { .. }), "{refused}");
    }
    assert_eq!(device.counts().launches, launches);
}
