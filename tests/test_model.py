"""The model against nanoGPT's multi-head attention to the bit, and against a float64 loop over heads for every n_kv."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import DIALECTS, SHAPES, attend, reference_logits, small_model, tokens
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from decoding import make_cache
from model import GPT, GPTConfig, causal_attention, rotary_table


def random_qkv(B=2, n_head=8, n_kv=2, T=7, hd=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, n_head, T, hd), (B, n_kv, T, hd), (B, n_kv, T, hd))
    return [2 * torch.randn(shape, generator=generator) for shape in shapes]


# ---------------------------------------------------------------------------------------------------------------------
# nanoGPT's own multi-head block, with the same weights


def nanogpt_logits(model, idx):
    """A plain GPT-2 forward in nanoGPT's form: it knows one number of heads."""
    w, c = dict(model.state_dict()), model.config
    B, T = idx.shape
    C, n_head = c.n_embd, c.n_head
    x = F.embedding(idx, w["wte.weight"]) + F.embedding(torch.arange(T), w["wpe.weight"])
    for layer in range(c.n_layer):

        def linear(x, name, at=f"h.{layer}."):
            return F.linear(x, w[f"{at}{name}.weight"], w.get(f"{at}{name}.bias"))

        def norm(x, name, at=f"h.{layer}."):
            return F.layer_norm(x, (C,), w[f"{at}{name}.weight"], w.get(f"{at}{name}.bias"), 1e-5)

        q, k, v = linear(norm(x, "ln_1"), "attn.c_attn").split(C, dim=2)
        k = k.view(B, T, n_head, C // n_head).transpose(1, 2)
        q = q.view(B, T, n_head, C // n_head).transpose(1, 2)
        v = v.view(B, T, n_head, C // n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        x = x + linear(y, "attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, "ln_2"), "mlp.c_fc")), "mlp.c_proj")
    x = F.layer_norm(x, (C,), w["ln_f.weight"], w.get("ln_f.bias"), 1e-5)
    return F.linear(x, w["lm_head.weight"])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("T", [1, 2, 24])
def test_as_many_kv_heads_as_query_heads_is_nanogpt_to_the_bit(bias, T):
    model = small_model(n_kv=8, bias=bias)
    idx = tokens(3, T)
    assert torch.equal(model(idx)[0], nanogpt_logits(model, idx))


# ---------------------------------------------------------------------------------------------------------------------
# a float64 loop over heads


@pytest.mark.parametrize("dialect, bias", [("gpt2", False), ("gpt2", True), ("llama", False)])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_logits_agree_with_a_float64_loop_over_heads(n_kv, dialect, bias):
    model = small_model(n_kv, dialect, bias=bias, rope_base=500.0)
    idx = tokens(2, 13)
    assert (model(idx)[0] - reference_logits(model, idx)).abs().max() < 1e-4


def test_the_reference_tells_repeated_from_tiled_heads():
    q, k, v = random_qkv()
    wrong = attend(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1))  # heads 0,1,0,1,...
    assert (wrong - attend(q, k, v)).abs().max() > 0.1


@given(
    B=st.integers(1, 3),
    n_kv=st.sampled_from([1, 2, 3]),
    group=st.integers(1, 4),
    T=st.integers(1, 9),
    hd=st.integers(1, 6),
    dropout=st.sampled_from([0.0, 1e-12]),  # the second takes the path that knows dropout
)
def test_attention_agrees_with_a_float64_loop_for_any_shape(B, n_kv, group, T, hd, dropout):
    q, k, v = random_qkv(B, n_kv * group, n_kv, T, hd)
    y = causal_attention(q, k, v, dropout)
    assert y.shape == q.shape
    assert (y - attend(q, k, v)).abs().max() < 1e-5


@pytest.mark.parametrize("n_kv", SHAPES)
def test_dropout_keeps_the_mean_of_attention_and_never_looks_ahead(n_kv):
    q, k, v = random_qkv(n_kv=n_kv, T=5)
    torch.manual_seed(0)
    draws = torch.stack([causal_attention(q, k, v, dropout=0.3) for _ in range(3000)])
    exact = attend(q, k, v)
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - exact).abs() < 6 * error + 1e-4).all()
    first = draws[:, :, :, 0]  # [draws, B, n_head, hd]: the first token sees itself alone, kept and scaled, or dropped
    whole = v[:, :, 0].repeat_interleave(8 // n_kv, dim=1) / 0.7
    kept = (first - whole).abs().amax(-1) < 1e-5
    dropped = (first == 0).all(-1)
    assert (kept ^ dropped).all()
    assert abs(kept.float().mean() - 0.7) < 0.02
    assert (kept[:, :, 0] != kept[:, :, 1]).any()  # the query heads of a group draw each their own dropout


@pytest.mark.parametrize("dropout", [0.0, 1e-12])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_gradients_of_attention_agree_with_float64(n_kv, dropout):
    q, k, v = (x.requires_grad_() for x in random_qkv(n_kv=n_kv))
    direction = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((causal_attention(q, k, v, dropout) * direction).sum(), (q, k, v))
    wanted = torch.autograd.grad((attend(q, k, v) * direction).sum(), (q, k, v))
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.parametrize("dialect", DIALECTS)
def test_gradients_of_every_weight_agree_with_float64(dialect):
    model = small_model(2, dialect, n_layer=1)
    idx = tokens(2, 9)
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    logits = reference_logits(model, idx[:, :-1], {**weights, "lm_head.weight": weights["wte.weight"]})
    loss = -torch.log_softmax(logits, -1).gather(-1, idx[:, 1:, None]).mean()
    loss.backward()
    for name, p in model.named_parameters():
        scale = weights[name].grad.abs().max()
        assert (p.grad - weights[name].grad).abs().max() < 1e-4 * scale + 1e-7, name


# ---------------------------------------------------------------------------------------------------------------------
# no copies of K and V


class Products(TorchDispatchMode):
    """Notes, for every kernel that multiplies queries with keys or weights with values, how many heads it was given."""

    def __init__(self):
        super().__init__()
        self.heads, self.names = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.names.add(name)
        if name in ("bmm", "baddbmm"):
            self.heads |= {a.shape[0] for a in args if isinstance(a, torch.Tensor) and a.dim() == 3}
        elif "scaled_dot_product" in name and "backward" not in name:
            self.heads |= {a.shape[0] * a.shape[1] for a in args[1:3]}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("path", ["training", "dropout", "prefill", "chunk", "decode"])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_no_path_copies_shared_keys_and_values(path, n_kv, monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: None)  # they do no products that could be watched
    B = 3
    model = small_model(n_kv, dropout=0.1 if path == "dropout" else 0.0)
    cache = make_cache(model, 24, B) if path in ("prefill", "chunk", "decode") else None
    if path in ("chunk", "decode"):
        model(tokens(B, 10), cache=cache)
    with Products() as seen, torch.set_grad_enabled(cache is None):
        if path in ("training", "dropout"):
            model.train()
            model(tokens(B, 12), tokens(B, 12))[1].backward()
        else:
            model(tokens(B, 1 if path == "decode" else 5), cache=cache)
    assert seen.heads == {B * n_kv}  # not B * 8: then K and V were expanded before the product
    assert not {name for name in seen.names if "repeat_interleave" in name}


@pytest.mark.parametrize("n_kv", [2, 1])
def test_the_watch_for_copies_sees_one(n_kv):
    q, k, v = random_qkv(B=3, n_kv=n_kv)
    with Products() as seen:
        k, v = k.repeat_interleave(8 // n_kv, dim=1), v.repeat_interleave(8 // n_kv, dim=1)
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert seen.heads == {24}


# ---------------------------------------------------------------------------------------------------------------------
# configs


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"n_kv": 3}, ("n_kv=3", "n_head=8")),
        ({"n_kv": 16}, ("n_kv=16", "n_head=8")),
        ({"n_kv": 0}, ("n_kv=0",)),
        ({"n_kv": -1}, ("n_kv=-1",)),
        ({"n_kv": True}, ("n_kv=True",)),
        ({"n_kv": 2.0}, ("n_kv=2.0",)),
        ({"n_kv": "2"}, ("n_kv='2'",)),
        ({"n_head": 0}, ("n_head=0",)),
        ({"n_embd": 100}, ("n_embd=100", "n_head=8")),
        ({"n_embd": 4, "n_head": 8}, ("n_embd=4", "n_head=8")),
        ({"n_layer": 0}, ("n_layer=0",)),
        ({"block_size": 0}, ("block_size=0",)),
        ({"vocab_size": 0}, ("vocab_size=0",)),
        ({"dialect": "bert"}, ("dialect='bert'", "gpt2", "llama")),
        ({"dialect": "llama", "bias": True}, ("bias", "llama")),
        ({"dialect": "llama", "n_embd": 24}, ("head_dim=3",)),
        ({"dropout": 1.0}, ("dropout=1.0",)),
        ({"dropout": math.nan}, ("dropout=nan",)),
        ({"rope_base": 0.0}, ("rope_base=0",)),
        ({"rope_base": math.nan}, ("rope_base=nan",)),
        ({"rope_base": math.inf}, ("rope_base=inf",)),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_in_one_line_with_its_numbers(wrong, named):
    with pytest.raises(ValueError) as error:
        GPTConfig(**{"n_head": 8, "n_kv": 8, "n_embd": 256, **wrong})
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in named), str(error.value)


