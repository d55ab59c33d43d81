//! Vectors, signals and images of numbers in files of arrays (D12, D13, D15).

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::f16;
use meristem_data::{
    Augment, Dataset, DatasetFiles, DatasetInfo, DatasetSpec, Error, GatherBatches, GatherConfig,
    InputKind, Residency, SampleShape, Source, Split, StoredType, StoredValue, cache, verify,
};
use meristem_device::{DeviceId, Tensor};

use crate::common::files::spec_of;
use crate::common::{Image, cpu, epoch_of};
use crate::sources::any_error;

/// A named array: numpy's type, shape, bytes.
#[derive(Clone, Debug)]
pub(crate) struct Named(
    pub(crate) &'static str,
    pub(crate) &'static str,
    pub(crate) Vec<usize>,
    pub(crate) Vec<u8>,
);

pub(crate) fn write_npz(folder: &Path, arrays: &[Named]) -> PathBuf {
    let path = folder.join("data.npz");
    let mut archive = zip::ZipWriter::new(fs::File::create(&path).unwrap());
    for Named(name, dtype, shape, bytes) in arrays {
        let options = zip::write::SimpleFileOptions::default();
        archive.start_file(format!("{name}.npy"), options).unwrap();
        let dims: Vec<String> = shape.iter().map(|dim| format!("{dim},")).collect();
        let shape = dims.join(" ");
        let header =
            format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({shape}), }}\n");
        archive.write_all(b"\x93NUMPY\x01\x00").unwrap();
        archive.write_all(&(header.len() as u16).to_le_bytes()).unwrap();
        archive.write_all(header.as_bytes()).unwrap();
        archive.write_all(bytes).unwrap();
    }
    archive.finish().unwrap();
    path
}

pub(crate) fn labels(name: &'static str, labels: &[i64]) -> Named {
    let bytes = labels.iter().flat_map(|label| label.to_le_bytes()).collect();
    Named(name, "<i8", vec![labels.len()], bytes)
}

pub(crate) fn floats(name: &'static str, shape: &[usize], values: &[f32]) -> Named {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Named(name, "<f4", shape.to_vec(), bytes)
}

pub(crate) fn info_of(spec: &DatasetSpec) -> DatasetInfo {
    DatasetFiles::open(spec).unwrap().info().unwrap()
}

/// The stored training values, and the checksum of the dataset.
fn stored(spec: &DatasetSpec) -> (Vec<f32>, u32) {
    let data = cache::load(&cpu(2), spec, Split::Train, Residency::Resident).unwrap();
    let samples = data.resident().unwrap();
    let values = match data.info().stored {
        StoredType::U8 => of_type::<u8>(samples),
        StoredType::I16 => of_type::<i16>(samples),
        StoredType::F16 => of_type::<f16>(samples),
        StoredType::F32 => of_type::<f32>(samples),
    };
    (values, data.checksum().unwrap())
}

fn of_type<V: StoredValue>(samples: &Tensor) -> Vec<f32> {
    samples.to_vec::<V>().unwrap().into_iter().map(V::value).collect()
}

