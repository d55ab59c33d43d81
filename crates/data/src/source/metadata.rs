//! Removal of metadata from PNG and JPEG files before they are decoded.
//!
//! Colour profiles, texts and camera data do not affect the requested pixels. Decoders unpack, copy
//! and sort them without a limit that follows from the size of the image, so this module removes
//! the metadata first.

use std::borrow::Cow;
use std::ops::Range;

const PNG_MAGIC: &[u8] = b"\x89PNG\r\n\x1a\n";
/// Chunks of a PNG file with unbounded length that hold no pixels.
const PNG_METADATA: [&[u8]; 5] = [b"iCCP", b"eXIf", b"tEXt", b"zTXt", b"iTXt"];
/// First bytes of a JPEG file.
pub(super) const JPEG_MAGIC: [u8; 2] = [0xff, 0xd8];
/// Marker of the first scan of a JPEG file, after which the compressed pixels begin.
const JPEG_SCAN: u8 = 0xda;

/// The file without metadata. A file of another format, or the rest after a break of the format,
/// stays unchanged for the decoder to judge.
pub(super) fn without_metadata(bytes: &[u8]) -> Cow<'_, [u8]> {
    let metadata = if bytes.starts_with(PNG_MAGIC) {
        in_png(bytes)
    } else if bytes.starts_with(&JPEG_MAGIC) {
        in_jpeg(bytes)
    } else {
        vec![]
    };
    if metadata.is_empty() {
        return Cow::Borrowed(bytes);
    }
    let mut kept = Vec::with_capacity(bytes.len());
    let mut from = 0;
    for Range { start, end } in metadata {
        kept.extend_from_slice(&bytes[from..start]);
        from = end;
    }
    kept.extend_from_slice(&bytes[from..]);
    Cow::Owned(kept)
}

/// Places of metadata in a PNG file: length (u32), name, data and checksum (u32) of a chunk.
fn in_png(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut found = vec![];
    let mut at = PNG_MAGIC.len();
    while let Some(&[a, b, c, d, ref name @ ..]) = bytes.get(at..at + 8) {
        let end = at + 12 + u32::from_be_bytes([a, b, c, d]) as usize;
        if end > bytes.len() {
            break;
        }
        if PNG_METADATA.contains(&name) {
            found.push(at..end);
        }
        at = end;
    }
    found
}

/// Places of metadata before the first scan of a JPEG file: comments and application segments,
/// except JFIF and Adobe, which define the storage of colours.
fn in_jpeg(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut found = vec![];
    let mut at = JPEG_MAGIC.len();
    while let Some(&[0xff, code, high, low]) = bytes.get(at..at + 4) {
        if code == 0xff {
            at += 1; // a fill byte
            continue;
        }
        let end = at + 2 + usize::from(u16::from_be_bytes([high, low]));
        if code == JPEG_SCAN || end > bytes.len() {
            break;
        }
        if matches!(code, 0xe1..=0xed | 0xef | 0xfe) {
            found.push(at..end);
        }
        at = end;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_of_png_is_removed() {
        let chunk = |name: &[u8; 4], data: &[u8]| {
            [&(data.len() as u32).to_be_bytes()[..], name, data, b"sum."].concat()
        };
        let part = |names: &[&[u8; 4]]| {
            let chunks = names.iter().map(|name| chunk(name, b"data"));
            [PNG_MAGIC.to_vec()].into_iter().chain(chunks).collect::<Vec<_>>().concat()
        };
        let whole = part(&[b"IHDR", b"iCCP", b"PLTE", b"tRNS", b"zTXt", b"IDAT", b"eXIf", b"IEND"]);
        let kept = part(&[b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"]);
        assert_eq!(without_metadata(&whole), kept);
        assert!(matches!(without_metadata(&kept), Cow::Borrowed(_)));
        // An incomplete chunk stays, as do bytes outside of chunks.
        for end in 0..whole.len() {
            let left = without_metadata(&whole[..end]);
            assert!(left.len() <= end && (end < 56 || left.len() >= 28), "{end}");
        }
    }

    #[test]
    fn metadata_of_jpeg_is_removed() {
        let segment = |code: u8| [&[0xff, code, 0, 6], &b"text"[..]].concat();
        let whole =
            [vec![0xff, 0xd8], segment(0xe0), segment(0xe1), segment(0xfe), segment(0xee)].concat();
        let end = [vec![0xff], segment(0xda), segment(0xe1)].concat();
        let kept = [vec![0xff, 0xd8], segment(0xe0), segment(0xee), end.clone()].concat();
        assert_eq!(without_metadata(&[whole.clone(), end].concat()), kept);
        for cut in 0..whole.len() {
            assert!(without_metadata(&whole[..cut]).len() <= cut);
        }
    }
}
