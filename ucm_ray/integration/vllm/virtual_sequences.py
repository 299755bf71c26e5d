"""Selective recompute in stock vLLM: scattered ranges of a prompt as rows of one varlen batch.

Each range (row) is given to the attention backend as a sequence of its own whose length ends with the range and whose
block table is the request's. Every layer writes all rows' keys and values before it attends, so later ranges see the
fresh KV of earlier ones and each row's causal mask is exact. Blocks can be left out of a row's table: keys carry their
positions, so the row is computed as if the prompt had a hole there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from ucm_ray.integration.vllm import esa_backend
from ucm_ray.integration.vllm.paged_kv import PagedKV


class Row(NamedTuple):
    """One contiguous range of positions of one request."""

    start: int
    end: int
    token_ids: np.ndarray  # the request's, int32, at least up to `end`
    block_ids: np.ndarray  # the request's, int64, at least up to `end`
    owner: object = None  # whoever wants to recognise its rows again
    hidden: tuple[int, int] | None = None  # whole blocks before `start` that the row does not look at

    @property
    def num_seen(self) -> int:
        """Tokens that the row's last one looks at."""
        return self.end - (self.hidden[1] - self.hidden[0] if self.hidden else 0)

    def seen_blocks(self, block_size: int) -> np.ndarray:
        """The blocks of these tokens, in order, and more behind them."""
        if self.hidden is None:
            return self.block_ids
        first, last = self.hidden
        return np.concatenate([self.block_ids[: first // block_size], self.block_ids[last // block_size :]])


Observe = Callable[[int, torch.Tensor, Sequence[Row]], None]


class VirtualSequences:
    """Runs rows through the model the worker has loaded, outside the engine's own batch."""

    def __init__(self, vllm_config: VllmConfig, model: torch.nn.Module, paged: PagedKV) -> None:
        self.model, self.paged = model, paged
        self._vllm_config = vllm_config
        first = paged.layers[paged.names[0]]
        # GPU builders may hold buffers for `max_num_seqs` sequences;
        # the CPU's holds none, and many rows a pass save passes
        is_cpu = first.attn_backend.get_name() == "CPU_ATTN"
        self.max_rows = vllm_config.scheduler_config.max_num_batched_tokens if is_cpu else (
            vllm_config.scheduler_config.max_num_seqs)
        self.max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.skip_compiled = False
        """Run the model's Python instead of its compiled form (as passes over the first layers always do)."""
        self._layer_index = {id(paged.layers[name]): index for index, name in enumerate(paged.names)}
        # a builder of our own: the runner's may hold buffers staged for the engine's step
        builder_cls = first.attn_backend.get_builder_cls()
        self._builder = builder_cls(first.get_kv_cache_spec(vllm_config), paged.names, vllm_config, paged.device)

    def run(self, rows: Sequence[Row], num_layers: int | None = None, observe: Observe | None = None) -> int:
        """Recompute `rows` (of any requests; per request ascending and disjoint) in as few passes as limits allow.

        `num_layers` runs the first layers only. `observe(layer, query, rows)` is called before each layer attends, with
        the queries `[tokens, num_heads, head_dim]` of the pass. Returns the number of passes.
        """
        passes = split_rows(rows, self.max_rows, self.max_tokens)
        for batch in passes:
            with observing(self._layer_index, batch, observe):
                self._forward(batch, num_layers)
        return len(passes)

    def _forward(self, rows: Sequence[Row], num_layers: int | None) -> None:
        device = self.paged.device
        positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
        token_ids = np.concatenate([row.token_ids[row.start : row.end] for row in rows])
        block_size = self.paged.block_size
        slots = np.concatenate([
            row.block_ids[at // block_size] * block_size + at % block_size
            for row in rows for at in (np.arange(row.start, row.end),)
        ])
        lengths = np.fromiter((row.end - row.start for row in rows), np.int32, len(rows))
        seen = np.fromiter((row.num_seen for row in rows), np.int32, len(rows))
        width = -(-int(seen.max()) // block_size)
        table = np.zeros((len(rows), width), np.int32)
        for index, row in enumerate(rows):
            used = row.seen_blocks(block_size)[:width]
            table[index, : len(used)] = used
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        slot_mapping = torch.from_numpy(slots).to(device)
        seq_lens = torch.from_numpy(seen)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(rows),
            num_actual_tokens=len(positions),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seen.max()),
            block_table_tensor=torch.from_numpy(table).to(device),
            slot_mapping=slot_mapping,
            causal=True,
        )
        attn_metadata = self._builder.build(0, common)
        with (
            torch.inference_mode(),
            set_forward_context(
                {name: attn_metadata for name in self.paged.names}, self._vllm_config, num_tokens=len(positions),
                slot_mapping={name: slot_mapping for name in self.paged.names},
                skip_compiled=self.skip_compiled or num_layers is not None,
            ),
            first_layers(self.model, num_layers),
        ):
            # dtypes as the runner's: a compiled model was traced with them and checks nothing
            self.model(input_ids=torch.from_numpy(token_ids.astype(np.int32)).to(device),
                       positions=torch.from_numpy(positions.astype(np.int64)).to(device))


@contextmanager
def observing(layer_index: dict[int, int], rows: Sequence[Row], observe: Observe | None):
    """Let `observe` see the queries of every layer while the block runs."""
    if observe is None:
        yield
        return

    def hook(layer, impl, query, kv_cache, attn_metadata) -> None:
        observe(layer_index[id(layer)], query, rows)

    esa_backend.OBSERVER = hook
    try:
        yield
    finally:
        esa_backend.OBSERVER = None


@contextmanager
def first_layers(model: torch.nn.Module, num_layers: int | None):
    """Let a decoder model stop after its first `num_layers` layers; all of them if None."""
    if num_layers is None:
        yield
        return
    decoder = decoder_of(model)
    end, decoder.end_layer = decoder.end_layer, min(num_layers, decoder.end_layer)
    try:
        yield
    finally:
        decoder.end_layer = end


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """The stack of decoder layers inside a causal language model. Raises ValueError if there is none."""
    decoder = getattr(model, "model", None)
    if decoder is None or not hasattr(decoder, "end_layer"):
        raise ValueError(f"{type(model).__name__}: expected a decoder with `model.end_layer`")
    return decoder


def split_rows(rows: Sequence[Row], max_rows: int, max_tokens: int) -> list[list[Row]]:
    """Cut rows into passes of at most `max_rows` rows and `max_tokens` tokens; a longer row is cut in order."""
    passes: list[list[Row]] = []
    batch: list[Row] = []
    room = max_tokens
    for row in rows:
        start = row.start
        while start < row.end:
            if not room or len(batch) == max_rows:
                passes.append(batch)
                batch, room = [], max_tokens
            end = min(row.end, start + room)
            batch.append(row._replace(start=start, end=end))
            room -= end - start
            start = end
    if batch:
        passes.append(batch)
    return passes