/// Every type of number gives the same values, checksum and constants; the axes of signals and
/// images are moved to the end.
#[test]
fn every_number_type_and_shape_is_read() {
    let numbers: Vec<i64> = (0..24).map(|i| i * 5 - 50).collect();
    let bytes = |each: &dyn Fn(i64) -> Vec<u8>| numbers.iter().flat_map(|n| each(*n)).collect();
    let types: [(&'static str, StoredType, Vec<u8>); 9] = [
        ("<f4", StoredType::F32, bytes(&|n| (n as f32).to_le_bytes().to_vec())),
        (">f4", StoredType::F32, bytes(&|n| (n as f32).to_be_bytes().to_vec())),
        ("|i1", StoredType::I16, bytes(&|n| vec![n as i8 as u8])),
        ("<i2", StoredType::I16, bytes(&|n| (n as i16).to_le_bytes().to_vec())),
        (">i2", StoredType::I16, bytes(&|n| (n as i16).to_be_bytes().to_vec())),
        ("<i8", StoredType::F32, bytes(&|n| n.to_le_bytes().to_vec())),
        ("<f8", StoredType::F32, bytes(&|n| (n as f64).to_le_bytes().to_vec())),
        ("<f2", StoredType::F16, bytes(&|n| half(n).to_le_bytes().to_vec())),
        (">f2", StoredType::F16, bytes(&|n| half(n).to_be_bytes().to_vec())),
    ];
    let forms: [(&[usize], InputKind, [usize; 3]); 4] = [
        (&[2, 12], InputKind::Vector, [12, 1, 1]),
        (&[2, 3, 4], InputKind::Signal, [3, 1, 4]),
        (&[2, 1, 12], InputKind::Signal, [1, 1, 12]),
        (&[2, 3, 2, 2], InputKind::Image, [3, 2, 2]),
    ];
    for (shape, kind, [channels, height, width]) in forms {
        // NCHW to NHWC.
        let moved = |sample: usize| {
            let place = move |i: usize| {
                let (pixel, channel) = (i / channels, i % channels);
                channel * height * width + pixel
            };
            let numbers = &numbers;
            (0..12).map(move |i| numbers[sample * 12 + place(i)] as f32)
        };
        let expected: Vec<f32> = (0..2).flat_map(moved).collect();
        let mut first = None;
        for (dtype, stored_as, bytes) in &types {
            let folder = tempfile::tempdir().unwrap();
            let inputs = Named("train_inputs", dtype, shape.to_vec(), bytes.clone());
            let path = write_npz(folder.path(), &[inputs, labels("train_labels", &[1, 0])]);
            let spec = spec_of(Source::Arrays, &path);
            let info = info_of(&spec);
            let shape = SampleShape { channels, height, width };
            assert_eq!((info.kind, info.stored, info.shape()), (kind, *stored_as, shape));
            let (values, checksum) = stored(&spec);
            assert_eq!(values, expected, "{dtype} {shape:?}");
            let derived = (checksum, info.mean, info.std);
            assert_eq!(*first.get_or_insert(derived.clone()), derived, "{dtype}");
        }
    }
}

/// The bits of a small integer as float16.
fn half(n: i64) -> u16 {
    if n == 0 {
        return 0;
    }
    let exponent = n.unsigned_abs().ilog2();
    let mantissa = ((n.unsigned_abs() << (10 - exponent)) & 0x3ff) as u16;
    u16::from(n < 0) << 15 | (exponent as u16 + 15) << 10 | mantissa
}

/// Bytes stay bytes, also of vectors with many features, and their constants are of b / 255.
#[test]
fn bytes_of_any_shape_stay_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..60).map(|i| (i * 37 % 251) as u8).collect();
    let inputs = Named("train_inputs", "|u1", vec![3, 4, 5], bytes.clone());
    let path = write_npz(folder.path(), &[inputs, labels("train_labels", &[0, 1, 1])]);
    let spec = spec_of(Source::Arrays, &path);
    let info = info_of(&spec);
    assert_eq!((info.kind, info.stored, info.channels), (InputKind::Signal, StoredType::U8, 4));
    let data = cache::load(&cpu(1), &spec, Split::Train, Residency::Resident).unwrap();
    let read = data.resident().unwrap().to_vec::<u8>().unwrap();
    for sample in 0..3 {
        for (channel, point) in (0..4).flat_map(|c| (0..5).map(move |p| (c, p))) {
            let expected = bytes[sample * 20 + channel * 5 + point];
            assert_eq!(read[sample * 20 + point * 4 + channel], expected);
        }
    }
    let of_first: Vec<f64> = (0..3)
        .flat_map(|sample| bytes[sample * 20..][..5].to_vec())
        .map(|b| f64::from(b) / 255.0)
        .collect();
    let mean = of_first.iter().sum::<f64>() / 15.0;
    assert!((f64::from(info.mean[0]) - mean).abs() < 1e-7);
}

