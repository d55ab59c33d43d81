//! Report of a round in which a policy learned.

use serde::{Deserialize, Deserializer, Serialize};

use crate::action::OpCounts;
use crate::masks::HEAD_COUNT;

/// Diagnostics of a round and of its policy update. Numbers of a skipped update may be infinite or
/// NaN; JSON has null for both. With several ranks, entropies, KL, objective, losses, shares and
/// explained variance are means over the ranks.
///
/// An update makes several passes, the epochs, over the minibatches of the round; by default there
/// is one minibatch, the whole round. Below, the last minibatch is the one evaluated last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoundReport {
    /// Transitions of all envs.
    pub transitions: usize,
    /// Mean over the envs of the undiscounted sum of rewards, penalties included.
    pub mean_return: f64,
    /// Actions per op, in index order; as JSON without the last one, WIDEN, if it is 0.
    #[serde(with = "op_counts")]
    pub ops: OpCounts,
    /// Mean normalised entropy per head, in [0, 1], over those transitions of the first minibatch
    /// that have at least two legal ops and whose op uses the head. With one legal choice of the
    /// head, a transition counts as 0. 0 for a head without such transitions.
    #[serde(deserialize_with = "nulls_as_nan")]
    pub entropies: [f64; HEAD_COUNT],
    /// Complete epochs: the Adam step of each of their minibatches was applied.
    pub epochs: usize,
    /// Whether the KL limit stopped the update before its last Adam step.
    pub stopped_by_kl: bool,
    /// 1 if a loss or gradient that was not finite ended the update; the Adam steps before it stay
    /// applied. Otherwise 0.
    pub skipped: usize,
    /// KL divergence from the acting policy in the last minibatch: the mean of e^x − 1 − x,
    /// where x is the change of an action's log-probability. 0 after demonstrations.
    #[serde(deserialize_with = "null_as_nan")]
    pub kl: f64,
    /// Share of clipped ratios among the used heads, in the last minibatch.
    #[serde(deserialize_with = "null_as_nan")]
    pub clip_fraction: f64,
    /// Maximised policy objective, in the last minibatch.
    #[serde(deserialize_with = "null_as_nan")]
    pub policy_objective: f64,
    /// Value loss, in the last minibatch.
    #[serde(deserialize_with = "null_as_nan")]
    pub value_loss: f64,
    /// L2 norm of the gradient before clipping, in the last minibatch.
    #[serde(deserialize_with = "null_as_nan")]
    pub gradient_norm: f64,
    /// 1 − Var(returns − values)/Var(returns) of the first minibatch; 0 for constant returns.
    pub explained_variance: f64,
    /// Running standard deviation of the returns, by which they are divided.
    pub return_scale: f64,
    /// Fingerprint of the policy's weights and optimiser after the update, equal on all ranks;
    /// absent with a single rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
}

/// Counts of actions as the list of [`counted_ops`](crate::counted_ops).
pub(crate) mod op_counts {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::action::{ActionOp, OpCounts, counted_ops};

    pub(crate) fn serialize<S: Serializer>(ops: &OpCounts, to: S) -> Result<S::Ok, S::Error> {
        counted_ops(ops).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<OpCounts, D::Error> {
        let given: Vec<u64> = Vec::deserialize(from)?;
        let mut ops = OpCounts::default();
        if ![ops.len(), ActionOp::OF_HEAD.len()].contains(&given.len()) {
            let expected = format!("{} or {} counts", ActionOp::OF_HEAD.len(), ops.len());
            return Err(D::Error::custom(format!("expected {expected}, got {}", given.len())));
        }
        ops[..given.len()].copy_from_slice(&given);
        Ok(ops)
    }
}

/// Reads null as NaN.
pub(crate) fn null_as_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

fn nulls_as_nan<'de, D: Deserializer<'de>>(from: D) -> Result<[f64; HEAD_COUNT], D::Error> {
    let figures = <[Option<f64>; HEAD_COUNT]>::deserialize(from)?;
    Ok(figures.map(|figure| figure.unwrap_or(f64::NAN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_skipped_update_are_null_in_json() {
        let mut report = RoundReport { kl: f64::NAN, skipped: 1, ..RoundReport::default() };
        report.entropies[3] = f64::INFINITY;
        let text = serde_json::to_string(&report).unwrap();
        let back: RoundReport = serde_json::from_str(&text).unwrap();
        assert!(back.kl.is_nan() && back.entropies[3].is_nan());
        assert_eq!((back.skipped, back.value_loss), (1, 0.0));
    }
}
