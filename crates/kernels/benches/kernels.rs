//! Time of each kernel at the shapes of the `baseline`, `wide` and `large` hosts, on one thread.
//!
//! `cargo bench -p meristem-kernels --bench kernels -- [filter]`; `MERISTEM_ISA` picks the
//! instruction set. Each figure is the least of many runs, since a shared machine can repeat no
//! other.

use std::hint::black_box;
use std::time::{Duration, Instant};

use meristem_kernels::conv::winograd::{TileSize, Winograd, WinogradInputs};
use meristem_kernels::conv::{self, ConvInputs, ConvShape, ParamGrads};
use meristem_kernels::norm::{
    self, Activation, BatchNormBackward, BatchNormForward, ChannelMoments,
};
use meristem_kernels::optim::SgdConfig;
use meristem_kernels::{BatchShape, GradOut, Isa, optim, pool};

/// Images in a batch of the `baseline` host and the blueprints, as in training.
const BATCH: usize = 128;

/// Images in a batch of the `large` host: runs of a few milliseconds, which now and then a shared
/// machine leaves undisturbed.
const LARGE_BATCH: usize = 16;

fn main() {
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let isa = Isa::from_env().unwrap_or_else(|e| panic!("{e}"));
    println!("instruction set {isa}, one thread, batch {BATCH} (large: {LARGE_BATCH})");
    let mut bench = Bench { isa, filter };
    for (host, base, batch) in
        [("baseline", 8, BATCH), ("wide", 16, BATCH), ("large", 32, LARGE_BATCH)]
    {
        for (i, (size, ci, co)) in
            [(32, 3, base), (16, base, 2 * base), (8, 2 * base, 4 * base)].into_iter().enumerate()
        {
            bench.stage(&format!("{host} {i}"), [batch, size], [ci, co]);
        }
    }
    bench.stage("grown", [BATCH, 32], [8, 8]);
    bench.blueprints();
    bench.memory();
}

struct Bench {
    isa: Isa,
    filter: String,
}

/// Deterministic values around 0; a ramp of a linear congruential generator.
fn values(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        })
        .collect()
}

/// A slice of a vector that starts on a cache line, as the plan's arena provides.
struct Aligned(Vec<f32>, usize);

impl Aligned {
    fn new(values: &[f32]) -> Self {
        let mut all = vec![0.0; values.len() + 16];
        let skip = all.as_ptr().align_offset(64);
        all[skip..skip + values.len()].copy_from_slice(values);
        Self(all, values.len())
    }

    fn zeros(n: usize) -> Self {
        Self::new(&vec![0.0; n])
    }

    fn get(&self) -> &[f32] {
        let skip = self.0.as_ptr().align_offset(64);
        &self.0[skip..skip + self.1]
    }

    fn get_mut(&mut self) -> &mut [f32] {
        let skip = self.0.as_ptr().align_offset(64);
        &mut self.0[skip..skip + self.1]
    }
}

impl Bench {
    /// Prints the least time of `f`, and `work` (billions of `unit`) per second.
    fn time(&self, name: &str, work: f64, unit: &str, mut f: impl FnMut()) {
        if !name.contains(&self.filter) {
            return;
        }
        f();
        let start = Instant::now();
        let mut least = Duration::MAX;
        let mut runs = 0;
        while runs < 10 || (start.elapsed() < Duration::from_millis(400) && runs < 10_000) {
            let before = Instant::now();
            f();
            least = least.min(before.elapsed());
            runs += 1;
        }
        let micros = least.as_secs_f64() * 1e6;
        println!("{name:<34} {micros:>10.1} us {:>8.1} {unit}", work / least.as_secs_f64() / 1e9);
    }

