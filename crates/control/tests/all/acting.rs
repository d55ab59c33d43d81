//! A step of the policy: its cost, the rows that it writes into the rollout, and equal
//! distributions in acting and learning.

use meristem_comm::{CommOptions, Communicator, ExchangeOptions};
use meristem_control::{
    Controller, ControllerState, HEADS, HeadLayout, Learning, Legality, Ppo, PpoConfig, PpoGroup,
    PpoOptions,
};
use meristem_device::{Counts, Device, DeviceId, DeviceOptions};
use meristem_nn::{HostTensor, Isa, ValueType};

use crate::common::toy::{STEPS, Toy, play};
use crate::common::{quick, tiny};

const ENVS: usize = 6;

fn device() -> Device {
    Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap()
}

fn ppo(device: &Device, envs: usize, learning: Learning) -> Ppo {
    let config = PpoConfig { hidden: 8, ..PpoConfig::default() };
    let (steps, isa) = (STEPS as usize, Isa::detect());
    let options = PpoOptions { envs, steps, seed: 7, isa, learning, values: ValueType::F32 };
    Ppo::new(&device.stream("policy"), config, &tiny(2, quick()), options).unwrap()
}

fn fleet() -> Vec<Toy> {
    (0..ENVS).map(Toy::new).collect()
}

/// Device operations of each decision of a round.
fn costs(device: &Device, of: &mut dyn Controller) -> Vec<Counts> {
    let mut fleet = fleet();
    let mut costs = vec![];
    for _ in 0..STEPS {
        fleet.iter_mut().for_each(Toy::epoch);
        let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
        let before = device.counts();
        let actions = of.decide_all(&views).unwrap();
        costs.push(device.counts() - before);
        let both = fleet.iter_mut().zip(&actions);
        let rewards: Vec<f32> = both.map(|(toy, action)| toy.act(action).1 as f32).collect();
        of.reward_all(&rewards).unwrap();
    }
    costs
}

/// From the first step on, and for any number of envs: one copy to the device, one launch that
/// includes the draw, one read-back.
#[test]
fn a_step_is_one_upload_one_launch_and_one_read_back() {
    let of_ranks = |ranks: u64| Counts {
        copies_to_host: 1,
        copies_to_device: ranks,
        synchronizations: 1,
        allocations: 0,
        launches: ranks,
    };
    for learning in [Learning::On, Learning::Off, Learning::Greedy] {
        let device = device();
        let mut it = ppo(&device, ENVS, learning);
        let costs = costs(&device, &mut it);
        assert!(costs.iter().all(|cost| *cost == of_ranks(1)), "{learning:?} {costs:?}");
    }
    // Each rank has a policy; one read-back covers all of them.
    let device = device();
    let members = Communicator::threads(3, &CommOptions::default()).unwrap();
    let ranks = (0..3).map(|_| ppo(&device, ENVS / 3, Learning::On)).collect();
    let mut group = PpoGroup::new(ranks, members, &ExchangeOptions::default()).unwrap();
    let costs = costs(&device, &mut group);
    assert!(costs.iter().all(|cost| *cost == of_ranks(3)), "{costs:?}");
}

fn buffer(state: &ControllerState, name: &str) -> Vec<f32> {
    state.tensors.get(&format!("rollout.{name}")).unwrap().as_f32().unwrap().to_vec()
}

