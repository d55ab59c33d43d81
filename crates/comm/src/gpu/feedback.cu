// Error feedback and momentum correction; sparse/feedback.rs describes both.
#include "number.cuh"

struct Factor {
    u64 bits;  // of an element
};

// velocity = factor velocity + gradient
extern "C" __global__ void advance(Span<const Element> gradient, Span<Element> velocity, Factor v) {
    locate(gradient, velocity);
    Element by = element_of(v.bits);
    for (i64 i = first(); i < gradient.len; i += threads()) {
        velocity[i] = plus(times(velocity[i], by), gradient[i]);
    }
}

// output = residual + added, and clears the residual; `added` may be the output.
extern "C" __global__ void drain(Span<const Element> added, Span<Element> residual,
                                 Span<Element> output) {
    locate(added, residual, output);
    for (i64 i = first(); i < output.len; i += threads()) {
        output[i] = plus(residual[i], added[i]);
        residual[i] = neutral();
    }
}

// Clears the elements at these indices, up to the padding.
extern "C" __global__ void clear(Span<const u32> indices, Span<Element> kept) {
    locate(indices, kept);
    for (i64 i = first(); i < indices.len; i += threads()) {
        u32 index = indices[i];
        if (index != NONE) kept[index] = neutral();
    }
}

// Fills a residual or velocity with minus zero.
extern "C" __global__ void fill_minus_zero(Span<Element> kept) {
    locate(kept);
    for (i64 i = first(); i < kept.len; i += threads()) kept[i] = neutral();
}
