//! Writer of `events.jsonl`: a bounded queue and a thread.
//!
//! The inner loop never waits for the disk. When the writer falls behind, events of
//! [`EventWriter::emit`] are dropped and counted, and the gap shows in their numbers;
//! [`EventWriter::emit_waiting`] waits for room in the queue, and a checkpoint for the disk. When a
//! write fails, the file is cut after its last complete line, and the run gets the error at the
//! next step boundary.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use meristem_nn::ScoreKind;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::record::directory::{Directory, Watched};
use crate::record::events::{Event, Record, SCHEMA_VERSION};
use crate::record::run_folder::EVENTS;
use crate::record::score_keys::name_scores;
use crate::record::{lines, sealed};

/// Events that may wait in the queue; further ones are dropped.
pub(crate) const QUEUE_EVENTS: usize = 4096;
/// Bytes buffered before a write, unless the queue runs empty first.
const WRITE_BYTES: usize = 64 * 1024;
/// Time limit for writing all queued events.
const SYNC_TIMEOUT: Duration = Duration::from_secs(120);

/// A position in `events.jsonl`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EventsPosition {
    /// Length of the file. On resume, later events are cut off and happen again.
    pub(crate) bytes: u64,
    /// Number of the next event.
    pub(crate) seq: u64,
    /// Events lost so far.
    pub(crate) dropped: u64,
    /// Seconds since the run started, without the time between a kill and a resume.
    pub(crate) seconds: f64,
}

/// An order to the writer's thread.
#[derive(Debug)]
enum WriterOrder {
    /// Writes a line.
    Line(String),
    /// Sends the length of the file once all earlier lines are on the disk.
    Sync(SyncSender<u64>),
}

/// Writer of the events of one run.
#[derive(Debug)]
pub(crate) struct EventWriter {
    watched: Watched,
    queue: Option<SyncSender<WriterOrder>>,
    thread: Option<JoinHandle<()>>,
    failure: Arc<Mutex<Option<io::Error>>>,
    /// Queued events that a failed write has lost.
    unwritten: Arc<AtomicU64>,
    started: Instant,
    /// Seconds of this run before it was resumed.
    seconds_before: f64,
    /// Kind of the scores in events.
    score: ScoreKind,
    next_seq: u64,
    dropped: u64,
}

impl EventWriter {
    /// Sets the kind of the scores, which determines the keys of scores in later events.
    pub(crate) fn set_score(&mut self, score: ScoreKind) {
        self.score = score;
    }

    /// Creates the file in the folder of a run that started at `started`, and starts the writer's
    /// thread.
    ///
    /// # Errors
    /// The file or the thread cannot be created.
    pub(crate) fn create(run: &Directory, started: Instant) -> Result<Self> {
        let path = run.path().join(EVENTS);
        let fail = |source| Error::RunFolder { action: "write", path: path.clone(), source };
        // A run without a checkpoint starts again, and so do its events.
        run.remove_file(EVENTS).map_err(fail)?;
        let file = run.create_new(EVENTS).map_err(fail)?;
        let watched = Watched::new(run, EVENTS).map_err(fail)?;
        let from =
            EventsPosition { seconds: started.elapsed().as_secs_f64(), ..Default::default() };
        Self::start(watched, file, from, QUEUE_EVENTS).map_err(fail)
    }

