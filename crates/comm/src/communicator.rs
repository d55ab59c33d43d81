//! What a rank holds: a transport, and the collectives over it.

use crate::agree::not_a_number;
use crate::dense;
use crate::error::{Error, Result};
use crate::number::is_number;
use crate::threads::Threads;
use crate::transport::{Call, Order, Parcel, Reduction, Sum, Transport, share};
use meristem_device::{DType, Owner, Stream, Tensor};
use std::fmt;
use std::time::Duration;

/// How ranks deal with each other.
#[derive(Debug, Clone, PartialEq)]
pub struct CommOptions {
    /// How long a rank waits for the others before it gives up.
    pub deadline: Duration,
}

impl CommOptions {
    /// The deadline; a century where it is longer, for moments so far away cannot be told.
    fn deadline(&self) -> Duration {
        self.deadline.min(Duration::from_secs(100 * 365 * 24 * 3600))
    }
}

impl Default for CommOptions {
    fn default() -> Self {
        CommOptions { deadline: Duration::from_secs(60) }
    }
}

/// What a rank sent to others and received from them: payload only, not what a transport adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Messages sent.
    pub messages: u64,
}

/// One rank's membership in a group of ranks. All calls are collective: every rank makes the same
/// ones, in the same order. They enqueue onto the stream of their tensors and do not wait for the
/// device (over [`mpi`](Communicator::mpi): for what they send), but may wait for the other ranks to
/// make the same call.
///
/// Dropping it tells the others, whose next call, or one in progress, fails at once with an error that
/// names this rank. So does an error that only this rank meets (a tensor that does not fit, a failed
/// launch) in a collective.
pub struct Communicator {
    transport: Box<dyn Transport>,
    scratch: Scratch,
    traffic: Traffic,
}

impl Communicator {
    /// A group of `ranks` threads of this process: one communicator for each, to be moved into its
    /// thread. Their tensors must be on one device (one opening of it), and best on one stream for
    /// each rank.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for no ranks.
    pub fn threads(ranks: usize, options: &CommOptions) -> Result<Vec<Communicator>> {
        if ranks == 0 {
            return Err(Error::BadArgument {
                operation: "Communicator::threads",
                argument: "ranks",
                expected: "at least 1".to_owned(),
                got: "0".to_owned(),
            });
        }
        let threads = Threads::all(ranks, options.deadline()).into_iter();
        Ok(threads.map(|transport| Communicator::new(Box::new(transport))).collect())
    }

