# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Speed: what fewer key-value heads buy in tokens per second
#
# The cache of GQA and MQA is smaller, exactly and always (see `cache.ipynb`). Speed is another matter.
# **When does a smaller cache make decoding faster, and by how much?**
#
# Nothing is measured here: this notebook reads what `eval.py` measured. Every result in its text is computed from that.

# %%
import sys

sys.path.extend((".", ".."))  # started in the repository's root, or in analysis/

import matplotlib.pyplot as plt

from analysis import figures as f
from analysis import tables
from analysis.runs import load_runs

runs, history = f.experiment(*load_runs(f.RUNS, sweep=f.SWEEP))
evals = tables.evaluations(runs)
if evals.empty:
    raise ValueError(f"no finished evaluation in runs/{f.SWEEP}: `make eval PRESET={f.SWEEP}` makes them")
kinds, n_head = list(evals.n_kv.unique()), int(evals["model.n_head"].iloc[0])
others = [n_kv for n_kv in kinds if n_kv != n_head] if n_head in kinds else []
batches = f.batches(evals)

# %% [markdown]
# ## What to expect
#
# A decoding step makes one token for each sequence. It reads all weights once and the whole cache once, and does little
# arithmetic with them. If reading were all that takes time:
#
# $$\text{tokens/s} \le \text{batch} \cdot \frac{\text{bandwidth}}{\text{weights} + \text{cache}}
# \qquad \text{cache} \propto n_\text{kv} \cdot \text{tokens held} \cdot \text{batch}$$
#
# So fewer KV heads should matter where the cache is the larger part: long contexts and large batches.
# With one sequence and a short context the weights are nearly all, and there is little to win.
# A small model also spends time on what no formula of bytes knows: starting some dozen operations a layer.
#
# ## Conditions

# %%
e = evals.iloc[0]
shape = e["model.n_layer"] * e["model.n_kv"] * e["model.n_embd"] // e["model.n_head"]
itemsize = int(e.kv_bytes_per_token / (2 * shape))


def same(column):
    """All values of a column, which should be one."""
    return ", ".join(sorted({f"{v:g}" if isinstance(v, float) else str(v) for v in evals[column].dropna()}))


f.say_table(
    ["", ""],
    ["machine", same("machine")],
    ["CPU threads", same("threads")],
    ["attention", same("kernel")],
    ["weights and cache", {4: "float32", 2: "16-bit floats"}.get(itemsize, f"{itemsize} bytes a number")],
    ["batch", ", ".join(map(str, batches))],
    ["prompt, tokens", same("prompt")],
    ["generated, tokens a sequence", same("tokens")],
    ["sampling", "greedy"],
    [
        "read bandwidth, GB/s",
        f"{evals.read_bandwidth.min() / 1e9:.1f} to {evals.read_bandwidth.max() / 1e9:.1f}, measured once a run",
    ],  # fmt: skip
    ["runs", ", ".join(f"{tables.heads(n_kv, n_head)}: {(evals.n_kv == n_kv).sum()}" for n_kv in kinds)],
    ["commit", same("commit")],
)

# %% [markdown]
# Decoding is timed apart from the prompt, after a warm-up. The weights are random and of the trained model's shape, with
# a longer context: the values of the weights do not change the speed. `eval.py sweep=…` goes seed by seed and takes every
# `n_kv` of a seed in turn, so that a machine that gets slower or faster in between hits all alike, and ratios are
# taken within a seed. A seed here is a repetition of the timing, nothing else.
#
# ## Against the context
#
# Each point is the median of a twentieth of the steps, drawn at the tokens held after the last of them.

