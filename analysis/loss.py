# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Loss: what fewer key-value heads cost in quality
#
# A Transformer that generates text keeps a key and a value of every token it has read, in every layer and every
# *key-value head*. `n_kv` is the number of these heads:
#
# - **MHA**, multi-head attention: as many KV heads as query heads.
# - **GQA**, grouped-query attention: each KV head serves a group of query heads. GQA-2 has two KV heads.
# - **MQA**, multi-query attention: one KV head serves all query heads.
#
# The cache shrinks by the factor `n_head / n_kv` (see `cache.ipynb`). **What does that cost in loss?**
#
# Nothing is trained here: this notebook reads finished runs and draws. Every result in its text is computed from them.

# %%
import math
import sys

sys.path.extend((".", ".."))  # started in the repository's root, or in analysis/

import matplotlib.pyplot as plt

from analysis import figures as f
from analysis import tables
from analysis.runs import load_runs

runs, history = f.experiment(*load_runs(f.RUNS, sweep=f.SWEEP))
table = tables.sweep_table(runs)
trained = tables.trained_runs(runs)
n_head = int(table["model.n_head"].iloc[0])
kinds = sorted(table.n_kv.unique(), reverse=True)
others = [n_kv for n_kv in kinds if n_kv != n_head]
f.say(f"Conditions: {tables.conditions(table, runs)}.")

# %% [markdown]
# ## The measure
#
# The loss is the mean surprise per token (here a token is a character), in nats:
#
# $$L = -\frac{1}{N} \sum_i \ln p(x_i \mid \text{the tokens before it})$$
#
# A model that knows nothing gives each of the $V$ tokens of the vocabulary the same probability: its loss is $\ln V$.
#
# *Training loss* is the loss on the one batch of a step, so it jumps about.
# *Validation loss* is one pass over the whole validation text, in windows that do not overlap, in float32.
# That measure draws nothing at random. What remains is the luck of the seed: initial weights and order of the text.

# %%
vocab = int(trained["model.vocab_size"].iloc[0])
tokens_per_step = int(trained["train.batch_size"].iloc[0] * trained["model.block_size"].iloc[0])
seeds = sorted(int(seed) for seed in table.seed.unique())
f.say(
    f"Here $V$ = {vocab}, so knowing nothing costs ln({vocab}) = {math.log(vocab):.4f} nats. "
    f"A step reads {tokens_per_step:,} tokens. Seeds: {', '.join(map(str, seeds))}."
)

# %% [markdown]
# ## The rule for "different"
#
# With one seed, every `n_kv` sees the same batches in the same order. So runs are compared in pairs, seed by seed:
#
# $$d_s = L_{\text{fewer heads},\,s} - L_{\text{MHA},\,s} \qquad
# \text{interval} = \bar d \pm t_{0.975,\,n-1}\,\frac{\text{std}(d)}{\sqrt n}$$
#
# **The rule, written before any run:** a difference counts when this 95 % interval leaves out zero.
# Otherwise it is "within seed noise": these runs cannot tell the two apart. That is not proof that they are equal.

# %%
final = {n_kv: rows.set_index("seed").val_loss_final for n_kv, rows in table.groupby("n_kv")}
differences = {n_kv: (final[n_kv] - final[n_head]).dropna() for n_kv in others} if n_head in final else {}
differences = {n_kv: paired for n_kv, paired in differences.items() if len(paired)}


