//! Steps over a network's whole state: empty metrics, counts of elements that are not finite,
//! fingerprints.

use super::operand::{Signature, Slice, Spec, StepOperands, f32s, f64s};
use crate::kernels::Isa;
use crate::metrics::MetricsLayout;

/// Operations on metrics, and on parameters, running statistics and the optimiser's state.
#[derive(Clone, Debug, PartialEq)]
pub enum StateOp {
    /// Writes empty metrics (f64).
    ResetMetrics(MetricsLayout),
    /// Reads f32 tensors of these lengths; writes how many elements are NaN or infinite (f64).
    CountNonFinite(Vec<usize>),
    /// Reads these tensors of whole words; writes the upper and the lower half of their hash (f64,
    /// which holds each exactly): FNV-1a over words of 32 bits.
    Fingerprint(Vec<Spec>),
}

impl StateOp {
    pub(super) fn signature(&self) -> Signature {
        match self {
            StateOp::ResetMetrics(layout) => Signature::new(&[], &[f64s(layout.len())]),
            StateOp::CountNonFinite(lengths) => {
                let reads: Vec<_> = lengths.iter().map(|len| f32s(*len)).collect();
                Signature::new(&reads, &[f64s(1)])
            }
            StateOp::Fingerprint(tensors) => Signature::new(tensors, &[f64s(2)]),
        }
    }

    pub(super) fn run(&self, _isa: Isa, StepOperands { reads, writes }: StepOperands<'_>) {
        for to in writes.into_iter().map(super::SliceMut::elements::<f64>) {
            match self {
                StateOp::ResetMetrics(layout) => layout.reset(to),
                StateOp::CountNonFinite(_) => {
                    let bad = |x: &Slice<'_>| {
                        x.elements::<f32>().iter().filter(|x| !x.is_finite()).count()
                    };
                    to[0] = reads.iter().map(bad).sum::<usize>() as f64;
                }
                StateOp::Fingerprint(_) => {
                    let hash = fingerprint(&reads);
                    to.copy_from_slice(&[(hash >> 32) as f64, (hash & u64::from(u32::MAX)) as f64]);
                }
            }
        }
    }
}

/// FNV-1a over words of 32 bits: any one difference shows.
fn fingerprint(tensors: &[Slice<'_>]) -> u64 {
    let words = tensors.iter().flat_map(|tensor| tensor.words());
    words.fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| {
        (hash ^ u64::from(*word)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
