//! The paths that the modules of a crate name, found in the tokens: `crate::…`, `super::…`,
//! `self::…` and `use` trees, macros included, tests left out.

use std::collections::BTreeMap;
use std::error::Error;

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

use super::tree::Tree;

/// Segments of a path from the crate's root.
type Path = Vec<String>;

/// A module, inline or in its own file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    /// Its path.
    pub(crate) module: Path,
    /// The file that it is in.
    pub(crate) file: String,
    /// Paths that it names, each with its line.
    named: Vec<(Path, usize)>,
    /// Names that its `use` items bring in, with their paths.
    exports: BTreeMap<String, Path>,
    /// Its modules that are tests.
    tests: Vec<String>,
}

/// Largest number of re-exports that are followed for one path.
const DEPTH_MAX: usize = 8;

/// The modules of the crate whose sources are in `root`, without tests.
pub(crate) fn read(tree: &Tree, root: &str) -> Result<Vec<Source>, Box<dyn Error>> {
    let mut sources: Vec<Source> = vec![];
    for file in tree.ending(".rs") {
        let Some(path) = file.path.strip_prefix(root).and_then(|p| p.strip_prefix('/')) else {
            continue;
        };
        let mut module: Path = path.trim_end_matches(".rs").split('/').map(Into::into).collect();
        if matches!(module.last().map(String::as_str), Some("mod" | "lib" | "main")) {
            module.pop();
        }
        let tokens = file.text.parse::<TokenStream>().map_err(|e| format!("{}: {e}", file.path))?;
        walk(
            tokens,
            &Source { module, file: file.path.clone(), ..Source::default() },
            &mut sources,
        );
    }
    let tests: Vec<Path> = sources
        .iter()
        .flat_map(|s| {
            s.tests.iter().map(|test| [&s.module[..], std::slice::from_ref(test)].concat())
        })
        .collect();
    sources.retain(|source| !tests.iter().any(|test| source.module.starts_with(test)));
    Ok(sources)
}

/// The modules that a source's paths lead to, with their lines.
pub(crate) fn resolved<'a>(
    sources: &'a [Source],
    source: &'a Source,
) -> impl Iterator<Item = (&'a [String], usize)> {
    source.named.iter().map(|(path, line)| (resolve(sources, path, 0), *line))
}

/// The module at `path`, or the module that contains the item at `path`.
fn resolve<'a>(sources: &'a [Source], path: &[String], depth: usize) -> &'a [String] {
    let mut at: &[String] = &[];
    for (i, segment) in path.iter().enumerate() {
        let below = |source: &&Source| {
            source.module.len() == i + 1
                && source.module[..i] == *at
                && source.module[i] == *segment
        };
        if let Some(source) = sources.iter().find(below) {
            at = &source.module;
            continue;
        }
        let here = sources.iter().filter(|source| source.module == *at);
        let export = here.filter_map(|source| source.exports.get(segment)).next();
        return match export.filter(|_| depth < DEPTH_MAX) {
            Some(target) => resolve(sources, &[&target[..], &path[i + 1..]].concat(), depth + 1),
            None => at,
        };
    }
    at
}

/// Adds a module with the paths that it names to `sources`, and its inline modules. `empty` is the
/// module without paths.
fn walk(tokens: TokenStream, empty: &Source, sources: &mut Vec<Source>) {
    let mut own = empty.clone();
    scan(&tokens.into_iter().collect::<Vec<_>>(), &mut own, sources);
    sources.push(own);
}

fn scan(tokens: &[TokenTree], own: &mut Source, sources: &mut Vec<Source>) {
    let mut at = 0;
    while at < tokens.len() {
        if is_test_attribute(&tokens[at..]) {
            at += item_after(&tokens[at..], own);
            continue;
        }
        match (&tokens[at], tokens.get(at + 1), tokens.get(at + 2)) {
            (
                TokenTree::Ident(word),
                Some(TokenTree::Ident(name)),
                Some(TokenTree::Group(body)),
            ) if word == "mod" => {
                let module = [&own.module[..], &[name.to_string()]].concat();
                let inner = Source { module, file: own.file.clone(), ..Source::default() };
                walk(body.stream(), &inner, sources);
                at += 3;
            }
            (TokenTree::Ident(word), ..) if word == "use" => {
                let end = tokens[at..].iter().position(|token| is(token, ';'));
                let end = end.map_or(tokens.len(), |end| at + end);
                take_use(&tokens[at + 1..end], &[], own);
                at = end;
            }
            (TokenTree::Ident(word), ..)
                if is_root(&word.to_string()) && is_colons(&tokens[at + 1..]) =>
            {
                at += take_path(&tokens[at..], own);
            }
            (TokenTree::Group(group), ..) => {
                scan(&group.stream().into_iter().collect::<Vec<_>>(), own, sources);
                at += 1;
            }
            _ => at += 1,
        }
    }
}

