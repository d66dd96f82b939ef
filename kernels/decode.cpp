// Decoding: a step reads every weight and the whole KV cache once and does little with either, so it should run at the
// memory's speed. `attend` reads each held key and value once for all the query heads of its group. `step` is the whole model on t new tokens,
// in one parallel region: at batch 1 the same step from Python costs several times what it reads.

#include "attention.h"

#include <vector>

// a layer of a dense cache: [B, n_kv, capacity, hd] each
struct DenseStore { void *keys, *values; long capacity; };

template <class T>
static void attend_dense(void *store, const Shape &s, int threads, const float *q, const long *qs, const float *k,
                         const long *ks, const float *v, const long *vs, float *y, float *partial) {
    const DenseStore &to = *(DenseStore *)store;
    auto held = [&](int b, int h, int begin, int end) {
        const long first = ((long)b * s.n_kv + h) * to.capacity * s.hd;
        T *keys = (T *)to.keys + first, *values = (T *)to.values + first;
        append(s, k, ks, b, h, begin, end, keys, INFINITY);
        append(s, v, vs, b, h, begin, end, values, INFINITY);
        return Dense<T>{keys, values, s.hd};
    };
    attend_over(s, threads, q, qs, held, y, partial);
}

// ---------------------------------------------------------------------------------------------------------------------
// the whole step

INLINE v8 gelu(v8 x) {  // x Phi(x), by erf to 1.5e-7 (Abramowitz and Stegun 7.1.26)
    v8 z = x * 0.70710678f, a = z < 0.0f ? -z : z, t = 1.0f / (1.0f + 0.3275911f * a);
    v8 tail = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t *
              exp8(-a * a) * 0.5f;
    return x * (z < 0.0f ? tail : 1.0f - tail);
}
INLINE v8 times_sigmoid(v8 x, v8 z) {  // x / (1 + e^-z)
    v8 e = exp8(z < 0.0f ? z : -z);  // of -|z|
    return x * (z < 0.0f ? e : v8{} + 1.0f) / (1.0f + e);
}
INLINE v8 silu(v8 x) { return times_sigmoid(x, x); }
// GPT-2's x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), as x sigmoid(2u)
INLINE v8 gelu_tanh(v8 x) { return times_sigmoid(x, 1.5957691216f * (x + 0.044715f * x * x * x)); }

// out[M][8] = x[M][K] rows[8][K]^T
template <class T> INLINE void eight_columns(int M, int K, const float *x, const T *rows, float (*out)[8]) {
    int m = 0;
    for (; m + 3 <= M; m += 3)
        for (int j = 0; j < 8; j += 4) dots<3, 4>(x + m * K, K, rows + (long)j * K, K, K, out[m] + j, 8);
    for (; m + 2 <= M; m += 2)
        for (int j = 0; j < 8; j += 4) dots<2, 4>(x + m * K, K, rows + (long)j * K, K, K, out[m] + j, 8);
    for (; m < M; m++) dots<1, 8>(x + m * K, K, rows, K, K, out[m], 8);
}

// y[M, N] = x[M, K] w[N, K]^T + b[N]; every thread of the team takes some of the columns. K is a multiple of 8. Then, by
// `what`: STORE it, ADD it to y, or apply an activation (SILU_TIMES multiplies what y held by silu of the sum).
enum What { STORE, ADD, GELU, GELU_TANH, SILU_TIMES };
template <class T>
static void linear(int M, int K, int N, const float *x, const T *w, const T *b, float *y, What what) {
    std::vector<float> unpacked(sizeof(T) == 4 || M < 3 ? 0 : 8 * K);
#pragma omp for schedule(static)
    for (int n = 0; n < N; n += 8) {
        const T *rows = w + (long)n * K;
        const int columns = N - n < 8 ? N - n : 8;
        float out[M][8];
        if (columns < 8) {  // the last ones: a vocabulary need not be a multiple of 8
            memset(out, 0, sizeof out);
            for (int m = 0; m < M; m++)
                for (int j = 0; j < columns; j++) {
                    v8 s = {};
                    for (int k = 0; k < K; k += 8) s += load(x + m * K + k) * load(rows + (long)j * K + k);
                    out[m][j] = sum(s);
                }
        } else if (unpacked.empty()) {
            eight_columns(M, K, x, rows, out);
        } else {  // more than two rows: to float32 once, not once for each
            for (int k = 0; k < 8 * K; k += 8) store(&unpacked[k], load(rows + k));
            eight_columns(M, K, x, unpacked.data(), out);
        }
        float bias[8] = {};
        for (int j = 0; b && j < columns; j++) bias[j] = to_float(b[n + j]);
        for (int m = 0; m < M; m++) {
            float *to = y + (long)m * N + n, had[8] = {};
            const float *before = columns == 8 ? to : (const float *)memcpy(had, to, sizeof(float) * columns);
            v8 s = load(out[m]) + load(bias);
            if (what == ADD) s += load(before);
            if (what == GELU) s = gelu(s);
            if (what == GELU_TANH) s = gelu_tanh(s);
            if (what == SILU_TIMES) s = silu(s) * load(before);
            if (columns == 8) store(to, s);
            else memcpy(to, &s, sizeof(float) * columns);
        }
    }
}

