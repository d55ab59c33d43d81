//! Parts of a training split: the samples that each env trains on, and the samples that it holds
//! out (D14).
//!
//! The parts are a pure function of settings, seed and targets, so anyone can recompute them.
//!
//! 1. The candidates are all samples, or with `classes` the samples of these classes.
//! 2. [`HeldOut::Share`] holds out the same candidates for all envs, drawn by
//!    [`split_by_seed`]. [`HeldOut::Folds`] deals the candidates to K folds, and env i holds out
//!    fold ⌊i / `envs_per_fold`⌋ mod K. The rest of the candidates is for training.
//!    [`HeldOut::Listed`] has the candidates of each fold, for training and held out, as lists.
//! 3. Folds: the candidates of each class, in ascending order of classes, are listed in ascending
//!    order and shuffled. These lists follow each other, and fold f has the places f, f + K,
//!    f + 2K, …. So the sizes of two folds differ by at most 1, and so do their numbers of samples
//!    of a class. Candidates with other targets than classes are one list.
//! 4. An env trains on all of the rest, or with a [`SampleDraw`] on `round(share · n)` of its n
//!    samples: the first ones after a shuffle of their ascending list; or with `bootstrap` as many
//!    draws from that list.
//! 5. Shuffles and draws use [`crate::order`], with `ChaCha8Rng::seed_from_u64(seed)` and
//!    streams that no epoch reaches: 2^64 − 2 for folds, one generator for all classes, and
//!    2^64 − 3 − i for the samples of env i.
//! 6. All lists of samples are then sorted. A list of draws has a sample as often as it was drawn.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_core::SeedableRng;

use crate::error::{Error, Result};
use crate::order::{OrderPart, below, shuffle, split_by_seed};

/// Stream of the generator of folds.
const FOLDS_STREAM: u64 = u64::MAX - 1;

/// Stream of the generator of env 0; env i has the i-th stream below it.
const ENV_STREAM: u64 = u64::MAX - 2;

/// Samples that a gather serves, as indices of the dataset. An index may occur several times.
/// Without a shuffle they are served in the order of their list.
#[derive(Clone, Debug, Default)]
pub enum Subset {
    /// All samples, in their order.
    #[default]
    All,
    /// The same samples to every env.
    Shared(Arc<[u32]>),
    /// Its own samples to each env, in env order.
    PerEnv(Vec<Arc<[u32]>>),
}

impl Subset {
    /// The subset of envs with these `lists`, one for each env, in a dataset of `len` samples.
    fn of_lists(lists: Vec<Arc<[u32]>>, len: usize) -> Self {
        let is_whole = |list: &[u32]| list.len() == len && (0..).zip(list).all(|(i, s)| i == *s);
        match lists.split_first() {
            Some((first, others)) if others.iter().all(|other| Arc::ptr_eq(first, other)) => {
                if is_whole(first) {
                    Self::All
                } else {
                    Self::Shared(first.clone())
                }
            }
            _ => Self::PerEnv(lists),
        }
    }

    /// The samples of an env, in their order; `None` for all.
    pub fn of_env(&self, env: usize) -> Option<&Arc<[u32]>> {
        match self {
            Self::All => None,
            Self::Shared(list) => Some(list),
            Self::PerEnv(lists) => lists.get(env),
        }
    }

    /// Number of samples of the one list of all envs, if they share one.
    pub(crate) fn shared_len(&self) -> Option<usize> {
        match self {
            Self::Shared(list) => Some(list.len()),
            Self::All | Self::PerEnv(_) => None,
        }
    }

    /// The lists; several envs may have the same.
    pub(crate) fn distinct(&self) -> &[Arc<[u32]>] {
        match self {
            Self::All => &[],
            Self::Shared(list) => std::slice::from_ref(list),
            Self::PerEnv(lists) => lists,
        }
    }

    /// Parts of the envs, with equal numbers for equal lists; `None` if all have the same samples.
    pub(crate) fn order_parts(&self) -> Option<Vec<OrderPart>> {
        let Self::PerEnv(lists) = self else { return None };
        let mut numbers: HashMap<&[u32], usize> = HashMap::new();
        let numbered = lists.iter().enumerate().map(|(env, list)| {
            let number = *numbers.entry(list).or_insert(env);
            OrderPart { number, len: list.len() }
        });
        Some(numbered.collect())
    }
}

