//! The memory of batches: none is shared, and none is allocated in an epoch.

use meristem_data::order::{EpochMode, OrderConfig, plan};
use meristem_data::{Augment, GatherBatches, GatherConfig, Normalization};
use meristem_device::Stream;

use super::cpus;
use crate::common::Toy;

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
