"""
Turn a trained checkpoint into one with fewer key-value heads: pool them, then train on for a few percent of the
original steps ("uptraining", GQA paper, arXiv 2305.13245, section 2.1).

    python uptrain.py ckpt=mha.pt groups=2                   MHA -> GQA with 2 KV heads, 5 % of the parent's steps
    python uptrain.py ckpt=mha.pt groups=2 pool=svd          the shared heads that lose least (pool=mean|first|random|aligned|svd)
    python uptrain.py ckpt=mha.pt groups=1 pool=first        MQA, keeping each group's first head
    python uptrain.py ckpt=mha.pt groups=8                   nothing to pool: the parent, trained on for as many steps
    python uptrain.py ckpt=runs/cpu/kv2-s1/last.pt groups=1 fraction=0.1 rate=0.3       10 %, at 0.3 of the parent's peak rate
    python uptrain.py ckpt=gqa2.pt groups=8 steps=0          more heads: each is copied, and nothing else changes
    python uptrain.py ckpt=gpt2 groups=2 data=shakespeare_bpe steps=200       a GPT-2 of the Hugging Face Hub
    python uptrain.py ckpt=PATH/TO/HF groups=4 parent_steps=100000            a Llama's folder, 5 % of that many steps

Prints the validation loss before, right after pooling, and after uptraining. Right after pooling it may well be near
ln(vocabulary), the loss of knowing nothing: that is normal, the heads of a group were never trained to agree. pool=aligned
and pool=svd look at a few batches of training text first; pooling.py says what they do.
A bare checkpoint name is looked up in checkpoints/, which `make sweep` fills. The same command again resumes or skips.
A parent from elsewhere has no schedule to take a fraction of, nor a text: steps= or parent_steps= is needed, and the rest
of the schedule is under `foreign`; the text is Tiny Shakespeare, or source=, in the tokens of its own tokenizer.
"""

import json
import math
from dataclasses import asdict, dataclass

import torch
import yaml

from cli import InputError, script, strict
from pooling import MEASURED, measure, pool_heads, pooled_config
from storage import RUNS, find_checkpoint, load_checkpoint, load_model, open_run
from stream import load_data
from tracking import WandbConfig
from training import TrainConfig, set_up_device, train

MEASURED_ON = 16  # sequences of the parent's text
GENTLE = 0.1  # of the parent's peak rate after pool=svd: that loses less than a restart at the peak does


@dataclass(frozen=True)
class Named:
    name: str | None


@dataclass(frozen=True)
class Settings:
    """configs/uptrain.yaml, where each key has its reason."""

    wandb: WandbConfig
    ckpt: str
    groups: int
    pool: str
    similar: bool
    fraction: float
    steps: int | None
    parent_steps: int | None
    rate: float | None
    data: Named
    window: int | None
    name: str | None
    sweep: str | None
    source: str | None
    keep: bool
    device: str
    threads: int | None
    train: dict
    foreign: dict

    def __post_init__(self):
        for key in ("parent_steps", "window"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} is not allowed: a whole number of at least 1, or null")
        if not 0 <= self.fraction <= 100:
            raise ValueError(f"fraction={self.fraction} is not allowed: 0.05 is 5 % of the parent's steps")
        if self.rate is not None and not 0 < self.rate <= 100:
            raise ValueError(f"rate={self.rate} is not allowed: 1 is the parent's peak learning rate, 0.1 a tenth of it")


