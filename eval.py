"""
What a checkpoint is worth and what it costs: validation loss, KV-cache bytes, decoding speed.

    python eval.py ckpt=mha.pt                    one checkpoint
    python eval.py sweep=cpu                      every finished training run of runs/cpu/, n_kv's interleaved
    python eval.py ckpt=gqa2.pt dtype=bfloat16 name=half      weights and cache of half the bytes
    python eval.py ckpt=PATH/TO/HF window=1024    a GPT-2 or Llama in a Hugging Face folder, or by its name on the Hub
    python eval.py ckpt=smollm2.pt window=2048 windows=4 batches=[]        the model of `make pretrained`, in a minute
    python eval.py sweep=cpu cache=kivi cache.bits=4          through a quantised cache: fp8, kivi or kvquant
    python eval.py -m sweep=cpu cache=kivi cache.bits=8,4,2 batches=[]        their loss alone, without timing

With a quantised cache the loss and its distance from the uncached predictions are those of the validation split (windows=…
takes a part of it) through the cache, every token attending to what a generation would hold at its position.

Prints the full-pass validation loss (nats per token); KV bytes by the closed formula and summed from the real tensors of
a real generation (they must agree to the byte); prefill and decode tokens/s by batch, bytes read per step, and what share
of the machine's measured read bandwidth that is. Speed is measured on weights of the same shape with a context long
enough for all tokens (random weights: speed does not depend on their values), greedy, on an otherwise idle machine.
Results go to runs/<sweep>/eval-<name>/ and W&B.
"""

import json
import statistics
import time
from dataclasses import asdict, dataclass, replace

import torch
from torch.nn import functional as F
from tqdm import tqdm

import kernels
from calibrate import calibrate_for
from cli import InputError, script
from data.tokenizer import tokenizer_from
from decoding import cache_config, generate, make_cache
from kv_cache.dense import DenseConfig
from kv_cache.kvquant import KVQuantConfig
from kv_cache.quantised import QuantisedCache
from model import GPT, rng, rotate
from storage import checkpoints_of, load_calibration, load_checkpoint, load_model, open_run
from stream import evaluate, load_data, windows_of
from tracking import Run, WandbConfig, commit, provenance
from training import set_up_device

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


def cache_bytes(cache):
    """(by formula, from the real tensors) of what a cache holds. Raises RuntimeError when a component differs by a byte."""
    formula, measured = cache.formula(), cache.nbytes()
    if formula != measured:
        raise RuntimeError(f"formula {formula} bytes, tensors {measured}")
    return sum(formula.values()), sum(measured.values())


@torch.no_grad()
def stored_error(model, x, cache):
    """
    How far codes are from the keys and values they stand for, (keys, values): over all layers, the mean square of the error
    over the variance of the numbers around their channels' means. x [B, T] goes through the (quantised) cache; tokens that
    it holds in full precision do not count. NaN where all are.
    """
    given, attend = {}, cache.attend

    def remember(layer, q, k, v):
        given[layer] = k, v
        return attend(layer, q, k, v)

    cache.attend = remember
    model(x, cache=cache)
    first, last = cache.coded(cache.length)
    wrong, variance = torch.zeros(2), torch.zeros(2)
    for layer, (k, v) in given.items():
        if cache.rotates:
            k = rotate(k, model.cos[: x.size(1)], model.sin[: x.size(1)])
        for i, (true, stored) in enumerate(((k, cache.keys), (v, cache.values))):
            true = true[:, :, first:last].float()  # [B, n_kv, tokens, hd]
            borders = [(a, b) for a, b in cache.blocks(cache.length) if first <= a and b <= last]
            held = torch.cat([stored(layer, a, b) for a, b in borders], dim=2) if borders else true
            wrong[i] += (held - true).square().sum().item()
            variance[i] += (true - true.mean(dim=2, keepdim=True)).square().sum().item()
    return (wrong / variance).tolist()


