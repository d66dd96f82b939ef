"""Tables and notebook of quantised caches, on runs written here, whose results are known in advance."""

import json
import math
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import torch
from scipy import stats
from test_analysis import ROOT, outputs, script, write, write_evaluation, write_training

from analysis import notebooks, quant_tables, tables
from analysis.runs import load_runs
from kv_cache.fp8 import FP8Config
from kv_cache.kivi import KIVIConfig
from kv_cache.kvquant import KVQuantConfig

SEEDS = (1, 2, 3)
UNCACHED = {1: 1.5, 2: 1.7, 3: 1.6}
CACHES = [  # a config, the bits a number, the change of the loss for each seed at n_kv 8; the double at n_kv 1
    (FP8Config(), 8.0, (0.0002, 0.0004, 0.0006)),
    (KIVIConfig(bits=4), 6.375, (0.0001, 0.0001, 0.0001)),
    (KIVIConfig(bits=2), 4.6, (0.01, 0.02, 0.03)),
    (KIVIConfig(bits=2, key_axis="token"), 4.6, (0.05, 0.06, 0.07)),
    (KIVIConfig(bits=2, residual=0), 3.2, (0.1, 0.12, 0.14)),
    (KIVIConfig(bits=2, residual=0, key_axis="token"), 3.2, (0.2, 0.25, 0.3)),
    (KVQuantConfig(bits=3), 4.5, (-0.002, 0.004, 0.001)),
    (KVQuantConfig(bits=2, outliers=0), 3.0, (0.02, 0.03, 0.04)),
]


def write_quantised(folder, parent, n_kv, seed, config, change, bits, uncached, script="train", newest=None, **more):
    """What eval.py cache=… cache_dtype=float16 leaves."""
    label = f"{config.label()}-float16"
    summary = {
        "val_loss": uncached, "val_loss_cached": uncached + change, "val_kl": abs(change) / 2 + 1e-6, "bits_per_value": bits,
        "key_error": 0.1, "value_error": 0.05,
        "corpus": "play", "cache": label, "tokens": 300, "prompt": 64, "dtype": "float32", "kernel": "paper", "threads": 2,
        "commit": "abc1234", "machine": "abacus", **more,
    }  # fmt: skip
    write(
        folder / (f"eval-{parent}-{label}" + (f"-newest{newest}-loss" if newest is not None else "")),
        "eval", n_kv, seed, {}, summary, window=None, windows=128, newest=newest, dtype="float32",
        parent={"name": parent, "script": script}, cache={"kind": label, "dtype": "float16", **vars(config)},
    )  # fmt: skip


def write_retrieval(folder, parent, n_kv, seed, label, accuracy, script="train", **config):
    """What retrieval.py leaves."""
    summary = {"accuracy": accuracy, "accuracy_mean": 0.5, "cache": label, "commit": "abc1234", "machine": "abacus"}
    bits = int(label[4]) if label.startswith("kivi") else None
    options = {"kind": label, **vars(KIVIConfig(bits=bits))} if bits else {"kind": label, "name": "dense"}
    parent_of = {"name": parent, "script": script}
    write(
        folder / f"retrieval-{parent}-{label}", "retrieval", n_kv, seed, {}, summary, cache=options, parent=parent_of, **config
    )


def write_calibration(path, n_kv, head_dim, turned):
    """A calibration whose keys have one channel ten times as wide as the others."""
    C = n_kv * head_dim
    keys = torch.ones(3, C)
    keys[:, 2] = 10
    reach = {"keys": keys, "values": torch.ones(3, C)} | ({"turned": keys.clamp(max=5)} if turned else {})
    picture = {"layer": 1} | {name: torch.rand(128, C) for name in ("keys", "turned", "values")}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"reach": reach, "picture": picture}, path)


