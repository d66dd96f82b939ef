"""Small Llama folders as Hugging Face writes them, with a tokenizer of characters: what tests of serve.py serve."""

import torch
from tokenizers import Tokenizer, decoders, models

CHARS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # Tiny Shakespeare's 65


def llama_folder(folder, n_kv, n_layer=6, head_dim=32, context=256, seed=0, padding=0):
    """
    A folder with 8 query heads of random weights, large enough to make one token clearly more likely than others; with
    `padding` more rows in its embedding than its tokenizer has tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(CHARS) + padding, hidden_size=8 * head_dim, num_hidden_layers=n_layer, num_attention_heads=8,
        num_key_value_heads=n_kv, head_dim=head_dim, intermediate_size=22 * head_dim, max_position_embeddings=context,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(CHARS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
