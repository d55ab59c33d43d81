//! Sequential reading of a file, plain or gzip, with the current offset for error messages.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use flate2::bufread::GzDecoder;
use meristem_device::named_file;

use crate::error::{Error, Mismatch, Result, damaged};

/// Size limit of a file of names or numbers.
const SMALL_BYTES_MAX: u64 = 1 << 20;
/// Largest compression ratio of deflate; a header that claims more is wrong.
pub(super) const DEFLATE_RATIO_MAX: u64 = 1032;

/// First bytes of a Git LFS pointer, which a clone without LFS has in place of a file.
const POINTER_START: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Description of a file that begins with `start`, if it is a Git LFS pointer.
pub(crate) fn pointer(start: &[u8]) -> Option<Mismatch> {
    let is_pointer = start.starts_with(POINTER_START);
    is_pointer.then(|| {
        Mismatch::new("the file", "the data", "a Git LFS pointer to them")
            .remedy("fetch them with `git lfs pull`")
    })
}

/// Opens a file, and refuses a Git LFS pointer.
pub(crate) fn open_file(path: &Path) -> Result<File> {
    let mut file = named_file::open(path).map_err(Error::io("open", path))?;
    let mut start = [0; POINTER_START.len()];
    let got = read_up_to(&mut file, &mut start).map_err(Error::io("read", path))?;
    file.rewind().map_err(Error::io("read", path))?;
    pointer(&start[..got]).map_or(Ok(file), |pointer| Err(pointer.in_layout(path)))
}

/// The contents of a file of names and numbers, at most 1 MiB.
pub(crate) fn read_small(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = vec![];
    let mut file = open_file(path)?.take(SMALL_BYTES_MAX + 1);
    file.read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    if bytes.len() as u64 > SMALL_BYTES_MAX {
        let expected = format!("at most {SMALL_BYTES_MAX} bytes");
        return Err(damaged(path, SMALL_BYTES_MAX, "the file", expected, "more"));
    }
    Ok(bytes)
}

/// The decompressed bytes of gzip members, one after another. Zeros after a member are padding, as
/// for `gzip`: tapes and block devices leave them.
struct Gzip<R> {
    /// `None` at the end.
    member: Option<GzDecoder<R>>,
}

impl<R: io::BufRead> Read for Gzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(mut member) = self.member.take() {
            let count = member.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                self.member = Some(member);
                return Ok(count);
            }
            let mut raw = member.into_inner();
            self.member = skip_zeros(&mut raw)?.then(|| GzDecoder::new(raw));
        }
        Ok(0)
    }
}

/// Skips zeros; returns whether another byte follows.
fn skip_zeros(raw: &mut impl io::BufRead) -> io::Result<bool> {
    loop {
        let bytes = raw.fill_buf()?;
        let (zeros, all) = (bytes.iter().take_while(|byte| **byte == 0).count(), bytes.len());
        raw.consume(zeros);
        if zeros < all || all == 0 {
            return Ok(all > 0);
        }
    }
}

/// Source of bytes.
#[derive(Clone, Debug)]
pub(crate) enum Bytes {
    /// A file on disk.
    File(PathBuf),
    /// Bytes in the binary, with the name to use in errors.
    Embedded(&'static str, &'static [u8]),
}

/// A forward reader with its offset (in the decompressed bytes) and an upper bound of its length
/// that does not depend on any header.
pub(crate) struct Input<'a> {
    path: PathBuf,
    reader: Box<dyn Read + 'a>,
    offset: u64,
    /// Exact for plain bytes, a bound for compressed ones; no limit for [`Input::part`].
    len_max: u64,
    compressed: bool,
}

impl<'a> Input<'a> {
    /// Opens `bytes`; gzip is recognised by its first two bytes, for any name.
    pub(crate) fn open(bytes: &Bytes) -> Result<Self> {
        match bytes {
            Bytes::File(path) => {
                let mut file = open_file(path)?;
                let len = file.metadata().map_err(Error::io("read", path))?.len();
                let mut magic = [0; 2];
                let got = read_up_to(&mut file, &mut magic).map_err(Error::io("read", path))?;
                file.rewind().map_err(Error::io("read", path))?;
                let gzip = got == 2 && magic == [0x1f, 0x8b];
                Ok(Self::new(path.clone(), BufReader::with_capacity(1 << 16, file), len, gzip))
            }
            Bytes::Embedded(name, bytes) => {
                let gzip = bytes.starts_with(&[0x1f, 0x8b]);
                Ok(Self::new(PathBuf::from(name), *bytes, bytes.len() as u64, gzip))
            }
        }
    }

    /// Opens a file of a format that is never compressed.
    pub(crate) fn open_plain(path: &Path) -> Result<Self> {
        let file = open_file(path)?;
        let len = file.metadata().map_err(Error::io("read", path))?.len();
        Ok(Self::new(path.to_path_buf(), BufReader::with_capacity(1 << 16, file), len, false))
    }

