// LSTM over sequences (kernels/lstm.rs). Rows are [T][B]; gates i, f, g, o lie side by side in a
// row of 4H; weights have rows of `pitch`, 4H padded; a state is h, then c. Steps of a sequence
// depend on each other and on no other sequence: one block goes through all of them.
#include "nn.cuh"

struct Product {
    u32 rows;
    u32 depth;
    u32 columns;
    u32 pitch;
    u32 tiles;  // across the columns
};

// gates = x · weight + both biases, in tiles of 64 by 64: 256 threads, each with 4 by 4 of them.
// Every sum goes over the inputs in order, in `fmaf`.
extern "C" __global__ void __launch_bounds__(256)
    inputs(Span<const float> x, Span<const float> weight, Span<const float> bias_ih,
           Span<const float> bias_hh, Span<float> gates, Product of) {
    locate(x, weight, bias_ih, bias_hh, gates);
    // 66: threads that store 16 inputs of two rows meet no bank twice.
    __shared__ float rows[16][66], columns[16][64];
    i64 first_row = (i64)(blockIdx.x / of.tiles) * 64;
    u32 first_column = blockIdx.x % of.tiles * 64;
    u32 across = threadIdx.x % 16, down = threadIdx.x / 16;
    float sums[4][4] = {};
    for (u32 start = 0; start < of.depth; start += 16) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 k = start + across, at = down + 16 * i;
            bool inside = k < of.depth && first_row + at < of.rows;
            rows[across][at] = inside ? x[(first_row + at) * of.depth + k] : 0.0f;
            k = start + threadIdx.x / 64 + 4 * i;
            u32 column = first_column + threadIdx.x % 64;
            inside = k < of.depth && column < of.columns;
            columns[k - start][threadIdx.x % 64] =
                inside ? weight[(i64)k * of.pitch + column] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (u32 k = 0; k < 16; ++k) {
            for (u32 i = 0; i < 4; ++i) {
                for (u32 j = 0; j < 4; ++j) {
                    sums[i][j] =
                        fmaf(rows[k][4 * down + i], columns[k][across + 16 * j], sums[i][j]);
                }
            }
        }
        __syncthreads();
    }
    for (u32 j = 0; j < 4; ++j) {
        u32 column = first_column + across + 16 * j;
        if (column >= of.columns) continue;
        float bias = bias_ih[column] + bias_hh[column];
        for (u32 i = 0; i < 4; ++i) {
            i64 row = first_row + 4 * down + i;
            if (row < of.rows) gates[row * of.columns + column] = bias + sums[i][j];
        }
    }
}

struct Shape {
    u32 steps;
    u32 sequences;
    u32 hidden;
    u32 pitch;
    u32 accumulate;
};

// Exactly 0 for a keep of 0, whatever x is.
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
__device__ __forceinline__ float earlier(const Shape& of, Span<const float> state,
                                         Span<const float> done, u32 part, At at) {
    if (at.step == 0) return state[((i64)at.sequence * 2 + part) * of.hidden + at.k];
    return done[((at.step - 1) * of.sequences + at.sequence) * of.hidden + at.k];
}

// Product of the state with a column of the weight, in four sums for the sake of latency.
__device__ float by_state(const float* state, Span<const float> weight, const Shape& of,
                          u32 column) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 whole = of.hidden / 4 * 4;
    i64 at = column;
    for (u32 k = 0; k < whole; k += 4, at += 4 * (i64)of.pitch) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            sums[i] = fmaf(state[k + i], weight[at + (i64)i * of.pitch], sums[i]);
        }
    }
    for (u32 k = whole; k < of.hidden; ++k, at += of.pitch) {
        sums[0] = fmaf(state[k], weight[at], sums[0]);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// A sequence forward, from `gates` with the products of the inputs. A block a sequence; shared
// memory for [h, c, gates], [6][H].
extern "C" __global__ void __launch_bounds__(1024)
    forward(Span<const float> keep, Span<const float> state, Span<const float> weight,
            Span<float> h, Span<float> c, Span<float> gates, Span<float> last, Shape of) {
    locate(keep, state, weight, h, c, gates, last);
    extern __shared__ float shared[];
    u32 n = of.hidden, sequence = blockIdx.x;
    float *h_before = shared, *c_before = shared + n, *active = shared + 2 * n;
    for (u32 k = threadIdx.x; k < n; k += blockDim.x) {
        h_before[k] = state[(i64)sequence * 2 * n + k];
        c_before[k] = state[(i64)sequence * 2 * n + n + k];
    }
    for (i64 t = 0; t < of.steps; ++t) {
        i64 row = t * of.sequences + sequence;
        float kept = keep[row];
        // Each thread masks what it has written.
        for (u32 k = threadIdx.x; k < n; k += blockDim.x) h_before[k] = masked(kept, h_before[k]);
        __syncthreads();
        for (u32 j = threadIdx.x; j < 4 * n; j += blockDim.x) {
            float v = gates[row * 4 * n + j] + by_state(h_before, weight, of, j);
            v = j / n == 2 ? tanh_(v) : sigmoid_(v);
            gates[row * 4 * n + j] = v;
            active[j] = v;
        }
        __syncthreads();
        for (u32 k = threadIdx.x; k < n; k += blockDim.x) {
            float i = active[k], f = active[n + k], g = active[2 * n + k], o = active[3 * n + k];
            float cell = f * masked(kept, c_before[k]) + i * g, out = o * tanh_(cell);
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
    states_before(Span<const float> h, Span<const float> keep, Span<const float> state,
                  Span<float> to, Shape of) {
    locate(h, keep, state, to);
    i64 i = first();
    if (i >= to.len) return;
    i64 row = i / of.hidden;
    At at = {row / of.sequences, (u32)(row % of.sequences), (u32)(i % of.hidden)};
    to[i] = masked(keep[row], earlier(of, state, h, 0, at));
}

struct Saved {
    Span<const float> keep;
    Span<const float> state;
    Span<const float> c;
    Span<const float> gates;
    Span<const float> dh;
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

// A sequence backward. A block a sequence; shared memory for [dh, dc, dgates], [6][H].
extern "C" __global__ void __launch_bounds__(1024)
    backward(Span<const float> keep, Span<const float> state, Span<const float> weight,
             Span<const float> c, Span<const float> gates, Span<const float> dh,
             Span<float> dgates, Span<float> dstate, Shape of) {
    locate(keep, state, weight, c, gates, dh, dgates, dstate);
    extern __shared__ float shared[];
    Saved saved = {keep, state, c, gates, dh};
    u32 n = of.hidden, sequence = blockIdx.x, lane = threadIdx.x % 32;
    float *dh_next = shared, *dc = shared + n, *d = shared + 2 * n;
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
            float sum = 0.0f;
            for (u32 j = lane; j < 4 * n; j += 32) {
                sum = fmaf(d[j], weight[(i64)k * of.pitch + j], sum);
            }
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
