//! Graphs that are built, node by node.

use std::ffi::{c_uint, c_ulonglong};
use std::slice;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUgraph,
    CUgraphEdgeData, CUgraphExec, CUgraphNode, CUmemorytype, CUresult, CUstream,
};

use super::call::{DriverAnswer, INVALID, driver, in_context, read, write};
use super::copy::{check, source};
use super::module::KernelLaunch;
use super::stream::stream;
use crate::ground::HandleTable;
use crate::memory::AddressSpace;
use crate::order::{
    BuiltExec, BuiltGraph, CopySource, CopyTarget, CopyWork, DeviceWork, FillWork, GraphNode,
    GraphPlan, SimMachine,
};

/// The indices of the nodes that a call names.
///
/// # Safety
/// `nodes` points to `count` nodes.
unsafe fn places(
    graph: &BuiltGraph,
    nodes: *const CUgraphNode,
    count: usize,
) -> DriverAnswer<Vec<usize>> {
    if nodes.is_null() || count == 0 {
        return if count == 0 { Ok(vec![]) } else { Err(INVALID) };
    }
    // SAFETY: the caller's contract.
    let nodes = unsafe { slice::from_raw_parts(nodes, count) };
    let place = |node: &CUgraphNode| {
        graph.nodes.iter().position(|known| known.handle == *node as u64).ok_or(INVALID)
    };
    nodes.iter().map(place).collect()
}

/// Arguments of every function that adds a node.
struct Addition {
    node: *mut CUgraphNode,
    graph: CUgraph,
    before: *const CUgraphNode,
    count: usize,
}

impl Addition {
    /// Adds a node with this work.
    ///
    /// # Safety
    /// The pointers are arguments of a call of the driver.
    unsafe fn add(&self, machine: &mut SimMachine, work: DeviceWork) -> DriverAnswer {
        check(machine, &work)?;
        let graph = machine.graphs.get_mut(self.graph as u64)?;
        // SAFETY: the caller's contract.
        let mut after = unsafe { places(graph, self.before, self.count)? };
        after.sort_unstable();
        if after.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(INVALID);
        }
        // Handles of nodes come from a table, which is dropped: handles are unique in the process.
        let handle = HandleTable::new().insert(());
        // SAFETY: as above.
        unsafe { write(self.node, handle as CUgraphNode)? };
        graph.nodes.push(GraphNode { handle, work, after });
        Ok(())
    }
}

/// The work of a kernel node.
///
/// # Safety
/// The parameters describe a kernel and its arguments.
unsafe fn kernel(
    machine: &SimMachine,
    parameters: &CUDA_KERNEL_NODE_PARAMS,
) -> DriverAnswer<DeviceWork> {
    let of = parameters;
    let launch = KernelLaunch {
        function: of.func,
        blocks: [of.gridDimX, of.gridDimY, of.gridDimZ],
        threads: [of.blockDimX, of.blockDimY, of.blockDimZ],
        shared: of.sharedMemBytes,
        values: of.kernelParams,
        extra: of.extra,
    };
    // SAFETY: the caller's contract.
    unsafe { launch.grid(machine) }
}

