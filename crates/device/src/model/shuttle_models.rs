//! Larger programs on thousands of random schedules.

use std::sync::atomic::{AtomicUsize, Ordering};

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::Barrier;
use shuttle::{Config, Runner};

use super::{device, is_quick, primitives::thread, tensor};
use crate::ground::sync::Arc;
use crate::order::CAPACITY;
use crate::{
    Args, DType, Device, Error, Event, Owner, Scratch, Stream, Tensor, in_parts, read_back_as,
};

/// Runs `program` on `schedules` schedules with random threads, then on `schedules` schedules with
/// random priorities that change three times, which finds rare orders. The schedules are the same
/// in every run.
fn check(schedules: usize, program: impl Fn() + Send + Sync + Clone + 'static) {
    let schedules = if is_quick() { schedules.div_ceil(4) } else { schedules };
    let mut config = Config::new();
    config.stack_size = 1 << 17;
    let random = RandomScheduler::new_from_seed(1, schedules);
    Runner::new(random, config.clone()).run(program.clone());
    Runner::new(PctScheduler::new_from_seed(2, 4, schedules), config).run(program);
}

/// Sets all elements, with a yield after the first.
fn set(stream: &Stream, tensor: &Tensor, value: u32) {
    let kernel = move |args: &mut Args<'_>| {
        let elements = args.write::<u32>(0);
        elements[0] = value;
        thread::yield_now();
        elements[1..].fill(value);
    };
    stream.launch("set").write(tensor).run(kernel).unwrap();
}

/// Copies `from` to `to`; `from` must not change meanwhile.
fn copy(stream: &Stream, from: &Tensor, to: &Tensor) {
    let kernel = |args: &mut Args<'_>| {
        let seen = args.read::<u32>(0).to_vec();
        thread::yield_now();
        assert_eq!(seen, args.read::<u32>(0));
        args.write::<u32>(1).copy_from_slice(&seen);
    };
    stream.launch("copy").read(from).write(to).run(kernel).unwrap();
}

/// Write, read on another stream, and reused memory, on two streams.
fn hand_over(threads: usize, limit: Option<usize>) {
    let device = device(threads, limit);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let out: Vec<_> = (0..3).map(|_| tensor(&b)).collect();
    for n in 0..3 {
        let x = tensor(&a);
        set(&a, &x, n + 7);
        copy(&b, &x.on(&b).unwrap(), &out[n as usize]);
    }
    // Once more, with both streams idle.
    b.synchronize().unwrap();
    let x = tensor(&a);
    set(&a, &x, 1);
    copy(&b, &x.on(&b).unwrap(), &out[0]);
    set(&a, &x, 2);
    let all: Vec<_> = out.iter().chain([&x]).collect();
    assert_eq!(read_back_as::<u32>(&all).unwrap(), [[1; 4], [8; 4], [9; 4], [2; 4]]);
}

/// `hazard`: conflicting accesses of streams keep the order of submission.
#[test]
fn accesses_keep_their_order() {
    for threads in [1, 2, 3] {
        check(3000, move || hand_over(threads, None));
    }
}

/// `queue`: a wait for two accesses on one stream is for the later access.
#[test]
fn work_waits_for_the_last_of_its_inputs() {
    check(3000, || {
        let device = device(2, None);
        let (a, b) = (device.stream("a"), device.stream("b"));
        let (x, y, out) = (tensor(&a), tensor(&a), tensor(&b));
        let (x_there, y_there) = (x.on(&b).unwrap(), y.on(&b).unwrap());
        set(&a, &x, 7);
        set(&a, &y, 8);
        let add = |args: &mut Args<'_>| {
            let sum = args.read::<u32>(0).iter().zip(args.read::<u32>(1)).map(|(x, y)| x + y);
            let sum: Vec<u32> = sum.collect();
            args.write::<u32>(2).copy_from_slice(&sum);
        };
        b.launch("add").read(&x_there).read(&y_there).write(&out).run(add).unwrap();
        assert_eq!(out.to_vec::<u32>().unwrap(), [15; 4]);
    });
}

