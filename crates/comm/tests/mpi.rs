//! Ranks that are processes: the same bits as over threads, and no hang whatever happens to a rank.
//!
//! A test starts `mpirun` (of Open MPI) with this binary, which runs only [`rank`]; a variable
//! selects the case. Every rank writes its output into a separate file, because `mpirun` mixes the
//! output of processes, even within a line.
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may unwrap")]

#[path = "mpi/by_address.rs"]
mod by_address;
#[path = "all/common/mod.rs"]
#[allow(dead_code, reason = "shared with the other tests")]
mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use half::bf16;
use meristem_comm::{
    CollectiveCall, CommOptions, Communicator, Error, Exchange, ExchangeOptions, ExchangeProblem,
    FeedbackMode, GroupStatus, Heartbeat, Method, Parcel, Reduction, SparseMethod, SparseSum, Sum,
    SumElement, SumOrder, TopKStorage, topk_all_gather,
};
use meristem_device::{DType, Device, Element, MemoryFormat, Owner, Stream, Tensor};

use self::common::{noise, on, open, upload};

/// Variable with the case of [`rank`].
const CASE: &str = "COMM_TEST_CASE";
/// Variable with the folder for the ranks' output.
const WORDS: &str = "COMM_TEST_WORDS";
/// Seconds after which a test counts as hanging. Passing cases take a few.
const PATIENCE: &str = "60";

/// Deadline of the cases that wait for its end; longer than a busy machine delays a process.
const DEADLINE: Duration = Duration::from_secs(3);
/// Deadline of the other cases.
const PATIENT: Duration = Duration::from_secs(30);

/// Outcome of a case.
struct Heard {
    /// Output of each rank, if any, in rank order.
    words: Vec<Option<String>>,
    /// Output of `mpirun` and the processes.
    printed: String,
    /// Whether `mpirun` succeeded.
    content: bool,
}

/// Runs a case on `n` processes. With `survivors` the other processes outlive a dead one.
fn mpirun(n: usize, case: &str, survivors: bool) -> Heard {
    mpirun_with(None, n, case, survivors)
}

/// [`mpirun`] with a library that is loaded before all others.
fn mpirun_with(library: Option<&Path>, n: usize, case: &str, survivors: bool) -> Heard {
    // One at a time: a machine has few cores, and deadlines are short.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", PATIENCE, "mpirun", "--allow-run-as-root", "--oversubscribe"]);
    command.args(survivors.then_some("--enable-recovery"));
    command.args(["-n", &n.to_string()]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "rank", "--ignored", "--nocapture"]);
    command.envs(library.map(|library| ("LD_PRELOAD", library)));
    let output = command.env(CASE, case).env(WORDS, folder.path()).output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    assert_ne!(
        output.status.code(),
        Some(124),
        "{case}, {n} processes: a process hangs\n{printed}"
    );
    let said = |rank: usize| std::fs::read_to_string(folder.path().join(rank.to_string())).ok();
    Heard { words: (0..n).map(said).collect(), printed, content: output.status.success() }
}

/// Writes an output for the test, once.
fn say(rank: usize, what: impl std::fmt::Display) {
    let file = Path::new(&std::env::var_os(WORDS).unwrap()).join(rank.to_string());
    std::fs::write(file, what.to_string()).unwrap();
}

/// The rank that `mpirun` starts.
#[test]
#[ignore = "the other tests start it, under mpirun"]
fn rank() {
    let Ok(case) = std::env::var(CASE) else { return };
    let (name, value) = case.split_once(':').unwrap_or((&case, ""));
    let deadline = match name {
        "kill" | "late" | "lost" => DEADLINE,
        "leave" => Duration::MAX,
        _ => PATIENT,
    };
    let comm = Communicator::mpi(&CommOptions { deadline }).unwrap();
    let (device, me) = (open(), comm.rank());
    let stream = device.stream("rank");
    match name {
        "same" => same(comm, &device, &stream),
        "odd" => odd_one(comm, &stream, value),
        "kill" => kill(comm, &stream),
        "late" => late(comm, &stream),
        "leave" => leave(comm, &stream),
        "panic" => panicked(comm, &stream),
        "misfit" => misfit(comm, &stream),
        "fails" => one_fails(comm, &stream, value),
        "watch" => watched(comm),
        "closes" => closed(comm),
        "counts" => by_address::counts(comm, &device, &stream),
        "pieces" => by_address::exchange_pieces(comm, &stream),
        "lost" => by_address::lose_a_rank(comm, &stream),
        "twice" => say(me, Communicator::mpi(&CommOptions { deadline }).unwrap_err()),
        _ => panic!("{case}"),
    }
}

