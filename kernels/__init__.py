"""
CPU kernels in C++, compiled once by the machine's own compiler (some seconds), and how Python calls them:

    decode.cpp    attend(q, k, v, past, store)          append to a KV cache and attend over it
                  Step(model)(idx, cache)               a whole decoding step in one call
    fp8.cpp, kivi.cpp, kvquant.cpp                      the same over quantised keys and values
    causal.cpp    causal_attention(q, k, v)             a whole sequence over itself, with gradients

`serves`, `attends` and `Step.serves` say whether they fit the tensors at hand. Where there is no compiler, or the tensors
are on another device, the answer is False, and PyTorch's own operations do the same work. The library is kept in build/,
named after what went into it: the sources, the flags, and what the compiler knows of this CPU.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).parent
# no errno, no traps: what lets a compiler use vectors for sqrt and for choices. Results stay those of IEEE arithmetic.
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-w"]
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MAX_ROWS = 64  # of queries a KV head, and of tokens in a step; for more, the libraries' blocking pays


@functools.cache
def library():
    """The compiled kernels as a ctypes library, or None, with one line on stderr that says why."""
    sources = sorted(HERE.glob("*.cpp"))
    compiler = next(filter(None, map(shutil.which, [os.environ.get("CXX") or "c++", "g++", "clang++"])), None)
    try:
        if compiler is None:
            raise OSError("there is no C++ compiler (c++, g++ or clang++)")
        macros = run(compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)
        parts = [path.read_text() for path in [*sources, *sorted(HERE.glob("*.h"))]] + [macros, *FLAGS]
        path = HERE / "build" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            # Linked without an OpenMP library: the symbols come from the one that torch has loaded, and so do the
            # threads. A second team of threads would fight with the first over the cores.
            objects = [f"{temporary}.{source.stem}.o" for source in sources]
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda source, to: run(compiler, *FLAGS, "-c", source, "-o", to), sources, objects))
            run(compiler, "-shared", *objects, "-o", temporary)
            os.replace(temporary, path)
            for name in objects:
                os.unlink(name)
        return ctypes.CDLL(str(path))
    except OSError as error:
        print(f"the C++ kernels are not used, PyTorch's own operations are: {error}", file=sys.stderr)
        return None


def description(device):
    """What attends on this device, and what the device can do: "kernels/decode.cpp, AVX2"."""
    if device.type == "cuda":
        return f"scaled_dot_product_attention, {torch.cuda.get_device_name(device)}"
    ours = "kernels/decode.cpp" if library() is not None else "scaled_dot_product_attention"
    return f"{ours}, {torch.backends.cpu.get_cpu_capability()}"


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{command[0]} failed"]
        raise OSError(next((line for line in lines if "error" in line), lines[-1]).strip())
    return done.stdout


def call(name, *args):
    """Call a kernel: tensors by address, tuples of strides as arrays of long, None as a null pointer; threads as torch's."""
    c = [ctypes.c_int(torch.get_num_threads())]
    for arg in args:
        if isinstance(arg, torch.Tensor):
            c.append(ctypes.c_void_p(arg.data_ptr()))
        elif isinstance(arg, tuple):
            c.append((ctypes.c_long * 3)(*arg[:3]))
        else:
            c.append(arg)
    library()[name](*c)


def serves(x):
    """Whether the kernels are there for a tensor: on a CPU, in a dtype they know, and not while torch.compile traces."""
    return x.device.type == "cpu" and x.dtype in NAMES and not torch.compiler.is_compiling() and library() is not None


def last_contiguous(x):
    return x if x.stride(-1) == 1 else x.contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# decoding


class Shape(ctypes.Structure):
    """attention.h's Shape."""

    _fields_ = [(name, ctypes.c_int) for name in ("B", "n_kv", "group", "t", "hd", "past")]


