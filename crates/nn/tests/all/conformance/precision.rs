//! Products of rounded factors against those of the factors themselves.

use meristem_nn::ops::conv::{self, Product};
use meristem_nn::ops::{Backend, Op, stage};
use meristem_nn::{Isa, Precision};

use super::cases::cases;
use crate::common::cuda;

/// Largest error of a factor of 1, which TF32 has 11 significant bits of, and bf16 8.
fn unit(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 0.0,
        Precision::Tf32 => 2f64.powi(-11),
        Precision::Bf16 => 2f64.powi(-8),
    }
}

/// The precision of an operation that multiplies.
fn precision(op: &mut Op) -> Option<&mut Precision> {
    use stage::Op as Stage;
    match op {
        Op::Conv(
            conv::Op::Forward(of)
            | conv::Op::ForwardWithStats(of)
            | conv::Op::WeightGradient(of)
            | conv::Op::DataGradient { product: of, .. },
        ) => {
            let Product { precision, .. } = of;
            Some(precision)
        }
        Op::Stage(Stage::Forward { stage: of, .. } | Stage::Backward { stage: of, .. }) => {
            Some(&mut of.precision)
        }
        Op::Stage(Stage::Head(of) | Stage::HeadGradient(of)) => Some(&mut of.precision),
        _ => None,
    }
}

/// Rounding moves each factor of a product by its unit at most. (Against factors that are rounded
/// in the same way, results are compared like those of all other operations.)
#[test]
fn cuda_rounds_factors_to_the_nearest() {
    let stream = cuda().stream("precision");
    let (mut compared, mut moved) = (0, 0);
    for case in cases() {
        let mut op = case.op.clone();
        let Some(of) = precision(&mut op) else { continue };
        let rounded = std::mem::take(of);
        if rounded != Precision::F32 {
            let expected = case.of(op).run(Backend::Cpu(Isa::portable()));
            let got = case.compare_within(unit(rounded), Backend::Cuda(&stream), &expected);
            compared += 1;
            moved += usize::from(got != expected);
        }
    }
    assert!(2 * moved > compared, "{moved} of {compared} results are those of exact factors");
}
