"""The local files are the record, each run is its own W&B run, and W&B can end none of them."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import tracking
from tracking import Run, filterable, plain, provenance

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {"model": {"n_kv": 2}, "seed": 1}


def start(folder, mode="disabled", config=CONFIG, **kwargs):
    return Run(folder, name=folder.name, group=folder.parent.name, job_type="train", config=config, mode=mode, **kwargs)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def child(code, folder, **env):
    """Start `code` in a process of its own, with `folder` and `start` at hand, no terminal and no W&B key."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    kept |= {"HOME": str(folder / "home"), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **env}
    head = "import os, pathlib, sys, time\nfrom test_tracking import start\nfolder = pathlib.Path(sys.argv[1])\n"
    command = [sys.executable, "-c", head + code, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=kept, start_new_session=True
    )


def test_disabled_writes_the_local_files_only_and_a_summary_only_at_the_end(tmp_path):
    folder = tmp_path / "cpu" / "kv2-s1"
    with start(folder) as run:
        run.log({"train/loss": torch.tensor(1.5), "lr": np.float64(1e-3)}, step=0)
        assert rows(folder) == [{"step": 0, "train/loss": 1.5, "lr": 1e-3}]  # on the disk at once
        run.log({"train/loss": float("nan")}, step=10)
        run.summary({"steps": 10, "val_loss_best": 2.0})
        run.summary({"val_loss_best": 1.0})
        assert not (folder / "summary.json").exists()
    assert json.loads((folder / "summary.json").read_text()) == {"steps": 10, "val_loss_best": 1.0}
    assert np.isnan(rows(folder)[1]["train/loss"])
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "summary.json", "wandb_id.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_run_leaves_no_summary_even_where_an_older_one_was(tmp_path, error):
    with start(tmp_path) as run:
        run.summary({"steps": 1})
    with pytest.raises(error), start(tmp_path) as run:
        run.summary({"steps": 2})
        raise error
    assert not (tmp_path / "summary.json").exists()


def test_resuming_cuts_the_metrics_back_to_the_checkpoint(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with start(whole) as run:
        for step in range(0, 60, 10):
            run.log({"train/loss": 1 / (step + 1)}, step=step)
    with pytest.raises(RuntimeError), start(broken) as run:
        for step in range(0, 50, 10):
            run.log({"train/loss": 1 / (step + 1)}, step=step)
        raise RuntimeError
    first_id = (broken / "wandb_id.txt").read_text()
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5')  # killed in mid-write: half a number, which must not pass for step 5
    with start(broken, resume_step=20) as run:
        for step in range(30, 60, 10):
            run.log({"train/loss": 1 / (step + 1)}, step=step)
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (broken / "wandb_id.txt").read_text() == first_id
    with start(broken):
        pass
    assert rows(broken) == []  # no resume_step: a fresh file and a W&B run of its own
    assert (broken / "wandb_id.txt").read_text() != first_id


def test_wrong_mode_is_one_line_and_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="'of' does not exist; allowed are offline, online, disabled"):
        start(tmp_path / "x", mode="of")
    assert not (tmp_path / "x").exists()


def test_config_becomes_plain_and_filterable():
    @dataclass
    class Model:
        n_kv: int = 2

    config = OmegaConf.create({"n": 4, "model": {"n_kv": "${n}"}, "train": {"seed": 3, "betas": [0.9, 0.99]}})
    got = filterable(config)
    assert got == {"n": 4, "model": {"n_kv": 4}, "train": {"seed": 3, "betas": [0.9, 0.99]}, "n_kv": 4, "seed": 3}
    assert type(got["model"]) is dict and type(got["train"]["betas"]) is list
    assert filterable({"n_kv": 1, "model": Model()})["n_kv"] == 1  # what is at the top already stays
    odd = {"a": np.int64(3), "b": np.float64(0.5), "c": Path("x"), "d": (1, torch.tensor(2)), "e": np.bool_(True)}
    got = plain(odd)
    assert got == {"a": 3, "b": 0.5, "c": "x", "d": [1, 2], "e": True}
    assert [type(value) for value in got.values()] == [int, float, str, list, bool]
    with pytest.raises(TypeError, match=r"config\.model\.f is a function"):
        plain({"model": {"f": lambda: 0}})


