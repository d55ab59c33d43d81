// The classifier after the last fused convolution: batch norm, ReLU and max pooling on load, the
// mean of each channel, and a linear layer. Also the sums of a batch norm's gradient where no fused
// convolution after it has left them.
#include "value.cuh"
#include "fused.cuh"

constexpr u32 THREADS_HERE = 128;

// Blocks of `head_backward` on a multiprocessor: conversions of bf16 need a few registers more.
constexpr u32 BLOCKS = sizeof(Value) == 2 ? 7 : 8;

struct Head {
    Source of;
    u32 batch, classes;
    u32 pixels, across;  // pixels of an image after pooling, and of a row
    u32 columns;         // threads across channels: a power of two, at most 32
    u32 class_columns;   // threads across classes: a power of two, at most 32
    u32 images;          // images of a block
    u32 parts;           // blocks
    u32 affine;          // first float of the norm coefficients, in shared memory
    u32 precision;
};

// This thread's part of the sum of one channel over an image's pixels, which a column of threads
// shares.
template <u32 KIND>
__device__ __forceinline__ double sum_of(const Head& s, Span<const Value> z, const Affine& a,
                                         u32 image, u32 channel) {
    constexpr u32 AT_ONCE = KIND == POOL ? 2 : 4;  // pixels whose loads are in flight together
    double sum = 0.0;
    u32 rows = THREADS_HERE / s.columns;
    for (u32 p = threadIdx.x / s.columns; p < s.pixels; p += AT_ONCE * rows) {
        Raw<KIND> raw[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            // After the last pixel the first of these, which is not added.
            u32 here = p + i * rows < s.pixels ? p + i * rows : p;
            raw[i].load(s.of, z,
                        element<KIND>(s.of, image, here / s.across, here % s.across, channel));
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            if (p + i * rows < s.pixels) sum += (double)raw[i].value(a);
        }
    }
    return sum;
}

// Means of an image's channels, to memory and to shared memory.
__device__ __forceinline__ void load_features(const Head& s, Span<const Value> z,
                                              const float* affine, u32 image, float* to,
                                              Span<float> features) {
    __shared__ double part[THREADS_HERE];
    for (u32 first = 0; first < s.of.c; first += s.columns) {
        u32 channel = first + threadIdx.x % s.columns;
        double sum = 0.0;
        if (channel < s.of.c) {
            Affine a = affine_of(affine, s.of.c, channel);
            sum = s.of.kind == POOL ? sum_of<POOL>(s, z, a, image, channel)
                                    : sum_of<NORM>(s, z, a, image, channel);
        }
        sum = column_sum(sum, part, s.columns);
        if (threadIdx.x >= s.columns || channel >= s.of.c) continue;
        float mean = (float)(sum / (double)s.pixels);
        to[channel] = mean;
        features[(i64)(image * s.of.c + channel)] = mean;
    }
    __syncthreads();
}

// Logits of an image from the means of its channels. Neighbouring threads have neighbouring
// classes, as the weights lie in memory: [channel][class, padded to 16].
__device__ __forceinline__ void write_logits(const Head& s, Span<const float> w,
                                             Span<const float> bias, u32 image, const float* means,
                                             Span<Value> logits) {
    __shared__ float part[THREADS_HERE];
    u32 step = pad16(s.classes), columns = s.class_columns;
    for (u32 first = 0; first < s.classes; first += columns) {
        u32 k = first + threadIdx.x % columns;
        float sum = 0.0f;
        for (u32 c = threadIdx.x / columns; k < s.classes && c < s.of.c;
             c += THREADS_HERE / columns) {
            float weight = factor(s.precision, w[(i64)(c * step + k)]);
            sum = fmaf(factor(s.precision, means[c]), weight, sum);
        }
        sum = column_sum(sum, part, columns);
        if (threadIdx.x >= columns || k >= s.classes) continue;
        logits[(i64)(image * s.classes + k)] = bias.len > 0 ? sum + bias[k] : sum;
    }
}

// A block processes one image at a time. The sums of the logits synchronise its threads after all
// of them have read the means, so that the means of the next image may overwrite them.
extern "C" __global__ void __launch_bounds__(128, 8)
    head_forward(Span<const Value> z, Span<const float> mean, Span<const float> var,
                 Span<const float> gamma, Span<const float> beta, Span<const float> w,
                 Span<const float> bias, Span<float> features, Span<Value> logits, Head s) {
    locate(z, mean, var, gamma, beta, w, bias, features, logits);
    extern __shared__ float shared[];
    load_affine(mean, var, gamma, beta, s.of, shared + s.affine);
    __syncthreads();
    u32 first = blockIdx.x * s.images, end = min(first + s.images, s.batch);
    for (u32 image = first; image < end; ++image) {
        load_features(s, z, shared + s.affine, image, shared, features);
        write_logits(s, w, bias, image, shared, logits);
    }
}

