// 3 × 3 convolutions with stride 1 and one group, for small images with few channels.
//
// A block computes a tile of pixels, of several images if they are small, for up to 64 channels. It
// goes through the channels that it reads a chunk at a time: the tile with a halo of one pixel lies
// in shared memory as planes [channel][image][row][column], the weights as [channel][tap][column].
// While a chunk is computed the next one is copied to a second buffer. For tensor cores a chunk is
// rounded first: so one buffer receives chunks, and another holds the words that are multiplied.
//
// A warp's copies of an image are 8 channels of 4 pixels, or 4 of 8, which are whole sectors of a
// row; planes are 4 banks apart, or 8, so that the copies go to all 32 banks.
#include "conv.cuh"
#include "product.cuh"
#include "window.cuh"

using Single = Product::Single;

struct Window {
    u32 batch;
    u32 in_h, in_w, in_c;     // images that are read: x, or dy for the data gradient
    u32 out_h, out_w, out_c;  // images that are written
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
    u32 staging;                 // in shared memory: plane of a result; weight gradient: row of dy
    u32 weights;                 // first float of the weights, or of dy, in a buffer
    u32 filter;                  // from channel to channel of the weights
    u32 words;                   // first word that tensor cores read
    u32 word_plane, word_row;    // from word to word of images; row to row of weights or of dy
    u32 word_weights;            // first word of the weights, or of dy, among them
    u32 tables;                  // first word of the tables of tensor cores
    u32 parts, part_tiles;       // weight gradient: parts, and tiles of each
    u32 subsets;                 // weight gradient: threads that share a tile's rows
    u32 slots;                   // weight gradient: first double of the bias's sums
    Divisor columns;             // by the channels of a tile that are written
    Divisor wide;                // by the columns of a tile
    Divisor high, halo;          // by its rows, without and with its halo

    // A tile as products read it. On units of f32, `apart` is the distance between the weights of
    // channels, or between rows of dy.
    template <class P>
    __device__ __forceinline__ Area area(u32 apart) const {
        u32 each = chunk / P::EACH;
        if (P::MATRIX) {
            return {images, tile_h,        tile_w,   pitch, word_plane,
                    each,   column_groups, word_row, wide,  high};
        }
        return {images, tile_h, tile_w, pitch, plane, each, column_groups, apart, wide, high};
    }
};

// The first pixel of a tile, in the images that are written.
struct Origin {
    u32 image, y, x;

    __device__ Origin(const Window& s, u32 tile) {
        x = tile % s.across * s.tile_w, tile /= s.across;
        y = tile % s.down * s.tile_h, image = tile / s.down * s.images;
    }
};

// Copies channels of a tile and its halo to shared memory: a chunk of 8 channels at most.
__device__ __forceinline__ void load_planes(const Window& s, Span<const Value> x, float* planes,
                                            const Origin& at, Channels which) {
    u32 lanes = which.n > 4 ? 8 : 4, lane = threadIdx.x % 32, c = lane % lanes;
    if (c >= which.n) return;
    for (u32 r = threadIdx.x / 32; r < s.images * s.halo.by; r += blockDim.x / 32) {
        // Coordinates above the image, or left of it, wrap around to large numbers.
        u32 row, image = at.image + s.halo.divide(r, row), y = at.y + row - s.ph;
        bool inside = image < s.batch && y < s.in_h;
        i64 from = (i64)((image * s.in_h + y) * s.in_w) * s.in_c + which.first + c;
        float* to = planes + c * s.plane + r * s.pitch;
#pragma unroll 4
        for (u32 j = lane / lanes; j < s.tile_w + 2; j += 32 / lanes) {
            u32 column = at.x + j - s.pw;
            bool is = inside && column < s.in_w;
            fetch(to + j, x, is ? from + (i64)column * s.in_c : -1);
        }
    }
}

