//! Every command is run with a full disk and a closed pipe as stdout, on a terminal without cursor
//! movement, and with names that contain control characters. The list is compared with the manual
//! pages, so a new command fails here until it has a row.

#![cfg(target_os = "linux")]

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::{Command, Output, Stdio};

use crate::common::process::Process;
use crate::common::{Meristem, TINY, on_a_terminal};
use crate::policy_training::TINY_POLICY;

/// A command, by the name of its manual page.
struct Row {
    page: &'static str,
    /// A short valid call, with `NEW` for a path that does not exist yet.
    call: &'static str,
    /// Its exit code.
    code: i32,
    /// A call with `NAME` for a hostile name.
    named: &'static str,
    /// Exit codes of the call with a hostile name.
    named_codes: &'static [i32],
}

const fn row(page: &'static str, call: &'static str, code: i32, named: Named) -> Row {
    let Named(named, named_codes) = named;
    Row { page, call, code, named, named_codes }
}

/// A call with a hostile name, and its exit codes.
struct Named(&'static str, &'static [i32]);

const ROWS: &[Row] = &[
    row("meristem", "--help", 0, Named("NAME", &[2])),
    row(
        "meristem-train",
        "train --host minimal --envs 1 --steps 1 --max-batches 1 --batch 8 --run-dir NEW",
        0,
        Named("train --resume runs/NAME", &[0]),
    ),
    row("meristem-sweep", "sweep --resume run", 0, Named("sweep runs/NAME", &[2])),
    row("meristem-sweep-replay", "sweep replay run 0", 2, Named("sweep replay runs/NAME 0", &[2])),
    row("meristem-runs", "runs", 0, Named("runs runs/NAME", &[0])),
    row("meristem-runs-compare", "runs compare run run", 0, {
        Named("runs compare runs/NAME run", &[0])
    }),
    row("meristem-runs-report", "runs report run --out NEW", 0, {
        Named("runs report runs/NAME --out NEW", &[0])
    }),
    row("meristem-runs-verify", "runs verify run", 0, Named("runs verify runs/NAME", &[0])),
    row("meristem-watch", "watch run", 2, Named("watch runs/NAME/none", &[2])),
    row("meristem-serve", "serve none", 2, Named("serve runs/NAME --port 99999", &[2])),
    row("meristem-export", "export --help", 0, Named("export NAME", &[2])),
    row("meristem-export-csv", "export csv run", 0, Named("export csv runs/NAME --out NEW", &[0])),
    row("meristem-export-parquet", "export parquet none --out NEW", 2, {
        Named("export parquet NAME --out NEW", &[2])
    }),
    row("meristem-export-onnx", "export onnx run/weights/env-0.safetensors --out NEW", 0, {
        Named("export onnx runs/NAME/weights/env-0.safetensors --out NEW", &[0])
    }),
    row("meristem-export-tensorboard", "export tensorboard run --out NEW", 0, {
        Named("export tensorboard runs/NAME --out NEW", &[0])
    }),
    row("meristem-eval", "eval --weights run/weights/env-0.safetensors --batch 2000", 0, {
        Named("eval --weights runs/NAME/config.toml", &[1, 2])
    }),
    row("meristem-control", "control --help", 0, Named("control NAME", &[2])),
    row(
        "meristem-control-eval",
        "control eval --controllers none --seeds 1 --host minimal --envs 1 --steps 1 --batch 2000",
        0,
        Named("control eval --config runs/NAME/none.toml", &[2]),
    ),
    row(
        "meristem-control-train-policy",
        "control train-policy policy.toml --run-dir NEW",
        0,
        Named("control train-policy NAME", &[2]),
    ),
    row("meristem-growth", "growth --help", 0, Named("growth NAME", &[2])),
    row(
        "meristem-growth-bench",
        "growth bench --suite quick --tasks spirals --rates 1 --methods none --run-dir NEW",
        0,
        Named("growth bench --suite quick --data-root data/NAME", &[2]),
    ),
    row("meristem-data", "data --help", 0, Named("data NAME", &[2])),
    row("meristem-data-info", "data info --dataset folder --data-root images", 0, {
        Named("data info --dataset folder --data-root data/NAME", &[0])
    }),
    row("meristem-data-verify", "data verify --dataset folder --data-root images", 0, {
        Named("data verify --dataset folder --data-root bad/NAME", &[1])
    }),
    row("meristem-data-import", "data import --from images --to NEW", 0, {
        Named("data import --from bad/NAME --to NEW", &[1, 2])
    }),
    row("meristem-data-plan", "data plan --len 50 --batch 5 --devices cpu --epochs 3", 0, {
        Named("data plan --len 50 --batch 5 --devices NAME", &[2])
    }),
    row("meristem-data-cache", "data cache", 0, Named("data cache NAME", &[2])),
    row("meristem-host", "host --help", 0, Named("host NAME", &[2])),
    row("meristem-host-show", "host show deep --input 3x32x32", 0, {
        Named("host show NAME", &[2])
    }),
    row("meristem-check", "check residency", 0, Named("check NAME", &[2])),
    row("meristem-bench", "bench --help", 0, Named("bench NAME", &[2])),
    row("meristem-bench-host", "bench host --host minimal --envs 1 --batch 8 --seconds 0.01", 0, {
        Named("bench host --host NAME", &[2])
    }),
    row("meristem-bench-comm", "bench comm --max-size 1KiB --density 0.1 --rounds 1", 0, {
        Named("bench comm --comm NAME", &[2])
    }),
    row("meristem-bench-counterfactual", "bench counterfactual --batch 8 --seconds 0.01", 0, {
        Named("bench counterfactual --blueprint NAME", &[2])
    }),
    row("meristem-bench-gather", "bench gather --batch 8 --seconds 0.01", 0, {
        Named("bench gather --device NAME", &[2])
    }),
    row("meristem-completions", "completions bash", 0, Named("completions NAME", &[2])),
    row("meristem-man", "man NEW", 0, Named("man runs/NAME/man", &[0])),
];

