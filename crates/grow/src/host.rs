//! The host, its slots, and the actions that change them.

use std::sync::Arc;

use meristem_nn::graph::Graph;

use crate::blueprint::{Blueprint, BlueprintError};
use crate::blueprint_set::BlueprintSet;
use crate::error::Result;
use crate::graph::{ParameterCounts, Size, SlotClass, TopologyKey, grown_graph};
use crate::lifecycle::{
    AlphaController, AlphaTarget, Curve, Gate, GateInputs, GateReport, Germination, LifecycleError,
    Module, Rules, Slot, Speed, Stage, StageChange, Style, Tempo,
};
use crate::optimisers::Optimisers;
use crate::spec::{HostSpec, ImageShape, MAX_PARAMETERS, SlotName};

/// A new blending style, target, speed and curve for alpha.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retarget {
    /// Blending style from now on; its curve is not used, `curve` is.
    pub style: Style,
    /// Target of alpha.
    pub target: AlphaTarget,
    /// Duration of the move.
    pub speed: Speed,
    /// Curve of the move.
    pub curve: Curve,
}

/// The outcome of asking a gate to let a module advance.
#[derive(Clone, Debug, PartialEq)]
pub struct Advance {
    /// The gate's conditions.
    pub report: GateReport,
    /// The change of stage, if the gate passed.
    pub change: Option<StageChange>,
}

/// One host of an env, with its enabled slots in action-index order. Slots are addressed by their
/// index among the enabled ones, which is also their index in [`Host::alphas`].
///
/// # Time
/// A step is one epoch of training and then one action. [`Host::step`] opens it: it moves every
/// alpha, counts ages, and takes pruned slots on through embargo and reset. A module that is told
/// to blend over n steps thus trains its first epoch at the curve's value at 1/n, and its n-th
/// exactly at the target; at the action that follows, `stage_steps` and `age_steps` are the epochs
/// trained so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    spec: HostSpec,
    image: ImageShape,
    blueprints: Arc<BlueprintSet>,
    rules: Rules,
    slots: Vec<Slot>,
}

impl Host {
    /// A bare host. `enabled` are the slots that may grow, in any order.
    ///
    /// # Errors
    /// [`crate::HostError`] if the host does not fit the image, or a slot is unknown or listed
    /// twice; [`crate::RuleError`] if a rule is out of range; [`crate::BlueprintError`] if a
    /// blueprint does not fit the channels of a slot.
    pub fn new(
        spec: HostSpec,
        image: ImageShape,
        enabled: &[SlotName],
        blueprints: Arc<BlueprintSet>,
        rules: Rules,
    ) -> Result<Self> {
        spec.validate(&image)?;
        rules.check()?;
        let slot = |name: &SlotName| Slot::new(name.clone(), spec.channels_at(name, &image));
        let slots: Vec<Slot> = spec.order_slots(enabled)?.iter().map(slot).collect();
        // Checked here once, so that a germination, which a policy chooses freely, cannot fail
        // later.
        for slot in &slots {
            blueprints.iter().try_for_each(|blueprint| check_size(blueprint, slot.channels))?;
        }
        Ok(Self { spec, image, blueprints, rules, slots })
    }

    /// The host's description.
    pub fn spec(&self) -> &HostSpec {
        &self.spec
    }

    /// The images and classes that it is made for.
    pub fn image(&self) -> &ImageShape {
        &self.image
    }

    /// The blueprints that may grow in it.
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

    /// Indices of the slots with a live module (Germinated to Holding).
    pub fn live(&self) -> impl Iterator<Item = usize> {
        let live = |(_, slot): &(usize, &Slot)| slot.stage.is_live();
        self.slots.iter().enumerate().filter(live).map(|(index, _)| index)
    }

    /// Modules in the host, fossilized ones included.
    pub fn modules(&self) -> usize {
        self.slots.iter().filter(|slot| slot.stage.is_occupied()).count()
    }

