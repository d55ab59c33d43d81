//! Comparison of runs by their settings, across versions of the settings.
//!
//! Resolved configurations are compared as tables of keys and values. A setting that is missing,
//! because it is newer than the file, counts as having its *value from before*: the value that runs
//! had before the setting existed ([`Setting::before`]).

use meristem_device::DeviceId;
use toml::{Table, Value};

use super::declare::{Setting, SettingScope};
use super::table::{ConfigLayer, TrainConfig, all};
use super::types::{BadValue, ControllerKind, Member, OptimizerKind, Preset};

/// Settings that results depend on, from a resolved configuration. Runs with equal texts have equal
/// results on the same data, machine, kinds of devices and precision. The text has the index of
/// each device, on which the order of samples depends, but neither its kind nor the precision: a
/// run may continue on another kind of device or at another precision. With `data_parallel` the
/// order depends on the first device alone.
pub(crate) fn identity(resolved: &str) -> String {
    let kept = keep_of_whole(resolved, |setting| setting.scope == SettingScope::Result);
    let Ok(mut table) = kept.parse::<Table>() else { return kept };
    table.remove("precision");
    let data_parallel = table.get("data_parallel").and_then(Value::as_bool).unwrap_or(false);
    if let Some(Value::Array(devices)) = table.get_mut("devices") {
        devices.truncate(if data_parallel { 1 } else { devices.len() });
        for device in devices {
            let id = device.as_str().and_then(|name| name.trim().parse::<DeviceId>().ok());
            if let Some(id) = id {
                *device = Value::String(DeviceId::Cpu(id.index()).to_string());
            }
        }
    }
    table.to_string()
}

/// An identity without the planned length of the run, which an extension changes.
pub(crate) fn without_length(identity: &str) -> String {
    keep(identity, |setting| !setting.extends)
}

/// The first difference between two resolved configurations in a setting that results depend on, as
/// the setting's lines in `began` and in `now`.
pub(crate) fn changed_result(began: &str, now: &str) -> Option<(String, String)> {
    let [began, now] = [began, now]
        .map(|text| keep_of_whole(text, |setting| setting.scope == SettingScope::Result));
    changed_line(&began, &now)
}

/// The first setting that differs between two texts, as its lines in `began` and in `now`.
pub(crate) fn changed_line(began: &str, now: &str) -> Option<(String, String)> {
    let only_in = |one: &str, another: &str| {
        one.lines().find(|line| !another.lines().any(|l| l == *line)).map(str::to_string)
    };
    let before = values_from_before();
    let of_same_key = |text: &str, line: &str| {
        let key = line.split(" = ").next().unwrap_or_default();
        let own = text.lines().find(|other| other.split(" = ").next() == Some(key));
        // A newer setting with its value from before is left out of the text.
        let older = || before.get(key).map(|value| format!("{key} = {value}"));
        own.map(str::to_string).or_else(older).unwrap_or_else(|| "no such line".into())
    };
    let gone = only_in(began, now).map(|line| {
        let same = of_same_key(now, &line);
        (line, same)
    });
    gone.or_else(|| only_in(now, began).map(|line| (of_same_key(began, &line), line)))
}

/// Settings that all processes of a run share, from a resolved configuration.
pub(crate) fn in_common(resolved: &str) -> String {
    keep_of_whole(resolved, |setting| setting.scope != SettingScope::Process)
}

/// Description of the first difference between `written`, the text of a file, and `resolved`, a
/// resolved configuration. `None` if they have the same settings.
pub(crate) fn first_difference(written: &str, resolved: &str) -> Option<String> {
    let [written, resolved] = [written, resolved].map(|text| keep_of_whole(text, |_| true));
    let lacks = |line: &&str| !written.lines().any(|other| other == *line);
    let lost = resolved.lines().find(lacks).map(|line| format!("lacks `{line}`"));
    lost.or_else(|| (written != resolved).then(|| "has other lines".into()))
}

/// Version that gave SGD another default rate.
const RATE_VERSION: u32 = 16;

/// Default rate of SGD before [`RATE_VERSION`].
const EARLIER_RATE: &str = "0.01";

