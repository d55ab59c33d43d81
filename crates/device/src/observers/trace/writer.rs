//! The writer thread, which empties the lanes into the file.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use super::TraceReport;
use super::entry::{TraceEntry, TracePlace, Waited, Worked};
use super::event::{TraceLines, tail};
use super::file::TraceFile;
use super::recorder::{HOST_PROCESS, Recorder, Signal, TraceLane};
use crate::ground::sync::{Arc, Ordering, lock};
use crate::ground::{Error, Owner, Result};

/// Interval at which the lanes are emptied. If the process is killed, the events since the last
/// time are lost.
const PERIOD: Duration = Duration::from_millis(100);
/// Number of the latest commands of a stream that are remembered: an arrow to a wait begins at one.
const REMEMBERED: usize = 8192;
/// The lane of the process itself, which has no thread.
const HOST: TracePlace = TracePlace { process: HOST_PROCESS, lane: 0 };

pub(super) struct TraceWriter {
    recorder: Arc<Recorder>,
    path: PathBuf,
    file: TraceFile,
    events_max: u64,
    report: TraceReport,
    lanes: HashMap<u64, LaneState>,
    /// Waits of the last visit: the next visit reads the commands that they waited for.
    waits: Vec<(TracePlace, Waited)>,
    arrows: u64,
    spare: Vec<TraceEntry>,
}

/// The writer's state of a lane.
#[derive(Default)]
struct LaneState {
    /// Number of open host spans that were left out; their ends are left out, too.
    skipped: u64,
    /// Commands that ran, by number, each with its last moment and its operation.
    ran: VecDeque<(u64, u64, &'static str)>,
    memory: [usize; Owner::ALL.len()],
    /// Whether its thread or stream has ended.
    gone: bool,
}

impl TraceWriter {
    pub(super) fn new(recorder: Arc<Recorder>, path: &Path, events_max: u64) -> io::Result<Self> {
        let mut file = TraceFile::create(path)?;
        let report = TraceReport::default();
        let mut lines = TraceLines::default();
        lines.name("process_name", "host", HOST);
        // Without the comma before the first event.
        let first = lines.0.split_off(1);
        let head = [b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[", &first[..]].concat();
        file.append(head, &tail(0, report, HOST))?;
        Ok(TraceWriter {
            recorder,
            path: path.to_owned(),
            file,
            events_max,
            report,
            lanes: HashMap::new(),
            waits: Vec::new(),
            arrows: 0,
            spare: Vec::new(),
        })
    }

    /// Body of the thread. It ends on request, or when the file cannot be written.
    pub(super) fn work(mut self, signals: &Receiver<Signal>) -> (TraceReport, Result<()>) {
        let mut result = Ok(());
        while result.is_ok() && !matches!(signals.recv_timeout(PERIOD), Ok(Signal::End)) {
            result = self.visit();
        }
        self.recorder.on.store(false, Ordering::Relaxed);
        // Twice: the second visit has the commands that the waits of the first visit waited for.
        let result = result.and_then(|()| self.visit()).and_then(|()| self.visit());
        lock(&self.recorder.lanes).clear();
        let path = self.path;
        (self.report, result.map_err(|source| Error::Trace { path, source }))
    }

    /// Writes the entries of the lanes.
    fn visit(&mut self) -> io::Result<()> {
        let before = self.report;
        let waits = std::mem::take(&mut self.waits);
        let mut lines = TraceLines::default();
        self.lanes.retain(|_, known| !known.gone || !waits.is_empty());
        let lanes = self.open_lanes();
        for lane in lanes {
            self.empty(&lane, &mut lines);
        }
        for (place, waited) in waits {
            self.write_wait(&waited, place, &mut lines);
        }
        if lines.0.is_empty() && self.report == before {
            return Ok(());
        }
        self.file.append(lines.0, &tail(self.recorder.now(), self.report, HOST))
    }

    /// All lanes. Lanes that only the writer still holds leave the list, and are read for the last
    /// time.
    fn open_lanes(&mut self) -> Vec<Arc<TraceLane>> {
        let mut lanes = lock(&self.recorder.lanes);
        let all = lanes.clone();
        // A lane in use has a third handle: the stream's, or the thread's.
        lanes.retain(|lane| {
            let gone = Arc::strong_count(lane) == 2;
            self.lanes.entry(lane.id).or_default().gone = gone;
            !gone
        });
        all
    }

    fn empty(&mut self, lane: &TraceLane, lines: &mut TraceLines) {
        let place = lane.place();
        let mut buffer = lane.take(std::mem::take(&mut self.spare));
        self.report.dropped += buffer.dropped;
        for entry in buffer.entries.drain(..) {
            self.write(entry, place, lines);
        }
        self.spare = buffer.entries;
    }

    /// Whether there is room for one more event, which is counted.
    fn has_room(&mut self) -> bool {
        let fits = self.report.events < self.events_max;
        if fits {
            self.report.events += 1
        } else {
            self.report.dropped += 1
        }
        fits
    }

    fn write(&mut self, entry: TraceEntry, place: TracePlace, lines: &mut TraceLines) {
        match entry {
            TraceEntry::Name(name) => lines.name("thread_name", &name, place),
            TraceEntry::Process(name) => lines.name("process_name", &name, place),
            TraceEntry::Work(worked) => self.write_work(&worked, place, lines),
            TraceEntry::Wait(waited) => self.waits.push((place, waited)),
            TraceEntry::Begin { at, name, category, site } => {
                if self.has_room() {
                    lines.begin(at, (&name, category), site, place)
                } else {
                    self.known(place).skipped += 1
                }
            }
            TraceEntry::End { at } => match self.known(place).skipped.checked_sub(1) {
                Some(rest) => self.known(place).skipped = rest,
                None => lines.end(at, place),
            },
            TraceEntry::Memory { at, owner, bytes } => {
                let known = self.known(place);
                known.memory[owner as usize] = bytes;
                let memory = known.memory;
                if self.has_room() {
                    lines.memory(at, &memory, place);
                }
            }
        }
    }

    fn known(&mut self, place: TracePlace) -> &mut LaneState {
        self.lanes.entry(place.lane).or_default()
    }

    fn write_work(&mut self, worked: &Worked, place: TracePlace, lines: &mut TraceLines) {
        if !self.has_room() {
            return;
        }
        lines.work(worked, place);
        let ran = &mut self.known(place).ran;
        if ran.len() == REMEMBERED {
            ran.pop_front();
        }
        ran.push_back((worked.seq, last_moment(worked.start, worked.end), worked.operation));
    }

    /// A wait, with an arrow from the last command of the producer that had to be done.
    fn write_wait(&mut self, waited: &Waited, place: TracePlace, lines: &mut TraceLines) {
        if !self.has_room() {
            return;
        }
        let producer = waited.producer.and_then(|from| {
            let ran = &self.lanes.get(&from.lane)?.ran;
            let after = ran.partition_point(|&(seq, ..)| seq <= waited.producer_seq);
            let &(_, at, operation) = ran.get(after.checked_sub(1)?)?;
            Some((from, at, operation))
        });
        lines.wait(waited, producer.map(|(.., operation)| operation), place);
        if let Some((from, at, _)) = producer {
            self.arrows += 1;
            lines.arrow(self.arrows, (at, from), (last_moment(waited.start, waited.end), place));
        }
    }
}

/// The last nanosecond of a slice. A viewer draws an arrow from the slice that encloses its first
/// time to the next slice after its last one.
fn last_moment(start: u64, end: u64) -> u64 {
    end.saturating_sub(1).max(start)
}
