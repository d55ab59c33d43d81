//! Runs on tables: their rules are in the weights, and `eval` applies them (D13).

use std::fs;

use serde_json::Value;

use crate::common::Meristem;

const HOST: &str = "--host mlp:16 --controller none --envs 1 --batch 32 --quiet";

/// Rows of a table: `size` and `colour` with missing values, `price`, `kind`, and perhaps `split`.
fn table(rows: std::ops::Range<usize>, has_split: bool) -> String {
    let colours = ["red", "green", "", "blue"];
    let row = |i: usize| {
        let size = (i * 37 + i * i * 3) % 50;
        let colour = (i * 7 + i / 5) % 4;
        let price = 3 * size + 40 * colour;
        let shown = if size == 25 { "NA".to_string() } else { size.to_string() };
        let kind = ["cheap", "dear"][usize::from(price > 120)];
        let split = match (has_split, i % 4) {
            (true, 0) => ",test",
            (true, _) => ",train",
            _ => "",
        };
        format!("{shown},{},{price}.5,{kind}{split}\n", colours[colour])
    };
    let split = if has_split { ",split" } else { "" };
    format!("size,colour,price,kind{split}\n{}", rows.map(row).collect::<String>())
}

fn eval(m: &Meristem, run: &str, of: &str) -> Value {
    let weights = format!("{run}/weights/env-0.safetensors");
    let report = m.ok(&format!("eval --weights {weights} --dataset table {of} --json")).stdout;
    serde_json::from_str(&report).unwrap()
}

#[test]
fn a_table_is_trained_and_another_one_is_read_by_its_rules() {
    let m = Meristem::new();
    fs::write(m.path("train.csv"), table(0..800, true)).unwrap();
    // Other sizes and frequencies, so that rules of its own would differ.
    let other = table(800..1000, false);
    let other: String = other
        .lines()
        .filter(|line| !line.contains("green"))
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(m.path("other.csv"), other).unwrap();
    let data = "--dataset table --data-root train.csv";
    for (target, task, score, least) in
        [("price", "regress", "r2", 0.8), ("kind", "classify", "accuracy", 0.85)]
    {
        // Each target is a function of the same features; the other one is left out of the file.
        let others = ["price", "kind"].map(|name| (name, name == target));
        for file in ["train", "other"] {
            let text = fs::read_to_string(m.path(&format!("{file}.csv"))).unwrap();
            fs::write(m.path(&format!("{target}-{file}.csv")), without(&text, &others)).unwrap();
        }
        let data = data.replace("train.csv", &format!("{target}-train.csv"));
        let options = format!("{data} --target {target} --missing fill");
        m.ok(&format!("train {options} {HOST} --steps 25 --control-split 0.1 --run-dir {target}"));
        let config = fs::read_to_string(m.path(&format!("{target}/config.toml"))).unwrap();
        assert!(config.contains(&format!("target = [\"{target}\"]")), "{config}");
        assert!(config.contains("missing = \"fill\""), "{config}");
        let summary = fs::read(m.path(&format!("{target}/summary.json"))).unwrap();
        let summary: Value = serde_json::from_slice(&summary).unwrap();
        let trained = summary["envs"][0][format!("test_{score}")].as_f64().unwrap();
        assert!(trained > least, "{target}: {trained}");
        // The same split, by the rules in the weights: neither target nor fill are given.
        let own = eval(&m, target, &format!("--data-root {target}-train.csv --split test"));
        m.ok(&format!("export onnx {target}/weights/env-0.safetensors --out {target}.onnx"));
        let model = m.bytes(&format!("{target}.onnx"));
        let rules = r#""kind":"numeric","name":"size"},{"#;
        assert!(String::from_utf8_lossy(&model).contains(rules), "{target}");
        // Batches of another size are summed in another order.
        assert!((own[score].as_f64().unwrap() - trained).abs() < 1e-12, "{target}");
        let more = eval(&m, target, &format!("--data-root {target}-other.csv --split train"));
        assert!(more[score].as_f64().unwrap() > least - 0.1, "{target}: {more}");
        let info = m.ok(&format!("data info {options} --json")).stdout;
        let info: Value = serde_json::from_str(&info).unwrap();
        assert_eq!(info["table"]["features"][1]["categories"][0], "");
        assert_eq!(info["channels"], 5);
        let said = m.ok(&format!("data verify {options}")).stdout;
        assert!(said.contains("sound"), "{said}");
        let said = m.ok(&format!("train {options} --host mlp:8 --steps 1 --run-dir s-{target}"));
        assert!(task == "classify" || said.stdout.contains("(task regress)"), "{}", said.stdout);
    }
}

