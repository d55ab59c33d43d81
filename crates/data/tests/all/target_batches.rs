//! Gathered batches with classes, labels or numbers, in every storage (D12).

use meristem_data::{GatherBatches, GatherConfig, Residency, Source, Split, TargetKind, cache};
use meristem_device::{Device, Stream, read_back};
use proptest::prelude::*;

use crate::common::cpu;
use crate::common::files::spec_of;
use crate::inputs::{Named, info_of, write_npz};
use crate::targets::numbers;

/// A dataset whose sample i has the byte or float i in each of its features.
#[derive(Clone, Debug)]
pub(crate) struct TargetCase {
    samples: usize,
    features: usize,
    is_byte: bool,
    kind: TargetKind,
    width: usize,
    residency: Residency,
    envs: usize,
    batch: usize,
    shuffle: bool,
    seed: u64,
}

pub(crate) fn any_target_case() -> impl Strategy<Value = TargetCase> {
    let kind = prop::sample::select(vec![
        TargetKind::Classes,
        TargetKind::Labels,
        TargetKind::Numbers,
        TargetKind::Numbers,
    ]);
    let residency = [Residency::Resident, Residency::ResidentF32, Residency::Streamed];
    let sizes = (1..40_usize, prop::sample::select(vec![1, 3, 6]), any::<bool>());
    let width = prop_oneof![8 => 1..9_usize, 1 => Just(300)];
    let targets = (kind, width, prop::sample::select(residency.to_vec()));
    let envs = (1..4_usize, 1..8_usize, any::<bool>(), any::<u64>());
    (sizes, targets, envs).prop_map(
        |((samples, features, is_byte), (kind, width, residency), (envs, batch, shuffle, seed))| {
            // Integers of one column are classes.
            let width = if kind == TargetKind::Classes { 1 } else { width };
            TargetCase {
                samples,
                features,
                is_byte,
                kind,
                width,
                residency,
                envs,
                batch,
                shuffle,
                seed,
            }
        },
    )
}

/// A gathered sample: bits of its first input and of its targets.
type Gathered = (u32, Vec<u32>);

impl TargetCase {
    /// Target `k` of sample i, as it is in the file.
    fn target(&self, sample: usize, k: usize) -> f64 {
        match self.kind {
            TargetKind::Classes => (sample % 3) as f64,
            TargetKind::Labels => ((sample * 5 + k * 3) % 7) as f64 / 8.0,
            TargetKind::Numbers => (sample * sample) as f64 * 0.37 - (k * sample) as f64 - 3.0,
        }
    }

    fn arrays(&self) -> [Named; 2] {
        let Self { samples, features, width, .. } = *self;
        let inputs: Vec<f64> =
            (0..samples).flat_map(|sample| vec![sample as f64; features]).collect();
        let dtype = if self.is_byte { "|u1" } else { "<f4" };
        let targets: Vec<f64> =
            (0..samples * width).map(|i| self.target(i / width, i % width)).collect();
        let targets = match self.kind {
            TargetKind::Classes => numbers("train_labels", "<i8", &[samples], &targets),
            TargetKind::Labels => numbers("train_labels", "<f8", &[samples, width], &targets),
            TargetKind::Numbers => numbers("train_targets", "<f8", &[samples, width], &targets),
        };
        [numbers("train_inputs", dtype, &[samples, features], &inputs), targets]
    }

    /// The samples of an epoch, on this device.
    pub(crate) fn gathered(&self, device: &Device) -> Vec<Gathered> {
        let folder = tempfile::tempdir().unwrap();
        let spec = spec_of(Source::Arrays, &write_npz(folder.path(), &self.arrays()));
        let data = cache::load(device, &spec, Split::Train, self.residency).unwrap();
        let config = GatherConfig {
            shuffle: self.shuffle,
            seed: self.seed,
            ..GatherConfig::new(self.batch, vec![device.id(); self.envs])
        };
        let streams: Vec<Stream> = (0..self.envs).map(|_| device.stream("env")).collect();
        let mut gathered = vec![];
        // A hole in the plan is refused before anything is gathered.
        if let Ok(mut gather) = GatherBatches::new(&config, &[data], &streams) {
            gather.start_epoch(1).unwrap();
            // Batches are held, so that each has its own memory.
            let mut held = vec![];
            while let Some(batches) = gather.next().unwrap() {
                held.extend(batches);
            }
            for batch in &held {
                let n = batch.inputs.dims()[0];
                match self.kind {
                    TargetKind::Classes => assert_eq!(batch.targets.dims(), [n]),
                    _ => assert_eq!(batch.targets.dims(), [n, self.width]),
                }
                let bits = read_back(&[&batch.inputs, &batch.targets]).unwrap();
                let words = |bytes: &[u8]| -> Vec<u32> {
                    bytes.chunks(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect()
                };
                let (inputs, targets) = (words(&bits[0]), words(&bits[1]));
                let targets = targets.chunks(self.width).map(<[u32]>::to_vec);
                gathered.extend(inputs.into_iter().step_by(self.features).zip(targets));
            }
        }
        let root = spec.root.map(|root| root.canonicalize().unwrap());
        cache::clear(|key| key.root == root);
        gathered
    }

    /// Every sample as it should be gathered.
    fn expected(&self) -> Vec<Gathered> {
        let folder = tempfile::tempdir().unwrap();
        let spec = spec_of(Source::Arrays, &write_npz(folder.path(), &self.arrays()));
        let info = info_of(&spec);
        let normalization = meristem_data::Normalization { mean: info.mean, std: info.std };
        let (scale, shift) = normalization.multiply_add(info.stored)[0];
        let target = |sample: usize, k: usize| {
            let y = self.target(sample, k);
            match self.kind {
                TargetKind::Classes => y as u32,
                TargetKind::Labels => (y as f32).to_bits(),
                TargetKind::Numbers => {
                    (((y - info.target_mean[k]) / info.target_std[k]) as f32).to_bits()
                }
            }
        };
        let all = 0..self.samples;
        all.map(|sample| {
            let input = (sample as f32 * scale + shift).to_bits();
            (input, (0..self.width).map(|k| target(sample, k)).collect())
        })
        .collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Every gathered sample has its own targets, bit for bit, in any storage and order.
    #[test]
    fn batches_have_the_targets_of_their_samples(case in any_target_case()) {
        let expected = case.expected();
        let gathered = case.gathered(&cpu(2));
        for sample in &gathered {
            prop_assert!(expected.contains(sample), "{:?} in {:?}", sample, expected);
        }
        if !case.shuffle && case.envs == 1 {
            prop_assert_eq!(gathered, expected);
        }
    }
}
