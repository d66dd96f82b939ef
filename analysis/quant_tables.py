"""
What quantised caches cost in loss and retrieval: results/quant.csv, results/quant_newest.csv, results/retrieval.csv, the
README's tables, on the terminal.

    python analysis/quant_tables.py                  the sweep cpu, and recall and pretrained where they are -> results/, README.md
    python analysis/quant_tables.py sweep=smoke      another sweep, alone -> runs/smoke/results/, README untouched
    python analysis/quant_tables.py readme=false     the same as the first, README untouched

Reads what `eval.py cache=…` and `retrieval.py cache=…` left. A sweep that is not there is said and skipped.

The rule for words, written before the runs. A run's change of loss is through its cache minus uncached, on the same tokens
and weights, so a change is paired by itself. A cache costs "nothing measurable" when the 95 % interval (Student's t over the
seeds) of the changes lies below +0.001 nats a token, a thousandth of the perplexity; it "costs" when the interval does not,
and lies above zero. Otherwise these seeds cannot tell: "undecided". One seed has no interval, and so no verdict.
"""

import json
import math
import re
import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `python analysis/quant_tables.py` puts only analysis/ there

from analysis.runs import arguments, load_runs
from analysis.tables import all_of, as_markdown, as_text, interval, with_interval, write_readme

ROOT = Path(__file__).resolve().parent.parent
MARGIN = 0.001  # nats a token; seeds of the cpu sweep end some 0.005 apart
COMPANIONS = {"recall": "make recall", "pretrained": "make quant-pretrained"}  # beside cpu, and what makes them
METHODS = ["dense", "fp8", "kivi", "kvquant"]
OPTIONS = ["format", "scale", "group", "residual", "key_axis", "value_axis", "outliers", "sink", "pre_rope"]
WHAT = ["sweep", "n_kv", "seed", "cache", "method", "bits", *OPTIONS, "exact_dtype"]
QUANT_COLUMNS = [
    *WHAT, "dtype", "window", "windows", "val_loss", "val_loss_cached", "difference", "perplexity", "perplexity_cached",
    "val_kl", "bits_per_value", "key_error", "value_error",
    "corpus", "commit", "machine",
]  # fmt: skip
NEWEST_COLUMNS = [*WHAT, "newest", "exact", *QUANT_COLUMNS[len(WHAT) :]]
RETRIEVAL_COLUMNS = [*WHAT, "task", "length", "depth", "distance", "accuracy", "examples", "commit", "machine"]


def what(run, label):
    """The columns that say which model a run measured, through which cache."""
    method = next(m for m in METHODS if label.startswith(m))
    exact = label.rpartition("-")[2]
    given = {"bits": 8 if method == "fp8" else None}
    given |= {key: run[f"cache.{key}"] for key in ("bits", *OPTIONS) if not pd.isna(run.get(f"cache.{key}", None))}
    exact = exact if exact in ("float16", "bfloat16", "float32") else run.get("cache.dtype", run.get("dtype"))
    return {"sweep": run["sweep"], "n_kv": run["n_kv"], "seed": run["seed"], "cache": label, "method": method,
            "exact_dtype": exact, **given}  # fmt: skip


def measured(runs, job, key):
    """The finished runs of one script with a result `key`, those that go by their own name (name=… keeps others apart)."""
    for run in runs.to_dict("records"):
        if run["job_type"] == job and run["state"] == "finished" and key in run and isinstance(run.get("cache"), str):
            own = (
                rf"{job}-{run.get('parent.name')}-{re.escape(run['cache'])}(-newest\d+(keys|values)?)?(-(\d+|all)x\d+)?(-loss)?"
            )
            if re.fullmatch(own, run["name"]) and run.get("parent.script") != "uptrain" and not pd.isna([run[key]]).all():
                yield run


def quant_table(runs, columns=QUANT_COLUMNS):
    """
    One row a (model, cache) whose loss was measured through the cache, or, with NEWEST_COLUMNS, a (model, cache, newest) for
    which it was with the newest tokens exact. ValueError for rows that share no table.
    """
    rows = []
    for run in measured(runs, "eval", "val_loss_cached"):
        if pd.isna(run.get("newest")) == ("newest" in columns):
            continue
        row = {key: run.get(key) for key in columns} | what(run, run["cache"])
        row["window"] = run.get("model.block_size") if pd.isna(run.get("window")) else run["window"]
        row["difference"] = run["val_loss_cached"] - run["val_loss"]
        row["perplexity"], row["perplexity_cached"] = math.exp(run["val_loss"]), math.exp(run["val_loss_cached"])
        rows.append(row)
    table = in_order(pd.DataFrame(rows, columns=columns))
    # losses of different texts are not compared: what most runs have read counts
    if len(table):
        read = list(zip(table.window, table.windows.fillna(0), strict=True))
        table = table[[r == max(set(read), key=lambda x: (read.count(x), x)) for r in read]].reset_index(drop=True)
    if table.corpus.nunique() > 1:
        raise ValueError(f"runs on different corpora ({', '.join(sorted(table.corpus.unique()))}) never share a table")
    return table


