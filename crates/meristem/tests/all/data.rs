//! `meristem data`.

use serde_json::Value;

use crate::common::process::output;
use crate::common::{Meristem, command_output, of_kind};

fn json(m: &Meristem, arguments: &str) -> Value {
    serde_json::from_str(&m.ok(arguments).stdout).unwrap()
}

#[test]
fn the_plan_has_every_sample_once() {
    let m = Meristem::new();
    let usual = "data plan --len 50 --batch 5 --devices cpu,cpu,cpu --seed 42 --epochs 2 --json";
    let base = &format!("{usual} --epoch dealt");
    let plan = json(&m, base);
    let epochs = plan["epochs"].as_array().unwrap();
    assert_eq!(epochs.len(), 2);
    assert_ne!(epochs[0]["batches"], epochs[1]["batches"]);
    for epoch in epochs {
        let batches = epoch["batches"].as_array().unwrap();
        let sizes: Vec<Vec<usize>> = batches
            .iter()
            .map(|batch| {
                batch.as_array().unwrap().iter().map(|e| e.as_array().unwrap().len()).collect()
            })
            .collect();
        assert_eq!(sizes, [vec![5, 5, 5], vec![5, 5, 5], vec![5, 5, 5], vec![2, 2, 1]]);
        let mut all: Vec<u64> = batches
            .iter()
            .flat_map(|b| b.as_array().unwrap())
            .flat_map(|env| env.as_array().unwrap().iter().map(|i| i.as_u64().unwrap()))
            .collect();
        all.sort_unstable();
        assert_eq!(all, (0..50).collect::<Vec<_>>());
    }
    assert_eq!(plan, json(&m, base), "two processes, one order");
    m.fails(&format!("{usual} --epoch half"), 2, &["--epoch", "full or dealt"]);
    let full = json(&m, usual);
    assert_eq!(full, json(&m, &format!("{usual} --epoch full")), "the default, as in `train`");
    assert_eq!((&plan["epoch_mode"], &full["epoch_mode"]), (&"dealt".into(), &"full".into()));
    let batches = full["epochs"][1]["batches"].as_array().unwrap();
    assert_eq!(batches.len(), 10);
    let of_env = |env: usize| -> Vec<u64> {
        let samples = batches.iter().flat_map(|batch| batch[env].as_array().unwrap());
        samples.map(|sample| sample.as_u64().unwrap()).collect()
    };
    assert_ne!(of_env(0), of_env(2));
    for env in 0..3 {
        let mut all = of_env(env);
        all.sort_unstable();
        assert_eq!(all, (0..50).collect::<Vec<_>>(), "env {env}");
    }
    let dropped = json(&m, &format!("{base} --drop-last"));
    assert_eq!(dropped["epochs"][0]["batches"].as_array().unwrap().len(), 3);
    assert_eq!(dropped["epochs"][1]["batches"][2], plan["epochs"][1]["batches"][2]);
    let ordered = json(&m, &format!("{base} --shuffle off --max-batches 1"));
    assert_eq!(ordered["epochs"][0]["batches"][0][1], serde_json::json!([5, 6, 7, 8, 9]));
    let text = m.ok("data plan --len 4 --batch 2 --devices cpu --shuffle off").stdout;
    assert!(text.contains("batch 1 env 0: [2, 3]"), "{text}");
}

#[test]
fn info_and_verify_describe_the_embedded_images() {
    let m = Meristem::new();
    let info = json(&m, "data info --dataset embedded --json");
    assert_eq!((&info["train_len"], &info["test_len"]), (&10_000.into(), &2500.into()));
    assert_eq!(info["classes"].as_array().unwrap().len(), 10);
    assert!(m.ok("data info").stdout.contains("cs.toronto.edu"));
    let told = m.ok("data info --dataset embedded").stdout;
    assert!(told.contains("training uses this mean and std"), "{told}");
    assert_eq!(json(&m, "data info --json")[0]["found"], true);
    assert!(m.ok("data verify").stdout.contains("10,000 sound samples"));
}

