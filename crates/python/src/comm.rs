//! Collectives for Python programs, over threads of this process or over MPI processes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use meristem_comm::{
    CommOptions, Communicator, FeedbackMode, Reduction, SparseMethod, SparseSum, TopKElements,
    TopKStorage, picks, topk_all_gather,
};
use meristem_device::{Owner, Stream, Tensor};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::calls::{caught, check_process, detached};
use crate::data::device;
use crate::dlpack::{Array, Borrowed};
use crate::errors::{Failure, Kind};

/// Maximum number of ranks that are threads.
const RANKS_MAX: usize = 1024;
/// Maximum deadline in seconds: one year.
const DEADLINE_S_MAX: f64 = 366.0 * 24.0 * 3600.0;
/// Interval between two checks for Ctrl-C.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);
/// Number of sums after which Ok-Topk computes its thresholds again, as in training.
const REFRESH: u64 = 32;

/// A rank and the stream of its tensors.
pub(crate) struct Rank {
    pub(crate) comm: Communicator,
    stream: Stream,
}

/// State of a rank, which one thread at a time may use.
enum RankState {
    Free(Rank),
    /// A thread is in a call.
    Busy,
    /// The rank has left, or leaves at the end of the call that is going on, for this reason.
    Closed(Option<String>),
}

/// A membership in a group of ranks.
#[pyclass(frozen, module = "meristem")]
pub(crate) struct Membership {
    state: Mutex<RankState>,
    rank: usize,
    size: usize,
    transport: &'static str,
}

/// Options of a group with this deadline.
fn options(deadline: f64) -> Result<CommOptions, Failure> {
    let duration = Duration::try_from_secs_f64(deadline).ok();
    match duration.filter(|_| deadline > 0.0 && deadline <= DEADLINE_S_MAX) {
        Some(deadline) => Ok(CommOptions { deadline }),
        None => {
            let message = format!(
                "`deadline`: got {deadline}, expected seconds above 0, at most {DEADLINE_S_MAX}"
            );
            Err(Failure::usage(Kind::Argument, message, "leave it out for a minute"))
        }
    }
}

#[pymethods]
impl Membership {
    /// Creates a group of ranks that are threads. Returns its members.
    #[staticmethod]
    fn threads(py: Python<'_>, ranks: i64, deadline: f64) -> PyResult<Vec<Self>> {
        let ranks = usize::try_from(ranks)
            .ok()
            .filter(|n| (1..=RANKS_MAX).contains(n))
            .ok_or_else(|| {
                let message = format!("`ranks`: got {ranks}, expected 1 to {RANKS_MAX}");
                Failure::usage(Kind::Argument, message, "give the number of threads")
            })?;
        detached(py, || {
            let group = Communicator::threads(ranks, &options(deadline)?)?;
            group.into_iter().map(Self::new).collect::<Result<Vec<_>, Failure>>()
        })
    }

    /// Returns the member of this process in the group started by `mpirun`.
    #[staticmethod]
    fn mpi(py: Python<'_>, deadline: f64) -> PyResult<Self> {
        detached(py, || Self::new(Communicator::mpi(&options(deadline)?)?))
    }

    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    #[getter]
    fn transport(&self) -> &'static str {
        self.transport
    }

    /// Bytes sent, bytes received, and messages sent.
    fn traffic(&self) -> PyResult<(u64, u64, u64)> {
        let rank = self.take()?;
        let traffic = rank.comm.traffic();
        *self.lock() = RankState::Free(rank);
        Ok((traffic.sent_bytes, traffic.received_bytes, traffic.messages))
    }

    /// Sums or averages a tensor over all ranks, in place.
    fn all_reduce(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, mean: bool) -> PyResult<()> {
        self.in_place(py, tensor, move |comm, tensor| Ok(comm.all_reduce(tensor, reduction(mean))?))
    }

    /// Copies the tensor of rank `root` to all ranks, in place.
    fn broadcast(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, root: i64) -> PyResult<()> {
        let root = usize::try_from(root).unwrap_or(usize::MAX);
        self.in_place(py, tensor, move |comm, tensor| Ok(comm.broadcast(tensor, root)?))
    }

    /// Waits until every rank has called this function.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let rank = self.take()?;
        self.work(py, rank, |rank| Ok(rank.comm.barrier()?))
    }

    /// Creates a sparse all-reduce with these options. Its calls share a residual.
    fn top_k(slf: Py<Self>, options: &Bound<'_, PyDict>) -> PyResult<TopK> {
        let options = options.extract::<Options>()?.checked()?;
        Ok(TopK { member: slf, options, sum: Arc::default(), storage: Arc::default() })
    }

    /// Leaves the group; `reason` is an error of this rank, which the other ranks report. Returns
    /// false if the rank had left before.
    fn close(&self, py: Python<'_>, reason: Option<String>) -> PyResult<bool> {
        check_process()?;
        let mut state = self.lock();
        let rank = match std::mem::replace(&mut *state, RankState::Closed(None)) {
            RankState::Free(rank) => rank,
            RankState::Closed(before) => {
                *state = RankState::Closed(before);
                return Ok(false);
            }
            // When its call ends, the other thread finds the membership closed and leaves the
            // group.
            RankState::Busy => {
                *state = RankState::Closed(reason);
                return Ok(true);
            }
        };
        drop(state);
        py.detach(move || leave(rank, reason));
        Ok(true)
    }
}

