// What the kernels of exchanges share: numbers, with the bits of number.rs, and searches in lists.
#pragma once
#include "meristem.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Index of padding, as `lists::NONE`.
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

struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float wide(bf16 x) {
    return __uint_as_float((u32)x.bits << 16);
}
// To the nearest, ties to even; NaN stays one, as in the crate `half`.
__device__ __forceinline__ bf16 narrow(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{(u16)(bits >> 16 | 0x40u)};
    return bf16{(u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

__device__ __forceinline__ float plus(float a, float b) {
    return a + b;
}
__device__ __forceinline__ double plus(double a, double b) {
    return a + b;
}
__device__ __forceinline__ bf16 plus(bf16 a, bf16 b) {
    return narrow(wide(a) + wide(b));
}

__device__ __forceinline__ float times(float a, float b) {
    return a * b;
}
__device__ __forceinline__ double times(double a, double b) {
    return a * b;
}
__device__ __forceinline__ bf16 times(bf16 a, bf16 b) {
    return narrow(wide(a) * wide(b));
}

__device__ __forceinline__ float divided(float a, u32 by) {
    return a / (float)by;
}
__device__ __forceinline__ double divided(double a, u32 by) {
    return a / (double)by;
}
__device__ __forceinline__ bf16 divided(bf16 a, u32 by) {
    return narrow(wide(a) / (float)by);
}

// A type's magnitude: the bits without the sign.
template <class T>
struct Number;
template <>
struct Number<float> {
    typedef u32 Bits;
    static const u32 BITS = 31;
    static __device__ __forceinline__ float from_bits(u64 bits) {
        return __uint_as_float((u32)bits);
    }
    static __device__ __forceinline__ float neutral() {
        return -0.0f;
    }
};
template <>
struct Number<double> {
    typedef u64 Bits;
    static const u32 BITS = 63;
    static __device__ __forceinline__ double from_bits(u64 bits) {
        return __longlong_as_double((i64)bits);
    }
    static __device__ __forceinline__ double neutral() {
        return -0.0;
    }
};
template <>
struct Number<bf16> {
    typedef u32 Bits;
    static const u32 BITS = 15;
    static __device__ __forceinline__ bf16 from_bits(u64 bits) {
        return bf16{(u16)bits};
    }
    static __device__ __forceinline__ bf16 neutral() {
        return bf16{0x8000};
    }
};

__device__ __forceinline__ u32 magnitude(float x) {
    return __float_as_uint(x) & 0x7fffffffu;
}
__device__ __forceinline__ u64 magnitude(double x) {
    return (u64)__double_as_longlong(x) & 0x7fffffffffffffffull;
}
__device__ __forceinline__ u32 magnitude(bf16 x) {
    return x.bits & 0x7fffu;
}

template <class T>
__device__ __forceinline__ T zero() {
    return Number<T>::from_bits(0);
}

// Division of a sum by the number of ranks, as `number::divide`: `Divide` of mod.rs.
struct Divide {
    u64 reciprocal;  // bits of a number of the type, if `by` is a power of two
    u32 by;          // 0: no division
    u32 exact;       // whether the reciprocal is exact
};

template <class T>
__device__ __forceinline__ T divide(T x, const Divide& d) {
    if (d.by == 0) return x;
    return d.exact ? times(x, Number<T>::from_bits(d.reciprocal)) : divided(x, d.by);
}

// Number of entries below `index` among the `len` ascending ones from `from` on.
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

// Whether an ascending list has the index, which is not NONE.
__device__ __forceinline__ bool contains(const Span<const u32>& list, u32 index) {
    u32 at = lower_bound(list, 0, (u32)list.len, index);
    return at < list.len && list[at] == index;
}
