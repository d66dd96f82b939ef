"""
The sweep's results as committed tables: results/sweep.csv, results/uptrain.csv, the README's tables, one on the terminal.

    python analysis/tables.py                  the cpu sweep -> results/ and README.md
    python analysis/tables.py sweep=smoke      another sweep -> runs/smoke/results/, README untouched
    python analysis/tables.py readme=false     the same, README untouched

The rule for "different", written before any run: arms are paired by seed; a difference to MHA counts when the 95 %
interval (Student's t over the seeds) of the paired differences leaves out zero, otherwise it is within seed noise.
"""

import re
import sys
from pathlib import Path

import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `python analysis/tables.py` puts only analysis/ there

from analysis.runs import arguments, load_runs
from arithmetic import heads
from tracking import write_atomically

ROOT = Path(__file__).resolve().parent.parent
SWEEP_COLUMNS = [
    "n_kv", "seed", "steps", "corpus", "val_loss_final", "val_loss_best", "kv_bytes_per_token", "kv_bytes_formula",
    "kv_bytes_measured", "tokens_per_s_b1", "tokens_per_s_b32", "commit", "machine",
]  # fmt: skip
MEASURED = ["kv_bytes_per_token", "kv_bytes_formula", "kv_bytes_measured", "tokens_per_s_b1", "tokens_per_s_b32"]  # by eval.py
UPTRAIN_COLUMNS = [
    "seed", "groups", "pool", "fraction", "loss_parent", "loss_pooled", "loss_uptrained", "steps", "parent_steps",
    "corpus", "commit", "machine",
]  # fmt: skip
SCHEDULE_SEED = 1  # the uptraining schedule was chosen on this seed, so the report rests on the others


def interval(values):
    """(mean, half width of the 95 % interval by Student's t); the width is NaN for fewer than two values."""
    values = pd.Series(values, dtype=float)
    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5 if n > 1 else float("nan")
    return values.mean(), half


def with_interval(values, digits=4, sign=False):
    mean, half = interval(values)
    text = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
    return text if half != half else f"{text} ± {half:.{digits}f}"


def verdict(differences):
    mean, half = interval(differences)
    if half != half:
        return "one seed: no verdict"
    return "within seed noise" if abs(mean) <= half else "beyond seed noise"


def trained_runs(runs):
    """The finished training runs. ValueError for runs that cannot share a table: only n_kv and the seed may differ."""
    trained = runs[(runs.job_type == "train") & (runs.state == "finished")]
    if trained.empty:
        raise ValueError("no finished training run")
    if trained.corpus.nunique() > 1:
        raise ValueError(f"runs on different corpora ({', '.join(sorted(trained.corpus.unique()))}) never share a table")
    for column in trained.columns[trained.columns.str.match(r"(model|train)\.|dtype$")].drop("model.n_kv", errors="ignore"):
        if trained[column].nunique(dropna=False) > 1:
            values = ", ".join(f"{name}: {value}" for name, value in zip(trained.name, trained[column], strict=True))
            raise ValueError(f"runs with different {column} never share a table ({values}): move some to another sweep")
    twice = trained[trained.duplicated(["n_kv", "seed"], keep=False)]
    if len(twice):
        raise ValueError(f"{' and '.join(sorted(twice.name))} have the same n_kv and seed: move one into a sweep of its own")
    return trained


def evaluations(runs):
    """The finished evaluations of the training runs, those that go by their own name (name=… keeps others apart)."""
    evals = runs[(runs.job_type == "eval") & (runs.state == "finished")]
    if evals.empty:
        return evals
    trained = runs[runs.job_type == "train"].name
    evals = evals[(evals.name == "eval-" + evals["parent.name"]) & evals["parent.name"].isin(trained)]
    return evals.sort_values(["n_kv", "seed"], ascending=[False, True])


def sweep_table(runs):
    """One row a training run, with what eval.py measured of it."""
    trained, evals = trained_runs(runs), evaluations(runs)
    if len(evals):
        measured = evals.set_index("parent.name").rename(columns=lambda c: re.sub(r"^(kv_bytes_\w+)_b32$", r"\1", c))
        measured = measured[[c for c in MEASURED if c in measured]]
        trained = trained.drop(columns=[c for c in measured if c in trained]).join(measured, on="name")
    table = trained.reindex(columns=[*SWEEP_COLUMNS, "model.n_head", "n_params", "dtype"])
    for column in ("steps", "kv_bytes_per_token", "kv_bytes_formula", "kv_bytes_measured", "n_params"):
        table[column] = table[column].astype("Int64")
    return table.sort_values(["n_kv", "seed"], ascending=[False, True]).reset_index(drop=True)


def uptrain_table(runs):
    """
    One row a conversion of a multi-head training run, of those that go by their own name: name=… is how other fractions
    and schedules stay apart.
    """
    done = runs[(runs.job_type == "uptrain") & (runs.state == "finished")]
    if len(done):
        trained = trained_runs(runs)
        mha = trained[trained.n_kv == trained["model.n_head"]].name
        named = done["parent.name"] + "-to-kv" + done.groups.astype(int).astype(str) + "-" + done.pool
        done = done[(done.name == named) & done["parent.name"].isin(mha)]
        done = done.assign(loss_uptrained=done.val_loss_final)
        if done.corpus.nunique() > 1:
            raise ValueError(
                f"conversions on different corpora ({', '.join(sorted(done.corpus.unique()))}) never share a table"
            )
    table = done.reindex(columns=UPTRAIN_COLUMNS)
    for column in ("groups", "steps", "parent_steps"):
        table[column] = table[column].astype("Int64")
    return table.sort_values(["groups", "pool", "seed"], ascending=[False, True, True]).reset_index(drop=True)


