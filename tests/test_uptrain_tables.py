"""The curve of uptraining as a table and a notebook, on runs written here, whose results are known in advance."""

import json
import shutil
import sys

import pandas as pd
import pytest
from scipy import stats
from test_analysis import ROOT, outputs, script, write

from analysis import notebooks
from analysis import uptrain_tables as u
from analysis.runs import load_runs

PARENT = {1: 1.5, 2: 1.7, 3: 1.6}  # seeds lie 0.1 apart, and differences are far smaller
FRACTIONS = (0.01, 0.05, 0.1)
JUMP = {"svd": 0.004, "mean": 0.6}  # right after pooling to 2 heads; twice as much to one, and svd costs more each seed
LEFT = {"svd": 0.001, "mean": 0.2}  # after uptraining by FRACTIONS[0], beside the parent trained on


def control(seed, fraction, rate):
    return PARENT[seed] + (-0.1 * fraction if rate == 0.1 else 0.5 * fraction)


def write_trained(sweep, n_kv, seed, loss, corpus="play", dialect="gpt2"):
    summary = {
        "val_loss_final": loss,
        "steps": 1000,
        "corpus": corpus,
        "dtype": "float32",
        "commit": "abc1234",
        "machine": "abacus",
    }
    write(sweep / f"kv{n_kv}-s{seed}", "train", n_kv, seed, {1000: {"val/loss": loss}}, summary, dialect=dialect)


def write_converted(sweep, groups, seed, pool, fraction, rate, pooled, after, dialect="gpt2", **more):
    summary = {
        "groups": groups, "n_kv_parent": 8, "pool": pool, "fraction": fraction, "rate": rate, "steps": round(1000 * fraction),
        "parent_steps": 1000, "loss_parent": PARENT[seed], "loss_pooled": pooled, "val_loss_final": after,
        "corpus": "play", "commit": "abc1234", "machine": "abacus", **more,
    }  # fmt: skip
    name = f"kv8-s{seed}-to-kv{groups}-{pool}-{100 * fraction:g}pct-rate{rate:g}"
    write(sweep / name, "uptrain", groups, seed, {}, summary, dialect=dialect, parent={"name": f"kv8-s{seed}"})


def loss_after(groups, seed, pool, fraction, rate):
    """Half of what is left with each longer fraction; a seed more, a thousandth more."""
    return control(seed, fraction, rate) + LEFT[pool] / 2 ** FRACTIONS.index(fraction) / groups + 0.001 * seed


def write_curve(root, sweep, dialect="gpt2", seeds=(1, 2, 3)):
    for seed in seeds:
        for n_kv in (8, 2, 1):
            write_trained(root / sweep, n_kv, seed, PARENT[seed] + (8 - n_kv) / 500, dialect=dialect)
        for fraction in FRACTIONS:
            for rate in (1.0, 0.1):
                after = control(seed, fraction, rate)
                write_converted(root / f"{sweep}-curve", 8, seed, "mean", fraction, rate, PARENT[seed], after, dialect)
            for groups in (2, 1):
                for pool, rate in (("svd", 0.1), ("mean", 1.0)):
                    pooled = PARENT[seed] + JUMP[pool] * 2 / groups
                    after = loss_after(groups, seed, pool, fraction, rate)
                    write_converted(root / f"{sweep}-curve", groups, seed, pool, fraction, rate, pooled, after, dialect)
        write_converted(root / f"{sweep}-curve", 2, seed, "mean", 0.05, 0.1, PARENT[seed] + 0.6, PARENT[seed] + 0.5, dialect)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_curve(root, "cpu")
    return root


def test_a_row_an_arm_seed_and_fraction(runs):
    found, missing = u.load("cpu", runs)
    assert list(found) == ["cpu"] and missing == [
        "runs/llama-curve: no conversions; `make uptrain-curve MODEL=llama` makes them"
    ]
    table = u.curve_table(found["cpu"])
    assert not table.duplicated(["seed", "groups", "pool", "rate", "fraction"]).any()
    # seeds x (scratch: 3; the parent: 0 and 2 rates of 3 fractions; 2 x 2 arms of 4; one at another rate)
    assert len(table) == 3 * (3 + 7 + 16 + 1)
    assert u.targets(table) == [2, 1]
    assert u.arms(table)[0][:2] == (8, "none") and {arm[1] for arm in u.arms(table)[2:]} == {"svd", "mean"}
    for groups, pool, rate in ((2, "svd", 0.1), (1, "mean", 1.0)):
        for fraction in FRACTIONS:
            got = u.losses(table, pool, groups, fraction, rate)
            assert got.to_dict() == pytest.approx({s: loss_after(groups, s, pool, fraction, rate) for s in PARENT})
        assert u.losses(table, pool, groups, 0).to_dict() == pytest.approx(
            {s: PARENT[s] + JUMP[pool] * 2 / groups for s in PARENT}
        )


