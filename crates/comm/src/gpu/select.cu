// Selection of the entries of largest magnitude, in order of index; among equals the lower index
// wins.
//
// Elements: `visit` reads all elements (and adds them to the residual), and counts their first
// digits. `choose` finds the first digit of the threshold. If the elements that reach this digit
// fit, `collect` reads all elements a second time and stores these as candidates; otherwise the
// next steps run over all elements. `refine` and `choose` find the other digits in turn.
// `count_selected`, `scan` and `write_selected` write the selected entries. `begin`, `choose` and
// `scan`, which read no elements, are in threshold.cu.
//
// Lists: the same steps without `visit` and `collect`; entries with the index NONE are holes. A
// call may select in several rows, each a part of the list.
//
// A warp handles a tile of TILE entries. A tile has two numbers in a table, each of two halves: the
// position and the number of its candidates; and its numbers of entries above the threshold and at
// it, which `scan` replaces by the sums over all tiles before it. The order in which tiles reserve
// memory for candidates depends on the order of the blocks, but no result does.
#include "number.cuh"
#include "select.cuh"

// Number of a block's entries per digit, in shared memory.
struct Bins {
    u32* of;

    __device__ __forceinline__ void clear() const {
        for (u32 i = threadIdx.x; i < BINS; i += blockDim.x) of[i] = 0;
        __syncthreads();
    }
    __device__ __forceinline__ void count(u32 digit) const {
        atomicAdd(&of[digit], 1u);
    }
    __device__ __forceinline__ void add_to(u32* all) const {
        __syncthreads();
        for (u32 i = threadIdx.x; i < BINS; i += blockDim.x) {
            if (of[i] > 0) atomicAdd(&all[i], of[i]);
        }
    }
};

struct VisitValues {
    u64 factor;  // bits of an element
    u32 known;   // whether the threshold of an earlier selection may be used
    u32 unused;
};

// Elements per thread, read together.
#define EACH 4

// Adds elements to the residual, and counts first digits and the elements that reach the known
// threshold.
extern "C" __global__ void __launch_bounds__(256)
    visit(Span<const Element> gradient, Span<Element> residual, Span<Element> velocity,
          Span<const i64> threshold, Span<u32> control, VisitValues v) {
    locate(gradient, residual, velocity, threshold, control);
    __shared__ u32 shared[BINS];
    Bins bins = {shared};
    bool counts = control.len > 0;  // otherwise nothing is selected
    if (counts) bins.clear();
    Bits known = v.known ? (Bits)threshold[0] : 0;
    Element factor = element_of(v.factor);
    u32 reaching = 0;
    i64 stride = threads();
    for (i64 start = first(); start < gradient.len; start += EACH * stride) {
        Element x[EACH], kept[EACH], moving[EACH];
#pragma unroll
        for (u32 e = 0; e < EACH; e++) {
            i64 i = start + e * stride;
            if (i >= gradient.len) continue;
            x[e] = gradient[i];
            if (residual.len > 0) kept[e] = residual[i];
            if (velocity.len > 0) moving[e] = velocity[i];
        }
#pragma unroll
        for (u32 e = 0; e < EACH; e++) {
            i64 i = start + e * stride;
            if (i >= gradient.len) continue;
            if (velocity.len > 0) velocity[i] = x[e] = plus(times(moving[e], factor), x[e]);
            if (residual.len > 0) residual[i] = x[e] = plus(kept[e], x[e]);
            if (!counts) continue;
            Bits bits = magnitude(x[e]);
            bins.count((u32)(bits >> (MAGNITUDE_BITS - DIGIT)));
            reaching += bits >= known;
        }
    }
    if (!counts) return;
    bins.add_to(bins_of(control, 0));
    if (v.known && reaching > 0) atomicAdd(&state_of(control, 0)->reaching, reaching);
}

#define WARPS 8u  // of a block with tiles

// The elements and tiles of a call: `TileRange` in select.rs.
struct TileRange {
    u32 start;   // index of the first element
    u32 tile;    // number of the first tile
    u32 tiles;   // tiles of this call, of one row
    u32 blocks;  // blocks of a row
    u32 all;     // tiles of a row in the table
    u32 listed;  // whether this is a list
};

