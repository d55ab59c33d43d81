//! The thread that makes all calls of MPI.
//!
//! A request in flight can be neither cancelled nor dropped: MPI may access its memory until it
//! ends, and a request to a lost process never ends. Therefore the function of a failed exchange
//! never returns and keeps its buffers alive. It answers the rank, then serves all other groups
//! from within ([`MpiThread::serve_forever`]). A group fails at most once, so the nesting is at
//! most the number of groups.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use meristem_device::mpi_takes_cuda_memory;
use mpi::Threading;
use mpi::request::StaticScope;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, Destination as _};

use super::group::{MpiGroup, MpiTags, RankDeparture};
use super::transfer::{self, Backoff, Incoming, Outgoing, ReceiveMemory};
use crate::error::{Error, Result};
use crate::transport::CollectiveCall;
use crate::watch::{ExchangeProblem, GroupStatus, Heartbeat, endless};
use crate::wire::RankNotice;

/// Time for the delivery of a notice to other ranks, some of which may be gone.
const NOTICE_TIME: Duration = Duration::from_secs(1);

/// The error of an unusable transport.
pub(super) fn unavailable(reason: &'static str, remedy: &'static str) -> Error {
    Error::Unavailable { transport: "mpi", reason, remedy }
}

/// A request to the thread.
pub(super) enum MpiJob {
    Exchange(Box<MpiExchange>),
    /// Create a group of these processes; this process has rank `rank` in it.
    Join {
        context: i32,
        members: Arc<[i32]>,
        rank: usize,
    },
    /// This rank failed alone and will not join the other ranks' exchange.
    Abort {
        context: i32,
        reason: String,
    },
    Leave {
        context: i32,
        panicked: bool,
    },
    /// Remove a group that this rank has left.
    Forget {
        context: i32,
    },
    /// Record the state of the rank's device and reply with the state of the group. Also answered
    /// during an exchange.
    Watch {
        context: i32,
        heartbeat: Heartbeat,
        reply: SyncSender<GroupStatus>,
    },
}

/// All sends and receives of one rank in one call.
pub(super) struct MpiExchange {
    pub(super) context: i32,
    pub(super) call: CollectiveCall,
    pub(super) sends: Vec<Outgoing>,
    pub(super) receives: Vec<Incoming>,
    /// Returns the buffers in host memory, in the order of `receives`.
    pub(super) reply: SyncSender<Result<Vec<Vec<u8>>>>,
}

/// The processes that were started together, and their library.
pub(super) struct MpiWorld {
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Whether the library takes addresses of CUDA memory.
    pub(super) takes_cuda_memory: bool,
}

/// Body of the thread: starts MPI, reports the world, serves requests, and finalizes MPI if all
/// ranks have left in order. Drops `finish` at the end, which disconnects [`super::MpiLink::over`].
pub(super) fn run(
    jobs: Receiver<MpiJob>,
    ready: &SyncSender<Result<MpiWorld>>,
    deadline: Duration,
    finish: SyncSender<()>,
) {
    let Some((universe, level)) = mpi::initialize_with_threading(Threading::Funneled) else {
        let _ = ready
            .send(Err(unavailable("it already runs in this process", "split its communicator")));
        return;
    };
    if level < Threading::Funneled {
        let remedy = "use a library built with thread support";
        let _ = ready.send(Err(unavailable("the library allows no threads", remedy)));
        return;
    }
    let world = Rc::new(universe.world());
    let (rank, size) = (world.rank() as usize, world.size());
    let all = MpiGroup::new(0, (0..size).collect(), rank, deadline);
    let groups = BTreeMap::from([(0, all)]);
    let (later, finish) = (VecDeque::new(), Some(finish));
    let mut thread = MpiThread { world, jobs, later, deadline, groups, finish, stuck: false };
    let takes_cuda_memory = mpi_takes_cuda_memory() == Some(true);
    let _ = ready.send(Ok(MpiWorld { rank, size: size as usize, takes_cuda_memory }));
    thread.serve();
    if thread.all_have_left() {
        drop(universe);
    } else {
        // Finalizing would wait for ranks that never arrive.
        std::mem::forget(universe);
    }
}

struct MpiThread {
    world: Rc<SimpleCommunicator>,
    jobs: Receiver<MpiJob>,
    /// Requests received during an exchange, for later.
    later: VecDeque<MpiJob>,
    deadline: Duration,
    groups: BTreeMap<i32, MpiGroup>,
    /// Sender of [`super::MpiLink::over`]; dropped as soon as no rank needs to wait for this
    /// thread.
    finish: Option<SyncSender<()>>,
    /// Whether a failed exchange never returns.
    stuck: bool,
}

