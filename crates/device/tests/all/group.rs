//! Groups: launches of several streams that touch each other's tensors.

use meristem_device::{
    Device, DeviceId, DeviceOptions, Error, LaunchGroup, Owner, Property, Stream, Tensor,
};

fn open(threads: usize) -> Device {
    Device::open(DeviceId::Cpu(0), &DeviceOptions { threads, ..DeviceOptions::default() }).unwrap()
}

fn filled(stream: &Stream, value: f32, len: usize) -> Tensor {
    Tensor::from_slice(stream, &vec![value; len], [len], Owner::Other).unwrap()
}

/// Every stream adds a share of all tensors and writes it back to all of them, many times over,
/// with launches of the streams' own in between: as a sequential sum.
#[test]
fn shares_of_each_others_tensors() {
    for (threads, n) in [(1, 2), (2, 2), (2, 3), (3, 5)] {
        let device = open(threads);
        let streams: Vec<Stream> = (0..n).map(|i| device.stream(&format!("rank {i}"))).collect();
        let tensors: Vec<Tensor> = streams.iter().map(|s| filled(s, 1.0, 10 * n)).collect();
        let mut expected = 1.0f32;
        for round in 0..50 {
            let shares: Vec<Vec<Tensor>> = (0..n)
                .map(|rank| tensors.iter().map(|t| t.view(10 * rank, [10]).unwrap()).collect())
                .collect();
            let mut group = LaunchGroup::default();
            for (stream, shares) in streams.iter().zip(&shares) {
                let launch = shares.iter().fold(stream.launch("sum"), |l, share| l.write(share));
                launch
                    .join(&mut group, move |args| {
                        let mut all: Vec<&mut [f32]> = (0..n).map(|i| args.write(i)).collect();
                        for i in 0..10 {
                            let sum: f32 = all.iter().map(|x| x[i]).sum();
                            all.iter_mut().for_each(|x| x[i] = sum);
                        }
                    })
                    .unwrap();
            }
            group.run().unwrap();
            let mut sum = 0.0;
            for (rank, (stream, tensor)) in streams.iter().zip(&tensors).enumerate() {
                let scale = 1.0 / (n + rank + round % 2) as f32;
                let kernel = move |args: &mut meristem_device::Args<'_>| {
                    args.write::<f32>(0).iter_mut().for_each(|x| *x *= scale)
                };
                stream.launch("scale").write(tensor).run(kernel).unwrap();
            }
            // A rank's value after the sum, times its scale, is an input of the next sum.
            let before = if round == 0 { n as f32 } else { expected };
            for rank in 0..n {
                sum += before * (1.0 / (n + rank + round % 2) as f32);
            }
            expected = sum;
        }
        let mut total = 0.0;
        for tensor in &tensors {
            let values = tensor.to_vec::<f32>().unwrap();
            assert!(values.iter().all(|v| v == &values[0]), "{threads} workers, {n} streams");
            total += values[0];
        }
        assert_eq!(total, expected, "{threads} workers, {n} streams");
    }
}

#[test]
fn later_work_of_every_stream_comes_after_the_whole_group() {
    let device = open(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    for _ in 0..200 {
        let (x, y) = (filled(&a, 1.0, 1000), filled(&b, 2.0, 1000));
        let mut group = LaunchGroup::default();
        // The launch of `a` reads a tensor of `b` slowly; the launch of `b` does nothing.
        a.launch("copy")
            .read(&y)
            .write(&x)
            .join(&mut group, |args| {
                std::thread::yield_now();
                args.write::<f32>(1).copy_from_slice(args.read(0));
            })
            .unwrap();
        b.launch("nothing").join(&mut group, |_| {}).unwrap();
        group.run().unwrap();
        b.launch("overwrite").write(&y).run(|args| args.write::<f32>(0).fill(3.0)).unwrap();
        drop(y);
        assert_eq!(x.to_vec::<f32>().unwrap(), [2.0; 1000]);
    }
}

#[test]
fn what_would_race_is_refused() {
    let device = open(1);
    let (a, b, c) = (device.stream("a"), device.stream("b"), device.stream("c"));
    let (x, foreign) = (filled(&a, 1.0, 4), filled(&c, 1.0, 4));
    let (low, high) = (x.view(0, [3]).unwrap(), x.view(2, [2]).unwrap());
    let mut group = LaunchGroup::default();
    b.launch("high").read(&foreign).read(&high).join(&mut group, |_| {}).unwrap();
    a.launch("low").write(&low).join(&mut group, |_| {}).unwrap();
    c.launch("of c").join(&mut group, |_| {}).unwrap();
    let error = group.run().unwrap_err();
    assert!(matches!(error, Error::Overlap { .. }), "{error}");
    let words = "`low`: `argument 0 of launch 1` is written and overlaps `argument 1 of launch 0 \
                 (high)`";
    assert!(error.to_string().starts_with(words), "{error}");
    let mut group = LaunchGroup::default();
    a.launch("a").read(&foreign).join(&mut group, |_| {}).unwrap();
    let error = group.run().unwrap_err();
    assert!(matches!(error, Error::Mismatch { property: Property::Stream, .. }), "{error}");
    let other = open(1).stream("a");
    let mut group = LaunchGroup::default();
    a.launch("a").join(&mut group, |_| {}).unwrap();
    other.launch("a").join(&mut group, |_| {}).unwrap();
    assert!(matches!(group.run(), Err(Error::Mismatch { property: Property::Device, .. })));
    LaunchGroup::default().run().unwrap();
    // One stream twice: in order.
    let (low, high) = (x.view(0, [2]).unwrap(), x.view(2, [2]).unwrap());
    let mut group = LaunchGroup::default();
    a.launch("low").write(&low).join(&mut group, |args| args.write::<f32>(0).fill(5.0)).unwrap();
    a.launch("high").write(&high).join(&mut group, |args| args.write::<f32>(0).fill(6.0)).unwrap();
    group.run().unwrap();
    assert_eq!(x.to_vec::<f32>().unwrap(), [5.0, 5.0, 6.0, 6.0]);
}

#[test]
fn a_panic_fails_every_stream_of_the_group() {
    let device = open(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let (x, y) = (filled(&a, 1.0, 4), filled(&b, 1.0, 4));
    let mut group = LaunchGroup::default();
    a.launch("bad").write(&x).join(&mut group, |_| panic!("on purpose")).unwrap();
    b.launch("good").write(&y).join(&mut group, |_| {}).unwrap();
    group.run().unwrap();
    for tensor in [&x, &y] {
        let error = tensor.to_vec::<f32>().unwrap_err();
        assert!(matches!(error, Error::KernelPanicked { operation: "bad", .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("on purpose") && text.contains("stream `a`"), "{text}");
    }
}