    /// Alpha per enabled slot, as the network reads it: 0 where no module is blended in.
    pub fn alphas(&self) -> Vec<f32> {
        self.slots.iter().map(Slot::alpha).collect()
    }

    /// The part of the host that its graph depends on; equal keys give equal graphs.
    pub fn topology_key(&self) -> TopologyKey {
        let slots = self.slots.iter().map(SlotClass::of).collect();
        TopologyKey { host: self.spec.clone(), slots }
    }

    /// The network, for training and for evaluation, with these optimisers. Group 0 is the host,
    /// then one group, named by its slot, per module that takes part, in forward order.
    ///
    /// # Errors
    /// Never for a host built by [`Host::new`], which checked its sizes and blueprints.
    pub fn graph(&self, optimisers: &Optimisers) -> Result<Graph> {
        grown_graph(&self.spec, &self.image, &self.slots, optimisers)
    }

    /// Trained parameters of host and modules, counted on the graph.
    ///
    /// # Errors
    /// The errors of [`Host::graph`].
    pub fn parameters(&self) -> Result<ParameterCounts> {
        Ok(ParameterCounts::of(&self.graph(&Optimisers::default())?, &self.slots))
    }

    fn slot(&self, index: usize) -> Result<&Slot, LifecycleError> {
        let slots = self.slots.len();
        self.slots.get(index).ok_or(LifecycleError::NoSuchSlot { index, slots })
    }