impl MpiThread {
    /// Serves requests until all senders are dropped.
    fn serve(&mut self) {
        while let Some(job) = self.later.pop_front().or_else(|| self.jobs.recv().ok()) {
            match job {
                MpiJob::Exchange(exchange) => self.exchange(*exchange),
                MpiJob::Join { context, members, rank } => {
                    let group = MpiGroup::new(context, members, rank, self.deadline);
                    self.groups.insert(context, group);
                }
                MpiJob::Abort { context, reason } => {
                    let Some(group) = self.groups.get(&context) else { continue };
                    let rank = group.rank;
                    self.fail(context, Error::RankFailed { rank, reason });
                }
                MpiJob::Watch { context, heartbeat, reply } => {
                    self.watch(context, &heartbeat, &reply)
                }
                MpiJob::Leave { context, panicked } => self.leave(context, panicked),
                // The group of all processes is kept: its notices are read again before the end.
                MpiJob::Forget { context: 0 } => {}
                MpiJob::Forget { context } => drop(self.groups.remove(&context)),
            }
        }
    }

    /// Answers the heartbeats of watching threads during an exchange of `group`.
    fn answer_watches(&mut self, group: &mut MpiGroup) {
        while let Ok(job) = self.jobs.try_recv() {
            match job {
                MpiJob::Watch { context, heartbeat, reply } if context == group.context => {
                    // A failed reply is ignored: the watching thread has given up.
                    let _ = reply.send(self.group_status(group, &heartbeat));
                }
                MpiJob::Watch { context, heartbeat, reply } => {
                    self.watch(context, &heartbeat, &reply)
                }
                job => self.later.push_back(job),
            }
        }
    }

    /// Marks a group as failed, once, and notifies the other ranks.
    fn fail(&mut self, context: i32, error: Error) {
        let Some(mut group) = self.groups.remove(&context) else { return };
        self.fail_group(&mut group, error);
        self.groups.insert(context, group);
    }

    fn fail_group(&self, group: &mut MpiGroup, error: Error) {
        if group.failure.is_none() {
            group.failure = Some(error.clone());
            self.notify(group, &RankNotice::Failed(error));
        }
    }

    /// Answers a heartbeat; no answer if the group was removed.
    fn watch(&mut self, context: i32, heartbeat: &Heartbeat, reply: &SyncSender<GroupStatus>) {
        let Some(mut group) = self.groups.remove(&context) else { return };
        // A failed reply is ignored: the watching thread has given up.
        let _ = reply.send(self.group_status(&mut group, heartbeat));
        self.groups.insert(context, group);
    }

    /// State of a group after a heartbeat of this rank, from the notices received.
    fn group_status(&self, group: &mut MpiGroup, heartbeat: &Heartbeat) -> GroupStatus {
        if group.failure.is_none() {
            group.failure = transfer::read_notices(&self.world, group);
        }
        let rank = group.rank;
        match &heartbeat.problem {
            Some(ExchangeProblem::Failed(reason)) => {
                self.fail_group(group, Error::RankFailed { rank, reason: reason.clone() });
            }
            Some(ExchangeProblem::Overdue) => self.fail_group(group, endless(group.deadline)),
            Some(ExchangeProblem::Stuck) => {
                let (operation, seconds) = ("exchange", group.deadline.as_secs_f64());
                self.fail_group(group, Error::RankLate { operation, rank, seconds });
            }
            Some(ExchangeProblem::Lost) | None => {}
        }
        // A rank that leaves its group of devices sends a notice. The other ranks answer once they
        // have ended as many exchanges.
        let (known, own) = (group.ended[rank], heartbeat.ends());
        let asked = group.ended.iter().any(|ended| known < *ended && *ended <= own);
        if known < own && (heartbeat.closing || asked) {
            group.ended[rank] = own;
            let Heartbeat { membership, ended: exchanges, .. } = *heartbeat;
            self.notify(group, &RankNotice::Ended { membership, exchanges });
        }
        let panicked = |rank: usize| group.left[rank].is_some_and(|left| left.panicked);
        let gone = group.peers().find(|rank| panicked(*rank)).map(|rank| {
            let (operation, reason) = ("exchange", "its thread panicked");
            Error::RankGone { operation, rank, reason }
        });
        match group.failure.clone().or(gone) {
            Some(error) => GroupStatus::Lost(error),
            None if group.peers().all(|rank| group.ended[rank] >= own) => GroupStatus::Ended,
            None => GroupStatus::Sound,
        }
    }

