//! Whole graphs, every operation, against the slow f64 version: values, and gradients by central
//! differences.

use crate::common::reference::{Expected, expected};
use crate::common::{Case, Random, assert_close};
use meristem_nn::graph::{
    BlendMode, BlendOperands, ConvGeometry, Dims, Graph, GraphBuilder, LstmNodes, NodeId,
    PoolGeometry, SgdConfig,
};
use meristem_nn::plan::PlanMode;
use meristem_nn::{Isa, Result};

const SGD: SgdConfig = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

/// f32 has 6e-8; a value passes some ten layers, each a sum of up to a thousand terms whose errors
/// add up like √1000 ≈ 30: 2e-5 of the largest value. Batch norm of few values amplifies the errors
/// of its input by up to 1/σ; five times the sum above covers the graphs of this file.
const RELATIVE: f64 = 1e-4;
/// For gradients that cancel to zero.
const ABSOLUTE: f64 = 2e-6;

fn check(name: &str, case: &Case) {
    let gradient = case.output_gradient(7);
    let Expected { output, params, inputs } = expected(case, &gradient);
    for isa in Isa::available() {
        for fuse in [true, false] {
            let got = case.run(isa, PlanMode::Gradient, fuse, &gradient).unwrap();
            let what = |t: &str| format!("{name} ({isa}, fuse {fuse}): {t}");
            assert_close(&what("output"), &got.output, &output, RELATIVE, ABSOLUTE);
            let scale = params.iter().chain(&inputs).flatten().fold(0f64, |m, v| m.max(v.abs()));
            for (spec, expected) in case.graph.params.iter().zip(&params) {
                let zeros = vec![0.0; expected.len()];
                let got = got.params.get(&spec.name).unwrap_or(&zeros);
                // A gradient that is zero by construction (a bias before a batch norm) is a
                // difference of terms that are as large as other gradients.
                let absolute = ABSOLUTE + 1e-5 * scale;
                assert_close(&what(&spec.name), got, expected, RELATIVE, absolute);
            }
            for (i, expected) in inputs.iter().enumerate() {
                let zeros = vec![0.0; expected.len()];
                let got = got.inputs[i].as_ref().unwrap_or(&zeros);
                let absolute = ABSOLUTE + 1e-5 * scale;
                assert_close(&what(&format!("input {i}")), got, expected, RELATIVE, absolute);
            }
        }
    }
}

fn builder(c: usize, h: usize, w: usize) -> GraphBuilder {
    GraphBuilder::new(Dims { c, h, w }, SGD)
}

fn check_op(
    name: &str,
    dims: [usize; 3],
    batch: usize,
    f: impl Fn(&mut GraphBuilder) -> Result<NodeId>,
) {
    let mut b = builder(dims[0], dims[1], dims[2]);
    let output = f(&mut b).unwrap();
    let mut case = Case::random(b.finish_at(output), batch, 11);
    if let Some(bias) = case.tensors.get_mut("norm.bias") {
        // Mostly positive, because a window of zeros after a ReLU is a kink, where differences are
        // undefined.
        bias.fill(1.5);
    }
    check(name, &case);
}

#[test]
fn convolutions() {
    let geometry = |kernel, stride, padding, groups| ConvGeometry {
        stride,
        padding,
        groups,
        ..ConvGeometry::new(kernel)
    };
    let forms = [
        ([3, 5, 4], 7, geometry([3, 3], [1, 1], [1, 1], 1)),
        ([4, 5, 6], 6, geometry([1, 3], [2, 1], [0, 2], 2)),
        ([17, 3, 4], 17, geometry([3, 3], [1, 1], [1, 1], 17)),
        ([1, 6, 5], 1, geometry([2, 2], [2, 2], [0, 0], 1)),
        ([8, 4, 4], 18, geometry([5, 5], [1, 1], [2, 2], 1)),
        ([3, 6, 5], 7, geometry([3, 3], [1, 1], [2, 2], 1).dilation([2, 2])),
        ([4, 1, 9], 6, geometry([1, 3], [1, 2], [0, 3], 2).dilation([1, 3])),
        ([5, 7, 6], 5, geometry([3, 2], [2, 1], [1, 1], 5).dilation([2, 3])),
    ];
    for (i, (dims, out, geometry)) in forms.into_iter().enumerate() {
        for bias in [true, false] {
            check_op(&format!("conv {i}"), dims, 3, |b| {
                b.conv2d(b.input(), "c", out, geometry, bias)
            });
        }
    }
}

