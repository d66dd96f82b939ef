"""The C++ kernels against float64 references, for any shape and number of threads; and what happens without a compiler."""

import ctypes
import subprocess
from dataclasses import replace

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from quantised_cases import cache_of, held, label
from reference import DIALECTS, SHAPES, attend, reference_logits, small_model, tokens

import kernels
import stream
import training
from decoding import generate, make_cache
from kv_cache.dense import DenseCache
from kv_cache.fp8 import FP8Config
from kv_cache.kivi import KIVIConfig
from kv_cache.kvquant import KVQuantConfig
from stream import get_batch

compiled = pytest.mark.skipif(kernels.library() is None, reason="no C++ compiler here")


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------------
# attention over a cache


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_a_long_cache_split_over_threads_is_attended_to_whole(n_kv, t, dtype, threads):
    hd, past = 8, 430  # several tiles, and 130 tokens and more for each of three threads
    q, k, v = random(1, 8, t, hd), random(1, n_kv, past + t, hd, seed=1), random(1, n_kv, past + t, hd, seed=2)
    k, v = k.to(dtype).float(), v.to(dtype).float()  # what the cache can hold
    keys, values = torch.full((2, 1, n_kv, 500, hd), torch.nan, dtype=dtype)  # nothing beyond the held tokens is read
    keys[:, :, :past], values[:, :, :past] = k[:, :, :past], v[:, :, :past]
    assert kernels.attends(q)
    y = kernels.attend(q, k[:, :, past:], v[:, :, past:], past, kernels.Dense(keys, values))
    wanted = torch.softmax(
        (q.double() @ k.double().repeat_interleave(8 // n_kv, 1).transpose(2, 3) / hd**0.5).masked_fill(
            torch.ones(t, past + t, dtype=torch.bool).triu(past + 1), -torch.inf
        ),
        dim=-1,
    ) @ v.double().repeat_interleave(8 // n_kv, 1)
    assert (y - wanted).abs().max() < 1e-5
    assert torch.equal(keys[:, :, : past + t].float(), k) and torch.equal(values[:, :, : past + t].float(), v)
    assert keys[:, :, past + t :].isnan().all() and values[:, :, past + t :].isnan().all()


@compiled
def test_appending_in_bfloat16_rounds_as_torch_does():
    x = torch.cat(
        (random(1, 1, 64, 8), torch.tensor([1e-40, -0.0, 3e38, 1.00390625, 1.01171875, 0, 1, -1]).view(1, 1, 1, 8)), 2
    )
    keys, values = torch.empty(2, 1, 1, 65, 8, dtype=torch.bfloat16)
    for i in range(65):
        new = x[:, :, i : i + 1].contiguous()
        kernels.attend(new, new, new, i, kernels.Dense(keys, values))
    assert torch.equal(keys, x.bfloat16())


@compiled
@pytest.mark.parametrize("n_kv", SHAPES)
def test_scores_of_any_size_neither_overflow_nor_vanish(n_kv):
    q, k, v = 300 * random(1, 8, 1, 8), 300 * random(1, n_kv, 200, 8, seed=1), random(1, n_kv, 200, 8, seed=2)
    keys, values = torch.empty(2, 1, n_kv, 200, 8)
    keys[:, :, :199], values[:, :, :199] = k[:, :, :199], v[:, :, :199]
    y = kernels.attend(q, k[:, :, 199:], v[:, :, 199:], 199, kernels.Dense(keys, values))
    assert (y - attend(q, k, v, past=199)).abs().max() < 1e-5


@compiled
def test_a_key_that_is_no_number_is_not_hidden():
    k, v = random(1, 2, 40, 8), random(1, 2, 40, 8, seed=1)
    k[0, 1, 7, 3] = torch.nan
    keys, values = torch.empty(2, 1, 2, 40, 8)
    keys[:, :, :39], values[:, :, :39] = k[:, :, :39], v[:, :, :39]
    y = kernels.attend(random(1, 8, 1, 8), k[:, :, 39:], v[:, :, 39:], 39, kernels.Dense(keys, values))
    assert y[0, :4].isfinite().all() and y[0, 4:].isnan().all()
    y = kernels.causal_attention(random(1, 8, 40, 8), k, v)
    assert y[0, :4].isfinite().all() and y[0, 4:, :7].isfinite().all() and y[0, 4:, 7:].isnan().all()


# ---------------------------------------------------------------------------------------------------------------------
# the whole step


@compiled
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [[1] * 20, [7, 1, 3, 2, 7]], ids=str)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", SHAPES)
def test_a_step_gives_the_logits_of_the_float64_model(n_kv, dialect, sizes, bias, threads):
    model = small_model(n_kv, dialect, bias=bias and dialect == "gpt2")
    idx = tokens(3, 20)
    cache, step = make_cache(model, 20, batch=3), kernels.Step(model)
    with torch.no_grad():
        assert all(step.serves(part, cache) for part in idx.split(sizes, dim=1))
        logits = torch.cat([step(part, cache) for part in idx.split(sizes, dim=1)], dim=1)
    assert (logits - reference_logits(model, idx)).abs().max() < 1e-4
    assert cache.length == 20


@compiled
@given(
    n_kv=st.sampled_from(SHAPES), dialect=st.sampled_from(DIALECTS), B=st.integers(1, 12), head_dim=st.sampled_from([2, 4, 6, 32, 40]),
    vocab=st.integers(1, 40), t=st.integers(1, 5), n_embd=st.sampled_from([None, 16, 72]), inner=st.sampled_from([None, 8, 40]),
    eps=st.sampled_from([None, 1e-2]), tanh=st.booleans(),
)  # fmt: skip
def test_a_step_agrees_with_the_model_for_any_shape(n_kv, dialect, B, head_dim, vocab, t, n_embd, inner, eps, tanh):
    fields = {} if n_embd is None else {"head_size": head_dim}
    fields |= {"n_inner": inner, "norm_eps": eps, "gelu": "tanh" if tanh and dialect == "gpt2" else None}
    model = small_model(n_kv, dialect, n_embd=n_embd or 8 * head_dim, vocab_size=vocab, **fields)
    idx = tokens(B, 9 + t, vocab)
    ours, plain, step = make_cache(model, 24, B), make_cache(model, 24, B), kernels.Step(model)
    with torch.no_grad():
        model(idx[:, :9], cache=plain), model(idx[:, :9], cache=ours)
        wanted = model(idx[:, 9:], cache=plain)[0]
        assert step.serves(idx[:, 9:], ours) == (max(B, 8 // n_kv) * t <= kernels.MAX_ROWS)
        if step.serves(idx[:, 9:], ours):
            assert (step(idx[:, 9:], ours) - wanted).abs().max() < 1e-4
            for a, b in zip(ours.keys + ours.values, plain.keys + plain.values, strict=True):
                assert (a[:, :, : 9 + t] - b[:, :, : 9 + t]).abs().max() < 1e-4


@compiled
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_weights_are_read_as_they_are_and_summed_in_float32(dialect, cache_dtype):
    model = small_model(2, dialect)
    model.to(torch.bfloat16)
    exact = small_model(2, dialect)
    exact.load_state_dict({name: p.float() for name, p in model.state_dict().items()})
    idx = tokens(2, 12)
    cache, step = make_cache(model, 12, 2, cache_dtype), kernels.Step(model)
    with torch.no_grad():
        logits = torch.cat([step(part, cache) for part in idx.split(1, dim=1)], dim=1)
        spread = (model(idx)[0] - exact(idx)[0]).abs().max()  # what bfloat16 arithmetic throughout costs
    error = (logits - exact(idx)[0]).abs().max()
    assert error < (1e-4 if cache_dtype == torch.float32 else spread)
    assert sum(cache.nbytes().values()) == 2 * 2 * 2 * 8 * 12 * 2 * cache_dtype.itemsize  # K and V x layers x n_kv x hd x T x B


@compiled
def test_a_step_past_the_context_or_the_capacity_is_refused_before_any_work():
    model = small_model()
    for cache, given_tokens in ((make_cache(model, 5), 6), (DenseCache(2, 2, 8, 99), 25)):
        with torch.no_grad(), pytest.raises(ValueError, match=f"0 \\+ {given_tokens} tokens do not fit"):
            kernels.Step(model)(tokens(1, given_tokens), cache)
        assert cache.length == 0
    with pytest.raises(ValueError, match="2 sequences do not fit a cache of 1"):
        kernels.Step(model)(tokens(2, 1), make_cache(model, 5))


def test_a_model_in_training_mode_or_with_gradients_wanted_is_left_to_pytorch():
    model, idx = small_model(dropout=0.5), tokens(1, 1)
    cache = make_cache(model, 5)
    assert not kernels.Step(model).serves(idx, cache)
    with torch.no_grad():
        assert kernels.Step(model).serves(idx, cache) == (kernels.library() is not None)
        assert not kernels.Step(model.train()).serves(idx, cache)


@compiled
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", SHAPES)
def test_greedy_text_is_the_same_with_and_without_the_kernels(n_kv, dialect, threads, monkeypatch):
    model, idx = small_model(n_kv, dialect, seed=2, tie_weights=False, block_size=300), tokens(2, 5)

    def text():
        return torch.stack(list(generate(model, idx, 200, make_cache(model, 205, 2), temperature=0)), dim=1)

    with_kernels = text()
    assert len(set(with_kernels[0].tolist())) > 3  # a text, not one token over and over
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert torch.equal(with_kernels, text())


@compiled
def test_the_stores_are_laid_out_alike_on_both_sides():
    for store in kernels.STORES:
        assert kernels.library()[f"size_of_{store.__name__.lower()}"]() == ctypes.sizeof(store)


@compiled
def test_a_step_refuses_a_cache_of_another_model(threads):
    model = small_model(2)
    for cache in (
        DenseCache(1, 2, 8, 9),
        DenseCache(2, 1, 8, 9),
        DenseCache(2, 2, 16, 9),
        cache_of(KIVIConfig(), 1, 9, n_layer=2, hd=8),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match="does not fit a model of .2, 2, 8."):
            kernels.Step(model)(tokens(1, 1), cache)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", SHAPES)
@pytest.mark.parametrize(
    "config",
    [
        FP8Config("e4m3"),
        FP8Config("e5m2", "head"),
        KIVIConfig(2, 8, 3),
        KIVIConfig(4, 8, 0, rollback=5),
        KVQuantConfig(3, 0.1, 2),
    ],
    ids=label,
)
def test_steps_over_a_quantised_cache_store_and_say_what_the_model_does(config, n_kv, dialect, dtype, threads):
    model, idx = small_model(n_kv, dialect), tokens(2, 24)
    if dialect == "gpt2" and isinstance(config, KVQuantConfig):
        config = replace(config, pre_rope=False)
    stepped, plain = (cache_of(config, n_kv, 24, 2, n_layer=2, hd=8, dtype=dtype) for _ in range(2))
    step, logits = kernels.Step(model), []
    with torch.no_grad():
        for size in (1, 2, 3, 1, 2, 1, 3, 1, 2, 1, 1, 2, 1, 3):
            part = idx[:, stepped.length : stepped.length + size]
            if size > stepped.at_once():  # a KIVI cache packs in between
                part = part[:, : stepped.at_once()]
            assert step.serves(part, stepped)
            logits.append(step(part, stepped))
        wanted = model(idx[:, : stepped.length], cache=plain)[0]
    assert stepped.length == plain.length >= 18 and stepped.nbytes() == stepped.formula()
    same = torch.cat([(a == b).flatten() for a, b in zip(held(stepped)["codes"], held(plain)["codes"], strict=True)])
    assert same.float().mean() > 0.98  # sums in another order may round a number the other way
    assert (torch.cat(logits, dim=1) - wanted).abs().median() < (1e-4 if dtype == torch.float32 else 2e-2)


# ---------------------------------------------------------------------------------------------------------------------
# training


def gradients(attention, q, k, v, dy):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    y = attention(q, k, v)
    y.backward(dy)
    return y.detach(), q.grad, k.grad, v.grad


@compiled
@given(
    B=st.integers(1, 3), n_kv=st.sampled_from([1, 2, 8]), group=st.sampled_from([1, 4, 8]), T=st.integers(1, 300),
    hd=st.sampled_from([1, 5, 8, 32, 48]), threads=st.integers(1, 3),
)  # fmt: skip
def test_causal_attention_and_its_gradients_agree_with_float64(B, n_kv, group, T, hd, threads):
    n_head = n_kv * group
    qkv = random(B, T, n_head + 2 * n_kv, hd).transpose(1, 2)  # as the model has them: not contiguous
    q, k, v = qkv.split([n_head, n_kv, n_kv], dim=1)
    dy = random(B, n_head, T, hd, seed=1)

    def plain(q, k, v):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) / hd**0.5
        return torch.softmax(scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf), dim=-1) @ v

    wanted = gradients(plain, q.double(), k.double(), v.double(), dy.double())
    torch.set_num_threads(threads)
    got = gradients(kernels.causal_attention, q, k, v, dy)
    torch.set_num_threads(1)
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() < 2e-6 * (1 + b.abs().max()) * (1 + group)
    again = gradients(kernels.causal_attention, q, k, v, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))  # whatever the number of threads


