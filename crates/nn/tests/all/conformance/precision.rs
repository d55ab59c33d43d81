//! Products of rounded factors, bit for bit: each factor is a whole number and a part below the
//! precision, so that a product of factors that are rounded to the nearest is the product of the
//! whole numbers, and every sum is exact in f32 in any order. A factor that is not rounded, not
//! rounded to the nearest, or not multiplied changes a whole number.

use meristem_device::DType;
use meristem_device::Stream;
use meristem_nn::ops::{ConvOp, FusedOp, OpBackend, OperandRole, PlanTarget, Spec, StepOp};
use meristem_nn::{Isa, Precision, ValueType};

use super::case::{Case, Data, Random, case, precision};
use super::cases::{cases, tiled_cases};
use crate::common::cuda;

/// Positions of the factors among an operation's reads, and positions of the results that are sums
/// of their products and of whole numbers. A classifier has none, because its factors are means,
/// which are not whole numbers.
fn products(op: &StepOp) -> Option<(&'static [usize], &'static [usize])> {
    match op {
        StepOp::Conv(ConvOp::Forward(_) | ConvOp::ForwardWithStats(_)) => Some((&[0, 1], &[0])),
        StepOp::Conv(ConvOp::WeightGradient(_) | ConvOp::DataGradient { .. }) => {
            Some((&[0, 1], &[0]))
        }
        StepOp::Fused(FusedOp::Forward { .. }) => Some((&[0, 5], &[0])),
        StepOp::Fused(FusedOp::Backward { .. }) => Some((&[0, 5, 10], &[0, 1])),
        _ => None,
    }
}

/// Significant bits of a factor.
fn bits(precision: Precision) -> i32 {
    match precision {
        Precision::F32 => 24,
        Precision::Tf32 => 11,
        Precision::Bf16 => 8,
    }
}

/// Whole numbers from 1 to 7 of either sign, zeros in the same places as before, plus an offset
/// that rounding to the precision's bits takes away: up to 0.45 of the last place, or a fifth below
/// a power of two, where places are half as wide.
fn factors(of: &Data, precision: Precision, random: &mut Random) -> Data {
    let Data::F32(values) = of else { panic!("factors are f32") };
    let mut factor = |value: &f32| {
        let magnitude = (random.bits() % 7 + 1) as i32;
        let mut signed = |n: i32| if random.bits().is_multiple_of(2) { n } else { -n };
        let [whole, outward] = [signed(magnitude), signed(1)];
        let place = 2f32.powi(magnitude.ilog2() as i32 + 1 - bits(precision));
        let most = if outward < 0 && magnitude.count_ones() == 1 { 0.2 } else { 0.45 };
        let part = match precision {
            Precision::F32 => 0.0,
            _ => most * place * (outward * whole.signum()) as f32,
        };
        if *value == 0.0 { 0.0 } else { whole as f32 + part }
    };
    Data::F32(values.iter().map(&mut factor).collect())
}

/// Whole numbers for all terms of sums, and norms that leave their inputs unchanged.
fn whole(op: &StepOp, at: usize, spec: &Spec, random: &mut Random) -> Data {
    let all = |value: f32| Data::F32(vec![value; spec.len]);
    match (op, at) {
        (StepOp::Fused(_), 1 | 4 | 7 | 8) => all(0.0),
        // Variance and ε are 1 up to rounding, so is the scale: γ by the root of their sum.
        (StepOp::Fused(_), 2) => all(1.0 - 1e-5),
        (StepOp::Fused(_), 3) => all(1.0),
        // Scale, offset and slope.
        (StepOp::Fused(_), 9) => {
            Data::F32((0..spec.len).map(|i| f32::from(u8::from(3 * i < spec.len))).collect())
        }
        _ => factors(&all(1.0), Precision::F32, random),
    }
}

/// The case, with factors that have a fraction below the precision; without fractions at f32.
fn with_parts(of: &Case, op: &StepOp, parts: Precision, infinite: Option<usize>) -> Case {
    let signature = op.signature(PlanTarget::Cpu, ValueType::F32);
    let (positions, _) = products(op).expect("it multiplies");
    let mut made = case(op.clone(), 1, 0.0);
    for (at, spec) in signature.reads.iter().enumerate() {
        // The same whole numbers for any number of parts.
        let mut random = Random(at as u64);
        let data = if positions.contains(&at) {
            let Data::F32(mut values) = factors(&of.read(at, spec), parts, &mut random) else {
                panic!("factors are f32")
            };
            let middle = values.len() / 2;
            if infinite == Some(at) && values.get(middle).is_some_and(|value| *value != 0.0) {
                values[middle] = f32::INFINITY;
            }
            Data::F32(values)
        } else {
            whole(op, at, spec, &mut random)
        };
        made = made.reading(at, data);
    }
    let results = signature.writes.iter().enumerate();
    for (at, spec) in results.filter(|(_, spec)| spec.role != OperandRole::Scratch) {
        let data = match spec.dtype {
            DType::F32 => whole(op, 100 + at, spec, &mut Random(at as u64)),
            DType::I64 => Data::I64(vec![0; spec.len]),
            _ => Data::U32(vec![0; spec.len]),
        };
        let absent = of.writes.iter().any(|(write, data)| *write == at && data.is_empty());
        made = made.writing(at, if absent { Data::F32(vec![]) } else { data });
    }
    made
}

