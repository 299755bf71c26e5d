"""How much attention the last queries of a prompt pay to each block: the static share of a selection."""

from __future__ import annotations

import torch

_CHUNK_BYTES = 64 << 20


def prompt_block_mass(
    queries: torch.Tensor, keys: torch.Tensor, num_tokens: int, block_size: int, scale: float
) -> torch.Tensor:
    """Attention mass of each block, summed over queries and over the query heads of a KV head.

    Args:
        queries: `[n, num_heads, head_dim]`, those of positions `num_tokens - n ... num_tokens - 1`.
        keys: `[num_kv_heads, head_dim, num_blocks * block_size]`, the blocks that hold `num_tokens` tokens; what lies
            behind the last token is ignored.
        scale: of the logits, usually `head_dim ** -0.5`.
    Returns:
        `[num_kv_heads, num_blocks]`, float32; the mass of one query and head adds up to 1.
    """
    n, num_heads, head_dim = queries.shape
    kv_heads, _, length = keys.shape
    grouped = queries.float().view(n, kv_heads, num_heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(kv_heads, -1, head_dim) * scale
    position = torch.arange(length, device=keys.device)
    unseen = position > torch.arange(num_tokens - n, num_tokens, device=keys.device)[:, None]
    mass = torch.empty(kv_heads, length // block_size, device=keys.device)
    heads_at_once = max(1, _CHUNK_BYTES // (4 * grouped.shape[1] * length))
    for start in range(0, kv_heads, heads_at_once):
        part = slice(start, start + heads_at_once)
        logits = torch.bmm(grouped[part], keys[part].float())
        logits.view(-1, n, length).masked_fill_(unseen, float("-inf"))
        mass[part] = logits.softmax(-1).sum(1).view(-1, length // block_size, block_size).sum(-1)
    return mass
