"""Calibration: the tables it fits, the file it leaves, and the scripts that go through a quantised cache."""

import importlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import move_to, run_main
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_reference import cost, least_cost
from reference import DIALECTS, SHAPES, small_model, tokens, turn
from test_cli import refused
from torch.nn import functional as F

from calibrate import collect, turned
from decoding import cache_config, make_cache
from eval import Newest, evaluate_cached
from kv_cache.kvquant import datatype, fit, fit_key
from storage import digest, load_checkpoint, load_model

FAST = ("threads=1", "tokens=64")  # of calibrate.py
SMALL = ("threads=1", "tokens=6", "prompt_tokens=4", "batches=[2]", "wandb=disabled")  # of eval.py


@pytest.fixture(scope="session")
def calibration(trained):
    """The calibration of the finished run, from a few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        move_to(trained.parents[2], patch)
        assert run_main("calibrate", "sweep=t", *FAST) == 0
    return trained / "last.calibration.pt"


@pytest.fixture
def calibrated(calibration, mha):
    """checkpoints/mha.pt and its calibration, whose path it is."""
    return Path(shutil.copy(calibration, mha.with_suffix(".calibration.pt")))


# ---------------------------------------------------------------------------------------------------------------------
# tables: weighted k-means in one dimension


def sample(kind, n, seed):
    draw = torch.Generator().manual_seed(seed)
    z = {
        "normal": torch.randn(n, generator=draw) / 3,
        "uniform": 2 * torch.rand(n, generator=draw) - 1,
        "two heaps": torch.randn(n, generator=draw) / 20 + torch.where(torch.rand(n, generator=draw) < 0.3, 0.7, -0.5),
        "heavy tails": torch.randn(n, generator=draw).pow(3) / 20,
    }[kind].clamp(-1, 1)
    return z, torch.rand(n, generator=draw).pow(4)


@pytest.mark.parametrize("kind", ["normal", "uniform", "two heaps", "heavy tails"])
@pytest.mark.parametrize("seed", range(2))
def test_a_table_costs_hardly_more_than_the_best_there_is_and_less_than_an_even_one(kind, seed):
    z, weight = sample(kind, 150, seed)
    for bits, table in zip((2, 3, 4), datatype(z, weight, (2, 3, 4)), strict=True):
        table = table.numpy()
        assert table.shape == (2**bits,) and (np.diff(table) > 0).all() and abs(table).max() < 1 + 1e-9
        even = np.linspace(-1, 1, 2**bits + 1)[:-1] + 2**-bits
        best, found = least_cost(z.numpy(), weight.numpy(), 2**bits), cost(z.numpy(), weight.numpy(), table)
        assert best * (1 - 1e-6) <= found <= cost(z.numpy(), weight.numpy(), even)
        assert found <= 1.05 * best + 1e-7 * weight.sum(), (bits, found / best)


@given(data=st.data(), bits=st.sampled_from([2, 3, 4]), n=st.integers(1, 60))
@settings(max_examples=15)
def test_each_number_of_a_table_is_the_weighted_mean_of_its_cell(data, bits, n):
    z, weight = sample(
        data.draw(st.sampled_from(["normal", "uniform", "two heaps", "heavy tails"])), n, data.draw(st.integers(0, 10**6))
    )
    weight = weight + 0.1
    [table] = datatype(z, weight, (bits,))
    assert table.isfinite().all() and table.abs().max() < 1 + 1e-9 and (table.diff() >= 0).all()
    bin_width = 2 / 2**14  # of the histogram that it is found on: within one, an order or a cell is not told apart
    for i in range(2**bits):
        low = (table[i] + table[i - 1]) / 2 if i else -2
        high = (table[i] + table[i + 1]) / 2 if i + 1 < 2**bits else 2
        near = ((z - low).abs() < 2 * bin_width) | ((z - high).abs() < 2 * bin_width)
        cell = (z > low) & (z <= high)
        if cell.any() and not near.any():
            mean = (z * weight)[cell].sum() / weight[cell].sum()
            assert abs(mean - table[i]) < 1e-4


def test_numbers_without_weight_count_for_nothing_beside_those_with():
    z = torch.cat((torch.linspace(-1, 1, 1000), torch.tensor([-0.5, 0.1, 0.2, 0.3])))
    weight = torch.cat((torch.zeros(1000), torch.ones(4)))
    [table] = datatype(z, weight, (2,))
    assert (table - torch.tensor([-0.5, 0.1, 0.2, 0.3])).abs().max() < 0.02


@pytest.mark.parametrize("outliers", [0.0, 0.02, 0.2])
def test_a_fit_leaves_as_many_keys_outside_as_it_was_told(outliers):
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2000, 12, generator=draw) * torch.arange(1, 13) + 5
    values, fisher = torch.randn(2000, 12, generator=draw), torch.rand(2000, 12, generator=draw)
    for bits, f in zip((2, 3), fit(keys, values, fisher, fisher, (2, 3), outliers), strict=True):
        assert all(x.dtype == torch.float16 and x.isfinite().all() for x in f.values())
        assert f["key_table"].shape == f["value_table"].shape == (2**bits,)
        share = ((keys - f["key_middle"].float()).abs() > f["key_width"].float()).float().mean(dim=0)
        assert (share <= outliers).all() and (share >= outliers - 0.01).all()
        assert outliers or ((keys - f["key_middle"].float()).abs() <= f["key_width"].float()).all()


# ---------------------------------------------------------------------------------------------------------------------
# what is collected


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", SHAPES)
def test_the_keys_values_and_gradients_are_those_of_autograd_on_the_plain_model(n_kv, dialect):
    windows = tokens(3, 13, seed=3)
    found = collect(small_model(n_kv, dialect), [(x[None, :-1], x[None, 1:]) for x in windows])
    model, seen = small_model(n_kv, dialect), []
    for block in model.h:
        block.attn.c_attn.register_forward_hook(lambda module, args, out: (out.retain_grad(), seen.append(out))[0])
    for i, window in enumerate(windows):
        seen.clear()
        logits = model(window[None, :-1])[0]
        F.cross_entropy(logits[0], window[1:]).backward()
        for layer, out in enumerate(seen):
            for which, x in zip(((0, 1), (2, 3)), (out.detach(), out.grad), strict=True):
                k, v = x[0, :, 64:].split(n_kv * 8, dim=1)
                for name, expected in zip(which, (k, v), strict=True):
                    assert found[name][layer].shape == (3, 12, n_kv, 8)
                    assert torch.allclose(found[name][layer][i].flatten(1), expected, rtol=1e-4, atol=1e-7)
                    assert expected.abs().max() > 1e-5


def test_collecting_leaves_no_hook_behind():
    model = small_model(2)
    before = model(tokens(1, 12))[0]
    collect(model, [(tokens(2, 12), tokens(2, 12, seed=1))])
    assert torch.equal(model(tokens(1, 12))[0], before) and not any(m._forward_hooks for m in model.modules())


def test_keys_and_their_gradients_are_turned_to_their_positions():
    """A gradient turns as its key does: the product of both, which is how the loss changes, stays."""
    model = small_model(2, "llama")
    x, g = (torch.randn(2, 9, 2, 8, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    a, b = turned(model, x), turned(model, g)
    assert (a.transpose(1, 2) - turn(x.transpose(1, 2), 10000.0)).abs().max() < 1e-5
    assert ((a * b).sum(-1) - (x * g).sum(-1)).abs().max() < 1e-5
    assert turned(small_model(2), x) is x


# ---------------------------------------------------------------------------------------------------------------------
# the file


def test_the_file_lies_beside_the_checkpoint_and_holds_what_its_keys_and_values_reach(calibrated, mha):
    c, model = torch.load(calibrated, weights_only=True), load_model(load_checkpoint(mha)).eval()
    assert c["weights"] == digest(model) and c["tokens"] == 64
    assert set(c["fits"]) == {fit_key(bits, share, True) for bits in (2, 3, 4) for share in (0.0, 0.01)}
    corpus = torch.load(mha, weights_only=True)["data"]
    assert c["data"] == corpus
    for name in ("key_amax", "value_amax"):
        assert c[name].shape == (2, 8) and (c[name] > 0).all() and c[name].isfinite().all()
    for fits in c["fits"].values():
        assert len(fits) == 2
        for f in fits:
            assert f["key_middle"].shape == f["key_width"].shape == (32,) and all(x.dtype == torch.float16 for x in f.values())
            assert (f["key_table"].diff() >= 0).all() and (f["value_table"].diff() >= 0).all()
    for layer, f in enumerate(c["fits"][fit_key(3, 0.0, True)]):  # without outliers the ranges hold the largest keys
        reach = (f["key_middle"].float().abs() + f["key_width"].float()).view(8, 4).amax(1)
        assert (reach >= c["key_amax"][layer]).all() and (reach <= 1.01 * c["key_amax"][layer] + 1e-3).all()


def test_a_calibration_is_kept_until_told_otherwise(call, calibrated):
    was = calibrated.read_bytes()
    code, out, err = call("calibrate", "ckpt=mha.pt", *FAST)
    assert code == 0 and "again=true" in out and calibrated.read_bytes() == was
    code, out, err = call("calibrate", "ckpt=mha.pt", "outliers=[0.1]", *FAST)  # which that one lacks
    assert code == 0 and fit_key(2, 0.1, True) in torch.load(calibrated, weights_only=True)["fits"]


@pytest.mark.parametrize("script", [("sample", "tokens=3"), ("eval", *SMALL)], ids=["sample", "eval"])
@pytest.mark.parametrize("cache", ["cache=fp8 cache.scale=head", "cache=kvquant"])
def test_a_calibration_that_is_missing_broken_or_of_other_weights_is_refused_in_one_line(call, mha, cwd, script, cache):
    name, *args = script
    args += ["ckpt=mha.pt", *cache.split()]
    error = refused(call(name, *args), "mha.calibration.pt", "python calibrate.py ckpt=")
    command = re.search(r"python calibrate\.py (ckpt=\S+)", error)[1]
    file = mha.with_suffix(".calibration.pt")
    file.write_bytes(b"nonsense")
    refused(call(name, *args), "mha.calibration.pt", "again=true")
    assert not (cwd / "runs").exists()
    assert call("calibrate", command, "again=true", *FAST)[0] == 0
    checkpoint = torch.load(mha, weights_only=True)
    checkpoint["model"]["h.1.ln_1.weight"][3] += 1
    torch.save(checkpoint, mha)
    refused(call(name, *args), "other weights", "mha.pt", "again=true")
    assert not (cwd / "runs").exists()


@pytest.mark.parametrize("script", [("sample", "tokens=3"), ("eval", *SMALL)], ids=["sample", "eval"])
@pytest.mark.parametrize(
    "wrong, words",
    [("cache.outliers=0.07", "outliers=0.07 outliers=0.01"), ("cache.pre_rope=false", "pre_rope=false gpt2 pre_rope=true")],
)
def test_what_a_calibration_has_no_fit_for_is_refused_in_one_line_that_names_what_it_has(
    call, calibrated, cwd, script, wrong, words
):
    refused(call(*script, "ckpt=mha.pt", "cache=kvquant", wrong), *words.split())
    assert not (cwd / "runs").exists()


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("cache=kivy", "kivy kivi"),
        ("cache=kivi cache.bits=5", "bits=5 2, 3, 4 8"),
        ("cache=kivi cache.bits=two", "cache.bits='two' int"),
        ("cache=kivi cache.group=0", "group=0"),
        ("cache=kivi cache.residual=-1", "residual=-1"),
        ("cache=kivi cache.rollback=-1", "rollback=-1"),
        ("cache=kivi cache.key_axis=both", "both channel token"),
        ("cache=kivi cache.outliers=1", "cache.outliers"),
        ("cache=fp8 cache.scale=x", "scale=x one layer head"),
        ("cache=fp8 cache.format=e3m4", "e3m4 e4m3 e5m2"),
        ("cache=kvquant cache.bits=8", "bits=8 2, 3 4"),
        ("cache=kvquant cache.outliers=0.5", "outliers=0.5"),
        ("cache=kvquant cache.sink=-1", "sink=-1"),
        ("cache=dense cache.bits=2", "cache.bits"),
        ("cache.name=kivy", "kivy"),
        ("cache=null", "cache"),
    ],
)
def test_wrong_options_of_a_cache_are_refused_in_one_line(call, mha, cwd, wrong, words):
    script = ("eval", *SMALL) if "bits" in wrong or "kivy" in wrong else ("sample", "tokens=3")
    refused(call(*script, "ckpt=mha.pt", *wrong.split()), *words.split())
    assert not (cwd / "runs").exists()


@pytest.mark.parametrize(
    "args, words",
    [
        ("", "ckpt= sweep="), ("ckpt=missing.pt", "missing.pt"), ("sweep=nosuch", "nosuch"), ("ckpt=mha.pt tokens=1", "tokens=1"),
        ("ckpt=mha.pt outliers=0.1", "outliers=0.1"), ("ckpt=mha.pt outliers=[0.5]", "outliers=[0.5]"), ("ckpt=mha.pt outliers=[x]", "outliers="),
        ("ckpt=mha.pt source=missing.txt", "missing.txt"), ("ckpt=mha.pt outlier=[0.1]", "outliers"),
    ],
)  # fmt: skip
def test_calibrate_refuses_in_one_line_and_leaves_no_file(call, mha, cwd, args, words):
    refused(call("calibrate", *args.split(), "threads=1"), *words.split())
    assert not list(cwd.glob("**/*.calibration.pt"))


# ---------------------------------------------------------------------------------------------------------------------
# through the scripts

CACHES = [
    "cache=fp8",
    "cache=fp8 cache.format=e5m2 cache.scale=layer",
    "cache=kivi cache.group=4 cache.residual=4",
    "cache=kvquant cache.bits=4",
]


@pytest.mark.parametrize("cache", CACHES)
def test_sample_and_eval_go_through_a_quantised_cache_whose_bytes_are_the_formulas(call, calibrated, cwd, monkeypatch, cache):
    monkeypatch.setattr(importlib.import_module("eval"), "read_bandwidth", lambda device: 1e9)  # it reads 2.5 GB
    code, out, err = call("sample", "ckpt=mha.pt", "prompt=ab cd", "tokens=40", "samples=2", *cache.split())
    assert code == 0 and out.count("ab cd") == 2, err
    held, allocated = (int(n.replace(",", "")) for n in re.search(r"([\d,]+) bytes in use .* ([\d,]+) allocated", err).groups())
    assert 0 < held <= allocated
    code, out, err = call("eval", "ckpt=mha.pt", *SMALL, *cache.split())
    assert code == 0, err
    [path] = cwd.glob("runs/t/eval-*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["kv_bytes_measured_b2"] == summary["kv_bytes_formula_b2"] > 0
    by_formula, measured = re.search(r"([\d,]+) bytes by formula, ([\d,]+) in the tensors", out).groups()
    assert by_formula == measured
    assert summary["val_loss"] == torch.load(cwd / "checkpoints" / "mha.pt", weights_only=True)["val_loss"]
    assert abs(summary["val_loss_cached"] - summary["val_loss"]) < 0.1 and 0 < summary["val_kl"] < 0.1
    assert summary["bits_per_value"] < 32
    again = call("eval", "ckpt=mha.pt", *SMALL, *cache.split())
    assert again[0] == 0 and "measured before" in again[1] and f"KL {summary['val_kl']:.5f}" in again[1]


def test_without_a_cache_the_text_is_that_of_the_dense_one(call, mha):
    args = ("ckpt=mha.pt", "prompt=ab cd", "tokens=40", "temperature=0.8")
    dense, none, bare = call("sample", *args, "cache=dense"), call("sample", *args, "cache=none"), call("sample", *args)
    assert dense[0] == none[0] == 0 and dense[1] == none[1] == bare[1]
    assert "bytes in use" in dense[2] and "bytes in use" not in none[2]
    refused(call("eval", "ckpt=mha.pt", *SMALL, "cache=none"), "cache=none", "dense")


@pytest.mark.parametrize(
    "options",
    [{"name": "dense"}, {"name": "fp8"}, {"name": "kivi", "bits": 2, "group": 4, "residual": 3}, {"name": "kvquant", "bits": 2, "outliers": 0.1}],
    ids=lambda options: options["name"],
)  # fmt: skip
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_loss_through_the_cache_is_that_of_tokens_fed_one_by_one(options, dialect):
    # in float64, where no number is beside a tie of its rounding one way and not the other
    model, text, config = (
        small_model(2, dialect).double(),
        tokens(1, 24 * 2 + 8)[0],
        cache_config(options),
    )  # two windows, and 7 tokens
    draw = torch.Generator().manual_seed(0)
    keys, values, dk, dv = (torch.randn(500, 16, generator=draw) for _ in range(4))
    fits = [fit(keys, values, dk.square(), dv.square(), (2,), 0.1)[0]] * 2
    found = {"fits": {fit_key(2, 0.1, True): fits}}

    def new_cache(model, tokens, batch):
        return make_cache(model, tokens, batch, torch.float32, config, found)

    measured = evaluate_cached(model, text.numpy().astype(np.uint16), 24, new_cache)
    loss = divergence = bits = 0.0
    with torch.no_grad():
        for first in range(0, len(text) - 1, 24):
            window = text[first : min(first + 24, len(text) - 1)]
            cache = new_cache(model, 24, 1)
            uncached = model(window[None])[0][0].log_softmax(-1)
            for i, token in enumerate(window):
                logits = model(token.view(1, 1), cache=cache)[0][0, 0].log_softmax(-1)
                loss -= logits[text[first + i + 1]].item()
                divergence += (uncached[i].exp() * (uncached[i] - logits)).sum().item()
            if len(window) == 24:
                bits += (
                    8 * sum(cache.nbytes().values()) / (2 * 2 * 2 * 8 * 24) / 2
                )  # layers, both, heads, numbers, tokens; windows
    n = len(text) - 1
    assert abs(measured["val_loss_cached"] - loss / n) < 1e-5 and abs(measured["val_kl"] - divergence / n) < 1e-5
    if options["name"] != "kvquant":  # whose tables are counted once for both windows there
        assert measured["bits_per_value"] == pytest.approx(bits)


@pytest.mark.parametrize(
    "options", [{"name": "fp8"}, {"name": "kivi", "residual": 0, "group": 4}, {"name": "kvquant", "bits": 2}]
)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n_kv", [8, 2, 1])
def test_newest_tokens_are_exact_and_all_others_codes(options, dialect, n_kv):
    """Against attention written out in float64, one query at a time; n = 0 codes all of them, n = T none."""
    model, config, T, hd = small_model(n_kv, dialect), cache_config(options), 16, 8
    draw = torch.Generator().manual_seed(0)
    keys, values, dk, dv = (torch.randn(500, n_kv * hd, generator=draw) for _ in range(4))
    fits = [fit(keys, values, dk.square(), dv.square(), (2,), 0.01)[0]] * 2
    found = {"fits": {fit_key(2, 0.01, True): fits}}

    def new_cache(model, tokens, batch):
        return make_cache(model, tokens, batch, torch.float32, config, found)

    q = torch.randn(2, 8, T, hd, generator=draw)
    k, v = (torch.randn(2, n_kv, T, hd, generator=draw) for _ in range(2))
    plain = new_cache(model, T, 2)
    for layer in range(2):
        plain.attend(layer, q, k, v)
    for n, exact in ((0, None), (1, None), (3, None), (T, None), (3, "keys"), (0, "values")):
        coded = new_cache(model, T, 2)
        y = Newest(coded, n, exact).attend(0, q, k, v).double()
        turned_k = turn(k, model.config.rope_base) if coded.rotates else k
        near, far = (turned_k, v), [torch.cat([x(0, *at) for at in plain.blocks(T)], 2) for x in (plain.keys, plain.values)]
        if exact is not None:
            far[exact == "values"] = near[exact == "values"]
        for h in range(8):
            kv = h * n_kv // 8
            for i in range(T):
                sees = [near if i - j < n else far for j in range(i + 1)]
                ks, vs = (torch.stack([s[which][:, kv, j] for j, s in enumerate(sees)], 1).double() for which in (0, 1))
                weights = (torch.einsum("bd,btd->bt", q[:, h, i].double(), ks) / hd**0.5).softmax(dim=1)
                assert torch.allclose(y[:, h, i], torch.einsum("bt,btd->bd", weights, vs), atol=1e-5)
    text = tokens(1, 33)[0].numpy().astype(np.uint16)
    all_exact = evaluate_cached(model, text, 16, new_cache, newest=16)
    assert abs(all_exact["val_loss_cached"] - all_exact["val_loss"]) < 1e-5


@pytest.mark.parametrize(
    "wrong",
    [
        "newest=-1 cache=fp8 batches=[]",
        "newest=2 batches=[]",
        "newest=2 cache=fp8",
        "exact=keys",
        "exact=all cache=fp8 batches=[] newest=1",
    ],
)
def test_newest_is_refused_where_it_asks_nothing(call, mha, wrong):
    refused(call("eval", *SMALL, "ckpt=mha.pt", *wrong.split()), wrong.split()[0])
