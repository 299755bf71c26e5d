"""Chat with reuse of stored KV, without Ray: `python examples/multi_turn.py [MODEL]`.

vLLM's prefix cache finds a history only if it is unchanged from the first token on. Here old turns are dropped from the
front and re-ordered, and their KV is reused all the same. The receipts say how much.
"""

import os
import sys
import tempfile

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; on CPU vLLM would take nearly all memory

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402

from ucm_ray.models import default_model  # noqa: E402

TURNS = [
    "User: What is machine learning?\nAssistant: Machine learning is a way of building programs that improve by looking at "
    "examples. Instead of writing down every rule, one shows the program many cases together with the answers wanted, and it "
    "adjusts its own numbers until its answers agree with them. What it has learnt is then used on cases it has never seen.\n",
    "User: What kinds of it are there?\nAssistant: Three kinds are usually named. In supervised learning each example comes with "
    "its answer. In unsupervised learning there are no answers, and the program looks for groups or directions in the data. In "
    "reinforcement learning the program acts, and is told afterwards how well it did.\n",
    "User: Where does it go wrong?\nAssistant: Most often where the examples differ from what comes later: a program that has only "
    "seen summer does not know snow. It also goes wrong where examples are few, where they carry an old injustice, or where "
    "somebody rewards the wrong thing.\n",
]
QUESTION = "User: Can you give an example?\nAssistant:"


def main() -> None:
    llm = LLM(
        model=sys.argv[1] if len(sys.argv) > 1 else str(default_model()),
        dtype="float32", max_model_len=2048, enforce_eager=True, block_size=32,
        kv_transfer_config=KVTransferConfig(
            kv_connector="BlendConnector",
            kv_connector_module_path="ucm_ray.integration.vllm.blend_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "store_pipeline": "Cache|Posix",
                "storage_backends": tempfile.mkdtemp(prefix="ucm-store-"),
                "blend_chunk_size": 64,
                "min_match_ratio": 0.8,
                "cost_model": False,  # so short a chat is computed faster than it is blended
            },
        ),
    )
    histories = {
        "the whole history": TURNS,
        "the first turn dropped": TURNS[1:],
        "two turns, in another order": [TURNS[2], TURNS[0]],
    }
    for name, turns in histories.items():
        output = llm.generate(["".join(turns) + QUESTION], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0]
        receipt = output.kv_transfer_params["ucm"]["blend"]
        print(f"{name}: {receipt['prompt_tokens']} tokens, {receipt['reused_tokens']} reused, "
              f"{receipt['recomputed_tokens']} of them recomputed {receipt['reason']}")
        print("   ", output.outputs[0].text.strip().replace("\n", " "))


if __name__ == "__main__":
    main()
