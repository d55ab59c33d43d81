//! The host's memory while a dataset is loaded (D1): the copy and a few chunks, never a second
//! copy.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "all/common/mod.rs"]
mod common;

use std::alloc::System;
use std::fs::File;
use std::io::Write;

use cap::Cap;
use meristem_data::{CHUNK_BYTES, Residency, Source, Split, cache};

use common::cpu;
use common::files::*;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Bytes of the training images.
const IMAGES: usize = 5 * 3000 * 3072;

/// Alone in its process, so that the allocator's peak belongs to the load.
#[test]
fn a_load_holds_a_few_chunks_beside_the_copy() {
    let folder = tempfile::tempdir().unwrap();
    // 46 MB of training images in files of 9 MB.
    let record: Vec<u8> = (0..3073).map(|i| (i % 10) as u8).collect();
    for name in ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"] {
        // One by one, so that writing does not set the peak.
        let mut file = File::create(folder.path().join(name).with_extension("bin")).unwrap();
        (0..3000).for_each(|_| file.write_all(&record).unwrap());
    }
    std::fs::write(folder.path().join("test_batch.bin"), &record).unwrap();
    let spec = spec_of(Source::Cifar10, folder.path());
    let device = cpu(1);
    let before = ALLOCATOR.allocated();
    let extra = || ALLOCATOR.max_allocated() - before;
    // A streamed load holds nothing but chunks and labels.
    cache::load(&device, &spec, Split::Train, Residency::Streamed).unwrap();
    assert!(extra() < 5 * CHUNK_BYTES, "{} bytes", extra());
    cache::load(&device, &spec, Split::Train, Residency::Resident).unwrap();
    // The copy is a separate mapping, which the device counts and the allocator does not.
    let copy = device.memory().reserved_peak;
    assert!((IMAGES..IMAGES + 2 * CHUNK_BYTES).contains(&copy), "{copy} bytes");
    assert!(extra() < 5 * CHUNK_BYTES, "{} bytes", extra());
    cache::clear(|_| true);
}