@torch.no_grad()
def evaluate_cached(model, tokens, T, new_cache, newest=None, exact=None):
    """
    What generation would see: the windows of T tokens that stream.evaluate takes, but with keys and values that have been
    through a cache; each token attends to what the cache would hold at its position, but for its `newest` tokens, if given,
    and `exact` ones (Newest). `new_cache(model, tokens, batch)` makes an empty one. Returns a plain dict: the loss in nats a
    token, uncached and through the cache; the Kullback-Leibler divergence of the cached predictions from the uncached ones,
    in nats a token; the bits a number takes in a full window's cache, everything counted; and for a quantised cache
    stored_error on eight windows.
    """
    c, device, n = model.config, model.wte.weight.device, len(tokens) - 1
    batches = windows_of(tokens, T, max(1, min(64, 2**27 // (T * c.vocab_size))))  # half a gigabyte of logits
    loss = uncached = divergence = bits = numbers = 0.0
    for x, y in tqdm(batches, desc="loss through the cache", unit="batch", disable=None, leave=False):
        x, y = x.to(device), y.to(device).flatten()
        cache = new_cache(model, T, len(x))
        seen = cache if newest is None else Newest(cache, newest, exact)
        logits = model(x, cache=seen)[0].float().log_softmax(dim=-1).flatten(0, 1)  # [B*T, V]
        wanted = model(x)[0].float().log_softmax(dim=-1).flatten(0, 1)
        loss += F.nll_loss(logits, y, reduction="sum").item()
        uncached += F.nll_loss(wanted, y, reduction="sum").item()
        divergence += F.kl_div(logits, wanted, reduction="sum", log_target=True).item()
        if x.size(1) == T or not numbers:  # the last window may be shorter
            bits += 8 * cache_bytes(cache)[1]
            numbers += 2 * c.n_layer * c.n_kv * c.head_dim * x.numel()
    errors = {}
    if isinstance(cache, QuantisedCache):
        some = batches[0][0][:8].to(device)
        errors = dict(zip(("key_error", "value_error"), stored_error(model, some, new_cache(model, T, len(some))), strict=True))
    return {
        **errors, "val_loss": uncached / n, "val_loss_cached": loss / n, "val_kl": divergence / n, "bits_per_value": bits / numbers,
    }  # fmt: skip


class Newest:
    """
    For a question, not for use: a quantised cache of which each token sees the codes, except of its `newest` tokens (itself
    the first of them), and of all `exact` ("keys" or "values"), which it sees exactly. How far the loss falls with `newest`
    tells how near the tokens lie that a model must not have rounded. One pass over whole sequences; memory grows with their
    square.
    """

    def __init__(self, cache, newest, exact=None):
        self.cache, self.newest, self.exact = cache, newest, exact
        self.rotates, self.position, self.length = cache.rotates, cache.position, 0

    def attend(self, layer, q, k, v):
        cache, T = self.cache, q.size(2)
        cache.attend(layer, q, k, v)
        borders = cache.blocks(T)
        coded_k, coded_v = (torch.cat([x(layer, *at) for at in borders], dim=2) for x in (cache.keys, cache.values))
        if cache.rotates:
            k = rotate(k, *(x[:T] for x in cache.rotary[1:]))
        at = torch.arange(T, device=q.device)
        age = at[:, None] - at  # [T, T]
        rows = q.float().unflatten(1, (cache.n_kv, -1)) / q.size(-1) ** 0.5  # [B, n_kv, group, T, hd]
        coded_k, coded_v = k if self.exact == "keys" else coded_k, v if self.exact == "values" else coded_v
        k, v, coded_k, coded_v = (x.float()[:, :, None] for x in (k, v, coded_k, coded_v))  # [B, n_kv, 1, T, hd]
        near = age < self.newest
        scores = torch.where(near, rows @ k.mT, rows @ coded_k.mT).masked_fill_(age < 0, -torch.inf)
        p = scores.softmax(dim=-1)  # [B, n_kv, group, T, T]
        return ((p * near) @ v + (p * ~near) @ coded_v).flatten(1, 2).to(q.dtype)


@torch.no_grad()
def decode_speed(config, batch, prompt, tokens, dtype, device, cache_config, new_cache):
    """
    Time `tokens` greedy tokens after a prompt of `prompt` tokens, `batch` sequences at once, weights in `dtype`.
    Speed does not depend on the weights' values, so they are random; but KVQuant keeps as many outliers as there are, so for
    it the random model is calibrated too. Returns a plain dict: seconds of the prefill (first token included) and of each
    later step, and the cache's bytes as it fills and at the end.
    """
    model = GPT(replace(config, block_size=prompt + tokens), seed=0).to(device, dtype).eval()
    idx = torch.randint(config.vocab_size, (batch, prompt), generator=rng(0, "speed")).to(device)

    own = {}
    if isinstance(cache_config, KVQuantConfig):
        some = torch.randint(config.vocab_size, (1, min(512, prompt + tokens)), generator=rng(1, "speed")).to(device)
        own = {"calibration": calibrate_for(model.float(), some, cache_config)}
        model.to(dtype)

    def run(tokens, every):
        cache = new_cache(model, prompt + tokens, batch, **own)
        seconds, points = [], []
        synchronize(device)
        start = time.perf_counter()
        for i, _ in enumerate(generate(model, idx, tokens, cache, temperature=0)):
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            if i and (i % every == 0 or i == tokens - 1):
                points.append((cache.length, statistics.median(seconds[1:][-every:]), cache_bytes(cache)[1]))
            start = time.perf_counter()
        return cache, seconds, points

    run(min(tokens, 20), 20)  # warm-up: allocations, kernel choices
    cache, seconds, points = run(tokens, max(1, tokens // POINTS))
    formula, measured = cache_bytes(cache)
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


def report_loss(summary, read, newest=None):
    """The lines of the validation loss, uncached and through a quantised cache, over what was `read`; bits of real caches only."""
    print(f"  validation loss {summary['val_loss']:.4f} nats per token, {read}")
    if "val_kl" in summary:
        print(
            f"  through the cache {summary['val_loss_cached']:.4f} ({summary['val_loss_cached'] - summary['val_loss']:+.4f}), "
            f"KL {summary['val_kl']:.5f} nats per token"
            + (f"; {summary['bits_per_value']:.2f} bits a number, everything counted" if newest is None else ""),
            flush=True,
        )


def report(summary, batch):
    """The line of one batch size."""
    print(
        f"  batch {batch:>3}: {summary[f'tokens_per_s_b{batch}']:>9,.0f} tokens/s decoding "
        f"({summary[f'step_ms_median_b{batch}']:.2f} ms a step), "
        f"prefill {summary[f'prefill_tokens_per_s_b{batch}']:,.0f} tokens/s; "
        f"KV {summary[f'kv_bytes_measured_b{batch}']:,} bytes held, formula {summary[f'kv_bytes_formula_b{batch}']:,}, "
        f"{summary[f'kv_bytes_allocated_b{batch}']:,} allocated; {summary[f'bytes_read_per_step_b{batch}'] / 1e6:.1f} MB "
        f"read a step, {summary[f'achieved_bandwidth_b{batch}'] / summary['read_bandwidth']:.0%} of the bandwidth",
        flush=True,
    )


def evaluate_checkpoint(path, cfg, device):
    """Measure one checkpoint, print and record it; or print the record, if this was measured before."""
    checkpoint = load_checkpoint(path, device)
    was = checkpoint["config"]
    tokenizer = tokenizer_from(checkpoint["tokenizer"])
    if checkpoint["tokenizer"]["kind"] == "recall":
        raise InputError(f"{path} is a model of data=recall, which has no text: retrieval.py measures it")
    model = load_model(checkpoint, device).eval()
    c = model.config
    window = cfg.window or c.block_size
    if window > c.block_size:
        raise InputError(f"window={window} is more than this model's context: {c.block_size} tokens or fewer")
    data = load_data(checkpoint["data"]["dataset"], cfg.source, window, checkpoint["tokenizer"])
    if checkpoint["data"]["sha256"] not in (None, data.meta["sha256"]):  # None: trained on none of our texts
        raise InputError(
            f"{path} was trained on {checkpoint['data']['corpus']}, not on {data.meta['corpus']}: give source= its text"
        )
    calibration = load_calibration(path, model, cfg.cache)
    label, exact = cfg.cache.label(), cfg.cache_dtype or cfg.dtype
    if exact != cfg.dtype:
        label += f"-{exact}"
    # What is measured on less than the whole split, or not timed, stands beside what is: under a name of its own
    name = f"eval-{was['name']}" + ("" if label == "dense" else f"-{label}")
    name += f"-newest{cfg.newest}{cfg.exact or ''}" if cfg.newest is not None else ""
    name += f"-{cfg.windows or 'all'}x{window}" if cfg.windows or cfg.window else ""
    name = cfg.name or name + ("" if cfg.batches else "-loss")

    def new_cache(model, tokens, batch, calibration=calibration):
        return make_cache(model, tokens, batch, getattr(torch, exact), cfg.cache, calibration)

    new_cache(model, 1, 1)  # refused before a folder is made
    if cfg.windows is not None and cfg.windows * window >= len(data.val):
        most = (len(data.val) - 1) // window
        raise InputError(
            f"windows={cfg.windows} of {window} tokens are more than the {len(data.val):,} there are: {most} or null"
        )
    config = {
        "script": "eval", "sweep": was["sweep"], "name": name, "seed": checkpoint["seed"],
        "model": checkpoint["model_config"], "tokens": cfg.tokens, "prompt": cfg.prompt_tokens, "batches": cfg.batches,
        "dtype": cfg.dtype, "window": cfg.window, "windows": cfg.windows, "newest": cfg.newest, "exact": cfg.exact,
        "parent": {"name": was["name"], "script": was["script"], "iteration": checkpoint["iteration"]},
    }  # fmt: skip
    if label != "dense":
        config["cache"] = {"kind": label, "dtype": exact, **asdict(cfg.cache)}
    text = data.val[: None if cfg.windows is None else cfg.windows * window + 1]
    read = f"{len(text) - 1:,} tokens in windows of {window}"
    folder, state = open_run(config)
    print(
        f"\n{was['sweep']}/{was['name']}: n_kv={c.n_kv}, {c.n_layer} layers, {c.n_head} query heads, head_dim {c.head_dim}, "
        f"cache {label}"
        + (f", if each token saw its newest {cfg.newest} exactly" if cfg.newest is not None else "")
        + (f", and all {cfg.exact}" if cfg.exact else "")
    )
    if state == "finished" and not cfg.again:
        summary = json.loads((folder / "summary.json").read_text())
        print(f"  measured before, on {summary['machine']} (again=true measures anew, name=… beside it)")
        report_loss(summary, read, cfg.newest)
        for batch in cfg.batches:
            report(summary, batch)
        return
    made_by = provenance()
    with Run(folder, name=name, group=was["sweep"], job_type="eval", config=config, **asdict(cfg.wandb)) as run:
        if label == "dense":
            losses = {"val_loss": evaluate(model, text, window=window)}
        else:
            losses = evaluate_cached(model, text, window, new_cache, cfg.newest, cfg.exact)
        report_loss(losses, read, cfg.newest)

        # a real generation of the checkpoint itself, inside its context
        idx = torch.from_numpy(data.val[: window // 4].astype("int64")).to(device)[None]  # [1, T]
        cache = new_cache(model, window, 1)
        new = list(generate(model, idx, min(128, window // 2), cache, temperature=0.8, generator=rng(1, "sample")))
        formula, measured = cache_bytes(cache)
        print(
            f"  KV cache of its own {cache.length} tokens: {formula:,} bytes by formula, {measured:,} in the tensors",
            flush=True,
        )
        run.text("sample", tokenizer.decode([*idx[0].tolist(), *torch.cat(new).tolist()]))

        bandwidth = read_bandwidth(device)
        kernel = kernels.description(device)
        print(
            f"  {cfg.dtype}, {kernel}, {torch.get_num_threads()} threads, read bandwidth {bandwidth / 1e9:.1f} GB/s", flush=True
        )
        summary = {
            **losses, "n_kv": c.n_kv, "seed": checkpoint["seed"], "corpus": data.meta["corpus"], "cache": label,
            "kv_bytes_per_token": formula / cache.length, "read_bandwidth": bandwidth, "tokens": cfg.tokens, "prompt": cfg.prompt_tokens,
            "dtype": cfg.dtype, "kernel": kernel, "threads": torch.get_num_threads(), "commit": commit(made_by), "machine": made_by["machine"],
        }  # fmt: skip
        curves = {}
        for batch in cfg.batches:
            m = decode_speed(c, batch, cfg.prompt_tokens, cfg.tokens, getattr(torch, cfg.dtype), device, cfg.cache, new_cache)
            steps = m["steps_s"]
            # step j of tokens - 1 reads prompt + j tokens: prompt + tokens / 2 on average
            held = cfg.prompt_tokens + len(steps)
            read = m["weight_bytes"] + m["kv_bytes_measured"] / held * (cfg.prompt_tokens + cfg.tokens / 2)
            summary |= {
                f"tokens_per_s_b{batch}": batch * len(steps) / sum(steps),
                f"step_ms_median_b{batch}": statistics.median(steps) * 1e3,
                f"prefill_tokens_per_s_b{batch}": batch * cfg.prompt_tokens / m["prefill_s"],
                f"bytes_read_per_step_b{batch}": read,
                f"achieved_bandwidth_b{batch}": read * len(steps) / sum(steps),
                f"weight_bytes_b{batch}": m["weight_bytes"],
                f"kv_bytes_formula_b{batch}": m["kv_bytes_formula"],
                f"kv_bytes_measured_b{batch}": m["kv_bytes_measured"],
                f"kv_bytes_allocated_b{batch}": m["allocated"],
            }
            for held, median, nbytes in m["points"]:
                row = curves.setdefault(held, {})
                row[f"tokens_per_s/b{batch}"] = batch / median
                row[f"kv_bytes/b{batch}"] = nbytes
            report(summary, batch)
        for held, row in sorted(curves.items()):
            run.log(row, step=held)
        run.summary(summary)


@dataclass(frozen=True)
class Settings:
    """configs/eval.yaml, where each key has its reason."""

    wandb: WandbConfig
    ckpt: str | None
    sweep: str | None
    name: str | None
    again: bool
    source: str | None
    window: int | None
    windows: int | None
    newest: int | None
    exact: str | None
    tokens: int
    prompt_tokens: int
    batches: list
    cache: dict
    dtype: str
    cache_dtype: str | None
    device: str
    threads: int | None

    def __post_init__(self):
        for key, low in (("tokens", 2), ("prompt_tokens", 1)):
            if getattr(self, key) < low:
                raise ValueError(f"{key}={getattr(self, key)} is not allowed: a whole number of at least {low}")
        if self.window is not None and self.window < 4:  # a quarter of it is the prompt of the generation
            raise ValueError(f"window={self.window} is not allowed: 4 tokens or more, or null for the model's context")
        if self.windows is not None and self.windows < 1:
            raise ValueError(
                f"windows={self.windows} is not allowed: a whole number of at least 1, or null for the whole split"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype} is not allowed: float32 or bfloat16")
        if self.cache_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"cache_dtype={self.cache_dtype} is not allowed: float32, bfloat16 or float16, or null for dtype")
        object.__setattr__(self, "cache", cache_config(self.cache))
        if self.cache is None:
            raise ValueError("cache=none is not allowed: there would be nothing to measure; cache=dense is the reference")
        if self.newest is not None:
            if self.newest < 0 or isinstance(self.cache, DenseConfig):
                raise ValueError(
                    f"newest={self.newest} is not allowed with cache={self.cache.label()}: 0 or more, with a quantised cache"
                )
            if getattr(self.cache, "residual", 0):  # a window of the end of the text, not of each token
                raise ValueError(f"newest={self.newest} takes the place of KIVI's window: cache.residual=0 goes with it")
            if self.batches:
                raise ValueError(
                    f"newest={self.newest} is a question to the loss, not a cache to time: batches=[] goes with it"
                )
        if self.exact not in (None, "keys", "values"):
            raise ValueError(f"exact={self.exact} is not allowed: keys or values, or null for neither")
        if self.exact is not None and self.newest is None:
            raise ValueError(f"exact={self.exact} goes with newest=…: newest=0 if no token is to be exact besides")
        if any(type(b) is not int or b < 1 for b in self.batches):
            raise ValueError(
                f"batches={self.batches} is not allowed: a list of whole numbers, e.g. batches=[1,32], or [] for no timing"
            )


@script("eval", Settings)
def main(cfg):
    device = set_up_device(cfg.device, cfg.threads)
    for path in checkpoints_of(cfg.ckpt, cfg.sweep):
        evaluate_checkpoint(path, cfg, device)


if __name__ == "__main__":
    main()
