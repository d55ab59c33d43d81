//! Fusion of nodes into units: convolution, batch norm, ReLU and 2×2 max pooling in a row, each
//! read by the next one only.

use super::{PlanMode, PlanOptions, chain};
use crate::graph::{ConvGeometry, Graph, NodeId, NodeOp, ParamKind, PoolGeometry, UnaryFunction};
use crate::kernels::conv::ConvShape;
use crate::ops::conv::ConvProduct;
use crate::ops::{PlanTarget, fused};

/// The pooling that units take.
const BY_TWO: PoolGeometry = PoolGeometry::square(2, 2);

/// Nodes that are lowered together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// One node.
    Node(NodeId),
    /// Batch norm with the nodes fused into it. Backward keeps the convolution's raw output and the
    /// batch's statistics.
    Norm(NormUnit),
    /// 2×2 max pooling after a `StraightThrough`, which keeps it out of its norm's unit.
    StraightPool {
        /// The pooling.
        pool: NodeId,
        /// Output of the norm's unit. Its gradient comes only from the pooling, so backward can run
        /// as for the whole unit. Sums then have the same order as without the module, and the host
        /// trains with the same bits.
        norm_output: NodeId,
    },
    /// Global average pooling and the linear layer after it, as one operation that also normalises
    /// its raw input (see [`NormUnit::on_load`]).
    Head {
        /// The pooling.
        pool: NodeId,
        /// The linear layer.
        linear: NodeId,
    },
}

/// A batch norm with its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NormUnit {
    /// Convolution before it, which also computes the statistics.
    pub(crate) conv: Option<NodeId>,
    /// The batch norm.
    pub(crate) norm: NodeId,
    /// ReLU after it.
    pub(crate) relu: bool,
    /// 2×2 max pooling after that.
    pub(crate) pool: bool,
    /// The last of these nodes.
    pub(crate) output: NodeId,
    /// Whether one fused operation computes convolution and norm, see
    /// [`ops::fused`](crate::ops::fused).
    pub(crate) fused_convolution: bool,
    /// Whether the unit's value is not stored: its only reader, a fused operation, normalises the
    /// convolution's raw output while loading it.
    pub(crate) on_load: bool,
    /// Whether the CPU computes the output again in the backward pass, where the gradient of the
    /// next convolution's weights reads it. That takes less time than keeping it in memory.
    pub(crate) again: bool,
}

impl Unit {
    /// The node that the unit computes.
    pub(crate) fn output(&self) -> NodeId {
        match self {
            Unit::Node(node) => *node,
            Unit::Norm(unit) => unit.output,
            Unit::StraightPool { pool, .. } => *pool,
            Unit::Head { linear, .. } => *linear,
        }
    }

    /// Nodes outside of the unit that it reads.
    pub(crate) fn inputs(&self, graph: &Graph) -> Vec<NodeId> {
        let first = match self {
            Unit::Node(node) => *node,
            Unit::Norm(unit) => unit.conv.unwrap_or(unit.norm),
            Unit::StraightPool { pool, .. } | Unit::Head { pool, .. } => *pool,
        };
        graph.nodes[first.index()].op.inputs()
    }

    /// The nodes that the unit computes, the last one first.
    pub(crate) fn nodes(&self, graph: &Graph) -> Vec<NodeId> {
        let mut nodes = vec![self.output()];
        if let Unit::Head { pool, .. } = self {
            nodes.push(*pool);
        }
        if let Unit::Norm(unit) = self {
            let first = unit.conv.unwrap_or(unit.norm);
            let mut node = unit.output;
            while node != first {
                node = graph.nodes[node.index()].op.inputs()[0];
                nodes.push(node);
            }
        }
        nodes
    }
}

