# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Budget: what a model costs to serve, before anyone trains it
#
# How large a cache is follows from the shape of the model, so it can be known before there is a model at all.
# **How many conversations fit on a device, when does the cache outweigh the weights, and what do fewer bits or more
# devices change?**
#
# Nothing is measured or trained here, and no run is read. Every number comes from `arithmetic.py`, whose functions are
# also what `python budget.py` prints and what the calculator page computes. They count bytes; what a step takes is
# given as a floor, the time to read those bytes once. A real step takes longer, see `speed.ipynb`.

# %%
import sys

sys.path.extend((".", ".."))  # started in the repository's root, or in analysis/

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter

import arithmetic as a
from analysis import figures as f
from shapes import find_shape

shape = find_shape("shape", "llama3-8b")  # configs/shape/
s = {
    "context": 8192, "batch": 1, "kv_dtype": "fp16", "weight_dtype": "fp16", "memory": 24 * 2**30, "bandwidth": 1000e9,
    "tp": 1, "draft": None, "group": 32, "residual": 32,
}  # fmt: skip
n_head, context, memory = shape["n_head"], s["context"], a.readable(s["memory"])
arms = {n_kv: a.resized(shape, shape["n_layer"], n_kv, shape["head_dim"]) for n_kv in a.dial(shape)}
MANY = 32  # conversations at once
one = {n_kv: a.costs(arm, s) for n_kv, arm in arms.items()}
many = {n_kv: a.costs(arm, a.having(s, "batch", MANY)) for n_kv, arm in arms.items()}
names = {n_kv: a.heads(n_kv, n_head) for n_kv in arms}
COLORS = {n_kv: f.LOOKS.get(name, f.LOOKS["GQA-2"])[0] for n_kv, name in names.items()}  # one colour for grouped queries
DASHES = {n_kv: "--" if n_kv == n_head else ":" if n_kv == 1 else "-" for n_kv in arms}
NOTE = "#333333"

f.say(
    f"The model is `{shape['name']}`: {shape['n_layer']} layers, {n_head} query heads and {shape['n_kv']} KV heads of "
    f"{shape['head_dim']} numbers, {shape['params']:,} weights. Beside it, the same with as many KV heads as query heads "
    f"(MHA) and with one (MQA), whose projections for keys and values are larger or smaller accordingly. "
    f"A device has {memory} of memory and reads {s['bandwidth'] / 1e9:,.0f} GB/s."
)


def count(tokens):
    """A number of tokens for an axis: 1k is 1,024."""
    return f"{tokens:g}" if tokens < 2**10 else f"{tokens / 2**10:g}k" if tokens < 2**20 else f"{tokens / 2**20:g}M"


def axes_of(ax, low, high, step, bytes_low, bytes_high, bytes_step):
    """Tokens against bytes, both on log axes with a tick at every so many doublings from the low end on."""
    ax.set(xscale="log", yscale="log", xlim=(2**low, 2**high), ylim=(2**bytes_low, 2**bytes_high))
    ax.xaxis.set_major_locator(FixedLocator([2**k for k in range(low, high + 1, step)]))
    ax.yaxis.set_major_locator(FixedLocator([2**k for k in range(bytes_low, bytes_high + 1, bytes_step)]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda t, _: count(t)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda n, _: a.readable(n)))
    ax.minorticks_off()


# %% [markdown]
# ## What fits
#
# The weights have to be in memory before the first token. What is left is for the caches of all conversations together.

# %%
fig, axes = plt.subplots(1, 2, figsize=(f.WIDTH, 5.2), sharey=True)
own = one[shape["n_kv"]]
for ax, batch, costed in ((axes[0], 1, one), (axes[1], MANY, many)):
    axes_of(ax, 8, 17, 2, 23, 40, 3)
    held = [2**8, 2**17]
    ax.axhspan(own["free_bytes"], 2**40, color="#f1f1f1", lw=0, zorder=0)
    ax.axhline(own["free_bytes"], color=NOTE, linewidth=1.4)
    ax.axvline(context, color="#999999", linewidth=1, linestyle=(0, (1, 2)))
    for n_kv, arm in arms.items():
        line = {"color": COLORS[n_kv], "linestyle": DASHES[n_kv], "linewidth": 2.2}
        ax.plot(held, [a.cache_nbytes(arm, s, t, batch) for t in held], **line)
        nbytes = costed[n_kv]["cache_bytes"]
        ax.plot(context, nbytes, marker="o", markersize=7, color=COLORS[n_kv])
        beside = {"xytext": (-7, 3), "ha": "right", "va": "bottom"} if n_kv == n_head else {"xytext": (8, -8), "va": "center"}
        ax.annotate(a.readable(nbytes), (context, nbytes), textcoords="offset points", color=COLORS[n_kv], **beside)
    title = "one conversation" if batch == 1 else f"{batch} conversations"
    ax.set(xlabel="tokens held per conversation (1k = 1,024)", title=title)
