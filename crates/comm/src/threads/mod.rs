//! Ranks that are threads of one process, on one device or on several.
//!
//! Ranks meet on a [`RankBoard`]: each contributes handles of its tensors. The last rank to arrive
//! submits one group of launches. The launch on a rank's stream copies the elements that the rank
//! receives, or sums its shard. The threads wait for each other's *calls*. Accesses to elements are
//! ordered on the device and no kernel blocks, so any number of workers suffices. Elements are not
//! staged: a rank reads the other ranks' elements in place.
//!
//! Ranks on different devices find that out in their first exchange. From then on elements pass
//! through host memory ([`messages`]), as between processes, and an exchange waits for the device.

pub(crate) mod board;
mod messages;
mod sum;

use std::ops::Range;
use std::time::Duration;

use meristem_device::{Args, DType, LaunchGroup, Stream, Tensor};
use smallvec::SmallVec;

use self::board::{LeaveReason, RankBoard};
use self::messages::{HostMessage, match_up};
use crate::check::GroupRank;
use crate::error::Result;
use crate::log::COMM_LOG;
use crate::number::with_number;
use crate::spans::{Spans, parts};
use crate::sync::Arc;
use crate::transport::{
    CollectiveCall, Parcel, Parcels, Reduction, Sum, Transport, check_parcels, shard,
};
use crate::watch::{GroupStatus, GroupWatch, Heartbeat};
use crate::{gpu, host};

/// Contribution of a rank to a meeting.
struct ThreadArrival {
    call: CollectiveCall,
    /// Stream for the rank's part of the work; `None` for a barrier, a split, or messages.
    stream: Option<Stream>,
    arguments: ThreadArguments,
}

/// Arguments of a rank's call.
enum ThreadArguments {
    Exchange {
        sends: Vec<Parcel>,
        receives: Vec<Parcel>,
    },
    /// An exchange through host memory.
    Messages {
        sends: Vec<HostMessage>,
        receives: Vec<Parcel>,
    },
    Sum {
        input: Spans,
        output: Spans,
        reduction: Reduction,
    },
    Split {
        color: u64,
        key: u64,
    },
    Barrier,
}

impl ThreadArguments {
    /// Input and output of a sum.
    fn sum(&self) -> Option<(&Spans, &Spans)> {
        match self {
            ThreadArguments::Sum { input, output, .. } => Some((input, output)),
            _ => None,
        }
    }
}

/// Answer of the board to a rank.
enum ThreadAnswer {
    Done,
    /// Nothing is done, because the ranks are on different devices.
    DevicesDiffer,
    /// The bytes of each parcel to receive.
    Messages(Vec<Arc<Vec<u8>>>),
    Split(Threads),
}

type Meeting = RankBoard<ThreadArrival, ThreadAnswer>;

/// The transport of a rank that is a thread.
pub(crate) struct Threads {
    board: Arc<Meeting>,
    rank: usize,
    /// Whether the ranks are known to be on different devices.
    on_other_devices: bool,
}

impl Threads {
    /// The transports of a new group.
    pub(crate) fn all(size: usize, deadline: Duration) -> Vec<Threads> {
        let board = Arc::new(RankBoard::new(size, deadline));
        (0..size)
            .map(|rank| Threads { board: board.clone(), rank, on_other_devices: false })
            .collect()
    }

    fn meet(
        &self,
        call: &CollectiveCall,
        stream: Option<&Stream>,
        arguments: ThreadArguments,
    ) -> Result<ThreadAnswer> {
        let arrival = ThreadArrival { call: *call, stream: stream.cloned(), arguments };
        let deadline = self.board.deadline();
        self.board.meet(call.operation, self.rank, arrival, |arrivals, answers| {
            let arrivals: Vec<&ThreadArrival> = arrivals.iter().flatten().collect();
            check_calls(&arrivals)?;
            if devices_differ(&arrivals) {
                answers.iter_mut().for_each(|answer| *answer = Some(ThreadAnswer::DevicesDiffer));
                return Ok(());
            }
            match arrivals[0].arguments {
                ThreadArguments::Exchange { .. } => exchange(&arrivals)?,
                ThreadArguments::Sum { .. } => sum(&arrivals)?,
                ThreadArguments::Messages { .. } => return hand_over(&arrivals, answers),
                ThreadArguments::Split { .. } => return split(&arrivals, deadline, answers),
                ThreadArguments::Barrier => {}
            }
            answers.iter_mut().for_each(|answer| *answer = Some(ThreadAnswer::Done));
            Ok(())
        })
    }

