//! At most six arguments: the elements of a tuple count one by one, because only their position
//! distinguishes them, as with arguments.
//!
//! Clippy counts parameters, `self` among them. Here a parameter counts as many times as its type
//! has leaves: a tuple has the leaves of its elements, any other type is one leaf. References,
//! `Option` and type aliases are looked through, except an alias whose name is also that of a
//! struct or enum of the crate. A list of tuples is one leaf. A parameter that is taken apart in
//! the signature has at least as many leaves as its pattern has parts.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::Finding;
use super::tree::{File, Tree};

/// Most arguments of a function, as in `clippy.toml`.
const ARGUMENTS_MAX: usize = 6;

/// Deepest type alias that is followed.
const DEPTH_MAX: usize = 8;

/// Type aliases by name.
type Aliases = BTreeMap<String, syn::Type>;

/// Functions with too many arguments.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut crates: BTreeMap<&str, Vec<(&File, syn::File)>> = BTreeMap::new();
    for file in tree.ending(".rs") {
        let parsed = syn::parse_file(&file.text).map_err(|e| format!("{}: {e}", file.path))?;
        crates.entry(crate_of(&file.path)).or_default().push((file, parsed));
    }
    let mut findings = vec![];
    for files in crates.values() {
        let mut named = Named::default();
        files.iter().for_each(|(_, parsed)| named.visit_file(parsed));
        let aliases = named.aliases();
        for (file, parsed) in files {
            let mut functions = ArgumentVisitor { file, aliases: &aliases, findings: vec![] };
            functions.visit_file(parsed);
            findings.extend(functions.findings);
        }
    }
    Ok(findings)
}

/// The folder of a file's crate: `crates/NAME`, or the first folder of its path.
fn crate_of(path: &str) -> &str {
    let depth = if path.starts_with("crates/") { 2 } else { 1 };
    let end = path.match_indices('/').map(|(at, _)| at).nth(depth - 1);
    &path[..end.unwrap_or(path.len())]
}

/// Collects the names of types.
#[derive(Default)]
struct Named {
    aliases: Aliases,
    /// Structs and enums.
    others: BTreeSet<String>,
}

impl Named {
    /// The aliases whose names no struct or enum has, in any module.
    fn aliases(self) -> Aliases {
        let Self { aliases, others } = self;
        aliases.into_iter().filter(|(name, _)| !others.contains(name)).collect()
    }
}

impl<'ast> Visit<'ast> for Named {
    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.aliases.insert(item.ident.to_string(), (*item.ty).clone());
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.others.insert(item.ident.to_string());
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.others.insert(item.ident.to_string());
    }
}

/// Collects functions, methods and methods of traits with too many arguments.
struct ArgumentVisitor<'a> {
    file: &'a File,
    aliases: &'a Aliases,
    findings: Vec<Finding>,
}

impl<'ast> Visit<'ast> for ArgumentVisitor<'_> {
    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        let arguments: usize = signature.inputs.iter().map(|input| self.arguments(input)).sum();
        if arguments > ARGUMENTS_MAX {
            let place = format!("{}:{}", self.file.path, signature.span().start().line);
            let message = format!(
                "`{}` has {arguments} arguments with the elements of tuples, {ARGUMENTS_MAX} at \
                 most: give some of them a struct",
                signature.ident
            );
            self.findings.push(Finding::new(place, message));
        }
        visit::visit_signature(self, signature);
    }
}

impl ArgumentVisitor<'_> {
    fn arguments(&self, input: &syn::FnArg) -> usize {
        match input {
            syn::FnArg::Receiver(_) => 1,
            syn::FnArg::Typed(typed) => parts(&typed.pat).max(self.leaves(&typed.ty, 0)),
        }
    }

    fn leaves(&self, ty: &syn::Type, depth: usize) -> usize {
        match ty {
            syn::Type::Tuple(tuple) => tuple.elems.iter().map(|of| self.leaves(of, depth)).sum(),
            syn::Type::Reference(reference) => self.leaves(&reference.elem, depth),
            syn::Type::Paren(inner) => self.leaves(&inner.elem, depth),
            syn::Type::Path(path) => {
                let Some(last) = path.path.segments.last() else { return 1 };
                match self.aliases.get(&last.ident.to_string()) {
                    Some(alias) if depth < DEPTH_MAX => self.leaves(alias, depth + 1),
                    _ => optional(last).map_or(1, |inner| self.leaves(inner, depth)),
                }
            }
            _ => 1,
        }
    }
}

/// The type in an `Option`.
fn optional(segment: &syn::PathSegment) -> Option<&syn::Type> {
    match &segment.arguments {
        syn::PathArguments::AngleBracketed(of) if segment.ident == "Option" => {
            of.args.iter().find_map(|argument| match argument {
                syn::GenericArgument::Type(inner) => Some(inner),
                _ => None,
            })
        }
        _ => None,
    }
}

/// Parts of a pattern that takes a tuple or an array apart.
fn parts(pattern: &syn::Pat) -> usize {
    match pattern {
        syn::Pat::Tuple(tuple) => tuple.elems.iter().map(parts).sum(),
        syn::Pat::Slice(slice) => slice.elems.iter().map(parts).sum(),
        syn::Pat::Reference(reference) => parts(&reference.pat),
        syn::Pat::Paren(inner) => parts(&inner.pat),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let file = |path: &str, text: &str| File { path: path.into(), text: text.into() };
        let aliases = "type Pair = (u8, u8); type Pairs = (Pair, Pair); type Fine = Vec<Pair>;";
        let files = vec![file("crates/x/src/lib.rs", aliases), file(path, text)];
        let findings = check(&Tree { files }).unwrap();
        findings.into_iter().map(|f| format!("{}: {}", f.place, f.message)).collect()
    }

    #[test]
    fn the_leaves_of_tuples_are_arguments() {
        for (text, arguments) in [
            ("fn f(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8, g: u8) {}", 7),
            ("fn f((a, b, c): (u8, u8, u8), (d, e, (f, g)): (u8, u8, (u8, u8))) {}", 7),
            ("impl X { fn f(&mut self, of: &(u8, u8, u8), rest: Option<(u8, u8, u8)>) {} }", 7),
            ("trait X { fn f(a: Pairs, b: &'static mut Pair, c: super::Pair); }", 8),
            ("fn f([a, b, c, d]: [u8; 4], &[e, f, g]: &[u8; 3]) {}", 7),
            ("fn f() { fn inner(a: (u8, u8, u8, u8, u8, u8, u8)) {} }", 7),
        ] {
            let findings = found("crates/x/src/a.rs", text);
            assert_eq!(findings.len(), 1, "{text}: {findings:?}");
            assert!(findings[0].starts_with("crates/x/src/a.rs:1: "), "{findings:?}");
            assert!(findings[0].contains(&format!(" {arguments} arguments")), "{findings:?}");
        }
    }

    #[test]
    fn lists_results_and_other_crates_are_not_counted() {
        for (path, text) in [
            ("crates/x/src/a.rs", "fn f(&self, a: (u8, u8, u8, u8, u8)) -> (u8, u8) {}"),
            ("crates/x/src/a.rs", "fn f(a: Fine, b: Fine, c: &[(u8, u8)], d: [u8; 9]) {}"),
            ("crates/x/src/a.rs", "struct Pairs; fn f(a: &Pairs, b: &Pairs, c: u8) {}"),
            ("crates/y/src/a.rs", "fn f(a: Pairs, b: Pairs, c: impl Fn(u8, u8)) {}"),
        ] {
            assert_eq!(found(path, text), Vec::<String>::new(), "{text}");
        }
    }
}
