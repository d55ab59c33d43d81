//! Alpha configurations whose scores measure the contribution of each module (`docs/growth.md`,
//! Contributions).
//!
//! A configuration turns some of the measured modules off; all other modules keep their alpha. A
//! row has the alphas of one configuration. Configurations with the same modules on share a row:
//! with two modules, for instance, "first off" equals "second alone".

use meristem_device::random::Rng;
use meristem_nn::{EvalMetrics, PairedLoss, Score};
use serde::{Deserialize, Serialize};

use crate::host::Host;
use crate::lifecycle::{Slot, Stage};

/// Largest number of modules for which every step evaluates all subsets. Main, solo-offs, solo-ons,
/// pairs and all-off then cover every subset.
const SUBSETS_MAX_MODULES: usize = 4;

/// Number of orders sampled at the last step of an episode with more than four modules. In each
/// order the modules are switched on one after another; every second order is the reverse of its
/// predecessor.
pub const PERMUTATIONS: usize = 8;

/// The modules whose contribution is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModuleScope {
    /// Modules in Blending or Holding with alpha above 0, and joint modules in Training: during an
    /// episode.
    Live,
    /// Fossilized modules as well: for the final report.
    All,
}

/// A configuration of the measured modules; modules outside the [`ModuleScope`] keep their alpha.
/// The numbers of `SoloOff`, `SoloOn` and `Pair` are slot indices; the two of a pair are in
/// ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Configuration {
    /// All measured modules at their current alpha.
    Main,
    /// All measured modules except one.
    SoloOff(usize),
    /// Only one measured module.
    SoloOn(usize),
    /// Only two measured modules.
    Pair(usize, usize),
    /// No measured module.
    AllOff,
    /// The fossilized modules without the live ones. With [`ModuleScope::Live`] it has the row of
    /// `AllOff`.
    Committed,
    /// The first measured modules of an order.
    Prefix {
        /// Index of the order.
        permutation: usize,
        /// Number of modules that are on.
        modules: usize,
    },
}

/// Set of measured modules that are on: bit i for module i.
type Coalition = u64;

/// Effect of one module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contribution {
    /// Index of the module's slot.
    pub slot: usize,
    /// Score without the module, at most 1; R² may be negative.
    pub score_without: f64,
    /// Score with the module minus score without it, in percentage points. Scores below 0 count as
    /// 0.
    pub score_pp: f64,
    /// Mean loss without the module minus mean loss with it, paired by image.
    pub loss: Option<PairedLoss>,
}

/// Joint effect of two modules minus the sum of their single effects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interaction {
    /// Indices of the two slots.
    pub slots: [usize; 2],
    /// `acc(ij) − acc(i) − acc(j) + acc(none)` in percentage points; positive for modules that
    /// reinforce each other.
    pub pp: f64,
}

/// Configurations to evaluate in one pass, with their rows of alphas. Row 0 is
/// [`Configuration::Main`].
#[derive(Clone, Debug, PartialEq)]
pub struct Counterfactual {
    /// The host's current alphas.
    main: Vec<f32>,
    /// Slots of the measured modules.
    modules: Vec<usize>,
    /// Each configuration with its row.
    configurations: Vec<(Configuration, usize)>,
    /// Modules that are on, per row.
    coalitions: Vec<Coalition>,
    /// `[rows][slots]`.
    rows: Vec<Vec<f32>>,
    /// Orders, as positions in `modules`.
    permutations: Vec<Vec<usize>>,
}

impl Counterfactual {
    /// Main, and for each module in `scope` a configuration in which only this module is off.
    pub fn leave_one_out(host: &Host, scope: ModuleScope) -> Self {
        let mut all = Self::main(host, scope);
        for i in 0..all.modules.len() {
            all.add(Configuration::SoloOff(all.modules[i]), all.full() & !(1 << i));
        }
        all
    }

    /// The configurations of a step with n live modules: main, each module off, each alone, all off
    /// (n ≥ 2), pairs (3 ≤ n ≤ 4), and committed (n ≥ 1).
    pub fn for_step(host: &Host) -> Self {
        let mut all = Self::leave_one_out(host, ModuleScope::Live);
        let n = all.modules.len();
        for i in 0..n {
            all.add(Configuration::SoloOn(all.modules[i]), 1 << i);
        }
        if n >= 2 {
            all.add(Configuration::AllOff, 0);
        }
        if (3..=SUBSETS_MAX_MODULES).contains(&n) {
            for (i, j) in pairs(n) {
                let pair = Configuration::Pair(all.modules[i], all.modules[j]);
                all.add(pair, 1 << i | 1 << j);
            }
        }
        if n >= 1 {
            all.add(Configuration::Committed, 0);
        }
        all
    }

