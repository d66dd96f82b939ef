// Attention over quantised keys and values where they lie: a tile of codes becomes floats in the first-level cache and is
// used at once by all query rows of its KV head. Scales that a whole tile shares are not multiplied into the tile but into
// the few queries (of keys) or weights (of values) that meet it.

#include <cfloat>

#include "attention.h"

// kernels/__init__.py fills these in; [0] is of keys, [1] of values
enum Precision { FLOAT32, BFLOAT16, FLOAT16 };
struct Full { const void *held[2]; long room; int precision; };  // [B, n_kv, room, hd] in full precision
struct FP8 { const uint8_t *codes[2]; const float *scales[2]; long room; int per_head, e5m2; };
struct KIVI {
    const uint8_t *codes[2];  // [B, n_kv, room, code_bytes]
    const f16 *scales[2], *zeros[2];  // of keys [B, n_kv, room / group, hd], of values [B, n_kv, room, ceil(hd / group)]
    long room;
    int bits, group, packed, start;
    Full window;  // from token `start` on; used from token `packed` on
};
struct KVQuant {
    const uint8_t *codes[2];  // [B, n_kv, room, code_bytes], of tokens from `sunk` on
    const f16 *key_middle, *key_width, *tables[2];  // [n_kv * hd] both, [2^bits] each
    const f16 *value_middle, *value_width;  // [B, room]
    int32_t *rows;  // [room * B + 1]: where the outliers of a token's keys lie
    uint16_t *key_index, *value_index;  // [...], [B, room, ends]
    void *key_outliers, *value_outliers;
    const float *cos, *sin;  // [positions, hd], or null
    long room;
    int bits, B, n_kv, ends, sunk, write;  // ends: outliers of a value vector; write: whether new tokens are yet to be stored
    Full sink;  // the first `sunk` tokens; its precision is the outliers' too
};

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

// ---------------------------------------------------------------------------------------------------------------------

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

// ---------------------------------------------------------------------------------------------------------------------

