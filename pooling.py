"""
Fewer key-value heads from many: how the heads of a group become one, before training goes on ("uptraining", GQA paper,
arXiv 2305.13245, section 2.1 and figure 1).

A group of m heads becomes one by two linear maps: E makes the shared head z = E k of the m stacked ones, k [m*hd], and D
reads each of them back, k_j ~ D_j z. Reading costs nothing: q_j . D_j z = (D_j^T q_j) . z, so D_j moves into the queries,
and for values into the output projection. Keys and values have maps of their own.

    mean     E = (I, I, …) / m, D_j = I: the paper's
    first    E = (I, 0, …), D_j = I
    random   nothing is kept: fresh heads, normal(0, 0.02), the paper's floor
    aligned  the mean of heads that were first turned to agree: orthogonal D_j (generalised Procrustes; arXiv 2412.20677
             turns heads like this, then prunes by training)
    svd      the E and D of least error, in the norm below

What svd minimises. An error in a key matters as far as queries look at it. With queries and keys drawn independently,
the squared error of the scores, summed over query heads, is

    || P^(1/2) (I - D E) S^(1/2) ||_F^2     S = cov(k) [m*hd, m*hd]
                                            P = blockdiag_j(E q q^T, summed over the query heads of j)

and of all D E of rank hd the best is P^(-1/2) U U^T P^(1/2), with U the hd leading eigenvectors of P^(1/2) S P^(1/2)
(Eckart and Young). What a query sees in all keys alike, softmax does not see: so S is taken around the keys' mean.

An error in a value matters as far as the output projection W_o,h of a head reads it, and errors of two heads add up as
far as both attend to the same tokens: the same problem with P = [c_gh W_o,g^T W_o,h], c_gh = E sum_t p_g(t) p_h(t). A
constant passes attention unchanged; where the output projection has a bias, that takes what the mean value loses, and S
is a covariance here too. Without one, S is the second moment.

Rotary positions turn pairs of channels, complex numbers, and only complex factors commute with that: with maps that do, each
frequency is a problem of its own, m complex numbers wide and of rank one. That is all there is if every distance counts
alike. But attention looks at some distances far more than at others, over which slow frequencies hardly turn, and there
maps that mix them are as good as free. So with R the rotation by a distance, drawn as the query head h of key j looks,

    sum over h of E_R || Q_h^(1/2) (R k_j - D_h R E k) ||^2 over independent queries and keys, Q_h = E q_h q_h^T

is minimised: for fixed E each D_h is a least-squares problem, for fixed D's E is one, and both have closed forms. They take
turns, beginning at the commuting maps, until nothing is gained. A mean turns with the position, so the keys' second moment
is taken. Values are not turned.

Relatives: arXiv 2406.07056 keeps the principal components of a group's cached keys and values, which is this with P = I:
keys count by their size, whether or not a query looks at them. arXiv 2502.07864 folds neighbouring frequencies, as if they
turned alike, for the same reason.
"""

from dataclasses import dataclass, replace
from itertools import combinations, product

import torch
from tqdm import tqdm

from model import GPT, rng, rotate

POOLS = ("mean", "first", "random", "aligned", "svd")
MEASURED = ("aligned", "svd")  # which need Moments


# ---------------------------------------------------------------------------------------------------------------------
# what a model does on some text


@dataclass(frozen=True)
class Moments:
    """What pooling needs to know of a layer's inputs."""

    x: torch.Tensor  # [C+1, C+1], float64: E [x, 1] [x, 1]^T of what enters the attention
    overlap: torch.Tensor  # [n_head, n_head], float64: E sum_t p_i(t) p_j(t), how far two heads attend to the same tokens
    turns: torch.Tensor | None = None  # [2, n_head, hd/2, hd/2], complex: E e^(i (a - b)) and E e^(i (a + b)), a and b what two
    # frequencies turn a key by, seen from a query, at the distances where a head looks; for rotary positions


