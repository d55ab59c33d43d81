// Gradient norms, clipping and optimisers (kernels/optim.rs, metrics/add.rs) over ranges of a
// group's elements. Each range is cut into chunks; a block has one.
#include "nn.cuh"

// Numbers of an optimiser, f64 (`Optimiser::hyperparameters`).
const u32 CLIP_NORM = 0, RATE = 1;
const u32 SGD_MOMENTUM = 2, SGD_DECAY = 3;
const u32 BETA1 = 2, BETA2 = 3, EPS = 4, DECAY = 5;

// Ranges of elements, in order.
struct Ranges {
    u32 count;
    u32 start[120];
    u32 len[120];
    u32 block[120];  // the first block of each; an empty range has no block
};

// Elements of a block.
struct Part {
    i64 start;
    u32 len;
    u32 range;
};

// The part of block `blockIdx.x`, which is in the last range whose first block is this block or an
// earlier one.
__device__ __forceinline__ Part part_of(const Ranges& ranges, u32 chunk) {
    u32 low = 0, high = ranges.count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (ranges.block[middle] <= blockIdx.x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    u32 before = (blockIdx.x - ranges.block[low]) * chunk, len = ranges.len[low] - before;
    return {(i64)ranges.start[low] + before, len < chunk ? len : chunk, low};
}

// Elements of a block that updates, and of one of its threads: all are loaded before any is
// written.
const u32 CHUNK = 1024;
const u32 EACH = CHUNK / 256;

// The thread's elements of a part, or zeros; neighbouring threads have neighbouring elements.
struct Four {
    float v[EACH];

    __device__ __forceinline__ Four(Span<const float> of, const Part& part) {
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            u32 at = threadIdx.x + k * 256;
            v[k] = at < part.len ? of[part.start + at] : 0.0f;
        }
    }
};

// Writes the thread's elements of a part.
__device__ __forceinline__ void write(const Four& four, Span<float> to, const Part& part) {
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 at = threadIdx.x + k * 256;
        if (at < part.len) to[part.start + at] = four.v[k];
    }
}

// Sums of squares of chunks of 4096 elements, in f64; 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    squares(Span<const float> gradient, Span<double> partials,
            const __grid_constant__ Ranges ranges) {
    locate(gradient, partials);
    __shared__ double part[256];
    Part of = part_of(ranges, 4096);
    double sum = 0.0;
#pragma unroll
    for (u32 i = 0; i < 4096; i += 256) {
        double g = threadIdx.x + i < of.len ? (double)gradient[of.start + threadIdx.x + i] : 0.0;
        sum += g * g;
    }
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// Tensors of the group, in order. `begins` and `ends`: whether the group's first tensor and its
// last tensor are among them.
struct Tensors {
    u32 count;
    u32 begins;
    u32 ends;
    float norm_factor;  // of the clip norm
    u32 first[121];  // first partial sum of each tensor, and the end of the last
};

// Adds the tensors' norms to the group's metrics (`add_group`); the last call also writes the
// coefficient of `clip_coefficient`. One block of 256 threads, a warp for a tensor; the group's sum
// over the tensors is in order. `carried` is the sum so far if the tensors come in several calls.
extern "C" __global__ void __launch_bounds__(256, 1)
    norms(Span<const double> partials, Span<const double> numbers, Span<double> carried,
          Span<double> row, Span<float> clip, const __grid_constant__ Tensors of) {
    locate(partials, numbers, carried, row, clip);
    __shared__ double square[120];
    __shared__ u32 flags[120];
    for (u32 tensor = threadIdx.x / 32; tensor < of.count; tensor += blockDim.x / 32) {
        double sum = 0.0;
        u32 end = of.first[tensor + 1];
        for (u32 i = of.first[tensor] + threadIdx.x % 32; i < end; i += 32) sum += partials[i];
        for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (threadIdx.x % 32 == 0) {
            double norm = sqrt(sum);
            square[tensor] = sum;
            flags[tensor] = (norm < 1e-7 ? 1 : 0) + (norm > 10.0 || !isfinite(norm) ? 2 : 0);
        }
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    double sum = of.begins ? 0.0 : carried[0];
    u32 vanishing = 0, exploding = 0;
    for (u32 tensor = 0; tensor < of.count; ++tensor) {
        sum += square[tensor];
        vanishing += flags[tensor] & 1;
        exploding += flags[tensor] >> 1;
    }
    row[2] += (double)vanishing;
    row[3] += (double)exploding;
    row[4] += (double)of.count;
    if (!of.ends) {
        carried[0] = sum;
        return;
    }
    double norm = sqrt(sum);
    row[0] = norm;
    row[1] += norm;
    row[5] += 1.0;
    float norm_max = (float)numbers[CLIP_NORM] * of.norm_factor;
    float coefficient = norm_max / ((float)norm + 1e-6f);
    clip[0] = coefficient > 1.0f ? 1.0f : coefficient;
}

// Scales chunks; most gradients are within bounds, and are not written.
extern "C" __global__ void __launch_bounds__(256)
    clip(Span<float> gradient, Span<const float> coefficient,
         const __grid_constant__ Ranges ranges) {
    locate(gradient, coefficient);
    float factor = coefficient[0];
    if (factor == 1.0f) return;
    Part part = part_of(ranges, CHUNK);
    Four g({gradient.data, gradient.len}, part);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) g.v[k] *= factor;
    write(g, gradient, part);
}

// Runs after the last block that reads the coefficient.
extern "C" __global__ void __launch_bounds__(32)
    clipped(Span<float> coefficient) {
    locate(coefficient);
    if (first() == 0) coefficient[0] = 1.0f;
}

extern "C" __global__ void __launch_bounds__(256)
    sgd(Span<const float> gradient, Span<const float> clip, Span<const double> numbers,
        Span<float> values, Span<float> momentum, const __grid_constant__ Ranges ranges) {
    locate(gradient, clip, numbers, values, momentum);
    float factor = clip[0], rate = (float)numbers[RATE];
    float keep = (float)numbers[SGD_MOMENTUM], decay = (float)numbers[SGD_DECAY];
    Part part = part_of(ranges, CHUNK);
    Four g(gradient, part), p({values.data, values.len}, part);
    Four b({momentum.data, momentum.len}, part);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        b.v[k] = keep * b.v[k] + (factor * g.v[k] + decay * p.v[k]);
        p.v[k] = p.v[k] - rate * b.v[k];
    }
    write(b, momentum, part);
    write(p, values, part);
}

