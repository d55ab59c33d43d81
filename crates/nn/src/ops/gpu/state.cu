// Metrics, and checks of a network's state (ops/state.rs).
#include "nn.cuh"

struct Layout {
    double head[3];  // groups, configurations, capacity of the log
};

extern "C" __global__ void __launch_bounds__(256)
    reset_metrics(Span<double> metrics, const __grid_constant__ Layout of) {
    locate(metrics);
    i64 i = first();
    if (i < metrics.len) metrics[i] = i < 3 ? of.head[i] : 0.0;
}

// Several tensors in one call; unused places have no elements. `block` is the first block of each.
struct Blocks {
    u32 block[8];
};

// The count is a whole number while it is added to, so that the order of the blocks does not
// matter, and becomes an f64 in the end.
__device__ __forceinline__ u64* whole(Span<double> count) {
    return (u64*)&count[0];
}

extern "C" __global__ void __launch_bounds__(32)
    count_begin(Span<double> count) {
    locate(count);
    if (first() == 0) *whole(count) = 0;
}

extern "C" __global__ void __launch_bounds__(32)
    count_end(Span<double> count) {
    locate(count);
    if (first() == 0) count[0] = (double)*whole(count);
}

// Counts elements that are NaN or infinite in chunks of 4096 elements; 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    count(Span<const float> a, Span<const float> b, Span<const float> c, Span<const float> d,
          Span<const float> e, Span<const float> f, Span<const float> g, Span<const float> h,
          Span<double> count, Blocks of) {
    locate(a, b, c, d, e, f, g, h, count);
    __shared__ u32 part[256];
    Span<const float> x = a;
    u32 begin = 0;
    Span<const float> others[7] = {b, c, d, e, f, g, h};
#pragma unroll
    for (u32 i = 0; i < 7; ++i) {
        if (others[i].len > 0 && of.block[i + 1] <= blockIdx.x) {
            x = others[i];
            begin = of.block[i + 1];
        }
    }
    i64 start = (i64)(blockIdx.x - begin) * 4096 + threadIdx.x;
    u32 bad = 0;
#pragma unroll
    for (u32 i = 0; i < 4096; i += 256) bad += start + i < x.len && !isfinite(x[start + i]) ? 1 : 0;
    bad = block_sum(bad, part);
    if (threadIdx.x == 0 && bad > 0) atomicAdd(whole(count), (u64)bad);
}

struct Begin {
    u32 begins;  // there is no hash yet
};

__device__ __forceinline__ u64 hashed(u64 hash, u32 word) {
    return (hash ^ word) * 0x00000100000001b3ull;
}

// The hash after these words. A step is an exclusive or and a product: eight words come at once, so
// that no step waits for shared memory.
__device__ u64 hashed(u64 hash, const u32* words, u32 count) {
    u32 i = 0;
    for (; i + 8 <= count; i += 8) {
        uint4 a = *reinterpret_cast<const uint4*>(words + i);
        uint4 b = *reinterpret_cast<const uint4*>(words + i + 4);
        u32 of[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (u32 k = 0; k < 8; ++k) hash = hashed(hash, of[k]);
    }
    for (; i < count; ++i) hash = hashed(hash, words[i]);
    return hash;
}

// The hash goes on over the words of these tensors. Each word's step needs the one before, so one
// thread takes them all, while the others fetch the next words for it. One block of 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    fingerprint(Span<const u32> a, Span<const u32> b, Span<const u32> c, Span<const u32> d,
                Span<const u32> e, Span<const u32> f, Span<const u32> g, Span<const u32> h,
                Span<double> halves, Begin of) {
    locate(a, b, c, d, e, f, g, h, halves);
    __shared__ __align__(16) u32 tile[2][2048];
    u64 hash = 0xcbf29ce484222325ull;
    if (!of.begins) hash = (u64)halves[0] << 32 | (u64)halves[1];
    const Span<const u32> others[7] = {b, c, d, e, f, g, h};
    u32 turn = 0;
#pragma unroll 1
    for (u32 n = 0; n < 8; ++n) {
        Span<const u32> words = a;
        // An index that the compiler knows: the spans stay in registers.
#pragma unroll
        for (u32 i = 0; i < 7; ++i) {
            if (n == i + 1) words = others[i];
        }
        // In a round the tile of the round before is hashed.
        for (i64 start = 0; words.len > 0 && start < words.len + 2048; start += 2048) {
            if (threadIdx.x >= 32) {
                i64 count = min(words.len - start, 2048ll);
#pragma unroll 4
                for (i64 i = threadIdx.x - 32; i < count; i += 224) {
                    tile[turn][i] = words[start + i];
                }
            } else if (threadIdx.x == 0 && start > 0) {
                i64 left = words.len - (start - 2048);
                hash = hashed(hash, tile[turn ^ 1], left < 2048 ? (u32)left : 2048);
            }
            turn ^= 1;
            __syncthreads();
        }
    }
    if (threadIdx.x != 0) return;
    halves[0] = (double)(u32)(hash >> 32);
    halves[1] = (double)(u32)hash;
}
