//! The part of a permutation that each env gets in each batch.

use std::collections::BTreeMap;
use std::ops::Range;

use meristem_device::DeviceId;
use rand_chacha::ChaCha8Rng;
use rand_core::SeedableRng;

use super::config::{
    EPOCH_BITS, EnvOrder, EpochMode, OrderConfig, OrderPart, check, check_len, check_own, wrong,
};
use super::shuffle::shuffle;
use crate::error::{Error, Result};

/// Difference between the seeds of two neighbouring devices.
const SEED_STRIDE: u64 = 1009;

/// Envs of one device that share a permutation.
#[derive(Clone, Debug)]
struct Group {
    device: DeviceId,
    /// Rank of the group's first env among the envs of the device.
    rank: u64,
    /// Batch of each of its envs, and seed.
    own: EnvOrder,
    /// Samples of a full batch of all envs: `own.batch` × `envs`, or `usize::MAX` if that
    /// overflows.
    full_batch: usize,
    /// Number of envs.
    envs: usize,
    /// Samples of the envs.
    part: OrderPart,
    /// Batches in an epoch.
    batches: usize,
}

impl Group {
    /// Divides the samples into batches of `own.batch` samples for each env.
    fn divide(&mut self, drop_last: bool, limit: usize) {
        self.full_batch = self.own.batch.saturating_mul(self.envs);
        let partial = !drop_last && !self.part.len.is_multiple_of(self.full_batch);
        self.batches = (self.part.len / self.full_batch + usize::from(partial)).min(limit);
    }
}

/// A validated [`OrderConfig`]: the part of a permutation that each env gets in each batch.
#[derive(Clone, Debug)]
pub struct EpochOrder {
    epoch_mode: EpochMode,
    shuffle: bool,
    drop_last: bool,
    /// Upper limit of batches in an epoch.
    limit: usize,
    batches: usize,
    groups: Vec<Group>,
    /// Group of each env, and the env's position in the group.
    envs: Vec<(usize, usize)>,
}

impl EpochOrder {
    /// Checks `config`. Does not wait.
    ///
    /// # Errors
    /// [`Error::Argument`] for a zero batch, no envs, another number of parts, ranks or own options
    /// than envs, ranks or different batches or seeds with [`EpochMode::Dealt`], a rank of 2^24 or
    /// more, a zero `max_batches`, more than 2^32 − 1 samples; [`Error::Hole`] if the epoch's last
    /// batch would leave a hole.
    pub fn new(config: &OrderConfig) -> Result<Self> {
        check(config)?;
        let mut groups: Vec<Group> = vec![];
        let mut envs = vec![];
        let mut envs_on: BTreeMap<DeviceId, u64> = BTreeMap::new();
        let whole = OrderPart { number: 0, len: config.len };
        for (env, &device) in config.devices.iter().enumerate() {
            let part = config.parts.as_ref().map_or(whole, |parts| parts[env]);
            let on_device = envs_on.entry(device).or_default();
            let same = |group: &Group| (group.device, group.part) == (device, part);
            let shared = match config.epoch_mode {
                EpochMode::Dealt => groups.iter().position(same),
                EpochMode::Full => None,
            };
            let group = shared.unwrap_or_else(|| {
                let rank = config.ranks.as_ref().map_or(*on_device, |ranks| ranks[env] as u64);
                let own = config.of_env(env);
                groups.push(Group { device, rank, own, full_batch: 0, envs: 0, part, batches: 0 });
                groups.len() - 1
            });
            *on_device += 1;
            envs.push((group, groups[group].envs));
            groups[group].envs += 1;
        }
        let limit = config.max_batches.unwrap_or(usize::MAX);
        groups.iter_mut().for_each(|group| group.divide(config.drop_last, limit));
        let shares_samples = config.parts.is_none() && config.epoch_mode == EpochMode::Dealt;
        if shares_samples {
            let batches = groups.iter().map(|group| group.batches).min().unwrap_or(0);
            groups.iter_mut().for_each(|group| group.batches = batches);
        }
        let OrderConfig { epoch_mode, shuffle, drop_last, .. } = *config;
        let batches = most_batches(&groups);
        let order = Self { epoch_mode, shuffle, drop_last, limit, batches, groups, envs };
        if shares_samples {
            order.refuse_hole()?;
        }
        Ok(order)
    }

    /// Gives another batch size and seed to `env`, which is below [`Self::envs`].
    ///
    /// # Errors
    /// [`Error::Argument`] for a zero batch, and with [`EpochMode::Dealt`].
    pub fn set(&mut self, env: usize, own: EnvOrder) -> Result<()> {
        check_own(&own, self.epoch_mode == EpochMode::Full)?;
        let group = &mut self.groups[self.envs[env].0];
        group.own = own;
        group.divide(self.drop_last, self.limit);
        self.batches = most_batches(&self.groups);
        Ok(())
    }

