//! Dense all-reduce of f32 with elements of eight bits, and error feedback.
//!
//! **Format.** [`BLOCK`] consecutive elements share a scale s = m / 127, an f32, where m is the
//! largest magnitude among them. An element x is sent as q = x / s, rounded to the nearest integer,
//! ties to even, and received as q s. So |x − q s| ≤ s / 2, up to a rounding of x / s. A block
//! whose scale would be subnormal is sent as zeros. A block with NaN or infinity is received as
//! NaN, and its residual is cleared.
//!
//! **Sum.** As in [`dense`], each rank owns a shard, here of whole blocks:
//!
//! ```text
//! acc = residual + gradient
//! for every other rank r:  send r the codes of acc in r's shard
//!                          residual' = acc − values of these codes, in r's shard
//! total = sum over ranks, in rank order, of the received values and of acc, in the own shard
//! send all ranks the codes of total
//! residual' = total − values of these codes, in the own shard
//! result = values of the codes of all totals, divided by the number of ranks for a mean
//! ```
//!
//! So each element is rounded once as a value and once as a total. The rank that rounds keeps the
//! error in its residual. Before the division for a mean, the result plus the sum of all residual'
//! equals the sum of all acc, up to the roundings of the additions in rank order. The subtractions
//! are exact: x and q s differ at most by a factor of two unless q = 0 (Sterbenz' lemma). A rank
//! sends 2 (n − 1) / n · (1 + 4 / 256) bytes per element, about a quarter of the dense sum in f32.
//! With one rank nothing is rounded.
//!
//! Compression in both directions with error feedback: Tang et al., "DoubleSqueeze",
//! ICML 2019. The result has the same bits on every rank, transport and device.

use std::ops::Range;

use meristem_device::simd::{Vectorized, vectorize};
use meristem_device::{DType, Owner, Stream, Tensor};

use crate::check::GroupRank;
use crate::communicator::Communicator;
use crate::dense;
use crate::error::{Error, Result};
use crate::gpu;
use crate::number::{SumElement, divide};
use crate::spans::Spans;
use crate::sparse::feedback::Feedback;
use crate::sparse::sum::FeedbackMode;
use crate::transport::{CollectiveCall, Parcel, Reduction, Sum, SumOrder, aligned_shard, others};

/// Elements that share a scale; `BLOCK` in `int8.cu`.
const BLOCK: usize = 256;
/// Largest code.
const CODE_MAX: f32 = 127.0;

/// A sum of `len` elements with its residual. All ranks create it with the same arguments.
pub(crate) struct Int8Sum {
    stream: Stream,
    len: usize,
    pub(crate) feedback: Feedback,
    buffers: Option<Int8Buffers>,
}

/// Memory for one rank of a group.
struct Int8Buffers {
    group: GroupRank,
    /// Codes of all elements, with the scales of their blocks.
    all: Codes,
    /// Codes of the own shard from the other ranks, a row for each.
    received: Codes,
    /// Values of `received`.
    rows: Tensor,
}

/// Codes as bytes in two's complement, and a scale for each block.
struct Codes {
    codes: Tensor,
    scales: Tensor,
}

impl Codes {
    fn new(stream: &Stream, codes: usize, scales: usize) -> Result<Codes> {
        let codes = Tensor::empty(stream, [codes], DType::U8, Owner::Collectives)?;
        let scales = Tensor::empty(stream, [scales], DType::F32, Owner::Collectives)?;
        Ok(Codes { codes, scales })
    }

    /// The codes of a range of elements, which begins with a block.
    fn window(&self, range: &Range<usize>) -> Result<Codes> {
        let blocks = blocks(range);
        Ok(Codes {
            codes: self.codes.view(range.start, [range.len()])?,
            scales: self.scales.view(blocks.start, [blocks.len()])?,
        })
    }

    /// Row `row` among rows of `len` elements.
    fn row(&self, row: usize, len: usize) -> Result<Codes> {
        let blocks = len.div_ceil(BLOCK);
        Ok(Codes {
            codes: self.codes.view(row * len, [len])?,
            scales: self.scales.view(row * blocks, [blocks])?,
        })
    }

    fn parcels(&self, peer: usize) -> Result<[Parcel; 2]> {
        Ok([Parcel::new(peer, &self.codes)?, Parcel::new(peer, &self.scales)?])
    }

