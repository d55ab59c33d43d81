//! Factors and matrix products of tensor cores, on a GPU or on the stand-in driver.

use crate::common::cuda;
use meristem_device::{
    Call, DType, Kernel, KernelHeader, KernelSource, Operand, Owner, Stream, Tensor,
};

static HEADERS: [KernelHeader; 2] = [
    KernelHeader { name: c"mma.cuh", text: include_str!("../../src/ops/gpu/mma.cuh") },
    KernelHeader { name: c"nn.cuh", text: include_str!("../../src/ops/gpu/nn.cuh") },
];
static SOURCE: KernelSource = KernelSource {
    name: "crates/nn/tests/all/cuda_mma.cu",
    text: include_str!("cuda_mma.cu"),
    headers: &HEADERS,
};

const READ: Operand = Operand::read::<f32>();
const WRITE: Operand = Operand::write::<f32>();

static TF32: Kernel = product("product_tf32");
static BF16: Kernel = product("product_bf16");
static ROUNDED: Kernel = Kernel {
    source: &SOURCE,
    entry: "rounded",
    operands: &[READ, WRITE, WRITE, Operand::write::<u32>()],
    values: 0,
};

const fn product(entry: &'static str) -> Kernel {
    Kernel { source: &SOURCE, entry, operands: &[READ, READ, WRITE], values: 0 }
}

fn empty(stream: &Stream, len: usize, dtype: DType) -> Tensor {
    Tensor::empty(stream, [len], dtype, Owner::Other).unwrap()
}

fn floats(stream: &Stream, values: &[f32]) -> Tensor {
    Tensor::from_slice(stream, values, [values.len()], Owner::Other).unwrap()
}

/// Whole numbers of up to 8 bits are exact factors, and their sums are exact in any order. All
/// elements of a matrix differ, so that a misplaced element changes the result.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn fragments_lie_as_the_instructions_have_them() {
    let stream = cuda().stream("mma");
    for (kernel, depth) in [(&TF32, 8), (&BF16, 16)] {
        let a: Vec<f32> = (0..16 * depth).map(|i| ((i * 37 + 5) % 256) as f32).collect();
        let b: Vec<f32> = (0..depth * 8).map(|i| ((i * 91 + 3) % 256) as f32).collect();
        let (x, y, d) = (floats(&stream, &a), floats(&stream, &b), empty(&stream, 128, DType::F32));
        let launch = stream.launch("product").read(&x).read(&y).write(&d);
        launch.gpu(|| Call::new(kernel, 1, 32)).run(|_| unreachable!("no CPU kernel")).unwrap();
        let of = |row: usize, column: usize| {
            (0..depth).map(|k| a[row * depth + k] * b[k * 8 + column]).sum::<f32>()
        };
        let got = d.to_vec::<f32>().unwrap();
        for (at, got) in got.into_iter().enumerate() {
            let (row, column) = (at / 8, at % 8);
            assert_eq!(got, of(row, column), "{}: row {row}, column {column}", kernel.entry);
        }
    }
}

/// Bits of values, and of the same values as factors in TF32 and in bf16.
const ROUNDING: [[u32; 3]; 25] = [
    [0x0000_0000, 0x0000_0000, 0x0000_0000],
    [0x8000_0000, 0x8000_0000, 0x8000_0000],
    [0x3f80_0000, 0x3f80_0000, 0x3f80_0000],
    // Half of the last place of TF32: away from zero, whichever neighbour is even.
    [0x3f80_1000, 0x3f80_2000, 0x3f80_0000],
    [0x3f80_3000, 0x3f80_4000, 0x3f80_0000],
    [0xbf80_1000, 0xbf80_2000, 0xbf80_0000],
    // Just below it and just above.
    [0x3f80_0fff, 0x3f80_0000, 0x3f80_0000],
    [0x3f80_1001, 0x3f80_2000, 0x3f80_0000],
    // Half of the last place of bf16: to the even neighbour.
    [0x3f80_8000, 0x3f80_8000, 0x3f80_0000],
    [0x3f81_8000, 0x3f81_8000, 0x3f82_0000],
    [0xbf81_8000, 0xbf81_8000, 0xbf82_0000],
    [0x3f80_7fff, 0x3f80_8000, 0x3f80_0000],
    [0x3f80_8001, 0x3f80_8000, 0x3f81_0000],
    // A carry into the exponent.
    [0x3fff_f000, 0x4000_0000, 0x4000_0000],
    [0x3fff_8000, 0x3fff_8000, 0x4000_0000],
    // Subnormal numbers, and one that becomes normal.
    [0x0000_0001, 0x0000_0000, 0x0000_0000],
    [0x0000_1000, 0x0000_2000, 0x0000_0000],
    [0x8000_8000, 0x8000_8000, 0x8000_0000],
    [0x0000_8001, 0x0000_8000, 0x0001_0000],
    [0x007f_ffff, 0x0080_0000, 0x0080_0000],
    // The largest numbers become infinite, infinity stays.
    [0x7f7f_ffff, 0x7f80_0000, 0x7f80_0000],
    [0x7f7f_6fff, 0x7f7f_6000, 0x7f7f_0000],
    [0x7f80_0000, 0x7f80_0000, 0x7f80_0000],
    [0xff80_0000, 0xff80_0000, 0xff80_0000],
    [0x3eaa_aaab, 0x3eaa_a000, 0x3eab_0000],
];

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn factors_are_rounded_to_the_nearest() {
    let stream = cuda().stream("rounding");
    // The NaN of x86, of the other sign, of a GPU; one that TF32 cuts to infinity.
    let nan = [0x7fc0_0000, 0xffc0_0000, 0x7fff_ffff, 0x7f80_1fff];
    let of = ROUNDING.iter().map(|[bits, ..]| *bits).chain(nan);
    let x: Vec<f32> = of.map(f32::from_bits).collect();
    let [tf32, bf16] = [DType::F32; 2].map(|dtype| empty(&stream, x.len(), dtype));
    let words = empty(&stream, x.len(), DType::U32);
    let from = floats(&stream, &x);
    let launch = stream.launch("rounded").read(&from).write(&tf32).write(&bf16).write(&words);
    launch.gpu(|| Call::each(&ROUNDED, x.len())).run(|_| unreachable!("no CPU kernel")).unwrap();
    let bits = |of: &Tensor| -> Vec<u32> {
        of.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    let (tf32, bf16) = (bits(&tf32), bits(&bf16));
    for (i, [bits, to_tf32, to_bf16]) in ROUNDING.into_iter().enumerate() {
        assert_eq!(tf32[i], to_tf32, "{bits:#x} to TF32, got {:#x}", tf32[i]);
        assert_eq!(bf16[i], to_bf16, "{bits:#x} to bf16, got {:#x}", bf16[i]);
    }
    let cut = [0x7fc0_0000, 0xffc0_0000, 0x7fff_e000, 0x7f80_0000];
    assert_eq!(tf32[ROUNDING.len()..], cut, "NaN to TF32: {tf32:#x?}");
    assert_eq!(bf16[ROUNDING.len()..], [0x7fff_0000; 4], "NaN to bf16: {bf16:#x?}");
    let words = words.to_vec::<u32>().unwrap();
    for (i, word) in words.into_iter().enumerate() {
        let halves = bf16[x.len() - 1 - i] & 0xffff_0000 | bf16[i] >> 16;
        assert_eq!(word, halves, "element {i} in the low half: {word:#x}, {halves:#x}");
    }
}
