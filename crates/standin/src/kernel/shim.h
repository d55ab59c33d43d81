// CUDA C++ for the C++ compiler: the part of the language and of its built-in functions that the
// kernels use. It stands before the program; kernel/source.rs adds a table of kernels after it.
//
// Threads of a block are fibers that take turns on one thread of the host, one block after the
// other. So variables in shared memory are plain static variables: nothing else may be in .bss
// (kernel/grid.rs fills it with poison before each block), and the shim's own are in .data.

using size_t = __SIZE_TYPE__;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = __UINTPTR_TYPE__;

// Exported, so that a lookup by name finds the kernels that are extern "C", and only these.
#define __global__ __attribute__((visibility("default"), used))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define __constant__ static const
#define __grid_constant__
#define MERISTEM_OWN __attribute__((section(".data"), used))

// ---------------------------------------------------------------------------------- vector types

#define MERISTEM_VECTOR(type, name, align2, align4) \
  struct name##1 { type x; }; \
  struct alignas(align2) name##2 { type x, y; }; \
  struct name##3 { type x, y, z; }; \
  struct alignas(align4) name##4 { type x, y, z, w; }; \
  static inline name##1 make_##name##1(type x) { return {x}; } \
  static inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  static inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
MERISTEM_VECTOR(signed char, char, 2, 4)
MERISTEM_VECTOR(unsigned char, uchar, 2, 4)
MERISTEM_VECTOR(short, short, 4, 8)
MERISTEM_VECTOR(unsigned short, ushort, 4, 8)
MERISTEM_VECTOR(int, int, 8, 16)
MERISTEM_VECTOR(unsigned int, uint, 8, 16)
MERISTEM_VECTOR(long long, longlong, 16, 16)
MERISTEM_VECTOR(unsigned long long, ulonglong, 16, 16)
MERISTEM_VECTOR(float, float, 8, 16)
MERISTEM_VECTOR(double, double, 16, 16)
#undef MERISTEM_VECTOR

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ------------------------------------------------------------------- the stand-in's side (module.rs)

// Functions of the stand-in that kernels call.
struct meristem_host {
  // Waits until all threads of the warp (warp = 1) or of the block have come to the same place.
  void (*wait)(int warp, const char* file, int line);
  // The last thread that did not wait at the block's barrier has ended: releases the barrier.
  void (*ended)();
  // Ends the kernel. `code` is that of the driver's error.
  void (*fail)(int code, const char* what, const char* file, int line) __attribute__((noreturn));
  // Asynchronous copies of the thread: one more, the end of a group, a wait for all but some groups.
  void (*copy)(void* to, const void* from, size_t bytes);
  void (*commit)();
  void (*arrive)(unsigned prior);
};

// The block that runs. Written by the stand-in before each block.
struct meristem_block {
  const meristem_host* host;
  const unsigned* order;  // threads in the order in which they start
  unsigned started;       // threads that have started
  unsigned count;         // threads of the block
  unsigned live;          // threads that have not ended
  unsigned waiting;       // threads that wait at the block's barrier
  unsigned current;       // number of the thread that runs
  unsigned long long* lanes;  // two buffers for the values that threads give to their warp
  unsigned char turn[32]; // exchanges of each warp so far, modulo 2
};

MERISTEM_OWN static meristem_block meristem = {};
MERISTEM_OWN static uint3 threadIdx = {}, blockIdx = {};
MERISTEM_OWN static dim3 blockDim, gridDim;
static constexpr int warpSize = 32;

// Dynamic shared memory: what `extern __shared__` names (kernel/source.rs). The driver permits 227 KiB;
// the rest is a guard zone.
static constexpr unsigned meristem_dynamic_bytes = 232448 + 256;
alignas(1024) MERISTEM_OWN static unsigned char meristem_dynamic[meristem_dynamic_bytes] = {};

#define MERISTEM_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

