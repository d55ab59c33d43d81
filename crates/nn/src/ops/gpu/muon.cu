// Muon's update of matrices (kernels/muon.rs). A call is for all matrices of a table; X of a matrix
// is [m][n], its columns padded with zeros. The scratch of each matrix is X twice, then G, then the
// polynomial of G. Sums of products are in the order of the processor's.
#include "nn.cuh"

// Numbers of the optimiser, f64 (`Optimiser::hyperparameters`).
const u32 RATE = 1, DECAY = 5, MOMENTUM = 6;

const u32 CHUNK = 1024, TILE = 32, DEPTH = 16;

struct Matrices {
    u32 count;
    u32 parity;       // which of its two memories X is in
    u32 start[64];    // first element in the group
    u32 rows[64];     // rows of a block in memory
    u32 blocks[64];   // groups of a convolution
    u32 outputs[64];  // outputs of a block
    u32 room[64];     // first element in the scratch
    float scale[64];  // factor of the learning rate
    u32 block[64];    // number of the matrix's first block in the call
};

// The matrix of this block.
struct Matrix {
    u32 block;  // of the matrix's blocks
    u32 start, rows, outputs, width, out, m, n;
    bool transposed;
    float scale;
    i64 room[2];  // X, and the memory of the next X
    i64 gram, polynomial;

    __device__ __forceinline__ Matrix(const Matrices& of) {
        u32 low = 0, high = of.count;
        while (high - low > 1) {
            u32 middle = (low + high) / 2;
            if (of.block[middle] <= blockIdx.x) {
                low = middle;
            } else {
                high = middle;
            }
        }
        block = blockIdx.x - of.block[low];
        start = of.start[low], rows = of.rows[low], outputs = of.outputs[low];
        width = pad16(outputs), out = of.blocks[low] * outputs, scale = of.scale[low];
        transposed = rows >= out;
        m = transposed ? rows : out, n = pad16(transposed ? out : rows);
        i64 size = (i64)m * n;
        room[0] = of.room[low] + (of.parity ? size : 0);
        room[1] = of.room[low] + (of.parity ? 0 : size);
        gram = of.room[low] + 2 * size, polynomial = gram + (i64)n * n;
    }

    // Where an element of X is in the group; -1 for padding.
    __device__ __forceinline__ i64 packed(u32 element) const {
        u32 i = element / n, j = element - i * n;
        u32 row = transposed ? i : j, output = transposed ? j : i;
        if (row >= rows || output >= out) return -1;
        u32 group = output / outputs;
        return start + ((i64)group * rows + row) * width + (output - group * outputs);
    }
};

// Updates the momentum, and writes the update to X.
extern "C" __global__ void __launch_bounds__(256)
    muon_begin(Span<const float> gradient, Span<const float> clip, Span<const double> numbers,
               Span<float> momentum, Span<float> room, const __grid_constant__ Matrices matrices) {
    locate(gradient, clip, numbers, momentum, room);
    Matrix of(matrices);
    float factor = clip[0], share = (float)(1.0 - numbers[MOMENTUM]);
    for (u32 k = threadIdx.x; k < CHUNK; k += blockDim.x) {
        u32 element = of.block * CHUNK + k;
        if (element >= of.m * of.n) break;
        i64 at = of.packed(element);
        float update = 0.0f;
        if (at >= 0) {
            float g = factor * gradient[at], average = momentum[at];
            average += share * (g - average);
            momentum[at] = average;
            update = average + share * (g - average);
        }
        room[of.room[0] + element] = update;
    }
}

// Divides X by its norm, a block for a matrix.
extern "C" __global__ void __launch_bounds__(256)
    muon_scale(Span<float> room, const __grid_constant__ Matrices matrices) {
    locate(room);
    __shared__ double part[256];
    Matrix of(matrices);
    double sum = 0.0;
    for (u32 k = threadIdx.x; k < of.m * of.n; k += blockDim.x) {
        double x = room[of.room[0] + k];
        sum += x * x;
    }
    sum = block_sum(sum, part);
    double norm = sqrt(sum);
    float factor = (float)(1.0 / (norm < 1e-7 ? 1e-7 : norm));
    for (u32 k = threadIdx.x; k < of.m * of.n; k += blockDim.x) room[of.room[0] + k] *= factor;
}

// A tile of a product A·B, `[rows, inner]` times `[inner][columns]`; two by two elements of a
// thread. A is in memory as it is, or transposed.
struct Tile {
    u32 row, column;  // of the thread's first element
    float sum[2][2];
};

// Factors of a tile, `DEPTH` products at a time.
struct Factors {
    float left[DEPTH][TILE + 1], right[DEPTH][TILE + 1];
};

