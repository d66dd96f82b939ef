// Causal attention for training: T tokens over themselves, and its gradients. Every product is of tiles in the first-level
// cache, and the weights are computed anew in the backward pass (FlashAttention, arXiv 2205.14135, algorithms 1 and 4); a
// group's query heads meet each key and value while it is there. q, dy, dq [B, n_head, T, hd] and k, v, dk, dv
// [B, n_kv, T, hd] come by their strides, the last one 1; y [B, T, n_head, hd] is contiguous; lse [B, n_head, T] is the log
// of each row's sum of exponentials.

#include "attention.h"

// rows [first, first + n) of one head, x [T, hd] by its row stride, as float32 padded to hd8
template <class A> static void gather(const A *x, long stride, int first, int n, int hd, int hd8, float scale, float *to) {
    memset(to, 0, sizeof(float) * n * hd8);
    for (int i = 0; i < n; i++)
        for (int d = 0; d < hd; d++) to[i * hd8 + d] = scale * to_float(x[(first + i) * stride + d]);
}
template <class A> static void scatter(const float *x, int n, int hd, int hd8, A *to, long stride, int first) {
    for (int i = 0; i < n; i++)
        for (int d = 0; d < hd; d++) from_float(x[i * hd8 + d], to + (first + i) * stride + d);
}

template <class A>
static void causal_forward(int threads, int B, int n_kv, int group, int T, int hd, const A *q, const long *qs, const A *k,
                           const long *ks, const A *v, const long *vs, A *y, float *lse) {
    const int hd8 = (hd + 7) / 8 * 8, n_head = n_kv * group;
    const float scale = 1.0f / sqrtf((float)hd);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int item = 0; item < B * n_kv; item++) {
        const int b = item / n_kv, h = item % n_kv;
        float *kf = new float[2L * T * hd8], *vf = kf + (long)T * hd8;
        float rows[ROWS * hd8], m[ROWS], l[ROWS], acc[ROWS * hd8];
        gather(k + b * ks[0] + h * ks[1], ks[2], 0, T, hd, hd8, 1.0f, kf);
        gather(v + b * vs[0] + h * vs[1], vs[2], 0, T, hd, hd8, 1.0f, vf);
        for (int head = h * group; head < (h + 1) * group; head++)
            for (int i = 0; i < T; i += ROWS) {
                const int n = T - i < ROWS ? T - i : ROWS;
                gather(q + b * qs[0] + head * qs[1], qs[2], i, n, hd, hd8, scale, rows);
                attend_part(rows, n, n, hd8, Dense<float>{kf, vf, hd8}, 0, i + n, i + n, m, l, acc);
                for (int r = 0; r < n; r++) {
                    lse[((long)b * n_head + head) * T + i + r] = m[r] + logf(l[r]);
                    for (int d = 0; d < hd8; d += 8) store(acc + r * hd8 + d, load(acc + r * hd8 + d) / l[r]);
                }
                scatter(acc, n, hd, hd8, y + ((long)b * T * n_head + head) * hd, (long)n_head * hd, i);
            }
        delete[] kf;
    }
}

