//! Gathered batches against slow, obvious versions (D1–D8, F1, F2).

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use meristem_data::order::{EpochMode, OrderConfig, OrderPart, plan};
use meristem_data::{
    Augment, Dataset, EnvGather, Error, GatherBatches, GatherConfig, Normalization, Subset,
};
use meristem_device::{
    DType, Device, DeviceId, DeviceOptions, Error as DeviceError, Isa, MemoryFormat, Stream,
};
use proptest::prelude::*;

use crate::common::{
    Image, Toy, batch_of, epoch_of, own_epochs_are_those_of_all, own_options_are_those_of_all,
    own_samples_are_those_of_all, slow_image,
};

fn cpus(envs: usize) -> Vec<DeviceId> {
    vec![DeviceId::Cpu(0); envs]
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) toy: Toy,
    pub(crate) config: GatherConfig,
    pub(crate) epoch: u64,
    isa: Isa,
}

/// All samples, every second one for all envs, or lists of each env: of different lengths, of which
/// some are equal, and some have samples twice.
fn any_subset(kind: u32, len: usize, envs: usize) -> Subset {
    let list = |keep: &dyn Fn(u32) -> bool| -> Arc<[u32]> {
        (0..len as u32).filter(|i| keep(*i)).collect()
    };
    let of_env = |env: u32| match kind {
        2 => list(&|i| i % 3 != env % 3),
        3 => list(&|i| i < 7 * env),
        _ => [list(&|_| true), list(&|i| i % 2 == env % 2)].concat().into(),
    };
    match kind {
        0 => Subset::All,
        1 => Subset::Shared(list(&|i| i % 2 == 0)),
        _ => Subset::PerEnv((0..envs as u32).map(of_env).collect()),
    }
}

fn slow_parts(subset: &Subset) -> Option<Vec<OrderPart>> {
    let Subset::PerEnv(lists) = subset else { return None };
    let same = |list: &Arc<[u32]>| lists.iter().position(|other| other == list).unwrap();
    Some(lists.iter().map(|list| OrderPart { number: same(list), len: list.len() }).collect())
}

pub(crate) fn any_case() -> impl Strategy<Value = Case> {
    let channels = prop_oneof![4 => 1..=4_usize, 1 => 5..60_usize];
    let toy = (0..60_usize, channels, 1..9_usize, 1..9_usize, 1..4_usize, any::<bool>());
    let device = prop::sample::select([0, 0, 0, 1, 7].map(DeviceId::Cpu).to_vec());
    let devices = prop::collection::vec(device, 1..6);
    let numbers = (1..20_usize, devices, any::<u64>(), 0..4_u64);
    let mode = prop::sample::select(vec![EpochMode::Full, EpochMode::Dealt]);
    let subset = 0..5_u32;
    let flags = (any::<bool>(), any::<bool>(), subset, prop::option::of(1..4_usize), mode);
    let augment = (any::<bool>(), 0..9_usize, any::<bool>(), 0..9_usize);
    let served = prop::option::of((0..4_usize, 1..4_usize));
    let isa = prop::sample::select(Isa::available());
    (toy, numbers, flags, augment, served, isa).prop_map(
        |(
            (len, channels, height, width, threads, floats),
            numbers,
            flags,
            augment,
            served,
            isa,
        )| {
            let (batch, devices, seed, epoch) = numbers;
            let envs = devices.len();
            let (shuffle, drop_last, subset, max_batches, epoch_mode) = flags;
            let shorter = height.min(width);
            let augment = match augment {
                (false, ..) => Augment::NONE,
                (true, padding, flip, cutout) => Augment {
                    crop_padding: padding.min(shorter),
                    flip,
                    cutout: cutout.min(shorter),
                },
            };
            let config = GatherConfig {
                epoch_mode,
                shuffle,
                drop_last,
                seed,
                augment,
                max_batches,
                subset: any_subset(subset, len, envs),
                served: served.map(|(first, n)| first % envs..(first % envs + n).min(envs)),
                ..GatherConfig::new(batch, devices)
            };
            Case { toy: Toy { len, channels, height, width, threads, floats }, config, epoch, isa }
        },
    )
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

/// D3: no two batches that are alive at once share a byte, within a step and over a lagging one.
#[test]
fn no_two_live_batches_share_memory() {
    let toy = Toy { len: 100, channels: 1, height: 3, width: 3, threads: 2, floats: false };
    let (device, dataset) = toy.dataset();
    let streams: Vec<Stream> = (0..4).map(|_| device.stream("env")).collect();
    let config = GatherConfig::new(5, cpus(4));
    let mut gather = GatherBatches::new(&config, &[dataset], &streams).unwrap();
    gather.start_epoch(0).unwrap();
    let mut held = vec![];
    for _ in 0..2 {
        held.extend(gather.next().unwrap().unwrap());
    }
    let mut ranges: Vec<(u64, u64)> = vec![];
    for batch in &held {
        assert_eq!(*batch.inputs.stream(), streams[batch.env]);
        for tensor in [&batch.inputs, &batch.targets] {
            ranges.push((tensor.address(), tensor.address() + 4 * tensor.numel() as u64));
        }
    }
    let mut ids: Vec<u64> = held.iter().map(|batch| batch.inputs.storage_id()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 8);
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:?}");
}

