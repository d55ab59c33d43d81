//! Documents for new readers: they stay short, and name everything that they promise to name.

use std::error::Error;

use super::Finding;
use super::tree::Tree;

/// Documents with their largest size in bytes.
const SIZES: [(&str, usize); 2] = [("README.md", 8_500), ("ARCHITECTURE.md", 15_000)];

/// Documents that are too long, crates without a README, and dependencies without a row in
/// `ARCHITECTURE.md`.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut findings = vec![];
    for (path, bytes_max) in SIZES {
        let bytes = tree.get(path).map_or(0, |file| file.text.len());
        if bytes > bytes_max {
            let message = format!("{bytes} bytes, {bytes_max} at most: move details to docs/");
            findings.push(Finding::new(path, message));
        }
    }
    for manifest in tree.ending("/Cargo.toml").filter(|file| file.path.starts_with("crates/")) {
        let readme = manifest.path.replace("Cargo.toml", "README.md");
        if tree.get(&readme).is_none() {
            findings.push(Finding::new(readme, "missing: a few lines on what the crate is for"));
        }
    }
    let reasons = tree.get("ARCHITECTURE.md").map_or("", |file| &file.text);
    for name in dependencies(tree)? {
        if !reasons.contains(&format!("`{name}`")) {
            let message = format!("`{name}` has no reason among the dependencies");
            findings.push(Finding::new("ARCHITECTURE.md", message));
        }
    }
    Ok(findings)
}

/// Names of the workspace's dependencies on crates of others.
fn dependencies(tree: &Tree) -> Result<Vec<String>, Box<dyn Error>> {
    let Some(manifest) = tree.get("Cargo.toml") else { return Ok(vec![]) };
    let manifest: toml::Table = manifest.text.parse()?;
    let listed = manifest.get("workspace").and_then(|workspace| workspace.get("dependencies"));
    let listed = listed.and_then(|table| table.as_table());
    let names = listed.into_iter().flat_map(|table| table.keys());
    Ok(names.filter(|name| !name.starts_with("meristem-")).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::super::tree::File;
    use super::*;

    fn places(files: &[(&str, &str)]) -> Vec<String> {
        let file =
            |(path, text): &(&str, &str)| File { path: path.to_string(), text: text.to_string() };
        let found = check(&Tree { files: files.iter().map(file).collect() }).unwrap();
        found.into_iter().map(|finding| finding.place).collect()
    }

    #[test]
    fn a_long_document_a_missing_readme_and_a_dependency_without_a_reason_are_found() {
        let long = "word ".repeat(2_000);
        let manifest = "[workspace.dependencies]\ncsv = \"1\"\nmeristem-nn = \"1\"\nserde = \"1\"";
        let files = [
            ("ARCHITECTURE.md", "`csv` reads tables"),
            ("Cargo.toml", manifest),
            ("README.md", long.as_str()),
            ("crates/nn/Cargo.toml", ""),
        ];
        assert_eq!(places(&files), ["README.md", "crates/nn/README.md", "ARCHITECTURE.md"]);
    }

    #[test]
    fn short_and_complete_documents_are_fine() {
        let files = [
            ("ARCHITECTURE.md", "`csv` reads tables"),
            ("Cargo.toml", "[workspace.dependencies]\ncsv = \"1\""),
            ("README.md", "short"),
            ("crates/nn/Cargo.toml", ""),
            ("crates/nn/README.md", "networks"),
        ];
        assert!(places(&files).is_empty());
    }
}
