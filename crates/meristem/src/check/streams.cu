// Kernels of the stream checks of `meristem check`: a logistic map, and sums of its curve.
#include "meristem.cuh"

// y = x (1 - x). One thread per element.
extern "C" __global__ void __launch_bounds__(256) curve(Span<const float> x, Span<float> y) {
    locate(x, y);
    long long i = first();
    if (i < y.len) y[i] = x[i] * (1.0f - x[i]);
}

// Adds the sum of all elements, in order. One thread: the elements are few.
extern "C" __global__ void __launch_bounds__(32) sum(Span<const float> x, Span<double> total) {
    locate(x, total);
    if (first() != 0) return;
    float sum = 0.0f;
    for (long long i = 0; i < x.len; i++) sum += x[i];
    total[0] += (double)sum;
}

// x = 3.7 y + 0.01. One thread per element.
extern "C" __global__ void __launch_bounds__(256) update(Span<const float> y, Span<float> x) {
    locate(y, x);
    long long i = first();
    if (i < x.len) x[i] = 3.7f * y[i] + 0.01f;
}
