"""The connector's configuration: `kv_connector_extra_config`, checked, and what is read from the model instead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3
from huggingface_hub import try_to_load_from_cache
from vllm.config import ModelConfig, VllmConfig

from ucm_ray.blend.position import PositionCorrector
from ucm_ray.config import BlendSettings, ConfigError, EsaSettings, RetrievalSettings, StoreSettings, parse_settings
from ucm_ray.keys import Namespace, canonical_json

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_EDGE_BYTES = 1 << 16


@dataclass(frozen=True)
class ConnectorSettings:
    """Typed sections of the connector's extra configuration."""

    store: StoreSettings
    blend: BlendSettings
    esa: EsaSettings
    retrieval: RetrievalSettings
    raw: Mapping[str, Any] = field(repr=False, hash=False)

    @classmethod
    def from_vllm(cls, config: VllmConfig) -> ConnectorSettings:
        """Raises ConfigError naming the key, also for RoPE values that disagree with the model."""
        raw = dict(config.kv_transfer_config.kv_connector_extra_config or {})
        retrieval = raw.pop("retrieval", None)
        tree: dict[str, Any] = {"kv_connector_extra_config": raw}
        if retrieval is not None:
            tree["retrieval"] = retrieval
        settings = parse_settings(tree, "kv_connector_extra_config")
        _check_against_model(settings.blend, config)
        return cls(settings.store, settings.blend, settings.esa, settings.retrieval, raw)

    def store_config(self, pipeline: str | None = None) -> dict[str, Any]:
        """Arguments of `UcmConnectorFactory.create_connector`."""
        values = self.store.model_dump()
        values["storage_backends"] = [str(Path(folder).expanduser()) for folder in self.store.storage_backends]
        if pipeline is not None:
            values["store_pipeline"] = pipeline
        return values

    def position_corrector(self, config: VllmConfig) -> PositionCorrector:
        """For the model's own RoPE, whatever the configuration says."""
        return PositionCorrector.from_hf_config(
            config.model_config.hf_text_config, max_model_len=config.model_config.max_model_len)


def _check_against_model(blend: BlendSettings, config: VllmConfig) -> None:
    """The seed's configuration names `rope_theta` and `head_dim`: they must be the model's."""
    head_dim = config.model_config.get_head_size()
    if blend.head_dim is not None and blend.head_dim != head_dim:
        raise ConfigError(f"kv_connector_extra_config: head_dim: found {blend.head_dim}, but the model has {head_dim}; "
                          "leave the key out or set the model's value")
    theta = (getattr(config.model_config.hf_text_config, "rope_parameters", None) or {}).get("rope_theta")
    if blend.rope_theta is not None and theta is not None and float(theta) != float(blend.rope_theta):
        raise ConfigError(f"kv_connector_extra_config: rope_theta: found {blend.rope_theta}, but the model has {theta}"
                          "; leave the key out or set the model's value")


def namespace_of(config: VllmConfig) -> Namespace:
    """Whose KV this engine computes, without a request's salt."""
    model = config.model_config
    text = model.hf_text_config
    parallel = config.parallel_config
    rope = getattr(text, "rope_parameters", None) or {}
    longest = getattr(text, "max_position_embeddings", None)
    # dynamic and longrope choose their angles by the engine's maximum length
    rope = {**rope, "max_position_embeddings": longest, "partial": getattr(text, "partial_rotary_factor", None)}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        rope["max_model_len"] = model.max_model_len
    layout = (f"layers={model.get_num_layers(parallel)},kv_heads={model.get_total_num_kv_heads()},"
              f"head_dim={model.get_head_size()}")
    return Namespace(
        model=str(model.served_model_name or model.model) if not os.path.isdir(model.model) else Path(model.model).name,
        revision=weights_fingerprint(model.model, model.revision) + _quantized(model),
        dtype=str(model.dtype).removeprefix("torch."),
        rope=canonical_json(rope), kv_layout=layout, world_size=parallel.tensor_parallel_size,
    )


def _quantized(model: ModelConfig) -> str:
    """What the engine makes of the weights; empty if it takes them as they are."""
    found = {name: value for name in ("quantization", "quantization_config") if (value := getattr(model, name, None))}
    return f"+{canonical_json(found)}" if found else ""


def weights_fingerprint(model: str, revision: str | None) -> str:
    """What tells one set of weights from another: of a folder its configuration and the size, head and tail of each
    weights file (content alone: a copy of the folder shares its KV); of a hub name the commit that is here, or its
    revision where the hub's cache does not say."""
    if not os.path.isdir(model):
        return f"hub:{model}@{_hub_commit(model, revision) or revision or 'main'}"
    digest = blake3()
    for path in sorted(Path(model).iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in _WEIGHT_SUFFIXES:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                for position in range(0, size, max(_EDGE_BYTES, size // 64)):
                    file.seek(position)
                    digest.update(file.read(_EDGE_BYTES))
                file.seek(max(0, size - _EDGE_BYTES))
                digest.update(file.read())
    return digest.hexdigest(16)


def _hub_commit(model: str, revision: str | None) -> str | None:
    """The commit that a branch stood for when its configuration was fetched. No network."""
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # no name of a hub's
        return None
    return Path(found).parent.name if isinstance(found, str) else None
