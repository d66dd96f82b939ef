# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Quantised caches: how few bits a key and a value need
#
# Fewer key-value heads make the cache smaller by sharing. Fewer bits make it smaller by rounding, and the two multiply.
# **How many bits can go before the loss shows it, does it show sooner with fewer heads, and which tokens must stay exact?**
# Whether one exact token is still found is asked in [retrieval](retrieval.ipynb).
#
# Nothing is measured here: this notebook reads what `eval.py cache=…` and `calibrate.py` left. Every result in its text is
# computed from that.

# %%
import sys

sys.path.extend((".", ".."))  # started in the repository's root, or in analysis/

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from analysis import figures as f
from analysis import quant_tables as q
from analysis import tables
from storage import calibration_path

found, missing = q.load(f.SWEEP, f.RUNS)
if not found:
    raise ValueError("; ".join(missing))
quant, newest, _ = q.tables_of(found)
quant = quant.assign(name=[q.name_of(row) for row in quant.itertuples()])
losses = quant[quant.sweep == f.SWEEP]  # tiny models, several seeds
large = quant[quant.sweep == "pretrained"].reset_index(drop=True) if f.SWEEP != "pretrained" else quant[:0]
kinds = sorted(losses.n_kv.unique(), reverse=True)
n_head = {sweep: int(runs["model.n_head"].dropna().iloc[0]) for sweep, runs in found.items()}
f.say(*(f"*Not here:* {line}." for line in missing))
for sweep, rows in quant.groupby("sweep", sort=False):
    f.say(f"`{sweep}`: {len(rows)} evaluations through {rows.cache.nunique()} caches. {q.conditions(rows)}.")

# %% [markdown]
# ## What a number costs
#
# Codes are not all. KIVI keeps a scale and a zero point in 16 bits for 32 numbers, one bit a number together, and its newest
# tokens unrounded; KVQuant keeps tables, one scale and zero point a token, and outliers with their places. All of it is in
# *bits a number*, which `eval.py` counts from the tensors of a whole context, so what a cache keeps unrounded weighs more
# in a short one. Keys and values are 16-bit floats where they are not rounded, as servers keep them.
#
# The methods differ in what they never round. KIVI keeps the newest 32 tokens, and even with no window those of a group
# that is still open; KVQuant keeps one token, the first; fp8 rounds every token, the newest too. Where a model mostly looks
# at the last few tokens, that can matter more than the bits.
#
# ## The rule
#
# A change is the loss through the cache minus the loss without one, of the same weights on the same tokens. A cache costs
# *nothing measurable* when the 95 % interval of the changes, over the seeds, lies below +0.001 nats a token; it *costs* when
# it does not, and lies above zero; else these seeds cannot tell (*undecided*). One seed has no interval and no verdict.

# %%
for sweep, rows in quant.groupby("sweep", sort=False):
    header, *lines = (q.pretrained_summary if sweep == "pretrained" else q.quant_summary)(rows)
    f.say(f"**{sweep}**")
    f.say_table(header, *lines)

# %% [markdown]
# ## The loss against the bits
#
# A curve a method, from many bits to few; bars are 95 % intervals over the seeds. The Kullback-Leibler divergence of the
# cached predictions from the uncached ones is beside the loss, because it cannot cancel: right and wrong tokens alike count.

# %%
SERIES = (  # name, its rows, look: Okabe and Ito's colours, a marker and a line each
    (
        "KIVI",
        {"method": "kivi", "key_axis": "channel", "value_axis": "token", "residual": 32, "group": 32},
        ("#0072B2", "o", "-"),
    ),
    ("KVQuant, 1 % outliers", {"method": "kvquant", "outliers": 0.01, "sink": 1, "pre_rope": True}, ("#D55E00", "s", "--")),
    ("KVQuant, no outliers", {"method": "kvquant", "outliers": 0.0, "sink": 1, "pre_rope": True}, ("#CC79A7", "D", ":")),
    ("fp8 e4m3", {"method": "fp8", "format": "e4m3"}, ("#009E73", "^", "")),
    ("fp8 e5m2", {"method": "fp8", "format": "e5m2"}, ("#E69F00", "v", "")),
    ("dense, float16", {"method": "dense"}, ("#333333", "x", "")),
)


def pick(table, **options):
    """The rows of a table with these options."""
    for column, value in options.items():
        table = table[table[column].eq(value).fillna(False).astype(bool)]
    return table


