// Backward pass of a fused convolution: the gradients of the weights and of the convolution's
// input, from the gradient of the output of the batch norm after it.
//
// Both need the gradient of the raw output, which is computed from raw output and incoming gradient
// where they are read. The images are cut into slices; a slice has blocks for the weights, for some
// channels each, and blocks for the data, for a tile each. Both kinds alternate, so that the second
// finds the elements of the first in the cache. Of the blocks with the same part of the weights the
// last one adds up their sums over the slices; the last of all data blocks adds up the sums for the
// norm before the convolution, if there is one.
#include "product.cuh"
#include "fused.cuh"

using Single = Product::Single;

// Numbers of blocks of a slice, and the share of each block.
struct Slices {
    u32 images;        // images of a slice
    u32 count;
    u32 weight_rows;   // blocks across the channels that are read, a chunk each
    u32 weight_tiles;  // and across output channels
    u32 weight_groups;  // groups of 8 of these in a block
    u32 data_tiles;    // tiles of pixels; none if no gradient of the data is wanted
    u32 columns;       // blocks across the channels that the data has
    u32 column_groups;  // groups of 8 of these in a block
};

struct Backward {
    Source from;     // the convolution's input
    Source to;       // the raw output, and the norm after it
    u32 batch, h, w;
    u32 image_step, pixel_step;  // of the incoming gradient: from image to image, pixel to pixel
    u32 accumulate;              // add to the gradient of the data
    Slices slices;
    Tile data;
    u32 data_staging;    // plane of a result in shared memory
    u32 data_weights, data_offsets;  // first float of the weights, of the offsets in a window
    Tile weight;
    u32 weight_row, weight_pixel;  // of the gradient in shared memory: floats of a row, of a pixel
    u32 weight_gradient, weight_quads;  // first float of the gradient, of the windows of 4 pixels
    u32 subsets;                        // threads that share a tile's rows
    u32 affine;           // first float of the norm coefficients: input's, then raw output's
};

// Inputs of a block: tensors, and in shared memory [5][out_c] of the raw output's channels. The
// convolution's input is located where it is read, so that until then registers are free for sums.
struct Reads {
    Input x;
    Filter filter;
    Span<const Value> z, dy;
    const float* channels;
};

// A channel of the raw output.
struct Channel {
    u32 c;
    Affine z;
    Slopes slopes;

    __device__ __forceinline__ Channel(const float* from, u32 channels, u32 channel)
        : c(channel),
          z(affine_of(from, channels, channel)),
          slopes({from[3 * channels + channel], from[4 * channels + channel]}) {}
};

// The gradient of the raw output in the window of 2 × 2 pixels whose first is `at`, in an even row
// and column; zeros outside of the image, and from image `end` on.
__device__ __forceinline__ void window_gradient(const Backward& s, const Reads& of,
                                                const Channel& channel, const Origin& at,
                                                u32 end, float (&d)[4]) {
    // All loads first. For an element outside of the image the first element is loaded instead, and
    // not used.
    bool inside[4];
    float v[4];
    u32 image = at.image, y = at.y, x = at.x, c = channel.c;
    u32 first = ((image * s.h + y) * s.w + x) * s.to.c + c;
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        inside[k] = image < end && y + k / 2 < s.h && x + k % 2 < s.w;
        u32 from = first + (k / 2 * s.w + k % 2) * s.to.c;
        v[k] = of.z[(i64)(inside[k] ? from : 0)];
    }
    if (s.to.kind == POOL) {
        // A window that an odd last row or column cuts off has no gradient.
        u32 from = image * s.image_step + (y / 2 * (s.w / 2) + x / 2) * s.pixel_step + c;
        float incoming = of.dy[(i64)(inside[3] ? from : 0)];
        Winner best(v, channel.z);
        float dz = !inside[3] || best.value <= 0.0f ? 0.0f : incoming;
#pragma unroll
        for (u32 k = 0; k < 4; ++k) d[k] = best.at == k ? dz : 0.0f;
    } else {
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            u32 pixel = (y + k / 2) * s.w + x + k % 2;
            u32 from = image * s.image_step + pixel * s.pixel_step + c;
            d[k] = of.dy[(i64)(inside[k] ? from : 0)];
        }
