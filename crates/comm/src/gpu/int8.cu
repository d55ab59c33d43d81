// Elements of eight bits; int8.rs describes the format.
#include "number.cuh"

// Elements that share a scale; the same as in int8.rs.
#define BLOCK 256

// A warp for each block: its scale, its codes, and the elements without the codes' values.
extern "C" __global__ void encode(Span<Element> acc, Span<u8> codes, Span<Element> scales) {
    locate(acc, codes, scales);
    i64 start = (i64)blockIdx.x * BLOCK;
    i64 end = start + BLOCK < acc.len ? start + BLOCK : acc.len;
    u32 most = 0;
    for (i64 i = start + lane_of(); i < end; i += WARP) {
        u32 bits = magnitude(acc[i]);
        most = bits > most ? bits : most;
    }
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        u32 other = __shfl_xor_sync(ALL_LANES, most, step);
        most = other > most ? other : most;
    }
    bool finite = most < 0x7f800000u;
    float scale = finite ? __uint_as_float(most) / 127.0f : __uint_as_float(0x7fc00000u);
    // A subnormal scale has no bounded rounding.
    if (scale < 0x1p-126f) scale = 0.0f;
    if (lane_of() == 0) scales[blockIdx.x] = scale;
    for (i64 i = start + lane_of(); i < end; i += WARP) {
        float q = 0.0f;
        if (!finite) {
            acc[i] = neutral();
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

// values = codes times scales, divided.
extern "C" __global__ void decode(Span<const u8> codes, Span<const Element> scales,
                                  Span<Element> values, DecodeValues v) {
    locate(codes, scales, values);
    for (i64 i = first(); i < values.len; i += threads()) {
        i64 at = (i64)v.start + i;
        values[i] = divide((float)(signed char)codes[at] * scales[at / BLOCK], v.divide);
    }
}
