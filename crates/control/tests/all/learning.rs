//! Rewards and advantages against their formulas.

use meristem_control::{
    Action, ActionContext, Discounts, RewardConfig, RewardMode, RewardState, RewardTerms,
    Trajectories, advantages,
};
use meristem_grow::{AlphaTarget, Birth, Curve, Gates, Host, Rules, Speed, Stage, Style, Tempo};
use proptest::prelude::*;

use crate::common::{FakeEnv, quick, tiny, worth};

const WAIT: Action = Action::Wait;

fn germinate() -> Action {
    let (style, tempo) = (Style::LinearAdd, Tempo::Fast);
    Action::Germinate { slot: 0, blueprint: 6, style, tempo, alpha_target: AlphaTarget::Half }
}

struct Rewarded {
    env: FakeEnv,
    state: RewardState,
    config: RewardConfig,
}

impl Rewarded {
    fn new(mode: RewardMode, rules: Rules) -> Self {
        let env = FakeEnv::new(0, tiny(2, rules), 40);
        let config = RewardConfig { mode, ..RewardConfig::default() };
        Self { env, state: RewardState::default(), config }
    }

    /// An epoch, an action and its reward.
    fn step(&mut self, score_pp: f32, action: Action) -> RewardTerms {
        let env = &mut self.env;
        env.epoch(1.0, score_pp);
        let context = ActionContext::new(&action, &env.view());
        let outcome = env.act(&action);
        let parameters = env.host.parameters().unwrap();
        self.state.transition(&self.config, &context, &env.host, &parameters, &outcome)
    }

    /// Grows a module to Holding at alpha .5.
    fn grown(mode: RewardMode, rules: Rules) -> Self {
        let mut it = Self::new(mode, rules);
        it.step(50.0, germinate());
        it.env.measured[0] = worth(Some(2.0));
        for _ in 0..20 {
            if it.env.host.slots()[0].stage == Stage::Holding {
                return it;
            }
            it.step(50.0, Action::Advance { slot: 0 });
        }
        panic!("not grown");
    }
}

fn begin(host: &Host) -> RewardState {
    RewardState::begin(host, &host.parameters().unwrap())
}

fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() < 1e-9, "{got}, expected {expected}");
}

/// After a rollback no reward compares with earlier values, and fossilized modules earn no second
/// reward.
#[test]
fn a_new_trajectory_has_no_earlier_values() {
    let mut it = Rewarded::grown(RewardMode::Contribution, Rules::default());
    it.step(60.0, Action::Fossilize { slot: 0 });
    assert_eq!(it.env.host.slots()[0].stage, Stage::Fossilized);
    let state = begin(&it.env.host);
    let mut fresh = Rewarded { env: it.env.clone(), state, ..it };
    let first = fresh.step(10.0, WAIT);
    close(first.gain, 0.0);
    close(first.potential, 0.1 * (0.995 * 6.0 - 6.0));
    close(fresh.step(11.0, WAIT).gain, 0.2);
    assert_eq!(begin(&tiny(2, quick())), RewardState::default());
}

#[test]
fn basic_is_gain_minus_rent() {
    let mut it = Rewarded::grown(RewardMode::Basic, quick());
    let terms = it.step(53.0, WAIT);
    close(terms.gain, 0.2 * 3.0);
    // conv_heavy with two channels and alpha .5; the host's 164 parameters count as 200.
    let grown = it.env.host.parameters().unwrap().modules[0] as f64;
    close(terms.rent, -0.05 * (0.5 * grown / 200.0).ln_1p());
    assert!(terms.rent < -0.005);
    close(terms.total(), terms.gain + terms.rent);
    it.config.rent = 1e3;
    close(it.step(53.0, WAIT).rent, -0.5);
    let mut first = Rewarded::new(RewardMode::Basic, quick());
    assert_eq!(first.step(50.0, germinate()).total(), 0.0, "no earlier score, no rent");
    assert_eq!(first.step(f32::NAN, WAIT).total(), 0.0, "the governor's penalty takes its place");
}

#[test]
fn a_joint_module_counts_with_all_its_parameters_whatever_its_target() {
    let rules = Rules { birth: Birth::Joint, ..quick() };
    let mut it = Rewarded::new(RewardMode::Basic, rules);
    assert_eq!(it.step(50.0, germinate()).rent, 0.0);
    let terms = it.step(50.0, Action::Advance { slot: 0 });
    assert_eq!(it.env.host.slots()[0].stage, Stage::Training);
    let grown = it.env.host.parameters().unwrap().modules[0] as f64;
    close(terms.rent, -0.05 * (grown / 200.0).ln_1p());
}