static constexpr int MERISTEM_ASSERT = 710, MERISTEM_TRAP = 719, MERISTEM_MISALIGNED = 716;

[[noreturn]] static inline void __trap(MERISTEM_HERE) {
  meristem.host->fail(MERISTEM_TRAP, "trap", file, line);
}
#define assert(condition) \
  ((condition) ? (void)0 \
               : meristem.host->fail(MERISTEM_ASSERT, "assertion " #condition, __FILE__, __LINE__))

template <typename To, typename From>
static inline To meristem_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same number of bytes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// ------------------------------------------------------------------------- barriers and exchanges

static inline void meristem_wait(int warp, const char* file, int line) {
  const unsigned current = meristem.current;
  const uint3 index = threadIdx;
  meristem.host->wait(warp, file, line);
  meristem.current = current;
  threadIdx = index;
}

static inline void __syncthreads(MERISTEM_HERE) { meristem_wait(0, file, line); }

static inline void meristem_full(unsigned mask, const char* file, int line) {
  if (mask != 0xffffffffu)
    meristem.host->fail(MERISTEM_TRAP, "a mask other than 0xffffffff", file, line);
}

static inline void __syncwarp(unsigned mask = 0xffffffffu, MERISTEM_HERE) {
  meristem_full(mask, file, line);
  meristem_wait(1, file, line);
}

// Words of each lane.
static constexpr int meristem_words = 3;

// Gives the own value to the warp; returns the values of all lanes. Two buffers take turns: nobody
// writes to one before all lanes have read it.
template <typename T>
static inline const unsigned long long* meristem_exchange(unsigned mask, const T& value, const char* file, int line) {
  static_assert(sizeof(T) <= 8 * meristem_words, "values of at most 24 bytes are exchanged");
  meristem_full(mask, file, line);
  const unsigned current = meristem.current;
  unsigned long long* lanes = meristem.lanes + meristem.turn[current / 32] * 1024 * meristem_words;
  __builtin_memcpy(&lanes[current * meristem_words], &value, sizeof(T));
  meristem_wait(1, file, line);
  return lanes + current / 32 * 32 * meristem_words;
}

template <typename T>
static inline T meristem_from(const unsigned long long* lanes, int lane) {
  T value;
  __builtin_memcpy(&value, &lanes[lane * meristem_words], sizeof(T));
  return value;
}

// First lane of the group of `width` lanes that the thread is in.
static inline int meristem_first(int width) { return (int)(meristem.current % 32) & ~(width - 1); }

template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, MERISTEM_HERE) {
  const unsigned long long* lanes = meristem_exchange(mask, value, file, line);
  return meristem_from<T>(lanes, meristem_first(width) + (lane & (width - 1)));
}

template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, MERISTEM_HERE) {
  const unsigned long long* lanes = meristem_exchange(mask, value, file, line);
  const int own = (int)(meristem.current % 32), from = own - (int)delta;
  return meristem_from<T>(lanes, from < meristem_first(width) ? own : from);
}

template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, MERISTEM_HERE) {
  const unsigned long long* lanes = meristem_exchange(mask, value, file, line);
  const int own = (int)(meristem.current % 32), from = own + (int)delta;
  return meristem_from<T>(lanes, from >= meristem_first(width) + width ? own : from);
}

template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, MERISTEM_HERE) {
  const unsigned long long* lanes = meristem_exchange(mask, value, file, line);
  const int own = (int)(meristem.current % 32), from = own ^ bits;
  return meristem_from<T>(lanes, from >= meristem_first(width) + width ? own : from);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, MERISTEM_HERE) {
  const unsigned long long* lanes = meristem_exchange(mask, predicate != 0, file, line);
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= (unsigned)meristem_from<bool>(lanes, lane) << lane;
  return all;
}
static inline int __any_sync(unsigned mask, int predicate, MERISTEM_HERE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, MERISTEM_HERE) {
  return __ballot_sync(mask, predicate, file, line) == 0xffffffffu;
}
static inline unsigned __activemask() { return 0xffffffffu; }

