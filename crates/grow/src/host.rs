//! The host, its slots, and the actions that change them.

mod widen;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use meristem_nn::graph::{Dims, Graph};

pub use self::widen::WidthChange;
use crate::blueprint::{Blueprint, BlueprintError};
use crate::blueprint_set::BlueprintSet;
use crate::error::{Error, Result};
use crate::graph::{NetworkSize, ParameterCounts, SlotClass, TopologyKey, grown_graph};
use crate::lifecycle::{
    AlphaController, AlphaTarget, Curve, Gate, GateInputs, GateReport, Germination, LifecycleError,
    Module, Rules, Slot, Speed, Stage, StageChange, Style, Tempo,
};
use crate::optimisers::Optimisers;
use crate::spec::{HostSpec, MAX_PARAMETERS, SizedLayer, SlotName, TaskShape};

/// Parameters of a move of alpha: blending style, target, speed and curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retarget {
    /// Blending style from now on. The move follows `curve`, not the style's curve.
    pub style: Style,
    /// Target of alpha.
    pub target: AlphaTarget,
    /// Duration of the move.
    pub speed: Speed,
    /// Curve of the move.
    pub curve: Curve,
}

/// Result of a gate's evaluation for a module.
#[derive(Clone, Debug, PartialEq)]
pub struct GateOutcome {
    /// Report of the gate.
    pub report: GateReport,
    /// The change of stage; `None` if the gate refused.
    pub change: Option<StageChange>,
}

