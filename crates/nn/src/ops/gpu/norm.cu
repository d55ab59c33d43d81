// Batch norm, alone or fused with ReLU and pooling (kernels/norm/batch.rs).
//
// A block has a tile of [pixels][C]: `columns` channels side by side, so that a warp reads rows of
// memory, and `chunk` pixels, which its rows of threads share. Sums are f64 throughout; a block
// leaves both sums of each channel in `partial` [chunks][2][C], and a second kernel adds them up.
// The value that decides a ReLU and the maximum of a window is computed without `fmaf`, by one
// function, so that all passes agree. A processor with fused multiply-add may decide differently.
#include "tiles.cuh"
#include "value.cuh"

const u32 BLOCKED = 4;  // code of a window whose ReLU passes no gradient

// Shape and options of a batch norm; `tiles` is over the pixels that the kernel runs through.
struct Batch {
    Tiles tiles;
    Divisor across;  // windows of 2 x 2 in a row, if the kernel runs through windows
    Divisor down;    // and rows of them
    u32 h;
    u32 w;
    float eps;
    float floor;  // 0 for a ReLU, -infinity for none
    u32 accumulate;
};

// Sums of the distance from the first pixel's value, and of its square. In a constant channel all
// distances, and so the variance, are exactly 0; elsewhere f64 is exact enough.
extern "C" __global__ void __launch_bounds__(256)
    batch_sums(Span<const Value> x, Span<double> partial, Tiles of) {
    locate(x, partial);
    Tile at(of);
    double shift = at.channel < of.c ? (double)x[at.channel] : 0.0;
    Pair sums = {0.0, 0.0};
#pragma unroll 4
    for (u32 p = at.first; p < at.end; p += at.rows) {
        double d = (double)x[(i64)p * of.c + at.channel] - shift;
        sums.a += d;
        sums.b = fma(d, d, sums.b);
    }
    leave(sums, at, of.c, partial);
}

extern "C" __global__ void __launch_bounds__(512)
    batch_moments(Span<const Value> x, Span<const double> partial, Span<float> mean,
                  Span<float> var, Finish of) {
    locate(x, partial, mean, var);
    Pair sums = finish(partial, of);
    u32 channel = finished_channel(of);
    if (threadIdx.x >= of.columns || channel >= of.c) return;
    double offset = sums.a / of.count;
    double v = sums.b / of.count - offset * offset;
    mean[channel] = (float)((double)x[channel] + offset);
    // Rounding may leave it slightly below 0; NaN stays.
    var[channel] = v < 0.0 ? 0.0f : (float)v;
}

struct Running {
    float momentum;
    float rest;  // 1 - momentum
    float unbiased;
};

extern "C" __global__ void __launch_bounds__(256)
    update_running(Span<const float> mean, Span<const float> var, Span<float> running_mean,
                   Span<float> running_var, Span<i64> batches, Running of) {
    locate(mean, var, running_mean, running_var, batches);
    i64 i = first();
    if (i < mean.len) {
        running_mean[i] = of.rest * running_mean[i] + of.momentum * mean[i];
        running_var[i] = of.rest * running_var[i] + of.momentum * (var[i] * of.unbiased);
    }
    if (i == 0) batches[0] += 1;
}

__device__ __forceinline__ float scale_of(float gamma, float var, float eps) {
    return (float)((double)gamma / sqrt((double)var + (double)eps));
}

// Coefficients of the thread's channel: a root and a division in f64, once for a channel of a
// block.
__device__ Affine affine(Span<const float> mean, Span<const float> var, Span<const float> gamma,
                         Span<const float> beta, const Tile& at, const Batch& of) {
    __shared__ float scales[32];
    u32 column = threadIdx.x & (of.tiles.columns - 1);
    bool inside = at.channel < of.tiles.c;
    if (at.row == 0 && inside) {
        scales[column] = scale_of(gamma[at.channel], var[at.channel], of.eps);
    }
    __syncthreads();
    if (!inside) return {0.0f, 0.0f, 0.0f};
    return {mean[at.channel], scales[column], beta[at.channel]};
}

