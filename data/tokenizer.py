"""
Text to token ids and back: one character a token, GPT-2's byte pairs, the keys and values of associative recall, or what a
checkpoint brings along: SmolLM's byte pairs, or any tokenizer.json of Hugging Face.

    tokenizer = CharTokenizer.from_text(text)
    ids = tokenizer.encode("ROMEO:")           # list of int, one a token
    tokenizer.decode(ids)                      # "ROMEO:"
    tokenizer_from(tokenizer.state())          # the same tokenizer: state() is what a checkpoint carries
    tokenizer.json()                           # the same as a tokenizer.json, for other people's programs
"""

import contextlib
import functools
import hashlib
import json
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
    if kind == "recall" and all(type(state.get(key)) is int for key in ("keys", "values")):
        return RecallTokenizer(state["keys"], state["values"])
    if kind == "smollm" and isinstance(state.get("tokens"), str) and type(state.get("n_special")) is int:
        return SmolLMTokenizer(state["tokens"].split(" "), state["n_special"])
    if kind == "huggingface" and all(isinstance(state.get(key), str) for key in ("json", "config")):
        return HuggingFaceTokenizer(state["json"], state["config"], state.get("bos"), state.get("eos"))
    if kind == "none":
        raise InputError("this checkpoint came without a tokenizer.json: put it into its folder, only then is there text")
    raise InputError(
        f"tokenizer kind {kind!r} is not known; allowed: 'char', 'recall', 'smollm' or 'huggingface' with what they consist of, 'gpt2'"
    )


def _checked_ids(ids, vocab_size):
    ids = [int(i) for i in ids]  # a tensor or an array will do as well
    for i in ids:
        if not 0 <= i < vocab_size:  # a negative id would otherwise quietly count from the end
            raise InputError(f"token id {i} is outside the vocabulary; allowed: 0 to {vocab_size - 1}")
    return ids


class CharTokenizer:
    """One token a character; ids follow the sorted order of the characters, as in nanoGPT."""

    bos = eos = None  # each token is a character of the text: none can begin or end it

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

    def json(self):
        """tokenizer.json: every character a word, and nothing between words. Unknown ones are an error there too."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        made = Tokenizer(models.WordLevel(self._id, unk_token=""))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
        return made.to_str()


class RecallTokenizer:
    """What data/recall/task.py calls its tokens: k0, k1, …, then v0, v1, …, as words with a space between them."""

    bos = eos = None  # a sequence ends with its query

    def __init__(self, keys, values):
        self.keys, self.values, self.vocab_size = keys, values, keys + values
        self.words = [f"k{i}" for i in range(keys)] + [f"v{i}" for i in range(values)]
        self._id = {word: i for i, word in enumerate(self.words)}

    def encode(self, text):
        """List of ids, one a word. InputError names the first word that is neither a key nor a value."""
        unknown = next((word for word in text.split() if word not in self._id), None)
        if unknown is not None:
            raise InputError(f"{unknown!r} is no token: k0 to k{self.keys - 1} and v0 to v{self.values - 1} are")
        return [self._id[word] for word in text.split()]

    def decode(self, ids):
        """The words of these ids. InputError for an id outside 0 .. vocab_size - 1."""
        return " ".join(self.words[i] for i in _checked_ids(ids, self.vocab_size))

    def state(self):
        return {"kind": "recall", "keys": self.keys, "values": self.values}

    def json(self):
        """tokenizer.json; unknown words are an error there too."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        made = Tokenizer(models.WordLevel(self._id, unk_token=""))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return made.to_str()


