//! CUDA kernels of the tests, declared.

use meristem_device::{Call, Kernel, KernelSource, Operand};

static KERNELS: KernelSource = KernelSource {
    name: "tests/all/cuda/kernels.cu",
    text: include_str!("../cuda/kernels.cu"),
    headers: &[],
};

const READ: Operand = Operand::read::<u32>();
const WRITE: Operand = Operand::write::<u32>();

const fn kernel(entry: &'static str, operands: &'static [Operand], values: usize) -> Kernel {
    Kernel { source: &KERNELS, entry, operands, values }
}

static SET: Kernel = kernel("set", &[WRITE], 4);
static MIX: [Kernel; 3] = [
    kernel("mix0", &[WRITE], 0),
    kernel("mix1", &[READ, WRITE], 0),
    kernel("mix2", &[READ, READ, WRITE], 0),
];

/// Threads of a block; a small number, so that small tensors need several blocks.
const BLOCK: u32 = 64;

fn blocks(len: usize) -> u32 {
    len.div_ceil(BLOCK as usize) as u32
}

/// Sets `len` elements to a value.
pub(crate) fn set(len: usize, value: u32) -> Call {
    Call::new(&SET, blocks(len), BLOCK).values(value)
}

/// `stress::mix` of `from` tensors into `len` elements.
pub(crate) fn mix(from: usize, len: usize) -> Call {
    Call::new(&MIX[from], blocks(len), BLOCK)
}

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    use bytemuck::{Pod, Zeroable};

    use super::*;

    pub(crate) static SUM_BLOCKS: Kernel = kernel("sum_blocks", &[READ, WRITE], 0);
    pub(crate) static TRAP: Kernel = kernel("trap", &[WRITE], 0);
    pub(crate) static MISSING: Kernel = kernel("missing", &[WRITE], 0);
    pub(crate) static LINE: Kernel =
        kernel("line", &[Operand::read::<f32>(), Operand::write::<f32>()], size_of::<Line>());

    /// Values of `line`.
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    pub(crate) struct Line {
        pub(crate) slope: f32,
        pub(crate) offset: f32,
        pub(crate) from: i64,
    }

    static WRONG: KernelSource = KernelSource {
        name: "tests/wrong.cu",
        text: "extern \"C\" __global__ void wrong(int x { }",
        headers: &[],
    };
    /// A kernel that does not compile.
    pub(crate) static WRONG_KERNEL: Kernel =
        Kernel { source: &WRONG, entry: "wrong", operands: &[WRITE], values: 0 };
}
