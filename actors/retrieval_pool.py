"""The retrieval pool: how many shards there are and which; placement itself is every client's own arithmetic.

`RetrievalPool` is a named, restartable Ray actor that starts shards, replaces and scales them by
stored bytes and queue time. It is on no query's path: clients ask it for the membership and talk to the shards.
"""

import hashlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from actors.retrieval_shard import shard_actor
from ucm_ray.retrieval.bell import Bell
from ucm_ray.retrieval.client import Membership, PoolLink, RetrievalError, ShardLink

logger = logging.getLogger(__name__)

_DRAIN_S = 10.0
_INFO_TIMEOUT_S = 2.0
_SETTLE_INTERVALS = 5


@dataclass(frozen=True)
class PoolSettings:
    """How a pool is built and when it changes size.

    Attributes:
        shards: number of shards at the start; min_shards, max_shards: what autoscaling stays between.
        capacity_bytes: room for representations in each shard.
        device, num_threads, protect_s, request_ttl_s: see `RetrievalShard`.
        num_cpus, num_gpus, resources: what each shard asks Ray for; fractions share a device.
        autoscale: whether the number of shards follows the load.
        target_fill: share of all shards' bytes that requests may hold before a shard is added.
        target_queue_ms: median time a query may wait in a shard before a shard is added.
        cooldown_s: how long less must have been enough before a shard is removed.
        interval_s: time between two looks at the shards.
    """

    shards: int = 1
    min_shards: int = 1
    max_shards: int = 4
    capacity_bytes: int = 256 * 2 ** 20
    device: str = "auto"
    num_threads: int | None = 1
    protect_s: float = 5.0
    request_ttl_s: float = 600.0
    num_cpus: float = 0.1
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)
    autoscale: bool = False
    target_fill: float = 0.8
    target_queue_ms: float = 5.0
    cooldown_s: float = 30.0
    interval_s: float = 1.0

    def check(self) -> "PoolSettings":
        """Self, or ValueError naming the key that cannot be."""
        if not 1 <= self.min_shards <= self.max_shards:
            raise ValueError(f"min_shards is {self.min_shards} and max_shards {self.max_shards}, expected "
                             "1 <= min_shards <= max_shards")
        if self.shards < 1 or self.autoscale and not self.min_shards <= self.shards <= self.max_shards:
            raise ValueError(f"shards is {self.shards}, expected {self.min_shards} to {self.max_shards}")
        if self.capacity_bytes < 1 or not 0 < self.target_fill <= 1:
            raise ValueError(f"capacity_bytes is {self.capacity_bytes} and target_fill {self.target_fill}, expected "
                             "above 0, and at most 1 for the latter")
        return self


def shards_wanted(settings: PoolSettings, infos: Sequence[dict], refused: int) -> int:
    """How many shards today's load needs, within the settings' bounds.

    Args:
        infos: what `RetrievalShard.info` said of each shard.
        refused: blocks refused for capacity since the last look.
    """
    held = sum(info["referenced_bytes"] for info in infos)
    wanted = math.ceil(held / (settings.target_fill * settings.capacity_bytes))
    if refused or any(info["queue_ms"] > settings.target_queue_ms for info in infos):
        wanted = max(wanted, len(infos) + 1)
    return min(max(wanted, settings.min_shards), settings.max_shards)


