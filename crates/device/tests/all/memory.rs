//! Memory: reuse in stream order, limits, accounting, zero sizes (S2, V3).

use std::sync::atomic::{AtomicUsize, Ordering};

use meristem_device::random::{Purpose, Rng};
use meristem_device::{DType, Device, Error, MemoryFormat, MemoryReport, Owner, Stream, Tensor};

use crate::common::{Gate, THREADS, cpu, filled, limited, set};

fn empty(stream: &Stream, len: usize) -> Tensor {
    Tensor::empty(stream, [len], DType::U8, Owner::Other).unwrap()
}

#[test]
fn blocks_are_aligned_and_apart() {
    let device = cpu(1);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let tensors: Vec<_> =
        (0..40).map(|i| empty(if i % 2 == 0 { &a } else { &b }, 1 + i * i * 7)).collect();
    let mut ranges: Vec<_> =
        tensors.iter().map(|t| (t.address(), t.address() + t.numel() as u64)).collect();
    ranges.sort_unstable();
    assert!(ranges.iter().all(|(start, _)| start % 64 == 0));
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
}

#[test]
fn a_freed_block_is_used_again_at_once_on_its_stream() {
    let device = cpu(1);
    let a = device.stream("a");
    let gate = Gate::close(&a);
    let x = filled(&a, 1000, 1);
    let (address, id) = (x.address(), x.storage_id());
    drop(x);
    // Still in flight: safe, because the stream is in order.
    let y = filled(&a, 990, 2);
    assert_eq!(y.address(), address);
    assert_ne!(y.storage_id(), id);
    gate.open();
    assert_eq!(y.to_vec::<u32>().unwrap(), [2; 990]);
    let reserved = device.memory().reserved;
    for _ in 0..1000 {
        drop(filled(&a, 1000, 3));
    }
    assert!(device.memory().reserved <= reserved + 4096);
    assert_eq!(device.counts().allocations, 1002);
}

#[test]
fn a_block_that_another_stream_reads_is_not_used_again() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = filled(&a, 1000, 1);
    let gate = Gate::close(&b);
    let address = x.address();
    let y = Tensor::empty(&b, [1000], DType::U32, Owner::Other).unwrap();
    let x_on_b = x.on(&b).unwrap();
    let copy = b.launch("copy").read(&x_on_b).write(&y);
    copy.run(|args| args.write::<u32>(1).copy_from_slice(args.read(0))).unwrap();
    drop((x, x_on_b));
    let z = filled(&a, 1000, 2);
    assert_ne!(z.address(), address);
    gate.open();
    assert_eq!(y.to_vec::<u32>().unwrap(), [1; 1000]);
    assert_eq!(z.to_vec::<u32>().unwrap(), [2; 1000]);
    // Now the reader is done.
    assert_eq!(filled(&a, 1000, 3).address(), address);
}

/// Under a limit the same block is handed out, and the stream waits for the reader.
#[test]
fn under_pressure_the_stream_waits_instead() {
    let block = 4096;
    let device = limited(2, Some(2 * block));
    let (a, b) = (device.stream("a"), device.stream("b"));
    let len = block / 4;
    let x = filled(&a, len, 1);
    let y = Tensor::empty(&b, [len], DType::U32, Owner::Other).unwrap();
    let gate = Gate::close(&b);
    let address = x.address();
    let x_on_b = x.on(&b).unwrap();
    let copy = b.launch("copy").read(&x_on_b).write(&y);
    copy.run(|args| args.write::<u32>(1).copy_from_slice(args.read(0))).unwrap();
    drop((x, x_on_b));
    let z = filled(&a, len, 2);
    assert_eq!(z.address(), address);
    let written = a.record();
    let c = device.stream("c");
    c.launch("nothing").run(|_| {}).unwrap();
    c.synchronize().unwrap();
    assert!(!written.is_done());
    gate.open();
    assert_eq!(y.to_vec::<u32>().unwrap(), vec![1; len]);
    assert_eq!(z.to_vec::<u32>().unwrap(), vec![2; len]);
    assert_eq!(device.memory().reserved, 2 * block);
}