def curve(ax, table, column):
    """Every method of SERIES in one panel -> the names of those that are there."""
    there = []
    for name, options, (color, marker, dashes) in SERIES:
        rows = pick(table, **options)
        points = []
        for _, same in rows.groupby("cache", sort=False):
            points.append((same.bits_per_value.mean(), *tables.interval(same[column])))
        if points:
            there.append(name)
            x, y, half = (np.array(values, dtype=float) for values in zip(*sorted(points), strict=True))
            if not dashes:
                x = x * 1.02 ** (np.arange(len(x)) - (len(x) - 1) / 2)  # three scales of fp8: as many bits, side by side
            ax.errorbar(
                x, y, yerr=None if np.isnan(half).all() else np.nan_to_num(half), color=color, marker=marker, markersize=6,
                linestyle=dashes or "none", capsize=3, elinewidth=1.2,
            )  # fmt: skip
    return there


def key_of(names):
    """Handles of a legend for these methods."""
    return [
        plt.Line2D([], [], color=color, marker=marker, linestyle=dashes or "none", label=name)
        for name, _, (color, marker, dashes) in SERIES
        if name in names
    ]


def bits_axis(ax):
    """A doubling of the bits is a distance, the same everywhere."""
    ax.set(xscale="log", xlabel="bits a number")
    ax.xaxis.set_major_locator(plt.FixedLocator([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32]))
    ax.xaxis.set_minor_locator(plt.NullLocator())
    ax.xaxis.set_major_formatter("{x:g}")


def change_axis(ax, changes, linear):
    """Changes of either sign: to scale up to `linear`, a factor ten a distance beyond."""
    ax.set_yscale("symlog", linthresh=linear)
    ax.set_ylim(min(-0.6 * linear, 1.5 * changes.min()), 5 * max(changes.max(), linear))
    ax.yaxis.set_major_locator(plt.FixedLocator([-linear, 0, *(linear * 10**k for k in range(9))]))
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:+g}" if v else "0")
    ax.yaxis.set_minor_locator(plt.NullLocator())


if len(losses):
    fig, axes = plt.subplots(2, len(kinds), figsize=(f.WIDTH, 6.4), sharex=True, sharey="row", squeeze=False)
    names = set()
    for (top, bottom), n_kv in zip(axes.T, kinds, strict=True):
        mine = losses[losses.n_kv == n_kv]
        names |= set(curve(top, mine, "difference"))
        curve(bottom, mine, "val_kl")
        top.axhspan(-1, q.MARGIN, color="#e8e8e8", zorder=0)
        top.set_title(f.label(n_kv, n_head[f.SWEEP]))
        bottom.set(yscale="log")
        bits_axis(bottom)
    least = losses.val_kl[losses.val_kl > 0].min()
    axes[1][0].set_ylim(bottom=least / 3)
    change_axis(axes[0][0], losses.difference, q.MARGIN)
    axes[0][0].set_ylabel("change of the loss,\nnats a token")
    axes[1][0].set_ylabel("KL from uncached,\nnats a token")
    handles = [*key_of(names), plt.Rectangle((0, 0), 1, 1, color="#e8e8e8", label=f"below {q.MARGIN:+g}")]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    fig.suptitle("Tiny models through quantised caches: mean over seeds and 95 % interval")
    f.show(fig, "quant")

