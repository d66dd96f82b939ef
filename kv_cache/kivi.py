"""
KIVI (arXiv 2402.02750, section 3): asymmetric integers of few bits, q = round((x - zero) / scale), with the scales where
the outliers are. Keys have channels that are large in every token, so a key shares its scale with `group` tokens of the same
channel; values have none, so a value shares its with `group` channels of the same token. Keys can be packed only when
a group of tokens is full; the newest `residual` tokens always stay in full precision, the tokens of an open group too.

As in the paper's code, a token attends before its group is packed. One difference: there a prompt attends to itself in full
precision and is packed whole; here each of its tokens sees what it would see if they came one by one, so one-shot, chunks
and single steps give the same codes.
"""

from dataclasses import dataclass

import torch

import kernels
from kv_cache.accounting import kivi_nbytes, kivi_packed
from kv_cache.quantised import QuantisedCache, pack, round_down, round_up, unpack


@dataclass(frozen=True)
class KIVIConfig:
    """configs/cache/kivi.yaml, where each key has its reason."""

    bits: int = 2
    group: int = 32
    residual: int = 32
    key_axis: str = "channel"
    value_axis: str = "token"
    rollback: int = 0

    def __post_init__(self):
        if self.bits not in (2, 3, 4, 8):
            raise ValueError(f"cache.bits={self.bits} is not allowed: 2, 3, 4 or 8")
        if self.group < 1:
            raise ValueError(f"cache.group={self.group} is not allowed: a whole number of at least 1")
        for name in ("residual", "rollback"):
            if getattr(self, name) < 0:
                raise ValueError(f"cache.{name}={getattr(self, name)} is not allowed: a whole number of at least 0")
        for name in ("key_axis", "value_axis"):
            if getattr(self, name) not in ("channel", "token"):
                raise ValueError(f"cache.{name}={getattr(self, name)} is unknown: channel or token")

    calibrated = False

    def label(self):
        axes = "" if (self.key_axis, self.value_axis) == ("channel", "token") else f"-k{self.key_axis}-v{self.value_axis}"
        rollback = f"-back{self.rollback}" if self.rollback else ""
        return f"kivi{self.bits}-g{self.group}-r{self.residual}{axes}{rollback}"


def quantise(x, bits, axis, group):
    """
    x [..., T, hd] to codes [..., T, hd] (uint8), scales and zero points (float16). By axis, one of these for
    channel   each channel and `group` tokens, [..., T / group, hd]; T is a multiple of group
    token     each token and `group` channels, [..., T, ceil(hd / group)]
    The zero point is rounded down and the scale up, so that every x is within half a (stored) scale of its code.
    """
    x = x.float().clamp(torch.finfo(torch.float16).min, torch.finfo(torch.float16).max)  # a zero point has 16 bits
    if axis == "channel":
        x = x.unflatten(-2, (-1, group))  # [..., T/group, group, hd]
        low, high = x.amin(dim=-2), x.amax(dim=-2)
    else:
        parts = x.split(group, dim=-1)  # the last may be narrower
        low = torch.stack([part.amin(dim=-1) for part in parts], dim=-1)
        high = torch.stack([part.amax(dim=-1) for part in parts], dim=-1)
    zero = round_down(low)
    scale = round_up((high - zero.float()) / (2**bits - 1))
    per_scale, per_zero = spread(scale, axis, group, x), spread(zero, axis, group, x)
    codes = ((x - per_zero) / torch.where(per_scale > 0, per_scale, 1.0)).round_().clamp_(0, 2**bits - 1)
    codes = codes.to(torch.uint8)
    return codes.flatten(-3, -2) if axis == "channel" else codes, scale, zero


def spread(numbers, axis, group, x):
    """Scales or zero points in float32, in a shape that fits x: [..., T/group, group, hd] by channel, [..., T, hd] by token."""
    if axis == "channel":
        return numbers.float().unsqueeze(-2)
    return numbers.float().repeat_interleave(group, dim=-1)[..., : x.size(-1)]


def dequantise(codes, scale, zero, axis, group):
    """The numbers [..., T, hd] in float32 that `quantise` stored: zero + scale * code."""
    x = codes.float()
    if axis == "channel":
        x = x.unflatten(-2, (-1, group))  # [..., T/group, group, hd]
        return x.mul_(scale.float().unsqueeze(-2)).add_(zero.float().unsqueeze(-2)).flatten(-3, -2)
    for i, part in enumerate(x.split(group, dim=-1)):  # in place: spread over the channels, scales would be as large as x
        part.mul_(scale[..., i : i + 1].float()).add_(zero[..., i : i + 1].float())
    return x


