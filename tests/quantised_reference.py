"""
The quantised caches once more, from their papers and in float64 over NumPy arrays. Slow and plain on purpose; it shares no
code with what it checks. One object is one layer that has been given all its tokens: `arrays(T)` is what a cache of T tokens
holds, by component, and `seen(i)` the keys and values that the query of token i reads.

Two things are the repository's and not the papers': what is kept in 16 bits is rounded so that a range is never cut short,
and ranges and quotients are taken in float32, as NumPy has them too, so that codes can be compared to the bit.
"""

import math

import numpy as np

with np.errstate(all="ignore"):
    HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)
    HALVES = np.unique(HALVES[np.isfinite(HALVES)].astype(np.float64))  # every number that float16 has, ascending


def half_down(x):
    """The largest float16 that is at most x; the smallest of all where there is none."""
    return HALVES[np.maximum(np.searchsorted(HALVES, np.float64(x), side="right") - 1, 0)].astype(np.float16)


def half_up(x):
    """The smallest float16 that is at least x; the largest of all where there is none."""
    return HALVES[np.minimum(np.searchsorted(HALVES, np.float64(x), side="left"), len(HALVES) - 1)].astype(np.float16)


def exact(x, dtype):
    """What stays in full precision: x in dtype, and its largest number for what is beyond."""
    return np.clip(x, np.finfo(dtype).min, np.finfo(dtype).max).astype(dtype)