fn bytes<T: Element>(tensor: &Tensor) -> Vec<u8> {
    bytemuck::cast_slice(&tensor.to_vec::<T>().unwrap()).to_vec()
}

/// Irregular numbers of many magnitudes, whose sum depends on the order.
fn uneven<T: SumElement>(len: usize, rank: usize, step: usize) -> Vec<T> {
    let scale = |i: usize| 10.0f64.powi((i % 9) as i32 - 4);
    let values = noise(len, rank, step).into_iter().enumerate();
    values.map(|(i, x)| T::from_f64(f64::from(x) * scale(i))).collect()
}

/// Dense sums of one type, in and out of place.
fn dense<T: SumElement>(comm: &mut Communicator, stream: &Stream, results: &mut Vec<Vec<u8>>) {
    for len in [0, 1, 3, comm.size(), 1000, 70_001] {
        for reduction in [Reduction::Sum, Reduction::Mean] {
            let x = upload(stream, &uneven::<T>(len, comm.rank(), 0));
            let y = upload(stream, &vec![T::from_f64(7.0); len]);
            let (input, output, order) = (&x, &y, SumOrder::Rank);
            comm.all_reduce_with(&Sum { input, output, reduction, order }).unwrap();
            comm.all_reduce(&x, reduction).unwrap();
            results.extend([bytes::<T>(&x), bytes::<T>(&y)]);
        }
    }
}

/// Makes every collective and returns this rank's results.
fn everything(mut comm: Communicator, stream: &Stream) -> Vec<Vec<u8>> {
    let (me, n, mut results) = (comm.rank(), comm.size(), Vec::new());
    dense::<f32>(&mut comm, stream, &mut results);
    dense::<f64>(&mut comm, stream, &mut results);
    dense::<bf16>(&mut comm, stream, &mut results);
    // More than one message.
    let large = upload(stream, &vec![me as f32 + 0.5; 5 << 20]);
    comm.broadcast(&large, n - 1).unwrap();
    results.push(bytes::<f32>(&large));
    let own = upload(stream, &[me as u32, 7, 9]);
    let all = Tensor::zeros(stream, [3 * n], DType::U32, Owner::Other).unwrap();
    comm.all_gather(&own, &all).unwrap();
    results.push(bytes::<u32>(&all));
    // Odd and even ranks, in reverse order; a group of a group; both groups side by side.
    let mut half = comm.split(me as u64 % 2, 100 - me as u64).unwrap();
    let mut alone = half.split(half.rank() as u64, 0).unwrap();
    for group in [&mut half, &mut alone, &mut comm] {
        let x = upload(stream, &uneven::<f32>(999, me, 4));
        group.all_reduce(&x, Reduction::Sum).unwrap();
        results.push(bytes::<f32>(&x));
        results.push(vec![group.rank() as u8, group.size() as u8]);
    }
    comm.barrier().unwrap();
    for sparse in [SparseMethod::TopK, SparseMethod::GTopK, SparseMethod::OkTopK { refresh: 2 }] {
        let x = upload(stream, &[0.0f32; 5003]);
        let mut sum = SparseSum::new(&x, sparse, FeedbackMode::Residual).unwrap();
        for step in 0..3 {
            x.copy_from_slice(&uneven::<f32>(5003, me, step)).unwrap();
            sum.run(&mut comm, &x, &x, 50, Reduction::Mean).unwrap();
            results.extend([bytes::<f32>(&x), bytes::<f32>(sum.residual().unwrap())]);
        }
        // In place, with gaps, in several pieces; on one rank in separate tensors.
        let arena = upload(stream, &uneven::<f32>(9000, me, 5));
        let gap = if me == 1 { 0 } else { 16 };
        let at = |start, len| arena.view(start, [len]).unwrap();
        let all = [at(0, 3000), at(3000 + gap, 9), at(4000, 2000), at(6000, 1500), at(8000, 30)];
        let options =
            ExchangeOptions { method: Method::Sparse(sparse), ..ExchangeOptions::default() };
        let named: Vec<_> = ["a", "b", "c", "d", "e"].into_iter().zip(&all).collect();
        let mut exchange = Exchange::new(&options, &named).unwrap();
        exchange.run(&mut comm, &all.iter().collect::<Vec<_>>()).unwrap();
        results.push(bytes::<f32>(&arena));
        let mut storage = TopKStorage::new(&x, n, 40).unwrap();
        let picked = topk_all_gather(&mut comm, &x, &mut storage, None, 40).unwrap();
        results.extend([bytes::<f32>(&picked.values), bytes::<u32>(&picked.indices)]);
    }
    let traffic = comm.traffic();
    results.push(traffic.sent_bytes.to_le_bytes().to_vec());
    results.push(traffic.received_bytes.to_le_bytes().to_vec());
    results
}

