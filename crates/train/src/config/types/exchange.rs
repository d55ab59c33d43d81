//! Exchange between ranks: the setting and its text forms.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use meristem_comm::{ExchangeOptions, FeedbackMode, Method, Reduction, SparseMethod};
use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, serde_as_text, unknown};
use crate::config::value::value_as_text;

/// Updates between refreshes of Ok-Topk's thresholds and regions.
const REFRESH: u64 = 32;

/// Method of an exchange. Text form: a keyword, followed for a sparse method by the share of
/// elements that each rank sends, such as `topk:0.01`. Elements that are not sent are added to
/// those of the next exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ExchangeMethod {
    /// All elements, summed in rank order.
    #[default]
    Dense,
    /// All elements, as eight bits each.
    Int8,
    /// The largest elements of each rank, gathered by all.
    TopK(f64),
    /// Large elements of the sum, found by a tree of merges; the exact largest may differ.
    GTopK(f64),
    /// Large elements of the sum, found by split and reduce; the exact largest may differ.
    OkTopK(f64),
    /// The method that sends the fewest bytes.
    Auto(f64),
}

impl ExchangeMethod {
    const FORMS: [&'static str; 6] = ["dense", "int8", "topk:D", "gtopk:D", "ok-topk:D", "auto:D"];

    /// The keyword of the text form, and the share of elements after it.
    fn parts(self) -> (&'static str, Option<f64>) {
        match self {
            Self::Dense => ("dense", None),
            Self::Int8 => ("int8", None),
            Self::TopK(density) => ("topk", Some(density)),
            Self::GTopK(density) => ("gtopk", Some(density)),
            Self::OkTopK(density) => ("ok-topk", Some(density)),
            Self::Auto(density) => ("auto", Some(density)),
        }
    }

    /// Whether every exchange sends all elements, in full precision.
    fn sends_all_exactly(self) -> bool {
        self != Self::Int8 && self.parts().1.is_none_or(|density| density == 1.0)
    }

    /// Options for the exchange.
    pub(crate) fn options(self) -> ExchangeOptions {
        let method = match self {
            Self::Dense => Method::Dense,
            Self::Int8 => Method::Int8,
            Self::TopK(_) => Method::Sparse(SparseMethod::TopK),
            Self::GTopK(_) => Method::Sparse(SparseMethod::GTopK),
            Self::OkTopK(_) => Method::Sparse(SparseMethod::OkTopK { refresh: REFRESH }),
            Self::Auto(_) => Method::Auto,
        };
        let usual = ExchangeOptions::default();
        ExchangeOptions {
            method,
            density: self.parts().1.unwrap_or(usual.density),
            keep: FeedbackMode::Residual,
            reduction: Reduction::Mean,
            ..usual
        }
    }

    /// Options for a new model: the density falls from a quarter by factors of four, one factor per
    /// epoch of `exchanges` exchanges (Lin et al., "Deep Gradient Compression", ICLR 2018, 3.3).
    pub(crate) fn warming_up(self, exchanges: usize) -> ExchangeOptions {
        let density = self.parts().1.unwrap_or(1.0);
        let densities = (1..).map(|epoch| 0.25f64.powi(epoch));
        let warm_up = densities.take_while(|warm| *warm > density).collect();
        ExchangeOptions { warm_up, warm_up_steps: exchanges as u64, ..self.options() }
    }

    /// Parses a text form. An error about another text names `forms`.
    fn parse(text: &str, forms: &[&str]) -> Result<Self, BadValue> {
        let (word, density) = text.split_once(':').map_or((text, None), |(w, d)| (w, Some(d)));
        let method = match (word, density) {
            ("dense", None) => return Ok(Self::Dense),
            ("int8", None) => return Ok(Self::Int8),
            ("topk", Some(_)) => Self::TopK,
            ("gtopk", Some(_)) => Self::GTopK,
            ("ok-topk", Some(_)) => Self::OkTopK,
            ("auto", Some(_)) => Self::Auto,
            _ => return Err(unknown(text, forms)),
        };
        let density = density.and_then(|density| density.parse::<f64>().ok());
        let density = density.filter(|density| *density > 0.0 && *density <= 1.0);
        let expected = "a share above 0, at most 1, after the colon";
        density.map(method).ok_or_else(|| BadValue::new(text, expected))
    }
}

impl fmt::Display for ExchangeMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parts() {
            (word, None) => f.write_str(word),
            (word, Some(density)) => write!(f, "{word}:{density}"),
        }
    }
}

