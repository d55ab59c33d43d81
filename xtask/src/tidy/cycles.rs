//! No two modules of a crate import each other, directly or in a circle.
//!
//! A path in a module (or below it) that leads into another module of the same folder is an arrow
//! between the two, and the arrows must form no circle. Paths are followed through re-exports. A
//! module and the folder that it is in may name each other, and tests may name anything.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::error::Error;

use super::Finding;
use super::paths::{self, Source};
use super::tree::Tree;

/// An arrow between two modules of a folder: from, to, and the first place that draws it.
type Arrows<'a> = BTreeMap<(&'a str, &'a str), String>;

/// Every circle.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut findings = vec![];
    let roots: BTreeSet<&str> = tree.ending(".rs").filter_map(|f| crate_root(&f.path)).collect();
    for root in roots {
        let sources = paths::read(tree, root)?;
        for (folder, arrows) in &folders(root, &sources) {
            let circles = circles(arrows).into_iter();
            findings.extend(circles.map(|circle| Finding::new(folder, describe(&circle, arrows))));
        }
    }
    Ok(findings)
}

/// The arrows between the modules of a crate's `src` folder: from, to, and the first place that
/// draws it.
pub(crate) fn arrows(
    tree: &Tree,
    root: &str,
) -> Result<BTreeMap<(String, String), String>, Box<dyn Error>> {
    let sources = paths::read(tree, root)?;
    let arrows = folders(root, &sources).remove(root).unwrap_or_default();
    let own = |((from, to), place): ((&str, &str), String)| ((from.into(), to.into()), place);
    Ok(arrows.into_iter().map(own).collect())
}

/// The `src` folder that a file is in.
fn crate_root(path: &str) -> Option<&str> {
    path.find("/src/").map(|at| &path[..at + "/src".len()])
}

/// The arrows of each folder.
fn folders<'a>(root: &str, sources: &'a [Source]) -> BTreeMap<String, Arrows<'a>> {
    let mut folders: BTreeMap<String, Arrows<'a>> = BTreeMap::new();
    for source in sources {
        for (to, line) in paths::resolved(sources, source) {
            let from = &source.module;
            let shared = from.iter().zip(to).take_while(|(a, b)| a == b).count();
            let (Some(own), Some(other)) = (from.get(shared), to.get(shared)) else { continue };
            let folder = [&[root.to_string()], &from[..shared]].concat().join("/");
            let place = format!("{}:{line}", source.file);
            folders.entry(folder).or_default().entry((own, other)).or_insert(place);
        }
    }
    folders
}

/// The sets of modules that can all reach each other, each set once.
fn circles<'a>(arrows: &Arrows<'a>) -> BTreeSet<BTreeSet<&'a str>> {
    let modules: BTreeSet<&str> = arrows.keys().map(|(from, _)| *from).collect();
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        modules.iter().map(|module| (*module, reach(arrows, module))).collect();
    let meets = |a: &str, b: &str| reached.get(a).is_some_and(|all| all.contains(b));
    let circle = |start: &&'a str| -> BTreeSet<&'a str> {
        modules.iter().copied().filter(|other| meets(start, other) && meets(other, start)).collect()
    };
    modules.iter().map(circle).filter(|circle| circle.len() > 1).collect()
}

fn reach<'a>(arrows: &Arrows<'a>, start: &str) -> BTreeSet<&'a str> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![start]);
    while let Some(at) = open.pop() {
        for (_, to) in arrows.keys().filter(|(from, _)| *from == at) {
            if seen.insert(*to) {
                open.push(to);
            }
        }
    }
    seen
}

/// The shortest circle through one of these modules.
fn describe(circle: &BTreeSet<&str>, arrows: &Arrows<'_>) -> String {
    let shortest = circle.iter().filter_map(|start| way_back(arrows, start)).min_by_key(Vec::len);
    let way = shortest.unwrap_or_default();
    let step = |pair: &[&str]| match arrows.get(&(pair[0], pair[1])) {
        Some(place) => format!("\n    {} imports {} at {place}", pair[0], pair[1]),
        None => String::new(),
    };
    let steps: String = way.windows(2).map(step).collect();
    format!("modules import each other; move what they share to one that both may import:{steps}")
}

