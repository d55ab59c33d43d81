// Elements of 16 bits with the exponent of f32; every operation rounds its result.
#pragma once
#include "comm.cuh"

struct Element {
    u16 bits;
};
typedef u32 Bits;
#define MAGNITUDE_BITS 15u  // bits without the sign

__device__ __forceinline__ Element element_of(u64 bits) {
    return {(u16)bits};
}
// All bits of NaN are set, as in number.rs.
__device__ __forceinline__ Bits magnitude(Element x) {
    Bits bits = x.bits & 0x7fffu;
    return bits > 0x7f80u ? 0x7fffu : bits;
}
__device__ __forceinline__ float wide(Element x) {
    return __uint_as_float((u32)x.bits << 16);
}
// Rounds to nearest, ties to even; NaN stays NaN, as in the crate `half`.
__device__ __forceinline__ Element narrow(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {(u16)(bits >> 16 | 0x40u)};
    return {(u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
__device__ __forceinline__ Element plus(Element a, Element b) {
    return narrow(wide(a) + wide(b));
}
__device__ __forceinline__ Element times(Element a, Element b) {
    return narrow(wide(a) * wide(b));
}
__device__ __forceinline__ Element divided(Element a, u32 by) {
    return narrow(wide(a) / (float)by);
}