/// The table without the columns that are marked with false.
fn without(text: &str, columns: &[(&str, bool)]) -> String {
    let names: Vec<&str> = text.lines().next().unwrap().split(',').collect();
    let keep = |name: &str| columns.iter().all(|(column, keep)| *column != name || *keep);
    let line = |line: &str| {
        let cells = line.split(',').zip(&names).filter(|(_, name)| keep(name));
        cells.map(|(cell, _)| cell).collect::<Vec<_>>().join(",") + "\n"
    };
    text.lines().map(line).collect()
}

/// Whole numbers are classes, unless the task says that they are numbers.
#[test]
fn whole_numbers_are_classes_or_numbers() {
    let m = Meristem::new();
    let rows: String = (0..60).map(|i| format!("{},{}\n", i % 7, i % 3)).collect();
    fs::write(m.path("t.csv"), format!("x,y\n{rows}")).unwrap();
    let train = format!("train --dataset table --data-root t.csv --target y {HOST} --steps 1");
    m.ok(&format!("{train} --run-dir classes"));
    m.ok(&format!("{train} --task regress --run-dir numbers"));
    assert!(eval(&m, "classes", "--data-root t.csv --split train")["accuracy"].is_number());
    assert!(eval(&m, "numbers", "--data-root t.csv --split train")["r2"].is_number());
    m.fails(&format!("{train} --task multilabel --run-dir no"), 2, &["tables have no labels"]);
    let data = "--dataset table --data-root t.csv --target y";
    for (task, info, verify) in [
        ("", "classes   3: 0, 1, 2", "60 sound samples in 3 classes (20 to 20 each)"),
        ("--task classify", "classes   3: 0, 1, 2", "60 sound samples in 3 classes"),
        ("--task regress", "numbers   1: y", "60 sound samples with numbers"),
    ] {
        let told = m.ok(&format!("data info {data} {task}")).stdout;
        assert!(told.contains(info), "{task}: {told}");
        let told = m.ok(&format!("data verify {data} {task}")).stdout;
        assert!(told.contains(verify), "{task}: {told}");
    }
    for command in ["info", "verify"] {
        m.fails(&format!("data {command} {data} --task multilabel"), 2, &["tables have no labels"]);
        m.fails(
            &format!("data {command} --dataset embedded --task regress"),
            2,
            &["dataset embedded has one class"],
        );
    }
}

#[test]
fn bad_requests_are_named() {
    let m = Meristem::new();
    fs::write(m.path("t.csv"), "a,b,y\n1,red,0.5\n,blue,1.5\n2,red,2\n").unwrap();
    fs::write(m.path("good.csv"), "a,b,y\n1,red,0.5\n3,blue,1.5\n2,red,2\n").unwrap();
    fs::write(m.path("new.csv"), "a,b,y\n1,red,0.5\n3,green,1.5\n").unwrap();
    fs::write(m.path("less.csv"), "a,y\n1,0.5\n").unwrap();
    let table = "--dataset table --data-root";
    let train = |of: &str| format!("train {of} {HOST} --steps 1 --run-dir no");
    for (command, code, words) in [
        (train(&format!("{table} good.csv")), 2, "`target` must be one or some of `a`, `b`, `y`"),
        (train(&format!("{table} good.csv --target z")), 2, "got `z`"),
        (train(&format!("{table} good.csv --target y,y")), 2, "`y` twice"),
        (train(&format!("{table} t.csv --target y")), 1, "`a` in line 3 must be a value"),
        (train("--target y"), 2, "only with dataset table"),
        (train("--missing fill"), 2, "only with dataset table"),
        (train(&format!("{table} good.csv --target y --missing no")), 2, "refuse"),
        (
            train(&format!("{table} good.csv --target y --task classify")),
            2,
            "one target column of text",
        ),
        (train("--dataset table --target y"), 2, "needs a data root"),
        (format!("data info {table} good.csv"), 2, "`target` must be one or some of"),
        ("data info --dataset blobs --target y".into(), 2, "only with dataset table"),
    ] {
        m.fails(&command, code, &[words]);
    }
    m.ok(&format!("train {table} good.csv --target y {HOST} --steps 1 --run-dir run"));
    let eval = "eval --weights run/weights/env-0.safetensors --dataset table --data-root";
    m.ok(&format!("{eval} good.csv --target y --split train"));
    m.fails(&format!("{eval} good.csv --split test"), 2, &["no test split"]);
    for (of, code, words) in [
        ("good.csv --target b", 2, "`y`, as in the given rules"),
        ("good.csv --missing fill", 2, "no rule to fill `a`"),
        ("t.csv", 1, "`a` in line 3 must be a value"),
        ("new.csv", 1, "`b` in line 3 must be one of the 2 categories"),
        ("less.csv", 1, "names of columns with `b`"),
    ] {
        m.fails(&format!("{eval} {of} --split train"), code, &[words]);
    }
}

