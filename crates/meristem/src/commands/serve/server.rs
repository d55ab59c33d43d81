//! The server process: socket, runtime, shutdown.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};

use super::connections;
use super::guard::Guard;
use super::library::Library;
use super::places::Places;
use super::routes;
use crate::cli::ServeArguments;
use crate::commands::Outcome;
use crate::failure::Failure;
use crate::plain::{self, printable};

/// Number of threads that read folders and draw. The other cores are left to training runs.
const READERS: usize = 2;

/// Serves until a signal ends the process.
pub(crate) fn run(arguments: &ServeArguments) -> Outcome {
    let base = &arguments.base_path;
    let library = Arc::new(Library::open(&arguments.folder, base)?);
    let (listener, address) = listen(SocketAddr::new(arguments.bind, arguments.port))?;
    let needs_token = arguments.token || !arguments.bind.is_loopback();
    let guard = Guard::new(address, needs_token, base).map_err(|error| {
        Failure::failed(
            format!("cannot make a token, because the system has no random numbers: {error}"),
            "serve on a loopback address, without --token",
        )
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(READERS)
        .build()
        .map_err(broken)?;
    let url = guard.url(address);
    let router = routes::router(library, guard);
    let places = Places::new(base.is_below_another());
    let ended = runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let folder = printable(&arguments.folder.display().to_string());
        plain::out(&format!("runs in {folder}: {url}"));
        if address.ip().is_unspecified() {
            plain::out(
                "from other machines: the same URL with the name or address of this machine",
            );
        }
        plain::out("Ctrl-C ends the server; runs continue");
        tokio::select! {
            never = connections::serve(listener, router, places) => match never {},
            _ = interrupt.recv() => Ok(()),
            _ = terminate.recv() => Ok(()),
        }
    });
    // The server writes nothing, so it ends without waiting for open streams or reads.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS).map_err(broken)
}

fn broken(error: io::Error) -> Failure {
    Failure::failed(format!("cannot serve: {error}"), "free some memory, or check `ulimit -n`")
}

/// Listens on `wanted`. Returns the listener and the bound address.
fn listen(wanted: SocketAddr) -> Result<(TcpListener, SocketAddr), Failure> {
    let open = || {
        let listener = TcpListener::bind(wanted)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    open().map_err(|error: io::Error| match error.kind() {
        ErrorKind::AddrInUse => Failure::failed(
            format!("port {} of {} is in use by another program", wanted.port(), wanted.ip()),
            "choose another one with --port, or any free one with --port 0",
        ),
        ErrorKind::AddrNotAvailable => Failure::usage(
            format!("{} is not an address of this machine", wanted.ip()),
            "give --bind an address of this machine, or 0.0.0.0 for all",
        ),
        ErrorKind::PermissionDenied => Failure::usage(
            format!("port {} is reserved for the system", wanted.port()),
            "choose a port from 1024 on with --port",
        ),
        _ => {
            Failure::failed(format!("cannot listen on {wanted}: {error}"), "choose another --port")
        }
    })
}