fn is(token: &TokenTree, punctuation: char) -> bool {
    matches!(token, TokenTree::Punct(found) if found.as_char() == punctuation)
}

fn is_root(word: &str) -> bool {
    matches!(word, "crate" | "super" | "self")
}

fn is_colons(tokens: &[TokenTree]) -> bool {
    matches!(tokens, [TokenTree::Punct(one), two, ..]
        if one.as_char() == ':' && one.spacing() == Spacing::Joint && is(two, ':'))
}

/// Whether an attribute begins here that leaves its item out of all builds but tests.
fn is_test_attribute(tokens: &[TokenTree]) -> bool {
    let [mark, TokenTree::Group(group), ..] = tokens else { return false };
    let text = group.stream().to_string();
    let conditions = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    is(mark, '#') && text.starts_with("cfg") && !text.contains("not") && {
        conditions.into_iter().any(|word| word == "test")
    }
}

/// The number of tokens of an attribute and its item; a module of tests is noted.
fn item_after(tokens: &[TokenTree], own: &mut Source) -> usize {
    let item = &tokens[2..];
    let ends = |token: &TokenTree| {
        is(token, ';')
            || matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
    };
    let is_use = item.iter().take(4).any(|t| matches!(t, TokenTree::Ident(word) if word == "use"));
    let end = item.iter().position(|token| if is_use { is(token, ';') } else { ends(token) });
    let end = end.unwrap_or(item.len().saturating_sub(1));
    let name = item.windows(2).take(end).find_map(|pair| match pair {
        [TokenTree::Ident(word), TokenTree::Ident(name)] if word == "mod" => Some(name),
        _ => None,
    });
    own.tests.extend(name.map(ToString::to_string));
    3 + end
}

/// Adds the path at the start of `tokens` to `own`. Returns the number of its tokens.
fn take_path(tokens: &[TokenTree], own: &mut Source) -> usize {
    let line = tokens[0].span().start().line;
    let (mut path, mut at) = (vec![], 0);
    while let Some(TokenTree::Ident(segment)) = tokens.get(at) {
        path.push(segment.to_string());
        at += 1;
        if is_colons(&tokens[at..]) { at += 2 } else { break }
    }
    own.named.extend(absolute(&path, &own.module).map(|path| (path, line)));
    at.max(1)
}

/// Adds the paths of one tree of a `use` item, below `prefix`, to `own`.
fn take_use(tokens: &[TokenTree], prefix: &[String], own: &mut Source) {
    let (mut path, mut at) = (prefix.to_vec(), 0);
    loop {
        match tokens.get(at) {
            Some(TokenTree::Ident(segment)) => {
                let segment = segment.to_string();
                // `a::{self}` is `a`.
                if segment != "self" || path.is_empty() {
                    path.push(segment);
                }
            }
            Some(TokenTree::Group(group)) => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                inner.split(|token| is(token, ',')).for_each(|tree| take_use(tree, &path, own));
                return;
            }
            _ => break,
        }
        at += 1;
        if is_colons(&tokens[at..]) { at += 2 } else { break }
    }
    let (Some(first), Some(last)) = (tokens.first(), path.last().cloned()) else { return };
    let name = match &tokens[at.min(tokens.len())..] {
        [TokenTree::Ident(_as), TokenTree::Ident(name), ..] => name.to_string(),
        _ => last,
    };
    let line = first.span().start().line;
    // A path without a root begins with a module below this one, or with another crate. The path of
    // another crate then resolves to this module, which is no arrow.
    let below = || Some([&own.module[..], &path].concat());
    let Some(target) = absolute(&path, &own.module).or_else(below) else { return };
    own.named.push((target.clone(), line));
    own.exports.insert(name, target);
}

/// A path of a module from the crate's root, if it begins with `crate`, `super` or `self`.
fn absolute(path: &[String], module: &[String]) -> Option<Path> {
    let mut from = match path.first()?.as_str() {
        "crate" => vec![],
        "super" | "self" => module.to_vec(),
        _ => return None,
    };
    let mut rest = path;
    while let Some((first, others)) = rest.split_first().filter(|(first, _)| is_root(first)) {
        if first == "super" {
            from.pop();
        }
        rest = others;
    }
    from.extend_from_slice(rest);
    Some(from)
}
