//! Features that lower the loss most in addition to the best change of the layer that reads them,
//! from Verbockhaven, Rudkiewicz, Chevallier, Charpiat, "Growing Tiny Networks: Spotting
//! Expressivity Bottlenecks and Fixing Them Optimally", 2024 (arXiv 2405.19816).
//!
//! ```text
//! h    input of the feature's layer, with a 1 for the bias
//! b    input of the layer that reads the features, with a 1 if it has a bias
//! v    desired change of the outputs of that layer, −∂loss/∂outputs of each sample
//!
//! v'   = v − E[v bᵀ] E[b bᵀ]⁻¹ b       part that no change of that layer's weights gives
//! S    = E[h hᵀ],  N = E[h v'ᵀ]
//! S^-½ N = Σ λ_j u_j w_jᵀ              singular values, largest first
//! feature j: incoming √λ_j S^-½ u_j, outgoing √λ_j w_j
//! ```
//!
//! In convolutions b and v are of a position of the reader's output, h of a position of the
//! layer's, and E is the mean over samples of the sums over positions of the reader's output. N has
//! a column for each output and element of the reader's kernel, with the h that this element meets;
//! S is the mean over the elements of the kernel that are not in the padding. The paper has their
//! sum, which makes features shorter. Products of the h of different elements are left out, as in
//! the paper. S, `E[b bᵀ]` and `E[b hᵀ]` are estimated from some positions of each sample
//! ([`Convolution::positions`]).
//!
//! The formula is for features without an activation function; E[δ hᵀ] is measured through the
//! function, and divided by its derivative at 0. With both incoming and outgoing weights negated a
//! feature is the same without the function, but not with relu; here the outgoing weight with the
//! largest absolute value is positive. The lengths of the formula's incoming and outgoing weights
//! of a feature may differ by orders of magnitude; here both have the same length, with the same
//! product. A line search of the loss then gives all features together one amplitude.
//!
//! # How much they are worth
//! A small step in the direction of v lowers the loss at first order, per unit of its size, by
//! ```text
//! η  = tr(E[v bᵀ] E[b bᵀ]⁻¹ E[b vᵀ])     with the best change of the reader's weights
//! Δη = Σ_{j ≤ k} λ_j²                    further, with the best k features
//! ```
//! η is gᵀF⁻¹g, the natural expansion score of Mitchell, Menzenbach, Kersting, Mundt, "Self
//! Expanding Neural Networks", 2023 (arXiv 2307.04526), for the weights of the reader, with the
//! Fisher matrix F = E[b bᵀ] ⊗ I. All inverses leave out directions of hardly any variance. In
//! convolutions Δη is with the paper's S, the sum over the elements of the kernel: exact if all
//! elements read the same h, and too small if the h of different elements are independent.

use nalgebra::{DMatrix, SymmetricEigen};

use super::gradmax::{ITERATIONS_MAX, decomposed, largest_squares, rank};
use super::patches::{Convolution, Position};

/// Factors of `incoming · outgoing` that the line search tries for two linear layers, beside 0.
const AMPLITUDES: [f64; 8] = [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0];

/// The same for images. A desired change of an output is divided by the number of positions where a
/// mean over them follows, so that the best factor may be large.
const IMAGE_AMPLITUDES: [f64; 9] = [0.0625, 0.25, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0];

/// Eigenvalues of `E[h hᵀ]` and `E[b bᵀ]` below this part of the largest one count as 0: in such
/// directions there is hardly an activation, and weights would be huge.
const VARIANCE: f64 = 1e-4;

/// Maximum number of rows of a matrix of activations, to limit memory.
const ROWS: usize = 2048;

/// A layer, and the layer that reads it.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    pub(super) layer: Convolution,
    /// Its input is the output of the layer. For a linear layer that reads a flattened image the
    /// kernel is the image.
    pub(super) reader: Convolution,
    pub(super) reader_has_bias: bool,
    /// Whether the outgoing weights of a feature are `[elements of the kernel][outputs]`, not
    /// `[outputs][elements of the kernel]`.
    pub(super) is_flattened: bool,
}

