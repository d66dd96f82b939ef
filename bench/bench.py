"""
How fast a decoding and a training step are here, beside peers and beside what the machine allows.

    make bench                                              everything, with its peers' environments (about an hour)
    python bench/bench.py peers=[ours,dynamic] dtypes=[float32] batches=[1] contexts=[256]     a minute of it
    python bench/bench.py device=cuda                       on a GPU -> results/bench_gpu.csv

Every peer is a process of its own and they take turns, case by case, so each ratio is of measurements made minutes apart
at most. A case's floor is the bytes that its step must read over the read bandwidth measured between the turns. Rows go
to the CSV case by case and replace those of the same case: an interrupted run loses nothing, and any part can be run anew.
The figures and the README's tables are drawn from that file by bench/report.py.
"""

import json
import selectors
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cli import script
from eval import read_bandwidth
from tracking import commit, provenance, write_atomically
from training import set_up_device

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
HERE, VLLM = sys.executable, str(ROOT / ".venv-serve/bin/python")
PEERS = {
    "ours": [HERE, BENCH / "ours.py"],
    "pytorch": [HERE, BENCH / "ours.py", "pytorch"],
    "dynamic": [HERE, BENCH / "hugging_face.py", "dynamic"],
    "static": [HERE, BENCH / "hugging_face.py", "static"],
    "vllm": [VLLM, BENCH / "vllm_cpu.py"],
    "llama": [HERE, BENCH / "llamacpp.py"],
}
TRAINERS = {name: [HERE, BENCH / "training_step.py", name] for name in ("ours", "compiled", "plain")}
CASE = ["kind", "peer", "dialect", "dtype", "n_kv", "batch", "context", "steps"]


class Peer:
    """A process that answers questions (protocol.py); started at the first one, and again after it was given up."""

    def __init__(self, command):
        self.command, self.process, self.hello = command, None, {}

    def start(self):
        try:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
            )
        except OSError as error:
            return {"skip": f"not installed: {error}"}
        hello = self.read(180)
        self.hello = hello if "peer" in hello else self.hello
        return hello

    def read(self, limit_s):
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            if ready.select(limit_s):
                line = self.process.stdout.readline()
                if line:
                    return json.loads(line)
                self.process, reason = None, "it ended without an answer (not installed?)"
            else:
                self.stop()
                reason = f"no answer in {limit_s} s"
        return {"skip": reason}

    def ask(self, question, limit_s):
        if self.process is None:
            hello = self.start()
            if "skip" in hello:
                return hello
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self.process = None
            return {"skip": "it ended"}
        return self.read(limit_s)

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


