//! Cache of decoded images on disk, so that a large dataset of image files is decoded once.
//!
//! A cache file holds the images of one split, and the name, identity and checksum of each image
//! file. It is used if no image file has changed. An image file with another identity is compared
//! by its checksum; if all checksums are equal, the cache file is written again with the new
//! identities. The cache only saves time: a cache file that is damaged, or cannot be read or
//! written, is reported and otherwise ignored.
//!
//! A cache file is written under another name and renamed, so that processes may share the folder.
//! Its format is: pixels, a description as JSON, the length of the description (u64), the CRC-32 of
//! all bytes before, and `MAGIC`; numbers are little-endian.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use super::identity;
use super::image_file::ImageStamp;
use super::listing::ImageFile;
use super::{OnBadFile, Sink};
use crate::error::{Error, Mismatch, Result};
use crate::notes;
use crate::targets::TargetChunk;

/// Last bytes of a cache file, with the version of the format.
const MAGIC: &[u8; 8] = b"MRSTMIM2";
/// Bytes after the description: its length, checksum, magic.
const END: usize = 8 + 4 + 8;
/// Limit of the bytes of all cache files together; the least recently used are removed first.
pub const BYTES_MAX: u64 = 10 << 30;
/// Minimum number of image files for which a split is kept; fewer are decoded in less than a
/// second.
pub(crate) const FILES_MIN: usize = 1000;
/// Age from which an unfinished file counts as left behind by a killed process.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);
/// Largest number of threads that compare image files; more would only wait for the disk.
const COMPARE_THREADS_MAX: usize = 16;
/// Extension of the names of cache files.
const EXTENSION: &str = "images";

/// Folder of decoded images: `decoded` in `MERISTEM_CACHE`, or in `meristem` of the user's folder
/// for caches; `None` without any of them.
pub fn folder() -> Option<PathBuf> {
    meristem_device::user_cache().map(|cache| cache.join("decoded"))
}

/// Paths and sizes in bytes of the cache files, with the least recently used first.
///
/// # Errors
/// The folder cannot be read; one that does not exist is empty.
pub fn files() -> io::Result<Vec<(PathBuf, u64)>> {
    folder().map_or(Ok(vec![]), |folder| files_in(&folder))
}

/// Removes all decoded images. Returns the number of files and of bytes.
///
/// # Errors
/// A file cannot be removed.
pub fn clear() -> io::Result<(usize, u64)> {
    let files = files()?;
    files.iter().try_for_each(|(path, _)| remove(path))?;
    Ok((files.len(), files.iter().map(|(_, bytes)| bytes).sum()))
}

fn files_in(folder: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let entries = match folder.read_dir() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        entries => entries?,
    };
    let mut files = vec![];
    for entry in entries.flatten() {
        let path = entry.path();
        // Another process may have removed the file.
        let Ok(metadata) = entry.metadata() else { continue };
        let used = metadata.modified().unwrap_or(UNIX_EPOCH);
        let is_part = path.extension().is_some_and(|ending| ending == "part");
        if is_part && used.elapsed().is_ok_and(|age| age > ABANDONED) {
            remove(&path)?;
        } else if path.extension().is_some_and(|ending| ending == EXTENSION) {
            files.push((used, path, metadata.len()));
        }
    }
    files.sort();
    Ok(files.into_iter().map(|(_, path, bytes)| (path, bytes)).collect())
}

/// Removes a file that another process may have removed before.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Description of the images in a cache file.
#[derive(Debug, Deserialize, Serialize)]
struct Description {
    /// Dataset, split and form of the images.
    key: String,
    /// Time before the images were read, in nanoseconds since 1970.
    began_ns: i64,
    /// Names of the image files in order.
    names: Vec<String>,
    /// Identity and checksum of each image file.
    stamps: Vec<ImageStamp>,
    /// Ascending positions of the image files that do not decode, which have no pixels.
    bad: Vec<usize>,
}

/// Result of comparing the image files with the stamps of a cache file.
#[derive(Debug, PartialEq, Eq)]
enum StampComparison {
    /// The contents of an image file have changed.
    Changed,
    /// The contents are equal, and new stamps would not make the next comparison faster.
    Current,
    /// The contents are equal, and these new stamps save reading in the next comparison.
    Renewed(Vec<ImageStamp>),
}

