//! Datasets of image files, which class folders or a CSV file list.
//!
//! Without `resize` all images have the size of the first training image. Images have one channel
//! if all training images are grey, and three otherwise.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::thread;

use super::decoded::{CacheWriter, DecodedPlace};
use super::identity::WatchedFiles;
use super::image_file::{self, ImageForm, ImageSize, ImageStamp};
use super::listing::{ImageFile, Listing};
use super::{
    DatasetSpec, Layout, OnBad, Reader, Sink, Source, Split, TestSplit, folder, image_list, missing,
};
use crate::error::{Error, Result};
use crate::notes;
use crate::targets::TargetChunk;

/// Largest number of decoding threads; more would only wait for the disk.
const DECODE_THREADS_MAX: usize = 16;

/// A dataset of image files.
pub(crate) struct ImageFiles {
    root: PathBuf,
    spec: DatasetSpec,
    layout: Layout,
    form: ImageForm,
    /// Image files of train, then of test.
    splits: [Vec<ImageFile>; 2],
    /// [`Listing::stray`].
    stray: Vec<PathBuf>,
    /// [`Listing::beside`].
    beside: Vec<PathBuf>,
    /// Whether the unread files and folders have been reported.
    reported: Once,
}

/// A file after decoding: the error of reading it, or its stamp and the result of decoding it.
type DecodedFile = Result<(ImageStamp, Result<()>)>;

impl ImageFiles {
    /// Lists the images of `spec` at `root`, and reads headers.
    pub(crate) fn open(spec: &DatasetSpec, root: &Path, watch: &WatchedFiles) -> Result<Self> {
        let (listing, no_test) = match spec.source {
            Source::Csv => (image_list::list(root, watch)?, "rows whose `split` is test"),
            _ => (folder::list(root, watch)?, "test/CLASS/*.{png,jpg,jpeg}"),
        };
        let Listing { classes, train, test, stray, beside } = listing;
        let mut images = train.iter().chain(test.iter().flatten());
        images.try_for_each(|image| watch.add(&image.path))?;
        let form = form(root, &train, spec.resize)?.ok_or_else(|| missing(spec.source, root))?;
        let ImageSize { channels, height, width } = form.size;
        let train_len = train.len();
        let test_split = match &test {
            Some(test) => TestSplit::Samples(test.len()),
            None => TestSplit::Missing(no_test),
        };
        let layout = Layout::of_images([channels, height, width], classes, train_len, test_split);
        let (root, spec) = (root.to_path_buf(), spec.clone());
        let splits = [train, test.unwrap_or_default()];
        Ok(Self { root, spec, layout, form, splits, stray, beside, reported: Once::new() })
    }

    /// The files of a split in order.
    pub(crate) fn files(&self, split: Split) -> &[ImageFile] {
        &self.splits[split as usize]
    }

    /// Decodes one file to `pixels` (H, W, C).
    pub(crate) fn decode(&self, path: &Path, pixels: &mut [u8]) -> Result<()> {
        let (bytes, _) = image_file::read(path)?;
        image_file::decode(path, &bytes, &self.form, pixels)
    }

    /// Decodes `files` in parallel; the result does not depend on the number of threads.
    fn decode_all(&self, files: &[ImageFile], pixels: &mut [u8]) -> Vec<DecodedFile> {
        let image = self.layout.sample_bytes();
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let each = files.len().div_ceil(cores.min(DECODE_THREADS_MAX)).max(1);
        let mut results: Vec<Option<DecodedFile>> = files.iter().map(|_| None).collect();
        thread::scope(|scope| {
            let parts = files.chunks(each).zip(results.chunks_mut(each));
            for ((files, results), pixels) in parts.zip(pixels.chunks_mut(each * image)) {
                scope.spawn(move || {
                    let work = files.iter().zip(results).zip(pixels.chunks_exact_mut(image));
                    for ((ImageFile { path, .. }, result), pixels) in work {
                        *result = Some(image_file::read(path).map(|(bytes, stamp)| {
                            (stamp, image_file::decode(path, &bytes, &self.form, pixels))
                        }));
                    }
                });
            }
        });
        results.into_iter().flatten().collect()
    }

    /// Place of the decoded split in the cache on disk; `None` if it is not kept there.
    fn place(&self, split: Split) -> Option<DecodedPlace> {
        let ImageSize { channels, height, width } = self.form.size;
        let DatasetSpec { source, resize, no_cache, .. } = &self.spec;
        let key = format!(
            "{source} {split} of {}, {channels}×{height}×{width}, resize {resize:?}",
            self.root.display()
        );
        let (files, image) = (self.files(split), self.layout.sample_bytes());
        DecodedPlace::of_user(key, files, image).filter(|_| !no_cache)
    }

