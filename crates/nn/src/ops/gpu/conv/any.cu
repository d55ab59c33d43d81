// Convolutions of any shape, and linear layers, as products of matrices (kernels/conv). The matrix
// of windows is never stored: tiles of it are gathered from the image.
//
// A block computes a tile of ROWS × COLS elements of the product in steps of DEPTH products. Both
// factors' parts lie in shared memory, [k][row] and [k][column]. A thread has EACH × EACH elements.
// In f32 it computes them from EACH + EACH numbers for each k: a sum's terms are added one after
// the other, with fused multiplications as on the processor. Otherwise a warp computes them with
// tensor cores, from factors that are rounded in shared memory (dy of `weight_tile`: when it is
// read). Either way a sum's bits do not depend on the tile. While a step is computed the copies of
// the next STAGES − 1 steps are in flight.
#include "conv.cuh"
#include "product.cuh"
#include "tile.cuh"

constexpr u32 STAGES = 3;

// The elements that a thread copies of a factor whose products are side by side in memory: product
// `k` of the step and rows `row`, row + THREADS / DEPTH, …. A warp copies 8 products (whole
// sectors) of 4 rows to all 32 banks, because products are an odd multiple of 4 banks apart.
template <u32 THREADS>
struct Lane {
    static constexpr u32 STEP = THREADS / DEPTH;
    u32 k = threadIdx.x % 8 + threadIdx.x / 32 % 2 * 8;
    u32 row = threadIdx.x % 32 / 8 + threadIdx.x / 64 * 4;
};

// A pixel whose window is read: its image's first element in the batch, and the window's corner.
struct Corner {
    i64 image;
    int y, x;
};

