"""Small helpers for all tests: one thread, a text made on the fly, and scripts run away from the repository's folders."""

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: no test looks for a model on the Hub

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, settings

import kernels
import training
from cli import InputError

ROOT = Path(__file__).resolve().parents[1]

torch.set_num_threads(1)
settings.register_profile(
    "small",
    deadline=None,  # a busy machine is not a fault
    max_examples=12,
    derandomize=True,  # the same examples everywhere: no test passes on one machine only
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("small")

# the smoke preset, shrunk once more: 8 query heads of 4 numbers, 2 layers, 16 characters of context
TINY = (
    "preset=smoke", "sweep=t", "wandb=disabled", "threads=1", "model.n_embd=32", "model.block_size=16",
    "train.batch_size=4", "train.steps=20", "train.warmup_steps=2", "train.eval_interval=10",
    "train.save_interval=4", "train.log_interval=2", "train.dtype=float32",
)  # fmt: skip


def make_text(n, seed=0, letters="abcdefghij \n"):
    """n characters in which some follow others more often: something to learn, and every letter is in it."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(letters[:-2], k=draw.randint(2, 6))) for _ in range(20)]
    text = letters + "".join(draw.choice(words) + draw.choice("  \n") for _ in range(n))
    return text[:n]


def rows(folder):
    """metrics.jsonl without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("elapsed_s", "tokens_per_s")} for line in lines]


def refusal(function, *args):
    """The one line with which a function refuses its arguments."""
    with pytest.raises(InputError) as error:
        function(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def move_to(folder, monkeypatch):
    """Work in `folder`: runs/ and checkpoints/ are relative to it; prepared data and the default text go there too."""
    import data.corpus
    import data.shakespeare_char.prepare as char_data
    import data.shakespeare_own.prepare as own_data

    monkeypatch.chdir(folder)
    monkeypatch.delenv("TINY_SHAKESPEARE", raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # scripts set it: give it back after the test
    monkeypatch.setattr(char_data, "DATASET_DIR", folder / "data" / "shakespeare_char")
    monkeypatch.setattr(own_data, "DATASET_DIR", folder / "data" / "shakespeare_own")
    monkeypatch.setattr(data.corpus, "CACHE", folder / "input.txt")
    # a race of dtypes and of kernels at each start costs more than a run here; test_training.py has it run
    monkeypatch.setattr(training, "pick_dtype", lambda dtype, device: (dtype.replace("auto", "float32"), "as told"))
    monkeypatch.setattr(training, "pick_attention", lambda *args: (next(iter(training.ATTENTION)), "as told"))
    (folder / "input.txt").write_text(make_text(3000))


def run_main(name, *args):
    """A script's main in this process -> its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *args])
        GlobalHydra.instance().clear()
        try:
            importlib.import_module(name).main()
        except SystemExit as stop:
            return stop.code or 0
        finally:
            GlobalHydra.instance().clear()
    return 0


@pytest.fixture(params=["C++ kernels", "PyTorch"])
def way(request, monkeypatch):
    """Every test twice: with the kernels, where there is a compiler, and with what serves without one."""
    if request.param == "PyTorch":
        monkeypatch.setattr(kernels, "library", lambda: None)
    elif kernels.library() is None:
        pytest.skip("no C++ compiler here")


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """A working directory of its own, with a text to train on."""
    move_to(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def call(cwd, capsys):
    """call("train", "model.n_kv=2") runs a script in this process -> (exit code, stdout, stderr)."""

    def call(name, *args):
        capsys.readouterr()
        code = run_main(name, *args)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def numbers(call):
    """numbers("shape=llama3-8b") -> what budget.py counts, as it prints it with format=json."""

    def numbers(*args):
        code, out, err = call("budget", *args, "format=json")
        assert (code, err) == (0, ""), err
        return json.loads(out)

    return numbers


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a finished multi-head run of 20 steps, of the text that `cwd` has too."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        move_to(folder, patch)
        assert run_main("train", *TINY) == 0
    return folder / "runs" / "t" / "kv8-s1"


@pytest.fixture
def mha(trained, cwd):
    """checkpoints/mha.pt, where a bare name is found."""
    (cwd / "checkpoints").mkdir()
    return Path(shutil.copy(trained / "last.pt", cwd / "checkpoints" / "mha.pt"))


@pytest.fixture(scope="session")
def repo(tmp_path_factory):
    """A copy of the sources, so that scripts in processes of their own prepare their data outside the repository."""
    copy = tmp_path_factory.mktemp("repo")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, copy)
    for folder in ("configs", "kernels", "kv_cache"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("data/**/*.py"):
        (copy / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy / path.relative_to(ROOT))
    return copy


@pytest.fixture
def spawn(repo, tmp_path, monkeypatch):
    """spawn("train", "seed=1") starts a script as people do, in the test's own folder -> subprocess.Popen."""
    monkeypatch.delenv("TINY_SHAKESPEARE", raising=False)
    started = []

    def spawn(name, *args):
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen([sys.executable, repo / f"{name}.py", *args], cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
        )
        return started[-1]

    yield spawn
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
