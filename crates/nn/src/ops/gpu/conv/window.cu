// 3 × 3 convolutions with stride 1 and one group: what small images with few channels are made of.
//
// A block computes a tile of pixels, of several images if they are small, for up to 64 channels. It
// goes through the channels that it reads a chunk at a time: the tile with a halo of one pixel lies
// in shared memory as planes [channel][image][row][column], the weights as [channel][tap][column].
// While a chunk is computed the next one is on its way to a second buffer.
//
// A warp's loads of an image are 8 channels of 4 pixels, or 4 of 8, which are whole sectors of a
// row; planes are 4 banks apart, or 8, so that the loads go to all 32 banks.
#include "conv.cuh"
#include "window.cuh"

struct Window {
    u32 batch;
    u32 in_h, in_w, in_c;     // of the images that are read: x, or dy for the data gradient
    u32 out_h, out_w, out_c;  // of those that are written
    u32 ph, pw;               // zero rows above, zero columns to the left
    u32 step;                 // from row to row of the packed weights
    u32 accumulate;
    u32 images, tile_h, tile_w;  // of a tile
    u32 across, down;            // tiles of an image, or of a few small ones
    u32 column_tiles;            // tiles of the channels that are written
    u32 column_groups;           // groups of 8 such channels in a tile
    u32 chunk;                   // channels that are read at a time
    u32 buffer;                  // floats of shared memory of a chunk
    u32 pitch, plane;            // of the tile in shared memory: of a row, of a channel
    u32 stage;                   // forward: plane of a result in shared memory; else row of dy
    u32 weights;                 // first float of the weights, or of dy, in a buffer
    u32 filter;                  // from channel to channel of the weights
    u32 parts, part_tiles;       // weight gradient: parts, and tiles of each
    u32 subsets;                 // weight gradient: threads that share a tile's rows
    u32 slots;                   // weight gradient: first double of the bias's sums
    Divisor columns;             // by the channels of a tile that are written
    Divisor high, halo;          // by the rows of a tile, without and with its halo
};

// The first pixel of a tile, in the images that are written.
struct Origin {
    u32 image, y, x;

    __device__ Origin(const Window& s, u32 tile) {
        x = tile % s.across * s.tile_w, tile /= s.across;
        y = tile % s.down * s.tile_h, image = tile / s.down * s.images;
    }
};

// Copies channels [c0, c0 + n) of a tile and its halo to shared memory.
__device__ __forceinline__ void load_planes(const Window& s, Span<const float> x, float* planes,
                                            const Origin& at, u32 c0, u32 n) {
    u32 lanes = n > 4 ? 8 : 4, lane = threadIdx.x % 32, c = lane % lanes;
    if (c >= n) return;
    for (u32 r = threadIdx.x / 32; r < s.images * s.halo.by; r += blockDim.x / 32) {
        // What lies above the image, or left of it, wraps around to large numbers.
        u32 row, image = at.image + s.halo.divide(r, row), y = at.y + row - s.ph;
        bool inside = image < s.batch && y < s.in_h;
        i64 from = (i64)((image * s.in_h + y) * s.in_w) * s.in_c + c0 + c;
        float* to = planes + c * s.plane + r * s.pitch;
#pragma unroll 4
        for (u32 j = lane / lanes; j < s.tile_w + 2; j += 32 / lanes) {
            u32 column = at.x + j - s.pw;
            bool is = inside && column < s.in_w;
            fetch(to + j, x, is ? from + (i64)column * s.in_c : -1);
        }
    }
}

// Weights of channels [c0, c0 + n) that are read and of those that are written from `col` on. The
// threads of a warp copy what lies in a row here and in shared memory, 16 bytes each.
__device__ __forceinline__ void load_weights(const Window& s, Span<const float> w, float* weights,
                                             u32 col, u32 c0, u32 n) {
    for (u32 i = 4 * threadIdx.x; i < 9 * n * s.columns.by; i += 4 * blockDim.x) {
        u32 j, row = s.columns.divide(i, j), tap = row % 9, c = row / 9;
        i64 from = (i64)(tap * s.in_c + c0 + c) * s.step + col + j;
        float* to = weights + c * s.filter + tap * s.columns.by + j;
        // Rows of weights are padded to a multiple of 16.
        fetch4(to, w, from, col + j < s.step ? 4 : 0);
    }
}

