//! The resident copy, its variants and the cache that shares it (D1, D7, D9).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "all/common/mod.rs"]
mod common;

use std::fs;
use std::path::{Path, PathBuf};

use meristem_data::order::EpochMode;
use meristem_data::{
    Dataset, DatasetSpec, Error, GatherConfig, Normalization, Residency, SampleShape, Source,
    Split, cache,
};
use meristem_device::DeviceId;

use common::files::*;
use common::{
    cpu, epoch_of, own_options_are_those_of_all, own_samples_are_those_of_all, read_split,
};

/// D1: one copy, shared; freed and counted by `clear`; a failed load leaves nothing.
#[test]
fn the_cache_holds_one_copy() {
    let folder = tempfile::tempdir().unwrap();
    write_cifar10(folder.path(), 40);
    let root = folder.path().canonicalize().unwrap();
    let spec = spec_of(Source::Cifar10, folder.path());
    let (device, other) = (cpu(2), cpu(2));
    let dotted = spec_of(Source::Cifar10, &folder.path().join("."));
    let ids: Vec<u64> = std::thread::scope(|scope| {
        let load = |spec: DatasetSpec| {
            let device = device.clone();
            move || {
                let data = cache::load(&device, &spec, Split::Train, Residency::Resident).unwrap();
                data.resident().unwrap().storage_id()
            }
        };
        let specs = (0..8).map(|i| if i % 2 == 0 { spec.clone() } else { dotted.clone() });
        let threads: Vec<_> = specs.map(|spec| scope.spawn(load(spec))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    let bytes = 200 * (3072 + 4);
    assert_eq!(device.memory().current, bytes, "one copy of images and labels");
    let f32s = cache::load(&device, &spec, Split::Train, Residency::ResidentF32).unwrap();
    assert_ne!(f32s.resident().unwrap().storage_id(), ids[0]);
    let budget = Residency::Auto { budget: bytes };
    let auto = cache::load(&device, &spec, Split::Train, budget).unwrap();
    assert_eq!(auto.resident().unwrap().storage_id(), ids[0]);
    let budget = Residency::Auto { budget: bytes - 1 };
    let streamed = cache::load(&device, &spec, Split::Train, budget).unwrap();
    assert!(streamed.resident().is_none());
    cache::load(&other, &spec, Split::Train, Residency::Resident).unwrap();
    drop((f32s, auto, streamed));
    let ours = |key: &cache::CacheKey| key.root.as_deref() == Some(root.as_path());
    assert_eq!(cache::clear(|key| ours(key) && key.residency == Residency::Streamed), 1);
    assert_eq!(cache::clear(ours), 3);
    assert_eq!(cache::clear(ours), 0);
    assert_eq!((device.memory().current, other.memory().current), (0, 0));
}

/// D9: a failed load leaves no memory and no entry, and the next load reads the repaired file.
#[test]
fn a_failed_load_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (train, _) = write_cifar10(folder.path(), 3);
    let path = folder.path().join("data_batch_5.bin");
    let sound = fs::read(&path).unwrap();
    let spec = spec_of(Source::Cifar10, folder.path());
    let device = cpu(2);
    for residency in [Residency::Resident, Residency::ResidentF32, Residency::Streamed] {
        let mut broken = sound.clone();
        broken[3073] = 77;
        fs::write(&path, &broken).unwrap();
        let error = cache::load(&device, &spec, Split::Train, residency).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
        let words = "data_batch_5.bin: damaged at byte 3073";
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(device.memory().current, 0);
        let root = spec.root.as_ref().unwrap().canonicalize().unwrap();
        assert_eq!(cache::clear(|key| key.root.as_deref() == Some(root.as_path())), 0);
        fs::write(&path, &sound).unwrap();
        cache::load(&device, &spec, Split::Train, residency).unwrap();
        assert_eq!(read_split(&spec, Split::Train), train);
    }
}

/// A rewritten file of equal size and time is loaded again. A holder of the old copy keeps it, and
/// files that were opened before are not read any more.
#[test]
fn a_rewritten_file_is_loaded_anew() {
    for kind in ["npz", "safetensors"] {
        let folder = tempfile::tempdir().unwrap();
        let old = Arrays::small();
        let mut new = old.clone();
        new.train_images.reverse();
        new.train_labels = vec![0, 1, 2];
        let path = write_arrays(folder.path(), kind, &old);
        let time = fs::metadata(&path).unwrap().modified().unwrap();
        let spec = spec_of(Source::Arrays, &path);
        let device = cpu(1);
        let pixels = |data: &Dataset| data.resident().unwrap().to_vec::<u8>().unwrap();
        let labels = |data: &Dataset| data.targets().to_vec::<u32>().unwrap();
        let load = |split| cache::load(&device, &spec, split, Residency::Resident);
        let held = load(Split::Train).unwrap();
        let opened = cache::files(&spec).unwrap();
        write_arrays(folder.path(), kind, &new);
        fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        let error = cache::load_files(&device, &opened, Split::Test, Residency::Resident);
        assert!(matches!(error.unwrap_err(), Error::Changed { .. }), "{kind}");
        let loaded = load(Split::Train).unwrap();
        assert_eq!((pixels(&loaded), labels(&loaded)), (new.train_images.clone(), vec![0, 1, 2]));
        assert_eq!((pixels(&held), labels(&held)), (old.train_images.clone(), vec![2, 0, 1]));
        let again = load(Split::Train).unwrap();
        assert_eq!(again.resident().unwrap().storage_id(), {
            loaded.resident().unwrap().storage_id()
        });
        // Another shape, too.
        let more = Arrays {
            train_images: (0..48).collect(),
            train_labels: vec![1, 2, 0, 2],
            ..Arrays::small()
        };
        write_arrays(folder.path(), kind, &more);
        assert_eq!(pixels(&load(Split::Train).unwrap()), more.train_images);
        drop((loaded, again));
        let root = path.canonicalize().unwrap();
        assert_eq!(cache::clear(|key| key.root.as_deref() == Some(&root)), 1, "one entry is left");
    }
}

/// The files of every kind of dataset are watched, and so are added names.
#[test]
fn every_kind_of_dataset_notices_a_change() {
    type Change<'a> = (Source, &'a dyn Fn(&Path));
    let changes: [Change<'_>; 5] = [
        (Source::FashionMnist, &|root| _ = write_idx(root, "train", 5, false)),
        (Source::Cifar10, &|root| {
            fs::write(root.join("batches.meta.txt"), "a\nb\nc\nd\ne\nf\ng\nh\ni\nk\n").unwrap();
        }),
        (Source::Folder, &|root| save_rgb(&root.join("train/ant/new.png"), 6, 5, 77)),
        (Source::Folder, &|root| save_rgb(&root.join("test/bee/000.png"), 6, 5, 78)),
        (Source::Csv, &|root| save_rgb(&root.join("train/cat/001.png"), 6, 5, 79)),
    ];
    for (source, change) in changes {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let mut spec = spec_of(source, root);
        match source {
            Source::FashionMnist => {
                write_idx(root, "train", 7, false);
                write_idx(root, "t10k", 3, false);
            }
            Source::Cifar10 => _ = write_cifar10(root, 2),
            _ => _ = write_folder(root, 2, 2),
        }
        if source == Source::Csv {
            let list = root.join("list.csv");
            fs::write(&list, "path,label\ntrain/ant/000.png,a\ntrain/cat/001.png,b\n").unwrap();
            spec.root = Some(list);
        }
        let files = || cache::files(&spec).unwrap();
        let before = files();
        assert!(std::sync::Arc::ptr_eq(&before, &files()), "{source}: nothing has changed");
        change(root);
        assert!(!std::sync::Arc::ptr_eq(&before, &files()), "{source}");
    }
}

/// Permissions, links to an image, and names that begin with a dot are not changes of a dataset.
#[test]
#[cfg(unix)]
fn the_contents_decide_whether_files_have_changed() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_folder(root, 2, 2);
    let spec = spec_of(Source::Folder, root);
    let (device, files) = (cpu(1), cache::files(&spec).unwrap());
    let load = |split| cache::load_files(&device, &files, split, Residency::Resident);
    let image = root.join("train/ant/000.png");
    fs::set_permissions(&image, fs::Permissions::from_mode(0o600)).unwrap();
    fs::hard_link(&image, root.join("link.png")).unwrap();
    fs::write(root.join("train/ant/.DS_Store"), "x").unwrap();
    load(Split::Train).unwrap();
    // A training image changes after it was read and before the test images are read.
    save_rgb(&image, 6, 5, 77);
    let error = load(Split::Test).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error:?}");
}

