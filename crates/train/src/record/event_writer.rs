//! The sink of events: a bounded queue, and a thread that writes `events.jsonl`.
//!
//! The loop never waits for the disk. When the writer falls behind, events are dropped and counted,
//! and the gap shows in their numbers. When the disk refuses, the file is cut back to its last
//! whole line, and the loop learns of it at the next step boundary.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::record::events::{Event, Record, SCHEMA_VERSION};

/// Events that may wait for the disk before further ones are dropped.
pub const QUEUE_EVENTS: usize = 4096;
/// Bytes gathered before a write, when the queue does not run empty sooner.
const WRITE_BYTES: usize = 64 * 1024;
/// How long the disk may take to write what is queued.
const SYNC_TIMEOUT: Duration = Duration::from_secs(120);

/// Where `events.jsonl` stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EventsPosition {
    /// Length of the file: what comes later is cut off by a resume, and happens again.
    pub(crate) bytes: u64,
    /// Number of the next event.
    pub(crate) seq: u64,
    /// Events lost so far.
    pub(crate) dropped: u64,
    /// Seconds since the run started, without the time between kill and resume.
    pub(crate) seconds: f64,
}

/// An order to the writing thread.
#[derive(Debug)]
enum Order {
    /// To write a line.
    Line(String),
    /// To tell how long the file is once everything before is on the disk.
    Sync(SyncSender<u64>),
}

/// Writes the events of one run.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    queue: Option<SyncSender<Order>>,
    thread: Option<JoinHandle<()>>,
    failure: Arc<Mutex<Option<io::Error>>>,
    started: Instant,
    /// Seconds of this run before it was resumed.
    seconds_before: f64,
    next_seq: u64,
    dropped: u64,
}

impl EventWriter {
    /// Creates the file at `path` for a run that began at `started`, and starts the writing thread.
    ///
    /// # Errors
    /// The file or the thread cannot be made.
    pub fn create(path: &Path, started: Instant) -> Result<Self> {
        let fail = |source| Error::RunFolder { action: "write", path: path.to_owned(), source };
        let file = File::create(path).map_err(fail)?;
        let from =
            EventsPosition { seconds: started.elapsed().as_secs_f64(), ..Default::default() };
        Self::start(path, file, from, QUEUE_EVENTS).map_err(fail)
    }

    /// Goes on with the file at `path` from a checkpoint: what was written after it is cut off.
    ///
    /// # Errors
    /// The file is shorter than it was, is damaged, or cannot be written.
    pub(crate) fn resume(path: &Path, from: EventsPosition) -> Result<Self> {
        let fail =
            |source| Error::RunFolder { action: "go on with", path: path.to_owned(), source };
        let mut file = OpenOptions::new().write(true).open(path).map_err(fail)?;
        let length = file.metadata().map_err(fail)?.len();
        if length < from.bytes {
            let problem =
                format!("events.jsonl has {length} bytes, the checkpoint knows of {}", from.bytes);
            let folder = path.parent().unwrap_or(path).to_owned();
            return Err(Error::Resume { path: folder, problem });
        }
        check_lines(path, from.bytes)?;
        let placed = file.set_len(from.bytes).and_then(|()| file.seek(SeekFrom::End(0)));
        placed.map_err(fail)?;
        Self::start(path, file, from, QUEUE_EVENTS).map_err(fail)
    }

