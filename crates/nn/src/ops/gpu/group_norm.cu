// Group norm (kernels/norm/group.rs).
#include "norm.cuh"
#include "value.cuh"

// A block has `span` channels of one sample, which are whole groups: one, or as many as
// make a row of memory worth reading. Its threads are rows of `columns`.
struct Group {
    double share;  // 1/(pixels·each)
    u32 c;
    u32 groups;
    u32 each;  // channels of a group
    u32 span;
    u32 columns;
    u32 pixels;
    float eps;
    u32 accumulate;
};

// This thread's channels are column, column + columns, … below `width`, from `begin` on; its pixels
// are row, row + rows, ….
struct Part {
    u32 sample;
    u32 begin;
    u32 width;
    u32 column;
    u32 row;
    u32 rows;
    i64 image;  // the sample's element of channel `begin`
    i64 saved;  // the place of the thread's group among saved statistics

    __device__ Part(const Group& of) {
        u32 across = (of.c + of.span - 1) / of.span;
        sample = blockIdx.x / across;
        begin = blockIdx.x % across * of.span;
        width = min(of.span, of.c - begin);
        column = threadIdx.x & (of.columns - 1);
        row = threadIdx.x / of.columns;
        rows = blockDim.x / of.columns;
        image = (i64)sample * of.pixels * of.c + begin;
        // Threads without a channel count as part of the last group.
        saved = (i64)sample * of.groups + (begin + min(column, width - 1)) / of.each;
    }

    // Whether the thread writes the values of its group.
    __device__ bool leads(const Group& of) const {
        return row == 0 && column < width && column % of.each == 0;
    }
};

// The sum over the thread's group.
template <class T>
__device__ T group_sum(T value, T* part, const Group& of) {
    if (of.span == of.each) {
        __syncthreads();  // `part` may still be read
        return block_sum(value, part);
    }
    column_sum(value, part, of.columns);
    u32 first = (threadIdx.x & (of.columns - 1)) / of.each * of.each;
    T sum = part[first];
    for (u32 k = first + 1; k < min(first + of.each, of.columns); ++k) sum += part[k];
    return sum;
}

// Mean first, then the variance in a second sweep about it, then the result.
extern "C" __global__ void __launch_bounds__(512)
    group_forward(Span<const Value> x, Span<const float> gamma, Span<const float> beta,
                  Span<Value> y, Span<float> mean, Span<float> invstd, Group of) {
    locate(x, gamma, beta, y, mean, invstd);
    __shared__ Pair part[THREADS];
    Part at(of);
    Pair sums = {0.0, 0.0};
    for (u32 ch = at.column; ch < at.width; ch += of.columns) {
#pragma unroll 4
        for (u32 p = at.row; p < of.pixels; p += at.rows) {
            sums.a += (double)x[at.image + (i64)p * of.c + ch];
        }
    }
    float centre = (float)(group_sum(sums, part, of).a * of.share);
    sums = {0.0, 0.0};
    for (u32 ch = at.column; ch < at.width; ch += of.columns) {
#pragma unroll 4
        for (u32 p = at.row; p < of.pixels; p += at.rows) {
            double d = (double)(x[at.image + (i64)p * of.c + ch] - centre);
            sums.a += d;
            sums.b = fma(d, d, sums.b);
        }
    }
    sums = group_sum(sums, part, of);
    // The mean was rounded to f32: the square of its remainder is taken off the variance.
    double rest = sums.a * of.share, v = sums.b * of.share - rest * rest;
    float inverse = (float)(1.0 / sqrt(v + (double)of.eps));
    if (at.leads(of)) {
        mean[at.saved] = centre;
        invstd[at.saved] = inverse;
    }
    for (u32 ch = at.column; ch < at.width; ch += of.columns) {
        Affine z = {centre, gamma[at.begin + ch] * inverse, beta[at.begin + ch]};
        for (u32 p = at.row; p < of.pixels; p += BATCH * at.rows) {
            float value[BATCH];
#pragma unroll
            for (u32 k = 0; k < BATCH; ++k) {
                i64 pixel = p + k * at.rows;
                if (pixel < of.pixels) value[k] = x[at.image + pixel * of.c + ch];
            }
#pragma unroll
            for (u32 k = 0; k < BATCH; ++k) {
                i64 pixel = p + k * at.rows;
                if (pixel < of.pixels) y[at.image + pixel * of.c + ch] = z(value[k]);
            }
        }
    }
}

