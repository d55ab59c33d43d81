//! Translation of CUDA sources to C++: finds kernels, and rewrites `extern __shared__`.

use std::fmt::Write as _;

/// The part of the language that the C++ compiler lacks.
const SHIM: &str = include_str!("shim.h");

/// A kernel found in a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundKernel {
    /// Its name.
    pub(crate) name: String,
    /// Arguments of its `__launch_bounds__`, or nothing.
    bounds: String,
}

/// A source for the C++ compiler, to be placed after the shim.
#[derive(Debug)]
pub(crate) struct Translated {
    /// The text, with the line count of the source.
    pub(crate) text: String,
    /// Kernels in order of appearance.
    pub(crate) kernels: Vec<FoundKernel>,
}

/// Rewrites a preprocessed source; the error is a line for the program's log.
pub(crate) fn translate(source: &str) -> Result<Translated, String> {
    let blank = without_quotes(source);
    let mut kernels = vec![];
    let mut edits = vec![];
    for (at, word) in words(&blank) {
        let rest = &blank[at + word.len()..];
        let error = |why: &str| format!("{}: error: {why}", place(source, at));
        match word {
            "__global__" => kernels.extend(kernel(rest).map_err(error)?),
            "extern" if rest.trim_start().starts_with("__shared__") => {
                let why = "write extern __shared__ TYPE NAME[];";
                let (bytes, text) = dynamic_shared(rest).ok_or_else(|| error(why))?;
                edits.push((at..at + word.len() + bytes, text));
            }
            _ => {}
        }
    }
    let mut text = source.to_string();
    for (range, replacement) in edits.into_iter().rev() {
        text.replace_range(range, &replacement);
    }
    Ok(Translated { text, kernels })
}

/// The whole unit for the compiler: shim, program, table of its kernels.
pub(crate) fn unit(program: &Translated) -> String {
    let Translated { text, kernels } = program;
    let mut unit = format!("#line 1 \"meristem_standin.h\"\n{SHIM}\n{text}\n");
    unit.push_str("#line 1 \"meristem_kernels.h\"\n");
    unit.push_str("static const meristem_kernel meristem_kernels[] = {\n");
    for FoundKernel { name, bounds } in kernels {
        let entry = format!("meristem_entry<&{name}>");
        let _ = writeln!(
            unit,
            "{{\"{name}\", &{entry}::run, meristem_bounds({bounds}), {entry}::arguments, \
             {entry}::argument}},"
        );
    }
    let _ = write!(
        unit,
        "{{0, 0, 0, 0, 0}}}};\n\
         extern \"C\" __attribute__((visibility(\"default\"))) const meristem_module \
         meristem_module_of_kernels = {{\
         sizeof(meristem_kernels) / sizeof(meristem_kernel) - 1, \
         meristem_kernels, &meristem, &threadIdx, &blockIdx, &blockDim, &gridDim, \
         meristem_dynamic, __bss_start, _end}};\n",
    );
    unit
}

