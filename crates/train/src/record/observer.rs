//! The observer of a run.

use std::fmt;
use std::path::Path;

use meristem_data::Normalization;
use meristem_nn::{Network, Precision};

use crate::config::types::Normalize;
use crate::error::Result;
use crate::record::events::Event;

/// Notice about a run before its first event. Every process receives [`Joined`](Self::Joined); rank
/// 0 also receives the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Notice<'a> {
    /// The run starts or resumes, and this process has this rank. With threads as ranks there is
    /// one process, of rank 0.
    Joined(usize),
    /// A resumed run changes its devices. Another kind of device rounds differently.
    DevicesChanged {
        /// Devices so far.
        began: &'a [String],
        /// Devices from here on.
        now: &'a [String],
    },
    /// A resumed run changes its precision.
    PrecisionChanged {
        /// Precision so far.
        began: Precision,
        /// Precision from here on.
        now: Precision,
    },
    /// Steps before a resume, or complete runs of a study, were computed by a build whose kernels
    /// round differently.
    RoundingChanged,
    /// An extended run may differ from a run that was planned with `now` steps, because its
    /// controller planned for the end of `began` steps.
    ControllerLookedAhead {
        /// Steps of an episode when the run began.
        began: usize,
        /// Steps of an episode from here on.
        now: usize,
    },
    /// The initial weights were trained with other constants than the run normalises with.
    OtherNormalization {
        /// Constants in the file of the weights.
        weights: &'a Normalization,
        /// Constants of the run.
        run: &'a Normalization,
    },
    /// Lines of a script that never act: their step is not in the run, or their env does not follow
    /// the script.
    IdleScriptLines {
        /// The controller with the script.
        script: &'a str,
        /// Numbers of the lines, from 1.
        lines: &'a [usize],
        /// Steps of an episode.
        steps: usize,
        /// Envs that follow the script.
        envs: &'a [usize],
    },
    /// The warm-up of the learning rates is longer than an episode.
    WarmupBeyondEpisode {
        /// Steps of the warm-up.
        warmup: usize,
        /// Steps of an episode.
        steps: usize,
    },
    /// A setting has no effect beside the others.
    IdleSetting {
        /// Key of the setting.
        key: &'a str,
        /// Members that have it without effect; none for a setting of the run.
        members: &'a [usize],
        /// The reason, after `because`.
        reason: &'a str,
    },
    /// The heuristic never grows some hosts, because of its limit of parameters.
    NoRoomToGrow {
        /// Numbers of the envs.
        envs: &'a [usize],
        /// Parameters of the host of each of them.
        parameters: usize,
        /// Limit of parameters of a host with its modules.
        limit: usize,
    },
    /// Some folds have no sample of a class.
    RareClass {
        /// Name of the least frequent class.
        class: &'a str,
        /// Its samples.
        samples: usize,
        /// Number of folds.
        folds: usize,
    },
    /// Ranks have GPUs, and what they exchange passes through host memory.
    ThroughHostMemory {
        /// Number of ranks.
        ranks: usize,
        /// The reason.
        reason: HostMemoryReason,
    },
    /// The folder of the run.
    FolderOpened(&'a Path),
}

/// Reason why exchanges of GPUs pass through host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostMemoryReason {
    /// The ranks exchange over an MPI library that does not say that it takes memory of a GPU.
    Mpi,
    /// The ranks are threads of one process, on several devices.
    Threads,
}

impl fmt::Display for HostMemoryReason {
    /// The beginning of a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mpi => {
                "with --comm mpi, whose library does not say that it takes memory of a GPU,"
            }
            Self::Threads => "with ranks that are threads on several devices",
        })
    }
}

