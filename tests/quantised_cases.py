"""The quantised caches that the tests build, the numbers that go in, and how to look at all that they hold."""

import numpy as np
import torch
from hypothesis import strategies as st
from quantised_reference import FP8, KIVI, KVQuant
from reference import small_model

from kv_cache.fp8 import FORMATS, FP8Cache, FP8Config
from kv_cache.kivi import KIVICache, KIVIConfig
from kv_cache.kvquant import KVQuantCache, KVQuantConfig
from model import rotary_table, rotate

HD, GROUP = 12, 8  # a group of 8 channels and one of 4; codes of 3 bits fill 4.5 bytes
CONFIGS = [
    FP8Config("e4m3"), FP8Config("e5m2"), FP8Config("e4m3", "layer"), FP8Config("e5m2", "head"),
    *(KIVIConfig(bits, GROUP, residual=8) for bits in (2, 3, 4, 8)),
    KIVIConfig(2, GROUP, residual=0), KIVIConfig(3, 5, residual=3, rollback=7), KIVIConfig(2, 32, residual=20),
    KIVIConfig(2, GROUP, 8, "token", "channel"), KIVIConfig(4, GROUP, 8, "token", "token"), KIVIConfig(4, GROUP, 8, "channel", "channel", 2),
    *(KVQuantConfig(bits, outliers=0.1, sink=1) for bits in (2, 3, 4)),
    KVQuantConfig(3, outliers=0.0, sink=0), KVQuantConfig(2, outliers=0.01, sink=9, pre_rope=False),
]  # fmt: skip
SAMPLE = [
    FP8Config(),
    FP8Config("e5m2", "head"),
    KIVIConfig(2, 4, 6),
    KIVIConfig(3, 4, 0),
    KVQuantConfig(3, 0.1),
    KVQuantConfig(2, 0.0, 3),
]


def label(config):
    return config.label() if hasattr(config, "label") else None


def random_qkv(n_kv, T, batch=1, n_head=8, hd=HD, seed=0):
    """Keys have a channel that is large in every token, as real ones do."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, T, hd, generator=generator) for heads in (n_head, n_kv, n_kv))
    k[..., -1] = 4 * k[..., -1] + 6
    return q, k, v


def random_fits(n_layer, C, bits, seed=0):
    """Ranges that some keys are outside of, and uneven tables."""
    generator = torch.Generator().manual_seed(seed)
    fits = []
    for _ in range(n_layer):
        middle = torch.randn(C, generator=generator) / 2
        width = 1.5 + torch.rand(C, generator=generator)
        key, value = (torch.sort(2 * torch.rand(2**bits, generator=generator) - 1).values for _ in "kv")
        fits.append({"key_middle": middle, "key_width": width, "key_table": key, "value_table": value})
    return [{name: x.half() for name, x in f.items()} for f in fits]


def random_scales(n_layer, n_kv, config, seed=0):
    if not config.calibrated:
        return None
    heads = n_kv if config.scale == "head" else 1
    return torch.rand(2, n_layer, heads, generator=torch.Generator().manual_seed(seed)) / 100 + 0.001


def rotary(config, capacity, hd=HD):
    """(rotate, cos, sin) as decoding.make_cache gives them, for the caches here that store keys before their positions."""
    model_config = small_model(2, "llama", block_size=capacity, n_embd=8 * hd, n_layer=1).config
    return (rotate, *rotary_table(model_config)) if config.pre_rope else None


def cache_of(config, n_kv, capacity, batch=1, n_layer=1, hd=HD, dtype=torch.float32):
    shape = (n_layer, n_kv, hd, capacity, batch, dtype)
    if isinstance(config, FP8Config):
        return FP8Cache(*shape, config=config, scales=random_scales(n_layer, n_kv, config))
    if isinstance(config, KIVIConfig):
        return KIVICache(*shape, config=config)
    fits = random_fits(n_layer, n_kv * hd, config.bits)
    return KVQuantCache(*shape, config=config, fits=fits, rotary=rotary(config, capacity, hd))


def reference_of(cache, layer, k, v, base=10000.0):
    """The layer of the independent implementation that has been given these keys and values."""
    c, k, v = cache.config, k.numpy(), v.numpy()
    dtype = {torch.float32: np.float32, torch.float16: np.float16}[cache.dtype]
    if isinstance(c, FP8Config):
        scales = cache.scales
        return FP8(k, v, c.format, None if scales is None else scales[:, layer, :, 0, 0].numpy())
    if isinstance(c, KIVIConfig):
        return KIVI(k, v, c.bits, c.group, c.residual, (c.key_axis, c.value_axis), dtype, c.rollback)
    fit = {name: x[layer].numpy() for name, x in cache.fits.items()}
    return KVQuant(k, v, fit, c.bits, c.outliers, c.sink, dtype, base if cache.rotates else None)


def feed(cache, qkv, sizes):
    """Pieces of these sizes, all layers alike but for their numbers' sign -> what each layer attends to."""
    ys = [[] for _ in range(cache.n_layer)]
    for piece in zip(*(x[:, :, cache.length :].split(sizes, dim=2) for x in qkv), strict=True):
        for layer in range(cache.n_layer):
            ys[layer].append(cache.attend(layer, *(-x if layer % 2 else x for x in piece)))
    return [torch.cat(y, dim=2) for y in ys]


def held(cache):
    """All tensors that a cache holds, as bytes that can be compared."""
    return {name: [x.contiguous().view(torch.uint8).clone() for x in xs] for name, xs in cache.held().items()}


def equal(a, b):
    return all(len(a[n]) == len(b[n]) and all(map(torch.equal, a[n], b[n])) for n in a.keys() | b.keys())


def raw(cache):
    """Every tensor behind a cache, held or not, but for the model's rotary table."""
    found, stack = [], [value for name, value in vars(cache).items() if name not in ("rotary", "reading")]
    while stack:
        x = stack.pop()
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            stack.extend(x)
        elif isinstance(x, dict):
            stack.extend(x.values())
    return found


def check_stored(cache, layers):
    """All tensors held are the layers' arrays, bit by bit, but that 0 may be -0."""

    def key(array):
        array = array + array.dtype.type(0) if array.dtype.kind == "f" else array
        return array.dtype.name, array.size, array.tobytes()

    for name, tensors in cache.held().items():
        arrays = [a for layer in layers for a in layer[name] if a.size]
        found = [t.view(torch.uint8).numpy() if t.dtype in FORMATS.values() else t.numpy() for t in tensors if t.numel()]
        if name == "scales" and isinstance(cache, FP8Cache):  # all layers' in one tensor
            arrays, found = (np.sort(np.concatenate([a.ravel() for a in xs])) if xs else xs for xs in (arrays, found))
        assert sorted(map(key, found)) == sorted(map(key, arrays)), name


def pieces(data, T):
    """Any sizes that make T."""
    sizes = []
    while sum(sizes) < T:
        sizes.append(data.draw(st.integers(1, T - sum(sizes)), "size"))
    return sizes


def numbers(cache):
    """The keys and values of the first layer [B, n_kv, length, hd] in float32, as attention reads them block by block."""
    if isinstance(cache, KIVICache):
        cache.reading = cache.packed(cache.length), cache.start
    blocks = cache.blocks(cache.length)
    return [
        torch.cat([read(0, *block) for block in blocks if block[0] < block[1]], dim=2) for read in (cache.keys, cache.values)
    ]
