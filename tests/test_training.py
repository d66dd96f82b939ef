"""Data order, evaluation, resuming and run folders: paired, exact, never half-written."""

import json
import math
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, make_text, move_to, rows, run_main
from hypothesis import given
from hypothesis import strategies as st
from reference import SHAPES, small_model, tokens

import stream
import training
from storage import load_checkpoint
from stream import evaluate, get_batch
from training import lr_at, pick_dtype


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def equal(a, b):
    """Whether two nested states hold the same bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def same_end(one, other):
    """Two finished runs: the same numbers at the same steps, and last.pt the same to the bit."""
    assert rows(one) == rows(other)
    one, other = load_checkpoint(one / "last.pt"), load_checkpoint(other / "last.pt")
    for key in ("model", "optimizer", "iteration", "total_iterations", "val_loss", "best_val_loss"):
        assert equal(one[key], other[key]), key


# ---------------------------------------------------------------------------------------------------------------------
# data order


def test_a_batch_depends_on_seed_and_iteration_alone():
    data = np.arange(500, dtype=np.uint16)
    x, y = get_batch(data, 4, 16, seed=1, iteration=7)
    torch.manual_seed(3)
    assert torch.equal(get_batch(data, 4, 16, 1, 7)[0], x)
    assert not torch.equal(get_batch(data, 4, 16, 1, 8)[0], x)
    assert not torch.equal(get_batch(data, 4, 16, 2, 7)[0], x)
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (4, 16)
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(16))  # whole windows, targets one further


def test_every_window_of_the_text_is_drawn_the_first_and_the_last_too():
    data = np.arange(20, dtype=np.uint16)
    starts = torch.cat([get_batch(data, 50, 16, 1, i)[0][:, 0] for i in range(8)])
    counts = torch.bincount(starts)
    assert len(counts) == 4 and counts.min() > 60  # 4 windows of 17 tokens fit into 20


def test_every_n_kv_sees_the_same_batches_in_the_same_order(call, monkeypatch):
    seen = []
    monkeypatch.setattr(stream, "get_batch", lambda *args: seen.append(get_batch(*args)) or seen[-1])
    arms = []
    for n_kv in SHAPES:
        seen.clear()
        assert call("train", *TINY, f"model.n_kv={n_kv}", "train.steps=6")[0] == 0
        arms.append(list(seen))
    for arm in arms:
        assert len(arm) == 6
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(arm, arms[0], strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# evaluation, learning rate, dtype


@given(n=st.integers(2, 100), batch_size=st.integers(1, 5), n_kv=st.sampled_from(SHAPES))
def test_the_loss_is_one_pass_over_the_whole_split_in_windows(n, batch_size, n_kv):
    model = small_model(n_kv, block_size=16)
    split = np.asarray(tokens(1, n)[0], dtype=np.uint16)
    total, predicted = 0.0, []
    for start in range(0, n - 1, 16):
        window = torch.from_numpy(split[start : start + 17].astype(np.int64))
        with torch.no_grad():
            logits = model(window[None, :-1])[0][0].double()
        for i, target in enumerate(window[1:].tolist()):
            total -= torch.log_softmax(logits[i], 0)[target].item()
            predicted.append(start + i + 1)
    assert predicted == list(range(1, n))  # each but the first, once
    assert abs(evaluate(model, split, batch_size) - total / (n - 1)) < 1e-5


def test_evaluation_switches_dropout_off_and_the_mode_back():
    model = small_model(dropout=0.5).train()
    split = np.asarray(tokens(1, 60)[0], dtype=np.uint16)
    assert evaluate(model, split) == evaluate(model, split) == evaluate(model.eval(), split)
    assert not model.training and evaluate(model.train(), split) and model.training


def test_the_learning_rate_warms_up_and_follows_a_cosine():
    cfg = SimpleNamespace(lr=2e-3, min_lr=1e-4, warmup_steps=10, steps=110)
    assert [lr_at(i, cfg) for i in (0, 4, 9)] == pytest.approx([2e-4, 1e-3, 2e-3])
    for i in range(10, 111):
        assert lr_at(i, cfg) == pytest.approx(1e-4 + 1.9e-3 * math.cos(math.pi * (i - 10) / 200) ** 2)
    assert lr_at(110, cfg) == pytest.approx(1e-4)
    flat = SimpleNamespace(lr=1e-3, min_lr=0.0, warmup_steps=0, steps=0)
    assert lr_at(0, flat) == 1e-3  # no division by zero


@pytest.mark.parametrize("warmup", [5, 6, 50])
def test_a_warm_up_longer_than_the_run_only_warms_up(warmup):
    cfg = SimpleNamespace(lr=1e-3, min_lr=0.0, warmup_steps=warmup, steps=5)
    assert [lr_at(i, cfg) for i in range(5)] == pytest.approx([1e-3 * (i + 1) / warmup for i in range(5)])


def test_auto_never_asks_a_missing_gpu_for_its_dtype(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: pytest.fail("asked CUDA on a CPU"))
    for dtype in ("auto", "float32", "bfloat16"):
        chosen, why = pick_dtype(dtype, torch.device("cpu"))
        assert chosen in ("float32", "bfloat16") and dtype in ("auto", chosen)
        assert "float32" in why and "\n" not in why


def test_bfloat16_trains_on_a_cpu_and_keeps_float32_weights(call, cwd):
    code, out, err = call("train", *TINY, "device=cpu", "train.dtype=bfloat16", "model.n_kv=2")
    assert code == 0 and "bfloat16" in out
    weights = load_checkpoint(cwd / "runs/t/kv2-s1/last.pt")["model"]
    assert {p.dtype for p in weights.values()} == {torch.float32}
    assert json.loads((cwd / "runs/t/kv2-s1/summary.json").read_text())["dtype"] == "bfloat16"
    losses = [row["val/loss"] for row in rows(cwd / "runs/t/kv2-s1") if "val/loss" in row]
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------------------------------------------------------
# interrupted + resumed = uninterrupted


class Killed(BaseException):
    pass


RUN = (*TINY, "model.n_kv=2", "model.dropout=0.2", "name=r")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """RUN, in one go."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        move_to(folder, patch)
        assert run_main("train", *RUN) == 0
    return folder / "runs/t/r"


