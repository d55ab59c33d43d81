//! Twenty steps of each optimiser from given gradients, against PyTorch (Lion: the published
//! program). Some parameters are new after ten steps, in a group that others have been in from the
//! beginning: PyTorch counts the steps of each parameter.
//!
//! Tolerance of a tensor: `torch_error`, the distance of PyTorch's f32 result from f64, measures
//! how much the same roundings in another order may matter: four times that, because it is one
//! sample. Where it is small by chance: 32 ulps (2^-23) of the tensor's largest value, one and a
//! half for each step of a parameter or an average.

use std::sync::Arc;

use meristem_device::{Device, DeviceId, DeviceOptions, Stream};
use meristem_nn::graph::{
    AdamConfig, ConvGeometry, Dims, Graph, GraphBuilder, LionConfig, MuonConfig, Optimiser,
    ParamSpec, SgdConfig,
};
use meristem_nn::kernels::optim::{AdamStep, adam_step};
use meristem_nn::layout::packing;
use meristem_nn::{
    HostData, HostTensor, Isa, LabelledBatch, Network, NetworkFleet, NetworkOptions, Plans,
    Snapshot, StateDict,
};
use serde_json::Value;

use crate::common::golden::{self, File, Golden};
use crate::common::{Random, host};

const DIMS: Dims = Dims { c: 3, h: 4, w: 4 };

fn optimiser(case: &Value) -> Optimiser {
    let number = |key: &str| case[key].as_f64().unwrap_or(0.0);
    let [lr, momentum, weight_decay, eps, adam_lr] =
        ["lr", "momentum", "weight_decay", "eps", "adam_lr"].map(|key| number(key) as f32);
    let betas = [number("beta1"), number("beta2")];
    let clip_norm = f32::MAX;
    let adam = AdamConfig { lr, betas, eps, weight_decay, clip_norm };
    match case["op"].as_str().unwrap() {
        "nesterov" => Optimiser::Nesterov(SgdConfig { lr, momentum, weight_decay, clip_norm }),
        "adam" => Optimiser::Adam(adam),
        "adamw" => Optimiser::AdamW(adam),
        "lion" => LionConfig { lr, betas, weight_decay, clip_norm }.into(),
        _ => MuonConfig { lr, momentum, others: AdamConfig { lr: adam_lr, ..adam } }.into(),
    }
}

/// All kinds of matrices: wide and tall ones, and kernels with groups. `late` parameters come when
/// the network is `grown`.
fn graph(optimiser: Optimiser, grown: bool) -> Arc<Graph> {
    let mut b = GraphBuilder::new(DIMS, optimiser);
    let mut x = b.conv2d(b.input(), "conv", 4, ConvGeometry::same(3), false).unwrap();
    if grown {
        x = b.conv2d(x, "late", 4, ConvGeometry::same(1), true).unwrap();
    }
    x = b.conv2d(x, "depthwise", 4, ConvGeometry::same(3).groups(4), false).unwrap();
    x = b.conv2d(x, "grouped", 6, ConvGeometry::new([1, 3]).groups(2), false).unwrap();
    x = b.global_avg_pool(x);
    x = b.linear(x, "tall", 10, true, None).unwrap();
    x = b.linear(x, "out", 3, true, None).unwrap();
    Arc::new(b.finish(x).unwrap())
}

/// Parameters and state of the optimiser after all steps.
fn trained(stream: &Stream, isa: Isa, file: &File, case: &Value) -> [StateDict; 2] {
    let inputs = file.tensors("nesterov", "in");
    let [steps, born] = ["steps", "born"].map(|key| case[key].as_u64().unwrap() as usize);
    let of = |grown| graph(optimiser(case), grown);
    let mut network = Network::new(stream, of(false), NetworkOptions::new(1, 0, isa, 2)).unwrap();
    let mut given = StateDict::default();
    for (name, Golden { shape, values }) in &inputs {
        given.insert(name, HostTensor::f32(shape, values.clone()));
    }
    network.load_state_dict(&given, false).unwrap();
    for step in 0..steps {
        if step == born {
            network.set_graph(of(true)).unwrap();
            let mut late = given.clone();
            late.0.retain(|name, _| name.starts_with("late"));
            network.load_state_dict(&late, false).unwrap();
        }
        network.differentiate_nothing().unwrap();
        let graph = Arc::clone(network.graph());
        for (name, gradient) in network.gradients().unwrap() {
            let all = &inputs[&format!("{name}.gradients")].values;
            let param = graph.params.iter().find(|param| param.name == name).unwrap();
            let len = param.shape.iter().product::<usize>();
            let mut packed = vec![0.0; packing(param).len()];
            packing(param).pack(&all[step * len..(step + 1) * len], &mut packed);
            gradient.copy_from_slice(&packed).unwrap();
        }
        network.apply().unwrap();
    }
    [network.state_dict().unwrap(), network.momentum_dict().unwrap()]
}

