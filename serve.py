"""
What a model costs to serve, measured on a real vLLM: the tokens its KV cache holds, latency, throughput, and whether the
served model is still the same model.

    make serve-setup                                            vLLM in an environment of its own, .venv-serve, once
    python serve.py ckpt=mha.pt ckpt2=gqa2.pt                   two checkpoints of the llama dialect, each on its server
    python serve.py ckpt=path/to/folder memory=16GiB            one Hugging Face folder, on a GPU
    python serve.py ckpt=mha.pt ckpt2=mqa.pt rounds=1 concurrency=[8] prompt_tokens=[128]       a few minutes of it

The servers listen on loopback only, at free ports; the load comes from vLLM's own `bench serve`, is bounded, and nothing
leaves this machine. For each kv_cache_dtype: the capacity that the server reports beside the one predicted (whole blocks of
tokens in `memory` bytes); the loss of validation text by the server's prompt logprobs beside our own; time to the first
token and between tokens (median, p95, p99) and tokens/s over concurrency and prompt length; tokens/s when more requests come
at once than the cache holds. A model of data=recall looks its keys up in place of the loss: how many it finds when served,
how many ours finds, and how often the answer is the same. Servers are stopped at the end, also after Ctrl-C, a signal, an
error or a hang. Prints each row as it is measured and a table at the end; rows go to runs/<sweep>/<name>/ at once, so the
same command continues where it was interrupted, and to results/serve.csv.
"""

import contextlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

import serving
from arithmetic import heads, readable
from budget import columns, quantity
from cli import InputError, script
from served import check_readable, describe, export, our_answers, our_loss, recall_examples, windows_of_text
from storage import open_run
from tracking import Run, WandbConfig, commit, provenance, read_line, write_atomically
from training import set_up_device

KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")  # vLLM takes int8_per_token_head too, but on a CPU its answers are wrong
CASE = ["kv_cache_dtype", "kind", "prompt_tokens", "concurrency", "round", "model"]
LATENCIES = [f"{what}_ms_{p}" for what in ("ttft", "itl") for p in ("p50", "p95", "p99")]
EQUAL = 1e-4  # nats a token: two float32 implementations of one model differ by less


@dataclass(frozen=True)
class Settings:
    """configs/serve.yaml, where each key has its reason."""

    wandb: WandbConfig
    ckpt: str | None
    ckpt2: str | None
    sweep: str
    name: str | None
    again: bool
    memory: str | int
    kv_cache_dtype: list | None
    concurrency: list
    prompt_tokens: list
    output_tokens: int
    requests: int
    flood: int
    rounds: int
    windows: int
    window: int | None
    source: str | None
    context: int | None
    dtype: str
    eager: bool
    start_s: int | float
    limit_s: int | float
    device: str
    threads: int | None
    out: str

    def __post_init__(self):
        if self.ckpt is None:
            raise ValueError("ckpt=… is needed: a Hugging Face folder, or a checkpoint of train.py or uptrain.py")
        for key, low, high in (
            ("output_tokens", 2, 2**20), ("requests", 1, 1000), ("flood", 0, 10_000), ("rounds", 1, 100), ("windows", 0, 10_000),
            ("window", 2, 2**20), ("context", 4, 2**24), ("threads", 1, 1024), ("start_s", 1, 86_400), ("limit_s", 1, 86_400),
        ):  # fmt: skip
            value = getattr(self, key)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{key}={value} is not allowed: {low} to {high:,}")
        for key, high in (("concurrency", 1024), ("prompt_tokens", 2**20)):
            values = getattr(self, key)
            if any(type(n) is not int or not 1 <= n <= high for n in values) or len(set(values)) < len(values):
                raise ValueError(f"{key}={values} is not allowed: a list of different whole numbers from 1 to {high:,}")
        if bool(self.concurrency) != bool(self.prompt_tokens) or (self.flood and not self.prompt_tokens):
            raise ValueError(
                "concurrency and prompt_tokens go together: both lists, or flood=0 concurrency=[] prompt_tokens=[]"
            )
        dtypes = self.kv_cache_dtype
        if dtypes is not None and (not dtypes or set(dtypes) - set(KV_DTYPES) or len(set(dtypes)) < len(dtypes)):
            raise ValueError(f"kv_cache_dtype={dtypes} is not allowed: some of {', '.join(KV_DTYPES)}, or null")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={self.dtype} is not allowed: auto, float32, bfloat16 or float16")


