"""
The models that serve.py serves: what is known of one before it is served, its Hugging Face folder, and what it has to say
of a text, or to answer, if the served model is still the same.
"""

import hashlib
import re
from dataclasses import asdict

import torch
from torch.nn import functional as F

from cli import InputError
from data.corpus import load_corpus
from data.recall.task import DISTANCES, examples
from data.tokenizer import tokenizer_from
from huggingface import OURS, config_from, contents, name_of, read_json, read_weights, to_huggingface, weight_files
from shapes import checkpoint_shape, find_shape
from storage import digest, find_checkpoint, load_checkpoint, load_model


def describe(key, ckpt):
    """What there is to know of `ckpt=` before it is served: a dict with its name, shape, and what identifies its weights."""
    path = find_checkpoint(ckpt)
    if path.is_file():
        name = path.stem if path.stem != "last" else path.parent.name  # runs/<sweep>/<name>/last.pt
        checkpoint = load_checkpoint(path)
        model = load_model(checkpoint)
        try:
            contents(model, tokenizer_from(checkpoint["tokenizer"]))  # what has no folder is refused before anything is made
        except InputError as error:
            raise InputError(f"{key}={ckpt}: {error}") from None
        return {
            "name": plain(name), "path": path, "folder": None, "shape": checkpoint_shape(ckpt), "weights": digest(model),
            "recall": checkpoint["tokenizer"]["kind"] == "recall",
        }  # fmt: skip
    if not (path / "tokenizer.json").is_file():
        raise InputError(f"{key}={ckpt} has no tokenizer.json: the benchmark speaks text")
    shape = find_shape(key, str(path))
    sha = hashlib.sha256((path / "config.json").read_bytes())
    try:
        for file in weight_files(path):
            with open(file, "rb") as f:
                sha.update(hashlib.file_digest(f, "sha256").digest())
    except InputError as error:
        raise InputError(f"{key}={ckpt}: {error}") from None
    ours = read_json(path / OURS) if (path / OURS).is_file() else {}
    return {
        "name": name_of(path), "path": path, "folder": path, "shape": shape, "weights": sha.hexdigest(),
        "recall": isinstance(ours.get("tokenizer"), dict) and ours["tokenizer"].get("kind") == "recall",
    }  # fmt: skip


def plain(name):
    """A name as a folder and a request can have it."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-") or "model"


def export(model, folder):
    """The model's Hugging Face folder: its own, or for a checkpoint of ours one that is written below `folder`, once."""
    if model["folder"] is None:
        model["folder"] = folder / "models" / model["name"]
        if not (model["folder"] / "config.json").is_file():  # it appears whole, and the run's folder is tied to the weights
            checkpoint = load_checkpoint(model["path"])
            model["folder"].parent.mkdir(parents=True, exist_ok=True)
            to_huggingface(load_model(checkpoint), tokenizer_from(checkpoint["tokenizer"]), model["folder"])
    return model["folder"]


def ours(model):
    """Our own model, in float32. A folder's with all rows of its embedding: the server has those beyond the last token too."""
    path = model["path"]
    if path.is_file():
        return load_model(load_checkpoint(path)).eval()
    config = config_from(read_json(path / "config.json"))
    state = read_weights(path, config)
    return load_model({"model_config": asdict(config), "model": {"lm_head.weight": state["wte.weight"], **state}}).eval()


@torch.no_grad()
def our_loss(model, windows):
    """Mean negative log-likelihood of all but the first token of each window, without any server."""
    model = ours(model)
    total = 0.0
    for window in windows:
        x = torch.tensor(window)[None]  # [1, T+1]
        logits, _ = model(x[:, :-1])  # [1, T, V]
        total += F.cross_entropy(logits.float().flatten(0, 1), x[0, 1:], reduction="sum").item()
    return total / sum(len(window) - 1 for window in windows)


@torch.no_grad()
def our_answers(model, tokens, batch=8):
    """The most likely token after each of tokens [N, T], without any server: a list."""
    model = ours(model)
    return [i for x in tokens.split(batch) for i in model.lm_head(model.features(x)[:, -1]).argmax(dim=1).tolist()]


def check_readable(model):
    """InputError, naming why, for a Hugging Face folder whose loss we cannot tell because our model does not express it."""
    if model["path"].is_dir():
        try:
            config_from(read_json(model["path"] / "config.json"))
        except InputError as error:
            raise InputError(f"{model['name']}: {error}; windows=0 serves it without comparing losses") from None


def windows_of_text(model, source, n, window, context):
    """The first `n` windows of validation text as the model's own tokens: one token more in each than the loss is of."""
    from tokenizers import Tokenizer

    T = window or min(context - 2, 512)  # the server wants room for the token it adds
    text = load_corpus(source).text
    text = text[int(0.9 * len(text)) :]  # as data/corpus.py splits
    tokens = Tokenizer.from_file(str(model["folder"] / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    windows = [tokens[i * T : (i + 1) * T + 1] for i in range(n)]
    if len(windows[-1]) < T + 1:
        raise InputError(f"windows={n} of {T} tokens are more than the validation text has: {(len(tokens) - 1) // T}")
    return windows


def recall_examples(n, context):
    """
    Tokens [N, context - 1] and answers, a list: what training evaluates recall on, n sequences for each distance, less the
    first token, as the server wants room for its answer.
    """
    distances = [distance for distance in DISTANCES if distance < context - 1]
    if not distances:
        raise InputError(f"context={context} is too short to look keys up: {DISTANCES[0] + 2} tokens or more, or windows=0")
    tokens, answers, _ = examples(context, n, distances)
    return tokens[:, 1:], answers.tolist()
