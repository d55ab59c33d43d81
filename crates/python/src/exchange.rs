//! All-reduce with eight bits for each element, and outer steps of local training, for Python
//! programs.

use std::sync::{Arc, Mutex, PoisonError};

use meristem_comm::{
    Communicator, Exchange, ExchangeOptions, Method, OuterOptions, OuterStep, SparseMethod,
};
use meristem_device::Tensor;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::comm::{Membership, feedback, reduction};
use crate::errors::{Failure, Kind};

/// Name of the one tensor of an exchange.
const TENSOR: &str = "tensor";
/// Number of sums after which Ok-Topk computes its thresholds again, as in training.
const REFRESH: u64 = 32;

/// An all-reduce of f32 tensors of one length with eight bits for each element. The rounding errors
/// of a call are added to the tensor of the next call.
#[pyclass(frozen, module = "meristem")]
pub(crate) struct Int8 {
    member: Py<Membership>,
    options: ExchangeOptions,
    /// Created for the first tensor.
    exchange: Arc<Mutex<Option<Exchange>>>,
}

#[pymethods]
impl Int8 {
    #[new]
    fn new(member: Py<Membership>, momentum: Option<f64>, mean: bool) -> PyResult<Self> {
        let (keep, reduction) = (feedback(true, momentum)?, reduction(mean));
        let usual = ExchangeOptions { keep, reduction, small: 0, ..ExchangeOptions::default() };
        let options = ExchangeOptions { method: Method::Int8, ..usual };
        Ok(Self { member, options, exchange: Arc::default() })
    }

    /// Sums the tensors of all ranks, in place.
    fn all_reduce(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let (options, kept) = (self.options.clone(), Arc::clone(&self.exchange));
        self.member.get().in_place(py, tensor, move |comm, tensor| {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            let exchange = match &mut *kept {
                Some(exchange) => exchange,
                none => none.insert(Exchange::new(&options, &[(TENSOR, tensor)])?),
            };
            Ok(exchange.run(comm, &[tensor])?)
        })
    }

    /// The residual as f32 in memory order and native byte order; `None` before the first sum.
    fn residual(&self, py: Python<'_>) -> PyResult<Option<Py<PyBytes>>> {
        let (rank, kept) = (self.member.get().take()?, Arc::clone(&self.exchange));
        let residual = self.member.get().work(py, rank, move |_| {
            let kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            let state = kept.as_ref().map(Exchange::export).transpose()?;
            let own = state.and_then(|mut state| state.kept.remove(TENSOR));
            Ok(own.map(|own| own.residual).filter(|residual| !residual.is_empty()))
        })?;
        Ok(residual.map(|bytes| PyBytes::new(py, &bytes).unbind()))
    }
}

/// The outer step of weights that each rank trains on its own, as one tensor.
#[pyclass(frozen, module = "meristem")]
pub(crate) struct Outer {
    member: Py<Membership>,
    options: OuterOptions,
    exchange: ExchangeOptions,
    /// Created by the first `begin`.
    step: Arc<Mutex<Option<OuterStep>>>,
}

#[pymethods]
impl Outer {
    #[new]
    fn new(
        member: Py<Membership>,
        lr: f64,
        momentum: f64,
        method: &str,
        density: f64,
    ) -> PyResult<Self> {
        let method = match method {
            "dense" => Method::Dense,
            "int8" => Method::Int8,
            "topk" => Method::Sparse(SparseMethod::TopK),
            "gtopk" => Method::Sparse(SparseMethod::GTopK),
            "ok-topk" => Method::Sparse(SparseMethod::OkTopK { refresh: REFRESH }),
            other => {
                let message = format!(
                    "`method`: got `{other}`, expected dense, int8, topk, gtopk or ok-topk"
                );
                return Err(Failure::usage(Kind::Argument, message, "give one of these").into());
            }
        };
        let options = OuterOptions { lr, momentum };
        let exchange = ExchangeOptions { method, density, small: 0, ..ExchangeOptions::default() };
        Ok(Self { member, options, exchange, step: Arc::default() })
    }

    /// Begins a round of local steps from these weights, which are equal on all ranks.
    fn begin(&self, py: Python<'_>, weights: &Bound<'_, PyAny>) -> PyResult<()> {
        let (options, exchange) = (self.options, self.exchange.clone());
        let kept = Arc::clone(&self.step);
        self.member.get().with_tensor(py, weights, move |_, weights| {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            let step = match &mut *kept {
                Some(step) => step,
                none => none.insert(OuterStep::new(options, &exchange, &[(TENSOR, &weights)])?),
            };
            Ok(step.begin(&[&weights])?)
        })?;
        Ok(())
    }

    /// Replaces the weights by the new synchronised ones, and begins the next round.
    fn step(&self, py: Python<'_>, weights: &Bound<'_, PyAny>) -> PyResult<()> {
        let kept = Arc::clone(&self.step);
        self.member.get().in_place(py, weights, move |comm: &mut Communicator, weights: &Tensor| {
            match &mut *kept.lock().unwrap_or_else(PoisonError::into_inner) {
                Some(step) => Ok(step.run(comm, &[weights])?),
                None => {
                    let message = "`step` came before `begin`";
                    Err(Failure::usage(Kind::State, message, "begin with the first weights"))
                }
            }
        })
    }
}
