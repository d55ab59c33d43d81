//! Slow reference: interprets a graph node by node in f64 over `[N][C][H][W]`, and computes
//! gradients by central differences.

use meristem_nn::graph::{
    BlendMode, BlendOperands, Dims, LstmParams, NodeId, NodeOp, ParamId, PoolGeometry,
};

use super::Case;

/// A value per node.
pub(crate) type Values = Vec<Vec<f64>>;

struct Interpreter<'a> {
    case: &'a Case,
    params: &'a [Vec<f64>],
    inputs: &'a [Vec<f64>],
    training: bool,
    /// Values of the unperturbed network, which `Detach` and `StraightThrough` hold fixed.
    base: Option<&'a Values>,
    values: Values,
}

/// Parameters of a case in f64, in the graph's order.
pub(crate) fn params(case: &Case) -> Vec<Vec<f64>> {
    let get = |name: &str| case.tensors[name].iter().map(|v| f64::from(*v)).collect();
    case.graph.params.iter().map(|p| get(&p.name)).collect()
}

/// Inputs of a case in f64.
pub(crate) fn inputs(case: &Case) -> Vec<Vec<f64>> {
    case.inputs.iter().map(|x| x.iter().map(|v| f64::from(*v)).collect()).collect()
}

/// All values of the graph.
pub(crate) fn forward(
    case: &Case,
    params: &[Vec<f64>],
    inputs: &[Vec<f64>],
    training: bool,
    base: Option<&Values>,
) -> Values {
    let mut interpreter = Interpreter { case, params, inputs, training, base, values: vec![] };
    for i in 0..case.graph.nodes.len() {
        let value = interpreter.node(i);
        interpreter.values.push(value);
    }
    interpreter.values
}