@torch.no_grad()
def measure(model, idx):
    """The Moments of each layer over a few sequences idx [n, T] of training text."""
    found = [[] for _ in model.h]
    T = idx.size(1)
    apart = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0).flatten().to(idx.device)  # of a query and a key, [T*T]

    def look(attn, args):
        x, rotary, _ = args  # [1, T, C]
        one = torch.cat((x[0], torch.ones_like(x[0, :, :1])), dim=1).double()  # [T, C+1]
        q, k, _ = attn.c_attn(x)[0].split([attn.n_head * attn.hd, attn.n_kv * attn.hd, attn.n_kv * attn.hd], dim=1)
        q = q.view(T, attn.n_kv, -1, attn.hd).permute(1, 2, 0, 3)  # [n_kv, group, T, hd]
        k = k.view(T, attn.n_kv, 1, attn.hd).permute(1, 2, 0, 3)  # [n_kv, 1, T, hd]
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        p = (q @ k.mT / attn.hd**0.5).masked_fill_(later, -torch.inf).softmax(dim=-1).flatten(0, 1)  # [n_head, T, T]
        parts = [one.T @ one / T, torch.einsum("itu,jtu->ij", p, p).double() / T]
        if rotary is not None:
            share = torch.zeros(attn.n_head, T).to(one).index_add_(1, apart, p.flatten(1).double() / T)  # of each distance
            back = torch.complex(*rotary)[:T, : attn.hd // 2].to(torch.complex128).conj()  # [T, hd/2]: by a distance
            parts.append(torch.stack([torch.einsum("hd,df,dg->hfg", share + 0j, back, b) for b in (back.conj(), back)]))
        found[attn.layer].append(parts)

    hooks = [block.attn.register_forward_pre_hook(look) for block in model.h]
    was = model.training
    model.eval()
    try:
        for sequence in tqdm(idx.split(1), desc="what attention sees", unit="sequence", disable=None, leave=False):
            model.features(sequence)
    finally:
        model.train(was)
        for hook in hooks:
            hook.remove()
    return [Moments(*(sum(parts) / len(parts) for parts in zip(*layer, strict=True))) for layer in found]


# ---------------------------------------------------------------------------------------------------------------------
# the maps of one group: S, P [F, m*d, m*d] -> E [F, d, m*d], D [F, m*d, d]; F problems of m heads of d numbers each


def roots(p):
    """The square root of a positive semi-definite p, and its pseudo-inverse: where nobody looks, nothing is read."""
    values, vectors = torch.linalg.eigh(p)
    seen = values > 1e-12 * values[..., -1:]
    root = values.clamp(min=0).sqrt()
    inverse = torch.where(seen, values, 1).rsqrt() * seen
    return (vectors * root[..., None, :]) @ vectors.mH, (vectors * inverse[..., None, :]) @ vectors.mH


def polar(a):
    """The orthogonal (unitary) matrix nearest to a."""
    u, _, v = torch.linalg.svd(a)
    return u @ v


def least_error(S, P, m):
    """pool=svd. The basis of z is free: its numbers are as large as what reads them, and lie near the mean head's."""
    d = S.size(-1) // m
    root, inverse = roots(P)
    values, vectors = torch.linalg.eigh(root @ S @ root)
    top, u = values[..., -d:], vectors[..., -d:]  # z = u^H P^(1/2) k has the variances `top`, and readers of variance 1
    scale = top.clamp(min=1e-12 * top.amax().clamp(min=1e-30)).pow(0.25)
    E, D = (u.mH @ root) / scale[..., :, None], (inverse @ u) * scale[..., None, :]
    turn = polar(same(S, m)[0] @ S @ E.mH)
    return turn @ E, D @ turn.mH


def same(S, m):
    """pool=mean."""
    eye = torch.eye(S.size(-1) // m).to(S).repeat(len(S), 1, m)  # [F, d, m*d]
    return eye / m, eye.mH


def aligned(S, P, m):
    """pool=aligned: turn each head towards the mean of all turned heads, until nothing moves any more."""
    D = same(S, m)[1]
    for _ in range(100):
        toward = S @ D / m  # [F, m*d, d]: E k z^H of z = D^H k / m
        new = polar(toward.unflatten(1, (m, -1))).flatten(1, 2)
        moved, D = (new - D).abs().max(), new
        if moved < 1e-6:
            break
    return D.mH / m, D


def maps(pool, S, P, m):
    if pool == "svd":
        return least_error(S, P, m)
    if pool == "aligned":
        return aligned(S, P, m)
    E, D = same(S, m)
    if pool == "first":
        E = torch.cat((m * E[..., : S.size(-1) // m], torch.zeros_like(E[..., S.size(-1) // m :])), dim=-1)
    return E, D


def turned(a, turns):
    """The mean of R a R^T over rotations R, given the `turns` of their distances, [2, …, hd/2, hd/2]; a [..., hd, hd]."""
    (rr, ri), (ir, ii) = (half.chunk(2, dim=-1) for half in a.chunk(2, dim=-2))
    u = torch.complex(rr + ii, ir - ri) / 2 * turns[0]  # on complex numbers a is z -> u z + v conj(z)
    v = torch.complex(rr - ii, ir + ri) / 2 * turns[1]
    return torch.cat((torch.cat(((u + v).real, (v - u).imag), dim=-1), torch.cat(((u + v).imag, (u - v).real), dim=-1)), dim=-2)


def descend(S, Q, turns, E, most=100):
    """
    The E [hd, m*hd] and D [m, g, hd, hd] of rotary keys, from a first E by steps that never lose; and the share still lost.
    S [m*hd, m*hd] is E k k^T of the keys, Q [m, g, hd, hd] those of their queries, turns [2, m, g, hd/2, hd/2].
    """
    m, hd, before = len(Q), len(E), torch.inf
    own = torch.stack([S[i : i + hd, i : i + hd] for i in range(0, m * hd, hd)])[:, None]  # [m, 1, hd, hd]
    own = turned(own, turns)
    all_ = (Q * own).sum().item() or 1.0
    for _ in range(most):
        cross = turned((S @ E.T).unflatten(0, (m, 1, -1)), turns)  # [m, g, hd, hd]: E (R k_j) (R z)^T
        D = cross @ torch.linalg.pinv(turned(E @ S @ E.T, turns), rtol=1e-12, hermitian=True)
        lost = (Q * (own - D @ cross.mT)).sum().item() / all_
        if lost > before * (1 - 1e-4):
            break
        before, best = lost, (E, D, lost)
        reads = turned(D.mT @ Q @ D, turns.conj()).sum(dim=(0, 1))  # [hd, hd]
        wants = turned(D.mT @ Q, turns.conj()).sum(dim=1)  # [m, hd, hd]
        E = torch.linalg.pinv(reads, rtol=1e-12, hermitian=True) @ wants.transpose(0, 1).flatten(1)
    return best


def error(S, P, E, D):
    """|| P^(1/2) (I - D E) S^(1/2) ||_F^2 over all F."""
    rest = torch.eye(S.size(-1)).to(S) - D @ E
    return torch.einsum("fab,fbc,fcd,fad->", P, rest, S, rest.conj()).real.item()


# ---------------------------------------------------------------------------------------------------------------------
# a layer's problems


def pairs(x):
    """[..., hd, n] real to [..., hd/2, n] complex: the numbers that rotary positions turn."""
    return torch.complex(*x.chunk(2, dim=-2))


def real(e, hd):
    """Complex maps [hd/2, a, b], one a frequency, as a real one [a*hd, b*hd] on whole heads."""
    eye = torch.eye(hd // 2).to(e.real)
    cells = [[(part.permute(1, 2, 0)[..., None] * eye) for part in row] for row in ((e.real, -e.imag), (e.imag, e.real))]
    rows = [torch.cat(row, dim=-1) for row in cells]  # [a, b, hd/2, hd] each
    return torch.cat(rows, dim=-2).transpose(1, 2).flatten(2, 3).flatten(0, 1)  # [a, b, hd, hd] -> [a*hd, b*hd]


class Layer:
    """A layer's projections in float64, bias as one more column, head by head; and the problems that groups of them pose."""

    def __init__(self, config, state, layer, moments):
        self.c, self.moments = config, moments
        self.name, hd, C = f"h.{layer}.attn.", config.head_dim, config.n_embd
        w = state[self.name + "c_attn.weight"].double()
        bias = state[self.name + "c_attn.bias"].double()[:, None] if config.bias else torch.zeros_like(w[:, :1])
        heads = torch.cat((w, bias), dim=1).unflatten(0, (-1, hd))  # [n_head + 2*n_kv, hd, C+1]
        self.q, self.k, self.v = heads.split([config.n_head, config.n_kv, config.n_kv])
        self.q = self.q.unflatten(0, (config.n_kv, -1))  # [n_kv, group, hd, C+1]
        self.o = state[self.name + "c_proj.weight"].double().view(C, config.n_kv, config.group, hd)
        if config.bias:
            self.o_bias = state[self.name + "c_proj.bias"].double()
        if moments is not None:
            mean = moments.x[:, -1]
            self.around_mean = moments.x - mean[:, None] * mean  # zero in its last row and column: biases cancel

    def keys(self, group):
        """S and P of the keys of a group, a list of KV heads."""
        k, q = self.k[group], self.q[group]  # [m, hd, C+1], [m, query heads, hd, C+1]
        if self.c.dialect == "gpt2":
            k = k.flatten(0, 1)  # [m*hd, C+1]
            looks = torch.einsum("mgac,cd,mgbd->mab", q, self.moments.x, q)
            return (k @ self.around_mean @ k.T)[None], torch.block_diag(*looks)[None]
        k, q = pairs(k).transpose(0, 1), pairs(q)  # [hd/2, m, C+1], [m, query heads, hd/2, C+1]
        x = self.moments.x.to(k.dtype)
        looks = torch.einsum("mgfc,cd,mgfd->fm", q, x, q.conj()).real
        return k @ x @ k.mH, torch.diag_embed(looks).to(k.dtype)

    def turning_keys(self, group, E, most=100):
        """`descend` for the keys of a group from the commuting map E [hd, m*hd]."""
        k, x = self.k[group].flatten(0, 1), self.moments.x  # [m*hd, C+1]
        looks = torch.einsum("mgac,cd,mgbd->mgab", self.q[group], x, self.q[group])
        turns = self.moments.turns.unflatten(1, (self.c.n_kv, -1))[:, group]  # [2, m, query heads, hd/2, hd/2]
        return descend(k @ x @ k.T, looks, turns, E, most)

    def values(self, group):
        """S and P of the values of a group."""
        v = self.v[group].flatten(0, 1)  # [m*hd, C+1]
        x = self.around_mean if self.c.bias else self.moments.x
        o = self.o[:, group]  # [C, m, query heads, hd]
        heads = torch.arange(self.c.n_head, device=v.device).view(self.c.n_kv, -1)[group]  # [m, query heads]
        overlap = self.moments.overlap[heads[:, :, None, None], heads]  # [m, query heads, m, query heads]
        P = torch.einsum("mgnh,cmga,cnhb->manb", overlap, o, o).flatten(0, 1).flatten(1, 2)
        return (v @ x @ v.T)[None], P[None]

    def lost(self, group, pool):
        """
        The shares of the keys' and of the values' part that one head in place of a group loses; about 1 is all. For `aligned`
        what svd would lose: it is as much a question of what heads have in common, and quickly answered.
        """
        shares, pool = [], "svd" if pool == "aligned" else pool
        for S, P in (self.keys(group), self.values(group)):
            E, D = maps(pool, S, P, len(group))
            if pool == "svd" and E.is_complex():
                shares.append(self.turning_keys(group, real(E, self.c.head_dim), most=3)[2])  # the first steps gain most
                continue
            shares.append(error(S, P, E, D) / (torch.einsum("fab,fba->", P, S).real.item() or 1.0))
        return shares

    def similar(self, n_kv, pool):
        """Groups that lose little: from contiguous ones, heads of two groups change places while that makes the sum smaller."""
        size = self.c.n_kv // n_kv
        groups = [list(range(i, i + size)) for i in range(0, self.c.n_kv, size)]
        costs, better = [sum(self.lost(group, pool)) for group in groups], size > 1
        while better:
            better = False
            for (a, b), i, j in product(combinations(range(n_kv), 2), range(size), range(size)):
                one, other = list(groups[a]), list(groups[b])
                one[i], other[j] = other[j], one[i]
                new = [sum(self.lost(group, pool)) for group in (one, other)]
                if sum(new) < (costs[a] + costs[b]) * (1 - 1e-9):
                    groups[a], groups[b], better = sorted(one), sorted(other), True
                    costs[a], costs[b] = new
        return groups

    def pooled(self, groups, pool):
        """The layer's new weights and biases, by name, with one KV head for each of `groups`."""
        c, hd, C = self.c, self.c.head_dim, self.c.n_embd
        qs, ks, vs, os, constant = [], [], [], [], torch.zeros(C).to(self.k)
        for group in groups:
            k, v, q, o = self.k[group], self.v[group], self.q[group], self.o[:, group]
            any_ = torch.eye(len(group) * hd).to(k)[None]  # mean and first look at nothing but its shape
            problems = (any_, any_), (any_, any_)
            if pool in MEASURED:
                problems = self.keys(group), self.values(group)
            (E, D), (F, G) = (maps(pool, S, P, len(group)) for S, P in problems)
            rotary = E.is_complex()
            E, D = (real(x, hd) if rotary else x[0] for x in (E, D))
            D = D.unflatten(0, (len(group), 1, hd))  # the same for all query heads of a KV head
            if pool == "svd" and rotary:
                E, D, _ = self.turning_keys(group, E)
            ks.append(E @ k.flatten(0, 1))  # [hd, C+1]
            vs.append(F[0] @ v.flatten(0, 1))
            qs.append((D.mT @ q).flatten(0, 2))  # [m*query heads*hd, C+1]
            os.append(torch.einsum("cmga,mab->cmgb", o, G[0].unflatten(0, (-1, hd))).flatten(1))  # [C, m*query heads*hd]
            if pool == "svd" and c.bias:
                mean = v.flatten(0, 1) @ self.moments.x[:, -1]  # [m*hd]
                constant += torch.einsum("cmga,ma->c", o, (mean - G[0] @ (F[0] @ mean)).unflatten(0, (-1, hd)))
        rows = torch.cat((*qs, *ks, *vs))
        new = {"c_attn.weight": rows[:, :-1], "c_proj.weight": torch.cat(os, dim=1)}
        if c.bias:
            new |= {"c_attn.bias": rows[:, -1], "c_proj.bias": self.o_bias + constant}
        return {self.name + name: p for name, p in new.items()}


# ---------------------------------------------------------------------------------------------------------------------


def pooled_config(config, n_kv, pool):
    """The GPTConfig with n_kv heads in place of its own; ValueError for what pool_heads does not do."""
    allowed = [n for n in range(1, config.n_head + 1) if config.n_head % n == 0 and 0 in (config.n_kv % n, n % config.n_kv)]
    if n_kv not in allowed:
        raise ValueError(
            f"groups={n_kv} neither divides the {config.n_kv} KV heads of this checkpoint nor is a multiple of them that "
            f"divides its {config.n_head} query heads: groups can be {allowed}"
        )
    if pool not in POOLS:
        raise ValueError(f"pool={pool!r} is unknown: {', '.join(POOLS[:-1])} or {POOLS[-1]}")
    return replace(config, n_kv=n_kv)


def pool_heads(model, n_kv, pool="mean", seed=0, moments=None, similar=False):
    """
    A new GPT with `n_kv` key-value heads made from `model`; the model itself is left as it is.

    pool     one of POOLS, above; `seed` is that of random heads
    moments  what `measure` found; needed by MEASURED, and by
    similar  which heads form a group: those that lose little together, or, by default, neighbours. Query heads move with
             their KV heads, and the output projection's columns with them, which by itself changes nothing.

    n_kv equal to the model's is a bit-exact copy, and a multiple of it is expand_heads. ValueError for other n_kv.
    """
    c, config = model.config, pooled_config(model.config, n_kv, pool)
    if n_kv > c.n_kv:
        return expand_heads(model, n_kv)
    new = GPT(config).to(model.wte.weight)
    if n_kv < c.n_kv and moments is None and (pool in MEASURED or similar):
        raise ValueError(f"pool={pool}{' with similar heads' * similar} needs the moments that `measure` finds")
    state = dict(model.state_dict())
    if n_kv != c.n_kv:
        neighbours = torch.arange(c.n_kv).view(n_kv, -1).tolist()
        for i in tqdm(range(c.n_layer), desc=f"pool={pool}", unit="layer", disable=None, leave=False):
            layer = Layer(c, state, i, moments and moments[i])
            groups = layer.similar(n_kv, pool) if similar and pool != "random" else neighbours
            state |= layer.pooled(groups, pool)
            if pool == "random":
                for name in ("weight", "bias") if c.bias else ("weight",):
                    p = state[f"h.{i}.attn.c_attn.{name}"][c.n_head * c.head_dim :]  # [2*n_kv*hd, …]: keys and values
                    noise = torch.randn(p.shape, generator=rng(seed, "pool", i))
                    p.copy_(0.02 * noise if name == "weight" else torch.zeros_like(noise))
    new.load_state_dict(state)
    return new


def expand_heads(model, n_kv):
    """
    A new GPT with more key-value heads that computes the same: each is copied for the query heads that now have one of their
    own. ValueError unless n_kv is a multiple of the model's and divides its n_head.
    """
    c = model.config
    if not isinstance(n_kv, int) or n_kv < 1 or n_kv % c.n_kv or c.n_head % n_kv:
        raise ValueError(f"{c.n_kv} KV heads of {c.n_head} query heads cannot become {n_kv}")
    new = GPT(replace(c, n_kv=n_kv)).to(model.wte.weight)
    state = dict(model.state_dict())
    for name in [name for name in state if ".c_attn." in name]:
        q, kv = state[name].split([c.n_head * c.head_dim, 2 * c.n_kv * c.head_dim])
        kv = kv.unflatten(0, (2 * c.n_kv, c.head_dim)).repeat_interleave(n_kv // c.n_kv, dim=0)  # [2*n_kv, hd, …]
        state[name] = torch.cat((q, kv.flatten(0, 1)))
    new.load_state_dict(state)
    return new
