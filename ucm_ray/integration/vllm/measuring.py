"""One engine with the connector, for benchmarks: time to first token, and teacher-forced distributions."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ucm_ray.config import Settings
from ucm_ray.integration.vllm.teacher_forcing import CLASS_NAME, forcing
from ucm_ray.models import cpu_dtype, resolve_model

FULL_PREFILL: dict[str, Any] = {"blend": False, "save": False}


@dataclass(frozen=True)
class FirstToken:
    """`ttft_s`: from the call to the first token's arrival; `receipt`: what the connector did, empty without it."""

    ttft_s: float
    token_id: int
    receipt: dict[str, Any]


@dataclass(frozen=True)
class Forced:
    """`log_probs`: float32 [steps, vocab_size], natural logarithm; `token_ids`: what was generated or forced."""

    log_probs: np.ndarray
    token_ids: list[int]
    receipt: dict[str, Any]


class MeasuringEngine:
    """A vLLM engine in this process' child, with a store of its own in a temporary folder. A context manager.

    The engine is the product's: what is measured is `BlendConnector` as it serves. The cost model is off so that every
    row does what it is named for, and scheduling is synchronous where answers are forced.
    """

    def __init__(self, settings: Settings, dtype: str = "auto", max_model_len: int | None = None,
                 max_num_seqs: int = 16, **engine_args: Any) -> None:
        self._settings = settings
        self._dtype = served_dtype(settings) if dtype == "auto" else dtype
        self._arguments = {"max_model_len": max_model_len or settings.engine.max_model_len,
                           "max_num_seqs": max_num_seqs} | engine_args
        self.llm: Any = None
        self.folder: Path | None = None

    def __enter__(self) -> MeasuringEngine:
        self.folder = Path(tempfile.mkdtemp(prefix="ucm_ray_measure_"))
        try:
            self.llm = self._start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.tokenizer = self.llm.get_tokenizer()
        self.end_ids = _end_of_text_ids(self.llm, self.tokenizer)
        return self

    def _start(self) -> Any:
        engine = self._settings.engine
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # one connector a process
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(engine.cpu_kv_cache_gib))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", engine.cpu_threads)
        from vllm import LLM
        from vllm.config import KVTransferConfig

        model = resolve_model(self._settings.model)
        if Path(model).is_dir():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        store = self._settings.store.model_copy(update={"storage_backends": [str(self.folder / "store")]})
        blend = self._settings.blend.model_copy(update={"enabled": True, "cost_model": False})
        settings = self._settings.model_copy(update={"store": store, "blend": blend})
        arguments = {
            "dtype": self._dtype,
            "block_size": engine.block_size,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "enforce_eager": engine.enforce_eager,
            "enable_prefix_caching": True,
            "async_scheduling": False,
            "logits_processors": [CLASS_NAME],
            "disable_log_stats": True,
        }
        return LLM(model, kv_transfer_config=KVTransferConfig(**settings.kv_transfer_config()),
                   **(arguments | self._arguments))

    def __exit__(self, *exception: Any) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def ingest(self, texts: Sequence[str]) -> Any:
        """Store the canonical KV of `texts`."""
        from ucm_ray.integration.vllm.ingest import ingest_documents

        return ingest_documents(self.llm, list(texts))

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache, so that the next request computes or blends its whole prompt."""
        self.llm.reset_prefix_cache()

    def first_token(self, token_ids: Sequence[int], controls: dict[str, Any]) -> FirstToken:
        """Time one request alone in the engine, its prefix unknown to vLLM."""
        self.forget_prefixes()
        parameters = self._parameters(controls, max_tokens=1)
        begun = time.perf_counter()
        output = self._generate([token_ids], [parameters])[0]
        ttft_s = time.perf_counter() - begun
        return FirstToken(ttft_s, output.outputs[0].token_ids[0], _receipt(output))

    def greedy(self, token_ids: Sequence[int], steps: int) -> Forced:
        """Full prefill and its `steps` most likely tokens, end-of-text excluded so that there are that many."""
        self.forget_prefixes()
        return self._recorded(token_ids, [FULL_PREFILL], steps, None)[0]

    def forced(self, token_ids: Sequence[int], answer: Sequence[int], controls: Sequence[dict[str, Any]],
               computed_prefix: int = 0) -> list[Forced]:
        """Distributions along `answer`, once for each of `controls`, all requests in the engine together.

        `computed_prefix` > 0: the first that many tokens are prefilled as a request of their own before, so that vLLM
        finds them in its prefix cache and splits the prefill there.
        """
        self.forget_prefixes()
        if computed_prefix:
            self._generate([token_ids[:computed_prefix]], [self._parameters(FULL_PREFILL, max_tokens=1)])
        return self._recorded(token_ids, controls, len(answer), list(answer))

    def _recorded(self, token_ids, controls, steps: int, answer: list[int] | None) -> list[Forced]:
        paths = [self.folder / f"log_probs_{index}.npy" for index in range(len(controls))]
        parameters = [self._parameters(wanted, max_tokens=steps, **forcing(path, answer, self.end_ids))
                      for wanted, path in zip(controls, paths, strict=True)]
        outputs = self._generate([token_ids] * len(controls), parameters)
        found = [Forced(np.load(path), list(output.outputs[0].token_ids), _receipt(output))
                 for path, output in zip(paths, outputs, strict=True)]
        for path in paths:
            path.unlink()
        return found

    def _parameters(self, controls: dict[str, Any], max_tokens: int, **extra_args: Any) -> Any:
        from vllm import SamplingParams

        extra_args["kv_transfer_params"] = {"ucm": {"save": False} | controls}
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
                              extra_args=extra_args)

    def _generate(self, prompts: list[Sequence[int]], parameters: list[Any]) -> list[Any]:
        requests = [{"prompt_token_ids": list(token_ids)} for token_ids in prompts]
        return self.llm.generate(requests, parameters, use_tqdm=False)


def served_dtype(settings: Settings) -> str:
    """The dtype that a service with these settings runs in on this machine."""
    import torch

    if settings.engine.dtype != "auto" or settings.engine.device == "cuda" or torch.cuda.is_available():
        return settings.engine.dtype
    return cpu_dtype()


def _receipt(output: Any) -> dict[str, Any]:
    found = ((output.kv_transfer_params or {}).get("ucm") or {}).get("blend")
    return dict(found or {})


def _end_of_text_ids(llm: Any, tokenizer: Any) -> list[int]:
    found = llm.llm_engine.model_config.try_get_generation_config().get("eos_token_id")
    listed = found if isinstance(found, list) else [found]
    return sorted({token for token in [*listed, tokenizer.eos_token_id] if token is not None})