/// Names with control characters or shell syntax, that look like flags, or are not UTF-8.
fn nasty() -> Vec<OsString> {
    let long = "x".repeat(200);
    let texts = [
        "\u{1b}[31mred\u{1b}]0;title\u{7}",
        "a\nerror: b\r\u{8}c",
        "a\u{202e}gpj.exe\u{2066}",
        "c1 \u{9b}31m\u{7f}",
        " two  words\t",
        "it's \"quoted\"",
        "$(touch x)`touch y`;&|",
        "-dash",
        "--help me",
        &long,
    ];
    let mut names: Vec<OsString> = texts.iter().map(OsString::from).collect();
    names.push(OsString::from_vec(b"bytes\xff\xfe".into()));
    names
}

/// Runs, images and damaged images, under plain names and under each hostile name.
fn prepared() -> Meristem {
    let m = Meristem::new();
    m.ok(&format!("train {TINY} --run-dir run --quiet"));
    fs::write(m.path("policy.toml"), TINY_POLICY.replace("rounds = 3", "rounds = 1")).unwrap();
    let plain = OsStr::new("a");
    images(&m, OsStr::new("images"), plain);
    fs::create_dir(m.path("runs")).unwrap();
    for name in nasty() {
        let run = m.path("runs").join(&name);
        assert!(
            Command::new("cp").arg("-r").arg(m.path("run")).arg(run).status().unwrap().success()
        );
        images(&m, &[OsStr::new("data/"), &name].iter().copied().collect::<OsString>(), &name);
        let bad: OsString = [OsStr::new("bad/"), &name].iter().copied().collect();
        images(&m, &bad, &name);
        let image = m.path("").join(bad).join("train").join(&name).join(&name);
        fs::write(image.with_added_png(), b"no image").unwrap();
    }
    m
}

/// Paths with the extension of an image.
trait WithPng {
    fn with_added_png(self) -> std::path::PathBuf;
}

impl WithPng for std::path::PathBuf {
    fn with_added_png(self) -> Self {
        let mut name = self.into_os_string();
        name.push(".png");
        name.into()
    }
}

/// Writes a dataset of ten classes, the first named `class`.
fn images(m: &Meristem, folder: &OsStr, class: &OsStr) {
    for split in ["train", "test"] {
        let others = ["b", "c", "d", "e", "f", "g", "h", "i", "j"].map(OsStr::new);
        for (number, class) in [class].into_iter().chain(others).enumerate() {
            let folder = m.path("").join(folder).join(split).join(class);
            fs::create_dir_all(&folder).unwrap();
            let image = image::RgbImage::from_pixel(32, 32, image::Rgb([number as u8 * 20; 3]));
            image.save_with_format(folder.join("1.png"), image::ImageFormat::Png).unwrap();
        }
    }
}

/// Arguments of a call, with the placeholders replaced.
fn arguments(call: &str, new: usize, name: &OsStr) -> Vec<OsString> {
    let argument = |word: &str| {
        let word = word.replace("NEW", &format!("new-{new}.svg"));
        let parts: Vec<&str> = word.split("NAME").collect();
        let parts: Vec<&OsStr> = parts.into_iter().map(OsStr::new).collect();
        parts.join(name)
    };
    call.split_whitespace().map(argument).collect()
}