/// Sums over samples of products of activations, see the formulas above.
#[derive(Clone, Debug)]
pub(super) struct Activations {
    pair: Pair,
    hh: DMatrix<f64>,
    bb: DMatrix<f64>,
    /// For each element of the reader's kernel.
    bh: Vec<DMatrix<f64>>,
    samples: usize,
    /// Number of elements of the kernel, over all measured positions, that are not in the padding,
    /// and of these positions.
    read: usize,
    positions: usize,
}

impl Activations {
    /// Sums over no samples yet.
    pub(super) fn new(pair: Pair) -> Self {
        let h = pair.layer.patch_len() + 1;
        let b = pair.reader.patch_len() + usize::from(pair.reader_has_bias);
        let bh = vec![DMatrix::zeros(b, h); pair.reader.taps()];
        let (hh, bb) = (DMatrix::zeros(h, h), DMatrix::zeros(b, b));
        Self { pair, hh, bb, bh, samples: 0, read: 0, positions: 0 }
    }

    /// Adds samples: inputs of the layer, and inputs of its reader, `[samples][channels][rows]
    /// [columns]` both.
    pub(super) fn add(&mut self, layer_inputs: &[f32], reader_inputs: &[f32]) {
        let Pair { layer, reader, reader_has_bias, .. } = &self.pair;
        let samples = layer_inputs.len() / layer.input.numel().max(1);
        let measured = reader.measured(samples, self.bb.nrows());
        let scale = (reader.output[0] * reader.output[1]) as f64 / measured.max(1) as f64;
        let of_sample = |sample| {
            let positions = reader.positions(self.samples + sample, measured).into_iter();
            positions.map(move |position| (sample, Some(position)))
        };
        let rows: Vec<(usize, Option<Position>)> = (0..samples).flat_map(of_sample).collect();
        for rows in rows.chunks(ROWS.max(samples)) {
            let b = reader.patches(reader_inputs, rows, *reader_has_bias).transpose();
            self.bb += &b * b.transpose() * scale;
            self.positions += rows.len();
            for (tap, sum) in self.bh.iter_mut().enumerate() {
                let met = |(sample, at): &(usize, Option<Position>)| {
                    (*sample, at.and_then(|at| reader.read(at, tap)))
                };
                let rows: Vec<_> = rows.iter().map(met).collect();
                self.read += rows.iter().filter(|(_, at)| at.is_some()).count();
                let h = layer.patches(layer_inputs, &rows, true);
                self.hh += h.transpose() * &h * scale;
                *sum += &b * h * scale;
            }
        }
        self.samples += samples;
    }

    /// Mean number of elements of the reader's kernel that are not in the padding.
    fn taps(&self) -> f64 {
        self.read as f64 / self.positions.max(1) as f64
    }

    /// Amplitudes that the line search tries, beside 0.
    pub(super) fn amplitudes(&self) -> &'static [f64] {
        let reader = &self.pair.reader;
        let is_linear = reader.taps() == 1 && reader.output == [1, 1];
        if is_linear { &AMPLITUDES } else { &IMAGE_AMPLITUDES }
    }
}

/// Features with amplitude 1.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Features {
    /// Incoming weights and bias of each feature, in columns.
    pub(super) incoming: DMatrix<f64>,
    /// Outgoing weights of each feature, in columns.
    pub(super) outgoing: DMatrix<f64>,
}

