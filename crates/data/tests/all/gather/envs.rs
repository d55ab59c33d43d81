//! Envs with separate epochs, options or samples, and the envs of a rank.

use meristem_data::{Augment, EnvGather, GatherBatches, GatherConfig};
use meristem_device::Stream;

use super::cpus;
use crate::common::{
    Toy, batch_of, own_epochs_are_those_of_all, own_options_are_those_of_all,
    own_samples_are_those_of_all,
};

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
    gather.start_epoch(0).unwrap();
    let error = gather.set(0, EnvGather { batch: 3, seed: 0, augment }).unwrap_err().to_string();
    assert!(error.contains("`own`"), "{error}");
    let wide = Augment { cutout: 5, ..augment };
    assert!(gather.set(0, EnvGather { batch: 4, seed: 0, augment: wide }).is_err());
    assert!(gather.next().unwrap().is_some(), "refused options end no epoch");
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
