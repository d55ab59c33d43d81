//! Documents that code and other documents cite exist in the repository.

use std::path::{Component, Path, PathBuf};

use super::Finding;
use super::tree::{File, Tree};

/// Citations of documents that are not there. Code cites them from the repository's root; a
/// document links to them from its own folder.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    for file in &tree.files {
        for (number, line) in file.text.lines().enumerate() {
            for document in cited(file, line) {
                if tree.get(&document).is_none() {
                    let place = format!("{}:{}", file.path, number + 1);
                    findings
                        .push(Finding::new(place, format!("cites {document}, which is not there")));
                }
            }
        }
    }
    findings
}

/// Paths from the root of the documents that a line cites.
fn cited(file: &File, line: &str) -> Vec<String> {
    if file.path.ends_with(".md") {
        let folder = Path::new(&file.path).parent().unwrap_or(Path::new(""));
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        let documents = targets.filter(|to| to.ends_with(".md") && !to.contains("://"));
        return documents.map(|to| from_root(&folder.join(to))).collect();
    }
    let Some(comment) = line.trim_start().strip_prefix("//") else { return vec![] };
    let is_part = |c: char| c.is_ascii_alphanumeric() || "._/-".contains(c);
    let words = comment.split(|c| !is_part(c)).map(|word| word.trim_end_matches('.'));
    words.filter(|word| word.len() > 3 && word.ends_with(".md")).map(String::from).collect()
}

/// The path without `.` and `..`.
fn from_root(path: &Path) -> String {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = parts.pop(),
            Component::Normal(name) => parts.push(name),
            _ => {}
        }
    }
    parts.to_string_lossy().replace('\\', "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_found() {
        let files = [
            ("docs/a.md", "[b](b.md#part) [c](../c.md) [far](https://x.org/d.md) `e.md`"),
            ("docs/b.md", ""),
            ("crates/x/src/lib.rs", "//! As in `docs/a.md`, and f.md.\nlet s = \"g.md\";"),
        ];
        let files = files.map(|(path, text)| File { path: path.into(), text: text.into() });
        let found = check(&Tree { files: files.into() });
        let messages: Vec<_> =
            found.iter().map(|f| (f.place.as_str(), f.message.as_str())).collect();
        let expected = [
            ("docs/a.md:1", "cites c.md, which is not there"),
            ("crates/x/src/lib.rs:1", "cites f.md, which is not there"),
        ];
        assert_eq!(messages, expected);
    }
}