    /// Continues the file in the folder of a run from a checkpoint, and cuts off later events.
    ///
    /// # Errors
    /// The file is shorter than the checkpoint says, is damaged, or cannot be written.
    pub(crate) fn resume(run: &Directory, from: EventsPosition) -> Result<Self> {
        let path = run.path().join(EVENTS);
        let fail = |source| Error::RunFolder { action: "resume", path: path.clone(), source };
        let refused = |problem| Error::Resume { path: run.path().to_owned(), problem };
        let file = run.open_writable(EVENTS).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => refused(format!("its {EVENTS}: {error}")),
            _ => fail(error),
        })?;
        let mut file = file.ok_or_else(|| fail(io::ErrorKind::NotFound.into()))?;
        let length = file.metadata().map_err(fail)?.len();
        if length < from.bytes {
            let problem =
                format!("events.jsonl has {length} bytes, its checkpoint needs {}", from.bytes);
            return Err(refused(problem));
        }
        let checked = lines::check(&file, from.bytes).map_err(fail)?;
        checked.and_then(|lines| lines.check_count(from.seq, from.dropped)).map_err(|problem| {
            refused(format!("events.jsonl was changed or damaged: {problem}"))
        })?;
        let placed = file.set_len(from.bytes).and_then(|()| file.seek(SeekFrom::End(0)));
        placed.map_err(fail)?;
        let watched = Watched::new(run, EVENTS).map_err(fail)?;
        Self::start(watched, file, from, QUEUE_EVENTS).map_err(fail)
    }

    fn start(
        watched: Watched,
        file: File,
        from: EventsPosition,
        capacity: usize,
    ) -> io::Result<Self> {
        let (queue, lines) = sync_channel(capacity);
        let failure = Arc::new(Mutex::new(None));
        let unwritten = Arc::new(AtomicU64::new(0));
        let (shared, lost) = (Arc::clone(&failure), Arc::clone(&unwritten));
        let thread = std::thread::Builder::new().name("events".into()).spawn(move || {
            let mut buffer = vec![];
            if let Err(error) = write_lines(&lines, file, from.bytes, &mut buffer) {
                *shared.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                lost.store(events_lost(&buffer, &lines), Ordering::Relaxed);
            }
        })?;
        Ok(Self {
            watched,
            queue: Some(queue),
            thread: Some(thread),
            failure,
            unwritten,
            started: Instant::now(),
            seconds_before: from.seconds,
            score: ScoreKind::Accuracy,
            next_seq: from.seq,
            dropped: from.dropped,
        })
    }

    /// Queues an event without waiting. If the queue is full, the event is dropped and counted.
    pub(crate) fn emit(&mut self, event: &Event) {
        let line = self.line(event);
        let Some(queue) = &self.queue else { return };
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            queue.try_send(WriterOrder::Line(line))
        {
            self.dropped += 1;
        }
    }

    /// Queues an event that must not be lost; waits if the queue is full. Not for the inner loop.
    pub(crate) fn emit_waiting(&mut self, event: &Event) {
        let line = self.line(event);
        let Some(queue) = &self.queue else { return };
        if queue.send(WriterOrder::Line(line)).is_err() {
            self.dropped += 1;
        }
    }

    fn line(&mut self, event: &Event) -> String {
        let seq = self.next_seq;
        self.next_seq += 1;
        let seconds = self.seconds();
        let record = Record { v: SCHEMA_VERSION, seq, seconds, event };
        // Serialising plain structs cannot fail; the writer skips empty lines.
        let line = serde_json::to_string(&record).unwrap_or_default();
        let mut line = name_scores(line, self.score);
        sealed::seal(&mut line, "");
        line
    }

    /// Seconds since the run started, without the time between a kill and a resume.
    pub(crate) fn seconds(&self) -> f64 {
        self.seconds_before + self.started.elapsed().as_secs_f64()
    }

    /// Waits until all events so far are on the disk. Returns the position in the file.
    ///
    /// # Errors
    /// A write failed, or the events were not on the disk after two minutes.
    pub(crate) fn sync(&mut self) -> Result<EventsPosition> {
        let (sender, length) = sync_channel(1);
        let asked = self.queue.as_ref().map(|queue| queue.send(WriterOrder::Sync(sender)));
        let bytes = match (asked, length.recv_timeout(SYNC_TIMEOUT)) {
            (Some(Ok(())), Ok(bytes)) => bytes,
            _ => {
                self.check()?;
                let source = io::Error::other("the writer's thread does not respond");
                return Err(self.failed(source));
            }
        };
        let (seq, dropped) = (self.next_seq, self.dropped);
        Ok(EventsPosition { bytes, seq, dropped, seconds: self.seconds() })
    }

    /// Checks that the writer still works, and that the file is still in its folder.
    ///
    /// # Errors
    /// A write failed, and all events since are lost; reported once. The file was removed or
    /// replaced, with the folder of the run or without it.
    pub(crate) fn check(&self) -> Result<()> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        failure.map_or_else(|| self.watched.check(), Err).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::RunFolder { action: "write", path: self.watched.path(), source }
    }

    /// Writes the queued events. Returns the number of lost events and the error of a failed write,
    /// after which queued events count as lost.
    pub(crate) fn close(mut self) -> (u64, Result<()>) {
        self.finish();
        let unwritten = self.unwritten.load(Ordering::Relaxed);
        (self.dropped + unwritten, self.check())
    }

    fn finish(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic there is a bug and was printed; the run's own result matters more.
            let _ = thread.join();
        }
    }
}

impl Drop for EventWriter {
    /// Writes the queued events. Only `close` reports a failure.
    fn drop(&mut self) {
        self.finish();
    }
}

