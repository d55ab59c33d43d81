// Sums over the output pixels of a convolution: batch statistics, and the last step of the
// gradients of parameters. Blocks sum parts of the pixels, which follow from shapes; another call
// adds them.
#include "norm.cuh"
#include "value.cuh"

struct Statistics {
    u32 pixels, channels;
    u32 lanes;  // threads across channels: a power of two, at most 32
    u32 parts, part_pixels;
};

// Sums and sums of squares of a part's pixels: [part][2][channels]. f64 holds them exactly enough
// for a variance far below the squared mean.
extern "C" __global__ void __launch_bounds__(256)
    statistics_parts(Span<const Value> y, Span<double> sums, Statistics s) {
    locate(y, sums);
    __shared__ double shared[2][256];
    u32 tiles = (s.channels + s.lanes - 1) / s.lanes, t = threadIdx.x, rows = 256 / s.lanes;
    u32 part = blockIdx.x / tiles, channel = blockIdx.x % tiles * s.lanes + t % s.lanes;
    u32 first = part * s.part_pixels;
    u32 end = first + s.part_pixels < s.pixels ? first + s.part_pixels : s.pixels;
    double sum = 0.0, square = 0.0;
    if (channel < s.channels) {
#pragma unroll 4
        for (u32 p = first + t / s.lanes; p < end; p += rows) {
            double v = y[(i64)p * s.channels + channel];
            sum += v;
            square = fma(v, v, square);
        }
    }
    shared[0][t] = sum, shared[1][t] = square;
    __syncthreads();
    for (u32 half = rows / 2; half > 0; half /= 2) {
        if (t < half * s.lanes) {
            shared[0][t] += shared[0][t + half * s.lanes];
            shared[1][t] += shared[1][t + half * s.lanes];
        }
        __syncthreads();
    }
    if (t < s.lanes && channel < s.channels) {
        i64 to = (i64)part * 2 * s.channels + channel;
        sums[to] = shared[0][t], sums[to + s.channels] = shared[1][t];
    }
}

// Mean and biased variance of each channel.
extern "C" __global__ void __launch_bounds__(512)
    statistics_finish(Span<const double> sums, Span<float> mean, Span<float> var, Finish of) {
    locate(sums, mean, var);
    Pair all = finish(sums, of);
    u32 channel = finished_channel(of);
    if (threadIdx.x >= of.columns || channel >= of.c) return;
    double m = all.a / of.count, v = all.b / of.count - m * m;
    mean[channel] = (float)m;
    // Rounding may leave a constant channel slightly below 0; NaN stays.
    var[channel] = v < 0.0 ? 0.0f : (float)v;
}

struct Weights {
    u32 weights;   // gradients of weights without padding lanes
    u32 columns;   // of a row of the weights
    u32 step;      // from row to row of the packed weights
    u32 channels;  // of the bias
    u32 parts;
};

// Adds to the gradients the sums of all parts: [part][weights + channels]. Up to eight threads for
// each, a power of two, share the parts; a warp has 32 of the gradients side by side.
extern "C" __global__ void __launch_bounds__(256)
    weight_finish(Span<const float> sums, Span<float> dw, Span<float> db, Weights f) {
    locate(sums, dw, db);
    __shared__ double shared[256];
    u32 t = threadIdx.x, at = blockIdx.x * 32 + t % 32, all = f.weights + f.channels;
    double sum = 0.0;
    if (at < all) {
#pragma unroll 4
        for (u32 part = t / 32; part < f.parts; part += blockDim.x / 32) {
            sum += (double)sums[(i64)part * all + at];
        }
    }
    shared[t] = sum;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half >= 32; half /= 2) {
        if (t < half) shared[t] += shared[t + half];
        __syncthreads();
    }
    if (t >= 32 || at >= all) return;
    if (at < f.weights) {
        dw[(i64)(at / f.columns) * f.step + at % f.columns] += (float)shared[t];
    } else if (db.len > 0) {
        db[at - f.weights] += (float)shared[t];
    }
}
