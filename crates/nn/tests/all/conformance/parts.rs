//! Operations in parts: the bits do not depend on the worker that runs a part, and a batch in
//! several parts is as exact as a batch in one part.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use meristem_device::{Args, Device, DeviceId, DeviceOptions, in_parts};
use meristem_nn::graph::{AdamConfig, Optimiser};
use meristem_nn::kernels::conv::winograd::TileSize;
use meristem_nn::kernels::conv::{self, ConvInputs, ConvShape, ParamGrads};
use meristem_nn::kernels::lstm::LstmShape;
use meristem_nn::kernels::norm::Activation;
use meristem_nn::kernels::{BatchShape, GradOut};
use meristem_nn::ops::conv::{ConvOp, ConvProduct};
use meristem_nn::ops::norm::BatchNorm;
use meristem_nn::ops::{ElementwiseOp, LstmOp, NormOp, OpBackend, OptimOp, PlanTarget};
use meristem_nn::{Isa, ValueType};

use super::case::{Case, Data, Random, case};
use super::cases::packed_weights;
use super::chain_cases;
use super::training::numbers;

/// Several parts with a smaller last part; whole and partial blocks of images.
fn products() -> Vec<ConvProduct> {
    let shape = |[batch, side, in_c, out_c, groups]: [usize; 5]| ConvShape {
        batch,
        in_c,
        in_h: side,
        in_w: side,
        out_c,
        kernel: [3; 2],
        stride: [1; 2],
        padding: [1; 2],
        groups,
        dilation: [1; 2],
    };
    let direct = [[91, 32, 3, 8, 1], [131, 8, 16, 17, 1], [67, 24, 24, 16, 4]];
    let tiles = [
        ([70, 12, 16, 16, 1], TileSize::Four),
        ([62, 14, 16, 16, 1], TileSize::Two),
        // Two tiles in a register, and a gradient of weights in two parts of few tiles.
        ([70, 16, 8, 16, 1], TileSize::Four),
        ([131, 4, 32, 64, 1], TileSize::Four),
    ];
    let direct = direct.map(|of| ConvProduct::f32(shape(of)));
    let tiled =
        tiles.map(|(of, tile)| ConvProduct { tiles: Some(tile), ..ConvProduct::f32(shape(of)) });
    [&direct[..], &tiled].concat()
}

/// Whole numbers from −2 to 2; sums of their products are exact in any order.
pub(super) fn whole(seed: u64, len: usize) -> Vec<f32> {
    let mut random = Random(seed);
    (0..len).map(|_| (2.5 * random.unit()).trunc()).collect()
}

fn cases() -> Vec<Case> {
    let mut cases = vec![];
    for product in products() {
        let weights = packed_weights(&product.shape, product.shape.weight_len());
        cases.push(case(ConvOp::Forward(product), 0, 0.0).reading(1, weights.clone()));
        cases.push(case(ConvOp::ForwardWithStats(product), 0, 0.0).reading(1, weights.clone()));
        cases.push(case(ConvOp::WeightGradient(product), 0, 0.0));
        let data = ConvOp::DataGradient { product, accumulate: true };
        cases.push(case(data, 0, 0.0).reading(1, weights.clone()));
    }
    cases.extend(in_columns());
    cases.extend(of_many_elements());
    cases.extend(chain_cases::in_parts());
    let shape = BatchShape { batch: 51, h: 31, w: 32, c: 16 };
    cases.push(case(NormOp::Statistics(shape), 0, 0.0));
    for pool in [false, true] {
        let norm = BatchNorm { shape, eps: 1e-5, act: Activation::Relu, pool };
        let variances = Data::F32(vec![0.7; shape.c]);
        cases.push(case(NormOp::Forward(norm), 0, 0.0).reading(2, variances.clone()));
        let codes = Data::U8(vec![2; if pool { norm.output().len() } else { 0 }]);
        let sums = case(NormOp::GradientSums(norm), 0, 0.0).reading(2, variances);
        cases.push(sums.reading(6, codes.clone()));
        let gradient = NormOp::InputGradient { norm, accumulate: true };
        cases.push(case(gradient, 0, 0.0).reading(5, codes));
    }
    cases
}

/// Wide products of few rows, which are divided by columns; the last part is smaller.
fn in_columns() -> Vec<Case> {
    let product = ConvProduct::f32(ConvShape::linear(40, 256, 300));
    let weights = packed_weights(&product.shape, product.shape.weight_len());
    let shape = LstmShape { steps: 4, sequences: 8, inputs: 96, hidden: 328 };
    let keep = Data::F32((0..shape.rows()).map(|row| f32::from(u8::from(row != 9))).collect());
    let [ih, hh] = [shape.input_product(), shape.state_product()]
        .map(|of| packed_weights(&of, of.weight_len()));
    vec![
        case(ConvOp::Forward(product), 0, 0.0).reading(1, weights.clone()),
        case(ConvOp::WeightGradient(product), 0, 0.0),
        case(ConvOp::DataGradient { product, accumulate: true }, 0, 0.0).reading(1, weights),
        case(LstmOp::Forward(shape), 0, 0.0)
            .reading(1, keep.clone())
            .reading(3, ih)
            .reading(4, hh.clone()),
        case(LstmOp::Gradient { shape, accumulate: true }, 0, 0.0).reading(0, keep).reading(2, hh),
    ]
}

