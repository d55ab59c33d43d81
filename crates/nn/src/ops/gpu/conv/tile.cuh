// Tiles of a product of matrices.
#pragma once
#include "nn.cuh"

// Products that are added to a tile at a time.
constexpr u32 DEPTH = 16;

// A thread's elements lie in pieces of 4 × 4.
//
// In f32 the pieces of a thread are interleaved with those of its neighbours. Of each k, a warp
// reads 4 to 16 quads of adjacent columns, and 8 to 2 quads of rows; threads that read the same
// quad share one read. At most 256 contiguous bytes take two transactions, without bank conflicts.
//
// With tensor cores a warp has 8 × 4 adjacent pieces. Rows and columns of fragments (mma.cuh) are
// assigned so that each lane has a piece of two by two fragments: it reads four rows of a k at
// once, and two columns. Lanes read every second k; these are 8 banks apart. Of each k they read 8
// banks of columns, or, a quarter of the warp at a time, 8 banks of rows, so there are no bank
// conflicts. Factors are rounded once, by the thread that copied them; if COLUMNS_EXACT, factors of
// columns are rounded when they are read.
template <u32 ROWS, u32 COLS, u32 EACH, class Product, bool COLUMNS_EXACT = false>
struct Tile {
    static constexpr u32 THREADS = ROWS * COLS / (EACH * EACH);
    static constexpr u32 PIECES = EACH / 4;
    // Number of threads, or warps, across the columns.
    static constexpr u32 ACROSS = Product::MATRIX ? COLS / (16 * PIECES) : COLS / EACH;
    // Rows of `b`, one for each k, that the block copies at a time; a thread copies four columns.
    static constexpr u32 QUADS = THREADS / (COLS / 4);
    // Floats from k to k: consecutive k are 4 banks apart (see `Lane`), or 20 for 16 columns. A
    // multiple of 16 bytes.
    static constexpr u32 A = ROWS + 4, B = COLS + 4;
    __align__(16) float a[DEPTH * A];
    __align__(16) float b[DEPTH * B];

    // First row and column of a warp's pieces in the tile.
    static __device__ __forceinline__ u32 warp_row() {
        return threadIdx.x / 32 / ACROSS * (32 * PIECES);
    }
    static __device__ __forceinline__ u32 warp_col() {
        return threadIdx.x / 32 % ACROSS * (16 * PIECES);
    }

    // Row and column of a piece's first element in the tile.
    static __device__ __forceinline__ u32 row(u32 piece) {
        if (Product::MATRIX) return warp_row() + 32 * piece + threadIdx.x % 32 / 4 * 4;
        return piece * (ROWS / PIECES) + threadIdx.x / ACROSS * 4;
    }
    static __device__ __forceinline__ u32 col(u32 piece) {
        if (Product::MATRIX) return warp_col() + 16 * piece + threadIdx.x % 4 * 4;
        return piece * (COLS / PIECES) + threadIdx.x % ACROSS * 4;
    }

    // Rounds a factor that the thread copied.
    static __device__ __forceinline__ void round(float& factor) {
        if constexpr (Product::MATRIX) {
            float of[1] = {factor};
            factor = __uint_as_float(Product::Single::word(of));
        }
    }