# evaluated at 10 and 20, saved at every 4th step too, logged at every 2nd: before, at and after each of them
@pytest.mark.parametrize("stops", [[0], [3], [4], [10], [11], [19], [4, 4, 10, 10, 12]], ids=str)
def test_interrupted_and_resumed_is_uninterrupted_to_the_bit(call, cwd, monkeypatch, whole, stops):
    done = []
    for stop in stops:

        def batch(tokens, batch_size, block_size, seed, iteration, device, stop=stop):
            if iteration == stop:
                raise Killed
            done.append(iteration)
            return get_batch(tokens, batch_size, block_size, seed, iteration, device)

        monkeypatch.setattr(stream, "get_batch", batch)
        with pytest.raises(Killed):
            call("train", *RUN)
    monkeypatch.setattr(stream, "get_batch", get_batch)
    torch.manual_seed(99)
    assert call("train", *RUN)[0] == 0
    assert set(done) == set(range(max(stops)))
    if len(stops) > 1:
        assert len(done) < 4 + 4 + 10 + 10 + 12  # it went on and did not begin again
    same_end(cwd / "runs/t/r", whole)


def test_stopped_after_the_last_step_only_the_summary_is_made_up_for(call, cwd, monkeypatch, whole):
    assert call("train", *RUN)[0] == 0
    (cwd / "runs/t/r/summary.json").unlink()
    monkeypatch.setattr(stream, "get_batch", lambda *args: pytest.fail("trained on"))
    assert call("train", *RUN)[0] == 0
    same_end(cwd / "runs/t/r", whole)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (cwd / "runs/t/r", whole)]
    for key in ("val_loss_final", "val_loss_best", "steps", "n_kv", "seed", "n_params"):
        assert summaries[0][key] == summaries[1][key]


