//! Convolutions and linear layers.

use meristem_kernels::conv::{self, ConvInputs, ConvShape, ParamGrads};
use meristem_kernels::norm::ChannelMoments;
use meristem_kernels::{GradOut, Isa, pad16};

use super::support::{Exact, Guarded, Values, compare, scratch};

/// Calls `f` with the indices of output, input and packed weight of every product.
pub(super) fn products(s: &ConvShape, mut f: impl FnMut(usize, usize, usize)) {
    let ConvShape { in_c, in_h, in_w, out_c, kernel, stride, padding, groups, dilation, .. } = *s;
    let (gi, go) = (in_c / groups, out_c / groups);
    for n in 0..s.batch {
        for (oy, ox) in (0..s.out_h()).flat_map(|y| (0..s.out_w()).map(move |x| (y, x))) {
            for (ky, kx) in (0..kernel[0]).flat_map(|y| (0..kernel[1]).map(move |x| (y, x))) {
                let (y, x) = (oy * stride[0] + ky * dilation[0], ox * stride[1] + kx * dilation[1]);
                if y < padding[0] || x < padding[1] {
                    continue;
                }
                let (y, x) = (y - padding[0], x - padding[1]);
                if y >= in_h || x >= in_w {
                    continue;
                }
                let tap = ky * kernel[1] + kx;
                for (oc, ic) in (0..out_c).flat_map(|o| (0..gi).map(move |i| (o, i))) {
                    let group = oc / go;
                    let weight = if s.is_depthwise() {
                        tap * pad16(out_c) + oc
                    } else {
                        let row = (group * kernel[0] * kernel[1] + tap) * gi + ic;
                        row * pad16(go) + oc % go
                    };
                    let output = ((n * s.out_h() + oy) * s.out_w() + ox) * out_c + oc;
                    let input = ((n * in_h + y) * in_w + x) * in_c + group * gi + ic;
                    f(output, input, weight);
                }
            }
        }
    }
}

/// Packed weights: random, padding lanes zero.
pub(super) fn weights(s: &ConvShape, values: &mut Values) -> Vec<f32> {
    let mut w = values.vec(s.weight_len());
    let out = if s.is_depthwise() { s.out_c } else { s.out_c / s.groups };
    for row in w.chunks_exact_mut(pad16(out)) {
        row[out..].fill(0.0);
    }
    w
}

