//! Connections, each with limits in number, size and time.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_io_timeout::TimeoutStream;

use super::places::{Answering, ConnectionPermit, Places};

/// Maximum size of the head of a request, in bytes; the response to a longer head is 431.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Maximum number of headers of a request.
const HEADERS_MAX: usize = 64;
/// Time limit for the head of a request, and between two requests.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// Time limit for a client to receive each part of a response.
const WRITE_TIME: Duration = Duration::from_secs(30);
/// Delay after a failed accept, for example at the limit of open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections; never returns.
pub(super) async fn serve(listener: TcpListener, router: Router, places: Places) -> Infallible {
    let places = Arc::new(places);
    loop {
        let Ok((stream, address)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // If no place is free or can be freed, the connection is closed.
        let Some(permit) = places.enter(address.ip()) else { continue };
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(WRITE_TIME));
        tokio::spawn(answer(Box::pin(stream), router.clone(), permit));
    }
}

/// Responds to the requests of a connection until it ends or loses its place.
pub(super) async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    router: Router,
    permit: Arc<ConnectionPermit>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX);
    let (router, own) = (TowerToHyperService::new(router), permit.clone());
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        let answering = own.answers();
        request.extensions_mut().insert(own.clone());
        let answer = router.call(request);
        async move {
            let response = answer.await?;
            Ok::<_, Infallible>(response.map(|body| AnsweringBody { body, _answering: answering }))
        }
    });
    let connection = http.serve_connection(TokioIo::new(stream), service);
    // An invalid request, a client that stalls or a client that disconnects ends only this
    // connection.
    tokio::select! {
        _ = connection => {}
        () = permit.is_lost() => {}
    }
}

/// Body of a response. Until it is dropped, the connection counts as answering.
struct AnsweringBody {
    body: Body,
    _answering: Answering,
}

impl hyper::body::Body for AnsweringBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
