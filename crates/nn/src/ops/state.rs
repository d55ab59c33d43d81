//! Steps over a network's whole state: empty metrics, what is not finite, fingerprints.

use super::operand::{Operands, Signature, Slice, f32s, f64s, i64s};
use crate::kernels::Isa;
use crate::network::metrics::MetricsLayout;

/// Operations on metrics and on parameters, running statistics and what the optimiser remembers.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Writes empty metrics (f64).
    ResetMetrics(MetricsLayout),
    /// Reads f32 tensors of these lengths; writes how many elements are NaN or infinite (f64).
    CountNonFinite(Vec<usize>),
    /// Reads these tensors; writes the upper and the lower half of their hash (f64, which holds
    /// each exactly): FNV-1a over words of 32 bits.
    Fingerprint(Vec<Words>),
}

/// A tensor of whole words, by its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Words {
    /// Elements of f32.
    F32(usize),
    /// Elements of i64, the lower word first.
    I64(usize),
}

impl Op {
    pub(super) fn signature(&self) -> Signature {
        match self {
            Op::ResetMetrics(layout) => Signature::new(&[], &[f64s(layout.len())]),
            Op::CountNonFinite(lengths) => {
                let reads: Vec<_> = lengths.iter().map(|len| f32s(*len)).collect();
                Signature::new(&reads, &[f64s(1)])
            }
            Op::Fingerprint(tensors) => {
                let spec = |words: &Words| match *words {
                    Words::F32(len) => f32s(len),
                    Words::I64(len) => i64s(len),
                };
                let reads: Vec<_> = tensors.iter().map(spec).collect();
                Signature::new(&reads, &[f64s(2)])
            }
        }
    }

    pub(super) fn run(&self, _isa: Isa, Operands { reads, writes }: Operands<'_>) {
        for to in writes.into_iter().map(super::SliceMut::f64) {
            match self {
                Op::ResetMetrics(layout) => layout.reset(to),
                Op::CountNonFinite(_) => {
                    let bad = |x: &Slice<'_>| x.f32().iter().filter(|x| !x.is_finite()).count();
                    to[0] = reads.iter().map(bad).sum::<usize>() as f64;
                }
                Op::Fingerprint(_) => {
                    let hash = fingerprint(&reads);
                    to.copy_from_slice(&[(hash >> 32) as f64, (hash & u64::from(u32::MAX)) as f64]);
                }
            }
        }
    }
}

/// FNV-1a over words of 32 bits: any one difference shows.
fn fingerprint(tensors: &[Slice<'_>]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut take = |word: u32| hash = (hash ^ u64::from(word)).wrapping_mul(0x0000_0100_0000_01b3);
    for tensor in tensors {
        match tensor {
            Slice::I64(counts) => counts.iter().for_each(|count| {
                take(*count as u32);
                take((*count >> 32) as u32);
            }),
            other => other.f32().iter().for_each(|x| take(x.to_bits())),
        }
    }
    hash
}
