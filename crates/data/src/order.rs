//! The order of samples: each env's samples as a pure function of numbers (D2, D4, D6).
//!
//! This order is part of the contract: the gather serves it, `meristem data plan` prints it, and
//! anyone can recompute it.
//!
//! 1. Envs are put into groups that keep their order. With [`EpochMode::Dealt`] a device's envs are
//!    one group; with [`EpochMode::Full`] each env is a separate group.
//! 2. Each group has its own permutation of `0..len` for each epoch. Without `shuffle` it is the
//!    identity. With `shuffle` it is the Fisher–Yates shuffle, from the end, of `0, 1, …, len−1`:
//!    `for i in (1..len).rev() { swap(i, below(i + 1)) }`.
//! 3. The generator is ChaCha with 8 rounds (`rand_chacha::ChaCha8Rng`). Its seed is
//!    `seed_from_u64(seed + 1009 * device_index)`, and its stream is `set_stream(epoch + (rank <<
//!    40))`; both sums wrap. `device_index` is 0 for `cpu` and `cuda`, and k for `cpu:k` and
//!    `cuda:k`. `rank` is the rank of the group's first env among the envs of the device, from 0;
//!    with `Dealt` it is always 0. Each epoch has its own stream, so an epoch is drawn without
//!    drawing the epochs before it. The streams of two envs are disjoint for epochs below 2^40.
//! 4. `below(n)` is Lemire's unbiased draw. With x the generator's next u32 and m = x·n as u64, the
//!    result is the upper half of m. If the lower half of m is less than `2^32 mod n`, x is drawn
//!    again.
//! 5. Batch b of a group is places `b·step .. min((b+1)·step, len)` of the group's permutation,
//!    with `step` = `batch_per_env` × envs in the group. Each env gets a range of these places, in
//!    env order. The ranges are as equal as possible, the first ones longer (10 over 3 is 4, 3, 3).
//! 6. A group has `len / step` batches, rounded down with `drop_last` and up without. An epoch has
//!    as many batches as the group with the fewest, and at most `max_batches`.
//! 7. In a partial last batch the envs without samples are left out. They must be the last envs;
//!    otherwise the order is refused with [`Error::Hole`].
//! 8. Envs may have different parts of the dataset ([`OrderConfig::parts`]). Then `len` is the
//!    length of an env's part, and a place of a permutation is a place in that part. With `Dealt`
//!    a device has one group for each part. Every group has its own number of batches, and an epoch
//!    has as many as the group with the most. In each batch the envs without samples are left out,
//!    whichever they are.
//! 9. With `Full`, an env may have its own batch and seed ([`OrderConfig::own`]), which are those
//!    of its group. Every group has its own number of batches, as with parts.
//!
//! So with `Full` an env's order depends only on seed, device and its rank on the device, and with
//! one env on each device both modes are the same.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use meristem_device::DeviceId;
use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Difference between the seeds of two neighbouring devices.
const SEED_STRIDE: u64 = 1009;

/// Lower bits of a generator's stream, which hold the epoch; the upper bits hold the rank.
const EPOCH_BITS: u32 = 40;

/// The longest listing of [`plan`], in indices; a longer one comes from a mistyped length.
pub(crate) const PLAN_INDICES_MAX: usize = 100_000_000;

/// Share of the samples that an env gets in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpochMode {
    /// Every env gets every sample once, each env in another order.
    Full,
    /// The samples are dealt out to the envs of a device: each of N envs gets 1/N of them.
    Dealt,
}

