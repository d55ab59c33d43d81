//! The lints of the workspace hold everywhere: no crate opts out, none allows them away.

use std::error::Error;

use super::Finding;
use super::arrows::UNSAFE_ALLOWED;
use super::tree::Tree;

/// Written in two halves so that this file does not find itself.
const FORBIDDEN: [(&str, &str); 4] = [
    (concat!("allow(", "missing_docs"), "document the item instead"),
    (concat!("allow(clippy::", "undocumented_unsafe"), "write the SAFETY line instead"),
    (concat!("#[", "ignore]"), "a test runs, or is deleted"),
    (concat!("target-cpu", "=native"), "kernels are picked at run time"),
];

/// Packages that do not take the workspace's lints, sources that switch one off, and crates that
/// should forbid `unsafe` but do not.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut findings = vec![];
    for file in tree.ending("Cargo.toml").filter(|f| f.path != "Cargo.toml") {
        let manifest: toml::Table = file.text.parse()?;
        let inherits = manifest.get("lints").and_then(|l| l.get("workspace")?.as_bool());
        if inherits != Some(true) {
            findings.push(Finding::new(&file.path, "add `[lints] workspace = true`"));
        }
        findings.extend(unsafe_not_forbidden(tree, &file.path));
    }
    for file in tree.ending(".rs") {
        for (number, line) in file.text.lines().enumerate() {
            for (pattern, remedy) in FORBIDDEN {
                if line.contains(pattern) {
                    let place = format!("{}:{}", file.path, number + 1);
                    findings.push(Finding::new(place, format!("`{pattern}`: {remedy}")));
                }
            }
        }
    }
    let root = tree.get("Cargo.toml").map_or("", |file| &file.text);
    for lint in ["missing_docs = \"deny\"", "undocumented_unsafe_blocks = \"deny\""] {
        if !root.contains(lint) {
            findings.push(Finding::new("Cargo.toml", format!("the lint `{lint}` is gone")));
        }
    }
    Ok(findings)
}

fn unsafe_not_forbidden(tree: &Tree, manifest: &str) -> Option<Finding> {
    let folder = manifest.strip_suffix("Cargo.toml")?;
    let name = folder.trim_end_matches('/').rsplit('/').next()?;
    if UNSAFE_ALLOWED.contains(&name) {
        return None;
    }
    let roots = ["src/lib.rs", "src/main.rs"].map(|f| tree.get(&format!("{folder}{f}")));
    let open = roots.into_iter().flatten().find(|f| !f.text.contains("#![forbid(unsafe_code)]"))?;
    Some(Finding::new(&open.path, "add `#![forbid(unsafe_code)]`"))
}

#[cfg(test)]
mod tests {
    use super::super::tree::File;
    use super::*;

    #[test]
    fn each_way_out_is_found() {
        let files = [
            ("Cargo.toml", "missing_docs = \"deny\"\nundocumented_unsafe_blocks = \"deny\""),
            ("crates/data/Cargo.toml", ""),
            ("crates/data/src/lib.rs", concat!("#![", "allow(", "missing_docs)]")),
            ("crates/nn/Cargo.toml", "lints.workspace = true"),
            ("crates/nn/src/lib.rs", ""),
        ];
        let files = files.map(|(path, text)| File { path: path.into(), text: text.into() });
        let findings = check(&Tree { files: files.into() }).unwrap();
        let places: Vec<&str> = findings.iter().map(|f| f.place.as_str()).collect();
        let expected =
            ["crates/data/Cargo.toml", "crates/data/src/lib.rs", "crates/data/src/lib.rs:1"];
        assert_eq!(places, expected);
    }
}
