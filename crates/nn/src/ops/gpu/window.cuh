// Products of 3 × 3 windows with stride 1, for plain and fused convolutions.
#pragma once
#include "mma.cuh"

// Adds a channel's window products for 2 rows of 4 pixels and 8 channels. The threads of a warp
// read the same weights. Their quads of pixels are adjacent in a row. In narrow tiles, quads of
// different rows may conflict in a bank; this costs little, as 26 reads serve 576 multiplications.
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

// Adds a row's products of one channel's windows with 8 channels of the gradient: 9 taps × 8. Takes
// four pixels at a time, whose windows overlap. A warp reads up to 8 channels of four rows: planes
// are 4 banks apart and rows an odd number of banks, so there are no bank conflicts. Of the
// gradient's rows, which are 4 or 8 banks apart, it reads the same 8 channels.
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

// A tile in shared memory, as products of its windows need it: planes [word][image][row][column] of
// the channels that are read, `plane` apart, with a border of one pixel and rows `pitch` apart. A
// word has the factors of P::EACH channels.
struct Area {
    u32 images, h, w;  // pixels without the border
    u32 pitch, plane;
    u32 words;         // words of input channels at a time
    u32 groups;        // groups of 8 output channels
    u32 filter;        // from channel to channel of the weights, or row to row of the gradient; on
                       // tensor cores from row to row of the weights, or pixel to pixel
    Divisor wide, high;  // by columns and rows of the tile

    __device__ __forceinline__ u32 pixels() const { return images * h * w; }

    // Steps of 8 words on tensor cores.
    __device__ __forceinline__ u32 steps() const { return (9 * words + 7) / 8; }

    // The first word of a pixel's window.
    __device__ __forceinline__ u32 window(u32 pixel) const {
        u32 x, y, row = wide.divide(pixel, x), image = high.divide(row, y);
        return (image * (h + 2) + y) * pitch + x;
    }
};

// Sums of the products of windows with weights, for a tile of pixels and the channels that are
// written, of which each thread has some.
//
// On units of f32 a thread has 2 rows of 4 pixels and 8 channels. Consecutive threads have
// consecutive pixels, so that a warp reads the same weights, [channel][tap][column].
template <class P, u32 M, u32 N>
struct WindowSums {
    float sum[2][4][8] = {};
    const Area& of;
    u32 image, y, x, group;

    __device__ __forceinline__ WindowSums(const Area& area, float*, float*) : of(area) {
        u32 wide = of.w / 4, high = of.h / 2, all = of.images * high * wide;
        u32 at = threadIdx.x % all;
        group = threadIdx.x / all, x = at % wide * 4, y = at / wide % high * 2;
        image = at / wide / high;
    }

    // Adds the products of `n` channels.
    __device__ __forceinline__ void add(const float* planes, const float* weights, u32 n) {
        planes += (image * (of.h + 2) + y) * of.pitch + x, weights += 8 * group;
        bool works = group < of.groups;
        for (u32 c = 0; works && c < n; ++c) {
            multiply(planes + c * of.plane, of.pitch, weights + c * of.filter, 8 * of.groups, sum);
        }
    }

    // Puts the sums into shared memory, planes [channel][image][row][column] `staging` apart.
    __device__ __forceinline__ void put(float* shared, u32 staging) const {
        if (group >= of.groups) return;
        float* to = shared + 8 * group * staging + (image * of.h + y) * of.w + x;
#pragma unroll
        for (u32 k = 0; k < 8; ++k) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const float(&row)[4][8] = sum[i];
                *reinterpret_cast<float4*>(to + k * staging + i * of.w) =
                    make_float4(row[0][k], row[1][k], row[2][k], row[3][k]);
            }
        }
    }
};

// The warps of a block on tensor cores.
constexpr u32 WARPS = 4;

// Fragments of 8 columns each (mma.cuh), from the lane's first element; rows are `apart` apart.
template <u32 N>
__device__ __forceinline__ void load_columns(const float* from, u32 apart, u32 (&b)[N][2]) {
#pragma unroll
    for (u32 n = 0; n < N; ++n) {
        b[n][0] = __float_as_uint(from[8 * n]);
        b[n][1] = __float_as_uint(from[4 * apart + 8 * n]);
    }
}

