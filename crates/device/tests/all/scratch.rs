//! Temporary memory of kernels: one piece for each kernel that can run at the same time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use meristem_device::{
    Args, DType, Device, DeviceId, DeviceOptions, Error, LaunchGroup, Launches, Owner, POISON,
    Scratch, Stream, Tensor,
};

use crate::common::{Gate, cpu, limited};

fn scratch(stream: &Stream, bytes: usize) -> Scratch {
    Scratch::new(stream, bytes, Owner::Activations).unwrap()
}

fn held(device: &Device) -> usize {
    device.memory().current
}

/// Fills its temporary memory, and adds to `wrong` if another kernel was there meanwhile.
fn fill_and_look(stream: &Stream, scratch: &Scratch, wrong: &Tensor, value: u8) {
    let launch = stream.launch("fill and look").write(wrong).scratch(scratch);
    let kernel = move |args: &mut Args<'_>| {
        let all = args.scratch();
        all.fill(value);
        std::thread::yield_now();
        args.write::<u32>(0)[0] += all.iter().filter(|&&byte| byte != value).count() as u32;
    };
    launch.run(kernel).unwrap();
}

#[test]
fn kernels_of_many_streams_have_pieces_of_their_own() {
    let device = cpu(3);
    let before = held(&device);
    let streams: Vec<Stream> = (0..8).map(|i| device.stream(&format!("s{i}"))).collect();
    let pieces: Vec<Scratch> = streams.iter().map(|stream| scratch(stream, 1 << 14)).collect();
    assert_eq!(held(&device) - before, 3 << 14, "one for each worker, not for each stream");
    let wrong: Vec<Tensor> = streams
        .iter()
        .map(|stream| Tensor::zeros(stream, [1], DType::U32, Owner::Other).unwrap())
        .collect();
    for round in 0..50 {
        for (i, ((stream, scratch), wrong)) in streams.iter().zip(&pieces).zip(&wrong).enumerate() {
            fill_and_look(stream, scratch, wrong, (8 * round + i) as u8);
        }
    }
    for wrong in &wrong {
        assert_eq!(wrong.to_vec::<u32>().unwrap(), [0]);
    }
    drop((pieces, wrong));
    device.synchronize().unwrap();
    assert_eq!(held(&device), before, "given back with the last handle");
}

#[test]
fn there_are_no_more_pieces_than_streams_and_the_largest_size_counts() {
    let device = cpu(4);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let small = scratch(&a, 1000);
    assert_eq!((held(&device), small.bytes()), (1000, 1000));
    let same = small.clone();
    assert_eq!(held(&device), 1000);
    let large = scratch(&b, 5000);
    assert_eq!(held(&device), 2 * 5000, "both streams may run at once, with pieces of one size");
    let sized = |stream: &Stream, scratch: &Scratch| {
        let bytes = Tensor::zeros(stream, [1], DType::U32, Owner::Other).unwrap();
        let launch = stream.launch("size").write(&bytes).scratch(scratch);
        launch
            .run(|args| {
                let scratch = args.scratch();
                assert_eq!(scratch.as_ptr() as usize % 64, 0);
                args.write::<u32>(0)[0] = scratch.len() as u32;
            })
            .unwrap();
        bytes.to_vec::<u32>().unwrap()[0]
    };
    assert_eq!((sized(&a, &same), sized(&b, &large)), (1000, 5000));
    drop((small, large));
    assert_eq!(sized(&a, &same), 1000);
    assert_eq!(held(&device), 2 * 5000, "nothing shrinks while somebody uses it");
    drop(same);
    device.synchronize().unwrap();
    assert_eq!(held(&device), 0);
    let none = scratch(&a, 0);
    assert_eq!(sized(&a, &none), 0);
}

/// A kernel in flight keeps its piece when a larger one takes its place, and when all handles are
/// gone; dropping the device waits for it, as always.
#[test]
fn a_kernel_in_flight_keeps_its_memory() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let wrong = Tensor::zeros(&a, [1], DType::U32, Owner::Other).unwrap();
    let gate = Gate::close(&a);
    let small = scratch(&a, 1000);
    fill_and_look(&a, &small, &wrong, 7);
    drop(small);
    let large = scratch(&b, 3000);
    drop(large);
    gate.open();
    assert_eq!(wrong.to_vec::<u32>().unwrap(), [0]);
    let (done, count) = (Arc::new(AtomicBool::new(false)), 1000);
    let last = scratch(&b, 1000);
    let seen = done.clone();
    let kernel = move |args: &mut Args<'_>| {
        let memory = args.scratch();
        (0..count).for_each(|round| memory.fill(round as u8));
        seen.store(true, Ordering::Release);
    };
    b.launch("last").scratch(&last).run(kernel).unwrap();
    drop((a, b, wrong, last, device));
    assert!(done.load(Ordering::Acquire));
}

