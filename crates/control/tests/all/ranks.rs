//! Policies on several ranks stay equal, under every exchange.

use ciborium::Value;
use meristem_comm::{
    CommOptions, Communicator, ExchangeOptions, FeedbackMode, Method, Reduction, SparseMethod,
};
use meristem_control::{
    Action, Controller, ControllerState, Error, Learning, Ppo, PpoConfig, PpoGroup, PpoOptions,
    RoundReport,
};
use meristem_device::{Device, DeviceId, DeviceOptions};
use meristem_nn::{Isa, ValueType};

use crate::common::toy::{STEPS, Toy, play};
use crate::common::{quick, tiny};

/// Number of envs of all ranks.
const ENVS: usize = 6;

fn ppo(device: &Device, envs: usize) -> Ppo {
    with_minibatches(device, envs, 1)
}

fn with_minibatches(device: &Device, envs: usize, minibatches: usize) -> Ppo {
    let config = PpoConfig { hidden: 8, minibatches, ..PpoConfig::default() };
    let (steps, isa) = (STEPS as usize, Isa::detect());
    let options =
        PpoOptions { envs, steps, seed: 7, isa, learning: Learning::On, values: ValueType::F32 };
    Ppo::new(&device.stream("policy"), config, &tiny(2, quick()), options).unwrap()
}

fn device() -> Device {
    Device::open(DeviceId::Cpu(0), &DeviceOptions { threads: 2, ..DeviceOptions::default() })
        .unwrap()
}

fn group(ranks: usize, method: Method) -> PpoGroup {
    let device = device();
    let members = Communicator::threads(ranks, &CommOptions::default()).unwrap();
    let all = (0..ranks).map(|_| ppo(&device, ENVS / ranks)).collect();
    PpoGroup::new(all, members, &options(method)).unwrap()
}

fn options(method: Method) -> ExchangeOptions {
    ExchangeOptions {
        method,
        density: 0.05,
        keep: FeedbackMode::Residual,
        reduction: Reduction::Mean,
        small: 16,
        ..ExchangeOptions::default()
    }
}

const METHODS: [Method; 5] = [
    Method::Dense,
    Method::Sparse(SparseMethod::TopK),
    Method::Sparse(SparseMethod::GTopK),
    Method::Sparse(SparseMethod::OkTopK { refresh: 2 }),
    Method::Int8,
];

fn fleet() -> Vec<Toy> {
    (0..ENVS).map(Toy::new).collect()
}

/// One step of all envs.
fn step(of: &mut dyn Controller, fleet: &mut [Toy]) -> Vec<Action> {
    fleet.iter_mut().for_each(Toy::epoch);
    let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
    let actions = of.decide_all(&views).unwrap();
    let both = fleet.iter_mut().zip(&actions);
    let rewards: Vec<f32> = both.map(|(toy, action)| toy.act(action).1 as f32).collect();
    of.reward_all(&rewards).unwrap();
    actions
}

fn end(of: &mut dyn Controller, fleet: &[Toy]) -> RoundReport {
    let views: Vec<_> = fleet.iter().map(|toy| toy.env.view()).collect();
    of.end_round(&views).unwrap().unwrap()
}

/// State that is equal on all ranks: scales of observations and returns, skipped updates.
fn scales(state: &ControllerState, rank: usize) -> Vec<(Value, Value)> {
    let memories: Vec<Vec<u8>> = state.memory("ppo").unwrap();
    let memory: Value = ciborium::from_reader(&memories[rank][..]).unwrap();
    let mut memory = memory.into_map().unwrap();
    memory.retain(|(key, _)| {
        ["normalizer", "scale", "skipped", "decisions", "exchanges"]
            .contains(&key.as_text().unwrap())
    });
    assert_eq!(memory.len(), 5);
    memory
}

