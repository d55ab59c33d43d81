//! Runs of the meristem binary.

#![allow(clippy::unwrap_used, reason = "a test may panic, its helpers too")]
#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod process;
pub(crate) mod runs;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use self::process::{Process, output};

/// The binary, with a separate working directory.
pub(crate) struct Meristem {
    pub(crate) folder: tempfile::TempDir,
}

/// Output and exit code of a command.
pub(crate) struct CommandOutput {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Meristem {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_meristem"));
        command.current_dir(self.folder.path());
        if !is_sanitized() {
            command.env_remove("MERISTEM_SANITIZE");
        }
        command
    }

    /// Runs a command; arguments are separated by spaces.
    pub(crate) fn run(&self, arguments: &str) -> CommandOutput {
        command_output(output(self.command().args(arguments.split_whitespace())))
    }

    /// Runs a command that must succeed.
    pub(crate) fn ok(&self, arguments: &str) -> CommandOutput {
        let said = self.run(arguments);
        assert_eq!(said.code, Some(0), "{arguments}\n{}{}", said.stdout, said.stderr);
        said
    }

    /// Runs a command that must fail with the exit code `code`, and with all of `words` on stderr.
    pub(crate) fn fails(&self, arguments: &str, code: i32, words: &[&str]) -> CommandOutput {
        let said = self.run(arguments);
        let context = format!("{arguments}\n{}{}", said.stdout, said.stderr);
        assert_eq!(said.code, Some(code), "{context}");
        let first = said.stderr.lines().find(|line| !line.starts_with("note: "));
        assert!(first.is_some_and(|line| line.starts_with("error: ")), "{context}");
        assert!(!said.stderr.contains("panicked"), "{context}");
        // Messages are wrapped, so a phrase may be broken over two lines.
        let flat = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        for word in words {
            assert!(flat.contains(word), "`{word}` is not in:\n{context}");
        }
        said
    }

    /// A JSON file, without the checksum at the end of a summary or a study.
    pub(crate) fn json(&self, name: &str) -> Value {
        let value = serde_json::from_str(&std::fs::read_to_string(self.path(name)).unwrap());
        let mut value: Value = value.unwrap();
        let file = name.rsplit('/').next().unwrap();
        if ["summary.json", "study.json"].contains(&file) {
            assert_documented(&format!("## {file}"), &value);
            value.as_object_mut().unwrap().remove("crc32");
        }
        value
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    /// The events of a run. Every line must be a complete JSON object.
    pub(crate) fn events(&self, run: &str) -> Vec<Value> {
        events_in(&self.path(run).join("events.jsonl"))
    }
}

/// Whether the calling test's runs keep `MERISTEM_SANITIZE`. The other modules test texts, files,
/// signals and terminals, around runs whose launches these modules check.
fn is_sanitized() -> bool {
    const MODULES: &[&str] = &[
        "blueprints",
        "check",
        "devices",
        "learning",
        "parts",
        "resume",
        "sweeps",
        "train",
        "twin",
    ];
    let thread = std::thread::current();
    let module = thread.name().and_then(|test| test.split("::").next());
    module.is_none_or(|module| MODULES.contains(&module))
}

pub(crate) fn command_output(output: Output) -> CommandOutput {
    CommandOutput {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

pub(crate) fn events_in(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'), "the last line is not whole");
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for event in &events {
        assert_documented(&format!("### {}", event["event"].as_str().unwrap()), event);
    }
    events
}

/// Asserts that the documentation of a run's files has a section `title`, with all keys of `value`.
pub(crate) fn assert_documented(title: &str, value: &Value) {
    const PAGE: &str = include_str!("../../../../../docs/run-folder.md");
    const OF_ALL_EVENTS: &[&str] =
        &["v", "seq", "seconds", "event", "env", "round", "step", "crc32"];
    let mut lines = PAGE.lines().skip_while(|line| *line != title);
    assert!(lines.next().is_some(), "docs/run-folder.md has no section `{title}`");
    let section: Vec<&str> = lines.take_while(|line| !line.starts_with("##")).collect();
    let section = section.join("\n");
    let mut left = vec![value];
    while let Some(value) = left.pop() {
        if let Value::Array(items) = value {
            left.extend(items);
        }
        for (key, value) in value.as_object().into_iter().flatten() {
            // The documentation has the keys of runs that classify.
            let named = key.replace("r2", "accuracy").replace("f1", "accuracy");
            let known =
                OF_ALL_EVENTS.contains(&key.as_str()) || section.contains(&format!("`{named}`"));
            assert!(known, "docs/run-folder.md, `{title}`: `{key}` is missing");
            match key.as_str() {
                // The keys are names of owners.
                "owners" => left.extend(value.as_object().and_then(|all| all.values().next())),
                // The growth bench has a method of this name.
                "policy" if title != "## growth.json" => {
                    assert_documented("### policy_updated", value);
                }
                // Documented under the runs of a comparison.
                "dataset" | "training" => assert_documented("## summary.json", value),
                _ => left.push(value),
            }
        }
    }
}

/// A number of an event or a summary.
pub(crate) fn figure(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// The events of one kind.
pub(crate) fn of_kind<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["event"] == kind).collect()
}

/// A small run of two tiny hosts, with three batches a step.
pub(crate) const TINY: &str =
    "--host minimal --envs 2 --steps 3 --max-batches 3 --batch 32 --controller none";

/// Runs a command line on a new terminal, with a size in the syntax of `stty`, and the input
/// as its keyboard.
pub(crate) fn on_a_terminal(m: &Meristem, size: &str, line: &str, keys: Stdio) -> Process {
    let program = env!("CARGO_BIN_EXE_meristem");
    let line = format!("stty {size}; exec {program} {line}");
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    command.current_dir(m.folder.path()).env("TERM", "xterm").stdin(keys);
    Process::start(command.stdout(Stdio::piped()))
}
