//! Configurations against the list of `docs/growth.md`, contributions and Shapley values against
//! slow direct formulas, and one pass over all configurations against one pass per configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use meristem_device::random::{Purpose, Rng};
use meristem_device::{DType, Device, DeviceId, DeviceOptions, MemoryFormat, Owner, Tensor};
use meristem_grow::{
    Configuration, Contribution, Counterfactual, Host, ModuleScope, Optimisers, PERMUTATIONS,
    Rules, Slot, Stage, Style, TaskShape,
};
use meristem_nn::{EvalMetrics, HostTensor, Isa, Metrics, Network, NetworkOptions, Score};
use proptest::prelude::*;

use crate::common::{CIFAR, aside, germination, grow_to};

fn rules() -> Rules {
    Rules { max_modules: 12, ..aside() }
}

/// A host with `modules` modules in Holding, in slot order.
fn holding(modules: usize) -> Host {
    let mut host = crate::common::host("deep", CIFAR, rules());
    let slots: Vec<Slot> = host.slots()[..modules].to_vec();
    for slot in slots {
        grow_to(&mut host, slot.name.as_str(), 0, Style::LinearAdd, Stage::Holding);
    }
    host
}

fn random(step: u64) -> Rng {
    Rng::new(1, Purpose::Test, 0, step)
}

/// Slots that are on in the row of a configuration.
fn on(of: &Counterfactual, configuration: Configuration) -> Vec<usize> {
    of.on(of.row_of(configuration).unwrap()).collect()
}