impl Notice<'_> {
    /// Text of the warning; `None` for [`Joined`](Self::Joined) and
    /// [`FolderOpened`](Self::FolderOpened), which are no warnings.
    pub fn warning(&self) -> Option<String> {
        match self {
            Self::Joined(_) | Self::FolderOpened(_) => None,
            Self::DevicesChanged { began, now } => {
                let [began, now] = [began, now].map(|devices| devices.join(","));
                Some(format!(
                    "the run moves from {began} to {now}; another kind of device rounds \
                     differently, so its results differ from here on"
                ))
            }
            Self::OtherNormalization { weights, run } => {
                let [weights, run] = [weights, run].map(|c| Normalize::Constants((*c).clone()));
                Some(format!(
                    "the initial weights were trained with --normalize \"{weights}\", and the run \
                     normalises with \"{run}\"; give the former to go on with the same inputs"
                ))
            }
            Self::PrecisionChanged { began, now } => Some(format!(
                "the run changes from precision {began} to {now}; its results differ from \
                 here on"
            )),
            Self::IdleScriptLines { script, lines, steps, envs } => Some(format!(
                "lines of the action script of controller {script} never act: {}; steps count \
                 from 0 to {}, the envs with this controller are {}",
                list(lines),
                steps.saturating_sub(1),
                list(envs)
            )),
            Self::WarmupBeyondEpisode { warmup, steps } => Some(format!(
                "--lr-warmup {warmup} is longer than the {steps} steps of an episode, so the \
                 learning rates never reach their schedule"
            )),
            Self::IdleSetting { key, members, reason } => {
                let flag = key.replace('_', "-");
                let of = match members {
                    [] => String::new(),
                    [member] => format!(" in member {member}"),
                    members => format!(" in members {}", list(members)),
                };
                Some(format!("--{flag} has no effect{of}, because {reason}"))
            }
            Self::NoRoomToGrow { envs, parameters, limit } => Some(format!(
                "the heuristic cannot grow {} {}: a host begins with {parameters} parameters, and \
                 its limit with modules is {limit}; raise --parameters-per-image",
                if envs.len() == 1 { "env" } else { "envs" },
                list(envs)
            )),
            Self::RareClass { class, samples, folds } => Some(format!(
                "class `{class}` has {samples} samples, fewer than the {folds} folds, so some \
                 control splits have none of it"
            )),
            Self::ThroughHostMemory { ranks, reason } => {
                // Of a dense sum: reduce-scatter and all-gather.
                let share = 2.0 * (1.0 - 1.0 / *ranks as f64);
                Some(format!(
                    "{reason} a dense sum of N bytes copies {share:.2} N bytes from each GPU to \
                     host memory and as many back, and the GPU waits; processes with --comm nccl \
                     send from GPU to GPU"
                ))
            }
            Self::RoundingChanged => Some(
                "the completed part was computed by a build of meristem whose kernels round \
                 differently; results may differ in their last bits from here on"
                    .into(),
            ),
            Self::ControllerLookedAhead { began, now } => Some(format!(
                "the controller has planned for an end after {began} steps so far, so that the \
                 results may differ from those of a run of {now} steps from the start"
            )),
        }
    }
}

/// Most numbers of [`list`].
const LISTED_MAX: usize = 12;

/// Numbers as text; of many, the first ones.
fn list(numbers: &[usize]) -> String {
    let listed = &numbers[..numbers.len().min(LISTED_MAX)];
    let text = listed.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    match numbers.len() - listed.len() {
        0 => text,
        others => format!("{text} and {others} more"),
    }
}

/// Receives the events of a run, and may request a stop. Methods are called on the run's own
/// thread, so slow code here delays the run.
///
/// Every process has an observer. Rank 0's receives the events of all envs, with several processes
/// all events of a step together at the end of the step; other observers receive no events. If any
/// observer requests a stop, all processes stop.
pub trait Observer {
    /// Reports a circumstance of the run, before its first event.
    fn notice(&mut self, _notice: &Notice<'_>) {}

    /// Reports an event. The same events are written to `events.jsonl`.
    fn event(&mut self, _event: &Event) {}

    /// Reports that a training step of an env of this process was enqueued. Called in the inner
    /// loop, for every batch, so everything done to `network` here is on the hot path: the hot
    /// scope `train_step` refuses copies, waits and allocations, and an error ends the run.
    ///
    /// # Errors
    /// An error of the observer.
    fn batch_enqueued(&mut self, _env: usize, _network: &Network) -> Result<()> {
        Ok(())
    }

    /// Whether to end the run at the next step boundary, with weights and summary.
    fn stop_requested(&self) -> bool {
        false
    }
}

/// Observer that ignores everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {}
