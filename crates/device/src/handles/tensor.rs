//! Tensors: creating, writing and reading them, moving them to another stream, and views.

use std::fmt;
use std::panic::Location;

use super::expect::{Expect, device_words};
use super::lent::{LentDeviceTensor, LentTensor};
use super::{Device, Stream, Tensor, transfer};
use crate::ground::sync::Arc;
use crate::ground::{Act, DType, Element, Error, MemoryFormat, Owner, Property, Result, Shape};
use crate::hooks::{Category, POISON, log_placement};
use crate::memory::{Storage, StorageHandle};
use crate::order::{TrackedMemory, wait_for_producer};

impl Tensor {
    /// A contiguous tensor whose elements are unspecified. On a CPU device they are zeros, or what
    /// an earlier user of the memory left there; on a CUDA device they can be anything. With the
    /// race sanitizer on they are [`POISON`]. Does not wait for the device, unless the memory limit
    /// is reached or the device has no memory left.
    ///
    /// # Errors
    /// [`Error::BadShape`]; [`Error::OutOfMemory`] after everything reclaimable was reclaimed;
    /// [`Error::HotScope`] if an open scope forbids to allocate or to wait.
    #[track_caller]
    pub fn empty(
        stream: &Stream,
        shape: impl Into<Shape>,
        dtype: DType,
        owner: Owner,
    ) -> Result<Tensor> {
        Tensor::empty_with_format(stream, shape, dtype, MemoryFormat::Contiguous, owner)
    }

    /// A tensor of unspecified elements like [`empty`](Tensor::empty), in a memory format. For
    /// channels last, `shape` is still (N, C, H, W) (F1).
    ///
    /// # Errors
    /// The errors of [`empty`](Tensor::empty).
    #[track_caller]
    pub fn empty_with_format(
        stream: &Stream,
        shape: impl Into<Shape>,
        dtype: DType,
        format: MemoryFormat,
        owner: Owner,
    ) -> Result<Tensor> {
        let what = NewTensor { shape: shape.into(), dtype, format, owner };
        let (operation, site) = ("Tensor::empty", Location::caller());
        let mut tensor = what.tensor(stream, operation, site)?;
        if stream.state().shared.checks_order && !tensor.storage.fill_fresh(POISON) {
            transfer::poison(&tensor, operation, site)?;
        }
        tensor.log_made(operation, None);
        Ok(tensor)
    }

    /// A contiguous tensor of zeros. Waits as [`empty`](Tensor::empty) does, and for space if the
    /// stream's queue is full.
    ///
    /// # Errors
    /// The errors of [`empty`](Tensor::empty), [`Error::KernelPanicked`] and
    /// [`Error::DeviceFailed`].
    #[track_caller]
    pub fn zeros(
        stream: &Stream,
        shape: impl Into<Shape>,
        dtype: DType,
        owner: Owner,
    ) -> Result<Tensor> {
        Tensor::zeros_with_format(stream, shape, dtype, MemoryFormat::Contiguous, owner)
    }

    /// A tensor of zeros like [`zeros`](Tensor::zeros), in a memory format.
    ///
    /// # Errors
    /// The errors of [`zeros`](Tensor::zeros).
    #[track_caller]
    pub fn zeros_with_format(
        stream: &Stream,
        shape: impl Into<Shape>,
        dtype: DType,
        format: MemoryFormat,
        owner: Owner,
    ) -> Result<Tensor> {
        let what = NewTensor { shape: shape.into(), dtype, format, owner };
        let (operation, site) = ("Tensor::zeros", Location::caller());
        let tensor = what.tensor(stream, operation, site)?;
        tensor.log_made(operation, None);
        if !tensor.storage.is_fresh() {
            transfer::zero(&tensor, site)?;
        }
        Ok(tensor)
    }

