//! `meristem export parquet`, with the feature `parquet`.

use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use meristem::train::reading::{Skipped, check_is_run};
use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::Result as Written;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::types::Type;

use super::rows::{columns, read};
use super::table::{Cell, Column, Kind};
use super::{warn_skipped, written_whole};
use crate::cli::{ParquetArguments, Table};
use crate::commands::{Outcome, locate};
use crate::failure::Failure;
use crate::plain::{self, printable, thousands};

/// Rows of a row group; at most one group is in memory.
const GROUP_ROWS: usize = 1 << 16;

pub(super) fn run(arguments: &ParquetArguments) -> Outcome {
    let ParquetArguments { run, table, out } = arguments;
    let run = locate(run);
    check_is_run(&run)?;
    let (rows, skipped) = written_whole(out, |file| write(*table, &run, file))?;
    plain::out(&printable(&format!("{}: {} rows", out.display(), thousands(rows))));
    warn_skipped(skipped);
    Ok(ExitCode::SUCCESS)
}

/// Writes the table. Returns the number of rows, and the skipped lines of the events.
fn write(table: Table, run: &Path, to: &mut File) -> Result<(u64, Skipped), Failure> {
    let columns = columns(table, run)?;
    let failed = |error| {
        let message = format!("cannot write the table: {error}");
        Failure::failed(message, "free some space, or write to another disk")
    };
    let properties = WriterProperties::builder()
        .set_created_by(concat!("meristem ", env!("CARGO_PKG_VERSION")).to_owned())
        .build();
    let schema = schema(&columns).map_err(failed)?;
    let mut file = SerializedFileWriter::new(to, schema, Arc::new(properties)).map_err(failed)?;
    let (mut rows, mut written, mut count) = (vec![], Ok(()), 0);
    let skipped = read(table, run, &mut |row| {
        count += 1;
        rows.push(row);
        if rows.len() == GROUP_ROWS {
            written = write_group(&mut file, &columns, &std::mem::take(&mut rows));
        }
        written.is_ok()
    })?;
    written.map_err(failed)?;
    if !rows.is_empty() {
        write_group(&mut file, &columns, &rows).map_err(failed)?;
    }
    file.close().map_err(failed)?;
    Ok((count, skipped))
}

/// The columns as a schema. Columns whose cells may be missing are optional.
fn schema(columns: &[Column]) -> Written<Arc<Type>> {
    let field = |(name, kind): &Column| {
        let (physical, repetition, logical) = match kind {
            Kind::Count => (Physical::INT64, Repetition::REQUIRED, None),
            Kind::Number => (Physical::DOUBLE, Repetition::OPTIONAL, None),
            Kind::Flag => (Physical::BOOLEAN, Repetition::REQUIRED, None),
            Kind::Text => (Physical::BYTE_ARRAY, Repetition::OPTIONAL, Some(LogicalType::String)),
        };
        let field = Type::primitive_type_builder(name, physical).with_repetition(repetition);
        field.with_logical_type(logical).build().map(Arc::new)
    };
    let fields = columns.iter().map(field).collect::<Written<_>>()?;
    Type::group_type_builder("events").with_fields(fields).build().map(Arc::new)
}

fn write_group(
    file: &mut SerializedFileWriter<&mut File>,
    columns: &[Column],
    rows: &[Vec<Cell>],
) -> Written<()> {
    let mut group = file.next_row_group()?;
    for (at, (_, kind)) in columns.iter().enumerate() {
        let Some(mut column) = group.next_column()? else { break };
        write_column(&mut column, *kind, rows.iter().map(|row| &row[at]))?;
        column.close()?;
    }
    group.close().map(drop)
}

fn write_column<'a>(
    column: &mut SerializedColumnWriter<'_>,
    kind: Kind,
    cells: impl Iterator<Item = &'a Cell>,
) -> Written<()> {
    // Definition levels: whether each cell of an optional column has a value.
    let mut present: Vec<i16> = vec![];
    let mut record = |has_value: bool| present.push(i16::from(has_value));
    match kind {
        Kind::Count => {
            let counts = cells.filter_map(|cell| match cell {
                Cell::Count(count) => Some(*count as i64),
                _ => None,
            });
            let counts: Vec<i64> = counts.collect();
            column.typed::<Int64Type>().write_batch(&counts, None, None)?;
        }
        Kind::Flag => {
            let flags: Vec<bool> = cells.map(|cell| *cell == Cell::Flag(true)).collect();
            column.typed::<BoolType>().write_batch(&flags, None, None)?;
        }
        Kind::Number => {
            let numbers = cells.filter_map(|cell| {
                let number = if let Cell::Number(number) = cell { *number } else { None };
                record(number.is_some());
                number
            });
            let numbers: Vec<f64> = numbers.collect();
            column.typed::<DoubleType>().write_batch(&numbers, Some(&present), None)?;
        }
        Kind::Text => {
            let texts = cells.filter_map(|cell| {
                let text = if let Cell::Text(text) = cell { text.as_deref() } else { None };
                record(text.is_some());
                text.map(ByteArray::from)
            });
            let texts: Vec<ByteArray> = texts.collect();
            column.typed::<ByteArrayType>().write_batch(&texts, Some(&present), None)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::Field;

    /// Cells of every type, including missing ones, have the same values after a round trip over
    /// several groups.
    #[test]
    fn written_cells_are_read_back() {
        let columns: Vec<Column> = [
            ("count", Kind::Count),
            ("number", Kind::Number),
            ("flag", Kind::Flag),
            ("text", Kind::Text),
        ]
        .map(|(name, kind)| (name.to_owned(), kind))
        .into();
        let row = |i: u64| {
            vec![
                Cell::Count(i),
                Cell::Number((!i.is_multiple_of(3)).then(|| i as f64 / 7.0)),
                Cell::Flag(i.is_multiple_of(2)),
                Cell::Text((!i.is_multiple_of(5)).then(|| format!("\"ä{i}\"\n"))),
            ]
        };
        let mut file = tempfile::tempfile().unwrap();
        let mut writer =
            SerializedFileWriter::new(&mut file, schema(&columns).unwrap(), Arc::default())
                .unwrap();
        for start in [0, 40] {
            let rows: Vec<Vec<Cell>> = (start..start + 40).map(row).collect();
            write_group(&mut writer, &columns, &rows).unwrap();
        }
        writer.close().unwrap();
        let reader = SerializedFileReader::new(file).unwrap();
        assert_eq!(reader.metadata().num_row_groups(), 2);
        let mut count = 0;
        for (i, read) in reader.get_row_iter(None).unwrap().enumerate() {
            let expected = row(i as u64);
            let cells = read.unwrap().into_columns();
            assert_eq!(cells.len(), columns.len());
            for ((name, cell), (column, expected)) in
                cells.into_iter().zip(columns.iter().map(|(name, _)| name).zip(expected))
            {
                assert_eq!(name, *column);
                let cell = match (cell, &expected) {
                    (Field::Long(count), _) => Cell::Count(count as u64),
                    (Field::Double(number), _) => Cell::Number(Some(number)),
                    (Field::Bool(flag), _) => Cell::Flag(flag),
                    (Field::Str(text), _) => Cell::Text(Some(text)),
                    (Field::Null, Cell::Number(_)) => Cell::Number(None),
                    (Field::Null, Cell::Text(_)) => Cell::Text(None),
                    (other, _) => panic!("{name}: {other:?}"),
                };
                assert_eq!(cell, expected, "row {i}, {name}");
            }
            count += 1;
        }
        assert_eq!(count, 80);
    }
}