/// Steps over all parameters of a large policy.
fn of_many_elements() -> Vec<Case> {
    let len = 3_000_003;
    let [third, rest] = [0..len / 3, len / 3 + 13..len];
    let adam =
        AdamConfig { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-5, weight_decay: 0.0, clip_norm: 5.0 };
    let optimiser = Optimiser::Adam(adam);
    let runs = vec![third.clone(), rest.clone()];
    let numbers = numbers(optimiser);
    let moments = Data::F32(vec![0.25; optimiser.kind().moments() * len]);
    let update =
        OptimOp::Update { len, optimiser: optimiser.kind(), runs: runs.clone(), matrices: vec![] };
    vec![
        case(ElementwiseOp::Fill { len, value: 0.5 }, 0, 0.0),
        case(OptimOp::Measure { len, tensors: runs, norm_factor: 1.0 }, 0, 0.0)
            .reading(1, numbers.clone()),
        case(update, 0, 0.0).reading(2, numbers).writing(1, moments),
    ]
}

/// Waits until another worker helps, if there is one.
fn helpers(threads: usize) {
    let (start, seen) = (Instant::now(), Mutex::new(HashSet::new()));
    while seen.lock().unwrap().len() < threads.min(2) {
        assert!(start.elapsed() < Duration::from_secs(60), "nobody helps");
        in_parts(4, |_| {
            seen.lock().unwrap().insert(thread::current().id());
            thread::sleep(Duration::from_micros(100));
        });
    }
}

/// Runs a case as a kernel of a device with `threads` workers; all other workers are idle.
fn on_device(case: &Case, isa: Isa, threads: usize) -> Vec<Data> {
    let options = DeviceOptions { threads, ..DeviceOptions::default() };
    let device = Device::open(DeviceId::Cpu(0), &options).unwrap();
    let (case, results) = (case.clone(), Arc::new(Mutex::new(vec![])));
    let (to, operands) = (results.clone(), case.operands(OpBackend::Cpu(Isa::portable())));
    let kernel = move |_: &mut Args<'_>| {
        helpers(threads);
        *to.lock().unwrap() = case.run_over(OpBackend::Cpu(isa), operands);
    };
    device.stream("parts").launch("parts").run(kernel).unwrap();
    device.synchronize().unwrap();
    std::mem::take(&mut results.lock().unwrap())
}

#[test]
fn the_bits_do_not_depend_on_who_runs_a_part() {
    let isa = *Isa::available().last().unwrap();
    for case in cases() {
        let alone = case.run(OpBackend::Cpu(isa));
        for threads in [1, 2, 4] {
            assert!(on_device(&case, isa, threads) == alone, "{threads} workers: {:?}", case.op);
        }
    }
}

/// In several parts, results per image and sums of whole numbers have the same bits as in one part.
#[test]
fn a_batch_in_parts_has_the_bits_of_one() {
    let direct = products().into_iter().filter(|product| product.tiles.is_none());
    for (product, isa) in
        direct.flat_map(|of| Isa::available().into_iter().map(move |isa| (of, isa)))
    {
        let shape = product.shape;
        let images = [(1, shape.input()), (2, shape.output())];
        let [x, dy] = images.map(|(seed, of)| whole(seed, of.len()));
        let packed = packed_weights(&shape, shape.weight_len());
        let Data::F32(w) = &packed else { unreachable!("weights are f32") };
        let run = |op: ConvOp, reads: [&[f32]; 2]| {
            let [a, b] = reads.map(|of| Data::F32(of.to_vec()));
            let none = Data::F32(vec![]);
            let of = case(op, 0, 0.0).reading(0, a).reading(1, b).reading(2, none);
            let of = of.writing(0, Data::F32(vec![0.0; of_first(&op)]));
            of.run(OpBackend::Cpu(isa)).remove(0)
        };
        let mut room = vec![f32::NAN; shape.scratch_len()];
        let mut y = vec![0.0; dy.len()];
        conv::forward(isa, &shape, &ConvInputs { x: &x, w, bias: &[] }, &mut y, &mut room);
        assert!(run(ConvOp::Forward(product), [&x, w]) == Data::F32(y), "{isa} {shape:?}");
        let mut dx = vec![0.0; x.len()];
        conv::backward_data(isa, &shape, &dy, w, GradOut::overwrite(&mut dx), &mut room);
        let data = ConvOp::DataGradient { product, accumulate: false };
        assert!(run(data, [&dy, w]) == Data::F32(dx), "{isa} {shape:?}");
        let mut dw = vec![0.0; w.len()];
        let to = ParamGrads { dw: &mut dw, db: &mut [] };
        conv::backward_weight(isa, &shape, &x, &dy, to, &mut room);
        assert!(
            run(ConvOp::WeightGradient(product), [&x, &dy]) == Data::F32(dw),
            "{isa} {shape:?}"
        );
    }
}

/// Elements of the first operand that an operation writes.
fn of_first(op: &ConvOp) -> usize {
    meristem_nn::ops::StepOp::from(*op).signature(PlanTarget::Cpu, ValueType::F32).writes[0].len
}