def table(result):
    parent, pooled, uptrained = result["loss_parent"], result["loss_pooled"], result["val_loss_final"]
    at = f" at {rate:g} of its peak rate" if (rate := result.get("rate", 1)) != 1 else ""
    how = f", pool={result['pool']}" if result["groups"] <= result["n_kv_parent"] else ", each copied"
    of = f" ({result['fraction']:.1%} of the parent's {result['parent_steps']})" if result["parent_steps"] else ""
    lines = [
        f"\n{result['name']}: {result['n_kv_parent']} -> {result['groups']} KV heads{how}, {result['steps']} steps{of}{at}",
        f"  parent                    {parent:.4f} nats per token",
        f"  right after pooling       {pooled:.4f}   (+{pooled - parent:.4f}; ln(vocabulary) = {result['loss_uniform']:.4f})",
    ]
    if result["steps"]:
        lines.append(f"  after uptraining          {uptrained:.4f}   (+{uptrained - parent:.4f} above the parent)")
    if result["steps"] and pooled > max(parent, uptrained):
        lines.append(f"  of the jump, won back     {(pooled - uptrained) / (pooled - parent):.1%}")
    elif (steps := result["steps"]) and uptrained > pooled:
        lines.append(
            f"  of the jump, won back     none: these {steps} steps made the loss worse, as they may the parent's (groups={result['n_kv_parent']})"
        )
    return "\n".join(lines).replace("+-", "-")


def named(cfg, parent, n_kv_parent):
    """The run's name: what was made of which parent, and how far from the usual 5 % it was trained."""
    how = f"-{cfg.pool}{'-similar' * cfg.similar}" if cfg.groups <= n_kv_parent else ""  # more heads need no pooling
    steps = f"-{cfg.steps}steps" if cfg.steps is not None else "" if cfg.fraction == 0.05 else f"-{100 * cfg.fraction:g}pct"
    rate = "" if cfg.rate is None else f"-rate{cfg.rate:g}"
    return f"{parent}-to-kv{cfg.groups}{how}{steps}{rate}"


def measured_before(config, path):
    """The losses before any training that another run of this sweep has measured: a pass each costs as much as many steps."""

    def alike(*keys):
        return all(config.get(key) == other.get(key) for key in keys)

    found = {}
    for summary in sorted(RUNS.glob(f"{config['sweep']}/*/summary.json")):
        other = yaml.safe_load((summary.parent / "config.yaml").read_text())
        if alike("script", "parent", "data", "window") and summary.stat().st_mtime > path.stat().st_mtime:
            losses = json.loads(summary.read_text())
            found["loss_parent"] = losses["loss_parent"]
            if alike("model", "seed", "pool", "similar"):
                found["loss_pooled"] = losses["loss_pooled"]
    return found


