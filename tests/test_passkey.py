"""Passkey prompts: of the length and depth asked for, the same for a seed, and with one answer."""

import re

import pytest
from conftest import refusal
from hypothesis import given
from hypothesis import strategies as st
from test_pretrained import small_tokenizer

from data.passkey import passkey_prompt


@given(st.integers(230, 3000), st.floats(0, 1), st.integers(0, 2**32))
def test_a_prompt_has_its_length_its_depth_and_one_key(length, depth, seed):
    tokenizer = small_tokenizer()
    ids, key = passkey_prompt(tokenizer, length, depth, seed)
    text = tokenizer.decode(ids)
    assert len(ids) == length and re.fullmatch("[0-9]{5}", key)
    assert re.findall("[0-9]+", text) == [key, key] and text.endswith("The pass key is ")
    assert ids + tokenizer.encode(key) == tokenizer.encode(text + key)  # tokens as the whole text has them
    told = [part.start() for part in re.finditer(f"The pass key is {key}", text)]
    before, after = (len(tokenizer.encode(part)) for part in (text[: told[0]], text[told[0] :]))
    start, end = (
        len(tokenizer.encode("There is a pass key hidden in the text below. Find it and remember it.\n\n")),
        before + after,
    )
    assert abs(before - start - depth * (end - start)) < 90  # the needle and the question have tokens too


def test_the_ends_are_the_ends():
    tokenizer = small_tokenizer()
    (first, key), (last, same) = (passkey_prompt(tokenizer, 512, depth, 3) for depth in (0, 1))
    assert key == same
    assert f"remember it.\n\n The pass key is {key}." in tokenizer.decode(first)
    assert f"{key} is the pass key.\n\nWhat is the pass key?" in tokenizer.decode(last)
    assert sorted(first) == sorted(last)  # the same text around it


def test_a_seed_fixes_the_prompt_and_others_differ():
    tokenizer = small_tokenizer()
    assert passkey_prompt(tokenizer, 400, 0.5, 1) == passkey_prompt(tokenizer, 400, 0.5, 1)
    assert len({passkey_prompt(tokenizer, 400, 0.5, seed)[1] for seed in range(20)}) == 20
    short, long = (tokenizer.decode(passkey_prompt(tokenizer, length, 1, 1)[0]) for length in (400, 800))
    assert long.startswith(short[:600])


@pytest.mark.parametrize("depth", [-0.1, 1.5, float("nan")])
def test_a_depth_outside_the_text_is_refused(depth):
    assert f"depth={depth}" in refusal(passkey_prompt, small_tokenizer(), 512, depth, 0)


@pytest.mark.parametrize("length", [-1, 0, 40])
def test_a_length_without_room_is_refused(length):
    assert f"length={length}" in refusal(passkey_prompt, small_tokenizer(), length, 0.5, 0)
