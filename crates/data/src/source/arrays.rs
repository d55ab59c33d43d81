//! Named arrays: numpy's `.npz` and `.safetensors`.
//!
//! `train_images` and `test_images` are unsigned bytes, [N, H, W] (grey) or [N, H, W, C] with C
//! from 1 to 4; `train_labels` and `test_labels` are integers of any width, [N]. The classes are 0
//! to the largest training label, named by their number. A file without both `test_images` and
//! `test_labels` has no test split.

use std::fs::{self, File};
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use zip::ZipArchive;
use zip::result::ZipError;

use super::identity::Watch;
use super::input::Input;
use super::npy::{self, Header, IntType};
use super::{
    Layout, OnBad, Reader, SIDE_MAX, Sink, Source, Split, TestSplit, missing, missing_files,
};
use crate::error::{Error, Mismatch, Result, damaged};

/// Largest label; one above it is damage, not a class.
const CLASSES_MAX: u32 = 65_536;
/// Longest header, a limit of the safetensors library itself.
const SAFETENSORS_HEADER_MAX: u64 = 100_000_000;
/// Largest compression ratio of deflate.
const DEFLATE_RATIO_MAX: u64 = 1032;

const IMAGES: [&str; 2] = ["train_images", "test_images"];
const LABELS: [&str; 2] = ["train_labels", "test_labels"];

