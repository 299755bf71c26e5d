"""Where the KV of chunks is kept: host memory in front of files, content-addressed and verified."""

from ucm_ray.store.base import ChunkMeta, KVStage, StoredChunk, StoreError
from ucm_ray.store.cache import CacheStage
from ucm_ray.store.factory import STAGES, StageContext, UcmConnectorFactory, register_stage
from ucm_ray.store.pipeline import Pipeline
from ucm_ray.store.posix import PosixStage

__all__ = ["STAGES", "CacheStage", "ChunkMeta", "KVStage", "Pipeline", "PosixStage", "StageContext", "StoreError",
           "StoredChunk", "UcmConnectorFactory", "register_stage"]
