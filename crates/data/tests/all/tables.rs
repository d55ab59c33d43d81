//! Tables: numbers, categories and targets of CSV files (D13).

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::sync::Arc;

use meristem_data::table::{FeatureRule, TargetColumns};
use meristem_data::{
    DatasetFiles, DatasetInfo, DatasetSpec, Error, GatherBatches, GatherConfig, InputKind,
    MissingValues, Residency, Source, Split, StoredType, TableOptions, TableRules, TargetKind,
    cache, verify,
};
use meristem_device::DeviceId;

use crate::common::cpu;
use crate::common::files::spec_of;
use crate::inputs::info_of;
use crate::refusals::notes_of;
use crate::sources::any_error;

/// A file with this text, and its spec.
struct Table {
    _folder: tempfile::TempDir,
    spec: DatasetSpec,
}

impl Table {
    fn new(text: impl AsRef<[u8]>, target: &[&str], missing: MissingValues) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.csv");
        fs::write(&path, text).unwrap();
        let target = target.iter().map(|name| name.to_string()).collect();
        let table = TableOptions { target, missing, ..TableOptions::default() };
        let spec = DatasetSpec { table, ..spec_of(Source::Table, &path) };
        Self { _folder: folder, spec }
    }

    fn strict(text: &str, target: &str) -> Self {
        Self::new(text, &[target], MissingValues::Refuse)
    }

    fn filled(text: &str, target: &str) -> Self {
        Self::new(text, &[target], MissingValues::Fill)
    }

    fn info(&self) -> DatasetInfo {
        info_of(&self.spec)
    }

    fn rules(&self) -> TableRules {
        self.info().table.unwrap()
    }

    /// This table by the rules of another.
    fn by(&self, rules: TableRules) -> DatasetSpec {
        let table = TableOptions { rules: Some(Arc::new(rules)), ..TableOptions::default() };
        DatasetSpec { table, ..self.spec.clone() }
    }
}

/// Stored features of a split.
fn features(spec: &DatasetSpec, split: Split) -> Vec<f32> {
    let data = cache::load(&cpu(1), spec, split, Residency::Resident).unwrap();
    data.resident().unwrap().to_vec::<f32>().unwrap()
}

fn classes(spec: &DatasetSpec, split: Split) -> Vec<u32> {
    let data = cache::load(&cpu(1), spec, split, Residency::Resident).unwrap();
    data.targets().to_vec::<u32>().unwrap()
}

fn numbers(spec: &DatasetSpec, split: Split) -> Vec<f32> {
    let data = cache::load(&cpu(1), spec, split, Residency::Resident).unwrap();
    data.targets().to_vec::<f32>().unwrap()
}

/// A pseudo-random table: `a` with numbers, `b` with categories, both with missing values, `split`,
/// `y`. The test rows have only categories of the training rows.
fn rows() -> Vec<[String; 4]> {
    let colours = ["red", "", "a, \"b\"", "NA", "blue"];
    let row = |i: usize| {
        let noise = (i * i * 31 + i * 7) % 101;
        let a = match noise % 9 {
            0 => "n/a".to_string(),
            1 => format!("{}e-1", noise),
            _ => format!("{}.25", noise as i64 - 50),
        };
        let split = if i % 5 == 3 { "test" } else { "train" };
        [a, colours[noise % 5].to_string(), split.into(), format!("{}.5", noise * 3)]
    };
    (0..300).map(row).collect()
}

fn csv_of(rows: &[[String; 4]]) -> String {
    let cell = |text: &String| format!("\"{}\"", text.replace('"', "\"\""));
    let line = |row: &[String; 4]| row.iter().map(cell).collect::<Vec<_>>().join(",");
    let lines: Vec<String> = rows.iter().map(line).collect();
    format!("a,b,split,y\r\n{}", lines.join("\r\n"))
}

/// Features, training mean of `a` and categories of `b`, computed column by column.
fn slow(rows: &[[String; 4]], split: &str) -> Vec<f32> {
    let is_missing = |text: &String| ["", "NA", "n/a"].contains(&text.as_str());
    let train = || rows.iter().filter(|row| row[2] == "train");
    let known: Vec<f64> =
        train().filter(|row| !is_missing(&row[0])).map(|row| row[0].parse().unwrap()).collect();
    let mean = known.iter().sum::<f64>() / known.len() as f64;
    let name = |text: &String| if is_missing(text) { String::new() } else { text.clone() };
    let categories: BTreeSet<String> = train().map(|row| name(&row[1])).collect();
    let of_row = |row: &[String; 4]| {
        let a = if is_missing(&row[0]) { mean } else { row[0].parse().unwrap() };
        let one_hot = categories.iter().map(|c| f32::from(u8::from(*c == name(&row[1]))));
        [a as f32].into_iter().chain(one_hot).collect::<Vec<_>>()
    };
    rows.iter().filter(|row| row[2] == split).flat_map(of_row).collect()
}

