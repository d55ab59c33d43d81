//! The classic use-after-free across streams (S2), on a device whose pool forgets pending accesses
//! to a block, like an allocator for a single stream: a copy made inside a function is read by
//! another stream, dropped on return, and its memory is reused too early. The same program on the
//! real pool is correct.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::ground::fault::{EngineFault, EngineFaults};
use crate::ground::sync::Arc;
use crate::handles::{Device, DeviceOptions, Environment};
use crate::{Args, DType, DeviceId, Owner, Result, Stream, Tensor};

const LEN: usize = 1024;

/// Makes a copy on `main`, which `side` reads, and drops it. The reading kernel leaves time for a
/// premature reuse: it starts to read when `overwritten` is set, or after `patience`.
fn read_a_temporary(
    main: &Stream,
    side: &Stream,
    overwritten: &Arc<AtomicBool>,
    patience: Duration,
) -> Result<Tensor> {
    let copy = Tensor::from_slice(main, &[1u32; LEN], [LEN], Owner::Batches)?.on(side)?;
    let result = Tensor::empty(side, [LEN], DType::U32, Owner::Other)?;
    let overwritten = overwritten.clone();
    let read = move |args: &mut Args<'_>| {
        let start = Instant::now();
        while !overwritten.load(Ordering::Acquire) && start.elapsed() < patience {
            std::thread::yield_now();
        }
        args.write::<u32>(1).copy_from_slice(args.read(0));
    };
    side.launch("repeat").read(&copy).write(&result).run(read)?;
    Ok(result)
}

/// Runs the scenario; returns whether the reader saw the right values, and whether the memory was
/// overwritten.
fn scenario(forgets: bool, memory_limit: Option<usize>, patience: Duration) -> (bool, bool) {
    let options = DeviceOptions { threads: 2, memory_limit, ..DeviceOptions::default() };
    let planted: &[EngineFault] = if forgets { &[EngineFault::PoolForgets] } else { &[] };
    let environment =
        Environment { faults: EngineFaults::planted(planted), ..Environment::default() };
    let device = Device::open_in(DeviceId::Cpu(0), &options, environment).unwrap();
    let (main, side) = (device.stream("main"), device.stream("side"));
    let overwritten = Arc::new(AtomicBool::new(false));
    let result = read_a_temporary(&main, &side, &overwritten, patience).unwrap();
    // The next allocation of that size on the main stream.
    let next = Tensor::empty(&main, [LEN], DType::U32, Owner::Batches).unwrap();
    let flag = overwritten.clone();
    let overwrite = move |args: &mut Args<'_>| {
        args.write::<u32>(0).fill(2);
        flag.store(true, Ordering::Release);
    };
    main.launch("overwrite").write(&next).run(overwrite).unwrap();
    let seen = result.to_vec::<u32>().unwrap();
    assert_eq!(next.to_vec::<u32>().unwrap(), [2; LEN]);
    (seen == [1; LEN], overwritten.load(Ordering::Acquire))
}

/// Memory for the temporary and the result only.
const TIGHT: Option<usize> = Some(2 * 4 * LEN);

#[test]
fn a_pool_that_forgets_readers_corrupts() {
    // With this patience the bug appears at the first attempt, unless the machine is very busy.
    let corrupted = (0..20).any(|_| !scenario(true, TIGHT, Duration::from_secs(2)).0);
    assert!(corrupted, "the scenario does not provoke the bug any more");
}

#[test]
fn ours_does_not() {
    for _ in 0..10 {
        // The writer waits for the reader, whose patience runs out.
        let (right, _) = scenario(false, TIGHT, Duration::from_millis(5));
        assert!(right);
        // With enough memory it need not wait: it gets another block.
        let (right, _) = scenario(false, None, Duration::from_millis(5));
        assert!(right);
    }
}