template <bool TRANSPOSED>
__device__ Tile tile_of(Factors& factors, Span<float> room, i64 a, i64 b, u32 rows, u32 inner,
                        u32 columns, u32 block) {
    auto &left = factors.left, &right = factors.right;
    u32 across = (columns + TILE - 1) / TILE;
    u32 first_row = block / across * TILE, first_column = block % across * TILE;
    u32 y = threadIdx.x / 16 * 2, x = threadIdx.x % 16 * 2;
    Tile tile = {first_row + y, first_column + x, {{0.0f, 0.0f}, {0.0f, 0.0f}}};
    for (u32 depth = 0; depth < inner; depth += DEPTH) {
        for (u32 i = threadIdx.x; i < DEPTH * TILE; i += blockDim.x) {
            u32 k = TRANSPOSED ? i / TILE : i % DEPTH, r = TRANSPOSED ? i % TILE : i / DEPTH;
            u32 row = first_row + r, at = depth + k;
            bool inside = row < rows && at < inner;
            i64 from = TRANSPOSED ? (i64)at * rows + row : (i64)row * inner + at;
            left[k][r] = inside ? room[a + from] : 0.0f;
            u32 column = first_column + i % TILE;
            at = depth + i / TILE;
            inside = column < columns && at < inner;
            right[i / TILE][i % TILE] = inside ? room[b + (i64)at * columns + column] : 0.0f;
        }
        __syncthreads();
        for (u32 k = 0; k < DEPTH; ++k) {
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
#pragma unroll
                for (u32 c = 0; c < 2; ++c) tile.sum[r][c] += left[k][y + r] * right[k][x + c];
            }
        }
        __syncthreads();
    }
    return tile;
}

// G = XᵀX.
extern "C" __global__ void __launch_bounds__(256)
    muon_gram(Span<float> room, const __grid_constant__ Matrices matrices) {
    locate(room);
    Matrix of(matrices);
    __shared__ Factors factors;
    Tile tile = tile_of<true>(factors, room, of.room[0], of.room[0], of.n, of.m, of.n, of.block);
    for (u32 r = 0; r < 2; ++r) {
        for (u32 c = 0; c < 2; ++c) {
            u32 row = tile.row + r, column = tile.column + c;
            if (row < of.n && column < of.n) {
                room[of.gram + (i64)row * of.n + column] = tile.sum[r][c];
            }
        }
    }
}

// a·I + b·G + c·G².
extern "C" __global__ void __launch_bounds__(256)
    muon_polynomial(Span<float> room, const __grid_constant__ Matrices matrices) {
    locate(room);
    Matrix of(matrices);
    __shared__ Factors factors;
    Tile tile = tile_of<true>(factors, room, of.gram, of.gram, of.n, of.n, of.n, of.block);
    for (u32 r = 0; r < 2; ++r) {
        for (u32 c = 0; c < 2; ++c) {
            u32 row = tile.row + r, column = tile.column + c;
            if (row < of.n && column < of.n) {
                i64 at = (i64)row * of.n + column;
                float value = -4.775f * room[of.gram + at] + 2.0315f * tile.sum[r][c];
                room[of.polynomial + at] = row == column ? value + 3.4445f : value;
            }
        }
    }
}

// X times the polynomial, to X's other memory.
extern "C" __global__ void __launch_bounds__(256)
    muon_product(Span<float> room, const __grid_constant__ Matrices matrices) {
    locate(room);
    Matrix of(matrices);
    __shared__ Factors factors;
    Tile tile =
        tile_of<false>(factors, room, of.room[0], of.polynomial, of.m, of.n, of.n, of.block);
    for (u32 r = 0; r < 2; ++r) {
        for (u32 c = 0; c < 2; ++c) {
            u32 row = tile.row + r, column = tile.column + c;
            if (row < of.m && column < of.n) {
                room[of.room[1] + (i64)row * of.n + column] = tile.sum[r][c];
            }
        }
    }
}

// The step along X.
extern "C" __global__ void __launch_bounds__(256)
    muon_apply(Span<const double> numbers, Span<float> values, Span<float> room,
               const __grid_constant__ Matrices matrices) {
    locate(numbers, values, room);
    Matrix of(matrices);
    float keep = (float)(1.0 - numbers[RATE] * numbers[DECAY]);
    float rate = (float)(numbers[RATE] * (double)of.scale);
    for (u32 k = threadIdx.x; k < CHUNK; k += blockDim.x) {
        u32 element = of.block * CHUNK + k;
        if (element >= of.m * of.n) break;
        i64 at = of.packed(element);
        if (at >= 0) values[at] = keep * values[at] - rate * room[of.room[0] + element];
    }
}
