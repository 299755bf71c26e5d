"""Packed query and packed answer: all layers and requests of one step in one array each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch

from ucm_ray.retrieval.representations import BlockRepresentation, get_representation, group_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Geometry(NamedTuple):
    """What one stored block looks like; everything in a worker, a shard or a pool has the same geometry."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    representation: str = "mean"
    dtype: str = "bfloat16"

    @property
    def method(self) -> BlockRepresentation:
        return get_representation(self.representation)

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise ValueError(f"retrieval dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        return DTYPES[self.dtype]

    @property
    def record_shape(self) -> tuple[int, int, int, int]:
        """`(num_layers, num_kv_heads, num_stats, head_dim)`: one block, contiguous."""
        return self.num_layers, self.num_kv_heads, self.method.num_stats, self.head_dim

    @property
    def record_bytes(self) -> int:
        return int(np.prod(self.record_shape)) * self.torch_dtype.itemsize

    def check(self) -> "Geometry":
        """Self, or ValueError naming the field that cannot be."""
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected >= 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, expected an even number (RoPE pairs channels)")
        assert self.method and self.torch_dtype  # both raise for names they do not know
        return self

    def pack(self, stats: torch.Tensor) -> torch.Tensor:
        """Statistics as `BlockRepresentation.compute` returns them, rounded to records in this geometry's dtype.

        Args:
            stats: `[num_stats, num_layers, num_blocks, num_kv_heads, head_dim]`; the layer axis may be left out when
                there is one layer.
        Returns:
            `[num_blocks, num_layers, num_kv_heads, num_stats, head_dim]`, contiguous, CPU.
        Raises:
            ValueError: other shapes, NaN or infinity (also from a value too large for float16).
        """
        if stats.dim() == 4 and self.num_layers == 1:
            stats = stats.unsqueeze(1)
        layers, heads, num_stats, head_dim = self.record_shape
        if stats.dim() != 5 or (*stats.shape[:2], *stats.shape[3:]) != (num_stats, layers, heads, head_dim):
            raise ValueError(f"stats has shape {list(stats.shape)}, expected "
                             f"[{num_stats}, {layers}, num_blocks, {heads}, {head_dim}]")
        records = stats.permute(2, 1, 3, 0, 4).to("cpu", self.torch_dtype).contiguous()
        finite = torch.isfinite(records)
        if not bool(finite.all()):
            raise ValueError(f"stats hold {int((~finite).sum())} NaN or infinite values (as {self.dtype}), "
                             "expected finite numbers")
        return records


class Source(Enum):
    """Where the answer for one request comes from."""

    EXACT = 0  # scored by whom was asked, over all candidate blocks
    LOCAL = 1  # fallback: the owner's copy was scored in this process; the same blocks as EXACT
    LAST = 2   # fallback: the request's last answer
    DENSE = 3  # fallback: no selection, read every block


@dataclass(frozen=True)
class PackedQuery:
    """The queries of one step.

    Attributes:
        request_ids: `num_requests` names; their block lists are known to whom is asked.
        features: float32 `[num_requests, num_layers, num_kv_heads, num_stats, head_dim]`, C-contiguous.
        k: int32 `[num_requests]`, how many blocks to return per layer (and KV head).
        start, stop: int32 `[num_requests]`; candidates are the blocks at positions [start, stop) of the request's list,
            so the caller keeps its initial and local windows out. stop < 0 means to the end of the list.
        per_head: select per KV head; otherwise the scores of a layer's KV heads are added.
    """

    request_ids: tuple[str, ...]
    features: np.ndarray
    k: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    per_head: bool = False

    @classmethod
    def build(cls, request_ids: Sequence[str], query: torch.Tensor, geometry: Geometry, k, start=0, stop=-1,
              per_head: bool = False) -> "PackedQuery":
        """From query vectors `[num_requests, num_layers, num_heads, head_dim]`; k, start, stop: numbers or one each.

        Raises:
            ValueError: shapes that do not fit the geometry, k or start below 0, NaN or infinity in the query.
        """
        request_ids = tuple(request_ids)
        expected = (len(request_ids), geometry.num_layers, geometry.head_dim)
        if query.dim() != 4 or (*query.shape[:2], query.shape[3]) != expected:
            raise ValueError(f"query has shape {list(query.shape)}, expected "
                             f"[{expected[0]}, {expected[1]}, num_heads, {expected[2]}]")
        packed = _pack_features(query, geometry)
        # The sum is finite exactly if all terms are, but for an overflow, which the second look rules out.
        if not np.isfinite(packed.sum()) and not np.isfinite(packed).all():
            raise ValueError(f"query holds {int((~np.isfinite(packed)).sum())} NaN or infinite values, expected finite")
        k, start, stop = (np.broadcast_to(np.asarray(value, np.int32), len(request_ids)) for value in (k, start, stop))
        for name, value in (("k", k), ("start", start)):
            if value.size and value.min() < 0:
                raise ValueError(f"{name} is {value.min()}, expected >= 0")
        return cls(request_ids, packed, k, start, stop, per_head)

    @property
    def groups(self) -> int:
        return self.features.shape[2] if self.per_head else 1

    @property
    def grouped_features(self) -> np.ndarray:
        """float32 `[num_requests, num_layers, groups, width]`, a view: what one dot product per row needs."""
        num_requests, num_layers, heads, num_stats, head_dim = self.features.shape
        return self.features.reshape(num_requests, num_layers, self.groups, -1)

    @property
    def max_k(self) -> int:
        return int(self.k.max()) if self.k.size else 0


@dataclass
class PackedAnswer:
    """The blocks chosen for each request, layer and group (KV head, or 1 when heads are summed).

    Attributes:
        request_ids: as in the query.
        blocks: int32 `[num_requests, num_layers, groups, max_k]`, positions in the request's block list, ascending, -1
            behind the last. For a DENSE request all are -1.
        scores: float32, same shape, -inf behind the last.
        candidates: int32 `[num_requests]`, how many blocks were scored for the request.
        sources: int8 `[num_requests]`, values of `Source`.
        reason: why a fallback answered; empty when none did.
    """

    request_ids: tuple[str, ...]
    blocks: np.ndarray
    scores: np.ndarray
    candidates: np.ndarray
    sources: np.ndarray = field(default=None)
    reason: str = ""

    def __post_init__(self):
        if self.sources is None:
            self.sources = np.full(len(self.request_ids), Source.EXACT.value, np.int8)

    @classmethod
    def empty(cls, query: PackedQuery, source: Source, reason: str = "") -> "PackedAnswer":
        """An answer that selects nothing."""
        shape = (*query.features.shape[:2], query.groups, query.max_k)
        num_requests = len(query.request_ids)
        return cls(query.request_ids, np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32),
                   np.zeros(num_requests, np.int32), np.full(num_requests, source.value, np.int8), reason)

    def source(self, index: int) -> Source:
        """Where the answer of the `index`-th request comes from."""
        return Source(int(self.sources[index]))

    def selected(self, index: int, layer: int, group: int = 0) -> list[int]:
        """Blocks chosen for one request, layer and group, ascending."""
        row = self.blocks[index, layer, group]
        return row[row >= 0].tolist()

    @property
    def is_exact(self) -> bool:
        """Whether every request was answered by whom was asked."""
        return not self.sources.any()


def _pack_features(query: torch.Tensor, geometry: Geometry) -> np.ndarray:
    """`PackedQuery.features` of `[num_requests, num_layers, num_heads, head_dim]`.

    In numpy: a step's queries are too small for torch's thread pool, whose wake-up can cost more than the work.
    """
    num_requests, num_layers, num_heads, head_dim = query.shape
    heads = geometry.num_kv_heads
    query = query.detach().to("cpu").contiguous()
    if query.dtype == torch.bfloat16:
        values = (query.view(torch.int16).numpy().astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = query.numpy().astype(np.float32, copy=False)
    scaled = values.reshape(num_requests, num_layers, heads, group_size(num_heads, heads), head_dim)
    scaled = scaled * np.float32(head_dim ** -0.5)
    packed = np.empty((num_requests, num_layers, heads, geometry.method.num_stats, head_dim), np.float32)
    for stat, feature in enumerate(geometry.method.features(scaled)):
        np.sum(feature, axis=3, out=packed[:, :, :, stat])
    return packed
