//! A convolution in both memory formats, on the same data (F4): a check of the NHWC kernels that
//! networks use, and what `meristem bench format` measures.

mod nchw;

use std::fmt;

use meristem_device::random::{Purpose, Rng};

use self::nchw::NchwConv;
use crate::graph::ParamKind;
use crate::kernels::conv::{
    ConvInputs, ConvShape, ParamGrads, backward_data, backward_weight, forward,
};
use crate::kernels::{GradOut, Isa};
use crate::layout::Packing;

/// A pass of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The output.
    Forward,
    /// The gradient of the input.
    DataGradient,
    /// The gradient of the weights.
    WeightGradient,
}

impl Pass {
    /// All, in the order of a training step.
    pub const ALL: [Self; 3] = [Self::Forward, Self::DataGradient, Self::WeightGradient];
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "output",
            Self::DataGradient => "data gradient",
            Self::WeightGradient => "weight gradient",
        })
    }
}

/// The element of a pass's result at which the formats differ most, in units of the rounding error
/// allowed there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agreement {
    /// Its pass.
    pub pass: Pass,
    /// The element in NHWC.
    pub nhwc: f32,
    /// The same in NCHW.
    pub nchw: f32,
    /// How far they may be apart.
    pub tolerance: f64,
}

impl Agreement {
    /// Distance between the two figures.
    pub fn difference(&self) -> f64 {
        (f64::from(self.nhwc) - f64::from(self.nchw)).abs()
    }

    /// Whether the formats agree; they do not where one is not a number.
    pub fn holds(&self) -> bool {
        self.difference() <= self.tolerance
    }

    /// The difference in units of the tolerance.
    fn share(&self) -> f64 {
        if self.difference() == 0.0 { 0.0 } else { self.difference() / self.tolerance }
    }
}

/// Inputs and results of the passes of a convolution, in one format.
#[derive(Clone, Debug)]
struct Values {
    x: Vec<f32>,
    w: Vec<f32>,
    dy: Vec<f32>,
    y: Vec<f32>,
    dx: Vec<f32>,
    dw: Vec<f32>,
}

impl Values {
    fn new(x: Vec<f32>, w: Vec<f32>, dy: Vec<f32>) -> Self {
        let (y, dx, dw) = (vec![0.0; dy.len()], vec![0.0; x.len()], vec![0.0; w.len()]);
        Self { x, w, dy, y, dx, dw }
    }
}

/// A convolution in both formats.
///
/// ```
/// use meristem_nn::Isa;
/// use meristem_nn::formats::ConvFormats;
/// use meristem_nn::kernels::conv::ConvShape;
///
/// let (channels, size, one) = (3, 8, [1, 1]);
/// let shape = ConvShape {
///     batch: 2,
///     in_c: channels,
///     in_h: size,
///     in_w: size,
///     out_c: 5,
///     kernel: [3, 3],
///     stride: one,
///     padding: one,
///     groups: 1,
/// };
/// let mut formats = ConvFormats::new(Isa::detect(), shape, |rng| 2.0 * rng.uniform() - 1.0);
/// assert!(formats.agreement().iter().all(|pass| pass.holds()));
/// ```
#[derive(Clone, Debug)]
pub struct ConvFormats {
    isa: Isa,
    shape: ConvShape,
    packing: Packing,
    nhwc: Values,
    nchw: Values,
    scratch: Vec<f32>,
    peer: NchwConv,
}

