//! Sums over ranks, dense and sparse, compared with a sum on one thread.

use std::thread;
use std::time::{Duration, Instant};

use meristem::comm::{
    CommOptions, Communicator, FeedbackMode, PhaseMemory, Reduction, SparseMethod, SparseSum,
};
use meristem::device::random::{Purpose, Rng};
use meristem::device::{
    CudaError, Device, DeviceId, DeviceOptions, Error as DeviceError, Owner, PeerPlace, Peers,
    Stream, Tensor,
};

use super::{Fault, REPORT, Verdict, ensure};

const RANKS: [usize; 4] = [1, 2, 3, 4];
const LEN: usize = 10_007;
/// Number of elements that each rank sends.
const KEPT: usize = 101;

/// Checks that the dense sum equals the sum from left to right, bit for bit, on every rank.
pub(super) fn dense(id: DeviceId) -> Verdict {
    compare(id, |comm, x| Ok(comm.all_reduce(x, Reduction::Sum)?), |_| true)?;
    Ok(format!("{LEN} f32 over 1 to 4 threads: the bits of the sum from left to right"))
}

/// Checks that the sparse sum equals the sum of the sent elements, bit for bit.
pub(super) fn sparse(id: DeviceId) -> Verdict {
    let sum = |comm: &mut Communicator, x: &Tensor| -> Result<(), Fault> {
        let mut sum = SparseSum::new(x, SparseMethod::TopK, FeedbackMode::Nothing)?;
        Ok(sum.run(comm, x, x, KEPT, Reduction::Sum)?)
    };
    compare(id, sum, |place| place < KEPT)?;
    Ok(format!(
        "the {KEPT} largest of {LEN} over 1 to 4 threads: the bits of the sum in rank order"
    ))
}

/// Checks that a sparse sum reports its memory, and that a second sum allocates none.
pub(super) fn memory(id: DeviceId) -> Verdict {
    let device = Device::open(id, &DeviceOptions::default())?;
    let both = on_ranks(&device, 2, |mut comm, stream| {
        let x = Tensor::from_slice(stream, &values(comm.rank()), [LEN], Owner::Collectives)?;
        let mut sum = SparseSum::new(&x, SparseMethod::TopK, FeedbackMode::Residual)?;
        let mut run = || sum.run_measured(&mut comm, &x, &x, KEPT, Reduction::Sum);
        Ok([run()?, run()?])
    })?;
    let [first, second] = both[0];
    let PhaseMemory { before, allocation, selection, collective, peak } = first;
    ensure(allocation > before && [selection, collective, peak] == [allocation; 3], || {
        Fault::new(format!("a sum over 2 ranks allocates after its first phase: {first:?}"), REPORT)
    })?;
    let PhaseMemory { before: kept, peak: again, .. } = second;
    ensure(both[0] == both[1] && [kept, again] == [allocation; 2], || {
        Fault::new(
            format!("a second sum over 2 ranks allocates, or its ranks differ: {both:?}"),
            REPORT,
        )
    })?;
    Ok(format!(
        "{before} bytes before, {allocation} after allocation, {selection} after selection, \
         {collective} after the collective, peak {peak}; a second sum allocates nothing"
    ))
}

/// Checks that NCCL connects a group of this GPU alone, and that what the GPU sends to itself
/// arrives. A machine without NCCL passes, because only processes with one GPU each need it.
pub(super) fn nccl(id: DeviceId) -> Verdict {
    const PATIENCE: Duration = Duration::from_secs(60);
    let version = match Peers::library() {
        Err(DeviceError::Cuda { source: CudaError::NoNccl, .. }) => {
            return Ok("not installed; only --comm nccl needs it".into());
        }
        found => found?,
    };
    let device = Device::open(id, &DeviceOptions::default())?;
    let stream = device.stream("nccl");
    let place = PeerPlace { id: Peers::new_id(&stream)?, rank: 0, size: 1, patience: PATIENCE };
    let peers = Peers::begin(&stream, &place)?;
    peers.connect()?;
    let sent = values(0);
    let from = Tensor::from_slice(&stream, &sent, [LEN], Owner::Collectives)?;
    let to = Tensor::zeros(&stream, [LEN], from.dtype(), Owner::Collectives)?;
    stream.launch("check, nccl").read(&from).write(&to).exchange(&peers, vec![0, 0])?;
    let arrived = to.to_vec::<f32>()?;
    let end = Instant::now() + PATIENCE;
    peers.close(&mut || Instant::now() < end);
    let wrong = arrived.iter().zip(&sent).filter(|(a, b)| a != b).count();
    ensure(wrong == 0, || {
        Fault::new(
            format!("NCCL {version}: {wrong} of {LEN} elements that the GPU sent to itself differ"),
            "NCCL_DEBUG=INFO shows what NCCL did",
        )
    })?;
    Ok(format!("version {version}; {LEN} f32 that the GPU sent to itself arrived"))
}