def write_all(root):
    """The sweep cpu with quantised evaluations, recall, and SmolLM2 as runs/pretrained."""
    cpu, recall, pretrained = (root / "runs" / name for name in ("cpu", "recall", "pretrained"))
    for seed in SEEDS:
        for n_kv in (8, 1):
            parent = f"kv{n_kv}-s{seed}"
            write_training(cpu, n_kv, seed)
            write_evaluation(cpu, n_kv, seed)
            for config, bits, changes in CACHES:
                change = changes[seed - 1] * (1 if n_kv == 8 else 2)
                write_quantised(cpu, parent, n_kv, seed, config, change, bits, UNCACHED[seed])
            for newest, change in ((0, 0.2 + 0.01 * seed), (16, 0.02)):
                write_quantised(cpu, parent, n_kv, seed, CACHES[4][0], change, 3.2, UNCACHED[seed], newest=newest)
            found = {"dense-float16": 1.0, "kivi4-g32-r32-float16": 1.0, "kivi2-g32-r32-float16": 0.5 + 0.1 * seed}
            for label, share in found.items():
                write_retrieval(
                    recall, parent, n_kv, seed, label, {"16": share, "512": share - 0.25, "1000": 0.25}, examples=32
                )
            write_calibration(cpu / parent / "last.calibration.pt", n_kv, 32, turned=False)
            write_calibration(recall / parent / "last.calibration.pt", n_kv, 16, turned=True)
    for config, bits, changes in CACHES:
        write_quantised(pretrained, "smollm2", 3, 0, config, changes[2], bits, 3.0, "pretrained")
    for label, share in (("dense-float16", 1.0), ("kivi2-g32-r32-float16", 0.5)):
        cells = {json.dumps([length, depth]): share for length in (512, 1024) for depth in (0.0, 0.5, 1.0)}
        write_retrieval(pretrained, "smollm2", 3, 0, label, cells, "pretrained", keys=2, lengths=[512, 1024])
    write_calibration(root / "checkpoints" / "smollm2.calibration.pt", 3, 64, turned=True)
    (root / "checkpoints" / "smollm2.pt").touch()


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository's sources with these runs, away from the repository."""
    root = tmp_path_factory.mktemp("copy")
    for folder in (".", "analysis", "kv_cache", "kernels"):
        (root / folder).mkdir(exist_ok=True)
        for path in (ROOT / folder).glob("*.py"):
            shutil.copy(path, root / folder)
    write_all(root)
    return root


@pytest.fixture(scope="module")
def both(copy):
    found, missing = quant_tables.load("cpu", copy / "runs")
    assert list(found) == ["cpu", "recall", "pretrained"] and not missing
    return quant_tables.tables_of(found)


def test_a_row_a_model_and_cache(both):
    quant, newest, retrieval = both
    assert list(newest.columns) == quant_tables.NEWEST_COLUMNS and list(newest.newest) == [0] * 6 + [16] * 6
    assert list(newest.difference[:3]) == pytest.approx([0.21, 0.22, 0.23]) and set(newest.n_kv[:3]) == {8}
    _, eight, one = quant_tables.newest_summary(newest)
    assert eight[:2] == ["KIVI, 2 bits", "8"] and eight[2].startswith("+0.2200 ±") and one[3].startswith("+0.0200 ±")
    assert list(quant.columns) == quant_tables.QUANT_COLUMNS and list(retrieval.columns) == quant_tables.RETRIEVAL_COLUMNS
    assert len(quant) == len(CACHES) * 7 and set(quant.sweep) == {"cpu", "pretrained"}
    row = quant[(quant.cache == "kivi2-g32-r32-float16") & (quant.n_kv == 8) & (quant.seed == 2)].iloc[0]
    assert (row.method, row.bits, row.group, row.residual, row.key_axis) == ("kivi", 2, 32, 32, "channel")
    assert (row.window, row.windows, row.exact_dtype, row["dtype"]) == (256, 128, "float16", "float32")
    assert row.difference == pytest.approx(0.02) and row.bits_per_value == 4.6
    assert row.perplexity == pytest.approx(math.exp(1.7)) and row.perplexity_cached == pytest.approx(math.exp(1.72))
    assert (row.val_kl, row.commit, row.machine) == (pytest.approx(0.010001), "abc1234", "abacus")
    fp8 = quant[quant.method == "fp8"].iloc[0]
    assert (fp8.bits, fp8.format, fp8.scale) == (8, "e4m3", "one") and pd.isna(fp8.group)

    recall, passkey = (retrieval[retrieval.task == task] for task in ("recall", "passkey"))
    assert len(recall) == 3 * 3 * 6 and len(passkey) == 2 * 6
    row = recall[(recall.cache == "kivi2-g32-r32-float16") & (recall.distance == 512) & (recall.seed == 3)].iloc[0]
    assert (row.accuracy, row.examples, row.length, row.bits) == (pytest.approx(0.55), 32, 256, 2) and pd.isna(row.depth)
    assert set(zip(passkey.length, passkey.depth, strict=True)) == {(n, d) for n in (512, 1024) for d in (0.0, 0.5, 1.0)}
    assert set(passkey.examples) == {2} and passkey.distance.isna().all()