def newest_table(runs):
    return quant_table(runs, NEWEST_COLUMNS)


def retrieval_table(runs):
    """One row a (model, cache, place of what is to be found): its distance, or the length and depth of a pass key."""
    rows = []
    for run in measured(runs, "retrieval", "accuracy"):
        for place, accuracy in run["accuracy"].items():
            at = json.loads(place)
            where = {"task": "recall", "length": run.get("model.block_size"), "distance": at, "examples": run.get("examples")}
            if isinstance(at, list):
                where = {"task": "passkey", "length": at[0], "depth": at[1], "examples": run.get("keys")}
            rows.append(
                {**what(run, run["cache"]), **where, **{k: run.get(k) for k in ("commit", "machine")}, "accuracy": accuracy}
            )
    return in_order(pd.DataFrame(rows, columns=RETRIEVAL_COLUMNS))


def in_order(table):
    """By model, then by cache: methods, many bits to few, the plain form before its variants."""
    for column in (
        "n_kv",
        "seed",
        "bits",
        "group",
        "residual",
        "sink",
        "window",
        "windows",
        "newest",
        "length",
        "distance",
        "examples",
    ):
        if column in table:
            table[column] = pd.to_numeric(table[column]).astype("Int64")
    keys = pd.DataFrame({
        "sweep": table.sweep, "method": table.method.map(METHODS.index), "bits": -table.bits.fillna(16),
        "format": table.format.astype(object).fillna(""), "scale": table.scale.map(["one", "layer", "head"].index, na_action="ignore"),
        "outliers": -pd.to_numeric(table.outliers), "pre_rope": table.pre_rope.eq(False), "axis": table.key_axis.astype(object).fillna(""),
        "values": table.value_axis.astype(object).fillna("token").ne("token"), "residual": (table.residual.fillna(32) - 32).abs(),
        "cache": table.cache, "exact": table.get("exact", pd.Series("", table.index)).astype(object).fillna(""), "newest": table.get("newest", 0), "n_kv": -table.n_kv, "seed": table.seed,
    })  # fmt: skip
    return table.loc[keys.sort_values(list(keys)).index].reset_index(drop=True)


def name_of(row):
    """A cache in words: 'KIVI, 2 bits, keys by token'."""
    if row.method == "dense":
        return f"dense, {row.exact_dtype}"
    if row.method == "fp8":
        return f"fp8 {row.format}" + ("" if row.scale == "one" else f", scale a {row.scale}")
    if row.method == "kivi":
        said = [
            (row.key_axis != "channel", f"keys by {row.key_axis}"),
            (row.value_axis != "token", f"values by {row.value_axis}"),
            (row.group != 32, f"groups of {row.group}"),
            (row.residual != 32, f"window {row.residual}" if row.residual else "no window"),
        ]
    else:
        said = [
            (True, f"{100 * row.outliers:g} % outliers" if row.outliers else "no outliers"),
            (row.sink != 1, f"sink {row.sink}"),
            (not row.pre_rope, "keys after rotary positions"),
        ]
    method = {"kivi": "KIVI", "kvquant": "KVQuant"}[row.method]
    said.append((row.exact_dtype != "float16", f"{row.exact_dtype} where exact"))
    return ", ".join([method, f"{row.bits} bits", *(text for differs, text in said if differs)])


def cost(changes):
    """The rule above."""
    mean, half = interval(changes)
    if half != half:
        return "one seed: no verdict"
    if mean + half < MARGIN:
        return "nothing measurable"
    return "costs" if mean - half > 0 else "undecided"


def spread(values, digits):
    """One number, or the lowest to the highest."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def error(rows):
    """How far codes are from what they stand for, 'keys, values', in percent of the variance; mean over rows."""
    means = 100 * rows[["key_error", "value_error"]].astype(float).mean()
    return "–" if means.isna().all() else ", ".join(f"{x:.2g}" for x in means)


def by_cache(table):
    """(name, rows) of each cache, in the table's order."""
    for _, rows in table.groupby("cache", sort=False):
        yield name_of(rows.iloc[0]), rows