#[test]
fn the_limit_is_a_typed_error_after_reclaiming() {
    let device = limited(1, Some(10 * 4096));
    let (a, b) = (device.stream("a"), device.stream("b"));
    let held: Vec<_> = (0..10).map(|_| empty(&a, 4096)).collect();
    match Tensor::empty(&b, [1000], DType::F32, Owner::Batches) {
        Err(Error::OutOfMemory { requested, current, reserved, limit, owner, .. }) => {
            assert_eq!((requested, current, reserved), (4096, 40960, 40960));
            assert_eq!((limit, owner), (Some(40960), Owner::Batches));
        }
        other => panic!("{other:?}"),
    }
    // A request on another stream, of another size, waits until the work with ten small blocks is
    // done, and gets their memory.
    let gate = Gate::close(&a);
    for x in &held {
        a.launch("write").write(x).run(|args| args.write::<u8>(0).fill(1)).unwrap();
    }
    drop(held);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| empty(&b, 40960));
        gate.open();
        let big = waiting.join().unwrap();
        assert_eq!(big.numel(), 40960);
        assert_eq!(device.memory().reserved, 40960);
    });
    // And back again.
    let held: Vec<_> = (0..10).map(|_| empty(&a, 4096)).collect();
    assert_eq!(device.memory().current, held.len() * 4096);
    assert_eq!(device.memory().reserved_peak, 40960);
    // A request beyond the limit fails, and memory in use is kept.
    let error = Tensor::empty(&b, [40961], DType::U8, Owner::Other).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { current: 40960, .. }), "{error:?}");
    assert_eq!(device.memory().current, 40960);
}

#[test]
fn a_limit_for_the_live_memory_is_enough() {
    for threads in THREADS {
        // Room for one block a stream and one to spare.
        let device = limited(threads, Some(5 * 4096));
        let streams: Vec<_> = (0..4).map(|i| device.stream(&format!("s{i}"))).collect();
        for n in 0..200 {
            let s = &streams[n % 4];
            let t = &streams[(n * 7 + 1) % 4];
            let x = filled(s, 1024, n as u32);
            let x = x.on(t).unwrap();
            let y = Tensor::empty(t, [1024], DType::U32, Owner::Other).unwrap();
            let copy = t.launch("copy").read(&x).write(&y);
            copy.run(|args| args.write::<u32>(1).copy_from_slice(args.read(0))).unwrap();
            if n % 17 == 0 {
                assert_eq!(y.to_vec::<u32>().unwrap(), [n as u32; 1024]);
            }
        }
        assert!(device.memory().reserved_peak <= 5 * 4096);
    }
}

#[test]
fn the_system_refusing_is_a_typed_error() {
    let device = cpu(1);
    let a = device.stream("a");
    let error = Tensor::empty(&a, [1 << 60], DType::U8, Owner::Dataset).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { limit: None, .. }), "{error}");
    assert_eq!((device.memory().current, device.memory().reserved), (0, 0));
}

#[test]
fn owners_are_accounted_for() {
    let device = cpu(1);
    let a = device.stream("a");
    let use_of = |owner: Owner| {
        let report = device.memory();
        let index = Owner::ALL.iter().position(|&o| o == owner).unwrap();
        assert_eq!(report.owners[index].owner, owner);
        (report.owners[index].current, report.owners[index].peak)
    };
    let x = Tensor::zeros(&a, [10, 10], DType::F32, Owner::Parameters).unwrap();
    let y = Tensor::zeros(&a, [7], DType::F64, Owner::Metrics).unwrap();
    let view = x.view(0, [10]).unwrap();
    let clone = x.clone();
    assert!(x.is_shared() && !y.is_shared());
    assert_eq!(use_of(Owner::Parameters), (400, 400));
    assert_eq!(use_of(Owner::Metrics), (56, 56));
    assert_eq!((device.memory().current, device.memory().peak), (456, 456));
    drop((x, clone));
    assert_eq!(use_of(Owner::Parameters), (400, 400));
    assert!(!view.is_shared());
    drop((view, y));
    assert_eq!(use_of(Owner::Parameters), (0, 400));
    assert_eq!(use_of(Owner::Metrics), (0, 56));
    let report = device.memory();
    assert_eq!((report.current, report.peak), (0, 456));
    assert_eq!(report.owners.iter().map(|o| o.current).sum::<usize>(), 0);
    assert!(report.reserved >= 456);
    let small = Tensor::zeros(&a, [1], DType::F64, Owner::Metrics).unwrap();
    assert_eq!(use_of(Owner::Metrics), (8, 56));
    drop(small);
    assert_eq!(device.memory().peak, 456);
}

