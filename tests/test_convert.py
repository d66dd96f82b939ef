"""Pooling heads: contiguous groups, in the order in which query heads share them."""

import copy

import pytest
import torch
from reference import DIALECTS, reference_logits, small_model, tokens

from convert import pool_heads
from decoding import make_cache


def parts(model, layer=0, name="weight"):
    """The query rows, and the key and value heads [n_kv, hd, ...], of a layer's fused projection."""
    c = model.config
    p = getattr(model.h[layer].attn.c_attn, name).detach()
    q, kv = p[: c.n_embd], p[c.n_embd :].unflatten(0, (2, c.n_kv, c.n_embd // c.n_head))
    return q, kv[0], kv[1]


def constant_heads(n_kv=8):
    """A model with biases whose key head h is the constant h, and value head h the constant 100 + h."""
    model = small_model(n_kv, bias=True)
    with torch.no_grad():
        for layer in range(2):
            for name in ("weight", "bias"):
                _, k, v = parts(model, layer, name)
                for h in range(n_kv):
                    k[h] = h
                    v[h] = 100 + h
    return model


@pytest.mark.parametrize(
    "n_kv, groups, means",
    [(8, 2, [1.5, 5.5]), (8, 4, [0.5, 2.5, 4.5, 6.5]), (8, 1, [3.5]), (4, 2, [0.5, 2.5]), (2, 1, [0.5])],
)
def test_the_mean_of_a_contiguous_group_becomes_its_head(n_kv, groups, means):
    parent = constant_heads(n_kv)
    child = pool_heads(parent, groups)
    assert child.config.n_kv == groups and child.config.n_head == 8
    for layer in range(2):
        for name in ("weight", "bias"):
            q, k, v = parts(child, layer, name)
            assert torch.equal(q, parts(parent, layer, name)[0])
            for h, mean in enumerate(means):
                assert torch.equal(k[h], torch.full_like(k[h], mean))
                assert torch.equal(v[h], torch.full_like(v[h], 100 + mean))


def test_first_keeps_the_first_head_of_each_group():
    parent = small_model(8, bias=True)
    child = pool_heads(parent, 2, "first")
    for name in ("weight", "bias"):
        for old, new in zip(parts(parent, 1, name)[1:], parts(child, 1, name)[1:], strict=True):
            assert torch.equal(new, old[[0, 4]])


def test_random_heads_are_reproducible_and_keep_nothing_of_the_parents():
    one, other = small_model(8, bias=True, seed=0), small_model(8, bias=True, seed=1)
    a, b, c = pool_heads(one, 2, "random", seed=3), pool_heads(other, 2, "random", seed=3), pool_heads(one, 2, "random", seed=4)
    draws = []
    for layer in range(2):
        for i in (1, 2):
            x = parts(a, layer)[i]
            assert torch.equal(x, parts(b, layer)[i])
            assert not torch.equal(x, parts(c, layer)[i])
            assert not parts(a, layer, "bias")[i].any()
            draws.append(x)
    assert not any(torch.equal(x, y) for i, x in enumerate(draws) for y in draws[:i])  # no two layers, nor K and V
    assert abs(torch.stack(draws).std() / 0.02 - 1) < 0.05
    assert torch.equal(parts(a)[0], parts(one)[0])  # queries stay the parent's


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", [8, 2, 1])
@pytest.mark.parametrize("pool", ["mean", "first", "random"])
def test_as_many_heads_as_before_is_a_bit_exact_copy(n_kv, dialect, pool):
    parent = small_model(n_kv, dialect)
    child = pool_heads(parent, n_kv, pool).eval()
    assert child is not parent and child.config == parent.config
    assert all(torch.equal(p, child.state_dict()[name]) for name, p in parent.state_dict().items())
    assert torch.equal(parent(tokens(2, 9))[0], child(tokens(2, 9))[0])
    with torch.no_grad():
        child.wte.weight.zero_()
    assert parent.wte.weight.any()  # a copy, not a second name


@pytest.mark.parametrize("dialect, bias", [("gpt2", True), ("llama", False)])
@pytest.mark.parametrize("n_kv, groups", [(8, 2), (8, 1), (4, 2)])
@pytest.mark.parametrize("tie", [True, False])
def test_the_pooled_model_is_the_float64_reference_of_pooled_weights(n_kv, groups, dialect, bias, tie):
    parent = small_model(n_kv, dialect, bias=bias, tie_weights=tie)
    child = pool_heads(parent, groups).eval()
    weights = {name: p.detach().double() for name, p in parent.state_dict().items()}
    for name, p in weights.items():
        if "c_attn" in name:
            rows = [p[:64]]  # then heads of 8 rows each, keys first
            for start in (64, 64 + 8 * n_kv):
                for g in range(groups):
                    size = n_kv // groups
                    heads = [p[start + 8 * h : start + 8 * h + 8] for h in range(g * size, (g + 1) * size)]
                    rows.append(sum(heads) / size)
            weights[name] = torch.cat(rows)
    idx = tokens(2, 11)
    wanted = reference_logits(child, idx, weights)
    assert (child(idx)[0] - wanted).abs().max() < 1e-4
    with torch.no_grad():
        cached = torch.cat([child(part, cache=cache)[0] for cache in [make_cache(child, 11, 2)] for part in idx.split(4, 1)], 1)
    assert (cached - wanted).abs().max() < 1e-4
    assert (wanted - reference_logits(parent, idx)).abs().max() > 0.1  # pooling is no small change
    assert (child.lm_head.weight.data_ptr() == child.wte.weight.data_ptr()) == tie


@pytest.mark.parametrize("dialect", DIALECTS)
def test_pooling_equal_heads_changes_no_logits(dialect):
    parent = small_model(8, dialect)
    with torch.no_grad():
        for layer in range(2):
            for heads in parts(parent, layer)[1:]:
                heads[1:4], heads[5:8] = heads[0].clone(), heads[4].clone()
    child = pool_heads(parent, 2).eval()
    assert (child(tokens(2, 11))[0] - parent(tokens(2, 11))[0]).abs().max() < 1e-4


@pytest.mark.parametrize("pool", ["mean", "first", "random"])
def test_the_parent_is_left_as_it_was(pool):
    parent = small_model(8, bias=True)
    before = copy.deepcopy(parent.state_dict())
    child = pool_heads(parent, 2, pool)
    with torch.no_grad():
        for p in child.parameters():
            p.add_(1)
    assert parent.config.n_kv == 8
    assert all(torch.equal(before[name], p) for name, p in parent.state_dict().items())


def test_the_dtype_stays_the_parents():
    child = pool_heads(small_model(8).bfloat16(), 2)
    assert {p.dtype for p in child.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "n_kv, groups", [(8, 3), (8, 0), (8, -1), (8, 16), (8, "2"), (8, True), (8, 2.0), (8, None), (2, 8), (4, 3)]
)
def test_groups_that_do_not_divide_are_refused_in_one_line(n_kv, groups):
    with pytest.raises(ValueError) as error:
        pool_heads(small_model(n_kv), groups)
    assert "\n" not in str(error.value) and str(groups) in str(error.value)


def test_an_unknown_way_to_pool_is_refused_in_one_line():
    with pytest.raises(ValueError, match="'median'.*mean, first or random"):
        pool_heads(small_model(8), 2, "median")