for text, at in ((f"{context:,} tokens", (context, 2**23)), (a.readable(own["free_bytes"]), (2**11, own["free_bytes"]))):
    axes[0].annotate(text, at, (-4, 4), textcoords="offset points", ha="right", fontsize=10, color=NOTE)
axes[0].set_ylabel("bytes of the KV cache, all conversations")
keys = [
    plt.Line2D([], [], color=COLORS[n_kv], linestyle=DASHES[n_kv], linewidth=2.2,
               label=f"{names[n_kv]} ({n_kv} KV heads)" if n_kv > 1 else "MQA (1 KV head)") for n_kv in arms
]  # fmt: skip
room = f"more than {memory} leave beside {names[shape['n_kv']]}'s weights"
keys += [plt.Rectangle((0, 0), 1, 1, facecolor="#f1f1f1", edgecolor=NOTE, label=room)]
fig.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
fig.suptitle(f"KV cache of {shape['name']} in 16-bit floats, and what {memory} have room for")
f.show(fig, "budget")

# %%
for n_kv in arms:
    c, n = one[n_kv], one[n_kv]["conversations_fit"]
    f.say(
        f"**{names[n_kv]}**: one conversation of {context:,} tokens takes {a.readable(c['cache_bytes'])}; "
        f"{n:,} {'fits' if n == 1 else 'fit'} into the {a.readable(c['free_bytes'])} that the weights leave."
    )
longest = {
    n_kv: a.most(lambda n, n_kv=n_kv: a.cache_nbytes(arms[n_kv], s, n, MANY) <= one[n_kv]["free_bytes"]) for n_kv in arms
}  # fmt: skip
f.say_table(
    ["heads", "bytes a token", "weights", f"left of {memory}", "tokens that fit", f"conversations of {context:,}",
     f"cache of {MANY} of them", f"longest, {MANY} at once"],
    *([
        names[n_kv], a.readable(c["bytes_per_token"]), a.readable(c["weight_bytes"]), a.readable(c["free_bytes"]),
        f"{c['tokens_fit']:,}", f"{c['conversations_fit']:,}", a.readable(many[n_kv]["cache_bytes"]), f"{longest[n_kv]:,} tokens",
    ] for n_kv, c in one.items()),
)  # fmt: skip
ratio = one[n_head]["cache_bytes"] / own["cache_bytes"]
f.say(
    f"{names[shape['n_kv']]}'s cache is {ratio:g} times smaller than MHA's, but it has room for "
    f"{own['tokens_fit'] / one[n_head]['tokens_fit']:.2f} times as many tokens: its weights are smaller too, by "
    f"{a.readable(one[n_head]['weight_bytes'] - own['weight_bytes'])}. (The line in the figure is where "
    f"{names[shape['n_kv']]}'s weights put it.)"
)

# %% [markdown]
# Both axes of the figure are logarithmic, so a factor is a distance, and the three lines stay as far apart at any length.
# More conversations move all of them up by the same distance, while the room stays where it is.
#
# ## Weights against cache
#
# A decoding step reads the weights once, for all conversations together, and the cache of each. The less the cache is
# beside the weights, the less the number of KV heads matters for speed, and the cheaper another conversation is. From the
# crossing on, the cache is the larger part. (A table of embeddings that is only looked up is not read, so it does not
# count here.)

