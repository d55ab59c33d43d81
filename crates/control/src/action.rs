//! Actions: one per env and step.

use std::fmt;

use meristem_grow::{AlphaTarget, Curve, Speed, Style, Tempo};
use serde::{Deserialize, Serialize};

/// What an action does; the index order of the `op` head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Op {
    /// Nothing.
    Wait,
    /// Put a module into an empty slot.
    Germinate,
    /// Send a blended module's alpha elsewhere.
    SetAlphaTarget,
    /// Remove a module.
    Prune,
    /// Make a module permanent.
    Fossilize,
    /// Ask the gate to a module's next stage.
    Advance,
}

impl Op {
    /// All, in index order.
    pub const ALL: [Op; 6] =
        [Op::Wait, Op::Germinate, Op::SetAlphaTarget, Op::Prune, Op::Fossilize, Op::Advance];

    /// Index in the `op` head.
    pub fn index(self) -> usize {
        self as usize
    }

    /// The name, as in events.
    pub fn name(self) -> &'static str {
        match self {
            Op::Wait => "WAIT",
            Op::Germinate => "GERMINATE",
            Op::SetAlphaTarget => "SET_ALPHA_TARGET",
            Op::Prune => "PRUNE",
            Op::Fossilize => "FOSSILIZE",
            Op::Advance => "ADVANCE",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An action. Slots are indices among a host's enabled slots, blueprints among its blueprint set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "SCREAMING_SNAKE_CASE", deny_unknown_fields)]
pub enum Action {
    /// Nothing.
    Wait,
    /// Put a module into an empty slot.
    Germinate {
        /// Where.
        slot: usize,
        /// What.
        blueprint: usize,
        /// How it will be blended in.
        style: Style,
        /// How long that will take.
        tempo: Tempo,
        /// Where alpha will end.
        alpha_target: AlphaTarget,
    },
    /// Send a blended module's alpha elsewhere.
    SetAlphaTarget {
        /// Whose.
        slot: usize,
        /// Blending formula from now on.
        style: Style,
        /// Where.
        alpha_target: AlphaTarget,
        /// How fast.
        speed: Speed,
        /// Along which curve.
        curve: Curve,
    },
    /// Remove a module.
    Prune {
        /// Whose.
        slot: usize,
        /// How fast.
        speed: Speed,
        /// Along which curve.
        curve: Curve,
    },
    /// Make a module permanent, if its gate passes.
    Fossilize {
        /// Whose.
        slot: usize,
    },
    /// Go on to the next stage, if its gate passes.
    Advance {
        /// Whose.
        slot: usize,
    },
}

impl Action {
    /// What it does.
    pub fn op(&self) -> Op {
        match self {
            Action::Wait => Op::Wait,
            Action::Germinate { .. } => Op::Germinate,
            Action::SetAlphaTarget { .. } => Op::SetAlphaTarget,
            Action::Prune { .. } => Op::Prune,
            Action::Fossilize { .. } => Op::Fossilize,
            Action::Advance { .. } => Op::Advance,
        }
    }

    /// The slot it concerns; `None` for WAIT.
    pub fn slot(&self) -> Option<usize> {
        match *self {
            Action::Wait => None,
            Action::Germinate { slot, .. }
            | Action::SetAlphaTarget { slot, .. }
            | Action::Prune { slot, .. }
            | Action::Fossilize { slot }
            | Action::Advance { slot } => Some(slot),
        }
    }
}
