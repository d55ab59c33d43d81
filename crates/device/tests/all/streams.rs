//! Streams: order within one, waits between them, full queues, several host threads (S1).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};

use meristem_device::{DType, Error, Owner, Tensor};

use crate::common::{Gate, THREADS, cpu, filled, set};

#[test]
fn work_of_a_stream_runs_in_order() {
    for threads in THREADS {
        let device = cpu(threads);
        let seen: Vec<_> = (0..5).map(|_| Arc::new(Mutex::new(Vec::new()))).collect();
        let streams: Vec<_> = (0..5).map(|i| device.stream(&format!("s{i}"))).collect();
        for n in 0..1000 {
            for (stream, seen) in streams.iter().zip(&seen) {
                let seen = seen.clone();
                stream.launch("note").run(move |_| seen.lock().unwrap().push(n)).unwrap();
            }
        }
        device.synchronize().unwrap();
        for seen in seen {
            assert!(seen.lock().unwrap().iter().copied().eq(0..1000));
        }
        assert_eq!(device.counts().launches, 5000);
    }
}

#[test]
fn a_launch_does_not_wait_for_its_kernel() {
    let device = cpu(1);
    let stream = device.stream("s");
    let gate = Gate::close(&stream);
    let x = filled(&stream, 4, 3);
    let event = stream.record();
    assert!(!event.is_done());
    gate.open();
    event.synchronize().unwrap();
    assert!(event.is_done());
    assert_eq!(x.to_vec::<u32>().unwrap(), [3; 4]);
}

#[test]
fn another_stream_sees_what_the_producer_made() {
    for threads in THREADS {
        let device = cpu(threads.max(2));
        let (a, b) = (device.stream("a"), device.stream("b"));
        let gate = Gate::close(&a);
        let x = filled(&a, 4, 7);
        let x_on_b = x.on(&b).unwrap();
        let y = Tensor::empty(&b, [4], DType::U32, Owner::Other).unwrap();
        let copy = b.launch("copy").read(&x_on_b).write(&y);
        copy.run(|args| args.write::<u32>(1).copy_from_slice(args.read(0))).unwrap();
        let done = b.record();
        assert!(!done.is_done());
        gate.open();
        assert_eq!(y.to_vec::<u32>().unwrap(), [7; 4]);
        assert!(done.is_done());
    }
}

/// `on` waits for earlier work of the producer; later work of the producer is ordered by the launch
/// that uses it.
#[test]
fn later_writes_of_the_producer_are_waited_for_too() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = filled(&a, 4, 1);
    let x_on_b = x.on(&b).unwrap();
    let gate = Gate::close(&a);
    set(&a, &x, 2).unwrap();
    let y = Tensor::empty(&b, [4], DType::U32, Owner::Other).unwrap();
    let copy = b.launch("copy").read(&x_on_b).write(&y);
    copy.run(|args| args.write::<u32>(1).copy_from_slice(args.read(0))).unwrap();
    gate.open();
    assert_eq!(y.to_vec::<u32>().unwrap(), [2; 4]);
}

#[test]
fn a_write_waits_for_reads_of_other_streams() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = filled(&a, 1000, 1);
    a.synchronize().unwrap();
    let x_on_b = x.on(&b).unwrap();
    let gate = Gate::close(&b);
    let y = Tensor::empty(&b, [1000], DType::U32, Owner::Other).unwrap();
    let copy = b.launch("copy").read(&x_on_b).write(&y);
    copy.run(|args| args.write::<u32>(1).copy_from_slice(args.read(0))).unwrap();
    set(&a, &x, 2).unwrap();
    let written = a.record();
    // Work for the other worker, which gives a premature write time to happen.
    let c = device.stream("c");
    filled(&c, 10, 0);
    c.synchronize().unwrap();
    assert!(!written.is_done());
    gate.open();
    assert_eq!(y.to_vec::<u32>().unwrap(), [1; 1000]);
    assert_eq!(x.to_vec::<u32>().unwrap(), [2; 1000]);
}

#[test]
fn writes_of_two_streams_keep_their_order() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = Tensor::empty(&a, [4], DType::U32, Owner::Other).unwrap();
    let gate = Gate::close(&a);
    set(&a, &x, 1).unwrap();
    set(&b, &x.on(&b).unwrap(), 2).unwrap();
    gate.open();
    assert_eq!(x.to_vec::<u32>().unwrap(), [2; 4]);
}

