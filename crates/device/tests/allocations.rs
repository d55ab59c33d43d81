//! Host allocations of the hot path: one box per launch, none for pooled memory.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

#[path = "all/common/mod.rs"]
#[allow(dead_code, reason = "shared with the other tests")]
mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::cpu;
use meristem_device::{DType, Owner, Tensor};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting per thread.
struct Counting;

// SAFETY: every call goes to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(call: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    call();
    ALLOCATIONS.get() - before
}

/// The race sanitizer allocates, too, so nothing is counted with it.
fn is_sanitized() -> bool {
    cpu(1).is_sanitized()
}

#[test]
fn a_launch_takes_one_box() {
    if is_sanitized() {
        return;
    }
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let tensors: Vec<_> =
        (0..8).map(|_| Tensor::zeros(&a, [16], DType::F32, Owner::Other).unwrap()).collect();
    let on_b = tensors[0].on(&b).unwrap();
    let launch = || {
        let launch = tensors.iter().fold(a.launch("t"), |launch, tensor| launch.write(tensor));
        let scale = [2.0f32; 16];
        launch.run(move |args| args.write::<f32>(0).copy_from_slice(&scale)).unwrap();
        b.launch("u").read(&on_b).run(|_| {}).unwrap();
    };
    // The first launches may grow lists.
    (0..10).for_each(|_| launch());
    device.synchronize().unwrap();
    assert_eq!(allocations(|| (0..50).for_each(|_| launch())), 100);
    device.synchronize().unwrap();
}

#[test]
fn memory_from_the_pool_takes_no_box() {
    if is_sanitized() {
        return;
    }
    let device = cpu(1);
    let a = device.stream("a");
    let once = || {
        let x = Tensor::empty(&a, [1000], DType::F32, Owner::Other).unwrap();
        let view = x.view(10, [10]).unwrap();
        assert_eq!(view.address(), x.address() + 40);
    };
    once();
    assert_eq!(allocations(|| (0..100).for_each(|_| once())), 0);
}
