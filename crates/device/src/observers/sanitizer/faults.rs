//! Planted faults. Without the sanitizer each corrupts a result; the sanitizer reports each before
//! the launch runs.
//!
//! The kernels coordinate their accesses to memory (a flag that is set after the write, and checked
//! before the read), so that a fault shows as a wrong result and never as a data race of this
//! process. If the engine is correct, the flag is never set in time, and the reader reads when its
//! patience has elapsed. Nothing else here depends on time.

#[cfg(feature = "cuda")]
mod on_cuda;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::ground::fault::{EngineFault, EngineFaults};
use crate::ground::sync::Arc;
use crate::ground::{Error, Race, RaceKind, Result};
use crate::handles::{Device, DeviceOptions, Environment};
use crate::hooks::POISON;
use crate::{Args, DType, DeviceId, Owner, Stream, Tensor, read_back_as};

const LEN: usize = 1024;
/// Long enough that a planted fault shows at the first try, unless the machine is very busy.
const LONG: Duration = Duration::from_secs(2);
const SHORT: Duration = Duration::from_millis(3);

/// A flag from one kernel to another.
#[derive(Clone, Default)]
struct Flag(Arc<AtomicBool>);

impl Flag {
    fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Waits for the flag, at most this long.
    fn wait(&self, patience: Duration) {
        let start = Instant::now();
        while !self.0.load(Ordering::Acquire) && start.elapsed() < patience {
            std::thread::yield_now();
        }
    }
}

/// A program; returns whether its result is right. The duration is how long a reader gives a fault
/// to show.
type FaultProgram = fn(&Device, Duration) -> Result<bool>;

fn open(faults: &[EngineFault], sanitize: bool, memory_limit: Option<usize>) -> Device {
    open_on(DeviceId::Cpu(0), faults, sanitize, memory_limit)
}

/// A device with three workers, or three of the driver's streams.
fn open_on(
    id: DeviceId,
    faults: &[EngineFault],
    sanitize: bool,
    memory_limit: Option<usize>,
) -> Device {
    let environment =
        Environment { sanitize, faults: EngineFaults::planted(faults), ..Environment::default() };
    let options = DeviceOptions { threads: 3, memory_limit, ..DeviceOptions::default() };
    Device::open_in(id, &options, environment).unwrap()
}

/// Checks a program as described at the head of this file; returns the race.
fn check(fault: EngineFault, program: FaultProgram, memory_limit: Option<usize>) -> Race {
    // Without the sanitizer, the fault corrupts a result.
    let harm = (0..20).any(|_| !program(&open(&[fault], false, memory_limit), LONG).unwrap());
    assert!(harm, "{fault:?} does no harm");
    // With the sanitizer the launch is refused, and the race is reported and stored.
    let device = open(&[fault], true, memory_limit);
    let race = match program(&device, SHORT) {
        Err(Error::Race(race)) => *race,
        other => panic!("{fault:?}: {other:?}"),
    };
    let text = race.to_string();
    for access in [&race.first, &race.second] {
        assert!(text.contains(access.operation), "{text}");
        assert!(access.site.file().ends_with("faults.rs"), "{text}");
        assert!(text.contains(&access.site.to_string()), "{text}");
    }
    assert!(text.contains(&format!("`{}` up to #{}", race.first.stream, race.first.seq)), "{text}");
    assert_eq!(device.races().len(), 1);
    assert_eq!(device.races()[0].to_string(), text);
    // The correct engine gives the right result, without a report.
    for sanitize in [false, true] {
        let device = open(&[], sanitize, memory_limit);
        assert!(program(&device, SHORT).unwrap(), "sanitize: {sanitize}");
        assert!(device.races().is_empty());
    }
    race
}

fn set(
    stream: &Stream,
    x: &Tensor,
    operation: &'static str,
    value: u32,
    flag: &Flag,
) -> Result<()> {
    let flag = flag.clone();
    stream.launch(operation).write(x).run(move |args| {
        args.write::<u32>(0).fill(value);
        flag.set();
    })
}

