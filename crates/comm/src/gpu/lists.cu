// Lists of ascending indices with values, padded with NONE: sums of several lists, their dense form,
// and what is left of one.
#include "comm.cuh"

struct ScatterValues {
    Divide divide;
    u32 start;  // index of the first element
    u32 lists;
    u32 len;  // of a list
    u32 unused;
};

// Elements of a block, which sums them up in shared memory, as in lists.rs.
#define TILE 2048u

// Number of entries below `index`, found by a warp: 32 places at a time are looked at.
__device__ __forceinline__ u32 warp_lower_bound(const Span<const u32>& list, i64 from, u32 len, u32 index) {
    u32 low = 0;
    while (len > 0) {
        u32 step = (len + WARP - 1) / WARP, at = (lane_of() + 1) * step - 1;
        bool below = at < len && list[from + low + at] < index;
        u32 passed = __popc(__ballot_sync(ALL_LANES, below)) * step;
        low += passed;
        len = len - passed < step ? len - passed : step - 1;
    }
    return low;
}

// Lists of which the bounds in a tile are found at once.
#define GROUP 32u

// A dense sum of lists, in their order: the first list's values are stored, not added to zero, so that
// they keep the sign of a zero. Written tile by tile.
template <class T>
__device__ __forceinline__ void scatter(const Span<const u32>& indices, const Span<const T>& values,
                                        const Span<T>& output, const ScatterValues& v, T* tile) {
    __shared__ u32 bounds[2 * GROUP];
    u64 first = (u64)blockIdx.x * TILE, rest = (u64)output.len - first;
    u32 len = (u32)(rest < TILE ? rest : TILE), start = v.start + (u32)first;
    for (u32 i = threadIdx.x; i < len; i += blockDim.x) tile[i] = zero<T>();
    for (u32 group = 0; group < v.lists; group += GROUP) {
        u32 lists = v.lists - group < GROUP ? v.lists - group : GROUP;
        __syncthreads();  // the bounds of the last group may still be read
        for (u32 b = threadIdx.x / WARP; b < 2 * lists; b += blockDim.x / WARP) {
            i64 from = (i64)(group + b / 2) * v.len;
            // The end of a tile is at most NONE, before all padding.
            u32 found = warp_lower_bound(indices, from, v.len, b % 2 == 0 ? start : start + len);
            if (lane_of() == 0) bounds[b] = found;
        }
        for (u32 list = 0; list < lists; list++) {
            __syncthreads();
            i64 from = (i64)(group + list) * v.len;
            for (u32 i = bounds[2 * list] + threadIdx.x; i < bounds[2 * list + 1]; i += blockDim.x) {
                T& to = tile[indices[from + i] - start];
                T x = values[from + i];
                to = group + list == 0 ? x : plus(to, x);
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < len; i += blockDim.x) {
        output[(i64)first + i] = divide(tile[i], v.divide);
    }
}

extern "C" __global__ void scatter_f32(Span<const u32> indices, Span<const float> values,
                                       Span<float> output, ScatterValues v) {
    locate(indices, values, output);
    __shared__ float tile[TILE];
    scatter(indices, values, output, v, tile);
}
extern "C" __global__ void scatter_f64(Span<const u32> indices, Span<const double> values,
                                       Span<double> output, ScatterValues v) {
    locate(indices, values, output);
    __shared__ double tile[TILE];
    scatter(indices, values, output, v, tile);
}
extern "C" __global__ void scatter_bf16(Span<const u32> indices, Span<const bf16> values,
                                        Span<bf16> output, ScatterValues v) {
    locate(indices, values, output);
    __shared__ bf16 tile[TILE];
    scatter(indices, values, output, v, tile);
}

// Elements at given indices; one that the tensor does not have is a fault of the device.
template <class T>
__device__ __forceinline__ void take(const Span<const T>& elements, const Span<const u32>& indices,
                                     const Span<T>& values, const Span<u32>& copies) {
    for (i64 i = first(); i < indices.len; i += threads()) {
        u32 index = indices[i];
        if (index >= elements.len) __trap();
        values[i] = elements[index];
        if (copies.len > 0) copies[i] = index;
    }
}

extern "C" __global__ void take_f32(Span<const float> elements, Span<const u32> indices,
                                    Span<float> values, Span<u32> copies) {
    locate(elements, indices, values, copies);
    take(elements, indices, values, copies);
}
extern "C" __global__ void take_f64(Span<const double> elements, Span<const u32> indices,
                                    Span<double> values, Span<u32> copies) {
    locate(elements, indices, values, copies);
    take(elements, indices, values, copies);
}
extern "C" __global__ void take_bf16(Span<const bf16> elements, Span<const u32> indices,
                                     Span<bf16> values, Span<u32> copies) {
    locate(elements, indices, values, copies);
    take(elements, indices, values, copies);
}

struct MergeValues {
    u32 rows;
    u32 me;     // the row that lies apart
    u32 first;  // number of the first of the others
    u32 len;    // of a row
};

// The rows of a merge: those of the other ranks, and the own.
template <class T>
struct Rows {
    Span<const u32> own, others;
    Span<const T> own_values, other_values;
    MergeValues v;

    __device__ __forceinline__ i64 at(u32 row) const {
        return row == v.me ? 0 : (i64)(row - v.first) * v.len;
    }
    // Field by field, so that no span needs an address.
    __device__ __forceinline__ Span<const u32> indices(u32 row) const {
        bool mine = row == v.me;
        return {mine ? own.data : others.data, mine ? own.len : others.len, nullptr};
    }
    __device__ __forceinline__ T value(u32 row, u32 i) const {
        return row == v.me ? own_values[i] : other_values[at(row) + i];
    }
    // Entries of a row below an index.
    __device__ __forceinline__ u32 below(u32 row, u32 index) const {
        return lower_bound(indices(row), at(row), v.len, index);
    }
    __device__ __forceinline__ bool has(u32 row, u32 i, u32 index) const {
        return i < v.len && indices(row)[at(row) + i] == index;
    }
};

// Merges rows: each entry finds its place among all. Where several have an index the first of them has
// the sum, in the order of the rows, and the others leave holes, as padding does.
template <class T>
__device__ __forceinline__ void merge(const Rows<T>& rows, const Span<u32>& indices, const Span<T>& values) {
    const MergeValues& v = rows.v;
    for (i64 n = first(); n < (i64)v.rows * v.len; n += threads()) {
        u32 row = (u32)(n / v.len), i = (u32)(n % v.len);
        u32 index = rows.indices(row)[rows.at(row) + i];
        T sum = rows.value(row, i);
        bool hole = index == NONE;
        i64 place = i;
        for (u32 other = 0; other < v.rows; other++) {
            if (other == row) continue;
            u32 below = rows.below(other, index);
            bool same = index != NONE && rows.has(other, below, index);
            // Equal entries are in the order of the rows, and so is padding.
            bool before = other < row;
            place += before ? (index == NONE ? v.len : below + same) : below;
            hole = hole || (before && same);
            if (same && !before) sum = plus(sum, rows.value(other, below));
        }
        indices[place] = hole ? NONE : index;
        values[place] = hole ? zero<T>() : sum;
    }
}

extern "C" __global__ void merge_f32(Span<const u32> own, Span<const float> own_values,
                                     Span<const u32> others, Span<const float> other_values,
                                     Span<u32> indices, Span<float> values, MergeValues v) {
    locate(own, own_values, others, other_values, indices, values);
    merge<float>({own, others, own_values, other_values, v}, indices, values);
}
extern "C" __global__ void merge_f64(Span<const u32> own, Span<const double> own_values,
                                     Span<const u32> others, Span<const double> other_values,
                                     Span<u32> indices, Span<double> values, MergeValues v) {
    locate(own, own_values, others, other_values, indices, values);
    merge<double>({own, others, own_values, other_values, v}, indices, values);
}
extern "C" __global__ void merge_bf16(Span<const u32> own, Span<const bf16> own_values,
                                      Span<const u32> others, Span<const bf16> other_values,
                                      Span<u32> indices, Span<bf16> values, MergeValues v) {
    locate(own, own_values, others, other_values, indices, values);
    merge<bf16>({own, others, own_values, other_values, v}, indices, values);
}

// Leaves holes where another list does not have an index.
extern "C" __global__ void common(Span<const u32> list, Span<const u32> kept, Span<u32> to) {
    locate(list, kept, to);
    for (i64 i = first(); i < list.len; i += threads()) {
        u32 index = list[i];
        to[i] = index != NONE && contains(kept, index) ? index : NONE;
    }
}

// A bit for each entry of a list: whether another one has its index. A thread for each entry.
extern "C" __global__ void mark(Span<const u32> list, Span<const u32> kept, Span<u32> mask) {
    locate(list, kept, mask);
    i64 i = first();
    u32 index = i < list.len ? list[i] : NONE;
    u32 bits = __ballot_sync(ALL_LANES, index != NONE && contains(kept, index));
    if (lane_of() == 0 && i < list.len) mask[i / WARP] = bits;
}

// Leaves holes where the bit is not set.
extern "C" __global__ void unmark(Span<const u32> list, Span<const u32> mask, Span<u32> to) {
    locate(list, mask, to);
    for (i64 i = first(); i < list.len; i += threads()) {
        to[i] = mask[i / WARP] >> (i % WARP) & 1u ? list[i] : NONE;
    }
}

// Entries of a tile of a list with holes, and warps of a block with tiles, as in select.cu.
#define TILE_ENTRIES 1024u
#define WARPS 8u

// Counts the entries of tiles that are no holes: the upper half of the tiles' second numbers.
extern "C" __global__ void count_present(Span<const u32> list, Span<i64> table) {
    locate(list, table);
    u64 tile = (u64)blockIdx.x * WARPS + threadIdx.x / WARP, from = tile * TILE_ENTRIES, present = 0;
    if (from >= list.len) return;
    for (u32 j = 0; j < TILE_ENTRIES; j += WARP) {
        i64 i = (i64)from + j + lane_of();
        present += __popc(__ballot_sync(ALL_LANES, i < list.len && list[i] != NONE));
    }
    if (lane_of() == 0) table[table.len / 2 + (i64)tile] = (i64)(present << 32);
}

// Writes them without the holes; `picked` is their number, by which the padding begins.
extern "C" __global__ void write_present(Span<const u32> list, Span<const i64> table,
                                         Span<const u32> picked, Span<u32> to) {
    locate(list, table, picked, to);
    for (i64 i = picked[0] + first(); i < to.len; i += threads()) to[i] = NONE;
    u64 tile = (u64)blockIdx.x * WARPS + threadIdx.x / WARP, from = tile * TILE_ENTRIES;
    if (from >= list.len) return;
    i64 place = (i64)((u64)table[table.len / 2 + (i64)tile] >> 32);
    for (u32 j = 0; j < TILE_ENTRIES; j += WARP) {
        i64 i = (i64)from + j + lane_of();
        u32 index = i < list.len ? list[i] : NONE;
        u32 present = __ballot_sync(ALL_LANES, index != NONE);
        if (index != NONE) to[place + __popc(present & lanes_below())] = index;
        place += __popc(present);
    }
}

// Redraws the bounds of regions so that each has as many of the result's entries.
extern "C" __global__ void divide_up(Span<const u32> result, Span<const u32> picked, Span<u32> bounds) {
    locate(result, picked, bounds);
    i64 i = first();
    if (i >= bounds.len) return;
    // The first index of the next region; unchanged if the result is empty.
    u64 used = picked[0], place = (u64)(i + 1) * used / (u64)(bounds.len + 1);
    if (place < used) bounds[i] = result[(i64)place];
}
