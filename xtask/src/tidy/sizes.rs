//! Small rooms: files mostly under 500 lines, functions mostly under 70.
//!
//! "Mostly" is a number here: a hard limit for each, and a share that may pass the soft one.
//! Test modules at the end of a file do not count towards its length.

use std::error::Error;

use proc_macro2::LineColumn;
use syn::spanned::Spanned;
use syn::visit::Visit;

use super::Finding;
use super::tree::{File, Tree};

/// A size limit: every item within `hard`, all but `exceptions` (a share) within `soft`. In lines.
struct SizeLimit {
    what: &'static str,
    soft: usize,
    hard: usize,
    exceptions: f64,
}

const FILES: SizeLimit = SizeLimit { what: "file", soft: 500, hard: 700, exceptions: 0.05 };
const FUNCTIONS: SizeLimit = SizeLimit { what: "function", soft: 70, hard: 100, exceptions: 0.02 };

/// A thing with a length in lines.
struct Sized {
    place: String,
    lines: usize,
}

/// Files and functions that are too long, and limits passed by too many.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut files = vec![];
    let mut functions = vec![];
    for file in tree.ending(".rs") {
        files.push(Sized { place: file.path.clone(), lines: lines_before_tests(&file.text) });
        functions.extend(functions_of(file)?);
    }
    Ok([judge(&FILES, &files), judge(&FUNCTIONS, &functions)].concat())
}

fn lines_before_tests(text: &str) -> usize {
    text.lines().take_while(|line| *line != "#[cfg(test)]").count()
}

fn judge(limit: &SizeLimit, items: &[Sized]) -> Vec<Finding> {
    let &SizeLimit { what, soft, hard, exceptions } = limit;
    let long: Vec<&Sized> = items.iter().filter(|item| item.lines > soft).collect();
    let too_many = long.len() as f64 > exceptions * items.len() as f64;
    long.iter()
        .filter(|item| too_many || item.lines > hard)
        .map(|item| {
            let message = format!(
                "a {what} of {} lines: {} of {} are over {soft} (at most {:.0} %), none may be \
                 over {hard}; split it",
                item.lines,
                long.len(),
                items.len(),
                exceptions * 100.0
            );
            Finding::new(&item.place, message)
        })
        .collect()
}

fn functions_of(file: &File) -> Result<Vec<Sized>, Box<dyn Error>> {
    let parsed = syn::parse_file(&file.text).map_err(|e| format!("{}: {e}", file.path))?;
    let mut visitor = SizeVisitor { path: &file.path, found: vec![] };
    visitor.visit_file(&parsed);
    Ok(visitor.found)
}

/// Collects functions and methods with the length of signature and body.
struct SizeVisitor<'a> {
    path: &'a str,
    found: Vec<Sized>,
}

impl SizeVisitor<'_> {
    fn add(&mut self, from: LineColumn, to: LineColumn) {
        let place = format!("{}:{}", self.path, from.line);
        self.found.push(Sized { place, lines: to.line + 1 - from.line });
    }
}

impl<'ast> Visit<'ast> for SizeVisitor<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add(item.sig.span().start(), item.block.span().end());
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(item.sig.span().start(), item.block.span().end());
        syn::visit::visit_impl_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_function_is_found_and_a_test_module_is_not_counted() {
        let body = "    let _ = 1;\n".repeat(101);
        let text = format!("fn f() {{\n{body}}}\n#[cfg(test)]\nmod tests {{}}\n");
        let file = File { path: "a.rs".into(), text };
        assert_eq!(lines_before_tests(&file.text), 103);
        let findings = check(&Tree { files: vec![file] }).unwrap();
        assert_eq!(findings.iter().map(|f| f.place.as_str()).collect::<Vec<_>>(), ["a.rs:1"]);
    }

    #[test]
    fn a_few_may_pass_the_soft_limit() {
        let items = |long: usize| -> Vec<Sized> {
            (0..100)
                .map(|i| Sized { place: i.to_string(), lines: 60 + 20 * usize::from(i < long) })
                .collect()
        };
        assert!(judge(&FUNCTIONS, &items(2)).is_empty());
        assert_eq!(judge(&FUNCTIONS, &items(3)).len(), 3);
    }
}
