"""Generation with and without a cache, and the law that tokens are drawn from."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import DIALECTS, SHAPES, small_model, tokens
from scipy.stats import chisquare

import decoding
from decoding import check_sampling, distribution, generate, make_cache, prefill, sample_token
from kv_cache.dense import DenseCache

BLOCK = small_model().config.block_size


def small_writer(n_kv=2, dialect="gpt2"):
    """A model that does not fall into repeating one token: untied, it has no reason to name the token it has just read."""
    return small_model(n_kv, dialect, seed=2, tie_weights=False)


def text(model, idx, n, cache=None, **kwargs):
    """Generated tokens [B, n]."""
    return torch.stack(list(generate(model, idx, n, cache, **kwargs)), dim=1)


def greedy_by_the_rule(model, prompt, n):
    """
    The rule, told once more for one sequence: a list of tokens is the window. When it is longer than the context, the
    newest half of a context stays, at positions from 0 on. The whole window is then read to choose the next token.
    """
    window, new = list(prompt), []
    for _ in range(n):
        if len(window) > BLOCK:
            window = window[-(BLOCK // 2) :]
        with torch.no_grad():
            logits = model(torch.tensor([window]))[0][0, -1]
        new.append(max(range(len(logits)), key=lambda i: logits[i].item()))
        window.append(new[-1])
    return new


# ---------------------------------------------------------------------------------------------------------------------
# text


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", SHAPES)
@pytest.mark.parametrize("prompt", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_greedy_text_follows_the_rule_far_past_the_context_with_and_without_a_cache(n_kv, dialect, prompt):
    model = small_writer(n_kv, dialect)
    idx = tokens(1, prompt)
    n = 3 * BLOCK
    wanted = greedy_by_the_rule(model, idx[0].tolist(), n)
    assert len(set(wanted)) > 3  # no text of one token, which any mistake would give too
    assert text(model, idx, n, temperature=0)[0].tolist() == wanted
    assert text(model, idx, n, make_cache(model, prompt + n), temperature=0)[0].tolist() == wanted


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_a_batch_of_three_is_three_single_texts(n_kv, cached):
    model = small_writer(n_kv)
    idx = tokens(3, 4)
    n = 2 * BLOCK

    def cache(batch):
        return make_cache(model, 4 + n, batch) if cached else None

    rows = text(model, idx, n, cache(3), temperature=0)
    assert len({tuple(row.tolist()) for row in rows}) == 3
    for i in range(3):
        assert torch.equal(text(model, idx[i : i + 1], n, cache(1), temperature=0)[0], rows[i])


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_a_seed_gives_the_same_text_with_and_without_a_cache(n_kv, settings):
    model, idx, n = small_writer(n_kv), tokens(2, 3), 2 * BLOCK

    def draw(seed, cache=None):
        return text(model, idx, n, cache, generator=torch.Generator().manual_seed(seed), **settings)

    plain = draw(1)
    assert torch.equal(draw(1, make_cache(model, 3 + n, 2)), plain)
    torch.manual_seed(7)  # the global generator has no say
    assert torch.equal(draw(1), plain)
    assert not torch.equal(draw(2), plain)
    assert not torch.equal(plain[0], plain[1])


def test_tokens_are_yielded_as_they_come():
    model = small_writer()
    steps = generate(model, tokens(2, 3), 10**6, temperature=0)  # a million: nothing waits for the end
    first = [next(steps) for _ in range(3)]
    assert all(token.shape == (2,) and token.dtype == torch.long for token in first)


def test_with_a_cache_each_step_reads_one_token_and_without_one_the_window(monkeypatch):
    model, sizes, feeder = small_writer(), [], decoding.feeder

    def watched(*args):
        feed = feeder(*args)
        return lambda idx: sizes.append(idx.shape[1]) or feed(idx)

    monkeypatch.setattr(decoding, "feeder", watched)
    text(model, tokens(1, 5), 4, make_cache(model, 9), temperature=0)
    assert sizes == [5, 1, 1, 1]
    sizes.clear()
    text(model, tokens(1, 5), 4, temperature=0)
    assert sizes == [5, 6, 7, 8]


def test_a_used_cache_is_emptied_first():
    model = small_writer()
    cache = make_cache(model, 20)
    text(model, tokens(1, 8, seed=5), 7, cache, temperature=0)
    again = text(model, tokens(1, 8), 7, cache, temperature=0)
    assert torch.equal(again, text(model, tokens(1, 8), 7, temperature=0))
    assert cache.length == 8 + 7 - 1  # the last token is never fed


def test_the_prompt_itself_is_left_alone():
    idx = tokens(2, 5)
    before = idx.clone()
    text(small_writer(), idx, 30, temperature=0)
    assert torch.equal(idx, before)


@given(chunk=st.one_of(st.none(), st.integers(1, 20)), n_kv=st.sampled_from(SHAPES), T=st.integers(1, 20))
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(chunk, n_kv, T):
    model, idx = small_writer(n_kv), tokens(2, T)
    cache = make_cache(model, T, 2)
    logits = prefill(model, idx, cache, chunk)
    assert cache.length == T
    assert (logits - model(idx)[0][:, -1]).abs().max() < 1e-4


def test_generation_works_in_half_precision_caches():
    model = small_writer()
    for dtype in (torch.bfloat16, torch.float16):
        cache = make_cache(model, 60, 2, dtype)
        new = text(model, tokens(2, 5), 55, cache, temperature=0)
        assert cache.keys[0].dtype == dtype and new.min() >= 0 and new.max() < 31


# ---------------------------------------------------------------------------------------------------------------------
# refusals, before any work


class Untouchable(torch.nn.Module):
    """A model that must not be asked anything."""

    config = small_model().config

    def features(self, *args):
        raise AssertionError("work was done")


@pytest.mark.parametrize(
    "prompt, settings, words",
    [
        (0, {}, "prompt is empty"),
        (3, {"temperature": -1}, "temperature=-1"),
        (3, {"temperature": -1e-9}, "temperature=-1e-09"),
        (3, {"temperature": math.nan}, "temperature=nan"),
        (3, {"temperature": math.inf}, "temperature=inf"),
        (3, {"top_k": 0}, "top_k=0"),
        (3, {"top_k": -5}, "top_k=-5"),
        (3, {"top_k": 2.5}, "top_k=2.5"),
        (3, {"top_k": True}, "top_k=True"),
        (3, {"top_p": 0.0}, "top_p=0.0"),
        (3, {"top_p": 1.01}, "top_p=1.01"),
        (3, {"top_p": math.nan}, "top_p=nan"),
    ],
)
@pytest.mark.parametrize("cached", [True, False])
def test_what_cannot_be_generated_is_refused_before_any_work(prompt, settings, words, cached):
    cache = DenseCache(2, 2, 8, 24) if cached else None
    if cache:
        cache.length = 4
    with pytest.raises(ValueError) as error:
        next(generate(Untouchable(), torch.zeros(1, prompt, dtype=torch.long), 5, cache, **settings))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert cache is None or cache.length == 4


def test_a_cache_too_small_is_refused_before_any_work_and_one_that_just_fits_is_not():
    with pytest.raises(ValueError, match="holds 8 tokens.*needs 9") as error:
        next(generate(Untouchable(), tokens(1, 5), 5, DenseCache(2, 2, 8, 8)))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="needs 24"):  # never more than the context
        next(generate(Untouchable(), tokens(1, 5), 500, DenseCache(2, 2, 8, 23)))
    assert text(small_model(), tokens(1, 5), 5, DenseCache(2, 2, 8, 9), temperature=0).shape == (1, 5)


# ---------------------------------------------------------------------------------------------------------------------
# the law


def law(logits, temperature=1.0, top_k=None, top_p=None):
    """The probabilities of one row of logits, in NumPy and float64, token by token."""
    z = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return np.eye(len(z))[np.argmax(z)]
    with np.errstate(over="ignore", under="ignore"):
        p = np.exp((z - z.max()) / temperature)
    p /= p.sum()
    ranked = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k is not None:
        for i in ranked[top_k:]:
            p[i] = 0.0
        p /= p.sum()
    if top_p is not None:
        mass = 0.0
        for i in ranked:
            mass, p[i] = mass + p[i], p[i] if mass < top_p else 0.0
        p /= p.sum()
    return p


def some_logits(B=4, V=31, seed=0, scale=3.0):
    return scale * torch.randn(B, V, generator=torch.Generator().manual_seed(seed))


@given(
    temperature=st.sampled_from([0, 1e-6, 1e-30, 0.1, 0.7, 1.0, 2.0, 100.0, 1e30]),
    top_k=st.one_of(st.none(), st.integers(1, 40)),
    top_p=st.one_of(st.none(), st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999])),
    seed=st.integers(0, 100),
)
def test_the_law_agrees_with_numpy(temperature, top_k, top_p, seed):
    logits = some_logits(seed=seed)
    probs = distribution(logits, temperature, top_k, top_p)
    assert probs.shape == logits.shape and torch.isfinite(probs).all()
    for row, p in zip(logits, probs, strict=True):
        assert np.abs(p.numpy() - law(row, temperature, top_k, top_p)).max() < 1e-5
        assert abs(p.sum().item() - 1) < 1e-5
        assert top_k is None or (p > 0).sum() <= top_k


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 1e-46, 1e-300, 5e-324])
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_tiny_temperature_is_finite_and_greedy(temperature, settings):
    logits = some_logits(scale=30.0)
    probs = distribution(logits, temperature, **settings)
    assert torch.equal(probs, distribution(logits, 0))
    assert torch.equal(sample_token(logits, temperature, **settings), logits.argmax(1))


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e38, 1e300])
def test_a_huge_temperature_is_finite_and_uniform(temperature):
    assert (distribution(some_logits(), temperature) - 1 / 31).abs().max() < 1e-5


def test_ties_leave_exactly_k_tokens():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0], [5.0] * 6])
    for k in range(1, 7):
        probs = distribution(logits, top_k=k)
        assert ((probs > 0).sum(1) == k).all()
        assert (probs[1].sort(descending=True).values[:k] - 1 / k).abs().max() < 1e-6


def test_more_than_the_vocabulary_and_all_of_the_mass_change_nothing():
    logits = some_logits()
    plain = distribution(logits)
    for settings in ({"top_k": 31}, {"top_k": 10**9}, {"top_p": 1.0}, {"top_k": 31, "top_p": 1.0}):
        assert (distribution(logits, **settings) - plain).abs().max() < 1e-6
    assert (plain > 0).all()


def test_temperature_comes_before_top_p_and_top_k_before_top_p():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # 0.4 and 0.3 of what top_k leaves are 4/7 and 3/7: the first alone reaches 0.5, of all four it would not
    assert (distribution(logits, top_k=2, top_p=0.5) > 0).tolist() == [[True, False, False, False]]
    assert (distribution(logits, top_p=0.5) > 0).tolist() == [[True, True, False, False]]
    assert (distribution(logits, temperature=0.1, top_p=0.9) > 0).tolist() == [[True, False, False, False]]


def test_the_logits_are_left_as_they_were_and_half_precision_is_computed_in_float64():
    logits = some_logits()
    before = logits.clone()
    distribution(logits, 0.5, 3, 0.9)
    assert torch.equal(logits, before)
    assert distribution(logits.bfloat16(), 0.5, 3, 0.9).dtype == torch.float64


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}, {"temperature": 2.0, "top_k": 6, "top_p": 0.8}]
)
def test_sampled_frequencies_follow_the_law(settings):
    logits = some_logits(B=1, V=9, seed=2, scale=1.5)
    n = 20_000
    drawn = sample_token(logits.expand(n, -1), **settings, generator=torch.Generator().manual_seed(0))
    counts = np.bincount(drawn.numpy(), minlength=9)
    p = law(logits[0], **settings)
    assert not counts[p == 0].any()
    assert chisquare(counts[p > 0], p[p > 0] * n).pvalue > 1e-3  # a fixed seed: this cannot flicker


def test_greedy_draws_nothing_from_the_generator():
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    logits = some_logits()
    assert torch.equal(sample_token(logits, 0, generator=generator), logits.argmax(1))
    assert torch.equal(generator.get_state(), state)
    sample_token(logits, 1, generator=generator)
    assert not torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("setting", ["temperature", "top_k", "top_p"])
def test_a_setting_that_is_no_number_is_refused(setting):
    with pytest.raises((ValueError, TypeError)):
        check_sampling(**{setting: "warm"})


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", SHAPES)
def test_the_step_that_a_gpu_captures_is_the_step(n_kv, dialect):
    model, idx = small_model(n_kv, dialect), tokens(2, 12)
    plain, captured = make_cache(model, 20, 2), make_cache(model, 20, 2)
    for x in captured.keys + captured.values:
        x.fill_(torch.nan)  # as fresh memory may
    with torch.no_grad():
        model(idx[:, :6], cache=plain), model(idx[:, :6], cache=captured)
        step = decoding.GraphStep(model, captured)
        for i, window in zip(range(6, 12), (7, 8, 20, 20, 13, 12), strict=True):
            step.idx.copy_(idx[:, i : i + 1])
            step.position.fill_(i)
            assert (step.run(window) - decoding.next_logits(model, idx[:, i : i + 1], plain)).abs().max() < 1e-4
        for a, b in zip(captured.keys + captured.values, plain.keys + plain.values, strict=True):
            assert (a[:, :, :12] - b[:, :, :12]).abs().max() < 1e-5 and (a[:, :, 12:] == 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_captured_steps_write_the_same_text():
    model, idx = small_writer().cuda(), tokens(2, 5).cuda()
    cache = make_cache(model, BLOCK, 2)
    assert torch.equal(text(model, idx, 3 * BLOCK, cache, temperature=0), text(model, idx, 3 * BLOCK, temperature=0))
