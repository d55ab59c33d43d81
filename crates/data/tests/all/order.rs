//! The order of samples against a slow, obvious version (D2, D4, D6).

use std::collections::BTreeSet;

use meristem_data::Error;
use meristem_data::order::{
    EpochMode, EpochOrder, OrderConfig, OrderPart, OrderPlan, plan, split_by_seed,
};
use meristem_device::DeviceId;
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};

fn config(len: usize, batch_per_env: usize, devices: &str) -> OrderConfig {
    OrderConfig {
        ranks: None,
        own: None,
        len,
        parts: None,
        batch_per_env,
        devices: devices.split(',').map(|name| name.parse().unwrap()).collect(),
        epoch_mode: EpochMode::Dealt,
        seed: 42,
        shuffle: true,
        drop_last: false,
        max_batches: None,
    }
}

fn full(config: OrderConfig) -> OrderConfig {
    OrderConfig { epoch_mode: EpochMode::Full, ..config }
}

/// Device, rank of the first env on it, and envs.
type SlowGroup = (DeviceId, u64, Vec<usize>);

/// The part of an env.
fn slow_part(config: &OrderConfig, env: usize) -> OrderPart {
    let whole = OrderPart { number: 0, len: config.len };
    config.parts.as_ref().map_or(whole, |parts| parts[env])
}

/// The permutation of a group as the documentation of `order` describes it; `rank` is the rank of
/// the group's first env on its device.
fn slow_permutation(config: &OrderConfig, group: &SlowGroup, epoch: u64) -> Vec<u32> {
    let (device, rank, ref envs) = *group;
    let mut items: Vec<u32> = (0..slow_part(config, envs[0]).len as u32).collect();
    if config.shuffle {
        let index = match device {
            DeviceId::Cpu(k) | DeviceId::Cuda(k) => u64::from(k),
        };
        let mut random = ChaCha8Rng::seed_from_u64(config.seed.wrapping_add(1009 * index));
        random.set_stream(epoch + rank * (1 << 40));
        for i in (1..items.len()).rev() {
            let n = i as u64 + 1;
            let j = loop {
                let product = u64::from(random.next_u32()) * n;
                if product % (1 << 32) >= (1 << 32) % n {
                    break product / (1 << 32);
                }
            };
            items.swap(i, j as usize);
        }
    }
    items
}

/// Envs that share a permutation, and the rank of the first of them on its device.
fn slow_groups(config: &OrderConfig) -> Vec<SlowGroup> {
    let mut groups: Vec<SlowGroup> = vec![];
    for (env, device) in config.devices.iter().enumerate() {
        let rank = config.devices[..env].iter().filter(|d| *d == device).count() as u64;
        let number = slow_part(config, env).number;
        let same = |group: &&mut SlowGroup| {
            group.0 == *device && slow_part(config, group.2[0]).number == number
        };
        match groups.iter_mut().find(same) {
            Some(group) if config.epoch_mode == EpochMode::Dealt => group.2.push(env),
            _ => groups.push((*device, rank, vec![env])),
        }
    }
    groups
}

