"""
A training step of the cpu preset's model, as bench.py measures it:

    training_step.py ours        as train.py does it: the faster attention, memory kept, fused AdamW
    training_step.py compiled    ours under torch.compile
    training_step.py plain       nanoGPT's form: F.scaled_dot_product_attention, AdamW as PyTorch does it on a CPU

"floor_s" in an answer is the time of the step's matrix products alone, measured one by one at their shapes (those of
attention not counted): no step whose products go through this library can be faster.
"""

import math
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from protocol import serve

from model import GPT, GPTConfig, rng
from training import ATTENTION, autocast, pick_attention, set_up_device

KIND = sys.argv[1]


def floor(model, tokens, dtype):
    """Seconds of all products with weights, forward and backward, each the best of five."""
    total = 0.0
    for name, w in model.named_parameters():
        if w.dim() == 2 and name != "wpe.weight" and (name != "wte.weight" or model.config.tie_weights):
            w = w.detach().to(dtype)
            x, y = torch.randn(tokens, w.size(1), dtype=dtype), torch.randn(tokens, w.size(0), dtype=dtype)
            for product in (lambda: x @ w.T, lambda: y @ w, lambda: y.T @ x):  # noqa: B023
                seconds = []
                for _ in range(5):
                    start = time.perf_counter()
                    product()
                    seconds.append(time.perf_counter() - start)
                total += min(seconds)
    return total


def measure(q):
    device = torch.device("cpu") if KIND == "plain" else set_up_device("cpu")
    torch.set_num_threads(q["threads"])
    config = GPTConfig(dialect=q["dialect"], n_kv=q["n_kv"], block_size=q["context"])
    model = GPT(config, seed=1).train()
    if KIND == "plain":
        decay = [p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decay[0], "weight_decay": 0.1}, {"params": decay[1], "weight_decay": 0.0}]
        optimizer, attention = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99)), next(iter(ATTENTION))
    else:
        optimizer = model.optimizer(1e-3, (0.9, 0.99), 0.1)
        attention = pick_attention(config, q["batch"], device, q["dtype"])[0] if KIND == "ours" else next(iter(ATTENTION))
    for block in model.h:
        block.attn.causal = ATTENTION[attention]
    step = torch.compile(model) if KIND == "compiled" else model
    windows = torch.randint(config.vocab_size, (q["batch"], q["context"] + 1), generator=rng(1, "bench"))
    seconds = []
    for _ in range(q["steps"] + 2):
        start = time.perf_counter()
        with autocast(device, q["dtype"]):
            _, loss = step(windows[:, :-1], windows[:, 1:])
        if not math.isfinite(loss.item()):
            return {"skip": "the loss is not finite"}
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    products = floor(model, q["batch"] * q["context"], getattr(torch, q["dtype"])) if q.get("floor") else None
    return {"steps_s": seconds[2:], "floor_s": products, "attention": attention}


if __name__ == "__main__":
    names = {"ours": "nanoGQA", "compiled": "nanoGQA, torch.compile", "plain": "plain nanoGPT form"}
    serve(names[KIND], f"torch {torch.__version__}", measure)
