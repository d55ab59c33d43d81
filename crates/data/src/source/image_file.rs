//! Decoding of one PNG or JPEG file.

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::Path;

use image::{ColorType, DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};

use super::SIDE_MAX;
use crate::error::{Error, Mismatch, Result};

/// Size limit of an image file, in bytes.
const FILE_BYTES_MAX: u64 = 256 << 20;
const REMEDY: &str = "replace or remove the file, or skip it with `skip_bad` (--skip-bad)";

/// Channels, height and width of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) channels: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
}

/// Reads the size of the image at `path` from its header: 1 channel if it is grey, 3 otherwise.
pub(crate) fn probe(path: &Path) -> Result<Size> {
    let bytes = read_file(path)?;
    let decoder = decoder(path, &bytes)?;
    let (width, height) = decoder.dimensions();
    let grey = matches!(
        decoder.color_type(),
        ColorType::L8 | ColorType::L16 | ColorType::La8 | ColorType::La16
    );
    Ok(Size { channels: if grey { 1 } else { 3 }, height: height as usize, width: width as usize })
}

/// Decodes the image at `path` into `pixels` (H, W, C). It must have the size `expected`, that of
/// the file `like`. Grey becomes RGB if 3 channels are wanted; RGB never becomes grey. Transparency
/// is dropped, 16 bits are rounded to 8.
pub(crate) fn decode(path: &Path, expected: Size, like: &Path, pixels: &mut [u8]) -> Result<()> {
    let bytes = read_file(path)?;
    let decoder = decoder(path, &bytes)?;
    let (width, height) = decoder.dimensions();
    let sides = (height as usize, width as usize);
    if sides != (expected.height, expected.width) {
        return Err(other_size(path, expected, like, format!("{width}×{height}")));
    }
    // A truncated JPEG decodes without an error, its rest grey.
    if bytes.starts_with(&JPEG_MAGIC) {
        find_jpeg_end(&bytes)
            .map_err(|(offset, got)| undecodable(path, offset, "complete JPEG data", got))?;
    }
    let image = DynamicImage::from_decoder(decoder).map_err(|error| {
        undecodable(path, bytes.len(), "an image that decodes", error.to_string())
    })?;
    let colour = image.color().has_color();
    let decoded = match (expected.channels, colour) {
        (1, false) => image.into_luma8().into_raw(),
        (1, true) => return Err(other_size(path, expected, like, "a colour image".into())),
        _ => image.into_rgb8().into_raw(),
    };
    pixels.copy_from_slice(&decoded);
    Ok(())
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let mut bytes = vec![];
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let expected = format!("at most {FILE_BYTES_MAX} bytes");
        return Err(undecodable(path, bytes.len(), expected, "more".into()));
    }
    Ok(bytes)
}

/// Reads the header. The format is recognised by the contents, not by the name.
fn decoder<'a>(path: &Path, bytes: &'a [u8]) -> Result<impl ImageDecoder + 'a> {
    let format = image::guess_format(bytes).ok();
    let format = format.filter(|f| matches!(f, ImageFormat::Png | ImageFormat::Jpeg));
    let Some(format) = format else {
        let start: Vec<String> = bytes.iter().take(4).map(|b| format!("{b:02x}")).collect();
        let got = format!("bytes that begin with [{}]", start.join(" "));
        return Err(undecodable(path, 0, "a PNG or JPEG file", got));
    };
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::default();
    limits.max_image_width = Some(SIDE_MAX);
    limits.max_image_height = Some(SIDE_MAX);
    reader.limits(limits);
    // The decoders do not report the offset of an error, so it is the length of their input.
    reader
        .into_decoder()
        .map_err(|error| undecodable(path, bytes.len(), "an image header", error.to_string()))
}

fn undecodable(path: &Path, offset: usize, expected: impl Into<String>, got: String) -> Error {
    Mismatch::new("the image", expected, got).remedy(REMEDY).at(path, offset as u64)
}

fn other_size(path: &Path, expected: Size, like: &Path, got: String) -> Error {
    let Size { channels, height, width } = expected;
    let colour = if channels == 1 { "grey" } else { "RGB" };
    let expected = format!("{width}×{height} {colour}, as {}", like.display());
    Mismatch::new("the image", expected, got).remedy("bring all images to one size").of(path)
}

const JPEG_MAGIC: [u8; 2] = [0xff, 0xd8];

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
