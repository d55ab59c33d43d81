//! Blueprints: parameters and weight names against `docs/growth.md`, and a user's blueprint.

use std::sync::Arc;

use meristem_grow::{
    Blueprint, BlueprintError, BlueprintLayer, BlueprintSet, Channels, Host, HostSpec, Join,
    Optimisers, Rules, Stage, Style, group_norm_groups,
};
use meristem_nn::graph::{Dims, GroupId, Init, Node, NodeOp, UnaryFunction};

use crate::common::{CIFAR, aside, grow_to, host};

const TABLE: [(&str, [usize; 4]); 7] = [
    ("norm", [17, 33, 65, 129]),
    ("attention", [40, 144, 544, 2112]),
    ("depthwise", [152, 432, 1376, 4800]),
    ("bottleneck", [720, 864, 1152, 4480]),
    ("conv_small", [80, 288, 1088, 4224]),
    ("conv_light", [592, 2336, 9280, 36992]),
    ("conv_heavy", [1184, 4672, 18560, 73984]),
];

#[test]
fn standard_blueprints_match_the_table_of_parameters() {
    let set = BlueprintSet::standard();
    assert_eq!(set.len(), TABLE.len());
    for (index, (name, counts)) in TABLE.into_iter().enumerate() {
        assert_eq!(set.find(name).unwrap(), index, "the index order matches the table");
        let blueprint = set.get(index).unwrap();
        blueprint.check().unwrap();
        for (channels, expected) in [8, 16, 32, 64].into_iter().zip(counts) {
            let slot = Dims { c: channels, h: 16, w: 16 };
            assert_eq!(blueprint.parameters(slot).unwrap(), expected, "{name} at {channels}");
        }
    }
}

#[test]
fn networks_have_the_same_parameter_counts() {
    // Blocks of 8, 16, 32 and 64 channels.
    for (index, (name, counts)) in TABLE.into_iter().enumerate() {
        for (block, expected) in counts.into_iter().enumerate() {
            let mut host = host("cnn:channels=8,blocks=4", CIFAR, Rules::default());
            let bare = host.parameters().unwrap();
            assert_eq!(bare.grown(), 0);
            let slot = &format!("r1c{block}");
            grow_to(&mut host, slot, index, Style::LinearAdd, Stage::Training);
            let grown = host.parameters().unwrap();
            assert_eq!(grown.host, bare.host, "{name}");
            assert_eq!(grown.grown(), expected, "{name} in {slot}");
            assert_eq!(grown.modules[host.index_of(slot).unwrap()], expected, "{name} in {slot}");
            assert_eq!(grown.total(), host.graph(&Optimisers::default()).unwrap().parameters(None));
        }
    }
}

#[test]
fn kernels_have_one_row_in_a_signal() {
    let set = BlueprintSet::standard();
    let signal = Dims { c: 8, h: 1, w: 40 };
    for (name, expected) in [("conv_light", 8 * 8 * 3 + 16), ("depthwise", 8 * 3 + 8 * 8 + 16)] {
        let blueprint = set.get(set.find(name).unwrap()).unwrap();
        assert_eq!(blueprint.parameters(signal).unwrap(), expected, "{name}");
        let graph = blueprint.graph(signal, Optimisers::default().module).unwrap();
        let wide = graph.nodes.iter().filter_map(|node| match node.op {
            NodeOp::Conv2d { geometry, .. } if geometry.kernel != [1, 1] => Some(geometry),
            _ => None,
        });
        for geometry in wide {
            assert_eq!((geometry.kernel, geometry.padding), ([1, 3], [0, 1]), "{name}");
        }
    }
}

#[test]
fn modules_and_gates_have_documented_tensor_names() {
    let names = |blueprint: &str, style| {
        let mut host = host("baseline", CIFAR, Rules::default());
        let index = host.blueprints().find(blueprint).unwrap();
        grow_to(&mut host, "r1c1", index, style, Stage::Blending);
        let graph = host.graph(&Optimisers::default()).unwrap();
        let of_module = |name: &&String| name.starts_with("slots.");
        graph.params.iter().map(|p| &p.name).filter(of_module).cloned().collect::<Vec<_>>()
    };
    assert_eq!(
        names("norm", Style::LinearAdd),
        ["slots.r1c1.layers.0.weight", "slots.r1c1.layers.0.bias", "slots.r1c1.mix"]
    );
    // Positions include layers without parameters.
    assert_eq!(
        names("attention", Style::SigmoidAdd),
        ["slots.r1c1.layers.1.weight", "slots.r1c1.layers.3.weight", "slots.r1c1.layers.3.bias"]
    );
    assert_eq!(
        names("conv_small", Style::LinearGate),
        [
            "slots.r1c1.layers.0.weight",
            "slots.r1c1.layers.1.weight",
            "slots.r1c1.layers.1.bias",
            "slots.r1c1.gate.0.weight",
            "slots.r1c1.gate.0.bias",
            "slots.r1c1.gate.2.weight",
            "slots.r1c1.gate.2.bias"
        ]
    );
}