# ---------------------------------------------------------------------------------------------------------------------
# what is measured


def checked(cfg, models, device):
    """(kv_cache_dtypes, dtype, memory, context, why no FP8) of a load that these models can carry here; InputError for others."""
    dtype = cfg.dtype if cfg.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    memory = quantity("memory", cfg.memory)
    for model in models:
        if why := serving.why_not_served(model["shape"], device):
            raise InputError(f"{model['name']}: {why}")
        if cfg.windows and not model["recall"]:
            check_readable(model)
    no_fp8 = next(filter(None, (serving.why_no_fp8(model["shape"], device) for model in models)), None)
    kv_dtypes = cfg.kv_cache_dtype or (["auto"] if no_fp8 else ["auto", "fp8"])
    if no_fp8 and any(kv.startswith("fp8") for kv in kv_dtypes):
        raise InputError(f"kv_cache_dtype={kv_dtypes} does not run: {no_fp8}; kv_cache_dtype=[auto] does")
    least = min(models, key=lambda m: m["shape"]["context"])
    context = cfg.context or least["shape"]["context"]
    if context > least["shape"]["context"]:
        raise InputError(f"context={context} is more than {least['name']} was made for: {least['shape']['context']}")
    longest = max(cfg.prompt_tokens, default=0) + cfg.output_tokens
    if longest > context:
        raise InputError(
            f"prompt_tokens={max(cfg.prompt_tokens)} and output_tokens={cfg.output_tokens} are more than the context of "
            f"{context} tokens: {max(1, context - cfg.output_tokens)} tokens of prompt fit"
        )
    if cfg.windows and cfg.window and cfg.window + 2 > context:
        raise InputError(f"window={cfg.window} is too long for a context of {context} tokens: {context - 2} or fewer")
    if cfg.windows and any(model["recall"] for model in models):
        recall_examples(cfg.windows, context)
    for model in models:
        blocks = serving.predicted_blocks(model["shape"], memory, serving.BLOCK[device], getattr(torch, dtype).itemsize)
        if blocks * serving.BLOCK[device] < context:
            held = f"{blocks * serving.BLOCK[device]:,} of the {context:,} tokens of one sequence of {model['name']}"
            raise InputError(f"memory={cfg.memory} holds {held}: more memory, or a shorter context=… is needed")
    return kv_dtypes, dtype, memory, context, no_fp8


def cases(cfg, kv_dtypes, models):
    """What is measured, in this order: each load with all models in turns, each round in the other order."""
    about = {model["name"]: "recall" if model["recall"] else "loss" for model in models}
    for kv in kv_dtypes:
        loads = [("loss", 0, 0)] if cfg.windows else []
        loads += [("load", prompt, n) for prompt in cfg.prompt_tokens for n in cfg.concurrency]
        loads += [("flood", max(cfg.prompt_tokens), 0)] if cfg.flood else []
        for kind, prompt, n in loads or [("capacity", 0, 0)]:
            for i in range(cfg.rounds if kind in ("load", "flood") else 1):
                for name in about if i % 2 == 0 else reversed(about):
                    what = about[name] if kind == "loss" else kind
                    yield dict(zip(CASE, (kv, what, prompt, n, i, name), strict=True))


def measure(case, cfg, model, server, load, asked):
    """The numbers of one case; `asked` are windows of text, or the examples of recall."""
    if case["kind"] == "capacity":
        return {}
    if case["kind"] == "loss":
        served, ours = serving.prompt_loss(server, model["name"], asked), our_loss(model, asked)
        return {"loss_served": served, "loss_ours": ours, "tokens": sum(len(window) - 1 for window in asked)}
    if case["kind"] == "recall":
        tokens, answers = asked
        served, ours = serving.greedy_answers(server, model["name"], tokens.tolist()), our_answers(model, tokens)

        def share(these, those):
            return sum(a == b for a, b in zip(these, those, strict=True)) / len(answers)

        found = {"found_served": share(served, answers), "found_ours": share(ours, answers), "same": share(served, ours)}
        return found | {"examples": len(answers), "tokens": tokens.numel()}
    n = case["concurrency"]
    requests = n * cfg.requests if n else cfg.flood
    result = load.ask(
        serving.load_arguments(
            server, model["folder"], model["name"], prompt=case["prompt_tokens"], output=cfg.output_tokens,
            requests=requests, concurrency=n, warmups=min(n or 8, 8), seed=case["round"],
        ),
        cfg.limit_s,
    )  # fmt: skip
    wanted = requests * case["prompt_tokens"], requests * cfg.output_tokens
    if (result["total_input_tokens"], result["total_output_tokens"]) != wanted:
        raise InputError(
            f"the load was {result['total_input_tokens']} and {result['total_output_tokens']} tokens in place of "
            f"{wanted[0]} and {wanted[1]}: {model['name']}'s tokenizer does not give random tokens back as they were"
        )
    numbers = {"requests": requests, "output_tokens": cfg.output_tokens, "tokens_per_s": result["output_throughput"]}
    for name in LATENCIES:
        what, _, p = name.split("_")
        numbers[name] = result[f"{p}_{what}_ms"]
    return numbers