def sweep_summary(table):
    """Rows of text: the header, then one row a number of KV heads."""
    n_head = int(table["model.n_head"].iloc[0])
    by = {n_kv: rows.set_index("seed") for n_kv, rows in table.groupby("n_kv")}
    reference = by.get(n_head)
    lines = [["heads", "n_kv", "parameters", "val loss, final", "best", "difference to MHA, paired", "KV bytes a token",
              "tokens/s, batch 1", "batch 32", "batch 32 / MHA"]]  # fmt: skip
    for n_kv in sorted(by, reverse=True):
        rows = by[n_kv]
        difference, ratio = "–", "–"
        if reference is not None:
            paired = (rows.val_loss_final - reference.val_loss_final).dropna()
            if n_kv != n_head and len(paired):
                difference = f"{with_interval(paired, sign=True)}, {verdict(paired)}"
            speed = (rows.tokens_per_s_b32 / reference.tokens_per_s_b32).dropna()
            ratio = f"{speed.median():.2f}x" if len(speed) else "–"
        per_token = rows.kv_bytes_per_token.dropna()
        lines.append([
            heads(n_kv, n_head), str(n_kv), f"{rows.n_params.iloc[0]:,}", with_interval(rows.val_loss_final),
            with_interval(rows.val_loss_best), difference, f"{per_token.iloc[0]:,}" if len(per_token) else "–",
            *("–" if rows[c].isna().all() else f"{rows[c].median():,.0f}" for c in ("tokens_per_s_b1", "tokens_per_s_b32")),
            ratio,
        ])  # fmt: skip
    return lines


def uptrain_summary(table):
    """Rows of text: one row a (groups, pool), over the seeds the schedule was not chosen on (all, if there are no others)."""
    rows = table[table.seed != SCHEDULE_SEED]
    rows = rows if len(rows) else table
    lines = [
        ["KV heads", "pool", "n", "parent", "right after pooling", "after uptraining", "against the parent trained on, paired"]
    ]
    trained_on = rows[rows.loss_pooled == rows.loss_parent].set_index("seed").loss_uptrained  # nothing was pooled
    for (groups, pool), part in rows.groupby(["groups", "pool"], sort=False):
        paired = (part.set_index("seed").loss_uptrained - trained_on).dropna()
        same = (part.loss_pooled == part.loss_parent).all()
        lines.append([
            f"{groups} (the parent, trained on)" if same else str(groups), "–" if same else pool, str(len(part)),
            with_interval(part.loss_parent), with_interval(part.loss_pooled), with_interval(part.loss_uptrained),
            "–" if same or paired.empty else f"{with_interval(paired, sign=True)}, {verdict(paired)}",
        ])  # fmt: skip
    return lines


def as_text(lines):
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rows[0], "  ".join("-" * width for width in widths), *rows[1:]])


def as_markdown(lines):
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def all_of(rows, column):
    """The different values in a column, as text."""
    return ", ".join(sorted({f"{v:g}" if isinstance(v, float) else str(v) for v in rows[column].dropna()}))


def conditions(table, runs):
    """What the numbers were measured on, in one line."""
    text = (
        f"{all_of(table, 'corpus')}, {all_of(table, 'steps')} steps, {all_of(table, 'dtype')}, seeds {all_of(table, 'seed')}, "
        f"mean ± 95 % interval; {all_of(table, 'machine')}; commit {all_of(table, 'commit')}"
    )
    evals = evaluations(runs)
    if len(evals):
        text += (
            f". Decoding {all_of(evals, 'tokens')} tokens after {all_of(evals, 'prompt')}, median over seeds: "
            f"{all_of(evals, 'kernel')}, threads: {all_of(evals, 'threads')}, commit {all_of(evals, 'commit')}"
        )
    return text


def write_readme(path, blocks):
    """Replace what stands between <!-- NAME --> and <!-- /NAME --> for each block."""
    text = path.read_text(encoding="utf-8")
    for name, block in blocks.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if mark and end:
            text = f"{before}{mark}{block}\n{end}{after}"
    write_atomically(path, text.encode())


def main():
    given = arguments(("sweep", "readme"))
    sweep = given.get("sweep", "cpu")
    readme = sweep == "cpu" and given.get("readme", "true") == "true"
    runs, _ = load_runs(ROOT / "runs", sweep=sweep)
    try:
        if runs.empty:
            raise ValueError("no runs")
        table, uptrained = sweep_table(runs), uptrain_table(runs)
    except ValueError as error:
        print(f"error: runs/{sweep}: {error}; `make sweep PRESET={sweep}` makes them", file=sys.stderr)
        sys.exit(2)
    out = ROOT / "results" if sweep == "cpu" else ROOT / "runs" / sweep / "results"
    out.mkdir(parents=True, exist_ok=True)
    table.drop(columns="model.n_head").to_csv(out / "sweep.csv", index=False)
    uptrained.to_csv(out / "uptrain.csv", index=False)
    where = conditions(table, runs)
    print(f"\n{as_text(sweep_summary(table))}\n\n{where}")
    blocks = {"sweep": f"{as_markdown(sweep_summary(table))}\n\n<sub>{where}</sub>"}
    if len(uptrained):
        print(f"\n{as_text(uptrain_summary(uptrained))}\n")
        blocks["uptrain"] = as_markdown(uptrain_summary(uptrained))
    if readme:
        write_readme(ROOT / "README.md", blocks)
    print(f"-> {out.relative_to(ROOT)}/sweep.csv, uptrain.csv{' and README.md' if readme else ''}")


if __name__ == "__main__":
    main()
