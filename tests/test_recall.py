"""Associative recall: what a sequence promises, and runs on it like on any other data."""

import json
import re

import pytest
import torch
from conftest import rows
from reference import SHAPES, small_model
from torch.nn import functional as F

import training
from data.recall import task as recall
from data.recall.task import CURRICULUM, DISTANCES, KEYS, MAX_PAIRS, VOCAB_SIZE, batch, examples
from model import rng
from storage import load_checkpoint
from stream import load_data, recall_loss

# the recall preset, shrunk: 2 layers of width 32, 64 tokens of context, a step or two in each stage of the curriculum
SMALL = (
    "data=recall", "preset=recall", "sweep=t", "name=r", "wandb=disabled", "threads=1", "model.n_embd=32",
    "model.block_size=64", "train.steps=12", "train.warmup_steps=2", "train.eval_interval=6", "train.save_interval=4",
    "train.log_interval=2", "train.dtype=float32",
)  # fmt: skip
STAGES = [(i, length) for i, (_, length, _, _) in zip([0, *(until for until, *_ in CURRICULUM)], CURRICULUM, strict=False)]


def pair_before(sequence, query):
    """Where the key at `query` occurs before it: exactly once, followed by its value."""
    at = (sequence[:query] == sequence[query]).nonzero().flatten().tolist()
    assert len(at) == 1, f"the key at {query} occurs at {at}"
    assert sequence[query] < KEYS <= sequence[at[0] + 1]
    return at[0]


@pytest.fixture
def short(monkeypatch):
    """The curriculum in 7 steps."""
    stages = tuple((i + 1, *stage[1:]) for i, stage in enumerate(CURRICULUM))
    monkeypatch.setattr(recall, "CURRICULUM", stages)


# ---------------------------------------------------------------------------------------------------------------------
# sequences


def test_expected_facts():
    assert VOCAB_SIZE == KEYS + recall.VALUES == 128 and recall.CHANCE == 1 / 64
    tokens, answers, distances = examples(1024, 4)
    assert tokens.shape == (4 * len(DISTANCES), 1024) and answers.shape == distances.shape == (4 * len(DISTANCES),)
    assert tokens.dtype == answers.dtype == torch.int64
    assert distances.tolist() == [d for d in DISTANCES for _ in range(4)]
    assert (tokens[:, -1] < KEYS).all() and (answers >= KEYS).all() and max(tokens.max(), answers.max()) < VOCAB_SIZE
    assert ((tokens < KEYS).sum(dim=1) == MAX_PAIRS + 1).all()  # dozens of pairs and one query, all the rest is values


@pytest.mark.parametrize("length", [17, 64, 255, 1024])
def test_each_query_asks_for_the_one_pair_at_its_distance(length):
    far = length - 1, length - 2
    for sequence, answer, distance in zip(*examples(length, 8, (3, 4, 7, 16, *far)), strict=True):
        at = pair_before(sequence, length - 1)
        assert at == length - 1 - distance and sequence[at + 1] == answer
        for pair in (sequence[:-1] < KEYS).nonzero().flatten().tolist():
            assert sequence[pair + 1] >= KEYS and (sequence[:-1] == sequence[pair]).sum() == 1  # whole, and no key twice


def test_examples_are_fixed_and_another_seed_has_others():
    one, same, other = examples(128, 3), examples(128, 3), examples(128, 3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0]) and torch.equal(one[2], other[2])


def test_without_the_key_an_answer_is_any_value():
    answers = examples(64, 4000, (16, 32))[1]
    counts = torch.bincount(answers - KEYS, minlength=64)
    assert counts.min() > 80 and counts.max() < 175  # 125 expected, each within 5 standard deviations


@pytest.mark.parametrize("distances", [(2,), (64,), ()])
def test_distances_without_room_for_a_pair_are_refused(distances):
    with pytest.raises(ValueError, match="length=64"):
        examples(64, 1, distances)


@pytest.mark.parametrize("block_size", [32, 1024])
@pytest.mark.parametrize("iteration", [0, 100, 250, 350, 400, 450, 500, 550, 551])
def test_a_batch_asks_only_for_what_came_before(iteration, block_size):
    idx, targets = batch(rng(1, "data", iteration), iteration, 1024, block_size)
    assert idx.shape == targets.shape and idx.size(1) <= block_size and idx.numel() <= 1024
    asked = 0
    for sequence, target in zip(idx[:8], targets[:8], strict=True):
        for at in (target >= 0).nonzero().flatten().tolist():
            if sequence[at] < KEYS:  # a query
                assert sequence[pair_before(sequence, at) + 1] == target[at]
                asked += 1
            else:  # a pair's value knows its key
                assert target[at] == sequence[at - 1] < KEYS and iteration >= 100
    assert asked and (targets[:, -1] >= KEYS).all()


def test_the_curriculum_grows_to_the_models_context():
    lengths = [batch(rng(1, "data", i), i, 1024, 1024)[0].size(1) for i, _ in STAGES]
    assert lengths == [length for _, length in STAGES] == sorted(lengths)
    assert [batch(rng(1, "data", i), i, 1024, 1024)[0].shape for i in (550, 551)] == [(1, 1024), (2, 512)]


