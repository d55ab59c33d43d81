//! Weights files: `.safetensors`, readable by PyTorch and written by it (U5).
//!
//! The header is written here, sorted, because the crate keeps metadata in a hash map: the same
//! weights would give another file each time. Reading is the crate's, which checks every offset.
//!
//! Every file that is written here has two entries in its metadata that other programs ignore: a
//! checksum of everything else, `crc32`, and the version of these entries, `meristem_format`. The
//! checksum covers the version, and a file with a version must have a checksum, so that no single
//! changed byte turns the comparison off. Files without a version are from earlier builds or from
//! other programs: they are compared if they have a checksum.

use std::collections::BTreeMap;
use std::path::Path;

use meristem_device::named_file;
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::state::{HostData, HostTensor, StateDict, elements};

/// Text entries of a file.
pub type Metadata = BTreeMap<String, String>;

/// Key of the checksum in the metadata.
pub const CHECKSUM: &str = "crc32";

/// Key of the version of the format in the metadata.
const FORMAT: &str = "meristem_format";

/// Version of the format: the first one with a key of its own, and a checksum in every file.
const FORMAT_VERSION: &str = "2";

/// One tensor in the header.
#[derive(Serialize)]
struct HeaderEntry<'a> {
    dtype: String,
    shape: &'a [usize],
    data_offsets: [usize; 2],
}

