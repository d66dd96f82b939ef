"""The contract of every quantised cache whatever it stores: roll-backs, refusals, and no copy of the store in memory."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_cases import (
    CONFIGS,
    SAMPLE,
    cache_of,
    equal,
    feed,
    held,
    label,
    pieces,
    random_qkv,
    raw,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kv_cache.fp8 import FP8Config
from kv_cache.kivi import KIVIConfig
from kv_cache.kvquant import KVQuantConfig

# ---------------------------------------------------------------------------------------------------------------------
# truncate, reset, refusals


def snapshot(cache):
    return cache.length, getattr(cache, "start", None), [x.contiguous().view(torch.uint8).clone() for x in raw(cache)]


def unchanged(cache, before):
    now = snapshot(cache)
    return before[:2] == now[:2] and len(before[2]) == len(now[2]) and all(map(torch.equal, before[2], now[2]))


@given(
    data=st.data(), group=st.integers(1, 8), residual=st.integers(0, 10), rollback=st.integers(0, 12), T=st.integers(1, 50), more=st.integers(1, 30),
)  # fmt: skip
@settings(max_examples=30)
@pytest.mark.usefixtures("way")
def test_a_kivi_cache_is_rolled_back_exactly_or_refuses_with_nothing_changed(data, group, residual, rollback, T, more):
    config = KIVIConfig(2, group, residual, rollback=rollback)
    length = data.draw(st.integers(max(0, T - rollback - 3 * group), T), "length")
    junk, tokens = random_qkv(2, T, n_head=4, hd=4), random_qkv(2, length + more, n_head=4, hd=4, seed=1)
    mixed = [torch.cat((x[:, :, :length], y[:, :, length:]), dim=2) for x, y in zip(tokens, junk, strict=True)]
    turned, straight = (cache_of(config, 2, 90, n_layer=2, hd=4) for _ in range(2))
    feed(turned, mixed, pieces(data, T))
    before = snapshot(turned)
    try:
        turned.truncate(length)
    except ValueError as error:
        assert T - length > rollback, "within what it promised"
        assert re.search(rf"\b{T}\b.*\b{length}\b.*cache\.rollback.*\b{rollback}\b", str(error)) and "\n" not in str(error)
        assert unchanged(turned, before)
        return
    if length:
        feed(straight, [x[:, :, :length] for x in tokens], [length])
    assert turned.length == length and turned.nbytes() == turned.formula()
    sizes = pieces(data, more)
    for ys in zip(feed(turned, tokens, sizes), feed(straight, tokens, sizes), strict=True):
        assert (ys[0] - ys[1]).abs().max() < 1e-5
    a, b = held(turned), held(straight)
    assert all(equal({n: a[n]}, {n: b[n]}) for n in ("codes", "scales", "zeros"))
    shorter = turned.length - max(turned.start, straight.start)
    assert all(
        torch.equal(x[:, :, -shorter:], y[:, :, -shorter:]) for x, y in zip(a["window"], b["window"], strict=True) if shorter
    )
    if more > rollback + group:  # what was kept for the first roll-back has been given up
        assert equal(a, b)


@given(
    data=st.data(),
    config=st.sampled_from([c for c in SAMPLE if not isinstance(c, KIVIConfig)]),
    T=st.integers(1, 40),
    B=st.integers(1, 3),
)
@settings(max_examples=20)
@pytest.mark.usefixtures("way")
def test_other_caches_are_rolled_back_to_any_length_as_if_the_tokens_had_never_been(data, config, T, B):
    turned, straight = cache_of(config, 2, 60, B, n_layer=2), cache_of(config, 2, 60, B, n_layer=2)
    length, more = data.draw(st.integers(0, T), "length"), data.draw(st.integers(1, 20), "more")
    junk, tokens = random_qkv(2, T, B), random_qkv(2, length + more, B, seed=1)
    feed(
        turned,
        [torch.cat((x[:, :, :length], y[:, :, length:]), dim=2) for x, y in zip(tokens, junk, strict=True)],
        pieces(data, T),
    )
    turned.truncate(length)
    if length:
        feed(straight, [x[:, :, :length] for x in tokens], [length])
    assert equal(held(turned), held(straight)) and turned.nbytes() == turned.formula() == straight.nbytes()
    sizes = pieces(data, more)
    for ys in zip(feed(turned, tokens, sizes), feed(straight, tokens, sizes), strict=True):
        assert torch.equal(*ys)
    assert equal(held(turned), held(straight))


@pytest.mark.parametrize("rollback", [0, 9])
def test_tokens_within_the_roll_back_can_be_taken_back_one_by_one_across_flushed_groups(rollback):
    cache = cache_of(KIVIConfig(2, 4, 3, rollback=rollback), 2, 80, hd=4)
    feed(cache, random_qkv(2, 51, hd=4), [51])
    for back in range(1, rollback + 1):
        cache.truncate(51 - back)
    assert cache.length == 51 - rollback
    if not rollback:
        with pytest.raises(ValueError, match="larger cache.rollback"):
            cache.truncate(50)  # 48 = (51 - 3) // 4 * 4 are packed, of 50 only 44


@pytest.mark.parametrize("length", [-1, 6, 100])
@pytest.mark.parametrize("config", SAMPLE, ids=label)
def test_no_cache_is_truncated_to_what_it_does_not_hold(config, length):
    cache = cache_of(config, 2, 24)
    feed(cache, random_qkv(2, 5), [5])
    before = snapshot(cache)
    with pytest.raises(ValueError) as error:
        cache.truncate(length)
    assert (
        str(length) in str(error.value)
        and "5" in str(error.value)
        and "\n" not in str(error.value)
        and unchanged(cache, before)
    )


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_a_reset_cache_is_empty_and_works_as_new(config):
    cache, new = (cache_of(config, 2, 40, 2, n_layer=2) for _ in range(2))
    empty = new.nbytes()
    feed(cache, random_qkv(2, 37, 2, seed=5), [30, 7])
    cache.reset()
    assert cache.length == 0 and cache.nbytes() == cache.formula() == empty
    ys = [feed(c, random_qkv(2, 40, 2), [31, 9]) for c in (cache, new)]
    assert all(map(torch.equal, *ys)) and equal(held(cache), held(new))


@pytest.mark.parametrize("past, more", [(0, 25), (24, 1), (20, 5)])
@pytest.mark.parametrize("config", SAMPLE, ids=label)
def test_more_than_the_capacity_is_refused_before_anything_is_written(config, past, more):
    cache, qkv = cache_of(config, 2, 24), random_qkv(2, 30)
    if past:
        feed(cache, [x[:, :, :past] for x in qkv], [past])
    before = snapshot(cache)
    with pytest.raises(ValueError) as error:
        cache.attend(0, *(x[:, :, :more] for x in qkv))
    assert "capacity=24" in str(error.value) and "\n" not in str(error.value) and unchanged(cache, before)


@pytest.mark.parametrize(
    "wrong", ["heads of keys", "heads of values", "one head", "batch", "numbers of a head", "tokens of values"]
)
@pytest.mark.parametrize("config", SAMPLE, ids=label)
def test_keys_and_values_of_another_shape_are_refused_and_never_broadcast(config, wrong):
    cache, (q, k, v) = cache_of(config, 2, 24, 2), random_qkv(2, 5, 2)
    feed(cache, (q, k, v), [5])
    eight, one = torch.ones(2, 8, 5, 12), torch.ones(2, 1, 5, 12)
    q, k, v = {
        "heads of keys": (q, eight, v), "heads of values": (q, k, eight), "one head": (q, one, one), "batch": (q[:1], k[:1], v[:1]),
        "numbers of a head": (q[..., :1], k[..., :1], v[..., :1]), "tokens of values": (q, k, v[:, :, :1]),
    }[wrong]  # fmt: skip
    before = snapshot(cache)
    with pytest.raises(ValueError) as error:
        cache.attend(0, q, k, v)
    assert "\n" not in str(error.value) and unchanged(cache, before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool], ids=str)
@pytest.mark.parametrize("config", SAMPLE, ids=label)
def test_a_dtype_that_is_no_full_precision_is_refused(config, dtype):
    with pytest.raises(ValueError, match="float16"):
        cache_of(config, 2, 24, dtype=dtype)


# ---------------------------------------------------------------------------------------------------------------------
# memory


class Peak(TorchDispatchMode):
    """The most bytes that lived at once in tensors made inside."""

    def __init__(self):
        super().__init__()
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in given:
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.live = {at: entry for at, entry in self.live.items() if not entry[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self.live.values()))
        return out


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "config",
    [FP8Config(), KIVIConfig(4, 32, 32, "token", "channel"), KIVIConfig(2), KVQuantConfig(3)],
    ids=label,
)
def test_a_step_never_makes_a_full_precision_copy_of_the_store(config):
    """
    Its peak is that of a block of 128 tokens, dequantised, and does not grow with the tokens held. Now and then a step also
    moves KVQuant's outliers to a larger room, so of three steps the least counts.
    """
    n_kv, hd, peaks = 2, 64, {}
    for T in (1100, 2200):
        cache = cache_of(config, n_kv, T + 3, hd=hd, dtype=torch.float16)
        q, k, v = random_qkv(n_kv, T + 3, hd=hd)
        with torch.no_grad():
            for first in range(0, T, 550):  # two query heads are enough for that
                cache.attend(0, q[:, :2, first : first + 550], *(x[:, :, first : first + 550] for x in (k, v)))
            for at in range(T, T + 3):
                with Peak() as peak:
                    y = cache.attend(0, *(x[:, :, at : at + 1] for x in (q, k, v)))
                assert y.isfinite().all()
                peaks[T] = min(peak.most, peaks.get(T, peak.most))
    block = 2 * n_kv * hd * 4 * 128  # keys and values in float32
    activations = 8 * 4 * (4 * hd + 2 * 128)  # queries, outputs and their like; scores and weights
    assert peaks[2200] <= block + activations < 2 * n_kv * hd * 4 * 2200 / 5
    assert peaks[2200] < 1.1 * peaks[1100]


def test_the_meter_above_sees_a_copy():
    x = torch.zeros(1000)
    with Peak() as peak:
        x.double().float().add_(1)
    assert peak.most == 12_000