def test_a_refused_n_kv_lists_the_divisors_and_a_refused_width_the_nearest_multiple():
    with pytest.raises(ValueError, match=r"\[1, 2, 4, 8\]"):
        GPTConfig(n_kv=3)
    with pytest.raises(ValueError, match="n_embd=96"):
        GPTConfig(n_embd=100)


def test_more_tokens_than_the_context_are_refused_in_one_line():
    with pytest.raises(ValueError, match="block_size=24"):
        small_model()(tokens(1, 25))


# ---------------------------------------------------------------------------------------------------------------------
# initial weights, parameters, optimizer


def fresh(n_kv=8, seed=1, dialect="gpt2", **kwargs):
    shape = {"vocab_size": 65, "block_size": 64, "n_layer": 3, "n_head": 8, "n_embd": 64}
    return GPT(GPTConfig(**{**shape, "n_kv": n_kv, "dialect": dialect, **kwargs}), seed=seed)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_seed_fixes_the_weights_whatever_was_drawn_before(dialect):
    first = fresh(2, dialect=dialect).state_dict()
    torch.manual_seed(99)
    torch.randn(7)
    again, other = fresh(2, dialect=dialect).state_dict(), fresh(2, seed=2, dialect=dialect).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if first[name].dim() == 2 and name != "wpe.weight"]  # positions start as sinusoids
    assert all(not torch.equal(first[name], other[name]) for name in drawn)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_arms_with_another_n_kv_start_from_the_same_other_weights(dialect):
    arms = [fresh(n_kv, dialect=dialect).state_dict() for n_kv in SHAPES]
    shared = [name for name in arms[0] if "c_attn" not in name]
    assert {"wte.weight", "h.0.attn.c_proj.weight", "h.2.mlp.c_proj.weight", "h.1.mlp.c_fc.weight"} <= set(shared)
    for arm in arms[1:]:
        assert arm.keys() == arms[0].keys()
        assert all(torch.equal(arm[name], arms[0][name]) for name in shared)


