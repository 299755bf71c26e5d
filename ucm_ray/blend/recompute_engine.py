"""Selective recompute of one attention layer in plain torch: the exact reference for what the engine does.

In the engine a recomputed token's K and V must reach every later layer, so there ranges of tokens run through the whole
model as virtual sequences; this function repairs the output of one layer, given the K and V it should see.
"""

from __future__ import annotations

import torch

from ucm_ray.blend.policies.base import positions_to_ranges


def recompute_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, recompute_mask: torch.Tensor,
    original_output: torch.Tensor, query_start: int = 0, scale: float | None = None,
) -> torch.Tensor:
    """`original_output` with the rows under `recompute_mask` replaced by exact causal attention.

    query, original_output `[num_tokens, num_heads, head_dim]`, row i at position `query_start + i`; key, value
    `[num_positions, num_kv_heads, head_dim]` from position 0 on, at least up to the last masked row; recompute_mask
    bool `[num_tokens]`. `scale` is 1 / sqrt(head_dim) by default. Computed in float32, returned in the output's dtype.

    Each row attends to the positions up to its own, wherever the other rows stand: a masked row depends on no key or
    value after its range. Raises ValueError for shapes that do not fit.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if recompute_mask.shape != (num_tokens,) or recompute_mask.dtype != torch.bool:
        raise ValueError(f"recompute_mask: found {recompute_mask.dtype} {tuple(recompute_mask.shape)}, "
                         f"expected bool ({num_tokens},)")
    if num_heads % num_kv_heads or key.shape != value.shape or key.shape[2] != head_dim:
        raise ValueError(f"key, value: found {tuple(key.shape)} and {tuple(value.shape)}, "
                         f"expected [positions, a divisor of {num_heads}, {head_dim}]")
    result = original_output.clone()
    scale = head_dim**-0.5 if scale is None else scale
    for start, end in positions_to_ranges(recompute_mask.nonzero().flatten().cpu().numpy()):
        last = query_start + end
        if last > key.shape[0]:
            raise ValueError(f"key: found {key.shape[0]} positions, row {end - 1} needs {last}")
        rows = query[start:end].float().view(end - start, num_kv_heads, -1, head_dim)
        scores = torch.einsum("thgd,shd->hgts", rows, key[:last].float()) * scale
        position = torch.arange(query_start + start, last, device=query.device)
        future = torch.arange(last, device=query.device)[None] > position[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        output = torch.einsum("hgts,shd->thgd", weights, value[:last].float())
        result[start:end] = output.reshape(end - start, num_heads, head_dim).to(result.dtype)
    return result