    /// The configurations of [`Counterfactual::for_step`], with further ones for Shapley values if
    /// there are more than four modules. These are the prefixes of [`PERMUTATIONS`] orders drawn
    /// from `random`. Every second order is the reverse of its predecessor (antithetic sampling:
    /// the errors of the two have opposite signs).
    pub fn for_last_step(host: &Host, random: &mut Rng) -> Self {
        let mut all = Self::for_step(host);
        let n = all.modules.len();
        if n <= SUBSETS_MAX_MODULES {
            return all;
        }
        for permutation in 0..PERMUTATIONS {
            let mut order: Vec<usize> = (0..n).collect();
            match all.permutations.last() {
                Some(last) if permutation % 2 == 1 => order = last.iter().rev().copied().collect(),
                _ => random.shuffle(&mut order),
            }
            let mut on = 0;
            for (i, module) in order[..n - 1].iter().enumerate() {
                on |= 1 << module;
                all.add(Configuration::Prefix { permutation, modules: i + 1 }, on);
            }
            all.permutations.push(order);
        }
        all
    }

    /// Largest number of rows for a host with n = `slots` slots. Up to four slots: all subsets.
    /// With more slots: 2 (n + 1) rows for a step, and n − 3 for each order at the last step; the
    /// other prefixes of an order are already among the step's rows.
    pub fn rows_max(slots: usize) -> usize {
        match slots {
            0..=SUBSETS_MAX_MODULES => 1 << slots,
            n => 2 * n + 2 + PERMUTATIONS * (n - 3),
        }
    }

    fn main(host: &Host, scope: ModuleScope) -> Self {
        let main = host.alphas();
        let measured = |(index, slot): (usize, &Slot)| {
            let is_measured = match slot.stage {
                // In Training only a joint module has an alpha above 0.
                Stage::Training | Stage::Blending | Stage::Holding => main[index] > 0.0,
                Stage::Fossilized => scope == ModuleScope::All,
                _ => false,
            };
            is_measured.then_some(index)
        };
        let modules = host.slots().iter().enumerate().filter_map(measured).collect();
        let (configurations, coalitions, rows, permutations) = (vec![], vec![], vec![], vec![]);
        let mut all = Self { main, modules, configurations, coalitions, rows, permutations };
        all.add(Configuration::Main, all.full());
        all
    }

    /// The set of all measured modules.
    fn full(&self) -> Coalition {
        (1 << self.modules.len()) - 1
    }

    /// Adds a configuration. A row with the same modules on is shared.
    fn add(&mut self, configuration: Configuration, on: Coalition) {
        let row = self.row_with(on).unwrap_or_else(|| {
            let mut row = self.main.clone();
            for (i, &slot) in self.modules.iter().enumerate() {
                if on >> i & 1 == 0 {
                    row[slot] = 0.0;
                }
            }
            self.coalitions.push(on);
            self.rows.push(row);
            self.rows.len() - 1
        });
        self.configurations.push((configuration, row));
    }

    fn row_with(&self, on: Coalition) -> Option<usize> {
        self.coalitions.iter().position(|coalition| *coalition == on)
    }

    /// The configurations with their rows, in order of addition.
    pub fn configurations(&self) -> &[(Configuration, usize)] {
        &self.configurations
    }

    /// The row of a configuration; `None` if the configuration is absent.
    pub fn row_of(&self, configuration: Configuration) -> Option<usize> {
        self.configurations.iter().find(|(added, _)| *added == configuration).map(|(_, row)| *row)
    }

    /// Alphas `[rows][slots]`, without duplicate rows.
    pub fn rows(&self) -> &[Vec<f32>] {
        &self.rows
    }

    /// Indices of the slots of the measured modules.
    pub fn modules(&self) -> &[usize] {
        &self.modules
    }

    /// Indices of the slots whose measured modules are on in a row.
    pub fn on(&self, row: usize) -> impl Iterator<Item = usize> {
        let on = self.coalitions.get(row).copied().unwrap_or(0);
        let is_on = move |(i, slot): (usize, &usize)| (on >> i & 1 == 1).then_some(*slot);
        self.modules.iter().enumerate().filter_map(is_on)
    }

    /// Score of the row with exactly these modules on; `None` for a missing row or a score
    /// that is not finite.
    fn score(&self, scores_pp: &[f64], on: Coalition) -> Option<f64> {
        scores_pp.get(self.row_with(on)?).copied().filter(|score| score.is_finite())
    }