#[test]
fn norms() {
    check_op("batch_norm", [7, 3, 4], 5, |b| b.batch_norm(b.input(), "n"));
    check_op("batch_norm of vectors", [7, 1, 1], 5, |b| b.batch_norm(b.input(), "n"));
    for groups in [1, 2, 4, 8] {
        check_op("group_norm", [8, 3, 5], 3, |b| b.group_norm(b.input(), "n", groups, 0.5));
    }
    for dims in [[8, 3, 5], [17, 2, 3], [33, 1, 1]] {
        check_op("layer_norm", dims, 3, |b| b.layer_norm(b.input(), "n"));
        check_op("rms_norm", dims, 3, |b| b.rms_norm(b.input(), "n"));
    }
    check_op("norms of one input", [6, 3, 2], 2, |b| {
        let (x, y) = (b.layer_norm(b.input(), "n")?, b.rms_norm(b.input(), "m")?);
        b.multiply(x, y)
    });
}

#[test]
fn pointwise_pools_and_linear() {
    check_op("relu", [3, 4, 5], 3, |b| Ok(b.relu(b.input())));
    check_op("sigmoid", [3, 4, 5], 3, |b| Ok(b.sigmoid(b.input())));
    check_op("tanh", [3, 4, 5], 3, |b| Ok(b.tanh(b.input())));
    check_op("leaky relu", [3, 4, 5], 3, |b| b.leaky_relu(b.input(), 0.2));
    check_op("elu", [3, 4, 5], 3, |b| Ok(b.elu(b.input())));
    check_op("gelu", [3, 4, 5], 3, |b| Ok(b.gelu(b.input())));
    check_op("gelu by tanh", [3, 4, 5], 3, |b| Ok(b.gelu_tanh(b.input())));
    check_op("silu", [3, 4, 5], 3, |b| Ok(b.silu(b.input())));
    check_op("softplus", [3, 4, 5], 3, |b| Ok(b.softplus(b.input())));
    check_op("hard swish", [3, 4, 5], 3, |b| Ok(b.hard_swish(b.input())));
    check_op("max pool 2", [3, 5, 7], 3, |b| b.max_pool2d(b.input(), "p", 2, 2));
    check_op("max pool 3, stride 2", [9, 7, 6], 2, |b| b.max_pool2d(b.input(), "p", 3, 2));
    check_op("global average", [17, 5, 3], 3, |b| Ok(b.global_avg_pool(b.input())));
    check_op("dropout with rate 0", [3, 4, 5], 3, |b| {
        let x = b.dropout(b.input(), "d", 0.0)?;
        Ok(b.tanh(x))
    });
    check_op("linear", [9, 1, 1], 5, |b| b.linear(b.input(), "l", 4, true, None));
    check_op("linear without bias", [9, 1, 1], 1, |b| b.linear(b.input(), "l", 17, false, None));
    check_op("flatten", [3, 4, 5], 3, |b| Ok(b.flatten(b.input())));
    check_op("twice the same", [3, 2, 2], 2, |b| b.add(b.input(), b.input()));
    check_op("square", [3, 2, 5], 2, |b| b.multiply(b.input(), b.input()));
}

