//! Current form of a run's output on the terminal, shared by all threads that write to it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use indicatif::ProgressBar;

use crate::plain;

/// Maximum number of lines held while a view is open; the newest are kept.
const HELD_MAX: usize = 1000;

/// Current form of output. A line written over bars or over a view would be lost.
static SHOWN: Mutex<OutputForm> = Mutex::new(OutputForm::Lines);

/// Form of output on the terminal.
pub(super) enum OutputForm {
    Lines,
    /// Bars of the envs and of the whole run; the field is the bar of the run.
    Bar(ProgressBar),
    /// A view on the whole screen, with the held lines.
    Screen(HeldLines),
}

/// A line held while a view is open.
pub(super) struct HeldLine {
    pub(super) text: String,
    pub(super) on_stderr: bool,
}

/// Lines to print when the view closes.
#[derive(Default)]
pub(super) struct HeldLines {
    lines: Vec<HeldLine>,
    dropped: usize,
}

impl HeldLines {
    pub(super) fn push(&mut self, line: HeldLine) {
        if self.lines.len() == HELD_MAX {
            self.lines.drain(..HELD_MAX / 2);
            self.dropped += HELD_MAX / 2;
        }
        self.lines.push(line);
    }
}

/// Locks the current form.
pub(super) fn shown() -> MutexGuard<'static, OutputForm> {
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a view has the screen.
pub(crate) fn has_screen() -> bool {
    matches!(*shown(), OutputForm::Screen(_))
}

/// Guard of the screen for a view. Lines are held until it is dropped.
#[must_use]
pub(crate) struct ScreenGuard;

impl ScreenGuard {
    /// Takes the screen for a view.
    pub(crate) fn take() -> Self {
        *shown() = OutputForm::Screen(HeldLines::default());
        Self
    }
}

impl Drop for ScreenGuard {
    fn drop(&mut self) {
        let mut shown = shown();
        if let OutputForm::Screen(held) = std::mem::replace(&mut *shown, OutputForm::Lines) {
            if held.dropped > 0 {
                plain::err(&format!("({} earlier lines are left out)", held.dropped));
            }
            for line in held.lines {
                if line.on_stderr { plain::err(&line.text) } else { plain::out(&line.text) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_an_open_view_the_newest_lines_are_held() {
        let mut held = HeldLines::default();
        for number in 0..1750 {
            held.push(HeldLine { text: number.to_string(), on_stderr: false });
        }
        assert_eq!((held.lines.len(), held.dropped), (750, 1000));
        assert_eq!(held.lines[0].text, "1000");
    }
}