// Collects the elements that reach the first digit, tile by tile.
extern "C" __global__ void __launch_bounds__(256)
    collect(Span<const Element> elements, Span<u32> indices, Span<Element> values, Span<i64> table,
            Span<u32> control, TileRange v) {
    locate(elements, indices, values, table, control);
    State* state = state_of(control, 0);
    u32 tile = blockIdx.x * WARPS + threadIdx.x / WARP, lane = lane_of();
    if (!state->narrow || tile >= v.tiles) return;
    u32 digit = (u32)state->digit, total = 0;
    i64 first = (i64)tile * TILE;
    Element x[TILE / WARP];
#pragma unroll
    for (u32 j = 0; j < TILE / WARP; j++) {
        i64 i = first + j * WARP + lane;
        x[j] = i < elements.len ? elements[i] : zero();
    }
    u32 mask = 0;  // bit j: element j of this lane
#pragma unroll
    for (u32 j = 0; j < TILE / WARP; j++) {
        bool inside = first + j * WARP + lane < elements.len;
        bool hit = inside && (u32)(magnitude(x[j]) >> (MAGNITUDE_BITS - DIGIT)) >= digit;
        mask |= (u32)hit << j;
        total += __popc(__ballot_sync(ALL_LANES, hit));
    }
    u32 offset = 0;
    if (lane == 0) {
        offset = total > 0 ? atomicAdd(&state->reserved, total) : 0;
        table[v.tile + tile] = (i64)((u64)offset << 32 | total);
    }
    offset = __shfl_sync(ALL_LANES, offset, 0);
    if (total == 0) return;
#pragma unroll
    for (u32 j = 0; j < TILE / WARP; j++) {
        bool hit = mask >> j & 1u;
        u32 hits = __ballot_sync(ALL_LANES, hit);
        if (hit) {
            u32 at = offset + __popc(hits & lanes_below());
            indices[at] = v.start + (u32)first + j * WARP + lane;
            values[at] = x[j];
        }
        offset += __popc(hits);
    }
}

// The input of a selection: elements, or a list, and their candidates.
struct From {
    Span<const u32> indices;  // of a list
    Span<const Element> values;
    Span<const u32> candidates;
    Span<const Element> candidate_values;
};

// Consecutive entries.
struct Entries {
    Span<const u32> indices;  // if empty, the entries are numbered from `start`
    Span<const Element> values;
    i64 from;
    u32 len;
    u32 start;

    __device__ __forceinline__ u32 index(u32 i) const {
        return indices.len > 0 ? indices[from + i] : start + i;
    }
};

// All entries of a row. If there are candidates, these instead: all of them in the call for the
// first piece of memory, none in the others.
__device__ __forceinline__ Entries all_entries(const From& from, const State* state,
                                               const TileRange& v) {
    if (v.listed) return {from.indices, from.values, state->start, state->end - state->start, 0};
    if (state->narrow) {
        u32 len = v.tile == 0 ? state->found : 0;
        return {from.candidates, from.candidate_values, 0, len, 0};
    }
    return {Span<const u32>{}, from.values, 0, (u32)from.values.len, v.start};
}

// The entries of a tile.
__device__ __forceinline__ Entries tile_entries(const From& from, const Span<i64>& table,
                                                const State* state, u32 tile, const TileRange& v) {
    if (!v.listed && state->narrow) {
        u64 segment = (u64)table[v.tile + tile];
        return {from.candidates, from.candidate_values, (i64)(segment >> 32), (u32)segment, 0};
    }
    Entries all = all_entries(from, state, v);
    u64 first = (u64)tile * TILE;
    u64 rest = first < all.len ? all.len - first : 0;
    all.from += (i64)first;
    all.start += (u32)first;
    all.len = (u32)(rest < TILE ? rest : TILE);
    return all;
}

// The current digit: `Digit` in select.rs.
struct Digit {
    TileRange place;
    u32 shift;
    u32 bits;
};

