// Softmax cross-entropy with smoothed labels and weights of classes (kernels/loss.rs), divided
// among threads like plain cross-entropy. The kernels of loss.cu add up the sums of several blocks.
#include "cross_entropy.cuh"

struct Smoothed {
    Batch of;
    u32 formula;  // the only one
    float label_smoothing;
};

// Weight of a class, 1 without weights.
__device__ __forceinline__ double weight_of(Span<const float> weights, u32 c) {
    return weights.len > 0 ? (double)weights[c] : 1.0;
}

// Sums over a block's samples, in every thread; and the gradient of the batch's mean, if it is
// wanted. A target that is out of range makes the loss NaN: it is no address.
__device__ __forceinline__ Sums of_block(Span<const float> logits, Span<const u32> targets,
                                         Span<const float> weights, Span<float> gradient,
                                         Losses losses, Smoothed smoothed, double* part) {
    Batch of = smoothed.of;
    u32 lane = threadIdx.x % of.lanes, group = threadIdx.x / of.lanes;
    u32 groups = blockDim.x / of.lanes;
    double mean = 1.0 / (double)of.samples;
    double even = (double)smoothed.label_smoothing / (double)of.classes;
    double own_share = 1.0 - (double)smoothed.label_smoothing;
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
        double ln_sum = log_(sum), all_weights = 0.0, all = 0.0;
        for (u32 c = lane; any && c < of.classes; c += of.lanes) {
            double weight = weight_of(weights, c);
            all_weights += weight;
            if (even > 0.0) all += weight * (ln_sum - ((double)logits[row + c] - (double)best.value));
        }
        for (u32 step = of.lanes / 2; step > 0; step /= 2) {
            all_weights += __shfl_xor_sync(0xffffffffu, all_weights, step);
            all += __shfl_xor_sync(0xffffffffu, all, step);
        }
        bool in_range = target < of.classes;
        double of_target = own_share * (in_range ? weight_of(weights, target) : 1.0);
        if (any && lane == 0) {
            float own = in_range ? logits[row + target] : __int_as_float(0x7fc00000);
            double loss = of_target * (ln_sum - ((double)own - (double)best.value));
            if (even > 0.0) loss += even * all;
            sums.loss += loss;
            sums.squares += losses.keep(sample, (float)loss);
            sums.correct += best.index == target ? 1.0 : 0.0;
        }
        if (!any || gradient.len == 0) continue;
        float scale = (float)(1.0 / sum * (of_target + even * all_weights) * mean);
        for (u32 c = lane; c < of.classes; c += of.lanes) {
            float d = exp_(logits[row + c] - best.value) * scale;
            d -= (float)(even * weight_of(weights, c) * mean);
            gradient[row + c] = c == target ? d - (float)(of_target * mean) : d;
        }
    }
    sums.loss = block_sum(sums.loss, part);
    sums.correct = block_sum(sums.correct, part);
    sums.squares = block_sum(sums.squares, part);
    return sums;
}

// A batch of one block.
extern "C" __global__ void __launch_bounds__(512)
    train(Span<const float> logits, Span<const u32> targets, Span<const float> weights,
          Span<float> gradient, Span<double> counts, Span<double> log, Smoothed of) {
    locate(logits, targets, weights, gradient, counts, log);
    __shared__ double part[512];
    Losses none = {{nullptr, 0}, {nullptr, 0}, false};
    Sums sums = of_block(logits, targets, weights, gradient, none, of, part);
    if (threadIdx.x == 0) add_train(sums, of.of.samples, counts, log);
}

// One of several blocks of a batch: its sums, for the kernels of loss.cu.
extern "C" __global__ void __launch_bounds__(512)
    partial(Span<const float> logits, Span<const u32> targets, Span<const float> weights,
            Span<float> gradient, Span<float> first, Span<float> own, Span<double> partials,
            Smoothed of) {
    locate(logits, targets, weights, gradient, first, own, partials);
    __shared__ double part[512];
    Losses losses = {first, own, of.of.is_first != 0};
    Sums sums = of_block(logits, targets, weights, gradient, losses, of, part);
    if (threadIdx.x != 0) return;
    partials[3 * (i64)blockIdx.x] = sums.loss;
    partials[3 * (i64)blockIdx.x + 1] = sums.correct;
    partials[3 * (i64)blockIdx.x + 2] = sums.squares;
}

struct Evaluation {
    Smoothed of;
    Rows to;
};

// A batch of one block.
extern "C" __global__ void __launch_bounds__(512)
    evaluate(Span<const float> logits, Span<const u32> targets, Span<const float> weights,
             Span<double> scores, Span<float> first, Span<float> own, Evaluation batch) {
    locate(logits, targets, weights, scores, first, own);
    __shared__ double part[512];
    Span<float> none = {nullptr, 0};
    Losses losses = {first, own, batch.of.of.is_first != 0};
    Sums sums = of_block(logits, targets, weights, none, losses, batch.of, part);
    add_scores(sums, batch.to, scores);
}