#[test]
fn gates_have_the_documented_width() {
    // max(8, C/4) hidden features, both layers with a bias.
    for (block, channels, hidden) in [(0, 8, 8), (2, 32, 8), (3, 64, 16)] {
        let mut host = host("cnn:channels=8,blocks=4", CIFAR, Rules::default());
        let slot = &format!("r0c{block}");
        grow_to(&mut host, slot, 0, Style::LinearGate, Stage::Blending);
        let gate = channels * hidden + hidden + hidden + 1;
        assert_eq!(host.parameters().unwrap().grown(), 2 * channels + 1 + gate, "{channels}");
    }
}

#[test]
fn group_norm_groups_follow_the_rule() {
    // The rule in a slow form: every group count of the list, the largest first.
    let slow = |c: usize| {
        let list = [32, 16, 8, 4, 2, 1];
        for g in list {
            if c.is_multiple_of(g) && c / g >= 16 {
                return g;
            }
        }
        *list.iter().find(|g| c.is_multiple_of(**g)).unwrap()
    };
    for c in 1..=1024 {
        assert_eq!(group_norm_groups(c), slow(c), "{c}");
    }
    let known = [(1, 1), (7, 1), (8, 8), (12, 4), (16, 1), (32, 2), (64, 4), (512, 32), (1024, 32)];
    for (c, groups) in known {
        assert_eq!(group_norm_groups(c), groups, "{c}");
    }
}

fn own() -> Blueprint {
    Blueprint::new(
        "wide_dip",
        vec![
            BlueprintLayer::Conv { out: Channels::Times { by: 2 }, kernel: 5, depthwise: false },
            BlueprintLayer::Tanh,
            BlueprintLayer::Conv { out: Channels::Same, kernel: 1, depthwise: false },
            BlueprintLayer::GroupNorm { zero: true },
        ],
        Join::Residual,
    )
}

#[test]
fn a_user_blueprint_is_one_value() {
    let set = Arc::new(BlueprintSet::standard().with(own()).unwrap());
    assert_eq!(set.find("wide_dip").unwrap(), 7);
    let spec = "baseline".parse().unwrap();
    let slot = "r0c0";
    let mut host = Host::new(spec, CIFAR, &[slot.into()], set, Rules::default()).unwrap();
    grow_to(&mut host, slot, 7, Style::LinearAdd, Stage::Fossilized);
    assert_eq!(host.parameters().unwrap().grown(), 8 * 16 * 25 + 16 * 8 + 16);
}

/// A module with a function between two convolutions.
fn with_function(function: BlueprintLayer) -> Blueprint {
    let conv = BlueprintLayer::Conv { out: Channels::Same, kernel: 1, depthwise: false };
    let layers = vec![conv, function, conv, BlueprintLayer::GroupNorm { zero: true }];
    Blueprint::new("own", layers, Join::Residual)
}

