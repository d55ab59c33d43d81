//! Distributions under masks, and random walks through the lifecycle.

use std::collections::HashMap;
use std::sync::Arc;

use meristem_control::{
    Action, ActionOp, Floors, HEADS, HeadLayout, Legality, SamplingMode, legal, normalized_entropy,
    observation_len, probabilities, sample_action, write_observation,
};
use meristem_device::random::{Purpose, Rng};
use meristem_grow::{Birth, GateInputs, Host, Optimisers, Rules, Stage, StageChange, TopologyKey};
use meristem_nn::Graph;
use meristem_nn::kernels::ppo::PpoHead;
use meristem_nn::kernels::sample::{SampleFrom, SampleStep, Sampled, Sampler};
use proptest::prelude::*;

use crate::common::{FakeEnv, quick, tiny, worth};

/// Logits that differ for every head.
const FLOORS: Floors = [0.15, 0.05, 0.12, 0.08, 0.12, 0.08, 0.06, 0.06];

fn rng(seed: u64, step: u64) -> Rng {
    Rng::new(seed, Purpose::Test, 0, step)
}

#[test]
fn heads_follow_each_other_in_a_row() {
    let layout = HeadLayout::new(3, 7);
    assert_eq!(layout.total(), 6 + 3 + 7 + 4 + 3 + 3 + 4 + 5);
    let mut next = 0;
    for (index, size) in [6, 3, 7, 4, 3, 3, 4, 5].into_iter().enumerate() {
        assert_eq!(layout.range(index), next..next + size);
        next += size;
    }
}

proptest! {
    /// Against the same formulas in f64. f32 has about seven digits; a sum of nine terms loses one.
    #[test]
    fn probabilities_follow_their_formula(
        cases in prop::collection::vec((-20f32..20.0, any::<bool>()), 1..9),
        floor in 0f32..0.5,
    ) {
        let mut mask: Vec<u8> = cases.iter().map(|(_, legal)| u8::from(*legal)).collect();
        mask[0] = 1;
        let logits: Vec<f32> = cases.iter().map(|(logit, _)| *logit).collect();
        let mut row = logits.clone();
        probabilities(&mut row, &mask, floor);
        let n = mask.iter().filter(|m| **m == 1).count() as f64;
        let f = f64::from(floor).min(0.99 / n);
        let sum: f64 = logits.iter().zip(&mask).filter(|(_, m)| **m == 1)
            .map(|(x, _)| f64::from(*x).exp()).sum();
        let mut entropy = 0.0;
        for ((got, logit), legal) in row.iter().zip(&logits).zip(&mask) {
            let expected = match legal {
                1 if n == 1.0 => 1.0,
                1 => f + (1.0 - n * f) * f64::from(*logit).exp() / sum,
                _ => 0.0,
            };
            prop_assert!((f64::from(*got) - expected).abs() < 2e-6);
            prop_assert!(*legal == 0 || f64::from(*got) >= f - 1e-6, "the floor holds");
            entropy -= if expected > 0.0 { expected * expected.ln() } else { 0.0 };
        }
        let expected = if n > 1.0 { entropy / n.ln() } else { 0.0 };
        prop_assert!((f64::from(normalized_entropy(&row, &mask)) - expected).abs() < 1e-5);
    }
}

#[test]
fn one_choice_has_probability_one_and_nan_logits_count_as_zero() {
    let mut row = [f32::NAN, 3.0];
    probabilities(&mut row, &[0, 1], 0.15);
    assert_eq!(row, [0.0, 1.0]);
    let mut row = [f32::NAN, f32::INFINITY, -1e30];
    probabilities(&mut row, &[1, 1, 1], 0.0);
    assert!((row[0] - 0.5).abs() < 1e-6 && (row[1] - 0.5).abs() < 1e-6 && row[2] == 0.0, "{row:?}");
}