fn run(m: &Meristem, arguments: &[OsString], stdout: Stdio) -> Output {
    let mut command = m.command();
    command.args(arguments).env("MERISTEM_CACHE", m.path("cache")).stdin(Stdio::null());
    Process::start(command.stdout(stdout).stderr(Stdio::piped())).output()
}

/// Rows of the commands in this build; a command without its feature returns an error.
fn rows() -> impl Iterator<Item = &'static Row> {
    ROWS.iter().filter(|row| match row.page {
        "meristem-serve" => !cfg!(feature = "serve"),
        "meristem-export-parquet" => !cfg!(feature = "parquet"),
        _ => true,
    })
}

/// Checks that text has no control characters.
fn assert_harmless(bytes: &[u8], context: &str) {
    let text = std::str::from_utf8(bytes).unwrap_or_else(|_| panic!("{context}: no text"));
    let steers = |c: char| c.is_control() && c != '\n' || "\u{202e}\u{2066}".contains(c);
    assert!(!text.contains(steers), "{context}: {text:?}");
    assert!(!text.contains("panicked"), "{context}: {text}");
    assert!(!text.contains("\nerror: b"), "{context}: a name has begun a line: {text}");
}

#[test]
fn every_command_has_a_row() {
    let m = Meristem::new();
    m.ok("man pages");
    let page =
        |entry: fs::DirEntry| entry.path().file_stem().unwrap().to_str().unwrap().to_string();
    let pages = fs::read_dir(m.path("pages")).unwrap().map(|entry| page(entry.unwrap()));
    let pages: BTreeSet<String> = pages.collect();
    let rows: BTreeSet<String> = ROWS.iter().map(|row| row.page.to_string()).collect();
    assert_eq!(pages, rows, "each command has a row, in which the walk tries it");
}

#[test]
fn every_command_reports_a_full_disk_and_ignores_a_closed_pipe() {
    let m = prepared();
    for (number, row) in rows().enumerate() {
        let of = |stdout: Stdio, part: usize| {
            let said = run(&m, &arguments(row.call, 3 * number + part, OsStr::new("")), stdout);
            assert_harmless(&said.stderr, row.call);
            (said.status.code(), String::from_utf8(said.stderr).unwrap())
        };
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (code, text) = of(full.into(), 0);
        match row.code {
            0 => {
                let told = text.matches("error: cannot write").count();
                assert_eq!((code, told), (Some(1), 1), "{}: {text}", row.call);
            }
            _ => assert_eq!(code, Some(row.code), "{}: {text}", row.call),
        }
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let (code, text) = of(writer.into(), 1);
        assert_eq!(code, Some(row.code), "{}: {text}", row.call);
        assert!(row.code != 0 || !text.contains("error"), "{}: {text}", row.call);
    }
}

#[test]
fn no_command_draws_on_a_terminal_without_cursor_movement() {
    let m = prepared();
    for (number, row) in rows().enumerate() {
        let call = row.call.replace("NEW", &format!("new-{number}.svg"));
        let size = "rows 24 cols 80; export TERM=dumb";
        let said = on_a_terminal(&m, size, &format!("{call} 2>&1"), Stdio::null()).output();
        let text = String::from_utf8_lossy(&said.stdout).replace("\r\n", "\n");
        assert_eq!(said.status.code(), Some(row.code), "{call}: {text}");
        assert_harmless(text.as_bytes(), &call);
    }
}

#[test]
fn no_name_controls_the_terminal() {
    let m = prepared();
    for (number, row) in rows().enumerate() {
        for (place, name) in nasty().iter().enumerate() {
            let arguments = arguments(row.named, 100 * number + place, name);
            let said = run(&m, &arguments, Stdio::piped());
            let context = format!("{arguments:?}");
            assert_harmless(&said.stdout, &context);
            assert_harmless(&said.stderr, &context);
            let code = said.status.code().unwrap();
            // Names that are flags are parsed as flags, and some commands refuse names that are not
            // UTF-8.
            let is_flag = name.as_bytes().starts_with(b"-") && row.named.contains(" NAME");
            let known = row.named_codes.contains(&code) || is_flag && [0, 2].contains(&code);
            let is_text = name.to_str().is_some();
            let known = known || !is_text && [1, 2].contains(&code);
            assert!(known, "{context}: {code} {}", String::from_utf8_lossy(&said.stderr));
        }
    }
    assert!(!m.path("x").exists() && !m.path("y").exists());
}
