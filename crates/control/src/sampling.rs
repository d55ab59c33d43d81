//! Sampling of choices from logits: masked distributions with probability floors, drawn head by
//! head.
//!
//! With n legal choices and f = min(floor, .99/n), a legal choice has the probability p = f + (1 −
//! n·f)·softmax(logits over the legal choices); the others have none. All arithmetic is f32.

use meristem_device::random::Rng;

use crate::action::{Action, Choices, Op};
use crate::heads::{Floors, HEADS, HeadKind};
use crate::masks::{HEAD_COUNT, HeadLayout, Legality};

/// Represents minus infinity among logits: its exponential is 0, and being finite it gives no NaN
/// differences.
pub const MASKED_LOGIT: f32 = -1e9;

/// Method of choosing.
#[derive(Debug)]
pub enum Pick<'a> {
    /// Draw by probability.
    Sample(&'a mut Rng),
    /// The most probable choice; among equals the first.
    Greedy,
}

/// The draw for one env.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// One choice per head.
    pub choices: Choices,
    /// Log-probability of the choice, per head; 0 where only one was legal.
    pub log_probs: [f32; HEAD_COUNT],
    /// Entropy per head over its largest possible value ln(n), in [0, 1]; 0 where only one was
    /// legal.
    pub entropies: [f32; HEAD_COUNT],
}

impl Draw {
    /// The action of the choices.
    pub fn action(&self) -> Action {
        // Every head has a choice within its size, so this is always an action.
        Action::from_choices(&self.choices).unwrap_or(Action::Wait)
    }
}

/// Number of legal choices, and the probability floor of each.
pub fn effective_floor(floor: f32, mask: &[u8]) -> (usize, f32) {
    let legal = mask.iter().filter(|choice| **choice != 0).count();
    (legal, floor.min(0.99 / legal.max(1) as f32))
}

/// Turns one head's logits into probabilities, in place. A single legal choice has exactly 1. A
/// logit that is not finite counts as 0.
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

/// Entropy of a head's probabilities over ln(n), n the number of legal choices; 0 for one choice.
pub fn normalized_entropy(probabilities: &[f32], mask: &[u8]) -> f32 {
    let legal = mask.iter().filter(|choice| **choice != 0).count();
    if legal < 2 {
        return 0.0;
    }
    let terms = probabilities.iter().map(|&p| if p > 0.0 { p * p.ln() } else { 0.0 });
    -terms.sum::<f32>() / (legal as f32).ln()
}

/// Draws an action: the op first, then the slot under that op's slot mask, then the rest. `logits`
/// is one row in `layout` and is turned into the probabilities drawn from. `mask` receives the
/// masks of this draw, as stored in a transition.
pub fn draw(
    layout: &HeadLayout,
    legality: &Legality,
    floors: &Floors,
    logits: &mut [f32],
    mask: &mut [u8],
    mut pick: Pick<'_>,
) -> Draw {
    let mut draw = Draw {
        choices: [0; HEAD_COUNT],
        log_probs: [0.0; HEAD_COUNT],
        entropies: [0.0; HEAD_COUNT],
    };
    legality.write_ops(layout, mask);
    for (index, head) in HEADS.iter().enumerate() {
        let range = layout.range(index);
        if head.kind != HeadKind::Op {
            let [op, slot, ..] = draw.choices;
            legality.write_head(index, (Op::ALL[op], slot), &mut mask[range.clone()]);
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

/// Chooses a legal choice: illegal ones are skipped, whatever rounding does to the sum.
fn choose(probabilities: &[f32], mask: &[u8], pick: &mut Pick<'_>) -> usize {
    let legal = || (0..mask.len()).filter(|choice| mask[*choice] != 0);
    match pick {
        Pick::Sample(rng) => {
            let mut left = rng.uniform();
            let drawn = legal().find(|choice| {
                left -= probabilities[*choice];
                left < 0.0
            });
            drawn.or(legal().next_back()).unwrap_or(0)
        }
        Pick::Greedy => {
            let better = |a: &usize, b: &usize| {
                probabilities[*a].total_cmp(&probabilities[*b]).then(b.cmp(a))
            };
            legal().max_by(better).unwrap_or(0)
        }
    }
}