/// Tensors that are equal on all ranks, by name.
fn shared(state: &ControllerState, rank: usize) -> Vec<(String, Vec<u32>)> {
    let prefix = format!("rank.{rank}.");
    let own = state.tensors.iter().filter_map(|(name, t)| Some((name.strip_prefix(&prefix)?, t)));
    let own = own.filter(|(name, _)| name.starts_with("policy.") || name.starts_with("optimiser."));
    own.map(|(name, tensor)| {
        let bits = tensor.as_f32().unwrap_or_default().iter().map(|x| x.to_bits());
        (name.to_string(), bits.collect())
    })
    .collect()
}

/// Each rank has three envs, in minibatches of one and of two.
#[test]
fn policies_with_minibatches_stay_equal_on_all_ranks() {
    let device = device();
    let members = Communicator::threads(2, &CommOptions::default()).unwrap();
    let all = (0..2).map(|_| with_minibatches(&device, ENVS / 2, 2)).collect();
    let mut group = PpoGroup::new(all, members, &options(Method::Dense)).unwrap();
    for _ in 0..2 {
        // Ranks whose policies differ fail.
        let report = play(&mut group, &mut fleet()).1.unwrap();
        assert!(report.fingerprint.is_some() && report.skipped == 0);
        let state = group.save().unwrap();
        assert_eq!(scales(&state, 0), scales(&state, 1));
    }
}

#[test]
fn policies_stay_equal_on_all_ranks() {
    for ranks in [2, 3] {
        for method in METHODS {
            let (mut one, mut other) = (group(ranks, method), group(ranks, method));
            let before = shared(&one.save().unwrap(), 0);
            for round in 0..3 {
                let (_, report) = play(&mut one, &mut fleet());
                let report = report.unwrap();
                let context = format!("{ranks} ranks, {method:?}, round {round}");
                assert_eq!(report.transitions, ENVS * STEPS as usize, "{context}");
                assert_eq!(report.fingerprint.as_ref().map(String::len), Some(16), "{context}");
                let state = one.save().unwrap();
                let own = shared(&state, 0);
                assert!(!own.is_empty() && own != before, "{context}: it learned");
                assert!((1..ranks).all(|rank| shared(&state, rank) == own), "{context}");
                let own = scales(&state, 0);
                (1..ranks).for_each(|rank| assert_eq!(scales(&state, rank), own, "{context}"));
                // A second run gives the same report.
                let (_, again) = play(&mut other, &mut fleet());
                assert_eq!(again.unwrap(), report, "{context}");
            }
        }
    }
}

/// Seeds follow the global index of the env: before the first update, ranks act like one policy.
#[test]
fn ranks_act_like_one_policy() {
    let (mut alone, mut together) = (ppo(&device(), ENVS), group(3, Method::Dense));
    let (mut own, mut parts) = (fleet(), fleet());
    for _ in 0..STEPS {
        assert_eq!(step(&mut alone, &mut own), step(&mut together, &mut parts));
    }
    let (alone, together) = (end(&mut alone, &own), end(&mut together, &parts));
    assert_eq!((alone.transitions, alone.ops), (together.transitions, together.ops));
    let near = |a: f64, b: f64, relative: f64| (a - b).abs() <= relative * a.abs().max(1e-9);
    // Equal up to the order of sums, in f64.
    assert!(near(alone.mean_return, together.mean_return, 1e-9));
    assert!(near(alone.return_scale, together.return_scale, 1e-9));
    // A mean over the ranks' means differs from the mean over all decisions, because the number of
    // decisions per head differs. It is close to that mean, and far from the sum over three ranks.
    assert!(near(alone.gradient_norm, together.gradient_norm, 0.5), "{alone:?} {together:?}");
    assert!(near(alone.value_loss, together.value_loss, 0.1), "{alone:?} {together:?}");
}

