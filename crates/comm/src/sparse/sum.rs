//! A repeated sparse sum of one tensor, with its memory and its state between exchanges.

use meristem_device::{DType, Expect, MemoryReport, Stream, Tensor};

use super::feedback::{Feedback, check_momentum, select};
use super::lists::{Candidates, Lists, check_k};
use super::{gtopk, ok_topk, topk};
use crate::check;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::gpu;
use crate::memory::{PhaseMemory, in_use};
use crate::spans::Spans;
use crate::transport::{CollectiveCall, Reduction, Sum, SumOrder};

/// Algorithm of a sparse sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SparseMethod {
    /// The k largest elements of each rank, gathered by all ranks (X2). The result has up to n k
    /// non-zero elements.
    TopK,
    /// k large elements of the sum, by a tree of merges (X4): each rank contributes its k largest
    /// elements, and each merge keeps the k largest. The exact k largest of the sum may differ.
    GTopK,
    /// k large elements of the sum, by split and reduce (X5). As with `GTopK`, the exact k largest
    /// may differ. Thresholds and regions are recomputed every `refresh` exchanges; in between,
    /// regions are kept, and a selection that finds k elements updates its rank's threshold.
    OkTopK {
        /// Number of exchanges from one recomputation to the next.
        refresh: u64,
    },
}

impl SparseMethod {
    fn operation(self) -> &'static str {
        match self {
            SparseMethod::TopK => "topk_all_reduce",
            SparseMethod::GTopK => "gtopk",
            SparseMethod::OkTopK { .. } => "ok_topk",
        }
    }

    /// Number of words that the n ranks together send for one exchange of k elements. An index or a
    /// value of any size counts as one word.
    pub fn words(self, n: usize, k: usize) -> u64 {
        let (n, k) = (n as u64, k as u64);
        match self {
            _ if n < 2 || k == 0 => 0,
            SparseMethod::TopK => 2 * k * n * (n - 1),
            SparseMethod::GTopK => (n - 1) * (4 * k + k.div_ceil(32)),
            SparseMethod::OkTopK { .. } => {
                let m = n.min(k);
                // Lists from all other ranks to each owner, and from each owner to all other ranks.
                m * (n - 1) * 2 * (k / m) + m * (n - 1) * 2 * (2 * k / m)
            }
        }
    }
}

/// State of a rank between exchanges (X3, X7).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum FeedbackMode {
    /// No state: elements that are not sent are lost.
    #[default]
    Nothing,
    /// Error feedback: elements that were not sent are added to the next gradient.
    Residual,
    /// Error feedback with momentum correction by this factor m. Ranks accumulate and exchange
    /// velocities u = m u + gradient instead of gradients, even if all elements are sent. This
    /// replaces the optimiser's momentum, which must be 0.
    Momentum(f64),
}

/// A sparse sum of tensors with one length and type. All ranks create it with the same arguments.
///
/// Memory is allocated once and used for every exchange. With k equal to the number of elements,
/// the sum is a dense all-reduce in rank order.
pub struct SparseSum {
    sparse: SparseMethod,
    stream: Stream,
    dtype: DType,
    len: usize,
    keep: FeedbackMode,
    feedback: Option<Feedback>,
    work: Option<SparseWork>,
    /// Set while memory is measured.
    phases: Option<PhaseMemory>,
}

/// Memory for one k, and for one rank of a group.
struct SparseWork {
    k: usize,
    rank: usize,
    ranks: usize,
    candidates: Candidates,
    buffers: SparseBuffers,
}

enum SparseBuffers {
    TopK(topk::TopKBuffers),
    GTopK(Box<gtopk::GTopKBuffers>),
    OkTopK(Box<ok_topk::OkTopKBuffers>),
}

impl SparseSum {
    /// A sum for tensors with the stream, type and number of elements of `like`.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for elements that cannot be summed, more than 2^32 - 1 elements, or a
    /// momentum outside [0, 1); [`Error::Device`].
    pub fn new(like: &Tensor, sparse: SparseMethod, keep: FeedbackMode) -> Result<SparseSum> {
        check::summable(sparse.operation(), "like", like)?;
        SparseSum::with_len(like.stream(), like.dtype(), like.numel(), sparse, keep)
    }

    /// A sum for `len` elements in several pieces of memory.
    pub(crate) fn with_len(
        stream: &Stream,
        dtype: DType,
        len: usize,
        sparse: SparseMethod,
        keep: FeedbackMode,
    ) -> Result<SparseSum> {
        let operation = sparse.operation();
        check_k(operation, len, 0)?;
        stream.device().load_kernels(&gpu::sources(dtype))?;
        let stream = stream.clone();
        let momentum = match keep {
            FeedbackMode::Momentum(factor) => Some(check_momentum(operation, factor)?),
            _ => None,
        };
        let feedback = match keep {
            FeedbackMode::Nothing => None,
            _ => Some(Feedback::new(&stream, dtype, len, momentum)?),
        };
        Ok(SparseSum { sparse, stream, dtype, len, keep, feedback, work: None, phases: None })
    }

