//! Many rows of alphas in one plan: values that rows share are computed once (C1, C3).
//!
//! Two rows agree in every value up to the first slot whose alphas differ, so the values of all
//! rows form a tree: a trie over the slots in forward order. The tree is built by value numbering:
//! a unit is computed once for each list of values that it reads. A module with alpha 0 is omitted,
//! because the blend's value then equals the host's, bit for bit. The plan of one row has the same
//! units, so every row's result equals the result of a separate pass, bit for bit (C2).
//!
//! The tree is walked depth first: values of one branch are dead when the next branch starts, and
//! the arena reuses their memory.

use std::collections::HashMap;

use super::builder::PlanBuilder;
use super::compile::{check_batch, finish};
use super::fuse::{self, Unit};
use super::value::ValueId;
use super::{Plan, PlanMode, PlanOptions, lower};
use crate::error::Result;
use crate::graph::{Graph, NodeId, NodeOp};
use crate::layout::ParamLayout;

/// Pattern of a table of alphas `[rows][slots]`: which are zero, and which are the same in several
/// rows. Their values stay in device memory: tables of one pattern share a plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AlphaPattern {
    rows: usize,
    slots: usize,
    /// `[rows][slots]`: 0 for an alpha of zero, else one more than the first row whose alpha in
    /// this slot has the same bits.
    classes: Vec<usize>,
}

/// Class of an alpha of zero: the module is left out.
const OFF: usize = 0;

impl AlphaPattern {
    /// The pattern of `rows` rows; `table` is `[rows][slots]`. A zero of either sign is off.
    pub(crate) fn from_table(table: &[f32], rows: usize) -> Self {
        let slots = table.len() / rows.max(1);
        let class = |at: usize| {
            let (slot, bits) = (at % slots, table[at].to_bits());
            let same = |row: &usize| table[row * slots + slot].to_bits() == bits;
            if table[at] == 0.0 { OFF } else { (0..rows).find(same).map_or(OFF, |row| row + 1) }
        };
        Self { rows, slots, classes: (0..rows * slots).map(class).collect() }
    }

    /// One row with every module on: the pattern of a pass that leaves no module out.
    pub(crate) fn all_on(slots: usize) -> Self {
        Self { rows: 1, slots, classes: vec![1; slots] }
    }

    fn class(&self, row: usize, slot: usize) -> usize {
        self.classes[row * self.slots + slot]
    }
}

/// One action of the walk over a tree. Values are numbered in the order in which they are computed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TreeVisit {
    /// Computes the next value.
    Compute {
        unit: Unit,
        /// Row of the table from which it takes its alpha, if it reads one; other rows with this
        /// value have the same alpha.
        row: usize,
        /// Values it reads.
        inputs: Vec<(NodeId, usize)>,
    },
    /// Adds the loss and the number of correct samples of a value, the logits, to the metrics of
    /// rows.
    Score { logits: usize, rows: Vec<usize> },
}

/// The whole tree, depth first.
fn tree(graph: &Graph, units: &[Unit], pattern: &AlphaPattern) -> Vec<TreeVisit> {
    let mut known: HashMap<(usize, usize, Vec<usize>), usize> = HashMap::new();
    let mut visits = vec![];
    for rows in leaves(graph, pattern) {
        let path = RowPath { graph, units, pattern, row: rows[0] };
        let mut values = vec![0; graph.nodes.len()];
        for at in path.needed() {
            let inputs: Vec<(NodeId, usize)> =
                path.inputs(at).into_iter().map(|x| (x, values[x.index()])).collect();
            let output = units[at].output().index();
            if path.same_as(at).is_some() {
                values[output] = inputs[0].1;
                continue;
            }
            let key = (at, path.class(at), inputs.iter().map(|(_, value)| *value).collect());
            let next = known.len();
            values[output] = *known.entry(key).or_insert_with(|| {
                visits.push(TreeVisit::Compute { unit: units[at], row: path.row, inputs });
                next
            });
        }
        visits.push(TreeVisit::Score { logits: values[graph.output.index()], rows });
    }
    visits
}

/// The rows in depth-first order of the slots; rows with equal alphas in all slots share a leaf.
/// The first leaf is the leaf of row 0, the reference of all comparisons.
fn leaves(graph: &Graph, pattern: &AlphaPattern) -> Vec<Vec<usize>> {
    let slot = |op: &NodeOp| if let NodeOp::Blend { alpha, .. } = op { Some(*alpha) } else { None };
    let slots: Vec<usize> = graph.nodes.iter().filter_map(|node| slot(&node.op)).collect();
    let key = |row: usize| slots.iter().map(move |slot| pattern.class(row, *slot));
    let mut rows: Vec<usize> = (0..pattern.rows).collect();
    rows.sort_by(|a, b| key(*a).cmp(key(*b)));
    let leaves = rows.chunk_by(|a, b| key(*a).eq(key(*b)));
    let mut leaves: Vec<Vec<usize>> = leaves.map(<[usize]>::to_vec).collect();
    if let Some(first) = leaves.iter().position(|rows| rows.contains(&0)) {
        leaves[..=first].rotate_right(1);
    }
    leaves
}