#[test]
fn the_potential_telescopes() {
    let mut it = Rewarded::new(RewardMode::Contribution, quick());
    let stages = |terms: RewardTerms| terms.potential / 0.1;
    close(stages(it.step(50.0, germinate())), 0.995);
    close(stages(it.step(50.0, Action::Advance { slot: 0 })), 0.995 * 2.0 - 1.0);
    close(stages(it.step(50.0, WAIT)), 0.995 * 2.0 - 2.0);
    it.env.host.prune_live();
    close(stages(it.step(50.0, WAIT)), -2.0);
}

#[test]
fn fossilize_is_rewarded_by_contribution_and_gain() {
    let fossilize = Action::Fossilize { slot: 0 };
    let mut it = Rewarded::grown(RewardMode::Contribution, quick());
    let terms = it.step(53.0, fossilize);
    close(terms.fossilize, 0.1 * 2.0 * 3.0 * 2.0 / 5.0);
    close(terms.op, -0.01);
    assert_eq!(it.env.host.slots()[0].stage, Stage::Fossilized);
    // The score of the env has not risen since germination.
    let mut it = Rewarded::grown(RewardMode::Contribution, quick());
    close(it.step(50.0, fossilize).fossilize, -0.5);
    // The gate refuses.
    let strict = Gates { min_contribution_pp: 2.5, ..Gates::default().quick() };
    let mut it =
        Rewarded::grown(RewardMode::Contribution, Rules { gates: strict, ..Rules::default() });
    close(it.step(53.0, fossilize).fossilize, -0.5);
    assert_eq!(it.env.host.slots()[0].stage, Stage::Holding);
    let mut it = Rewarded::grown(RewardMode::Basic, quick());
    close(it.step(53.0, fossilize).fossilize, 0.0);
}

#[test]
fn pruning_a_harmful_module_is_rewarded() {
    let prune = Action::Prune { slot: 0, speed: Speed::Instant, curve: Curve::Linear };
    for (contribution, expected) in [(Some(-0.1), 0.1), (Some(0.0), 0.0), (None, 0.0)] {
        let mut it = Rewarded::grown(RewardMode::Contribution, quick());
        it.env.measured[0] = worth(contribution);
        close(it.step(50.0, prune).prune, expected);
    }
}

#[test]
fn sparse_rewards_only_the_last_step() {
    let mut it = Rewarded::grown(RewardMode::Sparse, quick());
    assert_eq!(it.step(80.0, WAIT).total(), 0.0);
    it.env.step = 39;
    let grown = it.env.host.parameters().unwrap().modules[0] as f64;
    close(it.step(80.0, WAIT).total(), 0.8 - 0.1 * (0.5 * grown / 200.0).ln_1p());
}

/// The only gain is a lower control loss than the twin's; parameters and actions cost.
#[test]
fn shaped_sums_to_the_advantage_minus_prices() {
    let mut it = Rewarded::new(RewardMode::Shaped, quick());
    it.config.gamma = 1.0;
    it.env.episode_steps = 4;
    let mut sum = RewardTerms::default();
    // The twin's loss; the env's loss is 1.
    let twins = [Some(1.0), Some(1.1), None, Some(1.3)];
    let advance = Action::Advance { slot: 0 };
    for (twin, action) in twins.into_iter().zip([germinate(), advance, WAIT, WAIT]) {
        it.env.twin_loss = twin;
        sum.add(&it.step(50.0, action));
    }
    close(sum.twin_lead, 8.0 * f64::from(1.3f32 - 1.0));
    close(sum.potential, 0.0);
    close(sum.op, -0.02);
    let alpha = f64::from(it.env.host.slots()[0].alpha());
    let grown = it.env.host.parameters().unwrap().modules[0] as f64;
    close(sum.size, -0.1 * (alpha * grown / 200.0).ln_1p());
    close(sum.total(), sum.twin_lead + sum.op + sum.size);
    assert_eq!(it.step(f32::NAN, WAIT).gain, 0.0, "accuracy has no effect");
}

#[test]
fn shaped_has_a_price_for_parameters_that_a_prune_refunds() {
    let mut it = Rewarded::grown(RewardMode::Shaped, quick());
    let grown = it.env.host.parameters().unwrap().modules[0] as f64;
    let prune = Action::Prune { slot: 0, speed: Speed::Instant, curve: Curve::Linear };
    close(it.step(50.0, prune).size, 0.1 * (0.5 * grown / 200.0).ln_1p());
}

