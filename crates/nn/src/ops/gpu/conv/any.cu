// Convolutions of any shape, and linear layers, as products of matrices (kernels/conv). The matrix
// of windows is never stored: tiles of it are gathered from the image.
//
// A block computes a tile of ROWS × COLS elements of the product, a thread 4 × 4 of them, in steps
// of DEPTH products: both factors' parts lie in shared memory, [k][row] and [k][column], so that a
// thread reads its four rows and four columns of each k at once. A sum's terms are added one after
// the other, with fused multiplications as on the processor: its bits do not depend on the tile.
// While a step is computed the parts of the next STAGES − 1 are on their way.
#include "conv.cuh"

constexpr int DEPTH = 16;
constexpr int STAGES = 3;

// Rows of shared memory are 4 longer than the tile: a column's elements lie in different banks.
template <int ROWS, int COLS>
struct Tile {
    static constexpr int THREADS = ROWS * COLS / 16;
    static constexpr int A = ROWS + 4, B = COLS + 4;
    __align__(16) float a[DEPTH * A];
    __align__(16) float b[DEPTH * B];

    // Adds DEPTH products to the thread's elements.
    __device__ __forceinline__ void multiply(float (&sum)[4][4]) const {
        u32 row = threadIdx.x / (COLS / 4) * 4, col = threadIdx.x % (COLS / 4) * 4;
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float4 x = *reinterpret_cast<const float4*>(a + k * A + row);
            float4 y = *reinterpret_cast<const float4*>(b + k * B + col);
            float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(xs[i], ys[j], sum[i][j]);
            }
        }
    }
};

// A pixel whose window is read: its image's first element in the batch, and the window's corner.
struct Corner {
    i64 image;
    int y, x;
};

// Copies an element of a factor, or 0 if there is none.
__device__ __forceinline__ void fetch(float* to, Span<const float> from, i64 at) {
    if (at >= 0) {
        copy(to, &from[at]);
    } else {
        *to = 0.0f;
    }
}