/// A fold of a cross-validation that a dataset lists. Samples in neither list are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fold {
    /// Samples to train on, in ascending order.
    pub train: Arc<[u32]>,
    /// Samples to hold out, in ascending order; may be empty.
    pub held_out: Arc<[u32]>,
}

/// Samples that an env does not train on.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOut {
    /// This share of the candidates, from 0 to 1, the same for all envs.
    Share(f64),
    /// One of this many folds, at least 2: env i holds out fold ⌊i / envs_per_fold⌋ mod K.
    Folds(usize),
    /// The held-out samples of one of these folds, as with [`Self::Folds`].
    Listed(Arc<[Fold]>),
}

/// Draw of the samples on which an env trains from those that it does not hold out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleDraw {
    /// Share of the samples, above 0 and at most 1.
    pub share: f64,
    /// Whether they are drawn with replacement.
    pub bootstrap: bool,
}

impl SampleDraw {
    /// All samples, each once.
    pub const ALL: Self = Self { share: 1.0, bootstrap: false };

    /// Number of samples drawn from `len`.
    pub fn len_of(&self, len: usize) -> usize {
        (len as f64 * self.share).round() as usize
    }
}

impl Default for SampleDraw {
    fn default() -> Self {
        Self::ALL
    }
}

/// Rules for drawing the parts.
#[derive(Clone, Debug, PartialEq)]
pub struct PartsConfig {
    /// Classes whose samples are candidates; `None` for all samples.
    pub classes: Option<Vec<u32>>,
    /// Held-out samples.
    pub held_out: HeldOut,
    /// Number of consecutive envs that hold out the same fold, at least 1.
    pub envs_per_fold: usize,
    /// Draws of the envs: env i has entry i modulo their number. Without an entry all envs have
    /// [`SampleDraw::ALL`].
    pub draws: Vec<SampleDraw>,
    /// Number of each env, the i of rule 5 of the [module](self), from which its draw of samples
    /// follows; `None` for 0, 1 and so on.
    pub numbers: Option<Vec<usize>>,
    /// Seed of all draws.
    pub seed: u64,
}

/// Samples that are divided, by their targets.
#[derive(Clone, Copy, Debug)]
pub enum PartTargets<'a> {
    /// The class of each sample.
    Classes(&'a [u32]),
    /// This many samples with labels or numbers, or with classes that no rule needs.
    Other(usize),
}

impl PartTargets<'_> {
    fn len(self) -> usize {
        match self {
            Self::Classes(classes) => classes.len(),
            Self::Other(len) => len,
        }
    }
}

/// Samples of one env, as sorted indices of the dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvPart {
    /// Number of the held-out fold, if there are folds.
    pub fold: Option<usize>,
    /// Samples to train on; with `bootstrap` some of them occur several times.
    pub train: Arc<[u32]>,
    /// Held-out samples.
    pub held_out: Arc<[u32]>,
}

/// Parts of all envs.
#[derive(Clone, Debug, PartialEq)]
pub struct Parts {
    /// Samples of the dataset.
    len: usize,
    /// Seed of all draws.
    seed: u64,
    /// Number of each env, from which its draw of samples follows.
    numbers: Vec<usize>,
    /// The samples of each env before its draw.
    undrawn: Vec<Arc<[u32]>>,
    /// The draw of each env.
    draws: Vec<SampleDraw>,
    /// The part of each env, at least one.
    envs: Vec<EnvPart>,
}

