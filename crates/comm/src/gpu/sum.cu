// Dense sums in rank order, and copies between ranks that share a device.
#include "comm.cuh"

// Tensors of one call, as `sum::MOST` in sum.rs.
#define MOST 8

struct SumValues {
    Divide divide;
    u32 sources;
    u32 targets;
};

template <class T>
struct Sources {
    Span<const T> of[MOST];
};
template <class T>
struct Targets {
    Span<T> of[MOST];
};

// Elements of a thread, read together: enough loads in flight to keep memory busy.
#define EACH 4

// targets = sources[0] + sources[1] + …, from left to right. A target may be a source: each element is
// read before it is written, by one thread.
template <class T>
__device__ __forceinline__ void sum(const Sources<T>& sources, const Targets<T>& targets,
                                    const SumValues& v) {
    i64 len = targets.of[0].len, start = (i64)blockIdx.x * blockDim.x * EACH + threadIdx.x;
    T total[EACH];
#pragma unroll
    for (u32 s = 0; s < MOST; s++) {
        if (s >= v.sources) break;
#pragma unroll
        for (u32 e = 0; e < EACH; e++) {
            i64 i = start + e * blockDim.x;
            if (i >= len) continue;
            T x = sources.of[s][i];
            total[e] = s == 0 ? x : plus(total[e], x);
        }
    }
#pragma unroll
    for (u32 t = 0; t < MOST; t++) {
        if (t >= v.targets) break;
#pragma unroll
        for (u32 e = 0; e < EACH; e++) {
            i64 i = start + e * blockDim.x;
            if (i < len) targets.of[t][i] = divide(total[e], v.divide);
        }
    }
}

extern "C" __global__ void sum_f32(Span<const float> a, Span<const float> b, Span<const float> c,
                                   Span<const float> d, Span<const float> e, Span<const float> f,
                                   Span<const float> g, Span<const float> h, Span<float> s,
                                   Span<float> t, Span<float> u, Span<float> v, Span<float> w,
                                   Span<float> x, Span<float> y, Span<float> z, SumValues values) {
    locate(a, b, c, d, e, f, g, h, s, t, u, v, w, x, y, z);
    sum<float>({{a, b, c, d, e, f, g, h}}, {{s, t, u, v, w, x, y, z}}, values);
}
extern "C" __global__ void sum_f64(Span<const double> a, Span<const double> b,
                                   Span<const double> c, Span<const double> d,
                                   Span<const double> e, Span<const double> f,
                                   Span<const double> g, Span<const double> h, Span<double> s,
                                   Span<double> t, Span<double> u, Span<double> v, Span<double> w,
                                   Span<double> x, Span<double> y, Span<double> z,
                                   SumValues values) {
    locate(a, b, c, d, e, f, g, h, s, t, u, v, w, x, y, z);
    sum<double>({{a, b, c, d, e, f, g, h}}, {{s, t, u, v, w, x, y, z}}, values);
}
extern "C" __global__ void sum_bf16(Span<const bf16> a, Span<const bf16> b, Span<const bf16> c,
                                    Span<const bf16> d, Span<const bf16> e, Span<const bf16> f,
                                    Span<const bf16> g, Span<const bf16> h, Span<bf16> s,
                                    Span<bf16> t, Span<bf16> u, Span<bf16> v, Span<bf16> w,
                                    Span<bf16> x, Span<bf16> y, Span<bf16> z, SumValues values) {
    locate(a, b, c, d, e, f, g, h, s, t, u, v, w, x, y, z);
    sum<bf16>({{a, b, c, d, e, f, g, h}}, {{s, t, u, v, w, x, y, z}}, values);
}

// Bytes that a block copies, as in sum.rs.
#define CHUNK 16384

// Copies whole units and then the bytes that are left.
template <class Unit>
__device__ __forceinline__ void copy_units(u8* to, const u8* from, u32 bytes) {
    u32 units = bytes / (u32)sizeof(Unit);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < units; i += blockDim.x) ((Unit*)to)[i] = ((const Unit*)from)[i];
    for (u32 i = units * (u32)sizeof(Unit) + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

// Blocks of each copy, summed up.
struct CopyValues {
    u32 ends[4];
};

// Copies some tensors; each block a chunk of one.
extern "C" __global__ void copy(Span<const u8> a, Span<const u8> b, Span<const u8> c,
                                Span<const u8> d, Span<u8> w, Span<u8> x, Span<u8> y, Span<u8> z,
                                CopyValues v) {
    locate(a, b, c, d, w, x, y, z);
    u32 block = blockIdx.x, before = 0;
    Span<const u8> from = a;
    Span<u8> to = w;
    if (block >= v.ends[0]) from = b, to = x, before = v.ends[0];
    if (block >= v.ends[1]) from = c, to = y, before = v.ends[1];
    if (block >= v.ends[2]) from = d, to = z, before = v.ends[2];
    i64 start = (i64)(block - before) * CHUNK;
    u32 bytes = (u32)(to.len - start < CHUNK ? to.len - start : CHUNK);
    u8* target = &to[start];
    const u8* source = &from[start];
    // The widest loads and stores for which both are aligned.
    u64 both = (u64)target | (u64)source;
    if (both % 16 == 0) return copy_units<uint4>(target, source, bytes);
    if (both % 4 == 0) return copy_units<u32>(target, source, bytes);
    if (both % 2 == 0) return copy_units<u16>(target, source, bytes);
    copy_units<u8>(target, source, bytes);
}
