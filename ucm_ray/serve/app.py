"""Builds the Ray Serve application from settings: engines by Ray Serve LLM, our ingress in front of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_llm_deployment

from ucm_ray.config import ConfigError, Settings, load_settings
from ucm_ray.models import cpu_dtype, resolve_model

logger = logging.getLogger(__name__)


def build_app(args: dict[str, Any]) -> Application:
    """The builder behind `serve run serve_app:app [config=FILE] [section.key=value ...]`.

    `args` may also hold whole sections, as in a Serve config file. Raises `ConfigError` and `ModelError`.
    """
    args = dict(args or {})
    return application(load_settings(args.pop("config", None), overrides=_dotted(args)))


def application(settings: Settings) -> Application:
    """Engines and ingress of one deployment."""
    from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata

    from ucm_ray.serve.engine import UcmLLMServer
    from ucm_ray.serve.ingress import ingress_class

    config = llm_config(settings)
    service = settings.service
    ingress = serve.deployment(
        ingress_class(service),
        name="UcmIngress",
        num_replicas=service.ingress_replicas,
        max_ongoing_requests=4 * service.max_ongoing_requests,
        ray_actor_options={"num_cpus": service.ingress_cpus},
    )
    return ingress.bind(
        {config.model_id: build_llm_deployment(config, deployment_cls=UcmLLMServer)},
        {config.model_id: to_model_metadata(config.model_id, config)},
        settings=settings.model_dump(),
        llm_config=config,
    )


def llm_config(settings: Settings) -> LLMConfig:
    """What Ray Serve LLM needs to run our engines: model, engine arguments, resources and scaling."""
    model = resolve_model(settings.model)
    cuda = uses_cuda(settings)
    service = settings.service
    return LLMConfig(
        model_loading_config={"model_id": service.model_id, "model_source": model},
        engine_kwargs=engine_kwargs(settings),
        accelerator_config={"kind": "gpu" if cuda else "cpu"},  # otherwise Ray asks for a GPU
        accelerator_type=service.accelerator_type if cuda else None,
        placement_group_config={"bundles": bundles(settings)},
        deployment_config={
            "autoscaling_config": {
                "min_replicas": service.min_replicas,
                "max_replicas": service.max_replicas,
                "initial_replicas": max(service.min_replicas, 1),
                # Ray Serve LLM's default is 1e9, with which nothing ever scales
                "target_ongoing_requests": service.target_ongoing_requests,
                "upscale_delay_s": service.upscale_delay_s,
                "downscale_delay_s": service.downscale_delay_s,
            },
            "max_ongoing_requests": service.max_ongoing_requests,
            "ray_actor_options": {"num_cpus": 0},  # the replica's share is in the placement group
            **request_router(settings),
        },
        runtime_env={"env_vars": environment(settings, model)},
        callback_config={"callback_class": "ucm_ray.serve.local_model.LocalModel"},
        log_engine_metrics=True,
    )


def engine_kwargs(settings: Settings) -> dict[str, Any]:
    """Arguments of vLLM's engine; `engine.extra` wins, and may not name what has a key of its own."""
    engine = settings.engine
    kwargs: dict[str, Any] = {
        "dtype": cpu_dtype() if engine.dtype == "auto" and not uses_cuda(settings) else engine.dtype,
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": engine.enable_prefix_caching,
    }
    kwargs["worker_extension_cls"] = "ucm_ray.integration.vllm.worker_extension.UcmWorkerExtension"
    if uses_cuda(settings):
        kwargs["gpu_memory_utilization"] = engine.gpu_memory_utilization
    elif engine.block_size % 32:
        raise ConfigError(f"engine.block_size: found {engine.block_size}, expected a multiple of 32 on CPU")
    if engine.async_scheduling is not None:
        kwargs["async_scheduling"] = engine.async_scheduling
    if transfer := settings.kv_transfer_config():
        kwargs["kv_transfer_config"] = transfer
    if doubled := sorted(kwargs.keys() & engine.extra.keys()):
        raise ConfigError(f"engine.extra.{doubled[0]}: found {engine.extra[doubled[0]]!r}, expected only arguments "
                          "that have no key of their own in this configuration")
    return kwargs | engine.extra


def request_router(settings: Settings) -> dict[str, Any]:
    """The deployment option that chooses replicas; nothing for Ray Serve's own, power of two choices."""
    if settings.service.router == "default":
        return {}
    return {"request_router_config": RequestRouterConfig(
        request_router_class="ucm_ray.serve.router.ChunkAwareRouter",
        request_router_kwargs={"load_weight": settings.service.router_load_weight},
    )}


def bundles(settings: Settings) -> list[dict[str, float]]:
    """Resources of one replica, one bundle per tensor-parallel rank."""
    service, ranks = settings.service, settings.engine.tensor_parallel_size
    bundle = {"CPU": service.replica_cpus}
    if uses_cuda(settings):
        bundle["GPU"] = service.replica_gpus
        return [dict(bundle) for _ in range(ranks)]
    # on CPU all ranks are child processes of the replica, on its node
    return [{"CPU": service.replica_cpus * ranks}]


def environment(settings: Settings, model: str) -> dict[str, str]:
    """Environment of the engine's processes."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"  # a local model must never wait for a hub
    if not uses_cuda(settings):
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(settings.engine.cpu_kv_cache_gib)
        variables["VLLM_CPU_OMP_THREADS_BIND"] = settings.engine.cpu_threads
    return variables


def uses_cuda(settings: Settings) -> bool:
    """Where the engine runs; `auto` asks torch on the machine that builds the application."""
    if settings.engine.device == "auto":
        import torch

        return torch.cuda.is_available()
    return settings.engine.device == "cuda"


def _dotted(args: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"blend": {"budget": 0.2}}` -> `{"blend.budget": 0.2}`."""
    flat: dict[str, Any] = {}
    for key, value in args.items():
        nested = isinstance(value, Mapping) and bool(value) and key != "extra"
        flat.update(_dotted(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value})
    return flat
