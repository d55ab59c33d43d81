//! Compiled plans, by topology, batch size, and mode or pattern of alphas.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::plan::{AlphaPattern, Mode, Plan, PlanOptions};

/// Topologies kept; the one used longest ago goes first.
const TOPOLOGIES_MAX: usize = 32;
/// Plans kept per topology: batch sizes are few (the full one and a remainder per split).
const PLANS_MAX: usize = 24;
/// Plans of many rows of alphas kept per topology: two batch sizes and the few patterns of an episode.
const ROW_PLANS_MAX: usize = 8;

/// A graph with its plans.
#[derive(Debug)]
struct Topology {
    graph: Arc<Graph>,
    plans: Vec<Arc<Plan>>,
    /// Plans of many rows of alphas; the one compiled first goes first.
    row_plans: Vec<(AlphaPattern, Arc<Plan>)>,
}

impl Topology {
    fn new(graph: Arc<Graph>) -> Self {
        Self { graph, plans: vec![], row_plans: vec![] }
    }
}

/// Plans of the current graph and of earlier ones.
#[derive(Debug)]
pub(super) struct Plans {
    /// The current topology is the last, the one used longest ago the first. Never empty.
    topologies: Vec<Topology>,
}

impl Plans {
    /// No plans yet.
    pub(super) fn new(graph: Arc<Graph>) -> Self {
        Self { topologies: vec![Topology::new(graph)] }
    }

    /// Makes a graph current; returns the one that was.
    pub(super) fn select(&mut self, graph: Arc<Graph>) -> Arc<Graph> {
        let before = self.topologies.last().map(|t| Arc::clone(&t.graph));
        let known = self.topologies.iter().position(|t| t.graph == graph);
        let fresh = || Topology::new(Arc::clone(&graph));
        let topology = known.map_or_else(fresh, |i| self.topologies.remove(i));
        if self.topologies.len() >= TOPOLOGIES_MAX {
            self.topologies.remove(0);
        }
        self.topologies.push(topology);
        before.unwrap_or(graph)
    }

    /// Compiles the current graph's plans of the largest batch; returns the arena they need.
    ///
    /// # Errors
    /// As [`Plan::compile`], but a batch that only training refuses is left to the training step.
    pub(super) fn prepare(&mut self, batch_max: usize) -> Result<usize> {
        let mut arena_len = self.get(batch_max, Mode::Evaluate)?.arena_len();
        match self.get(batch_max, Mode::Train) {
            Ok(plan) => arena_len = arena_len.max(plan.arena_len()),
            Err(Error::OneValuePerChannel { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(arena_len)
    }

    /// The plan of the current graph, compiled if it is not known.
    pub(super) fn get(&mut self, batch: usize, mode: Mode) -> Result<Arc<Plan>> {
        let options = PlanOptions::new(batch, mode);
        let Some(Topology { graph, plans, .. }) = self.topologies.last_mut() else {
            return Err(Error::EmptyBatch { batch }); // never: a graph is always current
        };
        if let Some(plan) = plans.iter().find(|p| p.options() == options) {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(Plan::compile(graph, options)?);
        if plans.len() >= PLANS_MAX {
            plans.remove(0);
        }
        plans.push(Arc::clone(&plan));
        Ok(plan)
    }

    /// The current graph's plan of all rows of such a table, compiled if it is not known.
    pub(super) fn rows(&mut self, batch: usize, pattern: &AlphaPattern) -> Result<Arc<Plan>> {
        let Some(Topology { graph, row_plans, .. }) = self.topologies.last_mut() else {
            return Err(Error::EmptyBatch { batch }); // never: a graph is always current
        };
        let same = |(of, plan): &&(AlphaPattern, Arc<Plan>)| {
            of == pattern && plan.options().batch == batch
        };
        if let Some((_, plan)) = row_plans.iter().find(same) {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(Plan::compile_rows(graph, pattern, batch)?);
        if row_plans.len() >= ROW_PLANS_MAX {
            row_plans.remove(0);
        }
        row_plans.push((pattern.clone(), Arc::clone(&plan)));
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Dims, GraphBuilder, SgdConfig};

    fn graph(features: usize) -> Arc<Graph> {
        let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };
        let mut b = GraphBuilder::new(Dims { c: features, h: 1, w: 1 }, sgd);
        let y = b.linear(b.input(), "fc", 2, true, None).unwrap();
        Arc::new(b.finish(y).unwrap())
    }

    #[test]
    fn a_known_topology_is_not_compiled_again() {
        let mut plans = Plans::new(graph(1));
        let first = plans.get(8, Mode::Train).unwrap();
        plans.select(graph(2));
        let other = plans.get(8, Mode::Train).unwrap();
        assert!(!Arc::ptr_eq(&first, &other));
        plans.select(graph(1)); // equal, not the same allocation
        assert!(Arc::ptr_eq(&first, &plans.get(8, Mode::Train).unwrap()));
        assert!(!Arc::ptr_eq(&first, &plans.get(7, Mode::Train).unwrap()));
    }

    #[test]
    fn the_oldest_topology_goes() {
        let mut plans = Plans::new(graph(1));
        let first = plans.get(1, Mode::Infer).unwrap();
        for features in 2..TOPOLOGIES_MAX + 2 {
            plans.select(graph(features));
        }
        assert_eq!(plans.topologies.len(), TOPOLOGIES_MAX);
        plans.select(graph(1));
        assert!(!Arc::ptr_eq(&first, &plans.get(1, Mode::Infer).unwrap()));
    }
}
