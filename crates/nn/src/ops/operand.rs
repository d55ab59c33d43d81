//! Operands of a step: their element types and lengths, and the typed slices it runs over.

use meristem_device::{DType, Element};
use smallvec::SmallVec;

use crate::precision::ValueType;

/// Element type, length and role of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Element type.
    pub dtype: DType,
    /// Elements.
    pub len: usize,
    /// Whether it may be absent or is scratch.
    pub role: OperandRole,
    /// Whether it has values of the network or gradients of values, whose element type is the
    /// plan's [`ValueType`].
    pub is_values: bool,
}

/// Element type and length of an operand that is given.
pub type OperandForm = (DType, usize);

/// Whether an operand may be absent, and whether its contents mean anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandRole {
    /// Has exactly `len` elements.
    Required,
    /// Has `len` elements, or none.
    Optional,
    /// Has at least `len` elements, with unspecified contents before and after.
    Scratch,
}

impl Spec {
    /// An operand of exactly `len` elements.
    pub const fn new(dtype: DType, len: usize) -> Self {
        Self { dtype, len, role: OperandRole::Required, is_values: false }
    }

    /// The same operand, which may be absent (no elements).
    pub const fn optional(self) -> Self {
        Self { role: OperandRole::Optional, ..self }
    }

    /// Whether an operand of this type and length fits.
    pub fn accepts(&self, dtype: DType, len: usize) -> bool {
        let fits = match self.role {
            OperandRole::Required => len == self.len,
            OperandRole::Optional => len == self.len || len == 0,
            OperandRole::Scratch => len >= self.len,
        };
        fits && (dtype == self.dtype || len == 0)
    }
}

/// An f32 operand.
pub(super) const fn f32s(len: usize) -> Spec {
    Spec::new(DType::F32, len)
}

/// An operand of values, or of gradients of values: f32 unless the plan stores another type.
pub(super) const fn values(len: usize) -> Spec {
    Spec { is_values: true, ..f32s(len) }
}

/// An f64 operand.
pub(super) const fn f64s(len: usize) -> Spec {
    Spec::new(DType::F64, len)
}

/// A u8 operand.
pub(super) const fn u8s(len: usize) -> Spec {
    Spec::new(DType::U8, len)
}

/// A u32 operand.
pub(super) const fn u32s(len: usize) -> Spec {
    Spec::new(DType::U32, len)
}

/// An i64 operand.
pub(super) const fn i64s(len: usize) -> Spec {
    Spec::new(DType::I64, len)
}

/// At least `len` f32 of scratch.
pub(super) const fn scratch(len: usize) -> Spec {
    Spec { role: OperandRole::Scratch, ..f32s(len) }
}

/// The operands that an operation takes, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Read, never written.
    pub reads: SmallVec<[Spec; 8]>,
    /// Written; an operand that is added to is read as well.
    pub writes: SmallVec<[Spec; 8]>,
}

impl Signature {
    pub(super) fn new(reads: &[Spec], writes: &[Spec]) -> Self {
        Self { reads: SmallVec::from_slice(reads), writes: SmallVec::from_slice(writes) }
    }

    /// The signature with values of this type.
    pub(super) fn with_values(mut self, of: ValueType) -> Self {
        for spec in self.reads.iter_mut().chain(&mut self.writes).filter(|spec| spec.is_values) {
            spec.dtype = of.dtype();
        }
        self
    }

    /// The signature with its scratch replaced by `len` elements.
    pub(super) fn with_scratch(mut self, len: usize) -> Self {
        self.writes.retain(|spec| spec.role != OperandRole::Scratch);
        if len > 0 {
            self.writes.push(scratch(len));
        }
        self
    }

    /// The first operand that does not match: its name, the expected form, the given form.
    pub(crate) fn misfit(
        &self,
        reads: &[OperandForm],
        writes: &[OperandForm],
    ) -> Option<[String; 3]> {
        let kinds = [("read", &self.reads, reads), ("written", &self.writes, writes)];
        for (kind, specs, given) in kinds {
            if specs.len() != given.len() {
                let [expected, got] = [specs.len(), given.len()].map(|n| format!("{n} in all"));
                return Some([kind.into(), expected, got]);
            }
            for (at, (spec, &(dtype, len))) in specs.iter().zip(given).enumerate() {
                if !spec.accepts(dtype, len) {
                    let expected = format!("{} of {} ({:?})", spec.len, spec.dtype, spec.role);
                    return Some([format!("{kind} {at}"), expected, format!("{len} of {dtype}")]);
                }
            }
        }
        None
    }
}

