"""
How fast a model decodes over each kind of cache: a step at 2,000 tokens, the kinds taking turns.

    python bench/caches.py                              n_kv 8, 2, 1 x batch 1, 32: some minutes, on an otherwise idle machine
    python bench/caches.py n_kv=8 batches=1 context=500      a part of it

Random weights of configs/model/gpt2.yaml's shape, random keys and values, calibrated on themselves: speed does not depend on
the numbers. Prints for each kind the median step, tokens/s, the bytes of weights and cache that a step reads and the ratio to
the dense cache of the same turn; with the default arguments the rows go to results/caches.csv.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import pandas as pd
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from analysis.runs import arguments
from decoding import feeder, make_cache
from eval import read_bandwidth
from kv_cache.dense import DenseConfig
from kv_cache.fp8 import FP8Config
from kv_cache.kivi import KIVIConfig
from kv_cache.kvquant import KVQuantConfig, fit, fit_key
from model import GPT, GPTConfig
from tracking import commit, provenance

KINDS = [  # (config, dtype of what stays in full precision)
    (DenseConfig(), torch.float32), (DenseConfig(), torch.bfloat16), (FP8Config(), torch.float16),
    *((KIVIConfig(bits), torch.float16) for bits in (8, 4, 3, 2)), *((KVQuantConfig(bits), torch.float16) for bits in (4, 3)),
]  # fmt: skip
STEPS, TURNS = 20, 5


def filled(model, config, dtype, batch, context):
    """A cache that holds `context` random tokens."""
    c, generator = model.config, torch.Generator().manual_seed(0)
    calibration = None
    if config.calibrated:
        x, weight = torch.randn(2048, c.n_kv * c.head_dim, generator=generator), torch.ones(2048, c.n_kv * c.head_dim)
        (fitted,) = fit(x, x, weight, weight, (config.bits,), config.outliers)
        calibration = {"fits": {fit_key(config.bits, config.outliers, True): [fitted] * c.n_layer}}
    cache = make_cache(model, c.block_size, batch, dtype, config, calibration)
    for first in range(0, context, 32):
        t = min(32, context - first)
        q, k, v = (torch.randn(batch, heads, t, c.head_dim, generator=generator) for heads in (c.n_head, c.n_kv, c.n_kv))
        for layer in range(c.n_layer):
            cache.attend(layer, q[:, :: c.group], k, v)  # what comes out is of no interest: one query head a KV head
    return cache


@torch.no_grad()
def measure(n_kv, batch, context):
    """Rows of one shape: every kind STEPS steps, TURNS times, one after the other."""
    model = GPT(GPTConfig(n_kv=n_kv, block_size=context + STEPS * (TURNS + 1))).eval()
    weights = sum(p.nbytes for name, p in model.named_parameters() if name != "wpe.weight")
    idx = torch.zeros(batch, 1, dtype=torch.long)
    caches = [filled(model, *kind, batch, context) for kind in KINDS]
    feeds = [feeder(model, cache) for cache in caches]
    seconds = [[] for _ in KINDS]
    for turn in range(TURNS + 1):
        for feed, mine in zip(feeds, seconds, strict=True):
            for _ in range(STEPS):
                start = time.perf_counter()
                feed(idx)
                if turn:  # the first is warm-up
                    mine.append(time.perf_counter() - start)
    rows = []
    for (config, dtype), cache, mine in zip(KINDS, caches, seconds, strict=True):
        turns = [[statistics.median(s[i : i + STEPS]) for i in range(0, len(s), STEPS)] for s in (seconds[0], mine)]
        rows.append({
            "n_kv": n_kv, "batch": batch, "context": cache.length, "cache": f"{config.label()}-{str(dtype).removeprefix('torch.')}",
            "step_ms": 1e3 * statistics.median(mine), "quartiles_ms": "-".join(f"{1e3 * x:.2f}" for x in statistics.quantiles(mine, n=4)[::2]), "tokens_per_s": batch / statistics.median(mine),
            "to_dense": statistics.median(a / b for a, b in zip(*turns, strict=True)), "weight_bytes": weights,
            "kv_bytes": sum(cache.nbytes().values()),
        })  # fmt: skip
    return rows


def main():
    given = arguments(("n_kv", "batches", "context"))
    numbers = {}
    for key, default, allowed, what in (
        ("n_kv", "8,2,1", (1, 2, 4, 8), "1, 2, 4 or 8, commas between"),
        ("batches", "1,32", range(1, 1025), "1 to 1024, commas between"),
        ("context", "2000", range(1, 10**6), "one number of tokens"),
    ):
        words = given.get(key, default).split(",")
        if not all(w.isdigit() and int(w) in allowed for w in words) or (key == "context" and len(words) > 1):
            print(f"error: {key}={given[key]} is not allowed: {what}", file=sys.stderr)
            sys.exit(2)
        numbers[key] = [int(w) for w in words]
    made_by, rows = provenance(), []
    bandwidth, capability = read_bandwidth(torch.device("cpu")), torch.backends.cpu.get_cpu_capability()
    print(
        f"{torch.get_num_threads()} threads, {capability}, read bandwidth {bandwidth / 1e9:.1f} GB/s, float32 weights; in brackets the "
        "quartiles of a step; x = times the tokens/s of the dense float32 cache, median over turns", flush=True,
    )  # fmt: skip
    for n_kv in numbers["n_kv"]:
        for batch in numbers["batches"]:
            print(f"\nn_kv {n_kv}, batch {batch}, {numbers['context'][0]:,} tokens", flush=True)
            for row in measure(n_kv, batch, numbers["context"][0]):
                rows.append(
                    {
                        **row,
                        "threads": torch.get_num_threads(),
                        "read_bandwidth": bandwidth,
                        "commit": commit(made_by),
                        "machine": made_by["machine"],
                    }
                )
                print(
                    f"  {row['cache']:<28} {row['step_ms']:>8.2f} ms [{row['quartiles_ms']}]  {row['tokens_per_s']:>8,.0f} tokens/s  {row['to_dense']:>5.2f}x"
                    f"   reads {row['weight_bytes'] / 1e6:.1f} + {row['kv_bytes'] / 1e6:>6.1f} MB", flush=True,
                )  # fmt: skip
    if not given:
        pd.DataFrame(rows).to_csv(ROOT / "results/caches.csv", index=False, float_format="%.6g")
        print(f"-> {os.path.relpath(ROOT / 'results/caches.csv')}")


if __name__ == "__main__":
    main()
