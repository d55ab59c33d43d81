//! Winograd's minimal filtering.
//!
//! With matrices `A`, `B`, `G` an output tile is `Aᵀ[Σ (G·g·Gᵀ) ⊙ (Bᵀ·d·B)]A`. By standard error
//! analysis, the error of a computed tile is at most `n·2⁻²⁴` times the same formula over
//! magnitudes, where n is the number of roundings on a path: at most [`TRANSFORMS`] in the
//! transforms, one for each product and each addition. (Constants are powers of two, or rounded
//! once, which is counted.)

use meristem_kernels::conv::ConvShape;
use meristem_kernels::conv::winograd::{TileSize, Winograd, WinogradInputs};
use meristem_kernels::norm::ChannelMoments;
use meristem_kernels::{GradOut, Isa, pad16};

use super::conv::{products, weights};
use super::support::{Exact, Guarded, Values, compare, scratch};

/// Roundings of the transforms of images, filters and outputs: two dimensions of at most 4, 5 and
/// 5.
const TRANSFORMS: usize = 28;

type Matrix = Vec<Vec<f64>>;

/// `Aᵀ`, `Bᵀ` and `G`, as in Lavin and Gray.
fn matrices(tile: TileSize) -> [Matrix; 3] {
    let rows = |rows: &[&[f64]]| rows.iter().map(|row| row.to_vec()).collect();
    match tile {
        TileSize::Two => [
            rows(&[&[1., 1., 1., 0.], &[0., 1., -1., -1.]]),
            rows(&[&[1., 0., -1., 0.], &[0., 1., 1., 0.], &[0., -1., 1., 0.], &[0., 1., 0., -1.]]),
            rows(&[&[1., 0., 0.], &[0.5, 0.5, 0.5], &[0.5, -0.5, 0.5], &[0., 0., 1.]]),
        ],
        TileSize::Four => [
            rows(&[
                &[1., 1., 1., 1., 1., 0.],
                &[0., 1., -1., 2., -2., 0.],
                &[0., 1., 1., 4., 4., 0.],
                &[0., 1., -1., 8., -8., 1.],
            ]),
            rows(&[
                &[4., 0., -5., 0., 1., 0.],
                &[0., -4., -4., 1., 1., 0.],
                &[0., 4., -4., -1., 1., 0.],
                &[0., -2., -1., 2., 1., 0.],
                &[0., 2., -1., -2., 1., 0.],
                &[0., 4., 0., -5., 0., 1.],
            ]),
            rows(&[
                &[1. / 4., 0., 0.],
                &[-1. / 6., -1. / 6., -1. / 6.],
                &[-1. / 6., 1. / 6., -1. / 6.],
                &[1. / 24., 1. / 12., 1. / 6.],
                &[1. / 24., -1. / 12., 1. / 6.],
                &[0., 0., 1.],
            ]),
        ],
    }
}

fn transposed(m: &Matrix) -> Matrix {
    (0..m[0].len()).map(|j| m.iter().map(|row| row[j]).collect()).collect()
}

/// `|m|·x·|m|ᵀ`.
fn around(m: &Matrix, x: &Matrix) -> Matrix {
    let times = |x: &Matrix| -> Matrix {
        let row = |r: &Vec<f64>| {
            (0..x[0].len()).map(|j| r.iter().zip(x).map(|(m, x)| m.abs() * x[j]).sum()).collect()
        };
        m.iter().map(row).collect()
    };
    transposed(&times(&transposed(&times(x))))
}

/// Magnitudes of an image batch `[N][H][W][C]`.
struct Images<'a> {
    values: &'a [f32],
    size: [usize; 3],
}

impl Images<'_> {
    /// A square of one channel; zeros outside.
    fn square(&self, n: usize, [y, x]: [isize; 2], side: usize, channel: usize) -> Matrix {
        let [h, w, c] = self.size;
        let at = |y: isize, x: isize| match (usize::try_from(y), usize::try_from(x)) {
            (Ok(y), Ok(x)) if y < h && x < w => {
                f64::from(self.values[((n * h + y) * w + x) * c + channel].abs())
            }
            _ => 0.0,
        };
        let side = side as isize;
        (0..side).map(|i| (0..side).map(|j| at(y + i, x + j)).collect()).collect()
    }
}

