// Dense sums in rank order.
#include "number.cuh"

// Largest number of sources, and of targets, per call; `MOST` in sum.rs.
#define MOST 8

struct SumValues {
    Divide divide;
    u32 sources;
    u32 targets;
};

// Elements per thread, read together: enough loads in flight to saturate memory.
#define EACH 4

// targets = sources[0] + sources[1] + …, from left to right. A target may be a source: one thread
// reads each element before it writes it.
__device__ __forceinline__ void sum_up(const Span<const Element> (&sources)[MOST],
                                       const Span<Element> (&targets)[MOST], const SumValues& v) {
    i64 len = targets[0].len, start = (i64)blockIdx.x * blockDim.x * EACH + threadIdx.x;
    Element total[EACH];
#pragma unroll
    for (u32 s = 0; s < MOST; s++) {
        if (s >= v.sources) break;
#pragma unroll
        for (u32 e = 0; e < EACH; e++) {
            i64 i = start + e * blockDim.x;
            if (i >= len) continue;
            Element x = sources[s][i];
            total[e] = s == 0 ? x : plus(total[e], x);
        }
    }
#pragma unroll
    for (u32 t = 0; t < MOST; t++) {
        if (t >= v.targets) break;
#pragma unroll
        for (u32 e = 0; e < EACH; e++) {
            i64 i = start + e * blockDim.x;
            if (i < len) targets[t][i] = divide(total[e], v.divide);
        }
    }
}

typedef Span<const Element> From;
typedef Span<Element> To;

extern "C" __global__ void sum(From a, From b, From c, From d, From e, From f, From g, From h, To s,
                               To t, To u, To v, To w, To x, To y, To z, SumValues values) {
    locate(a, b, c, d, e, f, g, h, s, t, u, v, w, x, y, z);
    sum_up({a, b, c, d, e, f, g, h}, {s, t, u, v, w, x, y, z}, values);
}
