//! The values of batches, against slow, obvious versions (D1–D8, F1, F2).

use std::collections::BTreeSet;
use std::sync::Arc;

use meristem_data::order::{OrderConfig, OrderPart, plan};
use meristem_data::{Augment, Dataset, Error, GatherBatches, GatherConfig, Subset};
use meristem_device::{DType, Device, DeviceId, DeviceOptions, MemoryFormat, Stream};
use proptest::prelude::*;

use super::any_case::{Case, any_case};
use super::cpus;
use crate::common::{Image, Toy, batch_of, epoch_of, slow_image};

fn slow_parts(subset: &Subset) -> Option<Vec<OrderPart>> {
    let Subset::PerEnv(lists) = subset else { return None };
    let same = |list: &Arc<[u32]>| lists.iter().position(|other| other == list).unwrap();
    Some(lists.iter().map(|list| OrderPart { number: same(list), len: list.len() }).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Every value of every batch equals the documented value, bit for bit, with the kernels of
    /// every instruction set, for any distribution of envs over devices; a hole is refused.
    #[test]
    fn batches_equal_the_slow_reference(case in any_case()) {
        let Case { toy, config, epoch, isa } = case;
        let options =
            DeviceOptions { threads: toy.threads, isa: Some(isa), ..DeviceOptions::default() };
        let served = config.served.clone().unwrap_or(0..config.devices.len());
        let ids: BTreeSet<DeviceId> = config.devices[served.clone()].iter().copied().collect();
        let opened: Vec<(Device, Arc<Dataset>)> =
            ids.iter().map(|id| toy.dataset_on(Device::open(*id, &options).unwrap())).collect();
        let on = |id| &opened.iter().find(|(device, _)| device.id() == id).unwrap().0;
        let streams: Vec<Stream> = served
            .clone()
            .map(|env| on(config.devices[env]).stream(&format!("env {env}")))
            .collect();
        let datasets: Vec<Arc<Dataset>> = opened.iter().map(|(_, data)| data.clone()).collect();
        let dataset = &datasets[0];
        let gather = GatherBatches::new(&config, &datasets, &streams);
        let subset = config.subset.clone();
        let order = OrderConfig {
            ranks: None,
            own: None,
            len: if let Subset::Shared(list) = &subset { list.len() } else { toy.len },
            parts: slow_parts(&subset),
            batch_per_env: config.batch_per_env,
            devices: config.devices.clone(),
            epoch_mode: config.epoch_mode,
            seed: config.seed,
            shuffle: config.shuffle,
            drop_last: config.drop_last,
            max_batches: config.max_batches,
        };
        let (expected, mut gather) = match (plan(&order, epoch + 1), gather) {
            (Ok(mut plan), Ok(gather)) => (plan.epochs.pop().unwrap().batches, gather),
            (Err(Error::Hole { .. }), Err(Error::Hole { .. })) => return Ok(()),
            (plan, gather) => {
                prop_assert!(false, "{plan:?} but {gather:?}");
                return Ok(());
            }
        };
        prop_assert_eq!(gather.len(), expected.len());
        gather.start_epoch(epoch).unwrap();
        for parts in &expected {
            let batches = gather.next().unwrap().unwrap();
            let present = |(env, part): &(usize, &Vec<u32>)| {
                served.contains(env) && !part.is_empty()
            };
            let parts: Vec<_> = parts.iter().enumerate().filter(present).collect();
            prop_assert_eq!(batches.len(), parts.len());
            for (batch, (env, part)) in batches.iter().zip(parts) {
                prop_assert_eq!(batch.env, env);
                let (inputs, targets) = batch_of(batch);
                let subset = subset.of_env(env);
                let samples = part.iter().map(|i| subset.map_or(*i, |s| s[*i as usize]));
                let samples: Vec<u32> = samples.collect();
                let expected: Vec<u32> = samples.iter().map(|i| toy.label(*i)).collect();
                prop_assert_eq!(targets, expected);
                for (sample, image) in samples.iter().zip(inputs.chunks(toy.shape().numel())) {
                    let image: Vec<u32> = image.iter().map(|v| v.to_bits()).collect();
                    let slow = slow_image(&toy, &dataset.normalization(), &config, epoch, *sample);
                    let slow: Vec<u32> = slow.iter().map(|v| v.to_bits()).collect();
                    prop_assert_eq!(image, slow, "sample {} {:?}", sample, config.augment);
                }
            }
        }
        prop_assert!(gather.next().unwrap().is_none());
        prop_assert!(gather.next().unwrap().is_none());
    }
}

/// F1, F2: the interface is (N, C, H, W), and memory is NHWC, also for partial batches.
#[test]
fn strides_are_channels_last() {
    let toy = Toy { len: 10, channels: 3, height: 4, width: 5, threads: 2, floats: false };
    let (device, dataset) = toy.dataset();
    let images = dataset.resident().unwrap();
    assert_eq!((images.dims(), images.strides()), (&[10, 3, 4, 5][..], vec![60, 1, 15, 3]));
    assert_eq!((images.dtype(), images.format()), (DType::U8, MemoryFormat::ChannelsLast));
    let config = GatherConfig::new(8, cpus(1));
    let mut gather = GatherBatches::new(&config, &[dataset], &[device.stream("env")]).unwrap();
    gather.start_epoch(0).unwrap();
    for n in [8, 2] {
        let batch = gather.next().unwrap().unwrap().remove(0);
        assert_eq!(batch.inputs.dims(), [n, 3, 4, 5]);
        assert_eq!(batch.inputs.strides(), [60, 1, 15, 3]);
        assert_eq!((batch.inputs.dtype(), batch.targets.dtype()), (DType::F32, DType::U32));
        assert_eq!(batch.inputs.format(), MemoryFormat::ChannelsLast);
        assert_eq!(batch.targets.dims(), [n]);
        // Another stream's handle, and a view of the last image.
        let other = batch.inputs.on(&device.stream("other")).unwrap();
        assert_eq!(other.strides(), [60, 1, 15, 3]);
        let last = batch.inputs.view_with_format((n - 1) * 60, [1, 3, 4, 5], batch.inputs.format());
        assert_eq!(last.unwrap().strides(), [60, 1, 15, 3]);
    }
}

/// D6: the same bits twice in a process and for every number of threads.
#[test]
fn batches_do_not_depend_on_threads() {
    let epoch = |threads| {
        let toy = Toy { len: 37, channels: 3, height: 5, width: 6, threads, floats: false };
        let (device, dataset) = toy.dataset();
        let augment = Augment { crop_padding: 2, flip: true, cutout: 2 };
        let config = GatherConfig { augment, seed: 9, ..GatherConfig::new(4, cpus(3)) };
        epoch_of(&device, &dataset, &config, 2)
    };
    let one = epoch(1);
    for threads in [1, 2, 5] {
        assert_eq!(epoch(threads), one);
    }
}

/// D8: augmentation is keyed by the sample, so neither batch size nor number of envs change it.
#[test]
fn augmentation_does_not_depend_on_batching() {
    let toy = Toy { len: 30, channels: 2, height: 6, width: 5, threads: 2, floats: false };
    let by_sample = |batch, envs, epoch| {
        let (device, dataset) = toy.dataset();
        let augment = Augment { crop_padding: 1, flip: true, cutout: 2 };
        let config =
            GatherConfig { augment, shuffle: false, ..GatherConfig::new(batch, cpus(envs)) };
        let images = epoch_of(&device, &dataset, &config, epoch);
        images.into_iter().flatten().collect::<Vec<Image>>()
    };
    let one = by_sample(1, 1, 3);
    assert_eq!(by_sample(7, 1, 3), one);
    assert_eq!(by_sample(4, 3, 3), one);
    assert_ne!(by_sample(1, 1, 4), one);
}

/// An epoch can be begun at any time, again, and in any order; the last one begun counts.
#[test]
fn epochs_can_be_begun_anywhere() {
    let toy = Toy { len: 20, channels: 1, height: 2, width: 2, threads: 2, floats: false };
    let (device, dataset) = toy.dataset();
    let config = GatherConfig::new(6, cpus(1));
    let mut gather =
        GatherBatches::new(&config, std::slice::from_ref(&dataset), &[device.stream("e")]).unwrap();
    for number in [7, 3, 7] {
        gather.start_epoch(number).unwrap();
        gather.next().unwrap();
    }
    for number in 0..50 {
        gather.start_epoch(number).unwrap();
    }
    gather.start_epoch(3).unwrap();
    let mut seen = vec![];
    while let Some(step) = gather.next().unwrap() {
        seen.push(step.iter().map(batch_of).map(|(inputs, _)| inputs).collect::<Vec<_>>());
    }
    let fresh = epoch_of(&device, &dataset, &config, 3);
    assert_eq!(
        seen.concat(),
        fresh
            .into_iter()
            .map(|b| b.into_iter().flat_map(|i| i.inputs).collect())
            .collect::<Vec<Vec<f32>>>()
    );
}