fn values(tensor: &HostTensor) -> Vec<f32> {
    match &tensor.data {
        HostData::F32(values) => values.clone(),
        HostData::I64(values) => values.iter().map(|v| *v as f32).collect(),
        HostData::U8(_) => unreachable!("no state is u8"),
    }
}

fn check(stream: &Stream, isa: Isa, file: &File, case: &Value) {
    let name = case["case"].as_str().unwrap();
    let [state, moments] = trained(stream, isa, file, case);
    let expected = file.tensors(name, "out");
    assert_eq!(state.0.len() + moments.0.len(), expected.len(), "{name}: {moments:?}");
    for (key, Golden { values: expected, .. }) in &expected {
        let got = match key.strip_prefix("state.") {
            Some(of_state) => moments.get(of_state),
            None => state.get(key),
        };
        let got = values(got.unwrap_or_else(|| panic!("{name} has no {key}")));
        let torch = case["torch_error"][format!("out.{key}")].as_f64().unwrap();
        let largest = expected.iter().fold(0f64, |m, v| m.max(f64::from(*v).abs()));
        let limit = 4.0 * torch + 32.0 * f64::from(f32::EPSILON) * largest;
        assert_eq!(got.len(), expected.len(), "{name} {key}");
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let apart = (f64::from(*got) - f64::from(*expected)).abs();
            let what = format!("{name} ({isa}) {key}[{i}]");
            assert!(apart <= limit, "{what}: {got}, PyTorch {expected}, {apart:.2e} > {limit:.2e}");
        }
    }
}

/// Every case on a stream's device.
pub(crate) fn check_all(stream: &Stream, isa: Isa) {
    let file = golden::read("optimisers");
    let cases = file.cases();
    assert_eq!(cases.len(), 5);
    cases.iter().for_each(|case| check(stream, isa, &file, case));
}

/// Training of envs with other optimisers and parameters of several ages: in one fleet, each alone,
/// and in two halves, with the same bits.
pub(crate) fn check_fleet(device: &Device) {
    let cases = golden::read("optimisers").cases();
    let plans = Plans::default();
    let networks = |name: &str| -> Vec<Network> {
        let network = |case: &Value| {
            let stream = device.stream(&format!("{name} {}", case["case"]));
            let options = NetworkOptions::new(1, 0, Isa::detect(), 4);
            Network::with_plans(&stream, graph(optimiser(case), false), options, &plans).unwrap()
        };
        cases.iter().map(network).collect()
    };
    let [mut fleet, mut alone, mut halves] = ["fleet", "alone", "halves"].map(networks);
    for step in 0..4u64 {
        let batch = |network: &Network| {
            let mut random = Random(step + 1);
            let (x, y) = (random.normals(4 * DIMS.numel()), [0, 1, 2, step as u32 % 3]);
            let stream = network.stream();
            (host::images(stream, &x, DIMS), host::labels(stream, &y))
        };
        for networks in [&mut fleet, &mut alone, &mut halves] {
            for (network, case) in networks.iter_mut().zip(&cases) {
                network.set_graph(graph(optimiser(case), step >= 2)).unwrap();
            }
        }
        let batches: Vec<_> = fleet.iter().map(batch).collect();
        let batches: Vec<LabelledBatch<'_>> = batches.iter().map(|(x, y)| (x, y)).collect();
        NetworkFleet::new(&mut fleet).train_step(&batches).unwrap();
        for (alone, halves) in alone.iter_mut().zip(&mut halves) {
            let (x, y) = batch(alone);
            alone.train_step(&x, &y).unwrap();
            let (x, y) = batch(halves);
            halves.differentiate(&x, &y, 1.0).unwrap();
            halves.apply().unwrap();
        }
    }
    let all = |of: &Network| (of.state_dict().unwrap(), of.momentum_dict().unwrap());
    for ((fleet, alone), halves) in fleet.iter().zip(&alone).zip(&halves) {
        assert_eq!(all(fleet), all(alone), "{:?}", alone.graph().groups[0].optimiser);
        assert_eq!(all(halves), all(alone), "{:?}", alone.graph().groups[0].optimiser);
    }
}

/// Halves the learning rate of some parameters.
fn halved(optimiser: &Optimiser) -> Optimiser {
    let (mut sgd, mut adam) = (None, None);
    match *optimiser {
        Optimiser::Sgd(of) | Optimiser::Nesterov(of) => {
            sgd = Some(SgdConfig { lr: of.lr / 2.0, ..of });
        }
        Optimiser::Adam(of) | Optimiser::AdamW(of) => {
            adam = Some(AdamConfig { lr: of.lr / 2.0, ..of });
        }
        Optimiser::Lion(of) => return LionConfig { lr: of.lr / 2.0, ..of }.into(),
        Optimiser::Muon(of) => {
            let others = AdamConfig { lr: of.others.lr / 2.0, ..of.others };
            return MuonConfig { lr: of.lr / 2.0, others, ..of }.into();
        }
    }
    match (optimiser, sgd, adam) {
        (Optimiser::Sgd(_), Some(of), _) => Optimiser::Sgd(of),
        (_, Some(of), _) => Optimiser::Nesterov(of),
        (Optimiser::Adam(_), _, Some(of)) => Optimiser::Adam(of),
        (.., of) => Optimiser::AdamW(of.unwrap()),
    }
}