def test_a_process_killed_at_any_time_is_resumed_to_the_bit(spawn, call, cwd):
    args = [*RUN, "train.steps=120", "train.eval_interval=20"]
    process = spawn("train", *args, f"data.source={cwd}/input.txt")
    metrics = cwd / "runs/t/r/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 20):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, out + err
    assert load_checkpoint(cwd / "runs/t/r/last.pt")["iteration"] < 120
    assert call("train", *args)[0] == 0
    (cwd / "runs/t/r").rename(cwd / "killed")
    assert call("train", *args)[0] == 0
    same_end(cwd / "killed", cwd / "runs/t/r")


def test_a_resumed_run_keeps_the_dtype_that_auto_chose_first(call, cwd, monkeypatch):
    args = [*TINY[:-1], "train.dtype=auto", "train.steps=8"]

    def slow(dtype):
        def mm(a, b):
            time.sleep(0.002 * (a.dtype == dtype))
            return a  # no product: its own speed is not the question

        return mm

    monkeypatch.setattr(training, "pick_dtype", pick_dtype)
    monkeypatch.setattr(torch, "mm", slow(torch.float32))  # bfloat16 is faster, on the first day
    monkeypatch.setattr(stream, "get_batch", lambda *args: 1 / 0 if args[4] == 5 else get_batch(*args))
    with pytest.raises(ZeroDivisionError):
        call("train", *args)
    monkeypatch.setattr(torch, "mm", slow(torch.bfloat16))
    monkeypatch.setattr(stream, "get_batch", get_batch)
    assert call("train", *args)[0] == 0
    assert json.loads((cwd / "runs/t/kv8-s1/summary.json").read_text())["dtype"] == "bfloat16"


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(call, cwd):
    for sweep, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert call("train", *TINY, f"sweep={sweep}", f"seed={seed}", "name=r", "train.steps=6")[0] == 0
    a, b, c = (rows(cwd / f"runs/{sweep}/r") for sweep in "abc")
    assert a == b
    assert all(x["train/loss"] != y["train/loss"] for x, y in zip(a[:-1], c[:-1], strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# run folders


def test_a_finished_run_is_skipped_and_nothing_in_it_changes(call, cwd):
    assert call("train", *TINY)[0] == 0
    before = contents(cwd / "runs")
    code, out, err = call("train", *TINY)
    assert code == 0 and "skipped" in out and err == ""
    assert contents(cwd / "runs") == before


@pytest.mark.parametrize("changed", ["train.lr=1e-2", "model.n_layer=3", "model.n_kv=2", "seed=5", "data.source=other.txt"])
def test_the_folder_of_another_config_is_refused_and_left_alone(call, cwd, changed):
    (cwd / "other.txt").write_text(make_text(3000, seed=1))
    assert call("train", *TINY, "name=r", "train.steps=2")[0] == 0
    (cwd / "runs/t/r/summary.json").unlink()  # an interrupted one is no freer
    before = contents(cwd / "runs")
    code, out, err = call("train", *TINY, "name=r", "train.steps=2", changed)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert changed.split("=")[0].removesuffix(".source") in err and "sweep=" in err
    assert contents(cwd / "runs") == before


def test_the_same_text_elsewhere_is_the_same_run(call, cwd):
    assert call("train", *TINY, "train.steps=2")[0] == 0
    (cwd / "moved").mkdir()
    (cwd / "input.txt").rename(cwd / "moved" / "input.txt")
    code, out, _ = call("train", *TINY, "train.steps=2", "data.source=moved/input.txt")
    assert code == 0 and "skipped" in out


@pytest.mark.parametrize("n, split, length", [(100, "train", 90), (2000, "val", 200)])
def test_a_text_shorter_than_the_context_is_refused_with_split_length_and_block_size(call, cwd, n, split, length):
    (cwd / "short.txt").write_text(make_text(n))
    code, out, err = call("train", *TINY, "data.source=short.txt", "model.block_size=256")
    assert code == 2 and err.count("\n") == 1
    fits = n // 10 - 1
    assert f"{split} split" in err and f" {length} " in err and "block_size=256" in err and f"block_size={fits}" in err
    assert not (cwd / "runs").exists()
    assert call("train", *TINY, "data.source=short.txt", f"model.block_size={fits}", "train.steps=2")[0] == 0


def test_no_steps_at_all_is_an_evaluation_of_the_first_weights(call, cwd):
    assert call("train", *TINY, "train.steps=0")[0] == 0
    (row,) = rows(cwd / "runs/t/kv8-s1")
    assert row["step"] == 0 and abs(row["val/loss"] - math.log(12)) < 0.05  # they know nothing


@pytest.mark.parametrize("at", [0, 5, 7, 12, 19])  # seen at the next log; saved in between; in the very last step
def test_a_loss_that_is_no_number_stops_the_run_and_spoils_no_checkpoint(call, cwd, monkeypatch, whole, at):
    clip, steps = torch.nn.utils.clip_grad_norm_, []

    def poison(parameters, *args):
        parameters = list(parameters)
        if len(steps) == at:
            for p in parameters:
                p.grad.fill_(math.nan)
        steps.append(1)
        return clip(parameters, *args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poison)
    try:
        code = call("train", *RUN)[0]
    except FloatingPointError as error:
        code = 1
        assert "nan" in str(error) and "\n" not in str(error)
    assert code, "a run with a loss of NaN ended as if it were well"
    folder = cwd / "runs/t/r"
    assert not (folder / "summary.json").exists()
    for path in folder.glob("*.pt"):
        saved = load_checkpoint(path)
        assert saved["iteration"] <= at and all(p.isfinite().all() for p in saved["model"].values())
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    assert call("train", *RUN)[0] == 0  # it was bad luck: the same command goes on
    same_end(folder, whole)


def test_where_nothing_can_be_compiled_training_goes_on_with_one_line(call, cwd, monkeypatch):
    def compile(model):
        def broken(*args):
            raise RuntimeError("no C compiler\nlong trace")

        return broken

    monkeypatch.setattr(torch, "compile", compile)
    assert call("train", *TINY, "train.steps=4", "name=plain")[0] == 0
    code, _, err = call("train", *TINY, "train.steps=4", "name=compiled", "train.compile=true")
    assert code == 0 and err.count("\n") == 1 and "no C compiler" in err and "long trace" not in err
    assert rows(cwd / "runs/t/plain") == rows(cwd / "runs/t/compiled")


def test_training_learns(call, cwd):
    losses = {}
    for n_kv in SHAPES:
        assert call("train", *TINY, f"model.n_kv={n_kv}", "train.steps=40")[0] == 0
        losses[n_kv] = json.loads((cwd / f"runs/t/kv{n_kv}-s1/summary.json").read_text())["val_loss_final"]
    ids = np.array([ord(c) for c in make_text(3000)])
    p = np.bincount(ids) / len(ids)
    entropy = -sum(x * math.log(x) for x in p[p > 0])
    assert max(losses.values()) < entropy - 0.05, (losses, entropy)  # better than the letters' frequencies


def test_clipping_at_zero_is_no_clipping(call, cwd):
    for name, clip in (("off", "0"), ("huge", "1e9")):
        assert call("train", *TINY, f"name={name}", f"train.grad_clip={clip}")[0] == 0
    off, huge = (load_checkpoint(cwd / f"runs/t/{name}/last.pt")["model"] for name in ("off", "huge"))
    assert all(torch.equal(off[name], huge[name]) for name in off)
