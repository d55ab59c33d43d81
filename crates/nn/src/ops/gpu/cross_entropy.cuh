// Code that cross-entropy and its form with smoothed labels and weights share.
#pragma once
#include "loss.cuh"

// Shape of the logits [samples][classes], and how blocks and threads divide them.
struct Batch {
    u32 samples;
    u32 classes;
    u32 lanes;  // threads for a sample
    u32 rows;   // samples of a block, a multiple of the samples that it takes at a time
    u32 is_first;  // whether the first configuration is evaluated
};

struct Best {
    float value;
    u32 index;
};

// Whether a precedes b in the order of `torch.argmax`: the first of the largest, a NaN being larger
// than any number.
__device__ __forceinline__ bool precedes(Best a, Best b) {
    bool nan = isnan(a.value);
    if (nan != isnan(b.value)) return nan;
    return a.value > b.value || (!(a.value < b.value) && a.index < b.index);
}

__device__ Best argmax(Span<const float> logits, i64 row, bool any, Batch of, u32 lane) {
    Best best = {__int_as_float(0xff800000), 0xffffffffu};  // loses to every class
    for (u32 c = lane; any && c < of.classes; c += of.lanes) {
        Best other = {logits[row + c], c};
        if (precedes(other, best)) best = other;
    }
    for (u32 step = of.lanes / 2; step > 0; step /= 2) {
        Best other = {__shfl_xor_sync(0xffffffffu, best.value, step),
                      __shfl_xor_sync(0xffffffffu, best.index, step)};
        if (precedes(other, best)) best = other;
    }
    return best;
}

struct Sums {
    double loss;
    double correct;
    double squares;  // of differences from the losses of the first configuration
};

// One thread adds a training batch: `add_train`.
__device__ void add_train(Sums sums, u32 samples, Span<double> counts, Span<double> log) {
    i64 step = (i64)counts[3];
    counts[0] += sums.loss;
    counts[1] += sums.correct;
    counts[2] += (double)samples;
    counts[3] += 1.0;
    if (log.len > 0) log[step % log.len] = sums.loss / (double)samples;
}

// The sums of all blocks, by one block.
__device__ Sums of_all(Span<const double> partials, double* part) {
    Sums sums = {0.0, 0.0, 0.0};
    for (i64 i = threadIdx.x; i < partials.len / 3; i += blockDim.x) {
        sums.loss += partials[3 * i];
        sums.correct += partials[3 * i + 1];
        sums.squares += partials[3 * i + 2];
    }
    sums.loss = block_sum(sums.loss, part);
    sums.correct = block_sum(sums.correct, part);
    sums.squares = block_sum(sums.squares, part);
    return sums;
}

__device__ __forceinline__ void add_scores(Sums sums, const Rows& to, Span<double> scores) {
    if (threadIdx.x >= to.count) return;
    i64 at = 4 * (i64)to.rows[threadIdx.x];
    scores[at] += sums.loss;
    scores[at + 1] += sums.correct;
    scores[at + 2] += (double)to.samples;
    scores[at + 3] += sums.squares;
}
