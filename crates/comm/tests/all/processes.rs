//! Ranks that are processes and find each other by environment variables: copies of this program
//! that run only the test `rank` in a role. With `MERISTEM_TEST_DEVICE=cuda:0` tensors are on a
//! GPU, or on the stand-in driver, and are exchanged over NCCL.

use std::env;
use std::fs::DirEntry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use meristem_comm::{
    CommOptions, Communicator, Error, Exchange, ExchangeOptions, FeedbackMode, Method, Reduction,
    Result, SparseMethod,
};
use meristem_device::{DeviceId, Stream, Tensor};

use crate::common::port::free_port;
use crate::common::{noise, on, open, open_on, upload};

/// Variable with the role of a test's process.
const ROLE: &str = "MERISTEM_TEST_ROLE";

/// Variable with the number of calls after which a test's process dies.
const CALLS: &str = "MERISTEM_TEST_CALLS";

/// Time after which a test's process counts as hanging.
const LIMIT: Duration = Duration::from_secs(300);

/// Starts a rank of a group of `size`.
fn start(role: &str, (rank, size): (usize, usize), port: u16, more: &[(&str, &str)]) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["processes::rank", "--exact", "--ignored", "--nocapture"]);
    command.env(ROLE, role).env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("MERISTEM_STANDIN_SEED", (rank + 1).to_string()).env("RUST_BACKTRACE", "0");
    command.envs(more.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Whether the process succeeded, and its output. Kills a process that hangs.
fn end(mut child: Child) -> (bool, String) {
    let limit = Instant::now() + LIMIT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > limit {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.success(), text.concat())
}

/// Runs all ranks of a role; all of them must succeed.
fn run(role: &str, size: usize, more: &[(&str, &str)]) {
    let port = free_port();
    let ranks: Vec<Child> = (0..size).map(|rank| start(role, (rank, size), port, more)).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let (succeeded, text) = end(child);
        assert!(succeeded, "{role}, rank {rank} of {size}:\n{text}");
    }
}

/// Results of a rank's collectives, as bits.
fn collectives(comm: &mut Communicator, stream: &Stream) -> Vec<Vec<u32>> {
    let (me, n) = (comm.rank(), comm.size());
    let bits = |x: &Tensor| x.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
    let mut seen = Vec::new();
    let methods = [
        Method::Dense,
        Method::Sparse(SparseMethod::TopK),
        Method::Sparse(SparseMethod::GTopK),
        Method::Sparse(SparseMethod::OkTopK { refresh: 2 }),
        Method::Int8,
    ];
    for method in methods {
        let keep = FeedbackMode::Momentum(0.5);
        let options =
            ExchangeOptions { method, density: 0.05, keep, small: 10, ..Default::default() };
        // The two large tensors are in one bucket, in two pieces of memory.
        let tensors = |step| [1003, 5, 400].map(|len| upload(stream, &noise(len, me, step)));
        let first = tensors(0);
        let named = [("a", &first[0]), ("b", &first[1]), ("c", &first[2])];
        let mut exchange = Exchange::new(&options, &named).unwrap();
        for step in 0..3 {
            let tensors = tensors(step);
            exchange.run(comm, &tensors.each_ref()).unwrap();
            seen.extend(tensors.iter().map(bits));
        }
    }
    let x = upload(stream, &noise(70, me, 9));
    comm.broadcast(&x, n - 1).unwrap();
    seen.push(bits(&x));
    let all = upload(stream, &vec![0.0f32; 70 * n]);
    comm.all_gather(&upload(stream, &noise(70, me, 10)), &all).unwrap();
    seen.push(bits(&all));
    // Ranks in reverse order, the first one alone.
    let mut part = comm.split(u64::from(me == 0), (n - me) as u64).unwrap();
    let x = upload(stream, &noise(33, me, 11));
    part.all_reduce(&x, Reduction::Mean).unwrap();
    part.barrier().unwrap();
    seen.push(bits(&x));
    comm.barrier().unwrap();
    seen
}

