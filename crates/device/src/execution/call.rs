//! Calls of CUDA kernels: plain values that name a kernel, its blocks and threads, and its
//! parameters. They are checked against the launch's arguments before anything is enqueued. Calls
//! are part of every build; only a build with the `cuda` feature runs them.

use std::any::Any;
use std::ffi::CStr;
use std::fmt;

use bytemuck::Pod;
use smallvec::SmallVec;

use crate::ground::sync::{Arc, Mutex};
use crate::ground::{AccessKind, DType, Element};

/// A file of CUDA C++ kernels. It is compiled, or its code read from the user's cache, by
/// [`Device::load_kernels`](crate::Device::load_kernels), or else when a program that calls one of
/// its kernels is first launched or prepared. `meristem.cuh` is among its headers.
#[derive(Debug, PartialEq, Eq)]
pub struct KernelSource {
    /// Name for compiler messages: the file's path in the repository.
    pub name: &'static str,
    /// Contents of the file.
    pub text: &'static str,
    /// Other headers that it includes.
    pub headers: &'static [KernelHeader],
}

/// A header of a source.
#[derive(Debug, PartialEq, Eq)]
pub struct KernelHeader {
    /// Name in `#include` directives.
    pub name: &'static CStr,
    /// Contents of the file.
    pub text: &'static str,
}

/// A tensor among the parameters of a kernel: `Span<const T>` for `Read`, `Span<T>` for `Write`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operand {
    /// A tensor that the kernel only reads.
    Read(DType),
    /// A tensor that the kernel writes, and may read.
    Write(DType),
}

impl Operand {
    /// An operand that the kernel only reads.
    pub const fn read<T: Element>() -> Operand {
        Operand::Read(T::DTYPE)
    }

    /// An operand that the kernel writes, and may read.
    pub const fn write<T: Element>() -> Operand {
        Operand::Write(T::DTYPE)
    }

    pub(crate) fn access(self) -> AccessKind {
        match self {
            Operand::Read(_) => AccessKind::Read,
            Operand::Write(_) => AccessKind::Write,
        }
    }

    pub(crate) fn dtype(self) -> DType {
        match self {
            Operand::Read(dtype) | Operand::Write(dtype) => dtype,
        }
    }
}

/// The declaration of a kernel, next to its source: `extern "C" __global__ void entry(Span<…> …,
/// Values values)`. A kernel first calls `locate` (`meristem.cuh`) on its spans, which sets their
/// addresses. It uses `blockIdx.x` only, because `blockIdx.y` is reserved: in a graph one call runs
/// for several launches of a program, its members, and `blockIdx.y` is the number of the member.
#[derive(Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The source of the kernel.
    pub source: &'static KernelSource,
    /// Name of its function.
    pub entry: &'static str,
    /// Its tensors, in the order of the function's parameters.
    pub operands: &'static [Operand],
    /// Size in bytes of the struct of values after the tensors; 0 for none.
    pub values: usize,
}

/// The struct of values of a call, in words of 8 bytes, usually stored without an allocation.
type ValueWords = SmallVec<[u64; 8]>;

/// A part of one of the launch's arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Index of the argument.
    pub argument: usize,
    /// Offset of its first byte in the argument, in bytes; a multiple of the element's size.
    pub start: usize,
    /// Number of elements of the type that the kernel declares, which may differ from the
    /// argument's type.
    pub len: usize,
}

/// A call of a kernel.
#[derive(Debug, Clone)]
pub struct Call {
    pub(crate) kernel: &'static Kernel,
    /// The kernel's tensors; `None` for the launch's arguments.
    pub(crate) pieces: Option<SmallVec<[Piece; 8]>>,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
    /// The bytes of the values, padded to whole words.
    pub(crate) values: ValueWords,
    /// Number of bytes of the values.
    pub(crate) values_len: usize,
}

impl Call {
    /// A call with `blocks` blocks of `threads` threads, whose tensors are the launch's arguments.
    /// A call without blocks does nothing.
    pub fn new(kernel: &'static Kernel, blocks: u32, threads: u32) -> Call {
        let (values, values_len) = (ValueWords::new(), 0);
        Call { kernel, pieces: None, blocks, threads, shared: 0, values, values_len }
    }

