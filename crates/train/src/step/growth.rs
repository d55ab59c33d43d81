//! Growth in the slots of an env: execution of actions, and their events.

use meristem_control::{Action, ActionContext, ActionOp, ActionOutcome, apply};
use meristem_grow::{Comparison, GateReport, Host, Stage, StageChange, WidthChange};

use crate::env::Env;
use crate::error::Result;
use crate::position::StepPosition;
use crate::record::events::{Event, SlotState};
use crate::record::journal::Journal;
use crate::setup::Setup;

/// Opens a step for an env and records the stages that changed with time.
///
/// # Errors
/// Out of memory, a failed stream.
pub(crate) fn open_step(
    env: &mut Env,
    setup: &Setup,
    when: StepPosition,
    journal: &mut Journal<'_>,
) -> Result<()> {
    let before = ModulesBefore::new(env);
    let changes = env.open_step(setup, when)?;
    changes.iter().for_each(|change| before.record_change(env, change, when, journal));
    Ok(())
}

/// Executes a controller's action and computes its reward. Returns the action in words. `state` is
/// the state before the action.
///
/// # Errors
/// An illegal action, which is a bug in the controller.
pub(crate) fn act(
    env: &mut Env,
    action: &Action,
    state: &ActionContext,
    setup: &Setup,
    when: StepPosition,
    journal: &mut Journal<'_>,
) -> Result<String> {
    let before = ModulesBefore::new(env);
    let words = describe(action, &env.grown.host);
    let (seen, score_pp) = (&env.seen, env.seen.scores_pp.last().copied());
    let outcome = apply(action, &mut env.grown.host, &seen.measured, score_pp)
        .map_err(meristem_grow::Error::from)?;
    env.acted(action.op(), state, &outcome, &setup.reward());
    let ActionOutcome { change, gate, width, .. } = outcome;
    if let Some(width) = width {
        env.grown.note_wider(setup, when.step)?;
        journal.emit(widened(env, width, when));
    }
    if let (Some(report), Some(slot)) = (&gate, action.slot()) {
        journal.emit(gate_event(env, slot, report, when));
    }
    if let Some(change) = &change {
        if action.op() == ActionOp::Germinate
            && let Some(event) = germinated(env, change.index, when)
        {
            journal.emit(event);
        }
        before.record_change(env, change, when, journal);
    }
    Ok(words)
}

/// Describes an action, such as `GERMINATE r0c1 conv_light`.
fn describe(action: &Action, host: &Host) -> String {
    let slot = action.slot().and_then(|slot| host.slots().get(slot));
    let layer = match *action {
        Action::Widen { layer, .. } => host.widenable().get(layer).map(|layer| layer.name.clone()),
        _ => None,
    };
    let name = slot.map(|slot| slot.name.to_string()).or(layer);
    let blueprint = match *action {
        Action::Germinate { blueprint, .. } => {
            host.blueprints().get(blueprint).map(|blueprint| blueprint.name.clone())
        }
        _ => None,
    };
    let parts = [Some(action.op().to_string()), name, blueprint];
    parts.into_iter().flatten().collect::<Vec<String>>().join(" ")
}

/// Blueprint and contribution of each slot before a change that may empty it.
pub(crate) struct ModulesBefore {
    blueprints: Vec<Option<String>>,
    contributions: Vec<Option<f64>>,
}

impl ModulesBefore {
    pub(crate) fn new(env: &Env) -> Self {
        let blueprint = |slot: &meristem_grow::Slot| {
            slot.module.as_ref().map(|module| module.blueprint.name.clone())
        };
        Self {
            blueprints: env.grown.host.slots().iter().map(blueprint).collect(),
            contributions: contributions(env),
        }
    }

    /// Records a change of stage, and updates the counts of modules germinated, pruned and
    /// fossilized.
    pub(crate) fn record_change(
        &self,
        env: &mut Env,
        change: &StageChange,
        when: StepPosition,
        journal: &mut Journal<'_>,
    ) {
        let StepPosition { round, step } = when;
        let index = env.index;
        let slot = change.slot.to_string();
        let (from, to) = (change.from.into(), change.to.into());
        let slot_name = slot.clone();
        journal.emit(Event::StageChanged { env: index, round, step, slot: slot_name, from, to });
        let blueprint = self.blueprints.get(change.index).cloned().flatten().unwrap_or_default();
        let contribution = self.contributions.get(change.index).copied().flatten();
        match change.to {
            Stage::Germinated => env.module_counts.germinated += 1,
            Stage::Pruned => {
                env.module_counts.pruned += 1;
                journal.emit(Event::ModulePruned {
                    env: index,
                    round,
                    step,
                    slot,
                    blueprint,
                    contribution,
                });
            }
            Stage::Fossilized => {
                env.module_counts.fossilized += 1;
                journal.emit(Event::ModuleFossilized {
                    env: index,
                    round,
                    step,
                    slot,
                    blueprint,
                    contribution,
                });
            }
            _ => {}
        }
    }
}

fn contributions(env: &Env) -> Vec<Option<f64>> {
    env.seen.measured.iter().map(|measured| measured.contribution_pp.map(f64::from)).collect()
}

/// The event of the module that was just planted in slot `index`.
fn germinated(
    env: &Env,
    index: usize,
    StepPosition { round, step }: StepPosition,
) -> Option<Event> {
    let slot = &env.grown.host.slots()[index];
    let module = slot.module.as_ref()?;
    Some(Event::ModuleGerminated {
        env: env.index,
        round,
        step,
        slot: slot.name.to_string(),
        blueprint: module.blueprint.name.clone(),
        style: module.style.into(),
        parameters: module.blueprint.parameters(slot.dims).unwrap_or(0),
    })
}

fn widened(
    env: &Env,
    WidthChange { layer, from, to }: WidthChange,
    StepPosition { round, step }: StepPosition,
) -> Event {
    let host_parameters = env.grown.host.bare_parameters();
    Event::LayerWidened { env: env.index, round, step, layer, from, to, host_parameters }
}

fn gate_event(
    env: &Env,
    slot: usize,
    report: &GateReport,
    StepPosition { round, step }: StepPosition,
) -> Event {
    let reason = |condition: &meristem_grow::Condition| {
        let value = condition.value.map_or("not measured".into(), |value| format!("{value:.4}"));
        let needs = match condition.comparison {
            Comparison::AtLeast => "at least",
            Comparison::AtMost => "at most",
        };
        format!("{}: {value}, needs {needs} {}", condition.name, condition.threshold)
    };
    Event::GateEvaluated {
        env: env.index,
        round,
        step,
        slot: env.grown.host.slots()[slot].name.to_string(),
        target: report.gate.target().into(),
        passed: report.passed,
        reasons: report.failed().map(reason).collect(),
    }
}

/// States of the slots that are not dormant, with gradient health if `health` is set.
pub(crate) fn slot_states(env: &Env, health: bool) -> Vec<SlotState> {
    let state = |(slot, measured): (&meristem_grow::Slot, &meristem_grow::GateInputs)| SlotState {
        slot: slot.name.to_string(),
        stage: slot.stage.into(),
        blueprint: slot.module.as_ref().map(|module| module.blueprint.name.clone()),
        alpha: f64::from(slot.alpha()),
        contribution: measured.contribution_pp.map(f64::from),
        gradient_health: measured.gradient_health.filter(|_| health).map(|found| found.health),
    };
    let slots = env.grown.host.slots().iter().zip(&env.seen.measured);
    slots.filter(|(slot, _)| slot.stage != Stage::Dormant).map(state).collect()
}