/// `queue`: a parked stream continues in the state its waker set.
#[test]
fn a_stream_that_was_parked_goes_on() {
    check(20_000, || {
        let device = device(2, None);
        let (a, b) = (device.stream("a"), device.stream("b"));
        a.launch("first").run(|_| {}).unwrap();
        b.wait(&a.record()).unwrap();
        b.synchronize().unwrap();
        b.launch("second").run(|_| {}).unwrap();
        b.synchronize().unwrap();
    });
}

/// `submit`: a launch is recorded with its own position in the queue, even if another thread
/// submits to the same stream meanwhile.
#[test]
fn two_host_threads_submit_to_one_stream() {
    check(3000, || {
        let device = device(2, None);
        let shared = device.stream("shared");
        let hosts = [0, 1].map(|host| {
            let (shared, own) = (shared.clone(), device.stream("own"));
            thread::spawn(move || {
                let (x, out) = (tensor(&shared), tensor(&own));
                let there = x.on(&own).unwrap();
                set(&shared, &x, host + 7);
                copy(&own, &there, &out);
                assert_eq!(out.to_vec::<u32>().unwrap(), [host + 7; 4]);
            })
        });
        hosts.into_iter().for_each(|host| host.join().unwrap());
    });
}

/// `pool`: accesses keep their order across storages that had the block one after the other.
#[test]
fn accesses_to_reused_memory_keep_their_order() {
    check(4000, || hand_over(2, Some(4 * 64)));
}

/// `pool`: a request fails only if the live storages leave no room for it, whatever the timing. The
/// free block is of another class, so it has to become idle and return to the system.
#[test]
fn memory_that_falls_idle_meanwhile_is_found() {
    check(5000, || {
        let device = device(1, Some(128));
        let stream = device.stream("s");
        set(&stream, &tensor(&stream), 1);
        let large = Tensor::empty(&stream, [32], DType::U32, Owner::Other).unwrap();
        drop(large);
        set(&stream, &tensor(&stream), 2);
        stream.synchronize().unwrap();
    });
}

