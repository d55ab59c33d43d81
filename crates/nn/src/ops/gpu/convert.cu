// Conversions between values in memory and f32: inputs, outputs, and the gradients of outputs. One
// thread per element.
#include "value.cuh"

extern "C" __global__ void __launch_bounds__(256)
    narrow(Span<const float> x, Span<Value> y) {
    locate(x, y);
    i64 i = first();
    if (i < y.len) y[i] = x[i];
}

extern "C" __global__ void __launch_bounds__(256)
    widen(Span<const Value> x, Span<float> y) {
    locate(x, y);
    i64 i = first();
    if (i < y.len) y[i] = x[i];
}
