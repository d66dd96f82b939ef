"""
The arithmetic before any training: what the KV cache of a model takes, what fits beside its weights, what a step costs.

    python budget.py shape=llama3-8b context=8192 batch=1 kv_dtype=fp16 memory=24GiB bandwidth=1000GB/s tp=1
    python budget.py shape=llama2-70b n_kv=64 memory=80GiB tp=8         were it MHA, over eight devices
    python budget.py shape=llama3-8b draft=smollm2-135m format=json     a draft's cache beside it; the numbers as JSON
    python budget.py shape=path/to/config.json                          a Hugging Face config, or a folder with one
    python budget.py ckpt=mha.pt memory=1GiB bandwidth=30GB/s           a checkpoint of train.py or uptrain.py
    python budget.py budget=robot shape=openvla-7b robot.history=3      does a robot policy meet its control rate?
    python budget.py budget=train shape=tinyllama-1.1b train.groups=2   what converting it to fewer KV heads takes

Prints bytes a token and for the context; MHA, GQA and MQA side by side; the tokens and conversations that fit beside the
weights; whether weights or cache weigh more, and from where on; the decode floor; precisions with scales, zero points and
windows counted; tensor parallel. Nothing is measured here: floors are what the memory allows, no more. `make calculator`
makes a page of the same functions.
"""

import json
import re
from dataclasses import asdict, dataclass

from arithmetic import BITS, budget, divisors, heads, readable, readable_seconds, resized, robot, shards, uptraining
from cli import InputError, nearest, script
from kv_cache.accounting import heads_per_device
from shapes import Shape, checkpoint_shape, find_shape

UNITS = {  # the last of each is the usual one
    "memory": {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "TiB": 2**40, "GiB": 2**30},
    "bandwidth": {"B/s": 1, "MB/s": 1e6, "TB/s": 1e12, "MiB/s": 2**20, "GiB/s": 2**30, "TiB/s": 2**40, "GB/s": 1e9},
    "compute": {"GFLOP/s": 1e9, "PFLOP/s": 1e15, "TFLOP/s": 1e12},
    "rate": {"kHz": 1e3, "Hz": 1},
}


def check_whole(key, value, least=1, most=2**32):
    if value is not None and not least <= value <= most:
        raise ValueError(f"{key}={value} is not allowed: a whole number from {least} to {most:,}")


@dataclass(frozen=True)
class Robot:
    cameras: int
    image_tokens: int
    prompt_tokens: int
    action_tokens: int
    history: int
    rate: str | int | float

    def __post_init__(self):
        for key in ("cameras", "image_tokens", "prompt_tokens", "action_tokens", "history"):
            check_whole(f"robot.{key}", getattr(self, key), most=2**20)


@dataclass(frozen=True)
class Train:
    groups: int
    tokens: float
    fraction: float
    utilisation: float
    price: float
    memory: str | int | float

    def __post_init__(self):
        check_whole("train.groups", self.groups, most=2**16)
        for key, least, most in (("tokens", 1, 1e18), ("fraction", 0, 100), ("utilisation", 1e-3, 1), ("price", 0, 1e6)):
            if not least <= getattr(self, key) <= most:
                raise ValueError(f"train.{key}={getattr(self, key):g} is not allowed: {least:g} to {most:g}")


@dataclass(frozen=True)
class Chosen:
    name: str | None


@dataclass(frozen=True)
class Settings:
    """configs/budget.yaml, where each key has its reason."""

    shape: Chosen
    ckpt: str | None
    n_layer: int | None
    n_kv: int | None
    head_dim: int | None
    context: int | None
    batch: int
    kv_dtype: str
    group: int
    residual: int
    weight_dtype: str
    memory: str | int | float  # a number without its unit is refused where the units are known
    bandwidth: str | int | float
    compute: str | int | float
    tp: int
    draft: str | None
    budget: str
    robot: Robot
    train: Train
    format: str

    def __post_init__(self):
        for key in ("n_layer", "n_kv", "head_dim", "context", "batch", "group", "residual", "tp"):
            check_whole(key, getattr(self, key), least=0 if key == "residual" else 1)
        allowed = {"kv_dtype": BITS, "weight_dtype": ("fp32", "fp16", "bf16", "fp8"), "budget": ("chat", "robot", "train"),
                   "format": ("table", "json")}  # fmt: skip
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                value = getattr(self, key)
                raise ValueError(f"{key}={value} is not allowed{nearest(value, values)} (it takes {', '.join(values)})")