/// D5: after the first epoch nothing is allocated, memory is constant over 1,000 epochs, only
/// permutations are copied, and nothing waits. The modes differ by the memory of one permutation
/// per env.
#[test]
fn an_epoch_after_the_first_allocates_nothing() {
    let toy = Toy { len: 23, channels: 3, height: 4, width: 4, threads: 2, floats: false };
    let [dealt, full] = [(EpochMode::Dealt, 6), (EpochMode::Full, 12)].map(|(epoch_mode, all)| {
        let (device, dataset) = toy.dataset();
        let streams = [device.stream("a"), device.stream("b")];
        let augment = Augment::STANDARD;
        let config = GatherConfig { augment, epoch_mode, ..GatherConfig::new(4, cpus(2)) };
        let mut gather = GatherBatches::new(&config, &[dataset], &streams).unwrap();
        let mut epoch = |number: u64| {
            gather.start_epoch(number).unwrap();
            let mut batches = 0;
            while let Some(step) = gather.next().unwrap() {
                batches += step.len() as u64;
            }
            batches
        };
        epoch(0);
        device.synchronize().unwrap();
        let (counts, memory) = (device.counts(), device.memory());
        for number in 1..=1000 {
            assert_eq!(epoch(number), all);
        }
        let used = device.counts() - counts;
        assert_eq!((used.allocations, used.synchronizations, used.copies_to_host), (0, 0, 0));
        assert_eq!((used.copies_to_device, used.launches), (1000, 1000 * all));
        device.synchronize().unwrap();
        assert_eq!((device.memory().current, device.memory().peak), (memory.current, memory.peak));
        assert_eq!(gather.ring_growth(), 0);
        memory.current
    });
    assert_eq!(full - dealt, 2 * (23 + 2) * 4, "two sets of one more permutation with its epoch");
}

/// Each env may be in another epoch, and any envs may be selected.
#[test]
fn each_env_may_have_its_own_epoch() {
    let toy = Toy { len: 23, channels: 3, height: 4, width: 4, threads: 2, floats: false };
    let (device, dataset) = toy.dataset();
    own_epochs_are_those_of_all(&device, &dataset);
}

