//! Elements of a GPU by address, with an MPI library that says that it takes them. Only on the
//! stand-in for the CUDA driver, whose device memory every library of the process can access.

use std::path::{Path, PathBuf};
use std::process::Command;

use meristem_comm::{CollectiveCall, Communicator, Parcel, Reduction, Spans};
use meristem_device::{Counts, DType, Device, Owner, Stream, Tensor};

use super::common::upload;
use super::{all_say, mpirun_with, say};

/// Functions of the MPI library with checks in front. Messages with elements have every third tag;
/// the context of the device must be current on the thread that passes their addresses.
const AWARE: &str = r#"
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int MPIX_Query_cuda_support(void) { return 1; }

static void check(int tag) {
    if (tag % 3 != 1) return;
    void *driver = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD), *context = NULL;
    int (*current)(void **) = driver ? (int (*)(void **))dlsym(driver, "cuCtxGetCurrent") : NULL;
    if (current && current(&context) == 0 && context) return;
    fprintf(stderr, "no context is current\n");
    abort();
}

int MPI_Isend(const void *from, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request) {
    check(tag);
    return PMPI_Isend(from, n, type, to, tag, comm, request);
}

int MPI_Irecv(void *to, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request *request) {
    check(tag);
    return PMPI_Irecv(to, n, type, from, tag, comm, request);
}
"#;

