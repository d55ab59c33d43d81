//! Planted faults, each with the correct program beside it, and their reports.

use std::collections::BTreeSet;
use std::ptr;

use cudarc::driver::sys::{CUDA_KERNEL_NODE_PARAMS, CUgraph, CUresult};
use meristem_standin::driver::{graph, memory, stream};

use super::harness::{Case, Gpu, Said, Shape, good, say, shape, values};

const SOURCE: &str = r#"
extern "C" __global__ void fill(unsigned* x, unsigned value, unsigned n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = value;
}
extern "C" __global__ void copy(const unsigned* from, unsigned* to, unsigned n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = from[i];
}
template <bool Barrier> __device__ void reduce(const unsigned* x, unsigned* sum) {
  __shared__ unsigned part[64];
  part[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  for (int half = 32; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    if (Barrier) __syncthreads();
  }
  if (threadIdx.x == 0) *sum = part[0];
}
extern "C" __global__ void right_sum(const unsigned* x, unsigned* sum) { reduce<true>(x, sum); }
extern "C" __global__ void racing_sum(const unsigned* x, unsigned* sum) { reduce<false>(x, sum); }
// Both are right in one order of threads, or of blocks.
extern "C" __global__ void racing_neighbours(const unsigned* x, unsigned* y) {
  __shared__ unsigned part[64];
  part[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = threadIdx.x ? part[threadIdx.x - 1] : x[0];
}
extern "C" __global__ void racing_blocks(const unsigned* x, unsigned* y) {
  y[blockIdx.x] = blockIdx.x ? y[blockIdx.x - 1] : x[0];
}
extern "C" __global__ void one_branch() {
  if (threadIdx.x < 16)
    __syncthreads(); // one
  else
    __syncthreads(); // other
}
extern "C" __global__ void half_a_warp(unsigned* x) {
  if (threadIdx.x < 16) x[threadIdx.x] = __shfl_sync(0xffffffff, threadIdx.x, 0);
}
extern "C" __global__ void asserts(int n) { assert(blockIdx.x * blockDim.x + threadIdx.x < n); }
extern "C" __global__ void write_at(unsigned* x, long long at) { x[at] = 7; }
extern "C" __global__ void load_vector(const float* x, float4* to) {
  *to = *reinterpret_cast<const float4*>(x + 1);
}
extern "C" __global__ void write_in(unsigned** table) { table[0][0] = 7; }
extern "C" __global__ void beyond_shared(unsigned n) {
  extern __shared__ unsigned shared[];
  if (threadIdx.x == 0) shared[n] = 1;
}
"#;

/// Runs a case on these kernels.
fn run(name: &'static str, seeds: u64, body: fn(&Gpu)) -> Vec<Said> {
    Case { name, source: SOURCE, body }.run(0..seeds)
}

#[test]
fn a_seed_gives_one_order() {
    let said = |seed| {
        let name = "faults::a_seed_gives_one_order";
        let body = |gpu: &Gpu| {
            for _ in 0..20 {
                producer_and_consumer(gpu, false);
            }
        };
        let said = Case { name, source: SOURCE, body }.run(seed..seed + 1);
        said.iter().flat_map(values).map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(said(3), said(3));
    assert!(said(3).is_empty() || said(3) != said(4));
}

/// File and line of the first line of the kernels that has this text.
fn place(text: &str) -> String {
    let line = SOURCE.lines().position(|line| line.contains(text)).unwrap();
    format!("test.cu:{}", line + 1)
}

/// The kinds of results that a case said over all seeds.
fn kinds(said: &[Said]) -> BTreeSet<&str> {
    said.iter().flat_map(values).collect()
}

/// Whether values are all old, all new, poison or mixed.
fn kind(values: &[u32], new: u32) -> &'static str {
    match values {
        _ if values.iter().all(|value| *value == new) => "right",
        _ if values.iter().all(|value| *value == 0xffa5_a5a5) => "poison",
        _ => "wrong",
    }
}

fn producer_and_consumer(gpu: &Gpu, wait: bool) {
    let [from, to] = [gpu.stream(), gpu.stream()];
    let [x, y] = [gpu.allocate(100), gpu.allocate(100)];
    good(gpu.launch(from, c"fill", shape(1, 128), &[x, 5, 100]));
    if wait {
        let event = gpu.record(from);
        // SAFETY: has no pointers to memory.
        unsafe { good(stream::cuStreamWaitEvent(to, event, 0)) };
    }
    good(gpu.launch(to, c"copy", shape(1, 128), &[x, y, 100]));
    say(kind(&gpu.download(to, y, 100), 5));
}

#[test]
fn a_missing_wait_shows_as_poison() {
    let name = "faults::a_missing_wait_shows_as_poison";
    let said = run(name, 12, |gpu| producer_and_consumer(gpu, false));
    if let [_, ..] = &said[..] {
        assert_eq!(kinds(&said), BTreeSet::from(["\"poison\"", "\"right\""]));
    }
}

#[test]
fn with_the_wait_all_orders_are_right() {
    let name = "faults::with_the_wait_all_orders_are_right";
    let said = run(name, 12, |gpu| producer_and_consumer(gpu, true));
    assert!(kinds(&said).into_iter().all(|kind| kind == "\"right\""));
}

fn sum_of_64(gpu: &Gpu, right: bool) {
    let (on, numbers) = (gpu.stream(), (1..=64).collect::<Vec<u32>>());
    let [x, sum] = [gpu.allocate(64), gpu.allocate(1)];
    gpu.upload(on, x, &numbers);
    let name = if right { c"right_sum" } else { c"racing_sum" };
    good(gpu.launch(on, name, shape(1, 64), &[x, sum]));
    say(kind(&gpu.download(on, sum, 1), 64 * 65 / 2));
}

#[test]
fn a_missing_barrier_changes_bits() {
    let name = "faults::a_missing_barrier_changes_bits";
    let said = run(name, 8, |gpu| sum_of_64(gpu, false));
    assert!(said.is_empty() || kinds(&said).contains("\"wrong\""));
}

fn neighbours(gpu: &Gpu, name: &std::ffi::CStr, shape: Shape) {
    let (on, [x, y]) = (gpu.stream(), [gpu.allocate(64), gpu.allocate(64)]);
    gpu.upload(on, x, &[5; 64]);
    good(gpu.launch(on, name, shape, &[x, y]));
    say(kind(&gpu.download(on, y, 64), 5));
}

#[test]
fn a_race_that_is_right_in_one_order_shows() {
    let name = "faults::a_race_that_is_right_in_one_order_shows";
    let said = run(name, 12, |gpu| neighbours(gpu, c"racing_neighbours", shape(1, 64)));
    assert!(said.is_empty() || kinds(&said) == BTreeSet::from(["\"right\"", "\"wrong\""]));
}

#[test]
fn a_race_of_blocks_shows() {
    let name = "faults::a_race_of_blocks_shows";
    let said = run(name, 12, |gpu| neighbours(gpu, c"racing_blocks", shape(64, 1)));
    assert!(said.is_empty() || kinds(&said) == BTreeSet::from(["\"right\"", "\"wrong\""]));
}

#[test]
fn with_the_barrier_no_bit_changes() {
    let name = "faults::with_the_barrier_no_bit_changes";
    let said = run(name, 8, |gpu| sum_of_64(gpu, true));
    assert!(kinds(&said).into_iter().all(|kind| kind == "\"right\""));
}

#[test]
fn a_pinned_buffer_reused_early_shows() {
    let said = run("faults::a_pinned_buffer_reused_early_shows", 8, |gpu| {
        let (on, x) = (gpu.stream(), gpu.allocate(100));
        let buffer = gpu.pinned(100);
        buffer.fill(5);
        gpu.upload(on, x, buffer);
        buffer.fill(6);
        let pageable = [7; 100];
        let y = gpu.allocate(100);
        gpu.upload(on, y, &pageable);
        say((kind(&gpu.download(on, x, 100), 5), kind(&gpu.download(on, y, 100), 7)));
    });
    // Nothing runs before it must, so the second value always arrives; pageable memory is staged.
    assert!(kinds(&said).into_iter().all(|kinds| kinds == "(\"wrong\", \"right\")"));
}

/// Runs a kernel that must fail, and prints its error code and the code of a later call.
fn failing(gpu: &Gpu, name: &std::ffi::CStr, shape: Shape, values: &[u64]) {
    let on = gpu.stream();
    good(gpu.launch(on, name, shape, values));
    let code = gpu.wait(on);
    let (mut free, mut total) = (0, 0);
    // SAFETY: the places are ours.
    let later = unsafe { memory::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
    assert_eq!(later, code, "a fault stays");
    say(code);
}

/// Checks that each process said this code and a line on stderr with these parts.
fn failed(said: &[Said], code: CUresult, parts: &[&str]) {
    for said in said {
        assert_eq!(values(said), [format!("{code:?}")], "{}", said.stderr);
        let fits = |line: &str| parts.iter().all(|part| line.contains(part));
        assert!(said.stderr.lines().any(fits), "seed {}: {}", said.seed, said.stderr);
    }
}

#[test]
fn a_barrier_in_two_branches_is_a_fault() {
    let name = "faults::a_barrier_in_two_branches_is_a_fault";
    let said = run(name, 4, |gpu| failing(gpu, c"one_branch", shape(2, 64), &[]));
    let [first, second] = ["__syncthreads(); // one", "__syncthreads(); // other"].map(place);
    let parts = ["kernel one_branch, block (", "divergent barrier", &first, &second];
    failed(&said, CUresult::CUDA_ERROR_LAUNCH_FAILED, &parts);
}

#[test]
fn an_exchange_without_all_lanes_is_a_fault() {
    let said = run("faults::an_exchange_without_all_lanes_is_a_fault", 4, |gpu| {
        let x = gpu.allocate(32);
        failing(gpu, c"half_a_warp", shape(1, 32), &[x]);
    });
    let exchange = format!("16 of 32 lanes of warp 0 at the exchange at {}", place("__shfl_sync"));
    let parts = ["kernel half_a_warp", &exchange];
    failed(&said, CUresult::CUDA_ERROR_LAUNCH_FAILED, &parts);
}

#[test]
fn an_assertion_is_a_fault() {
    let name = "faults::an_assertion_is_a_fault";
    let said = run(name, 4, |gpu| failing(gpu, c"asserts", shape(2, 64), &[127]));
    let parts = ["kernel asserts, block (1, 0, 0), thread (63, 0, 0): assertion blockIdx.x"];
    failed(&said, CUresult::CUDA_ERROR_ASSERT, &parts);
}

#[test]
fn a_write_after_the_end_is_a_fault() {
    let said = run("faults::a_write_after_the_end_is_a_fault", 2, |gpu| {
        let x = gpu.allocate(100);
        failing(gpu, c"write_at", shape(1, 1), &[x, 101]);
    });
    let parts = ["kernel write_at: a write 4 bytes after the end of allocation", "of 400 bytes"];
    failed(&said, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, &parts);
}

#[test]
fn a_write_far_away_is_a_fault_of_its_thread() {
    let said = run("faults::a_write_far_away_is_a_fault_of_its_thread", 2, |gpu| {
        let x = gpu.allocate(100);
        failing(gpu, c"write_at", shape(1, 1), &[x, 1000]);
    });
    let parts = [
        "kernel write_at, block (0, 0, 0), thread (0, 0, 0): an access to address",
        "3600 bytes after allocation",
    ];
    failed(&said, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, &parts);
}

#[test]
fn a_write_after_dynamic_shared_memory_is_a_fault() {
    let name = "faults::a_write_after_dynamic_shared_memory_is_a_fault";
    let said = run(name, 2, |gpu| {
        let shape = Shape { blocks: 1, threads: 32, shared: 64 };
        failing(gpu, c"beyond_shared", shape, &[17]);
    });
    let parts = ["kernel beyond_shared", "a write 4 bytes after 64 bytes of dynamic shared memory"];
    failed(&said, CUresult::CUDA_ERROR_LAUNCH_FAILED, &parts);
}

#[test]
fn a_misaligned_vector_is_a_fault() {
    let said = run("faults::a_misaligned_vector_is_a_fault", 2, |gpu| {
        let [x, y] = [gpu.allocate(100), gpu.allocate(4)];
        failing(gpu, c"load_vector", shape(1, 1), &[x, y]);
    });
    let parts = ["kernel load_vector, block (0, 0, 0), thread (0, 0, 0): a misaligned access"];
    failed(&said, CUresult::CUDA_ERROR_MISALIGNED_ADDRESS, &parts);
}

#[test]
fn address_sanitizer_names_the_line() {
    let name = "faults::address_sanitizer_names_the_line";
    let body = |gpu: &Gpu| {
        let (on, x) = (gpu.stream(), gpu.allocate(100));
        // Threads that wait for each other: the sanitizer follows the switches of stacks.
        good(gpu.launch(on, c"right_sum", shape(1, 64), &[x, x]));
        good(gpu.launch(on, c"write_at", shape(1, 1), &[x, 100]));
        gpu.wait(on);
    };
    if let Some(report) = (Case { name, source: SOURCE, body }).run_under_asan() {
        let place = place("x[at] = 7");
        let parts = ["AddressSanitizer: use-after-poison", "WRITE of size 4", "write_at", &place];
        for part in parts {
            assert!(report.contains(part), "{report}");
        }
    }
}

fn free(address: u64) {
    // SAFETY: has no pointers to memory of the host.
    unsafe { good(memory::cuMemFree_v2(address)) };
}

#[test]
fn a_launch_on_freed_memory_is_refused() {
    let said = run("faults::a_launch_on_freed_memory_is_refused", 2, |gpu| {
        let [x, y] = [gpu.allocate(100), gpu.allocate(100)];
        free(x);
        say(gpu.launch(gpu.stream(), c"copy", shape(1, 128), &[x, y, 100]));
    });
    let parts = ["argument 0 of kernel copy is 0x", "at byte 0 of freed allocation"];
    failed(&said, CUresult::CUDA_ERROR_INVALID_VALUE, &parts);
}

#[test]
fn a_freed_pointer_in_a_table_is_a_fault() {
    let said = run("faults::a_freed_pointer_in_a_table_is_a_fault", 2, |gpu| {
        let (on, [x, table]) = (gpu.stream(), [gpu.allocate(100), gpu.allocate(2)]);
        gpu.upload(on, table, &[x as u32, (x >> 32) as u32]);
        free(x);
        failing(gpu, c"write_in", shape(1, 1), &[table]);
    });
    let parts = ["kernel write_in", "an access to address", "at byte 0 of freed allocation"];
    failed(&said, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, &parts);
}

/// A graph with one kernel that fills 100 values.
fn graph_of_fill(gpu: &Gpu, x: u64) -> CUgraph {
    let (mut made, mut node): (CUgraph, _) = (ptr::null_mut(), ptr::null_mut());
    let (value, count) = (9u64, 100u64);
    let values = [&raw const x, &raw const value, &raw const count];
    let parameters = CUDA_KERNEL_NODE_PARAMS {
        func: gpu.function(c"fill"),
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 128,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: values.as_ptr().cast_mut().cast(),
        extra: ptr::null_mut(),
        kern: ptr::null_mut(),
        ctx: ptr::null_mut(),
    };
    // SAFETY: the places are ours, the kernel has three arguments.
    unsafe {
        good(graph::cuGraphCreate(&raw mut made, 0));
        let before = ptr::null();
        good(graph::cuGraphAddKernelNode_v2(&raw mut node, made, before, 0, &raw const parameters));
    }
    made
}

#[test]
fn a_graph_with_a_node_at_freed_memory_is_refused() {
    let said = run("faults::a_graph_with_a_node_at_freed_memory_is_refused", 2, |gpu| {
        let (on, x) = (gpu.stream(), gpu.allocate(100));
        let made = graph_of_fill(gpu, x);
        let mut exec = ptr::null_mut();
        // SAFETY: the place is ours.
        unsafe {
            good(graph::cuGraphInstantiateWithFlags(&raw mut exec, made, 0));
            good(graph::cuGraphLaunch(exec, on));
            assert_eq!(kind(&gpu.download(on, x, 100), 9), "right");
            free(x);
            let again = graph::cuGraphInstantiateWithFlags(&raw mut exec, made, 0);
            assert_eq!(again, CUresult::CUDA_ERROR_INVALID_VALUE);
            say(graph::cuGraphLaunch(exec, on));
        }
    });
    let parts = ["argument 0 of kernel fill is 0x", "at byte 0 of freed allocation"];
    failed(&said, CUresult::CUDA_ERROR_INVALID_VALUE, &parts);
}