/// Adds newer settings, with their values from before, to a file that an older run wrote. A file
/// counts as written by a run if it has every setting of the first version that always has a
/// value, as only a resolved configuration does.
///
/// # Errors
/// A value from before that its type cannot parse.
pub(crate) fn upgrade(layer: &mut ConfigLayer) -> Result<(), BadValue> {
    let given = layer.given();
    let always = |setting: &&Setting| setting.since == 1 && !setting.is_optional();
    if !all().iter().filter(always).all(|setting| given.contains(&setting.key)) {
        return Ok(());
    }
    if !given.contains(&"module_lr") {
        add_rates_from_before(layer, 1)?;
    }
    add_values_from_before(layer, 1)
}

/// Adds to the settings that are given the values that settings newer than `version` have in older
/// runs.
///
/// # Errors
/// A value from before that its type cannot parse.
pub(crate) fn add_values_from_before(
    layer: &mut ConfigLayer,
    version: u32,
) -> Result<(), BadValue> {
    let given = layer.given();
    let newer = all().iter().filter(|setting| setting.since > version);
    let before = newer.filter_map(|setting| Some((setting.key, setting.before?)));
    before.filter(|(key, _)| !given.contains(key)).try_for_each(|(key, text)| layer.set(key, text))
}

/// Gives networks under SGD without a rate the default rate of a version of the settings, if it
/// was another one than now. A run's file has the rate of the run, except if its members have
/// several optimisers, which have different defaults.
///
/// # Errors
/// Never: a member without a rate can get one.
pub(crate) fn add_rates_from_before(layer: &mut ConfigLayer, version: u32) -> Result<(), BadValue> {
    if version >= RATE_VERSION || layer.lr.flatten().is_some() {
        return Ok(());
    }
    let optimizer = layer.optimizer.unwrap_or_default();
    match layer.members.iter_mut().flatten().next() {
        Some(members) => {
            members.all_mut().iter_mut().try_for_each(|member| add_earlier_rate(member, optimizer))
        }
        None if optimizer.is_sgd() => layer.set("lr", EARLIER_RATE),
        None => Ok(()),
    }
}

fn add_earlier_rate(member: &mut Member, optimizer: OptimizerKind) -> Result<(), BadValue> {
    let own = member.get("optimizer").map(str::parse).and_then(Result::ok);
    if own.unwrap_or(optimizer).is_sgd() && member.get("lr").is_none() {
        member.push("lr", EARLIER_RATE)?;
    }
    Ok(())
}

/// Version of the settings of this program.
pub(crate) fn settings_version() -> u32 {
    all().iter().map(|setting| setting.since).max().unwrap_or_default()
}

/// The lines of the wanted settings, sorted by key, without newer settings that have their value
/// from before. Text that is not TOML is returned unchanged and equals only itself.
fn keep(text: &str, wanted: impl Fn(&Setting) -> bool) -> String {
    match text.parse() {
        Ok(table) => keep_in(table, wanted),
        Err(_) => text.into(),
    }
}

/// As [`keep`], for a whole resolved configuration; a member under SGD has the default rate of the
/// configuration's version.
fn keep_of_whole(text: &str, wanted: impl Fn(&Setting) -> bool) -> String {
    let Ok(mut table) = text.parse::<Table>() else { return text.into() };
    if !["module_lr", "lr"].iter().any(|key| table.contains_key(*key)) {
        let optimizer = table.get("optimizer").and_then(Value::as_str).map(str::parse);
        let optimizer = optimizer.and_then(Result::ok).unwrap_or_default();
        let members = table.get_mut("members").and_then(Value::as_array_mut);
        for text in members.into_iter().flatten() {
            let member = text.as_str().map(Member::parse).and_then(Result::ok);
            let Some(mut member) = member else { continue };
            // A member that cannot be changed stays as it is, and differs.
            if add_earlier_rate(&mut member, optimizer).is_ok() {
                *text = Value::String(member.to_string());
            }
        }
    }
    keep_in(table, wanted)
}