#[test]
fn what_is_unused_goes_back_to_the_system() {
    let device = cpu(1);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let kept = filled(&a, 1024, 1);
    let gate = Gate::close(&a);
    drop(filled(&a, 2048, 2));
    drop(Tensor::empty(&b, [512], DType::U8, Owner::Other).unwrap());
    // One free block is in use by a kernel still.
    assert_eq!(device.trim(), 512);
    assert_eq!(device.memory().reserved, 3 * 4096);
    gate.open();
    a.synchronize().unwrap();
    assert_eq!(device.trim(), 8192);
    assert_eq!((device.memory().reserved, device.memory().reserved_peak), (4096, 3 * 4096 + 512));
    assert_eq!(kept.to_vec::<u32>().unwrap(), [1; 1024]);
}

#[test]
fn memory_of_an_ended_stream_is_there_for_others() {
    let device = limited(1, Some(4096));
    for n in 0..20 {
        let stream = device.stream("short");
        assert_eq!(filled(&stream, 1024, n).to_vec::<u32>().unwrap(), [n; 1024]);
    }
    assert_eq!(device.memory().reserved, 4096);
}

#[test]
fn nothing_is_legal() {
    let device = cpu(1);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = Tensor::zeros(&a, [3, 0, 2], DType::F32, Owner::Other).unwrap();
    let y = Tensor::from_slice::<f32>(&a, &[], [0], Owner::Other).unwrap();
    assert_eq!((x.numel(), x.address(), x.dims()), (0, 0, &[3, 0, 2][..]));
    assert_ne!(x.storage_id(), y.storage_id());
    let kernel = |args: &mut meristem_device::Args<'_>| {
        assert!(args.read::<f32>(0).is_empty());
        assert!(args.write::<f32>(1).is_empty());
        assert!(args.write::<f32>(2).is_empty());
    };
    // Written and read at once: there is nothing to overlap.
    a.launch("nothing").read(&x).write(&x).write(&y).run(kernel).unwrap();
    y.copy_from_slice::<f32>(&[]).unwrap();
    assert!(x.on(&b).unwrap().to_vec::<f32>().unwrap().is_empty());
    assert!(x.view(0, [0, 5]).unwrap().to_vec::<f32>().unwrap().is_empty());
    let z = filled(&a, 4, 1);
    assert_eq!(z.view(4, [0]).unwrap().address(), 0);
    assert_eq!(device.counts().allocations, 1);
    let image = Tensor::zeros_with_format(
        &a,
        [0, 3, 4, 4],
        DType::U8,
        MemoryFormat::ChannelsLast,
        Owner::Batches,
    );
    assert_eq!(image.unwrap().strides(), [48, 1, 12, 3]);
}

#[test]
fn drops_while_work_is_in_flight() {
    for threads in THREADS {
        let device = cpu(threads);
        let (a, b) = (device.stream("a"), device.stream("b"));
        let sum = Tensor::zeros(&b, [1], DType::U32, Owner::Metrics).unwrap();
        for n in 0..500 {
            let x = filled(&a, 256, n);
            let x = x.on(&b).unwrap();
            let add = b.launch("add").read(&x).write(&sum);
            add.run(|args| args.write::<u32>(1)[0] += args.read::<u32>(0).iter().sum::<u32>())
                .unwrap();
            // `x` goes here, read by `b` and maybe not even written by `a`.
        }
        assert_eq!(sum.to_vec::<u32>().unwrap(), [256 * 499 * 500 / 2]);
    }
}

/// The memory of two handles dropped at the same time is returned once: one is the last.
#[test]
fn handles_that_go_at_once_give_back_once() {
    let device = cpu(1);
    let a = device.stream("a");
    let all: Vec<_> = (0..2000).map(|_| empty(&a, 64)).collect();
    let mut addresses: Vec<_> = all.iter().map(Tensor::address).collect();
    let arrived = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for handles in [all.clone(), all] {
            let arrived = &arrived;
            scope.spawn(move || {
                for (i, handle) in handles.into_iter().enumerate() {
                    arrived.fetch_add(1, Ordering::AcqRel);
                    let mut looks = 0;
                    while arrived.load(Ordering::Acquire) < 2 * (i + 1) {
                        looks += 1;
                        if looks % 1000 == 0 {
                            std::thread::yield_now();
                        }
                    }
                    drop(handle);
                }
            });
        }
    });
    assert_eq!(device.memory().current, 0);
    let again: Vec<_> = (0..2000).map(|_| empty(&a, 64)).collect();
    let mut reused: Vec<_> = again.iter().map(Tensor::address).collect();
    addresses.sort_unstable();
    reused.sort_unstable();
    assert_eq!(addresses, reused);
}

