//! Choices by name.

use std::fmt;
use std::str::FromStr;

use meristem_device::ScopePolicy;
use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, choose, serde_as_text};
use crate::config::value::value_as_text;

/// Declares a choice by names: text form, serde, and values for the reference page.
macro_rules! choice {
    ($type:ident: $($name:literal => $value:ident),+) => {
        impl $type {
            /// Every value with its name.
            pub const NAMES: [(&'static str, Self); [$($name),+].len()] =
                [$(($name, Self::$value)),+];
        }

        impl FromStr for $type {
            type Err = BadValue;
            fn from_str(text: &str) -> Result<Self, BadValue> {
                choose(text, &Self::NAMES)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$value => $name),+
                })
            }
        }
        serde_as_text!($type);
        value_as_text!($type, [$($name),+].join(", "));
    };
}
pub(crate) use choice;

/// Named sets of default values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Preset {
    /// A minute on two cores; shows growth.
    #[default]
    Default,
    /// Ten seconds; shows that everything works.
    Quick,
    /// Many rounds of long episodes, with strict gates and a wide policy.
    Full,
}

impl Preset {
    /// Description in one sentence.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Default => "Four small hosts that grow, in about a minute on two cores.",
            Self::Quick => "Ten seconds, to see that everything works.",
            Self::Full => "Long runs for results, with strict gates and a wide policy.",
        }
    }
}

choice!(Preset: "default" => Default, "quick" => Quick, "full" => Full);

/// Form of a policy's observations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ObservationForm {
    /// One vector: the policy serves one number of slots and one list of blueprints.
    #[default]
    Vector,
    /// Sets of slots and of blueprints: the policy serves any host.
    Set,
    /// As `Set`, and the set of layers that can become wider: the policy chooses WIDEN.
    SetWiden,
}

choice!(ObservationForm: "vector" => Vector, "set" => Set, "set-widen" => SetWiden);

/// Detail of times and gradient statistics in a run's events. No result depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Telemetry {
    /// No times and no gradient statistics.
    Off,
    /// Time and throughput of a step, gradient norm of the host, gradient health of modules.
    #[default]
    Basic,
    /// Also the time of each phase of a step, and the gradient statistics of every parameter group.
    Full,
}

choice!(Telemetry: "off" => Off, "basic" => Basic, "full" => Full);

/// Learning rate and momentum of modules with SGD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ModuleLr {
    /// The host's.
    #[default]
    Host,
    /// 0.01 and 0.9, whatever the host has.
    Fixed,
}

choice!(ModuleLr: "host" => Host, "fixed" => Fixed);

/// Schedule of the learning rate over an episode, as a factor of the configured rate. In a warm-up
/// (setting `lr_warmup`) the factor first rises linearly to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum LrSchedule {
    /// The factor is 1.
    #[default]
    Constant,
    /// The factor falls from 1 along half a cosine (Loshchilov and Hutter, "SGDR", 2017, without
    /// restarts).
    Cosine,
    /// The factor rises from 1/25 to 1 over 30 % of the steps, or over the warm-up, then falls
    /// along half a cosine (Smith and Topin, "Super-convergence", 2018).
    OneCycle,
}

choice!(LrSchedule: "constant" => Constant, "cosine" => Cosine, "one-cycle" => OneCycle);

impl LrSchedule {
    /// Share of the steps over which [`LrSchedule::OneCycle`] rises.
    const RISE: f64 = 0.3;

    /// Factor of [`LrSchedule::OneCycle`] before the first step.
    const LOWEST: f64 = 1.0 / 25.0;

    /// Factor in step `step` of an episode of `steps` steps, of which the first `warmup` are the
    /// warm-up. It is above 0 in every step.
    pub(crate) fn factor(self, step: usize, steps: usize, warmup: usize) -> f64 {
        let [step, steps] = [step, steps].map(|n| n as f64);
        let (rise, lowest) = match self {
            Self::OneCycle if warmup == 0 => (Self::RISE * steps, Self::LOWEST),
            Self::OneCycle => (warmup as f64, Self::LOWEST),
            Self::Constant | Self::Cosine => (warmup as f64, 0.0),
        };
        if step < rise {
            // Linear from `lowest` before step 0 to 1 in step `rise`.
            return lowest + (1.0 - lowest) * (step + 1.0) / (rise + 1.0);
        }
        match self {
            Self::Constant => 1.0,
            Self::Cosine | Self::OneCycle => {
                let part = (step - rise) / (steps - rise).max(1.0);
                0.5 * (1.0 + (std::f64::consts::PI * part).cos())
            }
        }
    }
}

/// Kinds of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CommKind {
    /// Threads of this process.
    #[default]
    Threads,
    /// Processes started together by `mpirun`, in a build with the feature `mpi`.
    Mpi,
    /// Processes with a GPU each, started together by `torchrun` or `mpirun`, in a build with the
    /// feature `cuda`.
    Nccl,
}

choice!(CommKind: "threads" => Threads, "mpi" => Mpi, "nccl" => Nccl);

impl CommKind {
    /// Whether the ranks are processes.
    pub fn is_processes(self) -> bool {
        self != CommKind::Threads
    }
}

/// Reaction to a copy, a wait or an allocation on the hot path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HotScopePolicy(pub ScopePolicy);

impl FromStr for HotScopePolicy {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        choose(text, &ScopePolicy::ALL.map(|policy| (policy.name(), Self(policy))))
    }
}

impl fmt::Display for HotScopePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
serde_as_text!(HotScopePolicy);
value_as_text!(HotScopePolicy, ScopePolicy::ALL.map(ScopePolicy::name).join(", "));

/// Choice of `on` or `off`. Files may also use a boolean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BoolOrText", into = "String")]
pub struct Switch(pub bool);

/// Value of a [`Switch`] in a file.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected `on` or `off`")]
enum BoolOrText {
    Bool(bool),
    Text(String),
}

impl TryFrom<BoolOrText> for Switch {
    type Error = BadValue;
    fn try_from(value: BoolOrText) -> Result<Self, BadValue> {
        match value {
            BoolOrText::Bool(on) => Ok(Self(on)),
            BoolOrText::Text(text) => text.parse(),
        }
    }
}

impl FromStr for Switch {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        choose(text, &[("on", Self(true)), ("off", Self(false))])
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0 { "on" } else { "off" })
    }
}

impl From<Switch> for String {
    fn from(value: Switch) -> String {
        value.to_string()
    }
}

value_as_text!(Switch, "on or off; in files also true or false");
