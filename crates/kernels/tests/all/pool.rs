//! Pooling.

use meristem_kernels::pool::{self, PoolGeometry, PoolShape};
use meristem_kernels::{BatchShape, GradOut, Isa};

use super::support::{Exact, Guarded, Values, compare};

fn shapes() -> Vec<PoolShape> {
    let mut shapes = Vec::new();
    for (batch, h, w) in [(1, 5, 4), (3, 8, 6), (2, 7, 9)] {
        for c in [1, 3, 8, 17, 32] {
            for (kernel, stride) in [(1, 1), (2, 2), (3, 2), (3, 1), (2, 3), (4, 4)] {
                shapes.push(PoolShape::square(BatchShape { batch, h, w, c }, kernel, stride));
            }
        }
    }
    shapes
}

/// Padded windows, windows that are not square, and windows of more than 256 positions.
fn windows() -> Vec<PoolShape> {
    let geometry = |kernel, stride, padding| PoolGeometry { kernel, stride, padding };
    let of = [
        geometry([3, 3], [2, 2], [1, 1]),
        geometry([2, 2], [1, 1], [1, 1]),
        geometry([1, 3], [1, 2], [0, 1]),
        geometry([4, 2], [3, 1], [2, 1]),
        geometry([3, 2], [3, 2], [0, 0]),
        geometry([5, 4], [1, 1], [2, 0]),
    ];
    let mut shapes = Vec::new();
    for (batch, h, w) in [(1, 5, 4), (3, 3, 6), (2, 7, 9)] {
        for c in [1, 3, 8, 17] {
            let input = BatchShape { batch, h, w, c };
            shapes.extend(of.map(|window| PoolShape { input, window }));
        }
    }
    let input = BatchShape { batch: 2, h: 18, w: 17, c: 9 };
    let wide = [geometry([18, 17], [1, 1], [0, 0]), geometry([16, 17], [3, 2], [8, 4])];
    shapes.extend(wide.map(|window| PoolShape { input, window }));
    // Windows that lie in a part of the padded image.
    shapes.retain(|s| s.input.h + 2 * s.window.padding[0] >= s.window.kernel[0]);
    shapes
}

/// Positions of output `i`'s window inside the image, in row-major order, each with its index in
/// the input.
fn window(s: &PoolShape, i: usize) -> Vec<(u32, usize)> {
    let o = s.output();
    let (pixel, c) = (i / o.c, i % o.c);
    let (x, y, n) = (pixel % o.w, pixel / o.w % o.h, pixel / o.pixels());
    let BatchShape { h, w, .. } = s.input;
    let PoolGeometry { kernel: [_, width], stride, padding } = s.window;
    let inside = |k: usize| {
        let y = (y * stride[0] + k / width).wrapping_sub(padding[0]);
        let x = (x * stride[1] + k % width).wrapping_sub(padding[1]);
        (y < h && x < w).then(|| (k as u32, ((n * h + y) * w + x) * o.c + c))
    };
    (0..s.window.taps()).filter_map(inside).collect()
}

/// Maxima and positions.
fn forward(isa: Isa, s: &PoolShape, x: &[f32], y: &mut [f32]) -> Vec<u32> {
    if s.is_wide() {
        let mut codes = vec![99; y.len()];
        pool::max2d_forward_wide(isa, s, x, y, &mut codes);
        return codes;
    }
    let mut codes = vec![99; y.len()];
    pool::max2d_forward(isa, s, x, y, &mut codes);
    codes.into_iter().map(u32::from).collect()
}

fn backward(isa: Isa, s: &PoolShape, dy: &[f32], codes: &[u32], dx: GradOut<'_>) {
    if s.is_wide() {
        return pool::max2d_backward_wide(isa, s, dy, codes, dx);
    }
    let codes: Vec<u8> = codes.iter().map(|code| *code as u8).collect();
    pool::max2d_backward(isa, s, dy, &codes, dx);
}

#[test]
fn max_pool_agrees_and_takes_the_first_of_equals() {
    for s in [shapes(), windows()].concat() {
        let mut values = Values::new(4);
        // Few distinct values, so that there are many ties; all negative ones in some windows.
        let x: Vec<f32> =
            (0..s.input.len()).map(|_| values.pick(&[-1.0, -3.0, -0.5, 2.0])).collect();
        let dy = values.vec(s.output().len());
        let before = values.vec(s.input.len());
        let mut dx: Vec<Exact> = vec![Exact::default(); x.len()];
        let mut want = Vec::new();
        for (i, &dy) in dy.iter().enumerate() {
            let window = window(&s, i);
            let best = window.iter().map(|&(_, at)| x[at]).fold(f32::NEG_INFINITY, f32::max);
            let (code, at) = window.into_iter().find(|&(_, at)| x[at] == best).unwrap();
            dx[at].add(dy.into());
            want.push((best, code));
        }
        for isa in Isa::available() {
            let mut y = Guarded::poisoned(want.len());
            let codes = forward(isa, &s, &x, y.get());
            let got: Vec<(f32, u32)> =
                y.check("max pool").iter().copied().zip(codes.iter().copied()).collect();
            assert_eq!(got, want, "{isa} {s:?}");
            let mut plain = vec![0.0; want.len()];
            if s.is_wide() {
                pool::max2d_forward_wide(isa, &s, &x, &mut plain, &mut []);
            } else {
                pool::max2d_forward(isa, &s, &x, &mut plain, &mut []);
            }
            assert_eq!(plain, y.check("max pool"));
            let mut to = Guarded::poisoned(x.len());
            backward(isa, &s, &dy, &codes, GradOut::overwrite(to.get()));
            compare("max pool gradient", isa, to.check("max pool gradient"), &dx);
            let mut to = Guarded::new(&before);
            backward(isa, &s, &dy, &codes, GradOut::add(to.get()));
            let mut sum = dx.clone();
            sum.iter_mut().zip(&before).for_each(|(s, &b)| s.add(b.into()));
            compare("max pool gradient", isa, to.check("max pool gradient"), &sum);
        }
    }
}

