// Layer norm and RMS norm over the channels of each pixel (kernels/norm/layer.rs). An RMS norm has
// no beta and no mean.
#include "tiles.cuh"
#include "value.cuh"

// Pixels are rows of `c` elements. A row has `columns` threads of a warp, a power of two.
struct Rows {
    double share;  // 1/c
    u32 c;
    u32 columns;
    u32 log;  // columns = 2^log
    u32 rows;
    float eps;
    u32 accumulate;
};

// This thread's elements are column, column + columns, … below `width`, which is 0 for a thread
// without a row; all threads of a warp take part in sums.
struct Row {
    u32 row;
    u32 column;
    u32 width;
    i64 begin;

    __device__ Row(const Rows& of) {
        row = blockIdx.x * (blockDim.x >> of.log) + (threadIdx.x >> of.log);
        column = threadIdx.x & (of.columns - 1);
        width = row < of.rows ? of.c : 0;
        begin = (i64)row * of.c;
    }
};

// The sum over the threads of the row, in every one of them.
__device__ __forceinline__ Pair row_sum(Pair sums, u32 columns) {
    for (u32 step = columns / 2; step > 0; step /= 2) {
        sums.a += __shfl_xor_sync(0xffffffffu, sums.a, step);
        sums.b += __shfl_xor_sync(0xffffffffu, sums.b, step);
    }
    return sums;
}

// Mean first, then the variance in a second sweep about it, then the result. With four blocks on a
// multiprocessor, a thread has enough registers for the values that are needed after the division
// and the root; with more blocks these values would be spilled.
extern "C" __global__ void __launch_bounds__(256, 4)
    layer_forward(Span<const Value> x, Span<const float> gamma, Span<const float> beta,
                  Span<Value> y, Span<float> mean, Span<float> invstd, Rows of) {
    locate(x, gamma, beta, y, mean, invstd);
    Row at(of);
    bool centred = beta.len > 0;
    float centre = 0.0f;
    if (centred) {
        Pair sums = {0.0, 0.0};
#pragma unroll 2
        for (u32 ch = at.column; ch < at.width; ch += of.columns) {
            sums.a += (double)x[at.begin + ch];
        }
        centre = (float)(row_sum(sums, of.columns).a * of.share);
    }
    Pair sums = {0.0, 0.0};
#pragma unroll 2
    for (u32 ch = at.column; ch < at.width; ch += of.columns) {
        double d = (double)(x[at.begin + ch] - centre);
        sums.a += d;
        sums.b = fma(d, d, sums.b);
    }
    sums = row_sum(sums, of.columns);
    // The mean was rounded to f32: the square of its remainder is taken off the variance.
    double rest = centred ? sums.a * of.share : 0.0, v = sums.b * of.share - rest * rest;
    float inverse = (float)(1.0 / sqrt(v + (double)of.eps));
    if (at.column == 0 && at.width > 0) {
        if (centred) mean[at.row] = centre;
        invstd[at.row] = inverse;
    }
#pragma unroll 2
    for (u32 ch = at.column; ch < at.width; ch += of.columns) {
        float scaled = (x[at.begin + ch] - centre) * inverse * gamma[ch];
        y[at.begin + ch] = centred ? scaled + beta[ch] : scaled;
    }
}

// The input's gradient, if it is wanted.
extern "C" __global__ void __launch_bounds__(256)
    layer_gradient(Span<const Value> x, Span<const float> gamma, Span<const float> mean,
                   Span<const float> invstd, Span<const Value> dy, Span<Value> dx, Rows of) {
    locate(x, gamma, mean, invstd, dy, dx);
    if (dx.len == 0) return;
    Row at(of);
    bool centred = mean.len > 0;
    float centre = centred && at.width > 0 ? mean[at.row] : 0.0f;
    float inverse = at.width > 0 ? invstd[at.row] : 0.0f;
    Pair sums = {0.0, 0.0};
#pragma unroll 4
    for (u32 ch = at.column; ch < at.width; ch += of.columns) {
        double scaled = (double)(gamma[ch] * dy[at.begin + ch]);
        sums.a += scaled;
        sums.b = fma(scaled, (double)((x[at.begin + ch] - centre) * inverse), sums.b);
    }
    sums = row_sum(sums, of.columns);
    float offset = centred ? (float)(sums.a * of.share) : 0.0f;
    float slope = (float)(sums.b * of.share);
#pragma unroll 4
    for (u32 ch = at.column; ch < at.width; ch += of.columns) {
        float hat = (x[at.begin + ch] - centre) * inverse;
        float value = inverse * (gamma[ch] * dy[at.begin + ch] - (offset + hat * slope));
        put(dx[at.begin + ch], value, of.accumulate);
    }
}

// Sums of dy and of dy·(x - mean)/deviation, per channel over a chunk of pixels.
extern "C" __global__ void __launch_bounds__(256)
    layer_sums(Span<const Value> x, Span<const float> mean, Span<const float> invstd,
               Span<const Value> dy, Span<double> partial, Tiles of) {
    locate(x, mean, invstd, dy, partial);
    Tile at(of);
    bool centred = mean.len > 0;
    Pair sums = {0.0, 0.0};
#pragma unroll 4
    for (u32 p = at.first; p < at.end; p += at.rows) {
        i64 i = (i64)p * of.c + at.channel;
        double d = (double)dy[i];
        sums.a += d;
        sums.b = fma(d, (double)((x[i] - (centred ? mean[p] : 0.0f)) * invstd[p]), sums.b);
    }
    leave(sums, at, of.c, partial);
}

// Adds the sums over all chunks to the parameters' gradients.
extern "C" __global__ void __launch_bounds__(512)
    layer_parameters(Span<const double> partial, Span<float> dgamma, Span<float> dbeta, Finish of) {
    locate(partial, dgamma, dbeta);
    Pair sums = finish(partial, of);
    u32 i = finished_channel(of);
    if (threadIdx.x >= of.columns || i >= of.c) return;
    if (dbeta.len > 0) dbeta[i] += (float)sums.a;
    dgamma[i] += (float)sums.b;
}
