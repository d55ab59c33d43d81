//! Lines of an `events.jsonl`: reading them in bounded memory, and their check. Each line has its
//! checksum, and a number above that of the line before.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};

use serde::Deserialize;

use crate::record::events::SCHEMA_VERSION;
use crate::record::sealed::{self, Seal};

/// Longest line that is read, in bytes. The longest that a run writes are thousands of bytes.
pub(crate) const LINE_BYTES_MAX: u64 = 4 << 20;

/// Counts of whole lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lines {
    /// Number of lines.
    pub(crate) count: u64,
    /// Number of lines with a checksum. If an earlier build began the file, its first lines have
    /// none.
    pub(crate) sealed: u64,
    /// Number of the event that follows.
    pub(crate) next_seq: u64,
}

impl Lines {
    /// Checks that no line is missing before event number `seq`. Of the events before it, `dropped`
    /// were never written. A file that an earlier build began is not checked.
    ///
    /// # Errors
    /// A description of the problem.
    pub(crate) fn check_count(self, seq: u64, dropped: u64) -> Result<Self, String> {
        let expected = seq.saturating_sub(dropped);
        if self.sealed < self.count || (self.count == expected && self.next_seq <= seq) {
            return Ok(self);
        }
        Err(format!("it has {} lines, expected {expected}", self.count))
    }

    /// Counts a line that begins at byte `at`.
    fn add(&mut self, line: &[u8], at: u64) -> Result<(), String> {
        #[derive(Deserialize)]
        struct SeqKey {
            seq: u64,
        }
        if let Some(zero) = line.iter().position(|byte| *byte == 0) {
            // A system crash during a write leaves zeros.
            return Err(format!("byte {} is zero", at + zero as u64));
        }
        if line.last() != Some(&b'\n') {
            return Err(format!("no line ends at byte {}", at + line.len() as u64));
        }
        match sealed::check(line, SCHEMA_VERSION) {
            Seal::Broken => return Err(sealed::BROKEN.into()),
            Seal::Absent if self.sealed > 0 => {
                return Err("it has no checksum, but a line before it has one".into());
            }
            Seal::Absent => {}
            Seal::Whole => {
                let SeqKey { seq } = serde_json::from_slice(line).map_err(|e| e.to_string())?;
                if seq < self.next_seq {
                    return Err(format!("its `seq` is {seq}, expected {} or more", self.next_seq));
                }
                self.next_seq = seq + 1;
                self.sealed += 1;
            }
        }
        self.count += 1;
        Ok(())
    }
}

/// Reader of a file line by line, in bounded memory.
#[derive(Debug)]
pub(crate) struct LineReader<R> {
    reader: R,
    piece: Vec<u8>,
}

impl<R: Read> LineReader<BufReader<R>> {
    /// A reader from the position of `reader` on.
    pub(crate) fn new(reader: R) -> Self {
        Self { reader: BufReader::with_capacity(1 << 16, reader), piece: vec![] }
    }

    /// The next line with its end, or the next [`LINE_BYTES_MAX`] bytes of a longer one. The last
    /// piece of a file may lack the end of a line. `None` at the end of the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn next_piece(&mut self) -> io::Result<Option<&[u8]>> {
        self.piece.clear();
        let mut piece = self.reader.by_ref().take(LINE_BYTES_MAX);
        let read = piece.read_until(b'\n', &mut self.piece)?;
        Ok((read > 0).then_some(&self.piece[..]))
    }
}

/// Checks the first `bytes` bytes of a file, which end with a line. The inner error is a
/// description of the damage with its place.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn check(mut file: &File, bytes: u64) -> io::Result<Result<Lines, String>> {
    file.seek(SeekFrom::Start(0))?;
    let mut reader = LineReader::new(file.take(bytes));
    let (mut lines, mut at) = (Lines::default(), 0);
    while let Some(line) = reader.next_piece()? {
        if let Err(problem) = lines.add(line, at) {
            return Ok(Err(format!("line {}: {problem}", lines.count + 1)));
        }
        at += line.len() as u64;
    }
    Ok(Ok(lines))
}

/// Number of lines that contain `mark`.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn count(file: &File, mark: &[u8]) -> io::Result<usize> {
    let (mut reader, mut found) = (LineReader::new(file), 0);
    while let Some(line) = reader.next_piece()? {
        found += usize::from(line.windows(mark.len()).any(|window| window == mark));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn line(seq: u64) -> String {
        let mut line = format!("{{\"v\":1,\"seq\":{seq},\"loss\":0.5}}");
        sealed::seal(&mut line, "");
        line + "\n"
    }

    fn checked(text: &str) -> Result<Lines, String> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        check(&file, text.len() as u64).unwrap()
    }

    #[test]
    fn damage_is_named_with_its_line() {
        let whole: String = (0..5).map(line).collect();
        let lines = checked(&whole).unwrap();
        assert_eq!(lines, Lines { count: 5, sealed: 5, next_seq: 5 });
        lines.check_count(5, 0).unwrap();
        lines.check_count(6, 1).unwrap();
        lines.check_count(6, 0).unwrap_err();
        let expect_problem = |text: &str, words: &str| {
            let problem = checked(text).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        };
        expect_problem(&whole.replacen("0.5", "0.6", 1), "line 1: its text differs");
        expect_problem(&(line(0) + &line(2) + &line(1)), "line 3: its `seq` is 1, expected 3");
        expect_problem(&(line(0) + &line(0)), "line 2: its `seq` is 0");
        expect_problem(&(line(0) + "{\"v\":1,\"seq\":1}\n"), "line 2: it has no checksum");
        expect_problem(&whole[..whole.len() - 1], "no line ends at byte");
        expect_problem(&(line(0) + "\0\0\n"), "is zero");
        expect_problem(&format!("{}\n", "x".repeat(5 << 20)), "no line ends at byte");
        let missing: String = [0, 1, 3, 4].map(line).concat();
        let problem = checked(&missing).unwrap().check_count(5, 0).unwrap_err();
        assert_eq!(problem, "it has 4 lines, expected 5");
    }

    #[test]
    fn a_file_that_an_earlier_build_began_is_read() {
        let older = "{\"v\":1,\"seq\":0}\n{\"v\":1,\"seq\":1}\n";
        let lines = checked(&(older.to_string() + &line(2))).unwrap();
        assert_eq!(lines, Lines { count: 3, sealed: 1, next_seq: 3 });
        lines.check_count(9, 0).unwrap();
    }
}
