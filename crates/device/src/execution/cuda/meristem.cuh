// Header of every kernel source.
//
// A tensor comes as a span: its first element and its number of elements. An index out of bounds is
// undefined on a GPU; with MERISTEM_CHECKED it is a device fault.
//
// A call may run for several members at once, such as networks of one plan. blockIdx.y is the
// number of the member. A span then has a row of addresses, one for each member, and `data` is the
// offset of its first element from these addresses. So a kernel begins with `locate` of all its
// spans.
#pragma once

template <class T>
struct Span {
    T* data;
    long long len;
    const unsigned long long* row;  // null: `data` is the address

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

// The first element of a span for this block's member, as an address in global memory. Without the
// conversion the compiler could not know that a sum of addresses, or a choice between two, is in
// global memory. It would emit generic loads and stores, which might access shared memory, and
// therefore keep their order, with one load in flight at a time.
template <class T>
__device__ __forceinline__ T* located(const Span<T>& span) {
    unsigned long long address = (unsigned long long)span.data;
    if (span.row) address += span.row[blockIdx.y];
    return reinterpret_cast<T*>(__cvta_global_to_generic(address));
}

// Replaces spans by the spans of this block's member.
template <class... Spans>
__device__ __forceinline__ void locate(Spans&... spans) {
    ((spans.data = located(spans)), ...);
}
