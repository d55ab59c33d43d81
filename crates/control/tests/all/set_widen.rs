//! A policy that chooses WIDEN: masks, actions, checkpoints, demonstrations, files.

use std::sync::Arc;

use meristem_control::{
    Action, ActionOp, Controller, EnvFacts, Floors, HEADS, HeadKind, HeadLayout, Heuristic,
    HeuristicConfig, Learning, Legality, PolicyDomain, Ppo, PpoConfig, PpoOptions, RoundReport,
    SamplingMode, legal, policy_is_of_sets, policy_observes_layers, sample_action,
};
use meristem_device::random::{Purpose, Rng};
use meristem_device::{Device, DeviceId, DeviceOptions};
use meristem_grow::{BlueprintSet, Host, HostSpec, Rules, TaskShape};
use meristem_nn::kernels::ppo::PpoHead;
use meristem_nn::kernels::sample::{SampleFrom, SampleStep, Sampled, Sampler};
use meristem_nn::{Isa, ValueType};

use crate::common::{FakeEnv, quick, worth};

const STEPS: u32 = 14;
const ENVS: usize = 4;
/// Places of the policy: more than any host has.
const PLACES: usize = 4;
const SLOTS: usize = 3;

/// Facts of an env in which a policy may make layers wider, to twice their features.
fn wider() -> EnvFacts {
    let (widen_by, widen_up_to) = (0.5, 2.0);
    EnvFacts { train_samples: 5000, lr_factor: 1.0, widen_by, widen_up_to, ..EnvFacts::default() }
}

/// A host of linear layers, with all of its slots.
fn host(text: &str, rules: Rules) -> Host {
    let spec: HostSpec = text.parse().unwrap();
    let vector = TaskShape { channels: 6, height: 1, width: 1, classes: 3 };
    let slots = spec.slots();
    Host::new(spec.clone(), vector, slots, Arc::new(BlueprintSet::vectors()), rules).unwrap()
}

/// Envs with hosts of different sizes and limits.
fn envs(facts: EnvFacts) -> Vec<FakeEnv> {
    let limited = Rules { max_parameters: Some(90), ..quick() };
    let small = Rules { max_macs: Some(100), ..quick() };
    let hosts =
        [("mlp:4,4,4", quick()), ("mlp:6", quick()), ("mlp:4,5", limited), ("mlp:5", small)];
    let env =
        |(index, (text, rules))| FakeEnv { facts, ..FakeEnv::new(index, host(text, rules), STEPS) };
    hosts.into_iter().enumerate().map(env).collect()
}

fn ppo(learning: Learning) -> Ppo {
    let config = PpoConfig { hidden: 8, lr: 3e-3, ..PpoConfig::default() };
    let isa = Isa::detect();
    let options = PpoOptions {
        envs: ENVS,
        steps: STEPS as usize,
        seed: 7,
        isa,
        learning,
        values: ValueType::F32,
    };
    let names = |n: usize| (0..n).map(|i| i.to_string()).collect();
    let blueprints = BlueprintSet::vectors().iter().map(|one| one.name.clone()).collect();
    let domain = PolicyDomain { slots: names(SLOTS), blueprints, layers: names(PLACES) };
    let stream =
        Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap().stream("policy");
    Ppo::of_sets_and_layers(&stream, config, domain, options).unwrap()
}

/// An epoch of each env.
fn epoch(envs: &mut [FakeEnv]) {
    for env in envs.iter_mut() {
        env.epoch(1.0 / (1.0 + env.step as f32), 50.0);
        env.measured.fill(worth(Some(1.0)));
        env.remember(&[]);
    }
}

/// An epoch and an action of each env.
fn step(of: &mut dyn Controller, envs: &mut [FakeEnv]) -> Vec<Action> {
    epoch(envs);
    decide(of, envs)
}

/// An action of each env, which must be legal. A policy is paid for wider layers only.
fn decide(of: &mut dyn Controller, envs: &mut [FakeEnv]) -> Vec<Action> {
    let views: Vec<_> = envs.iter().map(FakeEnv::view).collect();
    let actions = of.decide_all(&views).unwrap();
    let mut rewards = vec![];
    for (env, action) in envs.iter_mut().zip(&actions) {
        assert_eq!(legal(action, &env.host), Ok(()), "{action:?}");
        env.act(action);
        rewards.push(f32::from(u8::from(action.op() == ActionOp::Widen)));
    }
    of.reward_all(&rewards).unwrap();
    actions
}

fn round(of: &mut dyn Controller, facts: EnvFacts) -> Option<RoundReport> {
    let mut envs = envs(facts);
    (0..ENVS).for_each(|env| of.begin_episode(env));
    (0..STEPS).for_each(|_| drop(step(of, &mut envs)));
    let views: Vec<_> = envs.iter().map(FakeEnv::view).collect();
    of.end_round(&views).unwrap()
}

