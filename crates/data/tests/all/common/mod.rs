//! Small datasets, and a slow version of a gather.
#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod files;

use std::sync::Arc;

use meristem_data::order::EpochMode;
use meristem_data::{
    Augment, Batch, Dataset, DatasetSpec, EnvGather, GatherBatches, GatherConfig, InputKind,
    Normalization, Residency, SampleShape, Split, Subset, cache,
};
use meristem_device::random::{Purpose, Rng};
use meristem_device::{Device, DeviceId, DeviceOptions, Stream, read_back};

/// A device with `threads` workers.
pub(crate) fn cpu(threads: usize) -> Device {
    let options = DeviceOptions { threads, ..DeviceOptions::default() };
    Device::open(DeviceId::Cpu(0), &options).unwrap()
}

/// A dataset of images whose values are a function of their position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Toy {
    pub(crate) len: usize,
    pub(crate) channels: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) threads: usize,
    /// Whether values are stored as floats, else as bytes.
    pub(crate) floats: bool,
}

impl Toy {
    pub(crate) fn shape(&self) -> SampleShape {
        let Self { channels, height, width, .. } = *self;
        SampleShape { channels, height, width }
    }

    /// NHWC.
    pub(crate) fn image(&self, sample: u32) -> Vec<u8> {
        let size = self.shape().numel() as u64;
        let value =
            |i: u64| (u64::from(sample) * size + i).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 53;
        (0..size).map(|i| value(i) as u8).collect()
    }

    /// A value as it is stored.
    pub(crate) fn stored(&self, byte: u8) -> f32 {
        if self.floats { f32::from(byte) * 0.37 - 20.0 } else { f32::from(byte) }
    }

    pub(crate) fn label(&self, sample: u32) -> u32 {
        sample * 7 % 5
    }

    pub(crate) fn dataset(&self) -> (Device, Arc<Dataset>) {
        self.dataset_on(cpu(self.threads))
    }

    pub(crate) fn dataset_on(&self, device: Device) -> (Device, Arc<Dataset>) {
        let images: Vec<u8> = (0..self.len as u32).flat_map(|i| self.image(i)).collect();
        let labels: Vec<u32> = (0..self.len as u32).map(|i| self.label(i)).collect();
        let classes = (0..5).map(|i| i.to_string()).collect();
        let shape = self.shape();
        let dataset = if self.floats {
            let values: Vec<f32> = images.iter().map(|byte| self.stored(*byte)).collect();
            Dataset::from_values(&device, InputKind::Image, shape, &values, &labels, classes)
        } else {
            Dataset::from_slices(&device, shape, &images, &labels, classes)
        };
        (device, dataset.unwrap())
    }
}

/// Inputs (memory order) and targets of a batch.
pub(crate) fn batch_of(batch: &Batch) -> (Vec<f32>, Vec<u32>) {
    let bytes = read_back(&[&batch.inputs, &batch.targets]).unwrap();
    let words = |bytes: &[u8]| -> Vec<u32> {
        bytes.chunks(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect()
    };
    (words(&bytes[0]).into_iter().map(f32::from_bits).collect(), words(&bytes[1]))
}

/// One image of a batch.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Image {
    pub(crate) inputs: Vec<f32>,
    pub(crate) target: u32,
}

/// A whole epoch, each env's images of each batch, on new streams.
pub(crate) fn epoch_of(
    device: &Device,
    dataset: &Arc<Dataset>,
    config: &GatherConfig,
    epoch: u64,
) -> Vec<Vec<Image>> {
    let streams: Vec<Stream> = config.devices.iter().map(|_| device.stream("env")).collect();
    let mut gather = GatherBatches::new(config, std::slice::from_ref(dataset), &streams).unwrap();
    gather.start_epoch(epoch).unwrap();
    rest_of(&mut gather)
}

