//! An order as lists of samples.

use meristem_device::DeviceId;
use serde::Serialize;

use super::config::{EpochMode, OrderConfig};
use super::epoch_order::EpochOrder;
use crate::error::{Error, Result};

/// Most indices of all permutations of a [`plan`]; more come from a mistyped length.
const PLAN_INDICES_MAX: usize = 100_000_000;

/// A complete order: the output of `meristem data plan --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OrderPlan {
    /// Number of samples in the dataset. For an env that has a part of the dataset, indices are
    /// places in this part.
    pub len: usize,
    /// Samples an env gets in a full batch.
    pub batch_per_env: usize,
    /// The device of each env.
    pub devices: Vec<String>,
    /// Share of the samples that an env gets in an epoch.
    pub epoch_mode: EpochMode,
    /// Seed of the permutations.
    pub seed: u64,
    /// Whether the order is permuted.
    pub shuffle: bool,
    /// Whether a last batch that is not full is left out.
    pub drop_last: bool,
    /// Epochs 0, 1, ….
    pub epochs: Vec<EpochPlan>,
}

/// One epoch of a [`OrderPlan`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EpochPlan {
    /// Number of the epoch, from 0.
    pub epoch: u64,
    /// `batches[b][e]`: the sample indices of env e in batch b. Envs without samples have an empty
    /// list, or none if all envs after them have no samples either.
    pub batches: Vec<Vec<Vec<u32>>>,
}

/// Lists the first `epochs` epochs of an order.
///
/// # Errors
/// The errors of [`EpochOrder::new`]; [`Error::Argument`] if the permutations of all epochs have
/// more than 100 million indices together, listed or not.
pub fn plan(config: &OrderConfig, epochs: u64) -> Result<OrderPlan> {
    let order = EpochOrder::new(config)?;
    let count = order.permutations();
    let lens = || (0..count).map(|permutation| order.permutation_len(permutation));
    let of_epoch = lens().map(|len| len.max(1)).fold(0, usize::saturating_add);
    let indices = of_epoch.saturating_mul(epochs as usize);
    if indices > PLAN_INDICES_MAX {
        return Err(Error::Argument {
            operation: "plan",
            argument: "len",
            expected: format!(
                "such that len × permutations × epochs is at most {PLAN_INDICES_MAX}"
            ),
            got: format!("{} × {count} × {epochs}", config.len),
            remedy: "list fewer epochs or a shorter dataset".into(),
        });
    }
    let mut permutations: Vec<Vec<u32>> = lens().map(|len| vec![0; len]).collect();
    let mut listed = vec![];
    for epoch in 0..epochs {
        for (number, permutation) in permutations.iter_mut().enumerate() {
            order.permutation_into(number, epoch, permutation);
        }
        let samples =
            |batch, env| permutations[order.permutation_of(env)][order.part(batch, env)].to_vec();
        let of_batch = |batch| {
            let mut envs: Vec<_> = (0..order.envs()).map(|env| samples(batch, env)).collect();
            let present = envs.iter().rposition(|samples| !samples.is_empty());
            envs.truncate(present.map_or(0, |last| last + 1));
            envs
        };
        let batches = (0..order.batches()).map(of_batch).collect();
        listed.push(EpochPlan { epoch, batches });
    }
    let OrderConfig { len, batch_per_env, epoch_mode, seed, shuffle, drop_last, .. } = *config;
    let devices = config.devices.iter().map(DeviceId::to_string).collect();
    let epochs = listed;
    Ok(OrderPlan { len, batch_per_env, devices, epoch_mode, seed, shuffle, drop_last, epochs })
}
