"""
Turning one model into another: pooling key-value heads (GQA paper, arXiv 2305.13245, section 2.1 and figure 1).
"""

from dataclasses import replace

import torch

from model import GPT, rng


def pool_heads(model, n_kv, pool="mean", seed=0):
    """
    A new GPT with `n_kv` key-value heads made from `model`; the model itself is left as it is.

    Each new head stands for a contiguous group of old ones, the same order in which query heads share it:
    mean    the average of the group's key (value) projections, biases too; the paper's choice
    first   the group's first head
    random  fresh heads, normal(0, 0.02); the paper's floor, nothing is kept
    n_kv equal to the model's is a bit-exact copy. ValueError when n_kv does not divide the model's n_kv.
    """
    old = model.config.n_kv
    if not isinstance(n_kv, int) or n_kv < 1 or old % n_kv:
        allowed = [d for d in range(1, old + 1) if old % d == 0]
        raise ValueError(f"groups={n_kv} does not divide the {old} KV heads of this checkpoint: groups can be {allowed}")
    if pool not in ("mean", "first", "random"):
        raise ValueError(f"pool={pool!r} is unknown: mean, first or random")
    config = replace(model.config, n_kv=n_kv)
    hd = config.head_dim

    def pooled(name, p):
        """p [(n_head + 2*old)*hd, ...] -> [(n_head + 2*n_kv)*hd, ...]"""
        q, k, v = p.split([config.n_head * hd, old * hd, old * hd])
        new = [q]
        for part, heads in (("k", k), ("v", v)):
            heads = heads.reshape(n_kv, old // n_kv, hd, *p.shape[1:])  # [n_kv, old heads of the group, hd, ...]
            if pool == "mean":
                heads = heads.mean(dim=1)  # [n_kv, hd, ...]
            elif pool == "first":
                heads = heads[:, 0]  # [n_kv, hd, ...]
            else:
                noise = torch.randn(heads[:, 0].shape, generator=rng(seed, "pool", name, part)).to(p)
                heads = 0.02 * noise if p.dim() == 2 else torch.zeros_like(heads[:, 0])
            new.append(heads.reshape(n_kv * hd, *p.shape[1:]))  # [n_kv*hd, ...]
        return torch.cat(new)

    state = model.state_dict()
    if n_kv != old:
        state = {name: pooled(name, p) if ".attn.c_attn." in name else p for name, p in state.items()}
    new = GPT(config).to(model.wte.weight)
    new.load_state_dict(state)
    return new
