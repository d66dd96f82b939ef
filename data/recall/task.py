"""
Associative recall: keys are bound to values, anew in each sequence, and at its end a key asks for its value.

    filler   pair         filler       pair                          filler   queries
    v7 v52   k3 v19  v4   v31 v9 v11   k60 v2  v8  ...               v40      k60 v2  k3 v19

    idx, targets = batch(generator, iteration, n_tokens, block_size)    to train on
    tokens, answers, distances = examples(length, n)                    to measure with: one query each, at the end

Filler is drawn from the values too: what makes a value an answer is only the key before it, so a model has to look at
pairs, not at kinds of tokens. Nothing is stored; everything is a function of its generator or seed.
"""

import torch

# Expected facts
KEYS = 64  # tokens 0..63
VALUES = 64  # tokens 64..127, of which any may be bound to any key
VOCAB_SIZE = 128
CHANCE = 1 / VALUES  # accuracy of a guess without the context
MAX_PAIRS = 48  # in a sequence: dozens of wrong answers for attention that is only roughly right
DISTANCES = (16, 32, 64, 128, 256, 512, 768, 1000)  # from a pair's key to the query, in tokens

# One pair first: its value is whatever follows a key, which two layers find in some 80 steps. With two pairs from the start
# the first layer learns to guess among them, and what it leaves to the second is too little to learn from.
CURRICULUM = (  # until iteration, length, pairs, queries; then lengths up to the model's context
    (100, 8, 1, 1),
    (250, 8, 2, 1),
    (350, 16, 3, 3),
    (400, 32, 8, 8),
    (450, 64, 16, 16),
    (500, 128, 32, 32),
    (550, 256, 48, 48),
)
MAX_SEQUENCES = 64  # in a batch: more of the shortest only make each step slower


def sequences(generator, n, length, n_pairs, n_queries, distance=None):
    """
    n sequences as tokens [n, length + 1], which end with n_queries queries and their answers, and where the keys of the
    pairs are, starts [n, n_pairs]: query i asks for pair i. `distance` is that of the first query from its pair's key.
    The pairs lie in cells of two tokens, picked at random.
    """
    context = length + 1 - 2 * n_queries  # tokens before the first query
    score = torch.rand(n, (context - 1) // 2, generator=generator)  # [n, cells]
    if distance is None:
        offset = torch.randint(2, (n, 1), generator=generator)  # the cells begin at token 0 or 1
    else:
        start = context - distance
        offset = torch.full((n, 1), start % 2)
        score[:, start // 2] = -1  # comes first
    starts = offset + 2 * score.argsort(dim=1)[:, :n_pairs]  # [n, n_pairs]
    keys = torch.rand(n, KEYS, generator=generator).argsort(dim=1)[:, :n_pairs]  # [n, n_pairs], no key twice
    values = torch.randint(KEYS, VOCAB_SIZE, (n, n_pairs), generator=generator)
    tokens = torch.randint(KEYS, VOCAB_SIZE, (n, length + 1), generator=generator)  # filler
    tokens.scatter_(1, starts, keys).scatter_(1, starts + 1, values)
    tokens[:, context::2] = keys[:, :n_queries]
    tokens[:, context + 1 :: 2] = values[:, :n_queries]
    return tokens, starts


def batch(generator, iteration, n_tokens, block_size):
    """
    Inputs and targets [n, length] of one iteration, about n_tokens tokens, no longer than block_size (at least 16).
    Targets are -1, which is no loss, except at queries, where they are the answers, and at the values of pairs, where they
    are the pairs' keys: a value that knows its key is half of the way, and learned first. Of a single pair it has no need.
    """
    stages = (stage[1:] for stage in CURRICULUM if iteration < stage[0])
    length, n_pairs, n_queries = next(stages, (block_size >> iteration % 2, MAX_PAIRS, MAX_PAIRS))
    length = min(length, block_size)
    n_pairs, n_queries = min(n_pairs, length // 4), min(n_queries, length // 4)
    n = max(1, min(MAX_SEQUENCES, n_tokens // length))
    tokens, starts = sequences(generator, n, length, n_pairs, n_queries)
    targets = torch.full((n, length), -1)
    targets[:, -2 * n_queries + 1 :: 2] = tokens[:, -2 * n_queries + 1 :: 2]
    if n_pairs > 1:
        targets.scatter_(1, starts + 1, tokens.gather(1, starts))
    return tokens[:, :-1], targets


def examples(length, n, distances=DISTANCES, seed=0):
    """
    n sequences for each of the distances below `length`, the same for the same arguments: tokens [N, length], whose last is
    the one query, the answers [N] and the distances [N]. ValueError for a distance that leaves no room for its pair.
    """
    distances = [distance for distance in distances if distance < length]
    if length < 8 or not distances or min(distances) < 3:
        raise ValueError(
            f"distances={distances} do not fit length={length}: at least 3 and below the length, which is 8 or more"
        )
    generator = torch.Generator().manual_seed(seed)
    n_pairs = min(MAX_PAIRS, length // 4)
    tokens = torch.cat([sequences(generator, n, length, n_pairs, 1, distance)[0] for distance in distances])  # [N, length + 1]
    return tokens[:, :-1], tokens[:, -1], torch.tensor(distances).repeat_interleave(n)
