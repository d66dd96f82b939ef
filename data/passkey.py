"""
Passkey retrieval (arXiv 2305.16300): a five-digit key hidden in text that is about nothing, to be said at the end.

    ids, key = passkey_prompt(tokenizer, length=2048, depth=0.5, seed=3)
    # `key` is a str of five digits, ids end where they are due
    tokenizer.decode(five greedy tokens after ids) == key        # retrieved

What a cache forgets or blurs shows here when the loss, an average over all tokens, has hardly moved.
"""

import random

from cli import InputError

# Sentences are drawn from these, 12 * 12 * 12 of them, without a digit: only the key and its repetition are numbers
WHO = (
    "The baker", "An old sailor", "The postman", "My neighbour", "A young painter", "The gardener",
    "Her cousin", "The miller", "A quiet child", "The tailor", "One of the guests", "The shepherd",
)  # fmt: skip
DID = (
    "swept the floor", "watched the clouds", "mended a fence", "carried a basket of apples", "told a long story",
    "lit a small fire", "read the newspaper", "fed the chickens", "forgot a hat", "sang an old song", "painted a door",
    "looked for the cat",
)  # fmt: skip
WHERE = (
    "by the river", "in the market", "before the rain came", "behind the church", "on the way home", "near the mill",
    "while the others slept", "in the early morning", "under the chestnut tree", "at the end of the lane",
    "after the harvest", "beside the well",
)  # fmt: skip

BEFORE = "There is a pass key hidden in the text below. Find it and remember it.\n\n"
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "\n\nWhat is the pass key? The pass key is "  # digits never take the space before them: it is a token of its own


def passkey_prompt(tokenizer, length, depth, seed):
    """
    (ids, key): a prompt of exactly `length` tokens, and the five digits that continue it, as a str.

    tokenizer  one whose digits are a token each and which keeps words apart, as SmolLMTokenizer
    depth      where in the text the key is told: 0 right after the instruction, 1 right before the question. It lies
               between two sentences, so this is met to within half a sentence, some 6 tokens
    seed       draws the key and the sentences; the same at every length and depth: a longer text begins as a shorter one
    InputError for a length without room for a sentence of text, or a depth outside [0, 1].
    """
    if not 0 <= depth <= 1:
        raise InputError(f"depth={depth} is not allowed: 0 (the beginning) to 1 (the end)")
    draw = random.Random(f"passkey/{seed}")
    key = "".join(draw.choices("0123456789", k=5))
    before, needle, question = (tokenizer.encode(part.format(key=key)) for part in (BEFORE, NEEDLE, QUESTION))
    fixed = len(before) + len(needle) + len(question)
    room = length - fixed
    if room < 20:
        raise InputError(f"length={length} is too short for a pass key in a text: {fixed + 20} tokens or more")
    text, ends = [], [0]  # the tokens of the sentences, and where between them the key may go
    while len(text) < room:
        text += tokenizer.encode(f" {draw.choice(WHO)} {draw.choice(DID)} {draw.choice(WHERE)}.")
        ends.append(len(text))
    text, ends = text[:room], [*ends[:-1], room]  # the last sentence breaks off where the length is reached
    at = min(ends, key=lambda end: abs(end - depth * room))
    return before + text[:at] + needle + text[at:] + question, key