    fn conv(&self, name: &str, s: &ConvShape) {
        let isa = self.isa;
        let x = Aligned::new(&values(s.input().len(), 1));
        let mut w = Aligned::new(&values(s.weight_len(), 2));
        let dy = Aligned::new(&values(s.output().len(), 3));
        let (mut y, mut dx) = (Aligned::zeros(dy.1), Aligned::zeros(x.1));
        let mut dw = Aligned::zeros(w.1);
        let mut scratch = Aligned::zeros(s.scratch_len());
        let mut moments = vec![0.0; 2 * s.out_c];
        w.get_mut().iter_mut().for_each(|w| *w *= 0.05);
        let taps = s.kernel[0] * s.kernel[1] * s.in_c / s.groups;
        let flops = 2.0 * (s.output().len() * taps) as f64;
        let of = ConvInputs { x: x.get(), w: w.get(), bias: &[] };
        self.time(&format!("{name} forward"), flops, "GFLOP/s", || {
            conv::forward(isa, s, black_box(&of), y.get_mut(), scratch.get_mut());
        });
        self.time(&format!("{name} forward + stats"), flops, "GFLOP/s", || {
            let (to, room) = (ChannelMoments(&mut moments), scratch.get_mut());
            conv::forward_with_moments(isa, s, black_box(&of), y.get_mut(), to, room);
        });
        self.time(&format!("{name} data gradient"), flops, "GFLOP/s", || {
            let dx = GradOut::overwrite(dx.get_mut());
            conv::backward_data(isa, s, black_box(dy.get()), w.get(), dx, scratch.get_mut());
        });
        self.time(&format!("{name} weight gradient"), flops, "GFLOP/s", || {
            let to = ParamGrads { dw: dw.get_mut(), db: &mut [] };
            conv::backward_weight(isa, s, black_box(x.get()), dy.get(), to, scratch.get_mut());
        });
    }

    fn winograd(&self, name: &str, of: &Winograd) {
        let (isa, s) = (self.isa, &of.shape);
        let x = Aligned::new(&values(s.input().len(), 1));
        let w = Aligned::new(&values(s.weight_len(), 2));
        let dy = Aligned::new(&values(s.output().len(), 3));
        let (mut y, mut dx) = (Aligned::zeros(dy.1), Aligned::zeros(x.1));
        let mut dw = Aligned::zeros(w.1);
        let mut scratch = Aligned::zeros(of.scratch_len());
        // Operations of the direct convolution.
        let flops = 2.0 * (s.output().len() * 9 * s.in_c) as f64;
        let mut filters = Aligned::zeros(of.filters_len());
        self.time(&format!("{name} forward"), flops, "GFLOP/s", || {
            let filters = of.filters(isa, black_box(w.get()), filters.get_mut());
            let inputs = WinogradInputs { x: black_box(x.get()), filters, bias: &[] };
            of.forward(isa, inputs, y.get_mut(), scratch.get_mut());
        });
        self.time(&format!("{name} data gradient"), flops, "GFLOP/s", || {
            let dx = GradOut::overwrite(dx.get_mut());
            let turned = of.turned_filters(isa, black_box(w.get()), filters.get_mut());
            of.backward_data(isa, black_box(dy.get()), turned, dx, scratch.get_mut());
        });
        self.time(&format!("{name} weight gradient"), flops, "GFLOP/s", || {
            let (x, dy) = (black_box(x.get()), black_box(dy.get()));
            of.backward_weight(isa, x, dy, dw.get_mut(), scratch.get_mut());
        });
    }

    fn stage(&mut self, name: &str, [batch, size]: [usize; 2], [in_c, out_c]: [usize; 2]) {
        let s = ConvShape {
            batch,
            in_c,
            in_h: size,
            in_w: size,
            out_c,
            kernel: [3, 3],
            stride: [1, 1],
            padding: [1, 1],
            groups: 1,
            dilation: [1; 2],
        };
        let name_of = format!("{name} conv3x3 {in_c}->{out_c} @{size}");
        self.conv(&name_of, &s);
        for tile in [TileSize::Two, TileSize::Four] {
            if Winograd::fits(&s) {
                self.winograd(&format!("{name_of} {tile:?}"), &Winograd { shape: s, tile });
            }
        }
        self.batch_norm(&format!("{name} bn {out_c} @{size}"), &s.output());
    }