/// A typed operand that is read.
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

/// A typed operand that is written.
#[derive(Debug)]
pub struct SliceMut<'a> {
    dtype: DType,
    bytes: &'a mut [u8],
}

impl<'a> Slice<'a> {
    /// An operand of these bytes, which are elements of `dtype` and aligned for them.
    pub(crate) fn new(dtype: DType, bytes: &'a [u8]) -> Self {
        Self { dtype, bytes }
    }

    /// An operand of these elements.
    pub fn from_elements<T: Element>(elements: &'a [T]) -> Self {
        Self::new(T::DTYPE, bytemuck::cast_slice(elements))
    }

    /// Element type and number of elements. An absent operand has none.
    pub fn form(&self) -> OperandForm {
        (self.dtype, self.bytes.len() / self.dtype.size())
    }

    /// The elements.
    ///
    /// # Panics
    /// If the operand has elements of a different type.
    pub fn elements<T: Element>(self) -> &'a [T] {
        check_type::<T>(self.form());
        if self.bytes.is_empty() { &[] } else { bytemuck::cast_slice(self.bytes) }
    }

    /// Its bytes.
    pub(super) fn bytes(self) -> &'a [u8] {
        self.bytes
    }

    /// The elements as words of 32 bits, of a longer element the lower word first.
    pub(super) fn words(self) -> &'a [u32] {
        Self { dtype: DType::U32, ..self }.elements()
    }
}

impl<'a> SliceMut<'a> {
    /// As [`Slice::new`].
    pub(crate) fn new(dtype: DType, bytes: &'a mut [u8]) -> Self {
        Self { dtype, bytes }
    }

    /// An operand of these elements.
    pub fn from_elements<T: Element>(elements: &'a mut [T]) -> Self {
        Self::new(T::DTYPE, bytemuck::cast_slice_mut(elements))
    }

    /// Element type and number of elements. An absent operand has none.
    pub fn form(&self) -> OperandForm {
        (self.dtype, self.bytes.len() / self.dtype.size())
    }

    /// The same operand for reading.
    pub(super) fn as_slice(&self) -> Slice<'_> {
        Slice::new(self.dtype, self.bytes)
    }

    /// Its bytes.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// The elements.
    ///
    /// # Panics
    /// If the operand has elements of a different type.
    pub fn elements<T: Element>(self) -> &'a mut [T] {
        check_type::<T>(self.form());
        if self.bytes.is_empty() { &mut [] } else { bytemuck::cast_slice_mut(self.bytes) }
    }
}

/// An absent operand fits any type. Any other operand of a wrong type is a mistake of the plan
/// compiler, which checks signatures.
#[track_caller]
fn check_type<T: Element>((got, len): OperandForm) {
    assert!(len == 0 || got == T::DTYPE, "operand of a step: expected {}, got {got}", T::DTYPE);
}

/// The operands of one running step, in the order of its [`Signature`].
#[derive(Debug, Default)]
pub struct StepOperands<'a> {
    /// Read.
    pub reads: SmallVec<[Slice<'a>; 8]>,
    /// Written; none overlaps another operand.
    pub writes: SmallVec<[SliceMut<'a>; 8]>,
}

impl<'a> StepOperands<'a> {
    /// All of them; `R` and `W` are the numbers of the signature.
    ///
    /// # Panics
    /// If the number of operands differs.
    pub(crate) fn split<const R: usize, const W: usize>(
        self,
    ) -> ([Slice<'a>; R], [SliceMut<'a>; W]) {
        let counts = (self.reads.len(), self.writes.len());
        assert!(counts == (R, W), "operands of a step: expected {:?}, got {counts:?}", (R, W));
        let (mut reads, mut writes) = (self.reads.into_iter(), self.writes.into_iter());
        (
            std::array::from_fn(|_| reads.next().expect("as many as were counted")),
            std::array::from_fn(|_| writes.next().expect("as many as were counted")),
        )
    }

    /// All of them where all are f32.
    ///
    /// # Panics
    /// As [`StepOperands::split`].
    pub(super) fn floats<const R: usize, const W: usize>(
        self,
    ) -> ([&'a [f32]; R], [&'a mut [f32]; W]) {
        let (reads, writes) = self.split::<R, W>();
        (reads.map(Slice::elements), writes.map(SliceMut::elements))
    }
}
