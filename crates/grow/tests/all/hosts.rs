//! Hosts: the tables of `docs/hosts.md`, names and shapes of weights, and invalid hosts.

use std::collections::BTreeMap;
use std::sync::Arc;

use meristem_grow::{
    BlueprintSet, Cnn, Error, Gates, Host, HostError, HostLayer, HostSpec, Optimisers, PRESETS,
    Rules, SlotName, TaskShape, host_graph,
};
use meristem_nn::graph::{ConvGeometry, Dims, Graph, GraphBuilder, NodeOp};
use proptest::prelude::*;

use crate::common::CIFAR;

fn spec(text: &str) -> HostSpec {
    text.parse().unwrap()
}

#[test]
fn presets_match_the_table_of_parameters() {
    let table = [
        ("baseline", 6_418),
        ("wide", 24_346),
        ("deep", 99_922),
        ("large", 94_762),
        ("impaired", 77),
        ("minimal", 164),
    ];
    assert_eq!(PRESETS.map(|(name, _)| name), table.map(|(name, _)| name));
    for (name, parameters) in table {
        let graph = host_graph(&spec(name), &CIFAR, Optimisers::default().host).unwrap();
        assert_eq!(graph.parameters(None), parameters, "{name}, on the graph");
        assert_eq!(spec(name).parameters(&CIFAR), Ok(parameters), "{name}, in sum");
    }
}

#[test]
fn a_summary_has_the_sizes_of_the_graph() {
    for (name, _) in PRESETS {
        let graph = host_graph(&spec(name), &CIFAR, Optimisers::default().host).unwrap();
        let summary = spec(name).summary(&CIFAR).unwrap();
        let sizes = (summary.parameters, summary.macs);
        assert_eq!(sizes, (graph.parameters(None), graph.macs()), "{name}");
        assert_eq!(summary.slots, spec(name).slots().len(), "{name}");
    }
    let summary = spec("baseline").summary(&CIFAR).unwrap();
    let first = &summary.layers[0];
    assert_eq!((first.name.as_deref(), first.layer.as_str()), (Some("blocks.0.conv"), "conv 3×3"));
    // 27 products for each of 8 × 32 × 32 elements.
    let sizes = (first.output, first.parameters, first.macs);
    assert_eq!(sizes, ([8, 32, 32], 8 * 27, 27 * 8 * 32 * 32));
    let last = summary.layers.last().unwrap();
    assert_eq!((last.output, last.parameters, last.macs), ([10, 1, 1], 330, 320));
    let tiny = TaskShape { height: 2, width: 2, ..CIFAR };
    assert!(matches!(spec("deep").summary(&tiny), Err(HostError::TooDeep { .. })));
}

#[test]
fn host_tensors_have_pytorch_names_and_shapes() {
    let graph = host_graph(&spec("baseline"), &CIFAR, Optimisers::default().host).unwrap();
    let got: BTreeMap<String, Vec<usize>> =
        graph.params.iter().map(|p| (p.name.clone(), p.shape.clone())).collect();
    let mut expected = BTreeMap::new();
    for (i, (input, output)) in [(3, 8), (8, 16), (16, 32)].into_iter().enumerate() {
        expected.insert(format!("blocks.{i}.conv.weight"), vec![output, input, 3, 3]);
        expected.insert(format!("blocks.{i}.bn.weight"), vec![output]);
        expected.insert(format!("blocks.{i}.bn.bias"), vec![output]);
    }
    expected.insert("classifier.weight".into(), vec![10, 32]);
    expected.insert("classifier.bias".into(), vec![10]);
    assert_eq!(got, expected);
    let buffers: Vec<&str> = graph.buffers.iter().map(|b| b.name.as_str()).collect();
    assert_eq!(buffers.len(), 9);
    for i in 0..3 {
        for name in ["running_mean", "running_var", "num_batches_tracked"] {
            assert!(buffers.contains(&format!("blocks.{i}.bn.{name}").as_str()));
        }
    }
}

