"""
What pooling costs and uptraining wins back: results/uptrain_curve.csv, results/uptrain_smollm2.csv, the README's tables, on
the terminal.

    python analysis/uptrain_tables.py                  the sweep cpu, and llama where it is -> results/, README.md
    python analysis/uptrain_tables.py sweep=smoke      another sweep, alone -> runs/smoke/results/, README untouched
    python analysis/uptrain_tables.py readme=false     the same as the first, README untouched

Reads what `make uptrain-curve` left: conversions in runs/<sweep>-curve/, their parents and the models trained from scratch
in runs/<sweep>/; and what `make uptrain-pretrained` left in runs/pretrained/. What is not there is said and skipped.

Everything is paired by seed, and a conversion is compared with its parent trained on for as many steps at the same rate, so
that what training on does by itself is not credited to the pooling. Words follow analysis/tables.py: a difference counts
when its 95 % interval leaves out zero.
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `python analysis/uptrain_tables.py` puts only analysis/ there

from analysis.runs import arguments, load_runs
from analysis.tables import all_of, as_markdown, as_text, trained_runs, verdict, with_interval, write_readme
from arithmetic import heads

ROOT = Path(__file__).resolve().parent.parent
COMPANION = "llama"  # beside cpu: the same in the other dialect
KEPT, SCRATCH = "none", "scratch"  # in the column `pool`: nothing was pooled; no parent, trained for all of its steps
SAID = {KEPT: "the parent, trained on", SCRATCH: "trained from scratch, all steps"}
ORDER = [KEPT, "svd", "aligned", "mean", "first", "random", SCRATCH]
COLUMNS = [
    "dialect", "seed", "groups", "pool", "fraction", "rate", "steps", "loss", "n_head", "parent_steps", "corpus", "commit",
    "machine",
]  # fmt: skip
PRETRAINED_COLUMNS = [
    "parent", "n_kv_parent", "groups", "pool", "steps", "rate", "loss_parent", "loss_pooled", "loss_uptrained", "window",
    "corpus", "commit", "machine",
]  # fmt: skip
SHOWN = 0.05  # the fraction in the summary, the paper's


def curve_table(runs):
    """
    One row a (seed, groups, pool, rate, fraction), from a sweep's runs and those of its curve. Fraction 0 is right after
    pooling, and has no rate. ValueError for runs that share no table.
    """
    trained = trained_runs(runs)
    done = runs[(runs.job_type == "uptrain") & (runs.state == "finished") & runs["parent.name"].isin(trained.name)]
    rows = []
    for run in done.to_dict("records"):
        about = {key: run.get(key) for key in ("seed", "groups", "corpus", "commit", "machine", "parent_steps")}
        about |= {"dialect": run["model.dialect"], "n_head": run["model.n_head"]}
        about["pool"] = KEPT if run["groups"] == run["n_kv_parent"] else run["pool"]
        rows.append({**about, "fraction": 0.0, "steps": 0, "loss": run["loss_pooled"]})
        if run["steps"]:
            rows.append({**about, **{key: run[key] for key in ("fraction", "rate", "steps")}, "loss": run["val_loss_final"]})
    for run in trained.to_dict("records"):
        about = {key: run.get(key) for key in ("seed", "steps", "corpus", "commit", "machine")}
        about |= {"dialect": run["model.dialect"], "n_head": run["model.n_head"], "groups": run["n_kv"]}
        rows.append({**about, "pool": SCRATCH, "fraction": 1.0, "loss": run["val_loss_final"]})
    table = pd.DataFrame(rows, columns=COLUMNS)
    if table.corpus.nunique() > 1:
        raise ValueError(f"runs on different corpora ({', '.join(sorted(table.corpus.unique()))}) never share a table")
    table = table.drop_duplicates(["seed", "groups", "pool", "rate", "fraction"])  # each run knows its loss at fraction 0
    for column in ("groups", "steps", "n_head", "parent_steps"):
        table[column] = table[column].astype("Int64")
    table["pool"] = pd.Categorical(table.pool, ORDER)
    table = table.sort_values(["pool", "rate", "seed", "fraction"])
    return table.sort_values("groups", ascending=False, kind="stable").reset_index(drop=True)


def losses(table, pool, groups=None, fraction=None, rate=None):
    """The losses of one arm, by seed."""
    keep = table.pool == pool
    for column, value in (("groups", groups), ("fraction", fraction), ("rate", rate)):
        if value is not None:
            keep &= table[column] == value
    return table[keep].set_index("seed").loss


def arms(table):
    """(groups, pool, rate) of every conversion: the parent trained on before all, then many heads first."""
    done = table[table.rate.notna()]
    return list(done[["groups", "pool", "rate"]].drop_duplicates().itertuples(index=False, name=None))


def targets(table):
    """The numbers of KV heads that the parent was converted to, many first."""
    return sorted((int(n) for n in table.groups[~table.pool.isin((KEPT, SCRATCH))].unique()), reverse=True)


def difference(losses, to, judged=False):
    """Two arms paired by seed, as text; `judged` adds the verdict."""
    d = (losses - to).dropna()
    if d.empty:
        return "–"
    return with_interval(d, sign=True) + (f", {verdict(d)}" if judged else "")


def overview(table, fraction=SHOWN):
    """Rows of text: one row a pool, to the parent, right after pooling and after uptraining at the better of its rates."""
    n_head, parent = int(table.n_head.iloc[0]), losses(table, KEPT, fraction=0)
    lines = [["pool", *(f"{heads(n, n_head)}, {when}" for n in targets(table) for when in ("pooled", f"after {fraction:.0%}"))]]
    for pool in [pool for pool in ORDER if (table.pool == pool).any()]:
        cells = [SAID.get(pool, pool)]
        for n in targets(table):
            groups = n_head if pool == KEPT else n
            after = [losses(table, pool, groups, fraction, rate) for *arm, rate in arms(table) if arm == [groups, pool]]
            if pool == SCRATCH:
                after = [losses(table, pool, groups)]
            best = min(after, key=lambda arm: arm.mean(), default=parent[:0])
            cells += [difference(losses(table, pool, n, 0), parent), difference(best, parent)]
        lines.append(cells)
    return lines


def summary(table, fraction=SHOWN):
    """Rows of text: one row a (KV heads, pool, rate), each difference paired by seed."""
    lines = [["KV heads", "pool", "right after pooling, to the parent", "rate", f"after {fraction:.0%}, to the parent",
              "to the parent trained on", "to as many heads from scratch"]]  # fmt: skip
    n_head, parent = int(table.n_head.iloc[0]), losses(table, KEPT, fraction=0)
    for groups, pool, rate in arms(table):
        after, trained_on = losses(table, pool, groups, fraction, rate), losses(table, KEPT, n_head, fraction, rate)
        cells = ["–", f"{rate:g}", difference(after, parent), "–", "–"]
        if pool != KEPT:
            cells[0] = difference(losses(table, pool, groups, 0), parent)
            cells[3:] = (difference(after, to, judged=True) for to in (trained_on, losses(table, SCRATCH, groups)))
        lines.append([f"{groups} ({heads(groups, n_head)})", SAID.get(pool, pool), *cells])
    return lines


def pretrained_table(runs):
    """
    One row a conversion of SmolLM2, or of one of those: losses before, right after, and after its steps. Other parents that
    were not trained here have their conversions in runs/pretrained/ too.
    """
    ours = runs["parent.name"].astype(str).str.match(r"smollm2(-to-kv|$)")
    rows = runs[(runs.job_type == "uptrain") & (runs.state == "finished") & ours].assign(
        loss_uptrained=lambda r: r.val_loss_final
    )
    rows = rows.assign(parent=rows["parent.name"], window=rows.window.fillna(rows["model.block_size"]))
    rows.loc[rows.groups >= rows.n_kv_parent, "pool"] = KEPT
    rows.loc[rows.steps == 0, "rate"] = float("nan")
    rows = rows.astype({key: "Int64" for key in ("n_kv_parent", "groups", "steps", "window")})
    return rows.reindex(columns=PRETRAINED_COLUMNS).sort_values(["n_kv_parent", "groups", "loss_pooled"]).reset_index(drop=True)


def pretrained_summary(table):
    """Rows of text: one row a conversion."""
    lines = [["KV heads", "pool", "loss before", "right after", "after training on", "steps"]]
    for row in table.itertuples():
        after = f"{row.loss_uptrained:.4f}" if row.steps else "–"
        lines.append([f"{row.n_kv_parent:.0f} → {row.groups:.0f}", "–" if row.pool == KEPT else row.pool,
                      f"{row.loss_parent:.4f}", f"{row.loss_pooled:.4f}", after, f"{row.steps:.0f}"])  # fmt: skip
    return lines


def pretrained_conditions(table):
    """What the losses of SmolLM2 were measured on, in one line."""
    return (
        f"SmolLM2-135M-Instruct, {all_of(table, 'corpus')}, the whole validation split in windows of {all_of(table, 'window')} tokens, nats a "
        f"token; {all_of(table, 'machine')}; commit {all_of(table, 'commit')}"
    )


def conditions(table):
    """What the losses were measured on, in one line."""
    scratch, parent = table[table.pool == SCRATCH], losses(table, KEPT, fraction=0)
    return (
        f"dialect {all_of(table, 'dialect')}, {all_of(table, 'corpus')}, the whole validation split; seeds "
        f"{all_of(table, 'seed')}, mean ± 95 % interval; the parent after {all_of(scratch, 'steps')} steps: "
        f"{with_interval(parent)} nats; {all_of(table, 'machine')}; commit {all_of(table, 'commit')}"
    )


def load(sweep, root=None):
    """({sweep: its runs and its curve's}, a line for each that is missing), of a sweep and the one that goes with it."""
    found, missing = {}, []
    for name in (sweep, *((COMPANION,) if sweep == "cpu" else ())):
        parts = [load_runs(root or ROOT / "runs", sweep=part)[0] for part in (name, f"{name}-curve")]
        if len(parts[1]) and (parts[1].job_type == "uptrain").any():
            rows = [
                row
                for part in parts
                for row in part.to_dict("records")
                if row["sweep"] == f"{name}-curve" or row["job_type"] == "train"
            ]
            found[name] = pd.DataFrame(rows)
        else:
            make = "make uptrain-curve" + (" MODEL=llama" if name == COMPANION else "" if name == "cpu" else f" PRESET={name}")
            missing.append(f"runs/{name}-curve: no conversions; `{make}` makes them")
    return found, missing


def main():
    given = arguments(("sweep", "readme"))
    sweep = given.get("sweep", "cpu")
    readme = sweep == "cpu" and given.get("readme", "true") == "true"
    found, missing = load(sweep)
    pretrained, _ = load_runs(ROOT / "runs", sweep="pretrained")
    pretrained = pretrained_table(pretrained) if sweep == "cpu" and (pretrained.job_type == "uptrain").any() else []
    if not found and not len(pretrained):
        print(f"error: {'; '.join(missing)}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(missing), end="\n" if missing else "")
    try:
        tables = {name: curve_table(runs) for name, runs in found.items()}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    out = ROOT / "results" if sweep == "cpu" else ROOT / "runs" / sweep / "results"
    out.mkdir(parents=True, exist_ok=True)
    blocks, written = {}, []
    if len(pretrained):
        note = pretrained_conditions(pretrained)
        print(f"\n{as_text(pretrained_summary(pretrained))}\n\n{note}")
        blocks["uptrain-smollm2"] = f"{as_markdown(pretrained_summary(pretrained))}\n\n<sub>{note}</sub>"
        pretrained.to_csv(out / "uptrain_smollm2.csv", index=False)
        written.append("uptrain_smollm2.csv")
    curves = []
    for table in tables.values():
        note = conditions(table)
        print(f"\n{as_text(overview(table))}\n\n{as_text(summary(table))}\n\n{note}")
        curves.append(f"{as_markdown(overview(table))}\n\n<sub>{note}</sub>")
    if curves:
        blocks["uptrain-curve"] = "\n\n".join(curves)
        pd.concat(tables.values()).to_csv(out / "uptrain_curve.csv", index=False)
        written.append("uptrain_curve.csv")
    if readme:
        write_readme(ROOT / "README.md", blocks)
    print(f"\n-> {out.relative_to(ROOT)}/{', '.join(written)}{' and README.md' if readme else ''}")


if __name__ == "__main__":
    main()