/// The path of one row through a graph.
struct RowPath<'a> {
    graph: &'a Graph,
    units: &'a [Unit],
    pattern: &'a AlphaPattern,
    row: usize,
}

impl RowPath<'_> {
    fn op(&self, at: usize) -> Option<&NodeOp> {
        match self.units[at] {
            Unit::Node(node) => Some(&self.graph.nodes[node.index()].op),
            Unit::Norm(_) | Unit::StraightPool { .. } | Unit::Head { .. } => None,
        }
    }

    /// The class of the alpha that a unit reads.
    fn class(&self, at: usize) -> usize {
        match self.op(at) {
            Some(NodeOp::Blend { alpha, .. }) => self.pattern.class(self.row, *alpha),
            _ => OFF,
        }
    }

    /// The node that a unit passes through unchanged.
    fn same_as(&self, at: usize) -> Option<NodeId> {
        match *self.op(at)? {
            NodeOp::Detach(x) => Some(x),
            NodeOp::StraightThrough { host, .. } => Some(host),
            NodeOp::Blend { inputs, .. } if self.class(at) == OFF => Some(inputs.host),
            _ => None,
        }
    }

    fn inputs(&self, at: usize) -> Vec<NodeId> {
        self.same_as(at).map_or_else(|| self.units[at].inputs(self.graph), |x| vec![x])
    }

    /// The units that the output needs, in execution order.
    fn needed(&self) -> Vec<usize> {
        let mut needed = vec![false; self.graph.nodes.len()];
        needed[self.graph.output.index()] = true;
        let mut path = vec![];
        for at in (0..self.units.len()).rev() {
            if needed[self.units[at].output().index()] {
                self.inputs(at).into_iter().for_each(|x| needed[x.index()] = true);
                path.push(at);
            }
        }
        path.reverse();
        path
    }
}

impl Plan {
    /// Compiles the evaluation of all rows of a table of alphas: forward with running statistics,
    /// loss and metrics for each row. The plan reads the whole table; the loss of row k goes to row
    /// k of [`Space::Scores`](crate::space::Space::Scores), counted from the first row of the run.
    /// The mode in `options` is ignored.
    ///
    /// # Errors
    /// [`Error::EmptyBatch`](crate::Error::EmptyBatch) for a batch of no samples or a graph with an
    /// empty value;
    /// [`Error::BatchTooLarge`](crate::Error::BatchTooLarge).
    pub(crate) fn compile_rows(
        graph: &Graph,
        pattern: &AlphaPattern,
        options: PlanOptions,
    ) -> Result<Self> {
        let (graph, batch) = (&*graph.without_idle_dropout(false), options.batch);
        check_batch(graph, batch)?;
        let layout = ParamLayout::new(graph);
        let options = PlanOptions { mode: PlanMode::Evaluate, ..options };
        let mut b = PlanBuilder::new(graph, &layout, options);
        let mut values: Vec<ValueId> = vec![];
        let reference = b.arena(batch);
        for visit in tree(graph, &fuse::units(graph, &b.options), pattern) {
            match visit {
                TreeVisit::Compute { unit, row, inputs } => {
                    inputs.iter().for_each(|(node, value)| b.bind(*node, values[*value]));
                    b.read_alphas_of(row);
                    lower::forward(&mut b, &unit)?;
                    values.push(b.node(unit.output()));
                }
                TreeVisit::Score { logits, rows } => {
                    b.bind(graph.output, values[logits]);
                    lower::train::score(&mut b, &rows, reference);
                }
            }
        }
        Ok(finish(b, None))
    }
}