def test_the_caches_have_names_and_an_order(both):
    quant, _, _ = both
    cpu = quant[quant.sweep == "cpu"]
    assert [name for name, _ in quant_tables.by_cache(cpu)] == [
        "fp8 e4m3", "KIVI, 4 bits", "KIVI, 2 bits", "KIVI, 2 bits, no window", "KIVI, 2 bits, keys by token",
        "KIVI, 2 bits, keys by token, no window", "KVQuant, 3 bits, 1 % outliers", "KVQuant, 2 bits, no outliers",
    ]  # fmt: skip
    other = pd.DataFrame([
        {"method": "kvquant", "bits": 3, "outliers": 0.05, "sink": 4, "pre_rope": False},
        {"method": "kivi", "bits": 2, "group": 64, "residual": 128, "key_axis": "channel", "value_axis": "channel"},
        {"method": "fp8", "format": "e5m2", "scale": "head"}, {"method": "dense", "exact_dtype": "float16"},
    ])  # fmt: skip
    other["exact_dtype"] = "float16"
    other.loc[1, "exact_dtype"] = "float32"
    other = other.astype({"bits": "Int64", "group": "Int64", "residual": "Int64", "sink": "Int64"})
    assert [quant_tables.name_of(row) for row in other.itertuples()] == [
        "KVQuant, 3 bits, 5 % outliers, sink 4, keys after rotary positions", "KIVI, 2 bits, values by channel, groups of 64, window 128, float32 where exact",
        "fp8 e5m2, scale a head", "dense, float16",
    ]  # fmt: skip


def test_intervals_are_those_of_the_changes(both):
    cpu = both[0][both[0].sweep == "cpu"]
    header, *lines = quant_tables.quant_summary(cpu)
    assert header == [
        "cache",
        "bits a number",
        "error of coded keys, values, %",
        "n_kv 8: change of the loss",
        "n_kv 1: change of the loss",
    ]
    by_name = {line[0]: [line[1], *line[3:]] for line in lines}
    assert {line[2] for line in lines} == {"10, 5"}
    t = stats.t.ppf(0.975, 2)
    half = t * 0.01 / math.sqrt(3)  # 0.01, 0.02, 0.03; the seeds themselves lie 0.1 apart
    assert by_name["KIVI, 2 bits"] == ["4.60", f"+0.02000 ± {half:.5f}, undecided", f"+0.04000 ± {2 * half:.5f}, undecided"]
    assert by_name["KIVI, 4 bits"][1] == "+0.00010 ± 0.00000, nothing measurable"
    half = t * 0.0002 / math.sqrt(3)  # up to 0.0009, so it stays below 0.001, and up to 0.0018
    assert by_name["fp8 e4m3"][1:] == [f"+0.00040 ± {half:.5f}, nothing measurable", f"+0.00080 ± {2 * half:.5f}, undecided"]
    assert by_name["KIVI, 2 bits, keys by token"][1].endswith(", costs")
    assert by_name["KVQuant, 3 bits, 1 % outliers"][1].endswith(", undecided")


@pytest.mark.parametrize(
    "changes, said",
    [
        ([0.0001, 0.0001, 0.00012], "nothing measurable"),  # beyond zero, and still less than anyone would notice
        ([-0.02, -0.021, -0.02], "nothing measurable"),
        ([0.0009, 0.0009, 0.0009], "nothing measurable"),
        ([0.001, 0.001, 0.001], "costs"),
        ([0.02, 0.021, 0.02], "costs"),
        ([0.0, 0.0001, 0.002], "undecided"),
        ([-0.01, 0.0, 0.01], "undecided"),
        ([0.5], "one seed: no verdict"),
    ],
)
def test_the_words_follow_the_rule(changes, said):
    assert quant_tables.cost(changes) == said
    if len(set(changes)) > 1:
        low, high = stats.ttest_1samp(changes, 0).confidence_interval(0.95)
        assert (said == "nothing measurable") == (high < 0.001) and (said == "costs") == (low > 0 and high >= 0.001)


