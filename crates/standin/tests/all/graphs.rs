//! Graphs: order of nodes, launches, and changes of an executable graph.

use std::ptr;

use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUgraph, CUgraphExec,
    CUgraphNode, CUmemorytype, CUresult,
};
use meristem_standin::driver::graph;

use super::harness::{Case, Gpu, good, say, values};

const SOURCE: &str = r#"
// x[0] = x[0] * factor + 1: the result tells the order.
extern "C" __global__ void append(unsigned long long* x, unsigned long long factor) {
  x[0] = x[0] * factor + 1;
}
"#;

/// A graph that is being built.
struct Builder<'a> {
    gpu: &'a Gpu,
    graph: CUgraph,
}

impl<'a> Builder<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        let mut graph = ptr::null_mut();
        // SAFETY: the place is ours.
        unsafe { good(graph::cuGraphCreate(&raw mut graph, 0)) };
        Self { gpu, graph }
    }

    /// Adds `append` with a factor.
    fn append(&self, x: u64, factor: u64, after: &[CUgraphNode]) -> CUgraphNode {
        let mut node = ptr::null_mut();
        let values = [&raw const x, &raw const factor];
        let parameters = kernel(self.gpu, &values);
        // SAFETY: the kernel has these two arguments.
        let code = unsafe {
            let (to, parameters) = (&raw mut node, &raw const parameters);
            graph::cuGraphAddKernelNode_v2(to, self.graph, after.as_ptr(), after.len(), parameters)
        };
        good(code);
        node
    }

    /// Adds a fill of two words with zero.
    fn clear(&self, x: u64) -> CUgraphNode {
        let mut node = ptr::null_mut();
        let parameters = CUDA_MEMSET_NODE_PARAMS {
            dst: x,
            pitch: 0,
            value: 0,
            elementSize: 4,
            width: 2,
            height: 1,
        };
        // SAFETY: the places are ours.
        let code = unsafe {
            let (to, parameters) = (&raw mut node, &raw const parameters);
            let context = self.gpu.context;
            graph::cuGraphAddMemsetNode(to, self.graph, ptr::null(), 0, parameters, context)
        };
        good(code);
        node
    }

    /// Adds a copy of two words.
    fn copy(&self, from: u64, to: u64, after: &[CUgraphNode]) -> CUgraphNode {
        let mut node = ptr::null_mut();
        // SAFETY: numbers and null pointers are valid when they are zero; the two enums are set.
        let parameters = unsafe {
            let mut parameters = std::mem::MaybeUninit::<CUDA_MEMCPY3D>::zeroed();
            let of = parameters.as_mut_ptr();
            (*of).srcMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
            (*of).dstMemoryType = CUmemorytype::CU_MEMORYTYPE_DEVICE;
            ((*of).srcDevice, (*of).dstDevice) = (from, to);
            ((*of).WidthInBytes, (*of).Height, (*of).Depth) = (8, 1, 1);
            parameters.assume_init()
        };
        // SAFETY: the places are ours.
        let code = unsafe {
            let (context, parameters) = (self.gpu.context, &raw const parameters);
            let (before, count) = (after.as_ptr(), after.len());
            graph::cuGraphAddMemcpyNode(
                &raw mut node,
                self.graph,
                before,
                count,
                parameters,
                context,
            )
        };
        good(code);
        node
    }

    fn executable(&self) -> Result<CUgraphExec, CUresult> {
        let mut exec = ptr::null_mut();
        // SAFETY: the place is ours.
        match unsafe { graph::cuGraphInstantiateWithFlags(&raw mut exec, self.graph, 0) } {
            CUresult::CUDA_SUCCESS => Ok(exec),
            code => Err(code),
        }
    }
}

fn kernel(gpu: &Gpu, values: &[*const u64; 2]) -> CUDA_KERNEL_NODE_PARAMS {
    CUDA_KERNEL_NODE_PARAMS {
        func: gpu.function(c"append"),
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 1,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: values.as_ptr().cast_mut().cast(),
        extra: ptr::null_mut(),
        kern: ptr::null_mut(),
        ctx: ptr::null_mut(),
    }
}

fn launch(exec: CUgraphExec, gpu: &Gpu) {
    // SAFETY: has no pointers to memory.
    unsafe { good(graph::cuGraphLaunch(exec, gpu.stream())) };
}

#[test]
fn edges_are_honoured_and_launches_follow_each_other() {
    let case = Case {
        name: "graphs::edges_are_honoured_and_launches_follow_each_other",
        source: SOURCE,
        body: |gpu| {
            let (builder, [x, y]) = (Builder::new(gpu), [gpu.allocate(2), gpu.allocate(2)]);
            let clear = builder.clear(x);
            let [a, b] =
                [(10, clear), (10, clear)].map(|(f, after)| builder.append(x, f, &[after]));
            let last = builder.append(x, 100, &[a, b]);
            builder.copy(x, y, &[last]);
            let exec = builder.executable().unwrap();
            launch(exec, gpu);
            // Launched as it was: the change is for the next launch, on another stream.
            let factor = 3u64;
            let values = [&raw const x, &raw const factor];
            let parameters = kernel(gpu, &values);
            // SAFETY: the kernel has these two arguments.
            let set = unsafe {
                graph::cuGraphExecKernelNodeSetParams_v2(exec, last, &raw const parameters)
            };
            good(set);
            launch(exec, gpu);
            // SAFETY: has no pointers to memory.
            unsafe { good(graph::cuGraphExecDestroy(exec)) };
            let on = gpu.stream();
            // SAFETY: has no pointers.
            unsafe { good(meristem_standin::driver::context::cuCtxSynchronize()) };
            say(gpu.download(on, y, 2));
        },
    };
    for said in case.run(0..4) {
        // ((0 · 10 + 1) · 10 + 1) · 3 + 1.
        assert_eq!(values(&said), ["[34, 0]"], "seed {}: {}", said.seed, said.stderr);
    }
}

#[test]
fn a_missing_edge_shows() {
    let case = Case {
        name: "graphs::a_missing_edge_shows",
        source: SOURCE,
        body: |gpu| {
            let (builder, x, on) = (Builder::new(gpu), gpu.allocate(2), gpu.stream());
            gpu.upload(on, x, &[1, 0]);
            builder.append(x, 2, &[]);
            builder.append(x, 3, &[]);
            let exec = builder.executable().unwrap();
            // SAFETY: has no pointers to memory.
            unsafe { good(graph::cuGraphLaunch(exec, on)) };
            say(gpu.download(on, x, 1)[0]);
        },
    };
    let said = case.run(0..8);
    let all: std::collections::BTreeSet<_> = said.iter().flat_map(values).collect();
    // (1 · 2 + 1) · 3 + 1, and (1 · 3 + 1) · 2 + 1.
    assert!(said.is_empty() || all == ["10", "9"].into(), "{all:?}");
}

#[test]
fn a_circle_is_refused() {
    let case = Case {
        name: "graphs::a_circle_is_refused",
        source: SOURCE,
        body: |gpu| {
            let (builder, x) = (Builder::new(gpu), gpu.allocate(2));
            let a = builder.append(x, 2, &[]);
            let b = builder.append(x, 2, &[a]);
            // SAFETY: one node each.
            unsafe {
                let (from, to) = (&raw const b, &raw const a);
                let none = ptr::null();
                good(graph::cuGraphAddDependencies_v2(builder.graph, from, to, none, 1));
            }
            say(builder.executable().unwrap_err());
        },
    };
    for said in case.run(0..1) {
        assert_eq!(values(&said), ["CUDA_ERROR_INVALID_VALUE"]);
    }
}