    /// Notifies the other ranks, once, that this rank makes no more calls.
    fn leave(&mut self, context: i32, panicked: bool) {
        let in_order = !self.stuck && self.groups.values().all(|group| group.failure.is_none());
        let Some(group) = self.groups.get_mut(&context) else { return };
        let notice = RankNotice::Left { steps: group.step, panicked, in_order };
        let left = RankDeparture { steps: group.step, panicked, in_order };
        let own = group.rank;
        if group.left[own].replace(left).is_none() {
            let group = &self.groups[&context];
            self.notify(group, &notice);
        }
    }

    /// Sends a notice to all other ranks of a group, and gives up after [`NOTICE_TIME`].
    fn notify(&self, group: &MpiGroup, notice: &RankNotice) {
        // Leaked, because a lost rank never receives the notice. A group sends few notices: of its
        // failure, of a departure, and of the last exchange of each membership.
        let bytes: &'static [u8] = notice.encode().leak();
        let tag = MpiTags::for_group(group.context).notice;
        let send = |peer: usize| {
            let process = self.world.process_at_rank(group.members[peer]);
            process.immediate_send_with_tag(StaticScope, bytes, tag)
        };
        let mut requests: Vec<_> = group.peers().map(send).collect();
        let (end, mut idle) = (Instant::now() + NOTICE_TIME, Backoff::default());
        while !requests.is_empty() && Instant::now() < end {
            requests = requests.into_iter().filter_map(|request| request.test().err()).collect();
            idle.rest();
        }
        requests.into_iter().for_each(std::mem::forget);
    }

    /// Makes an exchange and replies. Never returns if the exchange fails; replies at once with the
    /// earlier failure if the group has one.
    fn exchange(&mut self, exchange: MpiExchange) {
        let MpiExchange { context, call, sends, mut receives, reply } = exchange;
        if let Err(error) = transfer::make_context_current(&sends, &receives) {
            // The rank reports its error to the other ranks.
            let _ = reply.send(Err(error));
            return;
        }
        let Some(mut group) = self.groups.remove(&context) else { return };
        if let Some(failure) = &group.failure {
            let _ = reply.send(Err(failure.at(call.operation)));
            self.groups.insert(context, group);
            return;
        }
        group.step += 1;
        let headers = transfer::headers(&group, &call, &sends);
        mpi::request::scope(|scope| {
            let world = self.world.clone();
            let mut transfer = transfer::MpiTransfer::new(&world, scope, &mut group, &call);
            transfer.begin(&headers, &sends, &mut receives);
            if let Err((error, found_here)) =
                transfer.finish(&mut |group| self.answer_watches(group))
            {
                group.failure = Some(error.clone());
                if found_here {
                    self.notify(&group, &RankNotice::Failed(error.clone()));
                }
                self.groups.insert(context, group);
                let _ = reply.send(Err(error));
                self.serve_forever();
            }
            self.groups.insert(context, group);
        });
        // Device memory is given back before the rank continues. The rank still has the tensors,
        // so no handle dropped here is the last, which would wait for the device.
        drop(sends);
        let buffers = receives.into_iter().filter_map(|incoming| match incoming.memory {
            ReceiveMemory::Host(buffer) => Some(buffer),
            ReceiveMemory::Device(_) => None,
        });
        let buffers = buffers.collect();
        let _ = reply.send(Ok(buffers));
    }

    /// Serves requests from within a failed exchange. Never returns.
    fn serve_forever(&mut self) -> ! {
        self.stuck = true;
        self.serve();
        self.finish = None;
        loop {
            std::thread::park();
        }
    }

    /// Waits until all processes have left the group of all processes, and returns whether all left
    /// in order; false after a failure or at the deadline.
    fn all_have_left(&mut self) -> bool {
        let Some(mut group) = self.groups.remove(&0) else { return false };
        let (end, mut idle) = (Instant::now() + self.deadline, Backoff::default());
        while group.failure.is_none() && Instant::now() < end {
            if group.peers().all(|peer| group.left[peer].is_some()) {
                return group.left.iter().flatten().all(|left| left.in_order);
            }
            group.failure = transfer::read_notices(&self.world, &mut group);
            idle.rest();
        }
        false
    }
}