def test_a_seed_that_is_missing_is_said(both):
    cpu = both[0][both[0].sweep == "cpu"]
    lines = quant_tables.quant_summary(cpu[~((cpu.cache == "kivi4-g32-r32-float16") & (cpu.seed == 3) & (cpu.n_kv == 8))])
    cells = {line[0]: line[3] for line in lines}
    assert "(n = 2)" in cells["KIVI, 4 bits"] and "n =" not in cells["KIVI, 2 bits"]


def test_the_pretrained_model_and_what_is_found(both):
    quant, _, retrieval = both
    _, uncached, *lines = quant_tables.pretrained_summary(quant[quant.sweep == "pretrained"])
    assert uncached == ["none: uncached", "–", "–", f"{math.exp(3):.3f}", "–", "–"]
    by_name = {line[0]: line for line in lines}
    change = math.exp(3.03) - math.exp(3)
    assert by_name["KIVI, 2 bits"][1:] == ["4.60", "10, 5", f"{math.exp(3.03):.3f}", f"{change:+.3f}", "0.01500"]
    _, dense, four, two = quant_tables.recall_summary(retrieval[retrieval.task == "recall"])
    assert dense[0] == "dense, float16" and dense[1] == "66.7 (1,000 tokens: 25.0)" and four[1:] == dense[1:]
    means = [100 * (0.5 + 0.1 * seed + 0.25 + 0.1 * seed + 0.25) / 3 for seed in SEEDS]
    assert two[1] == two[2] == f"{sum(means) / 3:.1f} (1,000 tokens: 25.0)"
    _, dense, two = quant_tables.passkey_summary(retrieval[retrieval.task == "passkey"])
    assert dense[1:] == ["6 of 6", "6 of 6"] and two[1:] == ["3 of 6", "3 of 6"]


def test_measurements_under_other_names_and_of_conversions_stay_out(tmp_path):
    config = KIVIConfig()
    write_quantised(tmp_path / "s", "kv8-s1", 8, 1, config, 0.1, 4.6, 1.5)
    write_quantised(tmp_path / "s", "kv8-s1-to-kv2-mean", 2, 1, config, 0.1, 4.6, 1.5, script="uptrain")
    shutil.copytree(tmp_path / "s" / "eval-kv8-s1-kivi2-g32-r32-float16", tmp_path / "s" / "short")  # eval.py name=short
    write_evaluation(tmp_path / "s", 8, 1)
    runs = load_runs(tmp_path, sweep="s")[0]
    assert len(runs) == 4 and len(quant_tables.quant_table(runs)) == 1
    write_quantised(tmp_path / "s", "kv8-s2", 8, 2, config, 0.1, 4.6, 1.5, corpus="another play")
    with pytest.raises(ValueError, match="different corpora .another play, play."):
        quant_tables.quant_table(load_runs(tmp_path, sweep="s")[0])


# ---------------------------------------------------------------------------------------------------------------------
# the script


def test_the_script_fills_results_and_readme(copy):
    blocks = ("quant", "quant-smollm2", "retrieval")
    (copy / "README.md").write_text("".join(f"# {b}\n<!-- {b} -->\nold\n<!-- /{b} -->\nprose\n" for b in blocks))
    done = script(copy, "quant_tables.py", "readme=false")
    assert done.returncode == 0 and done.stderr == "" and (copy / "README.md").read_text().count("old") == 3
    done = script(copy, "quant_tables.py")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "nothing measurable" in done.stdout and done.stdout.endswith(
        "-> results/quant.csv, quant_newest.csv, retrieval.csv and README.md\n"
    )
    text = (copy / "README.md").read_text()
    assert "old" not in text and text.count("prose") == 3
    parts = {b: text.partition(f"<!-- {b} -->")[2].partition(f"<!-- /{b} -->")[0] for b in blocks}
    assert "| KIVI, 4 bits | 6.38 | 10, 5 | +0.00010 ± 0.00000, nothing measurable |" in parts["quant"]
    assert "128 windows of 256 tokens" in parts["quant"] and "| none: uncached | – | – | 20.086 |" in parts["quant-smollm2"]
    assert (
        "| dense, float16 | 66.7 (1,000 tokens: 25.0) |" in parts["retrieval"] and "| 6 of 6 | 6 of 6 |" in parts["retrieval"]
    )
    read = pd.read_csv(copy / "results" / "quant.csv")
    assert len(read) == len(CACHES) * 7 and set(read.columns) == set(quant_tables.QUANT_COLUMNS)
    assert len(pd.read_csv(copy / "results" / "retrieval.csv")) == 66


