//! `meristem serve`: a real server on real run folders, with sound, broken and hostile clients.
//!
//! A program of its own, because only builds with the feature have a server.
#![allow(clippy::unwrap_used, reason = "a test may panic, its helpers too")]
#![cfg(unix)]

#[path = "all/common/mod.rs"]
mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use common::Meristem;
use common::process::{Process, wait_for};
use common::runs::without_checksums;
use serde_json::Value;

const EVIL: &str = "<script>alert(1)</script><img src=x onerror=alert(2)>";

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
        // The server may refuse before all is sent.
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

    /// A page that is there.
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

    /// Reads events of a view until one of them has all the words.
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

/// Trains `runs/NAME`, in whose slot r0c1 a module is planted.
fn trained(m: &Meristem, name: &str) {
    let script = r#"{"step": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_light"}"#;
    fs::write(m.path("grow.jsonl"), script).unwrap();
    m.ok(&format!(
        "train --host minimal --envs 2 --steps 6 --max-batches 4 --batch 32 \
         --controller fixed:grow.jsonl --quiet --run-dir runs/{name}"
    ));
}

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

#[test]
fn finished_runs_have_pages_and_json() {
    let m = Meristem::new();
    trained(&m, "a");
    trained(&m, "b");
    fs::create_dir(m.path("runs/deep")).unwrap();
    fs::rename(m.path("runs/b"), m.path("runs/deep/b%20 ü")).unwrap();
    let before = files(&m.path("runs"));
    let server = serve(&m, "");
    assert_eq!(server.url, format!("http://127.0.0.1:{}/", server.port));
    let list = server.page("/");
    for words in [
        "Runs, the newest first",
        "href=\"/run/a\"",
        "complete",
        "action=\"/compare\"",
        "href=\"/run/deep/b%2520%20%C3%BC\"",
        "deep/b%20 ü",
        "6/6",
    ] {
        assert!(list.contains(words), "{words}: {list}");
    }
    for path in ["/run/a", "/run/deep/b%2520%20%C3%BC"] {
        let page = server.page(path);
        for words in [
            "complete",
            "Contributions of modules",
            "Stages over steps",
            "Network of env 1",
            "<polyline",
            "class=\"state complete\"",
            "conv_light",
            "<section id=\"env-0\" data-hash=\"",
        ] {
            assert!(page.contains(words), "{path}: {words}: {page}");
        }
        assert!(!page.contains(" style="), "the policy forbids styles in elements");
        assert_eq!(page.matches("<script").count(), 1, "only that of the server");
    }
    for query in ["run=a&run=deep%2Fb%2520+%C3%BC", "run=deep/b%2520%20%C3%BC&run=a"] {
        let page = server.page(&format!("/compare?{query}"));
        assert!(
            page.contains("Comparison of 2 runs") && page.contains("All settings are"),
            "{page}"
        );
    }
    let answer = server.get("/run/a");
    for words in [
        "content-security-policy: default-src 'none'; script-src 'self'",
        "nosniff",
        "content-type: text/html; charset=utf-8",
        "referrer-policy: no-referrer",
    ] {
        assert!(answer.head.contains(words), "{words}: {}", answer.head);
    }
    assert!(!answer.head.contains("unsafe-inline"), "{}", answer.head);
    let head = server.request("HEAD /run/a", "");
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    for line in ["POST /", "PUT /run/a", "DELETE /run/a", "POST /api/"] {
        assert_eq!(server.request(line, "").status, 405, "{line}");
    }
    let page = fs::read_to_string("../../docs/runs.md").unwrap();
    for path in ["/api/", "/api/run/a", "/api/compare?run=a&run=deep/b%2520%20%C3%BC"] {
        let value = server.json(path);
        for key in value.as_object().unwrap().keys() {
            assert!(page.contains(&format!("`{key}`")), "docs/runs.md: {path}: `{key}` is missing");
        }
    }
    let value = server.json("/api/run/a");
    assert_eq!(value["overview"]["state"], "complete");
    assert_eq!(value["envs"]["1"]["control_accuracy"].as_array().unwrap().len(), 6, "{value}");
    assert_eq!(value["envs"]["0"]["slots"][0]["slot"], "r0c1", "{value}");
    assert_eq!(server.json("/api/")["runs"].as_array().unwrap().len(), 2);
    assert_eq!(files(&m.path("runs")), before, "something was written");
}

