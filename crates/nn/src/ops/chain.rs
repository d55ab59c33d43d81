//! Chains: consecutive steps that go sample by sample, and take a block of samples at a time, one
//! step after the other.
//!
//! # Method
//! ```text
//!             step by step                              chain
//!       batch ───────────────▸                   block   block   block
//! conv  ████████████████████████            conv  ██      ██      ██
//! norm  ████████████████████████            norm  ██ ──▸  ██ ──▸  ██
//! relu  ████████████████████████            relu  ██      ██      ██
//!
//! for each part of the batch, on the next idle worker:
//!     for each block of the part:
//!         for each step of the chain:
//!             step.run(block)               inner values: in the part's scratch
//!     sums of the part → shared sums, in the order of the parts
//! results of reductions, from the sums of all parts
//! ```
//!
//! # Speed
//! A block's results stay in the second-level cache until the next step reads them. Values that
//! only the chain uses (*inner*) have memory for one block, and no place in the arena. Idle workers
//! take over parts of the batch, with all steps of the chain.
//!
//! # Assumptions
//! - `ops::samples` says which operations go sample by sample. Winograd's filtering with more than
//!   256 filters ends a chain. Results of a reduction (`ops::reduction`), such as statistics of a
//!   convolution's output, are known after the last sample, so no step of the chain reads them.
//! - `plan::chain` makes the chains. If some steps add to gradients, only these determine the
//!   parts; other steps can only make blocks smaller, where the sums keep their bits. A chain adds
//!   to one group of parameters, in the host's group to one parameter. So a host trains with the
//!   same bits with and without a module in training.
//! - Plans for processors have chains. A GPU runs the steps for the whole batch.

use std::ops::Range;

use meristem_device::DType;
use smallvec::SmallVec;

use super::operand::{OperandRole, Signature, Slice, SliceMut, Spec, StepOperands, scratch};
use super::reduction::{PartSums, Reduction};
use super::{PlanTarget, StepOp};
use crate::kernels::Isa;
use crate::kernels::conv::{self, aligned};
use crate::kernels::parts::{self, PartScratch};
use crate::kernels::split_f64;
use crate::precision::ValueType;

/// Place of an operand of a chain's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandPlace {
    /// Nowhere: it is absent.
    Absent,
    /// An operand that the chain reads.
    Read(usize),
    /// An operand that the chain writes; its steps may read it, too.
    Write(usize),
    /// A value that only the chain uses.
    Inner(usize),
}

/// A step of a chain.
#[derive(Clone, Debug, PartialEq)]
pub struct ChainStep {
    /// Operation, for the whole batch.
    pub op: StepOp,
    /// Places of its read operands.
    pub reads: SmallVec<[OperandPlace; 8]>,
    /// Places of its written operands, without scratch.
    pub writes: SmallVec<[OperandPlace; 8]>,
    takes_scratch: bool,
}

/// An operand of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainOperand {
    /// Element type.
    pub dtype: DType,
    /// Elements, for the whole batch.
    pub len: usize,
    /// Whether every sample has its part. A written operand that all samples share is f32; each
    /// block adds to it, unless it is the result of a reduction.
    pub by_sample: bool,
}

/// Operands of a chain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChainOperands {
    /// Operands that are read and not written.
    pub reads: Vec<ChainOperand>,
    /// Operands that are written, without scratch.
    pub writes: Vec<ChainOperand>,
    /// Values that only the chain uses.
    pub inner: Vec<ChainOperand>,
}

/// Consecutive steps, each of which goes sample by sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    pub(crate) sizes: ChainSizes,
    /// Steps in order.
    pub steps: Vec<ChainStep>,
    /// Operands that are read and not written.
    pub reads: Vec<ChainOperand>,
    /// Operands that are written, without scratch.
    pub writes: Vec<ChainOperand>,
    /// Values that only the chain uses.
    pub inner: Vec<ChainOperand>,
    /// Which of the written operands are results of reductions.
    results: Vec<bool>,
    /// f32 elements of scratch: the most that a step needs for a block.
    step_scratch: usize,
}

/// The sizes of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainSizes {
    /// Samples.
    pub batch: usize,
    /// Samples of a block.
    pub block: usize,
    /// Samples of a part, which an idle worker may take over.
    pub part: usize,
}

impl ChainSizes {
    /// Numbers of samples that blocks can have: of a whole block and the last block, in a whole
    /// part and in the last part. A smaller block may need more scratch, because its products are
    /// divided into other parts.
    fn blocks(&self) -> [usize; 4] {
        let last = self.batch - (self.batch.div_ceil(self.part) - 1) * self.part;
        let [whole, rest] = [self.block.min(self.part), self.part % self.block];
        let [whole_of_last, rest_of_last] = [self.block.min(last), last % self.block];
        [whole, rest, whole_of_last, rest_of_last].map(|n| if n == 0 { whole } else { n })
    }
}

