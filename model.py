"""
The whole model in one file: a decoder-only transformer whose number of key-value heads is a dial.

    n_kv == n_head   multi-head attention (MHA): every query head has keys and values of its own
    1 < n_kv < n_head   grouped-query attention (GQA, arXiv 2305.13245): n_head / n_kv query heads share one KV head
    n_kv == 1        multi-query attention (MQA, arXiv 1911.02150): all query heads share one

              MHA 8/8                  GQA 8/2                MQA 8/1
    query   q q q q q q q q        q q q q q q q q        q q q q q q q q
            | | | | | | | |        \\_|_|_/ \\_|_|_/        \\_\\_\\_|_|_/_/_/
    key     k k k k k k k k           k       k                 k
    value   v v v v v v v v           v       v                 v

Symbols, the same in every file: B batch, T new tokens, n_head query heads, n_kv key-value heads,
group = n_head // n_kv query heads per KV head, hd = head_dim, mostly n_embd // n_head, C = n_embd, V = vocabulary.

Two dialects by config, so that checkpoints of both families load into the same code:
    gpt2    learned positions, LayerNorm, GELU, optional biases (nanoGPT's block; the default)
    llama   rotary positions, RMSNorm, SwiGLU, no biases
The config's last fields are for checkpoints made elsewhere (huggingface.py); left alone, they change nothing.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


def rng(seed, *purpose):
    """A torch.Generator of its own for each (seed, purpose): init, data order and sampling never disturb each other."""
    return torch.Generator().manual_seed(rng_seed(seed, *purpose))


def rng_seed(seed, *purpose):
    """The 63-bit integer seed behind `rng`, for the global generator too (dropout knows no other)."""
    digest = hashlib.sha256("/".join(map(str, (seed, *purpose))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


ROPE_LINEAR = ("factor",)
ROPE_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a model. Raises ValueError, in one line, for shapes that cannot be built."""

    dialect: str = "gpt2"  # gpt2 | llama
    vocab_size: int = 65
    block_size: int = 256  # longest context in tokens
    n_layer: int = 6
    n_head: int = 8  # query heads
    n_kv: int = 8  # key-value heads: the dial
    n_embd: int = 256
    bias: bool = False  # gpt2 only: biases in Linear and LayerNorm
    dropout: float = 0.0
    rope_base: float = 10000.0  # llama only
    tie_weights: bool = True  # lm_head shares the token embedding's matrix
    head_size: int | None = None  # numbers in a head; None = n_embd / n_head. To be read as head_dim
    n_inner: int | None = None  # width of the feed-forward; None = 4 n_embd, or for llama two thirds of that
    norm_eps: float | None = None  # of LayerNorm and RMSNorm; None = 1e-5
    gelu: str | None = None  # gpt2 only: tanh = the approximation of GPT-2 itself; None = exact
    rope_scaling: dict | None = None  # llama only: {"rope_type": "linear" or "llama3", "factor": …}, keys as Hugging Face's

    def __post_init__(self):
        if self.dialect not in ("gpt2", "llama"):
            raise ValueError(f"dialect={self.dialect!r} is unknown: gpt2 or llama")
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv", "n_embd", "head_size", "n_inner"):
            value = getattr(self, name)
            if value is None and name in ("head_size", "n_inner"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not a whole number of at least 1")
        if self.head_size is None and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: "
                f"try n_embd={self.n_head * max(1, round(self.n_embd / self.n_head))}"
            )
        if self.n_head % self.n_kv:
            allowed = [d for d in range(1, self.n_head + 1) if self.n_head % d == 0]
            raise ValueError(f"n_kv={self.n_kv} does not divide n_head={self.n_head}: n_kv can be {allowed}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} is not in [0, 1)")
        if self.dialect == "llama" and self.bias:
            raise ValueError("bias=true does not exist in the llama dialect: bias=false, or dialect=gpt2")
        if self.dialect == "llama" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: rotary positions turn pairs, n_embd/n_head must be even")
        if not 0 < self.rope_base < math.inf:
            raise ValueError(f"rope_base={self.rope_base} is not a positive number")
        if self.norm_eps is not None and not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps={self.norm_eps} is not allowed: 0 or a positive number")
        if self.gelu not in (None, "tanh") or (self.gelu and self.dialect == "llama"):
            raise ValueError(f"gelu={self.gelu!r} is not allowed: null (exact), or tanh in the gpt2 dialect")
        if self.rope_scaling is not None:
            self.check_rope_scaling()

    def check_rope_scaling(self):
        if self.dialect != "llama":
            raise ValueError("rope_scaling does not exist in the gpt2 dialect: rope_scaling=null, or dialect=llama")
        kind, known = self.rope_scaling.get("rope_type"), {"linear": ROPE_LINEAR, "llama3": ROPE_LLAMA3}
        if kind not in known:
            raise ValueError(f"rope_scaling of the type {kind!r} is unknown: {', '.join(known)}, or null")
        if self.rope_scaling.keys() != {"rope_type", *known[kind]}:
            raise ValueError(f"rope_scaling={self.rope_scaling}: the type {kind} takes {', '.join(known[kind])}")
        for name in known[kind]:
            value = self.rope_scaling[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"rope_scaling's {name}={value!r} is not a positive number")
        if kind == "llama3" and self.rope_scaling["low_freq_factor"] >= self.rope_scaling["high_freq_factor"]:
            raise ValueError("rope_scaling's low_freq_factor is not below its high_freq_factor")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head if self.head_size is None else self.head_size

    @property
    def group(self):
        return self.n_head // self.n_kv

    @property
    def inner(self):
        """Width of the feed-forward. Llama's has three matrices, which shall cost what GPT-2's two do: two thirds as wide."""
        ours = 4 * self.n_embd if self.dialect == "gpt2" else -(-8 * self.n_embd // 3 // 32) * 32  # a multiple of 32
        return ours if self.n_inner is None else self.n_inner

    @property
    def eps(self):
        return 1e-5 if self.norm_eps is None else self.norm_eps


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias."""

    def __init__(self, n_embd, bias, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.bias = nn.Parameter(torch.zeros(n_embd)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def norm(config):
    if config.dialect == "llama":
        return nn.RMSNorm(config.n_embd, eps=config.eps)
    return LayerNorm(config.n_embd, config.bias, config.eps)


def angles(length, dim, base, scaling=None):
    """position / base^(2i/dim), [length, ceil(dim/2)] in float64: the sinusoids behind both kinds of positions."""
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # [ceil(dim/2)]
    if scaling is not None:
        frequency = scaled(frequency, **scaling)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequency


def scaled(frequency, rope_type, factor, low_freq_factor=0.0, high_freq_factor=0.0, original_max_position_embeddings=0.0):
    """
    How Llamas were taught longer contexts: linear makes all frequencies lower by `factor` (arXiv 2306.15595); llama3
    leaves alone those that turn more than high_freq_factor times within the original context, slows those that turn
    less than low_freq_factor times, and goes evenly from one to the other in between (arXiv 2407.21783, section 3.4.2).
    """
    if rope_type == "linear":
        return frequency / factor
    turns = original_max_position_embeddings * frequency / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return kept * frequency + (1 - kept) * frequency / factor


def rotary_table(config):
    """cos and sin of every position's angles, each [block_size, hd] in float32 (RoFormer, arXiv 2104.09864, eq. 34)."""
    angle = angles(config.block_size, config.head_dim, config.rope_base, config.rope_scaling)  # [block_size, hd/2]
    angle = torch.cat((angle, angle), dim=1)  # [block_size, hd]: pair i is (i, i + hd/2), as Hugging Face's Llama stores it
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    """Turn x [B, heads, T, hd] by the angles of its positions, cos and sin [T, hd]."""
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)  # [B, heads, T, hd]
    return (x * cos + turned * sin).to(x.dtype)


