"""
What a budget needs to know of a model: its layers, heads and weights; from configs/shape/, from a Hugging Face config, or
from a checkpoint of ours. Nothing is downloaded.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml

from arithmetic import attention_params
from cli import CONFIGS, InputError, nearest, strict


@dataclass(frozen=True)
class Shape:
    """A model as far as its weights and its cache count. Raises ValueError, in one line, for shapes that cannot be."""

    name: str
    n_layer: int
    n_head: int  # query heads
    n_kv: int  # key-value heads
    head_dim: int
    n_embd: int
    context: int  # tokens it was made for
    params: int  # all weights
    outside: int  # of them outside the layers: embeddings, head, last norm
    unread: int  # of them not read by a decoding step: an input embedding that is not also the head, positions, a vision tower
    qkv_bias: bool = False
    window: int | None = None  # tokens that a layer with a sliding window holds
    windowed: int = 0  # number of such layers
    latent: int | None = None  # numbers a token and layer of a multi-head latent attention cache, in place of keys and values
    n_experts: int = 0  # of a mixture, in each of its layers
    n_active: int = 0  # of them chosen by each token
    expert_params: int = 0  # weights of all experts of all layers

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type in (int, int | None) and value is not None:
                least = 1 if f.name in ("n_layer", "n_head", "n_kv", "head_dim", "n_embd", "context", "params", "window") else 0
                if value < least:
                    raise ValueError(f"{f.name}={value} is not a whole number of at least {least}")
        if self.n_head > 2**16:
            raise ValueError(f"n_head={self.n_head} is more heads than a model has: at most {2**16}")
        if self.n_head % self.n_kv:
            allowed = [d for d in range(1, self.n_head + 1) if self.n_head % d == 0]
            raise ValueError(f"n_kv={self.n_kv} does not divide n_head={self.n_head}: n_kv can be {allowed}")


def presets():
    """Names in configs/shape/."""
    return sorted(p.stem for p in (CONFIGS / "shape").glob("*.yaml"))


def find_shape(key, name):
    """
    `shape=` or `draft=` as a dict: a name in configs/shape/, the path of a Hugging Face config.json, or a folder with one.
    InputError naming the key for anything else.
    """
    path = Path(name)
    try:
        if (path / "config.json").is_file():
            path = path / "config.json"
        if name in presets():
            values = yaml.safe_load((CONFIGS / "shape" / f"{name}.yaml").read_text(encoding="utf-8"))
            return asdict(strict(Shape, {"name": name, **values}))
        if path.suffix != ".json":
            known = presets()
            raise InputError(f"no such shape or config.json{nearest(name, known)} (shapes: {', '.join(known)})")
        if not path.is_file():
            raise InputError("no such file")
        return asdict(huggingface_shape(read_json(path), path.parent.name if path.name == "config.json" else path.stem))
    except (InputError, OSError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{key}={name}: {what}") from None


def read_json(path):
    try:
        if path.stat().st_size > 2**24:
            raise InputError("larger than 16 MiB, that is no config")
        config = json.loads(path.read_text(encoding="utf-8"))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"no JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError("no config: a JSON object is needed")
    return config


def checkpoint_shape(ckpt):
    """The shape of a checkpoint of train.py or uptrain.py, or of a Hugging Face folder; InputError when it is none."""
    import torch

    from huggingface import name_of
    from model import GPT
    from storage import find_checkpoint, load_checkpoint, load_model

    path = find_checkpoint(ckpt)
    c = load_model(load_checkpoint(path)).config
    with torch.device("meta"):
        model = GPT(c)
    outside = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("h."))
    unread = c.block_size * c.n_embd if c.dialect == "gpt2" else 0
    if not c.tie_weights:
        unread += c.vocab_size * c.n_embd
    return asdict(Shape(
        name=name_of(path) if path.is_dir() else path.stem, n_layer=c.n_layer, n_head=c.n_head, n_kv=c.n_kv, head_dim=c.head_dim, n_embd=c.n_embd,
        context=c.block_size, params=model.n_params(), outside=outside, unread=unread, qkv_bias=c.bias,
    ))  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face configs

LLAMA = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "phi3", "smollm3",
         "granite")  # fmt: skip
FAMILIES = ("gpt2", "gpt_bigcode", "gpt_neox", *LLAMA, "deepseek_v2", "deepseek_v3")
TIED = ("gpt2", "gpt_bigcode", "gemma", "gemma2", "gemma3_text", "smollm3")  # where a config does not say
KINDS = {"full_attention": 0, "sliding_attention": 1}  # entries of layer_types, and whether the layer has a window


def huggingface_shape(config, name):
    """
    The Shape of a Hugging Face config, a dict. An explicit head_dim wins; no number of KV heads means one for each query
    head; layers with a sliding window and latent caches are counted as such. InputError naming what is not understood.
    A model of several parts (a text_config) is counted by its text part only.
    """
    c = config if config.get("text_config") is None else config["text_config"]
    if not isinstance(c, dict):
        raise InputError("text_config is no JSON object")
    if c is not config:
        name = f"{name}, text part"
        c = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config} | c
    family = c.get("model_type")
    if family not in FAMILIES:
        near = nearest(family, FAMILIES, cutoff=0.8)
        raise InputError(f"model_type={family!r} is not understood{near} (known: {', '.join(FAMILIES)})")
    if c.get("quantization_config"):
        raise InputError("quantization_config, weights of few bits, is not understood: without it weight_dtype is counted")
    gpt2 = family in ("gpt2", "gpt_bigcode")
    missing = object()

    def number(key, default=missing, least=1):
        value = c.get(key)
        if value is None and default is not missing:
            return default
        if key not in c:
            raise InputError(f"the config has no {key}")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**32:
            raise InputError(f"{key}={repr(value)[:50]} is not a whole number from {least} to 2^32")
        return value

    def flag(key, default):
        value = c.get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{key}={value!r} is neither true nor false")
        return value

    n_layer = number("n_layer" if gpt2 else "num_hidden_layers")
    n_head = number("n_head" if gpt2 else "num_attention_heads")
    n_embd = number("n_embd" if gpt2 else "hidden_size")
    context = number("n_positions" if gpt2 else "max_position_embeddings")
    vocab = number("vocab_size")
    if family == "gpt_bigcode":
        n_kv = 1 if flag("multi_query", True) else n_head
    else:
        n_kv = n_head if family in ("gpt2", "gpt_neox") else number("num_key_value_heads", n_head)
    if c.get("head_dim") is None and n_embd % n_head and not family.startswith("deepseek"):
        raise InputError(f"hidden size {n_embd} is not divisible by {n_head} heads, and there is no head_dim")
    head_dim = number("head_dim", n_embd // n_head)
    tied = flag("tie_word_embeddings", family in TIED)
    table = vocab * n_embd
    shape = {"name": name, "n_layer": n_layer, "n_head": n_head, "n_kv": n_kv, "head_dim": head_dim, "n_embd": n_embd}
    shape |= {"context": context, "qkv_bias": False, **windows(c, family, n_layer, number)}

    if family in ("gpt2", "gpt_bigcode", "gpt_neox"):
        n_inner = number("intermediate_size") if family == "gpt_neox" else number("n_inner", 4 * n_embd)
        bias = flag("attention_bias", True)
        layer = 2 * n_embd * n_inner + n_inner + n_embd  # two matrices with biases
        layer += 4 * n_embd + (n_embd if bias else 0)  # two norms with biases; the output projection's
        positions = context * n_embd if gpt2 else 0
        outside = table + positions + 2 * n_embd + (0 if tied else table)
        unread = positions + (0 if tied else table)
        return finish(shape | {"qkv_bias": bias}, n_layer * layer, outside, unread)

    outside, unread = table + n_embd + (0 if tied else table), 0 if tied else table
    if family.startswith("deepseek"):
        return deepseek_shape(c, number, shape, outside, unread)
    bias = family == "qwen2" or flag("attention_bias", False)
    layer = (4 if family in ("gemma2", "gemma3_text") else 2) * n_embd  # norms
    layer += 2 * head_dim if family in ("qwen3", "qwen3_moe", "gemma3_text") else 0  # norms of queries and keys
    layer += n_embd if bias and family != "qwen2" else 0
    n_inner = number("intermediate_size")
    if family == "mixtral":
        shape |= mixture(number("num_local_experts"), number("num_experts_per_tok"), n_layer, n_embd, n_inner)
        layer += n_embd * shape["n_experts"]  # the router
    elif family == "qwen3_moe":
        dense = c.get("mlp_only_layers") or []
        if c.get("decoder_sparse_step", 1) != 1 or dense:
            raise InputError(
                "decoder_sparse_step and mlp_only_layers, dense layers between those of experts, are not understood"
            )
        experts = number("num_experts", number("num_local_experts", 128))
        shape |= mixture(experts, number("num_experts_per_tok"), n_layer, n_embd, number("moe_intermediate_size"))
        layer += n_embd * shape["n_experts"]
    else:
        layer += 3 * n_embd * n_inner + ((2 * n_inner + n_embd) if flag("mlp_bias", False) else 0)
    return finish(shape | {"qkv_bias": bias}, n_layer * layer + shape.get("expert_params", 0), outside, unread)


def windows(c, family, n_layer, number):
    """How many layers hold only a window of the newest tokens, and how long it is."""
    window = number("sliding_window", None)
    if window is None or (family in ("qwen2", "qwen3", "qwen3_moe", "smollm3") and not c.get("use_sliding_window", False)):
        return {"window": None, "windowed": 0}
    if (kinds := c.get("layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != n_layer:
            what = f"has {len(kinds)} entries" if isinstance(kinds, list) else "is no list"
            raise InputError(f"layer_types {what}: one is needed for each of {n_layer} layers")
        unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in KINDS]
        if unknown:
            raise InputError(f"layer_types names {unknown[0]!r} (understood: {', '.join(KINDS)})")
        windowed = sum(KINDS[kind] for kind in kinds)
    elif family == "gemma2":
        windowed = (n_layer + 1) // 2  # every other layer, beginning with the first
    elif family == "gemma3_text":
        windowed = n_layer - n_layer // number("sliding_window_pattern", 6)  # all but every sixth
    elif family in ("qwen2", "qwen3"):
        windowed = max(0, n_layer - number("max_window_layers", 28, least=0))
    elif family == "smollm3":
        windowed = n_layer // number("no_rope_layer_interval", 4)  # those without rotary positions
    else:
        windowed = n_layer
    return {"window": window if windowed else None, "windowed": windowed}


def mixture(n_experts, n_active, n_layer, n_embd, n_inner):
    if n_active > n_experts:
        raise InputError(f"num_experts_per_tok={n_active} is more than the {n_experts} experts")
    return {"n_experts": n_experts, "n_active": n_active, "expert_params": n_layer * n_experts * 3 * n_embd * n_inner}


def deepseek_shape(c, number, shape, outside, unread):
    """Multi-head latent attention and mixtures of experts (arXiv 2405.04434, 2412.19437). Their extra prediction layer,
    which generation does not use, is not counted."""
    n_layer, n_head, n_embd = shape["n_layer"], shape["n_head"], shape["n_embd"]
    nope, rope, v = number("qk_nope_head_dim"), number("qk_rope_head_dim"), number("v_head_dim")
    low, q_low = number("kv_lora_rank"), number("q_lora_rank", 0)
    if (nope + rope + v) % 2:
        raise InputError(f"keys of {nope} + {rope} and values of {v} numbers a head are not understood: their sum is odd")
    attention = n_embd * q_low + q_low + q_low * n_head * (nope + rope) if q_low else n_embd * n_head * (nope + rope)
    attention += n_embd * (low + rope) + low + low * n_head * (nope + v) + n_head * v * n_embd
    dense = min(number("first_k_dense_replace", 0, least=0), n_layer)
    experts = mixture(
        number("n_routed_experts"), number("num_experts_per_tok"), n_layer - dense, n_embd, number("moe_intermediate_size")
    )
    shared = 3 * n_embd * number("moe_intermediate_size") * number("n_shared_experts", 0, least=0)
    router = n_embd * experts["n_experts"]  # DeepSeek-V3's bias of the router is a buffer, no weight
    layers = n_layer * (attention + 2 * n_embd) + dense * 3 * n_embd * number("intermediate_size")
    layers += (n_layer - dense) * (shared + router) + experts["expert_params"]
    # uncompressed, a head would hold a key of nope + rope and a value of v numbers
    return Shape(
        **shape | experts | {"n_kv": n_head, "head_dim": (nope + rope + v) // 2, "latent": low + rope},
        params=outside + layers, outside=outside, unread=unread,
    )  # fmt: skip


def finish(shape, others, outside, unread):
    """A Shape whose layers have `others` weights beside attention's projections."""
    try:
        params = outside + others + shape["n_layer"] * attention_params(shape)
        return Shape(**shape, params=params, outside=outside, unread=unread)
    except ValueError as error:
        raise InputError(str(error)) from None
