//! The places that an addition changes, as the table in CONTRIBUTING.md lists them: files that it
//! names exist, and every dataset source, controller, event, … occurs in each place of its row.

use std::error::Error;

use super::Finding;
use super::tree::{File, Tree};

/// The document with the table.
const DOCUMENT: &str = "CONTRIBUTING.md";

/// First line of the table.
const HEAD: &str = "| to add | change |";

/// A list of names, each of which must occur in several files.
struct List {
    /// First cell of its row in the table.
    row: &'static str,
    /// File with the names: variants of the enum `of`, or the first arguments of calls of `of`.
    file: &'static str,
    of: &'static str,
    /// Files in which each name occurs. The row names them, too.
    places: &'static [&'static str],
    /// Names that a place lacks: name, place, reason.
    exceptions: &'static [(&'static str, &'static str, &'static str)],
}

/// Reason why texts for the command line omit the controller `External`.
const IN_PROGRAMS: &str = "only programs supply it";

const LISTS: [List; 8] = [
    List {
        row: "an operation",
        file: "crates/nn/src/graph/node.rs",
        of: "NodeOp",
        places: &[
            "crates/nn/src/graph/cost.rs",
            "crates/nn/src/plan/lower/mod.rs",
            "crates/nn/tests/all/common/reference.rs",
            "crates/export/src/onnx/build.rs",
        ],
        exceptions: &[],
    },
    List {
        row: "a layer of a host, from existing operations",
        file: "crates/grow/src/spec/host_layer.rs",
        of: "HostLayer",
        places: &[
            "crates/grow/src/spec/description.rs",
            "crates/grow/src/spec/walk.rs",
            "crates/export/src/drawing/parts.rs",
            "crates/python/python/meristem/nn.py",
            "crates/python/python/meristem/_forward.py",
            "docs/hosts.md",
        ],
        exceptions: &[],
    },
    List {
        row: "an elementwise function (activation)",
        file: "crates/kernels/src/elementwise.rs",
        of: "UnaryFunction",
        places: &[
            "crates/nn/src/graph/builder.rs",
            "crates/nn/src/graph/cost.rs",
            "crates/nn/src/ops/gpu/elementwise.rs",
            "crates/kernels/tests/all/exact_functions.rs",
            "crates/nn/tests/all/golden_layers.rs",
            "crates/kernels/tests/all/functions.rs",
            "crates/export/src/onnx/build/operators.rs",
            "crates/python/python/meristem/_forward.py",
        ],
        exceptions: &[],
    },
    List {
        row: "a layer of blueprints",
        file: "crates/grow/src/blueprint/layer.rs",
        of: "BlueprintLayer",
        places: &["crates/python/python/meristem/_forward.py", "docs/growth.md"],
        exceptions: &[],
    },
    List {
        row: "a standard blueprint",
        file: "crates/grow/src/blueprint_set.rs",
        of: "Blueprint::new(",
        places: &["reference/blueprints.py", "bench/digests.py", "docs/growth.md"],
        exceptions: &[],
    },
    List {
        row: "a dataset source",
        file: "crates/data/src/source/kind.rs",
        of: "Source",
        places: &[
            "crates/train/src/config/table.rs",
            "crates/python/python/meristem/data.py",
            "docs/data.md",
        ],
        exceptions: &[],
    },
    List {
        row: "a controller",
        file: "crates/train/src/config/types/controller.rs",
        of: "ControllerKind",
        places: &[
            "crates/train/src/setup/controllers.rs",
            "crates/train/src/run/extend.rs",
            "crates/train/src/config/table.rs",
            "docs/control.md",
        ],
        exceptions: &[
            ("External", "crates/train/src/config/table.rs", IN_PROGRAMS),
            ("External", "docs/control.md", IN_PROGRAMS),
        ],
    },
    List {
        row: "an event",
        file: "crates/train/src/record/events.rs",
        of: "Event",
        places: &["docs/run-folder.md"],
        exceptions: &[],
    },
];

/// Missing files of the table, and names that a file of their row lacks.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let document = file(tree, DOCUMENT)?;
    let rows = rows(&document.text);
    if rows.is_empty() {
        return Err(format!("{DOCUMENT} has no table that begins with `{HEAD}`").into());
    }
    let mut findings = vec![];
    for row in &rows {
        let absent = row.paths.iter().filter(|path| !exists(tree, path));
        findings
            .extend(absent.map(|path| row.finding(format!("names {path}, which is not there"))));
    }
    for list in &LISTS {
        findings.extend(list.check(tree, &rows)?);
    }
    Ok(findings)
}

impl List {
    fn check(&self, tree: &Tree, rows: &[Row<'_>]) -> Result<Vec<Finding>, Box<dyn Error>> {
        let named = rows.iter().find(|row| row.added == self.row);
        let row = named.ok_or_else(|| format!("{DOCUMENT} has no row `{}`", self.row))?;
        let names = self.names(&file(tree, self.file)?.text)?;
        let mut findings = vec![];
        for place in self.places {
            if !row.paths.iter().any(|path| path == place) {
                findings.push(row.finding(format!("its row lacks {place}")));
            }
            let text = &file(tree, place)?.text;
            for name in names.iter().filter(|name| !occurs(name, text)) {
                let excepted = self.exceptions.iter().any(|(n, p, _)| n == name && p == place);
                if !excepted {
                    let message = format!("lacks {}: `{name}` of {}", self.row, self.file);
                    findings.push(Finding::new(*place, message));
                }
            }
        }
        Ok(findings)
    }

    fn names(&self, text: &str) -> Result<Vec<String>, Box<dyn Error>> {
        let names: Vec<String> = if self.of.ends_with('(') {
            let calls = text.split(self.of).skip(1);
            let arguments = calls.filter_map(|call| call.trim_start().strip_prefix('"'));
            arguments.filter_map(|rest| rest.split('"').next()).map(String::from).collect()
        } else {
            let parsed = syn::parse_file(text).map_err(|e| format!("{}: {e}", self.file))?;
            let variants = parsed.items.into_iter().find_map(|item| match item {
                syn::Item::Enum(item) if item.ident == self.of => Some(item.variants),
                _ => None,
            });
            variants.into_iter().flatten().map(|variant| variant.ident.to_string()).collect()
        };
        if names.is_empty() {
            return Err(format!("{} has no `{}` any more", self.file, self.of).into());
        }
        Ok(names)
    }
}

/// A row of the table.
struct Row<'a> {
    line: usize,
    /// Its first cell.
    added: &'a str,
    /// Paths that it names, from the repository's root.
    paths: Vec<String>,
}

