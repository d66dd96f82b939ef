"""
Text to token ids and back: one character a token, GPT-2's byte pairs, or SmolLM's, which a checkpoint brings along.

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
# SmolLM's: digits are cut out first, each one alone, and GPT-2's rule splits what lies between. So a digit never takes
# the space before it, and spaces before a digit stay whole, as they do at the end of a text
SMOLLM_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|$)|\s+(?!\S)|\s"""


def tokenizer_from(state):
    """The tokenizer whose `state()` this is. InputError for anything else."""
    kind = state.get("kind") if isinstance(state, dict) else None
    if kind == "char" and isinstance(state.get("chars"), str):
        return CharTokenizer(state["chars"])
    if kind == "gpt2":
        return BPETokenizer()
    if kind == "smollm" and isinstance(state.get("tokens"), str) and type(state.get("n_special")) is int:
        return SmolLMTokenizer(state["tokens"].split(" "), state["n_special"])
    if kind == "recall":
        raise InputError("a checkpoint of data=recall knows keys and values, not text: retrieval.py measures it")
    raise InputError(f"tokenizer kind {kind!r} is not known; allowed: 'char' or 'smollm' with what they consist of, 'gpt2'")


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


class SmolLMTokenizer:
    """
    SmolLM's byte pairs. It carries its whole vocabulary, 49,152 tokens in SmolLM2, so that a checkpoint needs no file.

    tokens     list of str, one a token, in GPT-2's way of writing bytes as printable characters (a space is Ġ): first
               `n_special` special ones, written as they are, then single bytes, then what each merge makes, in order
    The order is all there is to know about the merges: of two neighbours, those that make the lowest id are joined first.
    """

    def __init__(self, tokens, n_special):
        self.tokens, self.vocab_size = tokens, len(tokens)
        self.special = {token: i for i, token in enumerate(tokens[:n_special])}
        letter = _byte_letters()
        try:
            self._ranks = {bytes(letter[c] for c in token): i for i, token in enumerate(tokens) if i >= n_special}
        except KeyError as error:
            raise InputError(f"this vocabulary is none of bytes: a token has {error} in it") from None
        if len(self._ranks) + len(self.special) < self.vocab_size:
            raise InputError("this vocabulary has a token twice")
        self._missing = {b for b in range(256) if bytes([b]) not in self._ranks}

    @classmethod
    def from_gguf(cls, metadata):
        """The tokenizer in the metadata of a GGUF file (convert.read_gguf). InputError for one that splits otherwise."""
        at = "tokenizer.ggml"
        kind = metadata.get(f"{at}.model"), metadata.get(f"{at}.pre")
        if kind != ("gpt2", "smollm"):
            raise InputError(
                f"this GGUF file's tokenizer is {kind[0]!r} with the split of {kind[1]!r}, not 'gpt2' and 'smollm'"
            )
        tokens, types = metadata[f"{at}.tokens"], metadata[f"{at}.token_type"]
        merged = [pair.replace(" ", "") for pair in metadata[f"{at}.merges"]]
        n_special = types.count(3)  # llama.cpp's number for them
        if merged != tokens[len(tokens) - len(merged) :] or types != [3] * n_special + [1] * (len(types) - n_special):
            raise InputError("this GGUF file's tokens are not special ones, bytes, and what its merges make, in their order")
        return cls(tokens, n_special)

    def encode(self, text):
        """
        List of ids. Special text like <|im_start|> is encoded as the ordinary characters it consists of. InputError for characters with a byte that the vocabulary lacks: SmolLM2's has
        neither some control characters nor the rarest planes of Unicode.
        """
        raw = text.encode(errors="replace")  # half a surrogate pair; tiktoken has a character for it too
        if not self._missing.isdisjoint(raw):
            bad = [c for c in dict.fromkeys(text) if not self._missing.isdisjoint(c.encode(errors="replace"))]
            raise InputError(f"{len(bad)} character(s) that this vocabulary has no bytes for: {', '.join(map(repr, bad[:5]))}")
        return self._encoding.encode_ordinary(text)

    def decode(self, ids):
        """The text of these ids; bytes that are not UTF-8 become U+FFFD. InputError for an id outside the vocabulary."""
        return self._encoding.decode(_checked_ids(ids, self.vocab_size))

    def state(self):
        return {"kind": "smollm", "tokens": " ".join(self.tokens), "n_special": len(self.special)}  # no token has a space

    @functools.cached_property
    def _encoding(self):
        import tiktoken

        return tiktoken.Encoding("smollm", pat_str=SMOLLM_PATTERN, mergeable_ranks=self._ranks, special_tokens=self.special)


def _byte_letters():
    """{character: byte} of GPT-2's vocabularies: printable Latin-1 is itself, other bytes are the characters from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


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
