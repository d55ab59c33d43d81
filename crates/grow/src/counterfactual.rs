//! Alpha configurations whose accuracies measure the contribution of each module (`docs/growth.md`,
//! Contributions).
//!
//! Every configuration is a set of modules that are on, among the measured modules; all other
//! modules keep their alpha. Configurations with the same set share a row: with two modules, the
//! first one off is the second one alone.

use meristem_device::random::Rng;
use meristem_nn::{EvalMetrics, PairedLoss};
use serde::{Deserialize, Serialize};

use crate::host::Host;
use crate::lifecycle::{Slot, Stage};

/// Largest number of modules for which all subsets are evaluated at every step. Up to it main,
/// solo-offs, solo-ons, pairs and all-off are all the subsets there are.
const SUBSETS_MAX_MODULES: usize = 4;

/// Orders of switching modules on that are sampled at the last step of an episode when there are
/// more than four modules: pairs of an order and its reverse.
pub const PERMUTATIONS: usize = 8;

/// The modules whose contribution is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Modules that may still be pruned and whose alpha is above 0 (Blending, Holding): during an
    /// episode.
    Live,
    /// Fossilized modules too: for a report at the end.
    All,
}

/// A configuration of the modules. Slots are given by their index; pairs have the lower one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Configuration {
    /// Every module as it is.
    Main,
    /// All but one.
    SoloOff(usize),
    /// Only this one.
    SoloOn(usize),
    /// Only these two.
    Pair(usize, usize),
    /// None.
    AllOff,
    /// Fossilized modules only: the host without its live modules.
    Committed,
    /// The first `modules` modules of an order.
    Prefix {
        /// Number of the order.
        permutation: usize,
        /// Modules that are on.
        modules: usize,
    },
}

/// Set of the measured modules that are on: bit i for module i.
type Coalition = u64;

/// The effect of one module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contribution {
    /// The module's slot, by index.
    pub slot: usize,
    /// Accuracy without the module, 0..1.
    pub accuracy_without: f64,
    /// Accuracy with the module minus accuracy without it, in percentage points.
    pub accuracy_pp: f64,
    /// Mean loss without the module minus with it, paired by image.
    pub loss: Option<PairedLoss>,
}

/// The effect of two modules together beyond the sum of their effects alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interaction {
    /// The two slots, by index.
    pub slots: [usize; 2],
    /// `acc(ij) − acc(i) − acc(j) + acc(none)` in percentage points: above 0 where the modules help
    /// each other.
    pub pp: f64,
}

/// Configurations to evaluate in one pass, and their rows of alphas; row 0 is
/// [`Configuration::Main`].
#[derive(Clone, Debug, PartialEq)]
pub struct Counterfactual {
    /// The host's own alphas.
    main: Vec<f32>,
    /// Slots of the measured modules.
    modules: Vec<usize>,
    /// Each configuration with its row.
    configurations: Vec<(Configuration, usize)>,
    /// Modules that are on in each row.
    coalitions: Vec<Coalition>,
    /// `[rows][slots]`.
    rows: Vec<Vec<f32>>,
    /// Orders of positions in `modules`.
    permutations: Vec<Vec<usize>>,
}

impl Counterfactual {
    /// The configurations main and, for each module in `scope`, that module off.
    pub fn leave_one_out(host: &Host, scope: Scope) -> Self {
        let mut all = Self::main(host, scope);
        for i in 0..all.modules.len() {
            all.add(Configuration::SoloOff(all.modules[i]), all.full() & !(1 << i));
        }
        all
    }

