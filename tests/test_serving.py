"""serve.py with a stub in vLLM's place: what is refused, what is measured again, and that nothing is left running."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch
from conftest import ROOT, make_text, refusal
from llama_folders import llama_folder
from test_cli import refused

import serving
from data.recall.task import examples
from served import describe, plain, recall_examples
from serving import (
    Child,
    Load,
    Server,
    environment,
    free_port,
    last_words,
    predicted_blocks,
    reported_blocks,
    sequences_at_once,
    session_members,
    why_no_fp8,
    why_not_served,
)
from storage import load_checkpoint, load_model, save_checkpoint

STUB = [sys.executable, str(ROOT / "tests" / "stub_vllm.py")]
SHAPE = {"n_layer": 6, "n_kv": 8, "head_dim": 32, "latent": None, "windowed": 0}
QUICK = (
    "wandb=disabled", "rounds=1", "concurrency=[2]", "prompt_tokens=[16]", "output_tokens=8", "requests=2", "flood=3",
    "windows=0", "memory=8MiB", "start_s=300", "device=cpu",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# arithmetic and words


@pytest.mark.parametrize("n_kv, tokens", [(8, 87_296), (2, 349_440), (1, 699_008)])
def test_a_gibibyte_holds_what_vllm_reports_of_it(n_kv, tokens):
    blocks = predicted_blocks({**SHAPE, "n_kv": n_kv}, 2**30, 128, 4)
    assert blocks * 128 == tokens
    assert predicted_blocks({**SHAPE, "n_kv": n_kv}, 2**30, 128, 1) // 4 == blocks  # FP8: four times, and less than a block


def test_whole_blocks_are_what_keeps_ratios_from_being_those_of_the_heads():
    mha, gqa = (predicted_blocks({**SHAPE, "n_kv": n}, 2**25, 128, 4) for n in (8, 2))
    assert (mha, gqa) == (21, 85) and 4 * mha <= gqa < 4 * (mha + 1)


def test_sequences_take_whole_blocks_of_all_but_one():
    assert sequences_at_once(21, 128, 128) == 20
    assert sequences_at_once(21, 128, 129) == 10
    assert sequences_at_once(1, 128, 5) == sequences_at_once(0, 128, 5) == 0


METRICS = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="128",mamba_block_size="None",engine="0",num_cpu_blocks="None",num_gpu_blocks="682",num_gpu_blocks_override="None"} 1.0
vllm:num_requests_running{engine="0"} 0.0
"""


def test_metrics_tell_blocks_and_their_size():
    assert reported_blocks(METRICS) == (682, 128)
    for broken in ("", METRICS.replace('"682"', '"None"'), METRICS.replace("vllm:cache", "vllm:cash")):
        assert "num_gpu_blocks" in refusal(reported_blocks, broken)


def test_the_last_words_are_the_error_behind_the_errors():
    log = """(EngineCore pid=1) INFO 11-30 19:42:13 [vllm.py:1703] all is well
(EngineCore pid=1) ERROR 11-30 19:50:30 [core.py:1510] RuntimeError: Worker failed with error 'no AVX-512'
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
  warnings.warn('resource_tracker: There appear to be 1 leaked'
"""
    assert last_words(log) == "RuntimeError: Worker failed with error 'no AVX-512'"
    assert last_words("one\n\ntwo words\n\n") == "two words"
    assert last_words("") == "not a word"


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 288])
def test_head_sizes_that_a_cpu_does_not_serve_are_known(head_dim):
    assert f"head_dim={head_dim}" in why_not_served({**SHAPE, "head_dim": head_dim}, "cpu")


def test_what_serves_and_what_fp8_needs(monkeypatch):
    monkeypatch.setattr(serving, "wide_vectors", lambda: True)
    assert why_not_served(SHAPE, "cpu") is None and why_no_fp8(SHAPE, "cpu") is None
    assert "32, not 48" in why_no_fp8({**SHAPE, "head_dim": 48}, "cpu")
    assert why_not_served({**SHAPE, "head_dim": 48}, "cpu") is None
    assert "latent" in why_not_served({**SHAPE, "latent": 576}, "cpu")
    assert "latent" in why_not_served({**SHAPE, "windowed": 3}, "cpu")
    monkeypatch.setattr(serving, "wide_vectors", lambda: False)
    assert "AVX-512" in why_no_fp8(SHAPE, "cpu") and why_no_fp8(SHAPE, "cuda") is None


