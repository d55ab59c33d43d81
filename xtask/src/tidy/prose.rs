//! Prose of the sources: lines of at most 100 columns, and doc comments that open with a noun or a
//! verb, in the words of the field.

use super::Finding;
use super::tree::{File, Tree};

/// Widest line of a Rust source, in characters.
const COLUMNS: usize = 100;

/// Words that turn an opening into a riddle: "What it goes by" instead of "Checksums of the files".
const OPENINGS: [&str; 6] = ["What", "Of", "That", "Those", "Who", "Whose"];

/// Files with a longer line that cannot be broken: its beginning, and the reason.
const LONG: [(&str, &str, &str); 1] = [(
    "crates/device/src/observers/trace/event.rs",
    "\"{events_missing}",
    "JSON without a space: a break would be part of the text",
)];

/// Lines that are too long, and doc comments that open with one of [`OPENINGS`].
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let held = |file: &&File| ["crates/", "xtask/"].iter().any(|root| file.path.starts_with(root));
    tree.ending(".rs").filter(held).flat_map(|file| [wide(file), riddles(file)].concat()).collect()
}

fn wide(file: &File) -> Vec<Finding> {
    let excepted = |line: &str| {
        LONG.iter().any(|(path, begins, _)| file.path == *path && line.trim().starts_with(begins))
    };
    let lines = (1..).zip(file.text.lines());
    lines
        .filter(|(_, line)| line.chars().count() > COLUMNS && !excepted(line))
        .map(|(number, line)| {
            let columns = line.chars().count();
            let message = format!("a line of {columns} columns, {COLUMNS} at most: break it");
            Finding::new(format!("{}:{number}", file.path), message)
        })
        .collect()
}

fn riddles(file: &File) -> Vec<Finding> {
    let (mut findings, mut opens) = (vec![], true);
    for (number, line) in (1..).zip(file.text.lines()) {
        let line = line.trim_start();
        let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        let text = doc.map(str::trim).unwrap_or_default();
        let word = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        if opens && OPENINGS.contains(&word) {
            let message = format!("a doc comment opens with `{word}`: begin with a noun or a verb");
            findings.push(Finding::new(format!("{}:{number}", file.path), message));
        }
        opens = text.is_empty() || text.starts_with('#');
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let file = File { path: path.into(), text: text.into() };
        check(&Tree { files: vec![file] }).into_iter().map(|finding| finding.place).collect()
    }

    #[test]
    fn an_opening_that_is_no_noun_is_found_and_a_later_line_is_not() {
        let text = "//! What it is.\nfn f() {}\n    /// A copy\n    /// Of it.\n///\n/// Whose?\n";
        assert_eq!(found("crates/comm/src/a.rs", text), ["1", "6"].map(at));
        assert_eq!(found("crates/comm/src/a.rs", "/// Offset of it.\n// What it is.\n"), [""; 0]);
    }

    fn at(line: &str) -> String {
        format!("crates/comm/src/a.rs:{line}")
    }

    #[test]
    fn a_line_of_101_columns_is_found_where_it_has_no_reason() {
        let columns = |n: usize| format!("// {}\n", "×".repeat(n - 3));
        assert_eq!(found("crates/comm/src/a.rs", &columns(100)), [""; 0]);
        assert_eq!(found("crates/comm/src/a.rs", &columns(101)), [at("1")]);
        assert_eq!(found("reference/a.rs", &columns(101)), [""; 0]);
        for (path, begins, _) in LONG {
            let long = format!("    {begins}{}\n", "x".repeat(100));
            assert_eq!(found(path, &long), [""; 0]);
            assert_eq!(found("crates/comm/src/a.rs", &long), [at("1")]);
        }
    }
}
