"""
What the notebooks share: where the runs are, one look for all figures, and text computed from numbers.

    SWEEP=smoke jupyter lab analysis/loss.ipynb     a notebook on another sweep than cpu

Figures go to results/figures/ for the cpu sweep, else to runs/<sweep>/results/figures/, as the tables do.
"""

import logging
import os
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
from IPython.display import Image, Markdown, display

from analysis.tables import as_markdown, heads

# building its font cache is worth a warning to matplotlib; in a notebook it would be an output that comes and goes
logging.getLogger("matplotlib").setLevel(logging.ERROR)
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SWEEP = os.environ.get("SWEEP", "cpu")
RUNS = Path(os.path.relpath(ROOT / "runs"))  # relative: a path that is printed must not name anyone's home
OUT = (ROOT / "results" if SWEEP == "cpu" else ROOT / "runs" / SWEEP / "results") / "figures"
WIDTH = 8.0  # inches: at 150 dpi 1200 pixels, shown at about 800, so 11 pt arrives as a 15 px letter

# Okabe and Ito's colours, safe for the colour-blind; line and marker tell the same story in grey
LOOKS = {
    "MHA": ("#0072B2", "-", "o"),
    "GQA-4": ("#CC79A7", ":", "D"),
    "GQA-2": ("#D55E00", "--", "s"),
    "MQA": ("#009E73", "-.", "^"),
}

mpl.rcdefaults()  # whatever the reader's matplotlibrc says, the same figure
mpl.rcParams.update({
    "figure.constrained_layout.use": True, "savefig.dpi": 150, "font.size": 11, "axes.titlesize": 11,
    "figure.titlesize": 12, "legend.fontsize": 10, "axes.grid": True, "grid.color": "#e4e4e4", "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.framealpha": 0.9, "lines.linewidth": 1.8,
    "legend.handlelength": 3.2,
})  # fmt: skip


def look(n_kv, n_head, line=True):
    """Colour, marker and line of a number of KV heads: the same in every figure."""
    color, dashes, marker = LOOKS.get(heads(n_kv, n_head), ("#666666", (0, (1, 1)), "v"))
    return {"color": color, "marker": marker, "markersize": 6, "linestyle": dashes if line else "none"}


def label(n_kv, n_head):
    """'GQA-2 (n_kv 2)'."""
    return f"{heads(n_kv, n_head)} (n_kv {n_kv})"


def show(fig, name):
    """Write the figure to <results>/figures/<name>.png, and show that very file."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.png"
    fig.savefig(path, metadata={"Software": None})  # else the bytes change with matplotlib's version
    plt.close(fig)
    display(Image(data=path.read_bytes(), width=800))


def say(*lines):
    """Show Markdown paragraphs."""
    display(Markdown("\n\n".join(lines)))


def say_table(header, *rows):
    """Show a table: rows of anything."""
    say(as_markdown([[str(cell) for cell in row] for row in (header, *rows)]))


def experiment(runs, history):
    """Without the runs of the notebooks themselves, which carry figures and no measurement; says how each run was read."""
    runs = runs[runs.job_type != "analysis"]
    history = history[history.name.isin(runs.name)] if len(history) else history
    counts = runs.groupby(["job_type", "state", "read_from"]).size()
    where = {"wandb": "its W&B file", "metrics.jsonl": "its metrics.jsonl"}
    parts = [f"{n} {job} ({state}, each read from {where.get(how, how)})" for (job, state, how), n in counts.items()]
    say(f"Runs of the sweep `{SWEEP}`: {'; '.join(parts)}.")
    return runs, history


def batches(evals, column="tokens_per_s_b"):
    """The batch sizes that eval.py measured, ascending."""
    found = [re.fullmatch(rf"{column}(\d+)", name) for name in evals.columns]
    return sorted(int(match[1]) for match in found if match and evals[match[0]].notna().any())


def plot_differences(ax, rows, unit, apart=None):
    """
    A row a comparison, downwards: paired differences a seed as points, their mean and 95 % interval as a bar, and zero.
    rows: (label, look, {seed: difference}, mean, half width or NaN). apart: the seed drawn hollow, not in the interval.
    """
    ax.axvline(0, color="#333333", linewidth=1.2)
    for y, (_, style, differences, mean, half) in enumerate(rows):
        color = style["color"]
        if half == half:
            ax.errorbar(mean, y, xerr=half, color=color, capsize=5, linewidth=2, zorder=2)
        ax.plot([mean], [y], marker="|", markersize=16, markeredgewidth=2.5, color=color, zorder=3)
        # seeds lie above the bar, one above the other with their number, since they may be equal
        for i, (seed, d) in enumerate(differences.items()):
            at = y - 0.24 - 0.16 * i
            face = "white" if seed == apart else color
            ax.plot(d, at, marker=style["marker"], markersize=5, color=color, markerfacecolor=face, linestyle="none", zorder=4)
            ax.annotate(f"{seed}", (d, at), (6, 0), textcoords="offset points", va="center", fontsize=9, color="#333333")
    ax.set_yticks(range(len(rows)), [text for text, *_ in rows])
    ax.set_ylim(len(rows) - 0.65, -0.85)
    ax.margins(x=0.08)
    ax.grid(False, axis="y")
    ax.set_xlabel(unit)


def heat(ax, table, row, columns, share):
    """
    The mean of the column `share`, from 0 to 1, as a heat map with its per cents: downwards the values of `row` as they come,
    to the right those of `columns`, sorted. What was not measured stays grey. Returns the image, and the cells as a table.
    """
    cells = table.groupby([row, *columns], sort=False)[share].mean().unstack(columns)
    cells = cells.reindex(index=table[row].unique(), columns=sorted(cells.columns))
    values = cells.to_numpy(dtype=float)
    ax.set_facecolor("#dddddd")
    image = ax.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=1)
    for (y, x), value in np.ndenumerate(values):
        if value == value:
            color = "black" if value > 0.6 else "white"
            ax.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=9, color=color)
    ax.set_yticks(range(len(cells)), cells.index)
    ax.set_yticks([y + 0.5 for y in range(len(cells) - 1)], minor=True)
    ax.grid(False)
    ax.grid(True, axis="y", which="minor", color="white", linewidth=1.5)
    ax.set_axisbelow(False)
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)
    return image, cells
