// Blends of a module and its host (kernels/blend.rs): h host, m module, x the module's input, a
// alpha. One thread per element, unless stated otherwise.
#include "value.cuh"

const u32 ADD = 0, MULTIPLY = 1, GATE = 2;
const u32 THREADS = 256;

struct Mix {
    u32 mode;
    Divisor each;    // elements of a sample
    u32 accumulate;  // bits: gradient of h, m, x, gate
};

// The weight of m against h: alpha, times the sample's gate if there is one.
__device__ __forceinline__ float weight(Span<const Value> gate, float a, i64 i, const Mix& of) {
    if (of.mode != GATE) return a;
    u32 rest, sample = of.each.divide((u32)i, rest);
    return a * gate[sample];
}

// With an alpha of zero the result is h, for any value of the other operands.
extern "C" __global__ void __launch_bounds__(256)
    blend_forward(Span<const Value> h, Span<const Value> m, Span<const Value> x,
                  Span<const Value> gate, Span<const float> alpha, Span<Value> y, Mix of) {
    locate(h, m, x, gate, alpha, y);
    i64 i = first();
    if (i >= y.len) return;
    float a = alpha[0], host = h[i];
    if (a == 0.0f) {
        y[i] = host;
    } else if (of.mode == MULTIPLY) {
        y[i] = host * (1.0f + a * tanh_(m[i] - x[i]));
    } else {
        y[i] = host + weight(gate, a, i, of) * (m[i] - host);
    }
}

// All gradients but the gate's.
extern "C" __global__ void __launch_bounds__(256)
    blend_gradient(Span<const Value> h, Span<const Value> m, Span<const Value> x,
                   Span<const Value> gate, Span<const float> alpha, Span<const Value> dy,
                   Span<Value> dh, Span<Value> dm, Span<Value> dx, Mix of) {
    locate(h, m, x, gate, alpha, dy, dh, dm, dx);
    i64 i = first();
    if (i >= dy.len) return;
    float a = alpha[0], d = dy[i], to_h, to_m, to_x = 0.0f;
    if (of.mode == MULTIPLY) {
        float t = tanh_(m[i] - x[i]);
        to_h = d * (1.0f + a * t);
        to_m = d * h[i] * a * (1.0f - t * t);
        to_x = -to_m;
    } else {
        float w = weight(gate, a, i, of);
        to_h = (1.0f - w) * d;
        to_m = w * d;
    }
    if (dh.len > 0) put(dh[i], to_h, of.accumulate & 1);
    if (dm.len > 0) put(dm[i], to_m, of.accumulate & 2);
    if (dx.len > 0) put(dx[i], to_x, of.accumulate & 4);
}

// dgate = a·Σ dy·(m - h), in f64; a block for a sample.
extern "C" __global__ void __launch_bounds__(256)
    gate_gradient(Span<const Value> h, Span<const Value> m, Span<const float> alpha,
                  Span<const Value> dy, Span<Value> dgate, Mix of) {
    locate(h, m, alpha, dy, dgate);
    __shared__ double part[THREADS];
    if (dgate.len == 0) return;
    i64 sample = (i64)blockIdx.x * of.each.by;
    double sum = 0.0;
#pragma unroll 4
    for (u32 k = threadIdx.x; k < of.each.by; k += blockDim.x) {
        i64 i = sample + k;
        sum += (double)(dy[i] * (m[i] - h[i]));
    }
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) {
        put(dgate[blockIdx.x], (float)((double)alpha[0] * sum), of.accumulate & 8);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    tanh_mix(Span<const Value> x, Span<const Value> y, Span<const float> s, Span<Value> out) {
    locate(x, y, s, out);
    i64 i = first();
    if (i < out.len) out[i] = x[i] + tanh_(s[0]) * (y[i] - x[i]);
}

struct Chunks {
    u32 chunk;       // elements of a block
    u32 accumulate;  // bits: gradient of x, y
};

// dx and dy, and a block's part of Σ dout·(y - x).
extern "C" __global__ void __launch_bounds__(256)
    tanh_mix_gradient(Span<const Value> x, Span<const Value> y, Span<const float> s,
                      Span<const Value> dout, Span<Value> dx, Span<Value> dy, Span<double> partial,
                      Chunks of) {
    locate(x, y, s, dout, dx, dy, partial);
    __shared__ double part[THREADS];
    float t = tanh_(s[0]);
    i64 begin = (i64)blockIdx.x * of.chunk, left = dout.len - begin;
    u32 count = left < of.chunk ? (u32)left : of.chunk;
    double sum = 0.0;
    for (u32 k = threadIdx.x; k < count; k += blockDim.x) {
        i64 i = begin + k;
        float d = dout[i];
        sum += (double)(d * (y[i] - x[i]));
        if (dx.len > 0) put(dx[i], (1.0f - t) * d, of.accumulate & 1);
        if (dy.len > 0) put(dy[i], t * d, of.accumulate & 2);
    }
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// ds += (1 - tanh²)·Σ; one block, which adds the parts.
extern "C" __global__ void __launch_bounds__(256)
    tanh_mix_scalar(Span<const double> partial, Span<const float> s, Span<float> ds) {
    locate(partial, s, ds);
    __shared__ double part[THREADS];
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < partial.len; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum, part);
    float t = tanh_(s[0]);
    if (threadIdx.x == 0) ds[0] += (float)((double)(1.0f - t * t) * sum);
}
