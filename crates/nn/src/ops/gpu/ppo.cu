// The objective of proximal policy optimisation (kernels/ppo): rows forward, sums over the rows,
// rows backward. A warp has a row; the row's terms of the sums lie in scratch, [columns][rows].
#include "policy.cuh"

struct Objective {
    u32 rows;
    u32 count;   // of heads
    u32 logits;  // of all heads
    u32 first;   // whether the reference is recorded
    float clip;
    float value_coefficient;
    float entropy_floor_coefficient;
    Head heads[128];
};

// Columns before the columns of the heads: 1 for a row that counts, 1 for a decision, (V − R)², V,
// R, R², R − V, divergence.
const u32 FRONT = 8;
// Columns of a head: 1 where it is used, its loss, entropy, divergence, 1 where it is clipped, its
// ratio.
const u32 OF_HEAD = 6;

// Numbers of the report before those of the heads.
const u32 REPORT_FRONT = 9;

// eˣ − 1 within a few ulp, in plain arithmetic so that every device has the same bits.
__device__ double expm1_(double x) {
    if (isnan(x) || x > 709.79) return x + __longlong_as_double(0x7ff0000000000000ll);
    if (x < -40.0) return -1.0;
    const double ROUND = 6755399441055744.0;  // 1.5·2⁵²
    double n = (x * 1.44269504088896338700e+00 + ROUND) - ROUND;
    double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;  // 1/13!; |r| is below .35
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 1.0 / 2.0;
    p = p * (r * r) + r;
    // 2ⁿ⁻¹ is a normal number for every n.
    double half = __longlong_as_double((i64)(n + 1022.0) << 52);
    return n == 0.0 ? p : (p * half + (half - 0.5)) * 2.0;
}

__device__ __forceinline__ double divergence(double x) {
    return expm1_(x) - x;
}

struct Batch {
    Span<const float> outputs;
    Span<const u32> choices;
    Span<const unsigned char> legal;
    Span<const float> advantages;
    Span<const float> returns;
};

// The clipped objective of one head in one row.
struct Surrogate {
    float ratio;
    float value;
    bool is_bound;
};

__device__ Surrogate surrogate(float log_ratio, float advantage, float clip) {
    float ratio = exp_(log_ratio), low = 1.0f - clip, high = 1.0f + clip;
    float clipped = ratio < low ? low : ratio > high ? high : ratio;
    float free = ratio * advantage, bound = clipped * advantage;
    bool is_bound = bound < free;
    return {ratio, is_bound ? bound : free, is_bound};
}

// Legal choices among these columns of a row.
__device__ u32 count_legal(Span<const unsigned char> legal, i64 at, u32 choices) {
    u32 n = 0;
    for (u32 i = threadIdx.x; i < choices; i += 32) n += legal[at + i] != 0;
    return warp_sum(n);
}

// A head of a row: where its logits and its masks begin, its choices, and the one that was drawn.
struct Part {
    i64 logits;
    i64 masks;
    u32 choices;
    u32 choice;
};

// p of the choice; NaN if there is no such choice.
__device__ __forceinline__ float chosen(Span<const float> p, Part of) {
    return of.choice < of.choices ? p[of.logits + of.choice] : __int_as_float(0x7fc00000);
}

// Σ p·ln p', or of p'·ln p', over the legal choices, in order; the terms go to shared memory. In
// every lane.
__device__ float sum_of_logs(const Batch& batch, Span<const float> p, Part of, Floored floor,
                             bool floors, float* terms) {
    for (u32 i = threadIdx.x; i < of.choices; i += 32) {
        float value = p[of.logits + i], with_floor = floor.of(value);
        float term = (floors ? with_floor : value) * ln(with_floor);
        terms[i] = batch.legal[of.masks + i] != 0 ? term : 0.0f;
    }
    __syncwarp();
    float sum = sum_in_order(terms, of.choices);
    __syncwarp();
    return sum;
}

// The softmax over a head's legal choices, 0 for the others; the number of legal ones.
__device__ u32 softmax(const Batch& batch, Span<float> gradient, Part of, float* terms) {
    float largest = __int_as_float(0xff800000);
    u32 n = 0;
    for (u32 i = threadIdx.x; i < of.choices; i += 32) {
        if (batch.legal[of.masks + i] == 0) continue;
        float z = batch.outputs[of.logits + i];
        if (z > largest || isnan(z)) largest = z;
        n += 1;
    }
    largest = warp_max(largest);
    n = warp_sum(n);
    for (u32 i = threadIdx.x; i < of.choices; i += 32) {
        float e = exp_(batch.outputs[of.logits + i] - largest);
        terms[i] = batch.legal[of.masks + i] != 0 ? e : 0.0f;
    }
    __syncwarp();
    float sum = fmaxf(sum_in_order(terms, of.choices), SMALLEST);
    for (u32 i = threadIdx.x; i < of.choices; i += 32) gradient[of.logits + i] = terms[i] / sum;
    __syncwarp();
    return n;
}

