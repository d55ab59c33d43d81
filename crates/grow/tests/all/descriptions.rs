//! Descriptions of hosts: round trips, default names, sizes, and mistakes with their places.

use std::sync::Arc;

use meristem_grow::{
    BlueprintSet, Cnn, Host, HostError, HostLayer, HostSpec, LifecycleError, READY_MADE, Rules,
    SlotName, TaskShape,
};
use proptest::prelude::*;

use crate::common::CIFAR;

fn toml(layers: &str) -> Result<HostSpec, HostError> {
    HostSpec::from_toml(&format!("layers = [{layers}]"), "test")
}

fn problem(layers: &str) -> String {
    match toml(layers).and_then(|host| host.validate(&CIFAR).map(|()| host)) {
        Ok(host) => panic!("{layers}: it is {}", host.description()),
        Err(error) => error.to_string(),
    }
}

const HEAD: &str = "\"global_avg_pool\", { linear = { out = \"classes\" } }";

#[test]
fn a_description_survives_every_text_form() {
    for (name, text) in READY_MADE {
        let host = HostSpec::from_toml(text, "other").unwrap();
        assert_eq!(host.name(), name);
        let again: HostSpec = host.description().parse().unwrap();
        assert_eq!((&again, again.description()), (&host, host.description()));
        assert_eq!(name.parse::<HostSpec>().unwrap(), host);
        let json = serde_json::to_string(&host).unwrap();
        assert_eq!(serde_json::from_str::<HostSpec>(&json).unwrap(), host);
    }
}

