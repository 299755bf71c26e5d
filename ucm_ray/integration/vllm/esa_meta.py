"""What the scheduler's and the worker's half of ESA tell each other every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class EsaRequestStep:
    """One tracked request in one step. `block_ids` int64: its new blocks, or all of them if `replace`."""

    request_id: str
    num_scheduled_tokens: int
    num_computed_tokens: int
    block_ids: np.ndarray
    replace: bool = False
    num_prompt_tokens: int = 0  # with `replace`: tokens that are prefilled, the rest is decoded
    ratio: float = 1.0  # with `replace`
    first_sparse: int = 0  # with `replace`: tokens from here on are tainted, those before must stay exact
    token_ids: np.ndarray | None = None  # with `replace`: int32, the tokens that are prefilled


@dataclass
class EsaStepMeta:
    """Requests of this step that may be decoded sparsely, and those that left."""

    requests: list[EsaRequestStep] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # finished, aborted or preempted

    def __bool__(self) -> bool:
        return bool(self.requests or self.gone)


@dataclass
class EsaReport:
    """From the workers to the scheduler, after a step."""

    usage: dict[str, dict[str, int]] = field(default_factory=dict)  # of unfinished requests; the latest counts
    disabled: str = ""  # why this worker decodes densely from here on

    def aggregate(self, other: EsaReport | None) -> EsaReport:
        """Every rank decodes the same requests; one that is off is enough."""
        if other is not None:
            self.disabled = self.disabled or other.disabled
        return self

    def __bool__(self) -> bool:
        return bool(self.usage or self.disabled)
