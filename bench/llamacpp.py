"""
llama.cpp as a peer of bench.py, through llama-cpp-python: a Llama of the same shape and random weights, written as GGUF.

A step is llama_decode of one token a sequence, waiting for its logits, and the greedy choice. Copying a prompt's cache to
the other sequences copies its cells (each sequence has a stream of its own), so each step reads separate memory for each.
"""

import os
import tempfile
import time

from protocol import serve  # before the others: what they print is no answer

import gguf
import llama_cpp as C
import numpy as np

VOCAB, HIDDEN, LAYERS, HEADS, HEAD, MLP = 65, 256, 6, 8, 32, 704
MAX_POSITION = 8192 + 64
TYPES = {
    name: getattr(gguf.GGMLQuantizationType, t) for name, t in (("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16"))
}
# Both chosen by timing on 2 cores of AVX2, 8 sequences of 1000 tokens: flash attention's CPU kernel took 1 to 8 times as long a
# step, most with float32 and 8 KV heads; a cache unified over the sequences 3 to 5 times, for each then attends over all
# cells (and a copy within it makes sequences share cells, which would measure something else).
UNIFIED, FLASH = False, C.LLAMA_FLASH_ATTN_TYPE_DISABLED


def write_gguf(path, n_kv, dtype):
    w, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    w.add_context_length(MAX_POSITION)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(MLP)
    w.add_head_count(HEADS)
    w.add_head_count_kv(n_kv)
    w.add_rope_dimension_count(HEAD)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("no_vocab")  # token ids in and out

    def add(name, rows, cols):  # bf16 goes in as bytes, numpy has no such type
        x = 0.02 * rng.standard_normal((rows, cols), dtype=np.float32)
        w.add_tensor(name, gguf.quants.quantize(x, TYPES[dtype]), raw_dtype=TYPES[dtype])

    add("token_embd.weight", VOCAB, HIDDEN)  # without an output.weight the head is tied to it
    w.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for i in range(LAYERS):
        for name in "attn_norm", "ffn_norm":  # llama.cpp keeps norms in float32
            w.add_tensor(f"blk.{i}.{name}.weight", np.ones(HIDDEN, np.float32))
        for name, rows, cols in (
            ("attn_q", HEADS * HEAD, HIDDEN),
            ("attn_k", n_kv * HEAD, HIDDEN),
            ("attn_v", n_kv * HEAD, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD),
            ("ffn_gate", MLP, HIDDEN),
            ("ffn_up", MLP, HIDDEN),
            ("ffn_down", HIDDEN, MLP),
        ):
            add(f"blk.{i}.{name}.weight", rows, cols)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def load(n_kv, dtype):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        write_gguf(path, n_kv, dtype)
        params = C.llama_model_default_params()
        params.use_mmap = False  # the file is gone after this
        model = C.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise RuntimeError("llama.cpp did not load the model")
    return model


def decode(ctx, batch, tokens, positions, sequences, wanted=True):
    batch.n_tokens = len(tokens)
    for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    if code := C.llama_decode(ctx, batch):
        raise RuntimeError(f"llama_decode returned {code}")


def time_steps(model, batch, context, dtype, steps, threads):
    params = C.llama_context_default_params()
    room = -(-context // 256) * 256  # llama.cpp rounds a sequence's cache up to this
    params.n_ctx, params.n_seq_max, params.kv_unified = batch * room, batch, UNIFIED
    params.n_batch = params.n_ubatch = max(512, batch)
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = TYPES[dtype].value
    params.flash_attn_type = FLASH
    ctx = C.llama_init_from_model(model, params)
    if not ctx:
        raise RuntimeError("llama.cpp made no context of this size or these types")
    memory, rows = C.llama_get_memory(ctx), C.llama_batch_init(params.n_batch, 0, 1)
    rng, seconds = np.random.default_rng(0), []
    try:
        prompt = context - steps - 1
        for start in range(0, prompt, params.n_batch):
            places = range(start, min(start + params.n_batch, prompt))
            decode(ctx, rows, rng.integers(VOCAB, size=len(places)).tolist(), places, [0] * len(places), wanted=False)
        for sequence in range(1, batch):  # a copy of the cells into the sequence's own stream, made at the next decode
            C.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        # Different tokens from here on. The first step is not timed: it makes the copies.
        tokens, sequences = [i % VOCAB for i in range(batch)], range(batch)
        for position in range(prompt, context):
            start = time.perf_counter()
            decode(ctx, rows, tokens, [position] * batch, sequences)
            logits = np.ctypeslib.as_array(C.llama_get_logits(ctx), (batch, VOCAB))  # waits for the step to be done
            tokens = logits.argmax(1).tolist()
            seconds.append(time.perf_counter() - start)
    finally:
        C.llama_batch_free(rows)
        C.llama_free(ctx)
    return seconds[1:]


loaded = {}


def measure(q):
    if q["dialect"] != "llama":
        return {"skip": "measured as Llama only"}
    key = q["n_kv"], q["dtype"]
    if key not in loaded:
        while loaded:
            C.llama_model_free(loaded.popitem()[1])
        loaded[key] = load(*key)
    return {"steps_s": time_steps(loaded[key], *(q[k] for k in ("batch", "context", "dtype", "steps", "threads")))}


if __name__ == "__main__":
    C.llama_backend_init()
    have = f"{C.llama_print_system_info().decode()} "
    isa = next((name for name in ("AVX512_BF16", "AVX512", "AVX2", "AVX", "NEON") if f" {name} = 1 " in have), "no vectors")
    serve("llama.cpp", f"llama-cpp-python {C.__version__}, no flash attention (the faster here), {isa}", measure)
