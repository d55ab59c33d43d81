// Max pooling, average pooling and global average pooling (kernels/pool.rs). One thread per
// element, unless stated otherwise. Channels vary fastest, so neighbouring threads read
// neighbouring elements.
#include "value.cuh"

const u32 BLOCKED = 4;  // as in norm.cu

struct Shape {
    Divisor h;
    Divisor w;
    Divisor c;
    Divisor out_h;
    Divisor out_w;
    Divisor stride;
    u32 kernel;
    u32 accumulate;
};

// The maximum of each window: the first of equals in row-major order, the last NaN.
extern "C" __global__ void __launch_bounds__(256)
    max_forward(Span<const Value> x, Span<Value> y, Span<u8> positions, Shape of) {
    locate(x, y, positions);
    u32 i = (u32)first();
    if (i >= y.len) return;
    u32 c, left, upper;
    u32 n = of.out_h.divide(of.out_w.divide(of.c.divide(i, c), left), upper);
    u32 pixel = (n * of.h.by + upper * of.stride.by) * of.w.by + left * of.stride.by;
    i64 from = (i64)pixel * of.c.by + c;
    float best = x[from];
    u32 position = 0, k = 0;
    for (u32 ky = 0; ky < of.kernel; ++ky) {
        for (u32 kx = 0; kx < of.kernel; ++kx, ++k) {
            float value = x[from + (ky * of.w.by + kx) * of.c.by];
            if (value > best || isnan(value)) {
                best = value;
                position = k;
            }
        }
    }
    y[i] = best;
    if (positions.len > 0) positions[i] = (u8)position;
}

// One thread an input: it gathers from the windows that it is in, in their order.
extern "C" __global__ void __launch_bounds__(256, 1)
    max_gradient(Span<const Value> dy, Span<const u8> positions, Span<Value> dx, Shape of) {
    locate(dy, positions, dx);
    u32 i = (u32)first();
    if (i >= dx.len) return;
    u32 c, x, y, rest;
    u32 n = of.h.divide(of.w.divide(of.c.divide(i, c), x), y);
    // The windows that start at most kernel - 1 before the input, and not after it.
    u32 top = y < of.kernel ? 0 : of.stride.divide(y - of.kernel, rest) + 1;
    u32 left = x < of.kernel ? 0 : of.stride.divide(x - of.kernel, rest) + 1;
    u32 bottom = min(of.stride.divide(y, rest) + 1, of.out_h.by);
    u32 right = min(of.stride.divide(x, rest) + 1, of.out_w.by);
    float sum = of.accumulate ? dx[i] : 0.0f;
    for (u32 oy = top; oy < bottom; ++oy) {
        for (u32 ox = left; ox < right; ++ox) {
            u32 window = (n * of.out_h.by + oy) * of.out_w.by + ox;
            u32 own = (y - oy * of.stride.by) * of.kernel + (x - ox * of.stride.by);
            i64 from = (i64)window * of.c.by + c;
            sum += positions[from] == own ? dy[from] : 0.0f;
        }
    }
    dx[i] = sum;
}

// Windows of any shape, which may reach into the padding.
struct Window {
    Divisor h;
    Divisor w;
    Divisor c;
    Divisor out_h;
    Divisor out_w;
    Divisor stride_y;
    Divisor stride_x;
    u32 kernel_y;
    u32 kernel_x;
    u32 padding_y;
    u32 padding_x;
    float scale;  // 1/(kernel_y·kernel_x)
    u32 accumulate;
};

// The part of an output's window inside the image: rows and columns of the window, and the element
// at the window's corner, which may lie outside.
struct Clipped {
    u32 top, bottom, left, right;
    i64 corner;

    __device__ __forceinline__ Clipped(const Window& of, u32 i) {
        u32 c, x, y, n = of.out_h.divide(of.out_w.divide(of.c.divide(i, c), x), y);
        u32 first_y = y * of.stride_y.by, first_x = x * of.stride_x.by;
        top = of.padding_y > first_y ? of.padding_y - first_y : 0;
        left = of.padding_x > first_x ? of.padding_x - first_x : 0;
        bottom = min(of.kernel_y, of.h.by + of.padding_y - first_y);
        right = min(of.kernel_x, of.w.by + of.padding_x - first_x);
        i64 row = (i64)n * of.h.by + first_y - of.padding_y;
        corner = (row * of.w.by + first_x - of.padding_x) * of.c.by + c;
    }

    __device__ __forceinline__ i64 at(const Window& of, u32 ky, u32 kx) const {
        return corner + (i64)(ky * of.w.by + kx) * of.c.by;
    }
};

// The maximum of each window, as in `max_forward`. P holds a position.
template <class P>
__device__ __forceinline__ void window_maximum(Span<const Value> x, Span<Value> y,
                                               Span<P> positions, const Window& of) {
    u32 i = (u32)first();
    if (i >= y.len) return;
    Clipped window(of, i);
    float best = x[window.at(of, window.top, window.left)];
    u32 position = window.top * of.kernel_x + window.left;
    for (u32 ky = window.top; ky < window.bottom; ++ky) {
        for (u32 kx = window.left; kx < window.right; ++kx) {
            float value = x[window.at(of, ky, kx)];
            if (value > best || isnan(value)) {
                best = value;
                position = ky * of.kernel_x + kx;
            }
        }
    }
    y[i] = best;
    if (positions.len > 0) positions[i] = (P)position;
}

extern "C" __global__ void __launch_bounds__(256)
    window_max(Span<const Value> x, Span<Value> y, Span<u8> positions, Window of) {
    locate(x, y, positions);
    window_maximum(x, y, positions, of);
}

