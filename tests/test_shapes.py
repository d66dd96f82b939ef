"""A shape read from a config has the weights, heads and windows of the real model, or the config is refused in one line."""

import json
from dataclasses import asdict

import pytest
import torch
import transformers
from reference import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from arithmetic import cache_nbytes, resized
from cli import InputError
from kv_cache.accounting import dense_nbytes
from kv_cache.dense import DenseCache
from model import GPT, GPTConfig
from shapes import FAMILIES, Shape, find_shape, huggingface_shape, presets
from storage import save_checkpoint

transformers.logging.set_verbosity_error()


def config_of(family, n_layer, n_head, hidden, inner, vocab, context, n_kv=None, **more):
    """A published config.json's entries, under the names that most families use; no n_kv: the entry is missing there."""
    config = {
        "model_type": family, "num_hidden_layers": n_layer, "num_attention_heads": n_head, "hidden_size": hidden,
        "intermediate_size": inner, "vocab_size": vocab, "max_position_embeddings": context,
    }  # fmt: skip
    return config | ({} if n_kv is None else {"num_key_value_heads": n_kv}) | more


def gpt2_config(n_layer, n_head, n_embd, context=1024, vocab=50257, family="gpt2", **more):
    shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "n_positions": context, "vocab_size": vocab}
    return {"model_type": family} | shape | more