/// 40,000 draws from known probabilities: the standard deviation of a count is at most 100.
#[test]
fn draws_follow_the_probabilities() {
    let host = tiny(3, quick());
    let (layout, legality) = (HeadLayout::new(3, 7), Legality::from_host(&host));
    let mut counts = [0u32; 6];
    let mut expected = [0.0; 6];
    for step in 0..40_000 {
        let mut logits = vec![0.0; layout.total()];
        logits[0] = 1.0;
        let mut mask = vec![0; layout.total()];
        let mut rng = rng(1, step);
        let drawn = sample_action(
            &layout,
            &legality,
            &FLOORS,
            &mut logits,
            &mut mask,
            SamplingMode::Sample(&mut rng),
        );
        counts[drawn.choices[0]] += 1;
        expected.copy_from_slice(&logits[..6]);
        assert_eq!(drawn.log_probs[0], logits[drawn.choices[0]].ln());
    }
    // Legal are WAIT, with .15 + .7·e/(1 + e), and GERMINATE.
    assert!((expected[0] - 0.661_741).abs() < 1e-5, "{expected:?}");
    for (count, p) in counts.iter().zip(expected) {
        assert!((f64::from(*count) - 40_000.0 * f64::from(p)).abs() < 500.0, "{counts:?}");
    }
}

#[test]
fn greedy_takes_the_most_probable_legal_choice() {
    let host = tiny(3, quick());
    let (layout, legality) = (HeadLayout::new(3, 7), Legality::from_host(&host));
    let mut logits = vec![0.0; layout.total()];
    (logits[1], logits[5]) = (2.0, 50.0); // GERMINATE; ADVANCE is not legal
    (logits[8], logits[12]) = (1.0, 1.0); // slot 2, blueprint 3
    let mut mask = vec![0; layout.total()];
    let drawn =
        sample_action(&layout, &legality, &FLOORS, &mut logits, &mut mask, SamplingMode::Greedy);
    assert_eq!(drawn.choices, [1, 2, 3, 0, 0, 0, 0, 0]);
    assert_eq!(drawn.log_probs[6..], [0.0, 0.0], "speed and curve are pinned");
    assert_eq!(drawn.entropies[6..], [0.0, 0.0]);
}

/// Invariants of every draw.
fn check_draw(layout: &HeadLayout, legality: &Legality, host: &Host, rng: &mut Rng) -> Action {
    let scale = [0.0, 1.0, 30.0, 1e6][rng.below(4) as usize];
    let mut logits: Vec<f32> =
        (0..layout.total()).map(|_| scale * (2.0 * rng.uniform() - 1.0)).collect();
    let mut mask = vec![0; layout.total()];
    let greedy = rng.below(8) == 0;
    let pick = if greedy { SamplingMode::Greedy } else { SamplingMode::Sample(rng) };
    let drawn = sample_action(layout, legality, &FLOORS, &mut logits, &mut mask, pick);
    let action = drawn.action();
    assert_eq!(legal(&action, host), Ok(()), "{action:?}");
    for (index, head) in HEADS.iter().enumerate() {
        let (part, choice) = (&mask[layout.range(index)], drawn.choices[index]);
        assert_eq!(part[choice], 1, "{} of {action:?} under its stored mask", head.name);
        let free = part.iter().filter(|legal| **legal == 1).count();
        assert!(drawn.log_probs[index] <= 0.0 && drawn.log_probs[index].is_finite());
        assert!((-1e-6..=1.0 + 1e-5).contains(&drawn.entropies[index]), "{drawn:?}");
        if !head.is_used_by(action.op()) || free == 1 {
            assert_eq!((drawn.log_probs[index], drawn.entropies[index]), (0.0, 0.0));
        }
        assert!(head.is_used_by(action.op()) || (free, choice) == (1, 0), "pinned");
    }
    action
}

/// Tracks a host's stages independently and compares its graph with its topology.
struct Witness {
    stages: Vec<Stage>,
    graphs: HashMap<TopologyKey, Arc<Graph>>,
    checked: usize,
}

impl Witness {
    fn change(&mut self, change: &StageChange) {
        assert_eq!(self.stages[change.index], change.from);
        assert!(change.from.can_become(change.to), "{} -> {}", change.from, change.to);
        self.stages[change.index] = change.to;
    }