    /// A call with a thread for each of `n` elements.
    pub fn each(kernel: &'static Kernel, n: usize) -> Call {
        const THREADS: u32 = 256;
        let blocks = n.div_ceil(THREADS as usize);
        Call::new(kernel, u32::try_from(blocks).unwrap_or(u32::MAX >> 1), THREADS)
    }

    /// The call with these pieces of the launch's arguments as tensors.
    pub fn with_pieces(mut self, pieces: impl IntoIterator<Item = Piece>) -> Call {
        self.pieces = Some(pieces.into_iter().collect());
        self
    }

    /// The call with at least `bytes` bytes of dynamic shared memory for each block. The number is
    /// rounded up to a multiple of 16 bytes, the widest load: the compiler may read the last
    /// elements of an array with such a load.
    pub fn shared(mut self, bytes: u32) -> Call {
        self.shared = bytes.next_multiple_of(16);
        self
    }

    /// The call with this struct of values, which the kernel declares with the same layout.
    pub fn values<V: Pod>(mut self, values: V) -> Call {
        let bytes = bytemuck::bytes_of(&values);
        self.values = ValueWords::from_elem(0, bytes.len().div_ceil(8));
        bytemuck::cast_slice_mut::<u64, u8>(&mut self.values)[..bytes.len()].copy_from_slice(bytes);
        self.values_len = bytes.len();
        self
    }
}

/// The calls of a launch, one after the other. A handle: clones are the same program. The first
/// launch on a device binds the program to its kernels; later launches reuse that.
#[derive(Clone)]
pub struct Program(pub(crate) Arc<Calls>);

pub(crate) struct Calls {
    pub(crate) list: Vec<Call>,
    /// The program as bound on each device that it was launched on.
    pub(crate) bound: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

impl Program {
    /// Whether every call states the pieces of the arguments that it uses. Then the work of the
    /// program does not depend on the lengths of the arguments.
    pub(crate) fn names_pieces(&self) -> bool {
        self.0.list.iter().all(|call| call.pieces.is_some())
    }

    /// The name of the kernel of each call that has blocks, in order, with the bytes of its pieces:
    /// the memory traffic if it reads or writes each element once. 0 bytes for a call without
    /// pieces, whose tensors are known at the launch only.
    pub fn traffic(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let calls = self.0.list.iter().filter(|call| call.blocks > 0);
        calls.map(|call| {
            let pieces = call.pieces.iter().flatten().zip(call.kernel.operands);
            let bytes = pieces.map(|(piece, operand)| piece.len * operand.dtype().size());
            (call.kernel.entry, bytes.sum())
        })
    }
}

impl From<Call> for Program {
    fn from(call: Call) -> Program {
        Program::from(vec![call])
    }
}

impl From<Vec<Call>> for Program {
    fn from(list: Vec<Call>) -> Program {
        Program(Arc::new(Calls { list, bound: Mutex::default() }))
    }
}

impl fmt::Debug for Program {
    /// Writes the names of the kernels.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.list.iter().map(|call| call.kernel.entry)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static SOURCE: KernelSource = KernelSource { name: "test.cu", text: "", headers: &[] };
    static KERNEL: Kernel = Kernel {
        source: &SOURCE,
        entry: "test",
        operands: &[Operand::read::<u8>(), Operand::write::<f32>()],
        values: 12,
    };

    #[test]
    fn values_are_kept_byte_by_byte() {
        let call = Call::new(&KERNEL, 3, 32).shared(65).values([1u32, 2, 3]);
        let bytes: &[u8] = bytemuck::cast_slice(&call.values);
        assert_eq!(call.values_len, 12);
        assert_eq!(bytes[..12], *bytemuck::bytes_of(&[1u32, 2, 3]));
        assert_eq!((call.blocks, call.threads, call.shared), (3, 32, 80));
        assert_eq!((Call::each(&KERNEL, 257).blocks, Call::each(&KERNEL, 0).blocks), (2, 0));
        assert_eq!(KERNEL.operands[0].access(), AccessKind::Read);
        assert_eq!(KERNEL.operands[1].dtype(), DType::F32);
    }
}
