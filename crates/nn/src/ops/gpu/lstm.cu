// LSTM over sequences (kernels/lstm.rs), after the product with all inputs. Rows are [T][B]; gates
// i, f, g, o lie side by side in a row of 4H; weights have rows of `pitch`, 4H padded; a state is
// h, then c. Steps of a sequence depend on each other and on no other sequence: one block goes
// through all of them.
#include "value.cuh"

struct Shape {
    u32 steps;
    u32 sequences;
    u32 hidden;
    u32 pitch;
    u32 accumulate;
    u32 keeps;  // whether a block keeps the state's weights in shared memory
};

// Exactly 0 for a keep of 0, for any x.
__device__ __forceinline__ float masked(float keep, float x) {
    return keep == 0.0f ? 0.0f : keep * x;
}

// An element of a sequence's h and c at a step.
struct At {
    i64 step;
    u32 sequence;
    u32 k;
};

// The element of h (`part` 0) or c (`part` 1) before the step.
template <class T>
__device__ __forceinline__ float earlier(const Shape& of, Span<const float> state,
                                         Span<const T> done, u32 part, At at) {
    if (at.step == 0) return state[((i64)at.sequence * 2 + part) * of.hidden + at.k];
    return done[((at.step - 1) * of.sequences + at.sequence) * of.hidden + at.k];
}

// The state's weights, in rows: in shared memory if they fit there, else in global memory, where
// each step reads them again. In either case the threads of a warp read neighbouring elements of a
// row, and all of them the same element of the state, so there are no bank conflicts.
struct Weights {
    const float* rows;
    u32 pitch;

    __device__ Weights(const Shape& of, Span<const float> weight, float* room)
        : rows(weight.data), pitch(of.pitch) {
        if (!of.keeps) return;
        u32 width = 4 * of.hidden;
        for (u32 k = threadIdx.x / 32; k < of.hidden; k += blockDim.x / 32) {
            for (u32 j = threadIdx.x % 32; j < width; j += 32) {
                room[k * width + j] = weight[(i64)k * of.pitch + j];
            }
        }
        rows = room, pitch = width;
    }

    __device__ __forceinline__ float at(u32 k, u32 j) const {
        return rows[(u64)k * pitch + j];
    }

    // Product of the state with a column, in four sums for the sake of latency; 16 loads of weights
    // are in flight at a time.
    __device__ __forceinline__ float column(const float* state, u32 n, u32 j) const {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        u32 k = 0;
        for (; k + 16 <= n; k += 16) {
            float w[16], h[16];
#pragma unroll
            for (u32 i = 0; i < 16; ++i) w[i] = at(k + i, j);
#pragma unroll
            for (u32 i = 0; i < 16; i += 4) load4(state + k + i, h + i);
#pragma unroll
            for (u32 i = 0; i < 16; ++i) sums[i % 4] = fmaf(h[i], w[i], sums[i % 4]);
        }
        for (; k + 4 <= n; k += 4) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) sums[i] = fmaf(state[k + i], at(k + i, j), sums[i]);
        }
        for (; k < n; ++k) sums[0] = fmaf(state[k], at(k, j), sums[0]);
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }

    // A lane's share of the product of a row with the gates' gradients.
    __device__ __forceinline__ float row(const float* d, u32 width, u32 k) const {
        float sum = 0.0f;
#pragma unroll 8
        for (u32 j = threadIdx.x % 32; j < width; j += 32) sum = fmaf(d[j], at(k, j), sum);
        return sum;
    }
};

