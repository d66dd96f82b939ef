"""The numbers before any training: published ones to the digit, and each formula beside bytes that are really there."""

import itertools
import os
import re
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import SHAPES
from torch.utils.flop_counter import FlopCounterMode

import arithmetic
from arithmetic import BITS, cache_nbytes, cache_parts, costs, device_params, prefill_seconds, read_params, robot
from kv_cache.accounting import heads_per_device, kivi_nbytes
from kv_cache.dense import DenseCache
from model import GPT, GPTConfig
from shapes import Shape, find_shape

KIB, MIB, GIB = 2**10, 2**20, 2**30
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
KIVI = ["int8", "int4", "int2"]


def setting(**changed):
    """A setting without surprises: one device, one sequence, 16 bits."""
    s = {"context": 64, "batch": 1, "kv_dtype": "fp16", "group": 32, "residual": 32, "weight_dtype": "fp16", "tp": 1}
    return s | {"memory": GIB, "bandwidth": 1e12, "compute": 1e14, "draft": None} | changed


def small_shape(n_kv=2, head_dim=8, n_layer=2, others=1000, **more):
    """8 query heads; `others` weights beside attention's, all of them read."""
    attention = n_layer * 2 * 64 * (8 + n_kv) * head_dim
    values = {"name": "small", "n_layer": n_layer, "n_head": 8, "n_kv": n_kv, "head_dim": head_dim, "n_embd": 64}
    return asdict(Shape(**values, context=64, params=attention + others, **{"outside": 0, "unread": 0} | more))


# ---------------------------------------------------------------------------------------------------------------------
# published numbers, to the digit


@pytest.mark.parametrize(
    "args, per_token, cache",
    [
        ("shape=llama2-7b context=4096", 524_288, 2 * GIB),
        ("shape=llama2-7b context=4096 kv_dtype=bf16 batch=3", 524_288, 6 * GIB),
        ("shape=llama3-8b context=8192", 128 * KIB, 1 * GIB),
        ("shape=llama3-8b context=4374", 128 * KIB, 546.75 * MIB),
        ("shape=llama3-70b context=131072", 320 * KIB, 40 * GIB),  # 80 layers, 8 heads of 128
        ("shape=gpt2-small context=1024", 36 * KIB, 36 * MIB),
        ("shape=llama2-70b n_kv=64 context=4096", 2.5 * MIB, 10 * GIB),  # were it MHA
        ("shape=llama2-70b context=4096", 2.5 * MIB / 8, 10 * GIB / 8),
        ("shape=deepseek-v3 context=1000", 70_272, 70_272_000),  # 61 layers x 576 numbers x 2 bytes
    ],
)
def test_a_published_shape_takes_the_bytes_that_its_papers_say(numbers, args, per_token, cache):
    own = numbers(*args.split())["own"]
    assert own["bytes_per_token"] == per_token and own["cache_bytes"] == own["cache_bytes_all_devices"] == cache
    shape, tokens = find_shape("shape", args.split()[0][6:]), int(re.search(r"context=(\d+)", args)[1])
    if "n_kv" not in args and "batch" not in args:
        assert cache_nbytes(shape, setting(), tokens, 1) == cache == per_token * tokens


def test_a_step_reads_14_billion_bytes_in_14_milliseconds():
    assert arithmetic.floor_seconds(14 * 10**9, 0, 10**12) == 0.014
    assert arithmetic.floor_seconds(13 * 10**9, 10**9, 1e12) == 0.014
    assert arithmetic.readable_seconds(0.014) == "14.0 ms"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_scale_and_a_zero_point_of_16_bits_for_32_values_are_one_bit_a_value(numbers, bits):
    parts = kivi_nbytes(32, 8, 128, 4096, 1, bits, group=32, residual=0)
    values = 2 * 32 * 8 * 128 * 4096
    assert 8 * sum(parts.values()) == (bits + 1) * values
    assert parts["scales"] == parts["zeros"] and parts["window"] == 0 and 8 * parts["codes"] == bits * values
    rows = numbers("shape=llama3-8b", "context=4096", "kv_dtype=int8", "residual=0")["precision"]
    assert [row["bits_per_value"] for row in rows if row["kv_dtype"] == f"int{bits}"] == [bits + 1]


