"""An engine in a process of its own: `python blend_process.py JOB.json` answers the prompts of the job.

The job: {"model", "store", "llm": {...}, "turns": [{"prompts": [[ids]], "max_tokens", "ucm", "salt", "logprobs"}]}.
Prints one line of JSON: per turn, per prompt, {"tokens", "logprobs", "receipt", "cached", "preemptions"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def preemptions(llm) -> int:
    """Of the whole engine, since its start."""
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"))


def main(job: dict) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="BlendConnector", kv_connector_module_path="ucm_ray.integration.vllm.blend_connector",
        kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config={"storage_backends": job["store"], "cost_model": False, "refresh_s": 0.2,
                                   **job.get("extra", {})})
    options = dict(dtype="float32", max_model_len=1024, enforce_eager=True, block_size=32, max_num_seqs=16,
                   max_num_batched_tokens=512, skip_tokenizer_init=True, disable_log_stats=False, seed=0)
    llm = LLM(model=job["model"], kv_transfer_config=transfer, **(options | job.get("llm", {})))
    answers = []
    for turn in job["turns"]:
        if turn.get("forget_prefixes"):
            llm.reset_prefix_cache()
        extra = {"kv_transfer_params": {"ucm": turn["ucm"]}} if "ucm" in turn else {}
        params = SamplingParams(temperature=0, max_tokens=turn.get("max_tokens", 8), ignore_eos=True, detokenize=False,
                                logprobs=0, extra_args=extra)
        salt = {"cache_salt": turn["salt"]} if "salt" in turn else {}
        before = preemptions(llm)
        outputs = llm.generate([{"prompt_token_ids": ids, **salt} for ids in turn["prompts"]], params, use_tqdm=False)
        answers.append([{
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [step[token].logprob for step, token in
                         zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)],
            "receipt": output.kv_transfer_params["ucm"]["blend"],
            "cached": output.num_cached_tokens,
            "preemptions": preemptions(llm) - before,
        } for output in outputs])
    print("ANSWERS " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
