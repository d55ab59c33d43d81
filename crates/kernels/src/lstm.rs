//! LSTM over sequences, forward and back through time.
//!
//! Letters: `T` steps, `B` sequences, `H` hidden; rows of a batch are `[T][B]`. Gates are adjacent
//! in the order i, f, g, o: `4H` values per row. A state is `[B][2H]`: h, then c. `keep` `[T][B]`
//! is 1, or 0 where the state is reset before the step.
//!
//! The products with all inputs are one matrix product over `T·B` rows; only the products with the
//! state go step by step, over `B` rows.

use super::conv::ConvShape;
use super::macros::isa_kernels;
use super::tile::{self, FactorLayout, MatrixLayout, Nest, ProductJob};
use super::transpose::transpose;
use super::{GradOut, Isa, math, pad16};

/// Shape of an LSTM over a batch of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LstmShape {
    /// T.
    pub steps: usize,
    /// B.
    pub sequences: usize,
    /// Features of an input row.
    pub inputs: usize,
    /// H.
    pub hidden: usize,
}

/// Inputs of the forward pass.
#[derive(Clone, Copy, Debug)]
pub struct LstmInputs<'a> {
    /// `[T·B][inputs]`.
    pub x: &'a [f32],
    /// `[T][B]`.
    pub keep: &'a [f32],
    /// Before the first step.
    pub state: &'a [f32],
    /// Packed `[inputs][pad16(4H)]`.
    pub weight_ih: &'a [f32],
    /// Packed `[H][pad16(4H)]`.
    pub weight_hh: &'a [f32],
    /// `[4H]`.
    pub bias_ih: &'a [f32],
    /// `[4H]`.
    pub bias_hh: &'a [f32],
}

/// Outputs of the forward pass, overwritten.
#[derive(Debug)]
pub struct LstmOutputs<'a> {
    /// h of every step, `[T·B][H]`.
    pub h: &'a mut [f32],
    /// c of every step, `[T·B][H]`.
    pub c: &'a mut [f32],
    /// Gates after their activations, `[T·B][4H]`.
    pub gates: &'a mut [f32],
    /// State after the last step.
    pub last: &'a mut [f32],
}

/// Inputs of backpropagation through time.
#[derive(Clone, Copy, Debug)]
pub struct LstmSaved<'a> {
    /// `[T][B]`.
    pub keep: &'a [f32],
    /// Before the first step.
    pub state: &'a [f32],
    /// Packed `[H][pad16(4H)]`.
    pub weight_hh: &'a [f32],
    /// c of every step.
    pub c: &'a [f32],
    /// Gates after their activations.
    pub gates: &'a [f32],
    /// Gradient of every step's h, `[T·B][H]`.
    pub dh: &'a [f32],
}

impl LstmShape {
    /// Rows, `T·B`.
    pub const fn rows(&self) -> usize {
        self.steps * self.sequences
    }

    /// The product with all inputs.
    pub const fn input_product(&self) -> ConvShape {
        ConvShape::linear(self.rows(), self.inputs, 4 * self.hidden)
    }

    /// The product with all states before a step, of which the weight gradient is taken.
    pub const fn state_product(&self) -> ConvShape {
        ConvShape::linear(self.rows(), self.hidden, 4 * self.hidden)
    }

    /// Whether weights are put into panels first: over few steps that is not worth it.
    const fn uses_panels(&self) -> bool {
        self.steps >= 4
    }

    /// Scratch of both passes, in f32.
    pub const fn scratch_len(&self) -> usize {
        let (gates, states) = (4 * self.hidden, self.sequences * self.hidden);
        let most = if self.inputs > self.hidden { self.inputs } else { self.hidden };
        let panels = if self.uses_panels() { most * pad16(gates) } else { 0 };
        let forward = pad16(gates) + states + panels;
        let back = gates * pad16(self.hidden) + 2 * states;
        if forward > back { forward } else { back }
    }
}

