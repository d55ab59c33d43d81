// The gather on a GPU: select, augment and normalise in one pass (D2, D8). One block makes one
// image. The bits are those of kernel.rs.
#include "meristem.cuh"

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// A float of 16 bits.
struct Half {
    unsigned short bits;
};

// As `GpuValues` in gpu.rs.
struct Values {
    u64 seed;
    float scale[4];
    float shift[4];
    u32 channels;  // 1 to 4, or any number for kernels with a table of constants
    u32 height;
    u32 width;
    u32 padding;
    u32 flip;
    u32 cutout;
    u32 staged;  // whether `images` holds the images of this batch only
    u32 target_width;  // targets of a sample
};

struct Words {
    u32 w[4];
};

// Philox4x32 with 10 rounds, as crates/device/src/ground/random.rs.
__device__ Words philox(u32 k0, u32 k1, u32 c0, u32 c1, u32 c2, u32 c3) {
    for (int round = 0; round < 10; round++) {
        u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(b >> 32) ^ c1 ^ k0;
        c1 = (u32)b;
        c2 = (u32)(a >> 32) ^ c3 ^ k1;
        c3 = (u32)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Words{{c0, c1, c2, c3}};
}

// The augmentation of one image, as `AugmentDraw` in augment.rs.
struct Draw {
    int top, left, flip;
    int cut_top, cut_bottom, cut_left, cut_right;
};

__device__ int place(u32 word, u32 n) {
    return (int)(((u64)word * n) >> 32);
}

__device__ Draw draw(const Values& v, Span<const u32> epoch, u32 sample) {
    const u32 augment[2] = {0, 3};  // Purpose::Augment
    Words key =
        philox((u32)v.seed, (u32)(v.seed >> 32), augment[0], augment[1], epoch[0], epoch[1]);
    Words a = philox(key.w[0], key.w[1], 0, 0, sample, 0);
    Words b = philox(key.w[0], key.w[1], 1, 0, sample, 0);
    int span = 2 * (int)v.padding + 1, side = (int)v.cutout;
    Draw d;
    d.top = place(a.w[0], span) - (int)v.padding;
    d.left = place(a.w[1], span) - (int)v.padding;
    d.flip = v.flip && (a.w[2] >> 31);
    d.cut_top = side ? place(a.w[3], v.height) - side / 2 : 0;
    d.cut_left = side ? place(b.w[0], v.width) - side / 2 : 0;
    d.cut_bottom = d.cut_top + side;
    d.cut_right = d.cut_left + side;
    return d;
}

// Bytes are normalised here; the floats of `gather_normalized` were normalised when they were
// stored. Black is byte 0, whose normalised value is the shift. If the shift is −0, a byte gives
// 0, and among floats black is −0, as on the CPU.
__device__ float normalized(u8 stored, float scale, float shift) {
    return (float)stored * scale + shift;
}
__device__ float normalized(float stored, float, float) {
    return stored;
}

__device__ float black(u8, float scale, float shift) {
    return normalized((u8)0, scale, shift);
}
__device__ float black(float, float, float shift) {
    return shift;
}

// The constants of C channels, which are among the kernel's values.
template <int C, class T>
struct Few {
    const Values& v;

    __device__ int channels() const { return C; }
    __device__ float normal(T stored, u32 c) const {
        return normalized(stored, v.scale[c], v.shift[c]);
    }
    __device__ float background(u32 c) const { return black(T(), v.scale[c], v.shift[c]); }
};

// The number that is stored.
template <class T>
__device__ float number(T stored) {
    return (float)stored;
}
// As `f16::value` in crates/data/src/shape.rs: finite numbers only.
__device__ float number(Half stored) {
    u32 sign = (u32)(stored.bits & 0x8000u) << 16, rest = (u32)(stored.bits & 0x7fffu) << 13;
    float value = __uint_as_float(rest) * __uint_as_float((112u + 127u) << 23);
    return __uint_as_float(__float_as_uint(value) | sign);
}

// The constants of any number of channels, in a tensor: scales, then shifts.
template <class T>
struct Many {
    Span<const float> table;
    int count;

    __device__ int channels() const { return count; }
    __device__ float normal(T stored, u32 c) const {
        return number(stored) * table[c] + table[count + c];
    }
    __device__ float background(u32 c) const { return normal(T(), c); }
};

// The class of sample i of the batch, by one thread of the block; other targets are copied by all
// threads of the block.
__device__ __forceinline__ void copy_class(Span<const u32> all_targets, Span<u32> targets, u32 i,
                                           u32 sample) {
    targets[i] = all_targets[sample];
}
__device__ __forceinline__ void copy_class(Span<const float>, Span<float>, u32, u32) {}

__device__ __forceinline__ void copy_values(Span<const u32>, Span<u32>, u32, u32, u32) {}
__device__ __forceinline__ void copy_values(Span<const float> all_targets, Span<float> targets,
                                            u32 i, u32 sample, u32 width) {
    for (u32 k = threadIdx.x; k < width; k += blockDim.x) {
        targets[(long long)i * width + k] = all_targets[(long long)sample * width + k];
    }
}

// Y is the type of the targets: u32 for classes, float for labels and numbers. `all_targets` has
// the targets of the whole dataset, `targets` the targets of the batch, `indices` its samples.
template <class T, class Y, class Constants>
__device__ void gather(Span<const T> images, Span<const Y> all_targets, Span<const u32> indices,
                       Span<float> inputs, Span<Y> targets, Span<const u32> epoch,
                       const Values& v, const Constants& of) {
    __shared__ Draw shared;
    u32 i = blockIdx.x, sample = indices[i];
    bool augmented = v.padding || v.flip || v.cutout;
    if (threadIdx.x == 0) {
        copy_class(all_targets, targets, i, sample);
        if (augmented) shared = draw(v, epoch, sample);
    }
    copy_values(all_targets, targets, i, sample, v.target_width);
    __syncthreads();
    const int C = of.channels();
    u32 size = v.height * v.width * C;
    long long from = (long long)(v.staged ? i : sample) * size, to = (long long)i * size;
    if (!augmented) {
#pragma unroll 4
        for (u32 n = threadIdx.x; n < size; n += blockDim.x) {
            inputs[to + n] = of.normal(images[from + n], n % C);
        }
        return;
    }
    Draw d = shared;
    int height = (int)v.height, width = (int)v.width, row = width * C;
    int lanes = 32, warp = threadIdx.x / lanes, warps = blockDim.x / lanes;
    for (int y = warp; y < height; y += warps) {
        int source_y = y + d.top;
        bool row_inside = 0 <= source_y && source_y < height;
#pragma unroll 4
        for (int n = threadIdx.x % lanes; n < row; n += lanes) {
            int x = n / C, c = n % C;
            int source_x = (d.flip ? width - 1 - x : x) + d.left;
            float value = of.background(c);
            if (row_inside && 0 <= source_x && source_x < width) {
                long long pixel = from + (long long)source_y * row + source_x * C + c;
                value = of.normal(images[pixel], c);
            }
            bool cut = d.cut_top <= y && y < d.cut_bottom && d.cut_left <= x && x < d.cut_right;
            inputs[to + (long long)y * row + n] = cut ? 0.0f : value;
        }
    }
}

// Samples of 1 to 4 channels, with their constants among the kernel's values.
template <class T, class Y>
__device__ void gather_few_channels(Span<const T> images, Span<const Y> all_targets,
                                    Span<const u32> indices, Span<float> inputs, Span<Y> targets,
                                    Span<const u32> epoch, const Values& v) {
    switch (v.channels) {
        case 1:
            return gather(images, all_targets, indices, inputs, targets, epoch, v, Few<1, T>{v});
        case 2:
            return gather(images, all_targets, indices, inputs, targets, epoch, v, Few<2, T>{v});
        case 3:
            return gather(images, all_targets, indices, inputs, targets, epoch, v, Few<3, T>{v});
        default:
            return gather(images, all_targets, indices, inputs, targets, epoch, v, Few<4, T>{v});
    }
}

// Targets that are classes. Floats are normalised already (`StoredValues::Normalized`).
extern "C" __global__ void __launch_bounds__(256, 4)
    gather_bytes(Span<const u8> images, Span<const u32> all_targets, Span<const u32> indices,
                 Span<float> inputs, Span<u32> targets, Span<const u32> epoch,
                 const __grid_constant__ Values values) {
    locate(images, all_targets, indices, inputs, targets, epoch);
    gather_few_channels(images, all_targets, indices, inputs, targets, epoch, values);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    gather_normalized(Span<const float> images, Span<const u32> all_targets,
                      Span<const u32> indices, Span<float> inputs, Span<u32> targets,
                      Span<const u32> epoch, const __grid_constant__ Values values) {
    locate(images, all_targets, indices, inputs, targets, epoch);
    gather_few_channels(images, all_targets, indices, inputs, targets, epoch, values);
}

// Targets that are labels or numbers.
extern "C" __global__ void __launch_bounds__(256, 4)
    gather_bytes_to_values(Span<const u8> images, Span<const float> all_targets,
                           Span<const u32> indices, Span<float> inputs, Span<float> targets,
                           Span<const u32> epoch, const __grid_constant__ Values values) {
    locate(images, all_targets, indices, inputs, targets, epoch);
    gather_few_channels(images, all_targets, indices, inputs, targets, epoch, values);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    gather_normalized_to_values(Span<const float> images, Span<const float> all_targets,
                                Span<const u32> indices, Span<float> inputs, Span<float> targets,
                                Span<const u32> epoch, const __grid_constant__ Values values) {
    locate(images, all_targets, indices, inputs, targets, epoch);
    gather_few_channels(images, all_targets, indices, inputs, targets, epoch, values);
}

// Samples with a table of constants: of type T, with targets of type Y.
#define GATHER_BY_TABLE(entry, T, Y)                                                            \
    extern "C" __global__ void __launch_bounds__(256, 4)                                        \
        entry(Span<const T> images, Span<const Y> all_targets, Span<const u32> indices,         \
              Span<float> inputs, Span<Y> targets, Span<const u32> epoch,                       \
              Span<const float> constants, const __grid_constant__ Values values) {             \
        locate(images, all_targets, indices, inputs, targets, epoch, constants);                \
        Many<T> of{constants, (int)values.channels};                                            \
        gather(images, all_targets, indices, inputs, targets, epoch, values, of);               \
    }

GATHER_BY_TABLE(gather_many_bytes, u8, u32)
GATHER_BY_TABLE(gather_integers, short, u32)
GATHER_BY_TABLE(gather_halves, Half, u32)
GATHER_BY_TABLE(gather_floats, float, u32)
GATHER_BY_TABLE(gather_many_bytes_to_values, u8, float)
GATHER_BY_TABLE(gather_integers_to_values, short, float)
GATHER_BY_TABLE(gather_halves_to_values, Half, float)
GATHER_BY_TABLE(gather_floats_to_values, float, float)