/// The work of a copy node: contiguous bytes, between devices and the host.
///
/// # Safety
/// The parameters describe memory that is there.
unsafe fn copy(memory: &AddressSpace, of: &CUDA_MEMCPY3D) -> DriverAnswer<DeviceWork> {
    use CUmemorytype as M;
    let bytes = of.WidthInBytes;
    let offsets = [of.srcXInBytes, of.srcY, of.srcZ, of.srcLOD, of.dstXInBytes, of.dstY, of.dstZ];
    if of.Height != 1 || of.Depth != 1 || of.dstLOD != 0 || offsets != [0; 7] || bytes == 0 {
        eprintln!("meristem-standin: a copy node is one run of bytes here");
        return Err(INVALID);
    }
    let from = match of.srcMemoryType {
        M::CU_MEMORYTYPE_DEVICE | M::CU_MEMORYTYPE_UNIFIED => CopySource::Device(of.srcDevice),
        // SAFETY: the caller's contract.
        M::CU_MEMORYTYPE_HOST => match unsafe { source(memory, of.srcHost, bytes)? } {
            CopySource::Staged(_) => return Err(pageable()),
            pinned => pinned,
        },
        M::CU_MEMORYTYPE_ARRAY => return Err(INVALID),
    };
    let to = match of.dstMemoryType {
        M::CU_MEMORYTYPE_DEVICE | M::CU_MEMORYTYPE_UNIFIED => CopyTarget::Device(of.dstDevice),
        M::CU_MEMORYTYPE_HOST if memory.owner(of.dstHost as u64, bytes).is_none() => {
            return Err(pageable());
        }
        M::CU_MEMORYTYPE_HOST => CopyTarget::Host(of.dstHost as u64),
        M::CU_MEMORYTYPE_ARRAY => return Err(INVALID),
    };
    Ok(DeviceWork::Copy(CopyWork { from, to, bytes }))
}

/// The error for a copy node with pageable memory, which may be freed before a launch.
fn pageable() -> CUresult {
    eprintln!("meristem-standin: a copy node needs page-locked memory");
    INVALID
}

/// Checks all nodes against live memory.
fn check_nodes(machine: &SimMachine, nodes: &[GraphNode]) -> DriverAnswer {
    nodes.iter().try_for_each(|node| check(machine, &node.work))
}

