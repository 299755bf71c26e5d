"""The question's attention to every earlier token, measured while its rows run (kernels return no weights)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ucm_ray.integration.vllm.paged_kv import PagedKV
from ucm_ray.integration.vllm.virtual_sequences import Row


class QuestionObserver:
    """Called by `VirtualSequences` before each layer attends; adds to `mass` of tasks whose question is in the pass.

    The sum over heads and question tokens stands for the mean: only the order of tokens matters.
    """

    def __init__(self, paged: PagedKV, layers: dict[str, Any]) -> None:
        self.paged = paged
        self.scale = float(next(iter(layers.values())).impl.scale)

    def __call__(self, layer: int, query: torch.Tensor, rows: Sequence[Row]) -> None:
        offset = 0
        for row in rows:
            length = row.end - row.start
            task = row.owner
            if task.phase == "observing" and getattr(task, "mass", None) is not None and task.plan.question is not None:
                first = max(row.start, task.plan.question[0])
                if first < row.end:
                    begin = offset + first - row.start
                    self._observe(layer, query[begin : offset + length], first, row.hidden, task)
            offset += length

    def _observe(self, layer: int, query: torch.Tensor, first: int, hidden: tuple[int, int] | None, task) -> None:
        """`query` `[n, num_heads, head_dim]` of positions `first ... first + n - 1`, which do not look at `hidden`."""
        n, heads, dim = query.shape
        end = first + n
        kv_heads = self.paged.num_kv_heads
        blocks = torch.from_numpy(task.meta.block_ids[: -(-end // self.paged.block_size)].astype(np.int64))
        keys = self.paged.key_blocks(layer, blocks.to(self.paged.device))[..., :end]
        grouped = query.view(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        # in the model's precision, as its own kernels: a wider copy of all keys costs more than the product
        logits = (grouped @ keys).float().mul_(self.scale).view(kv_heads, heads // kv_heads, n, end)
        future = torch.ones(n, n, dtype=torch.bool, device=logits.device).triu_(1)
        logits[..., first:].masked_fill_(future, float("-inf"))
        if hidden is not None:
            logits[..., hidden[0] : hidden[1]] = float("-inf")
        mass = logits.softmax(-1).sum((0, 1, 2))
        start = task.plan.start
        task.mass[layer, : end - start] += mass[start:].cpu()