/// The host of an env, with its enabled slots in action-index order. A slot is addressed by its
/// index among the enabled slots, which is also its index in [`Host::alphas`].
///
/// # Time
/// A step is one epoch of training, then one action. [`Host::step`] opens it: it moves every alpha,
/// counts ages, and advances pruned slots through embargo and reset.
///
/// A module that blends over n steps therefore trains its first epoch with the curve's value at
/// 1/n, and its n-th exactly at the target. At the next action `stage_steps` and `age_steps` are
/// the numbers of epochs trained.
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
    /// blueprint that only does not fit a slot is no error: [`Host::check_germinate`] refuses it.
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

    /// The part of the host that determines its graph; equal keys give equal graphs.
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

    /// The slot and its module, if the stage is in `stages` and the module is not being pruned.
    /// `needs` are the stages in words, for the error.
    fn module_in(
        &self,
        index: usize,
        action: &'static str,
        (stages, needs): (&[Stage], &'static str),
    ) -> Result<(&Slot, &Module), LifecycleError> {
        let slot = self.slot(index)?;
        match &slot.module {
            Some(module) if stages.contains(&slot.stage) => {
                if module.pruning {
                    return Err(LifecycleError::BeingPruned { slot: slot.name.clone() });
                }
                Ok((slot, module))
            }
            _ => Err(slot.wrong_stage(action, needs)),
        }
    }

    /// Largest size that the host can reach without another germination: every module is permanent
    /// and has the trained gate of `Style::LinearGate`, because its style may change to it.
    ///
    /// # Errors
    /// The errors of [`Host::graph`].
    pub fn size(&self) -> Result<NetworkSize> {
        NetworkSize::largest(&self.spec, &self.image, &self.slots)
    }

    /// Size of the host, as [`Host::size`], after a germination of this blueprint in this slot.
    ///
    /// # Errors
    /// [`LifecycleError::NoSuchSlot`], [`LifecycleError::NoSuchBlueprint`], or
    /// [`crate::BlueprintError`] for a blueprint that does not fit the slot.
    pub fn size_with(&self, index: usize, blueprint: usize) -> Result<NetworkSize> {
        self.slot(index)?;
        let mut slots = self.slots.clone();
        slots[index].module = Some(self.gated(blueprint)?);
        NetworkSize::largest(&self.spec, &self.image, &slots)
    }

    /// A new module with a gate.
    fn gated(&self, blueprint: usize) -> Result<Module, LifecycleError> {
        let germination = Germination {
            blueprint,
            style: Style::LinearGate,
            tempo: Tempo::Fast,
            alpha_target: AlphaTarget::Full,
            score_pp: None,
        };
        Ok(Module::germinated(self.blueprint(blueprint)?, self.rules.birth, germination))
    }

    /// Names of the parameters of the host and of all modules that may grow in its slots.
    ///
    /// # Errors
    /// As [`Self::graph`].
    pub fn possible_parameters(&self) -> Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        let mut add = |slots: &[Slot]| {
            let graph = grown_graph(&self.spec, &self.image, slots, &Optimisers::default())?;
            names.extend(graph.params.into_iter().map(|param| param.name));
            Ok::<_, Error>(())
        };
        add(&self.slots)?;
        for blueprint in 0..self.blueprints.len() {
            let mut slots = self.slots.clone();
            let fitting = slots.iter_mut().zip(&self.fits).filter(|(_, fits)| fits[blueprint]);
            for (slot, _) in fitting {
                (slot.stage, slot.module) = (Stage::Fossilized, Some(self.gated(blueprint)?));
            }
            add(&slots)?;
        }
        Ok(names)
    }

    fn blueprint(&self, index: usize) -> Result<Arc<Blueprint>, LifecycleError> {
        let blueprints = self.blueprints.len();
        let missing = LifecycleError::NoSuchBlueprint { index, blueprints };
        self.blueprints.get(index).cloned().ok_or(missing)
    }

    /// Checks the size limits of the host for a germination of this blueprint in this slot.
    fn check_size(&self, index: usize, blueprint: usize) -> Result<(), LifecycleError> {
        let Rules { max_parameters, max_macs, .. } = self.rules;
        if max_parameters.is_none() && max_macs.is_none() {
            return Ok(());
        }
        // The caller has checked that the blueprint fits the slot, so the size exists.
        let Ok(size) = self.size_with(index, blueprint) else { return Ok(()) };
        let Some((what, needs, limit)) = self.exceeded(size) else { return Ok(()) };
        let slot = self.slot(index)?.name.clone();
        let blueprint = self.blueprint(blueprint)?.name.clone();
        Err(LifecycleError::TooLarge { slot, blueprint, what, needs, limit })
    }

    /// The limit that a network of this size exceeds: its unit, the size, and the limit.
    fn exceeded(
        &self,
        NetworkSize { parameters, macs }: NetworkSize,
    ) -> Option<(&'static str, u64, u64)> {
        let Rules { max_parameters, max_macs, .. } = self.rules;
        let limits = [("parameters", parameters, max_parameters), ("MACs", macs, max_macs)];
        let exceeded = |(what, needs, limit): (_, u64, Option<u64>)| {
            Some((what, needs, limit.filter(|limit| needs > *limit)?))
        };
        limits.into_iter().find_map(exceeded)
    }

    /// Checks that a blueprint may germinate in a slot. The slot must be dormant, the host must
    /// have fewer than `max_modules` modules and none before Blending, and the module must fit
    /// within `max_parameters` and `max_macs`.
    ///
    /// # Errors
    /// The rule that the germination violates.
    pub fn check_germinate(&self, index: usize, blueprint: usize) -> Result<(), LifecycleError> {
        let slot = self.slot(index)?;
        if slot.stage != Stage::Dormant {
            return Err(slot.wrong_stage("GERMINATE", "a dormant slot"));
        }
        let module = self.blueprint(blueprint)?;
        if !self.fits[index][blueprint] {
            let (slot, blueprint) = (slot.name.clone(), module.name.clone());
            return Err(LifecycleError::DoesNotFit { slot, blueprint });
        }
        let (modules, limit) = (self.modules(), self.rules.max_modules);
        if modules >= limit {
            return Err(LifecycleError::Full { modules, limit });
        }
        let early = |slot: &&Slot| matches!(slot.stage, Stage::Germinated | Stage::Training);
        match self.slots.iter().find(early) {
            Some(slot) => {
                Err(LifecycleError::NotYet { slot: slot.name.clone(), stage: slot.stage })
            }
            None => self.check_size(index, blueprint),
        }
    }

    /// Puts a module into a dormant slot. The module starts to compute in Training.
    ///
    /// # Errors
    /// The errors of [`Host::check_germinate`].
    pub fn germinate(
        &mut self,
        index: usize,
        germination: Germination,
    ) -> Result<StageChange, LifecycleError> {
        self.check_germinate(index, germination.blueprint)?;
        let blueprint = self.blueprint(germination.blueprint)?;
        let slot = &mut self.slots[index];
        let change = slot.enter(index, Stage::Germinated)?;
        slot.module = Some(Module::germinated(blueprint, self.rules.birth, germination));
        Ok(change)
    }

    /// Checks that the gate of a slot may be evaluated: the slot is in Germinated, Training or
    /// Blending, and its module is not being pruned. [`Host::gate`] then decides whether the gate
    /// passes.
    ///
    /// # Errors
    /// The rule that the action violates.
    pub fn check_advance(&self, index: usize) -> Result<(), LifecycleError> {
        let stages = [Stage::Germinated, Stage::Training, Stage::Blending];
        let needs = (&stages[..], "germinated, training or blending");
        self.module_in(index, "ADVANCE", needs).map(|_| ())
    }

    /// Report of the gate to the next stage of a slot; `None` for a stage without a gate.
    pub fn gate(&self, index: usize, inputs: &GateInputs) -> Option<GateReport> {
        let slot = self.slots.get(index)?;
        Some(self.rules.gates.evaluate(Gate::from_stage(slot.stage)?, slot, inputs))
    }

    /// Evaluates the gate after Germinated, Training or Blending, and advances the module if the
    /// gate passes.
    ///
    /// # Errors
    /// The errors of [`Host::check_advance`]. A gate that refuses is no error: the host is
    /// unchanged.
    pub fn advance(
        &mut self,
        index: usize,
        inputs: &GateInputs,
    ) -> Result<GateOutcome, LifecycleError> {
        self.check_advance(index)?;
        self.evaluate_gate(index, inputs, "ADVANCE")
    }

    /// Checks that the gate to Fossilized may be evaluated: the slot is in Holding, and its module
    /// is not being pruned.
    ///
    /// # Errors
    /// The rule that the action violates.
    pub fn check_fossilize(&self, index: usize) -> Result<(), LifecycleError> {
        self.module_in(index, "FOSSILIZE", (&[Stage::Holding], "holding")).map(|_| ())
    }

    /// Makes a module permanent if the gate passes. Alpha is 1 from then on, also after a lower
    /// target.
    ///
    /// # Errors
    /// The errors of [`Host::check_fossilize`]. A gate that refuses is no error: the host is
    /// unchanged.
    pub fn fossilize(
        &mut self,
        index: usize,
        inputs: &GateInputs,
    ) -> Result<GateOutcome, LifecycleError> {
        self.check_fossilize(index)?;
        self.evaluate_gate(index, inputs, "FOSSILIZE")
    }

    fn evaluate_gate(
        &mut self,
        index: usize,
        inputs: &GateInputs,
        action: &'static str,
    ) -> Result<GateOutcome, LifecycleError> {
        let Some(report) = self.gate(index, inputs) else {
            return Err(self.slot(index)?.wrong_stage(action, "a stage with a gate"));
        };
        if !report.passed {
            return Ok(GateOutcome { report, change: None });
        }
        let slot = &mut self.slots[index];
        let change = slot.enter(index, report.gate.target())?;
        if let Some(module) = &mut slot.module {
            match report.gate {
                Gate::Blending => {
                    let (target, curve) = (module.alpha_target, module.style.curve());
                    module.retarget(&slot.name, target, module.tempo.steps(), curve)?;
                }
                Gate::Fossilized => module.alpha = AlphaController::at_rest(1.0),
                Gate::Training | Gate::Holding => {}
            }
        }
        Ok(GateOutcome { report, change: Some(change) })
    }

    /// Checks that alpha may get a new target: the slot is in Blending or Holding, with alpha at
    /// rest.
    ///
    /// # Errors
    /// The rule that the action violates.
    pub fn check_set_alpha_target(&self, index: usize) -> Result<(), LifecycleError> {
        let needs = (&[Stage::Blending, Stage::Holding][..], "blending or holding");
        let (slot, module) = self.module_in(index, "SET_ALPHA_TARGET", needs)?;
        module.check_at_rest(&slot.name)
    }

    /// Gives alpha a new target; Holding becomes Blending. A new style may change the network.
    ///
    /// # Errors
    /// The errors of [`Host::check_set_alpha_target`].
    pub fn set_alpha_target(
        &mut self,
        index: usize,
        to: Retarget,
    ) -> Result<Option<StageChange>, LifecycleError> {
        self.check_set_alpha_target(index)?;
        let slot = &mut self.slots[index];
        if let Some(module) = &mut slot.module {
            module.style = to.style;
            module.retarget(&slot.name, to.target.value(), to.speed.steps(), to.curve)?;
        }
        match slot.stage {
            Stage::Holding => slot.enter(index, Stage::Blending).map(Some),
            _ => Ok(None),
        }
    }

    /// Checks that a module may be pruned: not fossilized, old enough, with alpha at rest, and not
    /// yet being pruned.
    ///
    /// # Errors
    /// The rule that the action violates.
    pub fn check_prune(&self, index: usize) -> Result<(), LifecycleError> {
        let stages = [Stage::Germinated, Stage::Training, Stage::Blending, Stage::Holding];
        let (slot, module) = self.module_in(index, "PRUNE", (&stages, "a live module"))?;
        let (age_steps, min_steps) = (module.age_steps, self.rules.min_prune_age_steps);
        if age_steps < min_steps {
            return Err(LifecycleError::TooYoung { slot: slot.name.clone(), age_steps, min_steps });
        }
        module.check_at_rest(&slot.name)
    }

    /// Removes a module. A blended module is removed only after alpha has reached 0, unless `speed`
    /// is instant; until then its stage is Blending, and all actions on it are illegal.
    ///
    /// # Errors
    /// The errors of [`Host::check_prune`].
    pub fn prune(
        &mut self,
        index: usize,
        speed: Speed,
        curve: Curve,
    ) -> Result<Option<StageChange>, LifecycleError> {
        self.check_prune(index)?;
        let slot = &mut self.slots[index];
        let alpha = slot.alpha();
        match &mut slot.module {
            Some(module) if speed != Speed::Instant && alpha > 0.0 => {
                // The move starts from the alpha of the slot: for a joint module `module.alpha`
                // differs from it.
                module.alpha = AlphaController::at_rest(alpha);
                module.retarget(&slot.name, 0.0, speed.steps(), curve)?;
                module.pruning = true;
            }
            _ => return slot.enter(index, Stage::Pruned).map(Some),
        }
        match slot.stage {
            Stage::Training | Stage::Holding => slot.enter(index, Stage::Blending).map(Some),
            _ => Ok(None),
        }
    }

    /// Removes at once every module that is not fossilized, at any age. Only for the governor's
    /// rollback.
    pub fn prune_live(&mut self) -> Vec<StageChange> {
        let slots = self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.stage.is_live());
        slots.filter_map(|(index, slot)| slot.enter(index, Stage::Pruned).ok()).collect()
    }

    /// Turns the host into a fixed network, for comparisons with fixed networks: every blended
    /// module becomes permanent without a gate, every other module is removed, and the empty slots
    /// become dormant.
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