    /// This process's place among all that were started together by `mpirun`; alone without it. Once
    /// in a process. Needs the feature `mpi`, and no cfg: without it this is an error that says how
    /// to build.
    ///
    /// Calls of this transport wait for the stream of what they send: MPI takes host memory. A rank
    /// that is killed ends the others with an error once the deadline is over, if `mpirun` does not
    /// end them itself (`--enable-recovery` of Open MPI 4). Groups made by
    /// [`split`](Communicator::split) share one thread: a process that is in several makes their
    /// calls in an order that is the same on all ranks. Dropping the last one waits for the others
    /// to do the same, until the deadline.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn mpi(options: &CommOptions) -> Result<Communicator> {
        Ok(Communicator::new(crate::mpi::world(options.deadline())?))
    }

    /// Over a transport of your own.
    pub fn new(transport: Box<dyn Transport>) -> Communicator {
        Communicator { transport, scratch: Scratch::default(), traffic: Traffic::default() }
    }

    /// The transport under it, to build another on top.
    pub fn into_transport(self) -> Box<dyn Transport> {
        self.transport
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.transport.size()
    }

    /// Name of the transport.
    pub fn transport(&self) -> &'static str {
        self.transport.name()
    }

    /// What this rank sent and received so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Sums or averages a tensor over all ranks, in place, in rank order (X1): the left-to-right
    /// sum, bit for bit, on every rank.
    ///
    /// # Errors
    /// See [`all_reduce_with`](Communicator::all_reduce_with).
    pub fn all_reduce(&mut self, tensor: &Tensor, reduction: Reduction) -> Result<()> {
        let (input, output) = (tensor, tensor);
        self.all_reduce_with(&Sum { input, output, reduction, order: Order::Rank })
    }

    /// Sums or averages a tensor over all ranks (X1). Elements are f32, f64 or bf16. On average a
    /// rank sends 2 (n - 1) / n times the tensor's bytes. NaN and infinities survive; which NaN
    /// comes of several is not promised between transports.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for other elements, or an output that does not fit the input;
    /// [`Error::Disagreement`], [`Error::RankGone`], [`Error::RankLate`]; [`Error::Device`].
    pub fn all_reduce_with(&mut self, sum: &Sum<'_>) -> Result<()> {
        let result = self.try_all_reduce(sum);
        self.told(result)
    }

    fn try_all_reduce(&mut self, sum: &Sum<'_>) -> Result<()> {
        let &Sum { input, output, reduction, order } = sum;
        let operation = "all_reduce";
        check_number(operation, input)?;
        check_same(operation, "the output", input, output)?;
        let (n, len) = (self.size(), input.numel());
        let parameter =
            u64::from(reduction == Reduction::Mean) + 2 * u64::from(order == Order::Fast);
        let call = Call { operation, dtype: Some(input.dtype()), count: len, parameter, kept: 0 };
        let stream = input.stream().clone();
        if n == 1 && input.address() == output.address() {
            return Ok(());
        }
        if !self.transport.all_reduce(&call, &stream, sum)? {
            let (transport, scratch) = (&mut *self.transport, &mut self.scratch);
            dense::all_reduce(transport, scratch, &call, &stream, sum)?;
        }
        let own = share(len, n, self.rank()).len();
        let bytes = ((len - own + (n - 1) * own) * input.dtype().size()) as u64;
        self.count(bytes, bytes, 2 * (n as u64 - 1));
        Ok(())
    }

    /// Copies rank `root`'s tensor to all ranks (X8).
    ///
    /// # Errors
    /// As [`all_reduce_with`](Communicator::all_reduce_with), for elements of any type.
    pub fn broadcast(&mut self, tensor: &Tensor, root: usize) -> Result<()> {
        let result = self.try_broadcast(tensor, root);
        self.told(result)
    }

    fn try_broadcast(&mut self, tensor: &Tensor, root: usize) -> Result<()> {
        let (operation, n, me) = ("broadcast", self.size(), self.rank());
        if root >= n {
            return Err(Error::BadArgument {
                operation,
                argument: "the root",
                expected: format!("below {n}, the number of ranks"),
                got: root.to_string(),
            });
        }
        let (dtype, count) = (Some(tensor.dtype()), tensor.numel());
        let call = Call { operation, dtype, count, parameter: root as u64, kept: 0 };
        let parcel = |peer| Parcel { peer, tensor: tensor.clone() };
        if me == root {
            let sends: Vec<Parcel> = others(me, n).map(parcel).collect();
            self.exchange(&call, tensor.stream(), &sends, &[])
        } else {
            self.exchange(&call, tensor.stream(), &[], &[parcel(root)])
        }
    }

    /// Gathers every rank's `input` into everybody's `output`, by rank (X8). `output` has n times
    /// the elements of `input`, which may be its own place in it.
    ///
    /// # Errors
    /// As [`all_reduce_with`](Communicator::all_reduce_with), for elements of any type.
    pub fn all_gather(&mut self, input: &Tensor, output: &Tensor) -> Result<()> {
        let result = self.try_all_gather(input, output);
        self.told(result)
    }

    fn try_all_gather(&mut self, input: &Tensor, output: &Tensor) -> Result<()> {
        let (operation, n, me, len) = ("all_gather", self.size(), self.rank(), input.numel());
        let (dtype, count) = (Some(input.dtype()), len);
        let call = Call { operation, dtype, count, parameter: 0, kept: 0 };
        if output.numel() != n * len || output.dtype() != input.dtype() {
            return Err(Error::BadArgument {
                operation,
                argument: "the output",
                expected: format!("{} x {}", n * len, input.dtype()),
                got: format!("{} x {}", output.numel(), output.dtype()),
            });
        }
        let own = output.view(me * len, [len])?;
        if own.address() != input.address() {
            copy(input, &own)?;
        }
        self.gather(&call, &own, output)
    }

    /// Sends `own`, this rank's place in `all`, to everybody, and receives theirs.
    pub(crate) fn gather(&mut self, call: &Call, own: &Tensor, all: &Tensor) -> Result<()> {
        let (n, me, len) = (self.size(), self.rank(), own.numel());
        let mut sends = Vec::with_capacity(n - 1);
        let mut receives = Vec::with_capacity(n - 1);
        for peer in others(me, n) {
            sends.push(Parcel { peer, tensor: own.clone() });
            receives.push(Parcel { peer, tensor: all.view(peer * len, [len])? });
        }
        self.exchange(call, own.stream(), &sends, &receives)
    }

    /// Waits until every rank has called it (X8). Does not wait for the device.
    ///
    /// # Errors
    /// [`Error::Disagreement`], [`Error::RankGone`], [`Error::RankLate`].
    pub fn barrier(&mut self) -> Result<()> {
        self.transport.barrier(&Call {
            operation: "barrier",
            dtype: None,
            count: 0,
            parameter: 0,
            kept: 0,
        })
    }

    /// New groups (X8): ranks with the same `color` form one, ranked by `key`, and by their rank
    /// here where keys are equal. This group stays as it is.
    ///
    /// # Errors
    /// As [`barrier`](Communicator::barrier).
    pub fn split(&mut self, color: u64, key: u64) -> Result<Communicator> {
        let call = Call { operation: "split", dtype: None, count: 0, parameter: 0, kept: 0 };
        Ok(Communicator::new(self.transport.split(&call, color, key)?))
    }

    /// Tells the others of an error that they cannot know.
    pub(crate) fn told<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            if error.is_own() {
                self.transport.abort(&error.to_string());
            }
        })
    }

    /// Makes sure that all ranks make this call, where there is nothing to move.
    pub(crate) fn agree(&mut self, call: &Call, stream: &Stream) -> Result<()> {
        self.exchange(call, stream, &[], &[])
    }

    /// An exchange whose bytes are counted.
    pub(crate) fn exchange(
        &mut self,
        call: &Call,
        stream: &Stream,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        self.transport.exchange(call, stream, sends, receives)?;
        let bytes = |parcels: &[Parcel]| -> u64 {
            let sizes = parcels.iter().map(|p| p.tensor.numel() * p.tensor.dtype().size());
            sizes.sum::<usize>() as u64
        };
        self.count(bytes(sends), bytes(receives), sends.len() as u64);
        Ok(())
    }

    fn count(&mut self, sent_bytes: u64, received_bytes: u64, messages: u64) {
        self.traffic.sent_bytes += sent_bytes;
        self.traffic.received_bytes += received_bytes;
        self.traffic.messages += messages;
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator({}, rank {} of {})", self.transport(), self.rank(), self.size())
    }
}

