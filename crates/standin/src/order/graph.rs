//! Graphs: operations with the order between them.

use std::sync::Arc;

use super::point::StreamPoint;
use super::work::DeviceWork;
use crate::ground::SeededRandom;

/// A node: its operation, and the indices of the nodes before it.
#[derive(Clone, Debug)]
pub(crate) struct GraphNode {
    /// Its handle.
    pub(crate) handle: u64,
    pub(crate) work: DeviceWork,
    pub(crate) after: Vec<usize>,
}

/// A graph that the host builds.
#[derive(Clone, Debug, Default)]
pub(crate) struct BuiltGraph {
    pub(crate) nodes: Vec<GraphNode>,
}

/// An executable graph.
#[derive(Debug)]
pub(crate) struct BuiltExec {
    /// Number of its device.
    pub(crate) device: usize,
    /// A launch keeps the nodes of its time, even if they are changed later.
    pub(crate) plan: Arc<GraphPlan>,
    /// Its last launch: launches of one executable graph follow each other.
    pub(crate) last: Option<StreamPoint>,
}

/// Nodes of an executable graph, and the order between them.
#[derive(Clone, Debug)]
pub(crate) struct GraphPlan {
    pub(crate) nodes: Vec<GraphNode>,
    /// Nodes after each node.
    next: Vec<Vec<usize>>,
}

impl GraphPlan {
    /// The plan of a graph; `None` if the graph has a cycle.
    pub(crate) fn new(graph: &BuiltGraph) -> Option<Self> {
        let nodes = graph.nodes.clone();
        let mut next = vec![vec![]; nodes.len()];
        for (node, of) in nodes.iter().enumerate() {
            of.after.iter().for_each(|before| next[*before].push(node));
        }
        let plan = Self { nodes, next };
        let mut run = GraphRun::new(Arc::new(plan.clone()));
        while run.advance(0).is_some() {}
        run.is_done().then_some(plan)
    }
}

/// A launch of a graph.
#[derive(Debug)]
pub(crate) struct GraphRun {
    plan: Arc<GraphPlan>,
    /// For each node, the number of predecessors that have not run.
    before: Vec<usize>,
    /// Nodes that may run.
    ready: Vec<usize>,
    /// Number of nodes that have run.
    done: usize,
}

impl GraphRun {
    pub(crate) fn new(plan: Arc<GraphPlan>) -> Self {
        let before: Vec<usize> = plan.nodes.iter().map(|node| node.after.len()).collect();
        let ready = (0..before.len()).filter(|node| before[*node] == 0).collect();
        Self { plan, before, ready, done: 0 }
    }

    /// Takes one of the nodes that may run; `None` if all have.
    pub(crate) fn take(&mut self, random: &mut SeededRandom) -> Option<DeviceWork> {
        let choices = self.ready.len().max(1);
        let node = self.advance(random.below(choices))?;
        Some(self.plan.nodes[node].work.clone())
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done == self.plan.nodes.len()
    }

    /// Number of nodes, which run one after another.
    pub(crate) fn len(&self) -> usize {
        self.plan.nodes.len()
    }

    /// Takes the node at an index in the list of nodes that may run.
    fn advance(&mut self, choice: usize) -> Option<usize> {
        if choice >= self.ready.len() {
            return None;
        }
        let node = self.ready.swap_remove(choice);
        self.done += 1;
        for next in &self.plan.next[node] {
            self.before[*next] -= 1;
            if self.before[*next] == 0 {
                self.ready.push(*next);
            }
        }
        Some(node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(after: &[&[usize]]) -> Option<GraphPlan> {
        let node = |after: &&[usize]| GraphNode {
            handle: 0,
            work: DeviceWork::Nothing,
            after: after.to_vec(),
        };
        GraphPlan::new(&BuiltGraph { nodes: after.iter().map(node).collect() })
    }

    #[test]
    fn a_circle_is_found() {
        assert!(plan(&[&[], &[0], &[0], &[1, 2]]).is_some());
        assert!(plan(&[&[1], &[]]).is_some());
        assert!(plan(&[&[], &[0, 2], &[1]]).is_none());
    }

    #[test]
    fn nodes_run_after_those_before_them_in_more_than_one_order() {
        let plan = Arc::new(plan(&[&[], &[0], &[0], &[1, 2]]).unwrap());
        let mut random = SeededRandom::new(1, 0);
        let mut orders = std::collections::BTreeSet::new();
        for _ in 0..50 {
            let mut run = GraphRun::new(Arc::clone(&plan));
            let mut order = vec![];
            while !run.is_done() {
                let choice = random.below(run.ready.len());
                order.push(run.advance(choice).unwrap());
            }
            assert!(order[0] == 0 && order[3] == 3, "{order:?}");
            assert_eq!(run.advance(0), None);
            orders.insert(order);
        }
        assert_eq!(orders.len(), 2);
    }
}
