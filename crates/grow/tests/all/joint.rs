//! Modules that are part of their host from the first step.

use meristem_grow::{
    Birth, BlueprintSet, Curve, Gates, Host, Optimisers, Rules, SlotClass, Speed, Stage, Style,
    Topology,
};
use meristem_nn::graph::NodeOp;

use crate::common::{CIFAR, grow_to, host};

const SLOT: &str = "r0c0";

fn rules() -> Rules {
    let gates = Gates::default().quick();
    Rules { birth: Birth::Joint, min_prune_age_steps: 0, gates, ..Rules::default() }
}

fn in_stage(stage: Stage) -> Host {
    let mut host = host("baseline", CIFAR, rules());
    grow_to(&mut host, SLOT, 0, Style::LinearAdd, stage);
    host
}

#[test]
fn a_joint_module_is_in_its_host_from_training_on() {
    for stage in [Stage::Training, Stage::Blending, Stage::Holding, Stage::Fossilized] {
        let host = in_stage(stage);
        let SlotClass::Fossilized { .. } = host.topology_key().slots[0] else {
            panic!("{stage}: {:?}", host.topology_key().slots[0])
        };
        assert_eq!(host.alphas()[0], 1.0, "{stage}");
        let graph = host.graph(&Optimisers::default()).unwrap();
        assert!(!graph.nodes.iter().any(|node| matches!(node.op, NodeOp::Detach(_))), "{stage}");
    }
    let germinated = in_stage(Stage::Germinated);
    assert_eq!(germinated.topology_key().slots[0], SlotClass::Empty);
    assert_eq!(germinated.alphas()[0], 0.0);
}

#[test]
fn a_slow_prune_lowers_the_alpha_of_a_joint_module() {
    let mut host = in_stage(Stage::Holding);
    host.prune(0, Speed::Fast, Curve::Linear).unwrap();
    let mut alphas = vec![host.alphas()[0]];
    for _ in 0..2 {
        host.step();
        alphas.push(host.alphas()[0]);
    }
    assert!(alphas[0] == 1.0 && alphas.is_sorted_by(|a, b| a > b), "{alphas:?}");
}

#[test]
fn a_joint_module_in_training_is_pruned_at_once() {
    let mut host = in_stage(Stage::Training);
    host.prune(0, Speed::Slow, Curve::Linear).unwrap();
    assert_eq!(host.slots()[0].stage, Stage::Pruned);
}

#[test]
fn a_joint_module_in_training_becomes_permanent_in_a_fixed_network() {
    let mut host = in_stage(Stage::Training);
    host.make_permanent();
    assert_eq!(host.slots()[0].stage, Stage::Fossilized);
}

#[test]
fn files_say_whether_a_module_is_joint() {
    for stage in [Stage::Germinated, Stage::Training, Stage::Holding] {
        let host = in_stage(stage);
        let text = Topology::from_host(&host).to_json().unwrap();
        let read = Topology::from_json(&text).unwrap();
        assert_eq!(read.rebuild(&BlueprintSet::standard(), rules()).unwrap(), host, "{stage}");
        // Without the entry a module is aside.
        let aside = text.replace(r#""birth":"joint","#, "");
        assert_ne!(aside, text);
        let read = Topology::from_json(&aside).unwrap();
        let rebuilt = read.rebuild(&BlueprintSet::standard(), rules()).unwrap();
        assert_eq!(rebuilt.slots()[0].module.as_ref().unwrap().birth, Birth::Aside, "{stage}");
    }
}
