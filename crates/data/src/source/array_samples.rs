//! Arrays of samples: their form, and their conversion to stored samples.

use std::fmt;

use half::f16;

use super::SIDE_MAX;
use super::input::Input;
use super::npy::{ElementType, FloatType, IntType, NpyHeader};
use crate::error::{Mismatch, Result};
use crate::shape::{InputKind, SampleShape, StoredType};

/// Most channels of an image whose channels are last, where more are a sign of another order.
const CHANNELS_LAST_MAX: usize = 4;
/// Most values of a sample.
const VALUES_MAX: usize = 1 << 28;

/// Order of the axes in an array of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AxisOrder {
    /// [N, H, W] or [N, H, W, C]: images only.
    ChannelsLast,
    /// [N, F], [N, C, L] or [N, C, H, W].
    ChannelsFirst,
}

/// Form of an array of samples that a dataset can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArrayForm {
    /// Number of samples.
    pub(super) len: usize,
    pub(super) kind: InputKind,
    pub(super) shape: SampleShape,
    pub(super) stored: StoredType,
    order: AxisOrder,
    number: Number,
}

/// Type of a number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    Int(IntType),
    Float(FloatType),
}

impl Number {
    /// The type of an element; `None` if it is no number.
    pub(super) fn of(element: &ElementType) -> Option<Self> {
        match *element {
            ElementType::Int(int) => Some(Self::Int(int)),
            ElementType::Float(float) => Some(Self::Float(float)),
            ElementType::Bool | ElementType::Text(_) | ElementType::Other(_) => None,
        }
    }

    /// Bytes of one element.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Int(int) => int.bytes,
            Self::Float(float) => float.bytes(),
        }
    }

    /// The narrowest type that stores all its values as they are; f32 rounds those of others.
    fn stored(self) -> StoredType {
        match self {
            Self::Int(IntType::U8) => StoredType::U8,
            Self::Int(IntType { bytes: 1 | 2, signed: true, .. }) => StoredType::I16,
            Self::Float(FloatType::F16 { .. }) => StoredType::F16,
            Self::Int(_) | Self::Float(_) => StoredType::F32,
        }
    }

    /// The value of one element of `self.bytes()` bytes.
    pub(super) fn value(self, element: &[u8]) -> f64 {
        match self {
            // Rounds twice, to f64 here and to f32 later. Beyond 2^53 the result may differ in the
            // last bit from the f32 that is nearest to the integer.
            Self::Int(int) => int.value(element) as f64,
            Self::Float(float) => float.value(element),
        }
    }
}

impl ArrayForm {
    /// The form of the array `name`.
    ///
    /// # Errors
    /// [`crate::Error::Layout`] for a shape or type that no dataset has, with expressions of numpy
    /// that change it.
    pub(super) fn of(
        name: &str,
        order: AxisOrder,
        header: &NpyHeader,
        input: &Input<'_>,
    ) -> Result<Self> {
        let number = Number::of(&header.element);
        let form = match order {
            AxisOrder::ChannelsLast => image_form(&header.shape),
            AxisOrder::ChannelsFirst => input_form(&header.shape),
        };
        match (form, number) {
            (Some((len, kind, shape)), Some(number)) if !header.is_fortran => {
                Ok(Self { len, kind, shape, stored: number.stored(), order, number })
            }
            (form, number) => {
                let expected = match order {
                    AxisOrder::ChannelsLast => "numbers, N×H×W or N×H×W×C with C from 1 to 4",
                    AxisOrder::ChannelsFirst => "numbers, N×F, N×C×L or N×C×H×W",
                };
                let remedy = remedy(order, header, form.is_some(), number.is_some());
                let mismatch = Mismatch::new(format!("`{name}`"), expected, header.to_string());
                Err(mismatch.remedy(remedy).in_layout(input.path()))
            }
        }
    }

    /// Whether samples of both arrays are stored alike.
    pub(super) fn is_alike(&self, other: &Self) -> bool {
        let form = |f: &Self| (f.kind, f.shape, f.stored);
        form(self) == form(other)
    }

    /// A reader of the array `name`, at most `chunk` samples at a time.
    pub(super) fn reader<'a>(&self, name: &'a str, chunk: usize) -> SampleReader<'a> {
        let values = chunk * self.shape.numel();
        SampleReader {
            name,
            form: *self,
            done: 0,
            read: vec![0; values * self.number.bytes()],
            values: if self.stored == StoredType::U8 {
                vec![]
            } else {
                vec![0; values * self.stored.size()]
            },
            bytes: vec![0; self.moves_axes() as usize * self.shape.numel()],
        }
    }

    /// Whether the axes of a stored sample have another order than those in the file.
    fn moves_axes(&self) -> bool {
        let SampleShape { channels, height, width } = self.shape;
        self.order == AxisOrder::ChannelsFirst && channels > 1 && height * width > 1
    }
}

impl fmt::Display for ArrayForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.kind.describe(self.shape), self.stored.plural())
    }
}

