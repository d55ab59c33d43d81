//! Helpers shared by the tests of this crate.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

use std::sync::Arc;

use meristem_grow::{
    AlphaTarget, Birth, BlueprintSet, GateInputs, Germination, GradientHealth, Host, HostSpec,
    Rules, Stage, Style, TaskShape, Tempo,
};

/// The shape of CIFAR-10.
pub(crate) const CIFAR: TaskShape = TaskShape { channels: 3, height: 32, width: 32, classes: 10 };

/// A host with the standard blueprints and all slots enabled.
pub(crate) fn host(spec: &str, image: TaskShape, rules: Rules) -> Host {
    let spec: HostSpec = spec.parse().unwrap();
    let slots = spec.slots().to_vec();
    Host::new(spec, image, &slots, Arc::new(BlueprintSet::standard()), rules).unwrap()
}

/// Rules with which new modules learn beside their host.
pub(crate) fn aside() -> Rules {
    Rules { birth: Birth::Aside, ..Rules::default() }
}

/// Measurements that every gate accepts.
pub(crate) fn fine() -> GateInputs {
    GateInputs {
        gradient_health: GradientHealth::from_norms(&[1.0, 0.5]),
        contribution_pp: Some(3.0),
        ..GateInputs::default()
    }
}

/// A germination with defaults except for blueprint and style.
pub(crate) fn germination(blueprint: usize, style: Style) -> Germination {
    let (tempo, alpha_target) = (Tempo::Fast, AlphaTarget::Full);
    Germination { blueprint, style, tempo, alpha_target, score_pp: Some(40.0) }
}

/// Advances a module to a stage from Germinated to Fossilized.
pub(crate) fn grow_to(host: &mut Host, slot: &str, blueprint: usize, style: Style, stage: Stage) {
    let index = host.index_of(slot).unwrap();
    host.germinate(index, germination(blueprint, style)).unwrap();
    let mut steps = 0;
    while host.slots()[index].stage != stage {
        host.step();
        match host.slots()[index].stage {
            Stage::Holding => host.fossilize(index, &fine()).unwrap(),
            _ => host.advance(index, &fine()).unwrap(),
        };
        steps += 1;
        assert!(steps < 100, "{slot} never became {stage}");
    }
}