def test_the_environment_sends_nothing_anywhere_and_does_not_move_the_cache(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    env = environment(threads=2)
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert (env["VLLM_NO_USAGE_STATS"], env["DO_NOT_TRACK"], env["HF_HUB_OFFLINE"]) == ("1", "1", "1")
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1" and env["NO_PROXY"] == "127.0.0.1"


# ---------------------------------------------------------------------------------------------------------------------
# processes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where = tmp_path_factory.mktemp("folders")
    return {n_kv: str(llama_folder(where / f"kv{n_kv}", n_kv, n_layer=2)) for n_kv in (8, 2)}


def stub_server(tmp_path, folder, behaviour=""):
    port = free_port()
    options = ["--model", folder, "--kv-cache-memory-bytes", str(2**23), "--host", "127.0.0.1", "--port", str(port)]
    command = [*STUB, "-m", "vllm", *options]
    return Server(command, port, tmp_path / "server.log", {**environment(), "STUB": behaviour})


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_a_server_answers_and_is_gone_afterwards(tmp_path, folders):
    with stub_server(tmp_path, folders[8]) as server:
        server.wait(300)
        assert reported_blocks(server.get("/metrics")) == (16, 128)
        assert session_members(server.process.pid)
    assert session_members(server.process.pid) == []


def test_one_that_ends_at_once_says_why(tmp_path, folders):
    with stub_server(tmp_path, folders[8], "starves") as server:
        said = refusal(server.wait, 300)
    assert "ValueError: too little memory, please" in said and str(server.log) in said


def test_one_that_never_serves_is_given_up(tmp_path, folders):
    with stub_server(tmp_path, folders[8], "hangs") as server:
        assert "start_s=1 s" in refusal(server.wait, 1)
    assert session_members(server.process.pid) == []


def test_one_that_does_not_listen_is_killed_with_its_children(tmp_path, folders):
    with stub_server(tmp_path, folders[8], "deaf") as server:
        server.grace = 0.5
        server.wait(300)
        assert until(lambda: len(session_members(server.process.pid)) == 2)
    assert session_members(server.process.pid) == []


def test_it_is_stopped_when_the_work_fails(tmp_path, folders):
    with pytest.raises(ZeroDivisionError), stub_server(tmp_path, folders[8]) as server:
        server.wait(300)
        1 / 0  # noqa: B018
    assert session_members(server.process.pid) == []


def test_a_benchmark_that_does_not_answer_or_dies_is_named(tmp_path, monkeypatch):
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {" ".join(STUB)} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setattr(serving, "PYTHON", path)
    arguments = ["--num-prompts", 4, "--random-input-len", 3, "--random-output-len", 2]
    with Load(tmp_path / "load.log", {**os.environ, "STUB": "crawls gasps"}) as load:
        assert load.read(300)["how"] == "a stub"
        assert "limit_s=0.5 s" in refusal(load.ask, arguments, 0.5)
        assert "MemoryError: no more of it" in refusal(load.ask, arguments, 300)
        assert "MemoryError" in refusal(load.ask, arguments, 300)
    with Load(tmp_path / "load.log", {**os.environ, "STUB": "fails"}) as load:
        load.read(300)
        assert "1 of 4 requests failed" in refusal(load.ask, arguments, 300)


def test_a_child_does_not_outlive_us_even_if_we_are_killed(tmp_path):
    parent = tmp_path / "parent.py"
    parent.write_text(
        f"import sys, time\nsys.path.insert(0, {str(ROOT)!r})\nfrom serving import Child\n"
        f"child = Child([sys.executable, '-c', 'import time; time.sleep(600)'], {str(tmp_path / 'log')!r})\n"
        "print(child.process.pid, flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, parent], stdout=subprocess.PIPE, text=True)
    session = int(process.stdout.readline())
    try:
        assert until(lambda: session_members(session))
        time.sleep(0.5)  # its tie is made as it starts
    finally:
        process.kill()
        process.communicate()
    assert until(lambda: not session_members(session))


def test_a_child_that_has_ended_can_be_stopped_too(tmp_path):
    child = Child([sys.executable, "-c", "print('bye')"], tmp_path / "log")
    assert until(lambda: child.process.poll() is not None)
    child.stop()
    child.stop()
    assert child.last_words() == "bye"


# ---------------------------------------------------------------------------------------------------------------------
# the script


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """serve.py's vLLM is the stub, misbehaving as stub("…") says."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {" ".join(STUB)} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setattr(serving, "PYTHON", path)
    monkeypatch.setattr(serving, "wide_vectors", lambda: False)
    monkeypatch.setattr(serving.Child, "grace", 1.0)
    return lambda behaviour: monkeypatch.setenv("STUB", behaviour)


def pair(folders):
    return f"ckpt={folders[8]}", f"ckpt2={folders[2]}"


def test_both_models_are_measured_in_turns_and_their_servers_are_gone(call, cwd, stub, folders):
    code, out, err = call("serve", *pair(folders), *QUICK, "rounds=2")
    assert (code, err) == (0, ""), err
    rows = pd.read_csv(cwd / "results" / "serve.csv")
    assert list(rows.model) == ["kv8", "kv2", "kv2", "kv8"] * 2 and list(rows.kind) == ["load"] * 4 + ["flood"] * 4
    assert set(rows[rows.model == "kv8"].capacity_tokens) == {16 * 128}
    assert set(rows[rows.model == "kv2"].capacity_tokens) == {64 * 128}
    assert (rows.capacity_tokens == rows.predicted_tokens).all()
    assert set(rows[rows.kind == "load"].requests) == {4} and set(rows[rows.kind == "flood"].requests) == {3}
    assert set(rows.itl_ms_p99) == {990.0} and set(rows.ttft_ms_p50) == {500.0}
    assert "no FP8 cache here" in out and "4.000x" in out and "kv2, GQA-2" in out
    folder = cwd / "runs" / "serve" / "serve-kv8-kv2"
    assert json.loads((folder / "summary.json").read_text())["capacity/auto/kv2"] == 8192
    assert {p.name for p in folder.glob("*.log")} == {"kv8-auto.log", "kv2-auto.log", "load.log"}


def test_what_was_measured_is_not_measured_again(call, cwd, stub, folders):
    assert call("serve", *pair(folders), *QUICK)[0] == 0
    before = pd.read_csv(cwd / "results" / "serve.csv")
    stub("starves")  # a server would fail
    code, out, err = call("serve", *pair(folders), *QUICK)
    assert (code, err) == (0, "") and "measured before" in out and "kv2, GQA-2" in out
    assert pd.read_csv(cwd / "results" / "serve.csv").equals(before)
    code, out, err = call("serve", *pair(folders), *QUICK, "again=true")
    refused((code, "", err), "too little memory")


def test_an_interrupted_run_goes_on_with_the_next_measurement(call, cwd, stub, folders):
    stub("gasps")  # at requests=4: the first load of the second concurrency
    load = ["requests=2", "concurrency=[1,2]"]
    code, out, err = call("serve", *pair(folders), *QUICK, *load)
    assert code == 2 and "MemoryError: no more of it" in err and err.count("\n") == 1
    metrics = cwd / "runs" / "serve" / "serve-kv8-kv2" / "metrics.jsonl"
    first = metrics.read_text()
    assert len(first.splitlines()) == 2 and not (cwd / "results").exists()
    stub("")
    code, out, err = call("serve", *pair(folders), *QUICK, *load)
    assert code == 0 and "4 of 6 measurements to go" in out
    assert metrics.read_text().startswith(first) and len(metrics.read_text().splitlines()) == 6


def test_other_weights_or_another_load_are_another_run(call, cwd, stub, folders):
    assert call("serve", *pair(folders), *QUICK)[0] == 0
    assert "output_tokens=8" in call("serve", *pair(folders), *QUICK, "output_tokens=9")[2]


def test_runs_stand_beside_each_other_in_the_results(call, cwd, stub, folders):
    assert call("serve", *pair(folders), *QUICK)[0] == 0
    assert call("serve", f"ckpt={folders[2]}", *QUICK)[0] == 0
    assert call("serve", *pair(folders), *QUICK, "again=true")[0] == 0
    rows = pd.read_csv(cwd / "results" / "serve.csv")
    assert rows.groupby("run").size().to_dict() == {"serve/serve-kv8-kv2": 4, "serve/serve-kv2": 2}


def test_the_loss_is_that_of_the_same_tokens(call, cwd, stub, folders):
    (cwd / "text.txt").write_text(make_text(4000))
    code, out, err = call("serve", *pair(folders), *QUICK, "windows=3", "window=20", "source=text.txt")
    assert (code, err) == (0, ""), err
    rows = pd.read_csv(cwd / "results" / "serve.csv")
    loss = rows[rows.kind == "loss"]
    assert set(loss.loss_served.round(6)) == {0.5} and set(loss.tokens) == {60}  # every token but each window's first
    assert (loss.loss_ours > 3).all() and "the served model is not the model" in out


def test_prompts_of_another_length_are_no_measurement(call, stub, folders):
    stub("shortens")
    code, out, err = call("serve", *pair(folders), *QUICK)
    refused((code, "", err), "tokenizer", "63 and 32 tokens", "64 and 32")


def test_our_own_checkpoint_is_exported_once_and_served(call, cwd, stub, tmp_path):
    tiny = ("preset=smoke", "sweep=t", "wandb=disabled", "threads=1", "model=llama", "model.n_embd=256", "model.n_layer=1")
    tiny += ("model.n_kv=2", "model.block_size=64", "train.steps=1", "train.warmup_steps=0", "train.dtype=float32")
    assert call("train", *tiny, "train.batch_size=1")[0] == 0
    for again in ("false", "true"):
        code, out, err = call("serve", "ckpt=runs/t/kv2-s1/last.pt", *QUICK, "windows=2", "window=20", f"again={again}")
        assert (code, err) == (0, ""), err
    rows = pd.read_csv(cwd / "results" / "serve.csv")
    assert set(rows.model) == {"kv2-s1"} and set(rows.n_kv) == {2} and rows.loss_ours.notna().sum() == 1
    exported = cwd / "runs" / "serve" / "serve-kv2-s1" / "models" / "kv2-s1"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in exported.iterdir()}


RECALL = (
    "preset=recall", "sweep=t", "wandb=disabled", "threads=1", "model.n_layer=1", "model.block_size=64", "train.batch_size=1",
    "train.steps=1", "train.warmup_steps=0", "train.dtype=float32",
)  # fmt: skip


def test_a_model_of_recall_finds_keys_in_place_of_a_loss(call, cwd, stub):
    assert call("train", *RECALL)[0] == 0
    code, out, err = call("serve", "ckpt=runs/t/kv8-s1/last.pt", *QUICK, "windows=5")
    assert (code, err) == (0, ""), err
    recall, *loads = pd.read_csv(cwd / "results" / "serve.csv").to_dict("records")
    assert recall["kind"] == "recall" and [row["kind"] for row in loads] == ["load", "flood"]
    tokens, answers, distances = examples(64, 5)  # what training evaluates on: 16 and 32 tokens apart
    assert recall["examples"] == 10 and recall["tokens"] == 10 * 63  # less the first token
    checkpoint = load_checkpoint("runs/t/kv8-s1/last.pt")
    model = load_model(checkpoint).eval()
    ours = model(tokens[:, 1:])[0][:, -1].argmax(dim=1)
    assert recall["found_served"] == sum(a == 64 for a in answers) / 10  # the stub says v0
    assert recall["found_ours"] == (ours == answers).float().mean().item()
    assert recall["same"] == (ours == 64).float().mean().item()
    assert "found, served" in out and "difference" not in out and "not all answers are the model's own" in out
    exported = cwd / "runs" / "serve" / "serve-kv8-s1" / "models" / "kv8-s1"
    assert describe("ckpt", str(exported))["recall"]
    refused(call("serve", "ckpt=runs/t/kv8-s1/last.pt", *QUICK, "windows=5", "context=17", "prompt_tokens=[4]"), "context=17")


def test_no_pair_loses_its_key_with_the_first_token():
    for context in (18, 33, 34, 64, 1024):
        tokens, answers = recall_examples(4, context)
        assert tokens.shape == (len(answers), context - 1)
        for row, answer in zip(tokens.tolist(), answers, strict=True):
            assert row[row.index(row[-1]) + 1] == answer
    assert tokens.equal(examples(1024, 4)[0][:, 1:])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_servers_too(tmp_path, stub, folders, number):
    main = (
        f"import sys\nfrom pathlib import Path\nsys.path.insert(0, {str(ROOT)!r})\nimport serving\n"
        f"serving.PYTHON = Path({str(serving.PYTHON)!r})\nserving.Child.grace = 1.0\n"
        "import serve\nif __name__ == '__main__':\n    serve.main()\n"
    )
    (tmp_path / "main.py").write_text(main)
    command = [sys.executable, tmp_path / "main.py", *pair(folders), *QUICK]
    env = {**os.environ, "STUB": "crawls deaf"}
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        seen = [process.stdout.readline() for _ in range(5)]  # no FP8; to go; twice it serves; the first row
        assert "tokens/s" in seen[-1], seen
        mine = children(process.pid)
        assert len(mine) == 3
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == (-2 if number == signal.SIGINT else 128 + number), err
    assert "Traceback" not in err
    assert all(session_members(session) == [] for session in mine)


def children(pid):
    """The sessions that a process's children lead."""
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(child) for child in f.read().split() if session_members(int(child))]


@pytest.mark.parametrize(
    "wrong, words",
    [
        (["ckpt=nowhere"], ["no such file", "nowhere"]),
        (["prompt_tokens=[250]"], ["prompt_tokens=250", "context of 256", "248 tokens"]),
        (["memory=64KiB"], ["memory=64KiB", "more memory"]),
        (["memory=64"], ["unit is missing"]),
        (["kv_cache_dtype=[fp8]"], ["AVX-512", "kv_cache_dtype=[auto]"]),
        (["kv_cache_dtype=[int8_per_token_head]"], ["int8_per_token_head", "fp8_e5m2"]),
        (["concurrency=[0]"], ["concurrency=[0]", "1 to 1,024"]),
        (["concurrency=[5000]"], ["concurrency=[5000]"]),
        (["concurrency=[2,2]"], ["different"]),
        (["concurrency=[]"], ["go together"]),
        (["flood=100000"], ["flood=100000"]),
        (["context=512"], ["context=512", "256"]),
        (["windows=1", "window=255"], ["window=255", "254 or fewer"]),
        (["dtype=float8"], ["dtype=float8"]),
        (["rounds=0"], ["rounds=0"]),
        (["nkv=2"], ["nkv"]),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(call, cwd, stub, folders, wrong, words):
    given = dict(a.split("=", 1) for a in (*pair(folders), *QUICK))
    given.pop("device")
    given |= dict(w.split("=", 1) for w in wrong)
    code, out, err = call("serve", *(f"{k}={v}" for k, v in given.items()))
    refused((code, out, err), *words)
    assert not (cwd / "runs").exists() and not (cwd / "results").exists()


def test_folders_that_are_not_whole_and_head_sizes_that_do_not_serve(call, cwd, stub, folders, tmp_path):
    refused(
        call("serve", f"ckpt={llama_folder(tmp_path / 'small', 2, n_layer=1, head_dim=16)}", *QUICK), "head_dim=16", "32, 48"
    )
    refused(call("serve", f"ckpt={folders[8]}", f"ckpt2={folders[8]}", *QUICK), "both called kv8")
    (tmp_path / "small" / "model.safetensors").unlink()
    refused(call("serve", f"ckpt={tmp_path / 'small'}", *QUICK), "safetensors")
    (tmp_path / "small" / "tokenizer.json").unlink()
    refused(call("serve", f"ckpt={tmp_path / 'small'}", *QUICK), "tokenizer.json")


def test_a_checkpoint_that_gpt2s_class_cannot_hold_and_names_with_signs(call, cwd, stub, folders, tmp_path):
    tiny = ("preset=smoke", "sweep=t", "wandb=disabled", "threads=1", "model.n_embd=256", "model.n_layer=1", "train.steps=1")
    tiny += ("train.warmup_steps=0", "train.dtype=float32", "train.batch_size=1")
    assert call("train", *tiny, "model.n_kv=2", "model.block_size=64", "data.source=input.txt")[0] == 0
    refused(call("serve", "ckpt=runs/t/kv2-s1/last.pt", *QUICK), "ckpt=runs", "n_kv=2", "model=llama")
    assert not (cwd / "runs" / "serve").exists()
    odd = tmp_path / "iter=10 loss=1.4"
    os.symlink(folders[2], odd)
    assert describe("ckpt", str(tmp_path / "iter=10 loss=1.4"))["name"] == "kv2"  # what it is a link to
    assert plain("iter=10 loss=1.4") == "iter-10-loss-1.4" and plain("..") == "model"


def test_weights_that_no_folder_can_hold_are_refused_before_there_is_a_run(call, cwd, stub):
    assert call("train", *RECALL)[0] == 0
    checkpoint = load_checkpoint("runs/t/kv8-s1/last.pt")
    checkpoint["model"]["h.0.mlp.c_fc.weight"][0, 0] = torch.inf
    save_checkpoint("broken.pt", checkpoint)
    refused(call("serve", "ckpt=broken.pt", *QUICK), "ckpt=broken.pt", "h.0.mlp.c_fc.weight")
    assert not (cwd / "runs" / "serve").exists()


def test_without_vllm_it_says_how_to_get_it(call, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "PYTHON", tmp_path / "no" / "bin" / "python")
    code, out, err = call("serve", *pair(folders), *QUICK)
    refused((code, "", err), "make serve-setup")