@compiled
def test_causal_attention_in_bfloat16_is_as_close_as_the_fused_one():
    q, k, v, dy = (random(2, heads, 100, 32, seed=heads).bfloat16() for heads in (8, 2, 1, 8))
    v = random(2, 2, 100, 32, seed=9).bfloat16()
    exact = gradients(training.causal_attention, q.double(), k.double(), v.double(), dy.double())
    fused = gradients(training.causal_attention, q, k, v, dy)
    for a, f, e in zip(gradients(kernels.causal_attention, q, k, v, dy), fused, exact, strict=True):
        assert a.dtype == torch.bfloat16 and (a - e).abs().max() <= 1.5 * (f - e).abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# without a compiler


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Nothing compiled yet, and nothing remembered."""
    for path in kernels.HERE.glob("*.[ch]*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(kernels, "HERE", tmp_path)
    kernels.library.cache_clear()
    yield tmp_path
    kernels.library.cache_clear()


def test_without_a_compiler_everything_works_with_one_line(fresh, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = small_model()
    assert len(list(generate(model, tokens(1, 3), 9, make_cache(model, 12)))) == 9
    assert list(fresh.glob("build/*")) == []
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "there is no C++ compiler" in err


@pytest.mark.parametrize("script", ["echo 'x.cpp:1: error: no vectors' >&2; exit 1", "exit 1"])
def test_a_compiler_that_fails_is_one_line_too(fresh, monkeypatch, capsys, script):
    compiler = fresh / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert kernels.library() is None
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and ("error: no vectors" in err or "failed" in err)
    assert list(fresh.glob("build/*.so")) == []


@compiled
def test_the_library_is_built_once_and_anew_when_a_source_changes(fresh, monkeypatch):
    assert kernels.library() is not None
    (built,) = (fresh / "build").iterdir()
    kernels.library.cache_clear()
    calls = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: calls.append(command) or run(command, **kwargs))
    assert kernels.library() is not None and len(calls) == 1  # it asks the compiler about this CPU, no more
    (fresh / "decode.cpp").write_text((fresh / "decode.cpp").read_text() + "// changed\n")
    kernels.library.cache_clear()
    assert kernels.library() is not None and len(list((fresh / "build").iterdir())) == 2
    assert built.exists()


# ---------------------------------------------------------------------------------------------------------------------
# which one trains


def test_the_faster_attention_is_chosen_and_named(monkeypatch):
    fused, kernel = training.ATTENTION
    config = small_model().config
    name, why = training.pick_attention(config, 2, torch.device("cpu"), "float32")
    assert name in training.ATTENTION and ("as fast as" in why or "only one" in why)
    with_dropout = small_model(dropout=0.1).config
    assert training.pick_attention(with_dropout, 2, torch.device("cpu"), "float32") == (fused, "dropout")
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert training.pick_attention(config, 2, torch.device("cpu"), "float32") == (fused, "the only one here")


@compiled
def test_both_attentions_train_the_same_curve(call, cwd, monkeypatch):
    losses = {}
    for i, name in enumerate(training.ATTENTION):
        monkeypatch.setattr(training, "pick_attention", lambda *args, name=name: (name, "as told"))
        code, out, _ = call("train", *TINY, "model.n_kv=2", f"sweep=a{i}")
        assert code == 0 and f"attention by {name} (as told)" in out
        losses[name] = torch.load(cwd / "runs" / f"a{i}" / "kv2-s1" / "last.pt")["val_loss"]
        assert torch.load(cwd / "runs" / f"a{i}" / "kv2-s1" / "last.pt")["attention"] == name
    a, b = losses.values()
    assert abs(a - b) < 1e-4


@compiled
@pytest.mark.parametrize("named", [True, False])
def test_a_resumed_run_keeps_the_attention_it_began_with(call, cwd, monkeypatch, named):
    kernel = list(training.ATTENTION)[1]
    monkeypatch.setattr(training, "pick_attention", lambda *args: (kernel, "as told"))
    monkeypatch.setattr(stream, "get_batch", lambda *args: 1 / 0 if args[4] == 5 else get_batch(*args))
    with pytest.raises(ZeroDivisionError):
        call("train", *TINY)
    monkeypatch.setattr(stream, "get_batch", get_batch)
    monkeypatch.setattr(training, "pick_attention", lambda *args: pytest.fail("asked again"))
    if not named:  # a checkpoint of before there was a choice
        path = cwd / "runs/t/kv8-s1/last.pt"
        torch.save({key: value for key, value in torch.load(path).items() if key != "attention"}, path)
    code, out, _ = call("train", *TINY)
    assert code == 0 and f"attention by {kernel if named else next(iter(training.ATTENTION))} (as before)" in out


@compiled
@pytest.mark.parametrize(
    "fields, fit", [({"n_inner": 100}, False), ({"n_inner": 104}, True), ({"head_size": 5}, True)], ids=str
)
def test_a_step_says_which_widths_it_serves(fields, fit):
    model = small_model(2, "gpt2", **fields)
    with torch.no_grad():
        assert kernels.Step(model).serves(tokens(1, 1), make_cache(model, 4)) == fit
