//! The host, its slots, and the actions that change them.

mod actions;
mod size;
mod widen;

use std::collections::HashMap;
use std::sync::Arc;

use meristem_nn::graph::{Dims, Graph};

pub use self::actions::{GateOutcome, Retarget};
pub use self::widen::{MEASURED_WEIGHTS_MAX, WidthChange};
use crate::blueprint::{Blueprint, BlueprintError};
use crate::blueprint_set::BlueprintSet;
use crate::error::Result;
use crate::graph::{ParameterCounts, SlotClass, TopologyKey, grown_graph};
use crate::lifecycle::{AlphaController, LifecycleError, Rules, Slot, Stage, StageChange};
use crate::optimisers::Optimisers;
use crate::spec::{HostSpec, MAX_PARAMETERS, SizedLayer, SlotName, TaskShape};

/// The host of an env, with its enabled slots in action-index order. A slot is addressed by its
/// index among the enabled slots, which is also its index in [`Host::alphas`].
///
/// # Time
/// A step is one epoch of training, then one action. [`Host::step`] opens it: it moves every alpha,
/// counts ages, and advances pruned slots through embargo and reset.
///
/// A module that blends over n steps therefore trains its first epoch with alpha at the curve's
/// value at 1/n, times the target, and its n-th exactly at the target. At an action, `stage_steps`
/// is the number of epochs since the slot entered its stage, and `age_steps` since the module
/// germinated.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    spec: HostSpec,
    /// The description before any layer was widened.
    first: HostSpec,
    /// Trained parameters of `first`.
    first_parameters: usize,
    image: TaskShape,
    blueprints: Arc<BlueprintSet>,
    rules: Rules,
    slots: Vec<Slot>,
    /// Trained parameters without modules.
    bare_parameters: usize,
    /// Whether each blueprint can learn in each enabled slot: `[slot][blueprint]`.
    fits: Vec<Vec<bool>>,
}

impl Host {
    /// A bare host. `enabled` lists the slots that may grow, in any order.
    ///
    /// # Errors
    /// [`crate::HostError`] for a host that does not fit the image, or a slot that is unknown or
    /// listed twice; [`crate::RuleError`] for a rule outside its range; [`crate::BlueprintError`]
    /// for a blueprint that fits neither images nor vectors, or is too large for a slot. A
    /// blueprint that fits images or vectors, but not a slot's shape, is no error:
    /// [`Host::check_germinate`] refuses the blueprint in that slot.
    pub fn new(
        spec: HostSpec,
        image: TaskShape,
        enabled: &[SlotName],
        blueprints: Arc<BlueprintSet>,
        rules: Rules,
    ) -> Result<Self> {
        rules.check()?;
        let sized = spec.sizes(&image)?;
        let bare_parameters = sized.iter().map(|sized| sized.parameters).sum();
        let at_slot = |sized: &SizedLayer<'_>| Some((sized.layer.slot()?.clone(), sized.output));
        let dims: HashMap<SlotName, Dims> = sized.iter().filter_map(at_slot).collect();
        let slot = |name: &SlotName| Slot::new(name.clone(), dims[name]);
        let slots: Vec<Slot> = spec.order_slots(enabled)?.iter().map(slot).collect();
        // Checked once here, so that every germination that is legal later has a valid size.
        for slot in &slots {
            blueprints.iter().try_for_each(|blueprint| check_size(blueprint, slot.dims))?;
        }
        let fits = |slot: &Slot| -> Vec<bool> {
            blueprints.iter().map(|blueprint| blueprint.fits(slot.dims)).collect()
        };
        let fits = slots.iter().map(fits).collect();
        let (first, first_parameters) = (spec.clone(), bare_parameters);
        Ok(Self {
            spec,
            first,
            first_parameters,
            image,
            blueprints,
            rules,
            slots,
            bare_parameters,
            fits,
        })
    }

    /// The host's description, with the present widths of its layers.
    pub fn spec(&self) -> &HostSpec {
        &self.spec
    }

    /// The host's description before any layer was widened.
    pub fn first_spec(&self) -> &HostSpec {
        &self.first
    }

    /// Trained parameters, without modules, before any layer was widened.
    pub fn first_parameters(&self) -> usize {
        self.first_parameters
    }

    /// The shape of images and classes.
    pub fn image(&self) -> &TaskShape {
        &self.image
    }

    /// Trained parameters of the host without modules.
    pub fn bare_parameters(&self) -> usize {
        self.bare_parameters
    }

    /// The blueprints that may grow in the host.
    pub fn blueprints(&self) -> &Arc<BlueprintSet> {
        &self.blueprints
    }