// Weights of input channels [c0, c0 + n) and of output channels from `col` on. The threads of a
// warp copy elements that are contiguous both in `w` and in shared memory, 16 bytes each.
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
__device__ __forceinline__ void write_tile(const Window& s, const float* staging, const Origin& at,
                                           u32 col0, Span<const float> bias, Span<Value> y,
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
            const float* from = staging + mine * s.staging + r * s.tile_w;
            for (u32 k = lane / 8; k < s.tile_w && at.x + k < s.out_w; k += 4) {
                float v = from[k] + b;
                if (STATISTICS) v = as_stored<Value>(v);
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

// Writes four words side by side: `v[e][i]` is factor e of word i.
template <class P>
__device__ __forceinline__ void pack4(float* to, const float (&v)[P::EACH][4]) {
    u32 words[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        float of[P::EACH];
#pragma unroll
        for (u32 e = 0; e < P::EACH; ++e) of[e] = v[e][i];
        words[i] = P::word(of);
    }
    *reinterpret_cast<float4*>(to) =
        make_float4(__uint_as_float(words[0]), __uint_as_float(words[1]),
                    __uint_as_float(words[2]), __uint_as_float(words[3]));
}

// Four elements of each channel of a word, whose first channel is `c`; channels are `apart` apart,
// and channels from `n` on are zeros.
template <class P>
__device__ __forceinline__ void load_channels(const float* from, u32 apart, u32 c, u32 n,
                                              float (&v)[P::EACH][4]) {
#pragma unroll
    for (u32 e = 0; e < P::EACH; ++e) {
        v[e][0] = v[e][1] = v[e][2] = v[e][3] = 0.0f;
        if (c + e < n) load4(from + (c + e) * apart, v[e]);
    }
}

// Rounds the planes of a chunk's first `n` channels to words for tensor cores, a warp a word.
template <class P>
__device__ __forceinline__ void pack_planes(const Window& s, const float* planes, float* words,
                                            u32 n) {
    u32 all = s.images * s.halo.by * s.pitch;
    for (u32 word = threadIdx.x / 32; word < s.chunk / P::EACH; word += WARPS) {
        for (u32 i = threadIdx.x % 32 * 4; i < all; i += 128) {
            float v[P::EACH][4];
            load_channels<P>(planes + i, s.plane, word * P::EACH, n, v);
            pack4<P>(words + word * s.word_plane + i, v);
        }
    }
}

// The same for weights, which become rows [tap][word].
template <class P>
__device__ __forceinline__ void pack_weights(const Window& s, const float* weights, float* words,
                                             u32 n) {
    u32 each = s.chunk / P::EACH;
    for (u32 word = threadIdx.x / 32; word < each; word += WARPS) {
        for (u32 i = threadIdx.x % 32 * 4; i < 9 * s.columns.by; i += 128) {
            u32 j, tap = s.columns.divide(i, j);
            float v[P::EACH][4];
            load_channels<P>(weights + i, s.filter, word * P::EACH, n, v);
            pack4<P>(words + (tap * each + word) * s.word_row + j, v);
        }
    }
}

// Goes through the chunks, or tiles, of a block: `load(i, to)` copies one to shared memory,
// `take(i, from)` adds the sums that tensor cores do not compute, and rounds the factors for them;
// `add(i, from)` adds the products while the next chunk arrives.
template <class Load, class Take, class Add>
__device__ __forceinline__ void pipeline(const Window& s, float* shared, u32 count, Load load,
                                         Take take, Add add) {
    load(0, shared);
    commit();
    float *here = shared, *next = Product::MATRIX ? shared : shared + s.buffer;
    for (u32 i = 0; i < count; ++i) {
        arrived<0>();
        __syncthreads();
        // Every thread is done with the products before.
        if (Product::MATRIX) {
            take(i, here);
            __syncthreads();
        }
        if (i + 1 < count) load(i + 1, next);
        commit();
        if (!Product::MATRIX) take(i, here);
        add(i, Product::MATRIX ? shared + s.words : here);
        float* other = here;
        here = next, next = other;
    }
    __syncthreads();
}

// Adds the products of a tile of pixels. The results come to shared memory.
template <bool GRADIENT, class Sums>
__device__ __forceinline__ void add_products(const Window& s, Span<const Value> x,
                                             Span<const float> w, float* shared, const Origin& at,
                                             u32 col0) {
    Area area = s.area<Product>(s.filter);
    float* words = shared + s.words;
    Sums sums(area, words, shared + s.tables);
    if (Product::MATRIX) clear_rows(area, words + s.word_weights);
    auto channels = [&](u32 i) {
        u32 first = i * s.chunk;
        return Channels{first, min(s.in_c - first, s.chunk)};
    };
    auto load = [&](u32 i, float* to) {
        Channels which = channels(i);
        load_planes(s, x, to, at, which);
        if (GRADIENT) {
            load_transposed(s, w, to + s.weights, col0, which.first, which.n);
        } else {
            load_weights(s, w, to + s.weights, col0, which.first, which.n);
        }
    };
    auto take = [&](u32 i, const float* from) {
        if constexpr (Product::MATRIX) {
            u32 n = channels(i).n;
            pack_planes<Product>(s, from, words, n);
            pack_weights<Product>(s, from + s.weights, words + s.word_weights, n);
        }
    };
    pipeline(s, shared, (s.in_c + s.chunk - 1) / s.chunk, load, take, [&](u32 i, float* from) {
        u32 weights = Product::MATRIX ? s.word_weights : s.weights;
        sums.add(from, from + weights, channels(i).n);
    });
    sums.put(shared, s.staging);
    __syncthreads();
}

template <bool GRADIENT, bool STATISTICS>
__device__ __forceinline__ void window_tile(const Window& s, Span<const Value> x,
                                            Span<const float> w, Span<const float> bias,
                                            Span<Value> y, Span<double> sums) {
    extern __shared__ float4 shared4[];
    float* shared = reinterpret_cast<float*>(shared4);
    u32 col0 = blockIdx.x % s.column_tiles * 8 * s.column_groups;
    Origin at(s, blockIdx.x / s.column_tiles);
    with_sums<Product>(s.column_groups, [&](auto type) {
        add_products<GRADIENT, typename decltype(type)::Is>(s, x, w, shared, at, col0);
    });
    write_tile<STATISTICS>(s, shared, at, col0, bias, y, sums);
}

extern "C" __global__ void __launch_bounds__(128, 4)
    forward_3x3(Span<const Value> x, Span<const float> w, Span<const float> bias, Span<Value> y,
                Window s) {
    locate(x, w, bias, y);
    window_tile<false, false>(s, x, w, bias, y, {nullptr, 0});
}

extern "C" __global__ void __launch_bounds__(128, 4)
    statistics_3x3(Span<const Value> x, Span<const float> w, Span<const float> bias,
                   Span<Value> y, Span<double> sums, Window s) {
    locate(x, w, bias, y, sums);
    window_tile<false, true>(s, x, w, bias, y, sums);
}

extern "C" __global__ void __launch_bounds__(128, 4)
    data_3x3(Span<const Value> dy, Span<const float> w, Span<Value> dx, Window s) {
    locate(dy, w, dx);
    window_tile<true, false>(s, dy, w, {nullptr, 0}, dx, {nullptr, 0});
}

// Copies the output gradient of a tile's pixels, channels from `col0` on, to rows of shared memory:
// [image and row][column][channel]. Elements outside the image are zero. A warp copies 16 bytes for
// each thread, of channels and pixels that lie side by side.
__device__ __forceinline__ void load_gradient(const Window& s, Span<const Value> dy, float* to,
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
                float* here = to + r * s.staging + k * s.columns.by + j;
                fetch4(here, dy, from + (i64)k * s.out_c + j, left);
            }
        }
    }
}

