// What the quantised stores share: numbers in full precision of either kind, and codes of any width to floats. A tile of codes
// becomes floats in the first-level cache and is used at once by all query rows of its KV head.

#pragma once
#include <cfloat>

#include "attention.h"

// kernels/__init__.py fills in the structures of stores; [0] is of keys, [1] of values
enum Precision { FLOAT32, BFLOAT16, FLOAT16 };
struct Full { const void *held[2]; long room; int precision; };  // [B, n_kv, room, hd] in full precision

static const float BF16_MAX = 3.38953139e38f;
static float number(const void *from, long i, int precision) {
    if (precision == FLOAT32) return ((const float *)from)[i];
    return precision == BFLOAT16 ? to_float(((const bf16 *)from)[i]) : to_float(((const f16 *)from)[i]);
}
static void set_number(void *to, long i, int precision, float x) {
    if (precision == FLOAT32) from_float(within(x, FLT_MAX), (float *)to + i);
    else if (precision == FLOAT16) from_float(x, (f16 *)to + i);  // clamps
    else from_float(within(x, BF16_MAX), (bf16 *)to + i);
}
static void unpack_full(const Full &f, int which, long first, int n, int head_dim, float *to, int n8, int hd) {
    const void *from = f.held[which];
    if (f.precision == FLOAT32) unpack((const float *)from + first * head_dim, n, head_dim, to, n8, hd);
    else if (f.precision == BFLOAT16) unpack((const bf16 *)from + first * head_dim, n, head_dim, to, n8, hd);
    else unpack((const f16 *)from + first * head_dim, n, head_dim, to, n8, hd);
}

// the products of attention.h once for all stores here
static __attribute__((noinline)) void score_tile(int R, const float *q, const float *k, int n8, int hd, float *p) {
    scores(R, q, k, n8, hd, p);
}
static __attribute__((noinline)) void weigh_tile(int R, const float *p, const float *v, int n, int hd, float *acc, int width) {
    weigh(R, p, TILE, 1, v, n, hd, acc, width);
}

INLINE i8 eight_bytes(const uint8_t *from, int have = 8) {
    uint64_t bytes = 0;
    memcpy(&bytes, from, have);
#if defined(__AVX2__)
    return (i8)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes));
#else
    typedef uint8_t u8x8 __attribute__((vector_size(8)));
    return __builtin_convertvector((u8x8)bytes, i8);
#endif
}
// eight codes of BITS bits, which fill BITS bytes, of which `have` are there
template <int BITS> INLINE i8 eight_codes(const uint8_t *from, int have = BITS) {
    if (BITS == 8) return eight_bytes(from, have);
    uint32_t word = 0;
    if (BITS == 3 && have == 3) word = from[0] | from[1] << 8 | from[2] << 16;  // a copy of three bytes goes through memory
    else memcpy(&word, from, have);
    const i8 shifts = {0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS};
    return (i8{} + (int32_t)word) >> shifts & ((1 << BITS) - 1);
}
INLINE v8 load_some(const f16 *from, int have) {  // eight numbers, of which `have` are there, else zeros
    if (have >= 8) return load(from);
    f16 some[8] = {};
    memcpy(some, from, sizeof(f16) * have);
    return load(some);
}
// n rows of codes as `number` makes them: to [n8, hd], where hd is head_dim padded to whole vectors
template <int BITS, class Number> INLINE void each_code(const uint8_t *codes, int n, int head_dim, int hd, float *to, Number number) {
    const int bytes = (head_dim * BITS + 7) / 8, whole = head_dim / 8;
    for (int j = 0; j < n; j++) {
        const uint8_t *row = codes + (long)j * bytes;
        for (int i = 0; i < whole; i++) store(to + j * hd + 8 * i, number(eight_codes<BITS>(row + BITS * i), j, 8 * i));
        if (whole * 8 < hd) store(to + j * hd + 8 * whole, number(eight_codes<BITS>(row + BITS * whole, bytes - BITS * whole), j, 8 * whole));
    }
}
INLINE v8 as_float(i8 x) { return __builtin_convertvector(x, v8); }