impl EpochMode {
    /// Both modes, with their names in configuration.
    pub const NAMES: [(&'static str, Self); 2] = [("full", Self::Full), ("dealt", Self::Dealt)];

    /// The name in configuration.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }
}

impl fmt::Display for EpochMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EpochMode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = Self::NAMES.iter().find(|(known, _)| *known == name);
        known.map(|(_, mode)| *mode).ok_or_else(|| Error::Argument {
            operation: "order",
            argument: "epoch_mode",
            expected: Self::NAMES.map(|(name, _)| name).join(" or "),
            got: format!("`{name}`"),
            remedy: "`dealt` gives each of N envs 1/N of the samples, `full` all of them".into(),
        })
    }
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
    /// With [`EpochMode::Full`], the rank of each env in the generator's stream (3 above) in place
    /// of its rank on its device: the env has the order of the env with that rank on one device.
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

/// Envs of one device that share a permutation.
#[derive(Clone, Debug)]
struct Group {
    device: DeviceId,
    /// Rank of the group's first env among the envs of the device.
    rank: u64,
    /// Batch of each of its envs, and seed.
    own: EnvOrder,
    /// Samples of a full batch: `own.batch` × `envs`, or `usize::MAX` if that overflows.
    step: usize,
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
        self.step = self.own.batch.saturating_mul(self.envs);
        let partial = !drop_last && !self.part.len.is_multiple_of(self.step);
        self.batches = (self.part.len / self.step + usize::from(partial)).min(limit);
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
    /// [`Error::Argument`] for a zero batch, no envs, another number of parts than envs, different
    /// batches or seeds with [`EpochMode::Dealt`], a zero `max_batches`, more than 2^32 − 1
    /// samples; [`Error::Hole`] if the epoch's last batch would leave a hole.
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
                groups.push(Group { device, rank, own, step: 0, envs: 0, part, batches: 0 });
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
    /// of `batch` samples. `env` < [`Self::envs`], `batch` > 0.
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
        let Group { step, envs, part, batches, .. } = self.groups[group];
        if batch >= batches {
            return 0..0;
        }
        let start = batch * step;
        let count = step.min(part.len - start);
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

impl OrderConfig {
    /// Batch and seed of an env.
    fn of_env(&self, env: usize) -> EnvOrder {
        let of_all = EnvOrder { batch: self.batch_per_env, seed: self.seed };
        self.own.as_ref().map_or(of_all, |own| own[env])
    }
}

/// The most batches of a group.
fn most_batches(groups: &[Group]) -> usize {
    groups.iter().map(|group| group.batches).max().unwrap_or(0)
}

fn wrong(argument: &'static str, expected: &str, got: String, remedy: &str) -> Result<()> {
    Err(Error::Argument {
        operation: "gather",
        argument,
        expected: expected.into(),
        got,
        remedy: remedy.into(),
    })
}

fn check_batch(batch: usize) -> Result<()> {
    match batch {
        0 => wrong("batch_per_env", "at least 1", "0".into(), "128 is a usual size"),
        _ => Ok(()),
    }
}

/// Checks batch and seed of an env, which may be other than those of all envs if `may_differ`.
fn check_own(own: &EnvOrder, may_differ: bool) -> Result<()> {
    if !may_differ {
        let expected = "the batch and the seed of all envs with epoch mode dealt";
        let got = format!("batch {} with seed {}", own.batch, own.seed);
        return wrong("own", expected, got, "envs share samples there; use epoch mode full");
    }
    check_batch(own.batch)
}

fn check(config: &OrderConfig) -> Result<()> {
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

fn check_len(len: usize) -> Result<()> {
    if u32::try_from(len).is_err() {
        let remedy = "indices are 32-bit; serve the dataset in parts";
        return wrong("len", "at most 4294967295 samples", len.to_string(), remedy);
    }
    Ok(())
}

/// Fisher–Yates shuffle from the end, as described in the module's documentation.
pub(crate) fn shuffle(random: &mut ChaCha8Rng, items: &mut [u32]) {
    for i in (1..items.len()).rev() {
        let j = below(random, i as u32 + 1);
        items.swap(i, j as usize);
    }
}

/// An unbiased draw from `0..n`, n >= 1: D. Lemire, "Fast random integer generation in an
/// interval", 2019 (arXiv 1805.10941).
pub(crate) fn below(random: &mut ChaCha8Rng, n: u32) -> u32 {
    let mut product = u64::from(random.next_u32()) * u64::from(n);
    if (product as u32) < n {
        let threshold = n.wrapping_neg() % n; // 2^32 mod n
        while (product as u32) < threshold {
            product = u64::from(random.next_u32()) * u64::from(n);
        }
    }
    (product >> 32) as u32
}

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
/// The errors of [`EpochOrder::new`]; [`Error::Argument`] if more than 100 million indices would be
/// listed.
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

/// Splits `0..len` into a training part and a held-out part (`docs/data.md`: the control validation
/// split), and returns both in this order, each sorted. Does not wait.
///
/// `held_out` is the held-out share, such as 0.1: `round(len · held_out)` samples are held out.
/// They are the first ones after a shuffle of `0..len` as in the module's documentation, with the
/// generator `ChaCha8Rng::seed_from_u64(seed)` and `set_stream(u64::MAX)`, a stream that no epoch
/// reaches.
///
/// # Errors
/// [`Error::Argument`] if `held_out` is not in 0..=1 or `len` is above 2^32 − 1.
pub fn split_by_seed(len: usize, held_out: f64, seed: u64) -> Result<(Vec<u32>, Vec<u32>)> {
    let wrong = |argument, expected: &str, got: String| Error::Argument {
        operation: "split_by_seed",
        argument,
        expected: expected.into(),
        got,
        remedy: "0.1 holds out every tenth sample".into(),
    };
    if !(0.0..=1.0).contains(&held_out) {
        return Err(wrong("held_out", "a share from 0 to 1", held_out.to_string()));
    }
    let count = u32::try_from(len)
        .map_err(|_| wrong("len", "at most 4294967295 samples", len.to_string()))?;
    let mut indices: Vec<u32> = (0..count).collect();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(u64::MAX);
    shuffle(&mut random, &mut indices);
    let mut train = indices.split_off((len as f64 * held_out).round() as usize);
    let mut held_out = indices;
    train.sort_unstable();
    held_out.sort_unstable();
    Ok((train, held_out))
}
