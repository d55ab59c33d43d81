//! Steps that go sample by sample, one behind the other for a block of samples at a time: what one
//! hands to the next stays in the cache, and what only they use has no place in the arena. Plans
//! for processors have chains; a GPU carries the steps out for the whole batch.

use std::ops::Range;
use std::sync::Arc;

use meristem_device::DType;
use smallvec::SmallVec;

use super::operand::{Operands, Role, Signature, Slice, SliceMut, Spec, scratch};
use super::{Op as Any, Target};
use crate::kernels::Isa;
use crate::kernels::conv::{self, aligned};
use crate::kernels::parts::{self, Scratch};

/// A chain; plans share it.
pub type Op = Arc<Chain>;

/// Where an operand of a link lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: it is absent.
    Absent,
    /// An operand that the chain reads.
    Read(usize),
    /// An operand that the chain writes; links may read it, too.
    Write(usize),
    /// A value that no one else uses.
    Inner(usize),
}

/// A step of a chain.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Operation, for the whole batch.
    pub op: Any,
    /// Places of what it reads.
    pub reads: SmallVec<[Place; 8]>,
    /// Places of what it writes, without scratch.
    pub writes: SmallVec<[Place; 8]>,
    takes_scratch: bool,
}

/// An operand of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Element type.
    pub dtype: DType,
    /// Elements, for the whole batch.
    pub len: usize,
    /// Whether every sample has its part. What is written of an operand that is the same for all
    /// samples is f32, and added to after each block.
    pub by_sample: bool,
}

/// A row of steps, each of which goes sample by sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    pub(crate) sizes: Sizes,
    /// Steps in order.
    pub links: Vec<Link>,
    /// Operands that are read, apart from those that are written, too.
    pub reads: Vec<Operand>,
    /// Operands that are written, without scratch.
    pub writes: Vec<Operand>,
    /// Values that only the chain uses.
    pub inner: Vec<Operand>,
    /// f32 elements of scratch of any link, for any block.
    link_scratch: usize,
}

/// The sizes of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Samples.
    pub batch: usize,
    /// Samples of a block.
    pub block: usize,
    /// Samples of a part, which an idle worker may take over.
    pub part: usize,
}

impl Sizes {
    /// Samples of the blocks that there are: whole ones, and the last ones of a part and of the
    /// last part. A smaller block may need more scratch: its products are in other parts.
    fn blocks(&self) -> [usize; 4] {
        let last = self.batch - (self.batch.div_ceil(self.part) - 1) * self.part;
        let [whole, rest] = [self.block.min(self.part), self.part % self.block];
        let [whole_of_last, rest_of_last] = [self.block.min(last), last % self.block];
        [whole, rest, whole_of_last, rest_of_last].map(|n| if n == 0 { whole } else { n })
    }
}

impl Operand {
    /// Elements of a sample; those of the whole operand, if it is the same for all.
    fn each(&self, batch: usize) -> usize {
        if self.by_sample { self.len / batch } else { self.len }
    }

    /// These samples of it.
    fn slice<'a>(&self, batch: usize, samples: &Range<usize>, bytes: &'a [u8]) -> Slice<'a> {
        Slice::new(self.dtype, &bytes[self.bytes(batch, samples)])
    }

    /// These samples of it, to be written.
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

impl Link {
    /// A step of a chain.
    pub fn new(op: Any, reads: &[Place], writes: &[Place]) -> Self {
        let takes_scratch = scratch_of(&op).is_some();
        Self { op, reads: reads.into(), writes: writes.into(), takes_scratch }
    }

    /// The operation for a block of samples.
    fn over(&self, samples: usize, batch: usize) -> Any {
        self.op.over(samples, batch).expect("a link goes sample by sample")
    }
}

/// Elements of scratch that an operation takes, if it does.
fn scratch_of(op: &Any) -> Option<usize> {
    let signature = op.signature(Target::Cpu);
    signature.writes.last().filter(|spec| spec.role == Role::Scratch).map(|spec| spec.len)
}

