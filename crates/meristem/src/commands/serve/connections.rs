//! Connections, each with limits in number, size and time.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

/// Connections at a time; further ones wait to be accepted. A usual limit of open files is 1,024.
const CONNECTIONS_MAX: usize = 512;
/// Largest head of a request, in bytes; a longer one is answered with 431.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Most headers of a request.
const HEADERS_MAX: usize = 64;
/// Time for the head of a request, and between two requests.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// Time in which a client takes some of an answer.
const WRITE_TIME: Duration = Duration::from_secs(30);
/// Time after a connection that could not be accepted, as for lack of open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections for ever.
pub(super) async fn serve(listener: TcpListener, router: Router) -> Infallible {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX);
    loop {
        let place = places.clone().acquire_owned().await;
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(WRITE_TIME));
        let service = TowerToHyperService::new(router.clone());
        let connection = http.serve_connection(TokioIo::new(Box::pin(stream)), service);
        tokio::spawn(async move {
            // A client that sends nonsense, stalls or goes away ends its own connection only.
            let _ = connection.await;
            drop(place);
        });
    }
}
