//! The host's memory while a dataset is loaded (D1): the copy and a few chunks, never a second
//! copy.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "all/common/mod.rs"]
mod common;

use std::alloc::System;

use cap::Cap;
use common::cpu;
use common::files::*;
use meristem_data::{CHUNK_BYTES, Residency, Source, Split, cache};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Alone in its process: the allocator's peak is that of the load.
#[test]
fn a_load_holds_a_few_chunks_beside_the_copy() {
    let folder = tempfile::tempdir().unwrap();
    // 46 MB of training images in files of 9 MB.
    let record: Vec<u8> = (0..3073).map(|i| (i % 10) as u8).collect();
    for name in ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"] {
        std::fs::write(folder.path().join(name).with_extension("bin"), record.repeat(3000))
            .unwrap();
    }
    std::fs::write(folder.path().join("test_batch.bin"), &record).unwrap();
    let spec = spec_of(Source::Cifar10, folder.path());
    let device = cpu(1);
    let before = ALLOCATOR.allocated();
    let written = ALLOCATOR.max_allocated();
    // A streamed load holds nothing but chunks and labels: less than writing the files did.
    cache::load(&device, &spec, Split::Train, Residency::Streamed).unwrap();
    assert_eq!(ALLOCATOR.max_allocated(), written);
    cache::load(&device, &spec, Split::Train, Residency::Resident).unwrap();
    let extra = ALLOCATOR.max_allocated() - before - device.memory().reserved_peak;
    assert!(extra < 5 * CHUNK_BYTES, "{extra} bytes");
    cache::clear(|_| true);
}