/// Place of a decoded split in the cache.
#[derive(Debug)]
pub(crate) struct DecodedPlace {
    /// Path of the cache file.
    path: PathBuf,
    /// [`Description::key`].
    key: String,
    /// Bytes of one image.
    image_bytes: usize,
}

impl DecodedPlace {
    /// Place in the user's cache; `None` without one, and for a split that is too small or too
    /// large to be kept.
    pub(crate) fn of_user(key: String, files: &[ImageFile], image_bytes: usize) -> Option<Self> {
        let bytes = (files.len() as u64).checked_mul(image_bytes as u64)?;
        let fits = files.len() >= FILES_MIN && bytes < BYTES_MAX;
        Some(Self::in_folder(&folder().filter(|_| fits)?, key, image_bytes))
    }

    fn in_folder(folder: &Path, key: String, image_bytes: usize) -> Self {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let path = folder.join(format!("{:016x}.{EXTENSION}", hasher.finish()));
        Self { path, key, image_bytes }
    }

    /// The decoded images of `files`, if the cache has them and no image file has changed.
    pub(crate) fn open(&self, files: &[ImageFile]) -> Option<CachedImages> {
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => return self.report_unusable(&error.to_string()),
        };
        let description = match self.describe(&file) {
            Ok(description) => description,
            Err(problem) => return self.report_unusable(&problem),
        };
        let same = description.key == self.key && description.names == names(files);
        let now_ns = identity::now_ns();
        let comparison =
            if same { description.compare(files, now_ns) } else { StampComparison::Changed };
        if comparison == StampComparison::Changed {
            tracing::info!(path = %self.path.display(), "the images have changed");
            return None;
        }
        // The time orders the removal of cache files; if it cannot be set, this one counts as
        // older.
        let _ = file.set_modified(SystemTime::now());
        let (path, image_bytes) = (self.path.clone(), self.image_bytes);
        let found = CachedImages { path, file, description, image_bytes };
        if let StampComparison::Renewed(stamps) = comparison {
            self.renew(&found, files, (stamps, now_ns));
        }
        Some(found)
    }

    /// Copies the cache file `found` to a new one with `stamps` taken at `began_ns`, with which the
    /// next comparison reads fewer image files.
    fn renew(
        &self,
        found: &CachedImages,
        files: &[ImageFile],
        (stamps, began_ns): (Vec<ImageStamp>, i64),
    ) {
        let place = Self { path: self.path.clone(), key: self.key.clone(), ..*self };
        let Some(mut kept) = place.create(files) else { return };
        let copy = |kept: &mut CacheWriter| {
            let mut file = &found.file;
            file.rewind()?;
            let mut left = file.take(found.description.good() * self.image_bytes as u64);
            let mut piece = vec![0; 1 << 20];
            loop {
                match left.read(&mut piece)? {
                    0 => return Ok(()),
                    count => kept.write(&piece[..count])?,
                }
            }
        };
        match copy(&mut kept) {
            Ok(()) => {
                let bad = found.description.bad.clone();
                let made = &mut kept.description;
                (made.bad, made.stamps, made.began_ns) = (bad, stamps, began_ns);
                kept.finish();
            }
            Err(error) => kept.place.report_unkept(&error),
        }
    }

    /// Reads the description of a cache file, after a check of the whole file by its checksum.
    fn describe(&self, file: &File) -> Result<Description, String> {
        let text = |error: io::Error| error.to_string();
        let cut = || "it is cut".to_string();
        let len = file.metadata().map_err(text)?.len();
        // The bytes that the checksum covers: pixels, description, length of the description.
        let body = 8 + len.checked_sub(END as u64).ok_or_else(cut)?;
        let mut reader = BufReader::with_capacity(1 << 20, file);
        reader.seek(SeekFrom::Start(body - 8)).map_err(text)?;
        let mut end = [0; END];
        reader.read_exact(&mut end).map_err(text)?;
        let number = |at: usize| <[u8; 8]>::try_from(&end[at..at + 8]).map(u64::from_le_bytes);
        let length = number(0).map_err(|_| cut())?;
        if end[12..] != MAGIC[..] {
            return Err("it has another format or is cut".into());
        }
        let mut crc = crc32fast::Hasher::new();
        reader.rewind().map_err(text)?;
        let mut left = (&mut reader).take(body);
        let mut piece = vec![0; 1 << 20];
        loop {
            let count = left.read(&mut piece).map_err(text)?;
            if count == 0 {
                break;
            }
            crc.update(&piece[..count]);
        }
        if crc.finalize().to_le_bytes() != end[8..12] {
            return Err("its checksum is wrong".into());
        }
        // Start of the description, and end of the pixels.
        let start = (body - 8).checked_sub(length).ok_or_else(cut)?;
        reader.seek(SeekFrom::Start(start)).map_err(text)?;
        let description: Description =
            serde_json::from_reader((&mut reader).take(length)).map_err(|e| e.to_string())?;
        let Description { stamps, bad, names, .. } = &description;
        let fits = bad.len() <= stamps.len() && stamps.len() == names.len() && bad.is_sorted();
        if fits && description.good().checked_mul(self.image_bytes as u64) == Some(start) {
            Ok(description)
        } else {
            Err("its description does not fit its length".into())
        }
    }

    fn report_unusable<T>(&self, problem: &str) -> Option<T> {
        let path = self.path.display();
        notes::say(&format!("decoded images {path}: {problem}; the images are decoded again"));
        None
    }

    /// Begins a new cache file for the decoded images of `files`; `None`, with a note, if that
    /// fails.
    pub(crate) fn create(self, files: &[ImageFile]) -> Option<CacheWriter> {
        let description = Description {
            key: self.key.clone(),
            began_ns: identity::now_ns(),
            names: names(files),
            stamps: vec![],
            bad: vec![],
        };
        let folder = self.path.parent()?.to_path_buf();
        let made = fs::create_dir_all(&folder).and_then(|()| {
            tempfile::Builder::new().prefix(".").suffix(".part").tempfile_in(&folder)
        });
        let file = made.inspect_err(|error| self.report_unkept(error)).ok()?;
        let out = BufWriter::with_capacity(1 << 20, file);
        Some(CacheWriter { place: self, out, crc: crc32fast::Hasher::new(), description })
    }

    fn report_unkept(&self, error: &io::Error) {
        let path = self.path.display();
        notes::say(&format!("the decoded images are not kept in {path}: {error}"));
    }
}

