// Code that the kernels of fused convolutions share. A fused convolution is 3 × 3, with stride 1
// and a border of one zero. Batch norm, ReLU and max pooling before it are computed where its input
// is read, and batch norm, ReLU and max pooling after it where its raw output is read. So these
// kernels never store them.
#pragma once
#include "norm.cuh"
#include "window.cuh"

// The layers between two convolutions.
constexpr u32 NOTHING = 0, NORM = 1, POOL = 2;  // POOL: batch norm, ReLU and 2 × 2 max pooling

// Images that a kernel reads: raw images, and the layers that are computed from them.
struct Source {
    u32 h, w, c;
    u32 kind;
    float eps;
};

// A tile of pixels of images of `rows` × `columns`: of several if they are small. In shared memory
// it lies as planes [channel][image][row][column], which are `plane` apart, with rows `pitch`
// apart.
struct Tile {
    u32 images, h, w;
    u32 rows, columns;
    u32 across, down;  // tiles of an image
    u32 pitch, plane;
    u32 chunk;  // channels that are read at a time: at most 8 words of them
    Divisor wide, high;  // by `w` and `h`
};

// The tile for a product of windows that reads `chunk` channels at a time.
template <class P>
__device__ __forceinline__ Area area_of(const Tile& t, u32 groups, u32 filter) {
    u32 words = t.chunk / P::EACH;
    return {t.images, t.h, t.w, t.pitch, t.plane, words, groups, filter, t.wide, t.high};
}

// First pixel of a tile.
struct Origin {
    u32 image, y, x;

    __device__ __forceinline__ Origin(u32 image, u32 y, u32 x) : image(image), y(y), x(x) {}

    __device__ __forceinline__ Origin(const Tile& t, u32 tile) {
        x = tile % t.across * t.w, tile /= t.across;
        y = tile % t.down * t.h, image = tile / t.down * t.images;
    }
};

// Images that a convolution reads, and their norm coefficients, in shared memory.
struct Input {
    const Source& of;
    Span<const Value> x;
    const float* affine;
};

__device__ __forceinline__ float relu(float v) {
    return v <= 0.0f ? 0.0f : v;
}

__device__ __forceinline__ float norm_scale(float gamma, float var, float eps) {
    return (float)((double)gamma / sqrt((double)var + (double)eps));
}

// Mean, scale and shift of each channel, to shared memory [3][c]. A barrier follows.
__device__ __forceinline__ void load_affine(Span<const float> mean, Span<const float> var,
                                            Span<const float> gamma, Span<const float> beta,
                                            const Source& of, float* to) {
    for (u32 i = threadIdx.x; of.kind != NOTHING && i < of.c; i += blockDim.x) {
        to[i] = mean[i];
        to[of.c + i] = norm_scale(gamma[i], var[i], of.eps);
        to[2 * of.c + i] = beta[i];
    }
}

__device__ __forceinline__ Affine affine_of(const float* from, u32 channels, u32 channel) {
    return {from[channel], from[channels + channel], from[2 * channels + channel]};
}

// The largest of a window's values before ReLU: the first of equals, the last NaN. All kernels
// compute it in the same way, so that they agree on where a gradient goes.
struct Winner {
    float value, raw;
    u32 at;

    __device__ __forceinline__ Winner(const float (&v)[4], const Affine& z) {
        value = z(v[0]), raw = v[0], at = 0;
#pragma unroll
        for (u32 k = 1; k < 4; ++k) {
            float other = z(v[k]);
            if (other > value || isnan(other)) value = other, raw = v[k], at = k;
        }
    }
};

// Loads a window whose first element is this one.
__device__ __forceinline__ void load_window(const Source& of, Span<const Value> x, u32 first,
                                            float (&v)[4]) {
#pragma unroll
    for (u32 k = 0; k < 4; ++k) v[k] = x[(i64)(first + (k / 2 * of.w + k % 2) * of.c)];
}

// The element of a pixel of the images that are read, or the first of its window.
template <u32 KIND>
__device__ __forceinline__ u32 element(const Source& of, u32 image, u32 y, u32 x, u32 channel) {
    u32 each = KIND == POOL ? 2 : 1;
    return ((image * of.h + each * y) * of.w + each * x) * of.c + channel;
}