#[test]
fn pooling_windows() {
    let of = [
        ([3, 5, 7], PoolGeometry::square(3, 2).padded([1, 1])),
        ([9, 4, 3], PoolGeometry { kernel: [2, 3], stride: [1, 2], padding: [1, 1] }),
        ([4, 1, 11], PoolGeometry { kernel: [1, 4], stride: [1, 3], padding: [0, 2] }),
    ];
    for (dims, window) in of {
        check_op(&format!("max pool {window:?}"), dims, 3, |b| {
            b.max_pool2d_with(b.input(), "p", window)
        });
        check_op(&format!("average pool {window:?}"), dims, 3, |b| {
            b.avg_pool2d(b.input(), "p", window)
        });
    }
    check_op("global max", [9, 5, 3], 3, |b| Ok(b.global_max_pool(b.input())));
    // Positions that are wider than a byte.
    check_op("global max of many", [2, 17, 16], 2, |b| {
        let x = b.tanh(b.input());
        let y = b.global_max_pool(x);
        Ok(b.tanh(y))
    });
}

fn images(b: &mut GraphBuilder, n: usize) -> Vec<NodeId> {
    let dims = b.dims(b.input());
    std::iter::once(b.input()).chain((1..n).map(|_| b.another_input(dims))).collect()
}

#[test]
fn several_inputs() {
    check_op("add", [3, 2, 5], 3, |b| {
        let x = images(b, 2);
        b.add(x[0], x[1])
    });
    check_op("multiply", [3, 2, 5], 3, |b| {
        let x = images(b, 2);
        b.multiply(x[0], x[1])
    });
    // Parts of several widths, one of them twice; a value whose gradient comes from two readers.
    check_op("concat", [3, 4, 5], 3, |b| {
        let wide = b.another_input(Dims { c: 17, h: 4, w: 5 });
        let x = b.tanh(b.input());
        let all = b.concat(&[x, wide, b.input(), x])?;
        let all = b.tanh(all);
        let y = b.conv2d(all, "after", 3, ConvGeometry::same(1), false)?;
        b.multiply(x, y)
    });
    check_op("branches", [3, 6, 5], 2, |b| {
        let window = PoolGeometry::square(3, 1).padded([1, 1]);
        let one = b.conv2d(b.input(), "one", 4, ConvGeometry::same(1), true)?;
        let three = b.conv2d(b.input(), "three", 4, ConvGeometry::same(3), true)?;
        let pooled = b.avg_pool2d(b.input(), "pool", window)?;
        let gate = b.sigmoid(three);
        let gated = b.multiply(one, gate)?;
        let all = b.concat(&[gated, three, pooled])?;
        let all = b.flatten(all);
        b.linear(all, "fc", 3, true, None)
    });
    check_op("scale_channels", [5, 3, 4], 3, |b| {
        let s = b.another_input(Dims { c: 5, h: 1, w: 1 });
        b.scale_channels(b.input(), s, 2.0)
    });
    check_op("tanh_mix", [5, 3, 4], 3, |b| {
        let x = images(b, 2);
        b.tanh_mix(x[0], x[1], "s")
    });
}

#[test]
fn blends() {
    for mode in [BlendMode::Add, BlendMode::Multiply, BlendMode::Gate] {
        for alpha in 0..3 {
            check_op(&format!("{mode:?} {alpha}"), [5, 3, 4], 3, |b| {
                let x = images(b, 3);
                let gate = b.another_input(Dims { c: 1, h: 1, w: 1 });
                let gate = (mode == BlendMode::Gate).then_some(gate);
                b.blend(mode, alpha, BlendOperands { host: x[0], module: x[1], input: x[2], gate })
            });
            // As in a fossilized module: its input is the host's value, and receives a gradient.
            check_op(&format!("{mode:?} {alpha} shared"), [5, 3, 4], 3, |b| {
                let x = b.input();
                let m = b.conv2d(x, "m", 5, ConvGeometry::same(3), true)?;
                let pooled = b.global_avg_pool(x);
                let gate = b.linear(pooled, "gate", 1, true, None)?;
                let gate = b.sigmoid(gate);
                let gate = (mode == BlendMode::Gate).then_some(gate);
                b.blend(mode, alpha, BlendOperands { host: x, module: m, input: x, gate })
            });
        }
    }
}

