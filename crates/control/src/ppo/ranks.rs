//! Learning over several ranks. Each rank has its own envs and rollout. Every input of an update is
//! merged over the ranks, in rank order, so that all policies stay equal bit for bit.

use meristem_comm::{Communicator, Exchange, ExchangeOptions, ExchangeState};
use meristem_device::{DType, Owner, Stream, Tensor};
use meristem_nn::{HostData, HostTensor, StateDict};

use super::protocol;
use super::rollout::Rollout;
use super::targets::{ScalarMoments, Targets};
use crate::error::{Error, Result};
use crate::normalizer::{Moments, Normalizer};
use crate::policy::Policy;
use crate::report::RoundReport;

/// Prefix of the exchange's state in a checkpoint.
const PREFIX: &str = "exchange.";

/// A policy's connection to the other ranks.
#[derive(Debug)]
pub(super) struct Ranks {
    /// The communicator; `None` once this rank has left after a failure.
    comm: Option<Communicator>,
    stream: Stream,
    options: ExchangeOptions,
    exchange: GradientExchange,
}

/// The gradient exchange. The first gradient creates it; before that only an imported state exists.
enum GradientExchange {
    Imported(ExchangeState),
    Running(Box<Exchange>),
}

impl std::fmt::Debug for GradientExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            GradientExchange::Imported(_) => "Imported",
            GradientExchange::Running(_) => "Running",
        })
    }
}

impl Ranks {
    pub(super) fn new(comm: Communicator, stream: &Stream, options: &ExchangeOptions) -> Self {
        let (stream, options) = (stream.clone(), options.clone());
        let exchange = GradientExchange::Imported(ExchangeState::default());
        Self { comm: Some(comm), stream, options, exchange }
    }

    /// Leaves the communicator, so that the other ranks fail at once instead of waiting. Afterwards
    /// this rank cannot learn.
    pub(super) fn leave(&mut self) {
        self.comm = None;
    }

    /// Gathers `own` from all ranks, in rank order.
    fn gather(&mut self, own: &[f64]) -> Result<Vec<Vec<f64>>> {
        let len = own.len();
        let comm = joined(&mut self.comm)?;
        let own = Tensor::from_slice(&self.stream, own, [len], Owner::Collectives)?;
        let all = [len * comm.size()];
        let all = Tensor::zeros(&self.stream, all, DType::F64, Owner::Collectives)?;
        comm.all_gather(&own, &all)?;
        Ok(all.to_vec::<f64>()?.chunks(len).map(<[f64]>::to_vec).collect())
    }

    /// Element-wise mean over all ranks.
    pub(super) fn mean(&mut self, own: &[f64]) -> Result<Vec<f64>> {
        let all = self.gather(own)?;
        let n = all.len() as f64;
        let mean = |i: usize| all.iter().map(|rank| rank[i]).sum::<f64>() / n;
        Ok((0..own.len()).map(mean).collect())
    }

    /// Computes advantages and returns over all ranks; see [`Rollout::finish`].
    pub(super) fn finish(
        &mut self,
        rollout: &Rollout,
        steps: usize,
        targets: Targets,
        scale: &mut ScalarMoments,
    ) -> Result<f64> {
        let ([returns, advantages], paid) = rollout.finish_part(steps, targets)?;
        let own = [&returns.to_array()[..], &advantages.to_array(), &[paid]].concat();
        let all = self.gather(&own)?;
        let mut advantages = ScalarMoments::default();
        for rank in &all {
            scale.merge(&ScalarMoments::from_array([rank[0], rank[1], rank[2]]));
            advantages.merge(&ScalarMoments::from_array([rank[3], rank[4], rank[5]]));
        }
        let advantages = (!targets.by_minibatch).then(|| advantages.mean_and_std());
        rollout.normalise(steps, targets, scale.std(), advantages)?;
        Ok(all.iter().map(|rank| rank[6]).sum::<f64>() / all.len() as f64)
    }

    /// Moments of the numbers of all ranks.
    pub(super) fn merge(&mut self, own: ScalarMoments) -> Result<ScalarMoments> {
        let mut merged = ScalarMoments::default();
        for rank in self.gather(&own.to_array())? {
            merged.merge(&ScalarMoments::from_array([rank[0], rank[1], rank[2]]));
        }
        Ok(merged)
    }

