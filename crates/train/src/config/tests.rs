//! Tests of the way in which settings combine.

use std::collections::{BTreeMap, BTreeSet};

use super::declare::NumberRange;
use super::types::BatchLimit;
use super::*;

fn resolve(file: ConfigLayer, flags: ConfigLayer) -> Result<TrainConfig> {
    TrainConfig::resolve(file, flags)
}

#[test]
fn flags_lie_over_the_file_and_the_file_over_the_preset() {
    let file = ConfigLayer { batch: Some(64), envs: Some(2), ..ConfigLayer::default() };
    let flags =
        ConfigLayer { batch: Some(32), preset: Some(Preset::Quick), ..ConfigLayer::default() };
    let config = resolve(file, flags).unwrap();
    assert_eq!((config.batch, config.envs, config.preset), (32, 2, Preset::Quick));
    assert_eq!(config.steps, TrainConfig::base(Preset::Quick, &ControllerKind::default()).steps);
}

/// Only a learning controller benefits from several rounds; the others have all steps in one.
#[test]
fn a_preset_divides_its_steps_by_who_decides() {
    for (name, preset) in Preset::NAMES {
        let [learns, rules] = [ControllerKind::Ppo, ControllerKind::Heuristic]
            .map(|controller| TrainConfig::base(preset, &controller));
        assert!(learns.rounds > 1 && rules.rounds == 1, "{name}");
    }
    let file = ConfigLayer { controller: Some(ControllerKind::Random), ..ConfigLayer::default() };
    assert_eq!(resolve(file, ConfigLayer::default()).unwrap().rounds, 1);
}

#[test]
fn absurd_values_are_named_with_their_range() {
    let bad = [
        (ConfigLayer { batch: Some(0), ..ConfigLayer::default() }, "batch"),
        (ConfigLayer { envs: Some(0), ..ConfigLayer::default() }, "envs"),
        (ConfigLayer { steps: Some(0), ..ConfigLayer::default() }, "steps"),
        (
            ConfigLayer { max_batches: Some(BatchLimit::Count(0)), ..ConfigLayer::default() },
            "max-batches",
        ),
        (ConfigLayer { lr: Some(Some(f32::NAN)), ..ConfigLayer::default() }, "lr"),
        (ConfigLayer { lr: Some(Some(-1.0)), ..ConfigLayer::default() }, "lr"),
        (ConfigLayer { momentum: Some(Some(1.0)), ..ConfigLayer::default() }, "momentum"),
        (ConfigLayer { control_split: Some(Some(1.0)), ..ConfigLayer::default() }, "control-split"),
        (ConfigLayer { control_split: Some(Some(0.0)), ..ConfigLayer::default() }, "control-split"),
        (ConfigLayer { devices: Some(vec![]), ..ConfigLayer::default() }, "devices"),
        (ConfigLayer { ppo_gamma: Some(1.5), ..ConfigLayer::default() }, "ppo-gamma"),
        (ConfigLayer { ppo_clip: Some(0.0), ..ConfigLayer::default() }, "ppo-clip"),
        (ConfigLayer { ppo_lr: Some(f32::INFINITY), ..ConfigLayer::default() }, "ppo-lr"),
        (ConfigLayer { governor_penalty: Some(1.0), ..ConfigLayer::default() }, "governor-penalty"),
        (
            ConfigLayer { governor_failures_max: Some(0), ..ConfigLayer::default() },
            "governor-failures-max",
        ),
        (ConfigLayer { ppo_epochs: Some(0), ..ConfigLayer::default() }, "ppo-epochs"),
        (
            ConfigLayer { gradient_stats_every: Some(0), ..ConfigLayer::default() },
            "gradient-stats-every",
        ),
        (ConfigLayer { time_every: Some(0), ..ConfigLayer::default() }, "time-every"),
    ];
    for (layer, key) in bad {
        let error = resolve(ConfigLayer::default(), layer).unwrap_err();
        assert!(
            matches!(&error, crate::error::Error::Value { key: of, .. } if of == key),
            "{error:?}"
        );
        assert!(error.to_string().contains(", expected "), "{error}");
    }
}

#[test]
fn without_a_controller_the_whole_training_set_is_used() {
    let none = ConfigLayer { controller: Some(ControllerKind::None), ..ConfigLayer::default() };
    assert_eq!(resolve(ConfigLayer::default(), none).unwrap().control_share(), 0.0);
    assert_eq!(
        resolve(ConfigLayer::default(), ConfigLayer::default()).unwrap().control_share(),
        0.1
    );
}

