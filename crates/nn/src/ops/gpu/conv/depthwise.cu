// Depthwise convolutions: every channel has its own filter, weights [kh][kw][pad16(C)]. Consecutive
// threads have consecutive channels. A weight is multiplied with few values, too few for tensor
// cores: at every precision the f32 units multiply the rounded factors.
#include "conv.cuh"
#include "product.cuh"

extern "C" __global__ void __launch_bounds__(256)
    depthwise_forward(Span<const Value> x, Span<const float> w, Span<const float> bias,
                      Span<Value> y, Conv s) {
    locate(x, w, bias, y);
    u32 i = first();
    if (i >= y.len) return;
    u32 c = i % s.out_c, pixel = i / s.out_c, row = pixel / s.out_w;
    u32 x0 = pixel % s.out_w * s.sw - s.pw, y0 = row % s.out_h * s.sh - s.ph;
    i64 image = (i64)(row / s.out_h) * (s.in_h * s.in_w * s.in_c) + c;
    float sum = 0.0f;
    for (u32 ky = 0; ky < s.kh; ++ky) {
        for (u32 kx = 0; kx < s.kw; ++kx) {
            // Coordinates left of or above the image wrap around to large numbers.
            u32 ys = y0 + ky * s.dh, xs = x0 + kx * s.dw;
            bool inside = ys < s.in_h && xs < s.in_w;
            float v = inside ? x[image + (i64)(ys * s.in_w + xs) * s.in_c] : 0.0f;
            float weight = Product::round(w[(ky * s.kw + kx) * s.step + c]);
            sum = fmaf(Product::round(v), weight, sum);
        }
    }
    y[i] = bias.len > 0 ? sum + bias[c] : sum;
}

extern "C" __global__ void __launch_bounds__(256)
    depthwise_data(Span<const Value> dy, Span<const float> w, Span<Value> dx, Conv s) {
    locate(dy, w, dx);
    u32 i = first();
    if (i >= dx.len) return;
    u32 c = i % s.in_c, pixel = i / s.in_c, row = pixel / s.in_w;
    u32 x0 = pixel % s.in_w + s.pw, y0 = row % s.in_h + s.ph;
    i64 image = (i64)(row / s.in_h) * (s.out_h * s.out_w * s.out_c) + c;
    float sum = 0.0f;
    // Taps that reach an output pixel are th and tw apart, and their pixels oh and ow: no division
    // for each.
    u32 ky = first_tap(y0, s.sh, s.dh, s.th), kx0 = first_tap(x0, s.sw, s.dw, s.tw);
    int ys = ((int)y0 - (int)(ky * s.dh)) / (int)s.sh;
    int right = ((int)x0 - (int)(kx0 * s.dw)) / (int)s.sw;
    for (; ky < s.kh && ys >= 0; ky += s.th, ys -= (int)s.oh) {
        if ((u32)ys >= s.out_h) continue;
        int xs = right;
        for (u32 kx = kx0; kx < s.kw && xs >= 0; kx += s.tw, xs -= (int)s.ow) {
            if ((u32)xs >= s.out_w) continue;
            float v = dy[image + (i64)(ys * s.out_w + xs) * s.out_c];
            float weight = Product::round(w[(ky * s.kw + kx) * s.step + c]);
            sum = fmaf(Product::round(v), weight, sum);
        }
    }
    put(dx[i], sum, s.accumulate);
}

// Taps that are summed at a time: all of 3 × 3, and the bias, whose input is 1.
constexpr u32 TAPS = 10;

// Gradients of the weights and the bias over a part of the output pixels: [part][taps + 1][C]. Of a
// block's 8 rows of 32 threads each takes every eighth pixel; in shared memory a row has a bank for
// each thread.
extern "C" __global__ void __launch_bounds__(256)
    depthwise_weight(Span<const Value> x, Span<const Value> dy, Span<float> sums, Conv s) {
    locate(x, dy, sums);
    __shared__ float shared[TAPS][8][32];
    u32 tiles = (s.out_c + 31) / 32, t = threadIdx.x, lane = t % 32, row = t / 32, first, end;
    u32 part = blockIdx.x / tiles, c = blockIdx.x % tiles * 32 + lane, taps = s.kh * s.kw;
    part_range(s, part, first, end);
    for (u32 tap0 = 0; tap0 <= taps; tap0 += TAPS) {
        float sum[TAPS] = {};
        u32 p = first + row, px = p % s.out_w, py = p / s.out_w % s.out_h;
        u32 sample = p / s.out_w / s.out_h;
        for (; c < s.out_c && p < end; p += 8, px += 8) {
            while (px >= s.out_w) {
                px -= s.out_w;
                if (++py == s.out_h) py = 0, ++sample;
            }
            u32 ky = tap0 / s.kw, kx = tap0 % s.kw;
            u32 x0 = px * s.sw - s.pw, y0 = py * s.sh - s.ph;
            i64 image = (i64)sample * (s.in_h * s.in_w * s.in_c) + c;
            float d = dy[(i64)p * s.out_c + c], factor = Product::round(d);
#pragma unroll
            for (u32 j = 0; j < TAPS; ++j) {
                u32 ys = y0 + ky * s.dh, xs = x0 + kx * s.dw;
                bool inside = tap0 + j < taps && ys < s.in_h && xs < s.in_w;
                bool bias = tap0 + j == taps;
                float v = bias ? 1.0f : 0.0f;
                if (inside) v = Product::round(x[image + (i64)(ys * s.in_w + xs) * s.in_c]);
                sum[j] = fmaf(v, bias ? d : factor, sum[j]);
                if (++kx == s.kw) kx = 0, ++ky;
            }
        }
#pragma unroll
        for (u32 j = 0; j < TAPS; ++j) shared[j][row][lane] = sum[j];
        __syncthreads();
        for (u32 j = row; j < TAPS && tap0 + j <= taps && c < s.out_c; j += 8) {
            double all = 0.0;
            for (u32 r = 0; r < 8; ++r) all += (double)shared[j][r][lane];
            sums[((i64)part * (taps + 1) + tap0 + j) * s.out_c + c] = (float)all;
        }
        __syncthreads();
    }
}