/// Visitor of an array: its header, and its bytes from the first element on.
type Visit<'v> = &'v mut dyn FnMut(&Header, &mut Input<'_>) -> Result<()>;

/// A file of named arrays.
trait ArrayFile: Send + Sync {
    /// Whether there is an array called `name`.
    fn has(&self, name: &str) -> Result<bool>;

    /// Opens the array called `name`; the header agrees with the number of bytes that follow.
    fn visit(&self, name: &str, visit: Visit<'_>) -> Result<()>;
}

/// The file at `root`, or the only one of its kind in the folder `root`.
pub(crate) fn open(root: &Path, watch: &Watch) -> Result<Box<dyn Reader>> {
    let path = find(root)?;
    watch.add(&path)?;
    let mut start = [0; 4];
    let mut file = File::open(&path).map_err(Error::io("open", &path))?;
    let zip = file.read_exact(&mut start).is_ok() && start.starts_with(b"PK");
    if !zip && path.extension().is_some_and(|extension| extension == "npz") {
        let expected = "a zip archive, as numpy.savez writes it";
        return Err(damaged(&path, 0, "the file", expected, format!("bytes {start:?}")));
    }
    let file: Box<dyn ArrayFile> =
        if zip { Box::new(Npz { path }) } else { Box::new(SafeTensors::open(path)?) };
    Ok(Box::new(Arrays::open(file)?))
}

fn find(root: &Path) -> Result<PathBuf> {
    if root.is_file() {
        return Ok(root.to_path_buf());
    }
    let mut found = vec![];
    for entry in fs::read_dir(root).map_err(Error::io("list", root))? {
        let path = entry.map_err(Error::io("list", root))?.path();
        if path.extension().is_some_and(|e| e == "npz" || e == "safetensors") {
            found.push(path);
        }
    }
    found.sort();
    match &found[..] {
        [] => Err(missing(Source::Arrays, root)),
        [one] => Ok(one.clone()),
        [first, second, ..] => {
            let got = format!("{} and {}", first.display(), second.display());
            Err(Mismatch::new("the folder", "one .npz or .safetensors file", got)
                .remedy("name the file itself as the data root")
                .of(root))
        }
    }
}

/// A dataset in one file of arrays.
struct Arrays {
    file: Box<dyn ArrayFile>,
    layout: Layout,
    labels: [Vec<u32>; 2],
}

/// Number of images and (height, width, channels).
type ImagesShape = (usize, [usize; 3]);

impl Arrays {
    fn open(file: Box<dyn ArrayFile>) -> Result<Self> {
        let mut labels = [vec![], vec![]];
        let mut shapes = [(0, [0; 3]); 2];
        let has_test = file.has(IMAGES[1])? || file.has(LABELS[1])?;
        for split in if has_test { 0..2 } else { 0..1 } {
            let shape = &mut shapes[split];
            file.visit(IMAGES[split], &mut |header, input| {
                *shape = images_shape(IMAGES[split], header, input)?;
                Ok(())
            })?;
            let (images, labels) = (shape.0, &mut labels[split]);
            file.visit(LABELS[split], &mut |header, input| {
                *labels = read_labels(LABELS[split], header, input, images)?;
                Ok(())
            })?;
        }
        let [(train_len, size), (test_len, test_size)] = shapes;
        let classes = labels[0].iter().max().map_or(0, |max| max + 1);
        // Both belong to the test arrays; they are opened again only to name the file in the error.
        if has_test && test_size != size {
            file.visit(IMAGES[1], &mut |_, input| {
                let (expected, got) =
                    (format!("{size:?} as in training"), format!("{test_size:?}"));
                Err(damaged(
                    input.path(),
                    0,
                    format!("[H, W, C] of `{}`", IMAGES[1]),
                    expected,
                    got,
                ))
            })?;
        }
        // Without a training image there are no classes, which is not the test labels' fault.
        let beyond = |label: &u32| train_len > 0 && *label >= classes;
        if let Some(place) = labels[1].iter().position(beyond) {
            let got = labels[1][place];
            file.visit(LABELS[1], &mut |header, input| {
                let offset = input.offset() + (place * header.dtype.bytes) as u64;
                let expected = format!("below {classes}, as in training");
                Err(damaged(
                    input.path(),
                    offset,
                    format!("a label in `{}`", LABELS[1]),
                    expected,
                    got.to_string(),
                ))
            })?;
        }
        let [height, width, channels] = size;
        let classes = (0..classes).map(|class| class.to_string()).collect();
        let test = match has_test {
            true => TestSplit::Images(test_len),
            false => TestSplit::Missing("the arrays `test_images` and `test_labels`"),
        };
        let layout = Layout { channels, height, width, classes, train: train_len, test };
        Ok(Self { file, layout, labels })
    }
}

impl Reader for Arrays {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, split: Split, _on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        let Layout { height, width, channels, .. } = self.layout;
        let labels = &self.labels[split as usize];
        let size = self.layout.image_bytes();
        self.file.visit(IMAGES[split as usize], &mut |header, input| {
            let shape = images_shape(IMAGES[split as usize], header, input)?;
            if shape != (labels.len(), [height, width, channels]) {
                let got = format!("{shape:?}");
                return Err(damaged(input.path(), 0, "the shape", "the same as before", got));
            }
            let mut chunk = vec![0; size * self.layout.chunk_images().min(labels.len())];
            for labels in labels.chunks(self.layout.chunk_images()) {
                let images = &mut chunk[..size * labels.len()];
                input.read_exact(images, "pixels")?;
                sink(images, labels)?;
            }
            input.expect_end()
        })
    }
}

fn images_shape(name: &str, header: &Header, input: &Input<'_>) -> Result<ImagesShape> {
    let expected = "unsigned bytes, [N, H, W] or [N, H, W, C] with C from 1 to 4";
    let wrong = || {
        let got = format!("{:?} of {}", header.shape, header.dtype);
        damaged(input.path(), 0, format!("`{name}`"), expected, got)
    };
    let (len, size) = match header.shape[..] {
        [n, h, w] => (n, [h, w, 1]),
        [n, h, w, c] => (n, [h, w, c]),
        _ => return Err(wrong()),
    };
    let sides = 1..=SIDE_MAX as usize;
    let fits = sides.contains(&size[0]) && sides.contains(&size[1]) && (1..=4).contains(&size[2]);
    if header.dtype != IntType::U8 || !fits { Err(wrong()) } else { Ok((len, size)) }
}

fn read_labels(
    name: &str,
    header: &Header,
    input: &mut Input<'_>,
    images: usize,
) -> Result<Vec<u32>> {
    if header.shape != [images] {
        let (expected, got) =
            (format!("[{images}], one for each image"), format!("{:?}", header.shape));
        return Err(damaged(input.path(), 0, format!("the shape of `{name}`"), expected, got));
    }
    let start = input.offset();
    let mut bytes = vec![0; images * header.dtype.bytes];
    input.read_exact(&mut bytes, "labels")?;
    input.expect_end()?;
    let check = |(i, element): (usize, &[u8])| {
        let label = header.dtype.label(element).filter(|label| *label < CLASSES_MAX);
        label.ok_or_else(|| {
            let offset = start + (i * header.dtype.bytes) as u64;
            let expected = format!("from 0 to {}", CLASSES_MAX - 1);
            let got = format!("{} {element:?}", header.dtype);
            damaged(input.path(), offset, format!("a label in `{name}`"), expected, got)
        })
    };
    bytes.chunks_exact(header.dtype.bytes).enumerate().map(check).collect()
}

/// Bytes of an array with this header.
fn data_bytes(header: &Header) -> Option<u64> {
    let elements = header.shape.iter().try_fold(1_u64, |n, dim| n.checked_mul(*dim as u64))?;
    elements.checked_mul(header.dtype.bytes as u64)
}

/// A `.npz` archive of `.npy` members.
struct Npz {
    path: PathBuf,
}

impl Npz {
    /// The archive, opened for the array `name`, and the length of its file.
    fn archive(&self, name: &str) -> Result<(ZipArchive<BufReader<File>>, u64)> {
        let file = File::open(&self.path).map_err(Error::io("open", &self.path))?;
        let file_len = file.metadata().map_err(Error::io("read", &self.path))?.len();
        let archive =
            ZipArchive::new(BufReader::new(file)).map_err(|error| self.refused(name, error))?;
        Ok((archive, file_len))
    }

    fn refused(&self, name: &str, error: ZipError) -> Error {
        match error {
            ZipError::Io(source) if source.kind() != std::io::ErrorKind::UnexpectedEof => {
                Error::Io { operation: "read", path: self.path.clone(), source }
            }
            ZipError::FileNotFound => {
                missing_files(Source::Arrays, &self.path, vec![format!("an array `{name}`")])
            }
            other => damaged(&self.path, 0, "the archive", "a sound zip file", other.to_string()),
        }
    }
}

impl ArrayFile for Npz {
    fn has(&self, name: &str) -> Result<bool> {
        let archive = self.archive(name)?.0;
        Ok(archive.index_for_name(&format!("{name}.npy")).is_some())
    }

    fn visit(&self, name: &str, visit: Visit<'_>) -> Result<()> {
        let (mut archive, file_len) = self.archive(name)?;
        let member_name = format!("{name}.npy");
        let member = archive.by_name(&member_name).map_err(|error| self.refused(name, error))?;
        // The member's length in the archive is trusted only as far as it is possible.
        let possible = member.compressed_size().min(file_len).saturating_mul(DEFLATE_RATIO_MAX);
        let len_max = member.size().min(possible);
        let mut input = Input::member(self.path.join(&member_name), member, len_max);
        let header = npy::read_header(&mut input)?;
        let total = data_bytes(&header).and_then(|n| n.checked_add(input.offset()));
        input.check_claim(0, total)?;
        visit(&header, &mut input)
    }
}

/// A safetensors file.
struct SafeTensors {
    path: PathBuf,
    metadata: Metadata,
    data_start: u64,
}

impl SafeTensors {
    fn open(path: PathBuf) -> Result<Self> {
        let mut file = File::open(&path).map_err(Error::io("open", &path))?;
        let file_len = file.metadata().map_err(Error::io("read", &path))?.len();
        let mut length = [0; 8];
        if file_len < 8 {
            let got = format!("{file_len} bytes");
            return Err(damaged(&path, file_len, "the file", "a zip or safetensors file", got));
        }
        file.read_exact(&mut length).map_err(Error::io("read", &path))?;
        let length = u64::from_le_bytes(length);
        let possible = (file_len - 8).min(SAFETENSORS_HEADER_MAX);
        if length > possible {
            let expected = format!("at most {possible} bytes, for a file of {file_len}");
            let got = format!("{length} bytes");
            return Err(damaged(&path, 0, "the length of the safetensors header", expected, got));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(Error::io("read", &path))?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| {
            let offset = 8 + error.column().saturating_sub(1) as u64;
            damaged(&path, offset, "the safetensors header", "a sound header", error.to_string())
        })?;
        let data_start = 8 + length;
        let expected = data_start + metadata.data_len() as u64;
        if expected != file_len {
            let (expected, got) = (format!("{expected} bytes"), format!("{file_len} bytes"));
            return Err(damaged(&path, file_len, "the length of the file", expected, got));
        }
        Ok(Self { path, metadata, data_start })
    }
}

impl ArrayFile for SafeTensors {
    fn has(&self, name: &str) -> Result<bool> {
        Ok(self.metadata.info(name).is_some())
    }

    fn visit(&self, name: &str, visit: Visit<'_>) -> Result<()> {
        let info = self.metadata.info(name).ok_or_else(|| {
            missing_files(Source::Arrays, &self.path, vec![format!("an array `{name}`")])
        })?;
        let int = |bytes, signed| Ok(IntType { bytes, signed, big_endian: false });
        let dtype = match info.dtype {
            Dtype::U8 => int(1, false),
            Dtype::I8 => int(1, true),
            Dtype::U16 => int(2, false),
            Dtype::I16 => int(2, true),
            Dtype::U32 => int(4, false),
            Dtype::I32 => int(4, true),
            Dtype::U64 => int(8, false),
            Dtype::I64 => int(8, true),
            other => {
                let what = format!("the type of `{name}`");
                Err(damaged(&self.path, 8, what, "an integer type", format!("{other:?}")))
            }
        }?;
        let (start, end) = info.data_offsets;
        let mut file = File::open(&self.path).map_err(Error::io("open", &self.path))?;
        let offset = self.data_start + start as u64;
        file.seek(SeekFrom::Start(offset)).map_err(Error::io("read", &self.path))?;
        // The library has compared shape and offsets, and `open` the offsets with the file.
        let bytes = BufReader::new(file).take((end - start) as u64);
        let mut input = Input::part(self.path.clone(), bytes, offset);
        visit(&Header { dtype, shape: info.shape.clone() }, &mut input)
    }
}
