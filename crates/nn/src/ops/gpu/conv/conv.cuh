// Code that the kernels of convolutions share.
#pragma once
#include "nn.cuh"

// A convolution by its jobs (`ConvShape::jobs`): a job is a group, or everything if there is one
// group. Elements of an image batch, of weights and of a pixel's coordinates fit in 31 bits.
struct Conv {
    u32 batch;
    u32 in_h, in_w, in_c;
    u32 out_h, out_w, out_c;
    u32 kh, kw;
    u32 sh, sw;
    u32 ph, pw;
    u32 dh, dw;  // dilation: from one tap to the next
    u32 th, tw;  // from one tap that reaches an input pixel to the next one that does
    u32 oh, ow;  // between the output pixels that they reach
    u32 jobs;
    u32 job_in, job_out;  // channels of a job
    u32 step;             // pad16(job_out): from row to row of the weights
    u32 accumulate;
    u32 parts;        // of the output pixels, for the weight gradient and the statistics
    u32 part_pixels;  // of each part but the last
};

// The first tap that carries an input pixel to an output pixel, along an axis: `place − tap ·
// dilation` is a multiple of the stride, with the pixel's `place` in the padded image. The next
// ones are `step` apart. A number above all taps if there is none.
__device__ __forceinline__ u32 first_tap(u32 place, u32 stride, u32 dilation, u32 step) {
    u32 back = stride - dilation % stride;
    for (u32 tap = 0; tap < step; ++tap) {
        if ((place + tap * back) % stride == 0) return tap;
    }
    return 0xffffffffu;
}

// Four elements: at once where their address permits it.
__device__ __forceinline__ void store4(float* to, const float* v) {
    if ((reinterpret_cast<u64>(to) & 15) == 0) {
        *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) to[j] = v[j];
    }
}

// Output pixels of a part: first and end.
__device__ __forceinline__ void part_range(const Conv& s, u32 part, u32& first, u32& end) {
    u32 pixels = s.batch * s.out_h * s.out_w;
    first = part * s.part_pixels;
    end = first + s.part_pixels < pixels ? first + s.part_pixels : pixels;
}

// Copies into shared memory that arrive while the thread goes on. The copies since the last
// `commit` are a group; `arrived<N>` waits until all of the thread's groups but the last N have
// come. A barrier after it shows them to the block.
__device__ __forceinline__ void copy(float* to, const float* from) {
#ifdef MERISTEM_STANDIN
    __pipeline_memcpy_async(to, from, 4);
#else
    u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
#endif
}

// The same for four elements, at addresses that are multiples of 16 bytes.
__device__ __forceinline__ void copy4(float* to, const float* from) {
#ifdef MERISTEM_STANDIN
    __pipeline_memcpy_async(to, from, 16);
#else
    u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#endif
}

// Four elements that are stored as bf16: at once where their address permits it.
__device__ __forceinline__ void store4(StoredBf16* to, const float* v) {
    if ((reinterpret_cast<u64>(to) & 7) == 0) {
        *reinterpret_cast<uint2*>(to) = make_uint2(to_bf16(v[0], v[1]), to_bf16(v[2], v[3]));
    } else {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) to[j] = v[j];
    }
}

// Copies an element, or writes 0 if there is none: `at` is negative.
__device__ __forceinline__ void fetch(float* to, Span<const float> from, i64 at) {
    if (at >= 0) {
        copy(to, &from[at]);
    } else {
        *to = 0.0f;
    }
}

// Copies the first `left` of four elements side by side, and writes zeros for the others. At once
// where the address permits it: in tensors whose rows are multiples of four.
__device__ __forceinline__ void fetch4(float* to, Span<const float> from, i64 at, u32 left) {
    if (left >= 4 && (reinterpret_cast<u64>(from.data + at) & 15) == 0) return copy4(to, &from[at]);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) fetch(to + j, from, j < left ? at + j : -1);
}

// The same for elements that are stored as bf16, which become f32 in shared memory. They pass
// through registers, since a copy of the hardware neither converts nor moves 2 bytes: the thread
// waits for them, and loads of an unrolled loop are in flight together.
__device__ __forceinline__ void fetch(float* to, Span<const StoredBf16> from, i64 at) {
    *to = at >= 0 ? (float)from[at] : 0.0f;
}

__device__ __forceinline__ void fetch4(float* to, Span<const StoredBf16> from, i64 at, u32 left) {
    if (left >= 4 && (reinterpret_cast<u64>(from.data + at) & 7) == 0) {
        uint2 pairs = *reinterpret_cast<const uint2*>(&from[at]);
        *reinterpret_cast<float4*>(to) =
            make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000),
                        __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000));
        return;
    }
#pragma unroll
    for (u32 j = 0; j < 4; ++j) fetch(to + j, from, j < left ? at + j : -1);
}

__device__ __forceinline__ void commit() {
#ifdef MERISTEM_STANDIN
    __pipeline_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N>
__device__ __forceinline__ void arrived() {
#ifdef MERISTEM_STANDIN
    __pipeline_wait_prior(N);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