def test_the_precisions_take_half_and_a_quarter_of_one_another(numbers):
    rows = {row["kv_dtype"]: row["cache_bytes"] for row in numbers("shape=llama2-7b", "context=4096", "batch=2")["precision"]}
    assert rows["fp16"] == 2 * rows["fp8"] == 4 * GIB
    window = 2 * 32 * 32 * 32 * 128 * 2 * 2  # of the newest 32 tokens
    assert rows["int4"] == (4 * GIB - window) * 5 / 16 + window


# ---------------------------------------------------------------------------------------------------------------------
# bytes that are really there


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_the_bytes_of_a_dense_cache_are_those_of_its_tensors(n_kv, batch, kv_dtype):
    shape, s = small_shape(n_kv), setting(kv_dtype=kv_dtype)
    cache = DenseCache(2, n_kv, 8, 70, batch, DTYPES[kv_dtype])
    for length, more in zip((0, 1, 17, 64, 70), (1, 16, 47, 6, 0), strict=True):
        assert cache.length == length and cache_parts(shape, s, length, batch) == cache.nbytes()
        assert cache_nbytes(shape, s, length, batch) == sum(cache.nbytes().values())
        for layer in range(2 if more else 0):
            cache.attend(layer, torch.zeros(batch, 8, more, 8), *(torch.zeros(batch, n_kv, more, 8) for _ in "kv"))


@pytest.mark.parametrize("batch, tokens", [(1, 1), (1, 33), (4, 257)])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_the_bytes_of_an_fp8_cache_are_those_of_its_tensors(n_kv, batch, tokens):
    tensors = [torch.randn(batch, n_kv, tokens, 20).to(torch.float8_e4m3fn) for _ in range(2 * 3)]
    parts = cache_parts(small_shape(n_kv, 20, 3), setting(kv_dtype="fp8"), tokens, batch)
    assert parts == {"keys": sum(t.nbytes for t in tensors[:3]), "values": sum(t.nbytes for t in tensors[3:])}


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("batch, tokens", [(1, 1), (3, 65)])
def test_the_bytes_of_a_latent_cache_are_those_of_its_two_tensors(batch, tokens, kv_dtype):
    layers = [  # DeepSeek-V2, section 2.1: the compressed part, and the rotary key that all heads share
        torch.empty(batch, tokens, numbers, dtype=DTYPES[kv_dtype]) for numbers in 61 * (512, 64)
    ]
    for tp in (1, 8):  # every device needs all of it
        parts = cache_parts(find_shape("shape", "deepseek-v3"), setting(kv_dtype=kv_dtype, tp=tp), tokens, batch)
        assert parts == {"latent": sum(t.nbytes for t in layers)}


def quantized(x, bits, axis):
    """Codes of x, and the 16-bit scale and zero point that its slices along `axis` share."""
    zero = x.min(axis, keepdims=True).astype(np.float16)
    scale = ((x.max(axis, keepdims=True) - zero) / (2**bits - 1)).astype(np.float16)
    return np.clip(np.rint((x - zero) / scale), 0, 2**bits - 1).astype(np.uint8), scale, zero


def packed(codes, bits):
    """[..., hd] codes -> [..., bytes]: the bits of a head and token in a row, whole bytes."""
    rows = np.unpackbits(codes[..., None], axis=-1)[..., 8 - bits :]  # [..., hd, bits]
    return np.packbits(rows.reshape(*codes.shape[:-1], -1), axis=-1)


def kivi(keys, values, bits, group, residual):
    """
    A layer's [B, n_kv, T, hd] keys and values, kept as KIVI's section 3 says, one token after another -> the arrays by
    component after each token. A group is packed as soon as all of it is older than the newest `residual` tokens.
    """
    held, start = {"codes": [], "scales": [], "zeros": []}, 0
    for t in range(1, keys.shape[2] + 1):
        if t - start == residual + group:
            k, v = keys[:, :, start : start + group], values[:, :, start : start + group]
            by_channel = [quantized(k, bits, axis=2)]  # keys: one pair a channel
            by_token = [quantized(v[..., c : c + group], bits, axis=3) for c in range(0, v.shape[3], group)]
            held["codes"] += [packed(np.concatenate([q[0] for q in qs], 3), bits) for qs in (by_channel, by_token)]
            held["scales"] += [scale for _, scale, _ in by_channel + by_token]
            held["zeros"] += [zero for *_, zero in by_channel + by_token]
            start += group
        yield held | {"window": [keys[:, :, start:t], values[:, :, start:t]]}


