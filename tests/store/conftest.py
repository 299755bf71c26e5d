"""Small chunks and stores for the tests of this room."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from ucm_ray.store import ChunkMeta, Pipeline, PosixStage, UcmConnectorFactory
from ucm_ray.store.base import DTYPES

NAMESPACE = "a0" * 16
OTHER_NAMESPACE = "b1" * 16


def key(number: int) -> str:
    return hashlib.md5(str(number).encode()).hexdigest()


def make_chunk(number: int = 0, *, namespace: str = NAMESPACE, num_tokens: int = 16, num_layers: int = 3,
               dtype: str = "bfloat16", source_id: str = "5e", source_position: int = 40, rank: int = 0,
               world_size: int = 1) -> tuple[ChunkMeta, torch.Tensor]:
    """Chunk `number`: the same KV for the same arguments, 3 * 2 * 16 * 2 * 8 numbers by default."""
    meta = ChunkMeta(key(number), namespace, np.arange(num_tokens) + number, source_id, source_position, num_layers, 2,
                     8, dtype, rank=rank, world_size=world_size, created_s=1.5)
    generator = torch.Generator().manual_seed(number * 7 + rank)
    return meta, torch.randn(meta.shape, generator=generator).to(DTYPES[dtype])


def chunk_path(stage: PosixStage, number: int, namespace: str = NAMESPACE) -> Path:
    return Path(stage.folder_of(key(number)).path(namespace, key(number), stage.rank))


def file_bytes(tmp_path: Path) -> int:
    """Size of one default chunk's file."""
    stage = PosixStage([tmp_path / "probe"], 2**30)
    stage.save(*make_chunk())
    return chunk_path(stage, 0).stat().st_size


@pytest.fixture
def stage(tmp_path) -> PosixStage:
    return PosixStage([tmp_path / "store"], 2**30)


@pytest.fixture
def pipeline(tmp_path):
    pipeline = UcmConnectorFactory.create_connector(
        {"storage_backends": str(tmp_path / "store"), "cache_capacity_bytes": 2**24, "io_threads": 2}, rank=0)
    yield pipeline
    pipeline.close()


def reopened(pipeline: Pipeline) -> Pipeline:
    """A pipeline over the same folders with nothing in host memory."""
    return UcmConnectorFactory.create_connector(
        {"storage_backends": str(pipeline.posix.folders[0].root), "io_threads": 2}, rank=0)