fn shapes() -> Vec<ConvShape> {
    let base = ConvShape {
        batch: 3,
        in_c: 3,
        in_h: 9,
        in_w: 7,
        out_c: 8,
        kernel: [3, 3],
        stride: [1, 1],
        padding: [1, 1],
        groups: 1,
        dilation: [1; 2],
    };
    let channels = [1, 2, 3, 7, 8, 12, 16, 17, 20, 24, 31, 32, 33];
    let mut shapes: Vec<ConvShape> =
        channels.iter().map(|&out_c| ConvShape { out_c, ..base }).collect();
    shapes.extend(channels.iter().map(|&c| ConvShape { in_c: c, out_c: c, groups: c, ..base }));
    // Depthwise pairs of rows whose groups of columns begin, end, and begin and end at an edge; an
    // odd last row; a row and columns that are in no pair or group.
    for [in_h, in_w] in [[4, 4], [6, 8], [5, 12], [2, 6], [3, 5], [1, 4], [4, 1], [2, 2]] {
        for c in [8, 21, 32] {
            let base = ConvShape { in_c: c, out_c: c, groups: c, in_h, in_w, ..base };
            shapes.push(base);
            shapes.push(ConvShape { in_h: in_h + 2, in_w: in_w + 2, padding: [0, 0], ..base });
        }
    }
    // Blocks of several images with a partial last block; a padding larger than the kernel needs.
    shapes.push(ConvShape { batch: 70, in_h: 2, in_w: 2, in_c: 17, out_c: 40, ..base });
    shapes.push(ConvShape { batch: 5, padding: [3, 4], ..base });
    shapes.push(ConvShape { kernel: [5, 1], padding: [2, 0], in_c: 8, ..base });
    shapes.push(ConvShape { in_c: 32, out_c: 64, in_h: 16, in_w: 16, batch: 1, ..base });
    // Weights of several panels with a narrow last panel; rows with a stride of a multiple of 4
    // KiB.
    for [in_c, out_c] in [[33, 8], [52, 20], [70, 33], [1024, 40], [45, 1024]] {
        let kernel = if in_c + out_c < 1000 { [3, 3] } else { [1, 1] };
        let padding = [kernel[0] / 2; 2];
        shapes.push(ConvShape { in_c, out_c, in_h: 3, in_w: 2, kernel, padding, ..base });
    }
    // Windows along rows of several tiles; full and partial registers of channels; windows with
    // more and fewer rows than the image, and windows entirely outside of it.
    for (i, in_w) in [1, 2, 12, 13, 16, 17, 33, 50].into_iter().enumerate() {
        for [in_c, out_c] in [[1, 4], [3, 8], [5, 5], [8, 8], [9, 16], [20, 6], [8, 13]] {
            let rows = [[3, 1], [1, 0], [2, 1], [5, 2], [3, 0], [3, 4], [4, 0], [3, 1]][i];
            let (kernel, padding) = ([rows[0], 3], [rows[1], 1]);
            shapes.push(ConvShape {
                batch: 2,
                in_c,
                in_h: 4,
                in_w,
                out_c,
                kernel,
                padding,
                ..base
            });
        }
    }
    shapes.extend(dilated(base));
    shapes.extend(strided(base));
    let mut values = Values::new(7);
    let fixed = shapes.len();
    while shapes.len() < fixed + 80 {
        let groups = values.pick(&[1, 1, 2, 3]);
        let s = ConvShape {
            batch: values.pick(&[1, 3, 5]),
            in_c: groups * values.pick(&[1, 3, 7, 8, 17]),
            in_h: values.pick(&[1, 4, 5, 8, 11]),
            in_w: values.pick(&[1, 3, 6, 8, 13]),
            out_c: groups * values.pick(&[1, 3, 7, 8, 17, 32]),
            kernel: [values.pick(&[1, 3, 5]), values.pick(&[1, 3, 5])],
            stride: [values.pick(&[1, 2]), values.pick(&[1, 2])],
            padding: [values.pick(&[0, 1, 2]), values.pick(&[0, 1, 2])],
            groups,
            dilation: [1; 2],
        };
        if s.in_h + 2 * s.padding[0] >= s.kernel[0] && s.in_w + 2 * s.padding[1] >= s.kernel[1] {
            shapes.push(s);
        }
    }
    shapes
}

/// Kernels with elements apart: dense strides and others, divisors of the dilation among them;
/// groups, one filter for each channel; the shapes that dense kernels compute by other ways.
fn dilated(base: ConvShape) -> Vec<ConvShape> {
    let mut shapes = vec![];
    for dilation in [[2, 2], [1, 2], [3, 1], [2, 3]] {
        let base = ConvShape { dilation, padding: [2, 3], ..base };
        for [in_c, out_c, groups] in
            [[3, 8, 1], [3, 3, 1], [8, 8, 1], [17, 20, 1], [6, 4, 2], [17, 17, 17]]
        {
            let base = ConvShape { in_c, out_c, groups, ..base };
            shapes.push(base);
            for stride in [[2, 2], [1, 3], [4, 1]] {
                shapes.push(ConvShape { stride, ..base });
            }
            shapes.push(ConvShape { padding: [1, 1], ..base });
            shapes.push(ConvShape { kernel: [2, 1], padding: [0, 0], ..base });
        }
    }
    shapes
}

/// Strides, whose data gradients have phases with different taps, or none, for dense kernels,
/// groups, and a filter for each channel; rows of several tiles of pixels, several registers of
/// channels.
fn strided(base: ConvShape) -> Vec<ConvShape> {
    let mut shapes = vec![];
    for stride in [[1, 1], [2, 2], [1, 2], [3, 1], [2, 5]] {
        for [in_c, out_c, groups] in [[16, 32, 1], [33, 7, 1], [8, 8, 1], [6, 18, 3]] {
            let base = ConvShape { in_c, out_c, groups, stride, ..base };
            shapes.push(base);
            shapes.push(ConvShape { kernel: [1, 1], padding: [0, 0], ..base });
            shapes.push(ConvShape { kernel: [2, 4], padding: [0, 3], in_h: 2, ..base });
            shapes.push(ConvShape { kernel: [1, 1], padding: [1, 1], in_h: 1, in_w: 2, ..base });
        }
        for c in [5, 8, 16, 40, 64, 100] {
            let base = ConvShape { in_c: c, out_c: c, groups: c, stride, in_w: 29, ..base };
            shapes.push(base);
            shapes.push(ConvShape { kernel: [2, 3], padding: [0, 2], ..base });
            shapes.push(ConvShape { kernel: [5, 1], padding: [1, 0], ..base });
            shapes.push(ConvShape { kernel: [3, 5], padding: [2, 2], in_w: 2, ..base });
        }
    }
    shapes
}

