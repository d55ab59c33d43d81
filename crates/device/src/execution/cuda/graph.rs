//! Graphs: the programs of several independent launches, started by one call of the driver.
//!
//! The launches of one program form a branch, and are its members: each kernel of the program runs
//! once for all members (`blockIdx.y`). Branches of different programs run side by side.
//!
//! Addresses are data. A kernel reads the addresses of its member from a table in device memory, so
//! one graph serves every launch of the same programs, and the table is copied only when addresses
//! change. Inputs usually come from a ring of two batches, so a graph has two instances, each with
//! its table: the addresses of a table then rarely change. Graphs are built node by node and not
//! captured, because a capture would record addresses.

use std::ptr;

use cudarc::driver::sys as cu;

use super::block::block;
use super::context::CudaContext;
use super::driver::{Called, RawStream, check, driver};
use super::program::{BoundProgram, KernelSpan, Parameters};
use super::staging::StagingBuffer;
use crate::execution::args::LaunchRecord;
use crate::execution::block::DeviceMemory;
use crate::execution::call::{Call, Piece, Program};
use crate::ground::sync::{Arc, Mutex, lock};

/// Instances of a graph that take turns.
const INSTANCES: usize = 2;

/// Largest number of members of a branch: CUDA's limit on blocks along the second axis of a grid.
pub(super) const MEMBERS_MAX: usize = 65_535;

/// Launches of one program, in one graph.
#[derive(Clone)]
pub(super) struct Branch {
    pub(super) program: Program,
    pub(super) bound: Arc<BoundProgram>,
    pub(super) members: usize,
    /// Arguments of each launch.
    pub(super) args: usize,
}

impl Branch {
    /// Whether launches of both branches can be members of one branch.
    pub(super) fn is_alike(&self, other: &Branch) -> bool {
        Arc::ptr_eq(&self.program.0, &other.program.0) && self.args == other.args
    }

    /// Number of its addresses in a table.
    fn addresses(&self) -> usize {
        self.members * self.args
    }
}

/// A graph of branches, ready to be launched.
pub(crate) struct CudaGraph {
    branches: Vec<Branch>,
    instances: Mutex<GraphInstances>,
}

struct GraphInstances {
    all: [GraphInstance; INSTANCES],
    /// Index of the instance that was launched last.
    last: usize,
}

/// An executable graph with its table.
struct GraphInstance {
    exec: ExecutableGraph,
    table: Box<dyn DeviceMemory>,
    /// Contents of the table after all enqueued work: by branch, then by argument, then by member.
    addresses: Vec<u64>,
}

impl CudaGraph {
    /// Builds the graph, and allocates all memory that its launches need, page-locked memory for
    /// the copies of its tables too. The context is current. Waits for the driver, but not for the
    /// device.
    pub(super) fn build(
        (context, stream): (&Arc<CudaContext>, &RawStream),
        branches: Vec<Branch>,
    ) -> Called<CudaGraph> {
        let bytes = size_of::<u64>() * branches.iter().map(Branch::addresses).sum::<usize>();
        context.reserve_pinned(bytes, INSTANCES);
        let instance = |_| {
            let table = block(context, bytes)?;
            let exec = CudaGraphBuilder::new()?.build(&branches, table.address())?;
            exec.upload(stream)?;
            Ok(GraphInstance { exec, table, addresses: vec![] })
        };
        let [a, b] = [0, 1].map(instance);
        let instances = Mutex::new(GraphInstances { all: [a?, b?], last: 0 });
        Ok(CudaGraph { branches, instances })
    }

    /// Whether the graph can run these branches.
    pub(super) fn runs(&self, branches: &[Branch]) -> bool {
        let mut pairs = self.branches.iter().zip(branches);
        let same = |(a, b): (&Branch, &Branch)| a.is_alike(b) && a.members == b.members;
        self.branches.len() == branches.len() && pairs.all(same)
    }

    /// Whether a table has the addresses of the arguments of a record, so that the next launch over
    /// them copies nothing.
    pub(super) fn has_addresses(&self, record: &LaunchRecord) -> bool {
        lock(&self.instances).with_addresses(record).is_some()
    }

    /// Launches the graph over the arguments of a record, which are in the order of the tables. The
    /// context is current. `staging` gets the buffer that a copy of the table reads, to be kept
    /// until the work is done.
    pub(super) fn launch(
        &self,
        (context, stream): (&Arc<CudaContext>, &RawStream),
        record: &LaunchRecord,
        staging: &mut Option<StagingBuffer>,
    ) -> Called {
        let instances = &mut *lock(&self.instances);
        let known = instances.with_addresses(record);
        let at = known.unwrap_or((instances.last + 1) % INSTANCES);
        instances.last = at;
        let instance = &mut instances.all[at];
        if known.is_none() {
            let addresses: Vec<u64> = record.args.iter().map(|arg| arg.address()).collect();
            // Should the copy fail, the contents of the table are unknown.
            instance.addresses.clear();
            instance.write(
                &addresses,
                stream,
                staging.insert(StagingBuffer::new(context, 8 * addresses.len())),
            )?;
            instance.addresses = addresses;
        }
        instance.exec.launch(stream)
    }
}