// Leaves the softmax of the used heads in the gradient, records the reference, and writes the row's
// terms of the sums. A block of 32 threads a row; shared memory for the choices of the largest
// head.
extern "C" __global__ void __launch_bounds__(32)
    rows_forward(Span<const float> outputs, Span<const u32> choices,
                 Span<const unsigned char> legal, Span<const float> advantages,
                 Span<const float> returns, Span<float> gradient, Span<float> reference,
                 Span<double> columns, const __grid_constant__ Objective of) {
    locate(outputs, choices, legal, advantages, returns, gradient, reference, columns);
    extern __shared__ float terms[];
    Batch batch = {outputs, choices, legal, advantages, returns};
    Span<const float> p = {gradient.data, gradient.len};
    i64 row = blockIdx.x, at = row * (of.logits + 1), masks = row * of.logits;
    u32 ops = of.count > 0 ? count_legal(legal, masks, of.heads[0].choices) : 0;
    u32 op = of.count > 0 ? choices[row * of.count] : 0;
    float advantage = advantages[row];
    double log_ratio = 0.0;
    for (u32 k = 0; k < of.count; ++k) {
        const Head& head = of.heads[k];
        bool used = ops > 1 && has(head.used_by, op);
        i64 place = row * of.count + k;
        double to[OF_HEAD] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
        float log_prob = 0.0f;
        if (used) {
            Part part = {at, masks, head.choices, choices[place]};
            u32 n = softmax(batch, gradient, part, terms);
            Floored floor = floored(n, head.floor);
            float own = chosen(p, part);
            log_prob = n < 2 ? 0.0f : ln(floor.of(own));
            float x = of.first ? 0.0f : log_prob - reference[place];
            log_ratio += (double)x;
            float sum = sum_of_logs(batch, p, part, floor, true, terms);
            float entropy = n < 2 ? 0.0f : -sum / ln((float)n);
            Surrogate step = surrogate(x, advantage, of.clip);
            to[0] = 1.0;
            to[1] = -(double)step.value;
            to[2] = (double)entropy;
            to[3] = divergence((double)x);
            to[4] = step.is_bound ? 1.0 : 0.0;
            to[5] = (double)step.ratio;
        } else {
            for (u32 i = threadIdx.x; i < head.choices; i += 32) gradient[at + i] = 0.0f;
        }
        if (threadIdx.x == 0) {
            if (of.first) reference[place] = log_prob;
            for (u32 i = 0; i < OF_HEAD; ++i) {
                columns[(i64)(FRONT + k * OF_HEAD + i) * of.rows + row] = to[i];
            }
        }
        at += head.choices;
        masks += head.choices;
    }
    if (threadIdx.x != 0) return;
    double value = (double)outputs[at], target = (double)returns[row];
    double front[FRONT] = {1.0, ops > 1 ? 1.0 : 0.0, (value - target) * (value - target), value,
                           target, target * target, target - value,
                           ops > 1 ? divergence(log_ratio) : 0.0};
    for (u32 i = 0; i < FRONT; ++i) columns[(i64)i * of.rows + row] = ops > 0 ? front[i] : 0.0;
}

// From sums to the report; one thread. `sums` are the front columns.
__device__ void finish(const Objective& of, const double* sums, Span<double> report) {
    double policy = 0.0, entropy = 0.0;
    for (u32 k = 0; k < of.count; ++k) {
        i64 at = REPORT_FRONT + k * OF_HEAD;
        double count = report[at];
        for (u32 i = 1; i < OF_HEAD; ++i) report[at + i] /= fmax(count, 1.0);
        policy += report[at + 1];
        double mean = report[at + 2];
        double below = fmax((double)of.heads[k].entropy_floor - mean, 0.0);
        if (count > 0.0) {
            entropy += (double)of.entropy_floor_coefficient * below * below -
                       (double)of.heads[k].entropy_coefficient * mean;
        }
    }
    double rows = fmax(sums[0], 1.0), squares = sums[2];
    double rest = squares - sums[6] * sums[6] / rows;
    double spread = sums[5] - sums[4] * sums[4] / rows;
    report[0] = sums[0];
    report[1] = sums[1];
    report[2] = policy + entropy + (double)of.value_coefficient * (squares / rows);
    report[3] = policy;
    report[4] = squares / rows;
    report[5] = entropy;
    report[6] = sums[7] / fmax(sums[1], 1.0);
    report[7] = sums[3] / rows;
    report[8] = 1.0 - rest / spread;
}

