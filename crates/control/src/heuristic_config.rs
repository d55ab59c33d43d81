//! Constants and named rules of the heuristic.

use std::fmt;
use std::str::FromStr;

use meristem_grow::{AlphaTarget, Style, Tempo, nearest};
use meristem_nn::PairedLoss;
use meristem_nn::graph::WidthInit;
use serde::{Deserialize, Serialize};

/// Constants of the heuristic.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeuristicConfig {
    /// Length of the plateau before a germination, in steps; 0, the default, requires no plateau.
    pub plateau_steps: usize,
    /// Gain in control score, in percentage points per step, that ends a plateau: .5.
    pub plateau_gain_pp: f32,
    /// Steps between a prune and the next germination: 5.
    pub pause_after_prune_steps: u32,
    /// Penalty of a blueprint whose module was pruned: 2.
    pub prune_penalty: f64,
    /// Factor on every penalty, applied each step: .5.
    pub penalty_decay: f64,
    /// Standard errors by which a trend or a contribution must differ from its threshold: 2.
    pub significance: f64,
    /// Overfitting limit: the largest share by which the control loss may exceed the training loss:
    /// .25. Above the limit no module germinates or is blended in, and no layer becomes wider.
    pub max_gap: f64,
    /// Largest number of parameters of the host with its modules; no limit by default.
    pub max_parameters: Option<usize>,
    /// Steps for which a gate may refuse before the module is pruned: 5. Counted from
    /// `min_training_steps` on in Training, and from the start in Holding. Without this limit a
    /// module could block its env for ever: its contribution satisfies the controller, but not the
    /// gate.
    pub patience_steps: u32,
    /// Style of every germination: linear_add.
    pub style: Style,
    /// Tempo of every germination: fast (3 steps).
    pub tempo: Tempo,
    /// Alpha target of every germination: 1.
    pub alpha_target: AlphaTarget,
    /// Number of further features that a layer gets at once, as a share of its initial features; 0,
    /// the default, for no growth in width.
    pub widen_by: f64,
    /// Smallest number of steps from one change of width in an env to the next: 3.
    pub widen_pause: u32,
    /// Largest number of features of a layer, as a multiple of its initial number: 2.
    pub widen_up_to: f64,
    /// Trigger of growth in width: schedule.
    pub widen_trigger: WidenTrigger,
    /// Layer that becomes wider: smallest.
    pub widen_place: WidenPlace,
    /// γ in φ − γ·φ₀, where φ is the orthogonality of a layer's activations and φ₀ its value in the
    /// first step: .97. See [`WidenTrigger::Orthogonality`] and [`WidenPlace::Orthogonality`].
    pub widen_orthogonality: f64,
    /// Rule by which modules are kept: significant.
    pub keep_modules: KeepRule,
}

/// Rule by which the heuristic makes a module that is blended in permanent, instead of pruning it.
/// The gate of the stage fossilized must pass as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeepRule {
    /// The control loss is higher without it, by more than `significance` standard errors.
    #[default]
    Significant,
    /// The control loss is higher without it.
    Positive,
    /// Always.
    All,
}

impl KeepRule {
    /// All rules.
    pub const ALL: [Self; 3] = [Self::Significant, Self::Positive, Self::All];

    /// The name in configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Significant => "significant",
            Self::Positive => "positive",
            Self::All => "all",
        }
    }

    /// Whether a module is kept; `None` before its contribution was measured, except with `All`.
    pub(crate) fn keeps(self, measured: Option<PairedLoss>, significance: f64) -> Option<bool> {
        match self {
            Self::All => Some(true),
            Self::Positive => measured.map(|c| c.difference > 0.0),
            Self::Significant => measured.map(|c| c.difference > significance * c.standard_error),
        }
    }
}

impl Default for HeuristicConfig {
    fn default() -> Self {
        Self {
            plateau_steps: 0,
            plateau_gain_pp: 0.5,
            pause_after_prune_steps: 5,
            prune_penalty: 2.0,
            penalty_decay: 0.5,
            significance: 2.0,
            max_gap: 0.25,
            max_parameters: None,
            patience_steps: 5,
            style: Style::LinearAdd,
            tempo: Tempo::Fast,
            alpha_target: AlphaTarget::Full,
            widen_by: 0.0,
            widen_pause: 3,
            widen_up_to: 2.0,
            widen_trigger: WidenTrigger::Schedule,
            widen_place: WidenPlace::Smallest,
            widen_orthogonality: 0.97,
            keep_modules: KeepRule::Significant,
        }
    }
}

/// Condition under which the heuristic makes a layer wider, besides these: the pause between two
/// changes of width is over, the host does not overfit, and the wider host is within its budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum WidenTrigger {
    /// No further condition.
    #[default]
    Schedule,
    /// The control score is on a plateau, by `plateau_steps` and `plateau_gain_pp`.
    Plateau,
    /// The activations of the layer are at least about as orthogonal as in the first step of the
    /// episode: φ > γ·φ₀, after Maile, Rachelson, Luga, Wilson, "When, where, and how to add new
    /// neurons to ANNs", 2022 (arXiv 2202.08539), who add `⌊M(φ − γ·φ₀)⌋` features to a layer of M.
    Orthogonality,
    /// The gradient ratio of newborn features of the layer exceeds this number.
    GradientRatio(f64),
    /// The natural expansion score of the layer exceeds this number.
    NaturalGradient(f64),
}

