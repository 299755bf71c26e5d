"""Random-weight models of a real architecture, small enough to start an engine in seconds."""

from __future__ import annotations

from pathlib import Path


def save_small_llama(folder: Path, seed: int = 0, layers: int = 3, heads: int = 4, kv_heads: int = 2,
                     head_dim: int = 32, vocab: int = 512) -> Path:
    """A Llama with `heads` query heads of `head_dim`, fp32, without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=heads * head_dim, intermediate_size=2 * heads * head_dim, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=vocab,
        max_position_embeddings=2048, initializer_range=0.2, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