    /// Wraps a reader whose length is at most `len_max` (a member of an archive).
    pub(crate) fn member(path: PathBuf, reader: impl Read + 'a, len_max: u64) -> Self {
        Self { path, reader: Box::new(reader), offset: 0, len_max, compressed: true }
    }

    /// Wraps a part of a plain file that begins at `offset` and whose length has been checked.
    pub(crate) fn part(path: PathBuf, reader: impl Read + 'a, offset: u64) -> Self {
        Self { path, reader: Box::new(reader), offset, len_max: u64::MAX, compressed: false }
    }

    fn new(path: PathBuf, raw: impl io::BufRead + 'a, len: u64, gzip: bool) -> Self {
        let reader: Box<dyn Read + 'a> =
            if gzip { Box::new(Gzip { member: Some(GzDecoder::new(raw)) }) } else { Box::new(raw) };
        let len_max = if gzip { len.saturating_mul(DEFLATE_RATIO_MAX) } else { len };
        Self { path, reader, offset: 0, len_max, compressed: gzip }
    }

    /// The name to use in errors.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Offset of the next byte.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Fills `buffer`; an earlier end of the file is an error at the offset of the end.
    pub(crate) fn read_exact(&mut self, buffer: &mut [u8], what: &str) -> Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.reader.read(&mut buffer[filled..]) {
                Ok(0) => {
                    let offset = self.offset + filled as u64;
                    let missing = format!("{} more bytes", buffer.len() - filled);
                    return Err(damaged(&self.path, offset, what, missing, "the end of the file"));
                }
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(filled, what, error)),
            }
        }
        self.offset += filled as u64;
        Ok(())
    }

    /// Reads a big-endian u32.
    pub(crate) fn read_u32(&mut self, what: &str) -> Result<u32> {
        let mut bytes = [0; 4];
        self.read_exact(&mut bytes, what)?;
        Ok(u32::from_be_bytes(bytes))
    }

    /// Checks a header's claim (at `header_offset`) that the file is `total` bytes long (`None` if
    /// the number overflows), before anything is allocated. A plain file must have this length; a
    /// compressed one must be able to have it, by the largest compression ratio.
    pub(crate) fn check_claim(&self, header_offset: u64, total: Option<u64>) -> Result<()> {
        let wrong = |expected: String, got: String| {
            Err(damaged(&self.path, header_offset, "the length given by the header", expected, got))
        };
        match total {
            Some(total) if self.compressed && total <= self.len_max => Ok(()),
            Some(total) if !self.compressed && total == self.len_max => Ok(()),
            Some(total) if self.compressed => {
                let most = format!("at most {} bytes (the file is compressed)", self.len_max);
                wrong(most, format!("{total} bytes"))
            }
            Some(total) => wrong(
                format!("the {} bytes that the file has", self.len_max),
                format!("{total} bytes"),
            ),
            None => wrong("a length that fits 64 bits".into(), "more".into()),
        }
    }

    /// Expects the end of the file here. Reading it also makes gzip compare its checksum.
    pub(crate) fn expect_end(&mut self) -> Result<()> {
        let mut byte = [0];
        match read_up_to(&mut self.reader, &mut byte) {
            Ok(0) => Ok(()),
            Ok(_) => {
                let (what, expected) = ("the end of the data", "the end of the file");
                Err(damaged(&self.path, self.offset, what, expected, "more bytes"))
            }
            Err(error) => Err(self.failed(0, "the end of the data", error)),
        }
    }

    fn failed(&self, filled: usize, what: &str, error: io::Error) -> Error {
        // Decoders report damage as one of these kinds; other kinds come from the operating system.
        let kinds = [
            io::ErrorKind::InvalidData,
            io::ErrorKind::InvalidInput,
            io::ErrorKind::UnexpectedEof,
            io::ErrorKind::Other,
        ];
        if self.compressed && kinds.contains(&error.kind()) {
            let offset = self.offset + filled as u64;
            return damaged(&self.path, offset, what, "sound compressed data", error.to_string());
        }
        Error::Io { operation: "read", path: self.path.clone(), source: error }
    }
}

/// Reads until `buffer` is full or the input ends.
fn read_up_to(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match reader.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// A device has no end, and has a length of 0.
    #[test]
    fn only_a_plain_file_is_opened() {
        let error = open_file(Path::new("/dev/zero")).unwrap_err();
        assert!(matches!(error, Error::Io { operation: "open", .. }), "{error:?}");
        let text = std::error::Error::source(&error).map(ToString::to_string).unwrap();
        assert_eq!(text, "expected a plain file, got a pipe or a device");
    }
}