impl Interpreter<'_> {
    fn x(&self, node: NodeId) -> &[f64] {
        &self.values[node.index()]
    }

    fn dims(&self, node: NodeId) -> Dims {
        self.case.graph.nodes[node.index()].dims
    }

    fn param(&self, id: ParamId) -> &[f64] {
        &self.params[id.index()]
    }

    fn node(&self, i: usize) -> Vec<f64> {
        let out = self.case.graph.nodes[i].dims;
        match &self.case.graph.nodes[i].op {
            NodeOp::Input(n) | NodeOp::Indices(n) | NodeOp::State(n) => self.inputs[*n].clone(),
            NodeOp::Embedding { x, table } => {
                let size = out.c / self.dims(*x).c;
                let row = |i: &f64| &self.param(*table)[i.round() as usize * size..][..size];
                self.x(*x).iter().flat_map(row).copied().collect()
            }
            NodeOp::Concat(parts) => {
                let row = |r: usize| parts.iter().flat_map(move |p| self.row(*p, r)).copied();
                (0..self.case.batch).flat_map(row).collect()
            }
            // Values are in PyTorch's order here.
            NodeOp::Flatten(x) => self.x(*x).to_vec(),
            NodeOp::Lstm { x, keep, state, params } => {
                self.lstm([*x, *keep, *state], params, out.c)
            }
            NodeOp::Conv2d { .. } => self.conv(i),
            NodeOp::BatchNorm { .. } => self.batch_norm(i),
            NodeOp::GroupNorm { .. } => self.group_norm(i),
            NodeOp::LayerNorm { x, weight, bias, eps } => {
                self.layer_norm(*x, *weight, Some(*bias), *eps)
            }
            NodeOp::RmsNorm { x, weight, eps } => self.layer_norm(*x, *weight, None, *eps),
            NodeOp::Activation(function, x) => {
                self.map(*x, |v| super::functions::value(*function, v))
            }
            // The identity with rate 0; `dropout.rs` has masks.
            NodeOp::Dropout { x, .. } => self.x(*x).to_vec(),
            NodeOp::MaxPool2d { x, window } => {
                let most = |seen: Vec<f64>| seen.into_iter().fold(f64::NEG_INFINITY, f64::max);
                self.pool(*x, out, window, most)
            }
            NodeOp::AvgPool2d { x, window } => {
                let mean = |seen: Vec<f64>| seen.iter().sum::<f64>() / window.taps() as f64;
                self.pool(*x, out, window, mean)
            }
            NodeOp::GlobalAvgPool(x) => {
                let pixels = self.dims(*x).h * self.dims(*x).w;
                self.x(*x).chunks(pixels).map(|c| c.iter().sum::<f64>() / pixels as f64).collect()
            }
            NodeOp::Add(a, b) => self.zip(*a, *b, |a, b| a + b),
            NodeOp::Multiply(a, b) => self.zip(*a, *b, |a, b| a * b),
            NodeOp::ScaleChannels { x, scale, factor } => {
                let pixels = out.h * out.w;
                let scale = self.x(*scale);
                let of = |(i, v): (usize, &f64)| f64::from(*factor) * v * scale[i / pixels];
                self.x(*x).iter().enumerate().map(of).collect()
            }
            NodeOp::TanhMix { x, y, mix } => {
                let t = self.param(*mix)[0].tanh();
                self.zip(*x, *y, |x, y| x + t * (y - x))
            }
            NodeOp::Detach(x) => {
                self.base.map_or_else(|| self.x(*x).to_vec(), |b| b[x.index()].clone())
            }
            NodeOp::StraightThrough { host, module } => match self.base {
                None => self.x(*host).to_vec(),
                Some(base) => {
                    let moved = self.x(*module).iter().zip(&base[module.index()]);
                    self.x(*host).iter().zip(moved).map(|(h, (m, m0))| h + (m - m0)).collect()
                }
            },
            NodeOp::Blend { .. } => self.blend(i),
        }
    }

    fn row(&self, x: NodeId, row: usize) -> &[f64] {
        let c = self.dims(x).numel();
        &self.x(x)[row * c..][..c]
    }

    /// Step by step, sequence by sequence, gate by gate.
    fn lstm(&self, [x, keep, state]: [NodeId; 3], params: &LstmParams, n: usize) -> Vec<f64> {
        let sequences = self.case.batch / self.case.steps;
        let [w_ih, w_hh] = [params.weight_ih, params.weight_hh].map(|p| self.param(p));
        let [b_ih, b_hh] = [params.bias_ih, params.bias_hh].map(|p| self.param(p));
        let dot = |w: &[f64], gate: usize, v: &[f64]| -> f64 {
            w[gate * v.len()..].iter().zip(v).map(|(w, v)| w * v).sum()
        };
        let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
        let mut states: Vec<Vec<f64>> =
            (0..sequences).map(|i| self.row(state, i).to_vec()).collect();
        let mut y = vec![];
        for row in 0..self.case.batch {
            let state = &mut states[row % sequences];
            state.iter_mut().for_each(|v| *v *= self.row(keep, row)[0]);
            let (h, c) = state.split_at_mut(n);
            let gate =
                |j: usize| dot(w_ih, j, self.row(x, row)) + b_ih[j] + dot(w_hh, j, h) + b_hh[j];
            let gates: Vec<f64> = (0..4 * n).map(gate).collect();
            for k in 0..n {
                c[k] = sigmoid(gates[n + k]) * c[k] + sigmoid(gates[k]) * gates[2 * n + k].tanh();
                h[k] = sigmoid(gates[3 * n + k]) * c[k].tanh();
            }
            y.extend_from_slice(h);
        }
        y
    }

    fn map(&self, x: NodeId, f: impl Fn(f64) -> f64) -> Vec<f64> {
        self.x(x).iter().map(|v| f(*v)).collect()
    }

    fn zip(&self, a: NodeId, b: NodeId, f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
        self.x(a).iter().zip(self.x(b)).map(|(a, b)| f(*a, *b)).collect()
    }

    fn conv(&self, i: usize) -> Vec<f64> {
        let NodeOp::Conv2d { x, weight, bias, geometry: g } = &self.case.graph.nodes[i].op else {
            unreachable!()
        };
        let (d, out) = (self.dims(*x), self.case.graph.nodes[i].dims);
        let (w, x) = (self.param(*weight), self.x(*x));
        let (in_g, out_g) = (d.c / g.groups, out.c / g.groups);
        let mut y = vec![];
        for n in 0..self.case.batch {
            for oc in 0..out.c {
                for oy in 0..out.h {
                    for ox in 0..out.w {
                        let mut sum = bias.map_or(0.0, |b| self.param(b)[oc]);
                        for ic in 0..in_g {
                            for ky in 0..g.kernel[0] {
                                for kx in 0..g.kernel[1] {
                                    let (down, across) = (ky * g.dilation[0], kx * g.dilation[1]);
                                    let iy = (oy * g.stride[0] + down).wrapping_sub(g.padding[0]);
                                    let ix = (ox * g.stride[1] + across).wrapping_sub(g.padding[1]);
                                    if iy < d.h && ix < d.w {
                                        let c = oc / out_g * in_g + ic;
                                        let tap = (oc * in_g + ic) * g.kernel[0] + ky;
                                        sum += x[((n * d.c + c) * d.h + iy) * d.w + ix]
                                            * w[tap * g.kernel[1] + kx];
                                    }
                                }
                            }
                        }
                        y.push(sum);
                    }
                }
            }
        }
        y
    }

    fn batch_norm(&self, i: usize) -> Vec<f64> {
        let NodeOp::BatchNorm { x, weight, bias, running: [mean, var], eps, .. } =
            &self.case.graph.nodes[i].op
        else {
            unreachable!()
        };
        let (d, x) = (self.dims(*x), self.x(*x));
        let pixels = d.h * d.w;
        let channel = |i: usize| i / pixels % d.c;
        let buffer = |id: usize, c: usize| {
            f64::from(self.case.tensors[&self.case.graph.buffers[id].name][c])
        };
        let stats: Vec<(f64, f64)> = (0..d.c)
            .map(|c| {
                if self.training {
                    moments(x.iter().enumerate().filter(|(i, _)| channel(*i) == c))
                } else {
                    (buffer(mean.index(), c), buffer(var.index(), c))
                }
            })
            .collect();
        let normal = |(i, v): (usize, &f64)| {
            let (mean, var) = stats[channel(i)];
            (v - mean) / (var + f64::from(*eps)).sqrt() * self.param(*weight)[channel(i)]
                + self.param(*bias)[channel(i)]
        };
        x.iter().enumerate().map(normal).collect()
    }

    fn group_norm(&self, i: usize) -> Vec<f64> {
        let NodeOp::GroupNorm { x, weight, bias, groups, eps } = &self.case.graph.nodes[i].op
        else {
            unreachable!()
        };
        let d = self.dims(*x);
        let each = d.numel() / groups;
        let mut y = vec![];
        for group in self.x(*x).chunks(each) {
            let (mean, var) = moments(group.iter().enumerate());
            for v in group {
                let c = y.len() / (d.h * d.w) % d.c;
                let hat = (v - mean) / (var + f64::from(*eps)).sqrt();
                y.push(hat * self.param(*weight)[c] + self.param(*bias)[c]);
            }
        }
        y
    }

    /// Layer norm, or without a bias RMS norm, pixel by pixel.
    fn layer_norm(&self, x: NodeId, weight: ParamId, bias: Option<ParamId>, eps: f32) -> Vec<f64> {
        let (d, x) = (self.dims(x), self.x(x));
        let pixels = d.h * d.w;
        let mut y = x.to_vec();
        for image in 0..x.len() / d.numel() {
            for pixel in 0..pixels {
                let at = |c: usize| (image * d.c + c) * pixels + pixel;
                let mean = |f: &dyn Fn(f64) -> f64| {
                    (0..d.c).map(|c| f(x[at(c)])).sum::<f64>() / d.c as f64
                };
                let centre = if bias.is_some() { mean(&|v| v) } else { 0.0 };
                let deviation = (mean(&|v| (v - centre).powi(2)) + f64::from(eps)).sqrt();
                for c in 0..d.c {
                    let shift = bias.map_or(0.0, |bias| self.param(bias)[c]);
                    y[at(c)] = (x[at(c)] - centre) / deviation * self.param(weight)[c] + shift;
                }
            }
        }
        y
    }

    /// A function of the elements of each window that lie in the image.
    fn pool(
        &self,
        x: NodeId,
        out: Dims,
        of: &PoolGeometry,
        f: impl Fn(Vec<f64>) -> f64,
    ) -> Vec<f64> {
        let (d, x) = (self.dims(x), self.x(x));
        let mut y = vec![];
        for image in x.chunks(d.h * d.w) {
            for oy in 0..out.h {
                for ox in 0..out.w {
                    let window = (0..of.taps()).filter_map(|k| {
                        let (ky, kx) = (k / of.kernel[1], k % of.kernel[1]);
                        let iy = (oy * of.stride[0] + ky).wrapping_sub(of.padding[0]);
                        let ix = (ox * of.stride[1] + kx).wrapping_sub(of.padding[1]);
                        (iy < d.h && ix < d.w).then(|| image[iy * d.w + ix])
                    });
                    y.push(f(window.collect()));
                }
            }
        }
        y
    }

    fn blend(&self, i: usize) -> Vec<f64> {
        let NodeOp::Blend { inputs: BlendOperands { host, module, input, gate }, mode, alpha } =
            &self.case.graph.nodes[i].op
        else {
            unreachable!()
        };
        let a = f64::from(self.case.alphas[*alpha]);
        let (h, m, x) = (self.x(*host), self.x(*module), self.x(*input));
        let each = self.dims(*host).numel();
        (0..h.len())
            .map(|i| match mode {
                BlendMode::Add => h[i] + a * (m[i] - h[i]),
                BlendMode::Multiply => h[i] * (1.0 + a * (m[i] - x[i]).tanh()),
                BlendMode::Gate => {
                    let g = gate.map_or(1.0, |g| self.x(g)[i / each]);
                    h[i] + a * g * (m[i] - h[i])
                }
            })
            .collect()
    }
}