/// Whether an element of a result may be NaN because padding zeros are multiplied by an infinite
/// factor: weight gradients of 3 × 3 convolutions are sums over whole tiles of pixels, and those of
/// depthwise convolutions include the padding, which a processor leaves out. This affects only
/// elements of the infinite factor's channel.
fn meets_infinity(op: &StepOp, read: usize, write: usize, at: usize) -> bool {
    let (shape, weights) = match op {
        StepOp::Conv(ConvOp::WeightGradient(of)) => (of.shape, 0),
        StepOp::Fused(FusedOp::Backward { conv, .. }) => (conv.shape, 1),
        _ => return false,
    };
    let is_depthwise = shape.groups == shape.in_c && shape.groups == shape.out_c;
    let is_tiled = (shape.kernel, shape.stride, shape.groups) == ([3; 2], [1; 2], 1);
    if write != weights || !(is_depthwise || is_tiled) {
        return false;
    }
    let step = shape.out_c.next_multiple_of(16);
    let len = op.signature(PlanTarget::Cpu, ValueType::F32).reads[read].len;
    match read {
        _ if is_depthwise => at % step == len / 2 % shape.out_c,
        0 => at / step % shape.in_c == len / 2 % shape.in_c,
        _ => at % step == len / 2 % shape.out_c,
    }
}

/// Runs a case on the device at its precision, and with its whole numbers on the processor in f32.
/// A sum that is stored as bf16 is the exact sum, rounded once.
fn compare(stream: &Stream, of: &Case, infinite: Option<usize>) {
    let mut exact = of.op.clone();
    let rounded = std::mem::take(precision(&mut exact).expect("it has a precision"));
    let expected = with_parts(of, &exact, Precision::F32, infinite);
    let expected = expected.run(OpBackend::Cpu(Isa::portable()));
    let on = OpBackend::Cuda(stream, rounded.value_type());
    let got = with_parts(of, &of.op, rounded, infinite).run(on);
    let (_, results) = products(&of.op).expect("it multiplies");
    for at in results {
        let stored = matches!(got[*at], Data::Bf16(_));
        let expected = expected[*at].clone();
        let expected = if stored { expected.stored().widened() } else { expected };
        let (Data::F32(got), Data::F32(expected)) = (got[*at].clone().widened(), expected) else {
            panic!("results are values or f32")
        };
        assert_eq!(got.len(), expected.len());
        for (i, (a, b)) in got.iter().zip(&expected).enumerate() {
            let spread = infinite.is_some_and(|read| meets_infinity(&of.op, read, *at, i));
            let same = a == b || a.is_nan() && (b.is_nan() || spread);
            assert!(same, "{:?}, infinite {infinite:?}: write {at} [{i}]: {a}, not {b}", of.op);
        }
    }
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn cuda_rounds_factors_to_the_nearest() {
    let stream = cuda().stream("precision");
    let is_rounded =
        |of: &Case| precision(&mut of.op.clone()).is_some_and(|p| *p != Precision::F32);
    let tiled = [Precision::Tf32, Precision::Bf16].into_iter().flat_map(tiled_cases);
    let of = cases().into_iter().filter(is_rounded).chain(tiled);
    for of in of.filter(|of| products(&of.op).is_some()) {
        compare(&stream, &of, None);
    }
}

/// Infinite results of a processor are infinite on a GPU, NaN are NaN, and all others are the same:
/// padding zeros of steps, tiles and channels are multiplied by no factor of another element.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn cuda_keeps_infinite_factors_to_themselves() {
    let stream = cuda().stream("infinite");
    for of in cases().iter().filter(|of| products(&of.op).is_some() && of.elements() < 20_000) {
        for at in products(&of.op).expect("it multiplies").0 {
            // A processor multiplies weights with the zeros between the pixels of a stride.
            if let (StepOp::Conv(ConvOp::DataGradient { product, .. }), 1) = (&of.op, *at)
                && product.shape.stride != [1; 2]
            {
                continue;
            }
            compare(&stream, of, Some(*at));
        }
    }
}