def nbytes(held):
    return {name: sum(a.nbytes for a in arrays) for name, arrays in held.items()}


def random_layer(batch, n_kv, tokens, head_dim, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.standard_normal((batch, n_kv, tokens, head_dim)).astype(np.float16) for _ in "kv"]


@pytest.mark.parametrize("group, residual", [(32, 32), (16, 5), (16, 128), (32, 0)])
@pytest.mark.parametrize("head_dim", [32, 48, 80, 20, 7])
@pytest.mark.parametrize("kv_dtype", KIVI)
def test_the_bytes_of_a_kivi_cache_are_those_of_its_arrays_at_every_length(kv_dtype, head_dim, group, residual):
    for n_kv, batch in itertools.product(SHAPES, (1, 4)):
        shape, s = small_shape(n_kv, head_dim, 1), setting(kv_dtype=kv_dtype, group=group, residual=residual)
        layer = random_layer(batch, n_kv, 257, head_dim)
        for tokens, held in enumerate(kivi(*layer, BITS[kv_dtype], group, residual), 1):
            assert cache_parts(shape, s, tokens, batch) == nbytes(held), (tokens, n_kv, batch)
    parts = kivi_nbytes(3, 1, head_dim, 257, 4, BITS[kv_dtype], group, residual)  # layers are alike
    assert parts == {name: 3 * n for name, n in nbytes(held).items()}
    assert sum(kivi_nbytes(3, 1, head_dim, 0, 4, BITS[kv_dtype], group, residual).values()) == 0


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_arrays_above_give_back_what_was_stored(bits):
    keys, values = random_layer(2, 2, 64, 20)
    *_, held = kivi(keys, values, bits, 32, 16)
    assert held["window"][0].shape[2] == 32  # one group of the 48 older ones is not whole
    for x, codes, scale, zero in zip((keys, values), held["codes"], held["scales"], held["zeros"], strict=True):
        rows = np.unpackbits(codes, axis=-1)[..., : 20 * bits].reshape(2, 2, 32, 20, bits)
        again = (rows * 2 ** np.arange(bits)[::-1]).sum(-1) * scale.astype(float) + zero
        assert (abs(again - x[:, :, :32]) <= 0.5 * scale.astype(float) + 0.02).all()  # half a step, and 16-bit rounding


@pytest.mark.parametrize("kv_dtype", KIVI)
def test_a_layer_with_a_window_packs_no_more_than_its_window(kv_dtype):
    shape, s = small_shape(2, 20, 3, window=100, windowed=1), setting(kv_dtype=kv_dtype)
    steps = [nbytes(held) for held in kivi(*random_layer(1, 2, 200, 20), BITS[kv_dtype], 32, 32)]
    for tokens in range(1, 201):
        far, near = steps[tokens - 1], steps[min(tokens, 100) - 1]
        assert cache_parts(shape, s, tokens, 1) == {name: 2 * far[name] + near[name] for name in far}


# ---------------------------------------------------------------------------------------------------------------------
# what fits, and what weighs more, found by trying every number


def scanned(holds, limit=3000):
    """The largest n of which `holds` is true for it and all below; None: for all up to the limit."""
    return next((n - 1 for n in range(1, limit) if not holds(n)), None)


@st.composite
def small_settings(draw):
    window = draw(st.sampled_from([{}, {"window": draw(st.integers(1, 170)), "windowed": draw(st.integers(1, 2))}]))
    shape = small_shape(
        draw(st.sampled_from([8, 4, 2, 1])), draw(st.sampled_from([4, 8, 20])), others=draw(st.integers(0, 40_000)), **window
    )
    s = setting(
        kv_dtype=draw(st.sampled_from([*BITS])), group=draw(st.sampled_from([1, 4, 16, 32])), tp=draw(st.sampled_from([1, 2, 4, 8])),
        residual=draw(st.sampled_from([0, 1, 5, 32, 128])), context=draw(st.integers(1, 200)), batch=draw(st.integers(1, 5)),
    )  # fmt: skip
    return shape, s


