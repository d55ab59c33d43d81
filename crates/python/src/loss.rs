//! A Python function as the loss of a run.

use std::sync::Arc;

use meristem_train::external::{LossBatch, LossTargets, OwnLoss};
use meristem_train::{Error, Result};
use pyo3::prelude::*;

use crate::controller::Raised;
use crate::dlpack::{Array, Borrowed};
use crate::errors::{Failure, Kind};

/// Loss that calls a Python function with outputs, targets, and whether a gradient is wanted. It
/// stores an exception in `raised`.
pub(crate) struct PyLoss {
    function: Py<PyAny>,
    raised: Raised,
}

impl PyLoss {
    pub(crate) fn new(function: Py<PyAny>, raised: Raised) -> Self {
        Self { function, raised }
    }

    /// The loss for a run.
    pub(crate) fn boxed(self) -> Box<dyn OwnLoss> {
        Box::new(self)
    }

    fn call(
        &self,
        py: Python<'_>,
        batch: &LossBatch,
        losses: &mut [f32],
        gradient: Option<&mut [f32]>,
    ) -> PyResult<()> {
        let shape = [batch.samples, batch.width];
        let outputs = Array::shared(Arc::clone(&batch.outputs), &shape);
        let targets = match &batch.targets {
            // Copies, because a function may write to its arguments, and other calls get the same
            // targets.
            LossTargets::Classes(classes) => Array::shaped(classes.to_vec(), &shape[..1]),
            LossTargets::Numbers(numbers) => Array::shaped(numbers.to_vec(), &shape),
        };
        let answer = self.function.bind(py).call1((outputs, targets, gradient.is_some()))?;
        let (given, slopes): (Bound<'_, PyAny>, Bound<'_, PyAny>) = answer.extract()?;
        fill(losses, &given)?;
        gradient.map_or(Ok(()), |gradient| fill(gradient, &slopes))
    }
}

impl OwnLoss for PyLoss {
    fn compute(
        &mut self,
        batch: &LossBatch,
        losses: &mut [f32],
        gradient: Option<&mut [f32]>,
    ) -> Result<()> {
        Python::attach(|py| self.call(py, batch, losses, gradient)).map_err(|error| {
            let problem = error.to_string();
            self.raised.set(error);
            Error::OwnLoss { problem }
        })
    }
}

/// Copies an array, whose shape and type `meristem._loss` has checked.
fn fill(to: &mut [f32], given: &Bound<'_, PyAny>) -> PyResult<()> {
    let given = Borrowed::of(given)?;
    let numbers = given.numbers().filter(|numbers| numbers.len() == to.len()).ok_or_else(|| {
        let message = format!("`loss`: got another array, expected {} float32", to.len());
        Failure::usage(Kind::Argument, message, "convert it: numpy.ascontiguousarray(x, 'f4')")
    })?;
    to.copy_from_slice(numbers);
    Ok(())
}