class Bench:
    def __init__(self, device, out):
        self.device, self.out = device, out
        self.rows = pd.read_csv(out).to_dict("records") if out.exists() else []
        made_by = provenance()
        self.about = {"threads": torch.get_num_threads(), "commit": commit(made_by), "machine": made_by["machine"]}
        self.about["cpu"] = torch.backends.cpu.get_cpu_capability()
        self.given_up = {}  # a peer's smallest case that took too long

    def measure(self, kind, peers, question, rounds, limit_s):
        """Ask all peers in turn, `rounds` times; write a row for each."""
        question = {**question, "threads": self.about["threads"], "device": self.device.type}
        size = question["batch"] * question["context"]
        answers, bandwidths = {name: [] for name in peers}, []
        for _ in range(rounds):
            bandwidths.append(read_bandwidth(self.device))
            for name, peer in peers.items():
                slow = self.given_up.get((kind, name, question["dtype"], question["n_kv"]), size + 1) <= size
                answer = {"skip": f"too slow: a smaller case took over {limit_s} s"} if slow else peer.ask(question, limit_s)
                if "no answer" in answer.get("skip", ""):
                    self.given_up[kind, name, question["dtype"], question["n_kv"]] = size
                answers[name].append(answer)
        bandwidth = statistics.median(bandwidths)
        medians = {
            name: statistics.median(s for answer in given for s in answer["steps_s"])
            for name, given in answers.items()
            if all("steps_s" in answer for answer in given)
        }
        for name, peer in peers.items():
            row = {"kind": kind, "peer": peer.hello.get("peer", name), **{k: question[k] for k in CASE[2:]}}
            row["how"] = peer.hello.get("how", "")
            if name in medians:
                steps = [s for answer in answers[name] for s in answer["steps_s"]]
                total = sum(steps) / len(steps)  # over a long generation every step is another
                tokens = question["batch"] * (question["context"] if kind.startswith("train") else 1)
                row |= {
                    "step_ms": medians[name] * 1e3, "step_ms_p10": quantile(steps, 0.1) * 1e3,
                    "step_ms_p90": quantile(steps, 0.9) * 1e3, "step_ms_mean": total * 1e3,
                    "tokens_per_s": tokens / (total if kind == "whole" else medians[name]),
                }  # fmt: skip
                if "ours" in medians:
                    ours = [s for answer in answers["ours"] for s in answer["steps_s"]]
                    row["ours_is_faster"] = (
                        (total / (sum(ours) / len(ours))) if kind == "whole" else medians[name] / medians["ours"]
                    )
                last = answers[name][-1]
                if last.get("floor"):  # bytes a step must read
                    floor = statistics.fmean(last["floor"])
                    row |= {"read_mb": floor / 1e6, "kv_bytes": last["kv_bytes"], "bandwidth_gb_s": bandwidth / 1e9}
                    row["bandwidth_share"] = floor / bandwidth / (total if kind == "whole" else medians[name])
                if last.get("floor_s"):  # seconds of the products alone
                    row |= {"floor_ms": last["floor_s"] * 1e3, "floor_share": last["floor_s"] / medians[name]}
                if "attention" in last:
                    row["how"] += f", attention by {last['attention']}"
            else:
                row["skip"] = next(answer["skip"] for answer in answers[name] if "skip" in answer)
            self.save(row | self.about)
            self.say(row)

    def save(self, row):
        key = [str(row[k]) for k in CASE]
        self.rows = [r for r in self.rows if [str(r[k]) for k in CASE] != key] + [row]
        self.out.parent.mkdir(exist_ok=True)
        write_atomically(self.out, pd.DataFrame(self.rows).to_csv(index=False, float_format="%.6g").encode())

    @staticmethod
    def say(row):
        case = f"{row['kind']:<12} {row['peer']:<28} {row['dialect']:<5} {row['dtype']:<8} n_kv {row['n_kv']} batch {row['batch']:>2}"
        if "skip" in row:
            tqdm.write(f"{case} context {row['context']:>5}: – ({row['skip'][:60]})")
            return
        share = f", {row['bandwidth_share']:.0%} of the bandwidth" if "bandwidth_share" in row else ""
        ratio = f", ours {row['ours_is_faster']:.2f}x as fast" if row["peer"] != "nanoGQA" and "ours_is_faster" in row else ""
        tqdm.write(
            f"{case} context {row['context']:>5}: {row['step_ms']:8.2f} ms, {row['tokens_per_s']:>9,.0f} tokens/s{share}{ratio}"
        )


