// Products by precision: how factors are rounded, and the matrix products of tensor cores.
//
// At every precision factors are rounded one by one and sums are f32. A tensor core multiplies the
// fragments of a warp, a 16 × 8 words and b 8 × 8 words, where a word of 32 bits has one factor of
// TF32 or two of bf16, neighbours along the sum. `row` being lane / 4 and `at` lane % 4, a lane has
//
//   a: words (row, at), (row + 8, at), (row, at + 4), (row + 8, at + 4)
//   b: words (at, row), (at + 4, row), of column `row`
//   d: elements (row, 2·at), (row, 2·at + 1), (row + 8, 2·at), (row + 8, 2·at + 1)
//
// The order of the sums within one product is not documented, nor whether they are rounded one by
// one. The stand-in adds one after another.
#pragma once
#include "nn.cuh"

// Rounds to TF32, which has 10 bits of mantissa: to nearest, ties away from zero. A NaN keeps the
// first 10 bits of its mantissa. If these bits are zero, which they never are in the NaN that an
// operation returns, the NaN becomes infinite. The bits below the mantissa are not defined: a
// tensor core ignores them.
__device__ __forceinline__ u32 to_tf32(float value) {
#ifdef MERISTEM_STANDIN
    return meristem_to_tf32(value);
#else
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
#endif
}

// The rounded value as a float.
__device__ __forceinline__ float round_tf32(float value) {
    return __uint_as_float(to_tf32(value) & 0xffffe000);
}

// A factor rounded to a precision that is known at run time only: 0 is f32, 1 TF32, 2 bf16.
__device__ __forceinline__ float factor(u32 precision, float value) {
    if (precision == 0) return value;
    return precision == 1 ? round_tf32(value) : __uint_as_float(to_bf16(0.0f, value));
}

// Factors as they are, for units of f32.
struct F32 {
    static constexpr bool MATRIX = false;
    static constexpr u32 EACH = 1;  // factors of a word
    using Single = F32;             // the same factors, one to a word

    __device__ __forceinline__ static float round(float value) { return value; }

    // Puts a factor into a word of shared memory, as the word's factor number `which`.
    __device__ __forceinline__ static void put(float* word, u32, float value) { *word = value; }
};

// Factors that are rounded to TF32.
struct Tf32 {
    static constexpr bool MATRIX = true;
    static constexpr u32 EACH = 1;
    using Single = Tf32;

    __device__ __forceinline__ static float round(float value) { return round_tf32(value); }

    // A word for tensor cores.
    __device__ __forceinline__ static u32 word(const float (&v)[EACH]) { return to_tf32(v[0]); }

    __device__ __forceinline__ static void put(float* word, u32, float value) {
        *word = round(value);
    }

    // A word of factors that are rounded already.
    __device__ __forceinline__ static u32 join(const float (&v)[EACH]) {
        return __float_as_uint(v[0]);
    }

    // Adds the product of two fragments.
    __device__ __forceinline__ static void multiply(float (&d)[4], const u32 (&a)[4],
                                                    const u32 (&b)[2]) {
#ifdef MERISTEM_STANDIN
        meristem_mma_tf32(d, a, b, d);
#else
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
    }
};

// Factors that are rounded to bf16, one to a word, for sums whose neighbouring factors are not
// adjacent in memory. Every bf16 is also a TF32, so TF32 products are used.
struct Bf16Single {
    static constexpr bool MATRIX = true;
    static constexpr u32 EACH = 1;

    __device__ __forceinline__ static float round(float value) {
        return __uint_as_float(to_bf16(0.0f, value));
    }

    __device__ __forceinline__ static u32 word(const float (&v)[EACH]) {
        return to_bf16(0.0f, v[0]);
    }

    __device__ __forceinline__ static void put(float* word, u32, float value) {
        *word = round(value);
    }

    __device__ __forceinline__ static void multiply(float (&d)[4], const u32 (&a)[4],
                                                    const u32 (&b)[2]) {
        Tf32::multiply(d, a, b);
    }
};

// Factors that are rounded to bf16.
struct Bf16 {
    static constexpr bool MATRIX = true;
    static constexpr u32 EACH = 2;
    using Single = Bf16Single;

    __device__ __forceinline__ static float round(float value) { return Single::round(value); }

    __device__ __forceinline__ static void put(float* word, u32 which, float value) {
        reinterpret_cast<unsigned short*>(word)[which] = (unsigned short)to_bf16(value, 0.0f);
    }

    __device__ __forceinline__ static u32 word(const float (&v)[EACH]) {
        return to_bf16(v[0], v[1]);
    }

    __device__ __forceinline__ static u32 join(const float (&v)[EACH]) {
        return __float_as_uint(v[0]) >> 16 | (__float_as_uint(v[1]) & 0xffff0000);
    }

    __device__ __forceinline__ static void multiply(float (&d)[4], const u32 (&a)[4],
                                                    const u32 (&b)[2]) {
#ifdef MERISTEM_STANDIN
        meristem_mma_bf16(d, a, b, d);
#else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
    }
};
