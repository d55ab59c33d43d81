//! Events of a file that may still grow.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::record::events::{Event, SCHEMA_VERSION};
use crate::record::lines::{LINE_BYTES_MAX, LineReader};
use crate::record::plain_file;
use crate::record::sealed::{self, Seal};

/// Total size of damaged lines after which reading stops: the file is not an events file, and a
/// sparse file may be larger than a disk.
const DAMAGED_BYTES_MAX: u64 = 64 << 20;

/// Bytes before the position that are compared, to detect a file that was truncated and rewritten.
const ANCHOR: usize = 128;

/// An event with its number and time.
#[derive(Clone, Debug, PartialEq)]
pub struct EventLine {
    /// Number of the event in its run.
    pub seq: u64,
    /// Seconds since the run started.
    pub seconds: f64,
    /// The event.
    pub event: Event,
}

/// Lines that were not understood, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Lines that are no event: not JSON, without the keys of an event, longer than 4 MiB, or with
    /// a text that differs from its checksum.
    pub damaged: u64,
    /// Events that are unknown to this version.
    pub unknown: u64,
    /// Lines of a later version of the format.
    pub newer: u64,
    /// Offset of the first byte that is never read, after 64 MiB of damaged lines.
    pub unread_from: Option<u64>,
}

/// Point at which a call of [`EventTail::read`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// The limit: there is more to read.
    Limit,
    /// The end of the file, except for an incomplete last line, which is read once it is complete;
    /// or [`Skipped::unread_from`].
    End,
    /// The file was cut or replaced since the last call, as by a resumed run. Events so far are
    /// void; the next call starts from the beginning.
    Restarted,
}

/// Reader of an `events.jsonl`, which may still be growing. It opens the file for each read, so
/// that it notices when the file was removed.
#[derive(Debug)]
pub struct EventTail {
    path: PathBuf,
    /// Bytes of the file that were read.
    at: u64,
    /// The last bytes before `at`.
    anchor: Vec<u8>,
    /// Whether `at` is inside a line that is skipped because of its length.
    in_long_line: bool,
    /// Whether a line so far had a checksum; then all later lines must have one.
    is_sealed: bool,
    /// Whether `batch_completed` events are read.
    with_batches: bool,
    skipped: Skipped,
    /// Bytes of damaged lines so far.
    damaged_bytes: u64,
}

/// Keys of every line.
#[derive(Deserialize)]
struct LineKeys<'a> {
    v: u32,
    seq: u64,
    seconds: f64,
    #[serde(borrow)]
    event: Cow<'a, str>,
}

impl EventTail {
    /// A reader from the first event on. It skips `batch_completed`, of which there may be a
    /// thousand for every other event.
    pub fn new(path: &Path) -> Self {
        Self {
            path: path.into(),
            at: 0,
            anchor: vec![],
            in_long_line: false,
            is_sealed: false,
            with_batches: false,
            skipped: Skipped::default(),
            damaged_bytes: 0,
        }
    }

    /// Reads `batch_completed`, too.
    pub fn with_batches(self) -> Self {
        Self { with_batches: true, ..self }
    }

    /// A reader from the first line that begins in the last `bytes` bytes.
    pub(crate) fn near_end(path: &Path, bytes: u64) -> Self {
        let from = path.metadata().map_or(0, |there| there.len().saturating_sub(bytes));
        // `from` may be inside a line: bytes up to the next line are skipped, as in a long line.
        Self { at: from, in_long_line: from > 0, ..Self::new(path) }
    }

    /// Bytes of the file before the current position.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// Lines that were not understood so far.
    pub fn skipped(&self) -> Skipped {
        self.skipped
    }

    /// Reads about `bytes_max` bytes from the current position, and calls `each` with every event
    /// in them.
    ///
    /// # Errors
    /// [`Error::Unreadable`]: there is no such file, or it cannot be read.
    pub fn read(&mut self, bytes_max: u64, each: &mut dyn FnMut(EventLine)) -> Result<Reached> {
        self.try_read(bytes_max, each).map_err(|error| {
            let problem = match error.kind() {
                io::ErrorKind::NotFound => "there is no such file".into(),
                _ => error.to_string(),
            };
            Error::Unreadable { path: self.path.clone(), problem }
        })
    }

