//! Tables in Parquet and Arrow IPC files, read as the text of their cells.
//!
//! A number is written with the fewest digits that give it back, a missing value is empty, so that
//! a table has the same rules and samples as the CSV file with the same values.

use std::cell::Cell;
use std::fs::File;
use std::io::BufReader;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::Once;

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch, downcast_dictionary_array, types};
use arrow_ipc::reader::FileReader;
use arrow_schema::{ArrowError, DataType, Schema};
use csv::ByteRecord;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::format::TableFormat;
use crate::error::{Mismatch, Result};
use crate::source::csv_file::{BYTES_MAX, Place, ROWS_MAX, Row, quoted, too_large};
use crate::source::input;

/// Rows of a Parquet file that are decoded at a time.
const BATCH: usize = 128;

type Batches = Box<dyn Iterator<Item = std::result::Result<RecordBatch, ArrowError>>>;

/// A Parquet or Arrow IPC file that is read row by row.
pub(super) struct ColumnFile {
    path: PathBuf,
    batches: Batches,
    /// Names of the columns, until they were read.
    names: Option<ByteRecord>,
    batch: Option<RecordBatch>,
    /// Row of `batch` that is read next.
    next: usize,
    /// Rows that were read.
    rows: usize,
    record: ByteRecord,
    cell: String,
}

impl ColumnFile {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// [`Layout`](crate::Error::Layout) for a damaged file, and for a column whose values are
    /// neither numbers, text nor booleans; the errors of reading.
    pub(super) fn open(path: &Path, format: TableFormat) -> Result<Self> {
        let file = input::open_file(path)?;
        let (schema, batches) = decoded(path, || match format {
            TableFormat::Arrow => arrow_batches(file),
            _ => parquet_batches(file),
        })?;
        for field in schema.fields() {
            if !is_read(field.data_type()) {
                let what = format!("column {}", quoted(field.name()));
                let kind = field.data_type().to_string();
                return Err(Mismatch::new(what, "numbers, text or booleans", kind)
                    .remedy("convert the column to numbers or text, or remove it")
                    .in_layout(path));
            }
        }
        let names = Some(schema.fields().iter().map(|field| field.name()).collect());
        Ok(Self {
            path: path.to_path_buf(),
            batches,
            names,
            batch: None,
            next: 0,
            rows: 0,
            record: ByteRecord::new(),
            cell: String::new(),
        })
    }

    /// The next row; the first one has the names of the columns.
    ///
    /// # Errors
    /// [`Layout`](crate::Error::Layout) for a damaged file, and for too many rows; the errors of
    /// reading.
    pub(super) fn next_row(&mut self) -> Result<Option<Row<'_>>> {
        if let Some(names) = self.names.take() {
            self.record = names;
            return Ok((!self.record.is_empty()).then_some(self.row()));
        }
        let batch = loop {
            match &self.batch {
                Some(batch) if self.next < batch.num_rows() => break batch,
                _ => {
                    let batches = &mut self.batches;
                    self.batch = decoded(&self.path, || batches.next().transpose())?;
                    self.next = 0;
                    if self.batch.is_none() {
                        return Ok(None);
                    }
                }
            }
        };
        if self.rows == ROWS_MAX {
            return Err(too_large(&self.path, format!("at most {ROWS_MAX} rows"), "more"));
        }
        self.record.clear();
        for column in batch.columns() {
            self.cell.clear();
            write_cell(column.as_ref(), self.next, &mut self.cell);
            self.record.push_field(self.cell.as_bytes());
        }
        self.next += 1;
        self.rows += 1;
        Ok(Some(self.row()))
    }

    fn row(&self) -> Row<'_> {
        Row { path: &self.path, place: Place::Row(self.rows as u64), record: &self.record }
    }
}

fn parquet_batches(file: File) -> std::result::Result<(Schema, Batches), ArrowError> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(file)?.with_batch_size(BATCH);
    let sizes = builder.metadata().row_groups().iter().map(|group| group.total_byte_size());
    if sizes.fold(0, i64::saturating_add) > BYTES_MAX as i64 {
        let problem = format!("it has more than {BYTES_MAX} bytes of values");
        return Err(ArrowError::InvalidArgumentError(problem));
    }
    let schema = builder.schema().as_ref().clone();
    Ok((schema, Box::new(builder.build()?)))
}

