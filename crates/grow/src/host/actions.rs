//! The actions on a slot: their rules, and their effect.

use super::Host;
use crate::lifecycle::{
    AlphaController, AlphaTarget, Curve, Gate, GateInputs, GateReport, Germination, LifecycleError,
    Module, Slot, Speed, Stage, StageChange, Style,
};

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

impl Host {
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

    /// Checks that a blueprint may germinate in a slot. The slot must be dormant, and the blueprint
    /// must fit its shape. The host must have fewer than `max_modules` modules and none before
    /// Blending, and must stay within `max_parameters` and `max_macs` with the module.
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

    /// Report of the gate to the next stage of a slot; `None` for a stage without a gate, and for
    /// an index beyond the enabled slots.
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
}