fn join(deadline: Duration) -> Result<Communicator> {
    let control = Communicator::rendezvous(&CommOptions { deadline })?;
    match env::var("MERISTEM_TEST_DEVICE") {
        Ok(_) => Communicator::nccl(control),
        Err(_) => Ok(control),
    }
}

fn sum(comm: &mut Communicator, stream: &Stream, len: usize) -> Result<Vec<f32>> {
    let x = upload(stream, &vec![1.0f32; len]);
    comm.all_reduce(&x, Reduction::Sum)?;
    Ok(x.to_vec()?)
}

/// Stops all threads of this process; its connections stay open.
fn stop() {
    let process = std::process::id().to_string();
    assert!(Command::new("kill").args(["-STOP", &process]).status().unwrap().success());
    // The signal may arrive a little later.
    std::thread::sleep(LIMIT);
}

/// Names of this process's threads.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread that has ended meanwhile has no name.
    let name = |task: DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    let names = tasks.filter_map(|task| name(task.unwrap()));
    names.map(|name| name.trim().to_owned()).collect()
}

/// A process of one of the tests below.
#[test]
#[ignore = "the other tests of this file run it in processes of its own"]
fn rank() {
    let role = env::var(ROLE).unwrap();
    let short = Duration::from_secs(2);
    let long = Duration::from_secs(60);
    match &*role {
        "collectives" => {
            let mut comm = join(long).unwrap();
            let (me, n) = (comm.rank(), comm.size());
            let stream = open().stream("rank");
            let seen = collectives(&mut comm, &stream);
            let group = Communicator::threads(n, &CommOptions::default()).unwrap();
            let expected = on(&open_on(DeviceId::Cpu(0)), group, |mut comm, stream| {
                collectives(&mut comm, stream)
            });
            assert!(seen == expected[me], "rank {me}");
        }
        "alone" => {
            let error = join(short).unwrap_err();
            assert!(matches!(error, Error::RankLate { rank: 1, .. }), "{error:?}");
            assert!(error.to_string().contains("rank 1 did not arrive within 2 s"), "{error}");
        }
        "unreachable" => {
            let error = join(short).unwrap_err();
            assert!(matches!(error, Error::BadArgument { .. }), "{error:?}");
            let words = "`MASTER_ADDR` must be the machine of rank 0, which listens at port";
            assert!(error.to_string().contains(words), "{error}");
        }
        "taken" => {
            let error = join(3 * short).unwrap_err();
            if matches!(error, Error::BadArgument { .. }) {
                assert!(error.to_string().contains("another process has RANK 1"), "{error}");
                panic!("this process was refused");
            }
            assert!(matches!(error, Error::RankLate { rank: 2, .. }), "{error:?}");
        }
        "dies" => {
            let mut comm = join(long).unwrap();
            let stream = open().stream("rank");
            assert_eq!(sum(&mut comm, &stream, 100).unwrap(), [3.0; 100]);
            // All ranks have their results, which a rank's death could prevent.
            comm.barrier().unwrap();
            if comm.rank() == 1 {
                #[allow(clippy::disallowed_methods, reason = "it dies")]
                std::process::exit(0);
            }
            let error = sum(&mut comm, &stream, 100).unwrap_err();
            assert!(matches!(error, Error::RankGone { rank: 1, .. }), "{error:?}");
            let again = comm.barrier().unwrap_err();
            assert!(matches!(again, Error::RankGone { rank: 1, .. }), "{again:?}");
        }
        "differs" => {
            let mut comm = join(long).unwrap();
            let stream = open().stream("rank");
            let len = if comm.rank() == 2 { 7 } else { 8 };
            let error = sum(&mut comm, &stream, len).unwrap_err();
            assert!(matches!(error, Error::Disagreement { rank: 2, .. }), "{error:?}");
            assert!(error.to_string().contains("element count 7, the others 8"), "{error}");
        }
        "late" => {
            let mut comm = join(short).unwrap();
            let stream = open().stream("rank");
            if comm.rank() == 1 {
                std::thread::sleep(3 * short);
            }
            let error = sum(&mut comm, &stream, 8).unwrap_err();
            // The other ranks may have ended before this one arrives.
            let named = matches!(error, Error::RankLate { rank: 1, .. });
            assert!(named || comm.rank() == 1, "{error:?}");
        }
        "mortal" | "hangs" | "vanishes" => {
            lose_one(&role, if role == "hangs" { short } else { long })
        }
        "refused" => {
            let error = join(long).unwrap_err().to_string();
            let words = env::var("MERISTEM_TEST_WORDS").unwrap();
            assert!(error.contains(&words), "{error}");
        }
        role => faulty(role, (short, long)),
    }
}