/// Operands of the samples of a part.
struct Share<'a> {
    samples: usize,
    reads: SmallVec<[&'a [u8]; 16]>,
    writes: SmallVec<[&'a mut [u8]; 16]>,
}

/// Memory of a part, by place. A link takes what it writes, and puts it back.
struct Bound<'a> {
    reads: &'a [&'a [u8]],
    writes: SmallVec<[&'a mut [u8]; 16]>,
    inner: SmallVec<[&'a mut [u8]; 16]>,
}

impl<'a> Bound<'a> {
    /// The memory of a place that is written.
    fn written(&mut self, place: Place) -> Option<&mut &'a mut [u8]> {
        match place {
            Place::Write(at) => Some(&mut self.writes[at]),
            Place::Inner(at) => Some(&mut self.inner[at]),
            Place::Read(_) | Place::Absent => None,
        }
    }
}

impl Chain {
    /// A chain of these links over these operands: those that are read, those that are written, and
    /// inner ones.
    pub fn new(sizes: Sizes, links: Vec<Link>, [reads, writes, inner]: [Vec<Operand>; 3]) -> Self {
        let scratch = |link: &Link| {
            let blocks = sizes.blocks();
            let lens = blocks.map(|samples| scratch_of(&link.over(samples, sizes.batch)));
            lens.into_iter().flatten().max().unwrap_or(0)
        };
        let link_scratch = links.iter().map(scratch).max().unwrap_or(0);
        Self { sizes, links, reads, writes, inner, link_scratch }
    }

    fn parts(&self) -> usize {
        self.sizes.batch.div_ceil(self.sizes.part)
    }

    /// f32 elements of what is added to, of one part.
    fn sums_of_part(&self) -> usize {
        let sums = self.writes.iter().filter(|of| !of.by_sample);
        sums.map(|of| of.len.next_multiple_of(16)).sum()
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
        conv::ALIGNMENT + self.inner_lens().sum::<usize>() + self.link_scratch
    }

    /// f32 elements of scratch: sums of all parts but the first, or what the only one takes.
    pub(crate) fn scratch_len(&self) -> usize {
        match self.parts() {
            1 => self.part_len(),
            parts => (parts - 1) * self.sums_of_part(),
        }
    }

    pub(super) fn signature(&self) -> Signature {
        let spec = |of: &Operand| Spec::new(of.dtype, of.len);
        let writes = self.writes.iter().map(spec).chain([scratch(self.scratch_len())]);
        Signature { reads: self.reads.iter().map(spec).collect(), writes: writes.collect() }
    }

    pub(super) fn run(&self, isa: Isa, operands: Operands<'_>) {
        let Operands { reads, mut writes } = operands;
        let scratch = writes.pop().map(SliceMut::elements::<f32>).unwrap_or_default();
        let (sums, own) = scratch.split_at_mut((self.parts() - 1) * self.sums_of_part());
        sums.fill(0.0);
        let scratch = Scratch { own, of_part: self.part_len() };
        parts::each(self.shares(&reads, &mut writes, sums), scratch, |_, share, scratch| {
            self.run_part(isa, share, scratch);
        });
        for part in sums.chunks_exact(self.sums_of_part().max(1)) {
            let mut rest = part;
            for (of, write) in self.writes.iter().zip(&mut writes).filter(|(of, _)| !of.by_sample) {
                let (sum, after) = rest.split_at(of.len.next_multiple_of(16));
                parts::add(bytemuck::cast_slice_mut(write.bytes_mut()), &sum[..of.len]);
                rest = after;
            }
        }
    }

