//! A cache of compiled kernels on disk, shared by processes.
//!
//! The name of a file is a hash of the inputs of the compilation, and the compiler's version. The
//! file contains the inputs in full, and a hash of the code, so a file with other inputs, or one
//! that was truncated or changed, is no hit. The cache only saves time: files that cannot be read
//! or written are ignored.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ground::user_cache;

/// First bytes of a file.
const MAGIC: &[u8; 8] = b"MRSTMKN1";

/// Number of files that this process has begun; part of the names of unfinished files, so that they
/// are unique.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// A folder of compiled kernels.
pub(super) struct KernelCache(PathBuf);

impl KernelCache {
    /// The folder `kernels` of the user's cache; `None` without one.
    pub(super) fn for_user() -> Option<KernelCache> {
        Some(KernelCache(user_cache()?.join("kernels")))
    }

    /// The code for these inputs, made by this version of the compiler, or by any version for
    /// `None`.
    pub(super) fn load(&self, inputs: &str, version: Option<&str>) -> Option<Vec<u8>> {
        let paths: Vec<PathBuf> = match version {
            Some(version) => vec![self.path(inputs, version)],
            None => self.any_version(inputs),
        };
        paths.iter().find_map(|path| code_in(&fs::read(path).ok()?, inputs))
    }

    /// Stores code. A failure is logged and otherwise ignored.
    pub(super) fn store(&self, inputs: &str, version: &str, code: &[u8]) {
        let path = self.path(inputs, version);
        let (process, number) = (std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed));
        let unfinished = path.with_extension(format!("{process}-{number}.part"));
        let length = (inputs.len() as u64).to_le_bytes();
        let sum = hash(code).to_le_bytes();
        let file = [&MAGIC[..], &length, &sum, inputs.as_bytes(), code].concat();
        let written = fs::create_dir_all(&self.0)
            .and_then(|()| fs::File::create_new(&unfinished)?.write_all(&file))
            .and_then(|()| fs::rename(&unfinished, &path));
        if let Err(error) = written {
            tracing::debug!(path = %path.display(), %error, "compiled kernels are not kept");
            let _ = fs::remove_file(unfinished);
        }
    }

    fn path(&self, inputs: &str, version: &str) -> PathBuf {
        self.0.join(format!("{:016x}-{version}.bin", hash(inputs.as_bytes())))
    }

    /// Files for these inputs by any version of the compiler, in the order of their names.
    fn any_version(&self, inputs: &str) -> Vec<PathBuf> {
        let start = format!("{:016x}-", hash(inputs.as_bytes()));
        let files = fs::read_dir(&self.0).into_iter().flatten().filter_map(Result::ok);
        let named = files.filter(|file| {
            let name = file.file_name();
            let name = name.to_string_lossy();
            name.starts_with(&start) && name.ends_with(".bin")
        });
        let mut paths: Vec<PathBuf> = named.map(|file| file.path()).collect();
        paths.sort();
        paths
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// The code of a file, if the file is complete and for these inputs.
fn code_in(file: &[u8], inputs: &str) -> Option<Vec<u8>> {
    let rest = file.strip_prefix(&MAGIC[..])?;
    let (length, rest) = rest.split_first_chunk()?;
    let (sum, rest) = rest.split_first_chunk()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (held, code) = rest.split_at_checked(length)?;
    let whole = held == inputs.as_bytes() && hash(code) == u64::from_le_bytes(*sum);
    whole.then(|| code.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_found_again_by_its_inputs_and_version() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache(folder.path().join("new/kernels"));
        assert_eq!(cache.load("inputs", None), None);
        cache.store("inputs", "13.0", b"code");
        assert_eq!(cache.load("inputs", Some("13.0")).unwrap(), b"code");
        assert_eq!(cache.load("inputs", None).unwrap(), b"code");
        assert_eq!(cache.load("inputs", Some("13.1")), None);
        assert_eq!(cache.load("other inputs", None), None);
    }

    #[test]
    fn files_that_are_cut_or_foreign_are_no_hit() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache(folder.path().to_owned());
        cache.store("inputs", "1", b"code");
        let path = cache.path("inputs", "1");
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(cache.load("inputs", Some("1")), None, "{length} bytes");
        }
        // The sum, the inputs, the code.
        for at in [16, 24, whole.len() - 1] {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(&path, changed).unwrap();
            assert_eq!(cache.load("inputs", Some("1")), None, "byte {at}");
        }
        let mut huge = whole;
        huge[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        fs::write(&path, huge).unwrap();
        assert_eq!(cache.load("inputs", Some("1")), None);
    }

    /// The names of unfinished files can be guessed.
    #[test]
    #[cfg(unix)]
    fn a_link_in_place_of_an_unfinished_file_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache(folder.path().join("kernels"));
        fs::create_dir(&cache.0).unwrap();
        let precious = folder.path().join("precious");
        fs::write(&precious, "precious").unwrap();
        let (path, process) = (cache.path("inputs", "1"), std::process::id());
        for number in 0..2000 {
            let planted = path.with_extension(format!("{process}-{number}.part"));
            std::os::unix::fs::symlink(&precious, planted).unwrap();
        }
        cache.store("inputs", "1", b"code");
        assert_eq!(fs::read(&precious).unwrap(), b"precious");
        assert_eq!(cache.load("inputs", Some("1")), None, "nothing is kept");
    }

    #[test]
    fn a_folder_that_cannot_be_made_keeps_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = KernelCache(file.path().join("kernels"));
        cache.store("inputs", "1", b"code");
        assert_eq!(cache.load("inputs", None), None);
    }
}
