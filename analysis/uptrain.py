# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Uptraining: how a trained model gives up key-value heads
#
# A trained MHA model can be turned into a GQA one: make one key-value head of each group, then train on a little. Two
# questions, asked apart. **What does pooling itself cost?** That is the loss before any further training. **What does further
# training win back, and how fast?** That is the curve against the fraction of the original steps.
#
# How a group of heads becomes one (`pooling.py` has the mathematics):
#
# - **mean**: the average of the group's projections, the GQA paper's (arXiv 2305.13245).
# - **first**, **random**: the group's first head; new random heads. The paper's two floors.
# - **aligned**: the average after an orthogonal turn of each head towards the others.
# - **svd**: the shared head that loses least, with each query head's own map onto it. In closed form, from a few batches.
#
# Nothing is trained here: this notebook reads finished runs and draws. Every result in its text is computed from them.

# %%
import sys

sys.path.extend((".", ".."))  # started in the repository's root, or in analysis/

import matplotlib.pyplot as plt

from analysis import figures as f
from analysis import tables
from analysis import uptrain_tables as u

found, missing = u.load(f.SWEEP, f.RUNS)
if not found:
    raise ValueError("; ".join(missing))
curves = {name: u.curve_table(runs) for name, runs in found.items()}
f.say(*(f"*Not here:* {line}." for line in missing), *(f"`{name}`: {u.conditions(table)}." for name, table in curves.items()))

# %% [markdown]
# ## The curve
#
# Each point is a model of its own, with a learning rate that falls to zero over its steps. All losses are differences to
# the parent's, seed by seed. The scale is logarithmic beyond ±0.01 nats, and linear within.
#
# Training on moves the loss by itself, also where nothing was pooled: that is the grey line, the parent trained on. A restart
# at the parent's peak rate takes so few steps further away from the minimum, not closer, so svd, which leaves little to mend,
# goes on at a tenth of it, and is compared with the parent trained on at that.

# %%
LOOKS = {
    "mean": ("#0072B2", "o"), "first": ("#CC79A7", "D"), "random": ("#E69F00", "v"), "aligned": ("#56B4E9", "s"),
    "svd": ("#D55E00", "^"), u.KEPT: ("#777777", "."),
}  # fmt: skip


def usual(table):
    """The arms of the curve: at 5 % each pool has been trained at the other rate too, which is for the table."""
    arms = u.arms(table)
    points = {
        arm: table[(table.groups == arm[0]) & (table.pool == arm[1]) & (table.rate == arm[2])].fraction.nunique()
        for arm in arms
    }
    return [arm for arm in arms if points[arm] == max(points[other] for other in arms if other[:2] == arm[:2])]


def draw(table, title):
    """A panel a number of KV heads: loss minus the parent's against the fraction of its steps."""
    groups = u.targets(table)
    n_head, parent = int(table.n_head.iloc[0]), u.losses(table, u.KEPT, fraction=0)
    fractions = [0.0, *sorted(table[table.rate.notna()].fraction.unique())]
    fig, axes = plt.subplots(1, len(groups), figsize=(f.WIDTH + 1.2, 4.6), sharey=True, squeeze=False)
    for ax, n in zip(axes[0], groups, strict=True):
        for g, pool, rate in [arm for arm in usual(table) if arm[0] == n or arm[1] == u.KEPT]:
            color, marker = LOOKS[pool]
            points = []
            for x, fraction in enumerate(fractions):
                d = (u.losses(table, pool, g, fraction, rate if fraction else None) - parent).dropna()
                if len(d):
                    points.append((x, d.mean()))
                    if pool != u.KEPT:
                        ax.plot([x] * len(d), d, marker="_", markersize=5, color=color, alpha=0.5, linestyle="none")
            style = {"linestyle": "-" if rate == 1 else "--", "linewidth": 1.4 if pool == u.KEPT else 1.8}
            ax.plot(
                *zip(*points, strict=True),
                color=color,
                marker=marker,
                markersize=6,
                label=f"{u.SAID.get(pool, pool)}, rate {rate:g}",
                **style,
            )
        scratch = (u.losses(table, u.SCRATCH, n) - parent).dropna()
        if len(scratch):
            ax.axhline(scratch.mean(), color="#009E73", linestyle=":", linewidth=1.6, label=u.SAID[u.SCRATCH])
        ax.axhline(0, color="#333333", linewidth=0.8)
        ax.set_yscale("symlog", linthresh=0.01, linscale=0.6)
        ax.set_yticks([-0.01, 0, 0.01, 0.1, 1], ["-0.01", "0", "0.01", "0.1", "1"])
        ax.set_xticks(range(len(fractions)), [f"{100 * x:g}" for x in fractions])
        ax.set_title(f.label(n, n_head))
        ax.set_xlabel("% of the parent's steps")
    axes[0][0].set_ylabel("loss minus the parent's (nats per token)")
    shown = {label: line for ax in axes[0] for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False)
    fig.suptitle(title)
    return fig


