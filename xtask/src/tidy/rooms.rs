//! The rooms of a crate use only the rooms that they are built on.
//!
//! `cycles` forbids circular imports, but allows either direction. Here a table fixes the direction
//! for `device`: its engine does not import the observers, and the observers import only the hooks
//! and the ground.

use std::error::Error;

use super::Finding;
use super::cycles;
use super::tree::Tree;

/// Folder whose modules are rooms.
const FOLDER: &str = "crates/device/src";

/// Rooms from the ground up, each with the rooms that it may use.
const ROOMS: [(&str, &[&str]); 7] = [
    ("ground", &[]),
    ("hooks", &["ground"]),
    ("execution", &["ground", "hooks"]),
    ("order", &["ground", "hooks", "execution"]),
    ("memory", &["ground", "hooks", "execution", "order"]),
    ("observers", &["ground", "hooks"]),
    ("handles", &["ground", "hooks", "execution", "order", "memory", "observers"]),
];

/// Every path of a room into one that it may not use.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut findings = vec![];
    for ((from, to), place) in cycles::arrows(tree, FOLDER)? {
        let Some((_, uses)) = ROOMS.iter().find(|(room, _)| *room == from) else {
            findings
                .push(Finding::new(place, format!("`{from}` is no room: give it a row in ROOMS")));
            continue;
        };
        if !uses.contains(&to.as_str()) {
            let allowed = if uses.is_empty() { "nothing".into() } else { uses.join(", ") };
            let message = format!("`{from}` may use {allowed}, and uses `{to}`");
            findings.push(Finding::new(place, message));
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::super::tree::File;
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let file = |path: &str, text: &str| File {
            path: format!("{FOLDER}/{path}"),
            text: text.to_string(),
        };
        let files = vec![
            file("lib.rs", "mod ground; mod hooks; mod observers; mod order; mod other;"),
            file("ground.rs", "pub struct G;"),
            file("hooks.rs", "use crate::ground::G; pub struct H;"),
            file("order.rs", "use crate::hooks::H; pub struct O;"),
            file("observers.rs", "use crate::hooks::H; pub struct S;"),
        ];
        let files = files.into_iter().filter(|known| !known.path.ends_with(path)).collect();
        let mut tree = Tree { files };
        tree.files.push(file(path, text));
        let findings = check(&tree).unwrap();
        findings.into_iter().map(|f| format!("{}: {}", f.place, f.message)).collect()
    }

    #[test]
    fn an_arrow_into_a_room_that_is_not_allowed_is_found() {
        assert_eq!(found("order.rs", "use crate::hooks::H;"), [""; 0]);
        assert_eq!(
            found("order.rs", "use crate::observers::S;"),
            ["crates/device/src/order.rs:1: `order` may use ground, hooks, execution, and uses \
              `observers`"]
        );
        assert_eq!(
            found("observers.rs", "fn f(o: crate::order::O) {}"),
            ["crates/device/src/observers.rs:1: `observers` may use ground, hooks, and uses \
              `order`"]
        );
        let unknown = found("other.rs", "use crate::ground::G;");
        assert!(unknown[0].ends_with("`other` is no room: give it a row in ROOMS"), "{unknown:?}");
    }
}