    /// Reports files and folders that are not read, once.
    fn report_unread(&self) {
        self.reported.call_once(|| {
            let within = |paths: &[PathBuf]| {
                let names = paths.iter().map(|path| path.strip_prefix(&self.root).unwrap_or(path));
                notes::some_of(names.map(|name| name.display().to_string()))
            };
            let strays = within(&self.stray);
            match self.stray.len() {
                0 => {}
                1 => notes::say(&format!("left out 1 file that is no image: {strays}")),
                n => notes::say(&format!("left out {n} files that are no images: {strays}")),
            }
            if !self.beside.is_empty() {
                let folders = within(&self.beside);
                notes::say(&format!(
                    "only the folders train and test are read; ignored beside them: {folders}"
                ));
            }
        });
    }

    /// Decodes a split into `sink`, and writes it to the cache file `kept`.
    fn decode_split(
        &self,
        split: Split,
        mut kept: Option<CacheWriter>,
        on_bad: OnBad<'_>,
        sink: Sink<'_>,
    ) -> Result<()> {
        let image = self.layout.sample_bytes();
        let files = self.files(split);
        let chunk = self.layout.chunk_samples().min(files.len()).max(1);
        let mut pixels = vec![0; chunk * image];
        let progress = notes::DecodingProgress::new(files.len());
        for (number, batch) in files.chunks(chunk).enumerate() {
            let mut labels = Vec::with_capacity(batch.len());
            let results = self.decode_all(batch, &mut pixels[..batch.len() * image]);
            for (i, (result, file)) in results.into_iter().zip(batch).enumerate() {
                let (stamp, decoded) = match result {
                    Ok((stamp, decoded)) => (Some(stamp), decoded),
                    Err(error) => (None, Err(error)),
                };
                CacheWriter::add(&mut kept, stamp, decoded.is_ok());
                match decoded {
                    Ok(()) => {
                        // Close the gaps that bad files left.
                        pixels.copy_within(i * image..(i + 1) * image, labels.len() * image);
                        labels.push(file.label);
                    }
                    Err(error) => on_bad(listed(&self.root, file, error))?,
                }
            }
            let good = &pixels[..labels.len() * image];
            CacheWriter::append(&mut kept, good);
            sink(good, TargetChunk::Classes(&labels))?;
            progress.at(number * chunk + batch.len());
        }
        drop(progress);
        if let Some(kept) = kept {
            kept.finish();
        }
        Ok(())
    }
}

impl Reader for ImageFiles {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, split: Split, on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        self.report_unread();
        let place = self.place(split);
        let files = self.files(split);
        let Some(found) = place.as_ref().and_then(|place| place.open(files)) else {
            let kept = place.and_then(|place| place.create(files));
            return self.decode_split(split, kept, on_bad, sink);
        };
        let mut unused = vec![0; self.layout.sample_bytes()];
        // The cache stores neither pixels nor the error of a bad file. Decoding the file again
        // gives the error.
        let mut bad = |file: &ImageFile| match self.decode(&file.path, &mut unused) {
            Err(error) => on_bad(listed(&self.root, file, error)),
            Ok(()) => Err(found.changed_meanwhile()),
        };
        found.read(files, self.layout.chunk_samples(), &mut bad, sink)
    }
}

/// The error of an image file, with the line that names it in the list at `root`.
fn listed(root: &Path, file: &ImageFile, error: Error) -> Error {
    let Some(line) = file.line else { return error };
    Error::Listed { list: root.to_path_buf(), line, error: Box::new(error) }
}

/// Form of all images: size and channels. `None` without training images.
fn form(root: &Path, train: &[ImageFile], resize: Option<u32>) -> Result<Option<ImageForm>> {
    let Some((like, mut size)) = first_size(root, train)? else { return Ok(None) };
    if size.channels == 1 {
        // Damaged files are reported when the split is read.
        let colour =
            |file: &ImageFile| image_file::probe(&file.path).is_ok_and(|size| size.channels == 3);
        size.channels = if train.iter().any(colour) { 3 } else { 1 };
    }
    if let Some(side) = resize {
        (size.height, size.width) = (side as usize, side as usize);
    }
    Ok(Some(ImageForm { size, like, resizes: resize.is_some() }))
}

/// Path and size of the first file whose header can be read; damaged files before it are reported
/// when the split is read. If no header can be read, the error of the first file.
fn first_size(root: &Path, train: &[ImageFile]) -> Result<Option<(PathBuf, ImageSize)>> {
    let mut first_error: Option<Error> = None;
    for file in train {
        match image_file::probe(&file.path) {
            Ok(size) => return Ok(Some((file.path.clone(), size))),
            Err(error) => _ = first_error.get_or_insert(listed(root, file, error)),
        }
    }
    first_error.map_or(Ok(None), Err)
}
