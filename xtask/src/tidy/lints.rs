//! The lints of the workspace hold everywhere: no crate opts out, none allows them away.

use std::error::Error;

use super::Finding;
use super::arrows::{UNSAFE_ALLOWED, UNSAFE_IN_MODULE};
use super::tree::Tree;

/// Written in two halves so that this file does not find itself.
const FORBIDDEN: [(&str, &str); 4] = [
    (concat!("allow(", "missing_docs"), "document the item instead"),
    (concat!("allow(clippy::", "undocumented_unsafe"), "write the SAFETY line instead"),
    (concat!("#[", "ignore]"), "a test runs, or is deleted"),
    (concat!("target-cpu", "=native"), "kernels are picked at run time"),
];

/// Packages that do not take the workspace's lints, sources that switch one off, crates that should
/// forbid `unsafe` but do not, and modules that allow it.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut findings = vec![];
    for file in tree.ending("Cargo.toml").filter(|f| f.path != "Cargo.toml") {
        let manifest: toml::Table = file.text.parse()?;
        let inherits = manifest.get("lints").and_then(|l| l.get("workspace")?.as_bool());
        if inherits != Some(true) {
            findings.push(Finding::new(&file.path, "add `[lints] workspace = true`"));
        }
        findings.extend(unsafe_not_forbidden(tree, &file.path));
        findings.extend(unsafe_in_modules(tree, &file.path));
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
    let level = if UNSAFE_IN_MODULE.iter().any(|(crate_name, _)| *crate_name == name) {
        "#![deny(unsafe_code)]"
    } else {
        "#![forbid(unsafe_code)]"
    };
    let open = roots.into_iter().flatten().find(|f| !f.text.contains(level))?;
    Some(Finding::new(&open.path, format!("add `{level}`")))
}

/// In a crate that denies `unsafe`, every place beyond the permitted one that allows it again.
fn unsafe_in_modules(tree: &Tree, manifest: &str) -> Vec<Finding> {
    let Some(folder) = manifest.strip_suffix("Cargo.toml") else { return vec![] };
    let name = folder.trim_end_matches('/').rsplit('/').next();
    let own = UNSAFE_IN_MODULE.iter().find(|(crate_name, _)| Some(*crate_name) == name);
    let Some((_, permitted)) = own else { return vec![] };
    let sources = format!("{folder}src/");
    let files = tree.ending(".rs").filter(|file| file.path.starts_with(&sources));
    let places = files.map(|file| {
        let places = file.text.matches("allow(unsafe_code").count();
        (file, places - usize::from(file.path == format!("{folder}{permitted}")).min(places))
    });
    let message = "`allow(unsafe_code)`: unsafe code belongs into the one module that may have it";
    let surplus = places.filter(|(_, places)| *places > 0);
    surplus.map(|(file, _)| Finding::new(&file.path, message)).collect()
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

    #[test]
    fn only_one_module_of_a_crate_allows_unsafe_code() {
        let (manifest, allow) = ("lints.workspace = true", "#[allow(unsafe_code)]\nmod device;");
        let root = "missing_docs = \"deny\"\nundocumented_unsafe_blocks = \"deny\"";
        let found = |lib: &str, mpi: &str, other: &str| {
            let files = [
                ("Cargo.toml", root),
                ("crates/comm/Cargo.toml", manifest),
                ("crates/comm/src/lib.rs", lib),
                ("crates/comm/src/mpi/mod.rs", mpi),
                ("crates/comm/src/tcp.rs", other),
            ];
            let files = files.map(|(path, text)| File { path: path.into(), text: text.into() });
            let findings = check(&Tree { files: files.into() }).unwrap();
            findings.into_iter().map(|f| f.place).collect::<Vec<_>>()
        };
        let deny = "#![deny(unsafe_code)]";
        assert_eq!(found(deny, allow, ""), [""; 0]);
        assert_eq!(found("", allow, ""), ["crates/comm/src/lib.rs"]);
        assert_eq!(found(deny, allow, allow), ["crates/comm/src/tcp.rs"]);
        assert_eq!(found(deny, &allow.repeat(2), ""), ["crates/comm/src/mpi/mod.rs"]);
    }
}
