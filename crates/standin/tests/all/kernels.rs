//! Kernels that are right: their results, for every seed.

use cudarc::driver::sys::CUresult;

use super::harness::{Case, Shape, compile, good, say, shape, values};

const SOURCE: &str = r#"
extern "C" __global__ void add(const float* a, const float* b, float* sum, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) sum[i] = a[i] + b[i];
}

#define TWICE(T) \
  extern "C" __global__ void twice_##T(T* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }
#include "twice.cuh"
TWICE(float)
TWICE(unsigned)
__global__ void hidden(int* x) {}

// Copies through shared memory, the next piece while one is used; `wait` is how many groups may be
// on their way.
extern "C" __global__ void staged(const unsigned* x, unsigned* y, unsigned pieces, unsigned wait) {
  __shared__ unsigned piece[2][32];
  unsigned t = threadIdx.x;
  __pipeline_memcpy_async(&piece[0][t], &x[t], 4);
  __pipeline_commit();
  for (unsigned i = 0; i < pieces; ++i) {
    if (i + 1 < pieces) __pipeline_memcpy_async(&piece[(i + 1) % 2][t], &x[(i + 1) * 32 + t], 4);
    __pipeline_commit();
    __pipeline_wait_prior(wait);
    __syncthreads();
    y[i * 32 + t] = piece[i % 2][31 - t];
    __syncthreads();
  }
}

