//! Samples stored in 16 bits: the same batches as from f32 of the same values (D12).

use std::fs;
use std::sync::Arc;

use half::f16;
use meristem_data::{
    Augment, Dataset, GatherConfig, InputKind, Residency, SampleShape, Source, Split, StoredValue,
    cache,
};
use meristem_device::{Device, DeviceId};

use crate::common::files::spec_of;
use crate::common::{Image, cpu, epoch_of};
use crate::inputs::{Named, labels, write_npz};

const SAMPLES: usize = 11;

/// Numbers that an f16 has, below its smallest normal number too, and some that an i16 has.
pub(crate) fn halves(len: usize) -> Vec<f16> {
    let bits = (0..len as u32).map(|i| i.wrapping_mul(40_503) as u16);
    bits.map(f16::from_bits).map(|half| if half.is_finite() { half } else { f16::MIN }).collect()
}

pub(crate) fn integers(len: usize) -> Vec<i16> {
    (0..len as u32).map(|i| i.wrapping_mul(40_503) as i16).collect()
}

fn batches<V: StoredValue>(
    device: &Device,
    (kind, shape): (InputKind, SampleShape),
    values: &[V],
    augment: Augment,
) -> Vec<Vec<Image>> {
    let targets: Vec<u32> = (0..SAMPLES as u32).map(|sample| sample % 3).collect();
    let classes = ["a", "b", "c"].map(String::from).to_vec();
    let data = Dataset::from_values(device, kind, shape, values, &targets, classes).unwrap();
    let config = GatherConfig { augment, seed: 3, ..GatherConfig::new(4, vec![device.id(); 2]) };
    epoch_of(device, &data, &config, 1)
}

/// Bits of the inputs, because −0 and 0 differ.
fn bits(epoch: &[Vec<Image>]) -> Vec<u32> {
    epoch.iter().flatten().flat_map(|image| &image.inputs).map(|input| input.to_bits()).collect()
}

pub(crate) fn are_those_of_f32<V: StoredValue>(device: &Device, values: impl Fn(usize) -> Vec<V>) {
    let augmented = Augment { crop_padding: 2, flip: true, cutout: 3 };
    let of = |channels, height, width| SampleShape { channels, height, width };
    for (form, augment) in [
        ((InputKind::Vector, of(37, 1, 1)), Augment::NONE),
        ((InputKind::Signal, of(2, 1, 53)), Augment::NONE),
        ((InputKind::Image, of(1, 7, 5)), augmented),
        ((InputKind::Image, of(3, 6, 9)), augmented),
        ((InputKind::Image, of(6, 5, 5)), augmented),
    ] {
        let narrow = values(SAMPLES * form.1.numel());
        let wide: Vec<f32> = narrow.iter().map(|value| value.value()).collect();
        let expected = batches(device, form, &wide, augment);
        assert!(!bits(&expected).is_empty());
        assert_eq!(bits(&batches(device, form, &narrow, augment)), bits(&expected), "{form:?}");
    }
}

#[test]
fn batches_of_16_bit_samples_are_those_of_f32() {
    are_those_of_f32(&cpu(2), integers);
    are_those_of_f32(&cpu(2), halves);
}

/// Splits of different types are stored as f32.
#[test]
fn splits_of_two_types_are_stored_as_f32() {
    let folder = tempfile::tempdir().unwrap();
    let array = |name, dtype, bytes| Named(name, dtype, vec![2, 3], bytes);
    let train: Vec<u8> = [1_i16, -2, 3, 4, 5, -600].iter().flat_map(|n| n.to_le_bytes()).collect();
    let test: Vec<u8> =
        [0.5_f32, 1.0, 2.0, 3.0, 4.0, 5.5].iter().flat_map(|n| n.to_le_bytes()).collect();
    let path = write_npz(
        folder.path(),
        &[
            array("train_inputs", "<i2", train),
            array("test_inputs", "<f4", test),
            labels("train_labels", &[0, 1]),
            labels("test_labels", &[1, 0]),
        ],
    );
    let spec = spec_of(Source::Arrays, &path);
    let values = |split| {
        let data = cache::load(&cpu(1), &spec, split, Residency::Resident).unwrap();
        data.resident().unwrap().to_vec::<f32>().unwrap()
    };
    assert_eq!(values(Split::Train), [1.0, -2.0, 3.0, 4.0, 5.0, -600.0]);
    assert_eq!(values(Split::Test), [0.5, 1.0, 2.0, 3.0, 4.0, 5.5]);
}

/// A file of 16-bit samples takes two bytes a value, resident and streamed, and both give the same
/// batches.
#[test]
fn streamed_16_bit_samples_are_the_resident_ones() {
    let folder = tempfile::tempdir().unwrap();
    let (numbers, classes) = (integers(SAMPLES * 12), [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]);
    for (dtype, bytes) in [
        ("<i2", numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>()),
        ("<f2", halves(SAMPLES * 12).iter().flat_map(|n| n.to_le_bytes()).collect()),
    ] {
        let inputs = Named("train_inputs", dtype, vec![SAMPLES, 3, 4], bytes);
        let path = write_npz(folder.path(), &[inputs, labels("train_labels", &classes)]);
        let spec = spec_of(Source::Arrays, &path);
        let load = |residency| {
            let device = cpu(2);
            let data = cache::load(&device, &spec, Split::Train, residency).unwrap();
            cache::clear(|key| key.root == spec.root);
            (device, data)
        };
        let [(device, resident), (_, streamed)] =
            [Residency::Resident, Residency::Streamed].map(load);
        assert_eq!(resident.resident().unwrap().dtype().size(), 2);
        assert_eq!(resident.checksum().unwrap(), streamed.checksum().unwrap());
        let epoch = |device: &Device, data: &Arc<Dataset>| {
            epoch_of(device, data, &GatherConfig::new(4, vec![DeviceId::Cpu(0); 2]), 0)
        };
        let expected = epoch(&device, &resident);
        assert_eq!(bits(&epoch(streamed.device(), &streamed)), bits(&expected));
        fs::remove_file(&path).unwrap();
    }
}