// Runs a block's steps: `load(stage)` starts the copies of the next step into a stage, and
// `add(stage)` computes with a stage that has come.
template <class Load, class Add>
__device__ __forceinline__ void pipeline(u32 steps, Load load, Add add) {
    for (u32 next = 0; next < STAGES - 1; ++next) {
        if (next < steps) load(next);
        commit();
    }
    u32 stage = 0;
    for (u32 step = 0; step < steps; ++step) {
        arrived<STAGES - 2>();
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

// The output pixels whose windows hold an input pixel: their last one, for tap (0, 0).
__device__ Corner output_corner(const Conv& s, u32 pixel, u32 end) {
    if (pixel >= end) return {0, OUTSIDE, OUTSIDE};
    u32 x = pixel % s.in_w, row = pixel / s.in_w;
    return {(i64)(row / s.in_h) * (s.out_h * s.out_w * s.out_c), (int)(row % s.in_h + s.ph),
            (int)(x + s.pw)};
}

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
    u32 y = of.y + k.ky, x = of.x + k.kx;
    if (y >= s.in_h || x >= s.in_w) return -1;
    return of.image + (i64)(y * s.in_w + x) * s.in_c + channel + k.c;
}

// Where the output gradient lies that a tap brings back to an input pixel; −1 if there is none.
__device__ __forceinline__ i64 gradient_at(const Conv& s, const Corner& of, const Element& k,
                                           u32 channel) {
    int y = of.y - (int)k.ky, x = of.x - (int)k.kx;
    if (y < 0 || x < 0) return -1;
    u32 row = y, column = x;
    if (s.sh != 1) {
        if (row % s.sh != 0) return -1;
        row /= s.sh;
    }
    if (s.sw != 1) {
        if (column % s.sw != 0) return -1;
        column /= s.sw;
    }
    if (row >= s.out_h || column >= s.out_w) return -1;
    return of.image + (i64)(row * s.out_w + column) * s.out_c + channel + k.c;
}

// Where a block's tile lies: columns of tiles first, so that blocks that run at a time read the
// same rows.
template <int ROWS, int COLS>
struct Place {
    u32 job, row, col, part;

    __device__ Place(u32 rows, u32 cols, u32 jobs) {
        u32 across = (cols + COLS - 1) / COLS, down = (rows + ROWS - 1) / ROWS, at = blockIdx.x;
        col = at % across * COLS, at /= across;
        row = at % down * ROWS, at /= down;
        job = at % jobs, part = at / jobs;
    }
};

// y = window(x) · w + bias.
template <int ROWS, int COLS>
__device__ void forward_tile(const Conv& s, Span<const float> x, Span<const float> w,
                             Span<const float> bias, Span<float> y) {
    using T = Tile<ROWS, COLS>;
    __shared__ T tiles[STAGES];
    __shared__ Corner corners[ROWS];
    u32 pixels = s.batch * s.out_h * s.out_w, depth = s.kh * s.kw * s.job_in, t = threadIdx.x;
    Place<ROWS, COLS> at(pixels, s.job_out, s.jobs);
    for (u32 i = t; i < ROWS; i += T::THREADS) corners[i] = input_corner(s, at.row + i, pixels);
    Element element(t % DEPTH, s.kw, s.job_in);
    u32 k0 = 0;
    auto load = [&](u32 stage) {
        T& tile = tiles[stage];
        bool inside = k0 + t % DEPTH < depth;
#pragma unroll
        for (u32 j = 0; j < ROWS; j += T::THREADS / DEPTH) {
            u32 i = j + t / DEPTH;
            i64 from = inside ? input_at(s, corners[i], element, at.job * s.job_in) : -1;
            fetch(tile.a + t % DEPTH * T::A + i, x, from);
        }
#pragma unroll
        for (u32 j = 0; j < DEPTH; j += T::THREADS / COLS) {
            u32 k = j + t / COLS, col = at.col + t % COLS;
            bool is = k0 + k < depth && col < s.job_out;
            i64 from = is ? ((i64)at.job * depth + k0 + k) * s.step + col : -1;
            fetch(tile.b + k * T::B + t % COLS, w, from);
        }
        element.advance(s.kw, s.job_in), k0 += DEPTH;
    };
    float sum[4][4] = {};
    __syncthreads();
    pipeline((depth + DEPTH - 1) / DEPTH, load, [&](u32 stage) { tiles[stage].multiply(sum); });
    u32 row = at.row + t / (COLS / 4) * 4, col = at.col + t % (COLS / 4) * 4;
    u32 channel = at.job * s.job_out + col, left = col < s.job_out ? s.job_out - col : 0;
    for (u32 i = 0; i < 4 && row + i < pixels; ++i) {
        if (bias.len > 0) {
            for (u32 j = 0; j < 4 && j < left; ++j) sum[i][j] += bias[channel + j];
        }
        i64 to = (i64)(row + i) * s.out_c + channel;
        if (left >= 4) {
            store4(&y[to], sum[i]);
        } else {
            for (u32 j = 0; j < left; ++j) y[to + j] = sum[i][j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 4)
    forward_wide(Span<const float> x, Span<const float> w, Span<const float> bias, Span<float> y,
                 Conv s) {
    locate(x, w, bias, y);
    forward_tile<64, 64>(s, x, w, bias, y);
}

extern "C" __global__ void __launch_bounds__(128)
    forward_narrow(Span<const float> x, Span<const float> w, Span<const float> bias, Span<float> y,
                   Conv s) {
    locate(x, w, bias, y);
    forward_tile<128, 16>(s, x, w, bias, y);
}

extern "C" __global__ void __launch_bounds__(64)
    forward_small(Span<const float> x, Span<const float> w, Span<const float> bias, Span<float> y,
                  Conv s) {
    locate(x, w, bias, y);
    forward_tile<32, 32>(s, x, w, bias, y);
}

// dx (+)= windows of dy · transposed w.
template <int ROWS, int COLS>
__device__ void data_tile(const Conv& s, Span<const float> dy, Span<const float> w,
                          Span<float> dx) {
    using T = Tile<ROWS, COLS>;
    __shared__ T tiles[STAGES];
    __shared__ Corner corners[ROWS];
    u32 pixels = s.batch * s.in_h * s.in_w, depth = s.kh * s.kw * s.job_out, t = threadIdx.x;
    Place<ROWS, COLS> at(pixels, s.job_in, s.jobs);
    for (u32 i = t; i < ROWS; i += T::THREADS) corners[i] = output_corner(s, at.row + i, pixels);
    Element element(t % DEPTH, s.kw, s.job_out);
    u32 k = t % DEPTH;
    auto load = [&](u32 stage) {
        T& tile = tiles[stage];
#pragma unroll
        for (u32 j = 0; j < ROWS; j += T::THREADS / DEPTH) {
            u32 i = j + t / DEPTH;
            i64 from = k < depth ? gradient_at(s, corners[i], element, at.job * s.job_out) : -1;
            fetch(tile.a + t % DEPTH * T::A + i, dy, from);
        }
        u32 tap = (at.job * s.kh + element.ky) * s.kw + element.kx;
#pragma unroll
        for (u32 j = 0; j < COLS; j += T::THREADS / DEPTH) {
            u32 i = j + t / DEPTH;
            bool is = k < depth && at.col + i < s.job_in;
            i64 from = is ? ((i64)tap * s.job_in + at.col + i) * s.step + element.c : -1;
            fetch(tile.b + t % DEPTH * T::B + i, w, from);
        }
        element.advance(s.kw, s.job_out), k += DEPTH;
    };
    float sum[4][4] = {};
    __syncthreads();
    pipeline((depth + DEPTH - 1) / DEPTH, load, [&](u32 stage) { tiles[stage].multiply(sum); });
    u32 row = at.row + t / (COLS / 4) * 4, col = at.col + t % (COLS / 4) * 4;
    u32 left = col < s.job_in ? s.job_in - col : 0;
    for (u32 i = 0; i < 4 && row + i < pixels; ++i) {
        i64 to = (i64)(row + i) * s.in_c + at.job * s.job_in + col;
        if (left >= 4 && !s.accumulate) {
            store4(&dx[to], sum[i]);
        } else {
            for (u32 j = 0; j < 4 && j < left; ++j) put(dx[to + j], sum[i][j], s.accumulate);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 4)
    data_wide(Span<const float> dy, Span<const float> w, Span<float> dx, Conv s) {
    locate(dy, w, dx);
    data_tile<64, 64>(s, dy, w, dx);
}

extern "C" __global__ void __launch_bounds__(128)
    data_narrow(Span<const float> dy, Span<const float> w, Span<float> dx, Conv s) {
    locate(dy, w, dx);
    data_tile<128, 16>(s, dy, w, dx);
}

extern "C" __global__ void __launch_bounds__(64)
    data_small(Span<const float> dy, Span<const float> w, Span<float> dx, Conv s) {
    locate(dy, w, dx);
    data_tile<32, 32>(s, dy, w, dx);
}

// Steps whose pixels are known. A step's are found STAGES steps before; the first STAGES − 1 steps
// are loaded without a barrier between them, so none of theirs may be in its place.
constexpr u32 RING = STAGES + 2;

// Gradients of the parameters over a part of the output pixels: [part][job][k][job_out], behind
// them [out_c] of the bias. Rows of the product are elements of the window, depth the pixels.
template <int ROWS, int COLS>
__device__ void weight_tile(const Conv& s, Span<const float> x, Span<const float> dy,
                            Span<float> sums) {
    using T = Tile<ROWS, COLS>;
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
#pragma unroll
        for (u32 j = 0; j < DEPTH; j += T::THREADS / COLS) {
            u32 k = j + t / COLS, col = at.col + t % COLS;
            bool is = p0 + k < end && col < s.job_out;
            i64 from = is ? (i64)(p0 + k) * s.out_c + at.job * s.job_out + col : -1;
            fetch(tile.b + k * T::B + t % COLS, dy, from);
        }
        u32 later = turn + STAGES < RING ? turn + STAGES : turn + STAGES - RING;
        if (t < DEPTH) corners[later][t] = input_corner(s, p0 + STAGES * DEPTH + t, end);
        turn = turn == RING - 1 ? 0 : turn + 1, p0 += DEPTH;
    };
    float sum[4][4] = {};
    double bias = 0.0;
    __syncthreads();
    pipeline((end - first + DEPTH - 1) / DEPTH, load, [&](u32 stage) {
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
    u32 row = at.row + t / (COLS / 4) * 4, col = at.col + t % (COLS / 4) * 4;
    for (u32 i = 0; i < 4 && row + i < depth; ++i) {
        i64 to = part + ((i64)at.job * depth + row + i) * s.job_out + col;
        for (u32 j = 0; j < 4 && col + j < s.job_out; ++j) sums[to + j] = sum[i][j];
    }
}

extern "C" __global__ void __launch_bounds__(256, 3)
    weight_wide(Span<const float> x, Span<const float> dy, Span<float> sums, Conv s) {
    locate(x, dy, sums);
    weight_tile<64, 64>(s, x, dy, sums);
}

extern "C" __global__ void __launch_bounds__(64)
    weight_narrow(Span<const float> x, Span<const float> dy, Span<float> sums, Conv s) {
    locate(x, dy, sums);
    weight_tile<64, 16>(s, x, dy, sums);
}

extern "C" __global__ void __launch_bounds__(64)
    weight_small(Span<const float> x, Span<const float> dy, Span<float> sums, Conv s) {
    locate(x, dy, sums);
    weight_tile<32, 32>(s, x, dy, sums);
}
