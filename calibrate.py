"""
What quantised caches have to know of a model beforehand, from a few windows of its training text: the largest keys and
values (cache=fp8 with a calibrated scale), and the ranges, tables and outlier thresholds of cache=kvquant.

    python calibrate.py ckpt=mha.pt                    one checkpoint: seconds for a tiny model
    python calibrate.py sweep=cpu                      every finished training run of runs/cpu/
    python calibrate.py ckpt=mha.pt outliers=[0.01,0.05]      for these shares of outliers, and for none

Writes a small file beside the checkpoint, NAME.calibration.pt, tied to its weights by their sha256, which sample.py and
eval.py find by themselves. Prints for each layer the largest key and value, and how much the ranges of the key channels
differ, before and after rotary positions.
"""

import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

from cli import InputError, script
from kv_cache.kvquant import fit, fit_key
from model import rotate
from storage import calibration_path, checkpoints_of, digest, load_checkpoint, load_model, save_checkpoint
from stream import load_data
from tracking import commit, provenance
from training import set_up_device

BITS = (2, 3, 4)
PICTURE = 128  # tokens
WINDOW = 2048  # tokens of the longest window, as in the paper


def collect(model, samples):
    """
    Keys (before rotary positions) and values of every layer, and the gradients of the loss for each of their numbers:
    samples, pairs of inputs and targets [1, T] -> four lists of a tensor [N, T, n_kv, hd] a layer: keys, values, key and value
    gradients.
    """
    c = model.config
    C = c.n_kv * c.head_dim
    probes, found = [], [[[] for _ in range(c.n_layer)] for _ in range(4)]

    def probe(module, args, output):  # a zero added to the projection, whose gradient is the projection's
        zero = torch.zeros_like(output[..., -2 * C :], requires_grad=True)
        probes.append((output[..., -2 * C :].detach(), zero))
        return torch.cat((output[..., : -2 * C], output[..., -2 * C :] + zero), dim=-1)

    hooks = [block.attn.c_attn.register_forward_hook(probe) for block in model.h]
    model.requires_grad_(False)
    try:
        for x, y in tqdm(samples, desc="forward, backward", unit="window", disable=None, leave=False):
            probes.clear()
            model(x, y)[1].backward()
            for layer, (kv, zero) in enumerate(probes):
                for which, part in enumerate((*kv.split(C, dim=-1), *zero.grad.split(C, dim=-1))):
                    found[which][layer].append(part.unflatten(-1, (c.n_kv, c.head_dim)))  # [1, T, n_kv, hd]
    finally:
        for hook in hooks:
            hook.remove()
    return [[torch.cat(parts) for parts in layers] for layers in found]


def turned(model, x):
    """x [N, T, n_kv, hd] at its positions; unchanged where positions are learned. Turns gradients as well as keys."""
    if model.config.dialect == "gpt2":
        return x
    return rotate(x.transpose(1, 2), model.cos[: x.size(1)], model.sin[: x.size(1)]).transpose(1, 2)


def calibrate_for(model, idx, config):
    """A calibration for one KVQuant `config` on idx [1, T], without sensitivities: enough where only speed matters."""
    with torch.enable_grad():
        keys, values, *_ = collect(model, [(idx, idx)])
    keys = [turned(model, k) for k in keys] if not config.pre_rope else keys
    fits = []
    for k, v in zip(keys, values, strict=True):
        k, v = (x.flatten(2).flatten(0, 1) for x in (k, v))  # [T, C]
        fits += fit(k, v, torch.ones_like(k), torch.ones_like(v), (config.bits,), config.outliers)
    return {"fits": {fit_key(config.bits, config.outliers, config.pre_rope): fits}}


def is_done(file, weights, keys):
    """Whether the calibration in `file` is of these weights and holds all these fits."""
    try:
        found = torch.load(file, weights_only=True)
        return found["weights"] == weights and found["fits"].keys() >= set(keys)
    except Exception:  # missing, damaged or of another kind: it is made anew
        return False


