//! Sampling of choices from logits, head by head, from masked distributions with probability
//! floors.
//!
//! With n legal choices and f = min(floor, .99/n), a legal choice has the probability p = f + (1 −
//! n·f)·softmax(logits over the legal choices). Illegal choices have probability 0. All arithmetic
//! is f32.

use meristem_device::random::Rng;

use crate::action::{Action, ActionOp, Choices};
use crate::heads::{Floors, HEADS, HeadKind};
use crate::masks::{HEAD_COUNT, HeadLayout, Legality};

/// Logit of an illegal choice. Its exponential is 0; minus infinity could yield NaN in a
/// difference.
pub const MASKED_LOGIT: f32 = -1e9;

/// Method of choosing.
#[derive(Debug)]
pub enum SamplingMode<'a> {
    /// Draw according to the probabilities.
    Sample(&'a mut Rng),
    /// Take the most probable choice; the first among equals.
    Greedy,
}

/// The draw for one env.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledAction {
    /// One choice per head.
    pub choices: Choices,
    /// Log-probability of the choice, per head; 0 for a head with one legal choice.
    pub log_probs: [f32; HEAD_COUNT],
    /// Normalised entropy per head, in [0, 1]; 0 for a head with one legal choice.
    pub entropies: [f32; HEAD_COUNT],
}

impl SampledAction {
    /// The action of the choices, for a layout without layers.
    pub fn action(&self) -> Action {
        // Every choice is below its head's size, so there always is an action.
        Action::from_choices(&self.choices).unwrap_or(Action::Wait)
    }
}

/// Number of legal choices, and the effective probability floor of each.
fn effective_floor(floor: f32, mask: &[u8]) -> (usize, f32) {
    let legal = mask.iter().filter(|choice| **choice != 0).count();
    (legal, floor.min(0.99 / legal.max(1) as f32))
}

/// Turns the logits of one head into probabilities, in place. `logits` and `mask` are `[choices]`;
/// `mask` is 1 for a legal choice and 0 otherwise. A single legal choice has probability 1 exactly.
/// A logit that is not finite counts as 0.
pub fn probabilities(logits: &mut [f32], mask: &[u8], floor: f32) {
    let (legal, floor) = effective_floor(floor, mask);
    let finite = |x: f32| if x.is_finite() { x } else { 0.0 };
    for (x, legal) in logits.iter_mut().zip(mask) {
        *x = if *legal != 0 { finite(*x) } else { MASKED_LOGIT };
    }
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter_mut().for_each(|x| *x = (*x - largest).exp());
    let sum: f32 = logits.iter().sum();
    let free = if legal == 1 { 1.0 } else { 1.0 - legal as f32 * floor };
    let floor = if legal == 1 { 0.0 } else { floor };
    for (x, legal) in logits.iter_mut().zip(mask) {
        *x = if *legal != 0 { floor + free * (*x / sum) } else { 0.0 };
    }
}

/// Normalised entropy of a head: the entropy divided by ln(n) for n legal choices; 0 for n = 1.
/// `probabilities` and `mask` are `[choices]`.
pub fn normalized_entropy(probabilities: &[f32], mask: &[u8]) -> f32 {
    let legal = mask.iter().filter(|choice| **choice != 0).count();
    if legal < 2 {
        return 0.0;
    }
    let terms = probabilities.iter().map(|&p| if p > 0.0 { p * p.ln() } else { 0.0 });
    -terms.sum::<f32>() / (legal as f32).ln()
}

/// Draws an action: the op, then a legal slot of this op, then the other heads. `logits` is one row
/// in `layout`, `[layout.total()]`; it receives the probabilities. `mask`, of the same length,
/// receives the masks of the draw, for the rollout.
pub fn sample_action(
    layout: &HeadLayout,
    legality: &Legality,
    floors: &Floors,
    logits: &mut [f32],
    mask: &mut [u8],
    mut pick: SamplingMode<'_>,
) -> SampledAction {
    let mut draw = SampledAction {
        choices: [0; HEAD_COUNT],
        log_probs: [0.0; HEAD_COUNT],
        entropies: [0.0; HEAD_COUNT],
    };
    legality.write_ops(layout, mask);
    for (index, head) in HEADS.iter().enumerate() {
        let range = layout.range(index);
        if head.kind != HeadKind::Op {
            let [op, slot, ..] = draw.choices;
            legality.write_part(layout, index, (ActionOp::ALL[op], slot), mask);
        }
        let row = &mut logits[range.clone()];
        probabilities(row, &mask[range.clone()], floors[index]);
        let choice = choose(row, &mask[range.clone()], &mut pick);
        draw.choices[index] = choice;
        draw.log_probs[index] = row.get(choice).map_or(0.0, |p| p.ln());
        draw.entropies[index] = normalized_entropy(row, &mask[range]);
    }
    draw
}

/// Chooses among the legal choices only, even if the probabilities sum to less than 1 by rounding.
fn choose(probabilities: &[f32], mask: &[u8], pick: &mut SamplingMode<'_>) -> usize {
    let legal = || (0..mask.len()).filter(|choice| mask[*choice] != 0);
    match pick {
        SamplingMode::Sample(rng) => {
            let mut left = rng.uniform();
            let drawn = legal().find(|choice| {
                left -= probabilities[*choice];
                left < 0.0
            });
            drawn.or(legal().next_back()).unwrap_or(0)
        }
        SamplingMode::Greedy => {
            let better = |a: &usize, b: &usize| {
                probabilities[*a].total_cmp(&probabilities[*b]).then(b.cmp(a))
            };
            legal().max_by(better).unwrap_or(0)
        }
    }
}