/// The mean of 300 numbers below 200 is off by less than 300 · 2⁻⁵³ · 200 in f64, so that a filled
/// number is off by at most one rounding of f32: 2⁻¹⁷ below 128.
#[test]
fn rows_are_those_of_a_slow_version() {
    let rows = rows();
    let table = Table::filled(&csv_of(&rows), "y");
    let info = table.info();
    assert_eq!(
        (info.name.as_str(), info.kind, info.stored),
        ("table", InputKind::Vector, StoredType::F32)
    );
    assert_eq!((info.channels, info.height, info.width), (5, 1, 1));
    assert_eq!((info.train_len, info.test_len), (240, Some(60)));
    assert_eq!((info.targets, info.classes), (TargetKind::Numbers, vec!["y".to_string()]));
    for (split, name) in [(Split::Train, "train"), (Split::Test, "test")] {
        let (found, expected) = (features(&table.spec, split), slow(&rows, name));
        assert_eq!(found.len(), expected.len());
        let mut pairs = found.iter().zip(&expected);
        assert!(pairs.all(|(a, b)| (a - b).abs() <= 0.5_f32.powi(17)), "{found:?} {expected:?}");
        let y: Vec<f64> =
            rows.iter().filter(|row| row[2] == name).map(|row| row[3].parse().unwrap()).collect();
        let expected = y.iter().map(|y| ((y - info.target_mean[0]) / info.target_std[0]) as f32);
        assert_eq!(numbers(&table.spec, split), expected.collect::<Vec<_>>());
    }
    let rules = info.table.unwrap();
    let FeatureRule::Categorical { categories } = &rules.features[1].rule else { panic!() };
    assert_eq!(categories, &["", "a, \"b\"", "blue", "red"]);
    // Batches are normalised as those of other vectors, and streaming changes nothing.
    let batches = |residency| {
        let device = cpu(2);
        let data = cache::load(&device, &table.spec, Split::Train, residency).unwrap();
        let config = GatherConfig { seed: 3, ..GatherConfig::new(64, vec![DeviceId::Cpu(0)]) };
        let mut gather = GatherBatches::new(&config, &[data], &[device.stream("env 0")]).unwrap();
        gather.start_epoch(0).unwrap();
        let mut all = vec![];
        while let Some(batch) = gather.next().unwrap() {
            all.extend(batch[0].inputs.to_vec::<f32>().unwrap());
            all.extend(batch[0].targets.to_vec::<f32>().unwrap());
        }
        all
    };
    let resident = batches(Residency::Resident);
    assert_eq!(resident.len(), 240 * 6);
    assert_eq!(batches(Residency::Streamed), resident);
    let report = verify(&table.spec).unwrap();
    assert!(report.is_sound() && report.splits.len() == 2, "{report:?}");
}

/// One target column has classes if it has text or whole numbers, else numbers; several have
/// numbers.
#[test]
fn the_kind_of_the_targets_follows_from_the_training_rows() {
    let text = "x,name,whole,real,split\n1,b,10,1.5,train\n2,a,9.0,2,train\n3,b,+9,3,test\n";
    let of = |target: &[&str]| {
        let leave_out = |name: &str| target.contains(&name);
        let names = ["x", "name", "whole", "real", "split"];
        let keep = |line: &str| {
            let cells = line.split(',').zip(names);
            let kept = cells.filter(|(_, name)| ["x", "split"].contains(name) || leave_out(name));
            kept.map(|(cell, _)| cell).collect::<Vec<_>>().join(",")
        };
        let text: Vec<String> = text.lines().map(keep).collect();
        Table::new(text.join("\n"), target, MissingValues::Refuse)
    };
    let names = of(&["name"]);
    assert_eq!(
        (names.info().targets, names.info().classes),
        (TargetKind::Classes, vec!["a".into(), "b".into()])
    );
    assert_eq!(classes(&names.spec, Split::Train), [1, 0]);
    assert_eq!(classes(&names.spec, Split::Test), [1]);
    let whole = of(&["whole"]);
    assert_eq!(whole.info().classes, ["9", "10"]);
    assert_eq!(
        (classes(&whole.spec, Split::Train), classes(&whole.spec, Split::Test)),
        (vec![1, 0], vec![0])
    );
    let table = TableOptions { numbers: true, ..whole.spec.table.clone() };
    let spec = DatasetSpec { table, ..whole.spec.clone() };
    assert_eq!(
        (info_of(&spec).targets, info_of(&spec).target_mean),
        (TargetKind::Numbers, vec![9.5])
    );
    assert_eq!(numbers(&spec, Split::Test), [-1.0]);
    let real = of(&["real"]).info();
    assert_eq!(
        (real.targets, real.target_mean, real.target_std),
        (TargetKind::Numbers, vec![1.75], vec![0.25])
    );
    // In the order of the list, not of the columns.
    let both = of(&["real", "whole"]).info();
    assert_eq!(
        (both.classes, both.target_mean),
        (vec!["real".into(), "whole".into()], vec![1.75, 9.5])
    );
}