template <int BITS> struct KIVIHead {
    const KIVI &s;
    long item;  // b * n_kv + h
    int head_dim;

    // A tile lies in the window or among packed tokens: there, where groups are whole vectors of scores, in as many as fit.
    int tile(int start, int end) const {
        if (start < s.packed && end > s.packed) end = s.packed;
        int n = TILE;
        if (start < s.packed) {
            const int left = s.group - start % s.group;  // in the group that a part of the tokens may begin in the middle of
            if (left <= TILE) n = left % 8 || s.group % 8 ? left : left + (TILE - left) / s.group * s.group;
        }
        return n < end - start ? n : end - start;
    }
    void scores(const float *q, int R, int hd, int start, int n, int n8, float *buf, float *p) const {
        if (start >= s.packed) {
            unpack_full(s.window, 0, item * s.window.room + start - s.start, n, head_dim, buf, n8, hd);
            return score_tile(R, q, buf, n8, hd, p);
        }
        const int bytes = (head_dim * BITS + 7) / 8;
        float scaled[R * hd], shift[R];
        for (int done = 0, m; done < n; done += m) {
            const int at = start + done, left = s.group - at % s.group;
            m = n - done < left ? n - done : left;
            const long of = (item * (s.room / s.group) + at / s.group) * head_dim;
            for (int r = 0; r < R; r++) {  // q . (zero + scale * code) = q . zero + (q * scale) . code
                v8 products = {};
                for (int d = 0; d < hd; d += 8) {
                    const v8 x = load(q + r * hd + d);
                    store(scaled + r * hd + d, x * load_some(s.scales[0] + of + d, head_dim - d));
                    products += x * load_some(s.zeros[0] + of + d, head_dim - d);
                }
                shift[r] = sum(products);
            }
            each_code<BITS>(s.codes[0] + (item * s.room + at) * bytes, m, head_dim, hd, buf, [](i8 c, int, int) { return as_float(c); });
            const int m8 = (m + 7) / 8 * 8;
            memset(buf + m * hd, 0, sizeof(float) * (m8 - m) * hd);
            score_tile(R, scaled, buf, m8, hd, p + done);
            for (int r = 0; r < R; r++)
                for (int j = 0; j < m8; j += 8) store(p + r * TILE + done + j, load(p + r * TILE + done + j) + shift[r]);
        }
    }
    void weigh(const float *p, int R, int hd, int start, int n, int n8, float *buf, float *acc) const {
        if (start >= s.packed) {
            unpack_full(s.window, 1, item * s.window.room + start - s.start, n, head_dim, buf, n8, hd);
            return weigh_tile(R, p, buf, n, hd, acc, hd);
        }
        const int bytes = (head_dim * BITS + 7) / 8, groups = (head_dim + s.group - 1) / s.group;
        each_code<BITS>(s.codes[1] + (item * s.room + start) * bytes, n, head_dim, hd, buf, [](i8 c, int, int) { return as_float(c); });
        const f16 *scales = s.scales[1] + (item * s.room + start) * groups, *zeros = s.zeros[1] + (item * s.room + start) * groups;
        float scaled[R * TILE], scale[TILE], zero[TILE];
        for (int g = 0; g < groups; g++) {  // sum of p (zero + scale * code) = sum of p zero + sum of (p * scale) code
            if (groups == 1)
                for (int j = 0; j < n; j += 8) store(scale + j, load_some(scales + j, n - j)), store(zero + j, load_some(zeros + j, n - j));
            else
                for (int j = 0; j < n; j++) scale[j] = to_float(scales[j * groups + g]), zero[j] = to_float(zeros[j * groups + g]);
            const int from = g * s.group, to = g == groups - 1 ? hd : from + s.group;
            for (int r = 0; r < R; r++) {
                float shift = 0.0f;
#pragma omp simd reduction(+ : shift)
                for (int j = 0; j < n; j++) {
                    scaled[r * TILE + j] = p[r * TILE + j] * scale[j];
                    shift += p[r * TILE + j] * zero[j];
                }
                for (int d = from; d < to; d += 8) store(acc + r * hd + d, load(acc + r * hd + d) + shift);
            }
            weigh_tile(R, scaled, buf + from, n, hd, acc + from, to - from);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------

template <int BITS> INLINE v8 look_up(const float *table, i8 code) {
#if defined(__AVX2__)
    v8 low = (v8)_mm256_permutevar8x32_ps((__m256)load(table), (__m256i)code);
    if (BITS < 4) return low;
    v8 high = (v8)_mm256_permutevar8x32_ps((__m256)load(table + 8), (__m256i)code);
    return code > 7 ? high : low;
#else
    v8 x;
    for (int i = 0; i < 8; i++) x[i] = table[code[i]];
    return x;
#endif
}

template <int BITS> struct KVQuantHead {
    const KVQuant &s;
    int b, h, head_dim;

    int tile(int start, int end) const {
        if (start < s.sunk && end > s.sunk) end = s.sunk;
        return end - start < TILE ? end - start : TILE;
    }
    void table(int which, float *to) const {  // [16]
        for (int i = 0; i < 16; i++) to[i] = i < 1 << BITS ? to_float(s.tables[which][i]) : 0.0f;
    }
    void keys(int start, int n, int hd, float *buf) const {
        const long item = (long)b * s.n_kv + h;
        if (start < s.sunk) {
            unpack_full(s.sink, 0, item * s.sink.room + start, n, head_dim, buf, n, hd);
        } else {
            const int bytes = (head_dim * BITS + 7) / 8, at = start - s.sunk;
            float numbers[16], middle[hd], width[hd];
            table(0, numbers);
            for (int d = 0; d < hd; d++) {
                middle[d] = d < head_dim ? to_float(s.key_middle[h * head_dim + d]) : 0.0f;
                width[d] = d < head_dim ? to_float(s.key_width[h * head_dim + d]) : 0.0f;
            }
            each_code<BITS>(s.codes[0] + (item * s.room + at) * bytes, n, head_dim, hd, buf, [&](i8 c, int, int d) {
                return load(middle + d) + load(width + d) * look_up<BITS>(numbers, c);
            });
            for (int j = 0; s.rows && j < n; j++) {
                const long row = (long)(at + j) * s.B + b;
                for (int e = s.rows[row]; e < s.rows[row + 1]; e++) {
                    const int d = s.key_index[e] - h * head_dim;
                    if (d >= 0 && d < head_dim) buf[j * hd + d] = number(s.key_outliers, e, s.sink.precision);
                }
            }
        }
        const int half = head_dim / 2;
        for (int j = 0; s.cos && j < n; j++) {  // pair d is (d, d + half), turned to position start + j
            const float *cos = s.cos + (long)(start + j) * head_dim, *sin = s.sin + (long)(start + j) * head_dim;
            float *x = buf + j * hd;
#pragma omp simd
            for (int d = 0; d < half; d++) {
                const float a = x[d], c = x[d + half];
                x[d] = a * cos[d] - c * sin[d];
                x[d + half] = c * cos[d + half] + a * sin[d + half];
            }
        }
    }
    void scores(const float *q, int R, int hd, int start, int n, int n8, float *buf, float *p) const {
        keys(start, n, hd, buf);
        memset(buf + n * hd, 0, sizeof(float) * (n8 - n) * hd);
        score_tile(R, q, buf, n8, hd, p);
    }
    void weigh(const float *p, int R, int hd, int start, int n, int n8, float *buf, float *acc) const {
        const long item = (long)b * s.n_kv + h;
        if (start < s.sunk) {
            unpack_full(s.sink, 1, item * s.sink.room + start, n, head_dim, buf, n8, hd);
            return weigh_tile(R, p, buf, n, hd, acc, hd);
        }
        const int bytes = (head_dim * BITS + 7) / 8, at = start - s.sunk;
        const long token = (long)b * s.room + at;
        float numbers[16], middle[TILE], width[TILE];
        table(1, numbers);
        for (int j = 0; j < n; j++) middle[j] = to_float(s.value_middle[token + j]), width[j] = to_float(s.value_width[token + j]);
        each_code<BITS>(s.codes[1] + (item * s.room + at) * bytes, n, head_dim, hd, buf, [&](i8 c, int j, int) {
            return middle[j] + width[j] * look_up<BITS>(numbers, c);
        });
        for (long e = token * s.ends; e < (token + n) * s.ends; e++) {
            const int d = s.value_index[e] - h * head_dim;
            if (d >= 0 && d < head_dim) buf[(e / s.ends - token) * hd + d] = number(s.value_outliers, e, s.sink.precision);
        }
        weigh_tile(R, p, buf, n, hd, acc, hd);
    }
};

// ---------------------------------------------------------------------------------------------------------------------

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

template <int BITS>
static void attend_bits(void *store, const Shape &s, int threads, const float *q, const long *qs, const float *k, const long *ks,
                        const float *v, const long *vs, float *y, float *partial) {
    const KIVI &to = *(const KIVI *)store;
    auto held = [&](int b, int h, int begin, int end) {  // new tokens go to the window
        const long item = (long)b * s.n_kv + h, first = (item * to.window.room - to.start) * s.hd;
        for (int which = 0; which < 2; which++) {
            const float *x = which ? v : k;
            const long *xs = which ? vs : ks;
            void *window = (void *)to.window.held[which];
            if (to.window.precision == FLOAT32) append(s, x, xs, b, h, begin, end, (float *)window + first, FLT_MAX);
            else if (to.window.precision == BFLOAT16) append(s, x, xs, b, h, begin, end, (bf16 *)window + first, BF16_MAX);
            else append(s, x, xs, b, h, begin, end, (f16 *)window + first, FLT_MAX);
        }
        return KIVIHead<BITS>{to, item, s.hd};
    };
    attend_over(s, threads, q, qs, held, y, partial);
}
Attend attend_kivi(const void *store) {
    const int bits = ((const KIVI *)store)->bits;
    return bits == 2 ? attend_bits<2> : bits == 3 ? attend_bits<3> : bits == 4 ? attend_bits<4> : attend_bits<8>;
}

// x in 16 bits, at most x; and at least
static f16 round_down(float x) {
    f16 y;
    from_float(x, &y);
    if (to_float(y) > x && to_float(y) > -65504.0f) y.bits = y.bits == 0 ? 0x8001 : y.bits + (y.bits >> 15 ? 1 : -1);
    return y;
}
static f16 round_up(float x) {
    f16 y = round_down(-x);
    y.bits ^= 0x8000;
    return y;
}

// Codes of one vector of all heads, x [n_kv * hd], as places in the table: each head's packed to bytes `next` apart.
template <int BITS>
static void encode(const float *x, const float *middle, const float *width, const f16 *table, int n_kv, int hd, uint8_t *to, long next) {
    const int n = 1 << BITS, bytes = (hd * BITS + 7) / 8;
    float border[n - 1];
    for (int i = 0; i < n - 1; i++) border[i] = (to_float(table[i + 1]) + to_float(table[i])) / 2;
    for (int h = 0; h < n_kv; h++, to += next)
        for (int d = 0; d < hd; d += 8) {
            uint32_t word = 0;
            for (int i = 0; i < 8 && d + i < hd; i++) {
                const int c = h * hd + d + i;
                const float z = (x[c] - middle[c]) / (width[c] > 0 ? width[c] : 1.0f);
                uint32_t code = 0;
                for (int j = 0; j < n - 1; j++) code += border[j] < z;
                word |= code << (BITS * i);
            }
            const int at = d / 8 * BITS;
            memcpy(to + at, &word, bytes - at < BITS ? bytes - at : BITS);
        }
}

// New tokens of all heads, by the team
template <int BITS>
static void write_tables(const KVQuant &to, const Shape &s, const float *k, const long *ks, const float *v, const long *vs) {
    const int C = s.n_kv * s.hd, bytes = (s.hd * BITS + 7) / 8, ends = to.ends / 2;
    float key_middle[C], key_width[C], x[C], middle[C], width[C];
    for (int c = 0; c < C; c++) key_middle[c] = to_float(to.key_middle[c]), key_width[c] = to_float(to.key_width[c]);
#pragma omp for schedule(static)
    for (int b = 0; b < s.B; b++)
        for (int i = 0; i < s.t; i++) {
            const long at = s.past + i - to.sunk, item = (long)b * s.n_kv;
            if (at < 0) {  // a sink
                for (int c = 0; c < C; c++) {
                    const long j = ((item + c / s.hd) * to.sink.room + s.past + i) * s.hd + c % s.hd;
                    set_number((void *)to.sink.held[0], j, to.sink.precision, k[b * ks[0] + c / s.hd * ks[1] + i * ks[2] + c % s.hd]);
                    set_number((void *)to.sink.held[1], j, to.sink.precision, v[b * vs[0] + c / s.hd * vs[1] + i * vs[2] + c % s.hd]);
                }
                continue;
            }
            for (int c = 0; c < C; c++) x[c] = k[b * ks[0] + c / s.hd * ks[1] + i * ks[2] + c % s.hd];
            encode<BITS>(x, key_middle, key_width, to.tables[0], s.n_kv, s.hd, (uint8_t *)to.codes[0] + (item * to.room + at) * bytes, to.room * bytes);

            for (int c = 0; c < C; c++) x[c] = v[b * vs[0] + c / s.hd * vs[1] + i * vs[2] + c % s.hd];
            float bound[2], left[C];  // the largest and smallest of what is no outlier
            const long token = (long)b * to.room + at;
            for (int low = 0; low < 2; low++) {
                memcpy(left, x, sizeof left);
                for (int e = 0; e <= ends; e++) {
                    int best = 0;
                    for (int c = 1; c < C; c++) best = (low ? left[c] < left[best] : left[c] > left[best]) ? c : best;
                    bound[low] = left[best];
                    left[best] = low ? INFINITY : -INFINITY;
                    if (e == ends) break;
                    to.value_index[token * to.ends + low * ends + e] = best;
                    set_number(to.value_outliers, token * to.ends + low * ends + e, to.sink.precision, x[best]);
                }
            }
            const f16 m = round_down((bound[0] + bound[1]) / 2);
            const float above = bound[0] - to_float(m), below = to_float(m) - bound[1];
            const f16 w = round_up(above > below ? above : below);
            ((f16 *)to.value_middle)[token] = m, ((f16 *)to.value_width)[token] = w;
            for (int c = 0; c < C; c++) middle[c] = to_float(m), width[c] = to_float(w);
            encode<BITS>(x, middle, width, to.tables[1], s.n_kv, s.hd, (uint8_t *)to.codes[1] + (item * to.room + at) * bytes, to.room * bytes);
        }
#pragma omp single
    for (int i = 0; i < s.t; i++)
        for (int b = 0; to.rows && s.past + i >= to.sunk && b < s.B; b++) {
            const long row = (long)(s.past + i - to.sunk) * s.B + b;
            int e = to.rows[row];
            for (int c = 0; c < C; c++) {
                const float key = k[b * ks[0] + c / s.hd * ks[1] + i * ks[2] + c % s.hd];
                if (!(fabsf(key - key_middle[c]) > key_width[c])) continue;
                to.key_index[e] = c;
                set_number(to.key_outliers, e++, to.sink.precision, key);
            }
            to.rows[row + 1] = e;
        }
}

template <int BITS>
static void attend_tables(void *store, const Shape &s, int threads, const float *q, const long *qs, const float *k, const long *ks,
                          const float *v, const long *vs, float *y, float *partial) {
    if (((const KVQuant *)store)->write) write_tables<BITS>(*(const KVQuant *)store, s, k, ks, v, vs);
    auto held = [&](int b, int h, int, int) { return KVQuantHead<BITS>{*(const KVQuant *)store, b, h, s.hd}; };
    attend_over(s, threads, q, qs, held, y, partial);
}
Attend attend_kvquant(const void *store) {
    const int bits = ((const KVQuant *)store)->bits;
    return bits == 2 ? attend_tables<2> : bits == 3 ? attend_tables<3> : attend_tables<4>;
}

// so that kernels/__init__.py can check that its structures are these
extern "C" long size_of(int kind) {
    return kind == 2 ? sizeof(FP8) : kind == 3 ? sizeof(KIVI) : sizeof(KVQuant);
}
