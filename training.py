"""
The loop: shared by train.py and uptrain.py.

Randomness is a function of (seed, purpose, iteration), so nothing random has to be saved: iteration i sees the same batch
and the same dropout whether it is reached in one go or after any number of interruptions, and whatever n_kv is.
"""

import contextlib
import ctypes
import math
import re
import sys
import time
from dataclasses import asdict, dataclass, replace

import torch
from tqdm import tqdm

import kernels
from cli import InputError
from model import causal_attention, rng_seed
from storage import load_checkpoint, save_checkpoint
from tracking import Run, commit, provenance


@dataclass(frozen=True)
class TrainConfig:
    """What the loop needs to know. Raises ValueError, in one line, for values it cannot run with."""

    batch_size: int
    steps: int
    lr: float
    min_lr: float
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    grad_clip: float
    eval_interval: int
    save_interval: int
    log_interval: int
    dtype: str
    compile: bool

    def __post_init__(self):
        for name in ("batch_size", "eval_interval", "save_interval", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("steps", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} cannot be negative")
        if not 0 < self.lr < math.inf or not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"lr={self.lr}, min_lr={self.min_lr}: lr must be positive and min_lr between 0 and lr")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not in [0, 1)")
        for name in ("weight_decay", "grad_clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: 0 (off) or a positive number")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} is unknown: auto, float32 or bfloat16")


# ---------------------------------------------------------------------------------------------------------------------
# machine