#[test]
fn a_diverged_twin_gives_no_advantage() {
    let mut it = Rewarded::new(RewardMode::Shaped, quick());
    for twin in [Some(1.5), Some(f32::NAN), Some(f32::INFINITY), None] {
        it.env.twin_loss = twin;
        close(it.step(50.0, WAIT).twin_lead, 0.0);
    }
    it.env.twin_loss = Some(1.75);
    close(it.step(50.0, WAIT).twin_lead, 2.0);
}

/// Advantages as the direct sum A_t = Σ_k (γλ)^k δ_{t+k} to the end of the trajectory, in f64.
fn direct(of: &Trajectories<'_>, discounts: Discounts) -> Vec<f64> {
    let steps = of.rewards.len() / of.envs;
    let at = |slice: &[f32], step: usize, env: usize| f64::from(slice[step * of.envs + env]);
    let mut all = vec![];
    for (step, env) in (0..steps).flat_map(|s| (0..of.envs).map(move |e| (s, e))) {
        let (mut sum, mut weight) = (0.0, 1.0);
        for now in step..steps {
            let place = now * of.envs + env;
            let next =
                if of.terminated[place] == 1 || (now + 1 == steps && of.truncated[place] == 0) {
                    0.0
                } else if of.truncated[place] == 1 {
                    at(of.bootstraps, now, env)
                } else {
                    at(of.values, now + 1, env)
                };
            let delta = at(of.rewards, now, env) + discounts.gamma * next - at(of.values, now, env);
            sum += weight * delta;
            weight *= discounts.gamma * discounts.lambda;
            if of.terminated[place] == 1 || of.truncated[place] == 1 {
                break;
            }
        }
        all.push(sum);
    }
    all
}

proptest! {
    /// Both sums are f64. The result is rounded to f32 (2^-24 relative), after differences of order
    /// 10 cancel.
    #[test]
    fn advantages_equal_the_direct_sum(
        envs in 1usize..5,
        steps in proptest::collection::vec(
            proptest::collection::vec((
                -10f32..10.0, -10f32..10.0, -10f32..10.0, 0u8..20), 5), 1..30),
        gamma in 0.5f64..1.0,
        lambda in 0f64..1.0,
    ) {
        let cells: Vec<_> = steps.iter().flat_map(|row| &row[..envs]).collect();
        let rewards: Vec<f32> = cells.iter().map(|c| c.0).collect();
        let values: Vec<f32> = cells.iter().map(|c| c.1).collect();
        let bootstraps: Vec<f32> = cells.iter().map(|c| c.2).collect();
        let truncated: Vec<u8> = cells.iter().map(|c| u8::from(c.3 % 5 == 0)).collect();
        let terminated: Vec<u8> = cells.iter().map(|c| u8::from(c.3 % 7 == 0)).collect();
        let of = Trajectories {
            envs, rewards: &rewards, values: &values, bootstraps: &bootstraps,
            truncated: &truncated, terminated: &terminated,
        };
        let mut got = vec![0.0; cells.len()];
        let discounts = Discounts { gamma, lambda };
        advantages(&of, discounts, &mut got);
        for (got, expected) in got.iter().zip(direct(&of, discounts)) {
            prop_assert!((f64::from(*got) - expected).abs() < 1e-5 * (1.0 + expected.abs()));
        }
    }
}

/// Both kinds of end, worked out by hand for γ = .5, λ = 1.
#[test]
fn a_truncation_bootstraps_and_a_termination_does_not() {
    let of = |truncated, terminated| {
        let of = Trajectories {
            envs: 1,
            rewards: &[1.0, 1.0],
            values: &[0.0, 0.0],
            bootstraps: &[100.0, 8.0],
            truncated,
            terminated,
        };
        let mut got = [0.0; 2];
        advantages(&of, Discounts { gamma: 0.5, lambda: 1.0 }, &mut got);
        got
    };
    assert_eq!(of(&[0, 1], &[0, 0]), [3.5, 5.0]);
    assert_eq!(of(&[0, 0], &[0, 1]), [1.5, 1.0]);
    assert_eq!(of(&[0, 1], &[0, 1]), [1.5, 1.0], "a termination takes precedence");
    assert_eq!(of(&[0, 1], &[1, 0]), [1.0, 5.0], "no value passes a termination");
}