#pragma unroll
        for (u32 k = 0; k < 4; ++k) d[k] = channel.z(v[k]) <= 0.0f ? 0.0f : d[k];
    }
#pragma unroll
    for (u32 k = 0; k < 4; ++k) d[k] = inside[k] ? channel.slopes(d[k], v[k], channel.z) : 0.0f;
}

// Puts the gradient of the raw output of a tile, with a border of one pixel, into shared memory as
// planes. Windows begin at even pixels, as tiles do.
__device__ __forceinline__ void load_gradient_planes(const Backward& s, const Reads& of,
                                                     const Origin& at, Channels which,
                                                     float* planes) {
    const Tile& t = s.data;
    u32 lanes = which.n > 4 ? 8 : 4, lane = threadIdx.x % 32;
    u32 rows = t.h / 2 + 2, across = t.w / 2 + 2;
    for (u32 c = lane % lanes; c < channels_of<Product>(t, which); c += lanes) {
        u32 end = c < which.n ? s.batch : 0;
        Channel channel(of.channels, s.to.c, min(which.first + c, s.to.c - 1));
        for (u32 r = threadIdx.x / 32; r < t.images * rows; r += blockDim.x / 32) {
            u32 image = r / rows, row = r % rows;  // of windows, the first one above the tile
            float* to = planes + c / Product::EACH * t.plane + image * (t.h + 2) * t.pitch;
            for (u32 j = lane / lanes; j < across; j += 32 / lanes) {
                float d[4];
                Origin window = {at.image + image, at.y + 2 * row - 2, at.x + 2 * j - 2};
                window_gradient(s, of, channel, window, end, d);
#pragma unroll
                for (u32 k = 0; k < 4; ++k) {
                    u32 y = 2 * row + k / 2 - 1, x = 2 * j + k % 2 - 1;
                    if (y >= t.h + 2 || x >= t.w + 2) continue;
                    Product::put(to + y * t.pitch + x, c % Product::EACH, d[k]);
                }
            }
        }
        if (Product::EACH == 1) break;  // a chunk of 8 channels at most
    }
}

// Puts the gradient of a tile's pixels, channels from `col0` on, into rows of shared memory: [image
// and row] [column][channel].
__device__ __forceinline__ void load_gradient_rows(const Backward& s, const Reads& of,
                                                   const Origin& at, u32 col0, u32 end,
                                                   float* to) {
    const Tile& t = s.weight;
    u32 cols = 8 * s.slices.weight_groups, lane = threadIdx.x % 32;
    u32 lanes = cols % 32 == 0 ? 32 : cols % 16 == 0 ? 16 : 8;
    for (u32 j = lane % lanes; j < cols; j += lanes) {
        bool is = col0 + j < s.to.c;
        Channel channel(of.channels, s.to.c, is ? col0 + j : 0);
        for (u32 r = threadIdx.x / 32; r < t.images * t.h / 2; r += blockDim.x / 32) {
            u32 image = r / (t.h / 2), row = r % (t.h / 2);
            for (u32 k = lane / lanes; k < t.w / 2; k += 32 / lanes) {
                float d[4];
                Origin window = {at.image + image, at.y + 2 * row, at.x + 2 * k};
                window_gradient(s, of, channel, window, is ? end : 0, d);
                float* here = to + 2 * r * s.weight_row + 2 * k * s.weight_pixel + j;
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    here[i / 2 * s.weight_row + i % 2 * s.weight_pixel] = Single::round(d[i]);
                }
            }
        }
    }
}