extern "C" __global__ void __launch_bounds__(256)
    batch_forward(Span<const Value> x, Span<const float> mean, Span<const float> var,
                  Span<const float> gamma, Span<const float> beta, Span<Value> y, Batch of) {
    locate(x, mean, var, gamma, beta, y);
    Tile at(of.tiles);
    Affine z = affine(mean, var, gamma, beta, at, of);
    for (u32 p = at.first; p < at.end; p += BATCH * at.rows) {
        float v[BATCH];
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k) {
            i64 pixel = p + k * at.rows;
            if (pixel < at.end) v[k] = x[pixel * of.tiles.c + at.channel];
        }
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k) {
            i64 pixel = p + k * at.rows;
            if (pixel >= at.end) continue;
            float value = z(v[k]);
            y[pixel * of.tiles.c + at.channel] = value <= of.floor ? of.floor : value;
        }
    }
}

// First element of a window.
__device__ __forceinline__ i64 window(u32 p, u32 channel, const Batch& of) {
    u32 x, y, n = of.down.divide(of.across.divide(p, x), y);
    return (i64)((n * of.h + 2 * y) * of.w + 2 * x) * of.tiles.c + channel;
}

extern "C" __global__ void __launch_bounds__(256)
    batch_forward_pooled(Span<const Value> x, Span<const float> mean, Span<const float> var,
                         Span<const float> gamma, Span<const float> beta, Span<Value> y,
                         Span<u8> codes, Batch of) {
    locate(x, mean, var, gamma, beta, y, codes);
    Tile at(of.tiles);
    Affine z = affine(mean, var, gamma, beta, at, of);
    u32 c = of.tiles.c, row = of.w * c;
    for (u32 p = at.first; p < at.end; p += at.rows) {
        i64 from = window(p, at.channel, of), to = (i64)p * c + at.channel;
        float v[4] = {x[from], x[from + c], x[from + row], x[from + row + c]};
        float best = z(v[0]);
        u32 code = 0;
#pragma unroll
        for (u32 k = 1; k < 4; ++k) {
            float value = z(v[k]);
            if (value > best || isnan(value)) {
                best = value;
                code = k;
            }
        }
        bool blocked = best <= of.floor;
        if (codes.len > 0) codes[to] = (u8)(blocked ? BLOCKED : code);
        y[to] = blocked ? of.floor : best;
    }
}

// Sums of dz and of dz·(x - mean), where dz is dy where the activation lets it pass, else 0.
extern "C" __global__ void __launch_bounds__(256)
    batch_gradient_sums(Span<const Value> x, Span<const float> mean, Span<const float> var,
                        Span<const float> gamma, Span<const float> beta, Span<const Value> dy,
                        Span<double> partial, Batch of) {
    locate(x, mean, var, gamma, beta, dy, partial);
    Tile at(of.tiles);
    Affine z = affine(mean, var, gamma, beta, at, of);
    Pair sums = {0.0, 0.0};
#pragma unroll 4
    for (u32 p = at.first; p < at.end; p += at.rows) {
        i64 i = (i64)p * of.tiles.c + at.channel;
        float v = x[i];
        double dz = z(v) <= of.floor ? 0.0 : (double)dy[i];
        sums.a += dz;
        sums.b = fma(dz, (double)(v - z.mean), sums.b);
    }
    leave(sums, at, of.tiles.c, partial);
}

// The same through a pool, over outputs: a code names the pixel that an output came from. For a
// blocked window dz is 0, and x is read at the last pixel, as on the processor: it matters only if
// it is infinite or NaN.
extern "C" __global__ void __launch_bounds__(256)
    batch_gradient_sums_pooled(Span<const Value> x, Span<const float> mean, Span<const Value> dy,
                               Span<const u8> codes, Span<double> partial, Batch of) {
    locate(x, mean, dy, codes, partial);
    Tile at(of.tiles);
    u32 c = of.tiles.c, row = of.w * c;
    float centre = at.channel < c ? mean[at.channel] : 0.0f;
    Pair sums = {0.0, 0.0};
#pragma unroll 4
    for (u32 p = at.first; p < at.end; p += at.rows) {
        i64 i = (i64)p * c + at.channel;
        u32 code = codes[i], from = min(code, 3u);
        double dz = code == BLOCKED ? 0.0 : (double)dy[i];
        i64 pixel = window(p, at.channel, of) + from % 2 * c + from / 2 * row;
        sums.a += dz;
        sums.b = fma(dz, (double)(x[pixel] - centre), sums.b);
    }
    leave(sums, at, c, partial);
}