// Counts the next digit of the entries whose higher bits equal the threshold's.
extern "C" __global__ void refine(Span<const u32> indices, Span<const Element> values,
                                  Span<const u32> candidates, Span<const Element> candidate_values,
                                  Span<u32> control, Digit v) {
    locate(indices, values, candidates, candidate_values, control);
    From from = {indices, values, candidates, candidate_values};
    __shared__ u32 shared[BINS];
    u32 row = blockIdx.x / v.place.blocks, block = blockIdx.x % v.place.blocks;
    const State* state = state_of(control, row);
    if (state->decided) return;
    Entries all = all_entries(from, state, v.place);
    if ((u64)block * blockDim.x >= all.len) return;
    Bins bins = {shared};
    bins.clear();
    Bits prefix = (Bits)state->prefix;
    u32 mask = (1u << v.bits) - 1u, above = v.shift + v.bits;
    u64 stride = (u64)v.place.blocks * blockDim.x;
    for (u64 i = (u64)block * blockDim.x + threadIdx.x; i < all.len; i += stride) {
        Bits bits = magnitude(all.values[all.from + (i64)i]);
        if (bits >> above == prefix && all.index((u32)i) != NONE) {
            bins.count((u32)(bits >> v.shift) & mask);
        }
    }
    bins.add_to(bins_of(control, row));
}

// Entries of a warp above the threshold, and at it, as masks of lanes.
struct Lanes {
    u32 above;
    u32 at;
};

__device__ __forceinline__ Lanes compare(const Entries& tile, u32 i, u64 threshold, Element& x,
                                         u32& index) {
    index = NONE;
    if (i < tile.len) {
        x = tile.values[tile.from + i];
        index = tile.index(i);
    }
    u64 bits = index == NONE ? 0 : (u64)magnitude(x);
    u32 above = __ballot_sync(ALL_LANES, index != NONE && bits > threshold);
    return {above, __ballot_sync(ALL_LANES, index != NONE && bits == threshold)};
}

// Counts the entries of each tile above the threshold, and those at it.
extern "C" __global__ void count_selected(Span<const u32> indices, Span<const Element> values,
                                          Span<const u32> candidates, Span<const Element> candidate_values,
                                          Span<i64> table, Span<u32> control, TileRange v){
    locate(indices, values, candidates, candidate_values, table, control);
    From from = {indices, values, candidates, candidate_values};
    u32 row = blockIdx.x / v.blocks, block = blockIdx.x % v.blocks;
    u32 tile = block * WARPS + threadIdx.x / WARP;
    if (tile >= v.tiles) return;
    const State* state = state_of(control, row);
    Entries entries = tile_entries(from, table, state, tile, v);
    u32 above = 0, at = 0, index;
    Element x = zero();
    for (u32 i = lane_of(); i - lane_of() < entries.len; i += WARP) {
        Lanes lanes = compare(entries, i, state->prefix, x, index);
        above += __popc(lanes.above);
        at += __popc(lanes.at);
    }
    i64 second = table.len / 2 + (i64)row * v.all + v.tile + tile;
    if (lane_of() == 0) table[second] = (i64)both(above, at);
}

// Writes the selected entries in order, then padding.
extern "C" __global__ void write_selected(Span<const u32> indices, Span<const Element> values,
                                          Span<const u32> candidates, Span<const Element> candidate_values,
                                          Span<i64> table, Span<u32> control, Span<u32> to,
                                          Span<Element> to_values, TileRange v){
    locate(indices, values, candidates, candidate_values, table, control, to, to_values);
    From from = {indices, values, candidates, candidate_values};
    u32 row = blockIdx.x / v.blocks, block = blockIdx.x % v.blocks;
    const State* state = state_of(control, row);
    i64 base = (i64)row * state->wanted;
    if (v.tile == 0) {
        u64 pad = (u64)state->picked + block * blockDim.x + threadIdx.x;
        for (; pad < state->wanted; pad += (u64)v.blocks * blockDim.x) {
            to[base + (i64)pad] = NONE;
            to_values[base + (i64)pad] = zero();
        }
    }
    u32 tile = block * WARPS + threadIdx.x / WARP;
    if (tile >= v.tiles) return;
    Entries entries = tile_entries(from, table, state, tile, v);
    u64 before = (u64)table[table.len / 2 + (i64)row * v.all + v.tile + tile];
    u32 left = state->left, below = lanes_below(), index;
    Element x = zero();
    for (u32 i = lane_of(); i - lane_of() < entries.len; i += WARP) {
        Lanes lanes = compare(entries, i, state->prefix, x, index);
        u64 own = before + both(__popc(lanes.above & below), __popc(lanes.at & below));
        bool taken = lanes.above >> lane_of() & 1u;
        taken = taken || ((lanes.at >> lane_of() & 1u) && (u32)own < left);
        if (taken) {
            to[base + selected(own, left)] = index;
            to_values[base + selected(own, left)] = x;
        }
        before += both(__popc(lanes.above), __popc(lanes.at));
    }
}