/// Mean and deviation of a feature with a large mean: f64 sums of differences lose less than 1e-9
/// of them, and the constants are rounded to f32.
#[test]
fn constants_of_floats_match_a_plain_computation() {
    let folder = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..3000)
        .map(|i| match i % 3 {
            0 => 1e6 + (i * i % 97) as f32 / 8.0,
            1 => -3.0,
            _ => (i as f32).sin() * 1e-3,
        })
        .collect();
    let inputs = floats("train_inputs", &[1000, 3], &values);
    let targets: Vec<i64> = (0..1000).map(|i| i % 2).collect();
    let path = write_npz(folder.path(), &[inputs, labels("train_labels", &targets)]);
    let info = info_of(&spec_of(Source::Arrays, &path));
    for feature in 0..3 {
        let own: Vec<f64> =
            values.iter().skip(feature).step_by(3).map(|value| f64::from(*value)).collect();
        let mean = own.iter().sum::<f64>() / 1000.0;
        let std = (own.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 1000.0).sqrt();
        // A constant feature is divided by 1.
        let std = if feature == 1 { 1.0 } else { std };
        assert!((f64::from(info.mean[feature]) - mean).abs() <= 1e-6 * mean.abs().max(1e-3));
        assert!((f64::from(info.std[feature]) - std).abs() <= 1e-6 * std, "{:?}", info.std);
    }
}

fn on_cpu(envs: usize) -> GatherConfig {
    GatherConfig { seed: 5, ..GatherConfig::new(7, vec![DeviceId::Cpu(0); envs]) }
}

/// Streamed samples are the same bits as resident ones, for any kind and type.
#[test]
fn streamed_inputs_are_those_of_the_resident_copy() {
    let values: Vec<f32> = (0..40 * 12).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
    let targets: Vec<i64> = (0..40).map(|i| i % 3).collect();
    for shape in [&[40, 12][..], &[40, 3, 4], &[40, 2, 2, 3]] {
        for is_byte in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let inputs = if is_byte {
                let bytes = values.iter().map(|v| (v * 40.0 + 120.0) as u8).collect();
                Named("train_inputs", "|u1", shape.to_vec(), bytes)
            } else {
                floats("train_inputs", shape, &values)
            };
            let path = write_npz(folder.path(), &[inputs, labels("train_labels", &targets)]);
            let spec = spec_of(Source::Arrays, &path);
            let epoch = |residency| {
                let device = cpu(2);
                let data = cache::load(&device, &spec, Split::Train, residency).unwrap();
                let batches: Vec<Vec<Image>> = epoch_of(&device, &data, &on_cpu(2), 3);
                drop::<Arc<Dataset>>(data);
                cache::clear(|key| key.root == spec.root);
                batches
            };
            let resident = epoch(Residency::Resident);
            assert_eq!(resident.iter().map(Vec::len).sum::<usize>(), 40);
            assert_eq!(epoch(Residency::Streamed), resident, "{shape:?}");
            // Bytes of at most four channels are normalised at load, with the same bits.
            assert_eq!(epoch(Residency::ResidentF32), resident, "{shape:?}");
        }
    }
}

