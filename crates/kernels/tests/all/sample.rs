//! Drawing actions: probabilities, masks, keys. `control/tests/sampling.rs` compares it with a slow
//! reference, for legalities of real hosts.

use meristem_device::random::{Purpose, Rng};
use meristem_kernels::ppo::{PpoHead, floored_probabilities};
use meristem_kernels::sample::{SampleFrom, SampleStep, Sampled, Sampler};
use proptest::prelude::*;

/// Four heads: three ops, four places, and two more. Op 0 uses no other head, op 1 uses the place.
fn sampler(greedy: bool, floor: f32) -> Sampler {
    let head = |choices, used_by| PpoHead {
        choices,
        used_by,
        floor,
        entropy_coefficient: 0.0,
        entropy_floor: 0.0,
    };
    let heads = vec![head(3, 0b111), head(4, 0b110), head(5, 0b100), head(2, 0b100)];
    Sampler { heads, seed: 9, greedy }
}

const K: usize = 4;
const L: usize = 14;
const S: usize = 4;

/// Results of a draw, with all elements overwritten.
#[derive(Clone, Debug, PartialEq)]
struct Drawn {
    choices: Vec<u32>,
    legal: Vec<u8>,
    log_probs: Vec<f32>,
    entropies: Vec<f32>,
    values: Vec<f32>,
}

fn draw(sampler: &Sampler, outputs: &[f32], legality: &[u32], step: SampleStep) -> Drawn {
    let rows = outputs.len() / (L + 1);
    let mut drawn = Drawn {
        choices: vec![u32::MAX; rows * K],
        legal: vec![7; rows * L],
        log_probs: vec![f32::NAN; rows * K],
        entropies: vec![f32::NAN; rows * K],
        values: vec![f32::NAN; rows],
    };
    let Drawn { choices, legal, log_probs, entropies, values } = &mut drawn;
    let from = SampleFrom { outputs, legality, step: &step.to_words() };
    sampler.draw(&from, &mut Sampled { choices, legal, log_probs, entropies, values });
    drawn
}

fn at(step: u64) -> SampleStep {
    SampleStep { step, first_env: 0, value_scale: 1.0 }
}

const COLUMNS: [std::ops::Range<usize>; K] = [0..3, 3..7, 7..12, 12..14];