    /// A contiguous tensor with these elements: one counted copy to the device. The elements are
    /// read before this returns. Waits as [`empty`](Tensor::empty) and
    /// [`copy_from_slice`](Tensor::copy_from_slice) do.
    ///
    /// # Errors
    /// [`Error::WrongLength`] if `elements` does not match `shape`, [`Error::HotScope`] if an open
    /// scope forbids the copy, and the errors of [`zeros`](Tensor::zeros).
    #[track_caller]
    pub fn from_slice<T: Element>(
        stream: &Stream,
        elements: &[T],
        shape: impl Into<Shape>,
        owner: Owner,
    ) -> Result<Tensor> {
        let format = MemoryFormat::Contiguous;
        let what = NewTensor { shape: shape.into(), dtype: T::DTYPE, format, owner };
        let (operation, site) = ("Tensor::from_slice", Location::caller());
        stream.state().check_alive()?;
        check_length(operation, what.shape.numel(), elements.len())?;
        let mut tensor = what.tensor(stream, operation, site)?;
        let bytes = bytemuck::cast_slice(elements);
        stream.state().shared.counters.count(Act::CopyToDevice, operation, site)?;
        let shared = &stream.state().shared;
        // An observer that checks order sees launches only, so with such an observer this is a
        // launch.
        let filled = !shared.checks_order && {
            let _copy = shared.observers.host_copies(operation, Category::HostCopy, site);
            tensor.storage.fill_if_idle(bytes)
        };
        tensor.log_made(operation, None);
        if !filled {
            transfer::copy_in(&tensor, bytes, operation, None, site)?;
        }
        Ok(tensor)
    }

    /// Overwrites the elements, given in memory order: one counted copy to the device, in stream
    /// order. The elements are copied (into a staging buffer) before this returns. Does not wait
    /// for a CPU device. For a CUDA device this waits like [`Stream::upload`].
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another element type, [`Error::WrongLength`],
    /// [`Error::KernelPanicked`], [`Error::DeviceFailed`], [`Error::HotScope`].
    #[track_caller]
    pub fn copy_from_slice<T: Element>(&self, elements: &[T]) -> Result<()> {
        let operation = "Tensor::copy_from_slice";
        check_elements::<T>(operation, self.dtype)?;
        check_length(operation, self.numel(), elements.len())?;
        let (bytes, act) = (bytemuck::cast_slice(elements), Some(Act::CopyToDevice));
        transfer::copy_in(self, bytes, operation, act, Location::caller())
    }

    /// Overwrites the bytes with `source[start..]`, in stream order: one counted copy to the
    /// device. For shared host memory, such as a [`MappedFile`](crate::MappedFile) (D7). On a CPU
    /// device a worker reads `source`, which is kept alive until then, without staging; does not
    /// wait for it. For a CUDA device the bytes are copied into staging memory before this returns;
    /// waits as [`copy_from_slice`](Tensor::copy_from_slice) does.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the source is too short, [`Error::KernelPanicked`],
    /// [`Error::DeviceFailed`], [`Error::HotScope`].
    #[track_caller]
    pub fn copy_from_shared<S>(&self, source: Arc<S>, start: usize) -> Result<()>
    where
        S: AsRef<[u8]> + Send + Sync + 'static,
    {
        transfer::copy_in_shared(self, source, start, Location::caller())
    }

