"""A cached model gives the uncached logits at every position, and a cache's bytes are the closed formula's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import DIALECTS, SHAPES, attend, reference_logits, small_model, tokens

from decoding import make_cache
from kv_cache.accounting import dense_nbytes
from kv_cache.dense import DenseCache

pytestmark = pytest.mark.usefixtures("way")
FULL = small_model().config.block_size


def feed(model, idx, sizes, cache):
    """Logits [B, T, V] of idx fed in pieces of these sizes."""
    with torch.no_grad():
        return torch.cat([model(part, cache=cache)[0] for part in idx.split(sizes, dim=1)], dim=1)


def random_kv(B, n_head, n_kv, t, hd=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(B, heads, t, hd, generator=generator) for heads in (n_head, n_kv, n_kv)]


# ---------------------------------------------------------------------------------------------------------------------
# cached = uncached


@pytest.mark.parametrize("sizes", [[FULL], [1] * FULL, [10, 14], [1, 22, 1], [5, 1, 6, 1, 1, 10]], ids=str)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", SHAPES)
def test_the_cached_logits_are_the_uncached_ones_at_every_position(n_kv, dialect, sizes):
    model = small_model(n_kv, dialect)
    idx = tokens(2, FULL)
    with torch.no_grad():
        whole = model(idx)[0]
    cache = make_cache(model, FULL, batch=2)
    assert (feed(model, idx, sizes, cache) - whole).abs().max() < 1e-4
    assert cache.length == FULL


@given(data=st.data(), n_kv=st.sampled_from(SHAPES), dialect=st.sampled_from(DIALECTS), B=st.integers(1, 3))
def test_any_pieces_and_roll_backs_give_the_same_logits(data, n_kv, dialect, B):
    model = small_model(n_kv, dialect)
    idx, junk = tokens(B, FULL), tokens(B, FULL, seed=1)
    with torch.no_grad():
        whole = model(idx)[0]
    cache = make_cache(model, FULL, B)
    while cache.length < FULL:
        left = FULL - cache.length
        held = cache.length
        if data.draw(st.booleans(), "go astray first"):
            model(junk[:, : data.draw(st.integers(1, left), "junk")], cache=cache)
            cache.truncate(held)
        size = data.draw(st.integers(1, left), "size")
        logits = feed(model, idx[:, held : held + size], [size], cache)
        assert (logits - whole[:, held : held + size]).abs().max() < 1e-4


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", SHAPES)
def test_ten_and_ten_tokens_agree_with_the_float64_reference(n_kv, dialect):
    model = small_model(n_kv, dialect)
    idx = tokens(1, 20)
    logits = feed(model, idx, [10, 10], make_cache(model, 20))
    assert (logits - reference_logits(model, idx)).abs().max() < 1e-4


@pytest.mark.parametrize("t", [1, 2, 5])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_new_tokens_over_a_cache_of_twenty_see_all_of_it_and_no_future(n_kv, t):
    cache = DenseCache(1, n_kv, 4, capacity=25, batch=2)
    q, k, v = random_kv(2, 8, n_kv, 20 + t)
    cache.attend(0, q[:, :, :20], k[:, :, :20], v[:, :, :20])
    y = cache.attend(0, q[:, :, 20:], k[:, :, 20:], v[:, :, 20:])
    assert (y - attend(q[:, :, 20:], k, v, past=20)).abs().max() < 1e-5


@given(
    past=st.integers(0, 9), t=st.integers(1, 7), n_kv=st.integers(1, 3), group=st.integers(1, 4), hd=st.integers(1, 6),
    layers=st.integers(1, 3), spare=st.integers(0, 4),
)  # fmt: skip
def test_attention_over_a_cache_agrees_with_a_float64_loop_for_any_shape(past, t, n_kv, group, hd, layers, spare):
    cache = DenseCache(layers, n_kv, hd, capacity=past + t + spare)
    qkv = [random_kv(1, n_kv * group, n_kv, past + t, hd, seed=layer) for layer in range(layers)]
    if past:
        for layer, (q, k, v) in enumerate(qkv):
            cache.attend(layer, q[:, :, :past], k[:, :, :past], v[:, :, :past])
    for layer, (q, k, v) in enumerate(qkv):
        assert cache.length == past  # the last layer moves it on
        y = cache.attend(layer, q[:, :, past:], k[:, :, past:], v[:, :, past:])
        assert (y - attend(q[:, :, past:], k, v, past)).abs().max() < 1e-5
    assert cache.length == past + t


# ---------------------------------------------------------------------------------------------------------------------
# truncate, reset, capacity


def test_a_truncated_cache_goes_on_as_if_the_tokens_had_never_been():
    model = small_model(2)
    idx, junk = tokens(2, 14), tokens(2, 9, seed=1)
    straight, turned = make_cache(model, 24, 2), make_cache(model, 24, 2)
    feed(model, idx[:, :8], [8], straight)
    feed(model, torch.cat((idx[:, :8], junk), 1), [8, 9], turned)
    turned.truncate(8)
    assert turned.length == 8 and turned.nbytes() == straight.nbytes()
    assert torch.equal(feed(model, idx[:, 8:], [3, 3], turned), feed(model, idx[:, 8:], [3, 3], straight))


def test_a_reset_cache_is_empty_and_works_as_new():
    model = small_model(2)
    cache = make_cache(model, 24, 2)
    first = feed(model, tokens(2, 9), [9], cache)
    cache.reset()
    assert cache.length == 0 and cache.nbytes() == {"keys": 0, "values": 0}
    assert torch.equal(feed(model, tokens(2, 9), [9], cache), first)


@pytest.mark.parametrize("length", [-1, 6, 100])
def test_a_cache_is_not_truncated_to_what_it_does_not_hold(length):
    model = small_model(2)
    cache = make_cache(model, 24)
    feed(model, tokens(1, 5), [5], cache)
    with pytest.raises(ValueError) as error:
        cache.truncate(length)
    assert cache.length == 5
    assert str(length) in str(error.value) and "5" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("held, more", [(6, 1), (6, 4), (4, 3), (0, 7)])
def test_more_than_the_capacity_is_refused_before_anything_is_written(held, more):
    model = small_model(2)
    cache = make_cache(model, 6)
    if held:
        feed(model, tokens(1, held), [held], cache)
    before = [t.clone() for t in cache.keys + cache.values]
    with pytest.raises(ValueError) as error:
        model(tokens(1, more), cache=cache)
    assert cache.length == held
    assert all(torch.equal(a[:, :, :held], b[:, :, :held]) for a, b in zip(before, cache.keys + cache.values, strict=True))
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, cache.keys + cache.values, strict=True)
    )
    assert "capacity=6" in str(error.value) and "\n" not in str(error.value)


def test_a_small_capacity_holds_the_same_entries_as_a_large_one():
    model = small_model(2)
    small, large = make_cache(model, 12), make_cache(model, 24)
    idx = tokens(1, 12)
    assert torch.equal(feed(model, idx, [4] + [1] * 8, small), feed(model, idx, [4] + [1] * 8, large))


def test_the_tokens_past_the_context_are_refused_though_the_cache_has_room():
    model = small_model(2)
    cache = DenseCache(2, 2, 8, capacity=100)
    feed(model, tokens(1, 20), [20], cache)
    with pytest.raises(ValueError, match="block_size=24"):
        model(tokens(1, 5), cache=cache)
    assert cache.length == 20


@pytest.mark.parametrize("held, given", [(8, 1), (8, 2), (2, 8), (2, 1)])
def test_a_cache_of_another_number_of_kv_heads_is_refused_and_never_broadcast(held, given):
    cache = DenseCache(1, held, 4, capacity=8)
    cache.keys[0].zero_()
    q, k, v = random_kv(1, 8, given, 3)
    with pytest.raises((ValueError, RuntimeError)):
        cache.attend(0, q, k, v)
    assert cache.length == 0 and not cache.keys[0].any()


# ---------------------------------------------------------------------------------------------------------------------
# bytes


@pytest.mark.parametrize("dtype, itemsize", [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)], ids=str)
@pytest.mark.parametrize("length", [0, 1, 17, 256])
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_the_bytes_held_are_the_closed_formula(n_kv, batch, length, dtype, itemsize):
    n_layer, hd = 2, 4
    cache = DenseCache(n_layer, n_kv, hd, 256, batch, dtype)
    if length:
        q, k, v = torch.zeros(batch, n_kv, length, hd), *(torch.zeros(batch, n_kv, length, hd) for _ in "kv")
        for layer in range(n_layer):
            cache.attend(layer, q, k, v)
    one = n_layer * n_kv * hd * length * batch * itemsize
    assert cache.nbytes() == {"keys": one, "values": one}
    assert dense_nbytes(n_layer, n_kv, hd, length, batch, itemsize) == 2 * one
    # allocated: other than held, and whole
    assert cache.capacity_nbytes() == sum(t.untyped_storage().nbytes() for t in cache.keys + cache.values)
    assert cache.capacity_nbytes() == 2 * n_layer * n_kv * hd * 256 * batch * itemsize


@given(
    n_layer=st.integers(1, 4), n_kv=st.integers(1, 5), hd=st.integers(1, 9), capacity=st.integers(1, 30),
    batch=st.integers(1, 4), length=st.integers(0, 30),
)  # fmt: skip
def test_the_bytes_are_the_closed_formula_for_any_shape(n_layer, n_kv, hd, capacity, batch, length):
    length = min(length, capacity)
    cache = DenseCache(n_layer, n_kv, hd, capacity, batch, torch.bfloat16)
    for layer in range(n_layer if length else 0):
        cache.attend(layer, *random_kv(batch, 2 * n_kv, n_kv, length, hd))
    assert sum(cache.nbytes().values()) == dense_nbytes(n_layer, n_kv, hd, length, batch, 2)
    assert sum(cache.nbytes().values()) == 2 * n_layer * n_kv * hd * length * batch * 2
    assert cache.capacity_nbytes() == dense_nbytes(n_layer, n_kv, hd, capacity, batch, 2)


def test_the_bytes_fall_exactly_with_the_number_of_kv_heads():
    held, allocated = {}, {}
    for n_kv in SHAPES:
        model = small_model(n_kv)
        cache = make_cache(model, 24, batch=3)
        feed(model, tokens(3, 10), [9, 1], cache)
        held[n_kv], allocated[n_kv] = sum(cache.nbytes().values()), cache.capacity_nbytes()
        assert all(t.shape == (3, n_kv, 24, 8) for t in cache.keys + cache.values)  # n_kv, not the query heads
    assert held[8] == 4 * held[2] == 8 * held[1] == 2 * 2 * 64 * 10 * 3 * 4
    assert allocated[8] == 4 * allocated[2] == 8 * allocated[1]


def test_a_cache_is_never_larger_than_the_models_context():
    model = small_model(2)
    assert make_cache(model, 1000).capacity == 24
    assert make_cache(model, 7).capacity == 7


# ---------------------------------------------------------------------------------------------------------------------
# dtypes


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_dtype_that_cannot_be_attended_over_is_refused(dtype):
    with pytest.raises(ValueError) as error:
        DenseCache(1, 2, 4, 8, dtype=dtype)
    assert str(dtype) in str(error.value) and "bfloat16" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("dtype, step", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
@pytest.mark.parametrize("n_kv", SHAPES)
def test_a_half_precision_cache_is_as_exact_as_its_rounding(n_kv, dtype, step):
    q, k, v = random_kv(2, 8, n_kv, 20)
    cache = DenseCache(1, n_kv, 4, capacity=20, batch=2, dtype=dtype)
    pieces = [cache.attend(0, *(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 12), (12, 13), (13, 20))]
    y = torch.cat(pieces, dim=2)
    assert y.dtype == torch.float32  # the queries' own
    rounded = attend(*(x.to(dtype) for x in (q, k, v)))
    largest = v.abs().max()
    assert (y - rounded).abs().max() < 2 * step * largest  # the weights and the result are rounded once each
    gap = (y - attend(q, k, v)).abs().max()
    assert step / 100 < gap < 20 * step * largest  # rounded queries and keys move the scores, which are up to 30