/// A process of a group that loses rank 1 at some point.
fn lose_one(role: &str, deadline: Duration) {
    let mut comm = join(deadline).unwrap();
    let stream = open().stream("rank");
    let calls = env::var(CALLS).map_or(usize::MAX, |calls| calls.parse().unwrap());
    let ended = (0..calls)
        .try_for_each(|_| sum(&mut comm, &stream, 100).map(|seen| assert_eq!(seen, [3.0; 100])));
    // Without a point at which the stand-in ends the process.
    let Err(error) = ended else {
        if role == "hangs" {
            stop();
        }
        std::process::abort()
    };
    let named = |error: &Error| match error {
        Error::RankGone { rank: 1, reason, .. } => match role {
            "vanishes" => *reason == "it does not answer any more",
            role => role == "mortal",
        },
        Error::RankLate { rank: 1, .. } => role == "hangs",
        _ => false,
    };
    assert!(named(&error), "{error:?}");
    let again = comm.barrier().unwrap_err();
    assert!(named(&again), "{again:?}");
}

/// A process of a test of faults that only the watching threads detect.
fn faulty(role: &str, (short, long): (Duration, Duration)) {
    match role {
        "stalls" => {
            let mut comm = join(3 * short).unwrap();
            let stream = open().stream("rank");
            let error = (0..9).try_for_each(|_| sum(&mut comm, &stream, 100).map(drop));
            let error = error.unwrap_err();
            assert!(matches!(error, Error::RankLate { rank: 1, .. }), "{error:?}");
        }
        "busy" => {
            let mut comm = join(3 * short).unwrap();
            let stream = open().stream("rank");
            for pause in [0, 9] {
                std::thread::sleep(Duration::from_secs(pause));
                assert_eq!(sum(&mut comm, &stream, 100).unwrap(), [3.0; 100]);
            }
        }
        "behind" => {
            let mut comm = join(long).unwrap();
            let stream = open().stream("rank");
            let sent = noise(1 << 20, 0, 0).repeat(16);
            let x = match comm.rank() {
                0 => upload(&stream, &sent),
                _ => upload(&stream, &vec![0.0f32; sent.len()]),
            };
            comm.broadcast(&x, 0).unwrap();
            // The sender leaves as soon as its own device has ended.
            drop(comm);
            assert!(x.to_vec::<f32>().unwrap() == sent);
        }
        "panics" => {
            let mut comm = join(long).unwrap();
            let stream = open().stream("rank");
            let x = upload(&stream, &[1.0f32; 100]);
            if comm.rank() == 1 {
                let panicked = catch_unwind(AssertUnwindSafe(move || {
                    comm.broadcast(&x, 0).unwrap();
                    panic!("on purpose");
                }));
                assert!(panicked.is_err());
                return assert!(!threads().contains(&"nccl, watch".to_owned()), "{:?}", threads());
            }
            // Rank 0 hangs here.
            comm.broadcast(&x, 0).unwrap();
            let error = Error::from(x.to_vec::<f32>().unwrap_err());
            assert!(matches!(error, Error::RankGone { rank: 1, .. }), "{error:?}");
        }
        "ends" => {
            let mut comm = join(long).unwrap();
            let stream = open().stream("rank");
            let mut part = comm.split(0, comm.rank() as u64).unwrap();
            assert_eq!(sum(&mut part, &stream, 100).unwrap(), [3.0; 100]);
            if comm.rank() == 0 {
                // By then the other ranks wait for this one, and would give up first.
                std::thread::sleep(Duration::from_secs(1));
                drop(part);
                comm.barrier().unwrap();
            } else {
                comm.barrier().unwrap();
                drop(part);
            }
        }
        role => panic!("no role {role}"),
    }
}