/// D1: the load's extra device memory is one chunk: only the copy itself is ever allocated.
#[test]
fn a_load_is_one_shot() {
    let folder = tempfile::tempdir().unwrap();
    write_cifar10(folder.path(), 400); // 6 MB, several chunks
    let spec = spec_of(Source::Cifar10, folder.path());
    let device = cpu(1);
    let dataset = cache::load(&device, &spec, Split::Train, Residency::Resident).unwrap();
    assert_eq!(device.memory().peak, 2000 * (3072 + 4));
    assert_eq!(dataset.info().mean.len(), 3);
    cache::clear(|key| key.root == spec.root.as_ref().and_then(|r| r.canonicalize().ok()));
}

/// D7 and the f32 variant: same interface, same order, same bits as the resident copy.
#[test]
fn every_residency_serves_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), 30, 7);
    let spec = spec_of(Source::Folder, folder.path());
    for augment in ["none", "crop=2,flip,cutout=2"] {
        for (batch, envs, shuffle, epoch_mode) in [
            (7, 1, true, EpochMode::Dealt),
            (4, 3, true, EpochMode::Dealt),
            (4, 3, true, EpochMode::Full),
            (16, 2, false, EpochMode::Dealt),
        ] {
            let config = GatherConfig {
                augment: augment.parse().unwrap(),
                epoch_mode,
                shuffle,
                seed: 5,
                ..GatherConfig::new(batch, vec![DeviceId::Cpu(0); envs])
            };
            let epochs = |residency, split| {
                let device = cpu(2);
                let dataset = cache::load(&device, &spec, split, residency).unwrap();
                [0, 1].map(|epoch| epoch_of(&device, &dataset, &config, epoch))
            };
            for split in Split::ALL {
                let resident = epochs(Residency::Resident, split);
                assert!(!resident[0].is_empty());
                assert!(epochs(Residency::Streamed, split) == resident, "{config:?}");
                assert!(epochs(Residency::ResidentF32, split) == resident, "{config:?}");
            }
        }
    }
    for residency in [Residency::Streamed, Residency::ResidentF32] {
        let device = cpu(2);
        let dataset = cache::load(&device, &spec, Split::Train, residency).unwrap();
        own_options_are_those_of_all(&device, &dataset);
        own_samples_are_those_of_all(&device, &dataset);
    }
    cache::clear(|key| key.source == Source::Folder && key.root == canonical(&folder));
}