/// The `count` best features; those beyond the rank are 0. `m` is `E[δ hᵀ]`, `reader` the gradient
/// of the reading layer's weights and bias `E[δ bᵀ]`, with δ = −v. `None` if a sum is not finite,
/// or a decomposition does not converge.
pub(super) fn features(
    seen: &Activations,
    m: &DMatrix<f64>,
    reader: &DMatrix<f64>,
    count: usize,
) -> Option<Features> {
    let Missing { root, part, .. } = Missing::new(seen, m, reader)?;
    let found = decomposed(part)?;
    let (mut incoming, mut outgoing) =
        (DMatrix::zeros(m.ncols(), count), DMatrix::zeros(m.nrows(), count));
    if let (Some(u), Some(wt)) = (&found.u, &found.v_t) {
        for (j, value) in found.singular_values.iter().take(count.min(rank(&found))).enumerate() {
            let weights = wt.row(j).transpose();
            let sign = 1f64.copysign(weights[weights.iamax()]);
            let inputs = &root * u.column(j);
            // The outgoing vector has length 1 so far.
            let length = inputs.norm();
            outgoing.set_column(j, &(weights * (sign * (value * length).sqrt())));
            incoming.set_column(j, &(inputs * (sign * (value / length).sqrt())));
        }
    }
    Some(Features { incoming, outgoing })
}

/// η of the reader's weights, and Δη of `count` features; the arguments and `None` as in
/// [`features`].
pub(super) fn expansion(
    seen: &Activations,
    m: &DMatrix<f64>,
    reader: &DMatrix<f64>,
    count: usize,
) -> Option<[f64; 2]> {
    let Missing { part, now, .. } = Missing::new(seen, m, reader)?;
    Some([now, largest_squares(part, count)? / seen.taps()])
}

/// The part of the desired change that no change of the reader's weights gives.
struct Missing {
    /// S^-½.
    root: DMatrix<f64>,
    /// S^-½ N.
    part: DMatrix<f64>,
    /// η of the reader's weights.
    now: f64,
}

impl Missing {
    /// `m` has a row for each outgoing weight, `reader` one for each output.
    fn new(seen: &Activations, m: &DMatrix<f64>, reader: &DMatrix<f64>) -> Option<Self> {
        let n = 1.0 / seen.samples.max(1) as f64;
        let inverse = power(&seen.bb * n, -1.0)?;
        let change = reader * inverse;
        let (outputs, elements) = (reader.nrows(), seen.bh.len());
        let mut missing = -m;
        for (tap, bh) in seen.bh.iter().enumerate() {
            let explained = &change * (bh * n);
            for (output, explained) in explained.row_iter().enumerate() {
                let flat = seen.pair.is_flattened;
                let at = if flat { tap * outputs + output } else { output * elements + tap };
                let mut row = missing.row_mut(at);
                row += explained;
            }
        }
        let root = power(&seen.hh * (n / seen.taps()), -0.5)?;
        let part = &root * missing.transpose();
        let now = change.component_mul(reader).sum();
        Some(Self { root, part, now })
    }
}

/// A power of a symmetric matrix that has no negative eigenvalues; eigenvalues that count as 0 stay
/// 0. `None` if an element is not finite, or the decomposition does not converge.
fn power(matrix: DMatrix<f64>, exponent: f64) -> Option<DMatrix<f64>> {
    if !matrix.iter().all(|x| x.is_finite()) {
        return None;
    }
    let found = SymmetricEigen::try_new(matrix, f64::EPSILON, ITERATIONS_MAX)?;
    let SymmetricEigen { eigenvectors, eigenvalues } = found;
    let least = VARIANCE * eigenvalues.max();
    let raised = eigenvalues.map(|x| if x > least { x.powf(exponent) } else { 0.0 });
    Some(&eigenvectors * DMatrix::from_diagonal(&raised) * eigenvectors.transpose())
}

#[cfg(test)]
mod tests {
    use meristem_device::random::{Purpose, Rng};

    use super::*;
    use crate::dims::Dims;
    use crate::graph::ConvGeometry;

    /// Sums for two linear layers with biases.
    fn linear(inputs: usize, read: usize) -> Activations {
        let of = |c| {
            let (input, geometry) = (Dims { c, h: 1, w: 1 }, ConvGeometry::same(1));
            Convolution { input, geometry, output: [1, 1] }
        };
        let (layer, reader) = (of(inputs), of(read));
        Activations::new(Pair { layer, reader, reader_has_bias: true, is_flattened: false })
    }