// The same for the data gradient, which reads weights transposed, taps in reverse order. A warp
// copies 8 channels that are read of 4 that are written, or 4 of 8, to all 32 banks as in
// `load_planes`.
__device__ __forceinline__ void load_transposed(const Window& s, Span<const float> w,
                                                float* weights, u32 col, u32 c0, u32 n) {
    u32 lanes = n > 4 ? 8 : 4, c = threadIdx.x % lanes;
    if (c >= n) return;
    for (u32 i = threadIdx.x / lanes; i < 9 * s.columns.by; i += blockDim.x / lanes) {
        u32 j, tap = s.columns.divide(i, j);
        i64 from = (i64)((8 - tap) * s.out_c + col + j) * s.step + c0 + c;
        fetch(weights + c * s.filter + i, w, col + j < s.out_c ? from : -1);
    }
}

// Writes a tile's results, which lie in planes [channel][image][row][column], and the sums and the
// sums of squares of its channels: [tile][2][out_c].
template <bool STATISTICS>
__device__ __forceinline__ void write_tile(const Window& s, const float* stage, const Origin& at,
                                           u32 col0, Span<const float> bias, Span<float> y,
                                           Span<double> sums) {
    __shared__ double partial[2][4][STATISTICS ? 64 : 1];
    u32 t = threadIdx.x, lane = t % 32, warp = t / 32, warps = blockDim.x / 32;
    for (u32 g = 0; g < s.column_groups; ++g) {
        u32 mine = 8 * g + lane % 8, col = col0 + mine;
        bool is = col < s.out_c;
        float b = is && bias.len > 0 ? bias[col] : 0.0f;
        double sum = 0.0, square = 0.0;
        for (u32 r = warp; r < s.images * s.tile_h; r += warps) {
            u32 row, image = at.image + s.high.divide(r, row);
            row += at.y;
            if (!is || image >= s.batch || row >= s.out_h) continue;
            i64 to = (i64)((image * s.out_h + row) * s.out_w + at.x) * s.out_c + col;
            const float* from = stage + mine * s.stage + r * s.tile_w;
            for (u32 k = lane / 8; k < s.tile_w && at.x + k < s.out_w; k += 4) {
                float v = from[k] + b;
                put(y[to + (i64)k * s.out_c], v, s.accumulate);
                if (STATISTICS) sum += (double)v, square = fma((double)v, (double)v, square);
            }
        }
        if (STATISTICS) {
            for (u32 step = 8; step < 32; step *= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, step);
                square += __shfl_xor_sync(0xffffffffu, square, step);
            }
            if (lane < 8) partial[0][warp][mine] = sum, partial[1][warp][mine] = square;
        }
    }
    if constexpr (!STATISTICS) return;
    __syncthreads();
    i64 to = (i64)(blockIdx.x / s.column_tiles) * 2 * s.out_c + col0;
    for (u32 i = t; i < 16 * s.column_groups; i += blockDim.x) {
        u32 which = i / (8 * s.column_groups), col = i % (8 * s.column_groups);
        double sum = 0.0;
        for (u32 of = 0; of < warps; ++of) sum += partial[which][of][col];
        if (col0 + col < s.out_c) sums[to + which * s.out_c + col] = sum;
    }
}

// A block's threads: pixel groups of 4 × 2 first, so that a warp reads the same weights.
template <bool GRADIENT, bool STATISTICS>
__device__ __forceinline__ void window_tile(const Window& s, Span<const float> x,
                                            Span<const float> w, Span<const float> bias,
                                            Span<float> y, Span<double> sums) {
    extern __shared__ float4 shared4[];
    float* shared = reinterpret_cast<float*>(shared4);
    u32 col0 = blockIdx.x % s.column_tiles * 8 * s.column_groups, cols = 8 * s.column_groups;
    Origin at(s, blockIdx.x / s.column_tiles);
    u32 wide = s.tile_w / 4, high = s.tile_h / 2, groups = s.images * high * wide;
    u32 group = threadIdx.x % groups, g = threadIdx.x / groups;
    u32 px = group % wide * 4, py = group / wide % high * 2, image = group / wide / high;
    bool works = g < s.column_groups;
    float sum[2][4][8] = {};
    const float* planes = shared + (image * (s.tile_h + 2) + py) * s.pitch + px;
    const float* weights = shared + s.weights + 8 * g;
    auto load = [&](u32 c0, u32 buffer) {
        u32 n = min(s.in_c - c0, s.chunk);
        float* to = shared + buffer * s.buffer;
        load_planes(s, x, to, at, c0, n);
        if (GRADIENT) {
            load_transposed(s, w, to + s.weights, col0, c0, n);
        } else {
            load_weights(s, w, to + s.weights, col0, c0, n);
        }
        commit();
    };
    load(0, 0);
    u32 buffer = 0;
    for (u32 c0 = 0; c0 < s.in_c; c0 += s.chunk, buffer ^= 1) {
        arrived<0>();
        __syncthreads();
        // Every thread is done with the chunk before, in whose place the next one comes.
        if (c0 + s.chunk < s.in_c) load(c0 + s.chunk, buffer ^ 1);
        u32 n = min(s.in_c - c0, s.chunk), from = buffer * s.buffer;
        for (u32 c = 0; works && c < n; ++c) {
            multiply(planes + from + c * s.plane, s.pitch, weights + from + c * s.filter, cols,
                     sum);
        }
    }
    __syncthreads();
    if (works) {
        float* to = shared + 8 * g * s.stage + (image * s.tile_h + py) * s.tile_w + px;
#pragma unroll
        for (u32 k = 0; k < 8; ++k) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const float(&of)[4][8] = sum[i];
                *reinterpret_cast<float4*>(to + k * s.stage + i * s.tile_w) =
                    make_float4(of[0][k], of[1][k], of[2][k], of[3][k]);
            }
        }
    }
    __syncthreads();
    write_tile<STATISTICS>(s, shared, at, col0, bias, y, sums);
}

