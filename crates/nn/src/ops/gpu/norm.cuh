// Code that the norms share: sums of [chunks][2][C], and the formulas of [C].
#pragma once
#include "nn.cuh"

const u32 THREADS = 512;  // most of a block
const u32 BATCH = 4;      // loads that a thread has in flight before it writes

// How partial sums are added up: a block has `columns` channels.
struct Finish {
    double count;  // values of a channel
    u32 c;
    u32 columns;
    u32 chunks;
    float eps;
};

// The thread's channel; at least `c` for a thread without a channel.
__device__ __forceinline__ u32 finished_channel(const Finish& of) {
    return blockIdx.x * of.columns + (threadIdx.x & (of.columns - 1));
}

// The sums of the thread's channel over all chunks; zeros for a thread without a channel.
__device__ Pair finish(Span<const double> partial, const Finish& of) {
    __shared__ Pair part[THREADS];
    u32 channel = finished_channel(of), log = __popc(of.columns - 1);
    Pair sums = {0.0, 0.0};
    if (channel < of.c) {
#pragma unroll 4
        for (u32 k = threadIdx.x >> log; k < of.chunks; k += blockDim.x >> log) {
            sums.a += partial[(i64)(2 * k) * of.c + channel];
            sums.b += partial[(i64)(2 * k + 1) * of.c + channel];
        }
    }
    return column_sum(sums, part, of.columns);
}

// Per-channel coefficients of the normalisation.
struct Affine {
    float mean;
    float scale;
    float beta;

    // The value z before the activation. The activation is `z <= floor ? floor : z`, which lets NaN
    // pass.
    __device__ __forceinline__ float operator()(float x) const {
        return (x - mean) * scale + beta;
    }
};

// dx = dz·scale - (offset + (x - mean)·slope).
struct Slopes {
    float offset;
    float slope;

    __device__ __forceinline__ float operator()(float dz, float x, const Affine& z) const {
        return dz * z.scale - ((x - z.mean) * slope + offset);
    }
};