class BPETokenizer:
    """GPT-2's byte-pair encoding. Its files are only looked for when the first text is encoded or decoded."""

    vocab_size = 50257
    bos = eos = 50256

    def encode(self, text):
        """List of ids. Special text like <|endoftext|> is encoded as the ordinary characters it consists of."""
        return self._encoding.encode_ordinary(text)

    def decode(self, ids):
        """The text of these ids; bytes that are not UTF-8 become U+FFFD. InputError for an id outside 0 .. 50256."""
        return self._encoding.decode(_checked_ids(ids, self.vocab_size))

    def state(self):
        return {"kind": "gpt2", "n_vocab": self.vocab_size}

    def json(self):
        """tokenizer.json; there, unlike here, <|endoftext|> in a text is the special token."""
        from tokenizers import pre_tokenizers

        split = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return _byte_pairs_json(self._encoding._mergeable_ranks, {"<|endoftext|>": 50256}, split)

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

    @property
    def bos(self):
        return self.special.get("<|im_start|>", self.special.get("<|endoftext|>"))

    @property
    def eos(self):
        return self.special.get("<|im_end|>", self.special.get("<|endoftext|>"))

    def state(self):
        return {"kind": "smollm", "tokens": " ".join(self.tokens), "n_special": len(self.special)}  # no token has a space

    def json(self):
        """tokenizer.json; there, unlike here, special tokens in a text are special."""
        from tokenizers import pre_tokenizers

        digits = pre_tokenizers.Digits(individual_digits=True)
        split = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        return _byte_pairs_json(self._ranks, self.special, split)

    @functools.cached_property
    def _encoding(self):
        import tiktoken

        return tiktoken.Encoding("smollm", pat_str=SMOLLM_PATTERN, mergeable_ranks=self._ranks, special_tokens=self.special)


class HuggingFaceTokenizer:
    """
    Whatever a tokenizer.json says, by Hugging Face's library. It carries the file, so that a checkpoint needs no folder.

    json      the text of tokenizer.json
    config    that of tokenizer_config.json, or nothing: kept for others, not read here
    bos, eos  ids of the tokens that begin and end a text, where the model's config names them; eos may be several

    Texts are encoded as they are: special tokens in them as ordinary characters, and none added in front.
    """

    def __init__(self, json, config="", bos=None, eos=None):
        from tokenizers import Tokenizer

        self._json, self._config, self.bos, self.eos = json, config, bos, eos
        try:
            self._tokenizer = Tokenizer.from_str(json)
        except Exception as error:  # the library raises nothing more exact
            raise InputError(f"this tokenizer.json cannot be read: {str(error)[:200]}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def encode(self, text):
        """List of ids."""
        return self._tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False).ids

    def decode(self, ids):
        """
        The text of these ids, special ones by their names. InputError for an id outside the vocabulary. Some tokenizers
        drop the space that a text begins with, so the text of a part is not always a part of the text.
        """
        return self._tokenizer.decode(_checked_ids(ids, self.vocab_size), skip_special_tokens=False)

    def state(self):
        return {"kind": "huggingface", "json": self._json, "config": self._config, "bos": self.bos, "eos": self.eos}

    def json(self):
        return self._json


def put_gpt2_files(text):
    """
    Whether a tokenizer.json, as a text, is GPT-2's. If so, the two files that its tokens are read from here are made of it,
    where they are missing: byte for byte the same, so nothing needs fetching.
    """
    try:
        model = json.loads(text)["model"]
        vocab = json.dumps(dict(sorted(model["vocab"].items(), key=lambda item: item[1])))
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    files = {"encoder.json": vocab.encode(), "vocab.bpe": "\n".join(["#version: 0.2", *merges, ""]).encode()}
    if any(hashlib.sha256(raw).hexdigest() != GPT2_SHA256[name] for name, raw in files.items()):
        return False
    for name, raw in files.items():
        if not (GPT2_DIR / name).exists():
            with contextlib.suppress(OSError):  # then they are looked for where they were before
                write_atomically(GPT2_DIR / name, raw)
    return True


def continuation(tokenizer, before, new):
    """The text that the ids `new` add to that of the ids `before`: see HuggingFaceTokenizer.decode."""
    before = before[-8:]  # more context than any tokenizer looks at
    return tokenizer.decode([*before, *new]).removeprefix(tokenizer.decode(before))


def _byte_pairs_json(ranks, special, split):
    """tokenizer.json of byte pairs, {bytes: id}, and special tokens, {text: id}; `split` makes words of a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    letter = {b: c for c, b in _byte_letters().items()}

    def pair(token):
        """The two parts that a token is made of: what its bytes come to by merges that make lower ids than its own."""
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            i = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks) + len(special)))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return tuple("".join(letter[b] for b in part) for part in parts)

    vocab = {"".join(letter[b] for b in token): i for token, i in ranks.items()} | special
    merges = [pair(token) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return made.to_str()


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
