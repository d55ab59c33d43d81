//! Random datasets, configurations and instruction sets.

use std::sync::Arc;

use meristem_data::order::EpochMode;
use meristem_data::{Augment, GatherConfig, Subset};
use meristem_device::{DeviceId, Isa};
use proptest::prelude::*;

use crate::common::Toy;

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) toy: Toy,
    pub(crate) config: GatherConfig,
    pub(crate) epoch: u64,
    pub(super) isa: Isa,
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
