//! Alpha configurations whose accuracies tell what each module is worth.

use serde::{Deserialize, Serialize};

use crate::host::Host;
use crate::stage::Stage;

/// Whose contribution is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Modules whose fate is open and whose alpha is above 0 (Blending, Holding): during an episode.
    Live,
    /// Fossilized modules too: for a report at the end.
    All,
}

/// What a configuration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Configuration {
    /// Every module as it is.
    Main,
    /// All but the module in the slot of this index.
    SoloOff(usize),
}

/// Configurations to evaluate in one pass, each a row of alphas; row 0 is [`Configuration::Main`].
#[derive(Clone, Debug, PartialEq)]
pub struct Counterfactual {
    slots: usize,
    configurations: Vec<Configuration>,
    rows: Vec<Vec<f32>>, // [configurations][slots]
}

impl Counterfactual {
    /// Main, and one configuration per module in `scope` with that module's alpha at 0.
    pub fn solo_off(host: &Host, scope: Scope) -> Self {
        let main = host.alphas();
        let mut configurations = vec![Configuration::Main];
        let mut rows = vec![main.clone()];
        for (index, slot) in host.slots().iter().enumerate() {
            let counts = match slot.stage {
                Stage::Blending | Stage::Holding => main[index] > 0.0,
                Stage::Fossilized => scope == Scope::All,
                _ => false,
            };
            if counts {
                let mut row = main.clone();
                row[index] = 0.0;
                configurations.push(Configuration::SoloOff(index));
                rows.push(row);
            }
        }
        Self { slots: main.len(), configurations, rows }
    }

    /// The configurations, in row order.
    pub fn configurations(&self) -> &[Configuration] {
        &self.configurations
    }

    /// Alphas `[configurations][slots]`.
    pub fn rows(&self) -> &[Vec<f32>] {
        &self.rows
    }

    /// Contribution per slot in percentage points, accuracy with the module minus accuracy without it,
    /// from the accuracy (in percentage points) of each row; `None` where none was asked. Accuracies that
    /// are missing or not finite give `None` too.
    pub fn contributions_pp(&self, accuracies_pp: &[f64]) -> Vec<Option<f32>> {
        let mut contributions = vec![None; self.slots];
        let main = accuracies_pp.first().copied();
        for (row, configuration) in self.configurations.iter().enumerate() {
            if let (Configuration::SoloOff(slot), Some(main)) = (configuration, main) {
                let without = accuracies_pp.get(row).copied();
                let worth = without.map(|without| (main - without) as f32);
                contributions[*slot] = worth.filter(|worth| worth.is_finite());
            }
        }
        contributions
    }
}
