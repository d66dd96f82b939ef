"""
What a checkpoint is worth and what it costs: validation loss, KV-cache bytes, decoding speed.

    python eval.py ckpt=mha.pt                    one checkpoint
    python eval.py sweep=cpu                      every finished training run of runs/cpu/, n_kv's interleaved
    python eval.py ckpt=gqa2.pt tokens=500 batches=[1,4]

Prints the full-pass validation loss (nats per token); KV bytes by the closed formula and summed from the real tensors of
a real generation (they must agree to the byte); prefill and decode tokens/s by batch, bytes read per step, and what share
of the machine's measured read bandwidth that is. Speed is measured on weights of the same shape with a context long
enough for all tokens (random weights: speed does not depend on their values), greedy, on an otherwise idle machine.
Results go to runs/<sweep>/eval-<name>/ and W&B.
"""

import json
import statistics
import time
from dataclasses import replace

import torch
from tqdm import tqdm

from cli import InputError, script
from data.tokenizer import tokenizer_from
from decoding import generate, make_cache
from kv_cache.accounting import dense_nbytes
from model import GPT, rng
from tracking import Run, commit, provenance
from training import RUNS, evaluate, find_checkpoint, load_checkpoint, load_data, load_model, set_up_device

POINTS = 20  # of the curves against context: a median over a twentieth of the steps, and a count of bytes at its end


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_bandwidth(device):
    """Measured read bandwidth in bytes per second: the best of 10 sums over 256 MiB, far beyond any cache."""
    x = torch.ones(64 * 2**20, device=device)  # float32
    seconds = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        x.sum()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return x.numel() * x.element_size() / min(seconds)


def cache_bytes(model, cache):
    """(by formula, from the real tensors) of what a cache holds. Raises RuntimeError when they differ by a byte."""
    c = model.config
    shape = (c.n_layer, c.n_kv, c.head_dim)
    itemsize, batch = cache.keys[0].element_size(), cache.keys[0].size(0)
    formula = dense_nbytes(*shape, cache.length, batch, itemsize)
    measured = sum(cache.nbytes().values())
    allocated = dense_nbytes(*shape, cache.capacity, batch, itemsize)
    if (formula, allocated) != (measured, cache.capacity_nbytes()):
        raise RuntimeError(f"formula {formula} / {allocated} bytes, tensors {measured} / {cache.capacity_nbytes()}")
    return formula, measured


