//! Legality of actions, and their execution.

use meristem_grow::{
    GateInputs, GateOutcome, GateReport, Germination, Host, LifecycleError, Retarget, StageChange,
    WidthChange,
};

use crate::action::{Action, ActionOp};

/// Outcome of an action.
#[derive(Clone, Debug, PartialEq)]
pub struct ActionOutcome {
    /// Whether the action succeeded; false for an ADVANCE or FOSSILIZE whose gate refused.
    pub succeeded: bool,
    /// The change of stage, if any.
    pub change: Option<StageChange>,
    /// The gate's report, for ADVANCE and FOSSILIZE.
    pub gate: Option<GateReport>,
    /// The layer that became wider, for WIDEN.
    pub width: Option<WidthChange>,
}

/// Checks that an action is legal now. An ADVANCE in Germinated, Training or Blending and a
/// FOSSILIZE in Holding are legal even if the gate then refuses.
///
/// # Errors
/// The rule that the action violates.
pub fn legal(action: &Action, host: &Host) -> Result<(), LifecycleError> {
    match *action {
        Action::Wait => Ok(()),
        Action::Germinate { slot, blueprint, .. } => host.check_germinate(slot, blueprint),
        Action::SetAlphaTarget { slot, .. } => host.check_set_alpha_target(slot),
        Action::Prune { slot, .. } => host.check_prune(slot),
        Action::Fossilize { slot } => host.check_fossilize(slot),
        Action::Advance { slot } => host.check_advance(slot),
        Action::Widen { layer, by } => host.check_widen(layer, by),
    }
}

/// The slot mask of an op: true where the op is legal, for GERMINATE with at least one blueprint.
/// All false for WAIT and WIDEN, which have no slot.
pub fn legal_slots(op: ActionOp, host: &Host) -> Vec<bool> {
    let legal = |slot: usize| match op {
        ActionOp::Wait | ActionOp::Widen => false,
        ActionOp::Germinate => legal_blueprints(slot, host).any(|legal| legal),
        ActionOp::SetAlphaTarget => host.check_set_alpha_target(slot).is_ok(),
        ActionOp::Prune => host.check_prune(slot).is_ok(),
        ActionOp::Fossilize => host.check_fossilize(slot).is_ok(),
        ActionOp::Advance => host.check_advance(slot).is_ok(),
    };
    (0..host.slots().len()).map(legal).collect()
}

/// The blueprint mask of GERMINATE in a slot.
pub fn legal_blueprints(slot: usize, host: &Host) -> impl Iterator<Item = bool> {
    (0..host.blueprints().len()).map(move |blueprint| host.check_germinate(slot, blueprint).is_ok())
}

/// The mask of the op head, without WIDEN: true for WAIT, and for every op that is legal in some
/// slot.
pub fn legal_ops(host: &Host) -> [bool; 6] {
    ActionOp::OF_HEAD.map(|op| op == ActionOp::Wait || legal_slots(op, host).contains(&true))
}

/// Executes an action. `measured` has the measurements of each slot; slots beyond its end count as
/// not measured. A new module stores `score_pp`, the current control score in percentage
/// points.
///
/// # Errors
/// The errors of [`legal`]; the host is then unchanged.
pub fn apply(
    action: &Action,
    host: &mut Host,
    measured: &[GateInputs],
    score_pp: Option<f32>,
) -> Result<ActionOutcome, LifecycleError> {
    let inputs = action.slot().and_then(|slot| measured.get(slot)).copied().unwrap_or_default();
    let done = |change| ActionOutcome { succeeded: true, change, gate: None, width: None };
    let evaluated = |outcome: GateOutcome| {
        let GateOutcome { report, change } = outcome;
        ActionOutcome { succeeded: report.passed, change, gate: Some(report), width: None }
    };
    Ok(match *action {
        Action::Wait => done(None),
        Action::Germinate { slot, blueprint, style, tempo, alpha_target } => {
            let what = Germination { blueprint, style, tempo, alpha_target, score_pp };
            done(Some(host.germinate(slot, what)?))
        }
        Action::SetAlphaTarget { slot, style, alpha_target: target, speed, curve } => {
            done(host.set_alpha_target(slot, Retarget { style, target, speed, curve })?)
        }
        Action::Prune { slot, speed, curve } => done(host.prune(slot, speed, curve)?),
        Action::Fossilize { slot } => evaluated(host.fossilize(slot, &inputs)?),
        Action::Advance { slot } => evaluated(host.advance(slot, &inputs)?),
        Action::Widen { layer, by } => {
            let width = Some(host.widen(layer, by)?);
            ActionOutcome { width, ..done(None) }
        }
    })
}