extern "C" __global__ void __launch_bounds__(256)
    window_max_wide(Span<const Value> x, Span<Value> y, Span<u32> positions, Window of) {
    locate(x, y, positions);
    window_maximum(x, y, positions, of);
}

// The windows that an input is in, and its place in the padded image.
struct Covering {
    u32 c, n, y, x;
    u32 top, bottom, left, right;

    __device__ __forceinline__ Covering(const Window& of, u32 i) {
        u32 rest;
        n = of.h.divide(of.w.divide(of.c.divide(i, c), x), y);
        y += of.padding_y, x += of.padding_x;
        // The windows that start at most kernel - 1 before the input, and not after it.
        top = y < of.kernel_y ? 0 : of.stride_y.divide(y - of.kernel_y, rest) + 1;
        left = x < of.kernel_x ? 0 : of.stride_x.divide(x - of.kernel_x, rest) + 1;
        bottom = min(of.stride_y.divide(y, rest) + 1, of.out_h.by);
        right = min(of.stride_x.divide(x, rest) + 1, of.out_w.by);
    }

    // The output of a window.
    __device__ __forceinline__ i64 output(const Window& of, u32 oy, u32 ox) const {
        return (i64)((n * of.out_h.by + oy) * of.out_w.by + ox) * of.c.by + c;
    }
};

// One thread an input, as in `max_gradient`.
template <class P>
__device__ __forceinline__ void window_maximum_gradient(Span<const Value> dy,
                                                        Span<const P> positions, Span<Value> dx,
                                                        const Window& of) {
    u32 i = (u32)first();
    if (i >= dx.len) return;
    Covering in(of, i);
    float sum = of.accumulate ? dx[i] : 0.0f;
    for (u32 oy = in.top; oy < in.bottom; ++oy) {
        // An input is in few windows: unrolled, the loop would need more registers than there are.
#pragma unroll 1
        for (u32 ox = in.left; ox < in.right; ++ox) {
            u32 own = (in.y - oy * of.stride_y.by) * of.kernel_x + (in.x - ox * of.stride_x.by);
            i64 from = in.output(of, oy, ox);
            sum += positions[from] == own ? dy[from] : 0.0f;
        }
    }
    dx[i] = sum;
}

extern "C" __global__ void __launch_bounds__(256)
    window_max_gradient(Span<const Value> dy, Span<const u8> positions, Span<Value> dx,
                        Window of) {
    locate(dy, positions, dx);
    window_maximum_gradient(dy, positions, dx, of);
}

extern "C" __global__ void __launch_bounds__(256)
    window_max_gradient_wide(Span<const Value> dy, Span<const u32> positions, Span<Value> dx,
                             Window of) {
    locate(dy, positions, dx);
    window_maximum_gradient(dy, positions, dx, of);
}

// The mean of each window, with zeros in the padding: sums of rows, then their sum.
extern "C" __global__ void __launch_bounds__(256)
    window_average(Span<const Value> x, Span<Value> y, Window of) {
    locate(x, y);
    u32 i = (u32)first();
    if (i >= y.len) return;
    Clipped window(of, i);
    float total = 0.0f;
    for (u32 ky = window.top; ky < window.bottom; ++ky) {
        float sum = 0.0f;
        for (u32 kx = window.left; kx < window.right; ++kx) sum += x[window.at(of, ky, kx)];
        total += sum;
    }
    y[i] = total * of.scale;
}

extern "C" __global__ void __launch_bounds__(256)
    window_average_gradient(Span<const Value> dy, Span<Value> dx, Window of) {
    locate(dy, dx);
    u32 i = (u32)first();
    if (i >= dx.len) return;
    Covering in(of, i);
    float sum = of.accumulate ? dx[i] : 0.0f;
    for (u32 oy = in.top; oy < in.bottom; ++oy) {
        for (u32 ox = in.left; ox < in.right; ++ox) sum += dy[in.output(of, oy, ox)] * of.scale;
    }
    dx[i] = sum;
}

// The codes that a pooled batch norm would have written.
extern "C" __global__ void __launch_bounds__(256)
    norm_codes(Span<const Value> y, Span<const u8> positions, Span<u8> codes) {
    locate(y, positions, codes);
    i64 i = first();
    if (i < codes.len) codes[i] = y[i] <= 0.0f ? (u8)BLOCKED : positions[i];
}

// x [N][pixels][C], and [N][C].
struct Average {
    Divisor pixels;
    Divisor c;
    u32 columns;
    float scale;  // 1/pixels
    u32 accumulate;
};

// Sums in f64.
extern "C" __global__ void __launch_bounds__(256)
    average_forward(Span<const Value> x, Span<Value> y, Average of) {
    locate(x, y);
    __shared__ double part[256];
    OverPixels at(of.columns, of.c.by);
    double sum = 0.0;
    if (at.channel < of.c.by) {
        i64 image = (i64)at.sample * of.pixels.by * of.c.by + at.channel;
#pragma unroll 4
        for (u32 p = at.row; p < of.pixels.by; p += at.rows) {
            sum += (double)x[image + (i64)p * of.c.by];
        }
    }
    sum = column_sum(sum, part, of.columns);
    if (at.row > 0 || at.channel >= of.c.by) return;
    y[(i64)at.sample * of.c.by + at.channel] = (float)sum * of.scale;
}

extern "C" __global__ void __launch_bounds__(256)
    average_gradient(Span<const Value> dy, Span<Value> dx, Average of) {
    locate(dy, dx);
    u32 i = (u32)first();
    if (i >= dx.len) return;
    u32 c, pixel, n = of.pixels.divide(of.c.divide(i, c), pixel);
    put(dx[i], dy[(i64)n * of.c.by + c] * of.scale, of.accumulate);
}
