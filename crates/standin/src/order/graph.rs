//! Graphs: commands with the order between them.

use std::sync::Arc;

use super::point::Point;
use super::work::Work;
use crate::ground::Random;

/// A node: what it does, and the nodes before it, by place in the graph.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    /// Its handle.
    pub(crate) handle: u64,
    pub(crate) work: Work,
    pub(crate) after: Vec<usize>,
}

/// A graph that the host builds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
}

/// An executable graph.
#[derive(Debug)]
pub(crate) struct Exec {
    /// Number of its device.
    pub(crate) device: usize,
    /// A launch keeps the nodes that it was launched with.
    pub(crate) plan: Arc<Plan>,
    /// Its last launch: launches of one executable graph follow each other.
    pub(crate) last: Option<Point>,
}

/// Nodes of an executable graph, and the order between them.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) nodes: Vec<Node>,
    /// Nodes after each node.
    next: Vec<Vec<usize>>,
}

impl Plan {
    /// The plan of a graph; `None` if it has a circle.
    pub(crate) fn new(graph: &Graph) -> Option<Self> {
        let nodes = graph.nodes.clone();
        let mut next = vec![vec![]; nodes.len()];
        for (node, of) in nodes.iter().enumerate() {
            of.after.iter().for_each(|before| next[*before].push(node));
        }
        let plan = Self { nodes, next };
        let mut run = Run::new(Arc::new(plan.clone()));
        while run.advance(0).is_some() {}
        run.is_done().then_some(plan)
    }
}

/// A launch of a graph.
#[derive(Debug)]
pub(crate) struct Run {
    plan: Arc<Plan>,
    /// Nodes before each node that have not run.
    before: Vec<usize>,
    /// Nodes that may run.
    ready: Vec<usize>,
    /// Number of nodes that have run.
    done: usize,
}

impl Run {
    pub(crate) fn new(plan: Arc<Plan>) -> Self {
        let before: Vec<usize> = plan.nodes.iter().map(|node| node.after.len()).collect();
        let ready = (0..before.len()).filter(|node| before[*node] == 0).collect();
        Self { plan, before, ready, done: 0 }
    }

    /// Takes one of the nodes that may run; `None` if all have.
    pub(crate) fn take(&mut self, random: &mut Random) -> Option<Work> {
        let choices = self.ready.len().max(1);
        let node = self.advance(random.below(choices))?;
        Some(self.plan.nodes[node].work.clone())
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done == self.plan.nodes.len()
    }

    /// Takes the node at a place among those that may run.
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

    fn plan(after: &[&[usize]]) -> Option<Plan> {
        let node =
            |after: &&[usize]| Node { handle: 0, work: Work::Nothing, after: after.to_vec() };
        Plan::new(&Graph { nodes: after.iter().map(node).collect() })
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
        let mut random = Random::new(1, 0);
        let mut orders = std::collections::BTreeSet::new();
        for _ in 0..50 {
            let mut run = Run::new(Arc::clone(&plan));
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