/// Without a column `split`, or without test rows, there is no test split.
#[test]
fn rows_without_splits_are_for_training() {
    for text in ["\u{feff}x,y\n1,a\n2,b", "x,y,Split\n1,a,train\n2,b,train\n"] {
        let table = Table::strict(text, "y");
        assert_eq!((table.info().train_len, table.info().test_len), (2, None), "{text}");
        assert_eq!(features(&table.spec, Split::Train), [1.0, 2.0]);
        let error = any_error(&table.spec).to_string();
        assert!(error.contains("expected rows whose `split` is test"), "{error}");
    }
    let error = any_error(&Table::strict("x,y,split\n1,a,test\n", "y").spec);
    assert!(matches!(error, Error::EmptySplit { split: "train", .. }), "{error}");
    assert!(error.to_string().contains("expected at least one sample"), "{error}");
}

#[test]
fn bad_tables_are_named_with_line_and_column() {
    let many = |distinct: usize| {
        let rows: String = (0..distinct).map(|i| format!("c{i},1\n")).collect();
        format!("x,y\n{rows}")
    };
    let wide = (0..65_537).map(|i| i.to_string()).collect::<Vec<_>>().join(",");
    let wide = format!("y,{wide}\n1,{}\n", vec!["2"; 65_537].join(","));
    for (text, words) in [
        ("", "line 1 must be names of columns"),
        ("\n\n", "got an empty file"),
        ("x,,y\n1,2,3\n", "got `` for column 2"),
        ("x,y,x\n1,2,3\n", "got `x` twice"),
        ("x,y,split,SPLIT\n1,2,train,test\n", "at most one column `split`"),
        ("y\n1\n", "a column of features beside the targets"),
        ("x,y\n", "the train split is empty"),
        ("x,z\n1,2\n", "`target` must be one or some of `x`, `z`, got `y`"),
        ("x,y\n1,2\n\n1\n", "line 4 must be 2 cells, as in the first line, got 1"),
        ("x,y\r\n1,2\r\n1,2,3\r\n", "line 3 must be 2 cells"),
        ("x,y\n\"a\nb\",2\n", "`x` in line 2 must be a number, or text of at most 4096 bytes"),
        ("x,y,split\n1,2,val\n", "`split` in line 2 must be train or test, got `val`"),
        (
            "x,y\n1,2\n,3\n",
            "`x` in line 3 must be a value, got ``; give it a value or remove the line, or fill \
             missing values with `missing` fill (--missing fill)",
        ),
        ("x,y\n1,2\n4, NaN \n", "`y` in line 3 must be a target, got `NaN`"),
        ("x,y\n1,2\ninf,3\n", "`x` in line 3 must be a finite number of at most 3.4e38, got `inf`"),
        ("x,y\n1,2.5\n2,1e999\n", "`y` in line 3 must be a finite number"),
        ("x,y,split\n1,2,train\n1e39,2,test\n", "`x` in line 3 must be a finite number"),
        (
            "x,y,split\n1,2,train\n1,2,test\nsmall,2,test\n",
            "`x` in line 4 must be a number, as in the training rows, got `small`",
        ),
        (
            "x,y,split\nred,2,train\nblue,2,train\ngreen,2,test\n",
            "`x` in line 4 must be one of the 2 categories of the training rows (`blue`, `red`), \
             got `green`",
        ),
        (
            "x,y,split\nred,2,train\n,2,test\n",
            "`x` in line 3 must be a value, got ``; give it a value",
        ),
        ("x,y,split\n1,2,train\n,2,test\n", "`x` in line 3 must be a value"),
        (
            "x,y,split\n1,a,train\n1,b,test\n",
            "`y` in line 3 must be one of the 1 classes of the training rows (`a`), got `b`",
        ),
        (
            "x,y,split\n1,2.5,train\n1,b,test\n",
            "`y` in line 3 must be a number, as in the training rows, got `b`",
        ),
        ("x,y,split\n1,2.5,train\n1,2.5,train\n1,,test\n", "`y` in line 4 must be a target"),
        (
            &many(1025),
            "`x` in line 1026 must be one of at most 1024 categories; it has categories because of \
             `c0` in line 2",
        ),
        (&wide, "more from column `65536` on"),
    ] {
        let error = any_error(&Table::strict(text, "y").spec);
        let (error, start) = (error.to_string(), &text[..text.len().min(40)]);
        assert!(error.contains(words), "{start:?}: {error}");
        assert!(error.len() < 1200, "{error}");
    }
    assert_eq!(Table::strict(&many(1024), "y").info().channels, 1024);
    for (bytes, words) in [
        (&b"x,y\n1,2\n\xff\xfe,3\n"[..], "`x` in line 3 must be text in UTF-8"),
        (b"x,\xffy\n1,2\n", "`column 2` in line 1 must be text in UTF-8"),
        (
            b"x,y\n1,a\n1,\"2\n1,3\n",
            "`y` in line 3 must be a number, or text of at most 4096 bytes on one line, got \
             `2\\n1,3`",
        ),
    ] {
        let error = any_error(&Table::new(bytes, &["y"], MissingValues::Refuse).spec).to_string();
        assert!(error.contains(words), "{error}");
    }
    let filled = "x,z,y\n,1,2\nNA,1,2\n";
    let error = any_error(&Table::filled(filled, "y").spec).to_string();
    assert!(error.contains("column `x` must be at least one value in a training row"), "{error}");
}