/// Ends a membership. Over MPI this waits for the other processes.
fn leave(rank: Rank, reason: Option<String>) {
    let Rank { comm, .. } = rank;
    if let Some(reason) = reason {
        comm.into_transport().abort(&reason);
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *self.lock(), RankState::Closed(None));
        if let RankState::Free(rank) = state {
            if check_process().is_err() {
                // After a fork the locks of the group may never be released.
                return std::mem::forget(rank);
            }
            // Python drops the object with the GIL held, which other ranks of this process may
            // need.
            Python::try_attach(|py| py.detach(|| leave(rank, None)));
        }
    }
}

pub(crate) fn reduction(mean: bool) -> Reduction {
    if mean { Reduction::Mean } else { Reduction::Sum }
}

impl Membership {
    fn new(comm: Communicator) -> Result<Self, Failure> {
        let stream = device("cpu")?.stream(&format!("rank {}", comm.rank()));
        let (rank, size, transport) = (comm.rank(), comm.size(), comm.transport_name());
        Ok(Self {
            state: Mutex::new(RankState::Free(Rank { comm, stream })),
            rank,
            size,
            transport,
        })
    }

    fn lock(&self) -> MutexGuard<'_, RankState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the rank for a call, and marks the membership as busy.
    pub(crate) fn take(&self) -> Result<Rank, Failure> {
        check_process()?;
        let mut state = self.lock();
        match std::mem::replace(&mut *state, RankState::Busy) {
            RankState::Free(rank) => Ok(rank),
            RankState::Busy => Err(Failure::usage(
                Kind::State,
                format!("the Comm of rank {} is in use by another thread", self.rank),
                "give each thread a separate Comm: `Comm.threads(n)` returns n",
            )),
            RankState::Closed(reason) => {
                *state = RankState::Closed(reason);
                let message = format!("the Comm of rank {} is closed", self.rank);
                Err(Failure::usage(Kind::State, message, "make another group"))
            }
        }
    }

    /// Copies a tensor to the engine, calls `work`, and copies the tensor back on success.
    pub(crate) fn in_place(
        &self,
        py: Python<'_>,
        given: &Bound<'_, PyAny>,
        work: impl FnOnce(&mut Communicator, &Tensor) -> Result<(), Failure> + Send + 'static,
    ) -> PyResult<()> {
        let (borrowed, result) = self.with_tensor(py, given, move |rank, tensor| {
            work(&mut rank.comm, &tensor)?;
            Ok(tensor.lend()?)
        })?;
        py.detach(|| borrowed.overwrite(&result));
        Ok(())
    }