@torch.no_grad()
def decode_speed(config, batch, prompt, tokens, device):
    """
    Time `tokens` greedy tokens after a prompt of `prompt` tokens, `batch` sequences at once. Returns a plain dict:
    seconds of the prefill (first token included) and of each later step, and the cache's bytes as it fills and at the end.
    """
    model = GPT(replace(config, block_size=prompt + tokens), seed=0).to(device).eval()
    idx = torch.randint(config.vocab_size, (batch, prompt), generator=rng(0, "speed")).to(device)

    def run(tokens, every):
        cache = make_cache(model, prompt + tokens, batch)
        seconds, points = [], []
        synchronize(device)
        start = time.perf_counter()
        for i, _ in enumerate(generate(model, idx, tokens, cache, temperature=0)):
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            if i and (i % every == 0 or i == tokens - 1):
                points.append((cache.length, statistics.median(seconds[1:][-every:]), cache_bytes(model, cache)[1]))
            start = time.perf_counter()
        return cache, seconds, points

    run(min(tokens, 20), 20)  # warm-up: allocations, kernel choices
    cache, seconds, points = run(tokens, max(1, tokens // POINTS))
    formula, measured = cache_bytes(model, cache)
    weights = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if name != "wpe.weight")
    return {
        "prefill_s": seconds[0],
        "steps_s": seconds[1:],
        "points": points,  # (tokens held, median seconds of the last steps, bytes in the tensors)
        "weight_bytes": weights,  # read once a step; of the position table only one row is
        "kv_bytes_formula": formula,
        "kv_bytes_measured": measured,
        "allocated": cache.capacity_nbytes(),
    }


def evaluate_checkpoint(path, cfg, device):
    checkpoint = load_checkpoint(path, device)
    was = checkpoint["config"]
    folder = RUNS / was["sweep"] / f"eval-{was['name']}"
    if (folder / "summary.json").exists() and not cfg["again"]:
        print(f"{was['name']}: evaluated before ({folder}); again=true measures anew")
        return json.loads((folder / "summary.json").read_text())
    model = load_model(checkpoint, device).eval()
    c = model.config
    data = load_data(checkpoint["data"]["dataset"], cfg["source"], c.block_size)
    if data.meta["sha256"] != checkpoint["data"]["sha256"]:
        raise InputError(
            f"{path} was trained on {checkpoint['data']['corpus']}, not on {data.meta['corpus']}: give source= its text"
        )
    config = {
        "script": "eval", "sweep": was["sweep"], "name": f"eval-{was['name']}", "seed": checkpoint["seed"],
        "model": checkpoint["model_config"], "tokens": cfg["tokens"], "prompt": cfg["prompt"], "batches": cfg["batches"],
        "parent": {"name": was["name"], "commit": checkpoint["provenance"]["commit"]},
    }  # fmt: skip
    print(f"\n{was['name']}: n_kv={c.n_kv}, {c.n_layer} layers, {c.n_head} query heads, head_dim {c.head_dim}", flush=True)
    made_by = provenance()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(config, indent=1))  # JSON is YAML
    (folder / "provenance.json").write_text(json.dumps(made_by, indent=2) + "\n")
    with Run(folder, name=config["name"], group=was["sweep"], job_type="eval", config=config, mode=cfg["wandb"]["mode"]) as run:
        loss = evaluate(model, data.val)
        print(f"  validation loss {loss:.4f} nats per token (iteration {checkpoint['iteration']}, whole split)")

        # a real generation of the checkpoint itself, inside its context
        tokenizer = tokenizer_from(checkpoint["tokenizer"])
        idx = torch.from_numpy(data.val[: c.block_size // 4].astype("int64")).to(device)[None]
        cache = make_cache(model, c.block_size)
        text = tokenizer.decode(
            torch.cat(list(generate(model, idx, c.block_size // 2, cache, 0.8, generator=rng(1, "sample")))).tolist()
        )
        formula, measured = cache_bytes(model, cache)
        print(f"  KV cache of {cache.length} tokens: {formula:,} bytes by formula, {measured:,} in the tensors", flush=True)
        run.text("sample", tokenizer.decode(idx[0].tolist()) + text)

        bandwidth = read_bandwidth(device)
        kernel = f"scaled_dot_product_attention, {torch.backends.cpu.get_cpu_capability() if device.type == 'cpu' else 'CUDA'}"
        print(f"  float32, {kernel}, {torch.get_num_threads()} threads, read bandwidth {bandwidth / 1e9:.1f} GB/s")
        per_token = dense_nbytes(c.n_layer, c.n_kv, c.head_dim, 1, 1, 4)
        summary = {
            "val_loss": loss, "n_kv": c.n_kv, "seed": checkpoint["seed"], "corpus": data.meta["corpus"],
            "kv_bytes_per_token": per_token, "read_bandwidth": bandwidth, "tokens": cfg["tokens"], "prompt": cfg["prompt"],
            "kernel": kernel, "threads": torch.get_num_threads(), "commit": commit(made_by), "machine": made_by["machine"],
        }  # fmt: skip
        curves = {}
        for batch in tqdm(cfg["batches"], desc="  decoding", unit="batch", disable=None, leave=False):
            m = decode_speed(c, batch, cfg["prompt"], cfg["tokens"], device)
            steps = m["steps_s"]
            seconds = sum(steps)
            # step j of tokens - 1 reads prompt + j tokens: prompt + tokens / 2 on average
            kv_read = per_token * batch * (cfg["prompt"] + cfg["tokens"] / 2)
            rate = batch * len(steps) / seconds
            read = m["weight_bytes"] + kv_read  # a step's mean
            achieved = read * len(steps) / seconds
            summary |= {
                f"tokens_per_s_b{batch}": rate,
                f"step_ms_median_b{batch}": statistics.median(steps) * 1e3,
                f"prefill_tokens_per_s_b{batch}": batch * cfg["prompt"] / m["prefill_s"],
                f"bytes_read_per_step_b{batch}": read,
                f"achieved_bandwidth_b{batch}": achieved,
                f"weight_bytes_b{batch}": m["weight_bytes"],
                f"kv_bytes_formula_b{batch}": m["kv_bytes_formula"],
                f"kv_bytes_measured_b{batch}": m["kv_bytes_measured"],
                f"kv_bytes_allocated_b{batch}": m["allocated"],
            }
            for held, median, nbytes in m["points"]:
                row = curves.setdefault(held, {})
                row[f"tokens_per_s/b{batch}"] = batch / median
                row[f"kv_bytes/b{batch}"] = nbytes
            print(
                f"  batch {batch:>3}: {rate:>9,.0f} tokens/s decoding ({statistics.median(steps) * 1e3:.2f} ms a step), "
                f"prefill {batch * cfg['prompt'] / m['prefill_s']:,.0f} tokens/s; "
                f"KV {m['kv_bytes_measured']:,} bytes held = formula; "
                f"{read / 1e6:.1f} MB read a step, {achieved / bandwidth:.0%} of the bandwidth",
                flush=True,
            )
        for held, row in sorted(curves.items()):
            run.log(row, step=held)
        run.summary(summary)
    return summary


@script("eval")
def main(cfg):
    if (cfg["ckpt"] is None) == (cfg["sweep"] is None):
        raise InputError("give either ckpt=… (one checkpoint) or sweep=… (all finished runs of runs/<sweep>/)")
    for key, low in (("tokens", 2), ("prompt", 1)):
        if type(cfg[key]) is not int or cfg[key] < low:
            raise InputError(f"{key}={cfg[key]} is not allowed: a whole number of at least {low}")
    if not isinstance(cfg["batches"], list) or any(type(b) is not int or b < 1 for b in cfg["batches"]):
        raise InputError(f"batches={cfg['batches']} is not allowed: a list of whole numbers, e.g. batches=[1,32]")
    device = set_up_device(cfg["device"], cfg["threads"])
    if cfg["ckpt"] is not None:
        evaluate_checkpoint(find_checkpoint(str(cfg["ckpt"])), cfg, device)
        return
    runs = [p.parent for p in RUNS.glob(f"{cfg['sweep']}/*/summary.json") if json.loads(p.read_text()).get("val_loss_final")]
    runs = [(json.loads((f / "summary.json").read_text()), f) for f in runs if "-to-kv" not in f.name]
    if not runs:
        raise InputError(f"sweep={cfg['sweep']}: no finished training run in {RUNS / cfg['sweep']}/")
    for _, folder in sorted(runs, key=lambda r: (r[0]["seed"], -r[0]["n_kv"])):
        evaluate_checkpoint(folder / "last.pt", cfg, device)


if __name__ == "__main__":
    main()