def calibrate(path, cfg, device):
    """Write the calibration of one checkpoint and print what it says."""
    file = calibration_path(path)
    checkpoint = load_checkpoint(path, device)
    model = load_model(checkpoint, device).eval()
    c, weights = model.config, digest(model)
    name = f"{checkpoint['config']['sweep']}/{checkpoint['config']['name']}"
    shares = sorted({0.0, *map(float, cfg.outliers)})
    if not cfg.again and is_done(file, weights, [fit_key(bits, share, True) for bits in BITS for share in shares]):
        print(f"{name}: {file} is there (again=true makes it anew)")
        return
    T = min(c.block_size, WINDOW, cfg.tokens)
    data = load_data(checkpoint["data"]["dataset"], cfg.source, T, checkpoint["tokenizer"])
    if checkpoint["data"]["sha256"] not in (None, data.meta["sha256"]):  # None: trained on none of our texts
        raise InputError(
            f"{path} was trained on {checkpoint['data']['corpus']}, not on {data.meta['corpus']}: give source= its text"
        )
    n = max(1, cfg.tokens // T)
    start = time.perf_counter()
    keys, values, key_grads, value_grads = collect(model, [(x.to(device), y.to(device)) for x, y in data.samples(n, T)])
    fits = {}
    print(f"{name}: n_kv={c.n_kv}, {n * T:,} tokens of {data.meta['corpus']}")
    print("  layer   largest key   value   widest key channel / median: before, after rotary positions")
    key_amax, value_amax, value_reach, reaches = [], [], [], {True: [], False: []}
    for layer in tqdm(range(c.n_layer), desc="k-means", unit="layer", disable=None, leave=False):
        v, dv = (x[layer].flatten(2).flatten(0, 1).float() for x in (values, value_grads))  # [n*T, C]
        value_reach.append(v.abs().amax(dim=0))  # [C]
        ratio = []
        for pre_rope in (True, False) if c.dialect == "llama" else (True,):
            k, dk = keys[layer], key_grads[layer]
            if not pre_rope:
                k, dk = turned(model, k), turned(model, dk)
            k, dk = (x.flatten(2).flatten(0, 1).float() for x in (k, dk))  # [n*T, C]
            reach = k.abs().amax(dim=0)
            ratio.append(f"{reach.max() / reach.median():.1f}")
            reaches[pre_rope].append(reach)
            for outliers in shares:
                for bits, fitted in zip(BITS, fit(k, v, dk.square(), dv.square(), BITS, outliers), strict=True):
                    fits.setdefault(fit_key(bits, outliers, pre_rope), []).append(fitted)
        key_amax.append(turned(model, keys[layer]).abs().amax(dim=(0, 1, 3)))  # [n_kv]
        value_amax.append(values[layer].abs().amax(dim=(0, 1, 3)))
        tqdm.write(f"  {layer:>5}   {key_amax[-1].max():>11.2f}   {value_amax[-1].max():>5.2f}   {', '.join(ratio)}")
    # for pictures: how far each channel reaches, and some tokens of the layer whose keys have the widest channel
    reach = {"keys": reaches[True], "turned": reaches[False], "values": value_reach}
    widest = max(range(c.n_layer), key=lambda i: (reaches[True][i].max() / reaches[True][i].median()).item())
    tokens = {"keys": keys[widest], "turned": turned(model, keys[widest]), "values": values[widest]}
    picture = {name: x[0, :PICTURE].flatten(1).half() for name, x in tokens.items()}  # [PICTURE, C]
    save_checkpoint(
        file,
        {
            "weights": weights, "tokens": n * T, "data": checkpoint["data"], "key_amax": torch.stack(key_amax),
            "value_amax": torch.stack(value_amax), "fits": fits, "picture": {"layer": widest, **picture},
            "reach": {name: torch.stack(x) for name, x in reach.items() if x},  # [n_layer, C]
            "commit": commit(provenance()),
        },
    )  # fmt: skip
    print(f"  {file}: {file.stat().st_size:,} bytes, {time.perf_counter() - start:.0f} s", flush=True)


@dataclass(frozen=True)
class Settings:
    """configs/calibrate.yaml, where each key has its reason."""

    ckpt: str | None
    sweep: str | None
    source: str | None
    tokens: int
    outliers: list
    again: bool
    device: str
    threads: int | None

    def __post_init__(self):
        if self.tokens < 16:
            raise ValueError(f"tokens={self.tokens} is not allowed: a whole number of at least 16")
        if any(type(x) not in (int, float) or not 0 <= x < 0.5 for x in self.outliers):
            raise ValueError(
                f"outliers={self.outliers} is not allowed: a list of shares from 0 up to 0.5, e.g. outliers=[0.01]"
            )


@script("calibrate", Settings)
def main(cfg):
    device = set_up_device(cfg.device, cfg.threads)
    for path in checkpoints_of(cfg.ckpt, cfg.sweep):
        calibrate(path, cfg, device)


if __name__ == "__main__":
    main()
