// Attention over KVQuant's codes, tables and outliers, and writing them, kv_cache/kvquant.py.

#include "codes.h"

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
extern "C" long size_of_kvquant() { return sizeof(KVQuant); }
