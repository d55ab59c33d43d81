//! A host as JSON: the entries `topology` and `host` of a weights file's metadata.
//!
//! The description is complete: it includes the blueprints in use, so that a network with a user's
//! own blueprint can be evaluated by a program that does not know that blueprint.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::blueprint::{Blueprint, BlueprintError};
use crate::blueprint_set::BlueprintSet;
use crate::error::{Result, TopologyError};
use crate::host::Host;
use crate::lifecycle::{AlphaController, Module, Rules, Slot, Stage, Style, Tempo};
use crate::spec::{HostList, HostSpec, ImageShape, SlotName};

/// Version of the format, raised when a reader of the old one would misread the new one.
pub const TOPOLOGY_VERSION: u32 = 1;

/// A host as stored in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// [`TOPOLOGY_VERSION`].
    pub version: u32,
    /// The host, written in full (`cnn:…`), read in any form.
    pub host: HostSpec,
    /// The images and classes that it is made for.
    pub image: ImageShape,
    /// The blueprints of the modules below, each once.
    pub blueprints: Vec<Blueprint>,
    /// The enabled slots in index order.
    pub slots: Vec<TopologySlot>,
}

/// A slot as stored in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopologySlot {
    /// Its name.
    pub slot: SlotName,
    /// Its stage.
    pub stage: Stage,
    /// Steps in this stage.
    pub stage_steps: u32,
    /// Its module.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module: Option<TopologyModule>,
}

/// A module as stored in a file, with the fields of [`Module`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopologyModule {
    /// Name of its blueprint.
    pub blueprint: String,
    /// Blending style.
    pub style: Style,
    /// Duration of the first blending.
    pub tempo: Tempo,
    /// Alpha at the end of the first blending.
    pub alpha_target: f32,
    /// Alpha and its current move.
    pub alpha: AlphaController,
    /// Steps since it germinated.
    pub age_steps: u32,
    /// Whether it is being removed.
    pub pruning: bool,
    /// Control accuracy at germination, percentage points.
    pub accuracy_at_germination_pp: Option<f32>,
}

/// Serialises the layers and slots of a host to JSON, on one line: the `host` entry of the
/// metadata, for readers that do not know the host's text.
///
/// # Errors
/// [`TopologyError::Parse`] if JSON cannot represent it, which does not happen.
pub fn host_json(host: &HostSpec) -> Result<String> {
    Ok(serde_json::to_string(host.list()).map_err(TopologyError::Parse)?)
}

impl TopologySlot {
    fn of(slot: &Slot) -> Self {
        let module = slot.module.as_ref().map(|module| TopologyModule {
            blueprint: module.blueprint.name.clone(),
            style: module.style,
            tempo: module.tempo,
            alpha_target: module.alpha_target,
            alpha: module.alpha,
            age_steps: module.age_steps,
            pruning: module.pruning,
            accuracy_at_germination_pp: module.accuracy_at_germination_pp,
        });
        let (name, stage, stage_steps) = (slot.name.clone(), slot.stage, slot.stage_steps);
        Self { slot: name, stage, stage_steps, module }
    }

    /// Rebuilds the module of this slot; the error names the contradiction.
    fn restore(&self, set: &BlueprintSet) -> Result<Option<Module>, String> {
        let Some(module) = &self.module else {
            let stage = self.stage;
            return match stage.is_occupied() {
                true => Err(format!("it is {stage}, but has no module")),
                false => Ok(None),
            };
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
        let leaves = stage == Stage::Blending && !alpha.is_at_rest() && alpha.target() == 0.0;
        if !fits || (module.pruning && !leaves) {
            return Err(format!(
                "alpha {} ({:?}) does not go with {stage}",
                alpha.alpha(),
                alpha.mode()
            ));
        }
        let index = set.find(&module.blueprint).map_err(|error| error.to_string())?;
        let blueprint = set.get(index).ok_or("its blueprint is missing")?;
        Ok(Some(Module {
            blueprint: Arc::clone(blueprint),
            blueprint_index: index,
            style: module.style,
            tempo: module.tempo,
            alpha_target: module.alpha_target,
            alpha: *alpha,
            age_steps: module.age_steps,
            pruning: module.pruning,
            accuracy_at_germination_pp: module.accuracy_at_germination_pp,
        }))
    }
}

impl Topology {
    /// A host as stored in a weights file.
    pub fn of(host: &Host) -> Self {
        let mut blueprints: Vec<Blueprint> = vec![];
        for module in host.slots().iter().filter_map(|slot| slot.module.as_ref()) {
            if !blueprints.contains(&module.blueprint) {
                blueprints.push((*module.blueprint).clone());
            }
        }
        let slots = host.slots().iter().map(TopologySlot::of).collect();
        let (version, spec, image) = (TOPOLOGY_VERSION, host.spec().clone(), *host.image());
        Self { version, host: spec, image, blueprints, slots }
    }

    /// Serialises to JSON, on one line.
    ///
    /// # Errors
    /// [`TopologyError::Parse`] if JSON cannot represent it, which does not happen for a [`Host`].
    pub fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string(self).map_err(TopologyError::Parse)?)
    }

    /// Checks that a `host` entry has the layers and slots of this host.
    ///
    /// # Errors
    /// [`TopologyError::Host`].
    pub fn check_host(&self, json: &str) -> Result<()> {
        match serde_json::from_str::<HostList>(json) {
            Ok(list) if list == *self.host.list() => Ok(()),
            _ => Err(TopologyError::Host { host: self.host.to_string() }.into()),
        }
    }

    /// Parses JSON. The values are checked by [`Topology::rebuild`].
    ///
    /// # Errors
    /// [`TopologyError::Parse`], [`TopologyError::Version`].
    pub fn from_json(json: &str) -> Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        // The version first, so that a newer file is reported as newer and not as misspelt.
        let Version { version } = serde_json::from_str(json).map_err(TopologyError::Parse)?;
        if version != TOPOLOGY_VERSION {
            let supported = TOPOLOGY_VERSION;
            return Err(TopologyError::Version { found: version, supported }.into());
        }
        Ok(serde_json::from_str(json).map_err(TopologyError::Parse)?)
    }

    /// Rebuilds the host, with every value checked. Its blueprints are `set` and the blueprints of
    /// the file that are not in `set`.
    ///
    /// # Errors
    /// [`crate::HostError`], [`crate::BlueprintError`] (also for a blueprint of the file that
    /// differs from the one with that name in `set`), [`TopologyError::Slot`].
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
        let mut host =
            Host::new(self.host.clone(), self.image, &names, Arc::new(blueprints.clone()), rules)?;
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