class RetrievalPool:
    """The pool actor. Restarted, it finds its shards by their names and goes on.

    Args:
        name: of the pool; the shards are called `<name>-shard-<number>`.
        namespace: Ray namespace all of them live in.
    """

    def __init__(self, name: str, namespace: str, settings: dict):
        self._name, self._namespace = name, namespace
        self._settings = PoolSettings(**settings).check()
        self._lock = threading.RLock()
        self._live: dict[str, Any] = {}
        self._pending: dict[str, tuple[Any, Any]] = {}
        self._draining: dict[str, tuple[Any, float]] = {}
        self._adopted: dict[str, int] = {}
        self._version = 0
        self._target = self._settings.shards
        self._refused = 0
        self._joined_s = 0.0
        self._enough_since_s = time.monotonic()
        self._closed = threading.Event()
        self._adopt_shards()
        self._reconcile()
        self._thread = threading.Thread(target=self._watch, name="retrieval-pool", daemon=True)
        self._thread.start()

    def membership(self) -> tuple[int, list[tuple[str, Any]]]:
        """Version, and (name, actor handle) of each shard; version 0 while no shard has started."""
        with self._lock:
            return self._version, sorted(self._live.items(), key=lambda item: item[0])

    def adopted(self, client_id: str, version: int | None) -> None:
        """A client has moved its blocks to this version of the membership, or is gone (None)."""
        with self._lock:
            if version is None:
                self._adopted.pop(client_id, None)
            else:
                self._adopted[client_id] = version

    def resize(self, shards: int) -> None:
        """Sets the number of shards. New ones join once they run; removed ones leave once clients have moved."""
        if shards < 1:
            raise ValueError(f"shards is {shards}, expected >= 1")
        with self._lock:
            self._target = shards
            self._reconcile()

    def info(self) -> dict:
        """Membership, target and what every shard says of itself."""
        with self._lock:
            shards, pending, draining = dict(self._live), list(self._pending), list(self._draining)
            version, target = self._version, self._target
        return {"version": version, "target": target, "pending": pending, "draining": draining,
                "shards": self._ask(shards), "settings": asdict(self._settings)}

    def shutdown(self) -> None:
        """Ends all shards for good."""
        import ray

        self._closed.set()
        with self._lock:
            handles = [*self._live.values(), *(handle for handle, _ in self._pending.values()),
                       *(handle for handle, _ in self._draining.values())]
            self._live, self._pending, self._draining = {}, {}, {}
        for handle in handles:
            ray.kill(handle, no_restart=True)

    def _adopt_shards(self) -> None:
        """Takes over shards an earlier life of this pool has started."""
        import ray

        prefix = f"{self._name}-shard-"
        for found in ray.util.list_named_actors(all_namespaces=True):
            if found["namespace"] == self._namespace and found["name"].startswith(prefix):
                self._live[found["name"]] = ray.get_actor(found["name"], namespace=self._namespace)
        if self._live:
            self._target = max(len(self._live), self._settings.min_shards)
            self._version = time.time_ns()

    def _reconcile(self) -> None:
        """Starts or drains shards until there are as many as wanted. Needs the lock, or no other thread yet."""
        while len(self._live) + len(self._pending) < self._target:
            name, handle = self._start_shard()
            self._pending[name] = (handle, handle.warm_up.remote())
        import ray

        while len(self._live) + len(self._pending) > self._target:
            if self._pending:
                _, (handle, _) = self._pending.popitem()
                ray.kill(handle, no_restart=True)
                continue
            name = max(self._live, key=_number)
            self._draining[name] = (self._live.pop(name), time.monotonic() + _DRAIN_S)
            self._version = time.time_ns()

    def _start_shard(self) -> tuple[str, Any]:
        taken = {_number(name) for name in (*self._live, *self._pending, *self._draining)}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        name = f"{self._name}-shard-{number}"
        settings = self._settings
        handle = shard_actor().options(
            name=name, namespace=self._namespace, lifetime="detached", get_if_exists=True, max_restarts=-1,
            max_task_retries=0, num_cpus=settings.num_cpus, num_gpus=settings.num_gpus, resources=settings.resources,
            scheduling_strategy="SPREAD",
        ).remote(settings.capacity_bytes, settings.device, settings.num_threads, settings.protect_s,
                 settings.request_ttl_s)
        return name, handle

    def _watch(self) -> None:
        next_look_s = time.monotonic() + self._settings.interval_s
        while not self._closed.wait(0.05 if self._pending or self._draining else 0.2):
            try:
                self._admit_started()
                self._end_drained()
                if self._settings.autoscale and time.monotonic() >= next_look_s:
                    next_look_s = time.monotonic() + self._settings.interval_s
                    self._scale()
            except Exception:
                logger.exception("retrieval pool %s: one look at the shards failed", self._name)

    def _admit_started(self) -> None:
        """Shards that answer join the membership, all that are ready in one new version."""
        import ray

        with self._lock:
            pending = dict(self._pending)
        started = {}
        for name, (handle, ref) in pending.items():
            if ray.wait([ref], timeout=0)[0]:
                try:
                    ray.get(ref)
                    started[name] = handle
                except ray.exceptions.RayError as error:
                    logger.warning("retrieval shard %s did not start: %s", name, str(error).strip().splitlines()[-1])
                    with self._lock:
                        if name in self._pending:
                            self._pending[name] = (handle, handle.warm_up.remote())
        with self._lock:
            started = {name: handle for name, handle in started.items() if self._pending.pop(name, None)}
            if started:
                self._live.update(started)
                self._version = time.time_ns()
                self._joined_s = time.monotonic()

    def _end_drained(self) -> None:
        """Ends removed shards once every client that moves has moved, at the latest after `_DRAIN_S`."""
        import ray

        with self._lock:
            moved = all(version >= self._version for version in self._adopted.values())
            done = [name for name, (_, ends_s) in self._draining.items() if moved or time.monotonic() >= ends_s]
            handles = [self._draining.pop(name)[0] for name in done]
            if done:
                # A client that did not move in time is gone, or will recover from its own copy.
                self._adopted = {client: version for client, version in self._adopted.items()
                                 if version >= self._version}
        for handle in handles:
            ray.kill(handle, no_restart=True)

    def _scale(self) -> None:
        with self._lock:
            shards = dict(self._live)
        infos = [info for info in self._ask(shards).values() if info]
        if not infos:
            return
        refused = sum(info["refused"] for info in infos)
        newly_refused, self._refused = max(0, refused - self._refused), refused
        if time.monotonic() - self._joined_s < _SETTLE_INTERVALS * self._settings.interval_s:
            newly_refused = 0  # clients are still moving to the shards that just joined
        wanted = shards_wanted(self._settings, infos, newly_refused)
        now = time.monotonic()
        with self._lock:
            if wanted >= len(self._live):
                self._enough_since_s = now
            if wanted > self._target:
                self._target = wanted
            elif wanted < len(self._live) and now - self._enough_since_s >= self._settings.cooldown_s:
                self._target = max(wanted, len(self._live) - 1)
                self._enough_since_s = now
            elif wanted < self._target and self._pending:
                self._target = max(wanted, len(self._live))
            self._reconcile()

    @staticmethod
    def _ask(shards: dict[str, Any]) -> dict[str, dict | None]:
        """`RetrievalShard.info` of each shard; None for one that does not answer in time."""
        import ray

        refs = {name: handle.info.remote() for name, handle in shards.items()}
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_INFO_TIMEOUT_S) if refs else ([], [])
        infos: dict[str, dict | None] = {}
        for name, ref in refs.items():
            try:
                infos[name] = ray.get(ref) if ref in ready else None
            except ray.exceptions.RayError:
                infos[name] = None
        return infos


