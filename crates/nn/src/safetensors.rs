//! Weights files: `.safetensors`, readable by PyTorch and written by it (U5).
//!
//! The header is written here, sorted, because the crate keeps metadata in a hash map: the same
//! weights would give another file each time. Reading is the crate's, which checks every offset.
//!
//! Every file that is written here has a checksum in its metadata, `crc32`. Other programs ignore
//! it. A file that has one is compared with it when it is read.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::state::{HostData, HostTensor, StateDict, elements};

/// Text entries of a file.
pub type Metadata = BTreeMap<String, String>;

/// Key of the checksum in the metadata.
pub const CHECKSUM: &str = "crc32";

/// One tensor in the header.
#[derive(Serialize)]
struct HeaderEntry<'a> {
    dtype: String,
    shape: &'a [usize],
    data_offsets: [usize; 2],
}

/// Writes weights with metadata, atomically: a temporary file beside it, synced, then renamed. The
/// same content gives the same bytes. At any time `path` holds the old file or the new one.
///
/// # Errors
/// [`Error::File`] as from [`to_bytes`], [`Error::Io`].
pub fn save(path: &Path, state: &StateDict, metadata: &Metadata) -> Result<()> {
    write(path, &to_bytes(path, state, metadata)?)
}

/// The bytes that [`save`] writes to `path`, for callers that write them elsewhere or later.
///
/// # Errors
/// [`Error::File`] for a tensor whose elements do not fit its shape.
pub fn to_bytes(path: &Path, state: &StateDict, metadata: &Metadata) -> Result<Vec<u8>> {
    encode(state, metadata).map_err(|e| file_error(path, e))
}

/// Writes the result of [`to_bytes`] to a file, like [`save`].
///
/// # Errors
/// [`Error::Io`].
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = |source| Error::Io { action: "write", path: path.into(), source };
    write_atomically(path, bytes).map_err(failed)
}

/// The bytes of a file.
fn encode(state: &StateDict, metadata: &Metadata) -> Result<Vec<u8>, String> {
    // Wide elements first: every tensor starts at a multiple of its element's size.
    let mut tensors: Vec<_> = state.iter().collect();
    tensors.sort_by_key(|(_, tensor)| match tensor.data {
        HostData::I64(_) => 0,
        HostData::F32(_) => 1,
        HostData::U8(_) => 2,
    });
    let mut metadata = metadata.clone();
    metadata.insert(CHECKSUM.into(), checksum(state, &metadata));
    let mut header = serde_json::Map::new();
    let mut insert = |name: &str, entry: serde_json::Result<serde_json::Value>| {
        entry.map(|entry| header.insert(name.into(), entry)).map_err(|e| e.to_string())
    };
    insert("__metadata__", serde_json::to_value(metadata))?;
    let mut data = vec![];
    for (name, tensor) in tensors {
        if !tensor.is_whole() || name == "__metadata__" {
            return Err(format!("`{name}` {} has {} elements", tensor.form(), tensor.data.len()));
        }
        let start = data.len();
        tensor.data.le_bytes(|bytes| data.extend_from_slice(bytes));
        let dtype = tensor.data.dtype_name().to_ascii_uppercase();
        let entry = HeaderEntry { dtype, shape: &tensor.shape, data_offsets: [start, data.len()] };
        insert(name, serde_json::to_value(entry))?;
    }
    let mut header = serde_json::to_vec(&header).map_err(|e| e.to_string())?;
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header, &data].concat())
}

/// Writes a file beside `path` and renames it when its bytes are on the disk.
fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| io::Error::other("no file name"))?;
    let mut temporary_name = std::ffi::OsString::from(".");
    temporary_name.push(name);
    temporary_name.push(format!(".tmp-{}", std::process::id()));
    let temporary = path.with_file_name(temporary_name);
    let written = (|| {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    if let Err(error) = written {
        // The first error is the one to report; removing the temporary file is best effort.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    // The rename itself is on the disk once the folder is; not every system can sync a folder.
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
    Ok(())
}

/// CRC-32 of all tensors and of the metadata except the checksum, as eight hexadecimal digits.
fn checksum(state: &StateDict, metadata: &Metadata) -> String {
    let mut crc = crc32fast::Hasher::new();
    for (key, text) in metadata.iter().filter(|(key, _)| *key != CHECKSUM) {
        [key, "\0", text, "\0"].iter().for_each(|part| crc.update(part.as_bytes()));
    }
    for (name, tensor) in state.iter() {
        [name, "\0", &tensor.form(), "\0"].iter().for_each(|part| crc.update(part.as_bytes()));
        tensor.data.le_bytes(|bytes| crc.update(bytes));
    }
    format!("{:08x}", crc.finalize())
}

/// Reads weights and metadata, which has the checksum, too. Tensors are f32, i64 or u8.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read; [`Error::File`] for one that is not a safetensors
/// file, is truncated, differs from its checksum, or holds other element types.
pub fn load(path: &Path) -> Result<(StateDict, Metadata)> {
    from_bytes(path, &read(path)?)
}

/// The bytes of a file.
///
/// # Errors
/// [`Error::Io`].
pub fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|source| Error::Io { action: "read", path: path.into(), source })
}