#[test]
fn targets_are_checked() {
    let text = "x,name,y,split\n1,b,10,train\n2,a,9.5,train\n";
    for (target, words) in [
        (&[][..], "`target` must be one or some of `x`, `name`, `y`, got none"),
        (&["y", "x", "y"], "`y` twice"),
        (&["split"], "got `split`"),
        (
            &["y", "name"],
            "`name` in line 2 must be a number, as every one of several targets, got `b`",
        ),
    ] {
        let error = any_error(&Table::new(text, target, MissingValues::Refuse).spec).to_string();
        assert!(error.contains(words), "{error}");
    }
    let Table { spec, _folder } = Table::strict(text, "name");
    let table = TableOptions { numbers: true, ..spec.table.clone() };
    let error = any_error(&DatasetSpec { table, ..spec.clone() }).to_string();
    assert!(error.contains("`name` in line 2 must be a number, for task regress"), "{error}");
    let folder = DatasetSpec { root: Some(_folder.path().into()), ..spec.clone() };
    assert!(matches!(any_error(&folder), Error::Missing { .. }));
    assert!(matches!(any_error(&DatasetSpec { root: None, ..spec }), Error::RootNotGiven { .. }));
}

/// Rules of one table give the rows of another the same features and targets, whatever is in its
/// training rows.
#[test]
fn rules_of_one_table_apply_to_another() {
    let train = "a,b,y\n1,red,10\n3,,20\n,blue,40.5\n";
    let rules = Table::filled(train, "y").rules();
    let json = serde_json::to_string(&rules).unwrap();
    assert_eq!(serde_json::from_str::<TableRules>(&json).unwrap(), rules);
    let other = Table::filled("b,more,y,a\nred,1,10,7\nblue,2,20,NA\n", "y");
    let spec = other.by(rules.clone());
    assert_eq!(features(&spec, Split::Train), [7.0, 0.0, 0.0, 1.0, 2.0, 0.0, 1.0, 0.0]);
    let info = info_of(&spec);
    assert_eq!(info.table.as_ref(), Some(&rules));
    let TargetColumns::Numbers { columns } = &rules.targets else { panic!() };
    assert_eq!((info.target_mean[0], info.target_std[0]), (columns[0].mean, columns[0].std));
    assert_eq!(notes_of(&spec), ["only the columns of the given rules are read; ignored: `more`"]);
    // The cache does not confuse them.
    assert_eq!(features(&other.spec, Split::Train).len(), 2 * 4);
    let (own, given) = (features(&other.spec, Split::Train), features(&spec, Split::Train));
    assert_ne!(own, given);
    for (text, words) in [
        ("a,y\n1,2\n", "line 1 must be names of columns with `b`, as in the rules, got `a`, `y`"),
        ("a,b\n1,red\n", "names of columns with `y`"),
        ("a,b,y\n1,green,2\n", "`b` in line 2 must be one of the 3 categories"),
        ("a,b,y\nx,red,2\n", "`a` in line 2 must be a number, as in the training rows"),
        ("a,b,y\n1,red,3e38\n", "`y` in line 2"),
    ] {
        let error = DatasetFiles::open(&Table::strict(text, "y").by(rules.clone()))
            .and_then(|files| files.info());
        match error {
            Err(error) => assert!(error.to_string().contains(words), "{error}"),
            // A standardised number of 3e37 is finite.
            Ok(_) => assert!(text.contains("3e38")),
        }
    }
    let wrong = |change: &dyn Fn(&mut TableOptions), words: &str| {
        let mut spec = other.by(rules.clone());
        change(&mut spec.table);
        let error = DatasetFiles::open(&spec).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    wrong(&|table| table.target = vec!["a".into()], "`target` must be `y`, as in the given rules");
    let strict = Table::strict("a,b,y\n1,red,10.5\n3,blue,20\n", "y").rules();
    let refuse = strict.clone();
    wrong(
        &|table| {
            table.rules = Some(Arc::new(refuse.clone()));
            table.missing = MissingValues::Fill;
        },
        "`missing` must be refuse, as in the given rules",
    );
    let error = any_error(&Table::strict("a,b,y\n1,red,2\n,red,2\n", "y").by(strict)).to_string();
    assert!(
        error.contains("`a` in line 3 must be a value") && error.contains("train with"),
        "{error}"
    );
}

/// Rules may come from a damaged file.
#[test]
fn unsound_rules_are_refused() {
    let rules = Table::filled("a,b,y\n1,red,10.5\n3,,20\n", "y").rules();
    let json = serde_json::to_value(&rules).unwrap();
    let table = Table::strict("a,b,y\n1,red,10\n", "y");
    let edits: HashMap<&str, serde_json::Value> = HashMap::from([
        ("/features", serde_json::json!([])),
        ("/features/1/categories", serde_json::json!([])),
        ("/features/1/categories", serde_json::json!(["a", "a"])),
        ("/features/1/name", serde_json::json!("a")),
        ("/features/0/fill", serde_json::json!(1e300)),
        ("/targets/columns", serde_json::json!([])),
        ("/targets/columns/0/std", serde_json::json!(0.0)),
        ("/targets/columns/0/name", serde_json::json!("a")),
    ]);
    for (place, value) in edits {
        let mut json = json.clone();
        *json.pointer_mut(place).unwrap() = value;
        let rules = serde_json::from_value(json).unwrap();
        let error = DatasetFiles::open(&table.by(rules)).unwrap_err();
        assert!(matches!(error, Error::Argument { argument: "rules", .. }), "{place}: {error}");
    }
}

/// Whole numbers of many values are hardly classes.
#[test]
fn many_classes_of_whole_numbers_are_noted() {
    let text = |classes: usize| {
        let rows: String = (0..classes).map(|i| format!("{i},{i}\n")).collect();
        format!("x,y\n{rows}")
    };
    assert_eq!(notes_of(&Table::strict(&text(100), "y").spec), [""; 0]);
    let notes = notes_of(&Table::strict(&text(101), "y").spec);
    let expected = "column `y` of whole numbers is trained as 101 classes; task regress makes it \
                    numbers";
    assert_eq!(notes, [expected]);
}

/// A file is of another format if binary data follow the letters.
#[test]
fn a_column_may_have_the_name_of_a_format() {
    for text in ["PAR1,y\n1,2\n", "ARROW1,y\n1,2\n", "ARROW1é,y\n1,2\n"] {
        assert_eq!(Table::strict(text, "y").info().channels, 1, "{text}");
    }
}

/// A build without Parquet names the format, and the feature that reads it.
#[cfg(not(feature = "parquet"))]
#[test]
fn files_of_other_formats_are_named() {
    for (start, format) in [("PAR1", "Parquet"), ("ARROW1", "Arrow")] {
        let table = Table::strict(&format!("{start}\0\0"), "y");
        let text = any_error(&table.spec).to_string();
        for part in ["must be CSV", &format!("a file of {format}"), "--features parquet"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
