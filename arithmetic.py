"""
What a model costs to serve, as plain arithmetic: budget.py prints it, and calculator/build.py turns these very functions
into the page's JavaScript. So they keep to plain Python: numbers, lists, dicts; nothing imported but the cache's formulas.

A `shape` is a shapes.Shape as a dict. A setting `s` is a dict too: context and batch (tokens, sequences), kv_dtype with
group and residual, weight_dtype, memory (bytes) and bandwidth (bytes/s) and compute (operations/s) of each device, tp
(tensor-parallel devices), draft (a second shape, or None). Bytes are those of one device where not said otherwise.
"""

from kv_cache.accounting import dense_nbytes, heads_per_device, kivi_nbytes, kivi_packed, latent_nbytes

BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "int2": 2}  # intN: KIVI, with scales and zeros
ROWS = ["fp16", "fp8", "int8", "int4", "int2"]  # of the table of precisions


def having(values, key, value):
    """A copy with one value changed."""
    other = dict(values)
    other[key] = value
    return other


def heads(n_kv, n_head):
    """What a number of KV heads is called."""
    return "MHA" if n_kv == n_head else "MQA" if n_kv == 1 else f"GQA-{n_kv}"


def attention_params(shape):
    """Weights of one layer's query, key, value and output projections (biases of the first three included)."""
    n_head, n_kv, head_dim = shape["n_head"], shape["n_kv"], shape["head_dim"]
    biases = (n_head + 2 * n_kv) * head_dim if shape["qkv_bias"] else 0
    return 2 * shape["n_embd"] * (n_head + n_kv) * head_dim + biases


def resized(shape, n_layer, n_kv, head_dim):
    """The shape with another number of layers, KV heads or numbers a head. Its weights follow, all else stays."""
    other = having(having(having(shape, "n_layer", n_layer), "n_kv", n_kv), "head_dim", head_dim)
    others = shape["params"] - shape["outside"] - shape["n_layer"] * attention_params(shape)  # feed-forward, norms
    other["params"] = shape["outside"] + others * n_layer // shape["n_layer"] + n_layer * attention_params(other)
    other["expert_params"] = shape["expert_params"] * n_layer // shape["n_layer"]
    other["windowed"] = (2 * shape["windowed"] * n_layer + shape["n_layer"]) // (2 * shape["n_layer"])  # rounded
    return other