def start_pool(settings: PoolSettings | None = None, name: str = "retrieval", namespace: str = "ucm_ray",
               wait_s: float = 60.0):
    """Starts a pool in the Ray cluster this process is connected to, or finds the one of that name.

    Returns:
        Handle of the pool actor (`resize`, `info`, `shutdown`, ...). It outlives this process: see `stop_pool`.
    Raises:
        RetrievalError: no shard started within `wait_s` (the cluster lacks the resources).
    """
    import ray

    settings = (settings or PoolSettings()).check()
    pool = ray.remote(RetrievalPool).options(
        name=name, namespace=namespace, lifetime="detached", get_if_exists=True, max_restarts=-1, max_task_retries=0,
        num_cpus=0, max_concurrency=4,
    ).remote(name, namespace, asdict(settings))
    end = time.monotonic() + wait_s
    while True:
        version, shards = ray.get(pool.membership.remote(), timeout=wait_s)
        if len(shards) >= settings.shards or version and settings.autoscale:
            return pool
        if time.monotonic() > end:
            raise RetrievalError(f"after {wait_s} s {len(shards)} of {settings.shards} shards of pool {name!r} run; "
                                 f"each asks for {settings.num_cpus} CPU, {settings.num_gpus} GPU, "
                                 f"{settings.resources or 'no'} other resources, of which the cluster has "
                                 f"{ray.available_resources()} left")
        time.sleep(0.02)


def stop_pool(name: str = "retrieval", namespace: str = "ucm_ray") -> bool:
    """Ends a pool and its shards; returns whether there was one."""
    import ray

    try:
        pool = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    ray.get(pool.shutdown.remote(), timeout=30)
    ray.kill(pool, no_restart=True)
    return True


def own_namespace(base: str, app: str, kind: str, *told: Any) -> str:
    """Ray namespace for the pool of a Serve application.

    Shards outlive a deployment and keep the geometry and the settings they were started with: whatever decides those is
    `told`, and anything else told means another pool. `kind` is "engine" or "http".
    """
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{base}-{app}-{kind}-{digest}"


def end_pools(base: str, app: str, kind: str | None = None, keep: str = "") -> None:
    """Ends an application's pools of `kind`, or of both kinds, but for the one in the namespace `keep`."""
    import ray

    ours = re.compile(f"{re.escape(f'{base}-{app}-')}{kind or '(engine|http)'}-[0-9a-f]{{8}}")
    # owners of blocks first, then pools, which would start a shard again; what they were just starting comes last
    for names in (r".*-documents", r"(?!.*-shard-\d+$).*", r".*"):
        for found in ray.util.list_named_actors(all_namespaces=True):
            if (found["namespace"] != keep and ours.fullmatch(found["namespace"])
                    and re.fullmatch(names, found["name"])):
                with suppress(ValueError):  # gone meanwhile
                    ray.kill(ray.get_actor(found["name"], namespace=found["namespace"]), no_restart=True)


