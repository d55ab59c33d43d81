// Draws of actions (kernels/sample.rs), with its bits: choices and masks are the processor's. A
// warp has a row, and goes through its heads in order.
#include "philox.cuh"
#include "policy.cuh"

// The n-th uniform number of a generator's key, at a step.
__device__ float uniform(Word4 key, u32 n, u32 step0, u32 step1) {
    Word4 words = philox(key.x[0], key.x[1], {{n / 4, 0, step0, step1}});
    u32 in_block = n % 4;
    u32 word = in_block == 0   ? words.x[0]
               : in_block == 1 ? words.x[1]
               : in_block == 2 ? words.x[2]
                               : words.x[3];
    return (float)(word >> 8) * (1.0f / 16777216.0f);
}

struct Rules {
    u32 seed[2];
    u32 greedy;
    u32 count;   // of heads
    u32 logits;  // of all heads
    u32 places;
    u32 words;  // of a place: ops, then a bit for each choice of head 2
    Head heads[128];
};

struct From {
    Span<const float> outputs;
    Span<const u32> legality;
    Span<const u32> step;
};

struct To {
    Span<u32> choices;
    Span<unsigned char> legal;
    Span<float> log_probs;
    Span<float> entropies;
    Span<float> values;
};

// The draw of one head.
struct Turn {
    u32 head;
    u32 column;    // of its first logit
    u32 op;        // that was drawn, if it is not the first head's turn
    u32 place;     // that was drawn before, if any
    u32 anywhere;  // the ops that are legal in some place
};

// Whether a choice is legal, by the row's places.
__device__ __forceinline__ bool is_legal(const Rules& rules, Turn turn, u32 choice,
                                         Span<const u32> legality) {
    i64 places = (i64)blockIdx.x * rules.places;
    if (turn.head == 0) {
        bool placed = rules.count > 1 && has(rules.heads[1].used_by, choice);
        return !placed || has(turn.anywhere, choice);
    }
    if (!has(rules.heads[turn.head].used_by, turn.op)) return choice == 0;
    if (turn.head == 1) return has(legality[(places + choice) * rules.words], turn.op);
    if (turn.head != 2 || !has(rules.heads[1].used_by, turn.op)) return true;
    return has(legality[(places + turn.place) * rules.words + 1 + choice / 32], choice % 32);
}

// Index of the drawn choice among p' (below 0 where it is illegal); the same in every lane.
__device__ u32 pick(const float* p, u32 choices, float at) {
    u32 last = 0;
    for (u32 i = 0; i < choices; ++i) {
        float probability = p[i];
        if (probability < 0.0f) continue;
        at -= probability;
        if (at < 0.0f) return i;
        if (probability > 0.0f) last = i;
    }
    return last;  // `at` was not reached, because the sum of p' is rounded
}

// Index of the first of the largest.
__device__ u32 likeliest(const float* p, u32 choices) {
    u32 best = 0;
    float most = __int_as_float(0xff800000);
    for (u32 i = 0; i < choices; ++i) {
        if (p[i] >= 0.0f && p[i] > most) {
            best = i;
            most = p[i];
        }
    }
    return best;
}

// p' of a head's choices into `p`, −1 where they are illegal, and the masks.
__device__ Floored probabilities(const Rules& rules, const From& from, const To& to, Turn turn,
                                 float* p) {
    u32 lane = threadIdx.x, choices = rules.heads[turn.head].choices, n = 0;
    i64 row = blockIdx.x, at = row * (rules.logits + 1) + turn.column;
    float largest = __int_as_float(0xff800000);
    for (u32 i = lane; i < choices; i += 32) {
        bool legal = is_legal(rules, turn, i, from.legality);
        to.legal[row * rules.logits + turn.column + i] = legal;
        float logit = from.outputs[at + i];
        logit = isfinite(logit) ? logit : 0.0f;
        if (legal) {
            largest = fmaxf(largest, logit);
            n += 1;
        }
        p[i] = legal ? logit : __int_as_float(0x7fc00000);
    }
    n = warp_sum(n);
    largest = warp_max(largest);
    for (u32 i = lane; i < choices; i += 32) p[i] = isnan(p[i]) ? -1.0f : exp_(p[i] - largest);
    __syncwarp();
    float sum = 0.0f;
    for (u32 i = 0; i < choices; ++i) sum += p[i] < 0.0f ? 0.0f : p[i];
    sum = fmaxf(sum, SMALLEST);
    __syncwarp();
    Floored of = floored(n, rules.heads[turn.head].floor);
    for (u32 i = lane; i < choices; i += 32) p[i] = p[i] < 0.0f ? -1.0f : of.of(p[i] / sum);
    __syncwarp();
    return of;
}

// Entropy divided by ln n, from p'. The terms of the sum overwrite p'.
__device__ float entropy(Floored of, float* p, u32 choices) {
    if (of.n < 2) return 0.0f;
    __syncwarp();
    for (u32 i = threadIdx.x; i < choices; i += 32) p[i] = p[i] > 0.0f ? p[i] * ln(p[i]) : 0.0f;
    __syncwarp();
    return -sum_in_order(p, choices) / ln((float)of.n);
}

// A block of 32 threads a row; shared memory for the choices of the largest head.
extern "C" __global__ void __launch_bounds__(32)
    draw(Span<const float> outputs, Span<const u32> legality, Span<const u32> step,
         Span<u32> choices, Span<unsigned char> legal, Span<float> log_probs, Span<float> entropies,
         Span<float> values, const __grid_constant__ Rules rules) {
    locate(outputs, legality, step, choices, legal, log_probs, entropies, values);
    extern __shared__ float p[];
    From from = {outputs, legality, step};
    To to = {choices, legal, log_probs, entropies, values};
    i64 row = blockIdx.x;
    u64 env = (u64)step[2] + blockIdx.x;
    Word4 key = philox(rules.seed[0], rules.seed[1], {{0, 6, (u32)env, (u32)(env >> 32)}});
    u32 anywhere = 0;
    for (u32 i = threadIdx.x; i < rules.places; i += 32) {
        anywhere |= legality[(row * rules.places + i) * rules.words];
    }
    for (u32 bits = 16; bits > 0; bits /= 2) anywhere |= __shfl_xor_sync(WARP, anywhere, bits);
    Turn turn = {0, 0, 0, 0, anywhere};
    for (u32& head = turn.head; head < rules.count; ++head) {
        u32 count = rules.heads[head].choices;
        Floored of = probabilities(rules, from, to, turn, p);
        u32 choice = rules.greedy ? likeliest(p, count)
                                  : pick(p, count, uniform(key, head, step[0], step[1]));
        turn.op = head == 0 ? choice : turn.op;
        turn.place = head == 1 ? choice : turn.place;
        turn.column += count;
        float chosen = count > 0 ? p[choice] : 0.0f;
        float ended = entropy(of, p, count);
        if (threadIdx.x == 0) {
            to.choices[row * rules.count + head] = choice;
            to.log_probs[row * rules.count + head] = of.n < 2 ? 0.0f : ln(chosen);
            to.entropies[row * rules.count + head] = ended;
        }
        __syncwarp();  // `p` may be used again
    }
    if (threadIdx.x == 0) {
        float value = outputs[row * (rules.logits + 1) + rules.logits];
        to.values[row] = __int_as_float(step[3]) * value;
    }
}