fn masks(of: &Ppo, rows: usize) -> Vec<u8> {
    let state = of.save().unwrap();
    let legal = state.tensors.get("rollout.legal").unwrap().as_f32().unwrap();
    legal[..rows * layout().total()].iter().map(|legal| *legal as u8).collect()
}

fn layout() -> HeadLayout {
    HeadLayout::new(SLOTS, BlueprintSet::vectors().len()).with_layers(PLACES)
}

/// Number of further features by which a policy makes a layer wider: half of its initial ones.
fn amount(env: &FakeEnv, layer: usize) -> usize {
    (env.host.first_spec().widenable()[layer].features as f64 / 2.0).round() as usize
}

/// Layers of an env that may become wider, by the rules of the host and of the env.
fn permitted(env: &FakeEnv) -> Vec<bool> {
    let layers = env.host.widenable().into_iter().zip(env.host.first_spec().widenable());
    let permitted = layers.enumerate().map(|(layer, (now, first))| {
        let by = amount(env, layer);
        let few = now.features + by <= 2 * first.features;
        few && legal(&Action::Widen { layer, by }, &env.host).is_ok()
    });
    permitted.collect()
}

/// In the mask of each draw the layers are legal that the host and the env permit, and the choice
/// that is drawn widens that layer.
#[test]
fn drawn_actions_and_masks_follow_the_rules_of_host_and_env() {
    let mut it = ppo(Learning::On);
    let mut forbidden = [0; 3];
    let mut widened = 0;
    let (total, places) = (layout().total(), layout().range(1));
    for _ in 0..12 {
        let mut envs = envs(wider());
        (0..ENVS).for_each(|env| it.begin_episode(env));
        for at in 0..STEPS as usize {
            epoch(&mut envs);
            let before: Vec<_> = envs.iter().map(permitted).collect();
            let hosts: Vec<Host> = envs.iter().map(|env| env.host.clone()).collect();
            let actions = decide(&mut it, &mut envs);
            let masks = masks(&it, (at + 1) * ENVS);
            let choices = it.outputs().choices.clone();
            for (env, action) in actions.iter().enumerate() {
                let row = &masks[(at * ENVS + env) * total..][..total];
                let Action::Widen { layer, by } = *action else { continue };
                assert_eq!(choices[env][..2], [6, SLOTS + layer]);
                assert_eq!(choices[env][2..], [0; 6]);
                let legal = &row[places.clone()];
                assert!(legal[..SLOTS].iter().all(|slot| *slot == 0));
                let own = &legal[SLOTS..];
                let expected = before[env].iter().map(|is| u8::from(*is));
                assert!(own.iter().copied().eq(expected.chain([0; PLACES]).take(PLACES)));
                let (now, then) = (&envs[env].host.widenable(), &hosts[env].widenable());
                assert_eq!(now[layer].features, then[layer].features + by);
                widened += 1;
            }
            for (env, permitted) in before.iter().enumerate() {
                let row = &masks[(at * ENVS + env) * total..][..total];
                assert_eq!(row[ActionOp::Widen.index()] == 1, permitted.contains(&true));
                let layers = hosts[env].widenable();
                for (layer, _) in permitted.iter().enumerate().filter(|(_, is)| !**is) {
                    let filled = hosts[env].slots().iter().any(|slot| {
                        slot.module.is_some() && layers[layer].slots.contains(&slot.name)
                    });
                    let widest = layers[layer].features
                        == 2 * hosts[env].first_spec().widenable()[layer].features;
                    forbidden[if filled {
                        0
                    } else if widest {
                        1
                    } else {
                        2
                    }] += 1;
                }
            }
        }
        let views: Vec<_> = envs.iter().map(FakeEnv::view).collect();
        it.end_round(&views).unwrap();
    }
    assert!(widened > 50, "{widened}");
    assert!(forbidden.iter().all(|count| *count > 10), "{forbidden:?}: filled, widest, limits");
}

#[test]
fn an_env_that_forbids_it_gets_no_wider() {
    let mut it = ppo(Learning::On);
    let report = round(&mut it, EnvFacts { widen_by: 0.0, ..wider() }).unwrap();
    assert_eq!(report.ops[ActionOp::Widen.index()], 0);
    let masks = masks(&it, ENVS * STEPS as usize);
    assert!(masks.chunks(layout().total()).all(|row| row[6] == 0));
    assert!(round(&mut it, wider()).unwrap().ops[6] > 0, "with the same policy");
}