def quantity(key, value):
    """'24GiB' as bytes, '5Hz' as steps a second, and so on. InputError naming the key, the units and the nearest one."""
    units = UNITS[key.split(".")[-1]]
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*([A-Za-z/]*)\s*", str(value))
    if match and match[2] not in units:
        what = f"unknown unit {match[2]}{nearest(match[2], units)}" if match[2] else "the unit is missing"
        raise InputError(f"{key}={value}: {what} (units: {', '.join(units)})")
    number = float(match[1]) * units[match[2]] if match else 0.0
    if not (1 if key.endswith("memory") else 1e-3) <= number < 1e24:  # there is no half a byte
        raise InputError(f"{key}={value} is not allowed: a sensible number and its unit, such as {key}=24{list(units)[-1]}")
    return int(number) if key.endswith("memory") else number


def setting(cfg):
    """(shape, s) of the script's settings: what to count, as plain dicts. InputError for what cannot be."""
    if cfg.ckpt is not None and cfg.shape.name is not None:
        raise InputError(f"give shape={cfg.shape.name} or ckpt={cfg.ckpt}, not both")
    if cfg.ckpt is not None:
        shape = checkpoint_shape(cfg.ckpt)
    else:
        shape = find_shape("shape", "llama3-8b" if cfg.shape.name is None else cfg.shape.name)
    dials = {key: getattr(cfg, key) for key in ("n_layer", "n_kv", "head_dim")}
    for key, value in dials.items():
        if value is not None and shape["latent"]:
            raise InputError(f"{key}={value}: {shape['name']} keeps a latent vector for all heads, it has no such dial")
    try:
        shape = asdict(Shape(**resized(shape, *(shape[key] if value is None else value for key, value in dials.items()))))
    except ValueError as error:
        raise InputError(str(error)) from None
    s = {key: getattr(cfg, key) for key in ("batch", "kv_dtype", "group", "residual", "weight_dtype", "tp")}
    s["context"] = cfg.context or shape["context"]
    s |= {key: quantity(key, getattr(cfg, key)) for key in ("memory", "bandwidth", "compute")}
    s["draft"] = None if cfg.draft is None else find_shape("draft", cfg.draft)
    for model in filter(None, (shape, s["draft"])):
        if not shards(model["n_head"], model["n_kv"], cfg.tp):
            fine = [tp for tp in divisors(model["n_head"]) if shards(model["n_head"], model["n_kv"], tp)]
            what = f"{model['n_head']} query and {model['n_kv']} KV heads of {model['name']}"
            raise InputError(f"tp={cfg.tp} cannot share the {what}: tp can be {fine}")
        if model["latent"] and cfg.kv_dtype.startswith("int"):
            raise InputError(f"kv_dtype={cfg.kv_dtype}: the latent cache of {model['name']} can be fp32, fp16, bf16 or fp8")
    return shape, s


def count(n, none):
    return none if n is None else f"{n:,}"