// Gradients of the channels at each pixel of a block's images: the gradient of the mean, divided by
// the number of pixels. Neighbouring threads have neighbouring classes of a channel, and add them
// up.
__device__ __forceinline__ void load_gradients(const Head& s, Span<const float> w,
                                               Span<const Value> dlogits, float* to,
                                               Span<Value> dy) {
    u32 begin = blockIdx.x * s.images, images = min(s.images, s.batch - begin);
    u32 step = pad16(s.classes), lane = threadIdx.x % s.class_columns;
    float share = 1.0f / (float)s.pixels;
    for (u32 image = 0; image < images; ++image) {
        for (u32 first = 0; first < s.of.c; first += THREADS_HERE / s.class_columns) {
            u32 c = first + threadIdx.x / s.class_columns;
            float sum = 0.0f;
            for (u32 k = lane; c < s.of.c && k < s.classes; k += s.class_columns) {
                float d = dlogits[(i64)((begin + image) * s.classes + k)];
                float weight = factor(s.precision, w[(i64)(c * step + k)]);
                sum = fmaf(factor(s.precision, d), weight, sum);
            }
            for (u32 by = s.class_columns / 2; by > 0; by /= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, by);
            }
            if (lane == 0 && c < s.of.c) to[image * s.of.c + c] = as_stored<Value>(sum * share);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < images * s.of.c; i += THREADS_HERE) {
        dy[(i64)(begin * s.of.c + i)] = to[i];
    }
}

// The sums of a channel over the pixels of images [begin, end) that a thread has.
template <u32 KIND, class Incoming>
__device__ __forceinline__ Pair sums_of(const Head& s, Span<const Value> z, const Affine& a,
                                        u32 begin, u32 end, u32 channel, Incoming incoming) {
    constexpr u32 AT_ONCE = KIND == POOL ? 1 : 2;  // more windows at once take too many registers
    Pair sums = {0.0, 0.0};
    u32 rows = THREADS_HERE / s.columns, all = (end - begin) * s.pixels;
    for (u32 first = threadIdx.x / s.columns; first < all; first += AT_ONCE * rows) {
        Raw<KIND> raw[AT_ONCE];
        float d[AT_ONCE];
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k) {
            // After the last pixel the first of these, which is not added.
            u32 i = first + k * rows < all ? first + k * rows : first;
            u32 image = begin + i / s.pixels, p = i % s.pixels;
            d[k] = incoming(image, p, channel);
            raw[k].load(s.of, z, element<KIND>(s.of, image, p / s.across, p % s.across, channel));
        }
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k) {
            if (first + k * rows < all) raw[k].add_gradient(a, d[k], sums);
        }
    }
    return sums;
}

// Leaves a block's sums over its images: `incoming(image, pixel, channel)` is the gradient there.
template <class Incoming>
__device__ __forceinline__ void leave_sums(const Head& s, Span<const Value> z,
                                           const float* affine, Span<double> partial,
                                           Incoming incoming) {
    __shared__ Pair part[THREADS_HERE];
    u32 begin = blockIdx.x * s.images, end = min(begin + s.images, s.batch);
    for (u32 first = 0; first < s.of.c; first += s.columns) {
        u32 channel = first + threadIdx.x % s.columns;
        Pair sums = {0.0, 0.0};
        if (channel < s.of.c) {
            Affine a = affine_of(affine, s.of.c, channel);
            sums = s.of.kind == POOL ? sums_of<POOL>(s, z, a, begin, end, channel, incoming)
                                     : sums_of<NORM>(s, z, a, begin, end, channel, incoming);
        }
        sums = column_sum(sums, part, s.columns);
        if (threadIdx.x >= s.columns || channel >= s.of.c) continue;
        partial[(i64)(2 * blockIdx.x) * s.of.c + channel] = sums.a;
        partial[(i64)(2 * blockIdx.x + 1) * s.of.c + channel] = sums.b;
    }
}