fn moments<'a>(values: impl Iterator<Item = (usize, &'a f64)> + Clone) -> (f64, f64) {
    let n = values.clone().count() as f64;
    let mean = values.clone().map(|(_, v)| v).sum::<f64>() / n;
    (mean, values.map(|(_, v)| (v - mean) * (v - mean)).sum::<f64>() / n)
}

/// The output, and gradients of Σ gradient·output by central differences in f64.
pub(crate) struct Expected {
    pub(crate) output: Vec<f64>,
    pub(crate) params: Vec<Vec<f64>>,
    pub(crate) inputs: Vec<Vec<f64>>,
}

/// Distance of the two points of a difference. In f64 the rounding error of a difference is about
/// 1e-16/1e-6 = 1e-10, and its truncation error about 1e-12: both far below f32.
const STEP: f64 = 1e-6;

/// Runs the slow version in training mode.
pub(crate) fn expected(case: &Case, gradient: &[f32]) -> Expected {
    let (params, inputs) = (params(case), inputs(case));
    let base = forward(case, &params, &inputs, true, None);
    let loss = |params: &[Vec<f64>], inputs: &[Vec<f64>]| -> f64 {
        let values = forward(case, params, inputs, true, Some(&base));
        let output = &values[case.graph.output.index()];
        output.iter().zip(gradient).map(|(y, g)| y * f64::from(*g)).sum()
    };
    let differences = |tensors: &[Vec<f64>], loss: &dyn Fn(&[Vec<f64>]) -> f64| {
        let mut moved = tensors.to_vec();
        let mut gradients = vec![];
        for t in 0..tensors.len() {
            let mut gradient = vec![];
            for i in 0..tensors[t].len() {
                let at = tensors[t][i];
                moved[t][i] = at + STEP;
                let up = loss(&moved);
                moved[t][i] = at - STEP;
                gradient.push((up - loss(&moved)) / (2.0 * STEP));
                moved[t][i] = at;
            }
            gradients.push(gradient);
        }
        gradients
    };
    Expected {
        output: base[case.graph.output.index()].clone(),
        params: differences(&params, &|p| loss(p, &inputs)),
        inputs: differences(&inputs, &|x| loss(&params, x)),
    }
}