def curves(ax, column):
    """Mean over the seeds against steps, and a band from the lowest to the highest seed."""
    for n_kv in kinds:
        names = trained.loc[trained.n_kv == n_kv].set_index("name").seed
        rows = history[history.name.isin(names.index)]
        by_seed = rows.assign(seed=rows.name.map(names)).pivot(index="step", columns="seed", values=column).dropna()
        style = f.look(n_kv, n_head) | {"markersize": 5, "markevery": max(1, len(by_seed) // 8)}
        ax.plot(by_seed.index, by_seed.mean(axis=1), label=f.label(n_kv, n_head), **style)
        ax.fill_between(by_seed.index, by_seed.min(axis=1), by_seed.max(axis=1), color=style["color"], alpha=0.18, lw=0)
    ax.axhline(math.log(vocab), color="#333333", linewidth=1, linestyle=(0, (1, 2)))
    ax.set_xlabel("step")
    ax.set_xlim(0, 1.02 * history[history.name.isin(trained.name)].step.max())


rows = []
for n_kv, paired in differences.items():
    mean, half = tables.interval(paired)
    rows.append((f"{tables.heads(n_kv, n_head)} − MHA", f.look(n_kv, n_head), paired, mean, half))

fig = plt.figure(figsize=(f.WIDTH, 4.1 + 0.8 * len(rows) + 0.4 * bool(rows)))
grid = fig.add_gridspec(2 if rows else 1, 2, height_ratios=[3.1, 0.8 * len(rows)] if rows else [1])
left = fig.add_subplot(grid[0, 0])
right = fig.add_subplot(grid[0, 1], sharey=left)
for ax, column, title in (
    (left, "train/loss", "training: the step's batch"),
    (right, "val/loss", "validation: the whole split"),
):
    curves(ax, column)
    ax.set_title(title)
    top = ax.secondary_xaxis("top", functions=(lambda s: s * tokens_per_step / 1e6, lambda m: m * 1e6 / tokens_per_step))
    top.set_xlabel("million tokens read")
    top.xaxis.set_major_locator(plt.MaxNLocator(4))
left.set_ylabel("loss (nats per token)")
right.tick_params(labelleft=False)
band = f"mean of {len(seeds)} seeds\nband: lowest to highest" if len(seeds) > 1 else "one seed"
left.legend(title=band, title_fontsize=10, alignment="left", loc="upper right", bbox_to_anchor=(1, 0.95))
right.annotate(f"ln {vocab}: knows nothing", (1, math.log(vocab)), (-2, -4), xycoords=("axes fraction", "data"),
               textcoords="offset points", ha="right", va="top", fontsize=10)  # fmt: skip
if rows:
    below = fig.add_subplot(grid[1, :])
    f.plot_differences(below, rows, "final validation loss minus MHA's, same seed (nats per token); below zero is better")
    below.set_title("paired differences: each seed (numbered), mean and 95 % interval", loc="left")
fig.suptitle("Loss by number of key-value heads")
f.show(fig, "loss")

# %% [markdown]
# ## What the runs say

# %%
lines = tables.sweep_summary(table)
keep = [i for i, name in enumerate(lines[0]) if name in ("heads", "n_kv", "parameters", "val loss, final", "best")]
keep.append(lines[0].index("difference to MHA, paired"))
f.say_table(*([line[i] for i in keep] for line in lines))

if not differences:
    f.say("There is no MHA run with the same seed, so no difference can be taken.")
for n_kv, paired in differences.items():
    mean, half = tables.interval(paired)
    kind, verdict = tables.heads(n_kv, n_head), tables.verdict(paired)
    said = f"**{kind}** − MHA: {tables.with_interval(paired, sign=True)} nats per token (n = {len(paired)}), **{verdict}**. "
    if half != half:
        said += "An interval needs two seeds or more."
    elif abs(mean) <= half:
        said += (
            f"The interval reaches from {mean - half:+.4f} to {mean + half:+.4f}: a true difference in there is not excluded."
        )
    else:
        share = abs(mean) / final[n_head].mean()
        said += f"{kind} is {'worse' if mean > 0 else 'better'}, by {share:.1%} of MHA's loss."
    f.say(said)

# %% [markdown]
# Two things to set beside these differences. Fewer KV heads are also fewer parameters, since the key and value
# projections shrink; the models are otherwise of one shape. And a difference can be read as time: how much does the
# loss still fall between the last two evaluations?

# %%
size = table.groupby("n_kv").n_params.first()
for n_kv in others if n_head in size.index else []:
    f.say(f"{tables.heads(n_kv, n_head)} has {1 - size[n_kv] / size[n_head]:.1%} fewer parameters than MHA.")
mha = trained[trained.n_kv == n_head].name
late = history[history.name.isin(mha)].groupby("step")["val/loss"].mean().dropna().tail(2)
if len(late) == 2:
    (before, loss_before), (last, loss_last) = late.items()
    f.say(f"From step {before} to step {last}, MHA's mean validation loss went from {loss_before:.4f} to {loss_last:.4f}, "
          f"a change of {loss_last - loss_before:+.4f}.")  # fmt: skip

# %% [markdown]
# ## From a trained MHA model to fewer heads
#
# Training from scratch for each `n_kv` is not needed. The GQA paper (arXiv 2305.13245, section 2.1) takes a trained
# MHA model, makes one KV head of each group, and trains on for a few percent of the steps, which it calls *uptraining*.
# Three ways to make one head of a group of $g$:
#
# - **mean**: average the group's key and value projections, $W = \frac{1}{g} \sum_{h \in \text{group}} W_h$
# - **first**: keep the group's first head
# - **random**: a head with new random weights
#
# The heads of a group were never trained to agree, so the loss jumps right after pooling. How much of it comes back?
#
# Training on helps any model. So the control is the parent itself, nothing pooled, trained on for as many steps on the
# same batches with the same schedule. The question is what pooling costs *against that control*.
# The schedule was chosen by looking at one seed, so the report rests on the others, and that seed is drawn apart.

# %%
up = tables.uptrain_table(runs)
if up.empty:
    f.say(f"The sweep `{f.SWEEP}` has no uptraining runs yet.")
else:
    reported = up[up.seed != tables.SCHEDULE_SEED]
    reported = reported if len(reported) else up
    apart = tables.SCHEDULE_SEED if len(reported) < len(up) else None  # the seed drawn hollow
    control = up[up.loss_pooled == up.loss_parent].set_index("seed").loss_uptrained  # nothing was pooled
    f.say(
        f"Uptraining: {', '.join(f'{n} steps after {p} ({n / p:.1%})' for n, p in sorted({*zip(up.steps, up.parent_steps, strict=True)}))}. "
        f"Reported: seeds {', '.join(str(s) for s in sorted(reported.seed.unique()))}."
    )
    f.say_table(*tables.uptrain_summary(up))

# %%
if not up.empty:
    arms = list(up.groupby(["groups", "pool"], sort=False))
    rows = []
    fig, (ax, below) = plt.subplots(2, 1, figsize=(f.WIDTH, 8), height_ratios=[1.2, 1])
    for x, ((groups, pool), part) in enumerate(arms):
        color = f.look(groups, n_head)["color"]
        for row in part.itertuples():
            spots, losses = [x - 0.27, x, x + 0.27], [row.loss_parent, row.loss_pooled, row.loss_uptrained]
            dashes, face = (":", "white") if row.seed == apart else ("-", color)
            ax.plot(spots, losses, color=color, linewidth=1, linestyle=dashes, zorder=2)
            for spot, loss, marker in zip(spots, losses, "D^o", strict=True):
                ax.plot(spot, loss, marker=marker, markersize=7, color=color, markerfacecolor=face, zorder=3)
        paired = (part.set_index("seed").loss_uptrained - control).dropna()
        if len(paired) and not (part.loss_pooled == part.loss_parent).all():
            mean, half = tables.interval(paired[paired.index.isin(reported.seed)])
            text = f"{tables.heads(groups, n_head)}, {pool}"
            rows.append((text, f.look(groups, n_head), paired, mean, half))
    uniform = ax.axhline(math.log(vocab), color="#333333", linewidth=1, linestyle=(0, (1, 2)))
    names = [
        f"{tables.heads(g, n_head)}\nnot pooled"
        if (part.loss_pooled == part.loss_parent).all()
        else f"{tables.heads(g, n_head)}\n{pool}"
        for (g, pool), part in arms
    ]
    ax.set_xticks(range(len(arms)), names)
    ax.grid(False, axis="x")
    ax.set_ylabel("validation loss (nats per token)")
    keys = [
        plt.Line2D([], [], color="#444444", marker=m, markersize=7, linestyle="none", label=text)
        for m, text in zip("D^o", ("parent", "right after pooling", "after uptraining"), strict=True)
    ]
    if apart is not None:
        keys.append(plt.Line2D([], [], color="#444444", marker="o", markerfacecolor="white", linestyle=":",
                               label=f"hollow: seed {apart}, schedule chosen on it"))  # fmt: skip
    uniform.set_label(f"ln {vocab}: knows nothing")
    fig.legend(handles=[*keys, uniform], loc="outside upper center", ncols=3, frameon=False)
    if rows:
        f.plot_differences(below, rows, "loss after uptraining minus the parent trained on, same seed (nats per token)", apart)
        who = ", ".join(str(s) for s in sorted(reported.seed.unique()))
        below.set_title(f"paired differences: each seed (numbered), mean and 95 % interval of seeds {who}", loc="left")
    else:
        below.remove()
    ax.set_title("from a trained MHA model to fewer key-value heads: each line a seed", loc="left")
    f.show(fig, "uptrain")

# %% [markdown]
# How to read it: the upper panel shows the jump and the way back; the lower one what is still missing against the
# control. With few seeds Student's t makes the interval wide (for two seeds its factor is 12.7), so a verdict of
# "within seed noise" says little here, while the single seeds still show size and direction.

# %%
if not up.empty:
    for (groups, pool), part in reported.groupby(["groups", "pool"], sort=False):
        jump = part.loss_pooled - part.loss_parent
        if not jump.any():
            moved = part.loss_uptrained - part.loss_parent
            f.say(f"**The parent, trained on:** {tables.with_interval(moved, sign=True)} nats against the parent itself.")
            continue
        back = (part.loss_pooled - part.loss_uptrained) / jump
        low = part.loss_pooled.mean() / math.log(vocab)
        said = f"**{tables.heads(groups, n_head)}, {pool}:** pooling moves the loss by {jump.mean():+.4f}, to {low:.0%} of ln {vocab}"
        if (jump > 0).all():
            said += f"; uptraining wins back {back.mean():.1%} of the jump"
        paired = (part.set_index("seed").loss_uptrained - control).dropna()
        if len(paired):
            said += f". Against the parent trained on: {tables.with_interval(paired, sign=True)}, {tables.verdict(paired)}"
        if groups in final:
            scratch = (part.set_index("seed").loss_uptrained - final[groups]).dropna()
            if len(scratch):
                said += f". Against {tables.heads(groups, n_head)} trained from scratch: "
                said += f"{tables.with_interval(scratch, sign=True)}, {tables.verdict(scratch)}"
        f.say(said + ".")
    f.say("The comparison with training from scratch is not at equal steps: a converted model has its parent's steps behind it "
          f"and {', '.join(str(n) for n in sorted(up.steps.unique()))} more.")  # fmt: skip