def deepseek_config(family, n_layer, n_head, hidden, inner, expert, vocab, dense, q_lora_rank, experts, active, shared):
    return config_of(
        family, n_layer, n_head, hidden, inner, vocab, 163840, n_head, moe_intermediate_size=expert, n_shared_experts=shared,
        n_routed_experts=experts, num_experts_per_tok=active, first_k_dense_replace=dense, kv_lora_rank=512,
        q_lora_rank=q_lora_rank, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
QWEN3_MOE = {
    "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
PUBLISHED = {  # config.json as on the Hub, without the entries that change no weight and no cache
    "gpt2-small": gpt2_config(12, 12, 768),
    "gpt2-medium": gpt2_config(24, 16, 1024),
    "gpt2-large": gpt2_config(36, 20, 1280),
    "gpt2-xl": gpt2_config(48, 25, 1600),
    "santacoder": gpt2_config(24, 16, 2048, 2048, 49280, "gpt_bigcode", n_inner=8192, multi_query=True),
    "pythia-160m": config_of("gpt_neox", 12, 12, 768, 3072, 50304, 2048, **UNTIED),
    "llama2-7b": config_of("llama", 32, 32, 4096, 11008, 32000, 4096, **UNTIED),
    "llama2-13b": config_of("llama", 40, 40, 5120, 13824, 32000, 4096, **UNTIED),
    "llama2-70b": config_of("llama", 80, 64, 8192, 28672, 32000, 4096, 8, **UNTIED),
    "llama3-8b": config_of("llama", 32, 32, 4096, 14336, 128256, 8192, 8, **UNTIED),
    "llama3-70b": config_of("llama", 80, 64, 8192, 28672, 128256, 8192, 8, **UNTIED),
    "smollm2-135m": config_of("llama", 30, 9, 576, 1536, 49152, 8192, 3, **TIED),
    "smollm2-1.7b": config_of("llama", 24, 32, 2048, 8192, 49152, 8192, 32, **TIED),
    "tinyllama-1.1b": config_of("llama", 22, 32, 2048, 5632, 32000, 2048, 4, **UNTIED),
    "mistral-7b": config_of("mistral", 32, 32, 4096, 14336, 32000, 32768, 8, sliding_window=4096, **UNTIED),
    "mixtral": config_of("mixtral", 32, 32, 4096, 14336, 32000, 32768, 8, num_local_experts=8, num_experts_per_tok=2,
                         sliding_window=None, **UNTIED),
    "qwen2-0.5b": config_of("qwen2", 24, 14, 896, 4864, 151936, 32768, 2, **TIED),
    "qwen3-0.6b": config_of("qwen3", 28, 16, 1024, 3072, 151936, 40960, 8, head_dim=128, sliding_window=None,
                            use_sliding_window=False, max_window_layers=28, **TIED),
    "qwen3-8b": config_of("qwen3", 36, 32, 4096, 12288, 151936, 40960, 8, head_dim=128, **UNTIED),
    "qwen3-30b": config_of("qwen3_moe", 48, 32, 2048, 6144, 151936, 40960, 4, **QWEN3_MOE, **UNTIED),
    "gemma-2b": config_of("gemma", 18, 8, 2048, 16384, 256000, 8192, 1, head_dim=256),
    "gemma2-2b": config_of("gemma2", 26, 8, 2304, 9216, 256000, 8192, 4, head_dim=256, sliding_window=4096),
    "gemma3-1b": config_of("gemma3_text", 26, 4, 1152, 6912, 262144, 32768, 1, head_dim=256, sliding_window=512),
    "phi3-mini": config_of("phi3", 32, 32, 3072, 8192, 32064, 4096, 32, sliding_window=2047, pad_token_id=0, **UNTIED),
    "smollm3-3b": config_of("smollm3", 36, 16, 2048, 11008, 128256, 65536, 4, **TIED),
    "granite-2b": config_of("granite", 40, 32, 2048, 8192, 49152, 4096, 8, **TIED),
    "deepseek-v2-lite": deepseek_config("deepseek_v2", 27, 16, 2048, 10944, 1408, 102400, 1, None, 64, 6, 2),
    "deepseek-v3": deepseek_config("deepseek_v3", 61, 128, 7168, 18432, 2048, 129280, 3, 1536, 256, 8, 1),
}  # fmt: skip
SMALL = config_of("llama", 2, 8, 64, 96, 31, 24, 2)


def hugging_face(config):
    """transformers' own config, and its model without memory for the weights."""
    config = AutoConfig.for_model(**config)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


def n_params(model):
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# weights


def test_every_family_is_among_the_published_configs():
    assert {config["model_type"] for config in PUBLISHED.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_weights_are_those_of_the_real_model_part_by_part(name):
    shape = huggingface_shape(PUBLISHED[name], name)
    model = hugging_face(PUBLISHED[name])[1]
    parts = dict(model.named_parameters())  # a tied head is not among them twice
    assert shape.params == sum(p.numel() for p in parts.values())
    assert shape.outside == sum(p.numel() for n, p in parts.items() if ".layers." not in n and ".h." not in n)
    experts = sum(p.numel() for n, p in parts.items() if ".experts." in n)
    assert shape.expert_params == experts and (experts > 0) == (shape.n_experts > 0)
    looked_up = [p for n, p in parts.items() if n.endswith("wpe.weight")]
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        looked_up.append(model.get_input_embeddings().weight)
    assert shape.unread == sum(p.numel() for p in looked_up)


@pytest.mark.parametrize(
    "name, change",
    [
        ("llama3-8b", {"num_key_value_heads": 32}),
        ("llama3-8b", {"num_key_value_heads": 1, "num_hidden_layers": 5}),
        ("llama2-7b", {"num_hidden_layers": 48, "head_dim": 64}),
        ("qwen2-0.5b", {"num_key_value_heads": 14, "num_hidden_layers": 7}),  # with biases
        ("gemma2-2b", {"num_key_value_heads": 1}),
        ("gpt2-small", {"n_layer": 7}),
        ("mixtral", {"num_key_value_heads": 2}),
        ("mixtral", {"num_hidden_layers": 8}),
    ],
    ids=str,
)
def test_another_dial_has_the_weights_of_the_real_model_with_that_dial(name, change):
    shape = asdict(huggingface_shape(PUBLISHED[name], name))
    keys = {"num_key_value_heads": "n_kv", "num_hidden_layers": "n_layer", "n_layer": "n_layer", "head_dim": "head_dim"}
    dials = {key: shape[key] for key in ("n_layer", "n_kv", "head_dim")} | {keys[k]: v for k, v in change.items()}
    other, model = resized(shape, **dials), hugging_face(PUBLISHED[name] | change)[1]
    assert other["params"] == n_params(model)
    assert other["expert_params"] == sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert other == asdict(huggingface_shape(PUBLISHED[name] | change, name))


@pytest.mark.parametrize(
    "family, change",
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("gpt_neox", {"attention_bias": False, **UNTIED}),
        ("gpt_neox", {"tie_word_embeddings": True}),
        ("gemma3_text", {"attention_bias": True}),
        ("qwen2", TIED),
        ("mistral", {"head_dim": 24, **UNTIED}),
        ("phi3", UNTIED | {"pad_token_id": 0}),
        ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, **UNTIED}),
    ],
    ids=str,
)
def test_the_weights_follow_what_a_config_turns_on_and_off(family, change):
    config = SMALL | UNTIED | {"model_type": family, "head_dim": 8} | change
    assert huggingface_shape(config, "small").params == n_params(hugging_face(config)[1])


