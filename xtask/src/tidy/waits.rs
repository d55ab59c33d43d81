//! The whole program's waits for a device are in one table, each with its reason (V2).

use std::error::Error;

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::Finding;
use super::tree::{File, Tree, WAITS as TABLE};

/// Crates whose waits are counted: those of the program that call the device. Waits inside `device`
/// and in `python` are not counted.
const CRATES: [&str; 8] = ["comm", "data", "kernels", "nn", "grow", "control", "train", "meristem"];

/// Functions that wait for a device. A tensor's `to_vec` waits, too; unlike a slice's, it has an
/// element type (`to_vec::<f32>()`), or a result that `?` checks.
const WAITING: [&str; 7] = [
    "synchronize",
    "read_back",
    "read_back_as",
    "read_back_f64",
    "lend_on_device",
    "state_dict",
    "momentum_dict",
];

/// A call that waits, or an entry that permits one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wait {
    file: String,
    /// Line, for messages.
    line: usize,
    function: String,
    call: String,
}

impl Wait {
    fn same(&self, other: &Wait) -> bool {
        (&self.file, &self.function, &self.call) == (&other.file, &other.function, &other.call)
    }
}

/// Waits that are not in the table, and entries without a wait or a reason. An entry permits one
/// call.
pub(crate) fn check(tree: &Tree) -> Result<Vec<Finding>, Box<dyn Error>> {
    let table = tree.get(TABLE).map_or("", |file| &file.text);
    let (mut entries, mut findings) = entries(table)?;
    let (mut waits, mut tests) = (vec![], vec![]);
    for file in tree.ending(".rs").filter(|file| is_looked_at(&file.path)) {
        let found = waits_of(file)?;
        waits.extend(found.waits);
        tests.extend(found.tests);
    }
    for wait in waits.into_iter().filter(|wait| !tests.contains(&wait.file)) {
        match entries.iter().position(|entry| entry.same(&wait)) {
            Some(at) => drop(entries.remove(at)),
            None => {
                let Wait { file, line, function, call } = wait;
                let message = format!(
                    "`{call}` in `{function}` waits for the device: do without, or enter it into \
                     {TABLE} with its reason"
                );
                findings.push(Finding::new(format!("{file}:{line}"), message));
            }
        }
    }
    let gone = |Wait { file, function, call, .. }: Wait| {
        Finding::new(TABLE, format!("`{call}` in `{function}` of {file} is gone: take it out"))
    };
    findings.extend(entries.into_iter().map(gone));
    Ok(findings)
}

fn is_looked_at(path: &str) -> bool {
    CRATES.iter().any(|name| path.starts_with(&format!("crates/{name}/src/")))
}

/// The `[[wait]]` entries of the table, and a finding for each without a reason.
fn entries(table: &str) -> Result<(Vec<Wait>, Vec<Finding>), Box<dyn Error>> {
    let table: toml::Table = table.parse().map_err(|error| format!("{TABLE}: {error}"))?;
    let (mut entries, mut findings) = (vec![], vec![]);
    for entry in table.get("wait").and_then(|waits| waits.as_array()).into_iter().flatten() {
        let text = |key: &str| entry.get(key).and_then(|v| v.as_str()).unwrap_or("").to_string();
        let [file, function, call] = ["file", "function", "call"].map(text);
        if text("reason").is_empty() {
            findings.push(Finding::new(TABLE, format!("`{call}` in `{function}`: give a reason")));
        }
        entries.push(Wait { file, line: 0, function, call });
    }
    Ok((entries, findings))
}

fn waits_of(file: &File) -> Result<Waits<'_>, Box<dyn Error>> {
    let parsed = syn::parse_file(&file.text).map_err(|e| format!("{}: {e}", file.path))?;
    let mut visitor = Waits { file: &file.path, functions: vec![], waits: vec![], tests: vec![] };
    visitor.visit_file(&parsed);
    Ok(visitor)
}

/// Collects the calls that wait, with the function around each. Tests may wait.
struct Waits<'a> {
    file: &'a str,
    functions: Vec<String>,
    waits: Vec<Wait>,
    /// Files of modules that are declared here for tests only.
    tests: Vec<String>,
}

impl Waits<'_> {
    fn add(&mut self, call: String, at: Span) {
        let function = self.functions.last().cloned().unwrap_or_default();
        let (file, line) = (self.file.to_string(), at.start().line);
        self.waits.push(Wait { file, line, function, call });
    }

    fn within(&mut self, name: &syn::Ident, look: impl FnOnce(&mut Self)) {
        self.functions.push(name.to_string());
        look(self);
        self.functions.pop();
    }
}

