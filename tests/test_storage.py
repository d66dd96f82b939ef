"""Checkpoints: plain, whole or the one before, from compiled and wrapped models too, and never code."""

import hashlib
import json
import os
import pickle
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from conftest import TINY, make_text, refusal, rows
from reference import tokens

from model import GPT
from storage import digest, find_checkpoint, load_checkpoint, load_model, save_checkpoint
from stream import evaluate


def walk(value, where=""):
    """Every leaf of a nested state, with its place."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            assert type(key) in (str, int), (where, key)
            yield from walk(item, f"{where}.{key}")
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from walk(item, f"{where}[{i}]")
    else:
        yield where, value


def test_a_checkpoint_holds_tensors_and_plain_types_and_loads_by_default(trained):
    checkpoint = torch.load(trained / "last.pt")  # weights_only=True since torch 2.6
    for where, value in walk(checkpoint):
        assert type(value) in (torch.Tensor, str, int, float, bool, type(None)), (where, type(value))
    assert checkpoint["iteration"] == checkpoint["total_iterations"] == 20
    assert checkpoint["tokenizer"] == {"kind": "char", "chars": "\n abcdefghij"}  # the character map itself
    assert checkpoint["model_config"]["n_kv"] == 8 and checkpoint["seed"] == 1 and checkpoint["parent"] is None
    assert {"commit", "torch", "python"} <= checkpoint["provenance"].keys()
    assert not any(name.startswith(("_orig_mod.", "module.")) for name in checkpoint["model"])


def test_a_checkpoint_gives_back_the_model_of_its_losses(trained, cwd):
    model = load_model(load_checkpoint(trained / "last.pt"))
    text = make_text(3000)
    ids = np.array(["\n abcdefghij".index(c) for c in text[2700:]], dtype=np.uint16)
    loss = rows(trained)[-1]["val/loss"]
    assert evaluate(model, ids) == loss == json.loads((trained / "summary.json").read_text())["val_loss_final"]


def test_best_pt_holds_the_best_loss_and_its_weights(trained):
    losses = {row["step"]: row["val/loss"] for row in rows(trained) if "val/loss" in row}
    assert list(losses) == [10, 20]
    best = load_checkpoint(trained / "best.pt")
    assert best["best_val_loss"] == best["val_loss"] == min(losses.values()) == losses[best["iteration"]]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_the_prefixes_of_compile_and_ddp_are_stripped(trained, tmp_path, prefix):
    checkpoint = torch.load(trained / "last.pt")
    plain = load_model(checkpoint).eval()
    checkpoint["model"] = {prefix + name: p for name, p in checkpoint["model"].items()}
    torch.save(checkpoint, tmp_path / "x.pt")
    model = load_model(load_checkpoint(tmp_path / "x.pt")).eval()
    assert torch.equal(model(tokens(1, 9, vocab=12))[0], plain(tokens(1, 9, vocab=12))[0])


def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(trained, tmp_path):
    whole = (trained / "last.pt").read_bytes()
    files = {
        "empty.pt": b"", "text.pt": b"First Citizen:\nBefore we proceed\n", "cut.pt": whole[: len(whole) // 2],
        "head.pt": whole[:100], "pickle.pt": pickle.dumps({"model": [1, 2]}, protocol=2), "zip.pt": b"PK\x03\x04 no zip",
    }  # fmt: skip
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
        assert name in refusal(load_checkpoint, tmp_path / name)
    for name, thing in {
        "weights.pt": torch.load(trained / "last.pt")["model"],
        "list.pt": [1],
        "tensor.pt": torch.ones(2),
    }.items():
        torch.save(thing, tmp_path / name)
        assert name in refusal(load_checkpoint, tmp_path / name)


def test_a_checkpoint_never_runs_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil(), protocol=2))
    for name in ("evil.pt", "evil.pkl"):
        line = refusal(load_checkpoint, tmp_path / name)
        assert name in line and "weights_only" not in line  # torch advises to switch the safety off
    assert not (tmp_path / "ran").exists()


def test_weights_that_do_not_fit_their_config_are_refused_in_one_line(trained):
    checkpoint = torch.load(trained / "last.pt")
    checkpoint["model_config"]["n_kv"] = 2
    assert "c_attn" in refusal(load_model, checkpoint)
    checkpoint["model_config"]["n_kv"] = 3
    assert "n_kv=3" in refusal(load_model, checkpoint)
    checkpoint["model_config"] = {"kv_heads": 3}
    assert "kv_heads" in refusal(load_model, checkpoint)


@pytest.mark.parametrize("crash", ["while writing", "before the rename"])
def test_a_crash_while_saving_leaves_the_checkpoint_before_and_no_litter(tmp_path, monkeypatch, crash):
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"iteration": 1})
    before = path.read_bytes()

    def write_half(thing, file):
        file.write(before[:50])
        raise OSError("No space left on device")

    def die(*args):
        raise OSError("killed")

    monkeypatch.setattr(*((torch, "save", write_half) if crash == "while writing" else (os, "replace", die)))
    with pytest.raises(OSError):
        save_checkpoint(path, {"iteration": 2})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.pt"]


def test_a_bare_name_is_looked_up_in_checkpoints_and_a_path_is_taken_as_it_is(cwd):
    (cwd / "checkpoints").mkdir()
    (cwd / "checkpoints" / "mha.pt").touch()
    (cwd / "here.pt").touch()
    assert find_checkpoint("mha.pt").resolve() == cwd / "checkpoints" / "mha.pt"
    assert find_checkpoint("here.pt").resolve() == cwd / "here.pt"
    assert find_checkpoint(str(cwd / "here.pt")) == cwd / "here.pt"
    assert "mha.pt" in refusal(find_checkpoint, "mah.pt")  # says what there is
    refusal(find_checkpoint, "checkpoints")


LATER = ("head_size", "n_inner", "norm_eps", "gelu", "rope_scaling")  # fields that the first checkpoints do not have


def test_a_checkpoint_from_before_a_field_has_its_default_and_its_calibration(trained):
    checkpoint = torch.load(trained / "last.pt")
    model = load_model(checkpoint)
    for name in LATER:
        assert checkpoint["model_config"].pop(name) is None
    old = load_model(checkpoint)
    assert old.config == model.config
    # what calibrations were tied to before there were more fields
    c = old.config
    shape = (
        f"GPTConfig(dialect='gpt2', vocab_size={c.vocab_size}, block_size={c.block_size}, n_layer={c.n_layer}, n_head=8, n_kv=8, "
        f"n_embd={c.n_embd}, bias={c.bias}, dropout={c.dropout}, rope_base={c.rope_base}, tie_weights={c.tie_weights})"
    )
    sha = hashlib.sha256(shape.encode())
    for name, p in sorted(old.state_dict().items()):
        sha.update(name.encode() + p.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    assert digest(old) == sha.hexdigest()
    assert digest(GPT(replace(c, norm_eps=1e-6))) != digest(GPT(c))


def test_a_run_folder_from_before_a_field_is_resumed(call, cwd):
    assert call("train", *TINY, "train.steps=10")[0] == 0
    folder = cwd / "runs/t/kv8-s1"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for name in LATER:
        assert config["model"].pop(name) is None
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    code, out, _ = call("train", *TINY, "train.steps=10")
    assert code == 0 and "finished before" in out
    config["model"]["n_inner"] = 64
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    code, _, err = call("train", *TINY, "train.steps=10")
    assert code == 2 and "model.n_inner=64 (now None)" in err