    fn start(path: &Path, file: File, from: EventsPosition, capacity: usize) -> io::Result<Self> {
        let (queue, lines) = sync_channel(capacity);
        let failure = Arc::new(Mutex::new(None));
        let shared = Arc::clone(&failure);
        let thread = std::thread::Builder::new().name("events".into()).spawn(move || {
            if let Err(error) = write_lines(&lines, file, from.bytes) {
                *shared.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        })?;
        Ok(Self {
            path: path.to_owned(),
            queue: Some(queue),
            thread: Some(thread),
            failure,
            started: Instant::now(),
            seconds_before: from.seconds,
            next_seq: from.seq,
            dropped: from.dropped,
        })
    }

    /// Hands an event to the writer, without waiting: dropped and counted when the queue is full.
    pub fn emit(&mut self, event: &Event) {
        let line = self.line(event);
        let Some(queue) = &self.queue else { return };
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            queue.try_send(Order::Line(line))
        {
            self.dropped += 1;
        }
    }

    /// Hands over an event that must not be lost, and waits for a place in the queue if need be.
    /// Not for the hot loop.
    pub fn emit_waiting(&mut self, event: &Event) {
        let line = self.line(event);
        let Some(queue) = &self.queue else { return };
        if queue.send(Order::Line(line)).is_err() {
            self.dropped += 1;
        }
    }

    fn line(&mut self, event: &Event) -> String {
        let seq = self.next_seq;
        self.next_seq += 1;
        let seconds = self.seconds();
        let record = Record { v: SCHEMA_VERSION, seq, seconds, event };
        // Serialising plain structs into a string cannot fail; an empty line is skipped by the writer.
        serde_json::to_string(&record).unwrap_or_default()
    }

    /// Seconds since the run started, without those between a kill and a resume.
    pub(crate) fn seconds(&self) -> f64 {
        self.seconds_before + self.started.elapsed().as_secs_f64()
    }

    /// Waits until every event so far is on the disk; where the file then stands.
    ///
    /// # Errors
    /// The disk refused a write.
    pub(crate) fn sync(&mut self) -> Result<EventsPosition> {
        let (sender, length) = sync_channel(1);
        let asked = self.queue.as_ref().map(|queue| queue.send(Order::Sync(sender)));
        let bytes = match (asked, length.recv_timeout(SYNC_TIMEOUT)) {
            (Some(Ok(())), Ok(bytes)) => bytes,
            _ => {
                self.check()?;
                let source = io::Error::other("the writing thread does not answer");
                return Err(Error::RunFolder { action: "write", path: self.path.clone(), source });
            }
        };
        let (seq, dropped) = (self.next_seq, self.dropped);
        Ok(EventsPosition { bytes, seq, dropped, seconds: self.seconds() })
    }

    /// Events lost so far.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Whether the writer still works.
    ///
    /// # Errors
    /// The disk refused a write; every event since is lost. Reported once.
    pub fn check(&self) -> Result<()> {
        match self.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            None => Ok(()),
            Some(source) => {
                Err(Error::RunFolder { action: "write", path: self.path.clone(), source })
            }
        }
    }

    /// Writes what is queued, and returns how many events were lost.
    ///
    /// # Errors
    /// The disk refused a write.
    pub fn close(mut self) -> Result<u64> {
        self.finish();
        self.check()?;
        Ok(self.dropped)
    }

    fn finish(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic there would be a bug of ours and was printed; the run's own result matters more.
            let _ = thread.join();
        }
    }
}

impl Drop for EventWriter {
    /// Lets the thread write what is queued; a failure is seen by `close` only.
    fn drop(&mut self) {
        self.finish();
    }
}

/// Looks for what a crash of the system, unlike one of the program, leaves in a file that was being
/// written: zero bytes where lines should be.
fn check_lines(path: &Path, bytes: u64) -> Result<()> {
    let fail = |source| Error::RunFolder { action: "read", path: path.to_owned(), source };
    let mut file = BufReader::new(File::open(path).map_err(fail)?).take(bytes);
    let (mut at, mut last) = (0, b'\n');
    loop {
        let read = file.fill_buf().map_err(fail)?;
        if let Some(zero) = read.iter().position(|byte| *byte == 0) {
            return Err(damaged(path, format!("byte {} is zero", at + zero)));
        }
        match read.last() {
            Some(byte) => last = *byte,
            None if last == b'\n' => return Ok(()),
            None => return Err(damaged(path, format!("no line ends at byte {at}"))),
        }
        let len = read.len();
        file.consume(len);
        at += len;
    }
}