    /// The rules of growth.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The enabled slots in action-index order.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    pub(crate) fn slots_mut(&mut self) -> &mut [Slot] {
        &mut self.slots
    }

    /// Index of an enabled slot.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.slots.iter().position(|slot| slot.name.as_str() == name)
    }

    /// Indices of the slots with a module that is not fossilized ([`Stage::is_live`]).
    pub fn live(&self) -> impl Iterator<Item = usize> {
        let live = |(_, slot): &(usize, &Slot)| slot.stage.is_live();
        self.slots.iter().enumerate().filter(live).map(|(index, _)| index)
    }

    /// Number of modules in the host, fossilized ones included.
    pub fn modules(&self) -> usize {
        self.slots.iter().filter(|slot| slot.stage.is_occupied()).count()
    }

    /// Alpha per enabled slot, as the network reads it; 0 for slots without a blended module.
    pub fn alphas(&self) -> Vec<f32> {
        self.slots.iter().map(Slot::alpha).collect()
    }

    /// The part of the host that changes its graph during an episode: equal keys of one host mean
    /// equal graphs.
    pub fn topology_key(&self) -> TopologyKey {
        let slots = self.slots.iter().map(SlotClass::from_slot).collect();
        TopologyKey { host: self.spec.clone(), slots }
    }

    /// The network for training and evaluation, with these optimisers. Group 0 is the host. Each
    /// computing module follows as a group named by its slot, in forward order.
    ///
    /// # Errors
    /// Never for a host from [`Host::new`], which checked sizes and blueprints.
    pub fn graph(&self, optimisers: &Optimisers) -> Result<Graph> {
        grown_graph(&self.spec, &self.image, &self.slots, optimisers)
    }

    /// Trained parameters of host and modules, counted on the graph.
    ///
    /// # Errors
    /// The errors of [`Host::graph`].
    pub fn parameters(&self) -> Result<ParameterCounts> {
        Ok(ParameterCounts::from_graph(&self.graph(&Optimisers::default())?, &self.slots))
    }

    fn slot(&self, index: usize) -> Result<&Slot, LifecycleError> {
        let slots = self.slots.len();
        self.slots.get(index).ok_or(LifecycleError::NoSuchSlot { index, slots })
    }

    fn blueprint(&self, index: usize) -> Result<Arc<Blueprint>, LifecycleError> {
        let blueprints = self.blueprints.len();
        let missing = LifecycleError::NoSuchBlueprint { index, blueprints };
        self.blueprints.get(index).cloned().ok_or(missing)
    }

    /// Removes at once every module that is not fossilized, at any age. Only for the governor's
    /// rollback.
    pub fn prune_live(&mut self) -> Vec<StageChange> {
        let slots = self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.stage.is_live());
        slots.filter_map(|(index, slot)| slot.enter(index, Stage::Pruned).ok()).collect()
    }

    /// Turns the host into a fixed network, for comparisons with fixed networks. Every module that
    /// is blended in and is not being pruned becomes permanent, without a check of the gate to
    /// Fossilized. Every other module is removed, and the empty slots become dormant.
    pub fn make_permanent(&mut self) {
        for slot in &mut self.slots {
            let blended = matches!(slot.stage, Stage::Blending | Stage::Holding) || slot.is_joint();
            let stays = slot.stage == Stage::Fossilized || (blended && !slot.is_pruning());
            slot.module = slot.module.take().filter(|_| stays);
            slot.stage = if slot.module.is_some() { Stage::Fossilized } else { Stage::Dormant };
            slot.stage_steps = 0;
            if let Some(module) = &mut slot.module {
                module.alpha = AlphaController::at_rest(1.0);
            }
        }
    }

    /// Opens a step (see [`Host`], Time): call this once, before the epoch. Returns the changes of
    /// stage caused by time alone.
    pub fn step(&mut self) -> Vec<StageChange> {
        let rules = self.rules;
        let slots = self.slots.iter_mut().enumerate();
        slots.filter_map(|(index, slot)| step_slot(index, slot, &rules)).collect()
    }
}

fn step_slot(index: usize, slot: &mut Slot, rules: &Rules) -> Option<StageChange> {
    let mut removed = false;
    if let Some(module) = &mut slot.module {
        module.age_steps = module.age_steps.saturating_add(1);
        module.alpha.step();
        removed = module.pruning && module.alpha.is_at_rest();
    }
    let next = match slot.stage {
        _ if removed => Some(Stage::Pruned),
        Stage::Pruned => Some(Stage::Embargoed),
        Stage::Embargoed if slot.stage_steps >= rules.embargo_steps => Some(Stage::Resetting),
        Stage::Resetting if slot.stage_steps >= rules.resetting_steps => Some(Stage::Dormant),
        _ => None,
    };
    // All transitions above are legal, so `enter` cannot fail.
    let change = next.and_then(|stage| slot.enter(index, stage).ok());
    slot.stage_steps = slot.stage_steps.saturating_add(1);
    change
}

/// Checks that a module of `blueprint` in a slot of this shape has at most `MAX_PARAMETERS`
/// parameters.
fn check_size(blueprint: &Blueprint, slot: Dims) -> Result<()> {
    let parameters = blueprint.parameters(slot)?;
    if parameters <= MAX_PARAMETERS {
        return Ok(());
    }
    let (name, limit) = (blueprint.name.clone(), MAX_PARAMETERS);
    let problem = format!("{parameters} parameters; at most {limit} are supported");
    Err(BlueprintError::Shape { name, channels: slot.c, problem }.into())
}
