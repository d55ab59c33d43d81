//! Stages of a slot and its module, and the transitions between them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Stage of a slot, in index order of observations and events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Empty, free to germinate.
    Dormant,
    /// A module is chosen, but does not compute yet.
    Germinated,
    /// The module trains: as a part of the host, with alpha 1, or aside
    /// ([`Birth`](super::Birth)), without changing the host's output (straight-through).
    Training,
    /// Alpha is moving to its target, or has reached it; ADVANCE then leads to Holding.
    Blending,
    /// Alpha rests at its target.
    Holding,
    /// Permanent part of the host. Terminal.
    Fossilized,
    /// The module was removed in this step.
    Pruned,
    /// Empty, not yet available.
    Embargoed,
    /// The last steps before the slot is dormant again.
    Resetting,
}

impl Stage {
    /// All stages in index order.
    pub const ALL: [Stage; 9] = [
        Stage::Dormant,
        Stage::Germinated,
        Stage::Training,
        Stage::Blending,
        Stage::Holding,
        Stage::Fossilized,
        Stage::Pruned,
        Stage::Embargoed,
        Stage::Resetting,
    ];

    /// Length of the stage's one-hot code in an observation: nine stages, and one reserved position
    /// that is always 0.
    pub const ONE_HOT: usize = 10;

    /// Position in [`Stage::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }

    /// The stages that may follow this one (`docs/growth.md`, Lifecycle). Empty only for
    /// `Fossilized`.
    pub fn successors(self) -> &'static [Stage] {
        use Stage::*;
        match self {
            Dormant => &[Germinated],
            Germinated => &[Training, Pruned],
            Training => &[Blending, Pruned],
            Blending => &[Holding, Pruned],
            Holding => &[Fossilized, Blending, Pruned],
            Fossilized => &[],
            Pruned => &[Embargoed],
            Embargoed => &[Resetting],
            Resetting => &[Dormant],
        }
    }

    /// Whether `next` may follow this stage.
    pub fn can_become(self, next: Stage) -> bool {
        self.successors().contains(&next)
    }

    /// Whether a module is in the slot (`Germinated` to `Fossilized`).
    pub fn is_occupied(self) -> bool {
        self.is_live() || self == Stage::Fossilized
    }

    /// Whether the slot has a module that is not fossilized (`Germinated` to `Holding`). Fewer
    /// modules count as live where contributions are measured:
    /// [`ModuleScope::Live`](crate::ModuleScope::Live).
    pub fn is_live(self) -> bool {
        use Stage::*;
        matches!(self, Germinated | Training | Blending | Holding)
    }

    /// Lower-case name in events.
    pub fn name(self) -> &'static str {
        use Stage::*;
        match self {
            Dormant => "dormant",
            Germinated => "germinated",
            Training => "training",
            Blending => "blending",
            Holding => "holding",
            Fossilized => "fossilized",
            Pruned => "pruned",
            Embargoed => "embargoed",
            Resetting => "resetting",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Stage::{self, *};

    #[test]
    fn only_transitions_of_the_lifecycle_are_legal() {
        let legal = [
            (Dormant, Germinated),
            (Germinated, Training),
            (Training, Blending),
            (Blending, Holding),
            (Holding, Fossilized),
            (Holding, Blending),
            (Germinated, Pruned),
            (Training, Pruned),
            (Blending, Pruned),
            (Holding, Pruned),
            (Pruned, Embargoed),
            (Embargoed, Resetting),
            (Resetting, Dormant),
        ];
        for from in Stage::ALL {
            for to in Stage::ALL {
                assert_eq!(from.can_become(to), legal.contains(&(from, to)), "{from} -> {to}");
            }
        }
    }

    #[test]
    fn indices_and_names_agree_with_serde() {
        for (i, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage.index(), i);
            assert_eq!(serde_json::to_string(&stage).unwrap(), format!("\"{stage}\""));
        }
    }
}
