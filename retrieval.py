"""
Does a cache still find what it holds? Exact retrieval through any kind of cache, where a loss, an average over all tokens,
may have hardly moved.

    python retrieval.py sweep=recall cache=kivi cache.bits=2        models of `train.py data=recall`: accuracy by distance
    python retrieval.py ckpt=smollm2.pt cache=kivi cache.bits=2     the model of `make pretrained`: pass keys by length and depth
    python retrieval.py -m sweep=recall cache=kivi cache.bits=8,4,2

Recall: a key's value has to be found among 48 pairs (data/recall/task.py); right is the most likely token. Pass key: five
digits hidden in a text (data/passkey.py); right are all five, greedily. Every prompt goes through the cache as generation
would see it. Prints a table; the same numbers go to runs/<sweep>/retrieval-<run>-<cache>/ and W&B.
"""

import itertools
import json
from dataclasses import asdict, dataclass

import torch
from tqdm import tqdm

from cli import InputError, script
from data.passkey import passkey_prompt
from data.recall.task import examples
from data.tokenizer import tokenizer_from
from decoding import cache_config, generate, make_cache
from storage import checkpoints_of, load_calibration, load_checkpoint, load_model, open_run
from tracking import Run, WandbConfig, commit, provenance
from training import set_up_device

TOKENS = 8192  # through the model at once


