//! A host as JSON: the entries `topology` and `host` in the metadata of a weights file.
//!
//! The entry `topology` includes the blueprints in use. A program can therefore evaluate a network
//! with a blueprint that the program itself does not define.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::blueprint::{Blueprint, BlueprintError};
use crate::blueprint_set::BlueprintSet;
use crate::error::{Result, TopologyError};
use crate::host::Host;
use crate::lifecycle::{AlphaController, Birth, Module, Rules, Slot, Stage, Style, Tempo};
use crate::spec::{HostSpec, LIST_VERSION, SlotName, TaskShape};

/// Version of the format. A new version marks a format that older readers would misread.
pub const TOPOLOGY_VERSION: u32 = 1;

/// A host as stored in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// [`TOPOLOGY_VERSION`].
    pub version: u32,
    /// The host; written as [`HostSpec::description`], read in any text form.
    pub host: HostSpec,
    /// The host before any layer was widened; `None` if none was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub widened_from: Option<HostSpec>,
    /// The shape of images and classes.
    pub image: TaskShape,
    /// The blueprints of all modules, each once.
    pub blueprints: Vec<Blueprint>,
    /// The enabled slots in index order.
    pub slots: Vec<TopologySlot>,
}

/// A slot as stored in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopologySlot {
    /// Name.
    pub slot: SlotName,
    /// Stage.
    pub stage: Stage,
    /// Epochs begun in this stage.
    pub stage_steps: u32,
    /// The module.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module: Option<TopologyModule>,
}

/// A module as stored in a file, with the fields of [`Module`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopologyModule {
    /// Name of the blueprint.
    pub blueprint: String,
    /// Place in the network until it is fossilized.
    #[serde(default = "Birth::aside", skip_serializing_if = "Birth::is_aside")]
    pub birth: Birth,
    /// Blending style.
    pub style: Style,
    /// Duration of the first blending.
    pub tempo: Tempo,
    /// Alpha at the end of the first blending.
    pub alpha_target: f32,
    /// Alpha and its last move.
    pub alpha: AlphaController,
    /// Steps since germination.
    pub age_steps: u32,
    /// Whether the module is being removed.
    pub pruning: bool,
    /// Control score at germination, in percentage points.
    #[serde(rename = "accuracy_at_germination_pp")]
    pub score_at_germination_pp: Option<f32>,
}

/// Serialises the layers and slots of a host to one line of JSON: the entry `host` of the metadata,
/// for readers that cannot parse the host's text.
///
/// # Errors
/// [`TopologyError::Parse`] for a value that JSON cannot represent, which no host has.
pub fn host_json(host: &HostSpec) -> Result<String> {
    Ok(serde_json::to_string(host.list()).map_err(TopologyError::Parse)?)
}

/// Parses the version of an entry, and ignores its other keys.
fn version_of(json: &str) -> serde_json::Result<u32> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    serde_json::from_str::<Version>(json).map(|entry| entry.version)
}

/// Checks the version before the rest, so that a newer entry is reported as newer, and not as
/// misspelt or contradictory.
fn check_version(entry: &'static str, found: u32, supported: u32) -> Result<(), TopologyError> {
    if found == supported {
        Ok(())
    } else {
        Err(TopologyError::Version { entry, found, supported })
    }
}

impl TopologySlot {
    fn from_slot(slot: &Slot) -> Self {
        let module = slot.module.as_ref().map(|module| TopologyModule {
            blueprint: module.blueprint.name.clone(),
            birth: module.birth,
            style: module.style,
            tempo: module.tempo,
            alpha_target: module.alpha_target,
            alpha: module.alpha,
            age_steps: module.age_steps,
            pruning: module.pruning,
            score_at_germination_pp: module.score_at_germination_pp,
        });
        let (name, stage, stage_steps) = (slot.name.clone(), slot.stage, slot.stage_steps);
        Self { slot: name, stage, stage_steps, module }
    }