/// All ranks but one.
pub(crate) fn others(me: usize, n: usize) -> impl Iterator<Item = usize> {
    (0..n).filter(move |peer| *peer != me)
}

/// Error unless the elements can be summed.
pub(crate) fn check_number(operation: &'static str, tensor: &Tensor) -> Result<()> {
    if is_number(tensor.dtype()) {
        Ok(())
    } else {
        Err(not_a_number(operation, Some(tensor.dtype())))
    }
}

/// Error unless both have the same type and number of elements, and belong to one stream.
pub(crate) fn check_same(
    operation: &'static str,
    argument: &'static str,
    expected: &Tensor,
    got: &Tensor,
) -> Result<()> {
    let describe = |tensor: &Tensor| {
        let stream = tensor.stream();
        let (id, name) = (tensor.device().id(), stream.name());
        format!("{} x {} on stream `{name}` of {id}", tensor.numel(), tensor.dtype())
    };
    let fits = expected.dtype() == got.dtype()
        && expected.numel() == got.numel()
        && expected.stream() == got.stream();
    if fits {
        return Ok(());
    }
    let (expected, got) = (describe(expected), describe(got));
    Err(Error::BadArgument { operation, argument, expected, got })
}

/// Copies elements on the device.
fn copy(from: &Tensor, to: &Tensor) -> Result<()> {
    let launch = to.stream().launch("all_gather, own share").read(from).write(to);
    match from.dtype() {
        DType::U8 => launch.run(|args| args.write::<u8>(1).copy_from_slice(args.read(0)))?,
        DType::U32 => launch.run(|args| args.write::<u32>(1).copy_from_slice(args.read(0)))?,
        DType::I64 => launch.run(|args| args.write::<i64>(1).copy_from_slice(args.read(0)))?,
        DType::F32 => launch.run(|args| args.write::<f32>(1).copy_from_slice(args.read(0)))?,
        DType::F64 => launch.run(|args| args.write::<f64>(1).copy_from_slice(args.read(0)))?,
        DType::BF16 => {
            launch.run(|args| args.write::<half::bf16>(1).copy_from_slice(args.read(0)))?;
        }
    }
    Ok(())
}

/// Memory that a collective needs for itself, made once and kept.
#[derive(Default)]
pub(crate) struct Scratch(Vec<Tensor>);

impl Scratch {
    /// `len` elements, unspecified; the same memory as the last time if that was large enough.
    pub(crate) fn get(&mut self, stream: &Stream, dtype: DType, len: usize) -> Result<Tensor> {
        let fits = |kept: &&Tensor| kept.dtype() == dtype && kept.stream() == stream;
        if let Some(kept) = self.0.iter().find(fits).filter(|kept| kept.numel() >= len) {
            return Ok(kept.view(0, [len])?);
        }
        self.0.retain(|kept| !fits(&kept));
        let tensor = Tensor::empty(stream, [len], dtype, Owner::Collectives)?;
        self.0.push(tensor.clone());
        Ok(tensor)
    }
}