@pytest.mark.parametrize("dialect, bias", [("gpt2", True), ("gpt2", False), ("llama", False)])
def test_initial_weights_have_nanogpts_spread(dialect, bias):
    for name, p in fresh(2, dialect=dialect, bias=bias, tie_weights=False).named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.zeros_like(p) if name.endswith("bias") else torch.ones_like(p)), name
            continue
        if name == "wpe.weight":
            continue  # the one difference, below
        std = 0.02 / math.sqrt(2 * 3) if name.endswith("c_proj.weight") else 0.02
        sigmas = 6 / math.sqrt(p.numel())
        assert abs(p.mean()) < sigmas * std, name
        assert abs(p.std() / std - 1) < sigmas, name


def test_positions_start_as_sinusoids_of_the_same_scale():
    table = fresh(2).wpe.weight.double()  # [block_size, C]
    T, C = table.shape
    for position in (0, 1, T - 1):
        for i in range(C // 2):
            angle = position / 10000 ** (2 * i / C)
            wanted = 0.02 * math.sqrt(2) * torch.tensor([math.sin(angle), math.cos(angle)], dtype=torch.float64)
            assert torch.allclose(table[position, [i, C // 2 + i]], wanted, atol=1e-7)
    assert abs(table.square().mean().sqrt() / 0.02 - 1) < 1e-3


@pytest.mark.parametrize("n_kv", SHAPES)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_number_of_parameters_follows_the_closed_formula(n_kv, tie, bias):
    V, T, L, C, hd = 65, 64, 3, 64, 8
    kv = 2 * n_kv * hd
    layer = C * (C + kv) + C * C + 8 * C * C + 2 * C  # c_attn, c_proj, the MLP's two, two norms
    if bias:
        layer += (C + kv) + C + 4 * C + C + 2 * C
    total = V * C + T * C + L * layer + (2 * C if bias else C) + (0 if tie else V * C)
    model = fresh(n_kv, tie_weights=tie, bias=bias)
    assert model.n_params() == total


@pytest.mark.parametrize("n_kv", SHAPES)
def test_the_llama_dialect_follows_the_closed_formula_too(n_kv):
    V, L, C, hd, inner = 65, 3, 64, 8, 192  # 8/3 * 64 = 170.7, the next multiple of 32
    total = V * C + L * (C * (C + 2 * n_kv * hd) + C * C + 3 * C * inner + 2 * C) + C
    assert fresh(n_kv, dialect="llama").n_params() == total


def test_tied_weights_are_one_matrix_and_untied_ones_are_two():
    tied, untied = fresh(tie_weights=True), fresh(tie_weights=False)
    assert tied.lm_head.weight.data_ptr() == tied.wte.weight.data_ptr()
    assert untied.lm_head.weight.data_ptr() != untied.wte.weight.data_ptr()


def test_matrices_decay_and_vectors_do_not():
    model = fresh(2, bias=True)
    decayed, free = model.optimizer(1e-3, (0.9, 0.95), 0.1).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in free["params"]} == {
        n for n in names.values() if ".ln_" in n or n[:4] == "ln_f" or "bias" in n
    }
    assert len(decayed["params"]) + len(free["params"]) == len(names)


def test_the_loss_is_the_mean_cross_entropy_in_nats():
    model = small_model()
    idx = tokens(2, 9)
    logits = reference_logits(model, idx[:, :-1])
    total = 0.0
    for b in range(2):
        for t in range(8):
            row = logits[b, t]
            total += (torch.log(torch.exp(row - row.max()).sum()) + row.max() - row[idx[b, t + 1]]).item()
    assert abs(model(idx[:, :-1], idx[:, 1:])[1].item() - total / 16) < 1e-5


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_later_token_never_changes_an_earlier_logit(dialect):
    model = small_model(2, dialect)
    idx = tokens(1, 12)
    changed = idx.clone()
    changed[0, 7] = (idx[0, 7] + 1) % 31
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[0, :7], after[0, :7])
    assert (before[0, 7:] - after[0, 7:]).abs().amax(-1).min() > 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# what checkpoints made elsewhere need

ELSEWHERE = [
    ("gpt2", {"bias": True, "gelu": "tanh", "norm_eps": 1e-3, "n_inner": 40}),
    ("gpt2", {"head_size": 5, "bias": True}),
    ("llama", {"head_size": 6, "n_inner": 24, "norm_eps": 1e-2}),
    ("llama", {"head_size": 16, "rope_base": 500.0}),
]


@pytest.mark.parametrize("dialect, fields", ELSEWHERE, ids=str)
@pytest.mark.parametrize("n_kv", SHAPES)
@torch.no_grad()
def test_models_of_other_widths_give_the_float64_logits(n_kv, dialect, fields):
    model, idx = small_model(n_kv, dialect, **fields), tokens(2, 20)
    wanted = reference_logits(model, idx)
    assert (model(idx)[0] - wanted).abs().max() < 1e-4
    cache = make_cache(model, 20, 2)
    cached = torch.cat([model(part, cache=cache)[0] for part in idx.split([7, 1, 12], dim=1)], dim=1)
    assert (cached - wanted).abs().max() < 1e-4
    assert model.h[0].attn.c_proj.weight.shape == (64, 8 * model.config.head_dim)
    assert sum(cache.nbytes().values()) == 2 * 2 * n_kv * fields.get("head_size", 8) * 20 * 2 * 4


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=lambda s: s["rope_type"])
def test_scaled_rotations_are_hugging_faces(scaling):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=32, rope_parameters={**scaling, "rope_theta": 10000.0})
    frequency, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, device="cpu")
    cos, sin = rotary_table(GPTConfig(dialect="llama", n_embd=256, block_size=100, rope_scaling=scaling))
    angle = torch.arange(100, dtype=torch.float64)[:, None] * frequency.double()  # [100, 16]
    assert factor == 1.0
    assert (cos[:, :16] - angle.cos()).abs().max() < 1e-4 and (sin[:, 16:] - angle.sin()).abs().max() < 1e-4
    plain, _ = rotary_table(GPTConfig(dialect="llama", n_embd=256, block_size=100))
    assert (cos - plain).abs().max() > 0.1


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"head_size": 0}, "head_size=0"),
        ({"n_inner": -1}, "n_inner=-1"),
        ({"dialect": "llama", "head_size": 5}, "head_dim=5 is odd"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0"),
        ({"gelu": "quick"}, "gelu='quick'"),
        ({"dialect": "llama", "gelu": "tanh"}, "gelu='tanh'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "gpt2 dialect"),
        ({"dialect": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"dialect": "llama", "rope_scaling": {"rope_type": "linear"}}, "takes factor"),
        ({"dialect": "llama", "rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor=0.0"),
        ({"dialect": "llama", "rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor"),
    ],
)
def test_other_widths_that_cannot_be_are_refused_in_one_line(fields, words):
    with pytest.raises(ValueError) as error:
        GPTConfig(**fields)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_new_fields_left_alone_change_no_name_and_no_weight():
    explicit = GPT(GPTConfig(head_size=32, n_inner=1024, norm_eps=1e-5), seed=3)
    for (name, p), (same, q) in zip(GPT(GPTConfig(), seed=3).state_dict().items(), explicit.state_dict().items(), strict=True):
        assert name == same and torch.equal(p, q)
