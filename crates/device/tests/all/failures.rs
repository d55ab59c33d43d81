//! A refused operation has no effect. A panic fails only its stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use meristem_device::{
    DType, Device, DeviceId, DeviceOptions, Error, MemoryFormat, Owner, Property, Tensor, read_back,
};

use crate::common::{Gate, cpu, filled, set};

fn assert_panicked(result: Result<(), Error>, name: &str, text: &str) {
    match result {
        Err(Error::KernelPanicked { operation, message, site, .. }) => {
            assert_eq!(operation, name);
            assert!(message.contains(text), "{message}");
            assert!(site.file().ends_with("failures.rs"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_panic_fails_its_stream_only() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let gate = Gate::close(&a);
    let ran = Arc::new(AtomicUsize::new(0));
    let x = filled(&a, 4, 1);
    a.launch("bad").write(&x).run(|_| panic!("no {}", "luck")).unwrap();
    let later = ran.clone();
    let count = move |_: &mut meristem_device::Args<'_>| {
        later.fetch_add(1, Ordering::Relaxed);
    };
    a.launch("later").run(count).unwrap();
    gate.open();
    assert_panicked(a.synchronize(), "bad", "no luck");
    assert_panicked(a.record().synchronize(), "bad", "no luck");
    assert_panicked(a.launch("more").run(|_| {}), "bad", "no luck");
    assert_panicked(x.to_vec::<u32>().map(drop), "bad", "no luck");
    assert_panicked(device.synchronize(), "bad", "no luck");
    assert_panicked(x.copy_from_slice(&[1u32; 4]), "bad", "no luck");
    let new = Tensor::from_slice(&a, &[1u32], [1], Owner::Other);
    assert_panicked(new.map(drop), "bad", "no luck");
    assert_eq!(ran.load(Ordering::Relaxed), 0);
    // The other stream is well, even with memory of the failed one.
    assert_eq!(filled(&b, 4, 9).to_vec::<u32>().unwrap(), [9; 4]);
}

#[test]
fn what_was_done_before_a_panic_is_good() {
    let device = cpu(1);
    let a = device.stream("a");
    let x = filled(&a, 4, 1);
    let before = a.record();
    a.launch("bad").run(|_| panic!("late")).unwrap();
    assert_panicked(a.synchronize(), "bad", "late");
    before.synchronize().unwrap();
    // Another stream may still use results from before the panic.
    let b = device.stream("b");
    assert_eq!(x.on(&b).unwrap().to_vec::<u32>().unwrap(), [1; 4]);
}

#[test]
fn a_failure_follows_its_result() {
    for in_flight in [true, false] {
        let device = cpu(2);
        let (a, b, c) = (device.stream("a"), device.stream("b"), device.stream("c"));
        let x = filled(&a, 4, 1);
        let gate = in_flight.then(|| Gate::close(&a));
        a.launch("bad").write(&x).run(|_| panic!("spoilt")).unwrap();
        if !in_flight {
            assert_panicked(a.synchronize(), "bad", "spoilt");
        }
        let used = x.on(&b);
        if in_flight {
            let x_on_b = used.unwrap();
            let y = Tensor::empty(&b, [4], DType::U32, Owner::Other).unwrap();
            let copy = b.launch("copy").read(&x_on_b).write(&y);
            copy.run(|args| args.write::<u32>(1).copy_from_slice(args.read(0))).unwrap();
            c.wait(&a.record()).unwrap();
        } else {
            assert_panicked(used.map(drop), "bad", "spoilt");
            assert_panicked(c.wait(&a.record()), "bad", "spoilt");
        }
        if let Some(gate) = gate {
            gate.open();
            assert_panicked(b.synchronize(), "bad", "spoilt");
            assert_panicked(c.synchronize(), "bad", "spoilt");
        } else {
            b.synchronize().unwrap();
        }
    }
}

/// However a panic falls between the checks of a thread that uses the result: some call returns the
/// error.
#[test]
fn a_failure_is_never_missed() {
    let device = cpu(2);
    let b = device.stream("witness");
    for n in 0..if cfg!(miri) { 20 } else { 5000 } {
        let (a, c) = (device.stream("a"), device.stream("c"));
        let x = Tensor::zeros(&a, [4], DType::U32, Owner::Other).unwrap();
        // Without the panic hook, which would print.
        let bad = |_: &mut meristem_device::Args<'_>| std::panic::resume_unwind(Box::new("spoilt"));
        a.launch("bad").write(&x).run(bad).unwrap();
        for _ in 0..n % 97 {
            std::hint::spin_loop();
        }
        let used = if n % 2 == 0 { x.on(&c).map(drop) } else { c.wait(&a.record()) };
        assert_panicked(used.and_then(|()| c.synchronize()), "bad", "spoilt");
    }
    b.synchronize().unwrap();
}

/// A write that is ordered after a read does not fail if the reader panics.
#[test]
fn a_failed_reader_spoils_nothing() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = filled(&a, 4, 1);
    let x_on_b = x.on(&b).unwrap();
    let gate = Gate::close(&b);
    b.launch("bad").read(&x_on_b).run(|_| panic!("reader")).unwrap();
    set(&a, &x, 2).unwrap();
    gate.open();
    assert_eq!(x.to_vec::<u32>().unwrap(), [2; 4]);
    assert_panicked(b.synchronize(), "bad", "reader");
}

#[test]
fn odd_panics_are_reported() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }
    let device = cpu(1);
    let a = device.stream("a");
    a.launch("payload").run(|_| std::panic::panic_any(7)).unwrap();
    assert_panicked(a.synchronize(), "payload", "no message");
    // Destructors of values that a kernel owns run on the worker too.
    let b = device.stream("b");
    let bomb = Bomb;
    b.launch("drop").run(move |_| drop(bomb)).unwrap();
    assert_panicked(b.synchronize(), "drop", "dropped");
    device.stream("c").launch("well").run(|_| {}).unwrap();
}

