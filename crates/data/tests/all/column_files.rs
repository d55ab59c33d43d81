//! Tables in Parquet and Arrow IPC files: the rules and samples of the CSV file with the same
//! values (D13).

use std::env;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use arrow_array::builder::StringDictionaryBuilder;
use arrow_array::types::Int16Type;
use arrow_array::{
    ArrayRef, BooleanArray, Decimal128Array, Float32Array, Float64Array, Int64Array, ListArray,
    RecordBatch, StringArray, TimestampSecondArray, UInt8Array,
};
use arrow_ipc::writer::FileWriter;
use meristem_data::{
    DatasetSpec, MissingValues, Residency, Source, Split, TableOptions, TableRules, TargetKind,
    cache,
};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::file::properties::WriterProperties;
use tempfile::TempDir;

use crate::common::cpu;
use crate::common::files::spec_of;
use crate::inputs::info_of;
use crate::sources::any_error;

/// Rows of the table, more than are decoded at a time.
const ROWS: usize = 2500;

/// A table of each type of column, and the same values as CSV.
fn table() -> (RecordBatch, String) {
    let real = |i: usize| (i % 11 != 5).then(|| (i as f64 * 0.37).sin() * 1e5);
    let single = |i: usize| (i as f32 * 0.11).cos();
    let whole = |i: usize| (i as i64 - 1000) * 77;
    let byte = |i: usize| (i % 200) as u8;
    let colour = |i: usize| ["red", "a, \"b\"", "blue"][i * i % 3];
    let is_new = |i: usize| i.is_multiple_of(3);
    let split = |i: usize| if i % 5 == 3 { "test" } else { "train" };
    // Hundredths.
    let price = |i: usize| i as i128 * 25 - 700;
    let class = |i: usize| ["no", "yes"][i % 2];
    let mut colours = StringDictionaryBuilder::<Int16Type>::new();
    (0..ROWS).for_each(|i| colours.append_value(colour(i)));
    let rows = || 0..ROWS;
    let prices = Decimal128Array::from_iter_values(rows().map(price));
    let columns: [(&str, ArrayRef); 9] = [
        ("real", Arc::new(rows().map(real).collect::<Float64Array>())),
        ("single", Arc::new(Float32Array::from_iter_values(rows().map(single)))),
        ("whole", Arc::new(Int64Array::from_iter_values(rows().map(whole)))),
        ("byte", Arc::new(UInt8Array::from_iter_values(rows().map(byte)))),
        ("colour", Arc::new(colours.finish())),
        ("new", Arc::new(rows().map(|i| Some(is_new(i))).collect::<BooleanArray>())),
        ("split", Arc::new(StringArray::from_iter_values(rows().map(split)))),
        ("price", Arc::new(prices.with_precision_and_scale(12, 2).unwrap())),
        ("class", Arc::new(StringArray::from_iter_values(rows().map(class)))),
    ];
    let mut csv = "real,single,whole,byte,colour,new,split,price,class\n".to_string();
    for i in rows() {
        let real = real(i).map_or(String::new(), |real| real.to_string());
        let colour = colour(i).replace('"', "\"\"");
        csv += &format!(
            "{real},{},{},{},\"{colour}\",{},{},{},{}\n",
            single(i),
            whole(i),
            byte(i),
            is_new(i),
            split(i),
            price(i) as f64 / 100.0,
            class(i)
        );
    }
    (RecordBatch::try_from_iter(columns).unwrap(), csv)
}

