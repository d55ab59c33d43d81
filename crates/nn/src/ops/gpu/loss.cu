// Softmax cross-entropy (kernels/loss.rs), added to metrics (metrics.rs). Neighbouring threads have
// a sample together: a power of two of them, at most a warp.
#include "loss.cuh"

// Shape of the logits [samples][classes], and how they are dealt out.
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

// Sums over a block's samples, in every thread; and the gradient of the batch's mean, if it is
// wanted. A target that is out of range makes the loss NaN: it is no address.
__device__ Sums of_block(Span<const float> logits, Span<const u32> targets, Span<float> gradient,
                         Losses losses, Batch of, double* part) {
    u32 lane = threadIdx.x % of.lanes, group = threadIdx.x / of.lanes;
    u32 groups = blockDim.x / of.lanes;
    float mean = 1.0f / (float)of.samples;
    Sums sums = {0.0, 0.0, 0.0};
    // Every thread goes round as often: a warp's samples are summed by all of its lanes.
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

// One thread adds a training batch: `add_train`.
__device__ void add_train(Sums sums, u32 samples, Span<double> counts, Span<double> log) {
    i64 step = (i64)counts[3];
    counts[0] += sums.loss;
    counts[1] += sums.correct;
    counts[2] += (double)samples;
    counts[3] += 1.0;
    if (log.len > 0) log[step % log.len] = sums.loss / (double)samples;
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

__device__ __forceinline__ void add_scores(Sums sums, const Rows& to, Span<double> scores) {
    if (threadIdx.x >= to.count) return;
    i64 at = 4 * (i64)to.rows[threadIdx.x];
    scores[at] += sums.loss;
    scores[at + 1] += sums.correct;
    scores[at + 2] += (double)to.samples;
    scores[at + 3] += sums.squares;
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