# %%
fig, axes = plt.subplots(1, len(batches), figsize=(f.WIDTH + 1, 4.2), squeeze=False)
for ax, batch in zip(axes[0], batches, strict=True):
    for n_kv in kinds:
        names = evals[evals.n_kv == n_kv].name
        rows = history[history.name.isin(names)]
        by_run = rows.pivot(index="step", columns="name", values=f"tokens_per_s/b{batch}").dropna()
        style = f.look(n_kv, n_head) | {"markersize": 5, "markevery": max(1, len(by_run) // 6)}
        ax.plot(by_run.index, by_run.median(axis=1), **style)
        ax.fill_between(by_run.index, by_run.min(axis=1), by_run.max(axis=1), color=style["color"], alpha=0.18, lw=0)
    ax.set(title=f"batch {batch}", xlabel="tokens held per sequence")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
axes[0][0].set_ylabel("tokens/s, all sequences together")
keys = [plt.Line2D([], [], label=f.label(n_kv, n_head), **f.look(n_kv, n_head)) for n_kv in kinds]
fig.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
fig.suptitle("Decoding speed by number of key-value heads: median over seeds, band: lowest to highest")
f.show(fig, "speed")

# %% [markdown]
# ## Against the batch
#
# The same, over the whole generation. Left, tokens per second; right, the ratio to MHA of the same seed, beside the
# ratio that the bytes alone would give: (bytes read by MHA) / (bytes read with fewer heads).


# %%
def ratio(n_kv, batch, column="tokens_per_s"):
    """A number a seed: with n_kv heads, divided by MHA of the same seed."""
    a, b = (evals[evals.n_kv == n].set_index("seed")[f"{column}_b{batch}"] for n in (n_kv, n_head))
    return (a / b).dropna()


fig, (left, right) = plt.subplots(1, 2, figsize=(f.WIDTH + 1, 4.3))
for n_kv in kinds:
    mine = evals[evals.n_kv == n_kv]
    rates = mine[[f"tokens_per_s_b{batch}" for batch in batches]]
    style = f.look(n_kv, n_head) | {"marker": ""}
    aside = 1.08 ** (kinds.index(n_kv) - len(kinds) // 2)  # points of equal speed would hide each other
    left.plot(batches, rates.median(), **style)
    for batch in batches:
        y = mine[f"tokens_per_s_b{batch}"]
        left.plot([batch * aside] * len(y), y, **f.look(n_kv, n_head, line=False) | {"alpha": 0.6})
    if n_kv in others:
        right.plot(batches, [ratio(n_kv, batch).median() for batch in batches], **style)
        right.plot(batches, [1 / ratio(n_kv, batch, "bytes_read_per_step").median() for batch in batches], color=style["color"], linewidth=1, linestyle=":")  # fmt: skip
        for batch in batches:
            y = ratio(n_kv, batch)
            right.plot([batch * aside] * len(y), y, **f.look(n_kv, n_head, line=False) | {"alpha": 0.6})
right.axhline(1, color=f.look(n_head, n_head)["color"], linewidth=1.8)
left.set(title="tokens/s", ylabel="tokens/s, all sequences together", yscale="log")
left.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
left.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
right.set(title="ratio to MHA of the same seed", ylabel="times MHA's tokens/s")
right.set_ylim(bottom=0)
for ax in (left, right):
    ax.set(xscale="log", xlabel="batch (sequences at once)")
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.minorticks_off()
keys = [plt.Line2D([], [], label=f.label(n_kv, n_head), **f.look(n_kv, n_head)) for n_kv in kinds]
keys.append(plt.Line2D([], [], color="#444444", linewidth=1, linestyle=":", label="ratio of the bytes read"))
fig.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
fig.suptitle("Decoding speed against the batch: each seed, line: median")
f.show(fig, "speed_batch")

# %% [markdown]
# ## Bytes read, and the share of the bandwidth
#
# *Read a step* is the weights and the mean cache of the generation, in bytes. *Share* is bytes read per second over the
# machine's read bandwidth, as `eval.py` measured it in the same run. A share near 100 % says that reading is the limit,
# and then fewer bytes are more speed; a small share says that time goes elsewhere. The bandwidth is that of memory: what
# stays in the processor's own cache from step to step is read faster, so a small model can be above 100 %.

# %%
rows = []
for batch in batches:
    for n_kv in kinds:
        mine = evals[evals.n_kv == n_kv].dropna(subset=[f"tokens_per_s_b{batch}"])
        read = mine[f"bytes_read_per_step_b{batch}"]
        share = mine[f"achieved_bandwidth_b{batch}"] / mine.read_bandwidth
        cache = 1 - mine[f"weight_bytes_b{batch}"] / read
        rows.append([batch, tables.heads(n_kv, n_head), f"{mine[f'tokens_per_s_b{batch}'].median():,.0f}",
                     f"{mine[f'step_ms_median_b{batch}'].median():.2f}", f"{read.median() / 1e6:.2f} MB",
                     f"{cache.median():.0%}", f"{share.median():.1%}"])  # fmt: skip
f.say_table(["batch", "heads", "tokens/s", "ms a step", "read a step", "of it cache", "share of the bandwidth"], *rows)

# %% [markdown]
# ## The ratios, and whether they count
#
# The rule is that of the losses: a ratio counts when the 95 % interval over the seeds leaves out "no change", which for
# a ratio is 1. *First* and *last* are the ratios at the shortest and the longest context of the curves above.

# %%


def context_ratio(n_kv, batch, which):
    """The ratio to MHA at the first (0) or last (-1) point of the curve, median over seeds."""
    found = []
    for seed, mine in evals[evals.n_kv.isin((n_kv, n_head))].groupby("seed"):
        names = mine.set_index("n_kv").name
        if len(names) == 2:
            a, b = (history[history.name == names[n]].set_index("step")[f"tokens_per_s/b{batch}"] for n in (n_kv, n_head))
            both = (a / b).dropna()
            found += [(both.index[which], both.iloc[which], seed)] if len(both) else []
    at = sorted({step for step, _, _ in found})
    middle = sorted(value for _, value, _ in found)[len(found) // 2] if found else float("nan")
    return at[0] if at else 0, middle


rows, sentences = [], []
for batch in batches:
    for n_kv in others:
        r = ratio(n_kv, batch)
        if r.empty:
            continue
        mean, half = tables.interval(r)
        bytes_ratio = 1 / ratio(n_kv, batch, "bytes_read_per_step").median()
        (first, at_first), (last, at_last) = context_ratio(n_kv, batch, 0), context_ratio(n_kv, batch, -1)
        noise = tables.verdict(r - 1)
        rows.append([batch, tables.heads(n_kv, n_head), f"{tables.with_interval(r, digits=2)}", f"{r.min():.2f} to {r.max():.2f}",
                     f"{bytes_ratio:.2f}", f"{at_first:.2f} at {first:,}", f"{at_last:.2f} at {last:,}", noise])  # fmt: skip
        if batch in (batches[0], batches[-1]):
            if half != half:
                said = f"{mean:.2f} times MHA's speed, from one seed, so without an interval"
            elif abs(mean - 1) <= half:
                said = f"no difference to MHA beyond seed noise ({tables.with_interval(r, digits=2)} times)"
            else:
                said = f"**{'faster' if mean > 1 else 'slower'}** than MHA: {tables.with_interval(r, digits=2)} times its speed"
            sentences.append(
                f"- Batch {batch}, {tables.heads(n_kv, n_head)}: {said}. It reads {1 - 1 / bytes_ratio:.0%} fewer bytes a step; "
                f"if bytes were all, that would be {bytes_ratio:.2f} times."
            )
f.say_table(
    ["batch", "heads", "speed / MHA's, mean over seeds", "lowest to highest", "bytes alone", "first", "last", "verdict"], *rows
)
f.say("\n".join(sentences) if sentences else "There is no MHA run to compare with.")

# %% [markdown]
# ## What it means
#
# Bytes are the sure thing: the cache is smaller by `n_head / n_kv` on any machine. Speed follows only as far as reading
# that cache is what the time goes into, and the table above shows how far that is on this machine, for this model.
# Where a ratio falls short of "bytes alone", the time went into something that fewer KV heads do not change.
# A ratio above it has another cause than bytes, such as a cache that now fits into the processor's own memory.