template <class A>
static void causal_backward(int threads, int B, int n_kv, int group, int T, int hd, const A *q, const long *qs, const A *k,
                            const long *ks, const A *v, const long *vs, const A *y, const float *lse, const A *dy,
                            const long *dys, A *dq, const long *dqs, A *dk, const long *dks, A *dv, const long *dvs) {
    const int hd8 = (hd + 7) / 8 * 8, n_head = n_kv * group, T8 = (T + 7) / 8 * 8;
    const float scale = 1.0f / sqrtf((float)hd);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int item = 0; item < B * n_kv; item++) {
        const int b = item / n_kv, h = item % n_kv;
        const long size = (long)T8 * hd8;
        float *kf = new float[4 * size](), *vf = kf + size, *dkf = vf + size, *dvf = dkf + size;  // zeros
        float qf[ROWS * hd8], yf[ROWS * hd8], dyf[ROWS * hd8], dqf[ROWS * hd8], p[ROWS * TILE], ds[ROWS * TILE], D[ROWS];
        gather(k + b * ks[0] + h * ks[1], ks[2], 0, T, hd, hd8, 1.0f, kf);
        gather(v + b * vs[0] + h * vs[1], vs[2], 0, T, hd, hd8, 1.0f, vf);
        for (int head = h * group; head < (h + 1) * group; head++)
            for (int i = 0; i < T; i += ROWS) {
                const int n = T - i < ROWS ? T - i : ROWS;
                const float *row_lse = lse + ((long)b * n_head + head) * T + i;
                gather(q + b * qs[0] + head * qs[1], qs[2], i, n, hd, hd8, scale, qf);
                gather(y + ((long)b * T * n_head + head) * hd, (long)n_head * hd, i, n, hd, hd8, 1.0f, yf);
                gather(dy + b * dys[0] + head * dys[1], dys[2], i, n, hd, hd8, 1.0f, dyf);
                memset(dqf, 0, sizeof dqf);
                for (int r = 0; r < n; r++) {
                    v8 s = {};
                    for (int d = 0; d < hd8; d += 8) s += load(yf + r * hd8 + d) * load(dyf + r * hd8 + d);
                    D[r] = sum(s);
                }
                for (int start = 0; start < i + n; start += TILE) {
                    const int cols = i + n - start < TILE ? i + n - start : TILE, cols8 = (cols + 7) / 8 * 8;
                    const float *kt = kf + start * hd8, *vt = vf + start * hd8;
                    scores(n, qf, kt, cols8, hd8, p);
                    scores(n, dyf, vt, cols8, hd8, ds);  // dp, for now
                    for (int r = 0; r < n; r++) {
                        int seen = i + r + 1 - start;
                        for (int j = 0; j < cols8; j += 8) {
                            v8 w = exp8(load(p + r * TILE + j) - row_lse[r]);
                            for (int u = seen - j; u < 8; u++) w[u < 0 ? 0 : u] = 0.0f;
                            store(p + r * TILE + j, w);
                            store(ds + r * TILE + j, w * (load(ds + r * TILE + j) - D[r]));
                        }
                    }
                    weigh(n, ds, TILE, 1, kt, cols, hd8, dqf);                          // dq[r] += ds[r][j] k[j]
                    weigh(cols, ds, 1, TILE, qf, n, hd8, dkf + (long)start * hd8);      // dk[j] += ds[r][j] q[r]
                    weigh(cols, p, 1, TILE, dyf, n, hd8, dvf + (long)start * hd8);      // dv[j] += p[r][j] dy[r]
                }
                for (int x = 0; x < n * hd8; x++) dqf[x] *= scale;
                scatter(dqf, n, hd, hd8, dq + b * dqs[0] + head * dqs[1], dqs[2], i);
            }
        scatter(dkf, T, hd, hd8, dk + b * dks[0] + h * dks[1], dks[2], 0);
        scatter(dvf, T, hd, hd8, dv + b * dvs[0] + h * dvs[1], dvs[2], 0);
        delete[] kf;
    }
}

#define CAUSAL(forward, backward, A)                                                                                    \
    extern "C" void forward(int threads, int B, int n_kv, int group, int T, int hd, const A *q, const long *qs,        \
                            const A *k, const long *ks, const A *v, const long *vs, A *y, float *lse) {                 \
        causal_forward(threads, B, n_kv, group, T, hd, q, qs, k, ks, v, vs, y, lse);                                    \
    }                                                                                                                   \
    extern "C" void backward(int threads, int B, int n_kv, int group, int T, int hd, const A *q, const long *qs,       \
                             const A *k, const long *ks, const A *v, const long *vs, const A *y, const float *lse,     \
                             const A *dy, const long *dys, A *dq, const long *dqs, A *dk, const long *dks, A *dv,      \
                             const long *dvs) {                                                                         \
        causal_backward(threads, B, n_kv, group, T, hd, q, qs, k, ks, v, vs, y, lse, dy, dys, dq, dqs, dk, dks, dv,    \
                        dvs);                                                                                           \
    }
CAUSAL(causal_forward_float32, causal_backward_float32, float)
CAUSAL(causal_forward_bfloat16, causal_backward_bfloat16, bf16)