def cases(cfg):
    """(kind, peers, question, rounds, limit), the cheap ones first."""
    base = {"dialect": "llama", "steps": cfg.steps}
    decoders, two = list(cfg.peers), [name for name in ("ours", "dynamic") if name in cfg.peers]
    for dtype in cfg.dtypes:
        for n_kv in cfg.n_kv:
            for context in cfg.contexts:
                for batch in cfg.batches:
                    case = {"dtype": dtype, "n_kv": n_kv, "context": context, "batch": batch}
                    yield "decode", decoders, base | case, cfg.rounds, cfg.limit_s
                    if n_kv == 8 and dtype == "float32":  # GPT-2's class knows MHA only
                        gpt2 = [name for name in decoders if name in ("ours", "pytorch", "dynamic", "static")]
                        yield "decode", gpt2, base | case | {"dialect": "gpt2"}, cfg.rounds, cfg.limit_s
    if cfg.whole:
        for n_kv in cfg.n_kv:
            for batch in sorted({min(cfg.batches), max(cfg.batches)}):
                case = {"dtype": "float32", "n_kv": n_kv, "batch": batch, "context": cfg.whole + 64, "steps": cfg.whole}
                yield "whole", two, base | case, 1, 1500
    gpt2 = {"dialect": "gpt2", "dtype": "float32", "steps": 4}
    if cfg.train:
        for n_kv in cfg.n_kv:
            case = {"n_kv": n_kv, "batch": 8, "context": 256, "floor": True}
            yield "train", ["ours", "plain", "compiled"], gpt2 | case, cfg.rounds, 300
    if cfg.growth:
        for n_kv in cfg.n_kv:
            for batch in (1, 8):
                for context in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
                    case = {"dialect": "gpt2", "dtype": "float32", "n_kv": n_kv, "batch": batch, "context": context}
                    yield "growth", ["ours"], base | case, 1, cfg.limit_s
        for batch, context in [(b, 256) for b in (1, 2, 4, 8, 16)] + [(2, t) for t in (64, 128, 512, 1024, 2048)]:
            yield "train growth", ["ours"], gpt2 | {"n_kv": 8, "batch": batch, "context": context}, 1, 300


@dataclass(frozen=True)
class Settings:
    """configs/bench.yaml, where each key has its reason."""

    peers: list
    n_kv: list
    batches: list
    contexts: list
    dtypes: list
    steps: int
    rounds: int
    whole: int
    limit_s: int
    train: bool
    growth: bool
    device: str
    threads: int | None
    out: str | None

    def __post_init__(self):
        unknown = [name for name in self.peers if name not in PEERS]
        if unknown or not self.peers:
            raise ValueError(f"peers={self.peers} is not allowed: some of {list(PEERS)}")
        if set(self.dtypes) - {"float32", "bfloat16"}:
            raise ValueError(f"dtypes={self.dtypes} is not allowed: float32, bfloat16")
        if any(type(n) is not int or n < 1 or 8 % n for n in self.n_kv):
            raise ValueError(f"n_kv={self.n_kv} is not allowed: divisors of the 8 query heads")
        if self.steps < 1 or self.rounds < 1 or any(type(c) is not int or c < self.steps + 2 for c in self.contexts):
            raise ValueError(f"contexts={self.contexts}: whole numbers of at least steps + 2 = {self.steps + 2}")


@script("bench", Settings)
def main(cfg):
    device = set_up_device(cfg.device, cfg.threads)
    gpu = device.type == "cuda"
    bench = Bench(device, Path(cfg.out or ROOT / "results" / ("bench_gpu.csv" if gpu else "bench.csv")))
    todo = list(cases(cfg))
    if gpu:  # the peers here that run on one
        todo = [
            (kind, [name for name in names if name in ("ours", "pytorch", "dynamic", "static")], *rest)
            for kind, names, *rest in todo if not kind.startswith("train")
        ]  # fmt: skip
    processes = {name: Peer(command) for name, command in PEERS.items()}
    trainers = {name: Peer(command) for name, command in TRAINERS.items()}
    start = time.perf_counter()
    try:
        for kind, names, question, rounds, limit_s in tqdm(todo, desc="bench", unit="case", disable=None, dynamic_ncols=True):
            known = trainers if kind.startswith("train") else processes
            bench.measure(kind, {name: known[name] for name in names}, question, rounds, limit_s)
    finally:
        for peer in (*processes.values(), *trainers.values()):
            peer.stop()
    print(
        f"{len(todo)} cases in {(time.perf_counter() - start) / 60:.0f} min -> {bench.out}; python bench/report.py draws them"
    )


if __name__ == "__main__":
    main()
