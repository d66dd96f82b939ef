"""
Generate text from a checkpoint, streamed as it comes.

    python sample.py ckpt=mha.pt                                     500 characters after a newline
    python sample.py ckpt=mqa.pt prompt="ROMEO:" temperature=0       greedy
    python sample.py ckpt=gqa2.pt samples=4 top_k=10 seed=7          four at once, printed one after the other
    python sample.py ckpt=mha.pt cache=kivi cache.bits=4             with a quantised KV cache: fp8, kivi or kvquant
    python sample.py ckpt=mha.pt cache=none                          the same text as the default's without a KV cache
    python sample.py ckpt=PATH/TO/HF prompt="Hello"                  a GPT-2 or Llama in a Hugging Face folder, or on the Hub

Prints the text on stdout; on stderr what was generated how fast, and the KV cache's bytes: in use and allocated.
Past the model's context the newest half of the window is kept and generation goes on (decoding.py says how).
"""

import sys
import time
from dataclasses import dataclass

import torch

from cli import InputError, script
from data.tokenizer import continuation, tokenizer_from
from decoding import cache_config, check_sampling, generate, make_cache
from model import rng
from storage import find_checkpoint, load_calibration, load_checkpoint, load_model
from training import set_up_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """configs/sample.yaml, where each key has its reason."""

    ckpt: str
    prompt: str
    tokens: int
    samples: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    cache: dict
    dtype: str | None
    device: str
    threads: int | None

    def __post_init__(self):
        for key in ("tokens", "samples"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} is not allowed: a whole number of at least 1")
        if self.dtype not in (None, *DTYPES):
            raise ValueError(f"dtype={self.dtype} is not allowed: {', '.join(DTYPES)}, or null for the weights' own")
        object.__setattr__(self, "cache", cache_config(self.cache))
        check_sampling(self.temperature, self.top_k, self.top_p)


@script("sample", Settings)
def main(cfg):
    device = set_up_device(cfg.device, cfg.threads)
    path = find_checkpoint(cfg.ckpt)
    checkpoint = load_checkpoint(path, device)
    model = load_model(checkpoint, device).eval()
    tokenizer = tokenizer_from(checkpoint["tokenizer"])
    ids = tokenizer.encode(cfg.prompt)
    if not len(ids):
        raise InputError("prompt is empty: give at least one character")
    block = model.config.block_size
    if len(ids) > block:
        print(f"the prompt has {len(ids)} tokens, the context is {block}: only its last {block // 2} are read", file=sys.stderr)

    idx = torch.tensor(ids, device=device).repeat(cfg.samples, 1)  # [samples, T]
    cache = None
    if cfg.cache is not None:
        calibration = load_calibration(path, model, cfg.cache)
        cache = make_cache(model, len(ids) + cfg.tokens, cfg.samples, DTYPES.get(cfg.dtype), cfg.cache, calibration)
    sampling = {"temperature": cfg.temperature, "top_k": cfg.top_k, "top_p": cfg.top_p}
    steps = generate(model, idx, cfg.tokens, cache, **sampling, generator=rng(cfg.seed, "sample"))
    start = time.perf_counter()
    if cfg.samples == 1:
        print(cfg.prompt, end="", flush=True)
        pending, said = [], list(ids)
        for token in steps:
            pending.append(token.item())
            text = continuation(tokenizer, said, pending)
            if not text.endswith("\ufffd"):  # else half of a multi-byte character: wait for the rest
                print(text, end="", flush=True)
                said, pending = [*said[-8:], *pending], []
        print(continuation(tokenizer, said, pending))  # what was still waiting will not be completed
    else:
        new = torch.stack(list(steps), dim=1)  # [samples, tokens]
        for i, row in enumerate(new.tolist()):
            print(f"--- sample {i + 1}\n{cfg.prompt}{continuation(tokenizer, ids, row)}")
    seconds = time.perf_counter() - start
    n = cfg.samples * cfg.tokens
    of = f"{path}: {checkpoint['config']['sweep']}/{checkpoint['config']['name']}, n_kv={model.config.n_kv}"
    print(f"\n{n} tokens in {seconds:.2f} s: {n / seconds:,.0f} tokens/s ({of})", file=sys.stderr)
    if cache is not None:
        held = sum(cache.nbytes().values())
        print(
            f"KV cache ({cfg.cache.label()}): {held:,} bytes in use for {cache.length} tokens x {cfg.samples}, "
            f"{cache.capacity_nbytes():,} allocated for {cache.capacity}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
