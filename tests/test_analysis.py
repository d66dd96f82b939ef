"""Tables and notebooks on runs written here, whose results are known in advance."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from analysis import notebooks, tables
from analysis.runs import load_runs
from kv_cache.accounting import dense_nbytes
from tracking import Run

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ("loss", "cache", "speed", "budget")  # quant has a file of its own: test_quant_tables.py
LAYERS, HEADS, WIDTH, VOCAB = 6, 8, 256, 65
SEEDS = (1, 2, 3)
MHA = {1: 1.5, 2: 1.7, 3: 1.6}  # final losses: seeds lie 0.1 apart …
EXTRA = {8: (0.0, 0.0, 0.0), 2: (0.01, 0.03, -0.04), 1: (0.03, 0.02, 0.025)}  # … and paired differences are far smaller
PROMPT, TOKENS, BATCHES = 64, 300, (1, 8, 32)


def write(folder, job, n_kv, seed, rows, summary, dialect="gpt2", **config):
    """One run folder, as tracking.py makes it without W&B."""
    model = {
        "dialect": dialect,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_kv": n_kv,
        "n_embd": WIDTH,
        "block_size": 256,
        "vocab_size": VOCAB,
    }
    config = {"script": job, "sweep": folder.parent.name, "name": folder.name, "seed": seed, "model": model, **config}
    with Run(folder, name=folder.name, group=folder.parent.name, job_type=job, config=config, mode="disabled") as run:
        (folder / "config.yaml").write_text(json.dumps(config))
        (folder / "provenance.json").write_text(json.dumps({"commit": "abc1234", "dirty": False, "machine": "abacus"}))
        for step, row in rows.items():
            run.log(row, step=step)
        run.summary({"n_kv": n_kv, "seed": seed, **summary})


def write_training(sweep, n_kv, seed, corpus="play"):
    end = MHA[seed] + EXTRA[n_kv][seed - 1]
    curve = {i: math.log(VOCAB) * math.exp(-i / 150) + end * (1 - math.exp(-i / 150)) for i in range(0, 900, 30)}
    rows = {i: {"train/loss": loss, "lr": 1e-3} for i, loss in curve.items()}
    for i in range(150, 900, 150):
        rows[i]["val/loss"] = curve[i] + 0.1
    rows[900] = {"val/loss": end}
    summary = {
        "val_loss_final": end, "val_loss_best": end, "steps": 900, "n_params": 4_000_000 + 100_000 * n_kv, "corpus": corpus,
        "dtype": "float32", "commit": "abc1234", "machine": "abacus",
    }  # fmt: skip
    write(sweep / f"kv{n_kv}-s{seed}", "train", n_kv, seed, rows, summary, train={"batch_size": 8, "steps": 900})


def write_evaluation(sweep, n_kv, seed):
    """A machine that does nothing but read, 10 GB/s: so the ratio of the speeds is the ratio of the bytes."""
    per_token = dense_nbytes(LAYERS, n_kv, WIDTH // HEADS, 1, 1, 4)
    weights, held = 4 * (4_000_000 + 100_000 * n_kv), PROMPT + TOKENS - 1
    summary = {"kv_bytes_per_token": per_token, "read_bandwidth": 1e10, "tokens": TOKENS, "prompt": PROMPT,
               "kernel": "paper", "threads": 2, "corpus": "play", "val_loss": MHA[seed] + EXTRA[n_kv][seed - 1]}  # fmt: skip
    rows = {}
    for batch in BATCHES:
        read = weights + per_token * batch * (PROMPT + TOKENS / 2)
        summary |= {
            f"tokens_per_s_b{batch}": batch * 1e10 / read * (1 + 0.01 * seed), f"step_ms_median_b{batch}": read / 1e7,
            f"bytes_read_per_step_b{batch}": read, f"achieved_bandwidth_b{batch}": 1e10, f"weight_bytes_b{batch}": weights,
            f"kv_bytes_formula_b{batch}": per_token * held * batch, f"kv_bytes_measured_b{batch}": per_token * held * batch,
        }  # fmt: skip
        for at in range(PROMPT + 100, held, 100):
            rate = batch * 1e10 / (weights + per_token * batch * at) * (1 + 0.01 * seed)
            rows.setdefault(at, {}).update({f"tokens_per_s/b{batch}": rate, f"kv_bytes/b{batch}": per_token * at * batch})
    parent = {"name": f"kv{n_kv}-s{seed}", "commit": "abc1234"}
    write(sweep / f"eval-kv{n_kv}-s{seed}", "eval", n_kv, seed, rows, summary, parent=parent, batches=list(BATCHES))


def write_uptraining(sweep, n_kv, seed, pool, pooled, uptrained):
    summary = {
        "groups": n_kv, "pool": pool, "fraction": 0.05, "parent_steps": 900, "steps": 45, "loss_parent": MHA[seed],
        "loss_pooled": pooled, "val_loss_final": uptrained, "loss_uniform": math.log(VOCAB), "corpus": "play",
        "commit": "abc1234", "machine": "abacus",
    }  # fmt: skip
    folder = sweep / f"kv8-s{seed}-to-kv{n_kv}-{pool}"
    write(folder, "uptrain", n_kv, seed, {45: {"val/loss": uptrained}}, summary, pool=pool, parent={"name": f"kv8-s{seed}"})


def write_sweep(sweep):
    for seed in SEEDS:
        for n_kv in (8, 2, 1):
            write_training(sweep, n_kv, seed)
            write_evaluation(sweep, n_kv, seed)
        write_uptraining(sweep, 8, seed, "mean", MHA[seed], MHA[seed] - 0.02)
        for n_kv, pool, jump, left in ((2, "mean", 1.0, 0.04), (2, "first", 1.4, 0.05), (2, "random", 2.4, 0.2), (1, "mean", 1.7, 0.06)):  # fmt: skip
            # seed 1 is the one the schedule was chosen on: it must not move the report
            write_uptraining(sweep, n_kv, seed, pool, MHA[seed] + jump, MHA[seed] + left + (0.5 if seed == 1 else 0.001 * seed))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository's sources with a finished `cpu` sweep, away from the repository."""
    root = tmp_path_factory.mktemp("copy")
    for folder in (".", "analysis", "kv_cache"):
        (root / folder).mkdir(exist_ok=True)
        for path in (ROOT / folder).glob("*.py"):
            shutil.copy(path, root / folder)
    shutil.copytree(ROOT / "configs" / "shape", root / "configs" / "shape")
    write_sweep(root / "runs" / "cpu")
    return root