/// Parses bytes that came from a file at `path`, here or elsewhere, as [`load`] does.
///
/// # Errors
/// [`Error::File`], as from [`load`].
pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<(StateDict, Metadata)> {
    decode(bytes).map_err(|e| file_error(path, e))
}

fn decode(bytes: &[u8]) -> Result<(StateDict, Metadata), String> {
    let broken = |e| match other_format(bytes) {
        Some((format, remedy)) => format!("not a safetensors file, but {format}; {remedy}"),
        None => format!("not a safetensors file, or a damaged one ({e}); copy or export it again"),
    };
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(broken)?;
    let metadata = header.metadata().iter().flatten();
    let metadata: Metadata = metadata.map(|(key, value)| (key.clone(), value.clone())).collect();
    let mut state = StateDict::default();
    for (name, view) in SafeTensors::deserialize(bytes).map_err(broken)?.iter() {
        let data = match view.dtype() {
            Dtype::F32 => HostData::F32(elements(view.data())),
            Dtype::I64 => HostData::I64(elements(view.data())),
            Dtype::U8 => HostData::U8(view.data().to_vec()),
            other => {
                return Err(format!("`{name}` is {other:?}, expected F32, I64 or U8; convert it"));
            }
        };
        state.insert(name, HostTensor { shape: view.shape().to_vec(), data });
    }
    match metadata.get(CHECKSUM).map(|written| (written, checksum(&state, &metadata))) {
        // A fuzzer would spend its time on wrong checksums.
        Some((written, found)) if *written != found && !cfg!(fuzzing) => Err(format!(
            "its contents have the checksum {found}, but its metadata says {written}: it is \
             damaged; copy or export it again. If another program changed it on purpose, remove \
             `{CHECKSUM}` from its metadata"
        )),
        _ => Ok((state, metadata)),
    }
}

/// Files that are mistaken for weights, by their first bytes: their format, and the remedy.
const OTHERS: [(&[u8], &str, &str); 8] = [
    (
        b"PK\x03\x04",
        "a zip archive, as torch.save (.pt, .pth) and numpy.savez (.npz) write",
        CONVERT,
    ),
    (b"\x80\x02", "a pickle, as torch.save (.pt, .pth) wrote before PyTorch 1.6", CONVERT),
    (b"\x80\x04", "a pickle", CONVERT),
    (b"\x80\x05", "a pickle", CONVERT),
    (b"\x93NUMPY", "an array of numpy (.npy), which has no names of tensors", CONVERT),
    (b"\x89HDF", "an HDF5 file, as Keras writes", CONVERT),
    (
        b"version https://git-lfs",
        "a pointer of Git LFS",
        "fetch the file itself with `git lfs pull`",
    ),
    (b"<!DOCTYPE", "a web page", "download the file itself"),
];

const CONVERT: &str = "convert it in Python: `safetensors.torch.save_file(state_dict, \
                       \"weights.safetensors\")`, where `state_dict` are its tensors by name, as \
                       `torch.load(\"FILE\", weights_only=True)` returns them";

/// The format of bytes that are not safetensors, and the remedy, if the format is known.
fn other_format(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    let found = OTHERS.iter().find(|(start, ..)| bytes.starts_with(start));
    found.map(|(_, format, remedy)| (*format, *remedy))
}

