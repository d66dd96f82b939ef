"""
KVQuant (arXiv 2401.18079): codes into a table of numbers that were fitted to the model, per layer, instead of evenly spaced
ones.

Keys      quantised before rotary positions, where channels keep their own ranges, and turned to their true positions when
          read (section 3.1, 3.2); each channel's range comes from calibration
Values    one range a token over all heads, found as the token comes (section 3.1)
Table     2^bits numbers in [-1, 1] a layer, by k-means weighted with each number's sensitivity (section 3.3)
Outliers  what lies outside a range is kept apart, sparse, in full precision (section 3.4): of the keys whatever calibration
          has put outside, of each value vector as many of its largest as of its smallest numbers
Sink      the first tokens in full precision, since attention rests on them (section 3.5)

Ranges and tables are fitted on a few batches of training text by calibrate.py.
"""

import ctypes
from dataclasses import dataclass

import torch

import kernels
from kv_cache.accounting import kvquant_nbytes
from kv_cache.quantised import QuantisedCache, pack, round_down, round_up, unpack


@dataclass(frozen=True)
class KVQuantConfig:
    """configs/cache/kvquant.yaml, where each key has its reason."""

    bits: int = 3
    outliers: float = 0.01
    sink: int = 1
    pre_rope: bool = True

    def __post_init__(self):
        if self.bits not in (2, 3, 4):
            raise ValueError(f"cache.bits={self.bits} is not allowed: 2, 3 or 4")
        if not 0 <= self.outliers < 0.5:
            raise ValueError(f"cache.outliers={self.outliers} is not allowed: a share of the numbers, from 0 up to 0.5")
        if self.sink < 0:
            raise ValueError(f"cache.sink={self.sink} is not allowed: a whole number of at least 0")

    calibrated = True

    def fits(self, calibration, dialect):
        """The layers' fits for these options among all in a calibration; ValueError when they are not there."""
        if dialect == "gpt2" and not self.pre_rope:
            raise ValueError("cache.pre_rope=false: the gpt2 dialect has no rotary positions to come after; pre_rope=true")
        key = fit_key(self.bits, self.outliers, self.pre_rope)
        if key not in calibration["fits"]:
            raise ValueError(
                f"the calibration holds no fit for {key}, only for {'; '.join(calibration['fits'])}; "
                f"calibrate.py makes it with outliers=[{self.outliers:g}] again=true"
            )
        return calibration["fits"][key]

    def label(self):
        return f"kvquant{self.bits}-o{self.outliers:g}-s{self.sink}" + ("" if self.pre_rope else "-post")


def fit_key(bits, outliers, pre_rope):
    """How a calibration file names a fit."""
    return f"bits={bits} outliers={outliers:g} pre_rope={str(pre_rope).lower()}"


# ---------------------------------------------------------------------------------------------------------------------
# calibration


BINS = 2**14  # of [-1, 1] in which k-means looks at its data: far finer than any table of 16 numbers
COARSE = 2**10  # of [-1, 1] at whose edges its search for the best cells may cut