#[test]
fn max_pool_lets_the_last_nan_through() {
    let s = PoolShape::square(BatchShape { batch: 1, h: 2, w: 2, c: 1 }, 2, 2);
    for isa in Isa::available() {
        for (x, code) in [
            ([1.0, f32::NAN, 7.0, 2.0], 1),
            ([f32::NAN, 1.0, f32::NAN, 2.0], 2),
            ([f32::NAN, 1.0, 0.0, 2.0], 0),
        ] {
            let (mut y, mut codes) = ([0.0], [9]);
            pool::max2d_forward(isa, &s, &x, &mut y, &mut codes);
            assert!(y[0].is_nan() && codes[0] == code, "{isa} {x:?} {codes:?}");
        }
    }
}

/// A window in the padding has its first element in the image as its first position, even if that
/// is negative infinity: padding never has the maximum.
#[test]
fn padding_never_has_the_maximum() {
    let input = BatchShape { batch: 1, h: 2, w: 2, c: 1 };
    let s = PoolShape { input, window: PoolGeometry::square(2, 2).padded([1, 1]) };
    let x = [f32::NEG_INFINITY, -2.0, f32::NAN, -7.0];
    for isa in Isa::available() {
        let mut y = [0.0; 4];
        assert_eq!(forward(isa, &s, &x, &mut y), [3, 2, 1, 0], "{isa}");
        assert!(y[2].is_nan(), "{y:?}");
        assert_eq!([y[0], y[1], y[3]], [f32::NEG_INFINITY, -2.0, -7.0], "{isa}");
    }
}

#[test]
fn average_agrees_with_f64() {
    for s in [shapes(), windows()].concat() {
        let mut values = Values::new(6);
        let (x, dy) = (values.vec(s.input.len()), values.vec(s.output().len()));
        let before = values.vec(x.len());
        let taps = s.window.taps() as f64;
        let mut want = vec![Exact::default(); dy.len()];
        let mut back = vec![Exact::default(); x.len()];
        for (i, (want, &dy)) in want.iter_mut().zip(&dy).enumerate() {
            for (_, at) in window(&s, i) {
                want.add(f64::from(x[at]) / taps);
                back[at].add(f64::from(dy) / taps);
            }
        }
        // The reciprocal of the taps and the product with it are two roundings more, for which
        // `Exact::tolerance` has room.
        for isa in Isa::available() {
            let mut y = Guarded::poisoned(dy.len());
            pool::avg2d_forward(isa, &s, &x, y.get());
            compare("window average", isa, y.check("window average"), &want);
            let mut dx = Guarded::poisoned(x.len());
            pool::avg2d_backward(isa, &s, &dy, GradOut::overwrite(dx.get()));
            compare("window average gradient", isa, dx.check("gradient"), &back);
            let mut dx = Guarded::new(&before);
            pool::avg2d_backward(isa, &s, &dy, GradOut::add(dx.get()));
            let mut sum = back.clone();
            sum.iter_mut().zip(&before).for_each(|(s, &b)| s.add(b.into()));
            compare("window average gradient", isa, dx.check("gradient"), &sum);
        }
    }
}

#[test]
fn global_average_agrees_with_f64() {
    for s in shapes().into_iter().map(|s| s.input) {
        let mut values = Values::new(8);
        let (x, dy) = (values.vec(s.len()), values.vec(s.batch * s.c));
        let mut want = vec![Exact::default(); dy.len()];
        for (i, &x) in x.iter().enumerate() {
            want[i / (s.pixels() * s.c) * s.c + i % s.c].add(f64::from(x) / s.pixels() as f64);
        }
        let back: Vec<Exact> = (0..x.len())
            .map(|i| {
                let value =
                    f64::from(dy[i / (s.pixels() * s.c) * s.c + i % s.c]) / s.pixels() as f64;
                Exact { value, magnitude: value.abs(), roundings: 2 }
            })
            .collect();
        for isa in Isa::available() {
            let mut y = Guarded::poisoned(dy.len());
            pool::global_avg_forward(isa, &s, &x, y.get());
            compare("average", isa, y.check("average"), &want);
            let mut dx = Guarded::poisoned(x.len());
            pool::global_avg_backward(isa, &s, &dy, GradOut::overwrite(dx.get()));
            compare("average gradient", isa, dx.check("average gradient"), &back);
            let mut dx = Guarded::new(&x);
            pool::global_avg_backward(isa, &s, &dy, GradOut::add(dx.get()));
            let mut sum = back.clone();
            sum.iter_mut().zip(&x).for_each(|(s, &x)| s.add(x.into()));
            compare("average gradient", isa, dx.check("average gradient"), &sum);
        }
    }
}
