"""Pooling heads: groups in the order in which query heads share them, and the maps that lose least."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import DIALECTS, reference_logits, small_model, tokens

from decoding import make_cache
from pooling import POOLS, Layer, error, expand_heads, least_error, maps, measure, pool_heads, real, turned


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
@pytest.mark.parametrize("pool", POOLS)
def test_as_many_heads_as_before_is_a_bit_exact_copy(n_kv, dialect, pool):
    parent = small_model(n_kv, dialect)
    child = pool_heads(parent, n_kv, pool, moments=measure(parent, tokens(2, 9)), similar=True).eval()
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


@pytest.mark.parametrize("pool", POOLS)
def test_the_parent_is_left_as_it_was(pool):
    parent = small_model(8, bias=True)
    before = copy.deepcopy(parent.state_dict())
    child = pool_heads(parent, 2, pool, moments=measure(parent, tokens(2, 9)), similar=True)
    with torch.no_grad():
        for p in child.parameters():
            p.add_(1)
    assert parent.config.n_kv == 8
    assert all(torch.equal(before[name], p) for name, p in parent.state_dict().items())


def test_the_dtype_stays_the_parents():
    child = pool_heads(small_model(8).bfloat16(), 2)
    assert {p.dtype for p in child.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "n_kv, groups", [(8, 3), (8, 0), (8, -1), (8, 16), (8, "2"), (8, True), (8, 2.0), (8, None), (2, 3), (4, 3)]
)
def test_groups_that_do_not_divide_are_refused_in_one_line(n_kv, groups):
    with pytest.raises(ValueError) as error:
        pool_heads(small_model(n_kv), groups)
    assert "\n" not in str(error.value) and str(groups) in str(error.value)


def test_an_unknown_way_to_pool_is_refused_in_one_line():
    with pytest.raises(ValueError, match="'median'.*mean, first, random, aligned or svd"):
        pool_heads(small_model(8), 2, "median")


# ---------------------------------------------------------------------------------------------------------------------
# aligned and svd


def positive(n, rank, draw, complex_):
    a = torch.randn(n, rank, generator=draw, dtype=torch.complex128 if complex_ else torch.float64)
    return a @ a.mH


@given(m=st.integers(2, 4), d=st.integers(1, 4), F=st.integers(1, 2), complex_=st.booleans(), seed=st.integers(0, 999))
def test_svd_loses_the_discarded_eigenvalues_and_nothing_loses_less(m, d, F, complex_, seed):
    draw, n = torch.Generator().manual_seed(seed), m * d
    S, P = (torch.stack([positive(n, n, draw, complex_) for _ in range(F)]) for _ in range(2))
    E, D = least_error(S, P, m)
    best = error(S, P, E, D)
    discarded = torch.linalg.eigvals(P @ S).real.sort(dim=-1).values[:, :-d].sum().item()  # those of P^(1/2) S P^(1/2)
    assert best == pytest.approx(discarded, rel=1e-6)
    for pool in ("mean", "first", "aligned"):
        assert error(S, P, *maps(pool, S, P, m)) >= best * (1 - 1e-9)
    for scale in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(10):
            near = [x + scale * x.abs().mean() * torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in (E, D)]
            assert error(S, P, *near) >= best * (1 - 1e-9)
            any_ = near[0]  # and the best reading D of another z, by least squares: D = S E^H (E S E^H)^-1
            read = S @ any_.mH @ torch.linalg.inv(any_ @ S @ any_.mH)
            assert error(S, P, any_, read) >= best * (1 - 1e-9)


def test_svd_bears_what_nobody_looks_at_and_what_never_varies():
    draw = torch.Generator().manual_seed(0)
    for rank_s, rank_p in ((1, 6), (6, 1), (2, 2), (0, 6), (6, 0)):
        S, P = positive(6, rank_s, draw, False)[None], positive(6, rank_p, draw, False)[None]
        E, D = least_error(S, P, 2)
        assert E.isfinite().all() and D.isfinite().all()
        assert error(S, P, E, D) < 1e-9 or rank_s > 3 < rank_p


def inputs(model, idx):
    """What enters each layer's attention, [B, T, C]."""
    seen = []
    hooks = [block.ln_1.register_forward_hook(lambda _, __, x: seen.append(x.detach())) for block in model.h]
    model(idx)
    for hook in hooks:
        hook.remove()
    return seen


