// Elements of 32 bits.
#pragma once
#include "comm.cuh"

typedef float Element;
typedef u32 Bits;
#define MAGNITUDE_BITS 31u  // bits without the sign

__device__ __forceinline__ Element element_of(u64 bits) {
    return __uint_as_float((u32)bits);
}
// All bits of NaN are set, as in number.rs.
__device__ __forceinline__ Bits magnitude(Element x) {
    Bits bits = __float_as_uint(x) & 0x7fffffffu;
    return bits > 0x7f800000u ? 0x7fffffffu : bits;
}
__device__ __forceinline__ Element plus(Element a, Element b) {
    return a + b;
}
__device__ __forceinline__ Element times(Element a, Element b) {
    return a * b;
}
__device__ __forceinline__ Element divided(Element a, u32 by) {
    return a / (float)by;
}
