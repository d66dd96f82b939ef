"""Calibration: the tables it fits, the file it leaves, and the scripts that go through a quantised cache."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_reference import cost, least_cost

from kv_cache.fp8 import FP8Config
from kv_cache.kivi import KIVIConfig
from kv_cache.kvquant import KVQuantConfig, datatype, fit

BITS = [2, 3, 4, 8]
SAMPLE = [
    FP8Config(),
    FP8Config("e5m2", "head"),
    KIVIConfig(2, 4, 6),
    KIVIConfig(3, 4, 0),
    KVQuantConfig(3, 0.1),
    KVQuantConfig(2, 0.0, 3),
]


def floats(low, high):
    return st.floats(low, high, width=32, allow_nan=False)


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
@pytest.mark.parametrize("seed", range(3))
def test_a_table_costs_hardly_more_than_the_best_there_is_and_less_than_an_even_one(kind, seed):
    z, weight = sample(kind, 300, seed)
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