@script("uptrain", Settings)
def main(cfg):
    device = set_up_device(cfg.device, cfg.threads)
    path = find_checkpoint(cfg.ckpt)
    checkpoint = load_checkpoint(path)
    home = path.resolve().parent
    if path.is_file() and (home / "config.yaml").exists() and not (home / "summary.json").exists():
        raise InputError(f"{path} belongs to a run that is not finished ({checkpoint['iteration']} steps): train it to its end")
    was, foreign = checkpoint["config"], dict(cfg.foreign)
    longest = foreign.pop("window")
    window = cfg.window or was.get("window") or checkpoint["model_config"]["block_size"]
    parent_steps, base = checkpoint["total_iterations"], was.get("train")
    rate = cfg.rate or (GENTLE if cfg.pool == "svd" and cfg.groups < checkpoint["model_config"]["n_kv"] and base else 1.0)
    if cfg.parent_steps and base:
        raise InputError(f"parent_steps={cfg.parent_steps} is for parents from elsewhere: {path} has done {parent_steps}")
    if base is None:
        if cfg.steps is None and cfg.parent_steps is None:
            raise InputError(
                f"{path} was not trained by train.py, so there is no schedule to take a fraction of: give steps=…, or "
                "parent_steps=… (then fraction= is of those)"
            )
        window = cfg.window or min(window, longest)
        parent_steps, base = cfg.parent_steps or 0, foreign
    if window > checkpoint["model_config"]["block_size"]:
        raise InputError(
            f"window={window} is more than the parent's context: {checkpoint['model_config']['block_size']} or less"
        )
    parent = load_model(checkpoint)
    try:
        model_config = pooled_config(parent.config, cfg.groups, cfg.pool)
    except ValueError as error:
        raise InputError(str(error)) from None
    steps = round(cfg.fraction * parent_steps) if cfg.steps is None else cfg.steps
    fraction = steps / parent_steps if parent_steps else 0.0
    lr = rate * base["lr"] / was.get("rate", 1)
    train_config = strict(TrainConfig, {**base, "lr": lr, **cfg.train, "steps": steps}, "train")

    data = load_data(cfg.data.name or checkpoint["data"]["dataset"], cfg.source, window, checkpoint["tokenizer"])
    if data.meta["tokenizer"] != checkpoint["tokenizer"]:
        raise InputError(
            f"{path} knows another vocabulary ({checkpoint['data']['vocab_size']} tokens, {checkpoint['data']['corpus']}) "
            f"than this text ({data.meta['vocab_size']} tokens, {data.meta['corpus']}): give source= the parent's text"
        )
    if cfg.source is None and checkpoint["data"]["sha256"] not in (None, data.meta["sha256"]):  # None: on none of our texts
        raise InputError(
            f"{path} was trained on {checkpoint['data']['corpus']}, not on {data.meta['corpus']}: give source= a text"
        )
    name = cfg.name or named(cfg, was["name"], parent.config.n_kv)
    ancestry = {
        "sweep": was["sweep"],
        "name": was["name"],
        "script": was["script"],
        "n_kv": parent.config.n_kv,
        "total_iterations": checkpoint["total_iterations"],
        "commit": checkpoint["provenance"]["commit"],
    }
    config = {
        "script": "uptrain",
        "sweep": cfg.sweep or was["sweep"],
        "name": name,
        "seed": checkpoint["seed"],
        "pool": cfg.pool,
        **({"similar": True} if cfg.similar else {}),
        "fraction": fraction,
        **({"rate": rate} if rate != 1 else {}),
        "model": asdict(model_config),
        "train": asdict(train_config),
        "data": data.identity,
        "parent": ancestry,
    }
    if window != model_config.block_size:
        config["window"] = window
    folder, state = open_run(config)
    if state == "finished":
        print(f"{name}: finished before ({folder})")
        print(table(json.loads((folder / "summary.json").read_text())))
        if cfg.keep and not (folder / "last.pt").exists():
            print(f"  its checkpoints were deleted (keep=false): delete {folder} too, and the same command makes them again")
        return
    print(f"{name}: from {path} ({was['sweep']}/{was['name']}, {checkpoint['total_iterations']} steps)", flush=True)
    seen = None
    if cfg.groups < parent.config.n_kv and (cfg.pool in MEASURED or cfg.similar):
        text = data.samples(MEASURED_ON, min(512, window))  # attention weights grow with T^2
        seen = measure(parent, torch.cat([x for x, _ in text]))
    model = pool_heads(parent, cfg.groups, cfg.pool, checkpoint["seed"], seen, cfg.similar)
    before = measured_before(config, path)
    for key, unmeasured in (("loss_parent", parent), ("loss_pooled", model)):
        if key not in before:
            before[key] = data.evaluate(unmeasured.to(device))["val/loss"]
    result = {
        "name": name,
        "n_kv_parent": parent.config.n_kv,
        "groups": model.config.n_kv,
        "pool": cfg.pool,
        "fraction": fraction,
        "rate": rate,
        "parent_steps": parent_steps,
        **before,
        "loss_uniform": math.log(model.config.vocab_size),
    }
    summary = train(
        model, data, train_config, config, folder, device=device, wandb=cfg.wandb, job_type="uptrain",
        first_batch=checkpoint["total_iterations"], parent=ancestry, extra=result,
    )  # fmt: skip
    print(table(summary))
    if cfg.keep:
        print(f"  -> {folder}/last.pt", flush=True)
        return
    for file in folder.glob("*.pt"):
        file.unlink()
    print(f"  -> {folder}/summary.json", flush=True)


if __name__ == "__main__":
    main()
