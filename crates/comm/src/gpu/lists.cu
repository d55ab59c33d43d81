// Ascending lists of indices with values, padded with NONE: sums of several lists, and their dense
// form.
#include "number.cuh"

struct ScatterValues {
    Divide divide;
    u32 start;  // index of the first element
    u32 lists;
    u32 len;  // of a list
    u32 unused;
};

// Elements per block, which adds them in shared memory; the same as in lists.rs.
#define TILE 2048u

// Number of entries below `index`, found by a warp that examines 32 entries at a time.
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

// Number of lists whose bounds in a tile are found together.
#define GROUP 32u

// A dense sum of lists in order, tile by tile. Values of the first list are stored, not added to
// zero, so that they keep the sign of a zero.
extern "C" __global__ void scatter(Span<const u32> indices, Span<const Element> values,
                                   Span<Element> output, ScatterValues v) {
    locate(indices, values, output);
    __shared__ Element tile[TILE];
    __shared__ u32 bounds[2 * GROUP];
    u64 first = (u64)blockIdx.x * TILE, rest = (u64)output.len - first;
    u32 len = (u32)(rest < TILE ? rest : TILE), start = v.start + (u32)first;
    for (u32 i = threadIdx.x; i < len; i += blockDim.x) tile[i] = zero();
    for (u32 group = 0; group < v.lists; group += GROUP) {
        u32 lists = v.lists - group < GROUP ? v.lists - group : GROUP;
        __syncthreads();  // the bounds of the last group may still be read
        for (u32 b = threadIdx.x / WARP; b < 2 * lists; b += blockDim.x / WARP) {
            i64 from = (i64)(group + b / 2) * v.len;
            // The end of a tile is at most NONE, so padding is beyond it.
            u32 found = warp_lower_bound(indices, from, v.len, b % 2 == 0 ? start : start + len);
            if (lane_of() == 0) bounds[b] = found;
        }
        for (u32 list = 0; list < lists; list++) {
            __syncthreads();
            i64 from = (i64)(group + list) * v.len;
            for (u32 i = bounds[2 * list] + threadIdx.x; i < bounds[2 * list + 1]; i += blockDim.x) {
                // After an aborted exchange a list may have invalid indices; the sum is then never
                // read.
                u32 at = indices[from + i] - start;
                if (at >= len) continue;
                Element& to = tile[at];
                Element x = values[from + i];
                to = group + list == 0 ? x : plus(to, x);
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < len; i += blockDim.x) {
        output[(i64)first + i] = divide(tile[i], v.divide);
    }
}

// Elements at the given indices; an index outside the tensor is a fault of the device.
extern "C" __global__ void take(Span<const Element> elements, Span<const u32> indices,
                                Span<Element> values, Span<u32> copies) {
    locate(elements, indices, values, copies);
    for (i64 i = first(); i < indices.len; i += threads()) {
        u32 index = indices[i];
        if (index >= elements.len) __trap();
        values[i] = elements[index];
        if (copies.len > 0) copies[i] = index;
    }
}

struct MergeValues {
    u32 rows;
    u32 me;     // index of this rank's row, which is stored separately
    u32 first;  // index of the first of the other rows
    u32 len;    // entries of a row
};

// The rows of a merge: the other ranks' rows, and this rank's row.
struct Rows {
    Span<const u32> own, others;
    Span<const Element> own_values, other_values;
    MergeValues v;

    __device__ __forceinline__ i64 at(u32 row) const {
        return row == v.me ? 0 : (i64)(row - v.first) * v.len;
    }
    // Field by field, so that no span needs an address.
    __device__ __forceinline__ Span<const u32> indices(u32 row) const {
        bool mine = row == v.me;
        return {mine ? own.data : others.data, mine ? own.len : others.len, nullptr};
    }
    __device__ __forceinline__ Element value(u32 row, u32 i) const {
        return row == v.me ? own_values[i] : other_values[at(row) + i];
    }
    // Number of entries of a row below an index.
    __device__ __forceinline__ u32 below(u32 row, u32 index) const {
        return lower_bound(indices(row), at(row), v.len, index);
    }
    __device__ __forceinline__ bool has(u32 row, u32 i, u32 index) const {
        return i < v.len && indices(row)[at(row) + i] == index;
    }
};

// Merges rows: each entry finds its place among all entries. The first of several entries with one
// index gets their sum, in the order of the rows; the others become holes, as padding does.
extern "C" __global__ void merge(Span<const u32> own, Span<const Element> own_values,
                                 Span<const u32> others, Span<const Element> other_values,
                                 Span<u32> indices, Span<Element> values, MergeValues v) {
    locate(own, own_values, others, other_values, indices, values);
    Rows rows = {own, others, own_values, other_values, v};
    for (i64 n = first(); n < (i64)v.rows * v.len; n += threads()) {
        u32 row = (u32)(n / v.len), i = (u32)(n % v.len);
        u32 index = rows.indices(row)[rows.at(row) + i];
        Element sum = rows.value(row, i);
        bool hole = index == NONE;
        i64 place = i;
        for (u32 other = 0; other < v.rows; other++) {
            if (other == row) continue;
            u32 below = rows.below(other, index);
            bool same = index != NONE && rows.has(other, below, index);
            // Equal entries, and padding, are in the order of the rows.
            bool before = other < row;
            place += before ? (index == NONE ? v.len : below + same) : below;
            hole = hole || (before && same);
            if (same && !before) sum = plus(sum, rows.value(other, below));
        }
        indices[place] = hole ? NONE : index;
        values[place] = hole ? zero() : sum;
    }
}