/// Runs the sequences forward. `to.h` of a step is read by the next.
pub fn forward(
    isa: Isa,
    shape: &LstmShape,
    of: &LstmInputs<'_>,
    to: LstmOutputs<'_>,
    scratch: &mut [f32],
) {
    let LstmShape { sequences: b, hidden: n, .. } = *shape;
    let (bias, scratch) = scratch.split_at_mut(pad16(4 * n));
    let bias = &mut bias[..4 * n];
    for ((bias, ih), hh) in bias.iter_mut().zip(of.bias_ih).zip(of.bias_hh) {
        *bias = ih + hh;
    }
    let (before, panels) = scratch.split_at_mut(b * n);
    let panels = if shape.uses_panels() { panels } else { &mut [] };
    let all = WeightProduct { rows: shape.rows(), inputs: shape.inputs, outputs: 4 * n };
    let weight = all.weight(of.weight_ih, panels);
    all.run(isa, of.x, Some(bias), weight, to.gates);
    let step = WeightProduct { rows: b, inputs: n, outputs: 4 * n };
    let weight = step.weight(of.weight_hh, panels);
    for t in 0..shape.steps {
        let (done, h) = to.h.split_at_mut(t * b * n);
        let (c_done, c) = to.c.split_at_mut(t * b * n);
        let keep = &of.keep[t * b..][..b];
        let gates = &mut to.gates[t * b * 4 * n..][..b * 4 * n];
        for (i, (before, keep)) in before.chunks_exact_mut(n).zip(keep).enumerate() {
            masked(isa, *keep, earlier(shape, of.state, done, t, i, 0), before);
        }
        step.run(isa, before, None, weight, gates);
        for (i, keep) in keep.iter().enumerate() {
            let c_before = earlier(shape, of.state, c_done, t, i, n);
            let row = i * n..(i + 1) * n;
            let gates = &mut gates[i * 4 * n..][..4 * n];
            cell(isa, *keep, c_before, gates, &mut c[row.clone()], &mut h[row]);
        }
    }
    let last = (shape.steps - 1) * b * n;
    for (i, state) in to.last.chunks_exact_mut(2 * n).enumerate() {
        state[..n].copy_from_slice(&to.h[last + i * n..][..n]);
        state[n..].copy_from_slice(&to.c[last + i * n..][..n]);
    }
}

/// The state of sequence `i` after the step before `t`: in `done`, or the half `part..` of `state`.
fn earlier<'a>(
    shape: &LstmShape,
    state: &'a [f32],
    done: &'a [f32],
    t: usize,
    i: usize,
    part: usize,
) -> &'a [f32] {
    let LstmShape { sequences: b, hidden: n, .. } = *shape;
    match t {
        0 => &state[i * 2 * n + part..][..n],
        _ => &done[((t - 1) * b + i) * n..][..n],
    }
}

/// Weights of a product.
#[derive(Clone, Copy)]
struct Weight<'a> {
    values: &'a [f32],
    layout: MatrixLayout,
}

/// A matrix product with weights.
#[derive(Clone, Copy)]
struct WeightProduct {
    rows: usize,
    inputs: usize,
    outputs: usize,
}

impl WeightProduct {
    /// Packed weights as they are, or as panels if there is room for them.
    fn weight<'a>(&self, packed: &'a [f32], panels: &'a mut [f32]) -> Weight<'a> {
        let width = pad16(self.outputs);
        match panels.get_mut(..self.inputs * width) {
            Some(panels) => {
                tile::to_panels(self.inputs, self.outputs, packed, panels);
                Weight { values: panels, layout: MatrixLayout::Panels }
            }
            None => Weight { values: packed, layout: MatrixLayout::Rows(width) },
        }
    }

    /// With a bias, sets `c` `[rows][outputs]` to `a` `[rows][inputs]` times the weights plus the
    /// bias. Without a bias, adds the product to `c`.
    fn run(
        &self,
        isa: Isa,
        a: &[f32],
        bias: Option<&[f32]>,
        Weight { values: b, layout: b_layout }: Weight<'_>,
        c: &mut [f32],
    ) {
        let job = ProductJob {
            mode: FactorLayout::Broadcast,
            a,
            rows: Nest { counts: [1, 1, self.rows], strides: [0, 0, self.inputs] },
            depth: Nest { counts: [1, 1, self.inputs], strides: [0, 0, 1] },
            b,
            b_layout,
            c,
            c_step: self.outputs,
            c_runs: None,
            cols: self.outputs,
            bias,
            accumulate: bias.is_none(),
        };
        tile::run(isa, job);
    }
}

/// The states h before every step, masked: `to` `[T·B][H]`.
pub fn states_before(
    isa: Isa,
    shape: &LstmShape,
    h: &[f32],
    keep: &[f32],
    state: &[f32],
    to: &mut [f32],
) {
    let LstmShape { sequences: b, hidden: n, .. } = *shape;
    for (row, (to, keep)) in to.chunks_exact_mut(n).zip(keep).enumerate() {
        masked(isa, *keep, earlier(shape, state, h, row / b, row % b, 0), to);
    }
}