def test_differences_are_paired_by_seed_and_against_the_same_steps_at_the_same_rate(runs):
    lines = u.summary(u.curve_table(u.load("cpu", runs)[0]["cpu"]))
    rows = {(line[0], line[1], line[3]): line for line in lines[1:]}
    assert set(rows) == {
        ("8 (MHA)", "the parent, trained on", "0.1"), ("8 (MHA)", "the parent, trained on", "1"), ("2 (GQA-2)", "svd", "0.1"),
        ("2 (GQA-2)", "mean", "1"), ("2 (GQA-2)", "mean", "0.1"), ("1 (MQA)", "svd", "0.1"), ("1 (MQA)", "mean", "1"),
    }  # fmt: skip
    line = rows["1 (MQA)", "svd", "0.1"]
    left = [LEFT["svd"] / 2 + 0.001 * seed for seed in PARENT]  # beside the parent trained on
    half = stats.t.ppf(0.975, 2) * pd.Series(left).std() / 3**0.5
    assert line[5] == f"{sum(left) / 3:+.4f} ± {half:.4f}, {'beyond' if sum(left) / 3 > half else 'within'} seed noise"
    assert line[2].startswith("+0.0080 ± 0.0000") and line[4].startswith(f"{sum(left) / 3 - 0.005:+.4f}")
    assert line[6].startswith(f"{sum(left) / 3 - 0.005 - 7 / 500:+.4f}")  # to MQA from scratch
    assert rows["8 (MHA)", "the parent, trained on", "1"][2:] == ["–", "1", "+0.0250 ± 0.0000", "–", "–"]


def test_the_overview_takes_each_pools_better_rate(runs):
    lines = u.overview(u.curve_table(u.load("cpu", runs)[0]["cpu"]))
    assert lines[0] == ["pool", "GQA-2, pooled", "GQA-2, after 5%", "MQA, pooled", "MQA, after 5%"]
    assert [line[0] for line in lines[1:]] == ["the parent, trained on", "svd", "mean", "trained from scratch, all steps"]
    parent, svd, mean, scratch = lines[1:]
    assert parent[1:] == ["–", "-0.0050 ± 0.0000"] * 2
    assert svd[1].startswith("+0.0040") and svd[3].startswith("+0.0080")
    assert mean[2].startswith(f"{0.025 + 0.05 + 0.002:+.4f}")  # at rate 1; +0.5 at rate 0.1
    assert scratch[1:] == ["–", "+0.0120 ± 0.0000", "–", "+0.0140 ± 0.0000"]


def test_runs_that_share_no_table_are_refused(tmp_path):
    write_curve(tmp_path, "a", seeds=(1,))
    write_converted(tmp_path / "a-curve", 4, 1, "svd", 0.05, 0.1, 1.6, 1.6, corpus="novel")
    with pytest.raises(ValueError, match="different corpora"):
        u.curve_table(u.load("a", tmp_path)[0]["a"])


def test_conversions_of_other_parents_stay_out(tmp_path):
    write_curve(tmp_path, "a", seeds=(1,))
    before = u.curve_table(u.load("a", tmp_path)[0]["a"])
    summary = {"groups": 1, "n_kv_parent": 2, "pool": "svd", "fraction": 0.05, "rate": 1.0, "steps": 5, "loss_pooled": 9.0,
               "val_loss_final": 9.0, "corpus": "play"}  # fmt: skip
    write(tmp_path / "a-curve" / "second", "uptrain", 1, 1, {}, summary, parent={"name": "kv8-s1-to-kv2-svd"})
    pd.testing.assert_frame_equal(u.curve_table(u.load("a", tmp_path)[0]["a"]), before)


