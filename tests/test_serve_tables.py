"""The tables and the figure of what serve.py measured, from made-up rows: with one kind of cache, with two, with recall."""

import re
import sys

import pandas as pd
import pytest
from conftest import ROOT
from test_cli import refused

from analysis import serve_tables
from serve import CASE, LATENCIES

ABOUT = {"dtype": "float32", "n_layer": 6, "n_head": 8, "head_dim": 32, "memory_bytes": 2**26, "block_size": 128}
ABOUT |= {"machine": "a machine", "commit": "c0ffee", "vllm": "vllm 1"}


def row(run, kv, kind, prompt, at_once, i, model, n_kv, **numbers):
    size = 1 if kv == "fp8" else 4
    width = 2 * 6 * n_kv * 32 * size
    blocks = 2**26 // (128 * width)
    held = {"bytes_per_token": width, "blocks": blocks, "capacity_tokens": 128 * blocks, "predicted_tokens": 128 * blocks}
    case = dict(zip(CASE, (kv, kind, prompt, at_once, i, model), strict=True))
    return case | {"run": run, "n_kv": n_kv} | ABOUT | held | numbers


def rows_of(kv_dtypes):
    rows = []
    for kv in kv_dtypes:
        for name, n_kv in (("mha", 8), ("gqa", 2)):
            rows.append(row("serve/a", kv, "loss", 0, 0, 0, name, n_kv, loss_served=1.500004, loss_ours=1.5, tokens=60))
        for prompt, at_once, kind in ((16, 1, "load"), (128, 1, "load"), (128, 8, "load"), (128, 0, "flood")):
            for i, speed in enumerate((100.0, 300.0, 500.0)):
                for name, n_kv in (("mha", 8), ("gqa", 2)):
                    numbers = {"tokens_per_s": speed * 16 / n_kv, "requests": at_once or 96, "output_tokens": 64}
                    numbers |= dict.fromkeys(LATENCIES, 10.0 * (at_once or 96))
                    rows.append(row("serve/a", kv, kind, prompt, at_once, i, name, n_kv, sequences_fit=160 // n_kv, **numbers))
    return rows


def recall(run, name, n_kv, found):
    return row(
        run,
        "auto",
        "recall",
        0,
        0,
        0,
        name,
        n_kv,
        found_served=found,
        found_ours=0.75,
        same=1.0,
        examples=128,
        tokens=128 * 1023,
    )


@pytest.fixture
def tables(tmp_path, monkeypatch, capsys):
    """tables(rows) -> README.md, what was printed, and where the figure is."""
    monkeypatch.setattr(serve_tables, "ROOT", tmp_path)

    def tables(rows, place="results/serve.csv", *args):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_csv(tmp_path / place, index=False)
        blocks = ("serve", "serve-recall")
        (tmp_path / "README.md").write_text("".join(f"<!-- {b} -->\nold\n<!-- /{b} -->\nprose\n" for b in blocks))
        monkeypatch.setattr(sys, "argv", ["serve_tables.py", *args])
        serve_tables.main()
        return (
            (tmp_path / "README.md").read_text(),
            capsys.readouterr().out,
            (tmp_path / place).parent / "figures" / "serve.png",
        )

    return tables


def test_capacity_loss_and_loads_stand_in_the_readme(tables):
    text, out, figure = tables(rows_of(["auto"]))
    assert "| auto | mha, MHA | 42 x 128 | 5,376 | 5,376 | 1.000x | 1.000x | 1.50000 | 1.50000 | +0.000004 |" in text
    assert "| auto | gqa, GQA-2 | 170 x 128 | 21,760 | 21,760 | 4.048x | 4.000x |" in text  # whole blocks; the heads alone
    assert "| auto | 128 | 8 | mha, MHA | 600 | 1.00x | 80.0, 80.0, 80.0 | 80.0, 80.0, 80.0 | 20 |" in text  # medians
    assert "| auto | 128 | all 96 | gqa, GQA-2 | 2,400 | 4.00x | 960.0, 960.0, 960.0 |" in text
    assert "<sub>64.0 MiB of cache each, float32; vllm 1; a machine; commit c0ffee</sub>" in text
    assert text.count("\nold\n") == 1 and text.count("prose") == 2  # nothing about recall
    assert figure.stat().st_size > 10_000 and "4.048x" in out


def test_fp8_is_beside_it_where_it_ran(tables):
    text, _, figure = tables(rows_of(["auto", "fp8"]))
    assert "| fp8 | mha, MHA | 170 x 128 | 21,760 | 21,760 | 4.048x | 4.000x |" in text
    assert "| fp8 | 16 | 1 | gqa, GQA-2 | 2,400 | 4.00x |" in text and figure.exists()


def test_recall_is_one_table_over_all_runs(tables):
    rows = [recall("serve/b", "mha", 8, 0.5), recall("serve/b", "gqa", 2, 0.25), recall("serve/c", "gqa", 2, 0.75)]
    text, out, figure = tables(rows)
    assert re.findall(r"^\| auto.*$", text, re.M) == [
        "| auto | mha, MHA | 5,376 | 50.0% | 75.0% | 100.0% |",
        "| auto | gqa, GQA-2 | 21,760 | 75.0% | 75.0% | 100.0% |",  # as last measured
    ]
    assert "128 sequences of 1,023 tokens; 64.0 MiB" in text and text.count("\nold\n") == 1 and not figure.exists()


def test_another_file_leaves_the_readme_alone(tables):
    text, out, figure = tables(rows_of(["auto"]), "runs/full/serve.csv", "from=runs/full/serve.csv")
    assert text.count("\nold\n") == 2 and "4.048x" in out and figure.exists()


def test_a_file_that_is_not_there_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(serve_tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["serve_tables.py"])
    with pytest.raises(SystemExit) as stop:
        serve_tables.main()
    refused((stop.value.code, *capsys.readouterr()), "results/serve.csv", "make serve")


def test_the_readme_has_a_place_for_them():
    readme = (ROOT / "README.md").read_text()
    for block in ("serve", "serve-recall"):
        assert readme.count(f"<!-- {block} -->\n") == readme.count(f"<!-- /{block} -->\n") == 1
