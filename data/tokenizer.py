"""
Text to token ids and back: one character a token, or GPT-2's byte pairs.

    tokenizer = CharTokenizer.from_text(text)
    ids = tokenizer.encode("ROMEO:")           # list of int, one a token
    tokenizer.decode(ids)                      # "ROMEO:"
    tokenizer_from(tokenizer.state())          # the same tokenizer: state() is what a checkpoint carries
"""

import functools
import hashlib
import os
import tempfile
from pathlib import Path

from cli import InputError
from data.corpus import download, write_atomically

GPT2_DIR = Path(__file__).parent / "shakespeare_bpe"  # GPT-2's two files may be placed here by hand
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_SHA256 = {  # the sums that tiktoken itself expects
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
# GPT-2's own split into words, contractions and numbers: merges never cross these borders
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def tokenizer_from(state):
    """The tokenizer whose `state()` this is. InputError for anything else."""
    kind = state.get("kind") if isinstance(state, dict) else None
    if kind == "char" and isinstance(state.get("chars"), str):
        return CharTokenizer(state["chars"])
    if kind == "gpt2":
        return BPETokenizer()
    if kind == "recall":
        raise InputError("a checkpoint of data=recall knows keys and values, not text; its run's metrics hold val/accuracy")
    raise InputError(f"tokenizer kind {kind!r} is not known; allowed: 'char' with its characters, 'gpt2'")


def _checked_ids(ids, vocab_size):
    ids = [int(i) for i in ids]  # a tensor or an array will do as well
    for i in ids:
        if not 0 <= i < vocab_size:  # a negative id would otherwise quietly count from the end
            raise InputError(f"token id {i} is outside the vocabulary; allowed: 0 to {vocab_size - 1}")
    return ids


class CharTokenizer:
    """One token a character; ids follow the sorted order of the characters, as in nanoGPT."""

    def __init__(self, chars):
        self.chars = "".join(sorted(set(chars)))
        self.vocab_size = len(self.chars)
        self._id = {c: i for i, c in enumerate(self.chars)}

    @classmethod
    def from_text(cls, text):
        return cls(text)

    def encode(self, text):
        """List of ids, one a character. InputError names the characters that the vocabulary lacks."""
        unknown = [c for c in dict.fromkeys(text) if c not in self._id]
        if unknown:
            first = ", ".join(repr(c) for c in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            allowed = repr(self.chars[:100]) + ("..." if self.vocab_size > 100 else "")
            raise InputError(
                f"{len(unknown)} character(s) outside the vocabulary: {first}; allowed are {self.vocab_size}: {allowed}"
            )
        return [self._id[c] for c in text]

    def decode(self, ids):
        """The text of these ids. InputError for an id outside 0 .. vocab_size - 1."""
        return "".join(self.chars[i] for i in _checked_ids(ids, self.vocab_size))

    def state(self):
        return {"kind": "char", "chars": self.chars}


class BPETokenizer:
    """GPT-2's byte-pair encoding. Its files are only looked for when the first text is encoded or decoded."""

    vocab_size = 50257

    def encode(self, text):
        """List of ids. Special text like <|endoftext|> is encoded as the ordinary characters it consists of."""
        return self._encoding.encode_ordinary(text)

    def decode(self, ids):
        """The text of these ids; bytes that are not UTF-8 become U+FFFD. InputError for an id outside 0 .. 50256."""
        return self._encoding.decode(_checked_ids(ids, self.vocab_size))

    def state(self):
        return {"kind": "gpt2", "n_vocab": self.vocab_size}

    @functools.cached_property
    def _encoding(self):
        import tiktoken  # here, so that the character path never needs it
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks

        vocab_bpe, encoder_json = _gpt2_file("vocab.bpe"), _gpt2_file("encoder.json")
        try:
            ranks = data_gym_to_mergeable_bpe_ranks(
                vocab_bpe, encoder_json, GPT2_SHA256["vocab.bpe"], GPT2_SHA256["encoder.json"]
            )
        except (OSError, ValueError) as e:  # tiktoken's cache folder is damaged or not writable
            raise InputError(f"tiktoken cannot read GPT-2's vocabulary ({e}); {_where_to_put_them()}") from e
        return tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": 50256},
            explicit_n_vocab=self.vocab_size,
        )


def _gpt2_file(name):
    """A path, or a URL that tiktoken already holds, of one of GPT-2's two files: placed, cached, downloaded."""
    placed, url = GPT2_DIR / name, GPT2_URL + name
    if placed.exists():
        try:
            ok = hashlib.sha256(placed.read_bytes()).hexdigest() == GPT2_SHA256[name]
        except OSError as e:
            raise InputError(f"{placed}: {e.strerror}; {_where_to_put_them()}") from e
        if not ok:
            raise InputError(f"{placed} is not GPT-2's {name} (its sha256 differs); {_where_to_put_them()}")
        return str(placed)
    # tiktoken's cache names a file by the sha1 of its URL; where it is there, tiktoken reads it without network
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    cached = Path(cache) / hashlib.sha1(url.encode()).hexdigest()
    if cache and cached.is_file() and hashlib.sha256(cached.read_bytes()).hexdigest() == GPT2_SHA256[name]:
        return url
    # not left to tiktoken, which waits for a dead network without a limit
    try:
        write_atomically(placed, download(url, GPT2_SHA256[name]))
    except OSError as e:
        raise InputError(f"GPT-2's vocabulary is not here and cannot be fetched ({e}); {_where_to_put_them()}") from e
    return str(placed)


def _where_to_put_them():
    return f"put {GPT2_URL}vocab.bpe and {GPT2_URL}encoder.json into {os.path.relpath(GPT2_DIR)}/"