// The elements loaded for a pixel: its own, or those of its window. Loads and arithmetic are
// separate, so that a thread has the loads of several pixels in flight before it needs the first.
template <u32 KIND>
struct Raw {
    static constexpr u32 EACH = KIND == POOL ? 4 : 1;
    float v[EACH];

    __device__ __forceinline__ void load(const Source& of, Span<const Value> x, u32 at) {
        if constexpr (KIND == POOL) {
            load_window(of, x, at, v);
        } else {
            v[0] = x[(i64)at];
        }
    }

    // The value of the pixel.
    __device__ __forceinline__ float value(const Affine& z) const {
        if constexpr (KIND == NOTHING) return v[0];
        if constexpr (KIND == NORM) return relu(z(v[0]));
        if constexpr (KIND == POOL) return relu(Winner(v, z).value);
    }

    // The pixel's part in the sums of a batch norm's gradient, of dz and dz·(x - mean): dz is the
    // gradient that pool and ReLU let pass.
    __device__ __forceinline__ void add_gradient(const Affine& z, float d, Pair& sums) const {
        float value, raw;
        if constexpr (KIND == POOL) {
            Winner best(v, z);
            raw = best.raw, value = best.value;
        } else {
            raw = v[0], value = z(raw);
        }
        double dz = value <= 0.0f ? 0.0 : (double)d;
        sums.a += dz;
        sums.b = fma(dz, (double)(raw - z.mean), sums.b);
    }
};

// Channels that lie in shared memory: on tensor cores all channels of a chunk, in whole words.
template <class P>
__device__ __forceinline__ u32 channels_of(const Tile& t, Channels which) {
    return P::MATRIX ? t.chunk : which.n;
}

// Copies channels of a tile and a border of one pixel to shared memory, as the convolution reads
// them, for images before `end`. Eight channels of four pixels fill a warp's loads, so that they
// read whole sectors.
template <class P, u32 KIND>
__device__ __forceinline__ void load_planes(const Input& from, const Tile& t, const Origin& at,
                                            Channels which, u32 end, float* planes) {
    constexpr u32 AT_ONCE = KIND == POOL ? 2 : 5;  // pixels whose loads are in flight together
    u32 lanes = which.n > 4 ? 8 : 4, lane = threadIdx.x % 32, rows = t.h + 2, step = 32 / lanes;
    const Source& of = from.of;
    for (u32 c = lane % lanes; c < channels_of<P>(t, which); c += lanes) {
        u32 channel = which.first + c;
        Affine z = {0.0f, 0.0f, 0.0f};
        if (KIND != NOTHING && c < which.n) z = affine_of(from.affine, of.c, channel);
        for (u32 r = threadIdx.x / 32; r < t.images * rows; r += blockDim.x / 32) {
            // Coordinates above the image, or left of it, wrap around to large numbers.
            u32 image = at.image + r / rows, y = at.y + r % rows - 1;
            bool inside = image < end && y < t.rows && c < which.n;
            float* to = planes + c / P::EACH * t.plane + r * t.pitch;
            for (u32 j = lane / lanes; j < t.w + 2; j += AT_ONCE * step) {
                // Outside of the image the first element is read, and not used: to omit a load
                // would take a branch, at which the thread waits for the earlier loads.
                Raw<KIND> raw[AT_ONCE];
                bool is[AT_ONCE];
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i) {
                    u32 column = at.x + j + i * step - 1;
                    is[i] = inside && column < t.columns;
                    u32 from_at = element<KIND>(of, image, y, column, channel);
                    raw[i].load(of, from.x, is[i] ? from_at : 0);
                }
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i) {
                    float v = is[i] ? raw[i].value(z) : 0.0f;
                    if (j + i * step < t.w + 2) P::put(to + j + i * step, c % P::EACH, v);
                }
            }
        }
        if (P::EACH == 1) break;  // a chunk of 8 channels at most
    }
}

// The convolution's weights.
struct Filter {
    Span<const float> w;
    u32 in_c, out_c;
};

