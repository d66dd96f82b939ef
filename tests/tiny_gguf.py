"""A random model of SmolLM2's kind as llama.cpp would write it, with a tokenizer of a few hundred tokens."""

import functools
import json
from itertools import product

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from data.passkey import DID, WHERE, WHO
from data.tokenizer import SmolLMTokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The baker swept the floor by the river.", "", " ", "  ", "x", "\n\n\t \n  The end \n ", "a  5", "a   55  b", " 5", "5 ", "5  ",
    "in 1984, 3.14 x 10^23", "it's we'll I'd they've 'tis 5's 's", "naïve café — 你好 Привет ½ ² Ⅷ ٣ ３", "😀👍🏽 e\u0301\u200d",
    "a\u00a0b\u2003 c\u3000\u30005", "<|im_start|>user", "!!! ??? ...\r\n--", "ſ ’s 'S 'ſ",
]  # fmt: skip


def split(tokenizer):
    """SmolLM's: each digit alone, then GPT-2's rule between them."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


@functools.cache
def vocabulary():
    """Hugging Face's tokenizer of a small text, its tokens in order and its merges. It lacks the bytes 0x06 and 0xf1."""
    tokenizer = split(Tokenizer(models.BPE()))
    alphabet = [c for c in pre_tokenizers.ByteLevel.alphabet() if c not in "Ćñ"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    text = [" ".join(words) + "." for words in product(WHO[:6], DID[:6], WHERE[:6])]
    tokenizer.train_from_iterator([*text, *TEXTS * 3], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return tokenizer, sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


def small_tokenizer():
    return SmolLMTokenizer(vocabulary()[1], len(SPECIAL))


def write_gguf(path, n_head=8, n_kv=2, n_embd=64, kind="F32", tie=True, seed=0, changes=(), extra=(), without=()):
    """A random Llama as llama.cpp writes them; `changes` are metadata, `extra` and `without` names of tensors."""
    _, vocab, merges = vocabulary()
    random, inner, layers, hd = np.random.default_rng(seed), -(-8 * n_embd // 3 // 32) * 32, 2, n_embd // n_head
    metadata = {
        "llama.context_length": 64, "llama.embedding_length": n_embd, "llama.block_count": layers,
        "llama.feed_forward_length": inner, "llama.attention.head_count": n_head, "llama.attention.head_count_kv": n_kv,
        "llama.rope.freq_base": 1000.0, "llama.rope.dimension_count": hd, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(vocab), "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocab, "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(vocab) - len(SPECIAL)),
        "tokenizer.ggml.merges": merges,
    } | dict(changes)  # fmt: skip
    shapes = {"token_embd": (len(vocab), n_embd), "output_norm": (n_embd,)} | ({} if tie else {"output": (len(vocab), n_embd)})
    for i in range(layers):
        shapes |= {
            f"blk.{i}.{name}": shape
            for name, shape in {
                "attn_norm": (n_embd,), "attn_q": (n_embd, n_embd), "attn_k": (n_kv * hd, n_embd),
                "attn_v": (n_kv * hd, n_embd), "attn_output": (n_embd, n_embd), "ffn_norm": (n_embd,),
                "ffn_gate": (inner, n_embd), "ffn_up": (inner, n_embd), "ffn_down": (n_embd, inner),
            }.items()
        }  # fmt: skip
    w = gguf.GGUFWriter(path, dict(changes).get("general.architecture", "llama"))
    add = {int: w.add_uint32, float: w.add_float32, str: w.add_string, list: w.add_array}
    for name, value in metadata.items():
        if value is not None and name != "general.architecture":
            add[type(value)](name, value)
    for name, shape in {**shapes, **dict(extra)}.items():
        if name in without:
            continue
        x = random.standard_normal(shape, dtype=np.float32)
        type_ = getattr(gguf.GGMLQuantizationType, kind if len(shape) == 2 else "F32")
        x = 1 + 0.3 * x if len(shape) == 1 else x * (0.5 if name == "token_embd" else 1.5 / shape[1] ** 0.5)
        w.add_tensor(f"{name}.weight", gguf.quantize(x, type_), raw_dtype=type_)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
