"""
Turn a trained checkpoint into one with fewer key-value heads: pool them, then train on for a few percent of the
original steps ("uptraining", GQA paper, arXiv 2305.13245, section 2.1).

    python uptrain.py ckpt=mha.pt groups=2                   MHA -> GQA with 2 KV heads, 5 % of the parent's steps
    python uptrain.py ckpt=mha.pt groups=2 pool=svd          the shared heads that lose least (pool=mean|first|random|aligned|svd)
    python uptrain.py ckpt=mha.pt groups=1 pool=first        MQA, keeping each group's first head
    python uptrain.py ckpt=mha.pt groups=8                   nothing to pool: the parent, trained on for as many steps
    python uptrain.py ckpt=runs/cpu/kv2-s1/last.pt groups=1 fraction=0.1
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

from cli import InputError, script, strict
from pooling import MEASURED, measure, pool_heads, pooled_config
from storage import find_checkpoint, load_checkpoint, load_model, open_run
from stream import load_data
from tracking import WandbConfig
from training import TrainConfig, set_up_device, train

MEASURED_ON = 16  # sequences of the parent's text


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
    data: Named
    window: int | None
    name: str | None
    sweep: str | None
    source: str | None
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


def table(result):
    parent, pooled, uptrained = result["loss_parent"], result["loss_pooled"], result["val_loss_final"]
    of = f" ({result['fraction']:.1%} of the parent's {result['parent_steps']})" if result["parent_steps"] else ""
    lines = [
        f"\n{result['name']}: {result['n_kv_parent']} -> {result['groups']} KV heads, pool={result['pool']}, "
        f"{result['steps']} steps{of}",
        f"  parent                    {parent:.4f} nats per token",
        f"  right after pooling       {pooled:.4f}   (+{pooled - parent:.4f}; ln(vocabulary) = {result['loss_uniform']:.4f})",
        f"  after uptraining          {uptrained:.4f}   (+{uptrained - parent:.4f} above the parent)",
    ]
    if pooled > max(parent, uptrained):
        lines.append(f"  of the jump, won back     {(pooled - uptrained) / (pooled - parent):.1%}")
    elif steps := result["steps"]:
        lines.append(
            f"  of the jump, won back     none: these {steps} steps made the loss worse, as they may the parent's (groups={result['n_kv_parent']})"
        )
    return "\n".join(lines).replace("+-", "-")


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
    changed = {key: value for key, value in cfg.train.items() if value is not None}
    train_config = strict(TrainConfig, {**base, **changed, "steps": steps}, "train")

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
    name = cfg.name or f"{was['name']}-to-kv{cfg.groups}-{cfg.pool}{'-similar' * cfg.similar}"
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
        return
    print(f"{name}: from {path} ({was['sweep']}/{was['name']}, {checkpoint['total_iterations']} steps)", flush=True)
    seen = None
    if cfg.pool in MEASURED or cfg.similar:
        text = data.samples(MEASURED_ON, min(512, window))  # attention weights grow with T^2
        seen = measure(parent, torch.cat([x for x, _ in text]))
    model = pool_heads(parent, cfg.groups, cfg.pool, checkpoint["seed"], seen, cfg.similar)
    result = {
        "name": name,
        "n_kv_parent": parent.config.n_kv,
        "groups": model.config.n_kv,
        "pool": cfg.pool,
        "fraction": fraction,
        "parent_steps": parent_steps,
        "loss_parent": data.evaluate(parent.to(device))["val/loss"],
        "loss_pooled": data.evaluate(model.to(device))["val/loss"],
        "loss_uniform": math.log(model.config.vocab_size),
    }
    summary = train(
        model, data, train_config, config, folder, device=device, wandb=cfg.wandb, job_type="uptrain",
        first_batch=checkpoint["total_iterations"], parent=ancestry, extra=result,
    )  # fmt: skip
    print(table(summary))
    print(f"  -> {folder}/last.pt", flush=True)


if __name__ == "__main__":
    main()