/// Checks that an env in epoch e has the batches that it has when all envs are in epoch e.
pub(crate) fn own_epochs_are_those_of_all(device: &Device, dataset: &Arc<Dataset>) {
    let config = GatherConfig {
        epoch_mode: EpochMode::Full,
        augment: Augment::STANDARD,
        ..GatherConfig::new(4, vec![device.id(); 3])
    };
    let streams: Vec<Stream> = config.devices.iter().map(|_| device.stream("env")).collect();
    let mut gather = GatherBatches::new(&config, std::slice::from_ref(dataset), &streams).unwrap();
    let expected: Vec<_> = (0..4).map(|epoch| epoch_of(device, dataset, &config, epoch)).collect();
    for (epochs, selected) in
        [([3, 0, 2], &[0, 1, 2][..]), ([1, 1, 3], &[0, 2]), ([0, 2, 1], &[0, 1, 2])]
    {
        gather.select(|env| selected.contains(&env)).unwrap();
        gather.start_epochs(|env| epochs[env]).unwrap();
        let got = rest_of(&mut gather);
        for (place, &env) in selected.iter().enumerate() {
            let own: Vec<_> = got.iter().skip(place).step_by(selected.len()).collect();
            let all: Vec<_> = expected[epochs[env] as usize].iter().skip(env).step_by(3).collect();
            assert!(own == all, "env {env} of {selected:?} in epochs {epochs:?}");
        }
    }
}

/// Checks that an env with its own batch, seed and augmentation has the batches that it has when
/// all envs have them, from the beginning and when it gets them later.
pub(crate) fn own_options_are_those_of_all(device: &Device, dataset: &Arc<Dataset>) {
    let all =
        GatherConfig { epoch_mode: EpochMode::Full, ..GatherConfig::new(4, vec![device.id(); 3]) };
    let own = |batch, seed, augment| EnvGather { batch, seed, augment };
    let options = [
        own(4, 0, Augment::NONE),
        own(9, 7, Augment::STANDARD),
        own(3, 8, Augment { flip: true, ..Augment::NONE }),
        own(3, 7, Augment::STANDARD),
    ];
    let alone = options.map(|EnvGather { batch, seed, augment }| {
        let config = GatherConfig { batch_per_env: batch, seed, augment, ..all.clone() };
        epoch_of(device, dataset, &config, 2)
    });
    let streams: Vec<Stream> = all.devices.iter().map(|_| device.stream("env")).collect();
    let begun = GatherConfig { own: Some(options[..3].to_vec()), ..all };
    let mut gather = GatherBatches::new(&begun, std::slice::from_ref(dataset), &streams).unwrap();
    for of_envs in [[0, 1, 2], [3, 1, 2], [3, 2, 0], [1, 1, 1]] {
        for (env, number) in of_envs.into_iter().enumerate() {
            let batches = gather.order().batches_with(env, options[number].batch);
            assert_eq!(batches, alone[number].len() / 3);
            gather.set(env, options[number]).unwrap();
        }
        gather.start_epoch(2).unwrap();
        let mut got = vec![vec![]; 3];
        while let Some(step) = gather.next().unwrap() {
            for batch in &step {
                got[batch.env].push(images_of(batch));
            }
        }
        for (env, number) in of_envs.into_iter().enumerate() {
            // All three envs are in each batch of a fleet that is alike.
            let expected: Vec<_> = alone[number].iter().skip(env).step_by(3).cloned().collect();
            assert!(got[env] == expected, "env {env} with options {number} of {of_envs:?}");
        }
    }
}

/// Checks that an env with its own samples has the batches that it has when all envs have them,
/// from the beginning and when it gets them later.
pub(crate) fn own_samples_are_those_of_all(device: &Device, dataset: &Arc<Dataset>) {
    let all =
        GatherConfig { epoch_mode: EpochMode::Full, ..GatherConfig::new(4, vec![device.id(); 3]) };
    let lists: [Arc<[u32]>; 3] =
        [(0..23).collect(), [3, 3, 5, 9, 20].into(), (1..18).collect::<Vec<_>>().into()];
    let alone = lists.each_ref().map(|list| {
        let config = GatherConfig { subset: Subset::Shared(list.clone()), ..all.clone() };
        epoch_of(device, dataset, &config, 2)
    });
    let streams: Vec<Stream> = all.devices.iter().map(|_| device.stream("env")).collect();
    for subset in [Subset::All, Subset::PerEnv(lists.to_vec())] {
        let begun = GatherConfig { subset, ..all.clone() };
        let mut gather =
            GatherBatches::new(&begun, std::slice::from_ref(dataset), &streams).unwrap();
        for of_envs in [[0, 1, 2], [1, 1, 2], [2, 0, 0]] {
            for (env, number) in of_envs.into_iter().enumerate() {
                gather.set_samples(env, &lists[number]).unwrap();
            }
            gather.start_epoch(2).unwrap();
            let mut got = vec![vec![]; 3];
            while let Some(step) = gather.next().unwrap() {
                for batch in &step {
                    got[batch.env].push(images_of(batch));
                }
            }
            for (env, number) in of_envs.into_iter().enumerate() {
                let expected: Vec<_> = alone[number].iter().skip(env).step_by(3).cloned().collect();
                assert!(got[env] == expected, "env {env} with list {number} of {of_envs:?}");
            }
        }
        let len = dataset.len() as u32;
        let error = gather.set_samples(0, &[len].into()).unwrap_err().to_string();
        assert!(error.contains(&format!("indices below {len}")), "{error}");
    }
}

