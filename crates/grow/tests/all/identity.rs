//! Modules in a network on a device: the identity at birth, bit for bit; a change after one step;
//! no effect on the host in Training.

use std::sync::Arc;

use meristem_device::{Device, DeviceId, DeviceOptions, MemoryFormat, Owner, Stream, Tensor};
use meristem_grow::{BlueprintSet, Host, HostSpec, Optimisers, Stage, Style, TaskShape};
use meristem_nn::{Isa, Metrics, Network, NetworkOptions, StateDict};

use crate::common::{aside, germination, grow_to};

const IMAGE: TaskShape = TaskShape { channels: 3, height: 9, width: 6, classes: 5 };
const BATCH: usize = 5;
const SLOTS: [&str; 3] = ["r0c0", "r1c0", "r1c1"];

fn host() -> Host {
    crate::common::host("cnn:channels=8,blocks=2,pools=1", IMAGE, aside())
}

fn stream() -> Stream {
    let options = DeviceOptions { threads: 2, ..DeviceOptions::default() };
    Device::open(DeviceId::Cpu(0), &options).unwrap().stream("env 0")
}

/// Batch `step`, the same for every network.
fn batch(stream: &Stream, step: u64) -> (Tensor, Tensor) {
    let TaskShape { channels, height, width, classes } = IMAGE;
    let numel = BATCH * channels * height * width;
    let mut state = 0x9E37_79B9_7F4A_7C15 ^ (step << 32);
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 40
    };
    let pixels: Vec<f32> = (0..numel).map(|_| random() as f32 / (1 << 23) as f32 - 1.0).collect();
    let labels: Vec<u32> = (0..BATCH).map(|_| (random() % classes as u64) as u32).collect();
    let shape = [BATCH, channels, height, width];
    let format = MemoryFormat::ChannelsLast;
    let dtype = meristem_device::DType::F32;
    let inputs = Tensor::empty_with_format(stream, shape, dtype, format, Owner::Batches).unwrap();
    inputs.copy_from_slice(&pixels).unwrap();
    (inputs, Tensor::from_slice(stream, &labels, [BATCH], Owner::Batches).unwrap())
}

struct Net {
    network: Network,
    stream: Stream,
    steps: u64,
}

impl Net {
    /// A network of this host; all hosts share the weights of the bare host.
    fn new(host: &Host, isa: Isa) -> Self {
        let stream = stream();
        let graph = Arc::new(host.graph(&Optimisers::default()).unwrap());
        let options = NetworkOptions::new(7, 0, isa, BATCH);
        let mut network = Network::new(&stream, graph, options).unwrap();
        network.set_alphas(&[host.alphas()]).unwrap();
        Self { network, stream, steps: 0 }
    }

    fn train(&mut self) {
        let (inputs, targets) = batch(&self.stream, self.steps);
        self.network.train_step(&inputs, &targets).unwrap();
        self.steps += 1;
    }

    fn logits(&mut self) -> Vec<u32> {
        let (inputs, _) = batch(&self.stream, 1000);
        let logits = self.network.infer(&inputs, 0).unwrap().to_vec::<f32>().unwrap();
        assert!(logits.iter().all(|v| v.is_finite()));
        logits.iter().map(|v| v.to_bits()).collect()
    }

    fn state(&self) -> StateDict {
        self.network.state_dict().unwrap()
    }

    /// A network of another host with this network's weights.
    fn with(&self, host: &Host) -> Self {
        let mut other = Self::new(host, self.network.options().isa);
        other.network.load_state_dict(&self.state(), false).unwrap();
        other
    }
}

/// Tensors as bits, by name.
type Bits = Vec<(String, Vec<u32>)>;

/// Bits of every tensor of the host.
fn host_bits(state: &StateDict) -> Bits {
    let of_host = |(name, _): &(&str, _)| !name.starts_with("slots.");
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect();
    state
        .iter()
        .filter(of_host)
        .filter_map(|(name, tensor)| Some((name.to_string(), bits(tensor.as_f32()?))))
        .collect()
}