// Where a tile of the data goes, and its sums [2][in_c].
struct Written {
    Span<Value> dx;
    double* partial;
};

// Writes the data's gradient, and the sums that the batch norm before the convolution needs.
template <u32 KIND>
__device__ __forceinline__ void write_data(const Backward& s, const Reads& of, const float* staging,
                                           const Origin& at, u32 col0, const Written& written) {
    constexpr u32 AT_ONCE = KIND == POOL ? 2 : 4;  // pixels whose loads are in flight together
    __shared__ TileSums sums;
    const Tile& t = s.data;
    u32 lane = threadIdx.x % 32;
    for (u32 g = 0; g < s.slices.column_groups; ++g) {
        u32 mine = 8 * g + lane % 8, col = col0 + mine;
        bool is = col < s.from.c;
        Affine z = {0.0f, 0.0f, 0.0f};
        if (KIND != NOTHING && is) z = affine_of(of.x.affine, s.from.c, col);
        Pair own = {0.0, 0.0};
        for (u32 r = threadIdx.x / 32; r < t.images * t.h; r += blockDim.x / 32) {
            u32 image = at.image + r / t.h, row = at.y + r % t.h;
            if (!is || image >= s.batch || row >= s.h) continue;
            u32 to = ((image * s.h + row) * s.w + at.x) * s.from.c + col;
            const float* from = staging + mine * s.data_staging + r * t.w;
            // The last tile of a wide image may begin outside of it.
            u32 width = at.x < s.w ? min(t.w, s.w - at.x) : 0;
            for (u32 k = lane / 8; k < width; k += 4 * AT_ONCE) {
                Raw<KIND> raw[AT_ONCE];
                float before[AT_ONCE] = {};
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i) {
                    // Outside of the tile, the first of these pixels is loaded, and not used.
                    u32 here = k + 4 * i < width ? k + 4 * i : k;
                    if (s.accumulate) before[i] = written.dx[(i64)(to + here * s.from.c)];
                    if (KIND == NOTHING) continue;
                    u32 pixel = element<KIND>(s.from, image, row, at.x + here, col);
                    raw[i].load(s.from, of.x.x, pixel);
                }
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i) {
                    u32 here = k + 4 * i;
                    if (here >= width) continue;
                    float d = from[here];
                    if (KIND != NOTHING) d = as_stored<Value>(d);
                    written.dx[(i64)(to + here * s.from.c)] = s.accumulate ? before[i] + d : d;
                    if (KIND != NOTHING) raw[i].add_gradient(z, d, own);
                }
            }
        }
        if (KIND != NOTHING) sums.put(own, g);
    }
    u32 groups = s.slices.column_groups;
    if (KIND != NOTHING) sums.write(written.partial, col0, groups, s.from.c);
}

// A tile of the data's gradient, to shared memory.
template <class Sums>
__device__ __forceinline__ void add_data(const Backward& s, const Reads& of, float* shared,
                                         const Origin& at, u32 col0) {
    u32 cols = 8 * s.slices.column_groups;
    const Tile& t = s.data;
    Area area = area_of<Product>(t, s.slices.column_groups, filter_of<Product>(cols));
    Sums sums(area, shared, shared + s.data_offsets);
    for (u32 c0 = 0; c0 < s.to.c; c0 += t.chunk) {
        Channels which = {c0, min(t.chunk, s.to.c - c0)};
        load_gradient_planes(s, of, at, which, shared);
        load_weights<Product, true>(of.filter, area, which, col0, shared + s.data_weights);
        __syncthreads();
        sums.add(shared, shared + s.data_weights, which.n);
        __syncthreads();
    }
    sums.put(shared, s.data_staging);
    __syncthreads();
}

// The slice and the channels of a block for the weights.
struct Weights {
    u32 c0, col0;   // first that are read, first that are written
    u32 slice;
    u32 chunk, cols;
};

