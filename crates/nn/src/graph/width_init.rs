//! Names of the initialisations of further features.

use serde::{Deserialize, Serialize};

/// Initial parameters of further features of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WidthInit {
    /// Incoming weights as in a new layer, outgoing weights 0. Outgoing weights learn from
    /// the first step on, incoming weights from the second.
    #[default]
    Zero,
    /// Copies of random features. A feature and its copy have random shares of the outgoing
    /// weights, so that their gradients differ (Chen, Goodfellow, Shlens, "Net2Net", 2016, which
    /// divides the weights equally and adds noise).
    Net2wider,
    /// As [`WidthInit::Zero`], with the features whose outgoing weights have the largest gradients
    /// of many random ones (after Wu, Liu, Stone, Liu, "Firefly Neural Architecture Descent",
    /// 2020).
    Firefly,
    /// Incoming weights 0, outgoing weights with which the incoming weights get the largest
    /// gradient (Evci, van Merriënboer, Unterthiner, Pedregosa, Vladymyrov, "GradMax", 2022).
    Gradmax,
    /// Features that lower the loss most in addition to the best change of the layer that reads
    /// them, with an amplitude by line search (Verbockhaven, Rudkiewicz, Chevallier, Charpiat,
    /// "Growing Tiny Networks", 2024). Changes the function.
    Tiny,
    /// Pairs of equal random features whose outgoing weights are opposite numbers; where batch norm
    /// follows the layer that reads them, the old weights of this layer become smaller (after Yuan,
    /// Savarese, Maire, "Accelerated Training via Incrementally Growing Neural Networks", 2023).
    VarianceTransfer,
}

impl WidthInit {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Zero,
        Self::Net2wider,
        Self::Firefly,
        Self::Gradmax,
        Self::Tiny,
        Self::VarianceTransfer,
    ];

    /// The name in configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zero => "zero",
            Self::Net2wider => "net2wider",
            Self::Firefly => "firefly",
            Self::Gradmax => "gradmax",
            Self::Tiny => "tiny",
            Self::VarianceTransfer => "variance_transfer",
        }
    }

    /// Whether it measures gradients, so that it needs training batches
    /// ([`WidthProbe`](crate::WidthProbe)).
    pub fn measures(self) -> bool {
        matches!(self, Self::Firefly | Self::Gradmax | Self::Tiny)
    }
}
