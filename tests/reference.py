"""
The model once more, from the papers and in float64: one head, one position and one pair of numbers at a time.
Slow and plain on purpose; it shares no code with what it checks. Gradients flow through it.
"""

import math

import torch

from model import GPT, GPTConfig

SHAPES = [8, 2, 1]  # n_kv for 8 query heads: the ends hide mistakes in the order of the heads, 2 shows them
DIALECTS = ["gpt2", "llama"]


def small_model(n_kv=2, dialect="gpt2", seed=0, **kwargs):
    """A model whose weights are large enough for attention to be sharp and for every bias and norm to matter."""
    shape = {"vocab_size": 31, "block_size": 24, "n_layer": 2, "n_head": 8, "n_embd": 64}
    model = GPT(GPTConfig(**{**shape, "n_kv": n_kv, "dialect": dialect, **kwargs})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() == 2:
                p.copy_(noise * (0.5 if name.startswith("w") else 1.5 / math.sqrt(p.shape[1])))
            else:
                p.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
    return model


def tokens(batch, length, vocab=31, seed=0):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def attend(q, k, v, past=0):
    """q [B, n_head, t, hd] over k, v [B, n_kv, past + t, hd], query i at position past + i -> [B, n_head, t, hd]."""
    B, n_head, t, hd = q.shape
    n_kv = k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    batches = []
    for b in range(B):
        heads = []
        for h in range(n_head):
            kv = h // (n_head // n_kv)
            rows = []
            for i in range(t):
                seen = past + i + 1
                scores = torch.stack([(q[b, h, i] * k[b, kv, j]).sum() / math.sqrt(hd) for j in range(seen)])
                weights = torch.exp(scores - scores.max().detach())
                weights = weights / weights.sum()
                rows.append(sum(weights[j] * v[b, kv, j] for j in range(seen)))
            heads.append(torch.stack(rows))
        batches.append(torch.stack(heads))
    return torch.stack(batches)


def turn(x, base):
    """Rotary positions: numbers j and j + hd/2 of a head are one complex number, turned by position * base^(-2j/hd)."""
    hd = x.shape[-1]
    half = hd // 2
    z = torch.complex(x[..., :half], x[..., half:])
    position = torch.arange(x.shape[-2], dtype=torch.float64)[:, None]
    angle = position * torch.tensor([base ** (-2 * j / hd) for j in range(half)], dtype=torch.float64)
    z = z * torch.exp(1j * angle)
    return torch.cat((z.real, z.imag), dim=-1)


def reference_logits(model, idx, weights=None):
    """Logits [B, T, V] in float64 of the model's weights (or of those given), without calling the model."""
    c = model.config
    w = weights or {name: p.detach().double() for name, p in model.state_dict().items()}
    hd = c.n_embd // c.n_head if c.head_size is None else c.head_size
    n_q, n_kv, eps = c.n_head * hd, c.n_kv * hd, 1e-5 if c.norm_eps is None else c.norm_eps
    B, T = idx.shape

    def linear(x, name):
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(x, name):
        if c.dialect == "gpt2":
            x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]
        return x + w[f"{name}.bias"] if f"{name}.bias" in w else x

    x = w["wte.weight"][idx]
    if c.dialect == "gpt2":
        x = x + w["wpe.weight"][:T]
    for layer in range(c.n_layer):
        at = f"h.{layer}"
        qkv = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn")
        q = qkv[..., :n_q].reshape(B, T, c.n_head, hd).transpose(1, 2)
        k = qkv[..., n_q : n_q + n_kv].reshape(B, T, c.n_kv, hd).transpose(1, 2)
        v = qkv[..., n_q + n_kv :].reshape(B, T, c.n_kv, hd).transpose(1, 2)
        if c.dialect == "llama":
            q, k = turn(q, c.rope_base), turn(k, c.rope_base)
        y = attend(q, k, v)
        y = torch.cat([y[:, h] for h in range(c.n_head)], dim=-1)  # [B, T, C]
        x = x + linear(y, f"{at}.attn.c_proj")
        z = norm(x, f"{at}.ln_2")
        if c.dialect == "gpt2":
            z = linear(z, f"{at}.mlp.c_fc")
            u = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
            z = z * 0.5 * (1 + (torch.tanh(u) if c.gelu == "tanh" else torch.erf(z / math.sqrt(2))))
        else:
            gate = linear(z, f"{at}.mlp.c_gate")
            z = gate / (1 + torch.exp(-gate)) * linear(z, f"{at}.mlp.c_fc")
        x = x + linear(z, f"{at}.mlp.c_proj")
    return linear(norm(x, "ln_f"), "lm_head")
