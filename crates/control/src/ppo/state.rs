//! State of a policy in a checkpoint: everything that determines its next decisions.

use std::borrow::Cow;

use meristem_device::{DType, Tensor, read_back};
use meristem_nn::{HostTensor, StateDict};
use serde::{Deserialize, Serialize};

use super::normalizers::Normalizers;
use super::{NAME, Ppo, ScalarMoments};
use crate::action::OpCounts;
use crate::controller::Controller;
use crate::error::{Error, Result};
use crate::layer_observation::LayerHistory;
use crate::normalizer::Normalizer;
use crate::report::op_counts;
use crate::state::ControllerState;

/// The state without its tensors.
#[derive(Debug, Serialize, Deserialize)]
struct PpoMemory {
    seed: u64,
    /// Missing in states of older versions.
    #[serde(default)]
    seeds: Vec<u64>,
    normalizer: Normalizer,
    scale: ScalarMoments,
    step: usize,
    #[serde(rename = "owed")]
    rewards_missing: bool,
    fresh: Vec<bool>,
    decisions: u64,
    #[serde(with = "op_counts")]
    ops: OpCounts,
    skipped: usize,
    /// Memory of the teacher; missing in states of older versions.
    #[serde(default)]
    teacher: Option<Vec<u8>>,
    /// Normalisers of the slots, of the blueprints and of the layers, if the policy has these sets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    set_normalizers: Option<Vec<Normalizer>>,
    /// Memory about the layers of each env; empty unless the policy observes layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    layers: Vec<LayerHistory>,
    /// Rounds learned from; missing in states of older versions, whose rounds have equal lengths.
    #[serde(default)]
    rounds: Option<u64>,
    /// Number of exchanges; `None` for a policy on a single rank.
    #[serde(default)]
    exchanges: Option<u64>,
}

/// Name of the LSTM state.
const STATE: &str = "state";

const ENTROPIES: &str = "entropies";

/// Tensors of the rollout and LSTM, with names. Tensors that the end of a round recomputes are not
/// saved.
fn buffers(ppo: &Ppo) -> Vec<(String, &Tensor)> {
    let rollout = &ppo.rollout;
    let inputs = ppo.policy.shape().inputs().into_iter().zip(&rollout.inputs);
    let inputs = inputs.map(|(input, tensor)| (input.name, tensor));
    let results = [
        ("choices", &rollout.choices),
        ("legal", &rollout.legal),
        ("log_probs", &rollout.log_probs),
        (ENTROPIES, &rollout.entropies),
        ("values", &rollout.values),
        ("rewards", &rollout.rewards),
        ("bootstraps", &rollout.bootstraps),
        ("truncated", &rollout.truncated),
        ("terminated", &rollout.terminated),
    ];
    let of_rollout =
        inputs.chain(results).map(|(name, tensor)| (format!("rollout.{name}"), tensor));
    std::iter::once((STATE.into(), &ppo.state)).chain(of_rollout).collect()
}

/// Saves the state of a checkpoint. One read-back more than [`save_learned`].
///
/// # Errors
/// A failed device.
pub(super) fn save(ppo: &Ppo) -> Result<ControllerState> {
    let mut state = save_learned(ppo)?;
    let buffers = buffers(ppo);
    let tensors: Vec<&Tensor> = buffers.iter().map(|(_, tensor)| *tensor).collect();
    let raw = read_back(&tensors)?;
    for ((name, tensor), bytes) in buffers.into_iter().zip(raw) {
        let values = as_f32(tensor.dtype(), &bytes);
        state.tensors.insert(name, HostTensor::f32(tensor.dims(), values));
    }
    Ok(state)
}

/// Saves everything but the rollout and the LSTM state. From such a state a round begins anew.
///
/// # Errors
/// A failed device.
pub(super) fn save_learned(ppo: &Ppo) -> Result<ControllerState> {
    let mut tensors = StateDict::default();
    let ranks = ppo.ranks.as_ref();
    let exchanges = ranks.map(|ranks| ranks.save(&mut tensors)).transpose()?;
    let teacher = ppo.teacher.as_ref();
    let teacher = teacher.map(|teacher| Ok::<_, Error>(teacher.heuristic.save()?.memory));
    let memory = PpoMemory {
        seed: ppo.seed,
        seeds: ppo.seeds.clone(),
        normalizer: ppo.normalizers.observations.clone(),
        set_normalizers: ppo.normalizers.sets.clone(),
        layers: ppo.step_inputs.layers.clone(),
        rounds: Some(ppo.rounds),
        scale: ppo.scale,
        step: ppo.step,
        rewards_missing: ppo.rewards_missing,
        fresh: ppo.fresh.clone(),
        decisions: ppo.decisions,
        ops: ppo.ops,
        skipped: ppo.skipped,
        teacher: teacher.transpose()?,
        exchanges,
    };
    let mut state = ControllerState { tensors, ..ControllerState::from_memory(NAME, &memory)? };
    let weights = ppo.policy.state_dict()?;
    let optimiser = ppo.policy.optimiser_dict()?;
    for (part, dict) in [("policy.", weights), ("optimiser.", optimiser)] {
        for (name, tensor) in dict.0 {
            state.tensors.insert(format!("{part}{name}"), tensor);
        }
    }
    Ok(state)
}

