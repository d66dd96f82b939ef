"""Hugging Face folders in and out, against transformers' own models with random weights, and every refusal in one line.

GPT2_PATH=path/to/gpt2 python -m pytest tests/test_huggingface.py       the same on real weights
"""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from conftest import TINY, make_text, refusal
from hypothesis import given
from hypothesis import strategies as st
from offline import GPT2_DIR, needs_gpt2
from reference import SHAPES, small_model, tokens
from safetensors.torch import load_file, save_file
from tiny_gguf import TEXTS, small_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    logging,
)  # fmt: skip

import data.shakespeare_bpe.prepare as bpe_data
import data.tokenizer as tokenizers
import kernels
from data.tokenizer import BPETokenizer, CharTokenizer, HuggingFaceTokenizer, continuation, tokenizer_from
from decoding import generate, make_cache
from huggingface import checkpoint_from, from_huggingface, name_of, to_huggingface
from model import GPT
from pooling import pool_heads
from storage import find_checkpoint, load_checkpoint, load_model

logging.set_verbosity_error()
logging.disable_progress_bar()
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500.0,
}  # fmt: skip


def theirs(cls=LlamaForCausalLM, seed=0, **changes):
    """A random model of transformers, sharp enough for every weight to matter."""
    torch.manual_seed(seed)
    if cls is GPT2LMHeadModel:
        shape = {"vocab_size": 53, "n_positions": 48, "n_embd": 64, "n_layer": 2, "n_head": 8, "initializer_range": 0.2}
        model = cls(GPT2Config(**{**shape, "bos_token_id": None, "eos_token_id": None, **changes}))
    else:
        shape = {
            "vocab_size": 53, "max_position_embeddings": 48, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
        model = cls((MistralConfig if cls is MistralForCausalLM else LlamaConfig)(**{**shape, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # norms and biases are ones and zeros in a fresh model
                p.add_(0.2 * torch.randn(p.shape))
    return model.eval()


def saved(folder, model, **kwargs):
    model.save_pretrained(folder, **kwargs)
    return folder


def rewrite(folder, config=(), without=(), **extra):
    """Change a folder's config.json, and leave out or add tensors."""
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | dict(config)).items() if v != "gone"}))
    if without or extra:
        tensors = load_file(folder / "model.safetensors")
        tensors = {k: v for k, v in tensors.items() if k not in without} | extra
        save_file(tensors, folder / "model.safetensors")
    return folder


@torch.no_grad()
def same_logits(ours, theirs, T=48):
    idx = tokens(2, T, theirs.config.vocab_size)
    a, b = ours.eval()(idx)[0], theirs(idx).logits
    for position in (0, 1, -1, slice(None)):
        assert (a[:, position] - b[:, position]).abs().max() < 1e-5 * max(1, b.abs().max())


def exported(model, tokenizer, folder, **kwargs):
    to_huggingface(model, tokenizer, folder, **kwargs)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


# ---------------------------------------------------------------------------------------------------------------------
# in


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 8}, {"num_key_value_heads": 2}, {"num_key_value_heads": 1}, {"tie_word_embeddings": True},
        {"head_dim": 24}, {"head_dim": 4, "num_key_value_heads": 4}, {"rms_norm_eps": 1e-2}, {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}}, {"intermediate_size": 192},
    ],
    ids=str,
)  # fmt: skip
def test_llamas_have_hugging_faces_logits(tmp_path, changes):
    model = theirs(**changes)
    ours, tokenizer = from_huggingface(saved(tmp_path / "hf", model))
    same_logits(ours, model)
    c = ours.config
    assert tokenizer is None and c.dialect == "llama" and c.n_kv == changes.get("num_key_value_heads", 2)
    assert c.head_dim == changes.get("head_dim", 8) and ours.n_params() == sum(p.numel() for p in model.parameters())
    assert (ours.lm_head.weight is ours.wte.weight) == changes.get("tie_word_embeddings", False)
    assert (c.n_inner is None) == (c.inner == 192)  # our own width needs no field


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"activation_function": "gelu"}, {"activation_function": "gelu_pytorch_tanh"}, {"n_inner": 72},
        {"layer_norm_epsilon": 1e-2}, {"tie_word_embeddings": False}, {"n_head": 1}, {"vocab_size": 128},
    ],
    ids=str,
)  # fmt: skip
def test_gpt2s_have_hugging_faces_logits(tmp_path, changes):
    model = theirs(GPT2LMHeadModel, **changes)
    ours, _ = from_huggingface(saved(tmp_path / "hf", model))
    same_logits(ours, model)
    assert ours.config.dialect == "gpt2" and ours.config.bias and ours.n_params() == sum(p.numel() for p in model.parameters())


