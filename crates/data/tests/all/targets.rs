//! Targets that are labels or numbers: their files and standardisation (D12, D13, D15).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use meristem_data::{
    Dataset, DatasetFiles, DatasetSpec, Error, GatherBatches, GatherConfig, InputKind, Residency,
    SampleShape, SampleTargets, Source, Split, TargetKind, cache, verify,
};
use meristem_device::{DType, DeviceId};

use crate::common::cpu;
use crate::common::files::spec_of;
use crate::inputs::{Named, floats, info_of, labels, words, write_npz};
use crate::refusals::notes_of;
use crate::sources::any_error;

fn write_safetensors(folder: &Path, arrays: &[Named]) -> PathBuf {
    use safetensors::{Dtype, tensor::TensorView};
    let views = arrays.iter().map(|Named(name, dtype, shape, bytes)| {
        let dtype = match *dtype {
            "|b1" => Dtype::BOOL,
            "|u1" => Dtype::U8,
            "<i2" => Dtype::I16,
            "<i8" => Dtype::I64,
            "<f4" => Dtype::F32,
            _ => Dtype::F64,
        };
        (*name, TensorView::new(dtype, shape.clone(), bytes).unwrap())
    });
    let bytes = safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap();
    let path = folder.join("data.safetensors");
    fs::write(&path, bytes).unwrap();
    path
}

/// An array of numbers of numpy's type `dtype`, which should represent them exactly.
pub(crate) fn numbers(
    name: &'static str,
    dtype: &'static str,
    shape: &[usize],
    values: &[f64],
) -> Named {
    let bytes = values.iter().flat_map(|value| match dtype {
        "|b1" | "|u1" => vec![*value as u8],
        "<i2" => (*value as i16).to_le_bytes().to_vec(),
        "<i8" => (*value as i64).to_le_bytes().to_vec(),
        "<f4" => (*value as f32).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    });
    Named(name, dtype, shape.to_vec(), bytes.collect())
}

/// Samples of one feature, whose value is the sample's index.
fn indices(name: &'static str, samples: usize) -> Named {
    let values: Vec<f32> = (0..samples).map(|i| i as f32).collect();
    floats(name, &[samples, 1], &values)
}

fn loaded(spec: &DatasetSpec, split: Split, residency: Residency) -> Arc<Dataset> {
    cache::load(&cpu(1), spec, split, residency).unwrap()
}

/// Mean and population deviation of the column `k` of `width`, in two passes.
fn two_passes(values: &[f64], k: usize, width: usize) -> (f64, f64) {
    let own: Vec<f64> = values.iter().skip(k).step_by(width).copied().collect();
    let n = own.len() as f64;
    let mean = own.iter().sum::<f64>() / n;
    (mean, (own.iter().map(|y| (y - mean).powi(2)).sum::<f64>() / n).sqrt())
}

/// Numbers of any type and shape are standardised by the constants of the training split. The
/// constants differ from those of two passes by some roundings of numbers below 2,000 in f64.
/// Stored numbers are below 4, so each is rounded to f32 by at most 2⁻²³; their mean and their
/// deviation are off by no more.
#[test]
fn numbers_of_every_type_are_standardised() {
    for width in [1, 3] {
        let value =
            |i: usize| [(i * i % 97) as f64 - 40.0, 1000.0 + i as f64, -3.0][i % width.max(2)];
        let train: Vec<f64> = (0..60 * width).map(value).collect();
        let test: Vec<f64> = (0..7 * width).map(|i| value(i + 5) - 1.0).collect();
        for dtype in ["<f4", "<f8", "<i2", "<i8"] {
            for write in [write_npz, write_safetensors] {
                let shape = |n: usize| if width == 1 { vec![n] } else { vec![n, width] };
                let folder = tempfile::tempdir().unwrap();
                let arrays = [
                    indices("train_inputs", 60),
                    numbers("train_targets", dtype, &shape(60), &train),
                    indices("test_inputs", 7),
                    numbers("test_targets", dtype, &shape(7), &test),
                ];
                let spec = spec_of(Source::Arrays, &write(folder.path(), &arrays));
                let info = info_of(&spec);
                assert_eq!((info.targets, info.classes.len()), (TargetKind::Numbers, width));
                assert!(info.per_class.is_empty() && info.classes[0] == "0");
                for k in 0..width {
                    let (mean, std) = two_passes(&train, k, width);
                    // The last of three columns is constant.
                    let std = if k == 2 { 1.0 } else { std };
                    assert!((info.target_mean[k] - mean).abs() < 1e-10, "{info:?}");
                    assert!((info.target_std[k] - std).abs() < 1e-10, "{info:?}");
                }
                for residency in [Residency::Resident, Residency::Streamed] {
                    for (split, source) in [(Split::Train, &train), (Split::Test, &test)] {
                        let data = loaded(&spec, split, residency);
                        assert_eq!(data.target_kind(), TargetKind::Numbers);
                        assert_eq!(data.targets().dims(), [source.len() / width, width]);
                        let stored = data.targets().to_vec::<f32>().unwrap();
                        for (i, (stored, y)) in stored.iter().zip(source).enumerate() {
                            let k = i % width;
                            let expected = ((y - info.target_mean[k]) / info.target_std[k]) as f32;
                            assert_eq!(*stored, expected, "{dtype} {i}");
                        }
                        let stored: Vec<f64> = stored.into_iter().map(f64::from).collect();
                        for k in (0..width).filter(|_| split == Split::Train) {
                            let (mean, std) = two_passes(&stored, k, width);
                            assert!(mean.abs() < 0.5_f64.powi(23), "{mean}");
                            let expected = if k == 2 { 0.0 } else { 1.0 };
                            assert!((std - expected).abs() < 0.5_f64.powi(23), "{std}");
                        }
                    }
                }
                cache::clear(|key| key.root == spec.root);
            }
        }
    }
}