/// Restores the state of a checkpoint. All or nothing.
///
/// # Errors
/// [`Error::BadState`] for a damaged state, or the state of another run; a failed device.
pub(super) fn restore(ppo: &mut Ppo, state: &ControllerState) -> Result<()> {
    let memory: PpoMemory = state.memory(NAME)?;
    let bad = |problem: String| Error::BadState { controller: NAME.into(), problem };
    let envs = ppo.rollout.shape().envs;
    let begins_anew = memory.step == 0 && state.tensors.get(STATE).is_none();
    let normalizers = Normalizers {
        observations: memory.normalizer.clone(),
        sets: memory.set_normalizers.clone(),
    };
    let fits = ppo.normalizers.accept(&normalizers)
        && memory.scale.is_usable()
        && (memory.fresh.len() == envs || begins_anew)
        && (memory.layers.len() == ppo.step_inputs.layers.len() || begins_anew)
        && memory.step <= ppo.rollout.shape().steps
        && memory.step as u64 <= memory.decisions;
    if !fits {
        return Err(bad(format!(
            "it belongs to a run with another number of envs than {envs}, or with other slots"
        )));
    }
    if memory.seed != ppo.seed {
        let (got, own) = (memory.seed, ppo.seed);
        return Err(bad(format!("it belongs to a run with seed {got}, this run has seed {own}")));
    }
    if memory.exchanges.is_some() != ppo.ranks.is_some() {
        return Err(bad("only one of the two runs learns over several ranks".into()));
    }
    // All checks come before the first change.
    let mut heuristic = ppo.teacher.as_ref().map(|teacher| teacher.heuristic.clone());
    if let (Some(heuristic), Some(memory)) = (&mut heuristic, memory.teacher) {
        let state = ControllerState { memory, ..ControllerState::default() };
        heuristic.restore(&state).map_err(|error| bad(error.to_string()))?;
    }
    let mut restored = vec![];
    let buffers = if begins_anew { vec![] } else { buffers(ppo) };
    for (name, tensor) in buffers {
        let Some(values) = saved(state, &name, tensor) else {
            return Err(bad(format!("it has no tensor `{name}` with shape {:?}", tensor.dims())));
        };
        restored.push((tensor.clone(), values));
    }
    let part = |part: &str| {
        let of = state.tensors.iter();
        let own = of.filter_map(|(name, t)| Some((name.strip_prefix(part)?, t)));
        StateDict(own.map(|(name, t)| (name.to_string(), t.clone())).collect())
    };
    let before = ppo.policy.state_dict()?;
    ppo.policy.load_state_dict(&part("policy.")).map_err(|error| bad(error.to_string()))?;
    if let Err(error) = ppo.policy.load_optimiser_dict(&part("optimiser.")) {
        ppo.policy.load_state_dict(&before)?;
        return Err(bad(error.to_string()));
    }
    for (tensor, values) in restored {
        match tensor.dtype() {
            DType::U8 => tensor.copy_from_slice(&whole(&values, |x| x as u8))?,
            DType::U32 => tensor.copy_from_slice(&whole(&values, |x| x as u32))?,
            _ => tensor.copy_from_slice(&values)?,
        }
    }
    if let Some((ranks, exchanges)) = ppo.ranks.as_mut().zip(memory.exchanges) {
        ranks.restore(exchanges, &state.tensors);
    }
    let PpoMemory {
        seeds,
        scale,
        rounds,
        step,
        rewards_missing,
        fresh,
        decisions,
        ops,
        skipped,
        layers,
        ..
    } = memory;
    if !seeds.is_empty() {
        ppo.seeds = seeds;
    }
    if let (Some(teacher), Some(heuristic)) = (&mut ppo.teacher, heuristic) {
        teacher.heuristic = heuristic;
    }
    (ppo.normalizers, ppo.scale, ppo.step) = (normalizers, scale, step);
    let of_equal_length = (decisions - step as u64).checked_div(ppo.rollout.shape().steps as u64);
    ppo.rounds = rounds.or(of_equal_length).unwrap_or(0);
    (ppo.rewards_missing, ppo.fresh, ppo.decisions) = (rewards_missing, fresh, decisions);
    (ppo.ops, ppo.skipped) = (ops, skipped);
    // Every env begins a trajectory, which clears its memory.
    if begins_anew {
        ppo.fresh = vec![true; envs];
        ppo.rollout.begin()?;
    } else {
        ppo.step_inputs.layers = layers;
    }
    ppo.set_floors()
}

/// Elements of a buffer in a saved state, extended to the current format. Older states have no
/// entropies, and one row less in each result of the draw. Missing elements become zeros: the next
/// steps overwrite them before they are read.
fn saved<'s>(state: &'s ControllerState, name: &str, tensor: &Tensor) -> Option<Cow<'s, [f32]>> {
    let (dims, len) = (tensor.dims(), tensor.numel());
    let Some(saved) = state.tensors.get(name) else {
        return (name.strip_prefix("rollout.") == Some(ENTROPIES)).then(|| vec![0.0; len].into());
    };
    let values = saved.as_f32().filter(|_| saved.is_whole())?;
    let is_drawn = ["choices", "legal", "log_probs", "values"]
        .iter()
        .any(|drawn| name.strip_prefix("rollout.") == Some(drawn));
    match (&saved.shape[..], dims) {
        (shape, dims) if shape == dims => Some(values.into()),
        ([rows, rest @ ..], [all, own @ ..]) if is_drawn && rows + 1 == *all && rest == own => {
            let mut values = values.to_vec();
            values.resize(len, 0.0);
            Some(values.into())
        }
        _ => None,
    }
}

/// Elements as f32, which is exact for flags and small indices.
fn as_f32(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let words = || bytes.chunks_exact(4).map(|b| b.try_into().unwrap_or_default());
    match dtype {
        DType::U8 => bytes.iter().copied().map(f32::from).collect(),
        DType::U32 => words().map(|b| u32::from_le_bytes(b) as f32).collect(),
        _ => words().map(f32::from_le_bytes).collect(),
    }
}

fn whole<T>(values: &[f32], convert: impl Fn(f32) -> T) -> Vec<T> {
    values.iter().copied().map(convert).collect()
}