impl Description {
    /// Number of images that have pixels.
    fn good(&self) -> u64 {
        self.stamps.len().saturating_sub(self.bad.len()) as u64
    }

    /// Compares all image files with their stamps. `now_ns` is a moment before the comparison.
    fn compare(&self, files: &[ImageFile], now_ns: i64) -> StampComparison {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let each = files.len().div_ceil(cores.min(COMPARE_THREADS_MAX)).max(1);
        let stamps = thread::scope(|scope| {
            let compare = |(files, stamps): (&[ImageFile], &[ImageStamp])| {
                let pairs = files.iter().zip(stamps);
                let current = pairs.map(|(f, stamp)| stamp.if_current(&f.path, self.began_ns));
                current.collect::<Option<Vec<ImageStamp>>>()
            };
            let parts = files.chunks(each).zip(self.stamps.chunks(each));
            let threads: Vec<_> = parts.map(|part| scope.spawn(move || compare(part))).collect();
            let parts = threads.into_iter().map(|thread| thread.join().ok().flatten());
            parts.collect::<Option<Vec<_>>>()
        });
        let Some(stamps) = stamps else { return StampComparison::Changed };
        let stamps = stamps.concat();
        // Whether the new stamp saves reading the file, and the old one does not.
        let gains = |(old, new): (&ImageStamp, &ImageStamp)| {
            new.id.is_settled(now_ns) && (old.id != new.id || !old.id.is_settled(self.began_ns))
        };
        if self.stamps.iter().zip(&stamps).any(gains) {
            StampComparison::Renewed(stamps)
        } else {
            StampComparison::Current
        }
    }
}