/// Creates ten classes with two training images and one test image each. Returns the name of the
/// folder.
fn class_folders(m: &Meristem) -> &'static str {
    for class in 0..10u8 {
        for (split, count) in [("train", 2u8), ("test", 1)] {
            let folder = m.path(&format!("images/{split}/class{class}"));
            std::fs::create_dir_all(&folder).unwrap();
            for i in 0..count {
                let pixel = |x: u32, y: u32| image::Rgb([class * 20, (x * 8) as u8, (y as u8) ^ i]);
                let image = image::RgbImage::from_fn(32, 32, pixel);
                image.save(folder.join(format!("{i}.png"))).unwrap();
            }
        }
    }
    "images"
}

#[test]
fn imported_folders_give_the_results_of_the_folders() {
    let m = Meristem::new();
    let folder = class_folders(&m);
    let said = m.ok(&format!("data import --from {folder} --to cifar"));
    assert!(said.stdout.contains("20 training and 10 test images"), "{}", said.stdout);
    let folder_info = json(&m, &format!("data info --dataset folder --data-root {folder} --json"));
    let cifar_info = json(&m, "data info --dataset cifar10 --data-root cifar --json");
    for key in ["classes", "mean", "std", "train_len", "test_len"] {
        assert_eq!(folder_info[key], cifar_info[key], "{key}");
    }
    for (dataset, root) in [("folder", folder), ("cifar10", "cifar")] {
        m.ok(&format!("data verify --dataset {dataset} --data-root {root}"));
        m.ok(&format!(
            "train --dataset {dataset} --data-root {root} --host minimal --controller none --envs \
             2 --batch 4 --steps 2 --run-dir run-{dataset} --quiet"
        ));
    }
    m.fails(&format!("data import --from {folder} --to cifar"), 1, &["cifar", "exist"]);
}

#[test]
fn a_damaged_image_is_named_or_skipped() {
    let m = Meristem::new();
    let folder = class_folders(&m);
    std::fs::write(m.path("images/train/class3/1.png"), b"no image").unwrap();
    let train = format!(
        "train --dataset folder --data-root {folder} --host minimal --controller none --envs 1 \
         --batch 4 --steps 1 --run-dir run --quiet"
    );
    m.fails(&train, 1, &["class3/1.png", "--skip-bad"]);
    assert!(!m.path("run").exists());
    m.ok(&format!("{train} --skip-bad"));
    let summary = m.json("run/summary.json");
    assert_eq!((&summary["dataset"]["skipped"], &summary["images"]), (&1.into(), &19.into()));
    let said = m.run(&format!("data verify --dataset folder --data-root {folder}"));
    assert_eq!(said.code, Some(1));
    assert!(said.stdout.contains("class3/1.png"), "{}", said.stdout);
}

