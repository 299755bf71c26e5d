"""A logits processor for measuring: records every step's full distribution, then forces the next token.

vLLM returns at most a few log-probabilities a step, and prompt log-probabilities would switch blending off; this gives
the exact KL of every answer token of one ordinary `generate` call. Not loaded by a serving engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

EXTRA_ARGS_KEY = "ucm_teacher_forcing"
CLASS_NAME = "ucm_ray.integration.vllm.teacher_forcing:TeacherForcing"
_FORBIDDEN = -1e30  # finite: an infinite logit turns into NaN where distributions are compared


@dataclass
class _Forced:
    """One request: `tokens` to force (empty: greedy choice), `suppress` never chosen, recorded into `log_probs`."""

    log_probs: np.memmap  # float32 [steps, vocab_size]
    tokens: list[int]
    suppress: list[int]
    output_ids: list[int]  # the engine's own list, which grows by one a step


def forcing(log_probs: Path, tokens: list[int] | None = None, suppress: list[int] | None = None) -> dict:
    """`SamplingParams.extra_args` that record to `log_probs` (a .npy file) and force `tokens`."""
    values = {"log_probs": str(log_probs), "tokens": list(tokens or ()), "suppress": list(suppress or ())}
    return {EXTRA_ARGS_KEY: values}


class TeacherForcing(LogitsProcessor):
    """Needs synchronous scheduling: the step of a request is told from the length of its output."""

    def __init__(self, vllm_config, device: torch.device, is_pin_memory: bool) -> None:
        if vllm_config.scheduler_config.async_scheduling:
            raise ValueError("async_scheduling: found True, expected False with teacher forcing")
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._requests: dict[int, _Forced] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        asked = (sampling_params.extra_args or {}).get(EXTRA_ARGS_KEY)
        if asked is None:
            return
        if not sampling_params.max_tokens:
            raise ValueError(f"max_tokens: found {sampling_params.max_tokens!r}, expected the steps to record")
        tokens = asked["tokens"]
        if tokens and len(tokens) < sampling_params.max_tokens:
            raise ValueError(f"{EXTRA_ARGS_KEY}.tokens: found {len(tokens)}, expected {sampling_params.max_tokens}")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, self._begin)

    def _begin(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Forced | None:
        asked = (params.extra_args or {}).get(EXTRA_ARGS_KEY)
        if asked is None:
            return None
        path = Path(asked["log_probs"])
        # a request that was preempted comes back here with part of its steps recorded
        mode = "r+" if output_ids and path.exists() else "w+"
        shape = None if mode == "r+" else (params.max_tokens, self._vocab_size)
        recorded = np.lib.format.open_memmap(path, mode=mode, dtype=np.float32, shape=shape)
        return _Forced(recorded, asked["tokens"], asked["suppress"], output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits`: float32 [requests, vocab_size]."""
        for row, forced in self._requests.items():
            step = len(forced.output_ids)
            if step >= len(forced.log_probs):
                continue
            # while a prompt is prefilled in parts, step 0 is written again and again: the last part counts
            forced.log_probs[step] = logits[row].float().log_softmax(-1)[: self._vocab_size].cpu().numpy()
            if forced.tokens:
                logits[row] = _FORBIDDEN
                logits[row, forced.tokens[step]] = 0.0
            elif forced.suppress:
                logits[row, forced.suppress] = _FORBIDDEN
        return logits