# %%
BATCHES = {1: "-", 8: "--", 32: ":"}
crossing = {
    (n_kv, batch): a.costs(arm, a.having(s, "batch", batch))["crossover_tokens"] for n_kv, arm in arms.items() for batch in BATCHES
}  # fmt: skip
fig, axes = plt.subplots(1, len(arms), figsize=(f.WIDTH, 5.2), sharey=True)
for ax, (n_kv, arm) in zip(axes, arms.items(), strict=True):
    axes_of(ax, 8, 21, 4, 23, 40, 3)
    read = one[n_kv]["weight_bytes_read"]
    ax.axhline(read, color="#bbbbbb", linewidth=5, zorder=1)
    for batch, dashes in BATCHES.items():
        held = [2**8, 2**21]
        ax.plot(held, [a.cache_nbytes(arm, s, t, batch) for t in held], color=COLORS[n_kv], linestyle=dashes)
        x = crossing[n_kv, batch]
        ax.vlines(x, 1, read, color="#999999", linewidth=1, linestyle=(0, (1, 2)))
        ax.plot(x, read, marker="o", markersize=9, markerfacecolor="white", markeredgecolor=NOTE, zorder=3)
        ax.annotate(f"{x:,}", (x, 0), (-2, 6), xycoords=("data", "axes fraction"), textcoords="offset points", ha="right",
                    va="bottom", rotation=90, fontsize=10, color=NOTE)  # fmt: skip
    ax.set(title=names[n_kv], xlabel="tokens per sequence")
axes[0].set_ylabel("bytes a decoding step reads")
keys = [plt.Line2D([], [], color=NOTE, linestyle=dashes, label=f"cache, batch {b}") for b, dashes in BATCHES.items()]
keys += [
    plt.Line2D([], [], color="#bbbbbb", linewidth=5, label="weights, once a step"),
    plt.Line2D([], [], marker="o", markersize=9, markerfacecolor="white", markeredgecolor=NOTE, linestyle="none",
               label="the cache overtakes, at so many tokens"),
]  # fmt: skip
fig.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
fig.suptitle(f"Where the cache overtakes the weights: {shape['name']}, 16-bit floats")
f.show(fig, "budget_crossover")

# %%
f.say_table(
    ["heads", "weights read", *(f"cache is more from, batch {batch}" for batch in BATCHES)],
    *([
        names[n_kv], a.readable(one[n_kv]["weight_bytes_read"]), *(f"{crossing[n_kv, batch]:,} tokens" for batch in BATCHES)
    ] for n_kv in arms),
)  # fmt: skip

# %% [markdown]
# The same for other shapes: from how many tokens a sequence on the cache is more than the weights. **Bold** is the model
# as it is, the others are what it would be with other KV heads. "Never": its layers look back only a window of the newest
# tokens, so their cache stops growing, and here it stops before it comes so far.

# %%
SHAPES = ("nanogqa", "gpt2-xl", "smollm2-1.7b", "qwen3-0.6b", "llama2-7b", "mistral-7b", "llama3-8b", "qwen3-8b", "llama2-70b",
          "llama3-70b")  # fmt: skip


def overtakes(arm, batch, mine):
    tokens = a.costs(arm, a.having(s, "batch", batch))["crossover_tokens"]
    text = "never" if tokens is None else f"{tokens:,}"
    return f"**{text}**" if mine else text


rows = []
for model in (find_shape("shape", name) for name in SHAPES):
    kinds = a.dial(model)
    others = [a.resized(model, model["n_layer"], n_kv, model["head_dim"]) for n_kv in kinds]
    cells = [overtakes(arm, batch, arm["n_kv"] == model["n_kv"]) for batch in (1, MANY) for arm in others]
    rows.append([model["name"], " / ".join(map(str, kinds)), *cells])
f.say_table(
    ["model", "KV heads", *(f"{kind}, batch {b}" for b in (1, MANY) for kind in ("MHA", "GQA", "MQA"))],
    *rows,
)

# %% [markdown]
# Now the time. Reading weights and cache once is the floor of a step: no decoder is faster on that memory.

