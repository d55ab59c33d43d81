//! The top-k elements of a tensor, and the all-gather of all ranks' top-k elements, as values and
//! indices on the device (X9).

use meristem_device::{DType, Expect, MemoryReport, Shape, Stream, Tensor};

use super::feedback;
use super::lists::{Candidates, Lists, check_k};
use crate::check;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::gpu;
use crate::memory::{PhaseMemory, in_use};
use crate::number::with_number;
use crate::spans::Spans;
use crate::transport::CollectiveCall;

/// Memory of [`topk`] and [`topk_all_gather`], allocated once for one shape, type and stream.
pub struct TopKStorage {
    stream: Stream,
    dtype: DType,
    shape: Shape,
    ranks: usize,
    k_max: usize,
    candidates: Candidates,
    /// `[ranks, k_max]`; shorter rows are packed at the front.
    lists: Lists,
}

/// Elements with their indices: views of a [`TopKStorage`], which its next use overwrites in stream
/// order.
#[derive(Debug, Clone)]
pub struct TopKElements {
    /// `[ranks * k]` of the elements' type, in rank order.
    pub values: Tensor,
    /// `[ranks * k]` u32: index of each element in its rank's tensor, in memory order.
    pub indices: Tensor,
}

impl TopKStorage {
    /// Storage for tensors like `like`, with at most `k_max` elements from each of `ranks` ranks.
    /// Does not wait for the device.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for a tensor that is not contiguous, elements that cannot be
    /// compared, more than 2^32 - 1 elements, 0 ranks, or `k_max` above the number of elements;
    /// [`Error::Device`].
    pub fn new(like: &Tensor, ranks: usize, k_max: usize) -> Result<TopKStorage> {
        let operation = "TopKStorage::new";
        check::summable(operation, "like", like)?;
        Expect::any().contiguous().check(operation, "like", like)?;
        check_k(operation, like.numel(), k_max)?;
        if ranks == 0 {
            return Err(Error::argument(operation, "ranks", "at least 1", ranks));
        }
        like.stream().device().load_kernels(&gpu::sources(like.dtype()))?;
        let (stream, dtype, shape) = (like.stream().clone(), like.dtype(), like.shape());
        let candidates = Candidates::new(&stream, dtype, like.numel(), k_max)?;
        let lists = Lists::new(&stream, dtype, ranks, k_max)?;
        Ok(TopKStorage { stream, dtype, shape, ranks, k_max, candidates, lists })
    }

    /// Storage for the ranks of a group, as [`new`](TopKStorage::new). An error on one rank fails
    /// the calls of the others.
    ///
    /// # Errors
    /// The errors of [`new`](TopKStorage::new).
    pub fn for_group(comm: &mut Communicator, like: &Tensor, k_max: usize) -> Result<TopKStorage> {
        let storage = TopKStorage::new(like, comm.size(), k_max);
        comm.broadcast_error(storage)
    }

    /// Largest number of elements per rank.
    pub fn k_max(&self) -> usize {
        self.k_max
    }

    /// Checks that the tensor and k fit the storage.
    fn check(&self, operation: &'static str, tensor: &Tensor, k: usize) -> Result<()> {
        let expect = Expect::stream(&self.stream).dtype(self.dtype);
        let expect = expect.shape(self.shape.dims().iter().copied()).contiguous();
        expect.check(operation, "tensor", tensor)?;
        check_k(operation, tensor.numel(), k)?;
        if k > self.k_max {
            let expected = format!("at most {}, for which the storage was made", self.k_max);
            return Err(Error::argument(operation, "k", expected, k));
        }
        Ok(())
    }

    /// The front of the storage as rows of length k.
    fn rows(&self, ranks: usize, k: usize) -> Result<Lists> {
        let len = ranks * k;
        let (indices, values) = (&self.lists.indices, &self.lists.values);
        Ok(Lists { indices: indices.view(0, [len])?, values: values.view(0, [len])?, len: k })
    }

    /// Checks the rows and returns them as a result.
    fn picked(&self, operation: &'static str, rows: Lists) -> Result<TopKElements> {
        let Lists { indices, values, .. } = rows;
        let expect = || Expect::stream(&self.stream).shape([indices.numel()]).contiguous();
        expect().dtype(self.dtype).check(operation, "values", &values)?;
        expect().dtype(DType::U32).check(operation, "indices", &indices)?;
        Ok(TopKElements { values, indices })
    }

    fn select(&self, tensor: &Tensor, row: &Lists) -> Result<()> {
        feedback::select(&Spans::try_from(tensor)?, None, row, &self.candidates, None)
    }
}

/// Selects the k elements of largest magnitude of a contiguous tensor, in order of index. Among
/// equals the lower index wins; every NaN is larger than infinity, whatever its payload. One
/// launch; does not allocate, does not wait for the device.
///
/// # Errors
/// [`Error::BadArgument`] for a tensor that does not fit the storage, or k above the number of
/// elements or the storage's `k_max`; [`Error::Device`].
pub fn topk(tensor: &Tensor, storage: &mut TopKStorage, k: usize) -> Result<TopKElements> {
    let operation = "topk";
    storage.check(operation, tensor, k)?;
    let row = storage.rows(1, k)?;
    storage.select(tensor, &row)?;
    storage.picked(operation, row)
}