    fn try_read(&mut self, bytes_max: u64, each: &mut dyn FnMut(EventLine)) -> io::Result<Reached> {
        let file = plain_file::open(&self.path)?;
        let mut file = file.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        if !self.continues(&mut file)? {
            let with_batches = self.with_batches;
            *self = Self { with_batches, ..Self::new(&self.path) };
            return Ok(Reached::Restarted);
        }
        let end = self.at.saturating_add(bytes_max);
        let mut lines = LineReader::new(file);
        while self.at < end {
            if self.damaged_bytes >= DAMAGED_BYTES_MAX {
                self.skipped.unread_from = Some(self.at);
                return Ok(Reached::End);
            }
            let Some(piece) = lines.next_piece()? else { return Ok(Reached::End) };
            let (bytes, is_ended) = (piece.len() as u64, piece.last() == Some(&b'\n'));
            let is_too_long = self.in_long_line || (!is_ended && bytes == LINE_BYTES_MAX);
            if !is_ended && !is_too_long {
                return Ok(Reached::End);
            }
            self.at += bytes;
            self.anchor = piece[piece.len().saturating_sub(ANCHOR)..].to_vec();
            if is_too_long {
                self.skipped.damaged += u64::from(!self.in_long_line);
                self.damaged_bytes += bytes;
                self.in_long_line = !is_ended;
            } else if let Some(line) = self.parse(piece) {
                each(line);
            }
        }
        Ok(Reached::Limit)
    }