class Dense(ctypes.Structure):
    """decode.cpp's DenseStore: keys and values [B, n_kv, capacity, hd]."""

    _fields_ = [("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("capacity", ctypes.c_long)]

    def __init__(self, keys, values):
        super().__init__(keys.data_ptr(), values.data_ptr(), keys.size(2))
        self.kind = list(NAMES).index(keys.dtype)


def attends(q):
    """Whether `attend` serves queries [B, n_head, t, hd]."""
    return q.dtype == torch.float32 and not (torch.is_grad_enabled() and q.requires_grad) and serves(q)


def attend(q, k, v, past, store):
    """
    Append k, v [B, n_kv, t, hd] in float32 to a layer's store, which holds `past` tokens, and attend with q
    [B, n_head, t, hd] over past + t tokens, causally by absolute position -> [B, n_head, t, hd]. A KVQuant store may hold
    the new tokens already (its `write`). The caller has checked that they fit.
    """
    (B, n_head, t, hd), n_kv = q.shape, k.size(1)
    q, k, v = map(last_contiguous, (q, k, v))
    y = q.new_empty(B, t, n_head, hd)
    shape = Shape(B, n_kv, n_head // n_kv, t, hd, past)
    store, kind = ctypes.byref(store), store.kind
    call("attend", ctypes.byref(shape), kind, store, q, q.stride(), k, k.stride(), v, v.stride(), y)
    return y.transpose(1, 2)


class Full(ctypes.Structure):
    """codes.h's Full: keys and values [B, n_kv, room, hd] in full precision."""

    _fields_ = [("held", ctypes.c_void_p * 2), ("room", ctypes.c_long), ("precision", ctypes.c_int)]

    def __init__(self, keys, values):
        super().__init__(pointers(keys, values), keys.size(2), PRECISIONS.index(keys.dtype))


class FP8(ctypes.Structure):
    """fp8.cpp's FP8."""

    kind = 2
    _fields_ = [
        ("codes", ctypes.c_void_p * 2), ("scales", ctypes.c_void_p * 2), ("room", ctypes.c_long), ("per_head", ctypes.c_int),
        ("e5m2", ctypes.c_int),
    ]  # fmt: skip


class KIVI(ctypes.Structure):
    """kivi.cpp's KIVI."""

    kind = 3
    _fields_ = [
        ("codes", ctypes.c_void_p * 2), ("scales", ctypes.c_void_p * 2), ("zeros", ctypes.c_void_p * 2), ("room", ctypes.c_long),
        ("bits", ctypes.c_int), ("group", ctypes.c_int), ("packed", ctypes.c_int), ("start", ctypes.c_int), ("window", Full),
    ]  # fmt: skip


class KVQuant(ctypes.Structure):
    """kvquant.cpp's KVQuant."""

    kind = 4
    _fields_ = [
        ("codes", ctypes.c_void_p * 2), ("key_middle", ctypes.c_void_p), ("key_width", ctypes.c_void_p),
        ("tables", ctypes.c_void_p * 2), ("value_middle", ctypes.c_void_p), ("value_width", ctypes.c_void_p),
        ("rows", ctypes.c_void_p), ("key_index", ctypes.c_void_p), ("value_index", ctypes.c_void_p),
        ("key_outliers", ctypes.c_void_p), ("value_outliers", ctypes.c_void_p), ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p), ("room", ctypes.c_long), ("bits", ctypes.c_int), ("B", ctypes.c_int), ("n_kv", ctypes.c_int),
        ("ends", ctypes.c_int), ("sunk", ctypes.c_int), ("write", ctypes.c_int), ("sink", Full),
    ]  # fmt: skip


STORES = (FP8, KIVI, KVQuant)
PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]  # codes.h's Precision


def pointers(*tensors):
    return (ctypes.c_void_p * len(tensors))(*[None if x is None else x.data_ptr() for x in tensors])


class Model(ctypes.Structure):
    """decode.cpp's Model."""

    _fields_ = (
        [(name, ctypes.c_int) for name in ("n_layer", "n_head", "n_kv", "hd", "C", "inner", "V", "llama", "tanh")]
        + [("eps", ctypes.c_float)]
        + [(name, ctypes.c_void_p) for name in ("wte", "wpe", "cos", "sin", "ln_f_w", "ln_f_b", "head")]
        + [("layers", ctypes.c_void_p)]
    )  # fmt: skip


class Step:
    """
    A GPT's decoding step over a cache that has a `store`, in one call: Step(model)(idx [B, t], cache) appends t tokens and returns their
    logits [B, t, V] in float32. It reads the model's own weights where they lie; make a new one after moving the model.
    """

    def __init__(self, model):
        c = model.config
        self.model, self.block_size, self.V = model, c.block_size, c.vocab_size
        self.dtype = model.wte.weight.dtype
        self.weights = [
            [
                b.ln_1.weight, getattr(b.ln_1, "bias", None), b.attn.c_attn.weight, b.attn.c_attn.bias,
                b.attn.c_proj.weight, b.attn.c_proj.bias, b.ln_2.weight, getattr(b.ln_2, "bias", None),
                b.mlp.c_gate.weight if c.dialect == "llama" else None, b.mlp.c_fc.weight, b.mlp.c_fc.bias,
                b.mlp.c_proj.weight, b.mlp.c_proj.bias,
            ]
            for b in model.h
        ]  # fmt: skip  # in the order of decode.cpp's Weights
        flat = [None if w is None else w.data_ptr() for layer in self.weights for w in layer]
        self.layers = (ctypes.c_void_p * len(flat))(*flat)
        tensors = [
            model.wte.weight, model.wpe.weight if c.dialect == "gpt2" else None,
            getattr(model, "cos", None), getattr(model, "sin", None),
            model.ln_f.weight, getattr(model.ln_f, "bias", None), model.lm_head.weight,
        ]  # fmt: skip
        pointers = [None if w is None else w.data_ptr() for w in tensors]
        sizes = (c.n_layer, c.n_head, c.n_kv, c.head_dim, c.n_embd, c.inner, c.vocab_size)
        kinds = (c.dialect == "llama", c.gelu == "tanh")
        self.struct = Model(*sizes, *kinds, c.eps, *pointers, ctypes.cast(self.layers, ctypes.c_void_p))
        self.shapes_fit = c.n_embd % 8 == 0 and c.inner % 8 == 0 and c.n_head * c.head_dim % 8 == 0
        self.group = c.group

    def serves(self, idx, cache):
        B, t = idx.shape
        return (
            self.shapes_fit and max(B, self.group) * t <= MAX_ROWS and t <= cache.at_once() and not self.model.training
            and not torch.is_grad_enabled() and serves(self.model.wte.weight) and cache.store(0) is not None
        )  # fmt: skip

    def __call__(self, idx, cache):
        B, t = idx.shape
        if cache.length + t > min(self.block_size, cache.capacity):
            room = f"block_size={self.block_size}, capacity={cache.capacity}"
            raise ValueError(f"{cache.length} + {t} tokens do not fit: {room}")
        if cache.batch != B:
            raise ValueError(f"{B} sequences do not fit a cache of {cache.batch}")
        shape, wanted = (cache.n_layer, cache.n_kv, cache.head_dim), (self.struct.n_layer, self.struct.n_kv, self.struct.hd)
        if shape != wanted:
            raise ValueError(f"a cache of (n_layer, n_kv, head_dim) = {shape} does not fit a model of {wanted}")
        idx = idx.contiguous()
        logits = torch.empty(B, t, self.V)
        stores = [cache.store(layer) for layer in range(cache.n_layer)]
        each = (ctypes.c_void_p * len(stores))(*map(ctypes.addressof, stores))
        call(
            f"step_{NAMES[self.dtype]}",
            ctypes.byref(self.struct),
            B,
            t,
            cache.length,
            idx,
            stores[0].kind,
            each,
            not cache.rotates,
            logits,
        )
        cache.advance(t)
        return logits


# ---------------------------------------------------------------------------------------------------------------------
# training


class CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        (B, n_head, T, hd), n_kv = q.shape, k.size(1)
        q, k, v = map(last_contiguous, (q, k, v))
        y = q.new_empty(B, T, n_head, hd)
        lse = q.new_empty(B, n_head, T, dtype=torch.float32)  # log of the sum of exponentials, row by row
        shape = (B, n_kv, n_head // n_kv, T, hd)
        call(f"causal_forward_{NAMES[q.dtype]}", *shape, q, q.stride(), k, k.stride(), v, v.stride(), y, lse)
        ctx.save_for_backward(q, k, v, y, lse)
        return y.transpose(1, 2)

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        (B, n_head, T, hd), n_kv = q.shape, k.size(1)
        dy = last_contiguous(dy)
        # side by side, as the fused projection laid q, k and v out
        d = q.new_empty(B, T, n_head + 2 * n_kv, hd).transpose(1, 2)
        dq, dk, dv = d.split([n_head, n_kv, n_kv], dim=1)
        call(
            f"causal_backward_{NAMES[q.dtype]}", B, n_kv, n_head // n_kv, T, hd, q, q.stride(), k, k.stride(),
            v, v.stride(), y, lse, dy, dy.stride(), dq, dq.stride(), dk, dk.stride(), dv, dv.stride(),
        )  # fmt: skip
        return dq, dk, dv


def causal_attention(q, k, v):
    """Causal attention of T tokens over themselves: q [B, n_head, T, hd], k, v [B, n_kv, T, hd] -> [B, n_head, T, hd]."""
    return CausalAttention.apply(q, k, v)