def causal_attention(q, k, v, dropout=0.0):
    """
    Causal attention of T tokens over themselves: q [B, n_head, T, hd], k and v [B, n_kv, T, hd] -> [B, n_head, T, hd].
    Query head h reads KV head h // group. K and V are never expanded: the fused kernels (CPU and CUDA) index the
    shared head themselves under enable_gqa.
    """
    B, n_head, T, hd = q.shape
    n_kv = k.size(1)
    if dropout and q.device.type == "cpu":
        # on CPU only the unfused kernel knows dropout, and under enable_gqa it copies K and V for each query head.
        # Stack a group's queries along T instead: then the heads match and nothing needs copying.
        q = q.reshape(B, n_kv, n_head // n_kv * T, hd)  # [B, n_kv, group*T, hd]
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().repeat(n_head // n_kv, 1)  # [group*T, T]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return y.view(B, n_head, T, hd)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=n_kv != n_head)


class Attention(nn.Module):
    """
    MHA, GQA and MQA in one. The fused projection's rows, in this order and contiguous head by head:
    n_head*hd rows of queries, n_kv*hd of keys, n_kv*hd of values. With n_kv = n_head this is GPT-2's c_attn.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.n_head, self.n_kv, self.hd = config.n_head, config.n_kv, config.head_dim
        self.c_attn = nn.Linear(config.n_embd, (config.n_head + 2 * config.n_kv) * self.hd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_head * self.hd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout
        self.resid_dropout = nn.Dropout(config.dropout)
        self.causal = causal_attention  # training replaces it where it has measured a faster one

    def forward(self, x, rotary, cache):
        B, T, _ = x.shape
        q, k, v = self.c_attn(x).split([self.n_head * self.hd, self.n_kv * self.hd, self.n_kv * self.hd], dim=2)
        q = q.view(B, T, self.n_head, self.hd).transpose(1, 2)  # [B, n_head, T, hd]
        k = k.view(B, T, self.n_kv, self.hd).transpose(1, 2)  # [B, n_kv, T, hd]
        v = v.view(B, T, self.n_kv, self.hd).transpose(1, 2)  # [B, n_kv, T, hd]
        if rotary is not None:
            q = rotate(q, *rotary)
            if cache is None or not cache.rotates:  # else it stores keys before rotation, and turns them when it reads
                k = rotate(k, *rotary)
        dropout = self.dropout if self.training else 0.0
        if cache is None:
            y = self.causal(q, k, v, dropout)
        else:
            y = cache.attend(self.layer, q, k, v)  # the cache stores K and V, and knows how to read them
        y = y.transpose(1, 2).flatten(2)  # [B, n_head, T, hd] -> [B, T, n_head*hd]: heads side by side again
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """GPT-2's two matrices and a GELU."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner, bias=config.bias)
        self.c_proj = nn.Linear(config.inner, config.n_embd, bias=config.bias)
        self.gelu = config.gelu or "none"
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu)))


