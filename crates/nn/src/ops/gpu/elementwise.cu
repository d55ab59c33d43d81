// Element by element, and per channel (kernels/elementwise.rs). One thread an element unless said.
#include "nn.cuh"

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
    pass(Span<const float> x, Span<float> y, Options o) {
    locate(x, y);
    i64 i = first();
    if (i < y.len) put(y[i], x[i], o.accumulate);
}

// NaN stays NaN.
extern "C" __global__ void __launch_bounds__(256)
    forward(Span<const float> x, Span<float> y, Options o) {
    locate(x, y);
    i64 i = first();
    if (i >= y.len) return;
    float v = x[i];
    y[i] = o.function == 0 ? (v <= 0.0f ? 0.0f : v) : o.function == 1 ? sigmoid_(v) : tanh_(v);
}

extern "C" __global__ void __launch_bounds__(256)
    gradient(Span<const float> y, Span<const float> dy, Span<float> dx, Options o) {
    locate(y, dy, dx);
    i64 i = first();
    if (i >= dx.len) return;
    float v = y[i], d = dy[i];
    float value = o.function == 0   ? (v <= 0.0f ? 0.0f : d)
                  : o.function == 1 ? d * ((1.0f - v) * v)
                                    : d * (1.0f - v * v);
    put(dx[i], value, o.accumulate);
}

extern "C" __global__ void __launch_bounds__(256)
    add(Span<const float> a, Span<const float> b, Span<float> y) {
    locate(a, b, y);
    i64 i = first();
    if (i < y.len) y[i] = a[i] + b[i];
}

extern "C" __global__ void __launch_bounds__(256)
    product(Span<const float> a, Span<const float> b, Span<float> y, Options o) {
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
    scale(Span<const float> x, Span<const float> scale, Span<float> y, Channels of) {
    locate(x, scale, y);
    u32 i = (u32)first();
    if (i >= y.len) return;
    u32 c, pixel, sample = of.pixels.divide(of.c.divide(i, c), pixel);
    put(y[i], of.factor * x[i] * scale[(i64)sample * of.c.by + c], of.accumulate);
}

// dscale[n][c] = factor · Σ over pixels of dy · x, in f64.
extern "C" __global__ void __launch_bounds__(256)
    scale_gradient(Span<const float> x, Span<const float> dy, Span<float> dscale, Channels of) {
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