/// `pool`: two concurrent requests share a limit correctly.
#[test]
fn two_host_threads_share_a_limit() {
    check(3000, || {
        let device = device(2, Some(256));
        let threads = [16, 32].map(|len| {
            let stream = device.stream("s");
            thread::spawn(move || {
                for _ in 0..2 {
                    let x = Tensor::empty(&stream, [len], DType::U32, Owner::Other).unwrap();
                    let kernel = |args: &mut Args<'_>| args.write::<u32>(0).fill(1);
                    stream.launch("fill").write(&x).run(kernel).unwrap();
                }
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(device.memory().reserved_peak <= 256);
    });
}

/// Host threads that launch on each other's streams and wait for them, while handles are dropped.
fn everything_runs(threads: usize) {
    let runs = Arc::new(AtomicUsize::new(0));
    {
        let device = device(threads, None);
        let streams: Vec<_> = (0..2).map(|_| device.stream("s")).collect();
        let hosts = [0, 1].map(|host| {
            let (streams, runs) = (streams.clone(), runs.clone());
            thread::spawn(move || host_thread(host, &streams, &runs))
        });
        drop(streams);
        drop(device);
        hosts.into_iter().for_each(|host| host.join().unwrap());
    }
    assert_eq!(runs.load(Ordering::SeqCst), 8);
}

fn host_thread(host: usize, streams: &[Stream], runs: &Arc<AtomicUsize>) {
    for n in 0..4 {
        streams[host].wait(&streams[1 - host].record()).unwrap();
        let runs = runs.clone();
        let kernel = move |_: &mut Args<'_>| {
            runs.fetch_add(1, Ordering::SeqCst);
        };
        streams[(host + n) % 2].launch("count").run(kernel).unwrap();
    }
    if host == 0 {
        streams[0].synchronize().unwrap();
    }
}

/// `submit`, `executor`: waits point backwards, so no two streams wait for each other; enqueued
/// work runs even after the last handle is dropped.
#[test]
fn everything_submitted_runs() {
    check(4000, || everything_runs(1));
    check(4000, || everything_runs(2));
}

/// `executor`: the workers of a device stay for a stream that waits for another device, even after
/// all handles are dropped.
#[test]
fn workers_stay_for_a_parked_stream() {
    check(4000, || {
        let runs = Arc::new(AtomicUsize::new(0));
        {
            let (near, far) = (device(1, None), device(1, None));
            let (a, b) = (near.stream("a"), far.stream("b"));
            a.launch("yield").run(|_| thread::yield_now()).unwrap();
            b.wait(&a.record()).unwrap();
            let counted = runs.clone();
            let count = move |_: &mut Args<'_>| {
                counted.fetch_add(1, Ordering::SeqCst);
            };
            b.launch("count").run(count).unwrap();
            drop((far, b));
            assert_eq!(runs.load(Ordering::SeqCst), 1);
        }
    });
}

/// `executor`: each worker runs a stream concurrently with the others; a sleeping worker is woken.
#[test]
fn ready_streams_use_all_workers() {
    for workers in [2, 3] {
        check(4000, move || {
            let device = device(workers, None);
            let streams: Vec<_> = (0..workers).map(|_| device.stream("s")).collect();
            for _ in 0..2 {
                let meet = Arc::new(Barrier::new(workers));
                for stream in &streams {
                    let meet = meet.clone();
                    let kernel = move |_: &mut Args<'_>| {
                        meet.wait();
                    };
                    stream.launch("meet").run(kernel).unwrap();
                }
            }
            join(streams.iter().map(Stream::record).collect());
        });
    }
}

/// Waits for each event on a separate host thread.
fn join(events: Vec<Event>) {
    let wait = |event: Event| {
        thread::spawn(move || {
            event.synchronize().unwrap();
            assert!(event.is_done());
        })
    };
    let hosts: Vec<_> = events.into_iter().map(wait).collect();
    hosts.into_iter().for_each(|host| host.join().unwrap());
}

/// `queue`: every host thread that waits is woken, for every command.
#[test]
fn host_threads_wait_for_different_commands() {
    check(5000, || {
        let device = device(1, None);
        let stream = device.stream("s");
        let event = |_| {
            stream.launch("yield").run(|_| thread::yield_now()).unwrap();
            stream.record()
        };
        join((0..3).map(event).rev().collect());
    });
}

/// `queue`: a host thread that waits for the first of two commands is woken after the first.
#[test]
fn a_wait_ends_with_its_own_command() {
    check(5000, || {
        let device = device(1, None);
        let stream = device.stream("s");
        stream.launch("first").run(|_| thread::yield_now()).unwrap();
        let first = stream.record();
        let meet = Arc::new(Barrier::new(2));
        let kernel_meets = meet.clone();
        let second = move |_: &mut Args<'_>| {
            kernel_meets.wait();
        };
        stream.launch("second").run(second).unwrap();
        let waiter = thread::spawn(move || {
            first.synchronize().unwrap();
            assert!(first.is_done());
            meet.wait();
        });
        let last = stream.record();
        last.synchronize().unwrap();
        assert!(last.is_done());
        waiter.join().unwrap();
    });
}

/// `queue`, `submit`: a host thread that waits for a full queue continues later, and does not block
/// other threads: a kernel may submit meanwhile.
#[test]
fn a_full_queue_makes_room() {
    check(40, || {
        let device = device(1, None);
        let (stream, side) = (device.stream("s"), device.stream("side"));
        for _ in 0..2 {
            let side = side.clone();
            let submits = move |_: &mut Args<'_>| side.launch("n").run(|_| {}).unwrap();
            stream.launch("submits").run(submits).unwrap();
        }
        let fill = |stream: Stream| {
            move || (0..CAPACITY * 2 / 3).for_each(|_| stream.launch("n").run(|_| {}).unwrap())
        };
        let other = thread::spawn(fill(stream.clone()));
        fill(stream.clone())();
        other.join().unwrap();
        stream.synchronize().unwrap();
    });
}

