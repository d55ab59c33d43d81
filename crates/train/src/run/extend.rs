//! Extension of a run: more steps or rounds than it was planned with.
//!
//! A run continues from a checkpoint. If anything before the checkpoint depended on the planned
//! length, the extension is refused or reported. A checkpoint within an episode is always before
//! the episode's last step, where more is evaluated than in other steps.

use crate::config::TrainConfig;
use crate::config::types::{ControllerKind, LrSchedule};
use crate::error::{Error, Result};
use crate::position::StepPosition;
use crate::record::events::Extension;
use crate::record::run_folder::RunFolder;

/// Planned length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunLength {
    pub(crate) steps: usize,
    pub(crate) rounds: usize,
}

impl RunLength {
    pub(crate) fn from_config(config: &TrainConfig) -> Self {
        Self { steps: config.steps, rounds: config.rounds }
    }

    /// The length in the text of a configuration; `None` if it has none.
    pub(crate) fn in_text(text: &str) -> Option<Self> {
        let table = text.parse::<toml::Table>().ok()?;
        let number = |key: &str| usize::try_from(table.get(key)?.as_integer()?).ok();
        Some(Self { steps: number("steps")?, rounds: number("rounds")? })
    }

    /// The extension to this length at a position.
    pub(crate) fn extension_at(self, StepPosition { round, step }: StepPosition) -> Extension {
        Extension { round, step, steps: self.steps, rounds: self.rounds }
    }
}

/// Checks that a run with the settings `began` can go on with the length of `config` from `next`,
/// the position of its newest checkpoint; `None` is the start of the run.
///
/// # Errors
/// [`Error::Value`] names the setting, and says what can be done.
pub(crate) fn check(
    began: &TrainConfig,
    config: &TrainConfig,
    next: Option<StepPosition>,
) -> Result<()> {
    let refused = |key, got: usize, expected: String| Err(Error::value(key, got, expected));
    for (key, before, now) in
        [("steps", began.steps, config.steps), ("rounds", began.rounds, config.rounds)]
    {
        if now < before {
            return refused(key, now, format!("at least {before}, because a run only gets longer"));
        }
    }
    let Some(next) = next.filter(|_| config.steps > began.steps) else { return Ok(()) };
    let (steps, now) = (began.steps, config.steps);
    if next.round > 0 {
        let expected = format!(
            "{steps}, because rounds of {steps} steps are complete; add rounds with --rounds"
        );
        return refused("steps", now, expected);
    }
    let anew = format!("start a new run with --config RUN/config.toml --steps {now}");
    if began.lr_schedule != LrSchedule::Constant {
        let schedule = began.lr_schedule;
        let expected = format!(
            "{steps}, over which lr-schedule {schedule} was planned; add rounds with --rounds, or \
             {anew}"
        );
        return refused("steps", now, expected);
    }
    if let Some(places) = began.places {
        let expected = format!(
            "{steps}, because with places {places} a member leaves its place after its {steps} \
             steps; {anew}"
        );
        return refused("steps", now, expected);
    }
    if began.scheduler.looks_ahead() {
        let scheduler = began.scheduler;
        let expected =
            format!("{steps}, over which scheduler {scheduler} has planned its rungs, or {anew}");
        return refused("steps", now, expected);
    }
    if began.controller == ControllerKind::Ppo {
        let expected = format!(
            "{steps}, because controller ppo learns from whole episodes and sees how much of them \
             is left; add rounds with --rounds, or {anew}"
        );
        return refused("steps", now, expected);
    }
    Ok(())
}

/// Whether decisions before the extension have depended on the planned number of steps.
pub(crate) fn has_looked_ahead(config: &TrainConfig) -> bool {
    config.controllers().iter().any(|controller| match controller {
        ControllerKind::None | ControllerKind::Random | ControllerKind::Fixed(_) => false,
        ControllerKind::Heuristic
        | ControllerKind::Ppo
        | ControllerKind::Policy(_)
        | ControllerKind::Greedy(_)
        | ControllerKind::External => true,
    })
}

/// Records the new length in the folder of a run. A kill in between leaves a run of the old length
/// or of the new, never a complete run of the new length.
///
/// # Errors
/// A write failed.
pub(crate) fn record(folder: &RunFolder, longer: &TrainConfig) -> Result<()> {
    folder.remove_summary()?;
    folder.write_config(&longer.resolved_toml())
}
