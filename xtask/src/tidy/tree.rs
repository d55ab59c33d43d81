//! The files that tidy looks at: manifests, sources in Rust and Python, documents, and the table
//! of waits.

use std::error::Error;
use std::fs;
use std::path::Path;

use walkdir::{DirEntry, WalkDir};

/// The table of permitted waits.
pub(crate) const WAITS: &str = "crates/train/permitted.toml";

/// A text file of the repository.
pub(crate) struct File {
    /// Path from the repository's root, with `/`.
    pub(crate) path: String,
    /// Contents.
    pub(crate) text: String,
}

/// The files of the repository that the rules check.
pub(crate) struct Tree {
    /// In path order.
    pub(crate) files: Vec<File>,
}

impl Tree {
    /// Files whose path ends in `suffix`.
    pub(crate) fn ending<'a>(&'a self, suffix: &'a str) -> impl Iterator<Item = &'a File> {
        self.files.iter().filter(move |file| file.path.ends_with(suffix))
    }

    /// The file at `path`.
    pub(crate) fn get(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }
}

/// Reads every `.rs`, `.md`, `.py` and `Cargo.toml` of the repository and the table of waits.
pub(crate) fn read(root: &Path) -> Result<Tree, Box<dyn Error>> {
    let mut files = vec![];
    let skip =
        |entry: &DirEntry| matches!(entry.file_name().to_str(), Some("target" | ".git" | "runs"));
    for entry in WalkDir::new(root).sort_by_file_name().into_iter().filter_entry(|e| !skip(e)) {
        let entry = entry?;
        let wanted = entry.path().extension().is_some_and(|e| e == "rs" || e == "md" || e == "py")
            || entry.file_name() == "Cargo.toml"
            || entry.path().ends_with(WAITS);
        if entry.file_type().is_file() && wanted {
            let path = entry.path().strip_prefix(root)?.to_string_lossy().replace('\\', "/");
            files.push(File { path, text: fs::read_to_string(entry.path())? });
        }
    }
    Ok(Tree { files })
}
