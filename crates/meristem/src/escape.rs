//! Escaping of untrusted text for terminals and shells.
//!
//! Names of classes, files, tensors and folders may contain any character. All text for people is
//! escaped by [`lines`]; a name within a line is escaped by [`printable`] first, so it cannot end
//! the line.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::path::Path;

/// Whether a character controls a terminal, or reorders or breaks text: the control characters of
/// ASCII and Latin-1, bidirectional marks, line separators.
fn needs_escape(c: char) -> bool {
    let direction = ['\u{61c}', '\u{200e}', '\u{200f}'];
    c.is_control()
        || direction.contains(&c)
        || ('\u{2028}'..='\u{202e}').contains(&c)
        || ('\u{2066}'..='\u{2069}').contains(&c)
}

/// Escapes control characters of one line, such as `\u{1b}`, including line ends.
pub(crate) fn printable(text: &str) -> String {
    replaced(text, needs_escape, |c| c.escape_unicode().to_string()).into_owned()
}

/// Escapes control characters of several lines, except line ends.
pub(crate) fn lines(text: &str) -> Cow<'_, str> {
    replaced(text, |c| needs_escape(c) && c != '\n', |c| c.escape_unicode().to_string())
}

/// Escapes control characters in JSON as JSON escapes, so parsers read the original text.
pub(crate) fn json(text: &str) -> Cow<'_, str> {
    let escape = |c: char| {
        let mut units = [0; 2];
        c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")).collect()
    };
    replaced(text, needs_escape, escape)
}

fn replaced(text: &str, which: impl Fn(char) -> bool, by: impl Fn(char) -> String) -> Cow<'_, str> {
    if !text.contains(&which) {
        return text.into();
    }
    text.chars().map(|c| if which(c) { by(c) } else { c.into() }).collect::<String>().into()
}

/// Quotes a path for a printed command of a POSIX shell. A path with control characters or invalid
/// UTF-8 is quoted as `$'…'`, which most shells support.
pub(crate) fn quoted(path: &Path) -> String {
    let text = path.to_string_lossy();
    // A leading dash would be parsed as a flag.
    let dot = if text.starts_with('-') { "./" } else { "" };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    match path.to_str() {
        Some(text) if !text.is_empty() && text.chars().all(plain) => format!("{dot}{text}"),
        Some(text) if !text.contains(needs_escape) => {
            format!("'{dot}{}'", text.replace('\'', r"'\''"))
        }
        _ => format!("$'{dot}{}'", by_bytes(path.as_os_str())),
    }
}

/// Contents of `$'…'`.
fn by_bytes(word: &OsStr) -> String {
    let byte = |byte: &u8| match byte {
        b'\'' | b'\\' => format!("\\{}", char::from(*byte)),
        b' '..=b'~' => char::from(*byte).into(),
        // Octal escapes have exactly three digits; hexadecimal escapes have no fixed length.
        byte => format!("\\{byte:03o}"),
    };
    word.as_encoded_bytes().iter().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printable_text_has_no_control_characters() {
        let name = "a\u{1b}[31mb\nc\u{9b}é\u{202e}\u{7f}";
        assert_eq!(printable(name), r"a\u{1b}[31mb\u{a}c\u{9b}é\u{202e}\u{7f}");
        assert_eq!(lines(name), "a\\u{1b}[31mb\nc\\u{9b}é\\u{202e}\\u{7f}");
        assert_eq!(printable("two words, 3×3"), "two words, 3×3");
    }

    #[test]
    fn escaped_json_parses_to_the_same_text() {
        let name = "a\u{1b}\u{9b}\u{202e}é";
        let text = serde_json::to_string(name).unwrap();
        let escaped = json(&text);
        assert_eq!(escaped, "\"a\\u001b\\u009b\\u202eé\"");
        assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), name);
    }

    /// A shell parses each word to the path.
    #[cfg(unix)]
    #[test]
    fn a_shell_parses_quoted_paths() {
        use std::os::unix::ffi::OsStrExt;
        let names: [&[u8]; 9] = [
            b"runs/a-1_b.c",
            b"my run",
            b"it's",
            b"$(touch x)",
            b"`id`;#\"!*",
            b"\x1b[31m",
            b"a\nb'\\c",
            b"\xff\x001".split(|byte| *byte == 0).next().unwrap_or_default(),
            b"",
        ];
        for name in names {
            let word = quoted(Path::new(OsStr::from_bytes(name)));
            let line = format!("printf %s {word}");
            let said = std::process::Command::new("bash").args(["-c", &line]).output().unwrap();
            assert_eq!(said.stdout, name, "{word}");
            assert_eq!(lines(&word), word);
        }
        assert_eq!([quoted(Path::new("-x")), quoted(Path::new("-x y"))], ["./-x", "'./-x y'"]);
        assert_eq!(quoted(Path::new("runs/a")), "runs/a");
    }
}
