//! Gradient health of a module, for the gates.

use serde::{Deserialize, Serialize};

/// L2 norm below which a tensor's gradient counts as vanished.
const VANISHING_NORM: f64 = 1e-7;
/// L2 norm above which a tensor's gradient counts as exploded. A norm that is not finite counts,
/// too.
const EXPLODING_NORM: f64 = 10.0;

/// Health of a module's gradients, from the L2 norm per tensor before clipping. A gradient is that
/// of one tensor in one optimiser step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradientHealth {
    /// `1 − .5·vanishing − .8·exploding`, clamped to `[0, 1]`.
    pub health: f64,
    /// Share of gradients whose norm is below 1e-7.
    pub vanishing: f64,
    /// Share of gradients whose norm is above 10 or not finite.
    pub exploding: f64,
    /// L2 norm over all tensors of the module, as the mean over the optimiser steps that were
    /// measured.
    pub norm: f64,
}

impl GradientHealth {
    /// Health from the L2 norm of the gradient of each of a module's tensors; `None` without
    /// tensors.
    pub fn from_norms(norms: &[f64]) -> Option<Self> {
        let count = |is_counted: &dyn Fn(f64) -> bool| {
            norms.iter().filter(|norm| is_counted(**norm)).count() as u64
        };
        let vanishing = count(&|norm| norm < VANISHING_NORM);
        let exploding = count(&|norm| norm > EXPLODING_NORM || !norm.is_finite());
        let norm = norms.iter().map(|norm| norm * norm).sum::<f64>().sqrt();
        Self::from_counts(vanishing, exploding, norms.len() as u64, norm)
    }

    /// Health from counts over tensors and steps, as in the network's metrics. `gradients` counts
    /// every tensor once in each optimiser step; `vanishing` and `exploding` count the vanishing
    /// and the exploding gradients among them. `norm` is the mean L2 norm over the steps. `None`
    /// without measured gradients.
    pub fn from_counts(vanishing: u64, exploding: u64, gradients: u64, norm: f64) -> Option<Self> {
        if gradients == 0 {
            return None;
        }
        let (vanishing, exploding) =
            (vanishing as f64 / gradients as f64, exploding as f64 / gradients as f64);
        let health = (1.0 - 0.5 * vanishing - 0.8 * exploding).clamp(0.0, 1.0);
        Some(Self { health, vanishing, exploding, norm })
    }

    /// Whether any gradient has exploded.
    pub fn is_exploding(&self) -> bool {
        self.exploding > 0.0
    }

    /// Whether any gradient has vanished.
    pub fn is_vanishing(&self) -> bool {
        self.vanishing > 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::GradientHealth;

    fn health(norms: &[f64]) -> GradientHealth {
        GradientHealth::from_norms(norms).unwrap()
    }

    #[test]
    fn follows_the_formula() {
        assert_eq!(GradientHealth::from_norms(&[]), None);
        assert_eq!(health(&[3.0, 4.0]).health, 1.0);
        assert_eq!(health(&[3.0, 4.0]).norm, 5.0);
        assert_eq!(health(&[1e-8, 1.0]).health, 0.75);
        assert_eq!(health(&[11.0, 1.0]).health, 0.6);
        assert_eq!(health(&[11.0, 0.0]).health, 1.0 - 0.25 - 0.4);
        assert!((health(&[11.0, 11.0]).health - 0.2).abs() < 1e-12);
    }

    #[test]
    fn the_thresholds_are_healthy_and_norms_that_are_not_finite_explode() {
        assert_eq!(health(&[1e-7, 10.0]).health, 1.0);
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(health(&[bad, 1.0]).is_exploding(), "{bad}");
            assert_eq!(health(&[bad, 1.0]).exploding, 0.5, "{bad}");
        }
    }
}