/// A dataset without a test split can be trained on; test results are null.
#[test]
fn a_dataset_without_a_test_split_is_trained_on() {
    let m = Meristem::new();
    let folder = class_folders(&m);
    std::fs::remove_dir_all(m.path("images/test")).unwrap();
    let data = format!("--dataset folder --data-root {folder}");
    let info = m.ok(&format!("data info {data}")).stdout;
    assert!(info.contains("20 training, no test split"), "{info}");
    assert!(json(&m, &format!("data info {data} --json"))["test_len"].is_null());
    assert!(m.ok(&format!("data verify {data}")).stdout.contains("no test split"));
    let said = m.ok(&format!(
        "train {data} --host minimal --controller random --control-split 0.2 --envs 2 --batch 4 \
         --steps 3 --rounds 2 --checkpoint-every 1 --run-dir run"
    ));
    assert!(said.stdout.contains("4 control samples, no test split"), "{}", said.stdout);
    let table = said.stdout.lines().find(|line| line.starts_with("│   0"));
    assert!(table.unwrap().contains("no test split"), "{}", said.stdout);
    let summary = m.json("run/summary.json");
    assert!(summary["dataset"]["test_samples"].is_null());
    for env in summary["envs"].as_array().unwrap() {
        assert!(env["test_accuracy"].is_null() && env["test_loss"].is_null(), "{env}");
        assert!(env["control_accuracy"].is_number(), "{env}");
    }
    assert_eq!(summary["round_results"][1]["test_accuracy"], serde_json::json!([null, null]));
    let events = m.events("run");
    assert!(events[0]["test_samples"].is_null());
    assert!(of_kind(&events, "episode_ended").iter().all(|end| end["test_accuracy"].is_null()));
    // It resumes from its newest checkpoint, in the second round, with the same results.
    let weights = m.bytes("run/weights/env-1.safetensors");
    std::fs::remove_file(m.path("run/summary.json")).unwrap();
    std::fs::remove_dir_all(m.path("run/weights")).unwrap();
    std::fs::create_dir(m.path("run/weights")).unwrap();
    m.ok("train --resume run --quiet");
    assert!(m.bytes("run/weights/env-1.safetensors") == weights);
    assert_eq!(m.json("run/summary.json")["envs"], summary["envs"]);
    let eval = format!("eval --weights run/weights/env-1.safetensors {data} --split");
    m.ok(&format!("{eval} train"));
    let words = ["the folder dataset has no test split", "test/CLASS/*", "read the train split"];
    m.fails(&format!("{eval} test"), 2, &words);
    m.fails(&format!("control eval {data} --controllers none,random --seeds 1"), 2, &words);
    std::fs::create_dir(m.path("images/test")).unwrap();
    m.fails(&format!("data info {data}"), 1, &["the test split is empty"]);
}

/// Class folders with 1,002 training images of 4×4 pixels, which exceeds the minimum for the cache
/// of decoded images.
fn many_images(m: &Meristem) {
    for class in ["a", "b"] {
        std::fs::create_dir_all(m.path("images/train").join(class)).unwrap();
        for number in 0..501_u32 {
            let image = image::GrayImage::from_fn(4, 4, |x, y| {
                image::Luma([(number * 3 + x * 7 + y * 11) as u8])
            });
            let file = m.path("images/train").join(class).join(format!("{number:03}.png"));
            image.save(&file).unwrap();
            // Older than the limit for recently changed files.
            let file = std::fs::File::options().write(true).open(file).unwrap();
            let day = std::time::Duration::from_secs(24 * 3600);
            file.set_modified(std::time::SystemTime::now() - day).unwrap();
        }
    }
}

/// Results are the same with and without the cache of decoded images, even if the cache is damaged.
#[test]
fn decoded_images_are_cached_on_disk() {
    let m = Meristem::new();
    many_images(&m);
    let info = |more: &str| {
        let mut command = m.command();
        command.args(["data", "info", "--dataset", "folder", "--data-root", "images", "--json"]);
        command.args(more.split_whitespace()).env("MERISTEM_CACHE", m.path("cache"));
        let said = command_output(output(&mut command));
        assert_eq!(said.code, Some(0), "{}", said.stderr);
        (serde_json::from_str::<Value>(&said.stdout).unwrap(), said.stderr)
    };
    let cache = |more: &str| {
        let mut command = m.command();
        command.args(["data", "cache", "--json"]).args(more.split_whitespace());
        let said = command_output(output(command.env("MERISTEM_CACHE", m.path("cache"))));
        serde_json::from_str::<Value>(&said.stdout).unwrap()
    };
    let (without, _) = info("--no-cache");
    assert_eq!(without["train_len"], 1002);
    assert_eq!(cache("")["files"], 0);
    let (first, told) = info("");
    assert_eq!((&first, told.as_str()), (&without, ""));
    assert_eq!(cache("")["files"], 1);
    let (again, _) = info("");
    assert_eq!(again, without);
    // These pixels are from the cache, not from the files.
    let [kept] = &cached(&m)[..] else { panic!() };
    let mut bytes = std::fs::read(kept).unwrap();
    bytes[5] ^= 0xff;
    std::fs::write(kept, &bytes).unwrap();
    let (damaged, told) = info("");
    assert_eq!(damaged, without);
    let flat = told.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains("note: decoded images") && flat.contains("checksum is wrong"), "{told}");
    assert_eq!(info("").1, "", "it was made again");
    // Another size is another entry; a changed file is detected.
    assert_eq!(info("--resize 8").0["width"], 8);
    assert_eq!(cache("")["files"], 2);
    let file = m.path("images/train/a/007.png");
    image::GrayImage::from_pixel(4, 4, image::Luma([250])).save(&file).unwrap();
    let (changed, _) = info("");
    assert_ne!(changed["mean"], without["mean"]);
    assert_eq!(info("").0, changed);
    // A file that does not decode is left out, also when the other images are read from the cache.
    std::fs::write(&file, "no image").unwrap();
    for _ in 0..2 {
        let (fewer, _) = info("--skip-bad");
        assert_eq!((&fewer["train_len"], &fewer["skipped"]), (&1001.into(), &1.into()));
    }
    let cleared = cache("--clear");
    assert!(cleared["files"].as_u64().unwrap() >= 2, "{cleared}");
    assert_eq!(cache("")["bytes"], 0);
    // A folder that cannot be written causes a note, not an error.
    std::fs::remove_dir_all(m.path("cache")).unwrap();
    std::fs::write(m.path("cache"), "a file").unwrap();
    let (_, told) = info("--skip-bad");
    assert!(told.contains("note: the decoded images are not kept in"), "{told}");
}

