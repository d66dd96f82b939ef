"""The door of the scripts: help, and one line with exit code 2 for whatever cannot be."""

import importlib
import json
import os
import re
import runpy
import subprocess

import cloudpickle
import pytest
import torch
from conftest import ROOT, TINY

from arithmetic import readable, readable_seconds
from cli import CONFIGS

SCRIPTS = ["train", "uptrain", "export", "calibrate", "sample", "eval", "budget", "serve"]


def refused(answer, *words):
    """The one line of a refusal."""
    code, out, err = answer
    assert code == 2, (code, out, err)
    assert "Traceback" not in err
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert out == ""
    for word in words:
        assert word in err, err
    return err


# ---------------------------------------------------------------------------------------------------------------------
# help


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_the_commands_the_choices_and_every_key(call, name, flag):
    code, out, err = call(name, flag)
    assert code == 0 and err == ""
    commands = re.findall(rf"^ +(python {name}\.py \S+.*?)(?:  |$)", out, re.M)
    assert len(commands) >= 2
    config = (CONFIGS / f"{name}.yaml").read_text()
    for key in re.findall(r"^(\w+):", config, re.M):
        assert re.search(rf"^{key}:", out, re.M), key
    for group in re.findall(r"^  - (\w+): \w+", config, re.M):
        for choice in (CONFIGS / group).glob("*.yaml"):
            assert re.search(rf"{group}=\S*{choice.stem}", out), (group, choice.stem)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_commands_in_a_docstring_are_understood(call, name):
    """They get as far as the file they name or the run they would start, past Hydra and the checks of values, or to the end."""
    for command in re.findall(rf"^ +python {name}\.py (.*?)(?:   |$)", (ROOT / f"{name}.py").read_text(), re.M):
        args = re.sub(r'"', "", command).split(" ")
        if "-m" in args:  # the first run of the sweep
            args = [re.sub(r"=(\w+),.*", r"=\1", a) for a in args if a != "-m"]
        if name == "train":
            refused(call(name, *args, "data.source=nowhere.txt"), "nowhere.txt")
        elif name == "budget" and not re.search("ckpt=|path/to", command):
            code, out, err = call(name, *args)
            assert (code, err) == (0, "") and out
        else:
            error = refused(call(name, *args)).lower()
            assert "no such file" in error or "no finished training run" in error, (command, error)