#[test]
fn pools_follow_the_first_blocks_only() {
    for (text, pools) in
        [("baseline", 3), ("minimal", 0), ("cnn:blocks=4", 4), ("cnn:blocks=4,pools=1", 1)]
    {
        let graph = host_graph(&spec(text), &CIFAR, Optimisers::default().host).unwrap();
        let found = graph.nodes.iter().filter(|n| matches!(n.op, NodeOp::MaxPool2d { .. })).count();
        assert_eq!(found, pools, "{text}");
    }
}

#[test]
fn slots_have_an_action_order_and_a_forward_order() {
    let names =
        |slots: &[SlotName]| slots.iter().map(SlotName::as_str).collect::<Vec<_>>().join(" ");
    let baseline = spec("baseline");
    assert_eq!(names(baseline.slots()), "r0c0 r0c1 r0c2 r1c0 r1c1 r1c2");
    let forward: Vec<SlotName> =
        baseline.all_layers().into_iter().filter_map(HostLayer::slot).cloned().collect();
    assert_eq!(names(&forward), "r0c0 r1c0 r0c1 r1c1 r0c2 r1c2");
}

#[test]
fn slots_are_selected_by_name_and_prefix() {
    let deep = spec("cnn:channels=1,blocks=12,pools=2");
    let select = |wanted: &[&str]| {
        let slots = deep.select_slots(wanted.iter().copied())?;
        Ok::<_, HostError>(slots.iter().map(SlotName::as_str).collect::<Vec<_>>().join(" "))
    };
    assert_eq!(select(&["r1c2 ", " r0c10", "r0c1"]).unwrap(), "r0c1 r0c10 r1c2");
    assert_eq!(
        select(&["r1"]).unwrap(),
        (0..12).map(|i| format!("r1c{i}")).collect::<Vec<_>>().join(" ")
    );
    assert_eq!(deep.select_slots(["all"]).unwrap(), deep.slots());
    assert_eq!(select(&[]).unwrap(), "");
    for bad in ["", "r", "r0c", "r2", "r0c01", "r0c12", "c", "R0"] {
        let error = select(&[bad]).unwrap_err();
        assert!(matches!(&error, HostError::UnknownSlot { given, .. } if given == bad), "{error}");
    }
    assert_eq!(select(&["r0", "r0c1"]), Err(HostError::DuplicateSlot("r0c1".into())));
}