struct Case {
    of: Winograd,
    x: Vec<f32>,
    w: Vec<f32>,
    bias: Vec<f32>,
    dy: Vec<f32>,
}

impl Case {
    fn new(of: Winograd, seed: u64) -> Self {
        let (mut values, s) = (Values::new(seed), of.shape);
        let x = values.vec(s.input().len());
        let w = weights(&s, &mut values);
        let (bias, dy) = (values.vec(s.out_c), values.vec(s.output().len()));
        Self { of, x, w, bias, dy }
    }

    fn tiles(&self) -> impl Iterator<Item = [usize; 3]> {
        let ConvShape { batch, in_h, in_w, .. } = self.of.shape;
        let m = matrices(self.of.tile)[0].len();
        let images = (0..batch).flat_map(move |n| (0..in_h).step_by(m).map(move |y| [n, y]));
        images.flat_map(move |[n, y]| (0..in_w).step_by(m).map(move |x| [n, y, x]))
    }

    /// Magnitudes of the sums over `read` channels; `filter` is the magnitude for a tap, an input
    /// channel and an output channel.
    fn magnitudes(
        &self,
        read: &Images<'_>,
        written: usize,
        filter: impl Fn(usize, usize, usize) -> f32,
    ) -> Vec<f64> {
        let [a, b, g] = matrices(self.of.tile);
        let [h, w, c] = read.size;
        let mut result = vec![0.0; read.values.len() / c * written];
        let filters: Vec<Matrix> = (0..c * written)
            .map(|i| {
                let tap = |k: usize| f64::from(filter(k, i / written, i % written).abs());
                around(&g, &(0..3).map(|y| (0..3).map(|x| tap(3 * y + x)).collect()).collect())
            })
            .collect();
        for [n, y, x] in self.tiles() {
            let inputs: Vec<Matrix> = (0..c)
                .map(|ch| {
                    around(&b, &read.square(n, [y as isize - 1, x as isize - 1], b.len(), ch))
                })
                .collect();
            for out in 0..written {
                let mut points = vec![vec![0.0; b.len()]; b.len()];
                for (ch, input) in inputs.iter().enumerate() {
                    let filter = &filters[ch * written + out];
                    for (i, row) in points.iter_mut().enumerate() {
                        let terms = input[i].iter().zip(&filter[i]);
                        row.iter_mut().zip(terms).for_each(|(p, (a, b))| *p += a * b);
                    }
                }
                for (i, row) in around(&a, &points).iter().enumerate().take(h - y) {
                    for (j, value) in row.iter().enumerate().take(w - x) {
                        result[((n * h + y + i) * w + x + j) * written + out] = *value;
                    }
                }
            }
        }
        result
    }

    fn forward(&self, isa: Isa) {
        let (s, name) = (self.of.shape, format!("forward {:?}", self.of));
        let images = Images { values: &self.x, size: [s.in_h, s.in_w, s.in_c] };
        let step = pad16(s.out_c);
        let filter = |tap: usize, i: usize, o: usize| self.w[(tap * s.in_c + i) * step + o];
        let magnitudes = self.magnitudes(&images, s.out_c, filter);
        let mut exact = vec![Exact::default(); self.dy.len()];
        products(&s, |o, i, w| exact[o].add(f64::from(self.x[i]) * f64::from(self.w[w])));
        for (e, m) in exact.iter_mut().zip(&magnitudes) {
            *e = Exact { magnitude: *m, roundings: s.in_c + TRANSFORMS, ..*e };
        }
        let (mut y, mut plain) = (Guarded::poisoned(self.dy.len()), vec![0.0; self.dy.len()]);
        let mut room = scratch(self.of.scratch_len());
        let mut filters = scratch(self.of.filters_len());
        let filters = self.of.filters(isa, &self.w, &mut filters);
        let of = WinogradInputs { x: &self.x, filters, bias: &[] };
        self.of.forward(isa, of, y.get(), &mut room);
        compare(&name, isa, y.check(&name), &exact);
        let mut moments = vec![f64::NAN; 2 * s.out_c];
        self.of.forward_with_moments(isa, of, &mut plain, ChannelMoments(&mut moments), &mut room);
        assert_eq!(plain, y.check(&name), "{name}: the statistics must not change the values");
        super::norm::check_moments(&name, isa, (&plain, s.out_c), &moments);
        exact.iter_mut().enumerate().for_each(|(o, e)| e.add(self.bias[o % s.out_c].into()));
        let of = WinogradInputs { bias: &self.bias, ..of };
        self.of.forward(isa, of, y.get(), &mut room);
        compare(&name, isa, y.check(&name), &exact);
    }