fn keep_in(table: Table, wanted: impl Fn(&Setting) -> bool) -> String {
    let before = values_from_before();
    let stays = |key: &str, value: &toml::Value| {
        let setting = all().iter().find(|setting| setting.key == key);
        setting.is_none_or(|setting| {
            wanted(setting) && (setting.since == 1 || before.get(key) != Some(value))
        })
    };
    let kept = table.into_iter().filter(|(key, value)| stays(key, value)).collect::<Table>();
    kept.to_string()
}

/// Values of newer settings in older runs, as the text of a configuration has them.
pub(crate) fn values_from_before() -> Table {
    let mut layer = ConfigLayer::default();
    for setting in all() {
        if let Some(before) = setting.before {
            // A test parses all of them.
            let _ = layer.set(setting.key, before);
        }
    }
    let mut config = TrainConfig::base(Preset::default(), &ControllerKind::default());
    config.apply(layer);
    // Through text, because it has the shortest digits of an f32: 0.15, not 0.15000000596046448.
    toml::to_string(&config).unwrap_or_default().parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use meristem_data::order::EpochMode;
    use meristem_nn::Precision;
    use meristem_nn::graph::Optimiser;

    use super::*;
    use crate::config::ConfigLayer;

    fn resolve(flags: ConfigLayer) -> TrainConfig {
        TrainConfig::resolve(ConfigLayer::default(), flags).unwrap()
    }

    /// `text` without the lines whose keys have one of these prefixes.
    fn without(text: &str, beginnings: &[&str]) -> String {
        let dropped = |line: &&str| beginnings.iter().any(|beginning| line.starts_with(beginning));
        text.lines().filter(|line| !dropped(line)).flat_map(|line| [line, "\n"]).collect()
    }

    /// Flags of runs whose resolved configurations have every setting that some run has.
    fn kinds_of_run() -> impl Iterator<Item = ConfigLayer> {
        let controllers = ["none", "random", "heuristic", "ppo", "ppo:p", "greedy:p", "fixed:s"];
        let presets = Preset::NAMES.map(|(_, preset)| preset);
        controllers.into_iter().flat_map(move |name| {
            let controller: Option<ControllerKind> = Some(name.parse().unwrap());
            presets.into_iter().map(move |preset| ConfigLayer {
                controller: controller.clone(),
                preset: Some(preset),
                ..ConfigLayer::default()
            })
        })
    }

    #[test]
    fn newer_settings_have_a_value_from_before_or_are_left_out() {
        let texts: Vec<String> =
            kinds_of_run().map(|flags| resolve(flags).resolved_toml()).collect();
        for Setting { key, before, since, .. } in all() {
            let set = before.map_or(Ok(()), |text| ConfigLayer::default().set(key, text));
            set.unwrap_or_else(|error| panic!("{key}: {error}"));
            assert!(*since > 1 || before.is_none(), "{key}: nothing is before version 1");
            let line = format!("\n{key} = ");
            if *since > 1 && before.is_none() {
                assert!(
                    !texts.iter().any(|text| text.contains(&line)),
                    "{key} has no value before"
                );
            }
        }
    }

    /// A configuration written by an older version counts as unchanged, and a checkpoint of that
    /// run has the same settings.
    #[test]
    fn a_configuration_of_each_older_version_is_accepted() {
        for (version, flags) in
            (1..settings_version()).flat_map(|v| kinds_of_run().map(move |run| (v, run)))
        {
            let newer = || all().iter().filter(|setting| setting.since > version);
            let mut then = flags.clone();
            for Setting { key, before, .. } in newer() {
                before.map_or(Ok(()), |text| then.set(key, text)).unwrap();
            }
            let then = resolve(then);
            let lines: Vec<String> = newer().map(|setting| format!("{} = ", setting.key)).collect();
            let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
            let older = without(&then.resolved_toml(), &lines);
            let context = format!("version {version}, {flags:?}");
            let read = super::super::file::parse(Path::new("config.toml"), &older).unwrap();
            let read = resolve(read);
            // An optional setting without a value is absent from its file as if it were newer.
            let mut expected: ConfigLayer = toml::from_str(&then.resolved_toml()).unwrap();
            upgrade(&mut expected).unwrap();
            assert_eq!(read, resolve(expected), "{context}");
            assert_eq!(first_difference(&older, &read.resolved_toml()), None, "{context}");
            assert_eq!(identity(&older), read.identity(), "{context}");
        }
    }

    /// The file of an earlier version does not have the rate of members with several optimisers.
    #[test]
    fn members_under_sgd_keep_the_earlier_default_rate() {
        let of = |members: &str| {
            let members = Some(Some(serde_json::from_str(members).unwrap()));
            resolve(ConfigLayer { members, ..ConfigLayer::default() })
        };
        let rates = |config: &TrainConfig| -> Vec<Optimiser> {
            config.of_members().iter().map(|member| member.optimisers(1.0).host).collect()
        };
        let today = of(r#"{"optimizer": ["sgd", "lion", "nesterov"]}"#).resolved_toml();
        let older = without(&today, &["module_lr", "birth"]);
        let read = super::super::file::parse(Path::new("config.toml"), &older).unwrap();
        let read = resolve(read);
        let given = of(r#"[{"optimizer": "sgd", "lr": 0.01}, {"optimizer": "lion"},
            {"optimizer": "nesterov", "lr": 0.01}]"#);
        assert_eq!(rates(&read), rates(&given));
        assert_eq!(identity(&older), read.identity());
        assert_eq!(first_difference(&older, &read.resolved_toml()), None);
        // The same members of today have another rate.
        let flags = [("module_lr", "fixed"), ("birth", "aside")];
        let mut layer: ConfigLayer = toml::from_str(&today).unwrap();
        flags.iter().for_each(|(key, value)| layer.set(key, value).unwrap());
        let (began, now) = changed_result(&older, &resolve(layer).resolved_toml()).unwrap();
        assert!(began.contains("lr=0.01") && !now.contains("lr="), "{began}, {now}");
    }

    /// An older run has the default of a newer setting, although its files lack it.
    #[test]
    fn a_newer_setting_counts_unless_it_has_its_value_from_before() {
        for preset in [Preset::Default, Preset::Quick] {
            let of = |flags| resolve(ConfigLayer { preset: Some(preset), ..flags });
            let before = of(ConfigLayer::default());
            assert!(before.resolved_toml().contains("\ngovernor_penalty = -10.0\n"));
            assert!(!before.identity().contains("governor"), "{}", before.identity());
            let other = of(ConfigLayer { governor_penalty: Some(-5.0), ..ConfigLayer::default() });
            let told = other.identity();
            let lines: Vec<&str> = told.lines().filter(|l| l.contains("governor")).collect();
            assert_eq!(lines, ["governor_penalty = -5.0"]);
        }
    }

    /// A run from before the setting `epoch` existed resumes with its samples dealt out; a file
    /// written by a user has the default.
    #[test]
    fn a_run_from_before_the_setting_epoch_resumes_with_dealt_samples() {
        let epoch = |text: &str| {
            let mut layer: ConfigLayer = toml::from_str(text).unwrap();
            upgrade(&mut layer).unwrap();
            resolve(layer).epoch
        };
        let full = resolve(ConfigLayer::default());
        let dealt =
            resolve(ConfigLayer { epoch: Some(EpochMode::Dealt), ..ConfigLayer::default() });
        let older = without(&dealt.resolved_toml(), &["epoch"]);
        assert_eq!(epoch(&older), EpochMode::Dealt);
        assert_eq!(identity(&older), dealt.identity());
        assert_ne!(full.identity(), dealt.identity());
        assert_eq!(epoch("batch = 64\n"), EpochMode::Full);
    }

    /// A run may resume on devices of another kind, but not with another order of samples.
    #[test]
    fn an_identity_has_the_numbers_of_devices_but_not_their_kinds() {
        let of = |names: &[&str]| {
            let devices = Some(names.iter().map(|name| name.to_string()).collect());
            resolve(ConfigLayer { devices, envs: Some(2), ..ConfigLayer::default() }).identity()
        };
        assert_eq!(of(&["cpu:0", "cpu:1"]), of(&["cuda", "cuda:1"]));
        assert_eq!(of(&["cpu"]), of(&["cuda:0"]));
        assert_ne!(of(&["cpu"]), of(&["cuda:1"]));
        assert_ne!(of(&["cpu:0", "cpu:1"]), of(&["cuda:1", "cuda:0"]));
        let replicas = |names: &[&str]| {
            let devices = Some(names.iter().map(|name| name.to_string()).collect());
            let (data_parallel, ranks) = (Some(true), Some(Some(2)));
            resolve(ConfigLayer { devices, data_parallel, ranks, ..ConfigLayer::default() })
        };
        let [one, two, other] = [&["cpu"][..], &["cuda", "cuda:1"], &["cpu:1", "cpu"]];
        assert_eq!(replicas(one).identity(), replicas(two).identity());
        assert_ne!(replicas(one).identity(), replicas(other).identity());
    }

    /// A run may resume at another precision; a run from before the setting existed has f32.
    #[test]
    fn an_identity_does_not_include_the_precision() {
        let of = |precision| {
            let devices = Some(vec!["cuda".to_string()]);
            resolve(ConfigLayer { devices, precision: Some(precision), ..ConfigLayer::default() })
        };
        let [exact, rounded] = [Precision::F32, Precision::Bf16].map(of);
        assert_eq!(exact.identity(), rounded.identity());
        assert_ne!(exact.in_common(), rounded.in_common(), "all processes share the precision");
        let older = without(&exact.resolved_toml(), &["precision"]);
        assert!(older.len() < exact.resolved_toml().len());
        assert_eq!(first_difference(&older, &exact.resolved_toml()), None);
        assert!(first_difference(&older, &rounded.resolved_toml()).is_some());
        assert_eq!(resolve(toml::from_str(&older).unwrap()).precision, Precision::F32);
    }

    #[test]
    fn what_changes_no_result_is_not_part_of_a_run_s_identity() {
        let usual = resolve(ConfigLayer::default());
        let another = resolve(ConfigLayer {
            threads: Some(3),
            telemetry: Some("full".parse().unwrap()),
            name: Some(Some("x".into())),
            policy_device: Some(Some("cpu".into())),
            ..ConfigLayer::default()
        });
        assert_eq!(usual.identity(), another.identity());
        assert_ne!(usual.in_common(), another.in_common(), "all processes share the setting");
        let threads = resolve(ConfigLayer { threads: Some(3), ..ConfigLayer::default() });
        assert_eq!(usual.in_common(), threads.in_common());
        let seed = resolve(ConfigLayer { seed: Some(43), ..ConfigLayer::default() });
        assert_ne!(usual.identity(), seed.identity());
    }

    /// Where only one file has a setting, the difference names its value and the value from before.
    #[test]
    fn a_difference_names_the_value_from_before() {
        let now = resolve(ConfigLayer::default());
        let older = without(&now.resolved_toml(), &["winograd"]);
        let (began, now) = changed_result(&older, &now.resolved_toml()).unwrap();
        assert_eq!([&*began, &*now], ["winograd = \"off\"", "winograd = \"on\""]);
    }

    /// The lines of an older checkpoint: other settings, in another order, with fixed values.
    #[test]
    fn the_identity_of_an_older_checkpoint_is_the_same() {
        let config = resolve(ConfigLayer { checkpoint_every: Some(3), ..ConfigLayer::default() });
        let mut lines: Vec<&str> =
            vec!["checkpoint_every = 0", "threads = 0", "hot_scope = \"deny\""];
        let identity = config.identity();
        lines.extend(identity.lines().rev());
        assert_eq!(super::identity(&lines.join("\n")), identity);
    }

    #[test]
    fn a_file_that_lacks_later_settings_is_as_it_was_written() {
        let resolved = resolve(ConfigLayer::default()).resolved_toml();
        let older = without(&resolved, &["governor_", "reward_", "telemetry"]);
        assert!(older.len() < resolved.len());
        assert_eq!(first_difference(&older, &resolved), None);
        let damaged = without(&resolved, &["seed"]);
        assert_eq!(first_difference(&damaged, &resolved).unwrap(), "lacks `seed = 42`");
        let more = format!("{resolved}more = 1\n");
        assert_eq!(first_difference(&more, &resolved).unwrap(), "has other lines");
    }
}
