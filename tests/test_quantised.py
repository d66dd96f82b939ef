"""Quantised caches hold what their papers say, to the byte, however the tokens arrive, and attention reads just that."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_cases import (
    CONFIGS,
    cache_of,
    check_stored,
    equal,
    feed,
    held,
    label,
    pieces,
    random_fits,
    random_qkv,
    raw,
    reference_of,
)  # fmt: skip
from quantised_reference import attention
from reference import DIALECTS, SHAPES, small_model, tokens, turn

from decoding import make_cache
from kv_cache.dense import DenseCache
from kv_cache.fp8 import FP8Config
from kv_cache.kivi import KIVIConfig
from kv_cache.kvquant import KVQuantConfig, fit_key

# ---------------------------------------------------------------------------------------------------------------------
# what is stored, and its bytes


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("n_kv", SHAPES)
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_what_is_held_and_its_bytes_are_those_of_the_papers_and_of_the_formula_at_every_length(config, n_kv, batch):
    lengths, n_layer = [0, 1, 7, 8, 9, 17, 53, 61], 2 if batch == 1 else 1
    cache = cache_of(config, n_kv, 65, batch, n_layer)
    qkv = random_qkv(n_kv, 61, batch)
    layers = [reference_of(cache, layer, *(-x if layer else x for x in qkv[1:])) for layer in range(n_layer)]
    for before, now in zip([0, *lengths], lengths, strict=False):
        if now > before:
            feed(cache, [x[:, :, :now] for x in qkv], [now - before])
        expected = [layer.arrays(now) for layer in layers]
        assert cache.length == now
        assert cache.nbytes() == cache.formula() == {n: sum(a.nbytes for e in expected for a in e[n]) for n in expected[0]}
        check_stored(cache, expected)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in raw(cache)}
        assert cache.capacity_nbytes() == sum(storages.values()) >= sum(cache.nbytes().values())


@pytest.mark.parametrize("config", [FP8Config(scale="head"), KIVIConfig(2, 4, 5), KVQuantConfig(2, 0.1)], ids=label)
def test_thirty_two_sequences_and_half_precision_are_counted_and_stored_as_well(config):
    cache, qkv = cache_of(config, 2, 20, 32, n_layer=1, dtype=torch.float16), random_qkv(2, 19, 32)
    feed(cache, qkv, [15, 4])
    expected = [reference_of(cache, 0, *qkv[1:]).arrays(19)]
    assert cache.nbytes() == cache.formula() == {n: sum(a.nbytes for a in arrays) for n, arrays in expected[0].items()}
    check_stored(cache, expected)


@pytest.mark.parametrize("bits, group", [(2, 32), (3, 16), (4, 32), (8, 64)])
def test_a_kivi_cache_falls_exactly_with_the_number_of_kv_heads(bits, group):
    total = {}
    for n_kv in SHAPES:
        cache = cache_of(KIVIConfig(bits, group, residual=32), n_kv, 130, batch=2)
        feed(cache, random_qkv(n_kv, 130, 2), [130])
        total[n_kv] = cache.nbytes()
    for name in total[8]:
        assert total[8][name] == 4 * total[2][name] == 8 * total[1][name] > 0


def test_two_thousand_tokens_at_two_bits_take_less_than_a_fourth_and_a_half_of_sixteen_bits():
    cache = cache_of(KIVIConfig(2, 32, 32), 2, 2000, hd=64, dtype=torch.float16)
    dense = DenseCache(1, 2, 64, 2000, dtype=torch.float16)
    qkv = random_qkv(2, 2000, n_head=2, hd=64)
    feed(cache, qkv, [2000])
    dense.attend(0, *qkv)
    full = sum(dense.nbytes().values())
    assert full == 2 * 2 * 64 * 2000 * 2
    assert full > 4.5 * sum(cache.nbytes().values()) and full > 4.5 * cache.capacity_nbytes()


# ---------------------------------------------------------------------------------------------------------------------
# one chunk, several, single steps; and the reference's attention


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("n_kv", SHAPES)
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_however_tokens_arrive_the_same_is_stored_and_attended_to(config, n_kv):
    T, batch = 29, 2
    qkv = random_qkv(n_kv, T, batch)
    once = cache_of(config, n_kv, T, batch)
    [y] = feed(once, qkv, [T])
    assert np.abs(y.numpy() - attention(qkv[0].numpy(), reference_of(once, 0, *qkv[1:]))).max() < 1e-5
    for sizes in ([1] * T, [9, 1, 2, 17]):
        cache = cache_of(config, n_kv, T, batch)
        [again] = feed(cache, qkv, sizes)
        assert equal(held(cache), held(once)) and (again - y).abs().max() < 1e-5, sizes


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_a_context_of_several_blocks_is_read_like_a_short_one(config):
    T = 257
    qkv = random_qkv(2, T, n_head=4)
    once, pieces = cache_of(config, 2, T), cache_of(config, 2, T)
    [y], [again] = feed(once, qkv, [T]), feed(pieces, qkv, [100, 1, 28, 1, 127])
    assert equal(held(once), held(pieces)) and (y - again).abs().max() < 1e-5
    assert np.abs(y.numpy() - attention(qkv[0].numpy(), reference_of(once, 0, *qkv[1:]))).max() < 1e-5


@pytest.mark.usefixtures("way")
@given(
    data=st.data(), bits=st.sampled_from([2, 3, 4, 8]), group=st.integers(1, 9), residual=st.integers(0, 9), hd=st.integers(1, 9),
    rollback=st.integers(0, 9), axes=st.tuples(*2 * [st.sampled_from(["channel", "token"])]), T=st.integers(1, 40),
)  # fmt: skip
@settings(max_examples=25)
def test_any_kivi_cache_in_any_pieces_agrees_with_the_reference(data, bits, group, residual, hd, rollback, axes, T):
    cache = cache_of(KIVIConfig(bits, group, residual, *axes, rollback), 2, T + data.draw(st.integers(0, 5)), hd=hd)
    qkv = random_qkv(2, T, n_head=4, hd=hd)
    sizes = pieces(data, T)
    [y] = feed(cache, qkv, sizes)
    reference = reference_of(cache, 0, *qkv[1:])
    check_stored(cache, [reference.arrays(T)])
    assert cache.nbytes() == cache.formula()
    assert np.abs(y.numpy() - attention(qkv[0].numpy(), reference)).max() < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# through a whole model


def calibration(model, config):
    """As calibrate.py writes it, of random numbers."""
    c = model.config
    draw = torch.Generator().manual_seed(1)
    amax = {name: 1 + 4 * torch.rand(c.n_layer, c.n_kv, generator=draw) for name in ("key_amax", "value_amax")}
    if not isinstance(config, KVQuantConfig):
        return amax
    fits = random_fits(c.n_layer, c.n_kv * c.head_dim, config.bits)
    return amax | {"fits": {fit_key(config.bits, config.outliers, config.pre_rope): fits}}


def listen(cache):
    """What each layer is asked and answers from now on: lists of (q, k, v, y)."""
    heard, attend = [[] for _ in range(cache.n_layer)], cache.attend

    def listening(layer, q, k, v):
        y = attend(layer, q, k, v)
        heard[layer].append((q, k, v, y))
        return y

    cache.attend = listening
    return lambda layer: [torch.cat(parts, dim=2) for parts in zip(*heard[layer], strict=True)]


MODEL_CONFIGS = [
    FP8Config(), FP8Config("e4m3", "layer"), FP8Config("e5m2", "head"), KIVIConfig(2, 4, 4), KIVIConfig(4, 4, 0), KIVIConfig(8, 16, 5),
    KVQuantConfig(2, 0.1), KVQuantConfig(3, 0.0, 0), KVQuantConfig(4, 0.01, 3),
]  # fmt: skip


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("config", [*MODEL_CONFIGS, KVQuantConfig(3, 0.1, pre_rope=False)], ids=label)
def test_every_layer_of_a_model_reads_what_the_reference_holds_at_the_true_positions(config, dialect):
    model, idx = small_model(2, dialect), tokens(2, 24)
    if dialect == "gpt2" and not getattr(config, "pre_rope", True):
        with pytest.raises(ValueError, match="pre_rope=true"):
            make_cache(model, 24, config=config, calibration=calibration(model, config))
        return
    caches = [make_cache(model, 24, 2, config=config, calibration=calibration(model, config)) for _ in range(2)]
    plain = DenseCache(2, 2, 8, 24, 2)
    plain.n_layer = 2
    answers = [listen(cache) for cache in (*caches, plain)]
    with torch.no_grad():
        once = model(idx, cache=caches[0])[0]
        step = torch.cat([model(part, cache=caches[1])[0] for part in idx.split([9, 1, 1, 12, 1], dim=1)], dim=1)
        uncached = model(idx, cache=plain)[0]
    assert (once - uncached).abs().max() > 1e-4
    assert (once - step).abs().max() < 0.1 * (once - uncached).abs().max()  # a number beside a tie may round the other way
    before = dialect == "llama" and isinstance(config, KVQuantConfig) and config.pre_rope
    keys, as_read = answers[0](0)[1], answers[2](0)[1]
    assert torch.equal(keys, as_read) != before and (not before or (turn(keys, 10000.0) - as_read).abs().max() < 1e-5)
    for cache, answer in zip(caches, answers, strict=False):
        assert cache.nbytes() == cache.formula()
        for layer in range(2):
            q, k, v, y = answer(layer)
            reference = reference_of(cache, layer, k, v)
            check_stored(cache, [reference_of(cache, i, *answer(i)[1:3]).arrays(24) for i in range(2)])
            assert np.abs(y.numpy() - attention(q.numpy(), reference)).max() < 1e-5 * max(1, v.abs().max())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("pre_rope", [True, False])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_with_every_token_in_the_sink_kvquant_is_the_dense_cache_after_a_roll_back_too(n_kv, pre_rope):
    model, config = small_model(n_kv, "llama"), KVQuantConfig(2, 0.1, sink=24, pre_rope=pre_rope)
    cache = make_cache(model, 24, 2, config=config, calibration=calibration(model, config))
    dense, idx, junk = make_cache(model, 24, 2), tokens(2, 24), tokens(2, 9, seed=1)

    def probs(part, cache=None):
        with torch.no_grad():
            return model(part, cache=cache)[0].softmax(-1)

    for part, lost in ((idx[:, :10], 0), (junk, 9), (idx[:, 10:11], 0), (idx[:, 11:15], 0), (junk[:, :3], 5)):
        assert (probs(part, cache) - probs(part, dense)).abs().max() < 1e-5
        for c in (cache, dense):
            c.truncate(c.length - lost)
    assert cache.length == 13
    assert (probs(idx[:, 13:], cache) - probs(idx)[:, 13:]).abs().max() < 1e-5