/// A single rank performs all merges and learns like a policy without ranks: two rounds differ only
/// by rounding.
#[test]
fn one_rank_learns_like_a_policy_without_ranks() {
    let (mut alone, mut together) = (ppo(&device(), ENVS), group(1, Method::Dense));
    for _ in 0..2 {
        play(&mut alone, &mut fleet());
        play(&mut together, &mut fleet());
    }
    let both = [&alone, together.first()].map(|ppo| ppo.policy().state_dict().unwrap());
    for ((name, a), (_, b)) in both[0].iter().zip(both[1].iter()) {
        let (a, b) = (a.as_f32().unwrap(), b.as_f32().unwrap());
        let far = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Eight steps of Adam at 3e-4, which a last bit of a target changes little.
        assert!(far <= 1e-5, "{name}: {far}");
    }
}

/// A group that is restored within a round, with residuals, continues bit for bit.
#[test]
fn a_restored_group_continues_bit_for_bit() {
    for method in METHODS {
        let mut original = group(2, method);
        play(&mut original, &mut fleet());
        let mut envs = fleet();
        for _ in 0..9 {
            step(&mut original, &mut envs);
        }
        original.roll_back(4, Some(4), -10.0).unwrap();
        let saved = original.save().unwrap();
        let has = |part: &str| saved.tensors.iter().any(|(name, _)| name.contains(part));
        assert_eq!(has("exchange.residual"), method != Method::Dense, "{method:?}");
        let mut restored = group(2, method);
        restored.restore(&saved).unwrap();
        assert_eq!(restored.save().unwrap(), saved, "{method:?}");
        let mut copies = envs.clone();
        for _ in 9..STEPS {
            assert_eq!(step(&mut restored, &mut copies), step(&mut original, &mut envs));
        }
        assert_eq!(end(&mut restored, &copies), end(&mut original, &envs), "{method:?}");
        assert_eq!(play(&mut restored, &mut copies), play(&mut original, &mut envs));
        assert_eq!(restored.save().unwrap(), original.save().unwrap(), "{method:?}");
        // A state that does not fit changes nothing.
        let mut three = group(3, method);
        let before = three.save().unwrap();
        let error = three.restore(&saved).unwrap_err();
        assert!(matches!(error, Error::BadState { .. }), "{error:?}");
        assert!(error.to_string().contains("it has 2 ranks, this run has 3"), "{error}");
        let mut damaged = saved.clone();
        damaged.tensors.0.remove("rank.1.rollout.legal");
        let before_damage = restored.save().unwrap();
        assert!(matches!(restored.restore(&damaged), Err(Error::BadState { .. })));
        assert_eq!((three.save().unwrap(), restored.save().unwrap()), (before, before_damage));
    }
}

/// Processes: each has one rank of the group, acts in its own envs, and saves its part.
#[test]
fn joined_parts_equal_the_group() {
    let (device, method) = (device(), Method::Sparse(SparseMethod::TopK));
    let parts = || -> Vec<PpoGroup> {
        let members = Communicator::threads(3, &CommOptions::default()).unwrap().into_iter();
        let one = |comm| PpoGroup::new(vec![ppo(&device, 2)], vec![comm], &options(method));
        members.map(|comm| one(comm).unwrap()).collect()
    };
    let (mut whole, mut own) = (group(3, method), parts());
    let mut envs = fleet();
    let mut play = |whole: &mut PpoGroup, own: &mut [PpoGroup]| {
        for _ in 0..STEPS {
            let mut copies = envs.clone();
            let of_parts: Vec<Action> =
                own.iter_mut().zip(copies.chunks_mut(2)).flat_map(|(p, e)| step(p, e)).collect();
            assert_eq!(step(whole, &mut envs), of_parts);
        }
        whole.roll_back(4, Some(4), -1.0).unwrap();
        own[2].roll_back(4, Some(4), -1.0).unwrap();
        let foreign = own[1].roll_back(4, Some(4), -1.0).unwrap_err();
        protocol(&foreign, "expected one of 2 envs from 2 on, got env 4");
        let views: Vec<_> = envs.iter().map(|toy| toy.env.view()).collect();
        let reports: Vec<RoundReport> = std::thread::scope(|scope| {
            let ends = own
                .iter_mut()
                .zip(views.chunks(2))
                .map(|(part, views)| scope.spawn(move || part.end_round(views).unwrap().unwrap()));
            ends.collect::<Vec<_>>().into_iter().map(|report| report.join().unwrap()).collect()
        });
        let report = end(whole, &envs);
        assert!(reports.iter().all(|of_part| *of_part == report));
        let saved: Vec<_> = own.iter().map(|part| part.save().unwrap()).collect();
        let saved = PpoGroup::join(saved).unwrap();
        assert_eq!(saved, whole.save().unwrap());
        saved
    };
    let saved = play(&mut whole, &mut own);
    let mut restored = parts();
    restored.iter_mut().for_each(|part| part.restore(&saved).unwrap());
    play(&mut whole, &mut restored);
}