    fn check(&mut self, host: &Host) {
        let now: Vec<Stage> = host.slots().iter().map(|slot| slot.stage).collect();
        assert_eq!(now, self.stages, "every change of stage is reported");
        for (slot, alpha) in host.slots().iter().zip(host.alphas()) {
            assert_eq!(slot.module.is_some(), slot.stage.is_occupied());
            assert!((0.0..=1.0).contains(&alpha), "{alpha}");
            let blended =
                matches!(slot.stage, Stage::Blending | Stage::Holding | Stage::Fossilized);
            let joint = slot.stage == Stage::Training && host.rules().birth == Birth::Joint;
            assert!(blended || joint || alpha == 0.0, "{} at {alpha}", slot.stage);
        }
        assert!(host.modules() <= host.rules().max_modules);
        let graphs = &mut self.graphs;
        let checked = &mut self.checked;
        graphs.entry(host.topology_key()).or_insert_with(|| {
            let graph = host.graph(&Optimisers::default()).unwrap();
            let mut groups: Vec<&str> = graph.groups[1..].iter().map(|g| g.name.as_str()).collect();
            groups.sort_unstable();
            let takes_part = |slot: &&meristem_grow::Slot| {
                slot.stage.is_occupied() && slot.stage != Stage::Germinated
            };
            let mut expected: Vec<String> =
                host.slots().iter().filter(takes_part).map(|slot| slot.name.to_string()).collect();
            expected.sort_unstable();
            assert_eq!(groups, expected, "a group per module that computes");
            assert_eq!(graph.alphas, host.slots().len());
            *checked += 1;
            Arc::new(graph)
        });
    }
}

/// 4,000 episodes of 40 actions on tiny hosts: every transition is legal, every action is legal
/// under its stored mask, every observation is finite, and every graph matches its topology.
#[test]
fn random_legal_actions_never_break_the_lifecycle() {
    let layout = HeadLayout::new(3, 7);
    let (mut row, mut blueprints) = (vec![0.0; observation_len(3)], vec![0; 3]);
    let mut witness = Witness { stages: vec![], graphs: HashMap::new(), checked: 0 };
    let mut ops = [0u32; 6];
    for episode in 0..4000 {
        let rules = limited(episode);
        let mut env = FakeEnv::new(0, tiny(3, rules), 40);
        witness.stages = vec![Stage::Dormant; 3];
        for step in 0..40 {
            let mut rng = rng(episode, step);
            let changes = env.host.step();
            changes.iter().for_each(|change| witness.change(change));
            env.losses.push(3.0 * rng.uniform());
            env.scores_pp.push(100.0 * rng.uniform());
            env.measured = (0..3)
                .map(|_| match rng.below(6) {
                    0 => GateInputs::default(),
                    _ => worth(Some(20.0 * rng.uniform() - 5.0)),
                })
                .collect();
            env.remember(&[Some(rng.uniform()); 3]);
            write_observation(&env.view(), &mut row, &mut blueprints);
            assert!(row.iter().all(|x| x.is_finite() && x.abs() <= 2.0), "{row:?}");
            let legality = Legality::from_host(&env.host);
            let action = check_draw(&layout, &legality, &env.host, &mut rng);
            ops[action.op().index()] += 1;
            let outcome = env.act(&action);
            outcome.change.iter().for_each(|change| witness.change(change));
            let parameters = env.host.size().unwrap().parameters;
            assert!(rules.max_parameters.is_none_or(|most| parameters <= most), "{parameters}");
            if rng.below(100) == 0 {
                env.host.prune_live().iter().for_each(|change| witness.change(change));
            }
            witness.check(&env.host);
        }
    }
    assert!(ops.iter().all(|count| *count > 500), "every op was tried: {ops:?}");
    assert!(witness.checked > 100, "{} topologies", witness.checked);
    assert_eq!(ActionOp::OF_HEAD.len(), ops.len());
}

/// Rules of an episode: both births, each without a limit and with one that a few modules reach.
fn limited(episode: u64) -> Rules {
    let max_parameters = (episode % 2 == 1).then(|| 400 + 40 * (episode % 50));
    let birth = Birth::ALL[episode as usize / 2 % 2];
    Rules { birth, max_parameters, ..quick() }
}

