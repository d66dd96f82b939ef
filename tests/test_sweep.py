"""A multirun in which one job fails: the others go on, each has a W&B run of its own, the exit code tells."""

from conftest import TINY, make_text

from analysis.runs import load_runs


def test_a_failing_first_job_is_named_the_others_finish_and_all_are_read_back(spawn, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(make_text(3000))
    tiny = [word for word in TINY if not word.startswith(("wandb=", "train.log_interval="))]
    # a learning rate of 1e30 makes the loss infinite after a step or two, then training stops itself
    sweep = ["train.lr=1e30,1e-3,2e-3", "name=lr-${train.lr}", "train.min_lr=0.0", "train.log_interval=1"]
    process = spawn("train", "-m", *tiny, *sweep, f"data.source={text}", "wandb=offline")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1, error
    assert "FAILED" in error and "train.lr=1e+30" in error and "the loss is" in error

    runs, history = load_runs(tmp_path / "runs", sweep="t")
    runs = runs.set_index("name")
    assert runs.state.to_dict() == {"lr-1e+30": "failed", "lr-0.001": "finished", "lr-0.002": "finished"}
    assert set(runs.read_from) == {"wandb"}
    ids = {path.read_text() for path in tmp_path.glob("runs/t/*/wandb_id.txt")}
    assert len(ids) == 3 and len(list(tmp_path.glob("runs/t/*/wandb/offline-run-*"))) == 3
    steps = history[history["train/loss"].notna()].groupby("name").step.max()
    assert steps["lr-0.001"] == steps["lr-0.002"] == 19  # 20 steps, counted from 0
    assert steps.get("lr-1e+30", -1) < 19