/// Only images are augmented.
#[test]
fn augmentation_of_other_samples_is_refused() {
    let device = cpu(1);
    let classes = vec!["a".into(), "b".into()];
    for (kind, width) in [(InputKind::Vector, 1), (InputKind::Signal, 2)] {
        let shape = SampleShape { channels: 3, height: 1, width };
        let values = vec![0.5; 2 * shape.numel()];
        let data =
            Dataset::from_values(&device, kind, shape, &values, &[0, 1], classes.clone()).unwrap();
        let config = GatherConfig { augment: Augment::STANDARD, ..on_cpu(1) };
        let error = GatherBatches::new(&config, &[data], &[device.stream("s")]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("`augment`") && text.contains(kind.plural()), "{text}");
    }
    let shape = SampleShape { channels: 2, height: 1, width: 1 };
    let from = |kind, shape, values: &[f32]| {
        Dataset::from_values(&device, kind, shape, values, &[0, 1], classes.clone())
            .unwrap_err()
            .to_string()
    };
    let text = from(InputKind::Vector, shape, &[0.0, 1.0, f32::NAN, 2.0]);
    assert!(text.contains("NaN at value 0 of sample 1"), "{text}");
    let text = from(InputKind::Vector, SampleShape { width: 2, ..shape }, &[0.0; 8]);
    assert!(text.contains("`shape`"), "{text}");
}

#[test]
fn unusable_inputs_are_named_with_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let check = |arrays: &[Named], parts: &[&str]| {
        let path = write_npz(folder.path(), arrays);
        let spec = spec_of(Source::Arrays, &path);
        let error = any_error(&spec);
        let text = error.to_string();
        assert!(matches!(error, Error::Layout { .. } | Error::Missing { .. }), "{text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        text
    };
    let two = || labels("train_labels", &[0, 1]);
    let values = |values: &[f32]| floats("train_inputs", &[2, values.len() / 2], values);
    for (value, name) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let inputs = values(&[1.0, 2.0, 3.0, 4.0, value, 6.0]);
        check(&[inputs, two()], &["value 1 of sample 1 of `train_inputs`", "finite", name]);
    }
    let wide =
        Named("train_inputs", "<f8", vec![2, 1], [1e300, 1.0_f64].map(f64::to_le_bytes).concat());
    check(&[wide, two()], &["value 0 of sample 0", "3.4e38"]);
    let five = floats("train_inputs", &[2, 1, 1, 1, 1], &[0.0; 2]);
    check(&[five, two()], &["N×F, N×C×L or N×C×H×W", "float32 [2, 1, 1, 1, 1]", "reshape"]);
    let text = Named("train_inputs", "<U4", vec![2, 3], vec![0; 96]);
    check(&[text, two()], &["numbers", "text <U4 [2, 3]", "astype('f4')"]);
    let none = floats("train_inputs", &[2, 0], &[]);
    check(&[none, two()], &["float32 [2, 0]"]);
    let images = Named("train_images", "|u1", vec![2, 1, 1], vec![0; 2]);
    check(&[images, values(&[0.0; 2]), two()], &["`train_images` and `train_inputs`"]);
    check(&[values(&[0.0; 2])], &["`train_labels`"]);
    let words = Named("train_labels", "<U4", vec![2], vec![0; 32]);
    check(&[values(&[0.0; 2]), words], &["text <U4 [2]", "numpy.unique"]);
    let float_labels = floats("train_labels", &[2], &[0.0, 1.5]);
    check(&[values(&[0.0; 2]), float_labels], &["must be integers [2]", "float32 [2]"]);
    let other = floats("test_inputs", &[2, 3], &[0.0; 6]);
    let test = || labels("test_labels", &[0, 1]);
    check(
        &[values(&[0.0; 4]), two(), other, test()],
        &["2 features of floats as in training", "3"],
    );
    let bytes = Named("test_inputs", "|u1", vec![2, 2], vec![0; 4]);
    check(&[values(&[0.0; 4]), two(), bytes, test()], &["2 features of bytes"]);
    let missing = check(&[values(&[0.0; 4]), two(), test()], &["`test_inputs`"]);
    assert!(missing.contains("arrays"), "{missing}");
    // Without any test array there is no test split.
    let path = write_npz(folder.path(), &[values(&[0.0; 4]), two()]);
    let spec = spec_of(Source::Arrays, &path);
    let files = DatasetFiles::open(&spec).unwrap();
    let text = files.check_has(Split::Test).unwrap_err().to_string();
    assert!(text.contains("`test_inputs` and `test_labels`"), "{text}");
    let report = verify(&spec).unwrap();
    assert!(report.is_sound() && report.image == [2, 1, 1], "{report:?}");
    // A number that is not finite is damage for `verify`, and named.
    let path = write_npz(folder.path(), &[values(&[0.0, f32::NAN]), two()]);
    let report = verify(&spec_of(Source::Arrays, &path)).unwrap();
    assert!(report.splits[0].damaged[0].error.contains("value 0 of sample 1"), "{report:?}");
}

