"""
Tiny Shakespeare, or a text of your own, as characters: one token a character, in uint16 files to train on.

    python data/shakespeare_char/prepare.py
    python data/shakespeare_char/prepare.py source=my.txt
    TINY_SHAKESPEARE=path/to/input.txt python data/shakespeare_char/prepare.py

Prints the source, the corpus, its characters, the vocabulary, the tokens of each split, and the folder they are in.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, only this folder would be on the path

from data import corpus as corpora
from data.tokenizer import CharTokenizer

DATASET_DIR = Path(__file__).resolve().parent

# Expected facts of the exact Tiny Shakespeare
VOCAB_SIZE = 65
TOKENS = {"train": 1_003_854, "val": 111_540}


def prepare(source=None):
    return corpora.prepare_text(DATASET_DIR, source, CharTokenizer.from_text, VOCAB_SIZE, TOKENS)


def main(args=None):
    return corpora.prepare_command(__doc__, prepare, sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    sys.exit(main())