#[test]
fn functions_of_one_element_are_layers() {
    let functions = [
        (r#""relu""#, BlueprintLayer::Relu, UnaryFunction::Relu),
        (r#""sigmoid""#, BlueprintLayer::Sigmoid, UnaryFunction::Sigmoid),
        (r#""tanh""#, BlueprintLayer::Tanh, UnaryFunction::Tanh),
        (
            r#"{"leaky_relu":{"slope":0.2}}"#,
            BlueprintLayer::LeakyRelu { slope: 0.2 },
            UnaryFunction::LeakyRelu { slope: 0.2 },
        ),
        (r#""elu""#, BlueprintLayer::Elu, UnaryFunction::Elu),
        (r#""gelu""#, BlueprintLayer::Gelu, UnaryFunction::Gelu),
        (r#""gelu_tanh""#, BlueprintLayer::GeluTanh, UnaryFunction::GeluTanh),
        (r#""silu""#, BlueprintLayer::Silu, UnaryFunction::Silu),
        (r#""softplus""#, BlueprintLayer::Softplus, UnaryFunction::Softplus),
        (r#""hard_swish""#, BlueprintLayer::HardSwish, UnaryFunction::HardSwish),
    ];
    let dims = Dims { c: 8, h: 4, w: 4 };
    for (text, layer, function) in functions {
        assert_eq!(serde_json::to_string(&layer).unwrap(), text);
        assert_eq!(serde_json::from_str::<BlueprintLayer>(text).unwrap(), layer);
        let own = with_function(layer);
        own.check().unwrap();
        let graph = own.graph(dims, Optimisers::default().module).unwrap();
        let of = |node: &Node| matches!(node.op, NodeOp::Activation(found, _) if found == function);
        assert_eq!(graph.nodes.iter().filter(|node| of(node)).count(), 1, "{text}");
    }
    let default: BlueprintLayer = serde_json::from_str(r#"{"leaky_relu":{}}"#).unwrap();
    assert_eq!(default, BlueprintLayer::LeakyRelu { slope: 0.01 });
}

#[test]
fn a_slope_below_zero_is_refused() {
    for slope in [-0.1, f32::NAN] {
        let error = with_function(BlueprintLayer::LeakyRelu { slope }).check().unwrap_err();
        assert!(matches!(error, BlueprintError::Shape { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("layer 1") && text.contains("at least 0"), "{text}");
    }
}

/// Dropout is a layer of its module, named after its place; it may follow the layer of zeros.
#[test]
fn dropout_is_a_layer() {
    let drop = BlueprintLayer::Dropout { p: 0.25 };
    let text = serde_json::to_string(&drop).unwrap();
    assert_eq!(text, r#"{"dropout":{"p":0.25}}"#);
    assert_eq!(serde_json::from_str::<BlueprintLayer>(&text).unwrap(), drop);
    let conv = BlueprintLayer::Conv { out: Channels::Same, kernel: 1, depthwise: false };
    let zero = BlueprintLayer::GroupNorm { zero: true };
    let own = Blueprint::new("own", vec![conv, drop, conv, zero, drop, drop], Join::Residual);
    own.check().unwrap();
    let set = BlueprintSet::standard().with(own).unwrap();
    let spec = r#"{"layers": [{"conv2d": {"out": 8, "kernel": 3}}, {"slot": {"name": "a"}},
        {"dropout": {"p": 0.5, "name": "last"}}, "global_avg_pool",
        {"linear": {"out": "classes"}}]}"#;
    let spec = HostSpec::from_json(spec, "own").unwrap();
    let enabled = spec.slots().to_vec();
    let mut host = Host::new(spec, CIFAR, &enabled, Arc::new(set), Rules::default()).unwrap();
    grow_to(&mut host, "a", 7, Style::LinearAdd, Stage::Blending);
    let graph = host.graph(&Optimisers::default()).unwrap();
    let layers = graph.dropouts.iter().map(|layer| (&*layer.name, layer.rate, layer.group.index()));
    let expected = [1, 4, 5].map(|i| format!("slots.a.layers.{i}"));
    let modules = expected.iter().map(|name| (&**name, 0.25, 1));
    assert_eq!(layers.collect::<Vec<_>>(), modules.chain([("last", 0.5, 0)]).collect::<Vec<_>>());
    // The setting `dropout` replaces the rates of the host's layers alone.
    let graph = graph.with_dropout_of(GroupId::HOST, 0.125).unwrap();
    assert_eq!(graph.dropouts.iter().map(|layer| layer.rate).sum::<f32>(), 0.875);

    for p in [1.0, -0.5, f32::NAN] {
        let layers = vec![conv, BlueprintLayer::Dropout { p }, zero];
        let error = Blueprint::new("own", layers, Join::Residual).check().unwrap_err().to_string();
        assert!(error.contains("layer 1: ") && error.contains("from 0 to below 1"), "{error}");
    }
    let last = BlueprintLayer::Linear { out: Channels::Same, bias: true, zero: true };
    let mean = BlueprintLayer::GlobalAvgPool;
    for (layers, join) in [
        (vec![conv, drop], Join::Residual),
        (vec![drop], Join::TanhMix),
        (vec![mean, last, BlueprintLayer::Sigmoid, drop], Join::ChannelScale { factor: 2.0 }),
    ] {
        let error = Blueprint::new("own", layers, join).check().unwrap_err();
        assert!(matches!(error, BlueprintError::Birth { .. }), "{error:?}");
    }
}

#[test]
fn blueprints_must_be_trainable_identities_at_birth() {
    use Channels::Same;
    let conv = BlueprintLayer::Conv { out: Same, kernel: 3, depthwise: false };
    let (one, zero) =
        (BlueprintLayer::GroupNorm { zero: false }, BlueprintLayer::GroupNorm { zero: true });
    let last = BlueprintLayer::Linear { out: Same, bias: true, zero: true };
    let first = BlueprintLayer::Linear { out: Same, bias: true, zero: false };
    let scale = Join::ChannelScale { factor: 2.0 };
    let bad: [(&str, Vec<BlueprintLayer>, Join); 12] = [
        ("no identity", vec![conv, one], Join::Residual),
        ("nothing at all", vec![], Join::Residual),
        ("dead: ReLU of zero", vec![conv, zero, BlueprintLayer::Relu], Join::Residual),
        (
            "dead: zero before a zero",
            vec![conv, zero, BlueprintLayer::Relu, conv, zero],
            Join::Residual,
        ),
        ("mix with itself", vec![], Join::TanhMix),
        ("mix with itself again", vec![BlueprintLayer::Relu], Join::TanhMix),
        ("zero in a mix", vec![conv, zero, BlueprintLayer::Relu, conv], Join::TanhMix),
        (
            "scale 1/2",
            vec![BlueprintLayer::GlobalAvgPool, last, BlueprintLayer::Sigmoid],
            Join::ChannelScale { factor: 1.0 },
        ),
        ("scale 0", vec![BlueprintLayer::GlobalAvgPool, last], scale),
        (
            "scale by anything",
            vec![BlueprintLayer::GlobalAvgPool, first, BlueprintLayer::Sigmoid],
            scale,
        ),
        (
            "dead: zero, zero",
            vec![
                BlueprintLayer::GlobalAvgPool,
                last,
                BlueprintLayer::Relu,
                last,
                BlueprintLayer::Sigmoid,
            ],
            scale,
        ),
        ("scale of nothing", vec![], scale),
    ];
    for (why, layers, join) in bad {
        let error = Blueprint::new("bad", layers, join).check().unwrap_err();
        assert!(matches!(error, BlueprintError::Birth { .. }), "{why}: {error}");
    }
}

#[test]
fn modules_above_the_parameter_limit_are_rejected() {
    let conv = |out| BlueprintLayer::Conv { out, kernel: 31, depthwise: false };
    let layers = vec![
        conv(Channels::Times { by: 2048 }),
        conv(Channels::Same),
        BlueprintLayer::GroupNorm { zero: true },
    ];
    let huge = Blueprint::new("huge", layers, Join::Residual);
    let blueprints = Arc::new(BlueprintSet::standard().with(huge).unwrap());
    let spec: HostSpec = "large".parse().unwrap();
    let slots = spec.slots().to_vec();
    let error = Host::new(spec, CIFAR, &slots, blueprints, Rules::default()).unwrap_err();
    assert!(error.to_string().contains("at most 268435456 are supported"), "{error}");
}

#[test]
fn layers_that_do_not_fit_are_rejected() {
    let zero = BlueprintLayer::GroupNorm { zero: true };
    let conv = |out, kernel, depthwise| BlueprintLayer::Conv { out, kernel, depthwise };
    let half = Channels::Divided { by: 2, at_least: 1 };
    let bad: [(&str, Vec<BlueprintLayer>); 5] = [
        ("an even kernel", vec![conv(Channels::Same, 2, false), zero]),
        ("no kernel", vec![conv(Channels::Same, 0, false), zero]),
        ("channels that do not come back", vec![conv(half, 1, false), zero]),
        (
            "a depthwise convolution that widens",
            vec![conv(Channels::Times { by: 2 }, 3, true), zero],
        ),
        (
            "a linear layer over an image, with other channels",
            vec![BlueprintLayer::Linear { out: half, bias: true, zero: false }, zero],
        ),
    ];
    for (why, layers) in bad {
        let blueprint = Blueprint::new("bad", layers, Join::Residual);
        let error = BlueprintSet::standard().with(blueprint).unwrap_err();
        assert!(matches!(error, BlueprintError::Shape { .. }), "{why}: {error}");
    }
    for name in ["", "Conv", "my conv", "slots.x", "größe"] {
        let error = Blueprint { name: name.into(), ..own() }.check().unwrap_err();
        assert!(matches!(error, BlueprintError::BadName { .. }), "{name}: {error}");
    }
    let twice = Blueprint { name: "norm".into(), ..own() };
    assert!(matches!(BlueprintSet::standard().with(twice), Err(BlueprintError::Duplicate { .. })));
    let unknown = BlueprintSet::standard().find("conv_hevy").unwrap_err();
    assert!(matches!(unknown, BlueprintError::Unknown { .. }), "{unknown:?}");
    assert!(unknown.to_string().contains("did you mean `conv_heavy`"), "{unknown}");
}

#[test]
fn only_the_identity_layer_starts_at_zero() {
    for (index, (name, _)) in TABLE.into_iter().enumerate() {
        let mut host = host("baseline", CIFAR, Rules::default());
        grow_to(&mut host, "r0c0", index, Style::LinearAdd, Stage::Training);
        let graph = host.graph(&Optimisers::default()).unwrap();
        let zero: Vec<&str> = graph
            .params
            .iter()
            .filter(|p| p.name.starts_with("slots.") && p.init == Init::Constant(0.0))
            .filter_map(|p| p.name.strip_prefix("slots.r0c0."))
            .collect();
        // A group norm's bias starts at 0, as in PyTorch.
        let expected: &[&str] = match name {
            "norm" => &["layers.0.bias", "mix"],
            "attention" => &["layers.3.weight", "layers.3.bias"],
            "depthwise" => &["layers.2.weight", "layers.2.bias"],
            "bottleneck" => &["layers.5.weight", "layers.5.bias"],
            "conv_heavy" => &["layers.1.bias", "layers.4.weight", "layers.4.bias"],
            _ => &["layers.1.weight", "layers.1.bias"],
        };
        assert_eq!(zero, expected, "{name}");
    }
}

#[test]
fn the_graph_depends_on_stage_blueprint_and_mode_only() {
    let ops = |host: &Host| {
        let graph = host.graph(&Optimisers::default()).unwrap();
        let count = |of: &dyn Fn(&NodeOp) -> bool| graph.nodes.iter().filter(|n| of(&n.op)).count();
        (
            count(&|op| matches!(op, NodeOp::Detach(_))),
            count(&|op| matches!(op, NodeOp::StraightThrough { .. })),
            count(&|op| matches!(op, NodeOp::Blend { .. })),
        )
    };
    let slot = "r0c1";
    for (stage, expected) in [
        (Stage::Germinated, (0, 0, 0)),
        (Stage::Training, (1, 1, 0)),
        (Stage::Blending, (1, 0, 1)),
        (Stage::Holding, (1, 0, 1)),
        (Stage::Fossilized, (0, 0, 1)),
    ] {
        let mut host = host("baseline", CIFAR, aside());
        grow_to(&mut host, slot, 5, Style::LinearAdd, stage);
        assert_eq!(ops(&host), expected, "{stage}");
        assert_eq!(
            host.graph(&Optimisers::default()).unwrap().alphas,
            6,
            "one alpha per enabled slot"
        );
    }
    let mut host = host("baseline", CIFAR, aside());
    grow_to(&mut host, slot, 5, Style::LinearAdd, Stage::Blending);
    let (key, graph, alpha) =
        (host.topology_key(), host.graph(&Optimisers::default()).unwrap(), host.alphas());
    host.step();
    assert_ne!(host.alphas(), alpha);
    assert_eq!(host.topology_key(), key);
    assert_eq!(host.graph(&Optimisers::default()).unwrap(), graph);
    let index = host.index_of(slot).unwrap();
    let NodeOp::Blend { alpha, .. } =
        graph.nodes.iter().find(|n| matches!(n.op, NodeOp::Blend { .. })).unwrap().op
    else {
        unreachable!()
    };
    assert_eq!(alpha, index, "a blend reads the alpha of its slot");
    host.prune_live();
    assert_ne!(host.topology_key(), key);
}
