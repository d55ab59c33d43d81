//! Phrases and forms that are being removed: each crate has a maximum number of occurrences, which
//! may only fall.

use std::collections::BTreeMap;
use std::error::Error;

use syn::visit::{self, Visit};

use super::Finding;
use super::arguments::crate_of;
use super::tree::{File, Tree};

/// A form that is counted.
struct CountedForm {
    /// The form, as findings name it.
    name: &'static str,
    /// Better forms.
    instead: &'static str,
    count: fn(&File) -> Result<usize, syn::Error>,
    /// Occurrences that are left, by crate.
    left: &'static [(&'static str, usize)],
}

const FORMS: [CountedForm; 4] = [
    CountedForm {
        name: "`so many`",
        instead: "name the argument that is counted",
        count: |file| Ok(phrases(file, "so many")),
        left: &[],
    },
    CountedForm {
        name: "`behind the`",
        instead: "`after` for an order; name the side of a place",
        count: |file| Ok(phrases(file, "behind the")),
        left: &[],
    },
    CountedForm {
        name: "`if it does.`",
        instead: "name the condition",
        count: |file| Ok(phrases(file, "if it does.")),
        left: &[],
    },
    CountedForm { name: "`match` on a bool", instead: "`if`", count: matches_on_bools, left: &[] },
];

/// Crates that have a form more often than their number.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut findings = vec![];
    for form in &FORMS {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for file in tree.files.iter().filter(|file| is_held(file)) {
            let count = (form.count)(file).map_err(|error| format!("{}: {error}", file.path))?;
            *counts.entry(crate_of(&file.path)).or_default() += count;
        }
        findings.extend(counts.into_iter().filter_map(|(name, count)| form.exceeded(name, count)));
    }
    Ok(findings)
}

/// Whether rules hold a file: sources and documents, without dated ones.
fn is_held(file: &File) -> bool {
    let is_source = file.path.ends_with(".rs") && !file.path.starts_with("xtask/src/tidy/");
    let is_page = file.path.ends_with(".md")
        && (file.path.starts_with("docs/")
            || !file.path.contains('/') && file.path != "CHANGELOG.md");
    is_source || is_page
}

impl CountedForm {
    fn exceeded(&self, name: &str, count: usize) -> Option<Finding> {
        let left = self.left.iter().find(|(known, _)| *known == name).map_or(0, |(_, left)| *left);
        (count > left).then(|| {
            let Self { name: form, instead, .. } = self;
            Finding::new(name, format!("{count} times {form}, {left} at most: {instead}"))
        })
    }
}

/// Occurrences of a phrase in the text of a document, or in the comments of a source, which may be
/// broken over lines.
fn phrases(file: &File, phrase: &str) -> usize {
    let text: Vec<&str> = if file.path.ends_with(".md") {
        file.text.split_whitespace().collect()
    } else {
        let comments = file.text.lines().filter_map(|line| line.split_once("//"));
        let comments = comments.map(|(_, comment)| comment.trim_start_matches(['/', '!']));
        comments.flat_map(str::split_whitespace).collect()
    };
    text.join(" ").to_lowercase().matches(phrase).count()
}

fn matches_on_bools(file: &File) -> Result<usize, syn::Error> {
    if !file.path.ends_with(".rs") {
        return Ok(0);
    }
    let mut matches = Matches::default();
    matches.visit_file(&syn::parse_file(&file.text)?);
    Ok(matches.on_bools)
}

#[derive(Default)]
struct Matches {
    on_bools: usize,
}

impl<'ast> Visit<'ast> for Matches {
    fn visit_expr_match(&mut self, expression: &'ast syn::ExprMatch) {
        let is_bool = |arm: &syn::Arm| match &arm.pat {
            syn::Pat::Lit(literal) => matches!(literal.lit, syn::Lit::Bool(_)),
            _ => false,
        };
        self.on_bools += usize::from(expression.arms.iter().any(is_bool));
        visit::visit_expr_match(self, expression);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.into(), text: text.into() }
    }

    #[test]
    fn phrases_are_counted_in_comments_and_documents() {
        let source = "/// So\n/// many, and so many.\nlet s = \"so many\"; // Not so many\n";
        assert_eq!(phrases(&file("crates/x/src/a.rs", source), "so many"), 3);
        assert_eq!(phrases(&file("docs/a.md", "so\nmany so many"), "so many"), 2);
    }

    #[test]
    fn a_match_on_a_bool_is_counted_and_one_on_two_is_not() {
        let count = |text: &str| matches_on_bools(&file("a.rs", text)).unwrap();
        assert_eq!(
            count("fn f() { match a { true => 1, false => match b { false => 2, _ => 3 } } }"),
            2
        );
        assert_eq!(count("fn f() { match (a, b) { (true, _) => 1, _ => 2 } }"), 0);
    }

    #[test]
    fn more_than_are_left_is_a_finding() {
        let form = CountedForm { left: &[("crates/x", 2)], ..FORMS[0] };
        assert_eq!(form.exceeded("crates/x", 2), None);
        assert!(form.exceeded("crates/x", 3).unwrap().message.contains("3 times"));
        assert!(form.exceeded("crates/y", 1).is_some());
    }
}
