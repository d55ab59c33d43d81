//! The reference page of all settings, `docs/settings.md`, made from their table.

use std::fmt::Write;

use super::declare::Setting;
use super::table::all;
use super::types::Preset;
use super::value::Form;

/// The text before the tables.
const INTRODUCTION: &str = "\
# Settings

Made from the table in `crates/train/src/config/table.rs`; a test compares the two. After a change there:

```sh
UPDATE_DOCS=1 cargo test -p meristem-train --lib config::reference
```

A setting is a flag of `meristem train`, or a key in a TOML or JSON file (`--config FILE`). Flags override the file, which
overrides the preset. `meristem train --print-config` prints the values in force and exits. `meristem control eval` takes
the settings that are not marked with *train*.
";

/// The text between presets and settings.
const COLUMNS: &str = "
## Columns

- **Setting**: the key; the flag is `--` and the key with `-` for `_`.
- **Value**: what it accepts, its unit or kind, and its range, ends included.
- **Default**: with preset `default`; then other presets where they differ, and controllers that do not learn.
- **Scope**: *result*: results depend on it; a run resumes with the same value. *run*: results do not depend on it.
  *process*: as *run*, and each process of a run may have its own. *resume*: may be given with `--resume`.
- **Since**: version of the settings that it came with. A run folder from before goes on with the value in brackets, or
  with the default.
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
            let columns = "| Setting | Value | Default | Scope | Since | Meaning |\n|---|---|---|---|---|---|\n";
            // Writing to a string does not fail.
            let _ = write!(page, "\n## {heading}\n\n{columns}");
        }
        page.push_str(&row(setting));
    }
    page
}

/// The settings in which a preset differs from `default`, as `key value, …`; empty for that one.
pub fn differences(preset: Preset) -> String {
    let differs = all().iter().filter_map(|setting| {
        let (usual, own) = (setting.default.of(Preset::Default)?, setting.default.of(preset)?);
        (usual != own).then(|| format!("{} {own}", setting.key))
    });
    differs.collect::<Vec<_>>().join(", ")
}

fn row(setting: &Setting) -> String {
    let unit =
        setting.unit.filter(|_| setting.form != Form::Switch).map(|unit| format!(" ({unit})"));
    let range = Some(setting.range.to_string()).filter(|range| !range.is_empty());
    let value = format!(
        "{}{}{}",
        setting.kind,
        unit.unwrap_or_default(),
        range.map(|range| format!(", {range}")).unwrap_or_default()
    );
    let marks = [(setting.train_only, ", train"), (setting.on_resume, ", resume")];
    let marks: String = marks.iter().filter(|(set, _)| *set).map(|(_, mark)| *mark).collect();
    let before = setting.before.map(|before| format!(" (`{before}`)")).unwrap_or_default();
    let default = setting.default.to_string();
    let default = default.trim_start_matches("default: ");
    let Setting { key, scope, since, help, .. } = setting;
    format!("| `{key}` | {value} | {default} | {scope}{marks} | {since}{before} | {help} |\n")
        .replace("on|off", "on or off")
        // Not HTML.
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
            "| `batch` | whole number (N), 1 to 65536 | 128 | result | 1 | Samples per env and batch; with \
             --data-parallel those of all ranks together. |"
        );
        assert!(of("steps").contains("without learning"), "{}", of("steps"));
        assert!(of("threads").contains("| process, resume |"), "{}", of("threads"));
        assert!(of("min_contribution").contains("| 0.5, quick 0, full 1 |"));
        assert!(of("run_dir").contains(r"| when absent: runs/\<time>-\<name> |"));
    }
}
