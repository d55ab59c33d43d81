//! Errors as a user sees them: one block on stderr with what, why and what to do (U6).

use std::error::Error;
use std::fmt;

use meristem::{data, device, grow, train};

/// A command that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    causes: Vec<String>,
    remedy: Option<String>,
    exit_code: u8,
}

impl Failure {
    /// A request that makes no sense: exit code 2.
    pub(crate) fn usage(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (message, remedy) = (message.into(), Some(remedy.into()));
        Self { message, causes: vec![], remedy, exit_code: 2 }
    }

    /// Something that could not be done: exit code 1.
    pub(crate) fn failed(message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { exit_code: 1, ..Self::usage(message, remedy) }
    }

    /// 1: the run failed, 2: wrong usage.
    pub(crate) fn exit_code(&self) -> u8 {
        self.exit_code
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
        let indented = |text: &str| text.trim_end().replace('\n', "\n  ");
        writeln!(f, "error: {}", indented(&self.message))?;
        for cause in &self.causes {
            writeln!(f, "  cause: {}", indented(cause))?;
        }
        match &self.remedy {
            Some(remedy) => writeln!(f, "  help: {}", indented(remedy)),
            None => Ok(()),
        }
    }
}

impl From<train::Error> for Failure {
    fn from(error: train::Error) -> Self {
        let (remedy, exit_code) = (error.remedy(), error.exit_code());
        Self::of(&error, remedy, exit_code)
    }
}

/// Errors of the other crates go through the training crate's, which knows their exit codes.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_says_what_and_what_to_do() {
        let error = train::Error::value("batch", 0, "1 to 65536");
        let text = Failure::from(error).to_string();
        assert!(text.starts_with("error: `batch`: got 0, expected 1 to 65536\n  help: "), "{text}");
    }

    #[test]
    fn lines_of_a_message_stay_together() {
        let text = Failure::usage("a\nb", "c").to_string();
        assert_eq!(text, "error: a\n  b\n  help: c\n");
    }
}