// The word of weights at a tap, of channels of `which` that are read and one that is written; zeros
// where there is none.
template <class P, bool GRADIENT>
__device__ __forceinline__ u32 filter_word(const Filter& of, Channels which, u32 tap, u32 word,
                                           u32 col) {
    u32 step = pad16(of.out_c), written = GRADIENT ? of.in_c : of.out_c;
    float v[P::EACH];
#pragma unroll
    for (u32 i = 0; i < P::EACH; ++i) {
        u32 c = word * P::EACH + i, at = which.first + c;
        u32 from = GRADIENT ? ((8 - tap) * of.in_c + col) * step + at
                            : (tap * of.in_c + at) * step + col;
        bool is = c < which.n && col < written;
        float value = of.w[(i64)(is ? from : 0)];
        v[i] = is ? value : 0.0f;
    }
    return P::word(v);
}

// Weights of the input channels and of the tile's output channels, from `col` on, as
// [tap][word][column], then zeros. The data gradient reads them transposed, taps in reverse order.
// Threads read elements that lie side by side: eight columns, or the words of a tap.
template <class P, bool GRADIENT>
__device__ __forceinline__ void load_filter(const Filter& of, const Area& area, Channels which,
                                            u32 col, float* weights) {
    u32 cols = 8 * area.groups, lane = threadIdx.x % 8;
    if (GRADIENT) {
        for (u32 q = threadIdx.x / 8; lane < area.words && q < 72; q += blockDim.x / 8) {
            u32 tap = q / 8;
#pragma unroll (P::EACH == 1 ? 4 : 1)  // registers are for sums
            for (u32 j = q % 8; j < cols; j += 8) {
                u32 word = filter_word<P, true>(of, which, tap, lane, col + j);
                weights[(tap * area.words + lane) * area.filter + j] = __uint_as_float(word);
            }
        }
    } else {
        for (u32 k = threadIdx.x / 8; k < 9 * area.words; k += blockDim.x / 8) {
            u32 tap = k / area.words, at = k % area.words;
#pragma unroll (4 / P::EACH)
            for (u32 j = lane; j < cols; j += 8) {
                u32 word = filter_word<P, false>(of, which, tap, at, col + j);
                weights[k * area.filter + j] = __uint_as_float(word);
            }
        }
    }
    clear_rows(area, weights);
}

// From channel to channel of the weights in shared memory, or on tensor cores from row to row.
template <class P>
__device__ __forceinline__ u32 filter_of(u32 cols) {
    return P::MATRIX ? cols + (cols == 8 ? 0 : 8) : 9 * cols + 4;
}

// Weights of channels that are read and of the tile's that are written, from `col` on, as
// [channel][tap][column]; the data gradient reads them transposed, taps in reverse order.
template <class P, bool GRADIENT>
__device__ __forceinline__ void load_weights(const Filter& of, const Area& area, Channels which,
                                             u32 col, float* weights) {
    if constexpr (P::MATRIX) return load_filter<P, GRADIENT>(of, area, which, col, weights);
    constexpr u32 AT_ONCE = 5;  // loads in flight together: all of a block's for 8 columns
    u32 lane = threadIdx.x % 8, step = pad16(of.out_c), written = GRADIENT ? of.in_c : of.out_c;
    u32 rows = blockDim.x / 8, all = 72 * area.groups, cols = 8 * area.groups;
    for (u32 first = threadIdx.x / 8; first < all; first += AT_ONCE * rows) {
        float v[AT_ONCE];
        u32 to[AT_ONCE];
        bool is[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            u32 q = first + i * rows, other = q % 8, tap = q / 8 % 9, j = q / 72 * 8;
            u32 c = GRADIENT ? lane : other;
            j += GRADIENT ? other : lane;
            u32 from = GRADIENT ? ((8 - tap) * of.in_c + col + j) * step + which.first + c
                                : (tap * of.in_c + which.first + c) * step + col + j;
            to[i] = c * area.filter + tap * cols + j;
            is[i] = q < all && c < which.n;
            bool there = is[i] && col + j < written;
            float value = of.w[(i64)(there ? from : 0)];
            v[i] = there ? value : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            if (is[i]) weights[to[i]] = v[i];
        }
    }
}