    /// Replaces the policy's gradient by its average over the ranks, and recomputes the norm. Under
    /// a sparse exchange the average has only the elements that were sent.
    pub(super) fn exchange(&mut self, policy: &mut Policy) -> Result<()> {
        let gradients = policy.gradients()?;
        let comm = joined(&mut self.comm)?;
        if let GradientExchange::Imported(state) = &self.exchange {
            let named: Vec<(&str, &Tensor)> = gradients.iter().map(|(n, t)| (*n, t)).collect();
            let mut exchange = Exchange::new(&self.options, &named)?;
            exchange.import(comm, state)?;
            self.exchange = GradientExchange::Running(Box::new(exchange));
        }
        if let GradientExchange::Running(exchange) = &mut self.exchange {
            let gradients: Vec<&Tensor> = gradients.iter().map(|(_, tensor)| tensor).collect();
            exchange.run(comm, &gradients)?;
        }
        Ok(policy.measure()?)
    }

    /// Merges the observations collected by all ranks; see [`Normalizer::commit`].
    pub(super) fn commit(&mut self, normalizer: &mut Normalizer) -> Result<()> {
        let all = self.gather(&normalizer.gathered().to_vec())?;
        let all: Vec<Moments> = all.iter().map(|rank| Moments::from_slice(rank)).collect();
        normalizer.commit_all(all.iter());
        Ok(())
    }

    /// Sums the counts of a report over all ranks.
    pub(super) fn total(&mut self, report: &mut RoundReport) -> Result<()> {
        let counts = [&[report.transitions as u64], &report.ops[..]].concat();
        // Whole numbers far below 2^53.
        let counts: Vec<f64> = counts.into_iter().map(|count| count as f64).collect();
        let all = self.gather(&counts)?;
        let total = |i: usize| all.iter().map(|rank| rank[i]).sum::<f64>() as u64;
        report.transitions = total(0) as usize;
        report.ops.iter_mut().zip(1..).for_each(|(op, i)| *op = total(i));
        Ok(())
    }

    /// Compares the policies of all ranks and returns their fingerprint.
    ///
    /// # Errors
    /// [`Error::RanksDiffer`] for different policies.
    pub(super) fn agree(&mut self, policy: &Policy) -> Result<String> {
        let own = fingerprint(&[policy.state_dict()?, policy.optimiser_dict()?]);
        // Each half of a fingerprint is exact in f64.
        let halves = [own >> 32, own & u64::from(u32::MAX)].map(|half| half as f64);
        let all = self.gather(&halves)?;
        let text = |rank: &[f64]| format!("{:08x}{:08x}", rank[0] as u64, rank[1] as u64);
        if all.iter().any(|rank| *rank != halves) {
            let all: Vec<String> = all.iter().map(|rank| text(rank)).collect();
            return Err(Error::RanksDiffer { fingerprints: all.join(", ") });
        }
        Ok(text(&halves))
    }

    /// Saves the exchange's state into a checkpoint and returns the exchange's step.
    pub(super) fn save(&self, tensors: &mut StateDict) -> Result<u64> {
        let state = match &self.exchange {
            GradientExchange::Imported(state) => state.clone(),
            GradientExchange::Running(exchange) => exchange.export()?,
        };
        let step = state.step;
        for (name, bytes) in state.into_parts() {
            tensors.insert(format!("{PREFIX}{name}"), HostTensor::bytes(bytes));
        }
        Ok(step)
    }

    /// Restores a state from [`Ranks::save`].
    pub(super) fn restore(&mut self, step: u64, tensors: &StateDict) {
        let parts = tensors.iter().filter_map(|(name, tensor)| match &tensor.data {
            HostData::U8(bytes) => Some((name.strip_prefix(PREFIX)?, &bytes[..])),
            _ => None,
        });
        self.exchange = GradientExchange::Imported(ExchangeState::from_parts(step, parts));
    }
}

fn joined(comm: &mut Option<Communicator>) -> Result<&mut Communicator> {
    let gone = || protocol("a rank that has not failed".into(), "a failed rank".into());
    comm.as_mut().ok_or_else(gone)
}

/// FNV-1a hash over names and bits.
fn fingerprint(dicts: &[StateDict]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut take = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    };
    for (name, tensor) in dicts.iter().flat_map(StateDict::iter) {
        take(name.as_bytes());
        match &tensor.data {
            HostData::F32(values) => values.iter().for_each(|x| take(&x.to_bits().to_le_bytes())),
            HostData::I64(values) => values.iter().for_each(|x| take(&x.to_le_bytes())),
            HostData::U8(values) => take(values),
        }
    }
    hash
}
