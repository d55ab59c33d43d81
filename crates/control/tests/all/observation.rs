//! The layout of an observation, and its normalisation.

use meristem_control::{
    Action, BaseObservation, Moments, Normalizer, SlotObservation, observation_len,
    write_observation,
};
use meristem_grow::{AlphaTarget, Curve, GateInputs, GradientHealth, Speed, Style, Tempo};
use proptest::prelude::*;

use crate::common::{FakeEnv, quick, tiny, worth};

fn observe(env: &FakeEnv) -> (Vec<f32>, Vec<u32>) {
    let slots = env.host.slots().len();
    let (mut row, mut blueprints) = (vec![f32::NAN; observation_len(slots)], vec![99; slots]);
    write_observation(&env.view(), &mut row, &mut blueprints);
    (row, blueprints)
}

fn germinate(slot: usize) -> Action {
    let (style, tempo) = (Style::LinearMultiply, Tempo::Slow);
    Action::Germinate { slot, blueprint: 2, style, tempo, alpha_target: AlphaTarget::Most }
}

fn log_scale(x: f32) -> f32 {
    x.ln_1p() / 7.0
}

/// Every element of a row, for an env during a blending.
#[test]
fn every_element_of_a_row_is_checked() {
    let mut env = FakeEnv::new(0, tiny(3, quick()), 40);
    env.epoch(2.0, 30.0);
    env.remember(&[]);
    env.act(&germinate(1));
    for _ in 0..4 {
        env.epoch(1.5, 35.0);
        env.remember(&[]);
        env.measured[1] = worth(None);
        env.act(&Action::Advance { slot: 1 });
    }
    assert_eq!(env.host.slots()[1].stage.name(), "blending");
    let health =
        |health, norm| Some(GradientHealth { health, vanishing: 0.25, exploding: 0.125, norm });
    for (health, contribution, sum) in
        [(health(0.5, 1.0), Some(3.0), Some(-4.0)), (health(0.75, 2.0), Some(2.0), None)]
    {
        env.epoch(1.0, 50.0);
        env.measured[1] = GateInputs {
            gradient_health: health,
            contribution_pp: contribution,
            ..GateInputs::default()
        };
        env.remember(&[None, sum, None]);
        env.act(&Action::Wait);
    }
    env.epoch(0.5, 60.0);
    env.measured[1].contribution_pp = None;
    env.remember(&[]);
    env.last = Some((meristem_control::ActionOp::Advance, false));

    let (row, blueprints) = observe(&env);
    assert_eq!(blueprints, [7, 2, 7], "7 stands for an empty slot");
    let mut expected = vec![7.0 / 40.0, log_scale(0.5), 0.6]; // 0, 1, 2
    expected.extend([1.5, 1.5, 1.0, 1.0, 0.5].map(log_scale)); // 3 to 7
    expected.extend([0.35, 0.35, 0.5, 0.5, 0.6]); // 8 to 12
    expected.extend([0.0, 1.0 / 3.0, 0.0]); // 13 to 15
    expected.push(0.0); // 16: the last action did not succeed
    expected.extend([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]); // 17 to 22: ADVANCE
    expected.extend([0.0; 31]); // slot 0 is dormant
    expected.push(1.0); // 0
    expected.extend([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]); // 1 to 10: Blending
    let alpha = 0.7 * 3.0 / 8.0;
    expected.extend([alpha, 0.2, -0.1]); // 11 to 13
    expected.extend([8.0 / 12.0, 0.7, 0.5]); // 14 to 16
    expected.extend([8.0 / 40.0, 3.0 / 40.0, 5.0 / 40.0]); // 17 to 19
    expected.extend([0.7 / 8.0, 0.5, -0.4]); // 20 to 22
    expected.extend([log_scale(2.0), 0.75, 0.25, 0.125, 0.75]); // 23 to 27
    expected.extend([3.0 / 40.0, 0.995, 7.0 / 40.0]); // 28 to 30
    expected.extend([0.0; 31]); // slot 2
    assert_eq!(row.len(), 23 + 31 * 3);
    assert_eq!((BaseObservation::LEN, SlotObservation::LEN), (23, 31));
    for (index, (got, expected)) in row.iter().zip(&expected).enumerate() {
        assert!((got - expected).abs() < 1e-6, "index {index}: {got}, expected {expected}");
    }
}