/// A constant number is divided by 1, and its json has its constants; other datasets have none.
#[test]
fn a_constant_number_becomes_zero() {
    let folder = tempfile::tempdir().unwrap();
    let targets =
        numbers("train_targets", "<f8", &[4, 2], &[0.1, 1.0, 0.1, 2.0, 0.1, 3.0, 0.1, 4.0]);
    let names = words("classes", &["still", "rising"]);
    let path = write_npz(folder.path(), &[indices("train_inputs", 4), targets, names]);
    let spec = spec_of(Source::Arrays, &path);
    let info = info_of(&spec);
    assert_eq!((info.target_mean[0], info.target_std[0]), (0.1, 1.0));
    let stored =
        loaded(&spec, Split::Train, Residency::Resident).targets().to_vec::<f32>().unwrap();
    assert!(stored.iter().step_by(2).all(|value| *value == 0.0), "{stored:?}");
    let json = serde_json::to_value(&info).unwrap();
    assert_eq!(json["targets"], "numbers");
    assert_eq!(json["classes"], serde_json::json!(["still", "rising"]));
    assert_eq!(json["target_mean"], serde_json::json!([0.1, 2.5]));
    let json = serde_json::to_value(info_of(&DatasetSpec::embedded())).unwrap();
    assert_eq!((&json["targets"], json.get("target_std")), (&serde_json::json!("classes"), None));
}

/// Labels of every type, with the samples in which each is present.
#[test]
fn labels_of_every_type_are_read() {
    let present = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0];
    for dtype in ["|b1", "|u1", "<i2", "<i8", "<f4", "<f8"] {
        for write in [write_npz, write_safetensors] {
            let folder = tempfile::tempdir().unwrap();
            let targets = numbers("train_labels", dtype, &[4, 3], &present);
            let spec = spec_of(
                Source::Arrays,
                &write(folder.path(), &[indices("train_inputs", 4), targets]),
            );
            let info = info_of(&spec);
            assert_eq!((info.targets, info.per_class), (TargetKind::Labels, vec![2, 1, 2]));
            assert_eq!(
                (info.classes, info.target_mean),
                (["0", "1", "2"].map(String::from).into(), vec![])
            );
            let data = loaded(&spec, Split::Train, Residency::Resident);
            assert_eq!((data.targets().dtype(), data.targets().dims()), (DType::F32, &[4, 3][..]));
            let stored = data.targets().to_vec::<f32>().unwrap();
            assert_eq!(stored, present.map(|value| value as f32), "{dtype}");
            let report = verify(&spec).unwrap();
            assert_eq!((report.targets, report.splits[0].images), (TargetKind::Labels, 4));
            assert_eq!(report.splits[0].per_class[2], ("2".into(), 2));
            assert_eq!(notes_of(&spec), [""; 0]);
        }
    }
    // One label, and one that is partly present.
    let folder = tempfile::tempdir().unwrap();
    for (dtype, values) in [("|b1", [0.0, 1.0, 1.0]), ("<f4", [0.5, 0.75, 1.0])] {
        let targets = numbers("train_labels", dtype, &[3, 1], &values);
        let path = write_npz(folder.path(), &[indices("train_inputs", 3), targets]);
        let info = info_of(&spec_of(Source::Arrays, &path));
        assert_eq!((info.targets, info.per_class), (TargetKind::Labels, vec![2]));
    }
}