/// The shortest way from a module back to itself, both ends included.
fn way_back<'a>(arrows: &Arrows<'a>, start: &'a str) -> Option<Vec<&'a str>> {
    let (mut seen, mut ways) = (BTreeSet::new(), VecDeque::from([vec![start]]));
    while let Some(way) = ways.pop_front() {
        let at = way.last()?;
        for (_, to) in arrows.keys().filter(|(from, _)| from == at) {
            let longer = [&way[..], &[*to]].concat();
            if *to == start {
                return Some(longer);
            }
            if seen.insert(*to) {
                ways.push_back(longer);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::tree::File;
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Tree {
        let file = |(path, text): &(&str, &str)| File {
            path: format!("crates/x/src/{path}"),
            text: text.to_string(),
        };
        Tree { files: files.iter().map(file).collect() }
    }

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let findings = check(&tree(files)).unwrap();
        findings.into_iter().map(|f| format!("{}: {}", f.place, f.message)).collect()
    }

    #[test]
    fn a_circle_is_found_however_it_is_written() {
        let down = ("b.rs", "pub struct B;");
        for up in [
            "use crate::a::A;",
            "use crate::{a::{self, A}};",
            "fn f() { crate::a::f() }",
            "fn f() { vec![super::a::f()] }",
            // Through a re-export of the root.
            "use crate::A;",
            "mod inner { use super::super::a; }",
        ] {
            let a = ("a.rs", "use crate::b::B; pub struct A;");
            let root = ("lib.rs", "mod a; mod b; mod d; pub use a::A; pub use b::B;");
            let above = ("d.rs", "use crate::{A, B};");
            assert_eq!(found(&[root, a, down, above]), Vec::<String>::new());
            let circle = found(&[root, a, ("b.rs", up), above]);
            assert_eq!(circle.len(), 1, "{up}: {circle:?}");
            let words =
                ["a imports b at crates/x/src/a.rs:1", "b imports a at crates/x/src/b.rs:1"];
            assert!(words.iter().all(|word| circle[0].contains(word)), "{circle:?}");
            assert!(!circle[0].contains("d imports"), "{circle:?}");
        }
    }

    #[test]
    fn circles_are_found_over_folders_and_within_one() {
        let root = ("lib.rs", "mod a; mod b;");
        let over = [
            root,
            ("a/mod.rs", "mod x; mod y;"),
            ("a/x.rs", "use crate::b::g;"),
            ("a/y.rs", "pub fn f() {}"),
            ("b.rs", "use crate::a::y::f;"),
        ];
        assert!(found(&over)[0].starts_with("crates/x/src: modules import"));
        let within = [
            root,
            ("b.rs", ""),
            ("a/mod.rs", "mod x; mod y; mod z; use x::X; pub struct A;"),
            ("a/x.rs", "use super::{A, y::Y};"),
            ("a/y.rs", "use super::z;"),
            ("a/z.rs", "use crate::a::X;"),
        ];
        let circle = found(&within);
        assert!(circle[0].starts_with("crates/x/src/a: modules import"), "{circle:?}");
        assert!(circle[0].contains("z imports x"), "{circle:?}");
    }

    #[test]
    fn tests_may_name_anything() {
        let files = [
            ("lib.rs", "mod a; mod b; #[cfg(test)] mod model;"),
            ("a.rs", "use crate::b; #[cfg(test)] mod tests { use crate::model; }"),
            (
                "b.rs",
                "#[cfg(test)] use crate::a; #[cfg(all(test, feature = \"f\"))] mod t { use \
                 crate::a; }",
            ),
            ("model.rs", "use crate::{a, b};"),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
    }
}