/// Exchange between ranks. Text form: that of a method, by which gradients are exchanged in every
/// batch; or `diloco:H` or `diloco:H:METHOD`, by which differences of weights are exchanged after
/// every H local steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ExchangeKind {
    /// Method of the exchange.
    pub method: ExchangeMethod,
    /// Local steps, of one batch each, between two exchanges of weights (DiLoCo); `None` for an
    /// exchange of gradients.
    pub local_steps: Option<NonZeroU32>,
}

impl ExchangeKind {
    const DILOCO: &'static str = "diloco";
    const FORMS: [&'static str; 8] = [
        "dense",
        "int8",
        "topk:D",
        "gtopk:D",
        "ok-topk:D",
        "auto:D",
        "diloco:H",
        "diloco:H:METHOD",
    ];

    /// Whether all elements of the gradient of every batch are sent, in full precision.
    pub(crate) fn sends_whole_gradients(self) -> bool {
        self.local_steps.is_none() && self.method.sends_all_exactly()
    }
}

/// An exchange of gradients.
impl From<ExchangeMethod> for ExchangeKind {
    fn from(method: ExchangeMethod) -> Self {
        Self { method, local_steps: None }
    }
}

impl FromStr for ExchangeKind {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let Some(rest) = text.strip_prefix(Self::DILOCO) else {
            return ExchangeMethod::parse(text, &Self::FORMS).map(Self::from);
        };
        let Some(rest) = rest.strip_prefix(':') else { return Err(unknown(text, &Self::FORMS)) };
        let (steps, method) = rest.split_once(':').map_or((rest, None), |(s, m)| (s, Some(m)));
        let expected = "a number of local steps from 1 to 4294967295 after `diloco:`, as diloco:32";
        let local_steps = steps.parse().map_err(|_| BadValue::new(text, expected))?;
        let parse = |text| ExchangeMethod::parse(text, &ExchangeMethod::FORMS);
        let method = method.map(parse).transpose()?.unwrap_or_default();
        Ok(Self { method, local_steps: Some(local_steps) })
    }
}

impl fmt::Display for ExchangeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.local_steps, self.method) {
            (None, method) => method.fmt(f),
            (Some(steps), ExchangeMethod::Dense) => write!(f, "{}:{steps}", Self::DILOCO),
            (Some(steps), method) => write!(f, "{}:{steps}:{method}", Self::DILOCO),
        }
    }
}
serde_as_text!(ExchangeKind);
value_as_text!(ExchangeKind, ExchangeKind::FORMS.join(", "));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms_round_trip() {
        let methods = ["dense", "int8", "topk:0.01", "gtopk:1", "ok-topk:0.5", "auto:0.001"];
        let local = ["diloco:1", "diloco:500", "diloco:8:int8", "diloco:32:topk:0.01"];
        for text in methods.into_iter().chain(local) {
            assert_eq!(text.parse::<ExchangeKind>().unwrap().to_string(), text);
        }
        assert_eq!("diloco:8:dense".parse(), "diloco:8".parse::<ExchangeKind>());
    }

    #[test]
    fn what_is_no_exchange_is_answered_with_what_there_is() {
        let refused = |text: &str| text.parse::<ExchangeKind>().unwrap_err().to_string();
        assert!(refused("tokp:0.1").contains("topk:D"));
        assert!(refused("topk").contains("topk:D"));
        for text in ["dilco:8", "diloco", "diloco8", "int8:1", "dense:1"] {
            assert!(refused(text).contains("diloco:H"), "{text}: {}", refused(text));
        }
        for text in ["topk:", "topk:0", "auto:1.5", "gtopk:x", "topk:NaN", "diloco:8:topk:2"] {
            assert!(refused(text).contains("above 0, at most 1"), "{text}");
        }
        for text in ["diloco:0", "diloco:", "diloco:-1", "diloco:1.5", "diloco:4294967296"] {
            assert!(refused(text).contains("from 1 to 4294967295"), "{text}");
        }
        // No local steps within local steps.
        assert!(refused("diloco:8:diloco:2").contains("topk:D"));
        assert!(refused("diloco:8:int4").contains("int8"));
    }
}
