//! The terminal of a view. It is restored when the view ends, even by a signal, and while the
//! process is suspended.

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

/// Interval between two checks for SIGCONT.
const EVERY: Duration = Duration::from_millis(10);

/// Signals for a view: handlers set flags, and the view reads them between two drawings.
#[derive(Clone, Default)]
struct Signals {
    stop: Arc<AtomicBool>,
    continued: Arc<AtomicBool>,
    /// The signal that ends the view; 0 for none.
    ends: Arc<AtomicUsize>,
    /// Whether the view is closed.
    closed: Arc<AtomicBool>,
}

impl Signals {
    fn listen(ending: &[i32]) -> io::Result<Self> {
        let signals = Self::default();
        // Without a view, SIGTSTP has its default effect.
        flag::register_conditional_default(SIGTSTP, signals.closed.clone())?;
        flag::register(SIGTSTP, signals.stop.clone())?;
        flag::register(SIGCONT, signals.continued.clone())?;
        let again = Arc::new(AtomicBool::new(false));
        for &signal in ending {
            flag::register_conditional_default(signal, signals.closed.clone())?;
            // A second signal ends the process without waiting for the view.
            flag::register_conditional_shutdown(signal, 128 + signal, again.clone())?;
            flag::register(signal, again.clone())?;
            let number = usize::try_from(signal).unwrap_or_default();
            flag::register_usize(signal, signals.ends.clone(), number)?;
        }
        Ok(signals)
    }
}

/// The terminal in raw mode, on the alternate screen. Dropping it restores the terminal.
pub(super) struct Screen {
    pub(super) terminal: DefaultTerminal,
    signals: Signals,
}

impl Screen {
    /// Enters raw mode and the alternate screen. The signals `ending` end the view.
    ///
    /// # Errors
    /// The terminal cannot be used, or the system refuses a handler.
    pub(super) fn take(ending: &[i32]) -> io::Result<Self> {
        let signals = Signals::listen(ending)?;
        // This also installs a panic hook that restores the terminal.
        let terminal = ratatui::try_init()?;
        Ok(Self { terminal, signals })
    }

    /// The signal that ends the view; `None` if there was none.
    pub(super) fn ending_signal(&self) -> Option<i32> {
        let signal = self.signals.ends.load(Ordering::Relaxed);
        i32::try_from(signal).ok().filter(|signal| *signal != 0)
    }

    /// Suspends the process after SIGTSTP, with the terminal restored. Enters raw mode again when
    /// the process continues.
    pub(super) fn follow_signals(&mut self) -> io::Result<()> {
        let Signals { stop, continued, .. } = &self.signals;
        if stop.swap(false, Ordering::Relaxed) {
            ratatui::restore();
            continued.store(false, Ordering::Relaxed);
            emulate_default_handler(SIGTSTP)?;
            // This thread may run for a moment after the others are suspended.
            while !continued.load(Ordering::Relaxed) {
                thread::sleep(EVERY);
            }
        }
        if continued.swap(false, Ordering::Relaxed) {
            // After SIGSTOP the shell may have changed the modes of the terminal.
            ratatui::restore();
            enable_raw_mode()?;
            execute!(stdout(), EnterAlternateScreen, Clear(ClearType::All))?;
            // A new terminal object redraws everything; `clear` would query the position of the
            // cursor.
            self.terminal = DefaultTerminal::new(CrosstermBackend::new(stdout()))?;
        }
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.signals.closed.store(true, Ordering::Relaxed);
        ratatui::restore();
    }
}

/// Raises SIGTSTP for Ctrl-Z, which is only a key on a terminal in raw mode.
pub(super) fn suspend() -> io::Result<()> {
    raise(SIGTSTP)
}