// The gradient of the weights over a slice, of some channels. The threads' sums go to shared
// memory.
template <u32 KIND, class Sums>
__device__ __forceinline__ void add_weights(const Backward& s, const Reads& of, float* shared,
                                            const Weights& at, Sums& sums) {
    const Tile& tile = s.weight;
    Channels which = {at.c0, min(at.chunk, s.from.c - at.c0)};
    float* gradient = shared + s.weight_gradient;
    u32 begin = at.slice * s.slices.images, end = min(begin + s.slices.images, s.batch);
    u32 tiles = (s.slices.images + tile.images - 1) / tile.images * tile.down * tile.across;
    for (u32 n = 0; n < tiles; ++n) {
        Origin origin(tile, n);
        origin.image += begin;
        if (origin.image >= end) break;
        load_planes<Single, KIND>(of.x, tile, origin, which, end, shared);
        load_gradient_rows(s, of, origin, at.col0, end, gradient);
        __syncthreads();
        sums.add(shared, gradient, which.n);
        __syncthreads();
    }
    sums.put(shared);
    __syncthreads();
}

// A block's weights, as [tap][channel that is read][channel that is written].
struct Weight {
    u32 tap, c, col;
    bool is;

    __device__ __forceinline__ Weight(const Backward& s, const Weights& at, u32 i) {
        col = at.col0 + i % at.cols, c = at.c0 + i / at.cols % at.chunk;
        tap = i / at.cols / at.chunk;
        is = c < s.from.c && col < s.to.c;
    }
};

// Adds up the threads' sums: [slice][tap][in_c][out_c].
template <class Sums>
__device__ __forceinline__ void leave_weights(const Backward& s, const Weights& at,
                                              const float* shared, const Sums& sums,
                                              Span<float> partial) {
    u32 all = 9 * s.from.c * s.to.c;
    for (u32 i = threadIdx.x; i < 9 * at.chunk * at.cols; i += blockDim.x) {
        Weight w(s, at, i);
        double sum = sums.total(shared, i);
        if (!w.is) continue;
        partial[(i64)at.slice * all + (w.tap * s.from.c + w.c) * s.to.c + w.col] = (float)sum;
    }
}

// Adds the slices' sums to the gradient of the weights.
__device__ __forceinline__ void finish_weights(const Backward& s, const Weights& at,
                                               Span<float> partial, Span<float> dw) {
    constexpr u32 AT_ONCE = 4;  // weights of a thread whose loads are in flight together
    u32 all = 9 * s.from.c * s.to.c, step = pad16(s.to.c), mine = 9 * at.chunk * at.cols;
    for (u32 first = threadIdx.x; first < mine; first += AT_ONCE * blockDim.x) {
        u32 from[AT_ONCE], to[AT_ONCE];
        bool is[AT_ONCE];
        double sum[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j) {
            u32 i = first + j * blockDim.x;
            Weight w(s, at, i);
            u32 row = w.tap * s.from.c + w.c;
            is[j] = w.is && i < mine;
            from[j] = is[j] ? row * s.to.c + w.col : 0;
            to[j] = row * step + w.col, sum[j] = 0.0;
        }
#pragma unroll 8
        for (u32 slice = 0; slice < s.slices.count; ++slice) {
            const float* of = &partial[(i64)(slice * all)];
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j) sum[j] += (double)__ldcg(of + from[j]);
        }
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j) {
            if (is[j]) dw[(i64)to[j]] += (float)sum[j];
        }
    }
}

// Statistics and parameters of the batch norm before the convolution.
struct NormReads {
    Span<const float> mean, var, gamma, beta;
};

// Copies the raw output's norm coefficients, [5][out_c], to shared memory.
__device__ __forceinline__ void load_channels(const Backward& s, Span<const float> mean,
                                              Span<const float> beta,
                                              Span<const float> coefficients, float* to) {
    u32 c = s.to.c;
    for (u32 i = threadIdx.x; i < c; i += blockDim.x) {
        to[i] = mean[i], to[c + i] = coefficients[i], to[2 * c + i] = beta[i];
        to[3 * c + i] = coefficients[c + i], to[4 * c + i] = coefficients[2 * c + i];
    }
}