/// `data info` and `data verify` name every mistake that a run would meet, with its place (D15).
#[test]
fn mistakes_in_data_are_named_before_a_run() {
    let m = Meristem::new();
    for (file, options, words) in [
        ("a,y\n1,0.5\n,1.5\n", "--target y", "`a` in line 3 must be a value"),
        ("a,y\n1,0.5\nnan,1.5\n", "--target y", "`a` in line 3 must be a value, got `nan`"),
        ("a,y\n1,0.5\ninf,1.5\n", "--target y", "`a` in line 3 must be a finite number"),
        ("a,y\n1,0.5\n2,x\n", "--target y --task regress", "`y` in line 3 must be a number"),
        ("a,b,y\n,1,2\n,3,4\n", "--target y --missing fill", "column `a` must be at least one"),
        ("a,b,a\n1,2,3\n", "--target b", "different names of columns, got `a` twice"),
        (
            "a,y,split\n1,no,train\n1,yes,train\n2,maybe,test\n",
            "--target y",
            "`y` in line 4 must be one of the 2 classes",
        ),
    ] {
        fs::write(m.path("t.csv"), file).unwrap();
        for command in ["info", "verify"] {
            let command = format!("data {command} --dataset table --data-root t.csv {options}");
            m.fails(&command, 1, &[words]);
        }
    }
}

/// Standardised targets and one-hot features stay the same where numbers are scaled and categories
/// renamed; the constants and rules do not.
#[test]
fn a_run_does_not_go_on_with_another_meaning_of_its_table() {
    let m = Meristem::new();
    let whole = without(&table(0..400, false), &[("kind", false)]);
    fs::write(m.path("t.csv"), &whole).unwrap();
    let options = format!("--dataset table --data-root t.csv --target price --missing fill {HOST}");
    m.ok(&format!("train {options} --steps 2 --run-dir run"));
    let scaled = |line: &str| match line.rsplit_once(',') {
        Some((features, price)) => match price.parse::<f64>() {
            Ok(price) => format!("{features},{}\n", 3.0 * price),
            Err(_) => format!("{line}\n"),
        },
        None => line.to_string(),
    };
    for (edited, words) in [
        (whole.lines().map(scaled).collect::<String>(), "mean of the training targets"),
        (whole.replace("green", "grey"), "checksum of training images and labels"),
        (whole.replacen("size", "area", 1), "checksum of training images and labels"),
    ] {
        assert_ne!(edited, whole);
        fs::write(m.path("t.csv"), edited).unwrap();
        m.fails("train --resume run --steps 4", 2, &[words]);
        let init = format!("train {options} --init run/weights/env-0.safetensors --steps 1");
        if words.starts_with("mean") {
            let said = m.ok(&format!("{} --run-dir further", init.replace(" --quiet", "")));
            assert!(said.stderr.contains("they get those of this dataset"), "{}", said.stderr);
        } else {
            m.fails(
                &format!("{init} --run-dir no"),
                2,
                &["trained on the columns of another table"],
            );
        }
    }
    fs::write(m.path("t.csv"), whole).unwrap();
    m.ok("train --resume run --steps 4 --quiet");
}
