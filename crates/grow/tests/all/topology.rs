//! Topologies: a file restores the host, and contradictory fields are errors.

use std::sync::Arc;

use meristem_grow::{
    Blueprint, BlueprintError, BlueprintLayer, BlueprintSet, Channels, Error, Host, Join,
    Optimisers, Rules, Stage, Style, Topology, TopologyError, host_json,
};
use serde_json::{Value, json};

use crate::common::{CIFAR, grow_to, host};

fn grown() -> Host {
    let mut host = host("baseline", CIFAR, Rules::default());
    grow_to(&mut host, "r0c1", 4, Style::LinearGate, Stage::Fossilized);
    grow_to(&mut host, "r1c0", 1, Style::SigmoidAdd, Stage::Blending);
    host.step();
    host
}

fn rebuild(json: &str) -> Result<Host, Error> {
    Topology::from_json(json)?.rebuild(&BlueprintSet::standard(), Rules::default())
}

#[test]
fn a_file_restores_a_grown_host() {
    let host = grown();
    let text = Topology::from_host(&host).to_json().unwrap();
    let back = rebuild(&text).unwrap();
    assert_eq!(back, host);
    assert_eq!(
        back.graph(&Optimisers::default()).unwrap(),
        host.graph(&Optimisers::default()).unwrap()
    );
    assert_eq!(back.topology_key(), host.topology_key());
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        value["host"], "cnn:channels=8,blocks=3,kernel=3,pools=3",
        "no preset that may change"
    );
    assert_eq!(value["slots"][1]["module"]["blueprint"], "conv_small");
    assert_eq!(value["slots"][1]["stage"], "fossilized");
}

#[test]
fn a_file_includes_a_user_blueprint() {
    let own = Blueprint::new(
        "own",
        vec![
            BlueprintLayer::Conv { out: Channels::Same, kernel: 5, depthwise: true },
            BlueprintLayer::GroupNorm { zero: true },
        ],
        Join::Residual,
    );
    let set = Arc::new(BlueprintSet::empty().with(own.clone()).unwrap());
    let slot = "r0c0";
    let mut host =
        Host::new("baseline".parse().unwrap(), CIFAR, &[slot.into()], set, Rules::default())
            .unwrap();
    grow_to(&mut host, slot, 0, Style::LinearAdd, Stage::Holding);
    let text = Topology::from_host(&host).to_json().unwrap();
    let back = rebuild(&text).unwrap();
    assert_eq!(back.blueprints().len(), 8);
    assert_eq!(
        back.graph(&Optimisers::default()).unwrap(),
        host.graph(&Optimisers::default()).unwrap()
    );
    // A different blueprint with the same name is an error.
    let other = Blueprint {
        join: Join::TanhMix,
        layers: vec![BlueprintLayer::GroupNorm { zero: false }],
        ..own
    };
    let set = BlueprintSet::standard().with(other).unwrap();
    let error = Topology::from_json(&text).unwrap().rebuild(&set, Rules::default()).unwrap_err();
    let duplicate = matches!(error, Error::Blueprint(BlueprintError::Duplicate { .. }));
    assert!(duplicate && error.to_string().contains("`own`"), "{error:?}");
}

/// The topology of `grown` with one value replaced; `Value::Null` removes it.
fn broken(pointer: &str, value: Value) -> Result<Host, Error> {
    let mut tree: Value =
        serde_json::from_str(&Topology::from_host(&grown()).to_json().unwrap()).unwrap();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = tree.pointer_mut(parent).unwrap_or_else(|| panic!("{pointer}"));
    match (parent, value) {
        (Value::Object(map), Value::Null) => drop(map.remove(key).unwrap()),
        (Value::Object(map), value) => drop(map.insert(key.into(), value)),
        (Value::Array(list), value) => list[key.parse::<usize>().unwrap()] = value,
        _ => panic!("{pointer}"),
    }
    rebuild(&tree.to_string())
}

