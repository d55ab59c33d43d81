//! Factors of the optimiser's steps of single elements.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Graph, GroupId};
use crate::error::{Error, Result};

/// Factors of the elements of some parameters of the host, by name, in PyTorch's layout. The
/// elements of other parameters have the factor 1.
pub type StepFactors = BTreeMap<String, Vec<f32>>;

impl Graph {
    /// The same graph with factors of the host's optimiser steps: an element p moves to
    /// `(1 − f)·p + f·p'`, where p' is the element after the update. With any optimiser this is a
    /// learning rate of f times the usual one; weight decay is part of the step. Only the presence
    /// of factors is part of a plan; their values are in device memory.
    ///
    /// # Errors
    /// [`Error::Argument`] for a name that is no parameter of the host, another number of elements,
    /// or a factor that is negative or not finite.
    pub fn with_step_factors(mut self, factors: Option<Arc<StepFactors>>) -> Result<Self> {
        let fail = |expected: String, got: String| {
            Err(Error::argument("with_step_factors", "factors", expected, got))
        };
        for (name, factors) in factors.iter().flat_map(|all| all.iter()) {
            let of_host = |p: &&super::ParamSpec| p.group == GroupId::HOST && p.name == *name;
            let Some(param) = self.params.iter().find(of_host) else {
                return fail("names of parameters of the host".into(), format!("`{name}`"));
            };
            let len: usize = param.shape.iter().product();
            if factors.len() != len {
                return fail(format!("{len} for `{name}`"), factors.len().to_string());
            }
            if let Some(wrong) = factors.iter().find(|f| !(f.is_finite() && **f >= 0.0)) {
                return fail(format!("numbers of at least 0 for `{name}`"), wrong.to_string());
            }
        }
        self.step_factors = factors;
        Ok(self)
    }
}