/// Number, kind and shape of samples, from the shape of an array.
type Form = Option<(usize, InputKind, SampleShape)>;

fn image_form(shape: &[usize]) -> Form {
    let (len, [height, width, channels]) = match *shape {
        [n, h, w] => (n, [h, w, 1]),
        [n, h, w, c] => (n, [h, w, c]),
        _ => return None,
    };
    let side = 1..=SIDE_MAX as usize;
    let fits = side.contains(&height)
        && side.contains(&width)
        && (1..=CHANNELS_LAST_MAX).contains(&channels);
    fits.then_some((len, InputKind::Image, SampleShape { channels, height, width }))
}

fn input_form(shape: &[usize]) -> Form {
    let (len, dims) = shape.split_first()?;
    let (kind, shape) = InputKind::of_dims(dims)?;
    let values = dims.iter().try_fold(1_usize, |values, dim| values.checked_mul(*dim))?;
    (1..=VALUES_MAX).contains(&values).then_some((*len, kind, shape))
}

/// Instructions, with expressions of numpy, that turn an array `x` into samples.
fn remedy(order: AxisOrder, header: &NpyHeader, has_shape: bool, is_number: bool) -> String {
    let sides = CHANNELS_LAST_MAX + 1..;
    let transposed = match header.shape[..] {
        [_, c, h, w] if order == AxisOrder::ChannelsLast => {
            (1..=CHANNELS_LAST_MAX).contains(&c) && sides.contains(&h) && sides.contains(&w)
        }
        _ => false,
    };
    let mut steps = vec![];
    match order {
        _ if has_shape => {}
        AxisOrder::ChannelsLast if transposed => {
            steps.push("name it train_inputs, which has its channels first");
        }
        AxisOrder::ChannelsLast => {
            steps.push(
                "bring them to that shape, such as with x.reshape(-1, 28, 28), or name vectors \
                 train_inputs",
            );
        }
        AxisOrder::ChannelsFirst => {
            steps.push("bring it to one of these shapes, such as with x.reshape(len(x), -1)");
        }
    }
    if !is_number {
        steps.push("make it numbers, such as with x.astype('f4')");
    }
    // numpy saves a transposed array in Fortran order.
    if header.is_fortran {
        steps.push("save numpy.ascontiguousarray(x)");
    }
    steps.join(", ")
}

/// Reads an array of samples in chunks.
pub(super) struct SampleReader<'a> {
    name: &'a str,
    form: ArrayForm,
    /// Samples that have been read.
    done: usize,
    /// A chunk as it is in the file.
    read: Vec<u8>,
    /// A chunk as it is stored; empty for bytes.
    values: Vec<u8>,
    /// One sample of bytes whose axes are moved, else empty.
    bytes: Vec<u8>,
}

impl SampleReader<'_> {
    /// The next `count` samples, as bytes in the order of storage.
    ///
    /// # Errors
    /// The errors of reading; [`crate::Error::Layout`] for a number that is not finite as f32, with
    /// its place.
    pub(super) fn next(&mut self, count: usize, input: &mut Input<'_>) -> Result<&[u8]> {
        let ArrayForm { shape, stored, number, .. } = self.form;
        let (size, element) = (shape.numel(), number.bytes());
        let read = &mut self.read[..count * size * element];
        input.read_exact(read, "samples")?;
        let moves_axes = self.form.moves_axes();
        let pixels = shape.height * shape.width;
        // The place in storage of value i of a sample in the file.
        let place = |i: usize| {
            if moves_axes { i % pixels * shape.channels + i / pixels } else { i }
        };
        if stored == StoredType::U8 {
            if moves_axes {
                for sample in read.chunks_exact_mut(size) {
                    self.bytes.copy_from_slice(sample);
                    self.bytes.iter().enumerate().for_each(|(i, byte)| sample[place(i)] = *byte);
                }
            }
            self.done += count;
            return Ok(read);
        }
        let width = stored.size();
        let values = &mut self.values[..count * size * width];
        let samples = read.chunks_exact(size * element).zip(values.chunks_exact_mut(size * width));
        for (n, (from, to)) in samples.enumerate() {
            for (i, element) in from.chunks_exact(element).enumerate() {
                let value = number.value(element);
                if !(value as f32).is_finite() {
                    let what = format!("value {i} of sample {} of `{}`", self.done + n, self.name);
                    let expected = "a finite number of at most 3.4e38";
                    return Err(Mismatch::new(what, expected, value.to_string())
                        .remedy("leave the sample out, or replace the value")
                        .in_layout(input.path()));
                }
                let to = &mut to[place(i) * width..][..width];
                match stored {
                    // Both conversions are exact: the file has values of the stored type.
                    StoredType::I16 => to.copy_from_slice(&(value as i16).to_ne_bytes()),
                    StoredType::F16 => to.copy_from_slice(&f16::from_f64(value).to_ne_bytes()),
                    _ => to.copy_from_slice(&(value as f32).to_ne_bytes()),
                }
            }
        }
        self.done += count;
        Ok(values)
    }
}
