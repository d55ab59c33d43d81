//! Planted faults on a CUDA device, whose work runs on three of the driver's streams (*lanes*). On
//! the stand-in driver each fault corrupts a result, because it runs lanes in a seeded order that
//! only stream order and events restrict. On a GPU the copies are so short that a fault rarely
//! shows. The sanitizer reports each fault on both.

use super::{LEN, open_on};
use crate::ground::fault::EngineFault;
use crate::ground::{Error, Race, RaceKind, Result};
use crate::handles::Device;
use crate::{DType, DeviceId, Owner, Stream, Tensor, read_back_as};

const BYTES: usize = 4 * LEN;
/// Repetitions of a program, each with another order of the lanes.
const ROUNDS: usize = 40;

/// A program; returns whether its results are right.
type FaultProgram = fn(&Device) -> Result<bool>;

fn open(faults: &[EngineFault], sanitize: bool, memory_limit: Option<usize>) -> Device {
    open_on(DeviceId::Cuda(0), faults, sanitize, memory_limit)
}

/// Checks a program as described at the head of this file; returns the race.
fn check(faults: &[EngineFault], program: FaultProgram, memory_limit: Option<usize>) -> Race {
    if std::env::var_os("MERISTEM_STANDIN_SEED").is_some() {
        assert!(!program(&open(faults, false, memory_limit)).unwrap(), "{faults:?} do no harm");
    }
    let device = open(faults, true, memory_limit);
    let race = match program(&device) {
        Err(Error::Race(race)) => *race,
        other => panic!("{faults:?}: {other:?}"),
    };
    assert_eq!(device.races().len(), 1);
    for sanitize in [false, true] {
        let device = open(&[], sanitize, memory_limit);
        assert!(program(&device).unwrap(), "sanitize: {sanitize}");
        assert!(device.races().is_empty());
    }
    race
}

fn empty(stream: &Stream) -> Result<Tensor> {
    Tensor::empty(stream, [LEN], DType::U32, Owner::Other)
}

/// Tensors of one value each.
fn constants(stream: &Stream) -> Result<[Tensor; 3]> {
    let constant = |value: u32| Tensor::from_slice(stream, &[value; LEN], [LEN], Owner::Dataset);
    let constants = [constant(0)?, constant(1)?, constant(2)?];
    stream.synchronize()?;
    Ok(constants)
}

/// A temporary that another lane still reads is dropped, and its memory reused (S2).
fn temporary(device: &Device) -> Result<bool> {
    let (main, side) = (device.stream("main"), device.stream("side"));
    let [_, one, two] = constants(&main)?;
    let mut right = true;
    for _ in 0..ROUNDS {
        let seen = empty(&side)?;
        {
            let batch = empty(&main)?;
            main.copy("make", &[(&one, &batch)])?;
            side.copy("repeat", &[(&batch.on(&side)?, &seen)])?;
        }
        let next = empty(&main)?;
        main.copy("overwrite", &[(&two, &next)])?;
        right &= seen.to_vec::<u32>()? == [1; LEN];
    }
    Ok(right)
}

#[test]
#[ignore = "needs a GPU or the stand-in"]
fn a_pool_that_frees_early() {
    // Memory for the constants, the temporary and the result only.
    let race = check(&[EngineFault::PoolForgets], temporary, Some(5 * BYTES));
    assert!(matches!(race.kind, RaceKind::UseAfterFree { .. }), "{race}");
    assert_eq!((&*race.first.stream, &*race.second.stream), ("side", "main"));
}

/// A lane reads what another lane makes.
fn handed_over(device: &Device) -> Result<bool> {
    let [make, pass, take] = ["make", "pass", "take"].map(|name| device.stream(name));
    let constants = constants(&make)?;
    let (made, passed, taken) = (empty(&make)?, empty(&pass)?, empty(&take)?);
    let (made_on_pass, passed_on_take) = (made.on(&pass)?, passed.on(&take)?);
    let mut right = true;
    for round in 0..ROUNDS {
        make.copy("make", &[(&constants[round % 3], &made)])?;
        pass.copy("pass", &[(&made_on_pass, &passed)])?;
        take.copy("take", &[(&passed_on_take, &taken)])?;
        right &= taken.to_vec::<u32>()? == [round as u32 % 3; LEN];
    }
    Ok(right)
}

