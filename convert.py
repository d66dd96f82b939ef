"""
Reading other programs' checkpoints: Llamas that llama.cpp has written (GGUF).
"""

import torch

from cli import InputError
from model import GPT, GPTConfig


def read_gguf(path):
    """
    A GGUF file as (metadata, tensors): a dict of plain values, and a dict of float32 tensors, which gguf's own routines
    make from whatever quantisation they were stored in. InputError for a file that is none, or is cut short.
    """
    try:
        import gguf  # here, so that nothing else needs it
    except ImportError:
        raise InputError("GGUF files are read by the package gguf: pip install gguf==0.19.0") from None
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        return metadata, {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    except (OSError, ValueError, IndexError, KeyError, NotImplementedError) as error:
        raise InputError(f"{path} cannot be read as a GGUF file: {error}") from None


def from_gguf(metadata, tensors):
    """
    The GPT, llama dialect, float32, of a GGUF file's metadata and tensors (read_gguf). InputError where the file is no
    Llama or one that this dialect cannot express: another epsilon or inner width, scaled rotations, biases, experts.
    """
    kind = metadata.get("general.architecture")
    if kind != "llama":
        raise InputError(f"this GGUF file holds a model of the kind {kind!r}; only 'llama' can be read")

    def value(name, *default):
        if f"llama.{name}" not in metadata and not default:
            raise InputError(f"this GGUF file lacks llama.{name}")
        return metadata.get(f"llama.{name}", *default)

    tensors = dict(tensors)

    def take(name):
        if name not in tensors:
            raise InputError(f"this GGUF file lacks the tensor {name}")
        return tensors.pop(name)

    wte = take("token_embd.weight")
    try:
        config = GPTConfig(
            dialect="llama",
            vocab_size=len(wte),
            block_size=value("context_length"),
            n_layer=value("block_count"),
            n_head=value("attention.head_count"),
            n_kv=value("attention.head_count_kv", value("attention.head_count")),
            n_embd=value("embedding_length"),
            rope_base=value("rope.freq_base", 10000.0),
            tie_weights="output.weight" not in tensors,
        )
    except ValueError as error:
        raise InputError(f"this GGUF file's model cannot be built: {error}") from None
    model = GPT(config)
    for name, here in (
        ("attention.layer_norm_rms_epsilon", model.ln_f.eps),
        ("feed_forward_length", model.h[0].mlp.c_fc.out_features),
        ("rope.dimension_count", config.head_dim),
        ("rope.scaling.type", "none"),
    ):
        there = value(name, here)
        if there != here and not (isinstance(here, float) and abs(there / here - 1) < 1e-6):  # the file's are float32
            raise InputError(f"this GGUF file has {name} {there}; the llama dialect has {here} there")

    def pairs(w, heads):
        """llama.cpp turns the pairs (2i, 2i+1) of a head, we and Hugging Face (i, i + hd/2): rows of w [heads*hd, C] move."""
        w = w.reshape(heads, -1, 2, w.size(1))  # [heads, hd/2, 2, C]
        return w.transpose(1, 2).flatten(0, 2)  # [heads, 2, hd/2, C] -> [heads*hd, C]

    state = {"wte.weight": wte, "ln_f.weight": take("output_norm.weight")}
    state["lm_head.weight"] = wte if config.tie_weights else take("output.weight")
    for i in range(config.n_layer):
        q, k, v = (take(f"blk.{i}.attn_{name}.weight") for name in "qkv")
        try:
            q, k = pairs(q, config.n_head), pairs(k, config.n_kv)  # K's own number of heads, not the queries'
        except RuntimeError as error:
            raise InputError(f"this GGUF file's layer {i} does not fit its number of heads: {error}") from None
        state[f"h.{i}.attn.c_attn.weight"] = torch.cat((q, k, v))  # [(n_head + 2*n_kv)*hd, C]
        for ours, theirs in (
            ("ln_1", "attn_norm"), ("attn.c_proj", "attn_output"), ("ln_2", "ffn_norm"),
            ("mlp.c_gate", "ffn_gate"), ("mlp.c_fc", "ffn_up"), ("mlp.c_proj", "ffn_down"),
        ):  # fmt: skip
            state[f"h.{i}.{ours}.weight"] = take(f"blk.{i}.{theirs}.weight")
    if tensors:
        raise InputError(
            f"the llama dialect has no place for {len(tensors)} tensor(s) of this GGUF file: {sorted(tensors)[:3]}"
        )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(f"this GGUF file's weights do not fit its metadata: {str(error).splitlines()[-1].strip()}") from None
    return model