// Adds the products of 16 rows with these fragments. The lane's words are the sums of the first
// words of two rows and the offsets of two words.
template <class P, u32 N>
__device__ __forceinline__ void add_rows(const float* planes, const u32 (&rows)[2],
                                         const u32 (&offsets)[2], const u32 (&b)[N][2],
                                         float (&sum)[N][4]) {
    u32 a[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) a[i] = __float_as_uint(planes[rows[i % 2] + offsets[i / 2]]);
#pragma unroll
    for (u32 n = 0; n < N; ++n) P::multiply(sum[n], a, b[n]);
}

// On tensor cores a warp has M times 16 pixels and N times 8 channels. The sum runs over taps and
// words; [tap][word] in steps of 8. The padding of the last step is zero in both factors, since a
// pixel may be infinite. Weights lie as [tap][word][column].
//
// A warp reads words of 8 pixels in 4 planes, which are 8 banks apart, and weights of 8 columns in
// 4 rows, which are 8 or 24 banks apart. With 4 or 8 words there are no bank conflicts if the 8
// pixels are in one row; in tiles whose width is not a multiple of 8, the pixels are in rows that
// are 4 banks apart modulo 8. With other numbers of words, 4 consecutive rows sometimes belong to
// two taps, whose pixels conflict: the reads of all steps take 14 cycles instead of 8 for 3 words,
// 18 instead of 12 for 5, 18 instead of 14 for 6, and 22 instead of 16 for 7. Padding to 8 words
// would take 18 cycles in each case, and up to half as many multiplications more.
template <class P, u32 M, u32 N>
struct MatrixSums {
    float sum[M][N][4] = {};
    const Area& of;
    // Tables in shared memory: the offsets of a window's words from its first word; the first word
    // of each pixel's window; zeros, one for each first word.
    u32* table;

    // The tables go to shared memory, after the planes. A barrier follows.
    __device__ __forceinline__ MatrixSums(const Area& area, const float* planes, float* to)
        : of(area) {
        table = reinterpret_cast<u32*>(to);
        float* zeros = to + 8 * of.steps() + 16 * WARPS * M;
        for (u32 i = threadIdx.x; i < 8 * of.steps(); i += blockDim.x) {
            u32 tap = i / of.words, word = i % of.words;
            table[i] = tap < 9 ? word * of.plane + tap / 3 * of.pitch + tap % 3
                               : (u32)(zeros - planes);
        }
        for (u32 i = threadIdx.x; i < 16 * WARPS * M; i += blockDim.x) {
            table[8 * of.steps() + i] = i < of.pixels() ? of.window(i) : 0;
        }
        for (u32 i = threadIdx.x; i < of.plane; i += blockDim.x) zeros[i] = 0.0f;
    }

    // The warp's first column.
    __device__ __forceinline__ u32 column() const {
        return threadIdx.x / 32 % (of.groups / N) * 8 * N;
    }

    // The lane's first pixel of each 8.
    __device__ __forceinline__ u32 pixel(u32 eight) const {
        u32 across = of.groups / N, down = WARPS / across, warp = threadIdx.x / 32 / across;
        return 16 * (warp + eight / 2 * down) + eight % 2 * 8 + threadIdx.x % 32 / 4;
    }

    // Adds the products of all words.
    __device__ __forceinline__ void add(const float* planes, const float* weights, u32) {
        u32 k = threadIdx.x % 4, from[M][2];
        const u32 *offsets = table, *windows = table + 8 * of.steps();
#pragma unroll
        for (u32 m = 0; m < 2 * M; ++m) from[m / 2][m % 2] = windows[pixel(m)];
        weights += k * of.filter + column() + threadIdx.x % 32 / 4;
        for (u32 s = 0; s < of.steps(); ++s, weights += 8 * of.filter) {
            u32 at[2] = {offsets[8 * s + k], offsets[8 * s + k + 4]}, b[N][2];
            load_columns(weights, of.filter, b);
#pragma unroll
            for (u32 m = 0; m < M; ++m) add_rows<P>(planes, from[m], at, b, sum[m]);
        }
    }