#[test]
fn events_order_streams_without_tensors() {
    for threads in [2, 4] {
        let device = cpu(threads);
        let other = cpu(1);
        let (a, b, c) = (device.stream("a"), device.stream("b"), other.stream("c"));
        let count = Arc::new(AtomicUsize::new(0));
        let gate = Gate::close(&a);
        let add = count.clone();
        let kernel = move |_: &mut meristem_device::Args<'_>| {
            add.fetch_add(1, Ordering::Relaxed);
        };
        a.launch("add").run(kernel).unwrap();
        let event = a.record();
        let seen = Arc::new(Mutex::new(Vec::new()));
        for stream in [&b, &c] {
            stream.wait(&event).unwrap();
            let (count, seen) = (count.clone(), seen.clone());
            let look = move |_: &mut meristem_device::Args<'_>| {
                seen.lock().unwrap().push(count.load(Ordering::Relaxed));
            };
            stream.launch("look").run(look).unwrap();
        }
        gate.open();
        b.synchronize().unwrap();
        c.synchronize().unwrap();
        assert_eq!(*seen.lock().unwrap(), [1, 1]);
        assert_eq!(device.counts().synchronizations, 1);
    }
}

#[test]
fn an_event_is_after_the_waits_before_it() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let gate = Gate::close(&a);
    b.wait(&a.record()).unwrap();
    let waited = b.record();
    assert!(!waited.is_done());
    gate.open();
    waited.synchronize().unwrap();
    // An event of an empty stream, and one of the same stream.
    assert!(device.stream("c").record().is_done());
    b.wait(&b.record()).unwrap();
    b.synchronize().unwrap();
}

/// Kernels of different streams that meet: they run concurrently, one on each worker.
#[test]
fn streams_run_side_by_side() {
    for threads in [2, 4] {
        let device = cpu(threads);
        let streams: Vec<_> = (0..threads).map(|i| device.stream(&format!("s{i}"))).collect();
        for _ in 0..300 {
            let barrier = Arc::new(Barrier::new(threads));
            for stream in &streams {
                let barrier = barrier.clone();
                let meet = move |_: &mut meristem_device::Args<'_>| {
                    barrier.wait();
                };
                stream.launch("meet").run(meet).unwrap();
            }
        }
        device.synchronize().unwrap();
    }
}

#[test]
fn host_threads_wait_for_different_events_of_one_stream() {
    let device = cpu(1);
    let stream = device.stream("s");
    let count = Arc::new(AtomicUsize::new(0));
    for _ in 0..20 {
        let gate = Gate::close(&stream);
        let before = count.load(Ordering::Relaxed);
        let events: Vec<_> = (1..=8)
            .map(|n| {
                let count = count.clone();
                let add = move |_: &mut meristem_device::Args<'_>| {
                    // Long enough that the waiters sleep.
                    std::thread::sleep(std::time::Duration::from_micros(100));
                    count.fetch_add(1, Ordering::Relaxed);
                };
                stream.launch("add").run(add).unwrap();
                (before + n, stream.record())
            })
            .collect();
        std::thread::scope(|scope| {
            for (expected, event) in events.iter().rev() {
                let count = &count;
                scope.spawn(move || {
                    event.synchronize().unwrap();
                    assert!(count.load(Ordering::Relaxed) >= *expected);
                });
            }
            gate.open();
        });
    }
}

#[test]
fn a_full_queue_holds_the_host_back_and_loses_nothing() {
    let device = cpu(1);
    let stream = device.stream("s");
    let gate = Gate::close(&stream);
    let count = Arc::new(AtomicUsize::new(0));
    let enqueued = Arc::new(AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..1000 {
                    let count = count.clone();
                    let kernel = move |_: &mut meristem_device::Args<'_>| {
                        count.fetch_add(1, Ordering::Relaxed);
                    };
                    stream.launch("add").run(kernel).unwrap();
                    enqueued.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Another stream is not held back by the full one.
        while enqueued.load(Ordering::Relaxed) < 200 {
            std::thread::yield_now();
        }
        device.stream("other").launch("nothing").run(|_| {}).unwrap();
        assert!(enqueued.load(Ordering::Relaxed) < 1000, "a queue without a bound");
        gate.open();
    });
    stream.synchronize().unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 3000);
}

#[test]
fn a_kernel_may_launch_but_not_wait() {
    for threads in THREADS {
        let device = cpu(threads);
        let stream = device.stream("s");
        let count = Arc::new(AtomicUsize::new(0));
        let (inner, counter) = (stream.clone(), count.clone());
        let (report, reported) = mpsc::sync_channel(4);
        let kernel = move |_: &mut meristem_device::Args<'_>| {
            // More than fits: a worker is never held back.
            for _ in 0..2000 {
                let counter = counter.clone();
                let add = move |_: &mut meristem_device::Args<'_>| {
                    counter.fetch_add(1, Ordering::Relaxed);
                };
                inner.launch("add").run(add).unwrap();
            }
            let x = filled(&inner, 4, 1);
            for error in [
                inner.synchronize(),
                inner.device().synchronize(),
                inner.record().synchronize(),
                x.to_vec::<u32>().map(drop),
            ] {
                report.send(error).unwrap();
            }
        };
        stream.launch("outer").run(kernel).unwrap();
        for error in reported {
            assert!(matches!(error, Err(Error::InsideKernel { .. })), "{error:?}");
        }
        stream.synchronize().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 2000);
    }
}

