//! Text for people: stdout and stderr, numbers, durations.
//!
//! All output uses this module. At the end of the program, [`finish`] reports the first failed
//! write to stdout as an error. A closed pipe, as in `meristem … | head`, is not an error.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::escape;
pub(crate) use crate::escape::printable;

/// First failed write to stdout.
static FAILED: Mutex<Option<io::Error>> = Mutex::new(None);

/// Writes lines for people to stdout.
pub(crate) fn out(text: &str) {
    keep_error(writeln!(io::stdout().lock(), "{}", escape::lines(text)));
}

/// Writes lines for programs to stdout. They are escaped only if stdout is a terminal.
pub(crate) fn data(text: &str) {
    if io::stdout().is_terminal() {
        out(text)
    } else {
        keep_error(writeln!(io::stdout().lock(), "{text}"))
    }
}

/// Stdout for programs, like [`data`], as a writer that returns errors.
pub(crate) struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !io::stdout().is_terminal() {
            return io::stdout().lock().write(bytes);
        }
        let text = String::from_utf8_lossy(bytes).replace("\r\n", "\n");
        io::stdout().lock().write_all(escape::lines(&text).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().lock().flush()
    }
}

/// Writes a line of JSON to stdout.
pub(crate) fn json(line: &str) {
    keep_error(writeln!(io::stdout().lock(), "{}", escape::json(line)));
}

/// Stores the error of a write to stdout, unless an earlier one is stored.
pub(crate) fn keep_error(result: io::Result<()>) {
    if let Err(error) = result {
        FAILED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// Flushes stdout, and reports the first write that failed.
///
/// # Errors
/// A write failed for another reason than a closed pipe.
pub(crate) fn finish() -> io::Result<()> {
    keep_error(io::stdout().lock().flush());
    match FAILED.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// Writes lines to stderr. Errors of these writes are ignored, because there is nowhere to report
/// them.
pub(crate) fn err(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", escape::lines(text));
}

/// Overwrites the current line of the terminal on stderr; the cursor stays at its end.
pub(crate) fn status(text: &str) {
    let _ = write!(io::stderr().lock(), "\r\x1b[K{}", printable(text));
}

/// Stderr for the debug log, with escaping of untrusted values.
pub(crate) struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        io::stderr().lock().write_all(escape::lines(&text).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().lock().flush()
    }
}

/// Formats a path within a line.
pub(crate) fn shown(path: &Path) -> String {
    printable(&path.display().to_string())
}

/// Formats a number with separators, such as `12,345`.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a count with its noun, such as `1 round` or `1,200 steps`.
pub(crate) fn counted(number: usize, [one, many]: [&str; 2]) -> String {
    format!("{} {}", thousands(number as u64), if number == 1 { one } else { many })
}

/// Formats a duration, such as `47 s`, `3 min 05 s` or `2 h 07 min`.
pub(crate) fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} min"),
    }
}

/// Formats a size, such as `12.3 MB`.
pub(crate) fn megabytes(bytes: usize) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

/// Mean; `None` without values.
pub(crate) fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.into_iter().fold((0.0, 0), |(s, n), value| (s + value, n + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Formats a number of floating-point operations, such as `3.42 TFLOP`.
pub(crate) fn flops(operations: f64) -> String {
    let units = [(1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")];
    let (scale, unit) =
        units.into_iter().find(|(scale, _)| operations >= *scale).unwrap_or((1e6, "MFLOP"));
    format!("{:.2} {unit}", operations / scale)
}

/// Median, minimum and maximum; zeros without values.
pub(crate) fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some((&least, &greatest)) = sorted.first().zip(sorted.last()) else {
        return (0.0, 0.0, 0.0);
    };
    let middle = sorted.len() / 2;
    let median = match sorted.len() % 2 {
        0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
        _ => sorted[middle],
    };
    (median, least, greatest)
}

/// Formats names as alternatives: `a, b or c`.
pub(crate) fn listed<const N: usize>(names: [&str; N]) -> String {
    let all = names.join(", ");
    all.rsplit_once(", ").map_or(all.clone(), |(others, last)| format!("{others} or {last}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted() {
        assert_eq!(thousands(7), "7");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(duration(Duration::from_secs(185)), "3 min 05 s");
        assert_eq!(duration(Duration::from_secs(7620)), "2 h 07 min");
        let steps = ["step", "steps"];
        assert_eq!([counted(1, steps), counted(1200, steps)], ["1 step", "1,200 steps"]);
        assert_eq!(
            [flops(3.416e12), flops(2e9), flops(5e5)],
            ["3.42 TFLOP", "2.00 GFLOP", "0.50 MFLOP"]
        );
    }

    #[test]
    fn the_mean_without_values_is_none() {
        assert_eq!((mean([1.0, 4.0]), mean([])), (Some(2.5), None));
    }

    #[test]
    fn the_median_lies_in_the_middle() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), (2.0, 1.0, 3.0));
        assert_eq!(spread(&[4.0, 1.0, 2.0, 3.0]), (2.5, 1.0, 4.0));
        assert_eq!(spread(&[]), (0.0, 0.0, 0.0));
    }
}