// Outputs of the blocks. They are located where they are written, so that until then registers are
// free for sums.
struct Results {
    Span<Value> dx;
    Span<float> dw;
    NormGradient norm;
    Span<u32> tickets;
    Span<float> weights;  // sums of the slices
    Span<double> sums;    // of the tiles of the data
};

// A block's part of the weights.
template <u32 KIND>
__device__ __forceinline__ void weight_block(const Backward& s, Reads& of, float* shared,
                                             u32 slice, u32 at, Results& to) {
    const Slices& slices = s.slices;
    locate(of.x.x);
    u32 chunk = min(s.weight.chunk, s.from.c), cols = 8 * slices.weight_groups;
    u32 row = at / slices.weight_tiles, column = at % slices.weight_tiles;
    Weights mine = {row * chunk, column * cols, slice, chunk, cols};
    Area area = area_of<Single>(s.weight, slices.weight_groups,
                                Product::MATRIX ? s.weight_pixel : s.weight_row);
    with_gradient_sums<Product>(slices.weight_groups, [&](auto type) {
        typename decltype(type)::Is sums(area, s.subsets, shared + s.weight_quads);
        add_weights<KIND>(s, of, shared, mine, sums);
        locate(to.weights);
        leave_weights(s, mine, shared, sums, to.weights);
    });
    locate(to.dw, to.tickets);
    if (is_last(to.tickets, at, slices.count)) finish_weights(s, mine, to.weights, to.dw);
}

// A tile of the data.
template <u32 KIND>
__device__ __forceinline__ void data_block(const Backward& s, Reads& of, float* shared,
                                           u32 slice, u32 at, Results& to) {
    const Slices& slices = s.slices;
    u32 tile = at / slices.columns, col0 = at % slices.columns * 8 * slices.column_groups;
    Origin origin(s.data, tile);
    origin.image += slice * slices.images;
    with_sums<Product>(slices.column_groups, [&](auto type) {
        add_data<typename decltype(type)::Is>(s, of, shared, origin, col0);
    });
    locate(of.x.x, to.dx, to.sums, to.tickets);
    tile += slice * slices.data_tiles;
    Written written = {to.dx, nullptr};
    if (KIND != NOTHING) written.partial = &to.sums[(i64)tile * 2 * s.from.c];
    write_data<KIND>(s, of, shared, origin, col0, written);
    u32 ticket = slices.weight_rows * slices.weight_tiles;
    u32 blocks = slices.count * slices.data_tiles * slices.columns;
    if (KIND == NOTHING || !is_last(to.tickets, ticket, blocks)) return;
    NormGradient& norm = to.norm;
    locate(norm.var, norm.gamma, norm.dgamma, norm.dbeta, norm.coefficients);
    double count = (double)s.batch * (double)s.from.h * (double)s.from.w;
    finish_gradient(s.from, count, to.sums, slices.count * slices.data_tiles, norm);
}

template <u32 KIND>
__device__ __forceinline__ void run_block(const Backward& s, Reads of, float* shared,
                                          Results& to) {
    u32 of_weights = s.slices.weight_rows * s.slices.weight_tiles;
    u32 all = of_weights + s.slices.data_tiles * s.slices.columns;
    u32 slice = blockIdx.x / all, at = blockIdx.x % all;
    if (at < of_weights) {
        weight_block<KIND>(s, of, shared, slice, at, to);
    } else {
        data_block<KIND>(s, of, shared, slice, at - of_weights, to);
    }
}

// Inputs of a block with this shared memory.
__device__ __forceinline__ Reads reads_of(const Backward& s, Span<const Value> x,
                                          Span<const float> w, Span<const Value> z,
                                          Span<const Value> dy, const float* shared) {
    const float* affine = shared + s.affine;
    return {{s.from, x, affine}, {w, s.from.c, s.to.c}, z, dy, affine + 3 * s.from.c};
}

