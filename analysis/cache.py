# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Cache: what a key-value head costs in memory
#
# To generate the next token, a Transformer needs the keys and values of all tokens before it. Computing them anew for
# each token would be waste, so they are kept: the KV cache. **How many bytes is that, and when does it outweigh the
# model itself?**
#
# Nothing is measured here: this notebook reads what `eval.py` measured. Every result in its text is computed from that.

# %%
import sys

sys.path.extend((".", ".."))  # started in the repository's root, or in analysis/

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from analysis import figures as f
from analysis import tables
from analysis.runs import load_runs
from arithmetic import readable
from kv_cache.accounting import dense_nbytes

runs, history = f.experiment(*load_runs(f.RUNS, sweep=f.SWEEP))
evals = tables.evaluations(runs)
if evals.empty:
    raise ValueError(f"no finished evaluation in runs/{f.SWEEP}: `make eval PRESET={f.SWEEP}` makes them")

# %% [markdown]
# ## The formula
#
# A key and a value are `head_dim` numbers each, for every layer, KV head, token and sequence:
#
# $$\text{bytes} = 2 \cdot n_\text{layer} \cdot n_\text{kv} \cdot \text{head\_dim} \cdot \text{tokens} \cdot \text{batch}
# \cdot \text{bytes per number}$$
#
# The number of *query* heads is not in it. That is the whole point of GQA and MQA: the query heads stay, the KV heads
# go, and the cache shrinks by exactly `n_head / n_kv`. It is `dense_nbytes` in `kv_cache/accounting.py`.

# %%
kinds = list(evals.n_kv.unique())
one = evals.drop_duplicates("n_kv").set_index("n_kv")  # seeds differ in weights, not in bytes
n_layer, n_head = (int(one[f"model.{key}"].iloc[0]) for key in ("n_layer", "n_head"))
head_dim = int(one["model.n_embd"].iloc[0]) // n_head
per_token = one.kv_bytes_per_token.astype(int)
itemsize = per_token[kinds[0]] // dense_nbytes(n_layer, kinds[0], head_dim, tokens=1, batch=1, itemsize=1)
assert all(dense_nbytes(n_layer, n_kv, head_dim, 1, 1, itemsize) == per_token[n_kv] for n_kv in kinds)
f.say(f"This model: {n_layer} layers, {n_head} query heads, head_dim {head_dim}, {itemsize} bytes a number.")
f.say_table(
    ["heads", "n_kv", "bytes a token", "how", "MHA / this"],
    *([
        tables.heads(n_kv, n_head), n_kv, f"{per_token[n_kv]:,}",
        f"2 · {n_layer} · {n_kv} · {head_dim} · {itemsize}",
        f"{per_token[n_head] / per_token[n_kv]:g}x" if n_head in kinds else "–",
    ] for n_kv in kinds),
)  # fmt: skip

# %% [markdown]
# ## Formula and tensors
#
# A formula can be wrong, so `eval.py` compares it with the real thing. After a real generation it adds up, over all
# layers, the elements of the held part of the key and value tensors times their element size. It also compares the
# allocated storage of these tensors with the formula at full capacity. If either is off by one byte, it stops.
#
# This is done twenty times while a generation's cache fills, and at its end.

# %%
batches = f.batches(evals, "kv_bytes_measured_b")
pairs, rows = 0, []
for batch in batches:
    formula, measured = evals[f"kv_bytes_formula_b{batch}"], evals[f"kv_bytes_measured_b{batch}"]
    pairs += int((formula == measured).sum())
    for n_kv in kinds:
        mine = evals[evals.n_kv == n_kv].dropna(subset=[f"kv_bytes_measured_b{batch}"])
        if len(mine):
            row = mine.iloc[0]
            counts = mine[f"kv_bytes_measured_b{batch}"].unique()
            rows.append([batch, tables.heads(n_kv, n_head), int(row.prompt + row.tokens) - 1,
                         f"{row[f'kv_bytes_formula_b{batch}']:,.0f}", ", ".join(f"{c:,.0f}" for c in counts), len(mine)])  # fmt: skip
total = int(evals[[f"kv_bytes_measured_b{batch}" for batch in batches]].notna().sum().sum())
f.say(f"**{pairs} of {total}** measured counts equal the formula to the byte.")
f.say_table(["batch", "heads", "tokens held", "formula, bytes", "summed from tensors, bytes", "runs"], *rows)

# %% [markdown]
# The last generated token is never fed back, so its key and value are never made: after a prompt of $p$ tokens and $n$
# generated ones the cache holds $p + n - 1$.
#
# ## When does the cache outweigh the weights?
#
# A decoding step reads the weights once, whatever the batch, and the whole cache. Both are the same number of bytes at
#
# $$\text{tokens} = \frac{\text{bytes of the weights}}{\text{bytes a token} \cdot \text{batch}}$$
#
# Below that, the weights are the larger part of what a step reads, and the number of KV heads changes little. Above it,
# the cache is. (The weights are all parameters but the table of positions, of which a step reads one row.)

