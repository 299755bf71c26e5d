"""Runs vLLM with BlendConnector and ESA once, through every scenario of test_engine.py, and writes what came out.

A process of its own, since the engine shares it with its requests and other tests have engines too.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")

BLOCK, NUM_BLOCKS = 32, 64
PLAIN = {"esa": False, "blend": False, "save": False}


class Engine:
    """`LLM` with a KV cache small enough to preempt, stepped by hand."""

    def __init__(self, model: str, store: str):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        esa = {"sparse_ratio": 0.2, "retrieval_stride": 2, "local_window_sz": 2, "min_saved_bytes": 0}
        transfer = KVTransferConfig(
            kv_connector="BlendConnector",
            kv_connector_module_path="ucm_ray.integration.vllm.blend_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"storage_backends": store, "ucm_sparse_config": {"ESA": esa}},
        )
        self.llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            block_size=BLOCK,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            num_gpu_blocks_override=NUM_BLOCKS,
            kv_transfer_config=transfer,
            seed=0,
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.preempted = 0
        preempt = self.scheduler._preempt_request

        def counted(*args, **kwargs):
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted
        self._count = 0

    def tokens(self, text: str) -> list[int]:
        return self.llm.get_tokenizer().encode(text)

    def run(
        self, prompts: list[list[int]], max_tokens: int, ucm, stagger: int = 0, abort: dict[int, int] | None = None
    ):
        """Greedy tokens, receipts and cached tokens per prompt. Request i starts after i * stagger steps; `abort` maps
        a request to the step it is given up at. `ucm`: controls of all, or a list."""
        from vllm import SamplingParams

        controls = ucm if isinstance(ucm, list) else [ucm] * len(prompts)
        names = [f"r{self._count + index}" for index in range(len(prompts))]
        self._count += len(prompts)
        waiting = list(range(len(prompts)))
        step, found = 0, {}
        while waiting or self.engine.has_unfinished_requests():
            while waiting and step >= waiting[0] * stagger:
                index = waiting.pop(0)
                self.engine.add_request(
                    names[index],
                    {"prompt_token_ids": prompts[index]},
                    SamplingParams(
                        temperature=0,
                        max_tokens=max_tokens,
                        ignore_eos=True,
                        extra_args={"kv_transfer_params": {"ucm": controls[index]}},
                    ),
                )
            for index, when in (abort or {}).items():
                if when == step:
                    self.engine.abort_request([names[index]])
            for output in self.engine.step():
                if output.finished:
                    found[output.request_id] = output
            step += 1
        return [self._result(found[name]) if name in found else None for name in names]

    @staticmethod
    def _result(output):
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens or 0,
            "receipt": ((output.kv_transfer_params or {}).get("ucm") or {}).get("esa"),
        }

    def reset(self) -> None:
        self.llm.reset_prefix_cache()


def _token_ids(engine: Engine, prompts: list[list[int]], ucm) -> tuple[list[list[int]], list[list[int]]]:
    """The longest token ids by which ESA chose lexical blocks, and what the requests really were, their last token
    aside, both sorted."""
    from ucm_ray.sparse import esa

    seen, followers = {}, esa.followers

    def watched(token_ids, *args):
        seen[tuple(token_ids[:100])] = token_ids.tolist()
        return followers(token_ids, *args)

    esa.followers = watched
    try:
        results = engine.run(prompts, 40, ucm, stagger=2)
    finally:
        esa.followers = followers
    said = [prompt + result["tokens"][:-1] for prompt, result in zip(prompts, results, strict=True)]
    return sorted(seen.values()), sorted(said)


def main(model: str, store: str, documents: str, answer: str) -> None:
    engine = Engine(model, store)
    text = " ".join(json.loads(line)["text"] for line in Path(documents).read_text(encoding="utf-8").splitlines())
    ids = engine.tokens(text[:16000])
    prompts = [ids[start : start + length] for start, length in ((0, 300), (500, 323), (1000, 347), (1500, 280))]
    esa = {"esa": True, "blend": False, "save": False}
    found = {}

    dense = engine.run(prompts, 64, PLAIN, stagger=3)
    found["dense"] = dense
    for name, ucm in (("ratio_one", {**esa, "sparse_ratio": 1.0}), ("off", PLAIN)):
        engine.reset()
        found[name] = engine.run(prompts, 64, ucm, stagger=3)
    engine.reset()
    found["mixed"] = engine.run(prompts, 64, [esa, PLAIN, esa, {**esa, "sparse_ratio": 1.0}], stagger=3)

    short = [prompt[:60] for prompt in prompts]
    found["short_dense"] = engine.run(short, 12, PLAIN)
    engine.reset()
    found["short_esa"] = engine.run(short, 12, esa)
    found["tiny"] = engine.run([prompts[0][:5]], 8, esa)

    engine.reset()
    first = engine.run([prompts[0]], 40, {**esa, "sparse_ratio": 0.1})
    second = prompts[0] + first[0]["tokens"] + ids[2000:2040]
    found["turn_one"] = first
    found["turn_two"] = engine.run([second], 16, PLAIN)
    engine.reset()
    found["turn_two_plain"] = engine.run([second], 16, PLAIN)

    engine.reset()
    found["token_ids_seen"], found["token_ids"] = _token_ids(engine, prompts[:2], esa)

    engine.reset()
    long = [ids[start : start + 440] for start in (0, 900, 1800, 2700)]
    before = engine.preempted
    found["preempted"] = engine.run(long, 90, esa)
    found["preemptions"] = engine.preempted - before
    found["after_preemption"] = engine.run(prompts[:2], 16, PLAIN)

    engine.reset()
    found["aborted"] = engine.run([long[0], prompts[1]], 40, esa, abort={0: 12})
    found["after_abort"] = engine.run(prompts[:2], 16, PLAIN)
    runtime = engine.scheduler.connector._scheduler.esa
    found["left_over"] = [len(runtime._tracked), len(runtime._usage), len(runtime._reasons)]
    from ucm_ray.integration.vllm import esa_backend

    found["disabled"] = getattr(esa_backend.RUNTIME, "disabled", "no runtime")

    def broken(*_args):
        raise RuntimeError("broken on purpose")

    esa_backend.RUNTIME.esa.finish_step = broken
    engine.reset()
    found["broken"] = engine.run([prompts[0], prompts[0][:270]], 40, esa)
    told = engine.run([prompts[1]], 40, esa)
    found["after_broken"] = told
    found["after_broken_dense"] = engine.run([prompts[1] + told[0]["tokens"] + ids[2000:2040]], 4, PLAIN)
    found["left_over_broken"] = [len(runtime._tracked), len(runtime._known), len(runtime._reasons)]
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