/// Compares this rank's results with the same calls over threads, bit for bit.
fn same(comm: Communicator, device: &Device, stream: &Stream) {
    let (me, n) = (comm.rank(), comm.size());
    assert_eq!(comm.transport_name(), "mpi");
    let got = everything(comm, stream);
    let group = Communicator::threads(n, &CommOptions::default()).unwrap();
    let expected = on(device, group, everything).swap_remove(me);
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert!(got == expected, "rank {me} of {n}: result {i} differs");
    }
    say(me, format_args!("{} results are the same bits, {n} ranks", got.len()));
}

#[test]
fn the_same_bits_as_threads() {
    for n in 1..=4 {
        let heard = mpirun(n, "same", false);
        all_say(&heard, None, &[&format!("same bits, {n} ranks")]);
        // MPI was finalized.
        assert!(heard.content, "{n} processes: {}", heard.printed);
    }
}

/// Asserts that all ranks except `dead` wrote one of these texts.
fn all_say(heard: &Heard, dead: Option<usize>, texts: &[&str]) {
    let Heard { words, printed, .. } = heard;
    for (rank, words) in words.iter().enumerate() {
        if Some(rank) == dead {
            assert_eq!(words, &None, "{printed}");
            continue;
        }
        let words =
            words.as_ref().unwrap_or_else(|| panic!("rank {rank} said nothing:\n{printed}"));
        assert!(texts.iter().all(|text| words.contains(text)), "rank {rank}: {words}\n{printed}");
    }
}

/// Asserts that rank 1 wrote `one`, and all other ranks `rest`.
fn one_says(heard: &Heard, one: &str, rest: &str) {
    for (rank, words) in heard.words.iter().enumerate() {
        let expected = if rank == 1 { one } else { rest };
        let words = words.as_deref().unwrap_or("nothing");
        assert!(words.contains(expected), "rank {rank}: {words}\n{}", heard.printed);
    }
}

/// Sums until an error.
fn sum_until_error(comm: &mut Communicator, stream: &Stream) -> Error {
    let x = upload(stream, &vec![1.0f32; 1 << 20]);
    loop {
        if let Err(error) = comm.all_reduce(&x, Reduction::Mean) {
            return error;
        }
    }
}

/// Rank 1 is killed in a series of sums.
fn kill(mut comm: Communicator, stream: &Stream) {
    if comm.rank() == 1 {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            Command::new("kill").args(["-9", &std::process::id().to_string()]).status().unwrap();
        });
    }
    let error = sum_until_error(&mut comm, stream);
    let again = comm.barrier().unwrap_err();
    say(comm.rank(), format_args!("{error}; {again}"));
}

#[test]
fn a_killed_process_is_named_within_the_deadline() {
    for n in 2..=4 {
        let late = "rank 1 did not arrive within 3 s";
        let (sum, barrier) = (format!("`all_reduce`: {late}"), format!("`barrier`: {late}"));
        all_say(&mpirun(n, "kill", true), Some(1), &[&sum, &barrier]);
    }
    // The default of mpirun: it ends the other processes and names the rank.
    let heard = mpirun(3, "kill", false);
    assert!(!heard.content && heard.printed.contains("rank 1"), "{}", heard.printed);
}