// Whether this is the last of `blocks` blocks to arrive: then it sees everything that the others
// wrote before. Its ticket is 0 before and after.
__device__ __forceinline__ bool is_last(Span<u32> tickets, u32 which, u32 blocks) {
    __shared__ bool last;
    __threadfence();  // this thread's writes come before the count of its block
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(&tickets[which], 1u) == blocks - 1;
        if (last) tickets[which] = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Sums of 8 channels from `first` on over all parts [part][2][channels], by a whole warp: lanes 0
// to 7 get theirs.
__device__ __forceinline__ Pair sum_parts(Span<double> partial, u32 parts, u32 channels,
                                          u32 first) {
    constexpr u32 AT_ONCE = 4;  // parts whose loads are in flight together
    u32 lane = threadIdx.x % 32, channel = first + lane % 8;
    Pair sums = {0.0, 0.0};
    for (u32 part = lane / 8; channel < channels && part < parts; part += 4 * AT_ONCE) {
        Pair of[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            // After the last part the first of these, which is not added.
            u32 here = part + 4 * i < parts ? part + 4 * i : part;
            const double* at = &partial[(i64)here * 2 * channels + channel];
            of[i] = {__ldcg(at), __ldcg(at + channels)};
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            if (part + 4 * i < parts) sums += of[i];
        }
    }
    for (u32 step = 8; step < 32; step *= 2) {
        sums.a += __shfl_xor_sync(0xffffffffu, sums.a, step);
        sums.b += __shfl_xor_sync(0xffffffffu, sums.b, step);
    }
    return sums;
}

// Sums of the channels of a block's tile, over its lanes and warps: 8 channels in each group.
struct TileSums {
    double part[4][8][16];  // [warp][group][2][channel]

    // Adds up a warp's: its lanes have channel lane % 8 of a group.
    __device__ __forceinline__ void put(Pair sums, u32 group) {
        for (u32 step = 8; step < 32; step *= 2) {
            sums.a += __shfl_xor_sync(0xffffffffu, sums.a, step);
            sums.b += __shfl_xor_sync(0xffffffffu, sums.b, step);
        }
        u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane < 8) part[warp][group][lane] = sums.a, part[warp][group][8 + lane] = sums.b;
    }

    // Writes the sums of all warps to `to` [2][channels]; the tile's sums begin at `first`.
    __device__ __forceinline__ void write(double* to, u32 first, u32 groups, u32 channels) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < 16 * groups; i += blockDim.x) {
            u32 group = i / 16, which = i / 8 % 2, channel = first + 8 * group + i % 8;
            double sum = 0.0;
            for (u32 warp = 0; warp < blockDim.x / 32; ++warp) sum += part[warp][group][i % 16];
            if (channel < channels) to[which * channels + channel] = sum;
        }
    }
};

// The tensors of a batch norm's gradient.
struct NormGradient {
    Span<const float> var, gamma;
    Span<float> dgamma, dbeta;
    Span<float> coefficients;  // [3][C]: scale, offset, slope
};

// From the sums of dz and dz·(x - mean) over all parts to the parameters' gradients and the
// coefficients of the input's; `count` values of a channel. By the last block.
__device__ __forceinline__ void finish_gradient(const Source& of, double count,
                                                Span<double> partial, u32 parts,
                                                const NormGradient& to) {
    for (u32 c0 = threadIdx.x / 32 * 8; c0 < of.c; c0 += blockDim.x / 32 * 8) {
        Pair sums = sum_parts(partial, parts, of.c, c0);
        u32 i = c0 + threadIdx.x % 32;
        if (threadIdx.x % 32 >= 8 || i >= of.c) continue;
        double deviation = sqrt((double)to.var[i] + (double)of.eps), dot = sums.b / deviation;
        float scale = norm_scale(to.gamma[i], to.var[i], of.eps);
        to.dbeta[i] += (float)sums.a;
        to.dgamma[i] += (float)dot;
        to.coefficients[i] = scale;
        to.coefficients[of.c + i] = (float)((double)scale * sums.a / count);
        to.coefficients[2 * of.c + i] = (float)((double)scale * dot / deviation / count);
    }
}