    /// Writes the values, divided by `divisor`, to pieces of memory in order.
    fn decode(&self, output: &Spans, divisor: Option<usize>) -> Result<()> {
        if output.is_empty() {
            return Ok(());
        }
        let launch = output.stream().launch("int8, decode").read(&self.codes).read(&self.scales);
        let launch = output.pieces().iter().fold(launch, |launch, piece| launch.write(piece));
        let launch = launch.gpu(|| {
            let (codes, scales) = (gpu::whole(0, &self.codes), gpu::whole(1, &self.scales));
            let mut start = 0;
            let call = |(i, piece): (usize, &Tensor)| {
                let call = gpu::decode([codes, scales], gpu::whole(2 + i, piece), start, divisor);
                start += piece.numel();
                call
            };
            output.pieces().iter().enumerate().map(call).collect::<Vec<_>>()
        });
        launch.run(move |args| {
            let mut start = 0;
            for at in 2..args.len() {
                let (codes, scales) = (args.read::<u8>(0), args.read::<f32>(1));
                let values = args.write::<f32>(at);
                let len = values.len();
                vectorize(args.isa(), Decode { codes, scales, start, values, divisor });
                start += len;
            }
        })?;
        Ok(())
    }
}

/// The blocks of a range of elements that begins with a block, or is empty at the end.
fn blocks(range: &Range<usize>) -> Range<usize> {
    range.start.div_ceil(BLOCK)..range.end.div_ceil(BLOCK)
}

impl Int8Sum {
    /// # Errors
    /// [`Error::BadArgument`] for elements other than f32, or a sum without error feedback, which
    /// would lose what rounding removes; [`Error::Device`].
    pub(crate) fn new(
        stream: &Stream,
        dtype: DType,
        len: usize,
        keep: FeedbackMode,
    ) -> Result<Int8Sum> {
        let operation = "int8_all_reduce";
        if dtype != DType::F32 {
            return Err(Error::argument(operation, "gradients", "f32", dtype));
        }
        let momentum = match keep {
            FeedbackMode::Residual => None,
            FeedbackMode::Momentum(factor) => Some(factor),
            FeedbackMode::Nothing => {
                let expected = "`Residual` or `Momentum`, because rounding needs error feedback";
                return Err(Error::argument(operation, "keep", expected, "`Nothing`"));
            }
        };
        let feedback = Feedback::new(stream, dtype, len, momentum)?;
        Ok(Int8Sum { stream: stream.clone(), len, feedback, buffers: None })
    }

    fn shard(&self, group: GroupRank, rank: usize) -> Range<usize> {
        aligned_shard(self.len, BLOCK, group.size, rank)
    }

    /// Allocates the memory for a group.
    pub(crate) fn prepare(&mut self, comm: &Communicator) -> Result<()> {
        let group = GroupRank { rank: comm.rank(), size: comm.size() };
        let is_for = |buffers: &Int8Buffers| {
            (buffers.group.rank, buffers.group.size) == (group.rank, group.size)
        };
        if group.size == 1 || self.buffers.as_ref().is_some_and(is_for) {
            return Ok(());
        }
        self.buffers = None;
        let (stream, rows) = (&self.stream, group.size - 1);
        let own = self.shard(group, group.rank);
        self.buffers = Some(Int8Buffers {
            group,
            all: Codes::new(stream, self.len, self.len.div_ceil(BLOCK))?,
            received: Codes::new(stream, rows * own.len(), rows * blocks(&own).len())?,
            rows: Tensor::empty(stream, [rows * own.len()], DType::F32, Owner::Collectives)?,
        });
        Ok(())
    }