driver! {
    /// Creates a graph without nodes.
    fn cuGraphCreate(phGraph: *mut CUgraph, flags: c_uint) {
        in_context(|machine, _| {
            if flags != 0 || phGraph.is_null() {
                return Err(INVALID);
            }
            write(phGraph, machine.graphs.insert(BuiltGraph::default()) as CUgraph)
        })
    }

    /// Destroys a graph; executable graphs made from it live on.
    fn cuGraphDestroy(hGraph: CUgraph) {
        in_context(|machine, _| machine.graphs.remove(hGraph as u64).map(drop))
    }

    /// Adds a kernel. Its arguments are copied now.
    fn cuGraphAddKernelNode_v2(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        numDependencies: usize,
        nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
    ) {
        in_context(|machine, _| {
            let work = kernel(machine, &read(nodeParams)?)?;
            let (node, graph) = (phGraphNode, hGraph);
            let addition = Addition { node, graph, before: dependencies, count: numDependencies };
            addition.add(machine, work)
        })
    }

    /// Adds a fill of one row.
    fn cuGraphAddMemsetNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        numDependencies: usize,
        memsetParams: *const CUDA_MEMSET_NODE_PARAMS,
        ctx: CUcontext,
    ) {
        in_context(|machine, device| {
            let of = read(memsetParams)?;
            let size = of.elementSize as usize;
            let own = machine.devices[device].context == ctx as u64;
            if ![1, 2, 4].contains(&size) || of.height != 1 || of.dst % size as u64 != 0 || !own {
                return Err(INVALID);
            }
            let value = of.value.to_le_bytes()[..size].to_vec();
            let work = DeviceWork::Fill(FillWork { to: of.dst, value, count: of.width });
            let (node, graph) = (phGraphNode, hGraph);
            let addition = Addition { node, graph, before: dependencies, count: numDependencies };
            addition.add(machine, work)
        })
    }

    /// Adds a copy of contiguous bytes.
    fn cuGraphAddMemcpyNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        numDependencies: usize,
        copyParams: *const CUDA_MEMCPY3D,
        ctx: CUcontext,
    ) {
        in_context(|machine, device| {
            if machine.devices[device].context != ctx as u64 {
                return Err(INVALID);
            }
            let work = copy(&machine.memory, &read(copyParams)?)?;
            let (node, graph) = (phGraphNode, hGraph);
            let addition = Addition { node, graph, before: dependencies, count: numDependencies };
            addition.add(machine, work)
        })
    }

    /// Adds an empty node.
    fn cuGraphAddEmptyNode(
        phGraphNode: *mut CUgraphNode,
        hGraph: CUgraph,
        dependencies: *const CUgraphNode,
        numDependencies: usize,
    ) {
        in_context(|machine, _| {
            let (node, graph) = (phGraphNode, hGraph);
            let addition = Addition { node, graph, before: dependencies, count: numDependencies };
            addition.add(machine, DeviceWork::Nothing)
        })
    }

    /// Adds dependencies between nodes.
    fn cuGraphAddDependencies_v2(
        hGraph: CUgraph,
        from: *const CUgraphNode,
        to: *const CUgraphNode,
        edgeData: *const CUgraphEdgeData,
        numDependencies: usize,
    ) {
        in_context(|machine, _| {
            let graph = machine.graphs.get_mut(hGraph as u64)?;
            let from = places(graph, from, numDependencies)?;
            let to = places(graph, to, numDependencies)?;
            let pairs = || from.iter().copied().zip(to.iter().copied());
            let known =
                |(from, to): (usize, usize)| from == to || graph.nodes[to].after.contains(&from);
            if pairs().any(known) || !edgeData.is_null() {
                return Err(INVALID);
            }
            pairs().for_each(|(from, to)| graph.nodes[to].after.push(from));
            Ok(())
        })
    }

    /// Makes a graph executable: it must have no cycle, and all its memory must be live.
    fn cuGraphInstantiateWithFlags(
        phGraphExec: *mut CUgraphExec,
        hGraph: CUgraph,
        flags: c_ulonglong,
    ) {
        in_context(|machine, device| {
            if flags != 0 || phGraphExec.is_null() {
                return Err(INVALID);
            }
            let plan = GraphPlan::new(machine.graphs.get(hGraph as u64)?).ok_or(INVALID)?;
            check_nodes(machine, &plan.nodes)?;
            let exec = BuiltExec { device, plan: Arc::new(plan), last: None };
            write(phGraphExec, machine.execs.insert(exec) as CUgraphExec)
        })
    }

    /// Uploads an executable graph in stream order, which has no effect here.
    fn cuGraphUpload(hGraphExec: CUgraphExec, hStream: CUstream) {
        in_context(|machine, device| {
            machine.execs.get(hGraphExec as u64)?;
            let handle = stream(machine, device, hStream)?;
            machine.enqueue(handle, vec![], DeviceWork::Nothing).map(drop)
        })
    }

    /// Destroys an executable graph; launches that were enqueued still run.
    fn cuGraphExecDestroy(hGraphExec: CUgraphExec) {
        in_context(|machine, _| machine.execs.remove(hGraphExec as u64).map(drop))
    }

    /// Launches a graph in stream order, after its last launch.
    fn cuGraphLaunch(hGraphExec: CUgraphExec, hStream: CUstream) {
        in_context(|machine, device| {
            let exec = machine.execs.get(hGraphExec as u64)?;
            if exec.device != device {
                return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
            }
            check_nodes(machine, &exec.plan.nodes)?;
            let handle = stream(machine, device, hStream)?;
            machine.enqueue_graph(handle, hGraphExec as u64).map(drop)
        })
    }

    /// Changes a kernel of an executable graph for later launches.
    fn cuGraphExecKernelNodeSetParams_v2(
        hGraphExec: CUgraphExec,
        hNode: CUgraphNode,
        nodeParams: *const CUDA_KERNEL_NODE_PARAMS,
    ) {
        in_context(|machine, _| {
            let work = kernel(machine, &read(nodeParams)?)?;
            let plan = Arc::make_mut(&mut machine.execs.get_mut(hGraphExec as u64)?.plan);
            let node = plan.nodes.iter_mut().find(|node| node.handle == hNode as u64);
            let node = node.filter(|node| matches!(node.work, DeviceWork::Grid(_))).ok_or(INVALID)?;
            node.work = work;
            Ok(())
        })
    }
}
