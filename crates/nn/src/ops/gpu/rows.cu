// Embeddings, vectors side by side, transposes (kernels/rows.rs). One thread per element, unless
// stated otherwise.
#include "value.cuh"

const u32 THREADS = 128;  // of a block that adds to a row of a table

// Rows of `size`.
struct Lookup {
    Divisor size;
};

extern "C" __global__ void __launch_bounds__(256)
    embed(Span<const u32> indices, Span<const float> table, Span<Value> y, Lookup of) {
    locate(indices, table, y);
    u32 i = (u32)first();
    if (i >= y.len) return;
    u32 c, n = of.size.divide(i, c);
    // An index that is out of range is no address: its row is NaN.
    i64 at = (i64)indices[n] * of.size.by + c;
    y[i] = at < table.len ? table[at] : __int_as_float(0x7fc00000);
}

// A block has one row of the table. It lists where the row is named, THREADS indices at a time, and
// adds those rows of dy in their order. An index that is out of range names no row.
extern "C" __global__ void __launch_bounds__(128)
    embed_gradient(Span<const u32> indices, Span<const Value> dy, Span<float> table, Lookup of) {
    locate(indices, dy, table);
    __shared__ u32 named[THREADS];
    __shared__ u32 counts[THREADS / 32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 row = (i64)blockIdx.x * of.size.by;
    for (u32 begin = 0; begin < indices.len; begin += THREADS) {
        u32 at = begin + threadIdx.x;
        bool own = at < indices.len && indices[at] == blockIdx.x;
        u32 lanes = __ballot_sync(0xffffffffu, own), before = 0, count = 0;
        // All threads have read the last list before the first of these barriers.
        if (lane == 0) counts[warp] = __popc(lanes);
        __syncthreads();
        for (u32 k = 0; k < THREADS / 32; ++k) {
            before += k < warp ? counts[k] : 0;
            count += counts[k];
        }
        if (own) named[before + __popc(lanes & ((1u << lane) - 1))] = at;
        __syncthreads();
        for (u32 c = threadIdx.x; c < (count > 0 ? of.size.by : 0); c += THREADS) {
            float sum = table[row + c];
#pragma unroll 4
            for (u32 k = 0; k < count; ++k) sum += dy[(i64)named[k] * of.size.by + c];
            table[row + c] = sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    copy_indices(Span<const u32> from, Span<u32> to) {
    locate(from, to);
    i64 i = first();
    if (i < to.len) to[i] = from[i];
}

// Columns first, … first + count of rows of `width`.
struct Columns {
    u32 width;
    u32 first;
    Divisor count;
    u32 accumulate;
};

__device__ __forceinline__ i64 in_whole(u32 i, const Columns& at) {
    u32 column, row = at.count.divide(i, column);
    return (i64)row * at.width + at.first + column;
}

extern "C" __global__ void __launch_bounds__(256)
    put_columns(Span<const Value> part, Span<Value> whole, Columns at) {
    locate(part, whole);
    u32 i = (u32)first();
    if (i < part.len) whole[in_whole(i, at)] = part[i];
}

extern "C" __global__ void __launch_bounds__(256)
    take_columns(Span<const Value> whole, Span<Value> part, Columns at) {
    locate(whole, part);
    u32 i = (u32)first();
    if (i < part.len) put(part[i], whole[in_whole(i, at)], at.accumulate);
}

// Matrices that are read, [rows][columns] each.
struct Matrices {
    Divisor rows;
    Divisor columns;
    u32 accumulate;
};

// Neighbouring threads write neighbouring elements.
extern "C" __global__ void __launch_bounds__(256)
    transpose(Span<const Value> x, Span<Value> y, Matrices of) {
    locate(x, y);
    u32 i = (u32)first();
    if (i >= y.len) return;
    u32 row, column, n = of.columns.divide(of.rows.divide(i, row), column);
    i64 from = ((i64)n * of.rows.by + row) * of.columns.by + column;
    put(y[i], x[from], of.accumulate);
}
