"""The code of the guides runs as it is written there."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ucm_ray.blend.chunk import Chunk, ChunkType, Run
from ucm_ray.blend.plan import Plan
from ucm_ray.blend.policies import budget_tokens
from ucm_ray.retrieval import representations

GUIDE = Path(__file__).parents[2] / "docs" / "researchers-guide.md"


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_the_policy_of_the_guide_keeps_the_budget(blocks):
    scope: dict = {}
    exec(blocks[0], scope)
    chunk = Chunk(10, 110, ChunkType.FULL_MATCH, "aa" * 16, 400, 0, "bb" * 16)
    plan = Plan(start=10, end=110, chunks=(chunk,), runs=(Run(10, 110, "bb" * 16, -390),), must_compute=(),
                question=(110, 130), policy="stride", budget=0.1, reused_tokens=100)
    chosen = scope["Stride"]().select(plan)
    assert len(chosen) == budget_tokens(plan) == 10
    assert np.all(np.diff(chosen) > 0) and chosen[0] == 10 and chosen[-1] == 109


def test_the_representation_of_the_guide_registers_itself_and_scores(blocks, monkeypatch):
    monkeypatch.setattr(representations, "_REGISTRY", dict(representations._REGISTRY))
    exec(blocks[1], {"BlockRepresentation": representations.BlockRepresentation})
    representation = representations.get_representation("maximum")
    stats = representation.compute(torch.rand(3, 4, 2, 8))
    assert stats.shape == (1, 3, 2, 8)
    assert representation.score(torch.rand(6, 8), stats).shape == (2, 3)