// From the sums to the parameters' gradients, and to the `coefficients` [3][C] of the input's
// gradient: scale, offset and slope.
extern "C" __global__ void __launch_bounds__(512)
    batch_coefficients(Span<const double> partial, Span<const float> var, Span<const float> gamma,
                       Span<float> dgamma, Span<float> dbeta, Span<float> coefficients, Finish of) {
    locate(partial, var, gamma, dgamma, dbeta, coefficients);
    Pair sums = finish(partial, of);
    u32 i = finished_channel(of);
    if (threadIdx.x >= of.columns || i >= of.c) return;
    double deviation = sqrt((double)var[i] + (double)of.eps), dot = sums.b / deviation;
    float scale = scale_of(gamma[i], var[i], of.eps);
    dbeta[i] += (float)sums.a;
    dgamma[i] += (float)dot;
    coefficients[i] = scale;
    coefficients[of.c + i] = (float)((double)scale * sums.a / of.count);
    coefficients[2 * of.c + i] = (float)((double)scale * dot / deviation / of.count);
}

extern "C" __global__ void __launch_bounds__(256)
    batch_input_gradient(Span<const Value> x, Span<const float> mean, Span<const float> beta,
                         Span<const float> coefficients, Span<const Value> dy, Span<Value> dx,
                         Batch of) {
    locate(x, mean, beta, coefficients, dy, dx);
    Tile at(of.tiles);
    u32 c = of.tiles.c, i = at.channel;
    if (i >= c) return;
    Affine z = {mean[i], coefficients[i], beta[i]};
    Slopes slopes = {coefficients[c + i], coefficients[2 * c + i]};
    for (u32 p = at.first; p < at.end; p += BATCH * at.rows) {
        float v[BATCH], d[BATCH];
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k) {
            i64 pixel = p + k * at.rows;
            if (pixel >= at.end) continue;
            v[k] = x[pixel * c + i];
            d[k] = dy[pixel * c + i];
        }
#pragma unroll
        for (u32 k = 0; k < BATCH; ++k) {
            i64 pixel = p + k * at.rows;
            if (pixel >= at.end) continue;
            float dz = z(v[k]) <= of.floor ? 0.0f : d[k];
            put(dx[pixel * c + i], slopes(dz, v[k], z), of.accumulate);
        }
    }
}

// Over all windows; windows that an odd last row or column cuts off get no dz.
extern "C" __global__ void __launch_bounds__(256)
    batch_input_gradient_pooled(Span<const Value> x, Span<const float> mean,
                                Span<const float> coefficients, Span<const Value> dy,
                                Span<const u8> codes, Span<Value> dx, Batch of) {
    locate(x, mean, coefficients, dy, codes, dx);
    Tile at(of.tiles);
    u32 c = of.tiles.c, i = at.channel;
    if (i >= c) return;
    Affine z = {mean[i], coefficients[i], 0.0f};
    Slopes slopes = {coefficients[c + i], coefficients[2 * c + i]};
    for (u32 p = at.first; p < at.end; p += at.rows) {
        u32 left, upper, n = of.down.divide(of.across.divide(p, left), upper);
        bool wide = 2 * left + 1 < of.w, high = 2 * upper + 1 < of.h;
        u32 code = BLOCKED;
        float d = 0.0f, v[4];
        if (wide && high) {
            i64 output = (i64)((n * (of.h / 2) + upper) * (of.w / 2) + left) * c + i;
            code = codes[output];
            d = dy[output];
        }
        i64 first = (i64)((n * of.h + 2 * upper) * of.w + 2 * left) * c + i;
        bool inside[4] = {true, wide, high, wide && high};
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            if (inside[k]) v[k] = x[first + (k % 2 + k / 2 * of.w) * c];
        }
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            if (!inside[k]) continue;
            float value = slopes(code == k ? d : 0.0f, v[k], z);
            put(dx[first + (k % 2 + k / 2 * of.w) * c], value, of.accumulate);
        }
    }
}
