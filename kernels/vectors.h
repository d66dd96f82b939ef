// What the kernels are made of: vectors of eight floats in the compilers' own extension, so that the same text serves AVX2,
// AVX-512 and NEON; inner products, weighted sums and exp on them; and attention over one KV head's tokens in tiles that
// stay in the first-level cache. Numbers are stored as float32 or bfloat16 and always summed as float32.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

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

INLINE v8 load(const float *p) { return *(const v8 *)p; }
INLINE v8 load(const bf16 *p) { return (v8)(__builtin_convertvector(*(const u16x8 *)p, i8) << 16); }
INLINE void store(float *p, v8 x) { *(v8 *)p = x; }

INLINE v8 hold(v8 x) {  // in a register, or GCC reads it from memory again at each use, and the loads become the limit
#if defined(__x86_64__)
    asm("" : "+x"(x));
#endif
    return x;
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE void from_float(float x, float *to) { *to = x; }
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

// ---------------------------------------------------------------------------------------------------------------------
// attention of one KV head

enum { TILE = 128, ROWS = 32 };  // keys and queries a pass: 128 keys of 32 numbers are 16 KB, half a first-level cache

// n rows of `head_dim` numbers to float32, padded with zeros to n8 rows of hd
template <class T> INLINE void unpack(const T *from, int n, int head_dim, float *to, int n8, int hd) {
    if (head_dim == hd) {
        for (int i = 0; i < n * hd; i += 8) store(to + i, load(from + i));
        memset(to + n * hd, 0, sizeof(float) * (n8 - n) * hd);
        return;
    }
    memset(to, 0, sizeof(float) * n8 * hd);
    for (int j = 0; j < n; j++)
        for (int d = 0; d < head_dim; d++) to[j * hd + d] = to_float(from[j * head_dim + d]);
}

// acc[M][hd] += p[M][n] v[n][hd], where p[i][j] lies at p[i * next_i + j * next_j]; eight vectors of sums in registers
template <int R, int NV, class T>
INLINE void weigh_block(const float *p, long next_i, long next_j, const T *v, int n, int hd, float *acc) {
    v8 a[R][NV];
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int d = 0; d < NV; d++) a[i][d] = load(acc + i * hd + 8 * d);
    for (int j = 0; j < n; j++)
        UNROLL for (int d = 0; d < NV; d++) {
            v8 x = hold(load(v + (long)j * hd + 8 * d));
            UNROLL for (int i = 0; i < R; i++) a[i][d] += p[i * next_i + j * next_j] * x;
        }
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int d = 0; d < NV; d++) store(acc + i * hd + 8 * d, a[i][d]);
}
template <class T>
INLINE void weigh(int M, const float *p, long next_i, long next_j, const T *v, int n, int hd, float *acc) {
    int i = 0;
#define BLOCK(R, NV, d) weigh_block<R, NV>(p + i * next_i, next_i, next_j, v + d, n, hd, acc + i * hd + d)
    const int wide = hd / 32 * 32;
    for (; i + 4 <= M; i += 4)
        for (int d = 0; d < wide; d += 16) BLOCK(4, 2, d);
    for (; i + 2 <= M; i += 2)
        for (int d = 0; d < wide; d += 32) BLOCK(2, 4, d);
    for (; i < M; i++)
        for (int d = 0; d < wide; d += 32) BLOCK(1, 4, d);
    for (i = 0; i < M; i++)
        for (int d = wide; d < hd; d += 8) BLOCK(1, 1, d);
#undef BLOCK
}

// s[M][n8] = q[M][hd] k[n8][hd]^T, rows of s TILE apart; n8 is a multiple of 8
template <int R, int COLUMNS, class T> INLINE void score_rows(const float *q, const T *k, int n8, int hd, float *s) {
    for (int j = 0; j < n8; j += COLUMNS) dots<R, COLUMNS>(q, hd, k + j * hd, hd, hd, s + j, TILE);
}
template <class T> INLINE void scores(int M, const float *q, const T *k, int n8, int hd, float *s) {
    int i = 0;
    for (; M - i == 3 || M - i >= 5; i += 3) score_rows<3, 4>(q + i * hd, k, n8, hd, s + i * TILE);
    for (; M - i >= 2; i += 2) score_rows<2, 4>(q + i * hd, k, n8, hd, s + i * TILE);
    for (; i < M; i++) score_rows<1, 8>(q + i * hd, k, n8, hd, s + i * TILE);
}

// One KV head's tokens [begin, end) seen by its R = group * t query rows q [R, hd]; row r sees tokens below limit(r).
// Leaves the running maximum m, the sum l and the weighted values acc [R, hd] of the softmax so far.
template <class T>
static void attend_part(const float *q, int R, int t, int hd, const T *keys, const T *values, int head_dim, int begin,
                        int end, int total, float *m, float *l, float *acc) {
    float kbuf[TILE * hd], vbuf[TILE * hd], p[R * TILE];
    for (int r = 0; r < R; r++) m[r] = -INFINITY, l[r] = 0.0f;
    memset(acc, 0, sizeof(float) * R * hd);
    for (int start = begin; start < end; start += TILE) {
        const int n = end - start < TILE ? end - start : TILE, n8 = (n + 7) / 8 * 8;
        const T *from_k = keys + (long)start * head_dim, *from_v = values + (long)start * head_dim;
        // Whole vectors are read where they lie. Others are padded with zeros first; and what is no float32 is made so, where
        // more than two rows would each do it anew.
        const bool in_place = head_dim == hd && n == n8 && (sizeof(T) == 4 || R <= 2);
        if (in_place) {
            scores(R, q, from_k, n8, hd, p);
        } else {
            unpack(from_k, n, head_dim, kbuf, n8, hd);
            unpack(from_v, n, head_dim, vbuf, n8, hd);
            scores(R, q, kbuf, n8, hd, p);
        }
        for (int r = 0; r < R; r++) {
            float *s = p + r * TILE;
            int seen = total - t + 1 + r % t - start;  // tokens of this tile that row r may see
            seen = seen < 0 ? 0 : seen > n ? n : seen;
            for (int j = seen; j < n8; j++) s[j] = -INFINITY;
            float top = m[r];
#pragma omp simd reduction(max : top)
            for (int j = 0; j < seen; j++) top = s[j] > top ? s[j] : top;
            if (top == -INFINITY) top = 0.0f;  // nothing seen yet: every weight below is 0
            v8 weights = {};
            for (int j = 0; j < n8; j += 8) {
                v8 e = exp8(load(s + j) - top);
                store(s + j, e);
                weights += e;
            }
            for (int j = seen; j < n8; j++) s[j] = 0.0f;
            const float shrink = expf(m[r] - top);
            if (seen) m[r] = top;
            l[r] = l[r] * shrink + sum(weights);
            for (int d = 0; d < hd; d += 8) store(acc + r * hd + d, load(acc + r * hd + d) * shrink);
        }
        if (in_place) weigh(R, p, TILE, 1, from_v, n, hd, acc);
        else weigh(R, p, TILE, 1, vbuf, n, hd, acc);
    }
}