class RayShardLink(ShardLink):
    """A shard that is a Ray actor."""

    def __init__(self, shard_id: str, handle: Any):
        self.shard_id = shard_id
        self._handle = handle
        self._methods: dict[tuple[str, int], Any] = {}
        self._bell: Bell | None = None

    def hang_bell(self, timeout_s):
        self.close()
        bell, taken = Bell(), False
        try:
            taken = self.wait("serve_bell", (bell.invitation,), timeout_s)
        finally:
            bell.accepted(taken)
        self._bell = bell

    def ring(self, args, done):
        return self._bell is not None and self._bell.ring(tuple(args), done)

    def close(self):
        if self._bell is not None:
            self._bell.close()

    def call(self, method, args, num_returns, done):
        try:
            refs = self._method(method, num_returns).remote(*args)
        except Exception as error:  # the actor is gone for good, or Ray has shut down
            done(error)
            return
        refs = [refs] if num_returns == 1 else refs
        _Gather(refs, done)

    def wait(self, method, args, timeout_s):
        import ray

        return ray.get(getattr(self._handle, method).remote(*args), timeout=timeout_s)

    def _method(self, name: str, num_returns: int):
        key = (name, num_returns)
        if key not in self._methods:
            self._methods[key] = getattr(self._handle, name).options(num_returns=num_returns)
        return self._methods[key]


class _Gather:
    """Waits for the results of one call without a thread; calls `done` once."""

    def __init__(self, refs: Sequence, done: Callable):
        self._refs, self._done = refs, done
        self._values: list = [None] * len(refs)
        self._missing = len(refs)
        self._lock = threading.Lock()
        for index, ref in enumerate(refs):
            ref._on_completed(lambda value, index=index: self._arrived(index, value))

    def _arrived(self, index: int, value) -> None:
        with self._lock:
            if self._missing <= 0:
                return
            self._values[index] = value
            self._missing = 0 if isinstance(value, Exception) else self._missing - 1
            if self._missing:
                return
        self._done(value if isinstance(value, Exception) else self._values)


class RayPoolLink(PoolLink):
    """A pool that is a Ray actor."""

    def __init__(self, handle: Any):
        self._handle = handle

    def membership(self, timeout_s):
        import ray

        end = time.monotonic() + timeout_s
        while True:
            version, shards = ray.get(self._handle.membership.remote(), timeout=timeout_s)
            if shards or time.monotonic() > end:
                return Membership(version, tuple(RayShardLink(name, handle) for name, handle in shards))
            time.sleep(0.02)

    def adopted(self, client_id, version):
        self._handle.adopted.remote(client_id, version)


def find_pool(address: str | None, namespace: str, name: str, timeout_s: float) -> RayPoolLink:
    """Joins the cluster if this process has not yet, and finds the pool. See `RetrievalClient.connect`."""
    import ray

    if not ray.is_initialized():
        _join(address, timeout_s)
    try:
        return RayPoolLink(ray.get_actor(name, namespace=namespace))
    except ValueError:
        raise RetrievalError(f"no retrieval pool {name!r} runs in namespace {namespace!r} of the Ray cluster at "
                             f"{ray.get_runtime_context().gcs_address}; start one with actors.retrieval_pool.start_pool"
                             ) from None


def _join(address: str | None, timeout_s: float) -> None:
    import socket

    import ray

    if address and ":" in address and "://" not in address:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=timeout_s).close()
        except (OSError, ValueError) as error:
            raise RetrievalError(f"no Ray cluster answers at address {address!r}: {error}") from error
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        where = address or "auto"
        # ray.init reports a refused token as if nothing were there.
        refusal = error if _is_refusal(error) else _refusal(address)
        if refusal is not None:
            raise RetrievalError(f"the Ray cluster at address {where!r} refused this process (is the token in "
                                 f"RAY_AUTH_TOKEN or ~/.ray/auth_token the cluster's?): {refusal}") from error
        if isinstance(error, ConnectionError):
            raise RetrievalError(f"no Ray cluster found at address {where!r}: {error}") from error
        raise RetrievalError(f"could not join the Ray cluster at address {where!r}: {error}") from error


def _refusal(address: str | None) -> Exception | None:
    """Why the cluster at `address` does not let this process in; None if it does, or if nothing answers."""
    from ray._raylet import GcsClient

    if not address or ":" not in address or "://" in address:
        return None
    try:
        GcsClient(address=address).get_all_node_info(timeout=3)
    except Exception as error:
        return error if _is_refusal(error) else None
    return None


def _is_refusal(error: Exception) -> bool:
    return "authenticat" in f"{type(error).__name__} {error}".lower()


def _number(shard_name: str) -> int:
    return int(shard_name.rpartition("-")[2])