def packed(codes, bits):
    """Codes [..., n] to bytes [..., ceil(n * bits / 8)], bit by bit: bit j of code i is bit i * bits + j of the row."""
    n = codes.shape[-1]
    stream = np.zeros((*codes.shape[:-1], -(-n * bits // 8)), np.uint8)
    for i in range(n):
        for j in range(bits):
            byte, place = divmod(i * bits + j, 8)
            stream[..., byte] |= ((codes[..., i] >> j) & 1).astype(np.uint8) << place
    return stream


def unpacked(stream, bits, n):
    codes = np.zeros((*stream.shape[:-1], n), np.uint8)
    for i in range(n):
        for j in range(bits):
            byte, place = divmod(i * bits + j, 8)
            codes[..., i] |= ((stream[..., byte] >> place) & 1) << j
    return codes


def nearest(x, table):
    """The places in an ascending table of what is nearest to each x; the lower of two that are as near."""
    x, table = np.float64(x), np.float64(table)
    return np.abs(x[..., None] - table).argmin(axis=-1).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# FP8 (arXiv 2209.05433, table 1)


def fp8_number(code, name):
    """What the 8 bits of a code mean; None where they are no finite number."""
    exponent_bits, fraction_bits, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}[name]
    exponent, fraction = divmod(code & 127, 2**fraction_bits)
    if name == "e5m2" and exponent == 31 or name == "e4m3" and (exponent, fraction) == (15, 7):
        return None
    if exponent:
        magnitude = (1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias)
    else:
        magnitude = fraction / 2**fraction_bits * 2.0 ** (1 - bias)
    return -magnitude if code & 128 else magnitude


def fp8_codes(x, name):
    """The codes of the nearest of all numbers; of two as near, that whose last bit is 0; beyond the largest, the largest."""
    magnitudes = np.array([fp8_number(code, name) for code in range(128) if fp8_number(code, name) is not None])
    gap = np.abs(np.abs(np.float64(x))[..., None] - magnitudes)
    code = gap.argmin(axis=-1)
    above = np.minimum(code + 1, len(magnitudes) - 1)
    tie = np.take_along_axis(gap, above[..., None], -1)[..., 0] == gap.min(axis=-1)
    code = np.where(tie & (code % 2 == 1), above, code)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


class FP8:
    """`scales` [2, n_kv or 1] in float32, or None for 1."""

    def __init__(self, keys, values, name, scales=None):
        numbers = np.array([fp8_number(code, name) or 0.0 for code in range(256)])
        self.codes, self.numbers, self.scales = [], [], scales
        for which, x in enumerate((keys, values)):
            scale = np.float32(1) if scales is None else scales[which].astype(np.float32)[:, None, None]
            with np.errstate(over="ignore"):
                self.codes.append(fp8_codes(x / scale, name))
            self.numbers.append(numbers[self.codes[-1]] * np.float64(scale))

    def arrays(self, T):
        scales = [] if self.scales is None else [s.astype(np.float32) for s in self.scales]
        return {"codes": [c[:, :, :T] for c in self.codes], "scales": scales}

    def seen(self, i):
        return [x[:, :, : i + 1] for x in self.numbers]


# ---------------------------------------------------------------------------------------------------------------------
# KIVI (arXiv 2402.02750, section 3)


def integers(x, bits):
    """Codes, scale and zero point of numbers [..., n] that share them along the last axis."""
    x = np.clip(x, HALVES[0], HALVES[-1]).astype(np.float32)
    zero = half_down(x.min(axis=-1))
    scale = half_up((x.max(axis=-1) - zero.astype(np.float32)) / np.float32(2**bits - 1))
    step = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
    codes = np.rint((x - zero.astype(np.float32)[..., None]) / step).clip(0, 2**bits - 1)
    return codes.astype(np.uint8), scale, zero


def by_channel(x, bits, group):
    """Of whole groups of tokens [B, n_kv, T, hd]: codes, scales and zeros [B, n_kv, T / group, hd], and the numbers."""
    parts = []
    for first in range(0, x.shape[2], group):
        codes, scale, zero = integers(np.swapaxes(x[:, :, first : first + group], 2, 3), bits)  # [B, n_kv, hd, group]
        numbers = codes * np.float64(scale)[..., None] + np.float64(zero)[..., None]
        parts.append((np.swapaxes(codes, 2, 3), scale[:, :, None], zero[:, :, None], np.swapaxes(numbers, 2, 3)))
    return [np.concatenate(p, axis=2) for p in zip(*parts, strict=True)]


def by_token(x, bits, group):
    """Of tokens [B, n_kv, T, hd]: codes, scales and zeros [B, n_kv, T, ceil(hd / group)], and the numbers."""
    parts = []
    for first in range(0, x.shape[3], group):
        codes, scale, zero = integers(x[..., first : first + group], bits)
        numbers = codes * np.float64(scale)[..., None] + np.float64(zero)[..., None]
        parts.append((codes, scale[..., None], zero[..., None], numbers))
    return [np.concatenate(p, axis=3) for p in zip(*parts, strict=True)]


class KIVI:
    def __init__(self, keys, values, bits, group, residual, axes=("channel", "token"), dtype=np.float32, rollback=0):
        self.bits, self.group, self.residual, self.axes, self.rollback = bits, group, residual, axes, rollback
        self.window = [exact(x, dtype) for x in (keys, values)]
        room = self.packed(keys.shape[2])
        by = {"channel": by_channel, "token": by_token}
        self.parts = [
            by[axis](x[:, :, :room].astype(np.float32), bits, group) for axis, x in zip(axes, self.window, strict=True) if room
        ]

    def packed(self, T):
        """Whole groups among those that are older than the newest `residual` tokens."""
        return self.group * (max(T - self.residual, 0) // self.group)

    def arrays(self, T):
        packed_tokens, start = self.packed(T), self.packed(T - self.rollback)
        held = {"codes": [], "scales": [], "zeros": [], "window": [x[:, :, start:T] for x in self.window]}
        for (codes, scale, zero, _), axis in zip(self.parts, self.axes, strict=False):
            rows = packed_tokens // self.group if axis == "channel" else packed_tokens
            held["codes"].append(packed(codes[:, :, :packed_tokens], self.bits))
            held["scales"].append(scale[:, :, :rows])
            held["zeros"].append(zero[:, :, :rows])
        return held

    def seen(self, i):
        """Token i attends before its own arrival packs a group."""
        n = self.packed(i)
        window = [np.float64(x[:, :, n : i + 1]) for x in self.window]
        return [np.concatenate((p[3][:, :, :n], w), axis=2) for p, w in zip(self.parts, window, strict=True)] if n else window


# ---------------------------------------------------------------------------------------------------------------------
# KVQuant (arXiv 2401.18079, section 3)


def turned(x, base):
    """Rotary positions of x [..., T, hd]: numbers j and j + hd/2 are one complex number, turned by position * base^(-2j/hd)."""
    T, half = x.shape[-2], x.shape[-1] // 2
    angle = np.arange(T)[:, None] * np.array([base ** (-2 * j / x.shape[-1]) for j in range(half)])
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate((z.real, z.imag), axis=-1)


class KVQuant:
    """`fit` is the layer's, as arrays; `base` that of rotary positions for keys that come without theirs."""

    def __init__(self, keys, values, fit, bits, outliers, sink, dtype=np.float32, base=None):
        B, n_kv, T, hd = keys.shape
        C = n_kv * hd
        self.fit, self.bits, self.sink, self.keeps, self.batch = fit, bits, sink, outliers > 0, B
        self.exact = [exact(x, dtype) for x in (keys, values)]
        # statistics know no heads: [B, T, C]
        k, v = (np.swapaxes(x, 1, 2).reshape(B, T, C).astype(np.float32) for x in (keys, values))

        middle, width = fit["key_middle"].astype(np.float32), fit["key_width"].astype(np.float32)
        z = (k - middle) / np.where(width > 0, width, 1)
        codes = nearest(z, fit["key_table"])
        k_numbers = np.float64(fit["key_table"])[codes] * width.astype(np.float64) + middle
        self.key_outliers = []  # (token, sequence, channel, number), in this order
        for t in range(sink, T) if self.keeps else ():
            for b in range(B):
                for c in np.flatnonzero(np.abs(k[b, t] - middle) > width):
                    number = exact(k[b, t, c], dtype)
                    self.key_outliers.append((t, b, c, number))
                    k_numbers[b, t, c] = number

        # half the share from each end, at least one of each, and something must remain
        ends = min(max(1, round(C * outliers / 2)), (C - 1) // 2) if outliers else 0
        order = np.argsort(v, axis=-1, kind="stable")  # [B, T, C]
        low, high = (np.take_along_axis(v, order[..., [at]], -1)[..., 0] for at in (ends, C - 1 - ends))
        self.middle = half_down((high + low) / np.float32(2))  # [B, T]
        m = self.middle.astype(np.float32)
        self.width = half_up(np.maximum(high - m, m - low))
        w = np.where(self.width > 0, self.width, 1).astype(np.float32)
        z = (v - m[..., None]) / w[..., None]
        v_codes = nearest(z, fit["value_table"])
        v_numbers = np.float64(fit["value_table"])[v_codes] * np.float64(self.width)[..., None] + np.float64(m)[..., None]
        self.value_index = np.concatenate((order[..., ::-1][..., :ends], order[..., :ends]), axis=-1)
        self.value_outliers = exact(np.take_along_axis(v, self.value_index, -1), dtype)
        np.put_along_axis(v_numbers, self.value_index, np.float64(self.value_outliers), -1)

        self.codes, self.numbers = [], []
        for c, numbers, full in zip((codes, v_codes), (k_numbers, v_numbers), self.exact, strict=True):
            self.codes.append(np.swapaxes(c.reshape(B, T, n_kv, hd), 1, 2))
            numbers = np.swapaxes(numbers.reshape(B, T, n_kv, hd), 1, 2)
            self.numbers.append(np.concatenate((np.float64(full[:, :, :sink]), numbers[:, :, sink:]), axis=2))
        if base is not None:
            self.numbers[0] = turned(self.numbers[0], base)

    def arrays(self, T):
        at, first = slice(self.sink, max(T, self.sink)), self.sink
        kept = [o for o in self.key_outliers if o[0] < T]
        rows = np.zeros(self.batch * max(T - first, 0) + 1, np.int32)
        for t, b, _, _ in kept:
            rows[(t - first) * self.batch + b + 1 :] += 1
        dtype = self.value_outliers.dtype
        return {
            "codes": [packed(c[:, :, at], self.bits) for c in self.codes],
            "scales": [self.fit["key_width"], self.width[:, at]],
            "zeros": [self.fit["key_middle"], self.middle[:, at]],
            "tables": [self.fit["key_table"], self.fit["value_table"]],
            "outliers": [np.array([x for *_, x in kept], dtype), self.value_outliers[:, at]],
            "indices": [rows if self.keeps else rows[:0], np.array([c for _, _, c, _ in kept], np.uint16), self.value_index[:, at].astype(np.uint16)],
            "sink": [x[:, :, : min(T, first)] for x in self.exact],
        }  # fmt: skip

    def seen(self, i):
        return [x[:, :, : i + 1] for x in self.numbers]


# ---------------------------------------------------------------------------------------------------------------------
# attention, k-means


def attention(q, layer, past=0):
    """q [B, n_head, t, hd] at positions past.., each over what the layer shows to it -> [B, n_head, t, hd] in float64."""
    n_head, t, hd = q.shape[1:]
    y = np.zeros(q.shape)
    for i in range(t):
        k, v = layer.seen(past + i)
        group = n_head // k.shape[1]
        for h in range(n_head):
            scores = (k[:, h // group] @ np.float64(q[:, h, i])[..., None])[..., 0] / math.sqrt(hd)  # [B, i + 1]
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            y[:, h, i] = (weights[:, None] @ v[:, h // group])[:, 0]
    return y


def cost(z, weight, table):
    """Weighted squared distance of z from the nearest number of a table."""
    return (weight * ((np.float64(z)[:, None] - np.float64(table)) ** 2).min(axis=1)).sum()


def least_cost(z, weight, n):
    """The least cost of any table of n numbers, by dynamic programming over the sorted z."""
    order = np.argsort(z)
    z, w = np.float64(z)[order], np.float64(weight)[order]
    mass, moment, square = (np.concatenate(([0], np.cumsum(w * z**p))) for p in range(3))

    def cell(i, j):  # of z[i:j], around its weighted mean
        m = mass[j] - mass[i]
        return np.maximum(square[j] - square[i] - np.where(m > 0, (moment[j] - moment[i]) ** 2 / np.where(m > 0, m, 1), 0), 0)

    N = len(z)
    best = np.array([cell(0, j) for j in range(N + 1)])
    for _ in range(n - 1):
        best = np.array([min(best[: j + 1] + cell(np.arange(j + 1), j)) for j in range(N + 1)])
    return best[N]
