"""
The plain KV cache: every key and value of every token, kept as computed.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

import kernels
from kv_cache.accounting import dense_nbytes
from kv_cache.contract import Cache


@dataclass(frozen=True)
class DenseConfig:
    """configs/cache/dense.yaml: there is nothing to choose."""

    calibrated = False

    def label(self):
        return "dense"


class DenseCache(Cache):
    """
    Preallocated: one tensor [B, n_kv, capacity, hd] for the keys and one for the values of each layer, never grown and
    never copied. Sized by n_kv, not by the query heads.
    """

    def __init__(self, n_layer, n_kv, head_dim, capacity, batch=1, dtype=torch.float32, device="cpu"):
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(f"dtype={dtype} cannot be attended over: float32, bfloat16 or float16")
        super().__init__(n_layer, n_kv, head_dim, capacity, batch)
        shape = (batch, n_kv, capacity, head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.position = None  # set by decoding.GraphStep: where the new token goes, as a tensor [1]; and in `window` up to
        self.window = None  # which token to look, since in a captured graph no shape may depend on the length

    def attend(self, layer, q, k, v):
        """
        Append t tokens, k and v [B, n_kv, t, hd], and attend q [B, n_head, t, hd] over all held tokens, causally by
        absolute position -> [B, n_head, t, hd]. Raises ValueError before writing when the capacity would be exceeded.
        """
        B, n_head, t, hd = q.shape
        self.check(k, v)
        past, total = self.length, self.length + t
        keys, values = self.keys[layer], self.values[layer]
        if self.position is not None:
            keys.index_copy_(2, self.position, k.to(keys.dtype))
            values.index_copy_(2, self.position, v.to(keys.dtype))
            seen = torch.arange(self.window, device=q.device) <= self.position  # [window]
            q = q.reshape(B, keys.size(1), -1, hd)  # [B, n_kv, group, hd]
            y = F.scaled_dot_product_attention(
                q.to(keys.dtype), keys[:, :, : self.window], values[:, :, : self.window], attn_mask=seen[None]
            )
            return y.reshape(B, n_head, t, hd).to(k.dtype)
        if layer == len(self.keys) - 1:
            self.length = total
        few = n_head // keys.size(1) * t <= kernels.MAX_ROWS
        if few and kernels.attends(q) and (store := self.store(layer)) is not None:
            return kernels.attend(q, k, v, past, store)
        keys[:, :, past:total] = k  # casts to the cache's dtype
        values[:, :, past:total] = v
        keys, values = keys[:, :, :total], values[:, :, :total]  # views [B, n_kv, total, hd]
        dtype, q = q.dtype, q.to(keys.dtype)
        n_kv = keys.size(1)
        if past == 0 and t > 1:
            y = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=n_kv != n_head)
            return y.to(dtype)
        # The query heads of a group are stacked along t, so K and V are read in place, once for the whole group.
        group = n_head // n_kv
        q = q.reshape(B, n_kv, group * t, hd)  # head h = kv * group + g, so this is [B, n_kv, (g, t), hd]
        mask = None  # one new token sees everything held
        if t > 1:  # new token i, at position past + i, sees keys 0 .. past + i
            mask = torch.ones(t, total, dtype=torch.bool, device=q.device).tril(past).repeat(group, 1)  # [group*t, total]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)  # [B, n_kv, group*t, hd]
        return y.reshape(B, n_head, t, hd).to(dtype)

    def store(self, layer):
        """The layer's tensors for the kernels, or None where they do not know their dtype."""
        keys, values = self.keys[layer], self.values[layer]
        return kernels.Dense(keys, values) if keys.dtype in kernels.NAMES else None

    def nbytes(self):
        """Bytes in use, by component: the held part of the real tensors."""
        return {
            "keys": sum(t[:, :, : self.length].numel() * t.element_size() for t in self.keys),
            "values": sum(t[:, :, : self.length].numel() * t.element_size() for t in self.values),
        }

    def formula(self):
        """What `nbytes` must be: kv_cache/accounting.py."""
        batch, n_kv, _, hd = self.keys[0].shape
        each = dense_nbytes(len(self.keys), n_kv, hd, self.length, batch, self.keys[0].element_size()) // 2
        return {"keys": each, "values": each}

    def capacity_nbytes(self):
        """Bytes allocated, held or not: the storage of the real tensors."""
        return sum(t.untyped_storage().nbytes() for t in self.keys + self.values)