@pytest.mark.parametrize(
    "change", [{"first_k_dense_replace": 0}, {"first_k_dense_replace": 9}, {"n_shared_experts": 3}], ids=str
)
@pytest.mark.parametrize("q_lora_rank", [None, 96])
def test_the_weights_of_a_latent_mixture_follow_its_config(change, q_lora_rank):
    config = deepseek_config("deepseek_v3", 5, 8, 256, 192, 64, 31, 2, q_lora_rank, 4, 2, 1) | change
    model, shape = hugging_face(config)[1], huggingface_shape(config, "small")
    assert shape.params == n_params(model)
    assert shape.expert_params == sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)


# ---------------------------------------------------------------------------------------------------------------------
# presets


@pytest.mark.parametrize("name", sorted({*presets()} - {"openvla-7b", "nanogqa"}))
def test_a_preset_is_the_shape_of_the_published_config(name):
    assert find_shape("shape", name) == asdict(huggingface_shape(PUBLISHED[name], name))


def test_the_openvla_preset_is_llama_2_behind_a_vision_tower():
    vla, llama = find_shape("shape", "openvla-7b"), find_shape("shape", "llama2-7b")
    for key in ("n_layer", "n_head", "n_kv", "head_dim", "n_embd"):
        assert vla[key] == llama[key]
    assert vla["params"] - vla["outside"] == llama["params"] - llama["outside"]  # the layers
    assert vla["outside"] - vla["unread"] == 32064 * 4096 + 4096  # of the rest a step reads the head and the last norm
    assert 2 * vla["params"] == 15_082_474_368  # bytes, as its model.safetensors.index.json says


@pytest.mark.parametrize("n_kv", SHAPES)
def test_the_nanogqa_preset_is_the_model_that_is_trained_here(n_kv):
    with torch.device("meta"):
        model = GPT(GPTConfig(n_kv=n_kv))
    shape = find_shape("shape", "nanogqa")
    c = model.config
    assert (shape["n_layer"], shape["n_head"], shape["n_embd"], shape["head_dim"]) == (c.n_layer, c.n_head, c.n_embd, 32)
    assert shape["context"] == c.block_size and shape["n_kv"] == 8
    other = resized(shape, 6, n_kv, 32)
    assert other["n_kv"] == n_kv and other["params"] == model.n_params()
    assert other["outside"] == sum(p.numel() for name, p in model.named_parameters() if not name.startswith("h."))
    assert other["unread"] == model.wpe.weight.numel()


