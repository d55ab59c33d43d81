//! Gradient exchange between ranks: the setting and its text forms.

use std::fmt;
use std::str::FromStr;

use meristem_comm::{ExchangeOptions, FeedbackMode, Method, Reduction, SparseMethod};
use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, serde_as_text, unknown};
use crate::config::value::value_as_text;

/// Updates between refreshes of Ok-Topk's thresholds and regions.
const REFRESH: u64 = 32;

/// Gradient exchange between ranks. Text form: `dense`, or one of the others with the share of
/// elements that each rank sends, such as `topk:0.01`. Unsent elements are kept for the next
/// update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ExchangeKind {
    /// All elements, summed in rank order.
    #[default]
    Dense,
    /// The largest elements of each rank, gathered by all.
    TopK(f64),
    /// The largest elements of the sum, found by a tree of merges.
    GTopK(f64),
    /// The largest elements of the sum, found by split and reduce.
    OkTopK(f64),
    /// The method that sends the fewest bytes.
    Auto(f64),
}

impl ExchangeKind {
    const FORMS: [&'static str; 5] = ["dense", "topk:D", "gtopk:D", "ok-topk:D", "auto:D"];

    /// The keyword of the text form, and the share of elements after it.
    fn parts(self) -> (&'static str, Option<f64>) {
        match self {
            Self::Dense => ("dense", None),
            Self::TopK(density) => ("topk", Some(density)),
            Self::GTopK(density) => ("gtopk", Some(density)),
            Self::OkTopK(density) => ("ok-topk", Some(density)),
            Self::Auto(density) => ("auto", Some(density)),
        }
    }

    /// Whether it sends the whole gradient at once.
    pub(crate) fn sends_all(self) -> bool {
        self.parts().1.is_none_or(|density| density == 1.0)
    }

    /// Options for the exchange.
    pub(crate) fn options(self) -> ExchangeOptions {
        let method = match self {
            Self::Dense => Method::Dense,
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
    /// epoch of `batches` exchanges (Lin et al., "Deep Gradient Compression", ICLR 2018, 3.3).
    pub(crate) fn warming_up(self, batches: usize) -> ExchangeOptions {
        let density = self.parts().1.unwrap_or(1.0);
        let densities = (1..).map(|epoch| 0.25f64.powi(epoch));
        let warm_up = densities.take_while(|warm| *warm > density).collect();
        ExchangeOptions { warm_up, warm_up_steps: batches as u64, ..self.options() }
    }
}

impl FromStr for ExchangeKind {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let (word, density) = text.split_once(':').map_or((text, None), |(w, d)| (w, Some(d)));
        let kind = match (word, density) {
            ("dense", None) => return Ok(Self::Dense),
            ("topk", Some(_)) => Self::TopK,
            ("gtopk", Some(_)) => Self::GTopK,
            ("ok-topk", Some(_)) => Self::OkTopK,
            ("auto", Some(_)) => Self::Auto,
            _ => return Err(unknown(text, &Self::FORMS)),
        };
        let density = density.and_then(|density| density.parse::<f64>().ok());
        let density = density.filter(|density| *density > 0.0 && *density <= 1.0);
        let expected = "a share above 0, at most 1, after the colon";
        density.map(kind).ok_or_else(|| BadValue::new(text, expected))
    }
}

impl fmt::Display for ExchangeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parts() {
            (word, None) => f.write_str(word),
            (word, Some(density)) => write!(f, "{word}:{density}"),
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
        for text in ["dense", "topk:0.01", "gtopk:1", "ok-topk:0.5", "auto:0.001"] {
            assert_eq!(text.parse::<ExchangeKind>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_exchange_is_answered_with_what_there_is() {
        let refused = |text: &str| text.parse::<ExchangeKind>().unwrap_err().to_string();
        assert!(refused("tokp:0.1").contains("topk:D"));
        assert!(refused("topk").contains("topk:D"));
        for text in ["topk:", "topk:0", "auto:1.5", "gtopk:x", "topk:NaN"] {
            assert!(refused(text).contains("above 0, at most 1"), "{text}");
        }
    }
}