def say(row):
    where = f"{row['kv_cache_dtype']:<5} {row['model']:<12}"
    if row["kind"] == "capacity":
        return
    if row["kind"] == "loss":
        print(
            f"{where} loss {row['loss_served']:.5f} served, {row['loss_ours']:.5f} ours, {row['tokens']:,} tokens", flush=True
        )
        return
    if row["kind"] == "recall":
        print(
            f"{where} finds {row['found_served']:.1%} of {row['examples']} keys served, {row['found_ours']:.1%} as ours, "
            f"{row['same']:.1%} of the answers are the same",
            flush=True,
        )
        return
    load = f"{row['prompt_tokens']} tokens, " + (f"{row['concurrency']} at once" if row["concurrency"] else "all at once")
    print(
        f"{where} {load:<24} {row['tokens_per_s']:8,.0f} tokens/s, first token {row['ttft_ms_p50']:.0f} ms, "
        f"then {row['itl_ms_p50']:.1f} ms (p95 {row['itl_ms_p95']:.1f}, p99 {row['itl_ms_p99']:.1f})",
        flush=True,
    )


# ---------------------------------------------------------------------------------------------------------------------
# what is written


def write_rows(path, rows):
    """Put a run's rows into the CSV in place of those it had there."""
    table = pd.DataFrame(rows)
    if path.exists():
        before = pd.read_csv(path)
        table = pd.concat([before[before.run != rows[0]["run"]], table], ignore_index=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, table.to_csv(index=False, float_format="%.9g").encode())


def pick(rows, **values):
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def middle(rows, name):
    return statistics.median(row[name] for row in rows)


def title(row):
    return f"{row['model']}, {heads(row['n_kv'], row['n_head'])}"


def capacity_lines(rows):
    """Rows of text: what each server's cache holds beside what was predicted, and the loss; each model beside the first."""
    lines = [("KV cache", "model", "blocks", "tokens held", "predicted", "of the first", "n_kv would give", "loss", "ours",
              "difference")]  # fmt: skip
    for kv, name in dict.fromkeys((row["kv_cache_dtype"], row["model"]) for row in rows):
        row, base = pick(rows, kv_cache_dtype=kv, model=name)[0], rows[0]
        ratio, width = row["capacity_tokens"] / base["capacity_tokens"], base["bytes_per_token"] / row["bytes_per_token"]
        cells = [kv, title(row), f"{row['blocks']:,} x {row['block_size']}", f"{row['capacity_tokens']:,}"]
        cells += [f"{row['predicted_tokens']:,}", f"{ratio:.3f}x", f"{width:.3f}x"]
        loss = pick(rows, kv_cache_dtype=kv, model=name, kind="loss")
        if loss:
            served, ours = loss[0]["loss_served"], loss[0]["loss_ours"]
            cells += [f"{served:.5f}", f"{ours:.5f}", f"{served - ours:+.6f}"]
        lines.append((*cells, *[""] * (len(lines[0]) - len(cells))))
    return lines if any(line[-1] for line in lines[1:]) else [line[:-3] for line in lines]


def recall_lines(rows):
    """Rows of text: how many keys each model finds, served and not."""
    lines = [("KV cache", "model", "tokens held", "found, served", "found, our own", "the same answer")]
    for row in pick(rows, kind="recall"):
        shares = (f"{row[key]:.1%}" for key in ("found_served", "found_ours", "same"))
        lines.append((row["kv_cache_dtype"], title(row), f"{row['capacity_tokens']:,}", *shares))
    return lines


