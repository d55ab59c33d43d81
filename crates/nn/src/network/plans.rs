//! Compiled plans, shared by all networks of a device: by topology, batch size, and mode or pattern
//! of alphas.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Result;
use crate::graph::Graph;
use crate::plan::{AlphaPattern, Plan, PlanOptions};

/// Largest number of topologies that are kept. Beyond it the least recently used topology is
/// dropped, among the topologies that no network has.
const TOPOLOGIES_MAX: usize = 64;
/// Plans kept per topology: batch sizes are few (the full one and a remainder per split).
const PLANS_MAX: usize = 24;
/// Plans of many rows of alphas kept per topology: two batch sizes and a few patterns, which follow
/// from the modules that are live. Only the subsets of an episode's last step vary from env to env.
const ROW_PLANS_MAX: usize = 24;

/// Compiled plans by topology. A handle: clones are the same plans. Networks that are made with the
/// same handle compile each topology once, and networks with equal plans can run as one (see
/// [`NetworkFleet`](super::NetworkFleet)). Each list keeps the plans that were used last.
#[derive(Clone, Debug, Default)]
pub struct Plans(Arc<Mutex<Vec<Arc<PlannedGraph>>>>);

impl Plans {
    /// The plans of a graph, shared with every network of the same topology
    /// ([`Graph::has_topology_of`]).
    pub(super) fn topology(&self, graph: &Arc<Graph>) -> Arc<PlannedGraph> {
        let mut all = lock(&self.0);
        let same = |of: &Arc<PlannedGraph>| {
            Arc::ptr_eq(&of.graph, graph) || of.graph.has_topology_of(graph)
        };
        let topology = match all.iter().position(same) {
            Some(known) => all.remove(known),
            None => Arc::new(PlannedGraph::new(graph)),
        };
        let unused = |of: &Arc<PlannedGraph>| Arc::strong_count(of) == 1;
        if all.len() >= TOPOLOGIES_MAX
            && let Some(oldest) = all.iter().position(unused)
        {
            all.remove(oldest);
        }
        all.push(Arc::clone(&topology));
        topology
    }
}

/// The first graph of a topology, with the plans of all graphs of this topology.
#[derive(Debug)]
pub(super) struct PlannedGraph {
    graph: Arc<Graph>,
    plans: Mutex<Recent<PlanOptions>>,
    rows: Mutex<Recent<RowPlan>>,
}

impl PlannedGraph {
    fn new(graph: &Arc<Graph>) -> Self {
        Self { graph: Arc::clone(graph), plans: Mutex::default(), rows: Mutex::default() }
    }

    /// The plan with these options, compiled if it is not known.
    ///
    /// # Errors
    /// As [`Plan::compile`].
    pub(super) fn plan(&self, options: PlanOptions) -> Result<Arc<Plan>> {
        lock(&self.plans)
            .plan(options, PLANS_MAX, |options| Plan::compile(&self.graph, options.clone()))
    }

    /// The plan of all rows of such a table of alphas, compiled if it is not known.
    ///
    /// # Errors
    /// As [`Plan::compile_rows`].
    pub(super) fn rows(&self, of: RowPlan) -> Result<Arc<Plan>> {
        lock(&self.rows).plan(of, ROW_PLANS_MAX, |of| {
            Plan::compile_rows(&self.graph, &of.pattern, of.options.clone())
        })
    }
}

/// A plan of many rows of alphas.
#[derive(Debug, PartialEq)]
pub(super) struct RowPlan {
    pub(super) options: PlanOptions,
    pub(super) pattern: AlphaPattern,
}

/// Plans by their options; the one used longest ago is the first.
#[derive(Debug)]
pub(super) struct Recent<K>(Vec<(K, Arc<Plan>)>);

impl<K> Default for Recent<K> {
    fn default() -> Self {
        Self(vec![])
    }
}

impl<K: PartialEq> Recent<K> {
    /// The plan of a key, compiled if it is not known; at most `most` are kept.
    pub(super) fn plan(
        &mut self,
        key: K,
        most: usize,
        compile: impl FnOnce(&K) -> Result<Plan>,
    ) -> Result<Arc<Plan>> {
        let (key, plan) = match self.0.iter().position(|(known, _)| *known == key) {
            Some(at) => self.0.remove(at),
            None => {
                let plan = Arc::new(compile(&key)?);
                (key, plan)
            }
        };
        if self.0.len() >= most {
            self.0.remove(0);
        }
        self.0.push((key, Arc::clone(&plan)));
        Ok(plan)
    }
}

/// Locks a list of plans. A panic while a plan was compiled leaves the list without this plan.
fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Dims, GraphBuilder, SgdConfig};
    use crate::plan::PlanMode;

    const SGD: SgdConfig = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };

    fn graph(features: usize) -> Arc<Graph> {
        let mut b = GraphBuilder::new(Dims { c: features, h: 1, w: 1 }, SGD);
        let y = b.linear(b.input(), "fc", 2, true, None).unwrap();
        Arc::new(b.finish(y).unwrap())
    }

    fn train(batch: usize) -> PlanOptions {
        PlanOptions::new(batch, PlanMode::Train)
    }

    #[test]
    fn a_known_topology_is_not_compiled_again() {
        let plans = Plans::default();
        let first = plans.topology(&graph(1)).plan(train(8)).unwrap();
        let other = plans.topology(&graph(2)).plan(train(8)).unwrap();
        assert!(!Arc::ptr_eq(&first, &other));
        let again = plans.clone().topology(&graph(1)); // equal, not the same allocation
        assert!(Arc::ptr_eq(&first, &again.plan(train(8)).unwrap()));
        assert!(!Arc::ptr_eq(&first, &again.plan(train(7)).unwrap()));
    }

    #[test]
    fn other_learning_rates_share_plans() {
        let plans = Plans::default();
        let mut other = Graph::clone(&graph(1));
        other.groups[0].optimiser = SgdConfig { lr: 0.2, momentum: 0.5, ..SGD }.into();
        let first = plans.topology(&graph(1)).plan(train(8)).unwrap();
        let again = plans.topology(&Arc::new(other)).plan(train(8)).unwrap();
        assert!(Arc::ptr_eq(&first, &again));
    }

    #[test]
    fn the_oldest_topology_that_nobody_has_goes() {
        let plans = Plans::default();
        let kept = plans.topology(&graph(1));
        let dropped = plans.topology(&graph(2)).plan(train(1)).unwrap();
        for features in 3..TOPOLOGIES_MAX + 2 {
            plans.topology(&graph(features));
        }
        assert_eq!(lock(&plans.0).len(), TOPOLOGIES_MAX);
        assert!(Arc::ptr_eq(&kept, &plans.topology(&graph(1))));
        assert!(!Arc::ptr_eq(&dropped, &plans.topology(&graph(2)).plan(train(1)).unwrap()));
    }
}