@given(
    n_kv=st.sampled_from(SHAPES), hd=st.sampled_from([None, 2, 6, 24]), inner=st.integers(1, 50), vocab=st.integers(2, 70),
    layers=st.integers(1, 3), tie=st.booleans(), theta=st.sampled_from([100.0, 1e4, 5e5]), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_shape_of_llama_goes_in_and_out_again(tmp_path_factory, n_kv, hd, inner, vocab, layers, tie, theta, seed):
    model = theirs(
        seed=seed, num_key_value_heads=n_kv, head_dim=hd, intermediate_size=inner, vocab_size=vocab, num_hidden_layers=layers,
        tie_word_embeddings=tie, rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("any")
    ours, _ = from_huggingface(saved(folder / "hf", model))
    same_logits(ours, model, T=20)
    to_huggingface(ours, None, folder / "out")
    before, after = load_file(folder / "hf" / "model.safetensors"), load_file(folder / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_both_spellings_of_rotations_and_mistrals_without_a_window(tmp_path):
    model = theirs(rope_parameters=LLAMA3)
    folder = saved(tmp_path / "hf", model)
    five = from_huggingface(folder)[0].config
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    rewrite(folder, {"rope_parameters": "gone", "rope_theta": 500.0, "rope_scaling": scaling})
    assert from_huggingface(folder)[0].config == five and five.rope_base == 500.0 and five.rope_scaling == scaling
    rewrite(folder, {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert from_huggingface(folder)[0].config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    rewrite(folder, {"rope_scaling": None, "rope_theta": "gone"})
    assert from_huggingface(folder)[0].config.rope_base == 10000.0

    for window in (None, 48, 4096):
        model = theirs(MistralForCausalLM, sliding_window=window, head_dim=16)
        same_logits(from_huggingface(saved(tmp_path / f"mistral{window}", model))[0], model)


def test_shards_prefixes_buffers_and_halves(tmp_path):
    model = theirs()
    folder = saved(tmp_path / "shards", model, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    same_logits(from_huggingface(folder)[0], model)

    model = theirs(GPT2LMHeadModel)
    folder = saved(tmp_path / "gpt2", model)
    bare = {name.removeprefix("transformer."): p for name, p in load_file(folder / "model.safetensors").items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 48, 48).tril() for i in range(2)} | {
        "h.0.attn.masked_bias": torch.tensor(-1e4)
    }
    save_file(bare, folder / "model.safetensors")  # as the Hub's gpt2 is
    same_logits(from_huggingface(folder)[0], model)
    save_file(bare | {"lm_head.weight": bare["wte.weight"].clone()}, folder / "model.safetensors")
    same_logits(from_huggingface(folder)[0], model)

    folder = saved(tmp_path / "half", theirs().bfloat16())
    checkpoint = checkpoint_from(folder)
    assert {p.dtype for p in checkpoint["model"].values()} == {torch.bfloat16}  # half the memory
    ours = load_model(checkpoint)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    same_logits(ours, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


REFUSED = [
    ({"model_type": "qwen2"}, "model_type='qwen2'"), ({"model_type": "gone"}, "model_type=None"),
    ({"attention_bias": True}, "attention_bias=True"), ({"mlp_bias": True}, "mlp_bias=True"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu"), ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"qk_layernorm": True}, "qk_layernorm"), ({"num_local_experts": 8}, "num_local_experts=8"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"), ({"auto_map": {"AutoModel": "x.Evil"}}, "auto_map"),
    *[({"rope_scaling": {"rope_type": kind, "factor": 2.0}}, f"'{kind}'") for kind in ("yarn", "dynamic", "longrope", "su")],
    ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"), ({"rope_scaling": [1]}, "no JSON object"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor=2"), ({"rope_scaling": {"rope_type": {}}}, "type '{}'"),
    ({"model_type": "mistral", "sliding_window": 8}, "sliding_window=8 is below the context of 48"),
    ({"model_type": "mistral", "sliding_window": "8"}, "sliding_window=8"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 10**400}}, "is not a number"), ({"layer_types": 3}, "layer_types"),
    ({"rope_scaling": {**LLAMA3, "factor": float("inf")}}, "factor=inf"), ({"rope_theta": float("nan"), "rope_parameters": {}}, "nan"),
    ({"hidden_size": "gone"}, "hidden_size=None"), ({"hidden_size": 64.0}, "hidden_size=64.0"), ({"hidden_size": True}, "=True"),
    ({"vocab_size": 0}, "vocab_size=0"), ({"num_key_value_heads": 0}, "num_key_value_heads=0"), ({"head_dim": 0}, "head_dim=0"), ({"num_hidden_layers": 10**9}, "missing"), ({"num_hidden_layers": 1}, "no place for 9"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings=1000000000000"), ({"num_key_value_heads": 3}, "n_kv=3"),
    ({"num_key_value_heads": 4}, "k_proj.weight is [16, 64], config.json makes it [32, 64]"), ({"head_dim": 7}, "head_dim=7 is odd"),
    ({"vocab_size": 54}, "embed_tokens.weight is [53, 64]"), ({"tie_word_embeddings": True}, "lm_head.weight differs"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings=no"), ({"intermediate_size": 10**8}, "gate_proj"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps=small"), ({"rms_norm_eps": -1}, "norm_eps=-1"),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", REFUSED, ids=str)
def test_what_the_llama_dialect_cannot_express_is_refused_by_name(tmp_path, changes, words):
    folder = rewrite(saved(tmp_path / "hf", theirs()), changes)
    line = refusal(load_checkpoint, folder)
    assert words in line and line.startswith(str(folder))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"activation_function": "relu"}, "activation_function=relu"),
        ({"n_head": 3}, "not divisible by n_head=3"),
        ({"n_positions": 49}, "wpe.weight is [48, 64]"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ],
)
def test_what_the_gpt2_dialect_cannot_express_is_refused_by_name(tmp_path, changes, words):
    assert words in refusal(load_checkpoint, rewrite(saved(tmp_path / "hf", theirs(GPT2LMHeadModel)), changes))


def test_tensors_too_many_too_few_and_of_other_kinds_are_refused(tmp_path):
    folder = saved(tmp_path / "hf", theirs())
    whole = load_file(folder / "model.safetensors")
    q = "model.layers.1.self_attn.q_proj"
    for without, extra, words in (
        ((f"{q}.weight",), {}, f"{q}.weight is missing"),
        ((), {f"{q}.bias": torch.ones(64)}, f"no place for 1 tensor(s): {q}.bias"),
        ((), {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "q_norm"),
        ((), {f"{q}.weight": torch.ones(64, 64, dtype=torch.int8)}, "type I8"),
        ((), {"model.embed_tokens.weight": torch.ones(53, 63)}, "is [53, 63], config.json makes it [53, 64]"),
        ((), {"embed_tokens.weight": torch.ones(53, 64)}, "is there twice"),
    ):
        save_file(whole, folder / "model.safetensors")
        assert words in refusal(load_checkpoint, rewrite(folder, (), without, **extra))


def test_files_that_are_cut_or_lie_are_refused_before_memory_is_taken(tmp_path):
    folder = saved(tmp_path / "hf", theirs())
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    for wrong in (b"", raw[:100], raw[:-1000], raw + b"more", b"\xff" * 8 + raw[8:], struct.pack("<Q", 2**40) + raw[8:]):
        file.write_bytes(wrong)
        assert "model.safetensors cannot be read" in refusal(load_checkpoint, folder)
    # a header that claims 4 TiB, and a file as long (with nothing in it)
    n = 2**40
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [n, 1], "data_offsets": [0, 4 * n]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert "cannot be read" in refusal(load_checkpoint, folder)
    try:
        os.truncate(file, 8 + len(header) + 4 * n)
    except OSError:
        return  # this file system has no such files
    refusal(load_checkpoint, folder)


@pytest.mark.parametrize(
    "name", ["../hf/model.safetensors", "/etc/passwd", "..", "x/y.safetensors", ".safetensors", "model.bin", 3, ["a"], None]
)
def test_an_index_cannot_name_a_file_elsewhere(tmp_path, name):
    saved(tmp_path / "hf", theirs())
    folder = saved(tmp_path / "shards", theirs(), max_shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(value))
    assert "which is no safetensors file of this folder" in refusal(load_checkpoint, folder)
    for raw in ("[]", "{}", '{"weight_map": {}}', "{", "[" * 10**5):
        index.write_text(raw)
        assert "model.safetensors.index.json" in refusal(load_checkpoint, folder)
    index.write_text('{"weight_map": {"lm_head.weight": "not-there.safetensors"}}')
    assert "not-there.safetensors cannot be read" in refusal(load_checkpoint, folder)


def test_folders_without_config_or_safetensors_are_refused(tmp_path, cwd):
    folder = saved(tmp_path / "hf", theirs())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    line = refusal(load_checkpoint, folder)
    assert "no model.safetensors" in line and "pytorch_model.bin is not read" in line
    for raw in ("", "[1]", "{", "\x00"):
        (folder / "config.json").write_text(raw)
        assert "config.json" in refusal(load_checkpoint, folder)
    (folder / "config.json").unlink()
    assert "the folder has no config.json" in refusal(find_checkpoint, str(folder))


# ---------------------------------------------------------------------------------------------------------------------
# GPT-2 as it is


@torch.no_grad()
def test_gpt2_small_has_hugging_faces_logits_and_pools_to_a_sixth(tmp_path):
    """The real size; its weights where GPT2_PATH names a folder, else random ones."""
    if folder := os.environ.get("GPT2_PATH"):
        model = GPT2LMHeadModel.from_pretrained(folder).eval()
    else:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config()).eval()
        folder = saved(tmp_path / "gpt2", model)
    ours = from_huggingface(folder)[0].eval()
    c = ours.config
    assert (c.n_layer, c.n_head, c.n_kv, c.n_embd, c.vocab_size, c.block_size) == (12, 12, 12, 768, 50257, 1024)
    idx = tokens(1, 64, 50257)
    a, b = ours(idx)[0], model(idx).logits
    assert (a - b).abs().max() < 1e-5 * max(1, b.abs().max())  # not to the bit: Conv1D and nn.Linear are other products

    two = pool_heads(ours, 2).eval()
    assert ours.h[0].attn.c_attn.weight.shape == (2304, 768) and two.h[0].attn.c_attn.weight.shape == (1024, 768)
    assert two.h[11].attn.c_attn.bias.shape == (1024,)
    held = []
    for pooled in (ours, two):
        cache = make_cache(pooled, 64)
        pooled(idx[:, :20], cache=cache)
        held.append(sum(cache.nbytes().values()))
    assert held[0] == 2 * 12 * 12 * 64 * 20 * 4 == 6 * held[1]
    step = kernels.Step(two)
    if step.serves(idx[:, 20:21], cache):
        wanted = two(idx[:, :21])[0][:, -1]
        assert (step(idx[:, 20:21], cache)[:, 0] - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_padded_vocabularies_lose_their_padding(tmp_path):
    model = theirs(GPT2LMHeadModel, vocab_size=50304, n_embd=8, n_layer=1, n_head=2)
    ours, tokenizer = from_huggingface(saved(tmp_path / "hf", model))
    assert ours.config.vocab_size == tokenizer.vocab_size == 50257
    idx = tokens(1, 9)
    assert (ours.eval()(idx)[0] - model(idx).logits[:, :, :50257]).abs().max() < 1e-5
    assert exported(ours, None, tmp_path / "out").config.vocab_size == 50257


# ---------------------------------------------------------------------------------------------------------------------
# out


@pytest.mark.parametrize("n_kv", SHAPES)
@torch.no_grad()
def test_our_llamas_greedy_tokens_are_hugging_faces(tmp_path, n_kv):
    ours = small_model(n_kv, "llama", block_size=160, rope_base=500000.0)
    model = exported(ours, None, tmp_path / "out")
    same_logits(ours, model, T=160)
    prompt = tokens(1, 5)
    new = torch.stack(list(generate(ours, prompt, 120, make_cache(ours, 125), temperature=0)), dim=1)
    their = model.generate(prompt, max_new_tokens=120, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert new.tolist() == their[:, 5:].tolist()


@pytest.mark.parametrize(
    "dialect, fields",
    [
        ("llama", {}), ("llama", {"head_size": 6, "n_inner": 24, "norm_eps": 1e-3, "tie_weights": False}),
        ("llama", {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_base": 77.0}),
        ("gpt2", {"bias": True}), ("gpt2", {"bias": False}), ("gpt2", {"bias": True, "gelu": "tanh", "tie_weights": False}),
        ("gpt2", {"n_inner": 40, "norm_eps": 1e-3}),
    ],
    ids=str,
)  # fmt: skip
def test_out_and_in_again_are_the_same_tensors_and_logits(tmp_path, dialect, fields):
    ours = small_model(8 if dialect == "gpt2" else 2, dialect, **fields)
    model = exported(ours, None, tmp_path / "out")
    assert type(model).__name__ == {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[dialect]
    same_logits(ours, model, T=24)
    again, _ = from_huggingface(tmp_path / "out")
    assert again.config == ours.config
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in ours.state_dict().items())
    assert torch.equal(again.eval()(tokens(2, 24))[0], ours(tokens(2, 24))[0])
    if dialect == "gpt2":
        assert model.config.activation_function == ("gelu_new" if fields.get("gelu") else "gelu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_may_be_halves(tmp_path, dtype):
    ours = small_model(2, "llama")
    model = exported(ours, None, tmp_path / "out", dtype=dtype)
    assert model.dtype == dtype
    again, _ = from_huggingface(tmp_path / "out")
    assert all(torch.equal(p.to(dtype).float(), again.state_dict()[name]) for name, p in ours.state_dict().items())


def test_numbers_that_halves_cannot_hold_are_refused(tmp_path):
    ours = small_model(2, "llama")
    with torch.no_grad():
        ours.ln_f.weight[0] = 1e5
    assert "ln_f.weight" in refusal(to_huggingface, ours, None, tmp_path / "out", torch.float16)
    assert list(tmp_path.iterdir()) == []
    to_huggingface(ours, None, tmp_path / "out", torch.bfloat16)


@pytest.mark.parametrize(
    "model, words",
    [
        (("gpt2", 2, {}), "n_kv=2: GPT2LMHeadModel"),
        (("gpt2", 1, {}), "n_kv=1: GPT2LMHeadModel"),
        (("gpt2", 8, {"head_size": 4}), "head_size=4"),
        (("llama", 2, {"n_embd": 60, "head_size": 8}), "n_embd=60"),
    ],
)
def test_what_no_stock_class_can_express_is_refused_and_nothing_is_left(tmp_path, model, words):
    dialect, n_kv, fields = model
    line = refusal(to_huggingface, small_model(n_kv, dialect, **fields), None, tmp_path / "out")
    assert words in line and list(tmp_path.iterdir()) == []


def test_only_a_folder_that_was_written_here_is_replaced(tmp_path, monkeypatch):
    model, out = small_model(2, "llama"), tmp_path / "out"
    out.mkdir()
    to_huggingface(model, None, out)  # an empty one is as good as none
    to_huggingface(model, CharTokenizer("abc"), out)
    assert (out / "tokenizer.json").exists()
    to_huggingface(model, None, out)
    assert not (out / "tokenizer.json").exists() and list(tmp_path.iterdir()) == [out]
    (out / "mine.txt").write_text("x")
    assert "mine.txt, which would be lost" in refusal(to_huggingface, model, None, out)
    (out / "mine.txt").unlink()

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for name in ("rename", "fsync"):
        with monkeypatch.context() as patch:
            real, calls = getattr(os, name), []

            def fail(*args, real=real, calls=calls):
                calls.append(args)
                if len(calls) == 2:
                    raise OSError("No space left on device")
                return real(*args)

            patch.setattr(os, name, fail)
            assert "cannot be written" in refusal(to_huggingface, small_model(1, "llama"), None, out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before and list(tmp_path.iterdir()) == [out]

    theirs_folder = saved(tmp_path / "theirs", theirs())
    assert "no folder that was exported from here" in refusal(to_huggingface, model, None, theirs_folder)
    (tmp_path / "file").touch()
    assert "no folder that was exported from here" in refusal(to_huggingface, model, None, tmp_path / "file")


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers


def their_tokenizer(folder, ours, text=""):
    """AutoTokenizer's of an exported folder."""
    model = small_model(2, "llama", n_embd=16, n_layer=1, vocab_size=ours.vocab_size)
    to_huggingface(model, ours, folder)
    return AutoTokenizer.from_pretrained(folder)


def test_characters_are_ids_and_ids_are_characters_in_transformers_too(tmp_path):
    ours = CharTokenizer(make_text(200) + "twosp  .,'!?-é你😀\t")
    auto = their_tokenizer(tmp_path / "out", ours)

    @given(st.text(st.sampled_from(ours.chars), max_size=40))
    def check(text):
        ids = ours.encode(text)
        assert auto(text)["input_ids"] == auto.encode(text) == ids  # no token in front or behind
        assert auto.decode(ids) == auto.decode(ids, skip_special_tokens=True) == text

    check()
    for text in ("  two  spaces ", "\n\n", " .a 'b ! ?", ""):
        assert auto(text)["input_ids"] == ours.encode(text) and auto.decode(ours.encode(text)) == text
    assert auto.eos_token_id is None and auto.bos_token_id is None and len(auto) == ours.vocab_size
    with pytest.raises(Exception, match="UNK"):
        auto("Z")
    again = from_huggingface(tmp_path / "out")[1]
    assert again.state() == ours.state()  # the character map itself, so that our data fit


def test_smollms_tokens_are_the_same_in_transformers(tmp_path):
    ours = small_tokenizer()
    auto = their_tokenizer(tmp_path / "out", ours)
    for text in TEXTS:
        if not text.startswith("<|"):
            assert auto(text)["input_ids"] == ours.encode(text) and auto.decode(ours.encode(text)) == text
    assert auto.eos_token_id == ours.special["<|im_end|>"]


@pytest.fixture
def gpt2_files(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenizers, "GPT2_DIR", GPT2_DIR)
    monkeypatch.setattr(bpe_data, "DATASET_DIR", tmp_path / "shakespeare_bpe")


@needs_gpt2
def test_gpt2s_tokens_are_the_same_in_transformers_and_bring_their_files(tmp_path, gpt2_files, monkeypatch):
    ours = BPETokenizer()
    auto = their_tokenizer(tmp_path / "out", ours)
    for text in TEXTS:
        assert auto.decode(ours.encode(text)) == text
        if not text.startswith("<|"):
            assert auto(text)["input_ids"] == ours.encode(text)
    assert auto.eos_token_id == 50256
    # a folder of GPT-2 from elsewhere: known by its vocabulary, and no other file is needed any more
    (tmp_path / "out" / "nanogqa.json").unlink()
    monkeypatch.setattr(tokenizers, "GPT2_DIR", tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    assert checkpoint_from(tmp_path / "out")["tokenizer"] == ours.state()
    assert BPETokenizer().encode("Hello world") == [15496, 995]
    assert (tmp_path / "empty" / "vocab.bpe").read_bytes() == (GPT2_DIR / "vocab.bpe").read_bytes()


def sentencepiece_like():
    """A tokenizer as Llama 2's: a space is part of the word behind it, one is added in front, and decoding drops that."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    words = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], "▁", *"abcdefghij\n", "▁a", "▁b", "ab", "▁ab"]
    vocab = {word: i for i, word in enumerate(words)}
    made = Tokenizer(
        models.BPE(vocab, [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")], byte_fallback=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made.to_str()


def test_a_folders_tokenizer_is_read_and_goes_out_as_it_came(tmp_path):
    text = sentencepiece_like()
    vocab_size = HuggingFaceTokenizer(text).vocab_size
    folder = saved(tmp_path / "hf", theirs(vocab_size=vocab_size + 5, eos_token_id=2, bos_token_id=1))
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "auto_map": {}}'
    )
    model, tokenizer = from_huggingface(folder)
    assert model.config.vocab_size == tokenizer.vocab_size == vocab_size  # five rows of padding are gone
    ids = tokenizer.encode("ab a é</s>")
    assert 1 not in ids and 2 not in ids  # nothing in front, special text is text
    assert tokenizer.decode(ids) == "ab a é</s>"
    assert tokenizer.decode(ids[:1]) == "ab" and continuation(tokenizer, ids[:1], ids[1:2]) == " a"  # not without its space
    assert tokenizer_from(json.loads(json.dumps(tokenizer.state()))).encode("ab a") == ids[:2]

    to_huggingface(model, tokenizer, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == text
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert said["eos_token"] == "</s>" and "auto_map" not in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab a")["input_ids"] == [1, *ids[:2]]
    assert from_huggingface(tmp_path / "out")[1].state() == tokenizer.state()

    for wrong in ("{", "{}", '{"model": 3}', "[]"):
        (folder / "tokenizer.json").write_text(wrong)
        assert "tokenizer.json" in refusal(load_checkpoint, folder)
    (folder / "tokenizer.json").write_text(text)
    rewrite(saved(folder, theirs(vocab_size=20)))
    assert f"its tokenizer knows {vocab_size} tokens, its config.json 20" in refusal(load_checkpoint, folder)


# ---------------------------------------------------------------------------------------------------------------------
# the scripts


@pytest.fixture
def folder(cwd):
    """exported/, a Llama of 8 query and 2 KV heads over the letters of `cwd`'s text."""
    model = small_model(2, "llama", block_size=32, vocab_size=12)
    to_huggingface(model, CharTokenizer("abcdefghij \n"), cwd / "exported")
    return cwd / "exported"


QUIET = ("wandb=disabled", "threads=1")


def test_export_writes_what_the_scripts_and_transformers_read(call, mha, cwd):
    code, out, err = call("export", "ckpt=mha.pt", "out=exported/a b=c")
    assert (code, err) == (0, "")
    for words in ("GPT2LMHeadModel", "model.safetensors", "tokenizer.json", "from_pretrained('exported/a b=c')", "vllm"):
        assert words in out
    ours, there = load_model(load_checkpoint(mha)).eval(), AutoModelForCausalLM.from_pretrained(cwd / "exported/a b=c").eval()
    idx = tokens(2, 16, 12)
    with torch.no_grad():
        assert (ours(idx)[0] - there(idx).logits).abs().max() < 1e-5
    texts = [
        call("sample", f"ckpt={ckpt}", "prompt=abc ", "tokens=30", "threads=1")[1] for ckpt in ("mha.pt", "exported/a b=c")
    ]
    assert texts[0] == texts[1] and texts[0].startswith("abc ")
    # the same loss over the same text, which is known to be its own
    losses = [
        call("eval", f"ckpt={ckpt}", "tokens=4", "prompt_tokens=2", "batches=[]", *QUIET)[1].split("loss ")[1].split()[0]
        for ckpt in ("mha.pt", "exported/a b=c")
    ]
    assert losses[0] == losses[1]
    assert call("export", "ckpt=mha.pt", "out=exported/a b=c")[0] == 0


@pytest.mark.parametrize(
    "given, words",
    [
        (["out=x"], "no such file"),
        (["ckpt=exported"], "out=… is needed"),
        (["ckpt=exported", "out=exported"], "out=exported is the checkpoint itself"),
        (["ckpt=exported", "out=x", "dtype=int8"], "dtype=int8"),
        (["ckpt=exported", "out=input.txt"], "no folder that was exported"),
        (["ckpt=exported", "out="], "out"),
    ],
)
def test_export_refuses_in_one_line(call, folder, cwd, given, words):
    before = sorted(path for path in cwd.rglob("*"))
    code, out, err = call("export", *given)
    assert code == 2 and out == "" and err.count("\n") == 1 and words in err
    assert sorted(path for path in cwd.rglob("*")) == before


def test_what_could_not_go_out_once_it_has_fewer_heads_is_refused_before_anything_is_written(call, cwd, mha):
    assert call("train", *TINY, "model=llama", "sweep=l", "train.steps=1")[0] == 0
    for args, words in (
        (["ckpt=mha.pt", "groups=2"], "GPT2LMHeadModel"),
        (["ckpt=mha.pt", "groups=3"], "groups can be [1, 2, 4, 8]"),
        (["ckpt=runs/l/kv8-s1/last.pt", "groups=2"], "vLLM on a CPU serves heads of"),
    ):
        code, out, err = call("export", *args, "out=exported/x")
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1, err
    assert not (cwd / "exported").exists()


def test_export_of_a_gpt2_with_fewer_kv_heads_is_refused(call, cwd, mha):
    assert call("uptrain", "ckpt=mha.pt", "groups=2", "steps=0", *QUIET)[0] == 0
    code, _, err = call("export", "ckpt=runs/t/kv8-s1-to-kv2-mean-0steps/last.pt", "out=x")
    assert code == 2 and err.count("\n") == 1 and "n_kv=2" in err and "model=llama" in err and not (cwd / "x").exists()


def test_every_script_takes_a_folder(call, folder, cwd, numbers):
    code, out, err = call("sample", "ckpt=exported", "prompt=abc", "temperature=0", "tokens=60", "threads=1")
    model, tokenizer = from_huggingface(folder)
    ids = [t.item() for t in generate(model.eval(), torch.tensor([tokenizer.encode("abc")]), 60, temperature=0)]
    assert code == 0 and out == "abc" + tokenizer.decode(ids) + "\n"
    (cwd / "checkpoints").mkdir()
    os.symlink(folder, cwd / "checkpoints" / "mine")
    assert call("sample", "ckpt=mine", "prompt=abc", "temperature=0", "tokens=60", "threads=1")[1] == out

    assert call("calibrate", "ckpt=exported", "tokens=512", "source=input.txt", "threads=1")[0] == 0
    assert (folder / "calibration.pt").exists()
    quant = ("batches=[]", "source=input.txt", "cache=kvquant", "cache.bits=4", *QUIET)
    assert call("eval", "ckpt=exported", "name=q", *quant)[0] == 0
    shape = numbers("ckpt=exported", "memory=1GiB")["shape"]
    assert (shape["n_kv"], shape["head_dim"], shape["params"], shape["name"]) == (2, 8, model.n_params(), "exported")
    code, _, err = call("retrieval", "ckpt=exported", *QUIET)
    assert code == 2 and err.count("\n") == 1 and "char tokens" in err


def test_a_parent_from_elsewhere_is_uptrained_in_its_own_tokens(call, cwd):
    text = sentencepiece_like()
    parent = saved(cwd / "llama", theirs(vocab_size=HuggingFaceTokenizer(text).vocab_size, num_key_value_heads=8))
    (parent / "tokenizer.json").write_text(text)
    few = ("ckpt=llama", "groups=2", "train.eval_interval=100", "foreign.batch_size=2", "foreign.dtype=float32", *QUIET)
    code, out, err = call("uptrain", *few)
    assert code == 2 and err.count("\n") == 1 and "steps=…" in err and "parent_steps=…" in err and out == ""
    code, out, err = call("uptrain", *few, "steps=3", "window=16", "sweep=t", "name=short")
    assert code == 0, err
    summary = json.loads((cwd / "runs/t/short/summary.json").read_text())
    assert summary["steps"] == 3 and summary["n_kv_parent"] == 8 and summary["n_kv"] == 2
    last = load_checkpoint(cwd / "runs/t/short/last.pt")
    assert last["total_iterations"] == 3 and last["data"]["dataset"] == "shakespeare_own"
    assert last["tokenizer"]["json"] == text and last["config"]["window"] == 16
    assert call("uptrain", *few, "steps=3", "window=16", "sweep=t", "name=short")[1].count("finished before") == 1
    # a fraction of steps that are only stated; then the next generation, which has a schedule
    code, out, err = call("uptrain", *few, "parent_steps=40", "name=stated", "sweep=t")
    assert code == 0 and "2 steps (5.0% of the parent's 40)" in out, err
    code, out, err = call("uptrain", "ckpt=runs/t/short/last.pt", "groups=1", "fraction=1", *QUIET)
    assert code == 0 and "3 steps (100.0% of the parent's 3)" in out, err
    code, _, err = call("uptrain", "ckpt=runs/t/short/last.pt", "groups=1", "parent_steps=9", *QUIET)
    assert code == 2 and "parents from elsewhere" in err
    code, _, err = call("uptrain", *few, "steps=1", "window=100")
    assert code == 2 and "window=100 is more than the parent's context: 48" in err
    code, _, err = call("uptrain", *few, "steps=1", "data=shakespeare_char")
    assert code == 2 and "another vocabulary" in err and err.count("\n") == 1

    code, out, err = call("export", "ckpt=runs/t/short/last.pt", "out=out")
    assert code == 0, err
    assert (cwd / "out" / "tokenizer.json").read_text() == text
    code, shown, err = call("sample", "ckpt=out", "prompt=ab a", "tokens=20", "threads=1")
    assert code == 0 and shown.startswith("ab a")


@needs_gpt2
def test_a_gpt2_is_uptrained_on_shakespeare_bpe(call, cwd, gpt2_files):
    to_huggingface(small_model(8, "gpt2", bias=True, gelu="tanh", vocab_size=50257, n_embd=16), BPETokenizer(), cwd / "gpt2")
    (cwd / "gpt2" / "nanogqa.json").unlink()
    given = ("ckpt=gpt2", "groups=2", "data=shakespeare_bpe", "steps=2", "window=8", "foreign.dtype=float32", "name=r", *QUIET)
    code, out, err = call("uptrain", *given)
    assert code == 0, err
    assert json.loads((cwd / "runs/pretrained/r/summary.json").read_text())["groups"] == 2
    assert load_checkpoint(cwd / "runs/pretrained/r/last.pt")["data"]["dataset"] == "shakespeare_bpe"


def test_a_folder_without_a_tokenizer_has_no_text(call, cwd):
    saved(cwd / "hf", theirs())
    for script, *more in (("sample",), ("eval", *QUIET), ("uptrain", "groups=1", "steps=1", *QUIET), ("retrieval", *QUIET)):
        code, out, err = call(script, "ckpt=hf", *more)
        assert code == 2 and err.count("\n") == 1 and "without a tokenizer.json" in err, err
    assert call("export", "ckpt=hf", "out=out")[0] == 0 and not (cwd / "out" / "tokenizer.json").exists()


def test_refusals_end_scripts_with_code_2(call, cwd):
    rewrite(saved(cwd / "hf", theirs()), {"attention_bias": True})
    for script, *more in (
        ("sample",),
        ("eval", *QUIET),
        ("uptrain", "groups=1", *QUIET),
        ("budget",),
        ("export", "out=x"),
        ("calibrate",),
    ):
        code, out, err = call(script, "ckpt=hf", *more)
        assert code == 2 and err == "error: hf: attention_bias=True cannot be expressed here\n" and out == ""


# ---------------------------------------------------------------------------------------------------------------------
# the Hub


def test_a_name_that_is_neither_here_nor_reached_on_the_hub_is_one_line(call, cwd):
    (cwd / "checkpoints").mkdir()
    (cwd / "checkpoints" / "gpt2small.pt").touch()
    code, out, err = call("sample", "ckpt=gpt2")
    assert code == 2 and err.count("\n") == 1 and "did you mean gpt2small.pt?" in err and "Hub" in err
    for name in ("gpt2.pt", "../x", "a/b/c", "/nowhere/gpt2", "a b"):
        assert "Hub or" not in refusal(find_checkpoint, name)


def test_a_snapshot_in_the_hubs_cache_needs_no_network(cwd, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cwd / "hub"))
    repository = cwd / "hub" / "models--org--tiny-llama"
    folder = saved(repository / "snapshots" / ("a" * 40), theirs())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert find_checkpoint("org/tiny-llama") == folder
    assert name_of(folder) == "tiny-llama"
    checkpoint = load_checkpoint(folder)
    assert checkpoint["config"]["name"].startswith("tiny-llama-") and isinstance(load_model(checkpoint), GPT)
    (folder / "model.safetensors").unlink()
    assert "Hub" in refusal(find_checkpoint, "org/tiny-llama")
    assert Path("org").exists() is False


def test_other_weights_under_the_same_name_are_another_run(cwd):
    names = {checkpoint_from(saved(cwd / "hf", theirs(seed=seed)))["config"]["name"] for seed in (0, 1, 1)}
    assert len(names) == 2 and all(name.startswith("hf-") for name in names)
