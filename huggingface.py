"""
Hugging Face folders, in and out: GPT-2s are models of the gpt2 dialect, Llamas of the llama dialect.

    model, tokenizer = from_huggingface("path/to/folder")
    to_huggingface(model, tokenizer, "out")              what transformers and vLLM load
    checkpoint_from("path/to/folder")                    the dict that storage.load_checkpoint gives for one of our files

Of a folder only config.json, safetensors and tokenizer.json are read: nothing in it can run code. What the dialects cannot
express is refused by its name.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cli import InputError
from data.tokenizer import HuggingFaceTokenizer, put_gpt2_files, tokenizer_from
from model import GPT, ROPE_LINEAR, ROPE_LLAMA3, GPTConfig
from tracking import provenance

OURS = "nanogqa.json"  # beside the usual files of a folder that we wrote: what those cannot say, and that we may replace it
WRITTEN = {OURS, "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "calibration.pt"}
INDEX = "model.safetensors.index.json"
# of a repository on the Hub; whole models under other names (Mistral's consolidated.safetensors) would be fetched twice
HUB_FILES = ["config.json", "model*.safetensors", INDEX, "tokenizer.json", "tokenizer_config.json", OURS]
MOST_TOKENS = 2**20  # of a context: a table of angles is made for all of them

# What the stock classes do if a config says so, and our dialects do not; beside it the values that ask for nothing
NOT_EXPRESSED = {
    "quantization_config": (), "auto_map": (),  # weights of few bits; code of the folder's own
    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    "attention_bias": (False,), "mlp_bias": (False,), "partial_rotary_factor": (1,), "rotary_pct": (1,),
    "use_qk_norm": (False,), "qk_layernorm": (False,), "num_local_experts": (0, 1), "num_experts": (0, 1),
}  # fmt: skip
# buffers that older versions of transformers saved beside the weights
BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


# ---------------------------------------------------------------------------------------------------------------------
# config.json


def read_json(path, most=2**26):
    try:
        if path.stat().st_size > most:
            raise InputError(f"{path.name} is larger than {most // 2**20} MiB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no {path.name}") from None
    except OSError as error:
        raise InputError(f"{path.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, InputError) else InputError(f"{path.name} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path.name} is no JSON object")
    return value


def config_from(c):
    """The GPTConfig of a config.json's dict. InputError naming what is missing or cannot be expressed."""
    family = c.get("model_type")
    if family not in ("gpt2", "llama", "mistral"):
        raise InputError(f"model_type={family!r} cannot be read: gpt2, llama or mistral can")
    for key, fine in NOT_EXPRESSED.items():
        if c.get(key) is not None and c[key] not in fine:
            raise InputError(f"{key}={str(c[key])[:60]} cannot be expressed here")

    def number(key, default=None, most=2**31):
        value = default if c.get(key) is None else c[key]
        if type(value) is not int or not 1 <= value <= most:
            raise InputError(f"{key}={str(value)[:60]} is not a whole number from 1 to {most}")
        return value

    def real(where, key, default=None):
        value = where.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
            raise InputError(f"{key}={str(value)[:60]} is not a number")
        return float(value)

    def of(key, default, known):
        value = c.get(key, default)
        if not isinstance(value, (str, bool)) or value not in known:
            raise InputError(f"{key}={str(value)[:60]} cannot be expressed here: {', '.join(map(str, known))} can")
        return value

    gpt2 = family == "gpt2"
    n_embd = number("n_embd" if gpt2 else "hidden_size")
    n_head = number("n_head" if gpt2 else "num_attention_heads")
    eps = real(c, "layer_norm_epsilon", 1e-5) if gpt2 else real(c, "rms_norm_eps", 1e-6)
    shape = {
        "vocab_size": number("vocab_size"), "n_embd": n_embd, "n_head": n_head,
        "n_layer": number("n_layer" if gpt2 else "num_hidden_layers"),
        "block_size": number("n_positions" if gpt2 else "max_position_embeddings", most=MOST_TOKENS),
        "norm_eps": None if eps == 1e-5 else eps,
        "tie_weights": of("tie_word_embeddings", gpt2, (True, False)),
    }  # fmt: skip
    if gpt2:
        exact = of("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh", "gelu")) == "gelu"
        shape |= {"dialect": "gpt2", "n_kv": n_head, "bias": True, "gelu": None if exact else "tanh"}
        n_inner = number("n_inner", 4 * n_embd)
    else:
        of("hidden_act", "silu", ("silu", "swish"))
        window = c.get("sliding_window", 4096) if family == "mistral" else None
        if window is not None and not (type(window) is int and window >= shape["block_size"]):
            raise InputError(
                f"sliding_window={str(window)[:60]} is below the context of {shape['block_size']}, and windows cannot be "
                f"expressed here: max_position_embeddings={str(window)[:60]} in config.json leaves it without effect"
            )
        kinds = c.get("layer_types") or []
        if window is None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
            raise InputError("layer_types other than full_attention cannot be expressed here")
        # transformers 4 says rope_theta and rope_scaling, 5 says rope_parameters; where both are, the former win, as there
        rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise InputError(f"rope_scaling={str(rope)[:60]} is no JSON object")
        base = real(rope, "rope_theta", c.get("rope_theta", 10000.0))
        kind = rope.get("rope_type", rope.get("type", "default"))
        keys = {"default": (), "linear": ROPE_LINEAR, "llama3": ROPE_LLAMA3}.get(kind if isinstance(kind, str) else None)
        if keys is None:
            raise InputError(
                f"RoPE scaling of the type {str(kind)[:60]!r} cannot be expressed here: default, linear, llama3 can"
            )
        if rope.get("partial_rotary_factor", 1) != 1:
            raise InputError(f"partial_rotary_factor={str(rope['partial_rotary_factor'])[:60]} cannot be expressed here")
        scaling = {"rope_type": kind} | {key: real(rope, key) for key in keys} if keys else None
        if kind == "llama3":  # a number of tokens, of which transformers wants an int again
            scaling["original_max_position_embeddings"] = int(scaling["original_max_position_embeddings"])
        n_inner = number("intermediate_size")
        hd = number("head_dim", max(1, n_embd // n_head))
        shape |= {
            "dialect": "llama", "n_kv": number("num_key_value_heads", n_head), "rope_base": base, "rope_scaling": scaling,
            "head_size": None if hd * n_head == n_embd else hd,
        }  # fmt: skip
    try:
        config = GPTConfig(**shape)
        return config if config.inner == n_inner else GPTConfig(**shape, n_inner=n_inner)
    except ValueError as error:
        raise InputError(f"config.json's model cannot be built: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# weights


def places(c):
    """
    Where each of our tensors lies in a Hugging Face file: (our name, {their name: its shape there}, transposed), in order.
    Several of theirs are ours one below the other. GPT-2's Conv1D keeps what nn.Linear has transposed.
    """
    C, q, kv = c.n_embd, c.n_head * c.head_dim, c.n_kv * c.head_dim
    if c.dialect == "gpt2":
        pre, norms = "transformer.", {"ln_1": "ln_1", "ln_2": "ln_2"}
        matrices = {"attn.c_attn": (q + 2 * kv, C), "attn.c_proj": (C, q), "mlp.c_fc": (c.inner, C), "mlp.c_proj": (C, c.inner)}
        matrices = {name: {name: shape} for name, shape in matrices.items()}
        wte, layer, norm = "wte", "h", "ln_f"
        yield "wpe.weight", {f"{pre}wpe.weight": (c.block_size, C)}, False
    else:
        pre, norms = "model.", {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
        matrices = {
            "attn.c_attn": {"self_attn.q_proj": (q, C), "self_attn.k_proj": (kv, C), "self_attn.v_proj": (kv, C)},
            "attn.c_proj": {"self_attn.o_proj": (C, q)},
            "mlp.c_gate": {"mlp.gate_proj": (c.inner, C)},
            "mlp.c_fc": {"mlp.up_proj": (c.inner, C)},
            "mlp.c_proj": {"mlp.down_proj": (C, c.inner)},
        }
        wte, layer, norm = "embed_tokens", "layers", "norm"
    gpt2 = c.dialect == "gpt2"
    parts = ("weight", "bias") if gpt2 else ("weight",)
    yield "wte.weight", {f"{pre}{wte}.weight": (c.vocab_size, C)}, False
    for i in range(c.n_layer):
        at = f"{pre}{layer}.{i}"
        for ours, theirs in norms.items():
            for part in parts:
                yield f"h.{i}.{ours}.{part}", {f"{at}.{theirs}.{part}": (C,)}, False
        for ours, theirs in matrices.items():
            yield f"h.{i}.{ours}.weight", {f"{at}.{n}.weight": s[::-1] if gpt2 else s for n, s in theirs.items()}, gpt2
            if gpt2:
                yield f"h.{i}.{ours}.bias", {f"{at}.{n}.bias": s[:1] for n, s in theirs.items()}, False
    for part in parts:
        yield f"ln_f.{part}", {f"{pre}{norm}.{part}": (C,)}, False
    if not c.tie_weights:
        yield "lm_head.weight", {"lm_head.weight": (c.vocab_size, C)}, False


def weight_files(folder):
    """The safetensors files of a folder: one, or those its index names. None of them can lie elsewhere."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / INDEX).is_file():
        pickles = next((p.name for p in sorted(folder.glob("*")) if p.suffix in (".bin", ".pt", ".pth")), None)
        why = f" ({pickles} is not read, it could run code: save_pretrained of transformers makes the other)" if pickles else ""
        raise InputError(f"there is no model.safetensors, nor {INDEX}{why}")
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise InputError(f"{INDEX} has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", name):
            raise InputError(f"{INDEX} names {str(name)[:60]!r}, which is no safetensors file of this folder")
    return [folder / name for name in sorted(set(names.values()))]


def read_weights(folder, c):
    """Our tensors by name, in the dtypes of the files. What is there is compared with the config before any of it is read."""
    prefix = "transformer." if c.dialect == "gpt2" else "model."
    found = {}  # name, always with the prefix: (file, name in it)
    with contextlib.ExitStack() as stack:
        for path in weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                names = list(file.keys())
            except (SafetensorError, OSError, RuntimeError) as error:  # the last: no memory to map it into
                raise InputError(f"{path.name} cannot be read: {error}") from None
            for name in names:
                bare = name.removeprefix(prefix)
                full = name if bare == "lm_head.weight" else prefix + bare
                if full in found:
                    raise InputError(f"the tensor {name} is there twice")
                if not BUFFERS.fullmatch(bare):
                    found[full] = file, name
        wanted = {}
        for _, theirs, _ in places(c):
            for name, shape in theirs.items():
                if name not in found:
                    raise InputError(f"the tensor {name} is missing")
                file, stored = found[name]
                there = file.get_slice(stored)
                if tuple(there.get_shape()) != shape:
                    raise InputError(f"the tensor {name} is {list(there.get_shape())}, config.json makes it {list(shape)}")
                if there.get_dtype() not in ("F32", "F16", "BF16", "F64"):
                    raise InputError(f"the tensor {name} is of the type {there.get_dtype()}: F32, F16 and BF16 can be read")
                wanted[name] = file, stored
        tied = found.pop("lm_head.weight", None) if c.tie_weights else None
        if more := sorted(found.keys() - wanted.keys()):
            raise InputError(f"the {c.dialect} dialect has no place for {len(more)} tensor(s): {', '.join(more[:3])}")

        def read(name):
            file, stored = wanted[name]
            return file.get_tensor(stored)

        state = {}
        for ours, theirs, transposed in places(c):
            parts = [read(name) for name in theirs]
            whole = torch.cat(parts) if len(parts) > 1 else parts[0]
            state[ours] = whole.t().contiguous() if transposed else whole
        if tied and not (list(tied[0].get_slice(tied[1]).get_shape()) == list(state["wte.weight"].shape)
                         and torch.equal(tied[0].get_tensor(tied[1]), state["wte.weight"])):  # fmt: skip
            raise InputError("tie_word_embeddings is true, but lm_head.weight differs from the embedding")
        return state


# ---------------------------------------------------------------------------------------------------------------------
# in


def read_tokenizer(folder, config, ours):
    """A tokenizer's state for the folder: what we noted there, GPT-2's by its name, any other with its whole file."""
    if isinstance(ours.get("tokenizer"), dict):
        return tokenizer_from(ours["tokenizer"]).state()
    path = folder / "tokenizer.json"
    if not path.is_file():
        if config["model_type"] == "gpt2" and config["vocab_size"] >= 50257 and not (folder / "vocab.json").is_file():
            return {"kind": "gpt2", "n_vocab": 50257}
        return {"kind": "none"}
    read_json(path)  # its size and that it is JSON; what it says is the library's business
    text = path.read_text(encoding="utf-8")
    if put_gpt2_files(text):
        return {"kind": "gpt2", "n_vocab": 50257}
    beside = folder / "tokenizer_config.json"
    said = read_json(beside) if beside.is_file() else {}
    said.pop("auto_map", None)  # names code that is not carried along
    bos, eos = (config.get(key) for key in ("bos_token_id", "eos_token_id"))
    return HuggingFaceTokenizer(text, json.dumps(said, ensure_ascii=False), bos, eos).state()


def name_of(folder):
    """What to call a folder in runs/: a snapshot of the Hub by its repository, any other by its own name."""
    folder = Path(folder).resolve()
    name = folder.name
    if folder.parent.name == "snapshots":
        name = folder.parent.parent.name.split("--")[-1]
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "model"


def checkpoint_from(folder):
    """
    A checkpoint's dict, like those of train.py, of a Hugging Face folder. Embeddings beyond the tokenizer's last token, a
    padding that some add for speed, are dropped. InputError, naming the folder, for what cannot be read.
    """
    folder = Path(folder)
    try:
        config = read_json(folder / "config.json")
        c = config_from(config)
        ours = read_json(folder / OURS) if (folder / OURS).is_file() else {}
        tokenizer = read_tokenizer(folder, config, ours)
        state = read_weights(folder, c)
        changes = {}
        if tokenizer["kind"] != "none":
            size = tokenizer_from(tokenizer).vocab_size
            if size > c.vocab_size:
                raise InputError(f"its tokenizer knows {size:,} tokens, its config.json {c.vocab_size:,}")
            for name in ("wte.weight", "lm_head.weight"):
                if name in state:
                    state[name] = state[name][:size]
            changes["vocab_size"] = size
        if ours.get("bias") is False and not any(p.any() for name, p in state.items() if name.endswith(".bias")):
            changes["bias"] = False  # zeros that only GPT2LMHeadModel needs
            state = {name: p for name, p in state.items() if not name.endswith(".bias")}
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    if c.tie_weights:
        state["lm_head.weight"] = state["wte.weight"]
    sha = hashlib.sha256()
    for path in [folder / "config.json", *weight_files(folder)]:
        with open(path, "rb") as f:
            sha.update(hashlib.file_digest(f, "sha256").digest())
    model_config = asdict(c) | changes
    # no sha256 of a text: it was trained on none of ours, so any of them may measure it
    data = {
        "dataset": "shakespeare_bpe" if tokenizer["kind"] == "gpt2" else "shakespeare_own", "corpus": "a text of its own",
        "sha256": None, "vocab_size": model_config["vocab_size"],
    }  # fmt: skip
    known = ours.get("data")
    if isinstance(known, dict) and all(isinstance(known.get(key), str) for key in ("dataset", "corpus")):
        data |= known
    return {
        "model": state, "model_config": model_config, "iteration": 0, "total_iterations": 0, "seed": 0,
        "tokenizer": tokenizer, "data": data, "parent": None,
        # part of the sum is in its name, so that another model in the same folder gets runs of its own
        "config": {"script": "huggingface", "sweep": "pretrained", "name": f"{name_of(folder)}-{sha.hexdigest()[:8]}", "seed": 0},
        "provenance": {**provenance(), "sha256": sha.hexdigest(), "folder": name_of(folder)},
    }  # fmt: skip


def from_huggingface(folder):
    """The GPT in float32 and its tokenizer, or None where it brought none, of a Hugging Face folder."""
    checkpoint = checkpoint_from(folder)
    model = GPT(GPTConfig(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    return model, None if checkpoint["tokenizer"]["kind"] == "none" else tokenizer_from(checkpoint["tokenizer"])


# ---------------------------------------------------------------------------------------------------------------------
# out


def config_to(c, dtype, bos=None, eos=None):
    """config.json's dict for a GPTConfig. InputError naming what no stock class can express, and the nearest fix."""
    both = {
        "vocab_size": c.vocab_size, "tie_word_embeddings": c.tie_weights, "bos_token_id": bos, "eos_token_id": eos,
        "dtype": dtype, "torch_dtype": dtype,  # as transformers 5 and 4 call it
    }  # fmt: skip
    if c.dialect == "gpt2":
        if c.n_kv != c.n_head:
            raise InputError(
                f"n_kv={c.n_kv}: GPT2LMHeadModel has a KV head for each of its {c.n_head} query heads and cannot express "
                "fewer; models of the llama dialect can be exported with any n_kv (train.py model=llama)"
            )
        if c.head_size not in (None, c.n_embd // c.n_head) or c.n_embd % c.n_head:
            raise InputError(f"head_size={c.head_size}: GPT2LMHeadModel can only have n_embd / n_head")
        return both | {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": c.block_size, "n_embd": c.n_embd,
            "n_layer": c.n_layer, "n_head": c.n_head, "n_inner": c.inner, "layer_norm_epsilon": c.eps,
            "activation_function": "gelu_new" if c.gelu == "tanh" else "gelu",
            "resid_pdrop": c.dropout, "embd_pdrop": c.dropout, "attn_pdrop": c.dropout,
        }  # fmt: skip
    if c.n_embd % c.n_head:
        raise InputError(f"n_embd={c.n_embd} is not divisible by n_head={c.n_head}: LlamaForCausalLM cannot express that")
    scaling = c.rope_scaling or {"rope_type": "default"}
    return both | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": c.n_embd, "intermediate_size": c.inner,
        "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head, "num_key_value_heads": c.n_kv, "head_dim": c.head_dim,
        "max_position_embeddings": c.block_size, "rms_norm_eps": c.eps, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "rope_theta": c.rope_base, "rope_scaling": c.rope_scaling,  # transformers 4
        "rope_parameters": {**scaling, "rope_theta": c.rope_base},  # transformers 5
    }  # fmt: skip


def weights_to(model, dtype):
    """Their tensors by name: our fused matrices cut into their rows, GPT-2's transposed; zeros for biases it must have."""
    state, tensors = model.state_dict(), {}
    for ours, theirs, transposed in places(model.config):
        if ours in state:
            whole = state[ours].detach().to("cpu", dtype)
            if not whole.isfinite().all():
                raise InputError(f"{ours} has numbers that {str(dtype).removeprefix('torch.')} cannot hold: dtype=float32 can")
        else:
            whole = torch.zeros(next(iter(theirs.values())), dtype=dtype)
        rows = [shape[-1 if transposed else 0] for shape in theirs.values()]
        for name, part in zip(theirs, whole.split(rows), strict=True):
            tensors[name] = (part.t() if transposed else part).contiguous()
    return tensors


def refuse_folder(folder):
    """InputError if something lies at `folder` that we did not write: an export replaces nothing else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir() or not (folder / OURS).is_file():
        raise InputError(f"out={folder} is there already and no folder that was exported from here: give another out=")
    if more := sorted({path.name for path in folder.iterdir()} - WRITTEN):
        raise InputError(f"out={folder} holds {more[0]}, which would be lost: move it, or give another out=")


def contents(model, tokenizer, dtype=torch.float32, notes=None):
    """
    What an exported folder holds, before any of it is written: the dicts of its JSON files, the text of tokenizer.json or
    None, the tensors. InputError for what the stock classes cannot express.
    """
    c, name = model.config, str(dtype).removeprefix("torch.")
    files = {"config.json": config_to(c, name, getattr(tokenizer, "bos", None), getattr(tokenizer, "eos", None))}
    files[OURS] = {"bias": c.bias, **(notes or {})}
    if tokenizer is not None:
        said = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        said["model_max_length"] = c.block_size
        if isinstance(tokenizer, HuggingFaceTokenizer):
            said = json.loads(tokenizer.state()["config"] or "{}") or said
        else:
            files[OURS]["tokenizer"] = tokenizer.state()
            for key, i in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos)):
                said |= {} if i is None else {key: tokenizer.decode([i])}
        files["tokenizer_config.json"] = said
    return files, None if tokenizer is None else tokenizer.json(), weights_to(model, dtype)


def to_huggingface(model, tokenizer, folder, dtype=torch.float32, notes=None):
    """
    Write a model, and its tokenizer unless that is None, as a Hugging Face folder: whole or not at all. `notes` go into
    nanogqa.json. A folder that was written here before is replaced; InputError for any other, and for what the stock
    classes cannot express. Returns the names of the files.
    """
    folder = Path(os.path.abspath(folder))
    refuse_folder(folder)
    files, vocabulary, tensors = contents(model, tokenizer, dtype, notes)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        for file, value in files.items():
            (temporary / file).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if vocabulary is not None:
            (temporary / "tokenizer.json").write_text(vocabulary, encoding="utf-8")
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        for path in temporary.iterdir():
            with open(path, "rb") as f:
                os.fsync(f.fileno())
        written = sorted(path.name for path in temporary.iterdir())
        old = temporary.with_name(f"{temporary.name}.old")
        if folder.exists():
            os.rename(folder, old)
        try:
            os.rename(temporary, folder)
        except OSError:
            if old.exists():
                os.rename(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
        return written
    except OSError as error:
        raise InputError(f"out={folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
