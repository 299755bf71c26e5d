"""One typed settings model for the whole system, read from YAML.

`load_settings` is the way in. Every section is a pydantic model; a key that does not exist, a value of the wrong type
or an impossible value raises `ConfigError`, whose message names the file, the key, the value found and what is allowed.
The blocks `ucm_sparse_config:` and `kv_connector_extra_config:` of UCM configurations are read as they stand there.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

CONFIG_VARIABLE = "UCM_RAY_CONFIG"
API_KEYS_VARIABLE = "UCM_RAY_API_KEYS"
DEFAULT_FILE = Path(__file__).resolve().parent.parent / "configs" / "default.yaml"
CONNECTOR_MODULE = "ucm_ray.integration.vllm.blend_connector"
_ROOT_BLOCKS = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config", "ucm_sparse_config")
_BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names file, key, value found and what is allowed."""


def parse_bytes(value: Any) -> Any:
    """`"4GiB"` -> 4294967296; integers pass through, anything else is left for pydantic to reject."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].lower() in _BYTE_UNITS:
            return int(float(match[1]) * _BYTE_UNITS[match[2].lower()])
        raise ValueError("expected a number of bytes such as 1073741824 or 1GiB")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _known_policy(name: str) -> str:
    """Policies are the files of `ucm_ray.blend.policies`: a new one needs no change here."""
    from ucm_ray.blend.policies import get_policy, policy_names

    try:
        get_policy(name)
    except (TypeError, ValueError):
        raise ValueError(f"expected one of {', '.join(map(repr, policy_names()))}") from None
    return name


def _known_representation(name: str) -> str:
    """Representations register themselves in `ucm_ray.retrieval.representations`."""
    try:
        from ucm_ray.retrieval.representations import representation_names
    except ImportError:  # without torch, which `ucm-ray doctor` has to be able to say
        return name
    if name not in representation_names():
        raise ValueError(f"expected one of {', '.join(map(repr, representation_names()))}")
    return name


def _rotated(value: bool) -> bool:
    if not value:
        raise ValueError("expected true: stored KV is always rotated to the position it is used at")
    return value


Policy = Annotated[str, AfterValidator(_known_policy)]
Representation = Annotated[str, AfterValidator(_known_representation)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True)


class EngineSettings(_Section):
    """The vLLM engine of one replica. `extra` goes to vLLM's engine arguments as it stands."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(default=8192, ge=64)
    block_size: int = Field(default=32, ge=1, description="tokens per KV block; a multiple of 32 on CPU")
    max_num_seqs: int = Field(default=32, ge=1)
    max_num_batched_tokens: int = Field(default=2048, ge=32)
    tensor_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.85, gt=0.0, le=1.0)
    cpu_kv_cache_gib: int = Field(default=2, ge=1)
    cpu_threads: str = Field(default="auto", description="VLLM_CPU_OMP_THREADS_BIND")
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    extra: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _possible(self) -> EngineSettings:
        if self.device == "cpu" and self.block_size % 32:
            raise ValueError(f"block_size is {self.block_size}, expected a multiple of 32 on CPU")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens is {self.max_num_batched_tokens}, expected at least max_num_seqs "
                             f"({self.max_num_seqs}): every request decodes one token a step")
        return self


class StoreSettings(_Section):
    """Where chunks are kept: stages of the pipeline from fast to slow."""

    store_pipeline: str = "Cache|Posix"
    storage_backends: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        default_factory=lambda: ["~/.cache/ucm_ray/store"], min_length=1
    )
    cache_capacity_bytes: Bytes = 2 * 2**30
    posix_capacity_bytes: Bytes = 16 * 2**30
    io_threads: int = Field(default=4, ge=1, le=256)
    directory: str | None = Field(default=None, description="name of the chunk directory; null: by the first folder")
    refresh_s: float = Field(default=2.0, gt=0.0, description="how often chunks of other engines are looked for")

    @model_validator(mode="after")
    def _known_stages(self) -> StoreSettings:
        for stage in self.store_pipeline.split("|"):
            if not re.fullmatch(r"[A-Za-z]\w*", stage):
                raise ValueError(f"store_pipeline {self.store_pipeline!r}: expected stage names joined by '|', "
                                 "such as 'Cache|Posix'")
        return self


