"""Short cuts shared by the engine tests."""

from __future__ import annotations

import random
from typing import Any


def receipt(output) -> dict[str, Any]:
    return output.kv_transfer_params["ucm"]["blend"]


def text_ids(output) -> list[int]:
    return list(output.outputs[0].token_ids)


def shuffled(indices: range, seed: int) -> list[int]:
    order = list(indices)
    random.Random(seed).shuffle(order)
    return order