extern "C" __global__ void __launch_bounds__(128, 4)
    forward_3x3(Span<const float> x, Span<const float> w, Span<const float> bias, Span<float> y,
                Window s) {
    locate(x, w, bias, y);
    window_tile<false, false>(s, x, w, bias, y, {nullptr, 0});
}

extern "C" __global__ void __launch_bounds__(128, 4)
    statistics_3x3(Span<const float> x, Span<const float> w, Span<const float> bias,
                   Span<float> y, Span<double> sums, Window s) {
    locate(x, w, bias, y, sums);
    window_tile<false, true>(s, x, w, bias, y, sums);
}

extern "C" __global__ void __launch_bounds__(128, 4)
    data_3x3(Span<const float> dy, Span<const float> w, Span<float> dx, Window s) {
    locate(dy, w, dx);
    window_tile<true, false>(s, dy, w, {nullptr, 0}, dx, {nullptr, 0});
}

// Copies the output gradient of a tile's pixels, channels from `col0` on, to rows of shared memory:
// [image and row][column][channel]. What lies outside is zero. A warp copies 16 bytes for each
// thread, of channels and pixels that lie side by side.
__device__ __forceinline__ void load_gradient(const Window& s, Span<const float> dy, float* to,
                                              const Origin& at, u32 col0) {
    u32 quads = 2 * s.column_groups, lane = threadIdx.x % 32;
    u32 lanes = quads % 8 == 0 ? 8 : quads % 4 == 0 ? 4 : 2;
    for (u32 r = threadIdx.x / 32; r < s.images * s.tile_h; r += blockDim.x / 32) {
        u32 y, image = at.image + s.high.divide(r, y);
        y += at.y;
        bool inside = image < s.batch && y < s.out_h;
        i64 from = (i64)((image * s.out_h + y) * s.out_w + at.x) * s.out_c + col0;
        for (u32 k = lane / lanes; k < s.tile_w; k += 32 / lanes) {
            bool is = inside && at.x + k < s.out_w;
            for (u32 j = lane % lanes * 4; j < 4 * quads; j += 4 * lanes) {
                u32 left = is && col0 + j < s.out_c ? s.out_c - col0 - j : 0;
                fetch4(to + r * s.stage + k * 4 * quads + j, dy, from + (i64)k * s.out_c + j, left);
            }
        }
    }
}

// Adds the sums of a tile's gradient per channel to the thread's: of channel t % 8 of each group,
// over the rows that it takes, of which a warp reads four at a time, 8 banks apart.
__device__ __forceinline__ void add_bias(const Window& s, const float* dy, double* slots) {
    u32 t = threadIdx.x, cols = 8 * s.column_groups;
    for (u32 g = 0; g < s.column_groups; ++g) {
        float here = 0.0f;
        for (u32 r = t / 8; r < s.images * s.tile_h; r += blockDim.x / 8) {
            for (u32 k = 0; k < s.tile_w; ++k) here += dy[r * s.stage + k * cols + 8 * g + t % 8];
        }
        slots[g * blockDim.x + t] += (double)here;
    }
}

