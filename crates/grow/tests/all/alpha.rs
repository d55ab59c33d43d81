//! Alpha: curves, tables, and the controller.

use meristem_grow::{
    AlphaController, AlphaError, AlphaMode, AlphaTarget, Curve, Speed, Style, Tempo,
};
use meristem_nn::graph::BlendMode;
use proptest::prelude::*;

#[test]
fn curves_match_the_specification() {
    for curve in Curve::ALL {
        assert_eq!(curve.at(0.0), 0.0, "{curve}");
        assert_eq!(curve.at(1.0), 1.0, "{curve}");
        assert_eq!(curve.at(-3.0), 0.0, "{curve}");
        assert_eq!(curve.at(7.0), 1.0, "{curve}");
        assert!((curve.at(0.5) - 0.5).abs() < 1e-12, "{curve} is symmetric");
        let mut last = 0.0;
        for i in 1..=1000 {
            let value = curve.at(f64::from(i) / 1000.0);
            assert!(value >= last, "{curve} falls at {i}");
            last = value;
        }
    }
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
    near(Curve::Linear.at(0.3), 0.3);
    near(Curve::Cosine.at(0.25), 0.146_446_609_406_726_24);
    // (σ(k(t−½)) − σ(−k/2)) / (σ(k/2) − σ(−k/2)) at t = ¼, by hand for each k.
    for (curve, k) in
        [(Curve::SigmoidGentle, 6.0), (Curve::Sigmoid, 12.0), (Curve::SigmoidSharp, 24.0)]
    {
        let s = |x: f64| x.exp() / (1.0 + x.exp());
        near(curve.at(0.25), (s(-k / 4.0) - s(-k / 2.0)) / (s(k / 2.0) - s(-k / 2.0)));
    }
    assert!(Curve::SigmoidSharp.at(0.25) < Curve::Sigmoid.at(0.25));
}

#[test]
fn tables_match_the_specification() {
    assert_eq!(Tempo::ALL.iter().map(|t| t.steps()).collect::<Vec<_>>(), [3, 5, 8]);
    assert_eq!(Speed::ALL.iter().map(|s| s.steps()).collect::<Vec<_>>(), [0, 3, 5, 8]);
    assert_eq!(AlphaTarget::ALL.iter().map(|t| t.value()).collect::<Vec<_>>(), [0.5, 0.7, 1.0]);
    let styles: Vec<_> = Style::ALL.iter().map(|s| (s.curve(), s.blend_mode())).collect();
    assert_eq!(
        styles,
        [
            (Curve::Linear, BlendMode::Add),
            (Curve::Linear, BlendMode::Multiply),
            (Curve::Sigmoid, BlendMode::Add),
            (Curve::Linear, BlendMode::Gate),
        ]
    );
    assert_eq!(Curve::ALL.len(), 5);
}

#[test]
fn retarget_requires_rest_and_a_valid_target() {
    let mut alpha = AlphaController::at_rest(0.0);
    for bad in [-0.1, 1.1, f32::NAN, f32::INFINITY] {
        assert!(matches!(alpha.retarget(bad, 3, Curve::Linear), Err(AlphaError::BadTarget(_))));
    }
    alpha.retarget(0.7, 3, Curve::Cosine).unwrap();
    assert_eq!(alpha.mode(), AlphaMode::Up);
    alpha.step();
    let before = alpha;
    let refused = alpha.retarget(1.0, 0, Curve::Linear).unwrap_err();
    assert_eq!(refused, AlphaError::NotAtRest { target: 0.7, steps_to_go: 2 });
    assert_eq!(alpha, before, "an error changes nothing");
    alpha.step();
    alpha.step();
    assert_eq!((alpha.alpha(), alpha.mode(), alpha.steps_to_go()), (0.7, AlphaMode::Rest, 0));
    alpha.step();
    assert_eq!(alpha.alpha(), 0.7, "alpha is constant at rest");
    alpha.retarget(0.2, 0, Curve::Linear).unwrap();
    assert_eq!((alpha.alpha(), alpha.is_at_rest()), (0.2, true));
}

proptest! {
    #[test]
    fn moves_are_monotonic_and_end_exactly_at_the_target(
        start in 0.0f32..=1.0, target in 0.0f32..=1.0, steps in 0u32..20, curve in 0usize..5,
    ) {
        let mut alpha = AlphaController::at_rest(start);
        alpha.retarget(target, steps, Curve::ALL[curve]).unwrap();
        let (low, high) = (start.min(target), start.max(target));
        let mut taken = 0;
        while !alpha.is_at_rest() {
            let before = alpha.alpha();
            alpha.step();
            taken += 1;
            prop_assert_eq!(alpha.steps_done(), taken);
            prop_assert!((low..=high).contains(&alpha.alpha()));
            let moved = alpha.alpha() - before;
            let onward = if target > start { moved >= 0.0 } else { moved <= 0.0 };
            prop_assert!(onward, "moved {}", moved);
        }
        prop_assert_eq!(alpha.alpha().to_bits(), target.to_bits());
        prop_assert_eq!(taken, if start == target { 0 } else { steps });
    }
}