#define MERISTEM_REDUCE(name, type, expression) \
  static inline type name(unsigned mask, type value, MERISTEM_HERE) { \
    const unsigned long long* lanes = meristem_exchange(mask, value, file, line); \
    type a = meristem_from<type>(lanes, 0); \
    for (int lane = 1; lane < 32; ++lane) { \
      const type b = meristem_from<type>(lanes, lane); \
      a = expression; \
    } \
    return a; \
  }
MERISTEM_REDUCE(__reduce_add_sync, unsigned, a + b)
MERISTEM_REDUCE(__reduce_add_sync, int, (int)((unsigned)a + (unsigned)b))
MERISTEM_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
MERISTEM_REDUCE(__reduce_min_sync, int, a < b ? a : b)
MERISTEM_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
MERISTEM_REDUCE(__reduce_max_sync, int, a > b ? a : b)
MERISTEM_REDUCE(__reduce_and_sync, unsigned, a & b)
MERISTEM_REDUCE(__reduce_or_sync, unsigned, a | b)
MERISTEM_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef MERISTEM_REDUCE

// -------------------------------------------------------------------------------- matrix products

// d = a b + c for the warp, with the fragments of PTX's mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
// and mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32, which a device needs in assembly. The
// layout is that of a device; the order of the additions, and so the rounding, is not.

struct meristem_fragment {
  unsigned a[4], b[2];
};

// Element (row, k) of a and (k, column) of b: 16 x 8 and 8 x 8 of TF32, whose low 13 bits do not count.
struct meristem_tf32 {
  static constexpr int depth = 8;
  static float value(unsigned bits) { return meristem_bits<float>(bits & 0xffffe000u); }
  static float a(const unsigned long long* lanes, int row, int k) {
    const int lane = row % 8 * 4 + k % 4, at = row / 8 + k / 4 * 2;
    return value(meristem_from<meristem_fragment>(lanes, lane).a[at]);
  }
  static float b(const unsigned long long* lanes, int k, int column) {
    return value(meristem_from<meristem_fragment>(lanes, column * 4 + k % 4).b[k / 4]);
  }
};

// 16 x 16 and 16 x 8 of bf16, two to a word, the lower half first.
struct meristem_bf16 {
  static constexpr int depth = 16;
  static float value(unsigned word, int half) {
    return meristem_bits<float>(half ? word & 0xffff0000u : word << 16);
  }
  static float a(const unsigned long long* lanes, int row, int k) {
    const int lane = row % 8 * 4 + k % 8 / 2, at = row / 8 + k / 8 * 2;
    return value(meristem_from<meristem_fragment>(lanes, lane).a[at], k % 2);
  }
  static float b(const unsigned long long* lanes, int k, int column) {
    return value(meristem_from<meristem_fragment>(lanes, column * 4 + k % 8 / 2).b[k / 8], k % 2);
  }
};

template <typename Kind>
static inline void meristem_mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                const float (&c)[4], const char* file, int line) {
  const meristem_fragment own = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const unsigned long long* lanes = meristem_exchange(0xffffffffu, own, file, line);
  const int lane = (int)(meristem.current % 32);
  for (int at = 0; at < 4; ++at) {
    const int row = lane / 4 + at / 2 * 8, column = lane % 4 * 2 + at % 2;
    float sum = c[at];
    for (int k = 0; k < Kind::depth; ++k)
      sum = __builtin_fmaf(Kind::a(lanes, row, k), Kind::b(lanes, k, column), sum);
    d[at] = sum;
  }
}

static inline void meristem_mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                     const float (&c)[4], MERISTEM_HERE) {
  meristem_mma<meristem_tf32>(d, a, b, c, file, line);
}
static inline void meristem_mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                     const float (&c)[4], MERISTEM_HERE) {
  meristem_mma<meristem_bf16>(d, a, b, c, file, line);
}