// Adds the sums of a tile's gradient per channel to the thread's: of channel t % 8 of each group,
// over the rows that it takes, of which a warp reads four at a time, 8 banks apart.
__device__ __forceinline__ void add_bias(const Window& s, const float* gradient, double* slots) {
    u32 t = threadIdx.x;
    for (u32 g = 0; g < s.column_groups; ++g) {
        float here = 0.0f;
        for (u32 r = t / 8; r < s.images * s.tile_h; r += blockDim.x / 8) {
            const float* row = gradient + r * s.staging + 8 * g + t % 8;
            for (u32 k = 0; k < s.tile_w; ++k) here += row[k * s.columns.by];
        }
        slots[g * blockDim.x + t] += (double)here;
    }
}

// Rounds a tile's gradient to words for tensor cores, pixel after pixel.
template <class P>
__device__ __forceinline__ void pack_gradient(const Window& s, const float* gradient,
                                              float* words) {
    u32 all = s.images * s.tile_h * s.tile_w * s.columns.by;
    for (u32 i = 4 * threadIdx.x; i < all; i += 4 * blockDim.x) {
        u32 j, pixel = s.columns.divide(i, j), k, r = s.wide.divide(pixel, k);
        float v[1][4];
        load4(gradient + r * s.staging + k * s.columns.by + j, v[0]);
        pack4<P>(words + pixel * s.word_row + j, v);
    }
}