struct Case {
    s: ConvShape,
    x: Vec<f32>,
    w: Vec<f32>,
    bias: Vec<f32>,
    dy: Vec<f32>,
}

impl Case {
    fn new(s: ConvShape, seed: u64) -> Self {
        let mut values = Values::new(seed);
        Self {
            s,
            x: values.vec(s.input().len()),
            w: weights(&s, &mut values),
            bias: values.vec(s.out_c),
            dy: values.vec(s.output().len()),
        }
    }

    fn exact_forward(&self, bias: bool) -> Vec<Exact> {
        let mut y = vec![Exact::default(); self.dy.len()];
        products(&self.s, |o, i, w| y[o].add(f64::from(self.x[i]) * f64::from(self.w[w])));
        if bias {
            y.iter_mut().enumerate().for_each(|(o, y)| y.add(self.bias[o % self.s.out_c].into()));
        }
        y
    }

    fn forward(&self, isa: Isa) {
        let name = format!("forward {:?}", self.s);
        for with_bias in [false, true] {
            let bias = if with_bias { &self.bias[..] } else { &[] };
            let of = ConvInputs { x: &self.x, w: &self.w, bias };
            let mut y = Guarded::poisoned(self.dy.len());
            conv::forward(isa, &self.s, &of, y.get(), &mut scratch(self.s.scratch_len()));
            compare(&name, isa, y.check(&name), &self.exact_forward(with_bias));
        }
    }

    fn stats(&self, isa: Isa) {
        let name = format!("forward_with_moments {:?}", self.s);
        let of = ConvInputs { x: &self.x, w: &self.w, bias: &[] };
        let (mut y, mut plain) = (vec![f32::NAN; self.dy.len()], vec![0.0; self.dy.len()]);
        let mut moments = vec![f64::NAN; 2 * self.s.out_c];
        let mut room = scratch(self.s.scratch_len());
        conv::forward_with_moments(
            isa,
            &self.s,
            &of,
            &mut y,
            ChannelMoments(&mut moments),
            &mut room,
        );
        conv::forward(isa, &self.s, &of, &mut plain, &mut room);
        assert_eq!(y, plain, "{name}: the statistics must not change the values");
        super::norm::check_moments(&name, isa, (&y, self.s.out_c), &moments);
    }

    fn data(&self, isa: Isa) {
        let name = format!("backward_data {:?}", self.s);
        let mut exact = vec![Exact::default(); self.x.len()];
        products(&self.s, |o, i, w| exact[i].add(f64::from(self.dy[o]) * f64::from(self.w[w])));
        let mut room = scratch(self.s.scratch_len());
        let mut dx = Guarded::poisoned(self.x.len());
        conv::backward_data(
            isa,
            &self.s,
            &self.dy,
            &self.w,
            GradOut::overwrite(dx.get()),
            &mut room,
        );
        compare(&name, isa, dx.check(&name), &exact);
        let mut dx = Guarded::new(&self.x);
        conv::backward_data(isa, &self.s, &self.dy, &self.w, GradOut::add(dx.get()), &mut room);
        exact.iter_mut().zip(&self.x).for_each(|(e, &x)| e.add(x.into()));
        compare(&name, isa, dx.check(&name), &exact);
    }

    fn weight(&self, isa: Isa) {
        let name = format!("backward_weight {:?}", self.s);
        let mut exact: Vec<Exact> = self
            .w
            .iter()
            .map(|&w| Exact { value: w.into(), magnitude: w.abs().into(), roundings: 1 })
            .collect();
        products(&self.s, |o, i, w| exact[w].add(f64::from(self.x[i]) * f64::from(self.dy[o])));
        let mut bias: Vec<Exact> = vec![Exact::default(); self.s.out_c];
        for (o, &dy) in self.dy.iter().enumerate() {
            bias[o % self.s.out_c].add(dy.into());
        }
        bias.iter_mut().zip(&self.bias).for_each(|(b, &v)| b.add(v.into()));
        let (mut dw, mut db) = (Guarded::new(&self.w), Guarded::new(&self.bias));
        let to = ParamGrads { dw: dw.get(), db: db.get() };
        let mut room = scratch(self.s.scratch_len());
        conv::backward_weight(isa, &self.s, &self.x, &self.dy, to, &mut room);
        compare(&name, isa, dw.check(&name), &exact);
        compare(&name, isa, db.check(&name), &bias);
        let out = if self.s.is_depthwise() { self.s.out_c } else { self.s.out_c / self.s.groups };
        for row in dw.check(&name).chunks_exact(pad16(out)) {
            assert!(row[out..].iter().all(|&v| v == 0.0), "{name}: padding lanes are zero");
        }
    }
}