# %%
f.say_table(
    [f"heads, {context:,} tokens", *(f"{what}, batch {batch}" for batch in (1, MANY) for what in ("cache / weights", "floor of a step",
     "at most, tokens/s"))],
    *([names[n_kv], *(cell for c in (one[n_kv], many[n_kv]) for cell in (
        f"{c['cache_bytes'] / c['weight_bytes_read']:.2f}", a.readable_seconds(c["floor_seconds"]), f"{c['tokens_per_second']:,.0f}"
    ))] for n_kv in arms),
)  # fmt: skip
for batch, costed in ((1, one), (MANY, many)):
    mha, gqa, mqa = (costed[n_kv]["floor_seconds"] for n_kv in arms)
    f.say(f"Batch {batch}: MHA's floor is {mha / gqa:.2f} times {names[shape['n_kv']]}'s and {mha / mqa:.2f} times MQA's.")

# %% [markdown]
# ## Fewer bits
#
# A cache can also hold its numbers in fewer bits. They are then codes, small whole numbers, and to turn a code back into
# a number takes a scale and a zero point for each group of them. And the newest tokens stay in 16 bits, since a group of
# keys can only be packed when it is complete (KIVI, arXiv 2402.02750). An honest count has all of it: divided by the
# number of values, it gives the *effective* bits.

# %%
precision = a.budget(shape, s)["precision"]
f.say(
    f"{shape['name']}, one conversation of {context:,} tokens, groups of {s['group']}, newest {s['residual']} tokens in 16 bits:"
)
PARTS = ("codes", "scales", "zeros", "window")
f.say_table(
    ["cache", "bytes", "effective bits a value", "codes", "scales", "zero points", "window", "16 bits / this"],
    *([
        row["kv_dtype"], a.readable(row["cache_bytes"]), f"{row['bits_per_value']:.2f}",
        *(a.readable(row["parts"][part]) if part in row["parts"] else "–" for part in PARTS),
        f"{own['cache_bytes'] / row['cache_bytes']:.2f}x",
    ] for row in precision),
)  # fmt: skip

# %%
DTYPES = {"int8": "#E69F00", "int4": "#56B4E9", "int2": "#CC79A7"}
WINDOWS = (s["residual"], 4 * s["residual"])


def packed(kv_dtype, residual):
    """The setting with codes of so many bits, and the newest `residual` tokens in 16."""
    return a.having(a.having(s, "kv_dtype", kv_dtype), "residual", residual)


def bits(kv_dtype, residual, tokens):
    """Effective bits: 16, times the bytes over those of the same values in 16 bits."""
    return 16 * a.cache_nbytes(shape, packed(kv_dtype, residual), tokens, 1) / a.cache_nbytes(shape, s, tokens, 1)


def first_packed(residual):
    """The tokens at which the first group is packed."""
    return a.smallest(lambda n: a.cache_parts(shape, packed("int8", residual), n, 1)["codes"] > 0)


assert all(bits(row["kv_dtype"], s["residual"], context) == row["bits_per_value"] for row in precision)
fig, axes = plt.subplots(1, len(WINDOWS), figsize=(f.WIDTH, 4.6), sharey=True)
held = range(2**4, context + 1)
for ax, residual in zip(axes, WINDOWS, strict=True):
    for kv_dtype, color in DTYPES.items():
        curve = [bits(kv_dtype, residual, t) for t in held]
        ax.plot(held, curve, color=color)
        ax.axhline(a.BITS[kv_dtype], color=color, linestyle=":", zorder=1)
        ax.annotate(f"{kv_dtype}\n{curve[-1]:.2f}", (held[-1], curve[-1]), (5, 0), textcoords="offset points", va="center",
                    color=NOTE, annotation_clip=False)  # fmt: skip
    ax.set(xscale="log", xlim=(held[0], held[-1]), ylim=(0, 17), xlabel="tokens held (1k = 1,024)",
           title=f"newest {residual} tokens in 16 bits")  # fmt: skip
    ax.xaxis.set_major_locator(FixedLocator([2**k for k in range(4, 14, 3)]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda t, _: count(t)))
    ax.yaxis.set_major_locator(FixedLocator([0, *(a.BITS[kv_dtype] for kv_dtype in DTYPES), 16]))
    ax.minorticks_off()
axes[0].set_ylabel("effective bits a value")
keys = [
    plt.Line2D([], [], color=NOTE, label="codes, scales, zero points and window"),
    plt.Line2D([], [], color=NOTE, linestyle=":", label="codes alone"),
]  # fmt: skip
fig.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
fig.suptitle(f"What a packed value really takes, by context: {shape['name']}, groups of {s['group']}")
f.show(fig, "budget_precision")

