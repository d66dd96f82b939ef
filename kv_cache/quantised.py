"""
What the quantised caches share: codes of any width packed into bytes, 16-bit scales and zero points that never cut a range
short, and attention that reads the store in blocks, so that a full-precision copy of it never exists.

A quantised cache says how it keeps keys and values (`write`) and how it gives a block of them back (`keys`, `values`); all
else of the contract is here. A chunk of tokens attends exactly as its tokens would one by one: each sees what a generation
would hold at its position, so a prompt leaves the same codes however it arrives.
"""

import torch
from torch.nn import functional as F

import kernels

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


class QuantisedCache:
    """
    The contract of kv_cache/dense.py over a store that is not the numbers themselves. `dtype` is that of whatever stays in
    full precision: windows, outliers, attention sinks.
    """

    BLOCK = 128  # tokens dequantised at a time
    MOST = 2**31  # new tokens that the kernels write at once
    rotates = False  # whether keys come before rotary positions, and are turned when read
    position = None  # no captured graphs: decoding.GraphStep is for the dense cache

    def __init__(self, n_layer, n_kv, head_dim, capacity, batch=1, dtype=torch.float32, device="cpu"):
        if dtype not in kernels.PRECISIONS:
            raise ValueError(f"dtype={dtype} is no full precision here: float32, bfloat16 or float16")
        self.n_layer, self.n_kv, self.head_dim, self.batch = n_layer, n_kv, head_dim, batch
        self.capacity, self.dtype, self.device = capacity, dtype, torch.device(device)
        self.length = 0  # tokens held; advances when the last layer has appended

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
        t, past = q.size(2), self.length
        if past + t > self.capacity:
            raise ValueError(f"{past} + {t} tokens do not fit the cache: capacity={self.capacity}")
        shape = (self.batch, self.n_kv, t, self.head_dim)
        if k.shape != shape or v.shape != shape:
            raise ValueError(f"keys {tuple(k.shape)} do not fit the cache's [B, n_kv, t, hd] of {shape}")
        y = self.append(layer, q, k, v, past)
        if layer == self.n_layer - 1:
            self.length = past + t
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

    def at_once(self):
        """How many tokens a step may append: kernels.Step does the whole of it, `write` included."""
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

    def nbytes(self):
        """Bytes in use, by component: the held part of the real tensors."""
        return {name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in self.held().items()}

    def capacity_nbytes(self):
        """Bytes allocated, held or not: the storage of the real tensors."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for ts in self.held().values() for t in ts}
        return sum(storage.nbytes() for storage in storages.values())
