"""
vLLM as a child of ours: its server on loopback, its load generator, and that nothing of either is ever left behind.

    with Server(command, port, log, environment()) as server:      # stopped at the end, whatever ends it
        server.wait(600)                                           # until it answers, or why it does not
        blocks, block_size = reported_blocks(server.get("/metrics"))

Beside them what can be said before anything is started: what vLLM does not serve, and how many tokens its cache will hold.
"""

import contextlib
import glob
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

from cli import ROOT, InputError
from kv_cache.accounting import dense_nbytes

PYTHON = ROOT / ".venv-serve" / "bin" / "python"  # vLLM pins its own torch: an environment of its own, `make serve-setup`
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# ---------------------------------------------------------------------------------------------------------------------
# processes that end with us

# Run between fork and exec of what we start: were we killed without a chance to stop it, Linux would send it a SIGTERM
TIED = """
import ctypes, os, signal, sys
getattr(ctypes.CDLL(None), "prctl", print)(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; kept over exec
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def handled(handler):
    """Signals that would end us go to `handler` for a while. Only the main thread can ask for that; others run as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, signal.SIG_DFL if was is None else was)


def leave(number, frame):
    """A handler that lets every `with` and `finally` do its work: without it, SIGTERM would end Python on the spot."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def session_members(session):
    """The processes of a session that still run. Whatever a child starts stays in its session, also when its parent is gone."""
    found = []
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            state, _, _, sid = Path(path).read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state not in "ZX":
                found.append(int(path.split("/")[2]))
    return found


class Child:
    """A process in a session of its own: Ctrl-C in the terminal reaches us alone, and stop() finds all that it started."""

    grace = 20.0  # seconds to leave by itself

    def __init__(self, command, log, env=None, pipes=False):
        self.log = Path(log)
        pipe = subprocess.PIPE if pipes else None
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", TIED, *map(str, command)],
                stdin=pipe or subprocess.DEVNULL, stdout=pipe or out, stderr=out, env=env, start_new_session=True, text=True,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()

    def members(self):
        self.process.poll()  # collects it, if it has ended
        if os.path.exists("/proc/self/stat"):
            return session_members(self.process.pid)
        return [] if self.process.returncode is not None else [self.process.pid]

    def stop(self):
        """End it and all that it started: asked first, killed if that takes too long. A second Ctrl-C does not come between."""
        with handled(signal.SIG_IGN):
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe:
                    with contextlib.suppress(OSError):
                        pipe.close()
            if self.process.poll() is None:
                self.process.terminate()
            patience = time.monotonic() + self.grace
            while self.members() and time.monotonic() < patience:
                time.sleep(0.05)
            patience = time.monotonic() + 10
            while (left := self.members()) and time.monotonic() < patience:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)

    def last_words(self):
        return last_words(self.log.read_text(errors="replace"))


def last_words(log):
    """
    The line of a log that says most: the last error, but for those that only point at others; without one, the last line.
    """
    lines = [
        re.sub(r"^(\(\w+ pid=\d+\) )?([A-Z]+ \d\d-\d\d [\d:]+ \[[^]]*\] )?", "", line).strip() for line in log.splitlines()
    ]
    errors = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b.*: ", line) and "root cause above" not in line
    ]
    said = errors or [line for line in lines if line] or ["not a word"]
    return said[-1][:300]


# ---------------------------------------------------------------------------------------------------------------------
# the server


def environment(threads=None):
    """What the server and the load generator run under: no usage statistics, no Hub, no proxy between them."""
    env = {k: v for k, v in os.environ.items() if k != "VLLM_CPU_KVCACHE_SPACE"}  # it would override the bytes we ask for
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONUNBUFFERED"] = "1"  # its last words shall be in the log when it dies
    if threads is not None:
        env |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "OMP_NUM_THREADS": str(threads)}
    iomp = glob.glob(str(PYTHON.parent.parent / "lib" / "libiomp5.so"))  # as in bench/vllm_cpu.py, where the reason stands
    if iomp and "libiomp" not in env.get("LD_PRELOAD", ""):
        env["LD_PRELOAD"] = ":".join(filter(None, [iomp[0], env.get("LD_PRELOAD")]))
    return env


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def server_command(folder, port, *, name, memory, dtype, kv_cache_dtype, context, eager, cuda):
    """vLLM's OpenAI server over one model. As a module: the `vllm` command wants package metadata that vllm-cpu lacks."""
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", name]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", dtype, "--kv-cache-dtype", kv_cache_dtype]
    command += ["--kv-cache-memory-bytes", memory, "--max-model-len", context]
    # a prompt met before would cost nothing: warm-ups, rounds and concurrencies all draw from one random generator
    command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    command += ["--generation-config", "vllm"]  # none of the folder's own penalties: greedy means greedy
    command += ["--enforce-eager"] if eager else []
    command += ["--gpu-memory-utilization", 0.3] if cuda else []  # for the rest than the cache: two servers share the device
    return list(map(str, command))


