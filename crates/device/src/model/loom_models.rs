//! Small programs in every interleaving, with the weak memory orders that hardware may show.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{device, is_quick, tensor};
use crate::ground::sync::{Arc, RaceCell};
use crate::{LaunchGroup, Stream, Tensor, in_parts};

/// Runs every interleaving of `program` with at most `preemptions` preemptions, or fewer if
/// `MODELS_QUICK` is set.
fn check(preemptions: usize, program: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    let fewer = if is_quick() { preemptions.min(2.max(preemptions - 1)) } else { preemptions };
    model.preemption_bound = Some(fewer);
    model.max_branches = 20_000;
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    model.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        program();
    });
    eprintln!("{} interleavings", runs.load(Ordering::Relaxed));
}

fn write(stream: &Stream, tensor: &Tensor) {
    stream.launch("write").write(tensor).run(|args| args.write::<u32>(0).fill(7)).unwrap();
}

fn read(stream: &Stream, tensor: &Tensor) {
    let kernel = |args: &mut crate::Args<'_>| assert_eq!(args.read::<u32>(0), [7; 4]);
    stream.launch("read").read(tensor).run(kernel).unwrap();
}

/// `queue`: a thread that sees `completed` sees the command's effects. Nothing else orders them
/// here: the host takes no lock between the check and the read.
#[test]
fn who_sees_a_command_done_sees_its_effects() {
    check(8, || {
        let device = device(1, None);
        let stream = device.stream("s");
        let effect = Arc::new(RaceCell::new());
        let kernel = effect.clone();
        stream.launch("effect").run(move |_| kernel.write()).unwrap();
        if stream.record().is_done() {
            effect.read();
        }
    });
}

/// `queue`: a host thread that waits is woken, whenever the command ends.
#[test]
fn a_waiting_host_thread_is_woken() {
    check(5, || {
        let device = device(1, None);
        let stream = device.stream("s");
        stream.launch("nothing").run(|_| {}).unwrap();
        stream.synchronize().unwrap();
        assert!(stream.record().is_done());
    });
}

/// `queue`: `host_wake_at` is the lowest number waited for, and each waiter registers again.
#[test]
fn two_host_threads_wait_for_different_commands() {
    check(3, || {
        let device = device(1, None);
        let stream = device.stream("s");
        stream.launch("first").run(|_| {}).unwrap();
        let first = stream.record();
        stream.launch("second").run(|_| {}).unwrap();
        let waiter = loom::thread::spawn(move || {
            first.synchronize().unwrap();
            assert!(first.is_done());
        });
        stream.synchronize().unwrap();
        assert!(stream.record().is_done());
        waiter.join().unwrap();
    });
}

/// `queue`, `hazard`: a parked stream is woken exactly once, and sees the write that it waited for.
#[test]
fn a_parked_stream_is_woken_and_sees_the_write() {
    check(2, || {
        let device = device(2, None);
        let (a, b) = (device.stream("a"), device.stream("b"));
        let x = tensor(&a);
        write(&a, &x);
        read(&b, &x.on(&b).unwrap());
        b.synchronize().unwrap();
    });
}

/// `submit`: work after a group, on any of its streams, runs after all launches of the group.
#[test]
fn a_group_ends_before_what_comes_after_it() {
    check(2, || {
        let device = device(2, None);
        let (a, b) = (device.stream("a"), device.stream("b"));
        let (x, y) = (tensor(&a), tensor(&b));
        let mut group = LaunchGroup::default();
        let kernel = |args: &mut crate::Args<'_>| args.write::<u32>(0).fill(7);
        a.launch("write").write(&y).join(&mut group, kernel).unwrap();
        b.launch("write").write(&x).join(&mut group, kernel).unwrap();
        group.run().unwrap();
        read(&a, &x);
        read(&b, &y);
        drop((x, y));
        device.synchronize().unwrap();
    });
}

/// `pool`: a returned block is reused without a wait only if all accesses are done, and then the
/// next user is ordered after them.
#[test]
fn reused_memory_is_ordered_after_its_last_use() {
    check(5, || {
        let device = device(1, Some(64));
        let (a, b) = (device.stream("a"), device.stream("b"));
        write(&a, &tensor(&a));
        // The only block there is.
        write(&b, &tensor(&b));
        b.synchronize().unwrap();
    });
}

/// `pool`, `storage`: the host writes a block itself only if all accesses are done.
#[test]
fn a_host_write_is_ordered_after_the_last_use() {
    check(5, || {
        let device = device(1, Some(64));
        let stream = device.stream("s");
        write(&stream, &tensor(&stream));
        let x = Tensor::from_slice(&stream, &[7u32; 4], [4], crate::Owner::Other).unwrap();
        read(&stream, &x);
        stream.synchronize().unwrap();
    });
}

/// `executor`: no stream stays in the ready list while all workers sleep, and all workers end.
#[test]
fn two_workers_run_everything_and_end() {
    check(3, || {
        let runs = Arc::new(AtomicUsize::new(0));
        {
            let device = device(2, None);
            for name in ["a", "b"] {
                let runs = runs.clone();
                let kernel = move |_: &mut crate::Args<'_>| {
                    runs.fetch_add(1, Ordering::Relaxed);
                };
                device.stream(name).launch("count").run(kernel).unwrap();
            }
        }
        assert_eq!(runs.load(Ordering::Relaxed), 2);
    });
}

/// A kernel with jobs of two parts, one after the other, on a device with two workers.
fn parts(preemptions: usize, jobs: usize) {
    check(preemptions, move || {
        let device = device(2, None);
        let stream = device.stream("s");
        let before = Arc::new(RaceCell::new());
        let cells = Arc::new([RaceCell::new(), RaceCell::new()]);
        let kernel = move |_: &mut crate::Args<'_>| {
            for _ in 0..jobs {
                before.write();
                in_parts(2, |k| {
                    before.read();
                    cells[k].write();
                });
                cells.iter().for_each(RaceCell::read);
            }
        };
        stream.launch("parts").run(kernel).unwrap();
        stream.synchronize().unwrap();
    });
}

/// `parts`: each part runs once, a helper sees the job and all writes before it, and the poster
/// sees the writes of all parts afterwards.
#[test]
fn parts_are_in_order_with_what_is_around_them() {
    parts(2, 1);
}

/// `parts`: a job begins after the last part of the job before it.
#[test]
fn jobs_of_parts_are_one_after_the_other() {
    parts(1, 2);
}