/// A host of images with the standard blueprints, and one of vectors with those for vectors; each
/// with some of its slots.
fn families() -> [(Host, Vec<&'static str>); 2] {
    let spec: HostSpec = "mlp:8,24".parse().unwrap();
    let (slots, set) = (spec.slots().to_vec(), Arc::new(BlueprintSet::vectors()));
    let vectors = Host::new(spec, IMAGE, &slots, set, aside()).unwrap();
    [(host(), SLOTS.to_vec()), (vectors, vec!["h0", "h1"])]
}

/// Hosts with each blueprint, in each slot and style, after their bare hosts.
fn each(stage: Stage, mut check: impl FnMut(&str, &Host, Host)) {
    for (bare, slots) in families() {
        for (index, blueprint) in bare.blueprints().iter().enumerate() {
            for (i, slot) in slots.iter().enumerate() {
                // One style per pair of slot and blueprint, in turn.
                let style = Style::ALL[(index + i) % Style::ALL.len()];
                let mut host = bare.clone();
                grow_to(&mut host, slot, index, style, stage);
                check(&format!("{} in {slot}, {style}", blueprint.name), &bare, host);
            }
        }
    }
}

#[test]
fn every_blueprint_is_the_identity_at_birth_bit_for_bit() {
    for isa in Isa::available() {
        each(Stage::Fossilized, |context, bare, host| {
            let bare = Net::new(bare, isa).logits();
            assert_eq!(host.alphas().iter().sum::<f32>(), 1.0, "{context}: fully on");
            assert_eq!(Net::new(&host, isa).logits(), bare, "{context} ({isa})");
        });
    }
}

#[test]
fn every_blueprint_changes_the_output_after_one_step() {
    for isa in Isa::available() {
        each(Stage::Training, |context, bare, training| {
            let mut net = Net::new(&training, isa);
            net.train();
            // The same weights with the module fully on, and without it.
            let mut on = training.clone();
            let index = on.slots().iter().position(|slot| slot.module.is_some()).unwrap();
            (0..10).for_each(|_| drop(on.step()));
            assert!(on.advance(index, &crate::common::fine()).unwrap().change.is_some());
            (0..3).for_each(|_| drop(on.step()));
            assert_eq!(on.alphas()[index], 1.0);
            let (with, without) = (net.with(&on).logits(), net.with(bare).logits());
            assert_ne!(with, without, "{context} ({isa}) does not change the output");
        });
    }
}

/// Four steps. Returns the losses before each update, the final logits and the host's weights.
fn trained(net: &mut Net) -> (Vec<f64>, Vec<u32>, Bits) {
    (0..4).for_each(|_| net.train());
    let metrics = Metrics::parse(&net.network.metrics().to_vec().unwrap());
    let learns =
        |group: &meristem_nn::GroupMetrics| group.mean_norm().is_some_and(|norm| norm > 0.0);
    assert!(metrics.groups.iter().all(learns), "host and module have gradients");
    (metrics.batch_losses, net.logits(), host_bits(&net.state()))
}

#[test]
fn a_module_in_training_does_not_change_the_host() {
    for isa in Isa::available() {
        each(Stage::Training, |context, bare, host| {
            let mut bare = Net::new(bare, isa);
            let before = bare.logits();
            let bare = trained(&mut bare);
            let mut net = Net::new(&host, isa);
            assert_eq!(net.logits(), before, "{context} ({isa})");
            assert_eq!(trained(&mut net), bare, "{context} ({isa})");
        });
    }
}

#[test]
fn alpha_zero_switches_a_trained_module_off_bit_for_bit() {
    each(Stage::Blending, |context, bare, mut host| {
        while !host.slots().iter().all(|s| s.module.as_ref().is_none_or(|m| m.alpha.is_at_rest())) {
            host.step();
        }
        let isa = Isa::detect();
        let mut net = Net::new(&host, isa);
        (0..4).for_each(|_| net.train());
        let mut bare = net.with(bare);
        assert_ne!(net.logits(), bare.logits(), "{context}: the module has not changed");
        net.network.set_alphas(&[vec![0.0; host.slots().len()]]).unwrap();
        assert_eq!(net.logits(), bare.logits(), "{context}");
    });
}

#[test]
fn only_a_fossilized_module_passes_gradient_to_its_input() {
    let grown = |stage| {
        let mut host = host();
        grow_to(&mut host, "r1c1", 5, Style::LinearAdd, stage);
        (0..8).for_each(|_| drop(host.step()));
        host
    };
    let (blending, fossilized) = (grown(Stage::Blending), grown(Stage::Fossilized));
    assert_eq!(blending.alphas(), fossilized.alphas());
    // A trained module, whose gradient with respect to its input is not zero.
    let mut source = Net::new(&blending, Isa::detect());
    (0..3).for_each(|_| source.train());
    let [mut a, mut b] = [source.with(&blending), source.with(&fossilized)];
    assert_eq!(a.logits(), b.logits(), "the outputs are equal");
    a.train();
    b.train();
    let conv = "blocks.0.conv.weight";
    assert_ne!(a.state().get(conv), b.state().get(conv));
    // The gradients of the module itself are equal.
    let module = "slots.r1c1.layers.0.weight";
    assert!(a.state().get(module).is_some() && a.state().get(module) != source.state().get(module));
    assert_eq!(a.state().get(module), b.state().get(module));
}

#[test]
fn growth_keeps_weights_and_alpha_keeps_the_graph() {
    let spec: HostSpec = "cnn:channels=8,blocks=2,pools=1".parse().unwrap();
    let set = Arc::new(BlueprintSet::standard());
    let slots = spec.slots().to_vec();
    let mut host = Host::new(spec, IMAGE, &slots, set, aside()).unwrap();
    let mut net = Net::new(&host, Isa::detect());
    net.train();
    let bare = net.state();
    host.germinate(0, germination(4, Style::LinearGate)).unwrap();
    host.step();
    assert!(host.advance(0, &crate::common::fine()).unwrap().change.is_some());
    net.network.set_graph(Arc::new(host.graph(&Optimisers::default()).unwrap())).unwrap();
    assert_eq!(host_bits(&net.state()), host_bits(&bare));
    assert_eq!(net.network.graph().groups[1].optimiser, Optimisers::default().module);
    net.train();
    let trained = net.state();
    (0..10).for_each(|_| drop(host.step()));
    assert!(host.advance(0, &crate::common::fine()).unwrap().change.is_some());
    net.network.set_graph(Arc::new(host.graph(&Optimisers::default()).unwrap())).unwrap();
    let blending = net.state();
    for (name, tensor) in trained.iter() {
        assert_eq!(blending.get(name), Some(tensor), "{name}");
    }
    assert_eq!(blending.len(), trained.len() + 4, "the gate is new");
    net.network.load_state_dict(&blending, true).unwrap();
}