impl Row<'_> {
    fn finding(&self, message: String) -> Finding {
        let Self { line, added, .. } = self;
        Finding::new(format!("{DOCUMENT}:{line}"), format!("{added}: {message}"))
    }
}

fn rows(text: &str) -> Vec<Row<'_>> {
    let lines = (1..).zip(text.lines());
    let below = lines.skip_while(|(_, line)| *line != HEAD).skip(2);
    let table = below.take_while(|(_, line)| line.starts_with('|'));
    let rows = table.filter_map(|(line, text)| {
        let (added, change) = text.trim_start_matches('|').split_once('|')?;
        let quoted = change.split('`').skip(1).step_by(2);
        let links = change.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        let is_path = |path: &&str| path.contains('/') && !path.contains([' ', '<', ':', '*']);
        let paths = quoted.chain(links).filter(is_path).map(from_root).collect();
        Some(Row { line, added: added.trim(), paths })
    });
    rows.collect()
}

/// The path from the repository's root of a path that may begin with the name of a crate.
fn from_root(path: &str) -> String {
    const ROOTS: [&str; 5] = ["crates", "docs", "bench", "reference", "fuzz"];
    let path = path.trim_end_matches('/');
    let first = path.split('/').next().unwrap_or_default();
    if ROOTS.contains(&first) { path.into() } else { format!("crates/{path}") }
}

fn exists(tree: &Tree, path: &str) -> bool {
    let folder = format!("{path}/");
    tree.files.iter().any(|file| file.path == *path || file.path.starts_with(&folder))
}

fn file<'a>(tree: &'a Tree, path: &str) -> Result<&'a File, String> {
    tree.get(path).ok_or_else(|| format!("no file {path}, which `tidy/places.rs` names"))
}

/// Whether a text has a name as a word: `CsvFile`, `csv_file` or `csv-file`.
fn occurs(name: &str, text: &str) -> bool {
    let snake = snake(name);
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    [name.to_string(), snake.replace('_', "-"), snake].iter().any(|form| {
        text.match_indices(form.as_str()).any(|(at, _)| {
            let before = text[..at].chars().next_back();
            let after = text[at + form.len()..].chars().next();
            !before.is_some_and(is_part) && !after.is_some_and(is_part)
        })
    })
}

fn snake(name: &str) -> String {
    let mut snake = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
# Title

| to add | change |
|---|---|
| a colour | `x/src/colour.rs`, `x/src/gone.rs`; [how](docs/c.md#part), `Colour` |
";

    const LIST: List = List {
        row: "a colour",
        file: "crates/x/src/colour.rs",
        of: "Colour",
        places: &["docs/c.md", "bench/c.py"],
        exceptions: &[("Red", "bench/c.py", "a reason")],
    };

    fn tree(files: &[(&str, &str)]) -> Tree {
        let file =
            |(path, text): &(&str, &str)| File { path: (*path).into(), text: (*text).into() };
        Tree { files: files.iter().map(file).collect() }
    }

    #[test]
    fn a_name_that_a_place_lacks_is_found() {
        let colours = "pub enum Colour { Red, DarkBlue(u8) }";
        let tree = tree(&[
            ("crates/x/src/colour.rs", colours),
            ("docs/c.md", "red, dark_blues"),
            ("bench/c.py", "'dark-blue'"),
        ]);
        let found = LIST.check(&tree, &rows(TABLE)).unwrap();
        let told: Vec<_> = found.iter().map(|f| format!("{}: {}", f.place, f.message)).collect();
        let expected = [
            "docs/c.md: lacks a colour: `DarkBlue` of crates/x/src/colour.rs",
            "CONTRIBUTING.md:5: a colour: its row lacks bench/c.py",
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn rows_have_paths_from_the_root_and_lists_have_to_exist() {
        let [row] = &rows(TABLE)[..] else { panic!("one row") };
        let paths = ["crates/x/src/colour.rs", "crates/x/src/gone.rs", "docs/c.md"];
        assert_eq!(
            (row.line, row.added, &row.paths[..]),
            (5, "a colour", &paths.map(String::from)[..])
        );
        let tree = tree(&[("crates/x/src/colour.rs", "enum Colours { Red }")]);
        let error = LIST.check(&tree, &rows(TABLE)).unwrap_err();
        assert!(error.to_string().contains("has no `Colour` any more"), "{error}");
        let missing = List { row: "a shape", ..LIST }.check(&tree, &rows(TABLE)).unwrap_err();
        assert!(missing.to_string().contains("has no row `a shape`"), "{missing}");
    }

    #[test]
    fn arguments_of_calls_are_names() {
        let list = List { of: "Colour::new(", ..LIST };
        let names = list.names("Colour::new(\n    \"red\", 1), Colour::new(\"blue\")").unwrap();
        assert_eq!(names, ["red", "blue"]);
    }
}
