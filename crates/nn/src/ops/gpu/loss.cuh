// Code that losses share.
#pragma once
#include "nn.cuh"

// Losses of the samples of an evaluation, in the first configuration and in this one.
struct Losses {
    Span<float> first, own;
    bool is_first;

    // Keeps the loss of a sample; returns the square of its difference from the first's, which is 0
    // for the first itself, also where its loss is not finite.
    __device__ double keep(i64 sample, float loss) const {
        if (own.len == 0) return 0.0;
        own[sample] = loss;
        if (is_first) {
            first[sample] = loss;
            return 0.0;
        }
        double difference = (double)first[sample] - (double)loss;
        return difference * difference;
    }
};

// Different rows of the scores, at most as many as a block has threads: `add_score`.
struct Rows {
    u32 samples;
    u32 count;
    u32 rows[62];
};