class KIVICache(QuantisedCache):
    def __init__(self, *shape, config=KIVIConfig(), **kwargs):  # noqa: B008, frozen
        super().__init__(*shape, **kwargs)
        self.config, c = config, config
        B, n_kv, hd = self.batch, self.n_kv, self.head_dim
        room = kivi_packed(self.capacity, c.group, c.residual)
        self.axes = (c.key_axis, c.value_axis)
        each = {"channel": (room // c.group, hd), "token": (room, -(-hd // c.group))}  # scales of a head
        # of keys, of values
        self.codes = [self.empty(B, n_kv, room, (hd * c.bits + 7) // 8, dtype=torch.uint8) for _ in range(2)]
        self.scales = [self.empty(B, n_kv, *each[axis], dtype=torch.float16) for axis in self.axes]
        self.zeros = [self.empty(B, n_kv, *each[axis], dtype=torch.float16) for axis in self.axes]
        # Full precision from token `start` on: the window, and before it packed tokens that a truncation may unpack.
        window = min(self.capacity, c.residual + c.group + -(-c.rollback // c.group) * c.group)
        self.window = [self.empty(B, n_kv, window, hd, dtype=self.dtype) for _ in range(2)]
        self.settle(0, 0)
        self.BLOCK = max(1, self.BLOCK // c.group) * c.group  # whole groups

    def packed(self, tokens):
        return kivi_packed(tokens, self.config.group, self.config.residual)

    def append(self, layer, q, k, v, past):
        """Piece by piece: within one, no token's arrival packs a group that a later one would see packed."""
        t, done, ys = q.size(2), 0, []
        start = self.start
        while done < t:
            held = past + done
            n = min(t - done, self.packed(held) + self.config.residual + self.config.group - held)
            piece = slice(done, done + n)
            self.reading = self.packed(held), start  # what this piece sees
            ys.append(super().append(layer, q[:, :, piece], k[:, :, piece], v[:, :, piece], held))
            start = self.flush(layer, held, held + n, start)
            done += n
        self.reading = self.packed(past + t), start  # what `keys` and `values` read until more comes
        if layer == self.n_layer - 1:
            self.settle(past + t, start)
        return ys[0] if len(ys) == 1 else torch.cat(ys, dim=2)

    def write(self, layer, k, v, at):
        """New tokens go to the window."""
        at -= self.reading[1]
        for window, x in zip(self.window, (k, v), strict=True):
            window[layer][:, :, at : at + x.size(2)] = self.exact(x)

    def flush(self, layer, before, now, start):
        """Pack the groups that have become old enough; returns the token at which the window now starts."""
        c, first, last = self.config, self.packed(before), self.packed(now)
        if first < last:
            for which, axis in enumerate(self.axes):
                codes, scale, zero = quantise(
                    self.window[which][layer][:, :, first - start : last - start], c.bits, axis, c.group
                )
                at = slice(first, last) if axis == "token" else slice(first // c.group, last // c.group)
                self.codes[which][layer][:, :, first:last] = pack(codes, c.bits)
                self.scales[which][layer][:, :, at] = scale
                self.zeros[which][layer][:, :, at] = zero
        new_start = max(start, self.packed(max(0, now - c.rollback)))
        if new_start > start:
            for window in self.window:
                window[layer][:, :, : now - new_start] = window[layer][:, :, new_start - start : now - start].clone()
        return new_start

    def coded(self, total):
        return 0, self.reading[0]

    def blocks(self, total):
        packed = self.reading[0]
        return super().blocks(packed) + [(packed, total)]

    def block(self, which, layer, first, last):
        packed, start = self.reading
        if first == packed:
            return self.window[which][layer][:, :, first - start : last - start].float()
        c, axis = self.config, self.axes[which]
        at = slice(first, last) if axis == "token" else slice(first // c.group, last // c.group)
        codes = unpack(self.codes[which][layer][:, :, first:last], c.bits, self.head_dim)
        return dequantise(codes, self.scales[which][layer][:, :, at], self.zeros[which][layer][:, :, at], axis, c.group)

    def store(self, layer, write=True):
        """The layer's tensors for the kernels, which know the paper's axes and whole vectors of channels; None for others."""
        c = self.config
        if self.axes != ("channel", "token") or (c.group < self.head_dim and c.group % 8):
            return None
        if layer not in self.stores:
            codes, scales, zeros, window = (
                (x[0][layer], x[1][layer]) for x in (self.codes, self.scales, self.zeros, self.window)
            )
            at = (kernels.pointers(*x) for x in (codes, scales, zeros))
            self.stores[layer] = kernels.KIVI(*at, codes[0].size(2), c.bits, min(c.group, 2**30), 0, 0, kernels.Full(*window))
        store = self.stores[layer]
        store.packed, store.start = self.reading
        return store

    def at_once(self):
        """How many tokens may come before a group is packed."""
        return self.packed(self.length) + self.config.residual + self.config.group - self.length

    def advance(self, t):
        """A step has appended t tokens to the windows of all layers."""
        for layer in range(self.n_layer):
            start = self.flush(layer, self.length, self.length + t, self.start)
        self.settle(self.length + t, start)

    def settle(self, length, start):
        self.length, self.start, self.reading = length, start, (self.packed(length), start)

    def truncate(self, length):
        """
        Forget all but the first `length` tokens; exact, or ValueError with nothing changed: tokens that were packed and
        would have to be in the window again are at hand for the newest `rollback` tokens.
        """
        if 0 <= length <= self.length and self.packed(length) < min(self.start, length):
            raise ValueError(
                f"cannot truncate from {self.length} to {length} tokens: token {self.packed(length)} is packed for good; "
                f"a larger cache.rollback keeps more (now {self.config.rollback})"
            )
        super().truncate(length)
        self.settle(length, min(self.start, length))

    def reset(self):
        self.settle(0, 0)

    def held(self):
        packed = self.packed(self.length)
        groups = {"channel": packed // self.config.group, "token": packed}
        layers = range(self.n_layer)
        return {
            "codes": [self.codes[i][layer][:, :, :packed] for i in range(2) for layer in layers],
            "scales": [self.scales[i][layer][:, :, : groups[self.axes[i]]] for i in range(2) for layer in layers],
            "zeros": [self.zeros[i][layer][:, :, : groups[self.axes[i]]] for i in range(2) for layer in layers],
            "window": [self.window[i][layer][:, :, : self.length - self.start] for i in range(2) for layer in layers],
        }

    def formula(self):
        """What `nbytes` must be: kv_cache/accounting.py."""
        c, shape = self.config, (self.n_layer, self.n_kv, self.head_dim, self.length, self.batch)
        return kivi_nbytes(
            *shape, c.bits, c.group, c.residual, self.dtype.itemsize, self.packed(self.length) - self.start,
            c.key_axis == "channel", c.value_axis == "channel",
        )  # fmt: skip
