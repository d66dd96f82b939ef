"""
What bench.py measured, drawn and tabled: results/bench.csv -> results/figures/{roofline,peers,growth}.png, and the
README's bench tables.

    python bench/report.py                            the committed file
    python bench/report.py from=results/bench_gpu.csv  another one; README and figures untouched, tables on the terminal
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from analysis.figures import WIDTH, label, look, plt
from analysis.runs import arguments
from analysis.tables import as_markdown, as_text, heads, write_readme

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "results" / "figures"
OURS = "nanoGQA"
ORDER = [OURS, "nanoGQA, PyTorch only", "Hugging Face, dynamic cache", "Hugging Face, static cache", "vLLM", "llama.cpp"]


def pick(table, **values):
    """Rows in which every named column has the given value."""
    for column, value in values.items():
        table = table[table[column] == value]
    return table


def ordered(peers):
    """Each peer once: ours, then the others as bench.py asks them."""
    return sorted(set(peers), key=lambda peer: (ORDER.index(peer) if peer in ORDER else len(ORDER), peer))


def slope(x, y):
    """Of a line through log y against log x: 1 is proportional growth, 0 none."""
    return np.polyfit(np.log(x), np.log(y), 1)[0]


def save(fig, name):
    FIGURES.mkdir(parents=True, exist_ok=True)
    fig.savefig(FIGURES / f"{name}.png", metadata={"Software": None})
    plt.close(fig)


def roofline(table):
    growth = pick(table, kind="growth", peer=OURS)
    batches = sorted(growth.batch.unique())
    fig, axes = plt.subplots(1, len(batches), figsize=(WIDTH, 4.2), squeeze=False)
    for ax, batch in zip(axes[0], batches, strict=True):
        for n_kv in sorted(growth.n_kv.unique(), reverse=True):
            rows = pick(growth, batch=batch, n_kv=n_kv).sort_values("context")
            style = look(n_kv, 8)
            ax.plot(rows.context, rows.tokens_per_s, **style, label=label(n_kv, 8))
            limit = batch * rows.bandwidth_gb_s.median() * 1e9 / (rows.read_mb * 1e6)
            ax.plot(rows.context, limit, color=style["color"], linewidth=1.1, linestyle=":")
        ax.plot([], [], color="#666666", linewidth=1.1, linestyle=":", label="roofline: bytes read\nover bandwidth")
        ax.set(xscale="log", yscale="log", xlabel="tokens held a sequence", ylabel="tokens/s, all sequences")
        ax.set_title(f"batch {batch}")
        ax.grid(True, which="both", color="#eeeeee")
    axes[0][0].legend()
    fig.suptitle(f"Decoding speed against context, float32, read bandwidth {growth.bandwidth_gb_s.median():.0f} GB/s")
    save(fig, "roofline")


def peers(table, context=2000):
    rows = pick(table, kind="decode", dialect="llama", dtype="float32", context=context).dropna(subset=["tokens_per_s"])
    batches, kv = sorted(rows.batch.unique()), sorted(rows.n_kv.unique(), reverse=True)
    order = ordered(rows.peer)
    fig, axes = plt.subplots(1, len(batches), figsize=(WIDTH, 1.6 + 0.55 * len(order)), sharey=True, squeeze=False)
    for ax, batch in zip(axes[0], batches, strict=True):
        for i, n_kv in enumerate(kv):
            speed = pick(rows, batch=batch, n_kv=n_kv).set_index("peer").tokens_per_s.reindex(order)
            at = np.arange(len(order)) + (i - (len(kv) - 1) / 2) * 0.26
            ax.barh(at, speed, height=0.24, color=look(n_kv, 8)["color"], label=label(n_kv, 8))
        ax.set_yticks(range(len(order)), order)
        ax.set_xlabel("tokens/s")
        ax.set_title(f"batch {batch}")
        ax.grid(False, axis="y")
        ax.locator_params(axis="x", nbins=4)
    axes[0][0].invert_yaxis()
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(kv))
    fig.suptitle(f"The same Llama-shaped model with {context:,} tokens held, float32")
    save(fig, "peers")


def growth(table):
    trained = pick(table, kind="train growth").dropna(subset=["step_ms"])
    decoded = pick(table, kind="growth", batch=8)
    fig, axes = plt.subplots(1, 3, figsize=(WIDTH * 1.25, 3.9))
    said = []
    for ax, rows, x, name in (
        (axes[0], pick(trained, context=256), "batch", "training step, 256 tokens"),
        (axes[1], pick(trained, batch=2), "context", "training step, batch 2"),
    ):
        rows = rows.sort_values(x)
        ax.plot(rows[x], rows.step_ms, **look(8, 8))
        first, last = slope(rows[x][:3], rows.step_ms[:3]), slope(rows[x][-3:], rows.step_ms[-3:])
        ax.set_title(f"{name}\nslope {first:.2f} at first, {last:.2f} at last")
        ax.set_xlabel({"batch": "batch (sequences)", "context": "context (tokens)"}[x])
        said.append([name, x, f"{first:.2f}", f"{last:.2f}"])
    for n_kv in sorted(decoded.n_kv.unique(), reverse=True):
        rows = pick(decoded, n_kv=n_kv).sort_values("context")
        axes[2].plot(rows.context, rows.step_ms, **look(n_kv, 8), label=heads(n_kv, 8))
        first, last = slope(rows.context[:3], rows.step_ms[:3]), slope(rows.context[-3:], rows.step_ms[-3:])
        said.append([f"decoding step, batch 8, {heads(n_kv, 8)}", "context", f"{first:.2f}", f"{last:.2f}"])
    axes[2].set_title("decoding step, batch 8")
    axes[2].set_xlabel("tokens held")
    axes[2].legend()
    for ax in axes:
        ax.set(xscale="log", yscale="log", ylabel="ms")
        ax.grid(True, which="both", color="#eeeeee")
    save(fig, "growth")
    return [["step", "grows with", "slope, first three", "last three"], *said]


def peer_table(table, context, dtype):
    """Tokens/s of each peer with the ratio of ours to it, at batch 1 and the largest, for every n_kv."""
    rows = pick(table, kind="decode", dialect="llama", dtype=dtype, context=context)
    batches, kv = sorted({rows.batch.min(), rows.batch.max()}), sorted(rows.n_kv.unique(), reverse=True)
    lines = [["", *(f"batch {b}, {heads(n, 8)}" for b in batches for n in kv)]]
    for peer in ordered(rows.peer):
        line = [peer]
        for batch in batches:
            for n_kv in kv:
                row = pick(rows, peer=peer, batch=batch, n_kv=n_kv)
                if not len(row) or row.tokens_per_s.isna().all():
                    line.append("–")
                    continue
                row = row.iloc[0]
                line.append(f"{row.tokens_per_s:,.0f}" + ("" if peer == OURS else f" ({row.ours_is_faster:.1f}x)"))
        lines.append(line)
    return lines


def dial_table(table):
    """Ours: MHA's tokens/s and share of the bandwidth, and what fewer heads gain, by dtype, batch and context."""
    rows = pick(table, kind="decode", dialect="llama", peer=OURS).dropna(subset=["tokens_per_s"])
    kv = sorted((n for n in rows.n_kv.unique() if n != 8), reverse=True)
    lines = [["dtype", "batch", "context", "MHA, tokens/s", "bandwidth, GB/s", "of it", *(f"{heads(n, 8)} / MHA" for n in kv)]]
    for (dtype, batch, context), case in rows.groupby(["dtype", "batch", "context"], sort=False):
        by = case.set_index("n_kv")
        if 8 in by.index:
            gains = [f"{by.tokens_per_s.get(n, np.nan) / by.tokens_per_s[8]:.2f}x" for n in kv]
            lines.append(
                [
                    dtype,
                    f"{batch}",
                    f"{context:,}",
                    f"{by.tokens_per_s[8]:,.0f}",
                    f"{by.bandwidth_gb_s[8]:.0f}",
                    f"{by.bandwidth_share[8]:.0%}",
                    *gains,
                ]
            )
    return lines