def test_what_is_missing_is_said_and_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quant_tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["quant_tables.py"])
    quant_tables.main()
    said = capsys.readouterr()
    assert said.err == "" and len(said.out.splitlines()) == 3 and not (tmp_path / "results").exists()
    assert "runs/cpu: nothing measured through a quantised cache; `make quant PRESET=cpu` makes them" in said.out
    assert "`make recall`" in said.out and "`make quant-pretrained`" in said.out
    write_quantised(tmp_path / "runs" / "cpu", "kv8-s1", 8, 1, KIVIConfig(), 0.1, 4.6, 1.5)
    (tmp_path / "README.md").write_text("nothing to fill")
    quant_tables.main()
    out = capsys.readouterr().out
    assert "runs/cpu:" not in out and "runs/recall: " in out and "one seed: no verdict" in out
    assert (tmp_path / "results" / "quant.csv").exists() and not (tmp_path / "results" / "retrieval.csv").exists()
    write_quantised(tmp_path / "runs" / "smoke", "kv8-s1", 8, 1, KIVIConfig(), 0.1, 4.6, 1.5)
    monkeypatch.setattr(sys, "argv", ["quant_tables.py", "sweep=smoke"])
    quant_tables.main()
    out = capsys.readouterr().out
    assert "recall" not in out and out.endswith("-> runs/smoke/results/quant.csv\n")
    assert len(pd.read_csv(tmp_path / "results" / "quant.csv")) == 1


@pytest.mark.parametrize("words", ["sweep=nope", "sweep=", "sweep"])
def test_a_sweep_that_was_asked_for_and_is_not_there_is_an_error(words):
    done = subprocess.run([sys.executable, ROOT / "analysis" / "quant_tables.py", words], capture_output=True, text=True)
    assert (
        done.returncode == 2
        and done.stdout == ""
        and done.stderr.count("\n") == 1
        and words in done.stderr.replace("runs/", "sweep=")
    )


