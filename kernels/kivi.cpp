// Attention over KIVI's packed keys and values, kv_cache/kivi.py. Scales that a whole tile shares are not multiplied into the tile
// but into the few queries (of keys) or weights (of values) that meet it.

#include "codes.h"

struct KIVI {
    const uint8_t *codes[2];  // [B, n_kv, room, code_bytes]
    const f16 *scales[2], *zeros[2];  // of keys [B, n_kv, room / group, hd], of values [B, n_kv, room, ceil(hd / group)]
    long room;
    int bits, group, packed, start;
    Full window;  // from token `start` on; used from token `packed` on
};

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
extern "C" long size_of_kivi() { return sizeof(KIVI); }