    /// Copies a tensor to the engine, and calls `work` with it. Returns the borrowed original, too.
    pub(crate) fn with_tensor<T: Send + 'static>(
        &self,
        py: Python<'_>,
        given: &Bound<'_, PyAny>,
        work: impl FnOnce(&mut Rank, Tensor) -> Result<T, Failure> + Send + 'static,
    ) -> PyResult<(Borrowed, T)> {
        check_process()?;
        let rank = self.take()?;
        let uploaded = Borrowed::of(given).and_then(|borrowed| {
            let tensor = detached(py, || borrowed.upload(&rank.stream))?;
            Ok((borrowed, tensor))
        });
        let (borrowed, tensor) = match uploaded {
            Ok(uploaded) => uploaded,
            Err(error) => {
                // Otherwise the other ranks would wait for this rank's call.
                let text = error.value(py).to_string();
                let reason = text.lines().next().unwrap_or_default().to_owned();
                *self.lock() = RankState::Closed(None);
                py.detach(move || leave(rank, Some(reason)));
                return Err(error);
            }
        };
        Ok((borrowed, self.work(py, rank, move |rank| work(rank, tensor))?))
    }

    /// Makes a collective call without the GIL, and puts the rank back. Python handles Ctrl-C on
    /// the main thread only. There a helper thread makes the call, while the main thread checks for
    /// Ctrl-C. After Ctrl-C this rank leaves the group as soon as the call ends.
    pub(crate) fn work<T: Send + 'static>(
        &self,
        py: Python<'_>,
        mut rank: Rank,
        work: impl FnOnce(&mut Rank) -> Result<T, Failure> + Send + 'static,
    ) -> PyResult<T> {
        if !is_main_thread(py)? {
            let (rank, result) = py.detach(move || {
                let result = caught(|| work(&mut rank));
                (rank, result)
            });
            return self.put_back(py, rank, result);
        }
        let (done, mut ended) = mpsc::sync_channel(1);
        let call = move || {
            let result = caught(|| work(&mut rank));
            // After Ctrl-C the receiver is gone; then the rank leaves the group here.
            let _ = done.send((rank, result));
        };
        let name = format!("meristem rank {}", self.rank);
        if let Err(error) = std::thread::Builder::new().name(name).spawn(call) {
            *self.lock() = RankState::Closed(None);
            let message = format!("cannot start a thread: {error}");
            return Err(Failure::usage(Kind::Rank, message, "free some memory").into());
        }
        loop {
            let waiting = &mut ended;
            match py.detach(move || waiting.recv_timeout(SIGNALS_EVERY)) {
                Ok((rank, result)) => return self.put_back(py, rank, result),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    *self.lock() = RankState::Closed(None);
                    return Err(Failure::panic("the thread of a rank ended").into());
                }
            }
            if let Err(interrupt) = py.check_signals() {
                *self.lock() = RankState::Closed(None);
                return Err(interrupt);
            }
        }
    }

    fn put_back<T>(&self, py: Python<'_>, rank: Rank, result: Result<T, Failure>) -> PyResult<T> {
        let mut state = self.lock();
        if let RankState::Closed(reason) = &mut *state {
            // Another thread has closed the membership.
            let reason = reason.take();
            drop(state);
            py.detach(|| leave(rank, reason));
        } else {
            *state = RankState::Free(rank);
        }
        Ok(result?)
    }
}

/// Whether the calling thread is the main thread, on which Python handles signals.
fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?;
    Ok(threading.call_method0("current_thread")?.is(&main))
}

/// Error feedback: treatment of the elements that a rank did not send.
pub(crate) fn feedback(residual: bool, momentum: Option<f64>) -> Result<FeedbackMode, Failure> {
    let wrong = |message: String, remedy: &str| Failure::usage(Kind::Argument, message, remedy);
    match (momentum, residual) {
        (Some(factor), true) if (0.0..1.0).contains(&factor) => Ok(FeedbackMode::Momentum(factor)),
        (Some(factor), true) => {
            let message = format!("`momentum`: got {factor}, expected 0 or more, below 1");
            Err(wrong(message, "leave it out for sums without momentum correction"))
        }
        (Some(_), false) => {
            let message = "`momentum`: got one, expected none with `residual=False`".to_owned();
            Err(wrong(message, "leave out `residual`: momentum correction needs it"))
        }
        (None, true) => Ok(FeedbackMode::Residual),
        (None, false) => Ok(FeedbackMode::Nothing),
    }
}

/// Options of a sparse all-reduce.
#[derive(Clone, FromPyObject)]
#[pyo3(from_item_all)]
struct Options {
    density: f64,
    k: Option<i64>,
    method: String,
    residual: bool,
    momentum: Option<f64>,
    mean: bool,
}

/// Checked options.
#[derive(Clone, Copy)]
struct CheckedOptions {
    density: f64,
    k: Option<usize>,
    sparse: SparseMethod,
    keep: FeedbackMode,
    reduction: Reduction,
}

