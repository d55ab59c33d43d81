//! The view of `train --watch`, in a separate thread.

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
use super::screen::Screen;
use super::{Ending, broken, show};
use crate::environment;
use crate::failure::Failure;
use crate::plain;
use crate::progress::{ScreenGuard, has_screen};

/// Handle of a view of the run that this process trains. Dropping the handle closes the view; the
/// user may close it earlier.
pub(crate) struct TrainingView {
    closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TrainingView {
    /// Opens the view of a run folder.
    ///
    /// # Errors
    /// The folder is not a run folder, the terminal cannot be used, or the thread cannot be
    /// started.
    pub(crate) fn open(folder: &Path) -> Result<Self, Failure> {
        let mut app = App::new(Follower::open(folder)?, environment::has_colours());
        app.trains_here = true;
        let closed = Arc::new(AtomicBool::new(false));
        // Declared before the terminal, so dropped after it: the held lines are printed on the
        // restored terminal, even after a panic.
        let held = ScreenGuard::take();
        // The run handles the other signals, which end it at a step boundary.
        let mut terminal = Screen::take(&[SIGQUIT]).map_err(broken)?;
        close_on_panic(closed.clone());
        let is_closed = closed.clone();
        let view = move || {
            let ending = show(&mut terminal, &mut app, &|| is_closed.load(Ordering::Relaxed));
            drop(terminal);
            drop(held);
            report_end(ending);
        };
        let thread = thread::Builder::new().name("view".into()).spawn(view).map_err(broken)?;
        Ok(Self { closed, thread: Some(thread) })
    }
}

impl Drop for TrainingView {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Relaxed);
        // A view that panicked has restored the terminal and printed the message.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Prints the reason for the end of the view if the run continues. A signal that ended the view
/// ends the process.
fn report_end(ending: io::Result<Ending>) {
    match ending {
        Ok(Ending::Closed) => {}
        // Fails only for an unknown signal.
        Ok(Ending::Signal(signal)) => drop(emulate_default_handler(signal)),
        Ok(Ending::Left) => plain::err("the run continues without its view; Ctrl-C stops it"),
        Err(error) => plain::err(&format!(
            "the run continues without its view, because the terminal cannot be used: {error}"
        )),
    }
}

/// Closes the view when any thread panics, so that the message is printed on the restored terminal
/// and not overwritten.
fn close_on_panic(closed: Arc<AtomicBool>) {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |information| {
        closed.store(true, Ordering::Relaxed);
        before(information);
    }));
}

/// Restores the terminal before an immediate exit of the process.
pub(crate) fn restore_screen() {
    if has_screen() {
        ratatui::restore();
    }
}

/// Raises SIGINT for Ctrl-C, which is only a key on a terminal in raw mode.
pub(super) fn stop_run() -> io::Result<()> {
    raise(SIGINT)
}
