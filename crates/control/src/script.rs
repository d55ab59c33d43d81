//! A controller that follows a script file.
//!
//! The file has one JSON object per line. Empty lines and lines that begin with `#` are skipped:
//!
//! ```text
//! {"step": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_light", "tempo": "fast"}
//! {"step": 1, "op": "ADVANCE", "slot": "r0c1"}
//! {"step": 9, "env": 2, "op": "PRUNE", "slot": "r0c1", "alpha_speed": "instant"}
//! {"step": 9, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm", "then": "FOSSILIZE"}
//! {"step": 20, "op": "WIDEN", "layer": "blocks.1.conv", "by": 4}
//! ```
//!
//! | key | meaning | for |
//! |---|---|---|
//! | `step` | step of every episode, from 0 | all |
//! | `env` | index of the env; without it, every env that has no line for this step | all |
//! | `op` | the operation | all |
//! | `slot` | name of the slot | all except WAIT and WIDEN |
//! | `layer` | name of a layer that can become wider | WIDEN |
//! | `by` | number of further features | WIDEN |
//! | `blueprint` | name of the blueprint | GERMINATE |
//! | `then` | FOSSILIZE: the module also advances and becomes permanent | GERMINATE |
//! | `tempo` | duration of the first blending | GERMINATE |
//! | `style` | blending style | GERMINATE, SET_ALPHA_TARGET |
//! | `alpha_target` | target of alpha, as text | GERMINATE, SET_ALPHA_TARGET |
//! | `alpha_speed` | duration of alpha's move | SET_ALPHA_TARGET, PRUNE |
//! | `alpha_curve` | curve of alpha's move | SET_ALPHA_TARGET, PRUNE |
//!
//! `env` is optional, and so are these keys:
//!
//! | key | values, the default first |
//! |---|---|
//! | `tempo` | `standard`, `fast`, `slow` |
//! | `style` | `linear_add`, `linear_multiply`, `sigmoid_add`, `linear_gate` |
//! | `alpha_target` | `1.0`, `0.5`, `0.7` |
//! | `alpha_speed` | `instant`, `fast`, `medium`, `slow` |
//! | `alpha_curve` | `linear`, `cosine`, `sigmoid_gentle`, `sigmoid`, `sigmoid_sharp` |
//!
//! With `then` the module germinates at `step`, or at the first later step at which GERMINATE is
//! legal. Afterwards it advances as soon as its gates pass, until it is fossilized. These actions
//! use steps without a line; all other steps without a line are WAIT.
//!
//! Errors are an unknown key, a key that the op does not use, a second line without `then` for the
//! same step and env, and an action that is illegal at its step. A gate that refuses is no error;
//! the script may try again. In an env that the governor rolled back, modules may be missing:
//! illegal actions are then skipped until the end of the episode.

use std::collections::{BTreeMap, BTreeSet};

use meristem_grow::{AlphaTarget, Curve, Host, Speed, Stage, Style, Tempo, nearest};
use serde::Deserialize;

use crate::action::{Action, ActionOp};
use crate::controller::Controller;
use crate::error::{Error, Result};
use crate::heads::HEADS;
use crate::rules::legal;
use crate::state::ControllerState;
use crate::view::EnvView;

/// A line of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScriptLine {
    step: u32,
    env: Option<usize>,
    op: ActionOp,
    then: Option<ActionOp>,
    slot: Option<String>,
    blueprint: Option<String>,
    style: Option<Style>,
    tempo: Option<Tempo>,
    alpha_target: Option<AlphaTarget>,
    alpha_speed: Option<Speed>,
    alpha_curve: Option<Curve>,
    layer: Option<String>,
    by: Option<usize>,
}

/// Parses an action in the form of a script line without `step`, `env` and `then`: `{"op":
/// "GERMINATE", "slot": "r0c1", "blueprint": "norm"}`. Does not check legality.
///
/// # Errors
/// A description of the problem and of the expected form.
pub fn parse_action(text: &str, host: &Host) -> Result<Action, String> {
    let mut keys: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    if let Some(key) = ["step", "env", "then"].into_iter().find(|key| keys.contains_key(*key)) {
        return Err(format!("`{key}` belongs to a script, not to an action"));
    }
    keys.insert("step".into(), 0.into());
    let line: ScriptLine =
        serde_json::from_value(keys.into()).map_err(|error| error.to_string())?;
    line.action(host)
}

/// A germination with `then`, and the advances that follow it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ScriptedGrowth {
    line: usize,
    /// First step in which the module may germinate.
    from: u32,
    env: Option<usize>,
    slot: usize,
    germinate: Action,
}

