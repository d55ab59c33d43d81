//! Results of a policy step, decoded.

use crate::action::Choices;
use crate::masks::HEAD_COUNT;

/// Results of a policy step, env by env. In a demonstration the choices are the teacher's, and all
/// log-probabilities are 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyOutputs {
    /// `[env][head]`.
    pub choices: Vec<Choices>,
    /// Log-probabilities of the choices, `[env][head]`; 0 for a head that the op does not use.
    pub log_probs: Vec<[f32; HEAD_COUNT]>,
    /// Normalised entropies, `[env][head]`, in [0, 1].
    pub entropies: Vec<[f32; HEAD_COUNT]>,
    /// V in units of reward.
    pub values: Vec<f32>,
}

impl PolicyOutputs {
    /// Decodes the words of choices, log-probabilities, entropies and values.
    pub(super) fn from_words([choices, log_probs, entropies, values]: &[Vec<u32>; 4]) -> Self {
        let heads = |words: &[u32]| {
            let row = words.chunks_exact(HEAD_COUNT);
            row.map(|row| std::array::from_fn(|head| f32::from_bits(row[head]))).collect()
        };
        let choices = choices.chunks_exact(HEAD_COUNT);
        Self {
            choices: choices.map(|row| std::array::from_fn(|head| row[head] as usize)).collect(),
            log_probs: heads(log_probs),
            entropies: heads(entropies),
            values: values.iter().map(|word| f32::from_bits(*word)).collect(),
        }
    }
}

/// The words of the four tensors that one policy step reads back.
pub(super) fn four_tensors(words: impl IntoIterator<Item = Vec<u32>>) -> [Vec<u32>; 4] {
    let mut words = words.into_iter();
    std::array::from_fn(|_| words.next().unwrap_or_default())
}