// A sequence forward, from `gates` with the products of the inputs. A block a sequence; shared
// memory for [h, c, gates], [6][H], and for the weights if they are kept.
extern "C" __global__ void __launch_bounds__(1024, 1)
    forward(Span<const float> keep, Span<const float> state, Span<const float> weight,
            Span<const float> bias_ih, Span<const float> bias_hh, Span<Value> h, Span<float> c,
            Span<Value> gates, Span<float> last, Shape of) {
    locate(keep, state, weight, bias_ih, bias_hh, h, c, gates, last);
    extern __shared__ float4 shared4[];
    float* shared = reinterpret_cast<float*>(shared4);
    u32 n = of.hidden, sequence = blockIdx.x;
    float *h_before = shared, *c_before = shared + n, *active = shared + 2 * n;
    Weights weights(of, weight, shared + 6 * n);
    for (u32 k = threadIdx.x; k < n; k += blockDim.x) {
        h_before[k] = state[(i64)sequence * 2 * n + k];
        c_before[k] = state[(i64)sequence * 2 * n + n + k];
    }
    for (i64 t = 0; t < of.steps; ++t) {
        i64 row = t * of.sequences + sequence;
        float kept = keep[row];
        // Each thread masks the elements that it has written.
        for (u32 k = threadIdx.x; k < n; k += blockDim.x) h_before[k] = masked(kept, h_before[k]);
        __syncthreads();
        for (u32 j = threadIdx.x; j < 4 * n; j += blockDim.x) {
            float v = bias_ih[j] + bias_hh[j] + gates[row * 4 * n + j];
            v += weights.column(h_before, n, j);
            v = as_stored<Value>(j - 2 * n < n ? tanh_(v) : sigmoid_(v));
            gates[row * 4 * n + j] = v;
            active[j] = v;
        }
        __syncthreads();
        for (u32 k = threadIdx.x; k < n; k += blockDim.x) {
            float i = active[k], f = active[n + k], g = active[2 * n + k], o = active[3 * n + k];
            float cell = f * masked(kept, c_before[k]) + i * g;
            float out = as_stored<Value>(o * tanh_(cell));
            c_before[k] = cell;
            h_before[k] = out;
            c[row * n + k] = cell;
            h[row * n + k] = out;
        }
    }
    for (u32 k = threadIdx.x; k < n; k += blockDim.x) {
        last[(i64)sequence * 2 * n + k] = h_before[k];
        last[(i64)sequence * 2 * n + n + k] = c_before[k];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    states_before(Span<const Value> h, Span<const float> keep, Span<const float> state,
                  Span<Value> to, Shape of) {
    locate(h, keep, state, to);
    u32 i = (u32)first();
    if (i >= to.len) return;
    u32 row = i / of.hidden;
    At at = {row / of.sequences, row % of.sequences, i % of.hidden};
    to[i] = masked(keep[row], earlier(of, state, h, 0, at));
}

struct Saved {
    Span<const float> keep;
    Span<const float> state;
    Span<const float> c;
    Span<const Value> gates;
    Span<const Value> dh;
};

// One element of a step of the cell, backward: `dc` is the gradient from the step after, and
// becomes that for the step before; the gates' gradients go to d[0], d[n], d[2n], d[3n].
__device__ void cell_backward(const Saved& saved, const Shape& of, At at, float dh_next, float& dc,
                              float* d) {
    u32 n = of.hidden;
    i64 row = at.step * of.sequences + at.sequence, gate = row * 4 * n + at.k;
    float i = saved.gates[gate], f = saved.gates[gate + n];
    float g = saved.gates[gate + 2 * n], o = saved.gates[gate + 3 * n];
    float keep = saved.keep[row];
    float before = masked(keep, earlier(of, saved.state, saved.c, 1, at));
    float dh = saved.dh[row * n + at.k] + dh_next, bent = tanh_(saved.c[row * n + at.k]);
    float dcell = dc + dh * o * (1.0f - bent * bent);
    d[0] = dcell * g * i * (1.0f - i);
    d[n] = dcell * before * f * (1.0f - f);
    d[2 * n] = dcell * i * (1.0f - g * g);
    d[3 * n] = dh * bent * o * (1.0f - o);
    dc = dcell * f * keep;
}

// A sequence backward. A block a sequence; shared memory for [dh, dc, dgates], [6][H], and for the
// weights if they are kept.
extern "C" __global__ void __launch_bounds__(1024, 1)
    backward(Span<const float> keep, Span<const float> state, Span<const float> weight,
             Span<const float> c, Span<const Value> gates, Span<const Value> dh,
             Span<Value> dgates, Span<Value> dstate, Shape of) {
    locate(keep, state, weight, c, gates, dh, dgates, dstate);
    extern __shared__ float4 shared4[];
    float* shared = reinterpret_cast<float*>(shared4);
    Saved saved = {keep, state, c, gates, dh};
    u32 n = of.hidden, sequence = blockIdx.x, lane = threadIdx.x % 32;
    float *dh_next = shared, *dc = shared + n, *d = shared + 2 * n;
    Weights weights(of, weight, shared + 6 * n);
    for (u32 k = threadIdx.x; k < 2 * n; k += blockDim.x) shared[k] = 0.0f;
    __syncthreads();
    for (i64 t = (i64)of.steps - 1; t >= 0; --t) {
        i64 row = t * of.sequences + sequence;
        for (u32 k = threadIdx.x; k < n; k += blockDim.x) {
            cell_backward(saved, of, {t, sequence, k}, dh_next[k], dc[k], d + k);
        }
        __syncthreads();
        for (u32 j = threadIdx.x; j < 4 * n; j += blockDim.x) dgates[row * 4 * n + j] = d[j];
        // A warp for each element: a row of the weight, in `fmaf`.
        for (u32 k = threadIdx.x / 32; k < n; k += blockDim.x / 32) {
            float sum = weights.row(d, 4 * n, k);
            for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (lane == 0) dh_next[k] = keep[row] * sum;
        }
        __syncthreads();
    }
    if (dstate.len == 0) return;
    for (u32 k = threadIdx.x; k < 2 * n; k += blockDim.x) {
        put(dstate[(i64)sequence * 2 * n + k], shared[k], of.accumulate);
    }
}
