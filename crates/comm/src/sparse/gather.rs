//! Top-k elements of a tensor, and the all-gather of every rank's top-k elements, as values and
//! indices on the device (X9).

use meristem_device::{DType, Expect, Shape, Stream, Tensor};

use super::feedback;
use super::lists::{Candidates, Lists, check_k};
use crate::check;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::gpu;
use crate::number::with_number;
use crate::spans::Spans;
use crate::transport::CollectiveCall;

/// Memory of [`topk`] and [`topk_all_gather`], allocated once for tensors of one shape and type on
/// one stream.
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

/// Elements of tensors with their indices. Views of a [`TopKStorage`]: its next use overwrites them
/// in stream order.
#[derive(Debug, Clone)]
pub struct Picked {
    /// `[ranks * k]` of the elements' type, by rank.
    pub values: Tensor,
    /// `[ranks * k]` x u32: each element's index in its rank's tensor, in memory order.
    pub indices: Tensor,
}

impl TopKStorage {
    /// Storage for tensors like this one, up to `k_max` elements of each of `ranks` ranks. Does not
    /// wait for the device.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for elements that cannot be compared or are more than 2^32 - 1, no
    /// ranks, or more picks than elements; [`Error::Device`].
    pub fn new(like: &Tensor, ranks: usize, k_max: usize) -> Result<TopKStorage> {
        let operation = "TopKStorage::new";
        check::number(operation, "like", like)?;
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

    /// Largest number of elements per rank.
    pub fn k_max(&self) -> usize {
        self.k_max
    }

    /// Requirements on the tensor.
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

    /// The front of the storage as rows of k.
    fn rows(&self, ranks: usize, k: usize) -> Result<Lists> {
        let len = ranks * k;
        let (indices, values) = (&self.lists.indices, &self.lists.values);
        Ok(Lists { indices: indices.view(0, [len])?, values: values.view(0, [len])?, len: k })
    }

    /// Checks the rows and returns them as results.
    fn picked(&self, operation: &'static str, rows: Lists) -> Result<Picked> {
        let Lists { indices, values, .. } = rows;
        let expect = || Expect::stream(&self.stream).shape([indices.numel()]).contiguous();
        expect().dtype(self.dtype).check(operation, "values", &values)?;
        expect().dtype(DType::U32).check(operation, "indices", &indices)?;
        Ok(Picked { values, indices })
    }

    fn select(&self, tensor: &Tensor, row: &Lists) -> Result<()> {
        feedback::select(&Spans::try_from(tensor)?, None, row, &self.candidates, None)
    }
}

/// Selects the k elements of largest magnitude of a contiguous tensor, by ascending index. Ties go
/// to the lower index; NaN is larger than infinity. One launch; allocates nothing and does not wait
/// for the device.
///
/// # Errors
/// [`Error::BadArgument`] for a tensor that differs from the storage's tensor, or more picks than
/// elements or than the storage holds; [`Error::Device`].
pub fn topk(tensor: &Tensor, storage: &mut TopKStorage, k: usize) -> Result<Picked> {
    let operation = "topk";
    storage.check(operation, tensor, k)?;
    let row = storage.rows(1, k)?;
    storage.select(tensor, &row)?;
    storage.picked(operation, row)
}

/// Gathers every rank's k elements, in rank order: the elements of largest magnitude, as [`topk`]
/// selects them, or the elements at `indices` (`[k]` x u32 on the tensor's stream), in the given
/// order. Each rank may choose either. The results, `[ranks * k]` each, are on the device.
/// Allocates nothing and, over threads, does not wait for the device.
///
/// # Errors
/// The errors of [`topk`]; [`Error::BadArgument`] for a storage for another number of ranks; the
/// errors of every collective, see [`Communicator::all_reduce_with`]. An index outside of the
/// tensor fails the stream like a kernel that panicked; on a CUDA device it fails the device.
pub fn topk_all_gather(
    comm: &mut Communicator,
    tensor: &Tensor,
    storage: &mut TopKStorage,
    indices: Option<&Tensor>,
    k: usize,
) -> Result<Picked> {
    let result = try_topk_all_gather(comm, tensor, storage, indices, k);
    comm.broadcast_error(result)
}

fn try_topk_all_gather(
    comm: &mut Communicator,
    tensor: &Tensor,
    storage: &mut TopKStorage,
    indices: Option<&Tensor>,
    k: usize,
) -> Result<Picked> {
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
    let call = CollectiveCall { parameter: k as u64, ..CollectiveCall::on(operation, tensor) };
    rows.gather(comm, &call)?;
    storage.picked(operation, rows)
}

/// Copies the elements at `indices`, and the indices unless `to` contains them already.
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
