//! Modules that are part of their host from the first step.

use meristem_grow::{
    AlphaTarget, Birth, BlueprintSet, Counterfactual, Curve, Gates, Germination, Host, ModuleScope,
    Optimisers, Rules, SlotClass, Speed, Stage, Style, Topology,
};
use meristem_nn::graph::NodeOp;

use crate::common::{CIFAR, fine, germination, grow_to, host};

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
        let SlotClass::BlendedWithGradient { .. } = host.topology_key().slots[0] else {
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
    // Whatever alpha its blending has: none in Training, half of it with this target.
    let mut half = host("baseline", CIFAR, rules());
    let germination =
        Germination { alpha_target: AlphaTarget::Half, ..germination(0, Style::LinearAdd) };
    half.germinate(0, germination).unwrap();
    while half.slots()[0].stage != Stage::Holding {
        half.step();
        half.advance(0, &fine()).unwrap();
    }
    for mut host in [half, in_stage(Stage::Holding), in_stage(Stage::Training)] {
        host.prune(0, Speed::Fast, Curve::Linear).unwrap();
        let mut alphas = vec![host.alphas()[0]];
        for _ in 0..3 {
            host.step();
            alphas.push(host.alphas()[0]);
        }
        // Three steps, linear.
        assert_eq!(alphas, [1.0, 2.0 / 3.0, 1.0 / 3.0, 0.0]);
        assert_eq!(host.slots()[0].stage, Stage::Pruned);
    }
}

#[test]
fn a_joint_module_in_training_is_left_out_where_modules_are() {
    let host = in_stage(Stage::Training);
    let rows = Counterfactual::leave_one_out(&host, ModuleScope::Live);
    let alphas: Vec<f32> = rows.rows().iter().map(|row| row[0]).collect();
    assert_eq!(alphas, [1.0, 0.0]);
    let aside = Rules { birth: Birth::Aside, ..rules() };
    let mut host = self::host("baseline", CIFAR, aside);
    grow_to(&mut host, SLOT, 0, Style::LinearAdd, Stage::Training);
    assert_eq!(Counterfactual::leave_one_out(&host, ModuleScope::Live).rows().len(), 1);
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