#[test]
fn mistakes_in_a_kernel_are_named() {
    type Kernel = fn(&mut meristem_device::Args<'_>);
    let kernels: [(&str, Kernel); 6] = [
        ("argument 2 does not exist: the launch has 2", |args| {
            assert!(args.read::<u32>(2).is_empty());
        }),
        ("must be f32, got u32", |args| assert!(args.read::<f32>(0).is_empty())),
        ("argument 0 is declared as Read", |args| args.write::<u32>(0).fill(0)),
        ("argument 1 is declared as Write", |args| assert!(args.read::<u32>(1).is_empty())),
        ("argument 1 was taken before", |args| {
            args.write::<u32>(1);
            args.write::<u32>(1);
        }),
        ("must be i64, got u32", |args| args.write::<i64>(1).fill(0)),
    ];
    let device = cpu(1);
    for (text, kernel) in kernels {
        let stream = device.stream("s");
        let (x, y) = (filled(&stream, 4, 1), filled(&stream, 4, 2));
        stream.launch("wrong").read(&x).write(&y).run(kernel).unwrap();
        assert_panicked(stream.synchronize(), "wrong", text);
    }
}

#[test]
fn refused_launches_leave_nothing_enqueued() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let elsewhere = cpu(1);
    let foreign = filled(&elsewhere.stream("f"), 8, 1);
    let (x, y) = (filled(&a, 8, 1), filled(&a, 8, 2));
    let on_b = y.on(&b).unwrap();
    let (low, high, middle) =
        (x.view(0, [4]).unwrap(), x.view(4, [4]).unwrap(), x.view(2, [4]).unwrap());
    let ran = Arc::new(AtomicUsize::new(0));
    let before = device.counts();
    let end = a.record();
    let kernel = || {
        let ran = ran.clone();
        move |_: &mut meristem_device::Args<'_>| {
            ran.fetch_add(1, Ordering::Relaxed);
        }
    };
    for (launch, argument) in [
        (a.launch("t").read(&x).write(&x), "argument 1"),
        (a.launch("t").write(&x).write(&x), "argument 0"),
        (a.launch("t").write(&low).read(&middle), "argument 0"),
        (a.launch("t").read(&high).read(&y).write(&middle), "argument 2"),
    ] {
        let error = launch.run(kernel()).unwrap_err();
        assert!(error.to_string().contains(argument), "{error}");
        assert!(matches!(error, Error::Overlap { .. }), "{error}");
    }
    let error = a.launch("t").read(&x).read(&on_b).run(kernel()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("argument 1") && text.contains("`a`") && text.contains("`b`"), "{text}");
    assert!(matches!(error, Error::Mismatch { property: Property::Stream, .. }));
    let error = a.launch("t").read(&foreign).run(kernel()).unwrap_err();
    assert!(matches!(error, Error::Mismatch { property: Property::Device, .. }), "{error}");
    assert!(matches!(foreign.on(&a), Err(Error::Mismatch { property: Property::Device, .. })));
    assert!(matches!(
        read_back(&[&x, &foreign]),
        Err(Error::Mismatch { property: Property::Device, .. })
    ));
    assert_eq!(device.counts(), before);
    assert_eq!(format!("{:?}", a.record()), format!("{end:?}"));
    device.synchronize().unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), 0);
    // Adjacent windows and overlapping reads are allowed.
    a.launch("t").write(&low).write(&high).run(kernel()).unwrap();
    a.launch("t").read(&x).read(&middle).run(kernel()).unwrap();
    device.synchronize().unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), 2);
}