def test_script_and_notebook_on_both_dialects(tmp_path):
    for folder in ("analysis", "kv_cache", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        for path in (ROOT / folder).glob("*.py"):
            shutil.copy(path, tmp_path / folder)
    (tmp_path / "README.md").write_text("<!-- uptrain-curve -->\nold\n<!-- /uptrain-curve -->\n")
    done = script(tmp_path, "uptrain_tables.py", home=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "make uptrain-curve" in done.stderr
    write_curve(tmp_path / "runs", "cpu")
    write_curve(tmp_path / "runs", "llama", dialect="llama", seeds=(1, 2))
    done = script(tmp_path, "uptrain_tables.py", home=tmp_path)
    assert done.returncode == 0, done.stderr
    csv = pd.read_csv(tmp_path / "results" / "uptrain_curve.csv")
    assert csv.groupby("dialect").seed.nunique().to_dict() == {"gpt2": 3, "llama": 2} and len(csv) == 5 * 27
    readme = (tmp_path / "README.md").read_text()
    assert "old" not in readme and readme.count("| svd | +0.0040") == 2 and "dialect llama" in readme
    done = script(tmp_path, "notebooks.py", "notebook=uptrain", "wandb=disabled", home=tmp_path)
    assert done.returncode == 0, done.stderr
    text = outputs(tmp_path / "analysis" / "uptrain.ipynb")
    assert "GQA-2: svd loses least before any training, +0.0040 nats, where mean loses +0.6000" in text
    assert "| 2 | svd | +0.0040 ± 0.0000 | +0.0040 ± 0.0000 |" in text
    assert {path.stem for path in (tmp_path / "results" / "figures").iterdir()} == set(notebooks.FIGURES["uptrain"])


def test_conversions_of_smollm2(tmp_path):
    sweep = tmp_path / "pretrained"
    about = {"loss_parent": 3.4, "corpus": "play", "commit": "abc1234", "machine": "abacus", "rate": 1.0}
    for parent, before, groups, pool, steps, pooled, after in (
        ("smollm2", 3, 9, "mean", 0, 3.4, 3.4), ("smollm2-to-kv9-0steps", 9, 3, "mean", 0, 3.4, 3.4),
        ("smollm2", 3, 1, "mean", 40, 9.7, 6.0), ("smollm2", 3, 1, "svd", 40, 4.4, 3.9), ("smollm2", 3, 3, "mean", 40, 3.4, 3.2),
        ("llama", 8, 2, "svd", 40, 2.0, 1.9), ("my-smollm2", 3, 1, "svd", 40, 2.0, 1.9),  # somebody's, of no concern here
    ):  # fmt: skip
        summary = {"groups": groups, "n_kv_parent": before, "pool": pool, "steps": steps, "loss_pooled": pooled, **about}
        folder = sweep / f"{parent}-to-kv{groups}-{pool}"
        write(folder, "uptrain", groups, 0, {}, {**summary, "val_loss_final": after}, parent={"name": parent}, window=512)
    table = u.pretrained_table(load_runs(tmp_path, sweep="pretrained")[0])
    assert u.pretrained_summary(table)[1:] == [
        ["3 → 1", "svd", "3.4000", "4.4000", "3.9000", "40"], ["3 → 1", "mean", "3.4000", "9.7000", "6.0000", "40"],
        ["3 → 3", "–", "3.4000", "3.4000", "3.2000", "40"], ["3 → 9", "–", "3.4000", "3.4000", "–", "0"],
        ["9 → 3", "mean", "3.4000", "3.4000", "–", "0"],
    ]  # fmt: skip
    assert "windows of 512 tokens" in u.pretrained_conditions(table)


def test_a_sweep_without_a_curve_is_no_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["notebooks.py", "sweep=smoke", "wandb=disabled", "notebook=uptrain"])
    with pytest.raises(SystemExit) as stop:
        notebooks.main()
    assert stop.value.code == 0
    said = "uptrain: left out; runs/smoke-curve: no conversions; `make uptrain-curve PRESET=smoke` makes them"
    assert capsys.readouterr().err.splitlines() == [said]


def test_script_and_notebook_are_the_same():
    path = ROOT / "analysis" / "uptrain.ipynb"
    if not path.exists():
        pytest.skip("not executed yet: make uptrain-curve")
    built, kept = notebooks.build("uptrain"), json.loads(path.read_text())
    assert [(c.id, c.cell_type, c.source) for c in built.cells] == [
        (c["id"], c["cell_type"], "".join(c["source"])) for c in kept["cells"]
    ]
    assert kept["metadata"] == built.metadata