/// A note says that one-hot rows are trained as several labels.
#[test]
fn one_hot_labels_are_mentioned_once() {
    let folder = tempfile::tempdir().unwrap();
    let notes = |values: [f64; 6]| {
        let targets = numbers("train_labels", "<f4", &[3, 2], &values);
        let path = write_npz(folder.path(), &[indices("train_inputs", 3), targets]);
        notes_of(&spec_of(Source::Arrays, &path))
    };
    let [note] = &notes([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])[..] else { panic!() };
    assert!(note.contains("exactly one label") && note.contains("trained as 2 labels"), "{note}");
    assert!(note.contains("y.argmax(axis=1)"), "{note}");
    assert_eq!(notes([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), [""; 0]);
    assert_eq!(notes([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]), [""; 0]);
    assert_eq!(notes([1.0, 0.0, 0.0, 1.0, 0.5, 0.0]), [""; 0]);
}

#[test]
fn unusable_targets_are_named_with_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let check = |arrays: &[Named], parts: &[&str]| {
        let mut all = vec![indices("train_inputs", 3)];
        all.extend(arrays.iter().cloned());
        let spec = spec_of(Source::Arrays, &write_npz(folder.path(), &all));
        let error = any_error(&spec);
        let text = error.to_string();
        assert!(matches!(error, Error::Layout { .. } | Error::Missing { .. }), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    let targets = |values: &[f64]| numbers("train_targets", "<f8", &[3, values.len() / 3], values);
    for (value, name) in [(f64::NAN, "NaN"), (f64::NEG_INFINITY, "-inf"), (1e39, "10000")] {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, value];
        check(&[targets(&values)], &["number 1 of sample 2 of `train_targets`", "3.4e38", name]);
    }
    // Too far from the training samples.
    let far = numbers("test_targets", "<f8", &[1], &[1e30]);
    let near = numbers("train_targets", "<f8", &[3], &[0.0, 1e-20, 0.0]);
    let test = || indices("test_inputs", 1);
    check(&[near, test(), far], &["number 0 of sample 0 of `test_targets`", "deviation is"]);
    let three = || targets(&[1.0, 2.0, 3.0]);
    check(&[three(), labels("train_labels", &[0, 1, 2])], &["`train_labels` and `train_targets`"]);
    let other = labels("test_labels", &[0]);
    check(&[three(), test(), other], &["one pair of arrays", "`test_labels` and `train_targets`"]);
    let wide = numbers("test_targets", "<f8", &[1, 2], &[1.0, 2.0]);
    check(&[three(), test(), wide], &["1 numbers as in training", "got 2 numbers"]);
    check(&[three(), test()], &["`test_targets`"]);
    check(&[], &["an array `train_labels` or `train_targets`"]);
    let short = numbers("train_targets", "<f8", &[2], &[1.0, 2.0]);
    check(&[short], &["numbers [3] or [3, K]", "float64 [2]", "one row of numbers"]);
    let flat = numbers("train_targets", "<f4", &[1, 3], &[1.0, 2.0, 3.0]);
    check(&[flat], &["float32 [1, 3]", "y.reshape(-1)"]);
    let cube = numbers("train_targets", "<f4", &[3, 1, 1], &[1.0, 2.0, 3.0]);
    check(&[cube], &["float32 [3, 1, 1]"]);
    let flags = numbers("train_targets", "|b1", &[3], &[0.0, 1.0, 1.0]);
    check(&[flags], &["bool [3]", "train_labels"]);
    check(&[words("train_targets", &["a", "b", "c"])], &["text <U1 [3]", "astype('f4')"]);
    let none = numbers("train_targets", "<f4", &[3, 0], &[]);
    check(&[none], &["float32 [3, 0]"]);
    let many = Named("train_targets", "|u1", vec![3, 65_537], vec![0; 3 * 65_537]);
    check(&[many], &["at most 65536 columns", "uint8 [3, 65537]"]);
    check(&[three(), words("classes", &["a", "b"])], &["`classes`", "1 numbers", "got 2"]);
    check(
        &[targets(&[0.0; 6]), words("classes", &["a", "a"])],
        &["name 1 of `classes`", "\"a\" again"],
    );

    let of = |dtype, values: &[f64]| numbers("train_labels", dtype, &[3, values.len() / 3], values);
    let place = "label 1 of sample 2 of `train_labels`";
    let remedy = "name the array train_targets if its columns are numbers";
    check(&[of("<i2", &[0.0, 1.0, 1.0, 1.0, 0.0, 2.0])], &[place, "0 or 1", "got 2", remedy]);
    check(&[of("|b1", &[0.0, 1.0, 1.0, 1.0, 0.0, 7.0])], &[place, "0 or 1", "got 7"]);
    check(&[of("<f4", &[0.0, 1.0, 1.0, 1.0, 0.0, 1.5])], &[place, "from 0 to 1", "1.5", remedy]);
    check(&[of("<f8", &[0.0, 1.0, 1.0, 1.0, 0.0, f64::NAN])], &[place, "from 0 to 1", "NaN"]);
    check(&[of("<i8", &[0.0, 1.0, 1.0])], &["y.reshape(-1)", "y.astype(bool)"]);
    let two = || of("|b1", &[0.0; 6]);
    let classes = labels("test_labels", &[0]);
    check(&[two(), test(), classes], &["a row of `test_labels`", "2 labels", "got one class"]);
    check(&[two(), words("classes", &["a"])], &["`classes`", "the names of 2 labels", "got 1"]);
    // Without any test array there is no test split.
    let path = write_npz(folder.path(), &[indices("train_inputs", 3), three()]);
    let files = DatasetFiles::open(&spec_of(Source::Arrays, &path)).unwrap();
    let text = files.check_has(Split::Test).unwrap_err().to_string();
    assert!(text.contains("`test_inputs` and `test_targets`"), "{text}");
}

/// Changed targets are a change of the dataset, although all samples are as before.
#[test]
fn rewritten_targets_are_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let write = |last: f64| {
        let arrays = [
            indices("train_inputs", 3),
            numbers("train_targets", "<f4", &[3], &[1.0, 2.0, last]),
            indices("test_inputs", 1),
            numbers("test_targets", "<f4", &[1], &[1.0]),
        ];
        spec_of(Source::Arrays, &write_npz(folder.path(), &arrays))
    };
    let spec = write(3.0);
    let (device, opened) = (cpu(1), cache::files(&spec).unwrap());
    let sum = |data: Arc<Dataset>| data.checksum().unwrap();
    let before = sum(cache::load(&device, &spec, Split::Train, Residency::Resident).unwrap());
    write(4.0);
    let error = cache::load_files(&device, &opened, Split::Test, Residency::Resident);
    assert!(matches!(error.unwrap_err(), Error::Changed { .. }));
    let again = sum(cache::load(&device, &spec, Split::Train, Residency::Resident).unwrap());
    assert_ne!(again, before);
}