@pytest.fixture(scope="module")
def runs(copy):
    return load_runs(copy / "runs", sweep="cpu")[0]


def script(root, name, *words, home=None):
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, root / "analysis" / name, *words], check=False, capture_output=True, text=True, timeout=240,
        env=env | ({"HOME": str(home)} if home else {}), cwd=root,
    )  # fmt: skip


def outputs(path):
    """Everything a notebook shows, as text."""
    cells = json.loads(path.read_text())["cells"]
    shown = [o for cell in cells for o in cell.get("outputs", [])]
    return "\n".join("".join(o.get("text", "")) + "".join(o.get("data", {}).get("text/markdown", "")) for o in shown)


# ---------------------------------------------------------------------------------------------------------------------
# tables


def test_the_interval_is_students():
    for values in ([0.1, 0.3], [1.0, 2.0, 4.0], [0.01, -0.02, 0.03, 0.05, -0.01]):
        mean, half = tables.interval(values)
        low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (mean - half, mean + half) == pytest.approx((low, high), abs=1e-12)
    mean, half = tables.interval([0.1, 0.3])  # one degree of freedom is Cauchy: t = tan(0.475 pi), std / sqrt(2) = 0.1
    assert (mean, half) == pytest.approx((0.2, 0.1 * math.tan(0.475 * math.pi)))
    assert math.isnan(tables.interval([1.0])[1]) and tables.with_interval([1.0]) == "1.0000"
    assert tables.with_interval([0.1, 0.3], digits=2, sign=True) == "+0.20 ± 1.27"


@pytest.mark.parametrize(
    "differences, said",
    [
        ([0.03, 0.02, 0.025], "beyond seed noise"),
        ([-0.03, -0.02, -0.025], "beyond seed noise"),
        ([0.01, 0.03, -0.04], "within seed noise"),
        ([0.0, 0.0, 0.0], "within seed noise"),
        ([0.5], "one seed: no verdict"),
    ],
)
def test_the_verdict_is_whether_the_interval_leaves_out_zero(differences, said):
    assert tables.verdict(differences) == said
    if len(set(differences)) > 1:
        assert (stats.ttest_1samp(differences, 0).pvalue < 0.05) == (said == "beyond seed noise")


