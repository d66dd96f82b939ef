"""
Hugging Face's generate(), as a peer of bench.py: its Llama and GPT-2 classes with random weights of the same shape.

    hugging_face.py dynamic      DynamicCache, generate's default: grows by concatenation
    hugging_face.py static       StaticCache: allocated once

The cache is filled with a constant in place of a prefill, and generate() goes on from there.
"""

import sys
import time

import torch
import transformers
from protocol import serve
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LogitsProcessor, StaticCache

KIND = sys.argv[1]
models = {}


class Clock(LogitsProcessor):
    """generate() calls this once a step; it changes nothing."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores):
        self.times.append(time.perf_counter())
        return scores


def build(q):
    limit = q["context"] + 8
    if q["dialect"] == "gpt2":
        config = GPT2Config(
            vocab_size=65, n_positions=limit, n_embd=256, n_layer=6, n_head=8, activation_function="gelu",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=65, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=q["n_kv"], max_position_embeddings=limit, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@torch.no_grad()
def measure(q):
    if q["dialect"] == "gpt2" and q["n_kv"] != 8:
        return {"skip": "its GPT-2 has no grouped heads"}
    torch.set_num_threads(q["threads"])
    dtype = getattr(torch, q["dtype"])
    key = (q["dialect"], q["n_kv"], q["dtype"], q["context"])
    if key not in models:
        models.clear()
        models[key] = build(q).to(dtype).eval()
    model = models[key]
    n_kv, held = q["n_kv"], q["context"] - q["steps"] - 1
    cache = DynamicCache(config=model.config) if KIND == "dynamic" else StaticCache(model.config, q["context"] + 1)
    for layer in range(6):
        k, v = torch.full((2, q["batch"], n_kv, held, 32), 0.01, dtype=dtype)
        cache.update(k, v, layer, {"cache_position": torch.arange(held)})
    clock = Clock()
    model.generate(
        torch.zeros(q["batch"], held + 1, dtype=torch.long), past_key_values=cache, do_sample=False, logits_processor=[clock],
        min_new_tokens=q["steps"] + 1, max_new_tokens=q["steps"] + 1, attention_mask=torch.ones(q["batch"], held + 1),
    )  # fmt: skip
    return {"steps_s": [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]}


if __name__ == "__main__":
    how = f"transformers {transformers.__version__}, torch {torch.__version__}, {KIND} cache, scaled_dot_product_attention"
    serve(f"Hugging Face, {KIND} cache", how, measure)