impl ScriptedGrowth {
    /// The next action for the module; `None` if nothing is due now.
    fn next(&self, view: &EnvView<'_>) -> Option<Action> {
        let Self { from, env, slot, germinate, .. } = *self;
        if view.step < from || env.is_some_and(|env| env != view.env) {
            return None;
        }
        let action = match view.host.slots()[slot].stage {
            Stage::Dormant => germinate,
            Stage::Holding if view.gate_passes(slot) => Action::Fossilize { slot },
            Stage::Holding => return None,
            _ if view.gate_passes(slot) => Action::Advance { slot },
            _ => return None,
        };
        legal(&action, view.host).is_ok().then_some(action)
    }
}

/// An action and the number of its line.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ScriptEntry {
    line: usize,
    action: Action,
}

/// Follows the same script in every episode: one JSON object per line, such as `{"step": 0, "op":
/// "GERMINATE", "slot": "r0c1", "blueprint": "conv_light"}`. `docs/control.md` has the format.
#[derive(Clone, Debug, PartialEq)]
pub struct Script {
    name: String,
    entries: BTreeMap<(u32, Option<usize>), ScriptEntry>,
    /// Germinations with `then`, in the order of the file.
    growths: Vec<ScriptedGrowth>,
    /// Envs that were rolled back in this episode.
    rolled_back: BTreeSet<usize>,
}

impl Script {
    /// Parses a script for hosts like `host`. `name` is the controller's name in the configuration.
    ///
    /// # Errors
    /// [`Error::Script`] with the line and the expected form.
    pub fn parse(name: &str, text: &str, host: &Host) -> Result<Self> {
        let (mut entries, mut growths) = (BTreeMap::new(), vec![]);
        for (index, text) in text.lines().enumerate() {
            let (line, text) = (index + 1, text.trim());
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let fault = |problem| Error::Script { line, problem };
            let parsed: ScriptLine =
                serde_json::from_str(text).map_err(|e| fault(e.to_string()))?;
            let action = parsed.action(host).map_err(fault)?;
            if let Some(growth) = parsed.growth(line, action).map_err(fault)? {
                growths.push(growth);
                continue;
            }
            let key = (parsed.step, parsed.env);
            if let Some(ScriptEntry { line: first, .. }) =
                entries.insert(key, ScriptEntry { line, action })
            {
                let problem = format!(
                    "step {} has an action already, in line {first}; give one per step and env",
                    parsed.step
                );
                return Err(fault(problem));
            }
        }
        Ok(Self { name: name.into(), entries, growths, rolled_back: BTreeSet::new() })
    }

    /// Line numbers, from 1, of the lines without effect in episodes of `steps` steps of these
    /// envs: their step is not reached, or there is no such env.
    pub fn idle_lines(&self, steps: usize, envs: &BTreeSet<usize>) -> Vec<usize> {
        let entries = self.entries.iter().map(|((step, env), entry)| (entry.line, *step, *env));
        let growths = self.growths.iter().map(|growth| (growth.line, growth.from, growth.env));
        let idle = |step: u32, env: Option<usize>| {
            step as usize >= steps || env.is_some_and(|env| !envs.contains(&env))
        };
        let lines = entries.chain(growths).filter(|(_, step, env)| idle(*step, *env));
        let mut lines: Vec<usize> = lines.map(|(line, ..)| line).collect();
        lines.sort_unstable();
        lines
    }

    /// Chooses the action of an env. An illegal action of the script is an error, or WAIT if the
    /// env was rolled back in this episode.
    pub(crate) fn decide(&self, view: &EnvView<'_>, is_rolled_back: bool) -> Result<Action> {
        let own = self.entries.get(&(view.step, Some(view.env)));
        let Some(entry) = own.or_else(|| self.entries.get(&(view.step, None))) else {
            let next = self.growths.iter().find_map(|growth| growth.next(view));
            return Ok(next.unwrap_or(Action::Wait));
        };
        let ScriptEntry { line, action } = *entry;
        let (env, step) = (view.env, view.step);
        match legal(&action, view.host) {
            Ok(()) => Ok(action),
            Err(_) if is_rolled_back => Ok(Action::Wait),
            Err(reason) => Err(Error::ScriptIllegal { line, env, step, reason }),
        }
    }
}

impl Controller for Script {
    fn name(&self) -> &str {
        &self.name
    }

    fn begin_episode(&mut self, env: usize) {
        self.rolled_back.remove(&env);
    }