def test_a_shape_that_cannot_be_is_refused():
    shape = find_shape("shape", "nanogqa")
    for wrong in ({"n_kv": 3}, {"n_kv": 16}, {"n_layer": 0}, {"window": 0}, {"unread": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}") as error:
            Shape(**shape | wrong)
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# heads and windows


def test_a_head_dim_that_is_said_wins_over_the_width_of_the_model():
    assert huggingface_shape(SMALL, "small").head_dim == 8
    assert huggingface_shape(SMALL | {"head_dim": 20}, "small").head_dim == 20
    assert huggingface_shape(SMALL | {"head_dim": None}, "small").head_dim == 8
    assert huggingface_shape(SMALL | {"head_dim": 20, "hidden_size": 63}, "small").head_dim == 20


def test_no_number_of_kv_heads_means_one_for_each_query_head():
    missing = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    for config in (missing, SMALL | {"num_key_value_heads": None}):
        assert huggingface_shape(config, "small").n_kv == 8
        assert AutoConfig.for_model(**config).num_key_value_heads == 8
    assert huggingface_shape(SMALL, "small").n_kv == 2


def test_multi_query_is_one_head_where_a_config_says_so():
    assert huggingface_shape(PUBLISHED["santacoder"], "s").n_kv == 1
    several = PUBLISHED["santacoder"] | {"multi_query": False}
    assert huggingface_shape(several, "s").n_kv == 16
    assert huggingface_shape(several, "s").params == n_params(hugging_face(several)[1])


SLIDING = {"sliding_window": 12, "use_sliding_window": True}
WINDOWED = {  # beside the published ones: what turns windows on and off
    "mistral without": PUBLISHED["mistral-7b"] | {"sliding_window": None},
    "qwen2 off": PUBLISHED["qwen2-0.5b"] | SLIDING | {"use_sliding_window": False},
    "qwen2 from layer 5": PUBLISHED["qwen2-0.5b"] | SLIDING | {"max_window_layers": 5},
    "qwen2 by default": PUBLISHED["qwen2-0.5b"] | SLIDING | {"num_hidden_layers": 30},
    "qwen3 from layer 1": PUBLISHED["qwen3-0.6b"] | SLIDING | {"max_window_layers": 1},
    "qwen3 beyond": PUBLISHED["qwen3-0.6b"] | SLIDING | {"max_window_layers": 99},
    "gemma2 odd": PUBLISHED["gemma2-2b"] | {"num_hidden_layers": 5},
    "gemma2 said": PUBLISHED["gemma2-2b"] | {"layer_types": ["full_attention"] * 25 + ["sliding_attention"]},
    "gemma3 pattern": PUBLISHED["gemma3-1b"] | {"sliding_window_pattern": 4},
    "gemma3 short": PUBLISHED["gemma3-1b"] | {"num_hidden_layers": 5},
    "smollm3 off": PUBLISHED["smollm3-3b"] | SLIDING | {"use_sliding_window": False},
    "smollm3 on": PUBLISHED["smollm3-3b"] | SLIDING,
    "qwen3_moe on": PUBLISHED["qwen3-30b"] | SLIDING,
}


@pytest.mark.parametrize("name", [*PUBLISHED, *WINDOWED])
def test_the_layers_with_a_window_are_those_of_transformers_cache(name):
    published = (PUBLISHED | WINDOWED)[name]
    config, shape = AutoConfig.for_model(**published), huggingface_shape(published, name)
    layers = [layer for layer in DynamicCache(config=config).layers if getattr(layer, "is_sliding", False)]
    assert shape.windowed == len(layers)
    assert {layer.sliding_window for layer in layers} == ({shape.window} if layers else set())
    if (kinds := getattr(config, "layer_types", None)) is not None:
        assert shape.windowed == kinds.count("sliding_attention")


@pytest.mark.parametrize("pieces", [[30], [5] + [1] * 25, [7, 1, 1, 8, 13]], ids=str)
@pytest.mark.parametrize("family, windowed", [("mistral", 4), ("gemma2", 2), ("llama", 0)])
def test_the_bytes_of_windows_are_those_of_transformers_cache(family, windowed, pieces):
    """Its layers with a window keep window - 1 tokens between steps: the newest joins them only while a step runs."""
    window = 8
    config = AutoConfig.for_model(
        family, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=6, hidden_size=48, vocab_size=31,
        intermediate_size=64, max_position_embeddings=64, pad_token_id=0, **{"sliding_window": window} if windowed else {},
    )  # fmt: skip
    model, cache = AutoModelForCausalLM.from_config(config).eval(), DynamicCache(config=config)
    shape, s = asdict(huggingface_shape(config.to_dict(), family)), {"kv_dtype": "fp32", "tp": 1}
    assert shape["windowed"] == windowed == sum(layer.is_sliding for layer in cache.layers)
    tokens, one = 0, dense_nbytes(1, 2, 6, 1, 3, 4)
    for piece in pieces:
        with torch.no_grad():
            model(torch.randint(31, (3, piece)), cache=cache)
        tokens += piece
        for layer in cache.layers:
            missing = layer.is_sliding and tokens >= window  # the one token
            assert layer.keys.nbytes + layer.values.nbytes == one * (min(tokens, window) - 1 if missing else tokens)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert cache_nbytes(shape, s, tokens, 3) == held + (windowed * one if tokens >= window else 0)


# ---------------------------------------------------------------------------------------------------------------------
# files


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_saved_by_transformers_reads_the_same(tmp_path, name):
    AutoConfig.for_model(**PUBLISHED[name]).save_pretrained(tmp_path / name)
    assert find_shape("shape", str(tmp_path / name)) == asdict(huggingface_shape(PUBLISHED[name], name))


def test_a_folder_its_config_and_a_file_of_any_name_count_the_same(numbers, tmp_path):
    AutoConfig.for_model(**SMALL).save_pretrained(tmp_path / "small")
    (tmp_path / "small.json").write_text(json.dumps(SMALL | TIED | {"model_type": "llama"}))
    counted = [numbers(f"shape={tmp_path / path}") for path in ("small", "small/config.json")]
    assert counted[0] == counted[1] and counted[0]["shape"]["name"] == "small"
    assert counted[0]["own"]["cache_bytes"] == 2 * 2 * 2 * 8 * 24 * 2
    assert numbers(f"shape={tmp_path / 'small.json'}")["own"]["cache_bytes"] == counted[0]["own"]["cache_bytes"]
    assert numbers("shape=nanogqa", f"draft={tmp_path / 'small'}")["draft"]["cache_bytes"] == 2 * 2 * 2 * 8 * 256 * 2


def test_of_a_model_of_several_parts_the_text_part_is_counted():
    whole = {"model_type": "llava", "vision_config": {"num_hidden_layers": 99}, "hidden_size": 1, "text_config": SMALL}
    assert huggingface_shape(whole, "vlm") == huggingface_shape(SMALL, "vlm, text part")  # says what it leaves out
    tied = huggingface_shape(whole | {"tie_word_embeddings": True}, "vlm")  # where such configs say it
    assert tied == huggingface_shape(SMALL | {"tie_word_embeddings": True}, "vlm, text part")
    assert huggingface_shape(SMALL | {"text_config": None}, "small") == huggingface_shape(SMALL, "small")


GEMMA2, QWEN2 = PUBLISHED["gemma2-2b"], PUBLISHED["qwen2-0.5b"]


@pytest.mark.parametrize(
    "config, words",
    [
        (SMALL | {"model_type": "mamba"}, "model_type='mamba' gemma2"),
        (SMALL | {"model_type": "lama"}, "model_type='lama' mean llama?"),
        (SMALL | {"model_type": None}, "model_type=None"),
        (SMALL | {"model_type": ["llama"]}, "model_type=['llama']"),
        ({}, "model_type=None"),
        ({key: value for key, value in SMALL.items() if key != "hidden_size"}, "hidden_size"),
        (SMALL | {"hidden_size": None}, "hidden_size=None"),
        (SMALL | {"hidden_size": "64"}, "hidden_size='64'"),
        (SMALL | {"hidden_size": 64.0}, "hidden_size=64.0"),
        (SMALL | {"hidden_size": "6\n4"}, "hidden_size="),
        (SMALL | {"hidden_size": 63}, "63 head_dim"),
        (SMALL | {"hidden_size": 63, "head_dim": None}, "63 head_dim"),
        (SMALL | {"num_hidden_layers": -2}, "num_hidden_layers=-2"),
        (SMALL | {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (SMALL | {"num_attention_heads": True}, "num_attention_heads=True"),
        (SMALL | {"num_key_value_heads": "2"}, "num_key_value_heads='2'"),
        (SMALL | {"num_key_value_heads": 3}, "n_kv=3 [1,"),
        (SMALL | {"num_key_value_heads": 16}, "n_kv=16 n_head=8"),
        (SMALL | {"head_dim": -8}, "head_dim=-8"),
        (SMALL | {"vocab_size": [31]}, "vocab_size=[31]"),
        (SMALL | {"vocab_size": 10**400}, "vocab_size=1000"),
        (SMALL | {"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
        (SMALL | {"attention_bias": "no"}, "attention_bias='no'"),
        (SMALL | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (SMALL | {"text_config": [SMALL]}, "text_config"),
        ({"text_config": {"model_type": "llama"}}, "num_hidden_layers"),
        (PUBLISHED["mistral-7b"] | {"sliding_window": True}, "sliding_window=True"),
        (PUBLISHED["mistral-7b"] | {"sliding_window": "4096"}, "sliding_window='4096'"),
        (PUBLISHED["mistral-7b"] | {"sliding_window": -1}, "sliding_window=-1"),
        (GEMMA2 | {"layer_types": ["linear_attention"] * 26}, "layer_types 'linear_attention'"),
        (GEMMA2 | {"layer_types": ["full_attention"] * 3}, "layer_types 3 26"),
        (GEMMA2 | {"layer_types": 5}, "layer_types"),
        (GEMMA2 | {"layer_types": [["full_attention"]] * 26}, "layer_types"),
        (PUBLISHED["gemma3-1b"] | {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        (PUBLISHED["gemma3-1b"] | {"sliding_window_pattern": "6"}, "sliding_window_pattern='6'"),
        (QWEN2 | SLIDING | {"max_window_layers": "3"}, "max_window_layers='3'"),
        (QWEN2 | SLIDING | {"max_window_layers": -5}, "max_window_layers=-5"),
        (PUBLISHED["qwen3-30b"] | {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (PUBLISHED["qwen3-30b"] | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (PUBLISHED["mixtral"] | {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        (PUBLISHED["deepseek-v3"] | {"v_head_dim": 127}, "127 odd"),
        (PUBLISHED["deepseek-v3"] | {"kv_lora_rank": None}, "kv_lora_rank=None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_is_not_understood_is_refused_in_one_line(config, words):
    with pytest.raises(InputError) as error:
        huggingface_shape(config, "wrong")
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words.split()), error.value


@pytest.mark.parametrize(
    "text, word",
    [
        ("", "JSON"), ("layers: 3", "JSON"), ("{'a': 1}", "JSON"), ('{"model_type": "llama"', "JSON"), ("[1, 2]", "object"),
        ('"llama"', "object"), ("null", "object"), ("[" * 100_000, "JSON"), ('{"n": ' + "9" * 5000 + "}", "JSON"),
        (b"\xff\xfe{", "JSON"), ("{}", "model_type"), ("{}" + " " * 2**24, "16 MiB"),
    ],
    ids=lambda value: repr(value)[:12],
)  # fmt: skip
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path, text, word):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for name in (path, tmp_path):
        with pytest.raises(InputError) as error:
            find_shape("draft", str(name))
        assert str(error.value).startswith(f"draft={name}: ") and word in str(error.value) and "\n" not in str(error.value)


def test_a_path_that_holds_no_config_is_refused_in_one_line(tmp_path):
    (tmp_path / "folder.json").mkdir()
    for name in ("", tmp_path, tmp_path / "folder.json", tmp_path / "config.json", "lama2-7b", "a\0b", "x" * 300):
        with pytest.raises(InputError, match="^shape=") as error:
            find_shape("shape", str(name))
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints


@pytest.mark.parametrize(
    "more",
    [{}, {"n_kv": 2, "bias": True}, {"n_kv": 1, "dialect": "llama"}, {"dialect": "llama", "tie_weights": False}],
    ids=str,
)
def test_a_checkpoint_has_the_weights_of_its_model_and_the_bytes_of_its_cache(numbers, mha, more):
    checkpoint = torch.load(mha)
    if more:
        checkpoint["model_config"] |= more
        checkpoint["model"] = GPT(GPTConfig(**checkpoint["model_config"])).state_dict()
        save_checkpoint(mha, checkpoint)
    model = GPT(GPTConfig(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    c, counted = model.config, numbers("ckpt=mha.pt", "kv_dtype=fp32", "batch=3", "weight_dtype=fp32")
    assert counted["shape"]["name"] == "mha" and counted["shape"]["params"] == model.n_params()
    assert counted["own"]["weight_bytes"] == sum(p.nbytes for p in model.parameters())
    looked_up = [m.weight for name, m in model.named_children() if name == "wpe" or (name == "wte" and not c.tie_weights)]
    assert counted["own"]["weight_bytes_read"] == counted["own"]["weight_bytes"] - sum(p.nbytes for p in looked_up)
    cache = DenseCache(c.n_layer, c.n_kv, c.head_dim, c.block_size, 3)
    assert counted["own"]["cache_bytes"] == cache.capacity_nbytes()  # all of the context
    for row in counted["heads"]:  # the other ends of the dial are real models too
        other = GPT(GPTConfig(**checkpoint["model_config"] | {"n_kv": row["n_kv"]}))
        assert row["weight_bytes"] == sum(p.nbytes for p in other.parameters())
    s = counted["setting"] | {"kv_dtype": "bf16"}
    assert cache_nbytes(counted["shape"], s, c.block_size, 3) == cache.capacity_nbytes() // 2
