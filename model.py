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
group = n_head // n_kv query heads per KV head, hd = head_dim = n_embd // n_head, C = n_embd, V = vocabulary.

Two dialects by config, so that checkpoints of both families load into the same code:
    gpt2    learned positions, LayerNorm, GELU, optional biases (nanoGPT's block; the default)
    llama   rotary positions, RMSNorm, SwiGLU, no biases
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

    def __post_init__(self):
        if self.dialect not in ("gpt2", "llama"):
            raise ValueError(f"dialect={self.dialect!r} is unknown: gpt2 or llama")
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv", "n_embd"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not a whole number of at least 1")
        if self.n_embd % self.n_head:
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

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def group(self):
        return self.n_head // self.n_kv


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias."""

    def __init__(self, n_embd, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.bias = nn.Parameter(torch.zeros(n_embd)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


def norm(config):
    if config.dialect == "llama":
        return nn.RMSNorm(config.n_embd, eps=1e-5)
    return LayerNorm(config.n_embd, config.bias)


def angles(length, dim, base):
    """position / base^(2i/dim), [length, ceil(dim/2)] in float64: the sinusoids behind both kinds of positions."""
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # [ceil(dim/2)]
    return torch.arange(length, dtype=torch.float64)[:, None] * frequency


def rotary_table(config):
    """cos and sin of every position's angles, each [block_size, hd] in float32 (RoFormer, arXiv 2104.09864, eq. 34)."""
    angle = angles(config.block_size, config.head_dim, config.rope_base)  # [block_size, hd/2]
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
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout
        self.resid_dropout = nn.Dropout(config.dropout)
        self.causal = causal_attention  # training replaces it where it has measured a faster one

    def forward(self, x, rotary, cache):
        B, T, C = x.shape
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
        y = y.transpose(1, 2).reshape(B, T, C)  # [B, n_head, T, hd] -> [B, T, C]: heads side by side again
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """GPT-2's two matrices and a GELU."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class SwiGLU(nn.Module):
    """Llama's gated feed-forward (arXiv 2002.05202); two thirds as wide, so that three matrices cost what two did."""

    def __init__(self, config):
        super().__init__()
        n_inner = -(-8 * config.n_embd // 3 // 32) * 32  # rounded up to a multiple of 32
        self.c_gate = nn.Linear(config.n_embd, n_inner, bias=False)
        self.c_fc = nn.Linear(config.n_embd, n_inner, bias=False)
        self.c_proj = nn.Linear(n_inner, config.n_embd, bias=False)
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
