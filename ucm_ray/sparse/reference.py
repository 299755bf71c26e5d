"""Paged attention in plain torch over what a `SparseView` names: the definition the engine's kernels are held to."""

from __future__ import annotations

import torch

from ucm_ray.sparse.esa import EsaMetadata


def attend(query: torch.Tensor, kv_cache: torch.Tensor, metadata: EsaMetadata) -> torch.Tensor:
    """Causal attention of one layer, sparse rows by `metadata.view`, all others over their whole context.

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        kv_cache: `[2, num_blocks, block_size, num_kv_heads, head_dim]`; this step's keys and values are in it.
        metadata: after `ESA.attention_begin` of this layer; all rows must have a request.
    Returns:
        `[num_tokens, num_heads, head_dim]`, dtype of the query.
    """
    output = torch.empty_like(query)
    view = metadata.view
    narrowed = {} if view is None else {row: index for index, row in enumerate(view.rows)}
    for meta in metadata.requests:
        start, end = metadata.query_start_loc[meta.index_in_batch : meta.index_in_batch + 2]
        if meta.index_in_batch in narrowed:
            output[start] = _attend_selected(query[start], kv_cache, view, narrowed[meta.index_in_batch])
        else:
            output[start:end] = _attend_all(query[start:end], kv_cache, meta)
    return output


def _attend_selected(query: torch.Tensor, kv_cache: torch.Tensor, view, index: int) -> torch.Tensor:
    num_kv_heads = kv_cache.shape[3]
    groups = view.block_table.shape[0] // len(view.rows)
    output = []
    for head, grouped in enumerate(query.view(num_kv_heads, -1, query.shape[-1])):
        row = index * groups + (head if groups > 1 else 0)
        length = int(view.seq_lens[row])
        blocks = view.block_table[row, : -(-length // kv_cache.shape[2])].long()
        if groups > 1:
            if bool((blocks % groups != head).any()):
                raise ValueError(f"block table of KV head {head} names blocks of another head")
            blocks = blocks // groups
        keys, values = kv_cache[:, blocks, :, head].flatten(1, 2)[:, :length]
        output.append(_softmax_attention(grouped, keys, values))
    return torch.cat(output)


def _attend_all(query: torch.Tensor, kv_cache: torch.Tensor, meta) -> torch.Tensor:
    length, block_size = meta.num_tokens, kv_cache.shape[2]
    blocks = torch.as_tensor(meta.vllm_block_ids)[: -(-length // block_size)].long()
    keys, values = kv_cache[:, blocks].flatten(1, 2)[:, :length]
    repeat = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    logits = torch.einsum("qhd,khd->hqk", query.float(), keys.float()) * query.shape[-1] ** -0.5
    unseen = torch.arange(length) > torch.arange(length - len(query), length)[:, None]
    weights = logits.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.float()).to(query.dtype)


def _softmax_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    logits = query.float() @ keys.float().T * query.shape[-1] ** -0.5
    return (logits.softmax(-1) @ values.float()).to(query.dtype)
