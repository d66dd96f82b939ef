// Attention over keys and values in 8-bit floating point, kv_cache/fp8.py.

#include "codes.h"

struct FP8 { const uint8_t *codes[2]; const float *scales[2]; long room; int per_head, e5m2; };

template <bool E5M2> INLINE v8 from_fp8(const uint8_t *from, int have = 8) {  // both are float16 with bits left out
#if defined(__AVX2__)
    uint64_t bytes = 0;
    memcpy(&bytes, from, have);
    u16x8 x = (u16x8)_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bytes));
#else
    u16x8 x = __builtin_convertvector(eight_bytes(from, have), u16x8);
#endif
    if (E5M2) return from_half(x << 8);
    const u16x8 nan = (u16x8)((x & 0x7f) == 0x7f) & 0x7e00;  // the format's only one
    return from_half((x & 0x80) << 8 | (x & 0x7f) << 7 | nan) * 256.0f;  // the exponent starts 8 lower
}

template <bool E5M2> struct FP8Head {
    const uint8_t *keys, *values;
    float key_scale, value_scale;
    int head_dim;

    int tile(int start, int end) const { return end - start < TILE ? end - start : TILE; }
    void numbers(const uint8_t *from, int n, int hd, float scale, float *to) const {
        for (int j = 0; j < n; j++) {
            int d = 0;
            for (; d + 8 <= head_dim; d += 8) store(to + j * hd + d, scale * from_fp8<E5M2>(from + (long)j * head_dim + d));
            if (d < hd) store(to + j * hd + d, scale * from_fp8<E5M2>(from + (long)j * head_dim + d, head_dim - d));
        }
    }
    void scores(const float *q, int R, int hd, int start, int n, int n8, float *buf, float *p) const {
        numbers(keys + (long)start * head_dim, n, hd, key_scale, buf);
        memset(buf + n * hd, 0, sizeof(float) * (n8 - n) * hd);
        score_tile(R, q, buf, n8, hd, p);
    }
    void weigh(const float *p, int R, int hd, int start, int n, int, float *buf, float *acc) const {
        numbers(values + (long)start * head_dim, n, hd, value_scale, buf);
        weigh_tile(R, p, buf, n, hd, acc, hd);
    }
};

INLINE uint8_t to_fp8(float x, float scale, bool e5m2) {  // nearest, ties to even, within the format's range
    const int fraction = e5m2 ? 2 : 3, lowest = e5m2 ? -14 : -6, drop = 23 - fraction;  // bits; exponent of the least normal number
    const float limit = e5m2 ? 57344.0f : 448.0f;
    x /= scale;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint8_t sign = bits >> 24 & 0x80;
    x = fabsf(x);
    if (x != x) return 0x7f;
    if (x > limit) x = limit;
    if (x < ldexpf(1.0f, lowest)) return sign | (uint8_t)rintf(ldexpf(x, fraction - lowest));
    memcpy(&bits, &x, 4);
    bits += (1u << (drop - 1)) - 1 + (bits >> drop & 1);
    return sign | (uint8_t)((bits >> drop) - ((126 + lowest) << fraction));
}

template <bool E5M2> static FP8Head<E5M2> fp8_head(const Shape &s, const FP8 &f, int b, int h) {
    const long first = ((long)b * s.n_kv + h) * f.room * s.hd;
    const int at = f.per_head ? h : 0;
    return {f.codes[0] + first, f.codes[1] + first, f.scales[0] ? f.scales[0][at] : 1.0f, f.scales[1] ? f.scales[1][at] : 1.0f, s.hd};
}
template <bool E5M2>
static void attend_format(void *store, const Shape &s, int threads, const float *q, const long *qs, const float *k, const long *ks,
                          const float *v, const long *vs, float *y, float *partial) {
    auto held = [&](int b, int h, int begin, int end) {
        FP8Head<E5M2> head = fp8_head<E5M2>(s, *(const FP8 *)store, b, h);
        for (int j = s.past > begin ? s.past : begin; j < end; j++)
            for (int d = 0; d < s.hd; d++) {
                const float *x = k + b * ks[0] + h * ks[1] + (j - s.past) * ks[2], *z = v + b * vs[0] + h * vs[1] + (j - s.past) * vs[2];
                ((uint8_t *)head.keys)[(long)j * s.hd + d] = to_fp8(x[d], head.key_scale, E5M2);
                ((uint8_t *)head.values)[(long)j * s.hd + d] = to_fp8(z[d], head.value_scale, E5M2);
            }
        return head;
    };
    attend_over(s, threads, q, qs, held, y, partial);
}
Attend attend_fp8(const void *store) { return ((const FP8 *)store)->e5m2 ? attend_format<true> : attend_format<false>; }
extern "C" long size_of_fp8() { return sizeof(FP8); }  // for a test: kernels/__init__.py's structure is this one