class Server(Child):
    """A server on `port` of loopback that answers /health once it serves."""

    def __init__(self, command, port, log, env=None):
        self.address = f"http://127.0.0.1:{port}"
        self.port = port
        super().__init__(command, log, env)

    def request(self, path, body=None, seconds=600):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=seconds) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            why = error.read().decode(errors="replace")[:300]
            raise InputError(f"vLLM refuses {path}: {why} (its log: {self.log})") from None
        except (OSError, ValueError) as error:
            if self.process.poll() is not None:
                raise InputError(f"vLLM has ended: {self.last_words()} (all of its log: {self.log})") from None
            raise InputError(f"vLLM does not answer {path} ({error}; its log: {self.log})") from None

    def get(self, path, seconds=30):
        return self.request(path, None, seconds)

    def wait(self, seconds):
        """Seconds until it served. InputError with its last words when it ends before, or is not there in time."""
        start = time.monotonic()
        with tqdm(desc="vLLM starts", bar_format="{desc} {elapsed} {postfix}", disable=None, leave=False) as bar:
            while (elapsed := time.monotonic() - start) < seconds:
                if self.process.poll() is not None:
                    raise InputError(f"vLLM ended before it served: {self.last_words()} (all of its log: {self.log})")
                with contextlib.suppress(InputError):
                    self.get("/health", 5)
                    return elapsed
                bar.set_postfix_str(last_words(self.log.read_text(errors="replace")[-2000:])[:80])
                time.sleep(0.25)
        raise InputError(f"vLLM does not serve after start_s={seconds:g} s: {self.last_words()} (all of its log: {self.log})")


def reported_blocks(metrics):
    """(blocks, tokens a block) of a server's KV cache, as its /metrics say."""
    found = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.M)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}
    try:
        return int(labels["num_gpu_blocks"]), int(labels["block_size"])  # called so on a CPU too
    except (KeyError, ValueError):
        raise InputError("the server's /metrics do not tell num_gpu_blocks and block_size (vllm:cache_config_info)") from None


def prompt_loss(server, name, windows, batch=8):
    """Mean negative log-likelihood, nats a token, of all but the first token of each window, by vLLM's prompt logprobs."""
    total, n = 0.0, 0
    for i in range(0, len(windows), batch):
        some = windows[i : i + batch]
        body = {"model": name, "prompt": some, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        choices = json.loads(server.request("/v1/completions", body))["choices"]
        for tokens, choice in zip(some, sorted(choices, key=lambda c: c["index"]), strict=True):
            for token, at in zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True):
                total -= at[str(token)]["logprob"]
                n += 1
    return total / n