#[test]
fn contradictory_files_are_rejected() {
    broken("/slots/1/stage_steps", json!(7)).unwrap(); // a valid replacement succeeds
    for (pointer, value) in [
        ("/host", json!("cnn:channels=0")),
        ("/host", json!("cnn:channels=8,blocks=2")), // it has no slot r0c2
        ("/host", json!("deepest")),
        ("/host", Value::Null),
        ("/surprise", json!(1)),
        ("/image/height", json!(4)),
        ("/image/classes", json!(0)),
        ("/blueprints", json!([])), // known blueprints may be absent
        ("/slots/0/slot", json!("r0c1")),
        ("/slots/0/slot", json!("r9c1")),
        ("/slots/0/stage", json!("training")),
        ("/slots/0/stage", json!("asleep")),
        ("/slots/1/module", Value::Null),
        ("/slots/1/stage", json!("dormant")),
        ("/slots/1/stage", json!("training")),
        ("/slots/1/module/blueprint", json!("conv_smal")),
        ("/slots/1/module/alpha/alpha", json!(0.5)),
        ("/slots/1/module/alpha/alpha", json!(2)),
        ("/slots/1/module/alpha/target", json!("x")),
        ("/slots/1/module/alpha_target", json!(1.5)),
        ("/slots/1/module/pruning", json!(true)),
        ("/slots/1/module/age_steps", json!(-1)),
        ("/slots/3/stage", json!("holding")),
        ("/slots/3/module/alpha/steps_done", json!(9)),
        ("/slots/3/module/alpha/mode", json!("down")),
    ] {
        let fine = pointer == "/blueprints";
        let result = broken(pointer, value.clone());
        assert_eq!(result.is_ok(), fine, "{pointer} = {value}: {:?}", result.map(|_| ()));
    }
}

#[test]
fn errors_name_the_slot() {
    let error = broken("/slots/1/module/blueprint", json!("conv_smal")).unwrap_err();
    assert!(matches!(error, Error::Topology(TopologyError::Slot { .. })), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("slot r0c1") && text.contains("did you mean `conv_small`"), "{text}");
    let error = broken("/version", json!(2)).unwrap_err();
    assert!(error.to_string().contains("a newer program wrote the file"), "{error}");
    let Error::Topology(TopologyError::Version { entry: "topology", found: 2, supported: 1 }) =
        error
    else {
        panic!("{error}")
    };
    for text in ["", "{", "[]", "null", "{\"version\": 1}", "{\"version\": \"1\"}"] {
        assert!(matches!(rebuild(text), Err(Error::Topology(TopologyError::Parse(_)))), "{text}");
    }
}

#[test]
fn the_layers_of_a_file_match_its_host() {
    let topology = Topology::from_host(&grown());
    let json = host_json(&topology.host).unwrap();
    let list: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(list["version"], 1);
    assert_eq!(list["slots"], json!(["r0c0", "r0c1", "r0c2", "r1c0", "r1c1", "r1c2"]));
    let block = json!([
        {"conv2d": {"name": "blocks.2.conv", "out": 32, "kernel": 3}},
        {"batch_norm": {"name": "blocks.2.bn"}},
        "relu",
        {"slot": {"name": "r0c2"}},
        {"max_pool2d": {"name": "blocks.2.pool", "kernel": 2}},
        {"slot": {"name": "r1c2"}},
        "global_avg_pool",
        {"linear": {"name": "classifier", "out": "classes"}},
    ]);
    assert_eq!(list["layers"].as_array().unwrap()[12..], *block.as_array().unwrap());
    topology.check_host(&json).unwrap();
    let other = |text: &str, new: &str| {
        assert!(json.contains(text), "{text}");
        json.replace(text, new)
    };
    for bad in [
        "{}".into(),
        json[1..].to_string(),
        other("\"kernel\":2", "\"kernel\":3"),
        other("conv2d", "conv1d"),
        other("\"slots\":[\"r0c0\",\"r0c1\"", "\"slots\":[\"r0c1\",\"r0c0\""),
    ] {
        let error = topology.check_host(&bad).unwrap_err();
        assert!(matches!(error, Error::Topology(TopologyError::Host { .. })), "{error:?}");
    }
    // A later version, whatever it has: its forms of layers and its keys may be unknown here.
    let later = other("\"version\":1", "\"version\":3");
    for later in [later.replace("conv2d", "conv9d"), later.replace("layers", "units"), later] {
        let error = topology.check_host(&later).unwrap_err();
        assert!(error.to_string().contains("a newer program wrote the file"), "{error}");
        let Error::Topology(TopologyError::Version { entry: "host", found: 3, supported: 2 }) =
            error
        else {
            panic!("{error:?}")
        };
    }
}