/// Batches of an epoch by dealing out one sample at a time; `None` if there is a hole.
fn slow_epoch(config: &OrderConfig, epoch: u64) -> Option<Vec<Vec<Vec<u32>>>> {
    let groups = slow_groups(config);
    let count = |envs: &[usize]| {
        let len = slow_part(config, envs[0]).len;
        let exact = len as f64 / (config.batch_per_env * envs.len()) as f64;
        let all = (if config.drop_last { exact.floor() } else { exact.ceil() }) as usize;
        all.min(config.max_batches.unwrap_or(usize::MAX))
    };
    let counts = groups.iter().map(|(.., envs)| count(envs));
    let has_parts = config.parts.is_some();
    let batches = if has_parts { counts.max() } else { counts.min() }.unwrap();
    let mut listed = vec![vec![vec![]; config.devices.len()]; batches];
    for group in groups {
        let permutation = slow_permutation(config, &group, epoch);
        let envs = group.2;
        let own = if has_parts { count(&envs) } else { batches };
        let steps = permutation.chunks(config.batch_per_env * envs.len()).take(own);
        for (batch, samples) in listed.iter_mut().zip(steps) {
            let mut sizes = vec![0; envs.len()];
            (0..samples.len()).for_each(|i| sizes[i % envs.len()] += 1);
            let mut samples = samples.iter().copied();
            for (env, size) in envs.iter().zip(sizes) {
                batch[*env] = samples.by_ref().take(size).collect();
            }
        }
    }
    for batch in &mut listed {
        while batch.last().is_some_and(Vec::is_empty) {
            batch.pop();
        }
        if !has_parts && batch.iter().any(Vec::is_empty) {
            return None;
        }
    }
    Some(listed)
}

/// An env's samples of an epoch, in order.
fn samples_of(config: &OrderConfig, env: usize, epoch: u64) -> Vec<u32> {
    let order = EpochOrder::new(config).unwrap();
    let mut indices = vec![0; order.permutation_len(order.permutation_of(env))];
    order.permutation_into(order.permutation_of(env), epoch, &mut indices);
    (0..order.batches()).flat_map(|batch| indices[order.part(batch, env)].to_vec()).collect()
}

/// Envs with the same samples.
fn any_config() -> impl Strategy<Value = OrderConfig> {
    any_config_with_parts().prop_map(|config| OrderConfig { parts: None, ..config })
}

