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
    """
    The folder with train.bin, val.bin and meta.json; made when it is not there yet.
    `source` is a UTF-8 text file, by default Tiny Shakespeare. InputError for what cannot be used.
    """
    corpus = corpora.load_corpus(source)
    folder = corpora.prepare(DATASET_DIR, corpus, CharTokenizer.from_text(corpus.text))
    if corpus.sha256 == corpora.TINY_SHAKESPEARE_SHA256:
        meta = corpora.read_meta(folder)
        assert (meta["vocab_size"], meta["tokens"]) == (VOCAB_SIZE, TOKENS), meta
    return folder


def main(args=None):
    return corpora.prepare_command(__doc__, prepare, sys.argv[1:] if args is None else args)


if __name__ == "__main__":
    sys.exit(main())