fn file_error(path: &Path, problem: String) -> Error {
    Error::File { path: path.into(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> (StateDict, Metadata) {
        let mut state = StateDict::default();
        state.insert("z.weight", HostTensor::f32(&[2, 1], vec![1.5, -0.0]));
        state.insert("a.count", HostTensor::scalar_i64(-7));
        state.insert("empty", HostTensor::f32(&[0], vec![]));
        let text = |k: &str| (k.to_owned(), format!("{k} \"quoted\" ünïcode\n"));
        (state, ["topology", "b", "c", "d"].map(text).into())
    }

    #[test]
    fn what_is_saved_is_loaded_and_bytes_repeat() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let (state, metadata) = example();
        save(&path, &state, &metadata).unwrap();
        let first = fs::read(&path).unwrap();
        let (loaded, mut with_checksum) = load(&path).unwrap();
        assert_eq!(with_checksum.remove(CHECKSUM).unwrap(), checksum(&state, &metadata));
        assert_eq!((loaded, with_checksum), (state.clone(), metadata.clone()));
        save(&path, &state, &metadata).unwrap();
        assert_eq!(first, fs::read(&path).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
        // And the other way: tensors that the crate writes.
        let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![1], &[0, 0, 128, 63]);
        let theirs = safetensors::serialize([("x", view.unwrap())], None).unwrap();
        let (state, metadata) = decode(&theirs).unwrap();
        assert_eq!(state.get("x"), Some(&HostTensor::f32(&[1], vec![1.0])));
        assert!(metadata.is_empty());
    }

    #[test]
    fn a_failed_save_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let (state, metadata) = example();
        let target = folder.path().join("taken");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("kept"), "x").unwrap();
        let error = save(&target, &state, &metadata).unwrap_err();
        assert!(matches!(error, Error::Io { action: "write", .. }), "{error:?}");
        let words = format!("cannot write {}: ", target.display());
        assert!(error.to_string().starts_with(&words), "{error}");
        assert!(target.join("kept").exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let none = folder.path().join("none");
        let error = load(&none).unwrap_err();
        assert!(matches!(error, Error::Io { action: "read", .. }), "{error:?}");
        let words = format!("cannot read {}: ", none.display());
        assert!(error.to_string().starts_with(&words), "{error}");
        let mut torn = StateDict::default();
        torn.insert("w", HostTensor::f32(&[2], vec![1.0]));
        let error = save(&folder.path().join("w"), &torn, &metadata).unwrap_err();
        assert!(matches!(error, Error::File { .. }), "{error:?}");
        assert!(error.to_string().contains("`w` f32 [2] has 1 elements"), "{error}");
    }

    #[test]
    fn other_element_types_are_named() {
        let view = safetensors::tensor::TensorView::new(Dtype::F16, vec![1], &[0, 0]).unwrap();
        let bytes = safetensors::serialize([("half", view)], None).unwrap();
        let error = decode(&bytes).unwrap_err();
        assert!(error.contains("`half` is F16"), "{error}");
    }

    #[test]
    fn files_of_other_formats_are_named_with_the_way_to_convert_them() {
        for (start, named) in [
            (&b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl"[..], "torch.save (.pt, .pth)"),
            (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a pickle, as torch.save"),
            (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00}\x94.", "a pickle; convert"),
            (b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'}", "(.npy)"),
            (b"\x89HDF\r\n\x1a\n", "HDF5"),
            (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
            (b"<!DOCTYPE html><html>", "a web page; download"),
        ] {
            let error = decode(start).unwrap_err();
            assert!(error.contains(named) && !error.contains("damaged"), "{error}");
        }
        // A header of 640 bytes begins with the first two bytes of a pickle.
        let (state, _) = example();
        let long = ("note".to_owned(), "x".repeat(409));
        let bytes = encode(&state, &Metadata::from([long])).unwrap();
        assert_eq!(bytes[..2], *b"\x80\x02");
        decode(&bytes).unwrap();
    }

    proptest! {
        #[test]
        fn a_truncated_or_damaged_file_is_an_error_or_whole(cut in 0usize..400, at in 0usize..400) {
            let (state, metadata) = example();
            let bytes = encode(&state, &metadata).unwrap();
            let error = decode(&bytes[..cut.min(bytes.len() - 1)]).unwrap_err();
            prop_assert!(error.contains("copy or export it again"), "{}", error);
            let mut damaged = bytes.clone();
            damaged[at % bytes.len()] ^= 0x41;
            if let Ok((found, found_metadata)) = decode(&damaged) {
                // The damage is in the name of the checksum, or in white space.
                prop_assert_eq!(found, state);
                let kept = |(key, _): &(&String, &String)| metadata.contains_key(*key);
                prop_assert!(found_metadata.iter().filter(kept).eq(metadata.iter()));
            }
        }
    }
}