def rotation(angles, hd):
    """The matrix that turns pairs (i, i + hd/2) by `angles`, each cell written down."""
    R, half = torch.zeros(hd, hd, dtype=torch.float64), hd // 2
    for i, angle in enumerate(angles):
        R[i, i] = R[i + half, i + half] = math.cos(angle)
        R[i + half, i], R[i, i + half] = math.sin(angle), -math.sin(angle)
    return R


def test_turned_is_the_mean_over_rotations():
    draw, hd = torch.Generator().manual_seed(0), 6
    a, share = torch.randn(hd, hd, generator=draw).double(), torch.rand(5, generator=draw).double()
    angles = 3 * torch.randn(5, hd // 2, generator=draw).double()
    wanted = sum(w * rotation(t, hd) @ a @ rotation(t, hd).T for w, t in zip(share, angles, strict=True))
    z = torch.exp(1j * angles)
    turns = torch.stack([torch.einsum("d,df,dg->fg", share + 0j, z, other) for other in (z.conj(), z)])
    assert torch.allclose(turned(a, turns), wanted)


@pytest.mark.parametrize("n_kv, group", [(8, [1, 2, 6]), (4, [0, 3]), (2, [0, 1])])
def test_turning_keys_lose_what_scores_differ_by_at_the_distances_where_heads_look(n_kv, group):
    """All pairs of a query and a key at all distances, these weighted by a softmax written out here; and nothing near is better."""
    model, T, hd, draw = small_model(n_kv, "llama").double(), 13, 8, torch.Generator().manual_seed(0)
    idx = tokens(2, T)
    layer = Layer(model.config, dict(model.state_dict()), 1, measure(model, idx)[1])
    x = inputs(model, idx)[1]
    q, k, _ = model.h[1].attn.c_attn(x).detach().split([64, n_kv * hd, n_kv * hd], dim=2)
    q, k = q.view(2, T, n_kv, 8 // n_kv, hd), k.view(2, T, n_kv, hd)
    R = [rotation([d / 10_000 ** (i / 4) for i in range(4)], hd) for d in range(T)]
    share = torch.zeros(n_kv, 8 // n_kv, T, dtype=torch.float64)
    for b, t in itertools.product(range(2), range(T)):
        scores = torch.stack([torch.einsum("nga,ab,nb->ng", q[b, t], R[t - s].T, k[b, s]) for s in range(t + 1)], dim=-1)
        share[..., : t + 1] += (scores / hd**0.5).softmax(dim=-1).flip(-1) / (2 * T)  # by distance, 0 first
    q, k = q.flatten(0, 1)[:, group], k.flatten(0, 1)[:, group]

    def lost(E, D):
        z, total, wrong = k.flatten(1) @ E.T, 0.0, 0.0
        for d in range(T):
            true = torch.einsum("imga,ab,tmb->mgit", q, R[d].T, k)
            read = torch.einsum("imga,mgac,cb,tb->mgit", q, D, R[d].T, z)
            weight = share[group][..., d, None, None]
            total, wrong = total + (weight * true.square()).sum(), wrong + (weight * (true - read).square()).sum()
        return (wrong / total).item()

    start = real(maps("svd", *layer.keys(group), len(group))[0], hd)
    E, D, best = layer.turning_keys(group, start)
    assert lost(E, D) == pytest.approx(best, rel=1e-6)
    assert best < layer.turning_keys(group, start, most=1)[2]  # mixing frequencies gains
    for scale in (1e-3, 1e-2, 0.1):
        for _ in range(5):
            near = [a + scale * a.abs().mean() * torch.randn(a.shape, generator=draw).double() for a in (E, D)]
            assert lost(*near) >= best * (1 - 1e-3)  # it stops when a step gains less than a thousandth of that


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv, group", [(8, [1, 2, 6]), (4, [0, 3]), (2, [0, 1])])
def test_the_error_is_that_of_scores_between_independent_queries_and_keys(n_kv, group, dialect):
    """All pairs of a query and a key, and for rotary positions all distances: averaged, not modelled."""
    model, idx, hd = small_model(n_kv, dialect, bias=dialect == "gpt2").double(), tokens(2, 13), 8
    layer = Layer(model.config, dict(model.state_dict()), 1, measure(model, idx)[1])
    S, P = layer.keys(group)
    E, D = maps("mean", S, P, len(group))
    x = inputs(model, idx)[1].flatten(0, 1)
    q, k, _ = model.h[1].attn.c_attn(x).detach().split([64, n_kv * hd, n_kv * hd], dim=1)
    q, k = q.view(26, 8, hd), k.view(26, n_kv, hd)
    shared, wanted = k[:, group].mean(dim=1), 0.0
    for j in group:
        wrong = k[:, j] - shared  # [26, hd]
        for h in range(j * 8 // n_kv, (j + 1) * 8 // n_kv):
            if dialect == "gpt2":
                scores = q[:, h] @ wrong.T
                wanted += (scores - scores.mean(dim=1, keepdim=True)).square().mean()  # softmax sees differences
                continue
            a, b = (torch.complex(*z.chunk(2, dim=1)) for z in (q[:, h], wrong))  # [26, hd/2]
            angles = torch.arange(11.0).double()[:, None] * torch.arange(1, hd // 2 + 1) * 2 * torch.pi / 11  # no two alike
            turned = torch.exp(1j * angles)
            scores = torch.einsum("if,jf,tf->tij", a.conj(), b, turned).real
            wanted += 2 * scores.square().mean()  # cos^2 is 1/2 on average
    assert error(S, P, E, D) == pytest.approx(wanted.item(), rel=1e-6)


def test_the_error_of_values_is_that_of_the_outputs_if_tokens_are_independent():
    """With every token drawn anew, a layer's output differs by sum_h W_o,h sum_t p_h(t) wrong_h(x_t)."""
    model, idx, hd = small_model(8, "llama").double(), tokens(2, 13), 8
    moments = measure(model, idx)
    layer = Layer(model.config, dict(model.state_dict()), 0, moments[0])
    S, P = layer.values([0, 5, 6])
    E, D = maps("first", S, P, 3)
    x = inputs(model, idx)[0].flatten(0, 1)
    v = model.h[0].attn.c_attn(x).detach()[:, 64 + 64 :].view(26, 8, hd)
    o = model.h[0].attn.c_proj.weight.detach().view(64, 8, hd)
    wrong = torch.einsum("cgd,ngd->ngc", o[:, [0, 5, 6]], v[:, [0, 5, 6]] - v[:, [0]])  # [26, 3, C]
    second = torch.einsum("nac,nbc->ab", wrong, wrong) / 26
    assert error(S, P, E, D) == pytest.approx((moments[0].overlap[[0, 5, 6]][:, [0, 5, 6]] * second).sum().item(), rel=1e-6)


def disguised(dialect, bias, orthogonal=False, n_kv=8):
    """A model whose KV heads speak in bases of their own but say only two things; and the model of two heads that says them."""
    draw = torch.Generator().manual_seed(0)
    plain = small_model(2, dialect, bias=bias).double()
    model, hd = expand_heads(plain, n_kv), 8
    with torch.no_grad():
        for block in model.h:
            attn = block.attn
            q, k, v = attn.c_attn.weight.split([64, n_kv * hd, n_kv * hd])
            parts = [(q, k, v)]
            if bias:
                parts.append(attn.c_attn.bias.split([64, n_kv * hd, n_kv * hd]))
            for j in range(n_kv):
                if dialect == "llama":  # a complex factor for each frequency
                    z = torch.randn(hd // 2, generator=draw, dtype=torch.complex128)
                    z = z / z.abs() if orthogonal else z
                    A = torch.cat((torch.cat((z.real.diag(), -z.imag.diag()), 1), torch.cat((z.imag.diag(), z.real.diag()), 1)))
                else:
                    A = torch.randn(hd, hd, generator=draw, dtype=torch.float64) + 2 * torch.eye(hd)
                    A = torch.linalg.qr(A)[0] if orthogonal else A
                B = torch.randn(hd, hd, generator=draw, dtype=torch.float64) + 2 * torch.eye(hd)
                B = torch.linalg.qr(B)[0] if orthogonal else B
                own, readers = slice(j * hd, (j + 1) * hd), range(j * 8 // n_kv, (j + 1) * 8 // n_kv)
                for part_q, part_k, part_v in parts:
                    part_k[own] = A @ part_k[own]
                    part_v[own] = B @ part_v[own]
                    for h in readers:
                        part_q[h * hd : (h + 1) * hd] = torch.linalg.inv(A).T @ part_q[h * hd : (h + 1) * hd]
                for h in readers:
                    attn.c_proj.weight[:, h * hd : (h + 1) * hd] @= torch.linalg.inv(B)
    return plain, model


@pytest.mark.parametrize("dialect, bias", [("gpt2", True), ("gpt2", False), ("llama", False)])
@pytest.mark.parametrize("n_kv", [8, 4])
def test_heads_that_say_the_same_in_other_bases_become_one_without_loss(dialect, bias, n_kv):
    plain, model = disguised(dialect, bias, n_kv=n_kv)
    idx = tokens(2, 13)
    assert (model(idx)[0] - plain(idx)[0]).abs().max() < 1e-9  # the disguise itself is exact
    moments = measure(model, idx)
    assert (pool_heads(model, 2, "svd", moments=moments).eval()(idx)[0] - plain(idx)[0]).abs().max() < 1e-6
    assert (pool_heads(model, 2, "mean").eval()(idx)[0] - plain(idx)[0]).abs().max() > 0.1
    plain, model = disguised(dialect, bias, orthogonal=True, n_kv=n_kv)
    child = pool_heads(model, 2, "aligned", moments=measure(model, idx)).eval()
    assert (child(idx)[0] - plain(idx)[0]).abs().max() < 1e-4  # as far as its iteration goes


def shuffled(model, order):
    """The same function with its KV heads, and all that goes with each, in another order."""
    c, new = model.config, copy.deepcopy(model)
    with torch.no_grad():
        for block in new.h:
            for p in block.attn.c_attn.parameters():
                q, k, v = p.unflatten(0, (-1, c.head_dim)).split([c.n_head, c.n_kv, c.n_kv])
                q = q.unflatten(0, (c.n_kv, -1))[order].flatten(0, 1)
                p.copy_(torch.cat((q, k[order], v[order])).flatten(0, 1))
            p = block.attn.c_proj.weight
            p.copy_(p.unflatten(1, (c.n_kv, -1))[:, order].flatten(1))
    return new


@pytest.mark.parametrize("pool", ["mean", "first", "aligned", "svd"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", [8, 4])
def test_similar_heads_are_found_wherever_they_stand(dialect, pool, n_kv):
    plain = small_model(2, dialect).double()
    model = disguised(dialect, False, n_kv=n_kv)[1] if pool == "svd" else expand_heads(plain, n_kv)
    order = [5, 0, 3, 6, 1, 2, 7, 4] if n_kv == 8 else [2, 0, 3, 1]
    model, idx = shuffled(model, order), tokens(2, 13)
    assert (model(idx)[0] - plain(idx)[0]).abs().max() < 1e-9
    moments = measure(model, idx)
    child = pool_heads(model, 2, pool, moments=moments, similar=True).eval()
    assert (child(idx)[0] - plain(idx)[0]).abs().max() < 1e-4
    neighbours = pool_heads(model, 2, pool, moments=moments).eval()
    assert (neighbours(idx)[0] - plain(idx)[0]).abs().max() > 0.1


def test_a_constant_that_pooled_values_lose_is_kept_by_the_output_bias():
    """Eight heads whose values differ by constants only: one head says them all, and the bias of the output the rest."""
    plain = small_model(1, bias=True).double()
    model, idx = expand_heads(plain, 8), tokens(2, 13)
    with torch.no_grad():
        for block in model.h:
            block.attn.c_attn.bias[64 + 64 :].normal_(generator=torch.Generator().manual_seed(1))
    child = pool_heads(model, 1, "svd", moments=measure(model, idx)).eval()
    assert (child(idx)[0] - model(idx)[0]).abs().max() < 1e-6
    other = tokens(2, 13, seed=5)  # the constant is one for any text
    assert (child(other)[0] - model(other)[0]).abs().max() < 1e-6


@pytest.mark.parametrize("dialect, bias", [("gpt2", True), ("llama", False)])
@pytest.mark.parametrize("n_kv, to", [(1, 8), (2, 8), (2, 4), (8, 8)])
def test_expanded_heads_compute_the_same_and_pool_back_to_the_bit(dialect, bias, n_kv, to):
    model, idx = small_model(n_kv, dialect, bias=bias), tokens(2, 13)
    wide = expand_heads(model, to).eval()
    assert wide.config.n_kv == to and torch.allclose(wide(idx)[0], model(idx)[0], atol=1e-5)
    for pool in ("mean", "first"):
        back = pool_heads(wide, n_kv, pool)
        assert back.config == model.config
        assert all(torch.equal(p, back.state_dict()[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("n_kv, to", [(2, 3), (2, 1), (8, 16), (2, 0), (2, "8")])
def test_heads_that_cannot_be_copied_evenly_are_refused(n_kv, to):
    with pytest.raises(ValueError, match=f"{n_kv} KV heads of 8 query heads cannot become"):
        expand_heads(small_model(n_kv), to)


@pytest.mark.parametrize("options", [{"pool": "svd"}, {"pool": "aligned"}, {"pool": "mean", "similar": True}])
def test_what_must_be_measured_first_is_said(options):
    with pytest.raises(ValueError, match="moments"):
        pool_heads(small_model(8), 2, **options)
