//! Optimisers of hosts and modules.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::choice::choice;
use crate::config::text::{BadValue, choose, serde_as_text};
use crate::config::value::value_as_text;

/// Optimiser of hosts and modules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum OptimizerKind {
    /// SGD with momentum.
    #[default]
    Sgd,
    /// SGD with Nesterov's momentum.
    Nesterov,
    /// Adam; weight decay is added to the gradient.
    Adam,
    /// Adam with decoupled weight decay.
    AdamW,
    /// Lion.
    Lion,
    /// Muon for matrices and kernels of convolutions, AdamW for other parameters.
    Muon,
}

choice!(OptimizerKind: "sgd" => Sgd, "nesterov" => Nesterov, "adam" => Adam, "adamw" => AdamW,
    "lion" => Lion, "muon" => Muon);

/// Hyperparameters of an optimiser, including its learning rate; `None` for one that the optimiser
/// does not have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Hyperparameters {
    pub(crate) lr: Option<f32>,
    pub(crate) momentum: Option<f32>,
    pub(crate) weight_decay: Option<f32>,
    pub(crate) beta1: Option<f64>,
    pub(crate) beta2: Option<f64>,
    pub(crate) eps: Option<f32>,
    pub(crate) adam_lr: Option<f32>,
}

impl OptimizerKind {
    /// Whether it is SGD, with any momentum.
    pub(crate) fn is_sgd(self) -> bool {
        matches!(self, Self::Sgd | Self::Nesterov)
    }

    /// Default hyperparameters. SGD's are this program's own. Adam's and AdamW's are those of
    /// PyTorch, Lion's those of the program that belongs to its article (arXiv 2302.06675), Muon's
    /// those of Jordan's program (`SingleDeviceMuonWithAuxAdam`,
    /// <https://github.com/KellerJordan/Muon>).
    pub(crate) fn defaults(self) -> Hyperparameters {
        let plain = Hyperparameters {
            lr: Some(1e-3),
            momentum: None,
            weight_decay: Some(0.0),
            beta1: Some(0.9),
            beta2: Some(0.999),
            eps: Some(1e-8),
            adam_lr: None,
        };
        match self {
            Self::Sgd | Self::Nesterov => Hyperparameters {
                lr: Some(0.1),
                momentum: Some(0.9),
                weight_decay: Some(5e-4),
                beta1: None,
                beta2: None,
                eps: None,
                adam_lr: None,
            },
            Self::Adam => plain,
            Self::AdamW => Hyperparameters { weight_decay: Some(0.01), ..plain },
            Self::Lion => Hyperparameters { lr: Some(1e-4), beta2: Some(0.99), eps: None, ..plain },
            Self::Muon => Hyperparameters {
                lr: Some(0.02),
                momentum: Some(0.95),
                beta2: Some(0.95),
                eps: Some(1e-10),
                adam_lr: Some(3e-4),
                ..plain
            },
        }
    }
}

/// Text of a number; one that f32 represents exactly has the digits of an f32.
pub(crate) fn number_text(number: f64) -> String {
    let single = number as f32;
    let is_single = f64::from(single) == number;
    let text = if is_single { format!("{single:?}") } else { format!("{number:?}") };
    text.trim_end_matches(".0").into()
}

impl Hyperparameters {
    /// Names of the flags with their values, in the order of the fields.
    pub(crate) fn flags(&self) -> [(&'static str, Option<f64>); 7] {
        let Self { lr, momentum, weight_decay, beta1, beta2, eps, adam_lr } = *self;
        let [lr, momentum, weight_decay, eps, adam_lr] =
            [lr, momentum, weight_decay, eps, adam_lr].map(|number| number.map(f64::from));
        [
            ("lr", lr),
            ("momentum", momentum),
            ("weight-decay", weight_decay),
            ("beta1", beta1),
            ("beta2", beta2),
            ("eps", eps),
            ("adam-lr", adam_lr),
        ]
    }

    /// These hyperparameters; a missing one is taken from `other`.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            lr: self.lr.or(other.lr),
            momentum: self.momentum.or(other.momentum),
            weight_decay: self.weight_decay.or(other.weight_decay),
            beta1: self.beta1.or(other.beta1),
            beta2: self.beta2.or(other.beta2),
            eps: self.eps.or(other.eps),
            adam_lr: self.adam_lr.or(other.adam_lr),
        }
    }
}
