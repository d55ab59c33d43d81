//! Calls for [`ops::state`](crate::ops::state): several tensors in each.

use bytemuck::{Pod, Zeroable};
use meristem_device::{Call, Kernel, KernelSource, Operand};
use smallvec::{SmallVec, smallvec};

use super::{CallOperand, Emission, READ, emitted, kernel, plain, read, source, write};
use crate::metrics::MetricsLayout;
use crate::ops::Spec;
use crate::ops::StateOp;

pub(super) static SOURCE: KernelSource = source!("state.cu");

const METRICS: Operand = Operand::write::<f64>();
const WORDS: Operand = Operand::read::<u32>();

static RESET_METRICS: Kernel = kernel::<MetricsValues>(&SOURCE, "reset_metrics", &[METRICS]);
static COUNT_BEGIN: Kernel = kernel::<()>(&SOURCE, "count_begin", &[METRICS]);
static COUNT: Kernel =
    kernel::<Blocks>(&SOURCE, "count", &[READ, READ, READ, READ, READ, READ, READ, READ, METRICS]);
static COUNT_END: Kernel = kernel::<()>(&SOURCE, "count_end", &[METRICS]);
static FINGERPRINT: Kernel = kernel::<u32>(
    &SOURCE,
    "fingerprint",
    &[WORDS, WORDS, WORDS, WORDS, WORDS, WORDS, WORDS, WORDS, METRICS],
);

const THREADS: u32 = 256;

/// Elements of a block that counts.
const CHUNK: usize = 4096;

/// Tensors of a call.
const TENSORS: usize = 8;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct MetricsValues {
    head: [f64; 3],
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Blocks {
    block: [u32; TENSORS],
}

pub(super) fn emit(op: &StateOp) -> Emission {
    match op {
        StateOp::ResetMetrics(layout) => {
            let call = Call::each(&RESET_METRICS, layout.len());
            let MetricsLayout { groups, configs, log, .. } = *layout;
            let head = [groups, configs, log].map(|n| n as f64);
            smallvec![emitted(call, &[write(0)], MetricsValues { head })]
        }
        StateOp::CountNonFinite(lengths) => {
            let one = |kernel| plain(Call::new(kernel, 1, 32), &[write(0)]);
            let counts = by_calls(lengths).map(|(operands, lengths)| {
                let (mut block, mut blocks) = ([0; TENSORS], 0);
                for (to, len) in block.iter_mut().zip(lengths) {
                    *to = blocks;
                    blocks += len.div_ceil(CHUNK) as u32;
                }
                emitted(Call::new(&COUNT, blocks, THREADS), &operands, Blocks { block })
            });
            [one(&COUNT_BEGIN)].into_iter().chain(counts).chain([one(&COUNT_END)]).collect()
        }
        StateOp::Fingerprint(tensors) => {
            let words = |of: &Spec| of.len * of.dtype.size() / size_of::<u32>();
            let words: Vec<usize> = tensors.iter().map(words).collect();
            // Without tensors there still is a hash.
            let none = words.is_empty().then(|| absent(TENSORS).chain([write(0)]).collect());
            let calls = by_calls(&words).map(|(operands, _)| operands).chain(none).enumerate();
            let hash = |(n, operands): (usize, SmallVec<[CallOperand; 9]>)| {
                emitted(Call::new(&FINGERPRINT, 1, THREADS), &operands, u32::from(n == 0))
            };
            calls.map(hash).collect()
        }
    }
}

/// Reads of these lengths by calls, each with its own lengths: as many operands as a call takes,
/// then the result.
fn by_calls(lengths: &[usize]) -> impl Iterator<Item = (SmallVec<[CallOperand; 9]>, &[usize])> {
    lengths.chunks(TENSORS).enumerate().map(|(n, some)| {
        let tensors = some.iter().enumerate().map(|(i, len)| read(n * TENSORS + i).part(0, *len));

        (tensors.chain(absent(TENSORS - some.len())).chain([write(0)]).collect(), some)
    })
}

/// Operands without elements.
fn absent(count: usize) -> impl Iterator<Item = CallOperand> {
    std::iter::repeat_n(write(0).part(0, 0), count)
}
