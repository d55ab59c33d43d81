//! The view of `train --watch`, in a thread beside the training.

use std::io;
use std::panic;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use meristem::train::reading::Follower;
use signal_hook::consts::{SIGINT, SIGQUIT};
use signal_hook::low_level::{emulate_default_handler, raise};

use super::app::App;
use super::screen::Screen as Terminal;
use super::{Ending, broken, show};
use crate::environment;
use crate::failure::Failure;
use crate::plain;
use crate::progress::{Screen, has_screen};

/// A view of the run that this process trains. It goes when the handle goes, or when the user
/// leaves it.
pub(crate) struct Beside {
    closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Beside {
    /// Opens the view of a run folder.
    ///
    /// # Errors
    /// The folder is none of a run, the terminal cannot be used, or the system refuses a thread.
    pub(crate) fn open(folder: &Path) -> Result<Self, Failure> {
        let mut app = App::new(Follower::open(folder)?, environment::has_colours());
        app.trains_here = true;
        let closed = Arc::new(AtomicBool::new(false));
        // The terminal is restored before the lines behind the view are printed, also after a
        // panic.
        let held = Screen::take();
        // The run handles the other signals: they end it at a step boundary.
        let mut terminal = Terminal::take(&[SIGQUIT]).map_err(broken)?;
        close_on_panic(closed.clone());
        let of_thread = closed.clone();
        let view = move || {
            let left = show(&mut terminal, &mut app, &|| of_thread.load(Ordering::Relaxed));
            drop(terminal);
            drop(held);
            after(left);
        };
        let thread = thread::Builder::new().name("view".into()).spawn(view).map_err(broken)?;
        Ok(Self { closed, thread: Some(thread) })
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Relaxed);
        // A view that panicked has restored the terminal and said so.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Says why the view is gone, if the run goes on. A signal that ended the view ends the process.
fn after(left: io::Result<Ending>) {
    match left {
        Ok(Ending::Closed) => {}
        // Only an unknown signal has no default.
        Ok(Ending::Signal(signal)) => drop(emulate_default_handler(signal)),
        Ok(Ending::Left) => plain::err("the run goes on without its view; Ctrl-C stops it"),
        Err(error) => plain::err(&format!(
            "the run goes on without its view, because the terminal cannot be used: {error}"
        )),
    }
}

/// Closes the view when any thread panics: the message is printed after the terminal is restored,
/// and no further drawing may cover it.
fn close_on_panic(closed: Arc<AtomicBool>) {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |information| {
        closed.store(true, Ordering::Relaxed);
        before(information);
    }));
}

/// Restores the terminal before the process ends without its view.
pub(crate) fn restore_screen() {
    if has_screen() {
        ratatui::restore();
    }
}

/// Passes Ctrl-C on, which a terminal in raw mode makes a key: it is the signal that it would be
/// without the view.
pub(super) fn stop_run() -> io::Result<()> {
    raise(SIGINT)
}