// Runs a block's steps: `load(stage)` starts the thread's copies of the next step into a stage,
// `round(stage)` rounds them when they have come, and `add(stage)` computes with the stage.
template <class Load, class Round, class Add>
__device__ __forceinline__ void pipeline(u32 steps, Load load, Round round, Add add) {
    for (u32 next = 0; next < STAGES - 1; ++next) {
        if (next < steps) load(next);
        commit();
    }
    u32 stage = 0;
    for (u32 step = 0; step < steps; ++step) {
        arrived<STAGES - 2>();
        if (Product::MATRIX) round(stage);
        __syncthreads();
        // Every thread is done with the stage that was computed before this one.
        if (step + STAGES - 1 < steps) load(stage == 0 ? STAGES - 1 : stage - 1);
        commit();
        add(stage);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
}

// Far outside of any image: a window there holds zeros only.
constexpr int OUTSIDE = -0x40000000;

// The window of an output pixel in the input.
__device__ Corner input_corner(const Conv& s, u32 pixel, u32 end) {
    if (pixel >= end) return {0, OUTSIDE, OUTSIDE};
    u32 x = pixel % s.out_w, row = pixel / s.out_w;
    return {(i64)(row / s.out_h) * (s.in_h * s.in_w * s.in_c),
            (int)(row % s.out_h * s.sh) - (int)s.ph, (int)(x * s.sw) - (int)s.pw};
}

// Input pixels that the same taps reach: y = first.y + stride · n, and the same for x. With a
// stride of 1 that is all of them. So nothing is multiplied with the zeros between the gradient's
// pixels.
struct Phase {
    u32 y, x;    // the first of the pixels
    u32 h, w;    // number of rows and columns of pixels
    u32 ky, kx;  // the first of the taps, which are th and tw apart
    u32 kh, kw;  // number of taps

    __device__ Phase(const Conv& s, u32 n) : y(n / s.sw), x(n % s.sw) {
        h = y < s.in_h ? (s.in_h - y - 1) / s.sh + 1 : 0;
        w = x < s.in_w ? (s.in_w - x - 1) / s.sw + 1 : 0;
        ky = first_tap(y + s.ph, s.sh, s.dh, s.th), kx = first_tap(x + s.pw, s.sw, s.dw, s.tw);
        kh = ky < s.kh ? (s.kh - ky - 1) / s.th + 1 : 0;
        kw = kx < s.kw ? (s.kw - kx - 1) / s.tw + 1 : 0;
    }

    __device__ u32 pixels(const Conv& s) const {
        return s.batch * h * w;
    }

    // Number of the n-th of its pixels among all pixels of the batch.
    __device__ u32 pixel(const Conv& s, u32 n) const {
        u32 row = n / w;
        return (row / h * s.in_h + row % h * s.sh + y) * s.in_w + n % w * s.sw + x;
    }

    // The output pixels whose windows hold the n-th pixel: their last one, for the first tap. The
    // windows of the next taps lie oh and ow pixels before.
    __device__ Corner corner(const Conv& s, u32 n) const {
        if (n >= pixels(s)) return {0, OUTSIDE, OUTSIDE};
        u32 row = n / w;
        return {(i64)(row / h) * (s.out_h * s.out_w * s.out_c),
                (int)(row % h) + ((int)(y + s.ph) - (int)(ky * s.dh)) / (int)s.sh,
                (int)(n % w) + ((int)(x + s.pw) - (int)(kx * s.dw)) / (int)s.sw};
    }
};

// An element of the window, of `channels` a pixel.
struct Element {
    u32 ky, kx, c;

    __device__ Element(u32 k, u32 kw, u32 channels) {
        u32 tap = k / channels;
        ky = tap / kw, kx = tap % kw, c = k % channels;
    }

    // Goes on to the element DEPTH later.
    __device__ __forceinline__ void advance(u32 kw, u32 channels) {
        c += DEPTH;
        while (c >= channels) {
            c -= channels;
            if (++kx == kw) kx = 0, ++ky;
        }
    }
};

// Where the element of a window lies in the input; −1 in the padding.
__device__ __forceinline__ i64 input_at(const Conv& s, const Corner& of, const Element& k,
                                        u32 channel) {
    u32 y = of.y + k.ky * s.dh, x = of.x + k.kx * s.dw;
    if (y >= s.in_h || x >= s.in_w) return -1;
    return of.image + (i64)(y * s.in_w + x) * s.in_c + channel + k.c;
}

// Place of the output gradient that a tap carries back to an input pixel; −1 if there is none.
__device__ __forceinline__ i64 gradient_at(const Conv& s, const Corner& of, const Element& k,
                                           u32 channel) {
    // Coordinates above the image, or left of it, wrap around to large numbers.
    u32 y = of.y - (int)(k.ky * s.oh), x = of.x - (int)(k.kx * s.ow);
    if (y >= s.out_h || x >= s.out_w) return -1;
    return of.image + (i64)(y * s.out_w + x) * s.out_c + channel + k.c;
}

// Place of a block's tile: columns of tiles first, so that blocks that run at a time read the same
// rows.
template <u32 ROWS, u32 COLS>
struct Place {
    u32 job, row, col, part;

    __device__ Place(u32 rows, u32 cols, u32 jobs) {
        u32 across = (cols + COLS - 1) / COLS, down = (rows + ROWS - 1) / ROWS, at = blockIdx.x;
        col = at % across * COLS, at /= across;
        row = at % down * ROWS, at /= down;
        job = at % jobs, part = at / jobs;
    }
};

// Writes, or adds, the first `left` of four elements side by side. Their indices are constants, so
// that they stay in registers.
template <class T>
__device__ __forceinline__ void put4(Span<T> to, i64 at, const float (&v)[4], u32 left,
                                     bool accumulate) {
    if (left >= 4 && !accumulate) return store4(&to[at], v);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        if (j < left) put(to[at + j], v[j], accumulate);
    }
}