#[test]
fn unknown_names_suggest_the_nearest() {
    let unknown = |text: &str| {
        let error = text.parse::<HostSpec>().unwrap_err();
        assert!(matches!(error, HostError::UnknownHost { .. }), "{error:?}");
        error.to_string()
    };
    assert!(unknown("basline").contains("did you mean `baseline`"), "{}", unknown("basline"));
    assert!(unknown("cnn").contains("hosts: baseline, wide"), "{}", unknown("cnn"));
    assert!(!unknown("alexnet").contains("did you mean"), "{}", unknown("alexnet"));
    let error = "cnn:chanels=8,blocks=3".parse::<HostSpec>().unwrap_err();
    assert!(matches!(error, HostError::UnknownKey { .. }), "{error:?}");
    assert!(error.to_string().contains("`chanels`; did you mean `channels`"), "{error}");
    let error = spec("baseline").select_slots(["r0c0", "r1c3"]).unwrap_err();
    assert!(matches!(error, HostError::UnknownSlot { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("`r1c3`") && text.contains("r0c0, r0c1, r0c2, r1c0"), "{text}");
}

#[test]
fn invalid_descriptions_are_rejected() {
    let unknown = |given: &'static str, nearest: Option<&str>| {
        let nearest = nearest.map(Into::into);
        let presets =
            "baseline, wide, deep, large, impaired, minimal, resnet8, resnet20, vgg8, mobile"
                .into();
        (given, HostError::UnknownHost { given: given.into(), nearest, presets })
    };
    let part = |given: &'static str, part: &str| {
        let expected = "`key=number`";
        (given, HostError::BadPart { given: given.into(), expected, part: part.into() })
    };
    let size = |given: &'static str, what, expected: &str, got| {
        (given, HostError::Size { what, expected: expected.into(), got })
    };
    let refused = [
        unknown("", None),
        unknown("Baseline", Some("baseline")),
        unknown("cnn;channels=8", None),
        part("cnn:", ""),
        part("cnn:channels", "channels"),
        part("cnn:channels=", "channels="),
        part("cnn:channels=x", "channels=x"),
        part("cnn:channels=-1", "channels=-1"),
        part("cnn:channels=+8", "channels=+8"),
        part("cnn:channels=8,,blocks=3", ""),
        part("cnn:blocks=99999999999999999999999", "blocks=99999999999999999999999"),
        size("cnn:channels=0", "channels", "1 to 2048", 0),
        size("cnn:channels=8193", "channels", "1 to 2048", 8193),
        // 8 channels in the first of 12 blocks are 16,384 in the last.
        size("cnn:channels=8,blocks=12", "channels", "1 to 4", 8),
        size("cnn:blocks=0", "blocks", "2 to 12", 0),
        size("cnn:blocks=1", "blocks", "2 to 12", 1),
        size("cnn:blocks=13", "blocks", "2 to 12", 13),
        size("cnn:kernel=0", "kernel", "1 to 31", 0),
        size("cnn:kernel=2", "kernel", "odd, so that the padding keeps the image's size", 2),
        size("cnn:kernel=33", "kernel", "1 to 31", 33),
        size("cnn:blocks=3,pools=4", "pools", "0 to 3", 4),
    ];
    for (text, error) in refused {
        assert_eq!(text.parse::<HostSpec>(), Err(error), "`{text}`");
    }
    let (_, error) = size("", "kernel", "odd, so that the padding keeps the image's size", 4);
    let even = "`kernel` must be odd, so that the padding keeps the image's size, got 4";
    assert_eq!(error.to_string(), even);
    let (_, error) = part("cnn:kernel=x", "kernel=x");
    let text = "host `cnn:kernel=x`: expected `key=number`, got `kernel=x`";
    assert_eq!(error.to_string(), text);
    let error = "cnn:pools=1,pools=1".parse::<HostSpec>().unwrap_err();
    assert!(matches!(error, HostError::DuplicateKey { .. }), "{error:?}");
    let twice = "host `cnn:pools=1,pools=1`: `pools` is given twice";
    assert_eq!(error.to_string(), twice);
}

#[test]
fn a_host_too_deep_for_the_image_suggests_one_that_fits() {
    let image = TaskShape { channels: 1, height: 28, width: 28, classes: 10 };
    let error = spec("deep").validate(&image).unwrap_err();
    let HostError::TooDeep { fits, suggestion, .. } = error.clone() else { panic!("{error}") };
    assert_eq!((fits, &*suggestion), (4, "cnn:channels=8,blocks=5,kernel=3,pools=4"));
    spec(&suggestion).validate(&image).unwrap();
    let text = error.to_string();
    assert!(text.contains("1×28×28") && text.contains("pools=4"), "{text}");
    spec("deep").validate(&CIFAR).unwrap();
    // Only the blocks with a pool lose image size.
    let dot = TaskShape { height: 1, width: 9, ..CIFAR };
    spec("minimal").validate(&dot).unwrap();
    let HostError::TooDeep { fits: 0, .. } = spec("baseline").validate(&dot).unwrap_err() else {
        panic!("an image of one row has no room for a pool")
    };
}