def some(n, what):
    """'1 KV head', '8,192 tokens'."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def columns(title, rows, align):
    """Print rows of text in aligned columns; align holds < or > for each column."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    print(f"\n{title}")
    for row in rows:
        print("  " + "  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(row, align, widths, strict=True)).rstrip())


def kind(shape, n_kv):
    return "latent" if shape["latent"] else heads(n_kv, shape["n_head"])


def print_budget(shape, s, b):
    own, tokens, sequences = b["own"], some(s["context"], "token"), some(s["batch"], "sequence")
    held = f"{some(shape['n_kv'], 'KV head')} of {shape['head_dim']}"
    if shape["latent"]:
        held = f"a latent vector of {shape['latent']} numbers"
    layers = f"{some(shape['n_layer'], 'layer')}, {some(shape['n_head'], 'query head')}"
    print(f"{shape['name']}: {layers}, {held}, {shape['params']:,} weights")
    if shape["windowed"]:
        of = "all" if shape["windowed"] == shape["n_layer"] else f"{shape['windowed']:,}"
        print(f"{of} of its layers hold no more than the newest {some(shape['window'], 'token')}")
    if s["tp"] > 1:
        held = "the whole latent cache" if shape["latent"] else some(heads_per_device(shape["n_kv"], s["tp"]), "KV head")
        print(f"on each of {s['tp']} devices: {held}")
    for model in (shape, s["draft"]):
        if model and s["context"] > model["context"]:
            print(f"note: {tokens} are more than the {model['context']:,} that {model['name']} was made for")
    if own["free_bytes"] < 0:
        left, fits = "nothing", f"the weights alone need {readable(-own['free_bytes'])} more"
    else:
        left = readable(own["free_bytes"])
        fits = f"fits {'any number of tokens' if own['tokens_fit'] is None else some(own['tokens_fit'], 'token')}, or "
        fits += f"{some(own['conversations_fit'], 'conversation')} of {tokens}"
    if own["free_bytes"] >= 0 and not own["fits"]:
        print(f"note: {sequences} of {tokens} do not fit beside the weights; their speed is what more memory would allow")
    longer = "at no length" if own["crossover_tokens"] is None else f"from {some(own['crossover_tokens'], 'token')} a sequence"
    wider = "with no number of them"
    if own["crossover_batch"] is not None:
        wider = f"from {some(own['crossover_batch'], 'sequence')} on"
    full = ", every window is full" if own["bytes_per_token"] == 0 else ""
    rows = [
        ("one more token", readable(own["bytes_per_token"]), f"{s['kv_dtype']}, in one sequence{full}"),
        (f"{tokens}, {sequences}", readable(own["cache_bytes"]), f"{own['cache_bytes']:,} bytes"),
        ("weights", readable(own["weight_bytes"]), f"{s['weight_dtype']}; a step reads {readable(own['weight_bytes_read'])} of them"),
    ]  # fmt: skip
    if b["draft"]:
        d = b["draft"]
        rows += [
            (f"draft {s['draft']['name']}, cache", readable(d["cache_bytes"]), f"a step of it takes at least {readable_seconds(d['floor_seconds'])}"),
            ("its weights", readable(d["weight_bytes"]), s["weight_dtype"]),
        ]  # fmt: skip
    rows += [
        (f"left of {readable(s['memory'])}", left, fits),
        ("a step reads more of", own["larger"], f"the cache leads {longer}, or {wider}"),
        ("decode floor", readable_seconds(own["floor_seconds"]), f"a step at {s['bandwidth'] / 1e9:,g} GB/s: at most {own['tokens_per_second']:,.1f} tokens/s"),
    ]  # fmt: skip
    columns("KV cache, weights, speed", rows, "<><")

    rows = [
        ("", "KV heads", "a token more", "cache", "weights", "tokens fit", "conversations", "cache leads from", "floor", "tokens/s"),
    ]  # fmt: skip
    for row in b["heads"]:
        rows.append((
            kind(shape, row["n_kv"]) + (" *" if row["n_kv"] == shape["n_kv"] else ""), str(row["n_kv"]),
            readable(row["bytes_per_token"]), readable(row["cache_bytes"]), readable(row["weight_bytes"]),
            count(row["tokens_fit"], "no limit"), f"{row['conversations_fit']:,}", count(row["crossover_tokens"], "nowhere"),
            readable_seconds(row["floor_seconds"]), f"{row['tokens_per_second']:,.1f}",
        ))  # fmt: skip
    columns(f"The dial, at {tokens} and {sequences} (* as asked for)", rows, "<>>>>>>>>>")

    rows = [("", "cache", "bits a value", "of which")]
    for row in b["precision"]:
        parts = ", ".join(f"{name} {readable(n)}" for name, n in row["parts"].items()) if len(row["parts"]) > 2 else ""
        name = row["kv_dtype"] + (" *" if row["kv_dtype"] == s["kv_dtype"] else "")
        rows.append((name, readable(row["cache_bytes"]), f"{row['bits_per_value']:.2f}", parts))
    how = f"intN: groups of {s['group']}, newest {s['residual']} tokens in 16 bits"
    columns(f"Precision, every stored byte counted ({how})", rows, "<>><")

    tps = sorted({d["tp"] for row in b["parallel"] for d in row["devices"]})
    if len(tps) > 5:  # more columns than a line has room for
        tps = [tp for tp in tps if tp in (1, 2, 4, 8, s["tp"])]
    rows = [("devices", *map(str, tps))]
    for row in b["parallel"]:
        at = {d["tp"]: d for d in row["devices"]}
        cells = [f"{readable(at[tp]['each'])} / {readable(at[tp]['total'])}" if tp in at else "–" for tp in tps]
        rows.append((kind(shape, row["n_kv"]), *cells))
    columns("Tensor parallel: cache on each device / on all", rows, "<" + ">" * len(tps))
    for tp in tps:
        each = {kind(shape, row["n_kv"]): d["each"] for row in b["parallel"] for d in row["devices"] if d["tp"] == tp}
        if tp > 1 and len(each) > 2 and list(each.values())[-1] == list(each.values())[-2]:
            grouped = list(each)[-2]
            one = readable(each["MQA"])
            print(f"  On {tp} devices MQA saves nothing over {grouped}: each holds one head, {one}, either way.")
            break


def print_robot(shape, s, r, b):
    period = readable_seconds(b["period_seconds"])

    def verdict(t, longest):
        longest = min((n for n in (longest, b["history_fits"]) if n is not None), default=None)
        history = {0: "no history", None: "any history"}.get(longest, f"a history of up to {longest}")
        does = "misses" if t > b["period_seconds"] else "meets" if b["fits"] else "would meet"
        return f"{does} the {period} of a control step; {history} fits and meets it"

    rows = [
        ("a control step", f"{b['tokens_per_step']:,} tokens", f"{r['cameras']:,} x {r['image_tokens']:,} of images, {r['action_tokens']:,} of the action"),
        (f"{r['history']:,} in the context", f"{b['context']:,} tokens", f"cache {readable(b['cache_bytes'])}; " + (
            f"memory for {count(b['history_fits'], 'any number')}" if b["fits"] else "does not fit beside the weights")),
        ("all read anew", readable_seconds(b["seconds"]), verdict(b["seconds"], b["history_meets"])),
        ("prefix reused", readable_seconds(b["seconds_reused"]), verdict(b["seconds_reused"], b["history_meets_reused"])),
    ]  # fmt: skip
    machine = f"{s['bandwidth'] / 1e9:,g} GB/s and {s['compute'] / 1e12:,g} TFLOP/s"
    columns(f"Robot, batch 1: at least this much time at {machine}", rows, "<><")
    print("  The language model alone: a vision tower's own time comes on top.")
    if b["context"] > shape["context"]:
        print(f"  note: {some(b['context'], 'token')} are more than the {shape['context']:,} that {shape['name']} was made for")


def print_train(shape, s, t, b):
    held = f"{some(shape['n_kv'], 'KV head')} of {shape['head_dim']}"
    print(
        f"{shape['name']}: {some(shape['n_layer'], 'layer')}, {some(shape['n_head'], 'query head')}, {held}, {shape['params']:,} weights"
    )
    hours, sequences = b["seconds"] / 3600, f"{some(s['batch'], 'sequence')} of {some(s['context'], 'token')}"
    rows = [
        ("tokens", f"{b['tokens']:,.0f}", f"{t['fraction']:.3g} of the {t['tokens']:,.0f} it was trained on"),
        ("steps", f"{b['steps']:,.0f}", f"of {sequences}"),
        ("operations", f"{b['operations']:.2e}", f"6 a weight and token; attention is {b['attention']:.0%} of them"),
        ("hours of one device", f"{hours:,.0f}", f"at {t['utilisation']:.0%} of {s['compute'] / 1e12:,g} TFLOP/s; {hours / 24:,.0f} days"),
        ("dollars", f"{b['dollars']:,.0f}", f"at {t['price']:.2f} an hour"),
    ]  # fmt: skip
    columns(f"Uptraining it to {some(t['groups'], 'KV head')}", rows, "<><")

    what = {"weights": "float32", "gradients": "float32", "AdamW": "two moments, float32", "bfloat16": "the weights in 16 bits"}
    rows = [(name, readable(n), what.get(name, sequences)) for name, n in b["parts"].items()]
    less = "shorter sequences (context=) need" if s["batch"] == 1 else "a smaller batch= needs"
    kept = sum(n for name, n in b["parts"].items() if name != "activations")
    fits = "fits" if b["fits"] else f"does not fit{f': {less} less' if kept < s['memory'] else ', whatever the batch'}"
    columns("Memory of the device", [*rows, ("all", readable(b["memory"]), f"of {readable(s['memory'])}: {fits}")], "<><")

    first = b["held"][0]["bytes_per_token"]
    rows = [
        ("", "KV heads", "weights", "a token more", "tokens held", f"sequences of {s['context']:,}", "cache of the parent's")
    ]
    for row in b["held"]:
        star = " *" if row["n_kv"] == t["groups"] else ""
        rows.append((
            heads(row["n_kv"], shape["n_head"]) + star, str(row["n_kv"]), f"{row['params']:,}", readable(row["bytes_per_token"]),
            f"{row['tokens_held']:,}", f"{row['sequences_held']:,}", f"{row['bytes_per_token'] / first:.3g}",
        ))  # fmt: skip
    columns(f"A server's KV cache of {readable(t['memory'])}, {s['kv_dtype']} (* as asked for)", rows, "<>>>>>>")


def training(cfg, shape):
    """The settings of budget=train as a dict. InputError for what uptrain.py does not convert."""
    t = asdict(cfg.train) | {"memory": quantity("train.memory", cfg.train.memory)}
    if shape["latent"] or shape["n_experts"]:
        raise InputError(f"budget=train: {shape['name']} has a latent cache or experts, which uptrain.py does not convert")
    if shape["n_kv"] % t["groups"]:
        fine = divisors(shape["n_kv"])
        raise InputError(f"train.groups={t['groups']} cannot be made of {shape['n_kv']} KV heads: it can be {fine}")
    return t


@script("budget", Settings)
def main(cfg):
    shape, s = setting(cfg)
    numbers, views = budget(shape, s), {}
    if cfg.budget == "robot":
        views["robot"] = asdict(cfg.robot) | {"rate": quantity("robot.rate", cfg.robot.rate)}
        numbers["robot"] = robot(shape, s, views["robot"])
    if cfg.budget == "train":
        views["train"] = training(cfg, shape)
        numbers["train"] = uptraining(shape, s, views["train"])
    if cfg.format == "json":
        print(json.dumps({"shape": shape, "setting": s | views, **numbers}, indent=2))
    elif cfg.budget == "train":  # its memory is that of a device that trains
        print_train(shape, s, views["train"], numbers["train"])
    else:
        print_budget(shape, s, numbers)
        if cfg.budget == "robot":
            print_robot(shape, s, views["robot"], numbers["robot"])


if __name__ == "__main__":
    main()
