//! Totals of a run, for its summary and its checkpoints.

use serde::{Deserialize, Serialize};

use crate::record::summary::{CounterfactualTotals, HotTotals, OwnLossTotals};

/// Totals of a run over all episodes, or of a part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Totals {
    /// Steps of all rounds.
    pub(crate) steps: u64,
    /// Sum, over all steps, of the number of places with a member in training; 0 without places.
    #[serde(default)]
    pub(crate) place_steps: u64,
    /// Batches of all envs and twins.
    pub(crate) training_steps: u64,
    /// Images trained.
    pub(crate) images: u64,
    /// Floating-point operations of training, of all envs and twins.
    #[serde(default)]
    pub(crate) training_flops: u64,
    /// Bytes that all ranks sent to exchange gradients or weights of a host. [`Totals::add`] does
    /// not add these bytes, because its argument has the totals of only one process if all
    /// processes have the same envs.
    #[serde(default)]
    pub(crate) exchange_bytes: u64,
    /// Seconds spent in steps.
    pub(crate) step_seconds: f64,
    /// Counts of the inner loop in all epochs but the first of each process.
    pub(crate) hot: HotTotals,
    /// Cost of counterfactual evaluation.
    #[serde(alias = "validation")]
    pub(crate) counterfactual_cost: CounterfactualTotals,
    /// Cost of the program's loss.
    #[serde(default)]
    pub(crate) own_loss: OwnLossTotals,
    /// Rollbacks of all envs.
    pub(crate) rollbacks: u64,
}

impl Totals {
    /// Adds one step, given by the totals of each rank.
    pub(crate) fn add(&mut self, ranks: &[Totals]) {
        self.steps += ranks.first().map_or(0, |first| first.steps);
        self.step_seconds += ranks.iter().map(|rank| rank.step_seconds).fold(0.0, f64::max);
        for rank in ranks {
            self.training_steps += rank.training_steps;
            self.images += rank.images;
            self.training_flops += rank.training_flops;
            self.hot.merge(&rank.hot);
            self.counterfactual_cost.merge(&rank.counterfactual_cost);
            self.own_loss.merge(&rank.own_loss);
            self.rollbacks += rank.rollbacks;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkpoint from before a key was renamed is read.
    #[test]
    fn totals_of_older_checkpoints_are_read() {
        let mut totals = Totals { steps: 3, images: 5, ..Totals::default() };
        totals.counterfactual_cost.flops = 7;
        let text = serde_json::to_string(&totals).unwrap();
        let older = text.replace("\"counterfactual_cost\"", "\"validation\"");
        assert_ne!(older, text);
        assert_eq!(serde_json::from_str::<Totals>(&older).unwrap(), totals);
    }
}