impl Parts {
    /// Draws the parts of `envs` envs, at least one. Does not wait.
    ///
    /// # Errors
    /// [`Error::Argument`]: a class without samples, or classes of other targets; fewer than two
    /// folds, more folds than samples, or than samples of every class; a listed fold that `classes`
    /// leaves without samples; a share out of range, or a draw that leaves an env without samples.
    pub fn draw(config: &PartsConfig, targets: PartTargets<'_>, envs: usize) -> Result<Self> {
        let len = targets.len();
        if u32::try_from(len).is_err() {
            let expected = "at most 4294967295 samples".into();
            return wrong("targets", expected, len.to_string(), "indices are 32-bit");
        }
        let rests = match (&config.classes, &config.held_out) {
            (None, &HeldOut::Share(share)) => vec![rest(split_by_seed(len, share, config.seed)?)],
            (None, HeldOut::Listed(folds)) => by_list(folds, |_| true)?,
            (classes, held_out) => {
                let lists = candidates(targets, classes.as_deref())?;
                match held_out {
                    HeldOut::Share(share) => vec![by_share(&lists, *share, config.seed)?],
                    HeldOut::Folds(folds) => by_folds(lists, targets, *folds, config.seed)?,
                    HeldOut::Listed(folds) => {
                        let candidates = sorted(lists.into_values().flatten());
                        by_list(folds, |sample| candidates.binary_search(sample).is_ok())?
                    }
                }
            }
        };
        let rest = |env: usize| &rests[env / config.envs_per_fold.max(1) % rests.len()];
        let number =
            |env: usize| *config.numbers.as_ref().and_then(|all| all.get(env)).unwrap_or(&env);
        let mut parts = Self {
            len,
            seed: config.seed,
            numbers: (0..envs).map(number).collect(),
            undrawn: (0..envs).map(|env| rest(env).train.clone()).collect(),
            draws: vec![SampleDraw::ALL; envs],
            envs: (0..envs).map(|env| rest(env).clone()).collect(),
        };
        for (env, draw) in (0..envs).zip(config.draws.iter().cycle()) {
            parts.draw_again(env, draw)?;
        }
        Ok(parts)
    }

    /// Draws the training samples of `env`, which is below the number of envs, by this rule, and
    /// returns whether it is another rule than before. The samples of the other envs stay, and so
    /// do those that it holds out. Does not wait.
    ///
    /// # Errors
    /// As [`Self::draw`]; the samples are then unchanged.
    pub fn draw_again(&mut self, env: usize, draw: &SampleDraw) -> Result<bool> {
        if self.draws[env] == *draw {
            return Ok(false);
        }
        self.envs[env].train = drawn(draw, &self.undrawn[env], self.seed, self.numbers[env])?;
        self.draws[env] = *draw;
        Ok(true)
    }

    /// Number of samples that env 0 would train on with this draw.
    pub fn train_len(&self, draw: &SampleDraw) -> usize {
        self.undrawn.first().map_or(0, |samples| draw.len_of(samples.len()))
    }

    /// The part of each env, in env order.
    pub fn envs(&self) -> &[EnvPart] {
        &self.envs
    }

    /// Samples that the envs train on.
    pub fn train(&self) -> Subset {
        Subset::of_lists(self.envs.iter().map(|env| env.train.clone()).collect(), self.len)
    }

    /// Samples that the envs hold out.
    pub fn held_out(&self) -> Subset {
        Subset::of_lists(self.envs.iter().map(|env| env.held_out.clone()).collect(), self.len)
    }
}

/// The samples of some classes, as ascending indices. Does not wait.
pub fn of_classes(targets: &[u32], classes: &[u32]) -> Arc<[u32]> {
    let samples = (0..).zip(targets).filter(|(_, class)| classes.contains(class));
    samples.map(|(sample, _)| sample).collect()
}

fn wrong<T>(argument: &'static str, expected: String, got: String, remedy: &str) -> Result<T> {
    Err(Error::Argument { operation: "parts", argument, expected, got, remedy: remedy.into() })
}

fn sorted(samples: impl IntoIterator<Item = u32>) -> Arc<[u32]> {
    let mut samples: Vec<u32> = samples.into_iter().collect();
    samples.sort_unstable();
    samples.into()
}

fn rest((train, held_out): (Vec<u32>, Vec<u32>)) -> EnvPart {
    EnvPart { fold: None, train: train.into(), held_out: held_out.into() }
}

/// The candidates of each class in ascending order, or all candidates as one list.
fn candidates(
    targets: PartTargets<'_>,
    classes: Option<&[u32]>,
) -> Result<BTreeMap<u32, Vec<u32>>> {
    let mut lists: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    match targets {
        PartTargets::Classes(all) => {
            let wanted = |class: u32| classes.is_none_or(|classes| classes.contains(&class));
            let samples = (0..).zip(all).filter(|(_, class)| wanted(**class));
            samples.for_each(|(sample, class)| lists.entry(*class).or_default().push(sample));
        }
        PartTargets::Other(len) if classes.is_none() => {
            lists.insert(0, (0..).take(len).collect());
        }
        PartTargets::Other(_) => {
            let remedy = "leave `classes` out; only samples with one class each have this choice";
            return wrong("classes", "none".into(), "a list".into(), remedy);
        }
    }
    match classes.into_iter().flatten().find(|class| !lists.contains_key(class)) {
        None => Ok(lists),
        Some(class) => {
            let known: Vec<String> = lists.keys().map(u32::to_string).collect();
            let expected = format!("classes with samples, such as {}", known.join(", "));
            wrong("classes", expected, class.to_string(), "leave the class out of the list")
        }
    }
}