    // The same for four side by side.
    static __device__ __forceinline__ void round4(float* factors) {
        if constexpr (Product::MATRIX) {
            float v[4];
            load4(factors, v);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) round(v[j]);
            *reinterpret_cast<float4*>(factors) = make_float4(v[0], v[1], v[2], v[3]);
        }
    }

    // Adds DEPTH products to the thread's elements.
    __device__ __forceinline__ void multiply(float (&sum)[EACH][EACH]) const {
        if constexpr (Product::MATRIX) {
            // A product of fragments has 8 words along the sum.
#pragma unroll
            for (u32 k = 0; k < DEPTH; k += 8 * Product::EACH) multiply_fragments(k, sum);
        } else {
#pragma unroll
            for (u32 k = 0; k < DEPTH; ++k) multiply_one(k, sum);
        }
    }

    // Adds the products of a k.
    __device__ __forceinline__ void multiply_one(u32 k, float (&sum)[EACH][EACH]) const {
        float x[EACH], y[EACH];
#pragma unroll
        for (u32 p = 0; p < PIECES; ++p) {
            load4(a + k * A + row(p), x + 4 * p);
            load4(b + k * B + col(p), y + 4 * p);
        }
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
#pragma unroll
            for (u32 j = 0; j < EACH; ++j) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
        }
    }

    // Adds the products from k on of as many factors as fragments have.
    __device__ __forceinline__ void multiply_fragments(u32 k, float (&sum)[EACH][EACH]) const {
        u32 x[EACH / 2][4], y[EACH / 2][2];
#pragma unroll
        for (u32 p = 0; p < PIECES; ++p) load_rows(k, p, &x[2 * p]);
#pragma unroll
        for (u32 p = 0; p < PIECES; ++p) load_columns(k, p, &y[2 * p]);
#pragma unroll
        for (u32 i = 0; i < EACH / 2; ++i) {
#pragma unroll
            for (u32 j = 0; j < EACH / 2; ++j) {
                float(&upper)[EACH] = sum[2 * i], (&lower)[EACH] = sum[2 * i + 1];
                u32 at = j / 2 * 4 + j % 2;
                float d[4] = {upper[at], upper[at + 2], lower[at], lower[at + 2]};
                Product::multiply(d, x[i], y[j]);
                upper[at] = d[0], upper[at + 2] = d[1], lower[at] = d[2], lower[at + 2] = d[3];
            }
        }
    }

    // The k of a factor in a lane's words; `word` 0 is the lane's first word, 1 the word 4 further.
    static __device__ __forceinline__ u32 step(u32 k, u32 word, u32 which) {
        return k + threadIdx.x % 4 * 2 + (Product::EACH == 1 ? word : 8 * word + which);
    }

    // Two fragments of rows: the first has the first two rows of a piece, the second the others.
    __device__ __forceinline__ void load_rows(u32 k, u32 piece, u32 (*x)[4]) const {
#pragma unroll
        for (u32 word = 0; word < 2; ++word) {
            float v[Product::EACH][4];
#pragma unroll
            for (u32 e = 0; e < Product::EACH; ++e) {
                load4(a + step(k, word, e) * A + row(piece), v[e]);
            }
#pragma unroll
            for (u32 i = 0; i < 4; ++i) x[i / 2][2 * word + i % 2] = pack<false>(v, i);
        }
    }

    // Two fragments of columns: the first has the first and the third column of a piece.
    __device__ __forceinline__ void load_columns(u32 k, u32 piece, u32 (*y)[2]) const {
        u32 col = warp_col() + 16 * piece + threadIdx.x % 32 / 4 * 2;
#pragma unroll
        for (u32 word = 0; word < 2; ++word) {
            float v[Product::EACH][2];
#pragma unroll
            for (u32 e = 0; e < Product::EACH; ++e) {
                load2(b + step(k, word, e) * B + col, v[e]);
            }
#pragma unroll
            for (u32 j = 0; j < 2; ++j) y[j][word] = pack<COLUMNS_EXACT>(v, j);
        }
    }

    // The word of a row's or a column's factors: rounds them if they are still EXACT.
    template <bool EXACT, u32 N>
    static __device__ __forceinline__ u32 pack(const float (&v)[Product::EACH][N], u32 i) {
        float factors[Product::EACH];
#pragma unroll
        for (u32 e = 0; e < Product::EACH; ++e) factors[e] = v[e][i];
        return EXACT ? Product::word(factors) : Product::join(factors);
    }

    // Gives the thread's elements to `write(row in the tile, column, four side by side)`.
    template <class Write>
    static __device__ __forceinline__ void each(const float (&sum)[EACH][EACH], Write write) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
#pragma unroll
            for (u32 p = 0; p < PIECES; ++p) {
                const float* from = sum[i] + 4 * p;
                float four[4] = {from[0], from[1], from[2], from[3]};
                write(row(i / 4) + i % 4, col(p), four);
            }
        }
    }
};