/// Files in the cache of decoded images.
fn cached(m: &Meristem) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(m.path("cache/decoded")).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Several processes decode and cache the same images concurrently.
#[test]
fn processes_share_the_decoded_images() {
    let m = Meristem::new();
    many_images(&m);
    let expected = json(&m, "data info --dataset folder --data-root images --json --no-cache");
    let start = || {
        let mut command = m.command();
        command.args(["data", "info", "--dataset", "folder", "--data-root", "images", "--json"]);
        command.env("MERISTEM_CACHE", m.path("cache")).stdout(std::process::Stdio::piped());
        command.spawn().unwrap()
    };
    let all: Vec<_> = (0..4).map(|_| start()).collect();
    for process in all {
        let told = process.wait_with_output().unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&told.stdout).unwrap(), expected);
    }
    assert_eq!(cached(&m).len(), 1);
}

/// Files that are not images are named; the error for images of other sizes names the option to
/// use.
#[test]
fn problems_of_folders_are_reported() {
    let m = Meristem::new();
    for (name, side) in [("a/1", 8), ("a/2", 9), ("b/1", 8)] {
        let file = m.path("odd/train").join(format!("{name}.png"));
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        image::RgbImage::from_pixel(side, side, image::Rgb([9, 8, 7])).save(file).unwrap();
    }
    let of = "--dataset folder --data-root odd";
    let train = "train --host minimal --envs 1 --steps 1 --controller none --batch 2";
    let words = ["2.png", "8×8", "got 9×9", "such as --resize 32"];
    m.fails(&format!("{train} {of} --run-dir no"), 1, &words);
    assert!(!m.path("no").exists());
    std::fs::write(m.path("odd/train/a/notes\u{1b}.txt"), "x").unwrap();
    let said = m.ok(&format!("{train} {of} --resize 8 --run-dir run"));
    let note = "note: left out 1 file that is no image: train/a/notes\\u{1b}.txt";
    assert!(said.stderr.contains(note), "{}", said.stderr);
    let quiet = m.ok(&format!("{train} {of} --resize 8 --run-dir other --quiet"));
    assert_eq!(quiet.stderr, "");
    let eval = format!("eval --weights run/weights/env-0.safetensors {of} --split train");
    m.ok(&format!("{eval} --resize 8"));
    m.fails(&format!("{train} --resize 8 --run-dir no"), 2, &["`resize`: got 8", "embedded"]);
    m.fails(&format!("{eval} --resize 0"), 2, &["'--resize <N>'"]);
    m.fails(&format!("data info {of} --resize 5000"), 2, &["'--resize <N>'"]);
}
