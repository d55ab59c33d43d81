// Kernels of tests of mma.cuh.
#include "mma.cuh"

// d = a · b of whole matrices, row by row: 16 × K and K × 8.
template <class P>
__device__ void product(Span<const float> a, Span<const float> b, Span<float> d) {
    constexpr u32 K = 8 * P::EACH;
    u32 row = threadIdx.x / 4, at = threadIdx.x % 4;
    u32 fa[4], fb[2];
    for (u32 i = 0; i < 4; ++i) {
        float v[P::EACH];
        for (u32 k = 0; k < P::EACH; ++k) {
            v[k] = a[(row + i % 2 * 8) * K + (at + i / 2 * 4) * P::EACH + k];
        }
        fa[i] = P::word(v);
    }
    for (u32 i = 0; i < 2; ++i) {
        float v[P::EACH];
        for (u32 k = 0; k < P::EACH; ++k) v[k] = b[((at + 4 * i) * P::EACH + k) * 8 + row];
        fb[i] = P::word(v);
    }
    float sum[4] = {};
    P::multiply(sum, fa, fb);
    for (u32 i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 8 + 2 * at + i % 2] = sum[i];
}

extern "C" __global__ void product_tf32(Span<const float> a, Span<const float> b, Span<float> d) {
    locate(a, b, d);
    product<Tf32>(a, b, d);
}

extern "C" __global__ void product_bf16(Span<const float> a, Span<const float> b, Span<float> d) {
    locate(a, b, d);
    product<Bf16>(a, b, d);
}

// Every value as a factor of TF32, of bf16, and as the low half and the high half of a word.
extern "C" __global__ void rounded(Span<const float> x, Span<float> tf32, Span<float> bf16,
                                   Span<u32> words) {
    locate(x, tf32, bf16, words);
    for (i64 i = first(); i < x.len; i += threads()) {
        tf32[i] = Tf32::round(x[i]);
        bf16[i] = Bf16::round(x[i]);
        words[i] = to_bf16(x[i], x[x.len - 1 - i]);
    }
}