// y = window(x) · w + bias.
template <u32 ROWS, u32 COLS, u32 EACH>
__device__ __forceinline__ void forward_tile(const Conv& s, Span<const Value> x,
                                             Span<const float> w, Span<const float> bias,
                                             Span<Value> y) {
    using T = Tile<ROWS, COLS, EACH, Product>;
    __shared__ T tiles[STAGES];
    __shared__ Corner corners[ROWS];
    u32 pixels = s.batch * s.out_h * s.out_w, depth = s.kh * s.kw * s.job_in, t = threadIdx.x;
    Place<ROWS, COLS> at(pixels, s.job_out, s.jobs);
    for (u32 i = t; i < ROWS; i += T::THREADS) corners[i] = input_corner(s, at.row + i, pixels);
    Lane<T::THREADS> lane;
    Element element(lane.k, s.kw, s.job_in);
    u32 k0 = 0;
    float sum[EACH][EACH] = {};
    auto load = [&](u32 stage) {
        T& tile = tiles[stage];
        bool inside = k0 + lane.k < depth;
#pragma unroll
        for (u32 j = 0; j < ROWS; j += lane.STEP) {
            u32 i = j + lane.row;
            i64 from = inside ? input_at(s, corners[i], element, at.job * s.job_in) : -1;
            fetch(tile.a + lane.k * T::A + i, x, from);
        }
        // A row of weights is padded to whole quads.
        u32 quad = t % (COLS / 4) * 4, col = at.col + quad;
#pragma unroll
        for (u32 j = 0; j < DEPTH; j += T::QUADS) {
            u32 k = j + t / (COLS / 4);
            if (T::QUADS > DEPTH && k >= DEPTH) break;
            bool is = k0 + k < depth && col < s.step;
            i64 from = ((i64)at.job * depth + k0 + k) * s.step + col;
            fetch4(tile.b + k * T::B + quad, w, from, is ? 4 : 0);
        }
        element.advance(s.kw, s.job_in), k0 += DEPTH;
    };
    auto round = [&](u32 stage) {
        T& tile = tiles[stage];
#pragma unroll
        for (u32 j = 0; j < ROWS; j += lane.STEP) T::round(tile.a[lane.k * T::A + j + lane.row]);
#pragma unroll
        for (u32 j = 0; j < DEPTH; j += T::QUADS) {
            u32 k = j + t / (COLS / 4);
            if (T::QUADS <= DEPTH || k < DEPTH) T::round4(tile.b + k * T::B + t % (COLS / 4) * 4);
        }
    };
    auto add = [&](u32 stage) { tiles[stage].multiply(sum); };
    __syncthreads();
    pipeline((depth + DEPTH - 1) / DEPTH, load, round, add);
    T::each(sum, [&](u32 row, u32 col, float(&four)[4]) {
        row += at.row, col += at.col;
        if (row >= pixels || col >= s.job_out) return;
        u32 channel = at.job * s.job_out + col, left = s.job_out - col;
        if (bias.len > 0) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) four[j] += j < left ? bias[channel + j] : 0.0f;
        }
        put4(y, (i64)row * s.out_c + channel, four, left, false);
    });
}

extern "C" __global__ void __launch_bounds__(128, 3)
    forward_large(Span<const Value> x, Span<const float> w, Span<const float> bias, Span<Value> y,
                  Conv s) {
    locate(x, w, bias, y);
    forward_tile<128, 64, 8>(s, x, w, bias, y);
}

extern "C" __global__ void __launch_bounds__(256, 3)
    forward_wide(Span<const Value> x, Span<const float> w, Span<const float> bias, Span<Value> y,
                 Conv s) {
    locate(x, w, bias, y);
    forward_tile<64, 64, 4>(s, x, w, bias, y);
}

extern "C" __global__ void __launch_bounds__(128)
    forward_narrow(Span<const Value> x, Span<const float> w, Span<const float> bias, Span<Value> y,
                   Conv s) {
    locate(x, w, bias, y);
    forward_tile<128, 16, 4>(s, x, w, bias, y);
}

extern "C" __global__ void __launch_bounds__(64)
    forward_small(Span<const Value> x, Span<const float> w, Span<const float> bias, Span<Value> y,
                  Conv s) {
    locate(x, w, bias, y);
    forward_tile<32, 32, 4>(s, x, w, bias, y);
}

