//! Calls that are refused.

use std::ops::Range;
use std::sync::Arc;

use meristem_data::{Augment, Dataset, Error, GatherBatches, GatherConfig, Normalization, Subset};
use meristem_device::{DeviceId, Error as DeviceError, Stream};

use super::cpus;
use crate::common::Toy;

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