/// Choice among the layers that may become wider.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WidenPlace {
    /// The layer whose new number of features is the smallest multiple of its initial number.
    #[default]
    Smallest,
    /// The layer with the largest φ − γ·φ₀, see [`WidenTrigger::Orthogonality`].
    Orthogonality,
    /// The layer with the largest gradient ratio of newborn features.
    GradientRatio,
    /// The layer with the largest natural expansion score.
    NaturalGradient,
}

/// A measurement of each layer that rules of growth in width compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WidthScore {
    /// φ of [`WidenTrigger::Orthogonality`].
    Orthogonality,
    /// The length of the gradient of a further feature's incoming weights, with the best outgoing
    /// weights, divided by the length for a present feature; both are root mean squares. The best
    /// outgoing weights are from Evci et al., "GradMax", 2022 (arXiv 2201.05125).
    GradientRatio,
    /// Δη/η: the fall of the loss that further features add at first order, as a part of the fall
    /// by changes of the weights of the layer that reads them. After Mitchell, Menzenbach,
    /// Kersting, Mundt, "Self Expanding Neural Networks", 2023 (arXiv 2307.04526), for this layer
    /// alone, with a Fisher matrix of its inputs only, and for the best features instead of drawn
    /// ones.
    NaturalGradient,
}

impl WidthScore {
    /// All scores.
    pub const ALL: [Self; 3] = [Self::Orthogonality, Self::GradientRatio, Self::NaturalGradient];

    /// The initialisation whose measurement of gradients the score needs; `None` for a score of
    /// activations.
    pub fn gradients_of(self) -> Option<WidthInit> {
        match self {
            Self::Orthogonality => None,
            Self::GradientRatio => Some(WidthInit::Gradmax),
            Self::NaturalGradient => Some(WidthInit::Tiny),
        }
    }
}

/// Error of a text that is no trigger, with the accepted texts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {0}")]
pub struct NoTrigger(pub String);

impl FromStr for WidenTrigger {
    type Err = NoTrigger;

    fn from_str(text: &str) -> Result<Self, NoTrigger> {
        let (name, threshold) = match text.split_once(':') {
            Some((name, threshold)) => (name, Some(threshold)),
            None => (text, None),
        };
        let of_threshold = match (name, threshold) {
            ("schedule", None) => return Ok(Self::Schedule),
            ("plateau", None) => return Ok(Self::Plateau),
            ("orthogonality", None) => return Ok(Self::Orthogonality),
            ("gradient_ratio", _) => Self::GradientRatio,
            ("natural_gradient", _) => Self::NaturalGradient,
            _ => {
                let nearest = nearest(text, Self::FORMS);
                let hint = nearest.map(|form| format!("; did you mean `{form}`?"));
                let forms = Self::FORMS.join(" | ");
                return Err(NoTrigger(format!("one of {forms}{}", hint.unwrap_or_default())));
            }
        };
        let threshold = threshold.and_then(|x| x.parse().ok());
        let threshold = threshold.filter(|x: &f64| (0.0..=Self::THRESHOLD_MAX).contains(x));
        threshold.map(of_threshold).ok_or_else(|| {
            NoTrigger(format!("{name}:X with a number X from 0 to {}", Self::THRESHOLD_MAX))
        })
    }
}

impl fmt::Display for WidenTrigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Schedule => f.write_str("schedule"),
            Self::Plateau => f.write_str("plateau"),
            Self::Orthogonality => f.write_str("orthogonality"),
            Self::GradientRatio(least) => write!(f, "gradient_ratio:{least}"),
            Self::NaturalGradient(least) => write!(f, "natural_gradient:{least}"),
        }
    }
}

impl TryFrom<String> for WidenTrigger {
    type Error = NoTrigger;

    fn try_from(text: String) -> Result<Self, NoTrigger> {
        text.parse()
    }
}

impl From<WidenTrigger> for String {
    fn from(trigger: WidenTrigger) -> Self {
        trigger.to_string()
    }
}

impl WidenTrigger {
    /// Text forms.
    pub const FORMS: [&'static str; 5] =
        ["schedule", "plateau", "orthogonality", "gradient_ratio:X", "natural_gradient:X"];

    /// Largest threshold of a score.
    const THRESHOLD_MAX: f64 = 1e6;

    /// The score that it compares with a threshold, if any.
    pub fn score(self) -> Option<WidthScore> {
        match self {
            Self::Schedule | Self::Plateau => None,
            Self::Orthogonality => Some(WidthScore::Orthogonality),
            Self::GradientRatio(_) => Some(WidthScore::GradientRatio),
            Self::NaturalGradient(_) => Some(WidthScore::NaturalGradient),
        }
    }
}

impl WidenPlace {
    /// All choices.
    pub const ALL: [Self; 4] =
        [Self::Smallest, Self::Orthogonality, Self::GradientRatio, Self::NaturalGradient];

    /// The name in configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Smallest => "smallest",
            Self::Orthogonality => "orthogonality",
            Self::GradientRatio => "gradient_ratio",
            Self::NaturalGradient => "natural_gradient",
        }
    }

    /// The score that it compares among layers, if any.
    pub fn score(self) -> Option<WidthScore> {
        match self {
            Self::Smallest => None,
            Self::Orthogonality => Some(WidthScore::Orthogonality),
            Self::GradientRatio => Some(WidthScore::GradientRatio),
            Self::NaturalGradient => Some(WidthScore::NaturalGradient),
        }
    }
}

impl HeuristicConfig {
    /// Whether a rule needs this score ([`crate::EnvView::width_scores`]).
    pub fn needs(&self, score: WidthScore) -> bool {
        let of_rules = [self.widen_trigger.score(), self.widen_place.score()];
        self.widen_by > 0.0 && of_rules.contains(&Some(score))
    }
}
