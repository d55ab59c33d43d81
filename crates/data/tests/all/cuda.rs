//! Gathers on a GPU, or on the stand-in driver, are bit for bit equal to gathers on the processor.

use std::sync::Arc;

use meristem_data::{
    Augment, CHUNK_BYTES, Dataset, DatasetSpec, Error, GatherBatches, GatherConfig, Normalization,
    Residency, Split, cache,
};
use meristem_device::{
    Counts, DType, Device, DeviceId, DeviceOptions, Fill, Owner, ScopePolicy, Stream, Tensor,
};
use proptest::prelude::*;

use crate::common::{
    Image, batch_of, epoch_of, own_epochs_are_those_of_all, own_options_are_those_of_all,
    own_samples_are_those_of_all, rest_of,
};
use crate::gather::{Case, any_case};
use crate::stored_types::{are_those_of_f32, halves, integers};
use crate::target_batches::any_target_case;

fn open(id: DeviceId) -> Device {
    let options = DeviceOptions { threads: 2, ..DeviceOptions::default() };
    Device::open(id, &options).unwrap()
}

/// The config with every env on one device.
fn on(id: DeviceId, config: &GatherConfig) -> GatherConfig {
    GatherConfig { devices: vec![id; config.devices.len()], served: None, ..config.clone() }
}

/// An image as bits, and its label.
type Bits = (Vec<u32>, u32);

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn batches_of_16_bit_samples_on_a_gpu_are_those_of_f32() {
    let device = open(DeviceId::Cuda(0));
    are_those_of_f32(&device, integers);
    are_those_of_f32(&device, halves);
}

