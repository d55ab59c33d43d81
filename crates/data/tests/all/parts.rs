//! Parts of the envs against a slow, obvious version (D14).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use meristem_data::parts::{
    EnvPart, Fold, HeldOut, PartTargets, Parts, PartsConfig, SampleDraw, of_classes,
};
use meristem_data::{Error, Subset};
use proptest::prelude::*;

/// Settings without an effect: every env trains on all samples.
fn whole(seed: u64) -> PartsConfig {
    let held_out = HeldOut::Share(0.0);
    let (classes, draws, numbers) = (None, vec![], None);
    PartsConfig { classes, held_out, envs_per_fold: 1, draws, numbers, seed }
}

/// All envs draw this share of their samples, with replacement if `bootstrap`.
fn draws(share: f64, bootstrap: bool) -> Vec<SampleDraw> {
    vec![SampleDraw { share, bootstrap }]
}

fn folds(count: usize, seed: u64) -> PartsConfig {
    PartsConfig { held_out: HeldOut::Folds(count), ..whole(seed) }
}

fn drawn(config: &PartsConfig, classes: &[u32], envs: usize) -> Vec<EnvPart> {
    Parts::draw(config, PartTargets::Classes(classes), envs).unwrap().envs().to_vec()
}

/// Number of samples of each class.
fn counts(samples: &[u32], classes: &[u32]) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    samples.iter().for_each(|i| *counts.entry(classes[*i as usize]).or_default() += 1);
    counts
}