def test_the_sweep_is_compared_in_pairs(runs):
    table = tables.sweep_table(runs)
    assert list(zip(table.n_kv, table.seed, strict=True)) == [(n_kv, seed) for n_kv in (8, 2, 1) for seed in SEEDS]
    assert list(table.kv_bytes_per_token.unique()) == [12288, 3072, 1536]
    assert (table.kv_bytes_formula == table.kv_bytes_measured).all()
    assert table.kv_bytes_measured.iloc[0] == 12288 * 363 * 32
    header, mha, gqa, mqa = tables.sweep_summary(table)
    assert [row[0] for row in (mha, gqa, mqa)] == ["MHA", "GQA-2", "MQA"]
    difference = header.index("difference to MHA, paired")
    assert mha[difference] == "–"
    assert gqa[difference].startswith("+0.0000 ± 0.0") and gqa[difference].endswith("within seed noise")
    # the seeds are 0.1 apart, so an unpaired comparison could never see 0.025
    half = stats.t.ppf(0.975, 2) * 0.005 / math.sqrt(3)
    assert mqa[difference] == f"+0.0250 ± {half:.4f}, beyond seed noise"
    assert header[-1] == "batch 32 / MHA"
    read = [4 * (4_000_000 + 100_000 * n) + dense_nbytes(LAYERS, n, 32, 1, 32, 4) * 214 for n in (8, 1)]
    assert mqa[-1] == f"{read[0] / read[1]:.2f}x"


def test_the_uptraining_report_rests_on_the_seeds_the_schedule_was_not_chosen_on(runs):
    table = tables.uptrain_table(runs)
    assert len(table) == 15 and set(table.seed) == set(SEEDS)
    _, *rows = tables.uptrain_summary(table)
    assert [row[:3] for row in rows] == [
        ["8 (the parent, trained on)", "–", "2"], ["2", "first", "2"], ["2", "mean", "2"], ["2", "random", "2"], ["1", "mean", "2"],
    ]  # fmt: skip
    # against the parent trained on, which is 0.02 below the parent: 0.04 + 0.02, and 0.001 a seed
    assert rows[2][-1] == f"{tables.with_interval([0.062, 0.063], sign=True)}, beyond seed noise"
    assert rows[0][-1] == "–"


def test_other_corpora_are_refused_and_unfinished_runs_left_out(tmp_path):
    sweep = tmp_path / "t"
    for seed in (1, 2):
        write_training(sweep, 8, seed)
        write_evaluation(sweep, 8, seed)
    (sweep / "kv8-s2" / "summary.json").unlink()
    assert list(tables.sweep_table(load_runs(tmp_path)[0]).seed) == [1]
    write_training(sweep, 2, 1, corpus="another play")
    with pytest.raises(ValueError, match="different corpora .another play, play."):
        tables.sweep_table(load_runs(tmp_path)[0])


def test_runs_of_the_notebooks_are_in_no_table(copy, runs, tmp_path, monkeypatch):
    shutil.copytree(copy / "runs" / "cpu", tmp_path / "runs" / "cpu")
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    notebooks.record("loss", "cpu", "disabled", 33)
    more = load_runs(tmp_path / "runs")[0]
    assert len(more) == len(runs) + 1 and list(more.job_type).count("analysis") == 1
    pd.testing.assert_frame_equal(tables.sweep_table(more), tables.sweep_table(runs), check_dtype=False)
    pd.testing.assert_frame_equal(tables.uptrain_table(more), tables.uptrain_table(runs), check_dtype=False)