    fn batch_norm(&self, name: &str, s: &BatchShape) {
        let isa = self.isa;
        let x = Aligned::new(&values(s.len(), 1));
        let out_shape = norm::batch::output(s, true);
        let dout = Aligned::new(&values(out_shape.len(), 2));
        let (mut out, mut dx) = (Aligned::zeros(dout.1), Aligned::zeros(x.1));
        let mut codes = vec![0u8; dout.1];
        let mut scratch = Aligned::zeros(norm::batch::scratch_len(s.c));
        let (ones, zeros) = (vec![1.0; s.c], vec![0.0; s.c]);
        let (mut dgamma, mut dbeta) = (vec![0.0; s.c], vec![0.0; s.c]);
        let mut coefficients = vec![0.0; 3 * s.c];
        let of = BatchNormForward {
            x: x.get(),
            mean: &zeros,
            var: &ones,
            gamma: &ones,
            beta: &zeros,
            eps: 1e-5,
            act: Activation::Relu,
            pool: true,
        };
        let bytes = 4.0 * (x.1 + dout.1) as f64;
        self.time(&format!("{name} relu pool forward"), bytes, "GB/s", || {
            let codes = &mut codes[..];
            norm::batch_norm_act_forward(isa, s, &of, out.get_mut(), codes, scratch.get_mut());
        });
        let of = BatchNormBackward { forward: of, dout: dout.get(), codes: &codes, out: out.get() };
        let bytes = 4.0 * (3 * x.1 + 2 * dout.1) as f64;
        self.time(&format!("{name} relu pool backward"), bytes, "GB/s", || {
            let parameters = [&mut dgamma[..], &mut dbeta];
            let with = &mut coefficients;
            norm::batch_norm_gradient_sums(isa, s, &of, parameters, with, scratch.get_mut());
            norm::batch_norm_input_gradient(isa, s, &of, with, GradOut::overwrite(dx.get_mut()));
        });
    }

    fn blueprints(&self) {
        let conv = |size, in_c, out_c, k: usize, groups| ConvShape {
            batch: BATCH,
            in_c,
            in_h: size,
            in_w: size,
            out_c,
            kernel: [k, k],
            stride: [1, 1],
            padding: [k / 2, k / 2],
            groups,
            dilation: [1; 2],
        };
        self.conv("blueprint conv1x1 16 @16", &conv(16, 16, 16, 1, 1));
        self.conv("blueprint conv1x1 64 @16", &conv(16, 64, 64, 1, 1));
        self.conv("blueprint depthwise 8 @32", &conv(32, 8, 8, 3, 8));
        self.conv("blueprint depthwise 32 @8", &conv(8, 32, 32, 3, 32));
        self.conv("deep conv3x3 64->128 @2", &conv(2, 64, 128, 3, 1));
    }

    fn memory(&self) {
        let isa = self.isa;
        let s = BatchShape { batch: BATCH, h: 8, w: 8, c: 32 };
        let x = Aligned::new(&values(s.len(), 1));
        let mut y = Aligned::zeros(s.batch * s.c);
        self.time("global average pool 32 @8", 4.0 * s.len() as f64, "GB/s", || {
            pool::global_avg_forward(isa, &s, black_box(x.get()), y.get_mut());
        });
        let mut p = Aligned::zeros(94_762);
        let g = Aligned::new(&values(p.1, 2));
        let mut m = Aligned::zeros(p.1);
        let sgd = SgdConfig { lr: 0.01, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1.0 };
        self.time("sgd step 94762", 20.0 * p.1 as f64, "GB/s", || {
            optim::sgd_step(isa, &sgd, 1.0, p.get_mut(), g.get(), m.get_mut());
        });
        self.time("gradient norm 94762", 4.0 * g.1 as f64, "GB/s", || {
            black_box(optim::grad_norm_sq(isa, black_box(g.get())));
        });
    }
}
