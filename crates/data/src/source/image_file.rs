//! Decoding of one PNG or JPEG file.
//!
//! Scaling is done by the crate `image` in f32, one operation after another, without instruction
//! sets that are chosen at run time, so that the result is the same on every machine.

use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};

use image::imageops::{self, FilterType};
use image::{
    ColorType, DynamicImage, GenericImageView, ImageBuffer, ImageDecoder, ImageFormat, ImageReader,
    Limits, Pixel,
};
use serde::{Deserialize, Serialize};

use super::SIDE_MAX;
use super::identity::FileId;
use super::input::{DEFLATE_RATIO_MAX, pointer};
use super::metadata::{JPEG_MAGIC, without_metadata};
use crate::error::{Error, Mismatch, Result};

/// Size limit of an image file, in bytes.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Limit of a decoded image, in bytes.
const DECODED_BYTES_MAX: u64 = 256 << 20;
/// Limit of the decoder's allocations for PNG, apart from the image: a few rows of pixels.
const AUXILIARY_BYTES_MAX: u64 = 8 << 20;
/// Limit of an image's bytes, or of a JPEG image's pixels, per byte of its file. For PNG it is the
/// largest compression ratio of deflate. For JPEG it is generous: a block of 64 pixels takes at
/// least one bit.
const RATIO_MAX: u64 = DEFLATE_RATIO_MAX;
const REMEDY: &str = "replace or remove the file, or skip it with `skip_bad` (--skip-bad)";

/// Channels, height and width of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageSize {
    pub(crate) channels: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
}

/// Requested form of the images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageForm {
    pub(crate) size: ImageSize,
    /// The file that determined the size.
    pub(crate) like: PathBuf,
    /// Whether images of other sizes are cut to their central square and scaled.
    pub(crate) resizes: bool,
}

/// State of a file when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(from = "(FileId, u32)", into = "(FileId, u32)")]
pub(crate) struct ImageStamp {
    /// Identity before the reading.
    pub(crate) id: FileId,
    /// CRC-32 of the contents.
    pub(crate) crc: u32,
}

impl ImageStamp {
    /// The stamp of the file at `path` now, if its contents are the same as when this stamp was
    /// taken, at `at_ns` or later. Reads the file only if its identity does not decide this.
    pub(super) fn if_current(&self, path: &Path, at_ns: i64) -> Option<Self> {
        let now = FileId::from_metadata(&std::fs::metadata(path).ok()?);
        if now == self.id && now.is_settled(at_ns) {
            return Some(*self);
        }
        // Another size decides without reading.
        let same_size = now.bytes == self.id.bytes;
        let (_, stamp) = same_size.then(|| read(path).ok()).flatten()?;
        (stamp.crc == self.crc).then_some(stamp)
    }
}

impl From<(FileId, u32)> for ImageStamp {
    fn from((id, crc): (FileId, u32)) -> Self {
        Self { id, crc }
    }
}

impl From<ImageStamp> for (FileId, u32) {
    fn from(stamp: ImageStamp) -> Self {
        (stamp.id, stamp.crc)
    }
}

/// Reads the size of the image at `path` from its header: 1 channel if it is grey, 3 otherwise.
pub(crate) fn probe(path: &Path) -> Result<ImageSize> {
    let (bytes, _) = read(path)?;
    let decoder = decoder(path, &bytes)?;
    let (width, height) = decoder.dimensions();
    let grey = matches!(
        decoder.color_type(),
        ColorType::L8 | ColorType::L16 | ColorType::La8 | ColorType::La16
    );
    Ok(ImageSize {
        channels: if grey { 1 } else { 3 },
        height: height as usize,
        width: width as usize,
    })
}

