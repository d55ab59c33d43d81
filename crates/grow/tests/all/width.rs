//! Width: which layers can become wider, the host that results, and its file.

use std::sync::Arc;

use meristem_grow::{
    BlueprintSet, Error, Host, HostSpec, LifecycleError, Rules, Stage, Style, TaskShape, Topology,
    TopologyError,
};

use meristem_nn::graph::WidthInit;

use crate::common::{CIFAR, grow_to, host};

fn layers(spec: &str) -> Vec<(String, usize)> {
    let spec: HostSpec = spec.parse().unwrap();
    spec.widenable().into_iter().map(|layer| (layer.name, layer.features)).collect()
}

fn problem(error: &LifecycleError) -> String {
    assert!(matches!(error, LifecycleError::Widen { .. }), "{error}");
    error.to_string()
}

#[test]
fn hidden_layers_can_become_wider_where_each_feature_is_computed_by_itself() {
    let named = |names: &[(&str, usize)]| -> Vec<(String, usize)> {
        names.iter().map(|(name, features)| ((*name).into(), *features)).collect()
    };
    let convs = [("blocks.0.conv", 4), ("blocks.1.conv", 8), ("blocks.2.conv", 16)];
    assert_eq!(layers("conv1d:4,8,16"), named(&convs));
    assert_eq!(layers("mlp:8,9"), named(&[("hidden.0", 8), ("hidden.1", 9)]));
    // The ends of residual bodies and the layers that several branches read are left out.
    let resnet: HostSpec = "resnet8".parse().unwrap();
    let found = resnet.widenable();
    assert_eq!(found.len(), 3, "the first convolution of each block: {found:?}");
    for layer in found {
        let wider = resnet.widened(&layer.name, 3).unwrap();
        let parameters = |spec: &HostSpec| spec.parameters(&CIFAR).unwrap();
        assert!(parameters(&wider) > parameters(&resnet));
        assert!(wider.is_as_wide_as(&resnet) && !resnet.is_as_wide_as(&wider));
    }
    for (layer, reason) in [
        ("nothing", "with a settable width"),
        ("classifier", "with a settable width"),
        ("stem.conv", "several branches read it"),
    ] {
        let name = resnet.all_layers().iter().filter_map(|layer| layer.name()).next().unwrap();
        let layer = if layer == "stem.conv" { name } else { layer };
        let error = resnet.widened(layer, 1).unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains(layer), "{error}");
    }
}

#[test]
fn the_reason_names_branches_only_where_there_are_branches() {
    let text = r#"{"layers": [
        {"conv2d": {"out": 4, "kernel": 1, "name": "saved"}}, {"save": {"name": "a"}},
        {"conv2d": {"out": 4, "kernel": 1, "name": "joined"}},
        {"join": {"join": "add", "from": ["a"]}},
        {"conv2d": {"out": 4, "kernel": 1, "name": "branched"}},
        {"residual": {"body": [{"conv2d": {"out": 4, "kernel": 1}}]}},
        {"slot": {"name": "s"}}, "global_avg_pool", {"linear": {"out": "classes"}}
    ]}"#;
    let host = HostSpec::from_json(text, "joins").unwrap();
    for (layer, reason) in [
        ("saved", "its output is saved, or joined with saved values"),
        ("joined", "its output is saved, or joined with saved values"),
        ("branched", "several branches read it; widen a layer inside one"),
    ] {
        let error = host.widened(layer, 1).unwrap_err().to_string();
        assert!(error.contains(layer) && error.contains(reason), "{error}");
    }
}

#[test]
fn a_depthwise_convolution_gets_wider_with_the_layer_that_it_reads() {
    let mobile: HostSpec = "mobile".parse().unwrap();
    let first = &mobile.widenable()[0];
    let wider = mobile.widened(&first.name, 2).unwrap();
    // It would not fit otherwise.
    assert!(wider.parameters(&CIFAR).unwrap() > mobile.parameters(&CIFAR).unwrap());
    assert!(wider.is_as_wide_as(&mobile));
}