/// The file of a module that `parent` declares.
fn file_of(parent: &str, module: &syn::Ident) -> String {
    let stem = parent.trim_end_matches(".rs");
    let root = ["/mod", "/lib", "/main"].iter().find_map(|root| stem.strip_suffix(root));
    format!("{}/{module}.rs", root.unwrap_or(stem))
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::Path(path) => path.is_ident("test"),
        syn::Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        syn::Meta::NameValue(_) => false,
    })
}

/// Whether this is a `to_vec` with an element type, which only a tensor's has.
fn is_tensor_to_vec(call: &syn::ExprMethodCall) -> bool {
    call.method == "to_vec" && call.turbofish.is_some()
}

impl<'ast> Visit<'ast> for Waits<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        } else if item.content.is_none() {
            self.tests.push(file_of(self.file, &item.ident));
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            self.within(&item.sig.ident, |inside| visit::visit_item_fn(inside, item));
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.within(&item.sig.ident, |inside| visit::visit_impl_item_fn(inside, item));
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let name = call.method.to_string();
        if WAITING.contains(&name.as_str()) || is_tensor_to_vec(call) {
            self.add(name, call.method.span());
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_try(&mut self, tried: &'ast syn::ExprTry) {
        if let syn::Expr::MethodCall(call) = &*tried.expr
            && call.method == "to_vec"
            && !is_tensor_to_vec(call)
        {
            self.add("to_vec".into(), call.method.span());
        }
        visit::visit_expr_try(self, tried);
    }

    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        let name = path.path.segments.last().map(|segment| segment.ident.to_string());
        if let Some(name) = name.filter(|name| WAITING.contains(&name.as_str())) {
            self.add(name, path.span());
        }
        visit::visit_expr_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "
        impl Trainer {
            fn read(&self) -> Result<()> {
                let loss = self.loss.to_vec()?;
                let names = [1, 2].to_vec();
                self.streams.iter().try_for_each(Stream::synchronize)
            }
        }
        fn load() { let all = device::read_back_as::<f32>(&[&x]).unwrap();
        let one = x.to_vec::<u8>(); }
        #[cfg(test)]
        mod tests { fn may() { device.synchronize().unwrap(); } }
        #[test]
        fn may_too() { device.synchronize().unwrap(); }
        #[cfg(test)]
        mod model;
    ";

    fn findings(table: &str) -> Vec<String> {
        let files = [
            (TABLE, table),
            ("crates/comm/src/x.rs", SOURCE),
            ("crates/device/src/y.rs", SOURCE),
            // A module of `x` for tests only.
            ("crates/comm/src/x/model.rs", SOURCE),
        ];
        let files = files.map(|(path, text)| File { path: path.into(), text: text.into() });
        let findings = check(&Tree { files: files.into() }).unwrap();
        findings.into_iter().map(|f| format!("{} {}", f.place, f.message)).collect()
    }

    fn entry(function: &str, call: &str, reason: &str) -> String {
        let file = "crates/comm/src/x.rs";
        format!(
            "[[wait]]\nfile='{file}'\nfunction='{function}'\ncall='{call}'\nreason='{reason}'\n"
        )
    }

    #[test]
    fn every_wait_needs_its_entry_and_every_entry_its_wait() {
        let calls = [
            ("read", "to_vec"),
            ("read", "synchronize"),
            ("load", "read_back_as"),
            ("load", "to_vec"),
        ];
        let all: Vec<String> =
            calls.iter().map(|(function, call)| entry(function, call, "because")).collect();
        assert_eq!(findings(&all.concat()), Vec::<String>::new());
        for (missing, (_, call)) in calls.iter().enumerate() {
            let mut some = all.clone();
            some.remove(missing);
            let found = findings(&some.concat());
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].starts_with("crates/comm/src/x.rs:"), "{found:?}");
            assert!(found[0].contains(call), "{found:?}");
        }
        // An entry permits one call: a second one of the kind needs another.
        let found = findings(&(all.concat() + &all[1]));
        assert!(found.len() == 1 && found[0].contains("is gone"), "{found:?}");
        let found = findings(&(all[1..].concat() + &entry("read", "to_vec", "")));
        assert!(found.len() == 1 && found[0].contains("give a reason"), "{found:?}");
    }
}
