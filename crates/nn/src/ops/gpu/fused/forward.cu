// Forward pass of a fused convolution: the norm before it on load, the raw output, and the
// statistics of the batch norm after it. The last block finishes them.
//
// A block computes a tile of pixels for up to 64 channels, and goes through the channels that it
// reads a few at a time: their planes with a border of one pixel lie in shared memory, then the
// weights, as [channel][tap][column], or for tensor cores as [tap][word][column].
#include "product.cuh"
#include "fused.cuh"

struct Forward {
    Source from;
    Tile tile;
    u32 batch, h, w, out_c;
    u32 column_tiles;   // tiles of the output channels
    u32 column_groups;  // groups of 8 such channels in a tile
    u32 staging;          // plane of a result in shared memory
    u32 weights, offsets, affine;  // first float of the weights, of the offsets in a window and of
                                   // norm coefficients, in shared memory
    u32 training;
    float momentum, rest;  // of the running statistics, and 1 - momentum
    float unbiased;
};

template <u32 KIND, class Sums>
__device__ __forceinline__ void add_products(const Forward& s, const Input& from,
                                             const Filter& filter, float* shared, const Origin& at,
                                             u32 col0) {
    u32 cols = 8 * s.column_groups;
    Area area = area_of<Product>(s.tile, s.column_groups, filter_of<Product>(cols));
    Sums sums(area, shared, shared + s.offsets);
    for (u32 c0 = 0; c0 < s.from.c; c0 += s.tile.chunk) {
        Channels which = {c0, min(s.tile.chunk, s.from.c - c0)};
        load_planes<Product, KIND>(from, s.tile, at, which, s.batch, shared);
        load_weights<Product, false>(filter, area, which, col0, shared + s.weights);
        __syncthreads();
        sums.add(shared, shared + s.weights, which.n);
        __syncthreads();
    }
    sums.put(shared, s.staging);
    __syncthreads();
}

template <u32 KIND>
__device__ __forceinline__ void convolve(const Forward& s, Span<const Value> x,
                                         Span<const float> w, float* shared, const Origin& at,
                                         u32 col0) {
    Input from = {s.from, x, shared + s.affine};
    Filter filter = {w, s.from.c, s.out_c};
    with_sums<Product>(s.column_groups, [&](auto type) {
        using Sums = typename decltype(type)::Is;
        add_products<KIND, Sums>(s, from, filter, shared, at, col0);
    });
}

// Writes a tile's results, and the sums and sums of squares of its channels: [tile][2][out_c].
__device__ __forceinline__ void write_tile(const Forward& s, const float* staging, const Origin& at,
                                           u32 col0, Span<Value> z, Span<double> partial) {
    __shared__ TileSums sums;
    u32 lane = threadIdx.x % 32;
    for (u32 g = 0; g < s.column_groups; ++g) {
        u32 mine = 8 * g + lane % 8, col = col0 + mine;
        Pair own = {0.0, 0.0};
        for (u32 r = threadIdx.x / 32; r < s.tile.images * s.tile.h; r += blockDim.x / 32) {
            u32 image = at.image + r / s.tile.h, row = at.y + r % s.tile.h;
            if (col >= s.out_c || image >= s.batch || row >= s.h) continue;
            u32 to = ((image * s.h + row) * s.w + at.x) * s.out_c + col;
            const float* from = staging + mine * s.staging + r * s.tile.w;
            for (u32 k = lane / 8; k < s.tile.w && at.x + k < s.w; k += 4) {
                float v = as_stored<Value>(from[k]);
                z[(i64)(to + k * s.out_c)] = v;
                own += {(double)v, (double)v * (double)v};
            }
        }
        if (s.training) sums.put(own, g);
    }
    if (!s.training) return;
    u32 tile = blockIdx.x / s.column_tiles;
    sums.write(&partial[(i64)tile * 2 * s.out_c], col0, s.column_groups, s.out_c);
}

// Where the statistics go.
struct Moments {
    Span<float> mean, var, running_mean, running_var;
    Span<i64> batches;
};

// Mean and biased variance of each channel, and the running ones.
__device__ __forceinline__ void finish_moments(const Forward& s, Span<double> partial,
                                               const Moments& to) {
    double count = (double)s.batch * (double)s.h * (double)s.w;
    u32 parts = gridDim.x / s.column_tiles;
    for (u32 c0 = threadIdx.x / 32 * 8; c0 < s.out_c; c0 += blockDim.x / 32 * 8) {
        Pair sums = sum_parts(partial, parts, s.out_c, c0);
        u32 i = c0 + threadIdx.x % 32;
        if (threadIdx.x % 32 >= 8 || i >= s.out_c) continue;
        double m = sums.a / count, v = sums.b / count - m * m;
        // Rounding may leave a constant channel slightly below 0; NaN stays.
        float mean = (float)m, var = v < 0.0 ? 0.0f : (float)v;
        to.mean[i] = mean;
        to.var[i] = var;
        to.running_mean[i] = s.rest * to.running_mean[i] + s.momentum * mean;
        to.running_var[i] = s.rest * to.running_var[i] + s.momentum * (var * s.unbiased);
    }
    if (threadIdx.x == 0) to.batches[0] += 1;
}

extern "C" __global__ void __launch_bounds__(128, 4)
    fused_forward(Span<const Value> x, Span<const float> mean, Span<const float> var,
                  Span<const float> gamma, Span<const float> beta, Span<const float> w,
                  Span<Value> z, Span<float> batch_mean, Span<float> batch_var,
                  Span<float> running_mean, Span<float> running_var, Span<i64> batches,
                  Span<u32> tickets, Span<double> partial, Forward s) {
    locate(x, mean, var, gamma, beta, w, z, batch_mean, batch_var, running_mean, running_var,
           batches, tickets, partial);
    extern __shared__ float4 shared4[];
    float* shared = reinterpret_cast<float*>(shared4);
    u32 col0 = blockIdx.x % s.column_tiles * 8 * s.column_groups;
    Origin at(s.tile, blockIdx.x / s.column_tiles);
    load_affine(mean, var, gamma, beta, s.from, shared + s.affine);
    __syncthreads();
    switch (s.from.kind) {
        case NOTHING: convolve<NOTHING>(s, x, w, shared, at, col0); break;
        case NORM: convolve<NORM>(s, x, w, shared, at, col0); break;
        default: convolve<POOL>(s, x, w, shared, at, col0);
    }
    write_tile(s, shared, at, col0, z, partial);
    if (!s.training || !is_last(tickets, 0, gridDim.x)) return;
    finish_moments(s, partial, {batch_mean, batch_var, running_mean, running_var, batches});
}