/// Targets count in the budget of a resident dataset: 4 bytes for the input, 4 for each number.
#[test]
fn targets_count_in_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let targets =
        numbers("train_targets", "<f8", &[10, 8], &(0..80).map(f64::from).collect::<Vec<_>>());
    let path = write_npz(folder.path(), &[indices("train_inputs", 10), targets]);
    let spec = spec_of(Source::Arrays, &path);
    for (budget, is_resident) in [(10 * (4 + 8 * 4), true), (10 * (4 + 8 * 4) - 1, false)] {
        let data = loaded(&spec, Split::Train, Residency::Auto { budget });
        assert_eq!(data.resident().is_some(), is_resident, "{budget}");
    }
}

/// Targets in memory, and their errors.
#[test]
fn targets_in_memory() {
    let device = cpu(1);
    let shape = SampleShape { channels: 1, height: 1, width: 1 };
    let names = |n: usize| (0..n).map(|i| format!("name {i}")).collect::<Vec<_>>();
    let of = |targets: SampleTargets<'_>, outputs| {
        Dataset::from_values(
            &device,
            InputKind::Vector,
            shape,
            &[5.0, 6.0],
            targets,
            names(outputs),
        )
    };
    let data = of(SampleTargets::Numbers(&[1.0, 10.0, 3.0, 10.0]), 2).unwrap();
    assert_eq!((data.len(), data.targets().dims()), (2, &[2, 2][..]));
    assert_eq!(data.targets().to_vec::<f32>().unwrap(), [-1.0, 0.0, 1.0, 0.0]);
    let info = data.info();
    assert_eq!((&info.target_mean[..], &info.target_std[..]), (&[2.0, 10.0][..], &[1.0, 1.0][..]));
    let data = of(SampleTargets::Labels(&[1.0, 0.25, 0.0, 0.75]), 2).unwrap();
    assert_eq!(data.targets().to_vec::<f32>().unwrap(), [1.0, 0.25, 0.0, 0.75]);
    assert_eq!((data.target_kind(), &data.info().per_class[..]), (TargetKind::Labels, &[1, 1][..]));
    let images = |targets: SampleTargets<'_>| {
        Dataset::from_slices(&device, shape, &[5, 6], targets, names(1))
    };
    assert_eq!(images(SampleTargets::Numbers(&[4.0, 8.0])).unwrap().targets().dims(), [2, 1]);

    let refused = |targets: SampleTargets<'_>, outputs: usize, parts: &[&str]| {
        let text = of(targets, outputs).unwrap_err().to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    refused(SampleTargets::Numbers(&[1.0; 3]), 2, &["`targets`", "2 numbers", "3 values"]);
    refused(SampleTargets::Numbers(&[]), 0, &["`targets`", "0 values"]);
    refused(SampleTargets::Numbers(&[1.0; 6]), 2, &["3 vectors", "2 floats"]);
    let infinite = [1.0, 2.0, 3.0, f64::INFINITY];
    refused(SampleTargets::Numbers(&infinite), 2, &["inf at value 1 of sample 1", "3.4e38"]);
    let labels = [1.0, 0.0, 2.0, 0.0];
    refused(SampleTargets::Labels(&labels), 2, &["2 at value 0 of sample 1", "Numbers"]);

    // Copies with other targets are not copies of one dataset.
    let other = cpu(1);
    let number =
        Dataset::from_slices(&other, shape, &[5, 6], SampleTargets::Numbers(&[4.0, 8.0]), names(1));
    let class = Dataset::from_slices(&device, shape, &[5, 6], &[0, 0], names(1));
    let config = GatherConfig::new(1, vec![DeviceId::Cpu(0)]);
    let copies = [class.unwrap(), number.unwrap()];
    let error = GatherBatches::new(&config, &copies, &[device.stream("s")]).unwrap_err();
    assert!(error.to_string().contains("with numbers (1 a sample)"), "{error}");
}

