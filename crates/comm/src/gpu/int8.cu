// Conversion between f32 and codes of eight bits; src/int8.rs describes the format.
#include "comm.cuh"

// Elements that share a scale; the same as in src/int8.rs.
#define BLOCK 256

// Writes the scale and the codes of each block of elements, and subtracts the codes' values from
// `acc`. A warp for each block.
extern "C" __global__ void encode(Span<float> acc, Span<u8> codes, Span<float> scales) {
    locate(acc, codes, scales);
    i64 start = (i64)blockIdx.x * BLOCK;
    i64 end = start + BLOCK < acc.len ? start + BLOCK : acc.len;
    u32 most = 0;
    for (i64 i = start + lane_of(); i < end; i += WARP) {
        u32 bits = __float_as_uint(acc[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        u32 other = __shfl_xor_sync(ALL_LANES, most, step);
        most = other > most ? other : most;
    }
    bool finite = most < 0x7f800000u;
    float scale = finite ? __uint_as_float(most) / 127.0f : __uint_as_float(0x7fc00000u);
    // The rounding of a subnormal scale would not be bounded.
    if (scale < 0x1p-126f) scale = 0.0f;
    if (lane_of() == 0) scales[blockIdx.x] = scale;
    for (i64 i = start + lane_of(); i < end; i += WARP) {
        float q = 0.0f;
        if (!finite) {
            acc[i] = -0.0f;  // adding it changes no bit
        } else if (scale > 0.0f) {
            q = rintf(acc[i] / scale);
            q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
            acc[i] = acc[i] - q * scale;
        }
        codes[i] = (u8)(int)q;
    }
}

struct DecodeValues {
    Divide divide;
    u64 start;  // the element of the first value
};

__device__ __forceinline__ float divided(float x, const Divide& d) {
    if (d.by == 0) return x;
    return d.exact ? x * __uint_as_float((u32)d.reciprocal) : x / (float)d.by;
}

// values = codes times scales, divided.
extern "C" __global__ void decode(Span<const u8> codes, Span<const float> scales,
                                  Span<float> values, DecodeValues v) {
    locate(codes, scales, values);
    for (i64 i = first(); i < values.len; i += threads()) {
        i64 at = (i64)v.start + i;
        values[i] = divided((float)(signed char)codes[at] * scales[at / BLOCK], v.divide);
    }
}
