//! Datasets on disk (D9): every format is read correctly, every kind of damage is named with file
//! and offset.

use std::fs;
use std::path::Path;

use meristem_data::{
    DatasetFiles, DatasetSpec, Error, Residency, Source, Split, cache, import_cifar10, verify,
};

use crate::common::files::*;
use crate::common::{cpu, read_split};

pub(crate) fn open_error(spec: &DatasetSpec) -> Error {
    DatasetFiles::open(spec).unwrap_err()
}

/// The error of opening, or of reading everything.
pub(crate) fn any_error(spec: &DatasetSpec) -> Error {
    DatasetFiles::open(spec)
        .and_then(|_| {
            let device = cpu(1);
            cache::load(&device, spec, Split::Train, Residency::Resident)?;
            cache::load(&device, spec, Split::Test, Residency::Resident)
        })
        .unwrap_err()
}

fn assert_damaged(error: &Error, file: &str, at: u64, parts: &[&str]) {
    let text = error.to_string();
    match error {
        Error::Damaged { path, offset, .. } => {
            assert!(path.ends_with(file), "{text}");
            assert_eq!(*offset, at, "{text}");
        }
        other => panic!("{other:?}"),
    }
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn the_embedded_subset_is_balanced_and_pinned() {
    let report = verify(&DatasetSpec::embedded()).unwrap();
    assert!(report.is_sound());
    assert_eq!(report.image, [1, 28, 28]);
    assert!(report.splits[0].per_class.iter().all(|(_, count)| *count == 1000));
    assert!(report.splits[1].per_class.iter().all(|(_, count)| *count == 250));
    let info = DatasetFiles::open(&DatasetSpec::embedded()).unwrap().info().unwrap();
    assert_eq!((info.train_len, info.test_len, info.skipped), (10_000, Some(2_500), 0));
    assert_eq!(info.classes[9], "Ankle boot");
    assert!((info.mean[0] - 0.286).abs() < 0.005 && (info.std[0] - 0.353).abs() < 0.005);
    let (images, labels) = read_split(&DatasetSpec::embedded(), Split::Train);
    assert_eq!(&labels[..5], [9, 0, 0, 3, 0]); // as the original begins
    assert_eq!(images.len(), 10_000 * 784);
}

#[test]
fn idx_files_plain_gzip_and_nested() {
    for (nested, gzip) in [(false, false), (false, true), (true, true)] {
        let folder = tempfile::tempdir().unwrap();
        let root =
            if nested { folder.path().join("FashionMNIST/raw") } else { folder.path().into() };
        fs::create_dir_all(&root).unwrap();
        let train = write_idx(&root, "train", 7, gzip);
        let test = write_idx(&root, "t10k", 3, gzip);
        let spec = spec_of(Source::FashionMnist, folder.path());
        assert_eq!(read_split(&spec, Split::Train), train);
        assert_eq!(read_split(&spec, Split::Test), test);
    }
}

#[test]
fn damaged_idx_files_are_named() {
    let damage = |name: &str, gzip: bool, change: &dyn Fn(&mut Vec<u8>)| {
        let folder = tempfile::tempdir().unwrap();
        write_idx(folder.path(), "train", 7, gzip);
        write_idx(folder.path(), "t10k", 3, gzip);
        let path = folder.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        any_error(&spec_of(Source::FashionMnist, folder.path()))
    };
    let images = "train-images-idx3-ubyte";
    let labels = "train-labels-idx1-ubyte";
    let error = damage(images, false, &|b| b.truncate(50));
    assert_damaged(&error, images, 4, &["50 bytes that the file has", "226 bytes"]);
    let error = damage(images, false, &|b| b.truncate(10));
    assert_damaged(&error, images, 10, &["the end of the file"]);
    let error = damage(images, false, &|b| b.push(0));
    assert_damaged(&error, images, 4, &["227 bytes"]);
    let error = damage(images, false, &|b| b[3] = 1);
    assert_damaged(&error, images, 0, &["0x00000803", "0x00000801 (labels)"]);
    let error = damage(images, false, &|b| b[4..16].fill(255));
    assert_damaged(&error, images, 8, &["rows", "4294967295"]);
    let error = damage(images, false, &|b| b[4] = 255);
    assert_damaged(&error, images, 4, &["226 bytes that the file has"]);
    let error = damage(labels, false, &|b| b[8 + 4] = 10);
    assert_damaged(&error, labels, 12, &["must be below 10", "got 10"]);
    let error = damage(labels, false, &|b| (b[7], _) = (6, b.pop()));
    assert_damaged(&error, labels, 4, &["7, the number of images", "got 6"]);
    let gz = format!("{images}.gz");
    let error = damage(&gz, true, &|b| b.truncate(b.len() / 2));
    assert!(error.to_string().contains(&gz) && error.is_damage(), "{error}");
    let error = damage(&gz, true, &|b| *b = gzipped(&idx_images(1 << 30, &[0; 100])));
    assert_damaged(&error, &gz, 4, &["at most", "compressed"]);
    let error = damage(&gz, true, &|b| {
        let end = b.len() - 8; // the checksum
        b[end] ^= 1;
    });
    assert!(error.to_string().contains(&gz) && error.is_damage(), "{error}");
    // A test file of another size than the training file.
    let error = damage("t10k-images-idx3-ubyte", false, &|b| (b[11], b[15]) = (6, 5));
    assert_damaged(&error, "t10k-images-idx3-ubyte", 8, &["5×6", "6×5"]);
}

#[test]
fn missing_datasets_say_where_to_get_them() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path();
    for source in Source::ALL.into_iter().filter(|source| source.has_files()) {
        let text = open_error(&DatasetSpec::new(source)).to_string();
        assert!(text.contains("--data-root") && text.contains(source.name()), "{text}");
        for root in [here.to_path_buf(), here.join("no/such/folder")] {
            let error = open_error(&spec_of(source, &root));
            assert!(matches!(error, Error::Missing { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(source.where_to_get()), "{text}");
        }
    }
    write_cifar10(here, 3);
    fs::remove_file(here.join("data_batch_4.bin")).unwrap();
    let error = open_error(&spec_of(Source::Cifar10, here));
    let Error::Missing { expected, .. } = error else { panic!("{error}") };
    assert_eq!(expected, ["data_batch_4.bin"]);
    // A published set without its test files is an incomplete copy.
    write_cifar10(here, 3);
    fs::remove_file(here.join("test_batch.bin")).unwrap();
    let error = open_error(&spec_of(Source::Cifar10, here));
    let Error::Missing { expected, .. } = error else { panic!("{error}") };
    assert_eq!(expected, ["test_batch.bin"]);
    let error = "imagenet".parse::<Source>().unwrap_err();
    assert!(matches!(error, Error::Argument { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("`imagenet`") && text.contains("fashion-mnist"), "{text}");
}

#[test]
fn cifar_files() {
    let folder = tempfile::tempdir().unwrap();
    let (train, test) = write_cifar10(&folder.path().join("cifar-10-batches-bin"), 3);
    let spec = spec_of(Source::Cifar10, folder.path());
    assert_eq!(read_split(&spec, Split::Train), train);
    assert_eq!(read_split(&spec, Split::Test), test);
    let info = DatasetFiles::open(&spec).unwrap().info().unwrap();
    assert_eq!((info.train_len, info.test_len, info.channels, info.height), (15, Some(3), 3, 32));
    assert_eq!(info.classes[9], "truck");

    let folder = tempfile::tempdir().unwrap();
    let mut bytes = vec![];
    for i in 0..4_u8 {
        bytes.extend([i, 99 - i]);
        bytes.extend([i; 3072]);
    }
    fs::write(folder.path().join("train.bin"), &bytes).unwrap();
    fs::write(folder.path().join("test.bin"), &bytes[..3074]).unwrap();
    let spec = spec_of(Source::Cifar100, folder.path());
    assert_eq!(read_split(&spec, Split::Train).1, [99, 98, 97, 96]);
    let info = DatasetFiles::open(&spec).unwrap().info().unwrap();
    assert_eq!((info.classes.len(), info.classes[99].as_str()), (100, "worm"));
    bytes[3074] = 20;
    fs::write(folder.path().join("train.bin"), &bytes).unwrap();
    assert_damaged(&any_error(&spec), "train.bin", 3074, &["must be below 20", "got 20"]);
}

#[test]
fn damaged_cifar_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let spec = spec_of(Source::Cifar10, folder.path());
    let damage = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        write_cifar10(folder.path(), 3);
        let path = folder.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        any_error(&spec)
    };
    let error = damage("data_batch_2.bin", &|b| b.truncate(5000));
    assert_damaged(&error, "data_batch_2.bin", 5000, &["multiple of 3073", "1 records and 1927"]);
    let error = damage("test_batch.bin", &|b| b[2 * 3073] = 11);
    assert_damaged(&error, "test_batch.bin", 2 * 3073, &["must be below 10", "got 11"]);
    fs::write(folder.path().join("batches.meta.txt"), "only\ntwo\n").unwrap();
    let error = any_error(&spec);
    assert_damaged(&error, "batches.meta.txt", 9, &["10 names", "got 2"]);
    fs::write(folder.path().join("batches.meta.txt"), b"ok\n\xff\xfe").unwrap();
    assert_damaged(&any_error(&spec), "batches.meta.txt", 3, &["UTF-8"]);
}

/// A copy that is interrupted may end between two records.
#[test]
fn a_cifar_file_with_too_few_records_is_named() {
    let cut = |path: &Path, records: u64| {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(records * 3073).unwrap();
    };
    // The published set, recognised by its size: zeros are sound records of class 0.
    let folder = tempfile::tempdir().unwrap();
    write_cifar10(folder.path(), 1);
    let names = (1..6).map(|i| format!("data_batch_{i}.bin")).chain(["test_batch.bin".into()]);
    let paths: Vec<_> = names.map(|name| folder.path().join(name)).collect();
    paths.iter().for_each(|path| cut(path, 10_000));
    let spec = spec_of(Source::Cifar10, folder.path());
    DatasetFiles::open(&spec).unwrap();
    for (i, path) in paths.iter().enumerate() {
        cut(path, 9_000);
        let name = path.file_name().unwrap().to_str().unwrap();
        let parts = ["number of records", "10000 as in the published set", "got 9000"];
        assert_damaged(&open_error(&spec), name, 9_000 * 3073, &parts);
        cut(path, 10_000);
        assert!(DatasetFiles::open(&spec).is_ok(), "{i}");
    }
    // A set of another size lists its own numbers of records.
    let folder = tempfile::tempdir().unwrap();
    write_cifar10(folder.path(), 3);
    let spec = spec_of(Source::Cifar10, folder.path());
    cut(&folder.path().join("test_batch.bin"), 2);
    fs::write(folder.path().join("records.txt"), "data_batch_1.bin 3\ntest_batch.bin 3\n").unwrap();
    let parts = ["3 as in records.txt", "got 2"];
    assert_damaged(&open_error(&spec), "test_batch.bin", 2 * 3073, &parts);
    fs::write(folder.path().join("records.txt"), "test_batch.bin two\n").unwrap();
    assert_damaged(&open_error(&spec), "records.txt", 0, &["`NAME COUNT`", "test_batch.bin two"]);
    cut(&folder.path().join("test_batch.bin"), 0);
    fs::remove_file(folder.path().join("records.txt")).unwrap();
    let error = open_error(&spec);
    assert!(matches!(error, Error::EmptySplit { split: "test", .. }), "{error}");
    assert!(error.to_string().contains("the test split is empty"), "{error}");
}

#[test]
fn every_bad_label_of_a_cifar_split_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write_cifar10(folder.path(), 3);
    let bad = [("data_batch_1.bin", 1), ("data_batch_1.bin", 2), ("data_batch_4.bin", 0)];
    for (name, record) in bad {
        let path = folder.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[record * 3073] = 200;
        fs::write(&path, bytes).unwrap();
    }
    let spec = spec_of(Source::Cifar10, folder.path());
    let report = verify(&spec).unwrap();
    assert_eq!((report.splits[0].images, report.splits[1].images), (12, 3));
    let errors: Vec<_> = report.splits[0].damaged.iter().map(|damage| &damage.error).collect();
    assert_eq!(errors.len(), 3);
    for ((name, record), error) in bad.iter().zip(errors) {
        assert!(
            error.contains(name) && error.contains(&format!("byte {}", record * 3073)),
            "{error}"
        );
    }
    assert_damaged(
        &any_error(&spec),
        "data_batch_1.bin",
        3073,
        &["below 10", "got 200", "--skip-bad"],
    );
    // Skipped records leave the others in order.
    let lenient = DatasetSpec { skip_bad: true, ..spec };
    let (images, labels) = read_split(&lenient, Split::Train);
    let sound = write_cifar10(folder.path(), 3).0;
    let kept = |i: &usize| ![1, 2, 9].contains(i);
    let expected: Vec<u32> = (0..15).filter(kept).map(|i| sound.1[i]).collect();
    assert_eq!(labels, expected);
    let expected: Vec<&[u8]> = (0..15).filter(kept).map(|i| &sound.0[i * 3072..][..3072]).collect();
    assert_eq!(images, expected.concat());
}

#[test]
fn arrays_of_both_kinds() {
    for kind in ["npz", "npz-deflated", "safetensors"] {
        let folder = tempfile::tempdir().unwrap();
        let path = write_arrays(folder.path(), kind, &Arrays::small());
        let arrays = Arrays::small();
        for root in [folder.path(), path.as_path()] {
            let spec = spec_of(Source::Arrays, root);
            let labels = arrays.train_labels.iter().map(|l| *l as u32).collect();
            assert_eq!(
                read_split(&spec, Split::Train),
                (arrays.train_images.clone(), labels),
                "{kind}"
            );
            let info = DatasetFiles::open(&spec).unwrap().info().unwrap();
            assert_eq!((info.train_len, info.test_len, info.channels), (3, Some(2), 2), "{kind}");
            assert_eq!(info.classes, ["0", "1", "2"], "{kind}");
        }
    }
}

/// A dataset without a test split can be trained on; a request for the split says what is missing.
#[test]
fn no_test_split_is_a_state_and_an_empty_one_an_error() {
    let check = |spec: &DatasetSpec, train: &Samples, missing: &str| {
        for skip_bad in [false, true] {
            let spec = DatasetSpec { skip_bad, ..spec.clone() };
            assert_eq!(read_split(&spec, Split::Train), *train);
            let files = DatasetFiles::open(&spec).unwrap();
            assert!(files.has(Split::Train) && !files.has(Split::Test));
            let info = files.info().unwrap();
            assert_eq!((info.train_len, info.test_len, info.skipped), (train.1.len(), None, 0));
            let load = cache::load(&cpu(1), &spec, Split::Test, Residency::Resident);
            for error in [files.check_has(Split::Test).unwrap_err(), load.unwrap_err()] {
                assert!(matches!(error, Error::NoTestSplit { .. }), "{error}");
                let text = error.to_string();
                assert!(text.contains("no test split") && text.contains(missing), "{text}");
            }
            let report = verify(&spec).unwrap();
            assert!(report.is_sound() && report.splits.len() == 1, "{report:?}");
            assert_eq!(report.splits[0].split, Split::Train);
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let (train, _) = write_folder(folder.path(), 2, 1);
    let test = folder.path().join("test");
    fs::remove_dir_all(&test).unwrap();
    let spec = spec_of(Source::Folder, folder.path());
    check(&spec, &train, "test/CLASS/*");
    let target = tempfile::tempdir().unwrap();
    let folder_32 = tempfile::tempdir().unwrap();
    for class in 0..10 {
        save_rgb(&folder_32.path().join(format!("train/{class}/a.png")), 32, 32, 1);
    }
    let error = import_cifar10(folder_32.path(), target.path(), false).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Layout { .. }) && text.contains("the test split"), "{text}");
    // An empty or dangling test split is an error, not a missing split.
    fs::create_dir(&test).unwrap();
    assert!(matches!(open_error(&spec), Error::EmptySplit { split: "test", .. }));
    fs::remove_dir(&test).unwrap();
    fs::write(&test, "x").unwrap();
    assert!(matches!(open_error(&spec), Error::Missing { .. }));
    #[cfg(unix)]
    {
        fs::remove_file(&test).unwrap();
        std::os::unix::fs::symlink("nowhere", &test).unwrap();
        assert!(matches!(open_error(&spec), Error::Missing { .. }));
    }
    for kind in ["npz", "npz-deflated", "safetensors"] {
        let folder = tempfile::tempdir().unwrap();
        let arrays = Arrays { leave_out: Some("test"), ..Arrays::small() };
        let path = write_arrays(folder.path(), kind, &arrays);
        let labels = arrays.train_labels.iter().map(|label| *label as u32).collect();
        check(&spec_of(Source::Arrays, &path), &(arrays.train_images, labels), "`test_images`");
    }
}

#[test]
fn damaged_arrays_are_named() {
    let damage = |kind: &str, change: &dyn Fn(&mut Arrays)| {
        let folder = tempfile::tempdir().unwrap();
        let mut arrays = Arrays::small();
        change(&mut arrays);
        write_arrays(folder.path(), kind, &arrays);
        any_error(&spec_of(Source::Arrays, folder.path()))
    };
    for kind in ["npz", "safetensors"] {
        let text = damage(kind, &|a| a.train_labels[1] = -1).to_string();
        assert!(text.contains("must be from 0") && text.contains("int64"), "{kind}: {text}");
        let text = damage(kind, &|a| a.test_labels[0] = 3).to_string();
        assert!(text.contains("must be below 3") && text.contains("test"), "{kind}: {text}");
        let text = damage(kind, &|a| a.train_labels.truncate(2)).to_string();
        assert!(
            text.contains("[3], one for each sample") && text.contains("[2]"),
            "{kind}: {text}"
        );
        let text = damage(kind, &|a| a.channels = 0).to_string();
        assert!(text.contains("C from 1 to 4"), "{kind}: {text}");
        for name in ["test_images", "test_labels", "train_images"] {
            let error = damage(kind, &|a| a.leave_out = Some(name));
            assert!(matches!(error, Error::Missing { .. }), "{kind}: {error}");
            assert!(error.to_string().contains(&format!("`{name}`")), "{kind}: {error}");
        }
        for (name, split) in [("train", Split::Train), ("test", Split::Test)] {
            let error = damage(kind, &|a| match split {
                Split::Train => (a.train_images, a.train_labels) = (vec![], vec![]),
                Split::Test => (a.test_images, a.test_labels) = (vec![], vec![]),
            });
            assert!(matches!(error, Error::EmptySplit { split: s, .. } if s == name), "{error}");
            assert!(error.to_string().contains(&format!("the {name} split is empty")), "{error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = write_arrays(folder.path(), kind, &Arrays::small());
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 10]).unwrap();
        let error = any_error(&spec_of(Source::Arrays, folder.path()));
        assert!(error.is_damage(), "{kind}: {error}");
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(error.to_string().contains(name), "{kind}: {error}");
        fs::copy(&path, folder.path().join("second.npz")).unwrap();
        let text = any_error(&spec_of(Source::Arrays, folder.path())).to_string();
        assert!(text.contains("second.npz"), "{text}");
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("data.npz"), "no archive").unwrap();
    let error = open_error(&spec_of(Source::Arrays, folder.path()));
    assert_damaged(&error, "data.npz", 0, &["a zip archive, as numpy.savez writes it"]);
}