#[test]
fn processes_and_threads_have_the_same_results() {
    for size in 1..=4 {
        run("collectives", size, &[]);
    }
}

#[test]
fn a_dead_differing_or_late_rank_is_named() {
    run("dies", 3, &[]);
    run("differs", 3, &[]);
    run("late", 3, &[]);
}

/// Ranks 0 and 2 of three detect a fault of rank 1, which has these variables.
fn lose_rank_1(role: &str, variables: &[(&str, &str)]) {
    let port = free_port();
    let ranks = [0, 1, 2].map(|rank| {
        let more = if rank == 1 { variables } else { &[] };
        start(role, (rank, 3), port, more)
    });
    let [first, mut lost, last] = ranks;
    for (rank, child) in [(0, first), (2, last)] {
        let (succeeded, text) = end(child);
        assert!(succeeded, "{variables:?}: rank {rank}:\n{text}");
    }
    // A rank that hangs.
    let _ = lost.kill();
    let (succeeded, text) = end(lost);
    assert!(!succeeded, "{variables:?}: rank 1 lives:\n{text}");
}

/// Deaths before a call, and over NCCL at points within it: during the join, before and after a
/// part of the rank's messages is enqueued, before and after a part of them is written, and after
/// its own device has ended. `MERISTEM_TEST_POINTS` names other points.
#[test]
fn a_rank_that_dies_at_any_point_is_named() {
    let over_nccl = env::var("MERISTEM_TEST_DEVICE").is_ok();
    let points = env::var("MERISTEM_TEST_POINTS").unwrap_or_else(|_| "1 6 17 26".to_owned());
    let points = points.split(' ').filter(|_| over_nccl);
    std::thread::scope(|scope| {
        for calls in ["0", "3"] {
            scope.spawn(|| lose_rank_1("mortal", &[(CALLS, calls)]));
        }
        for point in points {
            scope.spawn(move || lose_rank_1("mortal", &[("MERISTEM_STANDIN_NCCL_DIE", point)]));
        }
    });
}

/// Before a call, and over NCCL after the agreement, where only the deadline detects it.
#[test]
fn a_rank_that_hangs_is_named() {
    std::thread::scope(|scope| {
        scope.spawn(|| lose_rank_1("hangs", &[(CALLS, "3")]));
        if env::var("MERISTEM_TEST_DEVICE").is_ok() {
            scope.spawn(|| lose_rank_1("hangs", &[("MERISTEM_STANDIN_NCCL_HANG", "4")]));
        }
    });
}

/// Over NCCL, leaving a group of devices waits for the other devices, not for calls of other ranks.
#[test]
fn leaving_a_group_of_devices_waits_for_no_call() {
    run("ends", 3, &[]);
}

/// Three ranks with common variables; rank 1 has additional ones.
fn run_with_rank_1(role: &str, all: &[(&str, &str)], variables: &[(&str, &str)]) -> [Child; 3] {
    let port = free_port();
    [0, 1, 2].map(|rank| {
        let own = if rank == 1 { variables } else { &[] };
        start(role, (rank, 3), port, &[all, own].concat())
    })
}

fn all_end(what: &str, ranks: impl IntoIterator<Item = Child>) {
    for (rank, child) in ranks.into_iter().enumerate() {
        let (succeeded, text) = end(child);
        assert!(succeeded, "{what}: process {rank}:\n{text}");
    }
}