class BlendSettings(_Section):
    """Reuse of cached chunks at any position, and which of their tokens are recomputed."""

    enabled: bool = True
    policy: Policy = "query"
    budget: Ratio = 0.10
    blend_chunk_size: int = Field(default=64, ge=8, le=4096)
    min_match_ratio: float = Field(default=0.8, gt=0.0, le=1.0)
    anchor_tokens: int = Field(default=16, ge=4, le=256)
    position_correction: Annotated[bool, AfterValidator(_rotated)] = True
    recompute_boundary: int = Field(default=2, ge=0)
    blend_tokens_per_step: int = Field(default=512, ge=1, description="work of a plan per engine step")
    save: bool = Field(default=True, description="save exactly computed new chunks")
    cost_model: bool = Field(default=True, description="decline plans that would take longer than computing")
    rope_theta: float | None = Field(default=None, gt=0, description="checked against the model; read from it if null")
    head_dim: int | None = Field(default=None, ge=1, description="checked against the model; read from it if null")


class EsaSettings(_Section):
    """Sparse decode over init, local and retrieved blocks."""

    enabled: bool = False
    sparse_ratio: float = Field(default=0.3, gt=0.0, le=1.0)
    local_window_sz: int = Field(default=8, ge=0)
    init_window_sz: int = Field(default=1, ge=0)
    min_blocks: int = Field(default=4, ge=0)
    retrieval_stride: int = Field(default=5, ge=1)
    retrieval_workers: int = Field(default=4, ge=1)
    retrieval_cache_size: int = Field(default=10000, ge=1)
    # the default is not checked: torch would be imported for it
    representation: Representation = Field(default="cumulant", validate_default=False)
    static_share: Ratio = Field(default=0.65, description="share of the rest given by prompt attention mass")
    deadline_ms: float = Field(default=5.0, ge=0.0)
    fallback: Literal["last", "local", "dense"] = "last"
    retrieval_dtype: Literal["float16", "bfloat16", "float32"] = "bfloat16"
    prompt_window: int = Field(default=32, ge=1, description="last prompt queries that choose the static share")
    lexical_blocks: int = Field(default=8, ge=0, description="of the middle blocks: those that repeat the last tokens")
    drift_cosine: Ratio = Field(default=0.0, description="select early when queries turn further away; 0: never")
    per_head: bool = Field(default=True, description="a selection per KV head, where the backend can read that way")
    min_saved_bytes: Bytes = Field(default=32 * 2**20, description="read densely if a step saves less KV")


class RetrievalSettings(_Section):
    """Where block representations live: in the worker (`local`) or in sharded Ray actors (`ray`)."""

    backend: Literal["local", "ray"] = "local"
    namespace: str = Field(default="ucm_ray", min_length=1, description="the Ray namespaces of pools begin with it")
    shards: int = Field(default=1, ge=1)
    max_shards: int = Field(default=4, ge=1)
    capacity_bytes: Bytes = 256 * 2**20
    dtype: Literal["float16", "bfloat16", "float32"] = Field(
        default="float32", description="of blocks stored over HTTP; those of running requests: esa.retrieval_dtype"
    )
    num_cpus: float = Field(default=0.1, ge=0.0)
    num_gpus: float = Field(default=0.0, ge=0.0, description="of the engines' shards; those of HTTP are on the CPU")

    @model_validator(mode="after")
    def _ordered(self) -> RetrievalSettings:
        if self.max_shards < self.shards:
            raise ValueError(f"max_shards is {self.max_shards}, expected at least shards ({self.shards})")
        return self


class ServiceSettings(_Section):
    """HTTP, replicas and autoscaling."""

    model_id: str = Field(default="smollm2-135m-instruct", min_length=1, description="name clients put in `model`")
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    api_keys: list[str] = Field(default_factory=list, description="empty: no key is asked for")
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(default=16, gt=0)
    upscale_delay_s: float = Field(default=30.0, ge=0.0, description="more is asked for that long, then replicas come")
    downscale_delay_s: float = Field(default=600.0, ge=0.0, description="less is asked for that long, then they go")
    max_ongoing_requests: int = Field(default=256, ge=1)
    replica_cpus: float = Field(default=0.5, gt=0.0)
    replica_gpus: float = Field(default=1.0, gt=0.0, description="used where device is cuda; fractions share one GPU")
    accelerator_type: str | None = None
    ingress_cpus: float = Field(default=0.1, gt=0.0)
    ingress_replicas: int = Field(default=1, ge=1)
    router: Literal["default", "chunk_aware"] = "default"
    router_load_weight: float = Field(default=0.25, ge=0.0, description="reusable share a queued request outweighs")
    directory_max_chunks: int = Field(default=1_000_000, ge=1, description="about 500 bytes of memory each")
    kept_receipts: int = Field(default=4096, ge=1, description="for GET /ucm/v1/receipts/{id}")
    otlp_endpoint: str | None = Field(default=None, pattern="^https?://",
                                      description="OpenTelemetry collector for spans, http://HOST:4318/v1/traces")

    @model_validator(mode="after")
    def _ordered(self) -> ServiceSettings:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, expected at least min_replicas "
                             f"({self.min_replicas})")
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("api_keys has an empty key; expected non-empty strings")
        return self