def set_up_device(device="auto", threads=None):
    """The torch device to run on; also sets the CPU threads. InputError for a device that is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise InputError(f"device={device!r} is unknown: auto, cpu or cuda")
    device = torch.device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device={device}: this torch sees {torch.cuda.device_count()} CUDA GPUs; device=cpu runs everywhere")
    if threads is not None:
        if threads < 1:
            raise InputError(f"threads={threads!r} is not allowed: a whole number of at least 1, or null for all cores")
        torch.set_num_threads(threads)
    with contextlib.suppress(OSError, AttributeError):
        # glibc hands every buffer above 32 MB back to the kernel and takes fresh, zeroed pages for the next one: time that
        # training notices. Keep them. (M_MMAP_THRESHOLD = -3, M_TRIM_THRESHOLD = -1; other C libraries have no mallopt)
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)
        libc.mallopt(-1, 1 << 30)
    return device


def pick_dtype(dtype, device):
    """'float32' or 'bfloat16', and in a few words why. auto takes bfloat16 where its matmul is measured faster."""
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        if dtype == "auto":
            dtype = "bfloat16" if supported else "float32"
        if dtype == "bfloat16" and not supported:
            return "float32", "this GPU has no bfloat16"
        return dtype, torch.cuda.get_device_name(device)

    def seconds(dtype):
        a = torch.ones(256, 256, dtype=dtype)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            torch.mm(a, a)
            times.append(time.perf_counter() - start)
        return min(times)

    speedup = seconds(torch.float32) / seconds(torch.bfloat16)
    measured = f"a bfloat16 matrix product runs at {speedup:.2f}x the speed of float32 here"
    if dtype == "auto":
        dtype = "bfloat16" if speedup > 1.2 else "float32"
    return dtype, measured


# a layer's attention while training: what each is called in the log and in checkpoints
ATTENTION = {
    "scaled_dot_product_attention": causal_attention,
    "kernels/causal.cpp": lambda q, k, v, dropout: kernels.causal_attention(q, k, v),
}


def pick_attention(config, batch_size, device, dtype):
    """The key in ATTENTION of whichever is faster, forward and backward, on one layer of this shape; and why, in words."""
    fused, kernel = ATTENTION
    dtype = getattr(torch, dtype)
    if config.dropout or not kernels.serves(torch.empty(0, dtype=dtype, device=device)):
        return fused, "dropout" if config.dropout else "the only one here"
    heads = [config.n_head, config.n_kv, config.n_kv]
    qkv = torch.ones(batch_size, sum(heads), config.block_size, config.head_dim, dtype=dtype, requires_grad=True)
    seconds = {fused: [], kernel: []}
    for _ in range(4):  # taking turns, so that a busy moment meets both
        for name in seconds:
            start = time.perf_counter()
            ATTENTION[name](*qkv.split(heads, dim=1), 0.0).sum().backward()
            seconds[name].append(time.perf_counter() - start)
    fastest, slowest = sorted(seconds, key=lambda name: min(seconds[name]))
    return fastest, f"{min(seconds[slowest]) / min(seconds[fastest]):.1f}x as fast as {slowest} here"


# ---------------------------------------------------------------------------------------------------------------------
# the loop


def lr_at(iteration, cfg):
    """Linear warm-up, then a cosine from lr down to min_lr at the last step."""
    if iteration < cfg.warmup_steps:
        return cfg.lr * (iteration + 1) / cfg.warmup_steps
    done = (iteration - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    return cfg.min_lr + 0.5 * (cfg.lr - cfg.min_lr) * (1 + math.cos(math.pi * min(1.0, done)))


def train(model, data, cfg, config, folder, *, device, wandb, job_type, first_batch=0, parent=None, extra=None):
    """
    Train `model` for cfg.steps in a run folder, resuming from its last.pt where there is one; returns the run's summary.

    model        GPT, freshly made (or pooled) when the folder is new
    config       the run's plain config: written into every checkpoint and to W&B
    wandb        a tracking.WandbConfig
    first_batch  index of the first batch in the seed's data stream: uptraining goes on where its parent stopped
    parent       plain dict naming the checkpoint this model came from, or None
    extra        values for the summary, known before training
    """
    seed, name = config["seed"], config["name"]
    T = data.window or model.config.block_size
    dtype, why = pick_dtype(cfg.dtype, device)
    model.to(device).train()
    optimizer = model.optimizer(cfg.lr, (cfg.beta1, cfg.beta2), cfg.weight_decay)
    iteration, val, best, elapsed = 0, {}, math.inf, 0.0
    if (folder / "last.pt").exists():
        last = load_checkpoint(folder / "last.pt", device)
        model.load_state_dict(last["model"])
        optimizer.load_state_dict(last["optimizer"])
        iteration, elapsed = last["iteration"], last["elapsed_s"]
        best, dtype = last["best_val_loss"], last["dtype"]  # auto is answered once a run
        val = last.get("val", {})
        if last["val_loss"] is not None:
            val.setdefault("val/loss", last["val_loss"])  # all that older checkpoints hold
        # checkpoints of before there was a choice do not name it
        attention, attention_why = last.get("attention", next(iter(ATTENTION))), "as before"
    elif cfg.compile:
        attention, attention_why = next(iter(ATTENTION)), "torch.compile knows it"
    else:
        attention, attention_why = pick_attention(replace(model.config, block_size=T), cfg.batch_size, device, dtype)
    for block in model.h:
        block.attn.causal = ATTENTION[attention]
    first, made_by = iteration, provenance()
    stepper = compiled(model, data, cfg, T, device, dtype) if cfg.compile else model
    print(
        f"{name}: {model.n_params():,} parameters, n_kv={model.config.n_kv}, {data.meta['corpus']}, "
        f"{iteration}/{cfg.steps} steps done, {torch.get_num_threads()} threads, {dtype} ({why}), "
        f"attention by {attention} ({attention_why})",
        flush=True,
    )

    def checkpoint():
        return {
            "model": model.state_dict(),
            "model_config": asdict(model.config),
            "optimizer": optimizer.state_dict(),
            "iteration": iteration,
            "total_iterations": (parent or {}).get("total_iterations", 0) + iteration,
            "val": val,
            "val_loss": val.get("val/loss"),
            "best_val_loss": best,
            "elapsed_s": elapsed + time.perf_counter() - start,
            "seed": seed,
            "dtype": dtype,
            "attention": attention,
            "tokenizer": data.meta["tokenizer"],
            "data": data.identity,
            "config": config,
            "parent": parent,
            "provenance": made_by,
        }

    with (
        Run(folder, name=name, group=config["sweep"], job_type=job_type, config=config, **asdict(wandb),
            resume_step=first - 1 if first else None) as run,
        tqdm(total=cfg.steps, initial=iteration, desc=name, unit="step", disable=None, dynamic_ncols=True) as bar,
    ):  # fmt: skip
        start = time.perf_counter()
        steps_timed, tokens_timed, seconds_timed, spoken = 0, 0, 0.0, start
        while True:
            # evaluate, save
            metrics = {}
            resumed = iteration == first > 0
            if iteration == cfg.steps or (iteration and iteration % cfg.eval_interval == 0):
                if not resumed:  # else the checkpoint knows it
                    val = data.evaluate(model)
                    if val["val/loss"] < best:
                        best = val["val/loss"]
                        save_checkpoint(folder / "best.pt", checkpoint())
                metrics = {**val, "val/best": best}
            if not resumed and (metrics or iteration % cfg.save_interval == 0):
                save_checkpoint(folder / "last.pt", checkpoint())
            if iteration == cfg.steps:
                run.log({**metrics, "elapsed_s": elapsed + time.perf_counter() - start}, step=iteration)
                break

            # one step
            step_start = time.perf_counter()
            lr = lr_at(iteration, cfg)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if model.config.dropout:
                torch.manual_seed(rng_seed(seed, "dropout", first_batch + iteration))  # dropout knows only the global one
            x, y = data.batch(cfg.batch_size, T, seed, first_batch + iteration, device)
            with autocast(device, dtype):
                _, loss = stepper(x, y)
            train_loss = loss.item()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf).item()
            if not math.isfinite(train_loss + norm):  # before the weights or a checkpoint see it
                what = f"the loss is {train_loss}, its gradient's norm {norm}"
                raise FloatingPointError(f"{name}: {what}, at iteration {iteration}; last.pt is kept")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            # log
            steps_timed += 1
            tokens_timed += x.numel()
            now = time.perf_counter()
            seconds_timed += now - step_start
            if iteration % cfg.log_interval == 0 or metrics:
                rate = tokens_timed / seconds_timed
                metrics |= {"train/loss": train_loss, "lr": lr, "grad_norm": norm}
                metrics |= {"tokens_per_s": rate, "elapsed_s": elapsed + now - start}
                run.log(metrics, step=iteration)
                said = "".join(f"{key.replace('/', ' ').removesuffix(' loss')} {value:.3f}, " for key, value in val.items())
                bar.set_postfix_str(f"loss {train_loss:.3f}, {said}{rate:,.0f} tok/s")
                if bar.disable and (now - spoken > 20 or "val/loss" in metrics):
                    eta = (cfg.steps - iteration) * seconds_timed / steps_timed
                    print(
                        f"{name}: step {iteration}/{cfg.steps}, loss {train_loss:.3f}, {said}"
                        f"{rate:,.0f} tokens/s, ETA {eta // 60:.0f}:{eta % 60:02.0f}",
                        flush=True,
                    )
                    spoken = now
            iteration += 1
            bar.update()
        summary = {
            **(extra or {}),
            **{f"{key.replace('/', '_')}_final": value for key, value in val.items()},
            "val_loss_best": best,
            "steps": cfg.steps,
            "n_kv": model.config.n_kv,
            "seed": seed,
            "n_params": model.n_params(),
            "corpus": data.meta["corpus"],
            "dtype": dtype,
            "attention": attention,
            "commit": commit(made_by),
            "machine": made_by["machine"],
            "elapsed_s": elapsed + time.perf_counter() - start,
        }
        if seconds_timed:
            summary["tokens_per_s"] = tokens_timed / seconds_timed
        run.summary(summary)
    return summary


def autocast(device, dtype):
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def compiled(model, data, cfg, T, device, dtype):
    """torch.compile'd model, tried once; the plain model, with one line, where there is no working compiler."""
    stepper = torch.compile(model)
    x, y = data.batch(cfg.batch_size, T, 0, 0, device)
    try:
        with autocast(device, dtype):
            stepper(x, y)[1].backward()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        print(f"compile=true does not work here, training goes on without it: {reason}", file=sys.stderr)
        stepper = model
    model.zero_grad(set_to_none=True)
    return stepper
