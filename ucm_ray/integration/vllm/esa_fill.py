"""For timing decode over long contexts: every prompt finds its KV "stored", and what it finds is noise.

Computing 4 x 16,384 tokens of a 7B geometry takes a CPU half an hour and changes nothing about the time of a decode
step.
"""

from __future__ import annotations

from typing import Any

import torch

from ucm_ray.integration.vllm.esa_connector import EsaConnector


class FillConnector(EsaConnector):
    """`EsaConnector` that claims all of a prompt but its last token. Never for serving: outputs mean nothing."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for cache in kv_caches.values():
            noise = torch.empty(cache[0].shape, dtype=cache.dtype).normal_(generator=generator)
            for block in range(cache.shape[0]):
                torch.mul(noise, 0.5 + (block % 17) / 17, out=cache[block])
        super().register_kv_caches(kv_caches)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(0, request.num_prompt_tokens - 1 - num_computed_tokens), False
