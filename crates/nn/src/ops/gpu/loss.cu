// Softmax cross-entropy (kernels/loss.rs), added to metrics (metrics/add.rs). Neighbouring threads
// share a sample: a power of two of them, at most a warp.
#include "cross_entropy.cuh"

// Sums over a block's samples, in every thread; and the gradient of the batch's mean, if it is
// wanted. A target that is out of range makes the loss NaN: it is no address.
__device__ Sums of_block(Span<const float> logits, Span<const u32> targets, Span<float> gradient,
                         Losses losses, Batch of, double* part) {
    u32 lane = threadIdx.x % of.lanes, group = threadIdx.x / of.lanes;
    u32 groups = blockDim.x / of.lanes;
    float mean = 1.0f / (float)of.samples;
    Sums sums = {0.0, 0.0, 0.0};
    // Every thread runs the same number of rounds: all lanes of a warp sum the warp's samples.
    for (u32 at = group; at < of.rows; at += groups) {
        i64 sample = (i64)blockIdx.x * of.rows + at, row = sample * of.classes;
        bool any = sample < of.samples;
        u32 target = any ? targets[sample] : 0;
        Best best = argmax(logits, row, any, of, lane);
        double sum = 0.0;
        for (u32 c = lane; any && c < of.classes; c += of.lanes) {
            sum += (double)exp_(logits[row + c] - best.value);
        }
        for (u32 step = of.lanes / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        if (any && lane == 0) {
            float own = target < of.classes ? logits[row + target] : __int_as_float(0x7fc00000);
            double loss = log_(sum) - ((double)own - (double)best.value);
            sums.loss += loss;
            sums.squares += losses.keep(sample, (float)loss);
            sums.correct += best.index == target ? 1.0 : 0.0;
        }
        if (!any || gradient.len == 0) continue;
        float scale = (float)(1.0 / sum) * mean;
        for (u32 c = lane; c < of.classes; c += of.lanes) {
            float d = exp_(logits[row + c] - best.value) * scale;
            gradient[row + c] = c == target ? d - mean : d;
        }
    }
    sums.loss = block_sum(sums.loss, part);
    sums.correct = block_sum(sums.correct, part);
    sums.squares = block_sum(sums.squares, part);
    return sums;
}

// A batch of one block.
extern "C" __global__ void __launch_bounds__(512)
    train(Span<const float> logits, Span<const u32> targets, Span<float> gradient,
          Span<double> counts, Span<double> log, Batch of) {
    locate(logits, targets, gradient, counts, log);
    __shared__ double part[512];
    Losses none = {{nullptr, 0}, {nullptr, 0}, false};
    Sums sums = of_block(logits, targets, gradient, none, of, part);
    if (threadIdx.x == 0) add_train(sums, of.samples, counts, log);
}

// One of several blocks of a batch: its sums, for the kernels below.
extern "C" __global__ void __launch_bounds__(512)
    partial(Span<const float> logits, Span<const u32> targets, Span<float> gradient,
            Span<float> first, Span<float> own, Span<double> partials, Batch of) {
    locate(logits, targets, gradient, first, own, partials);
    __shared__ double part[512];
    Losses losses = {first, own, of.is_first != 0};
    Sums sums = of_block(logits, targets, gradient, losses, of, part);
    if (threadIdx.x != 0) return;
    partials[3 * (i64)blockIdx.x] = sums.loss;
    partials[3 * (i64)blockIdx.x + 1] = sums.correct;
    partials[3 * (i64)blockIdx.x + 2] = sums.squares;
}

struct Samples {
    u32 samples;
};

extern "C" __global__ void __launch_bounds__(128)
    train_sum(Span<const double> partials, Span<double> counts, Span<double> log, Samples of) {
    locate(partials, counts, log);
    __shared__ double part[128];
    Sums sums = of_all(partials, part);
    if (threadIdx.x == 0) add_train(sums, of.samples, counts, log);
}

struct Evaluation {
    Batch of;
    Rows to;
};

// A batch of one block.
extern "C" __global__ void __launch_bounds__(512)
    evaluate(Span<const float> logits, Span<const u32> targets, Span<double> scores,
             Span<float> first, Span<float> own, Evaluation batch) {
    locate(logits, targets, scores, first, own);
    __shared__ double part[512];
    Span<float> none = {nullptr, 0};
    Losses losses = {first, own, batch.of.is_first != 0};
    Sums sums = of_block(logits, targets, none, losses, batch.of, part);
    add_scores(sums, batch.to, scores);
}

extern "C" __global__ void __launch_bounds__(128)
    evaluate_sum(Span<const double> partials, Span<double> scores, Rows to) {
    locate(partials, scores);
    __shared__ double part[128];
    Sums sums = of_all(partials, part);
    add_scores(sums, to, scores);
}
