"""
What a KV cache costs, in closed form and in whole bytes. Every cache's `nbytes()`, summed from its real tensors, equals
its formula here exactly; the tests assert it and eval.py reports it for real generations.
"""


def dense_nbytes(n_layer, n_kv, head_dim, tokens, batch, itemsize):
    """
    Bytes of a dense cache: 2 x n_layer x n_kv x head_dim x tokens x batch x itemsize (2: keys and values).
    The query heads do not appear: that is the whole point of sharing KV heads (arXiv 1911.02150, section 3).
    """
    return 2 * n_layer * n_kv * head_dim * tokens * batch * itemsize
