//! Conversion of env views to Python, and of actions from Python.

use meristem_control::{
    Action, ActionOp, Choices, EnvView, HeadKind, HeadLayout, Legality, legal, legal_blueprints,
    observation_len, parse_action, write_observation,
};
use meristem_grow::WidenableLayer;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::dlpack::Array;

/// Converts a view to a dictionary: the arguments of `meristem.control.Env`.
pub(crate) fn to_python<'py>(py: Python<'py>, view: &EnvView<'_>) -> PyResult<Bound<'py, PyDict>> {
    let env = PyDict::new(py);
    env.set_item("env", view.env)?;
    env.set_item("step", view.step)?;
    env.set_item("episode_steps", view.episode_steps)?;
    env.set_item("scores", shares(view.scores_pp))?;
    env.set_item("losses", view.losses)?;
    env.set_item("twin_loss", view.twin_loss)?;
    env.set_item("train_losses", view.train_losses)?;
    let last = view.last.map(|(op, succeeded)| (op.name(), succeeded));
    env.set_item("last", last)?;
    let slots = (0..view.host.slots().len()).map(|slot| slot_to_python(py, view, slot));
    env.set_item("slots", slots.collect::<PyResult<Vec<_>>>()?)?;
    let layers = view.host.widenable().into_iter().map(|layer| layer_to_python(py, layer));
    env.set_item("layers", layers.collect::<PyResult<Vec<_>>>()?)?;
    env.set_item("observation", Py::new(py, observation(view))?)?;
    env.set_item("op_mask", Py::new(py, op_mask(view))?)?;
    env.set_item("slot_mask", Py::new(py, slot_mask(view))?)?;
    env.set_item("blueprint_mask", Py::new(py, blueprint_mask(view))?)?;
    Ok(env)
}

fn layer_to_python(py: Python<'_>, layer: WidenableLayer) -> PyResult<Bound<'_, PyDict>> {
    let about = PyDict::new(py);
    about.set_item("layer", layer.name)?;
    about.set_item("features", layer.features)?;
    let slots = layer.slots.iter().map(ToString::to_string);
    about.set_item("slots", slots.collect::<Vec<_>>())?;
    Ok(about)
}

/// Converts percentage points to shares, 0..1.
fn shares(points: &[f32]) -> Vec<f32> {
    points.iter().map(|points| points / 100.0).collect()
}

fn slot_to_python<'py>(
    py: Python<'py>,
    view: &EnvView<'_>,
    index: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let (slot, measured) = (&view.host.slots()[index], view.measured(index));
    let about = PyDict::new(py);
    about.set_item("slot", slot.name.to_string())?;
    about.set_item("channels", slot.dims.c)?;
    about.set_item("stage", slot.stage.to_string())?;
    about.set_item("stage_steps", slot.stage_steps)?;
    about.set_item("alpha", slot.alpha())?;
    let module = slot.module.as_ref();
    about.set_item("blueprint", module.map(|module| module.blueprint.name.clone()))?;
    about.set_item("age", module.map_or(0, |module| module.age_steps))?;
    about.set_item("contribution", measured.contribution_pp)?;
    about.set_item("gradient_health", measured.gradient_health.map(|found| found.health))?;
    about.set_item("gate_passes", view.gate_passes(index))?;
    let legality = Legality::from_host(view.host);
    let is_legal = |op: &&ActionOp| legality.slots(**op).get(index).is_some_and(|legal| *legal);
    let ops: Vec<&str> = ActionOp::OF_HEAD.iter().filter(is_legal).map(|op| op.name()).collect();
    about.set_item("ops", ops)?;
    let blueprints = view.host.blueprints().iter().zip(legal_blueprints(index, view.host));
    let blueprints = blueprints.filter(|(_, legal)| *legal);
    let names: Vec<String> = blueprints.map(|(blueprint, _)| blueprint.name.clone()).collect();
    about.set_item("blueprints", names)?;
    Ok(about)
}

/// The input of a policy, then the blueprint of each slot, one-hot with "none" last.
fn observation(view: &EnvView<'_>) -> Array {
    let (slots, blueprints) = (view.host.slots().len(), view.host.blueprints().len());
    let mut row = vec![0.0_f32; observation_len(slots)];
    let mut planted = vec![0; slots];
    write_observation(view, &mut row, &mut planted);
    for index in planted {
        row.extend((0..=blueprints).map(|known| f32::from(u8::from(known as u32 == index))));
    }
    Array::of(row)
}

fn op_mask(view: &EnvView<'_>) -> Array {
    let legality = Legality::from_host(view.host);
    Array::of(ActionOp::OF_HEAD.map(|op| i8::from(legality.op(op))).to_vec())
}

/// int8 (ops, slots).
fn slot_mask(view: &EnvView<'_>) -> Array {
    let legality = Legality::from_host(view.host);
    let rows = ActionOp::OF_HEAD.iter().flat_map(|op| legality.slots(*op).to_vec());
    let mask: Vec<i8> = rows.map(i8::from).collect();
    Array::shaped(mask, &[ActionOp::OF_HEAD.len(), view.host.slots().len()])
}

/// int8 (slots, blueprints).
fn blueprint_mask(view: &EnvView<'_>) -> Array {
    let slots = view.host.slots().len();
    let mask: Vec<i8> =
        (0..slots).flat_map(|slot| legal_blueprints(slot, view.host)).map(i8::from).collect();
    Array::shaped(mask, &[slots, view.host.blueprints().len()])
}

/// Sizes of the heads of an action, for the host of the view.
pub(crate) fn head_sizes(view: &EnvView<'_>) -> Vec<usize> {
    let host = view.host;
    HeadLayout::new(host.slots().len(), host.blueprints().len()).sizes().to_vec()
}

/// Converts a Python value to an action: `None` for WAIT, one choice per head, or the JSON of a
/// line of a script.
///
/// # Errors
/// A description of the value that was expected.
pub(crate) fn action(value: &Bound<'_, PyAny>, view: &EnvView<'_>) -> Result<Action, String> {
    if value.is_none() {
        return Ok(Action::Wait);
    }
    if let Ok(text) = value.extract::<String>() {
        return parse_action(&text, view.host);
    }
    let sizes = head_sizes(view);
    let expected = || format!("expected one choice per head, below {sizes:?}");
    let choices: Choices = value.extract().map_err(|_| expected())?;
    let slot = HeadKind::Slot as usize;
    let inside = choices[slot] < sizes[slot];
    let action = Action::from_choices(&choices).filter(|_| inside);
    action.ok_or_else(|| format!("got {choices:?}, {}", expected()))
}

/// Converts a list of Python values to actions, one for each view.
///
/// # Errors
/// A description of the first value that is not an action, or is an illegal one.
pub(crate) fn actions(
    values: &Bound<'_, PyList>,
    views: &[EnvView<'_>],
) -> Result<Vec<Action>, String> {
    if values.len() != views.len() {
        let (expected, got) = (views.len(), values.len());
        return Err(format!("expected an action for each of {expected} envs, got {got}"));
    }
    let checked = |(value, view): (Bound<'_, PyAny>, &EnvView<'_>)| {
        let (env, step) = (view.env, view.step);
        let action = action(&value, view).map_err(|p| format!("action of env {env}: {p}"))?;
        let op = action.op();
        legal(&action, view.host)
            .map_err(|rule| format!("{op} is not legal in env {env} at step {step}: {rule}"))?;
        Ok(action)
    };
    values.iter().zip(views).map(checked).collect()
}