    // Puts the sums into shared memory, planes [channel][image][row][column] `staging` apart: 4
    // columns of 8 pixels at a time, twice 4 banks apart.
    __device__ __forceinline__ void put(float* shared, u32 staging) const {
        float* to = shared + (column() + threadIdx.x % 4 * 2) * staging;
#pragma unroll
        for (u32 m = 0; m < 2 * M; ++m) {
            u32 at = pixel(m);
            if (at >= of.pixels()) continue;
#pragma unroll
            for (u32 n = 0; n < 2 * N; ++n) {
                to[(n / 2 * 8 + n % 2) * staging + at] = sum[m / 2][n / 2][m % 2 * 2 + n % 2];
            }
        }
    }
};

template <class T>
struct Type {
    using Is = T;
};

// Calls `run` with the type of sums for tiles with `groups` groups of channels: 1, 2, 4 or 8 of
// them on tensor cores.
template <class P, class Run>
__device__ __forceinline__ void with_sums(u32 groups, Run run) {
    if constexpr (!P::MATRIX) {
        run(Type<WindowSums<P, 1, 1>>());
    } else if (groups == 1) {
        run(Type<MatrixSums<P, 4, 1>>());
    } else if (groups == 2) {
        run(Type<MatrixSums<P, 4, 2>>());
    } else {
        run(Type<MatrixSums<P, 4, 4>>());
    }
}

// Channels first .. first + n.
struct Channels {
    u32 first, n;
};

// Zeros after the rows of weights, up to whole steps.
__device__ __forceinline__ void clear_rows(const Area& area, float* weights) {
    u32 end = 8 * area.steps() * area.filter;
    for (u32 i = 9 * area.words * area.filter + threadIdx.x; i < end; i += blockDim.x) {
        weights[i] = 0.0f;
    }
}

// Sums over a tile's pixels of the products of windows with a gradient, rows [image and row]
// [column][channel]: for 9 taps, the input channels and the output channels.
//
// On units of f32 a thread has a channel that is read and 8 that are written, and a subset of the
// rows. Consecutive threads have consecutive channels that are read. Rows of the gradient are
// `filter` apart.
template <class P, u32 N>
struct GradientSums {
    float sum[9][8] = {};
    const Area& of;
    u32 subsets;  // threads that share the rows

    __device__ __forceinline__ GradientSums(const Area& area, u32 subsets, float*)
        : of(area), subsets(subsets) {}

    // Adds the products of a tile's first `n` channels.
    __device__ __forceinline__ void add(const float* planes, const float* gradient, u32 n) {
        // Computed for each tile, so that between tiles the registers are free for the sums.
        u32 rest = threadIdx.x / of.words;
        u32 c = threadIdx.x % of.words, group = rest % of.groups, subset = rest / of.groups;
        bool works = subset < subsets && c < n;
        for (u32 r = subset; works && r < of.images * of.h; r += subsets) {
            const float* row = planes + c * of.plane + (r + r / of.h * 2) * of.pitch;
            row_products(row, of.pitch, gradient + r * of.filter + 8 * group, 8 * of.groups, of.w,
                         sum);
        }
    }

    // Puts the sums into shared memory: [9 · 8][thread].
    __device__ __forceinline__ void put(float* shared) const {
#pragma unroll
        for (u32 i = 0; i < 72; ++i) {
            shared[i * (blockDim.x + 4) + threadIdx.x] = sum[i / 8][i % 8];
        }
    }

    // Adds up the sums of all threads for an element of [tap][channel][column]. A warp reads 8
    // rows, which are 4 banks apart, of 4 threads.
    __device__ __forceinline__ double total(const float* shared, u32 i) const {
        u32 cols = 8 * of.groups, col = i % cols, c = i / cols % of.words;
        u32 tap = i / cols / of.words, apart = of.groups * of.words;
        const float* from = shared + (tap * 8 + col % 8) * (blockDim.x + 4);
        from += col / 8 * of.words + c;
        double sum = 0.0;
        for (u32 k = 0; k < subsets; ++k) sum += (double)from[k * apart];
        return sum;
    }
};

