//! A control task with a known optimum, on hosts that do not train. Each blueprint adds a fixed
//! number of percentage points in each slot, times its alpha. Lifecycle, gates, observations and
//! rewards are the real ones.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use meristem_control::{
    Action, ActionContext, ActionOutcome, Controller, RewardConfig, RewardState, RoundReport, legal,
};
use meristem_grow::{
    AlphaTarget, GateInputs, GradientHealth, ParameterCounts, Rules, Stage, Style, Tempo,
    TopologyKey,
};

use super::{FakeEnv, loss_of, quick, tiny};

/// Percentage points that each blueprint adds in each slot. One is far better than the others.
pub(crate) const WORTH_PP: [[f32; 7]; 2] =
    [[4.0, 2.0, -1.0, 3.0, 10.0, 1.0, 3.0], [2.0, 3.0, 4.0, 1.0, 9.0, -1.0, 3.0]];

/// Steps of an episode.
pub(crate) const STEPS: u32 = 24;

/// Score of the bare host.
const BARE_PP: f32 = 50.0;

/// An env of the task.
#[derive(Clone)]
pub(crate) struct Toy {
    pub(crate) env: FakeEnv,
    reward: RewardState,
    config: RewardConfig,
    parameters: Rc<RefCell<HashMap<TopologyKey, ParameterCounts>>>,
    /// Sum of the rewards of the episode.
    pub(crate) total: f64,
}

fn rules() -> Rules {
    Rules { max_modules: 2, ..quick() }
}

impl Toy {
    pub(crate) fn new(index: usize) -> Self {
        Self::with_slots(index, 2)
    }

    /// An env with one or two slots.
    pub(crate) fn with_slots(index: usize, slots: usize) -> Self {
        let config = RewardConfig::default();
        let parameters = Rc::default();
        let env = FakeEnv::new(index, tiny(slots, rules()), STEPS);
        Self { env, reward: RewardState::default(), config, parameters, total: 0.0 }
    }

    pub(crate) fn reset(&mut self) {
        let slots = self.env.host.slots().len();
        self.env = FakeEnv::new(self.env.index, tiny(slots, rules()), STEPS);
        self.reward = RewardState::default();
        self.total = 0.0;
    }

    /// Replaces an epoch of training and the counterfactual validation.
    pub(crate) fn epoch(&mut self) {
        let env = &mut self.env;
        env.host.step();
        let mut score = BARE_PP;
        for (index, slot) in env.host.slots().iter().enumerate() {
            let worth = slot.module.as_ref().map(|m| WORTH_PP[index][m.blueprint_index]);
            let share = slot.alpha() * worth.unwrap_or(0.0);
            score += share;
            let counts = matches!(slot.stage, Stage::Blending | Stage::Holding);
            env.measured[index] = GateInputs {
                gradient_health: GradientHealth::from_norms(&[1.0]).filter(|_| worth.is_some()),
                contribution_pp: (counts && slot.alpha() > 0.0).then_some(share),
                contribution_loss: (counts && slot.alpha() > 0.0).then(|| loss_of(share)),
            };
        }
        env.scores_pp.push(score);
        env.losses.push(2.0 - score / 50.0);
        env.remember(&[]);
    }

    /// Applies an action and returns its reward.
    pub(crate) fn act(&mut self, action: &Action) -> (ActionOutcome, f64) {
        let context = ActionContext::new(action, &self.env.view());
        let outcome = self.env.act(action);
        let host = &self.env.host;
        let mut parameters = self.parameters.borrow_mut();
        let parameters =
            parameters.entry(host.topology_key()).or_insert_with(|| host.parameters().unwrap());
        let terms = self.reward.transition(&self.config, &context, host, parameters, &outcome);
        self.total += terms.total();
        (outcome, terms.total())
    }
}

/// Plays a round with a fleet. Returns the mean sum of rewards and the controller's report.
pub(crate) fn play(
    controller: &mut dyn Controller,
    fleet: &mut [Toy],
) -> (f64, Option<RoundReport>) {
    fleet.iter_mut().for_each(Toy::reset);
    (0..fleet.len()).for_each(|env| controller.begin_episode(env));
    for _ in 0..STEPS {
        fleet.iter_mut().for_each(Toy::epoch);
        let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
        let actions = controller.decide_all(&views).unwrap();
        let both = fleet.iter_mut().zip(&actions);
        let rewards: Vec<f32> = both
            .map(|(toy, action)| {
                assert_eq!(legal(action, &toy.env.host), Ok(()));
                toy.act(action).1 as f32
            })
            .collect();
        controller.reward_all(&rewards).unwrap();
    }
    let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
    let report = controller.end_round(&views).unwrap();
    (fleet.iter().map(|toy| toy.total).sum::<f64>() / fleet.len() as f64, report)
}

/// The largest sum of rewards of an episode. Exhaustive search over the step and slot in which each
/// of the two best blueprints germinates, advances and is fossilized.
///
/// Every module has the fast tempo, alpha 1 and the style linear_add: the gains in score sum to
/// the same total on every path, and a slower or lower blending leaves less time or less
/// contribution. Pruning gains nothing when the value of every module is known.
pub(crate) fn best_return() -> f64 {
    best_from(&Toy::new(0), &mut HashMap::new())
}

/// The largest sum of rewards that an env can still reach after a step.
fn best_from(toy: &Toy, known: &mut HashMap<String, f64>) -> f64 {
    let step = toy.env.step;
    if step == STEPS {
        return 0.0;
    }
    let slots = toy.env.host.slots().iter().map(|slot| {
        let module = slot.module.as_ref();
        let of = module.map(|m| (m.blueprint_index, m.alpha, m.score_at_germination_pp));
        format!("{} {:?} {of:?}", slot.stage, slot.stage_steps.min(4))
    });
    let key = format!("{step} {:?}", slots.collect::<Vec<_>>());
    if let Some(best) = known.get(&key) {
        return *best;
    }
    let mut toy = toy.clone();
    toy.epoch();
    let worth = |action: &Action| {
        let mut toy = toy.clone();
        let reward = toy.act(action).1;
        reward + best_from(&toy, known)
    };
    let best = candidates(&toy).iter().map(worth).fold(f64::NEG_INFINITY, f64::max);
    known.insert(key, best);
    best
}

/// Candidate actions: the next step of each slot's module, or the two best blueprints.
fn candidates(toy: &Toy) -> Vec<Action> {
    let (host, mut all) = (&toy.env.host, vec![Action::Wait]);
    for slot in 0..2 {
        let passes = host.gate(slot, &toy.env.measured[slot]).is_some_and(|gate| gate.passed);
        let (style, tempo) = (Style::LinearAdd, Tempo::Fast);
        let alpha_target = AlphaTarget::Full;
        for blueprint in [4, 2] {
            all.push(Action::Germinate { slot, blueprint, style, tempo, alpha_target });
        }
        if passes {
            all.extend([Action::Advance { slot }, Action::Fossilize { slot }]);
        }
    }
    all.retain(|action| legal(action, host).is_ok());
    all
}