/// Each env may have its own batch, seed and augmentation.
#[test]
fn each_env_may_have_its_own_options() {
    let toy = Toy { len: 23, channels: 3, height: 4, width: 4, threads: 2, floats: false };
    let (device, dataset) = toy.dataset();
    own_options_are_those_of_all(&device, &dataset);
    let augment = Augment::NONE;
    let own = Some(vec![EnvGather { batch: 4, seed: 1, augment }; 2]);
    let streams = [device.stream("a"), device.stream("b")];
    let data = &[dataset];
    let dealt = GatherConfig { own, ..GatherConfig::new(4, cpus(2)) };
    let error = GatherBatches::new(&dealt, data, &streams).unwrap_err().to_string();
    assert!(error.contains("`own`") && error.contains("batch 4 with seed 1"), "{error}");
    let mut gather =
        GatherBatches::new(&GatherConfig { own: None, ..dealt }, data, &streams).unwrap();
    gather.set(0, EnvGather { batch: 4, seed: 0, augment }).unwrap();
    let error = gather.set(0, EnvGather { batch: 3, seed: 0, augment }).unwrap_err().to_string();
    assert!(error.contains("`own`"), "{error}");
    let wide = Augment { cutout: 5, ..augment };
    assert!(gather.set(0, EnvGather { batch: 4, seed: 0, augment: wide }).is_err());
}

/// Each env may have its own samples.
#[test]
fn each_env_may_have_its_own_samples() {
    let toy = Toy { len: 23, channels: 3, height: 4, width: 4, threads: 2, floats: false };
    let (device, dataset) = toy.dataset();
    own_samples_are_those_of_all(&device, &dataset);
    let streams = [device.stream("a"), device.stream("b")];
    let dealt = GatherConfig::new(4, cpus(2));
    let mut gather = GatherBatches::new(&dealt, &[dataset], &streams).unwrap();
    let error = gather.set_samples(0, &[1].into()).unwrap_err().to_string();
    assert!(error.contains("`parts`") && error.contains("epoch mode full"), "{error}");
}

/// A ring has memory only while its env is selected.
#[test]
fn only_selected_envs_have_batches_in_memory() {
    let toy = Toy { len: 23, channels: 3, height: 4, width: 4, threads: 2, floats: false };
    let (device, dataset) = toy.dataset();
    let streams = [device.stream("a"), device.stream("b")];
    let of = |selected: Option<Vec<usize>>| GatherConfig {
        epoch_mode: EpochMode::Full,
        selected,
        ..GatherConfig::new(4, cpus(2))
    };
    let used = || device.memory().current;
    let before = used();
    let mut gather =
        GatherBatches::new(&of(Some(vec![1])), std::slice::from_ref(&dataset), &streams).unwrap();
    let one = used();
    gather.select(|_| true).unwrap();
    let both = used();
    gather.select(|env| env == 0).unwrap();
    device.synchronize().unwrap();
    assert_eq!(used(), one);
    assert!(before < one && one < both);
    drop(gather);
    let all = GatherBatches::new(&of(None), &[dataset], &streams).unwrap();
    device.synchronize().unwrap();
    assert_eq!(used(), both);
    drop(all);
}

