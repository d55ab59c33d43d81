//! Cases of convolutions with the norm behind them, and that a block of images is as good as all.

use meristem_nn::kernels::conv::ConvShape;
use meristem_nn::kernels::norm::Activation;
use meristem_nn::ops::block::{Normed, Op};
use meristem_nn::ops::conv::Product;
use meristem_nn::ops::norm::BatchNorm;
use meristem_nn::ops::stage::Data as Gradient;
use meristem_nn::ops::{Backend, Target, conv, norm};
use meristem_nn::{Isa, ops};

use super::case::{Case, Data, Random, case};
use super::cases::packed_weights;

/// Batch, side, channels that are read and written, groups, whether it is pooled. Images that do
/// not fill the last block, more than one block, more than one part, windows that are cut off, one
/// filter for each channel.
const SHAPES: [([usize; 5], bool); 6] = [
    ([5, 6, 3, 8, 1], true),
    ([21, 32, 3, 9, 1], true),
    ([61, 32, 3, 9, 1], true),
    ([70, 4, 9, 17, 1], false),
    ([3, 7, 12, 12, 12], true),
    ([2, 9, 20, 33, 1], false),
];

fn normed([batch, side, in_c, out_c, groups]: [usize; 5], pool: bool) -> Normed {
    let [kernel, stride, padding] = [[3; 2], [1; 2], [1; 2]];
    let (in_h, in_w) = (side, side);
    let shape = ConvShape { batch, in_c, in_h, in_w, out_c, kernel, stride, padding, groups };
    let norm = BatchNorm { shape: shape.output(), eps: 1e-5, act: Activation::Relu, pool };
    Normed { product: Product::f32(shape), norm }
}

fn variances(c: usize) -> Data {
    let mut random = Random(99);
    Data::F32((0..c).map(|_| 0.5 + random.unit().abs()).collect())
}

fn images(len: usize) -> Data {
    let mut random = Random(98);
    Data::F32((0..len).map(|_| random.unit()).collect())
}

/// Codes of a forward pass of the norm over these raw images.
fn codes(norm: BatchNorm, raw: &Data) -> Data {
    let forward = case(norm::Op::Forward(norm), 1, 1.0).reading(0, raw.clone());
    forward.reading(2, variances(norm.shape.c)).run(Backend::Cpu(Isa::portable())).remove(1)
}

/// Forward: a sum over the window, which the norm makes at most 1.5 times as large. Backward: the
/// raw gradient is at most 8, of which the images' is a sum over a window and channels, that of the
/// weights one over pixels. See the cases of convolutions and norms.
pub(super) fn block_cases() -> Vec<Case> {
    let mut cases = vec![];
    for (shape, pool) in SHAPES {
        let of = normed(shape, pool);
        let (shape, norm) = (of.product.shape, of.norm);
        let window = 9 * shape.in_c / shape.groups;
        let weights = packed_weights(&shape, shape.weight_len());
        let forward = case(Op::Forward(of), window + 9, 3.0).reading(1, weights.clone());
        cases.push(forward.reading(4, variances(norm.shape.c)));
        let pixels = norm.shape.batch * norm.shape.pixels();
        let back = 9 * shape.out_c / shape.groups + 16;
        let raw = images(norm.shape.len());
        for data in [Gradient::Unwanted, Gradient::Overwrite, Gradient::Accumulate] {
            let gradient = case(Op::Gradient { of, data }, back, 8.0)
                .bound(1, pixels + 16, 8.0)
                .bound(2, pixels, 8.0)
                .bound(3, pixels, 8.0)
                .reading(1, weights.clone())
                .reading(2, raw.clone())
                .reading(4, variances(norm.shape.c));
            cases.push(match pool {
                true => gradient.reading(8, codes(norm, &raw)).reading(9, Data::F32(vec![])),
                false => gradient,
            });
        }
    }
    cases
}

/// Runs an operation over f32 operands; returns what it writes.
fn run(isa: Isa, op: impl Into<ops::Op>, reads: &[&Data], writes: &[Data]) -> Vec<Data> {
    let op = op.into();
    let scratch = op.signature(Target::Cpu).writes.last().map_or(0, |spec| spec.len);
    let mut writes: Vec<Data> = writes.to_vec();
    writes.push(Data::F32(vec![f32::NAN; scratch]));
    let operands = ops::Operands {
        reads: reads.iter().map(|data| data.slice()).collect(),
        writes: writes.iter_mut().map(Data::slice_mut).collect(),
    };
    ops::run(Backend::Cpu(isa), &op, operands).unwrap();
    writes.pop();
    writes
}

#[test]
fn blocks_have_the_bits_of_the_whole_batch() {
    for (isa, (shape, pool)) in
        Isa::available().into_iter().flat_map(|isa| SHAPES.map(|shape| (isa, shape)))
    {
        let of = normed(shape, pool);
        let (product, norm) = (of.product, of.norm);
        let (c, shape) = (norm.shape.c, product.shape);
        let (absent, zeros) = (Data::F32(vec![]), |n: usize| Data::F32(vec![0.0; n]));
        let x = images(shape.input().len());
        let w = packed_weights(&shape, shape.weight_len());
        let [mean, gamma, beta] = [1, 2, 3].map(|seed| {
            let mut random = Random(seed);
            Data::F32((0..c).map(|_| random.unit()).collect())
        });
        let var = variances(c);
        let z =
            run(isa, conv::Op::Forward(product), &[&x, &w, &absent], &[zeros(norm.shape.len())])
                .remove(0);
        let y = zeros(norm.output().len());
        let no_codes = Data::U8(vec![]);
        let apart = run(
            isa,
            norm::Op::Forward(norm),
            &[&z, &mean, &var, &gamma, &beta],
            &[y.clone(), no_codes],
        );
        let together =
            run(isa, Op::Forward(of), &[&x, &w, &absent, &mean, &var, &gamma, &beta], &[y]);
        assert_eq!(together[0], apart[0], "{isa}: {of:?}");
        if c == 8 {
            // AVX-512 adds up such weights' gradients in pairs of pixels, and those of a block at
            // its end.
            continue;
        }
        let codes = if pool { codes(norm, &z) } else { Data::U8(vec![]) };
        let dy = images(norm.output().len());
        let (dc, dw, dx) = (zeros(c), zeros(shape.weight_len()), zeros(shape.input().len()));
        let out = if pool { apart[0].clone() } else { Data::F32(vec![]) };
        let reads = [&z, &mean, &var, &gamma, &beta, &dy, &codes, &out];
        let gradient = norm::Op::Gradient { norm, accumulate: false };
        let norms = run(isa, gradient, &reads, &[zeros(norm.shape.len()), dc.clone(), dc.clone()]);
        let weights =
            run(isa, conv::Op::WeightGradient(product), &[&x, &norms[0]], &[dw.clone(), absent]);
        let data = conv::Op::DataGradient { product, accumulate: false };
        let data = run(isa, data, &[&norms[0], &w], std::slice::from_ref(&dx));
        let op = Op::Gradient { of, data: Gradient::Overwrite };
        let reads = [&[&x, &w][..], &reads].concat();
        let together = run(isa, op, &reads, &[dx, dw, dc.clone(), dc]);
        let apart = [&data[0], &weights[0], &norms[1], &norms[2]];
        assert!(together.iter().eq(apart), "{isa}: {of:?}");
    }
}