def datatype(z, weight, bits):
    """
    The 2^bits numbers, ascending, that minimise sum(weight * (z - nearest)^2) over z and weight [N], z in [-1, 1], weights not
    negative: k-means in one dimension, on sums over bins. The best of all cells that end at coarse edges come from dynamic
    programming, since Lloyd's iterations alone stop far from it where tails are heavy; they then move the borders to fine
    ones. One table for each of `bits`, float64.
    """
    z, weight = z.double(), weight.double()
    weight = weight + 1e-6 * weight.mean() + 1e-30  # numbers whose gradients are zero still count a little
    at = ((z + 1) * (BINS / 2)).long().clamp_(0, BINS - 1)
    mass, moment, square = (
        torch.bincount(at, weight * z**power, BINS).cumsum(0) for power in range(3)
    )  # [BINS], up to and with

    sums = torch.stack([torch.cat((c.new_zeros(1), c[BINS // COARSE - 1 :: BINS // COARSE])) for c in (mass, moment, square)])
    m, s, q = sums[:, None, :] - sums[:, :, None]  # [COARSE + 1, COARSE + 1] each: of the bins from edge i to edge j
    cost = (q - s**2 / m.clamp(min=1e-300)).clamp_(min=0)  # of one number, the mean, for all of them
    cost = torch.where(torch.ones_like(cost, dtype=torch.bool).triu(), cost, torch.inf)
    best, cuts = cost[0], []  # of the bins up to edge j, and where the last cell must start for that
    for _ in range(2 ** max(bits) - 1):
        best, cut = (best[:, None] + cost).min(dim=0)
        cuts.append(cut.tolist())

    tables = []
    for n in (2**b for b in bits):
        edges = [COARSE]
        for cut in reversed(cuts[: n - 1]):
            edges.insert(0, cut[edges[0]])
        edges = torch.tensor([0, *edges], device=z.device)
        inside, total = (c[edges].diff() for c in sums[:2])
        table = torch.where(inside > 0, total / inside.clamp(min=1e-300), edges[1:] * (2 / COARSE) - 1)
        for _ in range(100):
            border = (((table[1:] + table[:-1]) / 2 + 1) * (BINS / 2)).long().clamp_(0, BINS - 1)
            inside, total = (torch.cat((c[border], c[-1:])).diff(prepend=c.new_zeros(1)) for c in (mass, moment))
            new = torch.where(inside > 0, total / inside.clamp(min=1e-300), table)  # an empty cell keeps its number
            if torch.equal(new, table):
                break
            table = new
        tables.append(table.sort().values)  # that of an empty cell may be off by a bin
    return tables


def value_outliers(n, outliers):
    """How many of the n numbers of a value vector are outliers at each end: half the share, and at least one."""
    return min(max(1, round(outliers * n / 2)), (n - 1) // 2) if outliers else 0


def split_values(x, ends):
    """
    x [..., n] -> the middle and half width [...] in float16 of what is no outlier, and the indices [..., 2 * ends] of what
    is: the `ends` largest and `ends` smallest. Rounded so that the range covers all inliers.
    """
    # of equal numbers the first counts, as in kernels/kvquant.cpp: topk picks any
    high, low = x.sort(dim=-1, descending=True, stable=True), x.sort(dim=-1, stable=True)
    top, bottom = high.values[..., ends], low.values[..., ends]
    middle = round_down((top + bottom) / 2)
    width = round_up(torch.maximum(top - middle.float(), middle.float() - bottom))
    return middle, width, torch.cat((high.indices[..., :ends], low.indices[..., :ends]), dim=-1)


def fit(keys, values, key_fisher, value_fisher, bits, outliers):
    """
    One layer's ranges and tables from calibration data: keys, values [N, C] with C = n_kv * hd, and the squared gradients of
    the loss for each of them (the diagonal of its Fisher information). An error in [-1, 1] weighs as much as it is in the
    original: sensitivity times the square of the range.
    Returns for each of `bits` a dict of float16: key_middle, key_width [C] and key_table, value_table [2^bits].
    """
    low, high = keys.quantile(torch.tensor([outliers / 2, 1 - outliers / 2], device=keys.device), dim=0)  # [C] each
    middle = round_down((low + high) / 2)
    width = round_up(torch.maximum(high - middle.float(), middle.float() - low))
    z = (keys - middle.float()) / torch.where(width > 0, width, 1.0).float()  # [N, C]
    inside = z.abs() <= 1
    key_tables = datatype(z[inside], (key_fisher * width.float() ** 2)[inside], bits)

    value_middle, value_width, index = split_values(values, value_outliers(values.size(1), outliers))
    z = (values - value_middle.float()[:, None]) / torch.where(value_width > 0, value_width, 1.0).float()[:, None]
    inside = torch.ones_like(z, dtype=torch.bool).scatter_(1, index, False)
    value_tables = datatype(z[inside], (value_fisher * value_width.float()[:, None] ** 2)[inside], bits)
    return [
        {"key_middle": middle, "key_width": width, "key_table": key_table.half(), "value_table": value_table.half()}
        for key_table, value_table in zip(key_tables, value_tables, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# the cache


class KVQuantCache(QuantisedCache):
    """
    `fits` is a list of what `fit` returns, one a layer. `rotary` is (rotate, cos, sin) of a model with rotary positions whose
    keys come unturned (model.rotate and its tables [block_size, hd]), or None.
    """

    MOST = 8  # all their numbers may be outliers, and room for these is kept
    BLOCK = 32  # while codes become numbers they take several times the numbers' size: together no more than others' blocks

    def __init__(self, *shape, fits, config=KVQuantConfig(), rotary=None, **kwargs):  # noqa: B008, frozen
        super().__init__(*shape, **kwargs)
        self.config, self.rotary, self.rotates = config, rotary, rotary is not None
        B, n_kv, hd, C = self.batch, self.n_kv, self.head_dim, self.n_kv * self.head_dim
        if C > 2**16:
            raise ValueError(f"n_kv * head_dim = {C} does not fit the outliers' 16-bit indices: at most {2**16}")
        self.fits = {name: [f[name].to(self.device) for f in fits] for name in fits[0]}
        room = max(0, self.capacity - config.sink)
        self.codes = [self.empty(B, n_kv, room, (hd * config.bits + 7) // 8, dtype=torch.uint8) for _ in range(2)]
        self.middle, self.width = (self.empty(B, room, dtype=torch.float16) for _ in range(2))  # of each value vector
        self.sink = [self.empty(B, n_kv, min(config.sink, self.capacity), hd, dtype=self.dtype) for _ in range(2)]
        # Outliers of values: a fixed number a token. Of keys: as many as there are, in the order of tokens and of sequences
        # within a token; those of row = token * B + sequence lie from rows[row] to rows[row + 1].
        self.ends = value_outliers(C, config.outliers)
        self.value_index = self.empty(B, room, 2 * self.ends, dtype=torch.uint16)
        self.value_outliers = self.empty(B, room, 2 * self.ends, dtype=self.dtype)
        self.rows = [torch.zeros(room * B + 1 if config.outliers else 0, dtype=torch.int32, device=self.device) for _ in fits]
        self.key_index = self.empty(0, dtype=torch.uint16)
        self.key_outliers = self.empty(0, dtype=self.dtype)

    def encode(self, z, table):
        """The nearest numbers' places in table [2^bits], as codes like z."""
        table = table.float()
        return torch.bucketize(z, (table[1:] + table[:-1]) / 2).to(torch.uint8)

    def write(self, layer, k, v, at):
        sunk = min(max(0, self.config.sink - at), k.size(2))
        if sunk:
            for sink, x in zip(self.sink, (k, v), strict=True):
                sink[layer][:, :, at : at + sunk] = self.exact(x[:, :, :sunk])
        if sunk == k.size(2):
            return
        # [B, n_kv, t, hd] -> [B, t, C]: statistics know no heads
        k, v = (x[:, :, sunk:].transpose(1, 2).flatten(2).float() for x in (k, v))
        first = at + sunk - self.config.sink
        coded = slice(first, first + k.size(1))

        middle, width = (self.fits[name][layer].float() for name in ("key_middle", "key_width"))  # [C]
        z = (k - middle) / torch.where(width > 0, width, 1.0)
        self.put(0, layer, coded, self.encode(z, self.fits["key_table"][layer]))
        if self.config.outliers:
            outside = ((k - middle).abs() > width).transpose(0, 1).flatten(0, 1)  # [t * B, C], row by row; a width may be 0
            row, index = outside.nonzero(as_tuple=True)
            start = self.rows[layer][first * self.batch].item()
            ends = start + outside.sum(dim=1).cumsum(0)
            self.rows[layer][first * self.batch + 1 : coded.stop * self.batch + 1] = ends
            x = k.transpose(0, 1).flatten(0, 1)[row, index]
            of = slice(start, start + len(index))
            self.make_room(layer, of.start, of.stop)
            self.key_index[layer][of], self.key_outliers[layer][of] = index.to(torch.uint16), self.exact(x)

        middle, width, index = split_values(v, self.ends)  # [B, t], [B, t], [B, t, 2 * ends]
        z = (v - middle.float()[..., None]) / torch.where(width > 0, width, 1.0).float()[..., None]
        self.put(1, layer, coded, self.encode(z, self.fits["value_table"][layer]))
        self.middle[layer][:, coded], self.width[layer][:, coded] = middle, width
        self.value_index[layer][:, coded] = index.to(torch.uint16)
        self.value_outliers[layer][:, coded] = self.exact(v.gather(2, index))

    def put(self, which, layer, coded, codes):
        codes = codes.unflatten(2, (self.n_kv, self.head_dim)).transpose(1, 2)  # [B, n_kv, t, hd]
        self.codes[which][layer][:, :, coded] = pack(codes, self.config.bits)

    def make_room(self, layer, held, wanted):
        """Room for `wanted` outliers of the layer's keys, of which `held` are there; it grows by an eighth more."""
        for store in (self.key_index, self.key_outliers):
            if wanted > len(store[layer]):
                larger = store[layer].new_empty(wanted + wanted // 8)
                larger[:held] = store[layer][:held]
                store[layer] = larger

    def coded(self, total):
        return min(self.config.sink, total), total

    def blocks(self, total):
        sink = min(self.config.sink, total)
        coded = [(first + sink, last + sink) for first, last in super().blocks(total - sink)]
        return super().blocks(sink) + coded

    def decode(self, which, layer, first, last, table):
        """Numbers in [-1, 1] of coded tokens, [B, t, C] in float32."""
        codes = unpack(self.codes[which][layer][:, :, first:last], self.config.bits, self.head_dim)  # [B, n_kv, t, hd]
        z = table.float().index_select(0, codes.transpose(1, 2).flatten().int())
        return z.view(self.batch, last - first, -1)

    def heads(self, x):
        return x.unflatten(2, (self.n_kv, self.head_dim)).transpose(1, 2)  # [B, t, C] -> [B, n_kv, t, hd]

    def keys(self, layer, first, last):
        """Keys [B, n_kv, last - first, hd] of the tokens first.. in float32, at their positions."""
        sink = self.config.sink
        if first < sink:
            k = self.sink[0][layer][:, :, first:last].float()
        else:
            at, to = first - sink, last - sink
            k = self.decode(0, layer, at, to, self.fits["key_table"][layer])
            k = k.mul_(self.fits["key_width"][layer].float()).add_(self.fits["key_middle"][layer].float())
            if self.config.outliers:
                rows = self.rows[layer][at * self.batch : to * self.batch + 1].long()
                row = torch.arange(len(rows) - 1, device=self.device).repeat_interleave(rows.diff())
                of = slice(rows[0].item(), rows[-1].item())
                k[row % self.batch, row // self.batch, self.key_index[layer][of].long()] = self.key_outliers[layer][of].float()
            k = self.heads(k)
        if self.rotates:
            rotate, cos, sin = self.rotary
            k = rotate(k, cos[first:last], sin[first:last])
        return k

    def values(self, layer, first, last):
        sink = self.config.sink
        if first < sink:
            return self.sink[1][layer][:, :, first:last].float()
        at = slice(first - sink, last - sink)
        v = self.decode(1, layer, at.start, at.stop, self.fits["value_table"][layer])
        v = v.mul_(self.width[layer][:, at, None].float()).add_(self.middle[layer][:, at, None].float())
        v.scatter_(2, self.value_index[layer][:, at].long(), self.value_outliers[layer][:, at].float())
        return self.heads(v)

    def at_once(self):
        """How many tokens a step may append."""
        return self.MOST

    def store(self, layer, write=True):
        """The layer's tensors for the kernels, with room for the outliers of the new tokens if the kernels are to `write`."""
        c = self.config
        if c.outliers and write:
            held = self.rows[layer][max(0, self.length - c.sink) * self.batch].item()
            self.make_room(layer, held, held + self.MOST * self.batch * self.n_kv * self.head_dim)
        if layer not in self.stores:
            fits = {name: x[layer] for name, x in self.fits.items()}
            tensors = [
                fits["key_middle"], fits["key_width"], fits["key_table"], fits["value_table"], self.middle[layer],
                self.width[layer], self.rows[layer] if c.outliers else None, None, self.value_index[layer], None,
                self.value_outliers[layer], *(self.rotary[1:] if self.rotates else (None, None)),
            ]  # fmt: skip
            at = [None if x is None else x.data_ptr() for x in tensors]
            codes = kernels.pointers(self.codes[0][layer], self.codes[1][layer])
            sizes = (self.codes[0][layer].size(2), c.bits, self.batch, self.n_kv, 2 * self.ends, min(c.sink, self.capacity), 0)
            sink = kernels.Full(*(s[layer] for s in self.sink))
            self.stores[layer] = kernels.KVQuant(codes, *at[:2], (ctypes.c_void_p * 2)(*at[2:4]), *at[4:], *sizes, sink)
        store = self.stores[layer]
        store.key_index, store.key_outliers = self.key_index[layer].data_ptr(), self.key_outliers[layer].data_ptr()
        store.write = write
        return store

    def n_key_outliers(self):
        """Outliers among the keys of all layers and sequences held: the one size that depends on the numbers."""
        coded = max(0, self.length - self.config.sink)
        return sum(rows[coded * self.batch].item() for rows in self.rows) if self.config.outliers else 0

    def held(self):
        coded, layers = max(0, self.length - self.config.sink), range(self.n_layer)
        rows = [r[: coded * self.batch + 1] for r in self.rows]
        kept = [r[-1].item() if len(r) else 0 for r in rows]
        return {
            "codes": [self.codes[i][layer][:, :, :coded] for i in range(2) for layer in layers],
            "scales": self.fits["key_width"] + [w[:, :coded] for w in self.width],
            "zeros": self.fits["key_middle"] + [m[:, :coded] for m in self.middle],
            "tables": self.fits["key_table"] + self.fits["value_table"],
            "outliers": [x[:n] for x, n in zip(self.key_outliers, kept, strict=True)] + [x[:, :coded] for x in self.value_outliers],
            "indices": rows + [x[:n] for x, n in zip(self.key_index, kept, strict=True)] + [x[:, :coded] for x in self.value_index],
            "sink": [s[:, :, : min(self.length, self.config.sink)] for sink in self.sink for s in sink],
        }  # fmt: skip

    def formula(self):
        """What `nbytes` must be: kv_cache/accounting.py."""
        shape = (self.n_layer, self.n_kv, self.head_dim, self.length, self.batch)
        c = self.config
        key_outliers = self.n_key_outliers() if c.outliers else None
        return kvquant_nbytes(*shape, c.bits, key_outliers, 2 * self.ends, c.sink, self.dtype.itemsize)