// Adds up the subsets' sums, which lie in shared memory [9 · 8][thread], and those of the bias. A
// warp reads 8 rows, which are 4 banks apart, of 4 threads.
__device__ __forceinline__ void write_sums(const Window& s, const float* shared,
                                           const double* slots, u32 col0, u32 c0, u32 part,
                                           Span<float> sums) {
    u32 cols = 8 * s.column_groups, chunk = s.chunk, t = threadIdx.x;
    u32 apart = s.column_groups * chunk, weights = 9 * s.in_c * s.out_c;
    i64 to = (i64)part * (weights + s.out_c);
    for (u32 i = t; i < 9 * chunk * cols; i += blockDim.x) {
        u32 col = i % cols, c = i / cols % chunk, tap = i / cols / chunk;
        const float* from = shared + (tap * 8 + col % 8) * (blockDim.x + 4) + col / 8 * chunk + c;
        double sum = 0.0;
        for (u32 of = 0; of < s.subsets; ++of) sum += (double)from[of * apart];
        if (c0 + c < s.in_c && col0 + col < s.out_c) {
            sums[to + (i64)(tap * s.in_c + c0 + c) * s.out_c + col0 + col] = (float)sum;
        }
    }
    for (u32 col = t; c0 == 0 && col < cols && col0 + col < s.out_c; col += blockDim.x) {
        double sum = 0.0;
        for (u32 i = 0; i < blockDim.x / 8; ++i) {
            sum += slots[col / 8 * blockDim.x + 8 * i + col % 8];
        }
        sums[to + weights + col0 + col] = (float)sum;
    }
}

// Gradients of the parameters over a part's tiles, of a chunk of input channels and up to 64 output
// channels: [part][tap][in_c][out_c], behind them [out_c] of the bias, zeros if `db` is absent.
// Threads: input channels first, then groups of 8 output channels, then subsets of a tile's rows.
extern "C" __global__ void __launch_bounds__(128, 4)
    weight_3x3(Span<const float> x, Span<const float> dy, Span<float> sums, Span<float> db,
               Window s) {
    locate(x, dy, sums, db);
    extern __shared__ float4 shared4[];
    float* shared = reinterpret_cast<float*>(shared4);
    u32 chunk = s.chunk, chunks = (s.in_c + chunk - 1) / chunk;
    u32 t = threadIdx.x, at = blockIdx.x;
    u32 col0 = at % s.column_tiles * 8 * s.column_groups, cols = 8 * s.column_groups;
    at /= s.column_tiles;
    u32 c0 = at % chunks * chunk, part = at / chunks, n = s.in_c - c0 < chunk ? s.in_c - c0 : chunk;
    u32 c = t % chunk, g = t / chunk % s.column_groups, subset = t / chunk / s.column_groups;
    bool works = subset < s.subsets && c < n, biased = c0 == 0 && db.len > 0;
    double* slots = reinterpret_cast<double*>(shared4) + s.slots;
    for (u32 i = 0; i < s.column_groups; ++i) slots[i * blockDim.x + t] = 0.0;
    float sum[9][8] = {};
    u32 tiles = (s.batch + s.images - 1) / s.images * s.down * s.across;
    u32 tile = part * s.part_tiles, end = min(tile + s.part_tiles, tiles);
    auto load = [&](u32 tile, u32 buffer) {
        Origin origin(s, tile);
        float* to = shared + buffer * s.buffer;
        load_planes(s, x, to, origin, c0, n);
        load_gradient(s, dy, to + s.weights, origin, col0);
        commit();
    };
    load(tile, 0);
    for (u32 buffer = 0; tile < end; ++tile, buffer ^= 1) {
        arrived<0>();
        __syncthreads();
        // Every thread is done with the tile before, in whose place the next one comes.
        if (tile + 1 < end) load(tile + 1, buffer ^ 1);
        const float *planes = shared + buffer * s.buffer, *gradient = planes + s.weights;
        for (u32 r = subset; works && r < s.images * s.tile_h; r += s.subsets) {
            u32 y, image = s.high.divide(r, y);
            const float* row = planes + c * s.plane + (r + 2 * image) * s.pitch;
            row_products(row, s.pitch, gradient + r * s.stage + 8 * g, cols, s.tile_w, sum);
        }
        if (biased) add_bias(s, gradient, slots);
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < 72; ++i) shared[i * (blockDim.x + 4) + t] = sum[i / 8][i % 8];
    __syncthreads();
    write_sums(s, shared, slots, col0, c0, part, sums);
}
