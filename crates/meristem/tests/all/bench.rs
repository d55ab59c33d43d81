//! `meristem bench`: output and exit codes. The figures are not tested.

use serde_json::Value;

use crate::common::Meristem;

#[test]
fn benchmarks_print_json() {
    let m = Meristem::new();
    let said = m.ok("bench host --host minimal --envs 2 --batch 32 --seconds 0.2 --json");
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    assert!(report["images_per_s"].as_f64().unwrap() > 0.0);
    assert_eq!(report["config"]["envs"], 2);
    let said = m.ok("bench gather --seconds 0.2 --json");
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    assert!(report["us_per_batch"].as_f64().unwrap() > 0.0);
    assert_eq!(report["config"]["batch"], 128);
    // A very short time also gives a result.
    let modules = "r0c1=conv_small,r0c0=norm:training";
    let host = "bench host --host minimal --envs 1 --batch 8 --seconds 1e-9";
    let said = m.ok(&format!("{host} --modules {modules} --json"));
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    assert_eq!((&report["blocks"], &report["config"]["modules"]), (&1.into(), &modules.into()));
    // 5 parameters of a norm and 24 of a small convolution, at 2 and 4 channels, in addition to the
    // host's 164.
    assert_eq!(report["config"]["parameters"], 164 + 5 + 24);
    for (list, words) in [
        ("r0c0", ["`modules`: got r0c0", "SLOT=BLUEPRINT"]),
        ("r0c0=norm:flying", ["`modules`", "SLOT=BLUEPRINT:training"]),
        ("r0c9=norm", ["r0c9", "r0c0"]),
        ("all=norm", ["`modules`: got all=norm", "SLOT=BLUEPRINT"]),
        ("r0c0=conv_larch", ["conv_larch", "conv_light"]),
        ("r0c0=norm,r0c0=norm", ["r0c0", "twice"]),
    ] {
        m.fails(&format!("{host} --modules {list}"), 2, &words);
    }
    let said = m.ok("bench gather --seconds 1e-9 --json");
    assert_eq!(serde_json::from_str::<Value>(&said.stdout).unwrap()["blocks"], 1);
    let said = m.ok("bench counterfactual --batch 8 --seconds 0.1 --json");
    let report: Value = serde_json::from_str(&said.stdout).unwrap();
    assert!(report["share"]["median"].as_f64().unwrap() > 0.0);
    assert_eq!(
        (&report["config"]["configurations"], &report["config"]["distinct"]),
        (&12.into(), &8.into())
    );
    // Operations, not times.
    assert!(report["flops_share"].as_f64().unwrap() < 0.5);
    m.fails("bench counterfactual --blueprint conv_larch", 2, &["conv_larch", "conv_light"]);
}

#[test]
fn sums_over_ranks_are_checked_and_measured() {
    let m = Meristem::new();
    for ranks in [1, 2, 3] {
        let command = format!("bench comm --ranks {ranks} --max-size 128KiB --density 0.01,0.1");
        let said = m.ok(&format!("{command} --rounds 2 --json"));
        let report: Value = serde_json::from_str(&said.stdout).unwrap();
        assert_eq!((&report["transport"], &report["ranks"]), (&"threads".into(), &ranks.into()));
        let rows = report["rows"].as_array().unwrap();
        // Sizes from 1 KiB to 128 KiB; for each the dense sum, and three sparse sums and a gather
        // with two densities.
        assert_eq!(rows.len(), 8 * (1 + 4 * 2));
        for row in rows {
            assert_eq!(row["wrong"], 0, "{row}");
            assert!(row["ms"].as_f64().unwrap() > 0.0, "{row}");
            let (bytes, sent) =
                (row["bytes"].as_u64().unwrap(), row["sent_bytes"].as_u64().unwrap());
            let k = row["k"].as_u64().unwrap();
            match row["algorithm"].as_str().unwrap() {
                "dense" => assert_eq!(sent, 2 * (ranks - 1) * bytes, "{row}"),
                // An index and a value of each selected element are sent to all other ranks.
                "topk" | "gather" => assert_eq!(sent, ranks * (ranks - 1) * 8 * k, "{row}"),
                _ => assert_eq!(sent > 0, ranks > 1, "{row}"),
            }
        }
    }
    // Memory is allocated before the selection, not after it.
    let command = "bench comm --min-size 64KiB --max-size 64KiB --density 0.01 --rounds 1 --memory";
    let report: Value = serde_json::from_str(&m.ok(&format!("{command} --json")).stdout).unwrap();
    for row in report["rows"].as_array().unwrap() {
        let memory = &row["memory"];
        if row["algorithm"] == "dense" {
            assert!(memory.is_null(), "{row}");
            continue;
        }
        let bytes = |name: &str| memory[name].as_u64().unwrap();
        let made = bytes("after_allocation");
        assert!(made > bytes("before"), "{row}");
        let later = ["after_selection", "after_collective", "peak"].map(bytes);
        assert_eq!(later, [made; 3], "{row}");
    }
    assert_eq!(m.ok(command).stdout.matches(" after selection, ").count(), 4);
    // Two ranks log their exchanges; without the flag nothing is logged.
    let command = "bench comm --max-size 1KiB --density 0.1 --rounds 1";
    let debug = m.ok(&format!("{command} --comm-debug")).stderr;
    for words in ["meristem::placement::comm", "all_reduce", "gtopk", "rank=1", "f32 [256]"] {
        assert!(debug.contains(words), "{words}: {debug}");
    }
    assert_eq!(m.ok(command).stderr, "");
    let said = m.ok("bench comm --min-size 1MiB --max-size 1MiB --density 0.01 --rounds 1");
    assert!(said.stdout.contains("bus GB/s") && said.stdout.contains("   1 MiB  ok-topk"));
    // 3 ranks send 24 elements of 8 bytes to 2 other ranks each.
    let said = m.ok("bench comm --ranks 3 --max-size 1KiB --density 0.1 --rounds 1");
    let topk = said.stdout.lines().find(|line| line.contains("  topk")).unwrap();
    let words: Vec<&str> = topk.split_whitespace().collect();
    assert_eq!((words[3], words[4], words[words.len() - 2]), ("0.1", "24", "1,152"), "{topk}");
    m.fails("bench comm --max-size 2", 2, &["`max-size`: got 2", "4 bytes to 4GiB"]);
    m.fails("bench comm --density 0.1,2", 2, &["`density`: got 2", "at most 1"]);
    let words = ["`device`: got cpu", "the GPU of this process, such as cuda:0"];
    m.fails("bench comm --comm nccl", 2, &words);
    m.fails("bench comm --ranks 0", 2, &["`ranks`: got 0, expected 1 to 64"]);
    m.fails("bench comm --rounds 0", 2, &["`rounds`: got 0, expected at least 1"]);
}

/// A build without MPI explains how to get one with it.
#[cfg(not(feature = "mpi"))]
#[test]
fn missing_transports_are_named() {
    let m = Meristem::new();
    m.fails("bench comm --comm mpi", 2, &["this build has no MPI", "`--features mpi`"]);
}