#[test]
fn bad_arguments_are_named() {
    let device = cpu(1);
    let s = device.stream("s");
    let other = Owner::Other;
    let x = filled(&s, 6, 1);
    let texts = |error: &Error, words: [&str; 2]| {
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    for (result, words) in [
        (Tensor::from_slice(&s, &[1.0f32], [2], other).map(drop), ["2 elements", "got 1"]),
        (x.copy_from_slice(&[1u32]), ["6 elements", "got 1"]),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::WrongLength { .. }), "{error:?}");
        texts(&error, words);
    }
    for (result, words) in [
        (x.copy_from_slice(&[1i64; 6]), ["must be u32", "got i64"]),
        (x.to_vec::<f32>().map(drop), ["u32", "f32"]),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Mismatch { property: Property::DType, .. }), "{error:?}");
        texts(&error, words);
    }
    for (result, words) in [
        (x.view(3, [4]).map(drop), ["3..7", "the tensor, which has 6"]),
        (x.view(usize::MAX, [2]).map(drop), ["outside", "the tensor, which has 6"]),
        (
            x.copy_from_shared(Arc::new([0u8; 30]), 10),
            ["10..34", "the source (bytes), which has 30"],
        ),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::OutOfBounds { .. }), "{error:?}");
        texts(&error, words);
    }
    for (result, words) in [
        (
            Tensor::empty(&s, &[1, 1, 1, 1, 1][..], DType::U8, other),
            ["at most 4 dimensions", "5 dimensions"],
        ),
        (Tensor::empty(&s, [usize::MAX, 9], DType::U8, other), ["shape", "9]"]),
        (x.view_with_format(0, [2, 3], MemoryFormat::ChannelsLast), ["(N, C, H, W)", "[2, 3]"]),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::BadShape { .. }), "{error:?}");
        texts(&error, words);
    }
}

#[test]
fn devices_that_cannot_be_opened() {
    let options = DeviceOptions::default();
    let error = Device::open(DeviceId::Cuda(99), &options).unwrap_err();
    let text = error.to_string();
    match error {
        Error::Cuda { device: DeviceId::Cuda(99), .. } if cfg!(feature = "cuda") => {}
        Error::NotCompiled { device: DeviceId::Cuda(99) } => {
            assert!(text.starts_with("cuda:99 is not part of this build"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    let options = DeviceOptions { threads: usize::MAX, ..options };
    let error = Device::open(DeviceId::Cpu(0), &options).unwrap_err();
    assert!(matches!(error, Error::BadOption { option: "threads", .. }), "{error}");
    assert!(Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap().threads() > 0);
}

proptest::proptest! {
    /// A launch is refused exactly if a written argument shares a byte with another. The error
    /// names such a pair, the written argument first.
    #[test]
    fn overlaps_are_found_as_by_comparing_all_pairs(
        windows in proptest::collection::vec((0..2usize, 0..24usize, 0..5usize, 0..4u8), 0..12),
    ) {
        let device = cpu(1);
        let a = device.stream("a");
        let storages = [filled(&a, 32, 1), filled(&a, 32, 1)];
        let view = |&(storage, start, len, _): &(usize, usize, usize, u8)| {
            storages[storage].view(start, [len]).unwrap()
        };
        let tensors: Vec<Tensor> = windows.iter().map(view).collect();
        let is_written = |i: usize| windows[i].3 == 0;
        let launch = (0..tensors.len()).fold(a.launch("t"), |launch, i| {
            if is_written(i) { launch.write(&tensors[i]) } else { launch.read(&tensors[i]) }
        });
        let has = |i: usize, storage: usize, byte: usize| {
            let (of, start, len, _) = windows[i];
            of == storage && (start..start + len).contains(&byte)
        };
        let overlap = |i: usize, j: usize| {
            let common = |k| has(i, k / 32, k % 32) && has(j, k / 32, k % 32);
            i != j && is_written(i) && (0..64usize).any(common)
        };
        let n = windows.len();
        let all = (0..n * n).map(|k| (k / n, k % n));
        let pairs: Vec<_> = all.filter(|&(i, j)| overlap(i, j)).collect();
        match launch.run(|_| {}) {
            Ok(()) => proptest::prop_assert!(pairs.is_empty(), "{pairs:?}"),
            Err(Error::Overlap { argument, other, .. }) => {
                let number = |text: &str| text["argument ".len()..].parse::<usize>().unwrap();
                let named = (number(&argument), number(&other));
                proptest::prop_assert!(pairs.contains(&named), "{named:?} of {pairs:?}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}