/// Copies `x` after waiting for the flag, at most for `patience`.
fn copy_late(
    (stream, x): (&Stream, &Tensor),
    operation: &'static str,
    (flag, patience): (&Flag, Duration),
) -> Result<Tensor> {
    let y = Tensor::empty(stream, [x.numel()], DType::U32, Owner::Other)?;
    let flag = flag.clone();
    stream.launch(operation).read(x).write(&y).run(move |args| {
        flag.wait(patience);
        args.write::<u32>(1).copy_from_slice(args.read(0));
    })?;
    Ok(y)
}

/// The classic bug (S2): a temporary that another stream still reads is dropped, and its memory
/// reused.
fn temporary(device: &Device, patience: Duration) -> Result<bool> {
    let (main, side) = (device.stream("main"), device.stream("side"));
    let overwritten = Flag::default();
    let seen = {
        let copy = Tensor::from_slice(&main, &[1u32; LEN], [LEN], Owner::Batches)?.on(&side)?;
        copy_late((&side, &copy), "repeat", (&overwritten, patience))?
    };
    let next = Tensor::empty(&main, [LEN], DType::U32, Owner::Activations)?;
    set(&main, &next, "overwrite", 2, &overwritten)?;
    Ok(seen.to_vec::<u32>()? == [1; LEN])
}

#[test]
fn a_temporary_that_is_still_read() {
    // Memory for the temporary and the result only.
    let race = check(EngineFault::PoolForgets, temporary, Some(2 * 4 * LEN));
    assert_eq!(race.kind, RaceKind::UseAfterFree { freed_after: 2 });
    assert_eq!((race.first.operation, race.second.operation), ("repeat", "Tensor::empty"));
    assert_eq!((race.first.owner, race.second.owner), (Owner::Batches, Owner::Activations));
    assert_eq!((&*race.first.stream, &*race.second.stream), ("side", "main"));
    assert_eq!(race.bytes, 0..4 * LEN);
    let text = race.to_string();
    assert!(text.starts_with("use after free") && text.contains("too early"), "{text}");
    assert!(text.contains(&race.first.origin.to_string()), "{text}");
}

/// A ring of two batch buffers: the third batch overwrites the first, which a consumer still reads.
fn ring(device: &Device, patience: Duration) -> Result<bool> {
    let (loader, env) = (device.stream("loader"), device.stream("env"));
    let ring = [0, 1].map(|_| Tensor::zeros(&loader, [LEN], DType::U32, Owner::Batches));
    let ring = ring.into_iter().collect::<Result<Vec<_>>>()?;
    loader.synchronize()?;
    let overtaken = Flag::default();
    let mut seen = Vec::new();
    for n in 0..3u32 {
        let buffer = &ring[n as usize % 2];
        let flag = if n == 2 { overtaken.clone() } else { Flag::default() };
        set(&loader, buffer, "gather", n, &flag)?;
        let wait = if n == 0 { patience } else { Duration::ZERO };
        seen.push(copy_late((&env, &buffer.on(&env)?), "consume", (&overtaken, wait))?);
    }
    let seen = read_back_as::<u32>(&seen.iter().collect::<Vec<_>>())?;
    Ok((0u32..).zip(&seen).all(|(n, seen)| *seen == [n; LEN]))
}

#[test]
fn a_ring_buffer_that_is_still_read() {
    let race = check(EngineFault::NoWaitForReaders, ring, None);
    assert_eq!(race.kind, RaceKind::Unordered);
    assert_eq!((race.first.operation, race.second.operation), ("consume", "gather"));
    assert!(!race.first.writes && race.second.writes);
}

/// Two streams add to one metric: each reads it, takes a while, and writes.
fn metric(device: &Device, patience: Duration) -> Result<bool> {
    let (a, b) = (device.stream("a"), device.stream("b"));
    let metric = Tensor::zeros(&a, [1], DType::U32, Owner::Metrics)?;
    a.synchronize()?;
    let (first_done, second_done) = (Flag::default(), Flag::default());
    // The first kernel stores its sum only after the second kernel, unless the second waits for it.
    let flags = (second_done.clone(), first_done.clone());
    a.launch("add_a").write(&metric).run(move |args: &mut Args<'_>| {
        flags.0.wait(patience);
        args.write::<u32>(0)[0] = 1;
        flags.1.set();
    })?;
    let on_b = metric.on(&b)?;
    b.launch("add_b").write(&on_b).run(move |args: &mut Args<'_>| {
        args.write::<u32>(0)[0] += 2;
        second_done.set();
    })?;
    first_done.wait(2 * patience);
    Ok(metric.to_vec::<u32>()? == [3])
}

