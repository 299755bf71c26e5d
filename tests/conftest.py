"""Fixtures shared by all rooms."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fake_nodes import FakeNodesCluster, kill_marked, marked_processes

# the engine must never ask a hub; every test model is local
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# a shell lets what it starts in the background ignore SIGINT, and so would everything the tests start and interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Folder of the default model (SmolLM2-135M-Instruct, bfloat16, safetensors)."""
    from ucm_ray.models import default_model

    return default_model()


class ServiceProcess:
    """`ucm-ray serve` in a process of its own, with a Ray of its own or on a cluster that is only for it."""

    def __init__(self, config: dict[str, Any], folder: Path, cluster: FakeNodesCluster | None = None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        service = {"host": "127.0.0.1", "port": self.port} | config.get("service", {})
        store = {"storage_backends": str(folder / "store")} | config.get("store", {})
        (folder / "config.yaml").write_text(yaml.safe_dump({**config, "service": service, "store": store}))
        self.log = folder / "service.log"
        command = [sys.executable, "-m", "ucm_ray", "serve", "--config", str(folder / "config.yaml")]
        if cluster is None:
            # found again in /proc/*/environ of everything the service starts
            self.mark = f"UCM_RAY_TEST_SERVICE={uuid.uuid4().hex}"
            name, value = self.mark.split("=")
            environment = {key: text for key, text in os.environ.items() if key != "RAY_ADDRESS"} | {name: value}
        else:
            self.mark, environment = cluster.mark, cluster.environment
            command += ["--address", cluster.address]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment,
                                            start_new_session=True)

    def wait_ready(self, timeout_s: float = 400) -> ServiceProcess:
        deadline = time.monotonic() + timeout_s
        while b"Ready after" not in self.log.read_bytes():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail("the service did not come up; the end of its log:\n" + self.log.read_text()[-6000:])
            time.sleep(0.5)
        return self

    def processes(self) -> list[int]:
        """Ids of all living processes of this service, Ray's and the engine's among them."""
        return [int(process.name) for process in marked_processes(self.mark)]

    def ray_address(self) -> str:
        """Address of the service's own Ray, as its raylet was told."""
        for process in self.processes():
            for argument in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0"):
                if argument.startswith(b"--gcs-address="):
                    return argument.partition(b"=")[2].decode()
        raise AssertionError("no process of the service was told the address of its Ray")

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 90) -> list[int]:
        """Ask it to stop as Ctrl-C does; the processes that are still there after `timeout_s`."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if not left:
            self.process.wait(timeout=10)  # a zombie is no living process: fetch its exit code
        return left

    def kill(self) -> None:
        """Whatever happens, a test leaves nothing running."""
        kill_marked(self.mark)
        self.process.wait(timeout=30)


_running: list[ServiceProcess] = []


@pytest.fixture(scope="session")
def start_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServiceProcess]]:
    """Starts services from configurations (a mapping as in the YAML); none outlives its room's tests."""

    def start(config: dict[str, Any], wait: bool = True, cluster: FakeNodesCluster | None = None) -> ServiceProcess:
        service = ServiceProcess(config, tmp_path_factory.mktemp("service"), cluster)
        _running.append(service)
        return service.wait_ready() if wait else service

    yield start
    _end_services()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A service ends with the last test of its room: two cores are too few for idle engines beside busy ones."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _end_services()


def _end_services() -> None:
    while _running:
        service = _running.pop()
        if service.stop(timeout_s=30):
            service.kill()