impl Options {
    fn checked(self) -> Result<CheckedOptions, Failure> {
        let Self { density, k, method, residual, momentum, mean } = self;
        let wrong = |message: String, remedy: &str| Failure::usage(Kind::Argument, message, remedy);
        if !(density > 0.0 && density <= 1.0) {
            let message = format!("`density`: got {density}, expected above 0, at most 1");
            return Err(wrong(message, "give the share of elements that each rank sends"));
        }
        let k = k.map(usize::try_from).transpose().map_err(|_| {
            let message = format!("`k`: got {}, expected at least 0", k.unwrap_or_default());
            wrong(message, "give the number of elements that each rank sends")
        })?;
        let sparse = match method.as_str() {
            "topk" => SparseMethod::TopK,
            "gtopk" => SparseMethod::GTopK,
            "ok-topk" => SparseMethod::OkTopK { refresh: REFRESH },
            other => {
                let message = format!("`method`: got `{other}`, expected topk, gtopk or ok-topk");
                return Err(wrong(message, "give one of the three"));
            }
        };
        let keep = feedback(residual, momentum)?;
        Ok(CheckedOptions { density, k, sparse, keep, reduction: reduction(mean) })
    }
}

/// A sparse all-reduce of the largest elements of tensors of one length and type. Elements that a
/// call did not send are added to the tensor of the next call.
#[pyclass(frozen, module = "meristem")]
pub(crate) struct TopK {
    member: Py<Membership>,
    options: CheckedOptions,
    /// Created for the first tensor of a sum.
    sum: Arc<Mutex<Option<SparseSum>>>,
    /// Created for the first tensor that is gathered.
    storage: Arc<Mutex<Option<TopKStorage>>>,
}

#[pymethods]
impl TopK {
    /// Overwrites the tensor with the sum over all ranks of the elements that were sent.
    fn all_reduce(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let (options, kept) = (self.options, Arc::clone(&self.sum));
        self.member.get().in_place(py, tensor, move |comm, tensor| {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            let sum = match &mut *kept {
                Some(sum) => sum,
                none => none.insert(SparseSum::new(tensor, options.sparse, options.keep)?),
            };
            let CheckedOptions { density, k, reduction, .. } = options;
            let k = k.unwrap_or_else(|| picks(density, tensor.numel()));
            Ok(sum.run(comm, tensor, tensor, k, reduction)?)
        })
    }

    /// Gathers the largest elements of every rank's tensor: values and indices, [ranks, k] each.
    fn all_gather(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<(Array, Array)> {
        let (options, kept) = (self.options, Arc::clone(&self.storage));
        let (_, gathered) = self.member.get().with_tensor(py, tensor, move |rank, tensor| {
            let Rank { comm, stream } = rank;
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            let CheckedOptions { density, k, .. } = options;
            let k = k.unwrap_or_else(|| picks(density, tensor.numel()));
            let storage = match &mut *kept {
                Some(storage) => storage,
                none => none.insert(TopKStorage::for_group(comm, &tensor, k)?),
            };
            let TopKElements { values, indices } =
                topk_all_gather(comm, &tensor, storage, None, k)?;
            // The next call overwrites the storage.
            let copy = |from: &Tensor| {
                let dims = [comm.size(), k];
                let copy = Tensor::empty(stream, dims, from.dtype(), Owner::Collectives)?;
                stream.copy("gathered", &[(from, &copy.view(0, [from.numel()])?)])?;
                Array::lent(&copy)
            };
            Ok((copy(&values)?, copy(&indices)?))
        })?;
        Ok(gathered)
    }

    /// A copy of the residual, the sum of the elements that were not sent; `None` before the first
    /// sum or without residual.
    fn residual(&self, py: Python<'_>) -> PyResult<Option<Array>> {
        let rank = self.member.get().take()?;
        let kept = Arc::clone(&self.sum);
        self.member.get().work(py, rank, move |rank| {
            let kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(residual) = kept.as_ref().and_then(SparseSum::residual) else {
                return Ok(None);
            };
            let copy = Tensor::empty(
                &rank.stream,
                [residual.numel()],
                residual.dtype(),
                Owner::Collectives,
            )?;
            rank.stream.copy("residual", &[(residual, &copy)])?;
            Ok(Some(Array::lent(&copy)?))
        })
    }
}
