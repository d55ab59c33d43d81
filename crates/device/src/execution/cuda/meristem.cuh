// Header of every kernel source.
//
// A tensor comes as a span: its first element and its number of elements. An index out of bounds is
// undefined on a GPU; with MERISTEM_CHECKED it is a device fault.
#pragma once

template <class T>
struct Span {
    T* data;
    long long len;

    __device__ __forceinline__ T& operator[](long long i) const {
#ifdef MERISTEM_CHECKED
        if (i < 0 || i >= len) __trap();
#endif
        return data[i];
    }
};

// The first element of this thread, and the number of threads, of a loop over all elements:
// for (long long i = first(); i < n; i += threads()) …
__device__ __forceinline__ long long first() {
    return (long long)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ long long threads() {
    return (long long)gridDim.x * blockDim.x;
}