/// Whether the numbers differ by at most 1.
fn are_near(numbers: impl Iterator<Item = usize> + Clone) -> bool {
    numbers.clone().max().unwrap_or(0) - numbers.min().unwrap_or(0) <= 1
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Each sample of the chosen classes is held out by exactly one of K envs, which trains on none
    /// of its held-out samples; sizes, and samples of a class, differ by at most 1 between folds.
    #[test]
    fn folds_are_a_stratified_partition(
        classes in prop::collection::vec(0..4_u32, 1..200), count in 2..9_usize,
        repeats in 1..3_usize, chosen in prop::option::of(0..3_u32), seed in any::<u64>()
    ) {
        let wanted: BTreeSet<u32> =
            classes.iter().copied().filter(|class| chosen.is_none_or(|c| *class <= c)).collect();
        prop_assume!(!wanted.is_empty());
        let candidates: Vec<u32> =
            (0..).zip(&classes).filter(|(_, c)| wanted.contains(c)).map(|(i, _)| i).collect();
        let most = counts(&candidates, &classes).into_values().max().unwrap();
        let listed = chosen.map(|_| wanted.iter().copied().collect());
        let config = PartsConfig { classes: listed, ..folds(count, seed) };
        let parts = Parts::draw(&config, PartTargets::Classes(&classes), count * repeats);
        if count > most {
            let error = parts.unwrap_err();
            let is_named = matches!(error, Error::Argument { argument: "folds", .. });
            prop_assert!(is_named, "{:?}", error);
            return Ok(());
        }
        let parts = parts.unwrap();
        let first = &parts.envs()[..count];
        let mut held_out: Vec<u32> = first.iter().flat_map(|env| env.held_out.to_vec()).collect();
        held_out.sort_unstable();
        prop_assert_eq!(&held_out, &candidates);
        prop_assert!(are_near(first.iter().map(|env| env.held_out.len())));
        for class in wanted {
            let of_class = |env: &EnvPart| {
                counts(&env.held_out, &classes).get(&class).copied().unwrap_or(0)
            };
            prop_assert!(are_near(first.iter().map(of_class)));
        }
        for (env, part) in parts.envs().iter().enumerate() {
            prop_assert_eq!(part.fold, Some(env % count));
            prop_assert_eq!(part, &first[env % count]);
            let held_out: BTreeSet<u32> = part.held_out.iter().copied().collect();
            let rest: Vec<u32> =
                candidates.iter().copied().filter(|i| !held_out.contains(i)).collect();
            prop_assert_eq!(&*part.train, &rest);
        }
    }

    /// An env trains on the documented number of its training samples: distinct ones, or with
    /// `bootstrap` any. None of them is held out, and other envs have others.
    #[test]
    fn draws_are_from_the_training_samples(
        len in 1..400_usize, held_out in 0.0..0.9_f64, share in 0.01..=1.0_f64,
        bootstrap in any::<bool>(), seed in any::<u64>()
    ) {
        let held_out = HeldOut::Share(held_out);
        let config = PartsConfig { held_out, draws: draws(share, bootstrap), ..whole(seed) };
        let all = PartsConfig { draws: vec![], ..config.clone() };
        let all = Parts::draw(&all, PartTargets::Other(len), 1).unwrap();
        let allowed: BTreeSet<u32> = all.envs()[0].train.iter().copied().collect();
        let count = (allowed.len() as f64 * share).round() as usize;
        let parts = match Parts::draw(&config, PartTargets::Other(len), 3) {
            Err(Error::Argument { argument: "train_share", .. }) if count == 0 => return Ok(()),
            parts => parts.unwrap(),
        };
        for part in parts.envs() {
            prop_assert_eq!(part.train.len(), count);
            prop_assert!(part.train.is_sorted());
            prop_assert!(part.train.iter().all(|i| allowed.contains(i)));
            prop_assert_eq!(&part.held_out, &all.envs()[0].held_out);
            let distinct: BTreeSet<&u32> = part.train.iter().collect();
            prop_assert!(bootstrap || distinct.len() == count);
        }
        // 40 draws from 40 samples, and 20 of 40 samples, have more than 2^37 results.
        if allowed.len() >= 40 && (bootstrap || (0.3..0.7).contains(&share)) {
            let distinct: BTreeSet<_> = parts.envs().iter().map(|env| env.train.clone()).collect();
            prop_assert!(count < 20 || distinct.len() == 3);
        }
    }

    /// The part of an env does not depend on the number of envs.
    #[test]
    fn further_envs_change_no_part(bootstrap in any::<bool>(), seed in any::<u64>()) {
        let config = PartsConfig { draws: draws(0.5, bootstrap), ..folds(3, seed) };
        let few = Parts::draw(&config, PartTargets::Other(50), 3).unwrap();
        let many = Parts::draw(&config, PartTargets::Other(50), 9).unwrap();
        prop_assert_eq!(few.envs(), &many.envs()[..3]);
        prop_assert_ne!(&many.envs()[0].train, &many.envs()[3].train);
    }
}

/// A bootstrap sample of n draws leaves out (1 − 1/n)^n of n samples, 36.8 % for n = 10,000. The
/// standard deviation of the number of those left out is √(n (e^−1 − 2 e^−2)) = 31; five of them.
#[test]
fn a_bootstrap_sample_leaves_out_a_third() {
    let config = PartsConfig { draws: draws(1.0, true), ..whole(3) };
    let parts = Parts::draw(&config, PartTargets::Other(10_000), 20).unwrap();
    for part in parts.envs() {
        let distinct: BTreeSet<&u32> = part.train.iter().collect();
        assert!((10_000 - distinct.len()).abs_diff(3_679) < 5 * 31, "{}", distinct.len());
    }
}