def with_memory(models, s, tokens, more):
    """The setting with room for `tokens` tokens, and `more` bytes, beside the weights of all models."""
    room = sum(cache_nbytes(model, s, tokens, 1) for model in models) + more
    return s | {"memory": max(0, sum(2 * device_params(model, s["tp"]) for model in models) + room)}


# a window of 160 tokens: 159 of them take more, since at 160 one group more is packed
PACKED_LATE = small_shape(2, 8, window=160, windowed=2), setting(kv_dtype="int2", context=100)


@settings(max_examples=300)
@given(
    pair=small_settings(), drafted=st.sampled_from([None, 0, 20, 70]), tokens=st.integers(0, 300),
    more=st.sampled_from([-9999, -1, 0, 1, 500]),
)  # fmt: skip
@example(PACKED_LATE, None, 159, -1)
@example(PACKED_LATE, 70, 159, -1)
@example((small_shape(), setting(kv_dtype="int2", context=96)), None, 95, -1)  # the 96th token packs a group
def test_no_length_up_to_the_tokens_that_fit_takes_more_than_is_free(pair, drafted, tokens, more):
    """Beside a draft without a window, or with one of so many tokens, too."""
    shape, s = pair
    s["draft"] = None if drafted is None else small_shape(1, 4, 2, window=drafted or None, windowed=drafted and 1)
    models = [model for model in (shape, s["draft"]) if model]
    s = with_memory(models, s, tokens, more)
    free = s["memory"] - sum(2 * device_params(model, s["tp"]) for model in models)
    own = costs(shape, s)

    def held(n):
        return sum(cache_nbytes(model, s, n, 1) for model in models)

    assert own["free_bytes"] == free and own["tokens_fit"] == scanned(lambda n: held(n) <= free)
    worst = max(held(n) for n in range(s["context"] + 1))  # of one conversation on its way to the context
    assert own["conversations_fit"] == scanned(lambda n: n * worst <= free)


def test_a_draft_costs_what_it_costs_alone(numbers):
    alone = numbers("shape=smollm2-135m", "context=8192")["own"]
    assert numbers("shape=llama3-8b", "draft=smollm2-135m", "context=8192")["draft"] == alone


