//! The step that draws actions.

use std::sync::Arc;

use super::operand::{Signature, StepOperands, f32s, u8s, u32s};
use crate::kernels::Isa;
use crate::kernels::sample::{SampleFrom, SampleStep, Sampled, Sampler};

/// Draws, by rows.
#[derive(Clone, Debug, PartialEq)]
pub enum SampleOp {
    /// Reads outputs (logits, then V, of each row), the legality of places (u32), and the step's
    /// own values ([`SampleStep`], u32); writes choices (u32), the masks of the draws (u8),
    /// log-probabilities, entropies, values.
    Draw {
        /// Rules of the draw.
        sampler: Arc<Sampler>,
        /// Rows.
        rows: usize,
    },
}

impl SampleOp {
    pub(super) fn signature(&self) -> Signature {
        let SampleOp::Draw { sampler, rows } = self;
        let (logits, heads) = (sampler.logits(), f32s(rows * sampler.heads.len()));
        let legality = u32s(rows * sampler.places() * sampler.words());
        Signature::new(
            &[f32s(rows * (logits + 1)), legality, u32s(SampleStep::WORDS)],
            &[u32s(heads.len), u8s(rows * logits), heads, heads, f32s(*rows)],
        )
    }

    pub(super) fn run(&self, _isa: Isa, operands: StepOperands<'_>) {
        let SampleOp::Draw { sampler, .. } = self;
        let ([outputs, legality, step], writes) = operands.split::<3, 5>();
        let [choices, legal, log_probs, entropies, values] = writes;
        let from = SampleFrom {
            outputs: outputs.elements(),
            legality: legality.elements(),
            step: step.elements(),
        };
        let mut to = Sampled {
            choices: choices.elements(),
            legal: legal.elements(),
            log_probs: log_probs.elements(),
            entropies: entropies.elements(),
            values: values.elements(),
        };
        sampler.draw(&from, &mut to);
    }
}
