"""
Generating text: small pure functions over a model and a cache.

The rule past the context, the same with and without a cache: tokens collect in a window; when it would outgrow
block_size, only its newest block_size // 2 tokens are kept, their positions restart at 0 (so the cache is refilled from
them), and generation goes on. A prompt longer than block_size is cropped by the same rule.
"""

import math

import torch

import kernels
from cli import InputError, nearest, strict
from kv_cache.dense import DenseCache, DenseConfig
from kv_cache.fp8 import FP8Cache, FP8Config, fit_scales
from kv_cache.kivi import KIVICache, KIVIConfig
from kv_cache.kvquant import KVQuantCache, KVQuantConfig
from model import rotate

CACHES = {"dense": DenseConfig, "fp8": FP8Config, "kivi": KIVIConfig, "kvquant": KVQuantConfig}


def cache_config(values):
    """The config of a block of configs/cache/, as a dict with its `name`; None for none. ValueError for what is no cache."""
    options = dict(values)
    name = options.pop("name", None)
    if name == "none":
        return None
    if name not in CACHES:
        raise ValueError(f"cache.name={name} is unknown{nearest(name, CACHES)} (known: {', '.join(CACHES)})")
    return strict(CACHES[name], options, "cache")


def make_cache(model, tokens, batch=1, dtype=None, config=DenseConfig(), calibration=None):  # noqa: B008, frozen
    """
    An empty cache for `batch` sequences of up to `tokens` tokens (never more than the model's context), of the kind that
    `config` is of: one of CACHES. `dtype` is that of full-precision numbers, by default the weights'. `calibration` is what
    calibrate.py found, for configs that are `calibrated`. InputError where it lacks what they need.
    """
    c, weight = model.config, model.wte.weight
    shape = (c.n_layer, c.n_kv, c.head_dim, min(tokens, c.block_size), batch, dtype or weight.dtype, weight.device)
    if isinstance(config, DenseConfig):
        return DenseCache(*shape)
    if config.calibrated and calibration is None:
        raise ValueError(f"{config.label()} needs a calibration: storage.load_calibration, made by calibrate.py")
    if isinstance(config, FP8Config):
        scales = fit_scales(calibration["key_amax"], calibration["value_amax"], config) if config.calibrated else None
        return FP8Cache(*shape, config=config, scales=scales)
    if isinstance(config, KIVIConfig):
        return KIVICache(*shape, config=config)
    rotary = (rotate, model.cos, model.sin) if c.dialect == "llama" and config.pre_rope else None
    try:
        fits = config.fits(calibration, c.dialect)
    except ValueError as error:
        raise InputError(str(error)) from None
    return KVQuantCache(*shape, config=config, fits=fits, rotary=rotary)


def check_sampling(temperature=1.0, top_k=None, top_p=None):
    """ValueError, in one line, for settings no distribution can be made from."""
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not (number and math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature} is not allowed: 0 (greedy) or any positive number")
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise ValueError(f"top_k={top_k} is not allowed: a whole number of at least 1, or null for all tokens")
    if top_p is not None and (type(top_p) not in (int, float) or not 0 < top_p <= 1):
        raise ValueError(f"top_p={top_p} is not allowed: above 0 and up to 1, or null for all tokens")


def distribution(logits, temperature=1.0, top_k=None, top_p=None):
    """
    The probabilities [B, V] that sampling draws from, given logits [B, V]: temperature first, then the top_k most likely
    tokens, then the smallest set whose probability reaches top_p (arXiv 1904.09751, section 3.1). Temperature 0 puts all
    mass on the most likely token. In float64, and finite for any temperature.
    """
    check_sampling(temperature, top_k, top_p)
    logits = logits.double()  # a temperature of 1e-46 is 0 in float32
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)
    logits = logits - logits.max(dim=1, keepdim=True).values  # so that a tiny temperature cannot overflow
    probs = torch.softmax(logits / temperature, dim=1)
    if top_k is None and top_p is None:
        return probs
    sorted_probs, order = probs.sort(dim=1, descending=True, stable=True)
    if top_k is not None:
        sorted_probs[:, top_k:] = 0.0
        sorted_probs /= sorted_probs.sum(dim=1, keepdim=True)
    if top_p is not None:
        before = sorted_probs.cumsum(dim=1) - sorted_probs  # mass of all more likely tokens
        sorted_probs[before >= top_p] = 0.0
        sorted_probs /= sorted_probs.sum(dim=1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, order, sorted_probs)


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """One token [B] from logits [B, V]; temperature 0 is greedy and draws nothing from the generator."""
    if temperature == 0:
        return logits.argmax(dim=1)
    probs = distribution(logits, temperature, top_k, top_p)
    if generator is not None:
        probs = probs.to(generator.device)  # one CPU generator gives the same draws on every device
    return torch.multinomial(probs, 1, generator=generator).squeeze(1).to(logits.device)


