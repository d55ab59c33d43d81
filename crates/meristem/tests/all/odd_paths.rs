//! Paths that are not UTF-8, which JSON and TOML cannot represent.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::process::output;
use crate::common::{CommandOutput, Meristem, command_output};

/// A name with a byte that is not UTF-8, and its lossy text.
const NAME: &[u8] = b"caf\xe9";
const TEXT: &str = "caf\u{fffd}";

const SHORT: &str = "train --host minimal --envs 1 --steps 2 --max-batches 2 --batch 8 --quiet";

fn odd(folder: &Path) -> PathBuf {
    folder.join(OsStr::from_bytes(NAME))
}

/// Runs a command whose last argument is a path, in `folder`. It must succeed.
fn ok(m: &Meristem, folder: &Path, arguments: &str, path: Option<&Path>) -> CommandOutput {
    let said = run(m, folder, arguments, path);
    assert_eq!(said.code, Some(0), "{arguments}\n{}{}", said.stdout, said.stderr);
    said
}

fn run(m: &Meristem, folder: &Path, arguments: &str, path: Option<&Path>) -> CommandOutput {
    let last: Option<OsString> = path.map(Into::into);
    let all = arguments.split_whitespace().map(OsString::from).chain(last);
    command_output(output(m.command().current_dir(folder).args(all)))
}

#[test]
fn a_run_in_a_folder_that_is_not_utf_8_is_listed_compared_and_resumed() {
    let m = Meristem::new();
    m.ok(&format!("{SHORT} --run-dir runs/a"));
    m.ok(&format!("{SHORT} --run-dir runs/b"));
    let moved = odd(&m.path("runs"));
    fs::rename(m.path("runs/b"), &moved).unwrap();
    let list: Value = serde_json::from_str(&m.ok("runs --json").stdout).unwrap();
    let runs = list["runs"].as_array().unwrap();
    let of = |name: &str| runs.iter().find(|run| run["run"] == format!("runs/{name}")).unwrap();
    assert_eq!(of(TEXT)["path_is_lossy"], true);
    assert_eq!(of("a")["path_is_lossy"], Value::Null, "only where it is lossy");
    let compared = ok(&m, m.folder.path(), "runs compare --json runs/a", Some(&moved));
    assert!(compared.stdout.contains("\"path_is_lossy\":true"), "{}", compared.stdout);
    let longer = ok(&m, m.folder.path(), "train --quiet --steps 3 --resume", Some(&moved));
    let text = fs::read_to_string(moved.join("summary.json")).unwrap();
    let summary: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(summary["status"], "completed", "{}{text}", longer.stderr);
    assert_eq!((&summary["steps"], &summary["path_is_lossy"]), (&3.into(), &true.into()));
    assert!(summary["run_dir"].as_str().unwrap().ends_with(TEXT), "{text}");
    // Its summary can be read.
    let list: Value = serde_json::from_str(&m.ok("runs --json").stdout).unwrap();
    let problems = list["runs"].as_array().unwrap().iter().map(|run| &run["problem"]);
    assert!(problems.clone().all(Value::is_null), "{list}");
}

#[test]
fn a_study_and_a_working_directory_may_be_not_utf_8() {
    let m = Meristem::new();
    let folder = odd(m.folder.path());
    let study = "control eval --controllers none --seeds 1 --host minimal --envs 1 --steps 1 \
                 --rounds 1 --max-batches 1 --batch 8 --quiet --run-dir";
    ok(&m, m.folder.path(), study, Some(&folder));
    let text = fs::read_to_string(folder.join("study.json")).unwrap();
    assert!(text.contains("\"status\""), "{text}");
    // Run again, it uses the results of the first run.
    ok(&m, m.folder.path(), study, Some(&folder));
    ok(&m, &folder, &format!("{SHORT} --run-dir runs/inside"), None);
    assert!(folder.join("runs/inside/summary.json").exists());
}

/// Settings are written to `config.toml`, so a path that is not UTF-8 is refused.
#[test]
fn a_setting_that_is_not_utf_8_is_refused_before_training() {
    let m = Meristem::new();
    m.ok(&format!("{SHORT} --run-dir runs/a"));
    let folder = odd(m.folder.path());
    fs::create_dir(&folder).unwrap();
    fs::copy(m.path("runs/a/weights/env-0.safetensors"), folder.join("init.safetensors")).unwrap();
    let said = run(&m, &folder, &format!("{SHORT} --run-dir b --init init.safetensors"), None);
    assert_eq!(said.code, Some(2), "{}", said.stderr);
    assert!(said.stderr.contains("a path that is UTF-8"), "{}", said.stderr);
    assert!(!folder.join("b").exists());
}