    /// The configurations of a step for its n live modules: main, each off, each alone, all off
    /// (n ≥ 2), pairs (3 ≤ n ≤ 4), committed.
    pub fn of_step(host: &Host) -> Self {
        let mut all = Self::leave_one_out(host, Scope::Live);
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

    /// The configurations of [`Counterfactual::of_step`], and further ones for Shapley values:
    /// none up to four modules, all of whose subsets are there already; else the prefixes
    /// of [`PERMUTATIONS`] orders drawn from `random`. Every second order is the reverse of the one
    /// before (antithetic: the errors of an order and of its reverse have opposite signs).
    pub fn of_last_step(host: &Host, random: &mut Rng) -> Self {
        let mut all = Self::of_step(host);
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

    /// Largest number of rows for a host with this many slots: all subsets of up to four modules;
    /// beyond that 2n + 2 for a step, and n − 3 for each order at the last one (its first module
    /// alone, and all but its last, are among the step's).
    pub fn rows_max(slots: usize) -> usize {
        match slots {
            0..=SUBSETS_MAX_MODULES => 1 << slots,
            n => 2 * n + 2 + PERMUTATIONS * (n - 3),
        }
    }

    fn main(host: &Host, scope: Scope) -> Self {
        let main = host.alphas();
        let measured = |(index, slot): (usize, &Slot)| {
            let is_measured = match slot.stage {
                Stage::Blending | Stage::Holding => main[index] > 0.0,
                Stage::Fossilized => scope == Scope::All,
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

    /// Adds a configuration, and a row unless one with the same modules on exists.
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

    /// The configurations in the order they were added, each with its row; several may share one.
    pub fn configurations(&self) -> &[(Configuration, usize)] {
        &self.configurations
    }

    /// The row of a configuration, if it was added.
    pub fn row_of(&self, configuration: Configuration) -> Option<usize> {
        self.configurations.iter().find(|(added, _)| *added == configuration).map(|(_, row)| *row)
    }

    /// Alphas `[rows][slots]`, without duplicates.
    pub fn rows(&self) -> &[Vec<f32>] {
        &self.rows
    }

    /// Slots of the measured modules, by index.
    pub fn modules(&self) -> &[usize] {
        &self.modules
    }

    /// Slots of the measured modules that are on in a row.
    pub fn on(&self, row: usize) -> impl Iterator<Item = usize> {
        let on = self.coalitions.get(row).copied().unwrap_or(0);
        let is_on = move |(i, slot): (usize, &usize)| (on >> i & 1 == 1).then_some(*slot);
        self.modules.iter().enumerate().filter_map(is_on)
    }

    /// The accuracy of the row with these modules on; `None` if there is no such row, or the
    /// accuracy is not finite.
    fn accuracy(&self, accuracies_pp: &[f64], on: Coalition) -> Option<f64> {
        accuracies_pp.get(self.row_with(on)?).copied().filter(|accuracy| accuracy.is_finite())
    }

    /// Contribution of each measured module whose configuration was evaluated, from the evaluation
    /// of the rows.
    pub fn contributions(&self, rows: &[EvalMetrics]) -> Vec<Contribution> {
        let of_module = |(i, &slot): (usize, &usize)| {
            let (main, off) = (rows.first()?, rows.get(self.row_with(self.full() & !(1 << i))?)?);
            let (accuracy, accuracy_without) = (main.accuracy()?, off.accuracy()?);
            let accuracy_pp = 100.0 * (accuracy - accuracy_without);
            Some(Contribution { slot, accuracy_without, accuracy_pp, loss: off.loss_over(main) })
        };
        self.modules.iter().enumerate().filter_map(of_module).collect()
    }

    /// The interaction of every two modules for which all four accuracies were measured, in order
    /// of the slots. With two to four modules these are all pairs.
    pub fn interactions_pp(&self, accuracies_pp: &[f64]) -> Vec<Interaction> {
        let accuracy = |on| self.accuracy(accuracies_pp, on);
        let interaction = |(i, j): (usize, usize)| {
            let (both, none) = (accuracy(1 << i | 1 << j)?, accuracy(0)?);
            let pp = both - accuracy(1 << i)? - accuracy(1 << j)? + none;
            Some(Interaction { slots: [self.modules[i], self.modules[j]], pp })
        };
        pairs(self.modules.len()).filter_map(interaction).collect()
    }

    /// Sum per slot of its module's interactions with all others, in percentage points; `None`
    /// where none was measured.
    pub fn interaction_sums_pp(&self, accuracies_pp: &[f64]) -> Vec<Option<f32>> {
        let mut sums: Vec<Option<f64>> = vec![None; self.main.len()];
        for Interaction { slots, pp } in self.interactions_pp(accuracies_pp) {
            slots.into_iter().for_each(|slot| *sums[slot].get_or_insert(0.0) += pp);
        }
        sums.into_iter().map(|sum| sum.map(|sum| sum as f32)).collect()
    }

    /// Shapley value per slot in percentage points: the mean gain in accuracy when the module is
    /// switched on, over all orders of switching modules on (Shapley, "A value for n-person games",
    /// 1953). The values sum to the accuracy with all modules minus the accuracy with none. Exact
    /// up to four modules; beyond that the mean over the orders of
    /// [`Counterfactual::of_last_step`]. `None` for slots that are not measured, and for all
    /// slots if an accuracy is missing or not finite.
    pub fn shapley_pp(&self, accuracies_pp: &[f64]) -> Vec<Option<f64>> {
        let n = self.modules.len();
        let values = match n {
            0..=SUBSETS_MAX_MODULES => self.shapley_of_subsets(accuracies_pp),
            _ => self.shapley_of_orders(accuracies_pp),
        };
        let mut per_slot = vec![None; self.main.len()];
        for (&slot, value) in self.modules.iter().zip(values.unwrap_or_default()) {
            per_slot[slot] = Some(value);
        }
        per_slot
    }

    /// `Σ_S |S|!·(n − |S| − 1)!/n!·(v(S ∪ i) − v(S))` over all S without i.
    fn shapley_of_subsets(&self, accuracies_pp: &[f64]) -> Option<Vec<f64>> {
        let n = self.modules.len();
        let factorial = |k: usize| (1..=k).product::<usize>() as f64;
        let weight = |others: u32| {
            let others = others as usize;
            factorial(others) * factorial(n - others - 1) / factorial(n)
        };
        let mut values = vec![0.0; n];
        for (i, value) in values.iter_mut().enumerate() {
            for others in (0..1 << n).filter(|others| others >> i & 1 == 0) {
                let with = self.accuracy(accuracies_pp, others | 1 << i)?;
                let without = self.accuracy(accuracies_pp, others)?;
                *value += weight(others.count_ones()) * (with - without);
            }
        }
        Some(values)
    }

    /// The mean over the sampled orders of each module's gain over the modules before it.
    fn shapley_of_orders(&self, accuracies_pp: &[f64]) -> Option<Vec<f64>> {
        let mut values = vec![0.0; self.modules.len()];
        if self.permutations.is_empty() {
            return None;
        }
        for order in &self.permutations {
            let mut on = 0;
            let mut before = self.accuracy(accuracies_pp, on)?;
            for &i in order {
                on |= 1 << i;
                let with = self.accuracy(accuracies_pp, on)?;
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
