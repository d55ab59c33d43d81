//! Ids of requirements that comments cite are rows of `docs/requirements.md`.

use super::Finding;
use super::tree::{File, Tree};

/// The document with the rows.
const DOCUMENT: &str = "docs/requirements.md";

/// Ids in parentheses, such as `(D2, D5)`, that have no row.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let rows = tree.get(DOCUMENT).map_or("", |file| &file.text).lines();
    let cells = rows.filter_map(|row| row.strip_prefix("| ")?.split('|').next());
    let known: Vec<&str> = cells.flat_map(|cell| cell.split(',')).map(str::trim).collect();
    let mut findings = vec![];
    for file in &tree.files {
        for (number, line) in file.text.lines().enumerate() {
            for id in cited(file, line).into_iter().filter(|id| !known.contains(id)) {
                let place = format!("{}:{}", file.path, number + 1);
                let message = format!("{id} is no row of {DOCUMENT}: say the rule itself");
                findings.push(Finding::new(place, message));
            }
        }
    }
    findings
}

/// Ids that a comment cites in parentheses: one, a list, or a range.
fn cited<'a>(file: &File, line: &'a str) -> Vec<&'a str> {
    let comment = line.trim_start();
    let is_comment = match file.path.rsplit('.').next() {
        Some("rs") => comment.starts_with("//"),
        Some("py") => comment.starts_with(['#', '"']),
        _ => false,
    };
    if !is_comment {
        return vec![];
    }
    let groups = comment.split('(').skip(1).filter_map(|rest| rest.split_once(')'));
    let ids = groups.map(|(group, _)| -> Vec<&str> {
        let parts = group.split([',', '–']).flat_map(|part| part.split(" to "));
        parts.map(str::trim).collect()
    });
    ids.filter(|ids| ids.iter().all(|id| is_id(id))).flatten().collect()
}

/// Whether a word is a capital letter and one or two digits.
fn is_id(word: &str) -> bool {
    let digits = word.strip_prefix(|c: char| c.is_ascii_uppercase()).unwrap_or_default();
    (1..=2).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_without_a_row_is_found() {
        let files = [
            (DOCUMENT, "| id | requirement |\n|---|---|\n| D2 | order |\n| N1, N2 | hosts |"),
            ("crates/x/src/lib.rs", "/// Batches (D2, D3).\n// (N1 to N4)\nlet x = f(D9);"),
            ("crates/x/tests/a.py", "\"\"\"Tables (D13).\"\"\"\n# The score (F1 or R²), (x).\n"),
        ];
        let files = files.map(|(path, text)| File { path: path.into(), text: text.into() });
        let found = check(&Tree { files: files.into() });
        let places: Vec<_> = found.iter().map(|found| found.place.as_str()).collect();
        assert_eq!(
            places,
            ["crates/x/src/lib.rs:1", "crates/x/src/lib.rs:2", "crates/x/tests/a.py:1"]
        );
        assert!(found[1].message.starts_with("N4 is no row of docs/requirements.md"), "{found:?}");
    }
}