/// Decodes `bytes`, the contents of the file at `path`, into `pixels` (H, W, C). Unless the form
/// resizes, the image must have its size. Grey becomes RGB if 3 channels are wanted; RGB never
/// becomes grey. Palettes become RGB, transparency is dropped, 16 bits are rounded to 8.
pub(crate) fn decode(path: &Path, bytes: &[u8], form: &ImageForm, pixels: &mut [u8]) -> Result<()> {
    let decoder = decoder(path, bytes)?;
    let (width, height) = decoder.dimensions();
    let ImageForm { size, ref like, resizes } = *form;
    if !resizes && (height as usize, width as usize) != (size.height, size.width) {
        return Err(other_size(path, size, like, format!("{width}×{height}")));
    }
    check_claim(path, bytes, &decoder)?;
    let image = DynamicImage::from_decoder(decoder).map_err(|error| {
        undecodable(path, bytes.len(), "an image that decodes", error.to_string())
    })?;
    let colour = image.color().has_color();
    let side = resizes.then_some(size.height as u32);
    let decoded = match (size.channels, colour) {
        (1, false) => scaled(image.into_luma8(), side),
        (1, true) => {
            let remedy = "convert it to grey, or add a colour image to the training images";
            let expected = format!("grey, as {} and all training images", like.display());
            let mismatch = Mismatch::new("the image", expected, "a colour image");
            return Err(mismatch.remedy(remedy).in_layout(path));
        }
        _ => scaled(image.into_rgb8(), side),
    };
    pixels.copy_from_slice(&decoded);
    Ok(())
}

/// The central square of an image, scaled to `side` pixels with a triangle filter (bilinear) as
/// wide as the pixels of the result, so that fine patterns are averaged. Without `side` the
/// unchanged image.
fn scaled<P>(image: ImageBuffer<P, Vec<u8>>, side: Option<u32>) -> Vec<u8>
where
    P: Pixel<Subpixel = u8> + 'static,
{
    let (width, height) = image.dimensions();
    let Some(side) = side.filter(|side| (width, height) != (*side, *side)) else {
        return image.into_raw();
    };
    let square = width.min(height);
    let (x, y) = ((width - square) / 2, (height - square) / 2);
    let square = image.view(x, y, square, square);
    imageops::resize(&*square, side, side, FilterType::Triangle).into_raw()
}

/// Checks, before any allocation for the image, that a file of this length can hold an image of the
/// size in its header.
fn check_claim(path: &Path, bytes: &[u8], decoder: &impl ImageDecoder) -> Result<()> {
    let (width, height) = decoder.dimensions();
    let decoded = decoder.total_bytes();
    let got = format!("{width}×{height}");
    if decoded > DECODED_BYTES_MAX {
        let expected = format!("at most {DECODED_BYTES_MAX} bytes when it is decoded");
        return Err(undecodable(path, 0, expected, got));
    }
    let pixels = u64::from(width) * u64::from(height);
    let packed = if bytes.starts_with(&JPEG_MAGIC) {
        pixels
    } else {
        pixels * u64::from(decoder.original_color_type().bits_per_pixel()) / 8
    };
    if packed > (bytes.len() as u64).saturating_mul(RATIO_MAX) {
        let expected = format!("of a size that {} bytes can hold", bytes.len());
        return Err(undecodable(path, bytes.len(), expected, got));
    }
    Ok(())
}

/// The contents of a file, at most 256 MiB, and its state.
pub(crate) fn read(path: &Path) -> Result<(Vec<u8>, ImageStamp)> {
    // Opening a pipe would wait for its writer.
    let kind = std::fs::metadata(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::Absent { path: path.to_path_buf() },
        _ => Error::io("open", path)(error),
    })?;
    if !kind.is_file() {
        let remedy = "remove it, or put a file in its place";
        return Err(Mismatch::new("the image", "a file", "something else")
            .remedy(remedy)
            .in_layout(path));
    }
    let file = File::open(path).map_err(Error::io("open", path))?;
    let metadata = file.metadata().map_err(Error::io("read", path))?;
    let mut bytes = vec![];
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let expected = format!("at most {FILE_BYTES_MAX} bytes");
        return Err(undecodable(path, bytes.len(), expected, "more".into()));
    }
    let stamp = ImageStamp { id: FileId::from_metadata(&metadata), crc: crc32fast::hash(&bytes) };
    Ok((bytes, stamp))
}

