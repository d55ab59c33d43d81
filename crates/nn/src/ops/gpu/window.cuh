// Products of 3 × 3 windows with stride 1, which convolutions and stages share.
#pragma once
#include "nn.cuh"

// Adds a channel's window products for 2 rows of 4 pixels and 8 channels. The threads of a warp
// read the same weights. Their quads of pixels lie side by side in a row; rows of narrow tiles may
// meet in a bank, which is little beside 576 multiplications for 26 reads.
__device__ __forceinline__ void multiply(const float* x, u32 pitch, const float* w, u32 cols,
                                         float (&sum)[2][4][8]) {
    float v[4][6];
#pragma unroll
    for (u32 r = 0; r < 4; ++r) {
        float4 a = *reinterpret_cast<const float4*>(x + r * pitch);
        float2 b = *reinterpret_cast<const float2*>(x + r * pitch + 4);
        v[r][0] = a.x, v[r][1] = a.y, v[r][2] = a.z, v[r][3] = a.w, v[r][4] = b.x, v[r][5] = b.y;
    }
#pragma unroll
    for (u32 tap = 0; tap < 9; ++tap) {
        float4 a = *reinterpret_cast<const float4*>(w + tap * cols);
        float4 b = *reinterpret_cast<const float4*>(w + tap * cols + 4);
        float of[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            float here = v[i / 4 + tap / 3][i % 4 + tap % 3];
#pragma unroll
            for (u32 k = 0; k < 8; ++k) {
                sum[i / 4][i % 4][k] = fmaf(here, of[k], sum[i / 4][i % 4][k]);
            }
        }
    }
}

// Adds a row's products of one channel's windows with 8 channels of the gradient: 9 taps × 8. Four
// pixels at a time, whose windows overlap. A warp has up to 8 channels and four rows: planes are 4
// banks apart and rows an odd number, so that no bank comes twice, and of the gradient's rows,
// which are 8 banks apart, it reads the same 8 channels.
__device__ __forceinline__ void row_products(const float* x, u32 pitch, const float* dy, u32 cols,
                                             u32 width, float (&sum)[9][8]) {
    float v[3][6];
#pragma unroll
    for (u32 r = 0; r < 3; ++r) v[r][4] = x[r * pitch], v[r][5] = x[r * pitch + 1];
    for (u32 px = 0; px < width; px += 4) {
#pragma unroll
        for (u32 r = 0; r < 3; ++r) {
            v[r][0] = v[r][4], v[r][1] = v[r][5];
#pragma unroll
            for (u32 j = 2; j < 6; ++j) v[r][j] = x[r * pitch + px + j];
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            float4 a = *reinterpret_cast<const float4*>(dy + (px + j) * cols);
            float4 b = *reinterpret_cast<const float4*>(dy + (px + j) * cols + 4);
            float of[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (u32 tap = 0; tap < 9; ++tap) {
                float here = v[tap / 3][j + tap % 3];
#pragma unroll
                for (u32 k = 0; k < 8; ++k) sum[tap][k] = fmaf(here, of[k], sum[tap][k]);
            }
        }
    }
}