    fn data(&self, isa: Isa) {
        let (s, name) = (self.of.shape, format!("data {:?}", self.of));
        let images = Images { values: &self.dy, size: [s.in_h, s.in_w, s.out_c] };
        let step = pad16(s.out_c);
        let filter = |tap: usize, o: usize, i: usize| self.w[((8 - tap) * s.in_c + i) * step + o];
        let magnitudes = self.magnitudes(&images, s.in_c, filter);
        let mut exact = vec![Exact::default(); self.x.len()];
        products(&s, |o, i, w| exact[i].add(f64::from(self.dy[o]) * f64::from(self.w[w])));
        for (e, m) in exact.iter_mut().zip(&magnitudes) {
            *e = Exact { magnitude: *m, roundings: s.out_c + TRANSFORMS, ..*e };
        }
        let mut room = scratch(self.of.scratch_len());
        let mut turned = scratch(self.of.filters_len());
        let turned = self.of.turned_filters(isa, &self.w, &mut turned);
        let dy = &self.dy;
        let mut dx = Guarded::poisoned(self.x.len());
        self.of.backward_data(isa, dy, turned, GradOut::overwrite(dx.get()), &mut room);
        compare(&name, isa, dx.check(&name), &exact);
        let mut dx = Guarded::new(&self.x);
        self.of.backward_data(isa, dy, turned, GradOut::add(dx.get()), &mut room);
        exact.iter_mut().zip(&self.x).for_each(|(e, &x)| e.add(x.into()));
        compare(&name, isa, dx.check(&name), &exact);
    }

    fn weight(&self, isa: Isa) {
        let (s, name) = (self.of.shape, format!("weight {:?}", self.of));
        let [a, b, g] = matrices(self.of.tile);
        let (back, taps) = (transposed(&a), transposed(&g));
        let x = Images { values: &self.x, size: [s.in_h, s.in_w, s.in_c] };
        let dy = Images { values: &self.dy, size: [s.in_h, s.in_w, s.out_c] };
        let mut points = vec![vec![vec![0.0; b.len()]; b.len()]; s.in_c * s.out_c];
        for [n, i, j] in self.tiles() {
            let square = |of: &Images<'_>, m: &Matrix, halo: usize, c: usize| {
                let at = [i, j].map(|k| k as isize - halo as isize);
                around(m, &of.square(n, at, m[0].len(), c))
            };
            let inputs: Vec<_> = (0..s.in_c).map(|c| square(&x, &b, 1, c)).collect();
            let outputs: Vec<_> = (0..s.out_c).map(|c| square(&dy, &back, 0, c)).collect();
            for (k, points) in points.iter_mut().enumerate() {
                let (x, dy) = (&inputs[k / s.out_c], &outputs[k % s.out_c]);
                for (row, (x, dy)) in points.iter_mut().zip(x.iter().zip(dy)) {
                    row.iter_mut().zip(x.iter().zip(dy)).for_each(|(p, (x, dy))| *p += x * dy);
                }
            }
        }
        let magnitudes: Vec<Matrix> = points.iter().map(|points| around(&taps, points)).collect();
        let tiles = self.tiles().count();
        let mut exact = vec![Exact::default(); self.w.len()];
        products(&s, |o, i, w| exact[w].add(f64::from(self.x[i]) * f64::from(self.dy[o])));
        for (k, e) in exact.iter_mut().enumerate() {
            let (o, i, tap) =
                (k % pad16(s.out_c), k / pad16(s.out_c) % s.in_c, k / pad16(s.out_c) / s.in_c);
            if o < s.out_c {
                let magnitude = magnitudes[i * s.out_c + o][tap / 3][tap % 3];
                *e = Exact { magnitude, roundings: tiles + TRANSFORMS, ..*e };
                e.add(self.w[k].into());
            }
        }
        let mut dw = Guarded::new(&self.w);
        let mut room = scratch(self.of.scratch_len());
        self.of.backward_weight(isa, &self.x, &self.dy, dw.get(), &mut room);
        compare(&name, isa, dw.check(&name), &exact);
        for row in dw.check(&name).chunks_exact(pad16(s.out_c)) {
            assert!(row[s.out_c..].iter().all(|&v| v == 0.0), "{name}: padding lanes are zero");
        }
    }
}