@settings(max_examples=150)
@given(pair=small_settings(), experts=st.booleans())
def test_the_cache_leads_from_the_first_number_at_which_it_is_larger(pair, experts):
    shape, s = pair
    if experts:
        shape = shape | {"n_experts": 8, "n_active": 2, "expert_params": shape["params"] // 3}
    own, read = costs(shape, s), 2 * read_params(shape, s["tp"], s["batch"])
    assert own["weight_bytes_read"] == read and own["larger"] == ("cache" if own["cache_bytes"] > read else "weights")
    reads = (2 * read_params(shape, s["tp"], n) for n in itertools.count(1))
    for key, below in (
        ("crossover_tokens", scanned(lambda n: cache_nbytes(shape, s, n, s["batch"]) <= read, 20_000)),
        ("crossover_batch", scanned(lambda n: cache_nbytes(shape, s, s["context"], n) <= next(reads), 200_000)),
    ):
        assert own[key] == (None if below is None else below + 1), key
    assert own["floor_seconds"] == (read + own["cache_bytes"]) / 1e12


# ---------------------------------------------------------------------------------------------------------------------
# several devices, mixtures


def heads_of(device, n_kv, tp, n_head=8):
    """The KV heads that a device's share of the query heads needs."""
    return {q * n_kv // n_head for q in range(device * n_head // tp, (device + 1) * n_head // tp)}


def test_devices_share_heads_that_leave_each_of_them_as_much():
    for n_head, tp in itertools.product(range(1, 26), range(1, 26)):
        for n_kv in arithmetic.divisors(n_head):
            each = {len(heads_of(device, n_kv, tp, n_head)) for device in range(tp)}
            assert arithmetic.shards(n_head, n_kv, tp) == (n_head % tp == 0 and each == {max(1, n_kv // tp)}), (
                n_head,
                n_kv,
                tp,
            )


@pytest.mark.parametrize(
    "n_head, n_kv, compared",
    [(32, 32, [32, 8, 1]), (64, 8, [64, 8, 1]), (64, 64, [64, 8, 1]), (64, 4, [64, 4, 1]), (25, 25, [25, 5, 1]), (9, 3, [9, 3, 1]), (8, 8, [8, 2, 1]),
     (12, 1, [12, 3, 1]), (128, 64, [128, 64, 1]), (7, 7, [7, 1]), (2, 1, [2, 1]), (1, 1, [1])],
)  # fmt: skip
def test_the_dial_compares_both_ends_and_what_is_between(n_head, n_kv, compared):
    assert arithmetic.dial({"n_head": n_head, "n_kv": n_kv, "latent": None}) == compared


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_each_device_holds_the_heads_that_its_queries_need(n_kv, tp, bias):
    model = GPT(GPTConfig(n_kv=n_kv, bias=bias, n_layer=2))
    c, needed = model.config, [heads_of(device, n_kv, tp) for device in range(tp)]
    assert {len(heads) for heads in needed} == {heads_per_device(n_kv, tp)} == {max(1, n_kv // tp)}
    # weights: those of the KV heads once for each device that needs them, all others once
    one = sum(p[c.n_embd :].numel() // n_kv for n, p in model.named_parameters() if ".c_attn." in n)
    held = model.n_params() + sum(map(len, needed)) * one - n_kv * one
    shape = find_shape("shape", "nanogqa") | {"n_layer": 2, "n_kv": n_kv, "params": model.n_params(), "qkv_bias": bias}
    assert held <= tp * device_params(shape, tp) < held + tp  # each device's share is rounded up
    # cache
    cache = DenseCache(2, len(needed[0]), c.head_dim, 40, 3, torch.float16)
    assert cache_nbytes(shape, setting(tp=tp), 40, 3) == cache.capacity_nbytes()


def test_on_eight_devices_one_kv_head_saves_nothing_over_eight(numbers):
    answer = numbers("shape=llama2-70b", "tp=8")
    assert answer["parallel"] == numbers("shape=llama2-70b", "tp=1")["parallel"]
    each = {row["n_kv"]: {d["tp"]: d["each"] for d in row["devices"]} for row in answer["parallel"]}
    assert each[8] == {tp: 4096 * 327_680 // tp for tp in (1, 2, 4, 8)}
    assert set(each[1].values()) == {each[8][8]} and each[64][8] == 8 * each[8][8]
    rows = {row["n_kv"]: row for row in answer["heads"]}
    assert rows[1]["cache_bytes"] == rows[8]["cache_bytes"] == answer["own"]["cache_bytes"]
    assert rows[1]["cache_bytes_all_devices"] == 8 * each[1][1]
    assert rows[1]["weight_bytes"] == rows[8]["weight_bytes"]  # one head's projections on each device, either way


def test_a_mixture_reads_the_experts_that_its_tokens_choose():
    shape = small_shape(others=9_000_000, unread=1000, n_experts=4, n_active=2, expert_params=8_000_000)
    for batch in (1, 2, 3):  # every way in which the tokens can choose
        ways = itertools.product(itertools.combinations(range(4), 2), repeat=batch)
        chosen = [len(set().union(*way)) for way in ways]
        read = shape["params"] - 1000 - 8_000_000 + 2_000_000 * sum(chosen) / len(chosen)
        assert abs(read_params(shape, 1, batch) - read) < 1
    assert read_params(shape, 1, 10_000) == shape["params"] - 1000
    s = setting(compute=1e30)  # a prompt of 3 tokens is read like a batch of 3
    assert prefill_seconds(shape, s, 3, 5) == (2 * read_params(shape, 1, 3) + cache_nbytes(shape, s, 8, 1)) / 1e12
    v3 = find_shape("shape", "deepseek-v3")
    few, shared = v3["expert_params"] * 8 // 256, v3["params"] - v3["unread"] - v3["expert_params"]
    reads = [read_params(v3, 1, batch) for batch in range(1, 2000)]
    assert abs(reads[0] - shared - few) <= 1 and reads == sorted(reads) and reads[-1] == shared + v3["expert_params"]


# ---------------------------------------------------------------------------------------------------------------------
# robot


def control_step(history, reused, bandwidth=1e12, compute=150e12, devices=1):
    """A control step of OpenVLA: 32 layers of 32 heads of 128, 2 cameras of 256 tokens, 7 action tokens, 16 bits."""
    weights, token = 6_607_605_760 / devices, 2 * 32 * 32 * 128 * 2 / devices  # read: no embedding, no vision towers
    before, images = 32 + (history - 1) * (2 * 256 + 7), 2 * 256
    past, new = (before, images) if reused else (0, before + images)
    pairs = sum(past + i + 1 for i in range(new))  # of a new token and one that it sees
    head = (32_064 + 1) * 4096 / devices  # and the norm before it: only the last token needs them
    operations = 2 * (weights - head) * new + 2 * head + 32 * 32 * 4 * 128 * pairs / devices
    t = max((2 * weights + (past + new) * token) / bandwidth, operations / compute)
    return t + sum((2 * weights + (past + new + i) * token) / bandwidth for i in range(1, 7))


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 60))
def test_a_token_meets_those_in_its_window(new, past, window):
    assert arithmetic.pairs(new, past, window) == sum(min(past + i + 1, window) for i in range(new))


def longest_history(period, reused, **machine):
    return scanned(lambda n: control_step(n, reused, **machine) <= period)


@pytest.mark.parametrize(
    "args, history, period, machine",
    [
        ("", 1, 0.2, {}),
        ("robot.history=4 robot.rate=10Hz", 4, 0.1, {}),
        ("robot.history=9 robot.rate=2Hz memory=80GiB bandwidth=3350GB/s compute=990TFLOP/s", 9, 0.5, {"bandwidth": 3.35e12, "compute": 990e12}),
        ("robot.history=9 robot.rate=3Hz memory=16GiB bandwidth=20GB/s compute=1PFLOP/s", 9, 1 / 3, {"bandwidth": 20e9, "compute": 1e15}),
        ("robot.rate=20Hz robot.history=2 tp=8", 2, 0.05, {"devices": 8}),
    ],
)  # fmt: skip
def test_a_control_step_is_recomputed_from_its_parts(numbers, args, history, period, machine):
    answer = numbers("budget=robot", "shape=openvla-7b", *args.split())
    r, near = answer["robot"], {"rel": 1e-9}
    assert (r["tokens_per_step"], r["context"]) == (519, 32 + history * 519)
    tp = machine.get("devices", 1)
    assert r["cache_bytes"] == 524_288 // tp * r["context"]
    free = answer["setting"]["memory"] - 15_082_474_368 // tp
    assert r["history_fits"] == scanned(lambda n: 524_288 // tp * (32 + 519 * n) <= free)
    assert r["fits"] == (history <= r["history_fits"]) and r["period_seconds"] == pytest.approx(period, **near)
    for suffix, reused in (("", False), ("_reused", True)):
        t = control_step(history, reused, **machine)
        assert r["seconds" + suffix] == pytest.approx(t, **near) and r["meets" + suffix] == (t <= period)
        assert r["history_meets" + suffix] == longest_history(period, reused, **machine)


def test_the_history_that_fits_never_takes_more_than_is_free():
    """Also on its way: a cache that packs its tokens by groups is largest just before a group is packed."""
    r = {"cameras": 1, "image_tokens": 30, "prompt_tokens": 4, "action_tokens": 2, "history": 1, "rate": 5}
    shape, s = small_shape(2, 8), setting(kv_dtype="int2")
    for room in range(60, 400, 7):
        tight = with_memory([shape], s, room, 0)
        longest = robot(shape, tight, r)["history_fits"]
        assert [robot(shape, tight, r | {"history": longest + more})["fits"] for more in (0, 1)] == [True, False]
        assert 4 + 32 * longest <= costs(shape, tight)["tokens_fit"] < 4 + 32 * (longest + 1), room


TRAIN = {"groups": 2, "tokens": 1e9, "fraction": 0.05, "utilisation": 0.5, "price": 3.0, "memory": GIB}


def trained_shape(**more):
    """A Llama of the repository, the first of whose axes is as wide as `more` says, and its shape."""
    model = GPT(GPTConfig(dialect="llama", n_embd=256, n_layer=2, vocab_size=512, block_size=128, bias=False, **more))
    outside = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("h."))
    unread = 0 if model.config.tie_weights else model.wte.weight.numel()
    values = {"name": "small", "n_layer": 2, "n_head": 8, "n_kv": model.config.n_kv, "head_dim": 32, "n_embd": 256}
    return model, asdict(Shape(**values, context=128, params=model.n_params(), outside=outside, unread=unread))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n_kv", SHAPES)
def test_a_training_step_multiplies_and_keeps_what_is_counted(n_kv, tied):
    model, shape = trained_shape(n_kv=n_kv, tie_weights=tied)
    idx, kept = torch.randint(512, (2, 128)), {}
    own = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *model.buffers()]}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()  # held, so that no other takes its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", dtype=torch.bfloat16):
        model(idx, idx)
    nbytes = sum(x.nbytes() for at, x in kept.items() if at not in own)
    parts = arithmetic.training_parts(shape, setting(context=128, batch=2))
    passing = 2 * 128 * 4 * 512  # float32 logits and their gradient: never saved both, but both there
    assert abs(parts["bfloat16"] + parts["activations"] - passing - nbytes) < 0.01 * nbytes
    assert parts["weights"] == parts["gradients"] == parts["AdamW"] // 2 == 4 * model.n_params()

    with FlopCounterMode(display=False) as flops:
        model(idx, idx)[1].backward()
    products = sum(n for op, n in flops.get_flop_counts()["Global"].items() if "mm" in str(op))
    counted = arithmetic.uptraining(shape, setting(context=128, batch=2), TRAIN | {"groups": n_kv, "fraction": 256 / 1e9})
    assert counted["tokens"] == 256
    assert abs(counted["operations"] * (1 - counted["attention"]) - products) < 0.002 * products  # norms multiply too, a little


def test_the_conversion_of_a_billion_parameters_by_hand(numbers):
    args = "budget=train shape=tinyllama-1.1b train.groups=2 batch=8 memory=80GiB compute=312TFLOP/s train.memory=16GiB"
    found = numbers(*args.split())["train"]
    weights = 1_100_048_384 - 65_536_000 - 22 * 2 * 2048 * 2 * 64  # the table is looked up, two key and value heads are gone
    attention = 22 * 3 * 2 * 2 * 2048 * (2048 + 1) / 2  # three passes of two products, each over half of all pairs
    assert found["tokens"] == 150e9
    assert found["operations"] == pytest.approx(150e9 * (6 * weights + attention))
    assert found["seconds"] == pytest.approx(found["operations"] / (0.4 * 312e12))
    assert found["dollars"] == pytest.approx(found["seconds"] / 3600 * 2)
    assert found["steps"] == pytest.approx(150e9 / (8 * 2048))
    assert [row["n_kv"] for row in found["held"]] == [4, 2, 1]
    for row in found["held"]:
        each = 2 * 22 * row["n_kv"] * 64 * 2
        assert row["bytes_per_token"] == each and row["tokens_held"] == 16 * GIB // each
        assert row["sequences_held"] == 16 * GIB // (2048 * each)
    assert found["fits"] and found["memory"] == sum(found["parts"].values()) < 80 * GIB


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_a_reader_that_has_seen_enough_ends_the_script_without_a_word(args):
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    ended = subprocess.run([sys.executable, ROOT / "budget.py", *args], env=env, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize(
    "given, words",
    [
        ("memory=20GiB batch=8", "does not fit: a smaller batch= needs less"),
        ("memory=20GiB batch=1 context=200000", "does not fit: shorter sequences (context=) need less"),
        ("memory=1GiB batch=1", "does not fit, whatever the batch"),
        ("memory=80GiB batch=8", ": fits"),
    ],
)
def test_training_that_does_not_fit_is_told_what_would_help(call, given, words):
    code, out, err = call("budget", "budget=train", "shape=tinyllama-1.1b", "train.groups=2", *given.split())
    assert code == 0 and words in out, err
