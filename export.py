"""
Write a checkpoint as a Hugging Face folder, which transformers, vLLM and most other programs load.

    python export.py ckpt=mha.pt out=exported/mha
    python export.py ckpt=runs/llama/kv2-s1/last.pt out=exported/llama dtype=bfloat16

Models of the llama dialect become LlamaForCausalLM, those of the gpt2 dialect with n_kv = n_head GPT2LMHeadModel; what
these classes cannot express is refused. The tokenizer goes along, so a character model takes and gives text there too.
groups=2 also refuses, before hours are spent on it, what could not be exported, or served by vLLM here, with 2 KV heads.
Prints the files, and how to load them. The folder appears whole or not at all.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from cli import InputError, script
from data.tokenizer import tokenizer_from
from huggingface import config_to, refuse_folder, to_huggingface
from pooling import pooled_config
from serving import why_not_served
from storage import find_checkpoint, load_checkpoint, load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """configs/export.yaml, where each key has its reason."""

    ckpt: str
    out: str
    dtype: str
    groups: int | None

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} is not allowed: {', '.join(DTYPES)}")
        if not self.out.strip():
            raise ValueError("out is empty: give the folder to write")


def unserved(config, device):
    """Why vLLM does not serve such a model on a device, in words, or None: our dialects know no latent vectors and no windows."""
    return why_not_served({"head_dim": config.head_dim, "latent": None, "windowed": None}, device)


def refuse_later(path, config, groups):
    """InputError where a model could not go out with so many KV heads, or not be served by vLLM on this machine."""
    try:
        config_to(pooled_config(config, groups, "mean"), "float32")
    except ValueError as error:
        raise InputError(str(error)) from None
    if why := unserved(config, "cuda" if torch.cuda.is_available() else "cpu"):
        raise InputError(f"{path} cannot be served here: {why}")


@script("export", Settings)
def main(cfg):
    out = Path(cfg.out)
    refuse_folder(out)  # before a checkpoint of gigabytes is read
    path = find_checkpoint(cfg.ckpt)
    if path.resolve() == out.resolve():
        raise InputError(f"out={out} is the checkpoint itself: give another folder")
    checkpoint = load_checkpoint(path)
    model = load_model(checkpoint)
    if cfg.groups is not None:
        refuse_later(path, model.config, cfg.groups)
    textless = checkpoint["tokenizer"]["kind"] == "none"
    tokenizer = None if textless else tokenizer_from(checkpoint["tokenizer"])
    was = checkpoint["config"]
    notes = {
        "from": {"sweep": was["sweep"], "name": was["name"], "iteration": checkpoint["iteration"]},
        "data": checkpoint["data"],
    }
    files = to_huggingface(model, tokenizer, out, DTYPES[cfg.dtype], notes)
    c = model.config
    kind = "LlamaForCausalLM" if c.dialect == "llama" else "GPT2LMHeadModel"
    print(
        f"{out}: {kind}, {c.n_layer} layers, {c.n_head} query heads, n_kv={c.n_kv}, head_dim {c.head_dim}, context "
        f"{c.block_size:,}, {model.n_params():,} weights in {cfg.dtype}"
    )
    for name in files:
        print(f"  {(out / name).stat().st_size:>13,} bytes  {name}")
    print(
        f"\ntransformers  AutoModelForCausalLM.from_pretrained({str(out)!r})"
        + ("" if textless else f", AutoTokenizer.from_pretrained({str(out)!r})")
        + f"\nvLLM          python -m vllm.entrypoints.openai.api_server --model {out} --dtype {cfg.dtype}"
        + (" --skip-tokenizer-init" if textless else "")
        + ("" if textless else f"\nnanoGQA       python sample.py ckpt={out}")
    )
    if why := unserved(c, "cpu"):
        print(f"note: {why}")


if __name__ == "__main__":
    main()
