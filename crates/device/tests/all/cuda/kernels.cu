// Kernels of the tests.
#include "meristem.cuh"

typedef unsigned int u32;

extern "C" __global__ void set(Span<u32> x, u32 value) {
    locate(x);
    for (long long i = first(); i < x.len; i += threads()) x[i] = value;
}

// x[i] = 3 x[i] + i + from[i % len] of every `from` that has elements.
__device__ u32 read(Span<const u32> from, long long i) {
    return from.len == 0 ? 0 : from[i % from.len];
}

extern "C" __global__ void mix0(Span<u32> x) {
    locate(x);
    for (long long i = first(); i < x.len; i += threads()) x[i] = 3 * x[i] + (u32)i;
}

extern "C" __global__ void mix1(Span<const u32> a, Span<u32> x) {
    locate(a, x);
    for (long long i = first(); i < x.len; i += threads()) x[i] = 3 * x[i] + (u32)i + read(a, i);
}

extern "C" __global__ void mix2(Span<const u32> a, Span<const u32> b, Span<u32> x) {
    locate(a, b, x);
    for (long long i = first(); i < x.len; i += threads()) {
        x[i] = 3 * x[i] + (u32)i + read(a, i) + read(b, i);
    }
}

// Sums of the blocks' elements, by a tree in shared memory.
extern "C" __global__ void sum_blocks(Span<const u32> x, Span<u32> sums) {
    locate(x, sums);
    extern __shared__ u32 part[];
    part[threadIdx.x] = first() < x.len ? x[first()] : 0;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}

struct Line {
    float slope;
    float offset;
    long long from;
};

// y[i] = slope x[i] + offset for i >= from.
extern "C" __global__ void line(Span<const float> x, Span<float> y, Line line) {
    locate(x, y);
    for (long long i = first(); i < x.len; i += threads()) {
        if (i >= line.from) y[i] = line.slope * x[i] + line.offset;
    }
}

extern "C" __global__ void trap(Span<u32> x) {
    locate(x);
    if (x[0] == 7) __trap();
}
