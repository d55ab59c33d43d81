//! `meristem serve`: runs in the browser. It only reads run folders.
//!
//! Runs are found by name in the list of runs; no path is built from a request. All viewers share
//! the data and the drawings (`live::LiveViews`). Drawing a page takes at most a tenth of the time.
//! At most two threads read and draw (`server`). The number of connections is limited; a new
//! connection may replace an idle one (`places`).

#[cfg(feature = "serve")]
mod address;
#[cfg(feature = "serve")]
mod connections;
#[cfg(feature = "serve")]
mod guard;
#[cfg(feature = "serve")]
mod library;
#[cfg(feature = "serve")]
mod live;
#[cfg(feature = "serve")]
mod places;
#[cfg(feature = "serve")]
mod routes;
#[cfg(feature = "serve")]
mod server;
#[cfg(feature = "serve")]
mod view;
#[cfg(feature = "serve")]
mod work;

#[cfg(feature = "serve")]
pub(crate) use self::server::run;

/// Returns an error: this build has no server.
#[cfg(not(feature = "serve"))]
pub(crate) fn run(_: &crate::cli::ServeArguments) -> super::Outcome {
    Err(crate::failure::Failure::usage(
        "this build has no server for browsers",
        "build with `--features serve`; `meristem watch` and `meristem runs report` need no server",
    ))
}