// cvt.rna.tf32.f32: to the nearest, halves away from zero. As on an H200, the bits of NaN below the mantissa
// of TF32 are cut off, which may leave infinity.
static inline unsigned meristem_to_tf32(float value) {
  const unsigned bits = meristem_bits<unsigned>(value);
  const bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
  return (is_finite ? bits + 0x1000u : bits) & 0xffffe000u;
}

// ------------------------------------------------------------------- copies into shared memory

// As in cuda_pipeline.h, which NVRTC lacks: a device needs them written with `cp.async`. The bytes
// come when the thread waits; until then the destination is poison.
static inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, MERISTEM_HERE) {
  if (bytes != 4 && bytes != 8 && bytes != 16)
    meristem.host->fail(MERISTEM_TRAP, "an asynchronous copy of other than 4, 8 or 16 bytes", file, line);
  if (((uintptr_t)to | (uintptr_t)from) % bytes != 0)
    meristem.host->fail(MERISTEM_MISALIGNED, "a misaligned asynchronous copy", file, line);
  meristem.host->copy(to, from, bytes);
}
static inline void __pipeline_commit() { meristem.host->commit(); }
static inline void __pipeline_wait_prior(unsigned groups) { meristem.host->arrive(groups); }

// Threads take turns, so memory is always in step.
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}

// ---------------------------------------------------------------------------------------- atomics

// Whole numbers only: a sum of floats depends on the order of the threads.
template <typename T> struct meristem_is_whole { static constexpr bool value = false; };
template <> struct meristem_is_whole<int> { static constexpr bool value = true; };
template <> struct meristem_is_whole<unsigned> { static constexpr bool value = true; };
template <> struct meristem_is_whole<unsigned long long> { static constexpr bool value = true; };
template <typename T> struct meristem_same { using type = T; };

#define MERISTEM_ATOMIC(name, expression) \
  template <typename T> \
  static inline T name(T* address, typename meristem_same<T>::type value) { \
    static_assert(meristem_is_whole<T>::value, \
                  #name " of this type: atomics are on int, unsigned and unsigned long long; the " \
                  "result of float atomics depends on the order of the threads"); \
    const T old = *address; \
    *address = (T)(expression); \
    return old; \
  }
MERISTEM_ATOMIC(atomicAdd, (unsigned long long)old + (unsigned long long)value)
MERISTEM_ATOMIC(atomicSub, (unsigned long long)old - (unsigned long long)value)
MERISTEM_ATOMIC(atomicMax, old > value ? old : value)
MERISTEM_ATOMIC(atomicMin, old < value ? old : value)
MERISTEM_ATOMIC(atomicExch, value)
MERISTEM_ATOMIC(atomicAnd, old & value)
MERISTEM_ATOMIC(atomicOr, old | value)
MERISTEM_ATOMIC(atomicXor, old ^ value)
#undef MERISTEM_ATOMIC

template <typename T>
static inline T atomicCAS(T* address, typename meristem_same<T>::type compare, typename meristem_same<T>::type value) {
  static_assert(meristem_is_whole<T>::value, "atomicCAS is on int, unsigned and unsigned long long");
  const T old = *address;
  if (old == compare) *address = value;
  return old;
}

// ------------------------------------------------------------------------------------- arithmetic

// One address space holds everything here.
static inline void* __cvta_global_to_generic(size_t address) { return (void*)address; }
template <typename T> static inline T __ldg(const T* address) { return *address; }
template <typename T> static inline T __ldcg(const T* address) { return *address; }

static inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
static inline float sqrtf(float a) { return __builtin_sqrtf(a); }
static inline double sqrt(double a) { return __builtin_sqrt(a); }
static inline float sqrt(float a) { return __builtin_sqrtf(a); }
// The device's own is off by up to two units in the last place.
static inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
static inline float fabsf(float a) { return __builtin_fabsf(a); }
static inline double fabs(double a) { return __builtin_fabs(a); }
static inline float fabs(float a) { return __builtin_fabsf(a); }
static inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
static inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
static inline double fmax(double a, double b) { return __builtin_fmax(a, b); }
static inline double fmin(double a, double b) { return __builtin_fmin(a, b); }
static inline float floorf(float a) { return __builtin_floorf(a); }
static inline float ceilf(float a) { return __builtin_ceilf(a); }
static inline float truncf(float a) { return __builtin_truncf(a); }
static inline float rintf(float a) { return __builtin_rintf(a); }
static inline float copysignf(float a, float b) { return __builtin_copysignf(a, b); }
static inline bool isnan(float a) { return __builtin_isnan(a); }
static inline bool isnan(double a) { return __builtin_isnan(a); }
static inline bool isinf(float a) { return __builtin_isinf(a); }
static inline bool isinf(double a) { return __builtin_isinf(a); }
static inline bool isfinite(float a) { return __builtin_isfinite(a); }
static inline bool isfinite(double a) { return __builtin_isfinite(a); }
static inline int abs(int a) { return a < 0 ? -a : a; }

#define MERISTEM_ORDER(type) \
  static inline constexpr type min(type a, type b) { return b < a ? b : a; } \
  static inline constexpr type max(type a, type b) { return a < b ? b : a; }
MERISTEM_ORDER(int)
MERISTEM_ORDER(unsigned)
MERISTEM_ORDER(long)
MERISTEM_ORDER(unsigned long)
MERISTEM_ORDER(long long)
MERISTEM_ORDER(unsigned long long)
#undef MERISTEM_ORDER
static inline float min(float a, float b) { return __builtin_fminf(a, b); }
static inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
static inline double min(double a, double b) { return __builtin_fmin(a, b); }
static inline double max(double a, double b) { return __builtin_fmax(a, b); }

static inline unsigned __float_as_uint(float a) { return meristem_bits<unsigned>(a); }
static inline int __float_as_int(float a) { return meristem_bits<int>(a); }
static inline float __uint_as_float(unsigned a) { return meristem_bits<float>(a); }
static inline float __int_as_float(int a) { return meristem_bits<float>(a); }
static inline long long __double_as_longlong(double a) { return meristem_bits<long long>(a); }
static inline double __longlong_as_double(long long a) { return meristem_bits<double>(a); }

// Conversions that round to the nearest (even) or towards zero; as on the device they saturate, and
// NaN becomes 0.
template <typename To>
static inline To meristem_convert(double rounded, double least, double beyond, To lowest, To highest) {
  if (rounded != rounded) return 0;
  if (rounded < least) return lowest;
  if (rounded >= beyond) return highest;
  return (To)rounded;
}
static inline int __float2int_rn(float a) {
  return meristem_convert<int>(__builtin_rint((double)a), -0x1p31, 0x1p31, -0x7fffffff - 1, 0x7fffffff);
}
static inline int __float2int_rz(float a) {
  return meristem_convert<int>(__builtin_trunc((double)a), -0x1p31, 0x1p31, -0x7fffffff - 1, 0x7fffffff);
}
static inline int __float2int_rd(float a) {
  return meristem_convert<int>(__builtin_floor((double)a), -0x1p31, 0x1p31, -0x7fffffff - 1, 0x7fffffff);
}
static inline unsigned __float2uint_rn(float a) {
  return meristem_convert<unsigned>(__builtin_rint((double)a), 0.0, 0x1p32, 0u, 0xffffffffu);
}
static inline unsigned __float2uint_rz(float a) {
  return meristem_convert<unsigned>(__builtin_trunc((double)a), 0.0, 0x1p32, 0u, 0xffffffffu);
}
static inline float __int2float_rn(int a) { return (float)a; }
static inline float __uint2float_rn(unsigned a) { return (float)a; }
static inline float __double2float_rn(double a) { return (float)a; }

