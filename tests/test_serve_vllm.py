"""
serve.py and a real vLLM, whole: `make serve-test`. The models are Llamas of the README's shape with random weights; what
transformers says of them is the truth.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch
from conftest import ROOT, make_text
from llama_folders import CHARS, llama_folder

import serving
from data.tokenizer import RecallTokenizer
from huggingface import to_huggingface
from model import GPT, GPTConfig
from serving import (
    Server,
    environment,
    free_port,
    predicted_blocks,
    prompt_loss,
    reported_blocks,
    server_command,
    session_members,
    why_no_fp8,
)  # fmt: skip
from shapes import find_shape

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not serving.PYTHON.exists(), reason="no .venv-serve: make serve-setup"),
]
POSITIONS = 160  # of greedy decoding, beyond one block of 128 tokens
MEMORY = 2**25
PROMPT = [CHARS.index(c) for c in "ROMEO:\nBut soft, what light"]
FP8 = why_no_fp8({"head_dim": 32}, "cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where = tmp_path_factory.mktemp("folders")
    return {n_kv: llama_folder(where / f"kv{n_kv}", n_kv) for n_kv in (8, 2, 1)}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(folder) -> a server that is starting; all are stopped in the end."""
    logs, servers = tmp_path_factory.mktemp("logs"), []

    def start(folder, kv_cache_dtype="auto", **options):
        port = free_port()
        options = {"memory": MEMORY, "dtype": "float32", "context": 256, "eager": True, "cuda": False} | options
        command = server_command(folder, port, name=folder.name, kv_cache_dtype=kv_cache_dtype, **options)
        servers.append(Server(command, port, logs / f"{folder.name}-{kv_cache_dtype}.log", environment()))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
    assert not any(session_members(server.process.pid) for server in servers)


@pytest.fixture(scope="module")
def servers(start, folders):
    """A server for each n_kv."""
    servers = {n_kv: start(folder) for n_kv, folder in folders.items()}
    for server in servers.values():
        server.wait(600)
    return servers


@pytest.fixture(scope="module")
def windows(folders):
    from tokenizers import Tokenizer

    text = "".join(c for c in make_text(3000, letters="ABCabc,. \n") if c in CHARS)
    tokens = Tokenizer.from_file(str(folders[8] / "tokenizer.json")).encode(text).ids
    assert tokens == [CHARS.index(c) for c in text]
    return [tokens[i * 200 : i * 200 + 201] for i in range(8)]


def reference(folder):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_loss(folder, windows):
    x = torch.tensor(windows)  # [B, T+1]
    p = reference(folder)(x[:, :-1]).logits.log_softmax(dim=-1)
    return -p.gather(2, x[:, 1:, None]).mean().item()