# ---------------------------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("model.nkv=2", "did you mean model.n_kv?"),
        ("n_kv=2", "did you mean model.n_kv?"),
        ("model.n_kv=3", "n_kv=3 n_head=8 [1, 2, 4, 8]"),
        ("model.n_kv=0", "n_kv=0"),
        ("model.n_kv=-1", "n_kv=-1"),
        ("model.n_kv=16", "n_kv=16 n_head=8"),
        ("model.n_kv=2.0", "n_kv=2.0 int"),
        ("model.n_kv=two", "n_kv='two' int"),
        ("model.n_kv=true", "n_kv=True int"),
        ("model.n_kv=null", "n_kv=None int"),
        ("model.n_kv=8,2", "model.n_kv=8,2"),
        ("model.n_kv", "model.n_kv"),
        ("model.n_embd=100", "n_embd=100 n_head=8 n_embd=96"),
        ("model.dropout=1.5", "dropout=1.5"),
        ("model=bert", "bert gpt2 llama"),
        ("model=null", "model"),
        ("preset=foo", "preset/foo cpu smoke gpu"),
        ("wandb=foo", "wandb/foo offline"),
        ("wandb.mode=foo", "foo offline online disabled"),
        ("data=foo", "data/foo shakespeare_char"),
        ("data.name=foo", "foo shakespeare_char"),
        ("data.source=missing.txt", "missing.txt"),
        ("data.source=3", "3"),
        ("train=3", "train"),
        ("train.lr=abc", "train.lr='abc' float"),
        ("train.lr=-1", "lr=-1"),
        ("train.lr=nan", "lr=nan"),
        ("train.min_lr=1", "min_lr=1"),
        ("train.steps=-1", "steps=-1"),
        ("train.steps=1e3", "steps=1000.0 int"),
        ("train.batch_size=0", "batch_size=0"),
        ("train.beta1=5", "beta1=5"),
        ("train.beta2=-1", "beta2=-1"),
        ("train.weight_decay=-1", "weight_decay=-1"),
        ("train.weight_decay=nan", "weight_decay=nan"),
        ("train.grad_clip=-1", "grad_clip=-1"),
        ("train.grad_clip=nan", "grad_clip=nan"),
        ("train.dtype=int8", "int8 auto float32 bfloat16"),
        ("train.compile=1", "compile=1 bool"),
        ("+foo=1", "+foo=1"),
        ("~seed", "~seed"),
        ("--foo", "--foo"),
        ("device=tpu", "tpu auto cpu cuda"),
        ("device=meta", "meta auto cpu cuda"),
        ("device=null", "device=None str"),
        ("threads=0", "threads=0"),
        ("threads=many", "threads='many'"),
        ("seed=abc", "seed='abc'"),
        ("seed=1.5", "seed=1.5"),
        ("seed=null", "seed=None"),
        ("seed=[1", "[1"),
        ("sweep=null", "sweep=None"),
        ("name=a/b", "name='a/b'"),
        ("name=..", "name='..'"),
        ("name='a=b'", "name='a=b'"),
        ("name='a b'", "name='a b'"),
    ],
)
def test_train_refuses_in_one_line_and_makes_no_run(call, cwd, wrong, words):
    key = wrong.split("=")[0]
    args = [a for a in TINY if a.split("=")[0] != key]
    refused(call("train", *args, wrong), *words.split(" ", 3 if "[" in words else -1))
    assert not (cwd / "runs").exists() and not (cwd / "checkpoints").exists()


def test_a_number_as_a_name_is_a_name_or_refused(call, cwd):
    answer = call("train", *TINY, "train.steps=1", "sweep=1", "name=7")
    if answer[0] == 0:
        assert (cwd / "runs/1/7/summary.json").exists()
    else:
        refused(answer)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("ckpt=missing.pt", "missing.pt mha.pt"),
        ("temperature=-1", "temperature=-1"),
        ("temperature=nan", "temperature=nan"),
        ("temperature=inf", "temperature=inf"),
        ("temperature=abc", "temperature='abc'"),
        ("temperature=null", "temperature=None"),
        ("temperature=true", "temperature=True"),
        ("top_k=0", "top_k=0"),
        ("top_k=x", "top_k='x'"),
        ("top_k=true", "top_k=True"),
        ("top_p=0", "top_p=0"),
        ("top_p=2", "top_p=2"),
        ("top_p=x", "top_p='x'"),
        ("tokens=0", "tokens=0"),
        ("tokens=1.5", "tokens=1.5"),
        ("samples=0", "samples=0"),
        ("seed=abc", "seed='abc'"),
        ("seed=true", "seed=True"),
        ("dtype=fp8", "dtype=fp8 float32 bfloat16 float16"),
        ("prompt=", "prompt"),
        ("prompt=XYZ", "X"),  # letters that the vocabulary lacks
        ("cache=maybe", "cache/maybe kivi none"),
        ("device=tpu", "tpu"),
        ("temprature=1", "did you mean temperature?"),
    ],
)
def test_sample_refuses_in_one_line(call, mha, wrong, words):
    short = [] if wrong.startswith("tokens") else ["tokens=3"]
    refused(call("sample", *short, wrong), *words.split(" ", 0 if "did" in words else -1))