/// Checks sums over two processes, dense and sparse, with the MPI library of this build.
#[cfg(feature = "mpi")]
pub(super) fn over_mpi() -> Verdict {
    const REMEDY: &str =
        "install `mpirun` of this MPI library (Debian: openmpi-bin), and make sure that it works";
    let program = std::env::current_exe().map_err(|error| Fault::new(error.to_string(), REPORT))?;
    let mut command = std::process::Command::new("mpirun");
    // This process may itself be a child of mpirun.
    for (name, _) in std::env::vars_os() {
        let of_process = ["OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMIX_", "PMI_"];
        let of_mpi = |name: &str| of_process.iter().any(|prefix| name.starts_with(prefix));
        if name.to_str().is_some_and(of_mpi) {
            command.env_remove(name);
        }
    }
    // Allow more processes than cores, and the user root.
    for name in ["MCA_rmaps_base_oversubscribe", "ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM"] {
        command.env(format!("OMPI_{name}"), "1");
    }
    // Time limit in seconds, after which mpirun ends the processes.
    command.env("MPIEXEC_TIMEOUT", "120");
    command.args(["-n", "2"]).arg(program).args(["bench", "comm", "--comm", "mpi", "--json"]);
    command.args(["--min-size", "64KiB", "--max-size", "64KiB", "--density", "0.01"]);
    command.args(["--rounds", "2"]).stdin(std::process::Stdio::null());
    let ended = command.output();
    let ended = ended.map_err(|error| Fault::new(format!("mpirun: {error}"), REMEDY))?;
    let rows = String::from_utf8_lossy(&ended.stdout).matches("\"wrong\":0").count();
    ensure(ended.status.success() && rows == 5, || {
        let stderr = String::from_utf8_lossy(&ended.stderr);
        let error = stderr.lines().find(|line| !line.trim().is_empty()).unwrap_or("nothing");
        Fault::new(
            format!("{rows} of 5 collectives over 2 processes: {}; {error}", ended.status),
            REMEDY,
        )
    })?;
    Ok("dense, topk, gtopk, ok-topk and gather over 2 processes: all elements correct".into())
}

/// Runs `sum` on every number of ranks. Compares the result with the sum, from left to right, of
/// the sent elements. `is_sent` selects them by their place in the order of decreasing magnitude.
fn compare(
    id: DeviceId,
    sum: impl Fn(&mut Communicator, &Tensor) -> Result<(), Fault> + Sync,
    is_sent: impl Fn(usize) -> bool,
) -> Result<(), Fault> {
    let device = Device::open(id, &DeviceOptions::default())?;
    for ranks in RANKS {
        let inputs: Vec<Vec<f32>> = (0..ranks).map(values).collect();
        let sent: Vec<Vec<f32>> = inputs.iter().map(|x| largest(x, &is_sent)).collect();
        let from_left = |i: usize| sent[1..].iter().fold(sent[0][i], |sum, x| sum + x[i]);
        let expected: Vec<f32> = (0..LEN).map(from_left).collect();
        let results = on_ranks(&device, ranks, |mut comm, stream| {
            let input = &inputs[comm.rank()];
            let x = Tensor::from_slice(stream, input, [LEN], Owner::Collectives)?;
            sum(&mut comm, &x)?;
            Ok(x.to_vec::<f32>()?)
        })?;
        for (rank, got) in results.into_iter().enumerate() {
            let wrong = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
            ensure(wrong == 0, || {
                Fault::new(
                    format!("rank {rank} of {ranks}: {wrong} of {LEN} elements are wrong"),
                    REPORT,
                )
            })?;
        }
    }
    Ok(())
}

/// Runs every rank of a group in a thread. Returns the results by rank.
fn on_ranks<T: Send>(
    device: &Device,
    ranks: usize,
    run: impl Fn(Communicator, &Stream) -> Result<T, Fault> + Sync,
) -> Result<Vec<T>, Fault> {
    let (group, run) = (Communicator::threads(ranks, &CommOptions::default())?, &run);
    thread::scope(|scope| {
        let members = group.into_iter().map(|comm| {
            let stream = device.stream(&format!("rank {}", comm.rank()));
            scope.spawn(move || run(comm, &stream))
        });
        let members: Vec<_> = members.collect();
        let panicked = || Err(Fault::new("a rank panicked", REPORT));
        members.into_iter().map(|rank| rank.join().unwrap_or_else(|_| panicked())).collect()
    })
}

/// Values of many magnitudes, so that their sum depends on the order of addition.
fn values(rank: usize) -> Vec<f32> {
    let mut random = Rng::new(7, Purpose::Test, rank as u64, 0);
    (0..LEN).map(|_| (random.uniform() - 0.5) * 10.0f32.powi(random.below(9) as i32 - 4)).collect()
}

/// Copies the sent elements of `x`, and sets the others to zero. Ties go to the lower index.
fn largest(x: &[f32], is_sent: &impl Fn(usize) -> bool) -> Vec<f32> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[b].abs().total_cmp(&x[a].abs()).then(a.cmp(&b)));
    let mut sent = vec![0.0; x.len()];
    for (place, &i) in order.iter().enumerate() {
        if is_sent(place) {
            sent[i] = x[i];
        }
    }
    sent
}
