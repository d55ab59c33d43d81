// Code that drawing actions and their loss share: probabilities of a head. A warp has a row. Sums
// over choices are f32 and in order, as on a processor: every lane takes the same sum.
#pragma once
#include "nn.cuh"

const u32 WARP = 0xffffffffu;
const float SMALLEST = 1.17549435e-38f;  // normal number

// A head of a policy, as `HeadValues` in policy.rs.
struct Head {
    u32 choices;
    u32 used_by;
    float floor;
    float entropy_coefficient;
    float entropy_floor;
};

__device__ __forceinline__ float ln(float x) {
    return (float)log_((double)x);
}

// The floor among n legal choices, and the probability left above it.
struct Floored {
    u32 n;
    float floor;
    float free;

    // p' of p, at least the smallest normal number, so that its logarithm is finite. NaN stays.
    __device__ __forceinline__ float of(float p) const {
        p = floor + free * p;
        return p < SMALLEST ? SMALLEST : p;
    }
};

__device__ __forceinline__ Floored floored(u32 n, float floor) {
    if (n < 2) return {n, 0.0f, 1.0f};
    floor = fminf(floor, 0.99f / (float)n);
    return {n, floor, 1.0f - (float)n * floor};
}

// A bit of a word; none beyond its end.
__device__ __forceinline__ bool has(u32 bits, u32 bit) {
    return bit < 32 && (bits >> bit & 1) == 1;
}

__device__ __forceinline__ u32 warp_sum(u32 count) {
    for (u32 step = 16; step > 0; step /= 2) count += __shfl_xor_sync(WARP, count, step);
    return count;
}

// The largest of a warp's values; NaN if one of them is.
__device__ __forceinline__ float warp_max(float value) {
    for (u32 step = 16; step > 0; step /= 2) {
        float other = __shfl_xor_sync(WARP, value, step);
        if (other > value || isnan(other)) value = other;
    }
    return value;
}

// Sum of `count` elements of shared memory that the whole warp has written.
__device__ __forceinline__ float sum_in_order(const float* terms, u32 count) {
    float sum = 0.0f;
    for (u32 i = 0; i < count; ++i) sum += terms[i];
    return sum;
}