/// The rollout stores the choices that the host received, under the masks of the hosts at that
/// time. The update computes the same log-probabilities for these rows.
#[test]
fn the_rollout_stores_choices_and_probabilities() {
    let mut it = ppo(&device(), ENVS, Learning::On);
    play(&mut it, &mut fleet());
    let mut fleet = fleet();
    let layout = HeadLayout::new(2, 7);
    let (heads, total) = (HEADS.len(), layout.total());
    let mut received = vec![];
    for step in 0..STEPS as usize {
        fleet.iter_mut().for_each(Toy::epoch);
        let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
        let actions = it.decide_all(&views).unwrap();
        let state = it.save().unwrap();
        let legal = buffer(&state, "legal");
        let outputs = it.outputs().clone();
        for (env, (view, action)) in views.iter().zip(&actions).enumerate() {
            assert_eq!(outputs.choices[env], action.choices());
            let mut mask = vec![0; total];
            let legality = Legality::from_host(view.host);
            legality.write_ops(&layout, &mut mask);
            for head in 1..heads {
                let chosen = (action.op(), action.slot().unwrap_or(0));
                legality.write_head(head, chosen, &mut mask[layout.range(head)]);
            }
            let row = (step * ENVS + env) * total;
            assert!(legal[row..row + total].iter().zip(mask).all(|(a, b)| *a == f32::from(b)));
        }
        received.push(outputs);
        let both = fleet.iter_mut().zip(&actions);
        let rewards: Vec<f32> = both.map(|(toy, action)| toy.act(action).1 as f32).collect();
        it.reward_all(&rewards).unwrap();
    }
    let state = it.save().unwrap();
    let rows = STEPS as usize * ENVS;
    let all = |name: &str, width: usize| buffer(&state, name)[..rows * width].to_vec();
    let log_probs: Vec<f32> =
        received.iter().flat_map(|d| d.log_probs.as_flattened().to_vec()).collect();
    let entropies: Vec<f32> =
        received.iter().flat_map(|d| d.entropies.as_flattened().to_vec()).collect();
    let choices =
        received.iter().flat_map(|d| d.choices.as_flattened()).map(|choice| *choice as f32);
    assert_eq!(all("choices", heads), choices.collect::<Vec<_>>());
    assert_eq!(all("log_probs", heads), log_probs);
    assert_eq!(all("entropies", heads), entropies);
    let values: Vec<f32> = received.iter().flat_map(|d| d.values.clone()).collect();
    assert_eq!(all("values", 1), values);
    assert!(
        log_probs.iter().all(|x| x.is_finite() && *x <= 0.0) && log_probs.iter().any(|x| *x < 0.0)
    );
    // Mean entropy of the op over the decisions; the update reports the same.
    let decisions: Vec<usize> = (0..rows).filter(|row| entropies[row * heads] > 0.0).collect();
    let mean = decisions.iter().map(|row| f64::from(entropies[row * heads])).sum::<f64>();
    let mean = mean / decisions.len() as f64;
    let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
    let report = it.end_round(&views).unwrap().unwrap();
    // The update computes all rows of a sequence together: sums in another order, a few roundings
    // per layer.
    assert!((report.entropies[0] - mean).abs() < 1e-5, "{report:?} {mean}");
    // V of the observation after the last transition is the bootstrap, in the scale of the round.
    let state = it.save().unwrap();
    let (values, bootstraps) = (buffer(&state, "values"), buffer(&state, "bootstraps"));
    assert_eq!(bootstraps[rows - ENVS..], values[rows..]);
    assert!(values[rows..].iter().any(|v| *v != 0.0));
}

/// Mean normalised entropy of the op in each round of a policy with widely spaced logits.
fn op_entropies(learning: Learning, rounds: usize) -> Vec<f64> {
    let config =
        PpoConfig { hidden: 8, floors: [0.99; 8], floor_rounds: 2, ..PpoConfig::default() };
    let (device, isa) = (device(), Isa::detect());
    let options = PpoOptions {
        envs: ENVS,
        steps: STEPS as usize,
        seed: 7,
        isa,
        learning,
        values: ValueType::F32,
    };
    let mut it = Ppo::new(&device.stream("policy"), config, &tiny(2, quick()), options).unwrap();
    let (mut weights, metadata) = it.export().unwrap();
    for (name, tensor) in &mut weights.0 {
        // The softmax of all but one choice underflows to 0.
        if name.starts_with("heads.") {
            *tensor = HostTensor::f32(
                &tensor.shape,
                tensor.as_f32().unwrap().iter().map(|x| 1e4 * x).collect(),
            );
        }
    }
    it.import(&weights, &metadata).unwrap();
    let mut fleet = fleet();
    let entropy =
        |it: &Ppo| it.outputs().entropies.iter().map(|row| f64::from(row[0])).sum::<f64>();
    (0..rounds)
        .map(|_| {
            let mut sum = 0.0;
            fleet.iter_mut().for_each(Toy::reset);
            for _ in 0..STEPS {
                fleet.iter_mut().for_each(Toy::epoch);
                let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
                let before = device.counts();
                let actions = it.decide_all(&views).unwrap();
                assert_eq!((device.counts() - before).allocations, 0);
                sum += entropy(&it);
                let both = fleet.iter_mut().zip(&actions);
                let rewards: Vec<f32> = both.map(|(toy, act)| toy.act(act).1 as f32).collect();
                it.reward_all(&rewards).unwrap();
            }
            let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
            if let Some(report) = it.end_round(&views).unwrap() {
                assert_eq!(report.skipped, 0, "{report:?}");
            }
            sum / f64::from(STEPS) / ENVS as f64
        })
        .collect()
}

/// Floors of .99 make the choices nearly uniform for two rounds; without learning there are no
/// floors. Then widely spaced logits decide alone, and learning from probabilities of 0 gives
/// finite numbers.
#[test]
fn floors_fall_to_zero_and_are_absent_without_learning() {
    let learning = op_entropies(Learning::On, 3);
    assert!(learning[0] > 0.5 && learning[1] > 0.5 && learning[2] < 0.1, "{learning:?}");
    for still in [Learning::Off, Learning::Greedy] {
        let entropies = op_entropies(still, 1);
        assert!(entropies[0] < 0.1, "{still:?} {entropies:?}");
    }
}
