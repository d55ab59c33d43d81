//! `meristem serve`: runs in the browser. It reads the folders of runs only.
//!
//! Runs are found by name among the runs of the folder; no path is made from a request. All viewers
//! share what is read and drawn (`live::Gallery`), on two threads at most, in at most a tenth of
//! their time. A connection has a place, which it may lose to another while it waits (`places`).

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

/// Refuses: this build has no server.
#[cfg(not(feature = "serve"))]
pub(crate) fn run(_: &crate::cli::ServeArguments) -> super::Outcome {
    Err(crate::failure::Failure::usage(
        "this build has no server for browsers",
        "build with `--features serve`; `meristem watch` and `meristem runs report` need no server",
    ))
}
