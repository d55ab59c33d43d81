//! Rules of growth in width: the text form of the trigger, and the rules that measure layers.

use meristem_control::{HeuristicConfig, NoTrigger, WidenTrigger, WidthScore};

use crate::config::text::BadValue;
use crate::config::value::SettingValue;

impl SettingValue for WidenTrigger {
    fn kind() -> String {
        Self::FORMS.join(", ")
    }

    fn parse(text: &str) -> Result<Self, BadValue> {
        text.parse().map_err(|NoTrigger(expected)| BadValue::new(text, expected))
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// A rule of the heuristic's growth in width that measures layers.
#[derive(Clone, Debug)]
pub(crate) struct MeasuringRule {
    /// Setting, as a flag.
    pub(crate) key: &'static str,
    /// Its value.
    pub(crate) value: String,
    /// Score that it measures.
    pub(crate) score: WidthScore,
}

impl MeasuringRule {
    /// The rules of a heuristic that measure; none without growth in width.
    pub(crate) fn all(config: &HeuristicConfig) -> impl Iterator<Item = Self> {
        let HeuristicConfig { widen_trigger, widen_place, .. } = *config;
        let rules = [
            ("widen-trigger", widen_trigger.text(), widen_trigger.score()),
            ("widen-place", widen_place.text(), widen_place.score()),
        ];
        let measures =
            |(key, value, score): (_, _, Option<_>)| Some(Self { key, value, score: score? });
        rules.into_iter().filter_map(measures).filter(|rule| config.needs(rule.score))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn triggers_round_trip_and_wrong_ones_say_why() {
        let all =
            ["schedule", "plateau", "orthogonality", "gradient_ratio:1", "natural_gradient:0.25"];
        for text in all {
            assert_eq!(WidenTrigger::parse(text).unwrap().text(), text);
        }
        let refused = |text: &str| WidenTrigger::parse(text).unwrap_err().to_string();
        for text in
            ["gradient_ratio", "gradient_ratio:", "gradient_ratio:-1", "natural_gradient:NaN"]
        {
            assert!(refused(text).contains("with a number X from 0"), "{text}");
        }
        for text in ["schedule:1", "gradient-ratio:1", ":", ""] {
            assert!(refused(text).contains("natural_gradient:X"), "{text}");
        }
        assert!(refused("platau").contains("did you mean `plateau`"));
    }
}
