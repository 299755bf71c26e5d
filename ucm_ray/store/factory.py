"""From a configuration to a pipeline: the stages by name, and the seed's `UcmConnectorFactory`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ucm_ray.config import StoreSettings, parse_bytes
from ucm_ray.store.base import KVStage, StoreError
from ucm_ray.store.buffers import BufferPool
from ucm_ray.store.cache import CacheStage
from ucm_ray.store.pipeline import Pipeline
from ucm_ray.store.posix import PosixStage


@dataclass(frozen=True)
class StageContext:
    """What a stage may be built from."""

    config: Mapping[str, Any]
    rank: int
    world_size: int
    pool: BufferPool


STAGES: dict[str, Callable[[StageContext], KVStage]] = {}
STAGE_MODULES = {"Peers": "actors.peer_store"}
"""Stages that need more than this room has (Ray), imported when a pipeline names them."""


def register_stage(name: str) -> Callable[[Callable[[StageContext], KVStage]], Callable[[StageContext], KVStage]]:
    """Make a stage available under a name in `store_pipeline`; to be used as decorator of its builder."""
    def register(build: Callable[[StageContext], KVStage]) -> Callable[[StageContext], KVStage]:
        STAGES[name] = build
        return build

    return register


@register_stage("Cache")
def _cache(context: StageContext) -> KVStage:
    return CacheStage(_bytes(context.config, "cache_capacity_bytes"), context.pool)


@register_stage("Posix")
def _posix(context: StageContext) -> KVStage:
    roots, capacity_bytes = roots_and_capacity(context.config)
    return PosixStage(roots, capacity_bytes, context.rank, context.world_size, context.pool)


def roots_and_capacity(config: Mapping[str, Any]) -> tuple[list[str], int]:
    """Folders and bytes of a stage of files. Raises StoreError."""
    roots = config["storage_backends"]
    roots = [roots] if isinstance(roots, str) else list(roots)
    if not roots:
        raise StoreError("storage_backends is empty, expected at least one folder")
    return roots, _bytes(config, "posix_capacity_bytes")


def _bytes(config: Mapping[str, Any], key: str) -> int:
    try:
        value = parse_bytes(config[key])
    except ValueError:
        value = None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StoreError(f"{key} is {config[key]!r}, expected a number of bytes or a size such as '4GiB'")
    return value


class UcmConnectorFactory:
    """The seed's entrance to the store."""

    @staticmethod
    def create_connector(extra_config: Mapping[str, Any], rank: int, world_size: int = 1) -> Pipeline:
        """The pipeline of `kv_connector_extra_config` for one tensor-parallel rank; keys that are not the store's are
        ignored, missing ones have the defaults of `StoreSettings`.

        Raises StoreError with one sentence for an unknown stage or a folder that cannot be written.
        """
        config = StoreSettings().model_dump() | {
            key: value for key, value in extra_config.items() if value is not None}
        names = [name.strip() for name in str(config["store_pipeline"]).split("|")]
        for name in names:
            if name not in STAGES and name in STAGE_MODULES:
                importlib.import_module(STAGE_MODULES[name])
        unknown = [name for name in names if name not in STAGES]
        if unknown:
            raise StoreError(f"store_pipeline {config['store_pipeline']!r} names an unknown stage {unknown[0]!r}, "
                             f"known are {', '.join(sorted(STAGES))}")
        io_threads = config["io_threads"]
        if not isinstance(io_threads, int) or io_threads < 1:
            raise StoreError(f"io_threads is {io_threads!r}, expected a number from 1")
        pool = BufferPool(max_free_bytes=min(2**28, _bytes(config, "cache_capacity_bytes")),
                          pin_memory=bool(config.get("pin_memory", False)))
        context = StageContext(config, rank, world_size, pool)
        return Pipeline([STAGES[name](context) for name in names], io_threads, namespace=config.get("namespace"),
                        pool=pool)

    @staticmethod
    def open_files(store_config: Mapping[str, Any], rank: int = 0) -> Pipeline:
        """The files alone, as `rank` of `store_config["world_size"]` (default 1) sees them, with no host memory of
        their own: to look at headers, hand chunks out and delete."""
        return UcmConnectorFactory.create_connector({**store_config, "store_pipeline": "Posix"}, rank,
                                                    int(store_config.get("world_size", 1)))
