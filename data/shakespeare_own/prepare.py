"""
Tiny Shakespeare, or a text of your own, in the tokens of a checkpoint that came from elsewhere: its own tokenizer's.
uptrain.py and eval.py prepare it by themselves; by hand it is

    python data/shakespeare_own/prepare.py tokenizer=PATH/TO/tokenizer.json
    python data/shakespeare_own/prepare.py tokenizer=PATH/TO/tokenizer.json source=my.txt

Prints the source, the corpus, its characters, the vocabulary, the tokens of each split, and the folder they are in.
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, only this folder would be on the path

from cli import InputError
from data import corpus as corpora
from data.tokenizer import HuggingFaceTokenizer, tokenizer_from

DATASET_DIR = Path(__file__).resolve().parent


def prepare(source=None, tokenizer=None):
    """The prepared folder for a tokenizer's state; each tokenizer has a folder of its own."""
    if tokenizer is None:
        raise InputError("data=shakespeare_own needs a checkpoint's tokenizer: by hand, tokenizer=PATH/TO/tokenizer.json")
    name = hashlib.sha256(json.dumps(tokenizer, sort_keys=True).encode()).hexdigest()[:8]
    return corpora.prepare(DATASET_DIR / name, corpora.load_corpus(source), tokenizer_from(tokenizer), DATASET_DIR.name)


def main(args=None):
    args = sys.argv[1:] if args is None else args
    paths = [arg.removeprefix("tokenizer=") for arg in args if arg.startswith("tokenizer=")]

    def with_tokenizer(source):
        try:
            state = HuggingFaceTokenizer(Path(paths[-1]).read_text(encoding="utf-8")).state() if paths else None
        except (OSError, ValueError) as error:
            raise error if isinstance(error, InputError) else InputError(f"tokenizer={paths[-1]}: {error}") from None
        return prepare(source, state)

    return corpora.prepare_command(__doc__, with_tokenizer, [arg for arg in args if not arg.startswith("tokenizer=")])


if __name__ == "__main__":
    sys.exit(main())
