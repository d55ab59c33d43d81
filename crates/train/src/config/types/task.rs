//! Task of a run and its loss.

use std::fmt;
use std::str::FromStr;

use meristem_nn::ScoreKind;
use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, choose, serde_as_text};
use crate::config::types::choice::choice;
use crate::config::value::value_as_text;

/// Task of a run, as a setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum TaskKind {
    /// The task that the targets of the dataset are for.
    #[default]
    Auto,
    /// One class for each sample. Score: accuracy.
    Classify,
    /// Several labels for each sample, each present or absent. Score: micro-F1.
    Multilabel,
    /// Numbers for each sample. Score: R².
    Regress,
}

choice!(
    TaskKind: "auto" => Auto, "classify" => Classify, "multilabel" => Multilabel,
    "regress" => Regress
);

/// Loss that the networks of a run are trained with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum LossKind {
    /// The first loss of the task.
    #[default]
    Auto,
    /// Softmax cross-entropy, of task `classify`.
    CrossEntropy,
    /// Mean over the labels of binary cross-entropy, of task `multilabel`.
    BinaryCrossEntropy,
    /// Mean over the outputs of the squared difference, of task `regress`.
    MeanSquaredError,
    /// Mean over the outputs of the Huber loss, of task `regress`.
    Huber,
    /// Mean over the outputs of the absolute difference, of task `regress`.
    L1,
    /// A loss that the program computes, an [`OwnLoss`](crate::external::OwnLoss), for any task.
    External,
}

choice!(
    LossKind: "auto" => Auto, "cross-entropy" => CrossEntropy,
    "binary-cross-entropy" => BinaryCrossEntropy, "mse" => MeanSquaredError, "huber" => Huber,
    "l1" => L1, "external" => External
);

impl TaskKind {
    /// Kind of the score of the task; for [`TaskKind::Auto`] the accuracy.
    pub fn score(self) -> ScoreKind {
        match self {
            Self::Auto | Self::Classify => ScoreKind::Accuracy,
            Self::Multilabel => ScoreKind::F1,
            Self::Regress => ScoreKind::R2,
        }
    }

    /// The task of runs from before the setting existed: the default of a field that older files
    /// lack.
    pub(crate) fn classify() -> Self {
        Self::Classify
    }

    /// Whether a file omits the task.
    pub(crate) fn is_classify(&self) -> bool {
        *self == Self::Classify
    }

    /// The built-in losses of the task, the default first; none for [`TaskKind::Auto`].
    pub fn losses(self) -> &'static [LossKind] {
        match self {
            Self::Auto => &[],
            Self::Classify => &[LossKind::CrossEntropy],
            Self::Multilabel => &[LossKind::BinaryCrossEntropy],
            Self::Regress => &[LossKind::MeanSquaredError, LossKind::Huber, LossKind::L1],
        }
    }
}