/// The formula of Friedman #1 explains all but the noise of deviation 1. Bounds are five standard
/// errors: 1/√4000 for the mean of the noise, 1/√8000 for its deviation; the number's mean is
/// 14.413 and its deviation without noise about 4.88, so with noise the mean's error is 4.98/√4000.
#[test]
fn friedman_follows_its_formula() {
    let spec = DatasetSpec::new(Source::Friedman);
    let info = info_of(&spec);
    assert_eq!((info.kind, info.channels, info.classes), (InputKind::Vector, 10, vec!["y".into()]));
    assert_eq!(
        (info.train_len, info.test_len, info.targets),
        (4000, Some(1000), TargetKind::Numbers)
    );
    let (mean, std) = (info.target_mean[0], info.target_std[0]);
    assert!((mean - 14.413).abs() < 5.0 * 4.98 / 4000_f64.sqrt(), "{mean}");
    for (split, len) in [(Split::Train, 4000_usize), (Split::Test, 1000)] {
        let data = loaded(&spec, split, Residency::Resident);
        let inputs = data.resident().unwrap().to_vec::<f32>().unwrap();
        let targets = data.targets().to_vec::<f32>().unwrap();
        assert_eq!((inputs.len(), targets.len()), (10 * len, len));
        assert!(inputs.iter().all(|x| (0.0..=1.0).contains(x)));
        let noise: Vec<f64> = (0..len)
            .map(|i| {
                let x: Vec<f64> = inputs[10 * i..][..10].iter().map(|x| f64::from(*x)).collect();
                let y = 10.0 * (std::f64::consts::PI * x[0] * x[1]).sin()
                    + 20.0 * (x[2] - 0.5).powi(2)
                    + 10.0 * x[3]
                    + 5.0 * x[4];
                f64::from(targets[i]) * std + mean - y
            })
            .collect();
        let (noise_mean, noise_std) = two_passes(&noise, 0, 1);
        let n = len as f64;
        assert!(noise_mean.abs() < 5.0 / n.sqrt(), "{noise_mean}");
        assert!((noise_std - 1.0).abs() < 5.0 / (2.0 * n).sqrt(), "{noise_std}");
        if split == Split::Train {
            let first: Vec<i64> = inputs[..10].iter().map(|x| (x * 1e4).round() as i64).collect();
            assert_eq!(first, FIRST_INPUTS);
            let first: Vec<i64> = targets[..4]
                .iter()
                .map(|y| ((f64::from(*y) * std + mean) * 1e3).round() as i64)
                .collect();
            assert_eq!(first, FIRST_NUMBERS);
        }
    }
}

/// The first sample of `friedman`, in ten-thousandths.
const FIRST_INPUTS: [i64; 10] = [5845, 8266, 1840, 4188, 7713, 8044, 7876, 7133, 7374, 9180];
/// The first numbers of `friedman`, in thousandths.
const FIRST_NUMBERS: [i64; 4] = [19_440, 12_198, 16_396, 17_999];