#[test]
fn two_streams_that_write_one_metric() {
    // `on` waits for the producer, which here is the other writer: that wait has to be omitted too.
    let both = [EngineFault::NoWaitForWriter, EngineFault::NoWaitForProducer];
    let run = |sanitize, patience| metric(&open(&both, sanitize, None), patience);
    assert!((0..20).any(|_| !run(false, LONG).unwrap()));
    let Err(Error::Race(race)) = run(true, SHORT) else { panic!("no race") };
    assert_eq!((race.first.operation, race.second.operation), ("add_a", "add_b"));
    assert!(race.first.writes && race.second.writes);
    assert_eq!((race.first.owner, race.bytes.clone()), (Owner::Metrics, 0..4));
    for sanitize in [false, true] {
        let device = open(&[], sanitize, None);
        assert!(metric(&device, SHORT).unwrap());
        assert!(device.races().is_empty());
    }
}

/// Two envs share a view by mistake: one reads the bytes that the other is about to write.
fn shared_view(device: &Device, patience: Duration) -> Result<bool> {
    let (a, b) = (device.stream("env0"), device.stream("env1"));
    let batch = Tensor::zeros(&a, [2 * LEN], DType::U32, Owner::Batches)?;
    a.synchronize()?;
    let mine = batch.view(0, [LEN + 8])?;
    let theirs = batch.view(LEN, [LEN])?.on(&b)?;
    let looked = Flag::default();
    let late = looked.clone();
    a.launch("normalise").write(&mine).run(move |args: &mut Args<'_>| {
        late.wait(patience);
        args.write::<u32>(0).fill(7);
    })?;
    let seen = Tensor::empty(&b, [LEN], DType::U32, Owner::Other)?;
    b.launch("forward").read(&theirs).write(&seen).run(move |args: &mut Args<'_>| {
        args.write::<u32>(1).copy_from_slice(args.read(0));
        looked.set();
    })?;
    let seen = seen.to_vec::<u32>()?;
    Ok(seen[..8] == [7; 8] && seen[8..].iter().all(|&x| x == 0))
}

#[test]
fn a_view_that_two_envs_share() {
    let race = check(EngineFault::NoWaitForProducer, shared_view, None);
    assert_eq!((race.first.operation, race.second.operation), ("normalise", "forward"));
    // Only the bytes that both launches touch.
    assert_eq!(race.bytes, 4 * LEN..4 * (LEN + 8));
}

/// A read-back that takes the result at once.
fn early_read_back(device: &Device, patience: Duration) -> Result<bool> {
    let stream = device.stream("metrics");
    let sum = Tensor::zeros(&stream, [4], DType::U32, Owner::Metrics)?;
    let taken = Flag::default();
    let late = taken.clone();
    stream.launch("accumulate").write(&sum).run(move |args: &mut Args<'_>| {
        late.wait(patience);
        args.write::<u32>(0).fill(5);
    })?;
    let seen = sum.to_vec::<u32>()?;
    taken.set();
    Ok(seen == [5; 4])
}

#[test]
fn a_read_back_without_a_wait() {
    let race = check(EngineFault::NoWaitForReadBack, early_read_back, None);
    assert_eq!((race.kind, &*race.second.stream), (RaceKind::HostRead, "host"));
    assert_eq!(race.first.owner, Owner::Metrics);
}

/// The race is found whatever the timing of the kernels: here the first kernel is done long before.
#[test]
fn a_race_is_found_even_if_all_went_well() {
    let device = open(&[EngineFault::NoWaitForReaders], true, None);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = Tensor::zeros(&a, [LEN], DType::U32, Owner::Other).unwrap();
    set(&a, &x, "make", 1, &Flag::default()).unwrap();
    let read = Flag::default();
    let done = read.clone();
    b.launch("read").read(&x.on(&b).unwrap()).run(move |_| done.set()).unwrap();
    read.wait(Duration::from_secs(60));
    let error = set(&a, &x, "write", 2, &Flag::default()).unwrap_err();
    assert!(matches!(error, Error::Race(_)), "{error}");
    // The refused launch did not run, and the host's wait makes it correct.
    b.synchronize().unwrap();
    set(&a, &x, "write", 3, &Flag::default()).unwrap();
    assert_eq!(x.to_vec::<u32>().unwrap(), [3; LEN]);
    assert_eq!(device.races().len(), 1);
}

