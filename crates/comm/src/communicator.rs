//! The communicator of a rank: a transport, and the collectives over it.

use std::fmt;
use std::time::Duration;

use meristem_device::{Stream, Tensor};

use crate::check::{self, GroupRank};
use crate::error::{Error, Result};
use crate::log::{self, COMM_LOG};
use crate::nccl::Nccl;
use crate::scratch::CollectiveScratch;
use crate::spans::Spans;
use crate::threads::Threads;
use crate::transport::{
    CollectiveCall, Parcel, Reduction, Sum, SumOrder, Transport, others, shard,
};
use crate::{dense, tcp};

/// Options of a communicator.
#[derive(Debug, Clone, PartialEq)]
pub struct CommOptions {
    /// Time after which a rank stops waiting for the others.
    pub deadline: Duration,
}

impl CommOptions {
    /// The deadline, at most a century, so that it can be added to the current time.
    fn deadline(&self) -> Duration {
        self.deadline.min(Duration::from_secs(100 * 365 * 24 * 3600))
    }
}

impl Default for CommOptions {
    fn default() -> Self {
        CommOptions { deadline: Duration::from_secs(60) }
    }
}

/// Payload that a rank sent and received, without overhead of the transport.
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
/// calls in the same order. A call enqueues work onto the stream of its tensors. It may wait for
/// the other ranks' calls. Over threads on one device, and for tensors of a CUDA device over
/// [`nccl`](Communicator::nccl), it does not wait for the device. Between devices of a process,
/// over [`mpi`](Communicator::mpi) and over TCP ([`rendezvous`](Communicator::rendezvous)) it waits
/// for the work on the tensors that it sends; if MPI gets addresses of GPU memory, also for the
/// work on those that it receives.
///
/// Dropping a communicator notifies the other ranks: their current or next call fails at once with
/// an error that names this rank. An error of this rank alone in a collective does the same, for
/// example a tensor that does not fit or a failed launch.
pub struct Communicator {
    transport: Box<dyn Transport>,
    scratch: CollectiveScratch,
    traffic: Traffic,
}

impl Communicator {
    /// Creates a group of `ranks` threads of this process: one communicator per thread, to be moved
    /// into it. The tensors of a rank are on one device, preferably with one stream per rank. If
    /// ranks are on different devices, or different openings of a device, elements pass through
    /// host memory, and calls wait for the stream of the tensors that they send; the results have
    /// the same bits.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for 0 ranks.
    pub fn threads(ranks: usize, options: &CommOptions) -> Result<Vec<Communicator>> {
        if ranks == 0 {
            return Err(Error::argument("Communicator::threads", "ranks", "at least 1", 0));
        }
        let threads = Threads::all(ranks, options.deadline()).into_iter();
        Ok(threads.map(|transport| Communicator::new(Box::new(transport))).collect())
    }

