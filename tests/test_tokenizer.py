"""Characters, GPT-2's and SmolLM's tokens: round trips, states that a checkpoint carries, and Hugging Face's tokenizers."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from offline import (
    EXACT,
    GPT2_DIR,
    ROOT,
    Response,
    needs_exact,
    needs_gpt2,
    sandbox,  # noqa: F401, a fixture around every test here
    text_file,
)
from tiny_gguf import TEXTS, small_tokenizer, vocabulary, write_gguf

import data.shakespeare_bpe.prepare as bpe_data
from convert import read_gguf
from data import corpus as corpora
from data import tokenizer as tokenizers
from data.tokenizer import BPETokenizer, CharTokenizer, SmolLMTokenizer, tokenizer_from

# ------------------------------------------------------------------------------------------------------------------
# tokenizers


@settings(deadline=None)
@given(st.text(min_size=1))
def test_char_round_trip(text):
    tokenizer = tokenizer_from(CharTokenizer.from_text(text).state())
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.decode(np.array(ids)) == text
    assert len(ids) == len(text) and max(ids) < tokenizer.vocab_size == len(set(text))


def test_char_refuses_what_it_does_not_know():
    tokenizer = CharTokenizer("abc\n")
    message = refusal(tokenizer.encode, "abé\ud800c€dé")
    assert "4 character(s)" in message and "'é', '\\ud800', '€', 'd'" in message and r"4: '\nabc'" in message
    for i in (-1, 4):
        assert "0 to 3" in refusal(tokenizer.decode, [0, i])


@pytest.mark.parametrize(
    "state", [None, {}, {"kind": "word"}, {"kind": "char"}, {"kind": "char", "chars": 3}, {"kind": "recall", "keys": 64}]
)
def test_unknown_tokenizer_state(state):
    assert "allowed: 'char'" in refusal(tokenizer_from, state)


def test_recall_has_a_word_for_each_token_here_and_in_other_programs():
    from tokenizers import Tokenizer

    tokenizer = tokenizer_from({"kind": "recall", "keys": 64, "values": 64})
    assert tokenizer.decode([0, 63, 64, 127]) == "k0 k63 v0 v63" and tokenizer.vocab_size == 128
    theirs, every = Tokenizer.from_str(tokenizer.json()), list(range(128))
    for ids in (every, every[::-1], [5, 5, 70]):
        text = tokenizer.decode(ids)
        assert tokenizer.encode(text) == ids == theirs.encode(text).ids and theirs.decode(ids) == text
    assert tokenizer.encode(" k1\n v1  ") == [1, 65]
    assert "'v64' is no token: k0 to k63 and v0 to v63" in refusal(tokenizer.encode, "k1 v64")
    assert "allowed" in refusal(tokenizer.decode, [128])
    assert tokenizer_from(tokenizer.state()).state() == tokenizer.state()


def test_char_path_never_imports_tiktoken(tmp_path):
    code = (
        "import sys; sys.modules['tiktoken'] = None  # an import would now fail\n"
        "from pathlib import Path; import data.shakespeare_char.prepare as p\n"
        "p.DATASET_DIR = Path(sys.argv[1]); print(p.prepare(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "set", text_file(tmp_path)], cwd=ROOT, check=True)


@pytest.fixture
def gpt2(monkeypatch):
    monkeypatch.setattr(tokenizers, "GPT2_DIR", GPT2_DIR)
    return BPETokenizer()


def test_bpe_without_its_files_says_what_to_put_where(tmp_path):
    message = refusal(BPETokenizer().encode, "ROMEO:")
    for words in ("vocab.bpe", "encoder.json", tokenizers.GPT2_URL, os.path.relpath(tmp_path / "gpt2"), "no network"):
        assert words in message
    refusal(bpe_data.prepare, text_file(tmp_path))
    assert not (tmp_path / "shakespeare_bpe").exists()  # nothing half-written


def test_bpe_refuses_files_that_are_not_gpt2s(tmp_path):
    text_file(tmp_path / "gpt2", "#version: 0.2\n", "vocab.bpe")
    assert "sha256 differs" in refusal(BPETokenizer().encode, "ROMEO:")


def test_bpe_identity_needs_no_files():
    assert tokenizer_from({"kind": "gpt2", "n_vocab": 50257}).state() == {"kind": "gpt2", "n_vocab": 50257}
    assert BPETokenizer.vocab_size == 50257


@needs_gpt2
def test_bpe_known_ids(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]  # as OpenAI's encoder gives
    assert 50256 not in gpt2.encode("<|endoftext|>") and gpt2.decode([50256]) == "<|endoftext|>"
    assert "50256" in refusal(gpt2.decode, [50257])


@needs_gpt2
def test_bpe_round_trip(gpt2):
    @settings(deadline=None)  # the first call reads the files
    @given(st.text())
    def round_trip(text):
        assert gpt2.decode(gpt2.encode(text)) == text

    round_trip()


@needs_gpt2
def test_bpe_files_are_found_in_tiktokens_cache_and_downloaded(monkeypatch, tmp_path):
    raw = {tokenizers.GPT2_URL + name: (GPT2_DIR / name).read_bytes() for name in tokenizers.GPT2_SHA256}
    with monkeypatch.context() as m:
        m.setattr(corpora.urllib.request, "urlopen", lambda url, timeout: Response(raw[url]))
        assert BPETokenizer().encode("Hello world") == [15496, 995]
    for name in tokenizers.GPT2_SHA256:  # saved where a hand would put them
        (tmp_path / "gpt2" / name).unlink()
    for url, content in raw.items():
        text_file(tmp_path / "tiktoken", content, hashlib.sha1(url.encode()).hexdigest())
    assert BPETokenizer().encode("Hello world") == [15496, 995]


@needs_gpt2
@needs_exact
def test_bpe_corpus_has_the_expected_facts(gpt2, monkeypatch):
    monkeypatch.setenv("TINY_SHAKESPEARE", EXACT)
    folder = bpe_data.prepare()
    meta = corpora.read_meta(folder)
    assert meta["tokens"] == {"train": 301_966, "val": 36_059} and meta["vocab_size"] == 50257
    tokens = np.concatenate([np.fromfile(folder / f"{split}.bin", np.uint16) for split in ("train", "val")])
    assert gpt2.decode(tokens) == Path(EXACT).read_text()


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM's


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_hugging_faces(text):
    ours, (theirs, *_) = small_tokenizer(), vocabulary()
    assert ours.decode(ours.encode(text)) == text
    if not text.startswith("<|"):  # there a special token by its name is one
        assert ours.encode(text) == theirs.encode(text).ids


@given(st.text(st.sampled_from("  \n\t\r'sdtlmv0123456789aeThr.,!?-éñ漢字Ωب²½Ⅷ٣\u00a0\u2003👍😀e\u0301"), max_size=30))
def test_tokens_of_any_text_are_hugging_faces(text):
    ours = small_tokenizer()
    assert ours.encode(text) == vocabulary()[0].encode(text).ids
    assert ours.decode(ours.encode(text)) == text


def test_a_digit_is_a_token_of_its_own_and_never_takes_a_space():
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("The key is 90210.")
    assert [tokenizer.decode([i]) for i in ids[-7:]] == [" ", "9", "0", "2", "1", "0", "."]
    assert ids[:-6] == tokenizer.encode("The key is ")


def test_special_text_is_encoded_as_the_characters_it_consists_of():
    tokenizer = small_tokenizer()
    assert tokenizer.special == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.decode([1]) == "<|im_start|>" and min(tokenizer.encode("<|im_start|>user")) > 2


def test_the_state_alone_makes_the_tokenizer_again(tmp_path):
    metadata, _ = read_gguf(write_gguf(tmp_path / "tiny.gguf"))
    state = json.loads(json.dumps(SmolLMTokenizer.from_gguf(metadata).state()))
    assert {type(value) for value in state.values()} == {str, int}
    again = tokenizer_from(state)
    assert again.state() == state == small_tokenizer().state()
    text = " ".join(TEXTS)
    assert again.encode(text) == small_tokenizer().encode(text) and again.vocab_size == len(vocabulary()[1])


@pytest.mark.parametrize("text, bad", [("a\x06b", r"'\x06'"), ("\U0005a000 \U0005a000", "1 character")])
def test_characters_without_bytes_are_refused(text, bad):
    assert bad in refusal(small_tokenizer().encode, text)


def test_ids_outside_the_vocabulary_are_refused():
    assert "token id 999" in refusal(small_tokenizer().decode, [3, 999])
    assert "token id -1" in refusal(small_tokenizer().decode, [-1])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "'llama-bpe'"),
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
        ({"tokenizer.ggml.merges": ["Ġ t", "h e"]}, "in their order"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path, changes, words):
    metadata, _ = read_gguf(write_gguf(tmp_path / "other.gguf", changes=changes))
    assert words in refusal(SmolLMTokenizer.from_gguf, metadata)


@pytest.mark.parametrize(
    "state",
    [{"kind": "smollm"}, {"kind": "smollm", "tokens": ["a"], "n_special": 0}, {"kind": "smollm", "tokens": "a b", "n_special": None},
     {"kind": "smollm", "tokens": "a a", "n_special": 0}, {"kind": "smollm", "tokens": "a 你", "n_special": 0}],
)  # fmt: skip
def test_states_that_are_none_are_refused(state):
    refusal(tokenizer_from, state)
