//! `meristem serve`: a real server on real run folders, with sound, broken and hostile clients.
//!
//! A separate test program, because only builds with the feature have a server.
#![allow(clippy::unwrap_used, reason = "a test may panic, its helpers too")]
#![cfg(unix)]

mod clients;
#[path = "../all/common/mod.rs"]
mod common;
mod pages;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use common::Meristem;
use common::process::{Process, wait_for};
use common::runs::without_checksums;

/// A server and the first line that it printed.
struct Server {
    process: Process,
    url: String,
    port: u16,
}

/// Serves a folder on any free port.
fn serve(m: &Meristem, arguments: &str) -> Server {
    let mut command = m.command();
    command.arg("serve").args(arguments.split_whitespace()).args(["--port", "0"]);
    let mut process = Process::start(command.stdout(Stdio::piped()));
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.trim().rsplit(' ').next().unwrap().to_string();
    let port = url.split("://").nth(1).unwrap().rsplit_once(':').unwrap().1;
    let port = port.split('/').next().unwrap().parse().unwrap();
    Server { process, url, port }
}

/// An answer of the server.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Server {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends bytes and reads the answer to its end.
    fn send(&self, bytes: &[u8]) -> Answer {
        let mut stream = self.connect();
        // The server may respond before all is sent.
        let _ = stream.write_all(bytes);
        let mut text = vec![];
        let _ = stream.read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        Answer { status, head: head.to_lowercase(), body: body.into() }
    }

    fn request(&self, line: &str, headers: &str) -> Answer {
        self.send(
            format!("{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n")
                .as_bytes(),
        )
    }

    fn get(&self, path: &str) -> Answer {
        self.request(&format!("GET {path}"), "")
    }

    /// Requests a page, which must exist.
    fn page(&self, path: &str) -> String {
        let answer = self.get(path);
        assert_eq!(answer.status, 200, "{path}: {}\n{}", answer.head, answer.body);
        answer.body
    }

    fn json(&self, path: &str) -> Value {
        let text = self.page(path);
        // Chunked answers begin with a length.
        let from = text.find('{').unwrap();
        serde_json::from_str(&text[from..=text.rfind('}').unwrap()]).unwrap()
    }

    /// Reads events of a view until one of them has all of `words`.
    fn until(&self, path: &str, words: &[&str]) -> String {
        let mut stream = self.connect();
        write!(stream, "GET /live{path} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut lines = BufReader::new(stream);
        let started = std::time::Instant::now();
        loop {
            assert!(started.elapsed() < Duration::from_secs(120), "{words:?}");
            let mut line = String::new();
            assert!(lines.read_line(&mut line).unwrap() > 0, "the stream ended");
            if words.iter().all(|word| line.contains(word)) {
                return line;
            }
        }
    }
}

/// Trains `runs/NAME`, with a module in slot r0c1.
fn trained(m: &Meristem, name: &str) {
    let script = r#"{"step": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_light"}"#;
    fs::write(m.path("grow.jsonl"), script).unwrap();
    m.ok(&format!(
        "train --host minimal --envs 2 --steps 6 --max-batches 4 --batch 32 \
         --controller fixed:grow.jsonl --quiet --run-dir runs/{name}"
    ));
}

/// Copies the settings and events of a run.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.join("weights")).unwrap();
    for name in ["config.toml", "events.jsonl"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
}

/// Names, sizes and times of all files below a folder.
fn files(folder: &Path) -> Vec<(PathBuf, u64, SystemTime)> {
    let mut found = vec![];
    let mut open = vec![folder.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let there = path.symlink_metadata().unwrap();
            if there.is_dir() {
                open.push(path.clone());
            }
            found.push((path, there.len(), there.modified().unwrap()));
        }
    }
    found.sort();
    found
}