def test_only_the_blocks_of_the_readme_are_replaced(tmp_path):
    path = tmp_path / "README.md"
    text = "# Title\n\n<!-- sweep -->\nold\nolder\n<!-- /sweep -->\n\nprose | not a table |\n<!-- uptrain -->\n<!-- /uptrain -->\nend"
    path.write_text(text)
    tables.write_readme(path, {"sweep": "| new |", "uptrain": "| up |", "unknown": "lost"})
    wanted = text.replace("old\nolder\n", "| new |\n").replace("<!-- uptrain -->\n", "<!-- uptrain -->\n| up |\n")
    assert path.read_text() == wanted
    tables.write_readme(path, {"sweep": "| new |", "uptrain": "| up |"})
    assert path.read_text() == wanted
    path.write_text("<!-- sweep -->\nno end")
    tables.write_readme(path, {"sweep": "| new |"})
    assert path.read_text() == "<!-- sweep -->\nno end"


# ---------------------------------------------------------------------------------------------------------------------
# notebooks


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_script_and_notebook_are_the_same(name):
    path = ROOT / "analysis" / f"{name}.ipynb"
    if not path.exists():
        pytest.skip("not executed yet: make analysis")
    built, kept = notebooks.build(name), json.loads(path.read_text())
    assert [(c.id, c.cell_type, c.source) for c in built.cells] == [
        (c["id"], c["cell_type"], "".join(c["source"])) for c in kept["cells"]
    ]
    text = re.sub(r'"image/png": "[^"]*"', "", path.read_text())
    assert not re.search(r"[\"'\s(=](/(home|root|Users|tmp|work|private|mnt|opt|usr|var)/|[A-Z]:\\\\)", text)
    assert kept["metadata"] == built.metadata  # no version of Python, no kernel of somebody's


@pytest.fixture(scope="module")
def executed(copy, tmp_path_factory):
    """All notebooks, executed with an empty home: no kernel is installed there, and no W&B account."""
    home = tmp_path_factory.mktemp("home")
    return script(copy, "notebooks.py", "wandb=disabled", home=home), home


def test_the_notebooks_on_known_runs(copy, executed):
    done, home = executed
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(NOTEBOOKS)
    assert not list(home.glob(".ipython")) and not list(home.glob(".local")) and not list(home.glob(".jupyter"))
    assert json.loads((copy / "analysis" / "loss.ipynb").read_text())["metadata"]["language_info"] == {"name": "python"}
    loss, cache, speed = (outputs(copy / "analysis" / f"{name}.ipynb") for name in ("loss", "cache", "speed"))
    for text in (loss, cache, speed):
        assert "9 train (finished, each read from its metrics.jsonl)" in text and str(copy) not in text
    assert "ln(65) = 4.1744" in loss and "**within seed noise**" in loss and "**MQA** − MHA: +0.0250 ± 0.0124" in loss
    assert "MQA is worse, by 1.6%" in loss  # 0.025 of 1.6
    assert "**GQA-2, mean:** pooling moves the loss by +1.0000" in loss
    assert "uptraining wins back 95.8% of the jump" in loss  # (1 - 0.0425) / 1
    assert "**27 of 27** measured counts equal the formula" in cache
    assert "| GQA-2 | 2 | 3,072 | 2 · 6 · 2 · 32 · 4 | 4x |" in cache and "| 1,536 | 2 · 6 · 1 · 32 · 4 | 8x |" in cache
    assert f"{4 * 4_800_000 / 12288:,.0f} tokens" in cache and f"{4 * 4_100_000 / 1536 / 32:,.0f} tokens" in cache
    # this machine only reads, so speed follows the bytes, with no spread over the seeds
    read = [4 * (4_000_000 + 100_000 * n) + dense_nbytes(LAYERS, n, 32, 1, 32, 4) * 214 for n in (8, 1)]
    assert f"Batch 32, MQA: **faster** than MHA: {read[0] / read[1]:.2f} ± 0.00" in speed
    assert "100.0% |" in speed and "| machine | abacus |" in speed
    figures = copy / "results" / "figures"
    assert {p.name for p in figures.iterdir()} == {f"{n}.png" for name in NOTEBOOKS for n in notebooks.FIGURES[name]}
    assert "quant, retrieval: left out; runs/cpu: nothing measured through a quantised cache" in done.stderr

    files = [copy / "analysis" / "cache.ipynb", figures / "cache.png"]
    before = [path.read_bytes() for path in files]
    assert script(copy, "notebooks.py", "wandb=disabled", "notebook=cache").returncode == 0
    assert [path.read_bytes() for path in files] == before  # byte for byte, and the first execution is not counted as a run