def whole_table(table):
    rows = pick(table, kind="whole").dropna(subset=["tokens_per_s"])
    lines = [["", "n_kv", "batch", "tokens/s", "mean step", "ours / it"]]
    for row in rows.sort_values(["batch", "n_kv"], ascending=[True, False]).itertuples():
        lines.append([
            row.peer, f"{row.n_kv}", f"{row.batch}", f"{row.tokens_per_s:,.0f}", f"{row.step_ms_mean:.2f} ms",
            "" if row.peer == OURS else f"{row.ours_is_faster:.1f}x",
        ])  # fmt: skip
    return lines


def train_table(table):
    rows = pick(table, kind="train").dropna(subset=["step_ms"])
    lines = [["", "n_kv", "step", "tokens/s", "products alone / step", "ours / it"]]
    for row in rows.itertuples():
        ratio = "" if row.peer == OURS else f"{row.ours_is_faster:.2f}x"
        lines.append(
            [row.peer, f"{row.n_kv}", f"{row.step_ms:.0f} ms", f"{row.tokens_per_s:,.0f}", f"{row.floor_share:.0%}", ratio]
        )
    return lines


def main():
    given = arguments(("from",))
    path = ROOT / given.get("from", "results/bench.csv")
    if not path.exists():
        print(f"error: {path.name} is not there: `make bench` measures it", file=sys.stderr)
        sys.exit(2)
    table = pd.read_csv(path)
    said = {
        "peers": peer_table(table, 2000, "float32"), "peers-bf16": peer_table(table, 2000, "bfloat16"),
        "dial": dial_table(table), "whole": whole_table(table), "train": train_table(table),
    }  # fmt: skip
    if path == ROOT / "results/bench.csv":
        roofline(table), peers(table)
        said["growth"] = growth(table)
        where = table.dropna(subset=["cpu"]).iloc[-1]
        note = f"{where.machine}; {where.cpu}, {where.threads} threads; commit {', '.join(sorted(table.commit.unique()))}"
        blocks = {f"bench-{name}": as_markdown(lines) for name, lines in said.items()}
        write_readme(ROOT / "README.md", blocks | {"bench-where": f"<sub>{note}</sub>"})
    for name, lines in said.items():
        print(f"\n{name}\n{as_text(lines)}")


if __name__ == "__main__":
    main()