class SwiGLU(nn.Module):
    """Llama's gated feed-forward (arXiv 2002.05202)."""

    def __init__(self, config):
        super().__init__()
        self.c_gate = nn.Linear(config.n_embd, config.inner, bias=False)
        self.c_fc = nn.Linear(config.n_embd, config.inner, bias=False)
        self.c_proj = nn.Linear(config.inner, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = norm(config)
        self.mlp = SwiGLU(config) if config.dialect == "llama" else MLP(config)

    def forward(self, x, rotary, cache):
        x = x + self.attn(self.ln_1(x), rotary, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """
    The model. `seed` fixes its initial weights; every parameter draws from a generator named after it, so two models
    that differ only in n_kv start from the same embeddings, feed-forwards and output projections.
    """

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.dialect == "gpt2":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            cos, sin = rotary_table(config)
            self.register_buffer("cos", cos, persistent=False)  # not a weight: rebuilt from the config
            self.register_buffer("sin", sin, persistent=False)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """
        nanoGPT's: normal(0, 0.02), residual projections smaller by sqrt(2 n_layer), biases 0, norms 1. One difference:
        the position table starts as sinusoids (arXiv 1706.03762, section 3.5) of that same standard deviation. From
        random positions a model this size takes hundreds of steps just to learn what lies next to what.
        """
        for name, p in self.named_parameters():
            if name == "wpe.weight":
                angle = angles(*p.shape, base=10000.0)  # [block_size, C/2]
                p.copy_(0.02 * math.sqrt(2) * torch.cat((angle.sin(), angle.cos()), dim=1)[:, : p.size(1)])
            elif p.dim() == 2:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
                p.normal_(mean=0.0, std=std, generator=rng(seed, "init", name))
            elif name.endswith("bias"):
                p.zero_()

    def _apply(self, *args, **kwargs):
        """nn.Module's door for .to(): a model in bfloat16 keeps its angles in float32, or far positions would blur."""
        super()._apply(*args, **kwargs)
        if self.config.dialect == "llama":
            self.cos, self.sin = (table.to(self.wte.weight.device) for table in rotary_table(self.config))
        return self

    def n_params(self):
        """Number of parameters, each tensor once."""
        return sum(p.numel() for p in self.parameters())

    def features(self, idx, cache=None):
        """
        Hidden states [B, T, C] of the new tokens idx [B, T]. Without a cache they are the whole sequence; with one they
        follow the `cache.length` tokens it holds, and their keys and values are appended to it.
        Raises ValueError when the sequence would outgrow block_size.
        """
        T = idx.size(1)
        past = 0 if cache is None else cache.length
        if past + T > self.config.block_size:
            raise ValueError(f"{past} + {T} tokens do not fit the model's context: block_size={self.config.block_size}")
        x = self.wte(idx)  # [B, T, C]
        at = slice(past, past + T)
        if cache is not None and cache.position is not None:
            at = cache.position  # a tensor [1]: in a captured step the position is data, not a shape
        rotary = None
        if self.config.dialect == "gpt2":
            x = x + self.wpe.weight[at]  # [B, T, C] + [T, C]
        else:
            rotary = self.cos[at], self.sin[at]  # [T, hd] each
        x = self.drop(x)
        for block in self.h:
            x = block(x, rotary, cache)
        return self.ln_f(x)

    def forward(self, idx, targets=None, cache=None):
        """idx [B, T] -> logits [B, T, V] and, given targets [B, T], the mean cross-entropy in nats (else None); no loss where a target is -1."""
        logits = self.lm_head(self.features(idx, cache))  # [B, T, V]
        if targets is None:
            return logits, None
        flat = logits.float().view(-1, logits.size(-1)), targets.reshape(-1)  # [B*T, V], [B*T]
        loss = F.cross_entropy(*flat, ignore_index=-1)
        return logits, loss

    def optimizer(self, lr, betas, weight_decay):
        """AdamW with nanoGPT's groups: matrices decay, vectors (norms, biases) do not."""
        params = list(self.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
