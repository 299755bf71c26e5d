"""What ESA knows of a request: the seed's `ReqMeta` for one step, and the state that lives from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


def membership(blocks: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """bool `[..., num_blocks]`: whether a block is among `blocks` `[..., n]`."""
    # numpy's zeros: torch wakes its threads for as little as this
    found = torch.from_numpy(np.zeros((*blocks.shape[:-1], num_blocks), bool))
    return found.scatter_(-1, blocks, True)


@dataclass
class ReqMeta:
    """One request in one step (the seed's fields, then ours).

    `num_computed_tokens` tokens were in the cache before this step, `num_scheduled_tokens` are computed in it.
    `selected_blocks` are the positions in `vllm_block_ids` that this step reads in any layer or head, ascending; all of
    them when it is read densely.
    """

    request_id: str
    index_in_batch: int
    num_scheduled_tokens: int
    num_computed_tokens: int
    vllm_block_ids: list[int]
    ucm_block_hashes: list[str] = field(default_factory=list)
    selected_blocks: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0  # tokens that are prefilled, not decoded; always read densely
    sparse_ratio: float | None = None  # None: the configured one
    first_sparse_token: int = 0  # tokens before this one are read densely whatever the budget says
    token_ids: np.ndarray | None = None  # `[num_tokens]`, this step's included; None: nothing is chosen by them

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache when this step attends."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def is_decode(self) -> bool:
        return self.num_scheduled_tokens == 1 and self.num_computed_tokens >= self.num_prompt_tokens


class Usage(NamedTuple):
    """Receipt of one request: blocks per layer and head, summed over decode steps."""

    blocks_read: int = 0
    blocks_total: int = 0
    sparse_steps: int = 0
    dense_steps: int = 0
    fallbacks: int = 0
    max_staleness: int = 0

    def to_dict(self) -> dict[str, int]:
        return self._asdict()


class Selection(NamedTuple):
    """What a request reads until the next selection.

    `middle` int64 `[num_layers, groups, k]`, positions in the request's block list, any order; a group is a KV head,
    or all of them. Everything from `local_start` on is read as well. The last `num_lexical` of `middle`, best first,
    give way to blocks that repeat the last tokens. `is_fixed` bool `[num_layers, groups, local_start]`: the others.
    """

    init: int
    local_start: int
    middle: torch.Tensor
    num_lexical: int
    is_fixed: torch.Tensor

    @classmethod
    def of(cls, init: int, local_start: int, middle: torch.Tensor, num_lexical: int) -> Selection:
        fixed = middle[..., : middle.shape[-1] - num_lexical]
        return cls(init, local_start, middle, num_lexical, membership(fixed, local_start))

    def blocks_read(self, middle: torch.Tensor, num_blocks: int) -> list[int]:
        """Blocks that are read in any layer or group, ascending, with `middle` in place of the selection's own."""
        chosen = np.zeros(num_blocks, bool)
        chosen[: self.init] = chosen[self.local_start :] = True
        chosen[middle.numpy()] = True
        return np.flatnonzero(chosen).tolist()

    def with_blocks(self, wanted: np.ndarray) -> torch.Tensor:
        """`[num_layers, groups, num_lexical]`: the wanted blocks that are not fixed, then the best of the rest."""
        rest = self.middle[..., self.middle.shape[-1] - self.num_lexical :]
        if not len(wanted):
            return rest
        wanted = torch.from_numpy(wanted)
        candidates = torch.cat([wanted.expand(*rest.shape[:2], -1), rest], -1)
        is_double = torch.cat([self.is_fixed[..., wanted], torch.isin(rest, wanted)], -1)
        # what is not double comes first, in its order: among the wanted and the rest there is always enough of it
        order = is_double.to(torch.uint8).argsort(dim=-1, stable=True)[..., : self.num_lexical]
        return candidates.gather(-1, order)


@dataclass
class RequestState:
    """A request from its first step to its last. Dropped on preemption: resumed, it starts anew."""

    request_id: str
    num_prompt_tokens: int
    ratio: float
    num_layers: int
    key_prefix: str
    block_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_tokens: int = 0
    num_indexed: int = 0  # full blocks whose representation the retriever has
    prompt_queries: list[list[torch.Tensor]] = field(default_factory=list)  # per layer, pieces [n, num_heads, head_dim]
    static: torch.Tensor | None = None  # int64 [num_layers, groups, num_static]
    selection: Selection | None = None
    version: int = 0  # grows with every selection
    age: int = 0  # decode steps since the query of the present selection
    selected_with: torch.Tensor | None = None  # [num_layers, num_heads, head_dim]
    pending: object | None = None
    dense_for_now: bool = False  # the fallback answered: read everything until a selection comes
    stands_in: bool = False  # the fallback answered: the last selection serves beyond its age
    selected_blocks: list[int] = field(default_factory=list)
    usage: Usage = Usage()

    def __post_init__(self) -> None:
        self.prompt_queries = [[] for _ in range(self.num_layers)]

    def count(self, **more: int) -> None:
        """Add to the receipt; `max_staleness` is a maximum."""
        staleness = max(self.usage.max_staleness, more.pop("max_staleness", 0))
        self.usage = self.usage._replace(
            max_staleness=staleness, **{name: getattr(self.usage, name) + value for name, value in more.items()}
        )
