// Sums of each channel over [pixels][C], which batch norm and layer norm share.
#pragma once
#include "norm.cuh"

// Division of [pixels][C] among blocks: a block has `columns` channels and `chunk` pixels.
struct Tiles {
    u32 c;
    u32 columns;
    u32 pixels;
    u32 chunk;
};

// This thread's channel, and the pixels first, first + rows, … below end; no pixels for a thread
// without a channel.
struct Tile {
    u32 chunk;
    u32 channel;
    u32 row;
    u32 rows;
    u32 first;
    u32 end;

    __device__ Tile(const Tiles& of) {
        u32 log = __popc(of.columns - 1), across = (of.c + of.columns - 1) >> log;
        chunk = blockIdx.x / across;
        channel = (blockIdx.x - chunk * across) * of.columns + (threadIdx.x & (of.columns - 1));
        row = threadIdx.x >> log;
        rows = blockDim.x >> log;
        first = chunk * of.chunk + row;
        end = channel < of.c ? min((chunk + 1) * of.chunk, of.pixels) : 0;
    }
};

// Writes the sums of a block's channels.
__device__ void leave(Pair sums, const Tile& at, u32 c, Span<double> partial) {
    __shared__ Pair part[THREADS];
    sums = column_sum(sums, part, blockDim.x / at.rows);
    if (at.row > 0 || at.channel >= c) return;
    partial[(i64)(2 * at.chunk) * c + at.channel] = sums.a;
    partial[(i64)(2 * at.chunk + 1) * c + at.channel] = sums.b;
}
