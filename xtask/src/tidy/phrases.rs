//! Phrases and forms that have better ones.

use std::error::Error;

use syn::visit::{self, Visit};

use super::Finding;
use super::tree::{File, Tree};

/// A form that no file may have.
struct BannedForm {
    /// The form, as findings name it.
    name: &'static str,
    /// Better forms.
    instead: &'static str,
    count: fn(&File) -> Result<usize, syn::Error>,
}

const FORMS: [BannedForm; 4] = [
    BannedForm {
        name: "`so many`",
        instead: "name the argument that is counted",
        count: |file| Ok(phrases(file, "so many")),
    },
    BannedForm {
        name: "`behind the`",
        instead: "`after` for an order; name the side of a place",
        count: |file| Ok(phrases(file, "behind the")),
    },
    BannedForm {
        name: "`if it does.`",
        instead: "name the condition",
        count: |file| Ok(phrases(file, "if it does.")),
    },
    BannedForm { name: "`match` on a bool", instead: "`if`", count: matches_on_bools },
];

/// Files that have one of the forms.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut findings = vec![];
    for file in tree.files.iter().filter(|file| is_held(file)) {
        for BannedForm { name, instead, count } in &FORMS {
            let count = count(file).map_err(|error| format!("{}: {error}", file.path))?;
            if count > 0 {
                findings.push(Finding::new(&file.path, format!("{count} times {name}: {instead}")));
            }
        }
    }
    Ok(findings)
}

/// Whether the rules apply to a file: Rust sources except those of tidy, the pages of docs/, and
/// the pages at the root except the changelog.
fn is_held(file: &File) -> bool {
    let is_source = file.path.ends_with(".rs") && !file.path.starts_with("xtask/src/tidy/");
    let is_page = file.path.ends_with(".md")
        && (file.path.starts_with("docs/")
            || !file.path.contains('/') && file.path != "CHANGELOG.md");
    is_source || is_page
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
    fn each_file_with_a_form_is_a_finding() {
        let files = vec![
            file("crates/x/src/a.rs", "// So many, so many.\nfn f() { if a { 1 } else { 2 } }"),
            file("crates/x/src/b.rs", "fn f() { match a { true => 1, false => 2 } }"),
            file("CHANGELOG.md", "so many"),
        ];
        let findings = check(&Tree { files }).unwrap();
        let found: Vec<_> = findings.iter().map(|f| (&f.place[..], &f.message[..7])).collect();
        assert_eq!(found, [("crates/x/src/a.rs", "2 times"), ("crates/x/src/b.rs", "1 times")]);
    }
}
