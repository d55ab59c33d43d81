// Dropout (kernels/dropout.rs), with its bits. The numbers of a layer: threshold, scale, two words
// of the key, number of the first sample.
#include "philox.cuh"
#include "value.cuh"

struct Drawn {
    u32 each;  // elements of a sample
};

// A thread has one block of the generator, which is 4 elements with a distance of 16.
extern "C" __global__ void __launch_bounds__(256)
    draw_mask(Span<const double> numbers, Span<const i64> batches, Span<u8> mask, Drawn d) {
    locate(numbers, batches, mask);
    u64 start = (u64)numbers[4] * d.each, batch = (u64)batches[0];
    u64 block = start / 64 * 16 + (u64)first();
    Word4 words = philox((u32)numbers[2], (u32)numbers[3],
                         {{(u32)block, (u32)(block >> 32), (u32)batch, (u32)(batch >> 32)}});
    u32 threshold = (u32)numbers[0];
    u64 number = block / 16 * 64 + block % 16;
    for (u32 word = 0; word < 4; ++word, number += 16) {
        // Numbers before the first wrap around, beyond the length.
        u64 i = number - start;
        if (i < (u64)mask.len) mask[(i64)i] = words.x[word] >= threshold;
    }
}

struct Applied {
    u32 accumulate;
};

extern "C" __global__ void __launch_bounds__(256)
    apply_mask(Span<const Value> x, Span<const u8> mask, Span<const double> numbers, Span<Value> y,
               Applied a) {
    locate(x, mask, numbers, y);
    i64 i = first();
    if (i >= y.len) return;
    put(y[i], mask[i] == 0 ? 0.0f : x[i] * (float)numbers[1], a.accumulate);
}

extern "C" __global__ void __launch_bounds__(256)
    count_batch(Span<i64> batches) {
    locate(batches);
    if (first() == 0) batches[0] += 1;
}