impl GraphInstances {
    /// Index of the instance whose table has the addresses of the arguments of a record.
    fn with_addresses(&self, record: &LaunchRecord) -> Option<usize> {
        let addresses = || record.args.iter().map(|arg| arg.address());
        self.all.iter().position(|instance| addresses().eq(instance.addresses.iter().copied()))
    }
}

impl GraphInstance {
    /// Writes the table, in stream order after earlier launches that read it.
    fn write(&self, addresses: &[u64], stream: &RawStream, staging: &mut StagingBuffer) -> Called {
        let bytes: &[u8] = bytemuck::cast_slice(addresses);
        // SAFETY: no copy that uses the buffer is enqueued yet.
        let free = unsafe { staging.bytes() };
        free[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: the table has room for all addresses; the staging memory is kept until the copy
        // is done.
        check("cuMemcpyHtoDAsync", unsafe {
            let (to, from) = (self.table.address(), staging.address());
            (driver().cuMemcpyHtoDAsync_v2)(to, from, bytes.len(), stream.raw())
        })
    }
}

/// An executable graph of the driver.
struct ExecutableGraph(cu::CUgraphExec);

// SAFETY: a handle, which is used under the lock of its graph.
unsafe impl Send for ExecutableGraph {}

impl ExecutableGraph {
    /// Allocates the device memory that the first launch would allocate otherwise.
    fn upload(&self, stream: &RawStream) -> Called {
        // SAFETY: both live.
        check("cuGraphUpload", unsafe { (driver().cuGraphUpload)(self.0, stream.raw()) })
    }

    fn launch(&self, stream: &RawStream) -> Called {
        // SAFETY: both live. Kernels read addresses from the table, which was written before. They
        // are addresses of a record's arguments, whose memory is alive and ordered until the graph
        // has ended.
        check("cuGraphLaunch", unsafe { (driver().cuGraphLaunch)(self.0, stream.raw()) })
    }
}

impl Drop for ExecutableGraph {
    fn drop(&mut self) {
        // SAFETY: made once by `CudaGraphBuilder::build`. A stream keeps a graph until its launches
        // are done. A failure cannot be reported.
        let _ = unsafe { (driver().cuGraphExecDestroy)(self.0) };
    }
}

/// A graph of the driver while it is built.
struct CudaGraphBuilder(cu::CUgraph);

impl CudaGraphBuilder {
    fn new() -> Called<CudaGraphBuilder> {
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle; 0 is the only valid flag.
        check("cuGraphCreate", unsafe { (driver().cuGraphCreate)(&mut raw, 0) })?;
        Ok(CudaGraphBuilder(raw))
    }

    /// The executable graph of the branches, with the table at this address.
    fn build(self, branches: &[Branch], table: u64) -> Called<ExecutableGraph> {
        let mut row = table;
        for branch in branches {
            let mut last = None;
            for (call, function) in branch.bound.calls(&branch.program) {
                last = Some(self.add(branch, (call, function), row, last)?);
            }
            row += (branch.addresses() * size_of::<u64>()) as u64;
        }
        let mut raw = ptr::null_mut();
        // SAFETY: writes one handle; the graph lives.
        check("cuGraphInstantiate", unsafe {
            (driver().cuGraphInstantiateWithFlags)(&mut raw, self.0, 0)
        })?;
        Ok(ExecutableGraph(raw))
    }

    /// Adds a call of a branch, whose addresses begin at `rows`, as a node that depends on `after`.
    fn add(
        &self,
        branch: &Branch,
        (call, function): (&Call, cu::CUfunction),
        rows: u64,
        after: Option<cu::CUgraphNode>,
    ) -> Called<cu::CUgraphNode> {
        let row = |argument: usize| rows + (argument * branch.members * size_of::<u64>()) as u64;
        let span = |&Piece { argument, start, len }: &Piece| match len {
            0 => KernelSpan { data: 0, len: 0, row: 0 },
            _ => KernelSpan { data: start as u64, len: len as i64, row: row(argument) },
        };
        let mut parameters = Parameters::new(call, call.pieces.iter().flatten().map(span));
        let mut pointers = parameters.pointers();
        let of = cu::CUDA_KERNEL_NODE_PARAMS {
            func: function,
            gridDimX: call.blocks,
            gridDimY: branch.members as u32,
            gridDimZ: 1,
            blockDimX: call.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: call.shared,
            kernelParams: pointers.as_mut_ptr(),
            extra: ptr::null_mut(),
            kern: ptr::null_mut(),
            ctx: ptr::null_mut(),
        };
        let (mut node, after) = (ptr::null_mut(), after.as_slice());
        // SAFETY: writes one handle; the graph, the nodes before it and the function live. For the
        // parameters see `Parameters`.
        check("cuGraphAddKernelNode", unsafe {
            (driver().cuGraphAddKernelNode_v2)(&mut node, self.0, after.as_ptr(), after.len(), &of)
        })?;
        Ok(node)
    }
}

impl Drop for CudaGraphBuilder {
    fn drop(&mut self) {
        // SAFETY: made once by `new`; executable graphs do not need it. A failure cannot be
        // reported.
        let _ = unsafe { (driver().cuGraphDestroy)(self.0) };
    }
}
