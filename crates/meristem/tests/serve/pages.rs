//! Pages of runs: complete, growing, damaged, with odd names.

use std::fs;

use super::*;

#[test]
fn complete_runs_have_pages_and_json() {
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
    let runs = server.json("/api/")["runs"].clone();
    assert_eq!(runs.as_array().unwrap().len(), 2);
    let row = runs.as_array().unwrap().iter().find(|run| run["name"] == "a").unwrap();
    let overview = value["overview"].as_object().unwrap();
    for (key, value) in overview.iter().filter(|(key, _)| *key != "age_seconds") {
        assert_eq!(row[key], *value, "{key}");
    }
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
    // A later event has only changed parts, so not the settings.
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
    // The stream that was opened before the removal is still open.
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("the folder of the run was removed")));
    wait_for("the list without it", || server.get("/run/long").status == 404);
    // The stream is still open.
    let id = server.process.id().to_string();
    let asked = std::time::Instant::now();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    assert!(server.process.wait().unwrap().success());
    // Far less than the interval of keep-alive messages; a busy machine may be slow.
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
}

/// A sparse file of 300 GB without a line end.
#[test]
fn an_endless_line_of_events_does_not_block_the_server() {
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
        // Clients that disconnect at once.
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
fn a_run_whose_name_is_not_utf_8_has_a_separate_page() {
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
    // Many times the size of one read.
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