    /// Reads the elements in memory order: one counted copy to the host, and one counted wait for
    /// the work that they depend on. For several tensors see [`read_back`](crate::read_back).
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another element type; [`Error::KernelPanicked`];
    /// [`Error::DeviceFailed`]; [`Error::InsideKernel`]; [`Error::HotScope`].
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Expect::any().dtype(T::DTYPE).check("Tensor::to_vec", "self", self)?;
        let mut all = transfer::read_back_as::<T>(&[self])?;
        Ok(all.pop().unwrap_or_default())
    }

    /// The same memory as a tensor of another stream, which waits (on the device) for the work that
    /// produced it (S1). The memory is not reused before the other stream's work with it is done
    /// (S2). The host waits only for space if the queue of `stream` is full.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a stream of another device, [`Error::KernelPanicked`],
    /// [`Error::DeviceFailed`].
    pub fn on(&self, stream: &Stream) -> Result<Tensor> {
        if !Arc::ptr_eq(&stream.state().shared, &self.stream().state().shared) {
            let (expected, got) = device_words(self.device().id(), stream.device().id());
            return Err(Error::Mismatch {
                operation: "Tensor::on",
                argument: "stream".to_owned(),
                property: Property::Device,
                expected,
                got,
            });
        }
        if stream != self.stream() {
            wait_for_producer(stream.state(), &*self.storage)?;
        }
        let moved_to = (stream != self.storage.home()).then(|| stream.clone());
        let tensor = Tensor { moved_to, ..self.clone() };
        tensor.log_made("Tensor::on", Some(self));
        Ok(tensor)
    }

    /// A contiguous window: `shape` elements from element `offset` on, in memory order. Shares the
    /// memory.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::BadShape`].
    pub fn view(&self, offset: usize, shape: impl Into<Shape>) -> Result<Tensor> {
        self.view_with_format(offset, shape, MemoryFormat::Contiguous)
    }

    /// A window like [`view`](Tensor::view), in a memory format: the first images of a
    /// channels-last batch are `view_with_format(0, [n, c, h, w], ChannelsLast)`.
    ///
    /// # Errors
    /// The errors of [`view`](Tensor::view).
    pub fn view_with_format(
        &self,
        offset: usize,
        shape: impl Into<Shape>,
        format: MemoryFormat,
    ) -> Result<Tensor> {
        let operation = "Tensor::view";
        let shape = shape.into();
        format.check(operation, &shape)?;
        shape.bytes(operation, self.dtype.size())?;
        let end = offset.saturating_add(shape.numel());
        if end > self.numel() {
            let (argument, start, len) = ("the tensor", offset, self.numel());
            return Err(Error::OutOfBounds { operation, argument, start, end, len });
        }
        let offset = self.offset + offset * self.dtype.size();
        let tensor = Tensor { offset, shape, format, ..self.clone() };
        tensor.log_made(operation, Some(self));
        Ok(tensor)
    }

    /// The same elements, read as another type of the same size, bit for bit, so that one copy can
    /// carry several types. Shares the memory.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a type of another size.
    pub fn reinterpret(&self, dtype: DType) -> Result<Tensor> {
        let operation = "Tensor::reinterpret";
        if dtype.size() != self.dtype.size() {
            return Err(Error::Mismatch {
                operation,
                argument: "dtype".to_owned(),
                property: Property::DType,
                expected: format!("one of {} bytes, as {} has", self.dtype.size(), self.dtype),
                got: format!("{dtype} of {}", dtype.size()),
            });
        }
        let tensor = Tensor { dtype, ..self.clone() };
        tensor.log_made(operation, Some(self));
        Ok(tensor)
    }

    /// This tensor and `next` as one flat window. `None` unless the first element of `next` follows
    /// the last element of this tensor in the same memory, and both have one element type and
    /// stream. Shares the memory.
    pub fn joined(&self, next: &Tensor) -> Option<Tensor> {
        let adjacent = self.storage.is_same(&next.storage)
            && self.offset + self.bytes() == next.offset
            && self.dtype == next.dtype
            && self.stream() == next.stream();
        let (shape, format) = ([self.numel() + next.numel()].into(), MemoryFormat::Contiguous);
        adjacent.then(|| {
            let tensor = Tensor { shape, format, ..self.clone() };
            tensor.log_made("Tensor::joined", Some(self));
            tensor
        })
    }

    /// Shape in the user's order: (N, C, H, W) for images in either format.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Extents of the shape.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Strides in elements along each dimension of [`dims`](Tensor::dims) (F2).
    pub fn strides(&self) -> Vec<usize> {
        self.format.strides(&self.shape)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Memory format.
    pub fn format(&self) -> MemoryFormat {
        self.format
    }

    /// The stream that it belongs to.
    pub fn stream(&self) -> &Stream {
        self.moved_to.as_ref().unwrap_or(self.storage.home())
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        self.stream().device()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Id of its memory, unique in this process: equal for all handles and views of the memory,
    /// different for other memory even at the same address.
    pub fn storage_id(&self) -> u64 {
        self.storage.allocation().id
    }

    /// Address of its first element, for comparisons with other addresses of the device (D3); not
    /// to be dereferenced. 0 for a tensor without elements.
    pub fn address(&self) -> u64 {
        if self.bytes() == 0 { 0 } else { self.storage.address() + self.offset as u64 }
    }

    /// Lends the memory to code that uses addresses. Waits until all enqueued work that uses the
    /// memory is done; counted as one synchronisation for each stream with such work, even if the
    /// work is done already.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a device whose memory the host cannot address;
    /// [`Error::KernelPanicked`]; [`Error::HotScope`] if an open scope forbids the wait;
    /// [`Error::InsideKernel`].
    #[track_caller]
    pub fn lend(&self) -> Result<LentTensor> {
        LentTensor::new(self)
    }

    /// Lends the memory, wherever it is, to code that uses its address: for a CUDA device such code
    /// uses CUDA. Waits as [`Tensor::lend`] does. For several tensors see
    /// [`lend_on_device`](crate::lend_on_device).
    ///
    /// # Errors
    /// [`Error::KernelPanicked`], [`Error::DeviceFailed`]; [`Error::HotScope`] if an open scope
    /// forbids the wait; [`Error::InsideKernel`].
    #[track_caller]
    pub fn lend_on_device(&self) -> Result<LentDeviceTensor> {
        LentDeviceTensor::new(self)
    }

    /// Whether another handle to the tensor's memory exists. Kernels in flight do not count.
    pub fn is_shared(&self) -> bool {
        self.storage.is_shared()
    }

    /// Description in the placement log: element type, shape, memory format, device and stream
    /// (V4).
    pub fn placement(&self) -> String {
        let (device, stream) = (self.device().id(), self.stream().name());
        let (shape, dtype, format) = (self.shape(), self.dtype(), self.format());
        format!("{dtype} {shape} {format} on {device}, stream `{stream}`")
    }

    /// Logs that an operation created this tensor, from `input` or without one.
    #[inline]
    fn log_made(&self, operation: &'static str, input: Option<&Tensor>) {
        log_placement(operation, || {
            (input.map(Tensor::placement).unwrap_or_default(), self.placement())
        });
    }

    /// Bytes of its elements.
    pub(crate) fn bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }

    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    pub(crate) fn storage(&self) -> &Storage<Stream> {
        &self.storage
    }

    /// Whether both share a byte.
    pub(crate) fn overlaps(&self, other: &Tensor) -> bool {
        self.storage.is_same(&other.storage)
            && self.bytes() > 0
            && other.bytes() > 0
            && self.offset < other.offset + other.bytes()
            && other.offset < self.offset + self.bytes()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tensor { shape, dtype, format, .. } = self;
        let (stream, origin) = (self.stream(), self.storage.allocation().origin);
        write!(f, "Tensor({shape} {dtype} {format:?} of {stream:?}, made at {origin})")
    }
}

/// Parameters of a new tensor.
struct NewTensor {
    shape: Shape,
    dtype: DType,
    format: MemoryFormat,
    owner: Owner,
}

impl NewTensor {
    fn tensor(
        &self,
        stream: &Stream,
        operation: &'static str,
        site: &'static Location<'static>,
    ) -> Result<Tensor> {
        let &NewTensor { shape, dtype, format, owner } = self;
        format.check(operation, &shape)?;
        let bytes = shape.bytes(operation, dtype.size())?;
        let storage = StorageHandle::new(stream, bytes, owner, operation, site)?;
        Ok(Tensor { storage, offset: 0, shape, dtype, format, moved_to: None })
    }
}

fn check_length(operation: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    Err(Error::WrongLength { operation, argument: "elements", expected, got })
}

fn check_elements<T: Element>(operation: &'static str, dtype: DType) -> Result<()> {
    if dtype == T::DTYPE {
        return Ok(());
    }
    Err(Error::Mismatch {
        operation,
        argument: "elements".to_owned(),
        property: Property::DType,
        expected: dtype.to_string(),
        got: T::DTYPE.to_string(),
    })
}
