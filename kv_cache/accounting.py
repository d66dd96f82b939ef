"""
What a KV cache costs, in closed form and in whole bytes. Every cache's `nbytes()`, summed from its real tensors, equals
its formula here exactly; the tests assert it and eval.py reports it for real generations.

Plain arithmetic on whole numbers, nothing imported: calculator/build.py turns these very functions into the page's
JavaScript, so that the page has no formulas of its own.
"""


def dense_nbytes(n_layer, n_kv, head_dim, tokens, batch, itemsize):
    """
    Bytes of a dense cache: 2 x n_layer x n_kv x head_dim x tokens x batch x itemsize (2: keys and values).
    The query heads do not appear: that is the whole point of sharing KV heads (arXiv 1911.02150, section 3).
    """
    return 2 * n_layer * n_kv * head_dim * tokens * batch * itemsize


def latent_nbytes(n_layer, latent, tokens, batch, itemsize):
    """
    Bytes of a multi-head latent attention cache: one vector of `latent` numbers a layer and token, from which the keys and
    values of all heads are made: the compressed part and the shared rotary key (arXiv 2405.04434, section 2.1.3).
    """
    return n_layer * latent * tokens * batch * itemsize


def kivi_packed(tokens, group, residual):
    """How many of `tokens` tokens a KIVI cache has packed: all whole groups older than the newest `residual`."""
    return max(0, tokens - residual) // group * group


def kivi_nbytes(n_layer, n_kv, head_dim, tokens, batch, bits, group, residual):
    """
    Bytes of a KIVI cache by component (arXiv 2402.02750, section 3). Packed tokens have codes of `bits` bits, whole bytes a
    head and token; keys a scale and a zero point a channel and `group` tokens, values a token and `group` channels, in 16
    bits each. The others, the window, are kept in 16 bits.
    """
    packed = kivi_packed(tokens, group, residual)
    heads = n_layer * n_kv * batch
    code_bytes = (head_dim * bits + 7) // 8  # of one head's codes for one token
    channel_groups = (head_dim + group - 1) // group
    scales = heads * (packed // group * head_dim + packed * channel_groups)  # keys' and values'
    return {
        "codes": 2 * heads * packed * code_bytes,
        "scales": 2 * scales,
        "zeros": 2 * scales,
        "window": 2 * heads * (tokens - packed) * head_dim * 2,
    }


def heads_per_device(n_kv, tp):
    """
    KV heads each of `tp` tensor-parallel devices holds: n_kv / tp, but at least one. With more devices than KV heads the
    heads are replicated, and fewer of them save nothing more.
    """
    return max(1, n_kv // tp)