def recall_accuracy(model, new_cache, n):
    """{distance: accuracy} of n examples for each distance, as long as the model's context."""
    tokens, answers, distances = examples(model.config.block_size, n)  # [N, T], [N], [N]
    batch_size = max(1, TOKENS // tokens.size(1))
    right = []
    parts = list(zip(tokens.split(batch_size), answers.split(batch_size), strict=True))
    for x, y in tqdm(parts, desc="recall", unit="batch", disable=None, leave=False):
        x = x.to(model.wte.weight.device)
        (answer,) = generate(model, x, 1, new_cache(x.size(1), len(x)), temperature=0)  # [B]
        right.append(answer.cpu() == y)
    right = torch.cat(right).float()
    return {int(d): right[distances == d].mean().item() for d in distances.unique()}


def passkey_accuracy(model, tokenizer, new_cache, lengths, depths, keys):
    """{(length, depth): share of `keys` keys whose five digits all came} by greedy decoding."""
    accuracy = {}
    cells = list(itertools.product(lengths, depths))
    for length, depth in tqdm(cells, desc="pass key", unit="cell", disable=None, leave=False):
        right = 0
        for seed in range(keys):
            ids, key = passkey_prompt(tokenizer, length, depth, seed)
            idx = torch.tensor(ids, device=model.wte.weight.device)[None]  # [1, T]
            digits = torch.cat(list(generate(model, idx, 5, new_cache(length + 5, 1), temperature=0)))
            right += tokenizer.decode(digits.tolist()) == key
        accuracy[length, depth] = right / keys
    return accuracy


def show(accuracy):
    """The table: a line of distances, or lengths by depths."""
    if not isinstance(next(iter(accuracy)), tuple):
        print("  distance  " + "".join(f"{d:>7,}" for d in accuracy) + "    mean")
        print("  accuracy  " + "".join(f"{a:>7.1%}" for a in [*accuracy.values(), sum(accuracy.values()) / len(accuracy)]))
        return
    lengths, depths = (sorted({key[i] for key in accuracy}) for i in range(2))
    print("  length   " + "".join(f"{f'depth {d:g}':>12}" for d in depths))
    for length in lengths:
        print(f"  {length:>6,}   " + "".join(f"{accuracy[length, d]:>12.0%}" for d in depths), flush=True)


def measure(path, cfg, device):
    """Measure one checkpoint through one cache, print and record it; or print the record, if this was measured before."""
    checkpoint = load_checkpoint(path, device)
    was, kind = checkpoint["config"], checkpoint["tokenizer"]["kind"]
    tokenizer = None if kind == "recall" else tokenizer_from(checkpoint["tokenizer"])
    if kind == "char" or (tokenizer and len(tokenizer.encode("90210")) != 5):
        raise InputError(
            f"{path} reads {kind} tokens: retrieval is for models of data=recall, or of a tokenizer whose digits are a token "
            "each, such as that of `make pretrained`"
        )
    model = load_model(checkpoint, device).eval()
    c = model.config
    if tokenizer and max(cfg.lengths) + 5 > c.block_size:
        raise InputError(f"lengths={cfg.lengths} do not fit the model's context of {c.block_size} with five digits after them")
    calibration = load_calibration(path, model, cfg.cache)
    label = cfg.cache.label() + (f"-{cfg.cache_dtype}" if cfg.cache_dtype else "")
    name = cfg.name or f"retrieval-{was['name']}-{label}"
    what = {"examples": cfg.examples} if kind == "recall" else {"lengths": cfg.lengths, "depths": cfg.depths, "keys": cfg.keys}
    config = {
        "script": "retrieval", "sweep": was["sweep"], "name": name, "seed": checkpoint["seed"],
        "model": checkpoint["model_config"], **what, "cache": {"kind": label, "dtype": cfg.cache_dtype or str(model.wte.weight.dtype).removeprefix("torch."), **asdict(cfg.cache)},
        "parent": {"name": was["name"], "script": was["script"], "iteration": checkpoint["iteration"]},
    }  # fmt: skip

    def new_cache(tokens, batch):
        return make_cache(model, tokens, batch, cfg.cache_dtype and getattr(torch, cfg.cache_dtype), cfg.cache, calibration)

    new_cache(16, 1)  # what is wrong is said before a folder is made
    if tokenizer:
        passkey_prompt(tokenizer, min(cfg.lengths), cfg.depths[0], 0)
    folder, state = open_run(config)
    print(f"\n{was['sweep']}/{was['name']}: n_kv={c.n_kv}, {c.n_layer} layers, cache {label}")
    if state == "finished" and not cfg.again:
        summary = json.loads((folder / "summary.json").read_text())
        print(f"  measured before, on {summary['machine']} (again=true measures anew, name=… beside it)")
        show({tuple(json.loads(k)) if tokenizer else int(k): a for k, a in summary["accuracy"].items()})
        return
    made_by = provenance()
    with Run(folder, name=name, group=was["sweep"], job_type="retrieval", config=config, **asdict(cfg.wandb)) as run:
        if kind == "recall":
            accuracy = recall_accuracy(model, new_cache, cfg.examples)
            for distance, share in accuracy.items():
                run.log({"accuracy": share}, step=distance)
        else:
            accuracy = passkey_accuracy(model, tokenizer, new_cache, cfg.lengths, cfg.depths, cfg.keys)
            for length in cfg.lengths:
                run.log({f"accuracy/depth{depth:g}": accuracy[length, depth] for depth in cfg.depths}, step=length)
        show(accuracy)
        run.summary(
            {
                "accuracy": {str(k) if kind == "recall" else json.dumps(k): a for k, a in accuracy.items()},
                "accuracy_mean": sum(accuracy.values()) / len(accuracy), "n_kv": c.n_kv, "seed": checkpoint["seed"],
                "cache": label, "commit": commit(made_by), "machine": made_by["machine"],
            }
        )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """configs/retrieval.yaml, where each key has its reason."""

    wandb: WandbConfig
    ckpt: str | None
    sweep: str | None
    name: str | None
    again: bool
    examples: int
    lengths: list
    depths: list
    keys: int
    cache: dict
    cache_dtype: str | None
    device: str
    threads: int | None

    def __post_init__(self):
        for key in ("examples", "keys"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} is not allowed: a whole number of at least 1")
        if not self.lengths or any(type(n) is not int for n in self.lengths) or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths={self.lengths} is not allowed: a list of growing whole numbers, e.g. lengths=[512,1024]")
        if not self.depths or any(type(d) not in (int, float) or not 0 <= d <= 1 for d in self.depths):
            raise ValueError(f"depths={self.depths} is not allowed: a list of numbers from 0 to 1, e.g. depths=[0,0.5,1]")
        if self.cache_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"cache_dtype={self.cache_dtype} is not allowed: float32, bfloat16 or float16, or null for the weights'"
            )
        object.__setattr__(self, "cache", cache_config(self.cache))
        if self.cache is None:
            raise ValueError("cache=none is not allowed: there would be nothing to measure; cache=dense is the reference")


@script("retrieval", Settings)
def main(cfg):
    device = set_up_device(cfg.device, cfg.threads)
    for path in checkpoints_of(cfg.ckpt, cfg.sweep):
        measure(path, cfg, device)


if __name__ == "__main__":
    main()