    /// This process's rank among all processes started by one `mpirun`; a group of one without
    /// `mpirun`. May be called once per process. Without the feature `mpi` the error explains how
    /// to build with it, so callers need no `cfg`.
    ///
    /// A library that says that it takes memory of a GPU
    /// ([`mpi_takes_cuda_memory`](meristem_device::mpi_takes_cuda_memory)) gets the addresses of
    /// tensors on a CUDA device. All other tensors pass through host memory. In both cases each
    /// exchange of a call waits once for the device: by address for all work on the tensors that it
    /// sends or receives, through host memory for the tensors that it sends, if any. After a rank
    /// was killed, the calls of the other ranks fail at the deadline, or `mpirun` ends the other
    /// ranks (Open MPI 4 continues under `--enable-recovery`).
    ///
    /// All groups of a process, also those from [`split`](Communicator::split), share one thread
    /// for MPI. So processes that have several groups in common must make the calls of these groups
    /// in the same order. Dropping the last communicator of a process waits until all processes
    /// have dropped theirs, at most for the deadline.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn mpi(options: &CommOptions) -> Result<Communicator> {
        Ok(Communicator::new(crate::mpi::world(options.deadline())?))
    }

    /// This process's rank among all processes that were started together. Waits until all
    /// processes have joined. Processes find each other
    /// - by `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, as set by torchrun. Rank 0
    ///   listens at this port, or one port higher if torchrun's agent uses it. It forwards all
    ///   messages, so messages should be small compared with the computation. Calls wait for the
    ///   stream of the tensors that they send. Dropping the last communicator of rank 0 waits until
    ///   the other ranks have dropped theirs, at most for the deadline.
    /// - by MPI otherwise: see [`mpi`](Communicator::mpi).
    ///
    /// # Errors
    /// [`Error::BadArgument`] for missing or inconsistent variables, or an unreachable rank 0;
    /// [`Error::RankLate`] for a rank that does not join; [`Error::RankGone`] for a rank that is
    /// lost before all have joined; [`Error::Unavailable`].
    pub fn rendezvous(options: &CommOptions) -> Result<Communicator> {
        let deadline = options.deadline();
        match tcp::ProcessPlace::from_environment()? {
            Some(place) => Ok(Communicator::new(tcp::world(&place, deadline)?)),
            None => Communicator::mpi(options),
        }
    }

    /// Ranks with tensors on CUDA devices, one device per process. Elements move over NCCL, in
    /// stream order, and calls do not wait for the device. `control` connects the processes: every
    /// call begins with an agreement of all ranks over it. Tensors in host memory are exchanged
    /// over `control`.
    ///
    /// Dense sums are in rank order, by kernels of this library. If a rank is lost during an
    /// exchange, the devices of the other ranks fail: reading a result returns
    /// [`meristem_device::CudaError::ExchangeAborted`], which converts to the [`Error`] that names
    /// the rank.
    ///
    /// Dropping the communicator waits until the devices of all ranks have ended their exchanges
    /// with this rank, at most for the deadline plus ten seconds, or for six seconds if a rank was
    /// lost or this rank panics. This wait needs no calls of other ranks. Then `control` is
    /// dropped, which may wait until the other ranks drop theirs:
    /// [`mpi`](Communicator::mpi) and [`rendezvous`](Communicator::rendezvous) say when.
    ///
    /// # Errors
    /// [`Error::Device`] without NCCL, with a version that is too old, or without the feature
    /// `cuda`.
    pub fn nccl(control: Communicator) -> Result<Communicator> {
        Ok(Communicator::new(Box::new(Nccl::over(control.into_transport())?)))
    }

    /// The libraries that this build's transports are linked with: name of the transport and
    /// version text of the library. Threads and TCP need none; NCCL is loaded at run time and is
    /// not among them.
    pub fn libraries() -> Vec<(&'static str, String)> {
        crate::mpi::library().map(|library| ("mpi", library)).into_iter().collect()
    }

    /// Environment variables that turn on logging in the libraries of this build's transports. Set
    /// them before the process starts.
    pub fn debug_environment() -> impl Iterator<Item = (&'static str, &'static str)> {
        crate::mpi::DEBUG_ENVIRONMENT.iter().chain(crate::nccl::DEBUG_ENVIRONMENT).copied()
    }

    /// A communicator over a custom transport.
    pub fn new(transport: Box<dyn Transport>) -> Communicator {
        Communicator {
            transport,
            scratch: CollectiveScratch::default(),
            traffic: Traffic::default(),
        }
    }

    /// Returns the transport, for another communicator.
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
    pub fn transport_name(&self) -> &'static str {
        self.transport.name()
    }

    /// Bytes and messages sent and received by this rank.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Sums or averages a tensor over all ranks, in place (X1). The sum is from rank 0 upwards,
    /// with the same bits on every rank.
    ///
    /// # Errors
    /// See [`all_reduce_with`](Communicator::all_reduce_with).
    pub fn all_reduce(&mut self, tensor: &Tensor, reduction: Reduction) -> Result<()> {
        let (input, output) = (tensor, tensor);
        self.all_reduce_with(&Sum { input, output, reduction, order: SumOrder::Rank })
    }

    /// Sums or averages a tensor over all ranks (X1). Elements are f32, f64 or bf16. A rank sends 2
    /// (n - 1) / n times the tensor's bytes on average. NaN and infinities are preserved; the sum
    /// of several different NaNs may differ between transports.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for another element type, or an output that does not fit the input;
    /// [`Error::Disagreement`], [`Error::RankGone`], [`Error::RankLate`], [`Error::RankFailed`];
    /// [`Error::Device`].
    pub fn all_reduce_with(&mut self, sum: &Sum<'_>) -> Result<()> {
        let result = self.try_all_reduce(sum);
        self.broadcast_error(result)
    }

    fn try_all_reduce(&mut self, sum: &Sum<'_>) -> Result<()> {
        let &Sum { input, output, reduction, order } = sum;
        let operation = "all_reduce";
        check::like(input).check(operation, "input", input)?;
        check::summable(operation, "input", input)?;
        check::output(operation, input, output)?;
        self.log_placement(operation, &[input], &[output]);
        let call = CollectiveCall::on(operation, input);
        let spans = [Spans::try_from(input)?, Spans::try_from(output)?];
        self.sum(call, &Sum { input: &spans[0], output: &spans[1], reduction, order })?;
        Ok(check::like(input).check(operation, "output", output)?)
    }

    /// Sums elements with checked layouts.
    pub(crate) fn sum(&mut self, call: CollectiveCall, sum: &Sum<'_, Spans>) -> Result<()> {
        let &Sum { input, output, reduction, order } = sum;
        let (n, len) = (self.size(), input.len());
        let parameter =
            u64::from(reduction == Reduction::Mean) + 2 * u64::from(order == SumOrder::Fast);
        let (call, stream) = (CollectiveCall { parameter, ..call }, input.stream());
        if n == 1 && input.is_same(output) {
            return Ok(());
        }
        if !self.transport.all_reduce(&call, stream, sum)? {
            let (transport, scratch) = (&mut *self.transport, &mut self.scratch);
            dense::all_reduce(transport, scratch, &call, stream, sum)?;
        }
        let own = shard(len, n, self.rank()).len();
        let bytes = ((len - own + (n - 1) * own) * input.dtype().size()) as u64;
        self.count(bytes, bytes, 2 * (n as u64 - 1));
        Ok(())
    }

    /// Copies rank `root`'s tensor to all ranks (X8).
    ///
    /// # Errors
    /// The errors of [`all_reduce_with`](Communicator::all_reduce_with), for elements of any type.
    pub fn broadcast(&mut self, tensor: &Tensor, root: usize) -> Result<()> {
        let result = self.try_broadcast(tensor, root);
        self.broadcast_error(result)
    }

    fn try_broadcast(&mut self, tensor: &Tensor, root: usize) -> Result<()> {
        let (operation, n, me) = ("broadcast", self.size(), self.rank());
        if root >= n {
            let expected = format!("below {n}, the number of ranks");
            return Err(Error::argument(operation, "root", expected, root));
        }
        let expect = check::like(tensor);
        expect.check(operation, "tensor", tensor)?;
        self.log_placement(operation, &[tensor], &[tensor]);
        let call =
            CollectiveCall { parameter: root as u64, ..CollectiveCall::on(operation, tensor) };
        let elements = Spans::try_from(tensor)?;
        let parcel = |peer| Parcel { peer, elements: elements.clone() };
        if me == root {
            let sends: Vec<Parcel> = others(me, n).map(parcel).collect();
            self.exchange(&call, tensor.stream(), &sends, &[])?;
        } else {
            self.exchange(&call, tensor.stream(), &[], &[parcel(root)])?;
        }
        Ok(expect.check(operation, "tensor", tensor)?)
    }

    /// Gathers the inputs of all ranks into the output of every rank, in rank order (X8). `output`
    /// has n times the elements of `input`; `input` may be this rank's part of `output`.
    ///
    /// # Errors
    /// The errors of [`all_reduce_with`](Communicator::all_reduce_with), for elements of any type.
    pub fn all_gather(&mut self, input: &Tensor, output: &Tensor) -> Result<()> {
        let result = self.try_all_gather(input, output);
        self.broadcast_error(result)
    }

    fn try_all_gather(&mut self, input: &Tensor, output: &Tensor) -> Result<()> {
        let (operation, n, me, len) = ("all_gather", self.size(), self.rank(), input.numel());
        check::like(input).check(operation, "input", input)?;
        check::gathered(operation, input, output, GroupRank { rank: me, size: n })?;
        self.log_placement(operation, &[input], &[output]);
        let own = output.view(me * len, [len])?;
        if own.address() != input.address() {
            own.stream().copy("all_gather, own part", &[(&input.view(0, [len])?, &own)])?;
        }
        let mut sends = Vec::with_capacity(n - 1);
        let mut receives = Vec::with_capacity(n - 1);
        for peer in others(me, n) {
            sends.push(Parcel::new(peer, &own)?);
            receives.push(Parcel::new(peer, &output.view(peer * len, [len])?)?);
        }
        self.exchange(&CollectiveCall::on(operation, input), own.stream(), &sends, &receives)?;
        check::gathered(operation, input, output, GroupRank { rank: me, size: n })
    }

    /// Waits until every rank has called `barrier` (X8). Does not wait for the device.
    ///
    /// # Errors
    /// [`Error::Disagreement`], [`Error::RankGone`], [`Error::RankLate`], [`Error::RankFailed`].
    pub fn barrier(&mut self) -> Result<()> {
        self.transport.barrier(&CollectiveCall::new("barrier"))
    }

    /// Splits the group (X8): ranks with the same `color` form a new group, ordered by `key`, then
    /// by current rank. This group is unchanged.
    ///
    /// # Errors
    /// The errors of [`barrier`](Communicator::barrier); over MPI [`Error::Unavailable`] after too
    /// many splits.
    pub fn split(&mut self, color: u64, key: u64) -> Result<Communicator> {
        let group =
            Communicator::new(self.transport.split(&CollectiveCall::new("split"), color, key)?);
        let (rank, of, to) = (self.rank(), self.size(), (group.rank(), group.size()));
        tracing::debug!(target: COMM_LOG, rank, of, color, to = ?to, "split");
        Ok(group)
    }

    /// Logs the tensors of a collective, if the placement log is on.
    pub(crate) fn log_placement(
        &self,
        operation: &'static str,
        inputs: &[&Tensor],
        outputs: &[&Tensor],
    ) {
        log::placement(operation, &*self.transport, inputs, outputs);
    }

    /// Reports an error of this rank alone to the other ranks.
    pub(crate) fn broadcast_error<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            tracing::debug!(target: COMM_LOG, rank = self.rank(), %error, "a collective failed");
            if error.is_own() {
                self.transport.abort(&error.to_string());
            }
        })
    }

    /// Checks that all ranks make this call; moves no elements.
    pub(crate) fn agree(&mut self, call: &CollectiveCall, stream: &Stream) -> Result<()> {
        self.exchange(call, stream, &[], &[])
    }

    /// Exchanges parcels and counts their bytes.
    pub(crate) fn exchange(
        &mut self,
        call: &CollectiveCall,
        stream: &Stream,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        self.transport.exchange(call, stream, sends, receives)?;
        let bytes = |parcels: &[Parcel]| -> u64 {
            let sizes = parcels.iter().map(|p| p.elements.len() * p.elements.dtype().size());
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
        write!(
            f,
            "Communicator({}, rank {} of {})",
            self.transport_name(),
            self.rank(),
            self.size()
        )
    }
}