def test_a_batch_depends_on_seed_and_iteration_alone():
    data = load_data("recall", None, 64)
    one = data.batch(1, 64, 1, 7)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(one, data.batch(1, 64, 1, 7), strict=True))
    assert not torch.equal(one[0], data.batch(1, 64, 1, 8)[0]) and not torch.equal(one[0], data.batch(1, 64, 2, 7)[0])


# ---------------------------------------------------------------------------------------------------------------------
# runs


def test_loss_and_accuracy_are_those_of_the_answers():
    model = small_model(vocab_size=VOCAB_SIZE, block_size=64).train()
    tokens, answers, _ = examples(64, 100, (16, 40))
    answers[::3] = model(tokens)[0][::3, -1].argmax(dim=1)  # some right ones
    found = recall_loss(model, tokens, answers)
    assert model.training
    with torch.no_grad():
        logits = model(tokens)[0][:, -1].double()
    assert found["val/loss"] == pytest.approx(F.cross_entropy(logits, answers).item(), abs=1e-5)
    assert found["val/accuracy"] == (logits.argmax(dim=1) == answers).double().mean().item() >= 1 / 3


def test_targets_of_minus_one_are_no_loss():
    model = small_model(vocab_size=VOCAB_SIZE, block_size=64)
    idx, targets = batch(rng(1, "data", 300), 300, 256, 64)
    logits, loss = model(idx, targets)
    asked = targets >= 0
    assert 0 < asked.sum() < asked.numel()
    assert loss.item() == pytest.approx(F.cross_entropy(logits[asked], targets[asked]).item(), abs=1e-5)


def test_every_n_kv_sees_the_same_batches(call, monkeypatch, short):
    seen, make = [], recall.batch
    monkeypatch.setattr(recall, "batch", lambda *args: seen.append(make(*args)) or seen[-1])
    arms = []
    for n_kv in SHAPES:
        seen.clear()
        assert call("train", *SMALL, f"name=kv{n_kv}", f"model.n_kv={n_kv}")[0] == 0
        arms.append(list(seen))
    for arm in arms:
        assert len(arm) == 12
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(arm, arms[0], strict=True))


def test_a_run_is_logged_and_kept_like_any_other(call, cwd, short):
    code, out, err = call("train", *SMALL, "model.n_kv=2")
    assert (code, err) == (0, "") and "accuracy" in out
    folder = cwd / "runs/t/r"
    found = [row for row in rows(folder) if "val/loss" in row]
    assert [row["step"] for row in found] == [6, 12] and all(0 <= row["val/accuracy"] <= 1 for row in found)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["val_loss_final"], summary["val_accuracy_final"]) == (found[-1]["val/loss"], found[-1]["val/accuracy"])
    last = load_checkpoint(folder / "last.pt")
    assert last["tokenizer"] == {"kind": "recall", "keys": 64, "values": 64}
    assert last["data"] == load_data("recall", None, 64).identity and last["data"]["dataset"] == "recall"
    code, out, _ = call("train", *SMALL, "model.n_kv=2")
    assert code == 0 and "skipped" in out


@pytest.mark.parametrize("stop", [3, 6, 11])
def test_interrupted_and_resumed_is_uninterrupted_to_the_bit(call, cwd, monkeypatch, short, stop):
    make = recall.batch
    monkeypatch.setattr(recall, "batch", lambda *args: 1 / 0 if args[1] == stop else make(*args))
    with pytest.raises(ZeroDivisionError):
        call("train", *SMALL)
    monkeypatch.setattr(recall, "batch", make)
    torch.manual_seed(99)
    assert call("train", *SMALL)[0] == 0
    (cwd / "runs/t/r").rename(cwd / "resumed")
    assert call("train", *SMALL)[0] == 0
    assert rows(cwd / "resumed") == rows(cwd / "runs/t/r")
    one, other = (load_checkpoint(folder / "last.pt") for folder in (cwd / "resumed", cwd / "runs/t/r"))
    assert all(torch.equal(one["model"][name], p) for name, p in other["model"].items()) and one["val"] == other["val"]


def test_what_makes_no_sense_is_one_line(call, cwd):
    assert call("train", *SMALL, "train.steps=0")[0] == 0
    ckpt = f"ckpt={cwd}/runs/t/r/last.pt"
    for script, *args in [
        ("sample", ckpt),
        ("eval", ckpt, "wandb=disabled"),
        ("train", *SMALL, "data.source=input.txt"),
        ("train", *SMALL, "model.block_size=16"),
    ]:
        code, out, err = call(script, *args)
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, (script, args, err)
    code, out, err = call("sample", ckpt, "prompt=k3 v19 k3", "tokens=2")
    assert code == 0 and re.fullmatch(r"k3 v19 k3( [kv]\d+){2}\n", out), out
    assert sorted(path.name for path in (cwd / "runs/t").iterdir()) == ["r"]


def test_an_unknown_data_set_is_refused_with_all_there_are():
    with pytest.raises(training.InputError, match="recall, shakespeare_bpe, shakespeare_char"):
        load_data("recal")