    /// In a linear problem the formula has a meaning that can be checked: outputs `V b`, a wish v
    /// for each sample. As feature j has the factor λ_j, the first k features are the best
    /// approximation of v' of rank k by linear functions of h. For full rank that is the
    /// regression of v' on h, whose residual is orthogonal to h.
    #[test]
    fn features_of_full_rank_are_the_regression_of_what_is_missing() {
        let (samples, inputs, read, outputs) = (200, 4, 3, 2);
        let mut random = Rng::new(7, Purpose::Init, 0, 0);
        let mut draw = |len| (0..len).map(|_| random.uniform() - 0.5).collect::<Vec<f32>>();
        let (h, b, v) = (draw(samples * inputs), draw(samples * read), draw(samples * outputs));
        let mut seen = linear(inputs, read);
        seen.add(&h, &b);
        let row = |values: &[f32], width: usize, i: usize| -> Vec<f64> {
            let of_sample = values[i * width..(i + 1) * width].iter().map(|x| f64::from(*x));
            of_sample.chain([1.0]).collect()
        };
        let product = |width: usize, values: &[f32]| {
            DMatrix::from_fn(outputs, width + 1, |o, j| {
                let of_sample = |i| -f64::from(v[i * outputs + o]) * row(values, width, i)[j];
                (0..samples).map(of_sample).sum::<f64>() / samples as f64
            })
        };
        let (m, reader) = (product(inputs, &h), product(read, &b));
        let found = features(&seen, &m, &reader, outputs).unwrap();
        // v' by least squares on b, sample by sample.
        let best = -&reader * power(&seen.bb / samples as f64, -1.0).unwrap();
        let wish = |i: usize, o: usize| {
            let b = row(&b, read, i);
            f64::from(v[i * outputs + o]) - (0..=read).map(|j| best[(o, j)] * b[j]).sum::<f64>()
        };
        let added = |i: usize, o: usize| {
            let h = row(&h, inputs, i);
            let feature =
                |k: usize| (0..=inputs).map(|j| found.incoming[(j, k)] * h[j]).sum::<f64>();
            (0..outputs).map(|k| found.outgoing[(o, k)] * feature(k)).sum::<f64>()
        };
        for (o, j) in (0..outputs).flat_map(|o| (0..=inputs).map(move |j| (o, j))) {
            let rest = |i| (wish(i, o) - added(i, o)) * row(&h, inputs, i)[j];
            let along = (0..samples).map(rest).sum::<f64>() / samples as f64;
            // f64 sums of 200 numbers of size 1.
            assert!(along.abs() < 1e-12, "output {o}, input {j}: {along}");
        }
    }

    /// In a linear problem η is the part of E‖v‖² that the regression of v on b explains, and Δη of
    /// all features the part that the regression of the rest on h explains.
    #[test]
    fn scores_are_what_regressions_explain() {
        let (samples, inputs, read, outputs) = (300, 3, 4, 2);
        let mut random = Rng::new(8, Purpose::Init, 0, 0);
        let mut draw = |columns: usize| {
            DMatrix::from_fn(samples, columns, |_, _| f64::from(random.uniform() - 0.5))
        };
        let with_one = |of: DMatrix<f64>| of.clone().insert_column(of.ncols(), 1.0);
        let (h, b, v) = (with_one(draw(inputs)), with_one(draw(read)), draw(outputs));
        let rows = |of: &DMatrix<f64>, columns: usize| -> Vec<f32> {
            of.columns(0, columns).transpose().iter().map(|x| *x as f32).collect()
        };
        let mut seen = linear(inputs, read);
        seen.add(&rows(&h, inputs), &rows(&b, read));
        let mean = |of: &DMatrix<f64>| v.transpose() * of / -(samples as f64);
        let explained = |of: &DMatrix<f64>, by: &DMatrix<f64>| {
            let solved = (by.transpose() * by).try_inverse().unwrap() * by.transpose() * of;
            let fitted = by * solved;
            (fitted.norm_squared() / samples as f64, of - fitted)
        };
        let (by_reader, rest) = explained(&v, &b);
        let (by_features, _) = explained(&rest, &h);
        let found = expansion(&seen, &mean(&h), &mean(&b), outputs).unwrap();
        // f64 sums of 300 products, and inverses of matrices whose condition is below 100.
        assert!((found[0] - by_reader).abs() < 1e-10 * by_reader, "{found:?} {by_reader}");
        assert!((found[1] - by_features).abs() < 1e-10 * by_features, "{found:?} {by_features}");
        let one = expansion(&seen, &mean(&h), &mean(&b), 1).unwrap()[1];
        assert!(one > 0.0 && one < found[1], "one feature gives a part: {one}");
    }

