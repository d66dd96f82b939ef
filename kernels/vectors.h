// What the kernels are made of: vectors of eight floats in the compilers' own extension, so that the same text serves AVX2,
// AVX-512 and NEON; inner products and exp on them. Numbers are stored as float32, bfloat16 or float16 and always
// summed as float32.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t u16x8 __attribute__((vector_size(16), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, i8{__VA_ARGS__})
#endif

#define UNROLL _Pragma("GCC unroll 16")

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

INLINE v8 load(const float *p) { return *(const v8 *)p; }
INLINE v8 load(const bf16 *p) { return (v8)(__builtin_convertvector(*(const u16x8 *)p, i8) << 16); }
INLINE v8 from_half(u16x8 bits) {
#if defined(__F16C__)
    return (v8)_mm256_cvtph_ps((__m128i)bits);
#else
    i8 x = __builtin_convertvector(bits, i8);  // exponents start 112 lower: as a float it is 2^112 too small
    return (v8)((x & 0x8000) << 16 | (x & 0x7fff) << 13) * 5.192296858534828e33f;
#endif
}
INLINE v8 load(const f16 *p) { return from_half(*(const u16x8 *)p); }
INLINE void store(float *p, v8 x) { *(v8 *)p = x; }

INLINE v8 hold(v8 x) {  // in a register, or GCC reads it from memory again at each use, and the loads become the limit
#if defined(__x86_64__)
    asm("" : "+x"(x));
#endif
    return x;
}

INLINE float within(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }  // NaN stays NaN
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE float to_float(f16 x) { return from_half(u16x8{x.bits})[0]; }
INLINE void from_float(float x, float *to) { *to = x; }
INLINE void from_float(float x, f16 *to) {  // round to nearest even; what does not fit becomes the largest there is
    x = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
#if defined(__F16C__)
    to->bits = _cvtss_sh(x, 0);
#else
    _Float16 half = (_Float16)x;
    memcpy(to, &half, 2);
#endif
}
INLINE void from_float(float x, bf16 *to) {  // round to nearest even, as torch does
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE v8 pairs(v8 a, v8 b) {  // sums of neighbours: a0+a1 a2+a3 b0+b1 b2+b3 | a4+a5 a6+a7 b4+b5 b6+b7
    return SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
INLINE v8 halves(v8 a, v8 b) {  // the lower half of a plus its upper half, then the same of b
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
INLINE float sum(v8 a) { return ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7])); }

// out[ROWS][COLUMNS] = x[ROWS][n] w[COLUMNS][n]^T over n (a multiple of 8) numbers. 8 to 12 sums at a time, held in
// registers: enough to keep both multiply-add units busy, few enough to leave room for what they multiply.
template <int ROWS, int COLUMNS, class T>
INLINE void dots(const float *x, long next_x, const T *w, long next_w, int n, float *out, long next_out) {
    v8 a[ROWS][COLUMNS] = {};
    for (int k = 0; k < n; k += 8) {
        v8 p[ROWS];
        UNROLL for (int i = 0; i < ROWS; i++) p[i] = hold(load(x + i * next_x + k));
        UNROLL for (int j = 0; j < COLUMNS; j++) {
            v8 r = hold(load(w + j * next_w + k));
            UNROLL for (int i = 0; i < ROWS; i++) a[i][j] += p[i] * r;
        }
    }
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < COLUMNS; j += 4) {
        v8 s = pairs(pairs(a[i][j], a[i][j + 1]), pairs(a[i][j + 2], a[i][j + 3]));
        s = halves(s, s);
        memcpy(out + i * next_out + j, &s, 4 * sizeof(float));
    }
}

INLINE v8 exp8(v8 x) {  // exp of x <= 0, to 2e-7; 2^n e^r with |r| <= ln(2)/2, the polynomial is Cephes' expf
    const v8 lowest = v8{} - 87.0f;
    x = x < lowest ? lowest : x;  // NaN stays NaN
    v8 n = x * 1.44269504f + 12582912.0f;  // + 1.5 * 2^23 rounds to a whole number, held in the lowest bits
    i8 exponent = (i8)n << 23;
    n -= 12582912.0f;
    v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (v8)((i8)p + exponent);
}
