// Shared by the kernels of a selection: its state in memory, and the numbers of its tiles.
#pragma once
#include "comm.cuh"

// The same as in threshold.rs.
#define DIGIT 12u
#define BINS 4096u
#define TILE 1024u
#define STATE 16u
#define ROW (STATE + BINS)

// State of a row's selection: the first words of its part of `control`, followed by the bins.
struct State {
    u64 prefix;    // upper bits of the threshold, as far as they are known; in the end all
    u64 digit;     // first digit of the threshold
    u32 left;      // entries to take among those with the bits of `prefix`, in order
    u32 wanted;    // entries to select
    u32 start;     // first slot of the row
    u32 end;       // slot after the last
    u32 decided;   // whether the threshold is known
    u32 narrow;    // whether there is room for candidates
    u32 found;     // candidates
    u32 reserved;  // candidates for which tiles have got room
    u32 reaching;  // elements that reach the threshold of an earlier selection
    u32 picked;    // entries selected
    u32 unused[2];
};

__device__ __forceinline__ State* state_of(const Span<u32>& control, u32 row) {
    return (State*)&control[(i64)row * ROW];
}
__device__ __forceinline__ u32* bins_of(const Span<u32>& control, u32 row) {
    return &control[(i64)row * ROW + STATE];
}

// Numbers of a tile: entries above the threshold, and entries at it. They are added as one number.
__device__ __forceinline__ u64 both(u32 above, u32 at) {
    return (u64)above << 32 | at;
}

// Number of selected entries among those before a position. `before` counts the entries above the
// threshold and at it, as `both`; at the threshold only the first `left` are selected.
__device__ __forceinline__ u32 selected(u64 before, u32 left) {
    u32 at = (u32)before;
    return (u32)(before >> 32) + (at < left ? at : left);
}
