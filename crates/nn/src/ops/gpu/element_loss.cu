// Losses of numbers, output by output (kernels/loss.rs), added to metrics (metrics/add.rs).
// Neighbouring threads share a sample: a power of two of them, at most a warp.
#include "loss.cuh"

const u32 BINARY_CROSS_ENTROPY = 0, SQUARE = 1, HUBER = 2;  // else the absolute difference

// Shape of the values [samples][outputs], how blocks and threads divide them, and the loss of an
// output.
struct Batch {
    u32 samples;
    u32 outputs;
    u32 lanes;  // threads for a sample
    u32 rows;   // samples of a block, a multiple of the samples that it takes at a time
    u32 is_first;  // whether the first configuration is evaluated
    u32 loss;
    float delta;  // of Huber's loss
};

__device__ __forceinline__ double loss_of(Batch of, float value, float target) {
    double y = value, t = target, apart = y < t ? t - y : y - t;
    if (of.loss == BINARY_CROSS_ENTROPY) {
        double above = y < 0.0 ? -y : 0.0;
        return (1.0 - t) * y + above + (double)ln_1p_(exp_(-fabsf(value)));
    }
    if (of.loss == SQUARE) return apart * apart;
    if (of.loss == HUBER) {
        double delta = of.delta;
        return apart > delta ? delta * (apart - 0.5 * delta) : 0.5 * apart * apart;
    }
    return apart;
}

__device__ __forceinline__ float slope_of(Batch of, float value, float target) {
    if (of.loss == BINARY_CROSS_ENTROPY) return sigmoid_with_slope(value).value - target;
    float d = value - target;
    if (of.loss == SQUARE) return 2.0f * d;
    if (of.loss == HUBER) return d > of.delta ? of.delta : d < -of.delta ? -of.delta : d;
    return d > 0.0f ? 1.0f : d < 0.0f ? -1.0f : d;
}

// Sum of losses, sum of squares of differences from the losses of the first configuration, and sums
// of the score (score.rs).
const u32 SUMS = 6;
struct Sums {
    double of[SUMS];
};

__device__ __forceinline__ void count(Batch of, float value, float target, Sums& sums) {
    if (of.loss == BINARY_CROSS_ENTROPY) {
        bool predicted = value > 0.0f, present = target > 0.5f;
        sums.of[2] += predicted && present ? 1.0 : 0.0;
        sums.of[3] += predicted && !present ? 1.0 : 0.0;
        sums.of[4] += !predicted && present ? 1.0 : 0.0;
    } else {
        double d = (double)value - (double)target;
        sums.of[5] += d * d;
    }
}