    /// Exchanges through host memory. Waits for the device.
    fn exchange_by_host(
        &self,
        call: &CollectiveCall,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()> {
        let (sends, own) = (messages::read(sends)?, receives.to_vec());
        let arguments = ThreadArguments::Messages { sends, receives: own };
        if let ThreadAnswer::Messages(all) = self.meet(call, None, arguments)? {
            for (Parcel { elements, .. }, bytes) in receives.iter().zip(all) {
                host::deliver(elements, &bytes)?;
            }
        }
        Ok(())
    }

    /// Remembers that the ranks are on different devices.
    fn note_devices_differ(&mut self) {
        self.on_other_devices = true;
        let (rank, ranks) = (self.rank, self.board.size());
        tracing::debug!(target: COMM_LOG, rank, ranks, "devices differ: through host memory");
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Transport for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.board.size()
    }

    fn exchange(
        &mut self,
        call: &CollectiveCall,
        stream: &Stream,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()> {
        let group = GroupRank { rank: self.rank(), size: self.size() };
        check_parcels(call.operation, stream, group, Parcels { sends, receives })?;
        if !self.on_other_devices {
            let arguments =
                ThreadArguments::Exchange { sends: sends.to_vec(), receives: receives.to_vec() };
            match self.meet(call, Some(stream), arguments)? {
                ThreadAnswer::DevicesDiffer => self.note_devices_differ(),
                _ => return Ok(()),
            }
        }
        self.exchange_by_host(call, sends, receives)
    }

    fn all_reduce(
        &mut self,
        call: &CollectiveCall,
        stream: &Stream,
        sum: &Sum<'_, Spans>,
    ) -> Result<bool> {
        if self.on_other_devices {
            return Ok(false);
        }
        // Serves both orders: each rank sums in rank order in either case.
        let (input, output) = (sum.input.clone(), sum.output.clone());
        let arguments = ThreadArguments::Sum { input, output, reduction: sum.reduction };
        let answer = self.meet(call, Some(stream), arguments)?;
        if let ThreadAnswer::DevicesDiffer = answer {
            self.note_devices_differ();
        }
        Ok(!self.on_other_devices)
    }

    fn barrier(&mut self, call: &CollectiveCall) -> Result<()> {
        self.meet(call, None, ThreadArguments::Barrier).map(drop)
    }

    fn abort(&mut self, reason: &str) {
        self.board.abort(self.rank, reason);
    }

    fn leave(&mut self) {
        self.board.leave(self.rank, LeaveReason::of_this_thread());
    }

    fn deadline(&self) -> Duration {
        self.board.deadline()
    }

    fn watch(&mut self) -> Result<Box<dyn GroupWatch>> {
        Ok(Box::new(ThreadWatch { board: self.board.clone(), rank: self.rank }))
    }

    fn split(&mut self, call: &CollectiveCall, color: u64, key: u64) -> Result<Box<dyn Transport>> {
        match self.meet(call, None, ThreadArguments::Split { color, key })? {
            ThreadAnswer::Split(threads) => Ok(Box::new(threads)),
            _ => unreachable!("calls are checked to be splits on all ranks"),
        }
    }
}

/// The watching thread's view of the group.
struct ThreadWatch {
    board: Arc<Meeting>,
    rank: usize,
}

impl Drop for ThreadWatch {
    fn drop(&mut self) {
        self.board.unwatch(self.rank);
    }
}

impl GroupWatch for ThreadWatch {
    fn heartbeat(&mut self, heartbeat: &Heartbeat) -> GroupStatus {
        self.board.heartbeat(self.rank, heartbeat)
    }
}

/// Compares the calls of all ranks.
fn check_calls(arrivals: &[&ThreadArrival]) -> Result<()> {
    let calls: SmallVec<[CollectiveCall; 8]> =
        arrivals.iter().map(|arrival| arrival.call).collect();
    crate::agree::check(&calls)
}

/// Whether the streams of the ranks are on different devices, or on different openings of one.
fn devices_differ(arrivals: &[&ThreadArrival]) -> bool {
    let mut devices = arrivals.iter().map(|arrival| arrival.stream.as_ref().map(Stream::device));
    let first = devices.next().flatten();
    devices.any(|device| device != first)
}

/// Moves the parcels: each rank copies the elements that are sent to it.
fn exchange(arrivals: &[&ThreadArrival]) -> Result<()> {
    let operation = arrivals[0].call.operation;
    let (sends, receives): (Vec<_>, Vec<_>) =
        arrivals.iter().map(|arrival| parcels(arrival)).unzip();
    let mut pairs: Vec<Vec<[Tensor; 2]>> = arrivals.iter().map(|_| Vec::new()).collect();
    match_up(operation, &sends, &receives, |to, index, source| {
        pair_up(&source.elements, &receives[to][index].elements, &mut pairs[to])
    })?;
    let mut group = LaunchGroup::default();
    for (arrival, pairs) in arrivals.iter().zip(&pairs) {
        let Some(stream) = &arrival.stream else { continue };
        let launch = pairs.iter().fold(stream.launch(operation), |launch, [source, target]| {
            launch.read(source).write(target)
        });
        launch.gpu(|| copies(pairs)).join(&mut group, copy)?;
    }
    group.run()?;
    Ok(())
}

/// Pairs the pieces of two sequences, source and target.
fn pair_up(source: &Spans, target: &Spans, pairs: &mut Vec<[Tensor; 2]>) -> Result<()> {
    // Lists of a sparse sum are one piece each. Views would dominate the cost of a small exchange.
    if let ([from], [to]) = (source.pieces(), target.pieces()) {
        pairs.push([from.clone(), to.clone()]);
        return Ok(());
    }
    for part in parts([source, target].into_iter(), &(0..source.len())) {
        let (from, to) = (source.window(part.clone())?, target.window(part)?);
        pairs.extend(from.into_pieces().zip(to.into_pieces()).map(<[Tensor; 2]>::from));
    }
    Ok(())
}

fn parcels(arrival: &ThreadArrival) -> (&[Parcel], &[Parcel]) {
    match &arrival.arguments {
        ThreadArguments::Exchange { sends, receives } => (sends, receives),
        _ => (&[], &[]),
    }
}

/// Answers each rank with the bytes that are sent to it.
fn hand_over(arrivals: &[&ThreadArrival], answers: &mut [Option<ThreadAnswer>]) -> Result<()> {
    let operation = arrivals[0].call.operation;
    let (sends, receives): (Vec<_>, Vec<_>) =
        arrivals.iter().map(|arrival| messages(arrival)).unzip();
    let mut all: Vec<_> = receives.iter().map(|own| vec![Arc::default(); own.len()]).collect();
    match_up(operation, &sends, &receives, |to, index, message| {
        all[to][index] = message.bytes.clone();
        Ok(())
    })?;
    for (answer, bytes) in answers.iter_mut().zip(all) {
        *answer = Some(ThreadAnswer::Messages(bytes));
    }
    Ok(())
}

fn messages(arrival: &ThreadArrival) -> (&[HostMessage], &[Parcel]) {
    match &arrival.arguments {
        ThreadArguments::Messages { sends, receives } => (sends, receives),
        _ => (&[], &[]),
    }
}

/// The calls of [`copy`] on a CUDA device.
fn copies(pairs: &[[Tensor; 2]]) -> Vec<gpu::Call> {
    let pieces = |(i, pair): (usize, &[Tensor; 2])| {
        let len = pair[0].numel() * pair[0].dtype().size();
        [2 * i, 2 * i + 1].map(|argument| gpu::Piece { argument, start: 0, len })
    };
    let pieces: Vec<_> = pairs.iter().enumerate().map(pieces).collect();
    gpu::copies(&pieces)
}

/// Copies argument 0 to 1, 2 to 3 and so on.
fn copy(args: &mut Args<'_>) {
    for from in (0..args.len()).step_by(2) {
        args.bytes_mut(from + 1).copy_from_slice(args.bytes(from));
    }
}

/// All-reduce: each rank sums its shard in rank order and writes it to all outputs.
fn sum(arrivals: &[&ThreadArrival]) -> Result<()> {
    let (n, call) = (arrivals.len(), arrivals[0].call);
    let operands: SmallVec<[(&Spans, &Spans); 8]> =
        arrivals.iter().filter_map(|arrival| arrival.arguments.sum()).collect();
    // In place, the output is the input.
    let in_place: SmallVec<[bool; 8]> =
        operands.iter().map(|(input, output)| input.is_same(output)).collect();
    let mut shares = Vec::with_capacity(n);
    for rank in 0..n {
        shares.push(pieces_of_shard(&operands, &in_place, shard(call.count(), n, rank))?);
    }
    let mean =
        matches!(arrivals[0].arguments, ThreadArguments::Sum { reduction: Reduction::Mean, .. });
    // Index of each rank's input among the arguments of a part; `None` if the output is the input.
    let mut others = n..;
    let sources: SmallVec<[Option<usize>; 8]> =
        in_place.iter().map(|same| if *same { None } else { others.next() }).collect();
    let arguments = others.start;
    let mut group = LaunchGroup::default();
    for (arrival, pieces) in arrivals.iter().zip(&shares) {
        let Some(stream) = &arrival.stream else { continue };
        let mut launch = stream.launch(call.operation);
        for (i, piece) in pieces.iter().enumerate() {
            launch = if i % arguments < n { launch.write(piece) } else { launch.read(piece) };
        }
        let (divisor, sources) = (mean.then_some(n), sources.clone());
        let launch = launch.gpu(|| sums(pieces, arguments, &sources, divisor));
        with_number!(
            call.dtype.unwrap_or(DType::F32),
            T => launch.join(&mut group, move |args| {
                for first in (0..args.len()).step_by(arguments) {
                    sum::run::<T>(args, first, &sources, divisor);
                }
            })?,
            return Err(crate::agree::not_a_number(call.operation, call.dtype))
        );
    }
    group.run()?;
    Ok(())
}

/// The calls of [`sum::run`] on a CUDA device, for all parts.
fn sums(
    pieces: &[Tensor],
    arguments: usize,
    sources: &[Option<usize>],
    divisor: Option<usize>,
) -> Vec<gpu::Call> {
    let parts = (0..pieces.len()).step_by(arguments).map(|first| {
        let piece = |i: usize| gpu::whole(first + i, &pieces[first + i]);
        let targets: SmallVec<[_; 8]> = (0..sources.len()).map(piece).collect();
        let from = sources.iter().enumerate().map(|(rank, source)| piece(source.unwrap_or(rank)));
        let sources: SmallVec<[_; 8]> = from.collect();
        let ranks = gpu::RankPieces { sources: &sources, targets: &targets, partial: targets[0] };
        gpu::sum(pieces[first].dtype(), &ranks, divisor)
    });
    parts.flatten().collect()
}

/// The elements of a shard, part by part: outputs of all ranks, then the inputs in separate memory.
/// `operands` are the input and the output of each rank.
fn pieces_of_shard(
    operands: &[(&Spans, &Spans)],
    in_place: &[bool],
    shard: Range<usize>,
) -> Result<Vec<Tensor>> {
    let mut pieces = Vec::with_capacity(2 * operands.len());
    let all = operands.iter().flat_map(|&(input, output)| [input, output]);
    for part in parts(all, &shard) {
        for (_, output) in operands {
            pieces.extend(output.window(part.clone())?.into_pieces());
        }
        for ((input, _), _) in operands.iter().zip(in_place).filter(|(_, same)| !**same) {
            pieces.extend(input.window(part.clone())?.into_pieces());
        }
    }
    Ok(pieces)
}

/// Creates a board per color.
fn split(
    arrivals: &[&ThreadArrival],
    deadline: Duration,
    answers: &mut [Option<ThreadAnswer>],
) -> Result<()> {
    let mut members: Vec<(u64, u64, usize)> = Vec::with_capacity(arrivals.len());
    for (rank, arrival) in arrivals.iter().enumerate() {
        if let ThreadArguments::Split { color, key } = arrival.arguments {
            members.push((color, key, rank));
        }
    }
    members.sort_unstable();
    for group in members.chunk_by(|a, b| a.0 == b.0) {
        for (threads, (_, _, rank)) in Threads::all(group.len(), deadline).into_iter().zip(group) {
            answers[*rank] = Some(ThreadAnswer::Split(threads));
        }
    }
    Ok(())
}