#[test]
fn a_run_is_followed_until_it_is_removed_and_ctrl_c_ends_the_server_at_once() {
    let m = Meristem::new();
    let long = "train --host minimal --envs 2 --steps 100000 --max-batches 2 --batch 8 \
                --controller none --control-split 0.1 --quiet --run-dir runs/long";
    let mut run = Process::start(m.command().args(long.split_whitespace()));
    wait_for("steps", || {
        let events = fs::read_to_string(m.path("runs/long/events.jsonl"));
        events.is_ok_and(|text| text.contains("step_completed"))
    });
    let mut server = serve(&m, "runs");
    let first = server.until("/run/long", &["\"ids\"", "running", "<polyline"]);
    let steps = |line: &str| line.split(", step ").nth(1).unwrap()[..1].to_string();
    assert!(steps(&first).parse::<u32>().is_ok());
    server.until("/", &["running", "/run/long"]);
    // A later event has only what changed: the settings do not.
    let mut stream = server.connect();
    write!(stream, "GET /live/run/long HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let events = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let data: Vec<String> = events.filter(|line| line.contains("\"ids\"")).take(2).collect();
    assert!(data[0].contains("\"id\":\"settings\""), "{}", data[0]);
    assert!(!data[1].contains("\"id\":\"settings\""), "{}", data[1]);
    assert!(data[1].contains("\"id\":\"curves\""), "{}", data[1]);
    run.kill().unwrap();
    run.wait().unwrap();
    server.until("/run/long", &["state killed"]);
    fs::remove_dir_all(m.path("runs/long")).unwrap();
    // The stream that was open before the removal is still followed.
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("the folder of the run was removed")));
    wait_for("the list without it", || server.get("/run/long").status == 404);
    // The stream is still open.
    let id = server.process.id().to_string();
    let asked = std::time::Instant::now();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    assert!(server.process.wait().unwrap().success());
    // Far less than a sign of life on a stream; a busy machine takes its time, too.
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
}

#[test]
fn no_path_leads_out_and_no_text_of_a_run_is_executed() {
    let m = Meristem::new();
    trained(&m, "a");
    let secret = "controller = \"secret-of-the-house\"";
    for outside in ["outside", "runs/links"] {
        copy(&m.path("runs/a"), &m.path(outside));
    }
    fs::write(m.path("outside/config.toml"), secret).unwrap();
    // Folders and files that are links out of the served folder, and one that stays inside.
    symlink(m.path("outside"), m.path("runs/folder")).unwrap();
    for name in ["config.toml", "events.jsonl"] {
        let run = m.path(&format!("runs/file-{name}"));
        copy(&m.path("runs/a"), &run);
        fs::remove_file(run.join(name)).unwrap();
        symlink(m.path("outside").join(name), run.join(name)).unwrap();
    }
    fs::remove_file(m.path("runs/links/events.jsonl")).unwrap();
    symlink(m.path("runs/a/events.jsonl"), m.path("runs/links/events.jsonl")).unwrap();
    let evil = m.path("runs").join("<img src=x onerror=alert(3)>");
    copy(&m.path("runs/a"), &evil);
    for name in ["config.toml", "events.jsonl"] {
        let text = fs::read_to_string(evil.join(name)).unwrap();
        let text = text.replace("r0c1", EVIL).replace("conv_light", EVIL).replace("minimal", EVIL);
        fs::write(evil.join(name), text).unwrap();
    }
    let before = files(m.folder.path());
    let server = serve(&m, "runs");
    let list = server.page("/");
    assert!(list.contains("a link in it leads out of the served folder"), "{list}");
    assert!(list.contains("/run/links") && !list.contains("/run/file-"), "{list}");
    let named = "/run/%3Cimg%20src%3Dx%20onerror%3Dalert%283%29%3E";
    for path in ["/", named, &format!("/compare?run=a&run={}", &named[5..])] {
        let page = server.page(path);
        assert!(page.contains("&lt;img src=x onerror=alert"), "{path}: {page}");
        assert!(!page.contains("<img") && !page.contains("<script>"), "{path}: {page}");
        assert!(!page.contains("secret-of-the-house"), "{path}");
    }
    let event = server.until(named, &["\"ids\""]);
    assert!(!event.contains("<img") && !event.contains("<script"), "{event}");
    for path in [
        "/run/folder",
        "/run/file-config.toml",
        "/run/file-events.jsonl",
        "/run/../outside",
        "/run/..%2foutside",
        "/run/%2e%2e/outside",
        "/run/%2e%2e%2foutside",
        "/run/a/../../outside",
        "/run/a/..",
        "/run/a%00",
        "/run/%ff%fe",
        "/run//etc",
        "/run/%2fetc",
        "/run/a/config.toml",
        "/run/.",
        "/run/",
        "/api/run/..%2foutside",
        "/live/run/..%2foutside",
        "/live/../outside",
        "/config.toml",
        "//etc/passwd",
        "/compare",
        "/compare?run=a",
        "/compare?run=a&run=..%2foutside",
        "/compare?run=a&run=a",
        &format!("/compare?{}", "run=a&".repeat(500)),
    ] {
        for kind in ["", "/api"] {
            let answer = server.get(&format!("{kind}{path}"));
            assert_eq!(answer.status, 404, "{path}: {}", answer.body);
            assert!(!answer.body.contains("secret-of-the-house"), "{path}");
        }
    }
    assert_eq!(files(m.folder.path()), before, "something was written");
}

