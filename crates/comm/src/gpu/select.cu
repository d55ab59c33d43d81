// Selection of the entries of largest magnitude, ties to the lower index, in order of index.
//
// Of elements: `visit` reads all (adds them to what was kept), and counts their first digits. `choose`
// finds the digit in which the threshold lies. If those that reach this digit have room, `collect`
// reads all a second time and keeps them as candidates; otherwise what follows runs over all elements
// again. `refine` and `choose` take the other digits, one after the other; `count`, `scan` and `write`
// compact what was selected.
//
// Of lists: the same without `visit` and `collect`; entries whose index is NONE are holes. A call may
// select in several rows, each a part of the list.
//
// Tiles of TILE entries are handled by a warp each, and have two numbers in a table: where their
// candidates lie, and how much they have to write. The order in which tiles get room for their
// candidates depends on the order of the blocks, but no result does.
#include "comm.cuh"

// As in select.rs.
#define DIGIT 12u
#define BINS 4096u
#define TILE 1024u
#define STATE 16u
#define ROW (STATE + BINS)

// State of a row's selection: the first words of its part of `control`; bins follow.
struct State {
    u64 prefix;    // upper bits of the threshold, as far as they are known; in the end all
    u64 digit;     // first digit of the threshold
    u32 left;      // entries to take among those with these bits, in order
    u32 wanted;    // entries to select
    u32 start;     // first slot of the row
    u32 end;       // slot after the last
    u32 decided;   // whether the threshold is known
    u32 narrow;    // whether there is room for candidates
    u32 found;     // candidates
    u32 reserved;  // candidates for which tiles have got room
    u32 reaching;  // elements that reach the threshold of earlier
    u32 picked;    // entries selected
    u32 unused[2];
};

__device__ __forceinline__ State* state_of(const Span<u32>& control, u32 row) {
    return (State*)&control[(i64)row * ROW];
}
__device__ __forceinline__ u32* bins_of(const Span<u32>& control, u32 row) {
    return &control[(i64)row * ROW + STATE];
}

struct BeginValues {
    u32 wanted;
    u32 len;
    u32 rows;
    u32 unused;
};

// Clears the bins; the slots of the rows are those between the bounds. A block for each row.
extern "C" __global__ void begin(Span<const u32> list, Span<const u32> bounds, Span<u32> control,
                                 BeginValues v) {
    locate(list, bounds, control);
    u32 row = blockIdx.x;
    u32* bins = bins_of(control, row);
    for (u32 i = threadIdx.x; i < BINS; i += blockDim.x) bins[i] = 0;
    if (threadIdx.x > 0) return;
    State state = {};
    state.left = state.wanted = v.wanted;
    state.start = row == 0 ? 0 : lower_bound(list, 0, v.len, bounds[row - 1]);
    state.end = row + 1 == v.rows ? v.len : lower_bound(list, 0, v.len, bounds[row]);
    *state_of(control, row) = state;
}

// Digits of a block's entries.
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
    u64 factor;  // bits of a number of the type
    u32 known;   // whether the threshold of earlier may be used
    u32 unused;
};

// Elements of a thread, read together.
#define EACH 4

// Adds elements to what was kept, and counts first digits and the elements that reach the known
// threshold.
template <class T>
__device__ __forceinline__ void visit(const Span<const T>& gradient, const Span<T>& residual,
                                      const Span<T>& velocity, const Span<const i64>& threshold,
                                      const Span<u32>& control, const VisitValues& v) {
    typedef typename Number<T>::Bits Bits;
    __shared__ u32 shared[BINS];
    Bins bins = {shared};
    bool counts = control.len > 0;  // otherwise nothing is selected
    if (counts) bins.clear();
    Bits known = v.known ? (Bits)threshold[0] : 0;
    T factor = Number<T>::from_bits(v.factor);
    u32 reaching = 0;
    i64 stride = threads();
    for (i64 start = first(); start < gradient.len; start += EACH * stride) {
        T x[EACH], kept[EACH], moving[EACH];
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
            bins.count((u32)(bits >> (Number<T>::BITS - DIGIT)));
            reaching += bits >= known;
        }
    }
    if (!counts) return;
    bins.add_to(bins_of(control, 0));
    if (v.known && reaching > 0) atomicAdd(&state_of(control, 0)->reaching, reaching);
}

