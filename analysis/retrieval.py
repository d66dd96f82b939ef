# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Through a quantised cache, is it still found?
#
# A loss is an average over all tokens, and most tokens need nothing from far away. **Does a cache of few bits still hold the
# one token that a question needs?** The models of the sweep `recall` have to find a key's value among 48 pairs of a
# sequence, at a distance. SmolLM2 has to say a five-digit pass key that was hidden in a text.
#
# Nothing is measured here: this notebook reads what `retrieval.py cache=…` left. Every result in its text is computed from
# that.

# %%
import sys

sys.path.extend((".", ".."))  # started in the repository's root, or in analysis/

import matplotlib.pyplot as plt

from analysis import figures as f
from analysis import quant_tables as q
from analysis import tables

found, missing = q.load(f.SWEEP, f.RUNS)
if not found:
    raise ValueError("; ".join(missing))
_, _, retrieval = q.tables_of(found)
retrieval = retrieval.assign(name=[q.name_of(row) for row in retrieval.itertuples()])
n_head = {sweep: int(runs["model.n_head"].dropna().iloc[0]) for sweep, runs in found.items()}
f.say(*(f"*Not here:* {line}." for line in missing))

# %% [markdown]
# ## Where it is found
#
# A row a cache, a column a distance (recall) or a length and a depth (pass keys).

# %%
recall, passkey = retrieval[retrieval.task == "recall"], retrieval[retrieval.task == "passkey"]
if len(recall):
    heads = sorted(recall.n_kv.unique(), reverse=True)
    caches = recall.name.nunique()
    fig, axes = plt.subplots(
        len(heads), 1, figsize=(f.WIDTH, 1.2 + len(heads) * (0.45 + 0.24 * caches)), sharex=True, squeeze=False
    )
    for ax, n_kv in zip(axes[:, 0], heads, strict=True):
        mine = recall[recall.n_kv == n_kv]
        image, cells = f.heat(ax, mine, "name", ["distance"], "accuracy")
        ax.set_xticks(range(cells.shape[1]), [f"{d:,}" for d in cells.columns])
        heads_of = f.label(n_kv, n_head["recall"] if "recall" in n_head else n_head[f.SWEEP])
        ax.set_title(f"{heads_of}, {n} seeds" if (n := mine.seed.nunique()) > 1 else f"{heads_of}, one seed")
    axes[-1][0].set_xlabel("distance from the key to the query, tokens")
    fig.colorbar(image, ax=axes[:, 0], label="found", pad=0.02, format=lambda v, _: f"{v:.0%}", aspect=30)
    fig.suptitle("Associative recall through quantised caches: found, %")
    f.show(fig, "quant_retrieval")
if len(passkey):
    caches = passkey.name.nunique()
    fig, ax = plt.subplots(figsize=(f.WIDTH, 1.7 + 0.33 * caches))
    image, cells = f.heat(ax, passkey, "name", ["length", "depth"], "accuracy")
    ax.set_xticks(range(cells.shape[1]), [f"{depth:g}" for _, depth in cells.columns], fontsize=9)
    lengths = [length for length, _ in cells.columns]
    for length in dict.fromkeys(lengths):
        at = [i for i, n in enumerate(lengths) if n == length]
        ax.text(sum(at) / len(at), 1.01, f"{length:,} tokens", ha="center", va="bottom", transform=ax.get_xaxis_transform())
        if at[0]:
            ax.axvline(at[0] - 0.5, color="white", linewidth=4)
    ax.set_xlabel("depth: 0 = right at the beginning, 1 = right before the question")
    fig.colorbar(image, ax=ax, label="found", pad=0.02, format=lambda v, _: f"{v:.0%}")
    fig.suptitle("SmolLM2-135M, pass keys: found, %")
    f.show(fig, "quant_passkey")

# %% [markdown]
# ## Against the dense cache

# %%
for task, rows in retrieval.groupby("task", sort=False):
    header, *lines = (q.passkey_summary if task == "passkey" else q.recall_summary)(rows)
    f.say_table(header, *lines)
rows = []
for sweep, measured in retrieval.groupby("sweep", sort=False):
    for n_kv in sorted(measured.n_kv.unique(), reverse=True):
        mine = measured[measured.n_kv == n_kv]
        who = "SmolLM2" if sweep == "pretrained" else f"{sweep}, {f.label(n_kv, n_head[sweep])}"
        dense = q.accuracy(mine[mine.method == "dense"])
        for name, same in mine[mine.method != "dense"].groupby("name", sort=False):
            paired = 100 * (q.accuracy(same) - dense).dropna()
            said = (
                "as many as dense"
                if (paired == 0).all()
                else f"{tables.with_interval(paired, 1, True)} points, {tables.verdict(paired)}"
            )
            rows.append([who, name, said if len(paired) else "nothing to compare with: `retrieval.py cache=dense`"])
if rows:
    f.say("The share found, against the dense cache of the same weights on the same prompts:")
    f.say_table(["model", "cache", "found"], *rows)
else:
    f.say("No retrieval has been measured through a quantised cache.")