def cache_parts(shape, s, tokens, batch):
    """Bytes on each device of the caches of `batch` sequences of `tokens` tokens, by component."""
    n_layer, windowed, bits = shape["n_layer"], shape["windowed"], BITS[s["kv_dtype"]]
    if shape["latent"]:  # one vector for all heads: every device needs all of it
        return {"latent": latent_nbytes(n_layer, shape["latent"], tokens, batch, bits // 8)}
    n_kv, head_dim = heads_per_device(shape["n_kv"], s["tp"]), shape["head_dim"]
    near = min(tokens, shape["window"]) if windowed else 0  # tokens held by a layer with a sliding window
    if s["kv_dtype"].startswith("int"):
        parts = kivi_nbytes(n_layer - windowed, n_kv, head_dim, tokens, batch, bits, s["group"], s["residual"])
        more = kivi_nbytes(windowed, n_kv, head_dim, near, batch, bits, s["group"], s["residual"])
        for name in more:
            parts[name] += more[name]
        return parts
    far = dense_nbytes(n_layer - windowed, n_kv, head_dim, tokens, batch, bits // 8)
    both = far + dense_nbytes(windowed, n_kv, head_dim, near, batch, bits // 8)
    return {"keys": both // 2, "values": both // 2}


def cache_nbytes(shape, s, tokens, batch):
    """Bytes on each device of the caches of `batch` sequences of `tokens` tokens."""
    return sum(cache_parts(shape, s, tokens, batch).values())


def device_params(shape, tp):
    """Weights each device holds: an even share, but the projections of its KV heads whole when heads are replicated."""
    if shape["latent"]:
        return (shape["params"] + tp - 1) // tp
    one = shape["n_layer"] * 2 * shape["head_dim"] * (shape["n_embd"] + (1 if shape["qkv_bias"] else 0))  # of one KV head
    others = shape["params"] - one * shape["n_kv"]
    return (others + tp - 1) // tp + one * heads_per_device(shape["n_kv"], tp)


def read_params(shape, tp, batch):
    """
    Of a device's weights those that one decoding step reads: not the tables of which it looks up a row a token, and of a
    mixture only the experts that `batch` tokens are expected to choose, if they choose evenly.
    """
    skipped = shape["unread"]
    if shape["n_experts"]:
        skipped += shape["expert_params"] * ((shape["n_experts"] - shape["n_active"]) / shape["n_experts"]) ** batch
    return device_params(shape, tp) - int(skipped / tp)


def smallest(holds):
    """The smallest of 1 .. 2^40 for which `holds` is true, given that it stays true from there on; None if there is none."""
    low, high = 0, 1
    while not holds(high):
        low, high = high, high * 2
        if high > 2**40:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def most(fits):
    """The largest number from 0 on for which `fits` is true, given that it stays false from there on; None: no limit."""
    beyond = smallest(lambda n: not fits(n))
    return None if beyond is None else beyond - 1


def floor_seconds(weight_bytes, cache_bytes, bandwidth):
    """The least a decoding step can take: its bytes, each read once, at the memory's bandwidth in bytes per second."""
    return (weight_bytes + cache_bytes) / bandwidth


def free_nbytes(shape, s):
    """What a device's memory has left beside the weights, the draft's included; negative when they do not fit."""
    both = device_params(shape, s["tp"]) + (device_params(s["draft"], s["tp"]) if s["draft"] else 0)
    return s["memory"] - both * BITS[s["weight_dtype"]] // 8


def peak_nbytes(shape, s, tokens):
    """
    The most that a conversation's caches, the draft's included, took on their way to `tokens` tokens. Packing a group makes
    a KIVI cache smaller, so that may have been just before the last group was packed, also in a layer whose window is full.
    """
    most_bytes = 0
    models = [shape, s["draft"]] if s["draft"] else [shape]
    for end in [tokens] + [min(tokens, model["window"]) for model in models if model["window"]]:
        packed = kivi_packed(end, s["group"], s["residual"])
        for length in [tokens, packed + s["residual"] - 1 if packed else tokens]:
            most_bytes = max(most_bytes, sum([cache_nbytes(model, s, length, 1) for model in models]))
    return most_bytes


def costs(shape, s):
    """What one shape takes on each device, what fits, and what a step can cost at best. Bytes, seconds."""
    context, batch, tp = s["context"], s["batch"], s["tp"]
    itemsize = BITS[s["weight_dtype"]] // 8
    read = read_params(shape, tp, batch) * itemsize
    cache = cache_nbytes(shape, s, context, batch)
    floor = floor_seconds(read, cache, s["bandwidth"])
    free = free_nbytes(shape, s)
    conversation = peak_nbytes(shape, s, context)
    alone = having(s, "draft", None)
    group = s["group"]  # what one more token takes, over a whole group, for a cache that packs them by groups
    return {
        "n_kv": shape["n_kv"],
        "bytes_per_token": (cache_nbytes(shape, s, context + group, 1) - cache_nbytes(shape, s, context, 1)) / group,
        "conversation_bytes": cache_nbytes(shape, s, context, 1),
        "cache_bytes": cache,
        "cache_bytes_all_devices": cache * tp,
        "weight_bytes": device_params(shape, tp) * itemsize,
        "weight_bytes_read": read,
        "free_bytes": free,
        "fits": batch * conversation <= free,
        "tokens_fit": most(lambda n: peak_nbytes(shape, s, n) <= free),
        "conversations_fit": max(0, free) // conversation,
        "larger": "cache" if cache > read else "weights",
        "crossover_tokens": smallest(lambda n: batch * peak_nbytes(shape, alone, n) > read),
        "crossover_batch": smallest(lambda n: cache_nbytes(shape, s, context, n) > read_params(shape, tp, n) * itemsize),
        "floor_seconds": floor,
        "tokens_per_second": batch / floor,
    }


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def dial(shape):
    """The KV heads to compare: all query heads (MHA), this shape's own or else a quarter of them up to 8 (GQA), one (MQA)."""
    if shape["latent"]:
        return [shape["n_kv"]]
    n_head, n_kv = shape["n_head"], shape["n_kv"]
    if n_kv == n_head or n_kv == 1:
        n_kv = max([d for d in divisors(n_head) if (4 * d <= n_head and d <= 8) or d == 1])
    return [n_head, n_kv, 1] if 1 < n_kv < n_head else [n_head, 1] if n_head > 1 else [1]


def shards(n_head, n_kv, tp):
    """Whether tp devices can share the heads: query heads evenly, KV heads evenly or each on as many devices."""
    return n_head % tp == 0 and (n_kv % tp == 0 or tp % n_kv == 0)


def budget(shape, s):
    """All numbers of a shape under a setting, as plain values: what is printed, format=json, and the page."""
    arms, precision, parallel = [], [], []
    for n_kv in dial(shape):
        other = resized(shape, shape["n_layer"], n_kv, shape["head_dim"])
        if shards(shape["n_head"], n_kv, s["tp"]):
            arms.append(costs(other, s))
        devices = []
        for tp in divisors(shape["n_head"]):
            if (tp <= 8 or tp == s["tp"]) and shards(shape["n_head"], n_kv, tp):
                each = cache_nbytes(other, having(s, "tp", tp), s["context"], s["batch"])
                held = 1 if shape["latent"] else heads_per_device(n_kv, tp)
                devices.append({"tp": tp, "heads": held, "each": each, "total": each * tp})
        parallel.append({"n_kv": n_kv, "devices": devices})
    values = cache_nbytes(shape, having(s, "kv_dtype", "fp16"), s["context"], s["batch"]) / 2
    for kv_dtype in ROWS if s["kv_dtype"] in ROWS else [s["kv_dtype"]] + ROWS:
        if shape["latent"] and kv_dtype.startswith("int"):
            continue
        setting = having(s, "kv_dtype", kv_dtype)
        parts = cache_parts(shape, setting, s["context"], s["batch"])
        total = sum(parts.values())
        precision.append({"kv_dtype": kv_dtype, "parts": parts, "cache_bytes": total, "bits_per_value": 8 * total / values})
    return {
        "own": costs(shape, s),
        "draft": costs(s["draft"], having(s, "draft", None)) if s["draft"] else None,
        "heads": arms,
        "precision": precision,
        "parallel": parallel,
    }


def pairs(tokens, past, window):
    """How many pairs of a query and a key: `tokens` new tokens after `past`, each seeing itself and the `window` before."""
    growing = max(0, min(tokens, window - past))  # these see all there is
    return growing * past + growing * (growing + 1) / 2 + (tokens - growing) * window


def prefill_seconds(shape, s, tokens, past):
    """
    The least that reading `tokens` new tokens after `past` held ones can take: the bytes at the memory's bandwidth, or the
    operations at the compute rate (2 a weight and token, the head's only for the last one; 4 x head_dim a query head and
    pair of tokens), whichever is more.
    """
    tp, windowed = s["tp"], shape["windowed"]
    weight_bytes = read_params(shape, tp, tokens) * BITS[s["weight_dtype"]] // 8
    memory = floor_seconds(weight_bytes, cache_nbytes(shape, s, past + tokens, 1), s["bandwidth"])
    head = (shape["outside"] - shape["unread"]) / tp
    seen = (shape["n_layer"] - windowed) * pairs(tokens, past, past + tokens)
    if windowed:
        seen += windowed * pairs(tokens, past, shape["window"])
    attention = 4 * shape["n_head"] * shape["head_dim"] * seen / tp
    operations = 2 * (read_params(shape, tp, 1) - head) * tokens + 2 * head + attention
    return max(memory, operations / s["compute"])


def robot(shape, s, r):
    """
    A control step of a policy: images in, action tokens out, at batch 1. `once`: everything before is read anew every
    step; `reused`: the keys and values of the instruction and of earlier steps are still there. Seconds, bytes, tokens.
    """
    observation, itemsize = r["cameras"] * r["image_tokens"], BITS[s["weight_dtype"]] // 8
    step = observation + r["action_tokens"]

    def control_seconds(history, reused):
        prefix = r["prompt_tokens"] + (history - 1) * step
        read = prefill_seconds(shape, s, observation, prefix) if reused else prefill_seconds(shape, s, prefix + observation, 0)
        held = prefix + observation  # the reading gives the first action token, each further one takes a step
        weights = read_params(shape, s["tp"], 1) * itemsize
        steps = [
            floor_seconds(weights, cache_nbytes(shape, s, held + i, 1), s["bandwidth"]) for i in range(1, r["action_tokens"])
        ]
        return read + (sum(steps) if len(steps) else 0)

    def longest(reused):
        return most(lambda n: control_seconds(n, reused) * r["rate"] <= 1)

    history = r["history"]
    context = r["prompt_tokens"] + history * step
    free = free_nbytes(shape, s)
    cache = cache_nbytes(shape, s, context, 1)
    once, reused = control_seconds(history, False), control_seconds(history, True)
    return {
        "tokens_per_step": step,
        "context": context,
        "cache_bytes": cache,
        "fits": peak_nbytes(shape, s, context) <= free,
        "history_fits": most(lambda n: peak_nbytes(shape, s, r["prompt_tokens"] + n * step) <= free),
        "period_seconds": 1 / r["rate"],
        "seconds": once,
        "seconds_reused": reused,
        "meets": once * r["rate"] <= 1,
        "meets_reused": reused * r["rate"] <= 1,
        "history_meets": longest(False),
        "history_meets_reused": longest(True),
    }


def training_parts(shape, s):
    """
    Bytes on a device that trains the shape as training.py does, `batch` sequences of `context` tokens at once: all in
    float32, the matrices in bfloat16 beside it, and what the backward pass needs of a Llama's layers (the tests count it in
    the real model; GPT-2's keep less). Each norm keeps a token's numbers before and after in float32, and after in bfloat16;
    attention its heads as projected, as turned, and its answer; the feed-forward four times its width; then there are the
    logits in bfloat16, in float32, and their gradient.
    """
    n_embd, layers, params = shape["n_embd"], shape["n_layer"], shape["params"]
    queries, keys = shape["n_head"] * shape["head_dim"], shape["n_kv"] * shape["head_dim"]
    inner = ((params - shape["outside"]) / layers - attention_params(shape)) / (3 * n_embd)  # of three matrices
    logits = (shape["outside"] - shape["unread"]) / n_embd
    each = layers * (20 * n_embd + 6 * queries + 6 * keys + 8 * inner) + 10 * n_embd + 10 * logits
    return {
        "weights": 4 * params,
        "gradients": 4 * params,
        "AdamW": 8 * params,
        "bfloat16": 2 * read_params(shape, 1, 1),
        "activations": int(s["batch"] * s["context"] * each),
    }


def held(shape, s, n_kv, memory):
    """What a server's cache of `memory` bytes holds of the shape with so many KV heads: tokens, sequences of `context`."""
    other, alone = resized(shape, shape["n_layer"], n_kv, shape["head_dim"]), having(s, "draft", None)
    return {
        "n_kv": n_kv,
        "params": other["params"],
        "bytes_per_token": costs(other, alone)["bytes_per_token"],
        "tokens_held": most(lambda n: peak_nbytes(other, alone, n) <= memory),
        "sequences_held": memory // peak_nbytes(other, alone, s["context"]),
    }


def uptraining(shape, s, t):
    """
    Converting the shape to fewer KV heads, `groups`, and training it on: `fraction` of the `tokens` that it was trained on,
    at `utilisation` of the compute rate and `price` an hour of one device; what it takes there; and what a server's cache
    of `memory` bytes holds with each number of KV heads. Three times the operations of a forward pass: 6 a weight and token.
    """
    context, after = s["context"], resized(shape, shape["n_layer"], t["groups"], shape["head_dim"])
    tokens = t["tokens"] * t["fraction"]
    products = 6 * read_params(after, 1, 1)
    attention = 12 * shape["n_layer"] * shape["n_head"] * shape["head_dim"] * pairs(context, 0, context) / context
    seconds = (products + attention) * tokens / (s["compute"] * t["utilisation"])
    parts = training_parts(after, s)
    return {
        "tokens": tokens,
        "steps": tokens / (s["batch"] * context),
        "operations": (products + attention) * tokens,
        "attention": attention / (products + attention),
        "seconds": seconds,
        "dollars": seconds / 3600 * t["price"],
        "parts": parts,
        "memory": sum(parts.values()),
        "fits": sum(parts.values()) <= s["memory"],
        "held": [held(shape, s, n_kv, t["memory"]) for n_kv in reversed(divisors(shape["n_kv"]))],
    }


def rounded(x, digits):
    """A positive number with so many decimals, halves upwards, as text: the same in Python and in JavaScript."""
    text = str(int(x * 10**digits + 0.5))
    if digits == 0:
        return text
    while len(text) <= digits:
        text = "0" + text
    return text[:-digits] + "." + text[-digits:]


def readable(nbytes):
    """Bytes with three digits or more, in the unit that suits them: 512 bytes, 36.0 KiB, 1.00 GiB, 1010 GiB."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    i = 0
    while nbytes >= 1023.5 and i < 5:
        nbytes = nbytes / 1024
        i += 1
    digits = 0 if i == 0 or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return rounded(nbytes, digits) + " " + units[i]


def readable_seconds(t):
    """A duration in the unit that suits it: 285.1 µs, 16.1 ms, 2.50 s."""
    if t < 1e-3:
        return rounded(t * 1e6, 1) + " µs"
    return rounded(t * 1e3, 1) + " ms" if t < 1 else rounded(t, 2) + " s"
