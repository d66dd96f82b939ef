"""Every row that was logged is read back, whatever became of the W&B file, and the reader says where it came from."""

import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
from test_tracking import ROOT, child, start

from analysis.dashboard import gather, segments, workspace
from analysis.runs import load_runs, table


def record(folder, steps, mode="offline", error=None, scale=1.0, config=None, **kwargs):
    try:
        with start(folder, mode=mode, config=config or {"model": {"n_kv": 2}, "seed": 1}, **kwargs) as run:
            for step in steps:
                run.log({"train/loss": scale / (step + 1), "val/loss": scale * 0.1 + step}, step=step)
            if error:
                raise error
            run.summary({"val_loss_final": 0.5})
    except RuntimeError:
        pass


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Three jobs of one process, the first of which raises after 3 logs; then one interrupted and resumed."""
    root = tmp_path_factory.mktemp("runs")
    jobs = ((8, range(0, 30, 10), RuntimeError("out of memory")), (2, range(7), None), (1, [5], None))
    for n_kv, steps, error in jobs:
        config = {"model": {"n_kv": n_kv}, "seed": 1}
        record(root / "cpu" / f"kv{n_kv}-s1", steps, error=error, config=config)
    record(root / "resumed" / "kv2-s1", range(0, 60, 10), error=RuntimeError("killed"))  # checkpoint at 20
    record(root / "resumed" / "kv2-s1", range(30, 100, 10), scale=3.0, resume_step=20)
    return root


@pytest.fixture
def copy(sweep, tmp_path):
    """A copy of the finished 7-row run, to be damaged."""
    shutil.copytree(sweep / "cpu" / "kv2-s1", tmp_path / "cpu" / "kv2-s1", symlinks=True)
    return tmp_path


def test_a_failed_job_is_its_own_run_and_closed_as_failed(sweep):
    runs, history = load_runs(sweep, sweep="cpu")
    assert list(runs["name"]) == ["kv1-s1", "kv2-s1", "kv8-s1"]
    assert list(runs["state"]) == ["finished", "finished", "failed"]
    assert list(runs["rows"]) == [1, 7, 3]
    assert list(runs["n_kv"]) == [1, 2, 8] and set(runs["seed"]) == {1} and list(runs["model.n_kv"]) == [1, 2, 8]
    assert set(runs["read_from"]) == {"wandb"} and set(runs["job_type"]) == {"train"}
    assert set(runs["val_loss_final"].dropna()) == {0.5} and runs["torch"].nunique() == 1  # provenance came along
    files = list(sweep.glob("cpu/*/wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 3 and len({file.stem for file in files}) == 3
    assert list(history.query("name == 'kv8-s1'")["step"]) == [0, 10, 20]
    # the very floats, through W&B and back
    assert list(history.query("name == 'kv2-s1'")["train/loss"]) == [1.0 / (step + 1) for step in range(7)]


def test_wandb_and_the_local_file_hold_the_same(sweep, tmp_path, capsys):
    shutil.copytree(sweep / "cpu", tmp_path / "cpu", symlinks=True)
    for folder in tmp_path.glob("cpu/*/wandb"):
        shutil.rmtree(folder)
    _, through_wandb = load_runs(sweep, sweep="cpu")
    runs, local = load_runs(tmp_path, sweep="cpu")
    pd.testing.assert_frame_equal(through_wandb, local)
    assert set(runs["read_from"]) == {"metrics.jsonl"} and capsys.readouterr().err == ""


def test_a_resumed_run_is_one_run(sweep):
    runs, history = load_runs(sweep, sweep="resumed")
    assert len(list(sweep.glob("resumed/kv2-s1/wandb/offline-run-*"))) == 2
    assert list(runs["state"]) == ["finished"] and list(runs["rows"]) == [10] and list(runs["read_from"]) == ["wandb"]
    assert list(history["step"]) == list(range(0, 100, 10))
    scale = [1.0] * 3 + [3.0] * 7  # from the checkpoint on, the second segment's values
    assert list(history["train/loss"]) == [s / (step + 1) for s, step in zip(scale, history["step"], strict=True)]


@pytest.mark.parametrize("size", [0, 7, 1500, None])
def test_a_damaged_wandb_file_is_named_and_the_local_file_read(copy, size, capsys):
    (file,) = copy.glob("cpu/*/wandb/offline-run-*/*.wandb")
    if size is None:
        file.write_bytes(file.read_bytes()[:1500] + b"\xff" * 300 + file.read_bytes()[1800:])
    else:
        file.write_bytes(file.read_bytes()[:size])
    runs, history = load_runs(copy)
    assert list(runs["rows"]) == [7] and list(runs["read_from"]) == ["metrics.jsonl"] and len(history) == 7
    assert list(runs["state"]) == ["finished"]  # summary.json says so
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and str(file) in lines[0] and "of 7 rows" in lines[0]


def test_without_any_local_file_the_wandb_file_alone_is_read(copy, capsys):
    for name in ("metrics.jsonl", "summary.json", "wandb_id.txt"):
        (copy / "cpu" / "kv2-s1" / name).unlink()
    runs, history = load_runs(copy)
    assert list(runs["state"]) == ["finished"] and list(runs["val_loss_final"]) == [0.5] and len(history) == 7
    assert list(runs["n_kv"]) == [2] and capsys.readouterr().err == ""


def test_a_killed_run_loses_nothing(tmp_path, capsys):
    folder = tmp_path / "cpu" / "kv2-s1"
    code = """