def greedy_answers(server, name, prompts, batch=8):
    """The token that the server puts after each prompt, a list of ids."""
    answers = []
    for i in range(0, len(prompts), batch):
        body = {"model": name, "prompt": prompts[i : i + batch], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        choices = json.loads(server.request("/v1/completions", body))["choices"]
        answers += [choice["token_ids"][0] for choice in sorted(choices, key=lambda c: c["index"])]
    return answers


# ---------------------------------------------------------------------------------------------------------------------
# the load generator


class Load(Child):
    """vLLM's `bench serve` in a process that is kept (bench/vllm_load.py): importing vLLM takes longer than most measurements."""

    def __init__(self, log, env=None):
        super().__init__([PYTHON, ROOT / "bench" / "vllm_load.py"], log, env, pipes=True)

    def read(self, seconds):
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            if not ready.select(seconds):
                raise InputError(f"vLLM's benchmark gave no answer in limit_s={seconds:g} s (its log: {self.log})")
            line = self.process.stdout.readline()
        if not line:
            raise InputError(f"vLLM's benchmark has ended: {self.last_words()} (all of its log: {self.log})")
        return json.loads(line)

    def ask(self, arguments, seconds):
        """The numbers of one `bench serve` with these arguments. InputError when it fails, or any request did."""
        try:
            print(json.dumps({"arguments": list(map(str, arguments))}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise InputError(f"vLLM's benchmark has ended: {self.last_words()} (all of its log: {self.log})") from None
        answer = self.read(seconds)
        if "skip" in answer:
            raise InputError(f"vLLM's benchmark failed: {answer['skip']} (all of its log: {self.log})")
        if answer["failed"]:
            raise InputError(f"{answer['failed']} of {answer['num_prompts']} requests failed (the server's log says why)")
        return answer


def load_arguments(server, folder, name, *, prompt, output, requests, concurrency, warmups, seed):
    """`vllm bench serve`: prompts of random tokens, all of one length, answers of another; at most `concurrency` at once."""
    arguments = ["--backend", "openai", "--host", "127.0.0.1", "--port", server.port, "--model", name, "--tokenizer", folder]
    arguments += ["--dataset-name", "random", "--random-input-len", prompt, "--random-output-len", output]
    arguments += ["--num-prompts", requests, "--num-warmups", warmups, "--seed", seed, "--temperature", 0, "--ignore-eos"]
    arguments += ["--max-concurrency", concurrency] if concurrency else []
    arguments += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,95,99", "--disable-tqdm"]
    return arguments


# ---------------------------------------------------------------------------------------------------------------------
# what can be said beforehand

CPU_HEADS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # head sizes of vLLM's attention on a CPU
BLOCK = {"cpu": 128, "cuda": 16}  # tokens a block where nobody asks for another


def why_not_served(shape, device):
    """Why vLLM does not serve this shape on this device, in words; None if it does."""
    head_dim = shape["head_dim"]
    if shape["latent"] or shape["windowed"]:
        return "it keeps a latent vector or a sliding window, whose capacity serve.py cannot foretell"
    if device == "cpu" and head_dim not in CPU_HEADS:
        return f"vLLM on a CPU serves heads of {', '.join(map(str, CPU_HEADS))} numbers, not of head_dim={head_dim}"
    if device == "cuda" and (head_dim % 8 or head_dim > 256):
        return f"vLLM on a GPU serves heads of a multiple of 8 numbers up to 256, not of head_dim={head_dim}"
    return None


def why_no_fp8(shape, device):
    """Why a cache of FP8 does not run for this shape on this machine, in words; None if it does."""
    if device == "cpu" and shape["head_dim"] % 32:
        return f"on a CPU it needs head_dim to be a multiple of 32, not {shape['head_dim']}"
    if device == "cpu" and not wide_vectors():
        return "this CPU has neither AVX-512 nor AMX, which vLLM needs for it"
    return None


def wide_vectors():
    try:
        return bool(re.search(r"\b(avx512f|amx_tile)\b", Path("/proc/cpuinfo").read_text()))
    except OSError:
        return True  # not Linux: let vLLM say


def predicted_blocks(shape, memory, block, itemsize):
    """
    Blocks of `block` tokens in `memory` bytes of cache. A block holds the keys and values of its tokens in all layers, and
    there are only whole ones: below one block's bytes stay unused, so ratios of capacities are those of n_kv up to that.
    """
    return memory // dense_nbytes(shape["n_layer"], shape["n_kv"], shape["head_dim"], block, 1, itemsize)


def sequences_at_once(blocks, block, tokens):
    """Sequences of so many tokens that a cache holds: each takes whole blocks, and vLLM keeps one block for itself."""
    return max(0, blocks - 1) // -(-tokens // block)