/// The bytes of a file with these weights and metadata; the same content gives the same bytes.
/// `path` is for errors.
///
/// # Errors
/// [`Error::File`] for a tensor whose elements do not fit its shape.
pub fn to_bytes(path: &Path, state: &StateDict, metadata: &Metadata) -> Result<Vec<u8>> {
    encode(state, metadata).map_err(|e| file_error(path, e))
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
    metadata.insert(FORMAT.into(), FORMAT_VERSION.into());
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
/// [`Error::Io`] for a file that cannot be read, or is a pipe, a device or a folder;
/// [`Error::File`] for one that is not a safetensors file, is truncated, differs from its checksum,
/// or holds other element types.
pub fn load(path: &Path) -> Result<(StateDict, Metadata)> {
    let read = named_file::read(path);
    let bytes = read.map_err(|source| Error::Io { action: "read", path: path.into(), source });
    from_bytes(path, &bytes?)
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
    check_whole(&state, &metadata)?;
    Ok((state, metadata))
}

/// Checks the version of the format and the checksum, as far as the file has them.
fn check_whole(state: &StateDict, metadata: &Metadata) -> Result<(), String> {
    let found = checksum(state, metadata);
    match (metadata.get(CHECKSUM), metadata.get(FORMAT)) {
        // Not compared while fuzzing: almost every input would end here with a wrong checksum.
        (Some(written), _) if *written != found && !cfg!(fuzzing) => Err(format!(
            "its contents have the checksum {found}, but its metadata says {written}: it is \
             damaged; copy or export it again. If another program changed it on purpose, remove \
             `{CHECKSUM}` and `{FORMAT}` from its metadata"
        )),
        (_, Some(version)) if version != FORMAT_VERSION => Err(format!(
            "its `{FORMAT}` is {version}, and this program reads {FORMAT_VERSION}; a newer \
             program wrote it: read it with that one"
        )),
        (None, Some(_)) => Err(format!(
            "its metadata has `{FORMAT}`, but no checksum, `{CHECKSUM}`: it is damaged; copy or \
             export it again. If another program changed it on purpose, remove `{FORMAT}`, too"
        )),
        _ => Ok(()),
    }
}

/// Removes from the metadata the entries that describe the file and not its contents: checksum and
/// format version.
pub fn strip(metadata: &mut Metadata) {
    [CHECKSUM, FORMAT].iter().for_each(|key| _ = metadata.remove(*key));
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
    use std::fs;

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
    fn what_is_written_is_read_and_bytes_repeat() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let (state, metadata) = example();
        let bytes = to_bytes(&path, &state, &metadata).unwrap();
        fs::write(&path, &bytes).unwrap();
        let (loaded, mut read) = load(&path).unwrap();
        assert_eq!(read[CHECKSUM], checksum(&state, &read));
        assert_eq!(to_bytes(&path, &loaded, &read).unwrap(), bytes, "own entries are replaced");
        strip(&mut read);
        assert_eq!((loaded, read), (state.clone(), metadata.clone()));
        assert_eq!(to_bytes(&path, &state, &metadata).unwrap(), bytes);
        // And the other way: tensors that the crate writes.
        let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![1], &[0, 0, 128, 63]);
        let theirs = safetensors::serialize([("x", view.unwrap())], None).unwrap();
        let (state, metadata) = decode(&theirs).unwrap();
        assert_eq!(state.get("x"), Some(&HostTensor::f32(&[1], vec![1.0])));
        assert!(metadata.is_empty());
    }

    #[test]
    fn a_missing_file_and_a_torn_tensor_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let none = folder.path().join("none");
        let error = load(&none).unwrap_err();
        assert!(matches!(error, Error::Io { action: "read", .. }), "{error:?}");
        let words = format!("cannot read {}: ", none.display());
        assert!(error.to_string().starts_with(&words), "{error}");
        let mut torn = StateDict::default();
        torn.insert("w", HostTensor::f32(&[2], vec![1.0]));
        let error = to_bytes(&none, &torn, &Metadata::new()).unwrap_err();
        assert!(matches!(error, Error::File { .. }), "{error:?}");
        assert!(error.to_string().contains("`w` f32 [2] has 1 elements"), "{error}");
    }

    /// `bytes` with another text of the same length in place of the first `from`.
    fn replaced(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let mut other = bytes.to_vec();
        other[at..at + from.len()].copy_from_slice(to.as_bytes());
        other
    }

    /// Bits that flip, and characters that give JSON another structure.
    #[test]
    fn no_changed_byte_is_taken_for_other_contents() {
        let (state, metadata) = example();
        let bytes = encode(&state, &metadata).unwrap();
        let whole = decode(&bytes).unwrap();
        for (at, byte) in bytes.iter().enumerate() {
            let bits = (0..8).map(|bit| byte ^ 1 << bit);
            for other in bits.chain(*b"\"\\,:{}[] \n\t0a") {
                let mut changed = bytes.clone();
                changed[at] = other;
                if let Ok(found) = decode(&changed) {
                    assert_eq!(found, whole, "byte {at}: {byte} became {other}");
                }
            }
        }
    }

    /// As earlier builds and other programs write them.
    #[test]
    fn a_file_without_a_version_is_compared_if_it_has_a_checksum() {
        let (state, metadata) = example();
        let parts = |metadata: &Metadata| {
            let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![2, 1], &[0; 8]);
            let metadata = metadata.clone().into_iter().collect();
            safetensors::serialize([("x", view.unwrap())], Some(metadata)).unwrap()
        };
        let plain = parts(&metadata);
        let (state_of, read) = decode(&plain).unwrap();
        assert_eq!(read, metadata);
        let sum = checksum(&state_of, &metadata);
        let older = metadata.clone().into_iter().chain([(CHECKSUM.into(), sum.clone())]);
        let older = parts(&older.collect());
        assert_eq!(decode(&older).unwrap().0, state_of);
        let error = decode(&replaced(&older, &sum, "12345678")).unwrap_err();
        assert!(error.contains("the checksum") && error.contains("remove `crc32`"), "{error}");
        let bytes = encode(&state, &metadata).unwrap();
        let error = decode(&replaced(&bytes, "crc32", "crc33")).unwrap_err();
        assert!(error.contains("no checksum, `crc32`: it is damaged"), "{error}");
    }

    #[test]
    fn a_file_of_a_later_version_says_that_a_newer_program_wrote_it() {
        let (state, mut metadata) = example();
        let bytes = encode(&state, &metadata).unwrap();
        let of_now = format!("\"{FORMAT}\":\"{FORMAT_VERSION}\"");
        let later = replaced(&bytes, &of_now, &format!("\"{FORMAT}\":\"9\""));
        assert!(decode(&later).unwrap_err().contains("damaged"), "the checksum covers it");
        metadata.insert(FORMAT.into(), "9".into());
        let sum = checksum(&state, &metadata);
        let (_, now) = decode(&bytes).unwrap();
        let later = replaced(&later, &now[CHECKSUM], &sum);
        let error = decode(&later).unwrap_err();
        assert!(error.contains("is 9, and this program reads 2; a newer program"), "{error}");
        let error = decode(&replaced(&later, "crc32", "sum32")).unwrap_err();
        assert!(error.contains("a newer program"), "{error}");
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
        let long = ("note".to_owned(), "x".repeat(393));
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
            if let Ok((found, mut found_metadata)) = decode(&damaged) {
                // The damage is in white space.
                strip(&mut found_metadata);
                prop_assert_eq!((found, found_metadata), (state, metadata));
            }
        }
    }
}