/// Batch, height, width, input and output channels: sides that tiles do not divide, a single pixel,
/// channels of half a vector, several blocks of images with a partial last block, and several
/// blocks of rows. The last shape has an odd number of tiles, of which a vector holds two.
const SHAPES: [[usize; 5]; 9] = [
    [2, 8, 8, 16, 32],
    [3, 7, 5, 8, 24],
    [1, 1, 1, 16, 16],
    [70, 2, 2, 24, 8],
    [5, 4, 9, 40, 16],
    [1, 16, 16, 16, 48],
    [33, 8, 8, 8, 8],
    [1, 43, 22, 24, 40],
    [1, 82, 58, 8, 8],
];

fn shape([batch, in_h, in_w, in_c, out_c]: [usize; 5]) -> ConvShape {
    let [kernel, stride, padding] = [[3; 2], [1; 2], [1; 2]];
    ConvShape {
        batch,
        in_c,
        in_h,
        in_w,
        out_c,
        kernel,
        stride,
        padding,
        groups: 1,
        dilation: [1; 2],
    }
}

#[test]
fn tiles_agree_with_f64() {
    for (seed, of) in SHAPES.into_iter().enumerate() {
        for tile in [TileSize::Two, TileSize::Four] {
            let case = Case::new(Winograd { shape: shape(of), tile }, seed as u64 + 1);
            for isa in Isa::available() {
                case.forward(isa);
                case.data(isa);
                case.weight(isa);
            }
        }
    }
}

#[test]
fn an_empty_batch_is_no_work() {
    let of = Winograd { shape: shape([0, 4, 4, 16, 16]), tile: TileSize::Four };
    let case = Case::new(of, 1);
    let mut room = scratch(of.scratch_len());
    for isa in Isa::available() {
        let mut points = scratch(of.filters_len());
        let filters = of.filters(isa, &case.w, &mut points);
        of.forward(isa, WinogradInputs { x: &[], filters, bias: &[] }, &mut [], &mut room);
        let turned = of.turned_filters(isa, &case.w, &mut points);
        of.backward_data(isa, &[], turned, GradOut::add(&mut []), &mut room);
        let mut dw = case.w.clone();
        of.backward_weight(isa, &[], &[], &mut dw, &mut room);
        assert_eq!(dw, case.w);
    }
}

#[test]
fn only_convolutions_with_many_channels_are_worthwhile() {
    let tile = |of| Winograd::worthwhile(&of).map(|of| of.tile);
    assert_eq!(tile(shape([4, 16, 16, 32, 64])), Some(TileSize::Four));
    assert_eq!(tile(shape([4, 2, 2, 64, 128])), Some(TileSize::Two));
    assert_eq!(tile(shape([4, 16, 16, 3, 64])), None);
    assert_eq!(tile(shape([4, 16, 16, 8, 16])), Some(TileSize::Four));
    assert_eq!(tile(shape([4, 16, 16, 20, 32])), None);
    assert_eq!(tile(ConvShape { stride: [2; 2], ..shape([4, 16, 16, 32, 64]) }), None);
    assert_eq!(tile(ConvShape { dilation: [2; 2], ..shape([4, 16, 16, 32, 64]) }), None);
    assert_eq!(tile(ConvShape { groups: 2, ..shape([4, 16, 16, 32, 64]) }), None);
}
