//! The collectives that are measured.

use meristem::comm::{FeedbackMode, SparseMethod, SparseSum, TopKElements, TopKStorage};
use meristem::device::{Error as DeviceError, Tensor};

use super::pattern::Expected;
use crate::failure::Failure;

/// The collective that a row measures.
#[derive(Clone, Copy)]
pub(super) enum Collective {
    DenseSum,
    SparseSum(SparseMethod),
    /// The all-gather of the ranks' largest elements.
    Gather,
}

impl Collective {
    /// The name of the collective, and the sum that its result is compared with.
    pub(super) fn name(self) -> (&'static str, Expected) {
        match self {
            Collective::DenseSum => ("dense", Expected::Dense),
            Collective::SparseSum(SparseMethod::TopK) => ("topk", Expected::Sent),
            Collective::SparseSum(SparseMethod::GTopK) => ("gtopk", Expected::Largest),
            Collective::SparseSum(SparseMethod::OkTopK { .. }) => ("ok-topk", Expected::Largest),
            Collective::Gather => ("gather", Expected::Sent),
        }
    }
}

/// Memory of a collective, reused in every round.
pub(super) enum Work {
    DenseSum,
    SparseSum(Box<SparseSum>),
    /// Created in the first round whose memory is not measured phase by phase.
    Gather(Option<Box<TopKStorage>>),
}

impl Work {
    pub(super) fn new(collective: Collective, input: &Tensor) -> Result<Work, Failure> {
        Ok(match collective {
            Collective::DenseSum => Work::DenseSum,
            Collective::SparseSum(method) => {
                Work::SparseSum(Box::new(SparseSum::new(input, method, FeedbackMode::Residual)?))
            }
            Collective::Gather => Work::Gather(None),
        })
    }

    /// The residual of a sparse sum.
    pub(super) fn residual(&self) -> Option<&Tensor> {
        match self {
            Work::SparseSum(sum) => sum.residual(),
            _ => None,
        }
    }
}

/// The sum of all ranks' elements, in rank order.
pub(super) fn summed(elements: &TopKElements, len: usize) -> Result<Vec<f32>, DeviceError> {
    let mut sum = vec![0.0; len];
    let (values, indices) = (elements.values.to_vec::<f32>()?, elements.indices.to_vec::<u32>()?);
    for (value, index) in values.iter().zip(indices) {
        sum[index as usize] += value;
    }
    Ok(sum)
}