# %%
weights = {n_kv: int(one[f"weight_bytes_b{batches[0]}"][n_kv]) for n_kv in kinds}
crossing = {(n_kv, batch): weights[n_kv] / (per_token[n_kv] * batch) for n_kv in kinds for batch in batches}
shown = sorted({batches[0], batches[-1]})
fig, axes = plt.subplots(1, len(shown), figsize=(f.WIDTH, 4.9), sharey=True, squeeze=False)
longest = max(max(crossing[n_kv, shown[0]] for n_kv in kinds), float((evals.prompt + evals.tokens).max()))
low = 2 ** min(4, int(min(crossing.values())).bit_length() - 1)
high = 2 ** int(longest * 2).bit_length()
for ax, batch in zip(axes[0], shown, strict=True):
    held = [low, high]
    for n_kv in kinds:
        style = f.look(n_kv, n_head)
        line = {"color": style["color"], "linestyle": style["linestyle"]}
        ax.plot(held, [dense_nbytes(n_layer, n_kv, head_dim, t, batch, itemsize) for t in held], **line)
        names = evals[evals.n_kv == n_kv].name
        counted = history[history.name.isin(names)].dropna(subset=[f"kv_bytes/b{batch}"])
        counted = counted[~counted.step.duplicated()].iloc[::3]  # every third: they lie on the line
        ax.plot(counted.step, counted[f"kv_bytes/b{batch}"], **f.look(n_kv, n_head, line=False))
        x = crossing[n_kv, batch]
        if low <= x <= high:
            ax.vlines(x, 0, weights[n_kv], color=style["color"], linewidth=1, linestyle=":")
            ax.plot(x, weights[n_kv], marker="o", markersize=11, markerfacecolor="none", color="#333333", linestyle="none")
            ax.annotate(f"{x:,.0f} tokens", (x, 0), (-2, 6), xycoords=("data", "axes fraction"), textcoords="offset points",
                        ha="right", va="bottom", rotation=90, fontsize=10, color=style["color"])  # fmt: skip
    ax.axhspan(min(weights.values()), max(weights.values()), color="#bbbbbb", alpha=0.7, lw=0)
    ax.set(xscale="log", yscale="log", xlim=(low, high), xlabel="tokens held per sequence", title=f"batch {batch}")
    ax.xaxis.set_major_locator(plt.FixedLocator([4**k for k in range(1, 16) if low <= 4**k <= high]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t / 1024:.0f}k" if t >= 1024 else f"{t:.0f}"))
    ax.yaxis.set_major_locator(plt.FixedLocator([2.0 ** (3 * k + 1) for k in range(30)]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda n, _: readable(n)))
    ax.minorticks_off()
axes[0][0].set_ylabel("bytes of the KV cache")
keys = [plt.Line2D([], [], label=f.label(n_kv, n_head), **f.look(n_kv, n_head)) for n_kv in kinds]
keys += [
    plt.Line2D([], [], color="#bbbbbb", linewidth=7, label="bytes of the weights"),
    plt.Line2D([], [], color="#333333", marker="o", markersize=11, markerfacecolor="none", linestyle="none",
               label="cache = weights"),
]  # fmt: skip
fig.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
fig.suptitle("KV cache by number of key-value heads: line = formula, marker = summed from tensors")
f.show(fig, "cache")

# %%
f.say_table(
    ["heads", "weights", *(f"cache = weights at, batch {batch}" for batch in batches)],
    *([tables.heads(n_kv, n_head), readable(weights[n_kv]), *(f"{crossing[n_kv, b]:,.0f} tokens" for b in batches)] for n_kv in kinds),
)  # fmt: skip
held = int((evals.prompt + evals.tokens).max()) - 1
for batch in shown:
    for n_kv in kinds:
        share = per_token[n_kv] * held * batch / weights[n_kv]
        f.say(f"Batch {batch}, {held:,} tokens: {tables.heads(n_kv, n_head)}'s cache is {share:.2g} times its weights.")

# %% [markdown]
# On both axes of the figure a factor is a distance. So the lines are parallel: at any length and any batch the ratio
# between two of them is the ratio of their KV heads. And a larger batch moves all lines up and leaves the weights
# where they are: a server with many users at once meets the cache long before a single user does.
#
# ## The same as a budget
#
# Read the other way round: how many tokens fit into a given memory? Weights are counted first.

# %%
memory = 2**30
f.say_table(
    ["heads", f"tokens in {readable(memory)}, all sequences together", "against MHA"],
    *([
        tables.heads(n_kv, n_head), f"{(memory - weights[n_kv]) // per_token[n_kv]:,}",
        f"{(memory - weights[n_kv]) // per_token[n_kv] / ((memory - weights[n_head]) // per_token[n_head]):.2f}x"
        if n_head in kinds else "–",
    ] for n_kv in kinds),
)  # fmt: skip