    /// Rebuilds the module of this slot; the error describes the contradiction.
    fn restore(&self, set: &BlueprintSet) -> Result<Option<Module>, String> {
        let Some(module) = &self.module else {
            if self.stage.is_occupied() {
                return Err(format!("it is {}, but has no module", self.stage));
            }
            return Ok(None);
        };
        let (stage, alpha) = (self.stage, &module.alpha);
        if !stage.is_occupied() {
            return Err(format!("it is {stage}, but has a module"));
        }
        alpha.check()?;
        if !(0.0..=1.0).contains(&module.alpha_target) {
            return Err(format!("alpha_target must be from 0 to 1, got {}", module.alpha_target));
        }
        let fits = match stage {
            Stage::Germinated | Stage::Training => alpha.is_at_rest() && alpha.alpha() == 0.0,
            Stage::Holding => alpha.is_at_rest(),
            Stage::Fossilized => alpha.is_at_rest() && alpha.alpha() == 1.0,
            _ => true,
        };
        let moves_to_zero =
            stage == Stage::Blending && !alpha.is_at_rest() && alpha.target() == 0.0;
        if !fits || (module.pruning && !moves_to_zero) {
            return Err(format!(
                "alpha {} ({:?}) contradicts the stage {stage}",
                alpha.alpha(),
                alpha.mode()
            ));
        }
        let index = set.find(&module.blueprint).map_err(|error| error.to_string())?;
        let blueprint = set.get(index).ok_or("its blueprint is missing")?;
        Ok(Some(Module {
            blueprint: Arc::clone(blueprint),
            blueprint_index: index,
            birth: module.birth,
            style: module.style,
            tempo: module.tempo,
            alpha_target: module.alpha_target,
            alpha: *alpha,
            age_steps: module.age_steps,
            pruning: module.pruning,
            score_at_germination_pp: module.score_at_germination_pp,
        }))
    }
}

impl Topology {
    /// The topology of a host, for a weights file.
    pub fn from_host(host: &Host) -> Self {
        let mut blueprints: Vec<Blueprint> = vec![];
        for module in host.slots().iter().filter_map(|slot| slot.module.as_ref()) {
            if !blueprints.contains(&module.blueprint) {
                blueprints.push((*module.blueprint).clone());
            }
        }
        let slots = host.slots().iter().map(TopologySlot::from_slot).collect();
        let (version, spec, image) = (TOPOLOGY_VERSION, host.spec().clone(), *host.image());
        let first = host.first_spec();
        let widened_from = Some(first).filter(|first| **first != spec).cloned();
        Self { version, host: spec, widened_from, image, blueprints, slots }
    }

    /// Serialises to one line of JSON.
    ///
    /// # Errors
    /// [`TopologyError::Parse`] for a value that JSON cannot represent, which no [`Host`] has.
    pub fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string(self).map_err(TopologyError::Parse)?)
    }

    /// Checks that an entry `host` has the layers and slots of this host.
    ///
    /// # Errors
    /// [`TopologyError::Version`], [`TopologyError::Host`].
    pub fn check_host(&self, json: &str) -> Result<()> {
        // An entry without a version is read below like one of the newest version.
        if let Ok(found) = version_of(json)
            && found > LIST_VERSION
        {
            check_version("host", found, LIST_VERSION)?;
        }
        match HostSpec::from_json(json, "host") {
            Ok(stored) if stored == self.host => Ok(()),
            _ => Err(TopologyError::Host { host: self.host.to_string() }.into()),
        }
    }

    /// Parses JSON. [`Topology::rebuild`] checks the values.
    ///
    /// # Errors
    /// [`TopologyError::Parse`], [`TopologyError::Version`].
    pub fn from_json(json: &str) -> Result<Self> {
        let version = version_of(json).map_err(TopologyError::Parse)?;
        check_version("topology", version, TOPOLOGY_VERSION)?;
        Ok(serde_json::from_str(json).map_err(TopologyError::Parse)?)
    }

    /// Checks every value and rebuilds the host. Its blueprints are `set`, then the blueprints of
    /// the file that `set` lacks.
    ///
    /// # Errors
    /// [`crate::HostError`]; [`crate::RuleError`]; [`crate::BlueprintError`], also for a blueprint
    /// that differs from the blueprint with the same name in `set`; [`TopologyError::Slot`].
    pub fn rebuild(&self, set: &BlueprintSet, rules: Rules) -> Result<Host> {
        let mut blueprints = set.clone();
        for blueprint in &self.blueprints {
            match blueprints.index_of(&blueprint.name).and_then(|index| blueprints.get(index)) {
                Some(known) if **known == *blueprint => {}
                Some(_) => {
                    return Err(BlueprintError::Duplicate { name: blueprint.name.clone() }.into());
                }
                None => blueprints = blueprints.with(blueprint.clone())?,
            }
        }
        let names: Vec<SlotName> = self.slots.iter().map(|slot| slot.slot.clone()).collect();
        let (first, set) = (self.widened_from.as_ref(), Arc::new(blueprints.clone()));
        let first = first.unwrap_or(&self.host).clone();
        let host = Host::new(first, self.image, &names, set, rules)?;
        let mut host = host.with_widths(self.host.clone())?;
        for slot in &self.slots {
            let name = &slot.slot;
            let module = slot
                .restore(&blueprints)
                .map_err(|problem| TopologyError::Slot { slot: name.clone(), problem })?;
            let place = host.slots_mut().iter_mut().find(|place| place.name == *name);
            if let Some(place) = place {
                place.stage = slot.stage;
                place.stage_steps = slot.stage_steps;
                place.module = module;
            }
        }
        Ok(host)
    }
}