/// Floating-point operations per sample ([`Graph::flops`]) of evaluating the rows of a pattern in
/// one plan. [`AlphaPattern::all_on`] gives the cost of a pass without sharing.
pub(crate) fn flops(graph: &Graph, pattern: &AlphaPattern) -> u64 {
    let graph = &*graph.without_idle_dropout(false);
    let options = PlanOptions::new(1, PlanMode::Evaluate);
    let of_visit = |visit: TreeVisit| match visit {
        TreeVisit::Compute { unit, .. } => {
            unit.nodes(graph).into_iter().map(|node| graph.flops(node)).sum()
        }
        TreeVisit::Score { .. } => 0,
    };
    tree(graph, &fuse::units(graph, &options), pattern).into_iter().map(of_visit).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::graph::{BlendMode, BlendOperands, ConvGeometry, Dims, GraphBuilder, SgdConfig};

    const SGD: SgdConfig = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

    /// Contents of a slot of a test host.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum TestSlot {
        Empty,
        Straight,
        Blended { mode: BlendMode, detached: bool },
    }

    fn module(b: &mut GraphBuilder, at: usize, x: NodeId, slot: TestSlot) -> NodeId {
        let (mode, detached) = match slot {
            TestSlot::Empty => return x,
            TestSlot::Straight => (BlendMode::Add, true),
            TestSlot::Blended { mode, detached } => (mode, detached),
        };
        let (c, input) = (b.dims(x).c, if detached { b.detach(x) } else { x });
        let y = b.conv2d(input, &format!("m{at}"), c, ConvGeometry::same(1), false).unwrap();
        let y = b.relu(y);
        let m = b.add(input, y).unwrap();
        if slot == TestSlot::Straight {
            return b.straight_through(x, m).unwrap();
        }
        let gate = (mode == BlendMode::Gate).then(|| {
            let g = b.global_avg_pool(input);
            b.linear(g, &format!("g{at}"), 1, true, None).unwrap()
        });
        b.blend(mode, at, BlendOperands { host: x, module: m, input, gate }).unwrap()
    }

    /// Two slots a block, before and after the pool, in forward order.
    fn host(slots: &[TestSlot]) -> Graph {
        let mut b = GraphBuilder::new(Dims { c: 1, h: 8, w: 8 }, SGD);
        let mut x = b.input();
        for (i, pair) in slots.chunks(2).enumerate() {
            x = b.conv2d(x, &format!("c{i}"), 2, ConvGeometry::same(3), false).unwrap();
            x = b.batch_norm(x, &format!("b{i}")).unwrap();
            x = b.relu(x);
            x = module(&mut b, 2 * i, x, pair[0]);
            x = b.max_pool2d(x, &format!("p{i}"), 2, 2).unwrap();
            x = module(&mut b, 2 * i + 1, x, pair[1]);
        }
        let x = b.global_avg_pool(x);
        let y = b.linear(x, "fc", 3, true, None).unwrap();
        b.finish(y).unwrap()
    }

    fn slot() -> impl Strategy<Value = TestSlot> {
        let mode =
            prop_oneof![Just(BlendMode::Add), Just(BlendMode::Multiply), Just(BlendMode::Gate)];
        let blended = (mode, any::<bool>());
        prop_oneof![
            Just(TestSlot::Empty),
            Just(TestSlot::Straight),
            blended.clone().prop_map(|(mode, detached)| TestSlot::Blended { mode, detached }),
            blended.prop_map(|(mode, detached)| TestSlot::Blended { mode, detached }),
        ]
    }

    fn alpha() -> impl Strategy<Value = f32> {
        prop_oneof![Just(0.0), Just(-0.0), Just(0.5), Just(1.0)]
    }

    /// Modules, with their alphas, that a node's value depends on in one row; `None` if the row
    /// does not need it. Computed directly from the graph, node by node.
    fn dependencies(graph: &Graph, alphas: &[f32]) -> Vec<Option<BTreeMap<usize, u32>>> {
        fn visit(
            graph: &Graph,
            alphas: &[f32],
            node: NodeId,
            done: &mut Vec<Option<BTreeMap<usize, u32>>>,
        ) -> BTreeMap<usize, u32> {
            let mut all = BTreeMap::new();
            let inputs = match graph.nodes[node.index()].op {
                NodeOp::StraightThrough { host, .. } => vec![host],
                NodeOp::Blend { inputs, alpha, .. } if alphas[alpha] == 0.0 => vec![inputs.host],
                NodeOp::Blend { alpha, .. } => {
                    all.insert(alpha, alphas[alpha].to_bits());
                    graph.nodes[node.index()].op.inputs()
                }
                ref op => op.inputs(),
            };
            for input in inputs {
                all.extend(visit(graph, alphas, input, done));
            }
            done[node.index()] = Some(all.clone());
            all
        }
        let mut done = vec![None; graph.nodes.len()];
        visit(graph, alphas, graph.output, &mut done);
        done
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// Every value is computed once for each group of rows in which it differs.
        #[test]
        fn the_tree_is_what_brute_force_finds(
            (slots, table) in (1usize..4, 1usize..9).prop_flat_map(|(blocks, rows)| {
                let slots = proptest::collection::vec(slot(), 2 * blocks);
                let table = proptest::collection::vec(alpha(), 2 * blocks * rows);
                (slots, table)
            }),
        ) {
            let mut graph = host(&slots);
            graph.alphas = slots.len();
            let rows = table.len() / slots.len();
            let mut expected: BTreeSet<(usize, Vec<(usize, u32)>)> = BTreeSet::new();
            let mut leaves: BTreeSet<Vec<(usize, u32)>> = BTreeSet::new();
            let units = fuse::units(&graph, &PlanOptions::new(1, PlanMode::Evaluate));
            for alphas in table.chunks(slots.len()) {
                let found = dependencies(&graph, alphas);
                let of = |node: usize| {
                    found[node].clone().map(|d| d.into_iter().collect::<Vec<_>>())
                };
                leaves.extend(of(graph.output.index()));
                for node in units.iter().map(|unit| unit.output().index()) {
                    let passes = match graph.nodes[node].op {
                        NodeOp::Detach(_) | NodeOp::StraightThrough { .. } => true,
                        NodeOp::Blend { alpha, .. } => alphas[alpha] == 0.0,
                        _ => false,
                    };
                    if let (Some(depends), false) = (of(node), passes) {
                        expected.insert((node, depends));
                    }
                }
            }
            let visits = tree(&graph, &units, &AlphaPattern::from_table(&table, rows));
            let computed = visits.iter().filter(|v| matches!(v, TreeVisit::Compute { .. })).count();
            prop_assert_eq!(computed, expected.len());
            prop_assert_eq!(visits.len() - computed, leaves.len());
            let mut scored: Vec<usize> = visits.iter().flat_map(|visit| match visit {
                TreeVisit::Score { rows, .. } => rows.clone(),
                TreeVisit::Compute { .. } => vec![],
            }).collect();
            scored.sort_unstable();
            prop_assert_eq!(scored, (0..rows).collect::<Vec<_>>());
            let options = PlanOptions::new(2, PlanMode::Evaluate);
            Plan::compile_rows(&graph, &AlphaPattern::from_table(&table, rows), options).unwrap();
        }
    }

    /// Rows in which each of three slots is on or off.
    fn all_subsets() -> (Graph, AlphaPattern) {
        let add = TestSlot::Blended { mode: BlendMode::Add, detached: true };
        let mut graph = host(&[add, TestSlot::Empty, add, TestSlot::Empty, add, TestSlot::Empty]);
        graph.alphas = 6;
        let on = |row: usize, slot: usize| {
            f32::from(slot.is_multiple_of(2) && row >> (slot / 2) & 1 == 1)
        };
        let table: Vec<f32> = (0..8).flat_map(|row| (0..6).map(move |s| on(row, s))).collect();
        (graph, AlphaPattern::from_table(&table, 8))
    }

    #[test]
    fn subsets_of_three_modules_double_the_work_at_each_slot() {
        let (graph, pattern) = all_subsets();
        let units = fuse::units(&graph, &PlanOptions::new(1, PlanMode::Evaluate));
        let mut computed: BTreeMap<String, usize> = BTreeMap::new();
        for visit in tree(&graph, &units, &pattern) {
            let TreeVisit::Compute { unit, .. } = visit else { continue };
            let weight = unit.nodes(&graph).into_iter().find_map(|node| {
                match graph.nodes[node.index()].op {
                    NodeOp::Conv2d { weight, .. } => Some(weight),
                    _ => None,
                }
            });
            if let Some(weight) = weight {
                *computed.entry(graph.params[weight.index()].name.clone()).or_default() += 1;
            }
        }
        let expected = [
            ("c0.weight", 1),
            ("c1.weight", 2),
            ("c2.weight", 4),
            ("fc.weight", 8),
            ("m0.weight", 1),
            ("m2.weight", 2),
            ("m4.weight", 4),
        ];
        assert_eq!(computed, expected.map(|(name, n)| (name.to_owned(), n)).into());
        // Eight full passes compute every layer eight times.
        let (shared, one) = (flops(&graph, &pattern), flops(&graph, &AlphaPattern::all_on(6)));
        assert!(shared < 3 * one, "{shared} {one}");
        assert_eq!(
            flops(&graph, &AlphaPattern::from_table(&[0.5; 60], 10)),
            one,
            "equal rows cost one"
        );
    }

    /// Depth first, a branch leaves only the value at its slot.
    #[test]
    fn branches_hand_their_memory_on() {
        let (graph, pattern) = all_subsets();
        let one = Plan::compile(&graph, PlanOptions::new(16, PlanMode::Evaluate)).unwrap();
        let tree =
            Plan::compile_rows(&graph, &pattern, PlanOptions::new(16, PlanMode::Evaluate)).unwrap();
        let at_slots: usize = [8, 4, 2].iter().map(|side| 16 * 2 * side * side).sum();
        let (tree, most) = (tree.arena_len(), one.arena_len() + at_slots);
        assert!(tree <= most, "{tree} elements, expected at most {most}");
    }
}