/// Reads the header. The format is recognised by the contents, not by the name.
fn decoder<'a>(path: &Path, bytes: &'a [u8]) -> Result<impl ImageDecoder + 'a> {
    let format = image::guess_format(bytes).ok();
    let format = format.filter(|f| matches!(f, ImageFormat::Png | ImageFormat::Jpeg));
    let Some(format) = format else {
        if let Some(pointer) = pointer(bytes) {
            return Err(pointer.at(path, 0));
        }
        let start: Vec<String> = bytes.iter().take(4).map(|b| format!("{b:02x}")).collect();
        let got = format!("bytes that begin with [{}]", start.join(" "));
        return Err(undecodable(path, 0, "a PNG or JPEG file", got));
    };
    // Refused here, because the decoder accepts both: a truncated JPEG, whose rest would be grey,
    // and a break in the order of segments, which would hide metadata from `without_metadata`.
    if format == ImageFormat::Jpeg {
        find_jpeg_end(bytes)
            .map_err(|(offset, got)| undecodable(path, offset, "complete JPEG data", got))?;
    }
    let pixels = Cursor::new(without_metadata(bytes));
    let mut reader = ImageReader::with_format(pixels, format);
    let mut limits = Limits::default();
    limits.max_image_width = Some(SIDE_MAX);
    limits.max_image_height = Some(SIDE_MAX);
    limits.max_alloc = Some(AUXILIARY_BYTES_MAX);
    reader.limits(limits);
    // The decoders do not report the offset of an error, so it is the length of their input.
    reader
        .into_decoder()
        .map_err(|error| undecodable(path, bytes.len(), "an image header", error.to_string()))
}

fn undecodable(path: &Path, offset: usize, expected: impl Into<String>, got: String) -> Error {
    Mismatch::new("the image", expected, got).remedy(REMEDY).at(path, offset as u64)
}

fn other_size(path: &Path, expected: ImageSize, like: &Path, got: String) -> Error {
    let ImageSize { channels, height, width } = expected;
    let colour = if channels == 1 { "grey" } else { "RGB" };
    let expected = format!("{width}×{height} {colour}, as {}", like.display());
    let remedy = "scale all images to one size with `resize`, such as --resize 32";
    Mismatch::new("the image", expected, got).remedy(remedy).in_layout(path)
}

/// Walks the segments of a JPEG file (ITU-T T.81, annex B) to its end-of-image marker; otherwise
/// returns the offset and a description of the break.
fn find_jpeg_end(bytes: &[u8]) -> Result<(), (usize, String)> {
    let mut at = JPEG_MAGIC.len();
    loop {
        let ended = |at: usize| (at, "the end of the file".to_string());
        // Fill bytes 0xff may stand before a marker.
        let marker_at = at;
        let mut code = *bytes.get(at).ok_or_else(|| ended(bytes.len()))?;
        if code != 0xff {
            return Err((at, format!("byte {code:#04x} where a marker 0xff must stand")));
        }
        while code == 0xff {
            at += 1;
            code = *bytes.get(at).ok_or_else(|| ended(bytes.len()))?;
        }
        at += 1;
        match code {
            0xd9 => return Ok(()),
            0x01 | 0xd0..=0xd8 => continue, // stand alone, without a length
            0x00 => return Err((marker_at, "a marker 0x00".into())),
            _ => {}
        }
        let length = bytes.get(at..at + 2).ok_or_else(|| ended(bytes.len()))?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        if length < 2 {
            return Err((at, format!("a segment of {length} bytes")));
        }
        at += length;
        if code == 0xda {
            at = skip_entropy_coded(bytes, at).ok_or_else(|| ended(bytes.len()))?;
        }
    }
}

/// Offset of the next marker that ends entropy-coded data (not a stuffed 0xff00, not a restart).
fn skip_entropy_coded(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        at += bytes.get(at..)?.iter().position(|byte| *byte == 0xff)?;
        match bytes.get(at + 1)? {
            0x00 | 0xd0..=0xd7 => at += 2,
            0xff => at += 1,
            _ => return Some(at),
        }
    }
}
