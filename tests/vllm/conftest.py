"""One engine with the default model, in this process, shared by the whole session."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

SHORT = 96  # tokens a document is cut to: the suite checks behaviour, benchmarks measure


class Engine:
    """vLLM's `LLM` in this process, with short cuts to what the tests look at."""

    def __init__(self, llm: Any, store: Path) -> None:
        self.llm, self.store_dir = llm, store
        self.tokenizer = llm.get_tokenizer()
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.scheduler_side = self.scheduler.connector._scheduler
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.worker = get_kv_transfer_group()._worker
        self._ids = itertools.count()

    # ---- prompts

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    # ---- running

    def sampling(self, max_tokens: int = 8, ucm: dict | None = None, **more: Any):
        from vllm import SamplingParams

        extra = {} if ucm is None else {"kv_transfer_params": {"ucm": ucm}}
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **more)

    def ask(self, prompt: list[int] | list[list[int]], max_tokens: int = 8, salt: str | None = None,
            ucm: dict | None = None, **more: Any):
        """Greedy output(s) for one prompt or several submitted together; everything settled when it returns."""
        many = bool(prompt) and isinstance(prompt[0], list)
        salted = {"cache_salt": salt} if salt else {}
        prompts = [{"prompt_token_ids": ids, **salted} for ids in (prompt if many else [prompt])]
        outputs = self.llm.generate(prompts, self.sampling(max_tokens, ucm, **more), use_tqdm=False)
        self.settle()
        return outputs if many else outputs[0]

    def plain(self, prompt, max_tokens: int = 8, **more: Any):
        """As vLLM alone would answer: nothing reused, nothing saved."""
        return self.ask(prompt, max_tokens, ucm={"blend": False, "save": False}, **more)

    def settle(self) -> None:
        """Let saving and ingest of finished requests come to their end, then let the files be written."""
        for _ in range(500):
            if not self.scheduler.requests:
                break
            self.llm.llm_engine.step()
        assert not self.scheduler.requests
        self.worker._store.flush(20)

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.llm.reset_prefix_cache()

    def forget_host_memory(self) -> None:
        """Empty the host-memory stage, so that the next load reads files."""
        self.worker._store.stages[0].clear()

    def forget_everything(self) -> None:
        self.forget_prefixes()
        self.scheduler.connector.reset_cache()
        sampling = self.sampling(1, {"blend": False, "save": False})
        self.llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
        self.forget_prefixes()
        self.settle()
        assert not self.files()

    def files(self) -> list[Path]:
        return sorted(self.store_dir.rglob("*.kv"))

    def ingest(self, documents: list[list[int]], **more: Any) -> None:
        from ucm_ray.integration.vllm.ingest import ingest_documents

        ingest_documents(self.llm, documents, progress=False, **more)
        self.settle()


@pytest.fixture(scope="session")
def engine(model_dir, tmp_path_factory) -> Engine:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    store = tmp_path_factory.mktemp("store")
    transfer = KVTransferConfig(
        kv_connector="BlendConnector", kv_connector_module_path="ucm_ray.integration.vllm.blend_connector",
        kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config={"storage_backends": str(store), "cost_model": False, "refresh_s": 0.2},
    )
    llm = LLM(model=str(model_dir), dtype="float32", max_model_len=2048, enforce_eager=True, block_size=32,
              max_num_seqs=16, max_num_batched_tokens=512, kv_transfer_config=transfer, seed=0)
    return Engine(llm, store)


@pytest.fixture(scope="session")
def documents(engine) -> list[list[int]]:
    """Documents of natural text, `SHORT` tokens each."""
    import json

    from ucm_ray import bench

    path = Path(bench.__file__).parent / "data" / "documents.jsonl"
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    return [engine.tokens(text)[:SHORT] for text in texts]


@pytest.fixture()
def rag(engine, documents):
    """`rag([3, 1, 2])` -> prompt of these documents in this order, between a system prompt and a question."""
    def build(order: list[int], question: str = "\n\nQuestion: Which place is named first?\nAnswer:") -> list[int]:
        prompt = engine.tokens("You answer from the documents below.\n\n")
        for index in order:
            prompt = prompt + documents[index]
        return prompt + engine.tokens(question)
    return build


@pytest.fixture()
def fresh(engine) -> Engine:
    """The shared engine with an empty store and an empty prefix cache."""
    engine.forget_everything()
    return engine
