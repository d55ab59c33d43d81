//! The reference page of all settings, `docs/settings.md`, generated from their table.

use std::fmt::Write;

use super::declare::Setting;
use super::table::all;
use super::types::Preset;
use super::value::FlagForm;

/// Text before the tables.
const INTRODUCTION: &str = "\
# Settings

This page is generated from `crates/train/src/config/table.rs`, and a test compares the two. After
a change to the table, run

```sh
UPDATE_DOCS=1 cargo test -p meristem-train --lib config::reference
```

A setting is a flag of `meristem train`, or a key in the TOML or JSON file of `--config FILE`. Flags
override the file, and the file overrides the preset. `meristem train --print-config` prints the
values in force and exits.

`meristem control eval` accepts every setting without the mark *train*. Two of its own flags have
names that mean something else in `train`:

| flag | in `train` | in `control eval` |
|---|---|---|
| `--policy FILE` | the policy that the run starts from and trains further | \
one more policy to compare; it does not learn, and the flag may be given several times |
| `--run-dir DIR` | the folder of the run | \
the folder that keeps all runs of the comparison, and `study.json` |
";

/// Text between presets and settings.
const COLUMNS: &str = "
## Columns

- **Setting**: the key in a file. The flag is `--` and the key, with `-` for `_`.
- **Value**: the accepted values, with unit and inclusive range.
- **Default**: the value with preset `default`, then values of other presets, of controllers that do
  not learn, and of `control eval`, where they differ. `control eval` has the values of a controller
  that learns.
- **Scope**: *result*: results depend on the setting, and a run resumes with the same value. *run*:
  results do not depend on it. *process*: like *run*, and each process of a run may have its own
  value. *resume*: can be changed with `--resume`. *train*: not for `control eval`.
  *member*: may differ from env to env, see `members`. *learner*: also a setting of
  [learners](learners.md).
- **Since**: the version of the settings that introduced it, or gave it another default. Runs of
  earlier versions that do not store it have the value in brackets, or else the default.
";

/// The page, as Markdown.
pub fn page() -> String {
    let mut page = String::from(INTRODUCTION);
    page.push_str(
        "\n## Presets\n\n| preset | meaning | differs from `default` in |\n|---|---|---|\n",
    );
    for (name, preset) in Preset::NAMES {
        let row = format!("| `{name}` | {} | {} |\n", preset.meaning(), differences(preset));
        page.push_str(&row);
    }
    page.push_str(COLUMNS);
    let mut heading = "";
    for setting in all() {
        if setting.heading != heading {
            heading = setting.heading;
            let columns = "| Setting | Value | Default | Scope | Since | Meaning |\n\
                           |---|---|---|---|---|---|\n";
            // Writing to a string does not fail.
            let _ = write!(page, "\n## {heading}\n\n{columns}");
        }
        page.push_str(&row(setting));
    }
    page
}

/// Settings in which a preset differs from `default`, as `key value, …`; empty for `default`.
pub fn differences(preset: Preset) -> String {
    let differs = all().iter().filter_map(|setting| {
        let (usual, own) =
            (setting.default.for_preset(Preset::Default)?, setting.default.for_preset(preset)?);
        (usual != own).then(|| format!("{} {own}", setting.key))
    });
    differs.collect::<Vec<_>>().join(", ")
}

fn row(setting: &Setting) -> String {
    let unit =
        setting.unit.filter(|_| setting.form != FlagForm::Switch).map(|unit| format!(" ({unit})"));
    let range = Some(setting.range.to_string()).filter(|range| !range.is_empty());
    let value = format!(
        "{}{}{}",
        setting.kind,
        unit.unwrap_or_default(),
        range.map(|range| format!(", {range}")).unwrap_or_default()
    );
    let marks = [
        (setting.train_only, ", train"),
        (setting.on_resume, ", resume"),
        (setting.of_member, ", member"),
        (setting.of_learner, ", learner"),
    ];
    let marks: String = marks.iter().filter(|(set, _)| *set).map(|(_, mark)| *mark).collect();
    let default = setting.default.to_string();
    let default = default.trim_start_matches("default: ");
    let before = setting.before.filter(|before| *before != default);
    let before = before.map(|before| format!(" (`{before}`)")).unwrap_or_default();
    let study = setting.study_default.as_ref();
    let study = study.map(|value| format!("; `control eval`: {value}")).unwrap_or_default();
    let Setting { key, scope, since, help, .. } = setting;
    format!(
        "| `{key}` | {value} | {default}{study} | {scope}{marks} | {since}{before} | {help} |\n"
    )
    .replace("on|off", "on or off")
    // Not an HTML tag.
    .replace('<', "\\<")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_page_in_docs_is_that_of_the_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&path, page()).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        let made = page();
        let differs = made.lines().zip(written.lines()).find(|(made, there)| made != there);
        assert_eq!(differs, None, "run this test with UPDATE_DOCS=1");
        assert_eq!(made, written, "run this test with UPDATE_DOCS=1");
    }

    #[test]
    fn a_row_has_everything_of_its_setting() {
        let page = page();
        let of = |key: &str| page.lines().find(|line| line.contains(&format!("`{key}`"))).unwrap();
        assert_eq!(
            of("batch"),
            "| `batch` | whole number (N), 1 to 65536 | 128 | result, member, learner | 1 | \
             Samples in a batch of one env; with --data-parallel, of all ranks together. |"
        );
        assert!(of("steps").contains("if the controller does not learn: 30"), "{}", of("steps"));
        assert!(of("threads").contains("| process, resume, learner |"), "{}", of("threads"));
        assert!(of("min_contribution").contains("| 0.5, quick 0, full 1 |"));
        assert!(of("run_dir").contains(r"| runs/\<time>-\<name> |"));
        assert!(of("seed").contains("| 42; `control eval`: 1000 |"), "{}", of("seed"));
        assert!(of("policy_hidden").contains("for a new policy 128, full 512 |"));
        let full = page.lines().find(|line| line.starts_with("| `full` |")).unwrap();
        assert!(full.ends_with("policy_hidden 512 |"), "{full}");
    }
}
