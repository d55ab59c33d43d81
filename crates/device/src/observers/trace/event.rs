//! The JSON trace event format ("Trace Event Format" of the Chromium project): one object per
//! event, times in microseconds.

use std::panic::Location;

use serde::Serialize;

use super::TraceReport;
use super::entry::{TracePlace, Waited, Worked};
use crate::ground::{AccessKind, MemoryFormat, Owner};
use crate::hooks::{Category, LaunchArgument};

#[derive(Serialize)]
struct TraceEvent<'a, A> {
    ph: &'static str,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: u64,
    tid: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    /// Scope of an instant event.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<A>,
}

/// An event without arguments.
type Plain<'a> = TraceEvent<'a, ()>;

impl<'a, A> TraceEvent<'a, A> {
    fn new(ph: &'static str, name: &'a str, at: u64, place: TracePlace) -> Self {
        let (pid, tid) = (place.process, place.lane);
        let (cat, dur, id, s, args) = (None, None, None, None, None);
        TraceEvent { ph, name, cat, ts: microseconds(at), dur, pid, tid, id, s, args }
    }
}

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

/// Text of events, each after a comma.
#[derive(Default)]
pub(super) struct TraceLines(pub(super) Vec<u8>);

impl TraceLines {
    fn add(&mut self, event: &TraceEvent<'_, impl Serialize>) {
        self.0.extend_from_slice(b",\n");
        // Events are numbers and texts under fixed keys, which JSON can represent.
        let _ = serde_json::to_writer(&mut self.0, event);
    }

    /// Names a process or a thread (`what`: `process_name`, `thread_name`).
    pub(super) fn name(&mut self, what: &'static str, name: &str, place: TracePlace) {
        #[derive(Serialize)]
        struct Name<'a> {
            name: &'a str,
        }
        self.add(&TraceEvent { args: Some(Name { name }), ..TraceEvent::new("M", what, 0, place) });
    }

    pub(super) fn work(&mut self, worked: &Worked, place: TracePlace) {
        #[derive(Serialize)]
        struct WorkArgs {
            site: String,
            command: u64,
            /// Time from the host's call to the start, in microseconds.
            queued_us: f64,
            #[serde(skip_serializing_if = "Vec::is_empty")]
            arguments: Vec<String>,
            #[serde(skip_serializing_if = "std::ops::Not::not")]
            dropped: bool,
        }
        let Worked { called, start, end, operation, site, call, seq, dropped } = worked;
        let args = WorkArgs {
            site: site.to_string(),
            command: *seq,
            queued_us: microseconds(start.saturating_sub(*called)),
            arguments: call.arguments.iter().map(argument).collect(),
            dropped: *dropped,
        };
        self.add(&TraceEvent {
            cat: Some(call.category.name()),
            dur: Some(microseconds(end - start)),
            args: Some(args),
            ..TraceEvent::new("X", operation, *start, place)
        });
    }

    /// A stream's wait; `operation` is the operation it waited for.
    pub(super) fn wait(&mut self, waited: &Waited, operation: Option<&str>, place: TracePlace) {
        #[derive(Serialize)]
        struct WaitArgs<'a> {
            stream: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            operation: Option<&'a str>,
            producer_command: u64,
            command: u64,
        }
        let Waited { start, end, seq, producer_name, producer_seq, .. } = waited;
        let args = WaitArgs {
            stream: producer_name,
            operation,
            producer_command: *producer_seq,
            command: *seq,
        };
        self.add(&TraceEvent {
            cat: Some(Category::Wait.name()),
            dur: Some(microseconds(end.saturating_sub(*start))),
            args: Some(args),
            ..TraceEvent::new("X", "wait", *start, place)
        });
    }

    /// An arrow from the awaited work, at a time inside of its slice, to the last moment of the
    /// wait: a viewer draws it to the next slice, which had to wait.
    pub(super) fn arrow(&mut self, id: u64, from: (u64, TracePlace), to: (u64, TracePlace)) {
        let cat = Some(Category::Wait.name());
        let end =
            |ph, (at, place)| Plain { cat, id: Some(id), ..TraceEvent::new(ph, "wait", at, place) };
        self.add(&end("s", from));
        self.add(&end("f", to));
    }

    pub(super) fn begin(
        &mut self,
        at: u64,
        (name, category): (&str, Category),
        site: Option<&'static Location<'static>>,
        place: TracePlace,
    ) {
        #[derive(Serialize)]
        struct SpanArgs {
            site: String,
        }
        let args = site.map(|site| SpanArgs { site: site.to_string() });
        self.add(&TraceEvent {
            cat: Some(category.name()),
            args,
            ..TraceEvent::new("B", name, at, place)
        });
    }

    pub(super) fn end(&mut self, at: u64, place: TracePlace) {
        self.add(&Plain::new("E", "", at, place));
    }

    /// The bytes of every owner, in the order of [`Owner::ALL`].
    pub(super) fn memory(&mut self, at: u64, bytes: &[usize; Owner::ALL.len()], place: TracePlace) {
        let args: serde_json::Map<_, _> =
            Owner::ALL.iter().zip(bytes).map(|(o, &b)| (o.name().to_owned(), b.into())).collect();
        self.add(&TraceEvent {
            args: Some(args),
            ..TraceEvent::new("C", "memory (bytes)", at, place)
        });
    }
}

/// The document's end: the number of missing events, if any, and the totals.
pub(super) fn tail(at: u64, report: TraceReport, place: TracePlace) -> String {
    let TraceReport { events, dropped } = report;
    let mut lines = TraceLines::default();
    if dropped > 0 {
        let name = format!("{dropped} events found no room and are missing");
        lines.add(&Plain { s: Some("g"), ..TraceEvent::new("i", &name, at, place) });
    }
    let events_missing = String::from_utf8(lines.0).unwrap_or_default();
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "{events_missing}\n],\"otherData\":{{\"meristem\":\"{version}\",\"events\":{events},\"dropped\":{dropped}}}}}\n"
    )
}

/// Formats an argument like `write f32 [128, 3, 32, 32] channels last`.
fn argument(argument: &LaunchArgument) -> String {
    let access = match argument.access {
        AccessKind::Read => "read",
        AccessKind::Write => "write",
    };
    let format = match argument.format {
        MemoryFormat::Contiguous => "",
        MemoryFormat::ChannelsLast => " channels last",
    };
    format!("{access} {} {}{format}", argument.dtype, argument.shape)
}