#[test]
fn mistakes_have_names() {
    let device = cpu(1);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let of_a = scratch(&a, 100);
    let wrong = |result: Result<(), Error>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert_eq!(
            error.to_string(),
            "`work`: `scratch` must be of stream `b`, got one of stream `a`"
        );
    };
    wrong(b.launch("work").scratch(&of_a).run(|_| {}));
    let mut group = LaunchGroup::default();
    wrong(b.launch("work").scratch(&of_a).join(&mut group, |_| {}));
    let mut launches = Launches::default();
    wrong(b.launch("work").scratch(&of_a).add(&mut launches, |_| {}));

    let twice = device.stream("twice");
    let own = scratch(&twice, 100);
    let kernel = |args: &mut Args<'_>| {
        args.scratch();
        args.scratch();
    };
    twice.launch("twice").scratch(&own).run(kernel).unwrap();
    let error = twice.synchronize().unwrap_err().to_string();
    assert!(error.contains("twice: its temporary memory was taken before"), "{error}");
    // It was given back all the same.
    fill_and_look(&a, &of_a, &Tensor::zeros(&a, [1], DType::U32, Owner::Other).unwrap(), 1);
    a.synchronize().unwrap();
    let without = device.stream("without");
    without.launch("without").run(|args| args.scratch().fill(0)).unwrap();
    let error = without.synchronize().unwrap_err().to_string();
    assert!(error.contains("without: a launch without temporary memory"), "{error}");
}

#[test]
fn beyond_the_limit_all_stays_as_it_was() {
    let device = limited(2, Some(1 << 16));
    let (a, b) = (device.stream("a"), device.stream("b"));
    let small = scratch(&a, 1 << 12);
    let before = held(&device);
    let error = Scratch::new(&b, 1 << 16, Owner::Activations).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    assert_eq!(held(&device), before);
    let wrong = Tensor::zeros(&a, [1], DType::U32, Owner::Other).unwrap();
    fill_and_look(&a, &small, &wrong, 3);
    assert_eq!(wrong.to_vec::<u32>().unwrap(), [0]);
    // The request waits for memory that kernels in flight still use, because no order exists
    // between these kernels and later borrowers.
    let busy = [(); 3].map(|()| Tensor::zeros(&b, [1 << 14], DType::U8, Owner::Other).unwrap());
    let gate = Gate::close(&b);
    for tensor in busy {
        b.launch("touch").write(&tensor).run(|args| args.write::<u8>(0).fill(1)).unwrap();
    }
    let opened = Arc::new(AtomicBool::new(false));
    let opens = opened.clone();
    let opener = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(30));
        opens.store(true, Ordering::Release);
        gate.open();
    });
    let large = scratch(&device.stream("other"), 1 << 14);
    assert!(opened.load(Ordering::Acquire), "it was not waited for");
    opener.join().unwrap();
    fill_and_look(&a, &small, &wrong, 9);
    assert_eq!((wrong.to_vec::<u32>().unwrap(), large.bytes()), (vec![0], 1 << 14));
}

/// Pieces without handles are freed after the last kernel in flight. A request that needs their
/// memory waits for that kernel, so its success does not depend on timing.
#[test]
fn memory_that_leaves_with_a_kernel_is_waited_for() {
    let device = limited(2, Some(1 << 16));
    let (a, b) = (device.stream("a"), device.stream("b"));
    for _ in 0..2 {
        let wrong = Tensor::zeros(&a, [1], DType::U32, Owner::Other).unwrap();
        let gate = Gate::close(&a);
        let memory = scratch(&a, 3 << 13);
        fill_and_look(&a, &memory, &wrong, 7);
        let opener = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            gate.open();
        });
        drop(memory);
        let all = Tensor::zeros(&b, [7 << 13], DType::U8, Owner::Other).unwrap();
        opener.join().unwrap();
        assert_eq!((wrong.to_vec::<u32>().unwrap(), all.numel()), (vec![0], 7 << 13));
    }
}

/// Reserving in a kernel is an error, because the worker might wait for kernels that need this
/// worker.
#[test]
fn a_kernel_cannot_reserve() {
    let device = cpu(1);
    let stream = device.stream("s");
    let same = stream.clone();
    stream
        .launch("reserve")
        .run(move |_| {
            let error = Scratch::new(&same, 8, Owner::Other).unwrap_err();
            assert!(matches!(error, Error::InsideKernel { .. }), "{error}");
        })
        .unwrap();
    stream.synchronize().unwrap();
}

/// The sanitizer cannot observe accesses to temporary memory. So it fills the memory with poison
/// before every kernel, and a read without an earlier write gets poison.
#[test]
fn with_the_sanitizer_it_begins_as_poison() {
    let options = DeviceOptions { threads: 1, sanitize: true, ..DeviceOptions::default() };
    let device = Device::open(DeviceId::Cpu(0), &options).unwrap();
    let stream = device.stream("s");
    let memory = scratch(&stream, 10);
    for _ in 0..2 {
        let seen = Tensor::zeros(&stream, [10], DType::U8, Owner::Other).unwrap();
        let kernel = |args: &mut Args<'_>| {
            let scratch = args.scratch();
            args.write::<u8>(0).copy_from_slice(scratch);
            scratch.fill(0);
        };
        stream.launch("look").write(&seen).scratch(&memory).run(kernel).unwrap();
        let poison = POISON.to_ne_bytes();
        let expected: Vec<u8> = poison.into_iter().cycle().take(10).collect();
        assert_eq!(seen.to_vec::<u8>().unwrap(), expected);
    }
    assert!(device.races().is_empty());
}
