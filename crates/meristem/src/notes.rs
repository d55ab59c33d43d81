//! Tracing layer that prints to stderr the notes that the library crates emit as tracing events,
//! and the progress of decoding images.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use meristem::data::notes::TARGET;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use crate::environment::is_drawable;
use crate::plain::{self, printable, thousands};

/// Interval between two lines of progress without a terminal.
const INTERVAL: Duration = Duration::from_secs(10);

/// The tracing layer of notes and progress.
pub(crate) struct Notes {
    /// Whether stderr is a terminal on which lines can be overwritten.
    is_drawable: bool,
    /// Time of the last line of progress, or of the start.
    last: Mutex<Instant>,
}

impl Notes {
    /// Creates the layer; `None` for a command that prints only warnings and errors.
    pub(crate) fn unless(quiet: bool) -> Option<Self> {
        let is_drawable = is_drawable(&std::io::stderr());
        (!quiet).then(|| Self { is_drawable, last: Mutex::new(Instant::now()) })
    }

    fn progress(&self, done: u64, total: u64) {
        let text = format!("decoding images: {} of {}", thousands(done), thousands(total));
        if self.is_drawable {
            // Each line overwrites the previous one; the last is removed at the end.
            return plain::status(if done < total { &text } else { "" });
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() >= INTERVAL && done < total {
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
                if self.is_drawable {
                    plain::status("");
                }
                plain::err(&format!("note: {}", printable(&message)));
            }
            Fields { done, total, .. } => self.progress(done, total),
        }
    }
}

/// Fields of an event.
#[derive(Default)]
struct Fields {
    message: Option<String>,
    done: u64,
    total: u64,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "done" => self.done = value,
            "of" => self.total = value,
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = Some(format!("{value:?}"));
        }
    }
}