def load_lines(rows):
    """Rows of text: every load, each model beside the first, medians over the rounds."""
    lines = [("KV cache", "prompt", "at once", "model", "tokens/s", "of the first", "first token, ms: p50, p95, p99",
              "next ones, ms: p50, p95, p99", "cache holds")]  # fmt: skip
    loads = [row for row in rows if row["kind"] in ("load", "flood")]
    for kv, kind, prompt, n in dict.fromkeys(tuple(r[key] for key in CASE[:4]) for r in loads):
        load = dict(zip(CASE, (kv, kind, prompt, n), strict=False))
        beside = pick(loads, model=rows[0]["model"], **load)
        for name in dict.fromkeys(row["model"] for row in rows):
            some = pick(loads, model=name, **load)
            if some and beside:
                speed = middle(some, "tokens_per_s")
                cells = [kv, str(prompt), str(n or f"all {some[0]['requests']:.0f}"), title(some[0]), f"{speed:,.0f}"]
                cells.append(f"{speed / middle(beside, 'tokens_per_s'):.2f}x")
                cells += [", ".join(f"{middle(some, x):,.1f}" for x in LATENCIES if x.startswith(w)) for w in ("ttft", "itl")]
                lines.append((*cells, f"{some[0]['sequences_fit']:,.0f}"))
    return lines


def report(rows):
    """The tables on the terminal."""
    held = f"KV cache of {readable(rows[0]['memory_bytes'])}, in whole blocks: what is left below one is unused"
    load = "Load, medians over the rounds; how many of its sequences the cache holds at once"
    found = "Recall: the key's value, greedily"
    for name, lines in ((held, capacity_lines(rows)), (found, recall_lines(rows)), (load, load_lines(rows))):
        if len(lines) > 1:
            columns(name, lines, "".join("<" if cell in ("KV cache", "model") else ">" for cell in lines[0]))