#[test]
fn straight_through_and_detach() {
    check_op("straight-through", [4, 3, 4], 3, |b| {
        let x = b.conv2d(b.input(), "host", 6, ConvGeometry::same(3), true)?;
        let d = b.detach(x);
        let m = b.conv2d(d, "module", 6, ConvGeometry::same(1), true)?;
        let m = b.add(d, m)?;
        let y = b.straight_through(x, m)?;
        let y = b.tanh(y);
        b.conv2d(y, "after", 2, ConvGeometry::same(1), false)
    });
    check_op("detach cuts", [4, 3, 4], 3, |b| {
        let x = b.conv2d(b.input(), "cut", 4, ConvGeometry::same(3), true)?;
        let d = b.detach(x);
        let y = b.conv2d(b.input(), "kept", 4, ConvGeometry::same(1), true)?;
        let y = b.add(d, y)?;
        Ok(b.relu(y))
    });
}

/// The norm receives the gradient of the pooling's input, the module the gradient of the pooling's
/// output; the gradient of the pooled value is shared with a branch that adds to it.
#[test]
fn straight_through_before_pooling() {
    for shared in [false, true] {
        check_op(&format!("straight-through, pool, shared {shared}"), [3, 7, 6], 3, |b| {
            let early = b.max_pool2d(b.input(), "early", 2, 2)?;
            let early = b.conv2d(early, "early", 5, ConvGeometry::same(1), true)?;
            let x = b.conv2d(b.input(), "host", 5, ConvGeometry::same(3), false)?;
            let x = b.batch_norm(x, "norm")?;
            let x = b.relu(x);
            let d = b.detach(x);
            let m = b.conv2d(d, "module", 5, ConvGeometry::same(3), true)?;
            let twice = b.tanh(early);
            let y = b.straight_through(x, m)?;
            let mut y = b.max_pool2d(y, "pool", 2, 2)?;
            if shared {
                y = b.add(y, early)?;
                let twice = b.sigmoid(twice);
                y = b.add(y, twice)?;
            }
            b.conv2d(y, "after", 2, ConvGeometry::same(1), false)
        });
    }
}

/// Rows of sequences, with resets in the middle; the state's gradient too.
#[test]
fn recurrent_layers() {
    let check = |name: &str, entries: usize, f: &dyn Fn(&mut GraphBuilder) -> Result<NodeId>| {
        let mut b = builder(5, 1, 1);
        let output = f(&mut b).unwrap();
        let graph = b.finish_at(output);
        for form in [[1, 1], [1, 3], [4, 1], [5, 3]] {
            let case = Case::sequences(graph.clone(), form, entries);
            check(&format!("{name} {form:?}"), &case);
        }
    };
    fn lstm(b: &mut GraphBuilder, x: NodeId, hidden: usize, name: &str) -> Result<NodeId> {
        let keep = b.another_input(Dims { c: 1, h: 1, w: 1 });
        let (keep, state) = (b.detach(keep), b.lstm_state(hidden));
        b.lstm(LstmNodes { x, keep, state }, name)
    }
    check("embedding", 3, &|b| {
        let indices = b.indices(4);
        b.embedding(indices, "e", 3, 2)
    });
    check("concat", 1, &|b| {
        let y = b.tanh(b.input());
        b.concat(&[y, b.input(), y])
    });
    check("layer_norm", 1, &|b| b.layer_norm(b.input(), "norm"));
    for hidden in [1, 3, 8] {
        check("lstm", 1, &|b| lstm(b, b.input(), hidden, "l"));
    }
    check("two residual lstms after an embedding", 4, &|b| {
        let indices = b.indices(2);
        let e = b.embedding(indices, "e", 4, 3)?;
        let mut x = b.concat(&[b.input(), e])?;
        for name in ["l0", "l1"] {
            let y = lstm(b, x, 11, name)?;
            let y = b.layer_norm(y, &format!("{name}.norm"))?;
            x = b.add(x, y)?;
        }
        let heads = [b.linear(x, "a", 3, true, None)?, b.linear(x, "b", 1, true, None)?];
        b.concat(&heads)
    });
}

