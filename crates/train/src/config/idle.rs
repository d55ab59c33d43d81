//! Settings that have no effect because of other settings.

use meristem_control::WidthScore;

use super::declare::Setting;
use super::table::{TrainConfig, setting};
use super::types::ControllerKind;

/// A setting that some members set in vain, because another setting makes it ineffective.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct IdleSetting {
    /// Key of the setting.
    pub(crate) key: String,
    /// Numbers of the members in which it has no effect.
    pub(crate) members: Vec<usize>,
    /// The reason, after `because`.
    pub(crate) reason: String,
}

impl TrainConfig {
    /// The settings of members that have no effect.
    pub(crate) fn idle_settings(&self) -> Vec<IdleSetting> {
        let mut idle: Vec<IdleSetting> = vec![];
        let members = self.members.iter().flat_map(|members| members.all());
        for (number, (member, config)) in members.zip(self.of_members()).enumerate() {
            for (key, reason) in member.settings().filter_map(|(key, _)| config.idle(key)) {
                match idle.iter_mut().find(|known| (&*known.key, &*known.reason) == (key, &reason))
                {
                    Some(known) => known.members.push(number),
                    None => {
                        let members = vec![number];
                        idle.push(IdleSetting { key: key.into(), members, reason });
                    }
                }
            }
        }
        idle
    }

    /// The reason why the setting `key` has no effect in this configuration, with the key; `None`
    /// if it has an effect.
    fn idle<'a>(&self, key: &'a str) -> Option<(&'a str, String)> {
        let controller = &self.controller;
        let is_heuristic = *controller == ControllerKind::Heuristic;
        let widens = self.may_widen();
        let Setting { of_growth, of_heuristic, of_width, .. } = *setting(key);
        // A policy chooses and observes layers by these settings.
        let of_policy = key.starts_with("widen_") && self.policy_widens();
        let reason = if of_growth && *controller == ControllerKind::None {
            "nothing grows with controller none".into()
        } else if of_heuristic && !is_heuristic && !of_policy {
            format!("it is a rule of the heuristic, and the controller is {controller}")
        } else if of_width && is_heuristic && !widens {
            "the heuristic widens no layer with widen-by 0".into()
        } else if of_width && !widens {
            format!("controller {controller} widens no layer")
        } else if key == "widen_orthogonality" && !self.heuristic.needs(WidthScore::Orthogonality) {
            "neither widen-trigger nor widen-place is orthogonality".into()
        } else if key == "plateau_gain" && self.heuristic.plateau_steps == 0 {
            "the heuristic waits for no plateau with plateau-steps 0".into()
        } else {
            return None;
        };
        Some((key, reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigLayer;

    /// `key: members: reason` of the idle settings of a run with these settings.
    fn idle(settings: &[(&str, &str)]) -> Vec<String> {
        let mut flags = ConfigLayer::default();
        settings.iter().for_each(|(key, text)| flags.set(key, text).unwrap());
        let config = TrainConfig::resolve(ConfigLayer::default(), flags).unwrap();
        let text = |IdleSetting { key, members, reason }| format!("{key} {members:?}: {reason}");
        config.idle_settings().into_iter().map(text).collect()
    }

    #[test]
    fn settings_without_effect_have_reasons() {
        let members = r#"[{"controller": "none", "max_gap": 1, "birth": "joint", "lr": 0.1},
            {"max_gap": 1}, {"widen_pause": 2}, {"widen_pause": 2, "widen_by": 0.5},
            {"controller": "none", "birth": "joint"}, {"controller": "random", "tempo": "slow"},
            {"controller": "random", "width_init": "net2wider", "birth": "joint"},
            {"plateau_gain": 1}, {"plateau_gain": 1, "plateau_steps": 2},
            {"width_init": "net2wider", "widen_by": 1},
            {"widen_orthogonality": 0.5, "widen_by": 1}, {"growth_momentum": "reset"},
            {"widen_orthogonality": 0.5, "widen_by": 1, "widen_place": "orthogonality"},
            {"controller": "random", "growth_lr": "2:3", "keep_modules": "all"}]"#;
        assert_eq!(
            idle(&[("members", members)]),
            [
                "max_gap [0]: nothing grows with controller none",
                "birth [0, 4]: nothing grows with controller none",
                "widen_pause [2]: the heuristic widens no layer with widen-by 0",
                "tempo [5]: it is a rule of the heuristic, and the controller is random",
                "width_init [6]: controller random widens no layer",
                "plateau_gain [7]: the heuristic waits for no plateau with plateau-steps 0",
                "widen_orthogonality [10]: neither widen-trigger nor widen-place is orthogonality",
                "growth_momentum [11]: the heuristic widens no layer with widen-by 0",
                "keep_modules [13]: it is a rule of the heuristic, and the controller is random",
            ]
        );
        assert!(idle(&[("members", "widen_pause=2,3"), ("widen_by", "0.5")]).is_empty());
        assert!(idle(&[("members", "lr=2,3"), ("controller", "none")]).is_empty());
        assert!(idle(&[]).is_empty());
    }
}
