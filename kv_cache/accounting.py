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


def kivi_nbytes(
    n_layer, n_kv, head_dim, tokens, batch, bits, group, residual, itemsize=2, kept=0, key_channel=True, value_channel=False
):
    """
    Bytes of a KIVI cache by component (arXiv 2402.02750, section 3). Packed tokens have codes of `bits` bits, whole bytes a
    head and token, and scales and zero points in 16 bits each: one a channel and `group` tokens where numbers are quantised
    by channel (as keys are), one a token and `group` channels where by token (as values are). The others, the window, have
    `itemsize` bytes a number, and so have `kept` packed tokens that a truncation may need again.
    """
    packed = kivi_packed(tokens, group, residual)
    heads = n_layer * n_kv * batch
    code_bytes = (head_dim * bits + 7) // 8  # of one head's codes for one token
    by_channel = packed // group * head_dim  # scales of one head
    by_token = packed * ((head_dim + group - 1) // group)
    scales = heads * ((by_channel if key_channel else by_token) + (by_channel if value_channel else by_token))
    return {
        "codes": 2 * heads * packed * code_bytes,
        "scales": 2 * scales,
        "zeros": 2 * scales,
        "window": 2 * heads * (tokens - packed + kept) * head_dim * itemsize,
    }


def fp8_nbytes(n_layer, n_kv, head_dim, tokens, batch, scale="one"):
    """
    Bytes of an 8-bit floating-point cache by component: a byte a number; calibrated scales in 32 bits, one for the keys and
    one for the values of a layer (scale="layer") or of each of its KV heads ("head"), none where the scale is 1 ("one").
    """
    scales = 0 if scale == "one" else 2 * n_layer * (n_kv if scale == "head" else 1)
    return {"codes": dense_nbytes(n_layer, n_kv, head_dim, tokens, batch, 1), "scales": 4 * scales}


def kvquant_nbytes(n_layer, n_kv, head_dim, tokens, batch, bits, key_outliers, value_outliers, sink, itemsize=2):
    """
    Bytes of a KVQuant cache by component (arXiv 2401.18079, section 3). The first `sink` tokens have `itemsize` bytes a
    number. All others have codes of `bits` bits, whole bytes a head and token, and a scale and a zero point for each value
    vector; each channel of the keys has one pair for all tokens; a layer has two tables of 2^bits numbers; all in 16 bits.
    Outliers have `itemsize` bytes and an index of 16 bits: `value_outliers` in every value vector, and of the keys
    `key_outliers` in all, the one number that depends on the text, behind row pointers of 32 bits (None: the keys keep none).
    """
    sunk = min(tokens, sink)
    vectors = n_layer * batch * (tokens - sunk)
    outliers = vectors * value_outliers
    pointers = 0
    if key_outliers is not None:
        outliers = outliers + key_outliers
        pointers = vectors + n_layer
    scales = vectors + n_layer * n_kv * head_dim
    return {
        "codes": 2 * vectors * n_kv * ((head_dim * bits + 7) // 8),
        "scales": 2 * scales,
        "zeros": 2 * scales,
        "tables": 2 * 2 * n_layer * 2**bits,
        "outliers": outliers * itemsize,
        "indices": outliers * 2 + pointers * 4,
        "sink": dense_nbytes(n_layer, n_kv, head_dim, sunk, batch, itemsize),
    }


def heads_per_device(n_kv, tp):
    """
    KV heads each of `tp` tensor-parallel devices holds: n_kv / tp, but at least one. With more devices than KV heads the
    heads are replicated, and fewer of them save nothing more.
    """
    return max(1, n_kv // tp)