#[test]
fn a_wider_host_is_a_host_like_any_other() {
    let mut it = host("baseline", CIFAR, Rules::default());
    let at = it.find_layer("blocks.0.conv").unwrap();
    let change = it.widen(at, 5).unwrap();
    assert_eq!((change.layer.as_str(), change.from, change.to), ("blocks.0.conv", 8, 13));
    // 27 weights and 2 of the batch norm a channel, and 9 · 16 that read it.
    assert_eq!(it.bare_parameters(), 6_418 + 5 * (27 + 2 + 9 * 16));
    assert_eq!((it.parameters().unwrap().host, it.first_parameters()), (7_283, 6_418));
    assert_eq!((it.slots()[0].dims.c, it.slots()[1].dims.c), (13, 16));
    let text = it.spec().description();
    assert_eq!(&text.parse::<HostSpec>().unwrap(), it.spec());
    assert_eq!(text.parse::<HostSpec>().unwrap().description(), text);
    assert_eq!(it.spec().to_string(), "baseline-widened");
    let family: HostSpec = "conv1d:4,8".parse().unwrap();
    let twice = family.widened("blocks.0.conv", 1).unwrap().widened("blocks.0.conv", 1).unwrap();
    assert_eq!(twice.to_string(), "conv1d-4-8-widened");
    assert_eq!(twice.description().parse::<HostSpec>().unwrap(), twice);
    // A module of the new size.
    grow_to(&mut it, "r0c0", 4, Style::LinearAdd, Stage::Fossilized);
    let topology = Topology::from_host(&it);
    let back = Topology::from_json(&topology.to_json().unwrap()).unwrap();
    let set = it.blueprints().clone();
    assert_eq!(back.rebuild(&set, Rules::default()).unwrap(), it);
    let never = host("baseline", CIFAR, Rules::default());
    assert!(!Topology::from_host(&never).to_json().unwrap().contains("widened_from"));
    // A file whose widths do not belong together.
    let other = Topology { widened_from: Some("wide".parse().unwrap()), ..topology };
    let error = other.rebuild(&set, Rules::default()).unwrap_err();
    assert!(error.to_string().contains("is not `wide` with more features"), "{error}");
    assert!(!matches!(error, Error::Topology(TopologyError::Parse(_))));
}

#[test]
fn what_cannot_become_wider_is_refused_and_the_host_stays() {
    let limits = |rules: Rules| host("baseline", CIFAR, rules);
    let refuse = |mut it: Host, layer: usize, by: usize, reason: &str| {
        let before = it.clone();
        let error = it.check_widen(layer, by).unwrap_err();
        assert!(problem(&error).contains(reason), "{error}");
        assert_eq!(it.widen(layer, by).unwrap_err(), error);
        assert_eq!(it, before);
    };
    let parameters = Rules { max_parameters: Some(6_418 + 172), ..Rules::default() };
    refuse(limits(parameters), 0, 1, "6591 parameters, and its limit is 6590");
    let macs = Rules { max_macs: Some(1_000), ..Rules::default() };
    refuse(limits(macs), 0, 1, "MACs, and its limit is 1000");
    refuse(limits(Rules::default()), 3, 1, "3 layers that can become wider");
    refuse(limits(Rules::default()), 0, 0, "at least 1");
    refuse(limits(Rules::default()), 0, usize::MAX, "channels are supported");
    let mut grown = limits(Rules::default());
    grow_to(&mut grown, "r1c0", 4, Style::LinearAdd, Stage::Fossilized);
    refuse(grown.clone(), 0, 1, "slot r1c0, which gets wider with it, has a module");
    grown.widen(1, 1).unwrap();
    let error = limits(Rules::default()).find_layer("blocks.1.con").unwrap_err();
    assert!(problem(&error).contains("did you mean `blocks.1.conv`?"), "{error}");
    let small = TaskShape { channels: 1, height: 4, width: 4, classes: 2 };
    assert!(host("mlp:4", small, Rules::default()).widen(0, 3).is_ok());
}

