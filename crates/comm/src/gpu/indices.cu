// Ascending lists of indices, padded with NONE: intersections, and the removal of entries.
#include "comm.cuh"

// Replaces indices that are not in another list by holes.
extern "C" __global__ void common(Span<const u32> list, Span<const u32> kept, Span<u32> to) {
    locate(list, kept, to);
    for (i64 i = first(); i < list.len; i += threads()) {
        u32 index = list[i];
        to[i] = index != NONE && contains(kept, index) ? index : NONE;
    }
}

// Sets a bit for each entry whose index is in another list. One thread per entry.
extern "C" __global__ void mark(Span<const u32> list, Span<const u32> kept, Span<u32> mask) {
    locate(list, kept, mask);
    i64 i = first();
    u32 index = i < list.len ? list[i] : NONE;
    u32 bits = __ballot_sync(ALL_LANES, index != NONE && contains(kept, index));
    if (lane_of() == 0 && i < list.len) mask[i / WARP] = bits;
}

// Replaces entries with a clear bit by holes.
extern "C" __global__ void unmark(Span<const u32> list, Span<const u32> mask, Span<u32> to) {
    locate(list, mask, to);
    for (i64 i = first(); i < list.len; i += threads()) {
        to[i] = mask[i / WARP] >> (i % WARP) & 1u ? list[i] : NONE;
    }
}

// Entries per tile, as `TILE` in select.cuh, and warps per block, as in select.cu. A warp handles
// one tile.
#define TILE_ENTRIES 1024u
#define WARPS 8u

// Counts the entries of each tile except holes, into the upper half of the tile's second number.
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

// Writes the entries without the holes, then padding; `picked` is their number.
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

// Moves the bounds so that all regions have equally many entries of the result.
extern "C" __global__ void divide_up(Span<const u32> result, Span<const u32> picked, Span<u32> bounds) {
    locate(result, picked, bounds);
    i64 i = first();
    if (i >= bounds.len) return;
    // First index of the next region; unchanged for an empty result.
    u64 used = picked[0], place = (u64)(i + 1) * used / (u64)(bounds.len + 1);
    if (place < used) bounds[i] = result[(i64)place];
}