fn damaged(path: &Path, problem: String) -> Error {
    let problem = format!("events.jsonl was changed or damaged: {problem}");
    Error::Resume { path: path.parent().unwrap_or(path).to_owned(), problem }
}

/// Writes until the queue is closed; flushes whenever it runs empty.
fn write_lines(orders: &Receiver<Order>, mut file: File, mut written: u64) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(WRITE_BYTES);
    loop {
        let order = match orders.try_recv() {
            Ok(order) => Some(order),
            Err(TryRecvError::Disconnected) => None,
            Err(TryRecvError::Empty) => {
                flush(&mut file, &mut buffer, &mut written)?;
                orders.recv().ok()
            }
        };
        match order {
            None => return flush(&mut file, &mut buffer, &mut written),
            Some(Order::Line(line)) if line.is_empty() => {}
            Some(Order::Line(line)) => {
                buffer.extend_from_slice(line.as_bytes());
                buffer.push(b'\n');
            }
            Some(Order::Sync(answer)) => {
                flush(&mut file, &mut buffer, &mut written)?;
                file.sync_data()?;
                // Who asked may have given up; the file is as it should be all the same.
                let _ = answer.send(written);
            }
        }
        if buffer.len() >= WRITE_BYTES {
            flush(&mut file, &mut buffer, &mut written)?;
        }
    }
}

/// Writes the buffer; when only a part of it fits, the file is cut after its last whole line.
fn flush(file: &mut File, buffer: &mut Vec<u8>, written: &mut u64) -> io::Result<()> {
    match file.write_all(buffer) {
        Ok(()) => {
            *written += buffer.len() as u64;
            buffer.clear();
            Ok(())
        }
        Err(error) => {
            let arrived = file.metadata().map_or(*written, |m| m.len()).saturating_sub(*written);
            let part = &buffer[..buffer.len().min(usize::try_from(arrived).unwrap_or(0))];
            let whole = part.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
            // The disk's refusal is what to report, also where the file cannot be cut (a device).
            let _ = file.set_len(*written + whole as u64);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anomaly(i: usize) -> Event {
        Event::Anomaly { env: i, round: 0, step: i, what: "x".repeat(100) }
    }

    #[test]
    fn every_line_is_one_numbered_json_object() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let mut writer = EventWriter::create(&path, Instant::now()).unwrap();
        for i in 0..1000 {
            writer.emit_waiting(&anomaly(i));
        }
        assert_eq!(writer.close().unwrap(), 0);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 1000);
        for (i, line) in text.lines().enumerate() {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(value["v"], SCHEMA_VERSION);
            assert_eq!(value["seq"], i);
            assert_eq!(value["event"], "anomaly");
            assert_eq!(value["env"], i);
        }
    }

    #[test]
    fn a_writer_that_falls_behind_drops_and_counts() {
        // A queue whose reader never reads.
        let (queue, _never_read) = sync_channel(2);
        let mut writer = EventWriter {
            path: PathBuf::new(),
            queue: Some(queue),
            thread: None,
            failure: Arc::default(),
            started: Instant::now(),
            seconds_before: 0.0,
            next_seq: 0,
            dropped: 0,
        };
        for i in 0..5 {
            writer.emit(&anomaly(i));
        }
        assert_eq!(writer.dropped(), 3);
    }

    #[test]
    fn a_full_disk_is_reported() {
        let path = Path::new("/dev/full");
        if !path.exists() {
            return;
        }
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        let mut writer = EventWriter::start(path, file, EventsPosition::default(), 8).unwrap();
        writer.emit_waiting(&anomaly(0));
        let error = writer.close().unwrap_err();
        assert_eq!(error.exit_code(), 1);
        assert!(error.remedy().unwrap().contains("free some space"), "{error}");
    }
}