// y[M, C] = LayerNorm or RMSNorm of x[M, C]; each thread for itself: cheaper than waiting for another's
template <class T> static void norm(int M, int C, const float *x, const T *w, const T *b, int rms, float eps, float *y) {
    for (int m = 0; m < M; m++) {
        v8 s = {}, squares = {};
        for (int c = 0; c < C; c += 8) s += load(x + m * C + c);
        const float mean = rms ? 0.0f : sum(s) / C;
        for (int c = 0; c < C; c += 8) squares += (load(x + m * C + c) - mean) * (load(x + m * C + c) - mean);
        const float scale = 1.0f / sqrtf(sum(squares) / C + eps);
        for (int c = 0; c < C; c += 8) {
            v8 z = (load(x + m * C + c) - mean) * scale * load(w + c);
            store(y + m * C + c, b ? z + load(b + c) : z);
        }
    }
}

// kernels/__init__.py fills these in; pointers to weights in the order of `Weights`, layer by layer
struct Model {
    int n_layer, n_head, n_kv, hd, C, inner, V, llama, tanh;
    float eps;
    const void *wte, *wpe, *cos, *sin, *ln_f_w, *ln_f_b, *head;
    const void *const *layers;
};
enum Weights { LN1_W, LN1_B, ATTN_W, ATTN_B, PROJ_W, PROJ_B, LN2_W, LN2_B, GATE_W, FC_W, FC_B, OUT_W, OUT_B, WEIGHTS };

// logits[B, t, V] of the tokens idx[B, t] that follow the `past` ones in the cache; theirs are appended
template <class T>
static void step(int threads, const Model &m, int B, int t, int past, const long *idx, Attend attend, void *const *stores,
                 int rotate_keys, float *logits) {
    const int M = B * t, C = m.C, hd = m.hd, heads = m.n_head * hd, width = heads + 2 * m.n_kv * hd;
    const Shape shape = {B, m.n_kv, m.n_head / m.n_kv, t, hd, past};
    std::vector<float> x(M * C), qkv(M * width), y(M * heads), h(M * m.inner), scratch(attend_scratch(shape, threads));
    const long strides[3] = {(long)t * width, hd, width};  // of q, k and v in qkv [B, t, heads, hd]
    float *q = qkv.data(), *k = q + heads, *v = k + m.n_kv * hd;
    for (int i = 0; i < M; i++)
        for (int c = 0; c < C; c++)
            x[i * C + c] = to_float(((const T *)m.wte)[idx[i] * C + c]) +
                           (m.llama ? 0.0f : to_float(((const T *)m.wpe)[(long)(past + i % t) * C + c]));
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> n(M * C);
        for (int layer = 0; layer < m.n_layer; layer++) {
            const T *const *w = (const T *const *)m.layers + layer * WEIGHTS;
            norm(M, C, x.data(), w[LN1_W], w[LN1_B], m.llama, m.eps, n.data());
            linear(M, C, width, n.data(), w[ATTN_W], w[ATTN_B], q, STORE);
            if (m.llama) {
#pragma omp for schedule(static)
                for (int i = 0; i < M; i++) {  // rotate queries, and keys unless the cache does: pair d is (d, d + hd/2)
                    const float *cos = (const float *)m.cos + (past + i % t) * hd;
                    const float *sin = (const float *)m.sin + (past + i % t) * hd;
                    for (int head = 0; head < m.n_head + rotate_keys * m.n_kv; head++) {
                        float *z = q + (long)i * width + head * hd;
                        for (int d = 0; d < hd / 2; d++) {
                            const float a = z[d], b = z[d + hd / 2];
                            z[d] = a * cos[d] - b * sin[d];
                            z[d + hd / 2] = b * cos[d + hd / 2] + a * sin[d + hd / 2];
                        }
                    }
                }
            }
            attend(stores[layer], shape, threads, q, strides, k, strides, v, strides, y.data(), scratch.data());
            linear(M, heads, C, y.data(), w[PROJ_W], w[PROJ_B], x.data(), ADD);
            norm(M, C, x.data(), w[LN2_W], w[LN2_B], m.llama, m.eps, n.data());
            linear(M, C, m.inner, n.data(), w[FC_W], w[FC_B], h.data(), m.llama ? STORE : m.tanh ? GELU_TANH : GELU);
            if (m.llama) linear(M, C, m.inner, n.data(), w[GATE_W], (const T *)nullptr, h.data(), SILU_TIMES);
            linear(M, m.inner, C, h.data(), w[OUT_W], w[OUT_B], x.data(), ADD);
        }
        norm(M, C, x.data(), (const T *)m.ln_f_w, (const T *)m.ln_f_b, m.llama, m.eps, n.data());
        linear(M, C, m.V, n.data(), (const T *)m.head, (const T *)nullptr, logits, STORE);
    }
}

// by the kind of store, as kernels/__init__.py counts them
static Attend attend_of(int kind, const void *store) {
    if (kind == 0) return attend_dense<float>;
    if (kind == 1) return attend_dense<bf16>;
    return kind == 2 ? attend_fp8(store) : kind == 3 ? attend_kivi(store) : attend_kvquant(store);
}

extern "C" void attend(int threads, const Shape *s, int kind, void *store, const float *q, const long *qs, const float *k,
                       const long *ks, const float *v, const long *vs, float *y) {
    std::vector<float> scratch(attend_scratch(*s, threads));
#pragma omp parallel num_threads(threads)
    attend_of(kind, store)(store, *s, threads, q, qs, k, ks, v, vs, y, scratch.data());
}

#define STEP(name, T)                                                                                                   \
    extern "C" void name(int threads, const Model *m, int B, int t, int past, const long *idx, int kind,               \
                         void *const *stores, int rotate_keys, float *logits) {                                         \
        step<T>(threads, *m, B, t, past, idx, attend_of(kind, stores[0]), stores, rotate_keys, logits);                 \
    }
STEP(step_float32, float)
STEP(step_bfloat16, bf16)