impl ConvFormats {
    /// A convolution whose input, weights and output gradient are drawn by `value`. Panics if the
    /// kernel does not fit its padded input, or the groups do not divide the channels.
    pub fn new(isa: Isa, shape: ConvShape, value: impl Fn(&mut Rng) -> f32) -> Self {
        let peer = NchwConv::new(isa, shape);
        let mut rng = Rng::new(0, Purpose::Test, 0, 0);
        let mut draw = |len: usize| (0..len).map(|_| value(&mut rng)).collect::<Vec<_>>();
        let (inputs, outputs) = (shape.input(), shape.output());
        let x = draw(inputs.len());
        let w = draw(peer.weight_len());
        let dy = draw(outputs.len());
        let [kh, kw] = shape.kernel;
        let weights = [shape.out_c, shape.in_c / shape.groups, kh, kw];
        let packing = Packing::new(ParamKind::ConvWeight { groups: shape.groups }, &weights);
        let mut packed = vec![0.0; packing.len()];
        packing.pack(&w, &mut packed);
        let x_nhwc = transposed(&x, inputs.c, inputs.pixels());
        let dy_nhwc = transposed(&dy, outputs.c, outputs.pixels());
        Self {
            isa,
            shape,
            packing,
            nhwc: Values::new(x_nhwc, packed, dy_nhwc),
            nchw: Values::new(x, w, dy),
            scratch: vec![0.0; shape.scratch_len()],
            peer,
        }
    }

    /// All passes in NHWC: what a training step calls.
    pub fn run_nhwc(&mut self) {
        let Self { isa, ref shape, ref mut scratch, .. } = *self;
        let Values { x, w, dy, y, dx, dw } = &mut self.nhwc;
        forward(isa, shape, &ConvInputs { x, w, bias: &[] }, y, scratch);
        backward_data(isa, shape, dy, w, GradOut::overwrite(dx), scratch);
        dw.fill(0.0);
        backward_weight(isa, shape, x, dy, ParamGrads { dw, db: &mut [] }, scratch);
    }

    /// All passes in NCHW.
    pub fn run_nchw(&mut self) {
        run(&mut self.peer, &mut self.nchw);
    }

    /// Runs both, and says per pass where they are furthest apart.
    ///
    /// # Tolerance
    /// A result is a sum of products. If none of them takes part in more than h roundings, the sum
    /// is within γ(h) · S of the exact one, where γ(h) = h · u / (1 - h · u), u = 2⁻²⁴ and S is the
    /// sum of the products' magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 3.1
    /// and 4.2). So two such sums are at most 2 · γ(h) · S apart. S is computed likewise, from
    /// magnitudes, and is at most a share of γ(h) too small. Output and data gradient: h is the
    /// number of products. Weight gradient: a block of images is summed in a row, then the blocks.
    pub fn agreement(&mut self) -> [Agreement; 3] {
        self.run_nhwc();
        self.run_nchw();
        let magnitudes = |values: &[f32]| values.iter().map(|v| v.abs()).collect::<Vec<_>>();
        let Values { x, w, dy, .. } = &self.nchw;
        let mut sums = Values::new(magnitudes(x), magnitudes(w), magnitudes(dy));
        run(&mut self.peer, &mut sums);
        let shape = &self.shape;
        let (taps, pixels) = (shape.kernel[0] * shape.kernel[1], shape.output().pixels());
        let y = transposed(&self.nhwc.y, pixels, shape.out_c);
        let dx = transposed(&self.nhwc.dx, shape.input().pixels(), shape.in_c);
        let mut dw = vec![0.0; self.nchw.dw.len()];
        self.packing.unpack(&self.nhwc.dw, &mut dw);
        let (of_output, of_data) =
            (taps * shape.in_c / shape.groups, taps * shape.out_c / shape.groups);
        let of_weights = shape.block() * pixels + shape.batch;
        [
            furthest(Pass::Forward, of_output, [&y, &self.nchw.y, &sums.y]),
            furthest(Pass::DataGradient, of_data, [&dx, &self.nchw.dx, &sums.dx]),
            furthest(Pass::WeightGradient, of_weights, [&dw, &self.nchw.dw, &sums.dw]),
        ]
    }
}

/// All passes in NCHW.
fn run(peer: &mut NchwConv, Values { x, w, dy, y, dx, dw }: &mut Values) {
    peer.forward(x, w, y);
    peer.backward_data(dy, w, dx);
    dw.fill(0.0);
    peer.backward_weight(x, dy, dw);
}

