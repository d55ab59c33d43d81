// Operations element by element, and per channel (kernels/elementwise.rs). One thread per element,
// unless stated otherwise.
#include "value.cuh"

struct Constant {
    float value;
};

extern "C" __global__ void __launch_bounds__(256)
    fill(Span<float> y, Constant c) {
    locate(y);
    i64 i = first();
    if (i < y.len) y[i] = c.value;
}

extern "C" __global__ void __launch_bounds__(256)
    multiply(Span<float> y, Constant c) {
    locate(y);
    i64 i = first();
    if (i < y.len) y[i] *= c.value;
}

// The function, and whether its result is added to the output.
struct Options {
    u32 function;  // 0 ReLU, 1 sigmoid, 2 tanh
    u32 accumulate;
};

extern "C" __global__ void __launch_bounds__(256)
    pass(Span<const Value> x, Span<Value> y, Options o) {
    locate(x, y);
    i64 i = first();
    if (i < y.len) put(y[i], x[i], o.accumulate);
}

// NaN stays NaN.
extern "C" __global__ void __launch_bounds__(256)
    forward(Span<const Value> x, Span<Value> y, Options o) {
    locate(x, y);
    i64 i = first();
    if (i >= y.len) return;
    float v = x[i];
    y[i] = o.function == 0 ? (v <= 0.0f ? 0.0f : v) : o.function == 1 ? sigmoid_(v) : tanh_(v);
}

extern "C" __global__ void __launch_bounds__(256)
    gradient(Span<const Value> y, Span<const Value> dy, Span<Value> dx, Options o) {
    locate(y, dy, dx);
    i64 i = first();
    if (i >= dx.len) return;
    float v = y[i], d = dy[i];
    float value = o.function == 0   ? (v <= 0.0f ? 0.0f : d)
                  : o.function == 1 ? d * ((1.0f - v) * v)
                                    : d * (1.0f - v * v);
    put(dx[i], value, o.accumulate);
}

// Functions beyond ReLU, sigmoid and tanh (kernels/functions.rs) have separate kernels, so that the
// kernels of ReLU, sigmoid and tanh need no more registers.
const u32 LEAKY_RELU = 3, ELU = 4, GELU = 5, GELU_TANH = 6, SILU = 7, SOFTPLUS = 8, HARD_SWISH = 9;

struct Function {
    u32 function;
    u32 accumulate;
    float slope;  // of leaky ReLU
};

// e^x - 1 for x <= 0.
__device__ __forceinline__ float exp_m1_(float x) {
    ExpParts e = exp_parts(x < -87.33654f ? -87.33654f : x);
    float scale = power_of_2(e.n);
    return e.m * scale + (scale - 1.0f);
}

// The standard normal distribution at a point, and e^(-x^2/2).
struct Normal {
    float cdf;
    float bell;
};

__device__ __forceinline__ Normal normal(float x) {
    float a = fabsf(x), bell = exp_(-0.5f * (x * x));
    float t = 1.0f / (1.0f + 0.35f * a), u = t - 0.5f;
    float p = -2.9114952e-2f;
    p = p * u + 2.7358316e-2f;
    p = p * u + 4.4168323e-2f;
    p = p * u + -5.6134887e-2f;
    p = p * u + -8.174093e-2f;
    p = p * u + 8.187068e-2f;
    p = p * u + 2.843958e-1f;
    p = p * u + 3.4299162e-1f;
    p = p * u + 2.5324428e-1f;
    float tail = p * t * bell;
    return {x > 0.0f ? 1.0f - tail : tail, bell};
}

// Constants of the approximation of GELU by tanh.
const float INNER = 1.5957692f, CUBIC = 0.071354814f;

extern "C" __global__ void __launch_bounds__(256)
    function(Span<const Value> x, Span<Value> y, Function o) {
    locate(x, y);
    i64 i = first();
    if (i >= y.len) return;
    float v = x[i], value = v;
    switch (o.function) {
        case LEAKY_RELU:
            value = v > 0.0f ? v : o.slope * v;
            break;
        case ELU:
            value = v > 0.0f ? v : exp_m1_(v);
            break;
        case GELU:
            value = v * normal(v).cdf;
            break;
        case GELU_TANH:
            value = v / (1.0f + exp_(-(v * (INNER + CUBIC * (v * v)))));
            break;
        case SILU:
            value = v / (1.0f + exp_(-v));
            break;
        case SOFTPLUS:
            value = (v > 0.0f ? v : 0.0f) + ln_1p_(exp_(-fabsf(v)));
            break;
        case HARD_SWISH: {
            float gate = v + 3.0f;
            gate = gate < 0.0f ? 0.0f : gate;
            value = v * (gate > 6.0f ? 6.0f : gate) / 6.0f;
            break;
        }
    }
    y[i] = value;
}