/// `queue`: a panic reaches only streams that use the result, and no thread hangs.
#[test]
fn a_panic_reaches_those_who_use_the_result() {
    check(2000, || {
        let device: Device = device(2, None);
        let [a, b, c] = ["a", "b", "c"].map(|name| device.stream(name));
        let (x, y, z) = (tensor(&a), tensor(&b), tensor(&c));
        // A panic, without its message on the screen for every schedule.
        let bad = |_: &mut Args<'_>| std::panic::resume_unwind(Box::new("planned"));
        a.launch("bad").write(&x).run(bad).unwrap();
        set(&c, &z, 3);
        // Refused at once, or failing later, depending on the schedule.
        let failed = x.on(&b).and_then(|x| {
            let kernel = |args: &mut Args<'_>| args.write::<u32>(1).fill(args.read(0)[0]);
            b.launch("use").read(&x).write(&y).run(kernel)?;
            b.synchronize()
        });
        assert!(matches!(failed, Err(Error::KernelPanicked { operation: "bad", .. })));
        assert_eq!(z.to_vec::<u32>().unwrap(), [3; 4]);
    });
}

/// `parts`: each part of each job runs once, on any worker, while streams come and go; a panic is
/// raised after the last part.
#[test]
fn parts_of_several_streams_run_once() {
    check(1000, || {
        let device = device(3, None);
        for (name, jobs) in [("a", 3), ("b", 1), ("c", 2)] {
            let kernel = move |_: &mut Args<'_>| {
                for job in 0..jobs {
                    let runs: [_; 4] = std::array::from_fn(|_| AtomicUsize::new(0));
                    in_parts(4, |k| {
                        thread::yield_now();
                        runs[k].fetch_add(1, Ordering::Relaxed);
                    });
                    let runs = runs.map(|run| run.load(Ordering::Relaxed));
                    assert_eq!(runs, [1; 4], "job {job}");
                }
            };
            device.stream(name).launch("parts").run(kernel).unwrap();
        }
        let (ended, stream) = (Arc::new(AtomicUsize::new(0)), device.stream("d"));
        let count = ended.clone();
        let kernel = move |_: &mut Args<'_>| {
            in_parts(3, |k| {
                thread::yield_now();
                count.fetch_add(1, Ordering::Relaxed);
                if k < 2 {
                    std::panic::resume_unwind(Box::new(format!("part {k}")));
                }
            });
        };
        stream.launch("panics").run(kernel).unwrap();
        let error = stream.synchronize().unwrap_err().to_string();
        assert!(error.contains("part 0") && !error.contains("part 1"), "{error}");
        assert_eq!(ended.load(Ordering::Relaxed), 3);
        device.synchronize().unwrap_err();
    });
}

/// `scratch`: kernels that run at once have different pieces, also while larger pieces replace
/// smaller ones, and handles come and go.
#[test]
fn temporary_memory_is_with_one_kernel_at_a_time() {
    let use_it = |stream: &Stream, scratch: &Scratch, value: u8| {
        let kernel = move |args: &mut Args<'_>| {
            let memory = args.scratch();
            memory.fill(value);
            thread::yield_now();
            assert!(memory.iter().all(|&byte| byte == value));
        };
        stream.launch("use").scratch(scratch).run(kernel).unwrap();
    };
    for threads in [1, 2, 3] {
        check(1000, move || {
            let device = device(threads, None);
            let hosts = [(1, 64), (2, 192)].map(|(host, bytes)| {
                let device = device.clone();
                thread::spawn(move || {
                    for round in 0..2 {
                        let streams = ["a", "b"].map(|name| device.stream(name));
                        for (i, stream) in streams.iter().enumerate() {
                            let bytes = bytes * (1 + round);
                            let memory = Scratch::new(stream, bytes, Owner::Other).unwrap();
                            use_it(stream, &memory, (10 * host + i) as u8);
                        }
                    }
                })
            });
            hosts.into_iter().for_each(|host| host.join().unwrap());
            device.synchronize().unwrap();
            assert_eq!(device.memory().current, 0);
        });
    }
}
