//! Files of named arrays: numpy's `.npz` and `.safetensors`.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use zip::ZipArchive;
use zip::result::ZipError;

use super::input::{DEFLATE_RATIO_MAX, Input};
use super::npy::{self, ElementType, FloatType, IntType, NpyHeader};
use super::{Source, missing_files};
use crate::error::{Error, Mismatch, Result, damaged};
use crate::targets::OUTPUTS_MAX;

/// Longest header of a safetensors file, in bytes: it describes some arrays.
const SAFETENSORS_HEADER_MAX: u64 = 16 << 20;

/// Visitor of an array: its header, and its bytes from the first element on.
pub(super) type Visit<'v> = &'v mut dyn FnMut(&NpyHeader, &mut Input<'_>) -> Result<()>;

/// A file of named arrays.
pub(super) trait ArrayFile: Send + Sync {
    /// Names of the arrays, sorted.
    fn names(&self) -> Result<Vec<String>>;

    /// Opens the array called `name`; the header agrees with the number of bytes that follow.
    fn visit(&self, name: &str, visit: Visit<'_>) -> Result<()>;

    /// Names of the classes, labels or numbers, if the file has them: an array `classes` of text in
    /// an archive, metadata `classes`, a JSON list, in safetensors.
    fn class_names(&self) -> Result<Option<Vec<String>>>;
}

/// Name of the array, or key of the metadata, with the names of the classes.
pub(super) const CLASSES: &str = "classes";

/// Bytes of an array with this header; `None` if the number overflows.
fn data_bytes(header: &NpyHeader) -> Option<u64> {
    let elements = header.shape.iter().try_fold(1_u64, |n, dim| n.checked_mul(*dim as u64))?;
    match header.element {
        ElementType::Bool => Some(elements),
        ElementType::Int(int) => elements.checked_mul(int.bytes as u64),
        ElementType::Float(float) => elements.checked_mul(float.bytes() as u64),
        ElementType::Text(text) => elements.checked_mul(text.bytes() as u64),
        // Not checked, because the visitor refuses this type with a better error.
        ElementType::Other(_) => Some(0),
    }
}

/// A `.npz` archive of `.npy` members.
pub(super) struct Npz {
    pub(super) path: PathBuf,
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
        let archive = self.archive("")?.0;
        let names = archive.file_names().map(|file| {
            let file = file.map_err(|error| self.refused("", error))?;
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

    fn class_names(&self) -> Result<Option<Vec<String>>> {
        if !self.names()?.iter().any(|name| name == CLASSES) {
            return Ok(None);
        }
        let mut names = vec![];
        self.visit(CLASSES, &mut |header, input| {
            names = read_text(header, input)?;
            input.expect_end()
        })?;
        Ok(Some(names))
    }
}

/// Checks the number of classes of a file.
fn check_count(path: &Path, names: usize) -> Result<()> {
    if names <= OUTPUTS_MAX as usize {
        return Ok(());
    }
    let (what, expected) = (format!("`{CLASSES}`"), format!("at most {OUTPUTS_MAX} names"));
    Err(Mismatch::new(what, expected, names.to_string())
        .remedy("leave out unused classes")
        .in_layout(path))
}

/// The elements of an array of text of one dimension.
fn read_text(header: &NpyHeader, input: &mut Input<'_>) -> Result<Vec<String>> {
    let (text, len) = match (&header.element, &header.shape[..]) {
        (ElementType::Text(text), [len]) => (*text, *len),
        _ => {
            let what = format!("`{CLASSES}`");
            return Err(Mismatch::new(
                what,
                "text [K], one name for each class or column",
                header.to_string(),
            )
            .remedy("make them text, such as with numpy.array(names)")
            .in_layout(input.path()));
        }
    };
    check_count(input.path(), len)?;
    let mut element = vec![0; text.bytes()];
    let mut names = vec![];
    for place in 0..len {
        input.read_exact(&mut element, "the names of the classes")?;
        let name = text.value(&element).ok_or_else(|| {
            let (what, got) = (format!("name {place} of `{CLASSES}`"), "another code".to_string());
            damaged(input.path(), input.offset(), what, "characters of Unicode", got)
        })?;
        names.push(name);
    }
    Ok(names)
}

/// A safetensors file.
pub(super) struct SafeTensors {
    path: PathBuf,
    metadata: Metadata,
    /// Offset in the file of the first array; the offsets in `metadata` count from here.
    data_start: u64,
}

impl SafeTensors {
    pub(super) fn open(path: PathBuf) -> Result<Self> {
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
            Dtype::BOOL => ElementType::Bool,
            Dtype::U8 => int(1, false),
            Dtype::I8 => int(1, true),
            Dtype::U16 => int(2, false),
            Dtype::I16 => int(2, true),
            Dtype::U32 => int(4, false),
            Dtype::I32 => int(4, true),
            Dtype::U64 => int(8, false),
            Dtype::I64 => int(8, true),
            Dtype::F16 => ElementType::Float(FloatType::F16 { big_endian: false }),
            Dtype::BF16 => ElementType::Float(FloatType::Bf16),
            Dtype::F32 => ElementType::Float(FloatType::F32 { big_endian: false }),
            Dtype::F64 => ElementType::Float(FloatType::F64 { big_endian: false }),
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

    fn class_names(&self) -> Result<Option<Vec<String>>> {
        let metadata = self.metadata.metadata().as_ref();
        let Some(text) = metadata.and_then(|entries| entries.get(CLASSES)) else {
            return Ok(None);
        };
        let names: Vec<String> = serde_json::from_str(text).map_err(|error| {
            let what = format!("`{CLASSES}` in the metadata");
            let expected = "a JSON list of texts, one for each class or column";
            Mismatch::new(what, expected, error.to_string())
                .remedy("write it as json.dumps(names)")
                .in_layout(&self.path)
        })?;
        check_count(&self.path, names.len())?;
        Ok(Some(names))
    }
}