impl ChainOperand {
    /// Elements of one sample; all elements if the samples share the operand.
    fn each(&self, batch: usize) -> usize {
        if self.by_sample { self.len / batch } else { self.len }
    }

    /// The elements of `samples`, to be read.
    fn slice<'a>(&self, batch: usize, samples: &Range<usize>, bytes: &'a [u8]) -> Slice<'a> {
        Slice::new(self.dtype, &bytes[self.bytes(batch, samples)])
    }

    /// The elements of `samples`, to be written.
    fn slice_mut<'a>(
        &self,
        batch: usize,
        samples: &Range<usize>,
        bytes: &'a mut [u8],
    ) -> SliceMut<'a> {
        SliceMut::new(self.dtype, &mut bytes[self.bytes(batch, samples)])
    }

    /// Bytes of these samples.
    fn bytes(&self, batch: usize, samples: &Range<usize>) -> Range<usize> {
        let size = self.each(batch) * self.dtype.size();
        if self.by_sample { samples.start * size..samples.end * size } else { 0..size }
    }
}

impl ChainStep {
    /// A step of a chain.
    pub fn new(op: StepOp, reads: &[OperandPlace], writes: &[OperandPlace]) -> Self {
        let takes_scratch = scratch_of(&op).is_some();
        Self { op, reads: reads.into(), writes: writes.into(), takes_scratch }
    }

    /// The operation for a block of samples.
    fn over(&self, samples: usize, batch: usize) -> StepOp {
        self.op.over(samples, batch).expect("a step of a chain goes sample by sample")
    }
}

/// Elements of scratch of an operation for a block, if it has scratch.
fn scratch_of(op: &StepOp) -> Option<usize> {
    if let Some(reduction) = op.reduction() {
        return Some(reduction.scratch_len());
    }
    let signature = op.signature(PlanTarget::Cpu, ValueType::F32);
    signature.writes.last().filter(|spec| spec.role == OperandRole::Scratch).map(|spec| spec.len)
}