def quant_summary(table):
    """Rows of text: the header, then one row a cache: bits a number and, for each n_kv, the mean change of the loss."""
    kinds = sorted(table.n_kv.unique(), reverse=True)
    seeds = table.seed.nunique()
    lines = [
        ["cache", "bits a number", "error of coded keys, values, %", *(f"n_kv {n_kv}: change of the loss" for n_kv in kinds)]
    ]
    for name, rows in by_cache(table):
        cells = []
        for n_kv in kinds:
            changes = rows[rows.n_kv == n_kv].difference
            short = f" (n = {len(changes)})" if len(changes) < seeds else ""
            cells.append(f"{with_interval(changes, digits=5, sign=True)}{short}, {cost(changes)}" if len(changes) else "–")
        lines.append([name, spread(rows.bits_per_value, 2), error(rows), *cells])
    return lines


def pretrained_summary(table):
    """Rows of text for one model without seeds: perplexity uncached first, then through each cache."""
    lines = [["cache", "bits a number", "error of coded keys, values, %", "perplexity", "change", "KL, nats a token"]]
    for perplexity in sorted(table.perplexity.round(6).unique()):
        lines.append(["none: uncached", "–", "–", f"{perplexity:.3f}", "–", "–"])
    for name, rows in by_cache(table):
        for _, row in rows.iterrows():
            change = f"{row.perplexity_cached - row.perplexity:+.3f}"
            numbers = [f"{row.bits_per_value:.2f}", error(row.to_frame().T), f"{row.perplexity_cached:.3f}"]
            lines.append([name, *numbers, change, f"{row.val_kl:.5f}"])
    return lines


def newest_summary(table):
    """Rows of text: one row a (cache, n_kv), the mean change of the loss for each number of newest tokens that are exact."""
    columns = sorted(table.newest.unique())
    lines = [["cache", "n_kv", *(f"{n} exact" for n in columns)]]
    for (_, exact, _), rows in table.groupby([table.cache, table.exact.astype(object).fillna(""), -table.n_kv], sort=False):
        changes = [rows[rows.newest == n].difference for n in columns]
        cells = [with_interval(c, digits=4, sign=True) if len(c) else "–" for c in changes]
        name = name_of(rows.iloc[0]).replace(", no window", "") + (f"; {exact} exact" if exact else "")
        lines.append([name, str(rows.n_kv.iloc[0]), *cells])
    return lines


def accuracy(rows):
    """The mean accuracy of each model (n_kv, seed) over its places."""
    return rows.groupby(["n_kv", "seed"]).accuracy.mean()


def recall_summary(table):
    """Rows of text: one row a cache, for each n_kv the accuracy over all distances, mean over seeds, and the worst distance."""
    kinds = sorted(table.n_kv.unique(), reverse=True)
    seeds = table.groupby("n_kv").seed.nunique()
    heads = [f"n_kv {n_kv}, {n} seeds" if (n := seeds[n_kv]) > 1 else f"n_kv {n_kv}, one seed" for n_kv in kinds]
    lines = [["cache", *(f"{head}: found, % (worst distance)" for head in heads)]]
    for name, rows in by_cache(table):
        cells = []
        for n_kv in kinds:
            at = 100 * rows[rows.n_kv == n_kv].groupby("distance").accuracy.mean()
            worst = f" ({at.idxmin():,} tokens: {at.min():.1f})" if len(at) and at.min() < at.max() else ""
            cells.append(f"{at.mean():.1f}{worst}" if len(at) else "–")
        lines.append([name, *cells])
    return lines


def passkey_summary(table):
    """Rows of text: one row a cache, pass keys found at each length, all depths together."""
    lengths = sorted(table.length.unique())
    lines = [["cache", *(f"{length:,} tokens" for length in lengths)]]
    for name, rows in by_cache(table):
        cells = []
        for length in lengths:
            mine = rows[rows.length == length]
            cells.append(f"{(mine.accuracy * mine.examples).sum():.0f} of {mine.examples.sum()}" if len(mine) else "–")
        lines.append([name, *cells])
    return lines