/// Env i has draw i modulo their number, and the part that it has if all envs draw so; it may draw
/// again by another rule.
#[test]
fn envs_draw_by_rules_of_their_own() {
    let rules = [(1.0, false), (0.3, false), (1.0, true)].map(|(of, again)| draws(of, again)[0]);
    let of = |draws: &[SampleDraw]| PartsConfig { draws: draws.to_vec(), ..folds(2, 9) };
    let targets = PartTargets::Other(50);
    let mut mixed = Parts::draw(&of(&rules), targets, 6).unwrap();
    let alike = rules.map(|rule| Parts::draw(&of(&[rule]), targets, 6).unwrap());
    let check = |mixed: &Parts, rule: [usize; 6]| {
        for (env, part) in mixed.envs().iter().enumerate() {
            assert_eq!(*part, alike[rule[env]].envs()[env], "env {env}");
        }
    };
    check(&mixed, [0, 1, 2, 0, 1, 2]);
    mixed.draw_again(3, &rules[1]).unwrap();
    mixed.draw_again(1, &rules[0]).unwrap();
    check(&mixed, [0, 0, 2, 1, 1, 2]);
    assert!(mixed.draw_again(0, &draws(0.001, false)[0]).is_err());
    check(&mixed, [0, 0, 2, 1, 1, 2]);
    let lens = rules.map(|rule| mixed.train_len(&rule));
    assert_eq!(lens, [25, 8, 25]);
}

/// With blocks of envs every env of a block holds out the same fold.
#[test]
fn blocks_of_envs_hold_out_the_same_fold() {
    let classes: Vec<u32> = (0..30).map(|i| i % 3).collect();
    let one = drawn(&folds(3, 5), &classes, 3);
    let config = PartsConfig { envs_per_fold: 2, ..folds(3, 5) };
    let blocks = drawn(&config, &classes, 12);
    for (env, part) in blocks.iter().enumerate() {
        assert_eq!(*part, one[env / 2 % 3], "env {env}");
    }
}

/// The parts are a contract: these numbers never change. They were computed by an implementation in
/// another language, written from the documentation, not by this code.
#[test]
fn pinned_parts() {
    let classes = [0, 1, 2, 0, 1, 2, 0, 1, 0, 0];
    let part = |fold, train: &[u32], held_out: &[u32]| EnvPart {
        fold: Some(fold),
        train: train.into(),
        held_out: held_out.into(),
    };
    let thirds = drawn(&folds(3, 42), &classes, 3);
    let expected = [
        part(0, &[0, 2, 4, 6, 7, 9], &[1, 3, 5, 8]),
        part(1, &[1, 2, 3, 4, 5, 6, 8], &[0, 7, 9]),
        part(2, &[0, 1, 3, 5, 7, 8, 9], &[2, 4, 6]),
    ];
    assert_eq!(thirds, expected);
    let halves = [&[0, 1, 2, 6, 8][..], &[3, 4, 5, 7, 9]];
    let shares = drawn(&PartsConfig { draws: draws(0.6, false), ..folds(2, 42) }, &classes, 3);
    let expected = [
        part(0, &[3, 5, 7], halves[0]),
        part(1, &[0, 1, 6], halves[1]),
        part(0, &[4, 7, 9], halves[0]),
    ];
    assert_eq!(shares, expected);
    let draws = drawn(&PartsConfig { draws: draws(1.0, true), ..folds(2, 42) }, &classes, 2);
    let expected = [part(0, &[4, 5, 5, 7, 9], halves[0]), part(1, &[2, 2, 2, 8, 8], halves[1])];
    assert_eq!(draws, expected);
    let numbers = Parts::draw(&folds(3, 7), PartTargets::Other(7), 3).unwrap();
    let expected = [
        part(0, &[0, 1, 2, 3], &[4, 5, 6]),
        part(1, &[1, 2, 4, 5, 6], &[0, 3]),
        part(2, &[0, 3, 4, 5, 6], &[1, 2]),
    ];
    assert_eq!(numbers.envs(), expected);
}