/// Rank 1 makes another call than the other ranks.
fn odd_one(mut comm: Communicator, stream: &Stream, what: &str) {
    let odd = comm.rank() == 1;
    let (len, reduction) = match what {
        "count" if odd => (7, Reduction::Sum),
        "reduction" if odd => (8, Reduction::Mean),
        _ => (8, Reduction::Sum),
    };
    let x = upload(stream, &vec![1.0f32; len]);
    comm.barrier().unwrap();
    let result = match what {
        "format" => {
            let channels_last = MemoryFormat::ChannelsLast;
            let format = if odd { channels_last } else { MemoryFormat::Contiguous };
            let (dtype, owner) = (DType::F32, Owner::Other);
            let dims = [1, 2, 2, 2];
            let x = Tensor::zeros_with_format(stream, dims, dtype, format, owner).unwrap();
            comm.all_reduce(&x, reduction)
        }
        "shape" if odd => comm.all_reduce(&x.view(0, [2, 4]).unwrap(), reduction),
        "dtype" if odd => comm.all_reduce(&upload(stream, &[1.0f64; 8]), reduction),
        "operation" if odd => comm.barrier(),
        _ => comm.all_reduce(&x, reduction),
    };
    say(comm.rank(), result.unwrap_err());
}

#[test]
fn a_differing_call_is_named_on_every_rank() {
    let cases = [
        ("count", "rank 1 has element count 7, the others 8"),
        ("dtype", "rank 1 has element type f64, the others f32"),
        ("operation", "rank 1 has operation `barrier`, the others `all_reduce`"),
        ("reduction", "rank 1 has parameter 1, the others 0"),
        ("shape", "rank 1 has shape [2, 4], the others [8]"),
        ("format", "rank 1 has memory format channels last, the others contiguous"),
    ];
    for (case, text) in cases {
        all_say(&mpirun(3, &format!("odd:{case}"), true), None, &["`all_reduce`", text]);
    }
}

/// Rank 1 arrives after the other ranks have given up.
fn late(mut comm: Communicator, stream: &Stream) {
    comm.barrier().unwrap();
    if comm.rank() == 1 {
        std::thread::sleep(DEADLINE + DEADLINE / 2);
    }
    let error = comm.all_reduce(&upload(stream, &[1.0f32; 8]), Reduction::Sum).unwrap_err();
    say(comm.rank(), error);
}

#[test]
fn a_late_rank_is_named_and_gets_the_error() {
    all_say(&mpirun(3, "late", true), None, &["rank 1 did not arrive within 3 s"]);
}

/// Rank 1 makes one call fewer than the other ranks. One of them may still be in the sum when
/// another, which is ahead, reports the end of the group.
fn leave(mut comm: Communicator, stream: &Stream) {
    let (me, x) = (comm.rank(), upload(stream, &[1.0f32; 8]));
    let sum = comm.all_reduce(&x, Reduction::Sum);
    if me == 1 {
        sum.unwrap();
        return say(me, "leaves");
    }
    say(me, sum.and_then(|()| comm.barrier()).unwrap_err());
}

fn panicked(mut comm: Communicator, stream: &Stream) {
    let me = comm.rank();
    let run = AssertUnwindSafe(move || {
        assert!(me != 1, "on purpose");
        comm.all_reduce(&upload(stream, &[1.0f32; 8]), Reduction::Sum)
    });
    let result = catch_unwind(run);
    say(me, result.map_or("panicked".to_owned(), |result| result.unwrap_err().to_string()));
}

#[test]
fn a_rank_that_leaves_or_panics_is_named_at_once() {
    let heard = mpirun(3, "leave", true);
    one_says(&heard, "leaves", "rank 1 is gone: it left the group");
    assert!(!heard.printed.contains("panicked"), "{}", heard.printed);
    one_says(&mpirun(3, "panic", true), "panicked", "rank 1 is gone: its thread panicked");
}

/// Rank 0 sends 4 elements, and rank 1 expects 5. Rank 2 sends and receives nothing.
fn misfit(comm: Communicator, stream: &Stream) {
    let me = comm.rank();
    let mut link = comm.into_transport();
    let call = CollectiveCall::new("test");
    let parcel = |peer| [Parcel::new(peer, &upload(stream, &vec![1.0f32; 4 + me])).unwrap()];
    let first = match me {
        0 => link.exchange(&call, stream, &parcel(1), &[]),
        1 => link.exchange(&call, stream, &[], &parcel(0)),
        _ => link.exchange(&call, stream, &[], &[]),
    };
    // A rank that had finished gets the error from its next call.
    let error = first.and_then(|()| link.barrier(&call)).unwrap_err();
    say(me, error);
}

#[test]
fn mismatched_messages_fail() {
    let heard = mpirun(3, "misfit", true);
    all_say(&heard, None, &["rank 0 has a message of 4 x f32, the others 5 x f32"]);
}

