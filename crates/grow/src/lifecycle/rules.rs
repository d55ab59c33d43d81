//! Configurable rules of growth.

use std::ops::RangeInclusive;

use meristem_nn::graph::WidthInit;
use serde::{Deserialize, Serialize};

use super::error::RuleError;
use super::gates::Gates;
use super::slot::Birth;

/// Configurable rules of growth. In files every key is optional; an unknown key is an error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rules {
    /// Largest number of simultaneous modules in a host, fossilized ones included: 3.
    pub max_modules: usize,
    /// Largest number of trained parameters of a host with its modules: no limit.
    pub max_parameters: Option<u64>,
    /// Largest number of multiply-accumulate operations per image, in evaluation, of a host with
    /// its modules: no limit.
    pub max_macs: Option<u64>,
    /// Place of a new module in the network: joint.
    pub birth: Birth,
    /// Smallest age of a module for pruning: 5 steps.
    pub min_prune_age_steps: u32,
    /// Steps of the embargo on a slot after a prune: 5 (at least 1).
    pub embargo_steps: u32,
    /// Steps of Resetting: 1 (at least 1).
    pub resetting_steps: u32,
    /// Initial parameters of further features of a layer: zero.
    pub width_init: WidthInit,
    /// The gates.
    pub gates: Gates,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            max_modules: 3,
            max_parameters: None,
            max_macs: None,
            birth: Birth::default(),
            min_prune_age_steps: 5,
            embargo_steps: 5,
            resetting_steps: 1,
            width_init: WidthInit::Zero,
            gates: Gates::default(),
        }
    }
}

impl Rules {
    /// Checks that every rule is in its range.
    ///
    /// # Errors
    /// [`RuleError`] with the rule, its range and the value.
    pub fn check(&self) -> Result<(), RuleError> {
        let gates = &self.gates;
        rule("embargo_steps", f64::from(self.embargo_steps), 1.0..=f64::INFINITY)?;
        rule("resetting_steps", f64::from(self.resetting_steps), 1.0..=f64::INFINITY)?;
        rule("gates.min_gradient_health", gates.min_gradient_health, 0.0..=1.0)?;
        rule("gates.max_exploding_share", gates.max_exploding_share, 0.0..=1.0)?;
        rule("gates.alpha_tolerance", gates.alpha_tolerance, 0.0..=1.0)?;
        rule("gates.min_contribution_pp", gates.min_contribution_pp, -100.0..=100.0)
    }
}

fn rule(what: &'static str, got: f64, range: RangeInclusive<f64>) -> Result<(), RuleError> {
    if range.contains(&got) {
        return Ok(());
    }
    Err(RuleError { what, least: *range.start(), most: *range.end(), got })
}
