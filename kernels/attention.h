// Attention of few queries over many keys and values, whatever they are stored as: in tiles that stay in the first-level
// cache, with an online softmax, and by a team of threads. A store knows, for one KV head, how to take the inner products of
// queries with a tile of its keys, and how to add up a tile of its values by weights.

#pragma once
#include <vector>

#include "vectors.h"

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
// of the columns [0, width) only, a multiple of 8
template <class T>
INLINE void weigh(int M, const float *p, long next_i, long next_j, const T *v, int n, int hd, float *acc, int width) {
    int i = 0;
#define BLOCK(R, NV, d) weigh_block<R, NV>(p + i * next_i, next_i, next_j, v + d, n, hd, acc + i * hd + d)
    const int wide = width / 32 * 32;
    for (; i + 4 <= M; i += 4)
        for (int d = 0; d < wide; d += 16) BLOCK(4, 2, d);
    for (; i + 2 <= M; i += 2)
        for (int d = 0; d < wide; d += 32) BLOCK(2, 4, d);
    for (; i < M; i++)
        for (int d = 0; d < wide; d += 32) BLOCK(1, 4, d);
    for (i = 0; i < M; i++)
        for (int d = wide; d < width; d += 8) BLOCK(1, 1, d);
#undef BLOCK
}
template <class T>
INLINE void weigh(int M, const float *p, long next_i, long next_j, const T *v, int n, int hd, float *acc) {
    weigh(M, p, next_i, next_j, v, n, hd, acc, hd);
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

// Keys and values of one KV head as numbers, [tokens, head_dim] each.
template <class T> struct Dense {
    const T *keys, *values;
    int head_dim;

    int tile(int start, int end) const { return end - start < TILE ? end - start : TILE; }
    // Whole vectors are read where they lie. Others are padded with zeros first; and what is no float32 is made so, where
    // more than two rows would each do it anew.
    bool in_place(int R, int hd, int n, int n8) const { return head_dim == hd && n == n8 && (sizeof(T) == 4 || R <= 2); }
    void scores(const float *q, int R, int hd, int start, int n, int n8, float *buf, float *p) const {
        const T *from = keys + (long)start * head_dim;
        if (in_place(R, hd, n, n8)) return ::scores(R, q, from, n8, hd, p);
        unpack(from, n, head_dim, buf, n8, hd);
        ::scores(R, q, buf, n8, hd, p);
    }
    void weigh(const float *p, int R, int hd, int start, int n, int n8, float *buf, float *acc) const {
        const T *from = values + (long)start * head_dim;
        if (in_place(R, hd, n, n8)) return ::weigh(R, p, TILE, 1, from, n, hd, acc);
        unpack(from, n, head_dim, buf, n8, hd);
        ::weigh(R, p, TILE, 1, buf, n, hd, acc);
    }
};

// One KV head's tokens [begin, end) seen by its R = group * t query rows q [R, hd]; row r sees tokens below limit(r).
// Leaves the running maximum m, the sum l and the weighted values acc [R, hd] of the softmax so far.
template <class Store>
static void attend_part(const float *q, int R, int t, int hd, const Store &held, int begin, int end, int total, float *m,
                        float *l, float *acc) {
    float buf[TILE * hd], p[R * TILE];
    for (int r = 0; r < R; r++) m[r] = -INFINITY, l[r] = 0.0f;
    memset(acc, 0, sizeof(float) * R * hd);
    for (int start = begin, n; start < end; start += n) {
        n = held.tile(start, end);
        const int n8 = (n + 7) / 8 * 8;
        held.scores(q, R, hd, start, n, n8, buf, p);
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
        held.weigh(p, R, hd, start, n, n8, buf, acc);
    }
}

struct Shape { int B, n_kv, group, t, hd, past; };

// How a step attends in one layer: append k, v [B, n_kv, t, hd] to the layer's store, which holds `past` tokens, and attend
// with q [B, n_head, t, hd]: y [B, t, n_head, hd], contiguous. q, k, v come by their strides, the last one 1.
typedef void (*Attend)(void *store, const Shape &s, int threads, const float *q, const long *qs, const float *k, const long *ks,
                       const float *v, const long *vs, float *y, float *partial);
template <class Precision> static void append(const Shape &s, const float *x, const long *xs, int b, int h, int begin, int end, Precision *to, float limit) {
    for (int j = s.past > begin ? s.past : begin; j < end; j++)  // to: where token 0 of this head would be
        for (int d = 0; d < s.hd; d++) from_float(within(x[b * xs[0] + h * xs[1] + (j - s.past) * xs[2] + d], limit), to + (long)j * s.hd + d);
}
Attend attend_fp8(const void *store), attend_kivi(const void *store), attend_kvquant(const void *store);  // fp8.cpp, kivi.cpp, kvquant.cpp

static int parts_of(const Shape &s, int threads) {  // pieces of the tokens, so that every thread has work; none below 128
    if (s.B * s.n_kv % threads == 0) return 1;
    const int pieces = (s.past + s.t) / 128;
    return pieces < 1 ? 1 : pieces < threads ? pieces : threads;
}
static long attend_scratch(const Shape &s, int threads) {
    return (2L + (s.hd + 7) / 8 * 8) * s.group * s.t * s.B * s.n_kv * parts_of(s, threads);
}

// Attention of q [B, n_head, t, hd], by its strides, the last one 1, over the store that `held(b, h, begin, end)` gives of
// each sequence and KV head: y [B, t, n_head, hd], contiguous. The tokens are split over the threads where there are fewer KV
// heads than threads (flash-decoding). For every thread of a team to call; `partial` is its scratch of attend_scratch floats.
template <class Held>
static void attend_over(const Shape &s, int threads, const float *q, const long *qs, Held held, float *y, float *partial) {
    const int items = s.B * s.n_kv, R = s.group * s.t, hd = s.hd, hd8 = (hd + 7) / 8 * 8, total = s.past + s.t;
    const int parts = parts_of(s, threads);
    const long each = (2L + hd8) * R;  // floats a part leaves behind: m [R], l [R], acc [R, hd8]
    const float scale = 1.0f / sqrtf((float)hd);
#pragma omp for schedule(static)
    for (int job = 0; job < items * parts; job++) {
        const int item = job / parts, part = job % parts, b = item / s.n_kv, h = item % s.n_kv;
        const int begin = (long)total * part / parts, end = (long)total * (part + 1) / parts;
        float rows[R * hd8];  // the queries of this KV head, row g * t + i
        memset(rows, 0, sizeof rows);
        for (int r = 0; r < R; r++)
            for (int d = 0; d < hd; d++)
                rows[r * hd8 + d] = scale * q[b * qs[0] + (h * s.group + r / s.t) * qs[1] + r % s.t * qs[2] + d];
        float *m = partial + each * job;
        attend_part(rows, R, s.t, hd8, held(b, h, begin, end), begin, end, total, m, m + R, m + 2 * R);
    }
#pragma omp for schedule(static)
    for (int item = 0; item < items; item++)
        for (int r = 0; r < R; r++) {
            const float *first = partial + each * item * parts;
            float top = -INFINITY, l = 0.0f, weight[parts];
            for (int p = 0; p < parts; p++) top = first[each * p + r] > top ? first[each * p + r] : top;
            for (int p = 0; p < parts; p++) {
                weight[p] = expf(first[each * p + r] - top);
                l += weight[p] * first[each * p + R + r];
            }
            float *to = y + (((long)item / s.n_kv * s.t + r % s.t) * s.n_kv * s.group + item % s.n_kv * s.group + r / s.t) * hd;
            for (int d = 0; d < hd; d++) {
                float sum = 0.0f;
                for (int p = 0; p < parts; p++) sum += weight[p] * first[each * p + 2 * R + (long)r * hd8 + d];
                to[d] = sum / l;
            }
        }
}