// dx (+)= windows of dy · transposed w, for the pixels of a phase.
template <u32 ROWS, u32 COLS, u32 EACH>
__device__ __forceinline__ void data_tile(const Conv& s, Span<const Value> dy, Span<const float> w,
                                          Span<Value> dx) {
    using T = Tile<ROWS, COLS, EACH, Product>;
    __shared__ T tiles[STAGES];
    __shared__ Corner corners[ROWS];
    u32 t = threadIdx.x;
    // As many tiles for each phase as the first, and largest, needs.
    Place<ROWS, COLS> at(Phase(s, 0).pixels(s), s.job_in, s.jobs);
    Phase phase(s, at.part);
    u32 pixels = phase.pixels(s), depth = phase.kh * phase.kw * s.job_out;
    for (u32 i = t; i < ROWS; i += T::THREADS) corners[i] = phase.corner(s, at.row + i);
    Lane<T::THREADS> lane;
    Element element(lane.k, max(phase.kw, 1u), s.job_out);
    u32 k = lane.k;
    float sum[EACH][EACH] = {};
    auto load = [&](u32 stage) {
        T& tile = tiles[stage];
#pragma unroll
        for (u32 j = 0; j < ROWS; j += lane.STEP) {
            u32 i = j + lane.row;
            i64 from = k < depth ? gradient_at(s, corners[i], element, at.job * s.job_out) : -1;
            fetch(tile.a + lane.k * T::A + i, dy, from);
        }
        u32 ky = phase.ky + element.ky * s.th, kx = phase.kx + element.kx * s.tw;
        i64 first = (i64)((at.job * s.kh + ky) * s.kw + kx) * s.job_in + at.col;
#pragma unroll
        for (u32 j = 0; j < COLS; j += lane.STEP) {
            u32 i = j + lane.row;
            bool is = k < depth && at.col + i < s.job_in;
            fetch(tile.b + lane.k * T::B + i, w, is ? (first + i) * s.step + element.c : -1);
        }
        element.advance(phase.kw, s.job_out), k += DEPTH;
    };
    auto round = [&](u32 stage) {
        T& tile = tiles[stage];
#pragma unroll
        for (u32 j = 0; j < ROWS; j += lane.STEP) T::round(tile.a[lane.k * T::A + j + lane.row]);
#pragma unroll
        for (u32 j = 0; j < COLS; j += lane.STEP) T::round(tile.b[lane.k * T::B + j + lane.row]);
    };
    auto add = [&](u32 stage) { tiles[stage].multiply(sum); };
    __syncthreads();
    pipeline((depth + DEPTH - 1) / DEPTH, load, round, add);
    T::each(sum, [&](u32 row, u32 col, float(&four)[4]) {
        row += at.row, col += at.col;
        if (row >= pixels || col >= s.job_in) return;
        i64 to = (i64)phase.pixel(s, row) * s.in_c + at.job * s.job_in + col;
        put4(dx, to, four, s.job_in - col, s.accumulate);
    });
}

extern "C" __global__ void __launch_bounds__(128, 3)
    data_large(Span<const Value> dy, Span<const float> w, Span<Value> dx, Conv s) {
    locate(dy, w, dx);
    data_tile<128, 64, 8>(s, dy, w, dx);
}

extern "C" __global__ void __launch_bounds__(256, 3)
    data_wide(Span<const Value> dy, Span<const float> w, Span<Value> dx, Conv s) {
    locate(dy, w, dx);
    data_tile<64, 64, 4>(s, dy, w, dx);
}

extern "C" __global__ void __launch_bounds__(128)
    data_narrow(Span<const Value> dy, Span<const float> w, Span<Value> dx, Conv s) {
    locate(dy, w, dx);
    data_tile<128, 16, 4>(s, dy, w, dx);
}

extern "C" __global__ void __launch_bounds__(64)
    data_small(Span<const Value> dy, Span<const float> w, Span<Value> dx, Conv s) {
    locate(dy, w, dx);
    data_tile<32, 32, 4>(s, dy, w, dx);
}

// Steps whose pixels are in shared memory at a time. The load of a step also finds the pixels of
// the step STAGES later. The first STAGES − 1 loads have no barrier between them: the pixels that
// they find may not overwrite those that they read.
constexpr u32 RING = STAGES + 2;

