//! The terminal of a view. It is given back at every end, also by a signal, and while the process
//! is stopped.

use std::io::{self, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{Clear, ClearType, EnterAlternateScreen, enable_raw_mode};
use signal_hook::consts::{SIGCONT, SIGTSTP};
use signal_hook::flag;
use signal_hook::low_level::{emulate_default_handler, raise};

/// Time between two looks for SIGCONT.
const EVERY: Duration = Duration::from_millis(10);

/// Signals for a view, which handlers note and the view reads between two drawings.
#[derive(Clone, Default)]
struct Signals {
    stop: Arc<AtomicBool>,
    continued: Arc<AtomicBool>,
    /// The signal that ends the view; 0 if there was none.
    ends: Arc<AtomicUsize>,
    /// Whether the view is gone.
    gone: Arc<AtomicBool>,
}

impl Signals {
    fn listen(ending: &[i32]) -> io::Result<Self> {
        let signals = Self::default();
        // Without a view Ctrl-Z stops the process as it stops any.
        flag::register_conditional_default(SIGTSTP, signals.gone.clone())?;
        flag::register(SIGTSTP, signals.stop.clone())?;
        flag::register(SIGCONT, signals.continued.clone())?;
        let again = Arc::new(AtomicBool::new(false));
        for &signal in ending {
            flag::register_conditional_default(signal, signals.gone.clone())?;
            // A second signal does not wait for the view.
            flag::register_conditional_shutdown(signal, 128 + signal, again.clone())?;
            flag::register(signal, again.clone())?;
            let number = usize::try_from(signal).unwrap_or_default();
            flag::register_usize(signal, signals.ends.clone(), number)?;
        }
        Ok(signals)
    }
}

/// The terminal, in raw mode and on its alternate screen until this goes.
pub(super) struct Screen {
    pub(super) terminal: DefaultTerminal,
    signals: Signals,
}

impl Screen {
    /// Takes the terminal. The signals `ending` end the view.
    ///
    /// # Errors
    /// The terminal cannot be used, or the system refuses a handler.
    pub(super) fn take(ending: &[i32]) -> io::Result<Self> {
        let signals = Signals::listen(ending)?;
        // It restores the terminal after a panic, too.
        let terminal = ratatui::try_init()?;
        Ok(Self { terminal, signals })
    }

    /// The signal that ends the view, if there was one.
    pub(super) fn ending_signal(&self) -> Option<i32> {
        let signal = self.signals.ends.load(Ordering::Relaxed);
        i32::try_from(signal).ok().filter(|signal| *signal != 0)
    }

    /// Stops the process if SIGTSTP asked for it, without the terminal. Takes the terminal again
    /// once the process continues.
    pub(super) fn follow_signals(&mut self) -> io::Result<()> {
        let Signals { stop, continued, .. } = &self.signals;
        if stop.swap(false, Ordering::Relaxed) {
            ratatui::restore();
            continued.store(false, Ordering::Relaxed);
            emulate_default_handler(SIGTSTP)?;
            // This thread may go on for a moment while the others are stopped already.
            while !continued.load(Ordering::Relaxed) {
                thread::sleep(EVERY);
            }
        }
        if continued.swap(false, Ordering::Relaxed) {
            // During SIGSTOP the shell has changed the modes of the terminal.
            ratatui::restore();
            enable_raw_mode()?;
            execute!(stdout(), EnterAlternateScreen, Clear(ClearType::All))?;
            // A new one draws everything; `clear` would ask the terminal where its cursor is.
            self.terminal = DefaultTerminal::new(CrosstermBackend::new(stdout()))?;
        }
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.signals.gone.store(true, Ordering::Relaxed);
        ratatui::restore();
    }
}

/// Passes Ctrl-Z on, which a terminal in raw mode makes a key.
pub(super) fn suspend() -> io::Result<()> {
    raise(SIGTSTP)
}