// Sums of a sample: per channel of dy and of dy·(x - mean)/deviation, to `partial` [N][2][C]; over
// a group, of these times gamma. Then dx, if it is wanted.
extern "C" __global__ void __launch_bounds__(512)
    group_gradient(Span<const Value> x, Span<const float> gamma, Span<const float> mean,
                   Span<const float> invstd, Span<const Value> dy, Span<Value> dx,
                   Span<double> partial, Group of) {
    locate(x, gamma, mean, invstd, dy, dx, partial);
    __shared__ Pair part[THREADS];
    Part at(of);
    float centre = mean[at.saved];
    double inverse = (double)invstd[at.saved];
    Pair weighted = {0.0, 0.0};
    // The same number of rounds for every thread, because all threads take part in a sum.
    for (u32 begin = 0; begin < at.width; begin += of.columns) {
        u32 ch = begin + at.column;
        Pair sums = {0.0, 0.0};
#pragma unroll 4
        for (u32 p = at.row; p < (ch < at.width ? of.pixels : 0); p += at.rows) {
            i64 i = at.image + (i64)p * of.c + ch;
            double d = (double)dy[i];
            sums.a += d;
            sums.b = fma(d, (double)(x[i] - centre), sums.b);
        }
        sums = column_sum(sums, part, of.columns);
        if (at.row > 0 || ch >= at.width) continue;
        partial[(i64)(2 * at.sample) * of.c + at.begin + ch] = sums.a;
        partial[(i64)(2 * at.sample + 1) * of.c + at.begin + ch] = sums.b * inverse;
        double factor = (double)gamma[at.begin + ch];
        weighted += {sums.a * factor, sums.b * factor};
    }
    weighted = group_sum(weighted, part, of);
    if (dx.len == 0) return;
    Slopes slopes = {(float)(inverse * weighted.a * of.share),
                     (float)(inverse * inverse * inverse * weighted.b * of.share)};
    for (u32 ch = at.column; ch < at.width; ch += of.columns) {
        Affine z = {centre, (float)((double)gamma[at.begin + ch] * inverse), 0.0f};
        for (u32 p = at.row; p < of.pixels; p += BATCH * at.rows) {
            float v[BATCH], d[BATCH];
#pragma unroll
            for (u32 k = 0; k < BATCH; ++k) {
                i64 pixel = p + k * at.rows;
                if (pixel >= of.pixels) continue;
                v[k] = x[at.image + pixel * of.c + ch];
                d[k] = dy[at.image + pixel * of.c + ch];
            }
#pragma unroll
            for (u32 k = 0; k < BATCH; ++k) {
                i64 pixel = p + k * at.rows;
                if (pixel >= of.pixels) continue;
                put(dx[at.image + pixel * of.c + ch], slopes(d[k], v[k], z), of.accumulate);
            }
        }
    }
}

// Adds the sums over all samples to the parameters' gradients.
extern "C" __global__ void __launch_bounds__(512)
    group_parameters(Span<const double> partial, Span<float> dgamma, Span<float> dbeta, Finish of) {
    locate(partial, dgamma, dbeta);
    Pair sums = finish(partial, of);
    u32 i = finished_channel(of);
    if (threadIdx.x >= of.columns || i >= of.c) return;
    dbeta[i] += (float)sums.a;
    dgamma[i] += (float)sums.b;
}
