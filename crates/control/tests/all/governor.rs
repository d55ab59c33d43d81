//! Failures of an env, on synthetic losses.

use meristem_control::{GovernorConfig, LossMonitor, TrainingFailure};

/// Loss of guessing with ten classes.
fn guessing() -> f64 {
    10f64.ln()
}

/// First step with a failure, for ten classes.
fn first(losses: impl IntoIterator<Item = f64>) -> Option<(usize, TrainingFailure)> {
    let (config, mut monitor) = (GovernorConfig::default(), LossMonitor::default());
    losses
        .into_iter()
        .enumerate()
        .find_map(|(i, loss)| Some((i, monitor.check(&config, loss, guessing())?)))
}

/// A loss that falls from guessing to `floor`, with noise that depends on the step.
fn curve(steps: u32, floor: f64) -> impl Iterator<Item = f64> {
    (0..steps).map(move |step| {
        let noise = 1.0 + 0.1 * (f64::from(step) * 12.9898).sin();
        noise * (floor + (guessing() - floor) * (-f64::from(step) / 6.0).exp())
    })
}

#[test]
fn ordinary_curves_do_not_fail() {
    for floor in [0.01, 0.3, 0.8, 1.2, 2.2] {
        assert_eq!(first(curve(200, floor)), None, "{floor}");
    }
    // A bad start, a slow rise by overfitting, a jump to large losses and back.
    assert_eq!(first([40.0, 20.0, 9.0, 4.0, 2.3, 2.0, 1.0]), None);
    assert_eq!(first((0..100).map(|step| 0.3 + 0.01 * f64::from(step))), None);
    assert_eq!(first(curve(30, 0.3).chain([15.0, 14.0, 0.5, 15.0, 15.0, 0.4])), None);
    // An env that never learned cannot collapse.
    assert_eq!(first(std::iter::repeat_n(guessing(), 100)), None);
}

#[test]
fn a_nan_or_infinite_loss_fails_at_once() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(first([bad]), Some((0, TrainingFailure::NotFinite)));
        assert_eq!(first(curve(20, 0.3).chain([bad])), Some((20, TrainingFailure::NotFinite)));
    }
}

#[test]
fn a_return_to_guessing_is_a_collapse_after_learning() {
    for share in [0.94, 1.0, 1.06] {
        let losses = curve(30, 0.3).chain([share * guessing()]);
        assert_eq!(first(losses), Some((30, TrainingFailure::Collapse)), "{share}");
    }
    for share in [0.93, 1.07] {
        assert_eq!(first(curve(30, 0.3).chain([share * guessing()])), None, "{share}");
    }
}

#[test]
fn the_third_consecutive_spike_fails() {
    let after = |spikes: &[f64]| first(curve(30, 0.3).chain(spikes.iter().copied()));
    assert_eq!(after(&[13.0, 50.0, 13.0]), Some((32, TrainingFailure::Spike)));
    assert_eq!(after(&[13.0, 50.0, 11.9, 13.0, 13.0]), None, "not consecutive");
    // A spike also exceeds six standard deviations and three times the mean.
    assert_eq!(first([10.0, 6.0, 14.0, 10.0, 13.0, 13.0, 13.0, 13.0]), None);
    let (config, mut monitor) = (GovernorConfig::default(), LossMonitor::default());
    assert!(
        curve(30, 0.3)
            .chain([13.0, 13.0])
            .all(|loss| monitor.check(&config, loss, guessing()).is_none())
    );
    assert!(!monitor.is_calm());
    monitor.rolled_back();
    assert_eq!(monitor, LossMonitor::default(), "a rollback resets the statistics");
    assert!(!monitor.is_calm(), "no loss yet");
    assert!([guessing(); 3].iter().all(|loss| monitor.check(&config, *loss, guessing()).is_none()));
    assert!(monitor.is_calm());
    assert!(curve(30, 0.3).all(|loss| monitor.check(&config, loss, guessing()).is_none()));
    assert_eq!(monitor.check(&config, guessing(), guessing()), Some(TrainingFailure::Collapse));
}

#[test]
fn snapshots_are_due_every_fifth_step_and_after_a_fossilize() {
    let config = GovernorConfig::default();
    let due: Vec<u32> = (0..12).filter(|step| config.snapshot_due(*step, false)).collect();
    assert_eq!(due, [0, 5, 10]);
    assert!(config.snapshot_due(3, true));
}