fn write_parquet(batch: &RecordBatch, path: &Path, compression: Compression) {
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_max_row_group_row_count(Some(700))
        .build();
    let file = File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

fn write_arrow(batch: &RecordBatch, path: &Path) {
    let mut writer = FileWriter::try_new(File::create(path).unwrap(), &batch.schema()).unwrap();
    // Two batches with one dictionary.
    let half = batch.num_rows() / 2;
    writer.write(&batch.slice(0, half)).unwrap();
    writer.write(&batch.slice(half, batch.num_rows() - half)).unwrap();
    writer.finish().unwrap();
}

fn spec(path: &Path, target: &str) -> DatasetSpec {
    let (target, missing) = (vec![target.to_string()], MissingValues::Fill);
    let table = TableOptions { target, missing, ..TableOptions::default() };
    DatasetSpec { table, ..spec_of(Source::Table, path) }
}

/// Rules, and the bits of features and targets of both splits.
fn contents(path: &Path, target: &str) -> (TableRules, Vec<Vec<u32>>) {
    let spec = spec(path, target);
    let info = info_of(&spec);
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let of_split = |split| {
        let data = cache::load(&cpu(1), &spec, split, Residency::Resident).unwrap();
        let features = bits(data.resident().unwrap().to_vec().unwrap());
        let targets = match info.targets {
            TargetKind::Classes => data.targets().to_vec::<u32>().unwrap(),
            _ => bits(data.targets().to_vec().unwrap()),
        };
        [features, targets]
    };
    let contents = [Split::Train, Split::Test].into_iter().flat_map(of_split).collect();
    (info.table.clone().unwrap(), contents)
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn column_files_are_the_csv_file_with_the_same_values() {
    let folder = folder();
    let (batch, csv) = table();
    let file = |name: &str| folder.path().join(name);
    fs::write(file("t.csv"), csv).unwrap();
    let levels = (GzipLevel::default(), ZstdLevel::default());
    for (name, compression) in [
        ("plain", Compression::UNCOMPRESSED),
        ("snappy", Compression::SNAPPY),
        ("gzip", Compression::GZIP(levels.0)),
        ("zstd", Compression::ZSTD(levels.1)),
        ("lz4", Compression::LZ4_RAW),
    ] {
        write_parquet(&batch, &file(name), compression);
    }
    write_arrow(&batch, &file("arrow"));
    for target in ["class", "price"] {
        let expected = contents(&file("t.csv"), target);
        assert_eq!(expected.1[0].len(), ROWS * 4 / 5 * expected.0.width(), "{:?}", expected.0);
        for name in ["plain", "snappy", "gzip", "zstd", "lz4", "arrow"] {
            assert!(contents(&file(name), target) == expected, "{name}, {target}");
        }
    }
}

#[test]
fn a_column_of_another_type_is_named_before_rows_are_read() {
    let folder = folder();
    let when: ArrayRef = Arc::new(TimestampSecondArray::from(vec![1, 2]));
    let lists = vec![Some(vec![Some(1)]), None];
    let list: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int16Type, _, _>(lists));
    let y: ArrayRef = Arc::new(Int64Array::from(vec![0, 1]));
    for (column, kind) in [(when, "Timestamp(s)"), (list, "List")] {
        let batch = RecordBatch::try_from_iter([("when", column), ("y", y.clone())]).unwrap();
        let path = folder.path().join("t");
        for is_parquet in [true, false] {
            if is_parquet {
                write_parquet(&batch, &path, Compression::SNAPPY);
            } else {
                write_arrow(&batch, &path);
            }
            let text = any_error(&spec(&path, "y")).to_string();
            // Parquet has no timestamps in seconds.
            let kind = if is_parquet { kind.trim_end_matches("(s)") } else { kind };
            for part in ["column `when`", "must be numbers, text or booleans", kind, "convert"] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }
}

/// Rows are numbered from 1, and the schema has the names.
#[test]
fn values_that_do_not_fit_are_named_by_row_and_column() {
    let folder = folder();
    let path = folder.path().join("t");
    let column = |values: [&str; 4]| -> ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
    let split = column(["train", "train", "train", "test"]);
    for (a, y, part) in [
        (["1", "2", "3", "blue"], ["u", "v", "u", "v"], "`a` in row 4 must be a number"),
        (["1", "2", "3", "1e99"], ["u", "v", "u", "v"], "`a` in row 4 must be a finite number"),
        (["1", "2", "3", "4"], ["u", "", "u", "v"], "`y` in row 2 must be a target"),
    ] {
        let columns = [("a", column(a)), ("y", column(y)), ("split", split.clone())];
        write_arrow(&RecordBatch::try_from_iter(columns).unwrap(), &path);
        let text = any_error(&spec(&path, "y")).to_string();
        assert!(text.contains(part), "{part}: {text}");
    }
    let twice = [("a", split.clone()), ("a", split.clone()), ("y", split)];
    write_arrow(&RecordBatch::try_from_iter(twice).unwrap(), &path);
    let text = any_error(&spec(&path, "y")).to_string();
    assert!(text.contains("the schema must be different names of columns"), "{text}");
}

/// A panic of a decoder becomes an error, and prints no message.
#[test]
fn damaged_files_are_errors_without_messages() {
    let test = ["column_files::damaged_files_are_errors", "--exact", "--ignored", "--nocapture"];
    let output = Command::new(env::current_exe().unwrap()).args(test).output().unwrap();
    let [told, text] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(told.contains("1 passed") && !text.contains("panicked"), "{told}{text}");
}

/// A damaged file is an error or a table; it is no panic.
#[test]
#[ignore = "another test runs it in a process of its own"]
fn damaged_files_are_errors() {
    let folder = folder();
    let (batch, _) = table();
    let batch = batch.slice(0, 200);
    let (path, damaged) = (folder.path().join("t"), folder.path().join("damaged"));
    for is_parquet in [true, false] {
        if is_parquet {
            write_parquet(&batch, &path, Compression::SNAPPY);
        } else {
            write_arrow(&batch, &path);
        }
        let whole = fs::read(&path).unwrap();
        let mut errors = 0;
        let mut open = |bytes: &[u8]| {
            fs::write(&damaged, bytes).unwrap();
            let spec = spec(&damaged, "class");
            let data = cache::load(&cpu(1), &spec, Split::Train, Residency::Resident);
            errors += usize::from(data.is_err());
        };
        for len in (8..whole.len()).step_by(whole.len() / 60) {
            open(&whole[..len]);
        }
        // Bytes at the end, where both formats have their metadata, and some of all others.
        let tail = whole.len().saturating_sub(400)..whole.len();
        for at in tail.chain((8..whole.len()).step_by(whole.len() / 150)) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0xff;
            open(&bytes);
        }
        assert!(errors > 150, "{errors}");
    }
}
