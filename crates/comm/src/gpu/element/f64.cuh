// Elements of 64 bits.
#pragma once
#include "comm.cuh"

typedef double Element;
typedef u64 Bits;
#define MAGNITUDE_BITS 63u  // bits without the sign

__device__ __forceinline__ Element element_of(u64 bits) {
    return __longlong_as_double((i64)bits);
}
// All bits of NaN are set, as in number.rs.
__device__ __forceinline__ Bits magnitude(Element x) {
    Bits bits = (u64)__double_as_longlong(x) & 0x7fffffffffffffffull;
    return bits > 0x7ff0000000000000ull ? 0x7fffffffffffffffull : bits;
}
__device__ __forceinline__ Element plus(Element a, Element b) {
    return a + b;
}
__device__ __forceinline__ Element times(Element a, Element b) {
    return a * b;
}
__device__ __forceinline__ Element divided(Element a, u32 by) {
    return a / (double)by;
}
