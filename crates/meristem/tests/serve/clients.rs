//! Hostile, slow and remote clients: paths, requests, streams, tokens, proxies.

use std::fs;

use super::*;

const EVIL: &str = "<script>alert(1)</script><img src=x onerror=alert(2)>";

#[test]
fn paths_stay_in_the_folder_and_text_of_a_run_is_escaped() {
    let m = Meristem::new();
    trained(&m, "a");
    let secret = "controller = \"secret-of-the-house\"";
    for outside in ["outside", "runs/links"] {
        copy(&m.path("runs/a"), &m.path(outside));
    }
    fs::write(m.path("outside/config.toml"), secret).unwrap();
    // Links to targets outside the served folder, and one to a target inside.
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
fn huge_malformed_and_slow_requests_do_not_affect_others() {
    let m = Meristem::new();
    fs::create_dir(m.path("runs")).unwrap();
    let server = serve(&m, "runs");
    // Half a request from each of 600 clients, more than there are places, all open at once.
    let mut slow: Vec<TcpStream> = (0..600).map(|_| server.connect()).collect();
    for stream in &mut slow {
        // The first connections have lost their places.
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
    // A client that sends an unexpected body.
    let posted = server.send(format!("{get}Content-Length: 1000000000\r\n\r\n{long}").as_bytes());
    assert_eq!(posted.status, 200, "{}", posted.head);
    // Slow clients are disconnected after the time limit.
    for stream in [0, 599].map(|number| &slow[number]) {
        let (mut stream, mut rest) = (stream, String::new());
        let _ = stream.read_to_string(&mut rest);
        assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 408"), "{rest}");
    }
    assert!(server.page("/").contains("There are no runs"));
}

#[test]
fn live_streams_have_separate_places() {
    let m = Meristem::new();
    fs::create_dir(m.path("runs")).unwrap();
    // Half of the places are for one address, unless it is that of a proxy.
    for (flags, base, places) in [("", "", 128), ("--base-path /lab", "/lab", 256)] {
        let server = serve(&m, &format!("runs {flags}"));
        live_streams_of_an_address(&server, base, places);
    }
}

/// Asserts that one address can open `places` live streams, and pages beside them.
fn live_streams_of_an_address(server: &Server, base: &str, places: usize) {
    let open = || {
        let mut stream = server.connect();
        write!(stream, "GET {base}/live/ HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut lines = BufReader::new(stream);
        let mut first = String::new();
        lines.read_line(&mut first).unwrap();
        (lines, first)
    };
    let mut streams = vec![];
    let refused = loop {
        let (stream, first) = open();
        if !first.starts_with("HTTP/1.1 200") {
            break first;
        }
        streams.push(stream);
    };
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert_eq!(streams.len(), places);
    assert!(server.page(&format!("{base}/")).contains("There are no runs"));
    streams.clear();
    wait_for("a place for a stream", || open().1.starts_with("HTTP/1.1 200"));
}

#[test]
fn with_a_base_path_all_addresses_begin_with_it() {
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

/// Browsers treat a backslash as a slash, and the text after two slashes as a host name.
#[test]
fn a_redirect_with_a_token_stays_on_this_server() {
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
fn other_addresses_require_a_token_and_a_used_port_is_an_error() {
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
    m.fails("serve runs --bind 192.0.2.1", 2, &["192.0.2.1 is not an address of this machine"]);
    m.fails("serve runs --bind here", 2, &["invalid value 'here'"]);
}
