//! The heads of an action as a static table.

use meristem_grow::{AlphaTarget, Curve, Speed, Style, Tempo};

use crate::action::ActionOp;

/// A head, in the order in which choices are sampled; also its index in [`HEADS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadKind {
    /// Operation.
    Op,
    /// Slot, or for WIDEN the layer.
    Slot,
    /// Blueprint to germinate.
    Blueprint,
    /// Blending style of the module.
    Style,
    /// Duration of the first blending.
    Tempo,
    /// Target of alpha.
    AlphaTarget,
    /// Duration of alpha's move to a new target.
    AlphaSpeed,
    /// Curve of alpha's move.
    AlphaCurve,
}

/// Number of choices of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadSize {
    /// The same for every host.
    Fixed(usize),
    /// One per enabled slot; in a policy that observes layers, also one per layer.
    Slots,
    /// One per blueprint of the set (7 for the standard one).
    Blueprints,
}

impl HeadSize {
    /// The number of choices of a policy that observes no layers; those of the others are in
    /// [`crate::HeadLayout::with_layers`].
    pub fn choices(self, slots: usize, blueprints: usize) -> usize {
        match self {
            HeadSize::Fixed(size) => size,
            HeadSize::Slots => slots,
            HeadSize::Blueprints => blueprints,
        }
    }
}

/// One row of [`HEADS`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActionHead {
    /// Kind of the head.
    pub kind: HeadKind,
    /// Name, as in configuration and events.
    pub name: &'static str,
    /// Number of choices.
    pub size: HeadSize,
    /// Ops that use the head. WIDEN is not listed, although it uses the heads op and slot of a
    /// policy that observes layers. Under an op that does not use the head, the head takes choice
    /// 0, with log-probability and entropy 0.
    pub used_by: &'static [ActionOp],
    /// Factor on the entropy bonus of the head.
    pub entropy_multiplier: f32,
}

impl ActionHead {
    /// Whether an op uses this head. Always false for WIDEN, although it uses the heads op and slot
    /// of a policy that observes layers.
    pub fn is_used_by(&self, op: ActionOp) -> bool {
        self.used_by.contains(&op)
    }
}

/// Probability floor per head, in the order of [`HEADS`]. Each of n legal choices has at least the
/// probability `min(floor, .99/n)`.
pub type Floors = [f32; HEADS.len()];

/// The heads of `docs/control.md`, Actions, in sampling order.
pub static HEADS: [ActionHead; 8] = {
    use HeadSize::{Blueprints, Fixed, Slots};
    const ANY_SLOT: &[ActionOp] = &[
        ActionOp::Germinate,
        ActionOp::SetAlphaTarget,
        ActionOp::Prune,
        ActionOp::Fossilize,
        ActionOp::Advance,
    ];
    const GERMINATE: &[ActionOp] = &[ActionOp::Germinate];
    const TARGET: &[ActionOp] = &[ActionOp::Germinate, ActionOp::SetAlphaTarget];
    const MOVE: &[ActionOp] = &[ActionOp::SetAlphaTarget, ActionOp::Prune];
    [
        head(HeadKind::Op, "op", Fixed(ActionOp::OF_HEAD.len()), &ActionOp::OF_HEAD, 1.0),
        head(HeadKind::Slot, "slot", Slots, ANY_SLOT, 1.0),
        head(HeadKind::Blueprint, "blueprint", Blueprints, GERMINATE, 1.3),
        head(HeadKind::Style, "style", Fixed(Style::ALL.len()), TARGET, 1.2),
        head(HeadKind::Tempo, "tempo", Fixed(Tempo::ALL.len()), GERMINATE, 1.3),
        head(HeadKind::AlphaTarget, "alpha_target", Fixed(AlphaTarget::ALL.len()), TARGET, 1.2),
        head(HeadKind::AlphaSpeed, "alpha_speed", Fixed(Speed::ALL.len()), MOVE, 1.2),
        head(HeadKind::AlphaCurve, "alpha_curve", Fixed(Curve::ALL.len()), MOVE, 1.2),
    ]
};

const fn head(
    kind: HeadKind,
    name: &'static str,
    size: HeadSize,
    used_by: &'static [ActionOp],
    entropy_multiplier: f32,
) -> ActionHead {
    ActionHead { kind, name, size, used_by, entropy_multiplier }
}