#[test]
fn huge_malformed_and_slow_requests_harm_nobody_else() {
    let m = Meristem::new();
    fs::create_dir(m.path("runs")).unwrap();
    let server = serve(&m, "runs");
    // Half a request from each of 600 clients, more than there are places, all open at once.
    let mut slow: Vec<TcpStream> = (0..600).map(|_| server.connect()).collect();
    for stream in &mut slow {
        // The first ones have lost their places by now.
        let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: local");
    }
    assert!(server.page("/").contains("There are no runs in this folder"));
    let long = "x".repeat(100_000);
    let many = "A: b\r\n".repeat(1000);
    let get = "GET / HTTP/1.1\r\nHost: localhost\r\n";
    for (bytes, status) in [
        (format!("GET /{long} HTTP/1.1\r\nHost: localhost\r\n\r\n"), vec![414, 431]),
        (format!("{get}A: {long}\r\n\r\n"), vec![431]),
        (format!("{get}{many}\r\n"), vec![431]),
        ("\u{0}\u{1}\u{2}\r\n\r\n".into(), vec![400]),
        ("GET\r\n\r\n".into(), vec![400]),
        ("GET / HTTP/9.9\r\n\r\n".into(), vec![400]),
        ("GET \u{0} HTTP/1.1\r\nHost: localhost\r\n\r\n".into(), vec![400]),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n".into(), vec![400]),
        ("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n".into(), vec![421]),
        ("GET / HTTP/1.1\r\n\r\n".into(), vec![421]),
    ] {
        let closed = bytes.replacen("\r\n", "\r\nConnection: close\r\n", 1);
        let answer = server.send(closed.as_bytes());
        let short = &bytes[..bytes.len().min(60)];
        assert!(status.contains(&answer.status), "{short:?}: {}", answer.head);
    }
    // A client that sends a body that nobody wants.
    let posted = server.send(format!("{get}Content-Length: 1000000000\r\n\r\n{long}").as_bytes());
    assert_eq!(posted.status, 200, "{}", posted.head);
    // Slow clients are sent away in the end.
    for stream in [0, 599].map(|number| &slow[number]) {
        let (mut stream, mut rest) = (stream, String::new());
        let _ = stream.read_to_string(&mut rest);
        assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 408"), "{rest}");
    }
    assert!(server.page("/").contains("There are no runs"));
}

