//! Requirements of an operation on its tensors, checked before anything is enqueued (V1).

use std::fmt;

use smallvec::SmallVec;

use super::{Device, Stream, Tensor};
use crate::ground::{DType, DeviceId, Error, MAX_DIMS, MemoryFormat, Property, Result};

/// Allowed values of one extent of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Exactly this number.
    Exactly(usize),
    /// A number from the first to the second, inclusive.
    Between(usize, usize),
    /// Any number, zero included.
    Any,
}

impl Extent {
    fn admits(self, extent: usize) -> bool {
        match self {
            Extent::Exactly(n) => extent == n,
            Extent::Between(min, max) => (min..=max).contains(&extent),
            Extent::Any => true,
        }
    }
}

impl From<usize> for Extent {
    fn from(extent: usize) -> Self {
        Extent::Exactly(extent)
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Extent::Exactly(n) => write!(f, "{n}"),
            Extent::Between(min, max) => write!(f, "{min}..={max}"),
            Extent::Any => f.write_str("*"),
        }
    }
}

/// Requirements of an operation on a tensor: any of device, stream, element type, shape and memory
/// format. Checking reads the handle only: it launches nothing and does not wait, and allocates
/// only for an error.
///
/// ```
/// use meristem_device::{DType, Device, DeviceId, DeviceOptions, Expect, Owner, Tensor};
/// # let options = DeviceOptions::default();
/// let device = Device::open(DeviceId::Cpu(0), &options)?;
/// let targets = Tensor::zeros(&device.stream("s"), [8], DType::F32, Owner::Batches)?;
/// let expect = Expect::device(&device).dtype(DType::U32).shape([8]).contiguous();
/// let error = expect.check("train_step", "targets", &targets).unwrap_err();
/// assert_eq!(error.to_string(), "`train_step`: `targets` must be u32, got f32");
/// # Ok::<(), meristem_device::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "nothing is checked until `check`"]
pub struct Expect<'a> {
    device: Option<&'a Device>,
    stream: Option<&'a Stream>,
    dtype: Option<DType>,
    shape: Option<SmallVec<[Extent; MAX_DIMS]>>,
    format: Option<MemoryFormat>,
}

impl<'a> Expect<'a> {
    /// No requirements.
    pub fn any() -> Self {
        Expect::default()
    }

    /// Requires a tensor on this opened device.
    pub fn device(device: &'a Device) -> Self {
        Expect { device: Some(device), ..Expect::default() }
    }

    /// Requires a tensor of this stream, and therefore of the stream's device.
    pub fn stream(stream: &'a Stream) -> Self {
        Expect { device: Some(stream.device()), stream: Some(stream), ..Expect::default() }
    }

    /// Requires this element type.
    pub fn dtype(self, dtype: DType) -> Self {
        Expect { dtype: Some(dtype), ..self }
    }

    /// Requires this shape, outermost extent first, in the user's order: (N, C, H, W) for
    /// images.
    pub fn shape<E: Into<Extent>>(self, extents: impl IntoIterator<Item = E>) -> Self {
        Expect { shape: Some(extents.into_iter().map(Into::into).collect()), ..self }
    }

    /// Requires the contiguous memory format: the last dimension varies fastest.
    pub fn contiguous(self) -> Self {
        self.format(MemoryFormat::Contiguous)
    }

    /// Requires that (N, C, H, W) is stored as (N, H, W, C) (F1).
    pub fn channels_last(self) -> Self {
        self.format(MemoryFormat::ChannelsLast)
    }

    /// Requires this memory format. A tensor with one channel or one pixel, whose elements
    /// have the same order in both formats, satisfies both.
    pub fn format(self, format: MemoryFormat) -> Self {
        Expect { format: Some(format), ..self }
    }

    /// Checks a tensor, in the order device, stream, element type, shape, format.
    ///
    /// # Errors
    /// [`Error::Mismatch`] names the operation, the argument, and the first property that does not
    /// match; [`Error::KernelPanicked`] if a kernel of the expected stream panicked;
    /// [`Error::DeviceFailed`].
    pub fn check(
        &self,
        operation: &'static str,
        argument: impl fmt::Display,
        tensor: &Tensor,
    ) -> Result<()> {
        match self.mismatch(tensor) {
            None => self.stream.map_or(Ok(()), |stream| stream.state().check_alive()),
            Some((property, expected, got)) => {
                let argument = argument.to_string();
                Err(Error::Mismatch { operation, argument, property, expected, got })
            }
        }
    }

    /// The first property that does not match, with the required and the actual value.
    fn mismatch(&self, tensor: &Tensor) -> Option<(Property, String, String)> {
        if let Some(device) = self.device
            && device != tensor.device()
        {
            let (expected, got) = device_words(device.id(), tensor.device().id());
            return Some((Property::Device, expected, got));
        }
        if let Some(stream) = self.stream
            && stream != tensor.stream()
        {
            let expected = format!("of stream `{}`", stream.name());
            let got = format!("one of stream `{}` (use `.on(&stream)`)", tensor.stream().name());
            return Some((Property::Stream, expected, got));
        }
        if let Some(dtype) = self.dtype
            && dtype != tensor.dtype()
        {
            return Some((Property::DType, dtype.to_string(), tensor.dtype().to_string()));
        }
        if let Some(shape) = &self.shape
            && !fits(shape, tensor.dims())
        {
            let extents: Vec<String> = shape.iter().map(Extent::to_string).collect();
            let expected = format!("of shape [{}]", extents.join(", "));
            return Some((Property::Shape, expected, tensor.shape().to_string()));
        }
        if let Some(format) = self.format
            && !lies_in(format, tensor)
        {
            return Some((Property::Format, format.to_string(), tensor.format().to_string()));
        }
        None
    }
}

/// Texts of the required and the actual device, which differ.
pub(crate) fn device_words(expected: DeviceId, got: DeviceId) -> (String, String) {
    let got = if expected == got { format!("another opening of {got}") } else { got.to_string() };
    (format!("on {expected}"), got)
}

fn fits(shape: &[Extent], dims: &[usize]) -> bool {
    shape.len() == dims.len() && shape.iter().zip(dims).all(|(extent, &n)| extent.admits(n))
}

fn lies_in(format: MemoryFormat, tensor: &Tensor) -> bool {
    format == tensor.format()
        || matches!(*tensor.dims(), [_, c, h, w] if c == 1 || h.saturating_mul(w) == 1)
}