/// Equal data with equal storage have one checksum; a changed image or label changes it.
#[test]
fn a_checksum_tells_data_apart() {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), 12, 3);
    let spec = spec_of(Source::Folder, folder.path());
    let sum = |residency| {
        let load = || cache::load(&cpu(1), &spec, Split::Train, residency).unwrap();
        let sums = [load(), load()].map(|dataset| dataset.checksum().unwrap());
        assert_eq!(sums[0], sums[1], "{residency:?}");
        sums[0]
    };
    assert_eq!(sum(Residency::Resident), sum(Residency::Streamed));
    assert_ne!(sum(Residency::Resident), sum(Residency::ResidentF32));
    cache::clear(|key| key.source == Source::Folder && key.root == canonical(&folder));
    let shape = SampleShape { channels: 1, height: 2, width: 2 };
    let of = |images: [u8; 8], labels: [u32; 2]| {
        let classes = vec!["a".into(), "b".into()];
        let dataset = Dataset::from_slices(&cpu(1), shape, &images, &labels, classes).unwrap();
        dataset.checksum().unwrap()
    };
    let images = [1, 2, 3, 4, 5, 6, 7, 8];
    let mut other = images;
    other[7] = 9;
    let all = [of(images, [0, 1]), of(images, [1, 0]), of(other, [0, 1])];
    assert!(all[0] != all[1] && all[0] != all[2] && all[0] == of(images, [0, 1]));
}

/// The constants of the training split serve the test split.
#[test]
fn the_test_split_is_normalised_like_training() {
    let folder = tempfile::tempdir().unwrap();
    let ((train, _), _) = write_folder(folder.path(), 5, 5);
    let device = cpu(1);
    let spec = spec_of(Source::Folder, folder.path());
    let test = cache::load(&device, &spec, Split::Test, Residency::Resident).unwrap();
    let Normalization { mean, std } = test.normalization();
    for c in 0..3 {
        let values: Vec<f64> =
            train.iter().skip(c).step_by(3).map(|v| f64::from(*v) / 255.0).collect();
        let expected = values.iter().sum::<f64>() / values.len() as f64;
        let variance =
            values.iter().map(|v| (v - expected).powi(2)).sum::<f64>() / values.len() as f64;
        assert!((f64::from(mean[c]) - expected).abs() < 1e-6);
        assert!((f64::from(std[c]) - variance.sqrt()).abs() < 1e-6);
    }
    cache::clear(|key| key.root == canonical(&folder));
}

fn canonical(folder: &tempfile::TempDir) -> Option<PathBuf> {
    Some(Path::canonicalize(folder.path()).unwrap())
}
