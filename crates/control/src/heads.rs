//! The heads of an action as a static table (H2).

use meristem_grow::{AlphaTarget, Curve, Speed, Style, Tempo};

use crate::action::{Action, Op};

/// A head, in the order in which choices are sampled; also its index in [`HEADS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadKind {
    /// Operation.
    Op,
    /// Slot.
    Slot,
    /// Blueprint to germinate.
    Blueprint,
    /// Blending of the module.
    Style,
    /// Duration of the first blending.
    Tempo,
    /// Target of alpha.
    AlphaTarget,
    /// Duration of alpha's move to a new target.
    AlphaSpeed,
    /// Curve of that move.
    AlphaCurve,
}

/// Number of choices of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadSize {
    /// The same for every host.
    Fixed(usize),
    /// One per enabled slot.
    Slots,
    /// One per blueprint of the set (7 for the standard one).
    Blueprints,
}

impl HeadSize {
    /// The number of choices.
    pub fn of(self, slots: usize, blueprints: usize) -> usize {
        match self {
            HeadSize::Fixed(size) => size,
            HeadSize::Slots => slots,
            HeadSize::Blueprints => blueprints,
        }
    }
}

/// One row of [`HEADS`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// Kind of the head.
    pub kind: HeadKind,
    /// Its name, as in configuration and events.
    pub name: &'static str,
    /// Choices.
    pub size: HeadSize,
    /// Ops that use it. For any other op it is pinned to choice 0: log-probability and entropy 0.
    pub used_by: &'static [Op],
    /// Probability floor: with n legal choices each gets at least `min(floor, .99/n)`.
    pub floor: f32,
    /// Multiplier of its entropy bonus.
    pub entropy_multiplier: f32,
}

impl Head {
    /// Whether an op uses this head.
    pub fn is_used_by(&self, op: Op) -> bool {
        self.used_by.contains(&op)
    }
}

/// One choice per head, in the order of [`HEADS`].
pub type Choices = [usize; 8];

/// The heads of `docs/control.md`, Actions, in sampling order.
pub static HEADS: [Head; 8] = {
    use HeadSize::{Blueprints, Fixed, Slots};
    const ANY_SLOT: &[Op] =
        &[Op::Germinate, Op::SetAlphaTarget, Op::Prune, Op::Fossilize, Op::Advance];
    const GERMINATE: &[Op] = &[Op::Germinate];
    const TARGET: &[Op] = &[Op::Germinate, Op::SetAlphaTarget];
    const MOVE: &[Op] = &[Op::SetAlphaTarget, Op::Prune];
    [
        head(HeadKind::Op, "op", Fixed(Op::ALL.len()), &Op::ALL, [0.15, 1.0]),
        head(HeadKind::Slot, "slot", Slots, ANY_SLOT, [0.05, 1.0]),
        head(HeadKind::Blueprint, "blueprint", Blueprints, GERMINATE, [0.12, 1.3]),
        head(HeadKind::Style, "style", Fixed(Style::ALL.len()), TARGET, [0.08, 1.2]),
        head(HeadKind::Tempo, "tempo", Fixed(Tempo::ALL.len()), GERMINATE, [0.12, 1.3]),
        head(
            HeadKind::AlphaTarget,
            "alpha_target",
            Fixed(AlphaTarget::ALL.len()),
            TARGET,
            [0.08, 1.2],
        ),
        head(HeadKind::AlphaSpeed, "alpha_speed", Fixed(Speed::ALL.len()), MOVE, [0.06, 1.2]),
        head(HeadKind::AlphaCurve, "alpha_curve", Fixed(Curve::ALL.len()), MOVE, [0.06, 1.2]),
    ]
};

const fn head(
    kind: HeadKind,
    name: &'static str,
    size: HeadSize,
    used_by: &'static [Op],
    [floor, entropy_multiplier]: [f32; 2],
) -> Head {
    Head { kind, name, size, used_by, floor, entropy_multiplier }
}

impl Action {
    /// The action of these choices; heads that the op does not use are ignored. `None` if a choice
    /// is out of its head's range. Slot and blueprint are checked by [`crate::legal`].
    pub fn from_choices(choices: &Choices) -> Option<Self> {
        let [op, slot, blueprint, style, tempo, target, speed, curve] = *choices;
        let style = || Style::ALL.get(style).copied();
        let alpha_target = || AlphaTarget::ALL.get(target).copied();
        let speed = || Speed::ALL.get(speed).copied();
        let curve = || Curve::ALL.get(curve).copied();
        Some(match *Op::ALL.get(op)? {
            Op::Wait => Action::Wait,
            Op::Germinate => Action::Germinate {
                slot,
                blueprint,
                style: style()?,
                tempo: *Tempo::ALL.get(tempo)?,
                alpha_target: alpha_target()?,
            },
            Op::SetAlphaTarget => Action::SetAlphaTarget {
                slot,
                style: style()?,
                alpha_target: alpha_target()?,
                speed: speed()?,
                curve: curve()?,
            },
            Op::Prune => Action::Prune { slot, speed: speed()?, curve: curve()? },
            Op::Fossilize => Action::Fossilize { slot },
            Op::Advance => Action::Advance { slot },
        })
    }

    /// One choice per head; 0 for the heads that this action does not use.
    pub fn choices(&self) -> Choices {
        let op = self.op().index();
        match *self {
            Action::Wait => [op, 0, 0, 0, 0, 0, 0, 0],
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
