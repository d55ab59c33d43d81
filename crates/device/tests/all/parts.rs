//! Kernels in parts: idle workers take over parts, and leave for their own tasks.

use std::collections::HashSet;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use meristem_device::{Args, Error, in_parts};

use crate::common::cpu;

const DEADLINE: Duration = Duration::from_secs(60);

/// Runs jobs of two slow parts until `enough` returns true or the deadline passes; returns the
/// threads that ran parts.
fn threads_of_parts(enough: impl Fn(&HashSet<ThreadId>) -> bool) -> HashSet<ThreadId> {
    let (start, threads) = (Instant::now(), Mutex::new(HashSet::new()));
    while start.elapsed() < DEADLINE && !enough(&threads.lock().unwrap()) {
        in_parts(2, |_| {
            threads.lock().unwrap().insert(thread::current().id());
            thread::sleep(Duration::from_millis(1));
        });
    }
    threads.into_inner().unwrap()
}

#[test]
fn an_idle_worker_takes_parts() {
    let device = cpu(2);
    let found = Arc::new(Mutex::new(HashSet::new()));
    let to = found.clone();
    let kernel = move |_: &mut Args<'_>| {
        (0..2).for_each(|count| in_parts(count, |_| {})); // no other thread has them
        *to.lock().unwrap() = threads_of_parts(|threads| threads.len() == 2);
    };
    device.stream("s").launch("parts").run(kernel).unwrap();
    device.synchronize().unwrap();
    assert_eq!(found.lock().unwrap().len(), 2);
}

#[test]
fn a_helper_leaves_for_a_stream_that_is_ready() {
    let device = cpu(2);
    let (helped, ran) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (tell, other) = (helped.clone(), ran.clone());
    let kernel = move |_: &mut Args<'_>| {
        threads_of_parts(|threads| threads.len() == 2);
        tell.store(true, Ordering::Relaxed);
        // There are parts until the other stream has run.
        threads_of_parts(|_| other.load(Ordering::Relaxed));
        assert!(other.load(Ordering::Relaxed), "nobody ran the other stream");
    };
    device.stream("parts").launch("parts").run(kernel).unwrap();
    while !helped.load(Ordering::Relaxed) {
        thread::yield_now();
    }
    let kernel = move |_: &mut Args<'_>| ran.store(true, Ordering::Relaxed);
    device.stream("other").launch("set").run(kernel).unwrap();
    device.synchronize().unwrap();
}

#[test]
fn parts_of_a_part_and_of_other_threads_run_in_order() {
    let order = || {
        let seen = Mutex::new(Vec::new());
        in_parts(5, |k| seen.lock().unwrap().push((k, thread::current().id())));
        let here = thread::current().id();
        assert_eq!(seen.into_inner().unwrap(), [0, 1, 2, 3, 4].map(|k| (k, here)));
    };
    order();
    in_parts(0, |_| panic!("there is no part"));
    let device = cpu(3);
    let kernel = move |_: &mut Args<'_>| (0..100).for_each(|_| in_parts(3, |_| order()));
    device.stream("s").launch("nested").run(kernel).unwrap();
    device.synchronize().unwrap();
}

/// The payload of a panic that panics when it is dropped.
struct Twice;

impl Drop for Twice {
    fn drop(&mut self) {
        resume_unwind(Box::new("dropped"));
    }
}

#[test]
fn a_payload_that_panics_in_turn_ends_nothing() {
    let device = cpu(2);
    let kernel = move |_: &mut Args<'_>| {
        in_parts(4, |k| match k {
            0 => resume_unwind(Box::new("part 0")),
            _ => resume_unwind(Box::new(Twice)),
        });
    };
    for name in ["a", "b", "c"] {
        let stream = device.stream(name);
        stream.launch("parts").run(kernel).unwrap();
        match stream.synchronize() {
            Err(Error::KernelPanicked { message, .. }) => assert_eq!(&*message, "part 0"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_panic_of_the_lowest_part_is_that_of_the_kernel() {
    let device = cpu(3);
    let ended = Arc::new(AtomicUsize::new(0));
    let count = ended.clone();
    let kernel = move |_: &mut Args<'_>| {
        in_parts(8, |k| {
            count.fetch_add(1, Ordering::Relaxed);
            if k >= 3 {
                resume_unwind(Box::new(format!("part {k}")));
            }
        });
    };
    let stream = device.stream("s");
    stream.launch("parts").run(kernel).unwrap();
    match stream.synchronize() {
        Err(Error::KernelPanicked { message, .. }) => assert_eq!(&*message, "part 3"),
        other => panic!("{other:?}"),
    }
    assert_eq!(ended.load(Ordering::Relaxed), 8);
    // The workers go on.
    let kernel = move |_: &mut Args<'_>| in_parts(8, |_| {});
    device.stream("t").launch("parts").run(kernel).unwrap();
    device.stream("t").synchronize().unwrap();
}
