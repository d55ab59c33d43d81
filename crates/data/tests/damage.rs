//! No bytes make a parser panic, and no header makes it allocate more than the file can hold (D9).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "all/common/mod.rs"]
mod common;

use std::alloc::System;
use std::fs;
use std::path::Path;

use cap::Cap;
use meristem_data::{DatasetSpec, Source, verify};
use proptest::prelude::*;
use proptest::sample::Index;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use common::files::*;

/// A modification of a file.
#[derive(Clone, Debug)]
enum Mutation {
    Set(Index, u8),
    Flip(Index, u8),
    Cut(Index),
    Insert(Index, Vec<u8>),
    /// Fill some bytes with one value: lengths become huge or zero.
    Fill(Index, usize, u8),
    Replace(Vec<u8>),
}

fn any_mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<Index>;
    let bytes = || prop::collection::vec(any::<u8>(), 0..40);
    prop_oneof![
        4 => (at(), any::<u8>()).prop_map(|(i, b)| Mutation::Set(i, b)),
        4 => (at(), 0..8_u8).prop_map(|(i, b)| Mutation::Flip(i, 1 << b)),
        2 => at().prop_map(Mutation::Cut),
        2 => (at(), bytes()).prop_map(|(i, b)| Mutation::Insert(i, b)),
        2 => (at(), 1..9_usize, prop_oneof![Just(0), Just(255), Just(127), Just(b'9')])
            .prop_map(|(i, n, b)| Mutation::Fill(i, n, b)),
        1 => bytes().prop_map(Mutation::Replace),
    ]
}

fn mutate(bytes: &mut Vec<u8>, mutation: &Mutation) {
    if let Mutation::Replace(with) = mutation {
        return bytes.clone_from(with);
    }
    if bytes.is_empty() {
        return;
    }
    // Half of the places in the head of the file, where the lengths are.
    let place = |index: &Index| {
        let i = index.index(bytes.len() * 2);
        if i < bytes.len() { i } else { i % bytes.len().min(64) }
    };
    match mutation {
        Mutation::Set(i, value) => (place(i), *value).apply(bytes, |_, v| v),
        Mutation::Flip(i, mask) => (place(i), *mask).apply(bytes, |b, m| b ^ m),
        Mutation::Cut(i) => bytes.truncate(place(i)),
        Mutation::Insert(i, what) => {
            let i = place(i);
            bytes.splice(i..i, what.iter().copied());
        }
        Mutation::Fill(i, n, value) => {
            let i = place(i);
            let end = (i + n).min(bytes.len());
            bytes[i..end].fill(*value);
        }
        Mutation::Replace(_) => {}
    }
}

trait Apply {
    fn apply(self, bytes: &mut [u8], change: fn(u8, u8) -> u8);
}

impl Apply for (usize, u8) {
    fn apply(self, bytes: &mut [u8], change: fn(u8, u8) -> u8) {
        bytes[self.0] = change(bytes[self.0], self.1);
    }
}

/// Writes sound files of one format; returns the names of those that may be damaged.
fn write_sound(kind: usize, root: &Path) -> (Source, Vec<&'static str>) {
    let arrays = Arrays::small();
    match kind {
        0 | 1 => {
            write_idx(root, "train", 7, kind == 1);
            write_idx(root, "t10k", 3, kind == 1);
            let names: [&'static str; 2] = if kind == 0 {
                ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]
            } else {
                ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
            };
            (Source::FashionMnist, names.to_vec())
        }
        2 => {
            write_cifar10(root, 1);
            fs::write(root.join("batches.meta.txt"), "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n").unwrap();
            (Source::Cifar10, vec!["data_batch_1.bin", "batches.meta.txt"])
        }
        3 => {
            for split in ["train", "test"] {
                save_rgb(&root.join(split).join("a/1.png"), 9, 8, 3);
                save_rgb(&root.join(split).join("a/2.jpg"), 9, 8, 5);
            }
            (Source::Folder, vec!["train/a/1.png", "train/a/2.jpg"])
        }
        4 => {
            fs::write(root.join("data.npz"), npz_bytes(&arrays, false)).unwrap();
            (Source::Arrays, vec!["data.npz"])
        }
        5 => {
            fs::write(root.join("data.npz"), npz_bytes(&arrays, true)).unwrap();
            (Source::Arrays, vec!["data.npz"])
        }
        7 => {
            save_rgb(&root.join("1.png"), 9, 8, 3);
            save_rgb(&root.join("2.jpg"), 7, 8, 5);
            fs::write(root.join("a.csv"), "path,label,split\n1.png,a,train\n2.jpg,b,test\n")
                .unwrap();
            (Source::Csv, vec!["a.csv", "1.png", "2.jpg"])
        }
        8 | 9 => {
            let bytes = if kind == 8 { with_numbers() } else { with_labels() };
            fs::write(root.join("data.safetensors"), bytes).unwrap();
            (Source::Arrays, vec!["data.safetensors"])
        }
        _ => {
            fs::write(root.join("data.safetensors"), safetensors_bytes(&arrays)).unwrap();
            (Source::Arrays, vec!["data.safetensors"])
        }
    }
}

/// Three training samples and a test sample, with two numbers each.
fn with_numbers() -> Vec<u8> {
    let numbers: Vec<u8> = [1.0_f64, 5.0, 2.0, 5.0, 4.0, 5.0].map(f64::to_le_bytes).concat();
    with_targets(["train_targets", "test_targets"], Dtype::F64, &numbers)
}

/// The same samples with two labels each.
fn with_labels() -> Vec<u8> {
    with_targets(["train_labels", "test_labels"], Dtype::BOOL, &[1, 0, 1, 1, 0, 0])
}

fn with_targets([train, test]: [&str; 2], dtype: Dtype, targets: &[u8]) -> Vec<u8> {
    let tensor = |dtype, n, bytes| TensorView::new(dtype, vec![n, 2], bytes).unwrap();
    let views = [
        ("train_inputs", tensor(Dtype::U8, 3, &[1, 2, 3, 4, 5, 6])),
        (train, tensor(dtype, 3, targets)),
        ("test_inputs", tensor(Dtype::U8, 1, &[7, 8])),
        (test, tensor(dtype, 1, &targets[..targets.len() / 3])),
    ];
    safetensors::serialize(views, None).unwrap()
}

/// No file here is larger than 20 kB, and deflate expands at most 1032 times. An allocation beyond
/// this total fails, which ends the test.
const MEMORY_MAX: usize = 64 << 20;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, MEMORY_MAX);

proptest! {
    #![proptest_config(ProptestConfig::default())]

    #[test]
    fn damage_is_an_error_and_no_panic(
        kind in 0..10_usize,
        resize in prop::option::of(1..20_u32),
        which in any::<Index>(),
        mutations in prop::collection::vec(any_mutation(), 1..4),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (source, names) = write_sound(kind, folder.path());
        let path = folder.path().join(which.get(&names));
        let mut bytes = fs::read(&path).unwrap();
        mutations.iter().for_each(|mutation| mutate(&mut bytes, mutation));
        fs::write(&path, &bytes).unwrap();
        let root = match source {
            Source::Csv => folder.path().join("a.csv"),
            _ => folder.path().to_path_buf(),
        };
        let spec = DatasetSpec { resize, ..spec_of(source, &root) };
        if let Err(error) = verify(&spec) {
            let text = error.to_string();
            // A damaged list may name files elsewhere.
            let elsewhere = source == Source::Csv && text.starts_with("cannot ");
            let named = text.contains(folder.path().to_str().unwrap());
            prop_assert!(named || elsewhere, "{text}");
        }
    }
}