/// A hash of the shim and these texts (FNV-1a).
pub(crate) fn stamp(texts: &[&str]) -> u64 {
    let bytes = texts.iter().chain([&SHIM]).flat_map(|text| text.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |stamp, byte| {
        (stamp ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The kernel whose declaration follows `__global__`; `None` for a declaration without a body.
fn kernel(rest: &str) -> Result<Option<FoundKernel>, &'static str> {
    let mut rest = rest.trim_start();
    let mut bounds = String::new();
    for (word, keep) in [("__launch_bounds__", true), ("void", false), ("__launch_bounds__", true)]
    {
        let Some(after) = rest.strip_prefix(word) else {
            if keep {
                continue;
            }
            return Err("a kernel is __global__ [__launch_bounds__(…)] void NAME(…)");
        };
        rest = after.trim_start();
        if keep {
            let inner = parenthesised(rest).ok_or("__launch_bounds__ without its threads")?;
            bounds = inner.to_string();
            rest = rest[inner.len() + 2..].trim_start();
        }
    }
    let name: String = rest.chars().take_while(|c| is_word(*c)).collect();
    let after = rest[name.len()..].trim_start();
    let arguments = parenthesised(after).ok_or("a kernel without arguments in parentheses")?;
    let has_body = after[arguments.len() + 2..].trim_start().starts_with('{');
    Ok(has_body.then_some(FoundKernel { name, bounds }))
}

/// The length of `__shared__ TYPE NAME[];`, and its replacement, a pointer to the block's dynamic
/// memory.
fn dynamic_shared(rest: &str) -> Option<(usize, String)> {
    let end = rest.find(';')?;
    let declaration = rest[..end].trim().strip_prefix("__shared__")?;
    let mut declaration = declaration.trim().to_string();
    for attribute in ["__align__", "alignas"] {
        if let Some(at) = declaration.find(attribute) {
            let after = declaration[at + attribute.len()..].trim_start();
            let tail = after[parenthesised(after)?.len() + 2..].to_string();
            declaration = declaration[..at].to_string() + &tail;
        }
    }
    let declaration = declaration.trim().strip_suffix(']')?.trim_end().strip_suffix('[')?.trim();
    let start = declaration.rfind(|c: char| !is_word(c))? + 1;
    let (kind, name) = (declaration[..start].trim(), &declaration[start..]);
    let newlines = "\n".repeat(rest[..end].matches('\n').count());
    let text = format!(
        "static {kind}* const {name} = reinterpret_cast<{kind}*>(meristem_dynamic){newlines}"
    );
    Some((end, text))
}

/// The text between the opening parenthesis at the start of `text` and its closing one.
fn parenthesised(text: &str) -> Option<&str> {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return (at > 0).then(|| &text[1..at]);
        }
    }
    None
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Words of a text with their places.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.split(|c| !is_word(c))
        .filter(|word| !word.is_empty())
        .map(|word| (word.as_ptr() as usize - text.as_ptr() as usize, word))
}

/// File and line of a position, according to the line markers before it (`# 12 "a.cu"`).
fn place(source: &str, at: usize) -> String {
    let (mut file, mut line) = ("", 0);
    for text in source[..at].split_inclusive('\n') {
        match marker(text) {
            Some((next, name)) => (line, file) = (next, name),
            None if text.ends_with('\n') => line += 1,
            None => {}
        }
    }
    format!("{file}:{line}")
}

fn marker(line: &str) -> Option<(usize, &str)> {
    let (number, rest) = line.strip_prefix("# ")?.split_once(' ')?;
    Some((number.parse().ok()?, rest.split('"').nth(1)?))
}

/// The source with strings and characters replaced by spaces; all other text keeps its position.
fn without_quotes(source: &str) -> String {
    let mut out: Vec<u8> = source.bytes().collect();
    let mut at = 0;
    while at < out.len() {
        if !matches!(out[at], b'"' | b'\'') {
            at += 1;
            continue;
        }
        let end = quoted(&out, at, out[at]).min(out.len());
        out[at..end].fill(b' ');
        at = end;
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The end of a quoted text that begins at `start`.
fn quoted(text: &[u8], start: usize, quote: u8) -> usize {
    let mut at = start + 1;
    while at < text.len() && text[at] != quote {
        // A digit separator (1'000) is no quote, so the end of the line ends a quote, too.
        if text[at] == b'\n' {
            return at;
        }
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_with_their_bounds_and_not_in_strings() {
        let source = r#"
extern "C" __global__ void declared(float* x);
extern "C" __global__ void __launch_bounds__(256, 2)
first(float* x, int n) { const char* s = "__global__ void in_a_string() {}"; }
extern "C" __global__ __launch_bounds__(kThreads) void second() {}
char c = '"'; extern "C" __global__ void third(int a[2]) {}
"#;
        let found = translate(source).unwrap().kernels;
        let found: Vec<_> = found.iter().map(|f| (f.name.as_str(), f.bounds.as_str())).collect();
        assert_eq!(found, [("first", "256, 2"), ("second", "kThreads"), ("third", "")]);
    }

    #[test]
    fn dynamic_shared_memory_becomes_a_pointer_on_as_many_lines() {
        let source = "void f() {\n  extern __shared__ __align__(16)\n  unsigned char raw[];\n}\n\
                      extern __shared__ float tile [ ];\n";
        let text = translate(source).unwrap().text;
        let expected = "void f() {\n  static unsigned char* const raw = \
                        reinterpret_cast<unsigned char*>(meristem_dynamic)\n;\n}\n\
                        static float* const tile = reinterpret_cast<float*>(meristem_dynamic);\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn an_error_has_its_place() {
        let error = translate("# 1 \"a.cu\"\n\n\n__global__ int f() {}").unwrap_err();
        let expected = "a.cu:3: error: a kernel is __global__ [__launch_bounds__(…)] void NAME(…)";
        assert_eq!(error, expected);
        let source = "# 1 \"a.cu\"\n\n# 7 \"b.h\" 1\nextern __shared__ float x;";
        let error = translate(source).unwrap_err();
        assert_eq!(error, "b.h:7: error: write extern __shared__ TYPE NAME[];");
    }

    #[test]
    fn a_stamp_changes_with_every_text() {
        assert_eq!(stamp(&["a", "b"]), stamp(&["a", "b"]));
        assert_ne!(stamp(&["a", "b"]), stamp(&["ab", ""]));
    }
}
