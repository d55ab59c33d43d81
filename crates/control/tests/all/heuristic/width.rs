//! Growth in width: its trigger, its pause and its place.

use meristem_control::{Action, Controller, HeuristicConfig, WidenPlace, WidenTrigger, WidthScore};
use meristem_grow::Rules;

use super::scripted_env::{Env, quick, with};

#[test]
fn it_widens_the_layer_that_has_grown_least_and_pauses_in_between() {
    let rules = Rules { max_modules: 0, ..quick() };
    let mut env = Env::new(0, "r0", rules);
    let mut heuristic = with(|config| {
        (config.widen_by, config.widen_pause, config.widen_up_to) = (0.5, 3, 1.5);
    });
    let first = env.host.spec().widenable();
    let mut steps = vec![];
    for step in 0..3 * first.len() as u32 + 6 {
        if let Action::Widen { layer, by } = env.step(&mut heuristic, 50.0).0 {
            assert_eq!(by, first[layer].features / 2);
            steps.push((step, layer));
        }
    }
    let expected: Vec<(u32, usize)> = (0..first.len()).map(|i| (3 * i as u32, i)).collect();
    assert_eq!(steps, expected, "each layer once, up to 1.5 times its features");
}

/// Steps and layers of WIDEN, with these rules, while the control score, and all scores of two
/// layers, have these values.
fn widened(
    change: impl Fn(&mut HeuristicConfig),
    scores_pp: &[f32],
    of_layers: impl Fn(usize) -> [f32; 2],
) -> Vec<(usize, usize)> {
    let mut env = Env::new(0, "r0", Rules { max_modules: 0, ..quick() });
    let layers = env.host.spec().widenable().len();
    let mut heuristic = with(|config| {
        (config.widen_by, config.widen_pause, config.widen_up_to) = (0.5, 2, 2.0);
        change(config);
    });
    let step = |(step, score_pp): (usize, &f32)| {
        for score in WidthScore::ALL {
            let scores = env.width_scores.of_mut(score);
            *scores = of_layers(step).to_vec();
            scores.resize(layers, 0.0);
        }
        // What it remembers is what it saves.
        let saved = heuristic.save().unwrap();
        heuristic.begin_episode(9);
        heuristic.restore(&saved).unwrap();
        match env.step(&mut heuristic, *score_pp).0 {
            Action::Widen { layer, .. } => Some((step, layer)),
            _ => None,
        }
    };
    scores_pp.iter().enumerate().filter_map(step).collect()
}

#[test]
fn a_plateau_triggers_growth_in_width() {
    let plateau = |config: &mut HeuristicConfig| {
        config.widen_trigger = WidenTrigger::Plateau;
        (config.plateau_steps, config.plateau_gain_pp) = (2, 1.0);
    };
    let rising: Vec<f32> = (0..6).map(|step| 20.0 + 5.0 * step as f32).collect();
    let scores = [&rising[..], &[45.0; 6]].concat();
    let steps: Vec<usize> = widened(plateau, &scores, |_| [1.0; 2]).iter().map(|at| at.0).collect();
    // Of 40, 45, 45 the slope is 2.5 with a standard error of 1.4, so it is not surely above 1.
    assert_eq!(steps, [6, 8, 10], "from the first step without a gain on, after each pause");
    assert_eq!(widened(|_| {}, &scores, |_| [1.0; 2]).len(), 6, "without a trigger at once");
}

#[test]
fn orthogonality_is_a_trigger_and_a_place() {
    let rules = |trigger, place| {
        move |config: &mut HeuristicConfig| {
            (config.widen_trigger, config.widen_place) = (trigger, place);
            config.widen_orthogonality = 0.9;
        }
    };
    let (trigger, place) = (WidenTrigger::Orthogonality, WidenPlace::Orthogonality);
    // φ − 0.9·φ₀, with φ₀ of the first step: the others have φ₀ = 0.
    let falling = |step: usize| if step < 3 { [0.5, 1.0] } else { [0.44, 1.0] };
    let scores = [50.0; 8];
    assert_eq!(
        widened(rules(trigger, WidenPlace::Smallest), &scores, falling),
        [(0, 0), (2, 1), (4, 1)],
        "the first layer until it falls below 0.45"
    );
    assert_eq!(
        widened(rules(WidenTrigger::Schedule, place), &scores, falling)[..2],
        [(0, 1), (2, 1)],
        "the second has the largest excess, until it has twice its features"
    );
    assert_eq!(widened(rules(trigger, place), &scores, |step| [1.0 - step as f32, 0.0]), [(0, 0)]);
    let unknown = widened(rules(trigger, place), &scores, |_| [f32::NAN; 2]);
    assert_eq!(unknown, [], "what is not known triggers nothing");
}

#[test]
fn measured_gradients_are_triggers_and_places() {
    let scores = [50.0; 8];
    let all = [
        (WidenTrigger::GradientRatio(0.5), WidenPlace::GradientRatio, WidthScore::GradientRatio),
        (
            WidenTrigger::NaturalGradient(0.5),
            WidenPlace::NaturalGradient,
            WidthScore::NaturalGradient,
        ),
    ];
    for (trigger, place, score) in all {
        let rules = |trigger, place| {
            move |config: &mut HeuristicConfig| {
                (config.widen_trigger, config.widen_place) = (trigger, place);
            }
        };
        let falling = |step: usize| if step < 3 { [0.6, 1.0] } else { [0.5, 1.0] };
        assert_eq!(
            widened(rules(trigger, WidenPlace::Smallest), &scores, falling),
            [(0, 0), (2, 1), (4, 1)],
            "a layer until its score is no longer above 0.5"
        );
        assert_eq!(
            widened(rules(WidenTrigger::Schedule, place), &scores, falling)[..3],
            [(0, 1), (2, 1), (4, 0)],
            "the second has the largest score, until it has twice its features"
        );
        let unknown = |_| [f32::NAN, 0.1];
        assert_eq!(widened(rules(trigger, place), &scores, unknown), [], "no score is above 0.5");
        let first = widened(rules(WidenTrigger::Schedule, place), &scores, unknown)[0];
        assert_eq!(first, (0, 1), "a layer without a score comes last");
        let needs = |change: &dyn Fn(&mut HeuristicConfig)| {
            let mut config = HeuristicConfig { widen_by: 0.5, ..HeuristicConfig::default() };
            change(&mut config);
            WidthScore::ALL.map(|score| config.needs(score))
        };
        let only = WidthScore::ALL.map(|of| of == score);
        assert_eq!(needs(&rules(trigger, WidenPlace::Smallest)), only);
        assert_eq!(needs(&rules(WidenTrigger::Plateau, place)), only);
        assert_eq!(
            needs(&|config: &mut HeuristicConfig| {
                rules(trigger, place)(config);
                config.widen_by = 0.0;
            }),
            [false; 3]
        );
    }
}