extern "C" __global__ void __launch_bounds__(256)
    visit_f32(Span<const float> gradient, Span<float> residual,
                                     Span<float> velocity, Span<const i64> threshold,
                                     Span<u32> control, VisitValues v) {
    locate(gradient, residual, velocity, threshold, control);
    visit(gradient, residual, velocity, threshold, control, v);
}
extern "C" __global__ void __launch_bounds__(256)
    visit_f64(Span<const double> gradient, Span<double> residual,
                                     Span<double> velocity, Span<const i64> threshold,
                                     Span<u32> control, VisitValues v) {
    locate(gradient, residual, velocity, threshold, control);
    visit(gradient, residual, velocity, threshold, control, v);
}
extern "C" __global__ void __launch_bounds__(256)
    visit_bf16(Span<const bf16> gradient, Span<bf16> residual,
                                      Span<bf16> velocity, Span<const i64> threshold,
                                      Span<u32> control, VisitValues v) {
    locate(gradient, residual, velocity, threshold, control);
    visit(gradient, residual, velocity, threshold, control, v);
}

struct ChooseValues {
    u32 bits;   // of the digit
    u32 first;  // whether it is the first of elements: candidates may be collected
    u32 last;   // whether it is the last
    u32 known;  // whether the threshold of earlier may be used
    u32 room;   // for candidates
    u32 unused;
};

#define CHOOSERS 256u

// Inclusive prefix sum over the lanes of a warp.
template <class T>
__device__ __forceinline__ T warp_prefix_sum(T value) {
    for (u32 step = 1; step < WARP; step *= 2) {
        T lower = __shfl_up_sync(ALL_LANES, value, step);
        if (lane_of() >= step) value += lower;
    }
    return value;
}

// Inclusive prefix sum over the threads of a block of whole warps. `part` has WARP elements.
template <class T>
__device__ __forceinline__ T prefix_sum(T value, T* part) {
    u32 warp = threadIdx.x / WARP;
    value = warp_prefix_sum(value);
    if (lane_of() == WARP - 1) part[warp] = value;
    __syncthreads();
    if (warp == 0) {
        T sum = lane_of() < blockDim.x / WARP ? part[lane_of()] : 0;
        part[lane_of()] = warp_prefix_sum(sum);
    }
    __syncthreads();
    return warp == 0 ? value : value + part[warp - 1];
}

// Decides by the first digit of elements.
__device__ __forceinline__ void choose_first(State* state, u32 digit, u32 found,
                                             const Span<const i64>& threshold, const ChooseValues& v) {
    state->digit = digit;
    state->found = found;
    state->narrow = found <= v.room;
    u64 reaching = state->reaching;
    if (v.known && reaching < state->wanted && 2 * reaching >= state->wanted) {
        state->prefix = (u64)threshold[0];
        state->left = NONE;
        state->decided = 1;
    }
}

// The digit of the threshold. A block for each row.
extern "C" __global__ void __launch_bounds__(CHOOSERS)
    choose(Span<const i64> threshold, Span<u32> control, ChooseValues v) {
    locate(threshold, control);
    __shared__ u32 part[WARP];
    const u32 EACH_BINS = BINS / CHOOSERS;
    State* state = state_of(control, blockIdx.x);
    u32* bins = bins_of(control, blockIdx.x);
    if (state->decided) return;
    // From the largest digit to the smallest.
    u32 top = BINS - 1 - threadIdx.x * EACH_BINS, own = 0, counts[EACH_BINS];
    u32 left = state->left;
#pragma unroll
    for (u32 i = 0; i < EACH_BINS; i++) {
        counts[i] = bins[top - i];
        bins[top - i] = 0;
        own += counts[i];
    }
    u32 above = prefix_sum(own, part);
    if (threadIdx.x == CHOOSERS - 1 && above < left) {
        // A list with fewer entries than are wanted: all are selected.
        state->prefix = 0;
        state->left = NONE;
        state->decided = 1;
        return;
    }
    above -= own;
    if (above >= left || above + own < left) return;
    u32 i = 0;
#pragma unroll
    for (u32 next = 0; next + 1 < EACH_BINS; next++) {
        if (i == next && above + counts[next] < left) above += counts[next], i++;
    }
    u32 digit = top - i, here = 0;
#pragma unroll
    for (u32 at = 0; at < EACH_BINS; at++) here = at == i ? counts[at] : here;
    state->prefix = state->prefix << v.bits | digit;
    state->left = left - above;
    state->decided = v.last;
    if (v.first) choose_first(state, digit, above + here, threshold, v);
}

