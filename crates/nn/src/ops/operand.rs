//! Operands of a step: their element types and lengths, and the typed slices it runs over.

use meristem_device::DType;
use smallvec::SmallVec;

/// Element type, length and role of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Element type.
    pub dtype: DType,
    /// Elements.
    pub len: usize,
    /// Whether it may be absent or is scratch.
    pub role: Role,
}

/// Element type and length of an operand that is given.
pub(crate) type Form = (DType, usize);

/// Whether an operand may be absent, and whether its contents mean anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Has exactly `len` elements.
    Required,
    /// Has `len` elements, or none.
    Optional,
    /// Has at least `len` elements, whose contents mean nothing before and after.
    Scratch,
}

impl Spec {
    const fn new(dtype: DType, len: usize) -> Self {
        Self { dtype, len, role: Role::Required }
    }

    /// The same operand, which may be absent (no elements).
    pub const fn optional(self) -> Self {
        Self { role: Role::Optional, ..self }
    }

    /// Whether an operand of this type and length fits.
    pub fn accepts(&self, dtype: DType, len: usize) -> bool {
        let fits = match self.role {
            Role::Required => len == self.len,
            Role::Optional => len == self.len || len == 0,
            Role::Scratch => len >= self.len,
        };
        fits && (dtype == self.dtype || len == 0)
    }
}

/// An f32 operand.
pub(super) const fn f32s(len: usize) -> Spec {
    Spec::new(DType::F32, len)
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
    Spec { role: Role::Scratch, ..f32s(len) }
}

/// The operands that an operation takes, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Read, never written.
    pub reads: SmallVec<[Spec; 8]>,
    /// Written; those that are added to are read as well.
    pub writes: SmallVec<[Spec; 8]>,
}

impl Signature {
    pub(super) fn new(reads: &[Spec], writes: &[Spec]) -> Self {
        Self { reads: SmallVec::from_slice(reads), writes: SmallVec::from_slice(writes) }
    }

    /// The first thing about given operands that does not fit: which, what is expected, what came.
    pub(crate) fn misfit(&self, reads: &[Form], writes: &[Form]) -> Option<[String; 3]> {
        let kinds = [("read", &self.reads, reads), ("written", &self.writes, writes)];
        for (kind, specs, given) in kinds {
            if specs.len() != given.len() {
                let numbers = [specs.len(), given.len()].map(|n| format!("{n} in all"));
                let [expected, got] = numbers;
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

macro_rules! slices {
    ($($variant:ident $method:ident $type:ty),*) => {
        /// A typed operand that is read.
        #[derive(Clone, Copy, Debug)]
        pub enum Slice<'a> {
            $(#[doc = concat!("Elements of `", stringify!($type), "`.")] $variant(&'a [$type]),)*
        }

        /// A typed operand that is written.
        #[derive(Debug)]
        pub enum SliceMut<'a> {
            $(#[doc = concat!("Elements of `", stringify!($type), "`.")] $variant(&'a mut [$type]),)*
        }

        impl<'a> Slice<'a> {
            $(#[doc = concat!("The elements, which are `", stringify!($type), "`.\n\n# Panics\nIf they are not.")]
            pub fn $method(self) -> &'a [$type] {
                match self {
                    Slice::$variant(slice) => slice,
                    other => absent_or(other.is_empty(), other.dtype(), DType::$variant, &[]),
                }
            })*

            /// Element type.
            pub fn dtype(&self) -> DType {
                match self { $(Slice::$variant(_) => DType::$variant,)* }
            }

            /// Elements.
            pub fn len(&self) -> usize {
                match self { $(Slice::$variant(slice) => slice.len(),)* }
            }

            /// Whether there are no elements: an absent operand.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }
        }

        impl<'a> SliceMut<'a> {
            $(#[doc = concat!("The elements, which are `", stringify!($type), "`.\n\n# Panics\nIf they are not.")]
            pub fn $method(self) -> &'a mut [$type] {
                let (dtype, empty) = (self.dtype(), self.is_empty());
                match self {
                    SliceMut::$variant(slice) => slice,
                    _ => absent_or(empty, dtype, DType::$variant, &mut []),
                }
            })*

            /// Element type.
            pub fn dtype(&self) -> DType {
                match self { $(SliceMut::$variant(_) => DType::$variant,)* }
            }

            /// Elements.
            pub fn len(&self) -> usize {
                match self { $(SliceMut::$variant(slice) => slice.len(),)* }
            }

            /// Whether there are no elements: an absent operand.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }
        }
    };
}
slices!(F32 f32 f32, F64 f64 f64, U32 u32 u32, I64 i64 i64, U8 u8 u8);

/// An absent operand has no type of its own. Any other of a wrong type is a mistake of the plan
/// compiler, which checks signatures.
#[track_caller]
fn absent_or<T>(empty: bool, got: DType, expected: DType, none: T) -> T {
    assert!(empty, "operand of a step: expected {expected}, got {got}");
    none
}

/// The operands of one running step, in the order of its [`Signature`].
#[derive(Debug, Default)]
pub struct Operands<'a> {
    /// Read.
    pub reads: SmallVec<[Slice<'a>; 8]>,
    /// Written; none overlaps another operand.
    pub writes: SmallVec<[SliceMut<'a>; 8]>,
}

impl<'a> Operands<'a> {
    /// All of them; `R` and `W` are the numbers of the signature.
    ///
    /// # Panics
    /// If there are more or fewer.
    pub(crate) fn split<const R: usize, const W: usize>(
        self,
    ) -> ([Slice<'a>; R], [SliceMut<'a>; W]) {
        let counts = (self.reads.len(), self.writes.len());
        assert!(counts == (R, W), "operands of a step: expected {:?}, got {counts:?}", (R, W));
        let (mut reads, mut writes) = (self.reads.into_iter(), self.writes.into_iter());
        let none = || SliceMut::U8(&mut []);
        (
            std::array::from_fn(|_| reads.next().unwrap_or(Slice::U8(&[]))),
            std::array::from_fn(|_| writes.next().unwrap_or_else(none)),
        )
    }

    /// All of them where all are f32.
    ///
    /// # Panics
    /// As [`Operands::split`].
    pub(super) fn floats<const R: usize, const W: usize>(
        self,
    ) -> ([&'a [f32]; R], [&'a mut [f32]; W]) {
        let (reads, writes) = self.split::<R, W>();
        (reads.map(Slice::f32), writes.map(SliceMut::f32))
    }
}