// On tensor cores a warp has up to 5 times 16 rows [tap][channel] and N times 8 columns. The sum
// runs over pixels, 8 at a time, which warps share that have the same columns. A word has one
// factor, as windows begin at any pixel. Pixels of the gradient are `filter` apart.
//
// A warp reads 4 pixels of 8 channels, which are 4 banks apart, and 8 columns of 4 pixels, which
// are 8 banks apart or 24.
template <class P, u32 N>
struct MatrixGradientSums {
    static constexpr u32 M = 5;
    float sum[M][N][4] = {};
    const Area& of;
    // In shared memory: the rows' words in a window; each 4 pixels' first words of windows.
    u32* table;

    // Its tables go to shared memory. A barrier follows.
    __device__ __forceinline__ MatrixGradientSums(const Area& area, u32, float* to) : of(area) {
        table = reinterpret_cast<u32*>(to);
        for (u32 i = threadIdx.x; i < 16 * M; i += blockDim.x) {
            u32 tap = i / of.words, c = i % of.words;
            table[i] = tap < 9 ? c * of.plane + tap / 3 * of.pitch + tap % 3 : 0;
        }
        for (u32 i = threadIdx.x; i < of.pixels() / 4; i += blockDim.x) {
            table[16 * M + i] = of.window(4 * i);
        }
    }

    // The warp's first column.
    __device__ __forceinline__ u32 column() const {
        return threadIdx.x / 32 % (of.groups / N) * 8 * N;
    }

    // Warps that share the pixels.
    __device__ __forceinline__ u32 subsets() const { return WARPS * N / of.groups; }

    // Which of them the warp is.
    __device__ __forceinline__ u32 subset() const { return threadIdx.x / 32 / (of.groups / N); }

    // Adds the products of a tile.
    __device__ __forceinline__ void add(const float* planes, const float* gradient, u32) {
        u32 k = threadIdx.x % 4, row = threadIdx.x % 32 / 4, from[M][2];
        const u32 *rows = table, *quads = table + 16 * M;
#pragma unroll
        for (u32 m = 0; m < 2 * M; ++m) from[m / 2][m % 2] = rows[8 * m + row] + k;
        gradient += k * of.filter + column() + row;
        for (u32 s = subset(); s < of.pixels() / 8; s += subsets()) {
            u32 at[2] = {quads[2 * s], quads[2 * s + 1]}, b[N][2];
            load_columns(gradient + 8 * s * of.filter, of.filter, b);
#pragma unroll
            for (u32 m = 0; m < M; ++m) {
                if (16 * m < 9 * of.words) add_rows<P>(planes, from[m], at, b, sum[m]);
            }
        }
    }

    // Puts the sums into shared memory: [subset][tap][channel][column].
    __device__ __forceinline__ void put(float* shared) const {
        u32 all = 9 * of.words, cols = 8 * of.groups;
        float* to = shared + subset() * all * cols + column() + threadIdx.x % 4 * 2;
#pragma unroll
        for (u32 m = 0; m < 2 * M; ++m) {
            u32 row = 8 * m + threadIdx.x % 32 / 4;
            if (row >= all) continue;
#pragma unroll
            for (u32 n = 0; n < 2 * N; ++n) {
                to[row * cols + n / 2 * 8 + n % 2] = sum[m / 2][n / 2][m % 2 * 2 + n % 2];
            }
        }
    }

    // Adds up the subsets' sums for an element of [tap][channel][column].
    __device__ __forceinline__ double total(const float* shared, u32 i) const {
        double sum = 0.0;
        u32 apart = 72 * of.words * of.groups;
        for (u32 k = 0; k < subsets(); ++k) sum += (double)shared[k * apart + i];
        return sum;
    }
};

// Calls `run` with the type of sums over the pixels of tiles with `groups` groups of channels.
template <class P, class Run>
__device__ __forceinline__ void with_gradient_sums(u32 groups, Run run) {
    using Single = typename P::Single;
    if constexpr (!P::MATRIX) {
        run(Type<GradientSums<P, 1>>());
    } else if (groups == 1) {
        run(Type<MatrixGradientSums<Single, 1>>());
    } else {
        run(Type<MatrixGradientSums<Single, 2>>());
    }
}