extern "C" __global__ void __launch_bounds__(256)
    nesterov(Span<const float> gradient, Span<const float> clip, Span<const double> numbers,
             Span<float> values, Span<float> momentum, const __grid_constant__ Ranges ranges) {
    locate(gradient, clip, numbers, values, momentum);
    float factor = clip[0], rate = (float)numbers[RATE];
    float keep = (float)numbers[SGD_MOMENTUM], decay = (float)numbers[SGD_DECAY];
    Part part = part_of(ranges, CHUNK);
    Four gradients(gradient, part), p({values.data, values.len}, part);
    Four b({momentum.data, momentum.len}, part);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        float g = factor * gradients.v[k] + decay * p.v[k];
        b.v[k] = keep * b.v[k] + g;
        p.v[k] = p.v[k] - rate * (g + keep * b.v[k]);
    }
    write(b, momentum, part);
    write(p, values, part);
}

extern "C" __global__ void __launch_bounds__(256)
    lion(Span<const float> gradient, Span<const float> clip, Span<const double> numbers,
         Span<float> values, Span<float> average, const __grid_constant__ Ranges ranges) {
    locate(gradient, clip, numbers, values, average);
    float factor = clip[0], rate = (float)numbers[RATE];
    float first = (float)numbers[BETA1], share1 = (float)(1.0 - numbers[BETA1]);
    float second = (float)numbers[BETA2], share2 = (float)(1.0 - numbers[BETA2]);
    float keep = (float)(1.0 - numbers[RATE] * numbers[DECAY]);
    Part part = part_of(ranges, CHUNK);
    Four gradients(gradient, part), p({values.data, values.len}, part);
    Four m({average.data, average.len}, part);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        float g = factor * gradients.v[k];
        float direction = first * m.v[k] + share1 * g;
        // 0 and NaN are their own signs.
        float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction;
        p.v[k] = keep * p.v[k] - rate * sign;
        m.v[k] = second * m.v[k] + share2 * g;
    }
    write(m, average, part);
    write(p, values, part);
}

// xⁿ by squares, n > 0. Its rounding errors beyond `pow`'s disappear when the result becomes an
// f32.
__device__ double power(double x, i64 n) {
    double y = 1.0;
    for (; n > 0; n >>= 1) {
        if (n & 1) y *= x;
        x *= x;
    }
    return y;
}

// Ranges of Adam: each is a parameter, which has a count of steps.
struct Adam {
    u32 rate;       // number with the learning rate
    u32 decoupled;  // whether weight decay is that of AdamW
    Ranges ranges;
};

// Counts a step of each range with elements, and finds its rate and root (`AdamStep`), which are
// the same for all its elements.
extern "C" __global__ void __launch_bounds__(128)
    adam_begin(Span<const double> numbers, Span<i64> steps, Span<float> corrections,
               const __grid_constant__ Adam of) {
    locate(numbers, steps, corrections);
    u32 range = threadIdx.x;
    if (range >= of.ranges.count || of.ranges.len[range] == 0) return;
    i64 step = steps[range] + 1;
    steps[range] = step;
    float rate = (float)(numbers[of.rate] / (1.0 - power(numbers[BETA1], step)));
    corrections[2 * range] = rate;
    corrections[2 * range + 1] = (float)sqrt(1.0 - power(numbers[BETA2], step));
}

extern "C" __global__ void __launch_bounds__(256)
    adam(Span<const float> gradient, Span<const float> clip, Span<const double> numbers,
         Span<const float> corrections, Span<float> values, Span<float> average,
         Span<float> square, const __grid_constant__ Adam of) {
    locate(gradient, clip, numbers, corrections, values, average, square);
    Part part = part_of(of.ranges, CHUNK);
    float factor = clip[0];
    float rate = corrections[2 * part.range], root = corrections[2 * part.range + 1];
    double first = numbers[BETA1], second = numbers[BETA2];
    float share1 = (float)(1.0 - first), share2 = (float)(1.0 - second);
    float decay = (float)second, eps = (float)numbers[EPS];
    float penalty = of.decoupled ? 0.0f : (float)numbers[DECAY];
    float keep = of.decoupled ? (float)(1.0 - numbers[of.rate] * numbers[DECAY]) : 1.0f;
    Four gradients(gradient, part), p({values.data, values.len}, part);
    Four m({average.data, average.len}, part), v({square.data, square.len}, part);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        float g = factor * gradients.v[k] + penalty * p.v[k];
        m.v[k] += share1 * (g - m.v[k]);
        v.v[k] = decay * v.v[k] + share2 * g * g;
        p.v[k] = keep * p.v[k] - rate * (m.v[k] / (sqrtf(v.v[k]) / root + eps));
    }
    write(m, average, part);
    write(v, square, part);
    write(p, values, part);
}