# %%
if len(large):
    fig, (left, right) = plt.subplots(1, 2, figsize=(f.WIDTH, 4.4), sharex=True)
    names = curve(left, large, "perplexity_cached")
    curve(right, large, "val_kl")
    left.axhline(large.perplexity.iloc[0], color="#333333", linewidth=1.2)
    far = large.perplexity_cached.max() > 2 * large.perplexity.min()
    left.set(yscale="log" if far else "linear", ylabel="perplexity" + (" (log axis)" if far else ""))
    left.yaxis.set_major_formatter(lambda v, _: f"{v:,.4g}")
    left.yaxis.set_minor_formatter(plt.NullFormatter())
    if far:
        left.yaxis.set_major_locator(plt.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    right.set(yscale="log", ylabel="KL from uncached, nats a token")
    bits_axis(left)
    bits_axis(right)
    line = plt.Line2D([], [], color="#333333", linewidth=1.2, label="uncached")
    fig.legend(handles=[*key_of(names), line], loc="outside lower center", ncols=3, frameon=False)
    fig.suptitle("SmolLM2-135M (9 query heads, 3 KV heads) through quantised caches")
    f.show(fig, "quant_smollm2")

# %% [markdown]
# ### In words

# %%
lines = []
for n_kv in kinds:
    free, costly = [], []
    for _, rows in losses[losses.n_kv == n_kv].groupby("cache", sort=False):
        said = q.cost(rows.difference)
        (free if said == "nothing measurable" else costly if said == "costs" else []).append(rows)
    if free:
        best = min(free, key=lambda rows: rows.bits_per_value.mean())
        bits = best.bits_per_value.mean()
        lines.append(
            f"- **{f.label(n_kv, n_head[f.SWEEP])}**: of {losses[losses.n_kv == n_kv].cache.nunique()} caches {len(free)} cost "
            f"nothing measurable and {len(costly)} cost something. The smallest of the first is **{best.name.iloc[0]}**: {bits:.2f} bits a number, "
            f"{16 / bits:.2f} times fewer than 16-bit floats, {tables.with_interval(best.difference, digits=5, sign=True)} nats."
        )
    else:
        lines.append(f"- **{f.label(n_kv, n_head[f.SWEEP])}**: no cache has been shown to cost nothing measurable.")
if len(kinds) > 1:
    for _, options, _ in SERIES[:4]:
        rows = pick(losses, **options)
        rows = rows[rows.bits == rows.bits.min()].drop_duplicates(["n_kv", "seed"])
        few, many = (rows[rows.n_kv == n_kv].set_index("seed").difference for n_kv in (kinds[-1], kinds[0]))
        paired = (few - many).dropna()
        if len(paired):
            lines.append(
                f"- {rows.name.iloc[0]}, {tables.heads(kinds[-1], n_head[f.SWEEP])} against {tables.heads(kinds[0], n_head[f.SWEEP])}: the "
                f"changes differ by {tables.with_interval(paired, digits=5, sign=True)} nats, paired by seed, {tables.verdict(paired)}."
            )
f.say("\n".join(lines) if lines else "No loss of tiny models has been measured through a quantised cache.")

# %%
lines = []


def moved(rows):
    """'+0.123 (18.3 → 18.4)'."""
    row = rows.iloc[0]
    return f"{row.perplexity_cached - row.perplexity:+.3f} ({row.perplexity:.3f} → {row.perplexity_cached:.3f}, {row.bits_per_value:.2f} bits a number)"


kivi, kvquant = pick(large, bits=2, **SERIES[0][1]), pick(large, bits=3, **SERIES[1][1])
if len(kivi):
    lines.append(f"- KIVI reports 2 bits close to 16 bits on Llama-2-7B. Here, SmolLM2-135M: perplexity {moved(kivi)}.")
if len(kvquant):
    change = (kvquant.perplexity_cached - kvquant.perplexity).iloc[0]
    under = "under that" if change < 0.1 else "not under that"
    lines.append(
        f"- KVQuant reports less than 0.1 of perplexity at 3 bits with 1 % outliers on models of the Llama family. Here, "
        f"SmolLM2-135M: {moved(kvquant)}, **{under}**."
    )
if len(large):
    for limit in (0.01, 0.1, 1.0):
        fine = large[large.perplexity_cached - large.perplexity < limit]
        best = fine.loc[fine.bits_per_value.idxmin()] if len(fine) else None
        lines.append(
            f"- Fewest bits within {limit:g} of the uncached perplexity: "
            + (f"{best['name']}, {best.bits_per_value:.2f} bits a number." if best is not None else "none of these caches.")
        )
    lines.append("- This is one model and one text: there is no interval, and the words above are not a verdict.")
f.say("\n".join(lines) if lines else "SmolLM2 has not been measured.")

# %% [markdown]
# ## Which tokens must not be rounded
#
# KIVI never rounds the newest tokens, KVQuant and fp8 round every one. How much of their difference is that? `newest=n`
# asks the loss: every key and value is coded, with no window at all, but each token sees its n newest tokens exactly. At 0
# the codes alone are compared. In the tables also: with all keys, or all values, exact, whose rounding is it that costs?

# %%
ROUNDED = (  # name, its rows, look
    ("KIVI, keys by channel", {"method": "kivi", "bits": 2, "key_axis": "channel"}, ("#0072B2", "o", "-")),
    ("KIVI, keys by token", {"method": "kivi", "bits": 2, "key_axis": "token"}, ("#56B4E9", "v", "-.")),
    ("KVQuant, 2 bits", {"method": "kvquant", "bits": 2}, ("#D55E00", "s", "--")),
    ("KVQuant, 3 bits", {"method": "kvquant", "bits": 3}, ("#CC79A7", "D", ":")),
)
panels = [((f.SWEEP, n_kv), rows) for n_kv, rows in sorted(newest[newest.sweep == f.SWEEP].groupby("n_kv"), reverse=True)]
panels += [(("pretrained", n_kv), rows) for n_kv, rows in newest[newest.sweep == "pretrained"].groupby("n_kv")]
if panels:
    fig, axes = plt.subplots(1, len(panels), figsize=(f.WIDTH, 4.4), sharey=True, squeeze=False)
    for ax, ((sweep, n_kv), rows) in zip(axes[0], panels, strict=True):
        for _, options, (color, marker, dashes) in ROUNDED:
            points = [
                (n, *tables.interval(same.difference)) for n, same in pick(rows[rows.exact.isna()], **options).groupby("newest")
            ]
            if points:
                x, y, half = (np.array(values, dtype=float) for values in zip(*points, strict=True))
                ax.errorbar(
                    x, y, yerr=None if np.isnan(half).all() else half, color=color, marker=marker, linestyle=dashes, capsize=3
                )
        ax.set_title("SmolLM2-135M" if sweep == "pretrained" else f.label(n_kv, n_head[sweep]), fontsize=11)
        ax.set_xscale("symlog", base=2, linthresh=1)
        ax.set_xticks(sorted(rows.newest.unique()), [f"{n:,}" for n in sorted(rows.newest.unique())], fontsize=9)
        ax.xaxis.set_minor_locator(plt.NullLocator())
        ax.set_xlabel("newest tokens exact", fontsize=11)
    change_axis(axes[0][0], newest.difference, q.MARGIN)
    axes[0][0].set_ylabel("change of the loss, nats a token")
    handles = [
        plt.Line2D([], [], color=color, marker=marker, linestyle=dashes, label=name)
        for name, _, (color, marker, dashes) in ROUNDED
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    fig.suptitle("All tokens in codes but the newest ones")
    f.show(fig, "quant_newest")
for sweep, rows in newest.groupby("sweep", sort=False):
    header, *lines = q.newest_summary(rows)
    f.say(f"**{sweep}**: {q.conditions(rows)}.")
    f.say_table(header, *lines)
if not panels:
    f.say("Not measured: `eval.py newest=…`.")

# %% [markdown]
# ## Keys by channel, or by token
#
# KIVI's claim: keys have channels that are large in every token, so a scale should belong to a channel; a scale that
# belongs to a token has to span those channels, and the rest of the token is rounded coarsely. The window of newest tokens
# may hide it, so the same without the window.

# %%
AXES = [(axis, window) for window in (32, 0) for axis in ("channel", "token")]


def axes_rows(table, axis, window):
    return pick(table, method="kivi", bits=2, key_axis=axis, value_axis="token", residual=window)


kivi2 = [(losses, "difference", "loss, nats a token", q.MARGIN, "tiny models")]
kivi2 += [(large.assign(moved=large.perplexity_cached - large.perplexity), "moved", "perplexity", 0.1, "SmolLM2-135M")]
kivi2 = [panel for panel in kivi2 if any(len(axes_rows(panel[0], *where)) for where in AXES)]
if kivi2:
    fig, axes = plt.subplots(1, len(kivi2), figsize=(f.WIDTH, 4.3), squeeze=False)
    for ax, (table, column, unit, linear, title) in zip(axes[0], kivi2, strict=True):
        heads = sorted(table.n_kv.unique(), reverse=True)
        for i, n_kv in enumerate(heads):
            style = {"color": "#333333", "marker": "o", "linestyle": "none"}
            style = f.look(n_kv, n_head[f.SWEEP], line=False) if table is losses else style
            for x, where in enumerate(AXES):
                changes = axes_rows(table[table.n_kv == n_kv], *where)[column]
                if len(changes):
                    mean, half = tables.interval(changes)
                    at = x + 0.2 * (i - (len(heads) - 1) / 2)
                    ax.errorbar(at, mean, yerr=None if half != half else half, capsize=4, **style)
                    if table is not losses:
                        ax.annotate(f"{mean:+.3g}", (at, mean), (0, 9), textcoords="offset points", ha="center")
        change_axis(ax, table[column][table.method.eq("kivi") & table.bits.eq(2)], linear)
        ax.axhline(0, color="#333333", linewidth=1)
        ax.axvline(1.5, color="#bbbbbb", linewidth=1)
        ax.grid(False, axis="x")
        ax.set_xticks(range(len(AXES)), [axis for axis, _ in AXES])
        ax.set_xticks([0.5, 2.5], ["window of 32", "no window"], minor=True)
        ax.tick_params(axis="x", which="minor", length=0, pad=22)
        ax.set(title=title, ylabel=f"change of the {unit}", xlabel="keys share a scale by", xlim=(-0.6, len(AXES) - 0.4))
    handles = [
        plt.Line2D([], [], label=f.label(n_kv, n_head[f.SWEEP]), **f.look(n_kv, n_head[f.SWEEP], line=False)) for n_kv in kinds
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)
    fig.suptitle("KIVI at 2 bits: keys by channel (the paper's way) and by token")
    f.show(fig, "quant_axes")

# %%
lines = []
for window in (32, 0):
    for n_kv in kinds:
        mine = losses[losses.n_kv == n_kv]
        by_channel, by_token = (axes_rows(mine, axis, window).set_index("seed").difference for axis in ("channel", "token"))
        paired = (by_token - by_channel).dropna()
        if len(paired):
            lines.append(
                f"- {f.label(n_kv, n_head[f.SWEEP])}, {f'window {window}' if window else 'no window'}: by token minus by channel "
                f"{tables.with_interval(paired, digits=5, sign=True)} nats, {tables.verdict(paired)}."
            )
    by_channel, by_token = (axes_rows(large, axis, window) for axis in ("channel", "token"))
    if len(by_channel) and len(by_token):
        a, b = (float((r.perplexity_cached - r.perplexity).iloc[0]) for r in (by_channel, by_token))
        lines.append(
            f"- SmolLM2, {f'window {window}' if window else 'no window'}: perplexity {a:+.3f} by channel, {b:+.3f} by token: by "
            f"**{'channel' if a < b else 'token'}** is better."
        )
f.say("\n".join(lines) if lines else "Only one of the two has been measured.")

# %% [markdown]
# ## What keys and values look like
#
# Magnitudes from `calibrate.py`: a row a channel, a column a token, of the layer whose keys have the widest channel. Rotary
# positions turn pairs of channels, so that a channel that was large in every token may come and go with the position, the
# faster the earlier the pair is in its head. That is why KVQuant rounds keys before they are turned. Learned positions (the
# `gpt2` dialect) turn nothing.

# %%
OUTLIER = 3  # a channel that reaches further than three median channels
NAMES = {"keys": "keys", "turned": "keys, turned", "values": "values"}


def calibrations():
    """(title, n_kv, path of the checkpoint) of every model that could have been calibrated."""
    for sweep in found:
        if sweep == "pretrained":
            yield "SmolLM2-135M", 3, f.RUNS.parent / "checkpoints" / "smollm2.pt"
            continue
        seen = {
            (r["n_kv"], r["seed"], r["parent.name"])
            for r in found[sweep].to_dict("records")
            if isinstance(r.get("parent.name"), str)
        }
        for n_kv, _, name in sorted(seen, key=lambda s: (-s[0], s[1])):
            yield f"{sweep}, n_kv {n_kv}", n_kv, f.RUNS / sweep / name / "last.pt"


models, lacking = {}, []
for title, n_kv, path in calibrations():
    file = calibration_path(path)
    loaded = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
    if "reach" in loaded:
        models.setdefault(title, []).append((n_kv, loaded["reach"], loaded["picture"]))
    else:
        again = f"ckpt={path.name}" if "SmolLM2" in title else f"sweep={title.partition(',')[0]}"
        lacking.append(
            f"*Not here:* pictures of {title.partition(',')[0]}; `python calibrate.py {again} again=true` makes them."
        )
f.say(*dict.fromkeys(lacking))

rows, lines = [], []
for title, several in models.items():
    cells, share = [], {}
    for kind in NAMES:
        reach = (
            torch.cat([r[kind].float() for _, r, _ in several if kind in r]) if kind in several[0][1] else None
        )  # [layers, C]
        ratio = reach.amax(dim=1) / reach.median(dim=1).values if reach is not None else None
        cells.append("–" if ratio is None else f"{ratio.median():.1f}, at most {ratio.max():.1f}")
        if ratio is not None:
            share[kind] = (ratio > OUTLIER).sum().item(), len(ratio)
    rows.append([title, len(several), several[0][1]["keys"].size(0), *cells])
    there = "; ".join(f"{NAMES[kind]} in {n} of {total}" for kind, (n, total) in share.items())
    lines.append(f"- **{title}**: layers with a channel that reaches further than {OUTLIER} median channels: {there}.")
if rows:
    f.say("Widest channel over the median channel of a layer: the median layer, and the most extreme one.")
    f.say_table(["model", "checkpoints", "layers", *NAMES.values()], *rows)
    f.say("\n".join(lines))

# %%
drawn = {}
for title, several in models.items():  # of a sweep, the first: most heads, lowest seed
    drawn.setdefault(title.partition(",")[0], (title, *several[0]))
drawn = sorted(drawn.values(), key=lambda d: "SmolLM2" not in d[0])
if drawn:
    fig, axes = plt.subplots(len(drawn), 3, figsize=(f.WIDTH, 0.6 + 2.5 * len(drawn)), squeeze=False)
    for line, (title, n_kv, reach, picture) in zip(axes, drawn, strict=True):
        for ax, (kind, said) in zip(line, NAMES.items(), strict=True):
            if kind not in reach:
                ax.text(
                    0.5, 0.5, "positions are learned:\nkeys are not turned", ha="center", va="center", transform=ax.transAxes
                )
                ax.set_axis_off()
                continue
            x = picture[kind][:64].float().abs().T  # [C, tokens]: half of them, to be seen
            image = ax.imshow(x, aspect="auto", interpolation="nearest", cmap="magma", vmin=0, origin="lower")
            bar = fig.colorbar(image, ax=ax, pad=0.02)
            bar.ax.tick_params(labelsize=9)
            for head in range(1, n_kv):
                ax.axhline(head * len(x) / n_kv - 0.5, color="white", linewidth=0.4, alpha=0.7)
            ax.grid(False)
            if title == drawn[0][0]:
                ax.set_title(said)
            if title == drawn[-1][0]:
                ax.set_xlabel("token")
        line[0].set_ylabel(f"{title}, layer {picture['layer']}\nchannel", fontsize=10)
    fig.suptitle("Magnitudes, a scale a panel; white lines part the KV heads")
    f.show(fig, "quant_magnitudes")

# %% [markdown]
# ## Speed
#
# Reading fewer bytes is not yet being faster: codes have to be unpacked. `make bench-caches` times a decoding step over each
# kind of cache, the kinds taking turns, with the same weights: a ratio is that of two neighbours in time.

# %%
path = f.ROOT / "results" / "caches.csv"
if path.exists():
    timed = pd.read_csv(path)
    first = timed.iloc[0]
    f.say(f"{first.context:,} tokens and more held, {first.threads} threads, {first.machine}, commit {first.commit}.")
    f.say_table(
        ["n_kv", "batch", "cache", "tokens/s", "speed / dense float32", "a step reads, MB: weights + cache", "cache, dense / this"],
        *([
            row.n_kv, row.batch, row.cache, f"{row.tokens_per_s:,.0f}", f"{row.to_dense:.2f}x",
            f"{row.weight_bytes / 1e6:.0f} + {row.kv_bytes / 1e6:,.1f}",
            f"{same.kv_bytes.iloc[0] / row.kv_bytes:.2f}x",
        ] for _, same in timed.groupby(["n_kv", "batch"], sort=False) for row in same.itertuples()),
    )  # fmt: skip
    best = timed[timed.cache != "dense-float32"].groupby(["n_kv", "batch"], sort=False)
    for (n_kv, batch), same in best:
        top = same.loc[same.to_dense.idxmax()]
        f.say(f"n_kv {n_kv}, batch {batch}: the fastest beside it is {top.cache}, {top.to_dense:.2f}x.")
else:
    f.say("Not measured yet.")

# %% [markdown]
# ## What it means
#
# Bits a number is the honest axis: two bits of codes are three bits of memory, and more in a short context, where windows,
# scales and tables weigh most. A method that looks free in the loss has to be asked for one exact token too. And what holds
# for models of a few million weights on a few hundred tokens need not hold for a large one: the direction of each
# comparison is worth more here than its size.