/// The memory of `tiny` for images grows with the kernel and with the layer's own width.
#[test]
fn tiny_has_limits_of_its_own_for_images() {
    let refusal = |layers: &str, layer: usize| {
        let text = format!(
            r#"layers = [{layers}, "global_avg_pool", {{ linear = {{ out = "classes" }} }}]"#
        );
        let spec = HostSpec::from_toml(&text, "test").unwrap();
        let rules = Rules { width_init: WidthInit::Tiny, ..Rules::default() };
        let set = Arc::new(BlueprintSet::standard());
        let mut host = Host::new(spec, CIFAR, &[], set, rules).unwrap();
        host.widen(layer, 1).err().map(|error| error.to_string())
    };
    let pair = |first: usize, second: usize, kernel: usize| {
        let layers = format!(
            r#"{{ conv2d = {{ out = {first}, kernel = 3, bias = true }} }}, "relu",
               {{ conv2d = {{ out = {second}, kernel = {kernel} }} }}"#
        );
        refusal(&layers, 0)
    };
    assert_eq!(pair(64, 64, 3), None);
    let wide = pair(200, 8, 3).unwrap();
    assert!(wide.contains("has 1800 weights, and at most 1024 are measured"), "{wide}");
    let kernels = r#"{ conv2d = { out = 64, kernel = 1, bias = true } }, "relu",
        { conv2d = { out = 20, kernel = 3, bias = true } }, "relu",
        { conv2d = { out = 8, kernel = 7 } }"#;
    let many = refusal(kernels, 1).unwrap();
    assert!(many.contains("27659520 products of activations, and at most 16777216"), "{many}");
}

/// `gradmax` needs features that are 0 when their incoming weights are; layers that a network reads
/// in other ways are refused by name.
#[test]
fn initialisations_suit_the_layers_that_they_are_for() {
    let suits = |layers: &str, init| {
        let spec = HostSpec::from_toml(&format!("layers = [{layers}]"), "test").unwrap();
        spec.widenable()[0].suits(init)
    };
    let linear = |function: &str| {
        let hidden = format!(r#""flatten", {{ linear = {{ out = 4 }} }}, "{function}""#);
        hidden + r#", { linear = { out = "classes" } }"#
    };
    for init in WidthInit::ALL {
        assert_eq!(suits(&linear("relu"), init), Ok(()), "{init:?}");
    }
    for function in ["sigmoid", "softplus"] {
        let reason = suits(&linear(function), WidthInit::Gradmax).unwrap_err();
        assert!(reason.contains("sigmoid or softplus"), "{reason}");
        assert_eq!(suits(&linear(function), WidthInit::Tiny), Ok(()));
    }
    let convolutions = |first: &str, between: &str| {
        format!(
            r#"{{ conv2d = {{ out = 4, kernel = 3{first} }} }}, {between}
               {{ conv2d = {{ out = 6, kernel = 3 }} }}, "global_avg_pool",
               {{ linear = {{ out = "classes" }} }}"#
        )
    };
    let bias = ", bias = true";
    assert_eq!(suits(&convolutions(bias, r#""relu","#), WidthInit::Tiny), Ok(()));
    let read_by_linear = r#"{ conv2d = { out = 4, kernel = 3, bias = true } }, "flatten", "silu",
                            { linear = { out = "classes" } }"#;
    assert_eq!(suits(read_by_linear, WidthInit::Tiny), Ok(()));
    for (first, between) in [
        ("", r#""relu","#),
        (bias, r#""batch_norm", "relu","#),
        (bias, r#""relu", { max_pool2d = { kernel = 2 } },"#),
        (bias, r#""relu", "flatten","#),
    ] {
        let reason = suits(&convolutions(first, between), WidthInit::Tiny).unwrap_err();
        assert!(reason.contains("nothing but activation functions"), "{between}: {reason}");
    }
    for layers in [convolutions(bias, r#""sigmoid","#), read_by_linear.replace("silu", "sigmoid")] {
        let reason = suits(&layers, WidthInit::Tiny).unwrap_err();
        assert!(reason.contains("no sigmoid or softplus"), "{reason}");
    }
}
