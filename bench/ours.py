"""
nanoGQA, as bench.py measures it.

    ours.py             the fastest way here (decoding.feeder)
    ours.py pytorch     the same model and cache through PyTorch's operations alone: what the kernels are worth

The cache is filled with a constant in place of a prefill. "floor" in an answer is for each step the bytes that it
must read: all weights once (of a position table one row), and all held keys and values.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from protocol import serve

import kernels
from decoding import feeder, make_cache
from model import GPT, GPTConfig

PLAIN = sys.argv[1:] == ["pytorch"]
models = {}


@torch.no_grad()
def measure(q):
    torch.set_num_threads(q["threads"])
    device = torch.device(q.get("device", "cpu"))
    dtype = getattr(torch, q["dtype"])
    config = GPTConfig(dialect=q["dialect"], n_kv=q["n_kv"], block_size=q["context"] + 1)
    if config not in models:
        models.clear()
        models[config] = GPT(config).to(device).eval()
    model = models[config].to(dtype)
    cache = make_cache(model, q["context"], q["batch"])
    for tensor in cache.keys + cache.values:
        tensor.fill_(0.01)
    feed = feeder(model, cache)

    def run(steps):
        seconds, idx = [], torch.zeros(q["batch"], 1, dtype=torch.long, device=device)
        cache.length = q["context"] - q["steps"]
        for _ in range(steps):
            start = time.perf_counter()
            idx = feed(idx).argmax(dim=1, keepdim=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return seconds

    run(min(3, q["steps"]))  # warm-up
    seconds = run(q["steps"])
    weights = sum(p.nbytes for name, p in model.named_parameters() if name != "wpe.weight")
    per_token = sum(cache.nbytes().values()) // cache.length
    floor = [weights + per_token * (q["context"] - q["steps"] + 1 + i) for i in range(q["steps"])]
    return {"steps_s": seconds, "floor": floor, "kv_bytes": sum(cache.nbytes().values())}


if __name__ == "__main__":
    if PLAIN:
        kernels.library = lambda: None
    how = "PyTorch's operations" if PLAIN else "kernels/decode.cpp" if kernels.library() else "PyTorch's, no compiler here"
    serve("nanoGQA, PyTorch only" if PLAIN else "nanoGQA", f"torch {torch.__version__}, {how}", measure)
