//! Crate dependencies point down the list of ARCHITECTURE.md, never up.

use std::error::Error;

use super::Finding;
use super::tree::Tree;

/// From the bottom to the top: a crate may use only crates that stand before it.
const LAYERS: [&str; 12] = [
    "standin", "device", "comm", "data", "kernels", "nn", "grow", "control", "export", "train",
    "meristem", "python",
];

/// `unsafe` may appear in these crates only, and in one module of each of [`UNSAFE_IN_MODULE`].
pub(crate) const UNSAFE_ALLOWED: [&str; 5] = ["standin", "device", "kernels", "nn", "python"];

/// Crates in which `unsafe` may appear in one module, with the file that declares the module.
pub(crate) const UNSAFE_IN_MODULE: [(&str, &str); 1] = [("comm", "src/mpi/mod.rs")];

fn layer(crate_name: &str) -> Option<usize> {
    let short = crate_name.strip_prefix("meristem-").unwrap_or(crate_name);
    LAYERS.iter().position(|known| *known == short)
}

/// Every dependency of a crate on a crate that does not stand below it. A crate may be a
/// dev-dependency of itself, which gives its tests features.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut findings = vec![];
    for file in tree.ending("Cargo.toml").filter(|f| f.path.starts_with("crates/")) {
        let folder = file.path.split('/').nth(1).unwrap_or_default();
        let Some(own) = layer(folder) else {
            findings.push(Finding::new(&file.path, "unknown crate: give it a place in LAYERS"));
            continue;
        };
        let manifest: toml::Table = file.text.parse()?;
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let Some(table) = manifest.get(section).and_then(|v| v.as_table()) else { continue };
            for name in table.keys() {
                let is_itself = section == "dev-dependencies" && layer(name) == Some(own);
                if !is_itself && layer(name).is_some_and(|other| other >= own) {
                    let message = format!("{section}: `{name}` does not stand below `{folder}`");
                    findings.push(Finding::new(&file.path, message));
                }
            }
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::super::tree::File;
    use super::*;

    fn tree(path: &str, text: &str) -> Tree {
        Tree { files: vec![File { path: path.into(), text: text.into() }] }
    }

    #[test]
    fn an_arrow_up_is_found() {
        let up = tree("crates/nn/Cargo.toml", "[dependencies]\nmeristem-train.workspace = true");
        assert_eq!(check(&up).unwrap().len(), 1);
        let down = tree("crates/nn/Cargo.toml", "[dependencies]\nmeristem-device.workspace = true");
        assert_eq!(check(&down).unwrap(), []);
        let own = tree("crates/nn/Cargo.toml", "[dev-dependencies]\nmeristem-nn = { path = '.' }");
        assert_eq!(check(&own).unwrap(), []);
    }

    #[test]
    fn a_crate_without_a_place_is_found() {
        assert_eq!(check(&tree("crates/new/Cargo.toml", "")).unwrap().len(), 1);
    }
}