    /// The slot and its module, if its stage is one of `stages` and it is not being pruned.
    fn module_in(
        &self,
        index: usize,
        action: &'static str,
        (stages, needs): (&[Stage], &'static str),
    ) -> Result<(&Slot, &Module), LifecycleError> {
        let slot = self.slot(index)?;
        match &slot.module {
            Some(module) if stages.contains(&slot.stage) => match module.pruning {
                true => Err(LifecycleError::BeingPruned { slot: slot.name.clone() }),
                false => Ok((slot, module)),
            },
            _ => Err(slot.wrong_stage(action, needs)),
        }
    }

    /// Largest size of the host: with every module permanent, and with a gate, since its style may
    /// change.
    ///
    /// # Errors
    /// The errors of [`Host::graph`].
    pub fn size(&self) -> Result<Size> {
        Size::at_most(&self.spec, &self.image, &self.slots)
    }

    /// Size of the host if a module of this blueprint germinated in this slot, as [`Host::size`].
    ///
    /// # Errors
    /// [`LifecycleError::NoSuchSlot`], [`LifecycleError::NoSuchBlueprint`].
    pub fn size_with(&self, index: usize, blueprint: usize) -> Result<Size> {
        self.slot(index)?;
        let germination = Germination {
            blueprint,
            style: Style::LinearGate,
            tempo: Tempo::Fast,
            alpha_target: AlphaTarget::Full,
            accuracy_pp: None,
        };
        let mut slots = self.slots.clone();
        slots[index].module = Some(Module::germinated(self.blueprint(blueprint)?, germination));
        Size::at_most(&self.spec, &self.image, &slots)
    }

    fn blueprint(&self, index: usize) -> Result<Arc<Blueprint>, LifecycleError> {
        let blueprints = self.blueprints.len();
        let missing = LifecycleError::NoSuchBlueprint { index, blueprints };
        self.blueprints.get(index).cloned().ok_or(missing)
    }

    /// Checks that a host with a module of this blueprint in this slot is not too large.
    fn check_size(&self, index: usize, blueprint: usize) -> Result<(), LifecycleError> {
        let Rules { max_parameters, max_macs, .. } = self.rules;
        if max_parameters.is_none() && max_macs.is_none() {
            return Ok(());
        }
        // Every blueprint fits every slot, see `Host::new`, so that there is a size.
        let Ok(Size { parameters, macs }) = self.size_with(index, blueprint) else {
            return Ok(());
        };
        let limits = [("parameters", parameters, max_parameters), ("MACs", macs, max_macs)];
        for (what, needs, limit) in limits {
            if let Some(limit) = limit.filter(|limit| needs > *limit) {
                let (slot, blueprint) =
                    (self.slot(index)?.name.clone(), self.blueprint(blueprint)?);
                let blueprint = blueprint.name.clone();
                return Err(LifecycleError::TooLarge { slot, blueprint, what, needs, limit });
            }
        }
        Ok(())
    }

    /// Checks that a blueprint may germinate in a slot: a dormant slot, fewer than `max_modules`
    /// modules, no module that is still before Blending, and room for the module below
    /// `max_parameters` and `max_macs`.
    ///
    /// # Errors
    /// The rule that forbids it.
    pub fn check_germinate(&self, index: usize, blueprint: usize) -> Result<(), LifecycleError> {
        let slot = self.slot(index)?;
        if slot.stage != Stage::Dormant {
            return Err(slot.wrong_stage("GERMINATE", "a dormant slot"));
        }
        self.blueprint(blueprint)?;
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

    /// Puts a module into a dormant slot. It takes no part in the network before Training.
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
        slot.module = Some(Module::germinated(blueprint, germination));
        Ok(change)
    }

    /// Checks that a slot's gate may be asked: Germinated, Training or Blending, and not being
    /// pruned. Whether the gate then passes is a separate question ([`Host::gate`]).
    ///
    /// # Errors
    /// The rule that forbids it.
    pub fn check_advance(&self, index: usize) -> Result<(), LifecycleError> {
        let stages = [Stage::Germinated, Stage::Training, Stage::Blending];
        let needs = (&stages[..], "germinated, training or blending");
        self.module_in(index, "ADVANCE", needs).map(|_| ())
    }

    /// The report of the gate that leads on from a slot's stage; `None` if there is none.
    pub fn gate(&self, index: usize, inputs: &GateInputs) -> Option<GateReport> {
        let slot = self.slots.get(index)?;
        Some(self.rules.gates.evaluate(Gate::from_stage(slot.stage)?, slot, inputs))
    }

    /// Asks the gate that leads on from Germinated, Training or Blending, and advances if it
    /// passes.
    ///
    /// # Errors
    /// The errors of [`Host::check_advance`]. A gate that does not pass is no error: nothing
    /// changes.
    pub fn advance(
        &mut self,
        index: usize,
        inputs: &GateInputs,
    ) -> Result<Advance, LifecycleError> {
        self.check_advance(index)?;
        self.ask(index, inputs, "ADVANCE")
    }

    /// Checks that a slot's module may be asked to fossilize: Holding, and not being pruned.
    ///
    /// # Errors
    /// The rule that forbids it.
    pub fn check_fossilize(&self, index: usize) -> Result<(), LifecycleError> {
        self.module_in(index, "FOSSILIZE", (&[Stage::Holding], "holding")).map(|_| ())
    }

    /// Makes a module permanent if its gate passes. Its alpha is 1 from then on, whatever its
    /// target was.
    ///
    /// # Errors
    /// The errors of [`Host::check_fossilize`]. A gate that does not pass is no error: nothing
    /// changes.
    pub fn fossilize(
        &mut self,
        index: usize,
        inputs: &GateInputs,
    ) -> Result<Advance, LifecycleError> {
        self.check_fossilize(index)?;
        self.ask(index, inputs, "FOSSILIZE")
    }

    fn ask(
        &mut self,
        index: usize,
        inputs: &GateInputs,
        action: &'static str,
    ) -> Result<Advance, LifecycleError> {
        let Some(report) = self.gate(index, inputs) else {
            return Err(self.slot(index)?.wrong_stage(action, "a stage with a gate"));
        };
        if !report.passed {
            return Ok(Advance { report, change: None });
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
        Ok(Advance { report, change: Some(change) })
    }

    /// Checks that a slot's alpha may get a new target: Blending or Holding, at rest.
    ///
    /// # Errors
    /// The rule that forbids it.
    pub fn check_set_alpha_target(&self, index: usize) -> Result<(), LifecycleError> {
        let needs = (&[Stage::Blending, Stage::Holding][..], "blending or holding");
        let (slot, module) = self.module_in(index, "SET_ALPHA_TARGET", needs)?;
        module.check_at_rest(&slot.name)
    }

    /// Gives alpha a new target; Holding becomes Blending. A change of style may change the
    /// network.
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

    /// Checks that a module may be pruned: live, old enough, alpha at rest, not being pruned
    /// already.
    ///
    /// # Errors
    /// The rule that forbids it.
    pub fn check_prune(&self, index: usize) -> Result<(), LifecycleError> {
        let stages = [Stage::Germinated, Stage::Training, Stage::Blending, Stage::Holding];
        let (slot, module) = self.module_in(index, "PRUNE", (&stages, "a live module"))?;
        let (age_steps, min_steps) = (module.age_steps, self.rules.min_prune_age_steps);
        if age_steps < min_steps {
            return Err(LifecycleError::TooYoung { slot: slot.name.clone(), age_steps, min_steps });
        }
        module.check_at_rest(&slot.name)
    }

    /// Removes a module: at once, or, if it is blended in and `speed` is not instant, after alpha
    /// went down to 0. Until then it is Blending, and no action may touch it.
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
        match &mut slot.module {
            Some(module) if speed != Speed::Instant && module.alpha.alpha() > 0.0 => {
                module.retarget(&slot.name, 0.0, speed.steps(), curve)?;
                module.pruning = true;
            }
            _ => return slot.enter(index, Stage::Pruned).map(Some),
        }
        match slot.stage {
            Stage::Holding => slot.enter(index, Stage::Blending).map(Some),
            _ => Ok(None),
        }
    }

    /// Removes every live module at once, whatever its age: for the governor's rollback, not for
    /// actions.
    pub fn prune_live(&mut self) -> Vec<StageChange> {
        let slots = self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.stage.is_live());
        slots.filter_map(|(index, slot)| slot.enter(index, Stage::Pruned).ok()).collect()
    }

