//! What can go wrong on a device. Every message names the operation, the argument, what was expected
//! and what came (V1).

use crate::id::DeviceId;
use std::path::PathBuf;
use std::sync::Arc;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of devices, streams, memory and tensors. Where an operation returns one, nothing of that
/// operation was enqueued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not the name of a device.
    #[error("`{name}` is no device; use cpu, cpu:N, cuda or cuda:N with N from 0")]
    BadDeviceName {
        /// What was given.
        name: String,
    },
    /// The device's backend is not part of this build.
    #[error(
        "{device} is not part of this build, which has the CPU only; use cpu, or cpu:N for several"
    )]
    NotCompiled {
        /// Device asked for.
        device: DeviceId,
    },
    /// An environment variable has a value that means nothing.
    #[error(
        "environment variable {variable}: expected {expected}, got `{got}`; unset it or correct it"
    )]
    BadEnvironment {
        /// Its name.
        variable: &'static str,
        /// Values that mean something.
        expected: &'static str,
        /// Its value.
        got: String,
    },
    /// The environment names an instruction set that this machine cannot use.
    #[error(transparent)]
    Isa(#[from] crate::IsaError),
    /// An option that no device can satisfy.
    #[error("device option `{option}`: expected {expected}, got {got}")]
    BadOption {
        /// Option.
        option: &'static str,
        /// What is possible.
        expected: String,
        /// What came.
        got: String,
    },
    /// The operating system gave no thread for the pool.
    #[error("cannot start worker {worker} of {threads}: {source}; use fewer threads")]
    WorkerSpawn {
        /// Which worker, from 0.
        worker: usize,
        /// Workers asked for.
        threads: usize,
        /// Cause.
        source: std::io::Error,
    },
    /// A tensor, or what stands for one, is not what the operation takes (V1). Made by
    /// [`crate::Expect`].
    #[error("`{operation}`: `{argument}` must be {expected}, got {got}")]
    Mismatch {
        /// Operation.
        operation: &'static str,
        /// Argument.
        argument: String,
        /// Which property is wrong.
        property: crate::Property,
        /// What it must be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// An open hot scope forbids what was about to happen (V2).
    #[error(
        "hot scope `{scope}` (opened at {opened}) forbids {}: `{operation}` at {site}; move it out of the scope",
        forbidden(*act, *permitted)
    )]
    HotScope {
        /// Name of the scope.
        scope: &'static str,
        /// What was asked for.
        act: crate::Act,
        /// By which operation.
        operation: &'static str,
        /// Where in the program.
        site: &'static std::panic::Location<'static>,
        /// Where the scope was opened.
        opened: &'static std::panic::Location<'static>,
        /// How many of the kind the scope permits; that many have happened.
        permitted: u64,
    },
    /// A written argument shares bytes with another argument.
    #[error(
        "`{operation}`: `{argument}` is written and overlaps `{other}`; give the operation memory of its own"
    )]
    Overlap {
        /// Operation.
        operation: &'static str,
        /// The written argument.
        argument: String,
        /// The one that it overlaps.
        other: String,
    },
    /// A shape that cannot be, or does not fit.
    #[error("`{operation}`: `{argument}` must be {expected}, got {got}")]
    BadShape {
        /// Operation.
        operation: &'static str,
        /// Argument.
        argument: &'static str,
        /// What is possible.
        expected: String,
        /// What came.
        got: String,
    },
    /// A number of elements that does not match.
    #[error("`{operation}`: `{argument}` must have {expected} elements, got {got}")]
    WrongLength {
        /// Operation.
        operation: &'static str,
        /// Argument.
        argument: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// A window that leaves what it looks into.
    #[error("`{operation}`: elements {start}..{end} are outside of {argument} with {len}")]
    OutOfBounds {
        /// Operation.
        operation: &'static str,
        /// Argument.
        argument: &'static str,
        /// First element of the window.
        start: usize,
        /// One past its last element.
        end: usize,
        /// Elements that there are.
        len: usize,
    },
    /// The memory limit, or the machine's memory, is exhausted.
    #[error(
        "out of memory on {device}: `{operation}` asks for {requested} bytes for {owner}; {current} bytes are in use \
         ({}), {reserved} reserved{}; use a smaller batch or fewer envs, or raise the limit",
        holders(owners),
        limit.map_or(String::new(), |l| format!(", the limit is {l}"))
    )]
    OutOfMemory {
        /// Operation.
        operation: &'static str,
        /// Device.
        device: DeviceId,
        /// Who asked.
        owner: crate::Owner,
        /// Bytes asked for, rounded up to what the pool hands out.
        requested: usize,
        /// Bytes in use by tensors.
        current: usize,
        /// The same bytes by owner: every owner that has some.
        owners: Vec<crate::OwnerUse>,
        /// Bytes taken from the system, after everything unused was given back.
        reserved: usize,
        /// The limit in bytes, if one was set; without one the system refused.
        limit: Option<usize>,
    },
    /// A kernel panicked: its stream, and every stream that waited for its result, is unusable.
    #[error(
        "kernel `{operation}` on stream `{stream}`, launched at {site}, panicked: {message}; what was enqueued after it was dropped"
    )]
    KernelPanicked {
        /// The kernel's operation.
        operation: &'static str,
        /// The stream on which it ran.
        stream: Arc<str>,
        /// Where it was launched.
        site: &'static std::panic::Location<'static>,
        /// The panic's message.
        message: Arc<str>,
    },
    /// A wait for the device from inside of a kernel: it would wait for itself.
    #[error(
        "`{operation}` waits for the device and was called inside of a kernel; call it from a host thread"
    )]
    InsideKernel {
        /// Operation.
        operation: &'static str,
    },
    /// A trace cannot be written.
    #[error("cannot write the trace {}: {source}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// Two accesses to the same memory that nothing orders, found by the race sanitizer.
    #[error("{0}")]
    Race(Box<crate::Race>),
    /// A host file could not be opened or mapped.
    #[error("cannot map {}: {source}", path.display())]
    MapFile {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
}

/// As `dataset 7840000, parameters 51200`.
fn holders(owners: &[crate::OwnerUse]) -> String {
    let words: Vec<String> =
        owners.iter().map(|held| format!("{} {}", held.owner, held.current)).collect();
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

fn forbidden(act: crate::Act, permitted: u64) -> String {
    match permitted {
        0 => format!("any {act}"),
        n => format!("more than {n} x {act}"),
    }
}