// Adds up the columns, a warp for each, and finishes the report. One block of 1024 threads, for
// which the compiler must leave room in registers.
extern "C" __global__ void __launch_bounds__(1024)
    columns_sum(Span<const double> columns, Span<double> report,
                const __grid_constant__ Objective of) {
    locate(columns, report);
    __shared__ double front[FRONT];
    u32 lane = threadIdx.x % 32, count = FRONT + OF_HEAD * of.count;
    for (u32 column = threadIdx.x / 32; column < count; column += blockDim.x / 32) {
        double sum = 0.0;
        for (u32 row = lane; row < of.rows; row += 32) sum += columns[(i64)column * of.rows + row];
        for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(WARP, sum, step);
        if (lane != 0) continue;
        if (column < FRONT) {
            front[column] = sum;
        } else {
            report[REPORT_FRONT + column - FRONT] = sum;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) finish(of, front, report);
}

// Derivatives of the loss with respect to the log-probability of the choice, and the entropy.
struct Slopes {
    float choice;
    float entropy;
};

// Turns the softmax of a head that is used into the gradient of its logits, in place.
__device__ void differentiate(const Batch& batch, Span<float> gradient, Part of, Floored floor,
                              Slopes by, float* terms) {
    __syncwarp();  // every lane has read the choice's
    if (floor.n < 2) {
        for (u32 i = threadIdx.x; i < of.choices; i += 32) gradient[of.logits + i] = 0.0f;
        return;
    }
    Span<const float> p = {gradient.data, gradient.len};
    float own = chosen(p, of);
    float by_own = by.choice * floor.free * own / floor.of(own);
    float mean = sum_of_logs(batch, p, of, floor, false, terms);
    float by_entropy = by.entropy * floor.free / ln((float)floor.n);
    for (u32 i = threadIdx.x; i < of.choices; i += 32) {
        float value = gradient[of.logits + i], here = i == of.choice ? by_own : 0.0f;
        float slope = here - value * (by_own + by_entropy * (ln(floor.of(value)) - mean));
        gradient[of.logits + i] = batch.legal[of.masks + i] != 0 ? slope : 0.0f;
    }
}

// The gradient of a row, from the softmax that lies there and the report. Blocks as in
// `rows_forward`.
extern "C" __global__ void __launch_bounds__(32)
    rows_backward(Span<const float> outputs, Span<const u32> choices,
                  Span<const unsigned char> legal, Span<const float> advantages,
                  Span<const float> returns, Span<float> gradient, Span<const float> reference,
                  Span<const double> report, const __grid_constant__ Objective of) {
    locate(outputs, choices, legal, advantages, returns, gradient, reference, report);
    extern __shared__ float terms[];
    Batch batch = {outputs, choices, legal, advantages, returns};
    i64 row = blockIdx.x, at = row * (of.logits + 1), masks = row * of.logits;
    u32 ops = of.count > 0 ? count_legal(legal, masks, of.heads[0].choices) : 0;
    u32 op = of.count > 0 ? choices[row * of.count] : 0;
    float advantage = advantages[row];
    for (u32 k = 0; k < of.count; ++k) {
        const Head& head = of.heads[k];
        if (ops > 1 && has(head.used_by, op)) {
            i64 place = row * of.count + k;
            Part part = {at, masks, head.choices, choices[place]};
            u32 n = count_legal(legal, masks, head.choices);
            Floored floor = floored(n, head.floor);
            float own = chosen({gradient.data, gradient.len}, part);
            float log_prob = n < 2 ? 0.0f : ln(floor.of(own));
            Surrogate step = surrogate(log_prob - reference[place], advantage, of.clip);
            float by_choice = step.is_bound ? 0.0f : -advantage * step.ratio;
            float count = (float)report[REPORT_FRONT + k * OF_HEAD];
            double mean_entropy = report[REPORT_FRONT + k * OF_HEAD + 2];
            float below = (float)fmax((double)head.entropy_floor - mean_entropy, 0.0);
            float by_entropy =
                -head.entropy_coefficient - 2.0f * of.entropy_floor_coefficient * below;
            Slopes by = {by_choice / count, by_entropy / count};
            differentiate(batch, gradient, part, floor, by, terms);
        }
        at += head.choices;
        masks += head.choices;
    }
    if (threadIdx.x != 0) return;
    float error = outputs[at] - returns[row];
    gradient[at] = ops > 0 ? 2.0f * of.value_coefficient * error / (float)report[0] : 0.0f;
}