    /// Contribution of each measured module. `rows` has the metrics of each row of alphas, in the
    /// order of [`Counterfactual::rows`]. A module is left out if one of its two rows is missing or
    /// has no score.
    pub fn contributions(&self, rows: &[EvalMetrics], score: Score) -> Vec<Contribution> {
        let of_module = |(i, &slot): (usize, &usize)| {
            let (main, off) = (rows.first()?, rows.get(self.row_with(self.full() & !(1 << i))?)?);
            let score_without = off.score(score)?;
            // Subtracted first, then scaled by 100: the other order rounds differently.
            let counted = |metrics: &EvalMetrics| Some(metrics.score(score)?.clamp(0.0, 1.0));
            let score_pp = 100.0 * (counted(main)? - counted(off)?);
            Some(Contribution { slot, score_without, score_pp, loss: off.loss_over(main) })
        };
        self.modules.iter().enumerate().filter_map(of_module).collect()
    }

    /// Interaction of each pair of modules whose four scores were measured, in slot order.
    /// `scores_pp` has the score of each row of alphas, in percentage points. With two to four
    /// modules these are all pairs.
    pub fn interactions_pp(&self, scores_pp: &[f64]) -> Vec<Interaction> {
        let score = |on| self.score(scores_pp, on);
        let interaction = |(i, j): (usize, usize)| {
            let (both, none) = (score(1 << i | 1 << j)?, score(0)?);
            let pp = both - score(1 << i)? - score(1 << j)? + none;
            Some(Interaction { slots: [self.modules[i], self.modules[j]], pp })
        };
        pairs(self.modules.len()).filter_map(interaction).collect()
    }

    /// Sum of the interactions of each slot's module with all other modules, in percentage points:
    /// `[slots]`, `None` without a measured interaction. `scores_pp` is as in
    /// [`Counterfactual::interactions_pp`].
    pub fn interaction_sums_pp(&self, scores_pp: &[f64]) -> Vec<Option<f32>> {
        let mut sums: Vec<Option<f64>> = vec![None; self.main.len()];
        for Interaction { slots, pp } in self.interactions_pp(scores_pp) {
            slots.into_iter().for_each(|slot| *sums[slot].get_or_insert(0.0) += pp);
        }
        sums.into_iter().map(|sum| sum.map(|sum| sum as f32)).collect()
    }

    /// Shapley values in percentage points, `[slots]`. The value of a module is the mean gain in
    /// score when it is switched on, over all orders of the modules (Shapley, "A value for n-person
    /// games", 1953). The values sum to the score with all modules minus the score with none.
    ///
    /// Exact for up to four modules; beyond that the mean over the orders of
    /// [`Counterfactual::for_last_step`]. `None` for slots that are not measured, and for all slots
    /// if a score is missing or not finite. `scores_pp` is as in
    /// [`Counterfactual::interactions_pp`].
    pub fn shapley_pp(&self, scores_pp: &[f64]) -> Vec<Option<f64>> {
        let n = self.modules.len();
        let values = match n {
            0..=SUBSETS_MAX_MODULES => self.shapley_of_subsets(scores_pp),
            _ => self.shapley_of_orders(scores_pp),
        };
        let mut per_slot = vec![None; self.main.len()];
        for (&slot, value) in self.modules.iter().zip(values.unwrap_or_default()) {
            per_slot[slot] = Some(value);
        }
        per_slot
    }

    /// `Σ_S |S|!·(n − |S| − 1)!/n!·(v(S ∪ i) − v(S))` over all S without i.
    fn shapley_of_subsets(&self, scores_pp: &[f64]) -> Option<Vec<f64>> {
        let n = self.modules.len();
        let factorial = |k: usize| (1..=k).product::<usize>() as f64;
        let weight = |others: u32| {
            let others = others as usize;
            factorial(others) * factorial(n - others - 1) / factorial(n)
        };
        let mut values = vec![0.0; n];
        for (i, value) in values.iter_mut().enumerate() {
            for others in (0..1 << n).filter(|others| others >> i & 1 == 0) {
                let with = self.score(scores_pp, others | 1 << i)?;
                let without = self.score(scores_pp, others)?;
                *value += weight(others.count_ones()) * (with - without);
            }
        }
        Some(values)
    }

    /// Mean over the sampled orders of the gain of each module over its predecessors.
    fn shapley_of_orders(&self, scores_pp: &[f64]) -> Option<Vec<f64>> {
        let mut values = vec![0.0; self.modules.len()];
        if self.permutations.is_empty() {
            return None;
        }
        for order in &self.permutations {
            let mut on = 0;
            let mut before = self.score(scores_pp, on)?;
            for &i in order {
                on |= 1 << i;
                let with = self.score(scores_pp, on)?;
                values[i] += (with - before) / self.permutations.len() as f64;
                before = with;
            }
        }
        Some(values)
    }
}

/// All pairs i < j < n.
fn pairs(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n).flat_map(move |i| (i + 1..n).map(move |j| (i, j)))
}