@pytest.mark.parametrize(
    "args, words",
    [
        ("ckpt=mha.pt", "groups"),
        ("groups=2", "ckpt"),
        ("ckpt=missing.pt groups=2", "missing.pt"),
        ("ckpt=mha.pt groups=3", "groups=3 8 [1,"),
        ("ckpt=mha.pt groups=0", "groups=0"),
        ("ckpt=mha.pt groups=-1", "groups=-1"),
        ("ckpt=mha.pt groups=16", "groups=16"),
        ("ckpt=mha.pt groups=two", "groups='two'"),
        ("ckpt=mha.pt groups='2'", "groups='2'"),
        ("ckpt=mha.pt groups=true", "True"),
        ("ckpt=mha.pt groups=2 pool=median", "median mean first random aligned svd"),
        ("ckpt=mha.pt groups=2 fraction=-1", "fraction=-1"),
        ("ckpt=mha.pt groups=2 fraction=nan", "fraction=nan"),
        ("ckpt=mha.pt groups=2 fraction=x", "fraction='x'"),
        ("ckpt=mha.pt groups=2 fraction=1e308", "fraction=1e+308"),
        ("ckpt=mha.pt groups=2 steps=x", "steps='x'"),
        ("ckpt=mha.pt groups=2 steps=-3", "steps=-3"),
        ("ckpt=mha.pt groups=2 rate=0", "rate=0"),
        ("ckpt=mha.pt groups=2 name=a/b", "name='a/b'"),
        ("ckpt=mha.pt groups=2 source=missing.txt", "missing.txt"),
        ("ckpt=mha.pt groups=2 wandb.mode=foo", "foo offline"),
        ("ckpt=mha.pt group=2", "did groups"),
    ],
)
def test_uptrain_refuses_in_one_line_and_makes_no_run(call, mha, cwd, args, words):
    refused(call("uptrain", *args.split()), *words.split())
    assert not (cwd / "runs").exists()


@pytest.mark.parametrize(
    "args, words",
    [
        ("", "ckpt= sweep="),
        ("ckpt=mha.pt sweep=cpu", "ckpt= sweep="),
        ("ckpt=missing.pt", "missing.pt"),
        ("sweep=nosuch", "nosuch"),
        ("ckpt=mha.pt tokens=1", "tokens=1"),
        ("ckpt=mha.pt prompt_tokens=0", "prompt_tokens=0"),
        ("ckpt=mha.pt batches=3", "batches=3"),
        ("ckpt=mha.pt batches=[0]", "batches=[0]"),
        ("ckpt=mha.pt batches=[x]", "batches="),
        ("ckpt=mha.pt wandb.mode=foo", "foo offline"),
    ],
)
def test_eval_refuses_in_one_line_and_makes_no_folder(call, mha, cwd, args, words):
    refused(call("eval", *args.split()), *words.split())
    assert not (cwd / "runs").exists()


