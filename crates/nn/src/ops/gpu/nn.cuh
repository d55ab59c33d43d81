// Functions and types that all kernels of networks share.
#pragma once
#include "meristem.cuh"

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Channels of packed weights are padded to a multiple of 16 (`kernels::PAD`).
__device__ __forceinline__ u32 pad16(u32 channels) {
    return (channels + 15) / 16 * 16;
}

// Division by a number that the host knows, as a multiplication and a shift (divisor.rs); for
// numbers below 2^31.
struct Divisor {
    u32 by;
    u32 magic;
    u32 shift;

    // The quotient; the rest goes to `rest`.
    __device__ __forceinline__ u32 divide(u32 n, u32& rest) const {
        u32 quotient = (__umulhi(n, magic) + n) >> shift;
        rest = n - quotient * by;
        return quotient;
    }
};

// Rounds two values to bf16, which has 7 bits of mantissa: to nearest, ties to even. All NaN become
// the same bits.
__device__ __forceinline__ u32 to_bf16(float low, float high) {
#ifdef MERISTEM_STANDIN
    auto half = [](float value) {
        u32 bits = __float_as_uint(value);
        return isnan(value) ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return half(high) << 16 | half(low);
#else
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#endif
}

// An element of memory that is stored as bf16. It is read as the f32 with the same value, and an
// f32 that is written is rounded. All kernels compute in f32 or f64, so they are the same for
// either type of element. `Value` is the type of the elements of activations and of their
// gradients: a source includes a header of the folder `value` or `product`, which defines it.
struct StoredBf16 {
    unsigned short bits;

    __device__ __forceinline__ operator float() const { return __uint_as_float((u32)bits << 16); }

    __device__ __forceinline__ void operator=(float value) {
        bits = (unsigned short)to_bf16(value, 0.0f);
    }
};

// What a value is once it has been stored as an element of type T and read again. Sums over values
// that are stored, such as batch statistics, are sums of these, so that later kernels that read the
// values compute with the values that were summed.
template <class T>
__device__ __forceinline__ float as_stored(float value) {
    T element;
    element = value;
    return element;
}

// Writes a value, or adds it to the element.
template <class T>
__device__ __forceinline__ void put(T& to, float value, bool accumulate) {
    to = accumulate ? to + value : value;
}

// Four elements of shared memory, at once.
__device__ __forceinline__ void load4(const float* from, float* v) {
    float4 four = *reinterpret_cast<const float4*>(from);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}

// Two elements, at an address that is a multiple of 8 bytes.
__device__ __forceinline__ void load2(const float* from, float* v) {
    float2 two = *reinterpret_cast<const float2*>(from);
    v[0] = two.x, v[1] = two.y;
}

// Transcendental functions with the bits of kernels/math.rs.

__device__ __forceinline__ float power_of_2(int e) {
    return __int_as_float((e + 127) << 23);
}

// e^x in parts: 2^n (1 + m).
struct ExpParts {
    float m;
    int n;
};

__device__ __forceinline__ ExpParts exp_parts(float x) {
    const float ROUND = 12582912.0f;
    float shifted = x * 1.44269504088896341f + ROUND;
    float n = shifted - ROUND;
    float r = (x - n * 0.6933594f) - n * -2.1219444e-4f;
    float p = 1.9875691e-4f;
    p = p * r + 1.3981999e-3f;
    p = p * r + 8.333452e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 0.5f;
    return {p * (r * r) + r, __float_as_int(shifted) - __float_as_int(ROUND)};
}

// e^x within 2 ulp; 0 below, infinity above, NaN for NaN.
__device__ __forceinline__ float exp_(float x) {
    float clamped = x < -87.33654f ? -87.33654f : x;
    clamped = clamped > 88.72283f ? 88.72283f : clamped;
    ExpParts e = exp_parts(clamped);
    int half = e.n >> 1;
    float y = (e.m + 1.0f) * power_of_2(half) * power_of_2(e.n - half);
    y = x < -87.33654f ? 0.0f : y;
    return x > 88.72283f ? __int_as_float(0x7f800000) : y;
}

__device__ __forceinline__ float tanh_(float x) {
    float a = fabsf(x), z = x * x;
    float p = -5.7049885e-3f;
    p = p * z + 2.063909e-2f;
    p = p * z + -5.3739716e-2f;
    p = p * z + 1.3331442e-1f;
    p = p * z + -3.333328e-1f;
    float small = p * z * x + x;
    float large = 1.0f - 2.0f / (exp_(2.0f * a) + 1.0f);
    large = x < 0.0f ? -large : large;
    return a < 0.625f ? small : large;
}

__device__ __forceinline__ float sigmoid_(float x) {
    return 1.0f / (1.0f + exp_(-x));
}

// A sigmoid with its derivative.
struct Sigmoid {
    float value;
    float slope;
};

__device__ __forceinline__ Sigmoid sigmoid_with_slope(float x) {
    float e = exp_(-fabsf(x)), q = 1.0f / (1.0f + e), below = e * q;
    return {x < 0.0f ? below : q, below * q};
}

// ln(1 + u) for 0 <= u <= 1.
__device__ __forceinline__ float ln_1p_(float u) {
    float s = u / (2.0f + u), z = s * s;
    float q = 2.8024453e-1f;
    q = q * z + 2.7999142e-1f;
    q = q * z + 4.00217e-1f;
    q = q * z + 6.666641e-1f;
    return (s + s) + s * (z * q);
}

// Natural logarithm, within 1 ulp, in plain arithmetic so that every device has the same bits;
// reduction and coefficients as in FreeBSD's msun (e_log.c).
__device__ __forceinline__ double log_(double x) {
    const i64 ROOT_HALF = 0x3fe6a09e667f3bcdll;
    if (!(x > 0.0)) {
        return __longlong_as_double(x == 0.0 ? 0xfff0000000000000ll : 0x7ff8000000000000ll);
    }
    if (__double_as_longlong(x) >= 0x7ff0000000000000ll) return x;  // infinity
    bool subnormal = x < 2.2250738585072014e-308;
    i64 bits = __double_as_longlong(subnormal ? x * 18014398509481984.0 : x);  // times 2^54
    // x = 2^k·m, m in [√½, √2).
    i64 shifted = bits - ROOT_HALF;
    i64 k = shifted >> 52;
    double m = __longlong_as_double(bits - (k << 52));
    double n = (double)(subnormal ? k - 54 : k);
    double f = m - 1.0, half = 0.5 * f * f, s = f / (2.0 + f), z = s * s, w = z * z;
    double even = w * (3.999999999940941908e-01 +
                       w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    double odd =
        z * (6.666666666666735130e-01 +
             w * (2.857142874366239149e-01 +
                  w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    return s * (half + (odd + even)) + n * 1.90821492927058770002e-10 - half + f +
           n * 6.93147180369123816490e-01;
}

// Sum over the threads of a block, a power of two of them, in an order that depends on their number
// alone: a tree in shared memory. Neighbouring threads add neighbouring elements, without bank
// conflicts.
// Every thread gets it. `part` has an element for each thread.
template <class T>
__device__ T block_sum(T value, T* part) {
    part[threadIdx.x] = value;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    T sum = part[0];
    __syncthreads();  // `part` may be used again
    return sum;
}

// Sum of each column of a block whose threads are rows of `columns` threads, both powers of two, by
// the same kind of tree. Every thread gets the sum of its column; `part` begins with the sums of
// all columns until it is used again.
template <class T>
__device__ T column_sum(T value, T* part, u32 columns) {
    __syncthreads();  // `part` may still be read
    part[threadIdx.x] = value;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half >= columns; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    return part[threadIdx.x & (columns - 1)];
}

// A block that sums over the pixels of a sample: `columns` channels side by side, a power of two up
// to 32, so that a warp reads rows of them; the rows of threads share the pixels.
struct OverPixels {
    u32 sample, channel;
    u32 row, rows;

    __device__ __forceinline__ OverPixels(u32 columns, u32 channels) {
        u32 log = __popc(columns - 1), across = (channels + columns - 1) >> log;
        sample = blockIdx.x / across;
        channel = (blockIdx.x - sample * across) * columns + (threadIdx.x & (columns - 1));
        row = threadIdx.x >> log, rows = blockDim.x >> log;
    }
};

// Two sums that are taken together.
struct Pair {
    double a;
    double b;

    __device__ __forceinline__ void operator+=(const Pair& other) {
        a += other.a;
        b += other.b;
    }
};