#[test]
fn sizes_out_of_range_are_rejected() {
    let range = "1 to 65536";
    for (image, what, got) in [
        (TaskShape { channels: 0, ..CIFAR }, "image channels", 0),
        (TaskShape { height: 0, ..CIFAR }, "image height", 0),
        (TaskShape { width: 0, ..CIFAR }, "image width", 0),
        (TaskShape { classes: 0, ..CIFAR }, "classes", 0),
        (TaskShape { width: usize::MAX, ..CIFAR }, "image width", usize::MAX),
        (TaskShape { classes: usize::MAX, ..CIFAR }, "classes", usize::MAX),
    ] {
        let error = spec("baseline").validate(&image).unwrap_err();
        assert_eq!(error, HostError::Size { what, expected: range.into(), got });
    }
    let huge = spec("cnn:channels=4096,blocks=2,kernel=31,pools=0");
    let (parameters, limit) = (3 * 4096 * 961 + 2 * 4096 + 4096 * 8192 * 961, 1 << 28);
    assert_eq!(
        huge.validate(&CIFAR),
        Err(HostError::TooLarge { host: huge.name(), parameters, limit })
    );

    let make = |rules| {
        let set = Arc::new(BlueprintSet::standard());
        Host::new(spec("baseline"), CIFAR, &["r0c0".into()], set, rules)
    };
    let gates = Rules::default().gates;
    for (rules, message) in [
        (
            Rules { embargo_steps: 0, ..Rules::default() },
            "rule `embargo_steps` must be at least 1, got 0",
        ),
        (
            Rules { resetting_steps: 0, ..Rules::default() },
            "rule `resetting_steps` must be at least 1, got 0",
        ),
        (
            Rules { gates: Gates { min_gradient_health: f64::NAN, ..gates }, ..Rules::default() },
            "rule `gates.min_gradient_health` must be from 0 to 1, got NaN",
        ),
        (
            Rules { gates: Gates { max_exploding_share: -0.1, ..gates }, ..Rules::default() },
            "rule `gates.max_exploding_share` must be from 0 to 1, got -0.1",
        ),
        (
            Rules { gates: Gates { min_contribution_pp: 101.0, ..gates }, ..Rules::default() },
            "rule `gates.min_contribution_pp` must be from -100 to 100, got 101",
        ),
    ] {
        let Error::Rule(error) = make(rules).unwrap_err() else { panic!("{rules:?}") };
        assert_eq!(error.to_string(), message);
    }
    make(Rules::default()).unwrap();
}

/// The graph of a host of the family `cnn`, layer by layer, as in `docs/hosts.md`.
fn written_out(cnn: &Cnn, image: &TaskShape) -> Graph {
    let dims = Dims { c: image.channels, h: image.height, w: image.width };
    let mut b = GraphBuilder::new(dims, Optimisers::default().host);
    let mut x = b.input();
    for i in 0..cnn.blocks {
        let (out, geometry) = (cnn.channels << i, ConvGeometry::same(cnn.kernel));
        x = b.conv2d(x, &format!("blocks.{i}.conv"), out, geometry, false).unwrap();
        x = b.batch_norm(x, &format!("blocks.{i}.bn")).unwrap();
        x = b.relu(x);
        if i < cnn.pools {
            x = b.max_pool2d(x, "pool", 2, 2).unwrap();
        }
    }
    let pooled = b.global_avg_pool(x);
    let logits = b.linear(pooled, "classifier", image.classes, true, None).unwrap();
    b.finish(logits).unwrap()
}

proptest! {
    #[test]
    fn the_layer_list_matches_the_written_graph(
        channels in 1usize..20, blocks in 2usize..5, half in 0usize..3, pools in 0usize..5,
        image_channels in 1usize..5, height in 1usize..40, width in 1usize..40,
        classes in 1usize..12,
    ) {
        let cnn = Cnn { channels, blocks, kernel: 2 * half + 1, pools: pools.min(blocks) };
        let spec = HostSpec::try_from(cnn).unwrap();
        let image = TaskShape { channels: image_channels, height, width, classes };
        // Halves the shorter side `pools` times.
        let mut side = height.min(width);
        (0..cnn.pools).for_each(|_| side /= 2);
        prop_assert_eq!(spec.validate(&image).is_ok(), side > 0);
        if side > 0 {
            let graph = host_graph(&spec, &image, Optimisers::default().host).unwrap();
            prop_assert_eq!(Ok(graph.parameters(None)), spec.parameters(&image));
            prop_assert_eq!(graph, written_out(&cnn, &image));
        }
        prop_assert_eq!(&spec.description().parse::<HostSpec>().unwrap(), &spec);
        prop_assert_eq!(spec.to_string().parse::<HostSpec>().unwrap(), spec);
    }

    #[test]
    fn no_text_panics_the_parser(text in "(cnn:)?[a-z0-9=,:+ -]{0,40}") {
        let _ = text.parse::<HostSpec>();
        let _ = spec("baseline").select_slots(text.split(','));
    }
}
