//! Arguments of a kernel: their elements as slices.
//!
//! Soundness of the slices: a launch is refused if a written argument overlaps another of its
//! arguments. Submission orders a launch after every earlier conflicting access of any stream and
//! before every later one (`hazard`). So while a kernel runs, no other work writes the bytes that
//! it reads, and no other work touches the bytes that it writes.

use std::panic::Location;

use smallvec::SmallVec;

use super::block::MemoryBlock;
use super::fill::Fill;
use super::host_block::HostBlock;
use super::scratch::BorrowedScratch;
use crate::ground::sync::Arc;
use crate::ground::{AccessKind, DType, Element, INLINE_ARGS, Isa};
use crate::hooks::{LaunchCall, POISON};

/// An argument of a launch in flight. Holds its block, so the memory lives until the kernel has
/// ended.
pub(crate) struct Arg {
    /// `None` for no elements.
    pub(crate) block: Option<Arc<MemoryBlock>>,
    /// First byte within the block; in bounds, and aligned for the element type.
    pub(crate) offset: usize,
    /// Number of bytes; in bounds of the block.
    pub(crate) bytes: usize,
    pub(crate) dtype: DType,
    pub(crate) access: AccessKind,
    /// Whether the kernel has taken its mutable slice.
    pub(crate) taken: bool,
}

impl Arg {
    /// Its memory, for a kernel on a CPU device; `None` for no elements.
    fn host(&self) -> Option<&HostBlock> {
        self.block.as_ref().map(|block| match block.host() {
            Some(block) => block,
            None => unreachable!("a CPU device takes its memory from the host"),
        })
    }

    /// Address of the first byte, in the device's address space; 0 for no elements.
    #[cfg(feature = "cuda")]
    pub(super) fn address(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.address() + self.offset as u64)
    }
}

/// A launch in flight: its operation, call site and arguments.
pub(crate) struct LaunchRecord {
    pub(crate) operation: &'static str,
    /// Call site of the launch, for errors and observers.
    pub(crate) site: &'static Location<'static>,
    pub(crate) args: SmallVec<[Arg; INLINE_ARGS]>,
    /// Its temporary memory, on a CPU device.
    pub(crate) scratch: Option<BorrowedScratch>,
    /// Instruction set of the device's kernels.
    pub(crate) isa: Isa,
    /// Description of the launch for observers that watch runs; `None` without any.
    pub(crate) call: Option<Arc<LaunchCall>>,
}

/// The arguments of a running kernel, by their position in the launch's chain of `read` and
/// `write`.
///
/// A wrong position, element type or kind of access is a mistake in the kernel's code. It panics
/// with a message that names the mistake, which fails the kernel's stream with
/// [`crate::Error::KernelPanicked`].
pub struct Args<'a> {
    record: &'a mut LaunchRecord,
}

impl<'a> Args<'a> {
    pub(crate) fn new(record: &'a mut LaunchRecord) -> Self {
        Args { record }
    }

    /// Number of arguments.
    pub fn len(&self) -> usize {
        self.record.args.len()
    }

    /// Whether there are no arguments.
    pub fn is_empty(&self) -> bool {
        self.record.args.is_empty()
    }