for table in curves.values():
    dialect = table.dialect.iloc[0]
    f.show(draw(table, f"From MHA to fewer key-value heads, dialect {dialect}"), f"uptrain_curve_{dialect}")

# %% [markdown]
# ## In numbers, at 5 %
#
# Each difference is paired by seed, with its 95 % interval. *To the parent trained on* has the same steps on the same batches
# at the same rate on both sides, so what is left is the pooling. *From scratch* has all the parent's steps with as many heads.

# %%
for table in curves.values():
    f.say(f"**Dialect {table.dialect.iloc[0]}**")
    f.say_table(*u.summary(table))

# %%
for table in curves.values():
    n_head, rows = int(table.n_head.iloc[0]), []
    for groups, pool, rate in u.arms(table):
        control = u.losses(table, u.KEPT, fraction=u.SHOWN, rate=rate)
        d = (u.losses(table, pool, groups, u.SHOWN, rate) - control).dropna()
        if pool != u.KEPT and len(d):
            mean, half = tables.interval(d)
            rows.append((f"{tables.heads(groups, n_head)}, {pool}, rate {rate:g}", f.look(groups, n_head), d, mean, half))
    if rows:
        fig, ax = plt.subplots(figsize=(f.WIDTH, 1.2 + 0.62 * len(rows)))
        f.plot_differences(ax, rows, "loss after 5 % more steps, minus the parent trained on as long (nats per token)")
        ax.set_xscale("symlog", linthresh=0.01, linscale=0.6)
        ax.set_xticks([0, 0.01, 0.1, 1], ["0", "0.01", "0.1", "1"])
        dialect = table.dialect.iloc[0]
        ax.set_title(f"dialect {dialect}, after uptraining: each seed (numbered), mean and 95 % interval", loc="left")
        f.show(fig, f"uptrain_cost_{dialect}")

# %% [markdown]
# ## What the runs say

# %%
for table in curves.values():
    n_head, parent = int(table.n_head.iloc[0]), u.losses(table, u.KEPT, fraction=0)
    f.say(f"**Dialect {table.dialect.iloc[0]}**")
    for groups in u.targets(table):
        jumps = {
            pool: (u.losses(table, pool, groups, 0) - parent).mean()
            for g, pool, _ in u.arms(table) if g == groups
        }  # fmt: skip
        after = {
            (pool, rate): (u.losses(table, pool, groups, u.SHOWN, rate) - parent).mean()
            for g, pool, rate in u.arms(table) if g == groups
        }  # fmt: skip
        least, (best, rate) = min(jumps, key=jumps.get), min(after, key=after.get)
        said = f"{tables.heads(groups, n_head)}: {least} loses least before any training, {jumps[least]:+.4f} nats"
        if "mean" in jumps and least != "mean":
            said += f", where mean loses {jumps['mean']:+.4f}"
        said += f". After {u.SHOWN:.0%} of the steps the lowest loss is that of {best} at rate {rate:g}, "
        said += f"{after[best, rate]:+.4f} to the parent"
        scratch = (u.losses(table, u.SCRATCH, groups) - parent).dropna()
        if len(scratch):
            said += f"; {tables.heads(groups, n_head)} trained from scratch ends at {scratch.mean():+.4f}"
        f.say(said + ".")

# %% [markdown]
# ## What rotary positions cost
#
# The `gpt2` dialect adds positions to the input once, so any invertible map of a head's keys can be undone in its queries, and
# svd may choose the shared basis freely. The `llama` dialect turns pairs of channels of every key by an angle that grows with
# the position, and only maps that commute with the turning are free: one complex number a pair, which leaves little to choose.
# What helps is that attention looks at near tokens most: over their distances slow pairs hardly turn, so svd may mix them at a
# small error, which it weighs by the distances that each head was seen to look at. Values are not turned, and as free as before.

# %%
if len(curves) > 1:
    lines = [["KV heads", "pool", *(f"right after pooling, {table.dialect.iloc[0]}" for table in curves.values())]]
    for groups, pool in dict.fromkeys((g, p) for table in curves.values() for g, p, _ in u.arms(table) if p != u.KEPT):
        cells = []
        for table in curves.values():
            d = (u.losses(table, pool, groups, 0) - u.losses(table, u.KEPT, fraction=0)).dropna()
            cells.append(tables.with_interval(d, sign=True) if len(d) else "–")
        lines.append([str(groups), pool, *cells])
    f.say_table(*lines)
else:
    f.say("Only one dialect has been run here.")