class Settings(_Section):
    """Everything. `model` is `default`, a local folder or a hub name."""

    model: str = Field(default="default", min_length=1)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    blend: BlendSettings = Field(default_factory=BlendSettings)
    esa: EsaSettings = Field(default_factory=EsaSettings)
    retrieval: RetrievalSettings = Field(default_factory=RetrievalSettings)
    service: ServiceSettings = Field(default_factory=ServiceSettings)

    def connector_config(self) -> dict[str, Any]:
        """`kv_connector_extra_config` of `BlendConnector`: flat store and blend keys, ESA and retrieval as blocks."""
        extra: dict[str, Any] = self.store.model_dump() | self.blend.model_dump(exclude_none=True)
        extra["storage_backends"] = [str(Path(folder).expanduser()) for folder in self.store.storage_backends]
        if self.esa.enabled:
            extra["ucm_sparse_config"] = {"ESA": self.esa.model_dump()}
            extra["retrieval"] = self.retrieval.model_dump()
        return extra

    def kv_transfer_config(self) -> dict[str, Any] | None:
        """Arguments of vLLM's `KVTransferConfig`; None when neither blend nor ESA is on."""
        if not (self.blend.enabled or self.esa.enabled):
            return None
        return {
            "kv_connector": "BlendConnector",
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            # the engine's default, "fail", would turn a chunk that cannot be read into a failed request
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self.connector_config(),
        }


class RequestControls(_Section):
    """What a request may set in `kv_transfer_params["ucm"]`; None keeps the deployment's value."""

    blend: bool | None = None
    policy: Policy | None = None
    budget: Ratio | None = None
    save: bool | None = None
    trace: bool | None = Field(default=None, description="the receipt names the recomputed positions")
    ingest_from: int | None = Field(default=None, ge=0, description="the prompt is a document to store from here on")
    esa: bool | None = None
    sparse_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None = None