with start(folder, mode='offline') as run:
    for step in range(50): run.log({'train/loss': 1.0 / (step + 1)}, step=step)
    print('logged', flush=True)
    time.sleep(60)
"""
    process = child(code, folder)
    assert process.stdout.readline() == "logged\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    runs, history = load_runs(tmp_path)
    assert list(runs["state"]) == ["unfinished"] and list(runs["rows"]) == [50]
    assert list(history["train/loss"]) == [1.0 / (step + 1) for step in range(50)]
    assert list(runs["read_from"]) == ["metrics.jsonl"]  # W&B's file lacks its last records
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "run-" in err and ".wandb gives" in err


def test_a_half_written_last_line_is_left_out(tmp_path):
    record(tmp_path / "cpu" / "kv2-s1", range(3), mode="disabled")
    with (tmp_path / "cpu" / "kv2-s1" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lo')
    _, history = load_runs(tmp_path)
    assert list(history["step"]) == [0, 1, 2]


def test_config_and_provenance_of_a_run_without_wandb(tmp_path):
    folder = tmp_path / "cpu" / "kv4-s7"
    record(folder, range(2), mode="disabled")
    (folder / "config.yaml").write_text("script: train\nseed: 7\nmodel: {n_kv: 4, n_head: 8}\n")
    (folder / "provenance.json").write_text(json.dumps({"commit": "abc1234", "machine": "abacus"}))
    runs, _ = load_runs(tmp_path)
    row = runs.iloc[0]
    assert (row["n_kv"], row["seed"], row["model.n_head"]) == (4, 7, 8)
    assert (row["commit"], row["machine"], row["job_type"]) == ("abc1234", "abacus", "train")


def test_files_of_an_id_the_run_has_left_behind_are_not_read(copy):
    record(copy / "cpu" / "kv2-s1", [5])  # afresh: the interrupted attempt was never checkpointed
    assert len(list(copy.glob("cpu/kv2-s1/wandb/offline-run-*"))) == 2
    runs, history = load_runs(copy)
    assert list(history["step"]) == [5] and list(runs["read_from"]) == ["wandb"]


def test_no_runs_and_a_wrong_source(tmp_path):
    runs, history = load_runs(tmp_path / "nowhere")
    assert runs.empty and history.empty and table(runs) == "no runs"
    with pytest.raises(ValueError, match="allowed are local, wandb"):
        load_runs(source="wandb.ai")


def test_the_api_filters_by_group_and_an_empty_scan_is_named(monkeypatch, capsys):
    def run(name, rows, last):
        config = {"model": {"n_kv": 2}, "seed": 1, "_wandb": {}}
        fields = {"name": name, "group": "cpu", "job_type": "train", "state": "crashed", "config": config}
        summary = {"val_loss_final": 0.5, "train/loss": 1.0, "_step": last}
        return SimpleNamespace(**fields, summary=summary, lastHistoryStep=last, scan_history=lambda: iter(rows))

    class Api:
        default_entity = "me"

        def __init__(self, timeout):
            pass

        def runs(self, path, filters):
            assert (path, filters) == ("me/nanogqa", {"group": "cpu"})
            return [run("good", [{"_step": 20, "train/loss": "NaN", "_timestamp": 1}], 20), run("empty", [], 40)]

    monkeypatch.setattr("wandb.Api", Api)
    runs, history = load_runs(source="wandb", sweep="cpu")
    assert list(runs["state"]) == ["crashed"] * 2 and list(runs["n_kv"]) == [2, 2] and list(runs["rows"]) == [1, 0]
    assert list(history["step"]) == [20] and history["train/loss"].isna().all() and "_timestamp" not in history
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and err[0].startswith("empty: wandb ") and "0.27.1" in err[0]


def script(name, *words, **env):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    command = [sys.executable, str(ROOT / "analysis" / name), *words]
    return subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=kept | env, timeout=60
    )


def test_the_dashboard_without_a_terminal_prints_the_table(sweep):
    done = script("dashboard.py", f"root={sweep}")
    assert done.returncode == 0 and "kv8-s1" in done.stdout and "failed" in done.stdout
    assert "python analysis/dashboard.py" in done.stdout


def test_the_viewer_gets_one_folder_with_every_segment(sweep):
    for _ in range(2):  # again, over its own links
        links = sorted(path.name for path in gather(sweep).iterdir())
    assert links == sorted(segment.name for segment in segments(sweep)) and len(links) == 5
    assert all(list((sweep / "wandb" / link).glob("*.wandb")) for link in links)
    assert len(load_runs(sweep)[0]) == 4  # the links are no runs


def test_sync_without_an_account_says_what_to_do(sweep, tmp_path):
    done = script("dashboard.py", f"root={sweep}", "sync=true", HOME=str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "wandb login" in done.stderr


def test_a_wrong_word_on_the_command_line_is_one_line():
    for name in ("dashboard.py", "runs.py"):
        done = script(name, "rot=x")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "root=" in done.stderr


def test_the_workspace_has_the_three_panels():
    pytest.importorskip("wandb_workspaces")
    (section,) = workspace("me", "nanogqa").sections
    titles = ["validation loss by n_kv", "cache bytes by n_kv", "tokens/s by n_kv and batch"]
    assert [panel.title for panel in section.panels] == titles
    view = workspace("me", "nanogqa")._to_model().model_dump_json()
    assert view.count("n_kv.value") == 3 and "val/loss" in view and "tokens_per_s_b32" in view
