//! Tests of launches that wait for their kernels (S4).

use crate::ground::random::{Purpose, Rng};
use crate::handles::{Device, DeviceOptions, Environment};
use crate::{DType, DeviceId, Error, Owner, Tensor};

fn open(launch_blocking: bool) -> Device {
    let environment = Environment { launch_blocking, ..Environment::default() };
    Device::open_in(DeviceId::Cpu(0), &DeviceOptions::default(), environment).unwrap()
}

/// A chain of launches over three streams.
fn result(device: &Device) -> Vec<f32> {
    let streams = ["a", "b", "c"].map(|name| device.stream(name));
    let mut rng = Rng::new(5, Purpose::Test, 0, 0);
    let start: Vec<f32> = (0..100).map(|_| rng.uniform()).collect();
    let mut x = Tensor::from_slice(&streams[0], &start, [100], Owner::Other).unwrap();
    for n in 0..300 {
        let stream = &streams[rng.below(3) as usize];
        let input = x.on(stream).unwrap();
        let next = Tensor::empty(stream, [100], DType::F32, Owner::Other).unwrap();
        let launch = stream.launch("step").read(&input).write(&next);
        let kernel = move |args: &mut crate::Args<'_>| {
            let x = args.read::<f32>(0);
            let y = args.write::<f32>(1);
            y.iter_mut().enumerate().for_each(|(i, y)| *y = (x[i] + x[(i + n) % 100]).sin());
        };
        launch.run(kernel).unwrap();
        x = next;
    }
    x.to_vec().unwrap()
}

#[test]
fn results_are_the_same() {
    assert_eq!(result(&open(true)), result(&open(false)));
}

#[test]
fn a_launch_is_done_when_it_returns() {
    let device = open(true);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = Tensor::zeros(&a, [4], DType::U32, Owner::Other).unwrap();
    for n in 0..100 {
        a.launch("set").write(&x).run(move |args| args.write::<u32>(0).fill(n)).unwrap();
        assert!(a.record().is_done());
    }
    // A kernel's panic is returned by its own launch. The waits are not the program's, and not
    // counted.
    let error = b.launch("bad").run(|_| panic!("at once")).unwrap_err();
    assert!(matches!(error, Error::KernelPanicked { operation: "bad", .. }), "{error}");
    assert_eq!(device.counts().synchronizations, 0);
    // A launch from inside of a kernel cannot wait for itself.
    let inner = a.clone();
    a.launch("outer").run(move |_| inner.launch("inner").run(|_| {}).unwrap()).unwrap();
    a.synchronize().unwrap();
}