fn names(files: &[ImageFile]) -> Vec<String> {
    files.iter().map(|file| file.path.to_string_lossy().into_owned()).collect()
}

/// An open cache file whose image files have not changed.
pub(crate) struct CachedImages {
    path: PathBuf,
    file: File,
    description: Description,
    image_bytes: usize,
}

impl CachedImages {
    /// Passes the images of `files` to `sink`, `chunk` at a time, and the files without pixels to
    /// `on_bad`.
    pub(crate) fn read(
        &self,
        files: &[ImageFile],
        chunk: usize,
        on_bad: OnBadFile<'_>,
        sink: Sink<'_>,
    ) -> Result<()> {
        let failed = || Error::io("read", &self.path);
        let mut reader = BufReader::with_capacity(1 << 20, &self.file);
        reader.rewind().map_err(failed())?;
        let mut pixels = vec![0; chunk.min(files.len()) * self.image_bytes];
        let mut bad = self.description.bad.iter().copied().peekable();
        for (number, part) in files.chunks(chunk).enumerate() {
            let mut labels = Vec::with_capacity(part.len());
            for (place, file) in part.iter().enumerate() {
                match bad.next_if_eq(&(number * chunk + place)) {
                    Some(_) => on_bad(file)?,
                    None => labels.push(file.label),
                }
            }
            let pixels = &mut pixels[..labels.len() * self.image_bytes];
            reader.read_exact(pixels).map_err(failed())?;
            sink(pixels, TargetChunk::Classes(&labels))?;
        }
        Ok(())
    }

    /// The error for an image file that has changed since it was compared.
    pub(crate) fn changed_meanwhile(&self) -> Error {
        Mismatch::new("the image files", "unchanged while they are read", "a changed one")
            .remedy("start again")
            .in_layout(&self.path)
    }
}

/// A cache file that is being written.
pub(crate) struct CacheWriter {
    place: DecodedPlace,
    out: BufWriter<NamedTempFile>,
    crc: crc32fast::Hasher,
    description: Description,
}

impl CacheWriter {
    /// Adds the next image file. If it has no stamp, because it could not be read, the cache file
    /// is given up: `kept` becomes `None`.
    pub(crate) fn add(kept: &mut Option<Self>, stamp: Option<ImageStamp>, is_good: bool) {
        let Some(stamp) = stamp else {
            *kept = None;
            return;
        };
        if let Some(Self { description, .. }) = kept {
            if !is_good {
                description.bad.push(description.stamps.len());
            }
            description.stamps.push(stamp);
        }
    }

    /// Writes pixels. After a failure the cache file is given up, with a note: `kept` becomes
    /// `None`.
    pub(crate) fn append(kept: &mut Option<Self>, pixels: &[u8]) {
        let Some(writer) = kept else { return };
        if let Err(error) = writer.write(pixels) {
            writer.place.report_unkept(&error);
            *kept = None;
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.out.write_all(bytes)
    }

    /// Completes the cache file, and removes older ones until the limit holds.
    pub(crate) fn finish(mut self) {
        let ended = self.write_end();
        let Self { place, out, .. } = self;
        let kept = ended.and_then(|()| {
            let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.persist(&place.path).map_err(|error| error.error)?;
            make_room(&place.path, BYTES_MAX)
        });
        if let Err(error) = kept {
            place.report_unkept(&error);
        }
    }

    fn write_end(&mut self) -> io::Result<()> {
        let description = serde_json::to_vec(&self.description).map_err(io::Error::other)?;
        self.write(&description)?;
        self.write(&(description.len() as u64).to_le_bytes())?;
        let crc = self.crc.clone().finalize();
        self.out.write_all(&crc.to_le_bytes())?;
        self.out.write_all(MAGIC)?;
        self.out.flush()
    }
}

/// Removes the least recently used cache files other than `newest` until all together have at most
/// `bytes_max` bytes.
fn make_room(newest: &Path, bytes_max: u64) -> io::Result<()> {
    let files = files_in(newest.parent().unwrap_or(newest))?;
    let mut total: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    for (path, bytes) in files.iter().filter(|(path, _)| path != newest) {
        if total <= bytes_max {
            return Ok(());
        }
        remove(path)?;
        total -= bytes;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