    fn copy_env(&mut self, from: usize, to: usize) {
        if self.rolled_back.contains(&from) {
            self.rolled_back.insert(to);
        } else {
            self.rolled_back.remove(&to);
        }
    }

    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        let is_rolled_back = |env| self.rolled_back.contains(&env);
        views.iter().map(|view| self.decide(view, is_rolled_back(view.env))).collect()
    }

    fn roll_back(&mut self, env: usize, _cause: Option<usize>, _penalty: f32) -> Result<()> {
        self.rolled_back.insert(env);
        Ok(())
    }

    fn save(&self) -> Result<ControllerState> {
        ControllerState::from_memory(&self.name, &self.rolled_back)
    }

    fn restore(&mut self, state: &ControllerState) -> Result<()> {
        self.rolled_back = state.memory(&self.name)?;
        Ok(())
    }
}

impl ScriptLine {
    fn action(&self, host: &Host) -> Result<Action, String> {
        self.check_keys()?;
        let style = self.style.unwrap_or(Style::LinearAdd);
        let alpha_target = self.alpha_target.unwrap_or(AlphaTarget::Full);
        let speed = self.alpha_speed.unwrap_or(Speed::Instant);
        let curve = self.alpha_curve.unwrap_or(Curve::Linear);
        let tempo = self.tempo.unwrap_or(Tempo::Standard);
        Ok(match self.op {
            ActionOp::Wait => Action::Wait,
            ActionOp::Germinate => Action::Germinate {
                slot: self.slot(host)?,
                blueprint: self.blueprint(host)?,
                style,
                tempo,
                alpha_target,
            },
            ActionOp::SetAlphaTarget => {
                Action::SetAlphaTarget { slot: self.slot(host)?, style, alpha_target, speed, curve }
            }
            ActionOp::Prune => Action::Prune { slot: self.slot(host)?, speed, curve },
            ActionOp::Fossilize => Action::Fossilize { slot: self.slot(host)? },
            ActionOp::Advance => Action::Advance { slot: self.slot(host)? },
            ActionOp::Widen => Action::Widen { layer: self.layer(host)?, by: self.by()? },
        })
    }

    /// The germination of a line with `then`.
    fn growth(&self, line: usize, germinate: Action) -> Result<Option<ScriptedGrowth>, String> {
        let (from, env) = (self.step, self.env);
        match (self.then, germinate) {
            (None, _) => Ok(None),
            (Some(ActionOp::Fossilize), Action::Germinate { slot, .. }) => {
                Ok(Some(ScriptedGrowth { line, from, env, slot, germinate }))
            }
            (Some(ActionOp::Fossilize), _) => Err(format!("{} has no `then`", self.op)),
            (Some(op), _) => Err(format!("`then` is FOSSILIZE, not {op}")),
        }
    }

    /// Checks that the line has only keys that the op uses.
    fn check_keys(&self) -> Result<(), String> {
        let given = [
            false, // every line has an op
            self.slot.is_some(),
            self.blueprint.is_some(),
            self.style.is_some(),
            self.tempo.is_some(),
            self.alpha_target.is_some(),
            self.alpha_speed.is_some(),
            self.alpha_curve.is_some(),
        ];
        let superfluous =
            HEADS.iter().zip(given).find(|(h, given)| *given && !h.is_used_by(self.op));
        let of_width = [("layer", self.layer.is_some()), ("by", self.by.is_some())];
        let of_width = of_width.into_iter().find(|(_, given)| *given && self.op != ActionOp::Widen);
        match superfluous.map(|(head, _)| head.name).or(of_width.map(|(key, _)| key)) {
            Some(key) => Err(format!("{} has no `{key}`", self.op)),
            None => Ok(()),
        }
    }

    fn layer(&self, host: &Host) -> Result<usize, String> {
        let wanted = self.layer.as_deref().ok_or_else(|| format!("{} needs a `layer`", self.op))?;
        host.find_layer(wanted).map_err(|error| error.to_string())
    }

    fn by(&self) -> Result<usize, String> {
        let by = self.by.filter(|by| *by > 0);
        by.ok_or_else(|| format!("{} needs `by`, a number of features from 1 on", self.op))
    }

    fn slot(&self, host: &Host) -> Result<usize, String> {
        let names: Vec<String> = host.slots().iter().map(|slot| slot.name.to_string()).collect();
        let known = names.join(", ");
        let Some(wanted) = &self.slot else {
            return Err(format!("{} needs a `slot`: one of {known}", self.op));
        };
        host.index_of(wanted).ok_or_else(|| {
            let near = nearest(wanted, names.iter().map(String::as_str));
            let hint = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            format!("slot `{wanted}` is not enabled here, expected one of {known}{hint}")
        })
    }

    fn blueprint(&self, host: &Host) -> Result<usize, String> {
        let Some(wanted) = &self.blueprint else {
            return Err(format!("{} needs a `blueprint`", self.op));
        };
        host.blueprints().find(wanted).map_err(|error| error.to_string())
    }
}
