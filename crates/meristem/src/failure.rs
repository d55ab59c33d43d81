//! Errors for users: one block on stderr with the error, its causes and a remedy.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use meristem::{comm, data, device, grow, train};

/// Width of a block in columns.
const COLUMNS: usize = 100;

/// Maximum length of a printed line, longer than any path or list of keys or tensors.
const LINE_MAX: usize = 2000;

/// Exit code of a run that was stopped at a step boundary by request.
pub(crate) const STOPPED: u8 = 3;

/// Help on exit codes.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0              Success
  1              The run failed, a check failed, or data is damaged
  2              Wrong usage: a flag, a setting, or a file that does not fit; nothing was changed
  3              The run was stopped at a step boundary by request; `train --resume` continues it
  129, 130, 143  Stopped immediately by a second SIGHUP, SIGINT (Ctrl-C) or SIGTERM";

/// Failure of a command.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    causes: Vec<String>,
    remedy: Option<String>,
    exit_code: u8,
}

impl Failure {
    /// An error in the request, with exit code 2.
    pub(crate) fn usage(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (message, remedy) = (message.into(), Some(remedy.into()));
        Self { message, causes: vec![], remedy, exit_code: 2 }
    }

    /// An invalid value of a flag, with exit code 2.
    pub(crate) fn value(flag: &str, got: impl ToString, expected: impl ToString) -> Self {
        train::Error::value(flag, got, expected).into()
    }

    /// An operation that failed, with exit code 1.
    pub(crate) fn failed(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { exit_code: 1, ..Self::usage(message, remedy) }
    }

    /// The exit code, as in [`EXIT_CODES`].
    pub(crate) fn exit_code(&self) -> u8 {
        self.exit_code
    }

    /// The error, without causes.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The remedy.
    pub(crate) fn remedy(&self) -> Option<&str> {
        self.remedy.as_deref()
    }

    fn of(error: &dyn Error, remedy: Option<String>, exit_code: u8) -> Self {
        let message = error.to_string();
        let mut causes = vec![];
        let mut next = error.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            // Many messages already end with their cause.
            if !message.contains(&text) {
                causes.push(text);
            }
            next = cause.source();
        }
        Self { message, causes, remedy, exit_code }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&wrapped("error: ", &self.message))?;
        for cause in &self.causes {
            f.write_str(&wrapped("  cause: ", cause))?;
        }
        self.remedy.iter().try_for_each(|remedy| f.write_str(&wrapped("  help: ", remedy)))
    }
}

/// Wraps text at [`COLUMNS`] between words, with all lines but the first indented. Words are never
/// broken, because they may be paths or commands.
fn wrapped(label: &str, text: &str) -> String {
    let mut out = String::new();
    for (number, line) in text.trim_end().lines().enumerate() {
        let line = shortened(line);
        let mut column = 0;
        let start = if number == 0 { label } else { "    " };
        out.push_str(start);
        column += start.chars().count();
        for (place, word) in line.split_whitespace().enumerate() {
            let width = word.chars().count();
            if place > 0 && column + 1 + width > COLUMNS {
                out.push_str("\n    ");
                column = 4;
            } else if place > 0 {
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += width;
        }
        out.push('\n');
    }
    out
}

/// Truncates a line at [`LINE_MAX`] characters, because some messages quote a file, and appends the
/// number of omitted characters.
fn shortened(line: &str) -> Cow<'_, str> {
    match line.char_indices().nth(LINE_MAX) {
        None => line.into(),
        Some((end, _)) => {
            let left = line[end..].chars().count();
            format!("{} … ({left} more characters)", &line[..end]).into()
        }
    }
}

impl From<train::Error> for Failure {
    fn from(error: train::Error) -> Self {
        let (remedy, exit_code) = (error.remedy(), error.exit_code());
        Self::of(&error, remedy, exit_code)
    }
}

/// Converts errors of other crates through the training crate's error, which has the exit codes.
macro_rules! through_train {
    ($($error:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                train::Error::from(error).into()
            }
        }
    )*};
}
through_train!(device::Error, data::Error, grow::Error, meristem::nn::Error);

impl From<comm::Error> for Failure {
    fn from(error: comm::Error) -> Self {
        match error {
            comm::Error::Unavailable { transport, reason, remedy } => {
                Self::usage(format!("transport `{transport}`: {reason}"), remedy)
            }
            error => Self::of(&error, None, 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_the_error_and_its_remedy() {
        let error = train::Error::value("batch", 0, "1 to 65536");
        let text = Failure::from(error).to_string();
        assert!(text.starts_with("error: `batch`: got 0, expected 1 to 65536\n  help: "), "{text}");
    }

    #[test]
    fn long_quotes_in_a_message_are_truncated() {
        let text = Failure::usage(format!("α{}\nb", "x".repeat(100_000)), "c").to_string();
        let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains("xxx … (98001 more characters) b help: c"), "{flat}");
        assert!(text.chars().count() < LINE_MAX + 100);
    }

    #[test]
    fn lines_of_a_message_stay_together() {
        let text = Failure::usage("a\nb", "c").to_string();
        assert_eq!(text, "error: a\n    b\n  help: c\n");
    }

    #[test]
    fn long_lines_are_broken_between_words() {
        let path = "/a".repeat(60);
        let text = Failure::usage(format!("{} {path}", "word ".repeat(30)), "c").to_string();
        assert!(text.contains(&format!("\n    {path}\n")), "{text}");
        assert!(text.lines().all(|line| line.contains(&path) || line.chars().count() <= COLUMNS));
    }
}
