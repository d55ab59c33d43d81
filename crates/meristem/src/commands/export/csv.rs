//! `meristem export csv`.

use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

use meristem::train::reading::{Skipped, check_is_run};

use super::rows;
use super::table::Cell;
use super::{warn_skipped, written_whole};
use crate::cli::{CsvArguments, Table};
use crate::commands::{Outcome, locate};
use crate::failure::Failure;
use crate::plain::{self, printable, thousands};

pub(super) fn run(arguments: &CsvArguments) -> Outcome {
    let run = locate(&arguments.run);
    check_is_run(&run)?;
    match &arguments.out {
        None => {
            let written = write(arguments.table, &run, &mut BufWriter::new(plain::Stdout));
            warn_skipped(written?.1);
        }
        Some(out) => {
            let (rows, skipped) = written_whole(out, |file| {
                let mut file = BufWriter::new(file);
                write(arguments.table, &run, &mut file)
            })?;
            plain::out(&printable(&format!("{}: {} rows", out.display(), thousands(rows))));
            warn_skipped(skipped);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the table as CSV (RFC 4180). Returns the number of rows, and the skipped lines of the
/// events.
fn write(table: Table, run: &Path, to: &mut dyn Write) -> Result<(u64, Skipped), Failure> {
    let names: Vec<String> = rows::columns(table, run)?.into_iter().map(|(name, _)| name).collect();
    let mut written = record(to, &names);
    let mut count = 0;
    let skipped = rows::read(table, run, &mut |row| {
        count += 1;
        if written.is_ok() {
            written = record(to, &row.iter().map(text).collect::<Vec<_>>());
        }
        written.is_ok()
    })?;
    match written.and_then(|()| to.flush()) {
        // Closed pipe, as in `meristem export csv RUN | head`.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::failed(
            format!("cannot write the table: {error}"),
            "free some space, or write to another disk",
        )),
        _ => Ok((count, skipped)),
    }
}

/// Text of a cell. Numbers parse to the same bits; a missing value is empty.
fn text(cell: &Cell) -> String {
    match cell {
        Cell::Count(count) => count.to_string(),
        Cell::Number(number) => number.map_or(String::new(), |number| number.to_string()),
        Cell::Flag(flag) => flag.to_string(),
        Cell::Text(text) => text.clone().unwrap_or_default(),
    }
}

fn record(to: &mut dyn Write, cells: &[String]) -> io::Result<()> {
    for (number, cell) in cells.iter().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        if cell.contains([',', '"', '\n', '\r']) {
            write!(to, "{comma}\"{}\"", cell.replace('"', "\"\""))?
        } else {
            write!(to, "{comma}{cell}")?
        }
    }
    to.write_all(b"\r\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_with_commas_quotes_and_lines_are_quoted() {
        let mut out = vec![];
        record(&mut out, &["a".into(), "b,\"c\"\nd".into(), String::new()]).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "a,\"b,\"\"c\"\"\nd\",\r\n");
    }
}