fn arrow_batches(file: File) -> std::result::Result<(Schema, Batches), ArrowError> {
    let reader = FileReader::try_new(BufReader::new(file), None)?;
    let schema = reader.schema().as_ref().clone();
    Ok((schema, Box::new(reader)))
}

/// Calls a decoder. A panic of the decoder, which some damaged files cause, becomes an error.
///
/// # Errors
/// [`Layout`](crate::Error::Layout) for a file that cannot be decoded.
fn decoded<T>(
    path: &Path,
    decode: impl FnOnce() -> std::result::Result<T, ArrowError>,
) -> Result<T> {
    // After an error nothing is read from the decoder again.
    let decoded = silenced(|| panic::catch_unwind(AssertUnwindSafe(decode)));
    let got = match decoded {
        Ok(Ok(decoded)) => return Ok(decoded),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "values that the decoder cannot read".into(),
    };
    Err(Mismatch::new(
        "the table",
        "a complete Parquet file, or a complete Arrow file without compression",
        got,
    )
    .remedy("write it again, such as with pandas.DataFrame.to_parquet")
    .in_layout(path))
}

thread_local! {
    /// Whether a panic of this thread prints no message, because it becomes an error.
    static IS_SILENT: Cell<bool> = const { Cell::new(false) };
}

/// Calls `decode`, which catches its panics, without their messages on standard error.
fn silenced<T>(decode: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let other = panic::take_hook();
        panic::set_hook(Box::new(move |information| {
            if !IS_SILENT.get() {
                other(information);
            }
        }));
    });
    let before = IS_SILENT.replace(true);
    let decoded = decode();
    IS_SILENT.set(before);
    decoded
}

/// Whether a cell of the type can be written as text.
fn is_read(kind: &DataType) -> bool {
    match kind {
        DataType::Null | DataType::Boolean => true,
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Decimal128(..) | DataType::Decimal256(..) => true,
        DataType::Dictionary(_, values) => is_read(values),
        _ => kind.is_integer() || kind.is_floating(),
    }
}

/// Appends the text of a cell; nothing for a missing value.
fn write_cell(column: &dyn Array, row: usize, text: &mut String) {
    /// Appends a number with the fewest digits that give it back.
    macro_rules! number {
        ($type:ty) => {
            text.push_str(&column.as_primitive::<$type>().value(row).to_string())
        };
    }
    if column.is_null(row) {
        return;
    }
    match column.data_type() {
        DataType::Boolean => {
            text.push_str(if column.as_boolean().value(row) { "true" } else { "false" });
        }
        DataType::Int8 => number!(types::Int8Type),
        DataType::Int16 => number!(types::Int16Type),
        DataType::Int32 => number!(types::Int32Type),
        DataType::Int64 => number!(types::Int64Type),
        DataType::UInt8 => number!(types::UInt8Type),
        DataType::UInt16 => number!(types::UInt16Type),
        DataType::UInt32 => number!(types::UInt32Type),
        DataType::UInt64 => number!(types::UInt64Type),
        DataType::Float16 => number!(types::Float16Type),
        DataType::Float32 => number!(types::Float32Type),
        DataType::Float64 => number!(types::Float64Type),
        DataType::Utf8 => text.push_str(column.as_string::<i32>().value(row)),
        DataType::LargeUtf8 => text.push_str(column.as_string::<i64>().value(row)),
        DataType::Utf8View => text.push_str(column.as_string_view().value(row)),
        DataType::Decimal128(..) => {
            text.push_str(&column.as_primitive::<types::Decimal128Type>().value_as_string(row));
        }
        DataType::Decimal256(..) => {
            text.push_str(&column.as_primitive::<types::Decimal256Type>().value_as_string(row));
        }
        DataType::Dictionary(..) => downcast_dictionary_array!(
            column => if let Some(key) = column.key(row) {
                write_cell(column.values().as_ref(), key, text);
            },
            other => debug_assert!(false, "a dictionary of {other}"),
        ),
        DataType::Null => {}
        other => debug_assert!(false, "a column of {other}"),
    }
}