#[test]
fn host_threads_may_launch_at_once() {
    for threads in THREADS {
        let device = cpu(threads);
        let home = device.stream("home");
        let shared = filled(&home, 64, 5);
        std::thread::scope(|scope| {
            for t in 0..6u32 {
                let (device, shared) = (&device, &shared);
                scope.spawn(move || {
                    let stream = device.stream(&format!("t{t}"));
                    let shared = shared.on(&stream).unwrap();
                    let mut sum = filled(&stream, 64, t);
                    for _ in 0..200 {
                        let next = Tensor::empty(&stream, [64], DType::U32, Owner::Other).unwrap();
                        let add = stream.launch("add").read(&shared).read(&sum).write(&next);
                        add.run(|args| {
                            let (x, y) = (args.read::<u32>(0), args.read::<u32>(1));
                            for (i, out) in args.write::<u32>(2).iter_mut().enumerate() {
                                *out = x[i] + y[i];
                            }
                        })
                        .unwrap();
                        sum = next;
                    }
                    assert_eq!(sum.to_vec::<u32>().unwrap(), [1000 + t; 64]);
                });
            }
        });
    }
}

#[test]
fn dropping_everything_runs_what_was_enqueued() {
    for threads in THREADS {
        let count = Arc::new(AtomicUsize::new(0));
        {
            let device = cpu(threads);
            let streams: Vec<_> = (0..8).map(|i| device.stream(&format!("s{i}"))).collect();
            for n in 0..250 {
                for (i, stream) in streams.iter().enumerate() {
                    stream.wait(&streams[(i + n) % 8].record()).unwrap();
                    let count = count.clone();
                    let kernel = move |_: &mut meristem_device::Args<'_>| {
                        count.fetch_add(1, Ordering::Relaxed);
                    };
                    stream.launch("add").run(kernel).unwrap();
                }
            }
        }
        // The drop above has waited.
        assert_eq!(count.load(Ordering::Relaxed), 2000);
        assert_eq!(Arc::strong_count(&count), 1);
    }
}

/// A closed device's workers stay for a stream that waits for another device.
#[test]
fn dropping_waits_for_other_devices_too() {
    let (first, second) = (cpu(1), cpu(2));
    let stream = first.stream("first");
    let gate = Gate::close(&stream);
    let ran = Arc::new(AtomicUsize::new(0));
    let waiting = second.stream("second");
    waiting.wait(&stream.record()).unwrap();
    let count = ran.clone();
    let add = move |_: &mut meristem_device::Args<'_>| {
        count.fetch_add(1, Ordering::Relaxed);
    };
    waiting.launch("add").run(add).unwrap();
    std::thread::scope(|scope| {
        let dropper = scope.spawn(move || drop((second, waiting)));
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!dropper.is_finished());
        gate.open();
    });
    assert_eq!(ran.load(Ordering::Relaxed), 1);
}

/// The last handle of a device is dropped inside of a kernel: the workers end by themselves.
#[test]
fn a_device_may_be_dropped_by_its_own_worker() {
    let ended = Arc::new(());
    let device = cpu(2);
    let stream = device.stream("s");
    let gate = Gate::close(&stream);
    let (held, watch) = (stream.clone(), ended.clone());
    let x = filled(&stream, 10, 1);
    let kernel = move |_: &mut meristem_device::Args<'_>| drop((held, x, watch));
    stream.launch("hold").run(kernel).unwrap();
    drop((device, stream));
    gate.open();
    while Arc::strong_count(&ended) > 1 {
        std::thread::yield_now();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn no_threads_are_left_behind() {
    // Other tests of this process come and go; only our own name counts.
    let ours = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok());
        names.filter(|name| name.trim() == "cpu-999").count()
    };
    let pause = std::time::Duration::from_millis(1);
    for _ in 0..3 {
        let device = cpu(1000);
        device.stream("s").launch("nothing").run(|_| {}).unwrap();
        // The system shows a thread's name, and its end, with some delay.
        let settles_at = |n| {
            (0..5000).any(|_| {
                std::thread::sleep(pause);
                ours() == n
            })
        };
        assert!(settles_at(1));
        drop(device);
        assert!(settles_at(0));
    }
}