def test_the_budget_counts(copy, executed):
    """Llama 3 8B's own numbers, put together here from its layers."""
    assert executed[0].returncode == 0, executed[0].stderr
    text, gib, mib = outputs(copy / "analysis" / "budget.ipynb"), 2**30, 2**20
    table = 128256 * 4096

    def weights(n_kv):
        projections = 2 * 4096 * 4096 + 2 * 4096 * n_kv * 128
        return 2 * (2 * table + 4096 + 32 * (projections + 3 * 4096 * 14336 + 2 * 4096))

    assert f"{weights(8) // 2:,} weights" in text
    for n_kv, name in ((32, "MHA"), (8, "GQA-8"), (1, "MQA")):
        token, left, read = 2 * 2 * 32 * n_kv * 128, 24 * gib - weights(n_kv), weights(n_kv) - 2 * table
        fit = left // (8192 * token)
        size = f"{n_kv / 8:.2f} GiB" if n_kv > 1 else "128 MiB"
        assert f"**{name}**: one conversation of 8,192 tokens takes {size}; {fit} fit" in text
        assert f"into the {left / gib:.2f} GiB that the weights leave" in text
        assert f"| {left // token:,} | {fit} |" in text and f"| {left // (32 * token):,} tokens |" in text
        crossing = [f"{read // (batch * token) + 1:,} tokens" for batch in (1, 8, 32)]
        assert f"| {name} | {read / gib:.1f} GiB | {' | '.join(crossing)} |" in text
        one, many = (1e3 * (read + batch * 8192 * token) / 1e12 for batch in (1, 32))
        assert f"| {one:.1f} ms | {1e3 / one:.0f} |" in text and f"| {many:.1f} ms | {32e3 / many:,.0f} |" in text
    # GQA-8 with one head a device, as MQA has it
    assert "| 8 | 512 MiB / 4.00 GiB | 128 MiB / 1.00 GiB | 128 MiB / 1.00 GiB |" in text
    assert "| 16 | 256 MiB / 4.00 GiB | 128 MiB / 2.00 GiB | 128 MiB / 2.00 GiB |" in text
    assert "**On 8 devices MQA saves nothing over GQA-8**" in text
    for bits in (8, 4, 2):  # a scale and a zero point of 16 bits for 32 values: one bit more; the newest 32 tokens have 16
        packed = 8192 - 32
        assert f"| {(packed * (bits + 1) + 32 * 16) / 8192:.2f} | {packed * 65536 * bits / 8 / mib:.0f} MiB | " in text
        for window in (32, 128):
            cells = [((n - window) * (bits + 1) + window * 16) / n if n > window else 16 for n in (64, 256, 1024, 8192, 131072)]
            assert f"| int{bits} | {window} | {' | '.join(f'{cell:.2f}' for cell in cells)} |" in text
    assert "is packed at 64 tokens" in text and "is packed at 160 tokens" in text
    nanogqa, mistral = [], []
    for batch in (1, 32):
        for n_kv in (8, 2, 1):  # our own shape, whose cache crosses where cache.ipynb says
            read = 65 * 256 + 256 + 6 * (2 * 256 * (8 + n_kv) * 32 + 2 * 256 * 1024 + 2 * 256)
            crossing = f"{read // (batch * 2 * 6 * n_kv * 32) + 1:,}"
            nanogqa.append(f"**{crossing}**" if n_kv == 8 else crossing)
        for n_kv in (32, 8, 1):  # Llama's layers, with fewer words and a window of 4,096 tokens
            crossing = ((weights(n_kv) // 2 - 2 * table) + 32000 * 4096) // (batch * 2 * 32 * n_kv * 128) + 1
            crossing = f"{crossing:,}" if crossing <= 4096 else "never"
            mistral.append(f"**{crossing}**" if n_kv == 8 else crossing)
    assert f"| nanogqa | 8 / 2 / 1 | {' | '.join(nanogqa)} |" in text
    assert f"| mistral-7b | 32 / 8 / 1 | {' | '.join(mistral)} |" in text and mistral.count("never") == 3


def test_only_the_budget_needs_no_runs(monkeypatch, tmp_path, capsys):
    made = []
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "make", lambda name, sweep: (made.append(name) or f"{name}: made", True))
    for words, code in ((["notebook=budget"], 0), (["notebook=cache"], 2), ([], 2)):
        monkeypatch.setattr(sys, "argv", ["notebooks.py", "wandb=disabled", *words])
        with pytest.raises(SystemExit) as stop:
            notebooks.main()
        assert stop.value.code == code
    out, err = capsys.readouterr()
    assert made == ["budget"] and out == "budget: made\n" and err.count("no runs") == 2
    summary = json.loads((tmp_path / "runs" / "cpu" / "analysis-budget" / "summary.json").read_text())
    assert summary["runs_read"] == 0


def test_a_failing_cell_is_named(copy):
    source, kept = copy / "analysis" / "cache.py", copy / "analysis" / "cache.ipynb"
    text, before = source.read_text(), kept.read_bytes() if kept.exists() else None
    start = text.index("# %%\nimport sys")
    try:
        source.write_text(text[:start] + "# %%\nleft, right = 1, 0\nleft / right\n")
        done = script(copy, "notebooks.py", "wandb=disabled", "notebook=cache")
    finally:
        source.write_text(text)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.strip() == "error: cache.py, cell cache-01 (left, right = 1, 0): ZeroDivisionError: division by zero"
    assert (kept.read_bytes() if kept.exists() else None) == before


@pytest.mark.parametrize(
    "word, said", [("sweep=none", "no runs"), ("notebook=lost", "loss, cache, speed"), ("wandb=of", "offline")]
)
def test_a_wrong_word_is_one_line(word, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["notebooks.py", word])
    with pytest.raises(SystemExit) as stop:
        notebooks.main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and len(err.splitlines()) == 1 and said in err


def test_runs_of_another_shape_or_schedule_share_no_table(tmp_path):
    for seed in SEEDS:
        write_training(tmp_path / "s", 8, seed)
    folder = tmp_path / "s" / "kv8-s3"
    config = json.loads((folder / "config.yaml").read_text())
    config["train"]["steps"] = 2
    (folder / "config.yaml").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="different train.steps"):
        tables.sweep_table(load_runs(tmp_path, sweep="s")[0])


