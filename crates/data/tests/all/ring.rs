//! The ring of batch buffers under consumers that lag (D3, D5).

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use meristem_data::order::{OrderConfig, plan};
use meristem_data::{Batch, GatherBatches, GatherConfig};
use meristem_device::random::{Purpose, Rng};
use meristem_device::{Args, DeviceId, Stream, Tensor};
use proptest::prelude::*;

use crate::common::{Toy, slow_image};

/// Batches seen by a consumer: env, inputs in memory order (as bits), targets.
type Seen = (usize, Vec<u32>, Vec<u32>);

/// Reads batches on a separate stream, some time after they were gathered, and holds some of them.
struct Consumer {
    stream: Stream,
    held: VecDeque<[Tensor; 2]>,
    random: Rng,
    seen: SyncSender<Seen>,
}

impl Consumer {
    /// Reads a batch later; holds at most `hold` batches, as many as is picked at random.
    fn take(&mut self, batch: &Batch, hold: usize) {
        let tensors = [&batch.inputs, &batch.targets].map(|x| x.on(&self.stream).unwrap());
        let (env, seen, lag) = (batch.env, self.seen.clone(), self.random.below(40));
        let kernel = move |args: &mut Args<'_>| {
            for _ in 0..lag {
                std::thread::yield_now();
            }
            let inputs = args.read::<f32>(0).iter().map(|v| v.to_bits()).collect();
            seen.send((env, inputs, args.read::<u32>(1).to_vec())).unwrap();
        };
        self.stream.launch("read").read(&tensors[0]).read(&tensors[1]).run(kernel).unwrap();
        self.held.push_back(tensors);
        let keep = self.random.below(hold as u32 + 1) as usize;
        while self.held.len() > keep {
            self.held.pop_front();
        }
    }
}

#[derive(Clone, Debug)]
struct Case {
    toy: Toy,
    envs: usize,
    depth: usize,
    batch: usize,
    drop_last: bool,
    seed: u64,
}

fn any_case() -> impl Strategy<Value = Case> {
    let depth = prop::sample::select(&[2_usize, 3, 5][..]);
    (1..50_usize, 1..4_usize, 1..4_usize, depth, 1..7_usize, any::<bool>(), any::<u64>()).prop_map(
        |(len, threads, envs, depth, batch, drop_last, seed)| {
            let toy = Toy { len, channels: 2, height: 3, width: 3, threads, floats: false };
            Case { toy, envs, depth, batch, drop_last, seed }
        },
    )
}

/// The sequential gather: every batch of these epochs, by env.
fn expected(case: &Case, config: &GatherConfig, epochs: u64) -> Vec<Vec<Seen>> {
    let order = OrderConfig {
        ranks: None,
        own: None,
        len: case.toy.len,
        parts: None,
        batch_per_env: case.batch,
        devices: config.devices.clone(),
        epoch_mode: config.epoch_mode,
        seed: case.seed,
        shuffle: true,
        drop_last: case.drop_last,
        max_batches: None,
    };
    let normalization = case.toy.dataset().1.normalization();
    let mut all = vec![vec![]; case.envs];
    for (epoch, plan) in plan(&order, epochs).unwrap().epochs.into_iter().enumerate() {
        let parts = plan.batches.iter().flat_map(|parts| parts.iter().enumerate());
        for (env, part) in parts.filter(|(_, part)| !part.is_empty()) {
            let image = |i: &u32| slow_image(&case.toy, &normalization, config, epoch as u64, *i);
            let inputs = part.iter().flat_map(image).map(f32::to_bits).collect();
            all[env].push((env, inputs, part.iter().map(|i| case.toy.label(*i)).collect()));
        }
    }
    all
}

fn by_env(seen: &Receiver<Seen>, envs: usize) -> Vec<Vec<Seen>> {
    let mut all = vec![vec![]; envs];
    seen.try_iter().for_each(|batch| all[batch.0].push(batch));
    all
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60, failure_persistence: None, ..ProptestConfig::default()
    })]

    /// Consumers on separate streams, each of which lags by random amounts and holds up to all but
    /// one of an env's buffers, receive the batches of the sequential gather. After the first epoch
    /// nothing is allocated, and no ring has grown.
    #[test]
    fn lagging_consumers_see_the_sequential_gather(case in any_case()) {
        const EPOCHS: u64 = 4;
        let (device, dataset) = case.toy.dataset();
        let streams: Vec<Stream> = (0..case.envs).map(|_| device.stream("env")).collect();
        let config = GatherConfig {
            ring_depth: case.depth,
            drop_last: case.drop_last,
            seed: case.seed,
            ..GatherConfig::new(case.batch, vec![DeviceId::Cpu(0); case.envs])
        };
        let mut gather = GatherBatches::new(&config, &[dataset], &streams).unwrap();
        let (send, seen) = sync_channel(10_000);
        let mut consumers: Vec<Consumer> = (0..case.envs as u64)
            .map(|env| Consumer {
                stream: device.stream("consumer"),
                held: VecDeque::new(),
                random: Rng::new(case.seed, Purpose::Test, env, 0),
                seen: send.clone(),
            })
            .collect();
        let mut after_first = None;
        for epoch in 0..EPOCHS {
            gather.start_epoch(epoch).unwrap();
            while let Some(step) = gather.next().unwrap() {
                // The producer's handle counts until it is dropped: one buffer less to hold.
                for batch in step {
                    consumers[batch.env].take(&batch, case.depth - 1);
                }
            }
            after_first.get_or_insert_with(|| (device.counts(), device.memory()));
        }
        let (counts, memory) = after_first.unwrap();
        prop_assert_eq!((device.counts() - counts).allocations, 0);
        prop_assert_eq!((device.counts() - counts).synchronizations, 0);
        prop_assert_eq!(device.memory().peak, memory.peak);
        prop_assert_eq!(device.memory().reserved_peak, memory.reserved_peak);
        prop_assert_eq!(gather.ring_growth(), 0);
        device.synchronize().unwrap();
        prop_assert_eq!(by_env(&seen, case.envs), expected(&case, &config, EPOCHS));
    }
}

/// Memory is flat over 1,000 epochs though the consumer lags, at each depth.
#[test]
fn a_thousand_epochs_with_a_lagging_consumer_are_flat() {
    for depth in [2, 3, 5] {
        let toy = Toy { len: 11, channels: 1, height: 2, width: 2, threads: 2, floats: false };
        let (device, dataset) = toy.dataset();
        let env = device.stream("env");
        let config =
            GatherConfig { ring_depth: depth, ..GatherConfig::new(4, vec![DeviceId::Cpu(0)]) };
        let mut gather = GatherBatches::new(&config, &[dataset], &[env]).unwrap();
        let (send, seen) = sync_channel(3 * 1001);
        let mut consumer = Consumer {
            stream: device.stream("consumer"),
            held: VecDeque::new(),
            random: Rng::new(depth as u64, Purpose::Test, 0, 0),
            seen: send,
        };
        let mut after_first = None;
        for epoch in 0..=1000 {
            gather.start_epoch(epoch).unwrap();
            while let Some(mut step) = gather.next().unwrap() {
                consumer.take(&step.remove(0), depth - 1);
            }
            after_first.get_or_insert_with(|| (device.counts(), device.memory()));
        }
        device.synchronize().unwrap();
        let (counts, memory) = after_first.unwrap();
        assert_eq!((device.counts() - counts).allocations, 0, "depth {depth}");
        assert_eq!(device.memory(), memory, "depth {depth}");
        assert_eq!(seen.try_iter().count(), 3 * 1001);
    }
}
