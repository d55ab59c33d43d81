// The steps of a selection that read no values: the start, the choice of a digit, and the positions
// of the results. select.cu describes all steps.
#include "select.cuh"

struct BeginValues {
    u32 wanted;
    u32 len;
    u32 rows;
    u32 unused;
};

// Clears the bins and sets the state of each row; `bounds` divides the list into the rows. One
// block per row.
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

struct ChooseValues {
    u32 bits;   // of the digit
    u32 first;  // whether it is the first digit, and the entries are elements, not a list
    u32 last;   // whether it is the last
    u32 known;  // whether the threshold of an earlier selection may be used
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

// After the first digit of elements: decides whether candidates are collected, and whether the
// known threshold is used.
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

// Chooses the digit of the threshold. One block per row.
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
        // A list with fewer entries than wanted: all of them are selected.
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

struct ScanValues {
    u32 all;  // tiles of a row
    u32 unused;
};

// Prefix sums of the tiles' numbers; a full list updates the threshold. One block per row.
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