# %%
shown = (64, 256, 1024, 8192, 131072)
f.say_table(
    ["effective bits", "tokens in 16 bits", *(f"{t:,} tokens" for t in shown)],
    *([dtype, residual, *(f"{bits(dtype, residual, t):.2f}" for t in shown)] for residual in WINDOWS for dtype in DTYPES),
)
short, few, most = shown[1], "int2", "int8"
for residual in WINDOWS:
    f.say(
        f"With a window of {residual}, the first group is packed at {first_packed(residual)} tokens; below that nothing is "
        f"saved. At {short} tokens {few} takes {bits(few, residual, short):.1f} bits a value, not {a.BITS[few]}, and is "
        f"{bits(most, residual, short) / bits(few, residual, short):.2f} times smaller than {most}, not "
        f"{a.BITS[most] / a.BITS[few]:g}."
    )

# %% [markdown]
# Two things keep a value above the bits of its code. The window weighs on short contexts, and fades as the context grows.
# The scales and zero points do not fade: they are there for each group, so their share stays. The steps are groups
# being packed, one at a time.
#
# ## More devices
#
# Tensor parallelism shares the heads of each layer among devices. A KV head is not cut, so with more devices than KV
# heads each head is held more than once.

# %%
DEVICES = 16
parallel = {row["n_kv"]: row["devices"] for row in a.budget(shape, a.having(s, "tp", DEVICES))["parallel"]}
fig, axes = plt.subplots(1, 2, figsize=(f.WIDTH, 4.6), sharey=True)
for ax, what, title in ((axes[0], "each", "on each device"), (axes[1], "total", "on all devices together")):
    for i, (n_kv, devices) in enumerate(parallel.items()):
        marker = {"marker": "os^"[i], "markersize": (7, 7, 11)[i], "markerfacecolor": "none" if n_kv == 1 else COLORS[n_kv]}
        line = {"color": COLORS[n_kv], "linestyle": DASHES[n_kv], "linewidth": 2.2}
        label = f"{names[n_kv]} ({n_kv} KV head{'s' if n_kv > 1 else ''})"
        ax.plot([d["tp"] for d in devices], [d[what] for d in devices], label=label, **line, **marker)
    ax.set(xscale="log", yscale="log", xlabel="devices", title=title, ylim=(2**26, 2**33))
    ax.xaxis.set_major_locator(FixedLocator([d["tp"] for d in devices]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:.0f}"))
    ax.yaxis.set_major_locator(FixedLocator([2**k for k in range(26, 34)]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda n, _: a.readable(n)))
    ax.minorticks_off()
axes[0].set_ylabel("bytes of the KV cache")
handles, labels = axes[0].get_legend_handles_labels()
fig.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
fig.suptitle(f"KV cache over devices: {shape['name']}, one conversation of {context:,} tokens, 16 bits")
f.show(fig, "budget_parallel")

# %%
f.say_table(
    ["devices", *(f"{names[n_kv]}, each / all" for n_kv in parallel)],
    *(
        [row[0]["tp"], *(f"{a.readable(d['each'])} / {a.readable(d['total'])}" for d in row)]
        for row in zip(*parallel.values(), strict=True)
    ),
)
for n_kv, devices in list(parallel.items())[:-1]:
    same = [d["tp"] for d, alone in zip(devices, parallel[1], strict=True) if d["each"] == alone["each"]]
    if same:
        d = next(d for d in devices if d["tp"] == same[0])
        f.say(
            f"**On {same[0]} devices MQA saves nothing over {names[n_kv]}**: every device holds one head either way, "
            f"{a.readable(d['each'])}, {a.readable(d['total'])} on all of them."
        )
    else:
        f.say(f"{names[n_kv]} still has {devices[-1]['heads']} heads a device on {devices[-1]['tp']} devices.")

# %% [markdown]
# Llama 2's authors give this as a reason for eight KV heads: they serve their largest models on eight devices (arXiv
# 2307.09288, appendix A.2.1). On one device, a laptop's or a robot's, fewer than eight still save memory.