def test_help_prints_the_commands():
    done = subprocess.run([sys.executable, ROOT / "analysis" / "quant_tables.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "python analysis/quant_tables.py" in done.stdout and done.stderr == ""


# ---------------------------------------------------------------------------------------------------------------------
# the notebook


def test_the_notebook_on_known_runs(copy, tmp_path):
    done = script(copy, "notebooks.py", "wandb=disabled", "notebook=quant", home=tmp_path)
    assert done.returncode == 0, done.stderr
    text = outputs(copy / "analysis" / "quant.ipynb")
    assert "Not here" not in text and str(copy) not in text
    # at n_kv 1 changes are double, so fp8 is out
    assert "**MHA (n_kv 8)**: of 8 caches 2 cost nothing measurable and 4 cost something" in text
    assert "The smallest of the first is **KIVI, 4 bits**: 6.38 bits a number, 2.51 times fewer" in text
    window = [0.05 - 0.01, 0.06 - 0.02, 0.07 - 0.03]
    assert (
        f"no window: by token minus by channel {tables.with_interval([0.1, 0.13, 0.16], 5, True)} nats, beyond seed noise"
        in text
    )
    assert f"window 32: by token minus by channel {tables.with_interval(window, 5, True)} nats, beyond seed noise" in text
    assert "SmolLM2-135M: perplexity +0.612 (20.086 → 20.697, 4.60 bits a number)" in text  # KIVI, 2 bits
    assert "+0.020 (20.086 → 20.106, 4.50 bits a number), **under that**" in text  # KVQuant, 3 bits
    assert "| SmolLM2-135M | 1 | 3 | 10.0, at most 10.0 | 5.0, at most 5.0 | 1.0, at most 1.0 |" in text
    assert "| cpu, n_kv 8 | 3 | 3 | 10.0, at most 10.0 | – | 1.0, at most 1.0 |" in text
    assert "further than 3 median channels: keys in 9 of 9; values in 0 of 9" in text
    assert "| KIVI, 2 bits | 8 | +0.2200 ±" in text
    assert "Not measured yet." in text
    figures = {path.stem for path in (copy / "results" / "figures").iterdir()}
    assert figures == set(notebooks.FIGURES["quant"])

    done = script(copy, "notebooks.py", "wandb=disabled", "notebook=retrieval", home=tmp_path)
    assert done.returncode == 0, done.stderr
    text = outputs(copy / "analysis" / "retrieval.ipynb")
    assert "| recall, MHA (n_kv 8) | KIVI, 4 bits | as many as dense |" in text
    assert "| SmolLM2 | KIVI, 2 bits | -50.0 points, one seed: no verdict |" in text
    assert {path.stem for path in (copy / "results" / "figures").iterdir()} - figures == set(notebooks.FIGURES["retrieval"])


def test_the_notebook_says_what_it_lacks(tmp_path):
    """One quantised evaluation, the speeds of two caches, and nothing else."""
    for folder in ("analysis", "kv_cache", "kernels", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        for path in (ROOT / folder).glob("*.py"):
            shutil.copy(path, tmp_path / folder)
    sweep = tmp_path / "runs" / "smoke"
    write_training(sweep, 8, 1)
    write_evaluation(sweep, 8, 1)
    write_quantised(sweep, "kv8-s1", 8, 1, KIVIConfig(bits=8), 0.0, 9.9, 1.5)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "caches.csv").write_text(
        "n_kv,batch,context,cache,step_ms,tokens_per_s,to_dense,weight_bytes,kv_bytes,threads,commit,machine\n"
        "8,32,2120,dense-float32,30,1066.7,1,19000000,8000000,2,abc1234,abacus\n"
        "8,32,2120,kivi2-g32-r32-float16,20,1600,1.5,19000000,1000000,2,abc1234,abacus\n"
    )
    done = script(tmp_path, "notebooks.py", "sweep=smoke", "wandb=disabled", "notebook=quant", home=tmp_path)
    assert done.returncode == 0, done.stderr
    text = outputs(sweep / "results" / "quant.ipynb")
    assert "*Not here:* pictures of smoke; `python calibrate.py sweep=smoke again=true` makes them." in text
    assert "one seed: no verdict" in text and "SmolLM2 has not been measured" in text
    assert "Only one of the two has been measured" in text and "Not measured: `eval.py newest=…`" in text
    assert "| 8 | 32 | kivi2-g32-r32-float16 | 1,600 | 1.50x | 19 + 1.0 | 8.00x |" in text
    assert "n_kv 8, batch 32: the fastest beside it is kivi2-g32-r32-float16, 1.50x." in text
    assert {path.stem for path in (sweep / "results" / "figures").iterdir()} == {"quant"}
    done = script(tmp_path, "notebooks.py", "sweep=smoke", "wandb=disabled", "notebook=retrieval", home=tmp_path)
    assert done.returncode == 0 and "No retrieval has been measured" in outputs(sweep / "results" / "retrieval.ipynb")


def test_a_sweep_without_quantised_caches_is_no_failure(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "make", lambda name, sweep: (made.append(name) or f"{name}: made", True))
    write_training(tmp_path / "runs" / "smoke", 8, 1)
    for words, wanted in ((["notebook=quant"], []), (["notebook=retrieval"], []), ([], ["loss", "cache", "speed", "budget"])):
        monkeypatch.setattr(sys, "argv", ["notebooks.py", "sweep=smoke", "wandb=disabled", *words])
        with pytest.raises(SystemExit) as stop:
            notebooks.main()
        assert stop.value.code == 0 and made == wanted
        err = capsys.readouterr().err
        who = words[0].partition("=")[2] if words else "quant, retrieval"
        assert [line for line in err.splitlines() if not line.startswith("uptrain:")] == [
            f"{who}: left out; runs/smoke: nothing measured through a quantised cache; `make quant PRESET=smoke` makes them"
        ]


@pytest.mark.parametrize("name", ["quant", "retrieval"])
def test_script_and_notebook_are_the_same(name):
    path = ROOT / "analysis" / f"{name}.ipynb"
    if not path.exists():
        pytest.skip("not executed yet: make analysis")
    built, kept = notebooks.build(name), json.loads(path.read_text())
    assert [(c.id, c.cell_type, c.source) for c in built.cells] == [
        (c["id"], c["cell_type"], "".join(c["source"])) for c in kept["cells"]
    ]
    assert kept["metadata"] == built.metadata
