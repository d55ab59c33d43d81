//! Named arrays: numpy's `.npz` and `.safetensors`.
//!
//! `train_images` and `test_images` are unsigned bytes, [N, H, W] (grey) or [N, H, W, C] with C
//! from 1 to 4; `train_labels` and `test_labels` are integers of any width, [N]. The classes are 0
//! to the largest training label, named by their number. A file without both `test_images` and
//! `test_labels` has no test split.

use std::fs::{self, File};
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Once;

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use zip::ZipArchive;
use zip::result::ZipError;

use super::identity::WatchedFiles;
use super::input::{self, DEFLATE_RATIO_MAX, Input};
use super::npy::{self, ElementType, IntType, NpyHeader};
use super::{
    CHUNK_BYTES, Layout, OnBad, Reader, SIDE_MAX, Sink, Source, Split, TestSplit, missing,
    missing_files,
};
use crate::error::{Error, Mismatch, Result, damaged};
use crate::notes;

/// Largest number of classes; a label that is not below it is damage.
const CLASSES_MAX: u32 = 65_536;
/// Most channels of an image.
const CHANNELS_MAX: usize = 4;
/// Longest header of a safetensors file, in bytes: it describes four arrays.
const SAFETENSORS_HEADER_MAX: u64 = 16 << 20;

/// Arrays of images, train then test.
const IMAGES: [&str; 2] = ["train_images", "test_images"];
/// Arrays of labels, train then test.
const LABELS: [&str; 2] = ["train_labels", "test_labels"];

