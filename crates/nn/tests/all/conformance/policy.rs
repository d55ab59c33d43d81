//! Cases of drawing actions, and of the PPO objective.

use std::sync::Arc;

use meristem_nn::kernels::ppo::{PpoHead, PpoLoss};
use meristem_nn::kernels::sample::{SampleStep, Sampler};
use meristem_nn::ops::ppo::PpoPass;
use meristem_nn::ops::{PpoOp, SampleOp};

use super::case::{Case, Data, Random, case};

/// Heads longer than a warp, with and without floor; in rows of any legality, also none; logits
/// large, equal, not finite, and so far apart that a probability without a floor is 0; an env
/// beyond the first, a step beyond 32 bits.
pub(super) fn sample_cases() -> Vec<Case> {
    let (rows, places) = (150, 45);
    let mut random = Random(21);
    let mut cases = vec![];
    for (floor, scale) in [(0.0, 8.0), (0.0, 200.0), (0.02, 1.0), (0.4, 30.0)] {
        let head = |choices, used_by| PpoHead {
            choices,
            used_by,
            floor,
            entropy_coefficient: 0.05,
            entropy_floor: 0.3,
        };
        let heads = vec![head(6, 0b11_1111), head(places, 0b1_1100), head(70, 0b1010), head(1, 7)];
        let logits = 6 + places + 71;
        let outputs = (0..rows * (logits + 1)).map(|i| match i % 211 {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            3..30 => 1.0,
            _ => random.unit() * scale,
        });
        let outputs: Data = Data::F32(outputs.collect());
        // A word of ops and three of kinds for each place.
        let words = 1 + 70_usize.div_ceil(32);
        let legality = (0..rows * places * words).map(|i| match i / (places * words) % 3 {
            0 => 0,
            1 => random.bits() as u32 & random.bits() as u32 & random.bits() as u32,
            _ => random.bits() as u32,
        });
        let legality = Data::U32(legality.collect());
        let step = SampleStep { step: 5 << 33, first_env: u32::MAX - 3, value_scale: -0.3 };
        for greedy in [false, true] {
            let seed = 3 << 40;
            let sampler = Arc::new(Sampler { heads: heads.clone(), seed, greedy });
            // The smallest probability that is drawn is above e⁻⁶⁰.
            let draw = case(SampleOp::Draw { sampler, rows }, 1, 0.0)
                .bound(2, 1, 64.0)
                .bound(3, 6, 1.0)
                .reading(0, outputs.clone())
                .reading(1, legality.clone())
                .reading(2, Data::U32(step.to_words().to_vec()));
            cases.push(draw);
        }
    }
    cases
}

/// Heads longer than a warp, many rows; masks from all to none, ratios on both sides of the clip,
/// entropies on both sides of their floor. The last two have no floors, and logits so far apart
/// that probabilities are 0.
pub(super) fn objective_cases() -> Vec<Case> {
    let mut cases = objectives([0.05, 0.01, 0.02, 0.1], 2.0);
    cases.extend(objectives([0.0; 4], 150.0));
    cases
}

/// Both passes over heads with these floors and logits of at most this size.
fn objectives(floors: [f32; 4], largest: f32) -> Vec<Case> {
    let rows = 70;
    let mut random = Random(22);
    let head = |choices, used_by, floor, entropy_floor| PpoHead {
        choices,
        used_by,
        floor,
        entropy_coefficient: 0.05,
        entropy_floor,
    };
    let heads = vec![
        head(6, 63, floors[0], 0.9),
        head(45, 28, floors[1], 0.1),
        head(9, 10, floors[2], 0.5),
        head(1, 7, floors[3], 0.1),
    ];
    let logits = 61;
    let (mut legal, mut choices) = (vec![], vec![]);
    for row in 0..rows {
        for head in &heads {
            let first = legal.len();
            let share = [2, 1, 3, 9][row % 4];
            legal.extend((0..head.choices).map(|_| u8::from(random.bits().is_multiple_of(share))));
            let legal: Vec<u32> =
                (0..head.choices as u32).filter(|i| legal[first + *i as usize] != 0).collect();
            let at = random.bits() as usize % legal.len().max(1);
            choices.push(legal.get(at).copied().unwrap_or(0));
        }
    }
    let mut values =
        |n: usize, scale: f32| Data::F32((0..n).map(|_| random.unit() * scale).collect());
    let (outputs, advantages) = (values(rows * (logits + 1), largest), values(rows, 2.0));
    let reference = match values(rows * heads.len(), 0.6) {
        Data::F32(values) => Data::F32(values.into_iter().map(|v| v - 2.0).collect()),
        other => other,
    };
    let loss = PpoLoss { heads, clip: 0.2, value_coefficient: 0.5, entropy_floor_coefficient: 1.0 };
    let loss = Arc::new(loss);
    let of = |pass| {
        // With floors log-probabilities are above ln .01, ratios below e³, and some head is used by
        // one row. Without floors log-probabilities are above ln 2⁻¹²⁶ = −87.3, whose last place is
        // within the same bound, 8·20·2⁻²⁴.
        case(PpoOp::Objective { loss: Arc::clone(&loss), pass, rows }, 8, 20.0)
            .bound(1, 1, 5.0)
            .reading(0, outputs.clone())
            .reading(1, Data::U32(choices.clone()))
            .reading(2, Data::U8(legal.clone()))
            .reading(3, advantages.clone())
            .writing(1, reference.clone())
    };
    vec![of(PpoPass::First), of(PpoPass::Later)]
}

pub(super) fn ppo_cases() -> Vec<Case> {
    let head = |choices, used_by| PpoHead {
        choices,
        used_by,
        floor: 0.02,
        entropy_coefficient: 0.05,
        entropy_floor: 0.3,
    };
    let heads = vec![head(3, 0b111), head(2, 0b010)];
    let step = SampleStep { step: 5, first_env: 2, value_scale: 0.5 }.to_words();
    // Choices, masks and values are the same everywhere. The logarithm is the library's own: a unit
    // in the last place of at most ln 1/.02.
    let draw = |greedy| {
        let sampler = Arc::new(Sampler { heads: heads.clone(), seed: 3, greedy });
        case(SampleOp::Draw { sampler, rows: 4 }, 1, 0.0)
            .bound(2, 1, 4.0)
            .bound(3, 3, 1.0)
            .reading(1, Data::U32(vec![2, 0, 2, 2, 0, 0, 0, 2]))
            .reading(2, Data::U32(step.to_vec()))
    };
    let draws = [draw(false), draw(true)];
    let loss = Arc::new(PpoLoss {
        heads,
        clip: 0.2,
        value_coefficient: 0.5,
        entropy_floor_coefficient: 1.0,
    });
    let legal = Data::U8(vec![1; 4 * 5]);
    // Logarithms are the library's own, of at most ln 1/.02; ratios are at most e.
    let of = |pass| {
        let loss = Arc::clone(&loss);
        case(PpoOp::Objective { loss, pass, rows: 4 }, 1, 0.0)
            .bound(0, 4, 1.0)
            .bound(1, 1, 4.0)
            .bound(2, 4, 2.0)
            .reading(2, legal.clone())
            .writing(1, Data::F32(vec![-1.0; 4 * 2]))
    };
    [of(PpoPass::First), of(PpoPass::Later)].into_iter().chain(draws).collect()
}