    /// State that is kept between exchanges.
    pub fn keep(&self) -> FeedbackMode {
        self.keep
    }

    /// The residual: the sum of gradients not sent so far, or of velocities with momentum
    /// correction, with the length of the tensors; `None` if none is kept. Access it with launches
    /// and copies of its stream.
    pub fn residual(&self) -> Option<&Tensor> {
        self.feedback.as_ref().map(|feedback| &feedback.residual)
    }

    /// Velocity of momentum correction; `None` without it.
    pub fn velocity(&self) -> Option<&Tensor> {
        self.feedback.as_ref().and_then(Feedback::velocity)
    }

    /// Switches to another algorithm; residual and velocity are kept.
    pub(crate) fn switch(&mut self, sparse: SparseMethod) {
        if self.sparse != sparse {
            (self.sparse, self.work) = (sparse, None);
        }
    }

    /// Exports threshold, regions and step of Ok-Topk; `None` for other algorithms. Waits for the
    /// device.
    pub(crate) fn export_ok_topk(&self) -> Result<Option<Vec<u8>>> {
        match &self.work {
            Some(SparseWork { k, buffers: SparseBuffers::OkTopK(buffers), .. }) => {
                let mut bytes = (*k as u64).to_ne_bytes().to_vec();
                bytes.extend(buffers.export()?);
                Ok(Some(bytes))
            }
            _ => Ok(None),
        }
    }

    /// Imports bytes of [`export_ok_topk`](SparseSum::export_ok_topk) that fit this group and
    /// algorithm; otherwise thresholds and regions are recomputed.
    pub(crate) fn import_ok_topk(&mut self, comm: &Communicator, bytes: &[u8]) -> Result<()> {
        let Some((k, rest)) = bytes.split_first_chunk::<8>() else { return Ok(()) };
        let k = u64::from_ne_bytes(*k) as usize;
        if !matches!(self.sparse, SparseMethod::OkTopK { .. }) || k == 0 || k >= self.len {
            return Ok(());
        }
        self.prepare(comm, k)?;
        match &mut self.work {
            Some(SparseWork { buffers: SparseBuffers::OkTopK(buffers), .. }) => {
                buffers.import(rest)
            }
            _ => Ok(()),
        }
    }

    /// Selects elements of `input` plus residual by the [`SparseMethod`] with this k, and sums or
    /// averages them over all ranks into `output`, which may be `input`. The result has the same
    /// bits on all ranks.
    ///
    /// Allocates only after a change of k, rank or number of ranks.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_reduce_with`]; [`Error::BadArgument`] for k above the
    /// number of elements.
    pub fn run(
        &mut self,
        comm: &mut Communicator,
        input: &Tensor,
        output: &Tensor,
        k: usize,
        reduction: Reduction,
    ) -> Result<()> {
        let result = self.try_run(comm, input, output, k, reduction);
        comm.broadcast_error(result)
    }

    /// Runs the sum as [`run`](SparseSum::run), and measures the device's memory. Ranks wait for
    /// each other between phases. If all elements are sent, there is no selection and no memory for
    /// it.
    ///
    /// # Errors
    /// The errors of [`run`](SparseSum::run).
    pub fn run_measured(
        &mut self,
        comm: &mut Communicator,
        input: &Tensor,
        output: &Tensor,
        k: usize,
        reduction: Reduction,
    ) -> Result<PhaseMemory> {
        let device = self.stream.device().clone();
        let before = in_use(comm, &device)?;
        self.phases = Some(PhaseMemory {
            before,
            allocation: before,
            selection: before,
            ..Default::default()
        });
        let (result, around) =
            MemoryReport::around(&device, || self.run(comm, input, output, k, reduction));
        let phases = self.phases.take().unwrap_or_default();
        result?;
        Ok(PhaseMemory { collective: in_use(comm, &device)?, peak: around.peak, ..phases })
    }

    fn try_run(
        &mut self,
        comm: &mut Communicator,
        input: &Tensor,
        output: &Tensor,
        k: usize,
        reduction: Reduction,
    ) -> Result<()> {
        let operation = self.sparse.operation();
        Expect::stream(&self.stream).dtype(self.dtype).check(operation, "input", input)?;
        if input.numel() != self.len {
            let expected = format!("of {} elements, as when the sum was made", self.len);
            return Err(Error::argument(operation, "input", expected, input.numel()));
        }
        check::output(operation, input, output)?;
        comm.log_placement(operation, &[input], &[output]);
        let spans = [Spans::try_from(input)?, Spans::try_from(output)?];
        let sum = Sum { input: &spans[0], output: &spans[1], reduction, order: SumOrder::Rank };
        self.sum(comm, CollectiveCall::on(operation, input), &sum, k)?;
        Ok(check::like(input).check(operation, "output", output)?)
    }