/// Visitor of an array: its header, and its bytes from the first element on.
type Visit<'v> = &'v mut dyn FnMut(&NpyHeader, &mut Input<'_>) -> Result<()>;

/// A file of named arrays.
trait ArrayFile: Send + Sync {
    /// Names of the arrays, sorted.
    fn names(&self) -> Result<Vec<String>>;

    /// Opens the array called `name`; the header agrees with the number of bytes that follow.
    fn visit(&self, name: &str, visit: Visit<'_>) -> Result<()>;
}

/// Opens the file at `root`, or the only file of arrays in the folder `root`.
pub(crate) fn open(root: &Path, watch: &WatchedFiles) -> Result<Box<dyn Reader>> {
    let path = find(root)?;
    watch.add(&path)?;
    let mut start = [0; 4];
    let mut file = input::open_file(&path)?;
    let zip = file.read_exact(&mut start).is_ok() && start.starts_with(b"PK");
    if !zip && path.extension().is_some_and(|extension| extension == "npz") {
        let expected = "a zip archive, as numpy.savez writes it";
        return Err(damaged(&path, 0, "the file", expected, format!("bytes {start:?}")));
    }
    let file: Box<dyn ArrayFile> =
        if zip { Box::new(Npz { path }) } else { Box::new(SafeTensors::open(path)?) };
    Ok(Box::new(ArraysReader::open(file)?))
}

fn find(root: &Path) -> Result<PathBuf> {
    if root.is_file() {
        return Ok(root.to_path_buf());
    }
    // A pipe or a device.
    if root.exists() && !root.is_dir() {
        return Err(missing(Source::Arrays, root));
    }
    let mut found = vec![];
    for entry in fs::read_dir(root).map_err(Error::io("list", root))? {
        let path = entry.map_err(Error::io("list", root))?.path();
        // Opening a pipe would wait for its writer.
        if path.extension().is_some_and(|e| e == "npz" || e == "safetensors") && path.is_file() {
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
                .in_layout(root))
        }
    }
}

/// A dataset in one file of arrays.
struct ArraysReader {
    file: Box<dyn ArrayFile>,
    layout: Layout,
    labels: [Vec<u32>; 2],
    /// Names of arrays that are not read.
    unread: Vec<String>,
    /// Whether the unread arrays have been reported.
    reported: Once,
}

/// Number of images and (height, width, channels).
type ImagesShape = (usize, [usize; 3]);

impl ArraysReader {
    fn open(file: Box<dyn ArrayFile>) -> Result<Self> {
        let mut labels = [vec![], vec![]];
        let mut shapes = [(0, [0; 3]); 2];
        let (split_arrays, unread): (Vec<String>, _) = {
            let known = |name: &String| IMAGES.iter().chain(&LABELS).any(|known| known == name);
            file.names()?.into_iter().partition(known)
        };
        let has_test = split_arrays.iter().any(|name| name == IMAGES[1] || name == LABELS[1]);
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
        // The next two errors are about a test array, which is opened again for the path in the
        // error.
        if has_test && test_size != size {
            file.visit(IMAGES[1], &mut |_, input| {
                let what = format!("[H, W, C] of `{}`", IMAGES[1]);
                let expected = format!("{size:?} as in training");
                Err(Mismatch::new(what, expected, format!("{test_size:?}"))
                    .remedy("give the images of both splits one size")
                    .in_layout(input.path()))
            })?;
        }
        // Without training images there are no classes; that is not an error of the test labels.
        let beyond = |label: &u32| train_len > 0 && *label >= classes;
        if let Some(place) = labels[1].iter().position(beyond) {
            let got = labels[1][place];
            file.visit(LABELS[1], &mut |_, input| {
                let what = format!("label {place} of `{}`", LABELS[1]);
                let expected = format!("below {classes}, as in training");
                Err(Mismatch::new(what, expected, got.to_string())
                    .remedy("leave the image out, or add training images of its class")
                    .in_layout(input.path()))
            })?;
        }
        let [height, width, channels] = size;
        let classes = (0..classes).map(|class| class.to_string()).collect();
        let test = if has_test {
            TestSplit::Images(test_len)
        } else {
            TestSplit::Missing("the arrays `test_images` and `test_labels`")
        };
        let layout = Layout { channels, height, width, classes, train: train_len, test };
        Ok(Self { file, layout, labels, unread, reported: Once::new() })
    }
}

impl Reader for ArraysReader {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, split: Split, _on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        self.reported.call_once(|| {
            if !self.unread.is_empty() {
                let names = notes::some_of(self.unread.iter().cloned());
                notes::say(&format!("only arrays of train and test are read, and not {names}"));
            }
        });
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

fn images_shape(name: &str, header: &NpyHeader, input: &Input<'_>) -> Result<ImagesShape> {
    let size = match header.shape[..] {
        [n, h, w] => Some((n, [h, w, 1])),
        [n, h, w, c] => Some((n, [h, w, c])),
        _ => None,
    };
    let side = 1..=SIDE_MAX as usize;
    let fits = |(_, [h, w, c]): &ImagesShape| {
        side.contains(h) && side.contains(w) && (1..=CHANNELS_MAX).contains(c)
    };
    let size = size.filter(fits);
    match size {
        Some(size) if header.element == ElementType::Int(IntType::U8) && !header.is_fortran => {
            Ok(size)
        }
        _ => {
            let expected = "uint8, N×H×W or N×H×W×C with C from 1 to 4";
            let remedy = images_remedy(header, size.is_some());
            let mismatch = Mismatch::new(format!("`{name}`"), expected, header.to_string());
            Err(mismatch.remedy(remedy).in_layout(input.path()))
        }
    }
}

/// Instructions, with expressions of numpy, that turn an array `x` into images.
fn images_remedy(header: &NpyHeader, has_shape: bool) -> String {
    let transposed = match header.shape[..] {
        [_, c, h, w] => (1..=CHANNELS_MAX).contains(&c) && h > CHANNELS_MAX && w > CHANNELS_MAX,
        _ => false,
    };
    let mut steps = vec![];
    if transposed {
        steps.push("move the channels to the end with x.transpose(0, 2, 3, 1)");
    } else if !has_shape {
        steps.push("bring them to that shape, such as with x.reshape(-1, 28, 28)");
    }
    match &header.element {
        ElementType::Int(int) if *int == IntType::U8 => {}
        ElementType::Other(name) if name.to_lowercase().starts_with(['f', 'b']) => {
            steps
                .push("make them bytes, from values of 0 to 1 with (x * 255).round().astype('u1')");
        }
        _ => steps.push("make them bytes, from values of 0 to 255 with x.astype('u1')"),
    }
    // numpy saves a transposed array in Fortran order.
    if header.is_fortran || transposed {
        steps.push("save numpy.ascontiguousarray(x)");
    }
    steps.join(", ")
}

fn read_labels(
    name: &str,
    header: &NpyHeader,
    input: &mut Input<'_>,
    images: usize,
) -> Result<Vec<u32>> {
    let wrong = |what: String, expected: String, got: String, remedy: &str, input: &Input<'_>| {
        Err(Mismatch::new(what, expected, got).remedy(remedy).in_layout(input.path()))
    };
    let int = match (&header.element, &header.shape[..]) {
        (&ElementType::Int(int), shape) if shape == [images] => int,
        (element, shape) => {
            let remedy = match (element, shape) {
                (ElementType::Other(_), _) => "make them integers, such as with y.astype('i8')",
                (_, [n, 1] | [1, n]) if *n == images => {
                    "bring them to that shape with y.reshape(-1)"
                }
                (_, [n, _]) if *n == images => "make one label of each row with y.argmax(axis=1)",
                _ => "give each image one label",
            };
            let expected = format!("integers [{images}], one for each image");
            return wrong(format!("`{name}`"), expected, header.to_string(), remedy, input);
        }
    };
    let mut labels = vec![];
    let mut piece = vec![0; CHUNK_BYTES.min(images * int.bytes)];
    while labels.len() < images {
        let count = (images - labels.len()).min(piece.len() / int.bytes);
        let piece = &mut piece[..count * int.bytes];
        input.read_exact(piece, "labels")?;
        for value in piece.chunks_exact(int.bytes).map(|element| int.value(element)) {
            match u32::try_from(value).ok().filter(|label| *label < CLASSES_MAX) {
                Some(label) => labels.push(label),
                None => {
                    let what = format!("label {} of `{name}`", labels.len());
                    let expected = format!("from 0 to {}", CLASSES_MAX - 1);
                    let remedy = "number the classes from 0, and leave out images without one";
                    return wrong(what, expected, format!("{value} ({int})"), remedy, input);
                }
            }
        }
    }
    input.expect_end()?;
    Ok(labels)
}

/// Bytes of an array with this header; `None` if the number overflows.
fn data_bytes(header: &NpyHeader) -> Option<u64> {
    let elements = header.shape.iter().try_fold(1_u64, |n, dim| n.checked_mul(*dim as u64))?;
    match header.element {
        ElementType::Int(int) => elements.checked_mul(int.bytes as u64),
        // Not checked, because the visitor refuses this type with a better error.
        ElementType::Other(_) => Some(0),
    }
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
    fn names(&self) -> Result<Vec<String>> {
        let archive = self.archive(IMAGES[0])?.0;
        let names = archive.file_names().map(|file| {
            let file = file.map_err(|error| self.refused(IMAGES[0], error))?;
            Ok(file.strip_suffix(".npy").unwrap_or(&file).to_string())
        });
        let mut names = names.collect::<Result<Vec<String>>>()?;
        names.sort();
        Ok(names)
    }

    fn visit(&self, name: &str, visit: Visit<'_>) -> Result<()> {
        let (mut archive, file_len) = self.archive(name)?;
        let member_name = format!("{name}.npy");
        let member = archive.by_name(&member_name).map_err(|error| self.refused(name, error))?;
        // The stated length is limited to the possible length.
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
    /// Offset in the file of the first array; the offsets in `metadata` count from here.
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
    fn names(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = self.metadata.tensors().into_keys().collect();
        names.sort();
        Ok(names)
    }

    fn visit(&self, name: &str, visit: Visit<'_>) -> Result<()> {
        let info = self.metadata.info(name).ok_or_else(|| {
            missing_files(Source::Arrays, &self.path, vec![format!("an array `{name}`")])
        })?;
        let int = |bytes, signed| ElementType::Int(IntType { bytes, signed, big_endian: false });
        let element = match info.dtype {
            Dtype::U8 => int(1, false),
            Dtype::I8 => int(1, true),
            Dtype::U16 => int(2, false),
            Dtype::I16 => int(2, true),
            Dtype::U32 => int(4, false),
            Dtype::I32 => int(4, true),
            Dtype::U64 => int(8, false),
            Dtype::I64 => int(8, true),
            other => ElementType::Other(format!("{other:?}")),
        };
        let (start, end) = info.data_offsets;
        let mut file = File::open(&self.path).map_err(Error::io("open", &self.path))?;
        let offset = self.data_start + start as u64;
        file.seek(SeekFrom::Start(offset)).map_err(Error::io("read", &self.path))?;
        // Parsing the metadata compared shapes with offsets; `open` compared the offsets with the
        // length of the file.
        let bytes = BufReader::new(file).take((end - start) as u64);
        let mut input = Input::part(self.path.clone(), bytes, offset);
        visit(&NpyHeader { element, shape: info.shape.clone(), is_fortran: false }, &mut input)
    }
}