#[test]
fn live_streams_have_places_of_their_own() {
    let m = Meristem::new();
    fs::create_dir(m.path("runs")).unwrap();
    let server = serve(&m, "runs");
    let open = || {
        let mut stream = server.connect();
        write!(stream, "GET /live/ HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut lines = BufReader::new(stream);
        let mut first = String::new();
        lines.read_line(&mut first).unwrap();
        (lines, first)
    };
    let mut streams = vec![];
    let refused = loop {
        let (stream, first) = open();
        match first.starts_with("HTTP/1.1 200") {
            true => streams.push(stream),
            false => break first,
        }
    };
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert_eq!(streams.len(), 128);
    assert!(server.page("/").contains("There are no runs"));
    streams.clear();
    wait_for("a place for a stream", || open().1.starts_with("HTTP/1.1 200"));
}

/// A file of 300 GB that takes no room on the disk, with no end of a line.
#[test]
fn events_without_an_end_stop_nobody() {
    let m = Meristem::new();
    trained(&m, "a");
    for name in ["b", "c"] {
        copy(&m.path("runs/a"), &m.path(&format!("runs/{name}")));
        let path = m.path(&format!("runs/{name}/events.jsonl"));
        let events = fs::OpenOptions::new().write(true).open(path).unwrap();
        events.set_len(300 << 30).unwrap();
    }
    let server = serve(&m, "runs");
    for name in ["b", "c"] {
        // Clients that leave at once.
        for _ in 0..20 {
            let mut stream = server.connect();
            write!(stream, "GET /run/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        }
    }
    assert!(server.page("/run/a").contains("complete"));
    for name in ["b", "c"] {
        let path = format!("/run/{name}");
        let event = server.until(&path, &["the rest from byte", "was not read"]);
        assert!(event.contains("1 round of 6 steps"), "the events before it are shown: {event}");
    }
    for command in ["runs compare runs/a runs/b", "export csv runs/b --out b.csv"] {
        let said = m.ok(command);
        let said = said.stdout + &said.stderr;
        assert!(said.contains("was not read, because damaged lines take 64 MiB"), "{said}");
    }
    m.ok("runs");
}

#[test]
fn a_run_whose_name_is_not_utf_8_has_a_page_and_hides_no_other() {
    use std::os::unix::ffi::OsStrExt;
    let m = Meristem::new();
    trained(&m, "a");
    copy(&m.path("runs/a"), &m.path("runs").join(std::ffi::OsStr::from_bytes(b"caf\xe9")));
    let server = serve(&m, "runs");
    let list = server.page("/");
    for words in ["href=\"/run/a\"", "href=\"/run/caf%E9\"", "name=\"encoded\" value=\"caf%E9\""] {
        assert!(list.contains(words), "{words}: {list}");
    }
    assert!(server.page("/run/caf%E9").contains("state complete"));
    server.until("/run/caf%E9", &["state complete"]);
    assert!(server.page("/compare?run=a&encoded=caf%25E9").contains("Comparison of 2 runs"));
    let runs = server.json("/api/")["runs"].clone();
    let odd = runs.as_array().unwrap().iter().find(|run| run["name"] == "caf%E9").unwrap();
    assert_eq!((&odd["path_is_lossy"], &odd["run"]), (&true.into(), &"runs/caf\u{fffd}".into()));
    assert_eq!(server.json("/api/run/caf%E9")["overview"]["path_is_lossy"], true);
    assert_eq!(server.json("/api/run/a")["overview"]["path_is_lossy"], Value::Null);
}

#[test]
fn behind_a_proxy_all_addresses_begin_with_its_path() {
    let m = Meristem::new();
    trained(&m, "a");
    let server = serve(&m, "runs --token --base-path /lab/runs/");
    let token = server.url.split("/lab/runs/?token=").nth(1).unwrap().to_string();
    let entered = server.get(&format!("/lab/runs/run/a?token={token}"));
    assert_eq!(entered.status, 303);
    assert!(entered.head.contains("location: /lab/runs/run/a\r\n"), "{}", entered.head);
    assert!(entered.head.contains("path=/lab/runs;"), "{}", entered.head);
    let bearer = format!("Authorization: bearer {token}\r\n");
    let get = |path: &str| server.request(&format!("GET {path}"), &bearer);
    for path in ["/lab/runs", "/lab/runs/", "/lab/runs/run/a", "/lab/runs/run/none"] {
        let page = get(path).body;
        let of = |kind: &'static str| page.split(kind).skip(1).filter(|text| text.starts_with('/'));
        let links = ["href=\"", "src=\"", "action=\""].into_iter().flat_map(of);
        let links: Vec<&str> = links.filter_map(|text| text.split('"').next()).collect();
        assert!(links.len() >= 3, "{path}: {page}");
        assert!(links.iter().all(|link| link.starts_with("/lab/runs/")), "{path}: {links:?}");
    }
    for path in ["/lab/runs/style.css", "/lab/runs/live.js", "/lab/runs/api/run/a"] {
        assert_eq!(get(path).status, 200, "{path}");
    }
    for path in ["/", "/run/a", "/style.css", "/lab/run/a", "/lab/runsa/"] {
        let answer = get(path);
        assert_eq!(answer.status, 404, "{path}");
        assert!(answer.body.contains("this server is at /lab/runs/"), "{}", answer.body);
    }
    m.fails("serve runs --base-path //evil.example", 2, &["invalid value '//evil.example'"]);
}

/// A browser takes a backslash for a slash, and what follows two for the name of a host.
#[test]
fn a_right_token_leads_to_no_other_server() {
    let m = Meristem::new();
    fs::create_dir(m.path("runs")).unwrap();
    let server = serve(&m, "runs --token");
    let token = server.url.split("?token=").nth(1).unwrap().to_string();
    for path in ["/\\evil.example/", "//evil.example/", "/\\/evil.example", "///evil.example"] {
        let answer = server.get(&format!("{path}?token={token}"));
        assert_eq!(answer.status, 303, "{path}: {}", answer.head);
        assert!(answer.head.contains("location: /\r\n"), "{path}: {}", answer.head);
    }
}

#[test]
fn damaged_half_written_and_gigantic_runs_have_pages() {
    let m = Meristem::new();
    trained(&m, "a");
    let a = m.path("runs/a");
    copy(&a, &m.path("runs/torn"));
    let events = fs::read(a.join("events.jsonl")).unwrap();
    fs::write(m.path("runs/torn/events.jsonl"), &events[..events.len() / 2]).unwrap();
    copy(&a, &m.path("runs/zeros"));
    fs::write(m.path("runs/zeros/events.jsonl"), [0; 5000]).unwrap();
    fs::write(m.path("runs/zeros/summary.json"), "{\"v\": 1").unwrap();
    fs::write(m.path("runs/zeros/config.toml"), "= =").unwrap();
    fs::create_dir_all(m.path("runs/foreign")).unwrap();
    fs::write(m.path("runs/foreign/events.jsonl"), "hello\n\u{1b}[31m\n").unwrap();
    // Many times what is read at once.
    copy(&a, &m.path("runs/large"));
    let events = fs::read_to_string(a.join("events.jsonl")).unwrap();
    fs::write(m.path("runs/large/events.jsonl"), without_checksums(&events)).unwrap();
    let line = "{\"v\":1,\"seq\":9,\"seconds\":1,\"event\":\"comet_seen\",\"tail\":\"TAIL\"}\n";
    let line = line.replace("TAIL", &"x".repeat(1000)).repeat(1000);
    let mut large =
        fs::OpenOptions::new().append(true).open(m.path("runs/large/events.jsonl")).unwrap();
    (0..32).for_each(|_| large.write_all(line.as_bytes()).unwrap());
    let server = serve(&m, "runs");
    let list = server.page("/");
    for words in ["torn", "zeros", "foreign", "large", "summary.json: EOF"] {
        assert!(list.contains(words), "{words}: {list}");
    }
    assert!(server.page("/run/torn").contains("state killed"));
    assert!(server.page("/run/zeros").contains("summary.json: EOF while parsing"));
    assert!(server.page("/run/foreign").contains("lines of events.jsonl left out: 2 damaged"));
    server.until("/run/large", &["left out: 32000 of kinds that this version does not know"]);
    wait_for("the end of the events", || server.json("/api/run/large")["reading"] == false);
}

#[test]
fn other_addresses_need_a_token_and_a_port_is_taken_once() {
    let m = Meristem::new();
    trained(&m, "a");
    for arguments in ["runs --bind 0.0.0.0", "runs/a --token"] {
        let server = serve(&m, arguments);
        let token = server.url.split("?token=").nth(1).unwrap().to_string();
        assert_eq!(token.len(), 64, "{}", server.url);
        for path in ["/", "/api/", "/live/", "/live.js", "/?token=", "/?token=0"] {
            let answer = server.get(path);
            assert_eq!(answer.status, 401, "{arguments}: {path}");
            assert!(answer.body.contains("open the URL that"), "{}", answer.body);
        }
        let bearer = format!("Authorization: Bearer {token}\r\n");
        assert_eq!(server.request("GET /", &bearer).status, 200);
        let entered = server.get(&format!("/?token={token}"));
        assert_eq!(entered.status, 303);
        assert!(entered.head.contains("location: /\r\n"), "{}", entered.head);
        let cookie = entered.head.split("set-cookie: ").nth(1).unwrap();
        assert!(cookie.contains("httponly; samesite=strict"), "{cookie}");
        let cookie = format!("Cookie: {}\r\n", cookie.split(';').next().unwrap());
        assert_eq!(server.request("GET /", &cookie).status, 200);
    }
    let server = serve(&m, "runs/a");
    assert!(server.page("/").contains("href=\"/run/\""), "the folder itself is the run");
    assert!(server.page("/run/").contains("complete"));
    let port = server.port;
    m.fails(
        &format!("serve --port {port}"),
        1,
        &[&format!("port {port} of 127.0.0.1 is in use by another program"), "--port 0"],
    );
    m.fails("serve nowhere", 1, &["cannot read nowhere: there is no such folder"]);
    m.fails("serve runs --bind 192.0.2.1", 2, &["192.0.2.1 is no address of this machine"]);
    m.fails("serve runs --bind here", 2, &["invalid value 'here'"]);
}
