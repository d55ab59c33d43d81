//! Actions: one per env and step.

use std::fmt;

use meristem_grow::{AlphaTarget, Curve, Speed, Style, Tempo};
use serde::{Deserialize, Serialize};

/// Operation of an action; the index order of the `op` head and of counts of actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ActionOp {
    /// Do nothing.
    Wait,
    /// Put a module into a dormant slot.
    Germinate,
    /// Give a blended module's alpha a new target.
    SetAlphaTarget,
    /// Remove a module.
    Prune,
    /// Make a module permanent.
    Fossilize,
    /// Advance a module to its next stage, if the gate passes.
    Advance,
    /// Give a layer of the host further features. Of the policies, only those that observe layers
    /// choose it ([`crate::policy::LayerSet`]); the heuristic and scripts may as well.
    Widen,
}

/// Number of actions per op, in the order of [`ActionOp::ALL`].
pub type OpCounts = [u64; ActionOp::ALL.len()];

/// The counts of `ops`. The last count, that of WIDEN, is left out if it is 0, because most
/// controllers do not choose WIDEN.
pub fn counted_ops(ops: &OpCounts) -> &[u64] {
    let widens = ops[ActionOp::Widen.index()] > 0;
    if widens { ops } else { &ops[..ActionOp::OF_HEAD.len()] }
}

impl ActionOp {
    /// All operations, in index order.
    pub const ALL: [ActionOp; 7] = [
        ActionOp::Wait,
        ActionOp::Germinate,
        ActionOp::SetAlphaTarget,
        ActionOp::Prune,
        ActionOp::Fossilize,
        ActionOp::Advance,
        ActionOp::Widen,
    ];

    /// The choices of the `op` head, in index order, of a policy that observes no layers; with
    /// layers, [`ActionOp::ALL`].
    pub const OF_HEAD: [ActionOp; 6] = [
        ActionOp::Wait,
        ActionOp::Germinate,
        ActionOp::SetAlphaTarget,
        ActionOp::Prune,
        ActionOp::Fossilize,
        ActionOp::Advance,
    ];

    /// Index in [`Self::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }

    /// The name, as in events.
    pub fn name(self) -> &'static str {
        match self {
            ActionOp::Wait => "WAIT",
            ActionOp::Germinate => "GERMINATE",
            ActionOp::SetAlphaTarget => "SET_ALPHA_TARGET",
            ActionOp::Prune => "PRUNE",
            ActionOp::Fossilize => "FOSSILIZE",
            ActionOp::Advance => "ADVANCE",
            ActionOp::Widen => "WIDEN",
        }
    }
}

impl fmt::Display for ActionOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One choice per head of an action, in the order of [`crate::HEADS`].
pub type Choices = [usize; 8];

/// An action. `slot` is an index among the host's enabled slots, `blueprint` an index in the host's
/// blueprint set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "SCREAMING_SNAKE_CASE", deny_unknown_fields)]
pub enum Action {
    /// Do nothing.
    Wait,
    /// Put a module into a dormant slot.
    Germinate {
        /// The slot.
        slot: usize,
        /// The blueprint.
        blueprint: usize,
        /// Blending style.
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
        /// Blending style from now on.
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
    /// Advance a module to its next stage, if the gate passes.
    Advance {
        /// The slot.
        slot: usize,
    },
    /// Give a layer of the host further features.
    Widen {
        /// The layer, an index among those that can become wider
        /// ([`meristem_grow::Host::widenable`]).
        layer: usize,
        /// Number of further features.
        by: usize,
    },
}

impl Action {
    /// The action's operation.
    pub fn op(&self) -> ActionOp {
        match self {
            Action::Wait => ActionOp::Wait,
            Action::Germinate { .. } => ActionOp::Germinate,
            Action::SetAlphaTarget { .. } => ActionOp::SetAlphaTarget,
            Action::Prune { .. } => ActionOp::Prune,
            Action::Fossilize { .. } => ActionOp::Fossilize,
            Action::Advance { .. } => ActionOp::Advance,
            Action::Widen { .. } => ActionOp::Widen,
        }
    }

    /// The slot that the action changes; `None` for WAIT and WIDEN.
    pub fn slot(&self) -> Option<usize> {
        match *self {
            Action::Wait | Action::Widen { .. } => None,
            Action::Germinate { slot, .. }
            | Action::SetAlphaTarget { slot, .. }
            | Action::Prune { slot, .. }
            | Action::Fossilize { slot }
            | Action::Advance { slot } => Some(slot),
        }
    }

    /// Decodes an action from one choice per head; heads that the op does not use are ignored.
    /// Returns `None` for a choice outside its head's range. [`crate::legal`] checks slot and
    /// blueprint.
    pub fn from_choices(choices: &Choices) -> Option<Self> {
        let [op, slot, blueprint, style, tempo, target, speed, curve] = *choices;
        let style = || Style::ALL.get(style).copied();
        let alpha_target = || AlphaTarget::ALL.get(target).copied();
        let speed = || Speed::ALL.get(speed).copied();
        let curve = || Curve::ALL.get(curve).copied();
        Some(match *ActionOp::OF_HEAD.get(op)? {
            ActionOp::Wait | ActionOp::Widen => Action::Wait,
            ActionOp::Germinate => Action::Germinate {
                slot,
                blueprint,
                style: style()?,
                tempo: *Tempo::ALL.get(tempo)?,
                alpha_target: alpha_target()?,
            },
            ActionOp::SetAlphaTarget => Action::SetAlphaTarget {
                slot,
                style: style()?,
                alpha_target: alpha_target()?,
                speed: speed()?,
                curve: curve()?,
            },
            ActionOp::Prune => Action::Prune { slot, speed: speed()?, curve: curve()? },
            ActionOp::Fossilize => Action::Fossilize { slot },
            ActionOp::Advance => Action::Advance { slot },
        })
    }

    /// One choice per head; 0 for the heads that this action does not use. WIDEN returns the
    /// choices of WAIT: the choice of a layer depends on the number of slots of the policy, so the
    /// policy encodes WIDEN itself.
    pub fn choices(&self) -> Choices {
        let op = self.op().index();
        match *self {
            Action::Wait | Action::Widen { .. } => [0; 8],
            Action::Germinate { slot, blueprint, style, tempo, alpha_target } => {
                [op, slot, blueprint, style.index(), tempo.index(), alpha_target.index(), 0, 0]
            }
            Action::SetAlphaTarget { slot, style, alpha_target, speed, curve } => {
                [op, slot, 0, style.index(), 0, alpha_target.index(), speed.index(), curve.index()]
            }
            Action::Prune { slot, speed, curve } => {
                [op, slot, 0, 0, 0, 0, speed.index(), curve.index()]
            }
            Action::Fossilize { slot } | Action::Advance { slot } => [op, slot, 0, 0, 0, 0, 0, 0],
        }
    }
}