// Matrix products of a warp: a is 16 x K, b is K x 8, row by row, of small whole numbers.
extern "C" __global__ void product_tf32(const float* a, const float* b, float* d) {
  int g = threadIdx.x / 4, t = threadIdx.x % 4;
  unsigned fa[4], fb[2];
  for (int i = 0; i < 4; ++i) fa[i] = meristem_to_tf32(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
  for (int i = 0; i < 2; ++i) fb[i] = meristem_to_tf32(b[(t + i * 4) * 8 + g]);
  float fd[4] = {};
  meristem_mma_tf32(fd, fa, fb, fd);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fd[i];
}
__device__ unsigned pair(float low, float high) {
  return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
}
extern "C" __global__ void product_bf16(const float* a, const float* b, float* d) {
  int g = threadIdx.x / 4, t = threadIdx.x % 4;
  unsigned fa[4], fb[2];
  for (int i = 0; i < 4; ++i) {
    const float* from = a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
    fa[i] = pair(from[0], from[1]);
  }
  for (int i = 0; i < 2; ++i) {
    const float* from = b + (2 * t + i * 8) * 8 + g;
    fb[i] = pair(from[0], from[8]);
  }
  float fd[4] = {};
  meristem_mma_bf16(fd, fa, fb, fd);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fd[i];
}

template <int N>
__device__ unsigned block_sum(unsigned value) {
  __shared__ alignas(16) unsigned part[N];
  part[threadIdx.x] = value;
  __syncthreads();
  for (int half = N / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  unsigned sum = part[0];
  __syncthreads();
  return sum;
}

// Sums of 64 values by shared memory, of warps by shuffles, and of all by atomics.
extern "C" __global__ void __launch_bounds__(64)
sums(const unsigned* x, unsigned* by_block, unsigned* by_warp, unsigned* all) {
  extern __shared__ unsigned copy[];
  unsigned i = blockIdx.x * 64 + threadIdx.x;
  copy[threadIdx.x] = x[i];
  __syncthreads();
  unsigned value = copy[63 - threadIdx.x];
  unsigned sum = block_sum<64>(value);
  if (threadIdx.x == 0) by_block[blockIdx.x] = sum;
  unsigned warp = value;
  for (int delta = 16; delta > 0; delta /= 2) warp += __shfl_down_sync(0xffffffff, warp, delta);
  if (threadIdx.x % 32 == 0) by_warp[i / 32] = warp;
  if (__reduce_add_sync(0xffffffff, value) != __shfl_sync(0xffffffff, warp, 0)) __trap();
  if (__ballot_sync(0xffffffff, threadIdx.x % 2) != 0xaaaaaaaa) __trap();
  if (__shfl_xor_sync(0xffffffff, threadIdx.x, 1) != (threadIdx.x ^ 1)) __trap();
  unsigned before = threadIdx.x % 32 ? threadIdx.x - 1 : threadIdx.x;
  if (__shfl_up_sync(0xffffffff, threadIdx.x, 1) != before) __trap();
  atomicAdd(all, value);
}
"#;

#[test]
fn results_do_not_depend_on_the_seed() {
    let case = Case {
        name: "kernels::results_do_not_depend_on_the_seed",
        source: SOURCE,
        body: |gpu| {
            let on = gpu.stream();
            let [a, b, sum] = [(); 3].map(|()| gpu.allocate(1000));
            let numbers: Vec<u32> = (0..1000).map(|i| (i as f32).to_bits()).collect();
            gpu.upload(on, a, &numbers);
            gpu.upload(on, b, &numbers);
            good(gpu.launch(on, c"add", shape(8, 128), &[a, b, sum, 1000]));
            let expected: Vec<u32> = (0..1000).map(|i| (2.0 * i as f32).to_bits()).collect();
            assert_eq!(gpu.download(on, sum, 1000), expected);

            good(gpu.launch(on, c"twice_float", shape(1, 10), &[sum]));
            good(gpu.launch(on, c"twice_unsigned", shape(1, 1), &[sum]));
            let expected: Vec<u32> = (0..10).map(|i| (4.0 * i as f32).to_bits()).collect();
            assert_eq!(gpu.download(on, sum, 10), expected);
            assert_eq!(gpu.find(c"hidden"), Err(CUresult::CUDA_ERROR_NOT_FOUND));

            let numbers: Vec<u32> = (0..256).collect();
            let [x, by_block, by_warp, all] = [256, 4, 8, 1].map(|count| gpu.allocate(count));
            gpu.upload(on, x, &numbers);
            gpu.upload(on, all, &[0]);
            let values = [x, by_block, by_warp, all];
            let shape = Shape { blocks: 4, threads: 64, shared: 256 };
            good(gpu.launch(on, c"sums", shape, &values));
            assert_eq!(gpu.download(on, by_block, 4), [2016, 6112, 10208, 14304]);
            // Warps saw the values of a block in reverse.
            let warps: [u32; 8] = [1520, 496, 3568, 2544, 5616, 4592, 7664, 6640];
            assert_eq!(gpu.download(on, by_warp, 8), warps);
            say(gpu.download(on, all, 1));
        },
    };
    for said in case.run(0..8) {
        assert_eq!(values(&said), ["[32640]"], "seed {}: {}", said.seed, said.stderr);
    }
}

#[test]
fn fragments_of_matrix_products_lie_as_on_a_device() {
    let case = Case {
        name: "kernels::fragments_of_matrix_products_lie_as_on_a_device",
        source: SOURCE,
        body: |gpu| {
            for (name, depth) in [(c"product_tf32", 8), (c"product_bf16", 16)] {
                let (on, d) = (gpu.stream(), gpu.allocate(128));
                let number = |at: usize| (at * 7 % 11) as f32 - 5.0;
                let [a, b] = [16 * depth, depth * 8].map(|count| {
                    let values: Vec<u32> = (0..count).map(|at| number(at).to_bits()).collect();
                    let address = gpu.allocate(count);
                    gpu.upload(on, address, &values);
                    address
                });
                good(gpu.launch(on, name, shape(1, 32), &[a, b, d]));
                let product = |at: usize| {
                    let (row, column) = (at / 8, at % 8);
                    let terms =
                        (0..depth).map(|k| number(row * depth + k) * number(k * 8 + column));
                    terms.sum::<f32>().to_bits()
                };
                let expected: Vec<u32> = (0..128).map(product).collect();
                assert_eq!(gpu.download(on, d, 128), expected, "{name:?}");
            }
        },
    };
    case.run(0..2);
}

#[test]
fn asynchronous_copies_come_when_they_are_waited_for() {
    let case = Case {
        name: "kernels::asynchronous_copies_come_when_they_are_waited_for",
        source: SOURCE,
        body: |gpu| {
            let (on, [x, y]) = (gpu.stream(), [gpu.allocate(128), gpu.allocate(128)]);
            gpu.upload(on, x, &(0..128).collect::<Vec<u32>>());
            good(gpu.launch(on, c"staged", shape(1, 32), &[x, y, 4, 1]));
            let expected: Vec<u32> = (0..128).map(|i| i / 32 * 32 + 31 - i % 32).collect();
            assert_eq!(gpu.download(on, y, 128), expected);
            // One group too many is pending: the data that is read has not arrived.
            good(gpu.launch(on, c"staged", shape(1, 32), &[x, y, 4, 2]));
            assert_eq!(gpu.download(on, y, 1), [0xffa5_a5a5]);
        },
    };
    case.run(0..3);
}

#[test]
fn errors_of_the_program_have_its_lines() {
    let log = compile("\n\nextern \"C\" __global__ void f(int* x) {\n  x[0] = y;\n}\n", &[]);
    let log = log.unwrap_err();
    assert!(log.starts_with("NVRTC_ERROR_COMPILATION"), "{log}");
    assert!(log.contains("test.cu:4:") && log.contains("'y' was not declared"), "{log}");
    let float = "extern \"C\" __global__ void f(float* x) { atomicAdd(x, 1.0f); }";
    let log = compile(float, &[]).unwrap_err();
    assert!(log.contains("the result of float atomics depends on the order"), "{log}");
    let exp = "extern \"C\" __global__ void f(float* x) { x[0] = expf(x[0]); }";
    let log = compile(exp, &[]).unwrap_err();
    assert!(log.contains("expf has other bits on a device"), "{log}");
    let log = compile(float, &["--fast"]).unwrap_err();
    let expected = "NVRTC_ERROR_INVALID_OPTION: nvrtc: error: unrecognized option --fast found";
    assert_eq!(log, expected);
}