/// The units of all nodes that the output needs, in execution order.
pub(crate) fn units(graph: &Graph, options: &PlanOptions) -> Vec<Unit> {
    let readers = readers(graph, &options.mode);
    let needed = |i: usize| i == graph.output.index() || !readers[i].is_empty();
    let mut taken = vec![false; graph.nodes.len()];
    let mut units: Vec<Unit> = vec![];
    // A norm unit is placed at its last node, so the norm nodes are looked at first.
    let mut at: Vec<Option<NormUnit>> = vec![None; graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate().filter(|(i, _)| needed(*i)) {
        if let NodeOp::BatchNorm { x, .. } = node.op {
            let unit = norm_unit(graph, &readers, options, NodeId(i), x);
            let inner = [unit.conv, Some(unit.norm)].into_iter().flatten();
            inner.for_each(|n| taken[n.index()] = true);
            if unit.pool
                && let NodeOp::MaxPool2d { x, .. } = graph.nodes[unit.output.index()].op
            {
                taken[x.index()] = true;
            }
            at[unit.output.index()] = Some(unit);
        }
    }
    let heads = if options.fuse && options.target == PlanTarget::Cuda {
        mark_fused_convolutions(graph, &readers, &mut at)
    } else {
        vec![]
    };
    heads.iter().for_each(|(pool, _)| taken[pool.index()] = true);
    for i in (0..graph.nodes.len()).filter(|&i| needed(i)) {
        if let Some(&(pool, linear)) = heads.iter().find(|(_, linear)| linear.index() == i) {
            units.push(Unit::Head { pool, linear });
            continue;
        }
        match at[i] {
            Some(unit) => units.push(Unit::Norm(unit)),
            None if taken[i] => {}
            None => {
                let pool = NodeId(i);
                let straight = straight_pool(graph, &readers, &at, pool).filter(|_| options.fuse);
                units.push(straight.map_or(Unit::Node(pool), |norm_output| Unit::StraightPool {
                    pool,
                    norm_output,
                }));
            }
        }
    }
    units
}

/// Marks the units that become fused convolutions, and among them the units with a norm that their
/// only reader computes: the next convolution, or a head. Returns the heads: pooling and linear
/// layer.
fn mark_fused_convolutions(
    graph: &Graph,
    readers: &[Vec<NodeId>],
    units: &mut [Option<NormUnit>],
) -> Vec<(NodeId, NodeId)> {
    for unit in units.iter_mut().flatten() {
        unit.fused_convolution = unit.relu && unit.conv.is_some_and(|conv| can_fuse(graph, conv));
    }
    let convs: Vec<(NodeId, bool)> = units
        .iter()
        .flatten()
        .filter_map(|unit| Some((unit.conv?, unit.fused_convolution)))
        .collect();
    let only_reader = |node: NodeId| match readers[node.index()][..] {
        [reader] if reader != node => Some(reader),
        _ => None,
    };
    // The linear layer that is a pooling's only reader.
    let linear = |pool: NodeId| {
        let linear =
            only_reader(pool).filter(|linear| convs.iter().all(|(conv, _)| conv != linear))?;
        match (&graph.nodes[pool.index()].op, &graph.nodes[linear.index()].op) {
            (NodeOp::GlobalAvgPool(_), NodeOp::Conv2d { weight, .. }) => {
                let kind = graph.params[weight.index()].kind;
                (kind == ParamKind::LinearWeight).then_some((pool, linear))
            }
            _ => None,
        }
    };
    let mut heads = vec![];
    for unit in units.iter_mut().flatten().filter(|unit| unit.fused_convolution) {
        let Some(reader) = only_reader(unit.output) else { continue };
        let head = linear(reader);
        unit.on_load = head.is_some() || convs.contains(&(reader, true));
        heads.extend(head);
    }
    heads
}

/// Whether a fused operation can compute the convolution.
fn can_fuse(graph: &Graph, conv: NodeId) -> bool {
    let unbiased = matches!(graph.nodes[conv.index()].op, NodeOp::Conv2d { bias: None, .. });
    conv_shape(graph, conv, 1)
        .is_some_and(|(shape, is_linear)| unbiased && !is_linear && fused::fits(&shape))
}

/// The norm unit's output that `pool` reads through a `StraightThrough`, if no gradient reaches it
/// by another way.
fn straight_pool(
    graph: &Graph,
    readers: &[Vec<NodeId>],
    units: &[Option<NormUnit>],
    pool: NodeId,
) -> Option<NodeId> {
    let op = |node: NodeId| &graph.nodes[node.index()].op;
    let &NodeOp::MaxPool2d { x: straight, window: BY_TWO } = op(pool) else { return None };
    let &NodeOp::StraightThrough { host, module } = op(straight) else { return None };
    let unit = units[host.index()].filter(|unit| unit.relu && !unit.pool)?;
    let only_pool = readers[straight.index()] == [pool];
    let detached = |r: &NodeId| *r == straight || matches!(op(*r), NodeOp::Detach(_));
    let alone = host != module && readers[host.index()].iter().all(detached);
    (only_pool && alone).then_some(unit.output)
}

/// Readers of each node's value, among the nodes that the output needs.
fn readers(graph: &Graph, mode: &PlanMode) -> Vec<Vec<NodeId>> {
    let mut readers: Vec<Vec<NodeId>> = vec![vec![]; graph.nodes.len()];
    for i in (0..=graph.output.index()).rev() {
        if i != graph.output.index() && readers[i].is_empty() {
            continue;
        }
        let op = &graph.nodes[i].op;
        let inputs = match op {
            // Without a backward pass the module is not needed: the value is the host's.
            NodeOp::StraightThrough { host, .. } if !mode.is_training() => vec![*host],
            op => op.inputs(),
        };
        for input in inputs {
            readers[input.index()].push(NodeId(i));
        }
    }
    // The caller, or the loss, reads the output.
    readers[graph.output.index()].push(graph.output);
    readers
}

fn norm_unit(
    graph: &Graph,
    readers: &[Vec<NodeId>],
    options: &PlanOptions,
    norm: NodeId,
    x: NodeId,
) -> NormUnit {
    let mut unit = NormUnit {
        conv: None,
        norm,
        relu: false,
        pool: false,
        output: norm,
        fused_convolution: false,
        on_load: false,
        again: false,
    };
    if !options.fuse {
        return unit;
    }
    let op = |node: NodeId| &graph.nodes[node.index()].op;
    let only_reader = |node: NodeId| match readers[node.index()][..] {
        [reader] if reader != node => Some(reader),
        _ => None,
    };
    if matches!(op(x), NodeOp::Conv2d { .. }) && only_reader(x) == Some(norm) {
        unit.conv = Some(x);
    }
    let Some(relu) =
        only_reader(norm).filter(|r| matches!(op(*r), NodeOp::Activation(UnaryFunction::Relu, _)))
    else {
        return unit;
    };
    unit = NormUnit { relu: true, output: relu, ..unit };
    let pools = |n: &NodeId| matches!(op(*n), NodeOp::MaxPool2d { window: BY_TWO, .. });
    if let Some(pool) = only_reader(relu).filter(pools) {
        return NormUnit { pool: true, output: pool, ..unit };
    }
    unit.again = options.mode.is_training()
        && only_reader(relu).is_some_and(|conv| recomputes_input(graph, options, conv));
    unit
}

/// Whether the backward pass of a convolution on the CPU may compute its large input again: in a
/// chain, which takes a block of images at a time.
fn recomputes_input(graph: &Graph, options: &PlanOptions, conv: NodeId) -> bool {
    let Some((shape, is_linear)) = conv_shape(graph, conv, options.batch) else { return false };
    let product = ConvProduct { shape, precision: options.precision, tiles: options.tiles(&shape) };
    let large = shape.input().len() * size_of::<f32>() > chain::BLOCK;
    options.target == PlanTarget::Cpu && !is_linear && product.goes_by_sample() && large
}

/// Shape of the convolution at a node over a batch, and whether it is a linear layer.
fn conv_shape(graph: &Graph, conv: NodeId, batch: usize) -> Option<(ConvShape, bool)> {
    let NodeOp::Conv2d { x, weight, geometry, .. } = graph.nodes[conv.index()].op else {
        return None;
    };
    let ConvGeometry { kernel, stride, padding, groups, dilation } = geometry;
    let (from, out_c) = (graph.nodes[x.index()].dims, graph.nodes[conv.index()].dims.c);
    let (in_c, in_h, in_w) = (from.c, from.h, from.w);
    let shape =
        ConvShape { batch, in_c, in_h, in_w, out_c, kernel, stride, padding, groups, dilation };
    Some((shape, graph.params[weight.index()].kind == ParamKind::LinearWeight))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{ConvGeometry, Dims, GraphBuilder, SgdConfig};

    const SGD: SgdConfig = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

    fn host(branch: bool, straight: bool) -> Graph {
        let mut b = GraphBuilder::new(Dims { c: 3, h: 8, w: 8 }, SGD);
        let x = b.conv2d(b.input(), "conv", 4, ConvGeometry::same(3), false).unwrap();
        let x = b.batch_norm(x, "bn").unwrap();
        let mut x = b.relu(x);
        if straight {
            let d = b.detach(x);
            let m = b.tanh(d);
            x = b.straight_through(x, m).unwrap();
        }
        let pooled = b.max_pool2d(x, "pool", 2, 2).unwrap();
        let mut y = b.global_avg_pool(pooled);
        if branch {
            let z = b.global_avg_pool(x);
            y = b.add(y, z).unwrap();
        }
        let y = b.linear(y, "fc", 2, true, None).unwrap();
        b.finish(y).unwrap()
    }

    fn norm_of(graph: &Graph, mode: PlanMode, fuse: bool) -> NormUnit {
        let options = PlanOptions { fuse, ..PlanOptions::new(2, mode) };
        let find = |u: &Unit| if let Unit::Norm(n) = u { Some(*n) } else { None };
        units(graph, &options).iter().find_map(find).unwrap()
    }

    #[test]
    fn a_whole_block_is_one_unit() {
        let unit = norm_of(&host(false, false), PlanMode::Train, true);
        let output = NodeId(4);
        let norm = NodeId(2);
        let conv = Some(NodeId(1));
        assert_eq!(
            unit,
            NormUnit {
                conv,
                norm,
                relu: true,
                pool: true,
                output,
                fused_convolution: false,
                on_load: false,
                again: false
            }
        );
        let options = PlanOptions::new(2, PlanMode::Train);
        assert_eq!(units(&host(false, false), &options).len(), 4); // input, block, pool, linear
    }

    #[test]
    fn a_second_reader_ends_the_chain() {
        let unit = norm_of(&host(true, false), PlanMode::Train, true);
        assert!(unit.relu && !unit.pool && unit.conv.is_some());
    }

    #[test]
    fn nothing_is_fused_when_switched_off() {
        let unit = norm_of(&host(false, false), PlanMode::Train, false);
        assert_eq!(
            unit,
            NormUnit {
                conv: None,
                norm: NodeId(2),
                relu: false,
                pool: false,
                output: NodeId(2),
                fused_convolution: false,
                on_load: false,
                again: false
            }
        );
    }

    #[test]
    fn pooling_behind_a_training_module_knows_its_norm() {
        let graph = host(false, true);
        let found = |graph: &Graph, mode| {
            let units = units(graph, &PlanOptions::new(2, mode));
            units.iter().any(|u| matches!(u, Unit::StraightPool { norm_output: NodeId(3), .. }))
        };
        assert!(found(&graph, PlanMode::Train));
        assert!(!found(&host(true, true), PlanMode::Train), "another reader of the value");
    }

    /// Two blocks and a classifier; a module after the first block's pooling is blended in.
    fn blocks(slot: bool) -> Graph {
        let mut b = GraphBuilder::new(Dims { c: 3, h: 8, w: 8 }, SGD);
        let mut x = b.input();
        for (i, c) in [(0, 4), (1, 8)] {
            x = b.conv2d(x, &format!("conv{i}"), c, ConvGeometry::same(3), false).unwrap();
            x = b.batch_norm(x, &format!("bn{i}")).unwrap();
            x = b.relu(x);
            x = b.max_pool2d(x, "pool", 2, 2).unwrap();
            if slot && i == 0 {
                let m = b.tanh(x);
                x = b.add(x, m).unwrap();
            }
        }
        let x = b.global_avg_pool(x);
        let y = b.linear(x, "fc", 2, true, None).unwrap();
        b.finish(y).unwrap()
    }

    #[test]
    fn only_a_fused_convolution_or_a_classifier_computes_its_input() {
        let found = |graph: &Graph, target| {
            let options = PlanOptions { target, ..PlanOptions::new(2, PlanMode::Train) };
            let units = units(graph, &options);
            let norms = units.iter().filter_map(|unit| match unit {
                Unit::Norm(unit) => Some((unit.fused_convolution, unit.on_load)),
                _ => None,
            });
            let heads = units.iter().filter(|unit| matches!(unit, Unit::Head { .. })).count();
            (norms.collect::<Vec<_>>(), heads)
        };
        let [bare, grown] = [false, true].map(blocks);
        assert_eq!(found(&bare, PlanTarget::Cuda), (vec![(true, true); 2], 1));
        assert_eq!(found(&grown, PlanTarget::Cuda), (vec![(true, false), (true, true)], 1));
        assert_eq!(found(&bare, PlanTarget::Cpu), (vec![(false, false); 2], 0));
        // The classifier's input has another reader.
        assert_eq!(found(&host(true, false), PlanTarget::Cuda), (vec![(true, false)], 0));
    }

    /// A norm between two convolutions, of `in_c` to `out_c` channels, the second of this kernel.
    fn between([in_c, out_c]: [usize; 2], kernel: usize, twice: bool) -> Graph {
        let mut b = GraphBuilder::new(Dims { c: 3, h: 16, w: 16 }, SGD);
        let x = b.conv2d(b.input(), "first", in_c, ConvGeometry::same(3), false).unwrap();
        let x = b.batch_norm(x, "bn").unwrap();
        let x = b.relu(x);
        let y = b.conv2d(x, "second", out_c, ConvGeometry::same(kernel), false).unwrap();
        let mut y = b.global_avg_pool(y);
        if twice {
            let z = b.global_avg_pool(x);
            y = b.add(y, z).unwrap();
        }
        let y = b.linear(y, "fc", 2, true, None).unwrap();
        b.finish(y).unwrap()
    }

    #[test]
    fn backward_computes_large_norms_again_before_a_convolution_that_goes_by_samples() {
        let again = |graph: &Graph, options: &PlanOptions| {
            let find = |u: &Unit| if let Unit::Norm(n) = u { Some(n.again) } else { None };
            units(graph, options).iter().find_map(find).unwrap()
        };
        let train = |batch| PlanOptions::new(batch, PlanMode::Train);
        // An image has 16·16·32 f32, which are 32 KiB.
        assert!(again(&between([32, 64], 1, false), &train(33)));
        assert!(!again(&between([32, 64], 1, false), &train(32)), "as large as a block");
        assert!(
            !again(&between([32, 64], 3, false), &train(33)),
            "filters of Winograd's filtering"
        );
        assert!(!again(&between([32, 32], 1, true), &train(33)), "another reader");
        let evaluation = PlanOptions::new(33, PlanMode::Evaluate);
        assert!(!again(&between([32, 64], 1, false), &evaluation), "no backward pass");
        let cuda = PlanOptions { target: PlanTarget::Cuda, ..train(33) };
        assert!(!again(&between([32, 64], 1, false), &cuda), "no chains");
        assert!(!again(&host(false, false), &train(4096)), "a pooled value is small");
    }

    #[test]
    fn evaluation_skips_a_straight_through_module() {
        let graph = host(false, true);
        let count = |mode| units(&graph, &PlanOptions::new(2, mode)).len();
        assert_eq!(count(PlanMode::Train), count(PlanMode::Evaluate) + 2); // detach and tanh
    }
}