def load_settings(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read settings from `path`, else from the file named by UCM_RAY_CONFIG, else from `configs/default.yaml`.

    `overrides` maps dotted keys to values (`{"blend.budget": 0.2}`); strings are read as YAML. UCM_RAY_API_KEYS (keys
    with commas between them) stands in for `service.api_keys`, so that no secret has to lie in a file.
    Raises `ConfigError`.
    """
    chosen = path or os.environ.get(CONFIG_VARIABLE)
    if not chosen:
        # an installed package has no configs/ folder beside it; the defaults of the classes are the same
        chosen = DEFAULT_FILE if DEFAULT_FILE.exists() else None
    raw = _read_yaml(Path(chosen).expanduser()) if chosen else {}
    where = str(chosen) if chosen else "built-in defaults"
    for key, value in (overrides or {}).items():
        _set(raw, key, _parse_yaml(value, f"{where}: {key}") if isinstance(value, str) else value, where)
    if keys := os.environ.get(API_KEYS_VARIABLE):
        _set(raw, "service.api_keys", [key.strip() for key in keys.split(",")], API_KEYS_VARIABLE)
    return parse_settings(raw, where)


def parse_settings(raw: Mapping[str, Any], where: str = "configuration") -> Settings:
    """Validate a mapping as read from YAML. Raises `ConfigError` naming every bad key."""
    return _validate(Settings, _fold_blocks(dict(raw), where), where)


def connector_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """Settings out of a `kv_connector_extra_config` alone, as vLLM hands it to the connector. Raises `ConfigError`."""
    return parse_settings({"kv_connector_extra_config": dict(extra_config or {})}, "kv_transfer_config")


def parse_controls(raw: Any, where: str = 'kv_transfer_params["ucm"]') -> RequestControls:
    """Validate the controls of one request. Raises `ConfigError`."""
    if raw is None:
        return RequestControls()
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: found {raw!r}, expected a mapping")
    return _validate(RequestControls, dict(raw), where)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file, expected a YAML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    raw = _parse_yaml(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: found a {type(raw).__name__} at the top, expected a mapping of sections")
    return raw


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date with a month 13
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _set(raw: dict[str, Any], dotted: str, value: Any, where: str) -> None:
    *sections, last = dotted.split(".")
    for name in sections:
        raw[name] = {} if raw.get(name) is None else raw[name]
        raw = raw[name]
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: {dotted}: {name!r} holds {raw!r}, expected a section")
    raw[last] = value


def _fold_blocks(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Move UCM's own blocks into our sections. Both spelled out for the same key with two values is an error."""
    name = raw.pop("kv_connector", "BlendConnector")
    if name != "BlendConnector":
        raise ConfigError(f"{where}: kv_connector: found {name!r}, expected 'BlendConnector'")
    module = raw.pop("kv_connector_module_path", CONNECTOR_MODULE)
    if module not in (CONNECTOR_MODULE, CONNECTOR_MODULE.replace("ucm_ray.", "ucm.")):
        raise ConfigError(f"{where}: kv_connector_module_path: found {module!r}, expected {CONNECTOR_MODULE!r}")
    for key, value in _mapping(raw.pop("kv_connector_extra_config", None), "kv_connector_extra_config", where).items():
        if key in ("ucm_sparse_config", "retrieval"):
            raw[key] = value
        elif key in StoreSettings.model_fields:
            _merge(raw, "store", {key: value}, f"kv_connector_extra_config.{key}", where)
        elif key in BlendSettings.model_fields:
            _merge(raw, "blend", {key: value}, f"kv_connector_extra_config.{key}", where)
        else:
            known = [*StoreSettings.model_fields, *BlendSettings.model_fields, "ucm_sparse_config", "retrieval"]
            raise ConfigError(f"{where}: kv_connector_extra_config.{_unknown(key, value, known)}")
    for key, value in _mapping(raw.pop("ucm_sparse_config", None), "ucm_sparse_config", where).items():
        if key != "ESA":
            raise ConfigError(f"{where}: ucm_sparse_config.{_unknown(key, value, ['ESA'])}")
        block = {"enabled": True} | _mapping(value, "ucm_sparse_config.ESA", where)
        _merge(raw, "esa", block, "ucm_sparse_config.ESA", where)
    return raw


def _mapping(value: Any, key: str, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {key}: found {value!r}, expected a mapping")
    return dict(value)


def _merge(raw: dict[str, Any], section: str, values: dict[str, Any], source: str, where: str) -> None:
    target = _mapping(raw.get(section), section, where)
    for key, value in values.items():
        if key in target and target[key] != value:
            raise ConfigError(f"{where}: {section}.{key} is {target[key]!r} and {source} says {value!r}; give it once")
        target[key] = value
    raw[section] = target


def _validate(model: type[_Section], raw: dict[str, Any], where: str) -> Any:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {line}" for line in _explain(model, error))) from None


def _explain(model: type[_Section], error: ValidationError) -> Iterator[str]:
    for item in error.errors():
        loc = [str(part) for part in item["loc"]]
        key, value = ".".join(loc), item["input"]
        if item["type"] == "extra_forbidden":
            prefix = ".".join(loc[:-1])
            yield (f"{prefix}." if prefix else "") + _unknown(loc[-1], value, _known_keys(model, loc[:-1]))
        elif item["type"] == "value_error" and isinstance(value, dict):
            yield f"{key}: {item['ctx']['error']}"
        elif item["type"] in ("model_type", "model_attributes_type", "dict_type"):
            yield f"{key}: found {value!r}, expected a mapping"
        else:
            reason = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            reason = reason if reason.startswith("expected") else f"expected {reason}"
            yield f"{key}: found {_hidden(key, value)}, {reason}"


def _hidden(key: str, value: Any) -> str:
    """Secrets never reach a log through an error message."""
    return f"a {type(value).__name__}" if "api_key" in key else repr(value)


def _known_keys(model: type[BaseModel], loc: list[str]) -> list[str]:
    for name in loc:
        model = model.model_fields[name].annotation  # type: ignore[assignment]
    keys = list(model.model_fields)
    return keys + list(_ROOT_BLOCKS) if model is Settings else keys


def _unknown(key: str, value: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
    home = [name for name, field in Settings.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            and key in field.annotation.model_fields]
    if home:
        hint = f"it belongs to section {home[0]!r}."
    elif near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"known keys: {', '.join(known)}."
    return f"{key}: unknown key (value {_hidden(str(key), value)}); {hint}"