/// An event that the host saw complete orders like a wait; also through an event of another device.
#[test]
fn what_orders_is_no_race() {
    let other = open(&[], true, None);
    let c = other.stream("c");
    for how in 0..5 {
        let device = open(&[EngineFault::NoWaitForReaders], true, None);
        let (a, b) = (device.stream("a"), device.stream("b"));
        let x = Tensor::zeros(&a, [LEN], DType::U32, Owner::Other).unwrap();
        let on_b = x.on(&b).unwrap();
        b.launch("read").read(&on_b).run(|_| {}).unwrap();
        let event = b.record();
        match how {
            0 => event.synchronize().unwrap(),
            1 => while !event.is_done() {},
            2 => a.wait(&event).unwrap(),
            3 => device.synchronize().unwrap(),
            _ => {
                c.wait(&event).unwrap();
                a.wait(&c.record()).unwrap();
            }
        }
        set(&a, &x, "write", 2, &Flag::default()).unwrap();
        assert_eq!(x.to_vec::<u32>().unwrap(), [2; LEN], "{how}");
    }
}

/// New memory holds the poison, whether it is new to the process or was an older tensor's.
#[test]
fn unspecified_elements_are_poison() {
    assert!(f32::from_bits(POISON).is_nan());
    assert!(f64::from_bits(u64::from(POISON) << 32 | u64::from(POISON)).is_nan());
    let device = open(&[], true, None);
    let stream = device.stream("s");
    let address = {
        let fresh = Tensor::empty(&stream, [LEN], DType::U32, Owner::Other).unwrap();
        assert_eq!(fresh.to_vec::<u32>().unwrap(), [POISON; LEN]);
        set(&stream, &fresh, "set", 1, &Flag::default()).unwrap();
        fresh.address()
    };
    let reused = Tensor::empty(&stream, [LEN / 2 * 2 - 6], DType::F32, Owner::Other).unwrap();
    assert_eq!(reused.address(), address);
    assert!(reused.to_vec::<f32>().unwrap().iter().all(|x| x.to_bits() == POISON));
    drop(reused);
    let zeros = Tensor::zeros(&stream, [LEN], DType::U32, Owner::Other).unwrap();
    assert_eq!((zeros.address(), zeros.to_vec::<u32>().unwrap()), (address, vec![0; LEN]));
    let odd = Tensor::empty(&stream, [4 * LEN - 1], DType::U8, Owner::Other).unwrap();
    drop(zeros);
    assert_eq!(odd.to_vec::<u8>().unwrap()[4 * LEN - 4..], POISON.to_ne_bytes()[..3]);
    // On a failed stream memory can still be allocated, as without the sanitizer.
    stream.launch("bad").run(|_| panic!("on purpose")).unwrap();
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(error, Error::KernelPanicked { operation: "bad", .. }), "{error}");
    drop(odd);
    Tensor::empty(&stream, [4 * LEN], DType::U8, Owner::Other).unwrap();
}

/// A new block from the system has no history, even if its address was used before, by work whose
/// end the host has not observed.
#[test]
fn an_address_that_the_system_hands_out_again_has_no_history() {
    let device = open(&[], true, None);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let write = |stream: &Stream| {
        let x = Tensor::empty(stream, [LEN], DType::U32, Owner::Other).unwrap();
        let kernel = |args: &mut Args<'_>| args.write::<u32>(0).fill(1);
        stream.launch("write").write(&x).run(kernel).unwrap();
        x.address()
    };
    let mut was_there_before = false;
    for _ in 0..100 {
        let address = write(&a);
        while device.trim() == 0 {
            std::thread::yield_now();
        }
        was_there_before |= write(&b) == address;
        device.synchronize().unwrap();
        device.trim();
    }
    assert!(was_there_before, "the system hands out no address again");
}