pub(crate) fn words(name: &'static str, words: &[&str]) -> Named {
    let chars = words.iter().map(|word| word.chars().count()).max().unwrap_or(0).max(1);
    let codes = words.iter().flat_map(|word| {
        word.chars().map(u32::from).chain(std::iter::repeat(0)).take(chars).collect::<Vec<_>>()
    });
    let bytes = codes.flat_map(u32::to_le_bytes).collect();
    Named(name, Box::leak(format!("<U{chars}").into_boxed_str()), vec![words.len()], bytes)
}

#[test]
fn classes_may_have_names() {
    let folder = tempfile::tempdir().unwrap();
    let samples = || floats("train_inputs", &[3, 1], &[0.0, 1.0, 2.0]);
    let names = ["oak", "μ 🌱", "never seen"];
    let path = write_npz(
        folder.path(),
        &[samples(), labels("train_labels", &[1, 0, 1]), words("classes", &names)],
    );
    let info = info_of(&spec_of(Source::Arrays, &path));
    assert_eq!((info.classes, info.per_class), (names.map(String::from).to_vec(), vec![1, 2, 0]));
    // In safetensors they are metadata.
    let path = folder.path().join("data.safetensors");
    let write = |classes: &str| {
        let header = serde_json::json!({
            "__metadata__": { "classes": classes },
            "train_inputs": { "dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8] },
            "train_labels": { "dtype": "U8", "shape": [2], "data_offsets": [8, 10] },
        });
        let header = header.to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 9]);
        bytes.push(1);
        fs::write(&path, bytes).unwrap();
        spec_of(Source::Arrays, &path)
    };
    assert_eq!(info_of(&write(r#"["oak", "μ 🌱", "never seen"]"#)).classes, names);
    let refused = |classes: &str, parts: &[&str]| {
        let text = any_error(&write(classes)).to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    refused("oak, elm", &["`classes` in the metadata", "a JSON list of texts"]);
    refused(r#"["oak"]"#, &["label 1 of `train_labels`", "below 1, the number of names", "got 1"]);
    refused(r#"["oak", "elm", "oak"]"#, &["name 2 of `classes`", "\"oak\" again"]);
    let many = serde_json::to_string(&(0..65_537).map(|n| n.to_string()).collect::<Vec<_>>());
    refused(&many.unwrap(), &["`classes`", "at most 65536 names", "65537"]);

    let check = |classes: Named, parts: &[&str]| {
        let two = labels("train_labels", &[0, 1, 0]);
        let text = any_error(&spec_of(
            Source::Arrays,
            &write_npz(folder.path(), &[samples(), two, classes]),
        ))
        .to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    check(labels("classes", &[0, 1]), &["`classes`", "text [K]", "int64 [2]"]);
    let table = Named("classes", "<U1", vec![2, 1], vec![0; 8]);
    check(table, &["`classes`", "text <U1 [2, 1]"]);
    let code = Named("classes", "<U1", vec![2], [0x61_u32, 0xd800].map(u32::to_le_bytes).concat());
    check(code, &["name 1 of `classes`", "characters of Unicode"]);
    check(Named("classes", "<U0", vec![1 << 40], vec![]), &["`classes`", "<U0"]);
    check(Named("classes", "<U9", vec![1 << 40], vec![]), &["data.npz"]);
    let many = Named("classes", "<U1", vec![65_537], vec![0; 4 * 65_537]);
    check(many, &["`classes`", "at most 65536 names", "65537"]);
}
