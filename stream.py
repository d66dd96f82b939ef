"""
What models learn from and are measured on: text in windows, associative recall in sequences made anew.

    data = load_data("shakespeare_char", block_size=256)
    x, y = data.batch(batch_size, block_size, seed, iteration)
    data.evaluate(model)                       # {"val/loss": …}

Every batch is a function of (seed, iteration), so every n_kv sees the same ones, whatever was interrupted.
"""

import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from cli import InputError
from data.recall import task as recall
from model import rng

RECALL_EXAMPLES = 16  # for each of 8 distances: one of these 128 is 0.8 % of the accuracy


@dataclass(frozen=True)
class DataConfig:
    """configs/data/: the data set's folder, and a text of one's own (None: Tiny Shakespeare)."""

    name: str
    source: str | None


@dataclass(frozen=True)
class Data:
    """
    A prepared data set: `train` and `val` are int64-readable memmaps, `meta` is its meta.json; `window`, if given, the
    tokens at a time to train and to be measured on, in place of the model's context.
    """

    train: np.memmap
    val: np.memmap
    meta: dict
    window: int | None = None

    @property
    def identity(self):
        """What a checkpoint and a run remember of the data."""
        meta = self.meta
        return {key: meta[key] for key in ("dataset", "corpus", "sha256", "origin", "vocab_size", "tokens")}

    def batch(self, *args):
        """get_batch of the training split, which see for the arguments."""
        return get_batch(self.train, *args)

    def samples(self, n, T):
        """n windows of T tokens spread over the training split: pairs of inputs and targets [1, T]."""
        for start in np.linspace(0, len(self.train) - T - 1, n).astype(int):
            window = torch.from_numpy(self.train[start : start + T + 1].astype(np.int64))[None]  # [1, T+1]
            yield window[:, :-1], window[:, 1:]

    def evaluate(self, model):
        """What validation finds, by its names in the log."""
        return {"val/loss": evaluate(model, self.val, window=self.window)}


class Recall(Data):
    """Associative recall, data/recall/: `val` is its fixed examples, and there is no `train`, as each batch is made anew."""

    def batch(self, batch_size, block_size, seed, iteration, device="cpu"):
        """Inputs and targets [B, T] of one iteration, about batch_size * block_size tokens, the same for every n_kv."""
        idx, targets = recall.batch(rng(seed, "data", iteration), iteration, batch_size * block_size, block_size)
        return idx.to(device), targets.to(device)

    def samples(self, n, T):
        """n sequences of T tokens as the end of training has them: pairs of inputs and targets [1, T]."""
        after = 2 * recall.CURRICULUM[-1][0]
        return (recall.batch(rng(0, "samples", i), after, T, T) for i in range(n))

    def evaluate(self, model):
        """Mean loss of the answers, in nats and float32, and how many of them are the most likely token."""
        tokens, answers, _ = self.val
        return recall_loss(model, tokens, answers)


def load_recall(source, block_size):
    """The data set of associative recall for a context. InputError for a text, and for a context too short for two pairs."""
    if source is not None:
        raise InputError(f"data.source={source} is not allowed: recall makes its own sequences")
    if block_size < 32:
        raise InputError(f"model.block_size={block_size} is too short for data=recall: at least 32")
    val = tokens, answers, _ = recall.examples(block_size, RECALL_EXAMPLES)
    meta = {
        "dataset": "recall",
        "corpus": "recall",
        "sha256": hashlib.sha256(torch.cat((tokens, answers[:, None]), dim=1).numpy().tobytes()).hexdigest(),
        "origin": "data/recall/task.py",
        "vocab_size": recall.VOCAB_SIZE,
        "tokens": {"val": tokens.numel()},
        "tokenizer": {"kind": "recall", "keys": recall.KEYS, "values": recall.VALUES},
    }
    return Recall(None, val, meta)


