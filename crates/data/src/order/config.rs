//! Parameters of an order, and their checks.

use meristem_device::DeviceId;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::named::named;

/// Lower bits of a generator's stream, which hold the epoch; the upper bits hold the rank.
pub(super) const EPOCH_BITS: u32 = 40;

/// Share of the samples that an env gets in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpochMode {
    /// Every env gets every sample once, each env in another order.
    Full,
    /// The samples are dealt out to the envs of a device: each of N envs gets 1/N of them.
    Dealt,
}

named! {
    EpochMode, "epoch_mode" of "order":
    "full" => Full, "dealt" => Dealt;
    "`dealt` gives each of N envs 1/N of the samples, `full` all of them"
}

/// The part of the dataset that an env gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderPart {
    /// Equal for envs with the same samples.
    pub number: usize,
    /// Number of samples; a sample that occurs twice counts twice.
    pub len: usize,
}

/// Batch size and seed of an env.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvOrder {
    /// Samples in a full batch, at least 1.
    pub batch: usize,
    /// Seed of the permutations.
    pub seed: u64,
}

/// Parameters of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderConfig {
    /// Samples in the dataset (or in the subset that is served).
    pub len: usize,
    /// The part of each env, in env order; `None` if all envs have the same `len` samples.
    pub parts: Option<Vec<OrderPart>>,
    /// Samples an env gets in a full batch, at least 1.
    pub batch_per_env: usize,
    /// The device of each env, in env order.
    pub devices: Vec<DeviceId>,
    /// With [`EpochMode::Full`], the rank of each env, for the generator's stream (rule 3 of
    /// [`crate::order`]), in place of its rank among the envs of its device. The env then has the
    /// order that the env with that rank has in a run with all envs on the device of this env.
    pub ranks: Option<Vec<usize>>,
    /// Batch and seed of each env in place of `batch_per_env` and `seed`, from which they may
    /// differ with [`EpochMode::Full`].
    pub own: Option<Vec<EnvOrder>>,
    /// Share of the samples that an env gets in an epoch.
    pub epoch_mode: EpochMode,
    /// Seed of the permutations.
    pub seed: u64,
    /// Whether to permute; false serves `0..len` in order to each group.
    pub shuffle: bool,
    /// Whether to leave out a last batch that is not full.
    pub drop_last: bool,
    /// Upper limit of batches in an epoch, at least 1.
    pub max_batches: Option<usize>,
}

impl OrderConfig {
    /// Batch and seed of an env.
    pub(super) fn of_env(&self, env: usize) -> EnvOrder {
        let of_all = EnvOrder { batch: self.batch_per_env, seed: self.seed };
        self.own.as_ref().map_or(of_all, |own| own[env])
    }
}

pub(super) fn check(config: &OrderConfig) -> Result<()> {
    check_batch(config.batch_per_env)?;
    if config.devices.is_empty() {
        let remedy = "name one device for each env, such as `cpu,cpu`";
        return wrong("devices", "one device for each env, at least one", "none".into(), remedy);
    }
    if let Some(parts) = config.parts.as_ref().filter(|p| p.len() != config.devices.len()) {
        let expected = format!("a part for each of the {} envs", config.devices.len());
        let remedy = "list the samples of every env, or leave the parts out";
        return wrong("parts", &expected, format!("{} parts", parts.len()), remedy);
    }
    if let Some(own) = &config.own {
        if own.len() != config.devices.len() {
            let expected = format!("one for each of the {} envs", config.devices.len());
            return wrong("own", &expected, own.len().to_string(), "list every env");
        }
        let of_all = EnvOrder { batch: config.batch_per_env, seed: config.seed };
        let is_full = config.epoch_mode == EpochMode::Full;
        own.iter().try_for_each(|own| check_own(own, is_full || *own == of_all))?;
    }
    if let Some(ranks) = &config.ranks {
        let fits = ranks.len() == config.devices.len() && config.epoch_mode == EpochMode::Full;
        let too_large = ranks.iter().any(|rank| *rank as u64 >= 1 << (64 - EPOCH_BITS));
        if !fits || too_large {
            let expected = "a rank below 2^24 for each env, with epoch mode full";
            let remedy = "leave the ranks out for the order of the envs";
            return wrong("ranks", expected, format!("{} ranks", ranks.len()), remedy);
        }
    }
    if config.max_batches == Some(0) {
        return wrong("max_batches", "at least 1", "0".into(), "leave it out for a whole epoch");
    }
    let of_parts = config.parts.iter().flatten().map(|part| part.len);
    of_parts.chain([config.len]).try_for_each(check_len)
}

/// Checks batch and seed of an env, which may be other than those of all envs if `may_differ`.
pub(super) fn check_own(own: &EnvOrder, may_differ: bool) -> Result<()> {
    if !may_differ {
        let expected = "the batch and the seed of all envs with epoch mode dealt";
        let got = format!("batch {} with seed {}", own.batch, own.seed);
        return wrong("own", expected, got, "envs share samples there; use epoch mode full");
    }
    check_batch(own.batch)
}

fn check_batch(batch: usize) -> Result<()> {
    match batch {
        0 => wrong("batch_per_env", "at least 1", "0".into(), "128 is a usual size"),
        _ => Ok(()),
    }
}

pub(super) fn check_len(len: usize) -> Result<()> {
    if u32::try_from(len).is_err() {
        let remedy = "indices are 32-bit; serve the dataset in parts";
        return wrong("len", "at most 4294967295 samples", len.to_string(), remedy);
    }
    Ok(())
}

pub(super) fn wrong(
    argument: &'static str,
    expected: &str,
    got: String,
    remedy: &str,
) -> Result<()> {
    Err(Error::Argument {
        operation: "gather",
        argument,
        expected: expected.into(),
        got,
        remedy: remedy.into(),
    })
}