// A block's part of the gradients of the classifier: [block][channel or bias][class].
__device__ __forceinline__ void leave_classifier(const Head& s, Span<const float> features,
                                                 Span<const Value> dlogits,
                                                 Span<float> weights) {
    u32 begin = blockIdx.x * s.images, end = min(begin + s.images, s.batch);
    u32 all = (s.of.c + 1) * s.classes;
    for (u32 i = threadIdx.x; i < all; i += THREADS_HERE) {
        u32 c = i / s.classes, k = i % s.classes;
        float sum = 0.0f;
        for (u32 image = begin; image < end; ++image) {
            float d = dlogits[(i64)(image * s.classes + k)];
            if (c < s.of.c) {
                float f = factor(s.precision, features[(i64)(image * s.of.c + c)]);
                sum = fmaf(f, factor(s.precision, d), sum);
            } else {
                sum += d;
            }
        }
        weights[(i64)blockIdx.x * all + i] = sum;
    }
}

__device__ __forceinline__ void finish_classifier(const Head& s, Span<float> weights,
                                                  Span<float> dw, Span<float> db) {
    u32 all = (s.of.c + 1) * s.classes, step = pad16(s.classes);
    for (u32 i = threadIdx.x; i < all; i += THREADS_HERE) {
        u32 c = i / s.classes, k = i % s.classes;
        double sum = 0.0;
#pragma unroll 8
        for (u32 part = 0; part < s.parts; ++part) {
            sum += (double)__ldcg(&weights[(i64)part * all + i]);
        }
        if (c < s.of.c) {
            dw[(i64)(c * step + k)] += (float)sum;
        } else if (db.len > 0) {
            db[k] += (float)sum;
        }
    }
}

// Gradients of the classifier, of the channels at each pixel, and the sums of the batch norm's.
extern "C" __global__ void __launch_bounds__(128, BLOCKS)
    head_backward(Span<const Value> z, Span<const float> mean, Span<const float> var,
                  Span<const float> gamma, Span<const float> beta, Span<const float> w,
                  Span<const float> features, Span<const Value> dlogits, Span<Value> dy,
                  Span<float> dw, Span<float> db, Span<float> dgamma, Span<float> dbeta,
                  Span<float> coefficients, Span<u32> tickets, Span<double> sums,
                  Span<float> weights, Head s) {
    locate(z, mean, var, gamma, beta, w, features, dlogits, dy, dw, db, dgamma, dbeta,
           coefficients, tickets, sums, weights);
    extern __shared__ float shared[];
    load_affine(mean, var, gamma, beta, s.of, shared + s.affine);
    load_gradients(s, w, dlogits, shared, dy);
    u32 begin = blockIdx.x * s.images;
    leave_sums(s, z, shared + s.affine, sums, [&](u32 image, u32, u32 channel) {
        return shared[(image - begin) * s.of.c + channel];
    });
    leave_classifier(s, features, dlogits, weights);
    if (!is_last(tickets, 0, gridDim.x)) return;
    finish_classifier(s, weights, dw, db);
    double count = (double)s.batch * (double)s.of.h * (double)s.of.w;
    finish_gradient(s.of, count, sums, s.parts, {var, gamma, dgamma, dbeta, coefficients});
}

// The sums of a batch norm's gradient, from the gradient of each pixel of its output.
extern "C" __global__ void __launch_bounds__(128, 8)
    norm_sums(Span<const Value> z, Span<const float> mean, Span<const float> var,
              Span<const float> gamma, Span<const float> beta, Span<const Value> dy,
              Span<float> dgamma, Span<float> dbeta, Span<float> coefficients,
              Span<u32> tickets, Span<double> sums, Head s) {
    locate(z, mean, var, gamma, beta, dy, dgamma, dbeta, coefficients, tickets, sums);
    extern __shared__ float shared[];
    load_affine(mean, var, gamma, beta, s.of, shared + s.affine);
    __syncthreads();
    leave_sums(s, z, shared + s.affine, sums, [&](u32 image, u32 pixel, u32 channel) {
        return dy[(i64)((image * s.pixels + pixel) * s.of.c + channel)];
    });
    if (!is_last(tickets, 0, gridDim.x)) return;
    double count = (double)s.batch * (double)s.of.h * (double)s.of.w;
    finish_gradient(s.of, count, sums, s.parts, {var, gamma, dgamma, dbeta, coefficients});
}

// Zeros for the gradients of a group, and for the tickets of a run.
extern "C" __global__ void begin(Span<float> gradient, Span<u32> tickets) {
    locate(gradient, tickets);
    for (i64 i = first(); i < gradient.len; i += threads()) gradient[i] = 0.0f;
    for (i64 i = first(); i < tickets.len; i += threads()) tickets[i] = 0;
}
