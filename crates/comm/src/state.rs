//! State of a gradient exchange between steps, and its form in a checkpoint.

use std::collections::BTreeMap;

const RESIDUAL: &str = "residual";
const VELOCITY: &str = "velocity";
const SPLIT: &str = "split";
const OUTER: &str = "outer";

/// State of a gradient exchange between steps, for checkpoints.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExchangeState {
    /// Number of completed steps, which is the position in the warm-up.
    pub step: u64,
    /// State by parameter.
    pub kept: BTreeMap<String, ParameterState>,
}

/// State of one parameter as bytes, in memory order and native byte order. Absent parts are empty.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ParameterState {
    /// Sum of gradients, or with momentum correction of velocities, not sent so far.
    pub residual: Vec<u8>,
    /// Velocity of momentum correction.
    pub velocity: Vec<u8>,
    /// Threshold and regions of Ok-Topk for a bucket, stored with the bucket's first parameter.
    pub split: Vec<u8>,
    /// Momentum of the outer step, equal on all ranks.
    pub outer: Vec<u8>,
}

impl ParameterState {
    /// Whether residual, velocity and outer momentum, where present, have `bytes` bytes, the length
    /// of the parameter.
    pub fn has_length(&self, bytes: usize) -> bool {
        let parts = [&self.residual, &self.velocity, &self.outer];
        parts.into_iter().all(|part| part.is_empty() || part.len() == bytes)
    }
}

impl ExchangeState {
    /// The parts of a checkpoint with their names: `residual.NAME`, `velocity.NAME`, `split.NAME`
    /// and `outer.NAME` for each parameter, if present. The caller stores the number of steps.
    pub fn into_parts(self) -> impl Iterator<Item = (String, Vec<u8>)> {
        self.kept.into_iter().flat_map(|(name, kept)| {
            let ParameterState { residual, velocity, split, outer } = kept;
            let parts =
                [(RESIDUAL, residual), (VELOCITY, velocity), (SPLIT, split), (OUTER, outer)];
            let parts = parts.into_iter().filter(|(_, bytes)| !bytes.is_empty());
            parts.map(move |(part, bytes)| (format!("{part}.{name}"), bytes))
        })
    }

    /// The state after `step` steps with these parts, named as by [`into_parts`](Self::into_parts).
    /// Parts with other names are ignored.
    pub fn from_parts<'a>(step: u64, parts: impl Iterator<Item = (&'a str, &'a [u8])>) -> Self {
        let mut kept: BTreeMap<String, ParameterState> = BTreeMap::new();
        for (name, bytes) in parts {
            let Some((part, name)) = name.split_once('.') else { continue };
            let place: fn(&mut ParameterState) -> &mut Vec<u8> = match part {
                RESIDUAL => |kept| &mut kept.residual,
                VELOCITY => |kept| &mut kept.velocity,
                SPLIT => |kept| &mut kept.split,
                OUTER => |kept| &mut kept.outer,
                _ => continue,
            };
            place(kept.entry(name.to_owned()).or_default()).extend_from_slice(bytes);
        }
        Self { step, kept }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_the_names_of_a_checkpoint() {
        let kept = |[residual, velocity, split, outer]: [&[u8]; 4]| ParameterState {
            residual: residual.to_vec(),
            velocity: velocity.to_vec(),
            split: split.to_vec(),
            outer: outer.to_vec(),
        };
        let whole = kept([&[1, 2], &[3], &[4], &[6]]);
        let all = [("blocks.0.conv.weight", whole), ("b", kept([&[], &[5], &[], &[]]))];
        let all = all.map(|(name, kept)| (name.to_owned(), kept)).into();
        let state = ExchangeState { step: 7, kept: all };
        let parts: Vec<(String, Vec<u8>)> = state.clone().into_parts().collect();
        let named: Vec<(&str, &[u8])> = parts.iter().map(|(n, b)| (&n[..], &b[..])).collect();
        let expected: [(&str, &[u8]); 5] = [
            ("velocity.b", &[5]),
            ("residual.blocks.0.conv.weight", &[1, 2]),
            ("velocity.blocks.0.conv.weight", &[3]),
            ("split.blocks.0.conv.weight", &[4]),
            ("outer.blocks.0.conv.weight", &[6]),
        ];
        assert_eq!(named, expected);
        let others: [(&str, &[u8]); 2] = [("step", &[9]), ("other.b", &[9])];
        let back = ExchangeState::from_parts(7, named.into_iter().chain(others));
        assert_eq!(back, state);
    }
}