    /// The launch's operation.
    pub fn operation(&self) -> &'static str {
        self.record.operation
    }

    /// Instruction set of the device's kernels.
    pub fn isa(&self) -> Isa {
        self.record.isa
    }

    /// Elements of argument `i`, which was declared with `read`, in memory order.
    ///
    /// # Panics
    /// See [`Args`].
    #[track_caller]
    pub fn read<T: Element>(&self, i: usize) -> &'a [T] {
        let arg = self.arg::<T>(i, AccessKind::Read);
        let Some(block) = arg.host() else { return &[] };
        block.race.read();
        let len = arg.bytes / size_of::<T>();
        // SAFETY: `offset` and `bytes` are inside of the block, which `LaunchRecord` keeps alive
        // for 'a; its bytes are initialised, and any bytes are a `T` (Pod). The address is aligned:
        // blocks are aligned to 64, and offsets are multiples of the element type that was just
        // checked. No work writes these bytes during 'a: see the module documentation.
        unsafe { std::slice::from_raw_parts(block.data().add(arg.offset).cast().as_ptr(), len) }
    }

    /// Elements of argument `i`, which was declared with `write`, in memory order. They hold their
    /// previous values. Each argument can be taken once; several can be held at once.
    ///
    /// # Panics
    /// See [`Args`].
    #[track_caller]
    pub fn write<T: Element>(&mut self, i: usize) -> &'a mut [T] {
        let arg = self.arg::<T>(i, AccessKind::Write);
        assert!(!arg.taken, "{}: argument {i} was taken before", self.operation());
        self.record.args[i].taken = true;
        let arg = &self.record.args[i];
        let Some(block) = arg.host() else { return &mut [] };
        block.race.write();
        let len = arg.bytes / size_of::<T>();
        // SAFETY: inside, alive, initialised and aligned as in `read`. Exclusive during 'a: `taken`
        // gives out each argument once, arguments do not overlap a written one, and no other work
        // touches these bytes: see the module documentation.
        unsafe { std::slice::from_raw_parts_mut(block.data().add(arg.offset).cast().as_ptr(), len) }
    }

    /// Bytes of argument `i`, which was declared with `read`, in memory order, for any element
    /// type.
    ///
    /// # Panics
    /// See [`Args`].
    #[track_caller]
    pub fn bytes(&self, i: usize) -> &'a [u8] {
        match self.at(i).dtype {
            DType::F32 => bytemuck::cast_slice(self.read::<f32>(i)),
            DType::F64 => bytemuck::cast_slice(self.read::<f64>(i)),
            DType::BF16 => bytemuck::cast_slice(self.read::<half::bf16>(i)),
            DType::F16 => bytemuck::cast_slice(self.read::<half::f16>(i)),
            DType::I16 => bytemuck::cast_slice(self.read::<i16>(i)),
            DType::U8 => self.read(i),
            DType::U32 => bytemuck::cast_slice(self.read::<u32>(i)),
            DType::I64 => bytemuck::cast_slice(self.read::<i64>(i)),
        }
    }

    /// Bytes of argument `i`, which was declared with `write`, in memory order, for any element
    /// type. Each argument can be taken once, by this or [`write`](Args::write); several can be
    /// held at once.
    ///
    /// # Panics
    /// See [`Args`].
    #[track_caller]
    pub fn bytes_mut(&mut self, i: usize) -> &'a mut [u8] {
        match self.at(i).dtype {
            DType::F32 => bytemuck::cast_slice_mut(self.write::<f32>(i)),
            DType::F64 => bytemuck::cast_slice_mut(self.write::<f64>(i)),
            DType::BF16 => bytemuck::cast_slice_mut(self.write::<half::bf16>(i)),
            DType::F16 => bytemuck::cast_slice_mut(self.write::<half::f16>(i)),
            DType::I16 => bytemuck::cast_slice_mut(self.write::<i16>(i)),
            DType::U8 => self.write(i),
            DType::U32 => bytemuck::cast_slice_mut(self.write::<u32>(i)),
            DType::I64 => bytemuck::cast_slice_mut(self.write::<i64>(i)),
        }
    }

    /// The launch's [temporary memory](crate::Launch::scratch), aligned to 64 bytes. Its bytes are
    /// unspecified (with the race sanitizer on they are [`POISON`]), and are lost after this
    /// kernel. Can be taken once.
    ///
    /// # Panics
    /// If the launch declares no temporary memory, or it was taken before.
    #[track_caller]
    pub fn scratch(&mut self) -> &'a mut [u8] {
        let operation = self.operation();
        let Some(scratch) = &mut self.record.scratch else {
            panic!("{operation}: a launch without temporary memory");
        };
        let (bytes, poisoned) = (scratch.bytes(), scratch.poisoned);
        let Some(piece) = scratch.take() else {
            panic!("{operation}: its temporary memory was taken before");
        };
        let block = piece.host();
        block.race.write();
        // SAFETY: the piece has at least `bytes` bytes, which are initialised, and `LaunchRecord`
        // keeps it for 'a. Exclusive during 'a: one kernel at a time has a piece (see
        // `scratch`), and `take` gives the piece to this kernel only once.
        let all = unsafe { std::slice::from_raw_parts_mut(block.data().as_ptr(), bytes) };
        if poisoned {
            Fill::Word(POISON).write(all);
        }
        all
    }

    #[track_caller]
    fn arg<T: Element>(&self, i: usize, access: AccessKind) -> &Arg {
        let (operation, arg) = (self.operation(), self.at(i));
        assert!(arg.access == access, "{operation}: argument {i} is declared as {:?}", arg.access);
        assert!(
            arg.dtype == T::DTYPE,
            "{operation}: argument {i} must be {}, got {}",
            T::DTYPE,
            arg.dtype
        );
        arg
    }

    #[track_caller]
    fn at(&self, i: usize) -> &Arg {
        let Some(arg) = self.record.args.get(i) else {
            let (operation, len) = (self.operation(), self.len());
            panic!("{operation}: argument {i} does not exist: the launch has {len} (from 0)");
        };
        arg
    }
}