template <u32 KIND>
__device__ __forceinline__ float* prepare(const Backward& s, const NormReads& x,
                                          Span<const float> mean, Span<const float> beta,
                                          Span<const float> coefficients) {
    extern __shared__ float4 shared4[];
    float* shared = reinterpret_cast<float*>(shared4);
    if (KIND != NOTHING) load_affine(x.mean, x.var, x.gamma, x.beta, s.from, shared + s.affine);
    load_channels(s, mean, beta, coefficients, shared + s.affine + 3 * s.from.c);
    __syncthreads();
    return shared;
}

// The input has no norm.
extern "C" __global__ void __launch_bounds__(128, 4)
    fused_backward(Span<const Value> x, Span<const float> w, Span<const Value> z,
                   Span<const float> mean, Span<const float> beta,
                   Span<const float> coefficients, Span<const Value> dy, Span<Value> dx,
                   Span<float> dw, Span<u32> tickets, Span<float> weights,
                   const __grid_constant__ Backward s) {
    Results to = {dx, dw, {}, tickets, weights, {}};
    locate(w, z, mean, beta, coefficients, dy);
    float* shared = prepare<NOTHING>(s, {}, mean, beta, coefficients);
    run_block<NOTHING>(s, reads_of(s, x, w, z, dy, shared), shared, to);
}

// The input is the output of batch norm and ReLU.
extern "C" __global__ void __launch_bounds__(128, 4)
    fused_backward_norm(Span<const Value> x, Span<const float> x_mean, Span<const float> x_var,
                        Span<const float> x_gamma, Span<const float> x_beta,
                        Span<const float> w, Span<const Value> z, Span<const float> mean,
                        Span<const float> beta, Span<const float> coefficients,
                        Span<const Value> dy, Span<Value> dx, Span<float> dw,
                        Span<float> dgamma, Span<float> dbeta, Span<float> x_coefficients,
                        Span<u32> tickets, Span<float> weights, Span<double> sums,
                        const __grid_constant__ Backward s) {
    NormGradient norm = {x_var, x_gamma, dgamma, dbeta, x_coefficients};
    Results to = {dx, dw, norm, tickets, weights, sums};
    locate(x_mean, x_var, x_gamma, x_beta, w, z, mean, beta, coefficients, dy);
    float* shared =
        prepare<NORM>(s, {x_mean, x_var, x_gamma, x_beta}, mean, beta, coefficients);
    run_block<NORM>(s, reads_of(s, x, w, z, dy, shared), shared, to);
}

// The input is the output of batch norm, ReLU and max pooling.
extern "C" __global__ void __launch_bounds__(128, 4)
    fused_backward_pool(Span<const Value> x, Span<const float> x_mean, Span<const float> x_var,
                        Span<const float> x_gamma, Span<const float> x_beta,
                        Span<const float> w, Span<const Value> z, Span<const float> mean,
                        Span<const float> beta, Span<const float> coefficients,
                        Span<const Value> dy, Span<Value> dx, Span<float> dw,
                        Span<float> dgamma, Span<float> dbeta, Span<float> x_coefficients,
                        Span<u32> tickets, Span<float> weights, Span<double> sums,
                        const __grid_constant__ Backward s) {
    NormGradient norm = {x_var, x_gamma, dgamma, dbeta, x_coefficients};
    Results to = {dx, dw, norm, tickets, weights, sums};
    locate(x_mean, x_var, x_gamma, x_beta, w, z, mean, beta, coefficients, dy);
    float* shared =
        prepare<POOL>(s, {x_mean, x_var, x_gamma, x_beta}, mean, beta, coefficients);
    run_block<POOL>(s, reads_of(s, x, w, z, dy, shared), shared, to);
}