/// Holds out the same share for all envs.
fn by_share(lists: &BTreeMap<u32, Vec<u32>>, share: f64, seed: u64) -> Result<EnvPart> {
    let all = sorted(lists.values().flatten().copied());
    let (train, held_out) = split_by_seed(all.len(), share, seed)?;
    let samples =
        |places: Vec<u32>| places.into_iter().map(|place| all[place as usize]).collect::<Vec<_>>();
    Ok(rest((samples(train), samples(held_out))))
}

/// Deals the candidates to folds. Returns the samples outside and inside of each fold.
fn by_folds(
    lists: BTreeMap<u32, Vec<u32>>,
    targets: PartTargets<'_>,
    folds: usize,
    seed: u64,
) -> Result<Vec<EnvPart>> {
    let largest = lists.values().map(Vec::len).max().unwrap_or(0);
    if folds < 2 {
        let remedy = "5 and 10 are usual; leave `folds` out to train without folds";
        return wrong("folds", "at least 2".into(), folds.to_string(), remedy);
    }
    if folds > largest {
        let of = match targets {
            PartTargets::Classes(_) => "samples of the most frequent class",
            PartTargets::Other(_) => "samples",
        };
        let expected = format!("at most {largest}, the number of {of}");
        let remedy = "every fold needs a sample; 5 and 10 folds are usual";
        return wrong("folds", expected, folds.to_string(), remedy);
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(FOLDS_STREAM);
    let mut dealt = vec![];
    for mut list in lists.into_values() {
        shuffle(&mut random, &mut list);
        dealt.extend(list);
    }
    let of_fold = |fold: usize| {
        let samples = |inside: bool| {
            let places = dealt.iter().enumerate();
            let chosen = places.filter(|(place, _)| (place % folds == fold) == inside);
            sorted(chosen.map(|(_, sample)| *sample))
        };
        EnvPart { fold: Some(fold), train: samples(false), held_out: samples(true) }
    };
    Ok((0..folds).map(of_fold).collect())
}

/// The candidates among the samples of each listed fold.
fn by_list(folds: &[Fold], is_candidate: impl Fn(&u32) -> bool) -> Result<Vec<EnvPart>> {
    let chosen = |list: &[u32]| list.iter().copied().filter(&is_candidate).collect();
    let of_fold = |(number, fold): (usize, &Fold)| {
        let (train, held_out): (Arc<[u32]>, Arc<[u32]>) =
            (chosen(&fold.train), chosen(&fold.held_out));
        if train.is_empty() || held_out.is_empty() && !fold.held_out.is_empty() {
            let expected =
                format!("samples of these classes in fold {number}, trained and held out");
            let remedy = "restrict the samples to more classes, or list other folds";
            return wrong("classes", expected, "none".into(), remedy);
        }
        Ok(EnvPart { fold: Some(number), train, held_out })
    };
    folds.iter().enumerate().map(of_fold).collect()
}

/// The samples that the env with number `env` draws from those that it may train on.
fn drawn(draw: &SampleDraw, samples: &Arc<[u32]>, seed: u64, env: usize) -> Result<Arc<[u32]>> {
    let &SampleDraw { share, bootstrap } = draw;
    if !(share > 0.0 && share <= 1.0) {
        let remedy = "0.5 trains each env on half of its training samples";
        return wrong("train_share", "above 0 and at most 1".into(), share.to_string(), remedy);
    }
    if *draw == SampleDraw::ALL {
        return Ok(samples.clone());
    }
    let count = draw.len_of(samples.len());
    if count == 0 {
        let expected = format!("a share that leaves at least one of {} samples", samples.len());
        return wrong("train_share", expected, share.to_string(), "use a larger share");
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(ENV_STREAM - env as u64);
    if bootstrap {
        let len = samples.len() as u32;
        return Ok(sorted((0..count).map(|_| samples[below(&mut random, len) as usize])));
    }
    let mut shuffled = samples.to_vec();
    shuffle(&mut random, &mut shuffled);
    shuffled.truncate(count);
    Ok(sorted(shuffled))
}
