//! Operations whose values are bf16 in memory.

use half::bf16;
use meristem_nn::kernels::lstm::LstmShape;
use meristem_nn::ops::{ConvOp, FusedOp, LstmOp, OpBackend, PlanTarget, Spec, StepOp};
use meristem_nn::{Isa, Precision, ValueType};

use super::case::{BF16, Case, Data, KINDS, kind, precision};
use super::cases::cases;
use crate::common::cuda;

/// Operations whose values are bf16 in memory, over the same values as the portable kernels: a
/// stored result is off by the f32 bound of its case and half a place of bf16. See
/// `case::stored_between` for sums over stored results.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn cuda_stores_values_as_bf16() {
    let (stream, values) = (cuda().stream("bf16"), ValueType::Bf16);
    let mut seen = [false; KINDS];
    for case in cases().into_iter().filter_map(with_stored_values) {
        seen[kind(&case.op)] = true;
        case.compare(OpBackend::Cuda(&stream, values), &case.expected(values));
    }
    let stores = |op: &StepOp| {
        let signature = op.signature(PlanTarget::Cuda, values);
        signature.reads.iter().chain(&signature.writes).any(|spec| spec.is_values)
    };
    let missing = cases().into_iter().filter(|case| stores(&case.op) && !seen[kind(&case.op)]);
    let missing: Vec<StepOp> = missing.map(|case| case.op).collect();
    assert!(missing.is_empty(), "no case with stored values: {missing:?}");
}

impl Case {
    /// Results of the portable kernels over the elements that a backend with values of this type
    /// reads.
    fn expected(&self, values: ValueType) -> Vec<Data> {
        let on = OpBackend::Cpu(Isa::portable());
        let signature = self.op.signature(on.target(), ValueType::F32);
        let rounded = |(data, spec): (Data, &Spec)| {
            let stored = spec.is_values && values == ValueType::Bf16;
            if stored { data.stored().widened() } else { data }
        };
        let [reads, writes] = self.operands(on);
        let reads = reads.into_iter().zip(&signature.reads).map(rounded).collect();
        let writes = writes.into_iter().zip(&signature.writes).map(rounded).collect();
        self.run_over(on, [reads, writes])
    }
}

/// The case with values of bf16, if it has any: those that multiply at the precision bf16.
fn with_stored_values(case: Case) -> Option<Case> {
    let signature = case.op.signature(PlanTarget::Cuda, ValueType::Bf16);
    let stores = signature.reads.iter().chain(&signature.writes).any(|spec| spec.is_values);
    let fits = precision(&mut case.op.clone()).is_none_or(|of| *of == Precision::Bf16);
    match &case.op {
        _ if !(stores && fits) => None,
        StepOp::Lstm(LstmOp::Forward(shape)) => Some(lstm(case.clone(), shape)),
        _ => Some(case),
    }
}

/// Statistics that an operation computes beside the values that it stores are those of the stored
/// values, not of the values before they were rounded: in f64, but for the rounding to f32 at the
/// end.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn statistics_are_of_stored_values() {
    let (stream, values) = (cuda().stream("statistics"), ValueType::Bf16);
    let mut seen = 0;
    for case in cases().into_iter().filter_map(with_stored_values) {
        let channels = match &case.op {
            StepOp::Conv(ConvOp::ForwardWithStats(of)) => of.shape.out_c,
            StepOp::Fused(FusedOp::Forward { conv, momentum: Some(_) }) => conv.shape.out_c,
            _ => continue,
        };
        let mut results = case.run(OpBackend::Cuda(&stream, values)).into_iter();
        let mut next = || match results.next().map(Data::widened) {
            Some(Data::F32(values)) => values,
            other => panic!("values or statistics: {other:?}"),
        };
        let [y, mean, var] = [next(), next(), next()];
        for c in 0..channels {
            let of_channel = || y.iter().skip(c).step_by(channels).map(|y| f64::from(*y));
            let count = of_channel().count() as f64;
            let m = of_channel().sum::<f64>() / count;
            let squares = of_channel().map(|y| y * y).sum::<f64>() / count;
            // The mean is rounded once. The variance is a difference of two numbers of the size of
            // `squares`, in f64, and is rounded once.
            let near = |got: f32, exact: f64, size: f64| {
                (f64::from(got) - exact).abs() <= exact.abs() * 2f64.powi(-24) + size * 1e-12
            };
            assert!(near(mean[c], m, squares.sqrt()), "{:?}: {} {m}", case.op, mean[c]);
            let v = squares - m * m;
            assert!(near(var[c], v.max(0.0), squares), "{:?}: {} {v}", case.op, var[c]);
        }
        seen += 1;
    }
    assert!(seen > 20, "{seen} cases");
}

/// An LSTM with weights so small that errors of stored values do not grow over the steps. Within a
/// step the product of the inputs is stored, then the gates, then h; c is f32. With the largest
/// sums of input and state products P and S, and u for half a place, at step t, at which c is at
/// most t before:
///
/// ```text
/// gate ≤ S·h + (P + 1)·u       slopes of sigmoid and tanh are at most 1
/// c    ≤ c + (t + 2)·gate      f·c + i·g
/// h    ≤ gate + c + u          o·tanh(c)
/// ```
///
/// Factors of products are bf16: weights are rounded before, for both.
fn lstm(of: Case, shape: &LstmShape) -> Case {
    let mut of = of;
    let mut largest = [0.0; 2];
    for (at, data) in &mut of.reads {
        let (Data::F32(weights), 3 | 4) = (&mut *data, *at) else { continue };
        weights.iter_mut().for_each(|w| *w = bf16::from_f32(*w / 16.0).to_f32());
        largest[*at - 3] = weights.iter().fold(0.0, |most: f64, w| most.max(f64::from(w.abs())));
    }
    let [inputs, state] = [largest[0] * shape.inputs as f64, largest[1] * shape.hidden as f64];
    let (mut h, mut c, mut gate) = (0.0, 0.0, 0.0);
    for t in 1..=shape.steps {
        gate = state * h + (inputs + 1.0) * BF16;
        c += (t as f64 + 2.0) * gate;
        h = gate + c + BF16;
    }
    let stored = gate.max(c).max(h);
    assert!(stored < 0.5, "{shape:?}: a bound of {stored} tells nothing");
    of.stored = stored;
    of
}
