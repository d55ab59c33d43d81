//! A Python function as the loss of a run.

use std::sync::Arc;

use meristem_device::{DType, Owner, Tensor};
use meristem_train::external::{DeviceLossBatch, LossBatch, LossTargets, OwnLoss};
use meristem_train::{Error, Result};
use pyo3::prelude::*;

use crate::controller::Raised;
use crate::dlpack::{Array, Borrowed, Foreign};
use crate::errors::{Failure, Kind};

/// Loss that calls a Python function with outputs, targets, and whether a gradient is wanted. It
/// stores an exception in `raised`.
pub(crate) struct PyLoss {
    function: Py<PyAny>,
    /// Whether the function gets arrays in the memory of the device, and the factor of the
    /// gradient.
    is_on_device: bool,
    raised: Raised,
}

impl PyLoss {
    pub(crate) fn new(function: Py<PyAny>, raised: Raised) -> Self {
        let of_device = |py: Python<'_>| function.bind(py).hasattr("is_on_device").unwrap_or(false);
        let is_on_device = Python::attach(of_device);
        Self { function, is_on_device, raised }
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

    fn call_on_device(
        &self,
        py: Python<'_>,
        batch: &DeviceLossBatch<'_>,
        losses: &mut [f32],
        gradient: Option<&Tensor>,
    ) -> PyResult<()> {
        let lend = |tensor: &Tensor| Array::lent_on_device(tensor).map_err(Failure::from);
        let (outputs, targets) = (lend(batch.outputs)?, lend(batch.targets)?);
        let arguments = (outputs, targets, gradient.is_some(), batch.factor);
        let answer = self.function.bind(py).call1(arguments)?;
        let (given, slopes): (Bound<'_, PyAny>, Bound<'_, PyAny>) = answer.extract()?;
        let (stream, samples) = (batch.outputs.stream(), losses.len());
        let empty = Tensor::empty(stream, [samples], DType::F32, Owner::Batches);
        let own = empty.map_err(Failure::from)?;
        let given = Foreign::of(&given, "losses", &[samples], stream)?;
        let slopes = gradient.map(|to| Foreign::of(&slopes, "gradient", to.dims(), stream));
        let slopes = slopes.transpose()?;
        let mut pieces = vec![(&given, &own)];
        pieces.extend(slopes.as_ref().zip(gradient));
        let read = py.detach(|| {
            Foreign::copy(stream, &pieces)?;
            own.to_vec().map_err(Failure::from)
        });
        losses.copy_from_slice(&read?);
        Ok(())
    }

    /// Stores the exception of a call. Returns the error for the run.
    fn noted(&self, error: PyErr) -> Error {
        let problem = error.to_string();
        self.raised.set(error);
        Error::OwnLoss { problem }
    }
}

impl OwnLoss for PyLoss {
    fn compute(
        &mut self,
        batch: &LossBatch,
        losses: &mut [f32],
        gradient: Option<&mut [f32]>,
    ) -> Result<()> {
        Python::attach(|py| self.call(py, batch, losses, gradient))
            .map_err(|error| self.noted(error))
    }

    fn is_on_device(&self) -> bool {
        self.is_on_device
    }

    fn compute_on_device(
        &mut self,
        batch: &DeviceLossBatch<'_>,
        losses: &mut [f32],
        gradient: Option<&Tensor>,
    ) -> Result<()> {
        Python::attach(|py| self.call_on_device(py, batch, losses, gradient))
            .map_err(|error| self.noted(error))
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