@pytest.mark.parametrize(
    "args, words",
    [
        ("shape=nanogqa n_kv=3", "n_kv=3 n_head=8 [1, 2, 4, 8]"),
        ("n_kv=0", "n_kv=0"),
        ("n_kv=2.0", "n_kv=2.0 int"),
        ("n_layer=-1", "n_layer=-1"),
        ("head_dim=true", "head_dim=True int"),
        ("context=-1", "context=-1"),
        ("context=0", "context=0"),
        ("batch=0", "batch=0"),
        ("batch=null", "batch=None int"),
        ("memory=24Gib", "memory=24Gib did you mean GiB?"),
        ("memory=24", "memory=24 unit MiB"),
        ("memory=-24GiB", "memory=-24GiB"),
        ("memory=0GiB", "memory=0GiB"),
        ("memory=0.5B", "memory=0.5B"),  # there is no half a byte
        ("memory=1e400GiB", "memory=1e400GiB"),
        ("memory=nan", "memory=nan"),
        ("memory=null", "memory=None"),
        ("bandwidth=5gb/s", "bandwidth=5gb/s did you mean"),
        ("bandwidth=5GB", "bandwidth=5GB GB/s"),
        ("compute=fast", "compute=fast"),
        ("tp=0", "tp=0"),
        ("tp=3", "tp=3 32 8 [1, 2,"),
        ("shape=nanogqa tp=16", "tp=16 8 nanogqa [1, 2, 4, 8]"),
        ("draft=gpt2-small tp=8", "tp=8 gpt2-small 12"),
        ("kv_dtype=int3", "kv_dtype=int3 int4 fp16"),
        ("weight_dtype=int4", "weight_dtype=int4 fp8"),
        ("group=0", "group=0"),
        ("residual=-1", "residual=-1"),
        ("shape=llama3-8", "shape=llama3-8: did you mean llama3-8b?"),
        ("shape=missing/config.json", "shape=missing/config.json"),
        ("shape=mamba.json", "shape=mamba.json: 'mamba' llama"),
        ("shape=gpt2-small ckpt=mha.pt", "shape=gpt2-small ckpt=mha.pt not both"),
        ("ckpt=", "ckpt=:"),  # of a shell variable that was not set
        ("draft=foo", "draft=foo: llama3-8b"),
        ("ckpt=missing.pt", "ckpt=missing.pt"),
        ("ckpt=input.txt", "input.txt checkpoint"),
        ("shape=deepseek-v3 n_kv=1", "n_kv=1 deepseek-v3 latent"),
        ("shape=deepseek-v3 kv_dtype=int4", "kv_dtype=int4 deepseek-v3 fp8"),
        ("draft=deepseek-v3 kv_dtype=int4", "kv_dtype=int4 deepseek-v3 fp8"),
        ("budget=robots", "budget=robots did you mean robot?"),
        ("budget=train train.groups=3", "train.groups=3 8 KV heads [1, 2, 4, 8]"),
        ("budget=train shape=deepseek-v3", "deepseek-v3 latent"),
        ("budget=train train.utilisation=2", "train.utilisation=2"),
        ("budget=train train.memory=16", "train.memory=16 unit GiB"),
        ("budget=robot robot.cameras=0", "robot.cameras=0"),
        ("robot.cameras=0", "robot.cameras=0"),
        ("budget=robot robot.rate=0Hz", "robot.rate=0Hz"),
        ("budget=robot robot.rate=5", "robot.rate=5 unit Hz"),
        ("budget=robot robot.camera=2", "robot.camera did you mean robot.cameras?"),
        ("format=xml", "format=xml table json"),
        ("contxt=1", "contxt did you mean context?"),
        ("+context=1", "+context=1"),
        (f"shape={'x' * 300}", "shape=xxx"),
        (f"context={'9' * 400}", "context=999"),
        (f"batch={'9' * 400}", "batch=999"),
    ],
    ids=lambda value: value[:30],
)
def test_budget_refuses_in_one_line(call, cwd, args, words):
    (cwd / "mamba.json").write_text('{"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2}')
    refused(call("budget", *args.split()), *words.split(" ", words.partition("[")[0].count(" ")))
    assert {path.name for path in cwd.iterdir()} == {"input.txt", "mamba.json"}


def test_a_real_process_ends_with_exit_code_two_and_one_line(spawn, tmp_path):
    for script, arg, word in (
        ("train", "model.nkv=2", "model.n_kv"),
        ("uptrain", "ckpt=mha.pt", "groups"),
        ("budget", "tp=3", "[1, 2,"),
    ):
        process = spawn(script, arg)
        out, err = process.communicate()
        assert word in refused((process.returncode, out, err))
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_goes_on_after_a_run_that_is_refused_and_says_so_in_the_end(call, cwd):
    code, out, err = call("train", "-m", *TINY, "train.steps=2", "hydra/launcher=basic", "model.n_kv=8,3,1")
    assert code == 1
    assert "n_kv=3" in err and "Traceback" not in err
    finished = {path.parent.name for path in (cwd / "runs").glob("t/*/summary.json")}
    assert finished == {"kv8-s1", "kv1-s1"}


# ---------------------------------------------------------------------------------------------------------------------
# sampling from a file


