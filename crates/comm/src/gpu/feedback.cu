// Error feedback and momentum correction, as sparse/feedback.rs.
#include "comm.cuh"

struct Factor {
    u64 bits;  // of a number of the type
};

// velocity = factor velocity + gradient
template <class T>
__device__ __forceinline__ void advance(const Span<const T>& gradient, const Span<T>& velocity, u64 factor) {
    T by = Number<T>::from_bits(factor);
    for (i64 i = first(); i < gradient.len; i += threads()) {
        velocity[i] = plus(times(velocity[i], by), gradient[i]);
    }
}

extern "C" __global__ void advance_f32(Span<const float> gradient, Span<float> velocity, Factor v) {
    locate(gradient, velocity);
    advance(gradient, velocity, v.bits);
}
extern "C" __global__ void advance_f64(Span<const double> gradient, Span<double> velocity, Factor v) {
    locate(gradient, velocity);
    advance(gradient, velocity, v.bits);
}
extern "C" __global__ void advance_bf16(Span<const bf16> gradient, Span<bf16> velocity, Factor v) {
    locate(gradient, velocity);
    advance(gradient, velocity, v.bits);
}

// output = residual + added, and the residual is cleared; `added` may be the output.
template <class T>
__device__ __forceinline__ void drain(const Span<const T>& added, const Span<T>& residual, const Span<T>& output) {
    for (i64 i = first(); i < output.len; i += threads()) {
        output[i] = plus(residual[i], added[i]);
        residual[i] = Number<T>::neutral();
    }
}

extern "C" __global__ void drain_f32(Span<const float> added, Span<float> residual, Span<float> output) {
    locate(added, residual, output);
    drain(added, residual, output);
}
extern "C" __global__ void drain_f64(Span<const double> added, Span<double> residual,
                                     Span<double> output) {
    locate(added, residual, output);
    drain(added, residual, output);
}
extern "C" __global__ void drain_bf16(Span<const bf16> added, Span<bf16> residual, Span<bf16> output) {
    locate(added, residual, output);
    drain(added, residual, output);
}

// Clears the elements at these indices, up to the padding.
template <class T>
__device__ __forceinline__ void clear(const Span<const u32>& indices, const Span<T>& kept) {
    for (i64 i = first(); i < indices.len; i += threads()) {
        u32 index = indices[i];
        if (index != NONE) kept[index] = Number<T>::neutral();
    }
}

extern "C" __global__ void clear_f32(Span<const u32> indices, Span<float> kept) {
    locate(indices, kept);
    clear(indices, kept);
}
extern "C" __global__ void clear_f64(Span<const u32> indices, Span<double> kept) {
    locate(indices, kept);
    clear(indices, kept);
}
extern "C" __global__ void clear_bf16(Span<const u32> indices, Span<bf16> kept) {
    locate(indices, kept);
    clear(indices, kept);
}

// Nothing kept: minus zero everywhere.
template <class T>
__device__ __forceinline__ void nothing(const Span<T>& kept) {
    for (i64 i = first(); i < kept.len; i += threads()) kept[i] = Number<T>::neutral();
}

extern "C" __global__ void nothing_f32(Span<float> kept) {
    locate(kept);
    nothing(kept);
}
extern "C" __global__ void nothing_f64(Span<double> kept) {
    locate(kept);
    nothing(kept);
}
extern "C" __global__ void nothing_bf16(Span<bf16> kept) {
    locate(kept);
    nothing(kept);
}