/// Gathers k elements from every rank, in rank order: the elements of largest magnitude, as in
/// [`topk`], or the elements at `indices` (`[k]` u32 on the tensor's stream), in the given order.
/// Each rank may choose either. The results are on the device, `[ranks * k]` each. Does not
/// allocate; over threads with one device, does not wait for the device.
///
/// # Errors
/// The errors of [`topk`]; [`Error::BadArgument`] for a storage for another number of ranks; the
/// errors of [`Communicator::all_reduce_with`]. An index outside the tensor fails the stream like a
/// panicking kernel; on a CUDA device it fails the device.
pub fn topk_all_gather(
    comm: &mut Communicator,
    tensor: &Tensor,
    storage: &mut TopKStorage,
    indices: Option<&Tensor>,
    k: usize,
) -> Result<TopKElements> {
    let result = try_topk_all_gather(comm, tensor, storage, (indices, k), |_| Ok(()));
    comm.broadcast_error(result)
}

/// Makes a storage and gathers the largest elements, as [`topk_all_gather`], and measures the
/// device's memory. Ranks wait for each other between phases.
///
/// # Errors
/// The errors of [`TopKStorage::new`] and of [`topk_all_gather`].
pub fn topk_all_gather_measured(
    comm: &mut Communicator,
    tensor: &Tensor,
    k: usize,
) -> Result<(TopKElements, PhaseMemory)> {
    let device = tensor.stream().device();
    let mut phases = PhaseMemory { before: in_use(comm, device)?, ..PhaseMemory::default() };
    let (elements, around) = MemoryReport::around(device, || {
        let mut storage = TopKStorage::for_group(comm, tensor, k)?;
        phases.allocation = in_use(comm, device)?;
        let after_selection = |comm: &mut Communicator| {
            phases.selection = in_use(comm, device)?;
            Ok(())
        };
        let elements = try_topk_all_gather(comm, tensor, &mut storage, (None, k), after_selection);
        let elements = comm.broadcast_error(elements)?;
        phases.collective = in_use(comm, device)?;
        Ok::<_, Error>(elements)
    });
    Ok((elements?, PhaseMemory { peak: around.peak, ..phases }))
}

fn try_topk_all_gather(
    comm: &mut Communicator,
    tensor: &Tensor,
    storage: &mut TopKStorage,
    (indices, k): (Option<&Tensor>, usize),
    after_selection: impl FnOnce(&mut Communicator) -> Result<()>,
) -> Result<TopKElements> {
    let operation = "topk_all_gather";
    storage.check(operation, tensor, k)?;
    if storage.ranks != comm.size() {
        let expected = format!("made for {} ranks", comm.size());
        return Err(Error::argument(operation, "storage", expected, storage.ranks));
    }
    if let Some(indices) = indices {
        let expect = Expect::stream(&storage.stream).dtype(DType::U32).shape([k]).contiguous();
        expect.check(operation, "indices", indices)?;
    }
    let rows = storage.rows(comm.size(), k)?;
    let inputs: Vec<&Tensor> = std::iter::once(tensor).chain(indices).collect();
    comm.log_placement(operation, &inputs, &[&rows.values, &rows.indices]);
    let own = rows.row(comm.rank())?;
    match indices {
        Some(indices) => take(tensor, indices, &own)?,
        None => storage.select(tensor, &own)?,
    }
    after_selection(comm)?;
    let call = CollectiveCall { parameter: k as u64, ..CollectiveCall::on(operation, tensor) };
    rows.gather(comm, &call)?;
    storage.picked(operation, rows)
}

/// Copies the elements at `indices`, and the indices, unless `to` already has them.
fn take(tensor: &Tensor, indices: &Tensor, to: &Lists) -> Result<()> {
    let launch = tensor.stream().launch("topk, take").read(tensor).read(indices).write(&to.values);
    let in_place = indices.storage_id() == to.indices.storage_id()
        && indices.address() == to.indices.address();
    let launch = if in_place { launch } else { launch.write(&to.indices) };
    let launch = launch.gpu(|| {
        let copies = (!in_place).then(|| gpu::whole(3, &to.indices));
        let (elements, indices) = (gpu::whole(0, tensor), gpu::whole(1, indices));
        gpu::take(tensor.dtype(), elements, indices, gpu::whole(2, &to.values), copies)
    });
    with_number!(tensor.dtype(), T => launch.run(move |args| {
        let (elements, indices) = (args.read::<T>(0), args.read::<u32>(1));
        if let Some(index) = indices.iter().find(|index| **index as usize >= elements.len()) {
            panic!("index {index} of a tensor of {} elements", elements.len());
        }
        for (value, index) in args.write::<T>(2).iter_mut().zip(indices) {
            *value = elements[*index as usize];
        }
        if !in_place {
            args.write::<u32>(3).copy_from_slice(indices);
        }
    })?, unreachable!("checked when the storage was made"));
    Ok(())
}