    /// A convolution of an image of one pixel is a linear layer, by the centre of its kernel.
    #[test]
    fn a_kernel_of_which_one_element_reads_is_a_linear_layer() {
        let (samples, inputs, read, outputs) = (60, 3, 4, 2);
        let mut random = Rng::new(9, Purpose::Init, 0, 0);
        let mut draw = |len| (0..len).map(|_| random.uniform() - 0.5).collect::<Vec<f32>>();
        let (h, b) = (draw(samples * inputs), draw(samples * read));
        let mut matrix = |rows, columns| {
            let values = draw(rows * columns);
            DMatrix::from_fn(rows, columns, |i, j| f64::from(values[i * columns + j]))
        };
        let (m, reader) = (matrix(outputs, inputs + 1), matrix(outputs, read + 1));
        let mut linear = linear(inputs, read);
        let mut pair = linear.pair.clone();
        pair.reader.geometry = ConvGeometry::same(3);
        let mut kernel = Activations::new(pair);
        linear.add(&h, &b);
        kernel.add(&h, &b);
        // Element 4 of 9 is the centre. The bias of the reader stays the last column.
        let at_centre = |of: &DMatrix<f64>, rows: usize, columns: usize, element: [usize; 2]| {
            let mut wide = DMatrix::zeros(of.nrows() * rows, columns);
            for ((i, j), value) in
                of.iter().enumerate().map(|(at, x)| ((at % of.nrows(), at / of.nrows()), *x))
            {
                let column =
                    if j + 1 == of.ncols() { columns - 1 } else { j * element[1] + element[0] };
                wide[(i * rows + if rows > 1 { 4 } else { 0 }, column)] = value;
            }
            wide
        };
        let wide_m = at_centre(&m, 9, inputs + 1, [0, 1]);
        let wide_reader = at_centre(&reader, 1, 9 * read + 1, [4, 9]);
        let found = features(&kernel, &wide_m, &wide_reader, 2).unwrap();
        let expected = features(&linear, &m, &reader, 2).unwrap();
        assert!((&found.incoming - &expected.incoming).norm() < 1e-9, "{found:?} {expected:?}");
        for (i, row) in expected.outgoing.row_iter().enumerate() {
            assert!((found.outgoing.row(9 * i + 4) - row).norm() < 1e-9);
        }
        assert!((found.outgoing.norm() - expected.outgoing.norm()).abs() < 1e-9);
        let [one, other] = [
            expansion(&kernel, &wide_m, &wide_reader, 2).unwrap(),
            expansion(&linear, &m, &reader, 2).unwrap(),
        ];
        assert!((one[1] - other[1]).abs() < 1e-9 * other[1], "{one:?} {other:?}");
    }

    #[test]
    fn inputs_without_any_variation_give_no_features_that_are_not_finite() {
        let mut seen = linear(3, 2);
        seen.add(&[0.0; 12], &[1.0; 8]);
        let m = DMatrix::from_element(2, 4, 0.5);
        let found = features(&seen, &m, &DMatrix::zeros(2, 3), 3).unwrap();
        let all = found.incoming.iter().chain(found.outgoing.iter());
        assert!(all.clone().all(|x| x.is_finite()) && all.count() == 18);
        seen.add(&[f32::NAN; 3], &[0.0; 2]);
        assert_eq!(features(&seen, &m, &DMatrix::zeros(2, 3), 3), None);
    }
}
