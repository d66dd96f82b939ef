"""
Tiny Shakespeare, or a text of your own, as SmolLM2's tokens: what the checkpoint of `make pretrained` is measured on.

    python data/shakespeare_smollm2/prepare.py
    python data/shakespeare_smollm2/prepare.py source=my.txt
    TINY_SHAKESPEARE=path/to/input.txt python data/shakespeare_smollm2/prepare.py

Prints the source, the corpus, its characters, the vocabulary, the tokens of each split, and the folder they are in.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, only this folder would be on the path

from cli import InputError
from data import corpus as corpora
from data.tokenizer import tokenizer_from

DATASET_DIR = Path(__file__).resolve().parent

# Expected facts of the exact Tiny Shakespeare
VOCAB_SIZE = 49_152
TOKENS = {"train": 305_111, "val": 35_983}


def load_tokenizer():
    """SmolLM2's tokenizer, from the file that pretrained.py leaves here. InputError when it is not there or damaged."""
    path = DATASET_DIR / "tokenizer.json"
    try:
        return tokenizer_from(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(f"{os.path.relpath(path)} is not there: `make pretrained` fetches SmolLM2 and writes it") from None
    except (OSError, ValueError) as error:  # an InputError is a ValueError
        raise InputError(f"{os.path.relpath(path)} cannot be read ({error}); `make pretrained` writes it anew") from None


def prepare(source=None):
    return corpora.prepare_text(DATASET_DIR, source, lambda text: load_tokenizer(), VOCAB_SIZE, TOKENS)


def main(args=None):
    return corpora.prepare_command(__doc__, prepare, sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    sys.exit(main())
