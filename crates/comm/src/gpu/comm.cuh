// Shared by the kernels of exchanges: lanes of a warp, and searches in lists.
#pragma once
#include "meristem.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Index of padding; `lists::NONE`.
#define NONE 0xffffffffu

#define WARP 32u
#define ALL_LANES 0xffffffffu

__device__ __forceinline__ u32 lane_of() {
    return threadIdx.x % WARP;
}
// The lanes below this one.
__device__ __forceinline__ u32 lanes_below() {
    return (1u << lane_of()) - 1u;
}

// Number of entries below `index` among `len` ascending entries from `from` on.
__device__ __forceinline__ u32 lower_bound(const Span<const u32>& list, i64 from, u32 len, u32 index) {
    u32 low = 0;
    while (len > 0) {
        u32 half = len / 2;
        bool below = list[from + low + half] < index;
        low = below ? low + half + 1 : low;
        len = below ? len - half - 1 : half;
    }
    return low;
}

// Whether an ascending list has `index`, which is not NONE.
__device__ __forceinline__ bool contains(const Span<const u32>& list, u32 index) {
    u32 at = lower_bound(list, 0, (u32)list.len, index);
    return at < list.len && list[at] == index;
}

// Division of a sum by the number of ranks, as `number::divide`; `Divide` in mod.rs.
struct Divide {
    u64 reciprocal;  // bits of an element, if `by` is a power of two
    u32 by;          // 0: no division
    u32 exact;       // whether the reciprocal is exact
};
