"""The three functions of the seed: represent a block, compare a query with blocks, select the best blocks.

They are the readable definition of what retrieval answers; `ucm_ray.retrieval.scoring` does the same work for all
layers and requests of a step at once and is tested against them.
"""

import torch

from ucm_ray.retrieval.representations import group_size


def compute_block_representation(block_kv: torch.Tensor) -> torch.Tensor:
    """Mean of the keys of one block (the seed's representation; others in `ucm_ray.retrieval.representations`).

    Args:
        block_kv: keys, `[block_size, num_heads, head_dim]`.
    Returns:
        `[num_heads, head_dim]`, dtype of the input; averaged in float32.
    Raises:
        ValueError: wrong rank, or an empty block, whose mean does not exist.
    """
    if block_kv.dim() != 3 or block_kv.shape[0] == 0:
        raise ValueError(
            f"block_kv has shape {list(block_kv.shape)}, expected [block_size >= 1, num_heads, head_dim]")
    return block_kv.float().mean(dim=0).to(block_kv.dtype)


def compute_similarity(query_repr: torch.Tensor, block_reprs: torch.Tensor) -> torch.Tensor:
    """Dot product of a query with block representations, summed over heads (the seed's; not scaled).

    Args:
        query_repr: `[num_heads, head_dim]`; with grouped-query attention num_heads is a multiple of num_kv_heads, and
            the query heads of a group are all compared with their KV head.
        block_reprs: `[num_blocks, num_kv_heads, head_dim]`; num_blocks may be 0.
    Returns:
        `[num_blocks]`, float32.
    Raises:
        ValueError: shapes that do not fit.
    """
    if query_repr.dim() != 2 or block_reprs.dim() != 3 or query_repr.shape[1] != block_reprs.shape[2]:
        raise ValueError(
            f"query_repr {list(query_repr.shape)} and block_reprs {list(block_reprs.shape)} do not fit, expected "
            "[num_heads, head_dim] and [num_blocks, num_kv_heads, head_dim]")
    num_heads, head_dim = query_repr.shape
    num_kv_heads = block_reprs.shape[1]
    grouped = query_repr.float().reshape(num_kv_heads, group_size(num_heads, num_kv_heads), head_dim).sum(dim=1)
    return torch.einsum("hd,nhd->n", grouped, block_reprs.float())


def select_top_k_blocks(scores: torch.Tensor, k: int, local_window: int, total_blocks: int,
                        init_window: int = 1) -> list[int]:
    """Initial blocks, local blocks and the best of the rest, `k` in all (the seed's).

    Both windows are always kept, so with `k` below their size the result is just the windows; with `k` at or above
    `total_blocks` it is every block. Of equal scores the lower block index wins.

    Args:
        scores: `[total_blocks]`, finite.
        k: how many blocks to keep, windows included.
        local_window: how many blocks at the end are always kept.
        total_blocks: how many blocks the request has; 0 gives an empty list.
        init_window: how many blocks at the start are always kept (attention sinks).
    Returns:
        Sorted, unique block indices in [0, total_blocks), at most max(k, windows) of them.
    Raises:
        ValueError: a negative argument, scores of another length, NaN or infinite scores.
    """
    for name, value in (("k", k), ("local_window", local_window), ("total_blocks", total_blocks),
                        ("init_window", init_window)):
        if value < 0:
            raise ValueError(f"{name} is {value}, expected >= 0")
    if scores.shape != (total_blocks,):
        raise ValueError(f"scores has shape {list(scores.shape)}, expected [{total_blocks}] (total_blocks)")
    require_finite(scores, "scores")
    start = min(init_window, total_blocks)
    stop = max(start, total_blocks - local_window)
    num_middle = max(0, min(k - start - (total_blocks - stop), stop - start))
    middle = start + top_k_indices(scores[start:stop], num_middle)
    return [*range(start), *middle.tolist(), *range(stop, total_blocks)]


def top_k_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the `k` best scores of every row, ascending; of equal scores the lower index wins.

    Args:
        scores: `[..., n]`, finite.
        k: at most n.
    Returns:
        `[..., k]`, int64, sorted along the last dimension.
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]
    return order.sort(dim=-1).values


def require_finite(values: torch.Tensor, name: str) -> None:
    """Raises ValueError if `values` holds NaN or infinity; one bad number would silently reorder a whole selection."""
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise ValueError(f"{name} holds {bad} NaN or infinite values of {values.numel()}, expected finite numbers")
