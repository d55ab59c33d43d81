//! Comparing runs by their settings, across versions of the settings.
//!
//! A resolved configuration is compared as a table of keys and values. A setting that came later than the file is
//! missing there, which means the value from before it came.

use toml::Table;

use super::declare::{Scope, Setting};
use super::table::{Layer, TrainConfig, all};
use super::types::{BadValue, ControllerKind, Preset};

/// The settings that results depend on, in a resolved configuration: equal texts, equal runs on the same data and
/// machine.
pub(crate) fn identity(resolved: &str) -> String {
    keep(resolved, |setting| setting.scope == Scope::Result)
}

/// The settings that all processes of a run have in common, in a resolved configuration.
pub(crate) fn in_common(resolved: &str) -> String {
    keep(resolved, |setting| setting.scope != Scope::Process)
}

/// The first line of a resolved configuration that `written`, the text of a file, lacks or has otherwise. `None` where
/// both say the same.
pub(crate) fn first_difference(written: &str, resolved: &str) -> Option<String> {
    let [written, resolved] = [written, resolved].map(|text| keep(text, |_| true));
    let lacks = |line: &&str| !written.lines().any(|other| other == *line);
    let lost = resolved.lines().find(lacks).map(|line| format!("lacks `{line}`"));
    lost.or_else(|| (written != resolved).then(|| "has other lines".into()))
}

/// Gives a file that a run wrote the settings that came later, with their values from before. A file is taken for one if
/// it has every setting of the first version, as only a resolved configuration does.
///
/// # Errors
/// A value from before that is not in its type's text form.
pub(crate) fn upgrade(layer: &mut Layer) -> Result<(), BadValue> {
    let given = layer.given();
    let always = |setting: &&Setting| setting.since == 1 && !setting.is_optional();
    if !all().iter().filter(always).all(|setting| given.contains(&setting.key)) {
        return Ok(());
    }
    let before = all().iter().filter_map(|setting| Some((setting.key, setting.before?)));
    before.filter(|(key, _)| !given.contains(key)).try_for_each(|(key, text)| layer.set(key, text))
}

/// The lines of some settings, sorted by key; those that came later are left out where they have the values from before.
/// Text that is no TOML stays as it is: it is the same as nothing else.
fn keep(text: &str, wanted: impl Fn(&Setting) -> bool) -> String {
    let Ok(table) = text.parse::<Table>() else { return text.into() };
    let before = from_before();
    let stays = |key: &str, value: &toml::Value| {
        let setting = all().iter().find(|setting| setting.key == key);
        setting.is_none_or(|setting| {
            wanted(setting) && (setting.since == 1 || before.get(key) != Some(value))
        })
    };
    let kept = table.into_iter().filter(|(key, value)| stays(key, value)).collect::<Table>();
    kept.to_string()
}

/// Values of later settings in the runs from before they came: the defaults, where nothing else is declared.
fn from_before() -> Table {
    let mut layer = Layer::default();
    for setting in all() {
        if let Some(before) = setting.before {
            // A test reads all of them.
            let _ = layer.set(setting.key, before);
        }
    }
    let mut config = TrainConfig::base(Preset::default(), &ControllerKind::default());
    config.apply(layer);
    Table::try_from(&config).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Layer;

    fn resolve(flags: Layer) -> TrainConfig {
        TrainConfig::resolve(Layer::default(), flags).unwrap()
    }

    /// Without the lines whose keys begin so.
    fn without(text: &str, beginnings: &[&str]) -> String {
        let dropped = |line: &&str| beginnings.iter().any(|beginning| line.starts_with(beginning));
        text.lines().filter(|line| !dropped(line)).flat_map(|line| [line, "\n"]).collect()
    }

    #[test]
    fn values_from_before_are_values() {
        upgrade(&mut toml::from_str(&resolve(Layer::default()).resolved_toml()).unwrap()).unwrap();
        for setting in all() {
            let before =
                setting.before.map_or(Ok(()), |text| Layer::default().set(setting.key, text));
            before.unwrap_or_else(|error| panic!("{}: {error}", setting.key));
        }
    }

    /// A run from before a setting came into being has its default, whatever its files lack.
    #[test]
    fn later_settings_count_where_they_have_not_the_value_from_before() {
        for preset in [Preset::Default, Preset::Quick] {
            let of = |flags| resolve(Layer { preset: Some(preset), ..flags });
            let before = of(Layer::default());
            assert!(before.resolved_toml().contains("\ngovernor_penalty = -10.0\n"));
            assert!(!before.identity().contains("governor"), "{}", before.identity());
            let other = of(Layer { governor_penalty: Some(-5.0), ..Layer::default() });
            let told = other.identity();
            let lines: Vec<&str> = told.lines().filter(|l| l.contains("governor")).collect();
            assert_eq!(lines, ["governor_penalty = -5.0"]);
        }
    }

    #[test]
    fn what_changes_no_result_is_not_part_of_a_run_s_identity() {
        let usual = resolve(Layer::default());
        let another = resolve(Layer {
            threads: Some(3),
            telemetry: Some("full".parse().unwrap()),
            name: Some(Some("x".into())),
            policy_device: Some(Some("cpu".into())),
            ..Layer::default()
        });
        assert_eq!(usual.identity(), another.identity());
        assert_ne!(usual.in_common(), another.in_common(), "processes tell the same");
        let threads = resolve(Layer { threads: Some(3), ..Layer::default() });
        assert_eq!(usual.in_common(), threads.in_common());
        let seed = resolve(Layer { seed: Some(43), ..Layer::default() });
        assert_ne!(usual.identity(), seed.identity());
    }

    /// The lines of a checkpoint from before this table: other settings, in another order, at fixed values.
    #[test]
    fn the_identity_of_an_older_checkpoint_is_the_same() {
        let config = resolve(Layer { checkpoint_every: Some(3), ..Layer::default() });
        let mut lines: Vec<&str> =
            vec!["checkpoint_every = 0", "threads = 0", "hot_scope = \"deny\""];
        let identity = config.identity();
        lines.extend(identity.lines().rev());
        assert_eq!(super::identity(&lines.join("\n")), identity);
    }

    #[test]
    fn a_file_that_lacks_later_settings_is_as_it_was_written() {
        let resolved = resolve(Layer::default()).resolved_toml();
        let older = without(&resolved, &["governor_", "reward_", "telemetry"]);
        assert!(older.len() < resolved.len());
        assert_eq!(first_difference(&older, &resolved), None);
        let damaged = without(&resolved, &["seed"]);
        assert_eq!(first_difference(&damaged, &resolved).unwrap(), "lacks `seed = 42`");
        let more = format!("{resolved}more = 1\n");
        assert_eq!(first_difference(&more, &resolved).unwrap(), "has other lines");
    }
}