    /// Sums or averages elements with checked layouts; `output` may be `input`.
    pub(crate) fn sum(&mut self, comm: &mut Communicator, sum: &Sum<'_, Spans>) -> Result<()> {
        let &Sum { input, output, reduction, .. } = sum;
        self.prepare(comm)?;
        let Some(buffers) = &self.buffers else { return self.feedback.drain(input, output) };
        let Int8Buffers { group, all, received, rows } = buffers;
        let GroupRank { rank: me, size: n } = *group;
        let (own, mean) = (self.shard(*group, me), reduction == Reduction::Mean);
        let parameter = u64::from(mean);
        let call = CollectiveCall { parameter, ..CollectiveCall::flat("int8_all_reduce", input) };

        let acc = self.feedback.accumulate(input)?;
        self.encode(all, 0..own.start)?;
        self.encode(all, own.end..self.len)?;
        let (mut sends, mut receives) = (vec![], vec![]);
        for (row, peer) in others(me, n).enumerate() {
            sends.extend(all.window(&self.shard(*group, peer))?.parcels(peer)?);
            receives.extend(received.row(row, own.len())?.parcels(peer)?);
        }
        comm.exchange(&call, &self.stream, &sends, &receives)?;
        for row in 0..n - 1 {
            let values = rows.view(row * own.len(), [own.len()])?;
            received.row(row, own.len())?.decode(&Spans::try_from(&values)?, None)?;
        }
        let total =
            Sum { input: &acc, output: &acc, reduction: Reduction::Sum, order: SumOrder::Rank };
        dense::add(&self.stream, rows, &total, *group, &own)?;

        self.encode(all, own.clone())?;
        (sends, receives) = (vec![], vec![]);
        for peer in others(me, n) {
            sends.extend(all.window(&own)?.parcels(peer)?);
            receives.extend(all.window(&self.shard(*group, peer))?.parcels(peer)?);
        }
        comm.exchange(&call, &self.stream, &sends, &receives)?;
        all.decode(output, mean.then_some(n))
    }

    /// Writes the codes of a range of the residual, which begins with a block, and subtracts their
    /// values from it.
    fn encode(&self, all: &Codes, range: Range<usize>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let acc = self.feedback.residual.view(range.start, [range.len()])?;
        let Codes { codes, scales } = all.window(&range)?;
        let launch = self.stream.launch("int8, encode").write(&acc).write(&codes).write(&scales);
        let launch = launch.gpu(|| {
            let [acc, codes] = [(0, &acc), (1, &codes)].map(|(i, tensor)| gpu::whole(i, tensor));
            vec![gpu::encode(acc, codes, gpu::whole(2, &scales))]
        });
        launch.run(|args| {
            let (acc, codes, scales) = (args.write(0), args.write(1), args.write(2));
            vectorize(args.isa(), Encode { acc, codes, scales });
        })?;
        Ok(())
    }
}

struct Encode<'a> {
    acc: &'a mut [f32],
    codes: &'a mut [u8],
    scales: &'a mut [f32],
}

impl Vectorized for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let blocks = self.acc.chunks_mut(BLOCK).zip(self.codes.chunks_mut(BLOCK));
        for ((acc, codes), scale) in blocks.zip(self.scales) {
            let most = acc.iter().fold(0, |most, x| most.max(x.magnitude()));
            *scale = scale_of(most);
            if scale.is_nan() {
                codes.fill(0);
                acc.fill(f32::NEUTRAL);
            } else if *scale == 0.0 {
                codes.fill(0);
            } else {
                for (x, code) in acc.iter_mut().zip(codes) {
                    let q = (*x / *scale).round_ties_even().clamp(-CODE_MAX, CODE_MAX);
                    *code = q as i8 as u8;
                    *x -= q * *scale;
                }
            }
        }
    }
}

/// The scale of a block from its largest magnitude, as bits: NaN if it is not finite, and zero
/// instead of a subnormal scale, whose rounding would not be bounded.
#[inline(always)]
fn scale_of(most: u32) -> f32 {
    if most >= f32::INFINITY.to_bits() {
        return f32::NAN;
    }
    let scale = f32::from_bits(most) / CODE_MAX;
    if scale < f32::MIN_POSITIVE { 0.0 } else { scale }
}

struct Decode<'a> {
    codes: &'a [u8],
    scales: &'a [f32],
    /// Index of the element that the first value belongs to.
    start: usize,
    values: &'a mut [f32],
    divisor: Option<usize>,
}

impl Vectorized for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Decode { codes, scales, mut start, values: mut rest, divisor } = self;
        while !rest.is_empty() {
            let len = (BLOCK - start % BLOCK).min(rest.len());
            let (values, later) = rest.split_at_mut(len);
            let scale = scales[start / BLOCK];
            for (value, code) in values.iter_mut().zip(&codes[start..start + len]) {
                *value = f32::from(*code as i8) * scale;
            }
            divide(values, divisor);
            (start, rest) = (start + len, later);
        }
    }
}