def load_data(name, source=None, block_size=None, tokenizer=None):
    """
    Prepare (if needed) and open a data set by its folder's name; `tokenizer` is a checkpoint's, for shakespeare_own.
    InputError when a split is too short to train on.
    """
    if name == "recall":
        return load_recall(source, block_size)
    folders = sorted(p.parent.name for p in Path(__file__).parent.glob("data/*/prepare.py"))
    if name not in folders:
        raise InputError(f"data={name!r} is unknown: {', '.join(sorted([*folders, 'recall']))}")
    own = (tokenizer,) if name == "shakespeare_own" else ()
    folder = importlib.import_module(f"data.{name}.prepare").prepare(source, *own)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    splits = {split: np.memmap(folder / f"{split}.bin", dtype=meta["dtype"], mode="r") for split in ("train", "val")}
    for split, tokens in splits.items():
        if block_size is not None and len(tokens) <= block_size:
            raise InputError(
                f"the {split} split of {meta['corpus']} has {len(tokens)} tokens, too few for block_size={block_size}: "
                f"give a longer text, or model.block_size={max(1, min(len(t) for t in splits.values()) - 1)} or less"
            )
    return Data(splits["train"], splits["val"], meta, block_size)


def get_batch(tokens, batch_size, block_size, seed, iteration, device="cpu"):
    """Inputs and targets [B, T] of one iteration: B windows at random places, the same for every model of this seed."""
    starts = torch.randint(len(tokens) - block_size, (batch_size,), generator=rng(seed, "data", iteration))
    windows = np.stack([tokens[i : i + block_size + 1] for i in starts.tolist()]).astype(np.int64)  # [B, T+1]
    windows = torch.from_numpy(windows).to(device)
    return windows[:, :-1], windows[:, 1:]


def windows_of(tokens, T, batch_size):
    """
    Batches of inputs and targets [B, T] that go over all tokens once: non-overlapping windows of T, `batch_size` of them at
    a time, the last one shorter and alone; every token but the first is predicted exactly once.
    """
    n = len(tokens) - 1
    full = n // T * T
    x = torch.from_numpy(tokens[:full].astype(np.int64)).view(-1, T)  # [windows, T]
    y = torch.from_numpy(tokens[1 : full + 1].astype(np.int64)).view(-1, T)  # [windows, T]
    batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True)) if full else []
    if full < n:
        rest = torch.from_numpy(tokens[full:].astype(np.int64))
        batches.append((rest[None, :-1], rest[None, 1:]))
    return batches


@torch.no_grad()
def evaluate(model, tokens, batch_size=None, window=None):
    """
    Mean loss in nats per token over the whole split, in float32: one pass over windows of `window` tokens, by default
    block_size; `batch_size` of them at a time, by default about 4,096 tokens.
    """
    was_training = model.training
    model.eval()
    T, device = window or model.config.block_size, next(model.parameters()).device
    total = 0.0
    for x, y in windows_of(tokens, T, batch_size or max(1, 4096 // T)):
        logits, _ = model(x.to(device))
        total += F.cross_entropy(logits.float().flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
    model.train(was_training)
    return total / (len(tokens) - 1)


@torch.no_grad()
def recall_loss(model, tokens, answers):
    """Mean loss, in float32, and accuracy of the answers [N] to the last of tokens [N, T]; 8,192 tokens at a time."""
    was_training = model.training
    model.eval()
    device, batch_size = next(model.parameters()).device, max(1, 8192 // tokens.size(1))
    total, right = 0.0, 0
    for x, y in zip(tokens.split(batch_size), answers.to(device).split(batch_size), strict=True):
        logits = model.lm_head(model.features(x.to(device))[:, -1]).float()  # [B, V]
        total += F.cross_entropy(logits, y, reduction="sum").item()
        right += (logits.argmax(dim=1) == y).sum().item()
    model.train(was_training)
    return {"val/loss": total / len(answers), "val/accuracy": right / len(answers)}