#[test]
fn zeros_are_zeros_even_where_something_was() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    for _ in 0..50 {
        drop(filled(&a, 512, u32::MAX));
        let zeros = Tensor::zeros(&a, [512], DType::U32, Owner::Other).unwrap();
        let zeros = zeros.on(&b).unwrap();
        assert_eq!(zeros.to_vec::<u32>().unwrap(), [0; 512]);
        set(&b, &zeros, 1).unwrap();
    }
}

#[test]
fn the_peak_within_a_call_is_its_true_peak() {
    let device = cpu(1);
    let a = device.stream("a");
    let bytes = |len, owner| Tensor::empty(&a, [len], DType::U8, owner).unwrap();
    // A peak from before the call must not show in it.
    drop(bytes(10_000, Owner::Other));
    let kept = bytes(100, Owner::Parameters);
    let ((inner, result), outer) = MemoryReport::around(&device, || {
        drop(bytes(1000, Owner::Policy));
        let (result, inner) = MemoryReport::around(&device, || {
            drop(bytes(50, Owner::Policy));
            bytes(7, Owner::Collectives)
        });
        drop(bytes(300, Owner::Batches));
        (inner, result)
    });
    assert_eq!((outer.before.current, outer.peak, outer.after.current), (100, 1100, 107));
    assert_eq!((inner.before.current, inner.peak, inner.after.current), (100, 150, 107));
    let of = |owner| (inner.owner_peak(owner), outer.owner_peak(owner));
    assert_eq!(of(Owner::Policy), (50, 1000));
    assert_eq!(of(Owner::Collectives), (7, 7));
    assert_eq!(of(Owner::Batches), (0, 300));
    assert_eq!(of(Owner::Parameters), (100, 100));
    drop((kept, result));
    // A call that allocates nothing has the level of before as its peak.
    let ((), idle) = MemoryReport::around(&device, || ());
    assert_eq!((idle.peak, device.memory().peak), (0, 10_000));
}

#[test]
fn calls_side_by_side_see_each_other() {
    let device = cpu(1);
    let barrier = std::sync::Barrier::new(2);
    let both = std::thread::scope(|scope| {
        let measured = |len: usize| {
            let (device, barrier) = (&device, &barrier);
            scope.spawn(move || {
                let stream = device.stream("s");
                let call = || {
                    barrier.wait();
                    let x = empty(&stream, len);
                    barrier.wait();
                    drop(x);
                    barrier.wait();
                };
                MemoryReport::around(device, call).1
            })
        };
        [measured(30), measured(12)].map(|thread| thread.join().unwrap())
    });
    assert_eq!(both.map(|around| (around.before.current, around.peak, around.after.current)), {
        [(0, 42, 0); 2]
    });
}

/// A random program of allocations and frees, measured by calls inside of each other, against the
/// running sum written down.
#[test]
fn nested_peaks_match_the_running_sum() {
    fn run(device: &Device, rng: &mut Rng, depth: u32, log: &mut (Vec<Tensor>, Vec<usize>)) {
        let stream = device.stream("s");
        for _ in 0..rng.below(12) {
            match rng.below(4) {
                0 if depth < 4 => {
                    let from = log.1.len() - 1;
                    let ((), around) =
                        MemoryReport::around(device, || run(device, rng, depth + 1, log));
                    assert_eq!(around.before.current, log.1[from]);
                    assert_eq!(around.after.current, *log.1.last().unwrap());
                    assert_eq!(around.peak, *log.1[from..].iter().max().unwrap());
                }
                1 if !log.0.is_empty() => {
                    let gone = log.0.swap_remove(rng.below(log.0.len() as u32) as usize);
                    log.1.push(log.1.last().unwrap() - gone.numel());
                }
                _ => {
                    log.0.push(empty(&stream, 1 + rng.below(5000) as usize));
                    log.1.push(log.1.last().unwrap() + log.0.last().unwrap().numel());
                }
            }
        }
    }
    for case in 0..200 {
        let device = cpu(1);
        let mut rng = Rng::new(3, Purpose::Test, case, 0);
        run(&device, &mut rng, 0, &mut (vec![], vec![0]));
    }
}