/// The kernel draws WIDEN and its layer as the slow version does; see
/// `sampling::the_kernel_draws_like_the_slow_version`, whose tolerance this is.
#[test]
fn the_kernel_draws_layers_like_the_slow_version() {
    const SEED: u64 = 5;
    let layout = layout();
    let floors: Floors = [0.1; HEADS.len()];
    let head = |(head, choices): (&meristem_control::ActionHead, usize)| PpoHead {
        choices,
        used_by: head.used_by.iter().fold(0, |bits, op| bits | 1 << op.index())
            | u32::from(matches!(head.kind, HeadKind::Op | HeadKind::Slot))
                << ActionOp::Widen.index(),
        floor: 0.1,
        entropy_coefficient: 0.0,
        entropy_floor: 0.0,
    };
    let heads: Vec<PpoHead> = HEADS.iter().zip(layout.sizes()).map(head).collect();
    let sampler = Sampler { heads, seed: SEED, greedy: false };
    let (words, total) = (sampler.words(), layout.total());
    let mut drawn = [0; PLACES];
    let mut envs = envs(wider());
    for at in 0..4000u64 {
        let env = &mut envs[at as usize % ENVS];
        let legality = Legality::with_layers(&env.view());
        let mut places = vec![u32::MAX; (SLOTS + PLACES) * words];
        let (slots, layers) = places.split_at_mut(SLOTS * words);
        legality.write_places(words, slots);
        legality.write_layers(words, layers);
        let mut random = Rng::new(9, Purpose::Test, 0, at);
        let logits: Vec<f32> = (0..total).map(|_| 4.0 * random.uniform() - 2.0).collect();
        let outputs = [&logits[..], &[0.0]].concat();
        let step = SampleStep { step: at, first_env: 0, value_scale: 1.0 }.to_words();
        let (mut choices, mut values) = ([u32::MAX; 8], [f32::NAN]);
        let (mut log_probs, mut entropies) = ([f32::NAN; 8], [f32::NAN; 8]);
        let mut mask = vec![9; total];
        sampler.draw(
            &SampleFrom { outputs: &outputs, legality: &places, step: &step },
            &mut Sampled {
                choices: &mut choices,
                legal: &mut mask,
                log_probs: &mut log_probs,
                entropies: &mut entropies,
                values: &mut values,
            },
        );
        let mut rng = Rng::new(SEED, Purpose::Actions, 0, at);
        let (mut slow_logits, mut slow_mask) = (logits, vec![9; total]);
        let pick = SamplingMode::Sample(&mut rng);
        let slow =
            sample_action(&layout, &legality, &floors, &mut slow_logits, &mut slow_mask, pick);
        assert_eq!(choices.map(|choice| choice as usize), slow.choices);
        assert_eq!(mask, slow_mask);
        for (a, b) in
            log_probs.iter().zip(slow.log_probs).chain(entropies.iter().zip(slow.entropies))
        {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
        if slow.choices[0] == ActionOp::Widen.index() {
            let layer = slow.choices[1] - SLOTS;
            drawn[layer] += 1;
            env.act(&Action::Widen { layer, by: amount(env, layer) });
        }
        if at % 40 == 39 {
            envs = self::envs(wider());
        }
    }
    assert!(drawn[0] > 100 && drawn[1] > 20 && drawn[PLACES - 1] == 0, "{drawn:?}");
}

/// A checkpoint within a round: the observations of layers depend on earlier steps.
#[test]
fn a_killed_policy_goes_on_to_the_same_bits() {
    let mut whole = ppo(Learning::On);
    round(&mut whole, wider());
    let mut envs_of_whole = envs(wider());
    (0..ENVS).for_each(|env| whole.begin_episode(env));
    let widened = (0..6).flat_map(|_| step(&mut whole, &mut envs_of_whole));
    assert!(widened.filter(|action| action.op() == ActionOp::Widen).count() > 0);
    let saved = whole.save().unwrap();
    let mut resumed = ppo(Learning::On);
    resumed.restore(&saved).unwrap();
    assert_eq!(resumed.save().unwrap(), saved);
    let mut envs_of_resumed = envs_of_whole.clone();
    for at in 6..STEPS {
        let both = [step(&mut resumed, &mut envs_of_resumed), step(&mut whole, &mut envs_of_whole)];
        assert_eq!(both[0], both[1], "step {at}");
    }
    let end = |of: &mut Ppo, envs: &[FakeEnv]| {
        let views: Vec<_> = envs.iter().map(FakeEnv::view).collect();
        of.end_round(&views).unwrap()
    };
    assert_eq!(end(&mut resumed, &envs_of_resumed), end(&mut whole, &envs_of_whole));
    assert_eq!(round(&mut resumed, wider()), round(&mut whole, wider()));
    assert_eq!(resumed.save().unwrap(), whole.save().unwrap());
    // Between rounds what was learned suffices.
    let mut learned = ppo(Learning::On);
    learned.restore(&whole.save_learned().unwrap()).unwrap();
    assert_eq!(round(&mut learned, wider()), round(&mut whole, wider()));
}

/// A policy that is paid for wider layers learns to choose WIDEN.
#[test]
fn a_policy_learns_to_widen() {
    let mut it = ppo(Learning::On);
    let widened = |it: &mut Ppo| round(it, wider()).unwrap().ops[ActionOp::Widen.index()];
    let first: u64 = (0..4).map(|_| widened(&mut it)).sum();
    (0..60).for_each(|_| _ = widened(&mut it));
    let last: u64 = (0..4).map(|_| widened(&mut it)).sum();
    assert!(last as f64 > 1.3 * first as f64, "{first} at first, {last} at last");
}

#[test]
fn the_heuristic_demonstrates_growth_in_width() {
    let teacher = Heuristic::new(HeuristicConfig { widen_pause: 1, ..HeuristicConfig::default() });
    let mut it = ppo(Learning::On).with_teacher(teacher, 6);
    let mut entropies = vec![];
    for _ in 0..6 {
        let report = round(&mut it, wider()).unwrap();
        assert!(report.ops[ActionOp::Widen.index()] > 0, "{report:?}");
        assert_eq!((report.skipped, report.kl), (0, 0.0));
        entropies.push(report.entropies[0]);
    }
    assert!(entropies[5] < 0.8 * entropies[0], "the policy imitates: {entropies:?}");
    let (weights, metadata) = it.export().unwrap();
    let mut acting = ppo(Learning::Greedy);
    acting.import(&weights, &metadata).unwrap();
    let mut all = envs(wider());
    let actions: Vec<Action> = (0..STEPS).flat_map(|_| step(&mut acting, &mut all)).collect();
    assert!(actions.iter().any(|action| action.op() == ActionOp::Widen), "{actions:?}");
    // In envs that forbid it the heuristic does not, either.
    let forbidden = EnvFacts { widen_by: 0.0, ..wider() };
    let mut other = ppo(Learning::On).with_teacher(Heuristic::default(), 1);
    assert_eq!(round(&mut other, forbidden).unwrap().ops[ActionOp::Widen.index()], 0);
}

#[test]
fn a_file_says_that_its_policy_widens() {
    let learned = ppo(Learning::On);
    let (weights, metadata) = learned.export().unwrap();
    assert!(policy_is_of_sets(&metadata).unwrap() && policy_observes_layers(&metadata).unwrap());
    assert_eq!(metadata["meristem_policy"], "3", "older programs refuse it");
    let stream =
        Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap().stream("policy");
    let config = PpoConfig { hidden: 8, ..PpoConfig::default() };
    let isa = Isa::detect();
    let options = PpoOptions {
        envs: ENVS,
        steps: STEPS as usize,
        seed: 7,
        isa,
        learning: Learning::Off,
        values: ValueType::F32,
    };
    let domain = PolicyDomain::from_hosts(envs(wider()).iter().map(|env| &env.host));
    assert_eq!(domain.layers.len(), 3);
    let mut without = Ppo::of_sets(&stream, config, domain, options).unwrap();
    let error = without.import(&weights, &metadata).unwrap_err().to_string();
    assert!(error.contains("a policy for any number of slots and layers"), "{error}");
    let (weights, metadata) = without.export().unwrap();
    assert!(!policy_observes_layers(&metadata).unwrap());
    assert_eq!(metadata["meristem_policy"], "2");
    let error = ppo(Learning::Off).import(&weights, &metadata).unwrap_err().to_string();
    assert!(error.contains("a policy for any number of slots, this run"), "{error}");
    // It takes no part in the growth of layers.
    let mut all = envs(wider());
    let actions: Vec<Action> = (0..STEPS).flat_map(|_| step(&mut without, &mut all)).collect();
    assert!(actions.iter().all(|action| action.op() != ActionOp::Widen));
}

#[test]
fn hosts_with_more_layers_than_places_are_refused() {
    let mut it = ppo(Learning::Off);
    let mut all = envs(wider());
    let wide = host("mlp:4,4,4,4,4,4,4", quick());
    let slots = wide.spec().slots()[..SLOTS].to_vec();
    let (spec, image) = (wide.spec().clone(), *wide.image());
    all[0].host = Host::new(spec, image, &slots, wide.blueprints().clone(), quick()).unwrap();
    let views: Vec<_> = all.iter().map(FakeEnv::view).collect();
    let error = it.decide_all(&views).unwrap_err().to_string();
    assert!(error.contains("at most 4 layers"), "{error}");
}