@torch.no_grad()
@pytest.mark.parametrize("n_kv", [8, 2, 1])
def test_greedy_tokens_are_those_of_transformers(servers, folders, n_kv):
    body = {"model": f"kv{n_kv}", "prompt": PROMPT, "max_tokens": POSITIONS, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    answer = json.loads(servers[n_kv].request("/v1/completions", body))["choices"][0]
    model, tokens, gaps = reference(folders[n_kv]), list(PROMPT), []
    for _ in range(POSITIONS):  # the whole sequence anew for each: no cache that could be wrong
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        gaps.append((best.values[0] - best.values[1]).item())
        tokens.append(best.indices[0].item())
    assert answer["token_ids"] == tokens[len(PROMPT) :], f"nearest tie: {min(gaps):.2g}"
    assert len(set(answer["token_ids"])) > 10  # not one token for ever
    assert answer["text"] == "".join(CHARS[i] for i in answer["token_ids"])  # text out


@pytest.mark.parametrize("n_kv", [8, 2, 1])
def test_the_loss_is_that_of_the_model(servers, folders, windows, n_kv):
    assert abs(prompt_loss(servers[n_kv], f"kv{n_kv}", windows) - reference_loss(folders[n_kv], windows)) < 1e-4


@pytest.mark.parametrize("n_kv", [8, 2, 1])
def test_capacity_is_what_was_predicted_in_whole_blocks(servers, folders, n_kv):
    blocks, size = reported_blocks(servers[n_kv].get("/metrics"))
    assert blocks == predicted_blocks(find_shape("ckpt", str(folders[n_kv])), MEMORY, size, 4)
    assert size == serving.BLOCK["cpu"]
    mha, _ = reported_blocks(servers[8].get("/metrics"))
    assert mha * (8 // n_kv) <= blocks < (mha + 1) * (8 // n_kv)


def test_nothing_but_loopback_listens(servers):
    mine = {pid for server in servers.values() for pid in session_members(server.process.pid)}
    inodes = set()
    for pid in mine:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    listening = 0
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as f:
            for line in f.readlines()[1:]:
                local, state, inode = line.split()[1], line.split()[3], line.split()[9]
                if state == "0A" and inode in inodes:
                    listening += 1
                    assert local.split(":")[0] in ("0100007F", "00000000000000000000000001000000"), line
    assert listening >= len(servers)


@pytest.mark.skipif(FP8 is not None, reason=f"no FP8 cache here: {FP8}")
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_holds_four_times_as_much_and_changes_the_loss_a_little(start, folders, windows, kind):
    server = start(folders[2], kind)
    server.wait(600)
    blocks, size = reported_blocks(server.get("/metrics"))
    assert blocks == predicted_blocks(find_shape("ckpt", str(folders[2])), MEMORY, size, 1)
    change = abs(prompt_loss(server, "kv2", windows) - reference_loss(folders[2], windows))
    assert 0 < change < 0.5
    server.stop()


QUICK = (
    "wandb=disabled", "rounds=1", "concurrency=[4]", "prompt_tokens=[32]", "output_tokens=16", "requests=2", "flood=40",
    "windows=4", "window=100", "memory=16MiB", "device=cpu", "source=text.txt",
)  # fmt: skip


def test_two_models_from_start_to_table_and_again_after_an_interruption(servers, folders, tmp_path):
    for server in servers.values():  # the last test: their cores are wanted
        server.stop()
    (tmp_path / "text.txt").write_text("".join(c for c in make_text(9000, letters="ABCabc,. \n") if c in CHARS))
    command = [sys.executable, ROOT / "serve.py", f"ckpt={folders[8]}", f"ckpt2={folders[2]}", *QUICK]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
        lines, mine = [], []
        for line in process.stdout:
            lines.append(line)
            if " loss " in line and "kv2" in line:  # both losses are there: interrupt what comes next
                mine = [int(child) for child in children.read().split()]
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT and "interrupted" in err, (lines, out, err)
    assert len(mine) >= 3 and not any(session_members(session) for session in mine)

    start = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "4 of 6 measurements to go" in done.stdout or (FP8 is None and "10 of 12" in done.stdout), done.stdout
    assert "kv2, GQA-2" in done.stdout
    print(f"{time.monotonic() - start:.0f} s")

    rows = pd.read_csv(tmp_path / "results" / "serve.csv")
    assert (rows.capacity_tokens == rows.predicted_tokens).all()
    auto = rows[rows.kv_cache_dtype == "auto"]
    losses = auto[auto.kind == "loss"]
    assert (losses.loss_served - losses.loss_ours).abs().max() < 1e-4
    loads = auto[auto.kind.isin(["load", "flood"])]
    assert len(loads) == 4 and (loads[["tokens_per_s", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99"]] > 0).all(axis=None)
    assert (loads.itl_ms_p50 <= loads.itl_ms_p95).all() and (loads.itl_ms_p95 <= loads.itl_ms_p99).all()
    flood = loads[loads.kind == "flood"].set_index("model")
    assert flood.sequences_fit["kv8"] < 40 <= flood.sequences_fit["kv2"]  # bound by the cache, and not


def test_keys_that_are_looked_up_and_a_padded_embedding(servers, tmp_path):
    """Answers and loss of a model of recall, and of one with rows beyond its last token, both as our own model has them."""
    for server in servers.values():
        server.stop()
    (tmp_path / "text.txt").write_text("".join(c for c in make_text(9000, letters="ABCabc,. \n") if c in CHARS))
    recall = GPT(GPTConfig(dialect="llama", n_layer=2, n_kv=2, block_size=128, vocab_size=128))
    to_huggingface(recall, RecallTokenizer(64, 64), tmp_path / "recall")
    llama_folder(tmp_path / "padded", 8, n_layer=2, padding=31)
    few = dict(a.split("=", 1) for a in QUICK) | {"flood": "0", "concurrency": "[2]"}
    command = [sys.executable, ROOT / "serve.py", "ckpt=recall", "ckpt2=padded", *(f"{k}={v}" for k, v in few.items())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(tmp_path / "results" / "serve.csv")
    rows = rows[rows.kv_cache_dtype == "auto"].set_index(["model", "kind"])
    assert rows.same["recall", "recall"] == 1 and rows.examples["recall", "recall"] == 4 * 3  # 16, 32 and 64 tokens apart
    assert abs(rows.loss_served["padded", "loss"] - rows.loss_ours["padded", "loss"]) < 1e-4
    assert rows.tokens_per_s["recall", "load"] > 0 and rows.tokens_per_s["padded", "load"] > 0
