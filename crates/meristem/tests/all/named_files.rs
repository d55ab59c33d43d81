//! Files that flags name for reading.

use std::os::unix::fs::symlink;
use std::process::Command;

use crate::common::process::output;
use crate::common::{Meristem, TINY, command_output};

/// Flags of `train` that name a file FILE, by the setting.
const SETTINGS: [(&str, &str); 9] = [
    ("config", "--config FILE"),
    ("data_root", "--dataset arrays --data-root FILE"),
    ("data_root", "--dataset csv --data-root FILE"),
    ("init", "--init FILE"),
    ("start_topology", "--start-topology FILE"),
    ("controller", "--controller fixed:FILE"),
    ("controller", "--controller greedy:FILE"),
    ("blueprints", "--controller random --blueprints standard,FILE"),
    ("policy", "--controller ppo --policy FILE"),
];

/// Settings that name a file or folder to write.
const WRITTEN: [&str; 3] = ["run_dir", "trace", "export"];

/// A pipe would block the reader until somebody writes to it, and some devices have no end.
#[test]
fn pipes_devices_and_folders_are_refused_at_once() {
    let m = Meristem::new();
    assert!(Command::new("mkfifo").arg(m.path("pipe.toml")).status().unwrap().success());
    symlink("pipe.toml", m.path("link.toml")).unwrap();
    symlink("/dev/zero", m.path("zeros.toml")).unwrap();
    std::fs::create_dir(m.path("folder.toml")).unwrap();
    for (setting, flags) in SETTINGS {
        for (file, found) in [
            ("pipe.toml", "a pipe or a device"),
            ("link.toml", "a pipe or a device"),
            ("zeros.toml", "a pipe or a device"),
            ("folder.toml", "a folder"),
        ] {
            let expected = match setting {
                // A folder of files, or of a run.
                "data_root" | "start_topology" if found == "a folder" => continue,
                // Where there is no such file, the format says what it needs.
                "data_root" => "expected".to_string(),
                _ => format!("expected a plain file, got {found}"),
            };
            let run = TINY.replace("--controller none", "");
            let flags = flags.replace("FILE", file);
            let said = m.run(&format!("train {run} {flags} --run-dir run"));
            let told = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(matches!(said.code, Some(1 | 2)), "{flags}: {told}");
            assert!(setting == "data_root" || said.code == Some(2), "{flags}: {told}");
            // A link as the data root is resolved.
            let file = match setting {
                "data_root" => m.path(file).canonicalize().unwrap().display().to_string(),
                _ => file.to_string(),
            };
            assert!(told.contains(&expected) && told.contains(&file), "{flags}: {told}");
            assert!(!m.path("run").exists(), "{flags}");
        }
    }
    let expected = ["expected a plain file, got a pipe or a device", "pipe.toml"];
    for command in [
        "eval --weights pipe.toml",
        "export onnx pipe.toml --out model.onnx",
        "control eval --seeds 1 --controllers none,ppo:pipe.toml",
        "control eval --seeds 1 --controllers none,fixed:pipe.toml",
        "control eval --seeds 1 --controllers none,random --config pipe.toml",
    ] {
        m.fails(command, 2, &expected);
    }
}

/// A setting that names a file occurs above.
#[test]
fn every_setting_that_names_a_file_is_tried() {
    let page = include_str!("../../../../docs/settings.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let names_a_file = |(_, rest): &(&str, &str)| rest.split(" | ").next().is_some_and(is_of_file);
    let named: Vec<&str> = rows.filter(names_a_file).map(|(key, _)| key).collect();
    assert!(named.len() >= 8, "{named:?}");
    for key in named {
        let tried = SETTINGS.iter().any(|(setting, _)| *setting == key);
        assert!(tried || WRITTEN.contains(&key), "{key}");
    }
}

/// Whether the description of a setting's values has a path.
fn is_of_file(kind: &str) -> bool {
    kind.contains("path") || kind.contains("FILE")
}

/// A relative path has no meaning in a folder that was removed.
#[test]
#[cfg(target_os = "linux")]
fn a_relative_path_needs_a_working_directory() {
    let m = Meristem::new();
    let program = env!("CARGO_BIN_EXE_meristem");
    let mut shell = Command::new("sh");
    let line = format!("mkdir gone; cd gone; rmdir ../gone; {program} train --init w.safetensors");
    let run = command_output(output(shell.args(["-c", &line]).current_dir(m.folder.path())));
    let told = run.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(run.code, Some(2), "{told}");
    assert!(told.starts_with("error: `init`: got `w.safetensors` ("), "{told}");
    assert!(
        told.contains("expected a path, in a working directory that exists if it is"),
        "{told}"
    );
}