// A block of the weight gradient: a part of the tiles, of the input channels, and of the output
// channels from `col` on.
struct Block {
    Channels which;
    u32 col, part;

    __device__ __forceinline__ explicit Block(const Window& s) {
        u32 chunks = (s.in_c + s.chunk - 1) / s.chunk, at = blockIdx.x;
        col = at % s.column_tiles * 8 * s.column_groups, at /= s.column_tiles;
        u32 first = at % chunks * s.chunk;
        which = {first, min(s.chunk, s.in_c - first)}, part = at / chunks;
    }
};

// Adds up the threads' sums in shared memory, and the sums of the bias.
template <class Sums>
__device__ __forceinline__ void write_sums(const Window& s, const Sums& own, const float* shared,
                                           const double* slots, const Block& block,
                                           Span<float> sums) {
    u32 cols = 8 * s.column_groups, chunk = s.chunk, t = threadIdx.x;
    u32 c0 = block.which.first, col0 = block.col, part = block.part;
    u32 weights = 9 * s.in_c * s.out_c;
    i64 to = (i64)part * (weights + s.out_c);
    for (u32 i = t; i < 9 * chunk * cols; i += blockDim.x) {
        u32 col = i % cols, c = i / cols % chunk, tap = i / cols / chunk;
        double sum = own.total(shared, i);
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

// Adds up a block's tiles. The threads' sums come to shared memory.
template <class Sums>
__device__ __forceinline__ void add_tiles(const Window& s, Span<const Value> x,
                                          Span<const Value> dy, const Block& block, bool biased,
                                          Sums& sums, float* shared, double* slots) {
    u32 tiles = (s.batch + s.images - 1) / s.images * s.down * s.across;
    u32 tile = block.part * s.part_tiles, end = min(tile + s.part_tiles, tiles);
    auto load = [&](u32 i, float* to) {
        Origin origin(s, tile + i);
        load_planes(s, x, to, origin, block.which);
        load_gradient(s, dy, to + s.weights, origin, block.col);
    };
    auto take = [&](u32, const float* from) {
        if (biased) add_bias(s, from + s.weights, slots);
        if constexpr (Product::MATRIX) {
            float* words = shared + s.words;
            pack_planes<Single>(s, from, words, block.which.n);
            pack_gradient<Single>(s, from + s.weights, words + s.word_weights);
        }
    };
    pipeline(s, shared, end - tile, load, take, [&](u32, float* from) {
        u32 gradient = Product::MATRIX ? s.word_weights : s.weights;
        sums.add(from, from + gradient, block.which.n);
    });
    sums.put(shared);
    __syncthreads();
}

// Gradients of the parameters over a part's tiles, of a chunk of input channels and up to 64 output
// channels: [part][tap][in_c][out_c], then [out_c] of the bias, zeros if `db` is absent.
extern "C" __global__ void __launch_bounds__(128, 4)
    weight_3x3(Span<const Value> x, Span<const Value> dy, Span<float> sums, Span<float> db,
               Window s) {
    locate(x, dy, sums, db);
    extern __shared__ float4 shared4[];
    float* shared = reinterpret_cast<float*>(shared4);
    double* slots = reinterpret_cast<double*>(shared4) + s.slots;
    for (u32 i = 0; i < s.column_groups; ++i) slots[i * blockDim.x + threadIdx.x] = 0.0;
    Block block(s);
    bool biased = block.which.first == 0 && db.len > 0;
    Area area = s.area<Single>(s.staging);
    with_gradient_sums<Product>(s.column_groups, [&](auto type) {
        typename decltype(type)::Is own(area, s.subsets, shared + s.tables);
        add_tiles(s, x, dy, block, biased, own, shared, slots);
        write_sums(s, own, shared, slots, block, sums);
    });
}