def test_two_runs_of_one_arm_and_seed_are_no_two_seeds(tmp_path):
    write_training(tmp_path / "s", 8, 1)
    shutil.copytree(tmp_path / "s" / "kv8-s1", tmp_path / "s" / "again")
    with pytest.raises(ValueError, match="same n_kv and seed"):
        tables.sweep_table(load_runs(tmp_path, sweep="s")[0])


def test_conversions_of_conversions_and_measurements_under_other_names_stay_out(tmp_path):
    sweep = tmp_path / "s"
    for seed in SEEDS:
        for n_kv in (8, 2):
            write_training(sweep, n_kv, seed)
            write_evaluation(sweep, n_kv, seed)
        write_uptraining(sweep, 2, seed, "mean", 3.0, 2.0)
    before = load_runs(tmp_path, sweep="s")[0]
    sweep.joinpath("eval-kv8-s1").rename(tmp_path / "kept")
    shutil.copytree(tmp_path / "kept", sweep / "short")  # eval.py name=short
    (tmp_path / "kept").rename(sweep / "eval-kv8-s1")
    source, copy = sweep / "kv8-s1-to-kv2-mean", sweep / "kv2-s1-to-kv2-mean"
    shutil.copytree(source, copy)
    config = json.loads((copy / "config.yaml").read_text())
    config["parent"]["name"] = "kv2-s1"  # pooled from a model that was no MHA
    (copy / "config.yaml").write_text(json.dumps(config))
    after = load_runs(tmp_path, sweep="s")[0]
    assert len(after) == len(before) + 2
    assert len(tables.uptrain_table(after)) == len(tables.uptrain_table(before)) == 3
    assert len(tables.evaluations(after)) == len(tables.evaluations(before)) == 6
    pd.testing.assert_frame_equal(tables.sweep_table(after), tables.sweep_table(before))


@pytest.mark.parametrize("name", ["tables", "runs", "notebooks", "dashboard"])
def test_help_prints_the_commands(name):
    done = subprocess.run([sys.executable, ROOT / "analysis" / f"{name}.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and f"python analysis/{name}.py" in done.stdout and done.stderr == ""