#[test]
#[ignore = "needs a GPU or the stand-in"]
fn a_missing_wait_between_lanes() {
    let race = check(&[EngineFault::NoWaitForProducer], handed_over, None);
    assert_eq!((race.kind, &*race.first.stream, &*race.second.stream), expected("make", "pass"));
    assert!(race.first.writes && !race.second.writes);
}

fn expected<'a>(first: &'a str, second: &'a str) -> (RaceKind, &'a str, &'a str) {
    (RaceKind::Unordered, first, second)
}

/// A ring of two batch buffers, whose consumer lags: the third batch overwrites the first.
fn ring(device: &Device) -> Result<bool> {
    let (loader, env) = (device.stream("loader"), device.stream("env"));
    let constants = constants(&loader)?;
    let ring = [empty(&loader)?, empty(&loader)?];
    let on_env = [ring[0].on(&env)?, ring[1].on(&env)?];
    let seen = (0..ROUNDS).map(|_| empty(&env)).collect::<Result<Vec<_>>>()?;
    for (round, seen) in seen.iter().enumerate() {
        loader.copy("gather", &[(&constants[round % 3], &ring[round % 2])])?;
        env.copy("consume", &[(&on_env[round % 2], seen)])?;
    }
    let seen = read_back_as::<u32>(&seen.iter().collect::<Vec<_>>())?;
    Ok(seen.iter().enumerate().all(|(round, seen)| *seen == [round as u32 % 3; LEN]))
}

#[test]
#[ignore = "needs a GPU or the stand-in"]
fn a_ring_whose_consumer_lags() {
    let race = check(&[EngineFault::NoWaitForReaders], ring, None);
    assert_eq!((race.kind, &*race.first.stream, &*race.second.stream), expected("env", "loader"));
    assert_eq!((race.first.operation, race.second.operation), ("consume", "gather"));
}

/// Two slots of an env that a stream for copies fills from host buffers, one batch ahead, as with a
/// streamed dataset: the env's stream gathers from one slot while the other is filled.
fn streamed(device: &Device) -> Result<bool> {
    let (uploads, env) = (device.copy_stream("uploads"), device.stream("env"));
    let buffers = uploads.host_buffers(4, BYTES)?;
    let slots = [empty(&uploads)?, empty(&uploads)?];
    let on_env = [slots[0].on(&env)?, slots[1].on(&env)?];
    let stage = |round: usize| {
        let mut buffer = buffers.take()?;
        let images = [round as u32; LEN];
        buffer.bytes().copy_from_slice(bytemuck::cast_slice(&images));
        uploads.upload_from("stage", &slots[round % 2], buffer)
    };
    let seen = (0..ROUNDS).map(|_| empty(&env)).collect::<Result<Vec<_>>>()?;
    stage(0)?;
    for (round, seen) in seen.iter().enumerate() {
        env.copy("gather", &[(&on_env[round % 2], seen)])?;
        stage(round + 1)?;
    }
    let seen = read_back_as::<u32>(&seen.iter().collect::<Vec<_>>())?;
    Ok(seen.iter().enumerate().all(|(round, seen)| *seen == [round as u32; LEN]))
}

#[test]
#[ignore = "needs a GPU or the stand-in"]
fn a_gather_that_does_not_wait_for_its_upload() {
    let race = check(&[EngineFault::NoWaitForProducer], streamed, None);
    assert_eq!((race.kind, &*race.first.stream, &*race.second.stream), expected("uploads", "env"));
    assert_eq!((race.first.operation, race.second.operation), ("stage", "gather"));
}

#[test]
#[ignore = "needs a GPU or the stand-in"]
fn an_upload_into_a_slot_that_is_still_read() {
    let race = check(&[EngineFault::NoWaitForReaders], streamed, None);
    assert_eq!((race.kind, &*race.first.stream, &*race.second.stream), expected("env", "uploads"));
    assert_eq!((race.first.operation, race.second.operation), ("gather", "stage"));
}
