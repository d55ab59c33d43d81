//! The step of proximal policy optimisation's objective.

use std::sync::Arc;

use super::operand::{Signature, StepOperands, f32s, f64s, u8s, u32s};
use crate::kernels::Isa;
use crate::kernels::ppo::{PpoBatch, PpoLoss, Reference, report_len};

/// Whether a pass over a batch is the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PpoPass {
    /// The first: its log-probabilities become the reference, so that every ratio is exactly 1.
    First,
    /// A later one, compared with the reference of the first.
    Later,
}

/// The objective, by its formula, pass and rows.
#[derive(Clone, Debug, PartialEq)]
pub enum PpoOp {
    /// Reads outputs (logits, then V, of each row), choices (u32), legal choices (u8), advantages,
    /// returns; writes the gradient of the outputs, the reference log-probabilities (written in the
    /// first pass, read in later ones), and the report (f64).
    Objective {
        /// Formula.
        loss: Arc<PpoLoss>,
        /// Whether it is the first pass over the batch.
        pass: PpoPass,
        /// Rows.
        rows: usize,
    },
}

impl PpoOp {
    pub(super) fn signature(&self) -> Signature {
        let PpoOp::Objective { loss, rows, .. } = self;
        let (logits, heads) = (loss.logits(), loss.heads.len());
        let (outputs, row) = (f32s(rows * (logits + 1)), f32s(*rows));
        Signature::new(
            &[outputs, u32s(rows * heads), u8s(rows * logits), row, row],
            &[outputs, f32s(rows * heads), f64s(report_len(heads))],
        )
    }

    pub(super) fn run(&self, _isa: Isa, operands: StepOperands<'_>) {
        let PpoOp::Objective { loss, pass, .. } = self;
        let (reads, [gradient, reference, report]) = operands.split::<5, 3>();
        let [outputs, choices, legal, advantages, returns] = reads;
        let batch = PpoBatch {
            choices: choices.elements(),
            legal: legal.elements(),
            advantages: advantages.elements(),
            returns: returns.elements(),
        };
        let reference = match pass {
            PpoPass::First => Reference::Record(reference.elements()),
            PpoPass::Later => Reference::Given(reference.elements()),
        };
        loss.gradient(
            &batch,
            reference,
            outputs.elements(),
            gradient.elements(),
            report.elements(),
        );
    }
}
