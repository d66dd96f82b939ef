"""
What serve.py measured, tabled and drawn: results/serve.csv -> the README's serve tables, results/figures/serve.png.

    python analysis/serve_tables.py                              the committed file
    python analysis/serve_tables.py from=runs/full/serve.csv     another one: its figure beside it, README untouched

The tables are those that serve.py prints, the figure is of the run with loads that was measured last. Whether one model
serves more than another is read from medians over the rounds, in which the models took turns.
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `python analysis/serve_tables.py` puts only analysis/ there

from analysis.figures import WIDTH, look, plt
from analysis.runs import arguments
from analysis.tables import all_of, as_markdown, as_text, write_readme
from arithmetic import readable
from serve import capacity_lines, load_lines, recall_lines, title

ROOT = Path(__file__).resolve().parent.parent


def conditions(rows):
    """What the numbers were measured on, in one line."""
    table = pd.DataFrame(rows)
    memory = ", ".join(readable(n) for n in table.memory_bytes.unique())
    return (
        f"{memory} of cache each, {all_of(table, 'dtype')}; {all_of(table, 'vllm')}; {all_of(table, 'machine')}; commit "
        f"{all_of(table, 'commit')}"
    )


def tables(runs):
    """{block of the README: its tables, each a list of rows of text, and the line below them} of the runs' rows."""
    blocks = {}
    served = [rows for rows in runs if any(row["kind"] in ("loss", "load", "flood") for row in rows)]
    if served:
        lines = [lines for rows in served for lines in (capacity_lines(rows), load_lines(rows)) if len(lines) > 1]
        blocks["serve"] = lines, conditions(sum(served, []))
    found = {(row["model"], row["kv_cache_dtype"]): row for rows in runs for row in rows if row["kind"] == "recall"}
    if found:  # a model that was served twice is there once, as last measured
        rows = list(found.values())
        examples = f"{rows[0]['examples']:.0f} sequences of {rows[0]['tokens'] / rows[0]['examples']:,.0f} tokens"
        blocks["serve-recall"] = [recall_lines(rows)], f"{examples}; {conditions(rows)}"
    return blocks


def draw(rows, path):
    """Tokens/s and the wait for the first token against the requests at once, for the longest prompts."""
    table = pd.DataFrame([row for row in rows if row["kind"] in ("load", "flood")])
    table = table[table.prompt_tokens == table.prompt_tokens.max()]
    table["at_once"] = table.concurrency.where(table.kind == "load", table.requests)  # a flood is all of its requests
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH * 1.2, 4.2))
    panels = {"tokens_per_s": "tokens/s, all requests", "ttft_ms_p95": "time to the first token, p95 (ms)"}
    for (kv, _), some in table.groupby(["kv_cache_dtype", "model"], sort=False):
        first = some.iloc[0]
        points = some.groupby("at_once")[list(panels)].median()
        style = look(first.n_kv, first.n_head) | ({} if kv == "auto" else {"markerfacecolor": "white", "linewidth": 1.1})
        name = title(first) + ("" if table.kv_cache_dtype.nunique() == 1 else f", {kv} cache")
        for ax, column in zip(axes, panels, strict=True):
            ax.plot(points.index, points[column], **style, label=name)
            if first.sequences_fit < table.at_once.max():
                ax.axvline(first.sequences_fit, color=style["color"], linewidth=1.1, linestyle=":")
    for ax, label in zip(axes, panels.values(), strict=True):
        ax.set(xscale="log", xlabel="requests at once", ylabel=label)
        ax.set_xticks(sorted(table.at_once.unique()), [f"{n:.0f}" for n in sorted(table.at_once.unique())])
        ax.minorticks_off()
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")  # who has to wait for room waits for seconds
    if (table.sequences_fit < table.at_once.max()).any():
        axes[0].plot([], [], color="#666666", linewidth=1.1, linestyle=":", label="as many as its cache holds")
    axes[0].legend()
    first = table.iloc[0]
    lengths = f"Prompts of {first.prompt_tokens:.0f} tokens, answers of {first.output_tokens:.0f}"
    fig.suptitle(f"{lengths}, {readable(first.memory_bytes)} of cache each, on vLLM")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Software": None})
    plt.close(fig)


def main():
    given = arguments(("from",))
    path = ROOT / given.get("from", "results/serve.csv")
    if not path.is_file():
        print(f"error: {given.get('from', 'results/serve.csv')} is not there: `make serve` measures it", file=sys.stderr)
        sys.exit(2)
    runs = [rows.to_dict("records") for _, rows in pd.read_csv(path).groupby("run", sort=False)]
    blocks = tables(runs)
    for name, (lines, note) in blocks.items():
        print(f"\n{name}\n" + "\n\n".join(as_text(table) for table in lines) + f"\n\n{note}")
    loaded = next((rows for rows in reversed(runs) if any(row["kind"] in ("load", "flood") for row in rows)), None)
    if loaded:
        draw(loaded, path.parent / "figures" / "serve.png")
    if path == ROOT / "results" / "serve.csv":
        text = {name: "\n\n".join([*map(as_markdown, lines), f"<sub>{note}</sub>"]) for name, (lines, note) in blocks.items()}
        write_readme(ROOT / "README.md", text)


if __name__ == "__main__":
    main()
