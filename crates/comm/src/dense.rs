//! X1 over any transport: reduce-scatter by exchange, addition in rank order, all-gather.
//!
//! A rank sends every other rank its share of the values, adds up what it got for its own share,
//! from rank 0 upwards, and sends the result to all: 2 (n - 1) / n of the values, on average over
//! the ranks, and the left-to-right sum bit for bit.

use crate::communicator::{Scratch, others};
use crate::error::Result;
use crate::number::{Number, divide, with_number};
use crate::transport::{Call, Parcel, Reduction, Sum, Transport, share};
use meristem_device::simd::{Vectorized, vectorize};
use meristem_device::{Args, Stream};

/// Sums by exchanges.
pub(crate) fn all_reduce(
    transport: &mut dyn Transport,
    scratch: &mut Scratch,
    call: &Call,
    stream: &Stream,
    sum: &Sum<'_>,
) -> Result<()> {
    let &Sum { input, output, reduction, .. } = sum;
    let (n, me, len) = (transport.size(), transport.rank(), input.numel());
    let own = share(len, n, me);
    let of = |rank: usize| share(len, n, rank);
    let rows = scratch.get(stream, input.dtype(), own.len() * (n - 1))?;
    let mut sends = Vec::with_capacity(n - 1);
    let mut receives = Vec::with_capacity(n - 1);
    for (row, peer) in others(me, n).enumerate() {
        sends.push(Parcel { peer, tensor: input.view(of(peer).start, [of(peer).len()])? });
        receives.push(Parcel { peer, tensor: rows.view(row * own.len(), [own.len()])? });
    }
    transport.exchange(call, stream, &sends, &receives)?;

    let mine = output.view(own.start, [own.len()])?;
    let divisor = (reduction == Reduction::Mean).then_some(n);
    let in_place = input.address() == output.address();
    if !in_place {
        let from = input.view(own.start, [own.len()])?;
        let launch = stream.launch("all_reduce, own share").read(&from).write(&mine);
        with_number!(
            input.dtype(),
            T => launch.run(|args| args.write::<T>(1).copy_from_slice(args.read(0)))?,
            return Err(crate::agree::not_a_number(call.operation, call.dtype))
        );
    }
    let launch = stream.launch("all_reduce, add").read(&rows).write(&mine);
    with_number!(
        input.dtype(),
        T => launch.run(move |args| add::<T>(args, me, n, divisor))?,
        return Err(crate::agree::not_a_number(call.operation, call.dtype))
    );

    sends.clear();
    receives.clear();
    for peer in others(me, n) {
        sends.push(Parcel { peer, tensor: mine.clone() });
        receives.push(Parcel { peer, tensor: output.view(of(peer).start, [of(peer).len()])? });
    }
    transport.exchange(call, stream, &sends, &receives)
}

/// Adds the rows of the other ranks (argument 0) to the own values (argument 1), in rank order.
fn add<T: Number>(args: &mut Args<'_>, me: usize, n: usize, divisor: Option<usize>) {
    vectorize(args.isa(), Add { rows: args.read::<T>(0), own: args.write::<T>(1), me, n, divisor });
}

struct Add<'a, T> {
    /// [n - 1, own.len()]
    rows: &'a [T],
    own: &'a mut [T],
    me: usize,
    n: usize,
    divisor: Option<usize>,
}

/// Elements added at a time, as in the sum of threads.
const BLOCK: usize = 1024;

impl<T: Number> Vectorized for Add<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let len = self.own.len();
        let mut buffer = [T::ZERO; BLOCK];
        for start in (0..len).step_by(BLOCK) {
            let end = len.min(start + BLOCK);
            let sum = &mut buffer[..end - start];
            for rank in 0..self.n {
                let row = if rank < self.me { rank } else { rank.wrapping_sub(1) };
                let values = if rank == self.me {
                    &self.own[start..end]
                } else {
                    &self.rows[row * len + start..row * len + end]
                };
                if rank == 0 {
                    sum.copy_from_slice(values);
                } else {
                    sum.iter_mut().zip(values).for_each(|(sum, x)| *sum = sum.plus(*x));
                }
            }
            divide(sum, self.divisor);
            self.own[start..end].copy_from_slice(sum);
        }
    }
}