    /// Whether the file still begins with the bytes read so far; if so, moves to position `at`.
    fn continues(&self, file: &mut File) -> io::Result<bool> {
        if file.metadata()?.len() < self.at {
            return Ok(false);
        }
        file.seek(SeekFrom::Start(self.at - self.anchor.len() as u64))?;
        let mut there = vec![0; self.anchor.len()];
        match file.read_exact(&mut there) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            read => read.map(|()| there == self.anchor),
        }
    }

    /// Parses the event of a line; a line without one is counted in `skipped`.
    fn parse(&mut self, line: &[u8]) -> Option<EventLine> {
        if line.trim_ascii().is_empty() {
            return None;
        }
        let seal = sealed::check(line, SCHEMA_VERSION);
        // An earlier build wrote lines without checksums, which are only valid before the first
        // line with a checksum.
        let is_whole = seal == Seal::Whole || (seal == Seal::Absent && !self.is_sealed);
        self.is_sealed |= seal == Seal::Whole;
        let head = serde_json::from_slice::<LineKeys<'_>>(line).ok().filter(|_| is_whole);
        let Some(head) = head else {
            self.skipped.damaged += 1;
            self.damaged_bytes += line.len() as u64;
            return None;
        };
        if head.v > SCHEMA_VERSION {
            self.skipped.newer += 1;
            return None;
        }
        if head.event == "batch_completed" && !self.with_batches {
            return None;
        }
        match serde_json::from_slice(line) {
            Ok(Event::Unknown) => self.skipped.unknown += 1,
            Ok(event) => return Some(EventLine { seq: head.seq, seconds: head.seconds, event }),
            Err(_) => self.skipped.damaged += 1,
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const ALL: u64 = u64::MAX;

    fn round(seq: u64) -> String {
        format!(
            "{{\"v\":1,\"seq\":{seq},\"seconds\":0.5,\"event\":\"round_started\",\"round\":0}}\n"
        )
    }

    fn read(tail: &mut EventTail, bytes: u64) -> (Reached, Vec<u64>) {
        let mut seen = vec![];
        let reached = tail.read(bytes, &mut |line| seen.push(line.seq)).unwrap();
        (reached, seen)
    }

    #[test]
    fn a_growing_file_is_read_on_and_a_torn_line_once_it_is_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut tail = EventTail::new(file.path());
        let third = round(2);
        file.write_all((round(0) + &round(1) + &third[..20]).as_bytes()).unwrap();
        assert_eq!(read(&mut tail, 1), (Reached::Limit, vec![0]));
        assert_eq!(read(&mut tail, ALL), (Reached::End, vec![1]));
        assert_eq!(read(&mut tail, ALL), (Reached::End, vec![]));
        file.write_all(&third.as_bytes()[20..]).unwrap();
        assert_eq!(read(&mut tail, ALL), (Reached::End, vec![2]));
        assert_eq!(tail.skipped(), Skipped::default());
    }

    #[test]
    fn lines_that_are_no_events_are_counted() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let later = round(7).replace("\"v\":1", "\"v\":9");
        let other = round(8).replace("round_started", "comet_seen");
        let batch = "{\"v\":1,\"seq\":9,\"seconds\":1,\"event\":\"batch_completed\",\"env\":0,\
                     \"round\":0,\"step\":0,\"batch\":0,\"loss\":null}\n";
        let long = "x".repeat(LINE_BYTES_MAX as usize + 100) + "\n";
        let text = ["\u{0}\u{0}\n", "{}\n", "\n", &later, &other, batch, &long, &round(10)];
        file.write_all(text.concat().as_bytes()).unwrap();
        file.write_all(b"\xff\xfe\n").unwrap();
        let mut tail = EventTail::new(file.path());
        assert_eq!(read(&mut tail, ALL), (Reached::End, vec![10]));
        let expected = Skipped { damaged: 4, unknown: 1, newer: 1, unread_from: None };
        assert_eq!(tail.skipped(), expected);
        let mut tail = EventTail::new(file.path()).with_batches();
        assert_eq!(read(&mut tail, ALL).1, [9, 10], "a loss that is not finite is null");
    }

    /// A changed digit leaves a line that can be parsed.
    #[test]
    fn lines_that_differ_from_their_checksum_are_damaged() {
        let with_checksum = |seq| {
            let mut line = round(seq);
            sealed::seal(&mut line, "");
            line + "\n"
        };
        let changed = with_checksum(1).replace("\"round\":0", "\"round\":7");
        let text = with_checksum(0) + &changed + &round(2) + &with_checksum(3);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let mut tail = EventTail::new(file.path());
        assert_eq!(read(&mut tail, ALL), (Reached::End, vec![0, 3]));
        assert_eq!(tail.skipped().damaged, 2, "a changed line, and one without a checksum");
    }

    /// A resumed run cuts its events after the checkpoint and writes on.
    #[test]
    fn a_file_that_was_cut_is_read_anew() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let write = |text: String| std::fs::write(file.path(), text).unwrap();
        for changed in [round(0), round(0) + &round(3) + &round(4)] {
            write(round(0) + &round(1));
            let mut tail = EventTail::new(file.path());
            assert_eq!(read(&mut tail, ALL).1, [0, 1]);
            write(changed);
            assert_eq!(read(&mut tail, ALL), (Reached::Restarted, vec![]));
            assert_eq!(read(&mut tail, ALL).1[0], 0);
        }
    }

    #[test]
    fn near_the_end_the_first_part_of_a_line_is_no_damage() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        (0..100).for_each(|seq| file.write_all(round(seq).as_bytes()).unwrap());
        let mut tail = EventTail::near_end(file.path(), 150);
        assert_eq!(read(&mut tail, ALL), (Reached::End, vec![98, 99]));
        assert_eq!(tail.skipped(), Skipped::default());
        let mut whole = EventTail::near_end(file.path(), 1 << 20);
        assert_eq!(read(&mut whole, ALL).1.len(), 100);
    }

    /// A line without an end, as in a sparse file, is read in bounded pieces, and reading stops
    /// after a limit of bytes.
    #[test]
    fn a_line_without_an_end_is_left_unread() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(round(0).as_bytes()).unwrap();
        file.as_file().set_len(1 << 28).unwrap();
        let mut tail = EventTail::new(file.path());
        assert_eq!(read(&mut tail, 8 << 20), (Reached::Limit, vec![0]));
        assert!((8 << 20..13 << 20).contains(&tail.position()), "{}", tail.position());
        assert_eq!(read(&mut tail, ALL), (Reached::End, vec![]));
        let unread = tail.skipped().unread_from.unwrap();
        assert!((64 << 20..65 << 20).contains(&unread), "{unread}");
        assert_eq!((read(&mut tail, ALL), tail.position()), ((Reached::End, vec![]), unread));
        // Many damaged lines with ends reach the same limit.
        let zeros = vec![0; 1 << 20];
        let file = tempfile::NamedTempFile::new().unwrap();
        (0..80).for_each(|_| {
            (&file).write_all(&zeros).unwrap();
            (&file).write_all(b"\n").unwrap();
        });
        let mut tail = EventTail::new(file.path());
        assert_eq!(read(&mut tail, ALL), (Reached::End, vec![]));
        assert_eq!(tail.skipped().damaged, 64);
        // A rewritten file is read again.
        std::fs::write(file.path(), round(3)).unwrap();
        assert_eq!(read(&mut tail, ALL).0, Reached::Restarted);
        assert_eq!(read(&mut tail, ALL), (Reached::End, vec![3]));
        assert_eq!(tail.skipped(), Skipped::default());
    }

    #[test]
    fn what_is_no_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        for (path, words) in [
            (folder.path().join("none"), "there is no such file"),
            (folder.path().into(), "expected a plain file, got a folder"),
        ] {
            let error = EventTail::new(&path).read(ALL, &mut |_| {}).unwrap_err();
            assert!(matches!(error, Error::Unreadable { .. }), "{error:?}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
