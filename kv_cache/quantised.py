"""
What the quantised caches share: codes of any width packed into bytes, 16-bit scales and zero points that never cut a range
short, and attention that reads the store in blocks, so that a full-precision copy of it never exists.

A quantised cache says how it keeps keys and values (`write`) and how it gives a block of either back (`block`, or `keys` and `values`); all
else of the contract is here. A chunk of tokens attends exactly as its tokens would one by one: each sees what a generation
would hold at its position, so a prompt leaves the same codes however it arrives.
"""

import torch
from torch.nn import functional as F

import kernels
from kv_cache.contract import Cache

FLOAT16 = torch.finfo(torch.float16)


def pack(codes, bits):
    """Codes [..., n], whole numbers below 2^bits, to bytes [..., ceil(n * bits / 8)]: one little-endian stream of bits."""
    n = codes.size(-1)
    if bits == 8:
        return codes.to(torch.uint8)
    codes = F.pad(codes.int(), (0, -n % 8)).unflatten(-1, (-1, 8))  # [..., n/8, 8]: eight codes fill `bits` whole bytes
    word = (codes << (bits * torch.arange(8, device=codes.device))).sum(dim=-1, dtype=torch.int64)  # [..., n/8]
    stream = word[..., None].view(torch.uint8)[..., :bits].flatten(-2)  # [..., n/8 * bits]
    return stream[..., : (n * bits + 7) // 8]


def unpack(stream, bits, n):
    """The n codes [..., n] in bytes [..., ceil(n * bits / 8)], as uint8."""
    if bits == 8:
        return stream
    stream = F.pad(stream, (0, -stream.size(-1) % bits)).unflatten(-1, (-1, bits))  # [..., n/8, bits]
    word = F.pad(stream, (0, 4 - bits)).view(torch.int32)[..., 0]  # [..., n/8]; 8 codes of 4 bits fill it to the sign bit
    codes = torch.empty(*word.shape, 8, dtype=torch.uint8, device=stream.device)
    for i in range(8):  # one by one: all at once they would be 4 bytes each
        codes[..., i] = (word >> (bits * i)).bitwise_and_(2**bits - 1)
    return codes.flatten(-2)[..., :n]


def round_down(x):
    """x in float16, at most x; what float16 cannot hold becomes its largest or smallest number."""
    x = x.float().clamp(FLOAT16.min, FLOAT16.max)
    y = x.half()
    return torch.where(y.float() > x, torch.nextafter(y, torch.full_like(y, -torch.inf)), y)


def round_up(x):
    """x in float16, at least x, within what float16 can hold."""
    return -round_down(-x)


class QuantisedCache(Cache):
    """
    The contract over a store that is not the numbers themselves. `dtype` is that of whatever stays in
    full precision: windows, outliers, attention sinks.
    """

    BLOCK = 128  # tokens dequantised at a time
    MOST = 2**31  # new tokens that the kernels write at once

    def __init__(self, n_layer, n_kv, head_dim, capacity, batch=1, dtype=torch.float32, device="cpu"):
        if dtype not in kernels.PRECISIONS:
            raise ValueError(f"dtype={dtype} is no full precision here: float32, bfloat16 or float16")
        super().__init__(n_layer, n_kv, head_dim, capacity, batch)
        self.dtype, self.device = dtype, torch.device(device)
        self.stores = {}  # the layers' tensors as the kernels take them, once asked for

    def empty(self, *shape, dtype):
        """One uninitialised tensor a layer."""
        return [torch.empty(shape, dtype=dtype, device=self.device) for _ in range(self.n_layer)]

    def exact(self, x):
        """x in the dtype of full precision; finite stays finite."""
        limit = torch.finfo(self.dtype).max
        return x.clamp(-limit, limit).to(self.dtype)

    def attend(self, layer, q, k, v):
        """
        Append t tokens, k and v [B, n_kv, t, hd], and attend q [B, n_head, t, hd] over all held tokens, causally by
        absolute position -> [B, n_head, t, hd]. Raises ValueError before writing when the capacity would be exceeded.
        """
        self.check(k, v)
        past = self.length
        y = self.append(layer, q, k, v, past)
        if layer == self.n_layer - 1:
            self.length = past + q.size(2)
        return y

    def append(self, layer, q, k, v, past):
        """Append new tokens and attend, each of them to its own code too."""
        by_kernel = q.size(2) <= self.MOST
        store = self.store(layer, write=by_kernel) if kernels.attends(q) else None
        if store is None or not by_kernel:
            self.write(layer, k, v, past)
            store = store and self.store(layer, write=False)  # its outliers may have moved to a larger room
        if store is None:
            return self.read(layer, q, past)
        n = max(1, 256 // (q.size(1) // self.n_kv))  # tokens a call: their queries and scores stay in cache
        parts = zip(*(x.float().split(n, dim=2) for x in (q, k, v)), strict=True)
        ys = [kernels.attend(*part, past + i * n, store) for i, part in enumerate(parts)]
        return ys[0] if len(ys) == 1 else torch.cat(ys, dim=2)

    def keys(self, layer, first, last):
        """Keys [B, n_kv, last - first, hd] of the tokens first.. in float32, at their positions."""
        return self.block(0, layer, first, last)

    def values(self, layer, first, last):
        """Values [B, n_kv, last - first, hd] of the tokens first.. in float32."""
        return self.block(1, layer, first, last)

    def blocks(self, total):
        """The borders (first, last) of the blocks in which `total` held tokens are read."""
        return [(first, min(first + self.BLOCK, total)) for first in range(0, total, self.BLOCK)]

    def coded(self, total):
        """The borders of the tokens among `total` that are held as codes, all others being in full precision."""
        return 0, total

    def read(self, layer, q, past):
        """Attention of q [B, n_head, t, hd], at positions past.., over the store: an online softmax (arXiv 1805.02867)."""
        B, n_head, t, hd = q.shape
        shape = (B, self.n_kv, n_head // self.n_kv, t)  # query head h = kv * group + g: [B, n_kv, group, t]
        rows = q.reshape(*shape, hd).float() / hd**0.5
        top = torch.full((*shape, 1), -torch.inf, device=q.device)
        weight = torch.zeros_like(top)
        y = torch.zeros(*shape, hd, device=q.device)
        for first, last in self.blocks(past + t):
            skip = max(0, first - past)  # new tokens before this block see nothing of it
            n_rows = (shape[2] * (t - skip), hd)
            scores = rows[:, :, :, skip:].reshape(B, self.n_kv, *n_rows) @ self.keys(layer, first, last).transpose(2, 3)
            scores = scores.view(B, self.n_kv, shape[2], t - skip, last - first)
            if last > past + skip + 1:  # the first of these rows does not see all of the block
                at = torch.arange(past + skip, past + t, device=q.device)[:, None]  # [t - skip, 1]
                scores.masked_fill_(torch.arange(first, last, device=q.device) > at, -torch.inf)
            new_top = torch.maximum(top[:, :, :, skip:], scores.amax(dim=-1, keepdim=True))
            shrink = torch.exp(top[:, :, :, skip:] - new_top)
            scores = scores.sub_(new_top).exp_()
            top[:, :, :, skip:] = new_top
            weight[:, :, :, skip:] = weight[:, :, :, skip:] * shrink + scores.sum(dim=-1, keepdim=True)
            part = scores.view(B, self.n_kv, n_rows[0], last - first) @ self.values(layer, first, last)
            y[:, :, :, skip:] = y[:, :, :, skip:] * shrink + part.view(B, self.n_kv, shape[2], t - skip, hd)
        return (y / weight).reshape(B, n_head, t, hd).to(q.dtype)

    def nbytes(self):
        """Bytes in use, by component: the held part of the real tensors."""
        return {name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in self.held().items()}

    def capacity_nbytes(self):
        """Bytes allocated, held or not: the storage of the real tensors."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for ts in self.held().values() for t in ts}
        return sum(storage.nbytes() for storage in storages.values())
