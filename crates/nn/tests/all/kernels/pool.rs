//! Pooling.

use meristem_nn::kernels::pool::{self, PoolShape};
use meristem_nn::kernels::{BatchShape, GradOut, Isa};

use super::support::{Exact, Guarded, Values, compare};

fn shapes() -> Vec<PoolShape> {
    let mut shapes = Vec::new();
    for (batch, h, w) in [(1, 5, 4), (3, 8, 6), (2, 7, 9)] {
        for c in [1, 3, 8, 17, 32] {
            for (kernel, stride) in [(1, 1), (2, 2), (3, 2), (3, 1), (2, 3), (4, 4)] {
                shapes.push(PoolShape { input: BatchShape { batch, h, w, c }, kernel, stride });
            }
        }
    }
    shapes
}

/// Input indices of output `i`'s window, in row-major order.
fn window(s: &PoolShape, i: usize) -> Vec<usize> {
    let o = s.output();
    let (pixel, c) = (i / o.c, i % o.c);
    let (x, y, n) = (pixel % o.w, pixel / o.w % o.h, pixel / o.pixels());
    let BatchShape { h, w, .. } = s.input;
    let at = |k: usize| (y * s.stride + k / s.kernel, x * s.stride + k % s.kernel);
    (0..s.kernel * s.kernel).map(at).map(|(y, x)| ((n * h + y) * w + x) * o.c + c).collect()
}

#[test]
fn max_pool_agrees_and_takes_the_first_of_equals() {
    for s in shapes() {
        let mut values = Values::new(4);
        // Few distinct values, so that there are many ties.
        let x: Vec<f32> = (0..s.input.len()).map(|_| values.pick(&[-1.0, 0.0, 0.5, 2.0])).collect();
        let dy = values.vec(s.output().len());
        let before = values.vec(s.input.len());
        let mut dx: Vec<Exact> = vec![Exact::default(); x.len()];
        let mut want = Vec::new();
        for (i, &dy) in dy.iter().enumerate() {
            let window = window(&s, i);
            let best = window.iter().map(|&at| x[at]).fold(f32::NEG_INFINITY, f32::max);
            let code = window.iter().position(|&at| x[at] == best).unwrap();
            dx[window[code]].add(dy.into());
            want.push((best, code as u8));
        }
        for isa in Isa::available() {
            let mut y = Guarded::poisoned(want.len());
            let mut codes = vec![99; want.len()];
            pool::max2d_forward(isa, &s, &x, y.get(), &mut codes);
            let got: Vec<(f32, u8)> =
                y.check("max pool").iter().copied().zip(codes.iter().copied()).collect();
            assert_eq!(got, want, "{isa} {s:?}");
            let mut plain = vec![0.0; want.len()];
            pool::max2d_forward(isa, &s, &x, &mut plain, &mut []);
            assert_eq!(plain, y.check("max pool"));
            let mut to = Guarded::poisoned(x.len());
            pool::max2d_backward(isa, &s, &dy, &codes, GradOut::overwrite(to.get()));
            compare("max pool gradient", isa, to.check("max pool gradient"), &dx);
            let mut to = Guarded::new(&before);
            pool::max2d_backward(isa, &s, &dy, &codes, GradOut::add(to.get()));
            let mut sum = dx.clone();
            sum.iter_mut().zip(&before).for_each(|(s, &b)| s.add(b.into()));
            compare("max pool gradient", isa, to.check("max pool gradient"), &sum);
        }
    }
}

#[test]
fn max_pool_lets_the_last_nan_through() {
    let s = PoolShape { input: BatchShape { batch: 1, h: 2, w: 2, c: 1 }, kernel: 2, stride: 2 };
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
