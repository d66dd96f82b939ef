"""
The contract shared by all caches, and what of it they have in common.

`attend(layer, q, k, v)` appends the new tokens' keys and values, q [B, n_head, t, hd], k and v [B, n_kv, t, hd], and returns
attention over everything held, causal by absolute position; `length`, `truncate`, `reset`, `nbytes`, `formula`,
`capacity_nbytes`. The model passes the cache along and knows nothing else about it but two attributes: `rotates`, whether
the cache stores keys before rotary positions and turns them itself when it reads, and `position`, for captured graphs.

For whole steps in one call, kernels.Step asks `store(layer)` for a layer's tensors, `at_once` and `advance`.
"""


class Cache:
    rotates = False
    position = None

    def __init__(self, n_layer, n_kv, head_dim, capacity, batch):
        self.n_layer, self.n_kv, self.head_dim, self.capacity, self.batch = n_layer, n_kv, head_dim, capacity, batch
        self.length = 0  # tokens held; advances when the last layer has appended

    def check(self, k, v):
        """ValueError for t new tokens' k, v that do not fit: else one head would broadcast to all, or memory be overrun."""
        t = k.size(2)
        if self.length + t > self.capacity:
            raise ValueError(f"{self.length} + {t} tokens do not fit the cache: capacity={self.capacity}")
        shape = (self.batch, self.n_kv, t, self.head_dim)
        if k.shape != shape or v.shape != shape:
            raise ValueError(f"keys {tuple(k.shape)} do not fit the cache's [B, n_kv, t, hd] of {shape}")

    def at_once(self):
        """How many tokens a step may append."""
        return self.capacity

    def advance(self, t):
        """A step has appended t tokens to all layers."""
        self.length += t

    def truncate(self, length):
        """Forget all but the first `length` tokens; exact. ValueError when there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate to {length} tokens: the cache holds {self.length}")
        self.length = length

    def reset(self):
        self.length = 0