// Sums over a block's samples, in every thread; and the gradient of the batch's mean, if it is
// wanted.
__device__ __forceinline__ Sums of_block(Span<const float> values, Span<const float> targets,
                                         Span<float> gradient, Losses losses, Batch of,
                                         double* part) {
    u32 lane = threadIdx.x % of.lanes, group = threadIdx.x / of.lanes;
    u32 groups = blockDim.x / of.lanes;
    float mean = 1.0f / (float)(of.samples * of.outputs);
    Sums sums = {};
    // Every thread runs the same number of rounds: all lanes of a warp sum the warp's samples.
    for (u32 at = group; at < of.rows; at += groups) {
        i64 sample = (i64)blockIdx.x * of.rows + at, row = sample * of.outputs;
        bool any = sample < of.samples;
        double sum = 0.0;
        for (u32 c = lane; any && c < of.outputs; c += of.lanes) {
            float value = values[row + c], target = targets[row + c];
            sum += loss_of(of, value, target);
            count(of, value, target, sums);
            if (gradient.len > 0) gradient[row + c] = slope_of(of, value, target) * mean;
        }
        for (u32 step = of.lanes / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        if (any && lane == 0) {
            double loss = sum / (double)of.outputs;
            sums.of[0] += loss;
            sums.of[1] += losses.keep(sample, (float)loss);
        }
    }
#pragma unroll
    for (u32 i = 0; i < SUMS; ++i) sums.of[i] = block_sum(sums.of[i], part);
    return sums;
}

__device__ __forceinline__ void add_score(Sums sums, double* score) {
#pragma unroll
    for (u32 i = 2; i < SUMS; ++i) score[i - 2] += sums.of[i];
}

// One thread adds a training batch: `add_train`.
__device__ void add_train(Sums sums, u32 samples, Span<double> counts, Span<double> log,
                          Span<double> score) {
    i64 step = (i64)counts[3];
    counts[0] += sums.of[0];
    counts[2] += (double)samples;
    counts[3] += 1.0;
    if (log.len > 0) log[step % log.len] = sums.of[0] / (double)samples;
    add_score(sums, &score[0]);
}

// A batch of one block.
extern "C" __global__ void __launch_bounds__(512)
    train(Span<const float> values, Span<const float> targets, Span<float> gradient,
          Span<double> counts, Span<double> log, Span<double> score, Batch of) {
    locate(values, targets, gradient, counts, log, score);
    __shared__ double part[512];
    Losses none = {{nullptr, 0}, {nullptr, 0}, false};
    Sums sums = of_block(values, targets, gradient, none, of, part);
    if (threadIdx.x == 0) add_train(sums, of.samples, counts, log, score);
}

// One of several blocks of a batch: its sums, for the kernels below.
extern "C" __global__ void __launch_bounds__(512)
    partial(Span<const float> values, Span<const float> targets, Span<float> gradient,
            Span<float> first, Span<float> own, Span<double> partials, Batch of) {
    locate(values, targets, gradient, first, own, partials);
    __shared__ double part[512];
    Losses losses = {first, own, of.is_first != 0};
    Sums sums = of_block(values, targets, gradient, losses, of, part);
    if (threadIdx.x != 0) return;
#pragma unroll
    for (u32 i = 0; i < SUMS; ++i) partials[SUMS * (i64)blockIdx.x + i] = sums.of[i];
}

// The sums of all blocks, by one block.
__device__ __forceinline__ Sums of_all(Span<const double> partials, double* part) {
    Sums sums = {};
    for (i64 at = threadIdx.x; at < partials.len / SUMS; at += blockDim.x) {
#pragma unroll
        for (u32 i = 0; i < SUMS; ++i) sums.of[i] += partials[SUMS * at + i];
    }
#pragma unroll
    for (u32 i = 0; i < SUMS; ++i) sums.of[i] = block_sum(sums.of[i], part);
    return sums;
}

struct Samples {
    u32 samples;
};

extern "C" __global__ void __launch_bounds__(128)
    train_sum(Span<const double> partials, Span<double> counts, Span<double> log,
              Span<double> score, Samples of) {
    locate(partials, counts, log, score);
    __shared__ double part[128];
    Sums sums = of_all(partials, part);
    if (threadIdx.x == 0) add_train(sums, of.samples, counts, log, score);
}

// A row: sum of losses, correct samples (none here), samples, squares, sums of the score.
__device__ __forceinline__ void add_scores(Sums sums, const Rows& to, Span<double> scores) {
    if (threadIdx.x >= to.count) return;
    i64 at = 8 * (i64)to.rows[threadIdx.x];
    scores[at] += sums.of[0];
    scores[at + 2] += (double)to.samples;
    scores[at + 3] += sums.of[1];
    add_score(sums, &scores[at + 4]);
}

struct Evaluation {
    Batch of;
    Rows to;
};

// A batch of one block.
extern "C" __global__ void __launch_bounds__(512)
    evaluate(Span<const float> values, Span<const float> targets, Span<double> scores,
             Span<float> first, Span<float> own, Evaluation batch) {
    locate(values, targets, scores, first, own);
    __shared__ double part[512];
    Span<float> none = {nullptr, 0};
    Losses losses = {first, own, batch.of.is_first != 0};
    Sums sums = of_block(values, targets, none, losses, batch.of, part);
    add_scores(sums, batch.to, scores);
}

extern "C" __global__ void __launch_bounds__(128)
    evaluate_sum(Span<const double> partials, Span<double> scores, Rows to) {
    locate(partials, scores);
    __shared__ double part[128];
    Sums sums = of_all(partials, part);
    add_scores(sums, to, scores);
}