#[test]
fn missing_measurements_have_fixed_values() {
    let env = FakeEnv::new(0, tiny(1, quick()), 40);
    let (row, blueprints) = observe(&env);
    let mut expected = vec![0.0];
    expected.extend([-1.0; 12]);
    expected.extend([0.0; 10 + 31]);
    assert_eq!((row, blueprints), (expected, vec![7]));
    // After one step the newest value is the last of the five.
    let mut env = env;
    env.epoch(f32::NAN, 25.0);
    env.act(&germinate(0));
    env.remember(&[]);
    let (row, blueprints) = observe(&env);
    assert_eq!(row[8..13], [-1.0, -1.0, -1.0, -1.0, 0.25]);
    assert!((row[1] - log_scale(1e6)).abs() < 1e-6, "a loss that is not finite counts as 10^6");
    assert_eq!((row[16], row[18]), (1.0, 1.0), "GERMINATE succeeded");
    let slot = &row[23..];
    assert_eq!((slot[0], slot[2], blueprints[0]), (1.0, 1.0, 2));
    assert_eq!((slot[15], slot[27], slot[29]), (0.7, -1.0, -1.0), "target, health, freshness");
}

#[test]
fn a_waiting_slot_has_only_stage_and_steps() {
    let mut env = FakeEnv::new(0, tiny(1, quick()), 10);
    env.epoch(1.0, 25.0);
    env.act(&germinate(0));
    for _ in 0..5 {
        env.epoch(1.0, 25.0);
        env.measured[0] = worth(Some(1.0));
        env.remember(&[]);
    }
    env.act(&Action::Prune { slot: 0, speed: Speed::Instant, curve: Curve::Linear });
    env.epoch(1.0, 25.0);
    env.remember(&[]);
    let (row, blueprints) = observe(&env);
    let slot = &row[23..];
    let ones: Vec<usize> = (0..31).filter(|i| slot[*i] != 0.0).collect();
    assert_eq!(
        (ones, blueprints[0]),
        (vec![1 + 7, 28], 7),
        "embargoed, for a tenth of the episode"
    );
    assert_eq!(env.history.slots()[0], Default::default());
}

/// Mean and variance by definition.
fn slow(rows: &[[f32; 2]], feature: usize) -> (f64, f64) {
    let n = rows.len() as f64;
    let mean = rows.iter().map(|row| f64::from(row[feature])).sum::<f64>() / n;
    let m2 = rows.iter().map(|row| (f64::from(row[feature]) - mean).powi(2)).sum::<f64>();
    (mean, m2 / n)
}

proptest! {
    /// Any division of the rows into rounds gives the moments of all rows. f64 rounding of a
    /// hundred values of up to 1000 leaves an error of about 1e-16·1e6·1e2 = 1e-8 in the squares.
    #[test]
    fn moments_cover_all_rows(
        rows in prop::collection::vec([-1000f32..1000.0, -1f32..1.0], 2..100),
        cuts in prop::collection::vec(1usize..20, 1..10),
    ) {
        let mut merged = Moments::new(2);
        let (mut rest, mut cuts) = (&rows[..], cuts.iter().cycle());
        while !rest.is_empty() {
            let (part, later) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
            let mut moments = Moments::new(2);
            part.iter().for_each(|row| moments.push(row));
            merged.merge(&moments);
            rest = later;
        }
        for feature in 0..2 {
            let (mean, variance) = slow(&rows, feature);
            prop_assert!((merged.mean()[feature] - mean).abs() < 1e-9);
            prop_assert!((merged.variance(feature) - variance).abs() < 1e-7);
        }
    }
}

#[test]
fn moments_are_fixed_between_commits() {
    let mut normalizer = Normalizer::new(2);
    let mut first = [3.0, -40.0];
    normalizer.gather(&mut first);
    assert_eq!(first, [3.0, -10.0], "before a commit rows are only clipped");
    normalizer.gather(&mut [5.0, -40.0]);
    let mut row = [4.0, 0.0];
    normalizer.normalize(&mut row);
    assert_eq!(row, [4.0, 0.0], "gathered rows have no effect before a commit");
    normalizer.commit();
    let mut row = [6.0, -40.0];
    normalizer.normalize(&mut row);
    // Mean 4 and variance 1 (plus the epsilon of 1e-4); a constant feature becomes 0.
    assert!((row[0] - 2.0).abs() < 2e-4 && row[1] == 0.0, "{row:?}");
    let text = serde_json::to_string(&normalizer).unwrap();
    assert_eq!(serde_json::from_str::<Normalizer>(&text).unwrap(), normalizer);
}