/// Batches as bits, which distinguish −0 from 0.
fn bits(batches: Vec<Vec<Image>>) -> Vec<Vec<Bits>> {
    let image =
        |image: Image| (image.inputs.iter().map(|value| value.to_bits()).collect(), image.target);
    batches.into_iter().map(|batch| batch.into_iter().map(image).collect()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    #[ignore = "needs a GPU or its stand-in"]
    fn batches_on_a_gpu_are_those_of_the_processor(case in any_case(), centred in any::<bool>()) {
        let Case { toy, mut config, epoch, .. } = case;
        if centred {
            let (mean, std) = (vec![0.0; toy.channels], vec![0.5; toy.channels]);
            config.normalization = Some(Normalization { mean, std });
        }
        let gathered = |id| {
            let (device, dataset) = toy.dataset_on(open(id));
            let config = on(id, &config);
            // A hole in the plan is refused before anything is gathered.
            let streams: Vec<Stream> = config.devices.iter().map(|_| device.stream("s")).collect();
            let copies = std::slice::from_ref(&dataset);
            let refused = GatherBatches::new(&config, copies, &streams).is_err();
            if refused { None } else { Some(bits(epoch_of(&device, &dataset, &config, epoch))) }
        };
        prop_assert_eq!(gathered(DeviceId::Cuda(0)), gathered(DeviceId::Cpu(0)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Classes, labels and numbers, in every storage of their samples.
    #[test]
    #[ignore = "needs a GPU or its stand-in"]
    fn targets_on_a_gpu_are_those_of_the_processor(case in any_target_case()) {
        let gathered = |id| case.gathered(&open(id));
        prop_assert_eq!(gathered(DeviceId::Cuda(0)), gathered(DeviceId::Cpu(0)));
    }
}

/// The first batches of an epoch of the embedded dataset, in this storage.
fn batches(id: DeviceId, residency: Residency) -> (u32, Vec<Vec<Bits>>) {
    let device = open(id);
    let dataset = cache::load(&device, &DatasetSpec::embedded(), Split::Train, residency).unwrap();
    let augment = Augment { crop_padding: 3, flip: true, cutout: 8 };
    let config = GatherConfig {
        augment,
        seed: 7,
        max_batches: Some(3),
        ..GatherConfig::new(24, vec![id; 2])
    };
    let epoch = bits(epoch_of(&device, &dataset, &config, 2));
    let checksum = dataset.checksum().unwrap();
    let key = |key: &cache::CacheKey| key.device == id && key.residency == residency;
    drop::<Arc<Dataset>>(dataset);
    cache::clear(key);
    (checksum, epoch)
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn every_storage_of_a_dataset_serves_the_same_bits() {
    for residency in [Residency::Resident, Residency::ResidentF32, Residency::Streamed] {
        let expected = batches(DeviceId::Cpu(0), residency);
        assert_eq!(expected.1.len(), 6);
        assert!(batches(DeviceId::Cuda(0), residency) == expected, "{residency:?}");
    }
}

/// A load never holds a second copy of the images on the device (D1).
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_load_takes_the_memory_of_one_copy() {
    let device = open(DeviceId::Cuda(0));
    let (spec, resident) = (DatasetSpec::embedded(), Residency::Resident);
    let dataset = cache::load(&device, &spec, Split::Train, resident).unwrap();
    // One byte for each value, and 4 for a label.
    let copy = dataset.len() * (dataset.shape().numel() + 4);
    let peak = device.memory().reserved_peak;
    assert!((copy..copy + 2 * CHUNK_BYTES).contains(&peak), "{peak} bytes for {copy}");
    drop(dataset);
    cache::clear(|key| key.device == DeviceId::Cuda(0));
}

/// The gathers of all envs are one launch, and only the first launch of a size allocates.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn the_envs_of_a_device_are_gathered_at_once() {
    let toy =
        crate::common::Toy { len: 40, channels: 3, height: 5, width: 4, threads: 1, floats: false };
    let (device, dataset) = toy.dataset_on(open(DeviceId::Cuda(0)));
    let config = GatherConfig::new(4, vec![DeviceId::Cuda(0); 3]);
    let streams = ["a", "b", "c"].map(|name| device.stream(name));
    let mut gather = GatherBatches::new(&config, &[dataset], &streams).unwrap();
    for epoch in 0..2 {
        gather.start_epoch(epoch).unwrap();
        let (before, mut batches) = (device.counts(), 0);
        while gather.next().unwrap().is_some() {
            batches += 1;
        }
        let counts = device.counts() - before;
        // Each env gets 4 samples per batch; the last batch has 4 samples for all envs together.
        assert_eq!((batches, counts.launches), (4, 4));
        assert_eq!(counts.allocations, if epoch == 0 { 2 } else { 0 });
    }
}

/// A failed batch ends the epoch, because some envs may have staged one batch more than others; the
/// next epoch is complete.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_failed_batch_ends_the_epoch() {
    let device = open(DeviceId::Cuda(0));
    let (spec, streamed) = (DatasetSpec::embedded(), Residency::Streamed);
    let dataset = cache::load(&device, &spec, Split::Train, streamed).unwrap();
    let config =
        GatherConfig { max_batches: Some(3), ..GatherConfig::new(4, vec![DeviceId::Cuda(0); 2]) };
    let expected = bits(epoch_of(&device, &dataset, &config, 0));
    let streams = ["a", "b"].map(|name| device.stream(name));
    let mut gather = GatherBatches::new(&config, &[dataset], &streams).unwrap();
    gather.start_epoch(0).unwrap();
    let scope = device.hot_scope("no graph", ScopePolicy::Deny);
    let error = gather.next().unwrap_err().to_string();
    assert!(error.contains("forbids any allocation"), "{error}");
    drop(scope);
    assert!(matches!(gather.next(), Err(Error::EpochNotStarted)));
    gather.start_epoch(0).unwrap();
    assert!(bits(rest_of(&mut gather)) == expected);
}

/// Streamed images are loaded ahead by a thread. An epoch may end before the images that it has
/// loaded are used. The sanitizer finds no race of the stream for copies with the others.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn streamed_epochs_may_end_early() {
    let options = DeviceOptions { threads: 2, sanitize: true, ..DeviceOptions::default() };
    let device = Device::open(DeviceId::Cuda(0), &options).unwrap();
    let load = |residency| cache::load(&device, &DatasetSpec::embedded(), Split::Train, residency);
    let [resident, streamed] =
        [Residency::Resident, Residency::Streamed].map(|residency| load(residency).unwrap());
    let config =
        GatherConfig { max_batches: Some(6), ..GatherConfig::new(7, vec![DeviceId::Cuda(0); 3]) };
    let streams = ["a", "b", "c"].map(|name| device.stream(name));
    let mut gather = GatherBatches::new(&config, &[streamed], &streams).unwrap();
    for (epoch, ends_after) in [(0, 2), (1, 0), (1, 5), (2, 1), (3, 3)] {
        gather.start_epoch(epoch).unwrap();
        for _ in 0..ends_after {
            gather.next().unwrap().unwrap();
        }
        gather.start_epoch(epoch + 7).unwrap();
        let expected = bits(epoch_of(&device, &resident, &config, epoch + 7));
        assert!(bits(rest_of(&mut gather)) == expected, "epoch {epoch}");
    }
    let before = device.counts();
    gather.start_epoch(0).unwrap();
    while gather.next().unwrap().is_some() {}
    let spent = device.counts() - before;
    assert_eq!(spent.allocations, 0);
    // The order, the images of 3 envs, and at most one table of addresses for each batch.
    assert!((1 + 3 * 6..=1 + 4 * 6).contains(&spent.copies_to_device), "{spent:?}");
    assert!(device.races().is_empty());
}

/// An env has a fixed number of page-locked buffers for streamed images, which are allocated with
/// the gather. While all are on their way to the device, the host waits: at most once for each
/// batch that it loads, which is counted, and refused where waits are forbidden (H4).
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn waits_for_host_memory_are_counted() {
    const BATCHES: u64 = 40;
    let device = open(DeviceId::Cuda(0));
    let (spec, streamed) = (DatasetSpec::embedded(), Residency::Streamed);
    let dataset = cache::load(&device, &spec, Split::Train, streamed).unwrap();
    let max_batches = Some(BATCHES as usize);
    let config = GatherConfig { max_batches, ..GatherConfig::new(4, vec![DeviceId::Cuda(0); 3]) };
    let streams = ["a", "b", "c"].map(|name| device.stream(name));
    let mut gather = GatherBatches::new(&config, &[dataset], &streams).unwrap();
    gather.start_epoch(0).unwrap();
    assert_eq!(rest_of(&mut gather).len() as u64, 3 * BATCHES);
    // Work after each batch, so that the host is ahead of the device.
    let zeros = |stream| Tensor::zeros(stream, [1 << 10], DType::F32, Owner::Other).unwrap();
    let work = streams.each_ref().map(|stream| (stream, zeros(stream)));
    let train = || {
        for (stream, tensor) in work.iter().cycle().take(3 * 20) {
            stream.fill("train", &[tensor], Fill::Zero).unwrap();
        }
    };
    // Images of the batches after the first, which the epoch begins with, and address tables.
    let copies = Counts { copies_to_device: 3 * (BATCHES - 1) + BATCHES, ..Counts::default() };
    let mut epoch = |epoch, synchronizations| {
        gather.start_epoch(epoch).unwrap();
        let scope = device.hot_scope("epoch", ScopePolicy::Deny);
        let scope = scope.permit(Counts { synchronizations, ..copies });
        let result = loop {
            match gather.next() {
                Ok(Some(_)) => train(),
                Ok(None) => break Ok(()),
                Err(error) => break Err(error.to_string()),
            }
        };
        result.map(|()| scope.finish().counts.synchronizations)
    };
    // The first two batches of each env are loaded before the loop.
    let waits = epoch(1, 3 * (BATCHES - 2)).unwrap();
    // A GPU may be fast enough for the host.
    let is_standin = std::env::var_os("MERISTEM_STANDIN_SEED").is_some();
    assert!(waits > 0 || !is_standin);
    match epoch(2, 0) {
        Ok(_) => assert!(!is_standin),
        Err(error) => {
            assert!(error.contains("any wait") && error.contains("stage.rs"), "{error}");
        }
    }
    // The next epoch is complete.
    epoch(3, 3 * (BATCHES - 2)).unwrap();
}

/// Augmentation follows the epoch of each env as well.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn each_env_may_have_its_own_epoch() {
    let toy =
        crate::common::Toy { len: 23, channels: 3, height: 5, width: 4, threads: 1, floats: false };
    let (device, dataset) = toy.dataset_on(open(DeviceId::Cuda(0)));
    own_epochs_are_those_of_all(&device, &dataset);
    own_options_are_those_of_all(&device, &dataset);
    own_samples_are_those_of_all(&device, &dataset);
}

/// A gathered batch has separate memory per env, although batches of a ring reuse it in turn.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_ring_is_reused_in_stream_order() {
    let toy =
        crate::common::Toy { len: 40, channels: 3, height: 5, width: 4, threads: 1, floats: false };
    let (device, dataset) = toy.dataset_on(open(DeviceId::Cuda(0)));
    let config = GatherConfig::new(4, vec![DeviceId::Cuda(0); 2]);
    let streams = [device.stream("a"), device.stream("b")];
    let mut gather = GatherBatches::new(&config, &[dataset], &streams).unwrap();
    gather.start_epoch(0).unwrap();
    let mut held = vec![];
    let mut targets = vec![];
    while let Some(step) = gather.next().unwrap() {
        for batch in step {
            targets.push(batch_of(&batch));
            held.push(batch); // the ring grows
        }
    }
    for (batch, before) in held.iter().zip(&targets) {
        assert_eq!(&batch_of(batch), before);
    }
}