/// Rank 1 alone has an error: a kernel that panicked before the sum, or elements that cannot be
/// summed.
fn one_fails(mut comm: Communicator, stream: &Stream, what: &str) {
    let (me, x) = (comm.rank(), upload(stream, &[1.0f32; 8]));
    let result = match what {
        "argument" if me == 1 => comm.all_reduce(&upload(stream, &[1u32; 8]), Reduction::Sum),
        "device" if me == 1 => {
            stream.launch("bad").write(&x).run(|_| panic!("on purpose")).unwrap();
            comm.all_reduce(&x, Reduction::Sum)
        }
        _ => comm.all_reduce(&x, Reduction::Sum),
    };
    let again = comm.barrier().unwrap_err();
    say(me, format_args!("{}; {again}", result.unwrap_err()));
}

#[test]
fn an_error_of_one_rank_reaches_the_others() {
    for (what, words) in [("device", "on purpose"), ("argument", "got u32")] {
        let heard = mpirun(3, &format!("fails:{what}"), true);
        all_say(&heard, None, &[words, "; rank 1 failed: "]);
        for (rank, said) in heard.words.iter().flatten().enumerate() {
            assert_eq!(said.starts_with("rank 1 failed: "), rank != 1, "{said}");
        }
    }
}

/// All ranks except rank 0 wait in a call that rank 0 never makes. The watching thread of a waiting
/// rank reports that its device has failed.
fn watched(comm: Communicator) {
    let (me, mut link) = (comm.rank(), comm.into_transport());
    let mut watch = link.watch().unwrap();
    let heard = std::thread::spawn(move || {
        // The other ranks are in the call by then.
        std::thread::sleep(Duration::from_secs(1));
        let problem = (me == 1).then(|| ExchangeProblem::Failed("on purpose".to_owned()));
        loop {
            let heartbeat =
                Heartbeat { membership: 1, problem: problem.clone(), ..Heartbeat::default() };
            match watch.heartbeat(&heartbeat) {
                GroupStatus::Lost(error) => return error,
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    });
    let heard = if me == 0 { Ok(heard.join().unwrap()) } else { Err(heard) };
    let error = link.barrier(&CollectiveCall::new("barrier")).unwrap_err();
    let heard = heard.unwrap_or_else(|thread| thread.join().unwrap());
    say(me, format_args!("{error}; {heard}"));
}

#[test]
fn a_watching_thread_can_report_while_its_rank_waits() {
    let failed = "rank 1 failed: on purpose; the other ranks cannot continue";
    all_say(&mpirun(3, "watch", true), None, &[&format!("{failed}; {failed}")]);
}

/// Rank 0 leaves a group of devices while the other ranks wait for it in a call. Only their
/// watching threads report that their devices have ended the exchanges; rank 2's a while later.
fn closed(comm: Communicator) {
    let (me, mut link) = (comm.rank(), comm.into_transport());
    let mut watch = link.watch().unwrap();
    let mut heartbeat = move |ended, closing| {
        watch.heartbeat(&Heartbeat { membership: 1, ended, closing, ..Heartbeat::default() })
    };
    let (stop, stopped) = sync_channel::<()>(0);
    let pause = Duration::from_millis(20);
    let heard = if me == 0 {
        let mut sounds = 0;
        let end = loop {
            match heartbeat(3, true) {
                GroupStatus::Sound => sounds += 1,
                end => break end,
            }
            std::thread::sleep(pause);
        };
        assert!(sounds > 0, "rank 2 has not ended its exchanges yet");
        Err(matches!(end, GroupStatus::Ended))
    } else {
        Ok(std::thread::spawn(move || {
            let mut heartbeats = 0;
            while stopped.recv_timeout(pause) != Err(RecvTimeoutError::Disconnected) {
                heartbeats += 1;
                heartbeat(if me == 2 && heartbeats < 50 { 2 } else { 3 }, false);
            }
            true
        }))
    };
    let met = link.barrier(&CollectiveCall::new("barrier"));
    drop(stop);
    let heard = heard.map_or_else(|heard| heard, |thread| thread.join().unwrap());
    say(me, format_args!("{heard} {met:?}"));
}

#[test]
fn leaving_a_group_of_devices_needs_no_call_of_another_rank() {
    all_say(&mpirun(3, "closes", false), None, &["true Ok(())"]);
}

#[test]
fn mpi_starts_once_per_process() {
    let heard = mpirun(2, "twice", false);
    all_say(&heard, None, &["already runs in this process"]);
    assert!(heard.content, "{}", heard.printed);
}
