//! The policy's loss (`docs/control.md`, Policy and PPO) as values of [`PpoLoss`].

use meristem_nn::Result;
use meristem_nn::kernels::ppo::{PpoHead, PpoLoss};

use super::{PolicyShape, argument};
use crate::action::ActionOp;
use crate::heads::{Floors, HEADS, HeadKind};

/// Configuration of the loss; see [`meristem_nn::kernels::ppo`] for the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossConfig {
    /// ε: largest distance of a probability ratio from 1 before it is clipped.
    pub clip: f32,
    /// Weight of the mean squared error of V.
    pub value: f32,
    /// Weight of the entropy bonus; each head has a factor on it.
    pub entropy: f32,
    /// Normalised mean entropy below which a head is penalised.
    pub entropy_floor: f32,
    /// Probability floors.
    pub floors: Floors,
    /// Weight of the entropy penalty, which is the square of the distance to `entropy_floor`.
    pub entropy_floor_penalty: f32,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self {
            clip: 0.2,
            value: 0.5,
            entropy: 0.05,
            entropy_floor: 0.3,
            floors: Floors::default(),
            entropy_floor_penalty: 1.0,
        }
    }
}

impl LossConfig {
    /// The loss of behaviour cloning: without floors and entropy terms.
    pub(super) fn imitation(&self) -> Self {
        Self {
            entropy: 0.0,
            entropy_floor: 0.0,
            floors: Floors::default(),
            entropy_floor_penalty: 0.0,
            ..*self
        }
    }

    /// The loss of a policy with this shape.
    ///
    /// # Errors
    /// [`meristem_nn::Error::Argument`] for a number that is negative or not finite.
    pub(super) fn build(&self, shape: &PolicyShape) -> Result<PpoLoss> {
        check([
            ("clip", self.clip),
            ("value", self.value),
            ("entropy", self.entropy),
            ("entropy_floor", self.entropy_floor),
            ("entropy_floor_penalty", self.entropy_floor_penalty),
        ])?;
        check(self.floors.map(|floor| ("floors", floor)))?;
        let ops = |used_by: &[ActionOp]| used_by.iter().fold(0, |bits, op| bits | 1 << op.index());
        let widen = shape.layers().map_or(0, |_| ops(&[ActionOp::Widen]));
        let sized = HEADS.iter().zip(shape.heads()).zip(self.floors);
        let heads = sized.map(|((head, choices), floor)| PpoHead {
            choices,
            used_by: ops(head.used_by)
                | match head.kind {
                    HeadKind::Op | HeadKind::Slot => widen,
                    _ => 0,
                },
            floor,
            entropy_coefficient: self.entropy * head.entropy_multiplier,
            entropy_floor: self.entropy_floor,
        });
        Ok(PpoLoss {
            heads: heads.collect(),
            clip: self.clip,
            value_coefficient: self.value,
            entropy_floor_coefficient: self.entropy_floor_penalty,
        })
    }
}

/// Checks named coefficients of the loss.
///
/// # Errors
/// [`meristem_nn::Error::Argument`] for a number that is negative or not finite.
pub(super) fn check<const N: usize>(numbers: [(&'static str, f32); N]) -> Result<()> {
    match numbers.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
        Some((name, value)) => Err(argument(name, "a number from 0 on".into(), value.to_string())),
        None => Ok(()),
    }
}