/// Envs with the same samples, or with up to three different parts.
fn any_config_with_parts() -> impl Strategy<Value = OrderConfig> {
    let device = prop_oneof![
        3 => Just(DeviceId::Cpu(0)),
        1 => Just(DeviceId::Cpu(1)),
        1 => Just(DeviceId::Cpu(7)),
        1 => Just(DeviceId::Cuda(0)),
        1 => Just(DeviceId::Cuda(7)),
    ];
    let numbers = (0..200_usize, 1..40_usize, any::<u64>());
    let devices = prop::collection::vec(device, 1..7);
    let flags = (any::<bool>(), any::<bool>(), prop::option::of(1..8_usize));
    let mode = prop::sample::select(vec![EpochMode::Full, EpochMode::Dealt]);
    let parts = prop::option::of((prop::collection::vec(0..200_usize, 3), any::<[u8; 7]>()));
    (numbers, devices, mode, flags, parts).prop_map(
        |((len, batch_per_env, seed), devices, epoch_mode, flags, parts)| {
            let parts = parts.map(|(lens, numbers)| {
                let part = |n: &u8| {
                    let number = usize::from(*n) % 3;
                    OrderPart { number, len: lens[number] }
                };
                numbers[..devices.len()].iter().map(part).collect()
            });
            let (shuffle, drop_last, max_batches) = flags;
            OrderConfig {
                ranks: None,
                own: None,
                len,
                parts,
                batch_per_env,
                devices,
                epoch_mode,
                seed,
                shuffle,
                drop_last,
                max_batches,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn the_plan_is_the_slow_one(config in any_config_with_parts(), epoch in 0..3_u64) {
        match (slow_epoch(&config, epoch), plan(&config, epoch + 1)) {
            (Some(slow), Ok(OrderPlan { epochs, .. })) =>
                prop_assert_eq!(&epochs[epoch as usize].batches, &slow),
            (None, Err(Error::Hole { .. })) => {}
            (slow, plan) => prop_assert!(false, "{slow:?} but {plan:?}"),
        }
    }

    /// D6: an additional device does not change the order of the others.
    #[test]
    fn a_further_device_changes_no_order(config in any_config()) {
        let more = OrderConfig {
            devices: [config.devices.clone(), vec![DeviceId::Cuda(3)]].concat(),
            ..config.clone()
        };
        if let (Ok(before), Ok(after)) = (EpochOrder::new(&config), EpochOrder::new(&more)) {
            let (mut a, mut b) = (vec![0; config.len], vec![0; config.len]);
            for env in 0..before.envs() {
                before.permutation_into(before.permutation_of(env), 5, &mut a);
                after.permutation_into(after.permutation_of(env), 5, &mut b);
                prop_assert_eq!(&a, &b);
            }
            for batch in 0..after.batches() {
                for env in 0..before.envs() {
                    prop_assert_eq!(before.part(batch, env), after.part(batch, env));
                }
            }
        }
    }

    /// For any other envs: with `full` an env gets every sample once, in an order that depends only
    /// on seed, device and its rank on the device.
    #[test]
    fn with_full_an_env_s_order_does_not_depend_on_other_envs(
        config in any_config(), epoch in 0..1_u64 << 40
    ) {
        let config = full(OrderConfig { drop_last: false, max_batches: None, ..config });
        let all: Vec<u32> = (0..config.len as u32).collect();
        let mut orders = vec![];
        for (env, device) in config.devices.iter().enumerate() {
            let order = samples_of(&config, env, epoch);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert_eq!(&sorted, &all);
            // The order with only the device's envs up to this one.
            let others = config.devices[..=env].iter().filter(|other| *other == device);
            let devices: Vec<DeviceId> = others.copied().collect();
            let last = devices.len() - 1;
            let fewer = OrderConfig { devices, ..config.clone() };
            prop_assert_eq!(&order, &samples_of(&fewer, last, epoch));
            orders.push((device.index(), last, order));
        }
        // Any env alone, by its rank.
        for (index, rank, order) in &orders {
            let devices = vec![config.devices[0]];
            let alone = OrderConfig { devices, ranks: Some(vec![*rank]), ..config.clone() };
            if config.devices[0].index() == *index {
                prop_assert_eq!(order, &samples_of(&alone, 0, epoch));
            }
        }
        // 25 samples have more than 2^83 orders.
        if config.shuffle && config.len >= 25 {
            orders.sort();
            orders.dedup_by_key(|(index, rank, _)| (*index, *rank));
            let distinct = orders.iter().map(|(.., order)| order).collect::<BTreeSet<_>>().len();
            prop_assert_eq!(distinct, orders.len());
        }
    }

    /// An env whose part is the whole dataset has the order that it has among envs without parts.
    #[test]
    fn a_part_that_is_the_whole_changes_nothing(
        config in any_config_with_parts(), env in 0..7_usize, epoch in 0..1_u64 << 40
    ) {
        let mut config = full(config);
        let env = env % config.devices.len();
        if let Some(parts) = &mut config.parts {
            parts[env] = OrderPart { number: 7, len: config.len };
        }
        let whole = OrderConfig { parts: None, ..config.clone() };
        prop_assert_eq!(samples_of(&config, env, epoch), samples_of(&whole, env, epoch));
    }

    /// One env on each device gets the same in both modes.
    #[test]
    fn alone_on_a_device_both_modes_are_the_same(config in any_config()) {
        let mut devices = config.devices.clone();
        devices.sort_unstable();
        devices.dedup();
        let alone = OrderConfig { devices, epoch_mode: EpochMode::Dealt, ..config };
        let listed = |config: &OrderConfig| plan(config, 2).unwrap().epochs;
        prop_assert_eq!(listed(&alone), listed(&full(alone.clone())));
    }

    #[test]
    fn a_split_is_a_partition(
        len in 0..2000_usize, held_out in 0.0..=1.0_f64, seed in any::<u64>()
    ) {
        let (train, control) = split_by_seed(len, held_out, seed).unwrap();
        prop_assert_eq!(control.len(), (len as f64 * held_out).round() as usize);
        prop_assert!(train.is_sorted() && control.is_sorted());
        let mut all = [train, control].concat();
        all.sort_unstable();
        prop_assert_eq!(all, (0..len as u32).collect::<Vec<_>>());
    }
}

/// The order is a contract: these numbers never change. They were computed by an implementation in
/// another language (ChaCha8, seeding and shuffle written from the documentation), not by this
/// code.
#[test]
fn pinned_orders() {
    let order = EpochOrder::new(&config(10, 2, "cpu,cuda:1")).unwrap();
    let permutation = |device, epoch| {
        let mut permutation = [0; 10];
        order.permutation_into(device, epoch, &mut permutation);
        permutation
    };
    assert_eq!(permutation(0, 0), [0, 5, 3, 7, 9, 4, 8, 1, 6, 2]);
    assert_eq!(permutation(0, 1), [3, 7, 4, 8, 2, 0, 1, 9, 6, 5]);
    assert_eq!(permutation(1, 0), [9, 5, 7, 0, 6, 3, 8, 2, 4, 1]);
    let full = full(config(10, 2, "cpu,cuda:1,cpu"));
    assert_eq!(samples_of(&full, 0, 1), [3, 7, 4, 8, 2, 0, 1, 9, 6, 5]);
    assert_eq!(samples_of(&full, 1, 0), [9, 5, 7, 0, 6, 3, 8, 2, 4, 1]);
    assert_eq!(samples_of(&full, 2, 0), [6, 4, 3, 8, 7, 1, 5, 2, 0, 9]);
    assert_eq!(samples_of(&full, 2, 3), [6, 8, 2, 7, 5, 9, 0, 3, 4, 1]);
    let (train, control) = split_by_seed(20, 0.2, 42).unwrap();
    assert_eq!(control, [5, 11, 14, 15]);
    assert_eq!(train.len(), 16);
}

#[test]
fn ten_over_three_is_four_three_three() {
    let order = EpochOrder::new(&config(10, 4, "cpu,cpu,cpu")).unwrap();
    let sizes: Vec<usize> = (0..3).map(|env| order.part(0, env).len()).collect();
    assert_eq!((order.batches(), sizes), (1, vec![4, 3, 3]));
}

/// By hand: parts of 10, 4 and 10 samples in batches of 4. Envs 0 and 2 have one part, which
/// `dealt` divides between them.
#[test]
fn envs_with_shorter_parts_have_fewer_batches() {
    let part = |number, len| OrderPart { number, len };
    let parts = Some(vec![part(0, 10), part(1, 4), part(0, 10)]);
    let sizes = |config: &OrderConfig| -> Vec<Vec<usize>> {
        let order = EpochOrder::new(config).unwrap();
        let of_batch = |batch| (0..3).map(|env| order.part(batch, env).len()).collect();
        (0..order.batches()).map(of_batch).collect()
    };
    let dealt = OrderConfig { parts, ..config(10, 4, "cpu,cpu,cpu") };
    assert_eq!(sizes(&dealt), [[4, 4, 4], [1, 0, 1]]);
    assert_eq!(sizes(&full(dealt.clone())), [[4, 4, 4], [4, 0, 4], [2, 0, 2]]);
    let dropped = OrderConfig { drop_last: true, ..full(dealt.clone()) };
    assert_eq!(sizes(&dropped), [[4, 4, 4], [4, 0, 4]]);
    let unequal = OrderConfig { parts: Some(vec![part(0, 10)]), ..dealt };
    let error = EpochOrder::new(&unequal).unwrap_err().to_string();
    assert!(error.contains("`parts` must be a part for each of the 3 envs, got 1"), "{error}");
}

#[test]
fn devices_of_one_index_have_one_order() {
    let listed = plan(&config(40, 20, "cpu:0,cuda,cpu:1,cuda:1"), 1).unwrap();
    let batches = &listed.epochs[0].batches;
    assert_eq!(batches[0][0], batches[0][1]);
    assert_eq!(batches[0][2], batches[0][3]);
    assert_ne!(batches[0][0], batches[0][3]);
    assert_eq!(listed.devices, ["cpu", "cuda:0", "cpu:1", "cuda:1"]);
}

#[test]
fn edges_of_d4() {
    let batches = |config: &OrderConfig| EpochOrder::new(config).unwrap().batches();
    let dropping = |config: OrderConfig| OrderConfig { drop_last: true, ..config };
    assert_eq!(batches(&config(0, 5, "cpu")), 0);
    assert_eq!(batches(&dropping(config(0, 5, "cpu"))), 0);
    assert_eq!(batches(&config(3, 5, "cpu,cpu")), 1);
    assert_eq!(batches(&dropping(config(3, 5, "cpu,cpu"))), 0);
    assert_eq!(batches(&dropping(config(3, usize::MAX, "cpu,cpu"))), 0);
    assert_eq!(batches(&config(3, usize::MAX, "cpu,cpu")), 1);
    // One sample over two envs: the first env has it, the second goes without.
    let listed = plan(&config(1, 5, "cpu,cpu"), 1).unwrap();
    assert_eq!(listed.epochs[0].batches, [[[0]]]);
    // Uneven envs: the device with the fewer batches ends the epoch.
    assert_eq!(batches(&config(50, 5, "cpu,cpu,cuda:1")), 5);
    assert_eq!(batches(&full(config(50, 5, "cpu,cpu,cuda:1"))), 10);
    // One sample goes to every env.
    let listed = plan(&full(config(1, 5, "cpu,cpu")), 1).unwrap();
    assert_eq!(listed.epochs[0].batches, [[[0], [0]]]);
    assert_eq!(EpochOrder::new(&config(0, 5, "cpu")).unwrap().part_max(0), 0);
}

#[test]
fn errors_name_the_wrong_argument() {
    let refused = |result: Result<(), Error>, words: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let order = |config: &OrderConfig| EpochOrder::new(config).map(drop);
    refused(order(&config(50, 0, "cpu")), "`batch_per_env` must be at least 1, got 0");
    let nowhere = OrderConfig { devices: vec![], ..config(50, 5, "cpu") };
    refused(order(&nowhere), "`devices` must be one device for each env");
    let nothing = OrderConfig { max_batches: Some(0), ..config(50, 5, "cpu") };
    refused(order(&nothing), "`max_batches` must be at least 1, got 0");
    refused(order(&config(1 << 33, 5, "cpu")), "`len` must be at most 4294967295");
    // 51 samples: cpu has 1 left for two envs in its last batch, cuda:1 still has a full batch.
    let hole = EpochOrder::new(&config(51, 5, "cpu,cpu,cuda:1")).unwrap_err();
    assert!(matches!(hole, Error::Hole { batch: 5, empty_env: 1, later_env: 2, .. }), "{hole}");
    assert!(hole.to_string().contains("drop_last"), "{hole}");
    // Without a hole, or with the batch dropped, the order is valid.
    assert!(EpochOrder::new(&config(51, 5, "cuda:1,cpu,cpu")).is_ok());
    let dropped = OrderConfig { max_batches: Some(5), ..config(51, 5, "cpu,cpu,cuda:1") };
    assert!(EpochOrder::new(&dropped).is_ok());
    // If every env gets all samples, all envs have the same partial batch.
    assert!(EpochOrder::new(&full(config(51, 5, "cpu,cpu,cuda:1"))).is_ok());
    refused("half".parse::<EpochMode>().map(drop), "must be full or dealt, got `half`");
    for epochs in [u64::MAX, 1 << 40] {
        let words = format!("at most 100000000, got 0 × 1 × {epochs}");
        refused(plan(&config(0, 5, "cpu"), epochs).map(drop), &words);
    }
    for share in [f64::NAN, 1.5] {
        refused(split_by_seed(10, share, 0).map(drop), &format!("got {share}"));
    }
}
