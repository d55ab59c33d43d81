// Copies between ranks that share a device.
#include "comm.cuh"

// Bytes per block; the same as in copy.rs.
#define CHUNK 16384

// Copies whole units, then the remaining bytes.
template <class Unit>
__device__ __forceinline__ void copy_units(u8* to, const u8* from, u32 bytes) {
    u32 units = bytes / (u32)sizeof(Unit);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < units; i += blockDim.x) ((Unit*)to)[i] = ((const Unit*)from)[i];
    for (u32 i = units * (u32)sizeof(Unit) + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

// Cumulative number of blocks per copy.
struct CopyValues {
    u32 ends[4];
};

// Copies several tensors, one chunk per block.
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
    // The widest loads and stores for which both addresses are aligned.
    u64 both = (u64)target | (u64)source;
    if (both % 16 == 0) return copy_units<uint4>(target, source, bytes);
    if (both % 4 == 0) return copy_units<u32>(target, source, bytes);
    if (both % 2 == 0) return copy_units<u16>(target, source, bytes);
    copy_units<u8>(target, source, bytes);
}