/// After a number that is not finite on one rank, no rank learns.
#[test]
fn an_update_skipped_on_one_rank_is_skipped_on_all() {
    let mut it = group(2, Method::Sparse(SparseMethod::TopK));
    let mut envs = fleet();
    let before = it.save().unwrap();
    envs.iter_mut().for_each(Toy::epoch);
    let views: Vec<_> = envs.iter().map(|toy| toy.env.view()).collect();
    it.decide_all(&views).unwrap();
    it.reward_all(&[1.0, 0.5, 0.0, 0.0, f32::NAN, 1.0]).unwrap();
    let report = it.end_round(&views).unwrap().unwrap();
    assert_eq!((report.skipped, report.epochs), (1, 0));
    let after = it.save().unwrap();
    for rank in 0..2 {
        assert_eq!(shared(&after, rank), shared(&before, rank));
    }
}

/// Asserts that an error reports calls in another order, or for other envs, than expected.
fn protocol(error: &Error, words: &str) {
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn ranks_that_do_not_fit_are_refused() {
    let members = |n| Communicator::threads(n, &CommOptions::default()).unwrap();
    let (device, options) = (device(), ExchangeOptions::default());
    let refused = |sizes: &[usize], n: usize, words: &str| {
        let ranks = sizes.iter().map(|envs| ppo(&device, *envs)).collect();
        protocol(&PpoGroup::new(ranks, members(n), &options).unwrap_err(), words);
    };
    refused(&[2, 3], 2, "expected ranks with the same number of envs each");
    refused(&[], 1, "expected ranks with the same number of envs each");
    refused(&[2, 2], 3, "2 members");
    refused(&[2, 2], 1, "2 members");
    let mut it = group(2, Method::Dense);
    protocol(&it.decide_all(&[]).unwrap_err(), "expected 6 envs, got 0");
    let beyond = it.roll_back(ENVS, Some(0), -1.0).unwrap_err();
    protocol(&beyond, "expected one of 6 envs from 0 on, got env 6");
}

/// A rank that fails ends the round for all ranks, at once and with the failing rank's error.
/// Afterwards no rank learns.
#[test]
fn a_rank_that_fails_ends_the_round_for_all() {
    let mut it = group(3, Method::Dense);
    let mut envs = fleet();
    step(&mut it, &mut envs);
    let before = it.save().unwrap();
    let mut views: Vec<_> = envs.iter().map(|toy| toy.env.view()).collect();
    // The last rank receives its envs in another order.
    views.swap(4, 5);
    protocol(&it.end_round(&views).unwrap_err(), "2 envs in order");
    views.swap(4, 5);
    protocol(
        &it.end_round(&views).unwrap_err(),
        "expected a rank that has not failed, got a failed rank",
    );
    let after = it.save().unwrap();
    (0..3).for_each(|rank| assert_eq!(shared(&after, rank), shared(&before, rank)));
}
