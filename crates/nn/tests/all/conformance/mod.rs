//! Every operation of a plan, on every backend, against the portable kernels: the same entry
//! ([`ops::run`]), the same operands. A backend is conformant when it passes here.
//!
//! `tests/kernels` and goldens compare the portable kernels themselves with slow exact versions and
//! with PyTorch. Here each case states how many f32 terms the longest sum of a result has: two ways
//! of adding n terms of magnitude at most m differ by at most `2·n·m·n·2⁻²⁴`, and `m` is stated
//! too. Tensor cores may differ by more, since they cut off rather than round (`case::rounding`).

mod case;
mod cases;
mod chain_cases;
mod fused_cases;
mod image_cases;
mod parts;
mod policy;
#[cfg(feature = "cuda")]
mod precision;
mod reduction_cases;
#[cfg(feature = "cuda")]
mod stored;
mod training;

use self::case::{KINDS, kind};
use self::cases::cases;
use meristem_nn::ops::{self, ElementwiseOp, OpBackend, Slice, SliceMut, StepOp, StepOperands};
use meristem_nn::{Error, Isa};

#[cfg(feature = "cuda")]
use self::case::{Case, precision};
#[cfg(feature = "cuda")]
use crate::common::cuda;
#[cfg(feature = "cuda")]
use meristem_nn::ValueType;
#[cfg(feature = "cuda")]
use meristem_nn::ops::{RowsOp, rows::Lookup};

/// The backends of this machine, except the portable kernels.
fn backends() -> Vec<OpBackend<'static>> {
    Isa::available().into_iter().filter(|isa| *isa != Isa::portable()).map(OpBackend::Cpu).collect()
}

#[test]
fn every_backend_computes_what_the_portable_kernels_do() {
    for case in cases() {
        let expected = case.run(OpBackend::Cpu(Isa::portable()));
        backends().into_iter().for_each(|on| case.compare(on, &expected));
    }
}

/// On a GPU, or on the stand-in driver.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn cuda_computes_what_the_portable_kernels_do() {
    let stream = cuda().stream("conformance");
    let is_f32 = |case: &Case| {
        precision(&mut case.op.clone()).is_none_or(|of| of.value_type() == ValueType::F32)
    };
    for case in cases().into_iter().filter(is_f32) {
        let expected = case.run(OpBackend::Cpu(Isa::portable()));
        case.compare(OpBackend::Cuda(&stream, ValueType::F32), &expected);
    }
}

/// An index that is out of range is flagged: its row is NaN, and no row of the table gets a
/// gradient. (A processor panics.)
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn cuda_flags_an_index_out_of_range() {
    let stream = cuda().stream("indices");
    let of = Lookup { indices: 4, entries: 3, size: 2 };
    let indices = [2, 3, u32::MAX, 0];
    let (table, mut y) = ([0.5f32, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0f32; 8]);
    let operands = StepOperands {
        reads: [Slice::from_elements(&indices), Slice::from_elements(&table)].into_iter().collect(),
        writes: [SliceMut::from_elements(&mut y)].into_iter().collect(),
    };
    ops::run(OpBackend::Cuda(&stream, ValueType::F32), &RowsOp::Embed(of).into(), operands)
        .unwrap();
    assert_eq!([y[0], y[1], y[6], y[7]], [4.0, 5.0, 0.5, 1.0]);
    assert!(y[2..6].iter().all(|value| value.is_nan()), "{y:?}");
    let (dy, mut dtable) = ([1.0f32; 8], [0.0f32; 6]);
    let operands = StepOperands {
        reads: [Slice::from_elements(&indices), Slice::from_elements(&dy)].into_iter().collect(),
        writes: [SliceMut::from_elements(&mut dtable)].into_iter().collect(),
    };
    ops::run(OpBackend::Cuda(&stream, ValueType::F32), &RowsOp::EmbedGradient(of).into(), operands)
        .unwrap();
    assert_eq!(dtable, [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]);
}

#[test]
fn every_kind_of_operation_has_a_case() {
    let mut seen = [false; KINDS];
    cases().iter().for_each(|case| seen[kind(&case.op)] = true);
    let missing: Vec<usize> = (0..KINDS).filter(|kind| !seen[*kind]).collect();
    assert!(missing.is_empty(), "no case for the kinds {missing:?}");
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let op = StepOp::from(ElementwiseOp::Pass { len: 3, accumulate: false });
    let (three, four, bytes) = ([0.0f32; 3], [0.0f32; 4], [0u8; 3]);
    for read in [
        Slice::from_elements(&four),
        Slice::from_elements(&bytes),
        Slice::from_elements::<f32>(&[]),
    ] {
        let mut y = [0.5f32; 3];
        let reads = [read].into_iter().collect();
        let operands =
            StepOperands { reads, writes: [SliceMut::from_elements(&mut y)].into_iter().collect() };
        let error = ops::run(OpBackend::Cpu(Isa::portable()), &op, operands).unwrap_err();
        assert!(matches!(error, Error::Operand { ref operand, .. } if operand == "read 0"));
        assert_eq!(y, [0.5; 3], "nothing has run");
    }
    let reads = [Slice::from_elements(&three), Slice::from_elements(&three)].into_iter().collect();
    let operands = StepOperands { reads, ..StepOperands::default() };
    let error = ops::run(OpBackend::Cpu(Isa::portable()), &op, operands).unwrap_err();
    assert!(matches!(error, Error::Operand { .. }), "{error:?}");
    assert!(error.to_string().contains("read: expected 1 in all, got 2 in all"), "{error}");
}