    /// Runs the sum as [`run`](SparseSum::run), on elements with checked layouts. The algorithm
    /// determines the order of the additions; `sum.order` is used only if all elements are sent.
    pub(crate) fn sum(
        &mut self,
        comm: &mut Communicator,
        call: CollectiveCall,
        sum: &Sum<'_, Spans>,
        k: usize,
    ) -> Result<()> {
        check_k(call.operation, self.len, k)?;
        if k == self.len {
            return self.dense(comm, call, sum);
        }
        let &Sum { input, output, reduction, .. } = sum;
        let parameter = k as u64 * 2 + u64::from(reduction == Reduction::Mean);
        let mut call = CollectiveCall { parameter, ..call };
        if k == 0 {
            comm.agree(&call, &self.stream)?;
            return self.send_none(input, output);
        }
        self.prepare(comm, k)?;
        if let Some(phases) = &mut self.phases {
            phases.allocation = in_use(comm, self.stream.device())?;
        }
        let Some(work) = &mut self.work else { unreachable!("just made") };
        let feedback = self.feedback.as_ref();
        let (picks, threshold) = match &work.buffers {
            SparseBuffers::TopK(buffers) => (buffers.picks()?, None),
            SparseBuffers::GTopK(buffers) => (buffers.picks()?, None),
            SparseBuffers::OkTopK(buffers) => {
                call.state_digest = buffers.shared_digest();
                (buffers.picks()?, Some(buffers.threshold()))
            }
        };
        select(input, feedback, &picks, &work.candidates, threshold)?;
        if let Some(phases) = &mut self.phases {
            phases.selection = in_use(comm, self.stream.device())?;
        }
        let divisor = (reduction == Reduction::Mean).then_some(comm.size());
        let sent = match &mut work.buffers {
            SparseBuffers::TopK(buffers) => buffers.sum(comm, &call, divisor, output)?,
            SparseBuffers::GTopK(buffers) => buffers.sum(comm, &call, divisor, output)?,
            SparseBuffers::OkTopK(buffers) => buffers.sum(comm, &call, divisor, output)?,
        };
        feedback.map_or(Ok(()), |feedback| feedback.clear(&sent))
    }

    /// Name of this sum in errors and logs.
    pub(crate) fn operation(&self) -> &'static str {
        self.sparse.operation()
    }

    /// Allocates the memory for a k and a group. A smaller k also needs new memory, because lists
    /// have exactly k entries.
    pub(crate) fn prepare(&mut self, comm: &Communicator, k: usize) -> Result<()> {
        let (rank, ranks) = (comm.rank(), comm.size());
        let fits = |work: &SparseWork| (work.k, work.rank, work.ranks) == (k, rank, ranks);
        if self.work.as_ref().is_some_and(fits) {
            return Ok(());
        }
        self.work = None;
        let (stream, dtype) = (&self.stream, self.dtype);
        let buffers = match self.sparse {
            SparseMethod::TopK => {
                SparseBuffers::TopK(topk::TopKBuffers::new(comm, stream, dtype, k)?)
            }
            SparseMethod::GTopK => {
                SparseBuffers::GTopK(Box::new(gtopk::GTopKBuffers::new(comm, stream, dtype, k)?))
            }
            SparseMethod::OkTopK { refresh } => {
                let sizes = (self.len, k);
                let made = ok_topk::OkTopKBuffers::new(comm, stream, dtype, sizes, refresh)?;
                SparseBuffers::OkTopK(Box::new(made))
            }
        };
        let candidates = Candidates::new(stream, dtype, self.len, k)?;
        self.work = Some(SparseWork { k, rank, ranks, candidates, buffers });
        Ok(())
    }

    /// Sends all elements.
    fn dense(
        &self,
        comm: &mut Communicator,
        call: CollectiveCall,
        sum: &Sum<'_, Spans>,
    ) -> Result<()> {
        let input = match &self.feedback {
            Some(feedback) => {
                feedback.drain(sum.input, sum.output)?;
                sum.output
            }
            None => sum.input,
        };
        comm.sum(call, &Sum { input, ..sum.clone() })
    }

    /// Sends no elements: all of them are added to the residual.
    fn send_none(&self, input: &Spans, output: &Spans) -> Result<()> {
        let empty = Lists::new(&self.stream, self.dtype, 1, 0)?;
        if self.feedback.is_some() {
            let none =
                Candidates { lists: Lists::new(&self.stream, self.dtype, 1, 0)?, tables: None };
            select(input, self.feedback.as_ref(), &empty, &none, None)?;
        }
        topk::add(&empty, None, output)
    }
}