#[test]
fn layers_are_named_after_their_positions() {
    let host = toml(&format!(
        "{{ conv2d = {{ out = 4, kernel = 3, name = \"stem\" }} }}, \"batch_norm\", \"relu\",
         {{ residual = {{ name = \"block\", body = [{{ conv2d = {{ out = 4, kernel = 3 }} }}] }} }},
         {{ branches = {{ join = \"add\",
            branches = [[], [{{ group_norm = {{ groups = 2 }} }}]] }} }},
         {HEAD}"
    ))
    .unwrap();
    let names: Vec<&str> = host.all_layers().into_iter().filter_map(HostLayer::tensors).collect();
    let expected = ["stem", "layers.1", "block.body.0", "layers.4.branches.1.0", "layers.6"];
    assert_eq!(names, expected);
}

#[test]
fn a_list_equal_to_that_of_a_cnn_is_the_same_host() {
    let cnn: HostSpec = "baseline".parse().unwrap();
    let json = meristem_grow::host_json(&cnn).unwrap();
    // What files of the first version have; readers of that version compare the text.
    let first = r#"{"version":1,"layers":[{"conv2d":{"name":"blocks.0.conv","out":8,"kernel":3}},"#;
    assert!(json.starts_with(first), "{json}");
    assert_eq!(HostSpec::from_json(&json, "mine").unwrap(), cnn);
    let other = HostSpec::try_from(Cnn { channels: 9, ..Cnn::default() }).unwrap();
    assert_ne!(other, cnn);
}

#[test]
fn ready_made_hosts_have_known_sizes() {
    // resnet20: 270 thousand parameters in He et al. 2015, table 6, whose shortcuts have none; the
    // two projections have 16·32 + 32·64 weights and two norms of 32 and 64 channels.
    let without_projections = 272_474 - (16 * 32 + 32 * 64) - 2 * (32 + 64);
    assert_eq!(without_projections, 269_722);
    for (name, parameters, macs) in [
        ("resnet8", 78_042, 12_501_632),
        ("resnet20", 272_474, 40_813_184),
        ("vgg8", 574_890, 33_916_160),
        ("mobile", 37_162, 4_592_896),
    ] {
        let host: HostSpec = name.parse().unwrap();
        let summary = host.summary(&CIFAR).unwrap();
        assert_eq!((summary.parameters, summary.macs), (parameters, macs), "{name}");
        assert_eq!(summary.slots, 4, "{name}");
    }
}

#[test]
fn a_multilayer_perceptron_is_its_widths() {
    let digits = TaskShape { channels: 1, height: 28, width: 28, classes: 10 };
    let host: HostSpec = "mlp:256, 128".parse().unwrap();
    let summary = host.summary(&digits).unwrap();
    let linear = |inputs: usize, outputs: usize| inputs * outputs + outputs;
    assert_eq!(summary.parameters, linear(784, 256) + linear(256, 128) + linear(128, 10));
    let slots: Vec<&str> = host.slots().iter().map(SlotName::as_str).collect();
    assert_eq!((&*slots, &*host.name()), (&["h0", "h1"][..], "mlp:256,128"));
    assert_eq!((host.text(), host.text().parse()), ("mlp:256,128".into(), Ok(host.clone())));
    let json = meristem_grow::host_json(&host).unwrap();
    assert_eq!(HostSpec::from_json(&json, "other").unwrap(), host);
    let many = format!("mlp:{}", ["1"; 33].join(","));
    for (text, words) in [
        ("mlp:", "host `mlp:`: expected the width of a hidden layer, got ``"),
        ("mlp:8,,8", "expected the width of a hidden layer, got ``"),
        ("mlp:8x", "expected the width of a hidden layer, got `8x`"),
        ("mlp:0", "`width of a hidden layer` must be 1 to 65536, got 0"),
        ("mlp:99999999999999999999", "got `99999999999999999999`"),
        (&*many, "`number of hidden layers` must be 1 to 32, got 33"),
    ] {
        let error = text.parse::<HostSpec>().unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
}

#[test]
fn dropout_has_a_probability_and_a_name() {
    let layers = format!(
        "{{ dropout = {{ p = 0.25 }} }}, {{ dropout = {{ p = 0, name = \"b\" }} }}, {HEAD}"
    );
    let host = toml(&layers).unwrap();
    let (first, second) = (HostLayer::dropout("layers.0", 0.25), HostLayer::dropout("b", 0.0));
    assert_eq!(host.layers()[..2], [first, second]);
    assert!(host.has_dropout() && !toml(HEAD).unwrap().has_dropout());
    assert_eq!(host.description().parse::<HostSpec>().unwrap(), host);
    // As in evaluation, it costs nothing.
    let [with, without] = [&*layers, HEAD].map(|layers| toml(layers).unwrap().summary(&CIFAR));
    let (with, without) = (with.unwrap(), without.unwrap());
    assert_eq!((with.parameters, with.macs), (without.parameters, without.macs));
    for (layer, words) in [
        ("{ dropout = { p = 1 } }", "`layers.0`: `p` must be from 0 to below 1, got 1"),
        ("{ dropout = { p = -0.5 } }", "from 0 to below 1, got -0.5"),
        ("\"dropout\"", "layers.0: `dropout`"),
        ("{ dropout = { rate = 0.5 } }", "unknown field `rate`"),
        (
            "{ dropout = { p = 0.5, name = \"a\" } }, { dropout = { p = 0.5, name = \"a\" } }",
            "two layers have the name `a`; draws are told apart by name",
        ),
    ] {
        let problem = problem(&format!("{layer}, {HEAD}"));
        assert!(problem.contains(words), "{layer}: {problem}");
    }
    let host: HostSpec = "mlp:16,8,dropout=0.2".parse().unwrap();
    assert_eq!((&*host.name(), host.text().parse()), ("mlp:16,8,dropout=0.2", Ok(host.clone())));
    let rates: Vec<String> = host.all_layers().iter().map(|layer| layer.to_string()).collect();
    let block =
        |out: &str| ["linear", "relu", "slot", "dropout, p 0.2"].map(|x| format!("{x}{out}"));
    let expected = [&["flatten".into()][..], &block(""), &block(""), &["linear".into()]].concat();
    assert_eq!(rates, expected);
    for text in ["mlp:16,dropout=1", "mlp:16,dropout=x", "mlp:dropout=0.1", "conv1d:8,dropout=0.1"]
    {
        let error = text.parse::<HostSpec>().unwrap_err().to_string();
        assert!(error.contains("expected"), "{text}: {error}");
    }
}

#[test]
fn convolutions_over_signals_are_their_channels() {
    let signals = TaskShape { channels: 1, height: 1, width: 40, classes: 10 };
    let host: HostSpec = "conv1d:16, 32,64".parse().unwrap();
    let summary = host.summary(&signals).unwrap();
    let block = |inputs: usize, out: usize| 5 * inputs * out + 2 * out;
    let blocks = block(1, 16) + block(16, 32) + block(32, 64);
    assert_eq!(summary.parameters, blocks + 64 * 10 + 10);
    let slots: Vec<&str> = host.slots().iter().map(SlotName::as_str).collect();
    assert_eq!((&*slots, &*host.name()), (&["c0", "c1", "c2"][..], "conv1d:16,32,64"));
    let at = |name: &str| {
        let is = |layer: &&meristem_grow::LayerSummary| layer.name.as_deref() == Some(name);
        summary.layers.iter().find(is).unwrap().output
    };
    assert_eq!([at("c0"), at("c1"), at("c2")], [[16, 1, 40], [32, 1, 20], [64, 1, 10]]);
    assert_eq!(host.text().parse(), Ok(host.clone()));
    let json = meristem_grow::host_json(&host).unwrap();
    assert_eq!(HostSpec::from_json(&json, "other").unwrap(), host);
    // Six pools of two halve 40 points to none.
    let deep: HostSpec = "conv1d:8,8,8,8,8,8,8".parse().unwrap();
    let error = deep.validate(&signals).unwrap_err().to_string();
    assert!(error.contains("blocks.6.pool"), "{error}");
    let error = host.validate(&CIFAR).unwrap_err().to_string();
    assert!(error.contains("one row and several points, and not samples of 3×32×32"), "{error}");
    let vectors = TaskShape { channels: 20, height: 1, width: 1, classes: 10 };
    assert!(host.validate(&vectors).is_err());
    for (text, words) in [
        ("conv1d:", "host `conv1d:`: expected the channels of a convolution, got ``"),
        ("conv1d:8,k=3", "expected the channels of a convolution, got `k=3`"),
        ("conv1d:70000", "`channels of a convolution` must be 1 to 65536, got 70000"),
    ] {
        let error = text.parse::<HostSpec>().unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
}

/// A vector of 8 features has 8 groups of one value, a vector of 64 has 4 groups of 16.
#[test]
fn layers_of_signals_are_those_of_images_of_one_row() {
    let signal = TaskShape { channels: 3, height: 1, width: 40, classes: 10 };
    let host = toml(&format!(
        "{{ conv1d = {{ out = 8, kernel = 5, stride = 2, bias = true }} }}, \"relu\", {{ max_pool1d
         = {{ kernel = 3, stride = 2 }} }}, {{ conv1d = {{ out = 6, kernel = 3, dilation = 2 }} }},
         {{ avg_pool1d = {{ kernel = 2 }} }}, {HEAD}"
    ));
    let host = host.unwrap();
    let summary = host.summary(&signal).unwrap();
    let shown: Vec<_> = summary.layers.iter().map(|at| (&*at.layer, at.output)).collect();
    assert_eq!(shown[0], ("conv 5, stride 2", [8, 1, 20]));
    assert_eq!(shown[2], ("max pool 3, stride 2", [8, 1, 9]));
    assert_eq!(shown[3], ("conv 3, dilation 2", [6, 1, 9]));
    assert_eq!(shown[4], ("average pool 2", [6, 1, 4]));
    assert_eq!(summary.parameters, 3 * 8 * 5 + 8 + 8 * 6 * 3 + 70);
    let again: HostSpec = host.description().parse().unwrap();
    assert_eq!((&again, again.description()), (&host, host.description()));
    // The layers of a signal's kernel can become wider, too.
    let widths: Vec<_> = host.widenable().into_iter().map(|at| (at.name, at.features)).collect();
    assert_eq!(widths, [("layers.0".into(), 8), ("layers.3".into(), 6)]);
    let wider = host.widened("layers.0", 2).unwrap();
    assert_eq!(wider.parameters(&signal).unwrap(), summary.parameters + 2 * (3 * 5 + 1 + 6 * 3));
    assert!(wider.is_as_wide_as(&host) && !host.is_as_wide_as(&wider));
}

#[test]
fn a_blueprint_that_cannot_learn_in_a_slot_is_illegal_there() {
    let host = crate::common::host("mlp:8,64", CIFAR, Rules::default());
    for (index, blueprint) in host.blueprints().iter().enumerate() {
        let misfits =
            LifecycleError::DoesNotFit { slot: "h0".into(), blueprint: blueprint.name.clone() };
        let narrow = if blueprint.name == "attention" { Ok(()) } else { Err(misfits) };
        assert_eq!(host.check_germinate(0, index), narrow, "{}", blueprint.name);
        assert_eq!(host.check_germinate(1, index), Ok(()), "{}", blueprint.name);
    }
    let images = crate::common::host("minimal", CIFAR, Rules::default());
    assert!((0..7).all(|index| images.check_germinate(0, index).is_ok()));
    let spec: HostSpec = "minimal".parse().unwrap();
    let (slots, vectors) = (spec.slots().to_vec(), Arc::new(BlueprintSet::vectors()));
    let host = Host::new(spec, CIFAR, &slots, vectors, Rules::default()).unwrap();
    for (index, blueprint) in host.blueprints().iter().enumerate() {
        let (slot, blueprint) = (host.slots()[0].name.clone(), blueprint.name.clone());
        let misfits = LifecycleError::DoesNotFit { slot, blueprint };
        assert_eq!(host.check_germinate(0, index), Err(misfits));
    }
    // Parameters of blueprints that fit no slot are not possible.
    let [own, grown] = [&host, &images].map(|host| host.possible_parameters().unwrap());
    assert!(own.is_subset(&grown) && own.len() < grown.len(), "{own:?}");
}

#[test]
fn slots_have_forward_order_unless_listed() {
    let layers = format!(
        "{{ slot = {{ name = \"a\" }} }}, {{ residual = {{ body = [{{ slot = {{ name = \"b\" }} }},
         \"relu\"] }} }}, {{ slot = {{ name = \"c\" }} }}, {HEAD}"
    );
    let names = |host: &HostSpec| host.slots().iter().map(SlotName::as_str).collect::<String>();
    assert_eq!(names(&toml(&layers).unwrap()), "abc");
    let listed = format!("slots = [\"c\", \"a\", \"b\"]\nlayers = [{layers}]");
    assert_eq!(names(&HostSpec::from_toml(&listed, "test").unwrap()), "cab");
    for (slots, words) in [
        ("\"a\", \"b\"", "`slots` lacks the slot `c`"),
        ("\"a\", \"b\", \"c\", \"a\"", "`slots` has `a` twice"),
        ("\"a\", \"b\", \"d\"", "`slots` has `d`, but no layer"),
    ] {
        let text = format!("slots = [{slots}]\nlayers = [{layers}]");
        let error = HostSpec::from_toml(&text, "test").unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Checks that each description is refused with an error that has the words.
fn are_refused(mistakes: &[(String, &str)]) {
    for (layers, words) in mistakes {
        let shown = problem(layers);
        assert!(shown.contains(words), "{layers:.120}:\n{shown}");
    }
}

#[test]
fn mistakes_in_layers_are_named_with_their_place() {
    let conv = |keys: &str| format!("{{ conv2d = {{ {keys} }} }}, {HEAD}");
    are_refused(&[
        (String::new(), "`layers` is empty"),
        ("\"relu\"".into(), "its last layer gives 3×32×32"),
        ("\"relu\", \"rellu\"".into(), "layers.1: unknown layer `rellu`; did you mean `relu`?"),
        ("7".into(), "layers.0: expected a layer"),
        ("{ conv2d = 3 }".into(), "layers.0: `conv2d`: expected its keys"),
        ("{ relu = {}, tanh = {} }".into(), "layers.0: expected a layer"),
        ("{ relu = {}, tanh = {} }".into(), "give each layer braces for itself"),
        ("{ relu = {}, a = 1, b = 2 }".into(), "put `a`, `b` into the braces of `relu`"),
        (conv("kernel = 3"), "layers.0: `conv2d`: missing field `out`"),
        (conv("out = 4, kernal = 3"), "unknown field `kernal`"),
        (conv("out = 4, kernel = -3"), "layers.0: `conv2d`: expected a whole number"),
        (conv("out = 4, kernel = [1, 2, 3]"), "expected a whole number, or [rows, columns]"),
        (conv("out = 4, kernel = 4"), "`layers.0`: padding `same` needs an odd kernel, got 4×4"),
        (conv("out = 0, kernel = 3"), "`layers.0`: `out` must be 1 to 65536, got 0"),
        (conv("out = 4, kernel = 3, stride = 0"), "`stride` must be 1 to 1024, got 0"),
        (conv("out = 4, kernel = 3, groups = 0"), "`groups` must be 1 to 65536, got 0"),
        (
            conv("out = 16, kernel = 3, groups = 2, name = \"block2.conv\""),
            "host `test`, layer 0 \"block2.conv\": 2 groups do not divide 3 input and 16 output",
        ),
        (
            conv("out = 4, kernel = 64, padding = \"valid\""),
            "layer 0 \"layers.0\": a 64x64 window does not fit a 32x32 image",
        ),
        (conv("out = 4, kernel = 3, name = \"slots.a\""), "begins with `slots`"),
        (conv("out = 4, kernel = 3, name = \"training\""), "begins with `training`"),
        (conv("out = 4, kernel = 3, name = \"a..b\""), "has an empty part"),
        (conv("out = 4, kernel = 3, name = \"a b\""), "a layer must have 1 to 120 letters"),
    ]);
}

#[test]
fn mistakes_in_names_and_branches_are_named_with_their_place() {
    let slot = |name: &str| format!("{{ slot = {{ name = \"{name}\" }} }}");
    let deep = (0..10).fold("\"relu\"".to_string(), |inner, _| {
        format!("{{ residual = {{ body = [{inner}] }} }}")
    });
    are_refused(&[
        (format!("{}, {}, {HEAD}", slot("a"), slot("a")), "two slots have the name `a`"),
        (format!("{}, {HEAD}", slot("all")), "a slot cannot have the name `all`"),
        (format!("{}, {HEAD}", slot("a.b")), "the name of a slot must have 1 to 120 letters"),
        (
            format!(
                "{{ batch_norm = {{ name = \"a\" }} }}, {{ batch_norm = {{ name = \"a\" }} }},
                 {HEAD}"
            ),
            "two layers have the name `a`",
        ),
        (
            format!(
                "{{ residual = {{ body =
                    [{{ conv2d = {{ out = 4, kernel = 3, stride = 2 }} }}] }} }}, {HEAD}"
            ),
            "layer 0 \"layers.0\": a sum needs values of one shape, but the first is 4×16×16 and \
             number 2 is 3×32×32",
        ),
        (format!("{{ residual = {{ body = [] }} }}, {HEAD}"), "at least one layer in `body`"),
        (format!("{{ leaky_relu = {{ slope = -0.1 }} }}, {HEAD}"), "`slope` must be a number"),
        (format!("{{ leaky_relu = {{ slope = nan }} }}, {HEAD}"), "`leaky_relu`: invalid type"),
        (
            format!("{{ residual = {{ body = [\"relu\"], tail = [] }} }}, {HEAD}"),
            "layers.0: `residual`: unknown key `tail`",
        ),
        (
            format!("{{ residual = {{ body = [\"relu\", \"gelo\"] }} }}, {HEAD}"),
            "layers.0.body.1: unknown layer `gelo`",
        ),
        (
            format!("{{ branches = {{ join = \"add\", branches = [[\"relu\"]] }} }}, {HEAD}"),
            "expected at least 2 branches, got 1",
        ),
        (
            format!("{{ branches = {{ join = \"ad\", branches = [[], []] }} }}, {HEAD}"),
            "layers.0: `branches`: join: unknown variant `ad`",
        ),
        (format!("{deep}, {HEAD}"), "at most 8 layers may be nested"),
    ]);
}

#[test]
fn mistakes_in_saved_values_and_joins_are_named_with_their_place() {
    are_refused(&[
        (
            format!("{}, {}, {HEAD}", "{ save = { name = \"a\" } }", "{ save = { name = \"a\" } }"),
            "two values are saved as `a`",
        ),
        (
            format!(
                "{{ join = {{ join = \"add\", from = [\"a\"] }} }}, {{ save = {{ name = \"a\" }} }},
                 {HEAD}"
            ),
            "`a` is joined before it is saved",
        ),
        (
            format!(
                "{{ save = {{ name = \"tap\" }} }},
                 {{ join = {{ join = \"add\", from = [\"tab\"] }} }}, {HEAD}"
            ),
            "which no `save` has as its name; did you mean `tap`?",
        ),
        (format!("{{ join = {{ join = \"add\", from = [] }} }}, {HEAD}"), "no values in `from`"),
        (
            format!("{{ load = {{ name = \"a\" }} }}, {{ save = {{ name = \"a\" }} }}, {HEAD}"),
            "`a` is loaded before it is saved",
        ),
        (
            format!("{{ save = {{ name = \"tap\" }} }}, {{ load = {{ name = \"tab\" }} }}, {HEAD}"),
            "`load` has the name `tab`, which no `save` has; did you mean `tap`?",
        ),
        (
            format!(
                "{{ save = {{ name = \"a\" }} }}, \"relu\", {{ load = {{ name = \"a\" }} }}, {HEAD}"
            ),
            "layer 1: no later layer uses its output, because a `load` follows",
        ),
        (
            format!(
                "{{ branches = {{ join = \"multiply\", branches = [[],
                    [\"global_avg_pool\", {{ linear = {{ out = 2 }} }}]] }} }}, {HEAD}"
            ),
            "a product needs values of one shape, or an image and one value for each of its \
             channels, but the first is 3×32×32 and number 2 is 2×1×1",
        ),
        (
            format!(
                "{{ branches = {{ join = \"add\", branches = [[], [\"global_avg_pool\"]] }} }},
                 {HEAD}"
            ),
            "a sum needs values of one shape, but the first is 3×32×32 and number 2 is 3×1×1",
        ),
        (
            format!("{{ max_pool2d = {{ kernel = 3, padding = 2 }} }}, {HEAD}"),
            "layer 0 \"layers.0\":",
        ),
        (
            format!(
                "{{ conv2d = {{ out = 256, kernel = 1 }} }}, \"flatten\",
                     {{ conv2d = {{ out = 65536, kernel = 1023 }} }}, {HEAD}"
            ),
            "at most 268435456 are supported",
        ),
    ]);
}

#[test]
fn mistakes_in_sizes_are_named_with_their_place() {
    are_refused(&[
        ("{ linear = { out = \"classes\" } }".into(), "expected one vector per sample"),
        (
            "\"global_avg_pool\", { linear = { out = 9 } }".into(),
            "its last layer gives 9×1×1, and the data needs 10×1×1",
        ),
        ("\"global_avg_pool\", { linear = { out = \"clases\" } }".into(), "layers.1: `linear`:"),
        (
            format!("{{ conv2d = {{ out = 65536, kernel = 63 }} }}, {HEAD}"),
            "at most 268435456 are supported",
        ),
        (
            format!(
                "{{ conv2d = {{ out = 1, kernel = 1, padding = 1024 }} }}, {} {HEAD}",
                "{ conv2d = { out = 1, kernel = 1, padding = 1024 } },".repeat(40)
            ),
            "at most 65536 rows and columns",
        ),
        (format!("{} {HEAD}", "\"relu\",".repeat(5000)), "5002 layers; at most 4096"),
        (
            format!("{{ conv1d = {{ out = 8, kernel = 3 }} }}, {HEAD}"),
            "layer 0 \"layers.0\": it takes signals, which have one row, and not 3×32×32; use \
             `conv2d`",
        ),
        (format!("{{ avg_pool1d = {{ kernel = 2 }} }}, {HEAD}"), "use `avg_pool2d`"),
        (format!("{{ conv1d = {{ out = 8, kernel = [1, 3] }} }}, {HEAD}"), "layers.0: `conv1d`:"),
        (format!("{{ conv1d = {{ out = 8, kernel = 4 }} }}, {HEAD}"), "needs an odd kernel"),
        (format!("{{ max_pool1d = {{ kernel = 0 }} }}, {HEAD}"), "`kernel` must be 1 to"),
    ]);
}

#[test]
fn a_description_has_a_version_and_a_size() {
    let head = format!("layers = [{HEAD}]");
    let parse = |text: &str| HostSpec::from_toml(text, "test");
    parse(&format!("version = 2\n{head}")).unwrap();
    for (text, words) in [
        (format!("version = 3\n{head}\nsomething = 1"), "it has version 3"),
        (format!("version = 0\n{head}"), "`version` must be 1 or 2, got 0"),
        (format!("name = \"a b\"\n{head}"), "the name of the host must have"),
        (format!("layer = 1\n{head}"), "unknown field `layer`"),
        ("name = \"a\"".into(), "missing field `layers`"),
        ("layers = 3".into(), "invalid type"),
        ("layers = [".into(), "TOML parse error"),
        (format!("# {}\n{head}", "x".repeat(10 << 20)), "bytes; at most 1048576 are read"),
    ] {
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.contains(words), "{text:.40}:\n{error}");
    }
    let error = "{\"layers\": [}".parse::<HostSpec>().unwrap_err().to_string();
    assert!(error.contains("line 1 column 13"), "{error}");
}

#[test]
fn unusual_hosts_are_accepted() {
    let many = "{ conv2d = { out = 4, kernel = 3 } }, \"batch_norm\",".repeat(100);
    let dot = TaskShape { height: 1, width: 1, ..CIFAR };
    let classes = TaskShape { classes: 65_000, ..CIFAR };
    let host = |layers: &str| toml(&format!("{layers} {HEAD}")).unwrap();
    assert_eq!(host(&many).summary(&CIFAR).unwrap().layers.len(), 202);
    let one = "{ conv2d = { out = 1, kernel = 1 } }, { slot = { name = \"one\" } },";
    for image in [CIFAR, dot, classes] {
        host(one).validate(&image).unwrap();
        host("").validate(&image).unwrap();
        host("\"relu\", { slot = { name = \"first\" } }, \"batch_norm\",")
            .validate(&image)
            .unwrap();
    }
    let linear = toml(&format!("{HEAD}, {{ slot = {{ name = \"logits\" }} }}")).unwrap();
    linear.validate(&CIFAR).unwrap();
}

proptest! {
    /// Any JSON in the place of layers is a host or an error.
    #[test]
    fn no_description_panics_the_reader(text in "[\\[\\]{}\",:a-z0-9_. ]{0,80}") {
        let _ = HostSpec::from_json(&text, "any");
        let _ = HostSpec::from_toml(&text, "any");
        let _ = HostSpec::from_json(&format!("{{\"layers\": [{text}]}}"), "any");
    }
}