    /// Turns the host into a fixed network: every module that is blended in becomes permanent, the
    /// others are removed, and all other slots are dormant. For comparisons with fixed networks,
    /// not for actions: no gate is asked.
    pub fn settle(&mut self) {
        for slot in &mut self.slots {
            let blended = matches!(slot.stage, Stage::Blending | Stage::Holding);
            let stays = slot.stage == Stage::Fossilized || (blended && !slot.is_pruning());
            slot.module = slot.module.take().filter(|_| stays);
            slot.stage = if slot.module.is_some() { Stage::Fossilized } else { Stage::Dormant };
            slot.stage_steps = 0;
            if let Some(module) = &mut slot.module {
                module.alpha = AlphaController::at_rest(1.0);
            }
        }
    }

    /// Opens a step (see [`Host`], Time): call it once, before the epoch's training. Returns the
    /// changes of stage that follow from time alone.
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
    // The transitions above are all in the lifecycle, so `enter` cannot refuse.
    let change = next.and_then(|stage| slot.enter(index, stage).ok());
    slot.stage_steps = slot.stage_steps.saturating_add(1);
    change
}

/// Checks that a module of `blueprint` in a slot of `channels` channels is no larger than a host
/// may be.
fn check_size(blueprint: &Blueprint, channels: usize) -> Result<()> {
    let parameters = blueprint.parameters(channels)?;
    if parameters <= MAX_PARAMETERS {
        return Ok(());
    }
    let (name, limit) = (blueprint.name.clone(), MAX_PARAMETERS);
    let problem = format!("{parameters} parameters; at most {limit} are supported");
    Err(BlueprintError::Shape { name, channels, problem }.into())
}