/// Faults over NCCL that only the watching threads detect. Each case has its own processes; the
/// cases run side by side, since most wait for several seconds.
#[test]
fn faults_seen_only_by_the_watch_are_named() {
    if env::var("MERISTEM_TEST_DEVICE").is_err() {
        return;
    }
    std::thread::scope(|scope| {
        // A driver that does not answer while a kernel hangs.
        let serial = [("MERISTEM_STANDIN_SERIAL", "1")];
        let hangs = [("MERISTEM_STANDIN_NCCL_HANG", "4")];
        scope.spawn(move || {
            let [first, mut lost, last] = run_with_rank_1("hangs", &serial, &hangs);
            all_end("serial", [first, last]);
            lost.kill().unwrap();
            lost.wait().unwrap();
        });
        // A machine that no longer sends; NCCL may or may not detect the lost rank.
        for notices in ["1", "0"] {
            scope.spawn(move || {
                let all = [("MERISTEM_STANDIN_NCCL_NOTICES", notices)];
                let vanishes = [("MERISTEM_STANDIN_NCCL_VANISH", "4")];
                let role = if notices == "1" { "vanishes" } else { "hangs" };
                let [first, mut lost, last] = run_with_rank_1(role, &all, &vanishes);
                all_end("vanishes", [first, last]);
                lost.kill().unwrap();
                lost.wait().unwrap();
            });
        }
        // An exchange that NCCL does not finish enqueuing: this rank has an error, too.
        let stalls = [("MERISTEM_STANDIN_NCCL_STALL", "4")];
        scope.spawn(move || all_end("stalls", run_with_rank_1("stalls", &[], &stalls)));
        // A rank that computes for longer than the time after which a rank counts as silent.
        scope.spawn(|| all_end("busy", run_with_rank_1("busy", &[], &[])));
        // A rank that reads another rank's data seconds after the other rank has ended.
        let slow = [("MERISTEM_STANDIN_NCCL_SLOW", "8")];
        scope.spawn(move || all_end("behind", run_with_rank_1("behind", &[], &slow)));
        // A rank that panics while its device waits for another.
        scope.spawn(move || {
            let port = free_port();
            let [mut hung, panicked, last] = [0, 1, 2].map(|rank| {
                let own: &[_] =
                    if rank == 0 { &[("MERISTEM_STANDIN_NCCL_HANG", "2")] } else { &[] };
                start("panics", (rank, 3), port, own)
            });
            all_end("panics", [panicked, last]);
            hung.kill().unwrap();
            hung.wait().unwrap();
        });
    });
}

#[test]
fn failed_joins_have_a_reason() {
    let port = free_port();
    let (succeeded, text) = end(start("alone", (0, 2), port, &[]));
    assert!(succeeded, "{text}");
    let (succeeded, text) = end(start("unreachable", (1, 2), port, &[]));
    assert!(succeeded, "{text}");
    // Two processes with the same rank: the second is rejected, and the last rank never arrives.
    let port = free_port();
    let ranks = [0, 1, 1].map(|rank| start("taken", (rank, 3), port, &[]));
    let results = ranks.map(end);
    let refused = results.iter().filter(|(_, text)| text.contains("this process was refused"));
    assert_eq!(refused.count(), 1, "{results:?}");
    assert_eq!(results.iter().filter(|(succeeded, _)| *succeeded).count(), 2, "{results:?}");
}

/// An old NCCL, and no NCCL.
#[test]
fn a_library_that_cannot_be_used_is_named() {
    if env::var("MERISTEM_TEST_DEVICE").is_err() {
        return;
    }
    let old = "the NCCL that was found is version 2.18.5, and 2.27.0 is needed";
    run("refused", 2, &[("MERISTEM_STANDIN_NCCL", "21805"), ("MERISTEM_TEST_WORDS", old)]);
    // The stand-in without the file name of NCCL.
    let folder = tempfile::tempdir().unwrap();
    let paths = env::var("LD_LIBRARY_PATH").unwrap();
    let standin = env::split_paths(&paths).find(|path| path.join("libcuda.so").exists()).unwrap();
    for name in ["libcuda.so", "libnvrtc.so"] {
        let library = std::fs::canonicalize(standin.join(name)).unwrap();
        std::os::unix::fs::symlink(library, folder.path().join(name)).unwrap();
    }
    let more = [
        ("LD_LIBRARY_PATH", folder.path().to_str().unwrap()),
        ("MERISTEM_TEST_WORDS", "NCCL was not found: neither libnccl.so.2 nor libnccl.so is in"),
    ];
    run("refused", 2, &more);
}