/// Number of events that a failed write has lost: lines in the buffer and later ones in the queue,
/// until it is closed.
fn events_lost(buffer: &[u8], orders: &Receiver<WriterOrder>) -> u64 {
    let unwritten = buffer.iter().filter(|byte| **byte == b'\n').count();
    let queued = orders.iter().filter(|order| matches!(order, WriterOrder::Line(_))).count();
    (unwritten + queued) as u64
}

/// Writes lines until the queue is closed; flushes whenever the queue is empty. After an error
/// `buffer` has the lines that were not written.
fn write_lines(
    orders: &Receiver<WriterOrder>,
    mut file: File,
    mut written: u64,
    buffer: &mut Vec<u8>,
) -> io::Result<()> {
    loop {
        let order = match orders.try_recv() {
            Ok(order) => Some(order),
            Err(TryRecvError::Disconnected) => None,
            Err(TryRecvError::Empty) => {
                flush(&mut file, buffer, &mut written)?;
                orders.recv().ok()
            }
        };
        match order {
            None => return flush(&mut file, buffer, &mut written),
            Some(WriterOrder::Line(line)) if line.is_empty() => {}
            Some(WriterOrder::Line(line)) => {
                buffer.extend_from_slice(line.as_bytes());
                buffer.push(b'\n');
            }
            Some(WriterOrder::Sync(answer)) => {
                flush(&mut file, buffer, &mut written)?;
                file.sync_data()?;
                // The requester may have given up; the file is still complete.
                let _ = answer.send(written);
            }
        }
        if buffer.len() >= WRITE_BYTES {
            flush(&mut file, buffer, &mut written)?;
        }
    }
}

/// Writes the buffer. If only a part fits, cuts the file after its last complete line, and leaves
/// the other lines in the buffer.
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
            // The failed write is reported even if the file cannot be truncated, such as a device.
            let _ = file.set_len(*written + whole as u64);
            buffer.drain(..whole);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn watched(folder: PathBuf, name: &'static str) -> Watched {
        Watched::new(&Directory::open(&folder).unwrap(), name).unwrap()
    }

    fn anomaly(i: usize) -> Event {
        Event::Anomaly { env: i, round: 0, step: i, what: "x".repeat(100) }
    }

    #[test]
    fn every_line_is_one_numbered_json_object() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let run = Directory::open(folder.path()).unwrap();
        let mut writer = EventWriter::create(&run, Instant::now()).unwrap();
        for i in 0..1000 {
            writer.emit_waiting(&anomaly(i));
        }
        let (lost, closed) = writer.close();
        assert_eq!((lost, closed.unwrap()), (0, ()));
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
        // A queue that is never read.
        let (queue, _never_read) = sync_channel(2);
        let mut writer = EventWriter {
            watched: watched(std::env::temp_dir(), "none"),
            queue: Some(queue),
            thread: None,
            failure: Arc::default(),
            unwritten: Arc::default(),
            started: Instant::now(),
            seconds_before: 0.0,
            score: ScoreKind::Accuracy,
            next_seq: 0,
            dropped: 0,
        };
        for i in 0..5 {
            writer.emit(&anomaly(i));
        }
        assert_eq!(writer.dropped, 3);
    }

    #[test]
    fn lines_in_the_buffer_and_in_the_queue_are_lost() {
        let (queue, orders) = sync_channel(3);
        queue.send(WriterOrder::Line("{}".into())).unwrap();
        queue.send(WriterOrder::Sync(sync_channel(1).0)).unwrap();
        queue.send(WriterOrder::Line("{}".into())).unwrap();
        drop(queue);
        assert_eq!(events_lost(b"{}\n{}\n{}\n", &orders), 5);
    }

    #[test]
    fn a_full_disk_is_reported() {
        let path = Path::new("/dev/full");
        if !path.exists() {
            return;
        }
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        let watched = watched("/dev".into(), "full");
        let mut writer = EventWriter::start(watched, file, EventsPosition::default(), 8).unwrap();
        (0..5).for_each(|step| writer.emit_waiting(&anomaly(step)));
        let (lost, closed) = writer.close();
        assert_eq!(lost, 5, "events of the failed write, and later ones in the queue");
        let error = closed.unwrap_err();
        assert!(matches!(error, Error::RunFolder { action: "write", .. }), "{error:?}");
        assert!(error.to_string().starts_with("cannot write /dev/full: "), "{error}");
        assert_eq!(error.exit_code(), 1);
        assert!(error.remedy().unwrap().contains("free some space"), "{error}");
    }
}
