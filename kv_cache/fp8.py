"""
Keys and values in 8-bit floating point (arXiv 2209.05433): e4m3 has 3 bits of fraction and reaches 448, e5m2 has 2 and
reaches 57,344. A number is divided by a scale, clamped, and cast; reading multiplies by the scale again.

scale=one     1.0 for everything: what inference servers do without calibration
scale=layer   one for the keys and one for the values of a layer, so that the largest number seen in calibration is the
              largest of the format
scale=head    the same for each KV head
"""

from dataclasses import dataclass

import torch

import kernels
from kv_cache.accounting import fp8_nbytes
from kv_cache.quantised import QuantisedCache

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class FP8Config:
    """configs/cache/fp8.yaml, where each key has its reason."""

    format: str = "e4m3"
    scale: str = "one"

    def __post_init__(self):
        if self.format not in FORMATS:
            raise ValueError(f"cache.format={self.format} is unknown: e4m3 or e5m2")
        if self.scale not in ("one", "layer", "head"):
            raise ValueError(f"cache.scale={self.scale} is unknown: one, layer or head")

    @property
    def calibrated(self):
        return self.scale != "one"

    def label(self):
        return f"fp8-{self.format}" + (f"-{self.scale}" if self.calibrated else "")


def fit_scales(key_amax, value_amax, config):
    """
    The scales [2, n_layer, n_kv or 1] in float32 of keys and values, from the largest magnitudes [n_layer, n_kv] seen in
    calibration: the largest number becomes the format's largest.
    """
    amax = torch.stack((key_amax, value_amax)).float()  # [2, n_layer, n_kv]
    if config.scale == "layer":
        amax = amax.amax(dim=2, keepdim=True)  # [2, n_layer, 1]
    scale = amax / torch.finfo(FORMATS[config.format]).max
    return torch.where(scale > 0, scale, 1.0)  # all zeros have no scale


class FP8Cache(QuantisedCache):
    """`scales` [2, n_layer, n_kv or 1] as fit_scales makes them, or None for scale=one."""

    def __init__(self, *shape, config=FP8Config(), scales=None, **kwargs):  # noqa: B008, frozen
        super().__init__(*shape, **kwargs)
        if (scales is None) == config.calibrated:
            raise ValueError(f"cache.scale={config.scale} {'needs' if scales is None else 'has no'} calibrated scales")
        self.config = config
        self.scales = (
            None if scales is None else scales.to(self.device, torch.float32)[..., None, None]
        )  # [2, n_layer, h, 1, 1]
        self.limit = torch.finfo(FORMATS[config.format]).max
        store = (self.batch, self.n_kv, self.capacity, self.head_dim)
        self.codes = [self.empty(*store, dtype=FORMATS[config.format]) for _ in range(2)]  # of keys, of values

    def write(self, layer, k, v, at):
        for which, x in enumerate((k, v)):
            x = x.float()
            if self.scales is not None:
                x = x / self.scales[which, layer]
            # clamped first: a cast beyond the largest number gives NaN or infinity, by format and version
            self.codes[which][layer][:, :, at : at + x.size(2)] = x.clamp(-self.limit, self.limit)

    def block(self, which, layer, first, last):
        x = self.codes[which][layer][:, :, first:last].float()  # 8-bit floats have no arithmetic of their own
        return x if self.scales is None else x.mul_(self.scales[which, layer])

    def store(self, layer, write=True):
        """The layer's tensors for the kernels."""
        if layer not in self.stores:
            codes = kernels.pointers(*(codes[layer] for codes in self.codes))
            scales = kernels.pointers(*((None, None) if self.scales is None else self.scales[:, layer]))
            how = (self.capacity, self.config.scale == "head", self.config.format == "e5m2")
            self.stores[layer] = kernels.FP8(codes, scales, *how)
        return self.stores[layer]

    def held(self):
        return {
            "codes": [t[:, :, : self.length] for tensors in self.codes for t in tensors],
            "scales": [] if self.scales is None else [self.scales],
        }

    def formula(self):
        """What `nbytes` must be: kv_cache/accounting.py."""
        shape = (self.n_layer, self.n_kv, self.head_dim)
        return fp8_nbytes(*shape, self.length, self.batch, self.config.scale)