/// D5: a lagging consumer on another stream reads its own batch; one that holds every buffer makes
/// the ring grow, once.
#[test]
fn a_lagging_consumer_is_safe() {
    let toy = Toy { len: 64, channels: 1, height: 8, width: 8, threads: 3, floats: false };
    for (depth, lag) in [(2, 1), (2, 4), (3, 2), (2, 16)] {
        let (device, dataset) = toy.dataset();
        let (env, slow) = (device.stream("env"), device.stream("slow"));
        let normalization = Some(Normalization { mean: vec![0.0], std: vec![1.0 / 255.0] });
        let config =
            GatherConfig { ring_depth: depth, normalization, ..GatherConfig::new(4, cpus(1)) };
        let mut gather = GatherBatches::new(&config, &[dataset], &[env]).unwrap();
        let order = OrderConfig {
            ranks: None,
            own: None,
            len: 64,
            parts: None,
            batch_per_env: 4,
            devices: cpus(1),
            epoch_mode: EpochMode::Dealt,
            seed: 0,
            shuffle: true,
            drop_last: false,
            max_batches: None,
        };
        let (sums, received) = std::sync::mpsc::sync_channel(1000);
        let mut held = std::collections::VecDeque::new();
        for epoch in 0..3 {
            gather.start_epoch(epoch).unwrap();
            while let Some(mut step) = gather.next().unwrap() {
                let on_slow = step.remove(0).inputs.on(&slow).unwrap();
                let sums = sums.clone();
                let read = slow.launch("slow reader").read(&on_slow);
                read.run(move |args| {
                    std::thread::sleep(std::time::Duration::from_micros(300));
                    let sum: f64 = args.read::<f32>(0).iter().map(|v| f64::from(v.round())).sum();
                    let _ = sums.send(sum);
                })
                .unwrap();
                held.push_back(on_slow);
                if held.len() > lag {
                    held.pop_front();
                }
            }
        }
        slow.synchronize().unwrap();
        let received: Vec<f64> = received.try_iter().collect();
        let mut expected: Vec<f64> = vec![];
        for epoch in plan(&order, 3).unwrap().epochs {
            for batch in epoch.batches {
                let pixels = batch[0].iter().flat_map(|i| toy.image(*i));
                expected.push(pixels.map(f64::from).sum());
            }
        }
        assert_eq!(received, expected, "depth {depth}, lag {lag}");
        assert_eq!(
            gather.ring_growth(),
            (lag + 1).saturating_sub(depth),
            "depth {depth}, lag {lag}"
        );
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

/// A gather for a rank's own envs gives the same batches as a gather for all envs, in the partial
/// last batch too.
#[test]
fn the_envs_of_a_rank_are_served_alone() {
    let toy = Toy { len: 23, channels: 2, height: 4, width: 4, threads: 2, floats: false };
    let (device, dataset) = toy.dataset();
    let whole = GatherConfig { augment: Augment::STANDARD, ..GatherConfig::new(2, cpus(4)) };
    let epoch = |config: &GatherConfig, envs: usize| {
        let streams: Vec<Stream> = (0..envs).map(|_| device.stream("env")).collect();
        let data = std::slice::from_ref(&dataset);
        let mut gather = GatherBatches::new(config, data, &streams).unwrap();
        let mut all = vec![];
        for number in 0..2 {
            gather.start_epoch(number).unwrap();
            while let Some(batches) = gather.next().unwrap() {
                all.push(batches.iter().map(|b| (b.env, batch_of(b))).collect::<Vec<_>>());
            }
        }
        all
    };
    let expected = epoch(&whole, 4);
    // 23 = 8 + 8 + 7: the last env has one sample less in the last batch; served alone, it gets the
    // same batch.
    assert_eq!(expected.len(), 6);
    for serve in [0..1, 1..3, 3..4, 0..4, 2..2] {
        let own =
            epoch(&GatherConfig { served: Some(serve.clone()), ..whole.clone() }, serve.len());
        for (own, all) in own.iter().zip(&expected) {
            let all: Vec<_> = all.iter().filter(|(env, _)| serve.contains(env)).collect();
            assert_eq!(own.iter().collect::<Vec<_>>(), all);
        }
        assert_eq!(own.len(), expected.len());
    }
    // 23 = 10 + 10 + 3: nothing is left for the last two of five.
    let five = GatherConfig::new(2, cpus(5));
    let last = epoch(&GatherConfig { served: Some(3..5), ..five }, 2);
    assert_eq!(last.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 0, 2, 2, 0]);
}

#[test]
fn errors_name_the_wrong_argument() {
    let toy = Toy { len: 10, channels: 1, height: 2, width: 2, threads: 1, floats: false };
    let (device, dataset) = toy.dataset();
    let (other_device, longer) = Toy { len: 11, ..toy }.dataset();
    let streams = [device.stream("a"), device.stream("b")];
    let error = |config: &GatherConfig, datasets: &[Arc<Dataset>], streams: &[Stream]| {
        // A refused call has run nothing and allocated nothing (V1).
        let state = || [&device, &other_device].map(|d| (d.counts(), d.memory()));
        let before = state();
        let error = GatherBatches::new(config, datasets, streams).unwrap_err();
        assert_eq!(state(), before, "{error}");
        error
    };
    let good = GatherConfig::new(2, cpus(2));
    let data = std::slice::from_ref(&dataset);

    let mut gather = GatherBatches::new(&good, data, &streams).unwrap();
    assert!(matches!(gather.next(), Err(Error::EpochNotStarted)));

    let contains = |error: &Error, parts: &[&str]| {
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    let expect = |error: Error, parts: &[&str]| {
        assert!(matches!(error, Error::Argument { .. }), "{error:?}");
        contains(&error, parts);
    };
    let refused = error(&GatherConfig::new(0, cpus(2)), data, &streams);
    expect(refused, &["`batch_per_env`", "at least 1", "got 0"]);
    expect(error(&GatherConfig::new(2, vec![]), data, &[]), &["`devices`", "got none"]);
    let refused = error(&GatherConfig::new(2, cpus(3)), data, &streams);
    expect(refused, &["`devices`", "2 envs", "got 3 devices"]);
    let beyond = GatherConfig { served: Some(1..3), ..good.clone() };
    expect(error(&beyond, data, &streams), &["`served`", "of the 2 envs", "got 1..3"]);
    expect(error(&good, &[], &streams), &["`datasets`", "got none"]);
    let refused = error(&good, &[dataset.clone(), longer.clone()], &streams);
    expect(refused, &["`datasets`", "10 samples", "11 samples"]);
    expect(error(&good, &[longer], &streams), &["`datasets`", "opening"]);
    let mixed = [streams[0].clone(), other_device.stream("c")];
    expect(error(&good, data, &mixed), &["`streams`", "env 1"]);
    // Streams of a device that was opened a second time.
    let all_foreign = [other_device.stream("a"), other_device.stream("b")];
    let refused = error(&good, data, &all_foreign);
    expect(refused, &["`datasets`", "one on cpu (the same opening of it)", "got cpu"]);
    // An unavailable device is named as such, with and without CUDA in the build.
    let cuda = GatherConfig::new(2, vec![DeviceId::Cpu(0), DeviceId::Cuda(99)]);
    let refused = error(&cuda, data, &streams);
    let unavailable = matches!(
        refused,
        Error::Device(DeviceError::NotCompiled { .. } | DeviceError::Cuda { .. })
    );
    assert!(unavailable, "{refused:?}");
    contains(&refused, &["cuda:99"]);
    for serve in [1..3, Range { start: 2, end: 1 }] {
        let refused = error(&GatherConfig { served: Some(serve), ..good.clone() }, data, &streams);
        expect(refused, &["`served`", "some of the 2 envs"]);
    }
    let shallow = GatherConfig { ring_depth: 1, ..good.clone() };
    expect(error(&shallow, data, &streams), &["`ring_depth`", "at least 2", "got 1"]);
    let outside = Subset::Shared(Arc::from([0, 10]));
    let outside = GatherConfig { subset: outside, ..good.clone() };
    expect(error(&outside, data, &streams), &["`subset`", "below 10", "got 10"]);
    let augment = Augment { crop_padding: 3, ..Augment::NONE };
    let padded = GatherConfig { augment, ..good.clone() };
    expect(error(&padded, data, &streams), &["crop_padding", "at most 2", "got 3"]);
    for std in [vec![0.0], vec![f32::NAN], vec![1.0, 1.0]] {
        let normalization = Some(Normalization { mean: vec![0.0], std });
        let odd = GatherConfig { normalization, ..good.clone() };
        expect(error(&odd, data, &streams), &["`normalization`", "1 channels"]);
    }
    let slices = |images: &[u8], labels: &[u32]| {
        let classes = vec!["a".to_string(), "b".to_string()];
        Dataset::from_slices(&device, toy.shape(), images, labels, classes).unwrap_err()
    };
    expect(slices(&[0; 8], &[0, 1, 1]), &["`images`", "3 images", "8 bytes"]);
    expect(slices(&[0; 8], &[0, 2]), &["`labels`", "below 2", "2 at 1"]);
}
