//! Notes of the libraries and progress of decoding, on stderr.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use meristem::data::notes::TARGET;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use crate::plain::{self, printable, thousands};

/// Time between two lines of progress where there is no terminal.
const INTERVAL: Duration = Duration::from_secs(10);

/// Layer that prints notes and progress.
pub(crate) struct Notes {
    is_terminal: bool,
    /// Time of the last line of progress, or of the start.
    last: Mutex<Instant>,
}

impl Notes {
    /// The layer; `None` for a command that prints only errors.
    pub(crate) fn unless(quiet: bool) -> Option<Self> {
        let is_terminal = std::io::stderr().is_terminal();
        (!quiet).then(|| Self { is_terminal, last: Mutex::new(Instant::now()) })
    }

    fn progress(&self, done: u64, of: u64) {
        let text = format!("decoding images: {} of {}", thousands(done), thousands(of));
        if self.is_terminal {
            // The line is written over, and removed at the end.
            let text = if done < of { text } else { String::new() };
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K{text}");
            return;
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() >= INTERVAL && done < of {
            *last = Instant::now();
            plain::err(&text);
        }
    }
}

impl<S: Subscriber> Layer<S> for Notes {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() != TARGET {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        match fields {
            Fields { message: Some(message), .. } => {
                let clear = if self.is_terminal { "\r\x1b[K" } else { "" };
                plain::err(&format!("{clear}note: {}", printable(&message)));
            }
            Fields { done, of, .. } => self.progress(done, of),
        }
    }
}

/// Fields of an event.
#[derive(Default)]
struct Fields {
    message: Option<String>,
    done: u64,
    of: u64,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "done" => self.done = value,
            "of" => self.of = value,
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = Some(format!("{value:?}"));
        }
    }
}