@pytest.mark.parametrize("name", ["iter=10-loss=1.4.pt", "a b,c(1).pt", "it's.pt"])
def test_a_path_is_taken_as_it_is_bare_and_in_inner_quotes(call, mha, cwd, name):
    (cwd / "x").mkdir()
    path = mha.rename(cwd / "x" / name)
    for ckpt in (f"ckpt={path}", f'ckpt="{path}"', *([f"ckpt='{path}'"] if "'" not in name else [])):
        code, out, err = call("sample", ckpt, "tokens=5", "prompt=abc")
        assert code == 0, err
        assert out.startswith("abc") and len(out) == len("abc") + 5 + 1
    refused(call("sample", f"ckpt={path}.gone"), f"{name}.gone")


@pytest.mark.parametrize("settings", ["temperature=0", "temperature=1 seed=5", "samples=3 top_k=4 top_p=0.9"])
def test_the_text_is_the_same_with_and_without_the_cache(call, mha, settings):
    args = ["prompt=ab cd", "tokens=40", *settings.split()]  # past the context of 16
    code, cached, err = call("sample", *args)
    assert code == 0 and cached.count("ab cd") >= 1
    assert call("sample", *args, "cache=none")[:2] == (0, cached)
    held, allocated = re.search(r"([\d,]+) bytes in use .* ([\d,]+) allocated", err).groups()
    B = 3 if "samples" in settings else 1
    assert int(allocated.replace(",", "")) == 2 * 2 * 8 * 4 * 16 * B * 4  # 2 layers, 8 heads of 4 numbers, 16 tokens
    assert 0 < int(held.replace(",", "")) <= int(allocated.replace(",", ""))


def test_a_prompt_longer_than_the_context_is_cropped_with_one_line(call, mha):
    code, out, err = call("sample", f"prompt={'abc' * 10}", "tokens=3")
    assert code == 0 and out.startswith("abc" * 10)
    assert "30 tokens" in err and "context is 16" in err


# ---------------------------------------------------------------------------------------------------------------------
# evaluating a file


def test_eval_reports_the_bytes_of_the_closed_formula_and_the_loss_of_training(call, mha, cwd, trained, monkeypatch):
    monkeypatch.setattr(importlib.import_module("eval"), "read_bandwidth", lambda device: 1e9)  # it reads 2.5 GB
    code, out, err = call("eval", "ckpt=mha.pt", "tokens=6", "prompt_tokens=4", "batches=[1,3]", "threads=1", "wandb=disabled")
    assert code == 0, err
    summary = json.loads((cwd / "runs/t/eval-kv8-s1/summary.json").read_text())
    assert summary["val_loss"] == torch.load(trained / "last.pt")["val_loss"]
    one = 2 * 2 * 8 * 4 * 4  # keys and values, layers, heads, numbers of a head, float32
    assert summary["kv_bytes_per_token"] == one
    for batch in (1, 3):
        assert summary[f"kv_bytes_measured_b{batch}"] == summary[f"kv_bytes_formula_b{batch}"] == one * 9 * batch
        assert summary[f"kv_bytes_allocated_b{batch}"] == one * 10 * batch
    same = ("tokens=6", "prompt_tokens=4", "batches=[1,3]", "threads=1", "wandb=disabled")
    code, again, _ = call("eval", "ckpt=mha.pt", *same)
    assert code == 0 and "measured before" in again
    assert [line for line in again.splitlines() if "batch" in line] == [line for line in out.splitlines() if "batch" in line]
    refused(call("eval", "ckpt=mha.pt", "threads=1"), "tokens=6", "2000")  # never overwritten by another measurement
    assert call("eval", "ckpt=mha.pt", *same, "tokens=5", "name=short")[0] == 0


# ---------------------------------------------------------------------------------------------------------------------
# budgets as text