def conditions(table):
    """What the losses were measured on, in one line."""
    sizes = table[["window", "windows"]].drop_duplicates().itertuples()
    n = ", ".join(f"{'the whole split in' if pd.isna(s.windows) else s.windows} windows of {s.window} tokens" for s in sizes)
    return (
        f"{all_of(table, 'corpus')}, validation, {n}; {all_of(table, 'dtype')} weights, {all_of(table, 'exact_dtype')} for what a "
        f"cache keeps in full precision; seeds {all_of(table, 'seed')}; {all_of(table, 'machine')}; commit {all_of(table, 'commit')}"
    )


def load(sweep, root=None):
    """({sweep: its runs}, a line for each that is missing), of a sweep and those that go with it."""
    found, missing = {}, []
    for name in (sweep, *(COMPANIONS if sweep == "cpu" else ())):
        runs, _ = load_runs(root or ROOT / "runs", sweep=name)
        runs = runs[runs.job_type.isin(("eval", "retrieval"))] if len(runs) else runs
        if any(True for job, key in (("eval", "val_loss_cached"), ("retrieval", "accuracy")) for _ in measured(runs, job, key)):
            found[name] = runs
        else:
            make = COMPANIONS.get(name, f"make quant PRESET={name}")
            missing.append(f"runs/{name}: nothing measured through a quantised cache; `{make}` makes them")
    return found, missing


def tables_of(found):
    """The tables of `load`'s sweeps, one below the other: (quant, newest, retrieval)."""
    tables = []
    for make, columns in ((quant_table, QUANT_COLUMNS), (newest_table, NEWEST_COLUMNS), (retrieval_table, RETRIEVAL_COLUMNS)):
        parts = [part for part in map(make, found.values()) if len(part)]
        rows = [row for part in parts for row in part.to_dict("records")]
        tables.append(in_order(pd.DataFrame(rows, columns=columns)))
    return tables


def main():
    given = arguments(("sweep", "readme"))
    sweep = given.get("sweep", "cpu")
    readme = sweep == "cpu" and given.get("readme", "true") == "true"
    if "sweep" in given and not (ROOT / "runs" / sweep).is_dir():
        print(f"error: runs/{sweep} is not there; `make sweep PRESET={sweep}` makes it", file=sys.stderr)
        sys.exit(2)
    found, missing = load(sweep)
    print("\n".join(missing), end="\n" if missing else "")
    if not found:
        return
    try:
        quant, newest, retrieval = tables_of(found)
    except ValueError as error:
        print(f"error: runs/{sweep}: {error}", file=sys.stderr)
        sys.exit(2)
    out = ROOT / "results" if sweep == "cpu" else ROOT / "runs" / sweep / "results"
    out.mkdir(parents=True, exist_ok=True)
    blocks = {}
    for name, rows in quant.groupby("sweep", sort=False):
        lines, note = (pretrained_summary if name == "pretrained" else quant_summary)(rows), conditions(rows)
        print(f"\n{name}\n{as_text(lines)}\n\n{note}")
        key = {"cpu": "quant", "pretrained": "quant-smollm2"}.get(name, f"quant-{name}")
        blocks[key] = f"{as_markdown(lines)}\n\n<sub>{note}</sub>"
    for name, rows in newest.groupby("sweep", sort=False):
        print(f"\n{name}, the newest tokens exact\n{as_text(newest_summary(rows))}\n\n{conditions(rows)}")
    found_there = []
    for task, rows in retrieval.groupby("task", sort=False):
        lines = (passkey_summary if task == "passkey" else recall_summary)(rows)
        counts = f"{all_of(rows, 'examples')} {'keys for each length and depth' if task == 'passkey' else 'sequences for each distance'}"
        note = f"{all_of(rows, 'sweep')}: {counts}; seeds {all_of(rows, 'seed')}; {all_of(rows, 'machine')}; commit {all_of(rows, 'commit')}"
        print(f"\n{task}\n{as_text(lines)}\n\n{note}")
        found_there.append(f"{as_markdown(lines)}\n\n<sub>{note}</sub>")
    if found_there:
        blocks["retrieval"] = "\n\n".join(found_there)
    written = []
    for name, table in (("quant", quant), ("quant_newest", newest), ("retrieval", retrieval)):
        if len(table):
            table.to_csv(out / f"{name}.csv", index=False)
            written.append(f"{name}.csv")
    if readme:
        write_readme(ROOT / "README.md", blocks)
    print(f"\n-> {out.relative_to(ROOT)}/{', '.join(written)}{' and README.md' if readme else ''}")


if __name__ == "__main__":
    main()
