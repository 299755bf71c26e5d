"""A small paged KV cache that grows like an engine's, for tests of ESA without an engine."""

import numpy as np
import torch

from ucm_ray.sparse import ReqMeta
from ucm_ray.sparse.esa import ESA, EsaMetadata
from ucm_ray.sparse.reference import attend

torch.set_num_threads(1)  # tensors this small only wait for threads
LAYERS, KV_HEADS, HEADS, DIM, BLOCK = 2, 2, 4, 8, 4


class Paged:
    """Runs steps over random queries, keys and values; blocks come from a shuffled free list."""

    def __init__(self, esa: ESA, num_blocks: int = 200, seed: int = 0):
        self.esa = esa
        self.random = torch.Generator().manual_seed(seed)
        self.caches = [torch.zeros(2, num_blocks, BLOCK, KV_HEADS, DIM) for _ in range(LAYERS)]
        self.free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.ratios: dict[str, float | None] = {}
        self.token_ids: dict[str, np.ndarray] = {}
        esa.register_kv_caches(self.caches)

    def start(self, request_id: str, prompt: int, ratio: float | None = None) -> None:
        self.blocks[request_id], self.lengths[request_id] = [], 0
        self.prompts[request_id], self.ratios[request_id] = prompt, ratio

    def stop(self, request_id: str) -> None:
        self.free.extend(self.blocks.pop(request_id))
        self.esa.forget([request_id])

    def step(self, scheduled: dict[str, int]) -> tuple[EsaMetadata, list[torch.Tensor], list[torch.Tensor]]:
        """Schedule tokens per request; returns the metadata, and ESA's and dense outputs per layer."""
        metas, starts = [], [0]
        for index, (request_id, count) in enumerate(scheduled.items()):
            computed = self.lengths[request_id]
            blocks = self.blocks[request_id]
            while len(blocks) * BLOCK < computed + count:
                blocks.append(self.free.pop())
            metas.append(
                ReqMeta(
                    request_id,
                    index,
                    count,
                    computed,
                    list(blocks),
                    num_prompt_tokens=self.prompts[request_id],
                    sparse_ratio=self.ratios[request_id],
                    token_ids=self.token_ids[request_id][: computed + count] if request_id in self.token_ids else None,
                )
            )
            self.lengths[request_id] = computed + count
            starts.append(starts[-1] + count)
        metadata = EsaMetadata(metas, starts)
        sparse, dense, views = [], [], []
        for layer in range(LAYERS):
            query = torch.randn(starts[-1], HEADS, DIM, generator=self.random) * 2
            key, value = (torch.randn(starts[-1], KV_HEADS, DIM, generator=self.random) for _ in "kv")
            self._write(layer, metas, starts, key, value)
            query, key, value, output = self.esa.attention_begin(layer, query, key, value, metadata)
            output[:] = attend(query, self.caches[layer], metadata)
            sparse.append(self.esa.attention_finished(layer, output))
            views.append(metadata.view)
            dense.append(attend(query, self.caches[layer], EsaMetadata(metas, starts)))
        self.esa.finish_step()
        metadata.views = views
        return metadata, sparse, dense

    def _write(self, layer, metas, starts, key, value) -> None:
        for meta in metas:
            at = np.arange(meta.num_computed_tokens, meta.num_tokens)
            blocks = torch.tensor(meta.vllm_block_ids)[at // BLOCK]
            rows = slice(starts[meta.index_in_batch], starts[meta.index_in_batch + 1])
            self.caches[layer][0, blocks, at % BLOCK] = key[rows]
            self.caches[layer][1, blocks, at % BLOCK] = value[rows]
