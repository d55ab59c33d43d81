// Arithmetic of elements, with the bits of number.rs. Sources that include this file are compiled
// for each type; "element.cuh" stands for a file in the folder `element`.
#pragma once
#include "element.cuh"

__device__ __forceinline__ Element zero() {
    return element_of(0);
}
// Minus zero: adding it changes no bit of any number.
__device__ __forceinline__ Element neutral() {
    return element_of(1ull << MAGNITUDE_BITS);
}

__device__ __forceinline__ Element divide(Element x, const Divide& d) {
    if (d.by == 0) return x;
    return d.exact ? times(x, element_of(d.reciprocal)) : divided(x, d.by);
}