def tables(out):
    """Each table's rows of cells, by the table's title."""
    found = {}
    for block in out.split("\n\n"):
        title, *rows = block.splitlines()
        found[title.partition(",")[0].partition(" (")[0]] = [re.split(r" {2,}", row.strip()) for row in rows]
    return found


@pytest.mark.parametrize(
    "command",
    [
        *re.findall(r"python budget\.py ((?!.*(?:ckpt|path|=train)).*?)(?:   |$)", (ROOT / "budget.py").read_text(), re.M),
        "shape=llama3-70b draft=llama3-8b tp=8 memory=80GiB context=131072 batch=64",
        "shape=deepseek-v3 kv_dtype=fp8 tp=8 memory=80GiB",
        "shape=mistral-7b kv_dtype=int4 batch=8",
        "shape=llama3-70b",  # its weights do not fit
        "shape=llama2-13b tp=40 batch=1000 context=100000",
        "shape=smollm2-135m kv_dtype=int2 tp=3",
        "shape=qwen3-8b head_dim=7 kv_dtype=int2 group=5 residual=0",
        "budget=robot shape=openvla-7b robot.rate=30Hz memory=16GiB",
    ],
)
def test_the_tables_say_the_numbers_of_the_json_in_120_columns(call, numbers, command):
    args = [arg for arg in command.split() if arg != "format=json"]
    code, out, err = call("budget", *args)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 120
    b, found = numbers(*args), tables(out)
    own, shape, s = b["own"], b["shape"], b["setting"]
    assert f"{shape['params']:,} weights" in out.splitlines()[0]
    first = {row[0]: row[1:] for row in found["KV cache"]}
    assert first["one more token"][0] == readable(own["bytes_per_token"])
    assert [readable(own["cache_bytes"]), f"{own['cache_bytes']:,} bytes"] in first.values()
    assert first["weights"][0] == readable(own["weight_bytes"]) and readable(own["weight_bytes_read"]) in first["weights"][1]
    left, fits = first[f"left of {readable(s['memory'])}"]
    if own["free_bytes"] < 0:
        assert left == "nothing" and readable(-own["free_bytes"]) in fits
    else:
        assert left == readable(own["free_bytes"]) and f"{own['conversations_fit']:,} conversation" in fits
        assert (f"{own['tokens_fit']:,} tokens" if own["tokens_fit"] is not None else "any number of tokens") in fits
    assert first["a step reads more of"][0] == own["larger"]
    assert first["decode floor"][0] == readable_seconds(own["floor_seconds"])
    if s["draft"]:
        assert first[f"draft {s['draft']['name']}, cache"][0] == readable(b["draft"]["cache_bytes"])
        assert first["its weights"][0] == readable(b["draft"]["weight_bytes"])
    for cells, row in zip(found["The dial"][1:], b["heads"], strict=True):
        assert (" *" in cells[0]) == (row["n_kv"] == shape["n_kv"])
        assert cells[1:5] == [str(row["n_kv"]), *(readable(row[k]) for k in ("bytes_per_token", "cache_bytes", "weight_bytes"))]
        assert cells[5] == ("no limit" if row["tokens_fit"] is None else f"{row['tokens_fit']:,}")
        assert cells[6] == f"{row['conversations_fit']:,}"
        assert cells[8:] == [readable_seconds(row["floor_seconds"]), f"{row['tokens_per_second']:,.1f}"]
    for cells, row in zip(found["Precision"][1:], b["precision"], strict=True):
        parts = [", ".join(f"{name} {readable(n)}" for name, n in row["parts"].items())] if len(row["parts"]) > 2 else []
        assert cells == [
            row["kv_dtype"] + " *" * (row["kv_dtype"] == s["kv_dtype"]),
            readable(row["cache_bytes"]),
            f"{row['bits_per_value']:.2f}",
            *parts,
        ]
    header, *rows = found["Tensor parallel: cache on each device / on all"]  # no more columns than fit a line
    for cells, row in zip(rows, b["parallel"], strict=False):
        shown = [f"{readable(d['each'])} / {readable(d['total'])}" for d in row["devices"] if str(d["tp"]) in header]
        assert [cell for cell in cells[1:] if cell != "–"] == shown and str(s["tp"]) in header
    if "robot" in b:
        rows = {row[0]: row[1:] for row in next(rows for title, rows in found.items() if title.startswith("Robot"))}
        assert rows["all read anew"][0] == readable_seconds(b["robot"]["seconds"])
        assert rows["prefix reused"][0] == readable_seconds(b["robot"]["seconds_reused"])