/// Over many steps of one row, the frequencies of each head's draws match p' of the loss. With at
/// most 4 degrees of freedom, the statistic Σ (n − N·p)²/(N·p) exceeds 28 in fewer than one case in
/// 80,000. The draws are keyed, so the test is deterministic.
#[test]
fn draws_follow_the_probabilities_of_the_loss() {
    let sampler = sampler(false, 0.02);
    let mut values = super::support::Values::new(5);
    let outputs: Vec<f32> = values.vec(L + 1).iter().map(|v| 2.0 * v).collect();
    // Op 1 is legal in places 0 and 2, op 2 in all places except the first; each place has legal
    // choices of head 2.
    let legality = [0b010, 0b11111, 0b100, 0b11111, 0b110, 0b11111, 0b100, 0b11111];
    // Counts of choices, by op and head.
    let mut counts = vec![vec![[0u32; 5]; K]; 3];
    const STEPS: u64 = 60_000;
    let mut masks = [[0u8; L]; 3];
    for step in 0..STEPS {
        let drawn = draw(&sampler, &outputs, &legality, at(step));
        let op = drawn.choices[0] as usize;
        masks[op].copy_from_slice(&drawn.legal);
        for (head, choice) in drawn.choices.iter().enumerate() {
            counts[op][head][*choice as usize] += 1;
        }
    }
    let statistic = |counts: &[u32], head: usize, mask: &[u8; L]| {
        let columns = COLUMNS[head].clone();
        let mut p = vec![0.0; columns.len()];
        floored_probabilities(&outputs[columns.clone()], &mask[columns], 0.02, &mut p);
        let all: u32 = counts.iter().sum();
        let term = |(n, p): (&u32, &f32)| {
            let expected = f64::from(all) * f64::from(*p);
            if *p > 0.0 {
                (f64::from(*n) - expected).powi(2) / expected
            } else {
                f64::from(*n) * 1e9
            }
        };
        counts.iter().zip(&p).map(term).sum::<f64>()
    };
    let ops: Vec<u32> = (0..3).map(|op| counts.iter().map(|c| c[0][op]).sum()).collect();
    assert!(ops.iter().all(|n| *n > 1000) && statistic(&ops, 0, &masks[0]) < 28.0, "{ops:?}");
    for (op, of_op) in counts.iter().enumerate() {
        for (head, of_head) in of_op.iter().enumerate().skip(1) {
            let statistic = statistic(of_head, head, &masks[op]);
            assert!(statistic < 28.0, "op {op}, head {head}: {statistic} {of_head:?}");
        }
    }
    assert_eq!(masks[0], [1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]);
    assert_eq!(masks[1], [1, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0]);
    assert_eq!(masks[2], [1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
}

proptest! {
    /// For any logits and legality: every choice is legal under the stored mask, the mask belongs
    /// to the op, log-probabilities equal the loss's bit for bit, and rows do not depend on each
    /// other.
    #[test]
    fn what_is_drawn_is_legal_and_told_as_the_loss_would_tell_it(
        seed in 0u64..1000,
        rows in 1usize..9,
        scale in prop::sample::select(vec![0f32, 1.0, 30.0, 1e6]),
        floor in prop::sample::select(vec![0f32, 0.02, 0.3]),
        greedy: bool,
        strange in prop::sample::select(vec![0f32, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
    ) {
        let sampler = sampler(greedy, floor);
        let mut values = super::support::Values::new(seed);
        let mut outputs: Vec<f32> = values.vec(rows * (L + 1)).iter().map(|v| scale * v).collect();
        outputs[seed as usize % L] += strange;
        let mut place = || [values.pick(&[0, 2, 4, 6]), values.pick(&[1, 0b10110, 0b11111])];
        let legality: Vec<u32> = (0..rows * S).flat_map(|_| place()).collect();
        let step = SampleStep { step: seed << 33, first_env: 3, value_scale: 2.0 };
        let drawn = draw(&sampler, &outputs, &legality, step);
        for row in 0..rows {
            let op = drawn.choices[row * K] as usize;
            let places = &legality[2 * row * S..][..2 * S];
            let ops: Vec<u32> = places.iter().copied().step_by(2).collect();
            for (head, columns) in COLUMNS.into_iter().enumerate() {
                let legal = &drawn.legal[row * L..][..L][columns.clone()];
                let used = sampler.heads[head].used_by >> op & 1 == 1;
                let expected: Vec<u8> = (0..columns.len()).map(|choice| u8::from(match head {
                    0 => choice == 0 || ops.iter().any(|ops| ops >> choice & 1 == 1),
                    _ if !used => choice == 0,
                    1 => ops[choice] >> op & 1 == 1,
                    2 => {
                        let place = drawn.choices[row * K + 1] as usize;
                        places[2 * place + 1] >> choice & 1 == 1
                    }
                    _ => true,
                })).collect();
                prop_assert_eq!(legal, &expected[..]);
                let choice = drawn.choices[row * K + head] as usize;
                prop_assert_eq!(legal[choice], 1);
                let at = row * K + head;
                let (log_prob, entropy) = (drawn.log_probs[at], drawn.entropies[at]);
                let n = legal.iter().filter(|legal| **legal == 1).count();
                let finite = |z: &f32| if z.is_finite() { *z } else { 0.0 };
                let logits: Vec<f32> =
                    outputs[row * (L + 1)..][columns].iter().map(finite).collect();
                let mut p = vec![0.0; logits.len()];
                floored_probabilities(&logits, legal, floor, &mut p);
                let told = if n == 1 { 0.0 } else { p[choice].ln() };
                prop_assert_eq!(log_prob.to_bits(), f32::to_bits(told));
                prop_assert!(p[choice] > 0.0 && log_prob <= 0.0);
                if greedy {
                    let first = p.iter().position(|other| *other == p[choice]);
                    prop_assert!(p.iter().all(|other| *other <= p[choice]));
                    prop_assert_eq!(first, Some(choice));
                }
                // A sum of at most five terms, each below 1 and rounded a few times.
                prop_assert!((-1e-6..=1.0 + 1e-5).contains(&entropy) && (n > 1 || entropy == 0.0));
            }
            let v = outputs[row * (L + 1) + L];
            prop_assert_eq!(drawn.values[row], 2.0 * v);
            // The row alone, as on another rank.
            let step = SampleStep { first_env: 3 + row as u32, ..step };
            let (outputs, legality) = (&outputs[row * (L + 1)..][..L + 1], places);
            let alone = draw(&sampler, outputs, legality, step);
            prop_assert_eq!(&alone.choices[..], &drawn.choices[row * K..][..K]);
            prop_assert_eq!(&alone.legal[..], &drawn.legal[row * L..][..L]);
        }
    }
}

/// The key consists of seed, step and env, each with all its bits; head k takes number k.
#[test]
fn numbers_are_those_of_the_key() {
    let (outputs, legality) = (vec![0.0; L + 1], [0b110, 0b11111].repeat(S));
    let sampler = Sampler { heads: sampler(false, 0.0).heads, seed: 1 << 40 | 3, greedy: false };
    for (step, env) in [(0, 0), (5, 7), (u64::MAX - 1, 7), (1 << 32, u32::MAX)] {
        let key = SampleStep { step, first_env: env, value_scale: 1.0 };
        let drawn = draw(&sampler, &outputs, &legality, key);
        let mut rng = Rng::new(sampler.seed, Purpose::Actions, u64::from(env), step);
        // Equal probabilities: the index among the legal choices is the number times their count.
        let number = rng.uniform();
        assert_eq!(drawn.choices[0], (number * 3.0) as u32);
        let number = rng.uniform();
        let place = if drawn.choices[0] == 0 { 0 } else { (number * 4.0) as u32 };
        assert_eq!(drawn.choices[1], place);
    }
}
