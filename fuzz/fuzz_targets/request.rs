#![no_main]
//! Requests to `meristem serve`: heads, admission, addresses. `TOKEN` in the bytes is the token of
//! the guard.

// The program is not a library, so its files are compiled here, too. They use crates through
// `meristem`.
extern crate self as meristem;
use meristem_train as train;

#[allow(dead_code, reason = "the program uses the rest")]
#[path = "../../crates/meristem/src/commands/serve/address.rs"]
mod address;
#[path = "../../crates/meristem/src/cli/base_path.rs"]
mod base_path;
#[allow(dead_code, reason = "the program uses the rest")]
#[path = "../../crates/meristem/src/commands/serve/connections.rs"]
mod connections;
#[path = "../../crates/meristem/src/commands/serve/guard.rs"]
mod guard;
#[allow(dead_code, reason = "the program uses the rest")]
#[path = "../../crates/meristem/src/commands/serve/places.rs"]
mod places;
#[allow(dead_code, reason = "the program uses the rest")]
#[path = "../../crates/meristem/src/commands/serve/work.rs"]
mod work;
mod cli {
    pub(crate) use crate::base_path::BasePath;
}

use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};

use address::{AnswerForm, Subject};
use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use cli::BasePath;
use guard::{Guard, admit};
use places::Places;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::{Builder, Runtime};

const LOOPBACK: [u8; 4] = [127, 0, 0, 1];

/// A server without runs, below `base`.
struct Server {
    router: Router,
    token: Option<String>,
}

impl Server {
    fn new(base: &str, needs_token: bool) -> Self {
        let address = SocketAddr::from((LOOPBACK, 7070));
        let base: BasePath = base.parse().expect("a base");
        let guard = Guard::new(address, needs_token, &base).expect("random numbers");
        let url = guard.url(address);
        let token = url.split_once("token=").map(|(_, token)| token.to_string());
        let show = move |request: Request| {
            let path = base.below(request.uri().path()).map(AnswerForm::of);
            let query = request.uri().query().unwrap_or("");
            let subject = path.map(|(_, path)| Subject::of(path, query));
            let is_found = subject.is_some_and(|subject| subject.is_ok());
            async move { if is_found { StatusCode::OK } else { StatusCode::NOT_FOUND } }
        };
        let router = Router::new().fallback(show);
        Self { router: router.layer(from_fn_with_state(Arc::new(guard), admit)), token }
    }

    /// Answers to the requests in `bytes`.
    fn answers(&self, bytes: &[u8]) -> Vec<u8> {
        let mut sent = bytes.to_vec();
        let at = bytes.windows(5).position(|window| window == b"TOKEN");
        if let (Some(at), Some(token)) = (at, &self.token) {
            sent.splice(at..at + 5, token.bytes());
        }
        let (mut client, stream) = tokio::io::duplex(1 << 22);
        RUNTIME.block_on(async {
            client.write_all(&sent).await.expect("a stream in memory");
            let permit = Arc::new(Places::default()).enter(LOOPBACK.into()).expect("a place");
            connections::answer(stream, self.router.clone(), permit).await;
            let mut answers = vec![];
            client.read_to_end(&mut answers).await.expect("a stream in memory");
            answers
        })
    }
}

/// A runtime with a paused clock, which jumps to the next timer when there is nothing left to do.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime")
});

/// A server without a token, and a server with a token below a base path.
static SERVERS: LazyLock<[Server; 2]> = LazyLock::new(|| {
    let servers = [Server::new("/", false), Server::new("/runs", true)];
    for (server, request, status) in [
        (&servers[0], "GET /run/a HTTP/1.1\r\nHost: localhost\r\n\r\n", "200"),
        (&servers[1], "GET /runs/ HTTP/1.1\r\nHost: localhost\r\n\r\n", "401"),
        (&servers[1], "GET /runs/?token=TOKEN HTTP/1.1\r\nHost: localhost\r\n\r\n", "303"),
    ] {
        let answer = server.answers(request.as_bytes());
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request}: {answer}");
    }
    servers
});

fn has(answers: &[u8], part: &[u8]) -> bool {
    answers.windows(part.len()).any(|window| window == part)
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    for server in &*SERVERS {
        let answers = server.answers(bytes);
        // A browser would leave this server.
        assert!(!has(&answers, b"location: //") && !has(&answers, b"location: /\\"));
        if server.token.is_some() && !has(bytes, b"TOKEN") {
            assert!(!has(&answers, b"HTTP/1.1 200"), "answered without the token");
        }
    }
});