    /// Operands of each part. What is added to is the operand itself for the first part, and zeros
    /// for each other one.
    fn shares<'a>(
        &'a self,
        reads: &'a [Slice<'a>],
        writes: &'a mut [SliceMut<'_>],
        sums: &'a mut [f32],
    ) -> impl Iterator<Item = Share<'a>> {
        let mut rest: SmallVec<[&'a mut [u8]; 16]> =
            writes.iter_mut().map(SliceMut::bytes_mut).collect();
        let mut sums = sums.chunks_exact_mut(self.sums_of_part().max(1));
        (0..self.sizes.batch).step_by(self.sizes.part).map(move |first| {
            let here = first..(first + self.sizes.part).min(self.sizes.batch);
            let reads = self.reads.iter().zip(reads);
            let reads = reads.map(|(of, slice)| &slice.bytes()[of.bytes(self.sizes.batch, &here)]);
            let mut sums = (first > 0).then(|| sums.next()).flatten().unwrap_or_default();
            let writes = self.writes.iter().zip(&mut rest).map(|(of, rest)| {
                if of.by_sample || first == 0 {
                    let bytes = of.bytes(self.sizes.batch, &(0..here.len())).end;
                    return rest.split_off_mut(..bytes).expect("the samples that are left");
                }
                let (sum, after) =
                    std::mem::take(&mut sums).split_at_mut(of.len.next_multiple_of(16));
                sums = after;
                bytemuck::cast_slice_mut(&mut sum[..of.len])
            });
            Share { samples: here.len(), writes: writes.collect(), reads: reads.collect() }
        })
    }

    fn run_part(&self, isa: Isa, mut share: Share<'_>, scratch: &mut [f32]) {
        let mut rest = aligned(scratch);
        let inner = self.inner_lens().map(|len| {
            let (value, after) = std::mem::take(&mut rest).split_at_mut(len);
            rest = after;
            bytemuck::cast_slice_mut(value)
        });
        let inner = inner.collect();
        let writes = share.writes.iter_mut().map(|bytes| &mut **bytes).collect();
        let mut bound = Bound { reads: &share.reads, writes, inner };
        for first in (0..share.samples).step_by(self.sizes.block) {
            let here = first..(first + self.sizes.block).min(share.samples);
            for link in &self.links {
                self.run_link(isa, link, &here, &mut bound, rest);
            }
        }
    }

    /// Runs a link for these samples of a part.
    fn run_link(
        &self,
        isa: Isa,
        link: &Link,
        here: &Range<usize>,
        bound: &mut Bound<'_>,
        scratch: &mut [f32],
    ) {
        // Inner values are those of a block.
        let (batch, block) = (self.sizes.batch, &(0..here.len()));
        let mut taken: SmallVec<[&mut [u8]; 8]> = SmallVec::new();
        for place in &link.writes {
            taken.push(bound.written(*place).map(std::mem::take).unwrap_or_default());
        }
        let reads = link.reads.iter().map(|place| match *place {
            Place::Read(at) => self.reads[at].slice(batch, here, bound.reads[at]),
            Place::Write(at) => self.writes[at].slice(batch, here, &*bound.writes[at]),
            Place::Inner(at) => self.inner[at].slice(batch, block, &*bound.inner[at]),
            Place::Absent => Slice::new(DType::F32, &[]),
        });
        let writes = link.writes.iter().zip(&mut taken).map(|(place, bytes)| match *place {
            Place::Write(at) => self.writes[at].slice_mut(batch, here, bytes),
            Place::Inner(at) => self.inner[at].slice_mut(batch, block, bytes),
            Place::Read(_) | Place::Absent => SliceMut::new(DType::F32, &mut []),
        });
        let scratch = link.takes_scratch.then(|| SliceMut::of(scratch));
        let operands = Operands { reads: reads.collect(), writes: writes.chain(scratch).collect() };
        link.over(here.len(), batch).run(isa, operands);
        for (place, bytes) in link.writes.iter().zip(taken) {
            if let Some(place) = bound.written(*place) {
                *place = bytes;
            }
        }
    }
}
