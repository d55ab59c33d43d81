//! Errors of a device. Every message names the operation, the argument, and the expected and actual
//! values (V1).

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use super::{Act, CudaError, DeviceId, IsaError, Owner, OwnerUse, Property, Race};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of devices, streams, memory and tensors. Unless its documentation says otherwise, an
/// operation that returns an error has enqueued nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text that is not the name of a device.
    #[error("`{name}` is not a device; use cpu, cpu:N, cuda or cuda:N with N from 0")]
    BadDeviceName {
        /// The text given.
        name: String,
    },
    /// The device's backend is not part of this build.
    #[error(
        "{device} is not part of this build, which has the CPU only; build with `--features cuda`, \
         or use cpu (cpu:N for several)"
    )]
    NotCompiled {
        /// Device asked for.
        device: DeviceId,
    },
    /// CUDA cannot be used for a device, or a call of CUDA failed.
    #[error("{device}: {source}")]
    Cuda {
        /// Device asked for.
        device: DeviceId,
        /// Cause.
        source: CudaError,
    },
    /// An operation without a kernel for the device's backend.
    #[error("`{operation}` has no kernel for {device} yet; run it on the cpu")]
    NoKernel {
        /// Operation.
        operation: &'static str,
        /// Device.
        device: DeviceId,
    },
    /// The device failed, and none of its streams runs any more.
    #[error(
        "{device} failed: {cause} (noticed at `{operation}`, launched at {site}); nothing runs on \
         it any more, so start the process again; MERISTEM_LAUNCH_BLOCKING=1 finds the operation \
         that fails"
    )]
    DeviceFailed {
        /// Device.
        device: DeviceId,
        /// The operation at which the failure was noticed: a device reports failures late.
        operation: &'static str,
        /// Its call site.
        site: &'static std::panic::Location<'static>,
        /// Cause.
        cause: Arc<CudaError>,
    },
    /// An environment variable has an invalid value.
    #[error(
        "environment variable {variable}: expected {expected}, got `{got}`; unset it or correct it"
    )]
    BadEnvironment {
        /// Name of the variable.
        variable: &'static str,
        /// Valid values.
        expected: &'static str,
        /// Its value.
        got: String,
    },
    /// The environment names an instruction set that this machine cannot use.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// An option that no device can satisfy.
    #[error("device option `{option}`: expected {expected}, got {got}")]
    BadOption {
        /// Option.
        option: &'static str,
        /// Valid values.
        expected: String,
        /// The value given.
        got: String,
    },
    /// The operating system did not create a worker thread.
    #[error("cannot start worker {worker} of {threads}: {source}; use fewer threads")]
    WorkerSpawn {
        /// Index of the worker, from 0.
        worker: usize,
        /// Workers asked for.
        threads: usize,
        /// Cause.
        source: std::io::Error,
    },
    /// A tensor, a description of one, or a call of a kernel that does not meet the operation's
    /// requirements (V1). [`crate::Expect`] makes it for tensors.
    #[error("`{operation}`: `{argument}` must be {expected}, got {got}")]
    Mismatch {
        /// Operation.
        operation: &'static str,
        /// Name of the argument.
        argument: String,
        /// The property that is wrong.
        property: Property,
        /// Required value.
        expected: String,
        /// Actual value.
        got: String,
    },
    /// An open hot scope forbids an act (V2).
    #[error(
        "hot scope `{scope}` (opened at {opened}) forbids {}: `{operation}` at {site}; move it \
         out of the scope",
        forbidden(*act, *permitted)
    )]
    HotScope {
        /// Name of the scope.
        scope: &'static str,
        /// The act.
        act: Act,
        /// The operation.
        operation: &'static str,
        /// Call site in the program.
        site: &'static std::panic::Location<'static>,
        /// Call site that opened the scope.
        opened: &'static std::panic::Location<'static>,
        /// Number of acts of this kind that the scope permits; all were used.
        permitted: u64,
    },
    /// A written argument shares bytes with another argument. Arguments of several launches are
    /// named with the number of their launch.
    #[error(
        "`{operation}`: `{argument}` is written and overlaps `{other}`; give the operation \
         separate memory"
    )]
    Overlap {
        /// Operation of the launch that writes.
        operation: &'static str,
        /// The written argument.
        argument: String,
        /// The argument that it overlaps.
        other: String,
    },
    /// A shape that is impossible, or does not fit.
    #[error("`{operation}`: `{argument}` must be {expected}, got {got}")]
    BadShape {
        /// Operation.
        operation: &'static str,
        /// Name of the argument.
        argument: &'static str,
        /// Valid shapes.
        expected: String,
        /// The shape given.
        got: String,
    },
    /// A number of elements that does not match.
    #[error("`{operation}`: `{argument}` must have {expected} elements, got {got}")]
    WrongLength {
        /// Operation.
        operation: &'static str,
        /// Name of the argument.
        argument: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// A window outside of the bounds of its memory.
    #[error("`{operation}`: elements {start}..{end} are outside {argument}, which has {len}")]
    OutOfBounds {
        /// Operation.
        operation: &'static str,
        /// Name of the argument.
        argument: &'static str,
        /// First element of the window.
        start: usize,
        /// One past its last element.
        end: usize,
        /// Number of elements available.
        len: usize,
    },
    /// The memory limit, or the machine's memory, is exhausted.
    #[error(
        "out of memory on {device}: `{operation}` asks for {requested} bytes for {owner}; \
         {current} bytes are in use \
         ({}), {reserved} reserved{}; use a smaller batch or fewer envs, or raise the limit",
        holders(owners),
        limit.map_or(String::new(), |l| format!(", the limit is {l}"))
    )]
    OutOfMemory {
        /// Operation.
        operation: &'static str,
        /// Device.
        device: DeviceId,
        /// Owner of the request.
        owner: Owner,
        /// Requested bytes, rounded up to the pool's block size.
        requested: usize,
        /// Requested bytes in use by tensors and by temporary memory of kernels.
        current: usize,
        /// The same bytes by owner, without owners of 0 bytes.
        owners: Vec<OwnerUse>,
        /// Bytes taken from the system, after all unused memory was returned.
        reserved: usize,
        /// The limit in bytes, if one was set; otherwise the system refused.
        limit: Option<usize>,
    },
    /// A kernel panicked: its stream, and every stream that waited for its result, is unusable.
    #[error(
        "kernel `{operation}` on stream `{stream}`, launched at {site}, panicked: {message}; the \
         work enqueued after it was dropped"
    )]
    KernelPanicked {
        /// The kernel's operation.
        operation: &'static str,
        /// The stream on which it ran.
        stream: Arc<str>,
        /// Call site of its launch.
        site: &'static std::panic::Location<'static>,
        /// The panic's message.
        message: Arc<str>,
    },
    /// A wait for the device inside of a kernel, which would wait for itself.
    #[error(
        "`{operation}` waits for the device and was called inside a kernel; call it from a \
         host thread"
    )]
    InsideKernel {
        /// Operation.
        operation: &'static str,
    },
    /// A trace that cannot be written.
    #[error("cannot write the trace {}: {source}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// Two accesses to the same memory without an order between them, found by the race sanitizer.
    #[error("{0}")]
    Race(Box<Race>),
    /// A host file that could not be opened or mapped.
    #[error("cannot map the file {}: {source}", path.display())]
    MapFile {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
}

/// Lists owners as `dataset 7840000, parameters 51200`.
fn holders(owners: &[OwnerUse]) -> String {
    let words: Vec<String> =
        owners.iter().map(|held| format!("{} {}", held.owner, held.current)).collect();
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

fn forbidden(act: Act, permitted: u64) -> String {
    match permitted {
        0 => format!("any {act}"),
        n => format!("more than {n} x {act}"),
    }
}

// Here and not in `id`, because `Error` refers to `DeviceId` and parsing returns an `Error`.
impl FromStr for DeviceId {
    type Err = Error;

    /// # Errors
    /// [`Error::BadDeviceName`] unless `name` is `cpu` or `cuda`, alone or with `:` and a plain
    /// number.
    fn from_str(name: &str) -> Result<Self> {
        DeviceId::from_name(name).ok_or_else(|| Error::BadDeviceName { name: name.to_owned() })
    }
}