// Gradients of the parameters over a part of the output pixels: [part][job][k][job_out], then
// [out_c] of the bias. Rows of the product are elements of the window, depth the pixels. A warp
// copies adjacent rows and columns to consecutive banks. The gradient of the bias is a
// sum of the unrounded columns.
template <u32 ROWS, u32 COLS, u32 EACH>
__device__ __forceinline__ void weight_tile(const Conv& s, Span<const Value> x,
                                            Span<const Value> dy, Span<float> sums) {
    using T = Tile<ROWS, COLS, EACH, Product, true>;
    __shared__ T tiles[STAGES];
    __shared__ Corner corners[RING][DEPTH];  // of the steps that come next
    u32 depth = s.kh * s.kw * s.job_in, t = threadIdx.x, first, end;
    Place<ROWS, COLS> at(depth, s.job_out, s.jobs);
    part_range(s, at.part, first, end);
    u32 mine = at.row + t % ROWS, p0 = first, turn = 0;
    Element element(mine, s.kw, s.job_in);
    for (u32 i = t; i < STAGES * DEPTH; i += T::THREADS) {
        corners[i / DEPTH][i % DEPTH] = input_corner(s, first + i, end);
    }
    auto load = [&](u32 stage) {
        T& tile = tiles[stage];
#pragma unroll
        for (u32 j = 0; j < DEPTH; j += T::THREADS / ROWS) {
            u32 k = j + t / ROWS;
            const Corner& corner = corners[turn][k];
            i64 from = mine < depth ? input_at(s, corner, element, at.job * s.job_in) : -1;
            fetch(tile.a + k * T::A + t % ROWS, x, from);
        }
        u32 quad = t % (COLS / 4) * 4, col = at.col + quad;
#pragma unroll
        for (u32 j = 0; j < DEPTH; j += T::QUADS) {
            u32 k = j + t / (COLS / 4);
            if (T::QUADS > DEPTH && k >= DEPTH) break;
            bool is = p0 + k < end && col < s.job_out;
            i64 from = (i64)(p0 + k) * s.out_c + at.job * s.job_out + col;
            fetch4(tile.b + k * T::B + quad, dy, from, is ? s.job_out - col : 0);
        }
        u32 later = turn + STAGES < RING ? turn + STAGES : turn + STAGES - RING;
        if (t < DEPTH) corners[later][t] = input_corner(s, p0 + STAGES * DEPTH + t, end);
        turn = turn == RING - 1 ? 0 : turn + 1, p0 += DEPTH;
    };
    float sum[EACH][EACH] = {};
    double bias = 0.0;
    __syncthreads();
    auto round = [&](u32 stage) {
#pragma unroll
        for (u32 j = 0; j < DEPTH; j += T::THREADS / ROWS) {
            T::round(tiles[stage].a[(j + t / ROWS) * T::A + t % ROWS]);
        }
    };
    pipeline((end - first + DEPTH - 1) / DEPTH, load, round, [&](u32 stage) {
        tiles[stage].multiply(sum);
        if (at.row != 0 || t >= COLS) return;
        float here = 0.0f;
        for (u32 k = 0; k < DEPTH; ++k) here += tiles[stage].b[k * T::B + t];
        bias += (double)here;
    });
    i64 weights = (i64)s.jobs * depth * s.job_out, part = at.part * (weights + s.out_c);
    if (at.row == 0 && t < COLS && at.col + t < s.job_out) {
        sums[part + weights + at.job * s.job_out + at.col + t] = (float)bias;
    }
    T::each(sum, [&](u32 row, u32 col, float(&four)[4]) {
        row += at.row, col += at.col;
        if (row >= depth || col >= s.job_out) return;
        i64 to = part + ((i64)at.job * depth + row) * s.job_out + col;
        put4(sums, to, four, s.job_out - col, false);
    });
}

extern "C" __global__ void __launch_bounds__(128, 3)
    weight_large(Span<const Value> x, Span<const Value> dy, Span<float> sums, Conv s) {
    locate(x, dy, sums);
    weight_tile<128, 64, 8>(s, x, dy, sums);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    weight_wide(Span<const Value> x, Span<const Value> dy, Span<float> sums, Conv s) {
    locate(x, dy, sums);
    weight_tile<64, 64, 4>(s, x, dy, sums);
}

extern "C" __global__ void __launch_bounds__(64)
    weight_narrow(Span<const Value> x, Span<const Value> dy, Span<float> sums, Conv s) {
    locate(x, dy, sums);
    weight_tile<64, 16, 4>(s, x, dy, sums);
}

extern "C" __global__ void __launch_bounds__(64)
    weight_small(Span<const Value> x, Span<const Value> dy, Span<float> sums, Conv s) {
    locate(x, dy, sums);
    weight_tile<32, 32, 4>(s, x, dy, sums);
}