static inline int __popc(unsigned a) { return __builtin_popcount(a); }
static inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
static inline int __clz(int a) { return a ? __builtin_clz((unsigned)a) : 32; }
static inline int __clzll(long long a) { return a ? __builtin_clzll((unsigned long long)a) : 64; }
static inline int __ffs(int a) { return __builtin_ffs(a); }
static inline int __ffsll(long long a) { return __builtin_ffsll(a); }
static inline unsigned __brev(unsigned a) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (a >> bit & 1) << (31 - bit);
  return reversed;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}

// Their results on a device differ from every library of the host.
#define MERISTEM_REFUSED(name) \
  __attribute__((error(#name " has other bits on a device: write it with fmaf"))) float name(float);
MERISTEM_REFUSED(expf)
MERISTEM_REFUSED(exp2f)
MERISTEM_REFUSED(expm1f)
MERISTEM_REFUSED(logf)
MERISTEM_REFUSED(log2f)
MERISTEM_REFUSED(log1pf)
MERISTEM_REFUSED(tanhf)
MERISTEM_REFUSED(sinf)
MERISTEM_REFUSED(cosf)
MERISTEM_REFUSED(erff)
MERISTEM_REFUSED(__expf)
MERISTEM_REFUSED(__logf)
MERISTEM_REFUSED(__frsqrt_rn)
#undef MERISTEM_REFUSED

// ------------------------------------------------------------------------------ table of the kernels

struct meristem_argument {
  unsigned bytes;
  unsigned is_pointer;
};

struct meristem_kernel {
  const char* name;
  void (*run)(void**);  // starts threads of the block until all have started
  unsigned threads_max; // from __launch_bounds__, or 0
  unsigned arguments;
  const meristem_argument* argument;
};

struct meristem_module {
  unsigned kernels;
  const meristem_kernel* kernel;
  meristem_block* block;
  uint3 *thread_index, *block_index;
  dim3 *block_size, *grid_size;
  unsigned char *dynamic, *shared, *shared_end;
};

extern "C" {
extern unsigned char __bss_start[] __attribute__((visibility("hidden")));
extern unsigned char _end[] __attribute__((visibility("hidden")));
}

template <typename T> struct meristem_points { static constexpr unsigned value = 0; };
template <typename T> struct meristem_points<T*> { static constexpr unsigned value = 1; };

template <int... I> struct meristem_numbers {};
template <int N, int... I> struct meristem_count : meristem_count<N - 1, N - 1, I...> {};
template <int... I> struct meristem_count<0, I...> { using type = meristem_numbers<I...>; };

template <auto F> struct meristem_entry;
template <typename... A, void (*F)(A...)> struct meristem_entry<F> {
  static constexpr unsigned arguments = sizeof...(A);
  // One more than there are: an array of none is no C++.
  static constexpr meristem_argument argument[sizeof...(A) + 1] = {
      {sizeof(A), meristem_points<A>::value}..., {0, 0}};

  template <int... I> static void threads(void** values, meristem_numbers<I...>) {
    while (meristem.started < meristem.count) {
      const unsigned thread = meristem.order[meristem.started++];
      meristem.current = thread;
      threadIdx.x = thread % blockDim.x;
      threadIdx.y = thread / blockDim.x % blockDim.y;
      threadIdx.z = thread / blockDim.x / blockDim.y;
      F(*static_cast<A*>(values[I])...);
      if (--meristem.live == meristem.waiting && meristem.waiting) meristem.host->ended();
    }
  }
  static void run(void** values) {
    threads(values, typename meristem_count<(int)sizeof...(A)>::type());
  }
};

constexpr unsigned meristem_bounds() { return 0; }
template <typename... Rest> constexpr unsigned meristem_bounds(unsigned threads, Rest...) { return threads; }

// alignas may follow __shared__ in CUDA, where that is an attribute. Here: a number of bytes only.
#define alignas(bytes) __attribute__((aligned(bytes)))
