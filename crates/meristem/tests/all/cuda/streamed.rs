//! Streamed images: host memory that the copies need, and copies beside kernels.

use super::driver::driver_calls_of_a_step;
use super::{BARE, run};
use crate::common::runs::with_images;
use crate::trace::read::{Read, Slice};

/// With streamed images a step locks no host memory, and frees none: what the copies need is
/// allocated with the gather, and with the graphs.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_step_with_streamed_images_locks_no_memory() {
    let m = with_images();
    let settings = "--dataset arrays --data-root images.safetensors --host minimal --envs 3 \
                    --batch 8 --max-batches 15 --statistics-batches 2 --control-split 0.1 \
                    --controller none --checkpoint-every 0 --quiet --data-budget 1KiB \
                    --devices cuda:0";
    let calls = driver_calls_of_a_step(&m, &format!("train {settings}"));
    let Some(copies) = calls.get("cuMemcpyHtoDAsync_v2") else { return };
    // Batches of training and statistics of 3 envs, and of the control split of 50 images.
    assert!(*copies >= 3 * (15 + 2) + 7, "{calls:?}");
    for function in ["cuMemHostAlloc", "cuMemFreeHost", "cuMemAlloc_v2", "cuMemFree_v2"] {
        assert_eq!(calls.get(function).copied().unwrap_or(0), 0, "{function}: {calls:?}");
    }
}

/// The slices of a category on the lane of a stream.
fn slices<'a>(read: &'a Read, lane: &str, category: &str) -> Vec<&'a Slice> {
    read.lanes[lane].iter().filter(|slice| slice.category == category).collect()
}

/// Streamed images are copied while kernels run, also those of the same env: the copy of a batch
/// and the training on the batch before it (D7). Waits for host memory are within the permitted
/// numbers, and counted.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_trace_shows_copies_beside_kernels() {
    let m = with_images();
    let long = BARE.replace("--max-batches 4", "--max-batches 12");
    let streamed = format!("{long} --data-budget 1KiB --hot-scope deny");
    let expected = run(&m, &streamed, "plain", 1);
    let traced = run(&m, &format!("{streamed} --trace t.json"), "run", 1);
    assert_eq!(traced.weights, expected.weights);
    let read = Read::file(&m.path("t.json"));
    for env in 0..3 {
        let copies = slices(&read, &format!("env {env} uploads"), "copy_to_device");
        // 12 batches of training in each of 3 steps, and those of the statistics.
        assert!(copies.len() >= 36 && copies.iter().all(|copy| copy.name == "stage"));
        // The launch of all envs is on the lane of the first.
        let kernels = slices(&read, "env 0", "launch");
        let beside = |copy: &&&Slice| {
            kernels.iter().any(|kernel| copy.start < kernel.end && kernel.start < copy.end)
        };
        let beside = copies.iter().filter(beside).count();
        // On a GPU the kernels of so small a network may end before the next copy begins.
        let is_standin = std::env::var_os("MERISTEM_STANDIN_SEED").is_some();
        assert!(beside > copies.len() / 2 || !is_standin, "{beside} of {}", copies.len());
    }
    let hot_path = &m.json("plain/summary.json")["hot_path"];
    let [waits, batches] =
        ["synchronizations", "training_steps"].map(|key| hot_path[key].as_f64().unwrap());
    assert!(batches > 0.0 && waits <= 1.0, "{hot_path}");
}
