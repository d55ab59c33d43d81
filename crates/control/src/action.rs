//! Actions: one per env and step.

use std::fmt;

use meristem_grow::{AlphaTarget, Curve, Speed, Style, Tempo};
use serde::{Deserialize, Serialize};

/// Operation of an action; the index order of the `op` head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Op {
    /// Do nothing.
    Wait,
    /// Put a module into an empty slot.
    Germinate,
    /// Give a blended module's alpha a new target.
    SetAlphaTarget,
    /// Remove a module.
    Prune,
    /// Make a module permanent.
    Fossilize,
    /// Ask the gate to a module's next stage.
    Advance,
}

impl Op {
    /// All operations, in index order.
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
    /// Do nothing.
    Wait,
    /// Put a module into an empty slot.
    Germinate {
        /// The slot.
        slot: usize,
        /// The blueprint.
        blueprint: usize,
        /// Curve and formula of its blending.
        style: Style,
        /// Duration of the blending.
        tempo: Tempo,
        /// Alpha at its end.
        alpha_target: AlphaTarget,
    },
    /// Give a blended module's alpha a new target.
    SetAlphaTarget {
        /// The slot.
        slot: usize,
        /// Blending formula from now on.
        style: Style,
        /// The target.
        alpha_target: AlphaTarget,
        /// Duration of the move.
        speed: Speed,
        /// Curve of the move.
        curve: Curve,
    },
    /// Remove a module.
    Prune {
        /// The slot.
        slot: usize,
        /// Duration of the removal.
        speed: Speed,
        /// Curve of alpha on the way to 0.
        curve: Curve,
    },
    /// Make a module permanent, if its gate passes.
    Fossilize {
        /// The slot.
        slot: usize,
    },
    /// Go on to the next stage, if its gate passes.
    Advance {
        /// The slot.
        slot: usize,
    },
}

impl Action {
    /// The action's operation.
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

    /// The slot that the action changes; `None` for WAIT.
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