#[test]
fn convolutions_agree_with_f64() {
    for (seed, s) in shapes().into_iter().enumerate() {
        let case = Case::new(s, seed as u64 + 1);
        for isa in Isa::available() {
            case.forward(isa);
            case.stats(isa);
            case.data(isa);
            case.weight(isa);
        }
    }
}

#[test]
fn an_empty_batch_is_no_work() {
    for isa in Isa::available() {
        for groups in [1, 8] {
            let s = ConvShape { batch: 0, ..square(8, 8, groups) };
            let case = Case::new(s, 1);
            let mut room = scratch(s.scratch_len());
            let of = ConvInputs { x: &[], w: &case.w, bias: &[] };
            conv::forward(isa, &s, &of, &mut [], &mut room);
            conv::backward_data(isa, &s, &[], &case.w, GradOut::add(&mut []), &mut room);
            let mut dw = case.w.clone();
            let to = ParamGrads { dw: &mut dw, db: &mut [] };
            conv::backward_weight(isa, &s, &[], &[], to, &mut room);
            assert_eq!(dw, case.w);
        }
    }
}

fn square(in_c: usize, out_c: usize, groups: usize) -> ConvShape {
    ConvShape {
        batch: 1,
        in_c,
        in_h: 4,
        in_w: 4,
        out_c,
        kernel: [3, 3],
        stride: [1, 1],
        padding: [1, 1],
        groups,
        dilation: [1; 2],
    }
}

#[test]
fn nan_and_infinity_reach_their_windows_and_no_other() {
    for isa in Isa::available() {
        for (groups, poison) in [(1, f32::NAN), (8, f32::INFINITY)] {
            let s = square(8, 8, groups);
            let mut case = Case::new(s, 3);
            case.w.iter_mut().for_each(|w| *w = w.abs());
            // Pixel (0, 0), channel 0.
            case.x[0] = poison;
            let mut y = vec![0.0; case.dy.len()];
            let of = ConvInputs { x: &case.x, w: &case.w, bias: &[] };
            conv::forward(isa, &s, &of, &mut y, &mut scratch(s.scratch_len()));
            for (i, y) in y.iter().enumerate() {
                let (row, column, c) = (i / 32, i / 8 % 4, i % 8);
                let hit = row < 2 && column < 2 && (groups == 1 || c == 0);
                assert_eq!(!y.is_finite(), hit, "{isa} row {row} column {column} channel {c}: {y}");
            }
        }
    }
}

#[test]
fn linear_agrees_with_f64() {
    for (batch, in_f, out_f) in [(1, 1, 1), (3, 17, 10), (5, 32, 100), (128, 32, 10), (7, 3, 33)] {
        let s = ConvShape::linear(batch, in_f, out_f);
        let case = Case::new(s, 9);
        for isa in Isa::available() {
            let mut room = scratch(s.scratch_len());
            let mut y = Guarded::poisoned(batch * out_f);
            let of = ConvInputs { x: &case.x, w: &case.w, bias: &case.bias };
            conv::forward(isa, &s, &of, y.get(), &mut room);
            compare("linear", isa, y.check("linear"), &case.exact_forward(true));
            let mut dx = Guarded::poisoned(batch * in_f);
            let to = GradOut::overwrite(dx.get());
            conv::backward_data(isa, &s, &case.dy, &case.w, to, &mut room);
            let mut exact = vec![Exact::default(); batch * in_f];
            products(&s, |o, i, w| {
                exact[i].add(f64::from(case.dy[o]) * f64::from(case.w[w]));
            });
            compare("linear data", isa, dx.check("linear data"), &exact);
            let mut dw = Guarded::new(&vec![0.0; s.weight_len()]);
            let to = ParamGrads { dw: dw.get(), db: &mut [] };
            conv::backward_weight(isa, &s, &case.x, &case.dy, to, &mut room);
            let mut exact = vec![Exact::default(); s.weight_len()];
            products(&s, |o, i, w| {
                exact[w].add(f64::from(case.x[i]) * f64::from(case.dy[o]));
            });
            compare("linear weight", isa, dw.check("linear weight"), &exact);
        }
    }
}