#[test]
fn configurations_of_a_step_match_the_specification() {
    use Configuration::*;
    // Modules, configurations, rows.
    let counts = [(0, 1, 1), (1, 4, 2), (2, 7, 4), (3, 12, 8), (4, 17, 16), (5, 13, 12)];
    for (modules, configurations, rows) in counts {
        let host = holding(modules);
        let of = Counterfactual::for_step(&host);
        assert_eq!(
            (of.configurations().len(), of.rows().len()),
            (configurations, rows),
            "{modules}"
        );
        assert_eq!(of.configurations()[0], (Main, 0));
        assert_eq!(of.rows()[0], host.alphas());
        let distinct: BTreeSet<Vec<u32>> =
            of.rows().iter().map(|row| row.iter().map(|a| a.to_bits()).collect()).collect();
        assert_eq!(distinct.len(), rows, "rows are distinct");
        assert!(rows <= Counterfactual::rows_max(host.slots().len()));
    }
    let of = Counterfactual::for_step(&holding(3));
    let sets = [
        (Main, vec![0, 1, 2]),
        (SoloOff(1), vec![0, 2]),
        (SoloOn(1), vec![1]),
        (Pair(0, 2), vec![0, 2]),
        (AllOff, vec![]),
        (Committed, vec![]),
    ];
    for (configuration, slots) in sets {
        assert_eq!(on(&of, configuration), slots, "{configuration:?}");
    }
    for (row, alphas) in of.rows().iter().enumerate() {
        let expected: Vec<usize> = (0..3).filter(|slot| alphas[*slot] > 0.0).collect();
        assert_eq!(of.on(row).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn the_last_step_adds_orders_beyond_four_modules() {
    for modules in 0..=4 {
        let host = holding(modules);
        let last = Counterfactual::for_last_step(&host, &mut random(0));
        assert_eq!(last, Counterfactual::for_step(&host));
        assert_eq!(last.rows().len(), 1 << modules, "all subsets");
    }
    for modules in [5, 8, 10] {
        let host = holding(modules);
        let of = Counterfactual::for_last_step(&host, &mut random(0));
        assert_eq!(
            of,
            Counterfactual::for_last_step(&host, &mut random(0)),
            "the same key gives the same orders"
        );
        assert_ne!(of, Counterfactual::for_last_step(&host, &mut random(1)));
        let prefixes =
            of.configurations().iter().filter(|(c, _)| matches!(c, Configuration::Prefix { .. }));
        assert_eq!(prefixes.count(), PERMUTATIONS * (modules - 1));
        assert!(of.rows().len() <= Counterfactual::rows_max(modules));
        // The prefixes of an order grow by one module; every second order reverses the one before
        // it.
        let prefix = |permutation, modules| on(&of, Configuration::Prefix { permutation, modules });
        for permutation in 0..PERMUTATIONS {
            let sizes: Vec<usize> = (1..modules).map(|m| prefix(permutation, m).len()).collect();
            assert_eq!(sizes, (1..modules).collect::<Vec<_>>());
            let rest: Vec<usize> =
                (0..modules).filter(|m| !prefix(permutation ^ 1, 2).contains(m)).collect();
            assert_eq!(prefix(permutation, modules - 2), rest);
        }
    }
}

#[test]
fn only_live_blended_modules_are_switched() {
    let mut host = crate::common::host("baseline", CIFAR, rules());
    grow_to(&mut host, "r0c0", 0, Style::LinearAdd, Stage::Fossilized);
    grow_to(&mut host, "r0c1", 1, Style::LinearAdd, Stage::Holding);
    grow_to(&mut host, "r1c0", 1, Style::LinearAdd, Stage::Blending);
    let blending = host.index_of("r1c0").unwrap();
    // Alpha is still 0: switching the module off would change nothing.
    assert_eq!(Counterfactual::for_step(&host).modules(), [1]);
    host.step();
    host.germinate(2, germination(0, Style::LinearAdd)).unwrap();
    let live = Counterfactual::leave_one_out(&host, ModuleScope::Live);
    let (main, off) = (Configuration::Main, Configuration::SoloOff);
    assert_eq!(live.configurations(), [(main, 0), (off(1), 1), (off(blending), 2)]);
    let third = 1.0 / 3.0;
    assert_eq!(live.rows()[0], [1.0, 1.0, 0.0, third, 0.0, 0.0]);
    assert_eq!(live.rows()[1], [1.0, 0.0, 0.0, third, 0.0, 0.0]);
    assert_eq!(live.rows()[2], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    let row = |correct, samples| EvalMetrics { correct, samples, ..EvalMetrics::default() };
    let worth = |rows: &[EvalMetrics]| {
        let worth = |found: Contribution| (found.slot, found.score_without, found.score_pp);
        live.contributions(rows, Score::Accuracy).into_iter().map(worth).collect::<Vec<_>>()
    };
    let [all, first_off, second_off] = [32, 20, 48].map(|correct| row(correct, 64));
    assert_eq!(worth(&[all, first_off, second_off]), [(1, 0.3125, 18.75), (3, 0.75, -25.0)]);
    assert_eq!(worth(&[all, row(0, 0), second_off]), [(3, 0.75, -25.0)]);
    assert_eq!(worth(&[]), []);
    // The committed host keeps the fossilized module; so does the configuration with all live
    // modules off.
    let step = Counterfactual::for_step(&host);
    let committed = step.row_of(Configuration::Committed).unwrap();
    assert_eq!(step.rows()[committed], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(live.row_of(Configuration::Committed), None);
    let all = Counterfactual::leave_one_out(&host, ModuleScope::All);
    assert_eq!(all.configurations()[1].0, Configuration::SoloOff(0));
    assert_eq!(all.rows()[1][0], 0.0);
}

/// An arbitrary score for each set of slots that are on.
fn game(of: &Counterfactual, scores: &[f64]) -> BTreeMap<Vec<usize>, f64> {
    (0..of.rows().len()).map(|row| (of.on(row).collect(), scores[row])).collect()
}

fn orders(items: &[usize]) -> Vec<Vec<usize>> {
    let Some((first, rest)) = items.split_first() else { return vec![vec![]] };
    let mut all = vec![];
    for order in orders(rest) {
        for at in 0..=order.len() {
            let mut order = order.clone();
            order.insert(at, *first);
            all.push(order);
        }
    }
    all
}

/// Mean gain of each slot when it is switched on, over these orders.
fn added(game: &BTreeMap<Vec<usize>, f64>, orders: &[Vec<usize>]) -> BTreeMap<usize, f64> {
    let mut added = BTreeMap::new();
    for order in orders {
        let mut on: Vec<usize> = vec![];
        for &slot in order {
            let before = game[&on];
            on.push(slot);
            on.sort_unstable();
            *added.entry(slot).or_insert(0.0) += (game[&on] - before) / orders.len() as f64;
        }
    }
    added
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Sums of at most 24 differences of f64 numbers up to 100: rounding errors below 1e-12.
    #[test]
    fn shapley_values_and_interactions_match_their_definitions(
        modules in 1usize..=4,
        scores in proptest::collection::vec(0.0f64..100.0, 16),
    ) {
        let of = Counterfactual::for_step(&holding(modules));
        let game = game(&of, &scores);
        let shapley = of.shapley_pp(&scores);
        let slots: Vec<usize> = (0..modules).collect();
        for (slot, expected) in added(&game, &orders(&slots)) {
            prop_assert!((shapley[slot].unwrap() - expected).abs() < 1e-11);
        }
        prop_assert!(shapley[modules..].iter().all(Option::is_none));
        let interactions = of.interactions_pp(&scores);
        prop_assert_eq!(interactions.len(), modules * (modules - 1) / 2);
        let mut sums = vec![0.0; modules];
        for interaction in interactions {
            let [i, j] = interaction.slots;
            let expected = game[&vec![i, j]] - game[&vec![i]] - game[&vec![j]] + game[&vec![]];
            prop_assert!((interaction.pp - expected).abs() < 1e-11);
            sums[i] += expected;
            sums[j] += expected;
        }
        let got = of.interaction_sums_pp(&scores);
        for (slot, sum) in sums.into_iter().enumerate().filter(|_| modules > 1) {
            prop_assert!((f64::from(got[slot].unwrap()) - sum).abs() < 1e-4, "f32 of at most 1200");
        }
    }

    #[test]
    fn shapley_values_sum_to_all_minus_none(
        modules in 1usize..=8,
        scores in proptest::collection::vec(0.0f64..100.0, 128),
    ) {
        let of = Counterfactual::for_last_step(&holding(modules), &mut random(7));
        let game = game(&of, &scores);
        let all: Vec<usize> = (0..modules).collect();
        let sum: f64 = of.shapley_pp(&scores).into_iter().flatten().sum();
        prop_assert!((sum - (game[&all] - game[&vec![]])).abs() < 1e-10);
        // A missing score, or one that is not finite, gives no values.
        let mut damaged = scores.clone();
        damaged[of.rows().len() - 1] = f64::NAN;
        prop_assert!(of.shapley_pp(&damaged).iter().all(Option::is_none));
        prop_assert!(of.shapley_pp(&scores[..of.rows().len() - 1]).iter().all(Option::is_none));
    }
}

#[test]
fn additive_modules_have_no_interaction() {
    let worth = [1.5, -0.25, 3.0, 0.5, 2.0, 7.0];
    for modules in [3, 6] {
        let of = Counterfactual::for_last_step(&holding(modules), &mut random(3));
        let score = |row: usize| 50.0 + of.on(row).map(|slot| worth[slot]).sum::<f64>();
        let scores: Vec<f64> = (0..of.rows().len()).map(score).collect();
        assert!(of.interactions_pp(&scores).iter().all(|i| i.pp.abs() < 1e-12));
        for (slot, value) in of.shapley_pp(&scores).into_iter().take(modules).enumerate() {
            assert!((value.unwrap() - worth[slot]).abs() < 1e-12);
        }
    }
}

const IMAGE: TaskShape = TaskShape { channels: 3, height: 12, width: 9, classes: 5 };

/// A host with slots in the branches of residual layers, after a strided convolution.
const BRANCHES: &str = r#"{"layers": [
    {"conv2d": {"out": 4, "kernel": 3, "stride": 2}}, "batch_norm", {"slot": {"name": "a"}},
    {"residual": {"body": [{"conv2d": {"out": 6, "kernel": 3}}, {"slot": {"name": "b"}}, "relu"],
                  "shortcut": [{"conv2d": {"out": 6, "kernel": 1}}, {"slot": {"name": "c"}}]}},
    {"branches": {"join": "add", "branches": [[], [{"slot": {"name": "d"}}]]}},
    {"slot": {"name": "e"}}, "global_avg_pool", {"linear": {"out": "classes"}}]}"#;

/// A host with a module in every slot, and arbitrary alphas.
#[derive(Clone, Debug)]
struct Grown {
    spec: &'static str,
    /// Per slot: blueprint, style, stage (Training only for the last), and steps of alpha
    /// afterwards.
    slots: Vec<(usize, usize, Stage)>,
    steps: usize,
    scope: ModuleScope,
}

fn grown() -> impl Strategy<Value = Grown> {
    let specs =
        ["cnn:channels=4,blocks=2,pools=1", "cnn:channels=4,blocks=3,pools=2", "minimal", BRANCHES];
    let stages =
        [Stage::Dormant, Stage::Blending, Stage::Holding, Stage::Holding, Stage::Fossilized];
    let slot = (0usize..7, 0usize..4, prop::sample::select(stages.to_vec()));
    let slots = proptest::collection::vec(slot, 6);
    let scope = prop::sample::select(vec![ModuleScope::Live, ModuleScope::All]);
    (prop::sample::select(specs.to_vec()), slots, 0usize..3, scope)
        .prop_map(|(spec, slots, steps, scope)| Grown { spec, slots, steps, scope })
}

fn build(grown: &Grown) -> Host {
    let mut host = crate::common::host(grown.spec, IMAGE, rules());
    let slots = host.slots().to_vec();
    for (slot, &(blueprint, style, stage)) in slots.iter().zip(&grown.slots) {
        if stage != Stage::Dormant {
            grow_to(&mut host, slot.name.as_str(), blueprint, Style::ALL[style], stage);
        }
    }
    // If there is room, one more module in Training, which is in no configuration.
    if let Some(free) = host.slots().iter().position(|slot| slot.module.is_none()) {
        host.germinate(free, germination(5, Style::LinearAdd)).unwrap();
        host.advance(free, &crate::common::fine()).unwrap();
    }
    (0..grown.steps).for_each(|_| drop(host.step()));
    host
}

fn network(host: &Host, isa: Isa, configs: usize) -> Network {
    let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
    let stream = Device::open(DeviceId::Cpu(0), &options).unwrap().stream("env 0");
    let options = NetworkOptions { configs, ..NetworkOptions::new(7, 0, isa, 6) };
    let mut network =
        Network::new(&stream, Arc::new(host.graph(&Optimisers::default()).unwrap()), options)
            .unwrap();
    // Random weights, because every module is the identity at birth.
    let mut random = random(9);
    let mut state = network.state_dict().unwrap();
    let names: Vec<String> = state.iter().map(|(name, _)| name.to_owned()).collect();
    for name in names.iter().filter(|name| name.starts_with("slots.")) {
        let shape = state.get(name).unwrap().shape.clone();
        let len = shape.iter().product::<usize>();
        let values = (0..len).map(|_| 2.0 * random.uniform() - 1.0).collect();
        state.insert(&**name, HostTensor::f32(&shape, values));
    }
    network.load_state_dict(&state, true).unwrap();
    network
}

fn batch(network: &Network, n: usize) -> (Tensor, Tensor) {
    let (stream, TaskShape { channels, height, width, classes }) = (network.stream(), IMAGE);
    let mut random = random(n as u64);
    let pixels: Vec<f32> =
        (0..n * channels * height * width).map(|_| 2.0 * random.uniform() - 1.0).collect();
    let labels: Vec<u32> = (0..n).map(|_| random.below(classes as u32)).collect();
    let (shape, format) = ([n, channels, height, width], MemoryFormat::ChannelsLast);
    let inputs =
        Tensor::empty_with_format(stream, shape, DType::F32, format, Owner::Batches).unwrap();
    inputs.copy_from_slice(&pixels).unwrap();
    (inputs, Tensor::from_slice(stream, &labels, [n], Owner::Batches).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// C2, over hosts, slots, blueprints, stages, alphas and styles, on every instruction set.
    /// Kernels and inputs are the same, so the losses agree in every bit.
    #[test]
    fn one_pass_equals_separate_passes_bit_for_bit(grown in grown()) {
        let host = build(&grown);
        let of = match grown.scope {
            ModuleScope::Live => Counterfactual::for_last_step(&host, &mut random(2)),
            ModuleScope::All => Counterfactual::leave_one_out(&host, ModuleScope::All),
        };
        let rows = of.rows().len();
        for isa in Isa::available() {
            let mut network = network(&host, isa, rows);
            network.set_alphas(of.rows()).unwrap();
            let batches = [6, 5].map(|n| batch(&network, n));
            let mut evaluated = vec![];
            for fused in [true, false] {
                for (x, y) in &batches {
                    if fused {
                        network.eval_rows(x, y, 0..rows).unwrap();
                    } else {
                        (0..rows).for_each(|row| network.eval_step(x, y, row).unwrap());
                    }
                }
                let metrics = Metrics::parse(&network.metrics().to_vec().unwrap());
                network.reset_metrics().unwrap();
                let bits =
                    metrics.eval.iter().map(|m| (m.loss_sum.to_bits(), m.correct, m.samples));
                evaluated.push(bits.collect::<Vec<_>>());
            }
            prop_assert_eq!(&evaluated[0], &evaluated[1], "{}", isa);
            let sound = |row: &(u64, u64, u64)| f64::from_bits(row.0).is_finite() && row.2 == 11;
            prop_assert!(evaluated[0].iter().all(sound));
            let (together, one) = network.eval_flops(0..rows).unwrap();
            prop_assert!(together <= rows as u64 * one, "{} {}", together, one);
        }
    }
}