/// The heads as in a policy step.
fn heads(layout: &HeadLayout) -> Vec<PpoHead> {
    let head = |((head, choices), floor): ((&meristem_control::ActionHead, usize), f32)| PpoHead {
        choices,
        used_by: head.used_by.iter().fold(0, |bits, op| bits | 1 << op.index()),
        floor,
        entropy_coefficient: 0.0,
        entropy_floor: 0.0,
    };
    HEADS.iter().zip(layout.sizes()).zip(FLOORS).map(head).collect()
}

/// Over the legalities of 1,000 episodes the kernel draws the same choices as the slow version from
/// the same random numbers. Masks are equal; log-probabilities and entropies differ only by
/// rounding. The two exponentials differ by 3e-7 of a probability; a floor of .05 and sums of seven
/// terms make that 1e-5. A random number falls between the two cumulative sums about once in 10^6
/// draws, and never in this test.
#[test]
fn the_kernel_draws_like_the_slow_version() {
    const SEED: u64 = 11;
    let layout = HeadLayout::new(3, 7);
    let (total, heads) = (layout.total(), heads(&layout));
    let (mut mask, mut legal, mut places) = (vec![0; total], vec![9; total], [u32::MAX; 6]);
    let (mut choices, mut values) = ([u32::MAX; 8], [f32::NAN]);
    let (mut log_probs, mut entropies) = ([f32::NAN; 8], [f32::NAN; 8]);
    let mut ops = [0u32; 6];
    let mut masked = 0;
    for episode in 0..1000u32 {
        let mut env = FakeEnv::new(0, tiny(3, limited(u64::from(episode))), 40);
        for step in 0..40 {
            let mut random = rng(u64::from(episode), step);
            env.epoch(1.0, 100.0 * random.uniform());
            env.measured.fill(worth(Some(20.0 * random.uniform() - 5.0)));
            let scale = [0.0, 1.0, 30.0, 1e6][random.below(4) as usize];
            let outputs: Vec<f32> =
                (0..=total).map(|_| scale * (2.0 * random.uniform() - 1.0)).collect();
            let legality = Legality::from_host(&env.host);
            legality.write_places(2, &mut places);
            let greedy = random.below(8) == 0;
            let sampler = Sampler { heads: heads.clone(), seed: SEED, greedy };
            let key = SampleStep { step, first_env: episode, value_scale: 0.5 };
            let from = SampleFrom { outputs: &outputs, legality: &places, step: &key.to_words() };
            sampler.draw(
                &from,
                &mut Sampled {
                    choices: &mut choices,
                    legal: &mut legal,
                    log_probs: &mut log_probs,
                    entropies: &mut entropies,
                    values: &mut values,
                },
            );
            let mut numbers = Rng::new(SEED, Purpose::Actions, u64::from(episode), step);
            let pick =
                if greedy { SamplingMode::Greedy } else { SamplingMode::Sample(&mut numbers) };
            let mut logits = outputs[..total].to_vec();
            let drawn = sample_action(&layout, &legality, &FLOORS, &mut logits, &mut mask, pick);
            let context = format!("episode {episode}, step {step}, {outputs:?} {places:?}");
            assert_eq!(choices.map(|choice| choice as usize), drawn.choices, "{context}");
            assert_eq!(legal, mask, "{context}");
            for head in 0..8 {
                let near = |a: f32, b: f32| (a - b).abs() <= 1e-5;
                assert!(near(log_probs[head], drawn.log_probs[head]), "{context} {drawn:?}");
                assert!(near(entropies[head], drawn.entropies[head]), "{context} {drawn:?}");
            }
            assert_eq!(values, [0.5 * outputs[total]]);
            ops[drawn.choices[0]] += 1;
            let is_masked = mask[layout.range(2)].contains(&0);
            masked += u32::from(drawn.choices[0] == ActionOp::Germinate.index() && is_masked);
            env.act(&drawn.action());
        }
    }
    assert!(ops.iter().all(|count| *count > 200), "every op was drawn: {ops:?}");
    assert!(masked > 200, "blueprints were too large in {masked} germinations");
}
