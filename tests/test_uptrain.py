"""Uptraining: the parent's losses, its batch stream, and a twentieth of its steps."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import make_text, rows
from test_training import equal

import stream
from pooling import POOLS, measure, pool_heads
from storage import load_checkpoint, load_model
from stream import evaluate, get_batch
from uptrain import table

QUIET = ("wandb=disabled", "threads=1")
VAL = np.array(["\n abcdefghij".index(c) for c in make_text(3000)[2700:]], dtype=np.uint16)


def summary(cwd, name, sweep="t"):
    return json.loads((cwd / "runs" / sweep / name / "summary.json").read_text())


def test_a_bare_name_is_pooled_and_trained_on_and_three_losses_are_printed(call, mha, cwd, trained):
    code, out, err = call("uptrain", "ckpt=mha.pt", "groups=2", *QUIET)
    assert code == 0
    got = summary(cwd, "kv8-s1-to-kv2-mean")
    assert got["steps"] == 1 and got["parent_steps"] == 20  # 5 %
    assert (got["n_kv_parent"], got["groups"], got["n_kv"]) == (8, 2, 2)
    parent = load_model(load_checkpoint(mha))
    assert got["loss_parent"] == evaluate(parent, VAL) == json.loads((trained / "summary.json").read_text())["val_loss_final"]
    assert got["loss_pooled"] == evaluate(pool_heads(parent, 2), VAL) != got["loss_parent"]
    last = load_checkpoint(cwd / "runs/t/kv8-s1-to-kv2-mean/last.pt")
    assert got["val_loss_final"] == evaluate(load_model(last), VAL)
    for name in ("loss_parent", "loss_pooled", "val_loss_final"):
        assert f"{got[name]:.4f}" in out
    assert f"{np.log(12):.4f}" in out
    assert last["iteration"] == 1 and last["total_iterations"] == 21
    assert last["parent"]["name"] == "kv8-s1" and last["parent"]["total_iterations"] == 20


@pytest.mark.parametrize("pool", POOLS)
def test_as_many_groups_as_heads_leave_the_parents_loss_exactly(call, mha, cwd, pool):
    assert call("uptrain", "ckpt=mha.pt", "groups=8", f"pool={pool}", *QUIET)[0] == 0
    got = summary(cwd, f"kv8-s1-to-kv8-{pool}")
    assert got["loss_pooled"] == got["loss_parent"]


@pytest.mark.parametrize(
    "given, steps, named",
    [
        ("fraction=0.5", 10, "-50pct"), ("steps=3", 3, "-3steps"), ("fraction=0.05", 1, ""), ("steps=0", 0, "-0steps"),
        ("fraction=0", 0, "-0pct"), ("fraction=0.125", 2, "-12.5pct"),
    ],
)  # fmt: skip
def test_the_steps_are_a_fraction_of_the_parents_or_as_given(call, mha, cwd, given, steps, named):
    code, out, _ = call("uptrain", "ckpt=mha.pt", "groups=2", given, *QUIET)
    assert code == 0
    got = summary(cwd, f"kv8-s1-to-kv2-mean{named}")
    assert got["steps"] == steps and got["fraction"] == pytest.approx(steps / 20)
    assert f"{steps} steps" in out
    if steps == 0:
        assert got["val_loss_final"] == got["loss_pooled"]


@pytest.mark.parametrize("pool", ["aligned", "svd"])
def test_pooling_that_looks_at_the_text_first(call, mha, cwd, trained, pool):
    code, out, err = call("uptrain", "ckpt=mha.pt", "groups=2", f"pool={pool}", "similar=true", "steps=2", *QUIET)
    assert code == 0, err
    got = summary(cwd, f"kv8-s1-to-kv2-{pool}-similar-2steps")
    parent = load_model(load_checkpoint(mha))
    data = stream.load_data(load_checkpoint(mha)["data"]["dataset"], None, parent.config.block_size)
    seen = measure(parent, torch.cat([x for x, _ in data.samples(16, parent.config.block_size)]))
    assert got["loss_pooled"] == evaluate(pool_heads(parent, 2, pool, moments=seen, similar=True), VAL)


def test_more_heads_compute_the_same_and_pooling_them_gives_the_parent_back_to_the_bit(call, mha, cwd):
    assert call("uptrain", "ckpt=mha.pt", "groups=2", "name=gqa", *QUIET)[0] == 0
    parent = load_checkpoint(cwd / "runs/t/gqa/last.pt")
    for name, groups in (("gqa", 8), ("gqa-to-kv8-0steps", 2)):
        code, out, err = call("uptrain", f"ckpt=runs/t/{name}/last.pt", f"groups={groups}", "steps=0", *QUIET)
        assert code == 0, err
        assert ("2 -> 8 KV heads, each copied, 0 steps" in out) == (groups == 8)
    wide = summary(cwd, "gqa-to-kv8-0steps")
    assert wide["n_kv"] == 8 and wide["loss_pooled"] == pytest.approx(wide["loss_parent"], abs=1e-6)
    back = load_checkpoint(cwd / "runs/t/gqa-to-kv8-0steps-to-kv2-mean-0steps/last.pt")
    assert back["model"].keys() == parent["model"].keys()
    assert all(torch.equal(p, parent["model"][name]) for name, p in back["model"].items())


def test_the_losses_before_training_are_measured_once_for_all_fractions(call, mha, cwd, monkeypatch):
    counted = []
    monkeypatch.setattr(stream, "evaluate", lambda *args, **kwargs: counted.append(args) or evaluate(*args, **kwargs))
    evaluations = {}
    for arm in ("groups=2", "groups=2 fraction=0.2", "groups=2 fraction=0.2 pool=first", "groups=1", "groups=1 fraction=0.2"):
        counted.clear()
        assert call("uptrain", "ckpt=mha.pt", *arm.split(), *QUIET)[0] == 0
        evaluations[arm] = len(counted)
    assert list(evaluations.values()) == [3, 1, 2, 2, 1]  # the parent's, right after pooling, after training
    for a, b in (("kv2-mean", "kv2-mean-20pct"), ("kv1-mean", "kv1-mean-20pct")):
        first, second = summary(cwd, f"kv8-s1-to-{a}"), summary(cwd, f"kv8-s1-to-{b}")
        assert all(first[key] == second[key] for key in ("loss_parent", "loss_pooled"))
    assert summary(cwd, "kv8-s1-to-kv2-first-20pct")["loss_pooled"] != summary(cwd, "kv8-s1-to-kv2-mean")["loss_pooled"]


def test_a_parent_trained_anew_is_measured_anew(call, mha, cwd):
    assert call("uptrain", "ckpt=mha.pt", "groups=2", *QUIET)[0] == 0
    checkpoint = torch.load(mha)
    checkpoint["model"]["wte.weight"] += 0.01
    torch.save(checkpoint, mha)
    assert call("uptrain", "ckpt=mha.pt", "groups=2", "steps=0", *QUIET)[0] == 0
    old, new = summary(cwd, "kv8-s1-to-kv2-mean"), summary(cwd, "kv8-s1-to-kv2-mean-0steps")
    assert old["loss_parent"] != new["loss_parent"] == evaluate(load_model(load_checkpoint(mha)), VAL)


def test_the_batches_go_on_where_the_parents_stopped_also_in_the_next_generation(call, mha, cwd, monkeypatch):
    seen = []
    monkeypatch.setattr(stream, "get_batch", lambda *args: seen.append((args[3], args[4])) or get_batch(*args))
    assert call("uptrain", "ckpt=mha.pt", "groups=2", "steps=4", *QUIET)[0] == 0
    assert seen == [(1, 20), (1, 21), (1, 22), (1, 23)]
    seen.clear()
    assert call("uptrain", "ckpt=runs/t/kv8-s1-to-kv2-mean-4steps/last.pt", "groups=1", "steps=2", *QUIET)[0] == 0
    assert seen == [(1, 24), (1, 25)]
    last = load_checkpoint(cwd / "runs/t/kv8-s1-to-kv2-mean-4steps-to-kv1-mean-2steps/last.pt")
    assert last["model_config"]["n_kv"] == 1 and last["total_iterations"] == 26


def test_interrupted_and_resumed_is_uninterrupted_to_the_bit(call, mha, cwd, monkeypatch):
    args = ["uptrain", "ckpt=mha.pt", "groups=2", "steps=10", *QUIET]
    assert call(*args, "sweep=whole")[0] == 0
    monkeypatch.setattr(stream, "get_batch", lambda *args: 1 / 0 if args[4] == 27 else get_batch(*args))
    with pytest.raises(ZeroDivisionError):
        call(*args, "sweep=halves")
    monkeypatch.setattr(stream, "get_batch", get_batch)
    assert call(*args, "sweep=halves")[0] == 0
    whole, halves = (cwd / "runs" / sweep / "kv8-s1-to-kv2-mean-10steps" for sweep in ("whole", "halves"))
    assert rows(whole) == rows(halves)
    a, b = load_checkpoint(whole / "last.pt"), load_checkpoint(halves / "last.pt")
    assert equal(a["model"], b["model"]) and equal(a["optimizer"], b["optimizer"])
    for key in ("loss_parent", "loss_pooled", "val_loss_final"):
        assert summary(cwd, whole.name, "whole")[key] == summary(cwd, whole.name, "halves")[key]


def test_the_same_command_again_skips_and_prints_the_same_table(call, mha, cwd, monkeypatch):
    first = call("uptrain", "ckpt=mha.pt", "groups=2", *QUIET)
    files = {path: path.read_bytes() for path in (cwd / "runs").rglob("*") if path.is_file()}
    monkeypatch.setattr(stream, "get_batch", lambda *args: pytest.fail("trained again"))
    code, out, err = call("uptrain", "ckpt=mha.pt", "groups=2", *QUIET)
    assert code == 0 and "finished before" in out
    numbers = re.findall(r"^  (?:parent|right|after).*", first[1], re.M)
    assert len(numbers) == 3 and re.findall(r"^  (?:parent|right|after).*", out, re.M) == numbers
    assert {path: path.read_bytes() for path in (cwd / "runs").rglob("*") if path.is_file()} == files


def test_another_parent_under_the_same_name_is_refused(call, mha, cwd):
    assert call("uptrain", "ckpt=mha.pt", "groups=2", *QUIET)[0] == 0
    checkpoint = torch.load(mha)
    checkpoint["total_iterations"] = 40
    torch.save(checkpoint, mha)
    code, out, err = call("uptrain", "ckpt=mha.pt", "groups=2", *QUIET)
    assert code == 2 and err.count("\n") == 1 and "holds another run" in err


def test_only_the_numbers_are_kept_if_so_asked(call, mha, cwd):
    assert call("uptrain", "ckpt=mha.pt", "groups=2", "keep=false", *QUIET)[0] == 0
    folder = cwd / "runs/t/kv8-s1-to-kv2-mean"
    assert not list(folder.glob("*.pt")) and summary(cwd, folder.name)["val_loss_final"] == rows(folder)[-1]["val/loss"]
    again = call("uptrain", "ckpt=mha.pt", "groups=2", "keep=false", *QUIET)[1]
    assert "finished before" in again and "were deleted" not in again
    assert "its checkpoints were deleted (keep=false)" in call("uptrain", "ckpt=mha.pt", "groups=2", *QUIET)[1]


def test_svd_goes_on_at_a_tenth_of_the_parents_peak_rate_also_in_the_next_generation(call, mha, cwd):
    peak = load_checkpoint(mha)["config"]["train"]["lr"]
    named = {"groups=2 pool=svd": "kv2-svd", "groups=2": "kv2-mean", "groups=2 rate=0.3": "kv2-mean-rate0.3",
             "groups=8 pool=svd": "kv8-svd"}  # fmt: skip
    for args, rate in zip(named, (0.1, 1, 0.3, 1), strict=True):
        assert call("uptrain", "ckpt=mha.pt", *args.split(), *QUIET)[0] == 0
        last = load_checkpoint(cwd / f"runs/t/kv8-s1-to-{named[args]}/last.pt")
        assert last["config"]["train"]["lr"] == pytest.approx(rate * peak)
        assert summary(cwd, f"kv8-s1-to-{named[args]}")["rate"] == rate
    assert call("uptrain", "ckpt=runs/t/kv8-s1-to-kv2-svd/last.pt", "groups=1", "pool=svd", *QUIET)[0] == 0
    last = load_checkpoint(cwd / "runs/t/kv8-s1-to-kv2-svd-to-kv1-svd/last.pt")
    assert last["config"]["train"]["lr"] == pytest.approx(0.1 * peak)


def test_the_parents_file_is_left_alone(call, mha):
    before = mha.read_bytes()
    assert call("uptrain", "ckpt=mha.pt", "groups=1", *QUIET)[0] == 0
    assert mha.read_bytes() == before


@pytest.mark.parametrize("letters, size", [("abcdefghijk \n", 13), ("bcdefghijk \n", 12)])
def test_a_text_of_another_vocabulary_is_refused_with_both_sizes(call, mha, cwd, letters, size):
    (cwd / "other.txt").write_text(make_text(3000, letters=letters))
    code, out, err = call("uptrain", "ckpt=mha.pt", "groups=2", "source=other.txt", *QUIET)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert "12 tokens" in err and f"{size} tokens" in err and "vocabulary" in err
    assert not (cwd / "runs").exists()


def test_a_compiled_parents_prefix_is_no_obstacle(call, mha, cwd):
    assert call("uptrain", "ckpt=mha.pt", "groups=2", *QUIET)[0] == 0
    checkpoint = torch.load(mha)
    checkpoint["model"] = {f"_orig_mod.{name}": p for name, p in checkpoint["model"].items()}
    torch.save(checkpoint, cwd / "compiled.pt")
    assert call("uptrain", "ckpt=compiled.pt", "groups=2", "sweep=compiled", *QUIET)[0] == 0
    assert (
        summary(cwd, "kv8-s1-to-kv2-mean", "compiled")["val_loss_final"] == summary(cwd, "kv8-s1-to-kv2-mean")["val_loss_final"]
    )


def test_uptraining_wins_back_part_of_the_jump(call, mha, cwd):
    assert call("uptrain", "ckpt=mha.pt", "groups=1", "pool=random", "steps=20", *QUIET)[0] == 0
    got = summary(cwd, "kv8-s1-to-kv1-random-20steps")
    assert got["val_loss_final"] < got["loss_pooled"]


def test_a_parent_that_is_not_trained_to_its_end_is_refused(call, trained, cwd):
    shutil.copytree(trained, cwd / "runs" / "t" / "kv8-s1")
    (cwd / "runs/t/kv8-s1/summary.json").unlink()
    code, out, err = call("uptrain", "ckpt=runs/t/kv8-s1/last.pt", "groups=2", "wandb=disabled")
    assert code == 2 and "not finished" in err and err.count("\n") == 1
    assert [path.name for path in (cwd / "runs/t").iterdir()] == ["kv8-s1"]


def test_another_text_of_the_same_letters_is_taken_only_when_asked_for(call, mha, cwd):
    text = cwd / "input.txt"
    text.write_text(text.read_text()[::-1])
    code, _, err = call("uptrain", "ckpt=mha.pt", "groups=2", "wandb=disabled")
    assert code == 2 and "source=" in err and not (cwd / "runs").exists()
    assert call("uptrain", "ckpt=mha.pt", "groups=2", "wandb=disabled", f"source={text}")[0] == 0


@pytest.mark.parametrize(
    "pooled, uptrained, steps, said",
    [
        (3.0, 2.25, 8, "won back     75.0%"),
        (2.001, 2.1, 8, "none: these 8 steps made the loss worse"),
        (2.0, 1.9, 8, None),
        (3.0, 3.0, 0, None),
    ],
)
def test_the_table_says_what_was_won_back_only_where_something_was(pooled, uptrained, steps, said):
    result = {"name": "a", "n_kv_parent": 8, "groups": 2, "pool": "svd", "steps": steps, "fraction": 0.05, "parent_steps": 160}
    text = table({**result, "loss_parent": 2.0, "loss_pooled": pooled, "val_loss_final": uptrained, "loss_uniform": 4.0})
    assert ("won back" in text) == (said is not None) and (said or "") in text
    assert ("after uptraining" in text) == (steps > 0)