/// In the first step, parameters with other numbers have the bits of a network with these numbers,
/// and all others those of the network without. Both layers have such parameters, and one lies
/// between others in memory.
pub(crate) fn check_variants(stream: &Stream) {
    let is_varied = |name: &str| name.starts_with("tall") || name == "depthwise.weight";
    for case in golden::read("optimisers").cases() {
        let usual = optimiser(&case);
        let trained = |graph: Arc<Graph>| {
            let options = NetworkOptions::new(1, 0, Isa::detect(), 4);
            let mut network = Network::new(stream, graph, options).unwrap();
            let x = host::images(stream, &Random(1).normals(4 * DIMS.numel()), DIMS);
            let y = host::labels(stream, &[0, 1, 2, 0]);
            network.train_step(&x, &y).unwrap();
            [network.state_dict().unwrap(), network.momentum_dict().unwrap()]
        };
        let mut varied = (*graph(usual, true)).clone();
        let of =
            |param: &ParamSpec, of: &Optimiser| is_varied(&param.name).then(|| (7, halved(of)));
        varied.vary_optimisers(of).unwrap();
        assert_eq!(varied.groups[0].variants, [halved(&usual)]);
        let [plain, half] = [usual, halved(&usual)].map(|of| trained(graph(of, true)));
        let [state, moments] = trained(Arc::new(varied));
        for (name, tensor) in state.iter() {
            let expected = if is_varied(name) { &half[0] } else { &plain[0] };
            assert_eq!(Some(tensor), expected.get(name), "{} {name}", case["case"]);
        }
        assert_ne!(plain[0].get("tall.bias"), half[0].get("tall.bias"));
        // The state does not depend on learning rates.
        assert_eq!(moments, plain[1], "{}", case["case"]);
    }
}

#[test]
fn parameters_have_the_numbers_of_their_variants() {
    check_variants(&host::stream(1));
}

#[test]
fn optimisers_are_the_same_in_fleets_and_in_halves() {
    let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap();
    check_fleet(&device);
}

/// After a roll-back the optimisers begin again, with parameters from the snapshot.
#[test]
fn a_snapshot_restores_parameters_and_empties_the_optimiser() {
    let stream = host::stream(1);
    for case in golden::read("optimisers").cases() {
        let options = NetworkOptions::new(1, 0, Isa::detect(), 4);
        let grown = graph(optimiser(&case), true);
        let mut network = Network::new(&stream, Arc::clone(&grown), options).unwrap();
        let empty = network.momentum_dict().unwrap();
        let x = host::images(&stream, &Random(1).normals(4 * DIMS.numel()), DIMS);
        let y = host::labels(&stream, &[0, 1, 2, 0]);
        network.train_step(&x, &y).unwrap();
        let bare = graph(optimiser(&case), false);
        let (state, snapshot) = (network.state_dict().unwrap(), Snapshot::new(&network, &grown));
        network.train_step(&x, &y).unwrap();
        network.set_graph(bare).unwrap();
        network.restore(&snapshot.unwrap()).unwrap();
        assert_eq!(network.state_dict().unwrap(), state, "{}", case["case"]);
        assert_eq!(network.momentum_dict().unwrap(), empty, "{}", case["case"]);
    }
}

/// The update that follows from a count of steps of the network, for a parameter that is born at
/// step 1000, is 2.5 times as long as its learning rate ([`OptimiserKind::counts_steps`]).
#[test]
fn a_late_parameter_begins_with_steps_of_its_learning_rate() {
    let adam = |steps| {
        let adam = AdamConfig {
            lr: 1e-3,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            clip_norm: f32::MAX,
        };
        let (mut p, mut m, mut v) = ([0.0], [0.0], [0.0]);
        let step = AdamStep::new(&adam, 1.0, steps);
        adam_step(Isa::detect(), &step, &mut p, &[0.3], &mut m, &mut v);
        f64::from(p[0])
    };
    // Its own first step; then with the count of a network that is 1000 steps old, whose second
    // average is corrected by 1 − 0.999¹⁰⁰⁰ = 0.63.
    assert!((adam(1) + 1e-3).abs() < 1e-8, "{}", adam(1));
    let too_long = 0.1 / (0.001f64 / (1.0 - 0.999f64.powi(1000))).sqrt();
    assert!((adam(1000) + 1e-3 * too_long).abs() < 1e-7 && too_long > 2.5, "{}", adam(1000));
}

#[test]
fn optimisers_follow_pytorch() {
    let stream = host::stream(1);
    Isa::available().into_iter().for_each(|isa| check_all(&stream, isa));
}