#[test]
fn envs_with_the_same_samples_share_one_list() {
    let classes = [0, 1, 0, 1, 0, 1, 0, 1];
    let all = Parts::draw(&whole(1), PartTargets::Classes(&classes), 3).unwrap();
    assert!(matches!(all.train(), Subset::All), "{:?}", all.train());
    let config = PartsConfig { classes: Some(vec![1]), ..whole(1) };
    let ones = Parts::draw(&config, PartTargets::Classes(&classes), 3).unwrap();
    let Subset::Shared(list) = ones.train() else { panic!("{:?}", ones.train()) };
    assert_eq!(*list, [1, 3, 5, 7]);
    assert_eq!(*of_classes(&classes, &[1]), [1, 3, 5, 7]);
    let halves = Parts::draw(&folds(2, 1), PartTargets::Classes(&classes), 4).unwrap();
    let Subset::PerEnv(lists) = halves.held_out() else { panic!("{:?}", halves.held_out()) };
    assert!(Arc::ptr_eq(&lists[0], &lists[2]) && Arc::ptr_eq(&lists[1], &lists[3]));
}

#[test]
fn wrong_parts_name_the_argument() {
    let refused = |config: &PartsConfig, targets: PartTargets<'_>, words: &str| {
        let error = Parts::draw(config, targets, 2).unwrap_err();
        assert!(matches!(error, Error::Argument { operation: "parts", .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let classes = PartTargets::Classes(&[0, 0, 0, 2, 2]);
    refused(&folds(1, 0), classes, "`folds` must be at least 2, got 1");
    let words =
        "`folds` must be at most 3, the number of samples of the most frequent class, got 4";
    refused(&folds(4, 0), classes, words);
    let words = "`folds` must be at most 5, the number of samples, got 6";
    refused(&folds(6, 0), PartTargets::Other(5), words);
    assert!(Parts::draw(&folds(5, 0), PartTargets::Other(5), 5).is_ok());
    let ones = PartsConfig { classes: Some(vec![0, 1]), ..whole(0) };
    refused(&ones, classes, "`classes` must be classes with samples, such as 0, got 1");
    refused(&ones, PartTargets::Other(5), "`classes` must be none");
    let share = |share| PartsConfig { draws: draws(share, false), ..whole(0) };
    refused(&share(0.09), classes, "`train_share` must be a share that leaves at least one of 5");
    for bad in [0.0, -0.5, 1.5, f64::NAN] {
        refused(&share(bad), classes, "`train_share` must be above 0 and at most 1");
    }
}

#[test]
fn listed_folds_are_the_parts() {
    let fold =
        |train: &[u32], held_out: &[u32]| Fold { train: train.into(), held_out: held_out.into() };
    let listed = HeldOut::Listed([fold(&[0, 1, 4], &[2]), fold(&[2, 3], &[0, 4])].into());
    let config = PartsConfig { held_out: listed, ..whole(3) };
    let classes = [0, 0, 1, 1, 1];
    let found = drawn(&config, &classes, 3);
    let lists = |part: &EnvPart| (part.fold, part.train.to_vec(), part.held_out.to_vec());
    assert_eq!(lists(&found[0]), (Some(0), vec![0, 1, 4], vec![2]));
    assert_eq!(lists(&found[1]), (Some(1), vec![2, 3], vec![0, 4]));
    assert_eq!(found[2], found[0]);

    // The other settings apply to the listed samples.
    let halves = draws(0.5, false);
    let share = PartsConfig { draws: halves, envs_per_fold: 2, ..config.clone() };
    let found = drawn(&share, &classes, 4);
    assert_eq!(found.iter().map(|part| part.fold.unwrap()).collect::<Vec<_>>(), [0, 0, 1, 1]);
    assert!(found.iter().zip([2, 2, 1, 1]).all(|(part, len)| part.train.len() == len));
    let ones = PartsConfig { classes: Some(vec![1]), ..config.clone() };
    assert_eq!(lists(&drawn(&ones, &classes, 1)[0]), (Some(0), vec![4], vec![2]));
    let zeros = PartsConfig { classes: Some(vec![0]), ..config };
    let error = Parts::draw(&zeros, PartTargets::Classes(&classes), 1).unwrap_err().to_string();
    assert!(error.contains("classes") && error.contains("fold 0"), "{error}");
}
