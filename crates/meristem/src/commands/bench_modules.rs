//! Hosts that have live modules from the start, for benchmarks.

use std::sync::Arc;

use meristem::grow::{
    self, AlphaTarget, Birth, BlueprintSet, GateInputs, Gates, Germination, GradientHealth, Host,
    HostSpec, Rules, SlotName, Stage, Style, Tempo,
};

use crate::failure::Failure;
use crate::synthetic::image_shape;

/// A module that a host has from the start.
pub(super) struct Module {
    pub(super) slot: SlotName,
    /// Name of its blueprint.
    pub(super) blueprint: String,
    /// Training or holding.
    pub(super) stage: Stage,
}

/// Parses a list such as `r0c0=conv_heavy,r0c1=depthwise:training`. The default stage is holding.
pub(super) fn parse(spec: &HostSpec, list: &str) -> Result<Vec<Module>, Failure> {
    let refused = |got: &str| {
        Failure::value("modules", got, "SLOT=BLUEPRINT, or SLOT=BLUEPRINT:training, with commas")
    };
    let module = |entry: &str| {
        let (slot, module) = entry.trim().split_once('=').ok_or_else(|| refused(entry))?;
        let (blueprint, stage) = module.split_once(':').unwrap_or((module, "holding"));
        let stage = [Stage::Training, Stage::Holding].into_iter().find(|s| s.to_string() == stage);
        let slots = spec.select_slots([slot]).map_err(grow::Error::from)?;
        let [slot] = &slots[..] else { return Err(refused(entry)) };
        let stage = stage.ok_or_else(|| refused(entry))?;
        Ok(Module { slot: slot.clone(), blueprint: blueprint.to_string(), stage })
    };
    list.split(',').map(module).collect()
}

/// Creates a host with `modules`, each in its stage. Errors name the flag `argument`.
pub(super) fn grown(
    spec: HostSpec,
    modules: &[Module],
    argument: &'static str,
) -> Result<Host, Failure> {
    let set = Arc::new(BlueprintSet::standard());
    let slots: Vec<SlotName> = modules.iter().map(|module| module.slot.clone()).collect();
    let rules =
        // As the peer, `bench/torch_host.py`, whose modules have detached inputs.
        Rules {
            birth: Birth::Aside,
            max_modules: slots.len(),
            gates: Gates::default().quick(),
            ..Rules::default()
        };
    let mut host = Host::new(spec, image_shape(), &slots, Arc::clone(&set), rules)?;
    let passes = GateInputs {
        gradient_health: GradientHealth::from_norms(&[1.0]),
        contribution_pp: Some(100.0),
        ..GateInputs::default()
    };
    for module in modules {
        let known = set.iter().position(|blueprint| blueprint.name == module.blueprint);
        let names: Vec<&str> = set.iter().map(|blueprint| &*blueprint.name).collect();
        let blueprint = known.ok_or_else(|| {
            let expected = format!("one of {}", names.join(", "));
            Failure::value(argument, &module.blueprint, expected)
        })?;
        let (tempo, alpha_target, style) = (Tempo::Fast, AlphaTarget::Most, Style::LinearAdd);
        let germination = Germination { blueprint, style, tempo, alpha_target, score_pp: None };
        let slot = host.slots().iter().position(|slot| slot.name == module.slot);
        let slot = slot.expect("the host was made with the slots of its modules");
        host.germinate(slot, germination).map_err(grow::Error::from)?;
        while host.slots()[slot].stage != module.stage {
            host.step();
            host.advance(slot, &passes).map_err(grow::Error::from)?;
        }
    }
    Ok(host)
}