def measured_before(folder):
    """The rows of an interrupted or finished run."""
    path = folder / "metrics.jsonl"
    rows = [read_line(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{k: v for k, v in row.items() if k != "step"} for row in rows if row]


@script("serve", Settings)
def main(cfg):
    device = set_up_device(cfg.device).type
    models = [describe(key, getattr(cfg, key)) for key in ("ckpt", "ckpt2") if getattr(cfg, key) is not None]
    names = [model["name"] for model in models]
    if len(set(names)) < len(names):
        raise InputError(f"ckpt={cfg.ckpt} and ckpt2={cfg.ckpt2} are both called {names[0]}: link one under another name")
    kv_dtypes, dtype, memory, context, no_fp8 = checked(cfg, models, device)
    if not serving.PYTHON.exists():
        raise InputError(f"no vLLM in {serving.PYTHON.parent.parent}: `make serve-setup` builds it")
    name = cfg.name or "serve-" + "-".join(names)
    config = {
        "script": "serve", "sweep": cfg.sweep, "name": name, "seed": 0,
        "models": [{"name": m["name"], "n_kv": m["shape"]["n_kv"], "weights": m["weights"]} for m in models],
        "memory": memory, "kv_cache_dtype": kv_dtypes, "dtype": dtype, "context": context, "eager": cfg.eager, "device": device,
        "concurrency": cfg.concurrency, "prompt_tokens": cfg.prompt_tokens, "output_tokens": cfg.output_tokens,
        "requests": cfg.requests, "flood": cfg.flood, "rounds": cfg.rounds, "windows": cfg.windows, "window": cfg.window,
        "threads": cfg.threads,
    }  # fmt: skip
    folder, state = open_run(config)
    rows = [] if cfg.again else measured_before(folder)
    todo = list(cases(cfg, kv_dtypes, models))
    done = {tuple(row[key] for key in CASE) for row in rows}
    left = [case for case in todo if tuple(case.values()) not in done]
    if state == "finished" and not cfg.again:
        print(f"measured before, on {rows[0]['machine']} (again=true measures anew, name=… beside it)")
    else:
        if no_fp8 and cfg.kv_cache_dtype is None:
            print(f"no FP8 cache here: {no_fp8}")
        print(f"{folder}: {len(left)} of {len(todo)} measurements to go", flush=True)
        with (
            serving.handled(serving.leave),
            Run(
                folder, name=name, group=cfg.sweep, job_type="serve", config=config, resume_step=len(rows) if rows else None,
                **{"mode": cfg.wandb.mode, "project": cfg.wandb.project, "entity": cfg.wandb.entity},
            ) as run,
        ):  # fmt: skip
            for kv in kv_dtypes:
                some = [case for case in left if case["kv_cache_dtype"] == kv]
                if some:
                    measure_all(some, kv, cfg, models, folder, run, rows, (dtype, memory, context, device))
            capacities = {f"capacity/{r['kv_cache_dtype']}/{r['model']}": r["capacity_tokens"] for r in rows}
            run.summary({"measurements": len(rows), **capacities})
    write_rows(Path(cfg.out), rows)
    report(rows)
    print(f"\n{len(rows)} rows -> {cfg.out}")


def measure_all(some, kv, cfg, models, folder, run, rows, how):
    """Start the servers that these cases of one kv_cache_dtype need, measure, stop them."""
    dtype, memory, context, device = how
    env, made_by, start = serving.environment(cfg.threads), provenance(), time.monotonic()
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(serving.Load(folder / "load.log", env))
        servers, about, asked = {}, {}, {}
        for model in [m for m in models if any(case["model"] == m["name"] for case in some)]:
            port = serving.free_port()
            command = serving.server_command(
                export(model, folder), port, name=model["name"], memory=memory, dtype=dtype, kv_cache_dtype=kv,
                context=context, eager=cfg.eager, cuda=device == "cuda",
            )  # fmt: skip
            server = serving.Server(command, port, folder / f"{model['name']}-{kv}.log", env)
            servers[model["name"]] = stack.enter_context(server)
        for name, server in servers.items():
            model = next(m for m in models if m["name"] == name)
            shape = model["shape"]
            server.wait(cfg.start_s)
            blocks, size = serving.reported_blocks(server.get("/metrics"))
            itemsize = 1 if kv.startswith("fp8") else getattr(torch, dtype).itemsize
            predicted = serving.predicted_blocks(shape, memory, size, itemsize)
            about[name] = {
                "run": f"{cfg.sweep}/{folder.name}", "dtype": dtype, "n_layer": shape["n_layer"],
                "n_head": shape["n_head"], "n_kv": shape["n_kv"], "head_dim": shape["head_dim"], "memory_bytes": memory,
                "bytes_per_token": 2 * shape["n_layer"] * shape["n_kv"] * shape["head_dim"] * itemsize, "block_size": size,
                "blocks": blocks, "capacity_tokens": blocks * size, "predicted_tokens": predicted * size,
                "machine": made_by["machine"], "commit": commit(made_by),
            }  # fmt: skip
            held = f"{blocks:,} blocks of {size} tokens, {blocks * size:,} ({predicted * size:,} predicted)"
            print(f"{kv:<5} {name:<12} serves after {time.monotonic() - start:.0f} s: {held}", flush=True)
            if cfg.windows and model["recall"]:
                asked[name] = recall_examples(cfg.windows, context)
            elif cfg.windows:
                asked[name] = windows_of_text(model, cfg.source, cfg.windows, cfg.window, context)
        about_vllm = load.read(cfg.start_s)["how"]
        for case in some:
            model = next(m for m in models if m["name"] == case["model"])
            numbers = measure(case, cfg, model, servers[model["name"]], load, asked.get(model["name"]))
            row = {**case, **about[model["name"]], "vllm": about_vllm, **numbers}
            if case["kind"] in ("load", "flood"):
                length = case["prompt_tokens"] + cfg.output_tokens
                row["sequences_fit"] = serving.sequences_at_once(row["blocks"], row["block_size"], length)
            run.log(row, step=len(rows))  # first: what has been said is kept, whatever comes next
            rows.append(row)
            say(row)
            if (kv, dtype) == ("auto", "float32"):
                if case["kind"] == "loss" and not abs(row["loss_served"] - row["loss_ours"]) < EQUAL:
                    print(f"note: the served model is not the model: its loss differs by more than {EQUAL:g}", flush=True)
                if case["kind"] == "recall" and row["same"] < 1:
                    print("note: not all answers are the model's own: where two tokens are as likely, that may be", flush=True)


if __name__ == "__main__":
    main()