/// A random graph: consecutive layers, branches that join, values that are read several times.
fn random_graph(seed: u64) -> Graph {
    let mut r = Random(seed);
    let mut b = builder(1 + r.below(5), 4 + r.below(3), 4 + r.below(3));
    let mut nodes = vec![b.input()];
    for i in 0..4 + r.below(7) {
        let name = format!("l{i}");
        let x = nodes[nodes.len() - 1 - r.below(nodes.len().min(3))];
        let d = b.dims(x);
        let same: Vec<NodeId> = nodes.iter().copied().filter(|n| b.dims(*n) == d).collect();
        let any = |r: &mut Random| same[r.below(same.len())];
        let (y, z) = (any(&mut r), any(&mut r));
        let node = match r.below(16) {
            0 | 1 => b.conv2d(x, &name, 1 + r.below(9), ConvGeometry::same(3), r.below(2) == 0),
            2 => {
                let geometry = ConvGeometry { groups: d.c, ..ConvGeometry::same(3) };
                b.conv2d(x, &name, d.c, geometry, false)
            }
            3 | 4 => {
                let y = b.conv2d(x, &name, 1 + r.below(9), ConvGeometry::same(1), false).unwrap();
                b.batch_norm(y, &format!("{name}n")).map(|y| b.relu(y))
            }
            5 => match r.below(3) {
                // Fewer channels may be nearly constant.
                0 if d.c >= 5 => b.layer_norm(x, &name),
                1 if d.c >= 5 => b.rms_norm(x, &name),
                _ => b.group_norm(x, &name, 1 + usize::from(d.c.is_multiple_of(2)), 1.0),
            },
            6 => Ok(b.relu(x)),
            7 => Ok(b.tanh(x)),
            8 => b.add(x, y),
            9 => b.tanh_mix(x, y, &name),
            10 if d.h >= 4 && d.w >= 4 => b.max_pool2d(x, &name, 2, 2),
            10 | 11 => {
                let s = b.global_avg_pool(y);
                let s = b.linear(s, &name, d.c, true, None).unwrap();
                let s = b.sigmoid(s);
                b.scale_channels(x, s, 2.0)
            }
            12 | 13 => match r.below(7) {
                0 => b.leaky_relu(x, 0.1),
                1 => Ok(b.elu(x)),
                2 => Ok(b.gelu(x)),
                3 => Ok(b.gelu_tanh(x)),
                4 => Ok(b.silu(x)),
                5 => Ok(b.softplus(x)),
                _ => Ok(b.hard_swish(x)),
            },
            14 => {
                let y = if r.below(2) == 0 { b.detach(y) } else { y };
                b.straight_through(x, y)
            }
            _ => {
                let mode = [BlendMode::Add, BlendMode::Multiply, BlendMode::Gate][r.below(3)];
                let gate = (mode == BlendMode::Gate).then(|| {
                    let g = b.global_avg_pool(z);
                    let g = b.linear(g, &name, 1, true, None).unwrap();
                    b.sigmoid(g)
                });
                b.blend(mode, r.below(3), BlendOperands { host: x, module: y, input: z, gate })
            }
        };
        nodes.push(node.unwrap());
    }
    let pooled = b.global_avg_pool(nodes[nodes.len() - 1]);
    let logits = b.linear(pooled, "head", 3, true, None).unwrap();
    b.finish(logits).unwrap()
}

#[test]
fn random_graphs() {
    for seed in 0..24 {
        check(&format!("random {seed}"), &Case::random(random_graph(seed), 3, seed));
    }
}

/// Values in evaluation mode, with running statistics.
#[test]
fn evaluation_of_random_graphs() {
    for seed in 0..60 {
        let case = Case::random(random_graph(seed), 3, seed);
        let (params, inputs) =
            (crate::common::reference::params(&case), crate::common::reference::inputs(&case));
        let values = crate::common::reference::forward(&case, &params, &inputs, false, None);
        for isa in Isa::available() {
            for fuse in [true, false] {
                let got = case.run(isa, PlanMode::Infer, fuse, &[]).unwrap();
                let expected = &values[case.graph.output.index()];
                assert_close(&format!("random {seed}"), &got.output, expected, RELATIVE, ABSOLUTE);
            }
        }
    }
}
