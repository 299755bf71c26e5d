"""Fixtures shared by all rooms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# the engine must never ask a hub; every test model is local
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Folder of the default model (SmolLM2-135M-Instruct, bfloat16, safetensors)."""
    from ucm_ray.models import default_model

    return default_model()