// From the saved value: x of GELU, SiLU and hard swish, y of the others.
extern "C" __global__ void __launch_bounds__(256)
    function_gradient(Span<const Value> saved, Span<const Value> dy, Span<Value> dx, Function o) {
    locate(saved, dy, dx);
    i64 i = first();
    if (i >= dx.len) return;
    float v = saved[i], slope = 1.0f;
    switch (o.function) {
        case LEAKY_RELU:
            slope = v > 0.0f ? 1.0f : o.slope;
            break;
        case ELU:
            slope = v > 0.0f ? 1.0f : v + 1.0f;
            break;
        case GELU: {
            Normal n = normal(v);
            slope = n.cdf + v * (0.3989423f * n.bell);
            break;
        }
        case GELU_TANH: {
            v = v > 10.0f ? 10.0f : v;
            v = v < -10.0f ? -10.0f : v;
            float square = v * v;
            Sigmoid s = sigmoid_with_slope(v * (INNER + CUBIC * square));
            slope = s.value + v * (s.slope * (INNER + 3.0f * CUBIC * square));
            break;
        }
        case SILU: {
            Sigmoid s = sigmoid_with_slope(v);
            slope = s.value + v * s.slope;
            break;
        }
        case SOFTPLUS:
            slope = -exp_m1_(-v);
            break;
        case HARD_SWISH:
            slope = v / 3.0f + 0.5f;
            slope = v <= -3.0f ? 0.0f : slope;
            slope = v >= 3.0f ? 1.0f : slope;
            break;
    }
    put(dx[i], dy[i] * slope, o.accumulate);
}

extern "C" __global__ void __launch_bounds__(256)
    add(Span<const Value> a, Span<const Value> b, Span<Value> y) {
    locate(a, b, y);
    i64 i = first();
    if (i < y.len) y[i] = a[i] + b[i];
}

extern "C" __global__ void __launch_bounds__(256)
    product(Span<const Value> a, Span<const Value> b, Span<Value> y, Options o) {
    locate(a, b, y);
    i64 i = first();
    if (i < y.len) put(y[i], a[i] * b[i], o.accumulate);
}

// x [N][pixels][C], scale [N][C].
struct Channels {
    Divisor pixels;
    Divisor c;
    u32 columns;
    float factor;
    u32 accumulate;
};

// y = factor · x · scale; the gradient with respect to x is the same with dy in the place of x.
extern "C" __global__ void __launch_bounds__(256)
    scale(Span<const Value> x, Span<const Value> scale, Span<Value> y, Channels of) {
    locate(x, scale, y);
    u32 i = (u32)first();
    if (i >= y.len) return;
    u32 c, pixel, sample = of.pixels.divide(of.c.divide(i, c), pixel);
    put(y[i], of.factor * x[i] * scale[(i64)sample * of.c.by + c], of.accumulate);
}

// dscale[n][c] = factor · Σ over pixels of dy · x, in f64.
extern "C" __global__ void __launch_bounds__(256)
    scale_gradient(Span<const Value> x, Span<const Value> dy, Span<Value> dscale, Channels of) {
    locate(x, dy, dscale);
    __shared__ double part[256];
    OverPixels at(of.columns, of.c.by);
    double sum = 0.0;
    if (at.channel < of.c.by) {
        i64 image = (i64)at.sample * of.pixels.by * of.c.by + at.channel;
#pragma unroll 4
        for (u32 p = at.row; p < of.pixels.by; p += at.rows) {
            i64 i = image + (i64)p * of.c.by;
            sum += (double)(dy[i] * x[i]);
        }
    }
    sum = column_sum(sum, part, of.columns);
    if (at.row > 0 || at.channel >= of.c.by) return;
    float total = (float)((double)of.factor * sum);
    put(dscale[(i64)at.sample * of.c.by + at.channel], total, of.accumulate);
}