    /// Gives `env`, which is below [`Self::envs`], `len` other samples.
    ///
    /// # Errors
    /// [`Error::Argument`] with [`EpochMode::Dealt`], and for more than 2^32 − 1 samples.
    pub fn set_len(&mut self, env: usize, len: usize) -> Result<()> {
        check_len(len)?;
        if self.epoch_mode == EpochMode::Dealt {
            let expected = "the samples of all envs with epoch mode dealt";
            let remedy = "envs share samples there; use epoch mode full";
            return wrong("parts", expected, format!("{len} samples for one env"), remedy);
        }
        let group = &mut self.groups[self.envs[env].0];
        group.part.len = len;
        group.divide(self.drop_last, self.limit);
        self.batches = most_batches(&self.groups);
        Ok(())
    }

    /// Number of batches of an epoch in which `env` has samples, if [`Self::set`] gave it batches
    /// of `batch` samples. With [`EpochMode::Dealt`], where [`Self::set`] is an error, `batch` is
    /// ignored, and batches count in which any env of the device's group has samples.
    /// `env` < [`Self::envs`], `batch` > 0.
    pub fn batches_with(&self, env: usize, batch: usize) -> usize {
        let mut group = self.groups[self.envs[env].0].clone();
        if self.epoch_mode == EpochMode::Full {
            group.own.batch = batch;
            group.divide(self.drop_last, self.limit);
        }
        group.batches
    }

    /// Batch size and seed of `env`, which is below [`Self::envs`].
    pub fn own(&self, env: usize) -> EnvOrder {
        self.groups[self.envs[env].0].own
    }

    /// Batches in an epoch.
    pub fn batches(&self) -> usize {
        self.batches
    }

    /// Number of envs.
    pub fn envs(&self) -> usize {
        self.envs.len()
    }

    /// Number of permutations of an epoch.
    pub fn permutations(&self) -> usize {
        self.groups.len()
    }

    /// Number of the permutation that `env` gets its samples from, below [`Self::permutations`].
    /// `env` < [`Self::envs`].
    pub fn permutation_of(&self, env: usize) -> usize {
        self.envs[env].0
    }

    /// Entries of a permutation. `permutation` < [`Self::permutations`].
    pub fn permutation_len(&self, permutation: usize) -> usize {
        self.groups[permutation].part.len
    }

    /// Range of the env's permutation that `env` gets in `batch`; empty if the env gets no sample.
    /// `env` < [`Self::envs`].
    pub fn part(&self, batch: usize, env: usize) -> Range<usize> {
        let (group, position) = self.envs[env];
        let Group { full_batch, envs, part, batches, .. } = self.groups[group];
        if batch >= batches {
            return 0..0;
        }
        let start = batch * full_batch;
        let count = full_batch.min(part.len - start);
        let (each, longer) = (count / envs, count % envs);
        let first = start + position * each + position.min(longer);
        first..first + each + usize::from(position < longer)
    }

    /// Largest number of samples of `env` in any batch. `env` < [`Self::envs`].
    pub fn part_max(&self, env: usize) -> usize {
        // No batch of an env is larger than its first.
        self.part(0, env).len()
    }

    /// Number of samples that `env` gets in an epoch. `env` < [`Self::envs`].
    pub fn samples_of(&self, env: usize) -> usize {
        (0..self.batches).map(|batch| self.part(batch, env).len()).sum()
    }

    /// Writes the permutation with number `permutation` of `epoch` to `indices`, which has
    /// [`Self::permutation_len`] entries. `permutation` < [`Self::permutations`].
    pub fn permutation_into(&self, permutation: usize, epoch: u64, indices: &mut [u32]) {
        (0..).zip(indices.iter_mut()).for_each(|(place, index)| *index = place);
        if self.shuffle {
            let Group { device, rank, own, .. } = &self.groups[permutation];
            let offset = SEED_STRIDE.wrapping_mul(device.index() as u64);
            let mut random = ChaCha8Rng::seed_from_u64(own.seed.wrapping_add(offset));
            random.set_stream(epoch.wrapping_add(rank << EPOCH_BITS));
            shuffle(&mut random, indices);
        }
    }

    /// Refuses a hole in the last batch. No other batch is partial, so no other has a hole.
    fn refuse_hole(&self) -> Result<()> {
        let Some(batch) = self.batches.checked_sub(1) else { return Ok(()) };
        let empty = |env: &usize| self.part(batch, *env).is_empty();
        let Some(empty_env) = (0..self.envs()).find(empty) else { return Ok(()) };
        let Some(later_env) = (empty_env + 1..self.envs()).find(|env| !empty(env)) else {
            return Ok(());
        };
        let device = |env: usize| self.groups[self.permutation_of(env)].device;
        Err(Error::Hole {
            batch,
            empty_env,
            empty_device: device(empty_env),
            later_env,
            later_device: device(later_env),
        })
    }
}

/// Number of batches of the group with the most.
fn most_batches(groups: &[Group]) -> usize {
    groups.iter().map(|group| group.batches).max().unwrap_or(0)
}