def test_provenance_inside_and_outside_a_checkout(tmp_path, monkeypatch):
    found = provenance()
    assert torch.__version__.startswith(found["torch"]) and "cores" in found["machine"]
    json.dumps(found)
    monkeypatch.setattr(tracking, "__file__", str(tmp_path / "tracking.py"))
    assert provenance() | {"commit": "unknown", "dirty": False} == provenance()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a.txt").write_text("1")
    for command in (["init", "-q"], ["add", "a.txt"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    assert len(provenance()["commit"]) >= 7 and provenance()["dirty"] is False
    (tmp_path / "a.txt").write_text("2")
    assert provenance()["dirty"] is True
    monkeypatch.setenv("PATH", "")  # no git at all
    assert provenance()["commit"] == "unknown"


def test_online_without_a_key_and_a_terminal_goes_offline_with_one_line(tmp_path):
    folder = tmp_path / "cpu" / "kv2-s1"
    process = child("with start(folder, mode='online') as run: run.log({'train/loss': 1.0}, step=0)", folder)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == ""
    assert len(err.splitlines()) == 1 and "no account is logged in" in err
    assert rows(folder) == [{"step": 0, "train/loss": 1.0}]
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))


def test_online_with_a_key_but_no_network_goes_offline_in_time(tmp_path):
    folder = tmp_path / "cpu" / "kv2-s1"
    code = "import tracking; tracking.START_SECONDS = 3\n"
    code += "with start(folder, mode='online') as run: run.log({'train/loss': 1.0}, step=0)"
    started = time.monotonic()
    process = child(code, folder, WANDB_API_KEY="a" * 40, WANDB_BASE_URL="http://127.0.0.1:9")  # nobody listens there
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == ""
    assert len(err.splitlines()) == 1 and "kept offline" in err
    assert time.monotonic() - started < 40
    assert rows(folder) == [{"step": 0, "train/loss": 1.0}]


def test_wandb_not_importable_is_one_line(tmp_path):
    folder = tmp_path / "cpu" / "kv2-s1"
    code = "sys.modules['wandb'] = None\n"
    code += "with start(folder, mode='offline') as run: run.log({'train/loss': 1.0}, step=0)"
    process = child(code, folder)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == ""
    assert len(err.splitlines()) == 1 and "W&B is off" in err
    assert (folder / "summary.json").exists() and len(rows(folder)) == 1


DYING_SERVICE = """
import signal, subprocess, tracking
tracking.CALL_SECONDS = 2
with start(folder, mode='offline') as run:
    service = int(subprocess.check_output(['pgrep', '-P', str(os.getpid()), 'wandb-core']))
    for step in range(400):
        if step == 5: os.kill(service, signal.{signal})
        run.log({{'train/loss': 1.0, 'text': 'x' * 10000}}, step=step)
os.kill(service, signal.SIGKILL) if '{signal}' == 'SIGSTOP' else None
with start(folder.parent / 'second', mode='offline') as run: run.log({{'train/loss': 1.0}}, step=0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds the service with pgrep")
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_a_service_that_dies_or_hangs_ends_nothing_and_the_next_run_has_a_new_one(tmp_path, signal):
    folder = tmp_path / "cpu" / "first"
    process = child(DYING_SERVICE.format(signal=signal), folder)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "" and len(err.splitlines()) == 1 and "W&B is off for the rest of this run" in err
    assert len(rows(folder)) == 400 and (folder / "summary.json").exists()
    from analysis.runs import load_runs

    runs, _ = load_runs(tmp_path)
    assert dict(zip(runs["name"], runs["read_from"], strict=True)) == {"first": "metrics.jsonl", "second": "wandb"}


def test_text_and_image_reach_wandb_without_a_step_of_their_own(tmp_path):
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "figure.png")
    folder = tmp_path / "cpu" / "kv2-s1"
    with start(folder, mode="offline") as run:
        run.text("sample", "before <b>any</b> step")
        run.log({"train/loss": 1.0}, step=10)
        run.text("sample", "ROMEO: <b>")
        run.image("figure", tmp_path / "figure.png")
        run.log({"train/loss": 0.5}, step=20)
        assert run._wandb is not None  # neither of them made W&B drop out
    assert (folder / "sample.txt").read_text() == "ROMEO: <b>"
    media = [path.name for path in folder.glob("wandb/offline-run-*/files/media/**/*") if path.is_file()]
    assert sorted(name.rpartition("_")[0] for name in media) == ["figure_10", "sample_0", "sample_10"]  # name and step
    from analysis.runs import load_runs

    runs, history = load_runs(tmp_path)
    assert runs.loc[0, "read_from"] == "wandb" and list(history["step"]) == [10, 20]
    assert not [column for column in [*runs, *history] if column.startswith(("sample", "figure"))]