@pytest.mark.parametrize(
    "more", ["", "batch=64 memory=24GiB kv_dtype=int4", "shape=smollm2-1.7b train.groups=8", "train.price=0"]
)
def test_the_conversion_is_said_as_counted_in_120_columns(call, numbers, more):
    args = ["budget=train", *([] if "shape" in more else ["shape=tinyllama-1.1b"]), *more.split()]
    code, out, err = call("budget", *args)
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 120
    b, found = numbers(*args)["train"], tables(out)
    uptraining = {
        row[0]: row[1:] for row in found["Uptraining it to 8 KV heads" if "8" in more[-1:] else "Uptraining it to 1 KV head"]
    }
    assert uptraining["tokens"][0] == f"{b['tokens']:,.0f}" and uptraining["dollars"][0] == f"{b['dollars']:,.0f}"
    assert uptraining["hours of one device"][0] == f"{b['seconds'] / 3600:,.0f}"
    memory = {row[0]: row[1:] for row in found["Memory of the device"]}
    assert {name: row[0] for name, row in memory.items()} == {
        n: readable(x) for n, x in (b["parts"] | {"all": b["memory"]}).items()
    }
    assert ("does not fit" in memory["all"][1]) == (not b["fits"])
    for row, counted in zip(next(rows for title, rows in found.items() if "server" in title)[1:], b["held"], strict=True):
        assert row[1:4] == [str(counted["n_kv"]), f"{counted['params']:,}", readable(counted["bytes_per_token"])]
        assert row[4:6] == [f"{counted['tokens_held']:,}", f"{counted['sequences_held']:,}"]


@pytest.mark.parametrize("block", ["budget", "budget-train"])
def test_the_readme_shows_what_budget_prints(call, block):
    readme = (ROOT / "README.md").read_text()
    command, shown = re.search(
        rf"^    python budget\.py (\S+=[^\n]*)\n\n<!-- {block} -->\n(.*?)<!-- /{block} -->", readme, re.M | re.S
    ).groups()
    code, out, err = call("budget", *command.split())
    assert code == 0, err
    assert [line.strip() for line in shown.splitlines()] == [line.strip() for line in out.splitlines()]


@pytest.mark.parametrize("given", [[], ["CKPT=some.pt"], ["GROUPS=2"], ["CKPT=some.pt", "GROUPS=2", "UPTRAIN=steps=5 name=x"]])
def test_make_full_says_what_it_needs_before_anything_is_built(given):
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # `make test` would be a make above
    done = subprocess.run(["make", "full", *given], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "UPTRAIN=" in done.stderr if len(given) == 3 else "CKPT=" in done.stderr and "GROUPS=" in done.stderr


@pytest.mark.parametrize("place", [0, 1, 2])
def test_several_values_are_run_wherever_the_option_stands(call, cwd, place):
    args = ["ckpt=missing.pt", "seed=1,2"]
    args.insert(place, "-m")
    code, out, err = call("sample", *args)
    assert code == 1 and err.count("FAILED") == 2 and "missing.pt" in err


@pytest.mark.parametrize("name", ["train", "uptrain", "calibrate", "eval", "retrieval"])
def test_scripts_run_side_by_side_in_worker_processes(name):
    """joblib sends a script's main() to its workers by value, with all that it names: torch.backends.cpu cannot travel."""
    assert cloudpickle.dumps(runpy.run_path(str(ROOT / f"{name}.py"))["main"])