/// The element that is furthest off, given both results and the sums of magnitudes.
fn furthest(pass: Pass, roundings: usize, [nhwc, nchw, sums]: [&[f32]; 3]) -> Agreement {
    let hu = roundings as f64 * 2f64.powi(-24);
    let gamma = hu / (1.0 - hu);
    let at = |((&nhwc, &nchw), &sum): ((&f32, &f32), &f32)| {
        let tolerance = 2.0 * gamma / (1.0 - gamma) * f64::from(sum);
        Agreement { pass, nhwc, nchw, tolerance }
    };
    let none = Agreement { pass, nhwc: 0.0, nchw: 0.0, tolerance: 0.0 };
    let all = nhwc.iter().zip(nchw).zip(sums).map(at);
    all.max_by(|a, b| a.share().total_cmp(&b.share())).unwrap_or(none)
}

/// `[N][rows][cols]` to `[N][cols][rows]`: pixels and channels swapped.
fn transposed(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let mut to = Vec::with_capacity(values.len());
    for image in values.chunks_exact((rows * cols).max(1)) {
        to.extend((0..cols).flat_map(|col| image[col..].iter().step_by(cols)));
    }
    to
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Shapes of hosts and modules, and odd ones: sizes of less than a vector, several blocks of
    /// images, windows that reach beyond the image, strides that leave pixels out.
    fn shapes() -> impl Strategy<Value = ConvShape> {
        let kernel = || (1usize..5).prop_flat_map(|k| (Just(k), 1usize..4, 0..k));
        let channels = prop_oneof![
            (1usize..3, 1usize..10, 1usize..20).prop_map(|(g, i, o)| (g, g * i, g * o)),
            (2usize..20).prop_map(|c| (c, c, c)),
        ];
        (1usize..5, channels, [4usize..14, 4usize..14], [kernel(), kernel()]).prop_map(
            |(batch, (groups, in_c, out_c), [in_h, in_w], [(kh, sh, ph), (kw, sw, pw)])| {
                ConvShape {
                    batch,
                    in_c,
                    in_h,
                    in_w,
                    out_c,
                    kernel: [kh, kw],
                    stride: [sh, sw],
                    padding: [ph, pw],
                    groups,
                }
            },
        )
    }

    proptest! {
        /// F4: every pass, for every instruction set of this machine.
        #[test]
        fn both_formats_agree(shape in shapes()) {
            for isa in Isa::available() {
                let mut formats = ConvFormats::new(isa, shape, |rng| 2.0 * rng.uniform() - 1.0);
                for pass in formats.agreement() {
                    prop_assert!(pass.holds(), "{isa}: {pass:?}");
                    // Small beside a product, so that a lost one shows.
                    prop_assert!(pass.tolerance < 0.05, "{pass:?}");
                }
            }
        }

        /// Sums of small whole numbers are exact below 2²⁴, so that not one product may be missing.
        #[test]
        fn whole_numbers_are_the_same(shape in shapes()) {
            for isa in Isa::available() {
                let mut formats = ConvFormats::new(isa, shape, |rng| rng.below(7) as f32 - 3.0);
                for pass in formats.agreement() {
                    prop_assert_eq!(pass.difference(), 0.0, "{}: {:?}", isa, pass);
                }
            }
        }
    }

    #[test]
    fn what_is_not_a_number_does_not_agree() {
        let of = |nhwc, nchw| {
            furthest(Pass::Forward, 9, [&[1.0, nhwc, 1.0], &[1.0, nchw, 1.0], &[2.0, 2.0, 0.0]])
        };
        assert!(of(1.0, 1.0).holds() && of(1.0, 1.0 + f32::EPSILON).holds());
        assert!(!of(f32::NAN, 1.0).holds() && !of(1.0, f32::NAN).holds());
        // 2 · 9 · 2⁻²⁴ · 2, rounded up a little.
        assert!(!of(1.0, 1.0 + 20.0 * f32::EPSILON).holds());
        assert_eq!(of(1.0, 1.5).nchw, 1.5);
    }
}