/// Operands of the samples of a part.
struct PartOperands<'a> {
    samples: usize,
    reads: SmallVec<[&'a [u8]; 16]>,
    writes: SmallVec<[&'a mut [u8]; 16]>,
    /// Sums of each reduction.
    sums: SmallVec<[&'a mut [f64]; 2]>,
}

/// Memory of a chain that its parts share.
struct SharedMemory<'a> {
    /// Sums of all parts but the first, for the operands that the samples share.
    sums: &'a mut [f32],
    /// `[parts][sums]` of each reduction.
    reduced: SmallVec<[&'a mut [f64]; 2]>,
    /// Scratch of the only part.
    own: &'a mut [f32],
}

/// Memory of a part, by place. A step takes its written operands out, and puts them back.
struct BoundMemory<'a> {
    reads: SmallVec<[&'a [u8]; 16]>,
    writes: SmallVec<[&'a mut [u8]; 16]>,
    inner: SmallVec<[&'a mut [u8]; 16]>,
}

impl<'a> BoundMemory<'a> {
    /// The memory of a place that is written.
    fn written(&mut self, place: OperandPlace) -> Option<&mut &'a mut [u8]> {
        match place {
            OperandPlace::Write(at) => Some(&mut self.writes[at]),
            OperandPlace::Inner(at) => self.inner.get_mut(at),
            OperandPlace::Read(_) | OperandPlace::Absent => None,
        }
    }
}

impl Chain {
    /// A chain of these steps over the operands that it reads, the operands that it writes, and
    /// inner values.
    pub fn new(
        sizes: ChainSizes,
        steps: Vec<ChainStep>,
        ChainOperands { reads, writes, inner }: ChainOperands,
    ) -> Self {
        let scratch = |step: &ChainStep| {
            let blocks = sizes.blocks();
            let lens = blocks.map(|samples| scratch_of(&step.over(samples, sizes.batch)));
            lens.into_iter().flatten().max().unwrap_or(0)
        };
        let step_scratch = steps.iter().map(scratch).max().unwrap_or(0);
        let mut results = vec![false; writes.len()];
        for step in steps.iter().filter(|step| step.op.reduction().is_some()) {
            for place in &step.writes {
                if let OperandPlace::Write(at) = *place {
                    results[at] = !writes[at].by_sample;
                }
            }
        }
        Self { sizes, steps, reads, writes, inner, results, step_scratch }
    }

    fn reductions(&self) -> impl Iterator<Item = Reduction> {
        self.steps.iter().filter_map(|step| step.op.reduction())
    }

    /// The written operands that blocks add to, with their numbers.
    fn sums(&self) -> impl Iterator<Item = (usize, &ChainOperand)> {
        let results = &self.results;
        self.writes.iter().enumerate().filter(|(at, of)| !of.by_sample && !results[*at])
    }

    fn parts(&self) -> usize {
        self.sizes.batch.div_ceil(self.sizes.part)
    }

    /// f32 elements of the shared sums of one part.
    fn sums_of_part(&self) -> usize {
        self.sums().map(|(_, of)| of.len.next_multiple_of(16)).sum()
    }

    /// f32 elements of the sums of all reductions, of all parts.
    fn reduced_len(&self) -> usize {
        self.reductions().map(|of| 2 * self.parts() * of.sums_len() + 1).sum()
    }

    /// f32 elements of each inner value, for a block.
    fn inner_lens(&self) -> impl Iterator<Item = usize> {
        self.inner.iter().map(|of| {
            let bytes = of.bytes(self.sizes.batch, &(0..self.sizes.block)).end;
            bytes.div_ceil(size_of::<f32>()).next_multiple_of(16)
        })
    }

    /// f32 elements of scratch of a part.
    fn part_len(&self) -> usize {
        let rooms: usize = self.reductions().map(|of| of.room_len().next_multiple_of(16)).sum();
        conv::ALIGNMENT + self.inner_lens().sum::<usize>() + rooms + self.step_scratch
    }

    /// f32 elements of scratch: the sums of reductions; the sums of all parts except the first, or
    /// the scratch of the only part.
    pub(crate) fn scratch_len(&self) -> usize {
        self.reduced_len()
            + match self.parts() {
                1 => self.part_len(),
                parts => (parts - 1) * self.sums_of_part(),
            }
    }

    pub(super) fn signature(&self) -> Signature {
        let spec = |of: &ChainOperand| Spec::new(of.dtype, of.len);
        let writes = self.writes.iter().map(spec).chain([scratch(self.scratch_len())]);
        Signature { reads: self.reads.iter().map(spec).collect(), writes: writes.collect() }
    }

    pub(super) fn run(&self, isa: Isa, operands: StepOperands<'_>) {
        let StepOperands { reads, mut writes } = operands;
        let scratch = writes.pop().map(SliceMut::elements::<f32>).unwrap_or_default();
        let SharedMemory { sums, mut reduced, own } = self.divide(scratch);
        sums.fill(0.0);
        let scratch = PartScratch { own, of_part: self.part_len() };
        let shares = self.shares(&reads, &mut writes, (&mut *sums, &mut reduced));
        parts::each(shares, scratch, |_, share, scratch| {
            self.run_part(isa, share, scratch);
        });
        for part in sums.chunks_exact(self.sums_of_part().max(1)) {
            let mut rest = part;
            for (at, of) in self.sums() {
                let (sum, after) = rest.split_at(of.len.next_multiple_of(16));
                parts::add(bytemuck::cast_slice_mut(writes[at].bytes_mut()), &sum[..of.len]);
                rest = after;
            }
        }
        let all = reads.iter().map(|of| of.bytes()).collect();
        let writes = writes.iter_mut().map(SliceMut::bytes_mut).collect();
        let mut bound = BoundMemory { reads: all, writes, inner: SmallVec::new() };
        let reductions = self.steps.iter().filter_map(|step| Some((step, step.op.reduction()?)));
        for ((step, reduction), sums) in reductions.zip(reduced) {
            self.with_operands(step, &(0..0), &mut bound, &mut [], |operands| {
                reduction.finish(self.sizes.part, sums, operands);
            });
        }
    }

    /// Divides scratch.
    fn divide<'a>(&self, scratch: &'a mut [f32]) -> SharedMemory<'a> {
        let (mut rest, parts) = (scratch, self.parts());
        let reduced = self.reductions().map(|of| {
            let (sums, after) = split_f64(std::mem::take(&mut rest), parts * of.sums_len());
            rest = after;
            sums
        });
        let reduced = reduced.collect();
        let (sums, own) = rest.split_at_mut((parts - 1) * self.sums_of_part());
        SharedMemory { sums, reduced, own }
    }

    /// Operands of each part. The first part adds to the operand itself, every other part to zeros.
    /// Results of reductions are in no part.
    fn shares<'a>(
        &'a self,
        reads: &'a [Slice<'a>],
        writes: &'a mut [SliceMut<'_>],
        (sums, reduced): (&'a mut [f32], &'a mut [&mut [f64]]),
    ) -> impl Iterator<Item = PartOperands<'a>> {
        let mut rest: SmallVec<[&'a mut [u8]; 16]> =
            writes.iter_mut().map(SliceMut::bytes_mut).collect();
        let mut sums = sums.chunks_exact_mut(self.sums_of_part().max(1));
        let mut reduced: SmallVec<[_; 2]> = self
            .reductions()
            .zip(reduced)
            .map(|(of, sums)| sums.chunks_exact_mut(of.sums_len()))
            .collect();
        (0..self.sizes.batch).step_by(self.sizes.part).map(move |first| {
            let here = first..(first + self.sizes.part).min(self.sizes.batch);
            let reads = self.reads.iter().zip(reads);
            let reads = reads.map(|(of, slice)| &slice.bytes()[of.bytes(self.sizes.batch, &here)]);
            let mut sums = (first > 0).then(|| sums.next()).flatten().unwrap_or_default();
            let each = self.writes.iter().zip(&self.results).zip(&mut rest);
            let writes = each.map(|((of, is_result), rest)| {
                if *is_result {
                    return Default::default();
                }
                if of.by_sample || first == 0 {
                    let bytes = of.bytes(self.sizes.batch, &(0..here.len())).end;
                    return rest.split_off_mut(..bytes).expect("the samples that are left");
                }
                let (sum, after) =
                    std::mem::take(&mut sums).split_at_mut(of.len.next_multiple_of(16));
                sums = after;
                bytemuck::cast_slice_mut(&mut sum[..of.len])
            });
            let writes = writes.collect();
            let sums = reduced.iter_mut().map(|of| of.next().expect("sums of each part")).collect();
            PartOperands { samples: here.len(), reads: reads.collect(), writes, sums }
        })
    }

    fn run_part(&self, isa: Isa, share: PartOperands<'_>, scratch: &mut [f32]) {
        let mut rest = aligned(scratch);
        let inner = self.inner_lens().map(|len| {
            let (value, after) = std::mem::take(&mut rest).split_at_mut(len);
            rest = after;
            bytemuck::cast_slice_mut(value)
        });
        let inner = inner.collect();
        let sums = self.reductions().zip(share.sums).map(|(of, sums)| {
            let len = of.room_len();
            let (room, after) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(16));
            rest = after;
            of.begin(sums, &mut room[..len])
        });
        let mut sums: SmallVec<[PartSums<'_>; 2]> = sums.collect();
        // As short-lived as the scratch.
        let reads = share.reads.iter().copied().collect();
        let writes = share.writes.into_iter().map(|bytes| &mut *bytes).collect();
        let mut bound = BoundMemory { reads, writes, inner };
        for first in (0..share.samples).step_by(self.sizes.block) {
            let here = first..(first + self.sizes.block).min(share.samples);
            let mut reductions = sums.iter_mut();
            for step in &self.steps {
                let reduction = step.op.reduction().and_then(|_| reductions.next());
                self.with_operands(step, &here, &mut bound, rest, |operands| match reduction {
                    Some(sums) => sums.add(isa, here.len(), operands),
                    None => step.over(here.len(), self.sizes.batch).run(isa, operands),
                });
            }
        }
        sums.into_iter().for_each(PartSums::end);
    }

    /// Calls `run` with the operands of a step for these samples of a part. Operands without memory
    /// are absent: results of reductions in a part, and inner values outside of the parts.
    fn with_operands(
        &self,
        step: &ChainStep,
        here: &Range<usize>,
        bound: &mut BoundMemory<'_>,
        scratch: &mut [f32],
        run: impl FnOnce(StepOperands<'_>),
    ) {
        // Memory of inner values covers the samples of one block.
        let (batch, block) = (self.sizes.batch, &(0..here.len()));
        let absent = Slice::new(DType::F32, &[]);
        let mut taken: SmallVec<[&mut [u8]; 8]> = SmallVec::new();
        for place in &step.writes {
            taken.push(bound.written(*place).map(std::mem::take).unwrap_or_default());
        }
        let reads = step.reads.iter().map(|place| match *place {
            OperandPlace::Read(at) => self.reads[at].slice(batch, here, bound.reads[at]),
            OperandPlace::Write(at) => self.writes[at].slice(batch, here, &*bound.writes[at]),
            OperandPlace::Inner(at) => bound
                .inner
                .get(at)
                .map_or(absent, |bytes| self.inner[at].slice(batch, block, bytes)),
            OperandPlace::Absent => absent,
        });
        let writes = step.writes.iter().zip(&mut taken).map(|(place, bytes)| match *place {
            _ if bytes.is_empty() => SliceMut::new(DType::F32, &mut []),
            OperandPlace::Write(at) => self.writes[at].slice_mut(batch, here, bytes),
            OperandPlace::Inner(at) => self.inner[at].slice_mut(batch, block, bytes),
            OperandPlace::Read(_) | OperandPlace::Absent => SliceMut::new(DType::F32, &mut []),
        });
        let scratch = step.takes_scratch.then(|| SliceMut::from_elements(scratch));
        run(StepOperands { reads: reads.collect(), writes: writes.chain(scratch).collect() });
        for (place, bytes) in step.writes.iter().zip(taken) {
            if let Some(place) = bound.written(*place) {
                *place = bytes;
            }
        }
    }
}