/// The compiled functions, to be loaded before the MPI library.
struct AwareLibrary {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl AwareLibrary {
    /// `None` where the tests do not run on the stand-in: an ordinary MPI library cannot access
    /// the memory of a GPU.
    fn on_standin() -> Option<AwareLibrary> {
        let device = std::env::var("MERISTEM_TEST_DEVICE").unwrap_or_default();
        if !device.starts_with("cuda") || Path::new("/dev/nvidiactl").exists() {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let [source, path] = ["aware.c", "aware.so"].map(|file| folder.path().join(file));
        std::fs::write(&source, AWARE).unwrap();
        let mut compile = Command::new("mpicc");
        compile.args(["-shared", "-fPIC", "-o"]).args([&path, &source]).arg("-ldl");
        assert!(compile.status().unwrap().success());
        Some(AwareLibrary { _folder: folder, path })
    }

    /// Runs a case, whose ranks must all write `text`.
    fn all_say(&self, n: usize, case: &str, text: &str) {
        let heard = mpirun_with(Some(&self.path), n, case, false);
        all_say(&heard, None, &[text]);
        // MPI was finalized.
        assert!(heard.content, "{case}, {n} processes: {}", heard.printed);
    }
}

/// Messages of several chunks, groups of groups and sparse sums.
#[test]
fn the_same_bits_by_address() {
    let Some(aware) = AwareLibrary::on_standin() else { return };
    for n in [2, 3] {
        aware.all_say(n, "same", &format!("same bits, {n} ranks"));
    }
}

/// Copies between host and device, and waits, in a call.
fn spent(device: &Device, call: impl FnOnce()) -> [u64; 3] {
    let before = device.counts();
    call();
    let Counts { copies_to_host, copies_to_device, synchronizations, .. } =
        device.counts() - before;
    [copies_to_host, copies_to_device, synchronizations]
}

/// Counts of each call, after a first one that loads its kernels.
pub(super) fn counts(mut comm: Communicator, device: &Device, stream: &Stream) {
    let (me, n, len) = (comm.rank(), comm.size(), 1000);
    let x = upload(stream, &vec![me as f32; len]);
    let all = Tensor::zeros(stream, [n * len], DType::F32, Owner::Other).unwrap();
    // More than a message of 16 MiB.
    let large = upload(stream, &vec![me as f32; 5 << 20]);
    for _ in 0..2 {
        let sum = spent(device, || comm.all_reduce(&x, Reduction::Mean).unwrap());
        let gather = spent(device, || comm.all_gather(&x, &all).unwrap());
        let broadcast = spent(device, || comm.broadcast(&large, n - 1).unwrap());
        let barrier = spent(device, || comm.barrier().unwrap());
        say(me, format_args!("{sum:?} {gather:?} {broadcast:?} {barrier:?}"));
    }
    assert_eq!(large.to_vec::<f32>().unwrap(), vec![n as f32 - 1.0; 5 << 20]);
}

/// A sum is two exchanges, a gather and a broadcast are one each.
#[test]
fn the_same_waits_by_address_and_no_copies() {
    let Some(aware) = AwareLibrary::on_standin() else { return };
    aware.all_say(3, "counts", "[0, 0, 2] [0, 0, 1] [0, 0, 1] [0, 0, 0]");
}

/// An element between the pieces of a parcel.
const GAP: u32 = u32::MAX;

/// The numbers from `first` on, in pieces of these lengths with gaps between them.
fn with_gaps(first: u32, cut: &[usize]) -> Vec<u32> {
    let mut next = first;
    let pieces = cut.iter().map(|len| {
        let piece = (next..).take(*len).chain([GAP]);
        next += *len as u32;
        piece
    });
    pieces.flatten().collect()
}

/// The pieces of memory as in [`with_gaps`].
fn pieces(memory: &Tensor, cut: &[usize]) -> Spans {
    let mut start = 0;
    let pieces = cut.iter().map(|len| {
        let piece = memory.view(start, [*len]).unwrap();
        start += len + 1;
        piece
    });
    let pieces: Vec<Tensor> = pieces.collect();
    Spans::new("test", &pieces.iter().collect::<Vec<_>>()).unwrap()
}

/// Two ranks exchange parcels of several chunks, which each cuts in another way. Between the
/// exchanges nothing but these waits for the device.
pub(super) fn exchange_pieces(comm: Communicator, stream: &Stream) {
    const STEPS: u32 = 4;
    let me = comm.rank();
    let mut link = comm.into_transport();
    let call = CollectiveCall::new("test");
    let cuts: [[usize; 4]; 2] = [[3, 5, 1, 5 << 20], [1, 4 << 20, 8, 1 << 20]];
    let (cut, own, other) = (&cuts[me], me as u32, 1 - me as u32);
    let empty = |len| Tensor::empty(stream, [len], DType::U32, Owner::Other).unwrap();
    let len = cut.iter().sum::<usize>() + cut.len();
    let (sent, received) = (upload(stream, &vec![GAP; len]), upload(stream, &vec![GAP; len]));
    let (one_sent, one_received) = (empty(7), empty(7));
    let first = |rank: u32, step: u32| 1_000_000_000 * rank + 10_000_000 * step;
    let mut kept = Vec::new();
    for step in 0..STEPS {
        sent.copy_from_slice(&with_gaps(first(own, step), cut)).unwrap();
        let numbers: Vec<u32> = (first(own, step)..).take(7).collect();
        one_sent.copy_from_slice(&numbers).unwrap();
        let peer = 1 - me;
        let parcels = |cut_up: &Tensor, one: &Tensor| {
            let elements = pieces(cut_up, cut);
            [Parcel { peer, elements }, Parcel::new(peer, one).unwrap()]
        };
        let (sends, receives) = (parcels(&sent, &one_sent), parcels(&received, &one_received));
        link.exchange(&call, stream, &sends, &receives).unwrap();
        let (all, one) = (empty(len), empty(7));
        stream.copy("keep", &[(&received, &all), (&one_received, &one)]).unwrap();
        kept.push((all, one));
    }
    for (step, (all, one)) in (0..).zip(&kept) {
        let got = all.to_vec::<u32>().unwrap();
        assert!(got == with_gaps(first(other, step), cut), "rank {me}, step {step}");
        let expected: Vec<u32> = (first(other, step)..).take(7).collect();
        assert_eq!(one.to_vec::<u32>().unwrap(), expected, "rank {me}, step {step}");
    }
    say(me, "all pieces");
}

#[test]
fn the_same_elements_in_other_pieces() {
    let Some(aware) = AwareLibrary::on_standin() else { return };
    aware.all_say(2, "pieces", "all pieces");
}

/// Rank 1 is killed in a series of gathers. Memory that MPI may still access is not reused.
pub(super) fn lose_a_rank(mut comm: Communicator, stream: &Stream) {
    let (me, n, len) = (comm.rank(), comm.size(), 1 << 20);
    let zeros = || Tensor::zeros(stream, [n * len], DType::F32, Owner::Other).unwrap();
    let all = zeros();
    let own = all.view(me * len, [len]).unwrap();
    for _ in 0..3 {
        comm.all_gather(&own, &all).unwrap();
    }
    if me == 1 {
        Command::new("kill").args(["-9", &std::process::id().to_string()]).status().unwrap();
    }
    let error = comm.all_gather(&own, &all).unwrap_err();
    let address = all.address();
    drop((own, all));
    let others: Vec<Tensor> = (0..4).map(|_| zeros()).collect();
    assert!(others.iter().all(|other| other.address() != address), "memory in flight is reused");
    say(me, format_args!("{error}; {}", comm.barrier().unwrap_err()));
}

#[test]
fn the_end_of_a_process_leaves_memory_in_flight() {
    let Some(aware) = AwareLibrary::on_standin() else { return };
    let late = "rank 1 did not arrive within 3 s";
    let (gather, barrier) = (format!("`all_gather`: {late}"), format!("`barrier`: {late}"));
    all_say(&mpirun_with(Some(&aware.path), 3, "lost", true), Some(1), &[&gather, &barrier]);
}