#define WARPS 8u  // of a block with tiles

// Place of a call's slots among all: `Place` of select.rs.
struct Place {
    u32 start;   // index of the first element
    u32 tile;    // number of the first tile
    u32 tiles;   // tiles of this call, of one row
    u32 blocks;  // blocks of a row
    u32 all;     // tiles of a row in the table
    u32 listed;  // whether this is a list
};

// Collects the elements that reach the first digit, tile by tile.
template <class T>
__device__ __forceinline__ void collect(const Span<const T>& elements, const Span<u32>& indices,
                                        const Span<T>& values, const Span<i64>& table,
                                        const Span<u32>& control, const Place& v) {
    State* state = state_of(control, 0);
    u32 tile = blockIdx.x * WARPS + threadIdx.x / WARP, lane = lane_of();
    if (!state->narrow || tile >= v.tiles) return;
    u32 digit = (u32)state->digit, total = 0;
    i64 first = (i64)tile * TILE;
    T x[TILE / WARP];
#pragma unroll
    for (u32 j = 0; j < TILE / WARP; j++) {
        i64 i = first + j * WARP + lane;
        x[j] = i < elements.len ? elements[i] : zero<T>();
    }
    u32 mask = 0;  // bit j: element j of this lane
#pragma unroll
    for (u32 j = 0; j < TILE / WARP; j++) {
        bool inside = first + j * WARP + lane < elements.len;
        bool hit = inside && (u32)(magnitude(x[j]) >> (Number<T>::BITS - DIGIT)) >= digit;
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

extern "C" __global__ void __launch_bounds__(256)
    collect_f32(Span<const float> elements, Span<u32> indices,
                                       Span<float> values, Span<i64> table, Span<u32> control,
                                       Place v) {
    locate(elements, indices, values, table, control);
    collect(elements, indices, values, table, control, v);
}
extern "C" __global__ void __launch_bounds__(256)
    collect_f64(Span<const double> elements, Span<u32> indices,
                                       Span<double> values, Span<i64> table, Span<u32> control,
                                       Place v) {
    locate(elements, indices, values, table, control);
    collect(elements, indices, values, table, control, v);
}
extern "C" __global__ void __launch_bounds__(256)
    collect_bf16(Span<const bf16> elements, Span<u32> indices,
                                        Span<bf16> values, Span<i64> table, Span<u32> control,
                                        Place v) {
    locate(elements, indices, values, table, control);
    collect(elements, indices, values, table, control, v);
}

// What is selected from: elements, or a list, and their candidates.
template <class T>
struct From {
    Span<const u32> indices;  // of a list
    Span<const T> values;
    Span<const u32> candidates;
    Span<const T> candidate_values;
};

// Entries one after the other.
template <class T>
struct Entries {
    Span<const u32> indices;  // no elements: they are numbered from `start`
    Span<const T> values;
    i64 from;
    u32 len;
    u32 start;

    __device__ __forceinline__ u32 index(u32 i) const {
        return indices.len > 0 ? indices[from + i] : start + i;
    }
};

// All entries of a row, or its candidates, which the call for the first elements has.
template <class T>
__device__ __forceinline__ Entries<T> all_entries(const From<T>& from, const State* state,
                                                  const Place& v) {
    if (v.listed) return {from.indices, from.values, state->start, state->end - state->start, 0};
    if (state->narrow) {
        u32 len = v.tile == 0 ? state->found : 0;
        return {from.candidates, from.candidate_values, 0, len, 0};
    }
    return {Span<const u32>{}, from.values, 0, (u32)from.values.len, v.start};
}

// Those of a tile.
template <class T>
__device__ __forceinline__ Entries<T> tile_entries(const From<T>& from, const Span<i64>& table,
                                                   const State* state, u32 tile, const Place& v) {
    if (!v.listed && state->narrow) {
        u64 segment = (u64)table[v.tile + tile];
        return {from.candidates, from.candidate_values, (i64)(segment >> 32), (u32)segment, 0};
    }
    Entries<T> all = all_entries(from, state, v);
    u64 first = (u64)tile * TILE;
    u64 rest = first < all.len ? all.len - first : 0;
    all.from += (i64)first;
    all.start += (u32)first;
    all.len = (u32)(rest < TILE ? rest : TILE);
    return all;
}

// The digit that is looked at: `Digit` of select.rs.
struct Digit {
    Place place;
    u32 shift;
    u32 bits;
};

// Counts the next digit of the entries whose bits above it are the threshold's.
template <class T>
__device__ __forceinline__ void refine(const From<T>& from, const Span<u32>& control, const Digit& v) {
    typedef typename Number<T>::Bits Bits;
    __shared__ u32 shared[BINS];
    u32 row = blockIdx.x / v.place.blocks, block = blockIdx.x % v.place.blocks;
    const State* state = state_of(control, row);
    if (state->decided) return;
    Entries<T> all = all_entries(from, state, v.place);
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

extern "C" __global__ void refine_f32(Span<const u32> indices, Span<const float> values,
                                      Span<const u32> candidates,
                                      Span<const float> candidate_values, Span<u32> control,
                                      Digit v) {
    locate(indices, values, candidates, candidate_values, control);
    refine<float>({indices, values, candidates, candidate_values}, control, v);
}
extern "C" __global__ void refine_f64(Span<const u32> indices, Span<const double> values,
                                      Span<const u32> candidates,
                                      Span<const double> candidate_values, Span<u32> control,
                                      Digit v) {
    locate(indices, values, candidates, candidate_values, control);
    refine<double>({indices, values, candidates, candidate_values}, control, v);
}
extern "C" __global__ void refine_bf16(Span<const u32> indices, Span<const bf16> values,
                                       Span<const u32> candidates,
                                       Span<const bf16> candidate_values, Span<u32> control,
                                       Digit v) {
    locate(indices, values, candidates, candidate_values, control);
    refine<bf16>({indices, values, candidates, candidate_values}, control, v);
}

// Numbers of a tile: entries above the threshold, and entries at it. They add up as one number.
__device__ __forceinline__ u64 both(u32 above, u32 at) {
    return (u64)above << 32 | at;
}

// Entries that are selected if `at` come before them at the threshold and `above` above it.
__device__ __forceinline__ u32 selected(u64 before, u32 left) {
    u32 at = (u32)before;
    return (u32)(before >> 32) + (at < left ? at : left);
}

// Entries of a warp above the threshold and at it, as masks of lanes.
struct Lanes {
    u32 above;
    u32 at;
};

template <class T>
__device__ __forceinline__ Lanes compare(const Entries<T>& tile, u32 i, u64 threshold, T& x, u32& index) {
    index = NONE;
    if (i < tile.len) {
        x = tile.values[tile.from + i];
        index = tile.index(i);
    }
    u64 bits = index == NONE ? 0 : (u64)magnitude(x);
    u32 above = __ballot_sync(ALL_LANES, index != NONE && bits > threshold);
    return {above, __ballot_sync(ALL_LANES, index != NONE && bits == threshold)};
}

// Counts what tiles have to write.
template <class T>
__device__ __forceinline__ void count(const From<T>& from, const Span<i64>& table,
                                      const Span<u32>& control, const Place& v) {
    u32 row = blockIdx.x / v.blocks, block = blockIdx.x % v.blocks;
    u32 tile = block * WARPS + threadIdx.x / WARP;
    if (tile >= v.tiles) return;
    const State* state = state_of(control, row);
    Entries<T> entries = tile_entries(from, table, state, tile, v);
    u32 above = 0, at = 0, index;
    T x = zero<T>();
    for (u32 i = lane_of(); i - lane_of() < entries.len; i += WARP) {
        Lanes lanes = compare(entries, i, state->prefix, x, index);
        above += __popc(lanes.above);
        at += __popc(lanes.at);
    }
    if (lane_of() == 0) table[table.len / 2 + (i64)row * v.all + v.tile + tile] = (i64)both(above, at);
}

extern "C" __global__ void count_f32(Span<const u32> indices, Span<const float> values,
                                     Span<const u32> candidates,
                                     Span<const float> candidate_values, Span<i64> table,
                                     Span<u32> control, Place v) {
    locate(indices, values, candidates, candidate_values, table, control);
    count<float>({indices, values, candidates, candidate_values}, table, control, v);
}
extern "C" __global__ void count_f64(Span<const u32> indices, Span<const double> values,
                                     Span<const u32> candidates,
                                     Span<const double> candidate_values, Span<i64> table,
                                     Span<u32> control, Place v) {
    locate(indices, values, candidates, candidate_values, table, control);
    count<double>({indices, values, candidates, candidate_values}, table, control, v);
}
extern "C" __global__ void count_bf16(Span<const u32> indices, Span<const bf16> values,
                                      Span<const u32> candidates,
                                      Span<const bf16> candidate_values, Span<i64> table,
                                      Span<u32> control, Place v) {
    locate(indices, values, candidates, candidate_values, table, control);
    count<bf16>({indices, values, candidates, candidate_values}, table, control, v);
}

struct ScanValues {
    u32 all;  // tiles of a row
    u32 unused;
};

// Sums up the tiles' numbers before each; a full list updates the threshold. A block for each row.
extern "C" __global__ void __launch_bounds__(1024)
    scan(Span<i64> threshold, Span<i64> table, Span<u32> control, ScanValues v) {
    locate(threshold, table, control);
    __shared__ u64 part[WARP];
    State* state = state_of(control, blockIdx.x);
    i64 row = table.len / 2 + (i64)blockIdx.x * v.all;
    u32 each = (v.all + blockDim.x - 1) / blockDim.x;
    u64 from = (u64)threadIdx.x * each, to = from + each < v.all ? from + each : v.all;
    u64 own = 0;
#pragma unroll 8
    for (u64 tile = from; tile < to; tile++) own += (u64)table[row + (i64)tile];
    u64 before = prefix_sum(own, part);
    if (threadIdx.x == blockDim.x - 1) {
        u32 picked = selected(before, state->left);
        state->picked = picked;
        if (threshold.len > 0 && picked == state->wanted) threshold[0] = (i64)state->prefix;
    }
    before -= own;
    for (u64 tile = from; tile < to; tile++) {
        u64 here = (u64)table[row + (i64)tile];
        table[row + (i64)tile] = (i64)before;
        before += here;
    }
}

// Writes what was selected in its place, and pads the rest.
template <class T>
__device__ __forceinline__ void write(const From<T>& from, Span<i64> table, const Span<u32>& control,
                                      const Span<u32>& to, const Span<T>& to_values, const Place& v) {
    u32 row = blockIdx.x / v.blocks, block = blockIdx.x % v.blocks;
    const State* state = state_of(control, row);
    i64 base = (i64)row * state->wanted;
    if (v.tile == 0) {
        u64 pad = (u64)state->picked + block * blockDim.x + threadIdx.x;
        for (; pad < state->wanted; pad += (u64)v.blocks * blockDim.x) {
            to[base + (i64)pad] = NONE;
            to_values[base + (i64)pad] = zero<T>();
        }
    }
    u32 tile = block * WARPS + threadIdx.x / WARP;
    if (tile >= v.tiles) return;
    Entries<T> entries = tile_entries(from, table, state, tile, v);
    u64 before = (u64)table[table.len / 2 + (i64)row * v.all + v.tile + tile];
    u32 left = state->left, below = lanes_below(), index;
    T x = zero<T>();
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

extern "C" __global__ void write_f32(Span<const u32> indices, Span<const float> values,
                                     Span<const u32> candidates,
                                     Span<const float> candidate_values, Span<i64> table,
                                     Span<u32> control, Span<u32> to, Span<float> to_values,
                                     Place v) {
    locate(indices, values, candidates, candidate_values, table, control, to, to_values);
    write<float>({indices, values, candidates, candidate_values}, table, control, to, to_values, v);
}
extern "C" __global__ void write_f64(Span<const u32> indices, Span<const double> values,
                                     Span<const u32> candidates,
                                     Span<const double> candidate_values, Span<i64> table,
                                     Span<u32> control, Span<u32> to, Span<double> to_values,
                                     Place v) {
    locate(indices, values, candidates, candidate_values, table, control, to, to_values);
    write<double>({indices, values, candidates, candidate_values}, table, control, to, to_values, v);
}
extern "C" __global__ void write_bf16(Span<const u32> indices, Span<const bf16> values,
                                      Span<const u32> candidates,
                                      Span<const bf16> candidate_values, Span<i64> table,
                                      Span<u32> control, Span<u32> to, Span<bf16> to_values,
                                      Place v) {
    locate(indices, values, candidates, candidate_values, table, control, to, to_values);
    write<bf16>({indices, values, candidates, candidate_values}, table, control, to, to_values, v);
}