def next_logits(model, idx, cache=None):
    """Logits [B, V] for the token after idx [B, T]; only the last position goes through the head."""
    return model.lm_head(model.features(idx, cache)[:, -1])


class GraphStep:
    """
    One-token steps on a CUDA GPU without Python between the kernels: GraphStep(model, cache)(idx [B, 1]) -> logits [B, V].
    A captured graph has fixed shapes, so it looks at a window of the cache, masked beyond the tokens held: one graph for
    each WINDOW tokens of length, captured when first needed.
    """

    WINDOW = 256

    def __init__(self, model, cache):
        self.model, self.cache, self.graphs = model, cache, {}
        device = model.wte.weight.device
        self.idx = torch.zeros(cache.keys[0].size(0), 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        for tensor in cache.keys + cache.values:
            tensor[:, :, cache.length :] = 0  # fresh memory may hold NaN, and a weight of 0 times NaN is NaN

    def run(self, window):
        """The step as it is captured, over self.idx and self.position."""
        self.cache.position, self.cache.window = self.position, window
        try:
            return next_logits(self.model, self.idx, self.cache)
        finally:
            self.cache.position = None

    def capture(self, window):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run(window)  # once outside: allocations and choices of kernels are no part of a graph
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.run(window)
        return graph, logits

    def __call__(self, idx):
        window = min(self.cache.capacity, (self.cache.length // self.WINDOW + 1) * self.WINDOW)
        self.idx.copy_(idx)
        self.position.fill_(self.cache.length)
        if window not in self.graphs:
            self.graphs[window] = self.capture(window)
        graph, logits = self.graphs[window]
        graph.replay()
        self.cache.length += 1
        return logits.clone()


def feeder(model, cache=None):
    """
    The fastest way to feed tokens here: a function from new tokens idx [B, t] to the logits [B, V] that follow them. On a
    CPU that has a compiler few tokens go through one call of the whole step (kernels.Step, for caches that it can write),
    with a dense cache on a GPU single ones through a captured graph (GraphStep); everything else through the model.
    """
    step = None if cache is None else kernels.Step(model)
    graph = GraphStep(model, cache) if isinstance(cache, DenseCache) and cache.keys[0].is_cuda else None

    def feed(idx):
        if graph is not None and idx.size(1) == 1 and cache.length < cache.capacity:
            return graph(idx)
        if step is not None and step.serves(idx, cache):
            return step(idx, cache)[:, -1]
        return next_logits(model, idx, cache)

    return feed


@torch.no_grad()
def prefill(model, idx, cache, chunk=None):
    """Feed a prompt [B, T] into the cache, `chunk` tokens at a time (default: all at once) -> next logits [B, V]."""
    feed = feeder(model, cache)
    for part in idx.split(chunk or idx.size(1), dim=1):
        logits = feed(part)
    return logits


@torch.no_grad()
def generate(model, idx, max_new_tokens, cache=None, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    Continue the prompts idx [B, T]: yields one token [B] at a time, max_new_tokens times. Without a cache the whole window
    is recomputed for each token; with one, only the new token is. Same text either way, past the context too (see the rule
    at the top). ValueError, before any work, for an empty prompt, sampling settings out of range or a cache too small.
    """
    B, T = idx.shape
    check_sampling(temperature, top_k, top_p)
    if T == 0:
        raise ValueError("the prompt is empty: give at least one token")
    block = model.config.block_size
    needed = min(block, T + max_new_tokens - 1)  # the last token is returned, never fed
    if cache is not None:
        if cache.capacity < needed:
            raise ValueError(f"the cache holds {cache.capacity} tokens, this generation needs {needed}")
        cache.reset()
    tokens = torch.empty(B, T + max_new_tokens, dtype=torch.long, device=idx.device)
    tokens[:, :T] = idx
    feed = feeder(model, cache)
    start = 0  # the window is tokens[:, start:stop]
    for stop in range(T, T + max_new_tokens):
        if stop - start > block:
            start = stop - max(1, block // 2)
            if cache is not None:
                cache.reset()
        held = 0 if cache is None else cache.length
        logits = feed(tokens[:, start + held : stop])
        token = sample_token(logits, temperature, top_k, top_p, generator)
        tokens[:, stop] = token
        yield token