/// Back through time: from the gradient of every step's h to the gradients of the gates before
/// their activations `[T·B][4H]`, overwritten, and of the state before the first step.
pub fn backward(
    isa: Isa,
    shape: &LstmShape,
    of: &LstmSaved<'_>,
    dgates: &mut [f32],
    dstate: GradOut<'_>,
    scratch: &mut [f32],
) {
    let LstmShape { sequences: b, hidden: n, .. } = *shape;
    let (transposed, rest) = scratch.split_at_mut(4 * n * pad16(n));
    let (dh_next, rest) = rest.split_at_mut(b * n);
    let dc_next = &mut rest[..b * n];
    transpose(isa, [n, 4 * n], of.weight_hh, transposed, [4 * n, 0]);
    let product = WeightProduct { rows: b, inputs: 4 * n, outputs: n };
    let weight = Weight { values: transposed, layout: MatrixLayout::Panels };
    dh_next.fill(0.0);
    dc_next.fill(0.0);
    for t in (0..shape.steps).rev() {
        let (c_done, c) = of.c.split_at(t * b * n);
        let dgates = &mut dgates[t * b * 4 * n..][..b * 4 * n];
        for i in 0..b {
            let (row, at) = (i * n..(i + 1) * n, (t * b + i) * n);
            let step = CellGradient {
                keep: of.keep[t * b + i],
                gates: &of.gates[4 * at..][..4 * n],
                c: &c[row.clone()],
                c_before: earlier(shape, of.state, c_done, t, i, n),
                dh: &of.dh[at..at + n],
                dh_next: &dh_next[row.clone()],
            };
            cell_backward(isa, &step, &mut dc_next[row], &mut dgates[i * 4 * n..][..4 * n]);
        }
        dh_next.fill(0.0);
        product.run(isa, dgates, None, weight, dh_next);
        for (dh, keep) in dh_next.chunks_exact_mut(n).zip(&of.keep[t * b..]) {
            dh.iter_mut().for_each(|dh| *dh *= keep);
        }
    }
    let GradOut { values, accumulate } = dstate;
    for (i, to) in values.chunks_exact_mut(2 * n).enumerate() {
        let parts = dh_next[i * n..][..n].iter().chain(&dc_next[i * n..][..n]);
        to.iter_mut().zip(parts).for_each(|(to, d)| *to = if accumulate { *to + d } else { *d });
    }
}

/// Inputs of [`cell_backward`] for one step of a sequence.
struct CellGradient<'a> {
    keep: f32,
    gates: &'a [f32],
    c: &'a [f32],
    c_before: &'a [f32],
    dh: &'a [f32],
    dh_next: &'a [f32],
}

isa_kernels! {
    /// `y = keep·x`; exactly 0 for a keep of 0, for any x.
    fn masked(isa: Isa, keep: f32, x: &[f32], y: &mut [f32]) {
        masked_body(keep, x, y);
    }

    /// One sequence's step: activates the gates in place, then c and h.
    fn cell(isa: Isa, keep: f32, c_before: &[f32], gates: &mut [f32], c: &mut [f32],
            h: &mut [f32]) {
        let n = c.len();
        let (i, rest) = gates.split_at_mut(n);
        let (f, rest) = rest.split_at_mut(n);
        let (g, o) = rest.split_at_mut(n);
        let o = &mut o[..n];
        for k in 0..n {
            (i[k], f[k]) = (math::sigmoid(i[k]), math::sigmoid(f[k]));
            (g[k], o[k]) = (math::tanh(g[k]), math::sigmoid(o[k]));
        }
        masked_body(keep, c_before, c);
        let (i, f, g, o) = (&i[..n], &f[..n], &g[..n], &o[..n]);
        for k in 0..n {
            c[k] = f[k] * c[k] + i[k] * g[k];
            h[k] = o[k] * math::tanh(c[k]);
        }
    }

    /// One step of one sequence, backward: `dgates` is overwritten; `dc` holds the gradient from
    /// the next step, and is replaced by the gradient for the previous step.
    fn cell_backward(isa: Isa, of: &CellGradient<'_>, dc: &mut [f32], dgates: &mut [f32]) {
        let n = dc.len();
        let (i, rest) = of.gates.split_at(n);
        let (f, rest) = rest.split_at(n);
        let (g, o) = rest.split_at(n);
        let (di, rest) = dgates.split_at_mut(n);
        let (df, rest) = rest.split_at_mut(n);
        let (dg, d_o) = rest.split_at_mut(n);
        let (c, before, dh, next) =
            (&of.c[..n], &of.c_before[..n], &of.dh[..n], &of.dh_next[..n]);
        // A state that was reset has no effect, even if it is not finite.
        let kept = |k: usize| if of.keep == 0.0 { 0.0 } else { of.keep * before[k] };
        for k in 0..n {
            let dh = dh[k] + next[k];
            let t = math::tanh(c[k]);
            let d = dc[k] + dh * o[k] * (1.0 - t * t);
            d_o[k] = dh * t * o[k] * (1.0 - o[k]);
            di[k] = d * g[k] * i[k] * (1.0 - i[k]);
            df[k] = d * kept(k) * f[k] * (1.0 - f[k]);
            dg[k] = d * i[k] * (1.0 - g[k] * g[k]);
            dc[k] = d * f[k] * of.keep;
        }
    }
}

/// The body of [`masked`], for use within a kernel.
#[inline(always)]
fn masked_body(keep: f32, x: &[f32], y: &mut [f32]) {
    if keep == 0.0 {
        y.fill(0.0);
    } else {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = keep * x);
    }
}