/// The images of a batch.
fn images_of(batch: &Batch) -> Vec<Image> {
    let (inputs, targets) = batch_of(batch);
    let images = inputs.chunks(inputs.len() / targets.len()).zip(targets);
    images.map(|(image, target)| Image { inputs: image.to_vec(), target }).collect()
}

/// The rest of an epoch that was started.
pub(crate) fn rest_of(gather: &mut GatherBatches) -> Vec<Vec<Image>> {
    let mut all = vec![];
    while let Some(step) = gather.next().unwrap() {
        for batch in &step {
            all.push(images_of(batch));
        }
    }
    all
}

/// Images (NHWC bytes) and labels of a split, read through a device; its cache entry is removed
/// again.
pub(crate) fn read_split(spec: &DatasetSpec, split: Split) -> (Vec<u8>, Vec<u32>) {
    let dataset = cache::load(&cpu(2), spec, split, Residency::Resident).unwrap();
    let images = dataset.resident().unwrap().to_vec::<u8>().unwrap();
    let labels = dataset.targets().to_vec::<u32>().unwrap();
    assert_eq!(labels.len(), dataset.len());
    let root = spec.root.as_ref().map(|root| root.canonicalize().unwrap());
    cache::clear(|key| key.root == root);
    (images, labels)
}

/// The documented augmentation and normalisation, pixel by pixel. NHWC.
pub(crate) fn slow_image(
    toy: &Toy,
    normalization: &Normalization,
    config: &GatherConfig,
    epoch: u64,
    sample: u32,
) -> Vec<f32> {
    let Toy { channels, height, width, .. } = *toy;
    let augment = config.augment;
    let image = toy.image(sample);
    let mut random = Rng::new(config.seed, Purpose::Augment, epoch, u64::from(sample));
    let w: Vec<u64> = (0..5).map(|_| u64::from(random.next_u32())).collect();
    let padding = augment.crop_padding as i64;
    let top = ((w[0] * (2 * padding as u64 + 1)) >> 32) as i64 - padding;
    let left = ((w[1] * (2 * padding as u64 + 1)) >> 32) as i64 - padding;
    let flip = augment.flip && w[2] >= 1 << 31;
    let half = (augment.cutout / 2) as i64;
    let cut_top = ((w[3] * height as u64) >> 32) as i64 - half;
    let cut_left = ((w[4] * width as u64) >> 32) as i64 - half;
    let mut result = vec![];
    for y in 0..height as i64 {
        for x in 0..width as i64 {
            for c in 0..channels {
                let column = if flip { width as i64 - 1 - x } else { x };
                let (row, column) = (y + top, column + left);
                let inside =
                    (0..height as i64).contains(&row) && (0..width as i64).contains(&column);
                let place = (row * width as i64 + column) * channels as i64 + c as i64;
                let stored = if inside { toy.stored(image[place as usize]) } else { 0.0 };
                let (mean, std) =
                    (f64::from(normalization.mean[c]), f64::from(normalization.std[c]));
                let one = if toy.floats { 1.0 } else { 255.0 };
                let (scale, shift) = ((1.0 / (one * std)) as f32, (-mean / std) as f32);
                let value = stored * scale + shift;
                let side = augment.cutout as i64;
                let cut = (cut_top..cut_top + side).contains(&y)
                    && (cut_left..cut_left + side).contains(&x);
                result.push(if cut { 0.0 } else { value });
            }
        }
    }
    result
}