/// Runs of the embedded dataset may have `data_root = ""`, as a shell makes it of a variable
/// that is not set.
#[test]
fn an_empty_data_root_stays_empty() {
    let flags = ConfigLayer { data_root: Some(Some("".into())), ..ConfigLayer::default() };
    let text = resolve(ConfigLayer::default(), flags).unwrap().resolved_toml();
    assert!(text.lines().any(|line| line == "data_root = \"\""), "{text}");
    let flags = ConfigLayer { init: Some(Some("".into())), ..ConfigLayer::default() };
    let error = resolve(ConfigLayer::default(), flags).unwrap_err().to_string();
    assert!(error.contains("init"), "{error}");
}

#[test]
fn a_written_configuration_means_the_same_files_everywhere() {
    let flags = ConfigLayer {
        data_root: Some(Some("data".into())),
        init: Some(Some("w.safetensors".into())),
        controller: Some(ControllerKind::Fixed("script.jsonl".into())),
        ..ConfigLayer::default()
    };
    let text = resolve(ConfigLayer::default(), flags).unwrap().resolved_toml();
    let here = std::env::current_dir().unwrap();
    for (key, before, name) in [
        ("data_root", "", "data"),
        ("init", "", "w.safetensors"),
        ("controller", "fixed:", "script.jsonl"),
    ] {
        let line = format!("{key} = \"{before}{}\"", here.join(name).display());
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
}

/// Fields of a group by name, with the fields of nested structs.
fn fields(group: &serde_json::Value) -> BTreeMap<&str, &serde_json::Value> {
    let entries = group.as_object().into_iter().flatten();
    entries
        .flat_map(|(name, value)| match value {
            serde_json::Value::Object(_) => fields(value),
            _ => [(&**name, value)].into(),
        })
        .collect()
}

#[test]
fn every_setting_of_a_group_changes_the_field_of_its_name() {
    let usual = resolve(ConfigLayer::default(), ConfigLayer::default()).unwrap();
    let groups: BTreeSet<&str> = TrainConfig::GROUPED.iter().map(|(_, group)| *group).collect();
    assert!(usual.groups().iter().all(|(name, _)| groups.contains(name)), "{groups:?}");
    for (key, group) in TrainConfig::GROUPED {
        let setting = all().iter().find(|setting| setting.key == *key).unwrap();
        let text = match (setting.range, *key) {
            (NumberRange::Whole(low, _), _) => (low + 7).to_string(),
            (NumberRange::Real(low, high), _) => (high - (high - low) / 64.0).to_string(),
            (NumberRange::Any, "reward") => "sparse".into(),
            (NumberRange::Any, "tempo") => "slow".into(),
            (NumberRange::Any, "birth") => "aside".into(),
            (NumberRange::Any, "width_init") => "net2wider".into(),
            (NumberRange::Any, "widen_trigger" | "widen_place") => "orthogonality".into(),
            (NumberRange::Any, "keep_modules") => "all".into(),
            (NumberRange::Any, _) => panic!("{key}: give this test a value that is no default"),
        };
        let mut flags = ConfigLayer::default();
        flags.set(key, &text).unwrap();
        let mut other = usual.clone();
        other.apply(flags);
        for ((name, before), (_, after)) in usual.groups().iter().zip(&other.groups()) {
            let (before, after) = (fields(before), fields(after));
            let changed: Vec<&str> =
                before.keys().copied().filter(|name| before[name] != after[name]).collect();
            if name != group {
                assert!(changed.is_empty(), "{key} changes {changed:?} of {name}");
                continue;
            }
            let [field] = changed[..] else { panic!("{key} changes {changed:?}") };
            let fits = match field {
                "mode" => key == name,
                "floors" => key.starts_with("ppo_floor_"),
                _ => {
                    [field, &format!("{name}_{field}"), field.trim_end_matches("_pp")].contains(key)
                }
            };
            assert!(fits, "{key} changes {field}");
        }
    }
}

#[test]
fn the_name_of_a_run_is_a_plain_file_name() {
    let host = Some("cnn:channels=12,blocks=4".to_string());
    let config =
        resolve(ConfigLayer::default(), ConfigLayer { host, ..ConfigLayer::default() }).unwrap();
    assert_eq!(config.run_name(), "cnn-channels-12-blocks-4-embedded");
}
